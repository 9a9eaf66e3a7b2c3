"""One turn: the policy looks, writes, the environment acts. Many turns make an Episode; a free environment starts the next try."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from core.schema import End, Episode, Screen, Step, Task, TokenRecord, Unreadable
from envs import actions
from envs.errors import InfraError
from models.base import Policy
from rollout.sampler import Sampled, Sampler


class Try(NamedTuple):
  """One try to run. key: uint32 [2], folded from (run, update, group, try): siblings share the task and differ here."""

  task: Task
  group: str
  index: int
  key: np.ndarray


class Turn:
  """An environment and the try it is on. `begin`, then `prompt` and `advance` until `advance` returns the Episode."""

  def __init__(self, env: Any, policy: Policy):
    self.env, self.policy = env, policy
    self.trial: Try | None = None

  def begin(self, trial: Try) -> Episode | None:
    """Resets the environment to the try's start screen. Returns an Episode only if that failed (an infra error)."""
    self.trial, self.started = trial, time.monotonic()
    self.steps: list[Step] = []
    self.records: list[TokenRecord] = []
    try:
      self.obs, info = self.env.reset(options={"task": trial.task})
    except InfraError as fault:
      return self._end(End.INFRA_ERROR, type(fault).__name__, {}, None)
    self.screen, self.notes = Screen.of(self.obs["screenshot"]), info["notes"]
    return None

  def prompt(self):
    return self.policy.prompt(self.obs["goal"], [self.obs["screenshot"]], self.obs["text"])

  def key(self) -> np.ndarray:
    """This step's sampling key, from the try's own: the draw does not depend on who shares the batch."""
    mixed = np.random.SeedSequence([*self.trial.key.tolist(), len(self.steps)])
    return mixed.generate_state(2, np.uint32)

  def advance(self, prompt, sampled: Sampled, think_seconds: float = 0.0) -> Episode | None:
    """Acts with what was sampled. The text is decoded once for the environment and never tokenised again."""
    h = len(self.steps)
    text = self.policy.tokenizer.decode(sampled.tokens)
    record = make_record(prompt, sampled, h)
    started = time.monotonic()
    try:
      obs, _, terminated, truncated, info = self.env.step(text)
    except InfraError as fault:
      return self._end(End.INFRA_ERROR, type(fault).__name__, {}, None)
    action = info["action"]
    raw, point = (None, None) if isinstance(action, Unreadable) else actions.aim(action)
    if not isinstance(action, Unreadable):  # numbers as numbers: how they were spelled stands in the text
      action = dataclasses.replace(action, args=plain(action.args), model_args=plain(action.model_args))
    self.steps.append(
      Step(self.screen, text, action, len(sampled.tokens), plain(raw), plain(point), think_seconds, time.monotonic() - started,
           self.notes | {"entropy": float(sampled.entropy.sum())})  # fmt: skip
    )
    self.records.append(record)
    self.obs, self.screen, self.notes = obs, Screen.of(obs["screenshot"]), info["notes"]
    limit = self.trial.task.limits.seconds
    if terminated or truncated:
      end = End.TERMINATED if terminated else End.TRUNCATED
      return self._end(end, info["cause"], info["rewards"], info["partial"])
    if limit and time.monotonic() - self.started > limit:
      try:
        info = self.env.unwrapped.expire()  # the final state is still checked: a limit says when to look, not what is there
      except InfraError as fault:
        return self._end(End.INFRA_ERROR, type(fault).__name__, {}, None)
      return self._end(End.TRUNCATED, "seconds", info["rewards"], info["partial"])
    return None

  def _end(self, end: End, cause: str, rewards: dict, partial: float | None) -> Episode:
    task = self.trial.task
    seen = [s.notes["popup"] for s in self.steps if s.notes.get("popup")]
    return Episode(
      task_id=task.id, group=self.trial.group, try_index=self.trial.index, seed=task.seed, steps=self.steps, end=end,
      end_cause=cause, rewards=dict(rewards), records=self.records, goal=task.goal, family=task.family,
      checker=f"{task.env}/1", partial=partial, final_screen=self.screen if self.steps else None, step_limit=task.limits.steps,
      notes={"popup": seen[0] if seen else "", "seconds": time.monotonic() - self.started},
    )  # fmt: skip


def plain(x: Any) -> Any:
  """Nested values with every float a plain float."""
  if isinstance(x, dict):
    return {k: plain(v) for k, v in x.items()}
  if isinstance(x, (list, tuple)):
    return type(x)(plain(v) for v in x)
  return float(x) if isinstance(x, float) else x


def make_record(prompt, sampled: Sampled, step: int) -> TokenRecord:
  """The token record of one context: the prompt as it was shown, then exactly the tokens that were sampled."""
  n, a = len(prompt.tokens), len(sampled.tokens)
  join = lambda fill, tail: np.concatenate([np.full(n, fill, tail.dtype), tail])
  return TokenRecord(
    tokens=np.concatenate([prompt.tokens, sampled.tokens]).astype(np.int32),
    is_action=join(False, np.ones(a, bool)),
    logp=join(0.0, sampled.logp.astype(np.float32)),
    version=join(-1, np.full(a, sampled.version, np.int32)),
    step=np.full(n + a, step, np.int32),
    image_place=np.asarray(prompt.image_place, np.int32),
    image_step=np.full(len(prompt.image_place), step, np.int32),
  )


def collect(
  sampler: Sampler, envs: list, tries: Iterable[Try], policy: Policy, clock: Callable = lambda name, seconds: None, reruns: int = 2
) -> Iterator[Episode]:
  """Runs tries on a fixed set of environments and yields episodes as they finish. No barrier: a free environment takes the
  next try at once, and the sampler batches whatever asks. clock(name, seconds) accounts the wall time.

  A try that an infra error ended is run again, at most `reruns` times; notes["faults"] of its episode lists what broke before.
  """
  source, again = iter(tries), collections.deque()
  faults: dict[tuple[str, int], list[str]] = collections.defaultdict(list)
  idle, busy = [Turn(env, policy) for env in envs], []

  def ended(turn: Turn, episode: Episode) -> list[Episode]:
    """The turn is free again; its episode counts unless it is to be run again."""
    idle.append(turn)
    before = faults[episode.group, episode.try_index]
    if not episode.scored and len(before) < reruns:
      before.append(episode.end_cause)
      again.append(turn.trial)
      return []
    episode.notes["faults"] = faults.pop((episode.group, episode.try_index))
    return [episode]

  while True:
    started = time.monotonic()
    while idle:
      trial = again.popleft() if again else next(source, None)
      if trial is None:
        break
      turn = idle.pop()
      failed = turn.begin(trial)
      if failed is None:
        busy.append(turn)
      else:
        yield from ended(turn, failed)
    if not busy:
      return
    prompts = [turn.prompt() for turn in busy]
    keys = np.stack([turn.key() for turn in busy])
    asked = time.monotonic()
    sampled = sampler.act(prompts, keys)
    answered = time.monotonic()
    clock("sampling", answered - asked)
    finished, still = [], []
    for turn, prompt, out in zip(busy, prompts, sampled):
      episode = turn.advance(prompt, out, answered - asked)
      if episode is None:
        still.append(turn)
      else:
        finished += ended(turn, episode)
    busy = still
    clock("environments", time.monotonic() - answered + asked - started)
    yield from finished
