"""The HTTP API of a desktop guest: OSWorld's server (xlang-ai/OSWorld, desktop_env/server) and the one of our own images.

One client for both. Every call has a deadline over the whole exchange, connecting and a trickling answer included, and nothing is
ever sent twice: whether a request that went unanswered was carried out is not known. A file or a window that is not there is an answer
(None, False), so that a failed try is never taken for a broken computer, nor a broken computer for a failed try.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import secrets
import socket
import threading
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from envs.errors import Deadline, InfraError
from envs.handset import decode_png

SECONDS = 15.0  # of a call that names no deadline
MOST_BYTES = 256 << 20
SPARE = 2.0  # seconds by which a command in the guest is given up before its call is


class GuestLost(InfraError):
  """Nobody answers at the guest's address, or the connection broke in the middle."""


class GuestHung(Deadline):
  """The guest's server took a request and did not answer in time."""


class GuestFault(InfraError):
  """The guest's server answered with an error, or with what its API does not say."""


class TooMuch(GuestFault):
  """What was asked for is there and larger than anything that is looked at, MOST_BYTES."""


class CommandTimeout(GuestFault):
  """The guest's server gave up a command that took too long."""


class Reply(NamedTuple):
  """status: HTTP's; body: as it came; date: the guest's clock, as the head of an answer tells it."""

  status: int
  body: bytes
  date: str = ""


class Ran(NamedTuple):
  """A command that was run in the guest to its end."""

  output: str
  error: str
  returncode: int


