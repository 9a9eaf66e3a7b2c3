"""Shaping of an episode's reward before its advantage is computed.

Decide "all equal" and "all fail" on the rewards before any shaping: a penalty makes an all-pass group unequal.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array

from core.segments import as_mask, is_concrete, same_length, segment_gather, segment_min, segment_std
from losses.advantages import group_advantages
from losses.arrays import f32

FORMAT_MODES = ("replace", "add")


def soft_overlong_penalty(length, limit, cache) -> Array:
  """Penalty that grows as an episode nears its limit, float32 of length's shape: 0 up to limit - cache, then down to -1.

  clip((limit - cache - length) / cache, -1, 0); DAPO, arXiv 2503.14476, eq 13 (there limit 20480, cache 4096), added to the
  correctness reward. length, limit and cache count the same thing, action tokens or steps. Decide "all equal" before adding
  it: it makes the rewards of an all-pass group unequal.
  """
  if is_concrete(limit, cache) and not np.all((0 < np.asarray(cache)) & (np.asarray(cache) <= np.asarray(limit))):
    raise ValueError(f"cache is {cache} with limit {limit}, wanted 0 < cache <= limit")
  return jnp.clip((f32(limit) - f32(cache) - f32(length)) / f32(cache), -1.0, 0.0)


def format_reward(reward_E, unreadable_E, *, penalty=-1.0, mode: str = "replace") -> Array:
  """Rewards with the tries that wrote something unreadable marked down, [E] float32.

  mode "replace": an unreadable try gets `penalty` and nothing else (ours, lesson chapter 1: -1). "add": it keeps what the
  checker gave and the penalty is added (ARPO's released code: 0.5 * -1, so pass penalty=-0.5). unreadable_E: [E] bool. With
  "replace" the reward of an unreadable try is not read.
  """
  unreadable = as_mask(unreadable_E, same_length(reward_E=reward_E, unreadable_E=unreadable_E))
  if mode not in FORMAT_MODES:
    raise ValueError(f"mode is {mode!r}, wanted one of {', '.join(FORMAT_MODES)}")
  if is_concrete(penalty) and not penalty <= 0:
    raise ValueError(f"penalty is {penalty}, wanted a number of at most 0")
  base = f32(reward_E) if mode == "add" else 0.0
  return jnp.where(unreadable, base + f32(penalty), f32(reward_E))


def step_budget_penalty(steps, budget, *, weight=1.0) -> Array:
  """What an episode pays for the steps it used, float32 of the steps' shape: -weight * min(steps, budget) / budget.

  UI-TARS-2 (arXiv 2509.02544) puts the budget into the reward, since agents spend whatever they are given; the linear form is
  ours. Keep weight below 1 so that a slow pass stays above a fast fail; a fail that gives up early pays less, so for passes
  only use `shortest_path_reward`.
  """
  if is_concrete(budget) and not np.all(np.asarray(budget) > 0):
    raise ValueError(f"budget is {budget}, wanted a number of steps above 0")
  if is_concrete(weight) and not weight >= 0:
    raise ValueError(f"weight is {weight}, wanted a number of at least 0")
  return -f32(weight) * jnp.clip(f32(steps) / f32(budget), 0.0, 1.0)


def shortest_path_reward(reward_E, steps_E, group_id_E, num_groups: int, *, valid_E=None, alpha=1.0) -> Array:
  """Passes paid by how near they are to the group's shortest pass, [E] float32: r (1 - alpha (T - T_min) / T).

  MobileRL, arXiv 2509.18119. T: steps_E; T_min: the fewest steps of a valid try of the group with a reward above 0. Rewards of
  0 and below are unchanged. alpha in [0, 1]: 0 is off, 1 gives r T_min / T. 0 at invalid tries.
  """
  valid = as_mask(valid_E, same_length(reward_E=reward_E, steps_E=steps_E, group_id_E=group_id_E, valid_E=valid_E))
  if is_concrete(alpha) and not 0 <= alpha <= 1:
    raise ValueError(f"alpha is {alpha}, wanted a number from 0 to 1")
  reward = jnp.where(valid, f32(reward_E), 0.0)
  passed = reward > 0
  steps = jnp.where(passed, f32(steps_E), 1.0)
  if is_concrete(steps) and not bool((steps >= 1).all()):
    raise ValueError("a passed try has fewer than 1 step")
  shortest = segment_gather(segment_min(steps, group_id_E, num_groups, passed), group_id_E)
  return jnp.where(passed, reward * (1.0 - alpha * (steps - shortest) / steps), reward)


def gdpo_advantages(
  reward_by_name: Mapping[str, Array], weight_by_name: Mapping[str, float], group_id_E, num_groups: int, *, valid_E=None,
  spread: str = "population", eps: float = 1e-6,
) -> Array:  # fmt: skip
  """Several rewards, each normalised in its group before they are added, [E] float32.

  GDPO, arXiv 2601.05242 (equation numbers not checked): A = sum over names of weight * group_advantages(reward), then divided
  by its spread over all valid tries of the batch. So a format reward of 0 / 1 cannot drown success as it does when rewards are
  added first. The batch's mean is not subtracted: every group's pushes add up to 0 already, and exact zeros stay exact.
  """
  if not reward_by_name or set(reward_by_name) != set(weight_by_name):
    raise ValueError(f"rewards are {sorted(reward_by_name)} but weights are {sorted(weight_by_name)}: they must name the same things")
  if spread not in ("population", "sample"):
    raise ValueError(f"spread is {spread!r}, wanted 'population' or 'sample'")
  length = same_length(**dict(reward_by_name), group_id_E=group_id_E, valid_E=valid_E)
  parts = [
    f32(weight_by_name[name]) * group_advantages(reward, group_id_E, num_groups, valid_E=valid_E, spread=spread, eps=eps)
    for name, reward in sorted(reward_by_name.items())
  ]
  total = sum(parts[1:], parts[0])
  std = segment_std(total, jnp.zeros(length, jnp.int32), 1, valid_E, ddof=1 if spread == "sample" else 0)[0]
  return jnp.where(total == 0, 0.0, total) / jnp.where(std > 0, std + eps, 1.0)
