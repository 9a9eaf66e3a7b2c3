"""The learner on this machine's CPU, as ratios within one run: packing, TRL beside it, saving, and a second start.

  python -m benchmarks.learner [--parts=share,trl,save,start,compiles] [--episodes=4] [--repeats=3]

  share   useful tokens of packed rows on long episodes: prompt 600, 2 to 15 turns of a screenshot (2,691 tokens) and 150 written
  trl     the same episodes with all lengths / 32 through TRL's GRPOTrainer (its loss, its padding, its optimiser; no generation) and
          through the learner's update: useful tokens a second, and the learner's share of the measured matrix peak (MFU)
  save    how long a save keeps the loop waiting, beside a step
  start   seconds from nothing to a compiled update, in a first process and in a second one that finds the first one's programs
  compiles  programs compiled in 50 updates on groups of random lengths, after the first (a small decoder: it is the shapes that count)

A random model of SmolLM2-135M's sizes in float32. Steps are interleaved with the peak's measurement, so a busy machine slows all alike:
ratios are what to read. TRL is optional (requirements-parity.txt). Every line says when it was printed: on two cores all of it takes
a quarter of an hour.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import pathlib
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from agents import dapo
from benchmarks.sampler import SMOLLM2
from core import learner
from core.checkpoint import Checkpointer
from core.host import keep_freed_memory, use_compile_cache
from core.metrics import CompileCounter
from core.optimiser import make_optimiser
from core.pack import PackItem, PackShape, arrange, fit_rows, shape_for, to_batch, useful_share
from core.schema import TokenRecord
from core.state import Batch, TrainState
from models import decoder
from models.config import ModelConfig
from tools.planning.shapes import folder

PROMPT, SCREEN, WRITTEN, TURNS = 600, 2691, 150, (2, 15)
BEGAN = time.perf_counter()
KNOBS = types.SimpleNamespace(lr=1e-6, warmup=0, weight_decay=0.0)


def say(text: str) -> None:
  print(f"[{time.perf_counter() - BEGAN:4.0f} s] {text}", flush=True)


def turns(count: int, seed: int) -> np.ndarray:
  return np.random.default_rng(seed).integers(TURNS[0], TURNS[1] + 1, count)


def share(count: int) -> None:
  """Rows of 65,536 tokens by first-fit-decreasing, beside padding every episode to the longest."""
  length = PROMPT + turns(count, 0) * (SCREEN + WRITTEN)
  rows = len(fit_rows(length.tolist(), 65536))
  packed, padded = length.sum() / (rows * 65536), length.mean() / length.max()
  say(f"useful tokens, {count} episodes: packed {packed:.3f} in {rows} rows of 65,536; padded to the longest {padded:.3f}")


def even(count: int) -> np.ndarray:
  """As many turns as the mix has, one of each of its `count` equal parts: a few episodes that pad as many do."""
  return np.floor(TURNS[0] + (TURNS[1] + 1 - TURNS[0]) * (np.arange(count) + 0.5) / count).astype(int)


# ---- the same episodes, ours and TRL's


@functools.lru_cache(maxsize=1)
def case(count: int, scale: int):
  """(config, episodes, their pushes, random parameters)."""
  cfg = model_config()
  push = np.random.default_rng(3).normal(size=count).astype(np.float32)
  return cfg, episodes(even(count), scale, cfg.vocab), push, begun(cfg)


@functools.lru_cache(maxsize=1)
def warm(count: int, scale: int) -> Ours:
  """Our learner after its first step, which compiles."""
  cfg, records, push, params = case(count, scale)
  ours = Ours(cfg, jax.tree.map(jnp.copy, params), records, push)  # its steps donate them
  say("our learner stands")
  ours.first = ours.step()
  return ours


def model_config() -> ModelConfig:
  with folder("smollm2-135m") as path:
    return ModelConfig.from_hf(path)


def begun(cfg: ModelConfig):
  return jax.jit(lambda key: decoder.init(cfg, key))(jax.random.key(0))


def episodes(many: np.ndarray, scale: int, vocab: int, seed: int = 1) -> list[TokenRecord]:
  """Episodes of so many turns for a text model, with the long ones' lengths divided by `scale`."""
  rng, out = np.random.default_rng(seed), []
  for h in many:
    prompt, seen, wrote = (max(1, round(n / scale)) for n in (PROMPT, SCREEN, WRITTEN))
    is_action = np.concatenate([np.zeros(prompt, bool), *[np.repeat([False, True], [seen, wrote])] * int(h)])
    step = np.concatenate([np.zeros(prompt, np.int32), np.repeat(np.arange(h, dtype=np.int32), seen + wrote)])
    n, none = len(is_action), np.zeros(0, np.int32)
    tokens = rng.integers(3, vocab, n).astype(np.int32)
    out.append(TokenRecord(tokens, is_action, np.zeros(n, np.float32), np.zeros(n, np.int32), step, none, none))
  return out


