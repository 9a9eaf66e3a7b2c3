"""PPO with a critic: every token pushed by how much better things stand after it than the critic guessed before it.

Paper: PPO (arXiv 1707.06347), eq 7; GAE (arXiv 1506.02438), eq 16; as VAPO (arXiv 2504.05118) and UI-TARS-2
(arXiv 2509.02544) train agents: value pre-training, one lambda for the critic (1.0) and one for the policy, which follows the
episode's length in tokens; lesson chapter 2, the critic at scale.
Differs from the paper in: the critic is bounded (a sigmoid between value_low and value_high), its trunk a copy of the copied
policy (critic.trunk=policy: a head on the policy's own trunk, which it does not move); it has an optimiser of its own instead
of a term in the policy's loss; advantages are not whitened (agent.whiten); a step limit counts as the end, without bootstrap.
"""

from __future__ import annotations

from functools import partial

import ml_collections
import numpy as np

from agents import objective
from agents.base import Agent, Phase, keep_all, select_scored
from agents.shaping import whitened
from agents.values import gae_credit, pretrained
from core.knobs import require
from core.schema import End
from core.segments import Total
from losses.advantages import length_adaptive_lambda
from losses.policy import imitation_loss
from losses.reduce import token_mean
from losses.value import bounded_value, clipped_value_loss, return_moments


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "name": "ppo",
      "group_size": 8,  # tries a task; the group is no baseline here, only what is sampled together
      "lam_policy": -1.0,  # a number from 0 to 1, or -1: 1 - 1 / (alpha * action tokens), clamped to [0, 1]
      "lam_alpha": 0.05,
      "lam_critic": 1.0,
      "value_low": -1.0,  # of the bounded critic: the lowest and highest reward
      "value_high": 1.0,
      "value_clip": 0.5,
      "imitation": 0.0,  # weight of VAPO's extra likelihood of successful tries (0.1 there); 0 = off
      # the critic alone, the policy frozen, for at most so many updates (0 = off); sooner where it explains this much of the returns'
      # variance, and its loss fell by no more than this share since the update before (1 = its loss is not asked)
      "pretrain_updates": 5,
      "pretrain_variance": 0.4,
      "pretrain_fall": 0.1,
      "whiten": False,  # pushes with mean 0 and spread 1 over the action tokens of an update
      "truncation": "learn",  # "mask" keeps cut-off episodes out of the policy's loss
      "epochs": 1,
      "critic_epochs": 3,
      "minibatch": 256,  # token records per optimiser step
    }
    | objective.defaults()
  )


def check(cfg: ml_collections.ConfigDict) -> None:
  wanted = {
    "group_size": (cfg.group_size >= 1, "1 or more tries a task"),
    "lam_policy": (cfg.lam_policy == -1 or 0 <= cfg.lam_policy <= 1, "a number from 0 to 1, or -1 (by length)"),
    "lam_critic": (0 <= cfg.lam_critic <= 1, "a number from 0 to 1"),
    "lam_alpha": (cfg.lam_alpha > 0, "a number above 0"),
    "value_low": (cfg.value_low <= 0, "at most 0, what a fail earns"),
    "value_high": (cfg.value_high >= 1, "at least 1, what a pass earns"),
    "value_clip": (cfg.value_clip > 0, "a number above 0"),
    "imitation": (cfg.imitation == 0 or cfg.imitation > 0 and cfg.lam_critic == 1, "0 (off), or more with agent.lam_critic=1"),
    "pretrain_updates": (cfg.pretrain_updates >= 0, "0 (off) or more updates"),
    "pretrain_variance": (cfg.pretrain_variance < 1, "a number below 1, which only a critic without an error reaches"),
    "pretrain_fall": (0 <= cfg.pretrain_fall <= 1, "a share from 0 to 1 (off)"),
    "truncation": (cfg.truncation in ("mask", "learn"), "'mask' or 'learn'"),
    "epochs": (cfg.epochs >= 1, "1 or more"),
    "critic_epochs": (cfg.critic_epochs >= 1, "1 or more: ppo needs its critic"),
    "minibatch": (cfg.minibatch >= 1, "1 or more token records"),
  }
  require("agent", cfg, wanted)
  objective.check(cfg)
  if cfg.kl_beta and cfg.kl_in == "reward":
    raise ValueError("agent.kl_in is reward: ppo's rewards are the environment's alone, wanted loss")
  if cfg.ratio != "token":
    raise ValueError(f"agent.ratio is {cfg.ratio}: ppo pushes every token by itself, wanted token")


def make(cfg: ml_collections.ConfigDict) -> Agent:
  check(cfg)

  def credit(group, scores=None):
    """Per-token pushes and value targets of every try: GAE over its action tokens, whatever stands between them."""
    if scores is None:
      raise ValueError("ppo needs value_logit of every episode before credit")
    fixed = cfg.lam_policy if cfg.lam_policy >= 0 else None
    lam_E = [length_adaptive_lambda(e.action_tokens, cfg.lam_alpha) if fixed is None else fixed for e in group.episodes]
    credits = gae_credit(group.episodes, scores, np.array(lam_E, np.float32), cfg.lam_critic, cfg.value_low, cfg.value_high)
    for episode, credit in zip(group.episodes, credits, strict=True):
      credit.keep[:] = not (cfg.truncation == "mask" and episode.end == End.TRUNCATED)
    return credits

  def policy_loss(scores, batch):
    total, metrics = base_loss(scores, batch)
    if cfg.imitation:
      mask = batch.is_action.reshape(-1)
      passed = (batch.return_.reshape(-1) > 1 - 1e-3).astype("float32")  # advantage + value is the reward, up to rounding
      copied = token_mean(imitation_loss(scores.logp.reshape(-1), mask, passed), mask)
      total = Total(total.sum + cfg.imitation * copied.sum, total.count)
    return total, metrics

  def value_loss(scores, batch):
    mask = batch.is_action.reshape(-1)
    value, old = (bounded_value(x.reshape(-1), cfg.value_low, cfg.value_high) for x in (scores.value_logit, batch.old_value_logit))
    target = batch.return_.reshape(-1)
    total = token_mean(clipped_value_loss(value, old, target, clip=cfg.value_clip), mask)
    return total, {"critic/loss": total, "critic/explained_variance": return_moments(old, target, mask)}

  base_loss = objective.make_loss(cfg)
  policy = Phase("policy", policy_loss, cfg.epochs, cfg.minibatch)
  critic = Phase("critic", value_loss, cfg.critic_epochs, cfg.minibatch, until=partial(pretrained, cfg) if cfg.pretrain_updates else None)
  reference = (cfg.reference, cfg.reference_every, cfg.reference_mix) if cfg.kl_beta else None
  needs = objective.needs(cfg) | {"value_logit"}
  rescale = whitened if cfg.whiten else None
  return Agent(needs, select_scored, credit, keep_all, (policy, critic), critics={"critic": "trunk"}, reference=reference, rescale=rescale)
