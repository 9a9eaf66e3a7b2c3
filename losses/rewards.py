"""Shaping of an episode's reward before its advantage is computed."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from core.segments import is_concrete
from losses.arrays import f32


def soft_overlong_penalty(length, limit, cache) -> Array:
  """Penalty that grows as an episode nears its limit, float32 of length's shape: 0 up to limit - cache, then down to -1.

  clip((limit - cache - length) / cache, -1, 0); DAPO, arXiv 2503.14476, eq 13 (there limit 20480, cache 4096), added to the
  correctness reward. length, limit and cache count the same thing, action tokens or steps. Decide "all equal" before adding
  it: it makes the rewards of an all-pass group unequal.
  """
  if is_concrete(limit, cache) and not 0 < cache <= limit:
    raise ValueError(f"cache is {cache} with limit {limit}, wanted 0 < cache <= limit")
  return jnp.clip((f32(limit) - f32(cache) - f32(length)) / f32(cache), -1.0, 0.0)
