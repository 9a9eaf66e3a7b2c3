"""Critics: what a state is worth, for the algorithms that ask.

  trunk   a value before every token, a head on a transformer trunk: the policy's own (frozen under it), or a copy that learns
          (PPO with a critic: VAPO, arXiv 2504.05118; UI-TARS-2, arXiv 2509.02544; lesson chapter 2, the critic at scale)
  frames  a value for every step from two screens and the task, small heads over features that never change (DigiRL,
          arXiv 2406.11896, section 4; lesson chapter 2); two heads, of which the credit takes the smaller
  text    a value for a task from its words alone (DigiRL's instruction critic)

Each is a `models.base.Critic`: init(key, policy_params) and score(params, frozen, batch) -> Scores with value_logit, where
`frozen` is a policy's parameters that get no gradient: for "trunk" the policy as it is, for the others the copied policy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx

from core.state import Scores
from models.base import Critic, Policy

KINDS = ("trunk", "frames", "text")


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "width": 128,  # hidden width of the heads
      "heads": 2,  # of a frames critic; the credit takes the smallest of their values
      "trunk": "copy",  # "policy": the head reads the policy's own hidden states; "copy": a trunk of its own, from the copied policy
      "lr": 1e-3,
      "warmup": 5,  # optimiser steps
      "weight_decay": 0.0,
    }
  )


def build(kind: str, cfg: ml_collections.ConfigDict, policy: Policy) -> Critic:
  """A critic for one policy. ValueError for a kind or a size that does not exist."""
  if kind not in KINDS:
    raise ValueError(f"critic kind is {kind!r}, wanted one of {', '.join(KINDS)}")
  if cfg.width < 1 or cfg.heads < 1:
    raise ValueError(f"critic width is {cfg.width}, heads {cfg.heads}: wanted 1 or more of each")
  if cfg.trunk not in ("policy", "copy"):
    raise ValueError(f"critic trunk is {cfg.trunk!r}, wanted 'policy' or 'copy'")
  if kind == "trunk":
    return _trunk_critic(cfg, policy)
  return _step_critic(kind, cfg, policy)


class Head(nnx.Module):
  """Definition and initialisation of an MLP head: sizes[0] -> ... -> sizes[-1]. Never called; `_mlp` is."""

  def __init__(self, sizes: tuple[int, ...], rngs: nnx.Rngs):
    def leaf(shape, scale, names):
      return nnx.Param(nnx.with_partitioning(nnx.initializers.normal(scale), names)(rngs.params(), shape, jnp.float32))

    # the last layer starts small: the first guesses are near 0.5 and the first steps are taken by the data
    scales = [(2 / n) ** 0.5 for n in sizes[:-2]] + [0.1 * sizes[-2] ** -0.5]
    self.weight = nnx.data([leaf((o, i), s, (None, None)) for i, o, s in zip(sizes[:-1], sizes[1:], scales, strict=True)])
    self.bias = nnx.data([nnx.Param(jnp.zeros(o)) for o in sizes[1:]])


def _init_head(key: jax.Array, sizes: tuple[int, ...]) -> dict:
  with nnx.use_eager_sharding(False):
    state = nnx.to_pure_dict(nnx.state(Head(sizes, nnx.Rngs(params=key)), nnx.Param))
  return {name: {str(k): v for k, v in leaves.items()} for name, leaves in state.items()}


def _mlp(head: dict, x: jax.Array) -> jax.Array:
  last = len(head["weight"]) - 1
  for i in range(last + 1):
    x = jnp.einsum("...i,oi->...o", x, head["weight"][str(i)]) + head["bias"][str(i)]
    x = jax.nn.relu(x) if i < last else x
  return x


def _normal(x: jax.Array) -> jax.Array:
  """Each vector centred and scaled to spread 1: features of any policy come in one size."""
  x = x.astype(jnp.float32)
  x = x - jnp.mean(x, axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def _trunk_critic(cfg: ml_collections.ConfigDict, policy: Policy) -> Critic:
  """value_logit f32 [B, L]: entry t is the state before token t, read from hidden t - 1; 0 outside action tokens."""

  def init(key, policy_params):
    hidden = policy.width
    params = {"head": _init_head(key, (hidden, cfg.width, 1))}
    return params | ({"trunk": jax.tree.map(jnp.copy, policy_params)} if cfg.trunk == "copy" else {})

  def score(params, frozen, batch):
    trunk = params["trunk"] if cfg.trunk == "copy" else jax.lax.stop_gradient(frozen)
    features = policy.encode_images(trunk, batch.images)
    hidden = policy.forward(trunk, batch.tokens, batch.positions, batch.segment_ids, features, batch.image_slot)
    logit = _mlp(params["head"], hidden)[..., 0]
    before = jnp.concatenate([jnp.zeros_like(logit[:, :1]), logit[:, :-1]], axis=1)
    return Scores(None, None, jnp.where(batch.is_action, before, 0.0))

  return Critic("trunk", "tokens", init, score)


def _step_critic(kind: str, cfg: ml_collections.ConfigDict, policy: Policy) -> Critic:
  """value_logit f32 [N, K], one per head, from a StepBatch. A text critic has one head and looks at no screen."""
  heads = cfg.heads if kind == "frames" else 1

  def features(frozen, batch):
    frozen = jax.lax.stop_gradient(frozen)
    n = batch.text.shape[0]
    words = jnp.where((batch.text > 0)[..., None], policy.embed(frozen, batch.text), 0.0)
    parts = [_normal(words.reshape(n, -1))]
    if kind == "frames":
      seen = policy.encode_images(frozen, batch.frames.reshape(-1, *batch.frames.shape[2:]))
      parts.append(_normal(seen.reshape(n, 2, -1)).reshape(n, -1))
    return jnp.concatenate(parts, axis=-1)

  def init(key, policy_params):
    del policy_params
    size = policy.max_goal * policy.width + (2 * policy.tokens_per_image * policy.width if kind == "frames" else 0)
    keys = jax.random.split(key, heads)
    return {str(k): _init_head(keys[k], (size, cfg.width, cfg.width, 1)) for k in range(heads)}

  def score(params, frozen, batch):
    x = features(frozen, batch)
    return Scores(None, None, jnp.concatenate([_mlp(params[str(k)], x) for k in range(heads)], axis=-1))

  return Critic(kind, "steps", init, score)
