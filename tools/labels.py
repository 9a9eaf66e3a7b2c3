"""What hand labels say of a run's grader: confusion matrix, agreement, true-pass and false-pass rate, the factor on the curve.

  python -m tools.labels --workdir=runs/android [--export=labels.jsonl]

Labels are given on the episode page (tools/episodes.py) and stand in the store's own index, see rollout/labels.py. Every figure is worked
out from them anew, so that none is ever older than the labels. Exit code 0; 2 for what cannot be read.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

if __package__ in (None, ""):  # python tools/labels.py
  sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from core.config import run_command
from core.screens import write_atomic
from core.stats import Agreement
from rollout import labels


def index_of(workdir: str | os.PathLike) -> pathlib.Path:
  """episodes/index.sqlite of a workdir. ValueError where there is none."""
  index = pathlib.Path(os.path.abspath(workdir)) / "episodes" / "index.sqlite"
  if not index.is_file():
    raise ValueError(f"--workdir={workdir} holds no {index.parent.name}/{index.name}: give the folder of a run that train.py made")
  return index


@contextlib.contextmanager
def reading(index: pathlib.Path) -> Iterator[sqlite3.Connection]:
  """A read-only connection to a store's index for one look: a reader that stays would keep the run's write-ahead log from shrinking."""
  with contextlib.closing(sqlite3.connect(f"{index.as_uri()}?mode=ro", uri=True, timeout=10)) as db:
    db.row_factory = sqlite3.Row
    yield db


def has_labels(db: sqlite3.Connection) -> bool:
  return db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'labels'").fetchone() is not None


def withdraw(workdir: str | os.PathLike, episode_id: int) -> bool:
  """Takes the label of an episode back; -> whether there was one."""
  with contextlib.closing(sqlite3.connect(index_of(workdir), timeout=60)) as db, db:
    db.execute("PRAGMA synchronous = NORMAL")  # as the run's own: its next write never waits for this one to reach the disk
    return has_labels(db) and db.execute("DELETE FROM labels WHERE episode_id = ?", [episode_id]).rowcount > 0


def records(workdir: str | os.PathLike) -> list[dict[str, Any]]:
  """Every label with the episode it is of and what the grader said (None where nothing was graded), oldest episode first."""
  with reading(index_of(workdir)) as db:
    if not has_labels(db):
      return []
    rows = db.execute("""SELECT l.episode_id, e.group_id AS "group", e.try_index AS episode, e.at_update AS "update", e.task_id, e.checker,
                         e.end_cause, l.passed AS label, e.success AS grader, l.by FROM labels l JOIN episodes e ON e.id = l.episode_id
                         ORDER BY e.id""").fetchall()
  as_bool = lambda x: None if x is None else bool(x)
  return [dict(row) | {"label": bool(row["label"]), "grader": as_bool(row["grader"])} for row in rows]


def jsonl(workdir: str | os.PathLike) -> bytes:
  """`records` as JSON lines."""
  return "".join(json.dumps(r, allow_nan=False) + "\n" for r in records(workdir)).encode()


def figures(found: Agreement) -> dict[str, Any]:
  """An Agreement's numbers by name, rates as fractions, a rate without a case None. noise_points: of the agreement."""
  names = ("n", "agreement", "noise_points", "true_pass_rate", "false_pass_rate", "factor")
  return {"confusion": found._asdict()} | {name: getattr(found, name) for name in names}


def text(found: Agreement | None) -> str:
  """The figures as a person reads them in a terminal."""
  if found is None:
    return "no labels yet: python -m tools.episodes --workdir=... and press l"
  rate = lambda x: "no such label" if x is None else f"{100 * x:.1f}%"
  return "\n".join([
    f"{'':14}{'grader: pass':>14}{'grader: fail':>14}",
    f"{'label: pass':14}{found.pass_pass:14}{found.pass_fail:14}",
    f"{'label: fail':14}{found.fail_pass:14}{found.fail_fail:14}",
    f"agreement {rate(found.agreement)} of {found.n} +- {found.noise_points:.1f} points",
    f"true-pass rate {rate(found.true_pass_rate)}, false-pass rate {rate(found.false_pass_rate)}",
    f"factor {found.factor:.3f}: a real gain of 10 points shows as {10 * found.factor:.1f} on the curve",
  ])  # fmt: skip


def main(argv: Sequence[str]) -> int:
  if argv[1:]:
    raise ValueError(f"{argv[1]} is no flag: write --workdir={argv[1]}")
  index_of(FLAGS.workdir)
  print(text(labels.measured(FLAGS.workdir)), flush=True)
  if FLAGS.export:
    write_atomic(FLAGS.export, jsonl(FLAGS.workdir))
  return 0


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder of a run that train.py made.", required=True)
  flags.DEFINE_string("export", "", "Write the labels here, one JSON object a line.")
  run_command(main, sqlite3.DatabaseError)
