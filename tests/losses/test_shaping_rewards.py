"""Reward shaping. Numbers from DAPO's section 4.1 (limit 20480, cache 4096), from ARPO's released code or by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from losses.advantages import group_advantages
from losses.rewards import (
  format_reward,
  gdpo_advantages,
  shortest_path_reward,
  soft_overlong_penalty,
  step_budget_penalty,
)


def near(a, b, atol=1e-5):
  np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=atol)


def test_dapo_lengths():
  # 0 up to 16384, -1 from 20480 on, and by hand half way between (18432): -0.5
  lengths = np.array([0, 16384, 18432, 20480, 30000])
  np.testing.assert_allclose(soft_overlong_penalty(lengths, 20480, 4096), [0, 0, -0.5, -1, -1], atol=1e-6)


def test_soft_overlong_in_steps():
  # 15 steps, the last 5 count: 12 steps cost (10 - 12) / 5
  assert float(soft_overlong_penalty(12, 15, 5)) == pytest.approx(-0.4)
  assert float(soft_overlong_penalty(10, 15, 5)) == 0.0 and float(soft_overlong_penalty(15, 15, 5)) == -1.0


def test_jit_vmap_and_float32():
  lengths = np.array([3, 12, 40])
  batched = jax.jit(jax.vmap(lambda n: soft_overlong_penalty(n, 15, 5)))(lengths)
  np.testing.assert_allclose(batched, soft_overlong_penalty(lengths, 15, 5), atol=1e-6)
  assert batched.dtype == np.float32


@pytest.mark.parametrize("limit, cache", [(15, 0), (15, -1), (15, 16)])
def test_a_cache_that_cannot_be_is_refused(limit, cache):
  with pytest.raises(ValueError, match=f"cache is {cache} with limit 15"):
    soft_overlong_penalty(3, limit, cache)


def test_format_reward_replaces_or_adds():
  reward, unreadable = np.array([1.0, 0.0, 0.5]), np.array([0, 1, 1])
  assert format_reward(reward, unreadable).tolist() == [1, -1, -1]
  assert format_reward(reward, unreadable, penalty=-0.5, mode="add").tolist() == [1, -0.5, 0]
  poisoned = np.where(unreadable, np.nan, reward)
  assert format_reward(poisoned, unreadable).tolist() == [1, -1, -1]
  assert jax.grad(lambda r: format_reward(r, unreadable).sum())(jnp.array(poisoned)).tolist() == [1, 0, 0]


def test_arpos_format_reward_in_a_group():
  # algorithms of ARPO's code: 0.5 x -1, sample spread: +1.532 / -0.354 / -1.296
  reward = format_reward(np.array([1.0, 0, 0, 1, 0, 0, 0, 0]), np.arange(8) == 7, penalty=-0.5, mode="add")
  push = group_advantages(reward, np.zeros(8, int), 1, spread="sample")
  near(push[jnp.array([0, 1, 7])], [1.532, -0.354, -1.296], atol=6e-4)


def test_step_budget_penalty():
  near(step_budget_penalty(np.array([0, 3, 15, 20]), 15), [0, -0.2, -1, -1])
  near(step_budget_penalty(3, 15, weight=0.5), -0.1)
  near(jax.jit(jax.vmap(lambda n: step_budget_penalty(n, 15)))(np.array([3, 30])), [-0.2, -1])


def test_shortest_path_reward():
  # group 0: passes of 4 and 8 steps, a fail of 2, an unreadable try; group 1: one pass. 8 steps against 4: 1 - 4 / 8
  reward, steps = np.array([1.0, 1, 0, -1, 1]), np.array([4, 8, 2, 1, 5])
  group = np.array([0, 0, 0, 0, 1])
  near(shortest_path_reward(reward, steps, group, 2), [1, 0.5, 0, -1, 1])
  near(shortest_path_reward(reward, steps, group, 2, alpha=0.5), [1, 0.75, 0, -1, 1])
  near(shortest_path_reward(reward, steps, group, 2, alpha=0.0), reward)
  near(shortest_path_reward(reward / 2, steps, group, 2), [0.5, 0.25, 0, -0.5, 0.5])


@pytest.mark.parametrize("poison", [np.nan, 1e30, -np.inf])
def test_an_invalid_try_is_not_the_shortest(poison):
  reward, steps, group = np.array([poison, 1, 0.0]), np.array([poison, 8, 2.0]), np.zeros(3, int)
  valid = np.array([0, 1, 1], bool)
  run = lambda r: shortest_path_reward(r, steps, group, 1, valid_E=valid)
  assert run(reward).tolist() == [0, 1, 0]
  assert jax.grad(lambda r: run(r).sum())(jnp.array(reward)).tolist() == [0, 1, 1]


PASS, FORMAT = np.array([1.0, 0, 0, 0]), np.array([1.0, 1, 1, 0])


def test_gdpo_normalises_before_it_adds():
  # 1.73205, -0.57735 x 3 and half of 0.57735 x 3, -1.73205: 2.02073, -0.28868 x 2, -1.44338; their spread is 1.258306
  push = gdpo_advantages({"pass": PASS, "format": FORMAT}, {"pass": 1.0, "format": 0.5}, np.zeros(4, int), 1)
  near(push, [1.605910, -0.229416, -0.229416, -1.147079], atol=2e-5)


def test_gdpo_of_one_reward_in_one_group_is_group_advantages():
  push = gdpo_advantages({"pass": PASS}, {"pass": 7.0}, np.zeros(4, int), 1)
  near(push, group_advantages(PASS, np.zeros(4, int), 1), atol=2e-5)


def test_gdpo_keeps_the_zeros_of_a_group_that_does_not_teach():
  # a second group, all equal: exact zeros, and the spread is over eight tries: sqrt(6.33333 / 8) = 0.889757; 2.02073 / that
  rewards = {"pass": np.append(PASS, [0.7] * 4), "format": np.append(FORMAT, [1.0] * 4)}
  push = gdpo_advantages(rewards, {"pass": 1.0, "format": 0.5}, np.repeat([0, 1], 4), 2)
  assert push[4:].tolist() == [0] * 4
  near(push[0], 2.271100, atol=3e-5)


def test_gdpo_with_invalid_tries_jit_and_vmap():
  group, valid = np.zeros(5, int), np.array([1, 1, 1, 1, 0], bool)
  weights = {"pass": 1.0, "format": 0.5}
  run = lambda p, f: gdpo_advantages({"pass": p, "format": f}, weights, group, 1, valid_E=valid)
  want = [1.605910, -0.229416, -0.229416, -1.147079, 0]
  dirty = np.append(PASS, np.nan), np.append(FORMAT, 1e30)
  near(run(*dirty), want, atol=2e-5)
  near(jax.jit(jax.vmap(run))(*(np.stack([x, x]) for x in dirty)), [want, want], atol=2e-5)
  grad = jax.grad(lambda p: jnp.sum(run(p, dirty[1]) * jnp.arange(5.0)))(jnp.array(dirty[0]))
  assert np.isfinite(grad).all() and grad[4] == 0 and grad.any()


def test_errors_say_what_was_wanted():
  four, ids = np.ones(4), np.zeros(4, int)
  for match, call in {
    "replace, add": lambda: format_reward(four, four, mode="mix"),
    "penalty is 1.0": lambda: format_reward(four, four, penalty=1.0),
    "reward_E has length 4 but unreadable_E has length 1": lambda: format_reward(four, np.ones(1)),
    "budget is 0": lambda: step_budget_penalty(3, 0),
    "weight is -1": lambda: step_budget_penalty(3, 15, weight=-1),
    "alpha is 1.5": lambda: shortest_path_reward(four, four, ids, 1, alpha=1.5),
    "fewer than 1 step": lambda: shortest_path_reward(four, 0 * four, ids, 1),
    "steps_E has length 3": lambda: shortest_path_reward(four, np.ones(3), ids, 1),
    r"rewards are \['a'\] but weights are \['b'\]": lambda: gdpo_advantages({"a": four}, {"b": 1.0}, ids, 1),
    "'population' or 'sample'": lambda: gdpo_advantages({"a": four}, {"a": 1.0}, ids, 1, spread="none"),
  }.items():
    with pytest.raises(ValueError, match=match):
      call()
