"""From rewards and the critic's guesses to credit: the push each try, step or token gets.

Per-try functions take [E] with a group id each; per-step functions take one episode's [H]; `gae` takes tokens [N] of many
packed episodes. All return float32. Nothing here stops gradients into its inputs; the policy losses stop them at the
advantage, so that credit is a number to them. Groups are found by id, never by position.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from core.segments import (
  as_mask,
  is_concrete,
  same_length,
  segment_gather,
  segment_max,
  segment_mean,
  segment_min,
  segment_std,
  segment_sum,
)
from losses.arrays import f32

SPREADS = ("population", "sample", "none", "batch")


def group_advantages(
  reward_E, group_id_E, num_groups: int, *, valid_E=None, spread: str = "population", eps: float = 1e-6
) -> Array:
  """Each try against its own group, [E] float32: (r_i - mean of the group) / (spread + eps).

  GRPO, arXiv 2402.03300, section 4.1; lesson chapter 1. reward_E: [E] floats; group_id_E: [E] ints in 0 .. num_groups - 1, in
  any order; valid_E: [E] bool, tries that have a score (an infra error has none and leaves mean and spread).
  spread: "population" divides by n (ours and the lesson's), "sample" by n - 1 (verl, TRL, ARPO's code), "none" does not
  divide (Dr. GRPO), "batch" divides each group's centred rewards by the population spread of all valid rewards (ScaleRL).
  Exactly 0 where a group has fewer than 2 valid tries or its largest reward equals its smallest (decided on the rewards as
  given: a float32 spread of equal rewards need not be 0), and 0 at invalid tries.
  """
  length = same_length(reward_E=reward_E, group_id_E=group_id_E, valid_E=valid_E)
  if spread not in SPREADS:
    raise ValueError(f"spread is {spread!r}, wanted one of {', '.join(SPREADS)}")
  valid = as_mask(valid_E, length)
  reward = jnp.where(valid, f32(reward_E), 0.0)
  teaches = _teaches(reward, group_id_E, num_groups, valid)
  centred = reward - segment_gather(segment_mean(reward, group_id_E, num_groups, valid), group_id_E)
  if spread == "none":
    return jnp.where(teaches, centred, 0.0)
  if spread == "batch":
    std_E = jnp.broadcast_to(segment_std(reward, jnp.zeros(length, jnp.int32), 1, valid), (length,))
  else:
    std_E = segment_gather(
      segment_std(reward, group_id_E, num_groups, valid, ddof=1 if spread == "sample" else 0), group_id_E
    )
  return jnp.where(teaches, centred, 0.0) / jnp.where(teaches, std_E + eps, 1.0)


def leave_one_out(reward_E, group_id_E, num_groups: int, *, valid_E=None) -> Array:
  """Each try against the mean of the other valid tries of its group, [E] float32: r_i - (sum r - r_i) / (n - 1).

  RLOO, arXiv 2402.14740. Equals n / (n - 1) times the centred reward. Exactly 0 in groups of fewer than 2 valid tries or with
  equal rewards, and at invalid tries.
  """
  length = same_length(reward_E=reward_E, group_id_E=group_id_E, valid_E=valid_E)
  valid = as_mask(valid_E, length)
  reward = jnp.where(valid, f32(reward_E), 0.0)
  teaches = _teaches(reward, group_id_E, num_groups, valid)
  others = segment_gather(segment_sum(reward, group_id_E, num_groups, valid), group_id_E) - reward
  count = segment_gather(segment_sum(valid, group_id_E, num_groups, valid), group_id_E)
  return jnp.where(teaches, reward - others / jnp.maximum(count - 1.0, 1.0), 0.0)


def _teaches(reward: Array, group_id_E, num_groups: int, valid: Array) -> Array:
  """bool [E]: a valid try of a group whose valid rewards differ (so it has at least 2). A NaN reward is not "equal"."""
  low = segment_min(reward, group_id_E, num_groups, valid)
  high = segment_max(reward, group_id_E, num_groups, valid)
  return valid & segment_gather(low != high, group_id_E).astype(bool)


def simplified_gae(value_H, reward, lam) -> Array:
  """DigiRL's credit of every step, [H] float32: A_h = w_h r + (1 - w_h r) (V_{h+1} - V_h) with w_h = lam^(H - h).

  DigiRL, arXiv 2406.11896, eq 4.3; lesson chapter 2. value_H: [H] the critic's guess before each step; reward: the final
  reward (1 or 0); the guess after the last step is 0. lam = 1 gives every step the outcome, lam = 0 the critic's jumps. The
  formula is the paper's; its released code differs, see `digirl_code_credit`.
  """
  same_length(value_H=value_H)
  _share_is(lam=lam)
  value, reward = f32(value_H), f32(reward)
  outcome = _outcome_share(lam, value.shape[0]) * reward
  return outcome + (1.0 - outcome) * (_after(value, 0.0) - value)


def digirl_code_credit(value_H, reward, lam=0.5, *, step_cost=0.05, final_value=0.0) -> Array:
  """DigiRL's credit as its released code computes it, [H] float32: V_{h+1} - V_h - step_cost + r_h + lam^(H - h) r.

  r_h is the reward at the last step, 0 before. value_H: [H], there the smaller of two critics; final_value: the critic on the
  last screenshot (the code does not set it to 0). The code then clamps to [0, 1] and trains on the steps above 0.
  """
  same_length(value_H=value_H)
  _share_is(lam=lam)
  value, reward = f32(value_H), f32(reward)
  steps = value.shape[0]
  own = jnp.where(jnp.arange(steps) == steps - 1, reward, 0.0)
  return _after(value, final_value) - value - step_cost + own + _outcome_share(lam, steps) * reward


def web_credit(value_H, reward, lam) -> Array:
  """WebRL's credit of every step, [H] float32: A_h = lam (r_h + V_{h+1} - V_h) + (1 - lam) (r - V_h).

  WebRL, arXiv 2411.02337; lesson chapter 2 (a different mix, a different verdict). r_h is the final reward at the last step
  and 0 before; the guess after the last step is 0. The terminal reward belongs in both parts: without it the last winning
  step would be blamed.
  """
  same_length(value_H=value_H)
  _share_is(lam=lam)
  value, reward = f32(value_H), f32(reward)
  steps = value.shape[0]
  own = jnp.where(jnp.arange(steps) == steps - 1, reward, 0.0)
  return lam * (own + _after(value, 0.0) - value) + (1.0 - lam) * (reward - value)


def webrl_code_credit(value_H, reward, discount=0.9, *, step_cost=0.05, low=-0.6) -> Array:
  """WebRL's credit as its released code computes it, [H] float32, each entry +1 or `low`.

  A_h = V_{h+1} - V_h - step_cost + r + sum_{k>=h} discount^(k-h) r, clamped to [-1, 1], then +1 where >= 0 and `low` where
  below. The code writes the reward on every step, and the last step's next screen is itself (its jump is 0). It then trains
  on the positive steps only.
  """
  same_length(value_H=value_H)
  _share_is(discount=discount)
  value, reward = f32(value_H), f32(reward)
  steps = value.shape[0]
  after = jnp.concatenate([value[1:], value[-1:]])
  to_go = jnp.cumsum(f32(discount) ** jnp.arange(steps))[::-1] * reward
  credit = jnp.clip(after - value - step_cost + reward + to_go, -1.0, 1.0)
  return jnp.where(credit >= 0, 1.0, low)


def _share_is(**shares) -> None:
  """ValueError unless the numbers that can be looked at lie in [0, 1]."""
  for name, value in shares.items():
    if is_concrete(value) and not 0 <= value <= 1:
      raise ValueError(f"{name} is {value}, wanted a number from 0 to 1")


def _outcome_share(lam, steps: int) -> Array:
  """lam^(H - h) for h = 1 .. H: 1 at the last step, fading toward the start."""
  return f32(lam) ** jnp.arange(steps - 1, -1, -1)


def _after(value: Array, final) -> Array:
  """The guess after each step: the next step's guess before, and `final` after the last."""
  return jnp.concatenate([value[1:], jnp.full(1 if value.shape[0] else 0, final, jnp.float32)])


