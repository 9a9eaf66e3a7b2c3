"""Backend `local`: workers are processes of this machine, each in its own session, on one end of a socket pair.

A backend starts remotes and says which of them have something to say; the pool (envs/pool.py) decides everything else. One thread,
the keeper, starts and ends processes and drains what they print, so that neither a slow start nor a chatty environment holds the
others up, and so that a worker, which Linux ends with the thread that started it, outlives whoever asked for it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import os
import pathlib
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from envs import processes
from envs.shared_screens import SharedScreen, unnamed_file
from envs.wire import Reader, pack

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINE_CHARS = 300  # of what a worker prints, a longer line is cut
DESCRIPTORS = 4  # a worker's share of the trainer's descriptors, with one to spare
PATIENCE = 30.0  # seconds for the keeper to do what it was asked


class Log:
  """The last lines that a worker printed."""

  def __init__(self, fd: int, lines: int):
    os.set_blocking(fd, False)
    self.fd, self.lines, self._partial = fd, collections.deque(maxlen=lines), b""

  def drain(self) -> bool:
    """Reads what is there; False at the end of it."""
    for _ in range(64):  # a worker that prints without end does not keep the keeper
      try:
        data = os.read(self.fd, 1 << 16)
      except BlockingIOError:
        return True
      if not data:
        return False
      *whole, rest = (self._partial + data).split(b"\n")
      self._partial = rest[-4 * LINE_CHARS :]
      self.lines.extend(line[: 4 * LINE_CHARS].decode(errors="replace")[:LINE_CHARS] for line in whole)
    return True

  def tail(self) -> list[str]:
    partial = self._partial.decode(errors="replace")[-LINE_CHARS:]
    return [*self.lines, *([partial] if partial else [])][-self.lines.maxlen :]


class Keeper:
  """The thread that starts and ends worker processes and reads their output."""

  def __init__(self):
    self._selector, self._jobs = selectors.DefaultSelector(), collections.deque()
    self._waker, self._woken = socket.socketpair()
    self._woken.setblocking(False)
    self._selector.register(self._woken, selectors.EVENT_READ)
    self.dying: list[tuple[subprocess.Popen, Log]] = []
    self._ended = False
    self._thread = threading.Thread(target=self._run, name="worker keeper", daemon=True)
    self._thread.start()

  def ask(self, job: Callable[[], Any]) -> concurrent.futures.Future:
    """Has the thread do this; the caller may wait for the result or not."""
    done: concurrent.futures.Future = concurrent.futures.Future()
    self._jobs.append((job, done))
    self._waker.send(b"!")
    return done

  def watch(self, log: Log) -> None:
    self._selector.register(log.fd, selectors.EVENT_READ, log)

  def drain(self, log: Log) -> None:
    """Reads on; a finished log is closed."""
    if log.fd >= 0 and not log.drain():
      self.forget(log)

  def forget(self, log: Log) -> None:
    if log.fd >= 0:
      self._selector.unregister(log.fd)
      os.close(log.fd)
      log.fd = -1

  def _run(self) -> None:
    while not self._ended:
      for key, _ in self._selector.select(0.05 if self.dying else None):
        if key.data is not None:
          self.drain(key.data)
      self._work()
      for popen, log in [d for d in self.dying if d[0].poll() is not None]:
        self.forget(log)
        self.dying.remove((popen, log))
    for _, log in self.dying:
      self.forget(log)
    for part in (self._selector, self._waker, self._woken):
      part.close()

  def _work(self) -> None:
    try:
      self._woken.recv(4096)
    except BlockingIOError:
      pass
    while self._jobs:
      job, done = self._jobs.popleft()
      try:
        done.set_result(job())
      except Exception as error:  # noqa: BLE001 - it is raised where the result is asked for
        failed = error
        done.set_exception(failed)

  def end(self, seconds: float = PATIENCE) -> None:
    """Ends the thread. One that is stuck, e.g. in the start of a process on a file system that hangs, is left to itself."""
    self.ask(lambda: setattr(self, "_ended", True))
    self._thread.join(seconds)


class LocalRemote:
  """One worker process. `send` and `receive` never wait; `receive` raises EOFError once the process is gone."""

  def __init__(self, backend: LocalBackend, slot: int, log_lines: int):
    self.backend, self.slot, self._reader, self._out = backend, slot, Reader(), bytearray()
    self.socket, theirs = socket.socketpair()
    self.screen = SharedScreen(unnamed_file())
    read, write = os.pipe()
    self.log = Log(read, log_lines)
    try:
      self.popen = backend.keeper.ask(lambda: self._start(theirs.fileno(), write)).result(PATIENCE)
    except BaseException:
      os.close(read)
      self.socket.close()
      self.screen.close()
      raise
    finally:
      theirs.close()
      os.close(write)
    self.pid, self.started = self.popen.pid, processes.start_time(self.popen.pid)
    self.socket.setblocking(False)
    self.ended = False

  def _start(self, theirs: int, write: int) -> subprocess.Popen:
    """Runs in the keeper. The screen's own descriptor is handed over as it is."""
    passed = (theirs, self.screen.fd)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    # PRACTICE_COMPUTER: what tells computers apart, for ports, folders and luck
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PRACTICE_COMPUTER": str(self.slot)}
    environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"} | os.environ | own
    popen = subprocess.Popen(
      [sys.executable, "-P", "-m", "envs.worker", str(theirs), str(self.screen.fd), str(os.getpid())], pass_fds=passed, env=environment,
      stdin=subprocess.DEVNULL, stdout=write, stderr=write, start_new_session=True,
    )  # fmt: skip
    self.backend.keeper.watch(self.log)
    return popen

  def fileno(self) -> int:
    return self.socket.fileno()

  def send(self, message: dict) -> None:
    """Sends, or keeps what does not fit for the next `flush`. OSError if the worker is gone and nothing was sent."""
    waiting = bool(self._out)
    self._out += pack(message)
    if not waiting:
      self.flush()

  def flush(self) -> None:
    try:
      del self._out[: self.socket.send(self._out)]
    except BlockingIOError:
      pass
    more = selectors.EVENT_WRITE if self._out else 0
    self.backend.selector.modify(self, selectors.EVENT_READ | more, self)

  def receive(self) -> list[dict]:
    try:
      data = self.socket.recv(1 << 18)
    except BlockingIOError:
      return []
    except ConnectionError:
      data = b""
    if not data:
      raise EOFError
    return self._reader.feed(data)

  def size(self, shape: tuple[int, ...]) -> None:
    self.screen.size(shape)

  def pixels(self, told: dict, token: int) -> np.ndarray:
    return self.screen.read(told, token)

  def last_lines(self) -> list[str]:
    """What the worker printed last, everything that has arrived included."""
    self.backend.keeper.ask(lambda: self.backend.keeper.drain(self.log)).result(PATIENCE)
    return self.log.tail()

  def fate(self, wait: float = 0.1) -> str:
    """'running', or how the process ended. It is not collected yet, so that its number stays its own."""
    for _ in range(1 + int(wait / 0.005)):  # the connection closes a moment before the process has ended
      seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
      if seen is not None:
        how = "ended by signal" if seen.si_code in (os.CLD_KILLED, os.CLD_DUMPED) else "exit code"
        return f"{how} {seen.si_status}"
      time.sleep(0.005)
    return "running"

  def terminate(self) -> None:
    """Asks what the worker started to end; the worker itself ends when told to close, or when killed."""
    if not self.ended:
      processes.send_group(self.pid, self.started, signal.SIGTERM)

  def kill(self) -> None:
    """Ends the process and everything it started, at once; collecting it is left to the keeper."""
    if self.ended:
      return
    self.ended = True
    self.backend.leave(self)


