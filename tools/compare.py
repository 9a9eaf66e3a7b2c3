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

import collections
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
from absl import flags

if __package__ in (None, ""):  # python tools/compare.py
  sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

import evaluate
from core import config as config_lib
from core import stats
from core.checkpoint import Checkpointer
from core.host import hold, keep_freed_memory, use_compile_cache
from core.metrics import read_jsonl
from core.schema import Limits
from core.screens import write_atomic
from core.state import Weights
from envs.inside import Inside
from rollout.scheduler import collect

RULE = "strict: the checker judges the state that the agent left; no last action is rewritten; a try lost to the computers is no pass"
MOST_ERRORS = 0.05  # share of the tries; with more there is no headline
PROTOCOLS = {p.name: p for p in (evaluate.HELD_OUT, evaluate.HELD_OUT_GREEDY, evaluate.IN_DOMAIN, evaluate.PRACTISED)}


class Subject(NamedTuple):
  """A policy of a run. step: its checkpoint, or "copied"."""

  workdir: pathlib.Path
  step: str
  cfg: ml_collections.ConfigDict
  world: evaluate.World
  weights: Weights

  @property
  def name(self) -> str:
    return f"{self.workdir.name}:{self.step}"


def load(spec: str) -> Subject:
  """RUN, RUN:STEP or RUN:copied."""
  path, _, which = spec.rpartition(":") if ":" in spec else (spec, "", "")
  if which not in ("", "copied") and not which.isdecimal():
    raise ValueError(f"policy {spec!r}: wanted RUN, RUN:STEP or RUN:copied, got {which!r} after the colon")
  workdir = pathlib.Path(os.path.abspath(path))
  cfg = ml_collections.ConfigDict(config_lib.read_config(workdir))
  folder = workdir / ("copied" if which == "copied" else "checkpoints")
  if not folder.is_dir():
    raise ValueError(f"policy {spec!r}: there is no {folder}: has the run finished copying?")
  world = evaluate.build(cfg)
  with Checkpointer(folder) as checkpoints:
    target = {"states": {"policy": {"params": jax.eval_shape(world.policy.init, jax.random.key(0))}}}
    tree, host, step = checkpoints.restore(target, int(which) if which.isdecimal() else None, partial=True)
  weights = Weights(tree["states"]["policy"]["params"], host["facts"]["version"])
  return Subject(workdir, "copied" if which == "copied" else str(step), cfg, world, weights)


class Results:
  """Episodes of one measurement, kept one JSON line each as they end. about: what is measured; another is refused."""

  def __init__(self, path: pathlib.Path, about: Mapping[str, Any]):
    self.path = path
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
      whole = path.read_bytes().rpartition(b"\n")
      os.truncate(path, len(whole[0]) + len(whole[1]))  # a line that a kill cut
    found = read_jsonl(path) if path.exists() else []
    if not found:
      write_atomic(path, (json.dumps({"about": dict(about)}) + "\n").encode())
      found = [{"about": dict(about)}]
    if found[0].get("about") != dict(about):
      raise ValueError(f"{path} holds a measurement of {found[0].get('about')}, wanted one of {dict(about)}: move it away")
    self.rows: dict[tuple[str, int], dict[str, Any]] = {}
    self.lost = 0  # tries that were run again because the computers broke
    self.fresh = 0  # episodes of this session
    for row in found[1:]:
      self._keep(row)

  def _keep(self, row: dict[str, Any]) -> None:
    key = row["task"], row["try"]
    self.lost += key in self.rows
    if key in self.rows and self.rows[key]["scored"]:
      raise ValueError(f"{self.path} holds try {key[1]} of {key[0]} twice: move it away")
    self.rows[key] = row

  def add(self, episode) -> None:
    row = {"task": episode.task_id, "try": episode.try_index, "success": episode.success, "scored": episode.scored,
           "end_cause": episode.end_cause, "steps": len(episode.steps)}  # fmt: skip
    with open(self.path, "ab") as out:
      out.write((json.dumps(row) + "\n").encode())
    self.fresh += 1
    self._keep(row)

  def missing(self, task: str, index: int) -> bool:
    """Whether the try is still to be run: it never was, or the computers broke."""
    return not self.rows.get((task, index), {"scored": False})["scored"]


