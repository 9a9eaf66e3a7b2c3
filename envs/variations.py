"""New tasks from failed ones: same family, one or two parameters changed, a new start state.

A suite gives a `Space`: what may be practised, what is held out, and how a task is made. Every task is built by `Space.build`, which
knows the practised combinations only: a held-out one cannot come out, whoever asks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from core.schema import Task

SEEDS = (2**40, 2**41)  # of generated start states: far from those that are practised, held out or demonstrated


class Space:
  """held, rest: (family, parameters) pairs that are held out and that may be practised. make(family, params, seed) -> Task;
  feasible(task) -> whether it can be done, InfraError where that cannot be told."""

  def __init__(
    self, computer: str, held: Iterable[tuple[str, dict]], rest: Iterable[tuple[str, dict]],
    make: Callable[[str, dict, int], Task], feasible: Callable[[Task], bool],
  ):  # fmt: skip
    self.computer, self.make, self.feasible = computer, make, feasible
    self.allowed: dict[str, dict[str, dict]] = {}
    for family, params in rest:
      self.allowed.setdefault(family, {})[_name(params)] = params
    self.held = frozenset(family + _name(params) for family, params in held)

  def parameters(self) -> dict[str, dict[str, list]]:
    """{family: {parameter: its values}}, JSON values. Not every combination may be practised: see `refusal`."""
    out: dict[str, dict[str, list]] = {}
    for family, combos in sorted(self.allowed.items()):
      first = next(iter(combos.values()))
      values = {key: {_name(c[key]): c[key] for c in combos.values()} for key in first}
      out[family] = {key: [v for _, v in sorted(found.items())] for key, found in values.items()}
    return out

  def refusal(self, family: Any, params: Any) -> str:
    """Why a task cannot be built, in one word that is never the asker's own: "" if it can."""
    if not isinstance(family, str) or family not in self.allowed:
      return "unknown_family"
    try:
      name = _name(params)
    except (TypeError, ValueError, RecursionError):
      return "wrong_parameters"
    if family + name in self.held:
      return "held_out"
    return "" if name in self.allowed[family] else "wrong_parameters"

  def build(self, family: str, params: dict, seed: int) -> Task:
    """One task of a practised combination."""
    if why := self.refusal(family, params):
      raise ValueError(f"no task of {self.computer} can be built from what was given: {why}")
    if not 0 <= seed < 2**63:
      raise ValueError(f"task seed is {seed}, wanted 0 or more, below 2^63")
    return self.make(family, self.allowed[family][_name(params)], seed)


def _name(params: Any) -> str:
  """Equal for equal JSON: 1, 1.0 and true are three different values."""
  return json.dumps(params, sort_keys=True)


class Variations:
  """A suite's own task generator. most_changes: parameters in which a new task may differ from the failed one."""

  def __init__(self, space: Space, most_changes: int = 2):
    if most_changes < 1:
      raise ValueError(f"most_changes is {most_changes}, wanted 1 or more parameters")
    self.space, self.most_changes = space, most_changes

  def generate(self, failed: list[Task], count: int, rng: np.random.Generator) -> list[Task]:
    """`count` new tasks, the failed ones varied in turn, in random order. The same generator state gives the same tasks.

    Fewer only where a failed task has no practised neighbour. Ids are unique.
    """
    _check_request(self.space.computer, failed, count)
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
        task = self.space.build(start.family, combos[int(rng.integers(len(combos)))], int(rng.integers(*SEEDS)))
        out.setdefault(task.id, task)
    return list(out.values())

  def _neighbours(self, task: Task) -> list[list[dict]]:
    """Practised combinations by the number of parameters in which they differ, 1 to most_changes; empty numbers left out."""
    by_changes: dict[int, list[dict]] = {}
    for params in self.space.allowed.get(task.family, {}).values():
      by_changes.setdefault(sum(params[key] != task.params.get(key) for key in params), []).append(params)
    return [by_changes[n] for n in range(1, self.most_changes + 1) if n in by_changes]


def _check_request(computer: str, failed: Sequence[Task], count: int) -> None:
  if not failed:
    raise ValueError("no failed task was given: there is nothing to vary")
  if count < 1:
    raise ValueError(f"number of new tasks: got {count}, wanted 1 or more")
  for task in failed:
    if task.env != computer:
      raise ValueError(f"task {task.id} is for {task.env}, this generator is for {computer}")
