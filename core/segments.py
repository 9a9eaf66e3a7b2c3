"""Sums, means and spreads over an id axis, and `Total`: the only place where packing is visible.

A packed batch is flat: one row of tokens `x_N` and one row of ids `segment_id_N` saying which episode, step or group each
entry belongs to. Entries may stand in any order. Everything is rank 1 (callers flatten or vmap), float32 inside, and works
on numpy or jax arrays under jit, grad and vmap. `num_segments` is a static Python int. Masked entries are replaced before
they are used, so NaN or 1e30 there changes neither value nor gradient.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Total(NamedTuple):
  """A sum and the count it will be divided by, kept apart until every micro-batch and every device has been added.

  sum, count: float32, of one shape (scalars for a loss, [S] for one total per segment). A pytree, so `jax.lax.psum` and
  `jax.lax.scan` take it as it is; `+` adds micro-batches and `sum([...])` adds a list of them.
  """

  sum: Array
  count: Array

  def __add__(self, other):
    if isinstance(other, int) and other == 0:  # what Python's sum() starts from
      return self
    if not isinstance(other, Total):
      raise TypeError(f"a Total adds to a Total only, got {type(other).__name__}")
    return Total(self.sum + other.sum, self.count + other.count)

  __radd__ = __add__

  def mean(self) -> Array:
    """sum / count; exactly 0, with a finite zero gradient, where the count is 0."""
    some = self.count > 0
    return jnp.where(some, self.sum, 0.0) / jnp.where(some, self.count, 1.0)


def same_length(**arrays) -> int:
  """The common length of rank-1 arrays. ValueError naming the arrays and their shapes otherwise: nothing broadcasts.

  None means "not given" and is skipped.
  """
  first_name, length = None, 0
  for name, array in arrays.items():
    if array is None:
      continue
    shape = np.shape(array)
    if len(shape) != 1:
      raise ValueError(f"{name} has shape {tuple(shape)}, wanted rank 1: flatten it, or vmap over the other axes")
    if first_name is None:
      first_name, length = name, shape[0]
    elif shape[0] != length:
      raise ValueError(f"{first_name} has length {length} but {name} has length {shape[0]}: they must be equal")
  return length


def as_mask(mask, length: int) -> Array:
  """bool [N] from a bool or 0/1 mask; all True where mask is None."""
  return jnp.ones(length, bool) if mask is None else jnp.asarray(mask) != 0


def as_float(x) -> Array:
  """x as float32; float64 stays float64, which only a run with jax_enable_x64 can have (tests compare there to 1e-12)."""
  x = jnp.asarray(x)
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def is_concrete(*values) -> bool:
  """True where the values can be looked at now, False while jax traces any of them."""
  return not any(isinstance(value, jax.core.Tracer) for value in values)


def segment_total(x_N, segment_id_N, num_segments: int, mask_N=None) -> Total:
  """Sum and count of the unmasked entries of each segment: Total of [S] float32. An id outside [0, S) must be masked."""
  length = same_length(x_N=x_N, segment_id_N=segment_id_N, mask_N=mask_N)
  mask = as_mask(mask_N, length)
  ids = _ids(segment_id_N, num_segments, mask)
  x = jnp.where(mask, as_float(x_N), 0.0)
  return Total(jax.ops.segment_sum(x, ids, num_segments), jax.ops.segment_sum(mask.astype(jnp.float32), ids, num_segments))


def segment_sum(x_N, segment_id_N, num_segments: int, mask_N=None) -> Array:
  """Sum of the unmasked entries of each segment, [S] float32; 0 for an empty segment."""
  return segment_total(x_N, segment_id_N, num_segments, mask_N).sum


def segment_mean(x_N, segment_id_N, num_segments: int, mask_N=None) -> Array:
  """Mean of the unmasked entries of each segment, [S] float32; 0 (gradient 0) for an empty segment."""
  return segment_total(x_N, segment_id_N, num_segments, mask_N).mean()


def segment_min(x_N, segment_id_N, num_segments: int, mask_N=None) -> Array:
  """Smallest unmasked entry of each segment, [S] float32; 0 for an empty segment. Gradients stop here."""
  return -segment_max(-as_float(x_N), segment_id_N, num_segments, mask_N)


def segment_max(x_N, segment_id_N, num_segments: int, mask_N=None) -> Array:
  """Largest unmasked entry of each segment, [S] float32; 0 for an empty segment. Gradients stop here."""
  length = same_length(x_N=x_N, segment_id_N=segment_id_N, mask_N=mask_N)
  mask = as_mask(mask_N, length)
  ids = _ids(segment_id_N, num_segments, mask)
  x = jnp.where(mask, jax.lax.stop_gradient(as_float(x_N)), -jnp.inf)
  some = jax.ops.segment_sum(mask.astype(jnp.float32), ids, num_segments) > 0
  return jnp.where(some, jax.ops.segment_max(x, ids, num_segments), 0.0)


def segment_std(x_N, segment_id_N, num_segments: int, mask_N=None, *, ddof: int = 0) -> Array:
  """Spread of the unmasked entries of each segment, [S] float32: sqrt(sum (x - mean)^2 / (count - ddof)).

  ddof 0 is the population spread, 1 the sample spread. 0 where a segment has ddof entries or fewer. Two passes (mean first,
  then squares), so equal entries give at most rounding; the gradient at a spread of 0 is 0, not infinite.
  """
  total = segment_total(x_N, segment_id_N, num_segments, mask_N)
  mask = as_mask(mask_N, np.shape(x_N)[0])
  centred = jnp.where(mask, as_float(x_N), 0.0) - segment_gather(total.mean(), segment_id_N)
  squares = segment_sum(centred**2, segment_id_N, num_segments, mask)
  variance = Total(squares, total.count - ddof).mean()
  return jnp.where(variance == 0, 0.0, jnp.sqrt(jnp.where(variance == 0, 1.0, variance)))


def segment_gather(x_S, segment_id_N) -> Array:
  """Give every entry its segment's number: [N] from [S]. 0 where the id is outside [0, S)."""
  same_length(x_S=x_S)
  same_length(segment_id_N=segment_id_N)
  size = np.shape(x_S)[0]
  ids = jnp.asarray(segment_id_N)
  inside = (ids >= 0) & (ids < size)
  return jnp.where(inside, jnp.asarray(x_S)[jnp.where(inside, ids, 0)], 0)


def _ids(segment_id_N, num_segments: int, mask: Array) -> Array:
  """Integer ids, checked where they can be looked at. Traced ids outside the range fall out of jax's segment operations."""
  if operator.index(num_segments) < 1:
    raise ValueError(f"num_segments is {num_segments}, wanted at least 1")
  ids = jnp.asarray(segment_id_N)
  if not jnp.issubdtype(ids.dtype, jnp.integer):
    raise ValueError(f"segment ids have dtype {ids.dtype}, wanted integers")
  outside = mask & ((ids < 0) | (ids >= num_segments))
  if is_concrete(outside) and np.any(outside):
    worst = np.asarray(ids)[np.asarray(outside)][0]
    raise ValueError(f"an unmasked entry has segment id {worst}, wanted 0 .. {num_segments - 1}: mask it or raise the count")
  return ids
