"""An Android device for tests that speaks ADB's wire protocol over TCP, so that the real adb connects to it: `adb connect 127.0.0.1:PORT`.

Behind it stands the simulated phone (envs/sim/phone.py) as the one application "practice". Its start screen comes up with
`am start -n practice/.Task --es task BASE64`, its final state is read with `content query --uri content://practice/state`; a real phone
has neither, and everything else here is what a real phone has: shell, shell_v2 and exec services, input, screencap, am, dumpsys, ...
One shell line is one action of the agent, and one tick of the simulated phone.

`DeviceDouble` is the device; `python -m tests.envs.adb_device 8` starts eight and prints what to give env.image. `ServerDouble` is an
adb server in front of one, for tests without adb. Faults are attributes, see Shell.
"""

import base64
import contextlib
import io
import json
import shlex
import socket
import struct
import sys
import threading
import time

import numpy as np
from PIL import Image

from core.schema import Action
from envs.sim.base import SimEnv
from envs.sim.popups import Popups
from envs.wire import from_plain

CNXN, AUTH, OPEN, OKAY, CLSE, WRTE = (int.from_bytes(name, "little") for name in (b"CNXN", b"AUTH", b"OPEN", b"OKAY", b"CLSE", b"WRTE"))
HEAD = struct.Struct("<6I")
VERSION, MAX_DATA = 0x01000001, 1 << 18
BANNER = b"device::ro.product.name=practice;ro.product.model=Double;ro.product.device=practice;features=shell_v2,cmd"
KEYS = {3: "HOME", 4: "BACK", 66: "ENTER"}
IME, USUAL_IME = "com.android.adbkeyboard/.AdbIME", "com.android.inputmethod.latin/.LatinIME"


