"""Saved successes per task: the highlight reel that rescues a group whose tries all failed. Lesson chapter 3, fix 3."""

from __future__ import annotations

import dataclasses

import numpy as np

from core.schema import Episode


class Replay:
  """Up to `size` latest successes of each task (0 = off). A task id names one start state, so a success is only ever
  swapped in for a try from the same start. Stored episodes keep tokens, log-probabilities and versions as sampled."""

  def __init__(self, size: int):
    if size < 0:
      raise ValueError(f"replay size is {size}, wanted 0 (off) or more successes per task")
    self.size = size
    self._stored: dict[str, list[Episode]] = {}

  def __len__(self) -> int:
    return sum(map(len, self._stored.values()))

  def add(self, episode: Episode) -> bool:
    """Stores a fresh success; a replayed one is never stored again as new. Returns whether it was stored."""
    if self.size == 0 or episode.replayed or not episode.success or episode.raw_reward < 1.0:
      return False
    kept = self._stored.setdefault(episode.task_id, [])
    kept.append(dataclasses.replace(episode, replayed=True, advantage=None))
    del kept[: -self.size]
    return True

  def pick(self, task_id: str, rng: np.random.Generator) -> Episode | None:
    """A stored success of the task, at random among those kept; None if there is none."""
    kept = self._stored.get(task_id)
    return kept[int(rng.integers(len(kept)))] if kept else None

  def state(self) -> list[Episode]:
    """What a checkpoint saves, and `restore` takes back."""
    return self.episodes()

  def episodes(self) -> list[Episode]:
    """Everything stored, tasks in order of first success."""
    return [e for kept in self._stored.values() for e in kept]

  def restore(self, episodes: list[Episode]) -> None:
    """Takes back what `episodes` gave; where the size is smaller now, the latest of each task."""
    self._stored = {}
    for e in episodes if self.size else ():
      kept = self._stored.setdefault(e.task_id, [])
      kept.append(e)
      del kept[: -self.size]
