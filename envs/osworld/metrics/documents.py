"""Metrics of text documents (.docx, .odt), PDF files and archives. Semantics: desktop-env's desktop_env/evaluators/metrics (docs, chrome),
Apache 2.0; practice_document_runs is this project's own."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from envs.osworld.metrics import guard

ODF = {
  "text": "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}",
  "style": "{urn:oasis:names:tc:opendocument:xmlns:style:1.0}",
  "fo": "{urn:oasis:names:tc:opendocument:xmlns:xsl-fo-compatible:1.0}",
  "office": "{urn:oasis:names:tc:opendocument:xmlns:office:1.0}",
}
STYLES = ("bold", "italic", "underline", "subscript", "superscript")


def _docx(path: str) -> Any:
  import docx

  return docx.Document(guard.office(path))


def _docx_texts(path: str) -> list[str]:
  return [paragraph.text for paragraph in _docx(path).paragraphs]


def _odt_texts(path: str) -> list[str]:
  """Text of paragraphs and of the spans directly in them, as the benchmark reads it."""
  out = []
  for paragraph in guard.member(path, "content.xml").iter(ODF["text"] + "p"):
    parts = [paragraph.text or ""]
    for node in paragraph:
      if node.tag == ODF["text"] + "span":
        parts += [node.text or "", *(child.tail or "" for child in node)]
      parts.append(node.tail or "")
    out.append("".join(parts))
  return out


READERS: dict[str, Callable[[str], list[str]]] = {".docx": _docx_texts, ".odt": _odt_texts}


def compare_docx_files(result: str | None, expected: str | None, **options) -> float:
  """The same paragraphs of two .docx or two .odt files. options: ignore_blanks (True: white space counts as one space), ignore_case,
  ignore_order, delete_empty_lines, fuzzy_match and content_only (rapidfuzz's ratio instead of equality)."""
  from rapidfuzz import fuzz

  if not result or not expected:
    return 0.0
  kind = next((kind for kind in READERS if result.endswith(kind) and expected.endswith(kind)), None)
  if kind is None:
    return 0.0
  sides = [guard.read(READERS[kind], path, side) for path, side in zip((result, expected), guard.SIDES)]
  if options.get("ignore_order", False):
    sides = [sorted(texts) for texts in sides]
  if options.get("delete_empty_lines", False):
    sides = [[text for text in texts if text.strip()] for texts in sides]
  whole, fuzzy = options.get("content_only", False), options.get("fuzzy_match", False)
  if whole or options.get("ignore_blanks", True):
    sides = [[re.sub(r"\s+", " ", "\n".join(texts)).strip()] for texts in sides]
  if options.get("ignore_case", False):
    sides = [[text.lower() for text in texts] for texts in sides]
  if len(sides[0]) != len(sides[1]):
    return 0.0
  if not (whole or fuzzy):
    return float(sides[0] == sides[1])
  alike = [fuzz.ratio(a, b) / 100 for a, b in zip(*sides)]
  return sum(alike) / len(alike) if alike else 1.0


def compare_docx_tables(result: str | None, expected: str | None) -> float:
  """The same tables, cell by cell, spaces around a text aside."""
  if not result or not expected:
    return 0.0
  sides = [guard.read(_tables, path, side) for path, side in zip((result, expected), guard.SIDES)]
  return float(sides[0] == sides[1])


def _tables(path: str) -> list:
  shape = lambda table: [[table.cell(i, j).text.strip() for j in range(len(table.columns))] for i in range(len(table.rows))]
  return [(len(table.rows), len(table.columns), shape(table)) for table in _docx(path).tables]


def compare_subscript_contains(result: str | None, expected: str | None) -> float:
  """Some run is a subscript in both documents at the same place. Looks at nothing else: pair it with compare_docx_files."""
  if not result or not expected:
    return 0.0
  reader = lambda path: [[bool(run.font.subscript) for run in paragraph.runs] for paragraph in _docx(path).paragraphs]
  sides = [guard.read(reader, path, side) for path, side in zip((result, expected), guard.SIDES)]
  return float(any(a and b for one, other in zip(*sides) for a, b in zip(one, other)))


def practice_document_runs(result: str | None, rules: dict) -> float:
  """The whole document: expected is a list of paragraphs, each a list of [text, [styles]]; runs of one style are one. Styles: bold,
  italic, underline, subscript, superscript. Empty paragraphs at the end do not count."""
  if not result:
    return 0.0
  reader = _docx_runs if result.endswith(".docx") else _odt_runs
  got = guard.read(reader, result, "result")
  wanted = [_merged((text, frozenset(styles)) for text, styles in paragraph) for paragraph in rules["expected"]]
  while got and not got[-1]:
    got.pop()
  return float(got == wanted)


def _merged(runs: Any) -> list[tuple[str, frozenset]]:
  out: list[tuple[str, frozenset]] = []
  for text, styles in runs:
    if text and out and out[-1][1] == styles:
      out[-1] = (out[-1][0] + text, styles)
    elif text:
      out.append((text, styles))
  return out


def _docx_runs(path: str) -> list[list[tuple[str, frozenset]]]:
  has = lambda run, name: bool(getattr(run.font, name))
  styled = lambda run: (run.text, frozenset(name for name in STYLES if has(run, name)))
  return [_merged(styled(run) for run in paragraph.runs) for paragraph in _docx(path).paragraphs]


def _odt_runs(path: str) -> list[list[tuple[str, frozenset]]]:
  root = guard.member(path, "content.xml")
  named = {style.get(ODF["style"] + "name"): _odt_styles(style) for style in root.iter(ODF["style"] + "style")}
  body = root.find(f".//{ODF['office']}text")
  out = []
  for paragraph in _paragraphs(body):
    out.append(_merged(_spans(paragraph, named.get(paragraph.get(ODF["text"] + "style-name"), frozenset()), named)))
  return out


def _paragraphs(body: Any) -> list:
  return [node for node in body.iter() if node.tag in (ODF["text"] + "p", ODF["text"] + "h")]


def _odt_styles(style: Any) -> frozenset:
  found = set()
  for properties in style.iter(ODF["style"] + "text-properties"):
    position = properties.get(ODF["style"] + "text-position", "").split(" ")[0]
    if position == "sub" or position.startswith("-"):
      found.add("subscript")
    elif position == "super" or re.fullmatch(r"[1-9]\d*%", position):
      found.add("superscript")
    if properties.get(ODF["fo"] + "font-weight") == "bold":
      found.add("bold")
    if properties.get(ODF["fo"] + "font-style") == "italic":
      found.add("italic")
    if properties.get(ODF["style"] + "text-underline-style", "none") != "none":
      found.add("underline")
  return frozenset(found)


def _spans(node: Any, styles: frozenset, named: dict) -> list[tuple[str, frozenset]]:
  """(text, styles) of a paragraph and the spans in it, in order. <text:s> is spaces, <text:tab> a tab, <text:line-break> a newline."""
  out = [(node.text or "", styles)]
  for child in node:
    name = child.tag.removeprefix(ODF["text"])
    if name == "span":
      out += _spans(child, styles | named.get(child.get(ODF["text"] + "style-name"), frozenset()), named)
    elif name == "s":
      out.append((" " * min(int(child.get(ODF["text"] + "c", "1")), 1000), styles))
    elif name in ("tab", "line-break"):
      out.append(("\t" if name == "tab" else "\n", styles))
    out.append((child.tail or "", styles))
  return out


def compare_pdfs(result: Any, expected: Any) -> float:
  """How alike the texts are (rapidfuzz's ratio, 0 to 1), on the average of several files. Text comes from pypdf."""
  from rapidfuzz import fuzz

  if not isinstance(expected, list):
    result, expected = [result], [expected]
  total = 0.0
  for got, wanted in zip(result or [], expected):
    if got:
      texts = [guard.read(_pdf_text, path, side) for path, side in zip((got, wanted), guard.SIDES)]
      total += fuzz.ratio(*texts) / 100
  return total / len(expected)


def _pdf_text(path: str) -> str:
  import pypdf

  return "".join(page.extract_text() for page in pypdf.PdfReader(path).pages).strip()


def compare_archive(result: str | None, expected: str, file_path: str = "", file_type: str = "text", **options) -> float:
  """Two zip or tar files with the same names in the folder file_path: how alike the files of type file_type are, on the average.
  Members that lead out of the archive, links and bombs make it unreadable."""
  from envs.osworld.metrics import ARCHIVED, metric, unpacked

  if not result:
    return 0.0
  if file_type not in ARCHIVED:
    raise guard.BadExpected(f"compare_archive has file_type {file_type!r}; built in: {', '.join(ARCHIVED)}")
  unpack = functools.partial(unpacked.unpack, into=file_path)
  folders = [guard.read(unpack, path, side) for path, side in zip((result, expected), guard.SIDES)]
  try:
    names = [sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else None for _, folder in folders]
    if names[0] is None or names[0] != names[1] or not names[0]:
      return 0.0
    compare, total = metric(ARCHIVED[file_type]), 0.0
    for name in names[0]:
      try:
        total += compare(*(str(folder / name) for _, folder in folders), **options)
      except guard.BadResult:
        continue
    return total / len(names[0])
  finally:
    for held, _ in folders:
      held.cleanup()
