"""The devices of a run as a mesh, and what is split over it how: parameters by their names, batches by their fields.

  data     copies of the learner, each with rows of its own; the axis for what is far apart (slices of a pod)
  fsdp     devices with rows of their own that share parameters and optimiser state, gathered where they are used
  context  devices that share a row's tokens (and parameters, as fsdp): for rows too long for one
  tensor   devices that share heads, MLP widths and the vocabulary; at most as many as key-value heads

Shardings are given at the boundary of every jitted step; inside, `constrain` says the same of activations. docs/sharding.md has the table.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from core.state import Batch, StepBatch

AXES = ("data", "fsdp", "context", "tensor")
ROWS = ("data", "fsdp")
SHARED = ("fsdp", "context")  # what parameters are split over besides heads, widths and words
EVERY = AXES
STACK = 2**26  # bytes of a leaf from which on its layers are gathered one by one
BIG = 2**20  # numbers in a leaf from which on it must be split: a copy on every device would not go unnoticed

_TOWER = ("fsdp", "context", "tensor")  # images are spread over all devices, so no device of a row has the tower's work to share
# (pattern searched for in a leaf's name, axes of its last dimensions); the first that fits. Optimiser states have the parameters' names
# behind their own. Weights are [out, in] as in checkpoints, with stacked layers in front.
RULES = (
  (r"visual/(.*/)?(norm\w*|ln_q)/|visual/.*/bias$", ()),
  (r"visual/patch_embed/proj/weight$", (_TOWER, None, None, None, None)),
  (r"visual/.*(down_proj|linear_fc2)/weight$", (_TOWER, None)),
  (r"visual/", (None, _TOWER)),
  (r"(q|k|v|gate|up)_proj/weight$", ("tensor", SHARED)),
  (r"(q|k|v|gate|up)_proj/bias$", ("tensor",)),
  (r"((q|k|v|gate|up)_proj|lm_head)/lora_a$", (None, SHARED)),
  (r"((q|k|v|gate|up)_proj|lm_head)/lora_b$", ("tensor", None)),
  (r"(o|down)_proj/weight$", (SHARED, "tensor")),
  (r"(o|down)_proj/bias$", ()),
  (r"(o|down)_proj/lora_a$", (None, "tensor")),
  (r"(o|down)_proj/lora_b$", (SHARED, None)),
  (r"(embed_tokens|lm_head)(/weight)?$", ("tensor", SHARED)),
  (r"norm(/weight)?$", ()),
  (r"(embed_positions|/qkv_proj)$", (None, SHARED)),  # from here on the tiny policy's, whose queries, keys and values are one map
  (r"/o_proj$", (SHARED, None)),
  (r"/up_proj$", ("tensor", SHARED)),
  (r"/down_proj$", (SHARED, "tensor")),
  (r"(^|/)weight/\d+$", (None, SHARED)),  # heads of critics
  (r"(^|/)bias/\d+$", ()),
)


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "data": 1,
      "fsdp": 0,  # 0 = the devices that the others leave
      "context": 1,
      "tensor": 1,
      "offload": False,  # optimiser states lie in the host's memory between steps
    }
  )


def arranged(shape: Sequence[int], devices: Sequence[Any], processes: int) -> np.ndarray:
  """`devices` in that shape, near ones beside each other. A process that can have whole rows has whole rows: a slice's own order could
  lay a row across two hosts. Rows of more devices than a process has lie across processes, in the slice's order (`shared`). ValueError
  where neither can be."""
  most, row = len(devices) // processes, shape[2] * shape[3]
  if processes == 1 or row > most:
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if shape[0] % slices:
      raise ValueError(f"mesh.data is {shape[0]}, wanted a multiple of the {slices} slices: rows on several hosts stay within a slice")
    if slices > 1:
      inner = (shape[0] // slices, *shape[1:])
      return mesh_utils.create_hybrid_device_mesh(inner, (slices, 1, 1, 1), devices, allow_split_physical_axes=True)
    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
  if most % row:
    raise ValueError(
      f"mesh.context x mesh.tensor = {row} devices share a row, but the {processes} processes have {most} devices each: wanted a "
      f"divisor or a multiple of {most}"
    )
  fsdp = math.gcd(shape[1], most // row)
  data = most // row // fsdp
  return mesh_utils.create_hybrid_device_mesh(
    (data, fsdp, *shape[2:]), (shape[0] // data, shape[1] // fsdp, 1, 1), devices, process_is_granule=True,
    allow_split_physical_axes=True,
  )  # fmt: skip


def make(cfg: Any, devices: Sequence[Any] | None = None) -> Mesh:
  """The mesh of `devices` (all there are), axes AXES. cfg: see defaults. ValueError of one line where the sizes do not fit them."""
  devices = list(jax.devices() if devices is None else devices)
  counts = Counter(d.process_index for d in devices)
  few, many = min(counts, key=counts.get), max(counts, key=counts.get)
  if counts[few] != counts[many]:
    raise ValueError(f"process {few} has {counts[few]} devices and process {many} has {counts[many]}: wanted as many in every process")
  mesh = Mesh(arranged(sizes(cfg, len(devices)), devices, len({d.process_index for d in devices})), AXES)
  shared(mesh)
  return mesh


class Shared(NamedTuple):
  """How processes lie in a mesh whose rows are on devices of several. mesh: the same devices in the same order, with an axis for each
  prime factor of an axis of AXES, named "context0", "context1" ...; apart: those along which the process changes, `within` the others;
  owners: the process at each place along `apart`. All processes' rows are `parts` micro-batches, each the rows of every so many."""

  mesh: Mesh
  apart: tuple[str, ...]
  within: tuple[str, ...]
  owners: np.ndarray
  parts: int


