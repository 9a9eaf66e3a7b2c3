"""DAPO: GRPO with Clip-Higher, dynamic sampling, a token-level loss, and cut-off episodes kept out of the loss.

Paper: DAPO (arXiv 2503.14476), eqs 8, 11 and section 3.4; lesson chapter 5.
Differs from the paper in: rewards are the checker's 1 / 0 / -1 instead of +1 / -1; the unit that overlong filtering masks is
the episode that hit the step limit, its reward still counting in the group; dynamic sampling stops after a cap of rounds.
"""

from __future__ import annotations

import ml_collections
import numpy as np

from agents import grpo
from agents.base import Agent
from core.schema import Credit, End


def defaults() -> ml_collections.ConfigDict:
  cfg = grpo.defaults()
  cfg.update({"name": "dapo", "replay": 0, "group_size": 16, "dual_clip": 3.0})
  cfg.truncation = "mask"  # "mask" keeps cut-off episodes out of the loss, "learn" leaves them in
  return cfg


def make(cfg: ml_collections.ConfigDict) -> Agent:
  if cfg.truncation not in ("mask", "learn"):
    raise ValueError(f"agent.truncation is {cfg.truncation!r}, wanted 'mask' or 'learn'")
  base = grpo.make(cfg)

  def credit(group):
    credits = base.credit(group)
    if cfg.truncation == "mask":
      for i, episode in enumerate(group.episodes):
        if episode.end == End.TRUNCATED:
          credits[i] = Credit(credits[i].advantage, np.zeros(len(episode.steps), bool))
    return credits

  return base._replace(credit=credit)
