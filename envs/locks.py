"""Devices, servers and ports that one process of this user has at a time, held by file locks that end with their holder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import socket
import tempfile
import time
from collections.abc import Sequence

from envs.errors import NoComputer

FIRST_PORT, LAST_PORT = 20000, 29999


class Lock:
  """A name that one process of this user holds at a time; let go when it closes it or dies, however it dies."""

  def __init__(self, name: str):
    folder = pathlib.Path(tempfile.gettempdir()) / f"practice-locks-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
      raise PermissionError(f"{folder} belongs to another user: remove it, or set TMPDIR to a folder of your own")
    self.file = (folder / "".join(c if c.isalnum() or c in "-." else "_" for c in name)).open("a")
    try:
      fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self.file.close()
      raise

  def close(self) -> None:
    self.file.close()


def free(port: int) -> bool:
  with socket.socket() as probe, contextlib.suppress(OSError):
    probe.bind(("127.0.0.1", port))
    return True
  return False


def take_ports() -> tuple[int, Lock]:
  """The first of three ports (console, adb, gRPC) that nobody has, and the lock that keeps other emulators of this project off them."""
  for port in range(FIRST_PORT, LAST_PORT - 4, 4):
    with contextlib.suppress(BlockingIOError):
      lock = Lock(f"ports-{port}")
      if all(free(port + i) for i in range(3)):
        return port, lock
      lock.close()
  raise ValueError(f"no three free ports between {FIRST_PORT} and {LAST_PORT}")


def take(what: str, names: Sequence[str], first: int, seconds: float) -> tuple[int, Lock]:
  """Index of the first of `names`, from the `first` on and around, that nobody has, and its lock; waits for one, since a worker that was
  ended a moment ago may still hold it. NoComputer if none becomes free."""
  until = time.monotonic() + seconds
  while True:
    for i in range(len(names)):
      index = (first + i) % len(names)
      with contextlib.suppress(BlockingIOError):
        return index, Lock(f"{what}-{names[index]}")
    if time.monotonic() > until:
      raise NoComputer(f"all of {', '.join(names)} are in use for {seconds:g} s: every environment wants a {what} of its own")
    time.sleep(0.05)
