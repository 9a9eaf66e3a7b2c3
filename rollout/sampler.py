"""The in-process sampler: prompts in, tokens with their log-probabilities out, from one jitted decode."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from core.state import Weights
from models.base import Policy, Prompt


class Sampled(NamedTuple):
  """What one step wrote. tokens i32 [A], the end token included if it was written; logp, entropy f32 [A], of the
  distribution the token was drawn from; version: of the weights that wrote it, an
  int, or i32 [A] where they changed within the action."""

  tokens: np.ndarray
  logp: np.ndarray
  entropy: np.ndarray
  version: int


@lru_cache(maxsize=8)
def program_of(policy: Policy, eos: int) -> Any:
  """`sample`, jitted once for all samplers of a policy, whatever its tokenizer: every evaluation of a run finds it compiled."""
  return jax.jit(partial(sample, policy, eos), static_argnames=("greedy",))


class Sampler:
  """Samples actions for many episodes at once.

  policy: the model; buckets: batch sizes it compiles for (a request is padded up to the next one); temperature: 1.0 while
  training; 0 means greedy, for evaluation only. Weights are swapped by `load`; every token carries the version.
  """

  def __init__(self, policy: Policy, buckets: tuple[int, ...], temperature: float = 1.0):
    if temperature < 0 or not np.isfinite(temperature):
      raise ValueError(f"temperature is {temperature}, wanted 0 (greedy, evaluation only) or more")
    self.policy, self.buckets, self.temperature = policy, tuple(sorted(buckets)), temperature
    self.weights: Weights | None = None
    self.tokens = 0  # action tokens written so far
    self._sample = program_of(policy._replace(tokenizer=None), policy.tokenizer.eos_id)

  def load(self, weights: Weights) -> None:
    """Swaps the weights; the next token is written under the new version. A copy is kept: the learner donates its own."""
    self.weights = Weights(jax.tree.map(jnp.copy, weights.params), weights.version)

  def close(self) -> None:
    """Nothing to end here; a sampler on servers has connections."""

  def act(self, prompts: list[Prompt], keys: np.ndarray) -> list[Sampled]:
    """One action for each prompt. keys uint32 [n, 2]: each prompt's own, so that a result does not depend on its batch."""
    if self.weights is None:
      raise RuntimeError("the sampler has no weights: call load before act")
    out: list[Sampled] = []
    for start in range(0, len(prompts), self.buckets[-1]):
      out += self._act(prompts[start : start + self.buckets[-1]], keys[start : start + self.buckets[-1]])
    return out

  def _act(self, prompts: list[Prompt], keys: np.ndarray) -> list[Sampled]:
    n = len(prompts)
    size = next(b for b in self.buckets if b >= n)
    inputs = stack_prompts(self.policy, prompts, size)
    padded = np.zeros((size, 2), np.uint32)
    padded[:n] = keys
    temperature = self.temperature or 1.0
    weights = self.weights  # once: another thread may publish while this batch is under way
    result = self._sample(weights.params, *inputs, padded, temperature, greedy=self.temperature == 0)
    tokens, logp, entropy, count = (np.asarray(x) for x in result)
    self.tokens += int(count[:n].sum())
    return [Sampled(tokens[i, : count[i]], logp[i, : count[i]], entropy[i, : count[i]], weights.version) for i in range(n)]


def stack_prompts(policy: Policy, prompts: list[Prompt], size: int) -> tuple[np.ndarray, ...]:
  """Right-pads prompts to one shape: tokens, positions, valid, images, image_slot, next_position."""
  first = prompts[0]
  axes, length, per_image = first.positions.shape[0], policy.max_prompt, policy.tokens_per_image
  tokens, valid = np.zeros((size, length), np.int32), np.zeros((size, length), bool)
  positions, image_slot = np.zeros((axes, size, length), np.int32), np.full((size, length), -1, np.int32)
  images = np.zeros((size, *first.images.shape), np.uint8)
  next_position = np.zeros(size, np.int32)
  for i, p in enumerate(prompts):
    n = len(p.tokens)
    tokens[i, :n], valid[i, :n], positions[:, i, :n] = p.tokens, True, p.positions
    images[i], next_position[i] = p.images, p.next_position
    for j, place in enumerate(p.image_place):
      base = (i * len(p.images) + j) * per_image
      image_slot[i, place : place + per_image] = np.arange(base, base + per_image)
  return tokens, positions, valid, images.reshape(-1, *first.images.shape[1:]), image_slot, next_position


def likeliest(score: jax.Array) -> jax.Array:
  """jnp.argmax of f32 [B, V] over V, i32 [B], in two passes that a CPU's vectors can take (docs/log.md)."""
  words = score.shape[-1]
  return jnp.min(jnp.where(score == score.max(-1, keepdims=True), jnp.arange(words, dtype=jnp.int32), words - 1), axis=-1)


def draw(logits, key, index, temperature, *, greedy: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(token i32, logp f32, entropy f32), each [B], of logits f32 [B, V] under a temperature; greedy takes the likeliest.

  key uint32 [B, 2] and index i32 [B], the token's number in its action: a row's draw depends on nothing else.
  """
  logp = jax.nn.log_softmax(logits / temperature, axis=-1)
  one = lambda key, index, logp: logp + jax.random.gumbel(jax.random.fold_in(key, index), logp.shape, logp.dtype)
  token = likeliest(logp if greedy else jax.vmap(one)(key, index, logp))  # as jax.random.categorical draws
  chosen = jnp.take_along_axis(logp, token[:, None], axis=1)[:, 0]
  return token, jnp.minimum(chosen, 0.0), -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def sample(policy: Policy, eos, params, tokens, positions, valid, images, image_slot, next_position, keys, temperature, *, greedy: bool):
  """Prefills the prompts, then writes token by token until every row has written `eos` or max_action tokens.

  Returns tokens i32 [B, A], logp and entropy f32 [B, A], count i32 [B]. The log-probability is that of the tempered
  distribution the token was drawn from.
  """
  rows, length = tokens.shape
  limit = policy.max_action
  cache = policy.init_cache(rows, length + limit)
  features = policy.encode_images(params, images)
  hidden, cache = policy.prefill(params, tokens, positions, valid, features, image_slot, cache)
  last = jnp.sum(valid, axis=1) - 1
  hidden = jnp.take_along_axis(hidden, jnp.maximum(last, 0)[:, None, None], axis=1)[:, 0]

  def body(carry):
    t, hidden, cache, done, out = carry
    token, logp, entropy = draw(policy.logits(params, hidden), keys, jnp.full(rows, t), temperature, greedy=greedy)
    token = jnp.where(done, 0, token)
    put = lambda a, x: a.at[:, t].set(jnp.where(done, 0, x))
    out = (put(out[0], token), put(out[1], logp), put(out[2], entropy), out[3] + ~done)
    done = done | (token == eos)
    hidden, cache = policy.decode_step(params, token, next_position + t, cache)
    return t + 1, hidden, cache, done, out

  out = (
    jnp.zeros((rows, limit), jnp.int32),
    jnp.zeros((rows, limit), jnp.float32),
    jnp.zeros((rows, limit), jnp.float32),
    jnp.zeros(rows, jnp.int32),
  )
  done = ~valid.any(axis=1)  # padding rows have nothing to write
  carry = (jnp.zeros((), jnp.int32), hidden, cache, done, out)
  return jax.lax.while_loop(lambda c: (c[0] < limit) & ~c[3].all(), body, carry)[4]
