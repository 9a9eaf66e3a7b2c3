"""Can the computers be won, and is nothing won for nothing? Plays a scripted solution (must pass) and an idle episode (must not) of
every task, or a sample, on the computers that practice will have, and keeps what came of it in the workdir's check_env.json.

  python -m tools.check_env --config=configs/android.py                 every practised task, in this process
  python -m tools.check_env --config=configs/android.py --tasks=20 --config.practice.workers=True      a sample, worker processes
  python -m tools.check_env --workdir=runs/android                      the environment of a run that stands

Checklist item 1. Exit code 0: every score is the known one; 1: one is not, or could not be had (one line says which and what to mend);
2: something given cannot be run. A training run asks the same of a few tasks first: rollout/gate.py.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

import ml_collections
from absl import flags

if __package__ in (None, ""):  # python tools/check_env.py
  sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

import evaluate
from configs import base
from core import config as config_lib
from envs.errors import PoolExhausted
from rollout import gate

LISTS = ("practice", "in_domain", "held_out")


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_integer("tasks", 0, "Tasks, evenly from the list; 0 = all.", lower_bound=0, flag_values=values)
  flags.DEFINE_enum("list", "practice", LISTS, "Which task list.", flag_values=values)


def table(record: dict[str, Any]) -> str:
  """The result as a person reads it."""
  share = lambda name, n: "not measured" if record[name] is None else f"{100 * record[name]:5.1f}% of {record[n]}"
  rows = [
    f"{record['config']}, {record['computer']}: {record['tasks']} tasks in the list",
    f"  scripted solution passes               {share('known_good', 'n_known_good')}   (wanted 100%)",
    f"  scripted solution passes at first go   {share('first_go', 'n_known_good')}   (wanted 100%)",
    f"  passes with nothing done               {share('do_nothing', 'n_do_nothing')}   (wanted 0%)",
    f"  same final screen, two verdicts        {record['contradictions']} tasks   (wanted 0)",
    f"  could not be scored                    {record['not_scored']} tasks   (wanted 0)",
  ]
  if not record["n_known_good"]:
    rows.append("  no solution of these tasks is known to the suite: play one by hand before you believe a flat curve")
  return "\n".join(rows)


def settings(argv: list[str]) -> tuple[ml_collections.ConfigDict, dict[str, Any]]:
  """(config, flags): of --config, or of the run that stands in --workdir."""
  if any(a.lstrip("-").startswith("config") for a in argv[1:]):
    return config_lib.load_config(argv, define)
  values = flags.FlagValues()
  define(values)
  flags.DEFINE_string("workdir", None, "Folder of a run.", flag_values=values)
  try:
    left = values(argv)
  except flags.Error as error:
    raise ValueError(f"{error}; wanted --config=FILE or --workdir=RUN") from error
  if left[1:] or not values.workdir:
    raise ValueError(f"wanted --config=FILE or --workdir=RUN, got {' '.join(argv[1:]) or 'neither'}")
  return base.saved(values.workdir), values.flag_values_dict()


def main(argv: list[str]) -> int:
  try:
    cfg, given = settings(argv)
    base.check(cfg)
    world, knobs = evaluate.build(cfg), gate.defaults()
    tasks = world.tasks[given["list"]]
    with knobs.unlocked():
      knobs.known_good = knobs.do_nothing = given["tasks"] or len(tasks)
    cfg = ml_collections.ConfigDict(cfg.to_dict())  # unlocked
    cfg.practice.slots = min(cfg.practice.slots, len(gate.spread(tasks, knobs.known_good)))
    with evaluate.computers(cfg, world, lambda: None) as computers:
      record = gate.examine(cfg, knobs, tasks, computers, world.env)
    path = gate.write(given["workdir"], record)
  except (ValueError, OSError) as error:
    print(f"check_env.py: {config_lib.one_line(error)}", file=sys.stderr)
    return config_lib.EXIT_USAGE
  except PoolExhausted as error:
    print(f"check_env.py: {config_lib.one_line(error)}", file=sys.stderr)
    return 1
  print(table(record))
  why = gate.complaint(record)
  print(f"written to {os.path.relpath(path)}" if not why else f"DO NOT TRAIN: {why}; see {os.path.relpath(path)}", flush=True)
  return 1 if why else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
