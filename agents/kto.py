"""KTO on stored tries: passes above a reference point, fails below it, no pairs needed.

Paper: Kahneman-Tversky Optimization (arXiv 2402.01306), eqs 7 and 8; lesson chapter 3's offline comparison (ARPO's baselines).
Differs from the paper in: the reference point is the mean log-ratio of the minibatch's own episodes, at least 0, where the
paper scores outputs under other inputs' prompts; an episode's log-ratio is the sum over its action tokens; desirable is a
pass; tries are sampled for agent.offline updates, afterwards the store alone is learnt from.
"""

from __future__ import annotations

import jax.numpy as jnp
import ml_collections

from agents import dpo
from agents.base import Agent, Phase
from core.segments import segment_mean, segment_sum
from losses.preference import episode_logratio, kto_loss, kto_reference_point
from losses.reduce import token_mean


def defaults() -> ml_collections.ConfigDict:
  cfg = dpo.defaults()
  cfg.update({"name": "kto"})
  cfg.weight_pos = 1.0  # of passes
  cfg.weight_neg = 1.0  # of fails
  return cfg


def make(cfg: ml_collections.ConfigDict) -> Agent:
  if not (cfg.weight_pos >= 0 and cfg.weight_neg >= 0):
    raise ValueError(f"agent.weight_pos, weight_neg are {cfg.weight_pos}, {cfg.weight_neg}, wanted 0 or more of each")
  base = dpo.make(cfg)

  def loss(scores, batch):
    mask, episode_N, num = batch.is_action.reshape(-1), batch.episode_id.reshape(-1), batch.num_episodes
    drift_E = episode_logratio(scores.logp.reshape(-1), batch.ref_logp.reshape(-1), mask, episode_N, num)
    valid_E = segment_sum(mask.astype(jnp.float32), episode_N, num, mask) > 0
    passed_E = segment_mean(batch.advantage.reshape(-1), episode_N, num, mask) > 0
    point = kto_reference_point(drift_E, valid_E)
    per_E = kto_loss(drift_E, passed_E, point, beta=cfg.beta, weight_pos=cfg.weight_pos, weight_neg=cfg.weight_neg)
    return token_mean(per_E, valid_E), {"policy/entropy": token_mean(scores.entropy.reshape(-1), mask)}

  phase = Phase("policy", loss, cfg.epochs, cfg.minibatch, data="store")
  return base._replace(phases=(phase,))
