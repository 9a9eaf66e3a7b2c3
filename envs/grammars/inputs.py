"""What the grammars of OSWorld, computer_13 and pyautogui, share: mouse and keyboard calls as kinds and args of a desktop.

  click point? button? clicks?   left_double right_single point?   move point   drag_to end   mouse_down mouse_up button
  wheel dx dy   type text enter   hotkey keys   key_down key_up key   wait seconds?   finished text   fail
Without a point a click is where the pointer is; button is there where it is not the left one, clicks where they are not one. dx and dy are
clicks of the wheel, right and up.
"""

from __future__ import annotations

from envs.grammars.keys import read_keys
from envs.grammars.lex import Bad, typed

KINDS = ("click", "left_double", "right_single", "move", "drag_to", "mouse_down", "mouse_up", "wheel", "type", "hotkey", "key_down")
KINDS += ("key_up", "wait", "finished", "fail")
ENDS = ("finished", "fail")
BUTTONS = ("left", "middle", "right")
MAX_CLICKS, MAX_WHEEL, MAX_SECONDS = 10, 1000, 60
# pyautogui's names of keys that are not those of envs.grammars.keys
OTHERS = {f"{name}{side}": name for name in ("ctrl", "alt", "shift", "win") for side in ("left", "right")}
OTHERS |= {"option": "alt", "optionleft": "alt", "optionright": "alt", "prntscrn": "printscreen", "prtscr": "printscreen"}


def key(name: object) -> str:
  """A key by its canonical name; Bad for any other, and for what only typing can say ("!")."""
  if not isinstance(name, str) or not name or " " in name or len(name) > 20:
    raise Bad(f"unknown key: {name!r:.40}")
  keys = read_keys(OTHERS.get(name.lower(), name))
  if len(keys) != 1:
    raise Bad(f"not one key: {name!r:.40}")
  return keys[0]


def combination(names: list) -> tuple[str, dict]:
  keys = [key(name) for name in names]
  if not 1 <= len(keys) <= 5 or len(set(keys)) < len(keys):
    raise Bad(f"wanted 1 to 5 keys, each once: {names!r:.60}")
  return "hotkey", {"keys": keys}


def press(name: object) -> tuple[str, dict]:
  """One key, or a character that has no key of its own."""
  if isinstance(name, str) and len(name) == 1 and name.isprintable():
    try:
      return "hotkey", {"keys": [key(name)]} if not name.isupper() else {"keys": ["shift", key(name.lower())]}
    except Bad:
      return "type", typed(name)
  return "hotkey", {"keys": [key(name)]}


def click(point: tuple[int, int] | None, button: object = "left", clicks: object = 1) -> tuple[str, dict]:
  args = {} if point is None else {"point": point}
  button, clicks = side(button), whole("clicks", clicks, 1, MAX_CLICKS)
  if (button, clicks) == ("left", 2):
    return "left_double", args
  if (button, clicks) == ("right", 1):
    return "right_single", args
  return "click", args | ({} if button == "left" else {"button": button}) | ({} if clicks == 1 else {"clicks": clicks})


def unclick(kind: str, args: dict) -> tuple[str, int]:
  """(button, clicks) of such a click."""
  return args.get("button", "right" if kind == "right_single" else "left"), 2 if kind == "left_double" else args.get("clicks", 1)


def side(button: object) -> str:
  if button not in BUTTONS:
    raise Bad(f"button is {button!r:.40}, wanted one of {', '.join(BUTTONS)}")
  return button


def whole(name: str, value: object, low: int, high: int) -> int:
  if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or not low <= value <= high:
    raise Bad(f"{name} is {value!r:.40}, wanted a whole number from {low} to {high}")
  return int(value)


def seconds(value: object) -> float:
  if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_SECONDS:
    raise Bad(f"seconds is {value!r:.40}, wanted 0 to {MAX_SECONDS}")
  return float(value)


def told(args: dict) -> dict:
  """What of an action's args is said as it stands: all but its point and an empty text of an end."""
  return {name: value for name, value in args.items() if name not in ("point", "end") and (name, value) != ("text", "")} | (
    {"text": ""} if "enter" in args and not args["text"] else {}
  )
