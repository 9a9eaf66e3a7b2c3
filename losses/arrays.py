"""How every loss takes its arrays: float32, and no gradient through a number that is not finite.

Several losses have no mask of their own: the mask acts later, in losses.reduce. There a masked entry's incoming gradient is
exactly 0, but 0 times a NaN derivative is NaN again. `guard` and `clamp` select the gradient instead of multiplying it, so a
NaN at a masked place dies there. The value is left alone: a NaN at a place that counts stays visible to a finite-check.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from core.segments import as_float

LOG_RATIO_LIMIT = 20.0  # e^20 = 4.9e8: far beyond any clip band, far below float32's end (verl clamps at the same place)


def f32(x) -> Array:
  """x as float32. bfloat16 has steps of 0.004 to 0.008 near 1, so a 3e-4 clip band could never act in it.

  Under jax_enable_x64, and only there, float64 stays float64.
  """
  return as_float(x)


def guard(x: Array, *others: Array) -> Array:
  """x, with its gradient stopped where x or one of the others is not finite."""
  fine = jnp.isfinite(x)
  for other in others:
    fine = fine & jnp.isfinite(other)
  return jnp.where(fine, x, jax.lax.stop_gradient(x))


def clamp(x: Array, limit: float = LOG_RATIO_LIMIT) -> Array:
  """x held inside +-limit, gradient 0 outside; NaN stays NaN, with gradient 0."""
  return jnp.where(jnp.abs(x) <= limit, x, jax.lax.stop_gradient(jnp.clip(x, -limit, limit)))
