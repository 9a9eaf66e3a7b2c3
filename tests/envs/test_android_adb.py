"""The client of adb's server protocol, against a server written beside the tests, and what an action becomes on the device."""

import base64
import io
import random
import socket
import subprocess
import threading
import time

import numpy as np
import pytest
from adb_device import IME, USUAL_IME, ServerDouble, Shell, sent
from PIL import Image

from core.schema import Action
from envs import adb, android
from envs.actions import parse
from envs.errors import BadFrame, Deadline, ResetFailed
from envs.handset import Handset, Untypable, decode_png, decode_raw, quote, typing


@pytest.fixture
def shell():
  made = Shell()
  yield made
  made.ended.set()


@pytest.fixture
def server(shell, tmp_path):
  with ServerDouble(tmp_path / "adb.sock", shell) as made:
    yield made


@pytest.fixture
def device(server):
  return adb.Device(server.address, "double")


@pytest.fixture
def phone(device):
  cfg = android.defaults()
  cfg.update({"wait_seconds": 0.01, "call_seconds": 5.0})
  made = Handset(device, cfg)
  made.prepare()
  return made


def took(seconds):
  """Asserts that what follows ends within its deadline, give or take what a busy machine adds."""

  class Watch:
    def __enter__(self):
      self.began = time.monotonic()

    def __exit__(self, *exc):
      assert seconds * 0.9 <= time.monotonic() - self.began < seconds + 2.5

  return Watch()


# -- the protocol


def test_the_bytes_on_the_socket(tmp_path):
  """A request is its length in four hex digits and its name; read from adb's OVERVIEW.TXT, played by hand."""
  path = str(tmp_path / "s")
  listener, seen = socket.socket(socket.AF_UNIX), []
  listener.bind(path)
  listener.listen(1)

  def play():
    talk, _ = listener.accept()
    for answer in (b"OKAY", b"OKAY" + bytes([1, 2, 0, 0, 0]) + b"hi", bytes([2, 3, 0, 0, 0]) + b"ow!" + bytes([3, 1, 0, 0, 0, 7])):
      if not answer.startswith(bytes([2])):
        seen.append(talk.recv(100))
      talk.sendall(answer)
    talk.close()

  thread = threading.Thread(target=play)
  thread.start()
  assert adb.Device(path, "x-1").run("ls é", 5) == (7, "hi", "ow!")
  thread.join()
  listener.close()
  assert seen == [b"0012host:transport:x-1", b"0012shell,v2,raw:ls \xc3\xa9"]  # 18 bytes each


def test_shell_gives_the_exit_code_and_exec_gives_bytes(device, shell):
  assert device.run("echo 'a  b'", 5) == (0, "a  b\n", "")
  with pytest.raises(adb.DeviceFault, match="double: nonsense ended with 127: .*not found"):
    device.shell("nonsense", 5)
  assert len(device.exec_out("screencap", 5)) == 16 + 96 * 160 * 4
  with pytest.raises(adb.DeviceFault, match="more than 1000 bytes"):
    device.exec_out("screencap", 5, most=1000)
  assert device.shell("echo " + "x" * 60_000, 5) == "x" * 60_000 + "\n"
  with pytest.raises(ValueError, match="65535 at most"):
    device.shell("x" * 70_000, 5)


def test_each_way_to_fail_has_its_own_cause_within_its_deadline(server, shell, device):
  shell.hang = ("screencap",)
  with took(0.4), pytest.raises(adb.DeviceHung, match="double: screencap: no answer within 0.4 s"):
    device.exec_out("screencap", 0.4)
  assert issubclass(adb.DeviceHung, Deadline)
  server.state = "offline"
  with pytest.raises(adb.DeviceLost, match="device offline"):
    device.shell("echo", 5)
  with took(0.3), pytest.raises(adb.DeviceLost, match="not ready within 0.3 s: offline"):
    device.attach(0.3)
  with pytest.raises(adb.DeviceLost, match="not found"):
    adb.Device(server.address, "other").shell("echo", 5)
  server.state = "device"
  device.attach(1)
  threading.Timer(0.3, server.drop).start()
  with pytest.raises(adb.DeviceLost, match="the connection ended after 0 bytes"):  # the server still answers: the device broke off
    device.shell("screencap", 5)
  server.mute = True
  with took(0.3 + adb.PROBE_SECONDS), pytest.raises(adb.AdbServerLost, match="did not answer"):
    device.shell("echo", 0.3)
  server.close()
  with pytest.raises(adb.AdbServerLost, match="no adb server|the connection ended"):
    device.shell("echo", 5)


