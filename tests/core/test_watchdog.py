"""A watchdog in real processes that really hang. Each script is a trainer of a few lines, with limits of a second or less."""

import pathlib
import subprocess
import sys
import time

import pytest

from core.watchdog import EXIT_HUNG, STUCK_FILE, Watchdog, check, compiles, defaults, within

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
HEAD = """
import pathlib, sys, threading, time
from core import watchdog
from core.watchdog import Watchdog
folder = pathlib.Path(sys.argv[1])
def dog(seconds, compiling=60.0, **kw):
  return Watchdog({"seconds": seconds, "compiling": compiling}, folder, **({"describe": lambda: "computer 3 leased, step for 99 s"} | kw))
"""


def run(script, folder, seconds=30):
  """(exit code, stderr, the report in the folder or "", seconds it took)"""
  began = time.monotonic()
  done = subprocess.run([sys.executable, "-c", HEAD + script, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=seconds,
                        check=False)  # fmt: skip
  reports = list(folder.glob("hang-2*.txt"))
  assert len(reports) <= 1 and not list(folder.glob("*.tmp")) and not list(folder.glob(".*"))
  return done.returncode, done.stderr, reports[0].read_text() if reports else "", time.monotonic() - began


DEADLOCK = """
first, second = threading.Lock(), threading.Lock()
both = threading.Barrier(2)
def learner():
  with first:
    both.wait()
    with second: pass
def sampler():
  with second:
    both.wait()
    with first: pass
with dog(0.5) as d:
  d.beat("gathered")
  other = threading.Thread(target=sampler, name="the sampling thread")
  other.start()
  learner()
"""


def test_two_threads_that_wait_for_each_other_are_both_shown_and_the_process_ends(tmp_path):
  code, said, report, took = run(DEADLOCK, tmp_path)
  assert code == EXIT_HUNG and report and report in said and took < 20
  threads = {part.split(" (")[0]: part for part in report.split("\nThread ")[1:]}
  assert "in learner" in threads["MainThread"] and "in sampler" in threads["the sampling thread"]
  assert "computer 3 leased, step for 99 s" in report
  assert "no sign of life for 0." in report and "s ago  gathered (thread MainThread)" in report


def test_beats_of_any_thread_keep_it_quiet_and_nothing_is_left(tmp_path):
  code, said, report, took = run("""
def steps():
  for _ in range(25):
    time.sleep(0.1)
    d.beat("environments")
with dog(1.5) as d:
  other = threading.Thread(target=steps)
  other.start()
  other.join()
time.sleep(2.0)  # and it does not bite once it is closed
""", tmp_path)  # fmt: skip
  assert (code, said, report) == (0, "", "") and took > 4.5 and not list(tmp_path.iterdir())


def test_zero_is_off(tmp_path):
  assert run("with dog(0.0) as d: d.beat('x'); time.sleep(1)", tmp_path)[:3] == (0, "", "")


@pytest.mark.parametrize("how, shown", [("time.sleep(60)", "no answer within 0.3 s"), ("1 / 0", "ZeroDivisionError")])
def test_a_description_or_an_end_that_hangs_or_fails_stops_nothing(tmp_path, how, shown):
  code, said, report, took = run(f"""
watchdog._PATIENCE = watchdog._ENDING = 0.3
def bad(): {how}
with dog(0.3, describe=bad, end=bad) as d: time.sleep(60)
""", tmp_path)  # fmt: skip
  assert code == EXIT_HUNG and shown in report and "Thread MainThread" in report and took < 15
  assert shown in said.splitlines()[-1] and "written" in said.splitlines()[-1]


def test_what_was_started_is_ended(tmp_path):
  code, *_ = run("""
import subprocess
child = subprocess.Popen(["sleep", "60"])
(folder / "pid").write_text(str(child.pid))
with dog(0.3, end=child.kill) as d: time.sleep(60)
""", tmp_path)  # fmt: skip
  pid = pathlib.Path("/proc", (tmp_path / "pid").read_text())
  until = time.monotonic() + 5
  while pid.exists() and "State:\tZ" not in (pid / "status").read_text():
    assert time.monotonic() < until
    time.sleep(0.01)
  assert code == EXIT_HUNG


def test_a_folder_that_is_gone_keeps_the_report_on_stderr(tmp_path):
  code, said, report, _ = run("""
import shutil
with dog(0.3) as d:
  shutil.rmtree(folder)
  time.sleep(60)
""", tmp_path)  # fmt: skip
  assert code == EXIT_HUNG and "Thread MainThread" in said and "FileNotFoundError" in said.splitlines()[-1]


def test_a_stderr_that_nobody_reads_keeps_nothing_from_ending(tmp_path):
  """The pipe is full before the watchdog writes its first word."""
  script = HEAD + """
import os
os.set_blocking(2, False)
try:
  while True: os.write(2, b"x" * 65536)
except BlockingIOError: pass
os.set_blocking(2, True)
watchdog._PATIENCE = 0.3
with dog(0.3) as d: time.sleep(60)
"""  # fmt: skip
  process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE)
  try:
    assert process.wait(timeout=20) == EXIT_HUNG
  finally:
    process.kill()
    process.stderr.close()
  assert "Thread MainThread" in next(tmp_path.glob("hang-2*.txt")).read_text()


