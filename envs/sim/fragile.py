"""A simulated computer that breaks as real ones do, to rehearse a run on a fleet of them: env.faults, with practice.workers."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import gymnasium as gym
import ml_collections
import numpy as np


def defaults() -> ml_collections.ConfigDict:
  """Chances that an episode ends so, at one of its first steps."""
  return ml_collections.ConfigDict(
    {
      "die": 0.0,  # the process is killed
      "hang": 0.0,  # nothing is heard of it any more
      "throw": 0.0,  # the environment raises what no environment should
      "black": 0.0,  # a screenshot black in every pixel
      "cut": 0.0,  # a screenshot that ends half way down
    }
  )


def check(cfg: ml_collections.ConfigDict) -> None:
  for name, chance in cfg.items():
    if not 0 <= chance <= 1:
      raise ValueError(f"env.faults.{name} is {chance}, wanted a chance from 0 to 1")
  if sum(cfg.values()) > 1:
    raise ValueError(f"env.faults add up to {sum(cfg.values()):g}, wanted 1 at most: an episode breaks once")


class Fragile(gym.Wrapper):
  """Breaks some of its episodes, each at a step drawn from the first `within`, but none of its first `well`: in a worker those are its
  canaries. Its luck is its own and never the same again, so that a computer that was started anew does not break where the last did."""

  def __init__(self, env: gym.Env, chances: dict[str, float], within: int = 8, well: int = 2):
    super().__init__(env)
    self.well = well
    self.kinds, self.within = [*chances, ""], within
    self.chances = [*chances.values(), max(0.0, 1.0 - sum(chances.values()))]
    self.rng = np.random.default_rng()

  def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
    self.kind, self.left = str(self.rng.choice(self.kinds, p=self.chances)), int(self.rng.integers(1, self.within + 1))
    self.well -= 1
    if self.well >= 0:
      self.kind = ""
    return self.env.reset(seed=seed, options=options)

  def step(self, text: str):
    self.left -= 1
    if self.left or not self.kind:
      return self.env.step(text)
    if self.kind == "die":
      os.kill(os.getpid(), signal.SIGKILL)
    if self.kind == "hang":
      threading.Event().wait()
    if self.kind == "throw":
      raise RuntimeError("this computer was told to break")
    obs, *rest = self.env.step(text)
    pixels = obs["screenshot"]
    return obs | {"screenshot": np.zeros_like(pixels) if self.kind == "black" else pixels[: len(pixels) // 2]}, *rest
