"""Small office files, written byte for byte the same every time: one paragraph of text, or one sheet of cells."""

from __future__ import annotations

import io
import zipfile
from xml.sax.saxutils import escape

WHEN = (2026, 1, 1, 0, 0, 0)
ODF = "urn:oasis:names:tc:opendocument:xmlns"
OPEN = "http://schemas.openxmlformats.org"


def archive(members: dict[str, str], stored: tuple[str, ...] = ()) -> bytes:
  out = io.BytesIO()
  with zipfile.ZipFile(out, "w") as opened:
    for name, text in members.items():
      kind = zipfile.ZIP_STORED if name in stored else zipfile.ZIP_DEFLATED
      opened.writestr(zipfile.ZipInfo(name, WHEN), text.encode(), kind)
  return out.getvalue()


def odt(paragraphs: list[str]) -> bytes:
  spaces = " ".join(f'xmlns:{short}="{ODF}:{name}:1.0"' for short, name in (("office", "office"), ("text", "text"), ("style", "style")))
  body = "".join(f"<text:p>{escape(text)}</text:p>" for text in paragraphs)
  kind = "application/vnd.oasis.opendocument.text"
  head = '<?xml version="1.0" encoding="UTF-8"?>'
  entry = lambda path, mime: f'<m:file-entry m:full-path="{path}" m:media-type="{mime}"/>'
  files = entry("/", kind) + entry("content.xml", "text/xml")
  return archive(
    {
      "mimetype": kind,
      "content.xml": f'{head}<office:document-content {spaces} office:version="1.2"><office:body><office:text>{body}'
      "</office:text></office:body></office:document-content>",
      "META-INF/manifest.xml": f'{head}<m:manifest xmlns:m="{ODF}:manifest:1.0" m:version="1.2">{files}</m:manifest>',
    },
    ("mimetype",),
  )


def _package(kinds: dict[str, str], main: str, members: dict[str, str]) -> bytes:
  """An Office Open XML package. kinds: part -> content type; main: the part that the package is about."""
  head = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>'
  defaults = '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
  types = defaults + "".join(f'<Override PartName="/{part}" ContentType="{kind}"/>' for part, kind in kinds.items())
  link = f'<Relationship Id="rId1" Type="{OPEN}/officeDocument/2006/relationships/officeDocument" Target="{main}"/>'
  relations = f'{head}<Relationships xmlns="{OPEN}/package/2006/relationships">'
  types = f'{head}<Types xmlns="{OPEN}/package/2006/content-types">{types}</Types>'
  parts = {name: head + text for name, text in members.items()}
  return archive({"[Content_Types].xml": types, "_rels/.rels": f"{relations}{link}</Relationships>"} | parts)


def docx(paragraphs: list[str]) -> bytes:
  kind = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
  body = "".join(f'<w:p><w:r><w:t xml:space="preserve">{escape(text)}</w:t></w:r></w:p>' for text in paragraphs)
  document = f'<w:document xmlns:w="{OPEN}/wordprocessingml/2006/main"><w:body>{body}</w:body></w:document>'
  return _package({"word/document.xml": kind}, "word/document.xml", {"word/document.xml": document})


def _cell(place: str, value: str | int) -> str:
  if isinstance(value, int):
    return f'<c r="{place}"><v>{value}</v></c>'
  return f'<c r="{place}" t="inlineStr"><is><t xml:space="preserve">{escape(value)}</t></is></c>'


def xlsx(rows: list[list[str | int | None]]) -> bytes:
  """One sheet, "Sheet1"."""
  base = "application/vnd.openxmlformats-officedocument.spreadsheetml"
  cells = []
  for i, row in enumerate(rows, 1):
    found = (_cell(f"{chr(65 + j)}{i}", value) for j, value in enumerate(row) if value is not None)
    cells.append(f'<row r="{i}">{"".join(found)}</row>')
  main = f'xmlns="{OPEN}/spreadsheetml/2006/main"'
  sheet = f'<sheet name="Sheet1" sheetId="1" r:id="rId1" xmlns:r="{OPEN}/officeDocument/2006/relationships"/>'
  link = f'<Relationship Id="rId1" Type="{OPEN}/officeDocument/2006/relationships/worksheet" Target="worksheets/sheet1.xml"/>'
  return _package(
    {"xl/workbook.xml": f"{base}.sheet.main+xml", "xl/worksheets/sheet1.xml": f"{base}.worksheet+xml"},
    "xl/workbook.xml",
    {
      "xl/workbook.xml": f"<workbook {main}><sheets>{sheet}</sheets></workbook>",
      "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{OPEN}/package/2006/relationships">{link}</Relationships>',
      "xl/worksheets/sheet1.xml": f"<worksheet {main}><sheetData>{''.join(cells)}</sheetData></worksheet>",
    },
  )
