"""The decoder that Llama 3, SmolLM2, Qwen2, Qwen3 and the language halves of Qwen2.5-VL and Qwen3-VL share.

Parameters are nested dicts under checkpoint names, [out, in] as there, with all layers stacked in front: params["model"]["layers"]
["self_attn"]["q_proj"]["weight"] is [L, heads * head_dim, D]. Training scans over the stack; decoding runs layer by layer, fastest over
`unstack(params)`. Every function is pure and takes the config as a static value.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from core.mesh import ROWS, constrain, gathered
from models.attention import Visible, mix, over_cache, packed, platform
from models.config import ModelConfig
from models.layers import features_at, head_logprobs, linear, rms_norm, rope_tables, rotate

REMAT = ("none", "dots", "attention", "full", "offload")


class Leaf(NamedTuple):
  """One parameter before it exists. scale: of its normal initialisation; None = ones. axes: a logical name per dimension."""

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  scale: float | None

  @property
  def stacked(self) -> bool:
    return self.axes[:1] == ("layers",)


def is_leaf(x: Any) -> bool:
  """For jax.tree functions over a tree of Leaf, which is a tuple itself."""
  return isinstance(x, Leaf)


def leaves(cfg: ModelConfig) -> dict:
  """Every parameter of the decoder as a nested dict of Leaf, with the layers stacked."""
  d, n, hidden = cfg.width, cfg.layers, cfg.heads * cfg.head_dim
  out_scale = 0.02 / (2 * n) ** 0.5

  def proj(rows, row_axis, cols, col_axis, bias=False, scale=0.02):
    weight = {"weight": Leaf((n, rows, cols), ("layers", row_axis, col_axis), scale)}
    return weight | ({"bias": Leaf((n, rows), ("layers", row_axis), 0.0)} if bias else {})

  def norm(size, axis):
    return {"weight": Leaf((n, size), ("layers", axis), None)}

  attention = {
    "q_proj": proj(hidden, "heads", d, "embed", cfg.qkv_bias),
    "k_proj": proj(cfg.kv_heads * cfg.head_dim, "kv_heads", d, "embed", cfg.qkv_bias),
    "v_proj": proj(cfg.kv_heads * cfg.head_dim, "kv_heads", d, "embed", cfg.qkv_bias),
    "o_proj": proj(d, "embed", hidden, "heads", cfg.o_bias, out_scale),
  }
  if cfg.qk_norm:
    attention |= {"q_norm": norm(cfg.head_dim, None), "k_norm": norm(cfg.head_dim, None)}
  layers = {
    "input_layernorm": norm(d, None),
    "self_attn": attention,
    "post_attention_layernorm": norm(d, None),
    "mlp": {
      "gate_proj": proj(cfg.mlp, "mlp", d, "embed", cfg.mlp_bias),
      "up_proj": proj(cfg.mlp, "mlp", d, "embed", cfg.mlp_bias),
      "down_proj": proj(d, "embed", cfg.mlp, "mlp", cfg.mlp_bias, out_scale),
    },
  }
  table = Leaf((cfg.vocab, d), ("vocab", "embed"), 0.02)
  tree = {"model": {"embed_tokens": {"weight": table}, "layers": layers, "norm": {"weight": Leaf((d,), (None,), None)}}}
  return tree if cfg.tied else tree | {"lm_head": {"weight": table}}


class Definition(nnx.Module):
  """Initialisation and sharding names of a tree of Leaf. Never called: the functions below are."""

  def __init__(self, tree: dict, rngs: nnx.Rngs, dtype=jnp.float32):
    def param(leaf: Leaf):
      how = nnx.initializers.ones if leaf.scale is None else nnx.initializers.normal(leaf.scale)
      return nnx.Param(nnx.with_partitioning(how, leaf.axes)(rngs.params(), leaf.shape, dtype))

    self.params = nnx.data(jax.tree.map(param, tree, is_leaf=is_leaf))


def init_leaves(tree: dict, key: jax.Array, dtype=jnp.float32) -> dict:
  """Parameters of a tree of Leaf, as a nested dict of arrays."""
  with nnx.use_eager_sharding(False):  # the metadata names axes; no mesh is needed to initialise
    model = Definition(tree, nnx.Rngs(params=key), dtype)
  return nnx.to_pure_dict(nnx.state(model, nnx.Param))["params"]


def init(cfg: ModelConfig, key: jax.Array, dtype=jnp.float32) -> dict:
  """Random parameters, scaled as for training from nothing."""
  return init_leaves(leaves(cfg), key, dtype)


def abstract(tree: dict, dtype=jnp.float32) -> dict:
  """Shapes and dtypes of a tree of Leaf, allocating nothing."""
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree, is_leaf=is_leaf)


class Vision(NamedTuple):
  """Image features and where they go. embeds [M, D]; deepstack [n, M, D], added after each of the first n layers (n may be 0);
  slot i32 [B, T]: the row that takes the place of a token, -1 = none."""

  embeds: jax.Array
  deepstack: jax.Array
  slot: jax.Array


def embed(params: dict, tokens: jax.Array, vision: Vision | None = None) -> jax.Array:
  """Word vectors [..., D] of token ids, image features in their places."""
  x = gathered(params["model"]["embed_tokens"], "model/embed_tokens")["weight"][tokens]
  if vision is None:
    return x
  return jnp.where((vision.slot >= 0)[..., None], features_at(vision.embeds, vision.slot).astype(x.dtype), x)


def _deepen(x: jax.Array, features: jax.Array, slot: jax.Array) -> jax.Array:
  return x + jnp.where((slot >= 0)[..., None], features_at(features, slot), 0).astype(x.dtype)


def _qkv(cfg: ModelConfig, layer: dict, x: jax.Array, turn: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Queries [B, T, H, d] and keys [B, T, K, d], turned by their positions, and values."""
  a, y = layer["self_attn"], rms_norm(x, layer["input_layernorm"]["weight"], cfg.eps)
  heads = lambda n: constrain(linear(a[n], y).reshape(*y.shape[:2], -1, cfg.head_dim), ROWS, "context", "tensor", None)
  q, k, v = map(heads, ("q_proj", "k_proj", "v_proj"))
  if cfg.qk_norm:
    q, k = rms_norm(q, a["q_norm"]["weight"], cfg.eps), rms_norm(k, a["k_norm"]["weight"], cfg.eps)
  return rotate(q, *turn), rotate(k, *turn), v


