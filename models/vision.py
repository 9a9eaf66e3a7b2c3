"""What the two vision towers share: the plan that a host makes for ragged images, patches into vectors, rotary angles of rows
and columns, attention inside windows or over a whole image, and the scan over blocks.

Every image of a batch is one row of `patches` places, so full attention never crosses images and needs no mask of its own
but for padding. Windows are gathered by index for attention only; everything else stays in merge-block order, in which
merging 2 x 2 patches is a reshape. All shapes come from a Bucket: another mix of images does not compile anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from core.mesh import EVERY, constrain, current, gathered
from models.attention import DENSE, Visible, choose, chunked, mix, platform, splash_whole
from models.config import LAYERS, MOST, object_of, only, whole
from models.decoder import Leaf, remat_body
from models.images import ImageSpec, normalise
from models.layers import attend, linear, rotate

MOST_OF = {"depth": LAYERS, "patch_size": 256, "spatial_merge_size": 64, "temporal_patch_size": 64}  # more is a slip of whoever wrote it
QUERY_BLOCK = 128  # queries of every image that attend at a time: 15 images of 1080p then hold 1.3 GB of scores, not 110


@dataclasses.dataclass(frozen=True)
class VisionConfig:
  """The static sizes of a tower. width: d; out: width of a feature; full: blocks that attend over the whole image, the others
  within windows of `window` patches a side; taps: blocks whose output feeds the first layers of the decoder; table: rows and
  columns of the learned position table, 0 = none."""

  depth: int
  width: int
  heads: int
  hidden: int
  out: int
  patch: int
  merge: int
  frames: int
  full: tuple[int, ...]
  window: int = 0
  taps: tuple[int, ...] = ()
  table: int = 0
  theta: float = 10_000.0  # no checkpoint has another

  @property
  def head_dim(self) -> int:
    return self.width // self.heads

  @property
  def group(self) -> int:
    """Patches that become one token."""
    return self.merge * self.merge


def sizes(raw: dict, path: str, *names: str) -> list[int]:
  """Whole numbers of `vision_config`."""
  return [whole(raw, f"vision_config.{name}", path, MOST_OF.get(name, MOST)) for name in names]


def tower_config(raw: dict, path: str, act: str, **more) -> VisionConfig:
  """What both towers have of `vision_config` in a checkpoint's config.json. path: named in errors; act: the activation that is built; more:
  what a family adds. ValueError of one line names the file and the field."""
  of = lambda name: sizes(raw, path, name)[0]
  rope = raw.get("rope_parameters")
  rope = object_of({} if rope is None else rope, "vision_config.rope_parameters", path)
  for fields, name, built in (
    (raw, "hidden_act", act), (raw, "in_channels", 3), (raw, "in_chans", 3), (raw, "rope_theta", VisionConfig.theta),
    (rope, "rope_parameters.rope_theta", VisionConfig.theta), (rope, "rope_parameters.partial_rotary_factor", 1.0),
  ):  # fmt: skip
    only(fields, f"vision_config.{name}", built, path)
  cfg = VisionConfig(
    depth=of("depth"), width=of("hidden_size"), heads=of("num_heads"), hidden=of("intermediate_size"), out=of("out_hidden_size"),
    patch=of("patch_size"), merge=of("spatial_merge_size"), frames=of("temporal_patch_size"), **more,
  )  # fmt: skip
  if cfg.width % (4 * cfg.heads):  # rotary pairs of rows and of columns
    raise ValueError(
      f"{path}: vision_config.num_heads is {cfg.heads} of hidden_size {cfg.width}, wanted as many as leave each a multiple of 4 numbers"
    )
  return cfg


class Bucket(NamedTuple):
  """The one shape a plan is made for. images: rows; patches: places a row; windows: windows a row."""

  images: int
  patches: int
  windows: int


class VisionPlan(NamedTuple):
  """What the device needs to know of the images' shapes; row m is image m. valid bool [M, P]: a patch, not padding; place i32
  [M, P, 2]: its row and column; windows i32 [M, W, S]: the patches of each window, -1 = empty; slot i32 [M, P]: where a patch
  stands in its image's windows; taps i32 and weights f32 [M, P, 4]: the entries of the position table it is mixed from."""

  valid: np.ndarray
  place: np.ndarray
  windows: np.ndarray
  slot: np.ndarray
  taps: np.ndarray
  weights: np.ndarray


class Run(NamedTuple):
  """How a tower is run. attention: of the blocks that see the whole image, see models/attention.py; remat: see models/decoder.py;
  grid: (h, w) in patches where every image has the same, so that windows are cut without gathers."""

  attention: Any = "auto"
  remat: str = "none"
  grid: tuple[int, int] | None = None


