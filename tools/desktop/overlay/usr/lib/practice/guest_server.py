"""The server inside the guest: OSWorld's HTTP API (its desktop_env/server), on the standard library, python3-xlib, Pillow and AT-SPI.

It runs as the desktop's user and does what it is asked: the guest is a sandbox that only its own host reaches, through a port that
QEMU forwards from 127.0.0.1. Recording is not offered.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request

import accessible

PORT = 5000
COMMAND_SECONDS = 120.0
DOWNLOAD_SECONDS = 300.0
WINDOW_SECONDS = 90.0  # for a file that was opened to have its window


class Said(Exception):
  """An answer that ends a request. status: HTTP's; said: an object for JSON, or text."""

  def __init__(self, status: int, said):
    super().__init__(str(said))
    self.status, self.said = status, said


def expand(path: str) -> pathlib.Path:
  return pathlib.Path(os.path.expandvars(os.path.expanduser(path)))


# -- windows and pictures


class Screen:
  """One connection to the X server, used by one request at a time."""

  def __init__(self):
    from Xlib import display

    self.lock, self.display = threading.RLock(), display.Display()
    self.root = self.display.screen().root

  def atom(self, name: str) -> int:
    return self.display.intern_atom(name)

  def property(self, window, name: str):
    from Xlib import X

    found = window.get_full_property(self.atom(name), X.AnyPropertyType)
    return None if found is None else found.value

  def windows(self) -> list[tuple]:
    """(window, title, [instance, class]) of every window of an application, the newest last."""
    from Xlib import error

    out = []
    with self.lock:
      for number in self.property(self.root, "_NET_CLIENT_LIST") or []:
        window = self.display.create_resource_object("window", number)
        try:
          title = self.property(window, "_NET_WM_NAME") or window.get_wm_name() or b""
          out.append((window, title.decode(errors="replace") if isinstance(title, bytes) else title, list(window.get_wm_class() or ())))
        except error.XError:  # it closed a moment ago
          continue
    return out

  def find(self, name: str, strict: bool = False, by_class: bool = False):
    """The first window of that title (a part of it will do, in any case, unless strict) or class; None if there is none."""
    for window, title, classes in self.windows():
      told = [".".join(classes), *classes] if by_class else [title]
      if any(name == t if strict else name.lower() in t.lower() for t in told):
        return window
    return None

  def tell(self, window, what: str) -> None:
    """Asks the window manager to _NET_ACTIVE_WINDOW or to _NET_CLOSE_WINDOW."""
    from Xlib import X
    from Xlib.protocol import event

    data = [2, X.CurrentTime, 0, 0, 0] if what == "_NET_ACTIVE_WINDOW" else [X.CurrentTime, 2, 0, 0, 0]
    message = event.ClientMessage(window=window, client_type=self.atom(what), data=(32, data))
    with self.lock:
      self.root.send_event(message, event_mask=X.SubstructureRedirectMask | X.SubstructureNotifyMask)
      self.display.sync()

  def picture(self):
    """The screen with its pointer, as a Pillow image."""
    from PIL import Image
    from Xlib import X

    with self.lock:
      size = self.root.get_geometry()
      raw = self.root.get_image(0, 0, size.width, size.height, X.ZPixmap, 0xFFFFFFFF)
      if not self.display.has_extension("XFIXES"):
        raise RuntimeError("the X server has no XFIXES")
      self.display.xfixes_query_version()
      pointer = self.display.xfixes_get_cursor_image(self.root)
    shown = Image.frombytes("RGB", (size.width, size.height), raw.data, "raw", "BGRX")
    pixels = b"".join(int(p & 0xFFFFFFFF).to_bytes(4, "little") for p in pointer.cursor_image)
    arrow = Image.frombytes("RGBA", (pointer.width, pointer.height), pixels, "raw", "BGRA")
    shown.paste(arrow, (pointer.x - pointer.xhot, pointer.y - pointer.yhot), arrow)
    return shown


# -- commands


def words(command, shell: bool) -> list[str]:
  """What is to be run: a line by the guest's shell, or words with ~ for home."""
  if shell:
    return ["/bin/sh", "-c", command if isinstance(command, str) else " ".join(command)]
  split = shlex.split(command) if isinstance(command, str) else command
  return [os.path.expanduser(word) if word.startswith("~/") else word for word in split]


