"""compare_pptx_files: what presentations (.pptx) hold. Semantics: desktop-env's desktop_env/evaluators/metrics/slides.py, Apache 2.0, the
numbers that it has for single tasks included.

options: examine_<what>, each True but those of OFF; approximately_tolerance, the share by which places and sizes may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from envs.osworld.metrics import guard

OFF = {
  "title_bottom_position", "table_bottom_position", "right_position", "top_position", "shape_for_shift_size", "image_size", "modify_height"
}  # fmt: skip
DRAWING = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
PICTURE, TABLE, FREEFORM = 13, 19, 5  # shape types
LOW, RIGHT, HIGH = 3_600_000, 4_320_000, 1_980_000  # EMU: below, right of, above


class Differs(Exception):
  """The presentations are not the same. Its text says in what."""


class Examine:
  """Which properties count. examine("note") -> bool; near(a, b): equal to the tolerance."""

  def __init__(self, options: dict):
    self.options, self.tolerance = options, options.get("approximately_tolerance", 0.005)

  def __call__(self, name: str) -> bool:
    return bool(self.options.get(f"examine_{name}", name not in OFF))

  def near(self, a: Any, b: Any) -> bool:
    if a == b:
      return True
    if not a or not b:  # None: the place is the layout's
      return False
    return abs(a - b) / max(abs(a), abs(b)) <= self.tolerance

  def placed(self, a: Any, b: Any) -> bool:
    """Whether two shapes have one place and size."""
    return all(self.near(getattr(a, name), getattr(b, name)) for name in ("left", "top", "width", "height"))


def compare_pptx_files(result: str | None, expected: str | None, **options) -> float:
  """1 if both hold the same, as far as options say what to examine."""
  if not result or not expected:
    return 0.0
  sides = guard.read(_looked_through, result, "result"), guard.read(_load, expected, "expected")
  try:
    _decks(*sides, Examine(options))
  except Differs:
    return 0.0
  return 1.0


def _decks(one: Any, other: Any, examine: Examine) -> None:
  if examine("number_of_slides"):
    _same(len(one.slides), len(other.slides), "number of slides")
  for number, (a, b) in enumerate(zip(one.slides, other.slides), 1):
    _slide(a, b, number, examine)


def _looked_through(path: str) -> Any:
  """An agent's presentation, of which all that is compared can be read: python-pptx reads a part when it is asked for it, and what is wrong
  there would look like a fault of the metric."""
  deck = _load(path)
  _decks(deck, deck, Examine({}))
  return deck


def _load(path: str) -> Any:
  import pptx

  return pptx.Presentation(guard.office(path))


def _same(a: Any, b: Any, what: str) -> None:
  if a != b:
    raise Differs(what)


def _slide(a: Any, b: Any, number: int, examine: Examine) -> None:
  if examine("background_color"):
    _same(_background(a), _background(b), "background")
  if examine("note"):
    _same(_notes(a), _notes(b), "notes")
  _same(len(a.shapes), len(b.shapes), "number of shapes")
  for one, other in zip(a.shapes, b.shapes):
    _places(one, other, number, examine)
    if one.shape_type == TABLE:
      _table(one.table, other, examine)
    if hasattr(one, "text") and hasattr(other, "text"):
      if examine("text"):
        _same(one.text.strip(), other.text.strip(), "text of a shape")
      _paragraphs(one, other, examine)
  _texts(a, b, examine)


def _background(slide: Any) -> Any:
  fill = slide.background.fill
  if fill.type == 5:  # the master's
    fill = slide.slide_layout.slide_master.background.fill
  return fill.fore_color.rgb if fill.type == 1 else None


def _notes(slide: Any) -> str:
  frame = slide.notes_slide.notes_text_frame if slide.has_notes_slide else None
  return frame.text.strip() if frame is not None else ""


def _places(a: Any, b: Any, number: int, examine: Examine) -> None:
  """Places and sizes. Each option says what may be elsewhere; the rest must stand where it stood."""
  told = hasattr(a, "text") and hasattr(b, "text")
  same_text = told and a.text == b.text
  placed = examine.placed(a, b)
  moved_down = lambda: a.top <= b.top or a.top < LOW
  if examine("title_bottom_position"):
    if same_text and a.text == "Product Comparison" and moved_down() or not same_text and not placed:
      raise Differs("place of the title")
  if examine("table_bottom_position"):
    table = number == 3 and a.shape_type == b.shape_type == TABLE
    if table and moved_down() or not table and not placed:
      raise Differs("place of the table")
  if examine("right_position") and number == 2 and not hasattr(a, "text") and not hasattr(b, "text"):
    if a.left <= b.left or a.left < RIGHT:
      raise Differs("not moved to the right")
  if examine("top_position") and number == 2 and a.shape_type == b.shape_type == PICTURE:
    if a.top >= b.top or a.top > HIGH:
      raise Differs("not moved to the top")
  if examine("shape_for_shift_size") and not placed and not (same_text and a.text == "Elaborate on what you want to discuss."):
    raise Differs("place of a shape")
  if examine("shape") and not placed:
    raise Differs("place of a shape")
  if examine("image_size"):
    picture = a.shape_type == b.shape_type == PICTURE
    if not (all(examine.near(getattr(a, n), getattr(b, n)) for n in ("width", "height")) if picture else placed):
      raise Differs("size of a picture")
  if examine("modify_height"):
    only_height = not hasattr(a, "text") and not hasattr(b, "text") or a.shape_type == b.shape_type == FREEFORM
    if not (examine.near(a.height, b.height) if only_height else placed):
      raise Differs("height of a shape")


def _table(table: Any, other: Any, examine: Examine) -> None:
  if other.shape_type != TABLE:
    raise Differs("kind of a shape")
  shape = lambda t: (len(t.rows), len(t.columns))
  _same(shape(table), shape(other.table), "size of a table")
  for row in range(len(table.rows)):
    for column in range(len(table.columns)):
      cells = [t.cell(row, column).text_frame.paragraphs for t in (table, other.table)]
      _same(len(cells[0]), len(cells[1]), "paragraphs of a cell")
      for one, two in zip(*cells):
        _same(len(one.runs), len(two.runs), "runs of a cell")
        for a, b in zip(one.runs, two.runs):
          _colour(a, b, examine)
          _same(bool(a.font.bold), bool(b.font.bold), "bold in a cell")
          _same(bool(a.font.italic), bool(b.font.italic), "italic in a cell")
          _underline(a, b)


def _colour(a: Any, b: Any, examine: Examine) -> None:
  if examine("color_rgb") and hasattr(a.font.color, "rgb") and hasattr(b.font.color, "rgb"):
    _same(a.font.color.rgb, b.font.color.rgb, "colour")


def _underline(a: Any, b: Any) -> None:
  """None, the style's, and False are one; so are None and any kind of line but the plain one."""
  one, other = a.font.underline, b.font.underline
  if one != other and (None not in (one, other) or True in (one, other)):
    raise Differs("underline")


