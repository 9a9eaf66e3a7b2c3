"""What a group method compares tries by: the named rewards of an episode, with the shaping that the config states, added or apart."""

from __future__ import annotations

import dataclasses

import numpy as np

from core.schema import Credit, Episode, EpisodeScores, Group
from losses.advantages import group_advantages
from losses.rewards import shortest_path_reward, soft_overlong_penalty, step_budget_penalty
from losses.step_advantages import whiten

PAD = 512  # tokens are padded to a multiple, so that few lengths compile


def defaults() -> dict:
  return {
    "unreadable": 1.0,  # times the -1 of a try that wrote no action (0.5: ARPO's released code)
    "overlong": 0,  # steps before the step limit in which a reward fades by up to 1 (DAPO's soft punishment); 0 = off
    "step_budget": 0.0,  # what a try that uses up its step limit pays, in proportion to its steps; 0 = off
    "shortest_path": 0.0,  # share of a pass's reward lost in proportion to its steps beyond the group's shortest pass; 0 = off
    "combine": "sum",  # sum: rewards are added, then compared; gdpo: each is compared by itself, then added (GDPO)
  }


def wanted(cfg) -> dict[str, tuple[bool, str]]:
  """Domains of the knobs, for core.knobs.require."""
  return {
    "unreadable": (0 <= cfg.unreadable <= 1, "a share from 0 to 1"),
    "overlong": (cfg.overlong >= 0, "0 (off) or a number of steps"),
    "step_budget": (0 <= cfg.step_budget < 1, "0 (off) or less than 1, so that a slow pass stays above a fast fail"),
    "shortest_path": (0 <= cfg.shortest_path <= 1, "a share from 0 (off) to 1"),
    "combine": (cfg.combine in ("sum", "gdpo"), "sum or gdpo"),
  }


def refuse(cfg) -> None:
  """ValueError where rewards are shaped though the algorithm makes its pushes from how a try ended."""
  shaped = [name for name, off in (("overlong", 0), ("step_budget", 0), ("shortest_path", 0), ("unreadable", 1)) if cfg[name] != off]
  shaped += ["kl_in=reward"] if cfg.kl_beta and cfg.kl_in == "reward" else []
  if shaped:
    raise ValueError(f"agent.{shaped[0]} shapes the reward of a try, but {cfg.name} credits steps by how it ended: leave it off")


def rewards(cfg, group: Group, scores: list[EpisodeScores] | None) -> dict[str, np.ndarray]:
  """f32 [E] by name: what the environment gave, and what the config adds for length and drift."""
  names = dict.fromkeys(name for e in group.episodes for name in e.rewards)
  out = {name: np.array([e.rewards.get(name, 0.0) for e in group.episodes], np.float32) for name in names}
  steps_E = np.array([len(e.steps) for e in group.episodes], np.float32)
  limit_E = np.array([e.step_limit or len(e.steps) for e in group.episodes], np.float32)
  if "unreadable" in out:
    out["unreadable"] *= cfg.unreadable
  if cfg.shortest_path:
    out["success"] = np.asarray(shortest_path_reward(out["success"], steps_E, np.zeros(len(steps_E), np.int32), 1, alpha=cfg.shortest_path))
  if cfg.overlong:
    out["overlong"] = np.asarray(soft_overlong_penalty(steps_E, limit_E, np.minimum(cfg.overlong, limit_E)))
  if cfg.step_budget:
    out["step_budget"] = np.asarray(step_budget_penalty(steps_E, limit_E, weight=cfg.step_budget))
  if cfg.kl_beta and cfg.kl_in == "reward":
    out["kl"] = np.array([-cfg.kl_beta * episode_kl(e, s) for e, s in zip(group.episodes, scores, strict=True)], np.float32)
  return out


def episode_kl(episode: Episode, scores: EpisodeScores) -> float:
  """k1 of one episode against the reference: the sum of log pi - log ref over its action tokens, as they were sampled."""
  return float(sum((r.logp - s["ref_logp"])[r.is_action].sum() for r, s in zip(episode.records, scores.records, strict=True)))


def apart(cfg, by_name: dict[str, np.ndarray]) -> np.ndarray:
  """GDPO's pushes of one group, f32 [E], before they are divided by their spread over the update (arXiv 2601.05242)."""
  one = lambda reward_E: group_advantages(reward_E, np.zeros(len(reward_E), np.int32), 1, spread="population", eps=cfg.eps)
  return np.asarray(sum(one(reward_E) for reward_E in by_name.values()))


def over_update(cfg, credits: list[Credit]) -> list[Credit]:
  """Pushes divided by a spread over all tries of an update: of their rewards (spread "batch", ScaleRL), of themselves (GDPO)."""
  values = [float(np.mean(c.advantage)) if cfg.combine == "gdpo" else c.reward for c in credits]
  spread = float(np.std(values))
  scale = 1.0 / (spread + cfg.eps) if spread else 1.0
  return [dataclasses.replace(c, advantage=(c.advantage * scale).astype(np.float32)) for c in credits]


def whitened(episodes: list[Episode], credits: list[Credit]) -> list[Credit]:
  """PPO's pushes with mean 0 and spread 1 over the action tokens of an update that enter the loss."""
  push = np.concatenate([a for c in credits for a in c.token_advantage])
  mask = np.concatenate([r.is_action & c.keep[r.step] for e, c in zip(episodes, credits, strict=True) for r in e.records])
  more = -len(push) % PAD
  parts = np.asarray(whiten(np.pad(push, (0, more)), np.pad(mask, (0, more))))[: len(push)]
  ends = np.cumsum([len(a) for c in credits for a in c.token_advantage])[:-1]
  piece = iter(np.split(parts, ends))
  return [dataclasses.replace(c, token_advantage=[next(piece) for _ in c.token_advantage]) for c in credits]
