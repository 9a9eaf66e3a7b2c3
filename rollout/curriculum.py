"""Which task comes next, how many tries it gets, and which old steps are worth another look. Lesson chapter 3.

`Curriculum` hands out tasks and is told what became of them; the functions above it are the rules it and train.py use, pure
and usable alone. Every rule has an off value, and with all of them off the order is a fresh random one each pass. Sources,
constants and deviations: docs/curriculum.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from core.knobs import require
from core.schema import Group, Task
from core.stats import chance_of_a_pass, teaching_share

ORDERS = ("random", "teaching", "critic")
Values = Mapping[str, float | Sequence[float]]  # critic value(s) by task id: one number, or one for each head


class NoTaskLeft(RuntimeError):
  """The rules leave nothing to practise. The message counts the tasks by what took them away."""


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "tasks": "",  # tasks.json of tools/select_tasks: only the tasks it kept are practised; empty = all
      "order": "random",  # random; teaching: closest to the top of the teaching-share hill first; critic: largest |r - V| first
      "rest_after": 0,  # visits in a row that all failed before a task rests; 0 = off, MobileRL 2
      "rest_passes": 3,  # passes it rests
      "rest_decay": 1.0,  # back from a rest it joins a pass with chance exp(-decay f), f its failed visits in a row; 0 = always
      "remove_at": 3,  # failed visits in a row that remove it for good; 0 = never; counts only while rest_after is on
      "solvable_tries": 0,  # tries of the starting policy at each task before practice; 0 = off, ARPO 16
      "solvable_lowest": 1,  # passes a task needs among them to be kept
      "solvable_highest": 0,  # and may have at most; 0 = no such edge
      "critic_low": 0.0,  # tasks whose critic value lies in [low, high] are practised; 0 to 1 = off, WebRL 0.05 to 0.75
      "critic_high": 1.0,
      "teaching_target": 0.0,  # wanted chance that a group teaches, which sets the tries of each task; 0 = off: groups of one size
      "tries_lowest": 4,
      "tries_highest": 32,
      "memory": 2,  # latest visits that a task's success is estimated from
    }
  )


def check(cfg: ml_collections.ConfigDict) -> None:
  """Domains of the knobs; each failure one line."""
  wanted = {
    "order": (cfg.order in ORDERS, f"one of {', '.join(ORDERS)}"),
    "rest_after": (cfg.rest_after >= 0, "0 (off) or how many all-fail visits in a row"),
    "rest_passes": (cfg.rest_passes >= 1, "1 or more passes; curriculum.rest_after=0 turns resting off"),
    "rest_decay": (0 <= cfg.rest_decay < 100, "0 (no weight) or a number below 100"),
    "remove_at": (cfg.remove_at >= 0, "0 (never) or how many all-fail visits in a row"),
    "solvable_tries": (cfg.solvable_tries >= 0, "0 (off) or how many tries a task"),
    "solvable_lowest": (cfg.solvable_lowest >= 0, "0 or more passes"),
    "solvable_highest": (cfg.solvable_highest == 0 or cfg.solvable_highest >= cfg.solvable_lowest,
                         "0 (no edge) or at least curriculum.solvable_lowest"),
    "critic_low": (0 <= cfg.critic_low <= cfg.critic_high, "a fraction from 0 to curriculum.critic_high"),
    "critic_high": (cfg.critic_high <= 1, "a fraction up to 1"),
    "teaching_target": (0 <= cfg.teaching_target < 1, "0 (off) or a chance below 1"),
    "tries_lowest": (2 <= cfg.tries_lowest <= cfg.tries_highest, "2 to curriculum.tries_highest: one try has nothing to be compared with"),
    "memory": (cfg.memory >= 1, "1 or more visits"),
  }  # fmt: skip
  require("curriculum", cfg, wanted)
  if cfg.solvable_tries and cfg.solvable_lowest > cfg.solvable_tries:
    raise ValueError(f"curriculum.solvable_lowest is {cfg.solvable_lowest}, wanted at most solvable_tries ({cfg.solvable_tries})")
  if cfg.tasks and cfg.solvable_tries:
    raise ValueError(f"curriculum.tasks is {cfg.tasks}, solvable_tries {cfg.solvable_tries}: both choose the tasks, wanted one of them")


# ---------------------------------------------------------------- choosing tasks


class Solvable(NamedTuple):
  """kept: ids of the tasks that stay, in the order given. histogram: tasks by passes, smallest first; it counts every task."""

  kept: list[str]
  histogram: dict[int, int]


def solvable(results: Mapping[str, tuple[int, int]], lowest: int = 1, highest: int | None = None) -> Solvable:
  """Tasks the starting agent passes at least `lowest` and at most `highest` times. ARPO: 16 tries, 1 pass or more."""
  if lowest < 0 or (highest is not None and highest < lowest):
    raise ValueError(f"solvable got lowest={lowest}, highest={highest}: wanted 0 <= lowest <= highest")
  histogram: dict[int, int] = {}
  for name, (passes, tries) in results.items():
    if not 0 <= passes <= tries or tries < 1:
      raise ValueError(f"task {name} has {passes} passes in {tries} tries: wanted 1 try or more and at most as many passes")
    histogram[passes] = histogram.get(passes, 0) + 1
  kept = [name for name, (passes, _) in results.items() if lowest <= passes and (highest is None or passes <= highest)]
  return Solvable(kept, dict(sorted(histogram.items())))


def selected(path: str | os.PathLike, tasks: Sequence[Task]) -> list[str]:
  """Ids that tools/select_tasks kept (`kept` of its tasks.json). ValueError unless they are among the run's tasks, one or more."""
  try:
    kept = json.loads(pathlib.Path(path).read_text())["kept"]
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"curriculum.tasks is {path}: wanted a tasks.json of tools/select_tasks ({error!r})") from error
  odd = [k for k in kept if k not in {t.id for t in tasks}]
  if odd or not kept:
    found = f"{len(odd)} of its {len(kept)} kept tasks are not this run's, {odd[0]} first" if odd else "it keeps no task"
    raise ValueError(f"curriculum.tasks is {path}: {found}; select anew with this run's env knobs")
  return list(kept)


