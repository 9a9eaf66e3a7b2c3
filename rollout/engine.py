"""The device side of the session sampler: one cache of many slots, and the few jitted programs that fill it and write from it.

A slot is a row of the cache. Programs have static shapes only: a prefill takes one slot and one of a few chunk sizes, a decode writes up
to `steps` tokens in every active slot before the host hears of it, both read one of a few spans of the cache. The engine knows slots and
places, no episode: who owns what, and what of it is still good, rollout/sessions.py decides and says at every call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.base import Policy
from rollout import sampler


class Written(NamedTuple):
  """What a call wrote, each [T, B]: token i32, logp and entropy f32 of the distribution it was drawn from; count i32 [B]: how many of
  the T are real in each slot, from the first on."""

  token: np.ndarray
  logp: np.ndarray
  entropy: np.ndarray
  count: np.ndarray


def draw(logits: jax.Array, key: jax.Array, index: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array, jax.Array]:
  """rollout.sampler.draw; temperature 0 takes the likeliest and scores it at 1."""
  return sampler.draw(logits, key, index, temperature or 1.0, greedy=not temperature)


class Engine:
  """A cache of `slots` rows and max(spans) places, and what runs on it.

  policy: its cache must be a NamedTuple of length i32 [B], next_position i32 [B] and leaves [B, .., S, d]; it has `unstack`, and its
  decode_step takes span=, how many places of the cache are read (models/base.py). chunks: sizes of a prefill; spans: lengths of the cache
  that a program may read; steps: tokens a decode writes at most; stops: ids that end an action.
  """

  def __init__(
    self, policy: Policy, slots: int, spans: Sequence[int], chunks: Sequence[int], steps: int, stops: Sequence[int], temperature: float
  ):
    self.policy, self.slots, self.steps, self.stops, self.temperature = policy, slots, steps, tuple(stops), temperature
    self.spans, self.chunks = tuple(sorted(spans)), tuple(sorted(chunks))
    self.cache = policy.init_cache(slots, self.spans[-1])
    if not hasattr(self.cache, "next_position"):
      raise ValueError(f"policy {policy.name} has a cache whose rows cannot be filled apart; sample with rollout/sampler.py")
    self.programs = _programs(policy._replace(tokenizer=None), temperature)

  def own(self, params: Any) -> Any:
    """A copy of a learner's parameters in the form the programs take: the learner donates its own."""
    return self.programs.own(params)

  @property
  def compiled(self) -> int:
    """Programs compiled so far."""
    return sum(program._cache_size() for program in self.programs)

  def span(self, places: int) -> int:
    """The shortest span that holds so many places, or the longest there is: a padded chunk may reach over the end."""
    return next((s for s in self.spans if s >= places), self.spans[-1])

  def blank(self, params: Any, images: np.ndarray) -> Any:
    """Features that stand for no image: zeros in the shape of one image's."""
    shapes = jax.eval_shape(self.policy.encode_images, params, jax.ShapeDtypeStruct((min(1, len(images)), *images.shape[1:]), images.dtype))
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def encode(self, params: Any, image: np.ndarray) -> Any:
    """Features of one screenshot, on the device."""
    return self.programs.encode(params, image[None])

  def prefill(
    self, params: Any, slot: int, start: int, next_position: int, tokens: np.ndarray, positions: np.ndarray, features: Any,
    image_slot: np.ndarray, size: int, key: np.ndarray, index: int,
  ) -> Written:  # fmt: skip
    """Puts tokens i32 [n] at places start .. start + n - 1 of a slot, n <= size, one of the chunk sizes, and draws the token after them.

    What stood from `start` on is gone. positions i32 [P, n]; next_position: of a text token at `start`; image_slot i32 [n]: the row of
    features that takes a token's place, -1 = none. What it returns has T = B = 1 and may still be under way on the device.
    """
    pad = size - len(tokens)
    self.cache, out = self.programs.prefill(
      params, self.cache, np.int32(slot), np.int32(start), np.int32(next_position), np.pad(tokens, (0, pad))[None],
      np.pad(positions, ((0, 0), (0, pad)))[:, None], np.int32(len(tokens)), features,
      np.pad(image_slot, (0, pad), constant_values=-1)[None], key[None], np.int32(index)[None], span=self.span(start + size),
    )  # fmt: skip
    return Written(*out, np.ones(1, np.int32))

  def decode(
    self, params: Any, token: np.ndarray, count: np.ndarray, limit: np.ndarray, active: np.ndarray, key: np.ndarray, longest: int
  ) -> Written:
    """Writes on in the active slots (bool [B]) until each has written a stop or `limit` tokens (i32 [B]) or `steps` have been made.

    token i32 [B]: the last that was written, not in the cache yet; count i32 [B]: written so far; longest: places filled in the fullest
    active slot.
    """
    self.cache, out = self.programs.decode(
      params, self.cache, token, count, limit, active, key, np.array(self.stops, np.int32), steps=self.steps,
      span=self.span(longest + self.steps),
    )  # fmt: skip
    return Written(*(np.asarray(a) for a in out))

  def copy(self, source: int, target: int, places: int) -> None:
    """Gives `target` the first places of `source`."""
    self.cache = self.programs.copy(self.cache, np.int32(source), np.int32(target), span=self.span(places))

  def warm_up(self, params: Any, images: np.ndarray, axes: int) -> None:
    """Compiles every program, so that none is while episodes run. images: of any prompt; axes: of its positions. What the slots hold
    is lost."""
    features, none = self.blank(params, images), np.zeros(0, np.int32)
    if len(images):
      self.encode(params, images[0])
    flat, off = np.zeros(self.slots, np.int32), np.zeros(self.slots, bool)
    for i, span in enumerate(self.spans):
      self.copy(0, 0, span)
      self.decode(params, flat, flat, flat, off, np.zeros((self.slots, 2), np.uint32), span - self.steps)
      for size in self.chunks:
        if size <= span:
          start = max(0, self.spans[i - 1] - size + 1) if i else 0
          self.prefill(params, 0, start, 0, none, np.zeros((axes, 0), np.int32), features, none, size, np.zeros(2, np.uint32), 0)


