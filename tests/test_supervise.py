"""A run is kept going by real processes that are really killed. The trainers are scripts of a few lines; tests/test_train.py has
a real one."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import supervise
from core.config import EXIT_USAGE
from core.watchdog import EXIT_HUNG, STUCK_FILE
from envs import processes
from supervise import Reached, Supervisor

ROOT = pathlib.Path(__file__).resolve().parent.parent
START = "import pathlib, sys, supervise\n" + (
  "sys.exit(supervise.supervise([sys.executable, *sys.argv[5:]], pathlib.Path(sys.argv[1]), retries=int(sys.argv[2]), "
  "grace=float(sys.argv[3]), pause=float(sys.argv[4])))"
)
# n: the how-manieth start this is; update(k): a line as train.py writes it
HEAD = """
import json, os, pathlib, signal, subprocess, sys, time
work = pathlib.Path(sys.argv[1])
work.mkdir(exist_ok=True)
with open(work / "starts", "a") as f: f.write(f"{os.getpid()}\\n")
n = len((work / "starts").read_text().split())
def update(k):
  with open(work / "metrics.jsonl", "a") as f: f.write(json.dumps({"update": k}) + "\\n")
def die(): os.kill(os.getpid(), signal.SIGKILL)
"""
# A grandchild in a session of its own whose parent is gone, deaf to everything but kill -9; its pid goes to a file.
STRAY = """
code = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; time.sleep(300)"
start = "import subprocess as s, sys; print(s.Popen([sys.executable, '-c', sys.argv[1]], stdout=s.DEVNULL, start_new_session=True).pid)"
stray = subprocess.run([sys.executable, "-c", start, code], stdout=subprocess.PIPE, text=True).stdout.strip()
(work / "stray.part").write_text(stray)
(work / "stray.part").rename(work / "stray")
"""


@pytest.fixture
def begin(tmp_path):
  """begin(script, retries=3, grace=5) -> (guard, workdir). Nothing of it is left after the test."""
  guards = []

  def make(script, retries=3, grace=5.0, pause=0.02, head=HEAD):
    (tmp_path / "trainer.py").write_text(head + script)
    own = [str(tmp_path / "run"), str(retries), str(grace), str(pause)]
    command = [sys.executable, "-c", START, *own, str(tmp_path / "trainer.py"), str(tmp_path / "run")]
    guards.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return guards[-1], tmp_path / "run"

  yield make
  for guard in guards:
    left = processes.family(guard.pid)
    guard.kill()
    for pid, start in left:
      processes.send(pid, start, signal.SIGKILL)
    guard.communicate(timeout=10)


def finish(guard, seconds=30):
  """(exit code, what it said)"""
  said = guard.communicate(timeout=seconds)[1]
  return guard.returncode, said


def starts(workdir):
  return [int(pid) for pid in (workdir / "starts").read_text().split()]


def rows(workdir):
  text = (workdir / "restarts.jsonl").read_text()
  assert text.endswith("\n")
  return [json.loads(line) for line in text.splitlines()]


def wait_for(condition, seconds=20):
  until = time.monotonic() + seconds
  while not (found := condition()):
    assert time.monotonic() < until, "what was waited for did not happen"
    time.sleep(0.01)
  return found


def written(path):
  return wait_for(lambda: path.exists() and path.read_text())


def gone(pid):
  wait_for(lambda: not processes.alive(pid, None))


# ---- tried again


def test_two_kills_and_then_success(begin):
  guard, workdir = begin("update(0)\nif n < 3: die()")
  code, said = finish(guard)
  assert code == 0 and len(starts(workdir)) == 3
  first, second = rows(workdir)
  assert first["pid"] == starts(workdir)[0] and isinstance(first["start"], int) and first["exit"] == -9
  assert "signal 9 (Killed)" in first["cause"] and first["practice"] == 1 and first["checkpoint"] == -1
  # update 0 was new in the first session: the count starts there; it was not in the second
  assert (first["attempts_left"], second["attempts_left"]) == (2, 1) and first["restart"] and second["restart"]
  loud = [line for line in said.splitlines() if line.startswith("SUPERVISOR:")]
  assert len(loud) == 2 and "practice update 1" in loud[0] and "2 attempts left" in loud[0]


def test_the_count_starts_anew_while_the_run_gets_further(begin):
  guard, workdir = begin("update(n)\nif n < 6: die()", retries=1)
  assert finish(guard)[0] == 0 and len(starts(workdir)) == 6
  assert [r["attempts_left"] for r in rows(workdir)] == [0] * 5


def test_a_newer_checkpoint_is_progress_too(begin):
  guard, workdir = begin("""
