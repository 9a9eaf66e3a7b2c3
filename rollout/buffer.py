"""The latest episodes, for methods that learn from stored steps: a ring over whole episodes, counted in steps. DigiRL."""

from __future__ import annotations

import hashlib

import numpy as np

from core.schema import Episode

PARTS = ("all", "train", "validation")


def is_validation(episode: Episode, share: float = 0.2) -> bool:
  """Whether an episode is kept from training to measure critics on. Decided by a hash of its group and try alone, so it is the
  same in every process, run and resume, whatever else is stored."""
  digest = hashlib.sha1(f"{episode.group}/{episode.try_index}".encode()).digest()
  return int.from_bytes(digest[:8], "big") < share * 2**64


def draw_steps(episodes: list[Episode], rng: np.random.Generator, n: int) -> list[tuple[Episode, int]]:
  """n pairs (episode, index of one of its steps), every step of the episodes as likely as any other, with replacement."""
  ends = np.cumsum([len(e.steps) for e in episodes], dtype=np.int64)
  drawn = rng.integers(int(ends[-1]), size=n) if n else np.zeros(0, np.int64)
  places = np.searchsorted(ends, drawn, side="right")
  return [(episodes[i], int(d - ends[i] + len(episodes[i].steps))) for i, d in zip(places.tolist(), drawn.tolist())]


class Buffer:
  """The latest episodes that together have at most `capacity_steps` steps; the oldest leave first, whole.

  validation: share of the episodes that are kept from training (DigiRL: 2000 steps, 0.2).
  """

  def __init__(self, capacity_steps: int, validation: float = 0.2):
    if capacity_steps < 1:
      raise ValueError(f"buffer capacity is {capacity_steps}, wanted 1 or more steps")
    if not 0.0 <= validation < 1.0:
      raise ValueError(f"buffer validation is {validation}, wanted a share from 0 (off) to below 1")
    self.capacity_steps, self.validation = capacity_steps, validation
    self._episodes: dict[tuple[str, int], Episode] = {}  # oldest first
    self._steps = 0

  def __len__(self) -> int:
    """Steps, of both parts."""
    return self._steps

  def add(self, episode: Episode) -> bool:
    """Stores a fresh scored episode; one that an infra error ended, a replayed one or one without a step is not. -> stored?"""
    if not episode.scored or episode.replayed or not episode.steps:
      return False
    name = (episode.group, episode.try_index)
    if name in self._episodes:
      raise ValueError(f"episode {name[0]}/{name[1]} is in the buffer already: it would count twice")
    if len(episode.steps) > self.capacity_steps:
      raise ValueError(
        f"episode {name[0]}/{name[1]} has {len(episode.steps)} steps, more than the buffer's {self.capacity_steps}: make it larger"
      )
    self._episodes[name] = episode
    self._steps += len(episode.steps)
    while self._steps > self.capacity_steps:
      oldest = self._episodes.pop(next(iter(self._episodes)))
      self._steps -= len(oldest.steps)
    return True

  def episodes(self, part: str = "all") -> list[Episode]:
    """Stored episodes, oldest first. part: "all" (what a checkpoint saves), "train" or "validation"."""
    if part not in PARTS:
      raise ValueError(f"buffer part is {part!r}, wanted one of {', '.join(PARTS)}")
    return [e for e in self._episodes.values() if part == "all" or is_validation(e, self.validation) == (part == "validation")]

  def state(self) -> list[Episode]:
    """What a checkpoint saves, and `restore` takes back."""
    return self.episodes()

  def restore(self, episodes: list[Episode]) -> None:
    """Takes back what `episodes()` gave; where the capacity is smaller now, the latest of them."""
    self._episodes, self._steps = {}, 0
    for episode in episodes:
      self.add(episode)

  def sample_steps(self, rng: np.random.Generator, n: int, part: str = "train") -> list[tuple[Episode, int]]:
    """n pairs (episode, index of one of its steps), every step of the part as likely as any other, with replacement."""
    if n < 0:
      raise ValueError(f"number of steps to sample: got {n}, wanted 0 or more")
    episodes = self.episodes(part)
    if not episodes and n:
      raise ValueError(f"the buffer's part {part!r} has no step to sample: store episodes first")
    return draw_steps(episodes, rng, n)