def _finish(cfg: ModelConfig, layer: dict, x: jax.Array, mixed: jax.Array) -> jax.Array:
  """The residual stream after attention's output and the gated MLP."""
  x = x + linear(layer["self_attn"]["o_proj"], mixed.reshape(*mixed.shape[:2], -1))
  m, y = layer["mlp"], rms_norm(x, layer["post_attention_layernorm"]["weight"], cfg.eps)
  hidden = constrain(jax.nn.silu(linear(m["gate_proj"], y)) * linear(m["up_proj"], y), ROWS, "context", "tensor")
  return constrain(x + linear(m["down_proj"], hidden), ROWS, "context", None)


def remat_body(body, name: str):
  """body under the rematerialisation policy of that name: what the backward pass keeps of a layer.

  none: all · dots: outputs of matrix products and of chunked attention · attention: the mixed values · full: a layer's input ·
  offload: that, in host memory
  """
  policies = jax.checkpoint_policies
  if name not in REMAT:
    raise ValueError(f"remat {name!r}: there are {', '.join(REMAT)}")
  if name == "none":
    return body
  policy = {
    "dots": policies.save_from_both_policies(
      policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names("product", "attended")  # not seen else: they run twice
    ),
    "attention": policies.save_only_these_names("mixed"),
    "full": policies.nothing_saveable,
    "offload": policies.save_and_offload_only_these_names(
      names_which_can_be_saved=[], names_which_can_be_offloaded=["layer_input"], offload_src="device", offload_dst="pinned_host"
    ),
  }[name]
  return jax.checkpoint(body, policy=policy, prevent_cse=False)  # inside a scan nothing is merged anyway


