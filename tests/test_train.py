"""train.py as a user runs it: straight equals killed and resumed, bad input costs nothing, and learning needs the pushes."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

import evaluate
import train
from benchmarks import faults
from core import config as config_lib
from core.checkpoint import read_numpy
from core.host import hold
from core.metrics import read_jsonl
from envs import processes, sim
from rollout import feed, gate
from rollout.feed import Feed
from rollout.source import Rounds

ROOT = pathlib.Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("compile_quickly")
# Small in every size, but the whole loop: copying, four evaluations, practice with updates (the leash moves the weights
# even where no group teaches), a save at every update, the final table.
TINY = {
  "policy.tiny.width": 16, "policy.tiny.layers": 1, "policy.tiny.heads": 2, "policy.tiny.mlp": 2, "policy.tiny.patch_width": 8,
  "copy.demonstrations": 12, "copy.updates": 6, "copy.batch": 16, "practice.updates": 4, "practice.groups": 2, "practice.rounds": 1,
  "practice.slots": 8, "agent.group_size": 4, "agent.minibatch": 64, "agent.dynamic_sampling": False, "eval.tries": 1,
  "eval.every": 2, "env.held_out_tasks": 4, "env.practice_tasks": 4, "env.in_domain_tasks": 2, "save.every": 1, "save.copy_every": 2,
  "save.keep": 20, "compile_cache": os.environ["JAX_COMPILATION_CACHE_DIR"],
}  # fmt: skip


def command(workdir, config="configs/android.py", **overrides) -> list[str]:
  knobs = TINY | {k.replace("__", "."): v for k, v in overrides.items()}
  return ["train.py", f"--config={config}", f"--workdir={workdir}", *(f"--config.{k}={v}" for k, v in knobs.items())]


def newest(workdir: pathlib.Path) -> pathlib.Path:
  """The folder of the newest saved step: named by the step, with a suffix where it was saved again."""
  steps = [p for p in (workdir / "checkpoints").iterdir() if re.fullmatch(r"\d+(\.\d+)?", p.name)]
  return max(steps, key=lambda p: [int(x) for x in p.name.split(".")])


@pytest.fixture(scope="module")
def straight(tmp_path_factory, compile_quickly):
  workdir = tmp_path_factory.mktemp("straight") / "run"
  assert train.main(command(workdir)) == 0
  return workdir


def final_params(workdir) -> dict[str, np.ndarray]:
  return read_numpy(newest(workdir))


def without_time(rows: list[dict]) -> list[dict]:
  """Everything that is not a clock or a compilation must be equal, to the last bit."""
  return [{k: v for k, v in row.items() if not k.startswith(("time/", "rate/"))} for row in rows]


def assert_same_arrays(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
  assert first.keys() == second.keys() and len(first) > 10
  for name in first:
    np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def assert_same_run(a: pathlib.Path, b: pathlib.Path) -> None:
  assert_same_arrays(final_params(a), final_params(b))
  rows, others = (without_time(read_jsonl(w / "metrics.jsonl")) for w in (a, b))
  assert len(rows) == len(others)
  assert [{k: (x.get(k), y.get(k)) for k in x | y if x.get(k) != y.get(k)} for x, y in zip(rows, others, strict=True)] == [{}] * len(rows)
  scores = [json.loads((w / "summary.json").read_text()) for w in (a, b)]
  assert [s | {"seconds": 0} for s in scores][0] == scores[1] | {"seconds": 0}


def test_a_run_leaves_every_file_it_promises(straight):
  for name in ("config.json", "metrics.jsonl", "summary.json", "episodes/index.sqlite"):
    assert (straight / name).is_file(), name
  assert list(straight.glob("events.out.tfevents.*")) and list((straight / "eval").glob("*-held_out.json"))
  rows = read_jsonl(straight / "metrics.jsonl")
  assert [r["update"] for r in rows] == [0, 1, 2, 3]  # updates 0 .. total - 1, one line each
  promised = "reward/mean reward/success groups/all_fail groups/spread episodes/steps episodes/truncated episodes/unreadable"
  promised += " episodes/infra_error episodes/age_mean replay/used policy/entropy policy/clipped_share policy/ratio_mean"
  promised += " policy/mismatch_kl policy/grad_norm policy/loss policy/lr time/sampling rate/compiles rate/useful_tokens"
  assert set(promised.split()) <= rows[0].keys() and len(rows[0]) <= 60
  summary = json.loads((straight / "summary.json").read_text())
  assert set("clean copying practice copying_greedy practice_greedy n n_tasks noise_points seconds seed".split()) <= summary.keys()
  assert summary["n_tasks"] == 4 and summary["n"] == 4


def test_the_dashboard_has_layout_knobs_groups_and_the_final_score(straight):
  """What TensorBoard's own reader finds: the checklist's page, the knobs by name, a group as a picture, one point after the last update."""
  events = EventAccumulator(str(straight), size_guidance={"images": 0})
  events.Reload()
  (layout,) = events.PluginTagToContent("custom_scalars").values()
  (found,) = events.PluginTagToContent("hparams").values()
  knobs = plugin_data_pb2.HParamsPluginData.FromString(found).session_start_info.hparams
  assert knobs["practice.groups"].number_value == 2 and knobs["agent.dynamic_sampling"].bool_value is False
  assert knobs["agent.name"].string_value == "grpo"
  assert [e.step for e in events.Images("group/0")] == [1]  # the evaluation in the middle, of 4 updates every 2
  summary = json.loads((straight / "summary.json").read_text())
  assert [e.step for e in events.Scalars("eval/held_out")] == [1, 4]
  assert events.Scalars("eval/held_out")[-1].value == pytest.approx(summary["practice"])
  assert events.Scalars("eval/in_domain")[-1].value == pytest.approx(summary["in_domain"])


def test_known_episodes_are_played_before_training(straight):
  known = gate.read(straight)
  assert (known["n_known_good"], known["n_do_nothing"], gate.complaint(known)) == (4, 4, "")  # all of the 4 practised tasks


def test_nobody_trains_on_a_computer_that_cannot_be_won(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(sim, "make", lambda computer, *a, **kw: faults.BrokenReset(computer))
  assert train.main(command(tmp_path / "run")) == config_lib.EXIT_USAGE
  err = capsys.readouterr().err
  assert err.count("\n") == 1 and "not training on sim/phone: 4 of 4 scripted solutions did not pass" in err
  assert "--config.gate.known_good=0" in err
  assert gate.read(tmp_path / "run")["known_good"] == 0.0 and not (tmp_path / "run" / "copying").exists()


def test_a_goal_that_the_tiny_policy_does_not_take_is_refused_before_anything_starts(tmp_path, capsys):
  assert train.main([*command(tmp_path / "run"), "--config.policy.tiny.max_goal=2"]) == config_lib.EXIT_USAGE
  said = capsys.readouterr()
  assert said.err.count("\n") == 1 and "the tiny policy takes 2: raise policy.tiny.max_goal" in said.err
  assert "demonstrations" not in said.out


def test_only_selected_tasks_are_practised(straight, tmp_path, capsys):
  cfg, _ = config_lib.load_config(command(straight))
  tasks = [t.id for t in evaluate.build(cfg).tasks["practice"]]
  (tmp_path / "tasks.json").write_text(json.dumps({"kept": tasks[1:3]}))
  cfg, _ = config_lib.load_config(command(tmp_path / "run", curriculum__tasks=tmp_path / "tasks.json"))
  run = train.Run(cfg, tmp_path / "run")
  assert {run.curriculum.next().id for _ in range(8)} == set(tasks[1:3]) and run.curriculum.counts()["not selected"] == 2
  run.session.checkpoints.close()
  assert train.main(command(tmp_path / "none", curriculum__tasks=tmp_path / "nothing.json")) == config_lib.EXIT_USAGE
  assert "curriculum.tasks is" in capsys.readouterr().err


def test_nothing_compiles_after_the_first_update(straight):
  rows = read_jsonl(straight / "metrics.jsonl")
  assert rows[0]["rate/compiles"] > 0 and rows[-1]["rate/compiles"] == 0


def test_the_sampler_and_the_trainer_agree_on_fresh_episodes(straight):
  for row in read_jsonl(straight / "metrics.jsonl"):
    assert abs(row["policy/mismatch_kl"]) < 1e-6 and row["episodes/age_max"] == 0


def test_a_finished_run_is_not_touched_again(straight, capsys):
  before = {p: p.stat().st_mtime_ns for p in straight.rglob("*") if p.is_file()}
  assert train.main(command(straight)) == 0
  assert "finished" in capsys.readouterr().out
  assert {p: p.stat().st_mtime_ns for p in straight.rglob("*") if p.is_file()} == before


class Killed(BaseException):
  """Not an Exception: nothing in the loop may catch it, as nothing catches kill -9."""


def dying(real, call: int):
  """`real`, but its call number `call` is the process's last."""
  calls = []

  def dies(*args, **kwargs):
    calls.append(1)
    if len(calls) == call:
      raise Killed
    return real(*args, **kwargs)

  return dies


