"""What an agent's action is on an Android device: shell lines, screenshots, and what is on top.

One action is one shell line, sent once. Text of the model reaches the device's shell only between quotes (`quote`), as `input text` or
in base64. Needs Android 7 or later; written against the documented tools (input, screencap, am, pm, ime, dumpsys).
"""

from __future__ import annotations

import base64
import io
import re
import shlex

import ml_collections
import numpy as np
from PIL import Image

from core.schema import Action
from envs.adb import Device, DeviceFault
from envs.errors import BadFrame, ResetFailed

KEYCODES = {"HOME": 3, "BACK": 4, "ENTER": 66}
TAB, DEL, MOVE_END, WAKEUP = 61, 67, 123, 224
CLEARED = 250  # characters that `clear` takes away
MOST_LINE = 30_000  # bytes of one shell line; what is longer goes in several, adb takes 65535
MOST_WORD = 4000  # characters of one `input text`; a quote among them takes five bytes
RGBA, RGBX = 1, 2  # pixel formats of a raw screencap, four bytes each
ON_TOP = re.compile(
  r"(?:topResumedActivity=|mResumedActivity: |^\s*ResumedActivity: )ActivityRecord\{\S+ \S+ ([\w.]+/[\w.$]+)", re.MULTILINE
)


class Untypable(ValueError):
  """Text, or an application's name, that this device has no way to take. The policy's doing, not a fault."""


def quote(text: str) -> str:
  """One word of the device's shell, whatever is in it."""
  return shlex.quote(text)


def typing(text: str) -> list[str]:
  """The `input` commands that type printable ASCII, tabs and newlines.

  `input text` turns %s into a space, so spaces are written so and a %s that is meant is typed in two halves.
  """
  out = []
  for part in re.findall(r"[\n\t]|[^\n\t]+", text):
    if part in "\n\t":
      out.append(f"input keyevent {KEYCODES['ENTER'] if part == chr(10) else TAB}")
    else:
      halves = [half[i : i + MOST_WORD] for half in re.split("(?<=%)(?=s)", part) for i in range(0, len(half), MOST_WORD)]
      out += [f"input text {quote(half.replace(' ', '%s'))}" for half in halves]
  return out


def broadcast(text: str, ime: str, before: str) -> list[str]:
  """The commands that type any text through an input method that takes base64 (ADBKeyBoard), and go back to the one before."""
  message = base64.b64encode(text.encode()).decode()
  back = [f"ime set {quote(before)}"] if before else []
  return [f"ime set {quote(ime)}", "sleep 0.5", f"am broadcast -a ADB_INPUT_B64 --es msg {message}", "sleep 0.2", *back]


def decode_raw(data: bytes) -> np.ndarray:
  """A raw screencap as uint8 [H, W, 3]: width, height and format (and since Android 9 a colour space), then four bytes a pixel."""
  width, height, kind = (int.from_bytes(data[i : i + 4], "little") for i in (0, 4, 8))
  size = width * height * 4
  if len(data) < 12 or kind not in (RGBA, RGBX) or len(data) not in (12 + size, 16 + size) or not size:
    shape = f"{width} x {height} of format {kind}" if len(data) >= 12 else repr(data[:40])
    raise BadFrame(f"a raw screencap of {len(data)} bytes says {shape}: torn, or not a picture (env.screenshot='png' may help)")
  return np.frombuffer(data, np.uint8, size, len(data) - size).reshape(height, width, 4)[..., :3].copy()


def decode_png(data: bytes) -> np.ndarray:
  """A PNG screencap as uint8 [H, W, 3]."""
  if data[-8:-4] != b"IEND":  # Pillow is content with less
    raise BadFrame(f"a screencap of {len(data)} bytes is no whole PNG: {data[:40]!r} ... {data[-12:]!r}")
  try:
    with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
      return np.asarray(image.convert("RGB"))
  except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # what Pillow raises for what is torn, or huge
    raise BadFrame(f"a screencap of {len(data)} bytes is no whole PNG: {error}"[:300]) from None


