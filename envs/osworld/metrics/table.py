"""compare_table: what spreadsheets (.xlsx) hold. Semantics: desktop-env's desktop_env/evaluators/metrics/table.py, Apache 2.0.

A rule says which sheets by an index: 0 or "RI0" the first of the result, "RNName" one by name, "EI0" and "ENName" of the expected file.
Formulas are never computed: what a cell shows is what the office program saved beside them.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from envs.osworld.metrics import guard
from envs.osworld.metrics.rules import matches

MAX_CELLS = 2_000_000  # of one sheet, empty ones between others included
MAX_RANGE = 200_000  # cells of a rule's range
NAMESPACE = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"


class Book(NamedTuple):
  """path, and the workbook as openpyxl reads it; side: "result" or "expected"."""

  path: str
  book: Any
  side: str


class NoSheet(ValueError):
  """A rule names a sheet that is not there."""


def compare_table(result: str | None, expected: str | None = None, rules: list[dict] = (), **options) -> float:
  """1 if every rule holds."""
  if result is None or not os.path.exists(result):
    return 0.0
  books = {"R": load(result, "result")}
  if expected is not None:
    books["E"] = load(expected, "expected")
  for rule in rules:
    if rule["type"] not in RULES:
      raise guard.BadExpected(f"compare_table has no rule {rule['type']!r}; it has {', '.join(RULES)}")
    try:
      if not RULES[rule["type"]](books, rule):
        return 0.0
    except NoSheet:
      return 0.0
  return 1.0


def load(path: str, side: str) -> Book:
  def reader(path: str) -> Any:
    import openpyxl

    book = openpyxl.load_workbook(guard.office(path))
    for sheet in book.worksheets:
      if sheet.max_row * sheet.max_column > MAX_CELLS:
        raise ValueError(f"sheet {sheet.title!r:.40} spans {sheet.max_row} x {sheet.max_column} cells")
    return book

  return Book(path, guard.read(reader, path, side), side)


def named(books: dict[str, Book], index: int | str) -> tuple[Book, str]:
  """The book and the sheet's name that an index of a rule means. NoSheet where the book has none."""
  if isinstance(index, int):
    index = f"RI{index}"
  if index[:1] not in "RE" or index[1:2] not in ("I", "N"):
    raise guard.BadExpected(f"a sheet is named {index!r}, wanted RI0, RNName, EI0 or ENName")
  if index[0] not in books:
    raise guard.BadExpected(f"a sheet is named {index!r}, and there is no expected file")
  book = books[index[0]]
  names = book.book.sheetnames
  name = index[2:]
  if index[1] == "I":
    if int(name) >= len(names):
      raise NoSheet(index)
    name = names[int(name)]
  if name not in names:
    raise NoSheet(index)
  return book, name


def sheet(books: dict[str, Book], index: int | str) -> Any:
  book, name = named(books, index)
  return book.book[name]


def pair(look: Callable) -> Callable[[dict, dict], bool]:
  """A rule that holds if look(book, sheet's name, rule) is the same for sheet_idx0 and sheet_idx1."""
  return lambda books, rule: look(*named(books, rule["sheet_idx0"]), rule) == look(*named(books, rule["sheet_idx1"]), rule)


def sheet_names(books: dict[str, Book], rule: dict) -> bool:
  return books["R"].book.sheetnames == books["E"].book.sheetnames


def sheet_data(books: dict[str, Book], rule: dict) -> bool:
  """The same values, as pandas reads them, to `precision` decimals."""
  frames = []
  for key in ("sheet_idx0", "sheet_idx1"):
    book, name = named(books, rule[key])
    frames.append(guard.read(functools.partial(_frame, name=name), book.path, book.side).round(rule.get("precision", 4)))
  return bool(frames[0].equals(frames[1]))


def _frame(path: str, name: str) -> Any:
  import pandas as pd

  return pd.read_excel(path, sheet_name=name, engine="openpyxl")


def sheet_print(books: dict[str, Book], rule: dict) -> bool:
  """The same lines of the CSV files that the task's postconfig made beside the books: BOOK-SHEET.csv. Only one sheet's are there."""

  def lines(index: int | str) -> list[str] | None:
    book, name = named(books, index)
    path = f"{os.path.splitext(book.path)[0]}-{name}.csv"
    if not os.path.exists(path) and book.side == "result":
      return None
    out = [line.strip() for line in guard.text(path, book.side).splitlines()]
    while out and not out[-1]:
      out.pop()
    return [line.lower() for line in out] if rule.get("ignore_case", False) else out

  got = lines(rule["sheet_idx0"])
  return got is not None and got == lines(rule["sheet_idx1"])


def cell_value(book: Book, name: str, place: str) -> Any:
  """The value that the file keeps for a cell: a float, a text, or None."""
  return values(book.path, book.side, name).get(place)


@functools.lru_cache(maxsize=8)
def _values(path: str, side: str, name: str, stamp: tuple) -> dict[str, Any]:
  del stamp

  def reader(path: str) -> dict[str, Any]:
    workbook = guard.member(path, "xl/workbook.xml")
    number = {s.get("name"): s.get("sheetId") for s in workbook.iter(NAMESPACE + "sheet")}[name]
    try:
      shared = guard.member(path, "xl/sharedStrings.xml")
      strings = ["".join(t.text or "" for t in item.iter(NAMESPACE + "t")) for item in shared.iter(NAMESPACE + "si")]
    except KeyError:
      strings = []
    return {c.get("r"): _value(c, strings) for c in guard.member(path, f"xl/worksheets/sheet{number}.xml").iter(NAMESPACE + "c")}

  return guard.read(reader, path, side)