class _Programs(NamedTuple):
  own: Any
  encode: Any
  prefill: Any
  decode: Any
  copy: Any


@functools.cache
def _programs(policy: Policy, temperature: float) -> _Programs:
  """Jitted once for all engines of a policy, whatever its tokenizer: the sampler of every evaluation finds them compiled."""
  jit = partial(jax.jit, donate_argnames="cache")
  return _Programs(
    own=jax.jit(lambda params: jax.tree.map(jnp.copy, policy.unstack(params))),
    encode=jax.jit(policy.encode_images),
    prefill=jit(partial(_prefill, policy, temperature), static_argnames="span"),
    decode=jit(partial(_decode, policy, temperature), static_argnames=("steps", "span")),
    copy=jit(_copy, static_argnames="span"),
  )


def _prefill(
  policy, temperature, params, cache, slot, start, next_position, tokens, positions, count, features, image_slot, key, index, *, span
):
  """See Engine.prefill. The model sees the slot as a cache of one row; what it added goes back to its places."""
  row = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, slot, keepdims=True), cache)
  row = jax.tree.map(lambda a: a if a.ndim == 1 else a[..., :span, :], row)
  row = row._replace(length=jnp.full_like(row.length, start), next_position=jnp.full_like(row.next_position, next_position))
  size = tokens.shape[1]
  valid = (jnp.arange(size) < count)[None]
  hidden, row = policy.prefill(params, tokens, positions, valid, features, image_slot, row)
  first = jnp.minimum(start, span - size)  # near the end the slice holds some old places too

  def back(whole, part):
    if whole.ndim == 1:
      return whole.at[slot].set(part[0])
    new = jax.lax.dynamic_slice_in_dim(part, first, size, axis=whole.ndim - 2)
    return jax.lax.dynamic_update_slice(whole, new, (slot, *(0,) * (whole.ndim - 3), first, 0))

  last = jax.lax.dynamic_index_in_dim(hidden, jnp.maximum(count - 1, 0), axis=1, keepdims=False)
  return jax.tree.map(back, cache, row), tuple(a[None] for a in draw(policy.logits(params, last), key, index, temperature))


def _decode(policy, temperature, params, cache, token, count, limit, active, key, stops, *, steps, span):
  """See Engine.decode. A slot that is not active computes what nobody reads, at a place that its next token overwrites."""

  def body(carry):
    t, cache, token, count, active, out = carry
    length, position = cache.length, cache.next_position
    hidden, cache = policy.decode_step(params, token, position, cache, span=span)
    cache = cache._replace(length=jnp.where(active, cache.length, length), next_position=jnp.where(active, cache.next_position, position))
    drawn = draw(policy.logits(params, hidden), key, count, temperature)
    out = tuple(a.at[t].set(x) for a, x in zip(out, drawn))
    token, count = jnp.where(active, drawn[0], token), count + active
    active = active & ~jnp.isin(token, stops) & (count < limit)
    return t + 1, cache, token, count, active, out

  empty = lambda dtype: jnp.zeros((steps, *token.shape), dtype)
  start = (jnp.int32(0), cache, token, count, active, (empty(jnp.int32), empty(jnp.float32), empty(jnp.float32)))
  _, cache, _, after, _, out = jax.lax.while_loop(lambda c: (c[0] < steps) & c[4].any(), body, start)
  return cache, (*out, after - count)


def _copy(cache, source, target, *, span):
  def one(a):
    row = jax.lax.dynamic_index_in_dim(a, source, keepdims=True)
    return jax.lax.dynamic_update_slice(a, row if a.ndim == 1 else row[..., :span, :], (target,) + (0,) * (a.ndim - 1))

  return jax.tree.map(one, cache)
