"""SIGTERM and Ctrl-C: noted when they come, acted on where the last whole update can be saved, and never for longer than a grace.

A signal cannot interrupt what the main thread does inside C code (a compilation, a long computation): there a thread, which
Python's wake-up descriptor tells of the signal at once, gives the run up when its grace is over. That is what kill -9 would do, and as
safe: every file is written whole or not at all.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from core.knobs import require
from core.watchdog import within

EXIT_PARTED = 80  # of a process that lost the others of its run (core/hosts.py): the same command in every one goes on
EXIT_STOPPED = os.EX_TEMPFAIL  # of a run that a signal ended: the same command goes on with it
GIVEN_UP = (
  "stopped {:g} s after the signal (save.grace) in the middle of what cannot be interrupted: "
  "the same command goes on from the last save"
)  # fmt: skip
_PATIENCE = 1.0  # seconds each for a last word and for ending what was started


def check(grace: float) -> None:
  require("save", {"grace": grace}, {"grace": (0 <= grace <= 3600, "seconds, 0 (as long as it takes) to 3600")})


class Stop(Exception):
  """A signal asked for an end. Raised by `poll` where waiting happens, caught where the run can be saved."""


class StopSignals:
  """`with StopSignals() as stop:` then `stop.poll()` in every wait. The handlers are the process's own again afterwards.

  grace: seconds after the first signal at which a process that has not ended by itself is ended, with EXIT_STOPPED; 0 = never.
  What stands in `with stop.whole:` (a save) is waited for, and so is what began there and goes on in the background: written() comes back
  when that is done. end(): ends what the process started.
  """

  def __init__(
    self, signals=(signal.SIGTERM, signal.SIGINT), grace: float = 0.0, end: Callable[[], Any] = lambda: None,
    written: Callable[[], Any] = lambda: None,
  ):  # fmt: skip
    self.asked, self.grace, self.whole = False, grace, threading.Lock()
    self.together = self.agreed = False
    self._signals, self._end, self._written = signals, end, written
    self._previous: dict = {}
    self._over = threading.Event()

  def __enter__(self) -> StopSignals:
    if self.grace:
      self._waker, self._woken = socket.socketpair()
      self._waker.setblocking(False)
      self._wakeup = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
      threading.Thread(target=self._listen, name="stop", daemon=True).start()
    self._previous = {s: signal.signal(s, self._note) for s in self._signals}
    return self

  def __exit__(self, *exc) -> None:
    for s, handler in self._previous.items():
      signal.signal(s, handler)
    self._over.set()
    if self.grace:
      signal.set_wakeup_fd(self._wakeup)
      self._waker.close()

  def _note(self, *_) -> None:
    self.asked = True

  def poll(self) -> None:
    """Raises Stop if a signal has come, in the main thread alone: that is where a run is saved, and it ends the other threads. Where
    several processes are one run (`together`) only once all have agreed: none can save alone."""
    if (self.agreed if self.together else self.asked) and threading.current_thread() is threading.main_thread():
      raise Stop

  def _listen(self) -> None:
    """The thread: hears of a signal wherever the main thread is, and ends the process if that does not."""
    with self._woken:
      while not self.asked:
        heard = self._woken.recv(64)
        if not heard:  # the run has ended
          return
        self.asked = any(number in self._signals for number in heard)
      over = self._over.wait(self.grace)  # here, since a second signal is written to the same socket
    if not over:
      with self.whole:
        self._written()
        within(_PATIENCE, lambda: print(GIVEN_UP.format(self.grace), flush=True))
        within(_PATIENCE, self._end)
        os._exit(EXIT_STOPPED)


def leave(code: int, at_once: bool = False) -> NoReturn:
  """Ends a process whose work is done. At once where a thread is left that nobody waits for: one that is deep in a compilation would
  make Python's own end abort, with another exit code. at_once: where Python's end would wait for other processes, too."""
  if at_once or any(thread.daemon for thread in threading.enumerate()):
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)
