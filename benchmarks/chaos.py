"""A whole run on computers that break: what it costs, what it learns from, and whether anything is lost, scored wrongly or left behind.

  python -m benchmarks.chaos [--of=workers --of=episodes] [--episodes=500] [--out=runs/chaos]

Runs of train.py from one copied policy, with worker processes whose steps take a second, as those of a desktop do: one in peace, the
others in chaos, each itself killed (-9) once and resumed. In chaos of=workers a tenth of the workers, at random moments, get a SIGKILL,
5% a SIGSTOP, and 5% raise; of=episodes is far harsher, it breaks the same shares of the episodes. In both 2% of the episodes show a black
screen and 2% half a one.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import pathlib
import random
import signal
import sqlite3
import subprocess
import sys
import time

from absl import app, flags

from core.metrics import read_jsonl

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORKERS, SCREENS = {"die": 0.10, "hang": 0.05, "throw": 0.05}, {"black": 0.02, "cut": 0.02}
GROUPS, TRIES = 4, 8


def command(workdir: pathlib.Path, overrides: list[str]) -> list[str]:
  args = [f"--config.{o}" for o in overrides]
  return [sys.executable, "train.py", "--config=configs/android.py", f"--workdir={workdir}", *args]


def start(workdir: pathlib.Path, overrides: list[str]) -> subprocess.Popen:
  workdir.mkdir(parents=True, exist_ok=True)
  with open(workdir / "log.txt", "ab") as log:
    return subprocess.Popen(command(workdir, overrides), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def finish(run: subprocess.Popen, workdir: pathlib.Path) -> None:
  if run.wait() != 0:
    raise SystemExit(f"{workdir} ended with {run.returncode}: see {workdir / 'log.txt'}")


def workers_of(pid: int) -> list[int]:
  """Workers that are alive and were started by this process."""
  found = []
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      words = (path / "cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile
      continue
    if b"envs.worker" in words and words[-2] == str(pid).encode():
      found.append(int(path.name))
  return found


def done(workdir: pathlib.Path) -> int:
  """Updates so far."""
  path = workdir / "metrics.jsonl"
  return len(read_jsonl(path)) if path.exists() else 0


def signals(slots: int, updates: int, rng: random.Random) -> list[tuple[float, signal.Signals]]:
  """(the update before which, what a worker gets), in order, for a tenth and a twentieth of them. Not in the two updates in which a
  session begins: what it loses then is not measured."""
  whens = [u for u in range(2, updates) if not updates // 2 <= u < updates // 2 + 2]
  kinds = [signal.SIGKILL] * math.ceil(WORKERS["die"] * slots) + [signal.SIGSTOP] * math.ceil(WORKERS["hang"] * slots)
  return sorted((rng.choice(whens) + rng.random(), kind) for kind in kinds)


def play(workdir: pathlib.Path, knobs: list[str], until: int, plan: list, rng: random.Random) -> subprocess.Popen:
  """A run that sends its workers what is planned, as it gets there; ended, or killed (-9) after `until` updates."""
  run = start(workdir, knobs)
  while run.poll() is None:
    time.sleep(0.2)
    reached = done(workdir)
    if until and reached >= until:
      run.kill()
      break
    if plan and reached >= int(plan[0][0]) and (alive := workers_of(run.pid)):
      _, kind = plan.pop(0)
      time.sleep(rng.random() * 4)
      with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
        os.kill(rng.choice(alive), kind)
        print(f"{kind.name} to a worker in update {reached + 1}", flush=True)
  run.wait()
  return run


def gone(pid: int, seconds: float = 10.0) -> bool:
  until = time.monotonic() + seconds
  while workers_of(pid) and time.monotonic() < until:
    time.sleep(0.1)
  return not workers_of(pid)


def episodes(workdir: pathlib.Path) -> list[tuple]:
  with sqlite3.connect(workdir / "episodes" / "index.sqlite") as index:
    return index.execute("SELECT end, end_cause, success, rewards, notes FROM episodes").fetchall()


def faults(rows: list[tuple]) -> collections.Counter:
  """Attempts that broke, by cause: those that were run again, and those that were given up."""
  out = collections.Counter(cause for *_, notes in rows for cause in json.loads(notes).get("faults", ()))
  out.update(cause for end, cause, *_ in rows if end == "infra_error")
  return out


def rate(workdir: pathlib.Path, starts: set[int]) -> float:
  """Scored episodes a minute; the updates that a session of the run began with, which boot every worker and compile, are left out."""
  rows = [r for i, r in enumerate(read_jsonl(workdir / "metrics.jsonl")) if i not in starts]
  return sum(r["rate/episodes_per_minute"] * r["rate/update_seconds"] for r in rows) / sum(r["rate/update_seconds"] for r in rows)


def main(argv: list[str]) -> None:
  del argv
  out = pathlib.Path(FLAGS.out).resolve()
  updates = -(-FLAGS.episodes // (GROUPS * TRIES))
  common = [
    "practice.workers=True", f"practice.slots={FLAGS.slots}", f"practice.updates={updates}", f"practice.groups={GROUPS}",
    "practice.rounds=1", "practice.max_age=4", f"env.step_seconds={FLAGS.step_seconds}", "env.slow_factor=2.0",
    "eval.every=0", "eval.tries=1",
    "save.every=1", "pool.backoff=0.1",
    "pool.quarantine_faults=1000", "pool.spares=16", "pool.boots=16", f"pool.deadlines.act={FLAGS.deadline}", "pool.deadlines.settle=0.1",
    "pool.deadlines.observe=2.0", "pool.deadlines.evaluate=2.0", "pool.park=0",
  ]  # fmt: skip
  copied = out / "copied"
  finish(start(copied, ["practice.updates=0", *common[3:], "copy.updates=300"]), copied)
  rates = {}
  a_worker = {"throw": WORKERS["throw"] * FLAGS.slots / FLAGS.episodes}  # of the episodes / slots that it plays, one
  chaos = {"workers": a_worker | SCREENS, "episodes": WORKERS | SCREENS}
  for name in ("peace", *FLAGS.of):
    broken, rng = chaos.get(name, {}), random.Random(0)
    plan = signals(FLAGS.slots, updates, rng) if name == "workers" else []
    workdir = out / name
    knobs = [f"copy.start={copied}", *common, *(f"env.faults.{kind}={chance}" for kind, chance in broken.items())]
    starts = {0}
    if broken:  # killed half way, as no handler can see
      run = play(workdir, knobs, updates // 2, plan, rng)
      print(f"killed -9 half way; its workers are gone: {gone(run.pid)}", flush=True)
      starts.add(done(workdir))
    run = play(workdir, knobs, 0, plan, rng)
    finish(run, workdir)
    rows, rates[name] = episodes(workdir), rate(workdir, starts)
    broke = faults(rows)
    given_up = [row for row in rows if row[0] == "infra_error"]
    wrong = sum(success is not None or rewards != "{}" for _, _, success, rewards, _ in given_up)
    left = 0 if gone(run.pid) else len(workers_of(run.pid))
    print(f"{name}: {len(rows)} episodes, {sum(broke.values())} attempts broke {dict(broke.most_common())}, {len(given_up)} given up, "
          f"{wrong} of them scored; {rates[name]:.0f} episodes a minute; workers left: {left}", flush=True)  # fmt: skip
  for name in FLAGS.of:
    print(f"throughput lost to chaos of {name}: {100 * (1 - rates[name] / rates['peace']):.0f}%")
  print("every update's books added up, or the runs would have ended")


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_multi_enum("of", ["workers", "episodes"], ["workers", "episodes"], "What the shares are of.")
  flags.DEFINE_integer("episodes", 500, "Episodes of each run.", lower_bound=64)
  flags.DEFINE_integer("slots", 24, "Worker processes.", lower_bound=2)
  flags.DEFINE_float("step_seconds", 1.0, "What a step takes; slow episodes take twice that.", lower_bound=0.05)
  flags.DEFINE_float("deadline", 4.0, "Seconds for an action.", lower_bound=0.5)
  flags.DEFINE_string("out", "runs/chaos", "Where the runs go.")
  app.run(main)
