"""Speeds of the embedded default, read off a short run of train.py on this machine, started twice.

  python -m benchmarks.embedded [--name=android|osworld]

The first start has an empty cache of compiled programs, the second takes them from it; rates are of the updates after the
first, as ratios to each other where another machine's numbers would not compare.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

import evaluate
from core.config import load_config
from core.metrics import read_jsonl

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHORT = ("copy.updates=100", "copy.demonstrations=200", "practice.updates=6", "eval.tries=1", "eval.every=0")


def start(name: str, folder: pathlib.Path, number: int) -> tuple[float, list[dict]]:
  """(seconds until the first update of copying was printed, rows of metrics.jsonl) of one short run."""
  workdir = folder / f"run{number}"
  knobs = [f"--config.{k}" for k in (*SHORT, f"compile_cache={folder / 'cache'}", "agent.dynamic_sampling=False")]
  command = [sys.executable, "train.py", f"--config=configs/{name}.py", f"--workdir={workdir}", *knobs]
  began, first = time.perf_counter(), None
  process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
  for line in process.stdout:
    if first is None and line.startswith("copying "):
      first = time.perf_counter() - began
  if process.wait() or first is None:
    raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
  return first, read_jsonl(workdir / "metrics.jsonl")


def simulator_rate(name: str) -> float:
  """Steps a second of the simulator under its scripted expert, in this process."""
  cfg, _ = load_config(["benchmark", f"--config=configs/{name}.py"])
  world = evaluate.build(cfg)
  world.demonstrations(20, 0)
  began = time.perf_counter()
  steps = sum(len(e.steps) for e in world.demonstrations(300, 1))
  return steps / (time.perf_counter() - began)


def main(argv: list[str]) -> None:
  del argv
  rate = simulator_rate(FLAGS.name)
  with tempfile.TemporaryDirectory() as folder:
    (cold, _), (warm, rows) = (start(FLAGS.name, pathlib.Path(folder), i) for i in (1, 2))
  mean = lambda key: float(np.mean([r[key] for r in rows[1:]]))
  steps = mean("rate/episodes_per_minute") / 60 * mean("episodes/steps")
  print(f"simulator with its scripted expert     {rate:8.0f} steps a second")
  print(f"practice as a whole                    {steps:8.0f} steps a second, {mean('rate/episodes_per_minute'):.0f} episodes a minute")
  print("wall time  " + "  ".join(f"{k} {mean('time/' + k):.2f}" for k in ("environments", "sampling", "training", "publish")))
  print(f"useful tokens in a batch               {mean('rate/useful_tokens'):8.2f}")
  print(f"compilations after the first update    {sum(r['rate/compiles'] for r in rows[1:]):8.0f}")
  print(f"start to the 50th copying update       {cold:8.1f} s with an empty cache, {warm:.1f} s from it ({cold / warm:.1f} times)")


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_enum("name", "android", ["android", "osworld"], "Which config.")
  app.run(main)
