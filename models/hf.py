"""Hugging Face checkpoints: safetensors into stacked, sharded arrays a slice at a time, and back into a folder transformers opens.

Export follows the source folder file by file: the same shards, headers, index and prefixes, every other file copied as it is, only the
numbers are new. A checkpoint that was loaded and exported unchanged is the same, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open

from models.config import json_of, object_of, told
from models.decoder import Leaf, is_leaf

INDEX = "model.safetensors.index.json"
STACKS = ("layers", "blocks", "deepstack_merger_list")  # the keys after which a checkpoint's names carry an index
PREFIXES = (("model.language_model.", "model."), ("language_model.model.", "model."), ("model.visual.", "visual."))
EMBEDDING = ("model", "embed_tokens", "weight")
ROWS = 4096  # of a table, read at a time
LAYER = re.compile("0|[1-9][0-9]{0,8}")  # as checkpoints number them: 00 would be a second name of 0
COMPUTED = re.compile(r"\.rotary_emb\.inv_freq\Z")  # older saves hold these; they follow from the config
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5"}  # what an export must not copy: it would be stale
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Stored(NamedTuple):
  """One tensor of a file: its shape, and its dtype as safetensors spells it."""

  file: pathlib.Path
  name: str
  shape: tuple[int, ...]
  dtype: str


class Place(NamedTuple):
  """Where a stored tensor belongs: the path of a leaf, and the layer where the leaf is stacked (None otherwise)."""

  path: tuple[str, ...]
  layer: int | None


def stored(folder: str | os.PathLike) -> dict[str, Stored]:
  """Every tensor of a checkpoint folder by name, from the files' headers alone."""
  folder = pathlib.Path(folder)
  index = folder / INDEX
  names = _indexed(index) if os.path.lexists(index) else None
  files = sorted(folder.glob("*.safetensors") if names is None else {folder / f for f in names.values()})
  if not files:
    raise ValueError(f"{folder} holds no *.safetensors file; convert the checkpoint to safetensors first")
  found: dict[str, Stored] = {}
  for file in files:
    with _open(file) as f:
      for name in f.keys():  # noqa: SIM118 - not a dict
        if name in found:
          raise ValueError(f"{file}: tensor {name} stands in {found[name].file.name} too")
        if names is not None and name not in names:
          raise ValueError(f"{file}: tensor {name} is in no entry of {index}'s weight_map: take the index and its shards from one save")
        part = f.get_slice(name)
        found[name] = Stored(file, name, tuple(part.get_shape()), part.get_dtype())
  for name, file in (names or {}).items():
    if name not in found or found[name].file.name != file:
      raise ValueError(f"{index} says that {file} holds tensor {name}, and it does not")
  return found


def fingerprint(folder: str | os.PathLike) -> str:
  """Tells checkpoints of one shape apart: the first bytes of every tensor, hashed by name, however they are sharded."""
  marks = {}
  for file in {one.file for one in stored(folder).values()}:
    with open(file, "rb") as f:
      head = _head(f)
      for name, begin, end in _order(head):
        f.seek(len(head) + begin)
        marks[name] = hashlib.sha256(f.read(min(end - begin, 1024))).hexdigest()
  return hashlib.sha256(json.dumps(marks, sort_keys=True).encode()).hexdigest()[:16]


def _indexed(index: pathlib.Path) -> dict[str, str]:
  """Which file of the folder holds which tensor."""
  names = object_of(object_of(json_of(index), "all that it holds", str(index)).get("weight_map"), "weight_map", str(index))
  if not names:
    raise ValueError(f"{index}: weight_map is empty, wanted every tensor with its file: take it from its source again, or delete it")
  for name, file in names.items():
    if not isinstance(file, str) or pathlib.Path(file).name != file or not file.endswith(".safetensors"):
      raise ValueError(f"{index}: weight_map has {told(file)} for tensor {name}, wanted the name of a *.safetensors file beside it")
  return names


def _open(file: pathlib.Path):
  if file.exists() and not file.is_file():  # a pipe would be waited for
    raise ValueError(f"{file} is no file: wanted a shard of the checkpoint, or nothing of that name")
  try:
    return safe_open(file, "np")
  except FileNotFoundError as e:
    why = "it is a link to what is not there" if file.is_symlink() else "the checkpoint's index names it"
    raise ValueError(f"{file} is missing, and {why}; download the folder again") from e
  except (SafetensorError, OSError) as e:
    raise ValueError(f"{file} is truncated or not a safetensors file ({' '.join(str(e).split())}); download it again") from e