def success_estimate(passes: int, tries: int) -> float:
  """Chance of a pass from passes in tries: (passes + 1) / (tries + 2), never 0 or 1; one half where nothing was tried."""
  if not 0 <= passes <= tries:
    raise ValueError(f"success_estimate got {passes} passes in {tries} tries")
  return (passes + 1) / (tries + 2)


def teaching_order(chances: Mapping[str, float], group_size: int = 8, replay: bool = False) -> list[str]:
  """Task ids by the share of their groups that teach, largest first, equal ones by id: the order given does not matter.

  Shares are compared to 12 digits, so that p and 1 - p, equally far from the top of the hill, count as equal.
  """
  share = {name: round(teaching_share(p, group_size, replay), 12) for name, p in chances.items()}
  return sorted(share, key=lambda name: (-share[name], name))


def critic_gaps(rewards: Mapping[str, float], values: Values, signed: bool = False) -> dict[str, float]:
  """|r - V| of each task in `rewards`: how far its outcome lies from what the instruction critic expected; r - V if signed.

  With several heads V is the smallest. DigiRL's instruction-level advantage is the signed form.
  """
  if lacking := sorted(set(rewards) - set(values)):
    raise ValueError(f"{len(lacking)} tasks have a reward but no critic value, {lacking[0]} first")
  gaps = {name: float(r) - min(_heads(name, values[name])) for name, r in rewards.items()}
  return gaps if signed else {name: abs(gap) for name, gap in gaps.items()}


def critic_order(gaps: Mapping[str, float]) -> list[str]:
  """Task ids by gap, largest first, equal ones by id."""
  return sorted(gaps, key=lambda name: (-gaps[name], name))


