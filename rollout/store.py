"""Every finished episode on disk: a SQLite index, screenshots as PNG files written once, and trajectory records in and out.

    episodes/index.sqlite     one row an episode, one row a step (write-ahead log: readers never wait for the run)
    episodes/screens/ab/...   pictures named after their hash

A trajectory record is one JSON line with the lesson's fields: task_id, group, episode, policy_version, steps[screen, text,
agent_tokens], reward, advantage; and more of ours: goal, family, seed, update, end, end_cause, rewards, partial, checker,
replayed, and for each step action, points, seconds, notes, and the sampled tokens with logp and version. `screen` is the
path of a picture from the folder of the JSON file. Demonstrations are read from the same form (`read_trajectories`).

The index is for people and tools; what a resumed run trains on is in its checkpoint. Prompts are not kept here.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from core.find import nearest
from core.schema import SUCCESS, Action, End, Episode, Step, Unreadable
from core.screens import ScreenStore, write_atomic
from rollout.trajectories import iter_trajectories, read_trajectories

__all__ = ["EpisodeStore", "iter_trajectories", "read_trajectories"]

_PAGE = 200  # rows a query holds at a time
_SCHEMA = """
CREATE TABLE IF NOT EXISTS episodes (
  id INTEGER PRIMARY KEY, group_id TEXT NOT NULL, try_index INTEGER NOT NULL, at_update INTEGER NOT NULL,
  task_id TEXT NOT NULL, goal TEXT NOT NULL, family TEXT NOT NULL, seed INTEGER NOT NULL,
  end TEXT NOT NULL, end_cause TEXT NOT NULL, success INTEGER, reward REAL, rewards TEXT NOT NULL, partial REAL, advantage REAL,
  policy_version INTEGER NOT NULL, steps INTEGER NOT NULL, agent_tokens INTEGER NOT NULL, seconds REAL NOT NULL,
  checker TEXT NOT NULL, replayed INTEGER NOT NULL, final_screen TEXT, notes TEXT NOT NULL, step_limit INTEGER NOT NULL DEFAULT 0,
  UNIQUE (group_id, try_index, at_update));
CREATE INDEX IF NOT EXISTS episodes_task ON episodes (task_id);
CREATE INDEX IF NOT EXISTS episodes_update ON episodes (at_update);
CREATE TABLE IF NOT EXISTS steps (
  episode_id INTEGER NOT NULL REFERENCES episodes (id) ON DELETE CASCADE, step INTEGER NOT NULL,
  screen TEXT NOT NULL, text TEXT NOT NULL, agent_tokens INTEGER NOT NULL, action TEXT NOT NULL, raw_point TEXT, point TEXT,
  think_seconds REAL NOT NULL, env_seconds REAL NOT NULL, notes TEXT NOT NULL, sampled TEXT NOT NULL,
  PRIMARY KEY (episode_id, step)) WITHOUT ROWID;
