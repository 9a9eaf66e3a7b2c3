"""Trajectory records and demonstrations read from JSON lines and pictures, each fault one line with file, line and step.

Needed: task_id, reward (or rewards; null for an infra error) and steps, each with screen and text. The rest has defaults: a
demonstration by a person has no policy version. `screen` is a path from the folder of the file and may not leave it.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from core.schema import SUCCESS, UNREADABLE_REWARD, Action, End, Episode, Screen, Step, Unreadable

Parse = Callable[[str, tuple[int, int]], Action | Unreadable]  # (text, (width, height) of the picture)
_SAMPLED = ("tokens", "logp", "version")
_MISSING = object()


def read_trajectories(path: str | os.PathLike, parse: Parse | None = None) -> list[Episode]:
  """All episodes of a file. parse: reads a step's text where the record holds no action; without it such a step has
  Unreadable("not parsed") and only its text can be copied."""
  return list(iter_trajectories(path, parse))


def iter_trajectories(path: str | os.PathLike, parse: Parse | None = None) -> Iterator[Episode]:
  """One episode at a time, for files larger than memory."""
  path = pathlib.Path(os.path.abspath(path))
  if not path.is_file():
    raise ValueError(f"trajectory file {path} does not exist")
  with open(path, "rb") as f:
    for number, line in enumerate(f, 1):
      if line.strip():
        yield _Reader(path.parent, f"{path} line {number}", parse).episode(line, number)


def _no_constant(name: str) -> None:
  raise ValueError(f"{name} is no JSON number")


class _Reader:
  """Reads one line; `where` opens every error."""

  def __init__(self, root: pathlib.Path, where: str, parse: Parse | None):
    self.root = root
    self.where = where
    self.parse = parse
    self.screens: dict[str, Screen] = {}  # pictures of this episode by path

  def fail(self, problem: str) -> ValueError:
    return ValueError(f"{self.where}: {problem}")

  def field(self, holder: dict, name: str, kinds: type | tuple, default: Any = _MISSING, of: str = "the record") -> Any:
    value = holder.get(name, default)
    if value is _MISSING:
      raise self.fail(f"{of} has no field {name!r}; it has: {', '.join(map(str, holder)) or 'none'}")
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if value is not default and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
      names = " or ".join(k.__name__ for k in kinds)
      raise self.fail(f"field {name!r} of {of} is {json.dumps(value)[:60]}, wanted {names}")
    return value

  def episode(self, line: bytes, number: int) -> Episode:
    try:
      record = json.loads(line, parse_constant=_no_constant)
    except ValueError as e:  # JSONDecodeError, or bytes that are not UTF-8
      raise self.fail(f"not JSON: {e}") from e
    if not isinstance(record, dict):
      raise self.fail(f"holds {type(record).__name__}, wanted one JSON object a line")
    task = self.field(record, "task_id", (str, int))
    end, end_cause, rewards = self.ending(record)
    steps = self.field(record, "steps", list)
    if not steps and end != End.INFRA_ERROR:
      raise self.fail("field 'steps' is empty")
    nothing = type(None)
    return Episode(
      task_id=str(task), group=str(self.field(record, "group", (str, int), f"line{number}")),
      try_index=self.field(record, "episode", int, 0), seed=self.field(record, "seed", int, 0),
      steps=[self.step(s, h) for h, s in enumerate(steps, 1)], end=end, end_cause=end_cause, rewards=rewards, records=[],
      goal=self.field(record, "goal", str, ""), family=self.field(record, "family", str, ""),
      checker=self.field(record, "checker", str, ""), partial=self.field(record, "partial", (int, float, nothing), None),
      advantage=self.field(record, "advantage", (int, float, nothing), None),
      replayed=self.field(record, "replayed", bool, False), notes=self.field(record, "notes", dict, {}) | self.origin(record),
      step_limit=self.field(record, "step_limit", int, 0),
    )  # fmt: skip

  def origin(self, record: dict) -> dict[str, int]:
    """policy_version and update, for which Episode has no fields: its own versions stand in token records."""
    return {k: self.field(record, k, int) for k in ("policy_version", "update") if k in record}

  def ending(self, record: dict) -> tuple[End, str, dict[str, float]]:
    reward = self.field(record, "reward", (int, float, type(None)), _MISSING if "rewards" not in record else None)
    unreadable = reward == UNREADABLE_REWARD
    name = self.field(record, "end", str, "infra_error" if reward is None and not record.get("rewards") else "terminated")
    if name not in [e.value for e in End]:
      raise self.fail(f"field 'end' is {name!r}, wanted one of {', '.join(e.value for e in End)}")
    cause = self.field(record, "end_cause", str, "unreadable" if unreadable else "agent")
    default = {} if reward is None else {SUCCESS: 0.0, "unreadable": float(reward)} if unreadable else {SUCCESS: float(reward)}
    rewards = self.field(record, "rewards", dict, default)
    rewards = {k: float(self.field(rewards, k, (int, float), of="'rewards'")) for k in rewards}
    if name == End.INFRA_ERROR.value and rewards:
      raise self.fail("an infra_error has a reward; what could not be checked has none")
    if name != End.INFRA_ERROR.value and SUCCESS not in rewards:
      raise self.fail(f"an episode that ended as {name} has no reward")
    return End(name), cause, rewards

  def step(self, step: Any, h: int) -> Step:
    if not isinstance(step, dict):
      raise self.fail(f"step {h} is {json.dumps(step)[:60]}, wanted an object")
    of, nothing = f"step {h}", type(None)
    text = self.field(step, "text", str, of=of)
    screen = self.picture(self.field(step, "screen", str, of=of), h)
    tokens = self.field(step, "agent_tokens", int, 0, of)
    points = [self.field(step, k, (list, nothing), None, of) for k in ("raw_point", "point")]
    sampled = {k: self.field(step, k, list, of=of) for k in _SAMPLED if k in step}
    return Step(screen, text, self.action(step, text, screen, h), tokens, *[None if p is None else tuple(p) for p in points],
                float(self.field(step, "think_seconds", (int, float), 0.0, of)),
                float(self.field(step, "env_seconds", (int, float), 0.0, of)),
                self.field(step, "notes", dict, {}, of) | sampled)  # fmt: skip

  def action(self, step: dict, text: str, screen: Screen, h: int) -> Action | Unreadable:
    stored = self.field(step, "action", dict, None, f"step {h}")
    if stored is None:
      height, width = screen.pixels.shape[:2]
      return self.parse(text, (width, height)) if self.parse is not None else Unreadable("not parsed")
    try:
      return Unreadable(stored["unreadable"]) if "unreadable" in stored else Action(**stored)
    except TypeError as e:
      raise self.fail(f"field 'action' of step {h}: {e}") from e

  def picture(self, name: str, h: int) -> Screen:
    if name in self.screens:
      return self.screens[name]
    plain = os.path.normpath(name)
    if not name or os.path.isabs(plain) or plain.split(os.sep)[0] == ".." or "\0" in name:
      raise self.fail(f"picture {name!r} of step {h} is not a path inside {self.root}")
    path = self.root / plain
    try:
      with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGBA"))
    except FileNotFoundError as e:
      raise self.fail(f"picture {name} of step {h} is missing") from e
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as e:
      raise self.fail(f"picture {name} of step {h} cannot be read: {e}") from e
    if (pixels[..., 3] != 255).any():
      raise self.fail(f"picture {name} of step {h} is transparent in places; a screenshot is not")
    self.screens[name] = Screen.of(np.ascontiguousarray(pixels[..., :3]))
    return self.screens[name]