def bucket_for(grids: Sequence[tuple[int, int]], cfg: VisionConfig, images: int = 0) -> Bucket:
  """The smallest bucket that any `images` images (0: as many as grids) with these grids (h, w) fit into."""
  windows = max((-(-h // cfg.window) * -(-w // cfg.window) for h, w in grids), default=0) if cfg.window else 0
  return Bucket(images or len(grids), max(h * w for h, w in grids), windows)


def vision_plan(grids: Sequence[tuple[int, int]], cfg: VisionConfig, bucket: Bucket) -> VisionPlan:
  """grids: (h, w) in patches of each image. ValueError where an image or their number does not fit the bucket."""
  m, p = bucket.images, bucket.patches
  if len(grids) > m:
    raise ValueError(f"{len(grids)} images, the bucket takes {m}")
  side = cfg.window**2
  plan = VisionPlan(
    valid=np.zeros((m, p), bool), place=np.zeros((m, p, 2), np.int32), windows=np.full((m, bucket.windows, side), -1, np.int32),
    slot=np.zeros((m, p), np.int32), taps=np.zeros((m, p, 4 * bool(cfg.table)), np.int32),
    weights=np.zeros((m, p, 4 * bool(cfg.table)), np.float32),
  )  # fmt: skip
  for i, (h, w) in enumerate(grids):
    if h % cfg.merge or w % cfg.merge or h * w > p:
      raise ValueError(f"image {i} has {h} x {w} patches, wanted multiples of {cfg.merge} and at most {p} in all")
    n, row, column = h * w, *_merge_order(h, w, cfg.merge)
    plan.valid[i, :n] = True
    plan.place[i, :n] = np.stack([row, column], 1)
    if cfg.window:
      index = _windows(row, column, cfg.window)
      if len(index) > bucket.windows:
        raise ValueError(f"image {i} of {h} x {w} patches has {len(index)} windows, the bucket takes {bucket.windows}")
      plan.windows[i, : len(index)] = index
      where = np.flatnonzero(index >= 0)
      plan.slot[i, index.reshape(-1)[where]] = where
    if cfg.table:
      plan.taps[i, :n], plan.weights[i, :n] = _mix(row, h, column, w, cfg.table)
  return plan


def pad_patches(images: Sequence[np.ndarray], bucket: Bucket) -> np.ndarray:
  """u8 [n, C] of each image -> u8 [M, P, C]."""
  out = np.zeros((bucket.images, bucket.patches, images[0].shape[1]), np.uint8)
  for i, patches in enumerate(images):
    out[i, : len(patches)] = patches
  return out


def _merge_order(h: int, w: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
  """Row and column of every patch, blocks of merge x merge patches together."""
  order = lambda a: a.reshape(h // merge, merge, w // merge, merge).swapaxes(1, 2).reshape(-1)
  row, column = np.indices((h, w))
  return order(row), order(column)


def _windows(row: np.ndarray, column: np.ndarray, window: int) -> np.ndarray:
  """i32 [W, window * window]: indices of the patches in each window of an image, -1 after the last."""
  across = -(-int(column.max() + 1) // window)
  number = row // window * across + column // window
  out = np.full((int(number.max()) + 1, window * window), -1, np.int32)
  order = np.argsort(number, kind="stable")
  counts = np.bincount(number)
  nth = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
  out[number[order], nth] = order
  return out


def _mix(row: np.ndarray, h: int, column: np.ndarray, w: int, table: int) -> tuple[np.ndarray, np.ndarray]:
  """Bilinear taps [n, 4] into a table of table x table entries and their weights: first and last patch on the table's edges."""

  def axis(index, size):
    at = index.astype(np.float32) * np.float32(table - 1) / np.float32(max(size - 1, 1))
    low = np.floor(at)
    part = at - low
    return np.stack([low, np.minimum(low + 1, table - 1)], 1).astype(np.int32), np.stack([1 - part, part], 1)

  (rows, row_weight), (columns, column_weight) = axis(row, h), axis(column, w)
  taps = rows[:, :, None] * table + columns[:, None, :]
  return taps.reshape(-1, 4), (row_weight[:, :, None] * column_weight[:, None, :]).reshape(-1, 4)


# -- parameters


def dense(rows: int, row_axis: str | None, cols: int, col_axis: str | None, stack: tuple[int, ...] = ()) -> dict:
  """Leaves of one linear map with bias; stack: () or (number,) of equal ones stacked in front."""
  front = ("layers",) * len(stack)
  return {"weight": Leaf((*stack, rows, cols), (*front, row_axis, col_axis), 0.02), "bias": Leaf((*stack, rows), (*front, row_axis), 0.0)}


def scales(size: int, stack: tuple[int, ...] = (), bias: bool = False) -> dict:
  """Leaves of one normalisation."""
  axes = (*("layers",) * len(stack), None)
  return {"weight": Leaf((*stack, size), axes, None)} | ({"bias": Leaf((*stack, size), axes, 0.0)} if bias else {})


def kernel(cfg: VisionConfig) -> Leaf:
  """The patch embedding's kernel, as the checkpoint has it: one for each of two frames."""
  return Leaf((cfg.width, 3, cfg.frames, cfg.patch, cfg.patch), ("embed", None, None, None, None), 0.02)


def attention_leaves(cfg: VisionConfig) -> dict:
  """Queries, keys and values are one map of 3 d rows: it is not split over heads."""
  d, stack = cfg.width, (cfg.depth,)
  return {"qkv": dense(3 * d, None, d, "embed", stack), "proj": dense(d, "embed", d, None, stack)}


# -- on the device


def layer_norm(x: jax.Array, p: dict, eps: float = 1e-6) -> jax.Array:
  """Normalisation by mean and variance in float32, cast back to x's dtype."""
  y = x.astype(jnp.float32)
  y = y - jnp.mean(y, axis=-1, keepdims=True)
  y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
  return (y * p["weight"] + p["bias"]).astype(x.dtype)


def embed_patches(p: dict, patches: jax.Array, spec: ImageSpec) -> jax.Array:
  """u8 [M, P, 3 * patch * patch] -> [M, P, d]. An image is two equal frames: the kernel's frames are summed instead."""
  both = jnp.sum(p["weight"], axis=2, dtype=jnp.float32)
  weight = both.reshape(both.shape[0], -1).astype(p["weight"].dtype)
  return constrain(linear(p | {"weight": weight}, normalise(patches, spec).astype(weight.dtype)), EVERY, None, None)


def table_positions(p: dict, plan: VisionPlan) -> jax.Array:
  """[M, P, d] f32: the learned position table mixed to each image's own grid."""
  table = p["weight"].astype(jnp.float32)
  return sum(table[plan.taps[..., i]] * plan.weights[..., i, None] for i in range(4))


def rope_tables(place: jax.Array, cfg: VisionConfig) -> tuple[jax.Array, jax.Array]:
  """(cos, sin), each f32 [M, P, head_dim / 2]: half the frequencies turn with the row, the same ones again with the column."""
  half = cfg.head_dim // 4
  frequency = cfg.theta ** -(np.arange(half, dtype=np.float64) / half)
  angle = (place.astype(jnp.float32)[..., None] * frequency.astype(np.float32)).reshape(*place.shape[:-1], 2 * half)
  return jnp.cos(angle), jnp.sin(angle)


def attend_whole(q: jax.Array, k: jax.Array, v: jax.Array, plan: VisionPlan, attention: Any = "auto") -> jax.Array:
  """Every patch sees all patches of its image. q, k, v [M, P, H, d] -> [M, P, H, d]."""
  order, segment = jnp.zeros(plan.valid.shape, jnp.int32), plan.valid.astype(jnp.int32)
  visible = Visible(order, order, segment, segment)
  if attention == "auto" and platform() == "tpu" and q.shape[1] ** 2 > DENSE:
    return splash_whole(q, k, v, plan.valid)
  if attention == "auto" and choose(attention, visible, q.dtype) == "chunked":
    attention = partial(chunked, query_block=QUERY_BLOCK)
  return mix(q, k, v, visible, attention)


def attend_windows(q: jax.Array, k: jax.Array, v: jax.Array, plan: VisionPlan) -> jax.Array:
  """Every patch sees the patches of its window. Gathered to [M * W, S], attended densely, and gathered back."""
  m, p = q.shape[:2]
  w, s = plan.windows.shape[1:]
  pick = jax.vmap(lambda a, index: a[index])
  gather = lambda a: pick(a, jnp.maximum(plan.windows, 0)).reshape(m * w, s, *a.shape[2:])
  seen = jnp.broadcast_to((plan.windows >= 0).reshape(m * w, 1, s), (m * w, s, s))
  mixed = attend(gather(q), gather(k), gather(v), seen)
  return pick(mixed.reshape(m, w * s, *q.shape[2:]), plan.slot)


def cut_windows(q: jax.Array, k: jax.Array, v: jax.Array, grid: tuple[int, int], cfg: VisionConfig) -> jax.Array:
  """attend_windows of images that all have this grid, by padding and transposing: gathers, and the scatters of their gradients, cost
  more than the attention itself on accelerators. q, k, v [M, h * w, H, d] -> [M, h * w, H, d]."""
  side, rows, columns = cfg.window // cfg.merge, grid[0] // cfg.merge, grid[1] // cfg.merge  # in tokens, as patches stand
  down, across = -(-rows // side), -(-columns // side)

  def cut(a, np=jnp):
    a = a.reshape(a.shape[0], rows, columns, cfg.group, *a.shape[2:])
    edges = ((0, 0), (0, down * side - rows), (0, across * side - columns), *((0, 0),) * (a.ndim - 3))
    a = np.pad(a, edges).reshape(a.shape[0], down, side, across, side, cfg.group, *a.shape[4:])
    return np.swapaxes(a, 2, 3).reshape(a.shape[0] * down * across, side * side * cfg.group, *a.shape[6:])

  there = np.tile(cut(np.ones((1, grid[0] * grid[1]), bool), np), (q.shape[0], 1))
  seen = jnp.broadcast_to(there[:, None], (*there.shape, there.shape[1]))
  mixed = attend(cut(q), cut(k), cut(v), seen).reshape(q.shape[0], down, across, side, side, cfg.group, *q.shape[2:])
  whole = jnp.swapaxes(mixed, 2, 3).reshape(q.shape[0], down * side, across * side, cfg.group, *q.shape[2:])
  return whole[:, :rows, :columns].reshape(q.shape)


def each_image(attend: Callable, plan: VisionPlan, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """attend(q, k, v, plan), on a mesh every device for its own images: blocks, windows and kernels are nothing that a compiler should
  have to split."""
  mesh = current()
  if mesh is None or q.shape[0] % mesh.size:
    return attend(q, k, v, plan)
  return jax.shard_map(attend, in_specs=P(EVERY), out_specs=P(EVERY), check_vma=False)(q, k, v, plan)


def run_blocks(blocks: dict, x: jax.Array, plan: VisionPlan, cfg: VisionConfig, block: Callable, layers: range, run: Run) -> jax.Array:
  """x [M, P, d] through blocks `layers` of the stacked parameters, by one scan.

  block(p, x, blend) -> x, with blend(qkv [M, P, 3 d]) -> [M, P, d] the attention between patches.
  """
  turn = rope_tables(plan.place, cfg)
  heads = lambda a: a.reshape(*a.shape[:2], cfg.heads, cfg.head_dim)
  windows = (lambda q, k, v, plan: cut_windows(q, k, v, run.grid, cfg)) if run.grid else attend_windows
  kinds = [partial(each_image, f, plan) for f in (windows, partial(attend_whole, attention=run.attention))]
  whole = [i in cfg.full for i in layers]
  if len(set(whole)) > 1 and run.remat != "none":  # a conditional keeps what either branch would need, whichever is taken
    kinds = [jax.checkpoint(f) for f in kinds]

  def blend(is_whole, qkv):
    q, k, v = map(heads, jnp.split(qkv, 3, axis=-1))
    q, k = rotate(q, *turn), rotate(k, *turn)
    out = kinds[whole[0]](q, k, v) if len(set(whole)) == 1 else jax.lax.cond(is_whole, kinds[1], kinds[0], q, k, v)
    return checkpoint_name(out.reshape(x.shape), "mixed")

  def body(x, layer):
    p, is_whole = gathered(layer[0], "visual/blocks"), layer[1]
    x = checkpoint_name(x, "layer_input")
    return constrain(block(p, x, partial(blend, is_whole)), EVERY, None, None), None

  part = jax.tree.map(lambda a: a[layers.start : layers.stop], blocks)
  return jax.lax.scan(remat_body(body, run.remat), x, (part, jnp.array(whole)))[0]


def merge_patches(x: jax.Array, cfg: VisionConfig) -> jax.Array:
  """[M, P, d] -> [M, P / 4, 4 d]: neighbours in merge-block order become one token."""
  return x.reshape(x.shape[0], -1, cfg.group * cfg.width)


def features(embeds: jax.Array, deepstack: Sequence[jax.Array] = ()) -> dict[str, jax.Array]:
  """{"embeds": [M * P / 4, D], "deepstack": [K, M * P / 4, D]}: row m * P / 4 + i is token i of image m."""
  flat = lambda a: a.reshape(-1, a.shape[-1])
  embeds = flat(embeds)
  return {
    "embeds": embeds,
    "deepstack": jnp.stack([flat(d) for d in deepstack]) if deepstack else jnp.zeros((0, *embeds.shape), embeds.dtype),
  }
