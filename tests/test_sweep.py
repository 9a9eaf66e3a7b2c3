"""Sweeps: points and names by hand, real processes that are bounded, stopped and killed, commands read back as a shell reads them."""

import contextlib
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import sweep
from core.config import ConfigError
from core.stop import EXIT_STOPPED, StopSignals
from envs import processes
from sweep import Point

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUMMARY = {"copying": 0.5, "practice": 0.75, "in_domain": 0.8, "copying_greedy": 0.6, "practice_greedy": 0.9, "noise_points": 1.5,
           "n": 384, "seconds": 90.0}  # fmt: skip
CONFIG = """
from configs import base
from configs.common import parse_arg
def get_config(arg=""):
  mode = parse_arg(arg, agent="grpo", smoke=False)
  return base.lock(base.compose("swept", mode.agent, "sim/phone"))
"""


@pytest.fixture
def config(tmp_path):
  """config(functions, *flags) -> argv of a sweep over a config file with these sweep functions."""

  def make(functions, *flags, modes=""):
    (tmp_path / "swept.py").write_text(CONFIG + functions)
    return ["sweep.py", f"--config={tmp_path / 'swept.py'}{modes}", *flags]

  return make


GRID = "def sweep_lr(): return {'practice.lr': (0.01, 0.001), 'seed': [3, 4]}\n"
LIST = "def sweep_band():\n  yield {'agent.clip_low': 0.1, 'agent.clip_high': 0.2}\n  yield {'agent.clip_high': 0.4}\n"
MODES = "def sweep_agent(): return {':agent': ('ppo', 'dapo')}\n"


def test_a_grid_is_every_pair_and_a_list_is_as_it_stands(config):
  flags, points = sweep.prepare(config(GRID + LIST, "--sweep=lr"))
  assert [p.values for p in points] == [{"practice.lr": lr, "seed": s} for lr in (0.01, 0.001) for s in (3, 4)]
  assert points[1].args[1:] == ["--config.practice.lr=0.01", "--config.seed=4"]
  assert flags["out"] == os.path.abspath("runs/sweeps/swept-lr")
  _, points = sweep.prepare(config(GRID + LIST, "--sweep=band,lr", "--config.practice.updates=7"))
  assert len(points) == 2 * 4
  assert points[4].args[1:] == [
    "--config.practice.updates=7", "--config.agent.clip_high=0.4", "--config.practice.lr=0.01", "--config.seed=3",
  ]  # fmt: skip


def test_a_key_with_a_colon_is_a_mode_and_takes_the_place_of_the_given_one(config, tmp_path):
  _, points = sweep.prepare(config(MODES, "--sweep=agent", modes=":smoke,agent=gspo"))
  assert [p.args for p in points] == [[f"--config={tmp_path / 'swept.py'}:smoke,agent={a}"] for a in ("ppo", "dapo")]


def test_an_id_follows_from_what_is_run_alone():
  make = lambda chosen, file="configs/a.py", **more: [p.id for p in sweep.make_points(chosen, file, "smoke", more)]
  two = [{"practice.lr": 0.1, "seed": 1}, {"practice.lr": 0.2, "seed": 1}]
  first = make(two)
  assert first[0].startswith("lr=0.1,seed=1-") and first[0].rpartition("-")[2] != first[1].rpartition("-")[2]
  assert make(two[::-1]) == first[::-1]  # not of the order of points
  assert make(two, "/elsewhere/configs/a.py") == first  # nor of where the repository is
  digests = lambda ids: [i.rpartition("-")[2] for i in ids]
  assert digests(make([{"seed": 1, "practice.lr": 0.1}])) == digests(first[:1])  # nor of the order of keys
  assert make(two, "configs/b.py")[0] != first[0] and make(two, "configs/a.py", **{"practice.updates": 3})[0] != first[0]
  assert make([{"agent.lr": 1, "practice.lr": 2}])[0].startswith("agent.lr=1,practice.lr=2-")  # lr alone would be two things
  assert make([{"copy.path": "../x y"}])[0].startswith("path=..-x-y-")  # one folder's name