def test_a_device_that_is_offline_for_a_moment_is_waited_for(server, device):
  server.state = "offline"
  threading.Timer(0.4, lambda: setattr(server, "state", "device")).start()
  device.attach(10)
  assert device.shell("echo back", 5) == "back\n"


def test_no_descriptor_is_left_by_what_fails(server, shell, device):
  import os

  server.state = "offline"
  before = len(os.listdir("/proc/self/fd"))
  for _ in range(20):
    with pytest.raises(adb.DeviceLost):
      device.shell("echo", 5)
  time.sleep(0.1)
  assert len(os.listdir("/proc/self/fd")) <= before + 1


# -- quoting and typing


def through_sh(commands):
  """What `input` would be given, by a real POSIX shell: a list of argument lists."""
  script = r"""input() { printf '%s\0' "$@"; printf '\1\0'; }""" + "\n" + " && ".join(commands)
  out = subprocess.run(["sh", "-c", script], capture_output=True, check=True, timeout=60).stdout.decode()
  return [call.split("\0")[:-1] for call in out.split("\1\0")[:-1]]


def arrives(calls):
  return "".join(sent(c[1]) if c[0] == "text" else {"66": "\n", "61": "\t"}[c[1]] for c in calls)


def test_any_ascii_text_arrives_through_a_real_shell_unchanged():
  rng = random.Random(0)
  printable = "".join(map(chr, range(32, 127)))
  texts = [
    printable,
    "%s",
    "%%s",
    "%s%s",
    "a%sb",
    "% s",
    "%",
    "-n",
    "--help",
    "'",
    '"',
    "$(reboot)",
    "`id`",
    "a;b|c&d>e",
    "\\",
    "~",
    "#x",
    " ",
    "!!",
  ]
  pieces = list(printable) + ["%s", "%", "s", "'", "\\", "$(x)", "\n", "\t", "&&", " "]
  texts += ["".join(rng.choice(pieces) for _ in range(rng.randrange(1, 30))) for _ in range(300)]
  commands, ends = [], []
  for text in texts:
    commands += typing(text)
    ends.append(len(commands))
  calls = through_sh(commands)
  for text, begin, end in zip(texts, [0, *ends], ends):
    assert arrives(calls[begin:end]) == text


def test_quoted_words_survive_the_double_too():
  rng = random.Random(1)
  for _ in range(300):
    word = "".join(rng.choice("ab '\"\\$;&|é\n*") for _ in range(rng.randrange(8)))
    assert Shell().run(f"echo {quote(word)}")[1].decode() == word + "\n"


def test_typing_through_the_device(phone, shell):
  for text in ("".join(map(chr, range(32, 127))), "naïve 你好 🙂 e\u0301", "%s & 'x'", "two\nlines\tand a tab"):
    phone.act(Action("type", {"text": text, "enter": False}, {}, "phone"))
    assert shell.typed[-1] == text
  assert shell.ime == USUAL_IME  # given back after each text that was not ASCII
  phone.act(Action("type", {"text": "x" * 40_000, "enter": True}, {}, "phone"))  # several lines
  assert "".join(shell.typed[4:]) == "x" * 40_000 + "\n" and len(shell.typed) == 6


def test_text_that_cannot_be_typed_is_refused_before_anything_is_done(device):
  cfg = android.defaults()
  bare = Shell(has_ime=False)
  with ServerDouble(device.address + "2", bare) as server:
    phone = Handset(adb.Device(server.address, "double"), cfg)
    phone.prepare()
    lines = len(bare.lines)
    with pytest.raises(Untypable, match="not ASCII, and com.android.adbkeyboard/.AdbIME is not installed"):
      phone.act(Action("type", {"text": "é", "enter": False}, {}, "phone"))
    with pytest.raises(Untypable, match="no application 'Files'"):
      phone.act(Action("open_app", {"app": "Files"}, {}, "androidworld"))
    assert len(bare.lines) == lines