class Guest:
  """A client of one guest. host, port: where its server is reached; seconds: of a call that is given no deadline of its own.

  Every method takes `seconds` and raises GuestLost, GuestHung or GuestFault. Paths are the guest's; a leading ~ is its user's home.
  """

  def __init__(self, port: int, host: str = "127.0.0.1", seconds: float = SECONDS):
    self.host, self.port, self.seconds = host, port, seconds

  # -- what is seen

  def screenshot(self, seconds: float | None = None) -> np.ndarray:
    """uint8 [H, W, 3], with the pointer; BadFrame if it is torn. For guests whose screen the host does not see."""
    return decode_png(self._ask("GET", "/screenshot", seconds).body)

  def accessibility(self, seconds: float | None = None) -> str:
    """The accessibility tree of all applications as XML; can take seconds."""
    return self._json("GET", "/accessibility", seconds, "AT", str)

  def terminal(self, seconds: float | None = None) -> str | None:
    """The text in the terminal that is open; None where none is."""
    reply = self._ask("GET", "/terminal", seconds, fine=(200, 500))
    return None if reply.status == 500 else self._said(reply, "/terminal", "output", (str, type(None)))

  def platform(self, seconds: float | None = None) -> str:
    """ "Linux" """
    return self._ask("GET", "/platform", seconds).body.decode(errors="replace").strip()

  def screen_size(self, seconds: float | None = None) -> tuple[int, int]:
    """(width, height) in pixels."""
    said = self._object(self._ask("POST", "/screen_size", seconds), "/screen_size")
    return self._pair([said.get("width"), said.get("height")], "/screen_size")

  def window_size(self, app_class: str, seconds: float | None = None) -> tuple[int, int] | None:
    """(width, height) of the window of that class; None where there is none."""
    reply = self._ask("POST", "/window_size", seconds, form={"app_class_name": app_class}, fine=(200, 404, 500))
    said = self._object(reply, "/window_size") if reply.status == 200 else None
    return self._pair([said.get("width"), said.get("height")], "/window_size") if said else None

  def cursor_position(self, seconds: float | None = None) -> tuple[int, int]:
    """(x, y) of the pointer."""
    return self._pair(self._parsed(self._ask("GET", "/cursor_position", seconds), "/cursor_position"), "/cursor_position")

  def desktop_path(self, seconds: float | None = None) -> str:
    """The folder that the desktop shows."""
    return self._json("POST", "/desktop_path", seconds, "desktop_path", str)

  def wallpaper(self, seconds: float | None = None) -> bytes | None:
    """The picture behind the desktop, as a file; None where there is none."""
    reply = self._ask("POST", "/wallpaper", seconds, fine=(200, 404))
    return reply.body if reply.status == 200 else None

  def list_directory(self, path: str, seconds: float | None = None) -> dict | None:
    """{type, name, children} of a folder and all below it; None where there is none."""
    reply = self._ask("POST", "/list_directory", seconds, value={"path": path}, fine=(200, 400, 404))
    return self._said(reply, "/list_directory", "directory_tree", dict) if reply.status == 200 else None

  def file(self, path: str, seconds: float | None = None) -> bytes | None:
    """What is in a file; None where there is none, or none that the guest's user may read: an agent can take that right away."""
    reply = self._ask("POST", "/file", seconds, form={"file_path": path}, fine=(200, 404, 500))
    if reply.status == 500 and b"Permission denied" not in reply.body:
      raise self._unfit("/file", reply)
    return reply.body if reply.status == 200 else None

  def clock(self, seconds: float | None = None) -> float:
    """The guest's idea of the time, whole seconds since 1970."""
    date = self._ask("GET", "/platform", seconds).date
    try:
      return email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
      raise GuestFault(f"{self}/platform: its answer is dated {date!r:.100}, wanted HTTP's Date") from None

  # -- what is done

  def execute(self, command: Sequence[str] | str, shell: bool = False, seconds: float | None = None) -> Ran:
    """Runs a command to its end. command: words, or with shell=True a line for the guest's shell. CommandTimeout if it does not end."""
    body = {"command": command if isinstance(command, str) else list(command), "shell": shell}
    return self._run("/execute", body, seconds)

  def execute_with_verification(
    self, command: Sequence[str] | str, verification: dict, shell: bool = False, wait: float = 10.0, every: float = 1.0, seconds=None
  ) -> Ran | None:
    """Runs a command and waits until what it should bring about is there: {"window_exists": name} or {"command_success": line}. None if
    it was not within `wait` seconds."""
    body = {"command": command if isinstance(command, str) else list(command), "shell": shell, "verification": verification}
    body |= {"max_wait_time": wait, "check_interval": every}
    return self._run("/execute_with_verification", body, seconds, unverified=True)

  def run_python(self, code: str, seconds: float | None = None) -> Ran:
    """Runs a Python program in the guest; OSWorld's own server gives it 30 s at most."""
    limit = self._limit(seconds)
    reply = self._ask("POST", "/run_python", limit, value={"code": code, "timeout": max(limit - SPARE, 0.5 * limit)}, fine=(200, 500))
    said = self._object(reply, "/run_python")
    if reply.status != 200 and any(words in str(said).lower() for words in ("timed out", "timeout")):
      raise CommandTimeout(f"{self}/run_python: {str(said)[:300]}")
    return self._ran(said, said.get("return_code", 0 if reply.status == 200 else 1), "/run_python")

  def run_bash(self, script: str, folder: str | None = None, seconds: float | None = None) -> Ran:
    """Runs a bash script in the guest; its errors come with its output."""
    limit = self._limit(seconds)
    body = {"script": script, "timeout": max(limit - SPARE, 1.0), "working_dir": folder}
    said = self._object(self._ask("POST", "/run_bash_script", limit, value=body, fine=(200, 500)), "/run_bash_script")
    if said.get("returncode") == -1 and "timed out" in str(said.get("output", "")) + str(said.get("error", "")):
      raise CommandTimeout(f"{self}/run_bash_script: {str(said)[:300]}")
    return self._ran(said, said.get("returncode"), "/run_bash_script")

  def launch(self, command: Sequence[str] | str, shell: bool = False, seconds: float | None = None) -> None:
    """Starts a program and does not wait for it; GuestFault if it cannot be started."""
    self._ask("POST", "/setup/launch", seconds, value={"command": command if isinstance(command, str) else list(command), "shell": shell})

  def upload(self, path: str, data: bytes, seconds: float | None = None) -> None:
    """Puts a file into the guest, and the folders above it."""
    mark = secrets.token_hex(16)
    head = f'--{mark}\r\nContent-Disposition: form-data; name="file_path"\r\n\r\n{path}\r\n--{mark}\r\nContent-Disposition: form-data; '
    head += f'name="file_data"; filename="{urllib.parse.quote(path.rpartition("/")[2])}"\r\nContent-Type: application/octet-stream\r\n\r\n'
    body = head.encode() + data + f"\r\n--{mark}--\r\n".encode()
    self._ask("POST", "/setup/upload", seconds, body=body, kind=f"multipart/form-data; boundary={mark}")

  def download_file(self, url: str, path: str, seconds: float | None = None) -> None:
    """Has the guest fetch a file by itself, which wants a guest with a network."""
    self._ask("POST", "/setup/download_file", seconds, value={"url": url, "path": path})

  def open_file(self, path: str, seconds: float | None = None) -> bool:
    """Opens a file with its application and waits for the window; False where there is no such file."""
    return self._found("/setup/open_file", {"path": path}, seconds)

  def activate_window(self, name: str, strict: bool = False, by_class: bool = False, seconds: float | None = None) -> bool:
    """Brings a window to the front, by its title (strict: the whole of it) or its class; False where there is none."""
    return self._found("/setup/activate_window", {"window_name": name, "strict": strict, "by_class": by_class}, seconds)

  def close_window(self, name: str, strict: bool = False, by_class: bool = False, seconds: float | None = None) -> bool:
    """Asks a window to close; False where there is none."""
    return self._found("/setup/close_window", {"window_name": name, "strict": strict, "by_class": by_class}, seconds)

  def change_wallpaper(self, path: str, seconds: float | None = None) -> bool:
    """Shows a picture behind the desktop; False where there is no such file."""
    return self._found("/setup/change_wallpaper", {"path": path}, seconds)

  def wait(self, seconds: float, every: float = 0.25) -> None:
    """Until the server answers; the last fault is raised if it does not in time, give or take a second."""
    until = time.monotonic() + seconds
    while True:
      left = until - time.monotonic()
      try:
        self.platform(max(1.0, min(left, 5.0)))
        return
      except InfraError:
        if time.monotonic() + every > until:
          raise
      time.sleep(every)

  # -- the exchange

  def _limit(self, seconds: float | None) -> float:
    return self.seconds if seconds is None else seconds

  def _run(self, route: str, body: dict, seconds: float | None, unverified: bool = False) -> Ran | None:
    limit = self._limit(seconds)
    reply = self._ask("POST", route, limit, value=body | {"timeout": max(limit - SPARE, 0.5 * limit)}, fine=(200, 500))
    said = self._object(reply, route)
    if unverified and said.get("status") == "verification_failed":
      return None
    if reply.status != 200 or said.get("status") != "success":
      message = str(said.get("message", said))
      raise (CommandTimeout if "timed out" in message else GuestFault)(f"{self}{route} of {str(body['command'])[:100]}: {message[:300]}")
    return self._ran(said, said.get("returncode"), route)

  def _ran(self, said: dict, code: Any, route: str) -> Ran:
    output, error = said.get("output") or "", said.get("error") or ""
    if not isinstance(output, str) or not isinstance(error, str) or not isinstance(code, int):
      raise GuestFault(f"{self}{route} said {str(said)[:200]}, wanted output, error and a return code")
    return Ran(output, error, code)

  def _found(self, route: str, body: dict, seconds: float | None) -> bool:
    return self._ask("POST", route, seconds, value=body, fine=(200, 404)).status == 200

  def _ask(
    self, method: str, route: str, seconds: float | None, *, value: Any = None, form: dict | None = None, body: bytes | None = None,
    kind: str = "", fine: Sequence[int] = (200,),
  ) -> Reply:  # fmt: skip
    """One request and its answer. value: sent as JSON; form: as a form; fine: the statuses that are answers."""
    if value is not None:
      body, kind = json.dumps(value).encode(), "application/json"
    elif form is not None:
      body, kind = urllib.parse.urlencode(form).encode(), "application/x-www-form-urlencoded"
    reply = self._exchange(method, route, body, kind, self._limit(seconds))
    if reply.status not in fine:
      raise self._unfit(route, reply)
    return reply

  def _unfit(self, route: str, reply: Reply) -> GuestFault:
    return GuestFault(f"{self}{route} answered {reply.status}: {reply.body[:300].decode(errors='replace').strip()!r}")

  def _exchange(self, method: str, route: str, body: bytes | None, kind: str, seconds: float) -> Reply:
    until, late = time.monotonic() + seconds, threading.Event()
    connection, talk = http.client.HTTPConnection(self.host, self.port, timeout=max(seconds, 0.001)), []

    def give_up() -> None:  # a socket's own timeout starts anew with every byte
      late.set()
      with contextlib.suppress(OSError):
        for sock in talk:
          sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
      connection.connect()
      talk.append(connection.sock)  # the connection lets go of it once the answer begins
      connection.request(method, route, body, {"Connection": "close"} | ({"Content-Type": kind} if kind else {}))
      response = connection.getresponse()
      told = response.length or 0
      got = response.read(MOST_BYTES + 1) if told <= MOST_BYTES else b""
      if max(len(got), told) > MOST_BYTES:
        raise TooMuch(f"{self}{route} answered with more than {MOST_BYTES} bytes")
      if response.length:  # a read with a limit does not say so itself
        raise http.client.IncompleteRead(got, response.length)
      if late.is_set():
        raise TimeoutError
      return Reply(response.status, got, response.headers.get("Date", ""))
    except (OSError, http.client.HTTPException) as error:
      if late.is_set() or isinstance(error, TimeoutError) or time.monotonic() >= until:
        raise GuestHung(f"{self}{route} did not answer within {seconds:g} s") from None
      raise GuestLost(f"{self}{route}: {type(error).__name__}: {error}"[:300]) from None
    finally:
      timer.cancel()
      connection.close()

  def _parsed(self, reply: Reply, route: str) -> Any:
    try:
      return json.loads(reply.body)
    except (ValueError, RecursionError):
      raise GuestFault(f"{self}{route} said {reply.body[:200]!r}, wanted JSON") from None

  def _object(self, reply: Reply, route: str) -> dict:
    said = self._parsed(reply, route)
    if not isinstance(said, dict):
      raise GuestFault(f"{self}{route} said {str(said)[:200]}, wanted a JSON object")
    return said

  def _said(self, reply: Reply, route: str, name: str, kind: type | tuple) -> Any:
    said = self._object(reply, route)
    if name not in said or not isinstance(said[name], kind):
      raise GuestFault(f"{self}{route} said {str(said)[:200]}, wanted {name!r}")
    return said[name]

  def _json(self, method: str, route: str, seconds: float | None, name: str, kind: type | tuple) -> Any:
    return self._said(self._ask(method, route, seconds), route, name, kind)

  def _pair(self, pair: Any, route: str) -> tuple[int, int]:
    if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in pair)):
      raise GuestFault(f"{self}{route} said {str(pair)[:100]}, wanted two whole numbers")
    return pair[0], pair[1]

  def __str__(self) -> str:
    return f"guest at {self.host}:{self.port}"