@pytest.mark.parametrize(
  "functions, flags, said",
  [
    (GRID, ["--sweep=ls"], "there is no sweep_ls() in swept.py (did you mean lr?); it has: lr"),
    ("", ["--sweep=lr"], "there is no sweep_lr() in swept.py; it has no sweep_NAME() function"),
    (GRID, [], "--sweep is missing; it has: lr"),
    (GRID, ["--sweep=lr,lr"], "names lr twice"),
    (GRID + "def sweep_seed(): return {'seed': [1]}", ["--sweep=lr,seed"], "seed is swept by two of lr, seed"),
    (GRID, ["--sweep=lr", "--config.seed=1"], "--config.seed is given, but seed is swept"),
    (GRID, ["--sweep=lr", "--workdir=x"], "--workdir=x: every point of a sweep has a folder of its own"),
    (GRID, ["--sweep=lr", "--nodes=2"], "--nodes does nothing with running here"),
    (GRID, ["--sweep=lr", "--emit=xpk", "--cluster=c"], "--emit=xpk wants --accelerator and --image and --out"),
    (GRID, ["--sweep=lr", "--emit=slurm", "--nodes=1", "--zone=z"], "--zone does nothing with --emit=slurm"),
    (GRID, ["--sweep=lr", "--jobs=0"], "jobs"),
    ("def sweep_x(): return {'practice.lr': (0.1, 7.0)}", ["--sweep=x"], "practice.lr is 7.0, wanted a number between 0 and 1"),
    ("def sweep_x(): return {'practice.lrr': (0.1,)}", ["--sweep=x"], "did you mean lr?"),
    ("def sweep_x(): return {'seed': 3}", ["--sweep=x"], "sweep_x: seed is 3, wanted a list of values"),
    ("def sweep_x(): return {'seed': ()}", ["--sweep=x"], "wanted a list of values"),
    ("def sweep_x(): return []", ["--sweep=x"], "sweep_x returned []"),
    ("def sweep_x(): return 'seed'", ["--sweep=x"], "sweep_x returned 'seed'"),
    ("def sweep_x(): return [{'seed': 1}, {'seed': 1}]", ["--sweep=x"], "two points of the sweep are the same: seed=1"),
    ("def sweep_x(): return 1 / 0", ["--sweep=x"], "sweep_x: ZeroDivisionError"),
    ("def sweep_x(): return {1: [2]}", ["--sweep=x"], "sweep_x: a key is 1, wanted the name of a knob"),
    ("def sweep_x(): return [{1: 2}]", ["--sweep=x"], "sweep_x: a key is 1, wanted the name of a knob"),
    (
      "import pathlib\ndef sweep_x(): return {'copy.path': [pathlib.Path('a')]}", ["--sweep=x"],
      "sweep_x: copy.path is PosixPath('a'), wanted a number, a text, or a tuple of them",
    ),
    (
      "import itertools\ndef sweep_x(): return ({'seed': i} for i in itertools.count())", ["--sweep=x"],
      "sweep_x has more than 10,000 points",
    ),
    ("def sweep_x(): return {'seed': range(101), 'practice.lr': [0.1] * 100}", ["--sweep=x"], "sweep_x has more than 10,000 points"),
    (
      "def sweep_x(): return {'seed': range(200)}\ndef sweep_y(): return {'practice.lr': [i / 1000 for i in range(1, 101)]}",
      ["--sweep=x,y"], "--sweep=x,y has more than 10,000 points",
    ),
    ("def sweep_x(): return {'agent.name': ['ppo']}", ["--sweep=x"], "the mode 'agent' chooses it"),
  ],
)
def test_what_cannot_be_swept_is_refused_in_a_line(config, functions, flags, said):
  with pytest.raises(ConfigError) as refused:
    sweep.prepare(config(functions, *flags))
  assert said in str(refused.value) and "\n" not in str(refused.value)


def test_numbers_of_numpy_are_plain_ones(config):
  """results.json is written when all runs have ended: too late to find that it takes no int64."""
  grid = "import numpy as np\ndef sweep_x(): return {'seed': list(np.arange(2)), 'practice.lr': list(np.array([0.5, 0.25], np.float32))}\n"
  _, made = sweep.prepare(config(grid, "--sweep=x"))
  assert json.loads(json.dumps([p.values for p in made]))[3] == {"seed": 1, "practice.lr": 0.25}


def test_numbers_of_numpy_in_a_tuple_are_plain_ones():
  """A flag would say np.float64(0.5), which is no number to whoever reads it."""
  (point,) = sweep.expand("x", lambda: [{"a.pair": (np.float64(0.5), [np.int64(2)])}])
  assert point == {"a.pair": (0.5, [2])} and sweep.written(point["a.pair"]) == "(0.5, [2])"


