"""The nouns of the device side, all pytrees: Batch, Scores, TrainState, Weights."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

Params = Any  # nested dict of arrays under checkpoint names


@flax.struct.dataclass
class Batch:
  """Packed token records of fixed shape. B rows of L tokens; a row may hold several records (segments).

  All [B, L] unless said otherwise. segment_ids: 0 = padding, 1.. = records of the row. episode_id: index into the [E]
  arrays. step_id: unique id of the episode step in the batch. is_action: tokens the policy wrote. behaviour_logp,
  version: as sampled. advantage: f32, the push. image_slot: row of the flat image features [M * tokens per image], -1
  = none; on a mesh rows and images come in as many parts (core/mesh.py, blocks), and it counts within the row's own.
  positions: [P, B, L], P = 1 or 3 (M-RoPE). images: whatever the policy's encoder takes, batched over images on the first
  axis, uint8. episode_valid: [E] bool, False for padding. now: i32 [], the trainer's version. Static: num_episodes, the
  padded maximum of episodes; num_steps, of its steps; row_actions, the most action tokens that a row may hold, so that the
  head runs at those places only.
  """

  tokens: jax.Array
  segment_ids: jax.Array
  positions: jax.Array
  episode_id: jax.Array
  step_id: jax.Array
  is_action: jax.Array
  behaviour_logp: jax.Array
  version: jax.Array
  advantage: jax.Array
  image_slot: jax.Array
  images: Any
  episode_valid: jax.Array
  ref_logp: jax.Array | None = None
  old_logp: jax.Array | None = None
  old_value_logit: jax.Array | None = None
  return_: jax.Array | None = None
  now: jax.Array | int = 0
  num_episodes: int = flax.struct.field(pytree_node=False, default=0)
  num_steps: int = flax.struct.field(pytree_node=False, default=0)
  row_actions: int = flax.struct.field(pytree_node=False, default=0)


@flax.struct.dataclass
class StepBatch:
  """Steps for a critic that looks at screens and the task. frames: uint8 [N, 2, ...], the screen before (the first step: its
  own) and the screen now, as the policy's encoder takes them. text: i32 [N, T], the goal's tokens, padded. label: f32 [N], how
  the episode ended (1 pass, 0 fail). valid: bool [N], False for padding.
  """

  frames: jax.Array
  text: jax.Array
  label: jax.Array
  valid: jax.Array


@flax.struct.dataclass
class Scores:
  """What `score(params, batch)` returns, each [B, L], aligned with `Batch.tokens`: entry t scores token t.

  logp <= 0 and entropy >= 0 at action tokens, 0 elsewhere, float32. value_logit: critic's logit, or None; of a StepBatch [N, K],
  one for each of the critic's K heads, and logp, entropy are None.
  """

  logp: jax.Array | None
  entropy: jax.Array | None
  value_logit: jax.Array | None = None


@flax.struct.dataclass
class TrainState:
  """Everything the learner changes. updates: i32 [], optimiser steps done; skipped: i32 [], steps refused in a row because
  they were not finite."""

  params: Params
  opt_state: Any
  updates: jax.Array
  skipped: jax.Array

  @staticmethod
  def create(params: Params, optimiser) -> "TrainState":
    return TrainState(params, optimiser.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


@flax.struct.dataclass
class Weights:
  """What a sampler holds: parameters and the policy version that tags every token it writes."""

  params: Params
  version: int = flax.struct.field(pytree_node=False)