def built(cfg: ModelConfig):
  """(score, optimiser, update) of a text model."""
  logprobs = lambda p, *args, **kw: decoder.token_logprobs(p, cfg, *args, **kw)
  forward = lambda p, tokens, at, segments, features, slot: decoder.forward(p, cfg, tokens, at, segments)  # keeps all, as TRL's does
  policy = types.SimpleNamespace(encode_images=lambda p, images: None, forward=forward, token_logprobs=logprobs, join=None)
  score, optimiser = learner.make_score(policy), make_optimiser(KNOBS, 1.0, None)[0]
  return score, optimiser, learner.make_update(score, dapo.make(dapo.defaults()).phases[0].loss, optimiser)


class Ours:
  """core.learner's update on packed rows."""

  def __init__(self, cfg: ModelConfig, params, records: list[TokenRecord], push: np.ndarray, shape: PackShape | None = None):
    self.batch = packed(records, push, shape)
    score, optimiser, self.update = built(cfg)
    self.batch = self.batch.replace(behaviour_logp=np.asarray(jax.jit(score)(params, None, self.batch).logp))
    self.state, self.first = TrainState.create(params, optimiser), math.nan  # first: loss of the step that compiled

  def step(self) -> float:
    self.state, out = self.update(self.state, None, (self.batch,), None)
    return float(out["loss"])


def packed(records: list[TokenRecord], push: np.ndarray, shape: PackShape | None = None) -> Batch:
  """shape: None = rows of the length that leaves least over, at most two of the longest record."""
  pushed = [np.where(r.is_action, a, 0).astype(np.float32) for r, a in zip(records, push)]
  at = lambda r: np.arange(len(r), dtype=np.int32)[None]
  items = [PackItem(r, [], at(r), a, r.is_action, i) for i, (r, a) in enumerate(zip(records, pushed))]
  if shape is None:
    length, most = [len(r) for r in records], max(int(r.is_action.sum()) for r in records)
    least = -(-max(length) // 64) * 64
    row = min(range(least, 2 * least + 1, 64), key=lambda n: n * len(fit_rows(length, n)))  # what pack.row_tokens would be set to
    rows = fit_rows(length, row)
    shape = PackShape(len(rows), row, 0, len(records), 1, row_actions=most * max(map(len, rows)))
  return to_batch(items, arrange(items, shape), shape, np.zeros(0, np.uint8))


class Trl:
  """GRPOTrainer's loss on prompts padded on the left and completions padded on the right, and its optimiser."""

  def __init__(self, cfg: ModelConfig, params, records: list[TokenRecord], push: np.ndarray):
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in SMOLLM2.items() if k not in ("architectures", "model_type")}))
    model.load_state_dict({k: torch.tensor(v) for k, v in named(params).items()}, strict=False)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, "a")), eos_token="b", pad_token="b")
    self.folder = tempfile.TemporaryDirectory()
    args = GRPOConfig(
      output_dir=self.folder.name, per_device_train_batch_size=len(records), num_generations=len(records), use_cpu=True, bf16=False,
      gradient_checkpointing=False, learning_rate=KNOBS.lr, report_to=[], max_completion_length=4096, max_grad_norm=1.0,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": ["a"] * len(records)})
    reward = lambda completions, **_: [0.0] * len(completions)
    self.trainer = GRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=data, processing_class=words)
    self.trainer.create_optimizer()
    self.trainer.current_gradient_accumulation_steps = 1
    first = round(PROMPT / FLAGS.scale)  # prompts are all as long; the screens that follow are masked parts of the completion
    wide = max(len(r) for r in records) - first
    pad = lambda a, value=0: np.pad(a, (0, wide - len(a)), constant_values=value)
    stack = lambda rows: torch.tensor(np.stack(rows))
    self.inputs = {
      "prompt_ids": stack([r.tokens[:first].astype(np.int64) for r in records]),
      "prompt_mask": torch.ones(len(records), first, dtype=torch.long),
      "completion_ids": stack([pad(r.tokens[first:].astype(np.int64)) for r in records]),
      "completion_mask": stack([pad(np.ones(len(r) - first, np.int64)) for r in records]),
      "tool_mask": stack([pad(r.is_action[first:].astype(np.int64)) for r in records]),
      "advantages": torch.tensor(push, dtype=torch.float32),
      "num_items_in_batch": torch.tensor(float(sum(int(r.is_action.sum()) for r in records))),
    }
    self.model, self.torch = model.train(), torch

  def step(self) -> float:
    """Two episodes at a time, as wide as the longest of all, gradients added: what its buffered batches are, and what memory holds."""
    total = 0.0
    for at in range(0, len(self.inputs["advantages"]), 2):
      loss = self.trainer._compute_loss(self.model, {k: v[at : at + 2] if v.ndim else v for k, v in self.inputs.items()})
      loss.backward()
      total += float(loss.detach())
    self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
    self.trainer.optimizer.step()
    self.trainer.optimizer.zero_grad()
    return total


