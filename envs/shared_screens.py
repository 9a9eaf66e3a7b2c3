"""One screenshot in memory that trainer and worker share, with a header that tells a torn or stale picture from a good one.

The trainer makes it as an unnamed file and hands the worker a descriptor: nothing is left behind whoever dies first. The worker
writes only between a request and its answer, and the trainer copies before it asks again, so one place for one screen is enough;
the header is there for the day when that is not true.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

import numpy as np

from envs.errors import BadFrame

MAGIC = b"PRSCREEN"
HEADER = struct.Struct("<8sQQQIII")  # magic, number before the pixels were written, number after, token, height, width, channels
PIXELS = 64  # where the pixels begin


def unnamed_file() -> int:
  """A descriptor of memory that has no name and goes with its last user."""
  if hasattr(os, "memfd_create"):
    return os.memfd_create("screen", os.MFD_CLOEXEC)
  with tempfile.TemporaryFile() as file:
    return os.dup(file.fileno())


class SharedScreen:
  """The picture, seen from one side. `size` is the trainer's to call, once, before the worker's first `write`.

  fd: descriptor of the file, owned by this object from now on."""

  def __init__(self, fd: int):
    self.fd = fd
    self._map: mmap.mmap | None = None
    self._number = 0

  def size(self, shape: tuple[int, ...]) -> None:
    """Makes room for a screen of this shape and closes the descriptor, which the worker has too."""
    height, width, channels = shape
    os.ftruncate(self.fd, PIXELS + height * width * channels)
    self._open()

  def _open(self) -> mmap.mmap:
    if self._map is None:
      self._map = mmap.mmap(self.fd, 0)
      os.close(self.fd)
      self.fd = -1
    return self._map

  def write(self, pixels: np.ndarray, token: int) -> dict:
    """Puts a screen there; returns what the trainer needs to find the same one: its number and shape."""
    memory = self._open()
    height, width, channels = pixels.shape
    if PIXELS + pixels.size > len(memory):
      raise BadFrame(f"a screen of {height} x {width} x {channels} does not fit in {len(memory) - PIXELS} bytes")
    self._number += 1
    HEADER.pack_into(memory, 0, MAGIC, self._number, 0, token, height, width, channels)
    np.frombuffer(memory, np.uint8, pixels.size, PIXELS)[:] = pixels.reshape(-1)
    HEADER.pack_into(memory, 0, MAGIC, self._number, self._number, token, height, width, channels)
    return {"number": self._number, "shape": [height, width, channels]}

  def read(self, told: dict, token: int) -> np.ndarray:
    """A copy of the screen that the worker told of. BadFrame if another one, or half of one, is there."""
    memory, shape = self._open(), tuple(told["shape"])
    self._compare(told["number"], shape, token)
    pixels = np.frombuffer(memory, np.uint8, int(np.prod(shape)), PIXELS).reshape(shape).copy()
    self._compare(told["number"], shape, token)  # still the same one after copying
    return pixels

  def _compare(self, number: int, shape: tuple, token: int) -> None:
    magic, before, after, written_for, *there = HEADER.unpack_from(self._map, 0)
    if magic != MAGIC or before != after:
      raise BadFrame(f"torn screenshot: begun as number {before}, ended as {after}")
    if (before, written_for) != (number, token):
      raise BadFrame(f"stale screenshot: number {before} for token {written_for}, wanted number {number} for token {token}")
    if tuple(there) != shape or PIXELS + int(np.prod(shape)) > len(self._map):
      raise BadFrame(f"screenshot of {tuple(there)} in {len(self._map) - PIXELS} bytes, told as {shape}")

  def close(self) -> None:
    if self._map is not None:
      self._map.close()
      self._map = None
    if self.fd >= 0:
      os.close(self.fd)
      self.fd = -1
