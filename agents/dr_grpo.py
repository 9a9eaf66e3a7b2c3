"""Dr. GRPO: GRPO without its two divisions, by the group's spread and by the episode's length.

Paper: Understanding R1-Zero-Like Training (arXiv 2503.20783), the Dr. GRPO objective; lesson chapter 5 on averages.
Differs from the paper in: the constant that replaces the length is agent.constant tokens an episode; ratios are against the
sampler with a dual clip of 3.0; groups and replay as in grpo.
"""

from __future__ import annotations

import ml_collections

from agents import grpo
from agents.base import Agent


def defaults() -> ml_collections.ConfigDict:
  cfg = grpo.defaults()
  cfg.update({"name": "dr_grpo", "spread": "none", "average": "constant", "constant": 50.0, "clip_high": 0.2})
  return cfg


def make(cfg: ml_collections.ConfigDict) -> Agent:
  return grpo.make(cfg)