def gae(reward_N, value_N, discount_N, lam, *, mask_N=None, bootstrap_N=None) -> tuple[Array, Array]:
  """Generalized advantage estimates of packed tokens: (advantage_N, return_N), [N] float32.

  A_t = delta_t + discount_t lam_t A_{t'},  delta_t = r_t + bootstrap_t + discount_t V_{t'} - V_t,  R_t = A_t + V_t, with t'
  the next agent token of the same episode. GAE, arXiv 1506.02438, eq 16; lesson chapter 2 (the critic at scale).
  discount_N: [N], 0 at an episode's last entry, whoever wrote it: nothing crosses that entry. lam: scalar or [N]; 1 is Monte
  Carlo, 0 the one-step jumps. mask_N: [N] bool, agent tokens. Masked places (screenshots, padding) are passed over undecayed
  and get 0; what stands in reward, value, lam and bootstrap there is ignored, with one exception: the reward and bootstrap
  of a masked last entry (discount 0) go to the episode's last agent token. bootstrap_N: [N], 0 except at a truncated
  episode's last entry, where it is the (discounted) value of the final screen; a time limit is no verdict.
  A new length compiles anew: hosts that call this per episode should pad to a few lengths, masked. Gradients flow.
  """
  length = same_length(reward_N=reward_N, value_N=value_N, discount_N=discount_N, mask_N=mask_N, bootstrap_N=bootstrap_N)
  if np.ndim(lam):
    same_length(reward_N=reward_N, lam=lam)
  else:
    _share_is(lam=lam)
  mask, discount = as_mask(mask_N, length), f32(discount_N)
  reward = f32(reward_N) if bootstrap_N is None else f32(reward_N) + f32(bootstrap_N)
  return _gae(reward, f32(value_N), discount, jnp.broadcast_to(f32(lam), (length,)), mask)


