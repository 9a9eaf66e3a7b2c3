"""Does practice learn, and only from the pushes? The loop of train.py under credits that say nothing."""

import jax
import numpy as np
import pytest

import evaluate
import train
from core import config as config_lib
from core.schema import Credit
from rollout import demos


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
  """A phone policy copied as in the smoke run; practice starts from its checkpoint. About a minute and a half."""
  workdir = tmp_path_factory.mktemp("copied") / "run"
  argv = ["train.py", "--config=configs/android.py:smoke", f"--workdir={workdir}", "--config.practice.updates=8"]
  cfg, _ = config_lib.load_config(argv)
  run = train.Run(cfg, workdir)
  items = demos.items(run.world.demonstrations(cfg.copy.demonstrations, 0), run.policy)
  learner = train.copying(run, items, run.learner(run.policy.init(jax.random.key(0)), copying=True))
  return cfg, items, jax.device_get(learner["states"]["policy"].params)


def practised(copied, workdir, monkeypatch, credit) -> float:
  """Points gained on held-out tasks by 8 updates under another rule of credit."""
  cfg, items, params = copied
  run = train.Run(cfg, workdir)
  run.agent = run.feed.agent = run.agent._replace(credit=credit(run.agent.credit))
  run.facts.update({"phase": "practice"})
  before = evaluate.measure(run, params, evaluate.HELD_OUT, 2, "before").success
  run.computers = evaluate.computers(cfg, run.world, lambda: None)
  learner = train.practice(run, items, run.learner(jax.device_put(params), copying=False))
  return 100 * (evaluate.measure(run, learner["states"]["policy"].params, evaluate.HELD_OUT, 2, "after").success - before)


@pytest.mark.long
def test_practice_learns_from_its_pushes_and_not_without_them(copied, tmp_path, monkeypatch):
  rng = np.random.default_rng(0)

  def shuffled(credit):
    def other(group, scores=None):
      credits = credit(group)
      order = rng.permutation(len(credits))
      return [Credit.uniform(float(credits[i].advantage[0]), len(e.steps)) for i, e in zip(order, group.episodes)]

    return other

  def zero(credit):
    return lambda group, scores=None: [Credit.uniform(0.0, len(e.steps)) for e in group.episodes]

  real = practised(copied, tmp_path / "real", monkeypatch, lambda credit: credit)
  mixed_up = practised(copied, tmp_path / "shuffled", monkeypatch, shuffled)
  none = practised(copied, tmp_path / "zero", monkeypatch, zero)
  # n = 192 episodes each: a difference of two scores wobbles by about 5 points
  assert real > 15 and mixed_up < 10 and abs(none) < 10, (real, mixed_up, none)
  assert real > max(mixed_up, none) + 15, (real, mixed_up, none)
