"""Objectives on stored episodes compared in pairs or judged one by one: the offline baselines, no sampling needed.

They read one log-ratio per episode, the sum over its agent tokens of log pi - log pi_ref: `episode_logratio`. One number per
pair [P] or episode [E] comes back, to be averaged by losses.reduce.token_mean with the mask of real pairs or episodes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from core.segments import is_concrete, same_length, segment_total
from losses.arrays import f32, guard
from losses.reduce import token_mean


def episode_logratio(logp_N, ref_logp_N, mask_N, episode_id_N, num_episodes: int) -> Array:
  """Sum over each episode's agent tokens of log pi - log pi_ref, [E] float32; 0 without tokens. Gradient into logp_N only."""
  same_length(logp_N=logp_N, ref_logp_N=ref_logp_N, mask_N=mask_N, episode_id_N=episode_id_N)
  return segment_total(f32(logp_N) - jax.lax.stop_gradient(f32(ref_logp_N)), episode_id_N, num_episodes, mask_N).sum


def dpo_loss(chosen_logratio_P, rejected_logratio_P, *, beta=0.1) -> Array:
  """DPO: make the passed try likelier than the failed one of the same task, [P] float32: -log sigmoid(beta (c - r)).

  arXiv 2305.18290, eq 7. chosen_logratio_P, rejected_logratio_P: [P] from `episode_logratio`. beta > 0 is the leash: the larger,
  the sooner a pair counts as settled. Gradient: -beta sigmoid(-beta (c - r)) into chosen, its negative into rejected.
  """
  same_length(chosen_logratio_P=chosen_logratio_P, rejected_logratio_P=rejected_logratio_P)
  _positive(beta=beta)
  chosen, rejected = f32(chosen_logratio_P), f32(rejected_logratio_P)
  return jax.nn.softplus(-beta * (guard(chosen, rejected) - guard(rejected, chosen)))


def kto_loss(logratio_E, desirable_E, reference_point, *, beta=0.1, weight_pos=1.0, weight_neg=1.0) -> Array:
  """KTO: passes above a reference point, fails below it, no pairs needed, [E] float32: weight (1 - sigmoid(+-beta (x - z))).

  arXiv 2402.01306, eqs 7 and 8 (numbers not checked): x the episode's log-ratio, z = `reference_point`, + where desirable and -
  where not. weight_pos, weight_neg: lambda_D and lambda_U; keep weight_pos * passes within 1 to 4/3 of weight_neg * fails.
  Gradient: into logratio_E only; it fades far from z on either side, so a hopeless episode pulls little.
  """
  same_length(logratio_E=logratio_E, desirable_E=desirable_E)
  _positive(beta=beta)
  for name, weight in (("weight_pos", weight_pos), ("weight_neg", weight_neg)):
    if is_concrete(weight) and not weight >= 0:
      raise ValueError(f"{name} is {weight}, wanted a number of at least 0")
  desirable = jnp.asarray(desirable_E) != 0
  point = jax.lax.stop_gradient(f32(reference_point))
  distance = jnp.where(desirable, 1.0, -1.0) * beta * (guard(f32(logratio_E)) - point)
  return jnp.where(desirable, f32(weight_pos), f32(weight_neg)) * jax.nn.sigmoid(-distance)


def kto_reference_point(mismatched_logratio_E, valid_E) -> Array:
  """KTO's reference point, scalar float32: max(0, mean log-ratio of mismatched episodes), an estimate of KL(pi || pi_ref).

  arXiv 2402.01306, section 4. mismatched_logratio_E: [E] log-ratios of episodes scored under another task's goal. Take it over
  the whole optimiser step. Never below 0, as a KL is; 0 where nothing is valid. Gradients stop.
  """
  same_length(mismatched_logratio_E=mismatched_logratio_E, valid_E=valid_E)
  return jax.lax.stop_gradient(jnp.maximum(token_mean(mismatched_logratio_E, valid_E).mean(), 0.0))


def _positive(**numbers) -> None:
  for name, value in numbers.items():
    if is_concrete(value) and not value > 0:
      raise ValueError(f"{name} is {value}, wanted a number above 0")
