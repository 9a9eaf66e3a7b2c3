"""Answers as a judge, for env.judge of form yes_no: one that tools/train_judge.py trained, or a text checkpoint as it is.

  python -m tools.serve_judge --workdir=runs/android --port=8001
  python -m tools.serve_judge --checkpoint=runs/smollm2/SmolLM2-135M-Instruct --template=smollm2 --port=8001
  python train.py ... --config.env.judge.kind=endpoint --config.env.judge.base_url=http://127.0.0.1:8001/v1
      --config.env.judge.model=trained --config.env.judge.form=yes_no

It listens on 127.0.0.1 only, as tools/serve.py, whose --key_env it has. POST /v1/chat/completions with the task and screens as
envs/judges.py sends them. A trained judge looks at the task and the last screen and answers YES or NO with the chances of both; a text
checkpoint reads all that is written, sees no screen, and answers with its 20 likeliest first tokens. How far either is to be believed,
tools/check_judge.py says.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags

from core import config as config_lib
from core.checkpoint import Checkpointer
from models import checkpoint
from models.config import ModelConfig
from tools import serve
from tools.train_judge import Judge, policy_of


class Trained:
  """A judge with its parameters; one question at a time. label: what it goes by."""

  def __init__(self, judge: Judge, params: Any):
    self.judge, self.params, self.label, self.lock = judge, params, "trained", threading.Lock()

  def chance(self, goal: str, screen: np.ndarray) -> float:
    with self.lock:
      return float(self.judge.chances(self.params, [(goal, screen)])[0])

  def likely(self, messages: list[dict]) -> list[dict[str, Any]]:
    """YES and NO with their log-probabilities, the likelier first."""
    content = messages[-1]["content"]
    goal = json.loads(next(part["text"] for part in content if part["type"] == "text"))["task"]
    pictures = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    if not pictures:
      raise serve.Refused("there is no screen to look at")
    chance = min(max(self.chance(goal, serve.pixels(pictures[-1])), 1e-6), 1 - 1e-6)
    said = [{"token": word, "logprob": math.log(p)} for word, p in (("YES", chance), ("NO", 1 - chance))]
    return sorted(said, key=lambda one: -one["logprob"])


class Reader:
  """A text checkpoint as it is, asked in its own chat template. What is written in a message is text: no control token comes of it."""

  def __init__(self, folder: str, template: str):
    knobs = checkpoint.defaults()
    knobs.update({"template": template, "max_action": 1, "max_prompt": min(knobs.max_prompt, ModelConfig.from_hf(folder).max_position - 1)})
    found = checkpoint.read(knobs, folder, "phone", (64, 64))
    if found.policy.tokens_per_image:
      raise ValueError(f"--checkpoint={folder} sees screens: serve it with an engine for vision-language models, this one reads text only")
    self.policy, self.params = found.policy, found.load(jax.random.key(0))
    self.label, self.lock = pathlib.Path(folder).name, threading.Lock()
    self._next = jax.jit(self._scored)

  def _scored(self, params: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Log-probabilities f32 [V] of the token after the first `length` of tokens i32 [1, L]."""
    at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    hidden = self.policy.forward(params, tokens, at[None], (at < length).astype(jnp.int32), None, None)
    return jax.nn.log_softmax(self.policy.logits(params, hidden[:, length - 1])[0].astype(jnp.float32))

  def ids(self, messages: list[dict]) -> list[int]:
    """The chat so far, and the beginning of the answer. Of a message with parts, those that are text."""
    encode, t = self.policy.tokenizer.encode_trusted, self.policy.tokenizer.template
    ids = encode(t.begin)
    for message in messages:
      if message.get("role") not in ("system", "user", "assistant"):
        raise serve.Refused(f"a message's role is {message.get('role')!r}, wanted system, user or assistant")
      content = message["content"]
      text = content if isinstance(content, str) else "\n".join(part["text"] for part in content if part["type"] == "text")
      ids += encode(t.open.format(role=message["role"]) + "{goal}" + t.end + t.after, text)
    return ids + encode(t.open.format(role="assistant"))

  def likely(self, messages: list[dict]) -> list[dict[str, Any]]:
    """The 20 likeliest first tokens of an answer, the likeliest first."""
    ids, most = self.ids(messages), self.policy.max_prompt
    if len(ids) > most:
      raise serve.Refused(f"the messages are {len(ids)} tokens, wanted {most} at most")
    tokens = np.zeros((1, -(-len(ids) // 256) * 256), np.int32)
    tokens[0, : len(ids)] = ids
    with self.lock:
      logp = np.asarray(self._next(self.params, tokens, len(ids)))
    return [{"token": self.policy.tokenizer.decode([i]), "logprob": float(logp[i])} for i in np.argsort(-logp)[:20]]


def load(workdir: str) -> Trained:
  """The judge of a workdir. FileNotFoundError where none was trained."""
  folder = pathlib.Path(os.path.abspath(workdir))
  if not (folder / "judge" / "judge.json").is_file():
    raise FileNotFoundError(f"{folder} holds no judge: train one with python -m tools.train_judge --workdir={workdir}")
  policy, policy_params, cfg = policy_of(folder)
  judge = Judge(policy, ml_collections.ConfigDict(cfg.critic), batch=1)
  target = {"params": jax.eval_shape(judge.critic.init, jax.random.key(0), policy_params)}
  with Checkpointer(folder / "judge") as checkpoints:
    tree, _, _ = checkpoints.restore(target)
  return Trained(judge, tree["params"])


class Handler(serve.Handler):
  """Chat completions of one question: is it done?"""

  def do_GET(self) -> None:
    self._serve({"/health": lambda body: {}})

  def do_POST(self) -> None:
    self._serve({"/v1/chat/completions": self.answer})

  def answer(self, body: dict) -> dict:
    likely = self.server.engine.likely(body["messages"])
    first = likely[0] | {"top_logprobs": likely}
    choice = {"index": 0, "message": {"role": "assistant", "content": first["token"]}, "finish_reason": "length"}
    return {"object": "chat.completion", "model": self.server.engine.label, "choices": [choice | {"logprobs": {"content": [first]}}]}


def main(argv: list[str]) -> int:
  del argv
  if bool(FLAGS.workdir) == bool(FLAGS.checkpoint):
    raise ValueError("wanted either --workdir (a judge that tools/train_judge.py trained) or --checkpoint (a text model's folder)")
  key = serve.key_in(FLAGS.key_env)
  engine = load(FLAGS.workdir) if FLAGS.workdir else Reader(FLAGS.checkpoint, FLAGS.template)
  with serve.Server(engine, FLAGS.port, key, Handler) as server:
    serve.until_interrupted(server, f"judge on {server.url}/v1")
  return 0


FLAGS = flags.FLAGS


if __name__ == "__main__":
  serve.define_flags("Folder of a run whose judge tools/train_judge.py trained.", 8001, required=False)
  flags.DEFINE_string("checkpoint", "", "Or a text model's Hugging Face folder, asked as it is.")
  flags.DEFINE_string("template", "", 'Of its chat (models/chat.py); "" = the family\'s. SmolLM2 wants smollm2.')
  config_lib.run_command(main)
