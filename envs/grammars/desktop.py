"""The desktop grammar: UI-TARS text. A thought, then `Action: click(start_box='(863,149)')`.

Where the action starts, in this order: the whole reply is one call; after the first "Action:" that begins a line; after
the first "Action:" that follows a space. From there to the end of the reply stands exactly one call. What is inside
quotes is typed text, never an action or a marker; what stands before the marker is the thought, whatever it looks like.
"""

from __future__ import annotations

import re

from core.schema import Action
from envs.grammars.keys import read_keys
from envs.grammars.lex import SPACE, Bad, keywords, quote, read_call, starts_call, typed, untyped
from envs.grammars.points import Frame, aimed, read_numbers, to_model_point, write_numbers

GRAMMAR, MODE = "desktop", "pixels"

# kind -> argument -> required
ARGUMENTS: dict[str, dict[str, bool]] = {
  "click": {"start_box": True},
  "left_double": {"start_box": True},
  "right_single": {"start_box": True},
  "drag": {"start_box": True, "end_box": True},
  "hotkey": {"key": True},
  "type": {"content": True},
  "scroll": {"start_box": False, "direction": True},
  "wait": {},
  "finished": {"content": False},
  "fail": {},
  "call_user": {},
}
KINDS = tuple(ARGUMENTS)
ENDS = ("finished", "fail", "call_user")
ALIASES = {"point": "start_box", "start_point": "start_box", "end_point": "end_box"}
DIRECTIONS = ("up", "down", "left", "right")

# (accepted, canonical)
SPELLINGS = (
  ("Thought: I open it.\nAction: click(start_box='(863,149)')", "Thought: I open it.\nAction: click(start_box='(863,149)')"),
  ("Thought: I open it. Action: click(start_box='(863,149)')", "Thought: I open it.\nAction: click(start_box='(863,149)')"),
  ("I open it.\n\nAction: click(start_box='(863,149)')\n", "Thought: I open it.\nAction: click(start_box='(863,149)')"),
  ("Action: click(start_box='(863,149)')", "Action: click(start_box='(863,149)')"),
  ("Action:click(start_box='(863,149)')", "Action: click(start_box='(863,149)')"),
  ("Action：click(start_box='(863,149)')", "Action: click(start_box='(863,149)')"),  # full-width colon
  ("click(start_box='(863,149)')", "click(start_box='(863,149)')"),
  ('click( start_box = "( 863 , 149 )" )', "click(start_box='(863,149)')"),
  ("click(start_box='(863.5,149.25)')", "click(start_box='(863.5,149.25)')"),
  ("click(start_box='[863,149]')", "click(start_box='(863,149)')"),
  ("click(start_box='<|box_start|>(863,149)<|box_end|>')", "click(start_box='(863,149)')"),
  ("click(point='<point>863 149</point>')", "click(start_box='(863,149)')"),
  ("click(start_point='(863,149)')", "click(start_box='(863,149)')"),
  ("click(start_box='[100,200,300,240]')", "click(start_box='(100,200,300,240)')"),  # a box: its centre
  ("click(start_box='(100,200,300,240)')", "click(start_box='(100,200,300,240)')"),
  ("click(start_box='<bbox>100 200 300 240</bbox>')", "click(start_box='(100,200,300,240)')"),
  ("left_double(start_box='(863,149)')", "left_double(start_box='(863,149)')"),
  ("right_single(start_box='(863,149)')", "right_single(start_box='(863,149)')"),
  ("drag(start_box='(689,493)', end_box='(710,495)')", "drag(start_box='(689,493)', end_box='(710,495)')"),
  (
    "drag(start_point='<point>689 493</point>', end_point='<point>710 495</point>')",
    "drag(start_box='(689,493)', end_box='(710,495)')",
  ),
  ("hotkey(key='ctrl z')", "hotkey(key='ctrl z')"),
  ("hotkey(key='Ctrl+Z')", "hotkey(key='Ctrl+Z')"),
  ('type(content="it\'s")', "type(content='it\\'s')"),
  ("type(content='two\nlines')", "type(content='two\\nlines')"),  # a raw newline inside quotes
  ("scroll(direction='down', start_box='(500,500)')", "scroll(direction='down', start_box='(500,500)')"),
  ("scroll(start_box='(500,500)', direction='left')", "scroll(start_box='(500,500)', direction='left')"),
  ("scroll(direction='up')", "scroll(direction='up')"),  # no point: the screen's centre
  ("wait()", "wait()"),
  ("finished()", "finished()"),
  ("finished(content='42')", "finished(content='42')"),
  ("fail()", "fail()"),
  ("call_user()", "call_user()"),
)
REFUSED = ("click('(863,149)')", "click(start_box=(863,149))", "click(start_box='863,149')", "click(start_box='(863 149)')")
REFUSED += ("click(start_box='(863,149)'", "click(start_box='(863,149))", "click(start_box='<point>863,149</point>')")
REFUSED += ("click(start_box='<|box_start|>(863,149)')", "click(start_box='(863,149,10)')", "click(start_box='(8e2,149)')")
REFUSED += ("click(863, 149)", "Click(start_box='(863,149)')", "click(start_box='(863,149)', point='(863,149)')")
REFUSED += ("scroll(direction='DOWN')", "scroll(start_box='(500,500)')", "wait(5)", "FAIL")
REFUSED += ("press(key='enter')", "hotkey(key='ctrl-z')")