class LocalBackend:
  """Starts workers on this machine. log_lines: how many printed lines of each are kept."""

  name = "local"

  def __init__(self, slots: int, log_lines: int = 50):
    need = slots * DESCRIPTORS + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < need:
      if hard != resource.RLIM_INFINITY and hard < need:
        raise ValueError(f"{slots} workers need {need} file descriptors, this process may have {hard}: raise ulimit -n or lower pool.slots")
      resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
    self.log_lines = log_lines
    self.selector, self.keeper = selectors.DefaultSelector(), Keeper()
    self.remotes: set[LocalRemote] = set()
    self.doomed: collections.deque[LocalRemote] = collections.deque()
    self.ending: list[LocalRemote] = []  # doomed, or killed and not seen to have ended

  def start(self, slot: int) -> LocalRemote:
    remote = LocalRemote(self, slot, self.log_lines)
    self.remotes.add(remote)
    self.selector.register(remote, selectors.EVENT_READ, remote)
    return remote

  def poll(self, timeout: float | None) -> list[LocalRemote]:
    """Remotes that have something to say, once one has or the time is over."""
    out = []
    for key, events in self.selector.select(timeout):
      if events & selectors.EVENT_WRITE:
        try:
          key.data.flush()
        except OSError:
          events |= selectors.EVENT_READ  # the worker is gone: reading will say so
      if events & selectors.EVENT_READ:
        out.append(key.data)
    return out

  def leave(self, remote: LocalRemote) -> None:
    """The end of this one: nothing of it is heard any more, and the keeper will kill it."""
    self.selector.unregister(remote)
    self.remotes.discard(remote)
    self.ending = [other for other in self.ending if other.popen.returncode is None] + [remote]
    self.doomed.append(remote)
    self.keeper.ask(self._end_doomed)

  def _end_doomed(self) -> None:
    """Runs in the keeper: kills all that are doomed by now, and takes leave of them."""
    ended = [self.doomed.popleft() for _ in range(len(self.doomed))]
    try:
      self._kill(ended)
    finally:
      for remote in ended:
        remote.socket.close()  # not before: a worker ends itself at a hang-up, and its descendants could not be found any more
        remote.screen.close()
        self.keeper.dying.append((remote.popen, remote.log))

  def _kill(self, remotes: list[LocalRemote]) -> None:
    """Kills these and what they started, found by one look at all processes."""
    if not remotes:
      return
    others = processes.family(*(remote.pid for remote in remotes))
    for remote in remotes:
      processes.send_group(remote.pid, remote.started, signal.SIGKILL)
    for pid, start in others:
      processes.send(pid, start, signal.SIGKILL)

  def close(self, seconds: float = 2.5) -> None:
    """Kills what is left and waits until all of it is collected; a keeper that is stuck is waited for so long, and half as long each
    for the last process and for the keeper's end."""
    for remote in list(self.remotes):
      remote.kill()
    left = lambda: [remote for remote in self.ending if remote.popen.poll() is None]
    if not concurrent.futures.wait([self.keeper.ask(lambda: None)], seconds).done:
      self._kill(left())
    until = time.monotonic() + seconds / 2
    while left() and time.monotonic() < until:
      time.sleep(0.005)
    self.keeper.end(seconds / 2)
    self.selector.close()
    if pids := [remote.pid for remote in left()]:
      raise RuntimeError(f"worker processes {pids} did not end when killed")
