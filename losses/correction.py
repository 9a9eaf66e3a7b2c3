"""Weights for data that the current policy did not write: truncation, masks and rejection, and the curves that watch them.

The decoupled objective is weight * clipped_loss(pi / pi_old): the weight pi_old / mu answers for the sampler and for age, the
clip for this update (decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298). Token weights stand in losses.ratios
(`truncated_weight`, `band_weight`); here are whole units (an episode or a step): [U], brought to the tokens by
core.segments.segment_gather. Weights are numbers: no gradient flows through them. A weight of 0 goes inside x_N and leaves
the mask alone, so the denominator keeps the original count. Where old_logp is the sampler's own (no recompute) use none of
the old / mu weights: they would count the same drift twice.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from core.segments import Total, as_mask, is_concrete, same_length, segment_mean, segment_sum
from losses.arrays import clamp, f32
from losses.ratios import log_ratio

KINDS = ("geometric", "product")
OUTSIDE = ("drop", "cap")


def sequence_weight(
  old_logp_N, behaviour_logp_N, mask_N, unit_id_N, num_units: int, *, kind="geometric", low=0.5, high=2.0, outside="drop"
) -> Array:
  """One importance weight per unit, [U] float32: pi_old / mu over its agent tokens; 1 for a unit without tokens.

  kind "geometric": the geometric mean of the token ratios, which does not grow with length; "product": the chance of the whole
  unit, unbiased but far from 1 after a few hundred tokens (0.01 a token over 2,000 tokens is e^20). outside "drop": 0 where the
  weight leaves [low, high] (TRL's and verl's sequence mask); "cap": min(weight, high), `low` unread (sequence-level truncation).
  """
  if kind not in KINDS:
    raise ValueError(f"kind is {kind!r}, wanted one of {', '.join(KINDS)}")
  if outside not in OUTSIDE:
    raise ValueError(f"outside is {outside!r}, wanted one of {', '.join(OUTSIDE)}")
  _band(low, high)
  logs = _logs(old_logp_N, behaviour_logp_N, mask_N)
  reduce = segment_mean if kind == "geometric" else segment_sum
  weight = jnp.exp(clamp(reduce(logs, unit_id_N, num_units, mask_N)))
  if outside == "cap":
    return jnp.minimum(weight, high)
  return jnp.where((weight >= low) & (weight <= high), weight, 0.0)


def geometric_reject(old_logp_N, behaviour_logp_N, mask_N, unit_id_N, num_units: int, *, low=0.999, high=1.001) -> Array:
  """1 for units whose geometric-mean ratio pi_old / mu lies in [low, high], else 0: [U] float32.

  verl's geometric rejection. It does not depend on length, so it suits long episodes; multiply it with `truncated_weight`
  at the tokens.
  """
  return (sequence_weight(old_logp_N, behaviour_logp_N, mask_N, unit_id_N, num_units, low=low, high=high) > 0).astype(jnp.float32)


def k3_reject(old_logp_N, behaviour_logp_N, mask_N, unit_id_N, num_units: int, *, threshold=0.005) -> Array:
  """1 for units whose mean k3 = rho - 1 - ln rho, rho = pi_old / mu, is at most `threshold`, else 0: [U] float32.

  verl's k3 rejection (0.001 to 0.01). Unlike the geometric mean it also sees drift that goes both ways and cancels.
  """
  if is_concrete(threshold) and not threshold >= 0:
    raise ValueError(f"threshold is {threshold}, wanted a number of at least 0")
  logs = _logs(old_logp_N, behaviour_logp_N, mask_N)
  return (segment_mean(jnp.expm1(logs) - logs, unit_id_N, num_units, mask_N) <= threshold).astype(jnp.float32)


def off_policy_mask(logp_N, behaviour_logp_N, advantage_U, mask_N, unit_id_N, num_units: int, *, delta) -> Array:
  """0 for units with A < 0 that the current policy has left behind, mean(log mu - log pi) > delta; else 1: [U] float32.

  Off-policy sequence masking (DeepSeek-V3.2; equation number not checked): what the policy would no longer write need not be
  pushed down further. The scale of delta is not settled (TRL 0.5, slime 1e-4), so it has no default.
  """
  if is_concrete(delta) and not delta >= 0:
    raise ValueError(f"delta is {delta}, wanted a number of at least 0")
  drift = segment_mean(_logs(behaviour_logp_N, logp_N, mask_N), unit_id_N, num_units, mask_N)
  if same_length(advantage_U=advantage_U) != num_units:
    raise ValueError(f"advantage_U has length {len(advantage_U)}, but num_units is {num_units}: they must be equal")
  return 1.0 - ((f32(jax.lax.stop_gradient(advantage_U)) < 0) & (drift > delta)).astype(jnp.float32)


def approximate_old_logp(logp_N, behaviour_logp_N, mask_N, version_N, old_version, current_version) -> Array:
  """A-3PO's stand-in for the recompute of pi_old, [N] float32: log mu + a (log pi - log mu), 0 at masked places.

  arXiv 2512.06547 (equation number not checked): a = (v_old - v_mu) / (v_now - v_mu) per token, in [0, 1]. version_N: [N] ints,
  the policy version that wrote each token; old_version, current_version: the versions at the start of the update and now. A
  token of the current version keeps log mu. Saves one forward pass; gradients stop, pi_old is frozen.
  """
  length = same_length(logp_N=logp_N, behaviour_logp_N=behaviour_logp_N, mask_N=mask_N, version_N=version_N)
  mask = as_mask(mask_N, length)
  written = jnp.where(mask, jnp.asarray(version_N), 0)
  gap = f32(current_version - written)
  share = jnp.where(gap > 0, jnp.clip(f32(old_version - written) / jnp.where(gap > 0, gap, 1.0), 0.0, 1.0), 0.0)
  behaviour = jnp.where(mask, jax.lax.stop_gradient(f32(behaviour_logp_N)), 0.0)
  return behaviour + share * _logs(logp_N, behaviour_logp_N, mask)


def effective_sample_size(weight_N, mask_N) -> Array:
  """Share of the tokens that the weights leave at work, scalar float32 in [0, 1]: (sum w)^2 / (n sum w^2).

  1 where all weights are equal; near 0 a few tokens carry the whole update (VCPO, arXiv 2602.17616, reads a collapse from it).
  Over the whole set at once; 0 where nothing counts. Gradients stop.
  """
  mask = as_mask(mask_N, same_length(weight_N=weight_N, mask_N=mask_N))
  weight = jnp.where(mask, jax.lax.stop_gradient(f32(weight_N)), 0.0)
  weight = weight / jnp.maximum(jnp.max(jnp.abs(weight), initial=0.0), 1e-30)  # squares of e^20 would eat the small ones
  return Total(jnp.square(jnp.sum(weight)), jnp.sum(mask) * jnp.sum(jnp.square(weight))).mean()


def chi2(ratio_N, mask_N) -> Total:
  """How far two policies are apart as a chi-squared divergence: Total whose mean is E[rho^2] - 1; 0 on policy. Gradients stop."""
  mask = as_mask(mask_N, same_length(ratio_N=ratio_N, mask_N=mask_N))
  ratio = jnp.where(mask, jax.lax.stop_gradient(f32(ratio_N)), 1.0)
  return Total(jnp.sum(jnp.square(ratio) - 1.0), jnp.sum(mask.astype(jnp.float32)))


def _logs(new_logp_N, old_logp_N, mask_N) -> Array:
  """Clamped log-ratio without gradient, 0 at masked places."""
  return jax.lax.stop_gradient(log_ratio(new_logp_N, old_logp_N, mask_N))


def _band(low, high) -> None:
  if is_concrete(low, high) and not 0 <= low <= high:
    raise ValueError(f"the band is {low} .. {high}, wanted 0 <= low <= high")
