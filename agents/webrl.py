"""WebRL: drift from the last phase's policy exactly as far as the critic's credit says; old successes return if they still fit.

Paper: WebRL (arXiv 2411.02337), its loss and replay filter, and its released code; lesson chapters 2, 3 and 5.
Per phase of agent.reference_every updates the reference is the policy as the phase began. A step critic gives each action its
credit (web_credit), and the policy's log-ratio to the reference is pulled to credit / beta, whatever policy wrote the action.
Old successes are replayed where the policy finds them neither too likely nor too strange: per action, the geometric mean
probability of its tokens between 0.5 and 0.95; old steps are at most twice the new.
Differs from the paper in: critics are small heads over the copied policy's frozen features; self-evolving tasks are a part of
the curriculum (rollout/curriculum.py), not of this file. agent.variant="code" takes the released code's credit and loss.
"""

from __future__ import annotations

import ml_collections
import numpy as np

from agents.base import Agent, Phase, keep_all, select_scored
from agents.digirl import critic_loss
from core.knobs import require
from core.schema import Credit, Episode, EpisodeScores
from core.segments import segment_mean, segment_sum
from core.stats import action_probabilities, perplexity_keep
from losses.advantages import web_credit, webrl_code_credit
from losses.policy import reference_match_code_loss, reference_match_loss
from losses.reduce import token_mean


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "name": "webrl",
      "group_size": 8,  # tries a task; nothing is compared inside, it is only what is sampled together
      "variant": "paper",  # paper (squared error) or code (binarised credit, Smooth-L1, positives only)
      "lam": 0.5,  # share of the critic's one-step jump in a step's credit
      "beta": 0.2,  # pull to the reference: the target log-ratio is credit / beta (the paper tried 0.01 to 10; 1.0 hardly moves here)
      "average": "sum",  # a step's log-ratio: "sum" over its tokens (paper) or their "mean"
      "reference_every": 4,  # updates a phase
      "low": 0.5,  # perplexity band of replayed actions, as a probability: 0.5 to 0.95 is perplexity 2.0 to 1.053
      "high": 0.95,
      "perplexity": "token",  # an action's probability: geometric mean over its tokens, or "action": their product
      "old_per_new": 2.0,  # replayed steps at most so many times this update's; 0 = no replay
      "store": 4000,  # steps of past tries
      "critic_epochs": 10,  # minibatches an update
      "critic_minibatch": 128,
      "epochs": 1,
      "minibatch": 256,  # token records per optimiser step
    }
  )


def check(cfg: ml_collections.ConfigDict) -> None:
  wanted = {
    "variant": (cfg.variant in ("paper", "code"), "paper or code"),
    "lam": (0 <= cfg.lam <= 1, "a number from 0 to 1"),
    "beta": (cfg.beta > 0, "a number above 0"),
    "average": (cfg.average in ("sum", "mean"), "sum or mean"),
    "perplexity": (cfg.perplexity in ("token", "action"), "token or action"),
    "high": (0 < cfg.high <= 1, "a probability above 0, at most 1"),
    "low": (0 <= cfg.low < cfg.high, "a probability below agent.high"),
    "old_per_new": (cfg.old_per_new >= 0, "0 (no replay) or more"),
  }
  counts = "group_size reference_every store critic_epochs critic_minibatch epochs minibatch"
  wanted |= {k: (cfg[k] >= 1, "1 or more") for k in counts.split()}
  require("agent", cfg, wanted)


def replayed_steps(cfg, episode: Episode, scores: EpisodeScores) -> np.ndarray:
  """bool [H]: steps of an old success whose actions the policy, as it is now, finds neither too likely nor too strange."""
  keep_H = np.zeros(len(episode.steps), bool)
  if episode.success:
    own = [x["old_logp"][r.is_action] for r, x in zip(episode.records, scores.records, strict=True)]
    keep = perplexity_keep(action_probabilities(own, cfg.perplexity == "action"), cfg.low, cfg.high, cfg.variant)
    keep_H[[int(r.step[r.is_action][0]) for r in episode.records]] = keep
  return keep_H


def make(cfg: ml_collections.ConfigDict) -> Agent:
  check(cfg)

  def credit(group, scores=None):
    """group: this update's tries and, marked as replayed, the stored ones. Old failures never return."""
    if scores is None:
      raise ValueError("webrl needs step_value, ref_logp and old_logp of every episode before credit")
    credits, room = [], cfg.old_per_new * sum(len(e.steps) for e in group.episodes if not e.replayed)
    for episode, s in zip(group.episodes, scores, strict=True):
      value_H, reward = s.step_value[:-1], float(episode.success)
      rule = web_credit(value_H, reward, cfg.lam) if cfg.variant == "paper" else webrl_code_credit(value_H, reward)
      credits.append(Credit(np.asarray(rule, np.float32), np.ones(len(episode.steps), bool)))
    for i in reversed([i for i, e in enumerate(group.episodes) if e.replayed]):  # the newest of the old first
      keep_H = replayed_steps(cfg, group.episodes[i], scores[i])
      keep_H &= np.cumsum(keep_H) <= room
      room -= keep_H.sum()
      credits[i] = Credit(credits[i].advantage, keep_H)
    return credits

  def policy_loss(scores, batch):
    mask, step_N, num = batch.is_action.reshape(-1), batch.step_id.reshape(-1), batch.num_steps
    push_U = segment_mean(batch.advantage.reshape(-1), step_N, num, mask)
    args = (scores.logp.reshape(-1), batch.ref_logp.reshape(-1), push_U, mask, step_N, num)
    loss_U = reference_match_loss(*args, beta=cfg.beta, average=cfg.average) if cfg.variant == "paper" else reference_match_code_loss(*args)
    total = token_mean(loss_U, segment_sum(mask.astype("float32"), step_N, num, mask) > 0)
    return total, {"policy/entropy": token_mean(scores.entropy.reshape(-1), mask)}

  critic = Phase("critic", critic_loss("critic"), cfg.critic_epochs, cfg.critic_minibatch, data="store", drawn=True)
  policy = Phase("policy", policy_loss, cfg.epochs, cfg.minibatch, data="store")
  return Agent(frozenset({"step_value", "ref_logp", "old_logp"}), select_scored, credit, keep_all, (critic, policy),
               critics={"critic": "frames"}, reference=("phase", cfg.reference_every, 1.0), store=cfg.store)  # fmt: skip