def finish(argv: list[str], folder: str, seconds: float, merged: bool) -> subprocess.CompletedProcess:
  """Runs to the end; what it started goes with it when it takes too long. TimeoutError then."""
  started = subprocess.Popen(
    argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT if merged else subprocess.PIPE, text=True,
    errors="replace", start_new_session=True, cwd=folder,
  )  # fmt: skip
  try:
    output, error = started.communicate(timeout=seconds)
  except subprocess.TimeoutExpired:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(started.pid, 9)
    with contextlib.suppress(subprocess.TimeoutExpired):  # what left its session may still hold the pipes
      started.communicate(timeout=1.0)
    raise TimeoutError(f"timed out after {seconds:g} seconds") from None
  return subprocess.CompletedProcess(argv, started.returncode, output, error)


def run(command, shell: bool, seconds: float) -> dict:
  try:
    done = finish(words(command, shell), os.path.expanduser("~"), seconds, merged=False)
  except TimeoutError as late:
    raise TimeoutError(f"Command {command!r:.200} {late}") from None
  return {"status": "success", "output": done.stdout, "error": done.stderr, "returncode": done.returncode}


def execute(asked: dict) -> dict:
  try:
    return run(asked["command"], bool(asked.get("shell", False)), float(asked.get("timeout") or COMMAND_SECONDS))
  except Exception as error:  # noqa: BLE001 - the caller hears of whatever went wrong, as OSWorld's server says it
    raise Said(500, {"status": "error", "message": str(error)}) from None


def verified(asked: dict) -> bool:
  wanted = asked.get("verification", {})
  there = not wanted.get("window_exists") or SCREEN.find(wanted["window_exists"]) is not None
  return there and (not wanted.get("command_success") or run(wanted["command_success"], True, 5.0)["returncode"] == 0)


def execute_verified(asked: dict) -> dict:
  done, began = execute(asked), time.monotonic()
  while not verified(asked):
    if time.monotonic() - began > float(asked.get("max_wait_time", 10)):
      raise Said(500, done | {"status": "verification_failed", "wait_time": time.monotonic() - began})
    time.sleep(float(asked.get("check_interval", 1)))
  return done | {"verification": {"status": "verified"}, "wait_time": time.monotonic() - began}


def run_script(argv: list[str], folder: str | None, seconds: float, merged: bool) -> dict:
  try:
    done = finish(argv, str(expand(folder)) if folder else os.path.expanduser("~"), seconds, merged)
  except TimeoutError as late:
    raise Said(500, {"status": "error", "output": str(late), "error": "", "returncode": -1}) from None
  status = "success" if done.returncode == 0 else "error"
  return {"status": status, "output": done.stdout, "error": "" if merged else done.stderr, "returncode": done.returncode}


# -- the routes: each takes the request and returns JSON, text or bytes


def get_screenshot(_) -> bytes:
  out = io.BytesIO()
  SCREEN.picture().save(out, "PNG", compress_level=1)
  return out.getvalue()


def get_accessibility(_) -> dict:
  return {"AT": accessible.tree()}


def get_terminal(_) -> dict:
  text = accessible.terminal_text()
  if text is None:
    raise Said(500, {"status": "error", "message": "no terminal is open"})
  return {"output": text, "status": "success"}


def get_platform(_) -> str:
  return "Linux"


def get_cursor_position(_) -> list:
  with SCREEN.lock:
    at = SCREEN.root.query_pointer()
  return [at.root_x, at.root_y]


def post_screen_size(_) -> dict:
  with SCREEN.lock:
    size = SCREEN.root.get_geometry()
  return {"width": size.width, "height": size.height}


def post_window_size(request) -> dict:
  window = SCREEN.find(request.form()["app_class_name"], by_class=True)
  if window is None:
    raise Said(500, {"message": "no such window"})
  with SCREEN.lock:
    size = window.get_geometry()
  return {"width": size.width, "height": size.height}


def post_desktop_path(_) -> dict:
  return {"desktop_path": str(pathlib.Path.home() / "Desktop")}


