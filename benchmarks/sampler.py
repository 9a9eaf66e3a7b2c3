"""The session sampler against transformers on the same machine, weights and work: episodes that come back with a longer prompt every step.

  python -m benchmarks.sampler --checkpoint=runs/smollm2/SmolLM2-135M-Instruct [--sessions=16] [--steps=10] [--append=300] [--write=40]

Every step appends random ids to each episode and samples as many tokens as asked, in float32. `anew` is transformers' generate over the
whole prompts, as trainers call it; `carried` is the same with its cache handed from step to step, which works only as all prompts have one
length. Neither returns log-probabilities, ours does. Steps are interleaved, so a busy machine slows all alike; ratios are what to read.
Without --checkpoint the weights are random and the sizes SmolLM2-135M's. transformers is optional (requirements-parity.txt).
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import tempfile
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from core.host import keep_freed_memory
from core.state import Weights
from models import decoder, hf
from models.base import Policy, Prompt
from models.config import ModelConfig
from rollout import engine
from rollout.sessions import SessionSampler

SMOLLM2 = {
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30,
  "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
  "rope_theta": 100000.0, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
}  # fmt: skip


def text_policy(cfg: ModelConfig, most: int) -> Policy:
  """A policy of ids alone, which nothing but its length ends."""
  return Policy(**dict.fromkeys(Policy._fields))._replace(
    unstack=decoder.unstack,
    tokenizer=types.SimpleNamespace(eos_id=-1), tokens_per_image=0, max_action=most,
    encode_images=lambda params, images: jnp.zeros((0, cfg.width)),
    init_cache=lambda batch, size: decoder.init_cache(cfg, batch, size),
    prefill=lambda params, tokens, at, valid, features, image_slot, cache: decoder.prefill(params, cfg, tokens, at, valid, cache),
    decode_step=lambda params, token, position, cache: decoder.decode_step(params, cfg, token, cache),
    logits=decoder.logits,
  )  # fmt: skip


def prompt_of(ids: np.ndarray) -> Prompt:
  return Prompt(ids, np.arange(len(ids), dtype=np.int32)[None], np.zeros(0, np.int32), np.zeros((0, 0), np.uint8), len(ids))


class Ours:
  def __init__(self, policy: Policy, params, sessions: int, steps: int, append: int, write: int):
    places = -(-steps * (append + write) // 256) * 256
    spans = sorted({max(512, -(-places * part // 1024) * 256) for part in (1, 2, 3)} | {max(512, places)})
    chunk = min(512, -(-(append + 1) // 16) * 16)  # a step's new tokens are those appended and the last one written
    self.sampler = SessionSampler(policy, sessions, spans, chunks=(chunk,))
    self.sampler.load(Weights(params, 0))
    self.sampler.warm_up(prompt_of(np.zeros(1, np.int32)))

  def step(self, ids: np.ndarray, h: int) -> np.ndarray:
    keys = np.random.default_rng(h).integers(0, 2**32, (len(ids), 2), np.uint32)
    outs = self.sampler.act([prompt_of(row) for row in ids], keys, list(range(len(ids))))
    return np.stack([out.tokens for out in outs])


class Transformers:
  """generate, with or without its cache from the step before."""

  def __init__(self, model, write: int, carried: bool):
    self.model, self.write, self.carried, self.cache = model, write, carried, None

  def step(self, ids: np.ndarray, h: int) -> np.ndarray:
    import torch
    from transformers import DynamicCache

    if self.cache is None or not self.carried:
      self.cache = DynamicCache(config=self.model.config)
    given = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
      out = self.model.generate(
        given, attention_mask=torch.ones_like(given), past_key_values=self.cache, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        min_new_tokens=self.write, max_new_tokens=self.write, pad_token_id=0,
      )  # fmt: skip
    held, wanted = self.cache.get_seq_length(), out.shape[1] - 1
    if held != wanted:
      raise RuntimeError(f"transformers' cache holds {held} tokens, wanted {wanted}: it was not carried on")
    return out[:, ids.shape[1] :].numpy().astype(np.int32)


def transformers_model(folder: str, params, cfg: ModelConfig):
  """The checkpoint in transformers, or a model of its shape with our random weights."""
  import torch
  from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

  if folder:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
  with tempfile.TemporaryDirectory() as temp:
    theirs, ours = pathlib.Path(temp) / "theirs", pathlib.Path(temp) / "ours"
    LlamaForCausalLM(LlamaConfig(**{k: v for k, v in SMOLLM2.items() if k not in ("architectures", "model_type")})).save_pretrained(theirs)
    hf.export(params, theirs, ours)
    return AutoModelForCausalLM.from_pretrained(ours, dtype=torch.float32).eval()


def compare(parties: dict, sessions: int, steps: int, append: int, write: int, vocab: int) -> dict[str, float]:
  """Seconds each party took for all steps after the first, which compiles or warms. Each goes on from what it wrote itself."""
  rng, seconds = np.random.default_rng(0), dict.fromkeys(parties, 0.0)
  ids = {name: np.zeros((sessions, 0), np.int32) for name in parties}
  for h in range(steps):
    new, took = rng.integers(0, vocab, (sessions, append)).astype(np.int32), {}
    cpu: dict[str, float] = {}
    for name, party in parties.items():
      ids[name] = np.concatenate([ids[name], new], axis=1)
      began, cpu_began = time.perf_counter(), time.process_time()
      written = party.step(ids[name], h)
      took[name], cpu[name] = time.perf_counter() - began, time.process_time() - cpu_began
      seconds[name] += took[name] * (h > 0)
      assert written.shape == (sessions, write), f"{name} wrote {written.shape}, wanted {(sessions, write)}"
      ids[name] = np.concatenate([ids[name], written], axis=1)
    print(f"step {h + 1} of {steps}: " + ", ".join(f"{name} {s:.1f} s ({cpu[name]:.1f} CPU)" for name, s in took.items()), flush=True)
  return seconds


def fastest(works: dict, calls: int) -> dict[str, float]:
  """Seconds of each work's fastest call, after one that may compile; interleaved."""
  best = dict.fromkeys(works, float("inf"))
  for call in range(calls + 1):
    for name, work in works.items():
      began = time.perf_counter()
      work()
      best[name] = min(best[name], time.perf_counter() - began if call else float("inf"))
  return best


