"""Credit from a critic that values every token: generalised advantages over an episode's action tokens, laid back into records; and
when such a critic is ready."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from core.schema import Credit, Episode, EpisodeScores
from losses.advantages import gae
from losses.value import bounded_value

PAD = 512  # tokens are padded to a multiple, so that few lengths compile


def gae_credit(
  episodes: list[Episode], scores: list[EpisodeScores], lam_E: np.ndarray, lam_critic: float, low: float, high: float
) -> list[Credit]:
  """Per-token pushes and value targets of every episode. The reward stands at the last action token; screenshots and prompts
  between action tokens are passed over. lam_E: the policy's lambda of each episode; low, high: the critic's bounds."""
  logit = [np.concatenate([s["value_logit"][r.is_action] for r, s in zip(e.records, x.records, strict=True)]) for e, x in
           zip(episodes, scores, strict=True)]  # fmt: skip
  sizes = [len(v) for v in logit]
  total = sum(sizes)
  pad = lambda parts: np.pad(np.concatenate(parts).astype(np.float32), (0, -(-total // PAD) * PAD - total))
  value_N = np.asarray(bounded_value(pad(logit), low, high))
  reward_N = pad([np.append(np.zeros(n - 1), e.reward) for n, e in zip(sizes, episodes)])
  discount_N = pad([np.append(np.ones(n - 1), 0.0) for n in sizes])
  lam_N = pad([np.full(n, lam) for n, lam in zip(sizes, lam_E)])
  mask_N = np.arange(len(value_N)) < total
  ends = np.cumsum(sizes)[:-1]
  push = np.split(np.asarray(gae(reward_N, value_N, discount_N, lam_N, mask_N=mask_N)[0])[:total], ends)
  target = np.split(np.asarray(gae(reward_N, value_N, discount_N, np.full_like(lam_N, lam_critic), mask_N=mask_N)[1])[:total], ends)
  return [token_credit(e, a, g) for e, a, g in zip(episodes, push, target, strict=True)]


def token_credit(episode: Episode, advantage: np.ndarray, target: np.ndarray) -> Credit:
  """Numbers of an episode's action tokens, in the order they were written, laid back into its records."""
  push, goal, steps, at = [], [], np.zeros(len(episode.steps), np.float32), 0
  for record in episode.records:
    n = int(record.is_action.sum())
    a, g = np.zeros(len(record), np.float32), np.zeros(len(record), np.float32)
    a[record.is_action], g[record.is_action] = advantage[at : at + n], target[at : at + n]
    for h in np.unique(record.step[record.is_action]):  # what the episode page shows: the step's mean push
      steps[h] = a[record.is_action & (record.step == h)].mean()
    push.append(a)
    goal.append(g)
    at += n
  return Credit(steps, np.ones(len(episode.steps), bool), push, goal)


def pretrained(cfg, curves: Mapping[str, float | None]) -> bool:
  """Whether value pre-training is over (VAPO, arXiv 2504.05118; lesson chapter 2, the critic at scale): the critic explains enough of
  the returns and its loss no longer falls much, or its updates are used up. An update that taught nothing says neither."""
  if curves["critic/updates"] >= cfg.pretrain_updates:
    return True
  loss, before = curves.get("critic/loss"), curves.get("critic/loss_before")
  settled = cfg.pretrain_fall == 1 or (loss is not None and before is not None and loss >= (1 - cfg.pretrain_fall) * before)
  return settled and curves.get("critic/explained_variance", -np.inf) >= cfg.pretrain_variance