def top_fraction(gaps: Mapping[str, float], fraction: float = 0.1) -> list[str]:
  """Ids at or above the (1 - fraction) quantile of the gaps, in the order given; ties with it stay. DigiRL: 0.1."""
  if not 0 < fraction <= 1:
    raise ValueError(f"fraction is {fraction}, wanted a number above 0, up to 1 (keep all)")
  if not gaps:
    return []
  cut = np.quantile(np.array(list(gaps.values())), 1.0 - fraction)
  return [name for name, gap in gaps.items() if gap >= cut]


def critic_band(values: Values, low: float = 0.05, high: float = 0.75) -> list[str]:
  """Ids of the tasks at the edge of what the agent can do, in the order given: any head's value in [low, high]. WebRL."""
  return [name for name, v in values.items() if any(low <= head <= high for head in _heads(name, v))]


def _heads(name: str, value: float | Sequence[float]) -> tuple[float, ...]:
  heads = tuple(float(v) for v in np.atleast_1d(np.asarray(value, np.float64)))
  if not heads or not all(0.0 <= v <= 1.0 for v in heads):  # NaN fails too
    raise ValueError(f"task {name} has critic value {value}, wanted a chance from 0 to 1")
  return heads


# ---------------------------------------------------------------- how many tries


def tries_for(p: float, target: float, lowest: int, highest: int, replay: bool = False) -> int:
  """The smallest group, `lowest` to `highest` tries, that teaches with chance `target` or more; `highest` if none does.

  A task that surely fails or surely passes (p = 0 or 1) gets `lowest`: no number of tries is known to help.
  """
  _wanted(target)
  if not 1 <= lowest <= highest:
    raise ValueError(f"tries_for got lowest={lowest}, highest={highest}: wanted 1 <= lowest <= highest")
  teaching_share(p, lowest, replay)  # refuses a p that is no chance
  if p in (0.0, 1.0):
    return lowest
  return next((g for g in range(lowest, highest + 1) if teaching_share(p, g, replay) >= target), highest)


def top_up(passes: int, fails: int, p: float, target: float, highest: int) -> int:
  """Further tries for a group begun with `passes` and `fails`, so that it holds both with chance `target`: 0 if it does.

  At most up to `highest` in all, and 0 where no further try can help.
  """
  _wanted(target)
  if passes < 0 or fails < 0:
    raise ValueError(f"top_up got {passes} passes and {fails} fails: wanted 0 or more of each")
  begun = passes + fails
  if begun == 0:
    raise ValueError("top_up got a group without a scored try: tries_for sizes a new group")
  missing = 1.0 - p if passes else p  # chance that one more try brings what the group lacks
  if min(passes, fails) > 0 or chance_of_a_pass(missing, 1) == 0.0:
    return 0
  room = max(0, highest - begun)
  return next((k for k in range(room + 1) if chance_of_a_pass(missing, k) >= target), room)


def _wanted(target: float) -> None:
  if not 0.0 < target < 1.0:
    raise ValueError(f"target is {target}, wanted a chance between 0 and 1")


# ---------------------------------------------------------------- which old steps


# ---------------------------------------------------------------- the next task


