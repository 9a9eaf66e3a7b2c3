"""Checkpoint folders in miniature: the golden configs with the chat tokenizer and, where asked for, random weights in one file."""

import json
import pathlib
import shutil

import numpy as np
from safetensors.numpy import save_file

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"


def folder(path, family):
  """A checkpoint folder without weights, of "qwen2_5_vl", "qwen3_vl" or a text family, with a short instruction beside it."""
  path.mkdir(parents=True, exist_ok=True)
  source = GOLDEN / (family if family.endswith("_vl") else f"text/{family}")
  shutil.copy(GOLDEN / "chat" / "tokenizer.json", path)
  config = json.loads((source / "config.json").read_text())
  tokens = {t["content"]: t["id"] for t in json.loads((path / "tokenizer.json").read_text())["added_tokens"]}
  text = config.get("text_config", config)
  text |= {"vocab_size": max(tokens.values()) + 1, "max_position_embeddings": 4096, "num_hidden_layers": 2}
  if "layer_types" in text:
    text["layer_types"] = text["layer_types"][:2]
  if "vision_config" in config:
    config["image_token_id"] = tokens["<|image_pad|>"]
    shutil.copy(source / "preprocessor_config.json", path)
  (path / "config.json").write_text(json.dumps(config))
  (path / "instruction.txt").write_text("Go: {goal}")
  return str(path)


def with_weights(path, family, seed=0):
  """The same with float32 weights under a checkpoint's names: normal, norms around 1, no bias 0."""
  from models import hf
  from models.checkpoint import leaves

  where, rng, tensors = folder(path, family), np.random.default_rng(seed), {}
  for at, leaf in hf.by_path(leaves(str(path))).items():
    numbers = rng.normal(float(any("norm" in key for key in at)), 0.1, leaf.shape).astype(np.float32)
    for i, part in enumerate(numbers) if leaf.stacked else [(None, numbers)]:
      tensors[hf.spell(at, i)] = np.ascontiguousarray(part)
  save_file(tensors, path / "model.safetensors", {"format": "pt"})
  return where
