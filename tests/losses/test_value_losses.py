"""The critic's losses and its report card. Numbers by hand unless a test says otherwise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from losses.reduce import token_mean
from losses.value import (
  bounded_value,
  brier_score,
  calibration,
  clipped_value_loss,
  critic_cross_entropy,
  explained_variance,
  return_moments,
)


def test_chapter2_cross_entropy_punishes_a_confident_miss_hardest():
  # V = 0.9 (logit ln 9): right costs -ln 0.9 = 0.105, wrong -ln 0.1 = 2.303; V = 0.5 costs ln 2 either way
  loss = critic_cross_entropy(np.log([9.0, 9.0, 1.0, 1.0]), np.array([1.0, 0.0, 1.0, 0.0]))
  np.testing.assert_allclose(loss, [0.10536, 2.30259, 0.69315, 0.69315], atol=1e-5)


def test_cross_entropy_equals_the_lessons_formula():
  logit, label = np.linspace(-4, 4, 9), np.array([0, 1, 0, 1, 0.5, 1, 0, 1, 0.25])
  p = 1 / (1 + np.exp(-logit))
  np.testing.assert_allclose(critic_cross_entropy(logit, label), -(label * np.log(p) + (1 - label) * np.log(1 - p)), atol=1e-6)


def test_cross_entropy_gradient_is_guess_minus_label_even_far_out():
  logit, label = jnp.array([0.0, 1000.0, -1000.0, 1000.0]), np.array([1.0, 0.0, 1.0, 1.0])
  np.testing.assert_allclose(critic_cross_entropy(logit, label), [0.69315, 1000, 1000, 0], atol=1e-5)
  grad = jax.grad(lambda x: critic_cross_entropy(x, label).sum())(logit)
  np.testing.assert_allclose(grad, [-0.5, 1, -1, 0], atol=1e-6)


def test_clipped_value_loss_by_hand():
  # R = 1, old 0, clip 0.5. v = 0.2 inside: 0.5 x 0.64. v = 0.9 moved past 0.5 toward R: 0.5 x 0.25, held, no gradient.
  # v = -0.9 moved away past -0.5: plain 0.5 x 3.61 is larger, full gradient -1.9
  value, old, target = jnp.array([0.2, 0.9, -0.9]), np.zeros(3), np.ones(3)
  np.testing.assert_allclose(clipped_value_loss(value, old, target), [0.32, 0.125, 1.805], atol=1e-6)
  grad = jax.grad(lambda v: clipped_value_loss(v, old, target).sum())(value)
  np.testing.assert_allclose(grad, [-0.8, 0, -1.9], atol=1e-6)


def test_clipped_value_loss_with_an_infinite_clip_is_squared_error():
  np.testing.assert_allclose(clipped_value_loss(np.array([3.0]), np.zeros(1), np.ones(1), clip=np.inf), [2.0], atol=1e-6)


def test_explained_variance_by_hand():
  # R = 0, 0, 1, 1 (variance 0.25). V = R: 1. V = 0.5: 0. V = R + 3: 1, a constant offset is not spread. V = 1 - R:
  # errors -1, -1, 1, 1 of variance 1: 1 - 4 = -3. V = 0.5 R: errors 0, 0, .5, .5 of variance 1/16: 0.75
  target = np.array([0, 0, 1, 1.0])
  cases = {"same": (target, 1), "mean": (target * 0 + 0.5, 0), "offset": (target + 3, 1), "anti": (1 - target, -3)}
  for name, (value, want) in (cases | {"half": (target / 2, 0.75)}).items():
    got, defined = explained_variance(value, target, np.ones(4))
    assert float(got) == pytest.approx(want, abs=1e-6) and bool(defined), name


def test_explained_variance_is_of_the_whole_not_a_mean_of_parts():
  # part A: returns 0, 0, part B: 1, 1, both guessed right. Each alone has no spread; together it is 1
  part = lambda x: return_moments(np.full(2, x), np.full(2, x), np.ones(2))
  assert not part(0.0).explained_variance()[1] and not part(1.0).explained_variance()[1]
  value, defined = (part(0.0) + part(1.0)).explained_variance()
  assert float(value) == 1.0 and bool(defined)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_explained_variance_in_parts_equals_the_whole(parts):
  rng = np.random.default_rng(0)
  target, mask = rng.random(20) + 100, rng.random(20) < 0.7  # far from 0: sums of squares would cancel in float32
  value = target + rng.normal(size=20) * 0.1
  pieces = [return_moments(*piece) for piece in zip(*(np.array_split(x, parts) for x in (value, target, mask)))]
  whole = 1 - np.var((target - value)[mask]) / np.var(target[mask])
  assert float(functools.reduce(lambda a, b: a + b, pieces).explained_variance()[0]) == pytest.approx(whole, abs=2e-3)


@pytest.mark.parametrize("target", [np.ones(7), np.full(7, 0.7)])  # seven times 0.7: their float32 spread is not 0
def test_explained_variance_is_undefined_where_returns_are_equal(target):
  value, defined = explained_variance(np.linspace(0.1, 0.9, 7), target, np.ones(7))
  assert float(value) == 0.0 and not defined


def test_explained_variance_is_never_nan():
  for value, target, mask in (
    (np.ones(2), np.array([0.0, 1.0]), np.zeros(2)),
    (np.array([np.nan, 0.0]), np.array([0.0, 1.0]), np.ones(2)),
    (np.zeros(2), np.array([np.nan, 1.0]), np.ones(2)),
    (np.zeros(0), np.zeros(0), np.zeros(0)),
  ):
    got, defined = explained_variance(value, target, mask)
    assert float(got) == 0.0 and not defined


@pytest.mark.parametrize("poison", [np.nan, 1e30, np.inf])
def test_poison_at_masked_places(poison):
  mask, value, target = np.array([1, 1, 0]), np.array([0.2, 0.9, 0.0]), np.array([0.0, 1.0, 0.0])
  losses = {
    "cross_entropy": lambda v, old, r: critic_cross_entropy(v, r),
    "clipped": lambda v, old, r: clipped_value_loss(v, old, r),
  }
  for name, loss in losses.items():
    run = lambda v, old, r, f=loss: token_mean(f(v, old, r), mask).mean()
    clean = jax.value_and_grad(run)(jnp.array(value), value, target)
    dirty = jax.value_and_grad(run)(*(jnp.where(mask, x, poison) for x in (value, value, target)))
    assert clean[0] == dirty[0] and np.array_equal(clean[1], dirty[1]) and dirty[1][2] == 0, name
  dirty = explained_variance(np.where(mask, value, poison), np.where(mask, target, poison), mask)
  assert dirty == explained_variance(value, target, mask)


def test_labels_and_returns_get_no_gradient():
  ones = jnp.ones(2)
  assert jax.grad(lambda y: critic_cross_entropy(ones, y).sum())(ones * 0.5).tolist() == [0, 0]
  assert jax.grad(lambda r: clipped_value_loss(ones, ones, r).sum())(ones * 0.5).tolist() == [0, 0]
  assert jax.grad(lambda o: clipped_value_loss(ones, o, ones * 2).sum())(ones * 0.1).tolist() == [0, 0]


def test_jit_vmap_and_dtype():
  rng = np.random.default_rng(0)
  value, old, target = rng.normal(size=(3, 2, 6))
  for run in (clipped_value_loss, lambda v, o, t: critic_cross_entropy(v, jax.nn.sigmoid(t))):
    np.testing.assert_allclose(
      jax.jit(jax.vmap(run))(value, old, target), np.stack([run(*x) for x in zip(value, old, target)]), rtol=1e-5, atol=1e-6
    )
  half = jnp.zeros(2, jnp.bfloat16)
  assert critic_cross_entropy(half, half).dtype == clipped_value_loss(half, half, half).dtype == jnp.float32
  ev = jax.jit(lambda v, t: explained_variance(v, t, np.ones(6)))(value[0], target[0])
  assert float(ev[0]) == pytest.approx(float(explained_variance(value[0], target[0], np.ones(6))[0]), abs=1e-5)


def test_errors_name_both_lengths():
  with pytest.raises(ValueError, match="logit_N has length 3 but label_N has length 1"):
    critic_cross_entropy(np.zeros(3), np.zeros(1))
  with pytest.raises(ValueError, match="mask_N has length 2"):
    explained_variance(np.zeros(3), np.zeros(3), np.ones(2))
  with pytest.raises(ValueError, match="clip"):
    clipped_value_loss(np.zeros(1), np.zeros(1), np.zeros(1), clip=0.0)


def test_bounded_value():
  # sigmoid(0) = 1/2, sigmoid(ln 3) = 3/4
  np.testing.assert_allclose(bounded_value(np.array([0.0, np.log(3), 1e4, -1e4])), [0.5, 0.75, 1, 0], atol=1e-6)
  np.testing.assert_allclose(bounded_value(np.array([0.0, np.log(3), 1e4, -1e4]), -1.0, 1.0), [0, 0.5, 1, -1], atol=1e-6)
  grad = jax.grad(lambda x: bounded_value(x, -1.0, 1.0).sum())(jnp.array([np.log(3), 1e4, np.nan]))
  np.testing.assert_allclose(grad, [2 * 0.75 * 0.25, 0, 0], atol=1e-6)
  with pytest.raises(ValueError, match="the range is 1.0 .. 0.0"):
    bounded_value(np.zeros(1), 1.0, 0.0)


def test_cross_entropy_trains_a_bounded_head_to_the_mean_return():
  # returns -1, 1, 1 in (-1, 1): labels 0, 1, 1; the gradient of the mean is 0 where the guess is 1/3, logit ln 2
  label = (np.array([-1.0, 1.0, 1.0]) + 1) / 2
  slope = jax.grad(lambda x: critic_cross_entropy(jnp.full(3, x), label).sum())(jnp.log(2.0))
  assert float(slope) == pytest.approx(0, abs=1e-6)
  assert float(bounded_value(jnp.log(2.0), -1.0, 1.0)) == pytest.approx(1 / 3, abs=1e-6)


def test_brier_score():
  # (0.01 + 0.04 + 0.25) / 3; parts add up; a masked guess does not count
  value, label = np.array([0.9, 0.2, 0.5, np.nan]), np.array([1.0, 0, 1, np.nan])
  assert float(brier_score(value, label, np.array([1, 1, 1, 0])).mean()) == pytest.approx(0.1)
  parts = brier_score(value[:1], label[:1], np.ones(1)) + brier_score(value[1:], label[1:], np.array([1, 1, 0]))
  assert float(parts.mean()) == pytest.approx(0.1)


def test_calibration():
  # two bins: guesses 0.2, 0.4 with outcomes 0, 1 and 0.6, 1.0 with 1, 1: gaps 0.2 and 0.2 over four entries
  value, label = np.array([0.2, 0.4, 0.6, 1.0, np.nan]), np.array([0, 1, 1, 1, np.nan])
  got = calibration(value, label, np.array([1, 1, 1, 1, 0]), 2)
  np.testing.assert_allclose(got.curve(), [[0.3, 0.8], [0.5, 1.0]], atol=1e-6)
  assert float(got.error()) == pytest.approx(0.2) and got.size.tolist() == [2, 2]
  # over and under in different bins do not cancel: 0.75 each
  assert float(calibration(np.array([0.25, 0.75]), np.array([1.0, 0.0]), np.ones(2)).error()) == pytest.approx(0.75)


def test_calibration_in_parts_empty_bins_and_jit():
  rng = np.random.default_rng(0)
  value, label, mask = rng.random(40), rng.random(40) < 0.5, rng.random(40) < 0.8
  whole = jax.jit(calibration, static_argnums=3)(value, label, mask, 10)
  parts = functools.reduce(lambda a, b: a + b, [calibration(*x) for x in zip(*(np.split(y, 5) for y in (value, label, mask)))])
  np.testing.assert_allclose(parts, whole, atol=1e-5)
  gaps = [abs((value - label)[mask & (np.floor(value * 10) == k)].sum()) for k in range(10)]
  assert float(whole.error()) == pytest.approx(sum(gaps) / mask.sum(), abs=1e-5)
  nothing = calibration(value, label, np.zeros(40))
  assert float(nothing.error()) == 0 and not np.isnan(nothing.curve()).any()
  with pytest.raises(ValueError, match="num_bins is 0"):
    calibration(value, label, mask, 0)
  with pytest.raises(ValueError, match="value_N has length 40 but label_N has length 1"):
    brier_score(value, np.ones(1), mask)
  with pytest.raises(TypeError, match="Calibration"):
    nothing + whole.size
