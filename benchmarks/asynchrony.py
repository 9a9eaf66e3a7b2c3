"""Sampling beside learning against sampling in turn, on computers that take their time: what each learns, and how long it takes.

  python -m benchmarks.asynchrony [--seeds=0,1,2] [--updates=15] [--step_seconds=0.2] [--slots=192] [--groups=24]

Both step every environment in a thread of its own. "In turn" waits for all of an update's tries (max_age 0); "beside" lets
sampling run an update ahead, takes what is up to 4 old, and corrects for it (the decoupled objective with a truncated weight);
it gets --more times the updates, so that both can be compared by what they reach and by the time they take. A tenth of the
episodes is five times slower. Both start from one copied policy a seed. An update samples one round of groups, a computer for every
try, so that in turn the environments take about as long as sampling and training together: their shares of the time are printed.
"""

from __future__ import annotations

import pathlib

import numpy as np
from absl import app, flags

from benchmarks import runs
from core.metrics import read_jsonl

KINDS = {
  "in turn": ["practice.mode=async", "practice.max_age=0"],
  "beside": ["practice.mode=async", "practice.max_age=4", "practice.ahead=1", "agent.old_logp=recompute", "agent.correction=truncate"],
}


def train(workdir: pathlib.Path, seed: int, overrides: list[str]) -> dict:
  return runs.train("configs/android.py", workdir, seed, [o if o.startswith("--") else f"--config.{o}" for o in overrides])


def main(argv: list[str]) -> None:
  out = pathlib.Path(FLAGS.out).resolve()
  sizes = [f"practice.slots={FLAGS.slots}", f"practice.groups={FLAGS.groups}", "practice.rounds=1"]
  slow = [f"env.step_seconds={FLAGS.step_seconds}", *sizes, "eval.every=0", *argv[1:]]
  names = "seed,which,copying,practice,+-,updates,seconds an update,seconds,environments,sampling,training,waiting,age,dropped by age"
  print("| " + " | ".join(names.split(",")) + " |\n" + "|---" * 14 + "|", flush=True)
  for seed in map(int, FLAGS.seeds):
    copied = out / f"copied-seed{seed}"
    train(copied, seed, ["practice.updates=0", *slow])
    seconds = {}
    for kind, knobs in KINDS.items():
      workdir = out / f"{kind.replace(' ', '-')}-seed{seed}"
      updates = round(FLAGS.updates * (FLAGS.more if kind == "beside" else 1.0))
      s = train(workdir, seed, [f"copy.start={copied}", f"practice.updates={updates}", *slow, *knobs])
      rows = read_jsonl(workdir / "metrics.jsonl")
      mean = lambda key, rows=rows: float(np.mean([r.get(key) or 0.0 for r in rows[1:]]))  # the first update compiles
      seconds[kind] = updates * mean("rate/update_seconds")
      shares = [f"{mean('time/' + k):.2f}" for k in ("environments", "sampling", "training", "waiting")]
      points = [f"{100 * s['copying']:.1f}", f"{100 * s['practice']:.1f}", f"{s['noise_points']:.1f}"]
      ages = [f"{mean('episodes/age_mean'):.2f}", f"{mean('episodes/dropped_age'):.3f}"]
      times = [updates, f"{seconds[kind] / updates:.1f}", f"{seconds[kind]:.0f}"]
      print("| " + " | ".join(map(str, [seed, kind, *points, *times, *shares, *ages])) + " |", flush=True)
    print(f"seed {seed}: beside takes {seconds['beside'] / seconds['in turn']:.2f} of the time in turn", flush=True)


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds.")
  flags.DEFINE_integer("updates", 15, "Updates of practice.")
  flags.DEFINE_float("more", 1.0, "Updates beside, as a multiple of those in turn.")
  flags.DEFINE_float("step_seconds", 0.2, "What a step of an environment takes.")
  flags.DEFINE_integer("slots", 192, "Environments.")
  flags.DEFINE_integer("groups", 24, "Groups of 8 tries an update.")
  flags.DEFINE_string("out", "runs/asynchrony", "Where the runs go.")
  app.run(main)
