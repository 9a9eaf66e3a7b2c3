"""DPO on stored tries: in pairs from one start state, make the pass likelier than the fail, measured from the copied policy.

Paper: Direct Preference Optimization (arXiv 2305.18290), eq 7; lesson chapter 3's offline comparison (ARPO's baselines).
Differs from the paper in: preferences are the checker's, a pass over a fail of the same task; an episode's log-ratio is the
sum over its action tokens; tries are sampled for agent.offline updates, afterwards the store alone is learnt from.
"""

from __future__ import annotations

import ml_collections
import numpy as np

from agents.base import Agent, Phase, keep_all, select_scored
from core.schema import Credit
from core.segments import segment_sum
from losses.preference import dpo_loss, episode_logratio
from losses.reduce import token_mean


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "name": "dpo",
      "group_size": 8,  # tries a task, from which pairs are made
      "beta": 0.1,
      "offline": 10,  # updates at the start that sample and store; 0 = sample at every update
      "store": 12000,  # steps
      "epochs": 1,  # passes over the pairs an update
      "minibatch": 512,  # token records per optimiser step
    }
  )


def make(cfg: ml_collections.ConfigDict) -> Agent:
  wanted = {"group_size": 2, "store": 1, "epochs": 1, "minibatch": 1, "offline": 0}
  for name, least in wanted.items():
    if cfg[name] < least:
      raise ValueError(f"agent.{name} is {cfg[name]}, wanted {least} or more")
  if not cfg.beta > 0:
    raise ValueError(f"agent.beta is {cfg.beta}, wanted a number above 0")

  def credit(group, scores=None):
    """+1 for a pass and -1 for a fail: which of a pair is which."""
    return [Credit.uniform(1.0 if e.success else -1.0, len(e.steps)) for e in group.episodes]

  def loss(scores, batch):
    mask, episode_N, num = batch.is_action.reshape(-1), batch.episode_id.reshape(-1), batch.num_episodes
    drift_E = episode_logratio(scores.logp.reshape(-1), batch.ref_logp.reshape(-1), mask, episode_N, num)
    pairs = num // 2  # episodes 2k (pass) and 2k + 1 (fail) are a pair, as train.py lays them out
    drift_P = drift_E[: 2 * pairs].reshape(pairs, 2)
    whole = segment_sum(mask.astype(np.float32), episode_N, num, mask)[: 2 * pairs].reshape(pairs, 2).min(axis=1) > 0
    total = token_mean(dpo_loss(drift_P[:, 0], drift_P[:, 1], beta=cfg.beta), whole)
    won = token_mean((drift_P[:, 0] > drift_P[:, 1]).astype(np.float32), whole)
    return total, {"policy/entropy": token_mean(scores.entropy.reshape(-1), mask), "policy/pairs_won": won}

  phase = Phase("policy", loss, cfg.epochs, cfg.minibatch, data="store", pairs=True)
  return Agent(frozenset({"ref_logp"}), select_scored, credit, keep_all, (phase,), reference=("fixed", 1, 1.0), store=cfg.store,
               offline=cfg.offline)  # fmt: skip