def digits(names: Sequence[str], axes: Sequence[str]) -> tuple[str, ...]:
  """Those of a finer mesh's axes that are factors of `axes`."""
  return tuple(name for name in names if name.rstrip("0123456789") in axes)


@lru_cache(maxsize=16)
def shared(mesh: Mesh) -> Shared | None:
  """None where every process has whole rows. ValueError where processes are no regular parts of the mesh, or hold no whole number of
  micro-batches."""
  owners = np.array([device.process_index for device in mesh.devices.flat]).reshape(mesh.devices.shape)
  rows = owners.reshape(blocks(mesh), -1)
  if (rows == rows[:, :1]).all():
    return None
  factors = [(f"{axis}{i}", f) for axis in AXES for i, f in enumerate(_primes(mesh.shape[axis]))]
  names, split = [name for name, _ in factors], owners.reshape([f for _, f in factors])
  apart = tuple(name for i, name in enumerate(names) if (split != split.take([0], i)).any())
  places, count = split[tuple(slice(None) if name in apart else 0 for name in names)], len(set(owners.flat))
  most, said = mesh.size // count, f"mesh.context x mesh.tensor = {rows.shape[1]} devices share a row, of several processes with"
  if places.size != count:
    raise ValueError(
      f"{said} {most} devices each, which are no regular part of the mesh {' x '.join(map(str, mesh.devices.shape))} on this machine: "
      "wanted other sizes, such as a mesh.context that is one side of the slice"
    )
  if count % len(rows):
    raise ValueError(f"{said} {most} devices each: wanted {most} or a multiple of it, so that {count} processes have equal shares of rows")
  fine = Mesh(mesh.devices.reshape(split.shape), names)
  return Shared(fine, apart, tuple(name for name in names if name not in apart), places, count // len(rows))


def _primes(n: int) -> list[int]:
  """Prime factors, the smallest first."""
  found, factor = [], 2
  while n > 1:
    while n % factor == 0:
      found, n = [*found, factor], n // factor
    factor += 1
  return found


def sizes(cfg: Any, devices: int) -> tuple[int, int, int, int]:
  """Sizes of AXES for so many devices. ValueError of one line where they do not fit."""
  given = {axis: cfg[axis] for axis in AXES}
  for axis, size in given.items():
    if size < (axis != "fsdp"):
      raise ValueError(f"mesh.{axis} is {size}, wanted 1 or more" + (" (0 = what the others leave)" if axis == "fsdp" else ""))
  others = math.prod(size for axis, size in given.items() if axis != "fsdp")
  given["fsdp"] = given["fsdp"] or max(1, devices // others)
  if math.prod(given.values()) != devices:
    said = " x ".join(f"{axis} {size}" for axis, size in given.items())
    raise ValueError(
      f"mesh is {said} = {math.prod(given.values())}, but there are {devices} devices: wanted sizes whose product is {devices}"
      + (" (mesh.fsdp=0 takes what the others leave)" if cfg["fsdp"] else f"; data x context x tensor = {others} does not divide them")
    )
  return tuple(given.values())


def check_heads(mesh: Mesh, heads: int, kv_heads: int) -> None:
  """ValueError where mesh.tensor cannot share a model's heads: every device holds whole key-value heads."""
  tensor = mesh.shape["tensor"]
  if kv_heads % tensor or heads % tensor:
    fits = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and heads % n == 0]
    raise ValueError(
      f"mesh.tensor is {tensor}, the policy has {heads} heads and {kv_heads} key-value heads: wanted one of "
      f"{', '.join(map(str, fits))} (mesh.context shares a row's tokens instead)"
    )


def blocks(mesh: Mesh) -> int:
  """Parts that a batch's rows are split into. A row's images stand in its own part of the images, and image_slot counts from there."""
  return mesh.shape["data"] * mesh.shape["fsdp"]


def multiples(mesh: Mesh) -> dict[str, int]:
  """What a host's batches must be multiples of (core.pack.shape_for). On a TPU a device's part of a shared row is a multiple of 128,
  which its attention kernel wants."""
  context, tensor = mesh.shape["context"], mesh.shape["tensor"]
  lanes = 128 if context > 1 and mesh.devices.flat[0].platform == "tpu" else 1
  hosts = len({device.process_index for device in mesh.devices.flat})
  return {"blocks": max(1, blocks(mesh) // hosts), "tokens_multiple": context * lanes, "images_multiple": context * tensor}


def describe(mesh: Mesh) -> str:
  """One line for a run's banner."""
  kind = mesh.devices.flat[0].device_kind
  said = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in AXES if mesh.shape[axis] > 1) or "one device"
  said = f"{said} ({mesh.size} of {kind}, {jax.process_count()} process{'es' if jax.process_count() > 1 else ''})"
  lie = shared(mesh)
  return said if lie is None else f"{said}, rows on devices of several processes, {lie.parts} parts of every micro-batch"


# ---- parameters, optimiser state: by name


def names(tree: Any) -> list[tuple[str, Any]]:
  """(name, leaf) of every leaf: "states/policy/params/model/norm/weight"."""
  paths = jax.tree_util.tree_flatten_with_path(tree)[0]
  return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in paths]


def spec(name: str, shape: Sequence[int], mesh: Mesh) -> P:
  """How a leaf of that name is split. Numbers without dimensions are copied; a small leaf that does not divide is copied, or split
  over fewer axes. ValueError for a name that fits no rule, and for a big leaf that cannot be split at all."""
  if not shape:
    return P()
  rule = next((axes for pattern, axes in RULES if re.search(pattern, name)), None)
  if rule is None or len(rule) > len(shape):
    raise ValueError(f"{name} of shape {list(shape)} fits no sharding rule: add one to core/mesh.py, RULES")
  wanted = (None,) * (len(shape) - len(rule)) + tuple(rule)
  out = fit(shape, wanted, mesh)
  split = any(mesh.shape[axis] > 1 for axes in wanted for axis in _tuple(axes))
  if split and math.prod(shape) >= BIG and not any(out):
    raise ValueError(f"{name} of shape {list(shape)} cannot be split: no size of {dict(mesh.shape)} divides what its rule names ({wanted})")
  return out


def fit(shape: Sequence[int], wanted: Sequence[Any], mesh: Mesh) -> P:
  """`wanted` (an axis name, names or None for each dimension) without axes of size 1 and, from the last on, those that do not divide."""
  out = []
  for size, axes in zip(shape, wanted, strict=True):
    axes = [axis for axis in _tuple(axes) if mesh.shape[axis] > 1]
    while axes and size % math.prod(mesh.shape[axis] for axis in axes):
      axes.pop()
    out.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
  return P(*out)


def _tuple(axes: Any) -> tuple[str, ...]:
  return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def shardings(tree: Any, mesh: Mesh, offload: bool = False) -> Any:
  """A NamedSharding for every leaf of parameters, optimiser states, or a tree of both (anything with shapes, by its names). offload:
  optimiser states in the host's memory."""

  def one(name, leaf):
    host = offload and leaf.shape and re.search(r"(^|/)opt_state/", name)
    return NamedSharding(mesh, spec(name, leaf.shape, mesh), memory_kind="pinned_host" if host else None)

  return jax.tree.unflatten(jax.tree.structure(tree), [one(name, leaf) for name, leaf in names(tree)])


def placed(tree: Any, mesh: Mesh, offload: bool = False) -> Any:
  """Shapes and dtypes of a tree with its shardings: what a restore reads into and a compiler is asked with."""
  give = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
  return jax.tree.map(give, tree, shardings(tree, mesh, offload))


# ---- batches: by field

_BY_FIELD = {"positions": (None, ROWS, "context"), "images": (EVERY,), "episode_valid": (ROWS,), "now": ()}


def batch_shardings(batch: Batch | StepBatch, mesh: Mesh) -> Any:
  """A NamedSharding for every array of a batch: rows over data and fsdp, their tokens over context, images over all devices; steps of a
  critic as far as their number divides."""

  def one(path, leaf):
    if isinstance(batch, StepBatch):
      return NamedSharding(mesh, fit(np.shape(leaf), (ROWS, *(None,) * (np.ndim(leaf) - 1)), mesh))
    axes = _BY_FIELD.get(path[0].name, (ROWS, "context"))
    axes = (axes + (None,) * np.ndim(leaf))[: np.ndim(leaf)]
    spec = P(*axes)
    for size, names in zip(np.shape(leaf), axes):
      if size % math.prod(mesh.shape[axis] for axis in _tuple(names)):
        raise ValueError(f"batch.{path[0].name} of shape {list(np.shape(leaf))} cannot be split as {spec} over {dict(mesh.shape)}: pad it")
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(one, batch)


def local(params: Any, mesh: Mesh) -> Any:
  """Parameters of a learner on this process's first device, where its sampler is: resharded leaf by leaf, a stack of layers in its
  layers, so that no device holds more than that beside what it had. All processes must call this in the same places."""
  if mesh.size == 1:
    return params
  home = jax.local_devices()[0]
  if jax.process_count() == 1:
    return jax.tree.map(lambda x: jax.device_put(x, home), params)
  one = lambda x: jax.device_put(x.addressable_data(0), home)
  whole, layer = _copiers(mesh)
  return jax.tree.map(
    lambda x: jnp.stack([one(layer(x, i)) for i in range(x.shape[0])]) if x.ndim > 2 and x.nbytes > STACK else one(whole(x)), params
  )


@lru_cache(maxsize=4)
def _copiers(mesh: Mesh) -> tuple[Any, Any]:
  """Jitted once: a leaf, and one layer of a leaf, on every device."""
  everywhere = NamedSharding(mesh, P())
  pick = lambda x, i: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
  return jax.jit(lambda x: x, out_shardings=everywhere), jax.jit(pick, out_shardings=everywhere)


# ---- inside a step


def use(mesh: Mesh) -> Any:
  """Inside a jitted function: where `constrain` and attention know of the mesh. Nothing where it has one device."""
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if mesh.size > 1 else contextlib.nullcontext()


def current() -> Any:
  """The mesh of the step that is being traced, or None: outside of `use`, on one device, or inside a shard_map."""
  mesh = jax.sharding.get_abstract_mesh()
  return mesh if mesh.axis_names == AXES and mesh.size > 1 and mesh.are_all_axes_auto else None


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, whole: P, split: P) -> jax.Array:
  del split
  return jax.lax.with_sharding_constraint(x, whole)