if n == 4: sys.exit(0)
(work / f"checkpoints/{n}").mkdir(parents=True)
(work / f"checkpoints/{n}/manifest.json").write_text("{}")
die()""", retries=1)  # fmt: skip
  assert finish(guard)[0] == 0 and [r["checkpoint"] for r in rows(workdir)] == [1, 2, 3]


def test_going_over_the_same_updates_again_is_no_progress(begin):
  """Each session rewinds to its checkpoint, as train.py does, and dies where the first one died."""
  guard, workdir = begin('(work / "metrics.jsonl").write_text("")\nfor k in range(5): update(k)\ndie()', retries=2)
  code, said = finish(guard)
  assert code == 128 + 9 and len(starts(workdir)) == 3
  assert "2 restarts got it no further" in said and not rows(workdir)[-1]["restart"]


def test_a_hang_is_tried_again_at_the_same_place(begin):
  guard, workdir = begin(f"if n < 3: os._exit({EXIT_HUNG})")
  assert finish(guard)[0] == 0 and len(starts(workdir)) == 3 and "watchdog" in rows(workdir)[0]["cause"]


def test_a_hang_that_only_the_last_line_of_defence_ended_is_known_by_its_file(begin):
  guard, workdir = begin(f'if n < 4: (work / "{STUCK_FILE}").write_text("Timeout!")\nif n < 4: os._exit(1)')
  assert finish(guard)[0] == 0 and len(starts(workdir)) == 4 and all(STUCK_FILE in r["cause"] for r in rows(workdir))


def test_a_stale_file_of_a_hang_excuses_no_breakdown(begin):
  guard, workdir = begin(f'(work / "{STUCK_FILE}").write_text("Timeout!")\nos.utime(work / "{STUCK_FILE}", (1, 1))\nos._exit(1)')
  assert finish(guard)[0] == 1 and len(starts(workdir)) == 2


def test_a_signal_that_somebody_else_sent_to_the_trainer_does_not_end_the_run(begin):
  guard, workdir = begin("if n < 4: sys.exit(75)")
  assert finish(guard)[0] == 0 and len(starts(workdir)) == 4


def test_an_error_of_the_disk_in_the_middle_of_a_run_is_no_usage_error(begin):
  guard, workdir = begin("if n == 1: update(0); sys.exit(2)")
  assert finish(guard)[0] == 0 and len(starts(workdir)) == 2


def test_what_a_dead_trainer_left_is_gone_before_the_next_one_starts(begin):
  guard, workdir = begin("if n == 1:\n" + "".join(f"  {line}\n" for line in STRAY.splitlines()) + "  die()\n" + """
stray = int((work / "stray").read_text())
sys.exit(5 if pathlib.Path(f"/proc/{stray}").exists() else 0)""")  # fmt: skip
  assert finish(guard)[0] == 0 and len(starts(workdir)) == 2


def test_orphans_that_end_by_themselves_are_collected_while_the_trainer_runs(begin):
  """A stray becomes the supervisor's child, and would stay a zombie for as long as the run lasts."""
  guard, workdir = begin(STRAY + "os.kill(int(stray), signal.SIGKILL)\ntime.sleep(30)")
  stray = int(written(workdir / "stray"))
  wait_for(lambda: not pathlib.Path(f"/proc/{stray}").exists(), 5)
  assert guard.poll() is None


