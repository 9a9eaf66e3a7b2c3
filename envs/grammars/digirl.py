"""DigiRL's grammar, which is Auto-UI's: every action is a touch point, a lift point and a text.

`Action Decision: "action_type": "DUAL_POINT", "touch_point": "[0.7761, 0.7089]", "lift_point": "[0.7761, 0.7089]", "typed_text": ""`

Points are [y, x], fractions of the screen. Touch and lift closer than the square root of 10 pixels are a tap, else a swipe; that is
measured in the pixels hit (DigiRL's code multiplies a fraction by the width, this project by the width less 1). What stands before
"Action Decision:" (Auto-UI's plan) is the thought. Differs from the released code: a text that cannot be read is unreadable, where
the code idles or gives up; typed text is a JSON string, so that quotes survive; IDLE, which the code has and never prints, is wait.
"""

from __future__ import annotations

import re

from core.schema import Action
from envs.grammars.flat_json import read_object, write_object
from envs.grammars.lex import NUMBER, SPACE, Bad, Written, shown, typed, untyped
from envs.grammars.points import Frame, to_model_point, to_screen_point

GRAMMAR, MODE = "digirl", "fraction"
KINDS = ("tap", "swipe", "type", "press", "wait", "finish", "fail")
ENDS = ("finish", "fail")
MARK = "Action Decision:"
NAMES = ("action_type", "touch_point", "lift_point", "typed_text")
PLAIN = {  # action_type -> kind, args
  "PRESS_BACK": ("press", {"key": "BACK"}),
  "PRESS_HOME": ("press", {"key": "HOME"}),
  "PRESS_ENTER": ("press", {"key": "ENTER"}),
  "STATUS_TASK_COMPLETE": ("finish", {}),
  "STATUS_TASK_IMPOSSIBLE": ("fail", {}),
  "TASK_IMPOSSIBLE": ("fail", {}),
  "IDLE": ("wait", {}),
}
NOWHERE = "[-1.0, -1.0]"
SAME_PLACE = 10  # squared pixels below which touch and lift are one tap

_POINT = re.compile(rf"\[ *+({NUMBER}) *+, *+({NUMBER}) *+\]")


def _line(kind: str, touch: str = NOWHERE, lift: str = NOWHERE, text: str = '""') -> str:
  return f'"action_type": "{kind}", "touch_point": "{touch}", "lift_point": "{lift}", "typed_text": {text}'


# (accepted, canonical)
SPELLINGS = (
  (_line("DUAL_POINT", "[0.2200, 0.5000]", "[0.2200, 0.5000]"), _line("DUAL_POINT", "[0.2200, 0.5000]", "[0.2200, 0.5000]")),
  (_line("DUAL_POINT", "[0.8, 0.5]", "[0.2, 0.5]"), _line("DUAL_POINT", "[0.8, 0.5]", "[0.2, 0.5]")),
  ("{" + _line("TYPE", text='"usb c cable"') + "}", _line("TYPE", text='"usb c cable"')),
  ("Action Decision: " + _line("PRESS_ENTER"), _line("PRESS_ENTER")),
  (
    "Action Plan: [DUAL_POINT,TYPE]; Action Decision:  " + _line("PRESS_HOME"),
    "Action Plan: [DUAL_POINT,TYPE]; Action Decision: " + _line("PRESS_HOME"),
  ),
  (_line("PRESS_BACK", "[-1, -1]", "[ -1.0,-1.0 ]"), _line("PRESS_BACK")),
  (_line("STATUS_TASK_COMPLETE"), _line("STATUS_TASK_COMPLETE")),
  (_line("TASK_IMPOSSIBLE"), _line("TASK_IMPOSSIBLE")),
  (_line("STATUS_TASK_IMPOSSIBLE"), _line("STATUS_TASK_IMPOSSIBLE")),
  (_line("IDLE"), _line("IDLE")),
)
REFUSED = ('"action_type": "PRESS_BACK"', _line("PRESS_MENU"), _line("press_back"), _line("DUAL_POINT"))
REFUSED += (_line("DUAL_POINT", "[0.5, 1.5]", "[0.5, 0.5]"), _line("DUAL_POINT", "0.5, 0.5", "[0.5, 0.5]"))
REFUSED += (_line("PRESS_BACK", "[0.5, 0.5]", "[0.5, 0.5]"), _line("PRESS_BACK", text='"a"'))
REFUSED += (_line("TYPE", text='"a" b"'), _line("TYPE", text="usb"), _line("TYPE", text='"\\u0000"'), _line("TYPE", text='"a"') + ", 1")
REFUSED += (_line("IDLE") + " " + _line("IDLE"), "tap(0.5, 0.5)", "Action Decision: press back")


