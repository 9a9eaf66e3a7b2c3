"""What a pool remembers of faults: when a computer is left alone, when it may try again, and which tasks break computers."""

from __future__ import annotations

import collections
import random

import ml_collections

LARGE = float("inf")
BY_LUCK = 1e-5  # chance of so many faults in a row by luck below which a task is to blame
PRIOR = 50  # episodes, one of them broken, that are counted before the first


def defaults() -> ml_collections.ConfigDict:
  """The pool's knobs; seconds unless said otherwise."""
  return ml_collections.ConfigDict(
    {
      "backend": "local",  # processes of this machine; or "ray": on the hosts of a Ray cluster (envs/ray_hosts.py)
      "address": "",  # HOST:PORT of that cluster; "" = one of this machine alone, started and ended with the pool
      "slots": 8,  # computers leased at once
      "spares": 0,  # more that are booted and wait, so that a broken one is not missed
      "deadlines": {  # past one, the worker is ended, the call is an infra error, and the computer starts anew
        "boot": 300.0,
        "reset": 120.0,
        "act": 30.0,
        "settle": 5.0,
        "observe": 15.0,
        "evaluate": 120.0,
        "episode": 1800.0,  # inside the environment, all calls of one episode together; the agent's thinking does not count
        "agent": 3600.0,  # of thinking about one step before the computer is given to another; 0 = no limit
        "lease": 600.0,  # of waiting for a free computer
        "close": 3.0,  # for an environment to close by itself
      },
      "boots": 8,  # computers that start at the same time
      "ping": 30.0,  # between questions to an idle worker whether it is there
      "backoff": 1.0,  # before a broken computer starts again; doubles with every fault in a row, give or take half
      "backoff_most": 60.0,
      "quarantine_faults": 3,  # so many faults ...
      "quarantine_window": 600.0,  # ... within so long take a computer out
      "quarantine": 0.0,  # until it may try again; 0 = for good
      "recycle": 50,  # episodes before a computer is started anew; 0 = never
      "recycle_jitter": 0.2,  # part of that by which computers differ, so that they do not start anew together
      "canary": 0,  # episodes between canaries, where the caller gives some; 0 = at boot only
      "park": 3,  # distinct computers that a task must break to be parked, and more than the fleet's faults explain; 0 = never
      "black_frames": True,  # a screenshot that is black in every pixel is an infra error
      "log_lines": 50,  # last lines of a worker's output that are kept for errors
    }
  )


def check(cfg) -> None:
  """Domains of the knobs; each failure one line, before any computer starts."""
  known = defaults()
  for name in set(cfg.keys()) - set(known.keys()):
    raise ValueError(f"there is no pool.{name}; there is: {', '.join(sorted(known.keys()))}")
  if cfg.backend not in ("local", "ray"):
    raise ValueError(f"pool.backend is {cfg.backend!r}, wanted 'local' or 'ray'")
  if cfg.address and cfg.backend != "ray":
    raise ValueError(f"pool.address is {cfg.address!r}, which is for pool.backend='ray' only")
  if unknown := sorted(set(cfg.deadlines.keys()) ^ set(known.deadlines.keys())):
    raise ValueError(f"pool.deadlines has or lacks {', '.join(unknown)}, wanted exactly {', '.join(sorted(known.deadlines.keys()))}")
  for name, seconds in cfg.deadlines.items():
    if not (0 < seconds < LARGE or (name == "agent" and seconds == 0)):
      raise ValueError(f"pool.deadlines.{name} is {seconds}, wanted seconds above 0{' or 0 (no limit)' if name == 'agent' else ''}")
  if cfg.deadlines.close > 6:
    raise ValueError(f"pool.deadlines.close is {cfg.deadlines.close}, wanted 6 seconds at most: the whole pool is closed within 10")
  lowest = {"slots": 1, "spares": 0, "boots": 1, "quarantine_faults": 1, "recycle": 0, "canary": 0, "park": 0, "log_lines": 1}
  for name, least in lowest.items():
    if not (isinstance(cfg[name], int) and cfg[name] >= least):
      raise ValueError(f"pool.{name} is {cfg[name]}, wanted a whole number, {least} or more")
  for name, least in {"ping": 1e-3, "backoff": 0, "backoff_most": 0, "quarantine_window": 1e-3, "quarantine": 0}.items():
    if not least <= cfg[name] < LARGE:
      raise ValueError(f"pool.{name} is {cfg[name]}, wanted {least:g} seconds or more")
  if not 0 <= cfg.recycle_jitter < 1:
    raise ValueError(f"pool.recycle_jitter is {cfg.recycle_jitter}, wanted 0 or more, below 1")


