"""What must change nothing, for every objective of tests/losses/objectives.py at once. Two ways to the same answer each time."""

import jax
import numpy as np
import pytest
from objectives import EMPTY, batch, means, split, totals_and_grads

LEARNED = ("new", "value")
TOKENS = ("new", "value", "old", "mu", "ref", "push", "label", "return_", "old_value")


@jax.jit
def everything(b):
  theta = {k: b[k] for k in LEARNED}
  return means(*totals_and_grads(theta, {k: v for k, v in b.items() if k not in LEARNED}))


def floats(b):
  return {k: np.float32(v) if np.asarray(v).dtype == np.float64 else v for k, v in b.items()}


@pytest.fixture(scope="module")
def plain():
  b = floats(batch())
  return b, jax.tree.map(np.asarray, everything(b))


def same(a, b, rtol=2e-5, atol=1e-6):
  flat = lambda tree: {jax.tree_util.keystr(k): v for k, v in jax.tree_util.tree_leaves_with_path(tree)}
  a, b = flat(a), flat(b)
  for key in a:
    np.testing.assert_allclose(a[key], b[key], rtol=rtol, atol=atol, err_msg=key)


def test_gradients_are_exactly_zero_off_mask_and_not_everywhere(plain):
  b, (value, grad) = plain
  for name, leaves in grad.items():
    assert np.isfinite(value[name]), name
    assert not any(leaf[~b["mask"]].any() for leaf in leaves.values()), name
    assert any(leaf.any() for leaf in leaves.values()), name


def test_only_the_critics_move_the_value(plain):
  _, (_, grad) = plain
  assert {name for name, leaves in grad.items() if leaves["value"].any()} == {"cross_entropy", "value"}
  assert {name for name, leaves in grad.items() if leaves["new"].any()} == set(grad) - {"cross_entropy", "value"}


def test_every_correction_acts_on_this_batch(plain):
  _, (value, grad) = plain  # else the tests below would say nothing about it
  for name in ("truncated", "band", "sequence", "geometric", "k3", "off_policy", "a3po"):
    assert abs(value[name] - value["clipped"]) > 1e-4 and np.abs(grad[name]["new"] - grad["clipped"]["new"]).max() > 1e-3, name


@pytest.mark.parametrize("poison", [np.nan, 1e30, -np.inf, np.inf])
def test_poison_at_masked_places_leaves_everything_bit_identical(plain, poison):
  b, clean = plain
  bad = np.float32(poison)
  dirty = b | {k: np.where(b["mask"], b[k], bad) for k in TOKENS}
  dirty["push_E"] = np.where(np.arange(len(b["push_E"])) == EMPTY, bad, b["push_E"])
  dirty["push_S"] = np.where(np.isin(np.arange(len(b["push_S"])), b["step"][b["mask"]]), b["push_S"], bad)
  for (key, x), y in zip(jax.tree_util.tree_leaves_with_path(clean), jax.tree.leaves(everything(dirty))):
    np.testing.assert_array_equal(x, y, jax.tree_util.keystr(key))


def test_tokens_in_another_order_or_packed_otherwise(plain):
  b, (value, grad) = plain
  order = np.random.default_rng(1).permutation(len(b["new"]))
  tokens = (*TOKENS, "version", "mask", "episode", "step")
  mixed = everything({k: v[order] if k in tokens else v for k, v in b.items()})
  same((value, jax.tree.map(lambda g: g[order], grad)), mixed)


def test_episodes_under_other_ids(plain):
  b, clean = plain
  e = len(b["push_E"])
  order = np.random.default_rng(2).permutation(e)
  name = np.argsort(order)  # old id -> new id
  steps = (2 * order[:, None] + [0, 1]).reshape(-1)
  renamed = b | {"episode": name[b["episode"]], "step": 2 * name[b["episode"]] + b["step"] % 2, "push_S": b["push_S"][steps]}
  renamed |= {k: b[k][order] for k in ("push_E", "passed")} | {k: name[b[k]] for k in ("chosen", "rejected")}
  same(clean, everything(renamed))


def test_padding_tokens_episodes_and_steps(plain):
  b, (value, grad) = plain
  n, extra = len(b["new"]), 7
  fill = {k: 9.0 for k in TOKENS} | {"version": 0, "mask": False, "episode": 0, "step": 0}
  padded = b | {k: np.append(b[k], np.full(extra, x, b[k].dtype)) for k, x in fill.items()}
  padded |= {k: np.append(b[k], np.full(m, 9, b[k].dtype)) for k, m in (("push_E", 2), ("passed", 2), ("push_S", 4))}
  other_value, other_grad = everything(padded)
  scale = len(padded["push_E"]) / len(b["push_E"])  # constant_norm divides by what it is told, here 6 a padded episode
  other_value["constant_norm"] *= scale
  other_grad["constant_norm"] = jax.tree.map(lambda g: g * scale, other_grad["constant_norm"])
  assert not any(np.asarray(g)[n:].any() for g in jax.tree.leaves(other_grad))
  same((value, grad), (other_value, jax.tree.map(lambda g: g[:n], other_grad)))


def test_vmap_equals_a_loop(plain):
  several = [plain[0], *(floats(batch(seed=seed)) for seed in (1, 2))]
  looped = [everything(b) for b in several]
  stack = lambda trees: jax.tree.map(lambda *x: np.stack(x), *trees)
  same(jax.vmap(everything)(stack(several)), stack(looped))


def test_splitting_into_micro_batches_covers_every_row():
  parts = split(batch(rows=10), 5)
  assert [len(p["push_E"]) for p in parts] == [4] * 5 and all(p["episode"].min() == 0 and p["step"].max() == 7 for p in parts)
