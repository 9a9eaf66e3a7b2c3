"""Rounds of sampling until enough groups teach: the one place where episodes are dropped, each with its cause."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from core.schema import Episode, Group, Task
from rollout.queue import GroupQueue
from rollout.replay import Replay
from rollout.sampler import Sampler
from rollout.scheduler import collect
from rollout.turn import Try


@dataclasses.dataclass
class Gathered:
  """What an update has to learn from, and what became of the rest."""

  kept: list[Group] = dataclasses.field(default_factory=list)
  groups: list[Group] = dataclasses.field(default_factory=list)  # every fresh group, before selection
  episodes: list[Episode] = dataclasses.field(default_factory=list)  # every fresh episode
  dropped: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # episodes by cause
  swapped: int = 0  # stored successes put into all-fail groups
  version: int = 0  # the trainer's, as the update began
  stopped: str = "rounds"  # "full": enough groups teach; "rounds": the cap on rounds came first


def gather(
  sampler: Sampler, computers: Any, queue: GroupQueue, replay: Replay, select: Callable, next_task: Callable[[], Task],
  key: Callable[..., np.ndarray], rng: np.random.Generator, *, update: int, version: int, groups: int, rounds: int,
  group_size: int, max_age: int, clock: Callable, tries: Callable[[str, int], int] = lambda task_id, default: default,
) -> Gathered:  # fmt: skip
  """Samples groups of tries until `groups` of them teach, in at most `rounds` rounds. Lesson chapter 3, fixes 2 and 3.

  next_task(): the next task to try; key(update, round, group, try): each try's own sampling key; tries(task id,
  group_size): how many tries a task gets. Age is checked here, as the groups are taken to be trained on. A new success is
  stored after the swap, so that none rescues its own group.
  """
  out = Gathered(version=version)
  for round_ in range(rounds):
    planned = []
    for j in range(groups - len(out.kept)):
      task, name = next_task(), f"u{update}-r{round_}-g{j}"
      size = tries(task.id, group_size)
      queue.open(name, task.id, size)
      planned += [Try(task, name, k, key(update, round_, j, k)) for k in range(size)]
    for episode in collect(sampler, computers, planned, clock):
      queue.add(episode)
      out.episodes.append(episode)
    fresh, old = queue.take(version, max_age)
    kept, dropped, swapped = select(fresh, replay, rng)
    for episode in (e for group in fresh for e in group.episodes):
      replay.add(episode)
    queue.ledger.dropped.update(dropped)
    out.dropped.update(dropped | {"age": old})
    out.kept, out.groups, out.swapped = out.kept + kept, out.groups + fresh, out.swapped + swapped
    if len(out.kept) >= groups:
      out.stopped = "full"
      break
  queue.ledger.trained += sum(not e.replayed for group in out.kept for e in group.episodes)
  queue.ledger.check(in_flight=len(queue))
  return out