def by_path(tree: dict) -> dict[tuple[str, ...], Any]:
  """Leaves by path."""
  found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
  return {tuple(str(k.key) for k in path): x for path, x in found}


def place(name: str, paths) -> Place | None:
  """Where the tensor of that name belongs among the paths of a tree, or None: either prefix style, newer or older."""
  for old, new in PREFIXES:
    if name.startswith(old):
      name = new + name.removeprefix(old)
      break
  path = tuple(name.split("."))
  if path in paths:
    return Place(path, None)
  for i, (key, number) in enumerate(zip(path, path[1:])):
    if key in STACKS and LAYER.fullmatch(number):
      path = path[: i + 1] + path[i + 2 :]
      return Place(path, int(number)) if path in paths else None
  return None


def locate(folder: str | os.PathLike, tree: dict[str, Any]) -> dict[tuple[str, ...], list[Stored]]:
  """The stored tensors of every leaf, in layer order; all names, shapes and dtypes are compared before anything is read.

  tree: nested dict of decoder.Leaf. ValueError of one line names the file and the tensor that is missing, left over or of another shape.
  """
  wanted = by_path(tree)
  found: dict[tuple[str, ...], dict[int | None, Stored]] = {path: {} for path in wanted}
  tied, known = "lm_head" not in tree, stored(folder)
  for one in known.values():
    if COMPUTED.search(one.name) or (tied and one.name == "lm_head.weight"):
      continue
    where = place(one.name, wanted)
    if where is None or (where.layer is not None and where.layer >= wanted[where.path].shape[0]):
      raise ValueError(f"{one.file}: tensor {one.name} has no place in the model that config.json describes")
    leaf = wanted[where.path]
    shape = leaf.shape if where.layer is None else leaf.shape[1:]
    if one.shape != shape or one.dtype not in DTYPES:
      raise ValueError(f"{one.file}: tensor {one.name} is {one.dtype} {list(one.shape)}, wanted a float of {list(shape)}")
    if twin := found[where.path].get(where.layer):
      raise ValueError(f"{one.file}: tensor {one.name} is the same part as {twin.name} of {twin.file.name}: wanted one of them")
    found[where.path][where.layer] = one
  for path, leaf in wanted.items():
    layers = range(leaf.shape[0]) if leaf.stacked else (None,)
    for layer in layers:
      if layer not in found[path]:
        lacking, files = pathlib.Path(folder) / INDEX, {one.file for one in known.values()}
        lacking = lacking if lacking.is_file() else files.pop() if len(files) == 1 else f"{folder}/*.safetensors"
        raise ValueError(f"{lacking} lacks tensor {spell(path, layer)}, which the model that config.json describes has")
  return {path: [parts[k] for k in sorted(parts, key=lambda k: k or 0)] for path, parts in found.items()}


def spell(path: tuple[str, ...], layer: int | None) -> str:
  """The name of a leaf's tensor in a checkpoint; layer: which of a stacked leaf's."""
  at = next((i + 1 for i, key in enumerate(path) if key in STACKS), 0) if layer is not None else 0
  return ".".join((*path[:at], str(layer), *path[at:]) if at else path)


def load(folder: str | os.PathLike, tree: dict, *, dtype=None, shardings: dict | None = None, branch: str = "") -> dict:
  """The parameters of a checkpoint folder as nested dicts of jax arrays.

  tree: nested dict of decoder.Leaf (decoder.leaves(cfg)). dtype: what to convert to, None keeps the file's. shardings: a tree like it
  (core.mesh.shardings), None puts all on the first device. branch: the only one of the tree's to read, "" = all. Each process reads what
  its devices hold, once, a tensor's slice at a time.
  """
  located, spread = locate(folder, tree), by_path(shardings) if shardings is not None else {}
  whole = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  opened = {file: _open(file) for file in {p.file for parts in located.values() for p in parts}}
  read = lambda part, index: np.asarray(opened[part.file].get_slice(part.name)[index])
  out: dict = {}
  for path, leaf in by_path(tree).items():
    if branch and path[0] != branch:
      continue
    parts = located[path]
    kinds = {p.dtype for p in parts}
    if dtype is None and len(kinds) > 1:
      raise ValueError(f"{parts[0].file}: the layers of {'.'.join(path)} have dtypes {sorted(kinds)}; give load a dtype to convert them to")
    kind = jnp.dtype(DTYPES[parts[0].dtype] if dtype is None else dtype)
    node = out
    for key in path[:-1]:
      node = node.setdefault(key, {})
    node[path[-1]] = _assemble(parts, leaf, kind, spread.get(path, whole), read)
  if "lm_head" not in tree and not branch:
    _really_tied(folder, located[EMBEDDING][0])
  return out


