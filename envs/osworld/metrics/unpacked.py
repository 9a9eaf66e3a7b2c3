"""Archives that an agent made, unpacked: into a fresh folder, nothing outside it, no links, no bombs."""

from __future__ import annotations

import pathlib
import shutil
import tarfile
import tempfile

from envs.osworld.metrics import guard


def unpack(path: str, into: str = "") -> tuple[tempfile.TemporaryDirectory, pathlib.Path]:
  """(the folder to clean up, the folder `into` inside it). ValueError where a member leads out of it, links, or there is too much."""
  held = tempfile.TemporaryDirectory(prefix="practice-archive-")
  root = pathlib.Path(held.name)
  try:
    if tarfile.is_tarfile(path):
      _tar(path, root)
    else:
      with guard.archive(path) as opened:
        for member in opened.infolist():
          _write(root, member.filename, None if member.is_dir() else opened.open(member))
    inside = (root / into).resolve()
    if not inside.is_relative_to(root.resolve()):
      raise ValueError(f"file_path {into!r:.60} leads out of the archive")
    return held, inside
  except BaseException:
    held.cleanup()
    raise


def _tar(path: str, root: pathlib.Path) -> None:
  total = 0
  with tarfile.open(path) as opened:
    for count, member in enumerate(opened):
      if count >= guard.MAX_MEMBERS or (total := total + member.size) > guard.MAX_UNPACKED:
        raise ValueError(f"more than {guard.MAX_MEMBERS} members or {guard.MAX_UNPACKED} bytes unpacked")
      if not (member.isfile() or member.isdir()):
        raise ValueError(f"a member that is no plain file: {member.name!r:.60}")
      _write(root, member.name, opened.extractfile(member) if member.isfile() else None)


def _write(root: pathlib.Path, name: str, source) -> None:
  path = (root / name).resolve()
  if not path.is_relative_to(root.resolve()):
    raise ValueError(f"a member that leads out of the archive: {name!r:.60}")
  if source is None:
    path.mkdir(parents=True, exist_ok=True)
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  with source, path.open("wb") as out:
    shutil.copyfileobj(source, out)