def measure(subject: Subject, protocol: evaluate.Protocol, tries: int, seed: int, limit: int = 0) -> Results:
  """`tries` episodes of every task of the protocol; those that stand are not run again. limit: steps; 0 = the tasks' own."""
  tasks = subject.world.tasks[protocol.tasks]
  if limit:
    tasks = [dataclasses.replace(t, limits=Limits(limit, t.limits.seconds)) for t in tasks]
  world = subject.world._replace(tasks=subject.world.tasks | {protocol.tasks: tasks})
  folder = subject.workdir / "eval" / "episodes"
  with hold(folder):
    about = {"checkpoint": subject.step, "protocol": protocol.name, "seed": seed, "steps": tasks[0].limits.steps,
             "task_list": evaluate.task_list_hash(tasks)}  # fmt: skip
    results = Results(folder / f"{subject.step}-{protocol.name}-seed{seed}-steps{about['steps']}.jsonl", about)

    def through(sampler, plan) -> list:
      left = [t for t in plan if results.missing(t.task.id, t.index)]
      if left:
        print(f"  {subject.name}, {about['steps']} steps: {len(plan) - len(left)} of {len(plan)} tries stand", flush=True)
        slots = min(subject.cfg.practice.slots, len(left))
        for episode in collect(sampler, Inside([world.make_env() for _ in range(slots)]), left):
          results.add(episode)
      return []

    evaluate.run(world, subject.weights, protocol, tries, seed, subject.cfg.practice.slots, through=through)
  return results


def by_task(results: Results, tries: int) -> dict[str, list[float]]:
  """Passes of the first `tries` tries, by task; a lost try is no pass."""
  found = collections.defaultdict(list)
  for (task, index), row in sorted(results.rows.items()):
    if index < tries:
      found[task].append(float(row["success"]))
  return dict(found)


def score(name: str, results: Results, tries: int) -> dict[str, Any]:
  """One policy's line: everything a score must be read with."""
  rows = [r for (_, index), r in results.rows.items() if index < tries]
  passes, scored, tasks = sum(r["success"] for r in rows), sum(r["scored"] for r in rows), by_task(results, tries)
  avg = stats.avg_at_k(tasks)
  return {
    "policy": name, "steps": results_steps(results), "tasks": len(tasks), "tries": tries, "passes": passes, "attempted": len(rows),
    "finished": scored, "errors": len(rows) - scored, "rerun": results.lost, "avg_at_k": avg, "noise_points": stats.clustered_noise(tasks),
    "pass_at_k": stats.mean_pass_at_k(tasks, tries), "of_finished": passes / scored if scored else None,
    "at_most_95": stats.unseen_bound(len(tasks)) if avg in (0.0, 1.0) else None,
    "ended_by": dict(collections.Counter(r["end_cause"] for r in rows if r["scored"])),
  }  # fmt: skip


def results_steps(results: Results) -> int:
  return read_jsonl(results.path)[0]["about"]["steps"]


def difference(a: dict[str, Any], b: dict[str, Any], passes_a: dict, passes_b: dict) -> dict[str, Any]:
  """b over a on the same tasks, in points, with the noise of the difference; and the relative gain, named as such."""
  points, noise = stats.paired_difference(passes_a, passes_b)
  relative = stats.points_gained(100 * a["avg_at_k"], 100 * b["avg_at_k"])[1] if a["avg_at_k"] > 0 else None
  apart = (a["noise_points"] ** 2 + b["noise_points"] ** 2) ** 0.5
  return {
    "steps": b["steps"], "points": points, "noise_points": noise, "noise_unpaired": apart, "tasks": points / stats.task_worth(b["tasks"]),
    "relative_percent": relative, "above_noise": abs(points) > 2 * noise,
  }  # fmt: skip


def heading(columns: str) -> list[str]:
  names = columns.split(",")
  return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]


