"""Estimates of KL(pi || pi_ref) from one sampled token at a time, and the three places a run uses them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from core.segments import as_mask, is_concrete, same_length
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


def kl_loss(logp_N, ref_logp_N, *, beta, kind: str = "k3") -> Array:
  """The KL term of a loss, [N] float32: beta * kl_estimate. GRPO (arXiv 2402.03300, eq 3) adds it with beta 0.04."""
  _check_beta(beta)
  return f32(beta) * kl_estimate(logp_N, ref_logp_N, kind)


def kl_in_reward(reward_N, logp_N, ref_logp_N, mask_N, *, beta, kind: str = "k1") -> Array:
  """Token rewards that pay for leaving the reference, [N] float32: r_t - beta * kl_t at agent tokens, r_t elsewhere.

  InstructGPT, arXiv 2203.02155, eq 2, with the sampling policy's logp_N. k1 is the usual kind here: its sum over an episode is
  the episode's log-ratio. A reward on a masked place (a trailing screenshot) is kept as it is. Gradients stop: it is a reward.
  """
  _check_beta(beta)
  mask = as_mask(mask_N, same_length(reward_N=reward_N, logp_N=logp_N, ref_logp_N=ref_logp_N, mask_N=mask_N))
  reward, kl = f32(reward_N), kl_estimate(logp_N, ref_logp_N, kind)
  return jax.lax.stop_gradient(jnp.where(mask, reward - f32(beta) * kl, reward))


def adaptive_beta(beta, kl, target, horizon, n) -> Array:
  """The next beta of a controller that holds the KL near `target`: beta (1 + clip(kl / target - 1, +-0.2) n / horizon).

  Ziegler et al., arXiv 1909.08593, section 2.2, as in verl. kl: the update's mean KL; n: episodes of the update; horizon:
  episodes over which beta may grow by a fifth. Scalar float32.
  """
  _check_beta(beta)
  if is_concrete(target, horizon, n) and not (target > 0 and horizon > 0 and n >= 0):
    raise ValueError(f"target, horizon and n are {target}, {horizon} and {n}, wanted numbers above 0 (n: at least 0)")
  return f32(beta) * (1.0 + jnp.clip(f32(kl) / target - 1.0, -0.2, 0.2) * n / horizon)


def moving_reference(ref_params, params, mix=0.6):
  """The reference moved toward the policy, a pytree: mix * params + (1 - mix) * ref. 0 is a fixed one, 1 WebRL's per phase.

  TRL moves it by 0.6 every 512 updates. Each leaf keeps the reference's dtype.
  """
  if is_concrete(mix) and not 0 <= mix <= 1:
    raise ValueError(f"mix is {mix}, wanted a number from 0 to 1")
  return jax.tree.map(lambda r, p: (mix * f32(p) + (1.0 - mix) * f32(r)).astype(r.dtype), ref_params, params)


def _check_beta(beta) -> None:
  if is_concrete(beta) and not beta >= 0:
    raise ValueError(f"beta is {beta}, wanted a number of at least 0: below 0 it would pay for leaving the reference")
