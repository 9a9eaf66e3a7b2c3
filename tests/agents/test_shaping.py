"""Rewards added or apart, and pushes divided over a whole update. Numbers by hand."""

import dataclasses

import numpy as np
import pytest

from agents import grpo, ppo, shaping, step_grpo
from agents.values import token_credit
from losses.rewards import gdpo_advantages


def config(**knobs):
  cfg = grpo.defaults()
  cfg.update(knobs)
  return cfg


def credited(cfg, groups):
  """Every try's push after the whole update, by group."""
  agent = grpo.make(cfg)
  episodes = [e for g in groups for e in g.episodes]
  credits = [c for g in groups for c in agent.credit(g)]
  return [float(c.advantage[0]) for c in (agent.rescale(episodes, credits) if agent.rescale else credits)]


def test_one_spread_for_the_whole_update(group_of):
  """Rewards 1, 0 | 1, 1, 1, 0: centred +-0.5 | 0.25 x3, -0.75; all six have mean 2/3 and spread sqrt(2/9) = 0.4714."""
  groups = [group_of([1, 0], name="a"), group_of([1, 1, 1, 0], name="b")]
  want = np.array([0.5, -0.5, 0.25, 0.25, 0.25, -0.75]) / 0.471405
  np.testing.assert_allclose(credited(config(spread="batch"), groups), want, rtol=1e-4)


def test_rewards_compared_apart_are_gdpo(group_of):
  """Against losses.rewards.gdpo_advantages over both groups at once: success, and the -1 of an unreadable try, each by itself."""
  groups = [group_of([1, 0, -1], name="a"), group_of([1, 1, 0], name="b")]
  by_name = {"success": np.array([1, 0, 0, 1, 1, 0], np.float32), "unreadable": np.array([0, 0, -1, 0, 0, 0], np.float32)}
  want = gdpo_advantages(by_name, {"success": 1.0, "unreadable": 1.0}, np.array([0, 0, 0, 1, 1, 1]), 2)
  np.testing.assert_allclose(credited(config(combine="gdpo"), groups), want, rtol=1e-5)
  assert abs(want[2] - want[1]) > 0.5  # and the unreadable one is pushed down further


def test_an_unreadable_try_at_half_its_price(group_of):
  """1, 0, -0.5: mean 1/6, population spread sqrt((0.694 + 0.028 + 0.444) / 3) = 0.6236."""
  want = np.array([0.8333, -0.1667, -0.6667]) / 0.62361
  np.testing.assert_allclose(credited(config(unreadable=0.5), [group_of([1, 0, -1])]), want, rtol=1e-3)


def test_steps_cost_what_the_budget_says(group_of):
  """Step limit 10, weight 0.5: 2 steps cost 0.1, 10 steps 0.5."""
  group = group_of([1, 0])
  short, long = group.episodes
  short.steps, long.steps = short.steps[:1] * 2, long.steps[:1] * 10
  short.step_limit = long.step_limit = 10
  by_name = shaping.rewards(config(step_budget=0.5), group, None)
  np.testing.assert_allclose(by_name["step_budget"], [-0.1, -0.5])
  np.testing.assert_allclose(by_name["success"], [1, 0])


def test_an_equal_group_teaches_nothing_whatever_its_lengths(group_of):
  group = group_of([1, 1])
  group.episodes[0].steps = group.episodes[0].steps * 3
  for knobs in ({"step_budget": 0.9}, {"spread": "batch", "step_budget": 0.9}, {"combine": "gdpo", "step_budget": 0.9}):
    assert credited(config(**knobs), [group]) == [0.0, 0.0]


def test_whitening_is_over_the_action_tokens_that_are_learnt_from(episode):
  """Two tries with 4 action tokens each, pushes 1, 2, 3, 4 and 5, 6, 7, 8; the second is kept out of the loss, so mean 2.5 and spread
  sqrt(1.25) come from the first alone; prompts stay 0."""
  episodes = [episode(1, index=0), episode(0, index=1)]
  n = episodes[0].action_tokens
  credits = [token_credit(e, np.arange(1.0, n + 1) + n * i, np.zeros(n)) for i, e in enumerate(episodes)]
  credits[1].keep[:] = False
  first, second = shaping.whitened(episodes, credits)
  push = np.concatenate([a[r.is_action] for a, r in zip(first.token_advantage, episodes[0].records, strict=True)])
  given = np.arange(1.0, n + 1)
  np.testing.assert_allclose(push, (given - given.mean()) / (given.std() + 1e-6), rtol=1e-5)
  assert not any(a[~r.is_action].any() for a, r in zip(first.token_advantage, episodes[0].records, strict=True))
  assert not any(a.any() for a in second.token_advantage) and dataclasses.asdict(first)["token_return"][0] is not None
  assert ppo.make(ppo.defaults()).rescale is None


@pytest.mark.parametrize(
  "knobs, says",
  [({"unreadable": 2.0}, "agent.unreadable is 2.0"), ({"step_budget": 1.0}, "agent.step_budget is 1.0"),
   ({"combine": "both"}, "agent.combine is both"), ({"spread": "all"}, "agent.spread is all")],
)  # fmt: skip
def test_domains(knobs, says):
  with pytest.raises(ValueError, match=says):
    grpo.make(config(**knobs))


def test_pooled_steps_have_a_spread_of_their_own():
  cfg = step_grpo.defaults()
  cfg.spread = "batch"
  with pytest.raises(ValueError, match="step_grpo pools the steps"):
    step_grpo.make(cfg)
