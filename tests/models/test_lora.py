"""Adapters: y = W x + alpha / rank * B A x; the base is frozen; merged and unmerged are one model."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decoder, hf, lora
from models.config import ModelConfig
from models.decoder import Leaf
from models.layers import linear

pytestmark = pytest.mark.usefixtures("compile_quickly")
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "text" / "qwen3"


def knobs(**changes):
  cfg = lora.defaults()
  cfg.update({"rank": 2, "alpha": 6.0} | changes)
  return cfg


@pytest.fixture(scope="module")
def model():
  cfg = ModelConfig.from_hf(GOLDEN)
  return cfg, decoder.leaves(cfg), hf.load(GOLDEN, decoder.leaves(cfg), dtype=jnp.float32)


def hidden(params, cfg):
  tokens = np.random.default_rng(0).integers(0, cfg.vocab, (2, 10)).astype(np.int32)
  return decoder.forward(params, cfg, tokens, np.broadcast_to(np.arange(10), (1, 2, 10)), np.ones((2, 10), np.int32))


def test_one_map_by_hand():
  """W = [[1, 2]], A = [[1, 1]], B = [[3]], alpha / rank = 2 / 1: W + 2 B A = [[7, 8]]; on x = (1, 10) that is 87."""
  cfg = knobs(rank=1, alpha=2.0)
  base, adapters = {"f": {"weight": jnp.array([[1.0, 2.0]])}}, {"f": {"lora_a": jnp.array([[1.0, 1.0]]), "lora_b": jnp.array([[3.0]])}}
  x = jnp.array([1.0, 10.0])
  np.testing.assert_allclose(linear(lora.combine(base, adapters, cfg)["f"], x), [87.0])
  np.testing.assert_allclose(lora.merge(base, adapters, cfg)["f"]["weight"], [[7.0, 8.0]])


def test_new_adapters_change_nothing_and_merged_is_unmerged(model):
  cfg, tree, base = model
  adapters = decoder.init_leaves(lora.leaves(tree, knobs()), jax.random.key(0))
  np.testing.assert_array_equal(hidden(lora.combine(base, adapters, knobs()), cfg), hidden(base, cfg))
  moved = jax.tree.map(lambda a: a + 0.1 * jax.random.normal(jax.random.key(a.size), a.shape), adapters)
  unmerged, merged = hidden(lora.combine(base, moved, knobs()), cfg), hidden(lora.merge(base, moved, knobs()), cfg)
  np.testing.assert_allclose(unmerged, merged, atol=2e-5)
  assert np.abs(merged - hidden(base, cfg)).max() > 0.1


def test_only_adapters_have_a_gradient(model):
  """Of every adapter: A's is 0 while B is 0, so B is moved first. The base gets exactly none."""
  cfg, tree, base = model
  adapters = jax.tree.map(lambda a: a + 0.05, decoder.init_leaves(lora.leaves(tree, knobs()), jax.random.key(0)))
  loss = lambda base, adapters: jnp.sin(hidden(lora.combine(base, adapters, knobs()), cfg)).sum()
  to_base, to_adapters = jax.jit(jax.grad(loss, argnums=(0, 1)))(base, adapters)
  assert not any(np.asarray(g).any() for g in jax.tree.leaves(to_base))
  assert all(np.abs(np.asarray(g)).max(axis=(-1, -2)).min() > 0 for g in jax.tree.leaves(to_adapters))  # in every layer


def test_targets_are_found_by_name(model):
  _, tree, _ = model
  found = lora.leaves(tree, knobs(targets=r"q_proj$|lm_head"))
  assert hf.by_path(found).keys() == {
    ("model", "layers", "self_attn", "q_proj", "lora_a"), ("model", "layers", "self_attn", "q_proj", "lora_b"),
    ("lm_head", "lora_a"), ("lm_head", "lora_b"),
  }  # fmt: skip
  assert found["model"]["layers"]["self_attn"]["q_proj"] == {
    "lora_a": Leaf((3, 2, 32), ("layers", None, "embed"), 32**-0.5),
    "lora_b": Leaf((3, 48, 2), ("layers", "heads", None), 0.0),
  }
  assert len(hf.by_path(lora.leaves(tree, knobs()))) == 2 * 7  # q, k, v, o, gate, up, down


def test_what_fits_nothing_is_one_line(model):
  _, tree, _ = model
  for targets in ("qproj", "embed_tokens", "norm"):  # a misspelling, a table, a vector
    with pytest.raises(ValueError, match=rf"lora.targets '{targets}' fits none of the linear maps: .*self_attn.q_proj, .*lm_head"):
      lora.leaves(tree, knobs(targets=targets))
  with pytest.raises(ValueError, match=r"lora.targets is '\(', wanted a regular expression: missing \)"):
    lora.leaves(tree, knobs(targets="("))
  with pytest.raises(ValueError, match="wanted a regular expression: the repetition number is too large"):
    lora.leaves(tree, knobs(targets="a{99999999999}"))
  with pytest.raises(ValueError, match="lora.rank is 0, wanted 1 or more"):
    lora.leaves(tree, knobs(rank=0))


def test_a_rank_above_a_map_is_one_line(model):
  """Keys of the golden model: 2 heads of 12 from a width of 32."""
  _, tree, _ = model
  assert lora.leaves(tree, knobs(rank=24))
  with pytest.raises(ValueError, match=r"policy.lora.rank is 25, wanted at most 24: model.layers.self_attn.k_proj is 24 x 32"):
    lora.leaves(tree, knobs(rank=25))


@pytest.mark.parametrize("targets", [r"(\w+\.?)+!", ".*" * 20 + "!"])
def test_a_search_that_would_never_end_is_one_line(model, monkeypatch, targets):
  monkeypatch.setattr(lora, "SECONDS", 0.3)
  with pytest.raises(ValueError, match=r"policy.lora.targets is .*, and a search for it takes more than 0.3 s: wanted one with fewer"):
    lora.leaves(model[1], knobs(targets=targets))


def test_a_merge_keeps_the_dtype_and_rounds_once(model):
  """bfloat16 weights: the sum is made in float32. 1 + 2 ** -9 rounds to 1, while 1 + 2 ** -7 is a bfloat16."""
  base = {"f": {"weight": jnp.ones((1, 1), jnp.bfloat16)}}
  for step, want in ((2.0**-9, 1.0), (2.0**-7, 1.0078125)):
    adapters = {"f": {"lora_a": jnp.ones((1, 1)), "lora_b": jnp.full((1, 1), step)}}
    weight = lora.merge(base, adapters, knobs(rank=1, alpha=1.0))["f"]["weight"]
    assert weight.dtype == jnp.bfloat16 and float(weight[0, 0]) == want