@jax.jit
def _gae(reward: Array, value: Array, discount: Array, lam: Array, mask: Array) -> tuple[Array, Array]:
  ends = discount == 0
  reward = jnp.where(mask | ends, reward, 0.0)
  value, lam, discount = (jnp.where(mask, x, 0.0) for x in (value, lam, discount))
  (_, _, _), advantage = jax.lax.scan(_gae_step, (0.0, 0.0, 0.0), (reward, value, discount, lam, mask, ends), reverse=True)
  return advantage, jnp.where(mask, advantage + value, 0.0)


def _gae_step(carry, entry):
  """One entry, from the back. carry: the next agent token's advantage and value, and a reward waiting for its agent token."""
  reward, value, discount, lam, mask, ends = entry
  advantage, next_value, waiting = (jnp.where(ends, 0.0, x) for x in carry)
  here = reward + waiting + discount * next_value - value + discount * lam * advantage
  passed = (advantage, next_value, waiting + reward)  # at a masked entry; its reward is 0 unless it ends the episode
  carry = tuple(jnp.where(mask, new, old) for new, old in zip((here, value, 0.0), passed))
  return carry, jnp.where(mask, here, 0.0)


def length_adaptive_lambda(length, alpha: float = 0.05) -> Array:
  """lam = 1 - 1 / (alpha length), clamped to [0, 1], float32 of length's shape: longer episodes lean on their outcome.

  VAPO, arXiv 2504.05118; UI-TARS-2, arXiv 2509.02544; lesson chapter 2. length counts agent tokens, not steps: at 20 tokens
  the formula reaches 0, and 15 steps would give -0.33. ValueError for a length below 1 that can be looked at.
  """
  if is_concrete(alpha) and not alpha > 0:
    raise ValueError(f"alpha is {alpha}, wanted a number above 0")
  if is_concrete(length) and not np.all(np.asarray(length) >= 1):
    raise ValueError(f"length is {length}, wanted at least 1 agent token")
  return jnp.clip(1.0 - 1.0 / (alpha * jnp.maximum(f32(length), 1.0)), 0.0, 1.0)
