"""int8 weights in the sampler beside full ones: tokens a second, policy/mismatch_kl and success, in one table (lesson chapter 4).

  python -m benchmarks.lighter --checkpoint=runs/smollm2/SmolLM2-135M-Instruct --workdir=runs/android [--tries=4]

--checkpoint: a text model's folder (tools/smollm2.py): how fast it writes, and how far what it writes about the simulated phone's tasks is
from what the learner's weights say of the same tokens. --workdir: a finished run of the tiny policy, whose held-out success is measured
with full and with rounded weights, as it was copied (before practice) and as it ended (after). Either may be left out. The tiny policy has
no programs of its own for int8: its linear maps are rounded as models/int8.py rounds and stand there as floats, which are the same numbers.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import evaluate
from benchmarks import sampler as sampling
from configs import android
from core.learner import make_score
from core.state import Weights
from models import decoder, hf, int8
from models.base import Policy
from models.config import ModelConfig
from rollout import feed, scoring
from rollout.sessions import SessionSampler

NAMES = ("full", "int8")


def lighter(policy: Policy) -> Policy:
  return policy._replace(name=f"{policy.name} int8", unstack=lambda params: int8.lighter(policy.unstack(params)))


def speed(folder: str, slots: int, calls: int) -> dict[str, dict[str, float]]:
  """Tokens a second of one session and of `slots`, and MiB of weights that a token reads."""
  cfg = ModelConfig.from_hf(folder)
  params = hf.load(folder, decoder.leaves(cfg), dtype=jnp.float32)
  full = sampling.text_policy(cfg, 40)
  policies, out = {"full": full, "int8": lighter(full)}, {name: {} for name in NAMES}
  for name, policy in policies.items():
    held = jax.eval_shape(policy.unstack, params)
    out[name]["MiB"] = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(held)) / 2**20
  for n in (1, slots):
    seconds = sampling.fastest({name: sampling.decoding(policy, params, n) for name, policy in policies.items()}, calls)
    for name in NAMES:
      out[name][f"tokens/s, {n}"] = 8 * n / seconds[name]
  return out


def mismatch(folder: str, template: str, count: int) -> dict[str, dict[str, float]]:
  """policy/mismatch_kl (agents/objective.py) of answers to the phone's first screens, as the learner's weights score them."""
  cfg = android.get_config()
  known = {"checkpoint": folder, "template": template, "max_prompt": 1000, "max_action": 24, "remat": "none"}
  cfg.update({"env": {"text": True}, "policy": known})
  world, prompts = evaluate.build(cfg), []
  env = world.make_env(True)
  for task in world.tasks["held_out"][:count]:
    obs, _ = env.reset(options={"task": task})
    prompts.append(world.policy.prompt(obs["goal"], [obs["screenshot"]], obs["text"]))
  env.close()
  params = world.start(jax.random.key(0))
  keys = np.random.default_rng(0).integers(0, 2**32, (count, 2), np.uint32)
  return {name: {"mismatch_kl": _written(p, world.policy, params, prompts, keys)}
          for name, p in (("full", world.policy), ("int8", lighter(world.policy)))}  # fmt: skip


def _written(policy: Policy, learner: Policy, params, prompts: list, keys: np.ndarray) -> float:
  s = SessionSampler(policy, len(prompts), (1024,), chunks=(512,))
  s.load(Weights(params, 0))
  outs = s.act(prompts, keys)
  s.close()
  longest = max(len(p.tokens) + len(o.tokens) for p, o in zip(prompts, outs))
  tokens, segments = (np.zeros((len(prompts), longest), np.int32) for _ in range(2))
  written, said = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, np.float32)
  for i, (p, o) in enumerate(zip(prompts, outs)):
    n, end = len(p.tokens), len(p.tokens) + len(o.tokens)
    tokens[i, :n], tokens[i, n:end], segments[i, :end] = p.tokens, o.tokens, 1
    written[i, n:end], said[i, n:end] = True, o.logp

  @jax.jit
  def score(params):
    at = np.broadcast_to(np.arange(longest, dtype=np.int32), (1, *tokens.shape))
    hidden = learner.forward(params, tokens, at, segments, learner.encode_images(params, None), None)
    return learner.token_logprobs(params, hidden, tokens, written, learner.max_action)[0]

  return kl(np.asarray(score(params))[written], said[written])


def kl(learner_N: np.ndarray, sampler_N: np.ndarray) -> float:
  """policy/mismatch_kl of log-probabilities: the mean of exp(d) - 1 - d, d the learner's minus the sampler's."""
  d = np.asarray(learner_N, np.float64) - sampler_N
  return float(np.mean(np.expm1(d) - d))


def success(workdir: str, tries: int) -> tuple[dict[str, dict[str, float]], int]:
  """Held-out success of a run's tiny policy, copied and at its end, from full and from rounded weights, and how far the rounded one's
  tokens are from the learner's. Also episodes a score."""
  out: dict[str, dict[str, float]] = {name: {} for name in NAMES}
  for when, which in (("before", "copied"), ("after", "")):
    subject = evaluate.load(f"{workdir}:{which}" if which else workdir)
    if subject.world.policy.name != "tiny":
      raise ValueError(f"--workdir={workdir} is a run of {subject.world.policy.name}, wanted one of the tiny policy")
    for name in NAMES:
      params = subject.weights.params
      weights = Weights(tiny_rounded(params) if name == "int8" else params, subject.weights.version)
      episodes = evaluate.run(subject.world, weights, evaluate.HELD_OUT, tries, 0, subject.cfg.practice.slots)
      out[name] |= {f"success {when}": float(np.mean([e.success for e in episodes])), f"phone's kl {when}": drift(subject, episodes)}
  return out, len(episodes)