class Record:
  """One computer's past: faults within the window, faults in a row, episodes since it started."""

  def __init__(self, cfg, rng: random.Random):
    self._cfg, self._rng = cfg, rng
    self._recent: collections.deque[float] = collections.deque()
    self.in_a_row, self.episodes, self.since_canary, self.last = 0, 0, 0, ""
    self.recycle_at = self._draw()

  def _draw(self) -> float:
    jitter = self._cfg.recycle_jitter
    return self._cfg.recycle * (1 + jitter * self._rng.uniform(-1, 1)) if self._cfg.recycle else LARGE

  def booted(self) -> None:
    """A new process: its episodes count from nothing."""
    self.episodes, self.since_canary, self.recycle_at = 0, 0, self._draw()

  def finished(self) -> None:
    self.episodes, self.since_canary, self.in_a_row = self.episodes + 1, self.since_canary + 1, 0

  def fault(self, now: float, what: str) -> bool:
    """Notes a fault; True if there are now too many."""
    self.last, self.in_a_row = what, self.in_a_row + 1
    self._recent.append(now)
    while self._recent and self._recent[0] <= now - self._cfg.quarantine_window:
      self._recent.popleft()
    return len(self._recent) >= self._cfg.quarantine_faults

  def backoff(self) -> float:
    """Seconds until the next start."""
    wait = min(self._cfg.backoff * 2.0 ** min(self.in_a_row - 1, 30), self._cfg.backoff_most)
    return wait * self._rng.uniform(0.5, 1.5)

  def forget(self) -> None:
    """After a quarantine: what came before does not count."""
    self._recent.clear()
    self.in_a_row = 0

  @property
  def worn(self) -> bool:
    return self.episodes >= self.recycle_at

  @property
  def canary_due(self) -> bool:
    return 0 < self._cfg.canary <= self.since_canary


class Parking:
  """Tasks that are not started any more. parked: {task id: reason}.

  A task is parked where its episodes since it last finished ended in infra errors on `computers` distinct computers, and so many in
  a row that chance does not explain it: rate ** faults < BY_LUCK, with the rate at which the other tasks' episodes break, taken as
  (faults + 1) / (episodes + PRIOR). On a sound fleet that is at the third fault; where a fifth of all episodes break, at the eighth.
  """

  def __init__(self, computers: int):
    self._most = computers
    self._broke: dict[str, list] = {}  # computers, fault by fault, since the task last finished
    self._faults = self._ended = 0  # episodes of all tasks
    self.parked: dict[str, str] = {}

  def fault(self, task_id: str, computer, cause: str) -> None:
    """The task ended on this computer in an infra error."""
    broke = self._broke.setdefault(task_id, [])
    broke.append(computer)
    self._faults, self._ended = self._faults + 1, self._ended + 1
    rate = (self._faults - len(broke) + 1) / (self._ended - len(broke) + PRIOR)
    if self._most and len(set(broke)) >= self._most and rate ** len(broke) < BY_LUCK:
      self._faults, self._ended = self._faults - len(broke), self._ended - len(broke)  # the fleet was not to blame for these
      often = f"{len(broke)} times in a row on {len(set(broke))} computers, the last time with {cause}"
      self.park(task_id, f"ended in an infra error {often} (of other episodes {100 * rate:.2g}% do)")

  def finished(self, task_id: str) -> None:
    """It can be done after all: the computers were to blame."""
    self._ended += 1
    self._broke.pop(task_id, None)

  def park(self, task_id: str, reason: str) -> None:
    self._broke.pop(task_id, None)
    self.parked.setdefault(task_id, reason)

  def unpark(self, task_id: str) -> None:
    self.parked.pop(task_id, None)

  def state(self) -> dict:
    """What a resumed run must know: which tasks are parked, and how often episodes break."""
    return {"parked": dict(self.parked), "faults": self._faults, "ended": self._ended}

  def restore(self, state: dict) -> None:
    """Goes on where `state` was taken; what canaries have parked since stays parked."""
    self.parked |= state["parked"]
    self._faults, self._ended = self._faults + state["faults"], self._ended + state["ended"]
