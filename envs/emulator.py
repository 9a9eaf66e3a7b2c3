"""Google's Android emulator: one process, three ports of its own, a read-only system, and a saved state that it goes back to.

Written from its documentation (command line, console) and tested with a stand-in that speaks the same way; never run against the real
program, which this project's machines do not have.
"""

from __future__ import annotations

import os
import shutil
import socket
import time

from envs.adb import Device
from envs.children import Child, Nest
from envs.errors import BootDeadline, InfraError
from envs.locks import take_ports

CONSOLE_SECONDS = 60.0  # loading a saved state


class EmulatorDied(InfraError):
  """The emulator's process ended by itself, while it started or later."""


class EmulatorRefused(InfraError):
  """The emulator's console refused a command, e.g. a saved state that is not there."""


class Emulator:
  """One running emulator. avd: a name of `emulator -list-avds`; snapshot: a saved state of it ("": a cold boot); args: more of its
  flags. Nothing of what happens inside is written to the AVD (-read-only), so that many can run from one."""

  def __init__(self, program: str, avd: str, snapshot: str = "", args: tuple[str, ...] = ()):
    found = shutil.which(program)
    if found is None:
      raise ValueError(f"env.emulator is {program!r}, and there is no such program: install Android's SDK or say where it is")
    self.avd, self.snapshot = avd, snapshot
    self.port, self.lock = take_ports()
    self.nest = Nest("emulator")
    env = dict(os.environ)
    home = os.path.expanduser(os.environ.get("ANDROID_USER_HOME", "~/.android"))
    env |= {"HOME": str(self.nest.folder), "ANDROID_AVD_HOME": os.environ.get("ANDROID_AVD_HOME", f"{home}/avd")}
    start = ["-snapshot", snapshot, "-no-snapshot-save"] if snapshot else ["-no-snapshot"]
    try:
      self.child: Child = self.nest.start(
        [found, "-avd", avd, "-read-only", "-no-window", "-no-audio", "-no-boot-anim", "-skip-adb-auth", *start,
         "-ports", f"{self.port},{self.port + 1}", "-grpc", str(self.port + 2), *args], env,
      )  # fmt: skip
    except BaseException:
      self.close()
      raise

  @property
  def serial(self) -> str:
    return f"127.0.0.1:{self.port + 1}"

  def said(self) -> str:
    return f"emulator -avd {self.avd} ({self.child.fate()}) printed last: {' | '.join(self.child.tail()) or 'nothing'}"[-3000:]

  def check(self) -> None:
    if not self.child.running():
      raise EmulatorDied(self.said())

  def boot(self, device: Device, seconds: float) -> None:
    """Waits until Android is up; BootDeadline or EmulatorDied with the last lines that the emulator printed."""
    until, told = time.monotonic() + seconds, "no adb connection"
    while (left := until - time.monotonic()) > 0:
      self.check()
      try:
        device.attach(min(left, 5.0))
        told = device.shell("getprop sys.boot_completed", min(left, 5.0)).strip() or "sys.boot_completed is not set"
        if told == "1":
          return
      except InfraError as fault:
        told = str(fault)
      time.sleep(min(0.2, max(left, 0.0)))
    raise BootDeadline(f"Android was not up within {seconds:g} s ({told}); {self.said()}")

  def console(self, command: str, seconds: float = CONSOLE_SECONDS) -> str:
    """What the console answers before its OK; its key is in the emulator's own home, which no other emulator writes."""
    self.check()
    with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as talk, talk.makefile("rwb") as lines:
      self._answer(lines)
      token = self.nest.folder / ".emulator_console_auth_token"
      said = ""
      for line in [f"auth {token.read_text().strip()}", command] if token.exists() else [command]:
        lines.write(line.encode() + b"\n")
        lines.flush()
        said = self._answer(lines)
      return said

  def _answer(self, lines) -> str:
    said = []
    for line in lines:
      text = line.decode(errors="replace").strip()
      if text == "OK":
        return "\n".join(said)
      if text.startswith("KO"):
        raise EmulatorRefused(f"{self.avd}: {text}")
      said.append(text)
    raise EmulatorDied(f"the console closed; {self.said()}")

  def restore(self) -> None:
    """Back to the saved state."""
    try:
      self.console(f"avd snapshot load {self.snapshot}")
    except OSError as error:
      self.check()
      raise EmulatorRefused(f"{self.avd}: the console on port {self.port} did not answer: {error}") from None

  def close(self) -> None:
    self.nest.close()
    self.lock.close()
