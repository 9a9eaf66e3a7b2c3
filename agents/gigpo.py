"""GiGPO: the group's push for the whole try, plus a comparison of the steps that several tries took from the same screen.

Paper: Group-in-Group Policy Optimization (arXiv 2505.10978), section 4; lesson chapter 2 on crediting single steps.
Differs from the paper in: an anchor is a screenshot that is equal to the last bit; the objective is grpo's (token-level mean,
Clip-Higher, dual clip, no KL); all-equal groups are dropped, so steps are compared in groups that also teach as a whole.
"""

from __future__ import annotations

import dataclasses

import ml_collections
import numpy as np

from agents import grpo, shaping
from agents.base import Agent
from losses.step_advantages import discounted_returns, gigpo_step_advantages

PAD = 128  # steps of a group are padded to a multiple, so that few lengths compile


def defaults() -> ml_collections.ConfigDict:
  cfg = grpo.defaults()
  cfg.update({"name": "gigpo"})
  cfg.step_weight = 1.0  # of the comparison of steps beside that of tries
  cfg.discount = 0.95  # of a step's return
  cfg.step_spread = "none"  # none (mean only) or population
  return cfg


def make(cfg: ml_collections.ConfigDict) -> Agent:
  if not cfg.step_weight >= 0:
    raise ValueError(f"agent.step_weight is {cfg.step_weight}, wanted 0 (plain grpo) or more")
  if not 0 <= cfg.discount <= 1:
    raise ValueError(f"agent.discount is {cfg.discount}, wanted a number from 0 to 1")
  if cfg.step_spread not in ("none", "population"):
    raise ValueError(f"agent.step_spread is {cfg.step_spread!r}, wanted 'none' or 'population'")
  base = grpo.make(cfg)
  shaping.refuse(cfg)

  def credit(group, scores=None):
    credits = base.credit(group, scores)
    if group.kind != "mixed" or not cfg.step_weight:
      return credits
    step_H = np.split(step_pushes(group), np.cumsum([len(e.steps) for e in group.episodes])[:-1])
    add = lambda c, a: dataclasses.replace(c, advantage=(c.advantage + cfg.step_weight * a).astype(np.float32))
    return [add(c, a) for c, a in zip(credits, step_H, strict=True)]

  def step_pushes(group) -> np.ndarray:
    """Every step of the group's tries against the others taken from its screen, tries end to end."""
    ids: dict[str, int] = {}
    anchors = [ids.setdefault(s.screen.ref, len(ids)) for e in group.episodes for s in e.steps]
    returns = [to_go(e) for e in group.episodes]
    n, size = len(anchors), -(-len(anchors) // PAD) * PAD
    pad = lambda x, dtype: np.pad(np.asarray(x, dtype), (0, size - n))
    valid = np.arange(size) < n
    push = gigpo_step_advantages(pad(np.concatenate(returns), np.float32), pad(anchors, np.int32), size, valid_S=valid,
                                 spread=cfg.step_spread, eps=cfg.eps)  # fmt: skip
    return np.asarray(push)[:n]

  def to_go(episode) -> np.ndarray:
    reward_H = np.zeros(-(-len(episode.steps) // 16) * 16, np.float32)  # zeros after the end change no return before it
    reward_H[len(episode.steps) - 1] = episode.reward
    return np.asarray(discounted_returns(reward_H, cfg.discount))[: len(episode.steps)]

  return base._replace(credit=credit)
