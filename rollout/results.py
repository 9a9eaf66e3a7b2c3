"""What an evaluation keeps of each episode: a row that every score is worked out from, on disk as soon as the episode ends."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from core.metrics import read_jsonl
from core.schema import Episode
from core.screens import write_atomic


def row_of(episode: Episode) -> dict[str, Any]:
  """Task, try, verdict, end, steps; and of the simulators the pop-up that came, with the nats of each action beneath one and without."""
  nats = lambda flag: [float(s.notes["entropy"]) for s in episode.steps if bool(s.notes.get("popup")) == flag and "entropy" in s.notes]
  return {
    "task": episode.task_id, "try": episode.try_index, "success": episode.success, "scored": episode.scored,
    "end_cause": episode.end_cause, "steps": len(episode.steps), "popup": episode.notes.get("popup", "").split("/")[0] or "none",
    "nats_popup": nats(True), "nats_plain": nats(False),
  }  # fmt: skip


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
    row = row_of(episode)
    with open(self.path, "ab") as out:
      out.write((json.dumps(row) + "\n").encode())
    self.fresh += 1
    self._keep(row)

  def first(self, tries: int) -> list[dict[str, Any]]:
    """Rows of the first `tries` tries of every task."""
    return [row for (_, index), row in sorted(self.rows.items()) if index < tries]

  def missing(self, task: str, index: int) -> bool:
    """Whether the try is still to be run: it never was, or the computers broke."""
    return not self.rows.get((task, index), {"scored": False})["scored"]
