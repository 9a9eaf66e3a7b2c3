"""What a rollout holds: a Lease on one computer, or a PooledEnv that takes a lease for every try."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from core.schema import Task
from envs.base import text_space
from envs.errors import InfraError

if TYPE_CHECKING:
  from envs.pool import Pool


class EnvSpec(NamedTuple):
  """How a worker builds its environment: find("envs", suite).make(computer, config, clean). config: plain values."""

  suite: str  # a name in envs/, or the path of a Python file that has `make`
  computer: str
  config: dict
  clean: bool = False


def spec_of(cfg, clean: bool = False) -> EnvSpec:
  """The spec of a run's cfg.env."""
  return EnvSpec(cfg.computer.split("/")[0], cfg.computer, cfg.to_dict(), clean)


class Result(NamedTuple):
  """What came of a submitted call. op: "reset", "step" or "expire"; value: what the blocking call returns, or None; error: the
  InfraError that it would have raised, or None; seconds: from the asking to the answer."""

  op: str
  value: Any
  error: InfraError | None
  seconds: float = 0.0


class Lease:
  """One computer, until it is released or breaks. Like a Gymnasium environment: `reset(options={"task": task})`, `step(text)`,
  `unwrapped.expire()`, each of which waits, with the pool's deadlines; or `submit_*`, whose results come from `pool.wait`.

  token: names this lease; whatever carries another one is refused or dropped. error: what ended the lease, if something did.
  An infra error after which the worker still stands leaves the lease in force: `reset` may be tried again.
  """

  def __init__(self, pool: Pool, slot: Any, token: int):
    self.pool, self.slot, self.token = pool, slot, token
    self.task: Task | None = None
    self.running = False  # an episode is under way
    self.acts = 0  # actions sent in it
    self.error: InfraError | None = None

  @property
  def unwrapped(self) -> Lease:
    return self

  def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
    return self.pool.call(self, "reset", (options or {}).get("task"), seed)

  def step(self, text: str) -> tuple[dict, float, bool, bool, dict]:
    return self.pool.call(self, "step", text)

  def expire(self) -> dict:
    """Ends the episode from outside; its final state is checked."""
    return self.pool.call(self, "expire")

  def submit_reset(self, task: Task, seed: int | None = None) -> None:
    self.pool.submit(self, "reset", task, seed)

  def submit_step(self, text: str) -> None:
    self.pool.submit(self, "step", text)

  def submit_expire(self) -> None:
    self.pool.submit(self, "expire")

  def release(self) -> None:
    """Gives the computer back. An episode that is under way is abandoned; what is still answered to it is dropped."""
    self.pool.release(self)

  close = release

  def __enter__(self) -> Lease:
    return self

  def __exit__(self, *exc) -> None:
    self.release()


class PooledEnv:
  """An environment that holds a computer only while an episode is under way: every `reset` takes a lease (waiting up to
  pool.deadlines.lease), and the end of the episode, or an infra error, gives it back. Drives like one that never breaks."""

  def __init__(self, pool: Pool):
    self.pool, self.action_space = pool, text_space()
    self.lease: Lease | None = None

  @property
  def unwrapped(self) -> PooledEnv:
    return self

  def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
    self.close()
    self.lease = self.pool.lease()
    return self._keep(lambda lease: lease.reset(seed=seed, options=options), lambda value: False)

  def step(self, text: str) -> tuple[dict, float, bool, bool, dict]:
    return self._keep(lambda lease: lease.step(text), lambda value: value[2] or value[3])

  def expire(self) -> dict:
    return self._keep(lambda lease: lease.expire(), lambda value: True)

  def _keep(self, call, over):
    """Makes a call and gives the computer back where the episode is over with it."""
    if self.lease is None:
      raise RuntimeError("this episode has ended: call reset before step")
    try:
      value = call(self.lease)
    except BaseException:
      self.close()
      raise
    if over(value):
      self.close()
    return value

  def close(self) -> None:
    lease, self.lease = self.lease, None
    if lease is not None:
      lease.release()
