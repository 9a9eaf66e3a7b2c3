"""Finished episodes on their way to the learner: groups complete as their tries do, and every episode is accounted for.

The conservation law, checked at every update: started = trained + dropped (by cause) + in flight.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from core.schema import Episode, Group


class Ledger:
  """Counts episodes from start to end. `check` raises if one was lost or counted twice."""

  def __init__(self):
    self.started = 0
    self.trained = 0
    self.dropped: collections.Counter[str] = collections.Counter()

  @property
  def in_flight(self) -> int:
    return self.started - self.trained - sum(self.dropped.values())

  def check(self, in_flight: int) -> None:
    if self.in_flight != in_flight:
      raise RuntimeError(
        f"episodes do not add up: {self.started} started, {self.trained} trained, dropped {dict(self.dropped)}, "
        f"so {self.in_flight} in flight, but {in_flight} are"
      )

  def state(self) -> dict:
    return {"started": self.started, "trained": self.trained, "dropped": dict(self.dropped)}

  def restore(self, state: dict) -> None:
    self.started, self.trained, self.dropped = state["started"], state["trained"], collections.Counter(state["dropped"])


class GroupQueue:
  """Groups in the making. `open` announces one, `add` files an episode, `take` hands over the complete ones, oldest first."""

  def __init__(self, ledger: Ledger):
    self.ledger = ledger
    self._open: dict[str, tuple[str, int, list[Episode]]] = {}
    self._complete: list[Group] = []

  def __len__(self) -> int:
    """Episodes that are started and neither trained nor dropped."""
    return sum(size for _, size, _ in self._open.values()) + sum(len(g.episodes) for g in self._complete)

  @property
  def complete(self) -> int:
    """Groups that wait to be taken."""
    return len(self._complete)

  def open(self, group: str, task_id: str, size: int) -> None:
    self.reopen(group, task_id, size, [])
    self.ledger.started += size

  def reopen(self, group: str, task_id: str, size: int, episodes: list[Episode]) -> None:
    """A group whose tries the ledger has counted already, with those that are finished."""
    if group in self:
      raise ValueError(f"group {group} is already open: group ids are unique")
    self._open[group] = (task_id, size, [])
    for episode in episodes:
      self.add(episode)

  def __contains__(self, group: str) -> bool:
    """Whether it is open or waits to be taken."""
    return group in self._open or any(g.id == group for g in self._complete)

  def so_far(self, group: str) -> list[Episode]:
    """The finished tries of a group that nobody has taken."""
    return self._open[group][2] if group in self._open else next(g.episodes for g in self._complete if g.id == group)

  def add(self, episode: Episode) -> bool:
    """Files a finished episode; True where its group is complete with it. Nothing finished is ever lost; a stranger is refused."""
    if episode.group not in self._open:
      raise ValueError(f"episode of group {episode.group}, which is not open")
    task_id, size, episodes = self._open[episode.group]
    if any(e.try_index == episode.try_index for e in episodes):
      raise ValueError(f"group {episode.group} already has try {episode.try_index}")
    episodes.append(episode)
    if len(episodes) < size:
      return False
    del self._open[episode.group]
    self._complete.append(Group(episode.group, task_id, sorted(episodes, key=lambda e: e.try_index)))
    return True

  def renew(self, version: int, max_age: int, allowed: Callable[[str], bool]) -> dict[str, list[int]]:
    """Complete groups that would lose some of their tries to age, and are allowed, go back among the open ones without those, which
    count as dropped; {group: the try indices that are to be tried again}, counted as started."""
    renewed = {}
    for group in list(self._complete):
      old = [e.try_index for e in group.episodes if _age(e, version) > max_age]
      if 0 < len(old) < len(group.episodes) and allowed(group.id):
        self._complete.remove(group)
        self._open[group.id] = (group.task_id, len(group.episodes), [e for e in group.episodes if e.try_index not in old])
        self.ledger.dropped["age"] += len(old)
        self.ledger.started += len(old)
        renewed[group.id] = old
    return renewed

  def take(self, version: int, max_age: int, most: int | None = None) -> tuple[list[Group], int]:
    """(complete groups, at most `most` of them; episodes dropped for age). Age is the trainer's version minus the oldest version
    in the episode, measured now, when it is about to be trained on; age > max_age is dropped, age == max_age is kept."""
    taken, self._complete = self._complete[:most], self._complete[len(self._complete) if most is None else most :]
    groups, old = [], 0
    for group in taken:
      fresh = [e for e in group.episodes if _age(e, version) <= max_age]
      old += len(group.episodes) - len(fresh)
      groups.append(Group(group.id, group.task_id, fresh))
    if old:
      self.ledger.dropped["age"] += old
    return [g for g in groups if g.episodes], old


def _age(episode: Episode, version: int) -> int:
  """The trainer's version minus the oldest one in the episode; 0 where nothing was written."""
  return version - episode.oldest_version if episode.records else 0