_LINE = re.compile(r"^[ \t]*+Action[:：]", re.MULTILINE)
_WORD = re.compile(r"(?<![^ \t\n])Action[:：]")
_LABEL = re.compile(r"Thought[:：]")


def read(text: str, view: Frame) -> Action:
  first = None
  for thought, call, bare in _places(text):
    try:
      kind, args, model_args = _read_call(call, view)
    except Bad as bad:
      first = first or bad
    else:
      return Action(kind, args, ({"bare": True} if bare else {}) | model_args, GRAMMAR, thought)
  raise first or Bad("no action: wanted 'Action:' and one call")


def _places(text: str):
  """(thought, what should be one call, has it no marker) for each place where the action may start. At most one reads."""
  if starts_call(text):
    yield "", text, True
  line, word = _LINE.search(text), _WORD.search(text)
  for found in (line, word if word and (line is None or word.start() < line.start()) else None):
    if found is not None:
      thought = text[: found.start()].strip(SPACE)
      label = _LABEL.match(thought)
      yield thought[label.end() :].strip(SPACE) if label else thought, text[found.end() :], False


def _read_call(text: str, view: Frame) -> tuple[str, dict, dict]:
  kind, arguments = read_call(text)
  if kind not in ARGUMENTS:
    raise Bad(f"unknown action {kind!r:.40}")
  model_args = keywords(kind, arguments, ARGUMENTS[kind], ALIASES)
  for name in ("start_box", "end_box"):
    if name in model_args:
      model_args[name] = read_numbers(model_args[name])
  return kind, _args(kind, model_args, view), model_args


def _args(kind: str, model_args: dict, view: Frame) -> dict:
  if kind == "drag":
    return {"start": aimed(model_args["start_box"], view), "end": aimed(model_args["end_box"], view)}
  if kind == "scroll":
    if model_args["direction"] not in DIRECTIONS:
      raise Bad(f"scroll: direction is {model_args['direction']!r:.40}, wanted one of {', '.join(DIRECTIONS)}")
    middle = (view.screen[0] // 2, view.screen[1] // 2)
    point = aimed(model_args["start_box"], view) if "start_box" in model_args else middle
    return {"point": point, "direction": model_args["direction"]}
  if kind == "hotkey":
    return {"keys": read_keys(model_args["key"])}
  if kind == "type":
    return typed(model_args["content"])
  if kind == "finished":
    return {"text": model_args.get("content", "")}
  return {"point": aimed(model_args["start_box"], view)} if "start_box" in ARGUMENTS[kind] else {}


def derive(kind: str, args: dict, view: Frame) -> dict:
  """model_args for the given pixels and texts, as this grammar would write them."""
  if kind == "drag":
    return {"start_box": to_model_point(args["start"], view), "end_box": to_model_point(args["end"], view)}
  if kind == "hotkey":
    return {"key": " ".join(args["keys"])}
  if kind == "type":
    return {"content": untyped(args)}
  if kind == "finished":
    return {"content": args["text"]} if args.get("text") else {}
  point = {"start_box": to_model_point(args["point"], view)} if "point" in args else {}
  return point | ({"direction": args["direction"]} if kind == "scroll" else {})


def spell(kind: str, model_args: dict, thought: str) -> str:
  inside = []
  for name, value in model_args.items():
    if name != "bare":
      inside.append(f"{name}={quote(value if isinstance(value, str) else write_numbers(value), chr(39))}")
  call = f"{kind}({', '.join(inside)})"
  if thought:
    return f"Thought: {thought}\nAction: {call}"
  return call if model_args.get("bare") else f"Action: {call}"
