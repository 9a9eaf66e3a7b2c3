"""Computers played by hand, behind a real pool, under a clock that only waiting moves: for the tests of the pool's rules."""

import numpy as np
import pytest
import rogue

from core.schema import SUCCESS
from envs.pool import EnvSpec, Pool, defaults


class Remote:
  """A worker played by hand. mute: operations it never answers; said: what it answers instead; log: everything asked of it."""

  def __init__(self, world, slot):
    self.world, self.slot, self.inbox, self.log, self.killed, self.gone = world, slot, [], [], False, False
    self.mute, self.said = set(world.mute), {}

  def send(self, message):
    if self.gone == "before":
      raise BrokenPipeError
    self.log.append(message)
    if message["op"] not in self.mute:
      self.inbox.append(self.answer(message))

  def answer(self, message):
    head = {"id": message["id"], "token": message["token"]}
    if message["op"] in self.said:
      return head | self.said[message["op"]]
    screen = {"screen": {}, "obs": {"goal": "g", "text": ""}}
    over = message.get("text") in ("pass", "fail")
    rewards = {"rewards": {SUCCESS: float(message.get("text") == "pass" or self.world.solved)}}
    step = screen | {"reward": 0.0, "terminated": over, "truncated": False, "info": rewards if over else {}}
    results = {"boot": {"shape": [2, 2, 3]}, "reset": screen | {"info": {"notes": {}}}, "step": step, "expire": {"info": rewards}}
    return head | {"result": results.get(message["op"], {})}

  def receive(self):
    if self.gone and not self.inbox:
      raise EOFError
    out, self.inbox = self.inbox, []
    return out

  def die(self):
    self.gone = True

  def ops(self):
    return [m["op"] for m in self.log]

  size = lambda self, shape: None
  pixels = lambda self, told, token: np.zeros((2, 2, 3), np.uint8)
  last_lines = lambda self: ["last line"]
  fate = lambda self, wait=0: "exit code 3" if self.gone else "running"
  terminate = lambda self: None

  def kill(self):
    self.killed = True


class World:
  """A backend of such workers, and the clock."""

  def __init__(self):
    self.now, self.remotes, self.mute, self.solved, self.refuse = 1000.0, [], set(), False, False

  def start(self, slot):
    if self.refuse:
      raise OSError("no memory")
    self.remotes.append(Remote(self, slot))
    return self.remotes[-1]

  def poll(self, timeout):
    talking = [r for r in self.remotes if not r.killed and (r.inbox or r.gone)]
    if not talking:
      self.now += timeout
    return talking

  def close(self):
    pass

  def of(self, lease):
    return next(r for r in self.remotes if r is lease.slot.remote)


TASK = rogue.task("a")


@pytest.fixture(name="make")
def make_fixture():
  """make(slots=1, act=..., ...) -> (pool, world). Knobs by name, deadlines too; no jitter, no recycling unless asked for."""

  def build(canaries=(), tick=None, mute=(), **knobs):
    cfg = defaults()
    cfg.update({"slots": 1, "recycle": 0, "quarantine_faults": 100, "recycle_jitter": 0.0, "park": 0})
    for name, value in knobs.items():
      if name in cfg.deadlines:
        cfg.deadlines[name] = value
      else:
        cfg[name] = value
    world = World()
    world.mute = set(mute)
    return Pool(EnvSpec("rogue", rogue.COMPUTER, {}), cfg, backend=world, clock=lambda: world.now, canaries=canaries, tick=tick), world

  return build


def states(pool):
  return [slot.state for slot in pool.slots]


def begun(pool, task=TASK):
  lease = pool.lease()
  lease.reset(options={"task": task})
  return lease


def conserved(pool):
  ledger = pool.ledger()
  return ledger["started"] == ledger["finished"] + ledger["faulted"] + ledger["abandoned"] + ledger["in_flight"]
