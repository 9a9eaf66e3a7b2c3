"""Generated files and what each built-in metric must say of them, worked out by hand: shared by the suite and by the parity test.

CASES: (metric, result, expected, options, score). A value {"file": name} is a file that `write` makes.
"""

from __future__ import annotations

import json
import pathlib
import zipfile

import numpy as np
from PIL import Image

from envs.osworld.tasks import office

PREFS = 'user_pref("mail.theme", "dark-2");\n# no preference\nuser_pref("mail.quote", false);\nuser_pref("mail.n", 3);\n'
GIMP = '# settings\n(theme "Light")\n(undo-levels 100)\n(a b c)\n'
TEXTS = {
  "a.txt": "one\ntwo\n", "same.txt": "one\ntwo\n", "upper.txt": "ONE\nTWO\n", "spaced.txt": " one\n\n  two", "b.txt": "one\nthree\n",
  "empty.txt": "", "settings.json": json.dumps({"a": 1, "b": {"c": [1, 2]}, "d": "x"}), "broken.json": "{'a': 1", "prefs.js": PREFS,
  "gimprc": GIMP, "a.csv": "k,v\nx,1\n", "strip.csv": " k,v \nX,1\n", "list.json": "[1]",
}  # fmt: skip


def file(name: str) -> dict:
  return {"file": name}


def _book(path: pathlib.Path, change=None) -> None:
  import openpyxl
  from openpyxl.chart import BarChart, Reference
  from openpyxl.styles import Font, PatternFill

  book = openpyxl.Workbook()
  sheet = book.active
  sheet.title = "Sheet1"
  for row in (["item", "price"], ["tea", 2.5], ["oats", 4]):
    sheet.append(row)
  sheet["A1"].font = Font(bold=True, color="FFFF0000")
  sheet["B2"].fill = PatternFill("solid", fgColor="FF00FF00")
  sheet["B2"].number_format = "0.00"
  sheet.freeze_panes = "A2"
  sheet.sheet_view.zoomScale = 120
  sheet.row_dimensions[2].hidden = True
  sheet.auto_filter.ref = "A1:B3"
  book.create_sheet("Other").append(["x"])
  chart = BarChart()
  chart.title = "Prices"
  chart.add_data(Reference(sheet, min_col=2, min_row=2, max_row=3))
  sheet.add_chart(chart, "D1")
  if change is not None:
    change(book)
  book.save(path)


BOOKS = {
  "book.xlsx": None,
  "again.xlsx": None,
  "value.xlsx": lambda book: book["Sheet1"].__setitem__("B3", 5),
  "close.xlsx": lambda book: book["Sheet1"].__setitem__("B2", 2.500001),
  "plain.xlsx": lambda book: setattr(book["Sheet1"]["A1"], "style", "Normal"),
  "thawed.xlsx": lambda book: setattr(book["Sheet1"], "freeze_panes", None),
  "renamed.xlsx": lambda book: setattr(book["Sheet1"], "title", "Sheet2"),
  "shown.xlsx": lambda book: setattr(book["Sheet1"].row_dimensions[2], "hidden", False),
  "titled.xlsx": lambda book: setattr(book["Sheet1"]._charts[0], "title", "Costs"),
  "unfiltered.xlsx": lambda book: setattr(book["Sheet1"].auto_filter, "ref", "A1:A3"),
}


def _deck(path: pathlib.Path, text: str = "Hello", left: int = 914400, bold=None, align=None, note: str = "", extra: bool = False) -> None:
  import pptx

  deck = pptx.Presentation()
  slide = deck.slides.add_slide(deck.slide_layouts[6])
  frame = slide.shapes.add_textbox(left, 914400, 1828800, 914400).text_frame
  frame.text = text
  frame.paragraphs[0].runs[0].font.bold = bold
  frame.paragraphs[0].alignment = align
  slide.notes_slide.notes_text_frame.text = note
  table = slide.shapes.add_table(1, 2, 914400, 3000000, 1828800, 400000).table
  table.cell(0, 0).text = "cell"
  if extra:
    deck.slides.add_slide(deck.slide_layouts[6]).notes_slide.notes_text_frame.text = ""
  deck.save(path)


