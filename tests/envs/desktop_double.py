"""A double of a desktop: a guest that speaks OSWorld's HTTP API over a folder, and a machine whose screen is that guest's windows.

Commands really run, on this machine, with the guest's home folder put in place of /home/user. What is typed goes into the file whose window
is in front, at its end; ctrl a selects all of it, ctrl s saves.
"""

from __future__ import annotations

import email
import email.policy
import http.server
import json
import math
import pathlib
import shutil
import subprocess
import threading
import time
import urllib.parse

import numpy as np

from envs.guest import Guest

HOME = "/home/user"


class Desktop:
  """The guest. root: stands for /; windows: titles, the last in front; slow: seconds before an answer of a route."""

  def __init__(self, root: pathlib.Path):
    self.root, self.slow, self.asked = root, {}, []
    self.tree = '<desktop><application name="Google Chrome"><entry name="Address and search bar">a.test/x</entry></application></desktop>'
    self.fresh()
    self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: Handler(self, *args))
    self.server.daemon_threads = True
    threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

  def fresh(self) -> None:
    shutil.rmtree(self.root, ignore_errors=True)
    (self.root / "home/user/Desktop").mkdir(parents=True)
    self.windows, self.launched = [], []

  def path(self, name: str) -> pathlib.Path:
    return self.root / name.replace("~", HOME, 1).lstrip("/")

  def run(self, command, shell: bool) -> dict:
    words = [command] if isinstance(command, str) else command
    words = [word.replace(HOME, str(self.root) + HOME) for word in words]
    argv = ["sh", "-c", " ".join(words)] if shell else words
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, cwd=self.root / "home/user", stdin=subprocess.DEVNULL)
    said = lambda text: text.replace(str(self.root), "")
    return {"status": "success", "output": said(done.stdout), "error": said(done.stderr), "returncode": done.returncode}

  def close(self) -> None:
    self.server.shutdown()
    self.server.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
  def __init__(self, desktop: Desktop, *args):
    self.desktop = desktop
    super().__init__(*args)

  def log_message(self, *args) -> None:
    pass

  def do_GET(self) -> None:
    said = {"/platform": "Linux", "/accessibility": json.dumps({"AT": self.desktop.tree})}[self.path]
    self.answer(200, said.encode())

  def do_POST(self) -> None:
    body, d = self.rfile.read(int(self.headers["Content-Length"])), self.desktop
    d.asked.append(self.path)
    time.sleep(d.slow.get(self.path, 0))
    if self.path == "/setup/upload":
      head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
      parts = email.message_from_bytes(head + body, policy=email.policy.HTTP).iter_parts()
      given = {part.get_param("name", header="content-disposition"): part.get_payload(decode=True) for part in parts}
      path = d.path(given["file_path"].decode())
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(given["file_data"])
      return self.answer(200, b"File Uploaded")
    if self.path == "/file":
      path = d.path(urllib.parse.parse_qs(body.decode())["file_path"][0])
      return self.answer(200, path.read_bytes()) if path.is_file() else self.answer(404, b"{}")
    return self.other(json.loads(body), d)

  def other(self, said: dict, d: Desktop) -> None:
    if self.path in ("/execute", "/setup/execute", "/execute_with_verification"):
      try:
        ran = d.run(said["command"], said["shell"])
      except (OSError, subprocess.SubprocessError) as error:
        return self.answer(500, json.dumps({"status": "error", "message": str(error)}).encode())
      verify = said.get("verification", {}).get("command_success")
      if verify and d.run(verify, True)["returncode"]:
        return self.answer(500, json.dumps({"status": "verification_failed"}).encode())
      return self.answer(200, json.dumps(ran).encode())
    if self.path == "/setup/launch":
      d.launched.append(said["command"])
      d.windows.append(str(said["command"][-1]).rpartition("/")[2])
    elif self.path == "/setup/open_file":
      if not d.path(said["path"]).is_file():
        return self.answer(404, b"no file")
      d.windows.append(said["path"].rpartition("/")[2])
    else:
      there = [w for w in d.windows if (w == said["window_name"] if said.get("strict") else said["window_name"] in w)]
      if self.path == "/setup/change_wallpaper":
        return self.answer(200 if d.path(said["path"]).is_file() else 404, b"")
      if not there:
        return self.answer(404, b"no window")
      d.windows.remove(there[0])
      if self.path == "/setup/activate_window":
        d.windows.append(there[0])
    return self.answer(200, b"done")

  def answer(self, status: int, body: bytes) -> None:
    self.send_response(status)
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    self.wfile.write(body)


class DoubleMachine:
  """What envs.qemu.Machine is to an environment. acted: actions and primitives, in order."""

  size, until, starved = (64, 48), math.inf, 0.0

  def __init__(self, desktop: Desktop):
    self.desktop, self.guest, self.start, self.pointer = desktop, Guest(desktop.server.server_port), None, (32, 24)
    self.acted, self.reverted, self.text = [], 0, ""

  def revert(self) -> None:
    self.desktop.fresh()
    self.acted, self.text, self.reverted = [], "", self.reverted + 1

  def act(self, action) -> None:
    self.acted.append((action.kind, action.args))
    if action.kind == "type":
      self.text += action.args["text"] + "\n" * action.args["enter"]
    elif action.args.get("keys") == ["ctrl", "s"]:
      front = next(self.desktop.root.rglob(self.desktop.windows[-1]))
      front.write_text(front.read_text() + self.text)
      self.text = ""

  def settle(self, seconds=None) -> tuple[np.ndarray, bool]:
    width, height = self.size
    frame = np.full((height, width, 3), 30, np.uint8)
    frame[: 8 * len(self.desktop.windows)] = 200
    return frame, True

  def click(self, point, button="left", times=1) -> None:
    self.acted.append(("click", point, button, times))
    self.pointer = point

  def move(self, point) -> None:
    self.acted.append(("move", point))
    self.pointer = point

  def drag(self, start, end) -> None:
    self.acted.append(("drag", start, end))
    self.pointer = end

  def hold(self, name, down) -> None:
    self.acted.append(("hold", name, down))

  def hold_key(self, name, down) -> None:
    self.acted.append(("hold_key", name, down))

  def scroll(self, point, direction, clicks=5) -> None:
    self.acted.append(("scroll", point, direction, clicks))

  def release(self) -> None:
    self.acted.append(("release",))

  def health(self) -> None:
    pass

  def waited(self) -> float:
    return self.starved

  def close(self) -> None:
    pass
