"""Objectives put together as the agents put them together: reductions to each other, and what must change nothing.

No expected number here is printed from the code: each test compares two ways to the same answer.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.segments import Total, segment_gather
from losses.advantages import group_advantages
from losses.kl import kl_estimate
from losses.policy import cispo_loss, clipped_loss, dppo_loss, gmpo_loss, sapo_loss
from losses.ratios import sequence_ratio, sequence_token_ratio, token_ratio, truncated_weight
from losses.reduce import episode_mean, token_mean

GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}
E, L = 4, 6  # episodes and tokens per episode


def batch(seed=0, drift=0.3):
  """A flat batch of E episodes in 2 groups: every array an objective reads. new: what is differentiated."""
  rng = np.random.default_rng(seed)
  old = -rng.exponential(size=E * L).astype(np.float32)
  reward = np.array([1.0, 0, 0, 1.0])
  return {
    "new": old + drift * rng.normal(size=E * L).astype(np.float32),
    "old": old,
    "ref": old + 0.2 * rng.normal(size=E * L).astype(np.float32),
    "mask": rng.random(E * L) < 0.7,
    "episode": np.repeat(np.arange(E), L),
    "push": np.asarray(group_advantages(reward, np.array([0, 0, 1, 1]), 2)),
  }


def grpo(b):
  ratio, push = token_ratio(b["new"], b["old"], b["mask"]), segment_gather(b["push"], b["episode"])
  loss, _ = clipped_loss(ratio, push, dual_clip=3.0)
  loss = truncated_weight(b["ref"], b["old"], b["mask"]) * loss + 0.04 * kl_estimate(b["new"], b["ref"], "k3")
  return token_mean(loss, b["mask"])


def gspo(b):
  ratio = sequence_ratio(b["new"], b["old"], b["mask"], b["episode"], len(b["push"]))
  some = jax.ops.segment_sum(jnp.asarray(b["mask"]) * 1, b["episode"], len(b["push"])) > 0
  return token_mean(clipped_loss(ratio, b["push"], **GSPO)[0], some)


def gspo_token(b):
  ratio = sequence_token_ratio(b["new"], b["old"], b["mask"], b["episode"], len(b["push"]))
  loss, _ = clipped_loss(ratio, segment_gather(b["push"], b["episode"]), **GSPO)
  return episode_mean(loss, b["mask"], b["episode"], len(b["push"]))


def others(b):
  """The rest of the family in one sum, so that the invariances below are checked on each of them."""
  mask, push = b["mask"], segment_gather(b["push"], b["episode"])
  ratio = token_ratio(b["new"], b["old"], mask)
  tokens = cispo_loss(b["new"], ratio, push, mask)[0] + sapo_loss(ratio, push) + dppo_loss(b["new"], b["old"], push, mask)[0]
  units = gmpo_loss(b["new"], b["old"], b["push"], mask, b["episode"], len(b["push"]))[0]
  return token_mean(tokens + segment_gather(units, b["episode"]), mask)


OBJECTIVES = {"grpo": grpo, "gspo": gspo, "gspo_token": gspo_token, "others": others}


@functools.partial(jax.jit, static_argnums=0)
def value_and_grad(objective, b):
  return jax.value_and_grad(lambda new: objective(b | {"new": new}).mean())(jnp.asarray(b["new"]))


def same(a, b, rtol=1e-5, atol=1e-7):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


# --- one objective reduces to another ---------------------------------------------------------------------------------


def test_gspo_on_one_token_episodes_is_the_token_form():
  b = batch(drift=3e-4)
  b |= {"mask": np.ones(E * L, bool), "episode": np.arange(E * L), "push": np.repeat(b["push"], L)}

  def token_form(b):
    return token_mean(clipped_loss(token_ratio(b["new"], b["old"], b["mask"]), b["push"], **GSPO)[0], b["mask"])

  same(value_and_grad(gspo, b), value_and_grad(token_form, b))
  grad = np.asarray(value_and_grad(gspo, b)[1])
  assert 0 < (grad == 0).sum() < E * L  # the band acts on some and not on all, so the comparison says something


@pytest.mark.parametrize("drift", [0.0, 5e-4, 0.3])
def test_gspo_token_with_one_push_per_episode_is_gspo_in_value_clip_and_gradient(drift):
  b = batch(drift=drift)
  same(value_and_grad(gspo, b), value_and_grad(gspo_token, b), rtol=1e-4)
  unit = sequence_ratio(b["new"], b["old"], b["mask"], b["episode"], E)
  token = sequence_token_ratio(b["new"], b["old"], b["mask"], b["episode"], E)
  clipped_E = np.asarray(clipped_loss(unit, b["push"], **GSPO)[1])
  clipped_N = np.asarray(clipped_loss(token, segment_gather(b["push"], b["episode"]), **GSPO)[1])
  assert np.array_equal(clipped_N[b["mask"]], clipped_E[b["episode"]][b["mask"]])


def test_gmpo_where_no_token_is_clipped_is_the_sequence_ratio_unclipped():
  b = batch(drift=0.05)
  loss, clipped = gmpo_loss(b["new"], b["old"], b["push"], b["mask"], b["episode"], E)
  ratio = sequence_ratio(b["new"], b["old"], b["mask"], b["episode"], E)
  assert not clipped.any()
  same(loss, -ratio * b["push"])


def test_an_infinite_band_is_importance_weighting():
  b = batch()

  def weighted(b):
    return token_mean(-jnp.exp(b["new"] - b["old"]) * segment_gather(b["push"], b["episode"]), b["mask"])

  def unbanded(b):
    ratio, push = token_ratio(b["new"], b["old"], b["mask"]), segment_gather(b["push"], b["episode"])
    return token_mean(clipped_loss(ratio, push, clip_low=np.inf, clip_high=np.inf)[0], b["mask"])

  same(value_and_grad(weighted, b), value_and_grad(unbanded, b))


def test_unchanged_weights_give_reinforces_gradient():
  b = batch(drift=0.0) | {"ref": batch()["old"]}

  def reinforce(b):
    return token_mean(-segment_gather(b["push"], b["episode"]) * b["new"], b["mask"])

  same(value_and_grad(grpo, b)[1], value_and_grad(reinforce, b)[1])
  # one whole group of equal length: its loss is 0 (a group's pushes cancel) while its gradient is not
  assert np.abs(value_and_grad(grpo, b)[1]).max() > 0.01


# --- what must change nothing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_order_of_tokens_changes_nothing(name):
  b, order = batch(), np.random.default_rng(1).permutation(E * L)
  mixed = {k: v if k == "push" else v[order] for k, v in b.items()}
  value, grad = value_and_grad(OBJECTIVES[name], b)
  same((value, grad[order]), value_and_grad(OBJECTIVES[name], mixed))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_order_of_episodes_changes_nothing(name):
  b, order = batch(), np.array([2, 0, 3, 1])
  renamed = b | {"episode": np.argsort(order)[b["episode"]], "push": b["push"][order]}
  same(value_and_grad(OBJECTIVES[name], b), value_and_grad(OBJECTIVES[name], renamed))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_padding_changes_nothing(name):
  b = batch()
  fill = {"new": 0.0, "old": 0.0, "ref": 0.0, "mask": False, "episode": 0, "push": 9.0}
  padded = {k: np.append(v, np.full(3 if k == "push" else 17, fill[k], v.dtype)) for k, v in b.items()}
  value, grad = value_and_grad(OBJECTIVES[name], b)
  padded_value, padded_grad = value_and_grad(OBJECTIVES[name], padded)
  same((value, grad), (padded_value, padded_grad[: E * L]))
  assert not padded_grad[E * L :].any()


@pytest.mark.parametrize("poison", [np.nan, 1e30, -1e30, np.inf])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_poison_at_masked_places_leaves_everything_bit_identical(name, poison):
  b = batch()
  b["mask"][b["episode"] == 3] = False  # an episode without a token: its push is poisoned too
  dirty = {k: np.where(b["mask"], b[k], np.float32(poison)) if k in ("new", "old", "ref") else b[k] for k in b}
  dirty["push"] = np.where(np.arange(E) == 3, np.float32(poison), b["push"])
  value, grad = value_and_grad(OBJECTIVES[name], b)
  dirty_value, dirty_grad = value_and_grad(OBJECTIVES[name], dirty)
  assert value == dirty_value and np.array_equal(grad, dirty_grad)
  assert np.isfinite(value) and not grad[~b["mask"]].any() and grad.any()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_jit_equals_eager_and_vmap_equals_a_loop(name):
  several = [batch(seed) for seed in range(3)]
  jitted = [value_and_grad(OBJECTIVES[name], b) for b in several]
  with jax.disable_jit():
    same(jitted[0], value_and_grad(OBJECTIVES[name], several[0]))
  stacked = jax.tree.map(lambda *x: np.stack(x), *several)
  same(jax.vmap(lambda b: value_and_grad(OBJECTIVES[name], b))(stacked), jax.tree.map(lambda *x: np.stack(x), *jitted))


@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.long), 5])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_change_neither_loss_nor_gradient(name, parts):
  # ten episodes, cut between episodes; totals are added while scanning over the parts, then divided once
  b = {k: np.concatenate([v, v, v[: len(v) // 2]]) for k, v in batch().items()} | {"episode": np.repeat(np.arange(10), L)}
  local = np.tile(np.repeat(np.arange(10 // parts), L), parts)  # each part counts its own episodes from 0

  def in_parts(b):
    pieces = {k: jnp.reshape(v, (parts, -1)) for k, v in (b | {"episode": local}).items()}
    return jax.lax.scan(lambda total, piece: (total + OBJECTIVES[name](piece), None), Total(0.0, 0.0), pieces)[0]

  same(value_and_grad(OBJECTIVES[name], b), value_and_grad(in_parts, b))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_devices_change_nothing(name):
  # totals psummed over a mapped axis, divided once: what a mesh does
  b = batch()
  shards = {k: v.reshape(E, -1) for k, v in b.items()} | {"episode": np.zeros((E, L), int)}

  def shard_mean(shard):
    return jax.lax.psum(OBJECTIVES[name](shard), "device").mean()

  spread = jax.jit(jax.vmap(shard_mean, axis_name="device"))
  same(spread(shards), jnp.full(E, value_and_grad(OBJECTIVES[name], b)[0]))
