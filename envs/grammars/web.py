"""The web grammar: actions on numbered page elements, in the two spellings the field uses.

WebRL:    do(action="Click", element="7"), go_backward(), exit(message="...")     thoughts are # lines before the call
WebArena: click [7], type [7] [text] [1], stop [...]                              the thought comes first, the action in ```

Both give the same kinds. Bracketed text has no escapes, so it may hold neither a newline nor what looks like the next
action; the call spelling takes any text, and is what `format` writes when nothing else was written.
"""

from __future__ import annotations

import re

from core.schema import Action
from envs.grammars.keys import read_keys
from envs.grammars.lex import SPACE, Bad, keywords, quote, read_call, shown, typed
from envs.grammars.points import Frame

GRAMMAR, MODE = "web", "pixels"
KINDS = ("click", "right_click", "hover", "type", "select", "press", "scroll", "goto", "tab_focus", "new_tab", "close_tab")
KINDS += ("go_back", "go_forward", "wait", "stop")
ENDS = ("stop",)
DIRECTIONS = ("up", "down", "left", "right")

# do(action=...) -> (kind, fixed args, needed arguments)
OPERATIONS: dict[str, tuple[str, dict, tuple[str, ...]]] = {
  "Click": ("click", {}, ("element",)),
  "Right Click": ("right_click", {}, ("element",)),
  "Hover": ("hover", {}, ("element",)),
  "Type": ("type", {"enter": False}, ("argument", "element")),
  "Search": ("type", {"enter": True}, ("argument", "element")),  # types, then presses ENTER
  "Select Dropdown Option": ("select", {}, ("argument", "element")),
  "Press Enter": ("press", {"keys": ["enter"]}, ()),
  **{f"Scroll {d.title()}": ("scroll", {"direction": d}, ()) for d in DIRECTIONS},
  "Switch Tab": ("tab_focus", {}, ("argument",)),
  "Go Backward": ("go_back", {}, ()),
  "Go Forward": ("go_forward", {}, ()),
  "Wait": ("wait", {}, ()),
}
CALLS = {"go_backward": "go_back", "go_forward": "go_forward"}

_ID = r"[0-9]{1,9}"
_PLAIN = {  # the actions that take no free text
  "click": (rf"click ?\[({_ID})\]", "id"),
  "hover": (rf"hover ?\[({_ID})\]", "id"),
  "press": (r"press ?\[([^\n]{1,80})\]", "key_comb"),
  "scroll": (r"scroll ?\[(?:direction=)?(up|down|left|right)\]", "direction"),
  "goto": (r"goto ?\[(https?://[^ \t\n\[\]]+)\]", "url"),
  "tab_focus": (r"tab_focus ?\[([0-9]{1,3})\]", "tab"),
  **{kind: (kind, None) for kind in ("new_tab", "close_tab", "go_back", "go_forward")},
}
_PLAIN = {kind: (re.compile(pattern), name) for kind, (pattern, name) in _PLAIN.items()}
_TYPE = re.compile(rf"type ?\[({_ID})\] ?\[")
_FLAG = re.compile(r"\] ?\[(?:press_enter_after=)?([01])\]$")
_STOP = re.compile(r"stop ?\[")
_NEXT = re.compile(r"\] ?\[|\] {0,2}(?:" + "|".join([*_PLAIN, "type", "stop", "do", "exit"]) + r")\b")
_COMMENTS = re.compile(r"(?:[ \t]*+#[^\n]*+\n)+")
FENCE = "```"

