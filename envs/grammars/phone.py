"""The phone grammar: one line, one call. `tap(0.50, 0.22)`, `type("usb c cable")`, `press(ENTER)`.

Numbers are fractions of the screen's width and height unless the policy's coordinate mode says otherwise.
"""

from __future__ import annotations

from core.schema import Action
from envs.grammars.lex import Argument, Bad, quote, read_call, strings, typed, untyped
from envs.grammars.points import Frame, to_model_point, to_screen_point

GRAMMAR, MODE = "phone", "fraction"
KINDS = ("tap", "swipe", "type", "press", "wait", "finish", "fail", "answer")
ENDS = ("finish", "fail", "answer")
BUTTONS = ("HOME", "BACK", "ENTER")

# (accepted, canonical)
SPELLINGS = (
  ("tap(0.50, 0.22)", "tap(0.50, 0.22)"),
  ("tap( 0.5,0.22 )", "tap(0.5, 0.22)"),
  ("  tap (0, 1)\n", "tap(0, 1)"),
  ("swipe(0.50, 0.80, 0.50, 0.20)", "swipe(0.50, 0.80, 0.50, 0.20)"),
  ('type("usb c cable")', 'type("usb c cable")'),
  ("type('usb c cable')", 'type("usb c cable")'),
  ('type("it\'s")', 'type("it\'s")'),
  ("press(ENTER)", "press(ENTER)"),
  ("wait()", "wait()"),
  ('answer("4")', 'answer("4")'),
)
REFUSED = ("tap(50, 22)", "tap(x=0.5, y=0.2)", "tap(0.5 0.2)", "tap('0.5', 0.2)", "tap(.5, .2)")
REFUSED += ("tap(5e-1, 0.2)", "Tap(0.5, 0.2)", "tap(0.5, 0.2)) ", "tap(0.5, 0.2,)")
REFUSED += ('press("ENTER")', "press(enter)", "press(POWER)", "type(usb)", "wait(5)", "wait", "tap(0.5, 0.2) # the box")


def read(text: str, view: Frame) -> Action:
  kind, arguments = read_call(text)
  if kind not in KINDS:
    raise Bad(f"unknown action {kind!r:.40}")
  if kind == "tap":
    model_args = {"point": _numbers(kind, arguments, 2)}
    args = {"point": to_screen_point(model_args["point"], view)}
  elif kind == "swipe":
    numbers = _numbers(kind, arguments, 4)
    model_args = {"start": numbers[:2], "end": numbers[2:]}
    args = {name: to_screen_point(point, view) for name, point in model_args.items()}
  elif kind in ("type", "answer"):
    (words,) = strings(kind, arguments, 1)
    model_args, args = {"text": words}, typed(words) if kind == "type" else {"text": words}
  elif kind == "press":
    if len(arguments) != 1 or arguments[0][:2] != (None, "word") or arguments[0].value not in BUTTONS:
      raise Bad(f"press: wanted one of {', '.join(BUTTONS)}")
    model_args = args = {"key": arguments[0].value}
  else:
    strings(kind, arguments, 0)
    model_args, args = {}, {}
  return Action(kind, dict(args), model_args, GRAMMAR)


def _numbers(kind: str, arguments: list[Argument], count: int) -> tuple:
  if len(arguments) != count or any(a.kind != "number" or a.key is not None for a in arguments):
    raise Bad(f"{kind}: expected {count} numbers")
  return tuple(a.value for a in arguments)


def derive(kind: str, args: dict, view: Frame) -> dict:
  """model_args for the given pixels and texts, as this grammar would write them."""
  if kind in ("tap", "swipe"):
    return {name: to_model_point(args[name], view) for name in (("point",) if kind == "tap" else ("start", "end"))}
  if kind == "type":
    return {"text": untyped(args)}
  return {name: args[name] for name in {"answer": ("text",), "press": ("key",)}.get(kind, ())}


def spell(kind: str, model_args: dict, thought: str) -> str:
  if thought:
    raise ValueError("the phone grammar has no place for a thought")
  if kind in ("type", "answer"):
    inside = [quote(text, '"') for text in model_args.values()]
  else:
    inside = [str(v) for value in model_args.values() for v in (value if isinstance(value, (tuple, list)) else (value,))]
  return f"{kind}({', '.join(inside)})"
