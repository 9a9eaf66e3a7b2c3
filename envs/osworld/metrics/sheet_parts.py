"""What compare_table's rules look at beside values: styles, charts, pivot tables, filters, sparklines. Each look gives plain values that
are compared for equality; sheet is openpyxl's worksheet, path the file it stands in."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

from envs.osworld.metrics import guard

X14 = "{http://schemas.microsoft.com/office/spreadsheetml/2009/9/main}"
XM = "{http://schemas.microsoft.com/office/excel/2006/main}"
MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
CELL_IS = {
  "lessThan": lambda v, r: v < r[0],
  "lessThanOrEqual": lambda v, r: v <= r[0],
  "equal": lambda v, r: v == r[0],
  "notEqual": lambda v, r: v != r[0],
  "greaterThan": lambda v, r: v > r[0],
  "greaterThanOrEqual": lambda v, r: v >= r[0],
  "between": lambda v, r: min(r) <= v <= max(r),
  "notBetween": lambda v, r: not min(r) <= v <= max(r),
}


def style_of(name: str, cell: Any, change: Any = None) -> Any:
  """One property of a cell's style; change: the differential style of a conditional format in force, or None."""
  styled, filled = change or cell, cell.value is not None
  if name == "merge":
    return type(cell).__name__ == "MergedCell"
  if name == "number_format":
    numeric = filled and cell.data_type == "n"
    return (cell.number_format if change is None else change.numFmt.formatCode) if numeric else None
  if name == "hyperlink":
    return (cell.hyperlink or "") if filled else None
  if name.startswith("font_") and name[5:] in ("name", "family", "bold", "italic", "underline", "size"):
    return getattr(styled.font, name[5:]) if filled else None
  if name == "font_color":
    return _colour(lambda: styled.font.color.rgb) if filled else None
  if name == "fill_type":
    return _colour(lambda: styled.fill.tagname)
  if name in ("bgcolor", "fgcolor"):
    return _colour(lambda: cell.fill.fgColor.rgb if change is None else change.fill.bgColor.rgb)
  raise guard.BadExpected(f"a cell has no style {name!r}")


def _colour(get: Callable[[], Any]) -> Any:
  with contextlib.suppress(AttributeError):
    return get()
  return None


def styles(sheet: Any, rule: dict, path: pathlib.Path) -> dict[str, list]:
  """Coordinate -> the properties of rule["props"], conditional formats in force applied. Those that compute a formula are not taken."""
  from envs.osworld.metrics.table import values

  props = rule.get("props", [])
  out = {cell.coordinate: [style_of(name, cell) for name in props] for column in sheet.iter_cols() for cell in column}
  shown = values(str(path), "result", sheet.title) if list(sheet.conditional_formatting) else {}
  for form in sheet.conditional_formatting:
    for change in form.rules:
      if change.type != "cellIs" or change.operator not in CELL_IS:
        raise NotImplementedError(f"a conditional format of type {change.type}: only desktop-env computes it (env.evaluator)")
      wanted = [_constant(formula) for formula in change.formula]
      for cells in form.cells.ranges:
        for row, column in cells.cells:
          cell = sheet.cell(row=row, column=column)
          with contextlib.suppress(TypeError):  # a text is neither less nor more than a number
            value = shown.get(cell.coordinate)
            if value is not None and CELL_IS[change.operator](value, wanted):
              out[cell.coordinate] = [style_of(name, cell, change.dxf) for name in props]
  return out


def _constant(formula: str) -> float | str:
  if formula[:1] == formula[-1:] == '"' and len(formula) > 1:
    return formula[1:-1]
  try:
    return float(formula)
  except ValueError:
    raise NotImplementedError(f"a conditional format that computes {formula!r:.40}: only desktop-env does (env.evaluator)") from None


def charts(sheet: Any, rule: dict, path: pathlib.Path) -> dict[str, dict]:
  """Data source -> the properties of rule["chart_props"]: title type legend width height anchor direction xtitle ytitle ztitle."""
  out = {}
  for chart in sheet._charts:
    source = ";".join(f"{_reference(series.val)},{_reference(series.cat)}" for series in chart.series)
    out[source] = {name: _CHART[name](chart) for name in rule.get("chart_props", []) if name in _CHART}
  return out


def _reference(data: Any) -> str:
  for kind in ("numRef", "strRef"):
    if hasattr(getattr(data, kind, None), "f"):
      return getattr(data, kind).f
  return ""


