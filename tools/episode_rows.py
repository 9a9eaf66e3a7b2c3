"""What the episode page shows, read from a store that a run may be writing to: filters, rows by keyset, an episode's steps, a group.

Filters are the query part of the page's address (`parse_filters`): task (a star at its end: every task that begins so), family, end,
verdict (pass, fail, none), label (yes, no, disagree), and as a number or a range `5..10`, `5..`, `..10`: reward, version, update.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sqlite3
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from core.schema import End
from core.screens import ScreenStore
from rollout import labels
from rollout.store import FILTERS
from tools.labels import index_of, reading

PAGE = 50  # rows of the list
MOST_CHOICES = 200  # tasks or families that are offered by name
NAMES = ("task", "family", "end", "verdict", "reward", "version", "update", "label")
BLIND = ("task", "family", "version", "update")  # filters that say nothing of the verdict
VERDICTS = {"pass": True, "fail": False, "none": None}
LABELS = {
  "yes": "l.passed IS NOT NULL",
  "no": "l.passed IS NULL",
  "disagree": "l.passed != e.success AND e.end_cause != 'unreadable'",
}
_GRADED = " AND e.success IS NOT NULL AND e.end_cause != 'unreadable' AND e.replayed = 0"
_COLUMNS = FILTERS | {"reward": "reward"}
_FROM = "FROM episodes e LEFT JOIN labels l ON l.episode_id = e.id WHERE 1"
_LIST = """e.id, e.group_id, e.try_index, e.at_update, e.task_id, e.family, e.end, e.end_cause, e.success, e.reward, e.advantage,
           e.policy_version, e.steps, e.step_limit, e.replayed, l.passed AS label"""


@dataclasses.dataclass(frozen=True)
class Filters:
  """given: what the address says, cleaned. store: the same as EpisodeStore.query takes it (a range is a pair); label: a key of LABELS."""

  given: dict[str, str]
  store: dict[str, Any]
  label: str = ""

  @property
  def blind(self) -> dict[str, str]:
    return {k: v for k, v in self.given.items() if k in BLIND}


def parse_filters(args: Mapping[str, str]) -> Filters:
  """Filters of an address; what is no filter's name is left alone. ValueError for a value that cannot be read."""
  given = {k: args[k].strip() for k in NAMES if args.get(k, "").strip()}
  store: dict[str, Any] = {}
  if task := given.get("task"):
    store["task_id"] = (task[:-1], task[:-1] + "\U0010ffff") if task.endswith("*") else task
  if "family" in given:
    store["family"] = given["family"]
  if "end" in given:
    store["end"] = _one_of("end", given["end"], [e.value for e in End])
  if "verdict" in given:
    store["success"] = VERDICTS[_one_of("verdict", given["verdict"], VERDICTS)]
  for name, column, kind in (("reward", "reward", float), ("version", "policy_version", int), ("update", "update", int)):
    if name in given:
      store[column] = _range(name, given[name], kind)
  label = _one_of("label", given["label"], LABELS) if "label" in given else ""
  return Filters(given, store, label)


def _one_of(name: str, value: str, wanted: Collection[str]) -> str:
  if value not in wanted:
    raise ValueError(f"{name} is {value[:60]!r}, wanted one of {', '.join(wanted)}")
  return value


def _range(name: str, value: str, kind: type) -> tuple[float, float]:
  low, dots, high = value.partition("..")
  try:
    first, last = (kind(low) if low else -math.inf), (kind(high) if high else math.inf if dots else kind(low))
  except ValueError as error:
    raise ValueError(f"{name} is {value[:60]!r}, wanted a number or a range as 5..10, 5.. or ..10") from error
  if any(x != x or (math.isfinite(x) and abs(x) > 2**53) for x in (first, last)):
    raise ValueError(f"{name} is {value[:60]!r}: no number of an episode")
  return first, last


def _where(filters: Filters) -> tuple[str, list[Any]]:
  sql, values = "", []
  for name, wanted in filters.store.items():
    pair = isinstance(wanted, tuple)
    sql += f" AND e.{_COLUMNS[name]} BETWEEN ? AND ?" if pair else f" AND e.{_COLUMNS[name]} IS ?"
    values += wanted if pair else [wanted]
  return sql + (f" AND {LABELS[filters.label]}" if filters.label else ""), values


