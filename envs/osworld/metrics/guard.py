"""What a metric reads is what an agent left on a disk: nothing of it is believed, unpacked beside a limit or run.

A result that cannot be read scores 0 (BadResult): the policy made it. What it is compared with is the task's, so that a fault there is
the grader's (BadExpected), and no score.
"""

from __future__ import annotations

import errno
import os
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

MAX_FILE = 64 << 20  # bytes
MAX_UNPACKED = 256 << 20  # bytes of all members of an archive
MAX_MEMBERS = 4096
MAX_RATIO = 1000  # unpacked over packed, of a member above 1 MB
MAX_TEXT = 16 << 20  # bytes of a text file
MAX_PIXELS = 64_000_000
SIDES = ("result", "expected")
HOST_FAULTS = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EROFS, errno.ENOMEM)  # of this machine


class BadResult(ValueError):
  """The result is not what the metric reads: it scores 0."""


class BadExpected(ValueError):
  """What the task compares with cannot be read: nothing can be scored."""


def read(reader: Callable[[str], Any], path: str, side: str) -> Any:
  """reader(path), its failures sorted by whose they are."""
  try:
    if not os.path.isfile(path):
      raise ValueError("no such file")
    if os.path.getsize(path) > MAX_FILE:
      raise ValueError(f"more than {MAX_FILE} bytes")
    return reader(path)
  except ImportError:  # a library that is not installed here is nobody's file
    raise
  except Exception as error:
    if isinstance(error, OSError) and error.errno in HOST_FAULTS:
      raise
    told = f"{os.path.basename(path)}: {type(error).__name__}: {error}"[:200]
    raise (BadResult if side == "result" else BadExpected)(told) from error


def text(path: str, side: str) -> str:
  """A text file, as UTF-8."""

  def reader(path: str) -> str:
    if os.path.getsize(path) > MAX_TEXT:
      raise ValueError(f"more than {MAX_TEXT} bytes of text")
    return pathlib.Path(path).read_text(encoding="utf-8")

  return read(reader, path, side)


def archive(path: str) -> zipfile.ZipFile:
  """A zip file whose members are few, small together, inside it and no bombs. ValueError or BadZipFile otherwise."""
  opened = zipfile.ZipFile(path)
  members = opened.infolist()
  if len(members) > MAX_MEMBERS:
    raise ValueError(f"more than {MAX_MEMBERS} members")
  for member in members:
    parts = pathlib.PurePosixPath(member.filename.replace("\\", "/")).parts
    if not parts or member.filename.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]:
      raise ValueError(f"a member that leads out of the archive: {member.filename!r:.60}")
    if member.file_size > MAX_UNPACKED or (member.file_size > 1 << 20 and member.file_size > MAX_RATIO * max(member.compress_size, 1)):
      raise ValueError(f"a member that unpacks to {member.file_size} bytes")
  if sum(member.file_size for member in members) > MAX_UNPACKED:
    raise ValueError(f"more than {MAX_UNPACKED} bytes unpacked")
  return opened


def office(path: str) -> str:
  """The path, if it is an office document whose XML declares no entities and no document type. For libraries that open it themselves."""
  with archive(path) as opened:
    for member in opened.infolist():
      if member.filename.lower().endswith((".xml", ".rels", ".vml")):
        with opened.open(member) as part:
          whole = part.read()  # a comment of any length may stand before what is declared
        if whole.startswith((b"\xff\xfe", b"\xfe\xff", b"\x00<", b"<\x00")):
          raise ValueError(f"{member.filename} is not UTF-8")
        if b"<!DOCTYPE" in whole or b"<!ENTITY" in whole:
          raise ValueError(f"{member.filename} declares a document type")
  return path


def member(path: str, name: str) -> Any:
  """One XML part of an office document, parsed; entities are refused wherever they stand."""
  import defusedxml.ElementTree

  with archive(path) as opened:
    return defusedxml.ElementTree.fromstring(opened.read(name), forbid_dtd=True)
