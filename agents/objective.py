"""The policy objective of the group methods from its parts: ratio unit, surrogate, correction, KL term, average.

An algorithm's file sets the parts it is known by; any other combination is a config away. docs/algorithms.md
has the equations, and says which combination is which paper's. Everything is one sum, one count, one division.
"""

from __future__ import annotations

import jax.numpy as jnp

from core.knobs import require
from core.segments import Total, segment_gather, segment_mean, segment_sum
from core.state import Batch, Scores
from losses.correction import approximate_old_logp, geometric_reject, k3_reject, off_policy_mask, sequence_weight
from losses.kl import KINDS, kl_estimate
from losses.policy import advantage_weighted_loss, cispo_loss, clipped_loss, dppo_loss, dro_loss, gmpo_loss, sapo_loss
from losses.ratios import band_weight, sequence_ratio, sequence_token_ratio, token_ratio, truncated_weight
from losses.reduce import constant_norm, episode_mean, episode_sum_mean, micro_batch_mean, token_mean

UNITS = ("token", "step", "episode")
SURROGATES = ("clip", "cispo", "sapo", "gmpo", "dppo", "dppo_kl", "dro", "awr")
AVERAGES = ("token", "step", "episode", "episode_sum", "constant", "micro_batch")
CORRECTIONS = ("none", "truncate", "mask", "sequence", "sequence_product", "geometric", "k3")
OLD = ("sampler", "recompute", "approximate")


def defaults() -> dict:
  """The knobs of the objective, at what GRPO with ratios against the sampler uses."""
  return {
    "ratio": "token",  # unit of the importance ratio: token, step or episode
    "token_form": False,  # of a step or episode ratio: its gradient token by token, which allows a push per step (GSPO-token)
    "surrogate": "clip",  # clip, cispo, sapo, gmpo, dppo (by total variation), dppo_kl, dro or awr
    "surrogate_beta": 1.0,  # of dro (pull back) and awr (temperature of the weights)
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 3.0,  # 0 = off
    "average": "token",  # token, step, episode, episode_sum, constant, or micro_batch (TRL's bnpo: depends on practice.micro_batches)
    "constant": 200.0,  # average "constant": tokens an episode is divided by, whatever its length
    # the ratio is against the sampler's log-probabilities, or the learner's own as the update began: "recompute" (the decoupled
    # objective) or "approximate" (A-3PO: between the sampler's and today's, by how many versions lie between)
    "old_logp": "sampler",
    # what old / sampler does to a token's loss, with ratios that are not against the sampler: truncate (times min(it, cap)), mask
    # (times it inside the band, else 0), sequence, sequence_product (the same by episode, geometric mean or product), geometric,
    # k3 (an episode is left out where its mean leaves the band, or its mean k3 passes the cap)
    "correction": "none",
    "correction_cap": 2.0,
    "correction_low": 0.5,
    "correction_token_cap": 0.0,  # geometric, k3: tokens of what is kept also weigh min(old / sampler, this); 0 = off (verl 2.0)
    "opsm": 0.0,  # an episode pushed down is left out once log(sampler / policy) a token passes this (off-policy mask); 0 = off
    "kl_beta": 0.0,  # weight of the KL term; 0 = off, and no reference policy is kept
    "kl_kind": "k3",  # k1, abs, k2, k3 or k3+ (k3 with k2's gradient)
    "kl_in": "loss",  # "loss", or "reward": the episode's KL is taken off its reward before groups are compared
    "reference": "fixed",  # fixed (the copied policy), phase (the policy as the phase began) or moving (an average that follows)
    "reference_every": 10,  # updates of a phase, or between two moves
    "reference_mix": 0.6,  # share of the policy in a move
  }


