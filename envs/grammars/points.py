"""The one place where the numbers a model writes become pixels of the screen, and back.

Four modes; a policy has exactly one. With a screen W pixels wide shown to the model as an image M pixels wide:

  mode      | x may be        | pixel
  pixels    | 0 <= x < W      | x
  resized   | 0 <= x < M      | x * W / M        the model's numbers live in the image it was shown
  fraction  | 0 <= x <= 1     | x * (W - 1)      so 0 is the first pixel and 1 the last
  thousand  | 0 <= x <= 1000  | x / 1000 * (W - 1)

y goes by height in the same way. Rounding is to the nearest integer, a tie to the even one (Python's `round`). A number
outside its range is unreadable, never moved inside. One case needs a word: a position less than half a pixel before the
image's far edge rounds to W, which is not a pixel; the pixel it lies in is W - 1, and that is the answer.
"""

from __future__ import annotations

import operator
import re
from typing import NamedTuple

from envs.grammars.lex import NUMBER, Bad, Written

MODES = ("pixels", "resized", "fraction", "thousand")
_FULL = {"fraction": 1, "thousand": 1000}
_DECIMALS = {"pixels": 0, "resized": 0, "fraction": 2, "thousand": 0}  # the fewest decimals a canonical number shows


class Frame(NamedTuple):
  """screen: (W, H) input pixels. model: (W, H) of the image the model was shown, for mode "resized". mode: see above."""

  screen: tuple[int, int]
  model: tuple[int, int] | None
  mode: str


def frame(screen_size, model_size, mode: str | None, default: str) -> Frame:
  """Checks the sizes (a wrong one is the caller's mistake: ValueError) and picks the mode.

  default: the grammar's own mode. "pixels" becomes "resized" when a model size is given.
  """
  screen = _size("screen_size", screen_size)
  model = None if model_size is None else _size("model_size", model_size)
  if mode is None:
    mode = "resized" if default == "pixels" and model is not None else default
  if mode not in MODES:
    raise ValueError(f"coordinate mode {mode!r}: wanted one of {', '.join(MODES)}")
  if mode == "resized" and model is None:
    raise ValueError("coordinate mode 'resized' needs model_size, the (width, height) of the image the model was shown")
  if mode == "pixels" and model not in (None, screen):
    raise ValueError(f"mode 'pixels' with model_size {model} on screen {screen}: leave model_size out, or use 'resized'")
  return Frame(screen, model, mode)


def _size(name: str, size) -> tuple[int, int]:
  try:
    width, height = (operator.index(v) for v in size)
  except (TypeError, ValueError):
    raise ValueError(f"{name} is {size!r}, wanted (width, height) in whole pixels") from None
  if width < 1 or height < 1:
    raise ValueError(f"{name} is {size!r}, wanted at least one pixel each way")
  return width, height


def _limits(view: Frame, axis: int) -> tuple[float, bool]:
  """The end of the axis in model space, and whether the end itself is in range."""
  if view.mode in _FULL:
    return _FULL[view.mode], True
  return (view.screen if view.mode == "pixels" else view.model)[axis], False


def _to_pixel(value: float, view: Frame, axis: int) -> int:
  end, inclusive = _limits(view, axis)
  if not (0 <= value < end or (inclusive and value == end)):  # written so that NaN is out of range
    raise Bad(f"{'xy'[axis]} = {value!r} is outside 0..{end} ({view.mode})")
  size = view.screen[axis]
  exact = value / end * (size - 1) if inclusive else value * size / end
  return min(round(exact), size - 1)


def to_screen_point(point: tuple[float, float], view: Frame) -> tuple[int, int]:
  """Model space -> input pixels. Bad if a number is out of its range."""
  return _to_pixel(point[0], view, 0), _to_pixel(point[1], view, 1)


def to_model_point(point: tuple[int, int], view: Frame) -> tuple[Written, Written]:
  """Input pixels -> model space: the shortest numbers that to_screen_point maps to exactly these pixels."""
  return _to_model(point[0], view, 0), _to_model(point[1], view, 1)


