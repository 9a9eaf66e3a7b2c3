"""Numbers and gradients of another library, which every run has installed: optax's losses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from losses.policy import imitation_loss, reference_match_loss
from losses.preference import dpo_loss
from losses.reduce import token_mean
from losses.value import clipped_value_loss, critic_cross_entropy

RNG = np.random.default_rng(0)
N = 64


def same(ours, theirs, x, tol=1e-5):
  """Values and gradients of the sum."""
  np.testing.assert_allclose(ours(x), theirs(x), rtol=tol, atol=tol)
  np.testing.assert_allclose(jax.grad(lambda v: ours(v).sum())(x), jax.grad(lambda v: theirs(v).sum())(x), rtol=tol, atol=tol)


def test_copying_is_the_cross_entropy_of_the_tokens():
  """The mean over agent tokens, masked places left out, of softmax_cross_entropy_with_integer_labels."""
  logits, labels = RNG.normal(size=(N, 11)).astype(np.float32), RNG.integers(11, size=N)
  mask = RNG.random(N) < 0.6

  def ours(z):
    logp = jnp.take_along_axis(jax.nn.log_softmax(z), labels[:, None], axis=1)[:, 0]
    return token_mean(imitation_loss(jnp.where(mask, logp, jnp.nan), mask), mask).mean()

  theirs = lambda z: optax.losses.softmax_cross_entropy_with_integer_labels(z, labels)[mask].mean()
  np.testing.assert_allclose(ours(logits), theirs(logits), rtol=1e-6)
  np.testing.assert_allclose(jax.grad(ours)(logits), jax.grad(theirs)(logits), rtol=1e-5, atol=1e-8)


def test_a_critics_cross_entropy_from_logits():
  logit, label = 8 * RNG.normal(size=N).astype(np.float32), (RNG.random(N) < 0.5).astype(np.float32)
  same(lambda z: critic_cross_entropy(z, label), lambda z: optax.losses.sigmoid_binary_cross_entropy(z, label), logit)


def test_a_value_loss_whose_band_is_infinite_is_half_the_squared_error():
  value, old, target = RNG.normal(size=(3, N)).astype(np.float32)
  same(lambda v: clipped_value_loss(v, old, target, clip=jnp.inf), lambda v: optax.losses.l2_loss(v, target), value)


def test_a_preference_is_a_coin_that_should_fall_on_the_chosen_side():
  chosen, rejected = RNG.normal(size=(2, N)).astype(np.float32)
  same(
    lambda c: dpo_loss(c, rejected, beta=0.3),
    lambda c: optax.losses.sigmoid_binary_cross_entropy(0.3 * (c - rejected), jnp.ones(N)),
    chosen,
  )


def test_webrls_match_of_one_token_actions_is_a_squared_error():
  """With one token an action the loss is (beta log(pi / pi_ref) - A)^2."""
  logp, ref, push = -np.abs(RNG.normal(size=(3, N))).astype(np.float32)
  ids, mask = np.arange(N), np.ones(N, bool)
  ours = lambda x: reference_match_loss(x, ref, push, mask, ids, N, beta=0.5)
  same(ours, lambda x: optax.losses.squared_error(0.5 * (x - ref), push), logp)