def _docx(path: pathlib.Path, paragraphs: list[str], sub: bool = False, cell: str = "x") -> None:
  import docx

  document = docx.Document()
  for text in paragraphs:
    paragraph = document.add_paragraph()
    paragraph.add_run(text[:1])
    paragraph.add_run(text[1:2]).font.subscript = sub or None
    paragraph.add_run(text[2:])
  table = document.add_table(1, 2)
  table.cell(0, 1).text = f" {cell} "
  document.save(path)


def _pdf(path: pathlib.Path, text: str) -> None:
  """One page with one line of text, by hand."""
  stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
  parts = [
    b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
    b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
    b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream), b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
  ]  # fmt: skip
  out, places = b"%PDF-1.4\n", []
  for number, part in enumerate(parts, 1):
    places.append(len(out))
    out += b"%d 0 obj\n%s\nendobj\n" % (number, part)
  table = b"".join(b"%010d 00000 n \n" % place for place in places)
  end = b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % len(out)
  path.write_bytes(out + b"xref\n0 6\n0000000000 65535 f \n" + table + end)


def _zip(path: pathlib.Path, members: dict[str, str]) -> None:
  with zipfile.ZipFile(path, "w") as opened:
    for name, text in members.items():
      opened.writestr(name, text)


def write(folder: pathlib.Path) -> None:
  """Makes every file."""
  for name, text in TEXTS.items():
    (folder / name).write_text(text)
  for name, change in BOOKS.items():
    _book(folder / name, change)
  _deck(folder / "deck.pptx")
  for name, changed in {
    "deck2.pptx": {}, "text.pptx": {"text": "Hullo"}, "near.pptx": {"left": 914401}, "far.pptx": {"left": 1000000},
    "bold.pptx": {"bold": True}, "nobold.pptx": {"bold": False},
    "left.pptx": {"align": 1}, "right.pptx": {"align": 3}, "note.pptx": {"note": "say it"},
    "extra.pptx": {"extra": True},
  }.items():  # fmt: skip
    _deck(folder / name, **changed)
  _docx(folder / "a.docx", ["H2O is", "wet"])
  _docx(folder / "a2.docx", ["H2O  is", "wet"])
  _docx(folder / "b.docx", ["H2O is", "dry"])
  _docx(folder / "turned.docx", ["wet", "H2O is"])
  _docx(folder / "sub.docx", ["H2O is", "wet"], sub=True)
  _docx(folder / "cell.docx", ["H2O is", "wet"], cell="y")
  (folder / "a.odt").write_bytes(office.odt(["one two", "three"]))
  (folder / "b.odt").write_bytes(office.odt(["one two", "four"]))
  _pdf(folder / "a.pdf", "Hello there")
  _pdf(folder / "b.pdf", "Hello where")
  x_HW = np.add.outer(np.arange(24), np.arange(32)).astype(np.uint8) * 4
  Image.fromarray(x_HW).save(folder / "a.png")
  Image.fromarray(255 - x_HW).save(folder / "negative.png")
  Image.fromarray(np.minimum(x_HW + 3, 255).astype(np.uint8)).save(folder / "lighter.png")
  _zip(folder / "a.zip", {"d/one.txt": "1", "d/two.txt": "2"})
  _zip(folder / "a2.zip", {"d/one.txt": "1", "d/two.txt": "2"})
  _zip(folder / "half.zip", {"d/one.txt": "1", "d/two.txt": "3"})
  _zip(folder / "other.zip", {"d/one.txt": "1", "d/three.txt": "2"})


def _rule(kind: str, **more) -> dict:
  return {"rules": [{"type": kind, "sheet_idx0": 0, "sheet_idx1": "EI0"} | more]}