# (accepted, canonical)
SPELLINGS = (
  ('do(action="Click", element="7")', 'do(action="Click", element="7")'),
  ("do(action='Click', element='7')", 'do(action="Click", element="7")'),
  ('# Element: the menu\ndo(action="Click", element="7")', '# Element: the menu\ndo(action="Click", element="7")'),
  ('do(action="Search", argument="red mug", element="13")', 'do(action="Search", argument="red mug", element="13")'),
  ('do(action="Scroll Down")', 'do(action="Scroll Down")'),
  ("go_backward()", "go_backward()"),
  ("exit()", "exit()"),
  ('exit(message="N/A")', 'exit(message="N/A")'),
  ("click [7]", "click [7]"),
  ("click[7]", "click [7]"),
  ("```click [7]```", "click [7]"),
  ("The menu is closed. I open it: ```click [7]```", "The menu is closed. I open it: ```click [7]```"),
  ("type [7] [red mug] [0]", "type [7] [red mug] [0]"),
  ("type [7] [red mug]", "type [7] [red mug]"),  # no flag: ENTER is pressed, as WebArena has it
  ("type [7] [red mug] [press_enter_after=1]", "type [7] [red mug] [1]"),
  ("press [Ctrl+v]", "press [Ctrl+v]"),
  ("scroll [down]", "scroll [down]"),
  ("scroll [direction=down]", "scroll [down]"),
  ("goto [http://shop.test/cart]", "goto [http://shop.test/cart]"),
  ("tab_focus [1]", "tab_focus [1]"),
  ("new_tab", "new_tab"),
  ("stop [4]", "stop [4]"),
  ("stop []", "stop []"),
)
REFUSED = ("click [submit]", "click 7", "click [7] [8]", "click [7]\nclick [8]", "type [red mug] [1]", "type [7] [a] [2]")
REFUSED += ("type [7] [a] [1]\ntype [8] [b] [1]", "type [7] [a] [1] [1]", "stop [4] click [7]")
REFUSED += ("goto [javascript:alert(1)]", "goto [file:///etc/passwd]", "scroll down", "I click. click [7]")
REFUSED += ("do(action='click', element='7')", "do(action='Click')", "do(action='Click', element=7)", "do('Click', '7')")
REFUSED += ("do(action='Click', element='find()')", "do(action='Wait', element='7')", "go_backward(1)", "quit()")
REFUSED += ("```click [7]``` done", "```click [7]``` ```click [8]```")


def read(text: str, view: Frame) -> Action:
  del view  # elements, not points
  text = text.strip(SPACE)
  thought, body = "", text
  comments = _COMMENTS.match(text)
  if comments is not None:
    lines = [line.lstrip(" \t").removeprefix("#").removeprefix(" ") for line in comments[0][:-1].split("\n")]
    thought, body = "\n".join(lines).strip(SPACE), text[comments.end() :].strip(SPACE)
  elif text.endswith(FENCE):  # no action ends like this by itself
    before, _, body = text.removesuffix(FENCE).partition(FENCE)
    thought, body = before.strip(SPACE), body.strip(SPACE)
  kind, args, model_args = _read_brackets(body) or _read_call(body)
  return Action(kind, args, model_args, GRAMMAR, thought)


def _read_call(text: str) -> tuple[str, dict, dict]:
  name, arguments = read_call(text)
  if name == "exit":
    model_args = keywords(name, arguments, {"message": False}, {})
    return "stop", {"text": model_args.get("message", "")}, {"call": name} | model_args
  if name in CALLS:
    return CALLS[name], {}, {"call": name} | keywords(name, arguments, {}, {})
  if name != "do":
    raise Bad(f"unknown action {name!r:.40}")
  model_args = keywords(name, arguments, {"action": True, "argument": False, "element": False}, {})
  if model_args["action"] not in OPERATIONS:
    raise Bad(f"do: unknown action {model_args['action']!r:.40}")
  kind, fixed, needed = OPERATIONS[model_args["action"]]
  if sorted(needed) != sorted(model_args.keys() - {"action"}):
    raise Bad(f"do {model_args['action']}: wanted {' and '.join(needed) or 'no argument'}")
  return kind, _do_args(kind, fixed, model_args), {"call": name} | model_args