class Handset:
  """One device and what can be done with it. cfg: the knobs of envs.android."""

  def __init__(self, device: Device, cfg: ml_collections.ConfigDict):
    self.device, self.cfg = device, cfg
    self.ime, self.usual_ime = "", ""

  def shell(self, line: str, seconds: float | None = None) -> str:
    return self.device.shell(line, seconds or self.cfg.call_seconds)

  def prepare(self) -> None:
    """Once for a device that has just come up: no lock screen, no animations, upright, and which input methods it has."""
    for name in ("window_animation_scale", "transition_animation_scale", "animator_duration_scale"):
      self.shell(f"settings put global {name} 0")
    self.shell("settings put system accelerometer_rotation 0; settings put system user_rotation 0")
    self.shell("svc power stayon true")
    there = self.shell("ime list -s -a").split()
    self.ime = self.cfg.unicode_ime if self.cfg.unicode_ime in there else ""
    self.usual_ime = self.shell("settings get secure default_input_method").strip()
    self.usual_ime = self.usual_ime if "/" in self.usual_ime else ""
    if self.ime:
      self.shell(f"ime enable {quote(self.ime)}")

  def screenshot(self, seconds: float | None = None) -> np.ndarray:
    """uint8 [H, W, 3] in device pixels; BadFrame if it is torn."""
    raw = self.cfg.screenshot == "raw"
    data = self.device.exec_out("screencap" if raw else "screencap -p", seconds or self.cfg.call_seconds)
    return decode_raw(data) if raw else decode_png(data)

  def commands(self, action: Action) -> list[str]:
    """Shell commands of one action; Untypable if this device cannot do it."""
    args, kind = action.args, action.kind
    at = " ".join(str(int(v)) for v in args.get("point", ()))
    if kind in ("tap", "double_tap"):
      return [f"input tap {at}"] * (1 if kind == "tap" else 2)
    if kind == "long_press":
      return [f"input swipe {at} {at} 1000"]
    if kind == "swipe":
      return [f"input swipe {' '.join(str(int(v)) for v in (*args['start'], *args['end']))} {self.cfg.swipe_ms}"]
    if kind == "type":
      first = [f"input tap {at}", "sleep 1"] if at else []
      first += [f"input keyevent {MOVE_END}{f' {DEL}' * CLEARED}"] if args.get("clear") else []
      return first + self._typed(args["text"]) + ([f"input keyevent {KEYCODES['ENTER']}"] if args["enter"] else [])
    if kind == "press":
      return [f"input keyevent {KEYCODES[args['key']]}"]
    if kind == "wait":
      return [f"sleep {self.cfg.wait_seconds:g}"]
    if kind == "open_app":
      package = {name.lower(): package for name, package in self.cfg.apps.items()}.get(args["app"].lower())
      if package is None:
        raise Untypable(f"no application {args['app']!r:.60} in env.apps")
      return [f"monkey -p {quote(package)} -c android.intent.category.LAUNCHER 1"]
    raise ValueError(f"an Android device cannot do {kind!r}")

  def _typed(self, text: str) -> list[str]:
    if all(" " <= c <= "~" or c in "\n\t" for c in text):
      return typing(text)
    if not self.ime:
      raise Untypable(f"{text!r:.60} is not ASCII, and {self.cfg.unicode_ime or 'env.unicode_ime'} is not installed on this device")
    return broadcast(text, self.ime, self.usual_ime)

  def act(self, action: Action) -> None:
    """Carries an action out, once. Untypable before anything is done."""
    commands = self.commands(action)
    lines, seconds = [""], self.cfg.call_seconds + self.cfg.wait_seconds + 0.02 * len(action.args.get("text", ""))
    for command in commands:
      longer = f"{lines[-1]} && {command}" if lines[-1] else command
      lines = [*lines[:-1], longer] if len(longer.encode()) <= MOST_LINE else [*lines, command]
    for line in filter(None, lines):
      self.shell(line, seconds)

  def on_top(self) -> str:
    """package/activity of what is in front, "" if nothing is."""
    found = ON_TOP.search(self.shell("dumpsys activity activities"))
    return found[1] if found else ""

  def start(self, what: dict) -> None:
    """Starts {"activity": "package/.Name"}, {"url": "https://..."} or {"package": name}; text for it under "extras"."""
    extras = "".join(f" --es {quote(k)} {quote(v)}" for k, v in what.get("extras", {}).items())
    if "activity" in what:
      line = f"am start -W -n {quote(what['activity'])}{extras}"
    elif "url" in what:
      line = f"am start -W -a android.intent.action.VIEW -d {quote(what['url'])}{extras}"
    else:
      line = f"monkey -p {quote(what['package'])} -c android.intent.category.LAUNCHER 1"
    try:
      told = self.shell(line, self.cfg.start_seconds)
    except DeviceFault as fault:
      raise ResetFailed(str(fault)) from None
    if "Error" in told or "No activities found" in told:
      raise ResetFailed(f"{line[:100]}: {told.strip()[:300]}")

  def clean(self, stop: list[str], clear: list[str]) -> None:
    """Awake, unlocked, these packages stopped, those without their data, the home screen on top."""
    lines = [f"input keyevent {WAKEUP}", "wm dismiss-keyguard", *(f"am force-stop {quote(p)}" for p in stop)]
    self.shell("; ".join(lines))
    for package in clear:
      told = self.shell(f"pm clear {quote(package)}")
      if "Success" not in told:
        raise ResetFailed(f"pm clear {package}: {told.strip()[:200]}")
    self.shell(f"input keyevent {KEYCODES['HOME']}")

  def health(self) -> None:
    """DeviceLost, DeviceHung or DeviceFault if the device is not there, or Android in it is not up."""
    if (told := self.shell("getprop sys.boot_completed").strip()) != "1":
      raise DeviceFault(f"{self.device.serial}: sys.boot_completed is {told!r}, wanted 1")
