"""Devices behind adb: a private adb server, and a client of the protocol that it speaks (OVERVIEW.TXT and SERVICES.TXT of adb).

A request is four hex digits of length and the service's name, the answer OKAY, or FAIL with a reason; then the service's own bytes.
Every wait has a deadline. Nothing is ever sent twice: whether a command that went unanswered was carried out is not known.

The server is a child of this process that listens on a socket file in a folder of its own, so there is no port to take or to guard, and
its keys are not the user's. It is this small client and not a library because a deadline must hold over the whole conversation: those
that exist (adbutils, pure-python-adb) have one per read at best, and start a shared server at the usual port behind one's back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import time

from envs.children import Child, Nest
from envs.errors import Deadline, InfraError

START_SECONDS = 20.0
PROBE_SECONDS = 1.0
MOST_BYTES = 64 << 20
PACKET = struct.Struct("<BI")  # shell v2: what it is, how long
STDOUT, STDERR, EXIT = 1, 2, 3


class AdbServerLost(InfraError):
  """The adb server is gone or does not answer."""


class DeviceLost(InfraError):
  """The device is offline, unplugged, unauthorised, or closed the connection in the middle of a command."""


class DeviceHung(Deadline):
  """The device did not answer a command in time; the adb server does."""


class DeviceFault(InfraError):
  """A command that always works failed on the device."""


class Conversation:
  """One connection to an adb server. address: the path of a socket file, or host:port. All of it ends `seconds` from now."""

  def __init__(self, address: str, seconds: float, what: str):
    self.address, self.seconds, self.what = address, seconds, what
    self.until = time.monotonic() + seconds
    with contextlib.ExitStack() as undo:
      family = socket.AF_UNIX if "/" in address else socket.AF_INET
      self.socket = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
      host, _, port = address.rpartition(":")
      self._guard(lambda: self.socket.connect(address if family == socket.AF_UNIX else (host, int(port))), connecting=True)
      undo.pop_all()

  def __enter__(self) -> Conversation:
    return self

  def __exit__(self, *exc) -> None:
    self.socket.close()

  def _guard(self, call, connecting: bool = False):
    """One call of the socket within what time is left."""
    left = self.until - time.monotonic()
    try:
      if left <= 0:
        raise TimeoutError
      self.socket.settimeout(left)
      return call()
    except TimeoutError:
      if connecting or not self._server_answers():
        raise AdbServerLost(f"{self.what}: the adb server at {self.address} did not answer within {self.seconds:g} s") from None
      raise DeviceHung(f"{self.what}: no answer within {self.seconds:g} s") from None
    except OSError as error:
      if connecting or not self._server_answers():
        raise AdbServerLost(f"{self.what}: no adb server at {self.address} ({error})") from None
      raise DeviceLost(f"{self.what}: {error}") from None

  def _server_answers(self) -> bool:
    """Tells a server that is gone from a device that is: asked once, after a failure."""
    try:
      return bool(version(self.address, PROBE_SECONDS, probe=True))
    except InfraError:
      return False

  def receive(self, most: int = 1 << 18) -> bytes:
    """What comes next; empty at the end."""
    return self._guard(lambda: self.socket.recv(most))

  def read(self, count: int) -> bytes:
    got = bytearray()
    while len(got) < count:
      data = self.receive(count - len(got))
      if not data:
        self.cut_off(bytes(got))
      got += data
    return bytes(got)

  def cut_off(self, got: bytes) -> None:
    where = DeviceLost if self._server_answers() else AdbServerLost
    raise where(f"{self.what}: the connection ended after {len(got)} bytes{f' ({got[:60]!r})' if got else ''}")

  def ask(self, service: str) -> None:
    """Asks for a service; a refusal is a DeviceLost with the server's words."""
    name = service.encode()
    if len(name) > 0xFFFF:
      raise ValueError(f"adb service of {len(name)} bytes, wanted 65535 at most")
    self._guard(lambda: self.socket.sendall(f"{len(name):04x}".encode() + name))
    status = self.read(4)
    if status == b"FAIL":
      raise DeviceLost(f"{self.what}: {self.text()}")
    if status != b"OKAY":
      raise AdbServerLost(f"{self.what}: the adb server said {status!r}, wanted OKAY or FAIL")

  def text(self) -> str:
    """A length-prefixed text."""
    head = self.read(4)
    try:
      return self.read(int(head, 16)).decode(errors="replace")
    except ValueError:
      raise AdbServerLost(f"{self.what}: the adb server said {head!r}, wanted a length") from None


class _Probe(Conversation):
  """A conversation that asks nobody else when it fails."""

  def _server_answers(self) -> bool:
    return False


def query(address: str, service: str, seconds: float) -> str:
  """The answer of a service of the server itself, e.g. "host:version"."""
  with Conversation(address, seconds, service) as talk:
    talk.ask(service)
    return talk.text()


def version(address: str, seconds: float, probe: bool = False) -> str:
  """Protocol version of the server, in hex."""
  with (_Probe if probe else Conversation)(address, seconds, "host:version") as talk:
    talk.ask("host:version")
    return talk.text()