def _cell(place: str, **props) -> dict:
  return {"rules": [{"type": "check_cell", "sheet_idx": "RNSheet1", "coordinate": place, "props": props}]}


def _eq(ref) -> dict:
  return {"method": "eq", "ref": ref}


R = lambda **rules: rules
_ITEM = {"method": "re.S", "ref": "dark"}
TABS = {"type": "url", "urls": ["https://a.com", "https://b.com"]}
FUZZY = [{"range": ["A2:A3"], "type": "fuzzy_match", "threshold": 80}]
NO_EXAMINE = {f"examine_{name}": False for name in ("shape", "font_bold", "note", "number_of_slides", "alignment", "text", "bullets")}
CASES: list[tuple] = [
  ("check_include_exclude", "a b c", R(include=["a", "c"], exclude=["d"]), {}, 1),
  ("check_include_exclude", "a b c", R(include=["a", "d"]), {}, 0),
  ("check_include_exclude", "a b c", R(include=["a"], exclude=["b"]), {}, 0),
  ("check_include_exclude", None, R(exclude=["b"]), {}, 0),
  ("exact_match", "true", R(expected="true"), {}, 1),
  ("exact_match", "true\n", R(expected="true"), {}, 0),
  ("exact_match", ["a"], R(expected=["a"]), {}, 1),
  ("match_in_list", "b", R(expected=["a", "b"]), {}, 1),
  ("match_in_list", "c", R(expected=["a", "b"]), {}, 0),
  ("is_in_list", ["a", "b"], R(expected="b"), {}, 1),
  ("is_in_list", ["a", "b"], R(expected="c"), {}, 0),
  ("is_extension_installed", "x\nmattn.lisp\n", R(type="contain", expected="mattn.lisp"), {}, 1),
  ("is_extension_installed", "x\n", R(type="contain", expected="mattn.lisp"), {}, 0),
  ("is_extension_installed", "x\n", R(type="not_contain", expected="mattn.lisp"), {}, 1),
  ("check_list", file("a.txt"), R(expect=["^o", "wo$"], unexpect=["three"]), {}, 1),
  ("check_list", file("a.txt"), R(expect=["^three"]), {}, 0),
  ("check_list", file("a.txt"), R(unexpect=[".+"]), {}, 0),
  ("check_list", file("empty.txt"), R(unexpect=[".+"]), {}, 1),
  ("check_json_settings", file("settings.json"), R(expected={"a": 1, "b": {"c": [1, 2]}}), {}, 1),
  ("check_json_settings", file("settings.json"), R(expected={"a": 2}), {}, 0),
  ("check_json_settings", file("settings.json"), R(expected={"z": None}), {}, 0),
  ("check_json_settings", file("broken.json"), R(expected={}), {}, 0),
  ("check_json_settings", None, R(expected={}), {}, 0),
  ("check_json", file("settings.json"), R(expect=[{"key": ["b", "c"], "method": "eq", "ref": [1, 2]}]), {}, 1),
  ("check_json", file("settings.json"), R(expect=[{"key": ["d"], "method": "re", "ref": "^x$"}]), {}, 1),
  ("check_json", file("settings.json"), R(expect=[{"key": ["b", "z"], "method": "eq", "ref": 1}]), {}, 0),
  ("check_json", file("settings.json"), R(unexpect=[{"key": ["a"], "method": "ge", "ref": 1}]), {}, 0),
  ("check_direct_json_object", {"a": 1, "b": "x"}, R(expected={"a": 1}), {}, 1),
  ("check_direct_json_object", {"a": 2}, R(expected={"a": 1}), {}, 0),
  ("check_direct_json_object", " {'a': 'x'}\n", R(expected={"a": "x"}), {}, 1),
  ("check_direct_json_object", None, R(expected={"a": 1}), {}, 0),
  ("check_direct_json_object", {"a": ["p", "q"]}, R(expected={"a": ["q", "z"]}, expect_in_result=True), {}, 1),
  ("check_direct_json_object", {"a": "a tea shop"}, R(expected={"a": "tea"}, expect_in_result=True), {}, 1),
  ("check_direct_json_object", {"a": "a shop"}, R(expected={"a": "tea"}, expect_in_result=True), {}, 0),
  ("check_direct_json_object", {"a": "x"}, R(expected={"a": "__EVALUATION_FAILED__"}), {}, 0),
  ("compare_text_file", file("a.txt"), file("same.txt"), {}, 1),
  ("compare_text_file", file("a.txt"), file("b.txt"), {}, 0),
  ("compare_text_file", file("a.txt"), file("upper.txt"), {}, 0),
  ("compare_text_file", file("a.txt"), file("upper.txt"), {"ignore_case": True}, 1),
  ("compare_text_file", file("a.txt"), file("spaced.txt"), {"ignore_blanks": True}, 1),
  ("diff_text_file", file("a.txt"), file("same.txt"), {}, 1),
  ("diff_text_file", file("a.txt"), file("b.txt"), {}, 0.5),  # 2 * 1 equal line / (2 + 2) lines
  ("file_contains", file("a.txt"), R(expected=["one", "wo"]), {}, 1),
  ("file_contains", file("a.txt"), R(expected=["One"]), {}, 0),
  ("check_config_status", file("gimprc"), R(key="theme", value='"Light"'), {}, 1),
  ("check_config_status", file("gimprc"), R(key="undo-levels", value="99"), {}, 0),
  ("check_config_status", file("gimprc"), R(key=["a", "b"], value="c"), {}, 1),
  ("check_thunderbird_prefs", file("prefs.js"), R(expect={"mail.theme": _ITEM, "mail.quote": _eq(False)}), {}, 1),
  ("check_thunderbird_prefs", file("prefs.js"), R(expect={"mail.theme": _ITEM, "mail.gone": _eq(1)}), {}, 0),
  ("check_thunderbird_prefs", file("prefs.js"), R(unexpect={"mail.n": {"method": "gt", "ref": 2}}), {}, 0),
  ("check_csv", file("a.csv"), R(expect=[{"k": "x", "v": "1"}]), {}, 1),
  ("check_csv", file("a.csv"), R(unexpect=[{"k": "x"}]), {}, 0),
  ("compare_csv", file("a.csv"), file("a.csv"), {}, 1),
  ("compare_csv", file("a.csv"), file("strip.csv"), {}, 0),
  ("compare_csv", file("a.csv"), file("strip.csv"), {"strict": False, "ignore_case": True}, 1),
  ("compare_csv", file("a.csv"), [file("strip.csv"), file("a.csv")], {}, 1),
  ("is_expected_url_pattern_match", "https://a.test/manchester/x", R(expected=["/manchester/", "x$"]), {}, 1),
  ("is_expected_url_pattern_match", {"url": "https://a.test/leeds"}, R(expected=["/manchester/"]), {}, 0),
  ("is_expected_url_pattern_match", None, R(expected=[""]), {}, 0),
  ("is_expected_active_tab", "https://www.airbnb.com/", R(type="url", url="https://airbnb.co.uk"), {}, 1),
  ("is_expected_active_tab", "http://a.test/x?q=1", R(type="url", url="a.test/x?q=1"), {}, 1),
  ("is_expected_active_tab", "https://a.test/x?q=2", R(type="url", url="https://a.test/x?q=1"), {}, 0),
  ("is_expected_active_tab", "https://mail.google.com/", R(type="url", url="https://google.com/"), {}, 0),
  ("is_expected_tabs", [{"url": "https://b.com/"}, {"url": "https://www.a.com"}], TABS, {}, 1),
  ("is_expected_tabs", [{"url": "https://a.com"}], TABS, {}, 0),
  ("compare_table", file("book.xlsx"), file("again.xlsx"), _rule("sheet_data"), 1),
  ("compare_table", file("value.xlsx"), file("again.xlsx"), _rule("sheet_data"), 0),
  ("compare_table", file("close.xlsx"), file("again.xlsx"), _rule("sheet_data"), 1),  # 2.500001 is 2.5 to 4 decimals
  ("compare_table", file("close.xlsx"), file("again.xlsx"), _rule("sheet_data", precision=6), 0),
  ("compare_table", file("value.xlsx"), file("again.xlsx"), _rule("sheet_data", sheet_idx0="RNOther", sheet_idx1="ENOther"), 1),
  ("compare_table", file("book.xlsx"), file("again.xlsx"), _rule("sheet_data", sheet_idx0="RNGone"), 0),
  ("compare_table", file("book.xlsx"), file("again.xlsx"), _rule("sheet_name"), 1),
  ("compare_table", file("renamed.xlsx"), file("again.xlsx"), _rule("sheet_name"), 0),
  ("compare_table", file("book.xlsx"), file("again.xlsx"), _rule("freeze"), 1),
  ("compare_table", file("thawed.xlsx"), file("again.xlsx"), _rule("freeze"), 0),
  ("compare_table", file("book.xlsx"), None, {"rules": [{"type": "zoom", "sheet_idx": 0, "method": "lt", "ref": 130}]}, 1),
  ("compare_table", file("book.xlsx"), None, {"rules": [{"type": "zoom", "sheet_idx": 0, "method": "lt", "ref": 110}]}, 0),
  ("compare_table", file("book.xlsx"), file("again.xlsx"), _rule("row_props", props=["hidden"]), 1),
  ("compare_table", file("shown.xlsx"), file("again.xlsx"), _rule("row_props", props=["hidden"]), 0),
  ("compare_table", file("book.xlsx"), file("again.xlsx"), _rule("style", props=["font_bold", "bgcolor", "number_format"]), 1),
  ("compare_table", file("plain.xlsx"), file("again.xlsx"), _rule("style", props=["font_bold"]), 0),
  ("compare_table", file("plain.xlsx"), file("again.xlsx"), _rule("style", props=["bgcolor"]), 1),
  ("compare_table", file("book.xlsx"), file("again.xlsx"), _rule("chart", chart_props=["type", "title", "direction"]), 1),
  ("compare_table", file("titled.xlsx"), file("again.xlsx"), _rule("chart", chart_props=["type", "title"]), 0),
  ("compare_table", file("titled.xlsx"), file("again.xlsx"), _rule("chart", chart_props=["type"]), 1),
  ("compare_table", file("book.xlsx"), file("again.xlsx"), _rule("filter"), 1),
  ("compare_table", file("unfiltered.xlsx"), file("again.xlsx"), _rule("filter"), 0),
  ("compare_table", file("book.xlsx"), file("value.xlsx"), _rule("sheet_fuzzy", rules=FUZZY), 1),
  ("compare_table", file("book.xlsx"), file("value.xlsx"), _rule("sheet_fuzzy", rules=[{"range": ["B3"], "type": "exact_match"}]), 0),
  ("compare_table", file("book.xlsx"), None, _cell("B2", value={"method": "approx:0.1", "ref": 2.45}, number_format=_eq("0.00")), 1),
  ("compare_table", file("book.xlsx"), None, _cell("A1", value=_eq("item"), font_bold=_eq(True), font_color=_eq("FFFF0000")), 1),
  ("compare_table", file("book.xlsx"), None, _cell("B2", bgcolor=_eq("FF00FF00")), 1),
  ("compare_table", file("book.xlsx"), None, _cell("B9", value=_eq(None)), 1),
  ("compare_table", file("value.xlsx"), None, _cell("B3", value=_eq(4.0)), 0),
  ("compare_table", None, None, _cell("B3", value=_eq(4.0)), 0),
  ("compare_docx_files", file("a.docx"), file("a2.docx"), {}, 1),
  ("compare_docx_files", file("a.docx"), file("a2.docx"), {"ignore_blanks": False}, 0),
  ("compare_docx_files", file("a.docx"), file("b.docx"), {}, 0),
  ("compare_docx_files", file("a.docx"), file("turned.docx"), {"ignore_order": True}, 1),
  ("compare_docx_files", file("a.odt"), file("a.odt"), {}, 1),
  ("compare_docx_files", file("a.odt"), file("b.odt"), {}, 0),
  ("compare_docx_files", file("a.odt"), file("a.docx"), {}, 0),
  # "H2O is wet" and "H2O is dry", 10 letters each: 7 are kept, so the ratio is 2 * 7 / 20
  ("compare_docx_files", file("a.docx"), file("b.docx"), {"fuzzy_match": True}, 0.7),
  ("compare_docx_tables", file("a.docx"), file("b.docx"), {}, 1),
  ("compare_docx_tables", file("a.docx"), file("cell.docx"), {}, 0),
  ("compare_subscript_contains", file("sub.docx"), file("sub.docx"), {}, 1),
  ("compare_subscript_contains", file("a.docx"), file("sub.docx"), {}, 0),
  ("compare_pdfs", file("a.pdf"), file("a.pdf"), {}, 1),
  # "Hello there" and "Hello where": 11 letters, one replaced: 2 * 10 / 22
  ("compare_pdfs", file("a.pdf"), file("b.pdf"), {}, 10 / 11),
  ("compare_pptx_files", file("deck.pptx"), file("deck2.pptx"), {}, 1),
  ("compare_pptx_files", file("deck.pptx"), file("text.pptx"), {}, 0),
  ("compare_pptx_files", file("deck.pptx"), file("near.pptx"), {}, 1),  # a millionth apart, 0.005 is near
  ("compare_pptx_files", file("deck.pptx"), file("far.pptx"), {}, 0),
  ("compare_pptx_files", file("deck.pptx"), file("far.pptx"), {"examine_shape": False}, 1),
  ("compare_pptx_files", file("deck.pptx"), file("bold.pptx"), {}, 0),
  ("compare_pptx_files", file("deck.pptx"), file("bold.pptx"), {"examine_font_bold": False}, 1),
  ("compare_pptx_files", file("deck.pptx"), file("nobold.pptx"), {}, 1),
  ("compare_pptx_files", file("deck.pptx"), file("left.pptx"), {}, 1),
  ("compare_pptx_files", file("deck.pptx"), file("right.pptx"), {}, 0),
  ("compare_pptx_files", file("deck.pptx"), file("note.pptx"), {}, 0),
  ("compare_pptx_files", file("deck.pptx"), file("note.pptx"), {"examine_note": False}, 1),
  ("compare_pptx_files", file("deck.pptx"), file("extra.pptx"), {}, 0),
  ("compare_pptx_files", file("deck.pptx"), file("extra.pptx"), {"examine_number_of_slides": False}, 1),
  ("compare_pptx_files", file("deck.pptx"), file("text.pptx"), NO_EXAMINE, 1),
  ("compare_images", file("a.png"), file("a.png"), {}, 1),
  ("compare_images", file("a.png"), file("negative.png"), {"reference_base_result": 0.5}, 0),
  ("compare_images", None, file("a.png"), {}, 0),
  ("compare_archive", file("a.zip"), file("a2.zip"), {"file_path": "d"}, 1),
  ("compare_archive", file("a.zip"), file("half.zip"), {"file_path": "d"}, 0.5),
  ("compare_archive", file("a.zip"), file("other.zip"), {"file_path": "d"}, 0),
]  # fmt: skip


def placed(value, folder: pathlib.Path):
  """The value with its files in a folder."""
  if isinstance(value, list) and value and isinstance(value[0], dict) and "file" in value[0]:
    return [placed(one, folder) for one in value]
  return str(folder / value["file"]) if isinstance(value, dict) and value.keys() == {"file"} else value
