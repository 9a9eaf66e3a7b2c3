"""A process's rows on the devices of a mesh, and what was computed of them back to it.

Every process packs whole rows of its own. Where a row's devices are one process's, each lays its rows there and all together are one
batch. Where they are several processes' (core.mesh.shared), processes are more than blocks of rows, and all together are as many
micro-batches as there are processes to a block: in each, every block is one process's. The rows of neighbours that share devices are
gathered on those devices, over the interconnect, and every device keeps its part.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from core.mesh import ROWS, Shared, batch_shardings, blocks, digits, shared
from core.state import Batch

_AXIS = {"positions": 1}  # of a field's rows, images or episodes, where it is not the first


def put(batch: Any, mesh: Mesh) -> tuple[Any, ...]:
  """A host's batch on the devices: one, or the micro-batches that it is a part of. Of several processes each gives an equal share of the
  rows, images and episodes, with ids that count from 0 in its share. On one device nothing is done: the step takes numpy."""
  if mesh.size == 1:
    return (batch,)
  count, index = jax.process_count(), jax.process_index()
  if count == 1:
    return (jax.device_put(batch, batch_shardings(batch, mesh)),)
  if lie := shared(mesh):
    return _dealt(batch, mesh, lie)
  if isinstance(batch, Batch):
    batch = _numbered(batch, index, count)
  shapes = _wholes(batch, count)
  one = lambda leaf, sharding, shape: jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape.shape)
  return (jax.tree.map(one, batch, batch_shardings(shapes, mesh), shapes),)


def mine(found: list[Any], mesh: Mesh) -> Any:
  """This process's rows, as `put` took them, of arrays [B, ...] that are on every device: one for each of put's batches."""
  if jax.process_count() == 1:
    return found[0]
  if shared(mesh):
    part, block = _place(mesh)
    rows = found[part].shape[0] // blocks(mesh)
    return np.asarray(found[part])[block * rows : (block + 1) * rows]
  x = found[0]
  parts = {index[0].indices(x.shape[0])[:2] for index in NamedSharding(mesh, P(ROWS)).addressable_devices_indices_map(x.shape).values()}
  return np.concatenate([np.asarray(x)[a:b] for a, b in sorted(parts)])


def _numbered(batch: Batch, index: int, count: int) -> Batch:
  """The batch with the ids that it has as the index-th of so many shares."""
  return dataclasses.replace(
    batch, episode_id=batch.episode_id + index * batch.num_episodes, step_id=batch.step_id + index * batch.num_steps,
    num_episodes=count * batch.num_episodes, num_steps=count * batch.num_steps,
  )  # fmt: skip


def _wholes(batch: Any, count: int) -> Any:
  """Shapes of so many shares together."""

  def whole(path, leaf):
    axis = _AXIS.get(path[0].name, 0)
    return jax.ShapeDtypeStruct([n * count if i == axis else n for i, n in enumerate(np.shape(leaf))], np.asarray(leaf).dtype)

  return jax.tree_util.tree_map_with_path(whole, batch)


# ---- rows on devices of several processes


def deal(x: Any, lie: Shared) -> Any:
  """[a place along each of lie.apart, ...] -> [micro-batches, a place along each axis of rows, ...], of numpy or jax. Of neighbours that
  share the same devices, each micro-batch takes the next as many as there are blocks on those devices."""
  sizes = dict(lie.mesh.shape)
  outer, inner = digits(lie.apart, ROWS), digits(lie.within, ROWS)
  x = x.reshape([*(sizes[a] for a in outer), lie.parts, *(sizes[a] for a in inner), *x.shape[len(lie.apart) :]])
  now, wanted = [*outer, "", *inner], ["", *digits(lie.mesh.axis_names, ROWS)]
  return x.transpose([*map(now.index, wanted), *range(len(now), x.ndim)])


@lru_cache(maxsize=4)
def _place(mesh: Mesh) -> tuple[int, int]:
  """(micro-batch, block in it) of this process's rows."""
  lie = shared(mesh)
  of = deal(lie.owners, lie).reshape(lie.parts, -1)
  return tuple(int(i) for i in np.argwhere(of == jax.process_index())[0])


def _dealt(batch: Batch, mesh: Mesh, lie: Shared) -> tuple[Batch, ...]:
  if not isinstance(batch, Batch):
    raise TypeError(f"{type(batch).__name__} on a mesh whose rows are on devices of several processes: only packed rows are dealt")
  count = blocks(mesh)
  batch = _numbered(batch, _place(mesh)[1], count)
  tokens, images = (digits(lie.within, axes) or None for axes in (("context",), ("context", "tensor")))

  def source(path, leaf):
    """A process's share over its own devices, as far as its place in the target says where: tokens by context, images by both."""
    leaf, name = np.asarray(leaf), path[0].name
    if not leaf.ndim:
      return jax.make_array_from_process_local_data(NamedSharding(lie.mesh, P()), leaf, ())
    leaf = np.moveaxis(leaf, _AXIS.get(name, 0), 0)
    split = (images,) if name == "images" else (*(None,) * (leaf.ndim - 1), tokens) if leaf.ndim > 1 else ()
    sharding = NamedSharding(lie.mesh, P(*lie.apart, *split))
    leaf = leaf.reshape([1] * len(lie.apart) + list(leaf.shape))
    return jax.make_array_from_process_local_data(sharding, leaf, (*lie.owners.shape, *leaf.shape[len(lie.apart) :]))

  shapes = _wholes(batch, count)
  leaves, structure = jax.tree.flatten(shapes)
  move = _mover(mesh, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
  return move(jax.tree_util.tree_map_with_path(source, batch))


@lru_cache(maxsize=64)
def _mover(mesh: Mesh, structure: Any, shapes: tuple) -> Any:
  """Jitted once for each kind of batch: from every process's share on its own devices to the micro-batches, split as a step wants them.

  Rows are gathered on the devices of those who share them, no further; each device then cuts its part out."""
  lie, whole = shared(mesh), jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
  near = NamedSharding(lie.mesh, P(*(name if name in digits(lie.apart, ROWS) else None for name in lie.apart)))

  def one(path, x, shape):
    if not x.ndim:
      return [x] * lie.parts
    x = deal(jax.lax.with_sharding_constraint(x, near), lie)
    axis = _AXIS.get(path[0].name, 0)
    size = [n for i, n in enumerate(shape.shape) if i != axis]
    return [jnp.moveaxis(part.reshape(shape.shape[axis], *size), 0, axis) for part in x]

  def moved(batch):
    leaves = zip(*jax.tree.leaves(jax.tree_util.tree_map_with_path(one, batch, whole), is_leaf=lambda x: isinstance(x, list)), strict=True)
    return tuple(jax.tree.unflatten(structure, part) for part in leaves)

  return jax.jit(moved, out_shardings=(batch_shardings(whole, mesh),) * lie.parts)
