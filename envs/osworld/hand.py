"""What is at hand on this machine, and whether a task can be run with it: decided when tasks are loaded, never in the middle of one."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pathlib
from collections.abc import Iterable, Iterator

from envs.osworld import taskfile
from envs.osworld.files import Files
from envs.osworld.getters import GETTERS, NEED_ACCOUNT, NEED_CHROME, NEED_HTTP, misfit
from envs.osworld.lease import inside
from envs.osworld.metrics import METRICS, metric
from envs.osworld.taskfile import TaskFile, placeholders

CHROME_STEPS = ("chrome_open_tabs", "chrome_close_tabs", "update_browse_history")
ACCOUNT_STEPS = ("googledrive", "login")
MISSING_STEPS = ("replay", "act")  # the benchmark names them and has not written them


@dataclasses.dataclass(frozen=True)
class Hand:
  """metrics, getters: of desktop-env, if env.evaluator has it. password: of the guest's user; uploads: folder of upload_file's files."""

  files: Files
  metrics: frozenset[str] = frozenset()
  getters: frozenset[str] = frozenset()
  password: str = ""
  uploads: str = ""

  def theirs(self, name: str) -> bool:
    """Whether a metric is computed by desktop-env; those built in never are."""
    return name not in METRICS and name in self.metrics


def looked_at(paths: Iterable[pathlib.Path], hand: Hand) -> Iterator[tuple[pathlib.Path, TaskFile | None, str]]:
  """Every task file, its task if it can be read, and in one line why it cannot be run. One that is wrong stops nothing but itself."""
  first: dict[str, pathlib.Path] = {}
  for path in paths:
    task = None
    try:
      task = taskfile.read(path)
      why = why_not(task, hand)
    except ValueError as error:
      why = str(error)
    if not why and (other := first.setdefault(task.id, path)) is not path:
      why = f"its id is that of {other.parent.name}/{other.name} too: an id names one task"
    yield path, task, " ".join(why.split())


def why_not(task: TaskFile, hand: Hand) -> str:
  """Why a task cannot be run here, in one line that says what to change; "" where it can."""
  for look in (_metrics, _getters, _steps, _files):
    if why := look(task, hand):
      return why
  return ""


def _metrics(task: TaskFile, hand: Hand) -> str:
  for check in task.checks:
    if check.func in METRICS and (why := _misfit(check)):
      return why
  unknown = sorted({check.func for check in task.checks} - METRICS.keys() - hand.metrics - {"infeasible"})
  if not unknown:
    return ""
  if hand.metrics:
    return f"unknown metric {', '.join(unknown)}: neither built in nor in this desktop-env"
  return f"unknown metric {', '.join(unknown)}: not built in; env.evaluator, an interpreter with desktop-env, may have it"


def _misfit(check: taskfile.Check) -> str:
  """Why a built-in metric cannot be called with what the task gives it; "" where it can."""
  given = ("a result",) if check.expected is None else ("a result", "what it is compared with")
  try:
    inspect.signature(metric(check.func)).bind(*given, **check.options)
  except TypeError as error:
    return f"metric {check.func} does not take what it is given: {error}"
  return ""


def _getters(task: TaskFile, hand: Hand) -> str:
  for check in task.checks:
    for config in (check.result, check.expected):
      if config is None:
        continue
      kind = config["type"]
      if kind in GETTERS:
        if why := misfit(config):
          return why
      elif kind in NEED_ACCOUNT:
        return f"getter {kind} needs a Google account"
      elif kind in NEED_CHROME:
        return f"getter {kind} needs Chrome's debugging port or the live web, which is not spoken"
      elif kind in NEED_HTTP and kind in hand.getters:
        return f"getter {kind} of desktop-env opens connections of its own, which its sandbox has not"
      elif kind not in hand.getters:
        more = "nor in this desktop-env" if hand.getters else "env.evaluator, an interpreter with desktop-env, may have it"
        return f"unknown getter {kind}: not built in; {more}"
  return ""


def _steps(task: TaskFile, hand: Hand) -> str:
  for step in (*task.config, *task.postconfig):
    kind, given = step["type"], step["parameters"]
    if kind in CHROME_STEPS:
      return f"setup step {kind} needs Chrome's debugging port, which is not spoken"
    if kind in ACCOUNT_STEPS:
      return f"setup step {kind} needs a Google account"
    if kind in MISSING_STEPS:
      return f"setup step {kind} is in nobody's code, the benchmark's included"
    if kind == "proxy":
      return "setup step proxy needs the benchmark's pool of proxies"
    if "command" in given and "CLIENT_PASSWORD" in placeholders(given["command"], kind) and not hand.password:
      return "placeholder {CLIENT_PASSWORD} has no value: set env.password"
    for name in ("stdout", "stderr"):
      if given.get(name) and not inside(given[name]):
        return f"setup step {kind}: {name} {given[name]!r:.60} is no name of a file in the cache"
    if kind == "upload_file" and not hand.uploads:
      return "setup step upload_file needs the folder of its files: env.uploads"
  if task.said.get("proxy"):
    return "it reaches live web sites through a proxy (proxy: true)"
  return ""


def _files(task: TaskFile, hand: Hand) -> str:
  missing = [url for url in dict.fromkeys(task.urls()) if hand.files.find(url) is None]
  if not missing:
    return ""
  more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
  return f"not on this machine: {missing[0]}{more} (env.mirrors or --mirror, or --prefetch)"


@functools.lru_cache(maxsize=4)
def foreign(python: str, memory: int, sandbox: str) -> tuple[frozenset[str], frozenset[str]]:
  """Metrics and getters that an interpreter's desktop-env has. Starts it once."""
  from envs.osworld.checker import Checker
  from envs.osworld.lease import Lease

  lease = Lease()
  checker = Checker(str(lease.folder), python, memory=memory, sandbox=sandbox)
  try:
    listed = checker.listed(theirs=True)
    return frozenset(listed["metrics"]), frozenset(listed["getters"])
  finally:
    checker.close()
    lease.close()
