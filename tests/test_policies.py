"""Checkpoints in miniature behind train.py, as a user brings them: trained, cut and resumed, with adapters, on text, exported; and every
folder that is broken is one line before anything begins."""

import json
import os
import pathlib
import re
import shlex
import shutil

import jax
import ml_collections
import numpy as np
import pytest
import tiny_checkpoints
from safetensors.numpy import load_file, save_file

import evaluate
import policies
import train
from core import config as config_lib
from core.checkpoint import read_numpy
from core.metrics import read_jsonl
from core.optimiser import make_optimiser
from core.schema import Action
from envs.sim import base as sim_base
from envs.sim import tasks as sim_tasks
from models import checkpoint, hf
from rollout import feed
from tools import export

pytestmark = pytest.mark.usefixtures("compile_quickly", "small_world")
SMALL = {
  "practice.updates": 2, "practice.groups": 2, "practice.rounds": 1, "practice.slots": 3, "practice.clip_norm": 10.0, "agent.group_size": 3,
  "agent.minibatch": 6, "agent.dynamic_sampling": False, "eval.tries": 1, "eval.every": 0, "env.held_out_tasks": 1, "env.practice_tasks": 2,
  "env.in_domain_tasks": 1, "env.popup_chance": 0.0, "save.every": 1, "save.keep": 20, "copy.updates": 2, "copy.demonstrations": 1,
  "copy.batch": 2, "practice.leash_batch": 2, "policy.max_prompt": 180, "policy.max_action": 5, "policy.lr": 1e-2, "policy.remat": "none",
  "sampler.sessions.chunks": (64,), "sampler.sessions.steps": 4, "sampler.sessions.spans": (185,),
  "gate.known_good": 0, "gate.do_nothing": 0, "compile_cache": os.environ["JAX_COMPILATION_CACHE_DIR"],
}  # fmt: skip


@pytest.fixture(scope="module")
def small_world():
  """A phone or a desktop on which every text is an action, three or four steps long, passed by chance: random weights write nothing that
  is read, and would never be compared nor asked a second time."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sim_base.actions, "parse", lambda text, grammar, *a, **k: Action("wait", {"size": len(text)}, {}, grammar))
    patch.setattr(
      sim_base.SimEnv, "_act", lambda self, action: setattr(self.app, "total", action.args["size"] + vars(self.app).get("total", 0))
    )
    patch.setattr(sim_base.SimEnv, "_check", lambda self: self.steps >= 3 and self.app.total % 2 == 0)
    patch.setattr(sim_tasks, "STEP_LIMIT", dict.fromkeys(sim_tasks.STEP_LIMIT, 4))
    yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """Checkpoint folders by family, made once."""
  path = tmp_path_factory.mktemp("checkpoints")
  return {family: pathlib.Path(tiny_checkpoints.with_weights(path / family, family)) for family in ("qwen2_5_vl", "qwen3_vl", "llama")}


def command(folder, workdir, config="configs/android.py", **changed):
  knobs = SMALL | {"policy.checkpoint": folder, "policy.instruction": folder / "instruction.txt"}
  changed = {k.replace("__", "."): v for k, v in changed.items()}
  if changed.get("copy.when") != "always":
    knobs = {k: v for k, v in knobs.items() if not k.startswith(("copy.", "practice.leash"))}
  knobs |= changed
  return ["train.py", f"--config={config}", f"--workdir={workdir}", *(f"--config.{k}={v}" for k, v in knobs.items())]


def newest(workdir):
  return max((p for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()), key=lambda p: int(p.name))


def learnt(workdir):
  """The policy's parameters in the newest checkpoint, by name."""
  front = "states/policy/params/"
  return {k.removeprefix(front): v for k, v in read_numpy(newest(workdir)).items() if k.startswith(front)}


def tree_of(named):
  """Nested dicts of arrays by name."""
  out = {}
  for name, x in named.items():
    *path, last = name.split("/")
    at = out
    for key in path:
      at = at.setdefault(key, {})
    at[last] = x
  return out


