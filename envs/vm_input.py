"""Input of a virtual machine: the pointer, buttons and keys as QEMU's monitor sends them. envs/qemu.py's Machine has it."""

from __future__ import annotations

import math
import time

from envs import qcodes
from envs.guest import CommandTimeout
from envs.handset import Untypable
from envs.images import Image
from envs.vm import Vm, VmFault

CHUNK = 24  # presses and releases sent at once: two entries each, of the 64 that the guest's keyboard holds
GAP = 0.05  # seconds between two clicks, two looks, two movements
BOUNCE = 0.03  # of its own time that the guest must have had between two clicks
CLICKS = 5  # of the wheel for one scroll


class CutShort(Exception):
  """An action took longer than it may (Machine.until): the rest of it was left out. The policy's doing, not a fault."""


class Input:
  """until: of the monotonic clock; what an action still has to do then is left out, between two clicks, two turns of the wheel or two
  dozen keys, so that nothing stays down."""

  vm: Vm
  image: Image
  size: tuple[int, int]
  pointer: tuple[int, int]
  until: float = math.inf
  held: frozenset[str] = frozenset()  # qcodes of the keys that hold_key pressed

  def _on(self) -> None:
    if time.monotonic() > self.until:
      raise CutShort("the action took too long: the rest of it was left out")

  def send(self, events: list[dict]) -> None:
    """Input events as QMP has them, at once."""
    self.vm.call("input-send-event", events=events)

  def move(self, point: tuple[int, int]) -> None:
    """The pointer to a pixel; waits until the guest has seen it there, since a press that follows at once can be missed."""
    self.send(qcodes.move(point, self.size))
    self.pointer = tuple(point)
    self.vm.idle(1.0, GAP)

  def hold(self, button: str, down: bool) -> None:
    """A mouse button (left, middle, right) down or up."""
    self.send([qcodes.button(button, down)])

  def hold_key(self, name: str, down: bool) -> None:
    """A key by its canonical name or character, down or up: "left" is an arrow here."""
    code = qcodes.qcode_of(name)[0]
    self.send([qcodes.key(code, down)])
    self.held = self.held | {code} if down else self.held - {code}

  def release(self) -> None:
    """Every modifier and button up, and every key that `hold_key` left down: it would be typed again and again."""
    self.send([qcodes.key(code, False) for code in sorted(self.held)] + qcodes.release_all())
    self.held = frozenset()

  def click(self, point: tuple[int, int], button: str = "left", times: int = 1) -> None:
    """Presses and lets go, `times` times. Two commands, since what one command says is one frame to the guest, which sees no click in it;
    without a pause, so that a busy host does not pull a double-click apart. Between two clicks the guest gets some time of its own:
    libinput takes what follows within 25 ms for a switch that bounces."""
    self.move(point)
    for again in range(times):
      self._on()
      if again:
        time.sleep(GAP)
        self.vm.idle(2 * GAP, BOUNCE)
      self.hold(button, True)
      self.hold(button, False)

  def drag(self, start: tuple[int, int], end: tuple[int, int], button: str = "left", steps: int = 8) -> None:
    self.move(start)
    self.hold(button, True)
    try:
      for i in range(1, steps + 1):
        time.sleep(GAP / 2)
        self.send(qcodes.move([round(a + (b - a) * i / steps) for a, b in zip(start, end)], self.size))
      self.move(end)
    finally:
      self.hold(button, False)

  def scroll(self, point: tuple[int, int], direction: str, clicks: int = CLICKS) -> None:
    """direction: up, down, left or right."""
    self.move(point)
    for _ in range(clicks):
      self._on()
      self.send([qcodes.button(f"wheel-{direction}", True), qcodes.button(f"wheel-{direction}", False)])
      time.sleep(GAP / 5)

  def press(self, keys: list[str]) -> None:
    """Keys pressed together, by their canonical names (envs.grammars.keys): down in order, up in reverse."""
    events = qcodes.chord(keys)
    half = len(events) // 2
    try:
      for event in events[:half]:
        self.send([event])
      time.sleep(GAP / 2)
    finally:
      for event in events[half:]:
        self.send([event])

  def type(self, text: str) -> None:
    """Types text, key by key. Untypable, before the first key, where the keyboard lacks a character and the guest cannot help."""
    if not qcodes.typable(text):
      return self._type_inside(text)
    batch: list[dict] = []
    for char in text:
      stroke = qcodes.stroke(char)
      if len(batch) + len(stroke) > CHUNK:
        self._pour(batch)
        batch = []
      batch += stroke
    return self._pour(batch)

  def _pour(self, batch: list[dict]) -> None:
    """Sends keys and waits until the guest has taken them: its keyboard drops what does not fit."""
    self._on()
    if batch:
      self.send(batch)
      self.vm.idle(1.0, 0.01)

  def _type_inside(self, text: str) -> None:
    if not self.image.ours:
      raise Untypable(f"{text!r:.60} has characters that a US keyboard lacks")
    code = "import pyautogui, sys; pyautogui.FAILSAFE, pyautogui.PAUSE = False, 0; pyautogui.write(sys.argv[1], interval=0.01)"
    seconds = min(self.cfg.guest_seconds + 0.05 * len(text), max(self.until - time.monotonic(), 1.0))
    try:
      ran = self.guest.execute(["python3", "-c", code, text], seconds=seconds)
    except CommandTimeout:
      self._on()  # the guest's own fault if there was time left
      raise
    if ran.returncode:
      raise VmFault(f"typing in the guest: {ran.error[-300:]}")