def forward(
  params: dict, cfg: ModelConfig, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array, vision: Vision | None = None,
  *, remat: str = "none", attention="auto",
) -> jax.Array:  # fmt: skip
  """Hidden states [B, T, D] of packed rows: a token sees itself and earlier tokens of its own segment.

  tokens and segment_ids i32 [B, T] (0 = padding), positions i32 [P, B, T] with P = 1 or 3; attention: see models/attention.py.
  """
  visible, turn = packed(segment_ids), rope_tables(cfg, positions)
  deep = 0 if vision is None else vision.deepstack.shape[0]

  def body(x, scanned):
    layer, i = gathered(scanned[0], "model/layers"), scanned[1]
    x = checkpoint_name(x, "layer_input")
    q, k, v = _qkv(cfg, layer, x, turn)
    x = _finish(cfg, layer, x, checkpoint_name(mix(q, k, v, visible, attention), "mixed"))
    if deep:
      x = jax.lax.cond(i < deep, lambda x: _deepen(x, vision.deepstack[jnp.minimum(i, deep - 1)], vision.slot), lambda x: x, x)
    return x, None

  x = constrain(embed(params, tokens, vision), ROWS, "context", None)
  x, _ = jax.lax.scan(remat_body(body, remat), x, (params["model"]["layers"], jnp.arange(cfg.layers)))
  return rms_norm(x, params["model"]["norm"]["weight"], cfg.eps)


def logits(params: dict, hidden: jax.Array) -> jax.Array:
  """f32 [..., V]; the head is the embedding where a checkpoint ties them."""
  return linear(_head(params), hidden).astype(jnp.float32)


def _head(params: dict) -> dict:
  return params["lm_head"] if "lm_head" in params else params["model"]["embed_tokens"]