def _really_tied(folder: str | os.PathLike, table: Stored) -> None:
  """A file may hold the head that its config ties to the embedding: then they are the same, or one of both files lies."""
  head = stored(folder).get("lm_head.weight")
  if head is None:
    return
  with _open(head.file) as a, _open(table.file) as b:
    pair = [f.get_slice(one.name) for f, one in ((a, head), (b, table))]
    parts = (slice(i, min(i + ROWS, table.shape[0])) for i in range(0, table.shape[0], ROWS))
    alike = head.shape == table.shape and all(np.array_equal(*(one[part] for one in pair)) for part in parts)
  if not alike:
    raise ValueError(
      f"{head.file}: tensor lm_head.weight differs from {table.name}, and config.json's tie_word_embeddings says that they are one: "
      "set it to false if the head is its own"
    )


def _assemble(parts: list[Stored], leaf: Leaf, dtype, sharding, read: Callable) -> jax.Array:
  """One array from its tensors. Every distinct shard is read once, put on its first device layer by layer and copied from there."""
  made: dict[tuple, jax.Array] = {}
  shards = []
  for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
    bounds = tuple(s.indices(n)[:2] for s, n in zip(index, leaf.shape))
    if bounds not in made:
      made[bounds] = _shard(parts, bounds, leaf.stacked, dtype, device, read)
    shards.append(jax.device_put(made[bounds], device))
  return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def _shard(parts: list[Stored], bounds: tuple, stacked: bool, dtype, device, read: Callable) -> jax.Array:
  """The part of a leaf within bounds (begin, end) of every dimension, on a device; the host holds one tensor's slice at a time."""

  def piece(part: Stored, inner: tuple) -> jax.Array:
    with np.errstate(over="ignore"):  # it is said below, with the tensor's name
      out = jax.device_put(read(part, tuple(slice(*b) for b in inner)).astype(dtype, copy=False), device)
    if not _finite(out):
      raise ValueError(f"{part.file}: tensor {part.name} holds NaN or infinity as {np.dtype(dtype)}: take it from its source again")
    return out

  if not stacked:
    return piece(parts[0], bounds)
  (first, last), inner = bounds[0], bounds[1:]
  out = jnp.zeros((last - first, *(b - a for a, b in inner)), dtype, device=device)
  for i in range(first, last):
    out = _put(out, piece(parts[i], inner), i - first)
  return out


_finite = jax.jit(lambda a: jnp.isfinite(a).all())
_put = jax.jit(lambda stack, layer, i: jax.lax.dynamic_update_index_in_dim(stack, layer, i, 0), donate_argnums=0)


# ---- and back


def export(params: dict, source: str | os.PathLike, out: str | os.PathLike) -> None:
  """Writes `params` as a checkpoint folder like `source`: its files, names and dtypes, these numbers. out must not exist.

  Float32 parameters of a bfloat16 checkpoint are rounded to bfloat16. Adapters must be merged first (models/lora.py). Every process
  of a distributed run calls this; the first one writes.
  """
  paths, known = by_path(params), stored(source)
  places = {name: _source(one, paths) for name, one in known.items() if not COMPUTED.search(name)}
  left = paths.keys() - {p.path for p in places.values()}
  if left:
    raise ValueError(f"{source} has no tensor for parameter {'.'.join(min(left))}; merge adapters before the export")

  def tensor(one: Stored) -> np.ndarray | None:
    if one.name not in places:
      return None  # as it stands in the source
    path, layer = places[one.name]
    return _on_host(paths[path] if layer is None else paths[path][layer])

  _write(source, known, out, tensor)


def _source(one: Stored, paths: dict) -> Place:
  """Which parameter a stored tensor is written from."""
  shared = one.name == "lm_head.weight" and ("lm_head", "weight") not in paths  # tied, and yet the source holds both
  where = place("model.embed_tokens.weight" if shared else one.name, paths)
  if where is None:
    raise ValueError(f"{one.file}: tensor {one.name} is not among the parameters to export")
  shape = paths[where.path].shape[0 if where.layer is None else 1 :]
  if tuple(shape) != one.shape:
    raise ValueError(f"{one.file}: tensor {one.name} is {list(one.shape)} in the source, the parameters have {list(shape)}")
  return where