def _to_model(pixel: int, view: Frame, axis: int) -> Written:
  end, inclusive = _limits(view, axis)
  size = view.screen[axis]
  if not 0 <= pixel < size:
    raise ValueError(f"{'xy'[axis]} = {pixel!r} is not a pixel of a screen {view.screen[0]} x {view.screen[1]}")
  exact = pixel / max(size - 1, 1) * end if inclusive else pixel * end / size
  for decimals in range(_DECIMALS[view.mode], 13):
    number = Written(f"{exact:.{decimals}f}")
    if (number < end or (inclusive and number == end)) and _to_pixel(number, view, axis) == pixel:
      return number
  raise ValueError(f"{'xy'[axis]} = {pixel!r} of {size} has no number of 12 decimals in mode {view.mode}")


def input_scale(screenshot_size, input_size) -> float:
  """Screenshot pixels for one input pixel (1.25, 1.5, 2 on scaled displays); ValueError if the two axes disagree.

  A screenshot in device pixels of a screen whose input is in logical points: pass the input size as screen_size and the
  screenshot's (or its resize's) as model_size, and every click lands.
  """
  shot, inputs = _size("screenshot_size", screenshot_size), _size("input_size", input_size)
  long = 0 if inputs[0] >= inputs[1] else 1
  scale = shot[long] / inputs[long]
  if abs(inputs[1 - long] * scale - shot[1 - long]) >= 1:
    raise ValueError(f"screenshot {shot} is not a multiple of the input space {inputs}: clicks would land off target")
  return scale


# -- how a point is written inside quotes

_N = f"({NUMBER})"
_COMMA = r"[ \t]*+,[ \t]*+"
_TWO = rf"[ \t]*+{_N}{_COMMA}{_N}"
_FOUR = rf"{_TWO}{_COMMA}{_N}{_COMMA}{_N}"
_BRACKETS = [rf"{a}{body}[ \t]*+{b}" for body in (_TWO, _FOUR) for a, b in ((r"\(", r"\)"), (r"\[", r"\]"))]
_WORDS = [r"[ \t]*+" + r"[ \t]++".join([_N] * n) + r"[ \t]*+" for n in (2, 4)]
_POINTS = [re.compile(b) for b in _BRACKETS]
_POINTS += [re.compile(rf"<\|box_start\|>{b}<\|box_end\|>") for b in _BRACKETS]
_POINTS += [re.compile(f"<point>{_WORDS[0]}</point>"), re.compile(f"<bbox>{_WORDS[1]}</bbox>")]


def read_numbers(text: str) -> tuple[Written, ...]:
  """The two numbers of a point or the four of a box, in any accepted spelling."""
  text = text.strip(" \t")
  for pattern in _POINTS:
    found = pattern.fullmatch(text)
    if found is not None:
      return tuple(Written(n) for n in found.groups())
  raise Bad(f"not a point: {text[:40]!r}")


def write_numbers(numbers: tuple[float, ...]) -> str:
  return "(" + ",".join(str(n) for n in numbers) + ")"


def centre(numbers: tuple[float, ...]) -> tuple[float, float]:
  """Where a point or a box aims, in model space. A box must be written from its first corner to its last."""
  if len(numbers) == 2:
    return numbers[0], numbers[1]
  x1, y1, x2, y2 = numbers
  if x1 > x2 or y1 > y2:
    raise Bad(f"a box that ends before it starts: {write_numbers(numbers)}")
  return (x1 + x2) / 2, (y1 + y2) / 2


def aimed(numbers: tuple[float, ...], view: Frame) -> tuple[int, int]:
  """The pixel a written point or box aims at. Every corner of a box must be on the screen; one rounding, at the end."""
  for i in range(0, len(numbers), 2):
    to_screen_point((numbers[i], numbers[i + 1]), view)
  return to_screen_point(centre(numbers), view)
