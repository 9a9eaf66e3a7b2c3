"""Importance ratios between the policy that learns and the policy that wrote the tokens. Everything is [N] or [U].

Three policies are kept apart: the behaviour policy mu (the sampler's stored log-probabilities), the proximal policy (the
trainer's recompute before the first update) and the current policy. The ratio's denominator is always a stored number:
no gradient flows into it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from core.segments import as_mask, same_length, segment_gather, segment_mean
from losses.arrays import LOG_RATIO_LIMIT, clamp, f32


def log_ratio(logp_N, behaviour_logp_N, mask_N) -> Array:
  """Clamped log-ratio of every token, [N] float32: log pi - log mu inside +-20, 0 at masked places.

  Gradients flow into logp only; they are 0 where the clamp acts. The clamp comes before the exponential: one far-off token
  can overflow neither the value nor the gradient.
  """
  length = same_length(logp_N=logp_N, behaviour_logp_N=behaviour_logp_N, mask_N=mask_N)
  mask = as_mask(mask_N, length)
  logp = jnp.where(mask, f32(logp_N), 0.0)
  behaviour = jnp.where(mask, jax.lax.stop_gradient(f32(behaviour_logp_N)), 0.0)
  return clamp(logp - behaviour)


def clamped(logp_N, behaviour_logp_N, mask_N) -> Array:
  """bool [N]: tokens whose log-ratio the clamp has taken over. A healthy run has none; log their count."""
  length = same_length(logp_N=logp_N, behaviour_logp_N=behaviour_logp_N, mask_N=mask_N)
  return as_mask(mask_N, length) & (jnp.abs(f32(logp_N) - f32(behaviour_logp_N)) > LOG_RATIO_LIMIT)


def token_ratio(logp_N, behaviour_logp_N, mask_N) -> Array:
  """One importance ratio per token, [N] float32: rho_t = exp(log pi_t - log mu_t); 1 at masked places.

  Lesson chapter 4 (the fix: the importance ratio); PPO, arXiv 1707.06347, eq 6. logp_N, behaviour_logp_N: [N] floats;
  mask_N: [N] bool, tokens the agent wrote. Gradients flow into logp_N only.
  """
  return jnp.exp(log_ratio(logp_N, behaviour_logp_N, mask_N))


def sequence_ratio(logp_N, behaviour_logp_N, mask_N, unit_id_N, num_units: int) -> Array:
  """One ratio per unit, the geometric mean of its token ratios, [U] float32: s_u = exp(mean over its tokens of log rho_t).

  GSPO, arXiv 2507.18071, eq 7; lesson chapter 5 (one ratio per token is mostly noise). A unit is an episode or a step,
  as unit_id_N [N] says; only its agent tokens count. A unit without tokens has ratio 1 and no gradient: leave it out of the
  average that follows. Gradient: every token of a unit gets s_u / |y_u|. Gradients flow into logp_N only.
  """
  same_length(logp_N=logp_N, unit_id_N=unit_id_N)
  return jnp.exp(segment_mean(log_ratio(logp_N, behaviour_logp_N, mask_N), unit_id_N, num_units, mask_N))


def sequence_token_ratio(logp_N, behaviour_logp_N, mask_N, unit_id_N, num_units: int) -> Array:
  """GSPO-token's ratio, [N] float32: the unit's ratio at each of its tokens, with the token's own gradient; 1 where masked.

  s_{u,t} = sg[s_u] * pi_t / sg[pi_t] (arXiv 2507.18071, the token-level variant). In value it is s_u everywhere, so one
  clip decides for the whole unit; in gradient it is s_u * grad log pi_t. With one advantage per unit it equals GSPO when the
  tokens are averaged unit by unit; it exists to allow one advantage per step.
  """
  unit = sequence_ratio(logp_N, behaviour_logp_N, mask_N, unit_id_N, num_units)
  mask = as_mask(mask_N, same_length(logp_N=logp_N))
  logp = jnp.where(mask, f32(logp_N), 0.0)
  at_token = jnp.where(mask, segment_gather(jax.lax.stop_gradient(unit), unit_id_N), 1.0)
  return at_token * jnp.exp(logp - jax.lax.stop_gradient(logp))


def truncated_weight(old_logp_N, behaviour_logp_N, mask_N, *, cap: float = 2.0) -> Array:
  """Truncated importance weight of the decoupled objective, [N] float32: min(pi_old / mu, cap); 1 where masked.

  Multiplies the clipped loss, whose ratio is then pi / pi_old (decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298).
  Gradients stop: it is a weight. Do not use it when the ratio is already against mu: that counts the same drift twice.
  """
  return jax.lax.stop_gradient(jnp.minimum(token_ratio(old_logp_N, behaviour_logp_N, mask_N), cap))


def band_weight(old_logp_N, behaviour_logp_N, mask_N, *, low: float = 0.5, high: float = 2.0) -> Array:
  """Masked importance weight (IcePop), [N] float32: pi_old / mu inside [low, high], else 0; 1 where masked. Gradients stop."""
  ratio = jax.lax.stop_gradient(token_ratio(old_logp_N, behaviour_logp_N, mask_N))
  return jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0)
