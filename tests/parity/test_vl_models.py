"""Our Qwen2.5-VL and Qwen3-VL against transformers in float32, on tiny checkpoints whose weights are all random (freshly made
ones have biases of 0 and norms of 1, which hide a missing one), with two screenshots of different ragged sizes.

The checkpoints and what transformers says of them lie under tests/golden, so that the normal suite checks the same without
torch; the first test here says they are still what transformers computes. `PYTHONPATH=. python tests/parity/test_vl_models.py` writes them.
"""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, normalizers, pre_tokenizers, trainers
from transformers import (
  PreTrainedTokenizerFast,
  Qwen2_5_VLConfig,
  Qwen2_5_VLForConditionalGeneration,
  Qwen3VLConfig,
  Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from models import decoder, hf, qwen2_5_vl, qwen3_vl, vision_language
from models.chat import TEMPLATES, Chat, Tokenizer, Turn
from models.decoder import Vision
from models.images import ImageSpec, normalise, preprocess
from models.vision import Run, bucket_for, pad_patches, vision_plan

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
    for name, p in model.named_parameters():
      sharp = any(part in name for part in ("attn.qkv", "q_proj", "k_proj"))  # attention that looks somewhere, so that positions count
      p.add_((0.4 if sharp else 0.1) * torch.randn_like(p))
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
  t = tokenizers.Tokenizer(tokenizers.models.BPE())
  t.normalizer, t.decoder = normalizers.NFC(), decoders.ByteLevel()
  words = tokenizers.Regex(r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+")  # newlines stay together, as in Qwen's and Llama's
  t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
  texts = ["system user assistant You are a helpful assistant. Thought: Action: click(start_box='(12,34)') open the red mug\n\n\n"] * 9
  t.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=360, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
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


# -- tests


def same(got, want, atol):
  assert got.keys() == want.keys()
  for name, value in want.items():
    exact = name == "pixels" or value.dtype.kind == "i"
    np.testing.assert_allclose(got[name], value, rtol=0, atol=0 if exact else atol, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_numbers_are_what_transformers_computes(family):
  with np.load(GOLDEN / family / "expected.npz") as file:
    same(thin(theirs(family)), dict(file), 2e-5)


@pytest.mark.parametrize("size", [(1080, 1920), (720, 1280), (1022, 1522), (100, 37), (28, 28), (5, 300), (31, 2000)])
@pytest.mark.parametrize("patch, numbers", [(14, CLIP), (16, HALF)])
@pytest.mark.parametrize("most", [1280 * 28 * 28, 2_116_800, 20_000])
def test_pixel_values_have_the_bits_of_the_processor(size, patch, numbers, most):
  raw = numbers | {"patch_size": patch, "merge_size": 2, "min_pixels": 3136, "max_pixels": most}
  spec = ImageSpec(patch, 2, 3136, most, tuple(numbers["image_mean"]), tuple(numbers["image_std"]))
  screen = np.random.default_rng(sum(size)).integers(0, 256, (*size, 3)).astype(np.uint8)
  want, ours = Qwen2VLImageProcessorPil(**raw)(images=[screen], return_tensors="np"), preprocess(screen, spec)
  assert want["image_grid_thw"].tolist() == [[1, *ours.grid]] and ours.size == (ours.grid[1] * patch, ours.grid[0] * patch)
  taps = normalise(ours.patches, spec).reshape(-1, 3, 1, patch * patch)
  assert np.array_equal(np.repeat(taps, 2, axis=2).reshape(want["pixel_values"].shape), want["pixel_values"])


@pytest.mark.parametrize("family", FAMILIES)
def test_export_reopens_in_transformers(family, tmp_path):
  """Loaded, halved (exact in bfloat16), exported: no key missing or left over, and transformers computes what our weights say.

  Not doubled: attention would be so sharp that float32 itself moves the logits by more than the tolerance.
  """
  module = {"qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl}[family]
  cfg = vision_language.read_config(GOLDEN / family, module.TOWER)
  params = jax.tree.map(lambda a: a / 2, hf.load(GOLDEN / family, vision_language.leaves(cfg), dtype=jnp.float32))
  hf.export(params, GOLDEN / family, tmp_path / "out")
  _, told = CLASSES[family][1].from_pretrained(tmp_path / "out", output_loading_info=True)
  assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
  want = theirs(family, tmp_path / "out")
  images = [preprocess(s, cfg.images) for s in screens()]
  grids = [i.grid for i in images]
  bucket = bucket_for(grids, cfg.vision)
  rows = np.concatenate([i * bucket.patches // 4 + np.arange(h * w // 4) for i, (h, w) in enumerate(grids)])
  tokens = want["tokens"][None].astype(np.int32)
  slot = np.where(tokens == IMAGE, np.cumsum(tokens == IMAGE) - 1, -1)

  @jax.jit
  def run(params, patches, plan):
    features = vision_language.encode_images(params, cfg, patches, plan, Run())
    vision = Vision(features["embeds"][rows], features["deepstack"][:, rows], slot)
    positions = want["positions"][:, None].astype(np.int32)
    return decoder.logits(params, decoder.forward(params, cfg.text, tokens, positions, np.ones_like(tokens), vision))[0]

  logits = run(params, pad_patches([i.patches for i in images], bucket), vision_plan(grids, cfg.vision, bucket))
  with np.load(GOLDEN / family / "expected.npz") as before:
    assert np.abs(want["logits"][before["logit_rows"]] - before["logits"]).max() > 0.1  # other weights than before
  np.testing.assert_allclose(logits, want["logits"], atol=2e-4 * want["logits"].std())


# The published templates in short: what they do with plain messages, written anew in their own language.
CHATML = (
  "{% for m in messages %}{% if loop.first and default %}<|im_start|>system\n{{ default }}<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n"
  "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
  "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
  "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{% for m in messages %}{% if loop.first %}<|begin_of_text|>{% endif %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""


@pytest.mark.parametrize("name", ["chatml", "qwen2_5_vl", "smollm2", "llama3"])
def test_chats_are_those_of_apply_chat_template(name):
  """Token by token, over three turns, where the text sampled is what the tokenizer would make of it."""
  template = TEMPLATES[name]
  ours = Tokenizer(GOLDEN / "chat", template)
  reference = PreTrainedTokenizerFast(tokenizer_file=str(GOLDEN / "chat" / "tokenizer.json"))
  reference.chat_template = LLAMA3 if name == "llama3" else CHATML
  goal, pages, said = "open the red mug\n", ["a page ", "\n another", "last\n\n"], ["Thought: x\nAction: wait()", "click"]
  images = template.image is not None
  turns = [Turn((1, 1) if images else (0, 0), p, [*ours.encode(t), ours.eos_id] if t else None) for p, t in zip(pages, [*said, None])]
  look = lambda page: [{"type": "image"}, {"type": "text", "text": page}] if images else page
  messages = [{"role": "user", "content": f"Go: {goal}"}]
  for page, text in zip(pages, [*said, None]):
    messages += [{"role": "user", "content": look(page)}] + ([{"role": "assistant", "content": text}] if text else [])
  want = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False, default=template.system)
  assert Chat(ours, "Go: {goal}", 10_000).prompt(goal, turns).tokens.tolist() == list(want)


if __name__ == "__main__":
  write()
