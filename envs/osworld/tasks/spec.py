"""What a family of tasks gives for one seed, and the few steps, checks and keys that families share."""

from __future__ import annotations

import dataclasses
from typing import Any

from envs.grammars.lex import quote

HOME = "/home/user"
DESKTOP, DOCUMENTS = f"{HOME}/Desktop", f"{HOME}/Documents"
URL = "practice://tasks/"  # files of these tasks; env.mirrors need not name it


@dataclasses.dataclass(frozen=True)
class Spec:
  """files: name -> content, each uploaded to its place. script: what solves it, in the desktop grammar, its end left out. warm: what is
  done before a saved start of the task is taken (env.start=task), so that the first save of an office program is behind it."""

  instruction: str
  config: tuple[dict, ...]
  evaluator: dict[str, Any]
  script: tuple[str, ...]
  files: dict[str, tuple[str, bytes]] = dataclasses.field(default_factory=dict)  # name -> (where in the guest, content)
  warm: tuple[str, ...] = ()


def launch(*command: str) -> dict:
  return {"type": "launch", "parameters": {"command": list(command)}}


def shell(line: str) -> dict:
  """A line for the shell that must succeed."""
  return {"type": "execute", "parameters": {"command": line, "shell": True, "until": {"returncode": 0}}}


def window(title: str) -> dict:
  """Waits for a window and brings it to the front."""
  return {"type": "activate_window", "parameters": {"window_name": title}}


def keys(*names: str) -> tuple[str, ...]:
  return tuple(f"Action: hotkey(key={quote(name, chr(39))})" for name in names)


def write(text: str) -> str:
  """Types; a newline at the end presses ENTER."""
  return f"Action: type(content={quote(text, chr(39))})"


def fetched(path: str, func: str, rules: Any) -> dict:
  """An evaluator that fetches one file and holds it against rules."""
  name = path.rpartition("/")[2]
  return {"func": func, "result": {"type": "vm_file", "path": path, "dest": name}, "expected": {"type": "rule", "rules": rules}}


def printed(command: str, include: list[str], exclude: list[str] = ()) -> dict:
  """An evaluator that looks at what a line of the shell prints."""
  rules = {"include": list(include), "exclude": list(exclude)}
  result = {"type": "vm_command_line", "command": command, "shell": True}
  return {"func": "check_include_exclude", "result": result, "expected": {"type": "rule", "rules": rules}}
