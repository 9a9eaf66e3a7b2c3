"""Reading one call, `name(value, key=value)`, character by character. Nothing is ever evaluated and no text is rewritten.

Every pattern here uses possessive repeats (`*+`), which never give back what they took: reading is linear in the length
of the text, whatever the text is.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_ARGUMENTS = 8
SPACE = " \t\n"

# Control characters other than tab and newline, and lone surrogates: no keyboard types them, no file stores them.
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

# Groups are never possessive: Python 3.11.2 does not step back from one that fails half way, and read type(f"a") as type("a").
NUMBER = r"-?[0-9]{1,6}+(?:\.[0-9]{1,12}+)?"
_NAME = re.compile(r"[ \t\n]*+([A-Za-z_]++)[ \t\n]*+\(")
_EMPTY = re.compile(r"[ \t\n]*+\)")
_ARGUMENT = re.compile(
  r"[ \t\n]*+(?:([a-z_]++)[ \t\n]*+=)?[ \t\n]*+"
  r"(?:'([^'\\]*+(?:\\.[^'\\]*+)*)'" + r'|"([^"\\]*+(?:\\.[^"\\]*+)*)"' + rf"|({NUMBER})|([A-Za-z_]++))"
  r"[ \t\n]*+([,)])",
  re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


class Bad(ValueError):
  """Why a text is not exactly one action. Caught by envs.actions.parse, where it becomes Unreadable(reason)."""


class Written(float):
  """A number that remembers its spelling: "0.50" stays "0.50" when it is printed again."""

  def __new__(cls, text: str):
    number = super().__new__(cls, text)
    number.text = text
    return number

  def __repr__(self) -> str:
    return self.text

  __str__ = __repr__


class Argument(NamedTuple):
  """key: None for a positional argument. kind: "string" (unescaped text), "number" (Written) or "word" (a bare name)."""

  key: str | None
  kind: str
  value: str | Written


def starts_call(text: str) -> bool:
  return _NAME.match(text) is not None


def read_call(text: str) -> tuple[str, list[Argument]]:
  """The one call that `text` is, spaces around it aside; Bad if it is anything less or anything more."""
  head = _NAME.match(text)
  if head is None:
    raise Bad(f"expected one action, got {shown(text)}")
  arguments, at = [], head.end()
  closed = _EMPTY.match(text, at)
  if closed is not None:
    at = closed.end()
  while closed is None:
    found = _ARGUMENT.match(text, at)
    if found is None:
      raise Bad(f"{head[1]}: cannot read the argument at {shown(text[at : at + 60])}")
    arguments.append(_argument(found))
    if len(arguments) > MAX_ARGUMENTS:
      raise Bad(f"{head[1]}: more than {MAX_ARGUMENTS} arguments")
    at = found.end()
    closed = found if found[6] == ")" else None
  rest = text[at:].strip(SPACE)
  if rest:
    raise Bad(f"more than one action: {shown(rest)}" if starts_call(rest) else f"text after the action: {shown(rest)}")
  return head[1], arguments


def _argument(found: re.Match) -> Argument:
  key, single, double, number, word, _ = found.groups()
  if single is not None or double is not None:
    return Argument(key, "string", unescape(single if single is not None else double))
  return Argument(key, "number", Written(number)) if number is not None else Argument(key, "word", word)


def unescape(text: str) -> str:
  r"""The text between the quotes. \n \t \\ \' \" are escapes; any other backslash is itself, so C:\dir is C:\dir."""
  return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[0]), text)


def quote(text: str, mark: str) -> str:
  """`text` between `mark` quotes, so that unescape gives it back. mark: one quote character, single or double."""
  text = text.replace("\\", "\\\\").replace(mark, "\\" + mark).replace("\n", "\\n").replace("\t", "\\t")
  return mark + text + mark


def typed(text: str, enter: bool = False) -> dict:
  """What a typing action does. A text that ends in a newline means: type it without that newline, then press ENTER.

  Exactly one newline is taken off the end; newlines before it are typed. enter: the grammar said ENTER in another way,
  and the text is meant as it stands.
  """
  if not enter and text.endswith("\n"):
    return {"text": text[:-1], "enter": True}
  return {"text": text, "enter": enter}


def untyped(args: dict) -> str:
  """The inverse of `typed` for grammars that say ENTER by a newline."""
  return args["text"] + ("\n" if args.get("enter") else "")


def strings(kind: str, arguments: list[Argument], count: int) -> list[str]:
  """Exactly `count` positional strings."""
  if len(arguments) != count or any(a.kind != "string" or a.key is not None for a in arguments):
    raise Bad(f"{kind}: expected {count} quoted text(s) and nothing else")
  return [a.value for a in arguments]


def keywords(kind: str, arguments: list[Argument], known: dict[str, bool], aliases: dict[str, str]) -> dict[str, str]:
  """Quoted keyword arguments by canonical name, in the order they were written. known: name -> is it required."""
  found: dict[str, str] = {}
  for argument in arguments:
    name = aliases.get(argument.key, argument.key)
    if argument.key is None or argument.kind != "string" or name not in known:
      wanted = ", ".join(known) or "no argument"
      raise Bad(f"{kind}: wanted quoted {wanted}, got {f'{argument.key}=' if argument.key else ''}{argument.value!r:.40}")
    if name in found:
      raise Bad(f"{kind}: {name} is given twice")
    found[name] = argument.value
  missing = [name for name, required in known.items() if required and name not in found]
  if missing:
    raise Bad(f"{kind}: {', '.join(missing)} is missing")
  return found


def shown(text: str) -> str:
  """A short, printable piece of the text for one log line."""
  return repr(text[:40]) + ("..." if len(text) > 40 else "")