@pytest.fixture(scope="module")
def straight(folders, small_world, compile_quickly, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("straight") / "run"
  assert train.main(command(folders["qwen2_5_vl"], workdir)) == 0
  return workdir


def test_a_checkpoint_is_trained_on_whole_episodes(straight, folders):
  """Every parameter that an episode uses moved; what the sampler said of its tokens over several steps is what the trainer says; nothing
  was copied; a prompt is prefilled once."""
  rows = read_jsonl(straight / "metrics.jsonl")
  assert len(rows) == 2 and all(row["episodes/steps"] >= 3 for row in rows) and any(row["groups/mixed"] > 0 for row in rows)
  for row in rows:
    assert abs(row["policy/mismatch_kl"]) < 1e-5 and row["episodes/age_max"] == 0 and len(row) <= 60
    assert row["rate/prefill_amplification"] <= 1.05
  tree = checkpoint.leaves(str(folders["qwen2_5_vl"]))
  before, after = hf.load(folders["qwen2_5_vl"], tree), learnt(straight)
  named = {"/".join(path): np.asarray(x) for path, x in hf.by_path(before).items()}
  assert named.keys() == after.keys() and not (straight / "copied").exists()
  still = [name for name in named if np.array_equal(named[name], after[name])]
  assert not [name for name in still if not name.endswith("k_proj/bias")], still  # a bias of keys moves no softmax but by rounding


@pytest.fixture
def unmeasured(monkeypatch):
  """A run without its evaluations, which take most of the time here."""
  monkeypatch.setattr(evaluate, "measure", lambda *a: None)
  monkeypatch.setattr(train, "conclude", lambda *a: None)


class Killed(BaseException):
  """Not an Exception: nothing in the loop may catch it, as nothing catches kill -9."""


def test_a_run_that_died_goes_on_bit_for_bit(straight, folders, tmp_path, monkeypatch, unmeasured):
  """In its last update; without evaluations, which leave no trace in what is learnt."""
  real, calls = feed.Feed.credited, []

  def dies(*args, **kwargs):
    calls.append(1)
    if len(calls) == 2:
      raise Killed
    return real(*args, **kwargs)

  argv = command(folders["qwen2_5_vl"], tmp_path / "run")
  with monkeypatch.context() as patch:
    patch.setattr(feed.Feed, "credited", dies)
    with pytest.raises(Killed):
      train.main(argv)
  assert train.main(argv) == 0
  first, second = learnt(straight), learnt(tmp_path / "run")
  assert first.keys() == second.keys()
  for name in first:
    np.testing.assert_array_equal(first[name], second[name], err_msg=name)
  plain = lambda workdir: [
    {k: v for k, v in row.items() if not k.startswith(("time/", "rate/"))} for row in read_jsonl(workdir / "metrics.jsonl")
  ]
  assert plain(straight) == plain(tmp_path / "run")


def test_adapters_alone_are_learnt_on_what_can_be_read_and_merged(folders, tmp_path, monkeypatch, unmeasured):
  """A Llama on the phone's text: demonstrations copied, then practice, each update compiled once. Checkpoints hold adapters only; the
  export differs from the folder where adapters are, and its forward pass is that of base and adapters together."""
  made, make = [], train.make_update
  monkeypatch.setattr(train, "make_update", lambda *a, **knobs: made.append(make(*a, **knobs)) or made[-1])
  folder, workdir = folders["llama"], tmp_path / "run"
  more = {"env__text": True, "copy__when": "always", "policy__max_prompt": 300, "policy__max_action": 40, "policy__lora__rank": 2,
          "sampler__sessions__spans": (340,), "practice__updates": 1}  # fmt: skip
  assert train.main(command(folder, workdir, **more)) == 0
  assert [update._cache_size() for update in made] == [1, 1]
  (row,) = read_jsonl(workdir / "metrics.jsonl")
  assert abs(row["policy/mismatch_kl"]) < 1e-5 and row["episodes/steps"] >= 3
  adapters = learnt(workdir)
  assert adapters and all(name.endswith(("lora_a", "lora_b")) for name in adapters)
  assert all(np.abs(x).max() > 0 for x in adapters.values())
  assert not [n for n in read_numpy(newest(workdir)) if "embed_tokens" in n]
  export.export_run(str(workdir), str(tmp_path / "out"))
  old, new = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
  assert old.keys() == new.keys()
  changed = sorted({name.split(".", 3)[-1] for name in old if not np.array_equal(old[name], new[name])})
  assert changed == sorted(f"{part}.weight" for part in ("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.k_proj",
                                                         "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"))  # fmt: skip
  world = evaluate.build(ml_collections.ConfigDict(config_lib.read_config(workdir)))
  together = world.policy.join(world.base(), tree_of(adapters))
  merged = hf.load(tmp_path / "out", checkpoint.leaves(str(folder)))
  ids = np.arange(1, 40, dtype=np.int32)[None]
  say = lambda params: world.policy.logits(params, world.policy.forward(params, ids, ids[None], np.ones_like(ids), None, None))
  np.testing.assert_allclose(say(together), say(merged), atol=1e-4)
  assert np.abs(np.asarray(say(merged)) - np.asarray(say(world.base()))).max() > 1e-2
  shutil.copytree(folder, tmp_path / "ck")
  (workdir / "config.json").write_text((workdir / "config.json").read_text().replace(str(folder), str(tmp_path / "ck")))
  weights(lambda t: t["model.norm.weight"].fill(2))(tmp_path / "ck")
  for read in (evaluate.load, lambda run: export.export_run(run, str(tmp_path / "again"))):
    with pytest.raises(ValueError, match=f"ck holds other weights than {workdir} began from: put those back, or begin anew"):
      read(str(workdir))
  assert train.main(command(tmp_path / "ck", workdir, **more | {"policy__instruction": folder / "instruction.txt"})) == 2
  weights(lambda t: t.update(load_file(folder / "model.safetensors")))(tmp_path / "ck")
  weights(lambda t: t["model.layers.1.mlp.up_proj.weight"].__setitem__((-1, -1), np.inf))(tmp_path / "ck")
  with pytest.raises(ValueError, match="ck/model.safetensors: tensor model.layers.1.mlp.up_proj.weight holds NaN or infinity"):
    evaluate.load(str(workdir))  # evaluate.py, before it starts a computer


def test_the_last_screens_on_a_desktop_in_the_points_of_the_family(folders, tmp_path, unmeasured):
  """Qwen3-VL counts to 1000, and the desktop takes that; of four screenshots two stay, so an episode becomes several records."""
  argv = command(folders["qwen3_vl"], tmp_path / "run", "configs/osworld.py:agent=grpo", policy__mode="window", policy__screens=2,
                 practice__updates=1, policy__lora__rank=1, policy__lora__targets="q_proj")  # fmt: skip
  assert train.main(argv) == 0
  (row,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
  assert abs(row["policy/mismatch_kl"]) < 1e-5 and row["episodes/steps"] >= 3


# -- what cannot be run


def weights(change):
  def do(folder):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

  return do


def config(change):
  def do(folder):
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))

  return do


