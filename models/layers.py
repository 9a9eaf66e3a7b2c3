"""Layers that models share: normalisation, linear maps, rotary positions and attention, float32 where rounding would show."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from core import mesh as mesh_lib
from core.mesh import ROWS, constrain
from models.config import ModelConfig

FEW = 64  # rows up to which a product is a decode step's


def rms_norm(x: jax.Array, weight: jax.Array, eps: float = 1e-6) -> jax.Array:
  """Root-mean-square normalisation in float32, cast back to x's dtype before the weight."""
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
  return y.astype(x.dtype) * weight


def linear(p: dict, x: jax.Array) -> jax.Array:
  """x [..., in] times weight [out, in] transposed, plus bias [out] where there is one, plus adapters where models/lora.py put them:
  lora_a [r, in] (already scaled) and lora_b [out, r]. The weight may be int8 with a scale [out] (models/int8.py)."""
  if "int8" in p:
    y = _product(x, p["int8"].astype(x.dtype)) * p["scale"].astype(x.dtype)
  else:
    y = _product(x, p["weight"])
  if "bias" in p:
    y = y + p["bias"]
  if "lora_a" in p:
    y = y + jnp.einsum("...r,or->...o", jnp.einsum("...i,ri->...r", x, p["lora_a"]), p["lora_b"]).astype(y.dtype)
  return y


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
  """x [..., in] times weight [out, in] transposed. A decode step's few rows, [B, D] or [B, 1, D], come second: on a CPU such a
  product is bound by reading the weight, which is read as it lies then (docs/log.md)."""
  few = x.shape[0] <= FEW and (x.ndim == 2 or x.ndim == 3 and x.shape[1] == 1)
  if not few:
    return checkpoint_name(_many(x, weight), "product")
  return jnp.moveaxis(jnp.einsum("oi,b...i->ob...", weight, x), 0, -1)


@jax.custom_vjp
def _many(x: jax.Array, weight: jax.Array) -> jax.Array:
  return jnp.einsum("...i,oi->...o", x, weight)


def _back(kept: tuple, g: jax.Array) -> tuple[jax.Array, jax.Array]:
  x, weight = kept
  (out, width), rows = weight.shape, x.size // weight.shape[1]
  usual = lambda x, g: jnp.einsum("...o,...i->oi", g, x)
  turned = lambda x, g: jnp.einsum("...i,...o->io", x, g).T  # XLA's CPU transposes the first factor: an MLP's were a sixth of the step
  narrower = rows * width + width * out < rows * out
  to_weight = jax.lax.platform_dependent(x, g, cpu=turned, default=usual) if narrower else usual(x, g)
  return jnp.einsum("...o,oi->...i", g, weight), to_weight


_many.defvjp(lambda x, weight: (_many(x, weight), (x, weight)), _back)


def rope_frequencies(cfg: ModelConfig) -> np.ndarray:
  """Radians a position, f32 [head_dim / 2]; Llama 3.1 stretches the slow ones and blends those between (its reference code)."""
  freq = cfg.rope_theta ** -(np.arange(0, cfg.head_dim, 2, dtype=np.float64) / cfg.head_dim)
  if cfg.llama3_rope is not None:
    factor, low, high, original = cfg.llama3_rope
    turns = original * freq / (2 * math.pi)  # of a frequency over the length the model was first trained with
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    freq = keep * freq + (1 - keep) * freq / factor
  return freq.astype(np.float32)


