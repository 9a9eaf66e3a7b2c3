"""DAPO: GRPO with Clip-Higher, dynamic sampling, a token-level loss, and cut-off episodes kept out of the loss.

Paper: DAPO (arXiv 2503.14476), eqs 8, 11, 13 and section 3.4; lesson chapter 5.
Differs from the paper in: rewards are the checker's 1 / 0 / -1 instead of +1 / -1; the unit that overlong filtering masks is
the episode that hit the step limit, its reward still counting in the group; the soft punishment counts steps and is off by
default (agent.overlong), since filtering already keeps cut-off tries out; dynamic sampling stops after a cap of rounds.
"""

from __future__ import annotations

import ml_collections

from agents import grpo
from agents.base import Agent


def defaults() -> ml_collections.ConfigDict:
  cfg = grpo.defaults()
  cfg.update({"name": "dapo", "replay": 0, "group_size": 16, "truncation": "mask"})
  return cfg


def make(cfg: ml_collections.ConfigDict) -> Agent:
  return grpo.make(cfg)
