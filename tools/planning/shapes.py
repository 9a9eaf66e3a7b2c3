"""Published models by name, as the part of their config.json that says their sizes: for plans without a download."""

from __future__ import annotations

import contextlib
import json
import pathlib
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from core.find import nearest
from models import checkpoint, vision_language
from models.config import ModelConfig
from models.vision_language import VLConfig

_QWEN25 = {
  "model_type": "qwen2_5_vl", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 128000, "hidden_act": "silu",
  "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "image_token_id": 151655,
}  # fmt: skip
_TOWER25 = {
  "depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "patch_size": 14, "spatial_merge_size": 2,
  "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
_QWEN3 = {"rms_norm_eps": 1e-6, "rope_theta": 5e6, "max_position_embeddings": 262144, "hidden_act": "silu", "attention_bias": False}
MODELS = {
  "qwen2.5-vl-3b": _QWEN25 | {
    "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 11008,
    "vocab_size": 151936, "tie_word_embeddings": True, "vision_config": _TOWER25 | {"out_hidden_size": 2048},
  },
  "qwen2.5-vl-7b": _QWEN25 | {  # UI-TARS-1.5-7B too
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
    "vocab_size": 152064, "tie_word_embeddings": False, "vision_config": _TOWER25 | {"out_hidden_size": 3584},
  },
  "qwen3-vl-8b": {
    "model_type": "qwen3_vl", "image_token_id": 151655, "tie_word_embeddings": False,
    "text_config": _QWEN3 | {
      "model_type": "qwen3_vl_text", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
      "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
      "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    },
    "vision_config": {
      "depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "patch_size": 16, "spatial_merge_size": 2,
      "temporal_patch_size": 2, "out_hidden_size": 4096, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
    },
  },
  "llama-3.1-8b": {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "max_position_embeddings": 131072, "hidden_act": "silu",
  },
  "smollm2-135m": {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
    "max_position_embeddings": 8192, "hidden_act": "silu",
  },
}  # fmt: skip
MOST_PIXELS = 2_116_800  # ARPO's max_pixels: a 1080p screenshot becomes 1932 x 1092


class Shape(NamedTuple):
  """One model: text: its decoder; vl: the whole, None of a text model; leaves: every parameter."""

  name: str
  text: ModelConfig
  vl: VLConfig | None
  leaves: dict


def load(name: str) -> Shape:
  """A name of MODELS, or a checkpoint folder. ValueError of one line for neither."""
  if name not in MODELS and not pathlib.Path(name).is_dir():
    raise ValueError(f"--model={name}: no such model{nearest(name, MODELS)} and no such folder; known are {', '.join(MODELS)}")
  with folder(name) as path:
    text = ModelConfig.from_hf(path)
    if text.vision is None:
      return Shape(name, text, None, checkpoint.leaves(path))
    vl = vision_language.read_config(path, checkpoint.VISION[text.family].TOWER)
    return Shape(name, text, vl, vision_language.leaves(vl))


@contextlib.contextmanager
def folder(name: str) -> Iterator[str]:
  """A folder with the model's config.json and preprocessor_config.json."""
  if name not in MODELS:
    yield name
    return
  with tempfile.TemporaryDirectory() as path:
    raw = MODELS[name]
    (pathlib.Path(path) / "config.json").write_text(json.dumps(raw))
    if "vision_config" in raw:
      v = raw["vision_config"]
      images = {"patch_size": v["patch_size"], "merge_size": v["spatial_merge_size"], "min_pixels": 3136, "max_pixels": MOST_PIXELS}
      images |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # read by nothing that counts
      (pathlib.Path(path) / "preprocessor_config.json").write_text(json.dumps(images))
    yield path
