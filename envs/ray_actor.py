"""The actor of backend `ray` (envs/ray_hosts.py): one host's workers, started by envs.local, for a trainer on another host.

Imported where the environments run: neither Ray nor jax is needed here.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import numpy as np

from envs import processes
from envs.errors import BadFrame
from envs.local import LocalBackend, LocalRemote
from envs.wire import Reader, WireError, pack

BEAT = 2.0  # seconds after which a host with nothing to say says so
DESERTED = 60.0  # seconds without a question after which a host takes its trainer for lost


class Host:
  """The actor: one host's workers. All of it runs on the actor's event loop, so nothing is done by two at once."""

  def __init__(self, log_lines: int):
    self.log_lines = log_lines
    self.newest = self.live = 0  # epochs: the last one begun; the one in force, 0 for none
    self.backend: LocalBackend | None = None

  async def begin(self, epoch: int, slots: int) -> tuple[int, int | None]:
    """A new epoch: everything older is ended. Returns pid and start time of the actor."""
    if epoch <= self.newest:
      raise RuntimeError(f"epoch {epoch} is over, the newest is {self.newest}")
    await self.end(self.live)
    self.newest = self.live = epoch
    self.next, self.early = 0, {}  # number of the next command; commands that overtook it
    self.workers: dict[int, LocalRemote] = {}
    self.keys: dict[LocalRemote, int] = {}
    self.said: list[tuple[int, str, Any]] = []
    self.news, self.failed = asyncio.Event(), None
    self.backend = LocalBackend(slots, self.log_lines)
    self.heard = time.monotonic()  # when the trainer last asked
    asyncio.get_running_loop().add_reader(self.backend.selector.fileno(), self._listen)
    self.watch = asyncio.create_task(self._watch(epoch))
    return os.getpid(), processes.start_time(os.getpid())

  async def do(self, epoch: int, number: int, op: str, key: int, what: Any) -> None:
    """Carries out commands in the order of their numbers, each once; none of another epoch."""
    if epoch != self.live or number < self.next:
      return
    self.early[number] = op, key, what
    while self.next in self.early:
      self._guard(self._do, *self.early.pop(self.next))
      self.next += 1

  async def hear(self, epoch: int) -> list[tuple[int, str, Any]]:
    """What the workers said since the last time: (key, kind, what), once there is something or a BEAT is over."""
    self._of(epoch)
    self.heard = time.monotonic()
    try:
      await asyncio.wait_for(self.news.wait(), BEAT)
    except TimeoutError:
      if self.early:
        self.failed = RuntimeError(f"command {self.next} never came, {len(self.early)} later ones did")
    self._of(epoch)
    if self.failed is not None:
      raise self.failed
    self.news.clear()
    out, self.said = self.said, []
    return out

  async def look(self, epoch: int, key: int) -> tuple[str, list[str]]:
    """How a worker fares, and what it printed last."""
    self._of(epoch)
    worker = self.workers.get(key)
    return ("not started", []) if worker is None else (worker.fate(0), worker.last_lines())

  async def end(self, epoch: int) -> None:
    """Ends every worker of this epoch and waits until they are collected."""
    if self.backend is None or epoch != self.live:
      return
    backend, self.backend, self.live = self.backend, None, 0
    asyncio.get_running_loop().remove_reader(backend.selector.fileno())
    self.news.set()
    backend.close()

  async def _watch(self, epoch: int) -> None:
    """A host that its trainer has deserted, or cannot reach any more, ends what it has."""
    while epoch == self.live:
      await asyncio.sleep(BEAT)
      if time.monotonic() - self.heard > DESERTED:
        await self.end(epoch)

  def _of(self, epoch: int) -> None:
    if epoch != self.live:
      raise RuntimeError(f"epoch {epoch} is over, the newest is {self.newest}")

  def _guard(self, call, *args) -> None:
    """What should not happen here goes to the trainer, as the end of the epoch."""
    try:
      call(*args)
    except Exception as error:  # noqa: BLE001 - hear raises it
      self.failed = error
      self.news.set()

  def _tell(self, key: int, kind: str, what: Any) -> None:
    self.said.append((key, kind, what))
    self.news.set()

  def _do(self, op: str, key: int, what: Any) -> None:
    if op == "start":
      try:
        worker = self.backend.start(what)
      except OSError as error:
        return self._tell(key, "end", (f"could not be started: {error}", [], ""))
      self.workers[key], self.keys[worker] = worker, key
      return self._tell(key, "pid", (worker.pid, worker.started))
    worker = self.workers.get(key)
    if worker is None:  # it has ended meanwhile, and the trainer was told
      return None
    try:
      if op == "send":
        for message in Reader().feed(what):
          worker.send(message)
      elif op == "size":
        worker.size(what)
      elif op == "terminate":
        worker.terminate()
      elif op == "kill":
        self._forget(key)
    except OSError as error:
      if not isinstance(error, ConnectionError):  # gone, that is: its end will be heard
        self._over(key, f"{op}: {error}")
    return None

  def _listen(self) -> None:
    for worker in self.backend.poll(0.0):
      self._guard(self._hear, worker)

  def _hear(self, worker: LocalRemote) -> None:
    key = self.keys[worker]
    try:
      for message in worker.receive():
        self._tell(key, "message", (pack(message), self._pixels(worker, message)))
    except EOFError:
      self._over(key, worker.fate())
    except WireError as error:
      self._over(key, worker.fate(0), str(error))

  def _pixels(self, worker: LocalRemote, message: dict) -> np.ndarray | Exception | None:
    """The screenshot that a message tells of, while the worker waits; or why it cannot be had, for the trainer to raise."""
    result = message.get("result")
    if not isinstance(result, dict) or "screen" not in result:
      return None
    try:
      return worker.pixels(result["screen"], message["token"])
    except (BadFrame, KeyError, TypeError, ValueError) as error:
      return error

  def _over(self, key: int, how: str, garbled: str = "") -> None:
    lines = self.workers[key].last_lines()
    self._forget(key)
    self._tell(key, "end", (how, lines, garbled))

  def _forget(self, key: int) -> None:
    worker = self.workers.pop(key)
    del self.keys[worker]
    worker.kill()
