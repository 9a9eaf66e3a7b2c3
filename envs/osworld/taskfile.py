"""OSWorld's task files, as users have them: evaluation_examples/examples/<domain>/<id>.json (xlang-ai/OSWorld, 369 tasks).

`parse` reads one and checks all that can be known before a computer starts: fields, setup steps, the evaluator's lists, placeholders.
What is wrong is one line that names the file. Whether a task can be run with what is at hand is `envs.osworld.hand.why_not`'s answer.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import stat
from collections.abc import Iterator
from typing import Any

from envs.osworld.lease import inside

PLACEHOLDERS = ("CLIENT_PASSWORD", "SCREEN_WIDTH", "SCREEN_HEIGHT", "SCREEN_WIDTH_HALF", "SCREEN_HEIGHT_HALF")
PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Z]+(?:_[A-Z]+)+)\}")  # "${HOME_DIR}" is the shell's
MAX_BYTES = 4 << 20  # of a task file
MAX_DEPTH = 50  # of objects and lists in one another; a task of the benchmark has 9
UNWRITABLE = re.compile("[\0\ud800-\udfff]")  # half of a surrogate pair, and what ends a text in C

# setup type -> (parameters it must have, parameters it may have)
STEPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
  "download": (("files",), ()),
  "upload_file": (("files",), ()),
  "launch": (("command",), ("shell",)),
  "open": (("path",), ()),
  "execute": (("command",), ("shell", "stdout", "stderr", "until")),
  "command": (("command",), ("shell", "stdout", "stderr", "until")),
  "execute_with_verification": (("command",), ("verification", "max_wait_time", "check_interval", "shell")),
  "sleep": (("seconds",), ()),
  "activate_window": (("window_name",), ("strict", "by_class")),
  "close_window": (("window_name",), ("strict", "by_class")),
  "change_wallpaper": (("path",), ()),
  "chrome_open_tabs": (("urls_to_open",), ()),
  "chrome_close_tabs": (("urls_to_close",), ()),
  "googledrive": (("settings_file", "operation", "args"), ()),
  "login": (("settings_file", "platform"), ()),
  "update_browse_history": (("history",), ()),
  "proxy": ((), ("client_password",)),
  "replay": (("trajectory",), ()),
  "act": (("action_seq",), ()),
}


@dataclasses.dataclass(frozen=True)
class Check:
  """One metric of an evaluator. result, expected: what a getter is asked for ({"type": ...}), or None."""

  func: str
  result: dict | None
  expected: dict | None
  options: dict


@dataclasses.dataclass(frozen=True)
class TaskFile:
  """One task. config, postconfig: setup steps, {"type", "parameters"}; conj: "and" or "or"; said: the file's own object."""

  id: str
  instruction: str
  domain: str
  config: tuple[dict, ...]
  checks: tuple[Check, ...]
  conj: str
  postconfig: tuple[dict, ...]
  said: dict[str, Any]

  @property
  def infeasible(self) -> bool:
    return self.checks[0].func == "infeasible"

  def urls(self) -> Iterator[str]:
    """Of every file that comes from outside: setup downloads, and what results are compared with."""
    for step in (*self.config, *self.postconfig):
      if step["type"] == "download":
        yield from (file["url"] for file in step["parameters"]["files"])
    for check in self.checks:
      for getter in (check.result, check.expected):
        if getter and getter["type"] == "cloud_file":
          path = getter.get("path") or []  # the getter's own check says that it lacks one
          yield from [path] if isinstance(path, str) else path


def parse(said: Any, where: str, domain: str = "") -> TaskFile:
  """The task that a JSON object is. where: the file's name, for errors. ValueError, one line."""
  if not isinstance(said, dict):
    raise ValueError(f"{where}: wanted a JSON object, got {type(said).__name__}")
  _plain(said, where)
  for name in ("id", "instruction"):
    if not isinstance(said.get(name), str) or not said[name].strip():
      raise ValueError(f"{where}: {name} is {said.get(name)!r:.60}, wanted a text")
  if not said["id"].isprintable():
    raise ValueError(f"{where}: id is {said['id']!r:.60}, wanted a text of one line: it names the task in tables and files")
  evaluator = said.get("evaluator")
  if not isinstance(evaluator, dict) or not evaluator.get("func"):
    raise ValueError(f"{where}: there is no evaluator with a func: nothing could score this task")
  conj = evaluator.get("conj", "and")
  if conj not in ("and", "or"):
    raise ValueError(f"{where}: evaluator.conj is {conj!r:.60}, wanted 'and' or 'or'")
  config = _steps(said.get("config") or [], f"{where}: config")
  postconfig = _steps(evaluator.get("postconfig") or [], f"{where}: evaluator.postconfig")
  return TaskFile(said["id"], said["instruction"].strip(), domain, config, _checks(evaluator, where), conj, postconfig, said)


