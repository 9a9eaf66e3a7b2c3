"""Scripted solutions, played: what demonstrations and known-good episodes of real computers are made by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from core.schema import SUCCESS, End, Episode, Screen, Step, Task
from envs.chromium import Refused
from envs.errors import InfraError


def play(env: Any, task: Task, said: Iterable[str], checker: str) -> Episode:
  """Plays these texts, each asked for when the one before has been done: an Episode without token records. Where they run out before the
  try ends, it is checked as it stands."""
  obs, info = env.reset(options={"task": task})
  steps: list[Step] = []
  terminated = truncated = False
  for text in said:
    screen, notes = Screen.of(obs["screenshot"]), info["notes"]
    obs, _, terminated, truncated, info = env.step(text)
    steps.append(Step(screen, text, info["action"], 0, notes=notes))
    if terminated or truncated:
      break
  else:
    info = env.expire()
  return Episode(
    task_id=task.id, group="scripted", try_index=0, seed=task.seed, steps=steps,
    end=End.TERMINATED if terminated else End.TRUNCATED, end_cause=info["cause"], rewards=info["rewards"], records=[],
    goal=task.goal, family=task.family, checker=checker, partial=info["partial"], final_screen=Screen.of(obs["screenshot"]),
    step_limit=task.limits.steps,
  )  # fmt: skip


def passing(solve: Callable[[Any, Task], Episode], env: Any, tasks: Iterable[Task]) -> list[Episode]:
  """The solutions of these tasks that pass. One that does not, or in which the page was not as its script has it, or the browser broke, is
  played once more and then left out: a busy machine loses a click now and then."""
  out = []
  for task in tasks:
    for _ in range(2):
      try:
        episode = solve(env, task)
      except (Refused, InfraError) as fault:
        print(f"the scripted solution of {task.id} broke off: {type(fault).__name__}: {fault}"[:300], flush=True)
        continue
      if episode.rewards[SUCCESS] >= 1.0:
        out.append(episode)
        break
  return out
