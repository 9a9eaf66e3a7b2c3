"""Screenshots on disk, each written once: a folder of PNG files named after the hash of their pixels, and the PNG codec.

The checkpoint keeps the replay buffer's screens here, the episode store every episode's, TensorBoard shows them. PNG is
written and read by hand because core must not need an image library; files from elsewhere are read by rollout/store.py.
"""

from __future__ import annotations

import os
import pathlib
import re
import struct
import threading
import zlib

import numpy as np

from core.schema import Screen

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
_REF = re.compile(r"[0-9a-f]{40}\Z")


def encode_png(pixels: np.ndarray, level: int = 3) -> bytes:
  """uint8 [H, W, 3] -> PNG bytes. Every row is stored as its difference to the row above, which suits screens."""
  if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
    raise ValueError(f"picture is {pixels.dtype} {pixels.shape}, wanted uint8 [H, W, 3]")
  height, width = pixels.shape[:2]
  rows = np.full((height, 1 + width * 3), 2, np.uint8)  # each row starts with its filter: 2 = "up"
  flat = np.ascontiguousarray(pixels).reshape(height, -1)
  rows[0, 1:] = flat[0]
  rows[1:, 1:] = flat[1:] - flat[:-1]  # modulo 256
  header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
  return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), level)) + _END


def decode_png(data: bytes) -> np.ndarray:
  """The inverse of encode_png, and of nothing else: a PNG from another writer is a ValueError."""
  header, body, chunks = None, b"", _chunks(data)
  for kind, payload in chunks:
    header = payload if kind == b"IHDR" else header
    body += payload if kind == b"IDAT" else b""
  if header is None or len(header) != 13:
    raise ValueError("PNG without header")
  width, height, *form = struct.unpack(">IIBBBBB", header)
  if form != [8, 2, 0, 0, 0]:
    raise ValueError(f"PNG of form {form}, wanted 8 bits RGB, not interlaced, as encode_png writes it")
  rows = np.frombuffer(zlib.decompress(body), np.uint8)
  if rows.size != height * (1 + width * 3):
    raise ValueError(f"PNG holds {rows.size} bytes, wanted {height * (1 + width * 3)} for {width} x {height}")
  rows = rows.reshape(height, 1 + width * 3)
  if (rows[:, 0] != 2).any():
    raise ValueError("PNG has row filters that encode_png does not write")
  return np.cumsum(rows[:, 1:], axis=0, dtype=np.uint8).reshape(height, width, 3)


def _chunk(kind: bytes, payload: bytes) -> bytes:
  return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def _chunks(data: bytes):
  if not data.startswith(_SIGNATURE) or not data.endswith(_END):
    raise ValueError("not a complete PNG file")
  at = len(_SIGNATURE)
  while at < len(data):
    (size,) = struct.unpack(">I", data[at : at + 4])
    chunk = data[at + 4 : at + 8 + size]
    if data[at + 8 + size : at + 12 + size] != struct.pack(">I", zlib.crc32(chunk)):
      raise ValueError(f"damaged PNG chunk {chunk[:4]!r}")
    yield chunk[:4], chunk[4:]
    at += 12 + size


class ScreenStore:
  """A folder of screens: ab/abcdef....png. `put` twice writes once; a reader never sees half a file."""

  def __init__(self, directory: str | os.PathLike):
    self.directory = pathlib.Path(os.path.abspath(directory))

  def path(self, ref: str) -> pathlib.Path:
    """Where the screen of this hash lies. Anything but a hash is refused: ids from outside never become paths."""
    if not isinstance(ref, str) or not _REF.match(ref):
      raise ValueError(f"screen reference {ref!r} is not a hash of 40 hex digits")
    return self.directory / ref[:2] / f"{ref}.png"

  def put(self, screen: Screen) -> pathlib.Path:
    path = self.path(screen.ref)
    if not _complete(path):
      path.parent.mkdir(parents=True, exist_ok=True)
      write_atomic(path, encode_png(screen.pixels))
    return path

  def get(self, ref: str) -> Screen:
    """The screen, its pixels checked against the hash. FileNotFoundError where it is missing, ValueError where damaged."""
    try:
      screen = Screen.of(decode_png(self.path(ref).read_bytes()))
    except (zlib.error, struct.error) as e:
      raise ValueError(f"screen {ref} is damaged: {e}") from e
    if screen.ref != ref:
      raise ValueError(f"screen {ref} is damaged: its pixels hash to {screen.ref}")
    return screen

  def refs(self) -> set[str]:
    return {p.stem for p in self.directory.glob("[0-9a-f][0-9a-f]/*.png") if _REF.match(p.stem)}

  def keep_only(self, refs: set[str]) -> int:
    """Delete every other screen; returns how many went."""
    gone = self.refs() - refs
    for ref in gone:
      self.path(ref).unlink(missing_ok=True)
    return len(gone)


def write_atomic(path: str | os.PathLike, data: bytes) -> None:
  """Write a file so that it is either wholly there or not at all, also after a power cut."""
  path = pathlib.Path(path)
  temp = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
  try:
    with open(temp, "wb") as f:
      f.write(data)
      f.flush()
      os.fsync(f.fileno())
    os.replace(temp, path)
  finally:
    temp.unlink(missing_ok=True)


def _complete(path: pathlib.Path) -> bool:
  """Cheap check that a PNG was written to its end (a file system may lose the tail of a file, never grow one)."""
  try:
    with open(path, "rb") as f:
      f.seek(-len(_END), os.SEEK_END)
      return f.read() == _END
  except OSError:  # missing, or shorter than the end mark
    return False
