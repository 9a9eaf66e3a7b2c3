"""KL estimates. Numbers from the lesson (chapter 5) or by hand; each test says which."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from losses.kl import KINDS, adaptive_beta, kl_estimate, kl_in_reward, kl_loss, moving_reference
from losses.reduce import token_mean

Q = np.array([0.8, 0.5, 1.0])  # reference chance / current chance
LOGP = np.full(3, -1.0)
REF = LOGP + np.log(Q)


def slopes(kind, ref=REF):
  return np.asarray(jax.grad(lambda n: kl_estimate(n, ref, kind).sum())(jnp.array(LOGP)))


def test_chapter5_k3():
  estimate = kl_estimate(LOGP, REF)
  np.testing.assert_allclose(estimate, [0.023, 0.193, 0.0], atol=5e-4)
  np.testing.assert_allclose(0.04 * estimate, [0.0009, 0.0077, 0.0], atol=5e-5)


def test_kinds_by_hand():
  # d = ln q: -0.22314, -0.69315, 0
  np.testing.assert_allclose(kl_estimate(LOGP, REF, "k1"), [0.22314, 0.69315, 0], atol=1e-5)
  np.testing.assert_allclose(kl_estimate(LOGP, -LOGP * 0 - 0.5, "k1"), [-0.5] * 3, atol=1e-6)  # may be negative
  np.testing.assert_allclose(kl_estimate(LOGP, LOGP + [0.5, -0.5, 0], "abs"), [0.5, 0.5, 0], atol=1e-6)
  np.testing.assert_allclose(kl_estimate(LOGP, REF, "k2"), [0.02490, 0.24023, 0], atol=1e-5)
  np.testing.assert_allclose(kl_estimate(LOGP, REF, "k3+"), kl_estimate(LOGP, REF, "k3"), atol=0)


def test_gradients_by_hand():
  # into log pi: k1: 1; k2: -d; k3: 1 - q; k3+ has k3's value and k2's gradient
  np.testing.assert_allclose(slopes("k1"), [1, 1, 1], atol=1e-6)
  np.testing.assert_allclose(slopes("k2"), [0.22314, 0.69315, 0], atol=1e-5)
  np.testing.assert_allclose(slopes("k3"), [0.2, 0.5, 0], atol=1e-5)
  np.testing.assert_allclose(slopes("k3+"), [0.22314, 0.69315, 0], atol=1e-5)


def test_expected_gradient_of_k2_is_the_kls_and_that_of_k3_is_not():
  # two actions, exact expectations under pi: d KL / d logits against sum_a pi(a) d estimate / d logits
  logits, ref = jnp.array([1.0, 0.0]), jnp.array([-1.0, 0.0])
  logp = lambda x: jax.nn.log_softmax(x)
  exact = jax.grad(lambda x: jnp.sum(jnp.exp(logp(x)) * (logp(x) - logp(ref))))(logits)
  weight = jnp.exp(logp(logits))
  of = lambda kind: jax.grad(lambda x: jnp.sum(weight * kl_estimate(logp(x), logp(ref), kind)))(logits)
  np.testing.assert_allclose(of("k2"), exact, atol=1e-6)
  np.testing.assert_allclose(of("k3+"), exact, atol=1e-6)
  assert np.abs(of("k3") - exact).max() > 0.05


def test_k3_is_never_negative_and_exact_for_tiny_drift():
  drift = np.linspace(-3, 3, 101).astype(np.float32)
  assert float(kl_estimate(np.full(101, -4.0), drift - 4, "k3").min()) >= 0
  # by hand: d = 2^-13: d^2 / 2 + d^3 / 6 = 7.45088e-9; in plain float32 q rounds to 1 + d, and q - 1 - ln q to 0
  assert float(kl_estimate(np.array([-1.0]), np.array([-1.0 + 2**-13]))[0]) == pytest.approx(7.45088e-9, rel=1e-3)


def test_reference_gets_no_gradient():
  for kind in KINDS:
    assert jax.grad(lambda r, k=kind: kl_estimate(jnp.array(LOGP), r, k).sum())(jnp.array(REF)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_far_off_token_overflows_neither_value_nor_gradient(kind):
  far = np.array([200.0, -200.0, 0.0])
  assert np.all(np.isfinite(kl_estimate(LOGP, LOGP + far, kind)))
  assert np.all(np.isfinite(slopes(kind, LOGP + far)))


def test_k3_with_k2s_gradient_has_k3s_value_where_k2_overflows():
  # d = -1e30: d^2 has no float32; d is held at -20, so e^-20 - 1 + 20
  assert float(kl_estimate(np.array([1e30]), np.zeros(1), "k3+")[0]) == pytest.approx(19, abs=1e-5)


@pytest.mark.parametrize("poison", [np.nan, 1e30, -np.inf, np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_poison_at_masked_places(kind, poison):
  mask = np.array([1, 1, 0])
  loss = lambda n, r: token_mean(kl_estimate(n, r, kind), mask).mean()
  clean = jax.value_and_grad(loss)(jnp.array(LOGP), REF)
  for n, r in ((poison, 0.0), (0.0, poison), (poison, poison), (poison, -poison)):
    dirty = jax.value_and_grad(loss)(jnp.array([-1.0, -1.0, n]), np.array([*REF[:2], r]))
    assert clean[0] == dirty[0] and np.array_equal(clean[1], dirty[1]) and dirty[1][2] == 0


def test_jit_vmap_and_dtype():
  rng = np.random.default_rng(0)
  new, ref = rng.normal(size=(2, 5)), rng.normal(size=(2, 5))
  for kind in KINDS:
    batched = jax.jit(jax.vmap(lambda n, r, k=kind: kl_estimate(n, r, k)))(new, ref)
    np.testing.assert_allclose(batched, np.stack([kl_estimate(n, r, kind) for n, r in zip(new, ref)]), rtol=1e-5, atol=1e-6)
    assert kl_estimate(jnp.zeros(2, jnp.bfloat16), jnp.zeros(2, jnp.bfloat16), kind).dtype == jnp.float32


def test_errors():
  with pytest.raises(ValueError, match="k1, abs, k2, k3"):
    kl_estimate(LOGP, REF, "low_var_kl")
  with pytest.raises(ValueError, match="logp_N has length 3 but ref_logp_N has length 1"):
    kl_estimate(LOGP, REF[:1])


def test_chapter5_penalties_are_beta_times_the_estimate():
  np.testing.assert_allclose(kl_loss(LOGP, REF, beta=0.04), [0.0009, 0.0077, 0.0], atol=5e-5)
  slope = jax.grad(lambda n: kl_loss(n, REF, beta=0.04, kind="k2").sum())(jnp.array(LOGP))
  np.testing.assert_allclose(slope, 0.04 * slopes("k2"), atol=1e-6)
  assert kl_loss(LOGP, REF, beta=0.0).tolist() == [0, 0, 0]


def test_kl_in_the_reward():
  # beta 0.1 times 0.22314, 0.69315, 0; over the episode 0.1 times its log-ratio -ln(0.8 x 0.5) = 0.91629
  reward = kl_in_reward(np.array([0.0, 0.0, 1.0]), LOGP, REF, np.ones(3), beta=0.1)
  np.testing.assert_allclose(reward, [-0.022314, -0.069315, 1.0], atol=1e-5)
  assert float(1 - reward.sum()) == pytest.approx(0.091629, abs=1e-5)
  np.testing.assert_allclose(kl_in_reward(np.zeros(3), LOGP, REF, np.ones(3), beta=1.0, kind="k3"), kl_estimate(LOGP, REF) * -1)


@pytest.mark.parametrize("poison", [np.nan, 1e30, np.inf])
def test_kl_in_the_reward_leaves_a_masked_places_reward(poison):
  # a trailing screenshot carries the outcome: it stays, and its log-probabilities are not read
  bad = np.array([-1.0, -1.0, poison])
  reward = kl_in_reward(np.array([0.0, 0.0, 1.0]), bad, np.array([*REF[:2], -poison]), np.array([1, 1, 0]), beta=0.1)
  np.testing.assert_allclose(reward, [-0.022314, -0.069315, 1.0], atol=1e-5)
  grad = jax.grad(lambda n: kl_in_reward(jnp.ones(3), n, REF, np.array([1, 1, 0]), beta=0.1).sum())(jnp.array(bad))
  assert grad.tolist() == [0, 0, 0]  # a reward is a number


def test_adaptive_beta():
  # kl / target - 1: 0.2, 4 (held at 0.2), -0.1, -1 (held at -0.2); times 100 / 10000
  for kl, want in ((0.012, 0.2004), (0.05, 0.2004), (0.009, 0.1998), (0.0, 0.1996), (0.01, 0.2)):
    assert float(adaptive_beta(0.2, kl, 0.01, 10000, 100)) == pytest.approx(want, abs=2e-7)
  assert float(jax.jit(adaptive_beta)(0.2, 0.05, 0.01, 10000, 100)) == pytest.approx(0.2004, abs=2e-7)


def test_moving_reference():
  ref, policy = {"w": jnp.zeros(2), "b": jnp.ones(1, jnp.bfloat16)}, {"w": jnp.ones(2), "b": jnp.full(1, 2.0, jnp.bfloat16)}
  moved = moving_reference(ref, policy)
  np.testing.assert_allclose(moved["w"], [0.6, 0.6], atol=1e-6)
  assert moved["b"].dtype == jnp.bfloat16 and float(moved["b"][0]) == pytest.approx(1.6, abs=0.01)
  np.testing.assert_array_equal(moving_reference(ref, policy, 0.0)["w"], ref["w"])
  np.testing.assert_array_equal(moving_reference(ref, policy, 1.0)["w"], policy["w"])


def test_a_negative_beta_is_refused_everywhere():
  ones = np.ones(3)
  for call in (
    lambda: kl_loss(LOGP, REF, beta=-0.1),
    lambda: kl_in_reward(ones, LOGP, REF, ones, beta=-0.1),
    lambda: adaptive_beta(-0.1, 0.1, 0.1, 10, 1),
  ):
    with pytest.raises(ValueError, match="beta is -0.1"):
      call()
  with pytest.raises(ValueError, match="target, horizon and n are 0, 10 and 1"):
    adaptive_beta(0.1, 0.1, 0, 10, 1)
  with pytest.raises(ValueError, match="mix is 2"):
    moving_reference(ones, ones, 2)
  with pytest.raises(ValueError, match="reward_N has length 1"):
    kl_in_reward(np.ones(1), LOGP, REF, ones, beta=0.1)
