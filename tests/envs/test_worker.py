"""Workers: what passes between trainer and worker arrives as it was, nothing is done twice, and none outlives its trainer."""

import math
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import rogue

from core.find import ROOT
from core.schema import Action, Unreadable
from envs import processes, sim, wire
from envs.errors import BadFrame, InfraError, ResetFailed, named
from envs.grammars.lex import Written
from envs.local import LocalBackend
from envs.shared_screens import PIXELS, SharedScreen, unnamed_file
from envs.sim import tasks as sim_tasks
from envs.worker import find_suite

HERE = pathlib.Path(__file__).parent

WAIT = 20.0


# -- the wire


def through(value, pieces=1):
  data, reader, out = wire.pack({"value": value}), wire.Reader(), []
  size = max(1, math.ceil(len(data) / pieces))
  for i in range(0, len(data), size):
    out += reader.feed(data[i : i + size])
  (message,) = out
  return message["value"]


@pytest.mark.parametrize(
  "value",
  [None, True, 0, -(2**70), 0.1 + 0.2, 5e-324, math.inf, "", "a\x00\ud800é\n", [], [1, [2.0]], (), (1, (2, "x")), {"a": (1,)},
   {1: "x", (2, 3): "y"}, {"$": "tuple", "v": 3}, b"\x00\xff", Unreadable("why"), Written("0.50"),
   Action("tap", {"point": (4, 5)}, {"point": [0.5, 1]}, "phone", "t")],
)  # fmt: skip
def test_values_come_out_with_the_types_they_went_in_with(value):
  for pieces in (1, 3, 10_000):
    got = through(value, pieces)
    assert got == value and repr(got) == repr(value)


def test_numpy_values_keep_their_dtype_and_bits():
  for x in (np.float32(0.1), np.int64(-3), np.bool_(True), np.arange(6, dtype=np.int16).reshape(2, 3), np.float64("nan")):
    got = through(x)
    assert type(got) is type(x) and got.dtype == x.dtype and np.asarray(got).tobytes() == np.asarray(x).tobytes()


def test_a_task_travels_whole():
  task = sim_tasks.practice_tasks("sim/desktop", 3)[2]
  assert through(task) == task and repr(through(task)) == repr(task)


def test_what_cannot_travel_is_named():
  with pytest.raises(TypeError, match=r"message\.value\.notes\[1\] is a builtins.object, which cannot leave a worker"):
    through({"notes": [1, object()]})


@pytest.mark.parametrize(
  "data", [b"\xff\xff\xff\xff....", wire.HEAD.pack(3) + b"{x}", wire.HEAD.pack(2) + b"[]", wire.HEAD.pack(2) + b"\xff\xfe"]
)
def test_bytes_that_are_no_message_are_refused(data):
  with pytest.raises(wire.WireError):
    wire.Reader().feed(data)


def test_half_a_message_waits_for_the_rest():
  reader, data = wire.Reader(), wire.pack({"a": 1}) + wire.pack({"b": 2})
  assert reader.feed(data[:-1]) == [{"a": 1}] and reader.feed(data[-1:]) == [{"b": 2}]


# -- the shared screen


@pytest.fixture
def sides():
  """(trainer's, worker's) view of one screen of 5 x 7."""
  fd = unnamed_file()
  theirs, ours = SharedScreen(os.dup(fd)), SharedScreen(fd)
  ours.size((5, 7, 3))
  yield ours, theirs
  ours.close()
  theirs.close()


def picture(seed):
  return np.random.default_rng(seed).integers(0, 256, (5, 7, 3)).astype(np.uint8)


def test_a_screen_arrives_bit_for_bit_and_is_a_copy(sides):
  ours, theirs = sides
  told = theirs.write(picture(1), 9)
  got = ours.read(told, 9)
  theirs.write(picture(2), 9)
  assert np.array_equal(got, picture(1)) and got.dtype == np.uint8 and got.flags.writeable


def test_a_stale_or_foreign_screen_is_refused(sides):
  ours, theirs = sides
  first = theirs.write(picture(1), 9)
  with pytest.raises(BadFrame, match="number 1 for token 9, wanted number 1 for token 8"):
    ours.read(first, 8)
  second = theirs.write(picture(2), 9)
  with pytest.raises(BadFrame, match="stale screenshot: number 2 for token 9, wanted number 1"):
    ours.read(first, 9)
  assert np.array_equal(ours.read(second, 9), picture(2))
  with pytest.raises(BadFrame, match="wanted number 3"):
    ours.read(second | {"number": 3}, 9)


