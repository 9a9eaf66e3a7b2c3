"""Learning, measured: whole runs over seeds, as a Markdown table. Every run is kept in its own workdir and resumed if cut.

python -m benchmarks.learn                                   both configs, seeds 0, 1, 2
python -m benchmarks.learn --configs=android --seeds=0,1 --out=runs/bench
"""

from __future__ import annotations

import pathlib
import resource
import time

from absl import app, flags

from benchmarks import runs


def one(config: str, seed: int, out: pathlib.Path, overrides: list[str]) -> dict:
  """One whole run in a process of its own; its summary, with wall seconds and peak memory of this session's part."""
  name, _, modes = config.partition(":")
  workdir = out / f"{config.replace(':', '-').replace('=', '_').replace(',', '-')}-seed{seed}"
  spec = f"configs/{name}.py" + (f":{modes}" if modes else "")
  started = time.monotonic()
  summary = runs.train(spec, workdir, seed, overrides)
  peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
  return summary | {"wall": time.monotonic() - started, "peak_gib": peak}


def row(config: str, s: dict) -> str:
  pct = lambda x: f"{100 * x:.1f}"
  gain = 100 * (s["practice"] - s["copying"])
  cells = [config, s["seed"], pct(s["clean"]), pct(s["copying"]), pct(s["practice"]), f"{gain:+.1f}", f"{s['noise_points']:.1f}"]
  cells += [pct(s["copying_greedy"]), pct(s["practice_greedy"]), pct(s["in_domain"]), s["n"], f"{s['seconds']:.0f}"]
  cells += [f"{s['peak_gib']:.1f}"]
  return "| " + " | ".join(map(str, cells)) + " |"


def main(argv: list[str]) -> None:
  names = "config,seed,copied clean,copying,practice,gain in points,+-,copying greedy,practice greedy,in-domain,n,seconds,GiB"
  head = "| " + " | ".join(names.split(",")) + " |"
  print(head + "\n" + "|---" * 13 + "|", flush=True)
  for config in FLAGS.configs:
    for seed in map(int, FLAGS.seeds):
      print(row(config, one(config, seed, pathlib.Path(FLAGS.out).resolve(), argv[1:])), flush=True)


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_list("configs", ["android", "osworld"], "Names of configs, with modes after a colon.")
  flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds.")
  flags.DEFINE_string("out", "runs/bench", "Where the runs go.")
  app.run(main)
