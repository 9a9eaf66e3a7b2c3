"""Our Qwen2.5-VL and Qwen3-VL against transformers in float32, on tiny checkpoints whose weights are all random (freshly made
ones have biases of 0 and norms of 1, which hide a missing one), with two screenshots of different ragged sizes.

The checkpoints and what transformers says of them lie under tests/golden, so that the normal suite checks the same without
torch; the first test here says they are still what transformers computes. `python tests/parity/test_vl_models.py` writes them anew.
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
  Qwen2_5_VLConfig,
  Qwen2_5_VLForConditionalGeneration,
  Qwen3VLConfig,
  Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

pytestmark = pytest.mark.parity

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
CLASSES = {
  "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, CLIP),
  "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration, HALF),
}
FAMILIES = sorted(CLASSES)
IMAGE, START, END = 200, 201, 202
SIZES = [(150, 410), (300, 200)]  # (H, W) of the two screenshots


# -- making the golden files


def config(family):
  text = dict(
    vocab_size=208, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    rms_norm_eps=1e-6, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
  )  # fmt: skip
  rope = dict(rope_type="default", rope_theta=100.0, mrope_section=[1, 1, 2])  # a small base: every frequency counts
  vision = dict(depth=3, hidden_size=24, num_heads=2, intermediate_size=32, out_hidden_size=32, spatial_merge_size=2, temporal_patch_size=2)
  if family == "qwen2_5_vl":
    vision |= dict(patch_size=14, window_size=112, fullatt_block_indexes=[1])
  else:
    text |= dict(head_dim=16)
    rope |= dict(mrope_section=[4, 2, 2], mrope_interleaved=True)
    vision |= dict(patch_size=16, num_position_embeddings=36, deepstack_visual_indexes=[0, 2])
  ids = dict(image_token_id=IMAGE, video_token_id=203, vision_start_token_id=START, vision_end_token_id=END)
  return CLASSES[family][0](text_config=text | {"rope_parameters": rope}, vision_config=vision, **ids)


def write_checkpoint(family, folder):
  """bfloat16 numbers, so that the file is small and every reader has the same float32."""
  torch.manual_seed(0)
  model = CLASSES[family][1](config(family))
  with torch.no_grad():
    for p in model.parameters():
      p.add_(0.1 * torch.randn_like(p))
  shutil.rmtree(folder, ignore_errors=True)
  model.to(torch.bfloat16).save_pretrained(folder)
  patch = model.config.vision_config.patch_size
  spec = CLASSES[family][2] | {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 60000}
  (folder / "preprocessor_config.json").write_text(json.dumps(spec))
  (folder / "generation_config.json").unlink(missing_ok=True)


def write_tokenizer(folder):
  """A byte-level tokenizer with the control tokens of both templates."""
  control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|box_start|>",
             "<|box_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]  # fmt: skip
  t = tokenizers.Tokenizer(models.BPE())
  t.normalizer, t.decoder = normalizers.NFC(), decoders.ByteLevel()
  t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  words = ["system user assistant You are a helpful assistant. Thought: Action: click(start_box='(12,34)') open the red mug\n\n\n"] * 9
  t.train_from_iterator(words, trainers.BpeTrainer(vocab_size=360, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
  t.add_special_tokens(control)
  folder.mkdir(parents=True, exist_ok=True)
  t.save(str(folder / "tokenizer.json"))


def screens():
  rng = np.random.default_rng(0)
  return [rng.integers(0, 256, (h, w, 3)).astype(np.uint8) for h, w in SIZES]


def theirs(family, folder=None):
  """What transformers says of the two screenshots and a text around them, as numpy arrays by name."""
  folder = folder or GOLDEN / family
  model = CLASSES[family][1].from_pretrained(folder, dtype=torch.float32).eval()
  spec = json.loads((GOLDEN / family / "preprocessor_config.json").read_text())
  out = Qwen2VLImageProcessorPil(**spec)(images=screens(), return_tensors="pt")
  pixels, grid = out["pixel_values"], out["image_grid_thw"]
  tokens = [1, 2, 3, START]
  for i, (_, h, w) in enumerate(grid.tolist()):
    tokens += [IMAGE] * (h * w // 4) + [END, 10 + i, 20 + i, START][: 4 if i == 0 else 3]
  ids = torch.tensor([tokens])
  given = dict(pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=(ids == IMAGE).int())
  with torch.no_grad():
    seen = model.model.visual(pixels, grid)
    logits = model(input_ids=ids, **given).logits[0]
    greedy = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0, **given)
    positions, delta = model.model.get_rope_index(ids, image_grid_thw=grid, mm_token_type_ids=given["mm_token_type_ids"])
  deepstack = torch.stack(seen.deepstack_features) if family == "qwen3_vl" else torch.zeros(0, *seen.pooler_output.shape)
  result = dict(
    grid=grid[:, 1:], tokens=ids[0], positions=positions[:, 0], next_position=delta[0, 0] + len(tokens), embeds=seen.pooler_output,
    deepstack=deepstack, logits=logits, greedy=greedy[0, len(tokens) :], pixels=pixels,
  )  # fmt: skip
  return {name: value.numpy() for name, value in result.items()}


def thin(full):
  """What of it is kept in the repository: pixels of the first rows of patches, logits of every ninth token and the last ones."""
  rows = np.r_[0 : len(full["tokens"]) : 9, len(full["tokens"]) - 5 : len(full["tokens"])]
  small = {"pixels": full["pixels"][:24], "logits": full["logits"][rows], "logit_rows": rows}
  return {k: v.astype(np.int32) if v.dtype == np.int64 else v for k, v in (full | small).items()}


def write():
  write_tokenizer(GOLDEN / "chat")
  for family in FAMILIES:
    write_checkpoint(family, GOLDEN / family)
    np.savez_compressed(GOLDEN / family / "expected.npz", **thin(theirs(family)))


if __name__ == "__main__":
  write()
  sys.exit()