def post_wallpaper(_) -> bytes:
  said = (pathlib.Path.home() / ".config/pcmanfm/default/desktop-items-0.conf").read_text(errors="replace")
  named = re.search(r"^wallpaper=(.+)$", said, re.MULTILINE)
  if named is None or "wallpaper_mode=color" in said or not os.path.isfile(named[1]):
    raise Said(404, {"error": "the desktop shows no picture"})
  return pathlib.Path(named[1]).read_bytes()


def post_list_directory(request) -> dict:
  path = expand(request.json()["path"])
  if not path.is_dir():
    raise Said(400, {"error": f"{path} is not a directory"})

  def below(at: pathlib.Path) -> dict:
    try:
      if at.is_dir() and not at.is_symlink():
        return {"type": "directory", "name": at.name, "children": [below(p) for p in sorted(at.iterdir())]}
    except PermissionError as error:  # an agent may take the right away; the benchmark's server says it in the folder's place, too
      return {"error": str(error)}
    return {"type": "file", "name": at.name}

  return {"directory_tree": below(path)}


def post_file(request) -> io.BufferedReader:
  form = request.form()
  if "file_path" not in form:
    raise Said(400, {"error": "file_path is required"})
  path = expand(form["file_path"])
  if not path.is_file():
    raise Said(404, {"error": f"{path}: no such file"})
  return path.open("rb")  # one that an agent left may be larger than this machine's memory


def post_execute(request) -> dict:
  return execute(request.json())


def post_execute_with_verification(request) -> dict:
  return execute_verified(request.json())


def post_launch(request) -> str:
  asked = request.json()
  command, shell = asked["command"], bool(asked.get("shell", False))
  try:
    subprocess.Popen(
      words(command, shell), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
      start_new_session=True, cwd=os.path.expanduser("~"),
    )  # fmt: skip
  except OSError as error:
    raise Said(500, {"status": "error", "message": str(error)}) from None
  return f"{command} launched successfully"


def post_upload(request) -> str:
  parts = request.parts()
  if "file_path" not in parts or "file_data" not in parts:
    raise Said(400, {"error": "file_path and file_data are required"})
  path = expand(parts["file_path"].decode())
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(parts["file_data"])
  return f"File Uploaded: {len(parts['file_data'])} bytes"


def post_download_file(request) -> str:
  asked = request.json()
  path = expand(asked["path"])
  path.parent.mkdir(parents=True, exist_ok=True)
  until, got = time.monotonic() + DOWNLOAD_SECONDS, []
  try:
    with urllib.request.urlopen(asked["url"], timeout=60) as source:
      while part := source.read1(1 << 20):
        got.append(part)
        if time.monotonic() > until:
          raise TimeoutError(f"not there after {DOWNLOAD_SECONDS:g} seconds")
    path.write_bytes(b"".join(got))
  except (OSError, ValueError) as error:
    raise Said(500, f"Failed to download {asked['url']}: {error}") from None
  return "File downloaded successfully"


