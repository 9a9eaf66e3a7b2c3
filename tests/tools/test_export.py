"""A run's policy as a Hugging Face folder, adapters merged, and the merge on the command line."""

import json
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from core.checkpoint import Checkpointer
from models import decoder, hf, lora
from tools import export

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "text" / "qwen2"


def run(tmp_path, params, **policy):
  """A run's folder as train.py leaves it: config.json and one checkpoint, with more in it than the policy's parameters."""
  workdir = tmp_path / "run"
  workdir.mkdir()
  config = {"agent": {"name": "grpo"}, "env": {}, "policy": {"name": "llama", "checkpoint": str(GOLDEN), **policy}}
  (workdir / "config.json").write_text(json.dumps({"config": config}))
  with Checkpointer(workdir / "checkpoints") as checkpoints:
    states = {"policy": {"params": params, "opt_state": {"mu": jnp.ones(3)}}}
    checkpoints.save(7, {"states": states}, {"facts": {"version": 5}})
  return workdir


def command(monkeypatch, *args):
  monkeypatch.setattr(sys, "argv", ["export", *map(str, args)])
  export.main()


def test_a_run_is_written_over_the_checkpoint_it_began_from(tmp_path, monkeypatch, capsys):
  params = hf.load(GOLDEN, export.leaves(str(GOLDEN)), dtype=jnp.float32)
  params["model"]["norm"]["weight"] = jnp.full(32, 1.5)
  command(monkeypatch, "--workdir", run(tmp_path, params), "--out", tmp_path / "out")
  assert "policy version 5" in capsys.readouterr().out
  old, new = load_file(GOLDEN / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
  assert [k for k in old if not np.array_equal(old[k], new[k])] == ["model.norm.weight"]
  assert (new["model.norm.weight"].astype(np.float32) == 1.5).all()
  assert (tmp_path / "out" / "config.json").read_bytes() == (GOLDEN / "config.json").read_bytes()


def test_adapters_are_merged_into_the_base(tmp_path, monkeypatch):
  knobs = lora.defaults()
  knobs.update({"rank": 1, "alpha": 1.0, "targets": "o_proj"})
  shapes = decoder.abstract(lora.leaves(export.leaves(str(GOLDEN)), knobs))
  ones = jax.tree.map(lambda s: jnp.ones(s.shape), shapes)  # B A is 1 everywhere, alpha / rank is 1
  command(monkeypatch, "--workdir", run(tmp_path, ones, lora=knobs.to_dict()), "--out", tmp_path / "out")
  old, new = load_file(GOLDEN / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
  changed = [k for k in old if not np.array_equal(old[k], new[k])]
  assert sorted(changed) == [f"model.layers.{i}.self_attn.o_proj.weight" for i in range(3)]
  want = (old[changed[0]].astype(np.float32) + 1).astype(old[changed[0]].dtype)
  np.testing.assert_array_equal(new[changed[0]], want)


def test_merge_by_the_command_line(tmp_path, monkeypatch):
  shutil.copytree(GOLDEN, tmp_path / "b")
  command(monkeypatch, "--merge", f"{GOLDEN}=0.5", f"{tmp_path / 'b'}=0.5", "--out", tmp_path / "out")
  assert (tmp_path / "out" / "model.safetensors").read_bytes() == (GOLDEN / "model.safetensors").read_bytes()  # of two equals


@pytest.mark.parametrize(
  ("args", "line"),
  [
    (["--merge", "a", "b=1"], "--merge got 'a', wanted FOLDER=WEIGHT"),
    (["--merge", "a=1"], "wanted two or more"),
    (["--merge", f"{GOLDEN}=0.5", f"{GOLDEN}=0.5", "--step", "0"], "--base and --step say what --workdir is exported with"),
    (["--workdir", "nowhere"], "nowhere/config.json cannot be read"),
  ],
)
def test_what_cannot_be_exported_is_one_line(monkeypatch, capsys, tmp_path, args, line):
  with pytest.raises(SystemExit) as e:
    command(monkeypatch, *args, "--out", tmp_path / "out")
  said = capsys.readouterr().err
  assert e.value.code == 2 and line in said and said.count("\n") == 1


@pytest.mark.parametrize("more", [False, True])
def test_another_base_than_the_run_began_from_is_one_line(monkeypatch, capsys, tmp_path, more):
  """Where the base has tensors that the policy lacks, or lacks one that was learnt, which would be left out of the export."""
  base, params = GOLDEN if more else GOLDEN.parent / "qwen3", hf.load(GOLDEN, export.leaves(str(GOLDEN)), dtype=jnp.float32)
  if more:
    params["model"]["norm"]["bias"] = jnp.ones(32)
  with pytest.raises(SystemExit) as e:
    command(monkeypatch, "--workdir", run(tmp_path, params), "--base", base, "--out", tmp_path / "out")
  said = capsys.readouterr().err
  assert e.value.code == 2 and said.count("\n") == 1 and not (tmp_path / "out").exists()
  assert f"{base} has not the shape of the policy in {tmp_path / 'run'} (" in said
  assert "): give --base=FOLDER, the checkpoint it began from" in said


@pytest.mark.parametrize(
  "policy", [{"lora": 5}, {"lora": {"rank": "x"}}, {"lora": {"rank": 1, "alpha": "a"}}, {"checkpoint": 5}], ids=str
)
def test_a_run_whose_config_was_tampered_with_is_one_line(monkeypatch, capsys, tmp_path, policy):
  with pytest.raises(SystemExit) as e:
    command(monkeypatch, "--workdir", run(tmp_path, {"w": jnp.ones(2)}, **policy), "--out", tmp_path / "out")
  said = capsys.readouterr().err
  assert e.value.code == 2 and said.count("\n") == 1 and f"config.json of {tmp_path}/run has a policy.checkpoint or policy.lora of" in said


def test_the_embedded_policy_has_no_checkpoint_to_follow(tmp_path):
  with pytest.raises(ValueError, match="began from no checkpoint .*--base=FOLDER"):
    export.export_run(str(run(tmp_path, {"w": jnp.ones(2)}, checkpoint="")), str(tmp_path / "out"))
