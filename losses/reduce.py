"""From one number per token to one loss: a `Total(sum, count)`, added over micro-batches and the mesh, divided once.

Truncation and padding change the mask, so they leave numerator and denominator. Rejection (a stale or far-off token) sets a
weight 0 inside x_N and leaves the mask alone: the denominator keeps the original count, else the kept tokens would be
pushed harder for every token dropped (AReaL's rule). Only `micro_batch_mean`, which is here to reproduce runs of TRL's "bnpo",
depends on how the batch was cut.
"""

from __future__ import annotations

import jax.numpy as jnp

from core.segments import Total, as_mask, is_concrete, same_length, segment_total
from losses.arrays import f32


def token_mean(x_N, mask_N) -> Total:
  """Every agent token of the optimiser step weighs the same: Total(sum of x where mask, number of mask).

  DAPO, arXiv 2503.14476, eq 8; lesson chapter 5 (long episodes get quiet pushes). x_N: [N], what each token counts; also
  takes [E] arrays with an episode mask. Gradient: 1 / count at every counted token, exactly 0 at masked ones.
  """
  mask = as_mask(mask_N, same_length(x_N=x_N, mask_N=mask_N))
  return Total(jnp.sum(jnp.where(mask, f32(x_N), 0.0)), jnp.sum(mask.astype(jnp.float32)))


def episode_mean(x_N, mask_N, episode_id_N, num_episodes: int, *, tokens_E=None) -> Total:
  """Every episode weighs the same: Total(sum over episodes of their token mean, episodes with at least one token).

  GRPO, arXiv 2402.03300, eq 3, and GSPO. Fully masked episodes leave the sum and the count. tokens_E: [E] each episode's
  token count over the whole optimiser step, needed only when an episode's tokens are spread over several micro-batches; the
  parts then carry fractions of an episode that add up to one.
  """
  total = segment_total(x_N, episode_id_N, num_episodes, mask_N)
  if tokens_E is None:
    return Total(jnp.sum(total.mean()), jnp.sum((total.count > 0).astype(jnp.float32)))
  same_length(tokens_E=tokens_E, episodes=total.count)
  whole = f32(tokens_E)
  return Total(jnp.sum(Total(total.sum, whole).mean()), jnp.sum(Total(total.count, whole).mean()))


def episode_sum_mean(x_N, mask_N, episode_id_N, num_episodes: int, *, tokens_E=None) -> Total:
  """Token sums averaged over episodes: Total(sum of x where mask, episodes with at least one token).

  verl's seq-mean-token-sum: a long episode pushes in proportion to its length. tokens_E as in `episode_mean`.
  """
  total = segment_total(x_N, episode_id_N, num_episodes, mask_N)
  return Total(jnp.sum(total.sum), episode_mean(x_N, mask_N, episode_id_N, num_episodes, tokens_E=tokens_E).count)


def constant_norm(x_N, mask_N, constant) -> Total:
  """Token sum over a fixed divisor: Total(sum of x where mask, constant).

  Dr. GRPO, arXiv 2503.20783: no episode's length changes its weight. constant: this call's share of the divisor, e.g. its
  number of episodes times the longest length allowed; shares add up over micro-batches like any other count.
  """
  if is_concrete(constant) and not constant > 0:
    raise ValueError(f"constant is {constant}, wanted a number above 0")
  total = token_mean(x_N, mask_N)
  return Total(total.sum, f32(constant))


def micro_batch_mean(x_N, mask_N) -> Total:
  """Token mean inside this call, then every call weighs the same: Total(mean of x where mask, 1), Total(0, 0) without a token.

  TRL's "bnpo". The one reduction whose step size depends on how the batch was cut: a token of a short micro-batch is pushed
  harder. Equal to `token_mean` where one micro-batch is the whole batch, and to `episode_mean` where each holds one episode.
  """
  total = token_mean(x_N, mask_N)
  return Total(total.mean(), jnp.minimum(total.count, 1.0))