def decoding(policy: Policy, params, slots: int):
  """A call that writes 8 tokens in each slot behind 64 others."""
  e = engine.Engine(policy, slots, (128,), (64,), 8, (-1,), 1.0)
  own, full = e.own(params), lambda value: np.full(slots, value, np.int32)

  def call():
    e.cache = e.cache._replace(length=jnp.asarray(full(64)), next_position=jnp.asarray(full(64)))
    e.decode(own, full(1), full(0), full(8), np.ones(slots, bool), np.ones((slots, 2), np.uint32), 64)

  return call


def small_measurements(policy: Policy, params, vocab: int, slots: int, calls: int) -> dict[str, float]:
  """What decoding alone takes of the machine's bandwidth, and what log-probabilities cost."""
  matrix, product = jnp.ones((2 * vocab, 1024), jnp.float32), jax.jit(lambda m, v: m @ v)
  multiply = lambda: product(matrix, matrix[0]).block_until_ready()
  seconds = fastest({"decode": decoding(policy, params, 1), "product": multiply}, calls)
  step, weights = seconds["decode"] / 8, sum(a.nbytes for a in jax.tree.leaves(params))
  out = {"decode_1/tokens_per_second": 1 / step, "decode_1/bandwidth_share": (weights / step) / (matrix.nbytes / seconds["product"])}
  with_, without = decoding(policy, params, slots), decoding(policy._replace(name="no log-probabilities"), params, slots)
  with_()
  draw, engine.draw = engine.draw, draw_only
  without()  # traced here
  engine.draw = draw
  seconds = fastest({"with": with_, "without": without}, calls)
  return out | {"logprob_cost": seconds["with"] / seconds["without"] - 1}


def draw_only(logits, key, index, temperature):
  """engine.draw without log-probabilities, to see what they cost."""
  draw = lambda key, index, logits: jax.random.categorical(jax.random.fold_in(key, index), logits)
  token = jax.vmap(draw)(key, index, logits / temperature).astype(jnp.int32)
  return token, jnp.zeros(token.shape), jnp.zeros(token.shape)


def show(values: dict[str, float]) -> None:
  for name, value in values.items():
    print(f"{name:40s} {value:.4g}", flush=True)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unknown argument {argv[1]!r}")
  keep_freed_memory()  # as train.py does; it holds for torch's memory, too
  size = (FLAGS.sessions, FLAGS.steps, FLAGS.append, FLAGS.write)
  cfg = ModelConfig.from_hf(FLAGS.checkpoint) if FLAGS.checkpoint else ModelConfig.from_dict(SMOLLM2)
  params = hf.load(FLAGS.checkpoint, decoder.leaves(cfg), dtype=jnp.float32) if FLAGS.checkpoint else decoder.init(cfg, jax.random.key(0))
  print(f"{FLAGS.checkpoint or 'random weights of the shape of SmolLM2-135M'}, float32, on {jax.devices()[0].device_kind}")
  print("{} sessions, {} steps that append {} tokens and write {}".format(*size), flush=True)
  policy, parties = text_policy(cfg, FLAGS.write), {}
  parties["ours"] = ours = Ours(policy, params, *size)
  if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
    model = transformers_model(FLAGS.checkpoint, params, cfg)
    parties |= {"anew": Transformers(model, FLAGS.write, False), "carried": Transformers(model, FLAGS.write, True)}
  compiled = ours.sampler.engine.compiled
  seconds = compare(parties, *size, cfg.vocab)
  counts, out = ours.sampler.counts, {}
  written = FLAGS.sessions * (FLAGS.steps - 1) * FLAGS.write
  for name, s in seconds.items():
    out[f"tokens_per_second/{name}"] = written / s
    out[f"ratio/{name}"] = s / seconds["ours"]
  out["compiles_after_warm_up"] = ours.sampler.engine.compiled - compiled
  out["prefill_amplification"] = counts.amplification
  out["prefill_amplification_with_padding"] = counts.padded / counts.new
  parties.clear()
  ours.sampler.close()
  show(out)
  small = small_measurements(policy, params, cfg.vocab, FLAGS.sessions, FLAGS.calls)
  show(small)
  out |= small
  if FLAGS.out:
    pathlib.Path(FLAGS.out).write_text(json.dumps({"size": size, "checkpoint": FLAGS.checkpoint} | out, indent=1) + "\n")


FLAGS = flags.FLAGS
if __name__ == "__main__":
  flags.DEFINE_string("checkpoint", "", "a text model's folder (tools/smollm2.py); empty: random weights")
  flags.DEFINE_string("out", "", "a JSON file for the numbers")
  flags.DEFINE_integer("sessions", 16, "episodes side by side", lower_bound=1)
  flags.DEFINE_integer("steps", 10, "steps an episode, 2 at least: the first is not timed", lower_bound=2)
  flags.DEFINE_integer("append", 300, "new prompt tokens a step", lower_bound=1)
  flags.DEFINE_integer("write", 40, "tokens sampled a step", lower_bound=1)
  flags.DEFINE_integer("calls", 10, "repetitions of the small measurements", lower_bound=1)
  app.run(main)
