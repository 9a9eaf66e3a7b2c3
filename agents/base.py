"""What an algorithm is: a record of functions, as an optax optimiser is. No base class, no registry, no state.

train.py calls, in this order: `select` (which groups teach), then for each phase `credit` (the push of every step), `keep`
(which steps enter the loss) and the phase's jitted update. Whatever is dropped is dropped in `select`, with a reason that is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from core.schema import Credit, Episode, Group
from core.segments import Total
from core.state import Batch, Scores
from losses.kl import moving_reference
from losses.policy import imitation_loss
from losses.reduce import token_mean


class Phase(NamedTuple):
  """One thing an update does. loss(scores, batch) -> (Total, {metric: Total}) is pure and jitted inside `update`.

  params_key: which parameters it moves, "policy" or a critic's name. epochs: passes over the data; minibatch: token records
  (or steps, for a critic of steps) per optimiser step. data: "batch" = this update's groups, credited group by group;
  "store" = this update's episodes and the stored ones, credited as one group. drawn: the store is not passed over, each epoch
  is one minibatch of records drawn from it with replacement. pairs: episodes enter in pairs (a pass, a fail of its group).
  until(curves) -> bool: the phase runs alone, the others waiting, until this says that it is ready; None = no waiting. curves are
  the update's, with "critic/updates" made so far and "critic/loss_before", the update before's loss (None: there was none).
  """

  params_key: str
  loss: Callable[[Scores, Batch], tuple[Total, dict[str, Total]]]
  epochs: int
  minibatch: int
  data: str = "batch"
  drawn: bool = False
  pairs: bool = False
  until: Callable[[dict[str, float]], bool] | None = None


class Agent(NamedTuple):
  """An algorithm.

  needs: what train.py computes of every episode before credit, a subset of NEEDS. select(groups, replay, rng) -> (kept
  groups, {reason: episodes dropped}, successes swapped in); credit(group, scores) -> one Credit per episode, or None for an
  unscored one, with scores a list of EpisodeScores (None where nothing is needed); keep(credit) -> bool [H].
  remember: successes to keep per task (0 = no replay). critics: {params_key: kind} of models/critic.py, and critic: its knobs.
  reference: None, or ("fixed" | "phase" | "moving", updates between two changes, share of the policy in a move).
  store: steps of past episodes to keep (0 = none). offline: updates at the start that only sample and store; afterwards
  nothing is sampled (0 = online). rescale(episodes, credits) -> credits: of a whole update, once every group has its own; None
  leaves them.
  """

  needs: frozenset[str]
  select: Callable
  credit: Callable[..., list[Credit | None]]
  keep: Callable[[Credit], np.ndarray]
  phases: tuple[Phase, ...]
  remember: int = 0
  critics: Mapping[str, str] = MappingProxyType({})
  critic: Any = None
  reference: tuple[str, int, float] | None = None
  store: int = 0
  offline: int = 0
  rescale: Callable[..., list[Credit]] | None = None


NEEDS = frozenset({"value_logit", "ref_logp", "old_logp", "step_value", "task_value"})


def keep_all(credit: Credit) -> np.ndarray:
  return credit.keep


def select_scored(groups: list[Group], replay=None, rng=None):
  """Every scored try teaches; only infra errors leave. For algorithms whose baseline is not the group."""
  kept, dropped = [], {}
  for group in groups:
    scored = group.scored
    if len(scored) < len(group.episodes):
      dropped["infra_error"] = dropped.get("infra_error", 0) + len(group.episodes) - len(scored)
    if scored:
      kept.append(Group(group.id, group.task_id, scored))
  return kept, dropped, 0


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


def copy_loss(scores: Scores, batch: Batch) -> tuple[Total, dict[str, Total]]:
  """Supervised fine-tuning: make the demonstrated tokens likely. The same mask as practice: agent tokens only."""
  mask = batch.is_action.reshape(-1)
  loss = token_mean(imitation_loss(scores.logp.reshape(-1), mask), mask)
  return loss, {"policy/entropy": token_mean(scores.entropy.reshape(-1), mask)}


def follow(learner: dict, done: int, rule: tuple[str, int, float] | None) -> None:
  """Moves the reference policy, after update `done`, by an algorithm's rule (kind, every, mix): "fixed" stays, "phase" becomes
  the policy itself every `every` updates, "moving" then takes a share `mix` of it."""
  kind, every, mix = rule or ("fixed", 1, 1.0)
  if kind == "fixed" or done % every:
    return
  share = 1.0 if kind == "phase" else mix
  frozen, policy = learner["frozen"], learner["states"]["policy"].params
  frozen["reference"] = moving_reference(frozen["reference"], policy, share)
