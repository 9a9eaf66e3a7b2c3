"""New tasks for the simulated computers, from failed ones: same family, one or two parameters changed, a new start state.

Every task is built by `build`, which knows the practised combinations only: a held-out one cannot come out, whoever asks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from core.schema import Task
from envs.sim import tasks
from envs.sim.popups import Popups

SEEDS = (2**40, 2**41)  # of generated start states: far from those that are practised, held out or demonstrated


@functools.lru_cache(maxsize=4)
def _combinations(computer: str) -> tuple[dict[str, dict[str, dict]], frozenset[str]]:
  """({family: {name: parameters}} that may be practised, names of the held-out ones)."""
  held, rest = tasks._pools(computer)
  allowed: dict[str, dict[str, dict]] = {}
  for family, params in rest:
    allowed.setdefault(family, {})[_name(params)] = params
  return allowed, frozenset(family + _name(params) for family, params in held)


def _name(params: Any) -> str:
  """Equal for equal JSON: 1, 1.0 and true are three different values."""
  return json.dumps(params, sort_keys=True)


def parameters(computer: str) -> dict[str, dict[str, list]]:
  """{family: {parameter: its values}}, JSON values. Not every combination may be practised: see `refusal`."""
  out: dict[str, dict[str, list]] = {}
  for family, combos in sorted(_combinations(computer)[0].items()):
    first = next(iter(combos.values()))
    values = {key: {_name(c[key]): c[key] for c in combos.values()} for key in first}
    out[family] = {key: [v for _, v in sorted(found.items())] for key, found in values.items()}
  return out


def refusal(computer: str, family: Any, params: Any) -> str:
  """Why a task cannot be built, in one word that is never the asker's own: "" if it can."""
  allowed, held = _combinations(computer)
  if not isinstance(family, str) or family not in allowed:
    return "unknown_family"
  try:
    name = _name(params)
  except (TypeError, ValueError, RecursionError):
    return "wrong_parameters"
  if family + name in held:
    return "held_out"
  return "" if name in allowed[family] else "wrong_parameters"


def build(computer: str, family: str, params: dict, seed: int) -> Task:
  """One task of a practised combination."""
  if why := refusal(computer, family, params):
    raise ValueError(f"no task of {computer} can be built from what was given: {why}")
  if not 0 <= seed < 2**63:
    raise ValueError(f"task seed is {seed}, wanted 0 or more, below 2^63")
  return tasks._task(computer, family, _combinations(computer)[0][family][_name(params)], seed)


def feasible(task: Task) -> bool:
  """Whether the scripted expert passes the task with no pop-up in its way."""
  from envs.sim.base import play

  return play(task.env, task, Popups()).success


class SimGenerator:
  """The simulators' own task generator. most_changes: parameters in which a new task may differ from the failed one."""

  def __init__(self, computer: str, most_changes: int = 2):
    if most_changes < 1:
      raise ValueError(f"most_changes is {most_changes}, wanted 1 or more parameters")
    _combinations(computer)  # refuses an unknown computer
    self.computer, self.most_changes = computer, most_changes

  def generate(self, failed: list[Task], count: int, rng: np.random.Generator) -> list[Task]:
    """`count` new tasks, the failed ones varied in turn, in random order. The same generator state gives the same tasks.

    Fewer only where a failed task has no practised neighbour. Ids are unique.
    """
    check_request(self.computer, failed, count)
    out: dict[str, Task] = {}
    near: dict[str, list[list[dict]]] = {}
    order: list[int] = []
    for _ in range(count):
      order = order or rng.permutation(len(failed)).tolist()
      start = failed[order.pop()]
      if start.id not in near:
        near[start.id] = self._neighbours(start)
      if near[start.id]:
        combos = near[start.id][int(rng.integers(len(near[start.id])))]  # how many parameters change, then which combination
        task = build(self.computer, start.family, combos[int(rng.integers(len(combos)))], int(rng.integers(*SEEDS)))
        out.setdefault(task.id, task)
    return list(out.values())

  def _neighbours(self, task: Task) -> list[list[dict]]:
    """Practised combinations by the number of parameters in which they differ, 1 to most_changes; empty numbers left out."""
    by_changes: dict[int, list[dict]] = {}
    for params in _combinations(self.computer)[0].get(task.family, {}).values():
      by_changes.setdefault(sum(params[key] != task.params.get(key) for key in params), []).append(params)
    return [by_changes[n] for n in range(1, self.most_changes + 1) if n in by_changes]


def check_request(computer: str, failed: Sequence[Task], count: int) -> None:
  if not failed:
    raise ValueError("no failed task was given: there is nothing to vary")
  if count < 1:
    raise ValueError(f"number of new tasks: got {count}, wanted 1 or more")
  for task in failed:
    if task.env != computer:
      raise ValueError(f"task {task.id} is for {task.env}, this generator is for {computer}")
