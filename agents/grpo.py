"""GRPO: every token of an episode is pushed by how much better it did than its group.

Paper: DeepSeekMath (arXiv 2402.03300), eq 3 with outcome supervision; lesson chapters 1, 3, 4 and 5.
Differs from the paper in: token-level mean over the whole optimiser step instead of a mean per episode (DAPO eq 8); no KL
term; Clip-Higher 0.2 / 0.28 and a dual clip of 3.0, because ratios are against the sampler's own log-probabilities;
population spread with 1e-6; groups whose tries are all equal are dropped and others sampled (dynamic sampling, capped).
"""

from __future__ import annotations

import ml_collections
import numpy as np

from agents import objective
from agents.base import Agent, Phase, episode_credit, keep_all, select_groups
from core.knobs import require
from core.schema import End, Episode, EpisodeScores, Group
from losses.advantages import group_advantages
from losses.rewards import shortest_path_reward, soft_overlong_penalty


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "name": "grpo",
      "group_size": 8,  # tries per task
      "spread": "population",  # population, sample or none
      "eps": 1e-6,
      "replay": 1,  # successes kept per task; 0 = off
      "dynamic_sampling": True,  # drop all-equal groups and sample others
      "overlong": 0,  # steps before the step limit in which a reward fades by up to 1 (DAPO's soft punishment); 0 = off
      "shortest_path": 0.0,  # share of a pass's reward lost in proportion to its steps beyond the group's shortest pass; 0 = off
      "truncation": "learn",  # "mask" keeps cut-off episodes out of the loss; their reward still counts in the group
      "epochs": 1,
      "minibatch": 256,  # token records per optimiser step
    }
    | objective.defaults()
  )


def check(cfg: ml_collections.ConfigDict) -> None:
  """Domains of the knobs; each failure one line."""
  wanted = {
    "group_size": (cfg.group_size >= 2, "2 or more tries: one try has nothing to be compared with"),
    "spread": (cfg.spread in ("population", "sample", "none"), "population, sample or none"),
    "eps": (cfg.eps > 0, "a number above 0"),
    "replay": (cfg.replay >= 0, "0 (off) or how many successes to keep per task"),
    "overlong": (cfg.overlong >= 0, "0 (off) or a number of steps"),
    "shortest_path": (0 <= cfg.shortest_path <= 1, "a share from 0 (off) to 1"),
    "truncation": (cfg.truncation in ("mask", "learn"), "'mask' or 'learn'"),
    "epochs": (cfg.epochs >= 1, "1 or more"),
    "minibatch": (cfg.minibatch >= 1, "1 or more token records"),
  }
  require("agent", cfg, wanted)
  objective.check(cfg)


def shaped_rewards(cfg, group: Group, scores: list[EpisodeScores] | None) -> np.ndarray:
  """f32 [E]: each try's reward with the shaping that the config states: length of a pass, nearness to the step limit, drift."""
  reward_E = np.array([e.reward for e in group.episodes], np.float32)
  if cfg.shortest_path:
    steps_E = np.array([len(e.steps) for e in group.episodes], np.float32)
    reward_E = np.array(shortest_path_reward(reward_E, steps_E, np.zeros(len(steps_E), np.int32), 1, alpha=cfg.shortest_path))
  for i, episode in enumerate(group.episodes):
    if cfg.overlong:
      limit = episode.step_limit or len(episode.steps)
      reward_E[i] += float(soft_overlong_penalty(len(episode.steps), limit, min(cfg.overlong, limit)))
    if cfg.kl_beta and cfg.kl_in == "reward":
      reward_E[i] -= cfg.kl_beta * episode_kl(episode, scores[i])
  return reward_E


def episode_kl(episode: Episode, scores: EpisodeScores) -> float:
  """k1 of one episode against the reference: the sum of log pi - log ref over its action tokens, as they were sampled."""
  return float(sum((r.logp - s["ref_logp"])[r.is_action].sum() for r, s in zip(episode.records, scores.records, strict=True)))


def make(cfg: ml_collections.ConfigDict, advantages=None) -> Agent:
  """advantages(reward_E) -> f32 [E]: another baseline than the group's mean and spread, for a group whose tries differ."""
  check(cfg)
  if advantages is None:
    advantages = lambda reward_E: group_advantages(reward_E, np.zeros(len(reward_E), np.int32), 1, spread=cfg.spread, eps=cfg.eps)

  def select(groups, replay, rng):
    return select_groups(groups, replay, rng, use_replay=cfg.replay > 0, drop_equal=cfg.dynamic_sampling)

  def credit(group: Group, scores: list[EpisodeScores] | None = None):
    if group.kind != "mixed":  # decided on raw rewards: shaping never turns an all-equal group into a teaching one
      credits = episode_credit(group, np.zeros(len(group.episodes)))
    else:
      credits = episode_credit(group, np.asarray(advantages(shaped_rewards(cfg, group, scores))))
    if cfg.truncation == "mask":
      for episode, credit in zip(group.episodes, credits, strict=True):
        credit.keep[:] = episode.end != End.TRUNCATED
    return credits

  phase = Phase("policy", objective.make_loss(cfg), cfg.epochs, cfg.minibatch)
  reference = (cfg.reference, cfg.reference_every, cfg.reference_mix) if cfg.kl_beta else None
  return Agent(objective.needs(cfg), select, credit, keep_all, (phase,), cfg.replay, reference=reference)
