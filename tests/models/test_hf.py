"""Checkpoint folders in and out: byte-equal, in either prefix style, in shards, over devices; one line for each that is broken.

Forced CPU devices need a fresh process: this file is also the script that it runs.
"""

import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from core import mesh as mesh_lib
from models import decoder, hf
from models.config import ModelConfig

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "text"


def leaves(folder):
  return decoder.leaves(ModelConfig.from_hf(folder))


@pytest.fixture
def folder(tmp_path):
  """A copy of the golden qwen2 checkpoint (tied, biases, bfloat16), with a tokenizer's file beside it."""
  shutil.copytree(GOLDEN / "qwen2", tmp_path / "ck")
  (tmp_path / "ck" / "tokenizer.json").write_text("{}")
  return tmp_path / "ck"


def rewrite(folder, change):
  """The folder's one file with change(tensors) in it."""
  tensors = load_file(folder / "model.safetensors")
  change(tensors)
  save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def split(folder):
  """The folder as two shards with an index, in the newer prefix style."""
  tensors = {"model.language_model." + k.removeprefix("model."): v for k, v in load_file(folder / "model.safetensors").items()}
  (folder / "model.safetensors").unlink()
  files = {k: f"model-0000{1 + ('layers.1' in k)}-of-00002.safetensors" for k in tensors}
  for file in set(files.values()):
    save_file({k: v for k, v in tensors.items() if files[k] == file}, folder / file, {"format": "pt"})
  (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))


@pytest.mark.parametrize("name", ["llama", "smollm2", "qwen2", "qwen3"])
def test_a_checkpoint_comes_out_as_it_went_in(name, tmp_path):
  params = hf.load(GOLDEN / name, leaves(GOLDEN / name))
  assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))
  hf.export(params, GOLDEN / name, tmp_path / "out")
  for file in (GOLDEN / name).iterdir():
    assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def test_shards_and_the_other_prefix_are_read_and_written_again(folder, tmp_path):
  want = hf.load(folder, leaves(folder))
  split(folder)
  (folder / "pytorch_model.bin").write_bytes(b"stale weights")
  got = hf.load(folder, leaves(folder))
  jax.tree.map(np.testing.assert_array_equal, got, want)
  hf.export(got, folder, tmp_path / "out")
  files = {f.name for f in folder.iterdir()} - {"pytorch_model.bin"}
  assert {f.name for f in (tmp_path / "out").iterdir()} == files and len(files) == 6
  assert all((tmp_path / "out" / f).read_bytes() == (folder / f).read_bytes() for f in files)


def test_trained_numbers_are_written_in_the_dtype_of_the_file(folder, tmp_path):
  """Float32 parameters of a bfloat16 checkpoint: 1.01 becomes 1.0078125, the nearest bfloat16 (steps of 2 ** -7 above 1)."""
  params = hf.load(folder, leaves(folder), dtype=jnp.float32)
  params["model"]["layers"]["mlp"]["up_proj"]["weight"] = params["model"]["layers"]["mlp"]["up_proj"]["weight"].at[2].set(1.01)
  hf.export(params, folder, tmp_path / "out")
  old, new = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
  changed = [k for k in old if not np.array_equal(old[k], new[k])]
  assert changed == ["model.layers.2.mlp.up_proj.weight"] and (new[changed[0]].astype(np.float32) == 1.0078125).all()


