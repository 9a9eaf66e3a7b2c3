"""How fast the pool lends, asks and takes back: its bookkeeping alone, and with worker processes of the simulated phone.

  python -m benchmarks.pool_rate [--seconds=3] [--computers=64,512,4096] [--workers=1,2,4] [--steps=4]

An operation is a lease, a reset, a step or a return. The stand-in for a worker answers at once from memory, so its rate is what
one thread of the trainer can do; the goal is 5,000 operations a second.
"""

from __future__ import annotations

import os
import resource
import time

from absl import app, flags

from benchmarks.fleet import Clock, SimFleet
from core.schema import Limits, Task
from envs import sim
from envs.pool import EnvSpec, Pool, defaults, spec_of

GOAL = 5000.0


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
    with Pool(EnvSpec("memory", "memory", {}), cfg, backend=SimFleet(Clock(), FLAGS.steps, lambda: 0.0, lambda: True)) as pool:
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