def check(cfg) -> None:
  """Domains of the knobs; each failure one line."""
  wanted = {
    "ratio": (cfg.ratio in UNITS, "one of " + ", ".join(UNITS)),
    "surrogate": (cfg.surrogate in SURROGATES, "one of " + ", ".join(SURROGATES)),
    "average": (cfg.average in AVERAGES, "one of " + ", ".join(AVERAGES)),
    "constant": (cfg.constant > 0, "a number of tokens above 0"),
    "clip_low": (0 < cfg.clip_low < 1, "a number between 0 and 1"),
    "clip_high": (cfg.clip_high > 0, "a number above 0"),
    "dual_clip": (cfg.dual_clip == 0 or cfg.dual_clip > 1, "0 (off) or a number above 1"),
    "surrogate_beta": (cfg.surrogate_beta > 0, "a number above 0"),
    "old_logp": (cfg.old_logp in OLD, "one of " + ", ".join(OLD)),
    "correction": (cfg.correction in CORRECTIONS, "one of " + ", ".join(CORRECTIONS)),
    "correction_cap": (0 < cfg.correction_cap < 1 if cfg.correction == "k3" else cfg.correction_cap >= 1, "1 or more (k3: about 0.005)"),
    "opsm": (cfg.opsm >= 0, "0 (off) or a log-ratio above 0"),
    "correction_token_cap": (cfg.correction_token_cap == 0 or cfg.correction_token_cap >= 1, "0 (off) or 1 or more"),
    "correction_low": (0 <= cfg.correction_low < 1, "a number from 0, below 1"),
    "kl_beta": (cfg.kl_beta >= 0, "0 (off) or more: below 0 it would pay for drifting away"),
    "kl_kind": (cfg.kl_kind in KINDS, "one of " + ", ".join(KINDS)),
    "kl_in": (cfg.kl_in in ("loss", "reward"), "loss or reward"),
    "reference": (cfg.reference in ("fixed", "phase", "moving"), "fixed, phase or moving"),
    "reference_every": (cfg.reference_every >= 1, "1 or more updates"),
    "reference_mix": (0 < cfg.reference_mix <= 1, "a share above 0, at most 1"),
  }
  require("agent", cfg, wanted)
  _check_together(cfg)


def _check_together(cfg) -> None:
  """Parts that do not belong together."""
  unit = cfg.ratio != "token"
  if unit and cfg.surrogate not in ("clip", "gmpo"):
    raise ValueError(f"agent.surrogate {cfg.surrogate} works on token ratios, not on {cfg.ratio} ratios: set agent.ratio=token")
  if cfg.surrogate == "gmpo" and not unit:
    raise ValueError("agent.surrogate gmpo takes one geometric mean a unit: set agent.ratio=episode or step")
  if cfg.token_form and not unit:
    raise ValueError("agent.token_form is a form of step and episode ratios: set agent.ratio=episode or step")
  _check_band(cfg, unit)
  if unit and cfg.average != "episode":
    raise ValueError(f"agent.average is {cfg.average}: with {cfg.ratio} ratios wanted episode, token sums would weigh units by length")
  if cfg.correction != "none" and cfg.old_logp == "sampler":
    raise ValueError(f"agent.correction {cfg.correction} with old_logp=sampler counts the same drift twice: set agent.old_logp=recompute")
  if (cfg.correction != "none" or cfg.opsm) and unit and not cfg.token_form:
    raise ValueError(f"agent.correction {cfg.correction}, opsm {cfg.opsm} weigh tokens: {cfg.ratio} ratios want agent.token_form=True")
  if cfg.correction_token_cap and cfg.correction not in ("geometric", "k3"):
    raise ValueError(f"agent.correction_token_cap is of corrections geometric and k3, not of {cfg.correction}, wanted 0")
  if cfg.correction != "none" and cfg.surrogate == "sapo":
    raise ValueError(f"agent.correction is {cfg.correction}: sapo's gate already answers for the drift, wanted none")


def _check_band(cfg, unit: bool) -> None:
  """A band is of one surrogate's numbers: another's would act on every token or on none."""
  low, high = cfg.clip_low, cfg.clip_high
  got = f"agent.clip_low, clip_high are {low}, {high}"
  if cfg.surrogate == "clip" and unit and max(low, high) > 0.01:
    raise ValueError(f"{got}: {cfg.name} clips {cfg.ratio} ratios, wanted 3e-4, 4e-4")
  if cfg.surrogate == "clip" and not unit and min(low, high) < 0.01:
    raise ValueError(f"{got}, a band for episode ratios: {cfg.name} clips tokens, wanted about 0.2, 0.28")
  if cfg.surrogate == "clip" and high > 1:
    raise ValueError(f"{got}: {cfg.name} clips tokens, wanted about 0.2, 0.28 (a cap on the weight is agent.surrogate=cispo)")
  if cfg.surrogate == "cispo" and high < 1:
    raise ValueError(f"agent.clip_high is {high}: cispo takes the cap on the weight itself, wanted 1 or more (5.0)")
  if cfg.surrogate == "gmpo" and (min(low, high) < 0.01 or high > 1):
    raise ValueError(f"{got}: gmpo clips the log-ratios of tokens, wanted about 0.4, 0.4")
  if cfg.surrogate in ("dppo", "dppo_kl") and (min(low, high) < 1e-3 or high > 1):
    raise ValueError(f"{got}: {cfg.surrogate} drops a token by how far its probability moved, wanted about 0.2, 0.2")


