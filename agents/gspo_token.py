"""GSPO-token: the step's ratio in value and clip, the token's own gradient, so that every step can have a push of its own.

Paper: Group Sequence Policy Optimization (arXiv 2507.18071), section on GSPO-token; lesson chapter 5.
Differs from the paper in: the unit is one step of an episode (agent.ratio=episode takes the whole, which with one push per
episode equals gspo in value, clip and gradient); dual clip off; groups and replay as in grpo.
"""

from __future__ import annotations

import ml_collections

from agents import gspo
from agents.base import Agent


def defaults() -> ml_collections.ConfigDict:
  cfg = gspo.defaults()
  cfg.update({"name": "gspo_token", "ratio": "step", "token_form": True})
  return cfg


def make(cfg: ml_collections.ConfigDict) -> Agent:
  return gspo.make(cfg)
