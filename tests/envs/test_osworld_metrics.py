"""Built-in metrics on generated files, the scores worked out by hand (tests/envs/office_cases.py), and on files made to do harm."""

import errno
import io
import json
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image

from envs.osworld import metrics
from envs.osworld.metrics import guard, pages, rules
from envs.osworld.tasks import office
from tests.envs import office_cases

pytest.importorskip("openpyxl", reason="pip install -r requirements-desktop.txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  made = tmp_path_factory.mktemp("office")
  office_cases.write(made)
  return made


def score(name, result, expected, options):
  return metrics.metric(name)(result, *([] if expected is None else [expected]), **options)


@pytest.mark.parametrize("case", office_cases.CASES, ids=[f"{i}-{c[0]}-{c[4]:.2g}" for i, c in enumerate(office_cases.CASES)])
def test_scores(folder, case):
  name, result, expected, options, wanted = case
  try:
    got = score(name, office_cases.placed(result, folder), office_cases.placed(expected, folder), options)
  except guard.BadResult:
    got = 0.0
  assert got == pytest.approx(wanted, abs=1e-9)


def test_every_metric_has_cases_that_pass_and_fail():
  own = {name for name in metrics.METRICS if name.startswith("practice_")}
  passed, failed = ({c[0] for c in office_cases.CASES if bool(c[4] == 1) == good} for good in (True, False))
  assert passed | own == metrics.METRICS.keys() == failed | own
  # the 20 most used of the 369 tasks, counted over their files; infeasible is a rule of scoring
  most = (
    "compare_table compare_pptx_files check_include_exclude check_direct_json_object exact_match compare_docx_files compare_pdfs "
    "is_expected_url_pattern_match compare_images check_list check_json_settings compare_text_file is_extension_installed is_expected_tabs "
    "is_expected_active_tab check_config_status compare_csv compare_docx_tables check_thunderbird_prefs"
  )
  assert set(most.split()) <= metrics.METRICS.keys()


def test_the_same_file_of_every_kind_is_itself(folder):
  """Whatever a file metric compares, a file is equal to itself."""
  for name, path in (
    ("compare_text_file", "a.txt"), ("compare_csv", "a.csv"), ("compare_docx_files", "sub.docx"), ("compare_docx_tables", "cell.docx"),
    ("compare_pdfs", "b.pdf"), ("compare_pptx_files", "note.pptx"), ("compare_images", "negative.png"), ("diff_text_file", "b.txt"),
  ):  # fmt: skip
    assert score(name, str(folder / path), str(folder / path), {}) == pytest.approx(1)


@pytest.mark.parametrize(
  "value, rule, wanted",
  [
    (3, {"method": "range.te", "ref": [2, 3]}, True),
    (2, {"method": "range.te", "ref": [2, 3]}, False),
    ("a,b", {"method": "str_list_eq", "ref": ["a", "b"]}, True),
    ("b,a", {"method": "str_list_eq", "ref": ["a", "b"]}, False),
    ('"b,a"', {"method": "str_set_eq", "ref": ["a", "b"]}, True),
    ("Dark", {"method": "re.I", "ref": "dark"}, True),
    ("Dark", {"method": "re", "ref": "dark"}, False),
    (None, {"method": "re", "ref": "dark"}, False),
    ("x", {"method": "lt", "ref": 3}, False),
    ("x", {"method": "approx:1", "ref": 3}, False),
    ("3.5", {"method": "approx:0.5", "ref": 3}, True),
    ([1], {"method": "spreadsheet_range", "ref": ["A1", "A9"]}, False),
    ("A2", {"method": "spreadsheet_range", "ref": ["A1", "A9"]}, False),
  ],
)
def test_rules(value, rule, wanted):
  assert rules.matches(value, rule) is wanted


def test_unknown_rules_are_the_tasks_fault_and_no_score(folder):
  for rule in ({"method": "sounds_like", "ref": "a"}, {"method": "re.eval", "ref": "a"}):
    with pytest.raises(ValueError, match="unknown"):
      rules.matches("a", rule)
  with pytest.raises(guard.BadExpected, match="no rule 'colour'"):
    score("compare_table", str(folder / "book.xlsx"), None, {"rules": [{"type": "colour"}]})
  with pytest.raises(guard.BadExpected, match="no style 'font_smell'"):
    cell = {"type": "check_cell", "sheet_idx": 0, "coordinate": "A1", "props": {"font_smell": {"method": "eq", "ref": 1}}}
    score("compare_table", str(folder / "book.xlsx"), None, {"rules": [cell]})


def test_similarity_against_the_definition():
  """Wang et al. 2004, equation 13, summed up window by window."""
  rng = np.random.default_rng(0)
  a, b = rng.integers(0, 256, (2, 12, 15)).astype(float)
  total = []
  for y in range(12 - 6):
    for x in range(15 - 6):
      p, q = a[y : y + 7, x : x + 7].ravel(), b[y : y + 7, x : x + 7].ravel()
      cov = np.cov(p, q)  # sample covariance
      c1, c2 = 2.55**2, 7.65**2
      top = (2 * p.mean() * q.mean() + c1) * (2 * cov[0, 1] + c2)
      total.append(top / ((p.mean() ** 2 + q.mean() ** 2 + c1) * (cov[0, 0] + cov[1, 1] + c2)))
  assert pages.similarity(a, b) == pytest.approx(np.mean(total))
  assert pages.similarity(a, b) == pytest.approx(pages.similarity(b, a))


# ---- this project's own


def test_document_runs(tmp_path):
  docx = pytest.importorskip("docx")
  wanted = {"expected": [[["H", []], ["2", ["subscript"]], ["O", []]], [["bold", ["bold"]], [" and", []]]]}
  document = docx.Document()
  paragraph = document.add_paragraph("H")
  paragraph.add_run("2").font.subscript = True
  paragraph.add_run("")
  paragraph.add_run("O")
  document.add_paragraph().add_run("bo").font.bold = True
  document.paragraphs[1].add_run("ld").font.bold = True
  document.paragraphs[1].add_run(" and")
  document.add_paragraph("")
  path = str(tmp_path / "a.docx")
  document.save(path)
  assert score("practice_document_runs", path, wanted, {}) == 1  # runs of one style are one, what is empty is nothing
  paragraph.runs[1].font.subscript = False
  document.save(path)
  assert score("practice_document_runs", path, wanted, {}) == 0
  paragraph.runs[1].font.superscript = True
  document.save(path)
  assert score("practice_document_runs", path, wanted, {}) == 0
  assert score("practice_document_runs", None, wanted, {}) == 0


def odt_of(body: str, styles: str) -> bytes:
  names = {"office": "office", "text": "text", "style": "style", "fo": "xsl-fo-compatible"}
  spaces = " ".join(f'xmlns:{s}="urn:oasis:names:tc:opendocument:xmlns:{n}:1.0"' for s, n in names.items())
  content = f"<office:document-content {spaces}><office:automatic-styles>{styles}</office:automatic-styles>"
  content += f"<office:body><office:text>{body}</office:text></office:body></office:document-content>"
  return office.archive({"mimetype": "application/vnd.oasis.opendocument.text", "content.xml": content}, ("mimetype",))


def test_document_runs_as_writer_saves_them(tmp_path):
  """The form that LibreOffice 7.4 wrote for H2O with its 2 lowered: <span style-name=T1>, T1's text-position "sub 58%"."""
  style = lambda name, said: f'<style:style style:name="{name}" style:family="text"><style:text-properties {said}/></style:style>'
  styles = style("T1", 'style:text-position="sub 58%"') + style("T2", 'fo:font-weight="bold" fo:font-style="italic"')
  styles += style("T3", 'style:text-position="super 58%"') + style("T4", 'style:text-underline-style="solid"')
  body = '<text:p>H<text:span text:style-name="T1">2</text:span>O</text:p>'
  body += '<text:p><text:span text:style-name="T2">a<text:s text:c="2"/>b</text:span><text:tab/>x'
  body += '<text:span text:style-name="T3">3</text:span></text:p>'
  body += '<text:h><text:span text:style-name="T4">head</text:span></text:h><text:p/>'
  path = tmp_path / "a.odt"
  path.write_bytes(odt_of(body, styles))
  wanted = [[["H", []], ["2", ["subscript"]], ["O", []]], [["a  b", ["bold", "italic"]], ["\tx", []], ["3", ["superscript"]]]]
  wanted += [[["head", ["underline"]]]]
  assert score("practice_document_runs", str(path), {"expected": wanted}, {}) == 1
  path.write_bytes(odt_of(body.replace("T1", "T9"), styles))
  assert score("practice_document_runs", str(path), {"expected": wanted}, {}) == 0


def test_lines(tmp_path):
  path = tmp_path / "a.txt"
  for text, wanted in (("a\nb\n", 1), ("a\nb", 1), ("a\nb\n\n\n", 1), ("a\n\nb", 0), (" a\nb", 0), ("b\na", 0), ("", 0)):
    path.write_text(text)
    assert score("practice_lines", str(path), {"expected": ["a", "b"]}, {}) == wanted, text
  assert score("practice_lines", None, {"expected": []}, {}) == 0


# ---- made to do harm: each is the maker's, and scores 0


def bomb() -> bytes:
  out = io.BytesIO()
  with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as opened:
    opened.writestr("content.xml", b"\0" * (60 << 20))
  return out.getvalue()


def entities(name: str) -> bytes:
  laughs = "".join(f'<!ENTITY a{i + 1} "{f"&a{i};" * 10}">' for i in range(9))
  return office.archive({name: f'<?xml version="1.0"?><!DOCTYPE r [<!ENTITY a0 "ha">{laughs}]><r>&a9;</r>', "[Content_Types].xml": "<a/>"})


def outside(name: str) -> bytes:
  out = io.BytesIO()
  with zipfile.ZipFile(out, "w") as opened:
    opened.writestr(name, "x")
    opened.writestr("d/one.txt", "1")
  return out.getvalue()


def tar_of(member: tarfile.TarInfo, data: bytes = b"") -> bytes:
  out = io.BytesIO()
  with tarfile.open(fileobj=out, mode="w:gz") as opened:
    member.size = len(data)
    opened.addfile(member, io.BytesIO(data))
  return out.getvalue()


def link(name: str, to: str) -> tarfile.TarInfo:
  member = tarfile.TarInfo(name)
  member.type, member.linkname = tarfile.SYMTYPE, to
  return member


def far_cell() -> bytes:
  import openpyxl

  book, out = openpyxl.Workbook(), io.BytesIO()
  book.active["XFD1048576"] = 1
  book.save(out)
  return out.getvalue()


def torn_deck() -> bytes:
  """A presentation whose one shape stands nowhere: python-pptx opens it, and fails when the place is asked for."""
  import pptx

  deck, out = pptx.Presentation(), io.BytesIO()
  deck.slides.add_slide(deck.slide_layouts[6]).shapes.add_textbox(1, 1, 914400, 914400)
  deck.save(out)
  torn = io.BytesIO()
  with zipfile.ZipFile(out) as whole, zipfile.ZipFile(torn, "w") as opened:
    for name in whole.namelist():
      opened.writestr(name, whole.read(name).replace(b'cx="914400"', b'cx="wide"'))
  return torn.getvalue()


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
HARM = [
  ("compare_docx_files", "a.odt", bomb()),
  ("compare_docx_files", "a.odt", entities("content.xml")),
  ("compare_docx_files", "a.docx", entities("word/document.xml")),
  ("compare_docx_tables", "a.docx", b"not a document"),
  ("practice_document_runs", "a.odt", entities("content.xml")),
  ("compare_pptx_files", "deck.pptx", entities("ppt/presentation.xml")),
  ("compare_table", "book.xlsx", entities("xl/workbook.xml")),
  ("compare_table", "book.xlsx", far_cell()),
  ("compare_table", "book.xlsx", b""),
  ("compare_images", "a.png", b"\x89PNG\r\n\x1a\n"),
  ("compare_images", "a.png", POSTSCRIPT),
  ("compare_pptx_files", "deck.pptx", torn_deck()),
  ("compare_pdfs", "a.pdf", b"%PDF-1.4 nothing else"),
  ("compare_archive", "a.zip", outside("../climbed.txt")),
  ("compare_archive", "a.zip", outside("/tmp/climbed.txt")),
  ("compare_archive", "a.zip", outside("..\\climbed.txt")),
  ("compare_archive", "a.zip", tar_of(tarfile.TarInfo("../climbed.txt"), b"x")),
  ("compare_archive", "a.zip", tar_of(link("d", "/etc"))),
  ("compare_archive", "a.zip", b"PK\x03\x04broken"),
  ("compare_text_file", "a.txt", b"\xff\xfe\x00"),
  ("check_json_settings", "settings.json", b"[" * 100_000),
  ("check_json", "settings.json", b"NaN and more"),
  ("check_thunderbird_prefs", "prefs.js", b'user_pref("a", __import__("os"));\n'),
  ("check_list", "a.txt", b"\x80"),
]


@pytest.mark.parametrize("case", HARM, ids=[f"{i}-{c[0]}" for i, c in enumerate(HARM)])
def test_harmful_results_cannot_be_read(folder, tmp_path, case):
  name, good, data = case
  (tmp_path / "deep").mkdir()
  path = tmp_path / "deep" / good
  path.write_bytes(data)
  expected: object = {"practice_document_runs": {"expected": []}, "check_list": {"expect": ["a"]}}.get(name, str(folder / good))
  if good.endswith(("json", "js")):
    expected = {"expected": {}, "expect": {} if good == "prefs.js" else [{"key": [], "method": "eq", "ref": 1}]}
  options = {"compare_table": {"rules": [{"type": "sheet_name"}]}, "compare_archive": {"file_path": "d"}}.get(name, {})
  with pytest.raises(guard.BadResult) as caught:
    score(name, str(path), expected, options)
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 260
  assert sorted(p.name for p in tmp_path.rglob("*")) == sorted(["deep", good])  # nothing was written anywhere beside


def test_the_same_harm_in_the_expected_file_is_no_score(folder, tmp_path):
  path = tmp_path / "a.odt"
  path.write_bytes(entities("content.xml"))
  with pytest.raises(guard.BadExpected):
    score("compare_docx_files", str(folder / "a.odt"), str(path), {})


def test_a_document_type_makes_a_whole_document_unreadable(folder, tmp_path):
  """Where the library that opens it would have gone on: nothing but the declaration is wrong."""
  for name, part, metric in (("a.docx", "word/document.xml", "compare_docx_files"), ("a.odt", "content.xml", "practice_document_runs")):
    with zipfile.ZipFile(folder / name) as opened:
      members = {member: opened.read(member).decode() for member in opened.namelist() if not member.endswith(".jpeg")}
    plain = members[part]
    for before in ("", f"<!--{' ' * 5000}-->"):
      members[part] = plain.replace("?>", f'?>{before}<!DOCTYPE x [<!ENTITY a "b">]>', 1)
      (tmp_path / name).write_bytes(office.archive(members))
      with pytest.raises(guard.BadResult, match="document type|DTDForbidden"):
        score(metric, str(tmp_path / name), {"expected": []} if metric.startswith("practice") else str(folder / name), {})


def test_a_picture_that_is_a_program_is_not_run(folder, tmp_path, monkeypatch):
  """Pillow gives PostScript to Ghostscript, where that is installed."""
  (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
  (tmp_path / "gs").chmod(0o755)
  (tmp_path / "a.png").write_bytes(POSTSCRIPT)
  monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
  monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
  with pytest.raises(guard.BadResult):
    score("compare_images", str(tmp_path / "a.png"), str(folder / "a.png"), {})
  assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("said", ["http://[", "http://[::1", "http://\u2100.test/"])
def test_what_is_no_address_is_not_the_one_that_is_wanted(said):
  """What stands in an address bar is the agent's; that urllib cannot take it apart is no fault of the metric."""
  assert score("is_expected_active_tab", said, {"type": "url", "url": "https://a.test/"}, {}) == 0
  assert score("is_expected_tabs", [{"url": said}], {"type": "url", "urls": ["https://a.test/"]}, {}) == 0


@pytest.mark.parametrize("said", ['{"a": 5}', '{"a": [1, "x"]}', '{"a": [{}, []]}'])
def test_a_list_that_has_no_order_is_another_one(said):
  assert score("check_direct_json_object", said, {"expected": {"a": ["x"], "ignore_list_order": True}}, {}) == 0


def test_huge_files_are_not_read(folder, tmp_path):
  path = tmp_path / "a.txt"
  with path.open("wb") as file:
    file.truncate(guard.MAX_TEXT + 1)
  with pytest.raises(guard.BadResult, match="bytes"):
    score("compare_text_file", str(path), str(folder / "a.txt"), {})
  Image.new("L", (9000, 8000)).save(tmp_path / "a.png")
  with pytest.raises(guard.BadResult, match="9000 x 8000"):
    score("compare_images", str(tmp_path / "a.png"), str(folder / "a.png"), {})


def test_what_looks_like_code_or_a_formula_is_text(tmp_path, folder):
  evil = "__import__('os').system('touch pwned')"
  path = tmp_path / "x.json"
  path.write_text(json.dumps({"a": evil}))
  assert score("check_json_settings", str(path), {"expected": {"a": evil}}, {}) == 1
  assert score("check_direct_json_object", f'{{"a": "{evil}"}}', {"expected": {"a": 1}}, {}) == 0
  book = tmp_path / "f.xlsx"
  book.write_bytes(office.xlsx([["=1+1", 2]]))  # a text that begins like a formula
  cell = {"type": "check_cell", "sheet_idx": 0, "coordinate": "A1"}
  rule = lambda ref: {"rules": [cell | {"props": {"value": {"method": "eq", "ref": ref}}}]}
  assert score("compare_table", str(book), None, rule("=1+1")) == 1 and score("compare_table", str(book), None, rule(2.0)) == 0
  assert not (tmp_path / "pwned").exists()


def test_what_this_machine_lacks_is_no_score_of_the_result(tmp_path):
  path = tmp_path / "a.docx"
  path.write_bytes(b"x")

  def fails(error):
    def reader(path):
      raise error

    guard.read(reader, str(path), "result")

  for error in (ModuleNotFoundError("No module named 'docx'"), OSError(errno.ENOSPC, "No space left on device")):
    with pytest.raises(type(error)):
      fails(error)
  with pytest.raises(guard.BadResult):  # Pillow's word for a picture that breaks off
    fails(OSError("image file is truncated"))