def test_a_tied_head_that_is_stored_as_well_follows_the_embedding_and_tables_stay(folder, tmp_path):
  def add(t):
    t["lm_head.weight"] = t["model.embed_tokens.weight"]
    t["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.arange(4, dtype=np.float32)

  rewrite(folder, add)
  params = hf.load(folder, leaves(folder))
  assert "lm_head" not in params
  params["model"]["embed_tokens"]["weight"] += 1
  hf.export(params, folder, tmp_path / "out")
  new = load_file(tmp_path / "out" / "model.safetensors")
  np.testing.assert_array_equal(new["lm_head.weight"], new["model.embed_tokens.weight"])
  np.testing.assert_array_equal(new["lm_head.weight"], params["model"]["embed_tokens"]["weight"])
  np.testing.assert_array_equal(new["model.layers.0.self_attn.rotary_emb.inv_freq"], np.arange(4))


def drop(t):
  t.pop("model.layers.1.mlp.up_proj.weight")


def extra(t):
  t["model.layers.3.mlp.up_proj.weight"] = t["model.layers.2.mlp.up_proj.weight"].copy()


def stranger(t):
  t["model.layers.1.self_attn.q_norm.weight"] = t["model.norm.weight"].copy()


def reshape(t):
  t["model.layers.1.mlp.up_proj.weight"] = t["model.layers.1.mlp.up_proj.weight"].T.copy()


def whole(t):
  t["model.norm.weight"] = np.ones(32, np.int8)


def sick(t):
  t["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan


def endless(t):
  t["model.norm.weight"][7] = -np.inf


def twin(t):
  t["model.language_model.norm.weight"] = t["model.norm.weight"].copy()


def counted(t):
  t["model.layers.01.mlp.up_proj.weight"] = t["model.layers.1.mlp.up_proj.weight"].copy()


def squared(t):
  t["model.layers.\u00b2.mlp.up_proj.weight"] = t["model.layers.1.mlp.up_proj.weight"].copy()


def own_head(t):
  t["lm_head.weight"] = t["model.embed_tokens.weight"].copy()
  t["lm_head.weight"][-1, -1] += 1


BROKEN = {
  "tensor model.norm.weight is the same part as model.language_model.norm.weight of model.safetensors": twin,
  "tensor model.layers.01.mlp.up_proj.weight has no place": counted,
  "tensor model.layers.\u00b2.mlp.up_proj.weight has no place": squared,
  "tensor lm_head.weight differs from model.embed_tokens.weight, and config.json's tie_word_embeddings says": own_head,
  "model.safetensors: tensor model.layers.1.mlp.up_proj.weight holds NaN or infinity": sick,
  "model.safetensors: tensor model.norm.weight holds NaN or infinity": endless,
  "model.safetensors lacks tensor model.layers.1.mlp.up_proj.weight": drop,
  "model.safetensors: tensor model.layers.3.mlp.up_proj.weight has no place in the model": extra,
  "model.safetensors: tensor model.layers.1.self_attn.q_norm.weight has no place in the model": stranger,
  "model.safetensors: tensor model.layers.1.mlp.up_proj.weight is BF16 [32, 48], wanted a float of [48, 32]": reshape,
  "model.safetensors: tensor model.norm.weight is I8 [32], wanted a float of [32]": whole,
}


@pytest.mark.parametrize("line", BROKEN)
def test_tensors_that_do_not_fit_are_named(folder, line):
  rewrite(folder, BROKEN[line])
  with pytest.raises(ValueError) as e:
    hf.load(folder, leaves(folder))
  assert line in str(e.value) and str(folder) in str(e.value) and "\n" not in str(e.value)


def test_mixed_dtypes_need_a_word(folder):
  rewrite(folder, lambda t: t.update({"model.layers.1.mlp.up_proj.weight": t["model.layers.1.mlp.up_proj.weight"].astype(np.float32)}))
  with pytest.raises(ValueError, match=r"layers of model.layers.mlp.up_proj.weight have dtypes \['BF16', 'F32'\]; give load a dtype"):
    hf.load(folder, leaves(folder))
  assert hf.load(folder, leaves(folder), dtype=jnp.float32)["model"]["layers"]["mlp"]["up_proj"]["weight"].dtype == jnp.float32


def truncate(folder):
  file = next(folder.glob("*1-of-*"))
  file.write_bytes(file.read_bytes()[:-100])
  return "00001-of-00002.safetensors is truncated or not a safetensors file"


def lose(folder):
  next(folder.glob("*2-of-*")).unlink()
  return "00002-of-00002.safetensors is missing, and the checkpoint's index names it"


def lie(folder):
  index = folder / "model.safetensors.index.json"
  raw = json.loads(index.read_text())
  raw["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
  index.write_text(json.dumps(raw))
  return "holds tensor model.norm.weight, and it does not"


def garble(folder):
  (folder / "model.safetensors.index.json").write_text("[]")
  return "model.safetensors.index.json: all that it holds is [], wanted an object"


def pairs(folder):
  """What dict() would take."""
  index = folder / "model.safetensors.index.json"
  raw = json.loads(index.read_text())
  index.write_text(json.dumps(raw | {"weight_map": list(raw["weight_map"].items())}))
  return "model.safetensors.index.json: weight_map is [["


def no_map(folder):
  (folder / "model.safetensors.index.json").write_text("{}")
  return "model.safetensors.index.json: weight_map is None, wanted an object"


def a_folder(folder):
  """Passed over, two shards would be read as if no index had come with them."""
  (folder / "model.safetensors.index.json").unlink()
  (folder / "model.safetensors.index.json").mkdir()
  return "model.safetensors.index.json is no file"


def a_pipe(folder):
  """A read of it would never end."""
  shard = next(folder.glob("*2-of-*"))
  shard.unlink()
  os.mkfifo(shard)
  return "00002-of-00002.safetensors is no file"


def mapped(change):
  def do(folder):
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    line = change(raw["weight_map"])
    index.write_text(json.dumps(raw))
    return line

  return do


@mapped
def number(files):
  files["model.language_model.norm.weight"] = 5
  return "index.json: weight_map has 5 for tensor model.language_model.norm.weight, wanted the name of a *.safetensors file"


@mapped
def elsewhere(files):
  files["model.language_model.norm.weight"] = "../ck/model-00001-of-00002.safetensors"
  return "index.json: weight_map has '../ck/model-00001-of-00002.safetensors' for tensor model.language_model.norm.weight"


@mapped
def blank(files):
  files.clear()
  return "index.json: weight_map is empty, wanted every tensor with its file"


@mapped
def unlisted(files):
  del files["model.language_model.layers.1.mlp.up_proj.weight"]
  return "2-of-00002.safetensors: tensor model.language_model.layers.1.mlp.up_proj.weight is in no entry of"


def unheld(folder):
  """Neither in a shard nor in the index."""
  unlisted(folder)
  shard = next(folder.glob("*2-of-*"))
  save_file({k: v for k, v in load_file(shard).items() if not k.endswith("layers.1.mlp.up_proj.weight")}, shard, {"format": "pt"})
  return "model.safetensors.index.json lacks tensor model.layers.1.mlp.up_proj.weight"


def double(folder):
  shutil.copy(next(folder.glob("*1-of-*")), folder / "model-00003.safetensors")
  (folder / "model.safetensors.index.json").unlink()
  return "stands in model-00001-of-00002.safetensors too"


def empty(folder):
  for file in folder.glob("*.safetensors*"):
    file.unlink()
  return "holds no *.safetensors file"


@pytest.mark.parametrize("breaking", [
  truncate, lose, lie, garble, pairs, no_map, a_folder, a_pipe, number, elsewhere, blank, unlisted, unheld, double, empty,
])  # fmt: skip
def test_files_that_are_broken_are_named(folder, breaking):
  tree = leaves(folder)
  split(folder)
  line = breaking(folder)
  with pytest.raises(ValueError) as e:
    hf.load(folder, tree)
  assert line in str(e.value) and str(folder) in str(e.value) and "\n" not in str(e.value)


def test_an_export_that_cannot_be_written_is_one_line_and_leaves_nothing(folder, tmp_path):
  params = hf.load(folder, leaves(folder))
  with pytest.raises(ValueError, match="exists already"):
    hf.export(params, folder, folder)
  (tmp_path / "link").symlink_to(tmp_path / "gone")
  with pytest.raises(ValueError, match="link exists already"):
    hf.export(params, folder, tmp_path / "link")
  (tmp_path / "link").unlink()
  with pytest.raises(ValueError, match=f"{folder}/out is inside {folder}, which is copied to it"):
    hf.export(params, folder, folder / "out")
  wide = jax.tree.map(lambda a: jnp.zeros((*a.shape, 2)), params)
  with pytest.raises(ValueError, match=r"tensor \S+ is \[.*\] in the source, the parameters have"):
    hf.export(wide, folder, tmp_path / "out")
  with pytest.raises(ValueError, match="has no tensor for parameter lora_a; merge adapters"):
    hf.export(params | {"lora_a": jnp.ones(2)}, folder, tmp_path / "out")
  with pytest.raises(ValueError, match="is not among the parameters to export"):
    hf.export({"model": params["model"] | {"norm": {}}}, folder, tmp_path / "out")
  assert [p.name for p in tmp_path.iterdir()] == ["ck"]


def test_merge_is_the_weighted_sum(folder, tmp_path):
  """Every tensor 0.25 a + 0.75 b in float32, rounded once; the norm by hand: 0.25 * 1 + 0.75 * 3 = 2.5."""
  shutil.copytree(folder, tmp_path / "other")
  rewrite(folder, lambda t: t.update({"model.norm.weight": np.full(32, 1, ml_dtypes.bfloat16)}))
  rewrite(tmp_path / "other", lambda t: t.update({k: (3 if k == "model.norm.weight" else 1) + 0 * v for k, v in t.items()}))
  hf.merge([folder, tmp_path / "other"], [0.25, 0.75], tmp_path / "out")
  a, new = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
  assert (new["model.norm.weight"].astype(np.float32) == 2.5).all()
  want = (0.25 * a["model.layers.1.mlp.up_proj.weight"].astype(np.float32) + 0.75).astype(ml_dtypes.bfloat16)
  np.testing.assert_array_equal(new["model.layers.1.mlp.up_proj.weight"], want)
  with pytest.raises(ValueError, match="wanted two or more, a weight each, adding up to 1"):
    hf.merge([folder, tmp_path / "other"], [0.5, 0.6], tmp_path / "more")
  with pytest.raises(ValueError, match="adding up to 1"):
    hf.merge([folder, tmp_path / "other"], [float("nan"), float("nan")], tmp_path / "more")
  for name in (folder, tmp_path / "other"):
    rewrite(name, lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}))
  with pytest.raises(ValueError, match="tensor model.norm.weight is I8: only floats can be merged"):
    hf.merge([folder, tmp_path / "other"], [0.5, 0.5], tmp_path / "more")
  with pytest.raises(ValueError, match="differ in tensor .*: only checkpoints of one shape"):
    hf.merge([folder, GOLDEN / "qwen3"], [0.5, 0.5], tmp_path / "more")


class Slices:
  """A safetensors file, or a tensor of it, as hf reads it: `read` hears the bytes of every slice."""

  def __init__(self, inner, read):
    self.inner, self.read = inner, read

  def get_slice(self, name):
    return Slices(self.inner.get_slice(name), self.read)

  def __getitem__(self, index):
    part = self.inner[index]
    self.read.append(part.nbytes)
    return part


def main(folder):
  """8 devices, fsdp 4 x tensor 2: what was read and how it is spread, and logits and gradients against one device."""
  cfg = ModelConfig.from_hf(folder)
  tree = decoder.leaves(cfg)
  mesh = mesh_lib.make({**mesh_lib.defaults(), "tensor": 2})
  read, real, located = [], hf._open, hf.locate(folder, tree)
  hf.locate, hf._open = lambda *_: located, lambda file: Slices(real(file), read)
  spread = hf.load(folder, tree, dtype=jnp.float32, shardings=mesh_lib.shardings(decoder.abstract(tree), mesh))
  hf._open = real
  one = hf.load(folder, tree, dtype=jnp.float32)
  tokens = np.random.default_rng(0).integers(0, cfg.vocab, (4, 16)).astype(np.int32)
  at, segments = np.broadcast_to(np.arange(16), (1, 4, 16)), np.ones((4, 16), np.int32)

  def loss(params, tokens):
    hidden = decoder.forward(params, cfg, tokens, at, segments, remat="dots")
    logp, entropy = decoder.token_logprobs(params, cfg, hidden, tokens, np.arange(16)[None] + 0 * tokens > 0, 15, chunk=20)
    return logp.sum() / 60, logp

  run = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (_, logp), grads = run(one, tokens)
  rows = jax.device_put(tokens, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp")))
  (_, logp_8), grads_8 = run(spread, rows)
  gap = lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max() / max(np.abs(np.asarray(a)).max(), 1e-30))
  print(
    json.dumps(
      {
        "logp": gap(logp, logp_8),
        "grads": max(jax.tree.leaves(jax.tree.map(gap, grads, grads_8))),
        "read": sum(read),
        "stored": sum(x.size for x in jax.tree.leaves(one)) * 2,  # bfloat16
        "largest": max(read) * 2,  # as float32
        "shard": spread["model"]["layers"]["mlp"]["up_proj"]["weight"].addressable_shards[0].data.nbytes,
        "leaf": one["model"]["layers"]["mlp"]["up_proj"]["weight"].nbytes,
        "table": one["model"]["embed_tokens"]["weight"].nbytes,
      }
    )
  )


def test_eight_devices_hold_an_eighth_each_and_say_the_same():
  """Every byte is read once, even of what all devices hold; in float32 1e-6 of the largest number, as in tests/losses."""
  env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
  env["PYTHONPATH"] = str(pathlib.Path(__file__).parents[2])
  done = subprocess.run([sys.executable, __file__, str(GOLDEN / "llama")], env=env, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr[-3000:]
  out = json.loads(done.stdout.splitlines()[-1])
  assert out["logp"] < 2e-6 and out["grads"] < 1e-5, out
  assert out["read"] == out["stored"] and out["shard"] * 8 == out["leaf"]
  assert out["largest"] <= out["table"] // 8  # a shard of the largest tensor, the embeddings: the host never held more at once


def test_a_header_is_kept_as_it_stands(folder, tmp_path):
  """Metadata and order of the source's header: what other readers saw in the file they will see again."""
  hf.export(hf.load(folder, leaves(folder)), folder, tmp_path / "out")
  data = (tmp_path / "out" / "model.safetensors").read_bytes()
  size = struct.unpack("<Q", data[:8])[0]
  assert json.loads(data[8 : 8 + size])["__metadata__"] == {"format": "pt"}


if __name__ == "__main__":
  main(sys.argv[1])
