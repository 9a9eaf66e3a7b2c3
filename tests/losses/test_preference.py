"""DPO and KTO on stored episodes. Numbers by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from losses.preference import dpo_loss, episode_logratio, kto_loss, kto_reference_point
from losses.reduce import token_mean


def near(a, b, atol=1e-5):
  np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=atol)


def test_episode_logratio_sums_agent_tokens():
  # episode 0: 0.4 + 0.2, episode 1: -0.2 (its second token is masked), episode 2 has none
  logp, ref = jnp.full(4, -1.0), np.array([-1.4, -1.2, -0.8, np.nan])
  run = lambda n, r: episode_logratio(n, r, np.array([1, 1, 1, 0]), np.array([0, 0, 1, 1]), 3)
  near(run(logp, ref), [0.6, -0.2, 0])
  weigh = jax.grad(lambda n, r: jnp.sum(run(n, r) * jnp.array([1.0, 5, 9])), argnums=(0, 1))(logp, jnp.array(ref))
  assert weigh[0].tolist() == [1, 1, 5, 0] and weigh[1].tolist() == [0] * 4


def test_dpo():
  # margins 1 (beta 1): -log sigmoid(1) = 0.313262; 0: ln 2; beta 0.1 and margin 5: softplus(-0.5) = 0.474077
  near(dpo_loss(np.array([0.5, 3.0]), np.array([-0.5, 3.0]), beta=1.0), [0.313262, np.log(2)])
  near(dpo_loss(np.array([2.0]), np.array([-3.0]), beta=0.1), [0.474077])
  # gradient: -0.1 sigmoid(-0.5) = -0.0377541 into chosen, its negative into rejected
  grads = jax.grad(lambda c, r: dpo_loss(c, r, beta=0.1).sum(), argnums=(0, 1))(jnp.array([2.0]), jnp.array([-3.0]))
  near(grads, [[-0.0377541], [0.0377541]])


def test_dpo_far_out_is_a_straight_line():
  pair = jnp.array([-1e4]), jnp.array([1e4])
  near(dpo_loss(*pair, beta=1.0), [2e4])
  assert jax.grad(lambda c: dpo_loss(c, pair[1], beta=1.0).sum())(pair[0]).tolist() == [-1.0]


def test_kto():
  # x - z = 1.5, beta 0.5: sigmoid(0.75) = 0.679179. Desirable: 1 - that = 0.320821. Not, weight 1.5: 1.5 x 0.679179
  run = lambda x, z=0.5: kto_loss(x, np.array([True, False]), z, beta=0.5, weight_neg=1.5)
  near(run(np.array([2.0, 2.0])), [0.320821, 1.018768])
  # slope 0.5 x 0.679179 x 0.320821 = 0.108947: down for the pass, up x 1.5 for the fail; the reference point is a number
  near(jax.grad(lambda x: run(x).sum())(jnp.array([2.0, 2.0])), [-0.108947, 0.163421])
  assert jax.grad(lambda z: run(jnp.ones(2), z).sum())(0.5) == 0
  near(kto_loss(np.array([0.5, 0.5]), np.array([1, 0]), 0.5, weight_pos=2.0), [1.0, 0.5])  # at the point: half the weight


def test_kto_reference_point():
  assert kto_reference_point(np.array([1.0, 3.0, np.nan]), np.array([1, 1, 0])) == 2.0
  assert kto_reference_point(np.array([-1.0, -3.0]), np.ones(2)) == 0.0  # a KL is never negative
  assert kto_reference_point(np.array([5.0]), np.zeros(1)) == 0.0
  assert jax.grad(lambda x: kto_reference_point(x, np.ones(2)))(jnp.array([1.0, 3.0])).tolist() == [0, 0]


@pytest.mark.parametrize("poison", [np.nan, 1e30, -np.inf])
def test_poison_at_pairs_that_are_not_there(poison):
  there = np.array([1, 1, 0])
  losses = {
    "dpo": lambda x, y: dpo_loss(x, y, beta=0.3),
    "kto": lambda x, y: kto_loss(x, np.array([1, 0, 1]), 0.2, beta=0.3),
  }
  for name, loss in losses.items():
    run = jax.value_and_grad(lambda x, y, f=loss: token_mean(f(x, y), there).mean(), argnums=(0, 1))
    clean = run(jnp.array([0.5, -1.0, 0.0]), jnp.array([0.1, 0.7, 0.0]))
    for y in (poison, 0.0):
      dirty = run(jnp.array([0.5, -1.0, poison]), jnp.array([0.1, 0.7, y]))
      assert clean[0] == dirty[0] and np.array_equal(clean[1], dirty[1]) and dirty[1][0][2] == dirty[1][1][2] == 0, name


def test_jit_vmap_and_dtype():
  x = np.random.default_rng(0).normal(size=(2, 3, 4))
  for run in (lambda c, r: dpo_loss(c, r), lambda c, r: kto_loss(c, r > 0, kto_reference_point(r, np.ones(4)))):
    near(jax.jit(jax.vmap(run))(*x), np.stack([run(*row) for row in zip(*x)]))
    assert run(jnp.zeros(4, jnp.bfloat16), jnp.zeros(4, jnp.bfloat16)).dtype == jnp.float32


def test_errors_say_what_was_wanted():
  for match, call in {
    "chosen_logratio_P has length 2 but rejected_logratio_P has length 1": lambda: dpo_loss(np.ones(2), np.ones(1)),
    "logratio_E has length 2 but desirable_E has length 1": lambda: kto_loss(np.ones(2), np.ones(1), 0.0),
    "beta is -0.1": lambda: dpo_loss(np.ones(2), np.ones(2), beta=-0.1),
    "beta is 0, wanted a number above 0": lambda: kto_loss(np.ones(2), np.ones(2), 0.0, beta=0),
    "weight_neg is -1": lambda: kto_loss(np.ones(2), np.ones(2), 0.0, weight_neg=-1),
  }.items():
    with pytest.raises(ValueError, match=match):
      call()
