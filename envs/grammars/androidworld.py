"""AndroidWorld's grammar: one JSON action. `Reason: the search box is empty.\\nAction: {"action_type": "click", "x": 540, "y": 300}`

x and y are pixels of the image the agent saw. Accepted are the actions of android_world/env/json_action.py, each with exactly its own
names, less two: an element's `index`, since the agent is shown no list of elements, and `unknown`. input_text taps its x, y, types and
presses ENTER, as AndroidWorld does; swipe crosses the screen and scroll half of it, scroll "down" moving the finger up, likewise.
What stands before "Action:" is the thought.
"""

from __future__ import annotations

import re

from core.schema import Action
from envs.grammars.flat_json import read_object, write_object
from envs.grammars.lex import SPACE, Bad, typed
from envs.grammars.points import Frame, to_model_point, to_screen_point

GRAMMAR, MODE = "androidworld", "pixels"
KINDS = ("tap", "double_tap", "long_press", "swipe", "type", "press", "open_app", "wait", "finish", "fail", "answer")
ENDS = ("finish", "fail", "answer")
DIRECTIONS = ("left", "right", "up", "down")

_POINTED = {"click": "tap", "double_tap": "double_tap", "long_press": "long_press", "input_text": "type"}
_PLAIN = {
  "keyboard_enter": ("press", {"key": "ENTER"}),
  "navigate_home": ("press", {"key": "HOME"}),
  "navigate_back": ("press", {"key": "BACK"}),
  "wait": ("wait", {}),
}
_STATUS = {"complete": "finish", "infeasible": "fail"}
# action_type -> names besides it; a name in brackets may be left out
_WANTED = {
  **{name: ("x", "y") for name in ("click", "double_tap", "long_press")},
  "input_text": ("text", "x", "y", "(clear_text)"),
  **{name: ("direction",) for name in ("swipe", "scroll")},
  **{name: () for name in _PLAIN},
  "open_app": ("app_name",),
  "status": ("goal_status",),
  "answer": ("text",),
}
_MARK = re.compile(r"(?:^|\n)[ \t]*+Action:")

# (accepted, canonical)
SPELLINGS = (
  ('{"action_type": "click", "x": 540, "y": 300}', '{"action_type": "click", "x": 540, "y": 300}'),
  ('{"action_type":"click","x":540.5,"y":300}', '{"action_type": "click", "x": 540.5, "y": 300}'),
  ('{"y": 300, "x": 540, "action_type": "click"}', '{"action_type": "click", "x": 540, "y": 300}'),
  ('Action: {"action_type": "wait"}', '{"action_type": "wait"}'),
  ('Reason: it loads.\nAction: {"action_type": "wait"}', 'Reason: it loads.\nAction: {"action_type": "wait"}'),
  ('{"action_type": "double_tap", "x": 1, "y": 2}', '{"action_type": "double_tap", "x": 1, "y": 2}'),
  ('{"action_type": "long_press", "x": 1, "y": 2}', '{"action_type": "long_press", "x": 1, "y": 2}'),
  ('{"action_type": "input_text", "text": "a b", "x": 1, "y": 2}', '{"action_type": "input_text", "text": "a b", "x": 1, "y": 2}'),
  (
    '{"action_type": "input_text", "text": "\\u00e9", "x": 1, "y": 2, "clear_text": true}',
    '{"action_type": "input_text", "text": "é", "x": 1, "y": 2, "clear_text": true}',
  ),
  ('{"action_type": "scroll", "direction": "down"}', '{"action_type": "scroll", "direction": "down"}'),
  ('{"action_type": "swipe", "direction": "left"}', '{"action_type": "swipe", "direction": "left"}'),
  ('{"action_type": "keyboard_enter"}', '{"action_type": "keyboard_enter"}'),
  ('{"action_type": "navigate_home"}', '{"action_type": "navigate_home"}'),
  ('{"action_type": "navigate_back"}', '{"action_type": "navigate_back"}'),
  ('{"action_type": "open_app", "app_name": "Files"}', '{"action_type": "open_app", "app_name": "Files"}'),
  ('{"action_type": "status", "goal_status": "complete"}', '{"action_type": "status", "goal_status": "complete"}'),
  ('{"action_type": "status", "goal_status": "infeasible"}', '{"action_type": "status", "goal_status": "infeasible"}'),
  ('{"action_type": "answer", "text": "4"}', '{"action_type": "answer", "text": "4"}'),
)
REFUSED = ('{"action_type": "click", "index": 3}', '{"action_type": "click", "x": 1}', '{"action_type": "click", "x": "1", "y": "2"}')
REFUSED += ('{"action_type": "unknown"}', '{"action_type": "tap", "x": 1, "y": 2}', '{"action_type": "wait", "seconds": 5}')
REFUSED += ('{"action_type": "scroll", "direction": "Down"}', '{"action_type": "status", "goal_status": "done"}', '{"x": 1, "y": 2}')
REFUSED += ('{"action_type": "wait"} {"action_type": "wait"}', "{'action_type': 'wait'}", '{"action_type": "wait"}.', "click [7]")
REFUSED += ('{"action_type": "wait", "action_type": "wait"}', '{"action_type": "input_text", "text": "a"}', '{"action_type": null}')
REFUSED += ('{"action_type": "open_app", "app_name": ""}', '```json\n{"action_type": "wait"}\n```', '{"action_type": ["wait"]}')