def needs(cfg) -> frozenset[str]:
  """What train.py has to compute before credit."""
  return frozenset(({"old_logp"} if cfg.old_logp == "recompute" else set()) | ({"ref_logp"} if cfg.kl_beta else set()))


def make_loss(cfg):
  """loss(scores, batch) -> (Total, {metric: Total}) for the knobs above."""

  def loss(scores: Scores, batch: Batch):
    mask = batch.is_action.reshape(-1)
    logp, sampled = scores.logp.reshape(-1), batch.behaviour_logp.reshape(-1)
    old = _old_logp(cfg, logp, sampled, mask, batch)
    by_token = cfg.ratio == "token" or (cfg.token_form and cfg.surrogate == "clip")
    total, ratio_N, clipped_N = (_token_objective if by_token else _unit_objective)(cfg, logp, old, sampled, mask, batch)
    metrics = token_metrics(ratio_N, clipped_N, batch, scores)
    if cfg.kl_beta:
      kl = kl_estimate(logp, batch.ref_logp.reshape(-1), cfg.kl_kind)
      metrics["policy/kl_ref"] = token_mean(kl_estimate(logp, batch.ref_logp.reshape(-1), "k3"), mask)
      if cfg.kl_in == "loss":
        total = Total(total.sum + cfg.kl_beta * average(cfg, kl, mask, batch).sum, total.count)
    return total, metrics

  return loss


def average(cfg, x_N, mask, batch: Batch) -> Total:
  """One number per token -> the optimiser step's sum and count, by the config's rule."""
  if cfg.average == "token":
    return token_mean(x_N, mask)
  if cfg.average == "micro_batch":
    return micro_batch_mean(x_N, mask)
  if cfg.average == "step":
    return episode_mean(x_N, mask, batch.step_id.reshape(-1), batch.num_steps)
  episode_N = batch.episode_id.reshape(-1)
  if cfg.average == "constant":
    episodes = jnp.sum(segment_sum(mask.astype(jnp.float32), episode_N, batch.num_episodes, mask) > 0)
    total = constant_norm(x_N, mask, cfg.constant)  # of one episode; a micro-batch without any adds nothing to the divisor
    return Total(total.sum, episodes * total.count)
  rule = episode_mean if cfg.average == "episode" else episode_sum_mean
  return rule(x_N, mask, episode_N, batch.num_episodes)


def _token_objective(cfg, logp, old, sampled, mask, batch: Batch):
  """(Total, ratio_N, clipped_N) where every token has a loss of its own."""
  advantage = batch.advantage.reshape(-1)
  if cfg.ratio == "token":
    ratio = token_ratio(logp, old, mask)
  else:
    ids, num = _units(cfg, batch)
    ratio = sequence_token_ratio(logp, old, mask, ids, num)
  if cfg.surrogate == "clip":
    per_token, clipped = clipped_loss(ratio, advantage, clip_low=cfg.clip_low, clip_high=cfg.clip_high, dual_clip=cfg.dual_clip or None)
  elif cfg.surrogate == "cispo":
    per_token, clipped = cispo_loss(logp, ratio, advantage, mask, cap=cfg.clip_high)
  elif cfg.surrogate in ("dppo", "dppo_kl"):
    kind = "tv" if cfg.surrogate == "dppo" else "kl"
    per_token, clipped = dppo_loss(logp, old, advantage, mask, divergence=kind, low=cfg.clip_low, high=cfg.clip_high)
  elif cfg.surrogate == "dro":
    per_token, clipped = dro_loss(logp, old, advantage, mask, beta=cfg.surrogate_beta), jnp.zeros_like(mask)
  elif cfg.surrogate == "awr":
    per_token, clipped = advantage_weighted_loss(logp, advantage, mask, beta=cfg.surrogate_beta), jnp.zeros_like(mask)
  else:
    per_token, clipped = sapo_loss(ratio, advantage), jnp.zeros_like(mask)
  if cfg.correction != "none":
    per_token = per_token * _correction(cfg, old, sampled, mask, batch)
  if cfg.opsm:
    episode_N, num = batch.episode_id.reshape(-1), batch.num_episodes
    push_E = segment_mean(advantage, episode_N, num, mask)
    per_token = per_token * segment_gather(off_policy_mask(logp, sampled, push_E, mask, episode_N, num, delta=cfg.opsm), episode_N)
  return average(cfg, per_token, mask, batch), ratio, clipped


