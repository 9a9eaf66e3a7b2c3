"""Sums over an id axis. Expected numbers by hand unless a comment says otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.segments import (
  Total,
  segment_gather,
  segment_max,
  segment_mean,
  segment_min,
  segment_std,
  segment_sum,
  segment_total,
)

X = np.array([2.0, 6.0, 4.0, -7.0, 1.0], np.float32)
IDS = np.array([0, 1, 0, 1, 3])  # interleaved on purpose; segment 2 is empty


def test_total_adds_then_divides_once():
  # 3 tokens summing to 12 and 1 token of 0: 12 / 4 = 3; the mean of the two means would be 2
  total = Total(jnp.float32(12), jnp.float32(3)) + Total(jnp.float32(0), jnp.float32(1))
  assert total.mean() == 3.0
  assert sum([Total(1.0, 2.0), Total(2.0, 1.0), Total(3.0, 3.0)]) == Total(6.0, 6.0)


def test_total_keeps_a_count_between_zero_and_one():
  assert Total(jnp.float32(0.2), jnp.float32(0.5)).mean() == pytest.approx(0.4)


def test_total_with_count_zero_has_mean_zero_and_zero_gradient():
  mean = lambda s: Total(s, jnp.float32(0)).mean()
  assert mean(jnp.float32(0)) == 0.0
  assert jax.grad(mean)(jnp.float32(0)) == 0.0
  assert jax.grad(lambda c: Total(jnp.float32(0), c).mean())(jnp.float32(0)) == 0.0


def test_total_is_a_pytree_that_scans_and_psums():
  total, _ = jax.lax.scan(lambda t, x: (t + Total(x, 1.0), None), Total(0.0, 0.0), jnp.arange(5.0))
  assert (float(total.sum), float(total.count)) == (10.0, 5.0)
  summed = jax.vmap(lambda x: jax.lax.psum(Total(x, jnp.ones(())), "device"), axis_name="device")(jnp.arange(4.0))
  assert summed.sum.tolist() == [6.0] * 4 and summed.count.tolist() == [4.0] * 4


def test_total_refuses_to_concatenate_with_a_tuple():
  with pytest.raises(TypeError, match="Total"):
    Total(1.0, 1.0) + (1.0, 1.0)


def test_sum_mean_min_max_by_id():
  assert segment_sum(X, IDS, 4).tolist() == [6.0, -1.0, 0.0, 1.0]
  assert segment_mean(X, IDS, 4).tolist() == [3.0, -0.5, 0.0, 1.0]
  assert segment_min(X, IDS, 4).tolist() == [2.0, -7.0, 0.0, 1.0]
  assert segment_max(X, IDS, 4).tolist() == [4.0, 6.0, 0.0, 1.0]
  assert segment_total(X, IDS, 4).count.tolist() == [2.0, 2.0, 0.0, 1.0]


def test_std_population_and_sample():
  # (2, 4): deviations 1, 1 -> sqrt(2/2) = 1 and sqrt(2/1) = 1.4142; (6, -7): 6.5 and 9.1924; one entry: 0
  np.testing.assert_allclose(segment_std(X, IDS, 4), [1.0, 6.5, 0.0, 0.0], rtol=1e-6)
  np.testing.assert_allclose(segment_std(X, IDS, 4, ddof=1), [1.41421, 9.19239, 0.0, 0.0], rtol=1e-5)


def test_std_gradient_is_finite_where_the_spread_is_zero():
  grad = jax.grad(lambda x: segment_std(x, np.array([0, 0, 1]), 2).sum())(jnp.array([1.0, 1.0, 5.0]))
  assert grad.tolist() == [0.0, 0.0, 0.0]


def test_std_shows_a_nan_that_counts():
  assert np.isnan(segment_std(np.array([1.0, np.nan]), np.array([0, 0]), 1)[0])


@pytest.mark.parametrize("poison", [np.nan, 1e30, -np.inf])
@pytest.mark.parametrize("function", [segment_sum, segment_mean, segment_std])
def test_masked_entries_change_neither_value_nor_gradient(function, poison):
  mask = np.array([1, 1, 1, 1, 0, 0])
  ids = np.array([0, 1, 0, 1, 1, -5])  # an id at a masked place may be anything
  clean, dirty = np.append(X, 0.0).astype(np.float32), np.append(X[:4], [poison, poison]).astype(np.float32)
  loss = lambda x: jnp.sum(function(x, ids, 2, mask) * jnp.array([1.0, 3.0]))
  assert np.array_equal(function(clean, ids, 2, mask), function(dirty, ids, 2, mask))
  grad_clean, grad_dirty = jax.grad(loss)(clean), jax.grad(loss)(dirty)
  assert np.array_equal(grad_clean, grad_dirty)
  assert grad_dirty[4:].tolist() == [0.0, 0.0] and np.any(grad_dirty[:4] != 0)


def test_min_and_max_ignore_masked_entries():
  mask = np.array([1, 1, 0, 1, 0])
  assert segment_max(X, IDS, 4, mask).tolist() == [2.0, 6.0, 0.0, 0.0]
  assert segment_min(X, IDS, 4, mask).tolist() == [2.0, -7.0, 0.0, 0.0]


def test_order_of_entries_does_not_matter():
  order = np.array([3, 0, 4, 2, 1])
  for function in (segment_sum, segment_mean, segment_std, segment_max, segment_min):
    np.testing.assert_allclose(function(X[order], IDS[order], 4), function(X, IDS, 4), rtol=1e-6)


def test_gather_hands_each_entry_its_segment():
  assert segment_gather(np.array([10.0, 20.0]), np.array([1, 0, 1, -1, 2])).tolist() == [20.0, 10.0, 20.0, 0.0, 0.0]


def test_works_under_jit_and_vmap():
  batch = np.stack([X, X[::-1]])
  eager = [segment_std(row, IDS, 4) for row in batch]
  np.testing.assert_allclose(jax.jit(jax.vmap(lambda x: segment_std(x, IDS, 4)))(batch), eager, rtol=1e-6)


def test_wrong_lengths_are_named():
  with pytest.raises(ValueError, match="x_N has length 5 but segment_id_N has length 1"):
    segment_sum(X, np.array([0]), 4)
  with pytest.raises(ValueError, match="x_N has shape"):
    segment_sum(X[None], IDS, 4)
  with pytest.raises(ValueError, match="mask_N has length 4"):
    segment_sum(X, IDS, 4, np.ones(4))


def test_wrong_ids_are_refused():
  with pytest.raises(ValueError, match="segment id 3, wanted 0 .. 2"):
    segment_sum(X, IDS, 3)
  with pytest.raises(ValueError, match="integers"):
    segment_sum(X, IDS.astype(np.float32), 4)
  with pytest.raises(ValueError, match="num_segments is 0"):
    segment_sum(X, IDS, 0)


def test_traced_ids_outside_the_range_are_dropped_not_wrapped():
  # under jit an id cannot be looked at: -1 must not land in the last segment, 4 must not land in the first
  ids = jnp.array([0, -1, 0, 4, 3])
  assert jax.jit(lambda i: segment_sum(X, i, 4))(ids).tolist() == [6.0, 0.0, 0.0, 1.0]
