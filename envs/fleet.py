"""Computers and what happens to them: boots, calls with deadlines, faults, canaries, restarts. The pool (envs/pool.py) lends them out.

Nothing here waits but `_pump`, and only until the next deadline. Deadlines are looked at after everything that has arrived was
read, so that a trainer that was busy elsewhere blames no worker for it.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import random
import time
from collections.abc import Callable
from typing import Any

from envs import errors, health
from envs.canary import CanaryRun
from envs.errors import InfraError
from envs.health import LARGE, check, defaults
from envs.leases import EnvSpec, Lease
from envs.local import LocalBackend
from envs.wire import WireError

# Which deadlines a call may use up, and what it is when it does.
CALLS = {
  "boot": (("boot",), errors.BootDeadline),
  "reset": (("reset",), errors.ResetDeadline),
  "step": (("act", "settle", "observe", "evaluate"), errors.ActDeadline),
  "expire": (("evaluate",), errors.EvaluateDeadline),
  "ping": (("observe",), errors.ObserveDeadline),
  "close": (("close",), errors.Deadline),
}
PHASES = {  # parts of a step that an environment announces (envs.phases)
  "act": errors.ActDeadline,
  "settle": errors.SettleDeadline,
  "observe": errors.ObserveDeadline,
  "evaluate": errors.EvaluateDeadline,
}


class State(str, enum.Enum):
  """Where a computer is between being started and being given up."""

  COLD = "cold"  # no process yet, or ended on purpose
  BOOTING = "booting"  # the process builds its environment, then plays its canaries
  READY = "ready"  # may be leased
  LEASED = "leased"  # somebody's
  RESETTING = "resetting"  # brings up a start screen, or finishes what an ended lease left behind
  BROKEN = "broken"  # ended by a fault, starts again after a while
  QUARANTINED = "quarantined"  # too many faults, or a canary scored wrong


@dataclasses.dataclass
class Call:
  """A request on its way. due: when its deadline passes; last, last_error: the end of its whole time, and what it is then."""

  id: int
  op: str
  token: int
  started: float
  due: float
  error: type[InfraError]
  last: float
  last_error: type[InfraError]
  limits: tuple[str, ...]  # names of the deadlines that `due` is made of, and `last`
  last_limits: tuple[str, ...]
  answer: Callable[[Any, InfraError | None], None] | None
  phase: str = ""


@dataclasses.dataclass(eq=False)
class Slot:
  """One computer's place. due: when something is to be done with it while no call is on its way."""

  index: int
  record: health.Record
  state: State = State.COLD
  due: float = 0.0
  remote: Any = None
  generation: int = 0
  lease: Lease | None = None
  call: Call | None = None
  canary: CanaryRun | None = None
  inside: float = 0.0  # seconds this episode has spent in the environment
  unheard: int = 0  # a ping whose answer nobody waits for any more
  reason: str = ""


def start_backend(cfg, count: int) -> Any:
  """Who starts workers, by pool.backend."""
  if cfg.backend == "local":
    return LocalBackend(count, cfg.log_lines)
  from envs.ray_hosts import RayBackend  # ray itself is imported where one is made

  return RayBackend(count, cfg.log_lines, cfg.address)