class Curriculum:
  """Decides the next task. `next()` gives it, `report(group)` hears of every finished fresh group.

  rng is the caller's, who saves and restores it; everything else that decides is in `state()`. rated: whether `rate` will ever
  be called. A *pass* is one way through the tasks that are open; with every rule off it is rng.permutation(number of tasks),
  taken from its end.
  """

  def __init__(self, tasks: Sequence[Task], rng: np.random.Generator, cfg: ml_collections.ConfigDict | None = None, rated: bool = True):
    self.cfg = defaults() if cfg is None else cfg
    check(self.cfg)
    if not rated and (self.cfg.order == "critic" or self.cfg.critic_low > 0 or self.cfg.critic_high < 1):
      raise ValueError("curriculum.order=critic, critic_low and critic_high want an algorithm with a step critic: digirl or webrl")
    self.rng = rng
    self._given = list(tasks)
    self._reset()

  def _reset(self) -> None:
    if not self._given:
      raise ValueError("a curriculum wants one task or more, got none")
    self.tasks: list[Task] = []
    self._index: dict[str, int] = {}
    self._append(self._given)
    self._order: list[int] = []  # of this pass, the next task last
    self._pass = 0
    self._failed: dict[str, int] = {}  # all-fail visits in a row
    self._until: dict[str, int] = {}  # last pass of a rest
    self._removed: dict[str, str] = {}  # gone for good, and why
    self._visits: dict[str, list[list[int]]] = {}  # [passes, tries] of the latest visits
    self._values: dict[str, list[float]] = {}

  def _append(self, tasks: Sequence[Task]) -> list[int]:
    start = len(self.tasks)
    for task in tasks:
      if task.id in self._index:
        raise ValueError(f"task {task.id} is there twice: an id names one start state")
      self._index[task.id] = len(self.tasks)
      self.tasks.append(task)
    return list(range(start, len(self.tasks)))

  # -- what train.py calls

  def next(self) -> Task:
    if not self._order:
      self._begin_pass()
    return self.tasks[self._order.pop()]

  def tries(self, task_id: str, default: int) -> int:
    """How many tries the task gets: `default` while teaching_target is off."""
    c = self.cfg
    return tries_for(self.chance(task_id), c.teaching_target, c.tries_lowest, c.tries_highest) if c.teaching_target else default

  def report(self, group: Group) -> None:
    """A fresh group is finished. Replayed and unscored tries say nothing about today's agent; a group of such alone is no visit."""
    name = group.task_id
    self._place(name)
    raw = [e.raw_reward for e in group.scored if not e.replayed]
    if not raw:
      return
    passes = sum(r > 0 for r in raw)
    self._visits[name] = [*self._visits.get(name, []), [passes, len(raw)]][-self.cfg.memory :]
    if passes:
      self._failed.pop(name, None)
      self._until.pop(name, None)
      return
    self._failed[name] = self._failed.get(name, 0) + 1
    if not self.cfg.rest_after or name in self._removed:
      return
    if self.cfg.remove_at and self._failed[name] >= self.cfg.remove_at:
      self._remove(name, "failing")
    elif self._failed[name] >= self.cfg.rest_after:
      # where the task still waits in this pass, this pass is the first that it misses
      waits = self._index[name] in self._order
      self._until[name] = self._pass + self.cfg.rest_passes - waits
      self._order = [i for i in self._order if i != self._index[name]]

  def rate(self, values: Values) -> None:
    """The instruction critic's values of tasks, for the band and the order of the passes to come."""
    for name, value in values.items():
      self._place(name)
      self._values[name] = list(_heads(name, value))

  def only(self, ids: Iterable[str], cause: str = "unsolvable") -> None:
    """Removes every task but these for good: what `solvable` kept, after the starting agent's tries."""
    keep = set(ids)
    for name in keep:
      self._place(name)
    for task in self.tasks:
      if task.id not in keep:
        self._remove(task.id, cause)

  def drop(self, ids: Iterable[str], cause: str = "parked") -> None:
    """Removes these for good, those that are not here or gone already left out: what breaks computers or passes untouched."""
    for name in ids:
      if name in self._index and name not in self._removed:
        self._remove(name, cause)

  def extend(self, tasks: Sequence[Task]) -> None:
    """New tasks, written for the agent as it is now: they come next, in the order given, and are part of every later pass."""
    self._order += reversed(self._append(tasks))

  def chance(self, task_id: str) -> float:
    """The task's success, estimated from its latest visits; one half before the first."""
    visits = self._visits.get(task_id, [])
    return success_estimate(sum(v[0] for v in visits), sum(v[1] for v in visits))

  def failed(self) -> list[Task]:
    """Tasks whose latest visit had no pass, in the order given: what new tasks are made from."""
    return [t for t in self.tasks if t.id in self._failed]

  def counts(self) -> dict[str, int]:
    """Tasks by what the rules make of them now: open, resting, out_of_band and one entry for each cause of removal."""
    out = {"open": 0, "resting": 0, "out_of_band": 0}
    for task in self.tasks:
      where = self._removed.get(task.id) or ("resting" if self._until.get(task.id, -1) >= self._pass else "")
      where = where or ("open" if self._in_band(task.id) else "out_of_band")
      out[where] = out.get(where, 0) + 1
    return out

  def state(self) -> dict[str, Any]:
    """Everything a resume needs besides the generator: plain values and the added Tasks, as core/blob.py holds them."""
    copy = lambda d: {k: [list(v) if isinstance(v, list) else v for v in x] for k, x in d.items()}
    return {
      "tasks": self._digest(), "added": self.tasks[len(self._given) :], "order": list(self._order), "pass": self._pass,
      "failed": dict(self._failed), "until": dict(self._until), "removed": dict(self._removed),
      "visits": copy(self._visits), "values": copy(self._values),
    }  # fmt: skip

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on where `state` was taken. The task list must be the one it was taken with."""
    if state["tasks"] != self._digest():
      raise ValueError("the saved curriculum is of another task list than this run's: go on with the same env knobs, or start --fresh")
    self._reset()
    self._append(state["added"])
    self._order, self._pass = list(state["order"]), state["pass"]
    self._failed, self._until, self._removed = dict(state["failed"]), dict(state["until"]), dict(state["removed"])
    self._visits = {k: [list(v) for v in x] for k, x in state["visits"].items()}
    self._values = {k: list(x) for k, x in state["values"].items()}

  # -- the rules

  def _begin_pass(self) -> None:
    self._pass += 1
    waiting = [i for i, t in enumerate(self.tasks) if t.id not in self._removed and self._in_band(t.id)]
    if not waiting:
      raise NoTaskLeft(f"no task is left to practise: {self.counts()}; widen curriculum.critic_*, raise curriculum.remove_at or add tasks")
    rest = lambda i: self._until.get(self.tasks[i].id, -1)
    self._pass = max(self._pass, min(map(rest, waiting)) + 1)  # all rest: on to the pass in which the first is back
    ready = self._draw([i for i in waiting if rest(i) < self._pass])
    self._order = [ready[j] for j in self.rng.permutation(len(ready)).tolist()]
    if self.cfg.order != "random":
      self._order.sort(key=self._urgency)  # stable: equals stay in random order; the last comes first

  def _draw(self, ready: list[int]) -> list[int]:
    """Tasks back from a rest join with chance exp(-decay f). If luck leaves none, those with the fewest failures join."""
    if not self.cfg.rest_after or not self.cfg.rest_decay:
      return ready
    failed = [self._failed.get(self.tasks[i].id, 0) for i in ready]
    joins = [f < self.cfg.rest_after or self.rng.random() < math.exp(-self.cfg.rest_decay * f) for f in failed]
    return [i for i, yes in zip(ready, joins) if yes] or [i for i, f in zip(ready, failed) if f == min(failed)]

  def _urgency(self, index: int) -> float:
    name = self.tasks[index].id
    if self.cfg.order == "teaching":  # G = 2: without replay every G orders alike, and larger ones round to 1 near the top
      return round(teaching_share(self.chance(name), 2), 12)
    if name not in self._values or name not in self._visits:
      return math.inf  # nothing known: look first
    return round(critic_gaps({name: self.chance(name)}, self._values)[name], 12)

  def _in_band(self, name: str) -> bool:
    """A task that the critic has not rated stays."""
    return name not in self._values or bool(critic_band({name: self._values[name]}, self.cfg.critic_low, self.cfg.critic_high))

  def _remove(self, name: str, cause: str) -> None:
    self._removed.setdefault(name, cause)
    self._order = [i for i in self._order if i != self._index[name]]

  def _place(self, name: str) -> None:
    if name not in self._index:
      raise ValueError(f"task {name} is not one of the curriculum's {len(self.tasks)}")

  def _digest(self) -> str:
    return hashlib.sha1("\n".join(t.id for t in self._given).encode()).hexdigest()