def _old_logp(cfg, logp, sampled, mask, batch: Batch):
  """What the ratio is taken against, [N]."""
  if cfg.old_logp == "recompute":
    return batch.old_logp.reshape(-1)
  if cfg.old_logp == "approximate":  # the update makes version now + 1 out of what it began with, now
    return approximate_old_logp(logp, sampled, mask, batch.version.reshape(-1), batch.now, batch.now + 1)
  return sampled


def _correction(cfg, old, sampled, mask, batch: Batch):
  """Weight of every token, [N]: how far the policy the update began with had moved from the one that sampled."""
  if cfg.correction == "truncate":
    return truncated_weight(old, sampled, mask, cap=cfg.correction_cap)
  if cfg.correction == "mask":
    return band_weight(old, sampled, mask, low=cfg.correction_low, high=cfg.correction_cap)
  episode_N, num = batch.episode_id.reshape(-1), batch.num_episodes
  args = (old, sampled, mask, episode_N, num)
  if cfg.correction == "geometric":
    weight_E = geometric_reject(*args, low=cfg.correction_low, high=cfg.correction_cap)
  elif cfg.correction == "k3":
    weight_E = k3_reject(*args, threshold=cfg.correction_cap)
  else:
    kind = "product" if cfg.correction == "sequence_product" else "geometric"
    weight_E = sequence_weight(*args, kind=kind, low=cfg.correction_low, high=cfg.correction_cap)
  weight_N = segment_gather(weight_E, episode_N)
  return weight_N * truncated_weight(old, sampled, mask, cap=cfg.correction_token_cap) if cfg.correction_token_cap else weight_N


def _unit_objective(cfg, logp, old, sampled, mask, batch: Batch):
  """(Total, ratio_N, clipped_N) where an episode or a step has one loss; the count is of units."""
  ids, num = _units(cfg, batch)
  advantage_U = segment_mean(batch.advantage.reshape(-1), ids, num, mask)
  valid_U = segment_sum(mask.astype(jnp.float32), ids, num, mask) > 0
  if cfg.surrogate == "gmpo":
    loss_U, clipped_N = gmpo_loss(logp, old, advantage_U, mask, ids, num, clip_low=cfg.clip_low, clip_high=cfg.clip_high)
    ratio_N = token_ratio(logp, old, mask)
  else:
    ratio_U = sequence_ratio(logp, old, mask, ids, num)
    loss_U, clipped_U = clipped_loss(ratio_U, advantage_U, clip_low=cfg.clip_low, clip_high=cfg.clip_high, dual_clip=cfg.dual_clip or None)
    ratio_N, clipped_N = segment_gather(ratio_U, ids), segment_gather(clipped_U.astype(jnp.float32), ids) > 0
  return token_mean(loss_U, valid_U), ratio_N, clipped_N


def _units(cfg, batch: Batch):
  ids, num = (batch.step_id, batch.num_steps) if cfg.ratio == "step" else (batch.episode_id, batch.num_episodes)
  return ids.reshape(-1), num


def token_metrics(ratio_N, clipped_N, batch: Batch, scores: Scores) -> dict[str, Total]:
  """The curves every policy phase draws, as totals over the tokens of the loss."""
  mask = batch.is_action.reshape(-1)
  logp, behaviour = scores.logp.reshape(-1), batch.behaviour_logp.reshape(-1)
  log_ratio = jnp.where(mask, logp - behaviour, 0.0)
  return {
    "policy/clipped_share": token_mean(clipped_N.astype(jnp.float32), mask),
    "policy/ratio_mean": token_mean(ratio_N, mask),
    "policy/entropy": token_mean(scores.entropy.reshape(-1), mask),
    # k3 of sampler against trainer, of all tokens; and of those that the weights of this update's start wrote, which in its first
    # step have not moved: that is the engines' mismatch
    "policy/drift_kl": token_mean(jnp.expm1(log_ratio) - log_ratio, mask),
    "policy/mismatch_kl": token_mean(jnp.expm1(log_ratio) - log_ratio, mask & (batch.version.reshape(-1) == batch.now)),
  }