def test_a_torn_screen_is_refused(sides):
  ours, theirs = sides
  told = theirs.write(picture(1), 9)
  theirs._map[8:16] = (2).to_bytes(8, "little")  # the next picture was begun
  with pytest.raises(BadFrame, match="begun as number 2, ended as 1"):
    ours.read(told, 9)


def test_a_screen_of_another_size_is_refused(sides):
  ours, theirs = sides
  told = theirs.write(picture(1), 9)
  with pytest.raises(BadFrame, match=r"\(5, 7, 3\) in 105 bytes, told as \(7, 5, 3\)"):
    ours.read(told | {"shape": [7, 5, 3]}, 9)
  with pytest.raises(BadFrame, match="does not fit in 105 bytes"):
    theirs.write(np.zeros((50, 70, 3), np.uint8), 9)
  assert len(ours._map) == PIXELS + 105


# -- one worker, spoken to by hand


class Spoken:
  """A worker process and one question at a time."""

  def __init__(self, suite=str(HERE / "rogue.py"), computer=rogue.COMPUTER, config=None):
    self.backend = LocalBackend(1)
    self.remote, self.id = self.backend.start(0), 0
    self.boot = self.ask("boot", spec={"suite": suite, "computer": computer, "config": config or {}, "clean": False}, black_frames=True)
    if "result" in self.boot:
      self.remote.size(tuple(self.boot["result"]["shape"]))

  def ask(self, op, token=0, **payload):
    self.id += 1
    self.remote.send({"op": op, "id": self.id, "token": token} | payload)
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
      for remote in self.backend.poll(0.2):
        for message in remote.receive():
          if "phase" not in message:
            assert (message["id"], message["token"]) == (self.id, token)
            return message
    raise TimeoutError(op)


@pytest.fixture(scope="module")
def spoken():
  worker = Spoken()
  yield worker
  worker.backend.close()


def test_a_worker_has_no_jax_and_dies_with_nobody_but_its_trainer(spoken):
  said = spoken.ask("ping")["result"]
  assert said == {"pid": spoken.remote.pid, "accelerated": []} and spoken.boot["result"] == {"shape": [6, 4, 3]}
  for stop in (signal.SIGTERM, signal.SIGINT):  # sent to all by a scheduler or by Ctrl-C: the trainer decides
    os.kill(spoken.remote.pid, stop)
  assert spoken.ask("ping")["result"]["pid"] == spoken.remote.pid
  assert os.getsid(spoken.remote.pid) == os.getpgid(spoken.remote.pid) == spoken.remote.pid


def test_a_black_screen_is_a_fault_unless_the_environment_sees_to_that_itself(spoken):
  task = rogue.task(frame="frame black")
  said = spoken.ask("reset", token=5, seed=None, task=task)
  assert said["error"] == "BlackFrame" and said["infra"]
  assert spoken.ask("step", token=5, text="a", act=1)["error"] == "StaleToken"  # such an episode never began
  other = Spoken(config={"black_screens": True})
  try:
    assert other.ask("reset", token=1, seed=None, task=task)["result"]["info"] == {"notes": {"seed": None}}
  finally:
    other.backend.close()


def test_a_worker_with_a_simulated_phone_has_no_jax():
  worker = Spoken("sim", "sim/phone", sim.defaults().to_dict())
  try:
    assert worker.boot["result"] == {"shape": [160, 96, 3]}
    assert worker.ask("ping")["result"]["accelerated"] == []
  finally:
    worker.backend.close()


def test_no_action_is_carried_out_twice_or_under_an_old_token(spoken, tmp_path):
  diary = tmp_path / "diary"
  task, done = rogue.task(diary=str(diary)), lambda: diary.read_text().split()
  refused = lambda message: message["error"] == "StaleToken" and message["infra"]
  assert refused(spoken.ask("step", 5, text="early", act=1))  # no episode yet
  assert "result" in spoken.ask("reset", 5, task=task, seed=None)
  assert "result" in spoken.ask("step", 5, text="one", act=1)
  assert refused(spoken.ask("step", 5, text="one", act=1))  # the same again
  assert refused(spoken.ask("step", 5, text="three", act=3))  # one is missing
  assert refused(spoken.ask("step", 4, text="two", act=2))  # another lease's
  assert refused(spoken.ask("expire", 6))
  assert refused(spoken.ask("reset", 4, task=task, seed=None))  # a late reset of an older lease
  assert "result" in spoken.ask("step", 5, text="two", act=2)
  assert "error" in spoken.ask("step", 5, text="raise", act=3)
  assert refused(spoken.ask("step", 5, text="raise", act=3))  # begun is begun
  assert "result" in spoken.ask("expire", 5)
  assert refused(spoken.ask("step", 5, text="late", act=4))  # the episode is over
  assert done() == ["reset", "one", "two", "raise"]