def test_an_out_that_cannot_be_a_folder_is_one_line(tmp_path):
  (tmp_path / "file").write_text("x")
  for out in (tmp_path / "file", tmp_path / "file" / "x"):
    with pytest.raises(ConfigError, match=f"--out is {out}: .*: wanted a folder that this user may write to"):
      sweep.claim(out)


def test_every_sweep_of_the_shipped_configs_can_be_run():
  found = 0
  for path in sorted((ROOT / "configs").glob("*.py")):
    if "def sweep_" in path.read_text():
      for name in sweep.functions(str(path)):
        found += 1
        assert len(sweep.prepare(["sweep.py", f"--config={path}", f"--sweep={name}"])[1]) > 1
  assert found >= 6


# ---- processes

TRAINER = """
import json, os, pathlib, signal, sys, time
work, seconds, code = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
def asked(*_):
  (work / "asked").write_text("")
  sys.exit(75)
signal.signal(signal.SIGTERM, asked)
(work / "begun").write_text(f"{os.getpid()} {time.monotonic()} {os.environ.get('CUDA_VISIBLE_DEVICES')}")
print("half way", flush=True)
time.sleep(seconds)
print("what went wrong" if code else "fine")
(work / "ended").write_text(f"{time.monotonic()}")
if code == 0: (work / "summary.json").write_text(sys.argv[4])
sys.exit(code)
"""
points = lambda *names: [Point({"seed": n}, [], f"{n}-00000000") for n in names]


def local(tmp_path, jobs, seconds=0.3, codes=None, gpus=0, grace=20.0, every=60.0):
  (tmp_path / "trainer.py").write_text(TRAINER)
  (tmp_path / "out").mkdir(exist_ok=True)
  command = lambda p, workdir: [
    sys.executable, str(tmp_path / "trainer.py"), str(workdir), str(seconds), str((codes or {}).get(p.id, 0)), json.dumps(SUMMARY),
  ]  # fmt: skip
  return sweep.Local(tmp_path / "out", jobs, gpus, command, grace, every)


def begun(out, point):
  pid, at, gpus = (out / point / "begun").read_text().split()
  return int(pid), float(at), gpus


def test_as_many_at_a_time_as_asked_each_with_gpus_of_its_own(tmp_path):
  runner, five = local(tmp_path, jobs=2, gpus=2), points(*"abcde")
  runner.run(five, StopSignals())
  spans = [(begun(runner.out, p.id)[1], float((runner.out / p.id / "ended").read_text())) for p in five]
  most = max(sum(a <= t < b for a, b in spans) for t, _ in spans)
  assert most <= 2  # and two there were: GPUs of the second place are given only beside a run in the first
  assert {begun(runner.out, p.id)[2] for p in five} == {"0,1", "2,3"}
  assert json.loads((runner.out / "children.json").read_text())["children"] == {} and not runner.failed


@pytest.mark.parametrize("every", [0.5, 60.0])
def test_what_runs_says_now_and_then_how_far_it_is(every, tmp_path, capsys):
  """A run's own last line, under its name; of runs that end sooner than that nothing but their end."""
  local(tmp_path, jobs=2, seconds=2.0, every=every).run(points(*"ab"), StopSignals())
  lines = capsys.readouterr().out.splitlines()
  wanted = {"a-00000000: half way", "b-00000000: half way"} if every < 1 else set()
  assert {line.split("] ")[1] for line in lines if "half way" in line} == wanted  # behind [0/2], or [1/2] beside the last one
  assert sum(": done, " in line for line in lines) == 2


def test_a_failure_leaves_the_others_alone_and_only_it_is_tried_again(tmp_path, capsys):
  three = points(*"abc")
  runner = local(tmp_path, jobs=1, seconds=0.0, codes={three[1].id: 1})
  runner.run(three, StopSignals())
  assert runner.failed == {three[1].id: 1} and "b-00000000: failed (exit 1): what went wrong" in capsys.readouterr().out
  first = {p.id: begun(runner.out, p.id)[0] for p in three}
  again = local(tmp_path, jobs=1, seconds=0.0)
  again.run(three, StopSignals())
  assert [begun(runner.out, p.id)[0] == first[p.id] for p in three] == [True, False, True] and not again.failed
  states = [r["state"] for r in sweep.results(three, runner.out, runner.failed)]
  assert states == ["done", "done", "done"]


