"""The pool: many slow, fragile computers behind leases with deadlines. One thread drives hundreds of them.

  pool = Pool(spec_of(cfg.env), cfg.pool)
  env = pool.env()                          # for rollout/turn.py: a lease for every try, every call waits
  lease = pool.lease(); lease.submit_reset(task); pool.wait(1.0) -> [(lease, Result)]      # for a scheduler: nothing waits

A worker that is late, dead, torn or talks nonsense is ended, the call is an infra error that says why, the computer starts anew
after a while, and its siblings never wait for it. An action whose bytes were sent is never sent again. Nothing happens between
calls of the pool: deadlines are looked at when it is driven, after everything that has arrived by then was read. docs/pool.md.
"""

from __future__ import annotations

import collections
import time
from typing import Any

import gymnasium as gym

from core.schema import Task
from envs import errors
from envs.errors import InfraError
from envs.fleet import Fleet, State
from envs.health import LARGE, check, defaults
from envs.leases import EnvSpec, Lease, PooledEnv, Result, spec_of
from envs.wire import WireError

__all__ = ["Pool", "Lease", "PooledEnv", "Result", "State", "EnvSpec", "spec_of", "defaults", "check"]


class Pool(Fleet):
  """`slots` computers, and `spares` more, of one kind. Not for two threads at once. `close()` it, or use `with`.

  canaries: scripted episodes (envs.canary) that a computer must score right before it is leased. backend: who starts workers;
  the local one by default. clock: for tests. tick: called in every wait, once a second at least; what it raises ends the wait.
  counts: what happened; faulted: episodes by cause; `snapshot`, `ledger` and `report` say the rest.
  """

  def __init__(self, spec: EnvSpec, cfg=None, **kw):
    super().__init__(spec, cfg, **kw)
    self._results: collections.deque[tuple[Lease, Result]] = collections.deque()
    self._asked = self.closed = False
    self._tend()

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  # -- leases

  def try_lease(self) -> Lease | None:
    """A computer if one is free now. PoolExhausted if none ever will be."""
    if self.closed:
      raise RuntimeError("the pool is closed")
    if not self._ready:
      self._pump(0.0)
    if not self._ready and all(s.state == State.QUARANTINED and s.due == LARGE for s in self.slots):
      reasons = "; ".join(f"{s.index}: {s.reason}" for s in self.slots[:8])
      raise errors.PoolExhausted(f"all {len(self.slots)} computers of {self.spec.computer} are quarantined ({reasons})")
    self._asked = not self._ready or self.leased >= self.cfg.slots
    if self._asked:
      return None
    slot = self._ready.popleft()
    if slot.call is not None:  # a ping on its way has no say any more
      slot.unheard, slot.call = slot.call.id, None
    self._token += 1
    self.leased += 1
    self.counts["leases"] += 1
    slot.lease, slot.state = Lease(self, slot, self._token), State.LEASED
    self._rest(slot)
    return slot.lease

  def lease(self, timeout: float | None = None) -> Lease:
    """A computer, waiting for it (pool.deadlines.lease seconds by default); NoComputer if none became free."""
    until = self._clock() + (self._limits["lease"] if timeout is None else timeout)
    while (lease := self.try_lease()) is None:
      left = until - self._clock()
      if left <= 0:
        states = ", ".join(f"{n} {state}" for state, n in sorted(collections.Counter(s.state.value for s in self.slots).items()))
        raise errors.NoComputer(f"no computer became free in time: {states}, {self.leased} of {self.cfg.slots} leased")
      self._pump(left)
    return lease

  def env(self) -> PooledEnv:
    """An environment that takes a lease for every episode."""
    return PooledEnv(self)

  def release(self, lease: Lease) -> None:
    slot, lease.slot = lease.slot, None
    self._results = collections.deque(told for told in self._results if told[0] is not lease)  # nobody waits for these any more
    if lease.error is None:
      lease.error = errors.LeaseLost(f"lease {lease.token} was released")
    if slot is None:
      return
    if lease.running:
      self.counts["abandoned"] += 1
      self._over(lease)
    self.leased -= 1
    slot.lease = None
    if slot.call is None:
      self._free(slot)
    else:
      slot.state, slot.call.answer = State.RESETTING, None  # it finishes first, and nobody hears of it

  def call(self, lease: Lease, op: str, what: Any = None, seed: int | None = None) -> Any:
    """Asks and waits; the value, or the infra error raised. A call that was never begun is refused at once."""
    box: list[tuple[Any, InfraError | None]] = []
    self._ask(lease, op, what, seed, lambda value, error: box.append((value, error)))
    while not box:  # ends: every call has a deadline
      self._pump(LARGE)
    value, error = box[0]
    if error is not None:
      raise error
    return value

  def submit(self, lease: Lease, op: str, what: Any = None, seed: int | None = None) -> None:
    """Asks and goes on; `wait` hands over what came of it."""
    began = self._clock()
    answer = lambda value, error: self._results.append((lease, Result(op, value, error, self._clock() - began)))
    self._ask(lease, op, what, seed, answer)

  def wait(self, timeout: float) -> list[tuple[Lease, Result]]:
    """Everything that was answered, once something was, or nothing once the time is over, or a computer became free for a
    `try_lease` that got none."""
    until = self._clock() + timeout
    while True:
      left = until - self._clock()
      due = self._results or self._wanted()
      self._pump(0.0 if due else max(0.0, left))
      if due or self._results or left <= 0 or self._wanted():
        break
    out = list(self._results)
    self._results.clear()
    return out

  def _wanted(self) -> bool:
    """A computer is free, and somebody had asked for one in vain."""
    return self._asked and bool(self._ready) and self.leased < self.cfg.slots

  def _ask(self, lease: Lease, op: str, what: Any, seed: int | None, answer) -> None:
    if lease.error is not None:
      return answer(None, lease.error)
    slot = lease.slot
    if slot.call is not None:
      raise RuntimeError(f"lease {lease.token} is asked for {op} while its {slot.call.op} is still on its way")
    if op == "reset":
      payload = self._begin(lease, what, seed, answer)
      if payload is None:
        return None
    elif not lease.running:
      raise gym.error.ResetNeeded(f"no episode is under way: call reset before {op}")
    else:
      lease.acts += op == "step"
      payload = {"text": what, "act": lease.acts} if op == "step" else {}
    try:
      return self._send(slot, op, lease.token, payload, answer)
    except (TypeError, ValueError):  # what was given cannot travel: nothing was sent
      slot.call = None
      self.counts["abandoned"] += 1
      self._over(lease)
      raise

  def _begin(self, lease: Lease, task: Task | None, seed: int | None, answer) -> dict | None:
    """An episode starts; None if its task is parked."""
    if not isinstance(task, Task):
      raise ValueError(f'reset needs options={{"task": Task}}, got {type(task).__name__}')
    if task.env != self.spec.computer:
      raise ValueError(f"task {task.id} is for {task.env}, this pool has {self.spec.computer}")
    if lease.running:
      self.counts["abandoned"] += 1
      self._over(lease)
    if task.id in self.tasks.parked:
      self.counts["refused_parked"] += 1
      answer(None, errors.TaskParked(f"task {task.id} is parked: {self.tasks.parked[task.id]}"))
      return None
    lease.task, lease.running, lease.acts = task, True, 0
    lease.slot.state, lease.slot.inside = State.RESETTING, 0.0
    self.counts["started"] += 1
    self.in_flight += 1
    return {"task": task, "seed": seed}

  # -- what is told

  @property
  def size(self) -> int:
    """Computers leased at once at most."""
    return self.cfg.slots

  @property
  def parked(self) -> dict[str, str]:
    """Tasks that are not started any more, and why."""
    return self.tasks.parked

  def park(self, task_id: str, reason: str) -> None:
    """The task is not started any more, e.g. because it passes untouched; `tasks.parked` says which and why."""
    self.tasks.park(task_id, reason)

  def unpark(self, task_id: str) -> None:
    self.tasks.unpark(task_id)

  def ledger(self) -> dict[str, int]:
    """Episodes: started = finished + faulted + abandoned + in_flight, always."""
    done = {"finished": self.counts["finished"], "faulted": sum(self.faulted.values()), "abandoned": self.counts["abandoned"]}
    return {"started": self.counts["started"]} | done | {"in_flight": self.in_flight}

  def snapshot(self) -> dict[str, float]:
    """Numbers for a log: computers by state, episodes, faults by cause, mean seconds of a call."""
    out = {f"computers/{state.value}": 0.0 for state in State} | {f"episodes/{k}": float(v) for k, v in self.ledger().items()}
    for slot in self.slots:
      out[f"computers/{slot.state.value}"] += 1
    out |= {f"episodes/fault/{cause}": float(n) for cause, n in sorted(self.faulted.items())}
    out |= {f"mean_seconds/{op}": self.seconds[op] / self.counts["calls/" + op] for op in sorted(self.seconds)}
    told = ("boots", "recycled", "quarantined", "promoted", "canaries", "dropped_answers", "refused_parked")
    return out | {name: float(self.counts[name]) for name in told} | {"parked": float(len(self.tasks.parked))}

  def report(self) -> str:
    """Who waits for what, a line for every computer: for a watchdog's last words."""
    now, lines = self._clock(), []
    for slot in self.slots:
      line = f"computer {slot.index} {slot.state.value}"
      if slot.call is not None:
        line += f", {slot.call.op} {slot.call.phase} for {now - slot.call.started:.1f} s, {slot.call.due - now:.1f} s left"
      elif slot.due < LARGE:
        line += f", looked after in {slot.due - now:.1f} s"
      if slot.lease is not None and slot.lease.task is not None:
        line += f", lease {slot.lease.token}, task {slot.lease.task.id}, {slot.lease.acts} actions"
      lines.append(line + (f", {slot.reason}" if slot.state == State.QUARANTINED else ""))
    return "\n".join(lines)

  def close(self) -> None:
    """Ends every worker: asked first, then killed, in under 10 seconds whatever they are doing. Running episodes are abandoned."""
    if self.closed:
      return
    self.closed = True
    for lease in [s.lease for s in self.slots if s.lease is not None]:
      self.counts["abandoned"] += lease.running
      self.in_flight -= lease.running
      lease.running, lease.error, lease.slot = False, errors.LeaseLost("the pool was closed"), None
    self.leased = 0
    left = dict(self._by_remote)
    for remote, slot in list(left.items()):
      if slot.call is not None and slot.call.op == "boot":
        self._finish(left, remote)  # it has nothing to close yet, and would not listen
        continue
      try:
        remote.send({"op": "close", "id": 0, "token": 0})
      except OSError:
        self._finish(left, remote)
    until = time.monotonic() + self._limits["close"]
    while left and time.monotonic() < until:
      for remote in self.backend.poll(max(0.0, until - time.monotonic())):
        try:
          closed = any(m.get("id") == 0 for m in remote.receive())
        except (EOFError, WireError):
          closed = True
        if closed:
          self._finish(left, remote)
    for remote in left:
      remote.terminate()
    if left:
      time.sleep(0.2)  # for what the workers started
    for remote in list(left):
      self._finish(left, remote)
    self.backend.close()

  def _finish(self, left: dict, remote: Any) -> None:
    slot = left.pop(remote)
    self._stop(slot, slot.state if slot.state == State.QUARANTINED else State.COLD, LARGE)
