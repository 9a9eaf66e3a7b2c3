"""Virtual machines behind QEMU's monitor: one process each, over a disk that is never written and a saved state that all clones share.

  image = images.find(cfg.image, cfg.cache)
  with Machine(ready(image, cfg), cfg) as machine:      # the desktop, up and at rest: booted once, cloned in a tenth of a second
    machine.act(action); frame, rested = machine.settle(); machine.guest.file("~/Desktop/memo.txt"); machine.revert()
  writer = derive(ready(image, cfg), "writer", open_writer, cfg)      # a template of one's own: open_writer(machine) makes it so

What a machine starts from comes back with `revert`: another process, not a rewound one, so whatever state a broken one was in is gone.
docs/desktop.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pathlib
import shlex
import shutil
import sys
import time
from collections.abc import Callable

import ml_collections
import numpy as np

from core.schema import Action
from envs import accel, images, qcodes
from envs.children import Nest
from envs.errors import BlackFrame, BootDeadline, InfraError, NoComputer
from envs.guest import Guest
from envs.handset import Untypable
from envs.images import Image, Template
from envs.locks import take
from envs.monitor import VmDied, VmHung
from envs.vm import PROGRAM, OverlayFull, PoweredOff, Vm, VmFault, VmPanicked, VmPaused, VmRestarted, memory_of, screen_of, tool
from envs.vm_input import GAP, CutShort, Input

__all__ = ["Machine", "Untypable", "CutShort", "PoweredOff", "OverlayFull", "VmDied", "VmHung", "VmFault", "VmPaused", "VmRestarted"]
__all__ += ["VmPanicked", "RestoreFailed", "ScreenFrozen", "defaults", "check", "ready", "derive"]

RECIPE = 2  # a template of another recipe is not used
STILL = 3  # actions in a row that changed nothing, after which it is looked whether the screen is alive
LIT_SECONDS = 2.0  # in which a screen that was switched off comes back
CLOCK_SECONDS = 2.0  # by which a guest's clock may be off


class RestoreFailed(InfraError):
  """A saved state did not come back as it was: not running, another screen, another time."""


class ScreenFrozen(InfraError):
  """The screen does not show what happens: the pointer was moved and no pixel changed."""


def defaults() -> ml_collections.ConfigDict:
  """Knobs of virtual machines; seconds unless said otherwise."""
  return ml_collections.ConfigDict(
    {
      "image": "",  # a disk, a folder of tools/build_desktop.py, or "debian": the last one it made
      "cache": "~/.cache/practice/desktop",  # images and saved states
      "accel": "auto",  # kvm, tcg (emulation), or auto: kvm where a guest really runs on it
      "state": "memory",  # what a saved state is: memory (a file that all clones share) or snapshot (inside each clone's disk)
      "memory_mb": 0,  # of each machine; 0: what the image wants
      "screen": (0, 0),  # (width, height); (0, 0): what the image wants
      "cpus": 1,
      "network": "off",  # what the guest reaches: off (nothing) or open (the outside; for tasks that need it)
      "guest_port": 5000,  # of the server inside
      "overlay_mb": 4096,  # most that a machine's own disk file may take
      "reserve_mb": 512,  # memory that must stay free when a machine starts
      "boots": 2,  # cold boots at a time on this machine
      "boot_seconds": 300.0,  # of a cold boot, up to an answer of the guest's server
      "restore_seconds": 30.0,  # of starting a clone
      "call_seconds": 10.0,  # of any one call to QEMU
      "guest_seconds": 15.0,  # of a call to the guest's server that names no deadline
      "settle_most": 10.0,  # after an action; then the screen counts as it is
      "settle_window": 0.25,  # for so long the guest's processor must have been idle
      "settle_tolerance": 0.0,  # share of pixels that may differ between two looks at a screen at rest
      "wait_seconds": 1.0,  # of the agent's wait
    }
  )


def check(cfg: ml_collections.ConfigDict) -> None:
  """Domains of the knobs and the image; each failure one line, before any machine starts."""
  images.program(PROGRAM)
  size = tuple(cfg.screen)
  wanted = {
    "accel": (cfg.accel in ("auto", "kvm", "tcg"), "auto, kvm or tcg"),
    "state": (cfg.state in ("memory", "snapshot"), "memory or snapshot"),
    "memory_mb": (cfg.memory_mb == 0 or 128 <= cfg.memory_mb <= 65536, "0 (the image's own) or 128 to 65536 MB"),
    "screen": (len(size) == 2 and (not any(size) or all(320 <= n <= 4096 for n in size)), "(0, 0), or width and height of 320 to 4096"),
    "cpus": (1 <= cfg.cpus <= 64, "1 to 64"),
    "network": (cfg.network in ("off", "open"), "off or open"),
    "guest_port": (1 <= cfg.guest_port <= 65535, "a port"),
    "overlay_mb": (cfg.overlay_mb >= 64, "64 MB or more"),
    "reserve_mb": (cfg.reserve_mb >= 0, "0 MB or more"),
    "boots": (cfg.boots >= 1, "1 or more"),
    "settle_tolerance": (0 <= cfg.settle_tolerance < 1, "a share, 0 or more and below 1"),
  }
  for name in ("boot_seconds", "restore_seconds", "call_seconds", "guest_seconds", "settle_most", "settle_window", "wait_seconds"):
    wanted[name] = (0 < cfg[name] < 3600, "seconds above 0")
  for name, (good, want) in wanted.items():
    if not good:
      raise ValueError(f"env.{name} is {cfg[name]!r}, wanted {want}")
  images.find(cfg.image, cfg.cache)
  accel.chosen(images.program(PROGRAM), cfg.accel)


class Machine(Input):
  """One virtual machine. start: a Template to clone, or an Image to boot. It is up, looked at and found right when this returns.

  guest: the client of the server inside. size: (width, height) of the screen. pid: of QEMU. pointer: where it was put last.
  workshop: a folder to leave disk and memory in, from which `save` makes a template; only `ready` and `derive` give one.

  What breaks is an InfraError: VmDied, VmHung, VmPaused, OverlayFull, ScreenFrozen, BlackFrame, BadFrame, RestoreFailed, VmFault and
  those of envs.guest. After any of them `revert` gives a machine that works, in a process of its own.
  """

  def __init__(self, start: Template | Image, cfg: ml_collections.ConfigDict, workshop: pathlib.Path | None = None):
    self.start, self.cfg, self.workshop = start, cfg, workshop
    self.image = start if isinstance(start, Image) else start.image
    self.kind = accel.chosen(images.program(PROGRAM), cfg.accel)
    self.vm: Vm | None = None
    try:
      self._start()
    except BaseException:
      self.close()
      raise

  def __enter__(self) -> Machine:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  # -- its life

  def revert(self) -> None:
    """The state that it started from, in a new process; whatever the old one did is gone with it."""
    self.close()
    self._start()

  def close(self) -> None:
    vm, self.vm = self.vm, None
    if vm is not None:
      vm.end()

  @property
  def pid(self) -> int:
    return self.vm.child.pid

  @property
  def guest(self) -> Guest:
    return self.vm.guest

  @property
  def size(self) -> tuple[int, int]:
    return self.vm.size

  def _start(self) -> None:
    need = memory_of(self.image, self.cfg) + self.cfg.reserve_mb
    if (left := images.available_mb()) < need:
      raise NoComputer(f"a virtual machine wants {need} MB with env.reserve_mb, this machine has {left:.0f} MB left")
    if self.workshop and (free := shutil.disk_usage(self.workshop).free >> 20) < need - self.cfg.reserve_mb:
      # QEMU would be killed without a word (SIGBUS) when the file of the guest's memory can grow no more
      raise OverlayFull(f"a saved state may take {need - self.cfg.reserve_mb} MB in {self.workshop.parent} (env.cache), {free} MB are left")
    self._unchanged, self._last, self.held = 0, None, frozenset()
    if isinstance(self.start, Image):
      self._boot()
    else:
      self._restore(self.start)
    self.pointer = (self.size[0] // 2, self.size[1] // 2)

  def _launch(self, memory: pathlib.Path | None, shared: bool, seconds: float, more: tuple[str, ...] = ()) -> None:
    """Starts QEMU over a disk file of its own, which stays in the workshop if there is one."""
    nest = Nest("vm")
    try:
      disk = (self.workshop or nest.folder) / "disk.qcow2"
      if isinstance(self.start, Template) and self.start.kind == "snapshot":
        tool(["cp", "--reflink=auto", "--sparse=always", os.fspath(self.start.disk), os.fspath(disk)])
        disk.chmod(0o600)
      else:
        form = self.image.format if isinstance(self.start, Image) else "qcow2"
        argv = [images.program("qemu-img"), "create", "-q", "-f", "qcow2", "-b", os.fspath(self.start.disk), "-F", form]
        tool([*argv, os.fspath(disk)])
    except BaseException:
      nest.close()
      raise
    self.vm = Vm(self.image, self.cfg, self.kind, nest, disk, memory, shared, seconds, more)

  def _boot(self) -> None:
    """A cold boot, few at a time, up to the first answer of the guest's server and a screen at rest."""
    _, lock = take("desktop-boot", [str(i) for i in range(self.cfg.boots)], 0, self.cfg.boot_seconds)
    until = time.monotonic() + self.cfg.boot_seconds
    try:
      memory = self.workshop / "memory" if self.workshop and self.cfg.state == "memory" else None
      self._launch(memory, True, self.cfg.call_seconds)
      fault = None
      while time.monotonic() < until:
        try:
          self.guest.wait(min(5.0, until - time.monotonic()))
          break
        except InfraError as last:
          fault = last
          self.vm.running()
      else:
        told = " | ".join(self.vm.serial()[-5:]) or "nothing"
        raise BootDeadline(f"no desktop within {self.cfg.boot_seconds:g} s: {fault}; the guest printed last: {told}")
      while not self.settle()[1]:
        if time.monotonic() > until:
          raise BootDeadline(f"the desktop's screen did not come to rest within {self.cfg.boot_seconds:g} s")
    finally:
      lock.close()

  def _restore(self, template: Template) -> None:
    """A clone of a saved state, and the checks that it is one."""
    until = time.monotonic() + self.cfg.restore_seconds
    if template.kind == "snapshot":
      self._launch(None, False, self.cfg.restore_seconds, ("-loadvm", "ready", "-S"))
    else:
      memory = template.memory
      if self.workshop:
        memory = self.workshop / "memory"
        tool(["cp", "--reflink=auto", "--sparse=always", os.fspath(template.memory), os.fspath(memory)])
        memory.chmod(0o600)
      self._launch(memory, bool(self.workshop), self.cfg.restore_seconds, ("-incoming", "defer"))
      self._take_in(template.state, until)
    self.vm.call("cont")
    woken = time.monotonic()
    if (status := self.vm.call("query-status")["status"]) != "running":
      raise RestoreFailed(f"the machine is {status!r} after its state was loaded and it was told to run")
    frame = self._same_screen(template, until)
    if not frame.any():
      raise BlackFrame("every pixel of the machine's screen is black after its state was loaded")
    self._last = frame
    if not math.isnan(template.clock):
      told, real = self.guest.clock() - template.clock, time.monotonic() - woken
      if not -CLOCK_SECONDS <= told <= real + CLOCK_SECONDS:
        raise RestoreFailed(f"the guest's clock is {told:.1f} s past the saved time, {real:.1f} s after it was woken")

  def _take_in(self, state: pathlib.Path, until: float) -> None:
    """Loads what is not memory: processor, devices, the contents of the screen."""
    try:
      self._leave_out_memory(True)
      self.vm.call("migrate-incoming", uri=f"exec:cat {shlex.quote(os.fspath(state))}")
      while (status := self.vm.call("query-status")["status"]) == "inmigrate":
        if time.monotonic() > until:
          raise RestoreFailed(f"the saved state was not loaded within {self.cfg.restore_seconds:g} s")
        time.sleep(0.005)
    except VmDied as died:
      raise RestoreFailed(f"the saved state was refused: {died}") from None
    if status != "paused":
      raise RestoreFailed(f"the machine is {status!r} after its state was loaded, wanted 'paused'")

  def _leave_out_memory(self, out: bool) -> None:
    """Whether what is saved or loaded next is without the memory that lies in a file of its own."""
    self.vm.call("migrate-set-capabilities", capabilities=[{"capability": "x-ignore-shared", "state": out}])

  def _same_screen(self, template: Template, until: float) -> np.ndarray:
    while (share := differing(frame := self.screenshot(), template.screen)) > self.cfg.settle_tolerance:
      if time.monotonic() > until:
        raise RestoreFailed(f"the start screen differs from the saved one in {100 * share:.2g}% of its pixels")
      time.sleep(GAP)
    return frame

  def save(self, seconds: float = 60.0) -> Template:
    """Makes the workshop a template of the state that the machine is in, and ends the machine: nothing may write there any more."""
    if self.workshop is None:
      raise ValueError("this machine has no workshop: templates are made by ready() and derive()")
    until = time.monotonic() + seconds
    while not (looked := self.settle())[1]:
      if time.monotonic() > until:
        raise BootDeadline(f"the screen did not come to rest within {seconds:g} s, and a state that moves cannot be told from another")
    if not looked[0].any():
      raise BlackFrame("every pixel of the machine's screen is black, and no episode may begin there")
    template = Template(self.workshop, self.image, self.cfg.state, self.guest.clock())
    self.vm.call("stop")
    self._leave_out_memory(self.cfg.state == "memory")  # a clone of a memory file was loaded without, and a snapshot needs it
    if self.cfg.state == "snapshot":
      self.vm.call("snapshot-save", **{"job-id": "save", "tag": "ready", "vmstate": "disk0", "devices": ["disk0"]})
      self._finish(lambda: next(j for j in self.vm.call("query-jobs") if j["id"] == "save"))
    else:
      self.vm.call("migrate", uri=f"exec:cat > {shlex.quote(os.fspath(template.state))}")
      self._finish(lambda: self.vm.call("query-migrate"))
    self.vm.quit(self.cfg.restore_seconds)
    self.close()
    for path in (template.disk, template.memory, template.state):
      if path.exists():
        path.chmod(0o444)
    template.write(looked[0])
    return template

  def _finish(self, ask: Callable[[], dict]) -> None:
    until = time.monotonic() + self.cfg.restore_seconds
    while (told := ask()).get("status") not in ("completed", "failed", "cancelled", "concluded"):
      if time.monotonic() > until:
        raise VmFault(f"saving the state did not end within {self.cfg.restore_seconds:g} s: {told}")
      time.sleep(0.01)
    if told["status"] not in ("completed", "concluded") or "error" in told:
      raise VmFault(f"saving the state failed: {told}")

  # -- what it shows

  def screenshot(self) -> np.ndarray:
    """uint8 [H, W, 3], as the guest's graphics card has it now."""
    return self.vm.screenshot()

  def settle(self, seconds: float | None = None) -> tuple[np.ndarray, bool]:
    """Waits until the guest is idle and two looks agree, at most env.settle_most; (the last look, whether it came to rest). It is black
    only where whoever uses the guest made it so."""
    until = time.monotonic() + (self.cfg.settle_most if seconds is None else seconds)
    frame, rested = self._rest(until)
    if not frame.any() and self._lit():
      frame, rested = self._rest(until)
    return frame, rested

  def _rest(self, until: float) -> tuple[np.ndarray, bool]:
    while True:
      self.vm.running()
      idle = self.vm.idle(max(until - time.monotonic(), 0.0), self.cfg.settle_window)
      first = self.screenshot()
      time.sleep(GAP)
      frame = self.screenshot()
      rested = idle and differing(first, frame) <= self.cfg.settle_tolerance
      if rested or time.monotonic() > until:
        break
    self.vm.running()
    return frame, rested

  def _lit(self) -> bool:
    """Of a black screen: whether it was switched off, and a moved pointer switched it on. One that stays black under a server that answers
    is what somebody inside wanted (xrandr --off); BlackFrame where it does not answer either."""
    with contextlib.suppress(ScreenFrozen):
      self.alive(LIT_SECONDS)
      return True
    try:
      self.guest.clock()
    except InfraError as lost:
      raise BlackFrame(f"every pixel of the machine's screen is black, and its server is no better: {lost}") from lost
    return False

  def alive(self, seconds: float = 5.0) -> None:
    """Moves the pointer away and back. ScreenFrozen if no pixel changes."""
    self.vm.running()
    frame, place = self.screenshot(), self.pointer
    there = tuple(at + (16 if at < length // 2 else -16) for at, length in zip(place, self.size))
    self.send(qcodes.move(there, self.size))
    until = time.monotonic() + seconds
    while differing(self.screenshot(), frame) == 0:
      if time.monotonic() > until:
        raise ScreenFrozen(f"the pointer was moved from {place} to {there} and no pixel changed for {seconds:g} s")
      time.sleep(0.02)
    self.move(place)

  def _watch(self) -> None:
    """Before an action: if the last ones changed nothing, does the screen show anything at all?"""
    frame = self.screenshot()
    same = self._last is not None and differing(self._last, frame) == 0
    self._unchanged, self._last = self._unchanged + 1 if same else 0, frame
    if self._unchanged >= STILL:
      self.alive() if frame.any() else self._lit()
      self._unchanged = 0

  def health(self) -> None:
    """InfraError if the machine does not run; its screen and its server are looked at when they are used."""
    self.vm.running()

  def waited(self) -> float:
    """Seconds so far in which the guest had work and no processor of the host to do it on."""
    return self.vm.busy()[1] / 1e9

  # -- what is done to it: see Input

  def act(self, action: Action) -> None:
    """Does one action of the desktop grammar that is not an end; `settle` then looks at what came of it. Untypable does nothing."""
    kind, args = action.kind, action.args
    self.vm.running()
    self._watch()
    match kind:
      case "click" | "left_double" | "right_single":
        self.click(args["point"], "right" if kind == "right_single" else "left", 2 if kind == "left_double" else 1)
      case "drag":
        self.drag(args["start"], args["end"])
      case "scroll":
        self.scroll(args["point"], args["direction"])
      case "hotkey":
        self.press(args["keys"])
      case "type":
        self.type(args["text"])
        if args["enter"]:
          self.press(["enter"])
      case "wait":
        time.sleep(self.cfg.wait_seconds)
      case _:
        raise ValueError(f"action {kind!r} is not one of a desktop")


def differing(a: np.ndarray, b: np.ndarray) -> float:
  """Share of pixels that differ between two screens; 1 if their sizes do."""
  return 1.0 if a.shape != b.shape else 0.0 if np.array_equal(a, b) else float((a != b).any(-1).mean())


def key_of(image: Image, cfg, name: str) -> str:
  """What must be the same for a saved state to fit: image, QEMU, the machine's parts, how it came about."""
  binary = images.program(PROGRAM)
  parts = [RECIPE, image.digest, images.version(binary), accel.chosen(binary, cfg.accel), memory_of(image, cfg), screen_of(image, cfg)]
  parts += [cfg.cpus, cfg.network, cfg.guest_port, cfg.state, name, image.append]
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def folder_of(image: Image, cfg, name: str) -> pathlib.Path:
  return pathlib.Path(cfg.cache).expanduser().resolve() / "states" / key_of(image, cfg, name)


def ready(image: Image, cfg: ml_collections.ConfigDict) -> Template:
  """The image's desktop as it stands after a boot: saved the first time anyone asks, by one process while the others wait."""

  def make(workshop: pathlib.Path) -> None:
    print(f"booting {image.disk} once, to save its ready state", file=sys.stderr, flush=True)
    with Machine(image, cfg, workshop) as machine:
      machine.save()

  return images.made_once(folder_of(image, cfg, "ready"), image, 2 * cfg.boot_seconds, make)


def derive(base: Template, name: str, prepare: Callable[[Machine], None], cfg: ml_collections.ConfigDict) -> Template:
  """A template that `prepare` brings about from another, e.g. with an application open and one save done. name: says what prepare does,
  with its version: a state saved under the same name, over the same base, is taken as it is."""

  def make(workshop: pathlib.Path) -> None:
    with Machine(base, cfg, workshop) as machine:
      prepare(machine)
      machine.save()

  folder = folder_of(base.image, cfg, f"{base.folder.name}/{name}")
  return images.made_once(folder, base.image, 2 * cfg.boot_seconds, make)