def _plain(said: dict, where: str) -> None:
  """ValueError for what no guest, no file and no record could take in the middle of an episode."""
  level, depth = [said], 0
  while level := [one for one in level if isinstance(one, (dict, list, str))]:
    if (depth := depth + 1) > MAX_DEPTH:
      raise ValueError(f"{where}: objects and lists are nested more than {MAX_DEPTH} deep")
    if found := next((text for text in level if isinstance(text, str) and UNWRITABLE.search(text)), None):
      raise ValueError(f"{where}: {found!r:.60} has a NUL or half of a surrogate pair, which no file and no command takes")
    level = [part for one in level if not isinstance(one, str) for part in ((*one, *one.values()) if isinstance(one, dict) else one)]


def _checks(evaluator: dict, where: str) -> tuple[Check, ...]:
  """func, result, expected and options are one each, or lists of one length in which null may stand."""
  several = isinstance(evaluator["func"], list)
  funcs = evaluator["func"] if several else [evaluator["func"]]
  if not all(isinstance(func, str) for func in funcs):
    raise ValueError(f"{where}: evaluator.func is {evaluator['func']!r:.80}, wanted the name of a metric, or a list of them")
  columns = {}
  for name in ("result", "expected", "options"):
    value = evaluator.get(name)
    values = value if several and isinstance(value, list) else [value or None] * len(funcs) if not value or not several else None
    if values is None or len(values) != len(funcs):
      raise ValueError(f"{where}: evaluator.{name} wants a list of {len(funcs)}, one for each func")
    for one in values:
      if one is not None and not isinstance(one, dict):
        raise ValueError(f"{where}: evaluator.{name} has {one!r:.60}, wanted an object or null")
      if name != "options" and one and not isinstance(one.get("type"), str):
        raise ValueError(f"{where}: evaluator.{name} has no type of getter: {str(one)[:60]}")
      if name != "options" and one and one["type"] in ("vm_file", "cloud_file"):
        _paths(one, f"{where}: evaluator.{name}")
    columns[name] = [one or None for one in values]
  if "infeasible" in funcs and len(funcs) > 1:
    raise ValueError(f"{where}: infeasible stands alone, got it among {len(funcs)} metrics")
  for func, result in zip(funcs, columns["result"]):
    if func != "infeasible" and result is None:
      raise ValueError(f"{where}: metric {func} has no result to look at")
  rows = zip(funcs, columns["result"], columns["expected"], columns["options"])
  return tuple(Check(func, result, expected, options or {}) for func, result, expected, options in rows)


def _paths(getter: dict, at: str) -> None:
  for name in ("path", "dest"):
    given = getter.get(name, "")
    if not all(isinstance(one, str) for one in (given if isinstance(given, list) else [given])):
      raise ValueError(f"{at}: {name} of {getter['type']} is {given!r:.60}, wanted a text or a list of texts")


def _steps(steps: Any, where: str) -> tuple[dict, ...]:
  if not isinstance(steps, list):
    raise ValueError(f"{where} is a {type(steps).__name__}, wanted a list of setup steps")
  for number, step in enumerate(steps):
    at = f"{where}[{number}]"
    if not isinstance(step, dict) or not isinstance(step.get("type"), str) or not isinstance(step.get("parameters", {}), dict):
      raise ValueError(f"{at}: wanted a type and its parameters, got {step!r:.60}")
    if step["type"] not in STEPS:
      raise ValueError(f"{at}: unknown setup type {step['type']!r:.60}; known: {', '.join(STEPS)}")
    _parameters(step["type"], step.get("parameters", {}), at)
  return tuple({"type": step["type"], "parameters": step.get("parameters", {})} for step in steps)


