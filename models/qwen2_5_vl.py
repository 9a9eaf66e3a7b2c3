"""Qwen2.5-VL (UI-TARS-1.5 has this architecture): its vision tower; the decoder is models/llama.py with M-RoPE in sections.

Blocks normalise by root mean square, attend inside windows of 8 x 8 patches but for a few that see the whole image, and
have a gated MLP with biases. Four neighbouring patches become one token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import ml_collections

from models import vision_language
from models.base import Policy
from models.chat import TEMPLATES
from models.config import blocks, whole
from models.images import ImageSpec
from models.layers import linear, rms_norm
from models.vision import (
  Run,
  VisionConfig,
  VisionPlan,
  attention_leaves,
  dense,
  embed_patches,
  features,
  kernel,
  merge_patches,
  run_blocks,
  scales,
  sizes,
  tower_config,
)
from models.vision_language import Tower, defaults

__all__ = ["defaults", "make", "TOWER", "vision_config", "leaves", "encode_images"]


def vision_config(raw: dict, path: str = "config.json") -> VisionConfig:
  """From `vision_config` of the checkpoint's config.json. path: named in errors."""
  full = blocks(raw, "vision_config.fullatt_block_indexes", path, *sizes(raw, path, "depth"))
  cfg, window = tower_config(raw, path, "silu", full=full), whole(raw, "vision_config.window_size", path, 1024)
  if window < (least := cfg.merge * cfg.patch):
    raise ValueError(f"{path}: vision_config.window_size is {window}, wanted {least} pixels or more: spatial_merge_size x patch_size")
  return dataclasses.replace(cfg, window=window // least * cfg.merge)


def leaves(cfg: VisionConfig) -> dict:
  """Every parameter of the tower as a nested dict of Leaf, with the blocks stacked."""
  d, hidden, merged, stack = cfg.width, cfg.hidden, cfg.group * cfg.width, (cfg.depth,)
  mlp = {name: dense(hidden, "mlp", d, "embed", stack) for name in ("gate_proj", "up_proj")}
  mlp["down_proj"] = dense(d, "embed", hidden, "mlp", stack)
  return {
    "patch_embed": {"proj": {"weight": kernel(cfg)}},
    "blocks": {"norm1": scales(d, stack), "norm2": scales(d, stack), "attn": attention_leaves(cfg), "mlp": mlp},
    "merger": {"ln_q": scales(d), "mlp": {"0": dense(merged, "mlp", merged, "embed"), "2": dense(cfg.out, "embed", merged, "mlp")}},
  }


def block(p: dict, x: jax.Array, blend: Callable) -> jax.Array:
  x = x + linear(p["attn"]["proj"], blend(linear(p["attn"]["qkv"], rms_norm(x, p["norm1"]["weight"]))))
  y, mlp = rms_norm(x, p["norm2"]["weight"]), p["mlp"]
  return x + linear(mlp["down_proj"], jax.nn.silu(linear(mlp["gate_proj"], y)) * linear(mlp["up_proj"], y))


def encode_images(visual: dict, cfg: VisionConfig, spec: ImageSpec, patches: jax.Array, plan: VisionPlan, run: Run) -> dict:
  """patches u8 [M, P, 3 * patch * patch] -> {"embeds": [M * P / 4, out]}."""
  x = embed_patches(visual["patch_embed"]["proj"], patches, spec)
  x = run_blocks(visual["blocks"], x, plan, cfg, block, range(cfg.depth), run)
  merger = visual["merger"]
  x = merge_patches(rms_norm(x, merger["ln_q"]["weight"]), cfg)
  return features(linear(merger["mlp"]["2"], jax.nn.gelu(linear(merger["mlp"]["0"], x), approximate=False)))


TOWER = Tower(vision_config, leaves, encode_images, TEMPLATES["qwen2_5_vl"], "resized")


def make(cfg: ml_collections.ConfigDict, folder: str, grammar: str, screen_size: tuple[int, int]) -> Policy:
  """A policy for one checkpoint folder, action grammar and screen size (W, H)."""
  return vision_language.make(cfg, folder, TOWER, grammar, screen_size)
