"""One process of QEMU: how it is started, what it says, what its screen shows. envs/qemu.py makes a machine of it."""

from __future__ import annotations

import base64
import os
import pathlib
import resource
import shutil
import subprocess
import time

import numpy as np

from envs import images
from envs.children import Child, Nest
from envs.errors import BadFrame, InfraError
from envs.guest import Guest
from envs.images import Image
from envs.monitor import Monitor, Refused, VmHung

PROGRAM = "qemu-system-x86_64"
SHARE_IDLE = 0.15  # of the time in which it could have run that a processor at rest may run
CONSOLE = 1 << 16  # bytes of what the guest printed last that are kept


class VmPaused(InfraError):
  """The virtual machine does not run, and nobody asked it to stop."""


class VmRestarted(InfraError):
  """The guest was reset, from inside or by a fault of its processor: what stands there is no longer the state that was started."""


class VmPanicked(InfraError):
  """The guest's kernel panicked."""


class OverlayFull(InfraError):
  """The machine's own disk file hit its limit, or the host's disk is full: the guest was stopped in the middle of a write."""


class VmFault(InfraError):
  """QEMU refused what always works."""


class PoweredOff(Exception):
  """The guest was shut down from inside, which a policy can do: the end of a try, not a fault. `revert` starts it again."""


def tool(argv: list[str]) -> None:
  """Runs what makes a machine's own files; where it fails, the host's disk is full or slow, and no knob is wrong."""
  try:
    images.run(argv)
  except ValueError as error:
    raise VmFault(f"a file of the machine's own could not be made: {error}"[:400]) from None


def memory_of(image: Image, cfg) -> int:
  return cfg.memory_mb or image.memory_mb


def screen_of(image: Image, cfg) -> tuple[int, int]:
  """(width, height) of a machine's screen."""
  return tuple(cfg.screen) if any(cfg.screen) else image.screen


def command(image: Image, cfg, kind: str, disk: pathlib.Path, memory: pathlib.Path | None, shared: bool) -> list[str]:
  """QEMU's command line, to be run in the folder of its monitor's socket. kind: kvm or tcg; memory: a file for the guest's memory, which it
  writes if `shared`."""
  width, height = screen_of(image, cfg)
  quoted = lambda path: os.fspath(path).replace(",", ",,")
  size = f"{memory_of(image, cfg)}M"
  backend = f"memory-backend-{'ram' if memory is None else 'file'},id=ram0,size={size}"
  backend += "" if memory is None else f",mem-path={quoted(memory)},share={'on' if shared else 'off'},prealloc=off"
  forward = f"user,id=net0,restrict={'on' if cfg.network == 'off' else 'off'},hostfwd=tcp:127.0.0.1:0-:{cfg.guest_port}"
  argv = [images.program(PROGRAM), "-nodefaults", "-no-user-config", "-machine", "q35,usb=off,i8042=off,memory-backend=ram0"]
  argv += ["-accel", "tcg,thread=multi,tb-size=256" if kind == "tcg" else "kvm", "-cpu", "qemu64", "-smp", str(cfg.cpus), "-m", size]
  argv += ["-object", backend, "-rtc", "base=2026-01-05T10:00:00,clock=vm", "-no-shutdown", "-display", "none", "-monitor", "none"]
  argv += ["-device", f"VGA,id=vga0,edid=on,xres={width},yres={height},vgamem_mb={16 if width * height <= 4_000_000 else 64}"]
  argv += ["-device", "virtio-keyboard-pci", "-device", "virtio-tablet-pci", "-device", "virtio-rng-pci"]
  argv += ["-netdev", forward, "-device", "virtio-net-pci,netdev=net0,romfile="]
  drive = f"file={quoted(disk)},if=none,id=drive0,node-name=disk0,format=qcow2,cache=unsafe,discard=unmap,werror=stop,rerror=stop"
  argv += ["-drive", drive]
  argv += ["-device", "virtio-blk-pci,drive=drive0" + ("" if image.kernel else ",bootindex=0")]
  if image.kernel is not None:
    argv += ["-kernel", os.fspath(image.kernel), "-initrd", os.fspath(image.initrd), "-append", image.append]
  argv += ["-device", "pvpanic-pci", "-action", "panic=pause"]
  argv += ["-chardev", "socket,id=qmp0,path=qmp", "-mon", "chardev=qmp0,mode=control"]
  return argv + ["-chardev", f"ringbuf,id=serial0,size={CONSOLE}", "-serial", "chardev:serial0"]


