"""CISPO: REINFORCE with a capped importance weight; a capped token keeps its gradient, where a clip would silence it.

Paper: MiniMax-M1 (arXiv 2506.13585), eqs 4 and 5; ScaleRL (arXiv 2510.13786). Lesson chapter 5 on what a clip silences.
Differs from the paper in: agent.clip_high is the cap itself (5.0), not 1 + eps; the lower side is free; groups and replay as
in grpo.
"""

from __future__ import annotations

import ml_collections

from agents import grpo
from agents.base import Agent


def defaults() -> ml_collections.ConfigDict:
  cfg = grpo.defaults()
  cfg.update({"name": "cispo", "surrogate": "cispo", "clip_high": 5.0, "dual_clip": 0.0})
  return cfg


def make(cfg: ml_collections.ConfigDict) -> Agent:
  return grpo.make(cfg)