def token_logprobs(
  params: dict, cfg: ModelConfig, hidden: jax.Array, tokens: jax.Array, mask: jax.Array, most: int, *, chunk: int = 1024,
  temperature: float = 1.0,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
  """(logp, entropy), f32 [B, T], at places where mask is True, in chunks: layers.head_logprobs."""
  del cfg
  head = gathered(_head(params), "lm_head")  # once: a loop over chunks would gather it for each
  return head_logprobs(lambda h: linear(head, h).astype(jnp.float32), hidden, tokens, mask, most, chunk=chunk, temperature=temperature)


class Cache(NamedTuple):
  """Keys and values of sessions, one a row. k, v: a tuple of [B, K, S, d] for each layer: one array for all made decoding slower,
  and with places before heads a decode step transposed all it read. Or of lists of such, whose places follow each other: who may read
  fewer places gives fewer of them (rollout/engine.py), where a slice would be copied;
  length i32 [B]: places filled; next_position i32 [B]: of the next text token, on every axis."""

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  length: jax.Array
  next_position: jax.Array


def init_cache(cfg: ModelConfig, batch: int, size: int, dtype=jnp.float32) -> Cache:
  """An empty cache of `batch` rows with `size` places each."""
  empty = lambda: tuple(jnp.zeros((batch, cfg.kv_heads, size, cfg.head_dim), dtype) for _ in range(cfg.layers))
  zero = lambda: jnp.zeros((batch,), jnp.int32)  # a buffer each: a sampler donates the cache
  return Cache(empty(), empty(), zero(), zero())


def unstack(params: dict) -> dict:
  """The same parameters (or adapters to them) with the layers as a tuple of trees: what the sampler decodes with, made once per weight
  update."""
  if "layers" not in params.get("model", {}):  # adapters to the vision tower alone
    return params
  count = jax.tree.leaves(params["model"]["layers"])[0].shape[0]
  return params | {"model": params["model"] | {"layers": tuple(_layer(params, i) for i in range(count))}}


def _layer(params: dict, i: int) -> dict:
  layers = params["model"]["layers"]
  return layers[i] if isinstance(layers, tuple) else jax.tree.map(lambda a: a[i], layers)


def prefill(
  params: dict, cfg: ModelConfig, tokens: jax.Array, positions: jax.Array, valid: jax.Array, cache: Cache, vision: Vision | None = None,
  *, attention="auto",
) -> tuple[jax.Array, Cache]:  # fmt: skip
  """Appends a chunk to every row: (hidden [B, T, D], cache). Rows may be ragged and may already hold anything.

  tokens i32 [B, T], positions i32 [P, B, T], valid bool [B, T]: True places come first in a row; a row without any is left as it was.
  No row may grow beyond the cache's places (the caller's to see to, as lengths are traced).
  """
  batch, count = tokens.shape
  parts = lambda held: held if isinstance(held, list) else [held]
  sizes = [part.shape[2] for part in parts(cache.k[0])]
  place = cache.length[:, None] + jnp.arange(count)
  inside = lambda n, end: jnp.where(valid & (place >= end - n) & (place < end), place - end + n, n)  # beyond the end: dropped
  lone = int(batch * count == 1)  # one place alone would become an update in place, for which XLA's CPU copies every part four times
  targets = [jnp.pad(inside(n, end), ((0, 0), (0, lone)), constant_values=n) for n, end in zip(sizes, itertools.accumulate(sizes))]
  order = jnp.broadcast_to(jnp.arange(sum(sizes), dtype=jnp.int32), (batch, sum(sizes)))
  visible = Visible(place, order, jnp.ones_like(place), jnp.ones_like(order))
  turn, rows = rope_tables(cfg, positions), jnp.arange(batch)[:, None]

  def scattered(part, new, at):
    return part.at[rows, :, at].set(jnp.pad(new, ((0, 0), (0, lone), (0, 0), (0, 0))), mode="drop")

  write = one_by_one if count == 1 and platform() == "tpu" else scattered

  def put(held, new):
    grown = [write(part, new.astype(part.dtype), at) for part, at in zip(parts(held), targets, strict=True)]
    return grown if isinstance(held, list) else grown[0]

  x, keys, values = embed(params, tokens, vision), [], []
  for i in range(cfg.layers):
    layer = _layer(params, i)
    q, k, v = _qkv(cfg, layer, x, turn)
    keys.append(put(cache.k[i], k))
    values.append(put(cache.v[i], v))
    x = _finish(cfg, layer, x, over_cache(q, parts(keys[i]), parts(values[i]), visible, attention))
    if vision is not None and i < vision.deepstack.shape[0]:
      x = _deepen(x, vision.deepstack[i], vision.slot)
  after = jnp.max(jnp.where(valid, positions, -1), axis=(0, 2)) + 1
  grown = Cache(tuple(keys), tuple(values), cache.length + valid.sum(1), jnp.maximum(cache.next_position, after))
  return rms_norm(x, params["model"]["norm"]["weight"], cfg.eps), grown


def one_by_one(part: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
  """A row's new place [B, 1, K, d] written at at[:, 0] of part [B, K, n, d], or nowhere from n on: a row after the other, in place. For a
  scatter of them the TPU's compiler copies the whole part, in another layout, and back."""
  n, new = part.shape[2], jnp.moveaxis(new, 1, 2)  # turned as a whole: a row turned in the loop would turn the part's layout

  def one(b, part):
    start = (b, 0, jnp.minimum(at[b, 0], n - 1), 0)
    row = jax.lax.dynamic_index_in_dim(new, b)
    return jax.lax.dynamic_update_slice(part, jnp.where(at[b, 0] < n, row, jax.lax.dynamic_slice(part, start, row.shape)), start)

  return jax.lax.fori_loop(0, part.shape[0], one, part)


def decode_step(
  params: dict, cfg: ModelConfig, token: jax.Array, cache: Cache, active: jax.Array | None = None, *, attention="auto"
) -> tuple[jax.Array, Cache]:
  """Appends one text token [B] to every row, or to those that are active (bool [B]), at the row's next position; returns the hidden
  states [B, D] that the tokens after are sampled from."""
  valid = jnp.ones(token.shape, bool) if active is None else active
  position = cache.next_position[None, :, None]
  hidden, cache = prefill(params, cfg, token[:, None], position, valid[:, None], cache, attention=attention)
  return hidden[:, 0], cache