def _gather_back(whole: P, split: P, _, g: jax.Array) -> tuple[jax.Array]:
  del whole
  return (jax.lax.with_sharding_constraint(g, split),)


_gather.defvjp(lambda x, whole, split: (_gather(x, whole, split), None), _gather_back)


def gathered(params: Any, under: str) -> Any:
  """Parameters where they are used: whole but for the axis tensor, as products that split heads, widths and words want them. Their
  gradients are scattered at once: left to itself the compiler adds them up on every device and gathers where it likes, inside loops too.

  params: a tree of leaves of one layer, or of several; under: its name in the whole tree, "model/layers"."""
  mesh = current()
  if mesh is None:
    return params
  out = []
  for name, leaf in names(params):
    split = spec(f"{under}/{name}", leaf.shape, mesh)
    whole = P(*(axes if axes == "tensor" else None for axes in split))
    out.append(leaf if whole == split else _gather(leaf, whole, split))
  return jax.tree.unflatten(jax.tree.structure(params), out)


def constrain(x: jax.Array, *axes: Any) -> jax.Array:
  """x, split so: an axis name, names or None for each dimension. Axes that do not divide are left out."""
  mesh = current()
  return x if mesh is None else jax.lax.with_sharding_constraint(x, fit(x.shape, axes, mesh))
