"""GRPO: every token of an episode is pushed by how much better it did than its group.

Paper: DeepSeekMath (arXiv 2402.03300), eq 3 with outcome supervision; lesson chapters 1, 3, 4 and 5.
Differs from the paper in: token-level mean over the whole optimiser step instead of a mean per episode (DAPO eq 8); no KL
term; Clip-Higher 0.2 / 0.28 and a dual clip of 3.0, because ratios are against the sampler's own log-probabilities;
population spread with 1e-6; groups whose tries are all equal are dropped and others sampled (dynamic sampling, capped).
"""

from __future__ import annotations

import ml_collections
import numpy as np

from agents.base import Agent, Phase, episode_credit, keep_all, select_groups, token_metrics
from core.schema import Group
from losses.advantages import group_advantages
from losses.policy import clipped_loss
from losses.ratios import token_ratio
from losses.reduce import token_mean


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "name": "grpo",
      "group_size": 8,  # tries per task
      "spread": "population",  # population, sample or none
      "eps": 1e-6,
      "clip_low": 0.2,
      "clip_high": 0.28,
      "dual_clip": 3.0,  # 0 = off
      "replay": 1,  # successes kept per task; 0 = off
      "dynamic_sampling": True,  # drop all-equal groups and sample others
      "epochs": 1,
      "minibatch": 256,  # token records per optimiser step
    }
  )


def check(cfg: ml_collections.ConfigDict) -> None:
  """Domains of the knobs; each failure one line."""
  wanted = {
    "group_size": (cfg.group_size >= 2, "2 or more tries: one try has nothing to be compared with"),
    "spread": (cfg.spread in ("population", "sample", "none"), "population, sample or none"),
    "eps": (cfg.eps > 0, "a number above 0"),
    "clip_low": (0 < cfg.clip_low < 1, "a number between 0 and 1"),
    "clip_high": (cfg.clip_high > 0, "a number above 0"),
    "dual_clip": (cfg.dual_clip == 0 or cfg.dual_clip > 1, "0 (off) or a number above 1"),
    "replay": (cfg.replay >= 0, "0 (off) or how many successes to keep per task"),
    "epochs": (cfg.epochs >= 1, "1 or more"),
    "minibatch": (cfg.minibatch >= 1, "1 or more token records"),
  }
  for name, (good, want) in wanted.items():
    if not good:
      raise ValueError(f"agent.{name} is {cfg[name]}, wanted {want}")
  if cfg.clip_low < 0.01 and cfg.name != "gspo":
    raise ValueError(f"agent.clip_low is {cfg.clip_low}, a band for episode ratios: {cfg.name} clips tokens, wanted about 0.2")


def make(cfg: ml_collections.ConfigDict) -> Agent:
  check(cfg)

  def select(groups, replay, rng):
    return select_groups(groups, replay, rng, use_replay=cfg.replay > 0, drop_equal=cfg.dynamic_sampling)

  def credit(group: Group):
    reward_E = np.array([e.reward for e in group.episodes], np.float32)
    if group.kind != "mixed":  # decided on raw rewards: shaping never turns an all-equal group into a teaching one
      return episode_credit(group, np.zeros(len(reward_E)))
    ids = np.zeros(len(reward_E), np.int32)
    return episode_credit(group, np.asarray(group_advantages(reward_E, ids, 1, spread=cfg.spread, eps=cfg.eps)))

  def loss(scores, batch):
    mask = batch.is_action.reshape(-1)
    ratio = token_ratio(scores.logp.reshape(-1), batch.behaviour_logp.reshape(-1), mask)
    per_token, clipped = clipped_loss(
      ratio, batch.advantage.reshape(-1), clip_low=cfg.clip_low, clip_high=cfg.clip_high, dual_clip=cfg.dual_clip or None
    )
    return token_mean(per_token, mask), token_metrics(ratio, clipped, batch, scores)

  return Agent(frozenset(), select, credit, keep_all, (Phase("policy", loss, cfg.epochs, cfg.minibatch),), cfg.replay)