def merge(folders: list[str], weights: list[float], out: str | os.PathLike) -> None:
  """The weighted sum of several checkpoints of one shape, tensor by tensor in float32: how UI-TARS-2 joins its specialists.

  Files, names and dtypes are those of the first. weights must add up to 1.
  """
  if len(folders) != len(weights) or len(folders) < 2 or not abs(sum(weights) - 1) <= 1e-6:  # not <=: NaN is refused too
    raise ValueError(f"{len(folders)} checkpoints with weights {weights}: wanted two or more, a weight each, adding up to 1")
  known = [stored(f) for f in folders]
  for folder, other in zip(folders[1:], known[1:]):
    strange = sorted(known[0].keys() ^ other.keys()) or [n for n in other if other[n].shape != known[0][n].shape]
    if strange:
      raise ValueError(f"{folder} and {folders[0]} differ in tensor {strange[0]}: only checkpoints of one shape can be merged")
  if odd := next((one for all_of in known for one in all_of.values() if one.dtype not in DTYPES), None):
    raise ValueError(f"{odd.file}: tensor {odd.name} is {odd.dtype}: only floats can be merged, {', '.join(DTYPES)}")

  def tensor(one: Stored) -> np.ndarray | None:
    if COMPUTED.search(one.name):
      return None
    return sum(np.float32(w) * _read(k[one.name]).astype(np.float32) for k, w in zip(known, weights))

  _write(folders[0], known[0], out, tensor)


def _read(one: Stored) -> np.ndarray:
  with _open(one.file) as f:
    return np.asarray(f.get_tensor(one.name))


def _on_host(x) -> np.ndarray:
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
  return np.asarray(x)


def unwritten(out: str | os.PathLike, *sources: str | os.PathLike) -> None:
  """ValueError where there is something at `out` already, be it a link to nothing, or where it would stand inside one of the sources."""
  if os.path.lexists(os.path.abspath(out)):
    raise ValueError(f"{out} exists already; remove it or give the export another name")
  for source in sources:
    if pathlib.Path(out).resolve().is_relative_to(pathlib.Path(source).resolve()):
      raise ValueError(f"{out} is inside {source}, which is copied to it: give the export a place of its own")


def _write(source, known: dict[str, Stored], out, tensor: Callable) -> None:
  """The folder, whole or not at all: files of weights with new numbers, all other files copied."""
  source, out = pathlib.Path(source), pathlib.Path(out)
  first = jax.process_index() == 0
  unwritten(out, source)
  temp = out.with_name(f".{out.name}.part")
  if first:
    shutil.rmtree(temp, ignore_errors=True)
    shutil.copytree(source, temp, ignore=lambda _, names: [n for n in names if pathlib.Path(n).suffix in WEIGHTS])
  for file in sorted({one.file for one in known.values()}):
    _write_file(file, temp / file.name if first else None, known, tensor)
  if first:
    os.replace(temp, out)


def _write_file(file: pathlib.Path, target: pathlib.Path | None, known: dict[str, Stored], tensor: Callable) -> None:
  """One safetensors file with `file`'s own header (names, shapes and dtypes are the same), its tensors written in their order."""
  with open(file, "rb") as old:
    head = _head(old)
    new = open(target, "wb") if target else None  # noqa: SIM115 - one process writes, all take part in gathering
    try:
      if new:
        new.write(head)
      for name, begin, end in _order(head):
        value = tensor(known[name])
        if new and value is None:
          old.seek(len(head) + begin)
          new.write(old.read(end - begin))
        elif new:
          new.write(value.astype(jnp.dtype(DTYPES[known[name].dtype]), copy=False).tobytes())
      if new:
        new.flush()
        os.fsync(new.fileno())
    finally:
      if new:
        new.close()


def _head(file) -> bytes:
  """A safetensors file's header, with its length in front: what stands before the first tensor."""
  length = file.read(8)
  return length + file.read(struct.unpack("<Q", length)[0])


def _order(head: bytes) -> Iterator[tuple[str, int, int]]:
  entries = [(n, *e["data_offsets"]) for n, e in json.loads(head[8:]).items() if n != "__metadata__"]
  yield from sorted(entries, key=lambda e: e[1:])
