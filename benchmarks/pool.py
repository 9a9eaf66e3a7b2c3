"""A fleet of slow computers before anyone pays for it: the real pool, scheduler, queue and ages over simulated computers, 8 to 4,096.

  python -m benchmarks.pool [--hours=4] [--computers=8,64,256,1024,4096] [--seconds=60]

Long tail: 90% of the episodes take a minute, 10% ten. "in turn": the learner waits for all tries of an update, then trains while the
computers stand still. "beside": the next tries go on meanwhile, under weights up to max_age versions old. Utilisation is the share of
the computers' time in which an episode is on them. Simulated seconds jump, so nothing here depends on this machine but memory, the
host's own time an episode, and the last table, which is the same with real worker processes, sixty times faster.
"""

from __future__ import annotations

import functools
import resource
import time

import numpy as np
from absl import app, flags

from agents.base import select_scored
from benchmarks.fleet import Clock, SimFleet, Writer
from core.schema import Limits, Task
from envs import sim
from envs.pool import EnvSpec, Pool, defaults, spec_of
from rollout.queue import GroupQueue, Ledger
from rollout.replay import Replay
from rollout.stream import Stream

STEPS, TRIES, TRAIN = 10, 8, 30.0  # of an episode; of a group; seconds of an update
RNG = np.random.default_rng(0)  # of replay, which is off here
SHORT, LONG, SHARE = 60.0, 600.0, 0.1
# The desktop study of the lesson's chapter 4: computers, minutes a batch (every computer's next episode), hours a pass of 1,024.
LESSON = ((8, 3.0, 6.0), (256, 19.0, 1.2))
PACE, FIXED, EACH = 8.0, 2.0, 0.258  # seconds: a step of its computers, an answer of its server, each screenshot in it; fitted to it


def simulated(computers: int, fixed: float, each: float, pace, steps: int = STEPS):
  """(pool, sampler, clock) over computers that answer after pace() seconds."""
  clock, rng = Clock(), np.random.default_rng(0)
  cfg = defaults()
  cfg.update({"slots": computers, "boots": computers, "recycle": 0, "ping": 1e6})
  cfg.deadlines.update({"act": 1e4, "episode": 1e5, "agent": 0.0})
  backend = SimFleet(clock, steps, functools.partial(pace, rng), lambda: rng.random() < 0.5)
  return Pool(EnvSpec("fleet", "fleet", {}), cfg, backend=backend, clock=clock), Writer(clock, fixed, each), clock


def long_tail(rng: np.random.Generator) -> float:
  """Seconds that every step of one episode takes."""
  return (LONG if rng.random() < SHARE else SHORT) / (STEPS + 1)


def learn(stream: Stream, sampler: Writer, updates: int, groups: int, max_age: int, train) -> tuple[int, list[int]]:
  """`updates` updates of `groups` groups; train() is what an update takes. (episodes trained on, their ages)."""
  tasks = (Task(f"t{i}", "g", "fleet", "f", i, {}, Limits(99)) for i in range(10**9))
  trained, ages = 0, []
  for version in range(updates):
    sampler.version = version
    got = stream.gather(
      Replay(0), select_scored, lambda: next(tasks), RNG, update=version, version=version, groups=groups, rounds=8,
      group_size=TRIES, max_age=max_age, clock=lambda name, seconds: None,
    )  # fmt: skip
    episodes = [e for g in got.kept for e in g.episodes]
    trained, ages = trained + len(episodes), ages + [version - e.oldest_version for e in episodes]
    train()
  return trained, ages


def run(computers: int, groups: int, max_age: int, hours: float) -> dict:
  """A fleet for about so many simulated hours."""
  mean = SHARE * LONG + (1 - SHARE) * SHORT
  updates = max(4, int(3600 * hours * computers / mean / (groups * TRIES)))
  pool, sampler, clock = simulated(computers, 0.2, 0.002, long_tail)
  began = time.process_time()
  with pool:
    stream = Stream(sampler, pool, GroupQueue(Ledger()), lambda *n: np.array([*n, 0][:2], np.uint32), threaded=False, now=clock)
    warm, _ = learn(stream, sampler, 2, groups, max_age, lambda: stream.drive(TRAIN))
    started, _ = clock.now, stream.curves()
    sampler.batches.clear()
    trained, ages = learn(stream, sampler, updates, groups, max_age, lambda: stream.drive(TRAIN))
    busy, seconds, ledger = stream.curves(), clock.now - started, stream.groups.ledger
    stream.close()
  return {
    "rate": 3600 * trained / seconds, "utilisation": busy["rate/environment_utilisation"], "age": float(np.mean(ages)), "oldest": max(ages),
    "dropped": ledger.dropped["age"] / ledger.started, "batch": float(np.mean(sampler.batches)),
    "host": (time.process_time() - began) / (trained + warm) / mean,
  }  # fmt: skip


def table(head: str, rows: list[list]) -> None:
  names = head.split(",")
  print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
  for cells in rows:
    print("| " + " | ".join(map(str, cells)) + " |")
  print(flush=True)


