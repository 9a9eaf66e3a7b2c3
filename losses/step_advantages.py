"""Credit that compares steps instead of whole tries, and the two small tools it needs.

[S] is every step of every try, in any order, with ids saying which try, group or screen it belongs to. All return float32 and
stop no gradient; the policy losses stop it at the advantage.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from core.segments import as_mask, is_concrete, same_length, segment_mean
from losses.advantages import group_advantages
from losses.arrays import f32


def discounted_returns(reward_H, discount) -> Array:
  """Reward to go of every step of one episode, [H] float32: R_h = sum over k >= h of discount^(k - h) r_k.

  GiGPO, arXiv 2505.10978 (discount 0.95). reward_H: [H]; what stands behind the episode's end must be 0. discount in [0, 1]; 0
  gives the step's own reward. Gradients flow.
  """
  same_length(reward_H=reward_H)
  if is_concrete(discount) and not 0 <= discount <= 1:
    raise ValueError(f"discount is {discount}, wanted a number from 0 to 1")
  return _to_go(f32(reward_H), f32(discount))


@jax.jit
def _to_go(reward: Array, discount: Array) -> Array:
  def step(after, reward):
    here = reward + discount * after
    return here, here

  return jax.lax.scan(step, jnp.zeros((), reward.dtype), reward, reverse=True)[1]


def gigpo_step_advantages(return_S, anchor_id_S, num_anchors: int, *, valid_S=None, spread: str = "none", eps: float = 1e-6) -> Array:
  """Each step against the other steps taken from the same screen, [S] float32: (R_s - mean of its anchor) / (spread + eps).

  GiGPO, arXiv 2505.10978, section 4 (equation number not checked). return_S: [S] discounted returns; anchor_id_S: [S] ints, one
  id per (task, screen): steps of different tasks never share one. spread as in `group_advantages`; the default "none" subtracts
  the mean only. Exactly 0 where nothing else started from that screen or all returns there are equal, and at invalid steps.
  The push of a step is then its try's group advantage plus a weight (1 in the paper) times this one.
  """
  same_length(return_S=return_S, anchor_id_S=anchor_id_S, valid_S=valid_S)
  return group_advantages(return_S, anchor_id_S, num_anchors, valid_E=valid_S, spread=spread, eps=eps)


def step_pooled_advantages(reward_S, group_id_S, num_groups: int, *, valid_S=None, spread: str = "population", eps: float = 1e-6) -> Array:
  """Each step against all steps of all tries of its group, [S] float32: (r_s - mean) / (spread + eps) over the pooled steps.

  ComputerRL, arXiv 2508.14040. reward_S: [S] each step's reward, there the try's success where the action was well formed and
  0 where not. A long try has more steps in the pool, so it moves the mean more than in `group_advantages`.
  """
  same_length(reward_S=reward_S, group_id_S=group_id_S, valid_S=valid_S)
  return group_advantages(reward_S, group_id_S, num_groups, valid_E=valid_S, spread=spread, eps=eps)


def process_advantages(
  step_reward_S, group_id_S, episode_id_S, num_groups: int, num_episodes: int, *, step_S=None, valid_S=None,
  spread: str = "population", eps: float = 1e-6,
) -> Array:  # fmt: skip
  """GRPO with a reward per step: A_s = sum of the normalised rewards of its try at or after it, [S] float32.

  DeepSeekMath, arXiv 2402.03300, section 4.1.3: every step reward of the group is normalised by the mean and spread of them all.
  step_S: [S] each step's place in its try; without it a try's steps stand in order (other tries may stand between them).
  Invalid steps count neither in mean and spread nor in the sum, and get 0.
  """
  length = same_length(
    step_reward_S=step_reward_S, group_id_S=group_id_S, episode_id_S=episode_id_S, step_S=step_S, valid_S=valid_S
  )
  valid = as_mask(valid_S, length)
  segment_mean(step_reward_S, episode_id_S, num_episodes, valid)  # its check of the ids: an id outside is an error here too
  normal = group_advantages(step_reward_S, group_id_S, num_groups, valid_E=valid, spread=spread, eps=eps)
  episode = jnp.asarray(episode_id_S)  # an invalid step adds 0 to whatever episode it names
  order = jnp.lexsort((jnp.arange(length) if step_S is None else jnp.asarray(step_S), episode))
  return jnp.where(valid, jnp.zeros_like(normal).at[order].set(_sum_to_end(normal[order], episode[order])), 0.0)


@jax.jit
def _sum_to_end(reward: Array, episode: Array) -> Array:
  """Sums from each entry to the last one of its episode; an episode's entries stand together."""

  def step(carry, entry):
    after, episode_after = carry
    reward, episode = entry
    here = reward + jnp.where(episode == episode_after, after, 0.0)
    return (here, episode), here

  start = jnp.zeros((), reward.dtype), jnp.full((), -1, episode.dtype)
  return jax.lax.scan(step, start, (reward, episode), reverse=True)[1]


def whiten(x_N, mask_N, *, shift: bool = True, spread: str = "population", eps: float = 1e-6) -> Array:
  """Mean 0 and spread 1 over the unmasked entries, [N] float32, 0 elsewhere: (x - mean) / (spread + eps).

  PPO's advantage normalisation, over the agent tokens of the whole update, never of one micro-batch (its returns are taken
  before). shift = False keeps the mean: only the distances from it are scaled. Entries that are all equal become exactly 0.
  """
  length = same_length(x_N=x_N, mask_N=mask_N)
  if spread not in ("population", "sample"):
    raise ValueError(f"spread is {spread!r}, wanted 'population' or 'sample'")
  one = np.zeros(length, np.int32)
  out = group_advantages(x_N, one, 1, valid_E=mask_N, spread=spread, eps=eps)
  return out if shift else jnp.where(as_mask(mask_N, length), out + segment_mean(x_N, one, 1, mask_N)[0], 0.0)
