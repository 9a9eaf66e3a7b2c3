"""How fast the pool lends, asks and takes back: its bookkeeping alone, and with worker processes of the simulated phone.

  python -m benchmarks.pool_rate [--seconds=3] [--computers=64,512,4096] [--workers=1,2,4] [--steps=4]

An operation is a lease, a reset, a step or a return. The stand-in for a worker answers at once from memory, so its rate is what
one thread of the trainer can do; the goal is 5,000 operations a second.
"""

from __future__ import annotations

import os
import resource
import time

import numpy as np
from absl import app, flags

from core.schema import SUCCESS, Limits, Task
from envs import sim
from envs.pool import EnvSpec, Pool, defaults, spec_of

GOAL = 5000.0
SHAPE = (160, 96, 3)


class StandIn:
  """A worker that answers at once."""

  screen = np.zeros(SHAPE, np.uint8)

  def __init__(self, talking: list, steps: int):
    self.talking, self.inbox, self.steps = talking, [], steps

  def send(self, message: dict) -> None:
    op, over = message["op"], message.get("act") == self.steps
    result = {"screen": {}, "obs": {"goal": "", "text": ""}, "info": {"notes": {}}}
    if op == "step":
      rewards = {"rewards": {SUCCESS: 1.0}, "partial": None} if over else {}
      result |= {"reward": float(over), "terminated": over, "truncated": False} | {
        "info": {"action": None, "cause": "", "notes": {}} | rewards
      }
    self.inbox.append({"id": message["id"], "token": message["token"], "result": {"shape": SHAPE} if op == "boot" else result})
    self.talking.append(self)

  def receive(self) -> list[dict]:
    out, self.inbox = self.inbox, []
    return out

  def pixels(self, told: dict, token: int) -> np.ndarray:
    return self.screen.copy()

  def size(self, shape: tuple) -> None:
    pass

  def kill(self) -> None:
    pass


class Memory:
  """A backend of stand-ins."""

  def __init__(self, steps: int):
    self.talking, self.steps = [], steps

  def start(self, slot: int) -> StandIn:
    return StandIn(self.talking, self.steps)

  def poll(self, timeout: float) -> list[StandIn]:
    out = list(self.talking)
    self.talking.clear()
    if not out:
      time.sleep(min(timeout, 0.001))
    return out

  def close(self) -> None:
    pass


def drive(pool: Pool, task: Task, text: str, seconds: float) -> tuple[float, float, float]:
  """One thread keeps every computer busy for so long; (operations, steps, seconds)."""
  held = [pool.lease() for _ in range(pool.cfg.slots)]
  for lease in held:
    lease.submit_reset(task)
  operations, steps, began = 2 * len(held), 0, time.perf_counter()
  while (now := time.perf_counter()) < began + seconds:
    for lease, result in pool.wait(1.0):
      if result.error is not None:
        raise result.error
      if result.op == "step" and (result.value[2] or result.value[3]):
        lease.release()
        lease = pool.try_lease() or pool.lease()
        lease.submit_reset(task)
        operations += 3  # return, lease, reset
      else:
        lease.submit_step(text)
        operations += 1
        steps += 1
  return operations, steps, now - began


def memory() -> float:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(argv: list[str]) -> None:
  del argv
  task = Task("t", "g", "memory", "f", 0, {}, Limits(FLAGS.steps))
  print(f"{os.cpu_count()} cores, episodes of {FLAGS.steps} steps", flush=True)
  for count in map(int, FLAGS.computers):
    cfg = defaults()
    cfg.update({"slots": count, "boots": count, "recycle": 0})
    with Pool(EnvSpec("memory", "memory", {}), cfg, backend=Memory(FLAGS.steps)) as pool:
      operations, _, took = drive(pool, task, "wait()", FLAGS.seconds)
      rate = operations / took
      said = f"{rate / GOAL:.1f} times the goal of {GOAL:.0f}; {memory():.0f} MiB at most so far, {pool.ledger()['finished']} episodes"
    print(f"bookkeeping alone, {count:5} computers: {rate:8.0f} operations a second ({said})", flush=True)
  knobs = sim.defaults()
  knobs.computer, knobs.practice_tasks = "sim/phone", 32
  task = sim.task_lists(knobs.computer, knobs)["practice"][0]
  for count in map(int, FLAGS.workers):
    cfg = defaults()
    cfg.update({"slots": count, "recycle": 0})
    with Pool(spec_of(knobs), cfg) as pool:
      operations, steps, took = drive(pool, task, "wait()", FLAGS.seconds)
      print(f"worker processes, {count} phones: {operations / took:.0f} operations, {steps / took:.0f} steps a second", flush=True)
      env, began = pool.env(), time.perf_counter()
      for lease in [s.lease for s in pool.slots if s.lease is not None]:
        lease.release()
      done = 0
      while time.perf_counter() < began + FLAGS.seconds / 2:
        env.reset(options={"task": task})
        while not env.step("wait()")[3]:
          done += 1
      print(f"  one at a time, waiting: {1e3 * (time.perf_counter() - began) / max(done, 1):.2f} ms a step", flush=True)
  inside, began, done = sim.make(knobs.computer, knobs), time.perf_counter(), 0
  while time.perf_counter() < began + FLAGS.seconds / 2:
    inside.reset(options={"task": task})
    while not inside.step("wait()")[3]:
      done += 1
  print(f"in process: {1e3 * (time.perf_counter() - began) / max(done, 1):.2f} ms a step", flush=True)


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_float("seconds", 3.0, "Of each measurement.", lower_bound=0.1)
  flags.DEFINE_list("computers", ["64", "512", "4096"], "Numbers of stand-ins.")
  flags.DEFINE_list("workers", ["1", "2", "4"], "Numbers of worker processes.")
  flags.DEFINE_integer("steps", 4, "Steps of a stand-in's episode.", lower_bound=1)
  app.run(main)
