"""Many tries on many computers: a free one takes the next try at once, and the sampler batches whatever asks. No barrier anywhere.

It drives computers through what envs.pool.Pool and envs.inside.Inside share: `try_lease`, the leases' `submit_*` and `release`, and
`wait`. Nothing else waits, so one thread drives hundreds of them.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from core.schema import Episode
from models.base import Prompt
from rollout.sampler import Sampler
from rollout.turn import Try, Turn


class Lane:
  """Tries that one sampler writes. take(): the next one, or None where there is none now."""

  def __init__(self, sampler: Sampler, take: Callable[[], Try | None]):
    self.sampler, self._take = sampler, take
    self.sessions = hasattr(sampler, "poll")  # it keeps an episode's cache between its steps, and is asked without waiting for it
    self.again: collections.deque[Try] = collections.deque()  # to be started before any other
    self.faults: dict[tuple[str, int], list[str]] = collections.defaultdict(list)

  def next(self) -> Try | None:
    return self.again.popleft() if self.again else self._take()


class Scheduler:
  """`advance` until all tries have ended.

  A try that an infra error ended is run again, at most `reruns` times; notes["faults"] of its episode lists what broke before.
  patience: seconds to wait for more computers to ask before a batch is sampled. clock(name, seconds) accounts wall time; now: the
  time, for simulated fleets.
  """

  def __init__(
    self, computers: Any, *, reruns: int = 2, patience: float = 0.0, clock: Callable[[str, float], None] = lambda name, seconds: None,
    now: Callable[[], float] | None = None,
  ):  # fmt: skip
    self.computers, self.reruns, self.patience, self.clock, self.now = computers, reruns, patience, clock, now or time.monotonic
    self.turns: dict[Any, tuple[Turn, Lane]] = {}  # by lease
    self._asking: list[tuple[Turn, Lane]] = []
    self._writing: dict[Turn, tuple[Lane, Prompt, float]] = {}  # what a sampler with sessions is at, since when
    self.heard = self._since = self.now()  # when a computer last answered; when `utilisation` was last asked for
    self._last, self._occupied, self._stepping = self.heard, 0.0, 0.0

  @property
  def busy(self) -> int:
    return len(self.turns)

  def advance(self, lanes: Sequence[Lane], wait: float = 1.0) -> list[tuple[Lane, Episode]]:
    """Starts what can start, hears what has arrived (waiting up to `wait` seconds where nobody asks), and returns the episodes that
    ended; where none did, samples for all that ask. lanes: the most urgent first."""
    began, thinking = self.now(), 0.0
    self._start(lanes)
    ended = self._hear(0.0 if self._asking or self._writing else wait)
    if not ended and self._asking and not self._writing and len(self._asking) < self.busy:
      ended = self._hear(self.patience)
    if not ended:  # else what has just become free is started first
      asking, self._asking = self._asking, []
      for lane in dict.fromkeys([*(lane for _, lane in asking), *(lane for lane, _, _ in self._writing.values())]):
        thinking += (self._poll if lane.sessions else self._sample)(lane, [turn for turn, whose in asking if whose is lane])
    self.clock("environments", self.now() - began - thinking)
    return ended

  def _start(self, lanes: Sequence[Lane]) -> None:
    self._tally()
    for lane in lanes:
      while (trial := lane.next()) is not None:
        lease = self.computers.try_lease()
        if lease is None:
          return lane.again.appendleft(trial)
        if not self.turns:
          self.heard = self.now()  # silence counts from when something was asked
        self.turns[lease] = Turn(lease, lane.sampler.policy, trial, self.now), lane

  def _hear(self, wait: float) -> list[tuple[Lane, Episode]]:
    ended = []
    answers = self.computers.wait(wait)
    self._tally()
    for lease, result in answers:
      turn, lane = self.turns[lease]
      self.heard, self._stepping = self.now(), self._stepping + result.seconds
      episode = turn.hear(result)
      if episode is not None:
        del self.turns[lease]
        lease.release()
        if lane.sessions:
          self._writing.pop(turn, None)
          lane.sampler.end(turn)
        ended += self._ended(lane, turn.trial, episode)
      elif turn.asks:
        self._asking.append((turn, lane))
    return ended

  def _ended(self, lane: Lane, trial: Try, episode: Episode) -> list[tuple[Lane, Episode]]:
    """The episode counts unless it is to be run again."""
    before = lane.faults[episode.group, episode.try_index]
    if not episode.scored and len(before) < self.reruns and trial.task.id not in self.computers.parked:
      before.append(episode.end_cause)
      lane.again.append(trial)
      return []
    episode.notes["faults"] = lane.faults.pop((episode.group, episode.try_index))
    return [(lane, episode)]

  def _poll(self, lane: Lane, asking: list[Turn]) -> float:
    """A little work of a sampler with sessions: whoever is done acts, the others write on beside it."""
    began, sampler = self.now(), lane.sampler
    for turn in asking:
      prompt = turn.prompt()
      sampler.ask(turn, prompt, turn.key())
      self._writing[turn] = lane, prompt, began
    for turn, out in sampler.poll():
      _, prompt, since = self._writing.pop(turn)
      turn.act(prompt, out, self.now() - since)
    seconds = self.now() - began
    self.clock("sampling", seconds)
    return seconds

  def _sample(self, lane: Lane, asking: list[Turn]) -> float:
    sampler = lane.sampler
    prompts, keys = [turn.prompt() for turn in asking], np.stack([turn.key() for turn in asking])
    began = self.now()
    sampled = sampler.act(prompts, keys)
    seconds = self.now() - began
    self.clock("sampling", seconds)
    for turn, prompt, out in zip(asking, prompts, sampled, strict=True):
      turn.act(prompt, out, seconds)
    return seconds

  def _tally(self) -> None:
    now = self.now()
    self._occupied, self._last = self._occupied + (now - self._last) * self.busy, now

  def utilisation(self) -> dict[str, float]:
    """Since it was last asked for: the share of the computers' time in which an episode was on them, and in which they worked on it
    (the rest of an episode is the policy's thinking)."""
    self._tally()
    most = max((self._last - self._since) * self.computers.size, 1e-9)
    out = {"rate/environment_utilisation": self._occupied / most, "rate/environment_stepping": self._stepping / most}
    self._occupied, self._stepping, self._since = 0.0, 0.0, self._last
    return out


def collect(
  sampler: Sampler, computers: Any, tries: Iterable[Try], clock: Callable = lambda name, seconds: None, reruns: int = 2
) -> Iterator[Episode]:
  """Runs tries on computers and yields episodes as they finish. See Scheduler for clock and reruns."""
  source = iter(tries)
  lane, scheduler = Lane(sampler, lambda: next(source, None)), Scheduler(computers, reruns=reruns, clock=clock)
  while True:
    ended = scheduler.advance([lane])
    yield from (episode for _, episode in ended)
    if not (ended or scheduler.busy or lane.again):
      return
