"""pyautogui: OSWorld's open action space, of which exactly this is read. `pyautogui.click(863, 149); pyautogui.write('hi\\n')`

The text is calls of pyautogui and time.sleep with plain arguments (numbers, quoted texts, lists of texts, True and False), one after the
other, with ";" or a line's end between them; imports of the two and comments may stand there and are nothing. WAIT, DONE and FAIL stand
alone. A fence (```python) may be around it; what stands before the fence is the thought. It is read here, character by character, and what
was read is carried out: it is never run as a program, neither here nor in the guest.

One call is an action of its kind; several are one action of kind "calls", carried out in turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from core.schema import Action
from envs.grammars import inputs
from envs.grammars.lex import NUMBER, SPACE, Bad, Written, quote, shown, typed, unescape, untyped
from envs.grammars.points import Frame, to_model_point, to_screen_point

GRAMMAR, MODE = "pyautogui", "pixels"
KINDS, ENDS = (*inputs.KINDS, "calls"), inputs.ENDS
WORDS = {"WAIT": ("wait", {}), "DONE": ("finished", {"text": ""}), "FAIL": ("fail", {})}
MAX_CALLS = 64

# function -> its parameters in order; those after "|" may be left out
FUNCTIONS: dict[str, str] = {
  "click": "| x y clicks interval button duration",
  "leftClick": "| x y interval duration",
  "rightClick": "| x y interval duration",
  "middleClick": "| x y interval duration",
  "doubleClick": "| x y interval button duration",
  "tripleClick": "| x y interval button duration",
  "moveTo": "x y | duration",
  "dragTo": "x y | duration button",
  "mouseDown": "| x y button",
  "mouseUp": "| x y button",
  "scroll": "clicks | x y",
  "vscroll": "clicks | x y",
  "hscroll": "clicks | x y",
  "write": "message | interval",
  "typewrite": "message | interval",
  "press": "keys | presses interval",
  "keyDown": "key |",
  "keyUp": "key |",
  "hotkey": "*",
  "sleep": "secs |",
}

# (accepted, canonical)
SPELLINGS = (
  ("pyautogui.click(863, 149)", "pyautogui.click(863, 149)"),
  ("pyautogui.click(x=863,y=149)", "pyautogui.click(863, 149)"),
  ("```python\nimport pyautogui\nimport time\npyautogui.click( 863.5 , 149 )\n```", "pyautogui.click(863.5, 149)"),
  ("I open it.\n```python\npyautogui.doubleClick(1, 2)\n```", "I open it.\n```python\npyautogui.doubleClick(1, 2)\n```"),
  ("# open it\npyautogui.click(1, 2, clicks=2)", "pyautogui.doubleClick(1, 2)"),
  ("pyautogui.click()", "pyautogui.click()"),
  ("pyautogui.click(1, 2, button='middle', clicks=3, interval=0.1)", "pyautogui.click(1, 2, clicks=3, button='middle')"),
  ("pyautogui.rightClick(1, 2)", "pyautogui.rightClick(1, 2)"),
  ("pyautogui.moveTo(1, 2, duration=0.5)", "pyautogui.moveTo(1, 2)"),
  ("pyautogui.moveTo(1, 2); pyautogui.dragTo(3, 4, button='left')", "pyautogui.moveTo(1, 2)\npyautogui.dragTo(3, 4)"),
  ("pyautogui.mouseDown()\npyautogui.mouseUp()", "pyautogui.mouseDown(button='left')\npyautogui.mouseUp(button='left')"),
  ("pyautogui.scroll(-3)", "pyautogui.scroll(-3)"),
  ("pyautogui.hscroll(3, x=1, y=2)", "pyautogui.moveTo(1, 2)\npyautogui.hscroll(3)"),
  ('pyautogui.typewrite("it\'s", interval=0.01)', "pyautogui.write('it\\'s')"),
  ("pyautogui.write('a\\n')", "pyautogui.write('a\\n')"),
  ("pyautogui.press('Return')", "pyautogui.press('enter')"),
  ("pyautogui.press(['down', 'down'])", "pyautogui.press('down')\npyautogui.press('down')"),
  ("pyautogui.press('tab', presses=2)", "pyautogui.press('tab')\npyautogui.press('tab')"),
  ("pyautogui.hotkey('ctrl', 'S')", "pyautogui.hotkey('ctrl', 's')"),
  ("pyautogui.hotkey(['ctrl', 's'])", "pyautogui.hotkey('ctrl', 's')"),
  ("pyautogui.keyDown('alt'); time.sleep(1); pyautogui.keyUp('alt')", "pyautogui.keyDown('alt')\ntime.sleep(1)\npyautogui.keyUp('alt')"),
  ("WAIT", "WAIT"),
  ("```DONE```", "DONE"),
  ("FAIL\n", "FAIL"),
)
REFUSED = ("click(863, 149)", "pyautogui.click(863)", "pyautogui.click('863', '149')", "pyautogui.click(800 + 63, 149)", "import os")
REFUSED += ("pyautogui.click(*p)", "x = 3\npyautogui.click(x, 2)", "pyautogui.locateOnScreen('a.png')", "pyautogui.write(f'{1}')")
REFUSED += ("__import__('os').system('reboot')", "pyautogui.write(open('/etc/passwd').read())", "pyautogui.press('ctrl+s')", "eval('1')")
REFUSED += ("time.sleep(40); time.sleep(40)", "pyautogui.scroll(600); pyautogui.scroll(-600)")
REFUSED += ("pyautogui.click(1, 2) pyautogui.click(1, 2)", "for i in range(3): pyautogui.click(1, 2)", "pyautogui.write('a', 'b', 'c')")
REFUSED += ("pyautogui.click(1, 2)\nDONE", "pyautogui.write('\\x41')", "pyautogui.hotkey()", "time.sleep(1e9)", "pyautogui.move(1, 2)")

_FENCE = re.compile(r"```(?:python)?[ \t]*+\n?")
_IMPORT = r"import (?:pyautogui, time|pyautogui|time)(?=[ \t]*+(?:[\n;#]|$))"
_NOTHING = re.compile(rf"(?:[ \t\n;]|#[^\n]*+|{_IMPORT})*")
_HEAD = re.compile(r"(pyautogui|time)\.([A-Za-z]++)\(")
_GAP = r"[ \t\n]*+"
_SPACE = re.compile(_GAP)
_STRING = r"'([^'\\\n]*+(?:\\.[^'\\\n]*+)*)'|" + r'"([^"\\\n]*+(?:\\.[^"\\\n]*+)*)"'
_NAME = re.compile(rf"{_GAP}([A-Za-z_]++){_GAP}=(?!=)")
_VALUE = re.compile(rf"{_GAP}(?:{_STRING}|({NUMBER})(?![0-9A-Za-z_.])|(True|False)(?![A-Za-z_0-9])|(\[)){_GAP}")
_ESCAPE = re.compile(r"\\(.)")
_AFTER = re.compile(r"[ \t]*+(?=[\n;#]|$)")


def read(text: str, view: Frame) -> Action:
  text, thought = text.strip(SPACE), ""
  if (fence := _FENCE.search(text)) is not None and text.endswith("```") and len(text) - 3 >= fence.end():
    thought, text = text[: fence.start()].strip(SPACE), text[fence.end() : -3].strip(SPACE)
  if text in WORDS:
    kind, args = WORDS[text]
    return Action(kind, dict(args), {}, GRAMMAR, thought)
  calls: list[tuple[str, dict, dict]] = []
  at = _NOTHING.match(text).end()
  while at < len(text):
    name, values, at = _call(text, at)
    calls += _meant(name, values, view)
    if len(calls) > MAX_CALLS:
      raise Bad(f"more than {MAX_CALLS} calls")
    at = _NOTHING.match(text, at).end()
  if sum(args["seconds"] for kind, args, _ in calls if kind == "wait") > inputs.MAX_SECONDS:  # no action takes longer than one wait may
    raise Bad(f"sleeps of more than {inputs.MAX_SECONDS} s")
  if sum(abs(args["dx"]) + abs(args["dy"]) for kind, args, _ in calls if kind == "wheel") > inputs.MAX_WHEEL:
    raise Bad(f"more than {inputs.MAX_WHEEL} turns of the wheel")
  if not calls:
    raise Bad("no call of pyautogui, and none of WAIT, DONE, FAIL")
  if len(calls) == 1:
    return Action(calls[0][0], calls[0][1], calls[0][2], GRAMMAR, thought)
  plain = [[kind, args] for kind, args, _ in calls]
  return Action("calls", {"calls": plain}, {"calls": [[kind, written] for kind, _, written in calls]}, GRAMMAR, thought)


def _call(text: str, at: int) -> tuple[str, dict[str, Any], int]:
  """(function, its arguments by name, where it ends)."""
  head = _HEAD.match(text, at)
  if head is None:
    raise Bad(f"not a call of pyautogui: {shown(text[at : at + 60])}")
  name = head[2]
  if name not in FUNCTIONS or (head[1] == "time") != (name == "sleep"):
    raise Bad(f"{head[1]}.{name:.40} is not one of the functions that are read")
  given, named, at = [], {}, head.end()
  while not text.startswith(")", at := _SPACE.match(text, at).end()):
    key = _NAME.match(text, at)
    value, at = _value(text, key.end() if key else at)
    if key and key[1] in named or not key and named or len(given) + len(named) > 8:
      raise Bad(f"{name}: cannot read its arguments")
    if key:
      named[key[1]] = value
    else:
      given.append(value)
    if text.startswith(",", at):
      at += 1
    elif not text.startswith(")", at):
      raise Bad(f"{name}: cannot read the argument at {shown(text[at : at + 60])}")
  if _AFTER.match(text, at + 1) is None:
    raise Bad(f"text after a call: {shown(text[at + 1 : at + 60])}")
  return name, _arguments(name, given, named), at + 1


def _value(text: str, at: int) -> tuple[Any, int]:
  found = _VALUE.match(text, at)
  if found is None:
    raise Bad(f"cannot read the argument at {shown(text[at : at + 60])}")
  single, double, number, truth, opened = found.groups()
  if opened is None:
    if single is not None or double is not None:
      return _unquote(single if single is not None else double), found.end()
    return Written(number) if number is not None else truth == "True", found.end()
  out, at = [], found.end()
  while not text.startswith("]", at):
    part = _VALUE.match(text, at)
    if part is None or (part[1] is None and part[2] is None) or len(out) >= 16:
      raise Bad("a list holds up to 16 quoted texts")
    out.append(_unquote(part[1] if part[1] is not None else part[2]))
    at = part.end()
    if text.startswith(",", at):
      at = _SPACE.match(text, at + 1).end()
    elif not text.startswith("]", at):
      raise Bad("a list holds up to 16 quoted texts")
  return out, _SPACE.match(text, at + 1).end()


def _unquote(text: str) -> str:
  for escape in _ESCAPE.finditer(text):
    if escape[1] in "xuUN01234567abfrv":
      raise Bad(f"an escape that is not read here: \\{escape[1]}")
  return unescape(text)


def _arguments(name: str, given: list, named: dict) -> dict[str, Any]:
  if FUNCTIONS[name] == "*":
    if named.keys() - {"interval"}:
      raise Bad(f"{name}: takes keys only")
    return {"keys": given[0] if len(given) == 1 and isinstance(given[0], list) else given}
  needed, _, more = FUNCTIONS[name].partition("|")
  order = [*needed.split(), *more.split()]
  if len(given) > len(order) or set(order[: len(given)]) & named.keys() or named.keys() - set(order):
    raise Bad(f"{name}: wanted {', '.join(order)}")
  values = dict(zip(order, given)) | named
  if missing := [n for n in needed.split() if n not in values]:
    raise Bad(f"{name}: {', '.join(missing)} is missing")
  for n in ("interval", "duration"):
    if n in values:
      inputs.seconds(values.pop(n))
  return values


Call = tuple[str, dict, dict]  # kind, args, and args as they were written


def _meant(name: str, values: dict, view: Frame) -> list[Call]:
  """One call, or the move that goes before it and the call."""
  written = None
  if "x" in values or "y" in values:
    written = (values.get("x"), values.get("y"))
    if not all(isinstance(n, Written) for n in written):
      raise Bad(f"{name}: wanted the numbers x and y")
  point = to_screen_point(written, view) if written else None
  spot = {"point": written} if written else {}
  if name in _CLICKS:
    button, clicks = _CLICKS[name]
    kind, args = inputs.click(point, values.get("button", button), values.get("clicks", clicks))
    return [(kind, args, inputs.told(args) | spot)]
  if name in ("moveTo", "dragTo"):
    if inputs.side(values.get("button", "left")) != "left":
      raise Bad(f"{name}: only the left button drags")
    return [("move", {"point": point}, spot) if name == "moveTo" else ("drag_to", {"end": point}, spot)]
  before: list[Call] = [("move", {"point": point}, spot)] if written else []
  calls = [(kind, args) for kind, args in _FUNCTIONS[name](values)]
  return before + [(kind, args, inputs.told(args)) for kind, args in calls]


def _press(values: dict) -> list[tuple[str, dict]]:
  keys = values["keys"] if isinstance(values["keys"], list) else [values["keys"]]
  times = inputs.whole("presses", values.get("presses", 1), 1, MAX_CALLS)
  if not keys or len(keys) * times > MAX_CALLS:
    raise Bad(f"press: wanted 1 to {MAX_CALLS} keys")
  return [inputs.press(key) for _ in range(times) for key in keys]


def _write(values: dict) -> list[tuple[str, dict]]:
  if not isinstance(values["message"], str):
    raise Bad("write: wanted one quoted text")
  return [("type", typed(values["message"]))]


def _wheel(values: dict, axis: str) -> list[tuple[str, dict]]:
  return [("wheel", {"dx": 0, "dy": 0} | {axis: inputs.whole("clicks", values["clicks"], -inputs.MAX_WHEEL, inputs.MAX_WHEEL)})]


_CLICKS = {
  "click": ("left", 1), "leftClick": ("left", 1), "rightClick": ("right", 1), "middleClick": ("middle", 1), "doubleClick": ("left", 2),
  "tripleClick": ("left", 3),
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[[dict], list[tuple[str, dict]]]] = {
  "mouseDown": lambda v: [("mouse_down", {"button": inputs.side(v.get("button", "left"))})],
  "mouseUp": lambda v: [("mouse_up", {"button": inputs.side(v.get("button", "left"))})],
  "scroll": lambda v: _wheel(v, "dy"),
  "vscroll": lambda v: _wheel(v, "dy"),
  "hscroll": lambda v: _wheel(v, "dx"),
  "write": _write,
  "typewrite": _write,
  "press": _press,
  "keyDown": lambda v: [("key_down", {"key": inputs.key(v["key"])})],
  "keyUp": lambda v: [("key_up", {"key": inputs.key(v["key"])})],
  "hotkey": lambda v: [inputs.combination(v["keys"])],
  "sleep": lambda v: [("wait", {"seconds": inputs.seconds(v["secs"])})],
}


def derive(kind: str, args: dict, view: Frame) -> dict:
  """model_args for the given pixels and texts, as this grammar would write them."""
  if kind == "calls":
    return {"calls": [[one, derive(one, more, view)] for one, more in args["calls"]]}
  point = args.get("point", args.get("end"))
  return inputs.told(args) | ({"point": to_model_point(point, view)} if point is not None else {})


def spell(kind: str, model_args: dict, thought: str) -> str:
  word = next((word for word, (meant, _) in WORDS.items() if meant == kind and not model_args), None)
  try:
    body = word or "\n".join(_spell(one, more) for one, more in (model_args["calls"] if kind == "calls" else [(kind, model_args)]))
  except KeyError:  # made by hand, without what it says
    return ""
  return f"{thought}\n```python\n{body}\n```" if thought else body


def _spell(kind: str, said: dict) -> str:
  point = [str(n) for n in said["point"]] if "point" in said else []
  text = lambda value: quote(value, "'")
  if kind in ("click", "left_double", "right_single"):
    button, clicks = inputs.unclick(kind, said)
    name = {("left", 2): "doubleClick", ("right", 1): "rightClick"}.get((button, clicks), "click")
    more = [f"clicks={clicks}"] if name == "click" and clicks != 1 else []
    more += [f"button={text(button)}"] if name == "click" and button != "left" else []
    return f"pyautogui.{name}({', '.join(point + more)})"
  if kind in ("move", "drag_to"):
    return f"pyautogui.{'moveTo' if kind == 'move' else 'dragTo'}({', '.join(point)})"
  if kind in ("mouse_down", "mouse_up"):
    return f"pyautogui.{'mouseDown' if kind == 'mouse_down' else 'mouseUp'}(button={text(said['button'])})"
  if kind == "wheel":
    if said["dx"] and said["dy"]:
      return f"pyautogui.scroll({said['dy']})\npyautogui.hscroll({said['dx']})"
    return f"pyautogui.hscroll({said['dx']})" if said["dx"] else f"pyautogui.scroll({said['dy']})"
  if kind == "type":
    return f"pyautogui.write({text(untyped(said))})"
  if kind == "hotkey":
    return f"pyautogui.{'press' if len(said['keys']) == 1 else 'hotkey'}({', '.join(text(key) for key in said['keys'])})"
  if kind in ("key_down", "key_up"):
    return f"pyautogui.{'keyDown' if kind == 'key_down' else 'keyUp'}({text(said['key'])})"
  if kind == "wait":
    return f"time.sleep({said['seconds']:g})"  # alone WAIT, which says no seconds
  raise ValueError(f"{kind} has no call")
