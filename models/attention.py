"""Causal attention within segments, by several backends of one signature, each equal to `naive` in its numbers.

  naive     the oracle: every score at once, memory T x S
  chunked   blocks of queries and keys with a running softmax, memory linear in T and S, on any device; of packed rows only what is seen
  splash    the TPU kernel of jax.experimental.pallas for packed rows (a query a key), T a multiple of 128; asked for by name, a sampler's
            cache and a tower's images, which are not packed rows, take what "auto" would
  cudnn     jax.nn.dot_product_attention's fused kernel on NVIDIA GPUs, 16-bit floats, with a mask of T x S bytes a row
A callable of the same signature is taken as well. On a mesh (core/mesh.py) every device has its rows, its heads and its share of a row's
queries, and sees all keys of its rows, which are gathered over the axis context: with few key-value heads they are small. Queries are
dealt out so that each device has early and late ones, which see few and many keys.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from core.mesh import ROWS, constrain, current
from models.layers import attend

DENSE = 2**22  # scores a row and head, up to which all at once is the fastest
DENSE_CPU = 2**16  # where a softmax's passes over the scores should stay in its cache


class Visible(NamedTuple):
  """Who sees whom, all i32: query t sees key s where their segments are one, not 0 (padding), and key_order s <= query_order t.

  query_order and query_segment [B, T], key_order and key_segment [B, S]. packed: static, orders are 0 .. T-1 on both sides."""

  query_order: jax.Array
  key_order: jax.Array
  query_segment: jax.Array
  key_segment: jax.Array
  packed: bool = False

  def mask(self) -> jax.Array:
    """bool [B, T, S]."""
    q, k = self.query_segment[:, :, None], self.key_segment[:, None, :]
    return (q == k) & (k > 0) & (self.key_order[:, None, :] <= self.query_order[:, :, None])


def packed(segment_ids: jax.Array) -> Visible:
  """What a token of packed rows sees: itself and earlier tokens of its own segment. segment_ids i32 [B, T], 0 = padding."""
  order = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
  return Visible(order, order, segment_ids, segment_ids, True)


def naive(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible) -> jax.Array:
  """q [B, T, H, d], k and v [B, S, K, d] -> [B, T, H, d]. A query that sees nothing gets numbers that nothing reads."""
  return attend(q, k, v, visible.mask())


def _pad(a: jax.Array, block: int) -> jax.Array:
  return jnp.pad(a, ((0, 0), (0, -a.shape[1] % block), *((0, 0),) * (a.ndim - 2)))


def _blocks(a: jax.Array, block: int) -> jax.Array:
  """[B, N, ...] -> [N / block, B, block, ...], the last block padded with zeros (segment 0: seen by nobody)."""
  a = _pad(a, block)
  return jnp.moveaxis(a.reshape(a.shape[0], -1, block, *a.shape[2:]), 1, 0)


def _even(length: int, most: int) -> int:
  """The size of equal blocks of at most `most`, a multiple of 16, that cover `length` with the least padding."""
  return min(most, -(-length // -(-length // most) // 16) * 16)


def chunked(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible, *, query_block: int = 0, key_block: int = 256) -> jax.Array:
  """The same with a running softmax over blocks of keys, forward and backward (FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2).
  A block of queries goes from the first to the last block of keys of which it may see some; packed rows one after another, since each
  has segments of its own. Sizes are upper limits; query_block 0: 256 of packed rows, where small ones leave out more, else 512."""
  batch, length, heads, d = q.shape
  if visible.packed and batch > 1:
    one = lambda row: chunked(*(a[None] for a in row[:3]), Visible(*(a[None] for a in row[3:]), True), query_block=query_block,
                              key_block=key_block)[0]  # fmt: skip
    return jax.lax.map(one, (q, k, v, *visible[:4]))
  query_block, key_block = _even(length, query_block or (256 if visible.packed else 512)), _even(k.shape[1], key_block)
  kv_heads = k.shape[2]
  queries = _blocks(q, query_block).reshape(-1, batch, query_block, kv_heads, heads // kv_heads, d)
  queries = jnp.moveaxis(queries, 2, 4).reshape(-1, batch, kv_heads, heads // kv_heads * query_block, d)
  keys, values = (jnp.swapaxes(_blocks(a, key_block), 2, 3) for a in (k, v))
  seen = [_blocks(a, size) for a, size in zip(visible[:4], (query_block, key_block) * 2)]
  out = _by_blocks(queries, keys, values, Visible(*seen)).reshape(-1, batch, kv_heads, heads // kv_heads, query_block, d)
  return jnp.moveaxis(out, (0, 4), (1, 2)).reshape(batch, -1, heads, d)[:, :length]


def _reach(seen: Visible) -> jax.Array:
  """i32 [2, blocks of queries]: from which block of keys on each may see some, and up to which (both from the least and largest orders and
  segments in them: nothing visible is left out)."""
  least = lambda segment: jnp.where(segment > 0, segment, 2**30).min(-1)
  q, k = seen.query_segment, seen.key_segment
  may = (seen.key_order.min(-1)[None] <= seen.query_order.max(-1)[:, None]) & (least(k)[None] <= q.max(-1)[:, None])
  may = (may & (k.max(-1)[None] >= least(q)[:, None])).any(-1)
  number = jnp.arange(may.shape[1])
  return jnp.stack([jnp.where(may, number, may.shape[1]).min(1), jnp.where(may, number + 1, 0).max(1)]).astype(jnp.int32)


def _scores(q: jax.Array, k: jax.Array, seen: Visible, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Of query block i and key block j: f32 [B, K, group * queries, keys], and who sees whom of the same shape."""
  of = lambda a, at: jax.lax.dynamic_index_in_dim(a, at, keepdims=False)
  block = Visible(of(seen.query_order, i), of(seen.key_order, j), of(seen.query_segment, i), of(seen.key_segment, j))
  scores = jnp.einsum("bkqd,bksd->bkqs", q, of(k, j), preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
  mask = jnp.tile(block.mask(), (1, q.shape[2] // block.query_order.shape[1], 1))[:, None]
  return scores, mask


@jax.custom_vjp
def _by_blocks(q: jax.Array, k: jax.Array, v: jax.Array, seen: Visible) -> jax.Array:
  """q [N, B, K, group * queries, d], k and v [M, B, K, keys, d], seen [N or M, B, queries or keys] -> as q."""
  return _by_blocks_kept(q, k, v, seen)[0]


def _by_blocks_kept(q, k, v, seen):
  reach = _reach(seen)

  def one(i):
    def add(j, carry):
      top, total, acc = carry
      scores, mask = _scores(q[i], k, seen, i, j)
      scores = jnp.where(mask, scores, -1e30)
      new = jnp.maximum(top, scores.max(-1))
      weights, fade = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
      mixed = jnp.einsum("bkqs,bksd->bkqd", weights.astype(v.dtype), v[j], preferred_element_type=jnp.float32)
      return new, total * fade + weights.sum(-1), acc * fade[..., None] + mixed

    shape = q.shape[1:4]
    start = (jnp.full(shape, -1e30, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, q.shape[4]), jnp.float32))
    top, total, acc = jax.lax.fori_loop(reach[0, i], reach[1, i], add, start)
    total = jnp.maximum(total, 1e-30)
    return (acc / total[..., None]).astype(q.dtype), top + jnp.log(total)

  out, spread = (checkpoint_name(a, "attended") for a in jax.lax.map(one, jnp.arange(q.shape[0])))
  return out, (q, k, v, seen, out, spread)


def _by_blocks_back(kept, g):
  q, k, v, seen, out, spread = kept
  reach, delta = _reach(seen), jnp.sum(g.astype(jnp.float32) * out, -1)
  product = lambda how, a, b: jnp.einsum(how, a.astype(k.dtype), b, preferred_element_type=jnp.float32)

  def one(sums, i):
    def add(j, carry):
      to_q, to_k, to_v = carry
      scores, mask = _scores(q[i], k, seen, i, j)
      weights = jnp.where(mask, jnp.exp(scores - spread[i][..., None]), 0)
      to_scores = weights * (product("bkqd,bksd->bkqs", g[i], v[j]) - delta[i][..., None]) * q.shape[-1] ** -0.5
      to_v = to_v.at[j].add(product("bkqs,bkqd->bksd", weights, g[i]))
      return to_q + product("bkqs,bksd->bkqd", to_scores, k[j]), to_k.at[j].add(product("bkqs,bkqd->bksd", to_scores, q[i])), to_v

    to_q, *sums = jax.lax.fori_loop(reach[0, i], reach[1, i], add, (jnp.zeros(q.shape[1:], jnp.float32), *sums))
    return tuple(sums), to_q.astype(q.dtype)

  zero = lambda a: jnp.zeros(a.shape, jnp.float32)
  (to_k, to_v), to_q = jax.lax.scan(one, (zero(k), zero(v)), jnp.arange(q.shape[0]))
  return to_q, to_k.astype(k.dtype), to_v.astype(v.dtype), None


_by_blocks.defvjp(_by_blocks_kept, _by_blocks_back)


def single(q: jax.Array, k: list[jax.Array], v: list[jax.Array], visible: Visible) -> jax.Array:
  """naive for a decode step, which is bound by reading the cache: q [B, 1, H, d], k and v in parts [B, K, s, d] that follow each other.
  Forms that a CPU's cores share (docs/log.md): keys come first in their product and queries are padded to eight columns, values go in
  blocks of places."""
  batch, _, heads, d = q.shape
  kv_heads, sizes = k[0].shape[1], [a.shape[2] for a in k]
  q_b = q.reshape(batch, kv_heads, -1, d) * d**-0.5
  group = q_b.shape[2]
  padded = jnp.pad(q_b, ((0, 0), (0, 0), (0, -group % 8), (0, 0)))

  def score(k_part):
    scores = jnp.einsum("bksd,bkgd->bksg", k_part, padded, preferred_element_type=jnp.float32)
    scores = jax.lax.optimization_barrier(scores)  # else the product is made to write them transposed, which is slower than both
    return jnp.moveaxis(scores[..., :group], -1, 2)

  def blocks(a: jax.Array, axis: int) -> jax.Array:
    places = a.shape[axis]
    size = next((n for n in (128, 64) if not places % n), places)  # without such a divisor it stays one
    return a.reshape(*a.shape[:axis], -1, size, *a.shape[axis + 1 :])

  scores = jnp.where(visible.mask()[:, None], jnp.concatenate([score(a) for a in k], axis=-1), -1e30)
  weights = jnp.exp(scores - scores.max(-1, keepdims=True))
  mixed = sum(
    jnp.einsum("bkgns,bknsd->bkngd", blocks(w, 3), blocks(v_part, 2), preferred_element_type=jnp.float32).sum(2)
    for w, v_part in zip(jnp.split(weights.astype(q.dtype), np.cumsum(sizes)[:-1], axis=-1), v, strict=True)
  )
  return (mixed / weights.sum(-1)[..., None]).astype(q.dtype).reshape(batch, 1, heads, d)


def splash(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible, *, block: int = 512, interpret: bool = False) -> jax.Array:
  """jax.experimental.pallas' splash attention for packed rows. Padding (segment 0) sees padding, which nothing reads."""
  length, mesh = q.shape[1], current()
  shares, heads = (1, 1) if mesh is None else (mesh.shape["context"], mesh.shape["tensor"])
  if not visible.packed or length % (128 * shares):
    raise ValueError(f"splash attention wants packed rows of a multiple of {128 * shares} tokens, got {length}; use attention='chunked'")
  sizes = _sizes(next(b for b in (block, 256, 128) if length // shares % b == 0))
  causal = splash_mask.CausalMask((length, length), shard_count=shares)
  causal.q_sequence = dealt(length, shares)
  mask = splash_mask.MultiHeadMask([causal] * q.shape[2])
  kernel = splash_kernel.make_splash_mha(mask, block_sizes=sizes, head_shards=heads, q_seq_shards=shares, interpret=interpret)
  segments = splash_kernel.SegmentIds(visible.query_segment, visible.key_segment)

  def run(kernel, q, k, v, segments):
    segments = segments._replace(q=deal(segments.q, 1, shares))
    return deal(jax.vmap(kernel)(deal(q, 2, shares), k, v, segments), 2, shares, back=True)

  if mesh is not None:
    part, whole = P(ROWS, "tensor", "context"), P(ROWS, "tensor")
    spec = kernel.manual_sharding_spec(NamedSharding(mesh, P("tensor", "context")))
    ids = splash_kernel.SegmentIds(P(ROWS, "context"), P(ROWS))
    run = jax.shard_map(run, in_specs=(spec, part, whole, whole, ids), out_specs=part, check_vma=False)
  major = lambda a: jnp.swapaxes(a, 1, 2)
  return major(run(kernel, major(q * q.shape[-1] ** -0.5), major(k), major(v), segments))


def _sizes(block: int) -> splash_kernel.BlockSizes:
  return splash_kernel.BlockSizes(
    block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
    block_q_dq=block, block_kv_dq=block,
  )  # fmt: skip


def splash_whole(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array, *, block: int = 512, interpret: bool = False) -> jax.Array:
  """The same kernel where every place sees all valid ones: q, k, v [M, P, H, d], valid bool [M, P] -> [M, P, H, d]. For one device's
  images, inside a shard_map where there is a mesh."""
  length = q.shape[1]
  q, k, v, segment = (_pad(a, block) for a in (q * q.shape[-1] ** -0.5, k, v, valid.astype(jnp.int32)))
  mask = splash_mask.MultiHeadMask([splash_mask.FullMask((q.shape[1], q.shape[1]))] * q.shape[2])
  kernel = splash_kernel.make_splash_mha(mask, block_sizes=_sizes(block), head_shards=1, q_seq_shards=1, interpret=interpret)
  major = lambda a: jnp.swapaxes(a, 1, 2)
  out = jax.vmap(kernel)(major(q), major(k), major(v), splash_kernel.SegmentIds(segment, segment))
  return major(out)[:, :length]


def _halves(shares: int) -> list[list[int]]:
  """Of 2 x shares parts of a row in order, of which device i has 2i and 2i + 1: where the even ones go, and the odd ones. Part p and its
  mirror image, 2 x shares - 1 - p, come together."""
  return [[min(part, 2 * shares - 1 - part) for part in range(first, 2 * shares, 2)] for first in (0, 1)]


def dealt(length: int, shares: int) -> np.ndarray:
  """Which query stands where after `deal`, i32 [length]."""
  if shares % 2 or length // shares % 2:
    return np.arange(length, dtype=np.int32)
  parts = np.arange(length, dtype=np.int32).reshape(2 * shares, -1)
  even, odd = _halves(shares)
  return np.concatenate([parts[2 * side.index(i) + k] for i in range(shares) for k, side in enumerate((even, odd))])


def deal(x: jax.Array, axis: int, shares: int, back: bool = False) -> jax.Array:
  """Inside a shard_map over context: this device's queries for its share of early and late ones; back: the other way. With an odd number
  of devices, or of queries on each, everything stays."""
  if shares % 2 or x.shape[axis] % 2:
    return x
  move = lambda half, to: jax.lax.ppermute(half, "context", [(t, i) if back else (i, t) for i, t in enumerate(to)])
  return jnp.concatenate([move(*pair) for pair in zip(jnp.split(x, 2, axis), _halves(shares))], axis)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible, *, implementation: str = "cudnn") -> jax.Array:
  """jax.nn.dot_product_attention; implementation "xla" is the same call for a machine without a GPU."""
  return jax.nn.dot_product_attention(q, k, v, mask=visible.mask()[:, None], implementation=implementation)


BACKENDS = {"naive": naive, "chunked": chunked, "splash": splash, "cudnn": cudnn}
KERNELS = {"splash": "tpu", "cudnn": "gpu"}  # what they run on; elsewhere a test may interpret them, no knob does


def platform() -> str:
  """What the step that is being traced will run on: a mesh may be of devices that are not here."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def choose(name: str, visible: Visible, dtype) -> str:
  """The backend that "auto" means here, and "splash" where rows are not packed: a kernel where the device has one that fits, else all at
  once or in blocks by size."""
  if name != "auto" and (name != "splash" or visible.packed):
    return name
  length, size, mesh = visible.query_order.shape[1], visible.key_order.shape[1], current()
  if platform() == "tpu" and visible.packed and length % (128 * (1 if mesh is None else mesh.shape["context"])) == 0:
    return "splash"
  if length * size > (DENSE if platform() != "cpu" else DENSE_CPU):
    return "chunked"
  return "cudnn" if platform() == "gpu" and length > 1 and dtype in (jnp.bfloat16, jnp.float16) else "naive"


def mix(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible, attention="auto") -> jax.Array:
  """Attention by a backend's name, "auto", or a function of the same signature."""
  if callable(attention):
    return attention(q, k, v, visible)
  name = choose(attention, visible, q.dtype)
  if name not in BACKENDS:
    raise ValueError(f"attention {name!r}: there are auto, {', '.join(BACKENDS)}")
  backend = BACKENDS[name]
  if current() is None or not visible.packed:
    return backend(q, k, v, visible)
  gathered = lambda a: constrain(a, ROWS, None, "tensor", None)
  if name in ("chunked", "cudnn"):
    return _spread(backend, q, gathered(k), gathered(v), visible)
  return backend(q, gathered(k), gathered(v), visible)


def over_cache(q: jax.Array, k: list[jax.Array], v: list[jax.Array], visible: Visible, attention="auto") -> jax.Array:
  """mix where keys and values lie as a cache has them: in parts [B, K, s, d] whose places follow each other."""
  if q.shape[1] == 1 and attention == "auto":
    return single(q, [a.astype(q.dtype) for a in k], [a.astype(q.dtype) for a in v], visible)
  whole = lambda parts: jnp.swapaxes(jnp.concatenate(parts, axis=2), 1, 2).astype(q.dtype)
  return mix(q, whole(k), whole(v), visible, attention)


def _spread(backend, q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible) -> jax.Array:
  """A backend that the compiler cannot split by itself, on each device's rows, heads and queries."""
  heads, queries, keys = "tensor", P(ROWS, "context"), P(ROWS)

  shares = current().shape["context"]

  def run(q, k, v, query_order, key_order, query_segment, key_segment):
    seen = Visible(deal(query_order, 1, shares), key_order, deal(query_segment, 1, shares), key_segment)
    return deal(backend(deal(q, 1, shares), k, v, seen), 1, shares, back=True)

  return jax.shard_map(
    run, in_specs=(P(*queries, heads), P(*keys, None, heads), P(*keys, None, heads), queries, keys, queries, keys),
    out_specs=P(*queries, heads), check_vma=False,
  )(q, k, v, *visible[:4])  # fmt: skip
