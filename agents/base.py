"""What an algorithm is: a record of functions, as an optax optimiser is. No base class, no registry, no state.

train.py calls, in this order: `select` (which groups teach), `credit` (the push of every step), `keep` (which steps enter
the loss), then the phases' jitted updates. Whatever is dropped is dropped in `select`, with a reason that is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from core.schema import Credit, Episode, Group
from core.segments import Total
from core.state import Batch, Scores
from losses.reduce import token_mean


class Phase(NamedTuple):
  """One thing an update does. loss(scores, batch) -> (Total, {metric: Total}) is pure and jitted inside `update`.

  params_key: which parameters it moves. epochs: passes over the data; minibatch: token records per optimiser step.
  data: "batch" (this update's groups) or "store" (past episodes). until: a test on metrics that ends the phase, or None.
  """

  params_key: str
  loss: Callable[[Scores, Batch], tuple[Total, dict[str, Total]]]
  epochs: int
  minibatch: int
  data: str = "batch"
  until: Callable | None = None


class Agent(NamedTuple):
  """An algorithm. needs: subset of {"value_logit", "ref_logp", "old_logp", "features"}, computed before credit.

  select(groups, replay, rng) -> (kept groups, {reason: episodes dropped}, successes swapped in); credit(group) -> one Credit
  per episode, or None for an unscored one; keep(credit) -> bool [H]; remember: successes to keep per task (0 = no replay).
  """

  needs: frozenset[str]
  select: Callable
  credit: Callable[[Group], list[Credit | None]]
  keep: Callable[[Credit], np.ndarray]
  phases: tuple[Phase, ...]
  remember: int = 0


def keep_all(credit: Credit) -> np.ndarray:
  return credit.keep


def select_groups(groups: list[Group], replay, rng: np.random.Generator, *, use_replay: bool, drop_equal: bool):
  """Rescue all-fail groups from replay, then drop what cannot teach. Lesson chapter 3; design decisions 1, 3, 5, 7, 8.

  An all-fail group (max raw reward <= 0) takes a stored success of the same task in place of its first plain fail, else of
  its first try. Without one it is dropped if drop_equal, since pushing a plain fail up against an unreadable try would teach
  looping; all-pass groups are dropped likewise. Infra errors leave the group first; a try that is then alone never teaches.
  Returns (kept groups, {reason: episodes dropped}, number of successes swapped in).
  """
  kept: list[Group] = []
  dropped: dict[str, int] = {}
  swapped = 0
  for group in groups:
    scored = group.scored
    if len(scored) < len(group.episodes):
      dropped["infra_error"] = dropped.get("infra_error", 0) + len(group.episodes) - len(scored)
    if len(scored) < 2:
      if scored:
        dropped["alone"] = dropped.get("alone", 0) + 1
      continue
    group = Group(group.id, group.task_id, scored)
    if group.kind == "all_fail" and use_replay:
      success = replay.pick(group.task_id, rng)
      if success is not None:
        group = swap_in(group, success)
        swapped += 1
        dropped["replaced"] = dropped.get("replaced", 0) + 1
    if group.kind != "mixed" and drop_equal:
      dropped[group.kind] = dropped.get(group.kind, 0) + sum(not e.replayed for e in group.episodes)
      continue
    kept.append(group)
  return kept, dropped, swapped


def swap_in(group: Group, success: Episode) -> Group:
  """The group with a stored success in place of its first plain fail (else its first try). Record, reward and versions are
  all the stored one's."""
  slot = next((i for i, e in enumerate(group.episodes) if e.raw_reward == 0.0), 0)
  episodes = list(group.episodes)
  episodes[slot] = success
  return Group(group.id, group.task_id, episodes)


def episode_credit(group: Group, advantage_E: np.ndarray) -> list[Credit]:
  """The same push on every step of an episode (lesson chapter 1), one Credit per episode of the group."""
  return [Credit.uniform(float(a), len(e.steps)) for e, a in zip(group.episodes, advantage_E, strict=True)]


def token_metrics(ratio_N, clipped_N, batch: Batch, scores: Scores) -> dict[str, Total]:
  """The curves every policy phase draws, as totals over the tokens of the loss."""
  mask = batch.is_action.reshape(-1)
  logp, behaviour = scores.logp.reshape(-1), batch.behaviour_logp.reshape(-1)
  log_ratio = jnp.where(mask, logp - behaviour, 0.0)
  return {
    "policy/clipped_share": token_mean(clipped_N.astype(jnp.float32), mask),
    "policy/ratio_mean": token_mean(ratio_N, mask),
    "policy/entropy": token_mean(scores.entropy.reshape(-1), mask),
    # k3 of sampler against trainer: on the first pass after a publish it is the engines' mismatch, later also the drift
    "policy/drift_kl": token_mean(jnp.expm1(log_ratio) - log_ratio, mask),
  }