def post_open_file(request) -> str:
  path = expand(request.json()["path"])
  if not path.exists():
    raise Said(404, f"File not found: {path}")
  subprocess.Popen(
    ["xdg-open", str(path)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
  )
  until = time.monotonic() + WINDOW_SECONDS
  while time.monotonic() < until:
    for name in (path.name, path.stem):
      if (window := SCREEN.find(name)) is not None:
        SCREEN.tell(window, "_NET_ACTIVE_WINDOW")
        return "File opened and window activated successfully"
    time.sleep(0.25)
  raise Said(500, f"no window of {path.name} within {WINDOW_SECONDS:g} seconds")


def tell_window(request, what: str) -> str:
  asked = request.json()
  window = SCREEN.find(asked["window_name"], bool(asked.get("strict", False)), bool(asked.get("by_class", False)))
  if window is None:
    raise Said(404, f"no window {asked['window_name']!r}")
  SCREEN.tell(window, what)
  return "done"


def post_activate_window(request) -> str:
  return tell_window(request, "_NET_ACTIVE_WINDOW")


def post_close_window(request) -> str:
  return tell_window(request, "_NET_CLOSE_WINDOW")


def post_change_wallpaper(request) -> str:
  path = expand(request.json()["path"])
  if not path.is_file():
    raise Said(404, f"File not found: {path}")
  done = run(["pcmanfm", "--set-wallpaper", str(path), "--wallpaper-mode", "stretch"], False, 30.0)
  if done["returncode"]:
    raise Said(500, done["error"])
  return "Wallpaper changed successfully"


def post_run_python(request) -> dict:
  asked = request.json()
  done = run_script([sys.executable, "-c", asked["code"]], None, float(asked.get("timeout") or 30.0), merged=False)
  return done | {"return_code": done["returncode"], "message": "", "need_more": False}


def post_run_bash_script(request) -> dict:
  asked = request.json()
  return run_script(["bash", "-c", asked["script"]], asked.get("working_dir"), float(asked.get("timeout") or 100), merged=True)


NAMES = ("screenshot", "accessibility", "terminal", "platform", "cursor_position")
ROUTES = {("GET", "/" + name): globals()[f"get_{name}"] for name in NAMES}
NAMES = ("screen_size", "window_size", "desktop_path", "wallpaper", "list_directory", "file", "execute", "execute_with_verification")
NAMES += ("run_python", "run_bash_script")
ROUTES |= {("POST", "/" + name): globals()[f"post_{name}"] for name in NAMES}
NAMES = ("execute", "execute_with_verification", "launch", "upload", "download_file", "open_file", "activate_window", "close_window")
ROUTES |= {("POST", "/setup/" + name): globals()[f"post_{name}"] for name in (*NAMES, "change_wallpaper")}


# what a request that makes no sense comes to
SENSELESS = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, MemoryError)


class Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"

  def log_message(self, *args) -> None:
    """Requests are not logged."""

  def json(self) -> dict:
    return json.loads(self.sent or b"{}")

  def form(self) -> dict[str, str]:
    if "multipart" in self.headers.get("Content-Type", ""):
      return {name: value.decode() for name, value in self.parts().items()}
    return dict(urllib.parse.parse_qsl(self.sent.decode(), keep_blank_values=True))

  def parts(self) -> dict[str, bytes]:
    """The named parts of a multipart body."""
    mark = re.search(r'boundary="?([^";]+)', self.headers.get("Content-Type", ""))
    out = {}
    for part in self.sent.split(b"--" + mark[1].encode())[1:-1] if mark else []:
      head, _, body = part.partition(b"\r\n\r\n")
      if named := re.search(rb'[; ]name="([^"]*)"', head):
        out[named[1].decode()] = body.removesuffix(b"\r\n")
    return out

  def do_GET(self) -> None:
    self.sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
    route = ROUTES.get((self.command, urllib.parse.urlsplit(self.path).path))
    try:
      if route is None:
        raise Said(404, {"error": f"there is no {self.command} {self.path}"})
      status, said = 200, route(self)
    except Said as answer:
      status, said = answer.status, answer.said
    except SENSELESS as error:
      status, said = 500, {"status": "error", "message": f"{type(error).__name__}: {error}"}
    self.answer(status, said)

  do_POST = do_GET

  def answer(self, status: int, said) -> None:
    body, kind = (said, "application/octet-stream") if isinstance(said, (bytes, io.BufferedReader)) else (None, "")
    if body is None:
      body, kind = (said.encode(), "text/plain") if isinstance(said, str) else (json.dumps(said).encode(), "application/json")
    self.send_response(status)
    self.send_header("Content-Type", kind)
    size = len(body) if isinstance(body, bytes) else os.fstat(body.fileno()).st_size
    self.send_header("Content-Length", str(size))
    self.send_header("Connection", "close")
    self.end_headers()
    self.close_connection = True
    if isinstance(body, bytes):
      self.wfile.write(body)
      return
    with body:
      while size > 0 and (part := body.read(min(size, 1 << 20))):  # no more than was said: it may be growing
        self.wfile.write(part)
        size -= len(part)


class Server(http.server.ThreadingHTTPServer):
  daemon_threads = True


if __name__ == "__main__":
  SCREEN = Screen()
  Server(("0.0.0.0", PORT), Handler).serve_forever()