def test_a_reset_that_failed_lets_no_action_through(spoken):
  assert spoken.ask("reset", 7, task=rogue.task(reset="infra reset"), seed=None)["error"] == "ResetFailed"
  assert spoken.ask("step", 7, text="x", act=1)["error"] == "StaleToken"


def test_errors_come_back_by_class_name(spoken):
  spoken.ask("reset", 8, task=rogue.task(), seed=None)
  said = [
    spoken.ask("step", 8, text=text, act=i + 1) for i, text in enumerate(("infra checker", "infra ink", "raise", "odd", "frame short"))
  ]
  assert [m["error"] for m in said] == ["CheckerFailed", "OutOfInk", "KeyError", "TypeError", "BadFrame"]
  assert [m["infra"] for m in said] == [True, True, False, False, True]
  assert "KeyError: 'the disk is full'" in said[2]["message"] and "message.result.info.notes.odd" in said[3]["message"]
  assert named("ResetFailed") is ResetFailed and named("OutOfInk").__name__ == "OutOfInk" and issubclass(named("OutOfInk"), InfraError)
  assert named("OutOfInk") is named("OutOfInk") and issubclass(named("PoolExhausted"), InfraError)  # a name alone never makes another kind


def test_what_a_worker_prints_is_kept_short_and_never_blocks_it(spoken):
  spoken.ask("reset", 9, task=rogue.task(), seed=None)
  assert "result" in spoken.ask("step", 9, text="shout 3000", act=1)  # 3 MB: many times what a pipe holds
  until = time.monotonic() + WAIT
  while not (lines := spoken.remote.last_lines())[-1].startswith("line 2999 ") and time.monotonic() < until:
    time.sleep(0.01)
  assert len(lines) == 50 and lines[0].startswith("line 2950 ") and max(map(len, lines)) == 300


@pytest.mark.parametrize(
  "suite, message",
  [
    ("simm", "no environment suite 'simm' in envs/; there is: .*sim"),
    ("../train", "no environment suite"),
    ("nowhere.py", "no such Python file"),
  ],
)
def test_an_unknown_suite_is_refused(suite, message):
  with pytest.raises(ValueError, match=message):
    find_suite(suite)


# -- processes


def test_a_process_is_known_by_pid_and_start_time():
  child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
  try:
    start = processes.start_time(child.pid)
    assert start and processes.alive(child.pid, start) and not processes.alive(child.pid, start + 1)
    assert not processes.send(child.pid, start - 1, signal.SIGKILL)  # somebody else of the same number
    processes.send_group(child.pid, start + 1, signal.SIGKILL)
    time.sleep(0.1)
    assert child.poll() is None
    assert processes.send(child.pid, start, signal.SIGKILL) and child.wait(WAIT) == -signal.SIGKILL
    assert not processes.send(child.pid, start, signal.SIGKILL) and processes.start_time(child.pid) is None
  finally:
    child.kill()
    child.wait()


def gone(pids, seconds=WAIT):
  until = time.monotonic() + seconds
  while (left := [p for p in pids if processes.alive(p, None)]) and time.monotonic() < until:
    time.sleep(0.02)
  return not left


@pytest.mark.parametrize("rest", ["", " away"])
def test_what_a_worker_started_ends_with_it(rest):
  """In its own session too, as long as the worker lives to be asked for its descendants."""
  worker = Spoken()
  worker.ask("reset", 1, task=rogue.task(), seed=None)
  worker.ask("step", 1, text="spawn" + rest, act=1)
  children = [pid for pid, _ in processes.family(worker.remote.pid)]
  assert len(children) == 1
  worker.remote.kill()
  worker.backend.close()
  assert gone([worker.remote.pid, *children])


def test_no_worker_outlives_a_trainer_that_is_killed():
  """One idle, one that hangs in a step."""
  script = f"""
    import sys, time
    sys.path[:0] = [{str(ROOT)!r}, {str(HERE)!r}]
    import rogue
    from envs.pool import EnvSpec, Pool, defaults
    cfg = defaults()
    cfg.slots = 2
    pool = Pool(EnvSpec({str(HERE / "rogue.py")!r}, rogue.COMPUTER, {{}}), cfg)
    leases = [pool.lease(), pool.lease()]
    leases[0].reset(options={{"task": rogue.task()}})
    leases[0].submit_step("hang")
    pool.wait(0.1)
    print(*[s.remote.pid for s in pool.slots], flush=True)
    time.sleep(60)
  """
  trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
  try:
    pids = [int(p) for p in trainer.stdout.readline().split()]
    assert len(pids) == 2 and all(processes.alive(p, None) for p in pids)
    trainer.kill()
    trainer.wait(WAIT)
    assert gone(pids)
  finally:
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