def read(text: str, view: Frame) -> Action:
  before, marker, body = text.partition(MARK)
  thought, body = (before.strip(SPACE), body.strip(SPACE)) if marker else ("", text.strip(SPACE))
  said = read_object(body if body.startswith("{") else "{" + body + "}")
  if tuple(said) != NAMES or not all(isinstance(v, str) for v in said.values()):
    raise Bad(f"wanted the quoted {', '.join(NAMES)} in this order, got {', '.join(said)}")
  name, words = said["action_type"], said["typed_text"]
  touch, lift = _point(said["touch_point"]), _point(said["lift_point"])
  if name == "DUAL_POINT":
    if words:
      raise Bad("DUAL_POINT types nothing: wanted an empty typed_text")
    return _dual(touch, lift, view, thought)
  if any(number != -1 for number in (*touch, *lift)):
    raise Bad(f"{name}: wanted the points {NOWHERE}")
  if name == "TYPE":
    return Action("type", typed(words), {"text": words}, GRAMMAR, thought)
  if name not in PLAIN or words:
    raise Bad(f"{name}: wanted an empty typed_text" if name in PLAIN else f"unknown action_type {name!r:.40}")
  kind, args = PLAIN[name]
  return Action(kind, dict(args), {"action_type": name}, GRAMMAR, thought)


def _point(text: str) -> tuple[Written, Written]:
  """(x, y) of the "[y, x]" that was written."""
  found = _POINT.fullmatch(text)
  if found is None:
    raise Bad(f"not a point [y, x]: {shown(text)}")
  return Written(found[2]), Written(found[1])


def _dual(touch: tuple, lift: tuple, view: Frame, thought: str) -> Action:
  start, end = to_screen_point(touch, view), to_screen_point(lift, view)
  if (start[0] - end[0]) ** 2 + (start[1] - end[1]) ** 2 < SAME_PLACE:
    return Action("tap", {"point": start}, {"point": touch, "lift": lift}, GRAMMAR, thought)
  return Action("swipe", {"start": start, "end": end}, {"start": touch, "end": lift}, GRAMMAR, thought)


def derive(kind: str, args: dict, view: Frame) -> dict:
  """model_args for the given pixels and texts; fractions with the four decimals that Auto-UI was trained on, or more."""
  if kind in ("tap", "swipe"):
    names = {"point": "point", "lift": "point"} if kind == "tap" else {"start": "start", "end": "end"}
    return {name: tuple(_four(n) for n in to_model_point(args[source], view)) for name, source in names.items()}
  if kind == "type":
    return {"text": untyped(args)}
  return {"action_type": next(name for name, (k, fixed) in PLAIN.items() if k == kind and fixed.items() <= args.items())}


def _four(number: Written) -> Written:
  whole, _, decimals = number.text.partition(".")
  return Written(f"{whole}.{decimals:0<4}")


def spell(kind: str, model_args: dict, thought: str) -> str:
  ends = {"tap": ("point", "lift"), "swipe": ("start", "end")}.get(kind, ("", ""))
  points = [f"[{y}, {x}]" for x, y in (model_args.get(name, (-1.0, -1.0)) for name in ends)]
  name = {"tap": "DUAL_POINT", "swipe": "DUAL_POINT", "type": "TYPE"}.get(kind) or model_args.get("action_type", "")
  line = write_object(dict(zip(NAMES, (name, *points, model_args.get("text", "")))))[1:-1]
  return f"{thought} {MARK} {line}" if thought else line
