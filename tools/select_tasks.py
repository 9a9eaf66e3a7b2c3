"""Which tasks are worth practising: k tries of a policy at each, the kept set, and what a group that teaches will cost.

  python -m tools.select_tasks --workdir=runs/android --tries=16                    the copied policy, every practised task
  python -m tools.select_tasks --workdir=runs/android --which=latest --tries=8 --highest=7

Checklist item 3. Keeps tasks with --lowest passes or more (ARPO: 1 of 16), and at most --highest where given; a task whose every try was
lost to the computers is kept, for nothing is known against it. Writes RUN/tasks.json: `kept`, the ids in the run's order, and why.
Every try is kept as it ends (evaluate.py), so that a cut run goes on. Exit code 0; 1 where no task is kept; 2 for what cannot be run.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

if __package__ in (None, ""):  # python tools/select_tasks.py
  sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

import evaluate
from core import config as config_lib
from core.host import keep_freed_memory, use_compile_cache
from core.metrics import read_jsonl
from core.screens import write_atomic
from core.stats import measured_teaching_share, teaching_share
from rollout.curriculum import solvable

FILE = "tasks.json"
BAR = 40  # characters of the longest bar


def outcomes(rows: Mapping[tuple[str, int], Mapping[str, Any]], tries: int) -> dict[str, tuple[int, int]]:
  """(passes, scored tries) by task, of the first `tries` tries."""
  found: dict[str, tuple[int, int]] = {}
  for (task, index), row in rows.items():
    won, tried = found.get(task, (0, 0))
    if index < tries:
      found[task] = won + row["success"], tried + row["scored"]
  return found


def cost(results: Mapping[str, tuple[int, int]], group_size: int, replay: bool) -> tuple[float, float]:
  """(share of groups that teach, episodes a teaching group), where these tasks are practised one as often as another."""
  shares = [measured_teaching_share(won, tried, group_size, replay) for won, tried in results.values()]
  mean = statistics.fmean(shares) if shares else 0.0
  return mean, group_size / mean if mean > 0 else math.inf


def select(results: Mapping[str, tuple[int, int]], lowest: int, highest: int | None, group_size: int, replay: bool) -> dict[str, Any]:
  """The kept set by rule, the histogram, and what teaching costs on all tasks and on the kept ones."""
  tried = {task: r for task, r in results.items() if r[1]}
  if not tried:
    raise ValueError(f"not one try at {len(results)} tasks could be scored: see that the computers stand (tools/check_env.py)")
  picked = solvable(tried, lowest, highest)
  unscored = [task for task in results if task not in tried]
  kept = set(picked.kept) | set(unscored)
  before, after = cost(tried, group_size, replay), cost({t: tried[t] for t in picked.kept}, group_size, replay)
  return {
    "kept": [t for t in results if t in kept], "dropped": [t for t in results if t not in kept], "unscored": unscored,
    "histogram": picked.histogram, "lowest": lowest, "highest": highest, "group_size": group_size, "replay": replay,
    "passes": {t: list(r) for t, r in results.items()}, "teaching_share": {"all": before[0], "kept": after[0]},
    "episodes_per_teaching_group": {name: e if math.isfinite(e) else None for name, e in (("all", before[1]), ("kept", after[1]))},
  }  # fmt: skip


def speed(workdir: pathlib.Path) -> float | None:
  """Episodes a minute, the median over the run's updates; None where it has not practised."""
  path = workdir / "metrics.jsonl"
  rates = [r["rate/episodes_per_minute"] for r in read_jsonl(path) if r.get("rate/episodes_per_minute")] if path.exists() else []
  return statistics.median(rates) if rates else None


def hours(episodes_per_group: float | None, groups: int, a_minute: float | None) -> float | None:
  """Hours until `groups` groups have taught, at so many episodes a minute; None where no group ever teaches, or the speed is not known."""
  return None if episodes_per_group is None or not a_minute else groups * episodes_per_group / a_minute / 60