def test_a_thread_that_holds_the_interpreter_for_good_is_ended_by_the_last_line_of_defence(tmp_path):
  """PyDLL calls keep the GIL: no Python thread runs any more, the watchdog's neither."""
  code, said, report, took = run("""
import ctypes
watchdog._SPARE = 0.5
with dog(0.5) as d:
  time.sleep(0.3)
  ctypes.PyDLL(None).sleep(60)
""", tmp_path)  # fmt: skip
  assert code == 1 and report == "" and took < 15
  stuck = (tmp_path / STUCK_FILE).read_text()
  assert "Timeout" in stuck and "most recent call first" in stuck
  with Watchdog({"seconds": 60, "compiling": 60}, tmp_path, lambda: ""):  # the next session keeps what was written
    assert next(tmp_path.glob("hang-*-stuck.txt")).read_text() == stuck


SLOW_COMPILE = """
import jax, numpy
jax.config.update("jax_enable_compilation_cache", False)  # the second test would be handed what the first compiled
from jax._src import compiler
real = compiler.backend_compile_and_load
def slow(*args, **kwargs):
  time.sleep({wait})  # called by the compiler, as XLA is
  return real(*args, **kwargs)
compiler.backend_compile_and_load = slow
lowered = jax.jit(lambda x: x * 3 + 1).lower(numpy.zeros(7))
with dog(1.0, compiling={limit}) as d:
  lowered.compile()
  time.sleep(0.5)  # that a compilation ended is a sign of life
  print("compiled", file=sys.stderr)
  time.sleep(60)
"""


def test_a_long_compilation_is_no_hang_but_what_comes_after_may_be(tmp_path):
  code, said, report, _ = run(SLOW_COMPILE.format(wait=2.5, limit=30.0), tmp_path)
  assert code == EXIT_HUNG and said.startswith("compiled\n") and "compiler.py" not in report


def test_an_endless_compilation_is_a_hang(tmp_path):
  code, said, report, _ = run(SLOW_COMPILE.format(wait=60.0, limit=2.0), tmp_path)
  assert code == EXIT_HUNG and "compiled\n" not in said and "in slow" in report and "2 while compiling" in report


def test_nobody_compiles_here():
  assert not compiles()


def test_within_returns_what_it_is_told_or_why_not():
  assert within(5, lambda: "word") == "word"
  assert within(5, lambda: {}["k"]) == "failed: KeyError('k')"
  assert within(0.05, lambda: time.sleep(1)) == "no answer within 0.05 s"


@pytest.mark.parametrize("knobs, says", [
  ({"seconds": -1}, "watchdog.seconds is -1"), ({"seconds": float("nan")}, "watchdog.seconds is nan"),
  ({"compiling": 5}, "watchdog.compiling is 5"), ({"compiling": float("inf")}, "watchdog.compiling is inf"),
])  # fmt: skip
def test_bad_knobs_are_refused(knobs, says):
  check(defaults())
  with pytest.raises(ValueError, match=says):
    check(defaults() | knobs)
