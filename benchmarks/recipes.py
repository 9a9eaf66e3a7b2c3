"""Recipes side by side: every algorithm practises from the same copied policy, on the same tasks, episodes and seeds.

  python -m benchmarks.recipes                                       every algorithm, seeds 0, 1, 2, on the embedded phone
  python -m benchmarks.recipes --recipes=grpo,ppo,grpo:replay=0 --seeds=0 --out=runs/recipes

A recipe is an algorithm with knobs of its own after a colon, `NAME:knob=value+knob=value`; a knob without a dot is the agent's.
Copying is done once a seed; every run is kept in its own workdir and resumed if cut. `--claims` are the lesson's claims of
chapters 3 and 5, tried here; `--rare` is a phone on which passes are rare, where replay has something to do
(`--rare --recipes=grpo:replay=4,grpo:replay=0`).
"""

from __future__ import annotations

import pathlib
import resource

import numpy as np
from absl import app, flags

from benchmarks import runs
from core.find import available

# Each claim beside its opposite: a wider top of the band, every token alike, sampling as it is scored, and a spread.
CLAIMS = ("grpo", "grpo:clip_high=0.2", "grpo:average=episode", "grpo:practice.temperature=0.7", "grpo:spread=none")
# Up to three pop-ups an episode, small groups, few tasks: groups fail whole, and a task comes back while its success is stored.
RARE = ("env.popup_chance=0.6", "env.popup_most=3", "env.practice_tasks=48", "env.in_domain_tasks=16", "agent.group_size=4")


def arguments(recipe: str) -> tuple[str, list[str]]:
  """(algorithm, overrides) of a recipe."""
  name, _, knobs = recipe.partition(":")
  full = lambda knob: knob if "." in knob.partition("=")[0] else f"agent.{knob}"
  return name, [f"--config.{full(k)}" for k in knobs.split("+") if k]


def train(name: str, workdir: pathlib.Path, seed: int, overrides: list[str]) -> dict:
  """One run to its end; its summary with the CPU seconds it took in this session."""
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  summary = runs.train(f"configs/android.py:agent={name}", workdir, seed, overrides)
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  return summary | {"cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def row(recipe: str, done: list[dict]) -> str:
  """One line of the table: every seed's gain, and their mean with its standard error over seeds."""
  gains = [100 * (r["practice"] - r["copying"]) for r in done]
  error = f"{np.std(gains, ddof=1) / len(gains) ** 0.5:.1f}" if len(gains) > 1 else "-"
  mean = lambda key: f"{100 * np.mean([r[key] for r in done]):.1f}"
  cells = [recipe, mean("copying"), mean("practice"), f"{np.mean(gains):+.1f}", error, " ".join(f"{g:+.1f}" for g in gains)]
  cells += [f"{np.mean([r['noise_points'] for r in done]):.1f}", mean("practice_clean"), mean("practice_greedy")]
  return "| " + " | ".join([*cells, f"{np.mean([r['cpu'] for r in done]):.0f}"]) + " |"


def main(argv: list[str]) -> None:
  out = pathlib.Path(FLAGS.out).resolve()
  given = [*(f"--config.{knob}" for knob in (RARE if FLAGS.rare else ())), *argv[1:]]
  recipes = list(CLAIMS if FLAGS.claims else FLAGS.recipes or available("agents", having="make"))
  head = "recipe,copying,practice,gain,+- over seeds,gains by seed,counting noise,clean,greedy,CPU seconds"
  print("| " + " | ".join(head.split(",")) + " |\n" + "|---" * 10 + "|", flush=True)
  copied = {}
  for seed in map(int, FLAGS.seeds):
    copied[seed] = out / f"copied-seed{seed}"
    train("grpo", copied[seed], seed, ["--config.practice.updates=0", *given])
  for recipe in recipes:
    name, knobs = arguments(recipe)
    common = [f"--config.practice.updates={FLAGS.updates}", "--config.eval.every=0", *knobs, *given]
    folder = lambda seed, r=recipe: out / f"{r.replace(':', '-').replace('=', '_')}-seed{seed}"
    done = [train(name, folder(s), s, [f"--config.copy.start={copied[s]}", *common]) for s in copied]
    print(row(recipe, done), flush=True)


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_list("recipes", [], "Algorithms, with knobs after a colon; empty = every algorithm there is.")
  flags.DEFINE_bool("claims", False, "The lesson's claims instead, each beside its opposite.")
  flags.DEFINE_bool("rare", False, "A phone on which passes are rare.")
  flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds.")
  flags.DEFINE_integer("updates", 25, "Updates of practice.")
  flags.DEFINE_string("out", "runs/recipes", "Where the runs go.")
  app.run(main)
