"""The device side of the session sampler: one cache of many slots, and the few jitted programs that fill it and write from it.

A slot is a row of the cache. Programs have static shapes only: a prefill takes one slot and one of a few chunk sizes, a decode writes up
to `steps` tokens in every active slot before the host hears of it, both read one of a few spans of the cache. The cache is kept in parts
that end where a span does: a program is given the parts it may read, so nothing is sliced, which would copy it. The engine knows slots
and places, no episode: who owns what, and what of it is still good, rollout/sessions.py decides and says at every call.
"""

from __future__ import annotations

import functools
import itertools
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


def _in_parts(a: Any) -> bool:
  return isinstance(a, list)


def empty_cache(policy: Policy, slots: int, spans: Sequence[int]) -> Any:
  """policy.init_cache, each leaf with places as a list of parts that end where the ascending `spans` do."""
  sizes = [end - start for start, end in itertools.pairwise((0, *spans))]

  def one(a):
    return jnp.zeros(a.shape, a.dtype) if len(a.shape) == 1 else [jnp.zeros((*a.shape[:-2], n, a.shape[-1]), a.dtype) for n in sizes]

  return jax.tree.map(one, jax.eval_shape(lambda: policy.init_cache(slots, spans[-1])))


def _joined(read: Any, rest: Any) -> Any:
  """A cache of a program's parts and those that it was not given."""
  return jax.tree.map(lambda a, b: a + b if isinstance(a, list) else a, read, rest, is_leaf=_in_parts)


def _beside(params: Any, made: Any) -> Any:
  """What is made here, bound to the device that the parameters are bound to, as what programs return is: else they would be compiled
  once for this and again for that."""
  leaf = jax.tree.leaves(params)[0]
  bound = getattr(leaf, "committed", False) and isinstance(leaf.sharding, jax.sharding.SingleDeviceSharding)
  return jax.device_put(made, leaf.sharding) if bound else made


class Engine:
  """A cache of `slots` rows and max(spans) places, and what runs on it.

  policy: its cache must be a NamedTuple of length i32 [B], next_position i32 [B] and leaves [B, .., S, d], of zeros when empty; it has
  `unstack`, and its decode_step takes lists of parts in the leaves' place (models/decoder.py, Cache). chunks: sizes of a prefill; spans:
  lengths of the cache that a program may read; steps: tokens a decode writes at most; stops: ids that end an action.
  """

  def __init__(
    self, policy: Policy, slots: int, spans: Sequence[int], chunks: Sequence[int], steps: int, stops: Sequence[int], temperature: float
  ):
    self.policy, self.slots, self.steps, self.stops, self.temperature = policy, slots, steps, tuple(stops), temperature
    self.spans, self.chunks = tuple(sorted(spans)), tuple(sorted(chunks))
    self.cache = empty_cache(policy, slots, self.spans)
    if not hasattr(self.cache, "next_position"):
      raise ValueError(f"policy {policy.name} has a cache whose rows cannot be filled apart; sample with rollout/sampler.py")
    self.programs = programs(policy._replace(tokenizer=None), temperature)

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

  def _parts(self, span: int) -> tuple[Any, Any]:
    """The cache's parts up to a span, which a program is given and takes over, and those behind."""
    n = self.spans.index(span) + 1
    cut = lambda keep: jax.tree.map(lambda a: a[keep] if isinstance(a, list) else a, self.cache, is_leaf=_in_parts)
    return cut(slice(n)), cut(slice(n, None))

  def blank(self, params: Any, images: np.ndarray) -> Any:
    """Features that stand for no image: zeros in the shape of one image's."""
    shapes = jax.eval_shape(self.policy.encode_images, params, jax.ShapeDtypeStruct((min(1, len(images)), *images.shape[1:]), images.dtype))
    return _beside(params, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))

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
    read, rest = self._parts(self.span(start + size))
    read, out = self.programs.prefill(
      params, read, np.int32(slot), np.int32(start), np.int32(next_position), np.pad(tokens, (0, pad))[None],
      np.pad(positions, ((0, 0), (0, pad)))[:, None], np.int32(len(tokens)), features,
      np.pad(image_slot, (0, pad), constant_values=-1)[None], key[None], np.int32(index)[None],
    )  # fmt: skip
    self.cache = _joined(read, rest)
    return Written(*out, np.ones(1, np.int32))

  def decode(
    self, params: Any, token: np.ndarray, count: np.ndarray, limit: np.ndarray, active: np.ndarray, key: np.ndarray, longest: int
  ) -> Written:
    """Writes on in the active slots (bool [B]) until each has written a stop or `limit` tokens (i32 [B]) or `steps` have been made.

    token i32 [B]: the last that was written, not in the cache yet; count i32 [B]: written so far; longest: places filled in the fullest
    active slot.
    """
    read, rest = self._parts(self.span(longest + self.steps))
    read, out = self.programs.decode(
      params, read, token, count, limit, active, key, np.array(self.stops, np.int32), steps=self.steps
    )  # fmt: skip
    self.cache = _joined(read, rest)
    return Written(*(np.asarray(a) for a in out))

  def copy(self, source: int, target: int, places: int) -> None:
    """Gives `target` the first places of `source`."""
    read, rest = self._parts(self.span(places))
    self.cache = _joined(self.programs.copy(read, np.int32(source), np.int32(target)), rest)

  def warm_up(self, params: Any, images: np.ndarray, axes: int) -> None:
    """Compiles every program, so that none is while episodes run. images: of any prompt; axes: of its positions. What the slots hold
    is lost."""
    self.cache = _beside(params, self.cache)
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


