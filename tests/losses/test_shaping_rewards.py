"""Reward shaping. Numbers from DAPO's section 4.1 (limit 20480, cache 4096) or by hand."""

import jax
import numpy as np
import pytest

from losses.rewards import soft_overlong_penalty


def test_dapo_lengths():
  # 0 up to 16384, -1 from 20480 on, and by hand half way between (18432): -0.5
  lengths = np.array([0, 16384, 18432, 20480, 30000])
  np.testing.assert_allclose(soft_overlong_penalty(lengths, 20480, 4096), [0, 0, -0.5, -1, -1], atol=1e-6)


def test_step_budget():
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