class Shell:
  """The device's shell, without the wire. Faults, set from outside at any time:

  hang: words; a line that holds one is carried out and never answered. torn: screencaps break off in the middle. black: screencaps are
  black. slow: seconds before every answer. typed: every text that arrived; lines: every line.
  """

  def __init__(self, has_ime=True):
    self.hang, self.torn, self.black, self.slow = (), False, False, 0.0
    self.typed, self.lines, self.wide = [], [], False
    self.imes, self.ime = [USUAL_IME] + ([IME] if has_ime else []), USUAL_IME
    self.settings = {}
    self.env, self.front, self.lock, self.ended = None, "launcher/.Home", threading.Lock(), threading.Event()

  def run(self, line):
    """(exit code, stdout, stderr)."""
    with self.lock:
      self.lines.append(line)
      out, code, said, inputs = b"", 0, b"", []
      for command, then in commands(line):
        code, more, said = self.command(command, inputs)
        out += more
        if code and then == "&&":
          break
      self.apply(inputs)
    if any(word in line for word in self.hang):
      self.ended.wait()
    if self.slow:
      time.sleep(self.slow)
    return code, out, said

  def command(self, words, inputs):
    name, args = words[0], words[1:]
    if name == "input":
      inputs.append(args)
    elif name == "sleep":
      inputs.append(["sleep"])
    elif name == "screencap":
      return 0, self.screencap("-p" in args), b""
    elif name == "am" and args[0] == "start":
      return self.start(args)
    elif name == "am" and args[0] == "broadcast":
      if args[1:3] == ["-a", "ADB_INPUT_B64"] and self.ime == IME:
        inputs.append(["unicode", base64.b64decode(args[args.index("msg") + 1]).decode()])
    elif name == "monkey":
      self.front = f"{args[args.index('-p') + 1]}/.Main"
    elif name == "ime":
      return self.ime_command(args)
    elif name == "settings":
      return self.settings_command(args)
    elif name == "content" and args[2] == "content://practice/state" and self.env is not None:
      kind = f"{self.env.popup.kind}/{self.env.popup.place}" if self.env.popup else ""
      return 0, f"Row: 0 page={self.env.app.page}, popup={kind}, passed={str(self.env.app.passed()).lower()}\n".encode(), b""
    elif name == "dumpsys":
      return 0, f"  ResumedActivity: x\n  topResumedActivity=ActivityRecord{{1f2e3d u0 {self.front} t7}}\n".encode(), b""
    elif name == "getprop":
      return 0, b"1\n" if args == ["sys.boot_completed"] else b"\n", b""
    elif name == "pm":
      return 0, b"Success\n", b""
    elif name == "echo":
      return 0, (" ".join(args) + "\n").encode(), b""
    elif name not in ("wm", "svc", "am"):
      return 127, b"", f"/system/bin/sh: {name}: inaccessible or not found\n".encode()
    return 0, b"", b""

  def start(self, args):
    if "practice/.Task" in args:
      what = json.loads(base64.b64decode(args[args.index("task") + 1]))
      popups = what["popups"] | {"kinds": tuple(what["popups"]["kinds"])}
      task = from_plain(what["task"])
      self.env = SimEnv("sim/phone", Popups(**popups), drift=what["drift"])
      self.env.reset(options={"task": type(task)(**vars(task) | {"env": "sim/phone"})})
      self.front = "practice/.Task"
    elif "-n" in args:
      self.front = args[args.index("-n") + 1]
      if self.front.startswith("no."):
        return 0, f"Error: Activity class {{{self.front}}} does not exist.\n".encode(), b""
    return 0, b"Starting: Intent\nStatus: ok\nComplete\n", b""

  def ime_command(self, args):
    if args[0] == "list":
      return 0, "\n".join(self.imes).encode() + b"\n", b""
    if args[1] not in self.imes:
      return 255, b"", b"Unknown input method\n"
    self.ime = args[1] if args[0] == "set" else self.ime
    return 0, b"Input method selected\n", b""

  def settings_command(self, args):
    if args[0] == "put":
      self.settings[args[1], args[2]] = args[3]
      return 0, b"", b""
    value = self.ime if args[2] == "default_input_method" else self.settings.get((args[1], args[2]), "null")
    return 0, value.encode() + b"\n", b""

  def apply(self, inputs):
    """All `input` of one line as one action of the simulated phone."""
    text, action = "", None
    for args in inputs:
      if args[0] == "text":
        text += sent(args[1])
      elif args[0] == "unicode":
        text += args[1]
      elif args[0] == "keyevent":
        codes = [int(code) for code in args[1:]]
        text += "".join({66: "\n", 61: "\t"}.get(code, "") for code in codes)
        action = Action("press", {"key": KEYS[codes[0]]}, {}, "phone") if codes[0] in KEYS else action
      elif args[0] == "tap":
        action = Action("tap", {"point": (int(args[1]), int(args[2]))}, {}, "phone")
      elif args[0] == "swipe":
        action = Action("swipe", {"start": (int(args[1]), int(args[2])), "end": (int(args[3]), int(args[4]))}, {}, "phone")
      else:
        action = action or Action("wait", {}, {}, "phone")
    if text.strip("\n") or len(text) > 1:
      self.typed.append(text)
      action = Action("type", {"text": text.removesuffix("\n"), "enter": text.endswith("\n")}, {}, "phone")
    if self.env is not None and action is not None:
      self.env._act(action)

  def screencap(self, png):
    if self.env is None:
      pixels = np.full((160, 96, 3), 200, np.uint8)
    else:
      pixels = self.env._observe()["screenshot"]
    pixels = pixels.transpose(1, 0, 2) if self.wide else pixels
    pixels = np.zeros_like(pixels) if self.black else pixels
    height, width = pixels.shape[:2]
    if png:
      file = io.BytesIO()
      Image.fromarray(pixels).save(file, "PNG")
      data = file.getvalue()
    else:
      alpha = np.full((height, width, 1), 255, np.uint8)
      data = struct.pack("<4I", width, height, 1, 1) + np.concatenate([pixels, alpha], -1).tobytes()
    return data[: len(data) // 2] if self.torn else data


def commands(line):
  """(words, what follows) of each command of a line: single and double quotes, backslashes, ; and && as POSIX has them."""
  parts, quoted, i = [""], "", 0
  while i < len(line):
    c = line[i]
    if c == "\\" and quoted != "'":
      parts[-1] += line[i : i + 2]
      i += 1
    elif not quoted and (c == ";" or line.startswith("&&", i)):
      parts += [";" if c == ";" else "&&", ""]
      i += len(parts[-2]) - 1
    else:
      quoted = "" if c == quoted else c if not quoted and c in "'\"" else quoted
      parts[-1] += c
    i += 1
  return [(shlex.split(part), then) for part, then in zip(parts[::2], [*parts[1::2], ";"]) if part.strip()]


def sent(text):
  """What Android's `input text` makes of its word (InputShellCommand.sendText): %s is a space; other than ASCII it cannot type."""
  if not text.isascii():
    raise ValueError(f"NullPointerException: {text!r}")
  out, i = "", 0
  while i < len(text):
    space = text.startswith("%s", i)
    out += " " if space else text[i]
    i += 2 if space else 1
  return out


class Listener:
  """A listening socket with a thread for every connection; close() ends them all."""

  def __init__(self, family, address):
    self.listener = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET:
      self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    self.listener.bind(address)
    self.listener.listen(64)
    self.connections = set()
    threading.Thread(target=self._accept, daemon=True).start()

  def _accept(self):
    with contextlib.suppress(OSError):
      while True:
        connection, _ = self.listener.accept()
        self.connections.add(connection)
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

  def _serve(self, connection):
    with contextlib.suppress(OSError, EOFError), connection:
      self.serve(connection)
    self.connections.discard(connection)

  def drop(self):
    """Every connection breaks."""
    for connection in list(self.connections):
      with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

  def close(self):
    with contextlib.suppress(OSError):
      self.listener.shutdown(socket.SHUT_RDWR)
    self.listener.close()
    self.drop()

  def __enter__(self):
    return self

  def __exit__(self, *exc):
    self.close()


def read(connection, count):
  got = b""
  while len(got) < count:
    data = connection.recv(count - len(got))
    if not data:
      raise EOFError
    got += data
  return got


def output(shell, service):
  """The bytes that a service of the device sends."""
  kind, _, line = service.partition(":")
  if kind.startswith("shell,v2"):
    code, out, said = shell.run(line)
    packets = [(1, out[i : i + 65536]) for i in range(0, len(out), 65536)] + [(2, said)] * bool(said) + [(3, bytes([code]))]
    return b"".join(struct.pack("<BI", what, len(body)) + body for what, body in packets)
  if kind in ("shell", "exec"):
    _, out, said = shell.run(line)
    return out + said
  return None


class DeviceDouble(Listener):
  """The device, at `serial`. offline: takes connections and never says hello. asks: wants a key first, and takes any. dying: words;
  the device dies, connections and listener, before it answers a line that holds one."""

  def __init__(self, port=0, **kw):
    self.shell, self.offline, self.asks, self.dying = Shell(**kw), False, False, ()
    super().__init__(socket.AF_INET, ("127.0.0.1", port))
    self.port = self.listener.getsockname()[1]
    self.serial = f"127.0.0.1:{self.port}"

  def close(self):
    self.shell.ended.set()
    super().close()

  def serve(self, connection):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire = Wire(connection)
    streams, serial = {}, 0
    while True:
      command, first, second, data = wire.receive()
      if command == CNXN and self.offline:
        continue
      if command == CNXN and self.asks:
        wire.send(AUTH, 1, 0, b"x" * 20)
      elif command in (CNXN, AUTH):
        wire.send(CNXN, VERSION, MAX_DATA, BANNER)
      elif command == OPEN:
        serial += 1
        streams[serial] = stream = Stream(wire, serial, first)
        threading.Thread(target=self.answer, args=(stream, data.rstrip(b"\0").decode()), daemon=True).start()
      elif command == WRTE:  # what a host writes to a command's input
        wire.send(OKAY, second, first)
      elif command == OKAY and second in streams:
        streams[second].room.set()
      elif command == CLSE and second in streams:
        streams.pop(second).leave()

  def answer(self, stream, service):
    with contextlib.suppress(OSError):
      if any(word in service for word in self.dying):
        return self.close()
      if not service.startswith(("shell", "exec")):
        return stream.refuse()
      stream.wire.send(OKAY, stream.own, stream.theirs)
      stream.write(output(self.shell, service))
    return None


class Wire:
  """ADB messages over one connection."""

  def __init__(self, connection):
    self.connection, self.lock = connection, threading.Lock()

  def receive(self):
    command, first, second, length, _, magic = HEAD.unpack(read(self.connection, HEAD.size))
    assert magic == command ^ 0xFFFFFFFF
    return command, first, second, read(self.connection, length)

  def send(self, command, first, second, data=b""):
    head = HEAD.pack(command, first, second, len(data), sum(data) & 0xFFFFFFFF if command in (CNXN, AUTH) else 0, command ^ 0xFFFFFFFF)
    with self.lock:
      self.connection.sendall(head + data)


class Stream:
  """One open service. A device may write again when the host has said OKAY to the last."""

  def __init__(self, wire, own, theirs):
    self.wire, self.own, self.theirs, self.room, self.gone = wire, own, theirs, threading.Event(), False
    self.room.set()

  def write(self, data):
    for i in range(0, len(data), MAX_DATA):
      if not self.room.wait(30) or self.gone:
        return
      self.room.clear()
      self.wire.send(WRTE, self.own, self.theirs, data[i : i + MAX_DATA])
    if self.room.wait(30) and not self.gone:
      self.wire.send(CLSE, self.own, self.theirs)

  def refuse(self):
    self.wire.send(CLSE, 0, self.theirs)

  def leave(self):
    self.gone = True
    self.room.set()


class ServerDouble(Listener):
  """An adb server at the socket file `address`, with one device. state: what it says of the device."""

  def __init__(self, address, shell, serial="double"):
    self.address, self.shell, self.serial, self.state = str(address), shell, serial, "device"
    self.mute = False  # takes connections and says nothing
    super().__init__(socket.AF_UNIX, self.address)

  def serve(self, connection):
    while not self.mute:
      service = read(connection, int(read(connection, 4), 16)).decode()
      answers = {
        "host:version": "0029", f"host-serial:{self.serial}:get-state": self.state, f"host-serial:{self.serial}:features": "cmd,shell_v2",
        f"host:connect:{self.serial}": f"already connected to {self.serial}", f"host:disconnect:{self.serial}": "disconnected",
      }  # fmt: skip
      if service in answers:
        return connection.sendall(b"OKAY" + f"{len(answers[service]):04x}".encode() + answers[service].encode())
      if service == f"host:transport:{self.serial}" and self.state == "device":
        connection.sendall(b"OKAY")
        continue
      if service.startswith(("shell", "exec")):
        connection.sendall(b"OKAY")
        return connection.sendall(output(self.shell, service))
      told = f"device {self.state}" if self.serial in service and self.state != "device" else f"device '{service}' not found"
      return connection.sendall(b"FAIL" + f"{len(told):04x}".encode() + told.encode())
    while connection.recv(4096):
      pass
    return None


if __name__ == "__main__":
  print(",".join(DeviceDouble().serial for _ in range(int(sys.argv[1]))), flush=True)
  threading.Event().wait()
