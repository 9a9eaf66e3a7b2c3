"""Our advantages and clipped surrogate against rlax's, on random numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from losses.advantages import gae
from losses.policy import clipped_loss
from losses.reduce import token_mean

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("bootstrap", [0.0, 0.7])
def test_gae_is_rlaxs_truncated_gae(lam, bootstrap):
  rng = np.random.default_rng(0)
  reward, value = rng.normal(size=12).astype(np.float32), rng.normal(size=12).astype(np.float32)
  theirs = rlax.truncated_generalized_advantage_estimation(
    jnp.array(reward), jnp.full(12, 0.97), lam, jnp.append(value, jnp.float32(bootstrap))
  )
  discount, last = np.full(12, 0.97), np.zeros(12)
  discount[-1], last[-1] = 0.0, 0.97 * bootstrap  # our last entry ends the episode; what follows comes in discounted
  ours, target = gae(reward, value, discount, lam, bootstrap_N=last)
  np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(target, theirs + value, rtol=1e-5, atol=1e-5)


def test_packed_gae_is_rlaxs_episode_by_episode():
  rng = np.random.default_rng(1)
  lengths = [3, 1, 7]
  n = sum(lengths)
  reward, value, mask = rng.normal(size=n), rng.normal(size=n), np.ones(n, bool)
  discount = np.ones(n)
  discount[np.cumsum(lengths) - 1] = 0
  theirs = [
    rlax.truncated_generalized_advantage_estimation(
      jnp.array(r, jnp.float32), jnp.ones(len(r)), 0.95, jnp.append(jnp.array(v, jnp.float32), 0.0)
    )
    for r, v in zip(np.split(reward, np.cumsum(lengths)[:-1]), np.split(value, np.cumsum(lengths)[:-1]))
  ]
  # screenshots put between the agent's tokens change nothing
  wide = lambda x, fill: np.insert(x, [1, 1, 5], fill)
  ours, _ = gae(wide(reward, 9.0), wide(value, np.nan), wide(discount, 1.0), 0.95, mask_N=wide(mask, False))
  np.testing.assert_allclose(np.asarray(ours)[wide(mask, False)], np.concatenate(theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("epsilon", [0.1, 0.2])
def test_clipped_loss_is_rlaxs_clipped_surrogate(epsilon):
  rng = np.random.default_rng(2)
  ratio = jnp.exp(0.3 * jnp.array(rng.normal(size=64), jnp.float32))
  push = jnp.array(rng.normal(size=64), jnp.float32)

  def ours(r):
    return token_mean(clipped_loss(r, push, clip_low=epsilon, clip_high=epsilon)[0], jnp.ones(64)).mean()

  theirs = lambda r: rlax.clipped_surrogate_pg_loss(r, push, epsilon)
  np.testing.assert_allclose(ours(ratio), theirs(ratio), rtol=1e-5)
  np.testing.assert_allclose(jax.grad(ours)(ratio), jax.grad(theirs)(ratio), rtol=1e-5, atol=1e-7)
