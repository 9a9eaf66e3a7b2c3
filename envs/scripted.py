"""Scripted solutions, played: what demonstrations and known-good episodes of real computers are made by."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from core.schema import SUCCESS, End, Episode, Screen, Step, Task
from envs.chromium import Refused
from envs.errors import InfraError

INSTEAD = "give --config.policy.checkpoint, or --config.copy.path, trajectory records to copy, or --config.copy.when=never"
FIRST = 3  # tasks, of which at least one must pass
SILENT = 30.0  # seconds after which long work says how far it is


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


def passing(solve: Callable[[Any, Task], Episode], env: Any, tasks: Iterable[Task], computer: str) -> list[Episode]:
  """The solutions of these tasks that pass. One that does not, or in which the page was not as its script has it, or the computer broke,
  is played once more and then left out: a busy machine loses a click now and then. Where none of the first tasks passes the environment
  is broken, and ValueError says so before the rest is played."""
  tasks, out, why = list(tasks), [], ""
  begun = told = time.monotonic()
  for done, task in enumerate(tasks, 1):
    for _ in range(2):
      try:
        episode = solve(env, task)
      except (Refused, InfraError) as fault:
        why = f"{type(fault).__name__}: {fault}"
        print(f"the scripted solution of {task.id} broke off: {why}"[:300], flush=True)
        continue
      if episode.rewards[SUCCESS] >= 1.0:
        out.append(episode)
        break
      # why the environment is called broken below: a step limit that the solution does not fit into is a knob's doing
      why = f"its step limit of {episode.step_limit} ended it, env.steps" if episode.end_cause == "steps" else "scored 0, wanted 1"
    if not out and done == min(FIRST, len(tasks)):
      names = ", ".join(t.id for t in tasks[:done])
      raise ValueError(
        f"environment {computer}: no scripted solution of {names} passes (the last: {why}): mend the environment or its checker"
      )
    now = time.monotonic()
    if now - told > SILENT:
      told, rate = now, done / (now - begun)
      left = (len(tasks) - done) / rate
      print(f"scripted solutions  {done}/{len(tasks)}  {len(out)} passed  {60 * rate:.1f}/min  {left:.0f} s left", flush=True)
  if len(out) < len(tasks):
    print(f"{len(tasks) - len(out)} of {len(tasks)} scripted solutions did not pass and are left out", flush=True)
  return out