def markdown(result: Mapping[str, Any]) -> str:
  """The results table."""
  k = result["tries"]
  columns = f"policy,step limit,avg@{k} %,+- points,pass@{k} %,passes / attempted,passes / finished %,errors,ended by"
  lines = [f"{result['protocol']}, {result['n_tasks']} tasks, k = {k} tries a task, seed {result['seed']}. Rule, {result['rule']}.", ""]
  lines += heading(columns)
  for s in result["scores"]:
    ended = ", ".join(f"{cause} {n}" for cause, n in sorted(s["ended_by"].items(), key=lambda c: -c[1]))
    noise = f"{s['noise_points']:.1f}" if s["at_most_95"] is None else f"0.0 (95%: within {100 * s['at_most_95']:.1f})"
    finished = "no result" if s["of_finished"] is None else f"{100 * s['of_finished']:.1f}"
    passes = f"{s['passes']} / {s['attempted']}"
    cells = [
      s["policy"],
      s["steps"],
      f"{100 * s['avg_at_k']:.1f}",
      noise,
      f"{100 * s['pass_at_k']:.1f}",
      passes,
      finished,
      s["errors"],
      ended,
    ]
    lines.append("| " + " | ".join(map(str, cells)) + " |")
  columns = "step limit,difference in points,+- points (paired),+- if unpaired,in tasks,relative gain %,above twice the noise"
  lines += ["", *heading(columns)]
  for d in result["differences"]:
    relative = "-" if d["relative_percent"] is None else f"{d['relative_percent']:+.1f}"
    cells = [d["steps"], f"{d['points']:+.1f}", f"{d['noise_points']:.1f}", f"{d['noise_unpaired']:.1f}", f"{d['tasks']:+.1f}", relative,
             "yes" if d["above_noise"] else "no"]  # fmt: skip
    lines.append("| " + " | ".join(map(str, cells)) + " |")
  return "\n".join([*lines, *("" for _ in result["warnings"][:1]), *(f"Warning: {w}." for w in result["warnings"])])


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
    both = [measure(s, protocol, tries, seed, limit) for s in (a, b)]
    pair, passes = [score(s.name, r, tries) for s, r in zip((a, b), both)], [by_task(r, tries) for r in both]
    scores += pair
    differences.append(difference(*pair, *passes))
    for s in pair:
      if s["errors"] > MOST_ERRORS * s["attempted"]:
        warnings.append(f"{s['policy']} lost {s['errors']} of {s['attempted']} tries to the computers: no headline can be made of this")
      if s["ended_by"].get("seconds", 0) > MOST_ERRORS * s["attempted"]:
        warnings.append(f"{s['policy']}: a wall clock ended {s['ended_by']['seconds']} tries, so that it is a limit too")
  return {"protocol": protocol.name, "rule": RULE, "seed": seed, "tries": tries, "n_tasks": scores[0]["tasks"],
          "task_list": evaluate.task_list_hash(b.world.tasks[protocol.tasks]), "scores": scores, "differences": differences,
          "warnings": warnings}  # fmt: skip


def main(argv: Sequence[str]) -> int:
  if argv[1:]:
    raise ValueError(f"{argv[1]} is no flag: write --a=RUN --b=RUN")
  limits = [int(x) for x in FLAGS.limits]
  if any(limit < 1 for limit in limits):
    raise ValueError(f"--limits={','.join(FLAGS.limits)}: wanted step limits of 1 or more")
  keep_freed_memory()
  a, b = load(FLAGS.a), load(FLAGS.b)
  use_compile_cache(b.cfg.compile_cache)
  result = compare(a, b, PROTOCOLS[FLAGS.protocol], FLAGS.tries, FLAGS.seed, limits)
  steps = "-".join(map(str, limits)) or "default"
  name = f"compare-{a.name}-{b.name}-{FLAGS.protocol}-tries{result['tries']}-seed{FLAGS.seed}-steps{steps}".replace(":", "_")
  path = b.workdir / "eval" / name
  text = markdown(result)
  write_atomic(path.with_name(path.name + ".json"), (json.dumps(result, indent=2) + "\n").encode())
  write_atomic(path.with_name(path.name + ".md"), (text + "\n").encode())
  print(f"{text}\n\nwritten to {path}.md and .json", flush=True)
  return 1 if any("no headline" in w for w in result["warnings"]) else 0


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_string("a", None, "The policy to compare with: RUN, RUN:STEP or RUN:copied.", required=True)
  flags.DEFINE_string("b", None, "The policy that is compared: the same.", required=True)
  flags.DEFINE_integer("tries", 4, "Tries a task, k.", lower_bound=1)
  flags.DEFINE_integer("seed", 0, "Of the sampling keys.", lower_bound=0)
  flags.DEFINE_enum("protocol", "held_out", list(PROTOCOLS), "Which tasks, and how they are sampled.")
  flags.DEFINE_list("limits", [], "Step limits, side by side; empty = the tasks' own.")
  config_lib.run_command(main)
