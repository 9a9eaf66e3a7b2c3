"""Weights as int8: rounded to nearest, row by row, and nothing else changed."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decoder, hf, int8, lora
from models.config import ModelConfig
from models.layers import linear

pytestmark = pytest.mark.usefixtures("compile_quickly")
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "text" / "qwen3"


def layers(weight):
  return {"model": {"layers": {"mlp": {"up_proj": {"weight": jnp.array(weight)}}}}}


def test_rows_by_hand():
  """Row (127, -63.6): scale 1, integers 127 and -64. Row (0.5, 0.1): scale 0.5 / 127, 127 and round(25.4) = 25. A row of zeros stays. On
  x = (1, 1): 127 - 64 = 63; (127 + 25) x 0.5 / 127 = 0.59843; 0."""
  p = int8.lighter(layers([[127.0, -63.6], [0.5, 0.1], [0.0, 0.0]]))["model"]["layers"]["mlp"]["up_proj"]
  assert p["int8"].dtype == jnp.int8 and p["int8"].tolist() == [[127, -64], [127, 25], [0, 0]] and "weight" not in p
  np.testing.assert_allclose(linear(p, jnp.ones(2)), [63.0, 152 * 0.5 / 127, 0.0], rtol=1e-6)
  with_more = p | {"bias": jnp.array([1.0, 0, 0]), "lora_a": jnp.ones((1, 2)), "lora_b": jnp.array([[0.0], [0.0], [3.0]])}
  np.testing.assert_allclose(linear(with_more, jnp.ones(2)), [64.0, 152 * 0.5 / 127, 6.0], rtol=1e-6)


def test_a_model_keeps_everything_but_its_layers_maps():
  """No weight moves by more than half a step of its row; norms, embedding and head are the same arrays; the model still says nearly the
  same. Stacked or unstacked, with adapters or without."""
  cfg = ModelConfig.from_hf(GOLDEN)
  tree = decoder.leaves(cfg)
  params = hf.load(GOLDEN, tree, dtype=jnp.float32)
  light = int8.lighter(params)
  before, after = hf.by_path(params), hf.by_path(light)
  maps = [path for path in before if path not in after]
  assert len(maps) == 7 and all(path[-1] == "weight" and path[-2].endswith("_proj") for path in maps)
  assert all(after[path] is before[path] for path in before if path in after)
  for path in maps:
    scale = np.asarray(after[(*path[:-1], "scale")])[..., None]
    rounded = np.asarray(after[(*path[:-1], "int8")]) * scale
    assert np.abs(rounded - np.asarray(before[path])).max() <= scale.max() / 2 * (1 + 1e-5)
  same = jax.tree.map(np.array_equal, int8.lighter(decoder.unstack(params)), decoder.unstack(light))
  assert all(jax.tree.leaves(same))
  tokens = np.random.default_rng(0).integers(0, cfg.vocab, (1, 12)).astype(np.int32)
  at, ones = np.arange(12)[None, None], np.ones_like(tokens)
  say = jax.jit(lambda p: jax.nn.log_softmax(decoder.logits(p, decoder.forward(p, cfg, tokens, at, ones))))
  moved = np.abs(np.asarray(say(params)) - np.asarray(say(light)))
  assert 1e-4 < moved.max() < 0.5
  knobs = lora.defaults()
  knobs.rank = 1
  adapters = decoder.init_leaves(lora.leaves(tree, knobs), jax.random.key(0))
  np.testing.assert_array_equal(say(lora.combine(light, adapters, knobs)), say(light))  # new adapters change nothing
  assert int8.lighter({"visual": {}}) == {"visual": {}}