def rope_axis(cfg: ModelConfig) -> np.ndarray:
  """Which of the axes T, H, W each frequency turns with, i32 [head_dim / 2]: in runs, or dealt out in turn (Qwen3-VL)."""
  axis = np.zeros(cfg.head_dim // 2, np.int32)
  if cfg.mrope_interleaved:
    for a in (1, 2):
      axis[a : 3 * cfg.mrope_section[a] : 3] = a
  elif cfg.mrope_section:
    axis = np.repeat(np.arange(3, dtype=np.int32), cfg.mrope_section)
  return axis


def rope_tables(cfg: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(cos, sin), each f32 [B, T, head_dim / 2], of positions i32 [P, B, T]: P = 1, or 3 where the model tells T, H and W apart."""
  if positions.ndim != 3 or positions.shape[0] not in ((1, 3) if cfg.mrope_section else (1,)):
    raise ValueError(f"positions have shape {positions.shape}, wanted [{'1 or 3' if cfg.mrope_section else '1'}, B, T] for {cfg.family}")
  axis = rope_axis(cfg) if positions.shape[0] == 3 else np.zeros(cfg.head_dim // 2, np.int32)
  angle = jnp.moveaxis(positions.astype(jnp.float32)[axis], 0, -1) * rope_frequencies(cfg)
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Turns x [B, T, H, d] by tables [B, T, d / 2]; entry i pairs with i + d / 2. In float32, cast back."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[:, :, None], sin[:, :, None]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  """Attention with an explicit mask. q [B, T, H, d], k and v [B, S, K, d] with H a multiple of K, mask bool [B, T, S] -> [B, T, H, d].

  A query that may see nothing (padding) gets a uniform mix, never NaN; nothing reads it.
  """
  batch, length, heads, d = q.shape
  q = jnp.moveaxis(q.reshape(batch, length, k.shape[2], -1, d), 1, 3)  # here, where it is small: else the scores would be transposed
  scores = jnp.einsum("bkgtd,bskd->bkgts", q, k, preferred_element_type=jnp.float32) * d**-0.5
  scores = jnp.where(mask[:, None, None], scores, -1e30)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.moveaxis(jnp.einsum("bkgts,bskd->bkgtd", weights, v), 3, 1).reshape(batch, length, heads, d)


def features_at(features: jax.Array, slot: jax.Array) -> jax.Array:
  """features [M, D] at rows slot i32 [B, T] (-1: row 0, which nothing reads). On a mesh a row finds its images in its own part of them
  (core/mesh.py, blocks): no device gathers those of others."""
  slot, mesh = jnp.maximum(slot, 0), mesh_lib.current()
  parts = 1 if mesh is None else mesh_lib.blocks(mesh)
  if parts == 1:
    return features[slot]
  features = constrain(features.reshape(parts, -1, features.shape[-1]), ROWS, None, None)
  found = jax.vmap(lambda part, rows: part[rows])(features, slot.reshape(parts, -1, slot.shape[1]))
  return constrain(found.reshape(*slot.shape, -1), ROWS, "context", None)


def chosen(logp: jax.Array, token: jax.Array) -> jax.Array:
  """logp [..., V] at token [...]. Where words are split over devices by a masked sum, which gathers nothing."""
  mesh = mesh_lib.current()
  if mesh is None or mesh.shape["tensor"] == 1:
    return jnp.take_along_axis(logp, token[..., None], axis=-1)[..., 0]
  return jnp.sum(jnp.where(jnp.arange(logp.shape[-1]) == token[..., None], logp, 0.0), axis=-1)


def head_logprobs(
  logits, hidden: jax.Array, tokens: jax.Array, mask: jax.Array, most: int, *, chunk: int = 1024, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
  """(logp, entropy), f32 [B, L], where mask is True, 0 elsewhere; entry t scores token t from hidden t-1.

  logits(h [..., D]) -> f32 [..., V]. temperature divides the logits, as it does in the sampler. most: static, the most True places
  a row may have. The head runs at those places only, `chunk` tokens at a time (on a mesh: of each device) under remat, so logits of more
  than a chunk never exist; every chunk holds all rows, so a batch that is split over devices stays split.
  """
  rows, length = tokens.shape
  many, places = jnp.cumsum(mask, axis=1), min(most, length)
  nth = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(1, places + 1)))(many)  # of the n-th True; length where there is none
  place, taken = jnp.minimum(nth, length - 1), nth < length
  pick = lambda a: jnp.take_along_axis(a, place, axis=1)
  before = jnp.take_along_axis(hidden, jnp.maximum(place - 1, 0)[..., None], axis=1)
  # whatever stands at other places reaches neither value nor gradient
  before = constrain(jnp.where(taken[..., None], before, 0), ROWS, None, None)

  def head(args):
    h, t = constrain(args[0], ROWS, "context", None), constrain(args[1], ROWS, "context")
    all_logp = jax.nn.log_softmax(constrain(logits(h), ROWS, "context", "tensor") / temperature, axis=-1)
    logp = chosen(all_logp, t)
    return jnp.minimum(logp, 0.0), -jnp.sum(jnp.exp(all_logp) * all_logp, axis=-1)

  mesh = mesh_lib.current()
  apart = 1 if mesh is None else mesh_lib.blocks(mesh) * mesh.shape["context"]
  step = max(1, chunk * apart // rows)
  if places <= step:
    found = head((before, pick(tokens)))
  else:
    pad = -places % step
    split = lambda a: jnp.moveaxis(jnp.pad(a, ((0, 0), (0, pad), *((0, 0),) * (a.ndim - 2))).reshape(rows, -1, step, *a.shape[2:]), 1, 0)
    found = jax.lax.map(jax.checkpoint(head), (split(before), split(pick(tokens))))
    found = tuple(jnp.moveaxis(a, 0, 1).reshape(rows, -1)[:, :places] for a in found)
  spread = lambda a: jnp.zeros((rows, length), jnp.float32).at[jnp.arange(rows)[:, None], nth].set(a, mode="drop")
  return spread(found[0]), spread(found[1])
