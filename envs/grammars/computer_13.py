"""computer_13: OSWorld's closed action space, one JSON object. `{"action_type": "CLICK", "x": 863, "y": 149}`

Parameters stand beside action_type or in an object "parameters", as the benchmark takes both; WAIT, DONE and FAIL may stand alone, without
an object. A fence (```json) may be around it; what stands before the fence is the thought. Points are pixels of the image that was shown.
"""

from __future__ import annotations

import json
import re
from typing import Any

from core.schema import Action
from envs.grammars import inputs
from envs.grammars.flat_json import write_string
from envs.grammars.lex import FORBIDDEN, NUMBER, SPACE, Bad, Written, shown, typed, untyped
from envs.grammars.points import Frame, to_model_point, to_screen_point

GRAMMAR, MODE = "computer_13", "pixels"
KINDS, ENDS = inputs.KINDS, inputs.ENDS
WORDS = ("WAIT", "DONE", "FAIL")
# action_type -> parameters; a name in brackets may be left out
WANTED: dict[str, tuple[str, ...]] = {
  "MOVE_TO": ("x", "y"),
  "CLICK": ("(button)", "(x)", "(y)", "(num_clicks)"),
  "MOUSE_DOWN": ("(button)",),
  "MOUSE_UP": ("(button)",),
  "RIGHT_CLICK": ("(x)", "(y)"),
  "DOUBLE_CLICK": ("(x)", "(y)"),
  "DRAG_TO": ("x", "y"),
  "SCROLL": ("dx", "dy"),
  "TYPING": ("text",),
  "PRESS": ("key",),
  "KEY_DOWN": ("key",),
  "KEY_UP": ("key",),
  "HOTKEY": ("keys",),
  "WAIT": (),
  "DONE": (),
  "FAIL": (),
}

# (accepted, canonical)
SPELLINGS = (
  ('{"action_type": "CLICK", "x": 863, "y": 149}', '{"action_type": "CLICK", "x": 863, "y": 149}'),
  ('{"action_type":"CLICK","parameters":{"x":863,"y":149}}', '{"action_type": "CLICK", "x": 863, "y": 149}'),
  ('{"y": 149.5, "x": 863, "action_type": "CLICK"}', '{"action_type": "CLICK", "x": 863, "y": 149.5}'),
  ('```json\n{"action_type": "CLICK", "x": 863, "y": 149}\n```', '{"action_type": "CLICK", "x": 863, "y": 149}'),
  ('I open it.\n```\n{"action_type": "WAIT"}\n```', "I open it.\n```json\nWAIT\n```"),
  ('{"action_type": "CLICK"}', '{"action_type": "CLICK"}'),  # where the pointer is
  ('{"action_type": "CLICK", "button": "left", "num_clicks": 1}', '{"action_type": "CLICK"}'),
  (
    '{"action_type": "CLICK", "x": 1, "y": 2, "button": "middle", "num_clicks": 3}',
    '{"action_type": "CLICK", "button": "middle", "x": 1, "y": 2, "num_clicks": 3}',
  ),
  ('{"action_type": "RIGHT_CLICK", "x": 1, "y": 2}', '{"action_type": "RIGHT_CLICK", "x": 1, "y": 2}'),
  ('{"action_type": "CLICK", "x": 1, "y": 2, "num_clicks": 2}', '{"action_type": "DOUBLE_CLICK", "x": 1, "y": 2}'),
  ('{"action_type": "MOVE_TO", "x": 1, "y": 2}', '{"action_type": "MOVE_TO", "x": 1, "y": 2}'),
  ('{"action_type": "MOUSE_DOWN"}', '{"action_type": "MOUSE_DOWN", "button": "left"}'),
  ('{"action_type": "DRAG_TO", "x": 1, "y": 2}', '{"action_type": "DRAG_TO", "x": 1, "y": 2}'),
  ('{"action_type": "SCROLL", "dx": 0, "dy": -3}', '{"action_type": "SCROLL", "dx": 0, "dy": -3}'),
  ('{"action_type": "TYPING", "text": "caf\\u00e9\\n"}', '{"action_type": "TYPING", "text": "café\\n"}'),
  ('{"action_type": "PRESS", "key": "Return"}', '{"action_type": "PRESS", "key": "enter"}'),
  ('{"action_type": "KEY_DOWN", "key": "ctrlleft"}', '{"action_type": "KEY_DOWN", "key": "ctrl"}'),
  ('{"action_type": "HOTKEY", "keys": ["ctrl", "S"]}', '{"action_type": "HOTKEY", "keys": ["ctrl", "s"]}'),
  ("WAIT", "WAIT"),
  (" DONE\n", "DONE"),
  ('{"action_type": "FAIL"}', "FAIL"),
)
REFUSED = ('{"action_type": "CLICK", "x": 863}', '{"action_type": "CLICK", "x": "863", "y": "149"}', '{"action_type": "click"}')
REFUSED += ('{"action_type": "CLICK", "x": 1, "y": 2, "button": "fourth"}', '{"action_type": "CLICK", "num_clicks": 1.5}')
REFUSED += ('{"action_type": "SCROLL", "dx": 0}', '{"action_type": "TYPING", "text": 5}', '{"action_type": "PRESS", "key": "ctrl+s"}')
REFUSED += ('{"action_type": "HOTKEY", "keys": "ctrl s"}', '{"action_type": "HOTKEY", "keys": []}', '{"action_type": "SLEEP"}')
REFUSED += ('{"action_type": "WAIT"} {"action_type": "WAIT"}', '[{"action_type": "WAIT"}]', '{"action_type": "WAIT", "x": 1}', "wait")
REFUSED += ('{"action_type": "MOVE_TO", "x": 1, "x": 2, "y": 3}', '{"action_type": "MOVE_TO", "x": NaN, "y": 3}', "DONE.", "Action: WAIT")

