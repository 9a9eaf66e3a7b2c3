"""Qwen3-VL: its vision tower; the decoder is models/llama.py with query and key norms, interleaved M-RoPE and deepstack.

Blocks have layer norms, attend over the whole image and have a plain MLP. A learned position table is mixed to the image's
grid. The outputs of a few blocks are merged too, and added to the image places after the decoder's first layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import ml_collections

from models import vision_language
from models.base import Policy
from models.chat import TEMPLATES
from models.config import blocks
from models.decoder import Leaf
from models.images import ImageSpec
from models.layers import linear
from models.vision import (
  Run,
  VisionConfig,
  VisionPlan,
  attention_leaves,
  dense,
  embed_patches,
  features,
  kernel,
  layer_norm,
  merge_patches,
  run_blocks,
  scales,
  sizes,
  table_positions,
  tower_config,
)
from models.vision_language import Tower, defaults

__all__ = ["defaults", "make", "TOWER", "vision_config", "leaves", "encode_images"]


def vision_config(raw: dict, path: str = "config.json") -> VisionConfig:
  """From `vision_config` of the checkpoint's config.json. path: named in errors."""
  depth, places = sizes(raw, path, "depth", "num_position_embeddings")
  taps = blocks(raw, "vision_config.deepstack_visual_indexes", path, depth)
  if not taps or list(taps) != sorted(set(taps)):
    raise ValueError(f"{path}: vision_config.deepstack_visual_indexes is {list(taps)}, wanted one block or more, each after the last")
  if math.isqrt(places) ** 2 != places:
    raise ValueError(f"{path}: vision_config.num_position_embeddings is {places}, wanted a square: rows x columns of the position table")
  return tower_config(raw, path, "gelu_pytorch_tanh", full=tuple(range(depth)), taps=taps, table=math.isqrt(places))


def leaves(cfg: VisionConfig) -> dict:
  """Every parameter of the tower as a nested dict of Leaf, with the blocks and the deepstack mergers stacked."""
  d, stack, merged, taps = cfg.width, (cfg.depth,), cfg.group * cfg.width, (len(cfg.taps),)

  def merge(norm, stack=()):
    two = {"linear_fc1": dense(merged, "mlp", merged, "embed", stack), "linear_fc2": dense(cfg.out, "embed", merged, "mlp", stack)}
    return {"norm": scales(norm, stack, bias=True)} | two

  mlp = {"linear_fc1": dense(cfg.hidden, "mlp", d, "embed", stack), "linear_fc2": dense(d, "embed", cfg.hidden, "mlp", stack)}
  norms = {name: scales(d, stack, bias=True) for name in ("norm1", "norm2")}
  return {
    "patch_embed": {"proj": {"weight": kernel(cfg), "bias": Leaf((d,), ("embed",), 0.0)}},
    "pos_embed": {"weight": Leaf((cfg.table**2, d), (None, "embed"), 0.02)},
    "blocks": norms | {"attn": attention_leaves(cfg), "mlp": mlp},
    "merger": merge(d),
    "deepstack_merger_list": merge(merged, taps),
  }


def block(p: dict, x: jax.Array, blend: Callable) -> jax.Array:
  x = x + linear(p["attn"]["proj"], blend(linear(p["attn"]["qkv"], layer_norm(x, p["norm1"]))))
  y = jax.nn.gelu(linear(p["mlp"]["linear_fc1"], layer_norm(x, p["norm2"])), approximate=True)
  return x + linear(p["mlp"]["linear_fc2"], y)


def merger(p: dict, x: jax.Array, cfg: VisionConfig, merge_first: bool) -> jax.Array:
  """[M, P, d] -> [M, P / 4, out]. The final merger normalises patches, those of deepstack the merged ones."""
  x = layer_norm(merge_patches(x, cfg), p["norm"]) if merge_first else merge_patches(layer_norm(x, p["norm"]), cfg)
  return linear(p["linear_fc2"], jax.nn.gelu(linear(p["linear_fc1"], x), approximate=False))


def encode_images(visual: dict, cfg: VisionConfig, spec: ImageSpec, patches: jax.Array, plan: VisionPlan, run: Run) -> dict:
  """patches u8 [M, P, 3 * patch * patch] -> {"embeds": [M * P / 4, out], "deepstack": [K, M * P / 4, out]}."""
  x = embed_patches(visual["patch_embed"]["proj"], patches, spec)
  x = x + table_positions(visual["pos_embed"], plan).astype(x.dtype)
  deepstack, start = [], 0
  for i, tap in enumerate(cfg.taps):
    x = run_blocks(visual["blocks"], x, plan, cfg, block, range(start, tap + 1), run)
    deepstack.append(merger(jax.tree.map(lambda a, i=i: a[i], visual["deepstack_merger_list"]), x, cfg, merge_first=True))
    start = tap + 1
  if start < cfg.depth:
    x = run_blocks(visual["blocks"], x, plan, cfg, block, range(start, cfg.depth), run)
  return features(merger(visual["merger"], x, cfg, merge_first=False), deepstack)


TOWER = Tower(vision_config, leaves, encode_images, TEMPLATES["chatml"], "thousand")


def make(cfg: ml_collections.ConfigDict, folder: str, grammar: str, screen_size: tuple[int, int]) -> Policy:
  """A policy for one checkpoint folder, action grammar and screen size (W, H)."""
  return vision_language.make(cfg, folder, TOWER, grammar, screen_size)
