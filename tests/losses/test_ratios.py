"""Importance ratios. Numbers from the lesson or by hand; each test says which."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from losses.policy import clipped_loss
from losses.ratios import (
  band_weight,
  clamped,
  log_ratio,
  sequence_ratio,
  sequence_token_ratio,
  token_ratio,
  truncated_weight,
)


def test_chapter1_the_chance_of_an_action():
  # 12 tokens at 0.95 against a sampler that was sure: the action's chance is the product of the token ratios
  logs = log_ratio(np.full(12, np.log(0.95)), np.zeros(12), np.ones(12))
  assert float(logs.sum()) == pytest.approx(-0.616, abs=5e-4)
  assert float(jnp.exp(logs.sum())) == pytest.approx(0.540, abs=5e-4)


def test_chapter4_reweighting_gives_the_new_agents_average():
  old, new, push = np.array([0.30, 0.70]), np.array([0.45, 0.55]), np.array([1.73, -0.58])
  ratio = token_ratio(np.log(new), np.log(old), np.ones(2))
  np.testing.assert_allclose(ratio, [1.500, 0.786], atol=5e-4)
  assert float((new * push).sum()) == pytest.approx(0.4595)
  assert float((old * ratio * push).sum()) == pytest.approx(0.4595, abs=1e-6)


def test_ratio_is_against_the_stored_log_probability():
  # stored -1.0, now -0.5: e^0.5 = 1.6487; a ratio built from the current log-probability alone would be 1
  assert float(token_ratio(np.array([-0.5]), np.array([-1.0]), np.ones(1))[0]) == pytest.approx(1.6487, abs=5e-5)
  assert token_ratio(np.array([-0.5, -3.0]), np.array([-0.5, -3.0]), np.ones(2)).tolist() == [1.0, 1.0]


def test_ratio_gradient_goes_to_the_current_policy_only():
  new, old = jnp.array([-0.5, -2.0]), jnp.array([-1.0, -2.5])
  loss = lambda n, o: token_ratio(n, o, np.ones(2)).sum()
  np.testing.assert_allclose(jax.grad(loss)(new, old), np.exp([0.5, 0.5]), rtol=1e-6)  # d e^x = e^x
  assert jax.grad(loss, argnums=1)(new, old).tolist() == [0, 0]


def test_a_far_off_token_overflows_neither_value_nor_gradient():
  new, old = jnp.array([-1.0, -300.0, -1.0]), jnp.array([-300.0, -1.0, -1.0])
  ratio = token_ratio(new, old, np.ones(3))
  np.testing.assert_allclose(ratio, [np.exp(20), np.exp(-20), 1.0], rtol=1e-5)  # clamped at +-20 before the exponential
  assert jax.grad(lambda n: token_ratio(n, old, np.ones(3)).sum())(new).tolist() == [0, 0, 1]
  assert clamped(new, old, np.array([1, 0, 1])).tolist() == [True, False, False]


def test_a_nan_that_counts_stays_visible():
  assert np.isnan(token_ratio(np.array([np.nan]), np.array([-1.0]), np.ones(1))[0])


def test_float32_inside():
  # the lesson's episode band: 1 + 2e-4 must differ from 1; in bfloat16 e^(2e-4), e^(4e-4) and e^(-3e-4) are all exactly 1
  ratio = token_ratio(np.array([-0.5 + 2e-4, -0.5 + 4e-4, -0.5 - 3e-4]), np.full(3, -0.5), np.ones(3))
  np.testing.assert_allclose(ratio, [1.0002, 1.0004, 0.9997], atol=2e-7)
  half = jnp.array([-0.5, -1.0], jnp.bfloat16)
  for out in (token_ratio(half, half, np.ones(2)), sequence_ratio(half, half, np.ones(2), np.zeros(2, int), 1)):
    assert out.dtype == jnp.float32
  # bfloat16 minus float32 is taken in float32: -1 and -1.0001 stay apart
  mixed = token_ratio(half, np.array([-0.5001, -1.0001], np.float32), np.ones(2))
  np.testing.assert_allclose(mixed, [1.0001, 1.0001], atol=2e-7)


def test_sequence_ratio_is_a_geometric_mean_of_agent_tokens_only():
  # log-ratios +0.4, -0.4 and a masked +3.0: e^0 = 1, not clipped; with the masked token it would be e^1 = 2.718
  new, mask, unit = np.array([0.4, -0.4, 3.0]) - 5, np.array([1, 1, 0]), np.zeros(3, int)
  s = sequence_ratio(new, np.full(3, -5.0), mask, unit, 1)
  np.testing.assert_allclose(s, [1.0], atol=1e-6)
  assert clipped_loss(s, np.ones(1), clip_low=3e-4, clip_high=4e-4)[1].tolist() == [False]
  # a mean that is not 0: (0.4 + 0.2) / 2, divided by the 2 agent tokens and not by all 3
  off = sequence_ratio(np.array([0.4, 0.2, 3.0]) - 5, np.full(3, -5.0), mask, unit, 1)
  np.testing.assert_allclose(off, [np.exp(0.3)], rtol=1e-6)
  # the token rule on the same data: 1.49 is clipped
  assert clipped_loss(token_ratio(new, np.full(3, -5.0), mask), np.ones(3))[1].tolist() == [True, False, False]


def test_sequence_ratio_by_hand_in_any_order():
  # unit 0: 1.2 x 1.3 -> sqrt(1.56); unit 1: 0.5 x 2 x 8 -> 8^(1/3) = 2; unit 2 has no token -> 1
  ratios, unit = np.array([0.5, 1.2, 2.0, 1.3, 8.0]), np.array([1, 0, 1, 0, 1])
  s = sequence_ratio(np.log(ratios) - 4, np.full(5, -4.0), np.ones(5), unit, 3)
  np.testing.assert_allclose(s, [np.sqrt(1.56), 2.0, 1.0], rtol=1e-5)


def test_chapter5_forty_tokens_one_ratio():
  # mean log-ratio ln 1.0002; noise of the lesson's size: from 0.72 to 1.34, two tokens above 1.28
  noise = np.concatenate([[np.log(1.34), np.log(1.29), np.log(0.72)], np.linspace(-0.2, 0.2, 37)])
  logs = noise - noise.mean() + np.log(1.0002)
  new, old, ones = logs - 5, np.full(40, -5.0), np.ones(40)
  assert float(clipped_loss(token_ratio(new, old, ones), ones)[1].sum()) == 2
  s = sequence_ratio(new, old, ones, np.zeros(40, int), 1)
  assert float(s[0]) == pytest.approx(1.0002, abs=2e-6)
  assert not bool(clipped_loss(s, np.ones(1), clip_low=3e-4, clip_high=4e-4)[1][0])


def test_sequence_ratio_gradient_is_equal_over_a_units_tokens():
  # s / |y| at each token: unit 0 has two tokens, unit 1 one, unit 2 none
  new, unit = jnp.array([-1.0, -2.0, -0.5, -9.0]), np.array([0, 0, 1, 2])
  old, mask = jnp.array([-1.2, -2.2, -1.0, -1.0]), np.array([1, 1, 1, 0])
  grad = jax.grad(lambda n: sequence_ratio(n, old, mask, unit, 3).sum())(new)
  np.testing.assert_allclose(grad, [np.exp(0.2) / 2, np.exp(0.2) / 2, np.exp(0.5), 0], rtol=1e-6)


def test_sequence_token_ratio_has_the_units_value_and_the_tokens_gradient():
  new, unit, mask = jnp.array([-1.0, -2.4, -0.5]), np.array([0, 0, 0]), np.array([1, 1, 0])
  old = jnp.array([-1.2, -2.2, -3.0])  # log-ratios 0.2 and -0.2: s = 1
  loss = lambda n: jnp.sum(sequence_token_ratio(n, old, mask, unit, 1) * jnp.array([1.0, 5.0, 9.0]))
  np.testing.assert_allclose(sequence_token_ratio(new, old, mask, unit, 1), [1, 1, 1], atol=1e-6)
  np.testing.assert_allclose(jax.grad(loss)(new), [1, 5, 0], atol=1e-5)  # each token's own, no 1 / |y| yet


def test_truncated_and_band_weights():
  # ratios 1.5, 3, 0.4: cap 2 -> 1.5, 2, 0.4; band 0.5 .. 2 -> 1.5, 0, 0; masked -> 1
  old = jnp.log(jnp.array([1.5, 3.0, 0.4, 3.0]))
  mask = np.array([1, 1, 1, 0])
  np.testing.assert_allclose(truncated_weight(old, np.zeros(4), mask), [1.5, 2.0, 0.4, 1.0], rtol=1e-6)
  np.testing.assert_allclose(band_weight(old, np.zeros(4), mask), [1.5, 0.0, 0.0, 1.0], rtol=1e-6)
  for weight in (truncated_weight, band_weight):
    assert jax.grad(lambda o, f=weight: f(o, np.zeros(4), mask).sum())(old).tolist() == [0] * 4


@pytest.mark.parametrize("poison", [np.nan, 1e30, -np.inf, np.inf])
def test_poison_at_masked_places(poison):
  mask, unit = np.array([1, 0, 1, 0]), np.array([0, 0, 1, 1])
  new, old = np.array([-1.0, 0.0, -2.0, 0.0]), np.array([-1.1, 0.0, -2.3, 0.0])
  dirty_new, dirty_old = np.where(mask, new, poison), np.where(mask, old, -poison)
  functions = {
    "token": lambda n, o: token_ratio(n, o, mask),
    "sequence": lambda n, o: sequence_ratio(n, o, mask, unit, 2),
    "sequence_token": lambda n, o: sequence_token_ratio(n, o, mask, unit, 2),
    "truncated": lambda n, o: truncated_weight(n, o, mask),
  }
  for name, function in functions.items():
    assert np.array_equal(function(new, old), function(dirty_new, dirty_old)), name
    grads = [jax.grad(lambda n, o=o, f=function: f(n, o).sum())(jnp.array(n)) for n, o in ((new, old), (dirty_new, dirty_old))]
    assert np.array_equal(*grads) and grads[1][1] == grads[1][3] == 0, name


def test_errors_name_both_lengths():
  with pytest.raises(ValueError, match="logp_N has length 3 but behaviour_logp_N has length 1"):
    token_ratio(np.zeros(3), np.zeros(1), np.ones(3))
  with pytest.raises(ValueError, match="logp_N has length 3 but unit_id_N has length 2"):
    sequence_ratio(np.zeros(3), np.zeros(3), np.ones(3), np.zeros(2, int), 1)
  with pytest.raises(ValueError, match="rank 1"):
    token_ratio(np.zeros((2, 3)), np.zeros((2, 3)), np.ones((2, 3)))


def test_jit_and_vmap():
  rng = np.random.default_rng(0)
  new, old = rng.normal(size=(3, 8)), rng.normal(size=(3, 8))
  mask, unit = rng.random((3, 8)) < 0.7, rng.integers(0, 3, (3, 8))
  for run in (
    lambda n, o, m, u: token_ratio(n, o, m),
    lambda n, o, m, u: sequence_ratio(n, o, m, u, 3),
    lambda n, o, m, u: sequence_token_ratio(n, o, m, u, 3),
  ):
    eager = np.stack([run(*row) for row in zip(new, old, mask, unit)])
    np.testing.assert_allclose(jax.jit(jax.vmap(run))(new, old, mask, unit), eager, rtol=1e-5)