SWEEP = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import sweep
from core.stop import StopSignals
from tests.test_sweep import local, points
with sweep.claim(pathlib.Path(sys.argv[2]) / "out"), StopSignals() as stop:
  local(pathlib.Path(sys.argv[2]), jobs=2, seconds=60).run(points(*"abc"), stop)
sys.exit(75 if stop.asked else 0)
"""


@pytest.fixture
def under_way(tmp_path):
  """(process of a sweep, its folder) while two of three points run."""
  popen = subprocess.Popen([sys.executable, "-c", SWEEP, str(ROOT), str(tmp_path)], cwd=ROOT)
  until = time.monotonic() + 30
  while len(list((tmp_path / "out").glob("*/begun"))) < 2 and time.monotonic() < until:
    time.sleep(0.05)
  yield popen, tmp_path / "out"
  with contextlib.suppress(ProcessLookupError):
    popen.kill()
  popen.wait(10)


def test_a_signal_asks_every_run_to_save_and_waits_for_it(under_way):
  popen, out = under_way
  children = json.loads((out / "children.json").read_text())["children"]
  assert sorted(children) == ["a-00000000", "b-00000000"] and all(processes.alive(*c) for c in children.values())
  with pytest.raises(ConfigError, match="in use by another sweep"):
    sweep.claim(out)
  popen.terminate()
  assert popen.wait(20) == EXIT_STOPPED
  sweep.claim(out).close()  # and its folder is free
  assert len(list(out.glob("*/asked"))) == 2 and not any(processes.alive(*c) for c in children.values())
  assert not list(out.glob("c-*"))


def test_nothing_outlives_a_sweep_that_is_killed(under_way):
  popen, out = under_way
  children = json.loads((out / "children.json").read_text())["children"].values()
  popen.kill()
  popen.wait(10)
  until = time.monotonic() + 10
  while any(processes.alive(*c) for c in children) and time.monotonic() < until:
    time.sleep(0.05)
  assert not any(processes.alive(*c) for c in children)


def test_what_a_dead_sweep_left_is_ended_before_the_next_begins(tmp_path):
  deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
  left = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
  left.stdout.readline()
  record = {"children": {"a": [left.pid, processes.start_time(left.pid)]}}
  (tmp_path / "children.json").write_text(json.dumps(record))
  sweep.clear(tmp_path, seconds=0.3)
  assert left.wait(5) == -signal.SIGKILL
  left.stdout.close()


# ---- tables and commands


@pytest.mark.parametrize("text", ["", "{", "[]", '{"practice": 0.5}'])
def test_files_of_an_earlier_sweep_that_cannot_be_read_are_one_line(text, tmp_path):
  """Before anything is run: results.md is made of them when hours have gone by."""
  (one,) = points("a")
  (tmp_path / "out" / one.id).mkdir(parents=True)
  (tmp_path / "out" / one.id / "summary.json").write_text(text)
  runner = local(tmp_path, jobs=1)
  with pytest.raises(ConfigError, match=r"summary.json cannot be read \(.*\): remove it, and the run is taken to its end again"):
    runner.run([one], StopSignals())
  assert not runner.running and not (runner.out / one.id / "begun").exists()
  (runner.out / "children.json").write_text(text)
  with pytest.raises(ConfigError, match=r"children.json cannot be read \(.*\): remove it once nothing runs there"):
    sweep.clear(runner.out)


@pytest.mark.parametrize("program", [["sweep.py", "--sweep=x"], ["supervise.py", "--"]], ids=["sweep", "supervise"])
def test_what_reads_the_config_dies_with_the_command(program, tmp_path):
  """A config is read in a process of its own, which waits for ever for whoever started it where that was killed meanwhile."""
  config = tmp_path / "slow.py"
  config.write_text(f"import os, pathlib, time\npathlib.Path('{tmp_path}/pid').write_text(str(os.getpid()))\ntime.sleep(60)\n")
  popen = subprocess.Popen([sys.executable, *program, f"--config={config}"], cwd=ROOT, stderr=subprocess.DEVNULL)
  until = time.monotonic() + 30
  while not (pid := (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else "") and time.monotonic() < until:
    time.sleep(0.05)
  start = processes.start_time(int(pid))
  assert int(pid) != popen.pid and processes.alive(int(pid), start)
  popen.kill()
  popen.wait(10)
  until = time.monotonic() + 10
  while processes.alive(int(pid), start) and time.monotonic() < until:
    time.sleep(0.05)
  left = processes.alive(int(pid), start)
  processes.send(int(pid), start, signal.SIGKILL)
  assert not left


def test_the_table_has_a_line_a_point_and_its_spread_over_seeds(tmp_path):
  chosen = [{"practice.lr": lr, "seed": s} for lr in (0.1, 0.2) for s in (0, 1)]
  made = sweep.make_points(chosen, "configs/a.py", "", {})
  for point, practice in zip(made[:3], (0.70, 0.80, 0.90)):
    (tmp_path / point.id).mkdir()
    (tmp_path / point.id / "summary.json").write_text(json.dumps(SUMMARY | {"practice": practice}))
  lines = sweep.table(sweep.results(made, tmp_path, {made[3].id: 2}), made).splitlines()
  assert lines[2] == "| 0.1 | 0 | 50.0 | 70.0 | 80.0 | 60.0 | 90.0 | 1.5 | 384 | 90 | done |"
  assert lines[5] == "| 0.2 | 1 | - | - | - | - | - | - | - | - | failed (exit 2) |"
  # of 70 and 80: mean 75, standard deviation 7.07, over the root of 2: 5.0
  assert lines[-2:] == ["| lr=0.1 | 2 | 50.0 | 75.0 | 5.0 |", "| lr=0.2 | 1 | 50.0 | 90.0 | - |"]


FLAGS = {"out": "/mnt/runs/x", "retries": 3, "setup": "cd '/mnt/my practice'", "name": "osworld", "sweep": ["lr"], "project": "",
         "zone": "us-east5-a", "cluster": "c", "accelerator": "v5p-32", "slices": 2, "image": "gcr.io/p/i", "runtime": "v2-alpha-tpuv5",
         "nodes": 2, "gpus": 8, "hours": 12}  # fmt: skip


def option(words, name):
  return next(w.partition("=")[2] for w in words if w.startswith(f"--{name}="))


@pytest.mark.parametrize("kind, flag", [("xpk", "command"), ("gcloud", "command"), ("slurm", "wrap")])
def test_a_printed_command_says_the_same_to_a_shell_inside_a_shell(kind, flag):
  point = sweep.make_points([{"env.popup_kinds": ("a b", "it's")}], "configs/osworld.py", "smoke", {})[0]
  lines = [shlex.split(line) for line in sweep.commands(kind, point, FLAGS)]
  inner = shlex.split(option(lines[kind == "gcloud"], flag))
  if kind == "slurm":  # on every node, not only where the job's script runs
    assert inner[:3] == ["srun", "bash", "-c"] and len(inner) == 4
    inner = shlex.split(inner[3])
  assert inner[:3] == ["cd", "/mnt/my practice", "&&"]
  wanted = ["python", "supervise.py", "--retries=3", "--", "--config=configs/osworld.py:smoke"]
  wanted += ["--config.env.popup_kinds=('a b', \"it's\")", "--config.hosts.coordinator=auto"]
  wanted += ["--config.mesh.data=2"] if kind == "xpk" else []  # a copy of the learner in each of two slices
  assert inner[3:] == [*wanted, f"--workdir=/mnt/runs/x/{point.id}"]
  if kind == "xpk":
    name = option(lines[0], "workload")
    assert name == f"osworld-lr-{point.digest}" and len(name) < 40  # Kubernetes' names
    assert (option(lines[0], "tpu-type"), option(lines[0], "num-slices")) == ("v5p-32", "2")


def test_slices_and_a_given_mesh_must_agree(config):
  flags = ("--sweep=lr", "--emit=xpk", "--cluster=c", "--accelerator=v5p-32", "--image=i", "--out=/x", "--slices=2")
  with pytest.raises(ConfigError, match="mesh.data is 3, wanted a multiple of --slices=2"):
    sweep.prepare(config(GRID, *flags, "--config.mesh.data=3"))
  told, points = sweep.prepare(config(GRID, *flags, "--config.mesh.data=4"))
  assert next(sweep.commands("xpk", points[0], told)).count("mesh.data") == 1


def test_the_command_ends_with_one_line_where_it_is_refused(config):
  done = subprocess.run(
    [sys.executable, "sweep.py", "--config=configs/osworld.py", "--sweep=nothing"], cwd=ROOT, capture_output=True, text=True, timeout=60
  )
  assert done.returncode == 2 and done.stdout == ""
  assert done.stderr.startswith("sweep.py: there is no sweep_nothing() in osworld.py") and done.stderr.count("\n") == 1
