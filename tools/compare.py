"""Two policies on the same tasks: points with the noise of the difference, avg@k and pass@k, step limits side by side.

  python -m tools.compare --a=runs/android:copied --b=runs/android --tries=4             copied against practised
  python -m tools.compare --a=runs/android --b=runs/gspo --tries=8 --limits=14,28        two runs, two step limits
  python -m tools.compare --a=runs/android:840 --b=runs/android:850 --protocol=in_domain  two checkpoints

A policy is RUN (its latest checkpoint), RUN:STEP, or RUN:copied. Every episode is kept as it ends, in eval/episodes/ of its run, under its
task, try and seed: the same command goes on where it was cut and repeats nothing; only tries lost to the computers are run again. The
table is written as Markdown and JSON beside b's evaluations. Exit code 0; 1 where too many tries were lost for a headline; 2 for what
cannot be run.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

if __package__ in (None, ""):  # python tools/compare.py
  sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

import evaluate
from core import config as config_lib
from core import stats
from core.host import keep_freed_memory, use_compile_cache
from evaluate import Score, Subject

MOST_ERRORS = 0.05  # share of the tries; with more there is no headline
PROTOCOLS = {p.name: p for p in (*evaluate.PROTOCOLS, evaluate.PRACTISED)}


def difference(a: Score, b: Score, passes_a: dict, passes_b: dict) -> dict[str, Any]:
  """b over a on the same tasks, in points, with the noise of the difference; and the relative gain, named as such."""
  points, noise = stats.paired_difference(passes_a, passes_b)
  relative = stats.points_gained(100 * a.avg_at_k, 100 * b.avg_at_k)[1] if a.avg_at_k > 0 else None
  apart = (a.noise_points**2 + b.noise_points**2) ** 0.5
  return {
    "steps": b.step_limit, "points": points, "noise_points": noise, "noise_unpaired": apart, "tasks": points / stats.task_worth(b.n_tasks),
    "relative_percent": relative, "above_noise": abs(points) > 2 * noise,
  }  # fmt: skip


def markdown(result: Mapping[str, Any]) -> list[str]:
  """The results table."""
  lines = [f"{result['protocol']}, {result['n_tasks']} tasks, seed {result['seed']}. Rule, {evaluate.RULE}.", ""]
  lines += evaluate.table([(s["policy"], Score(**{k: v for k, v in s.items() if k != "policy"})) for s in result["scores"]])
  columns = "step limit,difference in points,+- points (paired),+- if unpaired,in tasks,relative gain %,above twice the noise"
  lines += ["", *evaluate.heading(columns)]
  for d in result["differences"]:
    relative = "-" if d["relative_percent"] is None else f"{d['relative_percent']:+.1f}"
    cells = [d["steps"], f"{d['points']:+.1f}", f"{d['noise_points']:.1f}", f"{d['noise_unpaired']:.1f}", f"{d['tasks']:+.1f}", relative,
             "yes" if d["above_noise"] else "no"]  # fmt: skip
    lines.append("| " + " | ".join(map(str, cells)) + " |")
  return [*lines, *("" for _ in result["warnings"][:1]), *(f"Warning: {w}." for w in result["warnings"])]


def comparable(a: Subject, b: Subject) -> None:
  """ValueError unless both sit the same exam: the environment's knobs say what a task is."""
  ours, theirs = a.cfg.env.to_dict(), b.cfg.env.to_dict()
  odd = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
  if odd:
    raise ValueError(f"{a.name} and {b.name} differ in env.{odd[0]} ({ours.get(odd[0])}, {theirs.get(odd[0])}): not the same exam")


def compare(a: Subject, b: Subject, protocol: evaluate.Protocol, tries: int, seed: int, limits: Sequence[int]) -> dict[str, Any]:
  comparable(a, b)
  tries, scores, differences, warnings = 1 if protocol.greedy else tries, [], [], []
  for limit in limits or [0]:
    (kept_a, score_a), (kept_b, score_b) = (evaluate.examine(s, protocol, tries, seed, limit) for s in (a, b))
    differences.append(difference(score_a, score_b, *(evaluate.by_task(kept.first(tries)) for kept in (kept_a, kept_b))))
    for name, s in ((a.name, score_a), (b.name, score_b)):
      scores.append({"policy": name} | dataclasses.asdict(s))
      if sum(s.errors.values()) > MOST_ERRORS * s.attempted:
        warnings.append(f"{name} lost {sum(s.errors.values())} of {s.attempted} tries to the computers: no headline can be made of this")
      if s.ended_by.get("seconds", 0) > MOST_ERRORS * s.attempted:
        warnings.append(f"{name}: a wall clock ended {s.ended_by['seconds']} tries, so that it is a limit too")
  return {"protocol": protocol.name, "rule": evaluate.RULE, "seed": seed, "tries": tries, "n_tasks": scores[0]["n_tasks"],
          "task_list": evaluate.task_list_hash(b.world.tasks[protocol.tasks]), "scores": scores, "differences": differences,
          "warnings": warnings}  # fmt: skip


def publish(a: Subject, b: Subject, protocols: Sequence[str], tries: int, seed: int, limits: Sequence[int]) -> int:
  """Compares two policies on each of the named protocols and writes the tables beside b's evaluations. -> exit code."""
  lost = False
  for protocol in protocols:
    result = compare(a, b, PROTOCOLS[protocol], tries, seed, limits)
    steps = "-".join(map(str, limits)) or "default"
    name = f"compare-{a.name}-{b.name}-{protocol}-tries{result['tries']}-seed{seed}-steps{steps}".replace(":", "_")
    evaluate.write_table(b.workdir / "eval" / name, result, markdown(result))
    lost |= any("no headline" in w for w in result["warnings"])
  return int(lost)


def main(argv: Sequence[str]) -> int:
  if argv[1:]:
    raise ValueError(f"{argv[1]} is no flag: write --a=RUN --b=RUN")
  limits = evaluate.step_limits(FLAGS.limits)
  keep_freed_memory()
  a, b = evaluate.load(FLAGS.a), evaluate.load(FLAGS.b)
  use_compile_cache(b.cfg.compile_cache)
  return publish(a, b, [FLAGS.protocol], FLAGS.tries, FLAGS.seed, limits)


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_string("a", None, "The policy to compare with: RUN, RUN:STEP or RUN:copied.", required=True)
  flags.DEFINE_string("b", None, "The policy that is compared: the same.", required=True)
  flags.DEFINE_integer("tries", 4, "Tries a task, k.", lower_bound=1)
  flags.DEFINE_integer("seed", 0, "Of the sampling keys.", lower_bound=0)
  flags.DEFINE_enum("protocol", "held_out", list(PROTOCOLS), "Which tasks, and how they are sampled.")
  flags.DEFINE_list("limits", [], "Step limits, side by side; empty = the tasks' own.")
  config_lib.run_command(main)
