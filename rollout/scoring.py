"""What the models say of finished episodes: log-probabilities and values by record and step, brought back to the host.

Episodes go through the very batches that training uses, and come back as `EpisodeScores`, aligned with their token records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from core import hosts
from core.pack import PackItem, PackShape, arrange, episode_items, step_batch, to_batch, unpack
from core.schema import Credit, Episode, EpisodeScores
from models.base import Policy


def plain_items(episode: Episode, policy: Policy) -> list[PackItem]:
  """An episode's records without a push, every action token to be scored."""
  credit = Credit.uniform(0.0, len(episode.steps))
  return episode_items(episode, credit, credit.keep, policy.positions, policy.image)


def score_records(items: list[PackItem], shape: PackShape, blank: np.ndarray, fns: Mapping[str, Callable]) -> list[dict[str, np.ndarray]]:
  """For each item, each fn(batch) -> [B, L] as f32 [T] by name. Items go in order, as many a batch as `shape` surely holds; of several
  processes all score as often, since each brings its part of what the devices score together."""
  out: list[dict[str, np.ndarray]] = []
  most = max(1, shape.episodes)
  for turn in range(hosts.most(-(-len(items) // most))):
    chunk = items[turn * most : (turn + 1) * most]
    rows = arrange(chunk, shape)
    batch = to_batch(chunk, rows, shape, blank)
    order = [index for row in rows for index in row]
    found: list[dict[str, np.ndarray]] = [{} for _ in chunk]
    for name, fn in fns.items():
      for index, values in zip(order, unpack(np.asarray(fn(batch), np.float32), batch), strict=True):
        found[index][name] = values
    out += found
  return out


def frames(episode: Episode, policy: Policy, final: bool) -> list[tuple[np.ndarray, np.ndarray]]:
  """(screen before, screen now) of every step, and with `final` of the screen the episode ended on."""
  seen = [policy.image(s.screen.pixels) for s in episode.steps]
  if final:
    last = episode.final_screen or episode.steps[-1].screen
    seen.append(policy.image(last.pixels))
  return [(seen[max(h - 1, 0)], seen[h]) for h in range(len(seen))]


def goal_tokens(episode: Episode) -> np.ndarray:
  """i32: what stands before the first screenshot of the episode's first record, as the policy read it."""
  record = episode.records[0]
  return record.tokens[: record.image_place[0]]


def values_of(pairs: list, texts: list[np.ndarray], fn: Callable, size: int, longest: int) -> np.ndarray:
  """f32 [n]: the smallest of a step critic's heads' chances of success. fn(StepBatch) -> logits [size, K]."""
  out = []
  for start in range(0, len(pairs), size):
    part, words = pairs[start : start + size], texts[start : start + size]
    logits = np.asarray(fn(step_batch(part, words, [0.0] * len(part), size, longest)), np.float32)
    out.append(1.0 / (1.0 + np.exp(-logits[: len(part)].min(axis=-1))))
  return np.concatenate(out) if out else np.zeros(0, np.float32)


def judge(
  episodes: list[Episode], policy: Policy, shape: PackShape, blank: np.ndarray, ask: Mapping[str, Callable], steps_a_batch: int
) -> list[EpisodeScores]:
  """EpisodeScores of every episode. ask: name -> fn; old_logp, ref_logp and value_logit take a Batch and give [B, L];
  step_value and task_value take a StepBatch and give logits [N, K]."""
  token_fns = {name: fn for name, fn in ask.items() if name not in ("step_value", "task_value")}
  scores = [EpisodeScores([]) for _ in episodes]
  if token_fns:
    items = [plain_items(e, policy) for e in episodes]
    flat = iter(score_records([i for part in items for i in part], shape, blank, token_fns))
    scores = [EpisodeScores([next(flat) for _ in part]) for part in items]
  words = [goal_tokens(e) for e in episodes]
  if "step_value" in ask:
    pairs = [frames(e, policy, final=True) for e in episodes]
    texts = [w for w, p in zip(words, pairs, strict=True) for _ in p]
    values = values_of([p for part in pairs for p in part], texts, ask["step_value"], steps_a_batch, policy.max_goal)
    ends = np.cumsum([len(p) for p in pairs])
    for score, value in zip(scores, np.split(values, ends[:-1]), strict=True):
      score.step_value = value
  if "task_value" in ask:
    first = [frames(e, policy, final=False)[0] for e in episodes]
    for score, value in zip(scores, values_of(first, words, ask["task_value"], steps_a_batch, policy.max_goal), strict=True):
      score.task_value = float(value)
  return scores
