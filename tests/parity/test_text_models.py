"""Llama, SmolLM2, Qwen2 and Qwen3 against transformers in float32, from tiny checkpoints with perturbed norms and biases.

The checkpoints and what transformers says of them stand in tests/golden/text, so that the normal suite compares with the same numbers
without torch. `python tests/parity/test_text_models.py` writes them anew.
"""

import copy
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from models import decoder, hf, lora
from models.config import ModelConfig

pytestmark = pytest.mark.parity
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "text"
LENGTHS, WRITTEN = (24, 17), 12
SIZES = {
  "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
  "intermediate_size": 48, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 1e6}
LLAMA3 = {
  "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
  "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
  "llama": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
  "smollm2": transformers.LlamaConfig(
    **SIZES | {"num_attention_heads": 8}, tie_word_embeddings=True, rope_parameters=DEFAULT | {"rope_theta": 1e5}
  ),
  "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True, rope_parameters=DEFAULT),
  "qwen3": transformers.Qwen3Config(**SIZES, head_dim=12, rope_parameters=DEFAULT),
}
BIASED = transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)  # what neither golden has: biases of o and the MLP


def make(config) -> torch.nn.Module:
  """A model whose numbers are drawn by numpy, bfloat16 exactly: norms around 1, biases around 0, logits of spread 1."""
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
  rng = np.random.default_rng(7)
  for name, p in model.named_parameters():
    drawn = rng.normal(size=tuple(p.shape))
    drawn = 1 + 0.3 * drawn if "norm" in name else 0.4 * drawn if name.endswith("bias") else drawn * p.shape[-1] ** -0.5
    p.data = torch.from_numpy(drawn).bfloat16().float()
  return model


def inputs() -> tuple[np.ndarray, np.ndarray]:
  """Two rows of token ids, the second padded on the right, and which places hold a token."""
  tokens = np.random.default_rng(8).integers(0, SIZES["vocab_size"], (2, max(LENGTHS))).astype(np.int32)
  return tokens, np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]


def reference(model) -> dict[str, np.ndarray]:
  """What transformers says: logits at every token, and how it goes on greedily from the whole of each row."""
  tokens, valid = inputs()
  with torch.no_grad():
    logits = model(torch.from_numpy(tokens).long(), attention_mask=torch.from_numpy(valid).long()).logits.numpy()
    rows = [torch.from_numpy(tokens[i : i + 1, :n]).long() for i, n in enumerate(LENGTHS)]
    settings = {"do_sample": False, "min_new_tokens": WRITTEN, "max_new_tokens": WRITTEN, "pad_token_id": 0}
    greedy = [model.generate(r, attention_mask=torch.ones_like(r), **settings)[0, r.shape[1] :].numpy() for r in rows]
  return {"tokens": tokens, "valid": valid, "logits": logits * valid[..., None], "greedy": np.stack(greedy).astype(np.int32)}


def opened(folder):
  cfg = ModelConfig.from_hf(folder)
  return cfg, hf.load(folder, decoder.leaves(cfg), dtype=jnp.float32)


def save(model, folder):
  copy.deepcopy(model).bfloat16().save_pretrained(folder)  # a copy: .bfloat16() would round the rotary frequencies as well


def ours(folder, tokens, valid) -> np.ndarray:
  cfg, params = opened(folder)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), (1, *tokens.shape))
  hidden = jax.jit(decoder.forward, static_argnames="cfg")(params, cfg, tokens, positions, valid.astype(np.int32))
  return np.asarray(decoder.logits(params, hidden)) * valid[..., None]


@pytest.mark.parametrize("name", FAMILIES)
def test_golden_files_are_what_transformers_says_today(name, tmp_path):
  model = make(FAMILIES[name])
  save(model, tmp_path / "new")
  assert (tmp_path / "new" / "model.safetensors").read_bytes() == (GOLDEN / name / "model.safetensors").read_bytes()
  stored = np.load(GOLDEN / name / "expected.npz")
  for key, value in reference(model).items():
    np.testing.assert_allclose(stored[key], value, atol=2e-5, err_msg=key)
  assert 0.5 < stored["logits"][stored["valid"]].std() < 2  # large enough for 1e-4 to mean something


@pytest.mark.parametrize("name", [*FAMILIES, "biased"])
def test_logits(name, tmp_path):
  model = make({**FAMILIES, "biased": BIASED}[name])
  save(model, tmp_path / "ck")
  want = reference(model)
  np.testing.assert_allclose(ours(tmp_path / "ck", want["tokens"], want["valid"]), want["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_of_the_mean_log_probability(name, tmp_path):
  """The gradient of every parameter, through scan and remat, is torch's."""
  model = make(FAMILIES[name])
  save(model, tmp_path / "ck")
  tokens, valid = inputs()
  logits = model(torch.from_numpy(tokens[:1]).long()).logits
  (-torch.nn.functional.cross_entropy(logits[0, :-1], torch.from_numpy(tokens[0, 1:]).long())).backward()
  cfg, params = opened(tmp_path / "ck")

  def mean(params):
    positions = jnp.arange(tokens.shape[1])[None, None]
    hidden = decoder.forward(params, cfg, tokens[:1], positions, jnp.ones_like(tokens[:1]), remat="full")
    mask = jnp.arange(tokens.shape[1])[None] > 0
    return decoder.token_logprobs(params, cfg, hidden, tokens[:1], mask, tokens.shape[1], chunk=5)[0].sum() / (tokens.shape[1] - 1)

  paths = hf.by_path(jax.jit(jax.grad(mean))(params))
  for key, p in model.named_parameters():
    path, layer = hf.place(key, paths)
    got = paths[path] if layer is None else paths[path][layer]
    np.testing.assert_allclose(got, p.grad.numpy(), atol=2e-5 * max(1.0, float(p.grad.abs().max())), err_msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_opens_in_transformers(name, tmp_path):
  """No missing, unexpected or mismatched key, and the numbers that were exported: weights of training, adapters merged."""
  save(make(FAMILIES[name]), tmp_path / "ck")
  cfg, params = opened(tmp_path / "ck")
  knobs = lora.defaults()
  knobs.rank = 2
  adapters = decoder.init_leaves(lora.leaves(decoder.leaves(cfg), knobs), jax.random.key(0))
  adapters = jax.tree.map(lambda a: a + 0.1, adapters)
  hf.export(lora.merge(params, adapters, knobs), tmp_path / "ck", tmp_path / "out")
  model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
  assert not any(info.values()), info
  tokens, valid = inputs()
  with torch.no_grad():
    want = model(torch.from_numpy(tokens).long(), attention_mask=torch.from_numpy(valid).long()).logits.numpy() * valid[..., None]
  np.testing.assert_allclose(ours(tmp_path / "out", tokens, valid), want, atol=1e-4, rtol=0)
  assert np.abs(want - reference(make(FAMILIES[name]))["logits"]).max() > 0.1  # the adapters were in it


def write() -> None:
  """The golden files: config.json, model.safetensors and expected.npz of every family."""
  for name, config in FAMILIES.items():
    model, folder = make(config), GOLDEN / name
    save(model, folder)
    for extra in set(folder.iterdir()) - {folder / "config.json", folder / "model.safetensors"}:
      extra.unlink()
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw, indent=1, sort_keys=True) + "\n")
    np.savez_compressed(folder / "expected.npz", **reference(model))


if __name__ == "__main__":
  sys.exit(write())