def report(found: Mapping[str, Any], tries: int) -> str:
  """The histogram against the teaching-share hill, and the cost."""
  size, histogram = found["group_size"], found["histogram"]
  tallest, highest = max(histogram.values()), found["highest"] or math.inf
  lines = [f"{'passes':>9}  {'tasks':>5}  a group of {size} teaches{', with replay' if found['replay'] else ''}"]
  for passes, n in histogram.items():
    p = min(passes / tries, 1.0)
    hill = f"{teaching_share(p, size):6.1%}" + (f" {teaching_share(p, size, True) if passes else 0.0:6.1%}" if found["replay"] else "")
    mark = "" if found["lowest"] <= passes <= highest else "  dropped"
    lines.append(f"{passes:>3} of {tries:>2}  {n:>5}  {hill}  {'#' * max(1, round(BAR * n / tallest))}{mark}")
  lines.append(f"kept {len(found['kept'])}, dropped {len(found['dropped'])}, of the kept not scored {len(found['unscored'])}")
  for which, share in found["teaching_share"].items():
    episodes, time_ = found["episodes_per_teaching_group"][which], found["hours"][which]
    tell = "no group teaches" if episodes is None else f"{episodes:.1f} episodes a teaching group"
    tell += "" if time_ is None else f", {time_:.2f} hours for {found['groups']} of them"
    lines.append(f"{which:>4} tasks: {share:6.1%} of the groups teach, {tell}")
  rate = found["episodes_per_minute"]
  lines.append("speed not known: " + found["speed_from"] if rate is None else f"at {rate:.0f} episodes a minute ({found['speed_from']})")
  return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
  if argv[1:]:
    raise ValueError(f"{argv[1]} is no flag: write --workdir={argv[1]}")
  highest = FLAGS.highest or None
  if FLAGS.lowest > FLAGS.tries:
    raise ValueError(f"--lowest={FLAGS.lowest}: wanted at most --tries={FLAGS.tries}")
  keep_freed_memory()
  subject = evaluate.load(FLAGS.workdir + {"latest": ""}.get(FLAGS.which, f":{FLAGS.which}"))
  cfg = subject.cfg
  use_compile_cache(cfg.compile_cache)
  began = time.monotonic()
  results, _ = evaluate.examine(subject, evaluate.PRACTISED, FLAGS.tries, FLAGS.seed)
  seconds = time.monotonic() - began
  found = select(outcomes(results.rows, FLAGS.tries), FLAGS.lowest, highest, cfg.agent.group_size, bool(cfg.agent.get("replay", 0)))
  rate, groups = speed(subject.workdir), cfg.practice.updates * cfg.practice.groups
  source = "the median of the run's updates" if rate else "these tries, compiling included" if results.fresh else "no try was run just now"
  rate = rate or (60 * results.fresh / seconds if results.fresh else None)
  found |= {
    "policy": subject.name, "tries": FLAGS.tries, "seed": FLAGS.seed, "groups": groups, "episodes_per_minute": rate, "speed_from": source,
    "task_list": evaluate.task_list_hash(subject.world.tasks["practice"]),
    "hours": {which: hours(each, groups, rate) for which, each in found["episodes_per_teaching_group"].items()},
  }  # fmt: skip
  path = subject.workdir / FILE
  write_atomic(path, (json.dumps(found, indent=1) + "\n").encode())
  print(f"{report(found, FLAGS.tries)}\nwritten to {os.path.relpath(path)}", flush=True)
  return 0 if found["kept"] else 1


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder of a run that has copied.", required=True)
  flags.DEFINE_string("which", "copied", "Which policy of it: copied, latest, or a checkpoint's number.")
  flags.DEFINE_integer("tries", 16, "Tries a task.", lower_bound=1)
  flags.DEFINE_integer("lowest", 1, "Passes that a task needs to be kept.", lower_bound=0)
  flags.DEFINE_integer("highest", 0, "Passes that it may have at most; 0 = no such edge.", lower_bound=0)
  flags.DEFINE_integer("seed", 0, "Of the sampling keys.", lower_bound=0)
  config_lib.run_command(main)