class Programs(NamedTuple):
  own: Any
  encode: Any
  prefill: Any
  decode: Any
  copy: Any


@functools.lru_cache(maxsize=8)
def programs(policy: Policy, temperature: float) -> Programs:
  """Jitted once for all engines of a policy, whatever its tokenizer: the sampler of every evaluation finds them compiled."""
  jit = partial(jax.jit, donate_argnames="cache")
  return Programs(
    own=jax.jit(lambda params: jax.tree.map(jnp.copy, policy.unstack(params))),
    encode=jax.jit(policy.encode_images),
    prefill=jit(partial(_prefill, policy, temperature)),
    decode=jit(partial(_decode, policy, temperature), static_argnames="steps"),
    copy=jit(_copy),
  )


def _prefill(policy, temperature, params, cache, slot, start, next_position, tokens, positions, count, features, image_slot, key, index):
  """See Engine.prefill. The model sees the slot as a cache of one row; what it added goes back to its places."""
  pick = lambda a: jax.lax.dynamic_index_in_dim(a, slot, keepdims=True)
  row = jax.tree.map(lambda a: jnp.concatenate([pick(x) for x in a], axis=-2) if isinstance(a, list) else pick(a), cache, is_leaf=_in_parts)
  row = row._replace(length=jnp.full_like(row.length, start), next_position=jnp.full_like(row.next_position, next_position))
  size = tokens.shape[1]
  valid = (jnp.arange(size) < count)[None]
  hidden, row = policy.prefill(params, tokens, positions, valid, features, image_slot, row)

  def back(whole, part):
    if not isinstance(whole, list):
      return whole.at[slot].set(part[0])
    ends = list(itertools.accumulate(a.shape[-2] for a in whole))
    first = jnp.minimum(start, ends[-1] - size)  # near the end the slice holds some old places too
    new, place = jnp.moveaxis(jax.lax.dynamic_slice_in_dim(part, first, size, axis=part.ndim - 2)[0], -2, 0), first + jnp.arange(size)

    def put(a, end):
      at = jnp.where((place >= end - a.shape[-2]) & (place < end), place - end + a.shape[-2], a.shape[-2])  # beyond: dropped
      return a.at[(slot, *(slice(None),) * (a.ndim - 3), at)].set(new, mode="drop")

    return [put(a, end) for a, end in zip(whole, ends)]

  last = jax.lax.dynamic_index_in_dim(hidden, jnp.maximum(count - 1, 0), axis=1, keepdims=False)
  drawn = draw(policy.logits(params, last), key, index, temperature)
  return jax.tree.map(back, cache, row, is_leaf=_in_parts), tuple(a[None] for a in drawn)


def _decode(policy, temperature, params, cache, token, count, limit, active, key, stops, *, steps):
  """See Engine.decode. A slot that is not active computes what nobody reads, at a place that its next token overwrites."""

  def body(carry):
    t, cache, token, count, active, out = carry
    length, position = cache.length, cache.next_position
    hidden, cache = policy.decode_step(params, token, position, cache)
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


def _copy(cache, source, target):
  def one(a):
    row = jax.lax.dynamic_index_in_dim(a, source, keepdims=True)
    return jax.lax.dynamic_update_slice(a, row, (target,) + (0,) * (a.ndim - 1))

  return jax.tree.map(one, cache)