_FENCE = re.compile(r"```(?:json)?[ \t]*+\n?")
_NUMBER = re.compile(NUMBER)


def read(text: str, view: Frame) -> Action:
  text, thought = text.strip(SPACE), ""
  if (fence := _FENCE.search(text)) is not None and not text.startswith("{"):
    if not text.endswith("```") or len(text) - 3 < fence.end():
      raise Bad("a fence that is not closed at the end")
    thought, text = text[: fence.start()].strip(SPACE), text[fence.end() : -3].strip(SPACE)
  said = {"action_type": text} if text in WORDS else _object(text)
  name = said.pop("action_type", None)
  if isinstance(inner := said.get("parameters"), dict) and len(said) == 1:
    said = inner
  if not isinstance(name, str) or name not in WANTED:
    raise Bad(f"action_type is {name!r:.40}, wanted one of {', '.join(WANTED)}")
  names = [n.strip("()") for n in WANTED[name]]
  if not {n for n in WANTED[name] if not n.startswith("(")} <= said.keys() <= set(names):
    raise Bad(f"{name}: wanted {', '.join(WANTED[name]) or 'nothing else'}, got {', '.join(said) or 'nothing'}")
  point = _point(name, said, view)
  kind, args = _meant(name, said, to_screen_point(point, view) if point else None)
  return Action(kind, args, inputs.told(args) | ({} if point is None else {"point": point}), GRAMMAR, thought)


def _object(text: str) -> dict[str, Any]:
  def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in items}) < len(items):
      raise Bad("a name is given twice")
    return dict(items)

  def number(written: str) -> Written:
    if not _NUMBER.fullmatch(written):
      raise Bad(f"a number that is too long: {written[:40]}")
    return Written(written)

  def constant(written: str) -> None:
    raise Bad(f"{written} is no number")

  try:
    said = json.loads(text, object_pairs_hook=pairs, parse_int=number, parse_float=number, parse_constant=constant)
  except (json.JSONDecodeError, RecursionError):
    raise Bad(f"wanted one JSON object or {', '.join(WORDS)}, got {shown(text)}") from None
  if not isinstance(said, dict):
    raise Bad(f"wanted one JSON object, got {shown(text)}")
  return said


def _point(name: str, said: dict, view: Frame) -> tuple[Written, Written] | None:
  if "x" not in said and "y" not in said:
    return None
  if not isinstance(said.get("x"), Written) or not isinstance(said.get("y"), Written):
    raise Bad(f"{name}: wanted the numbers x and y")
  return said["x"], said["y"]


