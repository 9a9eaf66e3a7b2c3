"""A Chromium of one's own: its process, and a client of the DevTools protocol over two pipes. Nothing listens anywhere.

The pipes are FIFOs in a private folder that also holds the browser's whole user data; when this process dies the browser sees the
pipe's end and leaves. Messages are JSON, a zero byte after each: https://chromedevtools.github.io/devtools-protocol/ .
"""

from __future__ import annotations

import json
import os
import pathlib
import select
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

from envs.children import Nest
from envs.errors import BootDeadline, Deadline, InfraError

BINARIES = ("/usr/lib/chromium/chromium-headless-shell", "/usr/lib/chromium/chromium")  # behind Debian's wrappers, which add flags
NOWHERE = "blocked.invalid:9"
MOST_BYTES = 1 << 28
FLAGS = (
  "--headless", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--hide-scrollbars", "--mute-audio",
  "--disable-gpu", "--disable-breakpad", "--disable-extensions", "--disable-sync", "--disable-background-networking",
  "--disable-component-update", "--disable-default-apps", "--disable-domain-reliability", "--disable-client-side-phishing-detection",
  "--disable-background-timer-throttling", "--disable-backgrounding-occluded-windows", "--disable-renderer-backgrounding",
  "--disable-hang-monitor", "--disable-dev-shm-usage", "--disable-site-isolation-trials", "--disable-popup-blocking",
  "--password-store=basic", "--use-mock-keychain", "--lang=en-US", "--force-color-profile=srgb", "--font-render-hinting=none",
  "--force-webrtc-ip-handling-policy=disable_non_proxied_udp", "--disable-quic", "--allow-pre-commit-input",
  "--disable-features=IsolateOrigins,site-per-process,Translate,OptimizationHints,PaintHolding,MediaRouter,DialMediaRouteProvider,HttpsUpgrades",
)  # fmt: skip


class BrowserDied(InfraError):
  """The browser's process ended, or its pipe closed."""


class BrowserHung(Deadline):
  """The browser did not answer a call in time."""


class PageCrashed(InfraError):
  """The page's renderer is gone."""


class Refused(RuntimeError):
  """The browser answered a call with an error. message: its words."""


class PageClosed(Refused):
  """The page went away while a call to it was under way."""


def find_binary(name: str) -> str:
  """The browser's program: a path, a name on PATH, or "" for the first of BINARIES that is installed."""
  for known in BINARIES if not name else [name]:
    if found := shutil.which(known):
      return found
  raise FileNotFoundError(f"env.browser is {name!r}: no such program; install chromium-headless-shell or chromium (make system)")


def fence(allowed: Sequence[str]) -> list[str]:
  """Flags that leave only these host:port reachable. Everything else goes to a proxy that has no address, and no name is looked up."""
  hosts = sorted({place.rpartition(":")[0] for place in allowed})
  rules = ", ".join(["MAP * ~NOTFOUND", *(f"EXCLUDE {host}" for host in hosts)])
  bypass = ";".join(["<-loopback>", *allowed])
  return [f"--host-resolver-rules={rules}", f"--proxy-server=http://{NOWHERE}", f"--proxy-bypass-list={bypass}"]


