"""GRPO: every token of an episode is pushed by how much better it did than its group.

Paper: DeepSeekMath (arXiv 2402.03300), eq 3 with outcome supervision; lesson chapters 1, 3, 4 and 5.
Differs from the paper in: token-level mean over the whole optimiser step instead of a mean per episode (DAPO eq 8); no KL
term; Clip-Higher 0.2 / 0.28 and a dual clip of 3.0, because ratios are against the sampler's own log-probabilities;
population spread with 1e-6; groups whose tries are all equal are dropped and others sampled (dynamic sampling, capped).
"""

from __future__ import annotations

import ml_collections
import numpy as np

from agents import objective, shaping
from agents.base import Agent, Phase, episode_credit, keep_all, select_groups
from core.knobs import require
from core.schema import End, EpisodeScores, Group
from losses.advantages import SPREADS, group_advantages


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "name": "grpo",
      "group_size": 8,  # tries per task
      "spread": "population",  # population, sample, none, or batch (of all rewards of the update)
      "eps": 1e-6,
      "replay": 1,  # successes kept per task; 0 = off
      "dynamic_sampling": True,  # drop all-equal groups and sample others
      "truncation": "learn",  # "mask" keeps cut-off episodes out of the loss; their reward still counts in the group
      "epochs": 1,
      "minibatch": 256,  # token records per optimiser step
    }
    | shaping.defaults()
    | objective.defaults()
  )


def check(cfg: ml_collections.ConfigDict) -> None:
  """Domains of the knobs; each failure one line."""
  wanted = {
    "group_size": (cfg.group_size >= 2, "2 or more tries: one try has nothing to be compared with"),
    "spread": (cfg.spread in SPREADS, "one of " + ", ".join(SPREADS)),
    "eps": (cfg.eps > 0, "a number above 0"),
    "replay": (cfg.replay >= 0, "0 (off) or how many successes to keep per task"),
    "truncation": (cfg.truncation in ("mask", "learn"), "'mask' or 'learn'"),
    "epochs": (cfg.epochs >= 1, "1 or more"),
    "minibatch": (cfg.minibatch >= 1, "1 or more token records"),
  }
  require("agent", cfg, wanted | shaping.wanted(cfg))
  if cfg.combine == "gdpo" and cfg.spread != "population":
    raise ValueError(f"agent.combine is gdpo with agent.spread {cfg.spread}: it compares each reward by its population spread, wanted that")
  objective.check(cfg)


def make(cfg: ml_collections.ConfigDict, advantages=None) -> Agent:
  """advantages(reward_E) -> f32 [E]: another baseline than the group's mean and spread, for a group whose tries differ."""
  check(cfg)
  late = cfg.combine == "gdpo" or cfg.spread == "batch"  # divided once the whole update is there
  if advantages is None:
    spread = "none" if cfg.spread == "batch" else cfg.spread
    advantages = lambda reward_E: group_advantages(reward_E, np.zeros(len(reward_E), np.int32), 1, spread=spread, eps=cfg.eps)

  def select(groups, replay, rng):
    return select_groups(groups, replay, rng, use_replay=cfg.replay > 0, drop_equal=cfg.dynamic_sampling)

  def credit(group: Group, scores: list[EpisodeScores] | None = None):
    by_name = shaping.rewards(cfg, group, scores)
    reward_E, push_E = np.asarray(sum(by_name.values())), np.zeros(len(group.episodes))
    if group.kind == "mixed":  # decided on raw rewards: shaping never turns an all-equal group into a teaching one
      push_E = shaping.apart(cfg, by_name) if cfg.combine == "gdpo" else np.asarray(advantages(reward_E))
    credits = episode_credit(group, push_E)
    for credit, reward in zip(credits, reward_E, strict=True):
      credit.reward = float(reward)
    if cfg.truncation == "mask":
      for episode, credit in zip(group.episodes, credits, strict=True):
        credit.keep[:] = episode.end != End.TRUNCATED
    return credits

  phase = Phase("policy", objective.make_loss(cfg), cfg.epochs, cfg.minibatch)
  reference = (cfg.reference, cfg.reference_every, cfg.reference_mix) if cfg.kl_beta else None
  rescale = (lambda episodes, credits: shaping.over_update(cfg, credits)) if late else None
  return Agent(objective.needs(cfg), select, credit, keep_all, (phase,), cfg.replay, reference=reference, rescale=rescale)
