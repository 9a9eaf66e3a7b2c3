"""train.py where it is told to stop, and where its workers die: nothing hangs, nothing is lost, no process is left."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
from test_train import ROOT, TINY, Killed, assert_same_run, command, dying, newest

import evaluate
import train
from core.checkpoint import Checkpointer
from core.find import find
from core.metrics import read_jsonl
from envs import processes
from envs.pool import Pool
from rollout.feed import Feed
from rollout.remote import RemoteSampler
from rollout.scheduler import Scheduler
from rollout.source import Rounds
from rollout.stream import Stream

pytestmark = pytest.mark.usefixtures("compile_quickly")


@pytest.fixture(scope="module")
def copied(tmp_path_factory, compile_quickly):
  """A run that has copied, to start from."""
  workdir = tmp_path_factory.mktemp("copied") / "run"
  assert train.main(command(workdir, practice__updates=0, copy__updates=2)) == 0
  return workdir


SHORT = {"agent.store": 400, "agent.critic_minibatch": 32, "agent.critic_epochs": 2, "agent.reference_every": 2,
         "agent.pretrain_updates": 1, "practice.updates": 3, "practice.groups": 4, "eval.every": 0}  # fmt: skip


@pytest.mark.parametrize("name", ["ppo", "webrl"])
def test_critics_references_and_stored_episodes_resume_bit_for_bit(copied, tmp_path, capsys, name):
  """Value pre-training and a critic of tokens; a critic of steps, a reference that moves by phases, stored tries. From the policy that
  another run copied."""
  defaults = find("agents", name).defaults()
  known = lambda knob: not knob.startswith("agent.") or knob.removeprefix("agent.") in defaults
  own = {k: v for k, v in (TINY | SHORT | {"copy.start": copied}).items() if known(k)}
  argv = lambda workdir: ["train.py", f"--config=configs/android.py:agent={name}", f"--workdir={workdir}",
                          *(f"--config.{k}={v}" for k, v in own.items())]  # fmt: skip
  assert train.main(argv(tmp_path / "straight")) == 0
  workdir = tmp_path / "run"  # as it lies there where the process died before the save after its last update
  shutil.copytree(tmp_path / "straight", workdir)
  (workdir / "summary.json").unlink()
  shutil.rmtree(newest(workdir))
  assert train.main(argv(workdir)) == 0 and "resuming" in capsys.readouterr().out
  assert_same_run(tmp_path / "straight", workdir)
  rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
  assert len(rows) == 3 and all(len(r) <= 60 and "critic/loss" in r for r in rows)


@pytest.mark.parametrize("workers", [False, True])
def test_sampling_beside_learning_runs_dies_and_goes_on_with_its_books_closed(tmp_path, monkeypatch, capsys, workers):
  """async, in threads or in worker processes: every gather checks that episodes add up. The run dies while tries are in flight, and the
  resumed one tries those again: nothing is counted twice, nothing lost, no process left."""
  own = {"practice__mode": "async", "practice__max_age": 2} | ({"practice__workers": True, "practice__slots": 4} if workers else {})
  with monkeypatch.context() as patch:
    patch.setattr(Stream, "gather", dying(Stream.gather, 3))
    with pytest.raises(Killed):
      train.main(command(tmp_path / "run", **own))
  assert train.main(command(tmp_path / "run", **own)) == 0
  assert "resuming" in capsys.readouterr().out
  rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
  assert [r["update"] for r in rows] == [0, 1, 2, 3] and all(r["episodes/age_max"] <= 2 for r in rows)
  with Checkpointer(tmp_path / "run" / "checkpoints") as checkpoints:
    _, host, _ = checkpoints.restore({}, partial=True)
  ledger, stream = host["parts"]["ledger"], host["parts"]["stream"]
  flying = sum(plan["tries"] for plan in stream["plans"])
  assert ledger["started"] == ledger["trained"] + sum(ledger["dropped"].values()) + flying and ledger["trained"] >= 4 * 2 * 3
  busy = [r["rate/environment_utilisation"] for r in rows]
  assert all(0 <= b <= 1.01 for b in busy) and max(busy) > 0 and not processes.family(os.getpid()), busy


def test_a_worker_killed_in_a_try_costs_that_try_alone(copied, tmp_path, monkeypatch):
  """kill -9 of a worker that a try of practice has just begun on: an infra error, after which the try is run again; its group is whole
  and the books are closed."""
  hear, gather, victim, got = Scheduler._hear, Rounds.gather, [], []

  def kills(scheduler, wait):
    for lease, (turn, _) in scheduler.turns.items():
      if not victim and not turn.trial.group.startswith("eval") and lease.acts == 0:
        victim.append((turn.trial.group, turn.trial.index))
        os.kill(lease.slot.remote.pid, signal.SIGKILL)
    return hear(scheduler, wait)

  monkeypatch.setattr(Scheduler, "_hear", kills)
  monkeypatch.setattr(Rounds, "gather", lambda *args, **kwargs: (got.append(gather(*args, **kwargs)), got[-1])[1])
  own = WORKERS | {"practice.mode": "sync", "practice.updates": 2, "eval.every": 0, "copy.start": copied}
  assert train.main(command(tmp_path / "run", **own)) == 0
  assert [len(g.groups) for g in got] == [2, 2] and all(len(g.episodes) == 4 for each in got for g in each.groups)
  faults = {(e.group, e.try_index): e.notes["faults"] for each in got for e in each.episodes}
  assert faults.pop(victim[0]) in (["ActionAmbiguous"], ["WorkerDied"]) and set(map(tuple, faults.values())) == {()}
  assert all(e.scored for each in got for e in each.episodes)
  with Checkpointer(tmp_path / "run" / "checkpoints") as checkpoints:
    _, host, _ = checkpoints.restore({}, partial=True)
  ledger, parking = host["parts"]["ledger"], host["parts"]["parking"]
  assert ledger["started"] == 16 == ledger["trained"] + sum(ledger["dropped"].values()) and "infra_error" not in ledger["dropped"]
  assert parking["faults"] == 1 and not parking["parked"] and not processes.family(os.getpid())


WORKERS = {"practice.workers": True, "practice.slots": 2}
FAR = {"sampler.timeout": 300.0, "sampler.patience": 300.0, "sampler.reload_timeout": 300.0}
STATES = {  # knobs, and where it is: a method, and the how-manieth call of it
  "copies": ({}, (Feed, "draw", 3)),
  "boots its computers": (WORKERS, (Pool, "_boot", 1)),
  "evaluates": ({}, (Scheduler, "_sample", 3)),
  "gathers": (WORKERS, (Stream, "_take", 2)),
  "publishes to servers that hang": (FAR, (RemoteSampler, "_write", 1)),
}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
def test_a_signal_ends_a_run_at_once_whatever_it_does(copied, tmp_path, monkeypatch, capsys, state):
  """The signal comes in the middle of it; that a resumed run goes on as if nothing had been is shown elsewhere. What waits would wait for
  300 seconds. That a whole process takes no longer than save.grace is in tests/core/test_stop.py."""
  knobs, (owner, name, call) = STATES[state]
  real, calls, sent = getattr(owner, name), [], []

  def stops(*args, **kwargs):
    calls.append(1)
    if len(calls) == call:
      sent.append(time.monotonic())
      os.kill(os.getpid(), signal.SIGTERM)
    return real(*args, **kwargs)

  monkeypatch.setattr(owner, name, stops)
  start = {} if state in ("copies", "evaluates") else {"copy.start": copied}
  with socket.create_server(("127.0.0.1", 0)) as deaf:
    if "hang" in state:
      knobs = knobs | {"sampler.endpoints": (f"http://127.0.0.1:{deaf.getsockname()[1]}",)}
    assert train.main(command(tmp_path / "run", **{"save.grace": 0.0} | start | knobs)) == train.EXIT_STOPPED
  assert time.monotonic() - sent[0] < 200 and "stopped after saving" in capsys.readouterr().out
  assert not processes.family(os.getpid()) and not [t for t in threading.enumerate() if t.name in ("stream", "remote-sampler")]


def test_a_signal_ends_a_run_whose_computers_all_hang_in_ten_seconds(tmp_path):
  """Every worker hangs in the first episode after its canaries, its deadlines far away: SIGTERM ends all of it, with exit code 75."""
  own = {"practice__workers": True, "practice__slots": 3, "env__faults__hang": 1.0}
  process = subprocess.Popen([sys.executable, *command(tmp_path / "run", **own)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
  for line in process.stdout:
    if line.endswith("steps\n") and "demonstrations of" in line:  # what comes next, the gate, is asked of the workers
      break
  time.sleep(2.0)
  began = time.monotonic()
  process.send_signal(signal.SIGTERM)
  said = process.stdout.read()
  assert process.wait(timeout=60) == train.EXIT_STOPPED and "stopped after saving" in said
  assert time.monotonic() - began < 10 and not processes.family(process.pid)


def test_real_computers_are_evaluated_on_workers_and_an_older_config_is_filled_up(copied, tmp_path, monkeypatch, capsys):
  """The phones are simulated, and are said to be real: the same episodes as in this process come from worker processes. Then a signal."""
  workdir, build = tmp_path / "run", evaluate.build
  shutil.copytree(copied, workdir)
  record = json.loads((workdir / "config.json").read_text())
  record["config"]["practice"] |= {"workers": True, "slots": 2}
  del record["config"]["save"]["grace"], record["config"]["env"]["faults"]
  (workdir / "config.json").write_text(json.dumps(record))
  asked = types.SimpleNamespace(workdir=str(workdir), tries=2, step=-1, seed=0, protocols=["held_out"], limits=[], against="")
  monkeypatch.setattr(evaluate, "FLAGS", asked)
  assert evaluate.main([]) == 0
  assert "was made before there was env.faults, save.grace: the defaults stand" in capsys.readouterr().out
  (path,) = (workdir / "eval").glob("*-held_out-tries2-seed0.json")
  inside = path.read_text()
  shutil.rmtree(workdir / "eval")

  def forbidden(*_):
    raise AssertionError("an environment of this process")

  monkeypatch.setattr(evaluate, "build", lambda cfg: build(cfg)._replace(real=True, make_env=forbidden))
  assert evaluate.main([]) == 0 and path.read_text() == inside
  sample = Scheduler._sample
  monkeypatch.setattr(Scheduler, "_sample", lambda *args: (os.kill(os.getpid(), signal.SIGTERM), sample(*args))[1])
  shutil.rmtree(workdir / "eval")
  assert evaluate.main([]) == train.EXIT_STOPPED and not path.exists() and not processes.family(os.getpid())