def tails(hours: float) -> None:
  """In turn against beside, on 256 computers."""
  rows, rates = [], {}
  for groups, max_age in ((32, 0), (32, 4), (32, 8), (64, 0), (64, 4)):
    r = run(256, groups, max_age, hours)
    rates[groups, max_age] = r["rate"]
    which = f"beside, max_age {max_age}" if max_age else "in turn"
    more = f"{r['rate'] / rates[groups, 0]:.2f}"
    rows.append(
      [groups * TRIES, which, f"{r['rate']:.0f}", more, f"{r['utilisation']:.3f}", f"{r['age']:.2f}", r["oldest"], f"{r['dropped']:.3f}"]
    )
  print(f"256 computers, {hours:g} simulated hours")
  table("episodes an update,which,episodes an hour,of in turn,utilisation,mean age,oldest,dropped for age", rows)


def sizes(computers: list[int], hours: float) -> None:
  """Fleets of every size beside learning, an update for every two episodes of a computer."""
  rows = []
  for n in computers:
    r = run(n, max(1, 2 * n // TRIES), 4, min(hours, 1024 / n * hours))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows.append(
      [n, f"{r['rate']:.0f}", f"{r['utilisation']:.3f}", f"{r['age']:.2f}", f"{r['batch']:.1f}", f"{100 * r['host']:.4f}%", f"{memory:.0f}"]
    )
  table("computers,episodes an hour,utilisation,mean age,prompts a batch,host time of an episode's,MiB so far", rows)


def shape() -> None:
  """The lesson's 8 and 256 computers: 1,024 episodes of 15 steps, each computer's next episode starting with the others' (a batch),
  and the same without that barrier."""
  rows = []
  for n, minutes, hours in LESSON:
    taken = []
    for barrier in (True, False):
      pool, sampler, clock = simulated(n, FIXED, EACH, lambda rng: PACE * rng.uniform(0.5, 1.5), 15)
      with pool:
        stream = Stream(sampler, pool, GroupQueue(Ledger()), lambda *k: np.array([*k, 0][:2], np.uint32), threaded=False, now=clock)
        each = n // TRIES if barrier else 1024 // TRIES
        learn(stream, sampler, 1024 // TRIES // each, each, 0, lambda: None)
        taken.append(clock.now)
        stream.close()
    rows.append([n, f"{taken[0] / (1024 / n) / 60:.1f}", minutes, f"{taken[0] / 3600:.2f}", hours, f"{taken[1] / 3600:.2f}"])
  head = "computers,batch (minutes),lesson,pass of 1024 (hours),lesson,without a barrier (hours)"
  table(head, rows)
  speed = float(rows[0][3]) / float(rows[1][3])
  print(f"with 256 computers a pass is {speed:.1f} times faster (lesson: {LESSON[0][2] / LESSON[1][2]:.1f}), a batch "
        f"{float(rows[1][1]) / float(rows[0][1]):.1f} times slower (lesson: {LESSON[1][1] / LESSON[0][1]:.1f})\n", flush=True)  # fmt: skip


def workers(count: int, seconds: float) -> None:
  """The same with real worker processes: a step of 0.1 s, in a tenth of the episodes 1 s; half a second of learning."""
  rows, rates = [], []
  cfg, knobs = sim.defaults(), defaults()
  cfg.update({"computer": "sim/phone", "step_seconds": 0.1, "slow_factor": LONG / SHORT, "slow_share": SHARE})
  knobs.update({"slots": count, "boots": count, "recycle": 0})
  tasks = sim.task_lists("sim/phone", cfg)["practice"]
  short = [Task(t.id, t.goal, t.env, t.family, t.seed, t.params, Limits(STEPS), t.check) for t in tasks]
  for max_age in (0, 8):
    with Pool(spec_of(cfg), knobs) as pool:
      stream = Stream(Writer(), pool, GroupQueue(Ledger()), lambda *n: np.array([*n, 0][:2], np.uint32))
      with stream:
        order = iter(short * 1000)
        how = {"groups": max(1, count // TRIES), "rounds": 8, "group_size": TRIES, "max_age": max_age, "clock": lambda name, seconds: None}
        began, trained, version = None, 0, 0
        while began is None or time.monotonic() < began + seconds:
          stream.sampler.version = version
          got = stream.gather(
            Replay(0), select_scored, functools.partial(next, order), np.random.default_rng(0), update=0, version=version, **how
          )
          if began is None:  # the workers have booted
            began, _ = time.monotonic(), stream.curves()
          else:
            trained += sum(len(g.episodes) for g in got.kept)
          time.sleep(0.5)
          version += 1
        took, busy = time.monotonic() - began, stream.curves()["rate/environment_utilisation"]
    rates.append(60 * trained / took)
    rows.append(
      [count, f"beside, max_age {max_age}" if max_age else "in turn", f"{rates[-1]:.0f}", f"{rates[-1] / rates[0]:.2f}", f"{busy:.3f}"]
    )
  print("real worker processes of the simulated phone")
  table("computers,which,episodes a minute,of in turn,utilisation", rows)


def main(argv: list[str]) -> None:
  del argv
  tails(FLAGS.hours)
  sizes(list(map(int, FLAGS.computers)), FLAGS.hours)
  shape()
  workers(FLAGS.workers, FLAGS.seconds)


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_float("hours", 4.0, "Simulated hours of a fleet of 256 (of larger ones fewer).", lower_bound=0.1)
  flags.DEFINE_list("computers", ["8", "64", "256", "1024", "4096"], "Sizes of fleets.")
  flags.DEFINE_integer("workers", 16, "Real worker processes.", lower_bound=8)
  flags.DEFINE_float("seconds", 60.0, "Of each measurement with real ones.", lower_bound=5)
  app.run(main)
