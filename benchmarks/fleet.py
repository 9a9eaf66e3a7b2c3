"""Simulated computers for benchmarks: a pool backend whose workers answer from memory, at once or after a simulated while.

Everything above it is the real thing: envs.pool.Pool, the scheduler, the queue. Time is the `Clock`'s: it jumps to the next answer, so
hours of 4,096 computers pass in seconds.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import numpy as np

from core.schema import SUCCESS, Unreadable
from models.base import Prompt
from rollout.sampler import Sampled

SHAPE = (40, 24, 3)


class Clock:
  """Simulated seconds, and what is going to happen."""

  def __init__(self):
    self.now, self._due, self._count = 0.0, [], itertools.count()

  def __call__(self) -> float:
    return self.now

  def at(self, seconds: float, what) -> None:
    heapq.heappush(self._due, (self.now + seconds, next(self._count), what))

  def take(self, timeout: float) -> list:
    """What is due by now; if nothing is, time goes on to the next, `timeout` at most."""
    if not self._due or self._due[0][0] > self.now:
      self.now = min(self.now + timeout, self._due[0][0]) if self._due else self.now + timeout
    out = []
    while self._due and self._due[0][0] <= self.now:
      out.append(heapq.heappop(self._due)[2])
    return out


class SimWorker:
  """A worker without a process. Episodes are solved at step `steps`."""

  screen = np.zeros(SHAPE, np.uint8)

  def __init__(self, fleet: SimFleet):
    self.fleet, self.inbox, self.gone = fleet, [], False

  def send(self, message: dict) -> None:
    op, fleet = message["op"], self.fleet
    result: dict = {"shape": SHAPE}
    if op == "reset":
      self.pace = fleet.pace()
    over = message.get("act") == fleet.steps
    if op in ("reset", "step"):
      result = {"screen": {}, "obs": {"goal": "", "text": ""}, "info": {"notes": {}}}
    if op == "step":
      ends = {"rewards": {SUCCESS: float(fleet.passes())}, "partial": None} if over else {}
      result["info"] |= {"action": Unreadable(""), "cause": "agent" if over else ""} | ends
      result |= {"reward": 0.0, "terminated": over, "truncated": False}
    seconds = self.pace if op in ("reset", "step") else 0.0
    fleet.clock.at(seconds, (self, {"id": message["id"], "token": message["token"], "result": result}))

  def receive(self) -> list[dict]:
    out, self.inbox = self.inbox, []
    return out

  def pixels(self, told: dict, token: int) -> np.ndarray:
    return self.screen

  def size(self, shape: tuple) -> None:
    pass

  def kill(self) -> None:
    self.gone = True


class SimFleet:
  """A pool backend. pace(): seconds that every call of one episode takes; steps: an episode's length; passes(): its score."""

  def __init__(self, clock: Clock, steps: int, pace: Callable[[], float], passes: Callable[[], bool]):
    self.clock, self.steps, self.pace, self.passes = clock, steps, pace, passes

  def start(self, slot: int) -> SimWorker:
    return SimWorker(self)

  def poll(self, timeout: float) -> list[SimWorker]:
    told: dict[SimWorker, None] = {}
    for worker, message in self.clock.take(timeout):
      if not worker.gone:
        worker.inbox.append(message)
        told[worker] = None
    return list(told)

  def close(self) -> None:
    pass


class Writer:
  """A sampler and its policy in one: writes one token that means "wait()", in `fixed` + `each` x n simulated seconds for n prompts."""

  version = 0

  def __init__(self, clock: Clock | None = None, fixed: float = 0.0, each: float = 0.0):
    self.clock, self.fixed, self.each, self.policy, self.tokenizer, self.batches = clock, fixed, each, self, self, []

  def prompt(self, goal, screens, text, history=()):
    return _PROMPT

  def decode(self, tokens) -> str:
    return "wait()"

  def act(self, prompts: list, keys: np.ndarray) -> list[Sampled]:
    if self.clock is not None:
      self.clock.now += self.fixed + self.each * len(prompts)
    self.batches.append(len(prompts))
    return [Sampled(np.array([1], np.int32), np.zeros(1, np.float32), np.zeros(1, np.float32), self.version)] * len(prompts)


_PROMPT = Prompt(np.zeros(1, np.int32), np.zeros((1, 1), np.int32), np.zeros(0, np.int32), np.zeros((1, 1), np.uint8), 1)
