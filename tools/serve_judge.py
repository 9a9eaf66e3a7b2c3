"""Answers as a judge that tools/train_judge.py trained, for env.judge of form yes_no.

  python -m tools.serve_judge --workdir=runs/android --port=8001
  python train.py ... --config.env.judge.kind=endpoint --config.env.judge.base_url=http://127.0.0.1:8001/v1
      --config.env.judge.model=trained --config.env.judge.form=yes_no

It listens on 127.0.0.1 only, as tools/serve.py, whose --key_env it has. POST /v1/chat/completions with the task and screens as
envs/judges.py sends them: the last screen is looked at, and the answer is YES or NO with the chances of both.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import threading
from typing import Any

import jax
import ml_collections
import numpy as np
from absl import flags

from core import config as config_lib
from core.checkpoint import Checkpointer
from tools import serve
from tools.train_judge import Judge, policy_of


class Trained:
  """A judge with its parameters; one question at a time. label: what it goes by."""

  def __init__(self, judge: Judge, params: Any):
    self.judge, self.params, self.label, self.lock = judge, params, "trained", threading.Lock()

  def chance(self, goal: str, screen: np.ndarray) -> float:
    with self.lock:
      return float(self.judge.chances(self.params, [(goal, screen)])[0])


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
    content = body["messages"][-1]["content"]
    goal = json.loads(next(part["text"] for part in content if part["type"] == "text"))["task"]
    pictures = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    if not pictures:
      raise serve.Refused("there is no screen to look at")
    chance = min(max(self.server.engine.chance(goal, serve.pixels(pictures[-1])), 1e-6), 1 - 1e-6)
    likely = [{"token": word, "logprob": math.log(p)} for word, p in (("YES", chance), ("NO", 1 - chance))]
    likely.sort(key=lambda one: -one["logprob"])
    first = likely[0] | {"top_logprobs": likely}
    choice = {"index": 0, "message": {"role": "assistant", "content": first["token"]}, "finish_reason": "length"}
    return {"object": "chat.completion", "model": self.server.engine.label, "choices": [choice | {"logprobs": {"content": [first]}}]}


def main(argv: list[str]) -> int:
  del argv
  key = serve.key_in(FLAGS.key_env)
  with serve.Server(load(FLAGS.workdir), FLAGS.port, key, Handler) as server:
    serve.until_interrupted(server, f"judge on {server.url}/v1")
  return 0


FLAGS = flags.FLAGS


if __name__ == "__main__":
  serve.define_flags("Folder of a run whose judge tools/train_judge.py trained.", 8001)
  config_lib.run_command(main)
