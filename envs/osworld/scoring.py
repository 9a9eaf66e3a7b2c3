"""How the benchmark scores the end of an episode (DesktopEnv.evaluate): FAIL, infeasible tasks, lists of metrics, missing files.

Always the strict rule: only what the agent wrote itself is its last action. At a step limit nothing is swapped for FAIL, and an
infeasible task that ran out of steps is a fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from envs.osworld.getters import FileMissing, LeftBad
from envs.osworld.taskfile import TaskFile


class Score(NamedTuple):
  """value: 0 to 1. parts: of each metric that was computed; told: why a part is 0 where a file could not be had or read."""

  value: float
  parts: tuple[float, ...]
  told: tuple[str, ...] = ()


def by_claim(task: TaskFile, gave_up: bool) -> Score | None:
  """The score where what the agent claimed decides it alone: FAIL passes exactly the tasks that cannot be done. None otherwise."""
  if task.infeasible:
    return Score(float(gave_up), ())
  return Score(0.0, ()) if gave_up else None


def by_checks(task: TaskFile, compute: Callable[[int], tuple[float, str]]) -> Score:
  """The score of the state. compute(i) -> (score of check i, why it is 0 or ""); FileMissing and LeftBad score 0.

  "and": 0 at the first zero, else the mean; "or": 1 at the first 1, else the largest.
  """
  parts, told = [], []
  for i in range(len(task.checks)):
    try:
      value, why = compute(i)
    except FileMissing as missing:
      value, why = 0.0, f"no file {missing}"
    except LeftBad as left:
      value, why = 0.0, str(left)
    parts.append(value)
    told += [why] if why else []
    if task.conj == "and" and value == 0 and len(task.checks) > 1:
      return Score(0.0, tuple(parts), tuple(told))
    if task.conj == "or" and value == 1 and len(task.checks) > 1:
      return Score(1.0, tuple(parts), tuple(told))
  return Score(sum(parts) / len(parts) if task.conj == "and" else max(parts), tuple(parts), tuple(told))