class Device:
  """One device behind the server at `address`. serial: as `adb devices` has it; host:port for one that is connected to."""

  def __init__(self, address: str, serial: str):
    self.address, self.serial = address, serial

  def state(self, seconds: float) -> str:
    """ "device", "offline", ...; DeviceLost if it is not there at all."""
    return query(self.address, f"host-serial:{self.serial}:get-state", seconds)

  def features(self, seconds: float) -> set[str]:
    return set(query(self.address, f"host-serial:{self.serial}:features", seconds).split(","))

  @contextlib.contextmanager
  def open(self, service: str, seconds: float, what: str):
    """A service of the device."""
    with Conversation(self.address, seconds, f"{self.serial}: {what}") as talk:
      talk.ask(f"host:transport:{self.serial}")
      talk.ask(service)
      yield talk

  def exec_out(self, line: str, seconds: float, most: int = MOST_BYTES) -> bytes:
    """Everything a shell line prints, bytes as they are; there is no exit code to see."""
    with self.open(f"exec:{line}", seconds, line[:60]) as talk:
      got = bytearray()
      while data := talk.receive():
        got += data
        if len(got) > most:
          raise DeviceFault(f"{talk.what}: more than {most} bytes")
      return bytes(got)

  def run(self, line: str, seconds: float) -> tuple[int, str, str]:
    """(exit code, what it printed, what it complained) of a shell line. DeviceLost if it breaks off before the exit code."""
    said = {STDOUT: bytearray(), STDERR: bytearray()}
    with self.open(f"shell,v2,raw:{line}", seconds, line[:60]) as talk:
      while True:
        kind, length = PACKET.unpack(talk.read(PACKET.size))
        if length > MOST_BYTES:
          raise DeviceFault(f"{talk.what}: a packet of {length} bytes")
        body = talk.read(length)
        if kind == EXIT:
          return body[0], said[STDOUT].decode(errors="replace"), said[STDERR].decode(errors="replace")
        if kind in said:
          said[kind] += body

  def shell(self, line: str, seconds: float) -> str:
    """What a shell line printed; DeviceFault if it failed."""
    code, out, complaint = self.run(line, seconds)
    if code != 0:
      raise DeviceFault(f"{self.serial}: {line[:60]} ended with {code}: {(complaint or out).strip()[:200]}")
    return out

  def attach(self, seconds: float) -> None:
    """Waits until the device is there, connecting to it if it is host:port. Being offline for a moment is normal, for long is not."""
    until, told = time.monotonic() + seconds, "never seen"
    while (left := until - time.monotonic()) > 0:
      try:
        told = self._reach(left)
      except (DeviceLost, DeviceHung) as fault:
        told = str(fault)
      if told == "device":
        break
      time.sleep(min(0.05, left))
    else:
      raise DeviceLost(f"{self.serial}: not ready within {seconds:g} s: {told}")
    if "shell_v2" not in self.features(max(1.0, until - time.monotonic())):
      raise DeviceLost(f"{self.serial}: its adbd has no shell_v2, wanted Android 7 or later")

  def _reach(self, seconds: float) -> str:
    """The device's state, after one try to connect to it if it is host:port and not there."""
    try:
      told = self.state(seconds)
    except DeviceLost as lost:
      told = str(lost)
    if told == "device" or ":" not in self.serial:
      return told
    if told == "offline":
      self.detach(seconds)
    return f"{told}; {query(self.address, f'host:connect:{self.serial}', seconds)}"

  def detach(self, seconds: float) -> None:
    """Forgets a connection that is no longer good, so that `attach` makes a new one."""
    query(self.address, f"host:disconnect:{self.serial}", seconds)


class Server:
  """A private adb server, started at once. program: the adb binary; keys: path of a key that devices know ("": a new one, which
  emulators accept and phones ask about); usb: whether it looks for devices on USB, which another server may hold."""

  def __init__(self, program: str = "adb", keys: str = "", usb: bool = False):
    found = shutil.which(program)
    if found is None:
      raise ValueError(f"env.adb is {program!r}, and there is no such program: install adb (make system) or say where it is")
    if keys and not os.path.exists(os.path.expanduser(keys)):
      raise ValueError(f"env.adb_keys is {keys!r}, and there is no such file")
    self.program, self.keys, self.usb = found, keys, usb
    self.nest: Nest | None = None
    self.child: Child | None = None
    self.ensure()

  @property
  def address(self) -> str:
    return str(self.nest.folder / "adb.sock")

  def ensure(self) -> bool:
    """Starts the server if it is not there or does not answer; True if it had to."""
    if self.child is not None and self.child.running():
      try:
        version(self.address, PROBE_SECONDS, probe=True)
        return False
      except InfraError:
        pass
    self.close()
    self.nest = Nest("adb")
    if len(self.address) > 100:
      raise ValueError(f"the path of adb's socket has {len(self.address)} characters, wanted 100 at most: set TMPDIR to a shorter folder")
    home = str(self.nest.folder)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ADB_", "ANDROID_"))} | {"HOME": home, "ANDROID_USER_HOME": home}
    env |= {"ADB_LOCAL_TRANSPORT_MAX_PORT": "5553", "ADB_MDNS_AUTO_CONNECT": "0"}  # other people's emulators are left alone
    env |= {"ADB_VENDOR_KEYS": os.path.expanduser(self.keys)} if self.keys else {}
    env |= {} if self.usb else {"ADB_USB": "0"}
    self.child = self.nest.start([self.program, "-L", f"localfilesystem:{self.address}", "nodaemon", "server"], env)
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and self.child.running():
      try:
        version(self.address, PROBE_SECONDS, probe=True)
        return True
      except InfraError:
        time.sleep(0.01)
    told = " | ".join(self.child.tail())
    fate = self.child.fate()
    self.close()
    raise AdbServerLost(f"{self.program} did not start a server within {START_SECONDS:g} s ({fate}): {told[-1500:]}")

  def close(self) -> None:
    if self.nest is not None:
      self.nest.close()
    self.nest = self.child = None