def cut(folder):
  whole = (folder / "model.safetensors").read_bytes()
  (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def gone(name):
  return lambda folder: (folder / name).unlink()


BROKEN = {
  "missing": (
    weights(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")), ["ck/model.safetensors lacks tensor model.layers.1.mlp.up_proj.weight"],
  ),
  "index": (
    lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": 5}}'),
    ["model.safetensors.index.json: weight_map has 5 for tensor model.norm.weight"],
  ),
  "tower": (config(lambda c: c["vision_config"].update(depth="x")), ["ck/config.json: vision_config.depth is 'x', wanted a whole number"]),
  "extra": (weights(lambda t: t.update(odd=np.zeros(2, np.float32))), ["model.safetensors: tensor odd has no place"]),
  "shape": (weights(lambda t: t.update({"model.norm.weight": np.zeros(3, np.float32)})), ["tensor model.norm.weight", "[3]", "[32]"]),
  "cut": (cut, ["model.safetensors is truncated"]),
  "family": (config(lambda c: c.update(model_type="mamba")), ["config.json: model_type is 'mamba'", "qwen2_5_vl"]),
  "field": (config(lambda c: c["text_config"].pop("rms_norm_eps")), ["config.json lacks rms_norm_eps"]),
  "no tokenizer": (gone("tokenizer.json"), ["has no tokenizer.json"]),
  "broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"), ["tokenizer.json is no tokenizer that can be read"]),
  "no weights": (gone("model.safetensors"), ["holds no *.safetensors"]),
  "no preprocessor": (gone("preprocessor_config.json"), ["has no preprocessor_config.json"]),
  "broken preprocessor": (lambda folder: (folder / "preprocessor_config.json").write_text("{"), ["preprocessor_config.json is not JSON"]),
  "frames": (
    config(lambda c: c["vision_config"].update(temporal_patch_size=4)), ["temporal_patch_size is 2 in preprocessor_config.json and 4 in"],
  ),
  "preprocessor of another kind": (
    lambda folder: (folder / "preprocessor_config.json").write_text("[1]"), ["preprocessor_config.json: all that it holds is [1], wanted"],
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_folder_is_one_line_before_anything_is_made(folders, tmp_path, capsys, name):
  change, says = BROKEN[name]
  shutil.copytree(folders["qwen2_5_vl"], tmp_path / "ck")
  change(tmp_path / "ck")
  assert train.main(command(tmp_path / "ck", tmp_path / "run", policy__instruction=folders["llama"] / "instruction.txt")) == 2
  said = capsys.readouterr().err
  assert said.count("\n") == 1 and all(s in said for s in says) and "Traceback" not in said
  assert not (tmp_path / "run").exists()


REFUSED = [
  ("llama", "android.py", {"sampler__sessions__slots": 10**9, "env__text": True}, "lower sampler.sessions.slots"),
  ("qwen2_5_vl", "android.py", {"policy__checkpoint": "no/such"}, "no/such: there is no such folder"),
  ("qwen2_5_vl", "android.py", {"policy__dtype": "float16"}, "policy.dtype is 'float16', wanted one of float32, bfloat16"),
  ("qwen2_5_vl", "android.py", {"policy__attention": "flash"}, "policy.attention is 'flash'"),
  ("qwen2_5_vl", "android.py", {"policy__lora__rank": -1}, "policy.lora.rank"),
  ("qwen2_5_vl", "android.py", {"policy__lora__rank": 2, "policy__lora__targets": "none"}, "lora.targets 'none' fits none"),
  (
    "qwen2_5_vl",
    "android.py",
    {"policy__template": "smollm2"},
    "policy.template is 'smollm2', which a qwen2_5_vl checkpoint has no use for",
  ),
  ("llama", "android.py", {"policy__min_pixels": 9}, "policy.min_pixels is 9, which a llama checkpoint has no use for"),
  ("llama", "android.py", {"policy__features_kept": 9}, "policy.features_kept is 9, which a llama checkpoint has no use for"),
  ("qwen2_5_vl", "android.py", {"policy__features_kept": -1}, "policy.features_kept is -1, wanted 0 (off) or more"),
  ("llama", "android.py", {}, "reads text, no screenshots: give --config.env.text=True"),
  ("qwen2_5_vl", "android.py", {"policy__max_prompt": 60}, "does not fit into 60"),
  ("qwen2_5_vl", "android.py", {"policy__lr": 0.0}, "policy.lr is 0.0"),
  ("qwen2_5_vl", "android.py", {"sampler__sessions__spans": (64,)}, "sampler.sessions.spans end at 64"),
  ("qwen2_5_vl", "android.py", {"sampler__sessions__on_load": "drop"}, "sampler.sessions.on_load is 'drop', wanted keep or rebuild"),
  ("qwen2_5_vl", "android.py", {"sampler__endpoints": ("http://127.0.0.1:1",)}, "sampler.endpoints with policy.checkpoint"),
  ("qwen2_5_vl", "android.py", {"policy__moment": "float16"}, "policy.moment is 'float16'"),
  ("qwen2_5_vl", "android.py", {"copy__when": "later"}, "copy.when is later"),
  ("qwen2_5_vl", "android.py", {"policy__lora__rank": 2, "policy__lora__alpha": "inf"}, "policy.lora.rank, alpha are 2, inf"),
  ("qwen2_5_vl", "android.py", {"policy__lora__rank": 17}, "policy.lora.rank is 17, wanted at most 16"),
  ("qwen2_5_vl", "android.py", {"policy__lora__alpha": 8.0}, "policy.lora.alpha is 8.0 and would do nothing, there are no adapters"),
  ("qwen2_5_vl", "android.py", {"policy__lora__targets": "q_proj"}, "policy.lora.targets is 'q_proj' and would do nothing"),
  ("qwen2_5_vl", "android.py", {"policy__max_goal": 9}, "policy.max_goal is 9 and would do nothing, only critics of steps"),
  (
    "llama",
    "android.py",
    {"env__text": True, "policy__max_prompt": 300, "sampler__sessions__spans": (305,), "sampler__sessions__images_kept": 9},
    "sampler.sessions.images_kept is 9 and would do nothing, llama reads text",
  ),
  ("qwen2_5_vl", "android.py", {"policy__screens": 2}, "policy.screens is 2 and would do nothing, policy.mode=append keeps all"),
  ("qwen2_5_vl", "android.py", {"policy__master": False}, "policy.master is False and would do nothing, what learns is float32"),
  ("qwen2_5_vl", "android.py", {"policy__features_kept": 9}, "policy.features_kept is 9 and would do nothing, the tower learns"),
  (
    "qwen2_5_vl",
    "android.py",
    {"policy__freeze_tower": True, "policy__lora__rank": 2, "policy__lora__targets": "visual.*attn"},
    "policy.freeze_tower is on, and policy.lora.targets 'visual.*attn' finds maps of the tower",
  ),
  ("qwen2_5_vl", "android.py", {"policy__attention": "splash"}, "'splash', a kernel for a TPU, and this process has a CPU: wanted auto"),
  ("qwen2_5_vl", "android.py", {"policy__attention": "cudnn"}, "'cudnn', a kernel for a GPU, and this process has a CPU: wanted auto"),
  ("qwen2_5_vl", "android.py", {"policy__instruction": "no/such.txt"}, "policy.instruction is no/such.txt, which cannot be read as text"),
  ("qwen2_5_vl", "android.py", {"policy__space": "miles"}, "policy.space is 'miles', wanted one of 'resized'"),
  ("qwen2_5_vl", "android.py", {"policy__system": "Do {goal}."}, "policy.system has {goal} in it, which nothing fills"),
  (
    "qwen3_vl",
    "android.py",
    {"policy__freeze_tower": True, "policy__remat_tower": "full"},
    "policy.remat_tower is 'full' and would do nothing, the tower is frozen",
  ),
  (
    "qwen3_vl",
    "android.py",
    {"policy__lora__rank": 2, "policy__remat_tower": "full"},
    "policy.remat_tower is 'full' and would do nothing, the tower is frozen",
  ),
  ("qwen2_5_vl", "android.py", {"practice__lr": 1e-4}, "--config.practice.lr would do nothing, policy.lr takes its place for a checkpoint"),
  ("qwen2_5_vl", "android.py", {"sampler__sessions__steps": 10**9}, "sampler.sessions.steps is 1000000000, wanted 1 or more, at most 185"),
  ("qwen2_5_vl", "android.py", {"pack__row_tokens": 10**9}, "pack.row_tokens is 1000000000, wanted at most 16777216"),
  ("qwen3_vl", "android.py", {"policy__system": "<|image_pad|>"}, "policy.system has <|image_pad|> in it, which stands for a screenshot"),
  ("qwen2_5_vl", "android.py", {"policy__min_pixels": 10**6}, "policy.min_pixels is 1000000, more than the 60000 that max_pixels of"),
  ("qwen2_5_vl", "android.py", {"sampler__sessions__spans": ("a",)}, "sampler.sessions.spans is ('a',), wanted one or more lengths"),
  ("qwen2_5_vl", "android.py", {"sampler__sessions__chunks": (64, 256)}, "sampler.sessions.chunks is (64, 256), wanted whole numbers of 1"),
  ("qwen2_5_vl", "android.py:agent=digirl", {}, "agent digirl does not learn from policy.checkpoint"),
  (
    "qwen2_5_vl",
    "android.py:agent=ppo",
    {"policy__lora__rank": 2, "agent__pretrain_updates": 1},
    "a critic of tokens needs policy.lora.rank=0",
  ),
]


@pytest.mark.parametrize("family, name, changed, says", REFUSED, ids=[r[3][:40] for r in REFUSED])
def test_what_does_not_go_together_is_one_line(folders, tmp_path, capsys, family, name, changed, says):
  argv = command(folders[family], tmp_path / "run", f"configs/{name}", **changed)
  known = train.base.compose("x", name.partition("agent=")[2] or "grpo", "sim/phone").agent
  argv = [a for a in argv if not a.startswith("--config.agent.") or a.removeprefix("--config.agent.").partition("=")[0] in known]
  assert train.main(argv) == 2
  said = capsys.readouterr().err
  assert said.count("\n") == 1 and says in said and not (tmp_path / "run").exists()


DOCS = (pathlib.Path(train.__file__).parent / "docs" / "policies.md").read_text()
COMMANDS = re.findall(r"^python (train\.py .*)", re.sub(r"\\\n\s*| +#.*", "", DOCS), re.MULTILINE)
FAMILY = {"UI-TARS-1.5-7B": "qwen2_5_vl", "Qwen2.5-VL-3B-Instruct": "qwen2_5_vl", "SmolLM2-135M-Instruct": "llama"}


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_of_the_page_are_taken(folders, tmp_path, line):
  """With the checkpoint that a command names, in miniature and of its length."""
  cfg, flags = config_lib.load_config(shlex.split(line))
  train.base.check(cfg, flags["overrides"])
  shutil.copytree(folders[FAMILY[pathlib.Path(cfg.policy.checkpoint).name]], tmp_path / "ck")
  config(lambda c: c.get("text_config", c).update(max_position_embeddings=128_000))(tmp_path / "ck")
  with cfg.unlocked():
    cfg.policy.checkpoint = str(tmp_path / "ck")
  assert evaluate.build(cfg).policy.max_prompt == cfg.policy.max_prompt and len(COMMANDS) == 3


def test_adams_first_moment_is_halved_of_adapters_too():
  knobs = checkpoint.defaults()
  knobs.update({"moment": "bfloat16"})
  knobs.lora.rank = 2
  knobs.checkpoint = "folder"
  cfg = train.base.loop_defaults().practice
  optimiser, _ = make_optimiser(cfg, 1.0, None, **policies.stepped(knobs))
  state = optimiser.init({"lora_a": np.zeros(3, np.float32)})
  adam = next(part for part in jax.tree.leaves(state, is_leaf=lambda part: hasattr(part, "mu")) if hasattr(part, "mu"))
  assert (adam.mu["lora_a"].dtype, adam.nu["lora_a"].dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize("program", ["train", "evaluate"])
def test_a_device_without_memory_is_one_line_and_other_errors_keep_their_traceback(folders, tmp_path, capsys, monkeypatch, program):
  too_much = lambda *a: jax.block_until_ready(jax.numpy.zeros(2**46))

  def wrong(*a):
    raise jax.errors.JaxRuntimeError("INTERNAL: a mistake of ours")

  def run(does):
    if program == "train":
      monkeypatch.setattr(train, "train", does)
      return train.main(command(folders["qwen2_5_vl"], tmp_path / "run"))
    with pytest.raises(SystemExit) as e, monkeypatch.context() as patch:
      patch.setattr(config_lib.app, "run", lambda main, flags_parser: does())
      config_lib.run_command(evaluate.main)
    return e.value.code

  assert run(too_much) == 1
  said = capsys.readouterr().err
  assert said.count("\n") == 1 and "the device has no memory left (Out of memory allocating 281474976710656 bytes): lower agent.m" in said
  with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
    run(wrong)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_checkpoint_whose_numbers_are_none_is_refused_before_a_computer_starts(folders, tmp_path, capsys, monkeypatch, rank):
  """Whether its parameters are learnt, or the base that adapters join."""
  shutil.copytree(folders["llama"], tmp_path / "ck")
  weights(lambda t: t["model.layers.1.mlp.up_proj.weight"].__setitem__((3, 5), np.nan))(tmp_path / "ck")
  monkeypatch.setattr(evaluate, "computers", lambda *a: pytest.fail("computers were started"))
  more = {"env__text": True, "policy__max_prompt": 300, "policy__max_action": 40, "sampler__sessions__spans": (340,)}
  assert train.main(command(tmp_path / "ck", tmp_path / "run", policy__lora__rank=rank, **more)) == 2
  said = capsys.readouterr().err
  assert said.count("\n") == 1 and "ck/model.safetensors: tensor model.layers.1.mlp.up_proj.weight holds NaN or infinity" in said
