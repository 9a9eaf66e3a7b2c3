"""GSPO: one importance ratio per episode, the geometric mean of its tokens' ratios, clipped once in a tiny band.

Paper: Group Sequence Policy Optimization (arXiv 2507.18071), eqs 5 to 7, band 3e-4 / 4e-4; lesson chapter 5.
Differs from the paper in: "sequence" is the whole episode, action tokens only; within an optimiser step only the episode's
tokens that are in the minibatch enter its mean, so keep minibatches large; no KL; groups and replay as in grpo.
"""

from __future__ import annotations

import jax.numpy as jnp
import ml_collections

from agents import grpo
from agents.base import Agent, Phase, token_metrics
from core.segments import Total, segment_gather, segment_mean, segment_sum
from losses.policy import clipped_loss
from losses.ratios import sequence_ratio


def defaults() -> ml_collections.ConfigDict:
  cfg = grpo.defaults()
  cfg.update({"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": 0.0, "minibatch": 512})
  return cfg


def make(cfg: ml_collections.ConfigDict) -> Agent:
  if cfg.clip_low > 0.01 or cfg.clip_high > 0.01:
    raise ValueError(f"agent.clip_low, clip_high are {cfg.clip_low}, {cfg.clip_high}: gspo clips episode ratios, wanted 3e-4, 4e-4")
  base = grpo.make(cfg)

  def loss(scores, batch):
    mask, episode_N = batch.is_action.reshape(-1), batch.episode_id.reshape(-1)
    num = batch.num_episodes
    ratio_E = sequence_ratio(scores.logp.reshape(-1), batch.behaviour_logp.reshape(-1), mask, episode_N, num)
    advantage_E = segment_mean(batch.advantage.reshape(-1), episode_N, num, mask)
    loss_E, clipped_E = clipped_loss(
      ratio_E, advantage_E, clip_low=cfg.clip_low, clip_high=cfg.clip_high, dual_clip=cfg.dual_clip or None
    )
    valid_E = segment_sum(mask.astype(jnp.float32), episode_N, num, mask) > 0
    total = Total(jnp.sum(jnp.where(valid_E, loss_E, 0.0)), jnp.sum(valid_E.astype(jnp.float32)))
    ratio_N = segment_gather(ratio_E, episode_N)
    clipped_N = segment_gather(clipped_E.astype(jnp.float32), episode_N) > 0
    return total, token_metrics(ratio_N, clipped_N, batch, scores)

  return base._replace(phases=(Phase("policy", loss, cfg.epochs, cfg.minibatch),))