"""
_COLUMNS = ("group_id", "try_index", "at_update", "task_id", "goal", "family", "seed", "end", "end_cause", "success", "reward",
            "rewards", "partial", "advantage", "policy_version", "steps", "agent_tokens", "seconds", "checker", "replayed",
            "final_screen", "notes", "step_limit")  # fmt: skip
# What `query` may ask for, and the column it stands for.
FILTERS = {"task_id": "task_id", "group": "group_id", "episode": "try_index", "update": "at_update", "family": "family",
           "end": "end", "end_cause": "end_cause", "success": "success", "reward": "reward", "replayed": "replayed",
           "policy_version": "policy_version"}  # fmt: skip


class EpisodeStore:
  """All episodes of a run. One run writes, from any of its threads; `add` encodes pictures outside the lock. start_update: the
  update a resumed run goes on with, see `rewind`."""

  def __init__(self, directory: str | os.PathLike, start_update: int | None = None):
    self.directory = pathlib.Path(os.path.abspath(directory))
    self.directory.mkdir(parents=True, exist_ok=True)
    self.screens = ScreenStore(self.directory / "screens")
    self._lock = threading.Lock()
    self._db = sqlite3.connect(self.directory / "index.sqlite", check_same_thread=False, timeout=60)
    self._db.row_factory = sqlite3.Row
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
      self._db.execute(f"PRAGMA {pragma}")
    with self._transaction():
      for statement in _SCHEMA.split(";"):
        self._db.execute(statement)
      if "step_limit" not in {row["name"] for row in self._db.execute("PRAGMA table_info(episodes)")}:  # an older store
        self._db.execute("ALTER TABLE episodes ADD COLUMN step_limit INTEGER NOT NULL DEFAULT 0")
    if start_update is not None:
      self.rewind(start_update)

  def __enter__(self) -> EpisodeStore:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def __len__(self) -> int:
    with self._lock:
      return self._db.execute("SELECT count(*) FROM episodes").fetchone()[0]

  def close(self) -> None:
    with self._lock:
      self._db.close()

  def add(self, episode: Episode, update: int) -> int:
    """Store an episode of an update; -> its row id. The same group, try and update again replaces the row: after a resume,
    or to fill in the advantage."""
    for screen in [s.screen for s in episode.steps] + ([episode.final_screen] if episode.final_screen is not None else []):
      self.screens.put(screen)
    row = _episode_row(episode, update)
    steps = [_step_row(episode, h) for h in range(len(episode.steps))]
    names, marks = ", ".join(_COLUMNS), ", ".join("?" * len(_COLUMNS))
    changed = ", ".join(f"{c} = excluded.{c}" for c in _COLUMNS[3:])
    with self._transaction():
      (key,) = self._db.execute(
        f"INSERT INTO episodes ({names}) VALUES ({marks}) ON CONFLICT DO UPDATE SET {changed} RETURNING id",
        [row[c] for c in _COLUMNS],
      ).fetchone()
      self._db.execute("DELETE FROM steps WHERE episode_id = ?", [key])
      self._db.executemany(f"INSERT INTO steps VALUES (?, ?, {', '.join('?' * 10)})", [(key, h, *s) for h, s in enumerate(steps)])
    return key

  def rewind(self, update: int) -> int:
    """Forget episodes of `update` and later: a run that resumes there will write them again. -> how many."""
    with self._transaction():
      return self._db.execute("DELETE FROM episodes WHERE at_update >= ?", [int(update)]).rowcount

  def query(self, *, newest_first: bool = False, limit: int | None = None, **filters: Any) -> Iterator[dict[str, Any]]:
    """Rows of the episodes table as dicts, oldest first, read in pages. Filters are FILTERS; a pair (a, b) means a <= x <= b.

    store.query(task_id="...", success=True, update=(10, 20), newest_first=True, limit=50)
    """
    where, values = _where(filters)
    return self._rows(where, values, newest_first, limit)

  def _rows(self, where: str, values: list, newest_first: bool, limit: int | None) -> Iterator[dict[str, Any]]:
    after, order = ("<", "DESC") if newest_first else (">", "ASC")
    last, left = (2**63 - 1 if newest_first else -1), limit
    while left is None or left > 0:
      page = _PAGE if left is None else min(left, _PAGE)
      sql = f"SELECT * FROM episodes WHERE id {after} ?{where} ORDER BY id {order} LIMIT ?"
      with self._lock:
        rows = self._db.execute(sql, [last, *values, page]).fetchall()
      for row in rows:
        found = dict(row)
        found |= {"rewards": json.loads(row["rewards"]), "notes": json.loads(row["notes"]), "replayed": bool(row["replayed"]),
                  "success": None if row["success"] is None else bool(row["success"])}  # fmt: skip
        yield found
      if len(rows) < page:
        return
      last, left = rows[-1]["id"], None if left is None else left - len(rows)

  def steps(self, key: int) -> list[dict[str, Any]]:
    """Step rows of an episode (its `id`), in order; pictures by hash."""
    with self._lock:
      rows = self._db.execute("SELECT * FROM steps WHERE episode_id = ? ORDER BY step", [key]).fetchall()
    as_json = ("action", "raw_point", "point", "notes", "sampled")
    return [{k: json.loads(r[k]) if k in as_json and r[k] is not None else r[k] for k in r.keys()} for r in rows]  # noqa: SIM118

  def load(self, key: int) -> Episode:
    """An episode with its pictures, without token records (tokens of each step are in its notes)."""
    with self._lock:
      row = self._db.execute("SELECT * FROM episodes WHERE id = ?", [key]).fetchone()
    if row is None:
      raise ValueError(f"no episode with id {key} in {self.directory}")
    steps = []
    for s in self.steps(key):
      action = Unreadable(s["action"]["unreadable"]) if "unreadable" in s["action"] else Action(**s["action"])
      points = _tuple(s["raw_point"]), _tuple(s["point"])
      seconds = s["think_seconds"], s["env_seconds"]
      picture = self.screens.get(s["screen"])
      steps.append(Step(picture, s["text"], action, s["agent_tokens"], *points, *seconds, s["notes"] | s["sampled"]))
    return Episode(
      row["task_id"], row["group_id"], row["try_index"], row["seed"], steps, End(row["end"]), row["end_cause"],
      json.loads(row["rewards"]), [], row["goal"], row["family"], row["checker"], row["partial"], row["advantage"],
      bool(row["replayed"]), self.screens.get(row["final_screen"]) if row["final_screen"] else None, json.loads(row["notes"]),
      row["step_limit"],
    )  # fmt: skip

  def export_jsonl(self, path: str | os.PathLike, **filters: Any) -> int:
    """Write trajectory records of the episodes that `query` finds, and their pictures beside them in NAME_screens/. The file
    appears when it is whole. -> how many records."""
    path = pathlib.Path(os.path.abspath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = ScreenStore(path.with_name(f"{path.stem}_screens"))
    temp, count, copied = path.with_name(f".{path.name}.tmp"), 0, set()
    rows = self.query(**filters)
    with open(temp, "w", encoding="utf-8") as out:
      for row in rows:
        steps = self.steps(row["id"])
        for ref in {s["screen"] for s in steps} - copied:
          target = pictures.path(ref)
          target.parent.mkdir(parents=True, exist_ok=True)
          write_atomic(target, self.screens.path(ref).read_bytes())
          copied.add(ref)
        out.write(json.dumps(_record(row, steps, pictures.directory.name), allow_nan=False) + "\n")
        count += 1
    os.replace(temp, path)
    return count

  @contextlib.contextmanager
  def _transaction(self) -> Iterator[None]:
    with self._lock, self._db:
      yield


def _where(filters: dict[str, Any]) -> tuple[str, list[Any]]:
  sql, values = "", []
  for name, wanted in filters.items():
    if name not in FILTERS:
      raise ValueError(f"episodes cannot be found by {name!r}{nearest(name, FILTERS)}; there are: {', '.join(FILTERS)}")
    if isinstance(wanted, tuple | list):
      if len(wanted) != 2:
        raise ValueError(f"{name}={wanted!r}: wanted one value or a pair (first, last)")
      sql += f" AND {FILTERS[name]} BETWEEN ? AND ?"
      values += wanted
    else:
      sql += f" AND {FILTERS[name]} IS ?"
      values.append(wanted)  # an End is a str
  return sql, values


def _episode_row(e: Episode, update: int) -> dict[str, Any]:
  if update != int(update) or update < 0:
    raise ValueError(f"episode {e.group}/{e.try_index}: update is {update!r}, wanted a whole number >= 0")
  if bool(e.rewards) != e.scored or (e.scored and SUCCESS not in e.rewards):
    raise ValueError(
      f"episode {e.group}/{e.try_index} ended with {e.end.value} and rewards {e.rewards}: "
      f"an infra error has none, every other end has {SUCCESS!r}"
    )
  return {
    "group_id": str(e.group), "try_index": int(e.try_index), "at_update": int(update), "task_id": str(e.task_id), "goal": e.goal,
    "family": e.family, "seed": int(e.seed), "end": e.end.value, "end_cause": e.end_cause,
    "success": int(e.success) if e.scored else None, "reward": e.reward if e.scored else None,
    "rewards": _json({k: float(v) for k, v in e.rewards.items()}, e), "partial": e.partial, "advantage": e.advantage,
    "policy_version": e.oldest_version, "steps": len(e.steps), "agent_tokens": sum(int(s.agent_tokens) for s in e.steps),
    "seconds": float(sum(s.think_seconds + s.env_seconds for s in e.steps)), "checker": e.checker, "replayed": int(e.replayed),
    "final_screen": e.final_screen.ref if e.final_screen is not None else None, "notes": _json(e.notes, e),
    "step_limit": int(e.step_limit),
  }  # fmt: skip


def _step_row(e: Episode, h: int) -> tuple:
  s = e.steps[h]
  action = {"unreadable": s.action.reason} if isinstance(s.action, Unreadable) else vars(s.action)
  sampled: dict[str, list] = {"tokens": [], "logp": [], "version": []}
  for r in e.records:
    mine = np.asarray(r.is_action) & (np.asarray(r.step) == h)
    for name, values in sampled.items():
      values += np.asarray(getattr(r, name))[mine].tolist()
  point = lambda p: None if p is None else _json(list(p), e)
  return (s.screen.ref, s.text, int(s.agent_tokens), _json(action, e), point(s.raw_point), point(s.point), float(s.think_seconds),
          float(s.env_seconds), _json(s.notes, e), _json(sampled, e))  # fmt: skip


def _record(row: dict[str, Any], steps: list[dict[str, Any]], folder: str) -> dict[str, Any]:
  """The lesson's fields first, in its order."""
  shown = []
  for s in steps:
    step = {"screen": f"{folder}/{s['screen'][:2]}/{s['screen']}.png", "text": s["text"], "agent_tokens": s["agent_tokens"]}
    more = ("action", "raw_point", "point", "think_seconds", "env_seconds", "notes")
    shown.append(step | {k: s[k] for k in more} | s["sampled"])
  record = {"task_id": row["task_id"], "group": row["group_id"], "episode": row["try_index"],
            "policy_version": row["policy_version"], "steps": shown, "reward": row["reward"], "advantage": row["advantage"],
            "update": row["at_update"]}  # fmt: skip
  more = ("goal", "family", "seed", "end", "end_cause", "rewards", "partial", "checker", "replayed", "notes", "step_limit")
  return record | {k: row[k] for k in more}


def _json(value: Any, e: Episode) -> str:
  def plain(x: Any) -> Any:
    if isinstance(x, np.generic | np.ndarray):
      return x.tolist()
    raise TypeError(f"{type(x).__name__} {x!r}")

  try:
    return json.dumps(value, default=plain, allow_nan=False)
  except (TypeError, ValueError) as error:
    raise ValueError(f"episode {e.group}/{e.try_index} of {e.task_id} holds what JSON cannot: {error}") from error


def _tuple(value: list | None) -> tuple | None:
  return None if value is None else tuple(value)
