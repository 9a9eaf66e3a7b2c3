"""Hand labels: what a person who looked at a finished episode says of it, beside the episodes in the store's index.

A table `labels` of episodes/index.sqlite: episode_id (the store's row), passed (1 or 0), by. A label outlives the run that made the
episode; an episode that a resumed run takes back takes its label with it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sqlite3
from collections.abc import Mapping

from core.stats import Agreement, agreement

_SCHEMA = """CREATE TABLE IF NOT EXISTS labels (
  episode_id INTEGER PRIMARY KEY REFERENCES episodes (id) ON DELETE CASCADE, passed INTEGER NOT NULL CHECK (passed IN (0, 1)),
  by TEXT NOT NULL DEFAULT '')"""


def put(workdir: str | os.PathLike, labels: Mapping[int, bool], by: str = "") -> None:
  """Writes labels by episode id, all or none; a second label of an episode takes the place of the first."""
  with contextlib.closing(sqlite3.connect(_index(workdir), timeout=60)) as db, db:
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA synchronous = NORMAL")  # the run that writes beside it never waits for a disk
    db.execute(_SCHEMA)
    rows = [(int(key), int(passed), by) for key, passed in labels.items()]
    db.executemany("INSERT INTO labels VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET passed = excluded.passed, by = excluded.by", rows)


def read(workdir: str | os.PathLike) -> list[tuple[bool, bool, int]]:
  """(label, grader's verdict, update) of every labelled episode that reached the grader, oldest first. An unreadable action ends an
  episode before it is graded, and an infra error leaves nothing to grade: neither says anything of the grader."""
  index = _index(workdir)
  if not index.exists():
    return []
  with contextlib.closing(sqlite3.connect(f"{index.as_uri()}?mode=ro", uri=True, timeout=60)) as db:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'labels'").fetchone():
      return []
    rows = db.execute("""SELECT l.passed, e.success, e.at_update FROM labels l JOIN episodes e ON e.id = l.episode_id
                         WHERE e.success IS NOT NULL AND e.end_cause != 'unreadable' ORDER BY e.id""").fetchall()
  return [(bool(passed), bool(success), update) for passed, success, update in rows]


def measured(workdir: str | os.PathLike) -> Agreement | None:
  """The grader beside the labels of this workdir; None where there are none."""
  found = read(workdir)
  return agreement((label, grader) for label, grader, _ in found) if found else None


def _index(workdir: str | os.PathLike) -> pathlib.Path:
  return pathlib.Path(os.path.abspath(workdir)) / "episodes" / "index.sqlite"
