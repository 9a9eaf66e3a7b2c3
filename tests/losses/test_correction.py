"""Weights for data the current policy did not write. Numbers by hand."""

import jax
import numpy as np
import pytest

from core.segments import segment_gather
from losses.correction import (
  approximate_old_logp,
  chi2,
  effective_sample_size,
  geometric_reject,
  k3_reject,
  off_policy_mask,
  sequence_weight,
)
from losses.policy import clipped_loss
from losses.ratios import token_ratio
from losses.reduce import token_mean


def near(a, b, atol=1e-5):
  np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=atol)


# unit 0: 1.2 x 1.3 = 1.56, geometric 1.2490; unit 1: 0.5 x 2 x 8 = 8, geometric 2; unit 2 without tokens; unit 3: 1 x 0.25,
# geometric 0.5; the last token is masked
UNIT = np.array([1, 0, 1, 0, 1, 3, 3, 0])
MASK = np.array([1, 1, 1, 1, 1, 1, 1, 0])
MU = np.full(8, -4.0)
OLD = MU + np.log([0.5, 1.2, 2.0, 1.3, 8.0, 1.0, 0.25, 50.0])


def test_sequence_weight_geometric_and_product():
  weigh = lambda **kw: sequence_weight(OLD, MU, MASK, UNIT, 4, **kw)
  near(weigh(low=0.6, high=1.9), [1.2490, 0, 1, 0], atol=5e-5)
  near(weigh(low=0.4, high=2.1), [1.2490, 2, 1, 0.5], atol=5e-5)
  near(weigh(kind="product", low=0.2, high=2.0), [1.56, 0, 1, 0.25])
  near(weigh(outside="cap", high=1.9), [1.2490, 1.9, 1, 0.5], atol=5e-5)
  near(weigh(kind="product", outside="cap", high=2.0), [1.56, 2, 1, 0.25])


def test_the_product_grows_with_length_and_the_geometric_mean_does_not():
  # 2,000 tokens that each drifted by 0.01: e^0.01 = 1.01005 against e^20
  args = np.full(2000, -0.99), np.full(2000, -1.0), np.ones(2000), np.zeros(2000, int), 1
  near(sequence_weight(*args, low=0.5, high=2.0), [1.01005], atol=1e-4)
  near(sequence_weight(*args, kind="product", low=0.5, high=3.0), [0])
  assert float(sequence_weight(*args, kind="product", high=np.inf)[0]) == pytest.approx(np.exp(20), rel=1e-2)


def test_k3_sees_drift_that_cancels():
  # log-ratios +0.1 and -0.1: geometric mean 1; k3 = (0.0051709 + 0.0048374) / 2 = 0.0050042
  args = np.array([-0.9, -1.1]), np.array([-1.0, -1.0]), np.ones(2), np.zeros(2, int), 2
  assert geometric_reject(*args).tolist() == [1, 1]
  assert k3_reject(*args, threshold=0.00500).tolist() == [0, 1]
  assert k3_reject(*args, threshold=0.00501).tolist() == [1, 1]


def test_geometric_reject_band():
  # mean log-ratios 0.0009, 0.0012 and -0.0012: ratios 1.0009, 1.0012 and 0.9988 against 0.999 .. 1.001
  old = np.array([0.0009, 0.0012, -0.0012]) - 1
  assert geometric_reject(old, -np.ones(3), np.ones(3), np.arange(3), 3).tolist() == [1, 0, 0]


def test_off_policy_mask_drops_left_behind_failures_only():
  # log mu - log pi per unit: 0.6, 0.6, 0.4, -0.6, against 0.5; only the first is both a fail and left behind
  mu, pi = np.full(4, -1.0), np.array([-1.6, -1.6, -1.4, -0.4])
  keep = off_policy_mask(pi, mu, np.array([-1.0, 1.0, -1.0, -1.0]), np.ones(4), np.arange(4), 4, delta=0.5)
  assert keep.tolist() == [0, 1, 1, 1]


def test_rejection_changes_no_denominator():
  # four tokens with loss 1 each at ratio 1 and A = -1, one unit of two rejected: 2 / 4
  keep = segment_gather(geometric_reject(np.array([-1, -1, -0.5, -0.5]), -np.ones(4), np.ones(4), [0, 0, 1, 1], 2), np.array([0, 0, 1, 1]))
  total = token_mean(keep * clipped_loss(np.ones(4), -np.ones(4))[0], np.ones(4))
  assert total.count == 4 and total.mean() == 0.5


def test_approximate_old_logp():
  # mu -2, now -1; versions 2, 5 (current), 4 (the old one's own), 0; old 4, now 5: shares 2/3, 0, 0, 4/5
  old = approximate_old_logp(-np.ones(5), np.full(5, -2.0), np.array([1, 1, 1, 1, 0]), np.array([2, 5, 4, 0, 0]), 4, 5)
  near(old, [-4 / 3, -2, -2, -1.2, 0])
  # the old policy is the current one: so is its log-probability, where the token is older
  near(approximate_old_logp(-np.ones(2), np.full(2, -2.0), np.ones(2), np.array([3, 5]), 5, 5), [-1, -2])


