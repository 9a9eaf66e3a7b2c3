"""Policy objectives. Numbers from the lesson or by hand; each test says which."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from losses.policy import (
  advantage_weighted_loss,
  cispo_loss,
  clipped_loss,
  dppo_loss,
  dro_loss,
  gmpo_loss,
  imitation_loss,
  reference_match_code_loss,
  reference_match_loss,
  sapo_loss,
)
from losses.ratios import token_ratio
from losses.reduce import token_mean


def near(a, b, atol=1e-5):
  np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=atol)


def clip_slope(ratio, advantage, **bands):
  return jax.grad(lambda r: clipped_loss(r, jnp.array(advantage), **bands)[0].sum())(jnp.array(ratio))


def test_chapter4_clip_holds_a_token_pushed_up():
  loss, clipped = clipped_loss(np.array([1.5]), np.array([1.73]))
  near(loss, [-2.2144])  # min(2.595, 2.2144)
  assert clipped.tolist() == [True] and clip_slope([1.5], [1.73]).tolist() == [0]


def test_chapter4_clip_holds_a_token_pushed_down():
  loss, clipped = clipped_loss(np.array([0.30 / 0.50]), np.array([-0.58]))
  near(loss, [0.464])  # min(-0.348, -0.464)
  assert clipped.tolist() == [True] and clip_slope([0.6], [-0.58]).tolist() == [0]


def test_chapter4_clip_never_softens_a_push_down_on_a_token_that_grew():
  loss, clipped = clipped_loss(np.array([1.5]), np.array([-0.58]))
  near(loss, [0.87])  # min(-0.87, -0.74): the full penalty
  assert clipped.tolist() == [False]
  near(clip_slope([1.5], [-0.58]), [0.58])


def test_chapter5_how_far_one_update_can_lift_an_action():
  # 0.01 x 1.2 = 0.012 and x 1.28 = 0.0128 are the last chances that still move; 0.9 x 1.2 = 1.08: nothing holds a common action back
  moves = lambda old, new, high: float(
    jax.grad(lambda x: clipped_loss(jnp.exp(x - np.log(old)), np.ones(1), clip_high=high)[0][0])(jnp.log(jnp.array([new])))[0]
  )
  assert [moves(0.01, new, 0.2) != 0 for new in (0.01, 0.01199, 0.01201)] == [True, True, False]
  assert [moves(0.01, new, 0.28) != 0 for new in (0.01201, 0.01279, 0.01281)] == [True, True, False]
  assert all(moves(0.9, new, 0.2) != 0 for new in (0.95, 0.9999))


def test_clip_leaves_a_token_pushed_up_that_shrank():
  loss, clipped = clipped_loss(np.array([0.6]), np.array([1.73]))
  near(loss, [-1.038])  # by hand: min(0.6 x 1.73, 0.8 x 1.73) = 1.038
  assert clipped.tolist() == [False]
  near(clip_slope([0.6], [1.73]), [-1.73])


def test_clip_on_the_edge_and_with_no_push():
  ratio, push = np.array([1.28, 0.8, 9.0, 0.1], np.float32), np.array([1.0, -1.0, 0.0, 0.0])
  loss, clipped = clipped_loss(ratio, push)
  assert clipped.tolist() == [False] * 4
  near(loss, [-1.28, 0.8, 0, 0])
  near(clip_slope(ratio, push), [-1, 1, 0, 0])  # the whole gradient on the edge, not half of it


def test_the_clip_sees_the_stored_log_probability():
  # stored -1.0, now -0.5, push +1: ratio 1.6487, held at 1.28, gradient 0, clipped share 1
  run = lambda n: clipped_loss(token_ratio(n, np.array([-1.0]), np.ones(1)), np.ones(1))
  loss, clipped = run(jnp.array([-0.5]))
  near(loss, [-1.28])
  assert clipped.tolist() == [True] and jax.grad(lambda n: run(n)[0].sum())(jnp.array([-0.5])).tolist() == [0]


def test_episode_band():
  ratio, push = np.array([1.0005, 1.0002, 0.9996, 0.9998]), np.array([1, 1, -1, -1.0])
  loss, clipped = clipped_loss(ratio, push, clip_low=3e-4, clip_high=4e-4)
  assert clipped.tolist() == [True, False, True, False]
  near(loss, [-1.0004, -1.0002, 0.9997, 0.9998], atol=2e-7)


def test_dual_clip_bounds_a_push_down():
  # by hand: A = -1, ratio 10: plain loss 10, held at 3; ratio 2 is inside; A = +1 is not its business
  ratio, push = np.array([10.0, 2.0, 0.5]), np.array([-1.0, -1.0, 1.0])
  loss, clipped = clipped_loss(ratio, push, dual_clip=3.0)
  near(loss, [3.0, 2.0, -0.5])
  near(clip_slope(ratio, push, dual_clip=3.0), [0, 1, -1])
  assert clipped.tolist() == [False] * 3  # counted apart: the share is about the band
  near(clipped_loss(ratio, push)[0], [10.0, 2.0, -0.5])  # off unless asked for
  near(clipped_loss(np.array([0.5]), np.array([-1.0]), dual_clip=3.0)[0], [0.8])  # the lower edge still acts


def test_infinite_band_is_importance_weighting():
  rng = np.random.default_rng(0)
  ratio, push = np.exp(rng.normal(size=50)), rng.normal(size=50)
  loss, clipped = clipped_loss(ratio, push, clip_low=np.inf, clip_high=np.inf)
  near(loss, -ratio * push)
  assert not clipped.any()
  near(clip_slope(ratio, push, clip_low=np.inf, clip_high=np.inf), -push)


def test_advantages_get_no_gradient():
  ones, logp = jnp.ones(3), jnp.array([-1.0, -2.0, -0.1])
  unit = np.array([0, 0, 1])
  for loss in (
    lambda a: clipped_loss(ones, a)[0],
    lambda a: cispo_loss(logp, ones, a, ones)[0],
    lambda a: sapo_loss(ones, a),
    lambda a: dppo_loss(logp, logp, a, ones)[0],
    lambda a: gmpo_loss(logp, logp, a, ones, unit, 3)[0],
    lambda a: reference_match_loss(logp, logp, a, ones, unit, 3, beta=1.0),
    lambda a: imitation_loss(logp, ones, a),
    lambda a: advantage_weighted_loss(logp, a, ones, beta=1.0),
    lambda a: dro_loss(logp, logp, a, ones, beta=1.0),
  ):
    assert jax.grad(lambda a, f=loss: f(a).sum())(jnp.array([1.0, -1.0, 0.5])).tolist() == [0, 0, 0]


def test_cispo_caps_the_weight_and_keeps_the_gradient():
  # by hand: weights 2, 5 (7 is capped); loss = -w A log pi
  logp, ratio, push = jnp.array([-1.0, -2.0, -3.0]), np.array([2.0, 7.0, 1.0]), np.array([1.0, -1.0, 1.0])
  loss, capped = cispo_loss(logp, ratio, push, np.array([1, 1, 0]))
  near(loss, [2.0, -10.0, 0.0])
  assert capped.tolist() == [False, True, False]
  grad = jax.grad(lambda x: cispo_loss(x, ratio, push, np.array([1, 1, 0]))[0].sum())(logp)
  near(grad, [-2.0, 5.0, 0.0])


def test_sapo_gate():
  # by hand: at ratio 1 the gate is 2 / tau (2, and 2 / 1.05 = 1.90476); at ratio 2 with tau 1 it is 4 sigmoid(1) = 2.92423
  near(sapo_loss(np.array([1.0, 1.0, 2.0]), np.array([1.0, -1.0, 1.0])), [-2.0, 1.90476, -2.92423])
  grad = jax.grad(lambda r: sapo_loss(r, np.array([1.0, -1.0, 1.0])).sum())(jnp.array([1.0, 1.0, 2.0]))
  near(grad, [-1.0, 1.0, -0.786448])  # slope 1 at ratio 1, 4 s (1 - s) = 0.786448 at 2


def test_gmpo_clips_tokens_before_the_geometric_mean():
  # unit 0, A = +1: log-ratios 0.8 -> 0.4 and -0.8 kept: e^-0.2; unit 1, A = -1: 0.8 kept and -0.8 -> -0.4: e^0.2
  logs, unit = jnp.array([0.8, -0.8, 0.8, -0.8]), np.array([0, 0, 1, 1])
  run = lambda n: gmpo_loss(n - 1, np.full(4, -1.0), np.array([1.0, -1.0, 7.0]), np.ones(4), unit, 3)
  loss, clipped = run(logs)
  near(loss, [-np.exp(-0.2), np.exp(0.2), 0.0])  # a unit without tokens counts 0
  assert clipped.tolist() == [True, False, False, True]
  near(jax.grad(lambda n: run(n)[0].sum())(logs), [0, -np.exp(-0.2) / 2, np.exp(0.2) / 2, 0])


def test_dppo_drops_by_probability_not_by_ratio():
  # by hand: 0.01 -> 0.05 is a ratio of 5 but moves 0.04: kept; 0.5 -> 0.75 is a ratio of 1.5 but moves 0.25: dropped
  old, new = np.log([0.01, 0.5, 0.75, 0.5, 0.5]), jnp.log(jnp.array([0.05, 0.75, 0.5, 0.75, 0.25]))
  push = np.array([1.0, 1.0, -1.0, -1.0, 1.0])
  loss, dropped = dppo_loss(new, old, push, np.ones(5))
  assert dropped.tolist() == [False, True, True, False, False]  # up too far, down too far; moving back is never dropped
  near(loss, [-5 * np.log(0.05), 0, 0, 1.5 * np.log(0.75), -0.5 * np.log(0.25)], atol=1e-4)
  grad = jax.grad(lambda n: dppo_loss(n, old, push, np.ones(5))[0].sum())(new)
  near(grad, [-5, 0, 0, 1.5, -0.5])


def test_dppo_kl_threshold():
  # by hand: KL(0.5 || 0.75) = 0.5 ln(0.5/0.75) + 0.5 ln(0.5/0.25) = 0.1438
  args = np.log([0.75]), np.log([0.5]), np.ones(1), np.ones(1)
  assert dppo_loss(*args, divergence="kl", high=0.143)[1].tolist() == [True]
  assert dppo_loss(*args, divergence="kl", high=0.145)[1].tolist() == [False]
  sure = dppo_loss(np.zeros(1), np.log([0.5]), np.ones(1), np.ones(1), divergence="kl")
  assert np.isfinite(sure[0][0]) and sure[1].tolist() == [True]  # probability exactly 1
  fell = dppo_loss(np.log([0.25]), np.zeros(1), -np.ones(1), np.ones(1), divergence="kl")  # from exactly 1: KL = ln 4
  assert np.isfinite(fell[0][0]) and fell[1].tolist() == [True]


def test_dppo_caps_the_ratio():
  # ratio e^5 = 148 at a tiny probability: the weight is 20
  grad = jax.grad(lambda n: dppo_loss(n, np.array([-15.0]), np.ones(1), np.ones(1))[0].sum())(jnp.array([-10.0]))
  near(grad, [-20.0])


def test_imitation():
  logp, mask = jnp.log(jnp.array([0.5, 0.25, 0.1])), np.array([1, 1, 0])
  near(imitation_loss(logp, mask), [np.log(2), np.log(4), 0])
  near(imitation_loss(logp, mask, np.array([1.0, 0.0, 1.0])), [np.log(2), 0, 0])  # chapter 2: dropped steps are left out


def test_imitation_with_digirls_probability_clip():
  # DigiRL's code: -log clip(p, 0.001, 0.99)
  logp = jnp.log(jnp.array([0.9999, 0.5, 0.0001]))
  near(imitation_loss(logp, np.ones(3), clip=(0.001, 0.99)), [-np.log(0.99), np.log(2), -np.log(0.001)], atol=1e-4)
  grad = jax.grad(lambda x: imitation_loss(x, np.ones(3), clip=(0.001, 0.99)).sum())(logp)
  near(grad, [0, -1, 0])


def test_reference_match():
  # by hand, beta 0.5: step 0 moved by 0.4 + 0.2 = 0.6 -> (0.3 - 1)^2 = 0.49; step 1 by -0.2 -> (-0.1 - 0)^2 = 0.01
  logp, ref, step = jnp.array([-1.0, -1.0, -1.0, -1.0]), np.array([-1.4, -1.2, -0.8, 5.0]), np.array([0, 0, 1, 1])
  run = lambda n, **kw: reference_match_loss(n, ref, np.array([1.0, 0.0, 3.0]), np.array([1, 1, 1, 0]), step, 3, beta=0.5, **kw)
  near(run(logp), [0.49, 0.01, 0.0])
  near(jax.grad(lambda n: run(n).sum())(logp), [-0.7, -0.7, -0.1, 0])  # 2 x 0.5 x (-0.7), 2 x 0.5 x (-0.1)
  near(run(logp, average="mean"), [(0.15 - 1) ** 2, 0.01, 0.0])


def test_reference_match_is_least_where_the_drift_is_the_advantage():
  # chapter 5: beta x log(new / reference) is made to match the advantage: at log-ratio A / beta loss and gradient are 0
  run = lambda x: reference_match_loss(x, np.zeros(1), np.array([0.3]), np.ones(1), np.zeros(1, int), 1, beta=0.5)[0]
  value, grad = jax.value_and_grad(run)(jnp.array([0.6]))
  assert float(value) == pytest.approx(0, abs=1e-12) and float(grad[0]) == pytest.approx(0, abs=1e-6)
  assert jax.grad(run)(jnp.array([0.5]))[0] < 0 < jax.grad(run)(jnp.array([0.7]))[0]


def test_advantage_weighted():
  # beta 0.5: weights e^(ln 2) = 2, 1/2, e^200 held at 20, and a masked token
  logp, push = jnp.full(4, -1.0), np.array([0.5 * np.log(2), -0.5 * np.log(2), 100.0, 100.0])
  run = lambda n, **kw: advantage_weighted_loss(n, push, np.array([1, 1, 1, 0]), beta=0.5, **kw)
  near(run(logp), [2, 0.5, 20, 0])
  near(jax.grad(lambda n: run(n).sum())(logp), [-2, -0.5, -20, 0])
  near(run(logp, cap=1.0), [1, 0.5, 1, 0])
  near(advantage_weighted_loss(logp, push, np.ones(4), beta=np.inf), imitation_loss(logp, np.ones(4)))  # plain copying


def test_dro():
  # beta 0.5, A 1, log-ratio 0.4: -(-1 - 0.25 x 0.16) = 1.04; slope -1 + 0.5 x 0.4 = -0.8; a masked token
  run = lambda n: dro_loss(n, np.array([-1.4, 0.0]), np.ones(2), np.array([1, 0]), beta=0.5)
  near(run(jnp.array([-1.0, -5.0])), [1.04, 0])
  near(jax.grad(lambda n: run(n).sum())(jnp.array([-1.0, -5.0])), [-0.8, 0])


def test_dro_pulls_where_reference_match_pulls():
  # one token a unit, mu for reference: gradients differ by the constant 2 beta only, so both rest at log(pi / mu) = A / beta
  logp, mu, push = jnp.array([-1.0, -2.0, -0.3]), np.array([-1.3, -1.1, -0.9]), np.array([1.0, -0.5, 0.3])
  slope = jax.grad(lambda n: dro_loss(n, mu, push, np.ones(3), beta=0.5).sum())(logp)
  match = jax.grad(lambda n: reference_match_loss(n, mu, push, np.ones(3), np.arange(3), 3, beta=0.5).sum())(logp)
  near(slope, match / (2 * 0.5))
  near(slope[2], 0)  # -0.3 + 0.9 = 0.6 = 0.3 / 0.5


def test_a_gmpo_band_is_in_logs():
  # e^0.4 = 1.4918: a ratio of 1.49 is inside, 1.50 is clipped, and the other way 1 / 1.49 and 1 / 1.50
  run = lambda r, a: bool(gmpo_loss(np.log([r]) - 1, -np.ones(1), np.array([a]), np.ones(1), np.zeros(1, int), 1)[1][0])
  assert [run(1.49, 1.0), run(1.50, 1.0), run(1 / 1.49, -1.0), run(1 / 1.50, -1.0)] == [False, True, False, True]


def test_reference_match_code():
  # by hand, unit 0: x = 0.1, unsure, beta 1: gap -0.9 -> 0.405. Unit 1: sure, beta 5, x = 0.1: gap -0.5 -> 0.125 / 5.
  # Unit 2 is negative: 0. Unit 3: x = 2, beta = |1 / 2|: gap 0 -> 0
  ref = np.log([0.5, 0.85, 0.5, 0.1])
  logp = jnp.array(ref + [0.1, 0.1, 0.1, 2.0])
  args = ref, np.array([1.0, 1.0, -0.6, 1.0]), np.ones(4), np.arange(4), 4
  near(reference_match_code_loss(logp, *args), [0.405, 0.025, 0, 0])
  near(jax.grad(lambda n: reference_match_code_loss(n, *args).sum())(logp), [-0.9, -0.5, 0, 0])
  near(reference_match_code_loss(jnp.array(ref), *args)[0], 0.5)  # no drift yet: no division by it, 0.5 x 1^2


BANDED = {
  "clipped": lambda n, old, push, mask, unit: clipped_loss(token_ratio(n, old, mask), push)[0],
  "sapo": lambda n, old, push, mask, unit: sapo_loss(token_ratio(n, old, mask), push),
  "cispo": lambda n, old, push, mask, unit: cispo_loss(n, token_ratio(n, old, mask), push, mask)[0],
  "dppo": lambda n, old, push, mask, unit: dppo_loss(n, old, push, mask)[0],
  "dppo_kl": lambda n, old, push, mask, unit: dppo_loss(n, old, push, mask, divergence="kl")[0],
  "gmpo": lambda n, old, push, mask, unit: gmpo_loss(n, old, push, mask, unit, len(push))[0],
}


@pytest.mark.parametrize("name", BANDED)
def test_at_ratio_one_the_gradient_is_reinforces(name):
  # unchanged weights: d loss / d log pi = -A at every agent token, 0 at others (one token per unit for gmpo)
  logp, push, mask = jnp.array([-0.3, -1.0, -2.0, -4.0]), jnp.array([1.73, -0.58, 0.0, 1.0]), np.array([1, 1, 1, 0])
  near(jax.grad(lambda n: BANDED[name](n, logp, push, mask, np.arange(4)).sum())(logp), [-1.73, 0.58, 0.0, 0.0])


@pytest.mark.parametrize("poison", [np.nan, 1e30, -np.inf])
@pytest.mark.parametrize("name", [*BANDED, "imitation", "match", "match_code"])
def test_poison_at_masked_places(name, poison):
  mask, unit = np.array([1, 0, 1, 0, 1]), np.array([0, 0, 1, 1, 4])
  new, old = np.array([-1.0, -1.0, -2.0, -2.0, -0.5]), np.array([-1.5, -1.0, -1.8, -2.0, -0.5])
  push = np.array([1.0, 0.5, -1.0, 0.5, 0.7])
  functions = BANDED | {
    "imitation": lambda n, old, push, mask, unit: imitation_loss(n, mask, push, clip=(1e-3, 0.99)),
    "match": lambda n, old, push, mask, unit: reference_match_loss(n, old, push, mask, unit, 5, beta=0.3),
    "match_code": lambda n, old, push, mask, unit: reference_match_code_loss(n, old, push, mask, unit, 5),
  }
  per_unit = name in ("gmpo", "match", "match_code")
  counts = np.array([1, 1, 0, 0, 1]) if per_unit else mask  # units 2 and 3 have no tokens

  def loss(n, old, push):  # what losses.reduce does with it
    return jnp.sum(jnp.where(counts, functions[name](n, old, push, mask, unit), 0.0))

  dirty = [np.where(m, x, poison) for m, x in ((mask, new), (mask, old), (counts, push))]
  value, grad = jax.value_and_grad(loss)(jnp.array(new, jnp.float32), old, push)
  dirty_value, dirty_grad = jax.value_and_grad(loss)(jnp.array(dirty[0], jnp.float32), *dirty[1:])
  assert value == dirty_value and np.array_equal(grad, dirty_grad)
  assert dirty_grad[1] == dirty_grad[3] == 0 and np.any(grad != 0)


@pytest.mark.parametrize("function", [lambda r, a: clipped_loss(r, a)[0], sapo_loss])
def test_poisoned_advantage_under_a_mask_costs_the_ratio_no_gradient(function):
  # the ratio is finite, the push is not, and only the reduction knows the mask: 0 x NaN must not come back
  loss = lambda r: token_mean(function(r, np.array([1.0, np.nan])), np.array([1, 0])).mean()
  grad = jax.grad(loss)(jnp.ones(2))
  assert np.isfinite(grad).all() and grad[0] != 0 and grad[1] == 0


def test_a_nan_that_counts_stays_visible_in_the_loss():
  assert np.isnan(clipped_loss(np.array([1.0]), np.array([np.nan]))[0][0])
  assert np.isnan(clipped_loss(np.array([np.nan]), np.array([1.0]))[0][0])


def test_jit_equals_eager_and_bands_may_be_traced():
  ratio, push = np.array([1.5, 0.6, 1.0, 10.0]), np.array([1.73, -0.58, 1.0, -1.0])
  eager = clipped_loss(ratio, push, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
  traced = jax.jit(lambda low, high, c: clipped_loss(ratio, push, clip_low=low, clip_high=high, dual_clip=c))(0.2, 0.28, 3.0)
  near(traced[0], eager[0])
  assert traced[1].tolist() == eager[1].tolist()


def test_bfloat16_in_float32_out():
  half = jnp.array([-1.0, -2.0], jnp.bfloat16)
  for name, function in BANDED.items():
    assert function(half, half, half, np.ones(2), np.arange(2)).dtype == jnp.float32, name


def test_errors_say_what_was_wanted():
  with pytest.raises(ValueError, match="ratio_N has length 8 but advantage_N has length 1"):
    clipped_loss(np.ones(8), np.ones(1))
  with pytest.raises(ValueError, match="rank 1"):
    clipped_loss(np.ones((8, 8)), np.ones(8))
  with pytest.raises(ValueError, match="clip_low"):
    clipped_loss(np.ones(1), np.ones(1), clip_low=-0.2)
  with pytest.raises(ValueError, match="dual_clip"):
    clipped_loss(np.ones(1), np.ones(1), dual_clip=0.5)
  with pytest.raises(ValueError, match="advantage_U has length 3, but num_units is 2"):
    gmpo_loss(np.zeros(2), np.zeros(2), np.ones(3), np.ones(2), np.arange(2), 2)
  with pytest.raises(ValueError, match="beta"):
    reference_match_loss(np.zeros(2), np.zeros(2), np.ones(2), np.ones(2), np.arange(2), 2, beta=0.0)
  with pytest.raises(ValueError, match="beta and cap are 0 and 20.0"):
    advantage_weighted_loss(np.zeros(2), np.ones(2), np.ones(2), beta=0)
  with pytest.raises(ValueError, match="beta is -1"):
    dro_loss(np.zeros(2), np.zeros(2), np.ones(2), np.ones(2), beta=-1)
