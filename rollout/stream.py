"""Sampling beside learning: computers never wait for the slowest, nor for the learner. Lesson chapter 4.

A thread of its own drives the computers (rollout/scheduler.py) and files finished episodes. The learner takes complete groups when
it wants them; the weights it publishes are used from the next action on, also in the middle of an episode, and every token says which
version wrote it.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from core.host import out_of_memory
from core.schema import Episode, Group, Task
from rollout.gather import Gathered
from rollout.queue import GroupQueue
from rollout.replay import Replay
from rollout.sampler import Sampler
from rollout.scheduler import Lane, Scheduler
from rollout.turn import Try

_TOPPED = 1 << 16  # added to a try's number in its key when it replaces one that grew too old


class StreamBroken(RuntimeError):
  """The sampling thread ended with an error, or no computer gave a sign of life for too long. The cause is chained or named."""


@dataclasses.dataclass
class Plan:
  """A group that nobody has taken yet: its task, its number in the stream, how many tries it gets, whether it was topped up."""

  task: Task
  serial: int
  tries: int
  topped: bool = False


class Stream:
  """`with Stream(...) as stream:` then `stream.gather(...)` at every update.

  computers: of which only this object may ask anything until `close`. key(serial, try) -> uint32 [2]: a sampling key of its own for
  every try. silence: seconds without any answer after which waiting learners are told that something hangs. ahead: for how many
  further updates groups may be under way while the learner learns; 0 = for max_age, as many as can still be young enough.
  threaded: False lets the learner's own thread drive while it waits, for simulated fleets. knobs: of the Scheduler.
  """

  def __init__(
    self, sampler: Sampler, computers: Any, groups: GroupQueue, key: Callable[..., np.ndarray], *, patience: float = 0.005,
    silence: float = 3600.0, ahead: float = 0.0, threaded: bool = True, **knobs: Any,
  ):  # fmt: skip
    self.groups, self.key, self.silence, self.ahead, self.threaded = groups, key, silence, ahead, threaded
    self.sampler, self.scheduler = sampler, Scheduler(computers, patience=patience, **knobs)
    self.changed = threading.Condition()
    self.serial = 0  # groups ever opened
    self.plans: dict[str, Plan] = {}
    self._waiting: collections.deque[Try] = collections.deque()
    self._practice = Lane(sampler, self._next)
    self._others: list[Lane] = []  # of evaluations, which go first
    self._filed: dict[Lane, list[Episode]] = {}
    self._closing, self._error = False, None
    self._thread = threading.Thread(target=self._guarded, name="stream", daemon=True)

  def __enter__(self) -> Stream:
    return self

  def _begin(self) -> None:
    """Starts the thread, once. Not before the learner first asks: what a save left open would be tried without weights."""
    if self.threaded and self._thread.ident is None:
      self._thread.start()

  def __exit__(self, *exc) -> None:
    self.close()

  def close(self, seconds: float = 2.0) -> None:
    """Ends the thread; the computers are the caller's again. What is still under way on them is not waited for."""
    self._closing = True
    if self._thread.ident is not None:
      self._thread.join(seconds)
    if self._thread.is_alive():  # deep in a compilation: the computers are still its own
      return
    for lease in list(self.scheduler.turns):
      lease.release()

  # -- what the learner calls, from its own thread

  def top_up(self, ahead: int, next_task: Callable[[], Task], tries: Callable[[str, int], int], group_size: int) -> None:
    """Opens groups until `ahead` are open or complete: the back-pressure. What is open is never thrown away for it."""
    self._begin()
    with self.changed:
      while len(self.plans) < ahead:
        task, name = next_task(), f"s{self.serial}"
        plan = self.plans[name] = Plan(task, self.serial, tries(task.id, group_size))
        self.groups.open(name, task.id, plan.tries)
        self._try(name, range(plan.tries))
        self.serial += 1

  def _try(self, name: str, indices: Iterable[int]) -> None:
    """Tries of a group, to be started. One that replaces a try that grew too old has a key of its own."""
    plan = self.plans[name]
    self._waiting.extend(Try(plan.task, name, k, self.key(plan.serial, k + _TOPPED * plan.topped)) for k in indices)

  def gather(
    self, replay: Replay, select: Callable, next_task: Callable[[], Task], rng: np.random.Generator, *, update: int, version: int,
    groups: int, rounds: int, group_size: int, max_age: int, clock: Callable,
    tries: Callable[[str, int], int] = lambda task_id, default: default,
  ) -> Gathered:  # fmt: skip
    """Complete groups until `groups` of them teach, at most rounds x groups of them. Age is checked here, as they are taken.

    While the learner trains, groups worth `ahead` further updates are under way, never more than max_age; with max_age 0 none is:
    the next update's tries all start under the next weights.
    """
    del update  # keys go by the groups' own numbers: an update has no tries of its own here
    out, ledger, most = Gathered(version=version), self.groups.ledger, rounds * groups
    further = round(min(self.ahead or max_age, max_age) * groups)
    while len(out.kept) < groups and len(out.groups) < most:
      wanted = groups - len(out.kept)
      room = min(wanted, most - len(out.groups))
      self.top_up(room if max_age == 0 else wanted + further, next_task, tries, group_size)
      fresh, old = self._take(version, max_age, room, clock)
      kept, dropped, swapped = select(fresh, replay, rng)
      for episode in (e for group in fresh for e in group.episodes):
        replay.add(episode)
        out.episodes.append(episode)
      ledger.dropped.update(dropped)
      out.dropped.update(dropped | {"age": old})
      out.kept, out.groups, out.swapped = out.kept + kept, out.groups + fresh, out.swapped + swapped
    out.stopped = "full" if len(out.kept) >= groups else "rounds"
    ledger.trained += sum(not e.replayed for group in out.kept for e in group.episodes)
    with self.changed:
      ledger.check(in_flight=len(self.groups))
    return out

  def run(self, sampler: Sampler, tries: Iterable[Try], clock: Callable) -> Iterator[Episode]:
    """Episodes of other tries as they finish, written by another sampler: they take the computers that become free before practice does,
    while what is under way goes on."""
    self._begin()
    plan = list(tries)
    waiting = collections.deque(plan)
    lane = Lane(sampler, lambda: waiting.popleft() if waiting else None)
    with self.changed:
      self._filed[lane] = []
      self._others.append(lane)
    done = 0
    while done < len(plan):
      with self.changed:
        fresh = self._filed[lane][done:]
      if not fresh:
        self._wait(clock)
      yield from fresh
      done += len(fresh)
    with self.changed:
      self._others.remove(lane)
      del self._filed[lane]

  def _take(self, version: int, max_age: int, most: int, clock: Callable) -> tuple[list[Group], int]:
    """At most `most` complete groups, waiting for the first, and how many episodes were dropped for their age. A group that loses
    some of its tries so gets as many fresh ones, once; the second time it goes on without them."""
    while True:
      with self.changed:
        renewed = self.groups.renew(version, max_age, lambda name: not self.plans[name].topped)
        for name, missing in renewed.items():
          self.plans[name].topped = True
          self._try(name, missing)
        groups, old = self.groups.take(version, max_age, most)
        self.plans = {name: plan for name, plan in self.plans.items() if name in self.groups}
      old += sum(map(len, renewed.values()))
      if groups or old:
        return groups, old
      self._wait(clock)

  def _wait(self, clock: Callable) -> None:
    """Until something changed, for a fifth of a second at most. clock("waiting", seconds) is where a signal ends the wait."""
    began, now = time.monotonic(), self.scheduler.now
    if not self.threaded:
      self.drive(0.2)
    with self.changed:
      if self.threaded and self._error is None:
        self.changed.wait(0.2)
    if self._error is not None:
      raise StreamBroken(f"sampling ended: {out_of_memory(self._error) or repr(self._error)}") from self._error
    clock("waiting", time.monotonic() - began)
    if now() - self.scheduler.heard > self.silence:
      raise StreamBroken(f"no computer gave a sign of life for {self.silence:.0f} seconds: {self.report()}")

  def curves(self) -> dict[str, float]:
    """How busy the computers and the sampler were since it was last asked for."""
    return self.scheduler.utilisation() | (self.sampler.curves() if hasattr(self.sampler, "curves") else {})

  def report(self) -> str:
    """Who waits for what, for a watchdog's last words."""
    tries = len(self._waiting) + len(self._practice.again)
    return f"{self.scheduler.busy} computers are busy, {tries} tries wait\n{self.scheduler.computers.report()}"

  def state(self) -> dict:
    """Groups that nobody has taken, with their finished tries: nothing finished is lost with a save."""
    with self.changed:
      plans = [{"name": n, "episodes": list(self.groups.so_far(n))} | vars(plan) for n, plan in self.plans.items()]
    return {"serial": self.serial, "plans": plans}

  def restore(self, state: dict) -> None:
    """Goes on where `state` was taken: what was in flight is tried again under its own key."""
    with self.changed:
      self.serial = state["serial"]
      for saved in state["plans"]:
        name, episodes = saved["name"], saved["episodes"]
        plan = self.plans[name] = Plan(saved["task"], saved["serial"], saved["tries"], saved["topped"])
        self.groups.reopen(name, plan.task.id, plan.tries, episodes)
        done = {e.try_index for e in episodes}
        self._try(name, [k for k in range(plan.tries) if k not in done])

  # -- the sampling thread

  def _guarded(self) -> None:
    try:
      while not self._closing:
        self._advance(0.05)
    except BaseException as error:  # noqa: BLE001 - handed to the learner's thread, which raises it
      self._error = error
      with self.changed:
        self.changed.notify_all()

  def drive(self, seconds: float) -> None:
    """Drives the computers for so long, in the caller's thread: where there is no thread of its own."""
    until = self.scheduler.now() + seconds
    while (left := until - self.scheduler.now()) > 0:
      self._advance(left)

  def _advance(self, wait: float) -> None:
    for lane, episode in self.scheduler.advance([*self._others, self._practice], wait):
      with self.changed:
        if lane is not self._practice:
          self._filed[lane].append(episode)
        else:
          self.groups.add(episode)
        self.changed.notify_all()

  def _next(self) -> Try | None:
    with self.changed:
      return self._waiting.popleft() if self._waiting else None
