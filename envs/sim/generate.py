"""New tasks for the simulated computers, from failed ones. See envs/variations.py."""

from __future__ import annotations

import functools

import ml_collections

from core.schema import Task
from envs.sim import tasks
from envs.sim.popups import Popups
from envs.variations import Space, Variations


def space(cfg: ml_collections.ConfigDict) -> Space:
  """What may be practised on cfg.computer."""
  return space_of(cfg.computer)


@functools.lru_cache(maxsize=4)
def space_of(computer: str) -> Space:
  held, rest = tasks._pools(computer)
  return Space(computer, held, rest, functools.partial(tasks._task, computer), feasible)


def feasible(task: Task) -> bool:
  """Whether the scripted expert passes the task with no pop-up in its way."""
  from envs.sim.base import play

  return play(task.env, task, Popups()).success


class SimGenerator(Variations):
  """The simulators' own task generator."""

  def __init__(self, computer: str, most_changes: int = 2):
    super().__init__(space_of(computer), most_changes)
