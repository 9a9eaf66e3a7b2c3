"""A QEMU process's monitor (QMP) through QEMU's own client, qemu.qmp, one call at a time and each with a deadline.

The client is asynchronous and environments are not: a loop of its own runs while a call is on its way, and what QEMU says between calls
waits in the socket. This process listens on a socket file and QEMU connects to it, so nothing is ever polled for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pathlib
import socket
import time
from typing import Any

from envs.children import Child
from envs.errors import Deadline, InfraError

try:
  from qemu.qmp import ConnectError, EventListener, ExecInterruptedError, ExecuteError, QMPClient, QMPError, Runstate
except ImportError:  # said in one line where it is wanted
  QMPClient = None

logging.getLogger("qemu.qmp").setLevel(logging.CRITICAL)  # the end of a process is told by what is raised here


class VmDied(InfraError):
  """The virtual machine's process ended by itself, or was killed from outside."""


class VmHung(Deadline):
  """The virtual machine's process does not answer its monitor: stopped, starved, or stuck."""


class Refused(Exception):
  """QEMU refused a command. For callers to make an infra error of where it should have worked."""


class Monitor:
  """path: the socket file, which must not be there yet. `accept` once the process was started, then `call`."""

  def __init__(self, path: pathlib.Path):
    if QMPClient is None:
      raise ValueError("real desktops want the package qemu.qmp: pip install -r requirements-desktop.txt")
    self.child: Child | None = None
    self.events: list[dict] = []  # those of `WATCHED`, as they came
    self._client = QMPClient("desktop")
    self._told = EventListener(names=WATCHED)
    self._client.register_listener(self._told)
    self._listener = socket.socket(socket.AF_UNIX)
    try:
      folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
      try:
        self._listener.bind(f"/proc/self/fd/{folder}/{path.name}")  # a socket's path has 107 bytes, and TMPDIR's may have more
      finally:
        os.close(folder)
      self._listener.listen(1)
      self._loop = asyncio.new_event_loop()
    except BaseException:
      self._listener.close()
      raise

  def accept(self, child: Child, seconds: float) -> None:
    """Waits for QEMU to connect. VmDied with its last lines if it ends before, VmHung if it does neither."""
    self.child, until = child, time.monotonic() + seconds
    self._listener.settimeout(0.05)
    while True:
      try:
        talk, _ = self._listener.accept()
        break
      except TimeoutError:
        if not child.running():
          raise VmDied(self._said("its start")) from None
        if time.monotonic() > until:
          raise VmHung(f"QEMU (pid {child.pid}) did not connect to its monitor within {seconds:g} s") from None
    talk.setblocking(False)
    self._run(self._client.connect(talk), "its greeting", seconds)

  def call(self, name: str, seconds: float, **arguments: Any) -> Any:
    """Says one command; what QEMU returns. Refused if it does not want to."""
    out = self._run(self._client.execute(name, arguments or None), name, seconds)
    self.events += self._told.clear()
    return out

  def _run(self, awaitable, what: str, seconds: float) -> Any:
    try:
      return self._loop.run_until_complete(asyncio.wait_for(awaitable, max(seconds, 0.001)))
    except ExecuteError as refused:
      raise Refused(f"{what}: {refused}") from None
    except TimeoutError:
      if not self.child.running():
        raise VmDied(self._said(what)) from None
      raise VmHung(f"QEMU (pid {self.child.pid}) did not answer {what} within {seconds:g} s") from None
    except (ExecInterruptedError, ConnectError, QMPError, OSError, EOFError):
      with contextlib.suppress(Exception):  # the process is on its way out
        self.child.popen.wait(1.0)
      raise VmDied(self._said(what)) from None

  def _said(self, what: str) -> str:
    told = " | ".join(self.child.tail()) or "nothing"
    return f"QEMU (pid {self.child.pid}) ended in {what}: {self.child.fate()}; it printed last: {told}"

  def close(self) -> None:
    """Lets go of the connection; the process is ended before, by whoever started it."""
    if self._loop.is_closed():
      return
    self._listener.close()
    if self._client.runstate != Runstate.IDLE:
      with contextlib.suppress(TimeoutError, QMPError, OSError, EOFError):  # how it ended was told by a call
        self._loop.run_until_complete(asyncio.wait_for(self._client.disconnect(), 1.0))
    self._loop.run_until_complete(self._loop.shutdown_asyncgens())
    self._loop.close()


WATCHED = ("RESET", "BLOCK_IO_ERROR")