def named(params) -> dict[str, np.ndarray]:
  """Our stacked parameters under the checkpoint's names."""
  out = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    if ".layers." in name:
      out |= {name.replace(".layers.", f".layers.{i}."): np.asarray(layer) for i, layer in enumerate(leaf)}
    else:
      out[name] = np.asarray(leaf)
  return out


def useful_flops(cfg: ModelConfig, records: list[TokenRecord]) -> float:
  """Forward and backward of what is learnt from: no padding, causal attention at half, the head at action tokens."""
  a_layer = 2 * cfg.width * cfg.head_dim * (cfg.heads + cfg.kv_heads) + 3 * cfg.width * cfg.mlp
  length = np.array([len(r) for r in records], float)
  actions = sum(int(r.is_action.sum()) for r in records)
  linear, mixing = 2 * cfg.layers * a_layer * length.sum(), 2 * cfg.layers * cfg.heads * cfg.head_dim * (length**2).sum()
  return 3 * (linear + mixing + 2 * actions * cfg.vocab * cfg.width)


def timed(f: Callable) -> float:
  began = time.perf_counter()
  f()
  return time.perf_counter() - began


def peak() -> Callable[[], float]:
  """FLOP/s of a large float32 matrix product, measured when called."""
  n = 2048
  a, product = jnp.ones((n, n)), jax.jit(lambda a: a @ a)
  product(a).block_until_ready()
  return lambda: 2 * n**3 / timed(lambda: product(a).block_until_ready())


def beside_trl(count: int, scale: int, repeats: int) -> None:
  cfg, records, push, params = case(count, scale)
  tokens, longest = sum(map(len, records)), max(map(len, records))
  measured, theirs = peak(), None
  if importlib.util.find_spec("trl") is not None:
    theirs = Trl(cfg, params, records, push)
    say("TRL's trainer stands")
  ours = warm(count, scale)
  say(f"{count} episodes, {tokens:,} tokens, longest {longest}; ours in {ours.batch.tokens.shape} ({useful_share(ours.batch):.3f} useful)"
        f", padded {tokens / (count * longest):.3f}")  # fmt: skip
  say(f"loss of the first step: ours {ours.first:.6f}, TRL {theirs.step() if theirs else math.nan:.6f}")
  seconds: dict[str, list[float]] = {"ours": [], "trl": []}
  peaks = [measured()]
  for _ in range(repeats):
    for name, one in (("ours", ours), ("trl", theirs)):
      if one:
        seconds[name].append(timed(one.step))
        peaks.append(max(measured() for _ in range(3)))
        say(f"{name}: a step in {seconds[name][-1]:.1f} s, peak {peaks[-1] / 1e9:.0f} GFLOP/s")
  best, top = min(seconds["ours"]), max(peaks)
  say(f"ours {best:.2f} s a step, {tokens / best:,.0f} useful tokens a second, MFU {useful_flops(cfg, records) / best / top:.2f} "
        f"of {top / 1e9:.0f} GFLOP/s measured")  # fmt: skip
  if theirs:
    other = min(seconds["trl"])
    say(f"TRL {other:.2f} s a step, {tokens / other:,.0f} useful tokens a second; ours / TRL {other / best:.2f}")


# ---- saving, and a second start