def _title(get: Callable[[Any], Any]) -> Callable[[Any], str | None]:
  def read(chart: Any) -> str | None:
    with contextlib.suppress(AttributeError, IndexError, TypeError):
      return get(chart).tx.rich.p[0].r[0].t
    return None

  return read


def _anchor(chart: Any) -> list:
  # the row of the end stands twice, as in the benchmark
  at = chart.anchor
  return [at.editAs, at._from.col, at.to.row, at.to.col, at.to.row]


_CHART: dict[str, Callable[[Any], Any]] = {
  "title": _title(lambda chart: chart.title),
  "xtitle": _title(lambda chart: chart.x_axis.title),
  "ytitle": _title(lambda chart: chart.y_axis.title),
  "ztitle": _title(lambda chart: chart.z_axis.title),
  "type": lambda chart: chart.tagname,
  "legend": lambda chart: chart.legend.position if chart.legend is not None else None,
  "width": lambda chart: chart.width,
  "height": lambda chart: chart.height,
  "direction": lambda chart: chart.barDir,
  "anchor": _anchor,
}


def pivots(sheet: Any, rule: dict, path: pathlib.Path) -> dict[str, dict]:
  """Data source -> the properties of rule["pivot_props"]. Field numbers count from the first field that has items."""
  from openpyxl.utils import coordinate_to_tuple

  out, props = {}, set(rule.get("pivot_props", []))
  for pivot in sheet._pivots:
    fields = [[(item.h, item.x) for item in field.items if item.x is not None] for field in pivot.pivotFields]
    left = next((i for i, items in enumerate(fields) if items), len(fields))
    right = next((i for i, items in enumerate(reversed(fields[left:])) if items), 0)
    chosen = fields[left : len(fields) - right]
    source = pivot.cache.cacheSource
    first, last = (coordinate_to_tuple(place) for place in source.worksheetSource.ref.split(":"))
    key = f"{source.type};{(first[0], first[1] + left)}:{(last[0], last[1] - right)};{source.worksheetSource.sheet}"
    info = {}
    for name, attribute in (
      ("name", "name"),
      ("show_total", "visualTotals"),
      ("show_empty_row", "showEmptyRow"),
      ("show_empty_col", "showEmptyCol"),
      ("show_headers", "showHeaders"),
    ):
      if name in props:
        info[name] = getattr(pivot, attribute)
    if "location" in props:
      info["location"] = pivot.location
    if props & {"filter", "selection"}:
      info["selection"] = chosen if "ordered" in props else [set(items) for items in chosen]
    if "filter" in props:
      info["filter_fields"] = {field.fld for field in pivot.pageFields}
    for name, attribute in (("col_fields", "colFields"), ("row_fields", "rowFields")):
      if name in props:
        info[name] = [field.x - left for field in getattr(pivot, attribute)]
    if "data_fields" in props:
      called = lambda field: field.name if "data_fields_name" in props else ""
      info["data_fields"] = [f"{f.fld - left};{called(f)};{f.subtotal};{f.showDataAs}" for f in pivot.dataFields]
    out[key] = info
  return out


def filters(sheet: Any, rule: dict, path: pathlib.Path) -> dict:
  there, columns = sheet.auto_filter, []
  for column in sorted(there.filterColumn, key=lambda column: column.colId):
    one = {"col_id": column.colId, "hidden_button": column.hiddenButton, "show_button": column.showButton}
    if column.filters is not None:
      one |= {"filters_blank": column.filters.blank, "filters": set(column.filters.filter)}
    if column.customFilters is not None:
      custom = column.customFilters
      one |= {"custom_filters_op": custom._and, "custom_filters": {(f.operator, f.val) for f in custom.customFilter}}
    columns.append(one)
  out = {"ref": there.ref, "filter_column": columns}
  if (sort := there.sortState) is not None:
    fields = ("descending", "sortBy", "ref", "customList", "dxfId", "iconSet", "iconId")
    out["sort_state"] = {"sort": sort.columnSort, "case": sort.caseSensitive, "method": sort.sortMethod, "ref": sort.ref}
    out["sort_state"]["condition"] = [{field: getattr(c, field) for field in fields} for c in sort.sortCondition]
  return out


def sparklines(sheet: Any, rule: dict, path: pathlib.Path) -> dict[str, str]:
  """Place -> range, of every sparkline."""
  number = {s.get("name"): s.get("sheetId") for s in guard.member(str(path), "xl/workbook.xml").iter(MAIN + "sheet")}[sheet.title]
  part = guard.member(str(path), f"xl/worksheets/sheet{number}.xml")
  return {one.find(XM + "sqref").text: one.find(XM + "f").text for one in part.iter(X14 + "sparkline")}
