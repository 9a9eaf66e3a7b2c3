"""Estimates of KL(pi || pi_ref) from one sampled token at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from core.segments import same_length
from losses.arrays import clamp, f32, guard

KINDS = ("k1", "abs", "k2", "k3", "k3+")


def kl_estimate(logp_N, ref_logp_N, kind: str = "k3") -> Array:
  """KL estimate of every token, [N] float32, from d = log pi_ref - log pi (q = e^d = reference chance / current chance).

  k1: -d, unbiased, either sign. abs: |d|. k2: d^2 / 2. k3: q - ln q - 1, never negative (Schulman 2020, "Approximating KL
  divergence"; GRPO, arXiv 2402.03300, eq 4; lesson chapter 5). k3+: k3 in value with k2's gradient, because the expected
  gradient of k3 is not that of the KL while k2's is (verl's "+"; no clamp acts on its gradient).
  logp_N, ref_logp_N: [N] floats; no mask here, losses.reduce takes it (a NaN at a masked place costs no gradient). d is
  clamped to +-20 before the exponential. Gradients flow into logp_N only: the reference is a constant.
  """
  same_length(logp_N=logp_N, ref_logp_N=ref_logp_N)
  if kind not in KINDS:
    raise ValueError(f"kind is {kind!r}, wanted one of {', '.join(KINDS)}")
  difference = guard(jax.lax.stop_gradient(f32(ref_logp_N)) - f32(logp_N))
  if kind == "k1":
    return -difference
  if kind == "abs":
    return jnp.abs(difference)
  k2 = 0.5 * jnp.square(difference)
  if kind == "k2":
    return k2
  log_q = clamp(difference)
  k3 = jnp.expm1(log_q) - log_q  # expm1: q - 1 would lose everything to rounding where the policies agree
  if kind == "k3":
    return k3
  return jnp.where(jnp.isfinite(k2), k2 - jax.lax.stop_gradient(k2), 0.0) + jax.lax.stop_gradient(k3)
