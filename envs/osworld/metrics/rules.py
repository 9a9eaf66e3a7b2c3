"""How a value is held against a rule {"method", "ref"}: shared by the metrics of tables, JSON files and preferences."""

from __future__ import annotations

import operator
import re
from typing import Any

COMPARE = {name: getattr(operator, name) for name in ("eq", "ne", "le", "lt", "ge", "gt")}
FLAGS = {name: getattr(re, name) for name in ("A", "ASCII", "I", "IGNORECASE", "M", "MULTILINE", "S", "DOTALL", "X", "VERBOSE")}


def matches(value: Any, rule: dict) -> bool:
  """method: eq ne le lt ge gt · re, re.I.S ... (ref is searched for) · approx:TOLERANCE · range.te (ref[0] < value <= ref[1]) ·
  spreadsheet_range (ref[0] in value in ref[1]) · str_list_eq, str_set_eq (value is a list with commas)."""
  method, ref = rule["method"], rule.get("ref")
  if method in COMPARE:
    try:
      return bool(COMPARE[method](value, ref))
    except TypeError:  # a text is neither less nor more than a number
      return False
  name, _, rest = method.partition(".") if method.startswith(("re", "range")) else (method, "", "")
  if name == "re":
    flags = re.RegexFlag(0)
    for flag in rest.split(".") if rest else ():
      if flag not in FLAGS:
        raise ValueError(f"unknown flag {flag!r} of a rule's method {method!r}")
      flags |= FLAGS[flag]
    return isinstance(value, str) and re.search(ref, value, flags) is not None
  if method.startswith("approx:"):
    try:
      return abs(float(value) - ref) <= float(method.partition(":")[2])
    except (TypeError, ValueError):
      return False
  if name == "range" and len(rest) == 2 and set(rest) <= {"t", "e"}:
    try:
      return COMPARE["l" + rest[0]](ref[0], value) and COMPARE["l" + rest[1]](value, ref[1])
    except TypeError:
      return False
  if method == "spreadsheet_range":
    from openpyxl.worksheet.cell_range import MultiCellRange

    inside = lambda small, large: all(part in large for part in small)
    return isinstance(value, MultiCellRange) and inside(MultiCellRange(ref[0]), value) and inside(value, MultiCellRange(ref[1]))
  if method in ("str_list_eq", "str_set_eq"):
    kind = list if method == "str_list_eq" else set
    return isinstance(value, str) and kind(value.strip("\"'").split(",")) == kind(ref)
  raise ValueError(f"unknown method {method!r} of a rule")