def saving(count: int, scale: int) -> None:
  ours = warm(count, scale)
  step = timed(ours.step)
  say(f"a step in {step:.1f} s")
  with tempfile.TemporaryDirectory() as path, Checkpointer(pathlib.Path(path), keep=1) as checkpoints:
    waits = []
    for i in range(2):
      waits.append(timed(lambda i=i: checkpoints.save(i, {"states": {"policy": ours.state}}, {"facts": {}}, force=True, block=False)))
      whole = timed(checkpoints.wait)
      say(f"a save: the loop waits {waits[-1]:.2f} s, the disk has it {whole:.1f} s later")
  say(f"a save keeps the loop waiting {min(waits):.2f} s, a step takes {step:.2f} s: {min(waits) / step:.1%}")


START = "import sys; from benchmarks import learner; learner.compile_once(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))"


def compile_once(cache: str, count: int, scale: int) -> None:
  use_compile_cache(cache)
  cfg = model_config()
  _, optimiser, update = built(cfg)
  state = jax.eval_shape(lambda key: TrainState.create(decoder.init(cfg, key), optimiser), jax.random.key(0))
  batch = packed(episodes(even(count), scale, cfg.vocab), np.ones(count, np.float32))
  began = time.perf_counter()
  lowered = update.trace(state, None, (batch,), None).lower()
  print(f"{time.perf_counter() - began:.3f} {timed(lowered.compile):.3f}")


def second_start(count: int, scale: int) -> None:
  found = []
  with tempfile.TemporaryDirectory() as cache:
    command = [sys.executable, "-c", START, cache, str(count), str(scale)]
    for _ in range(2):
      out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=900).stdout
      found.append([float(x) for x in out.splitlines()[-1].split()])
      say(f"a start: traced in {found[-1][0]:.2f} s, compiled in {found[-1][1]:.2f} s")
  first, second = (pair[1] for pair in found)
  say(f"compiling the update: first start {first:.2f} s, second, from the cache, {second:.2f} s: {first / second:.1f} times faster "
      f"({sum(found[0]) / sum(found[1]):.1f} times with tracing)")  # fmt: skip


def compile_count(updates: int, count: int, scale: int) -> None:
  """The shape is the loop's own: what any records of an environment with 15 steps fit into."""
  cfg = dataclasses.replace(model_config(), layers=2, vocab=512)
  longest, rng = round(PROMPT / scale) + TURNS[1] * (round(SCREEN / scale) + round(WRITTEN / scale)), np.random.default_rng(4)
  shape = shape_for(count, longest, TURNS[1] * round(WRITTEN / scale), 0, 0, 1)
  ours, push = None, rng.normal(size=count).astype(np.float32)
  with CompileCounter() as compiles:
    found = []
    for i in range(updates + 1):
      records = episodes(turns(count, 11 + i), scale, cfg.vocab, seed=10 + i)
      if ours is None:
        ours = Ours(cfg, begun(cfg), records, push, shape)
      ours.batch = packed(records, push, shape)
      ours.step()
      found.append(compiles.take())
  lengths = f"{count} episodes of {round(PROMPT / scale) + TURNS[0] * round((SCREEN + WRITTEN) / scale)} to {longest} tokens"
  say(f"programs compiled, {updates} updates on {lengths} after the first: {sum(found[1:])} (the first: {found[0]})")


def main(_) -> None:
  keep_freed_memory()
  parts = {
    "share": lambda: share(512), "trl": lambda: beside_trl(FLAGS.episodes, FLAGS.scale, FLAGS.repeats),
    "save": lambda: saving(FLAGS.episodes, FLAGS.scale), "start": lambda: second_start(FLAGS.episodes, FLAGS.scale),
    "compiles": lambda: compile_count(50, FLAGS.episodes, FLAGS.scale),
  }  # fmt: skip
  for part in FLAGS.parts:
    if part not in parts:
      raise SystemExit(f"--parts={part}: there are {', '.join(parts)}")
    parts[part]()


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_list("parts", ["share", "trl", "save", "start", "compiles"], "What is measured.")
  flags.DEFINE_integer("episodes", 4, "Episodes a step.", lower_bound=2)
  flags.DEFINE_integer("scale", 32, "What the long episodes' lengths are divided by.", lower_bound=1)
  flags.DEFINE_integer("repeats", 3, "Steps of each, interleaved; the best counts: first ones get memory from the kernel.", lower_bound=1)
  app.run(main)
