"""Demonstrations as token records: what supervised fine-tuning copies. The only place where agent text is tokenised."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from core.pack import PackItem, episode_items
from core.schema import Credit, Episode
from models.base import Policy
from rollout.sampler import Sampled
from rollout.trajectories import read_trajectories
from rollout.turn import add_record, seen


def episodes(knobs, seed: int, scripted: Callable[..., list[Episode]]) -> list[Episode]:
  """What `copy` names: the trajectory records of its path, else so many scripted demonstrations."""
  return read_trajectories(knobs.path) if knobs.path else scripted(knobs.demonstrations, seed=seed)


def with_records(episode: Episode, policy: Policy) -> Episode:
  """A demonstration with token records of its text, in the contexts the policy would have seen. Log-probabilities are 0: nobody
  sampled these tokens, so they serve copying only."""
  records, past = [], []
  for h, step in enumerate(episode.steps):
    ids = policy.tokenizer.encode(step.text) + [policy.tokenizer.eos_id]
    if len(ids) > policy.max_action:
      raise ValueError(
        f"demonstration {episode.task_id} step {h + 1}: {step.text[:60]!r} has {len(ids)} tokens, the policy writes at most "
        f"{policy.max_action} a step: raise policy.{'tiny.' if policy.name == 'tiny' else ''}max_action"
      )
    nothing = np.zeros(len(ids), np.float32)
    sampled = Sampled(np.array(ids, np.int32), nothing, nothing, -1)
    prompt = policy.prompt(episode.goal, [step.screen.pixels], step.seen, past)
    add_record(records, prompt, sampled, h)
    past.append(seen(prompt, step.seen, sampled.tokens))
  return dataclasses.replace(episode, records=records)


def items(episodes: list[Episode], policy: Policy) -> list[PackItem]:
  """Every step of every demonstration, ready to be packed."""
  out = []
  for episode in episodes:
    credit = Credit.uniform(0.0, len(episode.steps))
    out += episode_items(with_records(episode, policy), credit, credit.keep, policy.positions, policy.image)
  return out