class Fleet:
  """The computers of a pool and their state machines. `_pump` drives them; see Pool for the arguments."""

  def __init__(self, spec: EnvSpec, cfg=None, *, canaries=(), backend=None, clock: Callable[[], float] = time.monotonic, seed: int = 0,
               tick: Callable[[], None] | None = None):  # fmt: skip
    self.cfg = defaults() if cfg is None else cfg
    check(self.cfg)
    self.spec, self.canaries, self._clock, self._tick = spec, tuple(canaries), clock, tick
    self._limits = {name: float(seconds) for name, seconds in self.cfg.deadlines.items()}
    count, rng = self.cfg.slots + self.cfg.spares, random.Random(seed)
    self.backend = backend if backend is not None else start_backend(self.cfg, count)
    self.slots = [Slot(i, health.Record(self.cfg, rng)) for i in range(count)]
    self.tasks = health.Parking(self.cfg.park)
    self.shape: tuple[int, ...] = ()  # of the screen, once the first computer is up
    self.counts: collections.Counter[str] = collections.Counter()
    self.faulted: collections.Counter[str] = collections.Counter()  # episodes by cause
    self.seconds: collections.Counter[str] = collections.Counter()  # inside the environment, by operation
    self.leased = self.in_flight = 0  # computers; episodes
    self._ready: collections.deque[Slot] = collections.deque()
    self._by_remote: dict[Any, Slot] = {}
    self._id = self._token = self._booting = 0
    self._next = 0.0  # nothing is due before
    self._driven = False

  def _pump(self, timeout: float) -> None:
    """Reads what has arrived, waiting for it until something is due or the time is over, and does what is due."""
    if self._driven:
      raise RuntimeError("two threads drive one pool: give each its own, or let one drive")
    self._driven = True
    try:
      self._catch_up()
      if self._tick is not None:
        self._tick()
        timeout = min(timeout, 1.0)
      self._hear(self.backend.poll(max(0.0, min(timeout, self._next - self._clock(), 3600.0))))
      self._catch_up()
    finally:
      self._driven = False

  def _catch_up(self) -> None:
    """Does what is due; a worker is late only if nothing of its has arrived."""
    if self._clock() >= self._next:
      self._hear(self.backend.poll(0.0))
      self._tend()

  # -- calls

  def _send(self, slot: Slot, op: str, token: int, payload: dict, answer) -> None:
    limits, error = CALLS[op]
    now, seconds = self._clock(), sum(self._limits[name] for name in limits)
    left = self._limits["episode"] - slot.inside
    if op in ("step", "expire") and left < seconds:
      limits, error, seconds = ("episode",), errors.EpisodeDeadline, max(left, 0.0)
    self._id += 1
    slot.call = Call(self._id, op, token, now, now + seconds, error, now + seconds, error, limits, limits, answer)
    self._next = min(self._next, slot.call.due)
    try:
      slot.remote.send({"op": op, "id": self._id, "token": token} | payload)
    except OSError:  # gone before anything was sent: nothing is ambiguous
      self._fault(slot, self._explain(slot, errors.WorkerDied, f"before {op}: {slot.remote.fate()}"))

  def _hear(self, remotes) -> None:
    for remote in remotes:
      slot = self._by_remote.get(remote)
      if slot is None:
        continue
      try:
        messages = remote.receive()
      except EOFError:
        self._lost(slot)
        continue
      except WireError as error:
        self._fault(slot, self._explain(slot, errors.WorkerFault, str(error)))
        continue
      for message in messages:
        if slot.remote is remote:
          self._handle(slot, message)

  def _handle(self, slot: Slot, message: dict) -> None:
    call = slot.call
    if call is None or (message.get("id"), message.get("token")) != (call.id, call.token):
      self.counts["dropped_answers"] += message.get("id") != slot.unheard  # to another call or another lease
    elif "phase" in message:
      if call.op == "step" and message["phase"] in PHASES:
        call.phase, now = message["phase"], self._clock()
        call.due, call.error, call.limits = now + self._limits[call.phase], PHASES[call.phase], (call.phase,)
        if call.due > call.last:
          call.due, call.error, call.limits = call.last, call.last_error, call.last_limits
        self._next = min(self._next, call.due)
    elif "error" in message:
      error, said = message["error"], str(message.get("message", ""))
      self._spent(slot, call)
      if message.get("infra"):
        self._fault(slot, errors.named(str(error))(said), keep=True)
      else:
        self._fault(slot, self._explain(slot, errors.WorkerFault, f"in {call.op}: {said}"))
    else:
      try:
        value = self._value(slot, call, message["result"])
      except errors.BadFrame as error:
        self._fault(slot, error)
      except (KeyError, TypeError, ValueError) as error:
        self._fault(slot, self._explain(slot, errors.WorkerFault, f"{call.op} was answered with nonsense: {type(error).__name__} {error}"))
      else:
        self._spent(slot, call)
        slot.call = None
        self._answered(slot, call, value)

  def _spent(self, slot: Slot, call: Call) -> None:
    spent = self._clock() - call.started
    self.seconds[call.op] += spent
    self.counts["calls/" + call.op] += 1
    slot.inside += spent if call.op in ("step", "expire") else 0.0

  def _value(self, slot: Slot, call: Call, result: dict) -> Any:
    if call.op == "expire":
      return result["info"]
    if call.op not in ("reset", "step"):
      return result
    obs = {"screenshot": slot.remote.pixels(result["screen"], call.token)} | result["obs"]
    if call.op == "reset":
      return obs, result["info"]
    return obs, result["reward"], result["terminated"], result["truncated"], result["info"]

  def _answered(self, slot: Slot, call: Call, value: Any) -> None:
    lease = slot.lease
    if call.op == "boot":
      self._booted(slot, value)
    elif call.op == "close":
      self._stop(slot, State.COLD, self._clock())
    elif slot.canary is not None:
      self._canary(slot, call.op, value)
    elif lease is not None:
      slot.state = State.LEASED
      self._rest(slot)
      if call.op == "expire" or (call.op == "step" and (value[2] or value[3])):
        self.counts["finished"] += 1
        self._over(lease)
        slot.record.finished()
        self.tasks.finished(lease.task.id)
    elif call.op == "ping":
      self._rest(slot)
    else:  # its lease ended meanwhile
      self.counts["dropped_answers"] += 1
      self._free(slot)
    if call.answer is not None:
      call.answer(value, None)

  # -- faults

  def _explain(self, slot: Slot, kind: type[InfraError], what: str) -> InfraError:
    lines = slot.remote.last_lines() if slot.remote is not None else []
    printed = "\n  " + "\n  ".join(lines) if lines else ""
    return kind(f"computer {slot.index} {what}{printed}")

  def _lost(self, slot: Slot) -> None:
    """The worker's end of the connection is gone."""
    call, fate = slot.call, slot.remote.fate()
    if call is not None and call.op == "close":
      return self._stop(slot, State.COLD, self._clock())
    doing = call.op if call else "nothing"
    unsure = call is not None and call.op == "step" and call.phase in ("", "act")
    return self._fault(slot, self._explain(slot, errors.ActionAmbiguous if unsure else errors.WorkerDied, f"died during {doing}: {fate}"))

  def _late(self, slot: Slot) -> None:
    call = slot.call
    if call.op == "close":
      return self._stop(slot, State.COLD, self._clock())
    limit = " + ".join(f"{name} {self._limits[name]:g}" for name in call.limits)
    task = f" of task {slot.lease.task.id}" if slot.lease is not None and slot.lease.task is not None else ""
    waited = f"{slot.remote.fate(0)}, no answer in {self._clock() - call.started:.1f} s"
    return self._fault(slot, self._explain(slot, call.error, f"{call.op}{task}: {waited} (pool.deadlines: {limit} s)"))

  def _fault(self, slot: Slot, error: InfraError, keep: bool = False) -> None:
    """Something broke. keep: the worker itself said so and stands; it is ended all the same at the second time in a row, or if
    nobody is there to reset it."""
    cause, now = type(error).__name__, self._clock()
    call, lease, slot.call, was = slot.call, slot.lease, None, slot.state
    self.counts["fault/" + cause] += 1
    too_many = slot.record.fault(now, f"{cause}: {str(error).splitlines()[0] if str(error) else ''}")
    if lease is not None and lease.running:
      self.faulted[cause] += 1
      self._over(lease)
      self.tasks.fault(lease.task.id, slot.index if len(self.slots) >= self.cfg.park else (slot.index, slot.generation), cause)
    if keep and lease is not None and not too_many and slot.record.in_a_row < 2:
      slot.state = State.LEASED
      self._rest(slot)
    else:
      if was == State.READY:
        self._ready.remove(slot)
      if lease is not None:
        lease.error, lease.slot, slot.lease = error, None, None
        self.leased -= 1
      self.counts["promoted"] += bool(self._ready) and len(self._ready) + self.leased >= self.cfg.slots
      if too_many:
        self._quarantine(slot, f"{self.cfg.quarantine_faults} faults within {self.cfg.quarantine_window:g} s, the last: {slot.record.last}")
      else:
        self._stop(slot, State.BROKEN, now + slot.record.backoff())
    if call is not None and call.answer is not None:
      call.answer(None, error)

  def _quarantine(self, slot: Slot, reason: str) -> None:
    self.counts["quarantined"] += 1
    slot.reason = reason
    self._stop(slot, State.QUARANTINED, self._clock() + self.cfg.quarantine if self.cfg.quarantine else LARGE)

  def _stop(self, slot: Slot, state: State, due: float) -> None:
    """Ends the process, if there is one."""
    if slot.remote is not None:
      self._by_remote.pop(slot.remote, None)
      slot.remote.kill()
    self._booting -= slot.state == State.BOOTING
    slot.remote, slot.call, slot.canary, slot.state, slot.due = None, None, None, state, due
    self._next = 0.0  # another may boot now

  # -- life of a computer

  def _boot(self, slot: Slot) -> None:
    slot.state, slot.generation = State.BOOTING, slot.generation + 1
    self._booting += 1
    self.counts["boots"] += 1
    try:
      slot.remote = self.backend.start(slot.index)
    except OSError as error:
      return self._fault(slot, errors.WorkerFault(f"computer {slot.index} cannot be started: {error}"))
    self._by_remote[slot.remote] = slot
    return self._send(slot, "boot", 0, {"spec": self.spec._asdict(), "black_frames": self.cfg.black_frames}, None)

  def _booted(self, slot: Slot, value: dict) -> None:
    shape = tuple(value["shape"])
    slot.remote.size(shape)
    self.shape = self.shape or shape
    slot.record.booted()
    if self.canaries:
      self._test(slot)
    else:
      self._free(slot)

  def _test(self, slot: Slot) -> None:
    """Canaries first."""
    self._token += 1
    slot.record.since_canary, slot.inside = 0, 0.0
    slot.canary = CanaryRun(self.canaries, self._token, lambda: self.counts.update(["canaries"]))
    self._canary(slot, "", None)

  def _canary(self, slot: Slot, op: str, value: Any) -> None:
    run = slot.canary
    asked = run.next(op, value)
    if asked is not None:
      return self._send(slot, asked[0], run.token, asked[1], None)
    if not run.wrong:
      slot.canary = None
      return self._free(slot)
    if run.passes_untouched:
      self.tasks.park(run.passes_untouched, "passes untouched")
    self.counts["fault/CanaryFailed"] += 1
    return self._quarantine(slot, run.wrong)

  def _free(self, slot: Slot) -> None:
    """Nobody's any more: worn ones start anew, the others may be leased."""
    if slot.state == State.BOOTING:
      self._booting -= 1
      self._next = 0.0  # another may boot now
    slot.state = State.RESETTING
    if slot.record.worn:
      self.counts["recycled"] += 1
      self._send(slot, "close", 0, {}, None)
    elif self.canaries and slot.record.canary_due:
      self._test(slot)
    else:
      slot.state = State.READY
      self._ready.append(slot)
      self._rest(slot)

  def _rest(self, slot: Slot) -> None:
    """When to look after a computer that has nothing to do."""
    wait = self.cfg.ping if slot.state == State.READY else self._limits["agent"] or LARGE
    slot.due = self._clock() + wait
    self._next = min(self._next, slot.due)

  def _tend(self) -> None:
    """Does what is due."""
    now = self._clock()
    if now < self._next:
      return
    self._next = LARGE
    for slot in self.slots:
      if self._due(slot) <= now:
        self._overdue(slot)
    self._next = min(self._next, min(map(self._due, self.slots)))

  def _due(self, slot: Slot) -> float:
    if slot.call is not None:
      return slot.call.due
    if slot.state in (State.COLD, State.BROKEN) and self._booting >= self.cfg.boots:
      return LARGE
    return slot.due

  def _take_back(self, slot: Slot) -> None:
    """The agent has thought for too long; the computer is not to blame."""
    lease, slot.lease = slot.lease, None
    lease.error = errors.AgentDeadline(f"lease {lease.token}: no call in {self._limits['agent']:g} s (pool.deadlines.agent)")
    lease.slot = None
    self.leased -= 1
    self.counts["fault/AgentDeadline"] += 1
    if lease.running:
      self.faulted["AgentDeadline"] += 1
      self._over(lease)
    self._free(slot)

  def _over(self, lease: Lease) -> None:
    """The lease's episode has ended, one way or another."""
    lease.running = False
    self.in_flight -= 1

  def _overdue(self, slot: Slot) -> None:
    if slot.call is not None:
      self._late(slot)
    elif slot.state in (State.COLD, State.BROKEN):
      self._boot(slot)
    elif slot.state == State.READY:
      self._send(slot, "ping", 0, {}, None)
    elif slot.state == State.LEASED:
      self._take_back(slot)
    elif slot.state == State.QUARANTINED:
      slot.record.forget()
      slot.state, slot.due = State.BROKEN, self._clock()
      self._next = 0.0
