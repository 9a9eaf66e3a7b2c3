"""Computers in this process, lent out like those of a pool (envs/pool.py): for simulators, which need no process of their own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from core.schema import Task
from envs.errors import InfraError
from envs.leases import Result


class Seat:
  """One environment, lent out. `submit_*` ask, `Inside.wait` hands over what came of it."""

  def __init__(self, inside: Inside, env: Any):
    self.inside, self.env = inside, env
    self._work: queue.SimpleQueue | None = None  # of its thread, once it has one
    self.asked = self.given_up = False  # a call is on its way; nobody waits for it any more

  def submit_reset(self, task: Task, seed: int | None = None) -> None:
    seeded = {} if seed is None else {"seed": seed}
    self._submit("reset", lambda: self.env.reset(options={"task": task}, **seeded))

  def submit_step(self, text: str) -> None:
    self._submit("step", lambda: self.env.step(text))

  def submit_expire(self) -> None:
    self._submit("expire", lambda: self.env.unwrapped.expire())

  def release(self) -> None:
    """Gives it back. A call that is on its way finishes first, and nobody hears of it."""
    self.given_up = self.asked
    if not self.asked:
      self.inside.free.append(self)

  def _submit(self, op: str, call: Callable[[], Any]) -> None:
    self.asked = True
    if not self.inside.threads:
      return self._do(op, call)
    if self._work is None:
      self._work = queue.SimpleQueue()
      threading.Thread(target=self._loop, name="computer", daemon=True).start()  # one that hangs does not keep the process
    return self._work.put((op, call))

  def _loop(self) -> None:
    broke = None
    while broke is None and (asked := self._work.get()) is not None:
      try:
        self._do(*asked)
      except BaseException as error:  # noqa: BLE001 - raised again by `wait`, in the thread that drives
        broke = error
        self.inside.results.put((self, error))

  def _do(self, op: str, call: Callable[[], Any]) -> None:
    began, value, error = time.monotonic(), None, None
    try:
      value = call()
    except InfraError as fault:
      error = fault
    self.inside.results.put((self, Result(op, value, error, time.monotonic() - began)))

  def end(self) -> None:
    if self._work is not None:
      self._work.put(None)


class Inside:
  """Environments of this process behind the pool's non-blocking interface. One thread drives it.

  threads: False steps an environment as it is asked, in the caller's thread, reproducibly; True gives each a thread of its own, so that
  slow ones hold nobody up.
  """

  parked: dict[str, str] = {}  # tasks that are not started any more; in this process none ever is

  def __init__(self, envs: list, threads: bool = False):
    self.size, self.threads = len(envs), threads
    self.seats = [Seat(self, env) for env in envs]
    self.free = list(self.seats)
    self.results: queue.SimpleQueue = queue.SimpleQueue()

  def __enter__(self) -> Inside:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def try_lease(self) -> Seat | None:
    return self.free.pop() if self.free else None

  def wait(self, timeout: float) -> list[tuple[Seat, Result]]:
    """Everything that was answered, once something was, or nothing once the time is over."""
    out, wait = [], timeout if self.threads else 0.0
    while True:
      try:
        seat, result = self.results.get(timeout=wait) if wait > 0 else self.results.get_nowait()
      except queue.Empty:
        return out
      seat.asked = False
      if isinstance(result, BaseException):
        raise result
      if seat.given_up:
        seat.release()
        continue
      out.append((seat, result))
      wait = 0.0

  def report(self) -> str:
    """Who waits for what, for a watchdog's last words."""
    return f"{self.size - len(self.free)} of {self.size} environments of this process are lent out"

  def close(self) -> None:
    """Ends the threads. One that hangs in a step is left to itself; nothing waits for it."""
    for seat in self.seats:
      seat.end()
