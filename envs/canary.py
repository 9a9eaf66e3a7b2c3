"""Canaries: scripted episodes whose score is known. A computer that gives another score is not to be believed.

A known-good episode must score 1 (a dead checker scores nothing) and doing nothing must score 0 (a broken one passes everything,
or the task passes untouched).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from core.schema import SUCCESS, Task


class Canary(NamedTuple):
  """One scripted episode. texts: what the agent writes, step by step; where they run out before the episode ends, it is ended and
  checked as it stands. score: what must come out, 1.0 or 0.0."""

  name: str
  task: Task
  texts: tuple[str, ...]
  score: float


def known_good(task: Task, texts) -> Canary:
  """An episode that solves its task."""
  return Canary("known-good", task, tuple(texts), 1.0)


def do_nothing(task: Task) -> Canary:
  """Looks at the start screen and is checked."""
  return Canary("do-nothing", task, (), 0.0)


class CanaryRun:
  """Plays canaries one after the other. `next` takes what the worker said and returns what to ask it.

  token: the worker's, for the whole run. passed(): called for every right score. wrong: "" while every score was the known one,
  else one line; passes_untouched: id of a task that doing nothing passes."""

  def __init__(self, canaries, token: int, passed: Callable[[], None] = lambda: None):
    self._left, self.token, self._passed = list(canaries), token, passed
    self._texts: list[str] = []
    self._acts = 0
    self.canary: Canary | None = None
    self.wrong, self.passes_untouched = "", ""

  def next(self, op: str, value: Any) -> tuple[str, dict] | None:
    """(operation, what goes with it) to ask for now; None at the end. op, value: what was asked before and came back; op is ""
    at the start."""
    if op == "reset":
      return self._go_on()
    if op == "step":
      _, _, terminated, truncated, info = value
      if not (terminated or truncated):
        return self._go_on()
    if op in ("step", "expire"):
      info = value[4] if op == "step" else value
      if not self._judge(info):
        return None
    if not self._left:
      return None
    self.canary, self._acts = self._left.pop(0), 0
    self._texts = list(self.canary.texts)
    return "reset", {"task": self.canary.task, "seed": None}

  def _go_on(self) -> tuple[str, dict]:
    if not self._texts:
      return "expire", {}
    self._acts += 1
    return "step", {"text": self._texts.pop(0), "act": self._acts}

  def _judge(self, info: dict) -> bool:
    canary, got = self.canary, float(info["rewards"][SUCCESS] >= 1.0)
    if got == canary.score:
      self._passed()
      return True
    self.wrong = f"canary {canary.name} on task {canary.task.id} scored {got:g}, wanted {canary.score:g}"
    self.passes_untouched = canary.task.id if got and not canary.texts else ""
    return False