def values(path: str, side: str, name: str) -> dict[str, Any]:
  stat = os.stat(path)
  return _values(path, side, name, (stat.st_mtime_ns, stat.st_size))


def _value(cell: Any, strings: list[str]) -> Any:
  kind, value = cell.get("t", "n"), cell.find(NAMESPACE + "v")
  if kind == "inlineStr":
    return "".join(t.text or "" for t in cell.iter(NAMESPACE + "t"))
  if value is None or value.text is None:
    return None
  if kind == "n":
    return float(value.text)
  if kind == "s":
    return strings[int(value.text)]
  return value.text if kind in ("str", "e") else None


def sheet_fuzzy(books: dict[str, Book], rule: dict) -> bool:
  """Ranges of cells: includes, included_by, exact_match or fuzzy_match (rapidfuzz's ratio of at least threshold), after trimming."""
  from openpyxl.utils import get_column_letter
  from openpyxl.worksheet.cell_range import MultiCellRange
  from rapidfuzz import fuzz

  sides = [named(books, rule[key]) for key in ("sheet_idx0", "sheet_idx1")]
  kinds = {
    "includes": lambda a, b, part: b in a,
    "included_by": lambda a, b, part: a in b,
    "exact_match": lambda a, b, part: a == b,
    "fuzzy_match": lambda a, b, part: fuzz.ratio(a, b) >= part.get("threshold", 85.0),
  }
  for part in rule["rules"]:
    if part["type"] not in kinds:
      raise guard.BadExpected(f"sheet_fuzzy has type {part['type']!r}, wanted one of {', '.join(kinds)}")
    ranges = MultiCellRange(" ".join(part["range"]) if isinstance(part["range"], list) else part["range"])
    if sum(r.size["rows"] * r.size["columns"] for r in ranges) > MAX_RANGE:
      raise guard.BadExpected(f"sheet_fuzzy has a range of more than {MAX_RANGE} cells")
    for cells in ranges:
      for row, column in cells.cells:
        texts = [_trimmed(str(cell_value(book, name, f"{get_column_letter(column)}{row}")), part) for book, name in sides]
        if not kinds[part["type"]](*texts, part):
          return False
  return True


def _trimmed(text: str, part: dict) -> str:
  for old, new in part.get("normalization", []):
    text = text.replace(old, new)
  text = text.lstrip(part["trim_leadings"]) if "trim_leadings" in part else text
  text = text.rstrip(part["trim_trailings"]) if "trim_trailings" in part else text
  text = "".join(c for c in text if c not in part.get("ignore_chars", ""))
  return text.lower() if part.get("ignore_case", False) else text


def freeze(book: Book, name: str, rule: dict) -> Any:
  return book.book[name].freeze_panes


def zoom(books: dict[str, Book], rule: dict) -> bool:
  return matches(sheet(books, rule["sheet_idx"]).sheet_view.zoomScale or 100.0, rule)


def data_validation(books: dict[str, Book], rule: dict) -> bool:
  """At least as many validations as dv_props, each following one of them."""
  there = sheet(books, rule["sheet_idx"]).data_validations.dataValidation
  follows = lambda one, wanted: all(matches(getattr(one, name), value) for name, value in wanted.items())
  return len(there) >= len(rule["dv_props"]) and all(any(follows(one, wanted) for wanted in rule["dv_props"]) for one in there)


def dimensions(kind: str) -> Callable:
  def look(book: Book, name: str, rule: dict) -> dict:
    found = getattr(book.book[name], f"{kind}_dimensions")
    return {key: {prop: getattr(one, prop) for prop in rule.get("props", [])} for key, one in found.items()}

  return look


def check_cell(books: dict[str, Book], rule: dict) -> bool:
  """One cell: its value as the file keeps it, and its style; {"value": {"method", "ref"}, "font_bold": ...}."""
  from envs.osworld.metrics.sheet_parts import style_of

  book, name = named(books, rule["sheet_idx"])
  cell = book.book[name][rule["coordinate"]]
  got = lambda prop: cell_value(book, name, rule["coordinate"]) if prop == "value" else style_of(prop, cell)
  return all(matches(got(prop), wanted) for prop, wanted in rule["props"].items())


def part(name: str) -> Callable[[dict, dict], bool]:
  """A rule whose look stands in sheet_parts.py."""

  def look(book: Book, sheet_name: str, rule: dict) -> Any:
    from envs.osworld.metrics import sheet_parts

    look_at = functools.partial(getattr(sheet_parts, name), book.book[sheet_name], rule)
    return guard.read(lambda path: look_at(pathlib.Path(path)), book.path, book.side)

  return pair(look)


RULES: dict[str, Callable[[dict, dict], bool]] = {
  "sheet_name": sheet_names,
  "sheet_data": sheet_data,
  "sheet_print": sheet_print,
  "sheet_fuzzy": sheet_fuzzy,
  "check_cell": check_cell,
  "freeze": pair(freeze),
  "zoom": zoom,
  "data_validation": data_validation,
  "row_props": pair(dimensions("row")),
  "col_props": pair(dimensions("column")),
  "style": part("styles"),
  "chart": part("charts"),
  "pivot_table": part("pivots"),
  "filter": part("filters"),
  "sparkline": part("sparklines"),
}