def tiny_rounded(params: dict) -> dict:
  """The tiny policy's parameters with the linear maps of its layers rounded to int8."""

  def restored(weight: jax.Array) -> jax.Array:
    lighter = int8.rounded(weight)
    return lighter["int8"].astype(jnp.float32) * lighter["scale"][..., None]

  layers = {i: {k: restored(v) if k.endswith("_proj") else v for k, v in layer.items()} for i, layer in params["layers"].items()}
  return params | {"layers": layers}


def drift(subject: evaluate.Subject, episodes: list) -> float:
  """policy/mismatch_kl of episodes under the run's own weights."""
  policy, tasks = subject.world.policy, subject.world.tasks["held_out"]
  shape = feed.shapes(policy, [256], tasks, 0)[256]
  blank = np.zeros_like(policy.image(np.zeros(subject.world.screen_shape, np.uint8)))
  score = jax.jit(make_score(policy))
  items = [item for e in episodes for item in scoring.plain_items(e, policy)]
  ask = lambda batch: score(subject.weights.params, None, batch).logp
  found = scoring.score_records(items, shape, blank, {"logp": ask})
  pairs = [(f["logp"][i.record.is_action], i.record.logp[i.record.is_action]) for f, i in zip(found, items)]
  return kl(*(np.concatenate(side) for side in zip(*pairs)))


def table(rows: dict[str, dict[str, float]]) -> str:
  names = list(rows["full"])
  lines = ["| weights | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
  show = lambda name, x: f"{100 * x:.1f}%" if name.startswith("success") else f"{x:.2g}" if "kl" in name else f"{x:.1f}"
  return "\n".join([*lines, *(f"| {w} | " + " | ".join(show(n, row[n]) for n in names) + " |" for w, row in rows.items())])


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unknown argument {argv[1]!r}")
  if not FLAGS.checkpoint and not FLAGS.workdir:
    raise app.UsageError("give --checkpoint=FOLDER, --workdir=RUN or both")
  rows: dict[str, dict[str, float]] = {name: {} for name in NAMES}
  parts = []
  if FLAGS.checkpoint:
    parts += [speed(FLAGS.checkpoint, FLAGS.slots, FLAGS.calls), mismatch(FLAGS.checkpoint, FLAGS.template, FLAGS.prompts)]
  if FLAGS.workdir:
    scores, episodes = success(FLAGS.workdir, FLAGS.tries)
    parts.append(scores)
  for part in parts:
    for name in NAMES:
      rows[name] |= part[name]
  print(f"float32 on {jax.devices()[0].device_kind}" + (f"; {episodes} held-out episodes a score" if FLAGS.workdir else ""))
  print(table(rows), flush=True)


FLAGS = flags.FLAGS
if __name__ == "__main__":
  flags.DEFINE_string("template", "smollm2", "how its prompts are written, policy.template (docs/policies.md)")
  flags.DEFINE_string("checkpoint", "", "a text model's folder (tools/smollm2.py)")
  flags.DEFINE_string("workdir", "", "a finished run of the tiny policy on simulated computers")
  flags.DEFINE_integer("tries", 4, "tries a held-out task", lower_bound=1)
  flags.DEFINE_integer("slots", 16, "sessions side by side", lower_bound=2)
  flags.DEFINE_integer("prompts", 8, "first screens that the checkpoint answers", lower_bound=1)
  flags.DEFINE_integer("calls", 10, "repetitions of what is timed, the fastest counts", lower_bound=1)
  app.run(main)
