"""Where an update's groups come from: rounds of sampling in turn with learning, or a stream beside it. One call for both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from core.schema import Task
from core.session import Session
from rollout.gather import Gathered, gather
from rollout.queue import GroupQueue, Ledger
from rollout.replay import Replay
from rollout.sampler import Sampler
from rollout.stream import Stream

MODES = ("sync", "async")


def make(mode: str, sampler: Sampler, envs: list, session: Session, ledger: Ledger, note: Callable[[str, float], None]):
  """A context manager with `gather`. "sync": reproducible bit for bit, environments step in this thread. "async": environments
  step in threads of their own while the learner learns; which episodes an update gets depends on the clock."""
  if mode not in MODES:
    raise ValueError(f"practice.mode is {mode!r}, wanted one of {', '.join(MODES)}")
  if mode == "sync":
    return Rounds(sampler, envs, session, ledger)
  stream = Stream(sampler, envs, GroupQueue(ledger), lambda serial, k: session.key(1 << 20, serial, k), note=note)
  session.attach("stream", stream)
  return stream


class Rounds:
  """Sampling and learning in turn: `gather` returns when its tries have ended."""

  def __init__(self, sampler: Sampler, envs: list, session: Session, ledger: Ledger):
    self.sampler, self.envs, self.session, self.ledger = sampler, envs, session, ledger

  def __enter__(self) -> Rounds:
    return self

  def __exit__(self, *exc) -> None:
    pass

  def gather(self, replay: Replay, select: Callable, next_task: Callable[[], Task], rng: np.random.Generator, **how) -> Gathered:
    """See rollout.gather.gather for what `how` holds."""
    return gather(self.sampler, self.envs, GroupQueue(self.ledger), replay, select, next_task, self.session.key, rng, **how)
