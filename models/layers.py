"""Layers that models share: normalisation and attention, float32 where rounding would show."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float = 1e-6) -> jax.Array:
  """Root-mean-square normalisation in float32, cast back to x's dtype before the weight."""
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
  return y.astype(x.dtype) * weight


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  """Attention with an explicit mask. q [B, T, H, d], k and v [B, S, H, d], mask bool [B, T, S] -> [B, T, H, d].

  A query that may see nothing (padding) gets a uniform mix, never NaN; nothing reads it.
  """
  scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
  scores = jnp.where(mask[:, None], scores, -1e30)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum("bhts,bshd->bthd", weights, v)
