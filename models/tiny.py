"""The embedded policy: a patch encoder and a small causal transformer, a vision-language model in miniature.

It follows the interface of the large ones (models/base.py): image features take the place of placeholder tokens, the
forward pass returns hidden states, log-probabilities come from a chunked head, decoding has an explicit cache. Its
tokens are pieces of the action grammars and of the tasks' words, with single characters for everything else.

Prompt: goal, image, then the action. Positions 0.. for the goal, one for the whole image, then a fixed base for the
action, so that the length of the goal does not move the action about.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from core.mesh import EVERY, ROWS, constrain
from core.schema import TokenRecord
from models.base import Policy, Prompt, Seen
from models.layers import attend, chosen, features_at, rms_norm

SPECIALS = ("<pad>", "<eos>", "<image>")
# With D ** -0.5 (1/8) the same 800 updates of copying left 18% of clean episodes unreadable at T = 1: docs/log.md.
LOGIT_SCALE = 0.5
CHARACTERS = [chr(c) for c in range(32, 127)] + ["\n", "\t"]


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "width": 64,  # D
      "layers": 2,
      "heads": 4,
      "mlp": 4,  # hidden width of the MLP as a multiple of D
      "patch": 8,  # pixels
      "patch_width": 32,
      "window": 4,  # patches a side that one image token sees
      "stride": 4,  # patches between image tokens; less than window = overlap
      "max_goal": 12,  # tokens; a longer goal is refused
      "max_action": 10,  # tokens the policy may write a step, <eos> included
    }
  )


class Tokenizer:
  """Greedy longest match over a fixed list of pieces, with single characters as the last resort."""

  pad_id, eos_id, image_id = 0, 1, 2

  def __init__(self, pieces: Sequence[str]):
    self.pieces = list(dict.fromkeys([*SPECIALS, *CHARACTERS, *pieces]))
    self._ids = {p: i for i, p in enumerate(self.pieces) if p not in SPECIALS}
    self._longest = max(map(len, self._ids))
    self.vocab_size = len(self.pieces)

  def encode(self, text: str) -> list[int]:
    out, at = [], 0
    while at < len(text):
      for size in range(min(self._longest, len(text) - at), 0, -1):
        token = self._ids.get(text[at : at + size])
        if token is not None:
          out.append(token)
          at += size
          break
      else:
        raise ValueError(f"character {text[at]!r} at {at} of {text[:40]!r} is not in the tiny policy's alphabet (printable ASCII)")
    return out

  def decode(self, ids) -> str:
    """The text of ids, <eos> left out. A stray <pad> or <image> shows, so that what holds one does not pass for clean text."""
    return "".join(self.pieces[int(i)] for i in ids if int(i) != self.eos_id)


@dataclasses.dataclass(frozen=True)
class Shape:
  """The static sizes of one tiny policy."""

  vocab: int
  height: int
  width_px: int
  d: int
  layers: int
  heads: int
  mlp: int
  patch: int
  patch_width: int
  window: int
  stride: int
  max_goal: int
  max_action: int

  @property
  def patches(self) -> tuple[int, int]:
    return self.height // self.patch, self.width_px // self.patch

  @property
  def grid(self) -> tuple[int, int]:
    """Image tokens down and across: windows every `stride` patches, the last ones padded at the edge."""
    return tuple(-(-max(n - self.window, 0) // self.stride) + 1 for n in self.patches)

  @property
  def tokens_per_image(self) -> int:
    return self.grid[0] * self.grid[1]

  @property
  def positions(self) -> int:
    return self.max_goal + 1 + self.max_action


class TinyPolicy(nnx.Module):
  """Definition and initialisation: names, shapes and sharding names of every leaf. Never called; the functions below are."""

  def __init__(self, s: Shape, rngs: nnx.Rngs):
    def leaf(shape, scale, names):
      init = nnx.with_partitioning(nnx.initializers.normal(scale), names)
      return nnx.Param(init(rngs.params(), shape, jnp.float32))

    def ones(n):
      return nnx.Param(nnx.with_partitioning(nnx.initializers.ones, ("embed",))(rngs.params(), (n,), jnp.float32))

    pixels, d, hidden = s.patch * s.patch * 3, s.d, s.d * s.mlp
    seen = s.window * s.window * s.patch_width
    rows, cols = s.patches
    self.visual = nnx.data(
      {
        "patch_embed": leaf((s.patch_width, pixels), pixels**-0.5, (None, None)),
        "patch_pos": leaf((rows, cols, s.patch_width), 0.02, (None, None, None)),
        "merge_in": leaf((d, seen), (2 / seen) ** 0.5, ("embed", None)),
        "merge_out": leaf((d, d), d**-0.5, ("embed", None)),
        "pos": leaf((s.tokens_per_image, d), 0.5, (None, "embed")),
      }
    )
    self.embed_tokens = leaf((s.vocab, d), 0.5, ("vocab", "embed"))
    self.embed_positions = leaf((s.positions, d), 0.5, (None, "embed"))
    self.norm = ones(d)
    self.layers = nnx.data(
      [
        {
          "input_layernorm": ones(d),
          "qkv_proj": leaf((3 * d, d), d**-0.5, ("heads", "embed")),
          "o_proj": leaf((d, d), d**-0.5 / (2 * s.layers) ** 0.5, ("embed", "heads")),
          "post_attention_layernorm": ones(d),
          "up_proj": leaf((hidden, d), d**-0.5, ("mlp", "embed")),
          "down_proj": leaf((d, hidden), hidden**-0.5 / (2 * s.layers) ** 0.5, ("embed", "mlp")),
        }
        for _ in range(s.layers)
      ]
    )


def init(s: Shape, key: jax.Array) -> dict:
  """Parameters as a nested dict of float32 arrays; layers under "0", "1", ... as in a checkpoint."""
  with nnx.use_eager_sharding(False):  # the metadata names axes; no mesh is needed to initialise
    model = TinyPolicy(s, nnx.Rngs(params=key))
  state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  return _string_keys(state)


def _string_keys(tree):
  return {str(k): _string_keys(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def make(cfg: ml_collections.ConfigDict, pieces: list[str], screen_size: tuple[int, int]) -> Policy:
  """A tiny policy for one vocabulary and one screen size (W, H). The same knobs give the same policy: what is compiled of it stays good."""
  width, height = screen_size
  knobs = ("width", "layers", "heads", "mlp", "patch", "patch_width", "window", "stride", "max_goal", "max_action")
  for name in knobs:
    if cfg[name] < 1:
      raise ValueError(f"policy.tiny.{name} is {cfg[name]}, wanted 1 or more")
  if width % cfg.patch or height % cfg.patch:
    raise ValueError(f"policy.tiny.patch is {cfg.patch}: the screen of {width} x {height} pixels is not a multiple of it")
  if cfg.width % cfg.heads:
    raise ValueError(f"policy.tiny.heads is {cfg.heads}: the width of {cfg.width} is not a multiple of it")
  return _policy(tuple(pieces), height=height, width_px=width, d=cfg.width, **{name: cfg[name] for name in knobs if name != "width"})


@lru_cache(maxsize=8)
def _policy(pieces: tuple[str, ...], **sizes: int) -> Policy:
  tokenizer = Tokenizer(pieces)
  s = Shape(vocab=tokenizer.vocab_size, **sizes)
  return Policy(
    name="tiny",
    tokenizer=tokenizer,
    tokens_per_image=s.tokens_per_image,
    width=s.d,
    max_goal=s.max_goal,
    max_prompt=s.max_goal + s.tokens_per_image,
    max_action=s.max_action,
    init=partial(init, s),
    prompt=partial(prompt, s, tokenizer),
    positions=partial(positions, s),
    image=partial(image, s),
    encode_images=partial(encode_images, s),
    forward=partial(forward, s),
    token_logprobs=partial(token_logprobs, s),
    init_cache=partial(init_cache, s),
    prefill=partial(prefill, s),
    decode_step=partial(decode_step, s),
    logits=logits,
    embed=embed,
    heads=s.heads,
    kv_heads=s.heads,
  )


def prompt(s: Shape, tokenizer: Tokenizer, goal: str, screens: list[np.ndarray], text: str = "", history: Sequence[Seen] = ()) -> Prompt:
  """Goal, then the newest screenshot. The tiny policy reads no text observation and only the last screen."""
  del text, history
  ids = tokenizer.encode(goal)
  if len(ids) > s.max_goal:
    raise ValueError(f"goal {goal!r} has {len(ids)} tokens, the tiny policy takes {s.max_goal}: raise policy.tiny.max_goal")
  n, m = len(ids), s.tokens_per_image
  tokens = np.full(n + m, tokenizer.image_id, np.int32)
  tokens[:n] = ids
  positions = np.full((1, n + m), s.max_goal, np.int32)
  positions[0, :n] = np.arange(n)
  return Prompt(tokens, positions, np.array([n], np.int32), image(s, screens[-1])[None], s.max_goal + 1)


def image(s: Shape, screen: np.ndarray) -> np.ndarray:
  """A screenshot as the encoder takes it: the pixels themselves, uint8 [H, W, 3]."""
  if screen.shape != (s.height, s.width_px, 3) or screen.dtype != np.uint8:
    want = (s.height, s.width_px, 3)
    raise ValueError(f"screenshot is {screen.dtype} {screen.shape}, the policy was made for uint8 {want}")
  return screen


def positions(s: Shape, record: TokenRecord) -> np.ndarray:
  """Positions [1, T] of a stored record, the same as when it was sampled."""
  n, start = int(record.image_place[0]), int(record.image_place[0]) + s.tokens_per_image
  written = s.max_goal + 1 + np.arange(len(record) - start)
  return np.concatenate([np.arange(n), np.full(s.tokens_per_image, s.max_goal), written])[None].astype(np.int32)


def encode_images(s: Shape, params: dict, images: jax.Array) -> jax.Array:
  """uint8 [M, H, W, 3] -> f32 [M * tokens_per_image, D]. Normalised on the device; only bytes cross to it."""
  v, p = params["visual"], s.patch
  rows, cols = s.patches
  m = images.shape[0]
  x = images.reshape(m, rows, p, cols, p, 3).transpose(0, 1, 3, 2, 4, 5).reshape(m, rows, cols, p * p * 3)
  x = x.astype(jnp.float32) / 128.0 - 1.0
  x = jax.nn.relu(jnp.einsum("mrcp,op->mrco", x, v["patch_embed"]) + v["patch_pos"])
  down, across = s.grid
  pad_r, pad_c = (down - 1) * s.stride + s.window - rows, (across - 1) * s.stride + s.window - cols
  x = jnp.pad(x, ((0, 0), (0, pad_r), (0, pad_c), (0, 0)))
  if s.window == s.stride:
    w = s.window
    x = x.reshape(m, down, w, across, w, s.patch_width).transpose(0, 1, 3, 2, 4, 5).reshape(m, down * across, -1)
  else:
    span_r, span_c = (down - 1) * s.stride + 1, (across - 1) * s.stride + 1
    parts = [x[:, i : i + span_r : s.stride, j : j + span_c : s.stride] for i in range(s.window) for j in range(s.window)]
    x = jnp.stack(parts, 3).reshape(m, down * across, -1)
  x = jax.nn.relu(jnp.einsum("mts,ds->mtd", x, v["merge_in"]))
  x = constrain(jnp.einsum("mtd,od->mto", x, v["merge_out"]) + v["pos"], EVERY, None, None)
  return x.reshape(m * down * across, s.d)


def embed(params: dict, tokens: jax.Array) -> jax.Array:
  """Word vectors f32 [..., D] of token ids [...]."""
  return constrain(params["embed_tokens"], "tensor", None)[tokens]


def _embed(params: dict, tokens: jax.Array, positions: jax.Array, features: jax.Array, image_slot: jax.Array) -> jax.Array:
  x = embed(params, tokens) + params["embed_positions"][positions]
  return jnp.where((image_slot >= 0)[..., None], features_at(features, image_slot), x)


def _heads(s: Shape, layer: dict, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  qkv = jnp.einsum("btd,od->bto", rms_norm(x, layer["input_layernorm"]), layer["qkv_proj"])
  return tuple(a.reshape(*a.shape[:2], s.heads, s.d // s.heads) for a in jnp.split(qkv, 3, axis=-1))


def _finish(layer: dict, x: jax.Array, mixed: jax.Array) -> jax.Array:
  x = x + jnp.einsum("bti,oi->bto", mixed.reshape(*mixed.shape[:2], -1), layer["o_proj"])
  y = jnp.einsum("bti,oi->bto", rms_norm(x, layer["post_attention_layernorm"]), layer["up_proj"])
  return x + jnp.einsum("bti,oi->bto", jax.nn.relu(y), layer["down_proj"])


def forward(s: Shape, params: dict, tokens, positions, segment_ids, features, image_slot) -> jax.Array:
  """Hidden states [B, L, D] of packed rows: a token sees earlier tokens of its own segment only."""
  x = constrain(_embed(params, tokens, positions[0], features, image_slot), ROWS, "context", None)
  length = tokens.shape[1]
  causal = jnp.tril(jnp.ones((length, length), bool))
  mask = causal & (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids[:, None, :] > 0)
  for i in range(s.layers):
    layer = params["layers"][str(i)]
    q, k, v = _heads(s, layer, x)
    x = constrain(_finish(layer, x, attend(q, k, v, mask)), ROWS, "context", None)
  return rms_norm(x, params["norm"])


def logits(params: dict, hidden: jax.Array) -> jax.Array:
  """f32 [..., V]. The head is the transposed embedding: copying a word from the goal is then nearly free to learn."""
  return jnp.einsum("...d,vd->...v", hidden, params["embed_tokens"]).astype(jnp.float32) * LOGIT_SCALE


def token_logprobs(
  s: Shape, params: dict, hidden, tokens, mask, most: int, chunk: int = 65536, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
  """(logp, entropy), f32 [B, L], at places where mask is True, 0 elsewhere; entry t is read from hidden t-1.

  temperature: divides the logits, as it does in the sampler. most: static, the most True places a row may have. The head runs
  at those places only, over chunks of rows under remat when there are more than `chunk` of them, so logits of the whole batch
  never exist at once.
  """
  del s
  rows, length = tokens.shape
  place = jnp.argsort(~mask, axis=1, stable=True)[:, : min(most, length)]  # True places first, in order
  pick = lambda a: jnp.take_along_axis(a, place, axis=1)
  before = jnp.take_along_axis(hidden, jnp.maximum(place - 1, 0)[..., None], axis=1)

  def head(args):
    h, t = args
    all_logp = jax.nn.log_softmax(logits(params, h) / temperature, axis=-1)
    logp = chosen(all_logp, t)
    return jnp.minimum(logp, 0.0), -jnp.sum(jnp.exp(all_logp) * all_logp, axis=-1)

  step = max(1, chunk // place.shape[1])
  if rows <= step:
    found = head((before, pick(tokens)))
  else:
    pad = -rows % step
    split = lambda a: jnp.pad(a, ((0, pad), *((0, 0),) * (a.ndim - 1))).reshape(-1, step, *a.shape[1:])
    found = jax.lax.map(jax.checkpoint(head), (split(before), split(pick(tokens))))
    found = tuple(a.reshape(-1, place.shape[1])[:rows] for a in found)
  spread = lambda a: jnp.zeros((rows, length), jnp.float32).at[jnp.arange(rows)[:, None], place].set(jnp.where(pick(mask), a, 0.0))
  return spread(found[0]), spread(found[1])


def init_cache(s: Shape, batch: int, size: int) -> dict:
  """Keys and values of `size` places a row. valid: which places hold a token of the row; filled: places used by all rows."""
  kv = jnp.zeros((s.layers, batch, size, s.heads, s.d // s.heads), jnp.float32)
  return {"k": kv, "v": kv, "valid": jnp.zeros((batch, size), bool), "filled": jnp.zeros((), jnp.int32)}


def prefill(s: Shape, params: dict, tokens, positions, valid, features, image_slot, cache: dict) -> tuple[jax.Array, dict]:
  """Appends a chunk of tokens [B, T] (valid bool [B, T]: rows may be ragged) to the cache; hidden states [B, T, D]."""
  x = _embed(params, tokens, positions[0], features, image_slot)
  start, length, size = cache["filled"], tokens.shape[1], cache["k"].shape[2]
  all_valid = jax.lax.dynamic_update_slice(cache["valid"], valid, (0, start))
  place = jnp.arange(size)[None, None, :]
  mask = all_valid[:, None, :] & (place <= (start + jnp.arange(length))[None, :, None])
  keys, values = cache["k"], cache["v"]
  for i in range(s.layers):
    layer = params["layers"][str(i)]
    q, k, v = _heads(s, layer, x)
    keys = jax.lax.dynamic_update_slice(keys, k[None], (i, 0, start, 0, 0))
    values = jax.lax.dynamic_update_slice(values, v[None], (i, 0, start, 0, 0))
    x = _finish(layer, x, attend(q, keys[i], values[i], mask))
  return rms_norm(x, params["norm"]), {"k": keys, "v": values, "valid": all_valid, "filled": start + length}


def decode_step(s: Shape, params: dict, token, position, cache: dict) -> tuple[jax.Array, dict]:
  """Appends one token [B] a row and returns the hidden state [B, D] that the next token is sampled from."""
  none = jnp.full((token.shape[0], 1), -1, jnp.int32)
  features = jnp.zeros((1, s.d), jnp.float32)
  valid = jnp.ones((token.shape[0], 1), bool)
  hidden, cache = prefill(s, params, token[:, None], position[None, :, None], valid, features, none, cache)
  return hidden[:, 0], cache