def test_approximate_old_logp_per_token_versions_in_one_episode():
  # one episode across two weight swaps: three shares in it (0, 1/2, 2/3)
  near(approximate_old_logp(np.zeros(3), np.full(3, -6.0), np.ones(3), np.array([7, 6, 5]), 7, 8), [-6, -3, -2])


def test_effective_sample_size():
  # (1 + 3)^2 / (2 x 10) = 0.8; one of four at work 0.25; e^20 beside 1 is alone
  ess = lambda w, m=None: float(effective_sample_size(np.array(w), np.ones(len(w)) if m is None else m))
  assert ess([5.0] * 4) == 1.0 and ess([1.0, 0, 0, 0]) == 0.25
  assert ess([1.0, 3.0]) == pytest.approx(0.8) and ess([1.0, 3.0, np.nan], [1, 1, 0]) == pytest.approx(0.8)
  assert ess([np.exp(20), 1.0]) == pytest.approx(0.5) and ess([1.0], [0]) == 0 and ess([0.0, 0.0]) == 0


def test_chi2():
  # ratios 0.5 and 2: (0.25 + 4) / 2 - 1 = 1.125 (their mean is not 1, so the spread about 1 is another number); parts add up
  assert chi2(np.array([0.5, 2.0, np.nan]), np.array([1, 1, 0])).mean() == 1.125
  assert (chi2(np.array([0.5]), np.ones(1)) + chi2(np.array([2.0]), np.ones(1))).mean() == 1.125
  assert chi2(np.ones(3), np.ones(3)).mean() == 0


FUNCTIONS = {
  "geometric": lambda old, mu: sequence_weight(old, mu, MASK, UNIT, 4),
  "product": lambda old, mu: sequence_weight(old, mu, MASK, UNIT, 4, kind="product", outside="cap"),
  "reject": lambda old, mu: geometric_reject(old, mu, MASK, UNIT, 4, low=0.6, high=1.9),
  "k3": lambda old, mu: k3_reject(old, mu, MASK, UNIT, 4, threshold=0.1),
  "off_policy": lambda old, mu: off_policy_mask(old, mu, -np.ones(4), MASK, UNIT, 4, delta=0.1),
  "a3po": lambda old, mu: approximate_old_logp(old, mu, MASK, UNIT, 3, 4),
  "ess": lambda old, mu: effective_sample_size(token_ratio(old, mu, MASK), MASK),
  "chi2": lambda old, mu: chi2(token_ratio(old, mu, MASK), MASK).sum,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_poison_at_masked_places_no_gradient_jit_and_vmap(name):
  run = jax.jit(FUNCTIONS[name])
  clean = run(OLD, MU)
  near(clean, FUNCTIONS[name](OLD, MU))
  for poison in (np.nan, 1e30, -np.inf):
    assert np.array_equal(clean, run(np.where(MASK, OLD, poison), np.where(MASK, MU, -poison)))
  grads = jax.jit(jax.grad(lambda o, m: FUNCTIONS[name](o, m).sum(), argnums=(0, 1)))(OLD, MU)
  assert not any(g.any() for g in grads)  # a weight is a number
  two = np.stack([OLD, 0.5 * OLD]), np.stack([MU, MU])
  near(jax.jit(jax.vmap(FUNCTIONS[name]))(*two), np.stack([run(*row) for row in zip(*two)]), atol=1e-4)


def test_errors_say_what_was_wanted():
  args = OLD, MU, MASK, UNIT, 4
  for match, call in {
    "geometric, product": lambda: sequence_weight(*args, kind="sum"),
    "drop, cap": lambda: sequence_weight(*args, outside="clip"),
    "band is 2.0 .. 0.5": lambda: sequence_weight(*args, low=2.0, high=0.5),
    "threshold is -1": lambda: k3_reject(*args, threshold=-1),
    "delta is -1": lambda: off_policy_mask(OLD, MU, np.ones(4), MASK, UNIT, 4, delta=-1),
    "advantage_U has length 3, but num_units is 4": lambda: off_policy_mask(OLD, MU, np.ones(3), MASK, UNIT, 4, delta=1),
    "version_N has length 2": lambda: approximate_old_logp(OLD, MU, MASK, UNIT[:2], 3, 4),
    "weight_N has length 8 but mask_N has length 1": lambda: effective_sample_size(OLD, np.ones(1)),
    "ratio_N has length 8 but mask_N has length 1": lambda: chi2(OLD, np.ones(1)),
  }.items():
    with pytest.raises(ValueError, match=match):
      call()
