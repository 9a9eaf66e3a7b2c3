"""SIGTERM and Ctrl-C: noted when they come, acted on where the last whole update can be saved."""

from __future__ import annotations

import os
import signal
import threading

EXIT_STOPPED = os.EX_TEMPFAIL  # of a run that a signal ended, after saving


class Stop(Exception):
  """A signal asked for an end. Raised by `poll` where waiting happens, caught where the run can be saved."""


class StopSignals:
  """`with StopSignals() as stop:` then `stop.poll()` in every wait. The handlers are the process's own again afterwards."""

  def __init__(self, signals=(signal.SIGTERM, signal.SIGINT)):
    self.asked = False
    self._signals = signals
    self._previous: dict = {}

  def __enter__(self) -> StopSignals:
    self._previous = {s: signal.signal(s, self._note) for s in self._signals}
    return self

  def __exit__(self, *exc) -> None:
    for s, handler in self._previous.items():
      signal.signal(s, handler)

  def _note(self, *_) -> None:
    self.asked = True

  def poll(self) -> None:
    """Raises Stop if a signal has come, in the main thread alone: that is where a run is saved, and it ends the other threads."""
    if self.asked and threading.current_thread() is threading.main_thread():
      raise Stop