def test_a_run_that_dies_again_and_again_equals_a_straight_run_bit_for_bit(straight, tmp_path, monkeypatch):
  """It dies in copying, at the second gathering, in learning, in the evaluation half way and in the last one, each time after the last."""
  workdir = tmp_path / "run"
  for owner, name, call in [(Feed, "draw", 5), (Rounds, "gather", 2), (Feed, "credited", 1), (evaluate, "run", 1), (evaluate, "run", 3)]:
    with monkeypatch.context() as patch:
      patch.setattr(owner, name, dying(getattr(owner, name), call))
      with pytest.raises(Killed):
        train.main(command(workdir))
    assert not (workdir / "summary.json").exists()
  assert train.main(command(workdir)) == 0
  assert_same_run(straight, workdir)


def test_signals_and_kill_9_again_and_again_under_a_supervisor_and_without(straight, tmp_path):
  """kill -9 of the trainer just after the first update: the supervisor starts it again. SIGTERM to the supervisor in the evaluation half
  way, SIGINT to train.py alone in its last ones: they save and exit with 75, and the same command goes on, all to the straight run's
  result. The costly programs come from the cache."""
  workdir, told = tmp_path / "run", os.environ | {"JAX_DEBUG_LOG_MODULES": "jax._src.compiler"}
  alone = [sys.executable, *command(workdir)]
  kept = [sys.executable, "supervise.py", "--", *command(workdir)[1:]]

  def go(order, shoot):
    """Starts it, calls shoot(process, line) for every line. (exit code, lines, what else it said)"""
    with open(tmp_path / "stderr", "w+") as err:
      process, lines = subprocess.Popen(order, cwd=ROOT, stdout=subprocess.PIPE, stderr=err, text=True, env=told), []
      for line in process.stdout:
        lines.append(line)
        shoot(process, line)
      code = process.wait(timeout=60)
      return code, lines, pathlib.Path(err.name).read_text()

  killed = []

  def first(guard, line):
    if line.startswith("practice 1/4") and not killed:
      killed.extend(p for p in processes.family(guard.pid) if b"train.py" in pathlib.Path(f"/proc/{p[0]}/cmdline").read_bytes())
      time.sleep(0.05)  # somewhere in the writing of a save or in the next update
      processes.send(*killed[0], signal.SIGKILL)
    elif line.startswith("practice 2/4"):
      guard.send_signal(signal.SIGTERM)

  code, lines, said = go([*kept, "--fresh"], first)
  assert code == train.EXIT_STOPPED and "stopped after saving" in lines[-1], said[-2000:]
  assert len(killed) == 1 and any(line.startswith("resuming") for line in lines)
  (restart,) = (json.loads(line) for line in (workdir / "restarts.jsonl").read_text().splitlines() if '"restart": true' in line)
  assert restart["pid"] == killed[0][0] and not list(tmp_path.glob("run-*"))  # --fresh chose a folder once
  hits, misses = (re.findall(rf"(?i){word} for .jit_(update|sample)", said) for word in ("cache hit", "cache miss"))
  assert len(hits) >= 3 and not misses  # copying's and practice's update, the sampler at its batch sizes

  code, lines, said = go(alone, lambda process, line: line.startswith("practice 4/4") and process.send_signal(signal.SIGINT))
  assert code == train.EXIT_STOPPED and "stopped after saving" in lines[-1], said[-2000:]
  assert not list(workdir.rglob("*.tmp*"))
  assert train.main(command(workdir)) == 0
  assert_same_run(straight, workdir)


