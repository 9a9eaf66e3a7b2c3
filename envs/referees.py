"""Who sets a phone's task up and says whether it was done.

A referee has begin(phone, task), which shows the start screen; look(phone), notes about a step, for instruments; verdict(phone, task,
frames, texts), a score from 0 to 1, or CheckerFailed; close(). graded: whether scores between count as partial credit. keeps: how many of
the last frames a verdict reads. graded_by: the version of the judge that gave the last verdict, "" where a check did.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from core.schema import Task
from envs.errors import CheckerFailed
from envs.handset import Handset, quote
from envs.wire import to_plain

Judge = Callable[[Task, list[np.ndarray], list[str]], float | bool | None]


def score_of(value: Any, task: Task, who: str) -> float:
  """A verdict as a number; CheckerFailed if it is none: what cannot be told is never a fail."""
  if not isinstance(value, (bool, int, float)) or not 0 <= value <= 1:  # not a number is not between them
    raise CheckerFailed(f"{task.id}: {who} said {value!r:.100}, wanted a number from 0 to 1")
  return float(value)


def judged(judge: Judge, task: Task, frames: list[np.ndarray], texts: list[str]) -> tuple[float, str]:
  """(a judge's score, what is recorded as the grader); a function of a user's goes by its name."""
  score = score_of(judge(task, frames, texts), task, "the judge")
  return score, f"judge:{getattr(judge, 'version', getattr(judge, '__name__', type(judge).__name__))}"


def kept_for(judge: Judge | None) -> int:
  """How many of an episode's last frames it looks at; 2 where it does not say."""
  return 0 if judge is None else getattr(judge, "frames", 2)


class Practice:
  """The practice application of the test device (tests/envs/adb_device.py): the simulated phone. No other phone has it.

  popups: the rule of its pop-ups, plain values; drift: as in envs.sim.
  """

  graded, keeps = False, 0
  ROW = re.compile(r"^Row: 0 page=(\w+), popup=([\w/]*), passed=(true|false)$", re.MULTILINE)

  def __init__(self, popups: dict, drift: int):
    self.popups, self.drift, self._passed = popups, drift, False

  def begin(self, phone: Handset, task: Task) -> None:
    what = {"task": to_plain(task), "popups": self.popups, "drift": self.drift}
    phone.start({"activity": "practice/.Task", "extras": {"task": base64.b64encode(json.dumps(what).encode()).decode()}})

  def look(self, phone: Handset) -> dict:
    told = phone.shell("content query --uri content://practice/state")
    found = self.ROW.search(told)
    if found is None:
      raise CheckerFailed(f"the practice application said {told.strip()[:200]!r}")
    self._passed = found[3] == "true"
    return {"popup": found[2], "page": found[1]}

  def verdict(self, phone: Handset, task: Task, frames: list, texts: list[str]) -> float:
    """What the last look saw."""
    return float(self._passed)

  def close(self) -> None:
    pass


class Checks:
  """Tasks of a file. params: "start" (see Handset.start), "stop" and "clear" (packages), "check": {"activity": "package/.Name"} for
  what must be in front and {"settings": {"global/airplane_mode_on": "1"}} for the system's settings; all must hold.

  judge(task, last frames, action texts) -> a score, or None if it cannot tell: for tasks without a check.
  """

  graded = False

  def __init__(self, judge: Judge | None = None):
    self.judge, self.graded_by, self.keeps = judge, "", kept_for(judge)

  def begin(self, phone: Handset, task: Task) -> None:
    phone.clean(task.params.get("stop", []), task.params.get("clear", []))
    if "start" in task.params:
      phone.start(task.params["start"])

  def look(self, phone: Handset) -> dict:
    return {"popup": "", "page": phone.on_top()}

  def verdict(self, phone: Handset, task: Task, frames: list[np.ndarray], texts: list[str]) -> float:
    check, self.graded_by = task.params.get("check"), ""
    if check is None:
      if self.judge is None:
        raise CheckerFailed(f"{task.id} has no check, and there is no judge")
      score, self.graded_by = judged(self.judge, task, frames, texts)
      return score
    if "activity" in check and whole_name(phone.on_top()) != whole_name(check["activity"]):
      return 0.0
    for name, wanted in check.get("settings", {}).items():
      space, _, key = name.partition("/")
      if phone.shell(f"settings get {quote(space)} {quote(key)}").strip() != wanted:
        return 0.0
    return 1.0

  def close(self) -> None:
    pass


def whole_name(activity: str) -> str:
  """package/.Name as package/package.Name: both name one activity."""
  package, _, name = activity.partition("/")
  return f"{package}/{package}{name}" if name.startswith(".") else activity
