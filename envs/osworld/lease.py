"""The folder of one computer's episode: what was fetched to be checked, and nobody else's. It is emptied before every episode."""

from __future__ import annotations

import os
import pathlib
import shutil

from envs.children import Nest


class Lease:
  """folder: where it is; removed by close(), and if its owner dies, by the next one."""

  def __init__(self):
    self.nest = Nest("osworld")
    self.folder = self.nest.folder / "lease"
    self.folder.mkdir()

  def clear(self) -> None:
    for entry in os.scandir(self.folder):
      if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path)
      else:
        os.unlink(entry.path)

  def path(self, name: str, part: str = "") -> pathlib.Path:
    """A file of the lease. part: a folder of it, made if need be. ValueError for a name that leads out of it."""
    root = self.folder / part
    path = root / name
    if not inside(name):
      raise ValueError(f"{name!r:.80} is no name of a file in the cache")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path

  def write(self, name: str, data: bytes, part: str = "") -> str:
    path = self.path(name, part)
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return str(path)

  def close(self) -> None:
    self.nest.close()


MAX_NAME = 200  # bytes of a file's or folder's name: Linux takes 255, and a getter may add the time
MAX_PARTS = 8


def inside(name: str) -> bool:
  """Whether a relative name stays in its folder, and is one that a file can have."""
  parts = pathlib.PurePosixPath(name).parts
  short = len(parts) <= MAX_PARTS and all(len(part.encode(errors="replace")) <= MAX_NAME for part in parts)
  return bool(parts) and short and not name.startswith("/") and ".." not in parts and "\0" not in name
