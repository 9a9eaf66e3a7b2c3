"""One flat JSON object, `{"name": value, ...}`, whose values are strings, numbers or true and false: what phone agents write.

Stricter than a JSON reader where those are lenient (a name given twice, nesting, null) and as linear as the rest of lex.py.
"""

from __future__ import annotations

import json
import re

from envs.grammars.lex import FORBIDDEN, MAX_ARGUMENTS, NUMBER, Bad, Written, shown

_SPACE = r"[ \t\n]*+"
_STRING = r'"[^"\\\n\t]*+(?:\\.[^"\\\n\t]*+)*"'
_PAIR = re.compile(rf"{_SPACE}({_STRING}){_SPACE}:{_SPACE}(?:({_STRING})|({NUMBER})|(true|false)){_SPACE}([,}}])")
_OPEN = re.compile(rf"{_SPACE}\{{")


def read_object(text: str) -> dict[str, str | Written | bool]:
  """The one object that `text` is; Bad if it is anything less or anything more."""
  head = _OPEN.match(text)
  if head is None:
    raise Bad(f"expected one JSON object, got {shown(text)}")
  found: dict[str, str | Written | bool] = {}
  at, closed = head.end(), False
  while not closed:
    pair = _PAIR.match(text, at)
    if pair is None:
      raise Bad(f"cannot read the JSON at {shown(text[at : at + 60])}")
    name, string, number, truth, mark = pair.groups()
    name = _unescape(name)
    if name in found:
      raise Bad(f"{name!r:.40} is given twice")
    if len(found) == MAX_ARGUMENTS:
      raise Bad(f"more than {MAX_ARGUMENTS} names")
    found[name] = _unescape(string) if string is not None else Written(number) if number is not None else truth == "true"
    at, closed = pair.end(), mark == "}"
  if text[at:].strip(" \t\n"):
    raise Bad(f"text after the action: {shown(text[at:].strip())}")
  return found


def _unescape(string: str) -> str:
  try:
    text = json.loads(string)
  except ValueError:
    raise Bad(f"not a JSON string: {shown(string)}") from None
  if (forbidden := FORBIDDEN.search(text)) is not None:  # \u0000 gets past the look at the raw text
    raise Bad(f"control character U+{ord(forbidden[0]):04X} in a string")
  return text


def write_object(values: dict) -> str:
  """The canonical spelling; numbers as they were written, or an int as it is."""
  return "{" + ", ".join(f"{write_string(name)}: {_write(value)}" for name, value in values.items()) + "}"


def _write(value) -> str:
  if isinstance(value, bool):
    return "true" if value else "false"
  return write_string(value) if isinstance(value, str) else str(value)


def write_string(text: str) -> str:
  return json.dumps(text, ensure_ascii=False)
