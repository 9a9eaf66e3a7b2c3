"""A stand-in for QEMU in tests: a program of its name that connects to the monitor's socket and says what QEMU says, with a screen of
its own and a guest's server. What it does wrong is read from told.json beside it, anew at every command.

  hang: [command, ...]      is not answered                 status: [...]     what query-status says, one after the other, the last stays
  die: command              the process ends instead        color: n          of every pixel
  refuse: command           an error                        drift: seconds    by which the guest's clock is off
  asleep: true  the screen is black until something is entered
  mute: true                the guest's server closes every connection; frozen: true  the screen does not show the pointer
  early: text               printed, and the process ends before it connects
  reset: true               an event that the guest was reset comes before the next answer
"""

import base64
import email.utils
import json
import os
import pathlib
import re
import socket
import stat
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
QEMU_IMG = """#!/bin/sh
for last; do :; done
[ "$1" = create ] && : >"$last"
[ "$1" = info ] && echo '{}'
exit 0
"""
CLOCK = 1767607200.0


def install(folder: pathlib.Path) -> pathlib.Path:
  """Puts the programs into a folder for PATH; returns where told.json goes."""
  main = folder / "qemu-system-x86_64"
  main.write_text(f"#!{sys.executable} -E\n" + pathlib.Path(__file__).read_text().split('"""', 2)[2])
  (folder / "qemu-img").write_text(QEMU_IMG)
  for path in (main, folder / "qemu-img"):
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
  return folder / "told.json"


def told() -> dict:
  path = HERE / "told.json"
  return json.loads(path.read_text()) if path.exists() else {}


def serve_guest(listener: socket.socket) -> None:
  while True:
    talk, _ = listener.accept()
    if told().get("mute"):
      talk.close()
      continue
    with talk, talk.makefile("rb") as lines:
      head = b"".join(iter(lines.readline, b"\r\n"))
      lines.read(int((re.search(rb"Content-Length: (\d+)", head) or [0, 0])[1]))
      date = email.utils.formatdate(CLOCK + told().get("drift", 0), usegmt=True).encode()
      talk.sendall(b"HTTP/1.1 200 OK\r\nDate: %s\r\nContent-Length: 5\r\n\r\nLinux" % date)


class Monitor:
  def __init__(self, path: str, port: int, incoming: bool):
    self.port, self.asked = port, 0
    self.status = ["inmigrate", "paused"] if incoming else ["running"]
    self.pointer, self.awake = (0, 0), False
    self.talk = socket.socket(socket.AF_UNIX)
    self.talk.connect(path)

  def say(self, what: dict) -> None:
    self.talk.sendall(json.dumps(what).encode() + b"\n")

  def commands(self):
    """JSON objects as they come, without newlines between, as QEMU reads them."""
    got, decoder = "", json.JSONDecoder()
    while data := self.talk.recv(65536):
      got += data.decode()
      while got := got.lstrip():
        try:
          said, end = decoder.raw_decode(got)
        except ValueError:
          break
        got = got[end:]
        yield said

  def run(self) -> None:
    self.say({"QMP": {"version": {"qemu": {"micro": 0, "minor": 0, "major": 0}, "package": ""}, "capabilities": []}})
    for asked in self.commands():
      name, knobs, its = asked["execute"], told(), {"id": asked["id"]} if "id" in asked else {}
      (HERE / "asked.txt").open("a").write(name + "\n")
      if knobs.get("die") == name:
        os._exit(7)
      if name in knobs.get("hang", ()):
        time.sleep(3600)
      if knobs.get("refuse") == name:
        self.say({"error": {"class": "GenericError", "desc": "refused for the test"}} | its)
        continue
      if knobs.get("reset"):
        self.say({"event": "RESET", "data": {"guest": True, "reason": "guest-reset"}, "timestamp": {"seconds": 0, "microseconds": 0}})
      self.say({"return": self.answer(name, asked.get("arguments", {}), knobs)} | its)
      if name == "quit":
        os._exit(0)

  def answer(self, name: str, arguments: dict, knobs: dict):
    if name == "query-cpus-fast":
      return [{"thread-id": os.getpid()}]
    if name == "human-monitor-command":
      return f"Hub -1 (net0):\r\n  TCP[HOST_FORWARD]  12       127.0.0.1 {self.port}       10.0.2.15  5000     0     0\r\n"
    if name == "query-status":
      status = knobs.get("status") or self.status
      self.asked += 1
      return {"status": status[min(self.asked, len(status)) - 1], "running": True}
    if name == "ringbuf-read":
      return base64.b64encode(b"starting\nkernel panic\n").decode()
    if name == "cont":
      self.status = ["running"]
    if name == "input-send-event":
      at = {e["data"]["axis"]: e["data"]["value"] for e in arguments["events"] if e["type"] == "abs"}
      self.pointer = (at["x"] * 64 >> 15, at["y"] * 48 >> 15) if at else self.pointer
      self.awake = bool(knobs.get("asleep"))
    if name == "screendump":
      color = 0 if knobs.get("asleep") and not self.awake else knobs.get("color", 90)
      pixels = bytearray([color]) * (64 * 48 * 3)
      if not knobs.get("frozen"):
        place = 3 * (self.pointer[1] * 64 + self.pointer[0])
        pixels[place : place + 3] = b"\x00\xff\x00" if color else b"\x00\x00\x00"
      pathlib.Path(arguments["filename"]).write_bytes(b"P6\n64 48\n255\n" + pixels)
    return {}


def main() -> None:
  if "--version" in sys.argv:
    print("QEMU emulator version 0.0.0")
    return
  if early := told().get("early"):
    print(early, flush=True)
    sys.exit(1)
  path = next(re.search(r"path=([^,]+)", word)[1] for word in sys.argv if word.startswith("socket,id=qmp0"))
  listener = socket.create_server(("127.0.0.1", 0))
  threading.Thread(target=serve_guest, args=(listener,), daemon=True).start()
  Monitor(path, listener.getsockname()[1], "-incoming" in sys.argv).run()


if __name__ == "__main__":
  main()