# ---- not tried again


def test_the_same_breakdown_twice_is_the_last(begin):
  guard, workdir = begin("if n == 1: update(0)\nsys.exit(1)", retries=9)
  code, said = finish(guard)
  assert code == 1 and len(starts(workdir)) == 2 and "at the same place twice" in said
  assert [r["restart"] for r in rows(workdir)] == [True, False]


def test_a_breakdown_elsewhere_is_another_one(begin):
  guard, workdir = begin('if n < 3:\n  update(n)\nelif n == 3:\n  sys.exit(0)\nsys.exit(1)')  # fmt: skip
  assert finish(guard)[0] == 0 and len(starts(workdir)) == 3


def test_a_usage_error_is_handed_through_and_leaves_nothing(begin):
  guard, workdir = begin(f"import sys; sys.exit({EXIT_USAGE})", head="")
  code, said = finish(guard)
  assert code == EXIT_USAGE and not workdir.exists() and said.count("SUPERVISOR:") == 1


def test_a_run_that_is_done_says_nothing(begin):
  guard, workdir = begin("update(0)")
  assert finish(guard) == (0, "") and not (workdir / "restarts.jsonl").exists()


@pytest.mark.parametrize("argv, says", [
  (["--config=configs/android.py"], "--retries=3"), (["--retries=-1", "--", "--config=configs/android.py"], "retries"),
  (["--tries=4", "--", "--config=configs/android.py"], "tries"), (["3", "--", "--config=configs/android.py"], "3 stands alone"),
  (["--", "--config=configs/andriod.py"], "did you mean configs/android.py"), (["--"], "no --config"),
])  # fmt: skip
def test_bad_arguments_are_one_line(argv, says, tmp_path):
  done = subprocess.run([sys.executable, ROOT / "supervise.py", *argv], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
  assert done.returncode == EXIT_USAGE and done.stderr.count("\n") == 1 and says in done.stderr, done.stderr


# ---- stopped

SAVES = """
def save(*_):
  (work / "saved").write_text("yes")
  os._exit(75)
signal.signal(signal.SIGTERM, save)
"""
READY = '(work / "ready").write_text("yes")\ntime.sleep(60)'


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_save_waited_for(begin, sig):
  guard, workdir = begin(SAVES + READY)
  written(workdir / "ready")
  guard.send_signal(sig)
  assert finish(guard)[0] == 75 and (workdir / "saved").exists() and len(starts(workdir)) == 1


def test_signals_to_every_process_at_once_still_let_it_save(begin):
  """As a service manager or a preempted machine sends them."""
  guard, workdir = begin(SAVES + READY)
  written(workdir / "ready")
  for pid, start in [(guard.pid, None), *processes.family(guard.pid)]:
    processes.send(pid, start, signal.SIGTERM)
  assert finish(guard)[0] == 75 and (workdir / "saved").exists() and len(starts(workdir)) == 1


def test_a_trainer_that_does_not_listen_is_killed_at_its_deadline(begin):
  guard, workdir = begin("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STRAY + READY, grace=0.5)
  written(workdir / "ready")
  began = time.monotonic()
  guard.terminate()
  code, said = finish(guard)
  assert code == 128 + 9 and 0.4 < time.monotonic() - began < 5 and "has not ended 0.5 s after" in said
  gone(starts(workdir)[0])
  gone(int((workdir / "stray").read_text()))


def test_a_signal_in_a_pause_ends_it(begin):
  guard, workdir = begin("die()", pause=100)
  written(workdir / "restarts.jsonl")
  began = time.monotonic()
  guard.terminate()
  assert finish(guard)[0] == 128 + 9 and time.monotonic() - began < 3 and len(starts(workdir)) == 1


def test_the_guard_killed_the_trainer_saves_and_everything_is_gone(begin):
  guard, workdir = begin(STRAY + SAVES + READY)
  written(workdir / "ready")
  below = processes.family(guard.pid)
  assert len(below) == 3  # supervisor, trainer, stray
  guard.kill()
  for pid, start in below:
    wait_for(lambda pid=pid, start=start: not processes.alive(pid, start))
  assert (workdir / "saved").exists() and len(starts(workdir)) == 1


def test_the_supervisor_killed_everything_is_gone_and_the_guard_says_so(begin):
  guard, workdir = begin("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STRAY + READY)
  written(workdir / "ready")
  below = processes.family(guard.pid)
  supervisor = next(
    pid for pid, _ in below if os.getsid(pid) == pid and pid not in starts(workdir) and pid != int(written(workdir / "stray"))
  )
  os.kill(supervisor, signal.SIGKILL)
  code, said = finish(guard)
  assert code == 128 + 9 and f"the supervisor (process {supervisor}) was killed by signal 9" in said
  assert not [p for p in below if processes.alive(*p)]


def test_children_that_were_there_before_are_spared(begin, tmp_path):
  """A shell that started something in the background and then became supervise.py."""
  (tmp_path / "trainer.py").write_text(HEAD)
  own = [str(tmp_path / "run"), "3", "5", "0.02", str(tmp_path / "trainer.py"), str(tmp_path / "run")]
  before = (
    "import subprocess; print(subprocess.Popen(['sleep', '30'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid, flush=True)\n"
  )
  done = subprocess.run([sys.executable, "-c", before + START, *own], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
  pid = int(done.stdout)
  try:
    assert done.returncode == 0 and processes.alive(pid, None)
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGKILL)


# ---- its rules, without processes


def judge(monkeypatch, places, code=-9, retries=3):
  """Verdicts over deaths at these places, a moment apart."""
  at = iter([Reached(-1, 0, 0), *places])
  monkeypatch.setattr(supervise, "reached", lambda workdir: next(at))
  keeper = Supervisor([], pathlib.Path("none"), 0, retries=retries, grace=1, pause=2.0)
  return keeper, [keeper._over(code, stuck=False) for _ in places]


def test_twenty_restarts_within_an_hour_are_enough_whatever_was_reached(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(supervise.time, "monotonic", lambda: now[0])
  keeper, verdicts = judge(monkeypatch, [Reached(-1, 0, k) for k in range(1, 22)])
  assert verdicts[:20] == [""] * 20 and "20 restarts within an hour" in verdicts[20]
  now[0] = 3601.0
  monkeypatch.setattr(supervise, "reached", lambda workdir: Reached(-1, 0, 40))
  assert keeper._over(-9, stuck=False) == ""


def test_pauses_double_up_to_five_minutes_and_vary_by_half(monkeypatch):
  keeper, _ = judge(monkeypatch, [])
  for tries, mean in ((1, 2), (2, 4), (3, 8), (8, 256), (9, 300), (40, 300)):
    keeper.tries = tries
    seen = [keeper._pause() for _ in range(200)]
    assert mean * 0.5 <= min(seen) < mean * 0.7 and mean * 1.3 < max(seen) <= mean * 1.5


def test_how_far_a_run_got_is_read_from_whole_lines_and_whole_checkpoints(tmp_path):
  assert supervise.reached(tmp_path) == Reached(-1, 0, 0)
  (tmp_path / "copying").mkdir()
  (tmp_path / "copying" / "metrics.jsonl").write_text('{"update": 49}\n')
  (tmp_path / "metrics.jsonl").write_text("".join(f'{{"update": {k}, "pad": "{"x" * 3000}"}}\n' for k in range(60)) + '{"update": 60')
  for name in ("8", "8.1", "12", "14-copy", "screens", "tmp-16"):
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / name / "manifest.json").write_text("{}")
  (tmp_path / "checkpoints" / "13").mkdir()  # no manifest, no step
  assert supervise.reached(tmp_path) == Reached(12, 50, 60)
  (tmp_path / "metrics.jsonl").write_bytes(b'{"update": 3}\n\0\0\0\0\n')  # a disk that was full
  assert supervise.reached(tmp_path).practice == 4