def test_one_action_is_one_shell_line(phone, shell):
  size = (1080, 2400)
  wanted = {
    "tap(0.50, 0.22)": "input tap 540 528",
    "swipe(0, 0, 1, 1)": "input swipe 0 0 1079 2399 300",
    "press(HOME)": "input keyevent 3",
    "press(BACK)": "input keyevent 4",
    "press(ENTER)": "input keyevent 66",
    'type("a b\\n")': "input text a%sb && input keyevent 66",
    "wait()": "sleep 0.01",
  }
  for text, line in wanted.items():
    phone.act(parse(text, "phone", size))
    assert shell.lines[-1] == line
  phone.act(parse('{"action_type": "input_text", "text": "it\'s", "x": 3, "y": 4}', "androidworld", size))
  assert shell.lines[-1] == "input tap 3 4 && sleep 1 && input text 'it'\"'\"'s' && input keyevent 66"
  message = base64.b64encode("é".encode()).decode()
  phone.act(parse('type("é")', "phone", size))
  assert (
    shell.lines[-1] == f"ime set {IME} && sleep 0.5 && am broadcast -a ADB_INPUT_B64 --es msg {message} && sleep 0.2 && ime set {USUAL_IME}"
  )


# -- screens and activities


def test_raw_screens_by_hand():
  pixels = bytes([1, 2, 3, 255, 4, 5, 6, 0])  # two pixels, RGBA
  head = bytes([2, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0])
  for data in (head + pixels, head + bytes([1, 0, 0, 0]) + pixels):  # before and since Android 9
    assert decode_raw(data).tolist() == [[[1, 2, 3], [4, 5, 6]]]
    for cut in range(len(data)):
      if len(data[:cut]) not in (12 + 8, 16 + 8):
        with pytest.raises(BadFrame):
          decode_raw(data[:cut])
  for bad in (b"", b"screencap: not found", bytes([2, 0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0]) + pixels, bytes(12)):
    with pytest.raises(BadFrame, match="raw screencap"):
      decode_raw(bad)


def test_png_screens():
  rng = np.random.default_rng(0)
  pixels = rng.integers(0, 256, (40, 30, 3)).astype(np.uint8)
  file = io.BytesIO()
  Image.fromarray(pixels).convert("RGBA").save(file, "PNG")
  data = file.getvalue()
  assert (decode_png(data) == pixels).all()
  for cut in (0, 7, 8, 33, len(data) // 2, len(data) - 20):
    with pytest.raises(BadFrame, match="no whole PNG"):
      decode_png(data[:cut])


@pytest.mark.parametrize(
  "told, wanted",
  [
    ("    mResumedActivity: ActivityRecord{a1b2 u0 com.android.settings/.Settings t12}\n", "com.android.settings/.Settings"),
    ("  topResumedActivity=ActivityRecord{a1 u10 a.b/c.D$E t1 f}}\n  ResumedActivity: ActivityRecord{x u0 z/.Z t2}\n", "a.b/c.D$E"),
    ("  ResumedActivity: ActivityRecord{e5 u0 com.android.chrome/org.chromium.chrome.browser.ChromeTabbedActivity t7}\n",
     "com.android.chrome/org.chromium.chrome.browser.ChromeTabbedActivity"),
    ("  mLastPausedActivity: ActivityRecord{e5 u0 a/.B t7}\n", ""),
    ("", ""),
  ],
)  # fmt: skip
def test_what_is_on_top(phone, told, wanted, monkeypatch):
  monkeypatch.setattr(phone, "shell", lambda line: told)
  assert phone.on_top() == wanted


def test_starting_and_cleaning(phone, shell):
  phone.start({"activity": "a.b/.C", "extras": {"k": "v 'w'"}})
  assert shell.lines[-1] == "am start -W -n a.b/.C --es k 'v '\"'\"'w'\"'\"''" and phone.on_top() == "a.b/.C"
  with pytest.raises(ResetFailed, match="does not exist"):
    phone.start({"activity": "no.such/.Thing"})
  phone.clean(["a.b", "x; reboot"], ["c.d"])
  assert shell.lines[-3:] == [
    "input keyevent 224; wm dismiss-keyguard; am force-stop a.b; am force-stop 'x; reboot'", "pm clear c.d", "input keyevent 3"
  ]  # fmt: skip
  phone.health()
  shell.command = lambda words, inputs: (0, b"\n", b"")
  with pytest.raises(adb.DeviceFault, match="sys.boot_completed is ''"):
    phone.health()
