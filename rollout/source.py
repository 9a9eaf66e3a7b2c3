"""Where episodes come from: rounds of sampling in turn with learning, or a stream beside it. The same calls for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from core.schema import Episode, Task
from core.session import Session
from envs.pool import Pool
from rollout.gather import Gathered, gather
from rollout.queue import GroupQueue, Ledger
from rollout.replay import Replay
from rollout.sampler import Sampler
from rollout.scheduler import collect
from rollout.stream import Stream
from rollout.turn import Try

MODES = ("sync", "async")


def make(
  mode: str, sampler: Sampler, computers: Any, session: Session, ledger: Ledger, note: Callable[[str, float], None], ahead: float = 0.0
):  # fmt: skip
  """A context manager with `gather` and `run`. "sync": reproducible bit for bit where the computers are in this process. "async":
  episodes go on while the learner learns, at most `ahead` updates' worth (Stream); which of them an update gets depends on the clock."""
  if mode not in MODES:
    raise ValueError(f"practice.mode is {mode!r}, wanted one of {', '.join(MODES)}")
  if isinstance(computers, Pool):
    session.attach("parking", computers.tasks)
  if mode == "sync":
    return Rounds(sampler, computers, session, ledger)
  stream = Stream(sampler, computers, GroupQueue(ledger), lambda serial, k: session.key(1 << 20, serial, k), ahead=ahead, clock=note)
  session.attach("stream", stream)
  return stream


class Rounds:
  """Sampling and learning in turn: `gather` returns when its tries have ended."""

  def __init__(self, sampler: Sampler, computers: Any, session: Session, ledger: Ledger):
    self.sampler, self.computers, self.session, self.ledger = sampler, computers, session, ledger

  def __enter__(self) -> Rounds:
    return self

  def __exit__(self, *exc) -> None:
    pass

  def gather(self, replay: Replay, select: Callable, next_task: Callable[[], Task], rng: np.random.Generator, **how) -> Gathered:
    """See rollout.gather.gather for what `how` holds."""
    return gather(self.sampler, self.computers, GroupQueue(self.ledger), replay, select, next_task, self.session.key, rng, **how)

  def run(self, sampler: Sampler, tries: Iterable[Try], clock: Callable) -> list[Episode]:
    """Episodes of other tries, written by another sampler."""
    return list(collect(sampler, self.computers, tries, clock))

  def curves(self) -> dict[str, float]:
    return self.sampler.curves() if hasattr(self.sampler, "curves") else {}

  def report(self) -> str:
    return self.computers.report()