class Rows:
  """Looks into the index of a workdir; each method is one short read."""

  def __init__(self, workdir: pathlib.Path):
    self.index = index_of(workdir)
    labels.put(workdir, {})  # the table of labels is there from now on

  def _all(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
    with reading(self.index) as db:
      return db.execute(sql, values).fetchall()

  def page(self, filters: Filters, before: int | None = None, after: int | None = None, size: int = PAGE) -> tuple[list, bool, bool]:
    """(rows newest first, whether older ones follow, whether newer ones do). Keyset: rows with an id below `before` or above `after`."""
    where, values = _where(filters)
    up = after is not None
    edge, key = ("e.id > ?", after) if up else ("e.id < ?", 2**63 - 1 if before is None else before)
    rows = self._all(f"SELECT {_LIST} {_FROM} AND {edge}{where} ORDER BY e.id {'ASC' if up else 'DESC'} LIMIT ?", [key, *values, size + 1])
    more, rows = len(rows) > size, rows[:size]
    return (rows[::-1], True, more) if up else (rows, more, before is not None)

  def count(self, filters: Filters) -> int:
    where, values = _where(filters)
    joined = _FROM if filters.label else "FROM episodes e WHERE 1"
    return self._all(f"SELECT count(*) {joined}{where}", values)[0][0]

  def one(self, key: int) -> dict[str, Any] | None:
    rows = self._all(f"SELECT e.*, l.passed AS label {_FROM} AND e.id = ?", [key])
    return dict(rows[0]) | {k: json.loads(rows[0][k]) for k in ("rewards", "notes")} if rows else None

  def neighbours(self, key: int, filters: Filters) -> tuple[int | None, int | None]:
    """Ids of the next newer and the next older episode under the filters."""
    newer, older = self.page(filters, after=key, size=1)[0], self.page(filters, before=key, size=1)[0]
    return newer[0]["id"] if newer else None, older[0]["id"] if older else None

  def group(self, group: str, update: int) -> list[sqlite3.Row]:
    return self._all(f"SELECT {_LIST}, e.goal {_FROM} AND e.group_id = ? AND e.at_update = ? ORDER BY e.try_index", [group, update])

  def draw(self, filters: Filters, seen: Collection[int]) -> int | None:
    """Id of any graded episode without a label, by chance, none of `seen`; None where all are labelled."""
    where, values = _where(filters)
    rows = self._all(f"SELECT e.id {_FROM}{_GRADED} AND l.passed IS NULL{where} ORDER BY random() LIMIT ?", [*values, len(seen) + 1])
    return next((row["id"] for row in rows if row["id"] not in seen), None)

  def choices(self) -> dict[str, list[str]]:
    """Families and tasks to offer, by name."""
    names = lambda column: [r[0] for r in self._all(f"SELECT DISTINCT {column} FROM episodes LIMIT {MOST_CHOICES}")]
    return {"families": sorted(names("family")), "tasks": sorted(names("task_id"))}


def shown(steps: list[dict[str, Any]], screens: ScreenStore, blind: bool) -> list[dict[str, Any]]:
  """Step rows of the store as the page shows them. blind: without push, value and notes, which would give the verdict away."""
  out = []
  for s in steps:
    action, size = s["action"], picture_size(screens, s["screen"])
    args = action["args"] if isinstance(action.get("args"), dict) else {}
    points = [p for p in (_point(s["point"]), _point(args.get("end"))) if p]
    logp = [x for x in s["sampled"].get("logp", ()) if isinstance(x, int | float)]
    step = {
      "n": s["step"] + 1, "screen": s["screen"], "size": size, "text": s["text"], "thought": action.get("thought", ""),
      "action": action.get("kind", "unreadable"), "args": args, "unreadable": action.get("unreadable", ""), "points": points,
      "outside": bool(size) and any(not (0 <= x < size[0] and 0 <= y < size[1]) for x, y in points),
      "tokens": s["agent_tokens"], "logp": math.fsum(logp) if logp else None, "token_logp": logp,
      "versions": sorted({str(v) for v in s["sampled"].get("version", ())}), "think": s["think_seconds"], "env": s["env_seconds"],
      "push": None, "value": None, "notes": {},
    }  # fmt: skip
    if not blind:
      notes = s["notes"]
      step |= {"push": _number(notes.get("advantage")), "value": _number(notes.get("value")), "notes": notes}
    out.append(step)
  return out


def final(row: Mapping[str, Any], screens: ScreenStore) -> dict[str, Any] | None:
  """The picture after the last action, if it was kept."""
  return {"screen": row["final_screen"], "size": picture_size(screens, row["final_screen"])} if row["final_screen"] else None


def value_line(steps: list[dict[str, Any]], last: float | None, width: int = 600, height: int = 90) -> dict[str, Any] | None:
  """The critic's chance of success before each step (and, last, on the final screen) as points of an SVG; None where none is stored."""
  values = [(i, s["value"]) for i, s in enumerate(steps) if s["value"] is not None]
  if last is not None and values:
    values.append((len(steps), last))
  if not values:
    return None
  across, up = (width - 20) / max(values[-1][0], 1), height - 20
  dots = [{"n": i + 1, "x": round(10 + i * across, 1), "y": round(10 + (1 - min(max(v, 0), 1)) * up, 1), "value": v} for i, v in values]
  return {"width": width, "height": height, "dots": dots, "line": " ".join(f"{d['x']},{d['y']}" for d in dots)}


def picture_size(screens: ScreenStore, ref: str) -> tuple[int, int] | None:
  """(width, height) of a stored picture from its first bytes; None where it is missing or no PNG."""
  try:
    with open(screens.path(ref), "rb") as f:
      head = f.read(24)
  except (OSError, ValueError):
    return None
  return struct.unpack(">II", head[16:24]) if len(head) == 24 and head[1:4] == b"PNG" else None


def _number(x: Any) -> float | None:
  return float(x) if isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e300 else None


def _point(value: Any) -> tuple[float, float] | None:
  """(x, y), or None for whatever else a record of unknown origin holds there."""
  if not isinstance(value, list | tuple) or len(value) != 2:
    return None
  x, y = (_number(v) for v in value)
  return None if x is None or y is None else (x, y)