def test_a_broken_newest_checkpoint_falls_back_to_the_one_before_even_of_a_run_older_than_some_knobs(straight, tmp_path, capsys):
  workdir = tmp_path / "run"
  shutil.copytree(straight, workdir)
  (workdir / "summary.json").unlink()
  broken = max((p for p in newest(workdir).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
  broken.write_bytes(broken.read_bytes()[:-40])
  record = json.loads((workdir / "config.json").read_text())
  del record["config"]["env"]["faults"], record["config"]["policy"]["moment"]
  (workdir / "config.json").write_text(json.dumps(record))
  assert train.main([*command(workdir), "--config.policy.moment=bfloat16"]) == config_lib.EXIT_USAGE  # no default: another run
  assert "policy.moment" in capsys.readouterr().err
  assert train.main(command(workdir)) == 0 and "was made before there was" in capsys.readouterr().out
  assert_same_run(straight, workdir)


BAD = [
  (["--config.agent.clip_hi=0.3"], "clip_high"),
  (["--config.agent=gspo"], ":agent="),
  (["--config.agent.dynamic_sampling", "False"], "="),
  (["--config.agent.group_size=8.5"], "group_size"),
  (["--config.agent.group_size=1"], "2 or more"),
  (["--config.agent.group_size=0"], "2 or more"),
  (["--config.agent.clip_low=0.0003"], "clip_low"),
  (["--config.agent.epochs=0"], "epochs"),
  (["--config.practice.temperature=0"], "0.1 to 2"),
  (["--config.practice.temperature=nan"], "temperature"),
  (["--config.practice.lr=-1"], "practice.lr"),
  (["--config.practice.leash=-0.1"], "leash"),
  (["--config.practice.max_age=-1"], "max_age"),
  (["--config.practice.rounds=0"], "rounds"),
  (["--config.practice.mode=eager"], "sync or async"),
  (["--config.practice.slots=0"], "slots"),
  (["--config.practice.clip_norm=-1"], "clip_norm"),
  (["--config.practice.clip_norm=nan"], "clip_norm"),
  (["--config.practice.leash=inf"], "leash"),
  (["--config.practice.leash_batch=0"], "leash_batch"),
  (["--config.eval.tries_during=0"], "tries_during"),
  (["--config.copy.path=no/such/demos.jsonl"], "no/such/demos.jsonl"),
  (["--config.copy.start=no/such/run"], "no/such/run"),
  (["--config.practice.micro_batches=3"], "micro_batches"),
  (["--config.practice.micro_batches=0"], "micro_batches"),
  (["--config.practice.slots=100000000"], "slots"),
  (["--config.copy.batch=1000000000"], "copy.batch"),
  (["--config.policy.tiny.heads=0"], "heads"),
  (["--config.policy.tiny.stride=0"], "stride"),
  (["--config.policy.tiny.width=-64"], "width"),
  (["--config.policy.tiny.max_action=2", "--config.copy.demonstrations=4"], "max_action"),
  (["--config.policy.name=small"], "policy.name"),
  (["--config.env.computer=sim/tablet"], "sim/phone or sim/desktop"),
  (["--config.seed=9223372036854775807"], "seed"),
  (["--config.copy.start=docs"], "config.json"),
  (["--config.copy.path=docs/log.md"], "log.md"),
  (["--config.critic.lr=0"], "critic.lr"),
  (["--config.curriculum.order=critic"], "step critic"),
  (["--config.curriculum.rest_after=-1"], "rest_after"),
  (["--config.taskgen.source=web"], "taskgen.source"),
  (["--config.agent.kl_beta=-0.1"], "kl_beta"),
  (["--config.agent.ratio=episode"], "3e-4, 4e-4"),
  (["--config.env.image=no/such.qcow2"], "env.image names 1 devices"),
  (["--config.policy.checkpoint=no/such/folder"], "no/such/folder"),
  (["--config.policy.lora.rank=4"], "policy.lora.rank is 4, which the tiny policy has no use for"),
  (["--config.sampler.sessions.int8=True"], "sampler.sessions.int8 is True, which the tiny policy has no use for"),
  (["--config.policy.tiny.patch=7"], "patch"),
  (["--config.policy.tiny.heads=5"], "heads"),
  (["--config.pack.row_tokens=20"], "row_tokens"),
  (["--config.mesh.tensor=2"], "mesh is data 1 x fsdp 1 x context 1 x tensor 2 = 2, but there are 1 devices"),
  (["--config.hosts.coordinator=nowhere"], "hosts.coordinator is 'nowhere', wanted address:port"),
  (["--config.env.popup_chance=1.5"], "popup_chance"),
  (["--config.env.popup_most=-1"], "popup_most"),
  (["--config.env.popup_kinds=('ad',)"], "popup_kinds"),
  (["--config.env.held_out_tasks=97"], "held_out_tasks"),
  (["--config.env.in_domain_tasks=5000"], "in_domain_tasks"),
]


@pytest.mark.parametrize("extra,says", BAD, ids=[" ".join(b[0]) for b in BAD])
def test_bad_input_is_one_clear_line_before_anything_is_made(tmp_path, capsys, extra, says):
  assert train.main(["train.py", "--config=configs/android.py", f"--workdir={tmp_path / 'run'}", *extra]) == config_lib.EXIT_USAGE
  said = capsys.readouterr()
  assert said.err.count("\n") == 1 and says in said.err and "Traceback" not in said.err
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("config, knob, says", [
  ("configs/android.py:agent=dpo", "agent.offline=50", "agent.offline is 50 of practice.updates=50"),
  ("configs/uitars2.py", "agent.pretrain_updates=40", "agent.pretrain_updates is 40"),
  ("configs/android.py:agent=digirl", "practice.micro_batches=256", "agent.critic_minibatch (128)"),
])  # fmt: skip
def test_a_run_that_could_never_learn_is_refused(tmp_path, capsys, config, knob, says):
  argv = ["train.py", f"--config={config}", f"--workdir={tmp_path / 'run'}", f"--config.{knob}"]
  assert train.main(argv) == config_lib.EXIT_USAGE
  said = capsys.readouterr().err
  assert said.count("\n") == 1 and says in said and not (tmp_path / "run").exists()


@pytest.mark.parametrize("config,says", [
  ("configs/andriod.py", "android"), ("configs/android.py:smok", "smoke"), ("configs/android.py:agent=gpro", "grpo"),
])  # fmt: skip
def test_a_wrong_name_is_answered_with_the_nearest(tmp_path, capsys, config, says):
  assert train.main(["train.py", f"--config={config}", f"--workdir={tmp_path / 'run'}"]) == config_lib.EXIT_USAGE
  said = capsys.readouterr().err
  assert said.count("\n") == 1 and says in said


def test_a_workdir_of_another_shape_is_refused_and_kept(straight, tmp_path, capsys):
  workdir = tmp_path / "run"
  shutil.copytree(straight, workdir)
  (workdir / "summary.json").unlink()
  assert train.main([*command(workdir), "--config.policy.tiny.width=32"]) == config_lib.EXIT_USAGE
  assert "wanted" in capsys.readouterr().err
  assert final_params(workdir).keys() == final_params(straight).keys()


@pytest.mark.parametrize("other", ["--config.seed=7", "--config.env.held_out_tasks=3", "--config.policy.tiny.width=32"])
def test_another_run_is_not_mixed_into_a_finished_or_unfinished_one(straight, tmp_path, capsys, other):
  record = (straight / "config.json").read_bytes()
  assert train.main([*command(straight), other]) == config_lib.EXIT_USAGE
  said = capsys.readouterr().err
  assert said.count("\n") == 1 and "holds another run" in said and "--fresh" in said
  assert (straight / "config.json").read_bytes() == record


def test_two_processes_never_share_a_workdir(straight, tmp_path, capsys):
  workdir = tmp_path / "run"
  shutil.copytree(straight, workdir)
  (workdir / "summary.json").unlink()
  with hold(workdir):
    assert train.main(command(workdir)) == config_lib.EXIT_USAGE
  assert "in use by another process" in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_all_broken_is_refused_and_kept(straight, tmp_path, capsys):
  workdir = tmp_path / "run"
  shutil.copytree(straight, workdir)
  (workdir / "summary.json").unlink()
  for file in [p for p in (workdir / "checkpoints").glob("[0-9]*/**/*") if p.is_file() and p.stat().st_size > 200]:
    file.write_bytes(file.read_bytes()[:100])
  before = sorted(p.name for p in (workdir / "checkpoints").iterdir())
  assert train.main(command(workdir)) == config_lib.EXIT_USAGE
  assert capsys.readouterr().err.count("\n") == 1
  assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == before


def test_a_workdir_that_is_a_file_is_one_line(tmp_path, capsys):
  (tmp_path / "file").write_text("x")
  for workdir in (tmp_path / "file", tmp_path / "file" / "x"):
    assert train.main(command(workdir)) == config_lib.EXIT_USAGE
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "is a file: give a folder" in said


def test_non_finite_steps_change_nothing_and_end_the_run(tmp_path, monkeypatch, capsys):
  real = feed.to_batch

  def poisoned(items, rows, shape, blank):
    batch = real(items, rows, shape, blank)
    return batch.replace(advantage=np.full_like(batch.advantage, np.nan)) if shape.rows == 64 else batch

  monkeypatch.setattr(feed, "to_batch", poisoned)
  assert train.main(command(tmp_path / "run", practice__max_skipped=1)) == 1
  assert "not finite" in capsys.readouterr().err


def test_demonstrations_come_from_trajectory_records_where_a_path_is_given(straight, tmp_path, capsys):
  """The scripted demonstrations, stored, exported and read back, make the very policy that the scripted ones made."""
  from rollout.store import EpisodeStore

  with EpisodeStore(tmp_path / "store") as store:
    for i, episode in enumerate(sim.demonstrations("sim/phone", TINY["copy.demonstrations"], 0)):
      episode.try_index = i
      store.add(episode, 0)
    assert store.export_jsonl(tmp_path / "demos.jsonl") == TINY["copy.demonstrations"]
  assert train.main(command(tmp_path / "run", copy__path=tmp_path / "demos.jsonl", practice__updates=0)) == 0
  assert_same_arrays(*(read_numpy(max((w / "copied").glob("[0-9]*"))) for w in (straight, tmp_path / "run")))


def test_practice_starts_from_another_runs_copied_policy(straight, tmp_path, capsys):
  """No copying, the same copied policy and its scores; with another algorithm, at another pace. Another environment
  or policy is refused."""
  knobs = {"copy__start": straight, "practice__updates": 1, "env__slow_share": 0.2}
  own = command(tmp_path / "run", config="configs/android.py:agent=rloo", **knobs)
  assert train.main(own) == 0
  said = capsys.readouterr().out
  assert "starting from the policy that" in said and "copying 6/6" not in said and not (tmp_path / "run" / "copying").exists()
  theirs, ours = (json.loads((w / "summary.json").read_text()) for w in (straight, tmp_path / "run"))
  assert ours["agent"] == "rloo" and all(ours[k] == theirs[k] for k in ("clean", "copying", "clean_greedy", "copying_greedy"))
  assert_same_arrays(*(read_numpy(max((w / "copied").glob("[0-9]*"))) for w in (straight, tmp_path / "run")))
  assert train.main(command(tmp_path / "other", copy__start=straight, env__popup_chance=0.1)) == config_lib.EXIT_USAGE
  assert "env differs from this run's in popup_chance" in capsys.readouterr().err


@pytest.mark.parametrize("seconds, said", [(0.0, ["held_out 1/3", "held_out 2/3", "held_out 3/3"]), (3600.0, [])])
def test_an_evaluation_on_a_runs_own_computers_says_how_far_it_is(seconds, said, monkeypatch, capsys):
  monkeypatch.setattr("core.metrics.SILENT", seconds)
  sampler = types.SimpleNamespace(load=lambda weights: None, close=lambda: None)
  tasks = {"held_out": [types.SimpleNamespace(id=i) for i in "abc"]}
  world = types.SimpleNamespace(real=True, sampler=lambda temperature: sampler, tasks=tasks)
  found = evaluate.run(world, None, evaluate.HELD_OUT, 1, 0, 2, through=lambda sampler, tries: iter(tries))
  assert [t.task.id for t in found] == ["a", "b", "c"]
  assert [" ".join(line.split()[:2]) for line in capsys.readouterr().out.splitlines()] == said


def test_evaluate_runs_from_the_workdir_alone(straight):
  env = os.environ | {"JAX_PLATFORMS": "cpu"}
  order = [sys.executable, "evaluate.py", f"--workdir={straight}", "--tries=1"]
  ask = lambda *more: subprocess.run([*order, *more], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, env=env)
  done = ask("--protocols=held_out,clean", "--limits=3,5")
  assert done.returncode == 0, done.stderr
  assert "held_out" in done.stdout and "4 tasks" in done.stdout and "ended by" in done.stdout
  scores = json.loads((straight / "eval" / "table-10-tries1-seed0.json").read_text())["scores"]
  assert [(s["protocol"], s["step_limit"]) for s in scores] == [("held_out", 3), ("held_out", 5), ("clean", 3), ("clean", 5)]
  done = ask("--protocols=held_out", "--limits=5", f"--against={straight}:copied")  # the copied policy's tries are new, ours stand
  assert done.returncode == 0, done.stderr
  assert "run:copied, 5 steps: 0 of 4 tries stand" in done.stdout and "run:10" in done.stdout and "run:10, 5 steps" not in done.stdout
  assert "difference in points" in done.stdout and "relative gain %" in done.stdout
  wrong = [sys.executable, "evaluate.py", f"--workdir={straight.parent}"]
  bad = subprocess.run(wrong, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
  assert bad.returncode == 2 and bad.stderr.count("\n") == 1 and "config.json" in bad.stderr
  for wrong in (["--trys=8"], ["--tries=0", f"--workdir={straight}"], [f"--workdir={straight}", "--limits=0"]):
    bad = subprocess.run([sys.executable, "evaluate.py", *wrong], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1, bad.stderr
