"""RLOO: each try against the mean of the others in its group, and plain REINFORCE with a clipped ratio.

Paper: Back to Basics (arXiv 2402.14740), the leave-one-out estimator; lesson chapter 1 on comparing tries.
Differs from the paper in: token ratios against the sampler with GRPO's clip (with one pass over fresh data the ratio is 1 and
this is the paper's estimator); token-level mean; no KL; groups and replay as in grpo.
"""

from __future__ import annotations

import ml_collections
import numpy as np

from agents import grpo
from agents.base import Agent
from losses.advantages import leave_one_out


def defaults() -> ml_collections.ConfigDict:
  cfg = grpo.defaults()
  cfg.update({"name": "rloo", "clip_high": 0.2})
  return cfg


def make(cfg: ml_collections.ConfigDict) -> Agent:
  agent = grpo.make(cfg, lambda reward_E: leave_one_out(reward_E, np.zeros(len(reward_E), np.int32), 1))
  if cfg.combine != "sum" or cfg.spread != "population":
    got = f"agent.spread {cfg.spread}, combine {cfg.combine}"
    raise ValueError(f"{got}: rloo takes leave-one-out as it is, wanted population (unused) and sum")
  return agent