class Vm:
  """One running process. disk: its own file, made before; memory: a file for the guest's memory, which it writes if `shared`; more: further
  words of the command line. It answers its monitor when this returns, within `seconds`."""

  def __init__(
    self, image: Image, cfg, kind: str, nest: Nest, disk: pathlib.Path, memory: pathlib.Path | None, shared: bool, seconds: float,
    more: tuple[str, ...] = (),
  ):  # fmt: skip
    self.cfg, self.nest, self.size = cfg, nest, screen_of(image, cfg)
    self.picture: int = -1
    self.monitor: Monitor | None = None
    try:
      self.picture = os.memfd_create("screen")
      self.monitor = Monitor(nest.folder / "qmp")
      argv = command(image, cfg, kind, disk, memory, shared)
      # a write past the limit must come back as an error, which stops the guest; by default its signal would end QEMU without a word
      argv = ["/bin/sh", "-c", 'trap "" XFSZ; exec "$@"', "sh", *argv, *more]
      self.child: Child = nest.start(argv, {"PATH": os.environ.get("PATH", ""), "HOME": os.fspath(nest.folder), "LC_ALL": "C"})
      self.monitor.accept(self.child, seconds)
      limit = cfg.overlay_mb << 20
      resource.prlimit(self.child.pid, resource.RLIMIT_FSIZE, (limit, limit))
      self.thread = self.call("query-cpus-fast")[0]["thread-id"]
      self.guest = Guest(self._port(), seconds=cfg.guest_seconds)
    except BaseException:
      self.end()
      raise

  def end(self) -> None:
    """Ends the process at once, stopped or not, and what it left on disk."""
    if hasattr(self, "child") and self.child.running():
      self.child.popen.kill()
      self.child.popen.wait(10.0)
    if self.monitor is not None:
      self.monitor.close()
    self.nest.close()
    if self.picture >= 0:
      os.close(self.picture)
      self.picture = -1

  def quit(self, seconds: float) -> None:
    """Asks the process to end and waits until it has written the last of its disk."""
    self.call("quit")
    try:
      self.child.popen.wait(seconds)
    except subprocess.TimeoutExpired:
      raise VmHung(f"QEMU (pid {self.child.pid}) did not end within {seconds:g} s of being told to") from None

  def call(self, name: str, **arguments):
    """What QEMU says to a command that always works."""
    try:
      return self.monitor.call(name, self.cfg.call_seconds, **arguments)
    except Refused as refused:
      raise VmFault(str(refused)) from None

  def _port(self) -> int:
    """The port of this machine that QEMU took for the guest's server."""
    for line in self.call("human-monitor-command", **{"command-line": "info usernet"}).splitlines():
      words = line.split()
      if words and words[0] == "TCP[HOST_FORWARD]" and int(words[5]) == self.cfg.guest_port:
        return int(words[3])
    raise VmFault("QEMU forwards no port to the guest")

  def running(self) -> None:
    """InfraError, or PoweredOff, unless the guest runs."""
    status = self.call("query-status")["status"]
    if any(e["event"] == "RESET" and e["data"].get("guest") for e in self.monitor.events):
      raise VmRestarted("the guest was reset while it ran: a reboot from inside, or its processor gave up")
    if status == "guest-panicked":
      raise VmPanicked(f"the guest's kernel panicked; it printed last: {' | '.join(self.serial()[-5:]) or 'nothing'}"[:600])
    if status == "io-error":
      reasons = [e["data"].get("reason", "") for e in self.monitor.events if e["event"] == "BLOCK_IO_ERROR"]
      raise OverlayFull(
        f"a write to the machine's disk failed ({reasons[-1] if reasons else 'no reason given'}): its file may take "
        f"{self.cfg.overlay_mb} MB (env.overlay_mb), the host's disk has {shutil.disk_usage(self.nest.folder).free >> 20} MB left"
      )
    if status == "shutdown":
      raise PoweredOff("the guest was shut down")
    if status != "running":
      raise VmPaused(f"the machine is {status!r}, wanted 'running'")

  def serial(self) -> list[str]:
    """What the guest printed on its console since it was last asked, the last of it where that is much."""
    told = self.call("ringbuf-read", device="serial0", size=CONSOLE, format="base64")
    return base64.b64decode(told).decode(errors="replace").splitlines()

  def screenshot(self) -> np.ndarray:
    """uint8 [H, W, 3], as the guest's graphics card has it now."""
    self.call("screendump", filename=f"/proc/{os.getpid()}/fd/{self.picture}", format="ppm")
    data = os.pread(self.picture, os.fstat(self.picture).st_size, 0)
    try:
      magic, numbers, most, pixels = data.split(b"\n", 3)
      width, height = map(int, numbers.split())
      if (magic, most) != (b"P6", b"255") or len(pixels) != 3 * width * height:
        raise ValueError
    except ValueError:
      raise BadFrame(f"a screendump of {len(data)} bytes is no whole picture: {data[:20]!r}") from None
    self.size = (width, height)
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)

  def busy(self) -> tuple[int, int, bool]:
    """Nanoseconds that the guest's processor has run so far, and that it has waited for a processor of the host; whether it has nothing to
    do now. (A wait that goes on is not counted yet, and nobody who waits has nothing to do.)"""
    place = pathlib.Path(f"/proc/{self.child.pid}/task/{self.thread}")
    try:
      asleep = (place / "stat").read_text().rpartition(")")[2].split()[0] != "R"
      ran, waited, _ = (place / "schedstat").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
      self.call("query-status")  # says what became of it
      raise VmFault("the guest's processor has no thread") from None
    return int(ran), int(waited), asleep

  def idle(self, seconds: float, window: float | None = None) -> bool:
    """Waits until the guest's processor has been idle for the window, at most so long; whether it was."""
    window = self.cfg.settle_window if window is None else window
    until, seen = time.monotonic() + seconds, [(time.monotonic(), *self.busy())]
    while True:
      now = time.monotonic()
      seen.append((now, *self.busy()))
      while len(seen) > 2 and seen[1][0] <= now - window:
        seen.pop(0)
      (then, ran, waited, _), last = seen[0], seen[-1]
      if now - then >= window and resting(1e9 * (now - then), last[1] - ran, last[2] - waited, last[3]):
        return True
      if now >= until:
        return False
      time.sleep(min(window / 5, 0.025))


def resting(span: float, ran: int, waited: int, asleep: bool) -> bool:
  """Whether a processor was idle over `span` nanoseconds, of which it ran and waited for a processor of the host so many. On a busy host
  one with work to do hardly runs, but waits; one without wakes now and then, may wait long for each of its moments, and sleeps after it.
  So what counts is how much it ran of the time in which nobody kept it from running."""
  free = span - waited
  return asleep and free > 0 and ran <= SHARE_IDLE * free
