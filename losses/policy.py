"""The objectives that move the policy, one number per token (or per unit) to be averaged by losses.reduce.

Signs: these are losses, to be made smaller. Advantages are numbers: no gradient flows into them. The members that read a
ratio take it from losses.ratios, which has put 1 at masked places; the members that read log-probabilities take mask_N and
return 0 there. Where two come back, the second says which entries the band has taken over (their gradient is 0).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from core.segments import as_mask, is_concrete, same_length, segment_gather, segment_mean, segment_sum, segment_total
from losses.arrays import f32, guard
from losses.ratios import log_ratio


def clipped_loss(ratio_N, advantage_N, *, clip_low=0.2, clip_high=0.28, dual_clip=None) -> tuple[Array, Array]:
  """PPO's clipped surrogate with a band of two widths: (loss_N float32, clipped_N bool).

  loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A). PPO, arXiv 1707.06347, eq 7; Clip-Higher: DAPO, arXiv
  2503.14476, eq 8; lesson chapters 4 and 5. On [E] sequence ratios with 3e-4 / 4e-4 it is GSPO's eq 5 (arXiv 2507.18071).
  dual_clip: c > 1 also bounds the loss by -c A where A < 0: the plain branch has no end when a pushed-down token has grown
  far, as happens against sampler log-probabilities (arXiv 1912.09729; verl and ARPO use 3.0). Infinite bands give plain
  importance weighting.
  clipped_N: A > 0 and rho > 1 + clip_high, or A < 0 and rho < 1 - clip_low; on the edge, or with A = 0, nothing is clipped.
  The dual clip's entries are not counted in it. Gradient: -A into the ratio, 0 where a clip holds.
  """
  same_length(ratio_N=ratio_N, advantage_N=advantage_N)
  _not_negative(clip_low=clip_low, clip_high=clip_high)
  if dual_clip is not None and is_concrete(dual_clip) and not dual_clip > 1:
    raise ValueError(f"dual_clip is {dual_clip}, wanted a number above 1, or None for none")
  advantage = jax.lax.stop_gradient(f32(advantage_N))
  ratio = guard(f32(ratio_N), advantage)
  high, low = f32(1.0 + clip_high), f32(1.0 - clip_low)
  too_high, too_low = (advantage > 0) & (ratio > high), (advantage < 0) & (ratio < low)
  # min(rho A, clip(rho) A) spelled out: exact on the edge, where a minimum would halve the gradient
  held = jnp.where(too_high, high, jnp.where(too_low, low, ratio))
  if dual_clip is not None:
    held = jnp.where((advantage < 0) & (ratio > dual_clip), f32(dual_clip), held)
  return -held * advantage, too_high | too_low


def cispo_loss(logp_N, ratio_N, advantage_N, mask_N, *, cap=5.0) -> tuple[Array, Array]:
  """CISPO: a capped weight on REINFORCE, (loss_N float32, capped_N bool): -sg[min(rho, cap)] A log pi.

  MiniMax-M1, arXiv 2506.13585, eqs 4 and 5; ScaleRL, arXiv 2510.13786. A capped token keeps its gradient, only its weight is
  held. `cap` is the cap itself (TRL's reading, 5.0); where a recipe writes 1 + eps_high, pass that sum. Gradient: into logp_N.
  """
  length = same_length(logp_N=logp_N, ratio_N=ratio_N, advantage_N=advantage_N, mask_N=mask_N)
  mask = as_mask(mask_N, length)
  ratio, advantage = _constants(mask, ratio_N, advantage_N)
  logp = jnp.where(mask, f32(logp_N), 0.0)
  return -jnp.minimum(ratio, cap) * advantage * logp, mask & (ratio > cap)


def sapo_loss(ratio_N, advantage_N, *, tau_pos=1.0, tau_neg=1.05) -> Array:
  """SAPO: a smooth gate in place of the clip, [N] float32: -(4 / tau) sigmoid(tau (rho - 1)) A, tau by the sign of A.

  arXiv 2511.20347. At rho = 1 the gate is 2 / tau and its slope 1, so the gradient there is REINFORCE's; it fades smoothly
  away from 1. Gradient: into the ratio.
  """
  same_length(ratio_N=ratio_N, advantage_N=advantage_N)
  advantage = jax.lax.stop_gradient(f32(advantage_N))
  ratio = guard(f32(ratio_N), advantage)
  tau = jnp.where(advantage > 0, f32(tau_pos), f32(tau_neg))
  return -(4.0 / tau) * jax.nn.sigmoid(tau * (ratio - 1.0)) * advantage


def gmpo_loss(
  logp_N, behaviour_logp_N, advantage_U, mask_N, unit_id_N, num_units: int, *, clip_low=0.4, clip_high=0.4
) -> tuple[Array, Array]:
  """GMPO: clip each token's log-ratio, then one geometric mean per unit: (loss_U float32, clipped_N bool).

  loss_u = -A_u exp(mean_t of the clipped log rho_t); for A > 0 a log-ratio is held at +clip_high, for A < 0 at -clip_low.
  arXiv 2507.20673 (band e^-0.4 .. e^0.4). A unit is an episode or a step. Average the units, not the tokens; a unit without
  tokens counts 0, and its mask leaves it out of the average. Gradient: into logp_N.
  """
  same_length(logp_N=logp_N, unit_id_N=unit_id_N)
  _not_negative(clip_low=clip_low, clip_high=clip_high)
  _length_is(num_units, advantage_U=advantage_U)
  mask = as_mask(mask_N, same_length(logp_N=logp_N, mask_N=mask_N))
  (advantage_U,) = _constants(segment_sum(mask, unit_id_N, num_units, mask) > 0, advantage_U)
  advantage_N = jnp.where(mask, segment_gather(advantage_U, unit_id_N), 0.0)
  logs = log_ratio(logp_N, behaviour_logp_N, mask)
  too_high, too_low = (advantage_N > 0) & (logs > clip_high), (advantage_N < 0) & (logs < -clip_low)
  held = jnp.where(too_high, f32(clip_high), jnp.where(too_low, -f32(clip_low), logs))
  ratio_U = guard(jnp.exp(segment_mean(held, unit_id_N, num_units, mask)), advantage_U)
  return -ratio_U * advantage_U, too_high | too_low


def dppo_loss(
  logp_N, behaviour_logp_N, advantage_N, mask_N, *, divergence="tv", low=0.2, high=0.2, ratio_cap=20.0
) -> tuple[Array, Array]:
  """DPPO: drop a token by how far its probability moved, not by its ratio: (loss_N float32, dropped_N bool).

  loss = -sg[min(rho, ratio_cap)] A log pi at kept tokens, 0 at dropped ones. arXiv 2602.04879. divergence "tv": a token with
  A > 0 is dropped where pi - mu > high, one with A < 0 where mu - pi > low. "kl": where the Bernoulli KL(mu || pi) passes
  the threshold in that direction. So a rare token may grow many times over, and a common one may not run off. Gradient:
  into logp_N at kept tokens.
  """
  length = same_length(logp_N=logp_N, behaviour_logp_N=behaviour_logp_N, advantage_N=advantage_N, mask_N=mask_N)
  if divergence not in ("tv", "kl"):
    raise ValueError(f"divergence is {divergence!r}, wanted 'tv' or 'kl'")
  _not_negative(low=low, high=high)
  mask = as_mask(mask_N, length)
  (advantage,) = _constants(mask, advantage_N)
  logp = jnp.where(mask, f32(logp_N), 0.0)
  now, then = (jax.lax.stop_gradient(jnp.minimum(jnp.where(mask, f32(x), 0.0), 0.0)) for x in (logp_N, behaviour_logp_N))
  moved = jnp.exp(now) - jnp.exp(then)
  distance = jnp.abs(moved) if divergence == "tv" else _bernoulli_kl(then, now)
  dropped = ((advantage > 0) & (moved > 0) & (distance > high)) | ((advantage < 0) & (moved < 0) & (distance > low))
  ratio = jnp.exp(jax.lax.stop_gradient(log_ratio(logp_N, behaviour_logp_N, mask)))
  return jnp.where(dropped, 0.0, -jnp.minimum(ratio, ratio_cap) * advantage * logp), dropped


def imitation_loss(logp_N, mask_N, weight_N=None, *, clip=None) -> Array:
  """Copying: -weight log pi at agent tokens, [N] float32, 0 where masked.

  SFT on demonstrations, and the policy step of DigiRL (arXiv 2406.11896: weight 1 at kept steps, 0 elsewhere; lesson
  chapter 2). clip: (lowest, highest) probability, outside which a token has no gradient; DigiRL's code uses (0.001, 0.99).
  No ratio, no reference. Gradient: -weight into logp_N.
  """
  length = same_length(logp_N=logp_N, mask_N=mask_N, weight_N=weight_N)
  mask = as_mask(mask_N, length)
  logp = jnp.where(mask, f32(logp_N), 0.0)
  if clip is not None:
    lowest, highest = clip
    if is_concrete(lowest, highest) and not 0 < lowest < highest <= 1:
      raise ValueError(f"clip is {clip}, wanted (lowest, highest) probability with 0 < lowest < highest <= 1")
    bounds = jnp.log(f32(lowest)), jnp.log(f32(highest))
    logp = jnp.where((logp >= bounds[0]) & (logp <= bounds[1]), logp, jax.lax.stop_gradient(jnp.clip(logp, *bounds)))
  weight = 1.0 if weight_N is None else _constants(mask, weight_N)[0]
  return jnp.where(mask, -weight * logp, 0.0)


def advantage_weighted_loss(logp_N, advantage_N, mask_N, *, beta, cap=20.0) -> Array:
  """Copying weighted by how good each token's step was, [N] float32: -min(exp(A / beta), cap) log pi; 0 where masked.

  AWR, arXiv 1910.00177 (equation number not checked; cap 20 as there); the form that DigiRL, arXiv 2406.11896, eq 4.1, replaces
  by a hard filter. beta > 0: near 0 only the best steps count, at infinity it is plain copying. Never negative weights, so a
  bad step is left out rather than pushed down. No ratio, any age of data. Gradient: -weight into logp_N.
  """
  mask = as_mask(mask_N, same_length(logp_N=logp_N, advantage_N=advantage_N, mask_N=mask_N))
  if is_concrete(beta, cap) and not (beta > 0 and cap > 0):
    raise ValueError(f"beta and cap are {beta} and {cap}, wanted numbers above 0")
  (advantage,) = _constants(mask, advantage_N)
  return imitation_loss(logp_N, mask, jnp.exp(jnp.minimum(advantage / beta, jnp.log(f32(cap)))))


def dro_loss(logp_N, behaviour_logp_N, advantage_N, mask_N, *, beta) -> Array:
  """DRO: push by the advantage, held back by a square, [N] float32: -(A log pi - beta / 2 (log pi - log mu)^2); 0 where masked.

  arXiv 2405.19107 (number from memory), in verl's token form. No ratio: the pull back to mu is the square's, and it is least
  where log(pi / mu) = A / beta, the same target as `reference_match_loss` with mu for reference. The log-ratio is not clamped.
  Gradient: -A + beta (log pi - log mu) into logp_N.
  """
  length = same_length(logp_N=logp_N, behaviour_logp_N=behaviour_logp_N, advantage_N=advantage_N, mask_N=mask_N)
  if is_concrete(beta) and not beta >= 0:
    raise ValueError(f"beta is {beta}, wanted a number of at least 0")
  mask = as_mask(mask_N, length)
  advantage, behaviour = _constants(mask, advantage_N, behaviour_logp_N)
  logp = jnp.where(mask, f32(logp_N), 0.0)
  return -(advantage * logp - 0.5 * beta * jnp.square(logp - behaviour))


def reference_match_loss(
  logp_N, ref_logp_N, advantage_U, mask_N, unit_id_N, num_units: int, *, beta, average="sum"
) -> Array:
  """WebRL: drift from the reference exactly as far as the advantage says, [U] float32: (beta log(pi / pi_ref) - A)^2.

  WebRL, arXiv 2411.02337; lesson chapter 5 (a target to match). A unit is one action (step). log(pi / pi_ref) is the sum over
  its tokens ("sum", the paper: the log-ratio of the whole action) or their mean ("mean", nearer to the released code). The
  reference is the policy at the end of the previous phase. Needs no behaviour log-probabilities, so any age of data is
  fine. A unit without tokens counts 0. Gradient: 2 beta (beta x - A) into every log-probability of the unit (over |u| for
  "mean"); none into the reference.
  """
  if average not in ("sum", "mean"):
    raise ValueError(f"average is {average!r}, wanted 'sum' or 'mean'")
  if is_concrete(beta) and not beta > 0:
    raise ValueError(f"beta is {beta}, wanted a number above 0")
  drift = _drift(logp_N, ref_logp_N, mask_N, unit_id_N, num_units)
  _length_is(num_units, advantage_U=advantage_U)
  (advantage,) = _constants(drift.count > 0, advantage_U)  # a unit without tokens: drift 0 against advantage 0
  return jnp.square(beta * (drift.sum if average == "sum" else drift.mean()) - advantage)


def reference_match_code_loss(logp_N, ref_logp_N, advantage_U, mask_N, unit_id_N, num_units: int) -> Array:
  """WebRL as its released code computes it, [U] float32: SmoothL1(beta x, A) / beta at positive units, 0 elsewhere.

  x: mean log-ratio of the unit's tokens. beta: 5 where the reference is already sure (mean probability 0.8 or more), else 1,
  then at most |A / x| so that the target is never overshot; detached. advantage_U: from `webrl_code_credit`; its negative
  units are masked out, as in the code. Gradient: into logp_N.
  """
  drift = _drift(logp_N, ref_logp_N, mask_N, unit_id_N, num_units)
  _length_is(num_units, advantage_U=advantage_U)
  mask = as_mask(mask_N, same_length(logp_N=logp_N))
  (advantage,) = _constants(drift.count > 0, advantage_U)
  positive = advantage > 0
  x = drift.mean()
  sure = segment_mean(jnp.exp(jnp.where(mask, f32(ref_logp_N), 0.0)), unit_id_N, num_units, mask) >= 0.8
  size = jax.lax.stop_gradient(jnp.abs(x))
  beta = jnp.minimum(jnp.where(sure, 5.0, 1.0), jnp.where(size > 0, advantage / jnp.where(size > 0, size, 1.0), jnp.inf))
  beta = jnp.where(positive, beta, 1.0)
  gap = beta * x - advantage
  smooth = jnp.where(jnp.abs(gap) < 1.0, 0.5 * jnp.square(gap), jnp.abs(gap) - 0.5)
  return jnp.where(positive, smooth / jax.lax.stop_gradient(beta), 0.0)


def _drift(logp_N, ref_logp_N, mask_N, unit_id_N, num_units: int):
  """Total over each unit's tokens of log pi - log pi_ref. Not clamped: a clamp would stop the very pull that is wanted."""
  same_length(logp_N=logp_N, ref_logp_N=ref_logp_N, mask_N=mask_N, unit_id_N=unit_id_N)
  return segment_total(f32(logp_N) - jax.lax.stop_gradient(f32(ref_logp_N)), unit_id_N, num_units, mask_N)


def _bernoulli_kl(old_logp: Array, new_logp: Array) -> Array:
  """KL between "this token or another" under two policies, from the token's log-probabilities (both <= 0)."""
  old, new = jnp.exp(old_logp), jnp.exp(new_logp)
  rest_old, rest_new = jnp.maximum(1.0 - old, 1e-8), jnp.maximum(1.0 - new, 1e-8)
  return old * (old_logp - new_logp) + rest_old * (jnp.log(rest_old) - jnp.log(rest_new))


def _constants(mask: Array, *arrays) -> tuple[Array, ...]:
  """float32 numbers without gradient, 0 at masked places."""
  return tuple(jnp.where(mask, jax.lax.stop_gradient(f32(x)), 0.0) for x in arrays)


def _not_negative(**bounds) -> None:
  for name, value in bounds.items():
    if is_concrete(value) and not value >= 0:
      raise ValueError(f"{name} is {value}, wanted a number of at least 0")


def _length_is(size: int, **arrays) -> None:
  """ValueError unless the rank-1 arrays have `size` entries."""
  for name, array in arrays.items():
    if same_length(**{name: array}) != size:
      raise ValueError(f"{name} has length {len(array)}, but num_units is {size}: they must be equal")