def _meant(name: str, said: dict, point: tuple[int, int] | None) -> tuple[str, dict]:
  if name in ("CLICK", "RIGHT_CLICK", "DOUBLE_CLICK"):
    button, clicks = {"RIGHT_CLICK": ("right", 1), "DOUBLE_CLICK": ("left", 2)}.get(
      name, (said.get("button", "left"), said.get("num_clicks", 1))
    )
    return inputs.click(point, button, clicks)
  if name == "TYPING":
    if not isinstance(said["text"], str):
      raise Bad(f"TYPING: text is {said['text']!r:.40}")
    if (found := FORBIDDEN.search(said["text"])) is not None:
      raise Bad(f"TYPING: control character U+{ord(found[0]):04X}")
    return "type", typed(said["text"])
  if name in ("MOUSE_DOWN", "MOUSE_UP"):
    return name.lower(), {"button": inputs.side(said.get("button", "left"))}
  if name == "HOTKEY":
    if not isinstance(said["keys"], list):
      raise Bad("HOTKEY: keys is no list")
    return inputs.combination(said["keys"])
  if name == "SCROLL":
    return "wheel", {n: inputs.whole(n, said[n], -inputs.MAX_WHEEL, inputs.MAX_WHEEL) for n in ("dx", "dy")}
  if name == "PRESS":
    return inputs.press(said["key"])
  if name in ("KEY_DOWN", "KEY_UP"):
    return name.lower(), {"key": inputs.key(said["key"])}
  if name in ("MOVE_TO", "DRAG_TO"):
    return ("move", {"point": point}) if name == "MOVE_TO" else ("drag_to", {"end": point})
  return {"WAIT": ("wait", {}), "DONE": ("finished", {"text": ""}), "FAIL": ("fail", {})}[name]


def derive(kind: str, args: dict, view: Frame) -> dict:
  """model_args for the given pixels and texts, as this grammar would write them."""
  point = args.get("point", args.get("end"))
  return inputs.told(args) | ({"point": to_model_point(point, view)} if point is not None else {})


def spell(kind: str, model_args: dict, thought: str) -> str:
  try:
    said = _said(kind, model_args)
  except KeyError:  # made by hand, without what it says
    return ""
  if "point" in model_args:
    items = list(said.items())
    at = list(said).index("num_clicks") if "num_clicks" in said else len(said)
    said = dict([*items[:at], ("x", model_args["point"][0]), ("y", model_args["point"][1]), *items[at:]])
  name = said["action_type"]
  body = name if name in WORDS else "{" + ", ".join(f'"{n}": {_write(v)}' for n, v in said.items()) + "}"
  return f"{thought}\n```json\n{body}\n```" if thought else body


def _said(kind: str, args: dict) -> dict[str, Any]:
  if kind in ("click", "left_double", "right_single"):
    button, clicks = inputs.unclick(kind, args)
    name = {("left", 2): "DOUBLE_CLICK", ("right", 1): "RIGHT_CLICK"}.get((button, clicks), "CLICK")
    more = ({} if button == "left" else {"button": button}) | ({} if clicks == 1 else {"num_clicks": clicks})
    return {"action_type": name} | (more if name == "CLICK" else {})
  if kind == "type":
    return {"action_type": "TYPING", "text": untyped(args)}
  if kind == "hotkey":
    one = len(args["keys"]) == 1
    return {"action_type": "PRESS", "key": args["keys"][0]} if one else {"action_type": "HOTKEY", "keys": list(args["keys"])}
  if kind == "wheel":
    return {"action_type": "SCROLL", "dx": args["dx"], "dy": args["dy"]}
  if kind in ("mouse_down", "mouse_up"):
    return {"action_type": kind.upper(), "button": args["button"]}
  if kind in ("key_down", "key_up"):
    return {"action_type": kind.upper(), "key": args["key"]}
  return {"action_type": {"move": "MOVE_TO", "drag_to": "DRAG_TO", "wait": "WAIT", "finished": "DONE", "fail": "FAIL"}[kind]}


def _write(value: Any) -> str:
  if isinstance(value, list):
    return "[" + ", ".join(write_string(one) for one in value) + "]"
  return write_string(value) if isinstance(value, str) else str(value)
