"""A run of train.py on a checkpoint that transformers wrote, exported: transformers opens it and computes what the run's policy says."""

import json

import jax
import ml_collections
import numpy as np
import pytest
import test_vl_models as reference
import tiny_checkpoints
import torch

import evaluate
import train
from core import config as config_lib
from core.checkpoint import Checkpointer
from tools import export

pytestmark = pytest.mark.parity


@pytest.fixture
def folder(tmp_path):
  """A tiny Qwen2.5-VL of transformers' own making with the chat tokenizer's ids, every weight random."""
  path = tmp_path / "ck"
  path.mkdir()
  tiny_checkpoints.folder(path, "qwen2_5_vl")
  raw = json.loads((path / "config.json").read_text())
  cls, model_cls, _ = reference.CLASSES["qwen2_5_vl"]
  torch.manual_seed(1)
  model = model_cls(cls(**raw))
  with torch.no_grad():
    for p in model.parameters():
      p.add_(0.1 * torch.randn_like(p))
  model.to(torch.float32).save_pretrained(path)
  (path / "generation_config.json").unlink(missing_ok=True)
  return path


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 4])  # 0: all parameters
def test_a_trained_policy_reopens_in_transformers(folder, tmp_path, rank):
  knobs = {
    "policy.checkpoint": folder, "policy.instruction": folder / "instruction.txt", "policy.max_prompt": 180, "policy.max_action": 40,
    "policy.mode": "window", "policy.screens": 1, "policy.lr": 1e-2, "policy.lora.rank": rank, "copy.when": "always", "copy.updates": 3,
    "copy.demonstrations": 2, "copy.batch": 4, "practice.leash_batch": 4, "practice.updates": 1, "practice.groups": 1, "practice.rounds": 1,
    "practice.slots": 2, "agent.group_size": 2, "agent.minibatch": 28, "agent.dynamic_sampling": False, "eval.tries": 1, "eval.every": 0,
    "env.held_out_tasks": 1, "env.practice_tasks": 1, "env.in_domain_tasks": 1, "gate.known_good": 0, "gate.do_nothing": 0,
    "sampler.sessions.chunks": (64,), "sampler.sessions.spans": (220,), "compile_cache": tmp_path / "cache",
  }  # fmt: skip
  workdir, out = tmp_path / "run", tmp_path / "out"
  assert (
    train.main(["train.py", "--config=configs/android.py", f"--workdir={workdir}", *(f"--config.{k}={v}" for k, v in knobs.items())]) == 0
  )
  export.export_run(str(workdir), str(out))
  model, told = reference.CLASSES["qwen2_5_vl"][1].from_pretrained(out, output_loading_info=True)
  assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
  assert {p.name for p in out.iterdir()} == {p.name for p in folder.iterdir()}
  world = evaluate.build(ml_collections.ConfigDict(config_lib.read_config(workdir)))
  with Checkpointer(workdir / "checkpoints") as checkpoints:
    target = {"states": {"policy": {"params": jax.eval_shape(world.policy.init, jax.random.key(0))}}}
    params = checkpoints.restore(target, partial=True)[0]["states"]["policy"]["params"]
  params = world.policy.join(world.base(), params) if rank else params
  ids = np.random.default_rng(0).integers(0, 300, (1, 40)).astype(np.int32)
  at = np.broadcast_to(np.arange(40, dtype=np.int32), (3, 1, 40))
  ours = np.asarray(world.policy.logits(params, world.policy.forward(params, ids, at, np.ones_like(ids), *nothing(world.policy, params))))
  given = torch.from_numpy(ids.astype(np.int64))
  text = torch.zeros_like(given, dtype=torch.int32)
  with torch.no_grad():
    say = lambda model: model.eval()(input_ids=given, mm_token_type_ids=text).logits.numpy()
    theirs, before = say(model), say(reference.CLASSES["qwen2_5_vl"][1].from_pretrained(folder))
  np.testing.assert_allclose(ours, theirs, atol=1e-4 * theirs.std())
  assert np.abs(theirs - before).max() > 0.1  # it was trained


def nothing(policy, params):
  """Features of no screenshot, and slots that ask for none."""
  features = policy.encode_images(params, np.zeros_like(policy.image(np.zeros((160, 96, 3), np.uint8)))[None])
  return features, np.full((1, 40), -1, np.int32)
