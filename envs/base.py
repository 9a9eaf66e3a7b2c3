"""What every environment of this project promises on top of Gymnasium's API.

The action is the agent's text, the observation a Dict of screenshot (uint8 [H, W, 3]), goal and text. `reset` takes
`options={"task": Task}`. `info` of every step holds: "action" (Action or Unreadable), "cause" (who ended the episode,
"" while it goes on), "rewards" (named rewards at the end), "partial", "notes" (for instruments, never for the policy).
Faults of the computer are raised as `envs.errors.InfraError`, never returned as a score.
"""

from __future__ import annotations

import copy
import functools

import gymnasium as gym
import numpy as np

from core.schema import SUCCESS, UNREADABLE_REWARD
from envs import actions


def text_space(max_length: int = actions.MAX_CHARS) -> gym.spaces.Text:
  """Text space with an explicit charset: Gymnasium's default has neither spaces nor parentheses.

  The tables of a charset take 4 MB and some 10 ms to build, so every space of one length shares them; its random state is its own.
  """
  return copy.copy(_text_space(max_length))


@functools.lru_cache(maxsize=8)
def _text_space(max_length: int) -> gym.spaces.Text:
  return gym.spaces.Text(max_length=max_length, min_length=0, charset=actions.CHARSET)


def observation_space(width: int, height: int) -> gym.spaces.Dict:
  return gym.spaces.Dict(
    {
      "screenshot": gym.spaces.Box(0, 255, (height, width, 3), np.uint8),
      "goal": text_space(4096),
      "text": text_space(65536),
    }
  )


def ending(cause: str, passed: bool, partial: float | None) -> tuple[float, bool, bool, dict]:
  """(reward, terminated, truncated, what `info` adds) of an episode that `cause` ended: a limit ("steps", "seconds") truncates,
  "unreadable" costs, and only the checker's pass counts."""
  rewards = {SUCCESS: float(passed)} | ({"unreadable": UNREADABLE_REWARD} if cause == "unreadable" else {})
  limit = cause in ("steps", "seconds")
  return UNREADABLE_REWARD if cause == "unreadable" else float(passed), not limit, limit, {"rewards": rewards, "partial": partial}
