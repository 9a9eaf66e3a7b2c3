"""GSPO: one importance ratio per episode, the geometric mean of its tokens' ratios, clipped once in a tiny band.

Paper: Group Sequence Policy Optimization (arXiv 2507.18071), eqs 5 to 7, band 3e-4 / 4e-4; lesson chapter 5.
Differs from the paper in: "sequence" is the whole episode, action tokens only (agent.ratio=step takes single steps); an
episode never straddles minibatches, so keep them large; no KL; groups and replay as in grpo.
"""

from __future__ import annotations

import ml_collections

from agents import grpo
from agents.base import Agent


def defaults() -> ml_collections.ConfigDict:
  cfg = grpo.defaults()
  cfg.update({"name": "gspo", "ratio": "episode", "average": "episode", "clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": 0.0,
              "minibatch": 512})  # fmt: skip
  return cfg


def make(cfg: ml_collections.ConfigDict) -> Agent:
  return grpo.make(cfg)
