"""A trained judge: it learns what its labels say, is measured on tasks it has not seen, and answers as any other endpoint does."""

import dataclasses
import json
import threading

import jax
import numpy as np
import pytest

from core.schema import Limits, Screen, Task
from envs import judges
from models import critic
from rollout import labels as store_labels
from rollout.store import EpisodeStore
from tools import serve, serve_judge, train_judge
from tools.train_judge import Judge, Labelled


def knobs(**changes):
  cfg = train_judge.defaults()
  cfg.update({"updates": 60, "lr": 3e-3} | changes)
  return cfg


def screen_of(passed, seed):
  """Bright is done, dark is not; the rest is noise."""
  noise = np.random.default_rng(seed).integers(0, 60, (24, 40, 3))
  return (noise + (150 if passed else 20)).astype(np.uint8)


def shown(n, first=0):
  return [Labelled(f"task{i}", "open the red mug", screen_of(i % 2 == 0, first + i), i % 2 == 0) for i in range(n)]


@pytest.fixture(scope="module")
def trained(tiny_policy, tiny_params):
  judge = Judge(tiny_policy, critic.defaults(), batch=16)
  return judge, judge.learn(tiny_params, shown(64), knobs())


def test_it_learns_what_the_screens_say(trained, tiny_params):
  judge, params = trained
  unseen = shown(40, first=1000)
  said = judge.chances(params, [(e.goal, e.screen) for e in unseen])
  assert said.shape == (40,) and ((said >= 0.5) == [e.passed for e in unseen]).all()
  untaught = judge.critic.init(jax.random.key(0), tiny_params)
  before = judge.chances(untaught, [(e.goal, e.screen) for e in unseen])
  assert np.ptp(before) < 0.2 < np.ptp(said)  # the head starts near 0.5 for every screen
  assert judge.chances(params, [(e.goal, e.screen) for e in unseen[::-1]])[::-1] == pytest.approx(said, abs=1e-6)  # order is nothing


def test_the_loss_is_the_cross_entropy_of_the_labels(trained):
  judge, params = trained
  some = shown(5)
  p = judge.chances(params, [(e.goal, e.screen) for e in some])
  by_hand = -np.mean([np.log(q) if e.passed else np.log(1 - q) for e, q in zip(some, p)])
  batch = judge.batch([judge.item(e.goal, e.screen, float(e.passed)) for e in some])
  assert float(judge.loss(params, batch)) == pytest.approx(by_hand, rel=1e-3)


def test_tasks_are_held_out_whole_and_the_same_ones_each_time():
  found = [e._replace(task_id=f"task{i // 4}") for i, e in enumerate(shown(200))]
  learned, held = train_judge.split(found, 0.3)
  assert not {e.task_id for e in learned} & {e.task_id for e in held} and len(learned) + len(held) == 200
  assert 30 <= len(held) <= 90 and train_judge.split(found, 0.3)[1][0] is held[0]
  with pytest.raises(ValueError, match="of one kind only"):
    train_judge.split([e._replace(passed=True) for e in found], 0.3)


@pytest.fixture
def workdir(tmp_path, episode):
  """40 graded episodes of 40 tasks, one that ended unreadable and one that broke."""
  with EpisodeStore(tmp_path / "episodes") as store:
    for i, raw in enumerate([i % 2 for i in range(40)] + [-1, None]):
      one = dataclasses.replace(episode(raw, task=f"task{i}", index=i), final_screen=Screen.of(screen_of(raw == 1, i)))
      store.add(one, 0)
  return tmp_path


def test_labels_are_the_checkers_or_hand_labels(workdir):
  found = train_judge.read(workdir, "checker")
  assert [e.passed for e in found] == [i % 2 == 1 for i in range(40)] and found[0].goal == "open the red mug"
  assert (found[3].screen == screen_of(True, 3)).all()
  with pytest.raises(ValueError, match="--labels=hand, but .* has none"):
    train_judge.read(workdir, "hand")
  store_labels.put(workdir, {1: True, 2: False, 41: True})
  assert [(e.task_id, e.passed) for e in train_judge.read(workdir, "hand")] == [("task0", True), ("task1", False)]


def test_from_a_workdir_to_an_endpoint_that_environments_ask(workdir, tiny_policy, tiny_params, monkeypatch):
  import types

  run = types.SimpleNamespace(critic=critic.defaults())
  for module in (train_judge, serve_judge):
    monkeypatch.setattr(module, "policy_of", lambda folder: (tiny_policy, tiny_params, run))
  lines = []
  got, about = train_judge.train_judge(workdir, "checker", knobs(), lines.append)
  assert got.agreement == 1.0 and about["held_out"] == got.n and about["learned"] + got.n == 40 and "update 60 of 60" in lines[-1]
  assert json.loads((workdir / "judge" / "judge.json").read_text()) == about
  assert "always the commoner verdict" in train_judge.report(got, about)
  monkeypatch.setenv("no_proxy", "127.0.0.1")
  with serve.Server(serve_judge.load(workdir), handler=serve_judge.Handler) as server:
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    cfg = judges.defaults()
    cfg.update({"kind": "endpoint", "base_url": f"{server.url}/v1", "model": "trained", "form": "yes_no"})
    judge, task = judges.make(cfg), Task("t", "open the red mug", "sim/phone", "f", 0, {}, Limits(3))
    assert [judge(task, [screen_of(not passed, 7), screen_of(passed, 8)], ["finish()"]) for passed in (True, False)] == [1.0, 0.0]
    server.shutdown()


def test_no_judge_says_how_to_train_one(tmp_path):
  with pytest.raises(FileNotFoundError, match="holds no judge: train one with python -m tools.train_judge"):
    serve_judge.load(str(tmp_path))


def test_a_run_of_a_checkpoint_is_refused(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps({"config": {"agent": {}, "env": {}, "policy": {"checkpoint": "UI-TARS"}}}))
  with pytest.raises(ValueError, match="practises UI-TARS: judges are trained from the embedded policy only"):
    train_judge.policy_of(tmp_path)
