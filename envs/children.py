"""Processes that an environment starts beside itself, in a private folder: recorded, and ended with it or by the next one.

They stay in the session and process group of whoever started them, so that a pool which ends a worker finds them too, and Linux ends
them with the thread that started them, where util-linux's setpriv is there to ask for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence

from envs import processes

RECORD = "children.json"
GRACE = 60.0  # seconds that a folder may stand without a record: its owner is about to write one
LOG_BYTES = 1 << 14
STILL_OWNED = '[ "$PPID" = "$1" ] || exit 1; shift; exec "$@"'  # the owner may have ended before its end was asked after


def tied(argv: Sequence[str]) -> list[str]:
  """A command that Linux ends with the thread that starts it, where setpriv is there to ask for it: else as it is given."""
  setpriv = shutil.which("setpriv")
  return [setpriv, "--pdeathsig", "KILL", "--", "/bin/sh", "-c", STILL_OWNED, "sh", str(os.getpid()), *argv] if setpriv else list(argv)


class Child:
  """One process; what it prints goes to the file `log`."""

  def __init__(self, popen: subprocess.Popen, log: pathlib.Path):
    self.popen, self.log = popen, log
    self.pid, self.started = popen.pid, processes.start_time(popen.pid)

  def running(self) -> bool:
    return self.popen.poll() is None

  def fate(self) -> str:
    """How it ended, or "running"."""
    code = self.popen.poll()
    return "running" if code is None else f"exit code {code}" if code >= 0 else f"ended by signal {-code}"

  def tail(self, lines: int = 20) -> list[str]:
    """The last lines it printed."""
    with self.log.open("rb") as file:
      file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
      return [line[:300] for line in file.read().decode(errors="replace").splitlines()][-lines:]

  def end(self, seconds: float = 2.0) -> None:
    """Asks it to end, then kills it and what it started; waits until it is collected."""
    others = processes.family(self.pid) if self.running() else []
    if self.running():
      self.popen.terminate()
    try:
      self.popen.wait(seconds)
    except subprocess.TimeoutExpired:
      self.popen.kill()
      self.popen.wait(seconds)
    for pid, start in others:
      processes.send(pid, start, signal.SIGKILL)


class Nest:
  """A folder that only this user may enter, and the processes started in it. Making one first ends what dead owners left.

  name: what the folder's name says. close() ends the processes and removes the folder; so does the end of this process.
  """

  def __init__(self, name: str):
    sweep(name)
    self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"practice-{name}-"))
    self.children: list[Child] = []
    self._write()
    self.close = weakref.finalize(self, _close, self.folder, self.children)

  def start(self, argv: Sequence[str], env: Mapping[str, str]) -> Child:
    """Starts a program, whose path was found before."""
    log = self.folder / f"log{len(self.children)}.txt"
    with log.open("wb") as out:
      popen = subprocess.Popen(tied(argv), env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder)
    self.children.append(Child(popen, log))
    self._write()
    return self.children[-1]

  def _write(self) -> None:
    owner = [os.getpid(), processes.start_time(os.getpid())]
    record = {"owner": owner, "children": [[c.pid, c.started] for c in self.children if c.running()]}
    fresh = self.folder / (RECORD + ".new")
    fresh.write_text(json.dumps(record))
    os.replace(fresh, self.folder / RECORD)


def _close(folder: pathlib.Path, children: list[Child]) -> None:
  for child in reversed(children):
    child.end()
  shutil.rmtree(folder, ignore_errors=True)


def sweep(name: str) -> list[int]:
  """Ends what dead owners of folders of this name left running, and removes the folders. Returns the pids ended."""
  ended = []
  for folder in pathlib.Path(tempfile.gettempdir()).glob(f"practice-{name}-*"):
    try:
      if folder.stat().st_uid != os.getuid():
        continue
      record = json.loads((folder / RECORD).read_text())
    except (FileNotFoundError, NotADirectoryError):
      with contextlib.suppress(FileNotFoundError):  # somebody else sweeps too
        if time.time() - folder.stat().st_mtime > GRACE:
          shutil.rmtree(folder, ignore_errors=True)
      continue
    if not processes.alive(*record["owner"]):
      for pid, start in record["children"]:
        family = processes.family(pid) if processes.alive(pid, start) else []
        ended += [p for p, s in [(pid, start), *family] if processes.alive(p, s) and processes.send(p, s, signal.SIGKILL)]
      shutil.rmtree(folder, ignore_errors=True)
  return ended