def _do_args(kind: str, fixed: dict, model_args: dict) -> dict:
  element = {}
  if "element" in model_args:
    if not re.fullmatch(_ID, model_args["element"]):
      raise Bad(f"do: element is {model_args['element']!r:.40}, wanted its number")
    element = {"element": model_args["element"]}
  if kind == "type":
    return element | typed(model_args["argument"], fixed["enter"])
  if kind == "select":
    return element | {"option": model_args["argument"]}
  if kind == "tab_focus":
    if not re.fullmatch("[0-9]{1,3}", model_args["argument"]):
      raise Bad(f"do: tab is {model_args['argument']!r:.40}, wanted its number")
    return {"tab": int(model_args["argument"])}
  return element | {name: list(value) if isinstance(value, list) else value for name, value in fixed.items()}


def _read_brackets(text: str) -> tuple[str, dict, dict] | None:
  """WebArena's spelling, or None if the text does not begin like one of its actions."""
  kind = re.match("[a-z_]*+", text)[0]
  if kind in _PLAIN and not text.startswith("(", len(kind)):
    pattern, name = _PLAIN[kind]
    found = pattern.fullmatch(text)
    if found is None:
      raise Bad(f"{kind}: cannot read {shown(text)}")
    return (kind, _plain_args(kind, found[1]), {name: found[1]}) if name else (kind, {}, {"word": kind})
  if (found := _TYPE.match(text)) is not None:
    flag = _FLAG.search(text, max(found.end() - 1, len(text) - 24))
    words = _free(text[found.end() : flag.start() if flag else -1], closed=flag is not None or text.endswith("]"))
    model_args = {"id": found[1], "text": words} | ({"enter": flag[1]} if flag else {})
    return "type", {"element": found[1]} | typed(words, flag is None or flag[1] == "1"), model_args
  if (found := _STOP.match(text)) is not None:
    words = _free(text[found.end() : -1], closed=text.endswith("]"))
    return "stop", {"text": words}, {"text": words}
  return None


def _plain_args(kind: str, value: str) -> dict:
  if kind in ("click", "hover"):
    return {"element": value}
  if kind == "press":
    return {"keys": read_keys(value)}
  return {"tab": int(value)} if kind == "tab_focus" else {_PLAIN[kind][1]: value}


def _free(words: str, closed: bool) -> str:
  if not closed or "\n" in words or _NEXT.search(words):
    raise Bad(f"bracketed text is not closed, has two lines or holds another argument or action: {shown(words)}")
  return words


def derive(kind: str, args: dict, view: Frame) -> dict:
  """model_args for the given arguments: WebRL's call where it has one, else WebArena's words."""
  del view
  if kind == "stop":
    return {"call": "exit"} | ({"message": args["text"]} if args.get("text") else {})
  args = {"enter": False} | args if kind == "type" else args
  name = next((n for n, (k, fixed, _) in OPERATIONS.items() if k == kind and fixed.items() <= args.items()), None)
  if name is None:
    return _derive_words(kind, args)
  out = {"call": "do", "action": name}
  if "argument" in OPERATIONS[name][2]:
    out["argument"] = str(args[{"type": "text", "select": "option", "tab_focus": "tab"}[kind]])
  return out | ({"element": args["element"]} if "element" in OPERATIONS[name][2] else {})


def _derive_words(kind: str, args: dict) -> dict:
  if kind == "press":
    return {"key_comb": "+".join(args["keys"])}
  if kind == "goto":
    return {"url": args["url"]}
  return {"word": kind} if kind in ("new_tab", "close_tab") else {}


def spell(kind: str, model_args: dict, thought: str) -> str:
  if "call" in model_args or not model_args:
    inside = [f"{name}={quote(value, chr(34))}" for name, value in model_args.items() if name != "call"]
    call = f"{model_args.get('call', kind)}({', '.join(inside)})"
    return "".join(f"# {line}\n" for line in thought.split("\n")) + call if thought else call
  call = kind if "word" in model_args else " ".join([kind, *(f"[{value}]" for value in model_args.values())])
  return f"{thought} {FENCE}{call}{FENCE}" if thought else call
