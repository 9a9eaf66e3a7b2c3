"""What a judge says of episodes whose verdict is known: agreement, confusion, rates, and how often it could not tell.

  python -m tools.check_judge --workdir=runs/android --judge.base_url=http://127.0.0.1:8001/v1 --judge.model=trained --judge.form=yes_no
  ... --labels=hand      beside labels given on the episode page (tools/episodes.py), not what the run's checker said
  ... --count=100        of so many episodes, spread over the run; 0: all

--judge.* are the knobs of env.judge (docs/judges.md): the judge is asked what it would be asked in a run. Unknown is counted by itself. A
judge that is down ends the command with one line and exit code 2, as anything else that cannot be used: silence is no verdict.
"""

from __future__ import annotations

import os
import pathlib
import sqlite3
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import ml_collections
from absl import flags
from ml_collections import config_flags

if __package__ in (None, ""):  # python tools/check_judge.py
  sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from core.config import run_command
from core.schema import Episode, Limits, Task
from core.stats import Agreement, agreement
from envs import judges
from envs.errors import CheckerFailed
from rollout.store import EpisodeStore
from tools import labels


class Verdicts(NamedTuple):
  """found: labels beside verdicts, None where the judge could tell of no episode; unknown: of how many it could not tell."""

  found: Agreement | None
  unknown: int


def known(workdir: str, by: str, count: int) -> list[tuple[int, bool]]:
  """(row id, label) of graded episodes, oldest first, evenly spread where there are more than `count`. What ended unreadable was not
  graded. by: "checker" or "hand"."""
  with labels.reading(labels.index_of(workdir)) as db:
    if by == "hand" and not labels.has_labels(db):
      raise ValueError(f"--labels=hand, but {workdir} has none: give them with python -m tools.episodes --workdir={workdir}")
    source, label = ("labels l JOIN episodes e ON e.id = l.episode_id", "l.passed") if by == "hand" else ("episodes e", "e.success")
    where = "e.success IS NOT NULL AND e.end_cause != 'unreadable' AND e.final_screen IS NOT NULL"
    rows = [(key, bool(passed)) for key, passed in db.execute(f"SELECT e.id, {label} FROM {source} WHERE {where} ORDER BY e.id")]
  if not rows:
    raise ValueError(f"{workdir} has no graded episode with a final screen: let it practise first")
  if not 0 < count < len(rows):
    return rows
  return [rows[i * len(rows) // count] for i in range(count)]


def shown(episode: Episode, frames: int) -> tuple[Task, list, list[str]]:
  """(task, last frames, action texts) of a stored episode, as its environment would have shown them to a judge."""
  screens = [step.screen for step in episode.steps[1:]] + [episode.final_screen]
  task = Task(episode.task_id, episode.goal, "", episode.family, episode.seed, {}, Limits(episode.step_limit or len(episode.steps)))
  return task, [screen.pixels for screen in screens[-frames:]], [step.text for step in episode.steps]


def ask(workdir: str, rows: Sequence[tuple[int, bool]], judge: judges.Judge, say: Callable[[str], None] = lambda line: None) -> Verdicts:
  """Asks about stored episodes. CheckerFailed (JudgeDown, JudgeSpent) is not caught: what was not answered is no verdict."""
  pairs, unknown = [], 0
  with EpisodeStore(pathlib.Path(os.path.abspath(workdir)) / "episodes") as store:
    for n, (key, label) in enumerate(rows, 1):
      verdict = judge(*shown(store.load(key), judge.frames))
      unknown += verdict is None
      pairs += [] if verdict is None else [(label, verdict >= 1.0)]
      if n % 20 == 0 or n == len(rows):
        say(f"{n} of {len(rows)} episodes")
  return Verdicts(agreement(pairs) if pairs else None, unknown)


def report(version: str, rows: Sequence[tuple[int, bool]], got: Verdicts) -> str:
  passes = sum(label for _, label in rows)
  told = f"{len(rows)} episodes, {passes} of them passes; of {got.unknown} the judge could not tell"
  common = f"always the commoner verdict: {100 * max(passes, len(rows) - passes) / len(rows):.1f}%"
  return "\n".join([f"judge {version}", told, labels.text(got.found) if got.found else "no verdict at all", common])


def main(argv: Sequence[str]) -> int:
  if argv[1:]:
    raise ValueError(f"{argv[1]} is no flag: write --workdir={argv[1]}")
  cfg = FLAGS.judge
  if cfg.kind != "endpoint":
    raise ValueError(f"--judge.kind is {cfg.kind!r}, wanted endpoint: stored episodes have no reference answer that a rule could use")
  judge, rows = judges.make(cfg), known(FLAGS.workdir, FLAGS.labels, FLAGS.count)
  print(report(judge.version, rows, ask(FLAGS.workdir, rows, judge, lambda line: print(line, flush=True))), flush=True)
  return 0


def defaults() -> ml_collections.ConfigDict:
  """The knobs of env.judge, an endpoint's."""
  cfg = judges.defaults()
  cfg.kind = "endpoint"
  return cfg


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder of a run that train.py made.", required=True)
  flags.DEFINE_enum("labels", "checker", ["checker", "hand"], "Whose labels: the run's checker's, or hand labels.")
  flags.DEFINE_integer("count", 100, "Episodes asked about; 0 = all.", lower_bound=0)
  config_flags.DEFINE_config_dict("judge", defaults())
  run_command(main, sqlite3.DatabaseError, CheckerFailed)