def _parameters(kind: str, given: dict, at: str) -> None:
  needed, allowed = STEPS[kind]
  if missing := [name for name in needed if name not in given]:
    raise ValueError(f"{at}: {kind} lacks {', '.join(missing)}")
  if strange := [name for name in given if name not in (*needed, *allowed)]:
    raise ValueError(f"{at}: {kind} has no parameter {', '.join(strange)}; it has {', '.join((*needed, *allowed))}")
  text = lambda value: isinstance(value, str) and bool(value)
  if "command" in needed:
    command = given["command"]
    if not text(command) and not (isinstance(command, list) and command and all(isinstance(word, str) for word in command)):
      raise ValueError(f"{at}: command is {command!r:.60}, wanted a text or a list of texts")
    placeholders(command, at)
  for name in ("path", "window_name"):
    if name in needed and not text(given[name]):
      raise ValueError(f"{at}: {name} is {given[name]!r:.60}, wanted a text")
  if kind in ("download", "upload_file"):
    keys = ("url", "path") if kind == "download" else ("local_path", "path")
    good = isinstance(given["files"], list) and all(isinstance(f, dict) and all(text(f.get(k)) for k in keys) for f in given["files"])
    if not good:
      raise ValueError(f"{at}: files wants a list of objects with {' and '.join(keys)}")
  for name in ("stdout", "stderr"):
    if not isinstance(given.get(name) or "", str):
      raise ValueError(f"{at}: {name} is {given[name]!r:.60}, wanted the name of a file in the cache")
  for name in ("seconds", "max_wait_time", "check_interval"):
    value = given.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:  # not a number is not
      raise ValueError(f"{at}: {name} is {value!r:.60}, wanted 0 or more")
  verification = given.get("verification") or {}
  if not (isinstance(verification, dict) and all(isinstance(value, str) for value in verification.values())):
    raise ValueError(f"{at}: verification is {verification!r:.60}, wanted an object of texts: window_exists, command_success")
  kinds = {"returncode": int, "stdout": str, "stderr": str}
  if (until := given.get("until")) and not (
    isinstance(until, dict) and until.keys() <= kinds.keys() and all(isinstance(until[name], kinds[name]) for name in until)
  ):
    raise ValueError(f"{at}: until is {until!r:.60}, wanted returncode (a whole number), stdout or stderr (texts)")


def placeholders(command: str | list[str], at: str) -> set[str]:
  """The placeholders of a command; ValueError for one that nobody knows."""
  found = {name for word in ([command] if isinstance(command, str) else command) for name in PLACEHOLDER.findall(word)}
  if strange := sorted(found - set(PLACEHOLDERS)):
    raise ValueError(f"{at}: unknown placeholder {{{strange[0]}}}; known: {', '.join(PLACEHOLDERS)}")
  return found


def fill(command: str | list[str], values: dict[str, str], at: str) -> str | list[str]:
  """The command with every placeholder replaced. ValueError where one has no value."""
  for name in sorted(placeholders(command, at)):
    if not values.get(name):
      raise ValueError(f"{at}: placeholder {{{name}}} has no value" + (": set env.password" if name == "CLIENT_PASSWORD" else ""))
  one = lambda word: PLACEHOLDER.sub(lambda found: values[found[1]], word)
  return one(command) if isinstance(command, str) else [one(word) for word in command]


def read(path: str | pathlib.Path) -> TaskFile:
  """A task of a file; its domain is its folder's name. ValueError, one line."""
  path = pathlib.Path(path)
  try:
    there = path.stat()
    text = path.read_text(encoding="utf-8") if stat.S_ISREG(there.st_mode) and there.st_size <= MAX_BYTES else ""
  except OSError as error:
    raise ValueError(f"{path}: {error.strerror}") from None
  except UnicodeDecodeError as error:
    raise ValueError(f"{path.name}: not a JSON file: {str(error)[:80]}") from None
  if not stat.S_ISREG(there.st_mode):  # a pipe would be waited for
    raise ValueError(f"{path.name}: no plain file")
  if there.st_size > MAX_BYTES:
    raise ValueError(f"{path.name}: {there.st_size} bytes, wanted a task file of at most {MAX_BYTES}")
  try:
    said = json.loads(text)
  except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a plain ValueError
    raise ValueError(f"{path.name}: not a JSON file: {str(error)[:80]}") from None
  return parse(said, path.name, path.parent.name)


def find(folder: str | pathlib.Path, index: str = "") -> list[pathlib.Path]:
  """The task files of a folder as the benchmark lays it out: FOLDER/examples/<domain>/<id>.json. index: a file in FOLDER,
  {domain: [ids]}, that chooses among them; "": all there are. ValueError, one line."""
  folder = pathlib.Path(folder).expanduser()
  root = folder / "examples" if (folder / "examples").is_dir() else folder
  if not root.is_dir():
    raise ValueError(f"env.tasks is {str(folder)!r}, and there is no such folder")
  if not index:
    found = sorted(root.glob("*/*.json"))
    if not found:
      raise ValueError(f"env.tasks is {str(folder)!r}, wanted examples/<domain>/<id>.json in it")
    return found
  try:
    chosen = json.loads((folder / index).read_text(encoding="utf-8"))
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in chosen.values()):
      raise TypeError
    names = [f"{domain}/{name}.json" for domain, names in chosen.items() for name in names]
    if not all(map(inside, names)):
      raise ValueError("a name that leads out of the folder")
    return [root / name for name in names]
  except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
    raise ValueError(f"env.index is {index!r}: wanted a file of {folder} with lists of ids by domain ({type(error).__name__})") from None