class Browser:
  """One browser process. allowed: the host:port that its pages may reach, or None for the whole network.

  on_event(message): called for every event, in the order they came, while a call waits or in `pump`; it may `post` but not `call`.
  capped: at most 60 frames a second, as on a screen; else a screenshot does not wait for the next frame's time.
  """

  def __init__(
    self, binary: str, allowed: Sequence[str] | None, *, sandbox: bool, capped: bool, boot_seconds: float, flags: Sequence[str] = (),
    on_event: Callable[[dict], None] = lambda message: None,
  ):  # fmt: skip
    self.on_event, self._id, self._buffer, self._answers = on_event, 0, bytearray(), {}
    self._lost: set[int] = set()
    self.nest = Nest("chromium")
    folder = self.nest.folder
    for name in ("in", "out"):
      os.mkfifo(folder / name, 0o600)
    self._reads = os.open(folder / "out", os.O_RDONLY | os.O_NONBLOCK)
    self._writes = os.open(folder / "in", os.O_RDWR | os.O_NONBLOCK)  # read-write: opening does not wait for the browser
    argv = [binary, *FLAGS, f"--user-data-dir={folder / 'user'}", *flags, *(fence(allowed) if allowed is not None else ())]
    argv += [] if sandbox else ["--no-sandbox"]
    argv += [] if capped else ["--disable-frame-rate-limit"]
    home = {"HOME": str(folder), "TMPDIR": str(folder), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TZ": "UTC"}
    home["DBUS_SESSION_BUS_ADDRESS"] = "unix:path=/nonexistent"
    try:
      self.child = self.nest.start(["/bin/sh", "-c", 'exec "$@" 3<in 4>out', "sh", *argv, "about:blank"], home)
      try:
        self.version = self.call("Browser.getVersion", seconds=boot_seconds)["product"]
      except BrowserHung:
        raise BootDeadline(f"{binary} said nothing for {boot_seconds:g} s; its last lines: {self.last_words()}") from None
    except BaseException:
      self.close()
      raise

  def last_words(self) -> str:
    return " | ".join(line for line in self.child.tail(60) if "dbus" not in line)[-1500:]

  def call(self, method: str, params: dict | None = None, session: str | None = None, *, seconds: float) -> dict:
    """The result of one call. Refused, BrowserHung (no answer in time) or BrowserDied."""
    return self.answers([self.post(method, params, session)], seconds, method)[0]

  def post(self, method: str, params: dict | None = None, session: str | None = None) -> int:
    """Sends a call and returns its number for `answers`, without waiting."""
    self._id += 1
    message = {"id": self._id, "method": method, "params": params or {}} | ({"sessionId": session} if session else {})
    self._send(json.dumps(message).encode() + b"\0")
    return self._id

  def forget(self, *numbers: int) -> None:
    """Answers to these are of no interest."""
    self._lost.update(n for n in numbers if self._answers.pop(n, None) is None)

  def answers(self, numbers: Sequence[int], seconds: float, what: str, gone: Callable[[], bool] = lambda: False) -> list[dict]:
    """The results of posted calls, all within so many seconds. gone: whether who was asked is not there any more (PageClosed)."""
    until = time.monotonic() + seconds
    while any(number not in self._answers for number in numbers):
      if gone():
        self.forget(*numbers)
        raise PageClosed(what)
      if not self._receive(until - time.monotonic()):
        self.forget(*numbers)
        raise BrowserHung(f"no answer to {what} within {seconds:g} s")
    return [_result(self._answers.pop(number), what) for number in numbers]

  def first(self, numbers: list[int], seconds: float, what: str, gone: Callable[[], bool] = lambda: False) -> dict | None:
    """The newest result there is of posted calls, waiting at most so many seconds for one; None if none has come. Its number is taken out
    of `numbers`; the others are still on their way until they are forgotten."""
    until = time.monotonic() + seconds
    while not (there := [number for number in numbers if number in self._answers]):
      if gone():
        raise PageClosed(what)
      if not self._receive(until - time.monotonic()):
        return None
    numbers.remove(there[-1])
    return _result(self._answers.pop(there[-1]), what)

  def pump(self, seconds: float) -> bool:
    """Takes in what has come, waiting at most so long for it; whether anything came."""
    return self._receive(seconds)

  def _send(self, data: bytes) -> None:
    view, until = memoryview(data), time.monotonic() + 10
    while view:
      try:
        view = view[os.write(self._writes, view) :]
      except BlockingIOError:
        if not self.child.running():
          raise BrowserDied(f"the browser is gone ({self.child.fate()})") from None
        if time.monotonic() > until:
          raise BrowserHung("the browser reads nothing") from None
        self._receive(0.01)

  def _receive(self, seconds: float) -> bool:
    """Reads what is there, or comes within so many seconds; False if nothing did."""
    watched = select.poll()
    watched.register(self._reads, select.POLLIN)
    until = time.monotonic() + seconds
    while True:
      ready = watched.poll(max(0.0, min(until - time.monotonic(), 0.5)) * 1000)
      data = os.read(self._reads, 1 << 20) if ready and ready[0][1] & select.POLLIN else b""
      if data:
        break
      if ready or not self.child.running():
        raise BrowserDied(f"the browser is gone ({self.child.fate()}); its last lines: {self.last_words()}")
      if time.monotonic() >= until:
        return False
    start = len(self._buffer)
    self._buffer += data
    if len(self._buffer) > MOST_BYTES:
      raise BrowserHung(f"a message of more than {MOST_BYTES} bytes")
    while (end := self._buffer.find(b"\0", start)) >= 0:
      message = json.loads(self._buffer[:end])
      del self._buffer[: end + 1]
      start = 0
      self._take(message)
    return True

  def _take(self, message: dict[str, Any]) -> None:
    if "id" not in message:
      self.on_event(message)
    elif message["id"] in self._lost:
      self._lost.discard(message["id"])
    else:
      self._answers[message["id"]] = message

  def close(self) -> None:
    self.nest.close()
    for descriptor in (self._reads, self._writes):
      if descriptor >= 0:
        os.close(descriptor)
    self._reads = self._writes = -1

  @property
  def folder(self) -> pathlib.Path:
    return self.nest.folder


def _result(answer: dict, what: str) -> dict:
  """The result in an answer; Refused if it holds an error."""
  if "error" in answer:
    raise Refused(f"{what}: {answer['error'].get('message', answer['error'])}"[:500])
  return answer["result"]
