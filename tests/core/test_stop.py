"""Signals that end a process: noted at once, acted on where it can be saved, and never for longer than the grace. Real processes."""

import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from core import stop
from core.checkpoint import Checkpointer
from core.find import ROOT
from core.stop import EXIT_STOPPED, GIVEN_UP, Stop, StopSignals
from envs import processes

HEAD = """
  import hashlib, pathlib, subprocess, sys, time
  from core.stop import Stop, StopSignals
  from envs.processes import end_descendants
  folder = pathlib.Path(sys.argv[1])
  deep = lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # C code without the GIL, like a compilation: for many minutes
"""


@pytest.fixture
def begin(tmp_path):
  """begin(code) -> a process that has printed "ready"."""
  begun = []

  def make(code):
    code = textwrap.dedent(HEAD) + textwrap.dedent(code)
    begun.append(subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True))
    assert begun[-1].stdout.readline() == "ready\n"
    return begun[-1]

  yield make
  for process in begun:
    process.kill()
    process.communicate(timeout=10)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_what_cannot_be_interrupted_is_given_up_with_all_that_was_started(begin, sig):
  """The main thread never comes back to Python, so that no handler of Python's runs."""
  process = begin("""
    with StopSignals(grace=0.3, end=end_descendants):
      child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
      print("ready", flush=True)
      deep()
  """)
  ((child, start),) = processes.family(process.pid)
  process.send_signal(sig)
  assert process.communicate(timeout=30)[0] == GIVEN_UP.format(0.3) + "\n" and process.returncode == EXIT_STOPPED
  until = time.monotonic() + 10
  while processes.alive(child, start) and time.monotonic() < until:
    time.sleep(0.01)  # killed, and on its way out
  assert not processes.alive(child, start)


def test_a_save_that_has_begun_is_finished_first(begin, tmp_path):
  process = begin("""
    with StopSignals(grace=0.1) as stop:
      with stop.whole:
        print("ready", flush=True)
        while not stop.asked: time.sleep(0.01)
        time.sleep(1.0)
        (folder / "saved").write_text("whole")
      deep()
  """)
  process.terminate()
  process.communicate(timeout=30)
  assert process.returncode == EXIT_STOPPED and (tmp_path / "saved").read_text() == "whole"


def test_a_save_in_the_background_is_finished_too(begin, tmp_path):
  process = begin("""
    import numpy as np
    from core.checkpoint import Checkpointer
    checkpoints = Checkpointer(folder / "checkpoints")
    write = checkpoints._write
    checkpoints._write = lambda *args: (time.sleep(1.0), write(*args))
    with StopSignals(grace=0.1, written=checkpoints.written) as stop:
      with stop.whole:
        checkpoints.save(7, {"x": np.ones(3)}, block=False)
      print("ready", flush=True)
      while not stop.asked: time.sleep(0.01)
      deep()
  """)
  process.terminate()
  process.communicate(timeout=60)
  assert process.returncode == EXIT_STOPPED and Checkpointer(tmp_path / "checkpoints").steps() == [7]


def test_a_process_that_ends_by_itself_in_time_is_let_alone(begin, tmp_path):
  process = begin("""
    try:
      with StopSignals(grace=0.5) as stop:
        print("ready", flush=True)
        while True:
          time.sleep(0.01)
          stop.poll()
    except Stop:
      time.sleep(1.0)  # past the grace, but out of its reach
      sys.exit(5)
  """)
  process.terminate()
  assert process.communicate(timeout=30)[0] == "" and process.returncode == 5


def test_handlers_the_wakeup_and_the_thread_are_as_before_afterwards():
  listening = lambda: [t for t in threading.enumerate() if t.name == "stop"]
  before, wakeup = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
  with StopSignals(grace=100.0) as stops:
    (thread,) = listening()
    stops.poll()
    signal.raise_signal(signal.SIGCHLD)  # another signal is none of its affair
    assert not stops.asked
  thread.join(5)
  assert signal.getsignal(signal.SIGTERM) is before and not listening()
  assert signal.set_wakeup_fd(wakeup) == -1
  with StopSignals() as stops:  # no grace: no thread
    assert not listening()
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Stop):
      stops.poll()


def test_a_second_signal_is_heard_without_a_complaint(monkeypatch):
  """As `timeout` or an impatient user sends it. What could not be written for the thread is told to the unraisable hook."""
  told = []
  monkeypatch.setattr(sys, "unraisablehook", told.append)
  with StopSignals(grace=100.0) as stops:
    (thread,) = [t for t in threading.enumerate() if t.name == "stop"]
    signal.raise_signal(signal.SIGTERM)
    thread.join(0.5)  # by now it has read the first one
    signal.raise_signal(signal.SIGTERM)
    assert stops.asked
  thread.join(5)
  assert not told and not thread.is_alive()


def test_a_thread_that_still_compiles_does_not_change_the_exit_code(begin):
  """The thread that samples may be deep in XLA when the run has been saved and closed. By sys.exit this aborts: signal 6."""
  process = begin("""
    import threading, jax, jax.numpy as jnp
    from core.stop import leave
    from core.watchdog import compiles
    def deep(x):
      for i in range(400): x = jnp.sin(x @ x) + i
      return x
    threading.Thread(target=lambda: jax.jit(deep).lower(jnp.ones((8, 8))).compile(), daemon=True).start()
    while not compiles(): time.sleep(0.01)
    print("ready", flush=True)
    leave(75)
  """)
  assert process.wait(30) == EXIT_STOPPED


@pytest.mark.parametrize("grace", [-1, float("nan"), 3601])
def test_a_bad_grace_is_refused(grace):
  with pytest.raises(ValueError, match="save.grace is .* wanted seconds"):
    stop.check(grace)
