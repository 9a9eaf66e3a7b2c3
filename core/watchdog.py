"""Ends a process that hangs, and says first who waits for what: a run that stands still for a night teaches nobody anything.

A sign of life is something that has happened (a batch sampled, an environment's step, an optimiser step), never a turn of a loop
that waits. Any thread may give it: with back-pressure one thread that is stuck soon silences all others.
"""

from __future__ import annotations

import faulthandler
import os
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from core.knobs import require
from core.screens import write_atomic

EXIT_HUNG = 79  # of a process that its watchdog ended; taken by no other program that is in use here
STUCK_FILE = "hang-stuck.txt"  # stacks written when Python itself was stuck; the exit code is 1 then
_COMPILER = os.path.join("jax", "_src", "compiler.py")
_PATIENCE = 5.0  # seconds for each of: describing, writing to stderr, writing the file
_ENDING = 10.0  # seconds for ending what the process started
_SPARE = 3 * _PATIENCE + _ENDING + 5.0  # after the limit, until the last line of defence


def defaults() -> dict[str, float]:
  """Knobs of `Watchdog`, in seconds."""
  return {
    "seconds": 1800.0,  # without a sign of life until the run is ended; longer than any one step of any environment; 0 = never
    "compiling": 7200.0,  # the same while XLA compiles
  }


def check(cfg) -> None:
  require("watchdog", cfg, {
    "seconds": (0 <= cfg["seconds"] < 1e6, "0 (off) to a million seconds"),
    "compiling": (cfg["seconds"] <= cfg["compiling"] < 1e6, "watchdog.seconds or more, up to a million seconds"),
  })  # fmt: skip


class Watchdog:
  """`with Watchdog(cfg, workdir, describe) as dog:` then `dog.beat("sampling")` wherever something has happened.

  describe(): what only the caller knows (the pool's report, the queue's state). end(): ends what the process started. After
  cfg.seconds without a beat both are called, each with a deadline and whatever they raise; the stacks of all threads, the last
  beats and the description go to stderr and to hang-TIME.txt in `folder`; then the process exits with EXIT_HUNG, at once and
  without clean-up. While any thread is inside JAX's compiler cfg.compiling counts instead.

  The dog is a Python thread. Where another thread holds the GIL for good it cannot run: then, half a minute after the limit,
  a thread of faulthandler's, which needs no GIL, writes bare stacks to STUCK_FILE and exits with code 1. A process that was
  suspended for longer than the limit is ended when it is woken. One a process at a time.
  """

  def __init__(self, cfg, folder: pathlib.Path, describe: Callable[[], str], end: Callable[[], Any] = lambda: None):
    self.seconds, self.compiling = float(cfg["seconds"]), float(cfg["compiling"])
    self.folder, self.describe, self.end = folder, describe, end
    self._beats: dict[str, tuple[float, str]] = {}  # what happened -> when it last did, in which thread
    self._last = time.monotonic()
    self._closing = threading.Event()
    self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

  def __enter__(self) -> Watchdog:
    if self.seconds:
      path = self.folder / STUCK_FILE
      if path.exists() and path.stat().st_size:  # what an earlier process left: nobody has read it yet
        path.rename(self.folder / time.strftime("hang-%Y%m%d-%H%M%S-stuck.txt", time.localtime(path.stat().st_mtime)))
      self._stuck = open(path, "wb")
      self.beat("start")
      self._thread.start()
    return self

  def __exit__(self, *exc) -> None:
    if self.seconds:
      self._closing.set()
      self._thread.join(_SPARE)
      faulthandler.cancel_dump_traceback_later()
      self._stuck.close()
      (self.folder / STUCK_FILE).unlink(missing_ok=True)

  def beat(self, what: str) -> None:
    """Something has happened. Cheap: call it at every step."""
    self._last = time.monotonic()
    self._beats[what] = (self._last, threading.current_thread().name)

  def _watch(self) -> None:
    tick, compiling_since = min(1.0, self.seconds / 10), None
    while not self._closing.wait(tick):
      now = time.monotonic()
      if compiles():
        compiling_since = compiling_since or now
      elif compiling_since is not None:
        compiling_since, self._last = None, now
      due = self._last + self.seconds
      if compiling_since is not None:
        due = max(due, compiling_since + self.compiling)
      faulthandler.dump_traceback_later(max(due - now, 0.0) + _SPARE, exit=True, file=self._stuck)
      if now > due:
        self._bite()

  def _bite(self) -> None:
    """Tells and ends. Every part of it may hang or fail, and none may keep the next from its turn."""
    said = within(_PATIENCE, self.describe)
    told = within(_PATIENCE, lambda: self._report(said))
    path = self.folder / time.strftime("hang-%Y%m%d-%H%M%S.txt")
    within(_PATIENCE, lambda: print(told, end="", file=sys.stderr, flush=True))
    written = within(_PATIENCE, lambda: (write_atomic(path, told.encode(errors="replace")), "written")[1])
    ended = within(_ENDING, lambda: (self.end(), "done")[1])
    within(_PATIENCE, lambda: print(f"{path}: {written}; ending what was started: {ended}", file=sys.stderr, flush=True))
    os._exit(EXIT_HUNG)

  def _report(self, said: str) -> str:
    now, names = time.monotonic(), {t.ident: t.name for t in threading.enumerate()}
    lines = [f"WATCHDOG: no sign of life for {now - self._last:.1f} s (limit {self.seconds:g}, {self.compiling:g} while compiling)"]
    lines += ["", "Last signs of life:"]
    beats = sorted(self._beats.items(), key=lambda b: -b[1][0])
    lines += [f"  {now - at:9.1f} s ago  {what} (thread {thread})" for what, (at, thread) in beats]
    lines += ["", "What the run says:", said]
    for ident, frame in sys._current_frames().items():
      lines += ["", f"Thread {names.get(ident, 'unknown to Python')} ({ident}):", "".join(traceback.format_stack(frame)).rstrip()]
    return "\n".join(lines) + "\n"


def compiles() -> bool:
  """Whether any thread is inside JAX's compiler."""
  for frame in sys._current_frames().values():
    while frame is not None:
      if frame.f_code.co_filename.endswith(_COMPILER):
        return True
      frame = frame.f_back
  return False


def within(seconds: float, task: Callable[[], str]) -> str:
  """What `task` returns; a line that says so where it raises or takes longer, in which case it is left behind."""
  out: list[str] = []

  def work() -> None:
    try:
      out.append(str(task()))
    except BaseException as error:  # noqa: BLE001 - told instead of what was wanted
      failed = error
      out.append(f"failed: {failed!r}")

  thread = threading.Thread(target=work, name="watchdog's errand", daemon=True)
  thread.start()
  thread.join(seconds)
  return out[0] if out else f"no answer within {seconds:g} s"
