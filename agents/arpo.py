"""ARPO: GRPO on whole desktop episodes with a replay of past successes, a wider top of the band and no KL.

Paper: ARPO (arXiv 2505.16282), sections 3.2 and 3.3; lesson chapters 1, 3, 4 and 5.
Differs from the paper's released code in: an unreadable action is -1 and ends the episode (the code adds 0.5 * -1 to the
checker's reward); population spread (the code divides by the sample spread); token-level mean (the code averages per
episode); a replayed success keeps the log-probabilities it was sampled with (the code recomputes them, which makes its
ratio 1); the replaced try is the first plain fail; all-equal groups are dropped and others sampled.
"""

from __future__ import annotations

import ml_collections

from agents import grpo
from agents.base import Agent


def defaults() -> ml_collections.ConfigDict:
  cfg = grpo.defaults()
  cfg.update({"name": "arpo", "clip_high": 0.3, "replay": 8})
  return cfg


def make(cfg: ml_collections.ConfigDict) -> Agent:
  return grpo.make(cfg)
