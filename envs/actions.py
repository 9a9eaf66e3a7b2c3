"""Action text: the one parser that training, evaluation and replay share, and its inverse.

`parse` is strict. A text that is not exactly one action of the grammar is Unreadable, which costs the episode (reward
-1): a lenient parser would teach a policy that sloppy text works. What is accepted is published: SPELLINGS lists, for
each grammar, (accepted text, canonical text), and REFUSED what looks close and is not; the tests read both.

An Action keeps what the agent wrote (model_args: its own numbers, in the space of the image it saw) and what the
computer does (args: input pixels), so that neither is ever computed again. Model text is data: nothing here evaluates
it, and reading takes time linear in its length.

args by kind:
  phone    tap point · swipe start end · type text enter · press key · answer text · wait finish fail
  digirl   as phone, without answer
  androidworld  as phone, and double_tap long_press point · open_app app · type with point, clear
  desktop  click left_double right_single point · drag start end · hotkey keys · type text enter ·
           scroll point direction · finished text · wait fail call_user
  computer_13 pyautogui  see envs.grammars.inputs; pyautogui also calls: [[kind, args], ...], one after the other
  web      click right_click hover element · type element text enter · select element option · press keys ·
           scroll direction · goto url · tab_focus tab · stop text · new_tab close_tab go_back go_forward wait
Points are (x, y) ints; keys are canonical names of envs.grammars.keys, pressed in order and released in reverse; enter
says that ENTER is pressed after the text.
"""

from __future__ import annotations

import difflib
from types import ModuleType

from core.schema import Action, Unreadable
from envs.grammars import androidworld, computer_13, desktop, digirl, phone, points, pyautogui, web
from envs.grammars.lex import FORBIDDEN, SPACE, Bad
from envs.grammars.points import MODES, input_scale

__all__ = ["parse", "format", "aim", "readable", "to_screen_point", "to_model_point", "input_scale", "MODES", "GRAMMARS"]
__all__ += ["KINDS", "ENDS", "SPELLINGS", "REFUSED", "CHARSET", "MAX_CHARS"]

MAX_CHARS = 32_768  # a longer reply is unreadable without being read

GRAMMARS: dict[str, ModuleType] = {
  "phone": phone, "digirl": digirl, "androidworld": androidworld, "desktop": desktop, "computer_13": computer_13, "pyautogui": pyautogui,
  "web": web,
}  # fmt: skip
KINDS: dict[str, tuple[str, ...]] = {name: module.KINDS for name, module in GRAMMARS.items()}
ENDS: frozenset[str] = frozenset(kind for module in GRAMMARS.values() for kind in module.ENDS)
SPELLINGS: dict[str, tuple[tuple[str, str], ...]] = {name: module.SPELLINGS for name, module in GRAMMARS.items()}
REFUSED: dict[str, tuple[str, ...]] = {name: module.REFUSED for name, module in GRAMMARS.items()}

# For a Gymnasium Text space. Gymnasium keeps several objects for every character, so this stops at U+27FF (the alphabets
# and signs up to arrows and mathematics: 4 MB) although `parse` takes all of Unicode; `readable` is the exact rule.
CHARSET = "".join(c for c in map(chr, range(0x2800)) if c.isprintable() or c in "\n\t")


def readable(text: str) -> bool:
  """Whether `parse` looks inside the text at all: not too long, no control characters but tab and newline."""
  return len(text) <= MAX_CHARS and FORBIDDEN.search(text) is None


def parse(text: str, grammar: str, screen_size, model_size=None, *, mode: str | None = None) -> Action | Unreadable:
  """The one action that `text` is, or why it is none. Never raises for what a policy can write.

  screen_size: (width, height) in input pixels. model_size: (width, height) of the image the model was shown, in whose
  pixels it writes; None means the screen itself. mode: how the numbers are meant, one of MODES; None takes the grammar's
  own ("fraction" for phone; for desktop "resized" if there is a model_size, else "pixels"). See envs.grammars.points.
  """
  module = _module(grammar)
  view = points.frame(screen_size, model_size, mode, module.MODE)
  if not isinstance(text, str):
    return Unreadable(f"not text but {type(text).__name__}")
  if len(text) > MAX_CHARS:
    return Unreadable(f"{len(text)} characters, more than {MAX_CHARS}")
  forbidden = FORBIDDEN.search(text)
  if forbidden is not None:
    return Unreadable(f"control character U+{ord(forbidden[0]):04X} at {forbidden.start()}")
  try:
    return module.read(text, view)
  except Bad as bad:
    return Unreadable(str(bad))


def format(action: Action, grammar: str, screen_size, model_size=None, *, mode: str | None = None) -> str:
  """Text that `parse`, with the same sizes, reads as this action: its kind, args and thought.

  The agent's own numbers are printed where they still mean these pixels, so format(parse(t)) == t for canonical text.
  Where they do not (another screen, another image size, an Action built by hand) they are derived from the pixels.
  ValueError if the grammar cannot say it.
  """
  module = _module(grammar)
  view = points.frame(screen_size, model_size, mode, module.MODE)
  if action.kind not in module.KINDS:
    raise ValueError(f"the {grammar} grammar has no action {action.kind!r}; it has {', '.join(module.KINDS)}")
  thought, told = action.thought.strip(SPACE), ""
  written = [action.model_args] if action.grammar == grammar else []
  for model_args in [*written, None]:
    try:
      model_args = module.derive(action.kind, action.args, view) if model_args is None else model_args
      text = module.spell(action.kind, model_args, thought)
    except KeyError as missing:
      raise ValueError(f"{grammar} action {action.kind}: {missing} is missing from its args {action.args!r}") from None
    got = parse(text, grammar, screen_size, model_size, mode=mode)
    if isinstance(got, Unreadable):
      told = got.reason
    elif (got.kind, got.thought) == (action.kind, thought) and _plain(action.args).items() <= _plain(got.args).items():
      return text
    else:
      told = "it would read as another action"
  raise ValueError(f"the {grammar} grammar cannot write {action.kind} {action.args!r:.200}: {told}")


def aim(action: Action) -> tuple[tuple[float, float] | None, tuple[int, int] | None]:
  """Where an action aims first: (as written, in model space; in input pixels). None where it has no such point."""
  numbers = next((v for k in ("point", "start", "start_box") if (v := action.model_args.get(k)) is not None), None)
  raw = None if numbers is None else tuple(float(v) for v in points.centre(numbers))
  return raw, action.args.get("point", action.args.get("start"))


def to_screen_point(point, screen_size, model_size=None, *, mode: str) -> tuple[int, int]:
  """Model space -> input pixels under one of MODES; ValueError if a number is out of range or not a number."""
  return points.to_screen_point(point, points.frame(screen_size, model_size, mode, mode))


def to_model_point(point, screen_size, model_size=None, *, mode: str) -> tuple[float, float]:
  """Input pixels -> model space: the shortest numbers that to_screen_point maps back to exactly these pixels."""
  return points.to_model_point(point, points.frame(screen_size, model_size, mode, mode))


def _module(grammar: str) -> ModuleType:
  if grammar not in GRAMMARS:
    near = difflib.get_close_matches(str(grammar), GRAMMARS, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"action grammar {grammar!r}: wanted one of {', '.join(GRAMMARS)}{hint}")
  return GRAMMARS[grammar]


def _plain(args: dict) -> dict:
  """Sequences as tuples: an action that went through JSON has lists for points."""
  return {name: tuple(value) if isinstance(value, list) else value for name, value in args.items()}