def read(text: str, view: Frame) -> Action:
  text = text.strip(SPACE)
  thought, body = "", text
  if not text.startswith("{"):
    marker = _MARK.search(text)
    if marker is None:
      raise Bad("no JSON action, and no line that begins with 'Action:'")
    thought, body = text[: marker.start()].strip(SPACE), text[marker.end() :]
  said = read_object(body)
  name = said.get("action_type")
  if not isinstance(name, str) or name not in _WANTED:
    raise Bad(f"action_type is {name!r:.40}")
  wanted = [n.strip("()") for n in _WANTED[name]]
  needed = {n for n in _WANTED[name] if not n.startswith("(")}
  if not needed <= said.keys() - {"action_type"} <= set(wanted):
    raise Bad(f"{name}: wanted {', '.join(_WANTED[name]) or 'nothing else'}, got {', '.join(n for n in said if n != 'action_type')}")
  for given in wanted:
    kind = float if given in ("x", "y") else bool if given == "clear_text" else str
    if given in said and not isinstance(said[given], kind):
      raise Bad(f"{name}: {given} is {said[given]!r:.40}")
  said = {n: said[n] for n in ("action_type", *wanted) if n in said}
  kind, args = _meant(name, said, view)
  point = {"point": (said["x"], said["y"])} if "x" in said else {}
  return Action(kind, args, {n: v for n, v in said.items() if n not in "xy"} | point, GRAMMAR, thought)


def _meant(name: str, said: dict, view: Frame) -> tuple[str, dict]:
  if name in _POINTED:
    args = {"point": to_screen_point((said["x"], said["y"]), view)}
    if name == "input_text":
      if not said["text"]:
        raise Bad("input_text: the text is empty")
      args |= typed(said["text"], enter=True) | ({"clear": said["clear_text"]} if "clear_text" in said else {})
    return _POINTED[name], args
  if name in ("swipe", "scroll"):
    if said["direction"] not in DIRECTIONS:
      raise Bad(f"{name}: direction is {said['direction']!r:.40}")
    return "swipe", _stroke(name, said["direction"], view)
  if name == "status":
    if said["goal_status"] not in _STATUS:
      raise Bad(f"status: goal_status is {said['goal_status']!r:.40}, wanted {' or '.join(_STATUS)}")
    return _STATUS[said["goal_status"]], {}
  if name == "open_app":
    if not said["app_name"]:
      raise Bad("open_app: the name is empty")
    return "open_app", {"app": said["app_name"]}
  return ("answer", {"text": said["text"]}) if name == "answer" else (_PLAIN[name][0], dict(_PLAIN[name][1]))


def _stroke(name: str, direction: str, view: Frame) -> dict:
  """Where the finger goes: AndroidWorld's actuation, kept on the screen's last pixel."""
  width, height = view.screen
  middle, first, last = (width // 2, height // 2), (0, 0), (width - 1, height - 1)
  axis, onward = int(direction in ("up", "down")), direction in ("right", "down")
  at = lambda edge: tuple(edge[i] if i == axis else middle[i] for i in (0, 1))
  if name == "scroll":  # the content moves onward when the finger goes back from the middle
    return {"start": middle, "end": at(first if onward else last)}
  if axis == 0:  # swipe "left" goes from the left edge to the right one: the inverse of scroll, as its source has it
    onward = not onward
  return {"start": at(first if onward else last), "end": at(last if onward else first)}


def derive(kind: str, args: dict, view: Frame) -> dict:
  """model_args for the given pixels and texts, as this grammar would write them."""
  pointed = {"point": to_model_point(args["point"], view)} if "point" in args else {}
  if kind == "type":
    if not args["enter"]:
      raise ValueError("the androidworld grammar cannot type without pressing ENTER")
    clear = {"clear_text": args["clear"]} if "clear" in args else {}
    return {"action_type": "input_text", "text": args["text"]} | pointed | clear
  if kind in ("tap", "double_tap", "long_press"):
    return {"action_type": next(n for n, k in _POINTED.items() if k == kind)} | pointed
  if kind == "swipe":
    for name in ("swipe", "scroll"):
      for direction in DIRECTIONS:
        if _stroke(name, direction, view) == {n: tuple(args[n]) for n in ("start", "end")}:
          return {"action_type": name, "direction": direction}
    raise ValueError("the androidworld grammar has no such swipe")
  if kind in ("finish", "fail"):
    return {"action_type": "status", "goal_status": next(s for s, k in _STATUS.items() if k == kind)}
  if kind in ("open_app", "answer"):
    return {"action_type": kind} | ({"app_name": args["app"]} if kind == "open_app" else {"text": args["text"]})
  return {"action_type": next(n for n, (k, fixed) in _PLAIN.items() if k == kind and fixed.items() <= args.items())}


def spell(kind: str, model_args: dict, thought: str) -> str:
  del kind
  said = dict(model_args)
  if "point" in said:
    said["x"], said["y"] = said.pop("point")
  order = ("action_type", *(n.strip("()") for n in _WANTED.get(said.get("action_type", ""), ())))
  line = write_object({name: said[name] for name in order if name in said})
  return f"{thought}\nAction: {line}" if thought else line
