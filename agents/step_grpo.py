"""Step-level GRPO: every step is an example of its own, compared with all steps of all tries of its group.

Paper: ComputerRL (arXiv 2508.14040), its step-level GRPO; lesson chapter 1 on comparing tries.
Differs from the paper in: a step's reward is its try's (1 pass, 0 fail), and the raw reward -1 stays on the step that was
unreadable alone, where the paper gives an ill-formed action 0; token ratios with grpo's clip; groups and replay as in grpo.
"""

from __future__ import annotations

import ml_collections
import numpy as np

from agents import grpo, shaping
from agents.base import Agent
from core.schema import Credit
from losses.step_advantages import step_pooled_advantages

PAD = 128  # steps of a group are padded to a multiple, so that few lengths compile


def defaults() -> ml_collections.ConfigDict:
  cfg = grpo.defaults()
  cfg.update({"name": "step_grpo", "average": "step"})
  return cfg


def make(cfg: ml_collections.ConfigDict) -> Agent:
  base = grpo.make(cfg)
  shaping.refuse(cfg)
  if base.rescale is not None:
    got = f"agent.spread {cfg.spread}, combine {cfg.combine}"
    raise ValueError(f"{got}: step_grpo pools the steps of a group, wanted population, sample or none, and sum")

  def credit(group, scores=None):
    credits = base.credit(group, scores)
    if group.kind != "mixed":
      return credits
    sizes = [len(e.steps) for e in group.episodes]
    n = sum(sizes)
    reward_S = np.zeros(-(-n // PAD) * PAD, np.float32)
    reward_S[:n] = np.concatenate([step_rewards(e) for e in group.episodes])
    valid_S = np.arange(len(reward_S)) < n
    push = step_pooled_advantages(reward_S, np.zeros(len(reward_S), np.int32), 1, valid_S=valid_S, spread=cfg.spread, eps=cfg.eps)
    parts = np.split(np.asarray(push)[:n], np.cumsum(sizes)[:-1])
    return [Credit(part, c.keep) for part, c in zip(parts, credits, strict=True)]

  return base._replace(credit=credit)


def step_rewards(episode) -> np.ndarray:
  """f32 [H]: 1 at every step of a pass, 0 of a fail, -1 at the step that nobody could read."""
  reward_H = np.full(len(episode.steps), float(episode.success), np.float32)
  if episode.raw_reward < 0:
    reward_H[-1] = episode.raw_reward
  return reward_H
