"""Filtered imitation: copy the tries that passed, forget the rest. The baseline every other algorithm has to beat.

Paper: the filtered behaviour cloning baseline of DigiRL (arXiv 2406.11896), section 5; lesson chapters 0 and 2.
Differs from the paper in: a try enters by passing (the paper keeps the best tenth by reward); the batch of one minibatch is
drawn from the stored steps of such tries; token-level mean.
"""

from __future__ import annotations

import ml_collections
import numpy as np

from agents.base import Agent, Phase, copy_loss, keep_all, select_scored
from core.schema import Credit


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "name": "filtered_imitation",
      "group_size": 8,  # tries a task; nothing is compared, it is only what is sampled together
      "store": 4000,  # steps of past tries to draw from
      "epochs": 10,  # minibatches drawn an update
      "minibatch": 256,  # token records per optimiser step
    }
  )


def make(cfg: ml_collections.ConfigDict) -> Agent:
  for name in ("group_size", "store", "epochs", "minibatch"):
    if cfg[name] < 1:
      raise ValueError(f"agent.{name} is {cfg[name]}, wanted 1 or more")

  def credit(group, scores=None):
    return [Credit(np.full(len(e.steps), float(e.success), np.float32), np.full(len(e.steps), e.success)) for e in group.episodes]

  phase = Phase("policy", copy_loss, cfg.epochs, cfg.minibatch, data="store", drawn=True)
  return Agent(frozenset(), select_scored, credit, keep_all, (phase,), store=cfg.store)