def _paragraphs(a: Any, b: Any, examine: Examine) -> None:
  _same(len(a.text_frame.paragraphs), len(b.text_frame.paragraphs), "number of paragraphs")
  for one, other in zip(a.text_frame.paragraphs, b.text_frame.paragraphs):
    if examine("alignment"):
      _same(_alignment(one), _alignment(other), "alignment")
    if examine("text"):
      _same(one.text, other.text, "text")
    if examine("indent"):
      _same(one.level, other.level, "level")
    _same(len(one.runs), len(other.runs), "number of runs")
    for run_a, run_b in zip(one.runs, other.runs):
      _run(run_a, run_b, examine)
  if examine("bullets") and any(p.runs and q.runs for p, q in zip(a.text_frame.paragraphs, b.text_frame.paragraphs)):
    # as in the benchmark: the bullets of the whole slide, wherever it has a run of text
    _same(_bullets(a.part._element), _bullets(b.part._element), "bullets")


def _run(a: Any, b: Any, examine: Examine) -> None:
  for name, plain in (("name", False), ("size", False), ("bold", True), ("italic", True)):
    if examine(f"font_{name}"):
      one, other = getattr(a.font, name), getattr(b.font, name)
      _same(bool(one) if plain else one, bool(other) if plain else other, f"font {name}")
  _colour(a, b, examine)
  if examine("font_underline"):
    _underline(a, b)
  if examine("strike_through"):
    struck = lambda run: run.font._element.attrib.get("strike", "noStrike")
    _same(struck(a), struck(b), "strike through")


def _alignment(paragraph: Any) -> int:
  return 1 if paragraph.alignment is None else int(paragraph.alignment)  # 1: left


def _bullets(slide: Any) -> list[tuple]:
  """(level, character, text) of every paragraph of a slide that has text."""
  out = []
  for paragraph in slide.iter(DRAWING + "p"):
    properties = paragraph.find(DRAWING + "pPr")
    character = properties.find(DRAWING + "buChar") if properties is not None else None
    level = "No Level" if properties is None else properties.get("lvl") or "0"
    text = "".join(t.text or "" for t in paragraph.iter(DRAWING + "t"))
    if text.strip():
      out.append((level, character.get("char") if character is not None else "No Bullet", text))
  return out


def _texts(a: Any, b: Any, examine: Examine) -> None:
  """Every text of the slide once more, those inside groups included."""
  sides = [list(_text_shapes(slide.shapes)) for slide in (a, b)]
  _same(len(sides[0]), len(sides[1]), "number of texts")
  for one, other in zip(*sides) if examine("alignment") else ():
    if examine("text"):
      _same(one.text.strip(), other.text.strip(), "text")
    _same(len(one.text_frame.paragraphs), len(other.text_frame.paragraphs), "number of paragraphs")
    for p, q in zip(one.text_frame.paragraphs, other.text_frame.paragraphs):
      _same(_alignment(p), _alignment(q), "alignment")


def _text_shapes(shapes: Any) -> Iterator[Any]:
  for shape in shapes:
    if hasattr(shape, "text") and hasattr(shape, "text_frame"):
      yield shape
    if hasattr(shape, "shapes"):
      yield from _text_shapes(shape.shapes)
