"""Speeds of the embedded default, measured in one process on this machine, as rates and as ratios to each other.

  python -m benchmarks.embedded [--name=android|osworld]
"""

from __future__ import annotations

import pathlib
import time

import jax
import numpy as np
from absl import app, flags

import evaluate
import train
from core.config import load_config
from core.optimiser import make_optimiser
from core.pack import minibatches, useful_share
from core.state import TrainState, Weights
from rollout import demos
from rollout.sampler import Sampler
from rollout.turn import Try, collect


def best(work, repeats: int = 5) -> float:
  """Seconds of the fastest of a few runs, after one to warm up."""
  work()
  times = []
  for _ in range(repeats):
    started = time.perf_counter()
    work()
    times.append(time.perf_counter() - started)
  return min(times)


def main(argv: list[str]) -> None:
  cfg, _ = load_config(["benchmark", f"--config=configs/{FLAGS.name}.py", "--workdir=/tmp/unused", "--config.copy.demonstrations=64"])
  run = train.Run(cfg, pathlib.Path("/tmp/unused"))
  episodes = run.world.demonstrations(64, 0)
  steps = sum(len(e.steps) for e in episodes)
  simulator = best(lambda: run.world.demonstrations(64, 0)) / steps
  params = jax.jit(run.policy.init)(jax.random.key(0))
  sampler = Sampler(run.policy, evaluate.BUCKETS)
  sampler.load(Weights(params, 0))
  prompts = [run.policy.prompt(e.goal, [e.steps[0].screen.pixels], "") for e in episodes]
  keys = np.arange(128, dtype=np.uint32).reshape(64, 2)
  sampling = best(lambda: sampler.act(prompts, keys)) / 64
  items = demos.items(episodes, run.policy)
  batch = run.batch(minibatches([[i] for i in items[: run.phase.minibatch]], run.phase.minibatch, run.rng)[0], run.shape)
  optimiser, _ = make_optimiser(cfg.practice, 1.0, None)
  update = train.make_update(run.score, run.phase.loss, optimiser, 0.0)
  state = TrainState.create(params, optimiser)

  def learn():
    nonlocal state
    state, out = update(state, batch, None)
    jax.block_until_ready(out["policy/loss"])

  learning = best(learn) / len(items[: run.phase.minibatch])
  packing = best(lambda: run.batch(items[: run.phase.minibatch], run.shape)) / len(items[: run.phase.minibatch])
  tries = [Try(t, f"b{i}", 0, np.array([1, i], np.uint32)) for i, t in enumerate(run.world.tasks["practice"][:64])]
  envs = [run.world.make_env() for _ in range(64)]
  rollout = list(collect(sampler, envs, tries, run.policy))
  started = time.perf_counter()
  rollout = list(collect(sampler, envs, tries, run.policy))
  rolled = (time.perf_counter() - started) / sum(len(e.steps) for e in rollout)
  print(f"simulator with its scripted expert   {1 / simulator:8.0f} steps a second")
  print(f"sampler, 64 sessions                 {1 / sampling:8.0f} steps a second, {simulator / sampling:.3f} simulator steps fit into one")
  print(f"rollout, both and the host's share   {1 / rolled:8.0f} steps a second, host share {1 - sampling / rolled:.2f}")
  print(f"one optimiser step                   {1 / learning:8.0f} steps a second, {learning / sampling:.2f} times a sampled step")
  print(f"packing                              {1 / packing:8.0f} steps a second, {packing / learning:.2f} of the optimiser step")
  print(f"useful tokens in a batch             {useful_share(batch):8.2f}")


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_enum("name", "android", ["android", "osworld"], "Which config.")
  app.run(main)
