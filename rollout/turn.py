"""One turn: the policy looks, writes, the environment acts. Many turns make an Episode; rollout/scheduler.py runs many at once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from core.schema import End, Episode, Screen, Step, Task, TokenRecord, Unreadable
from envs import actions
from envs.leases import Result
from models.base import Policy, Prompt, Seen
from rollout.sampler import Sampled


class Try(NamedTuple):
  """One try to run. key: uint32 [2], folded from (run, update, group, try): siblings share the task and differ here."""

  task: Task
  group: str
  index: int
  key: np.ndarray


class Turn:
  """One try on one computer. `hear` every answer; while it `asks`, the policy is to write: `prompt` and `key`, then `act`.

  lease: of an envs.pool.Pool or an envs.inside.Inside; whoever took it gives it back when `hear` has returned the Episode.
  """

  def __init__(self, lease: Any, policy: Policy, trial: Try, now: Callable[[], float] | None = None):
    self.lease, self.policy, self.trial, self.now = lease, policy, trial, now or time.monotonic
    self.started, self.asks = self.now(), False
    self.steps: list[Step] = []
    self.records: list[TokenRecord] = []
    self.past: list[Seen] = []
    self.screen: Screen | None = None
    lease.submit_reset(trial.task)

  def hear(self, result: Result) -> Episode | None:
    """What the computer answered. The Episode once it is over."""
    if result.error is not None:
      return self._end(End.INFRA_ERROR, type(result.error).__name__, {})
    return {"reset": self._opened, "step": self._stepped, "expire": self._expired}[result.op](result)

  def prompt(self) -> Prompt:
    return self.policy.prompt(self.obs["goal"], [self.obs["screenshot"]], self.obs["text"], self.past)

  def key(self) -> np.ndarray:
    """This step's sampling key, from the try's own: the draw does not depend on who shares the batch."""
    mixed = np.random.SeedSequence([*self.trial.key.tolist(), len(self.steps)])
    return mixed.generate_state(2, np.uint32)

  def act(self, prompt, sampled: Sampled, think_seconds: float = 0.0) -> None:
    """Acts with what was sampled. The text is decoded once for the environment and never tokenised again."""
    self.asks, self.written = False, (prompt, sampled, self.policy.tokenizer.decode(sampled.tokens), think_seconds)
    self.lease.submit_step(self.written[2])

  def _opened(self, result: Result) -> None:
    self._look(*result.value)

  def _look(self, obs: dict, info: dict) -> None:
    self.obs, self.screen, self.notes, self.asks = obs, Screen.of(obs["screenshot"]), info["notes"], True

  def _stepped(self, result: Result) -> Episode | None:
    prompt, sampled, text, think_seconds = self.written
    obs, _, terminated, truncated, info = result.value
    action = info["action"]
    raw, point = (None, None) if isinstance(action, Unreadable) else actions.aim(action)
    if not isinstance(action, Unreadable):  # numbers as numbers: how they were spelled stands in the text
      action = dataclasses.replace(action, args=plain(action.args), model_args=plain(action.model_args))
    add_record(self.records, prompt, sampled, len(self.steps))
    self.past.append(seen(prompt, self.obs["text"], sampled.tokens))
    self.steps.append(
      Step(
        self.screen,
        text,
        action,
        len(sampled.tokens),
        plain(raw),
        plain(point),
        think_seconds,
        result.seconds,
        self.notes | {"entropy": float(sampled.entropy.sum())},
        self.obs["text"],
      )  # fmt: skip
    )
    self._look(obs, info)
    if terminated or truncated:
      return self._end(End.TERMINATED if terminated else End.TRUNCATED, info["cause"], info)
    limit = self.trial.task.limits.seconds
    if limit and self.now() - self.started > limit:
      self.asks = False
      self.lease.submit_expire()  # the final state is still checked: a limit says when to look, not what is there
    return None

  def _expired(self, result: Result) -> Episode:
    return self._end(End.TRUNCATED, "seconds", result.value)

  def _end(self, end: End, cause: str, info: dict) -> Episode:
    """info: what the environment said of the end; {} of an infra error."""
    self.asks = False
    task = self.trial.task
    opinion = {"judge": info["judge"]} if "judge" in info else {}  # of a judge beside the checker
    seen = [s.notes["popup"] for s in self.steps if s.notes.get("popup")]
    return Episode(
      task_id=task.id, group=self.trial.group, try_index=self.trial.index, seed=task.seed, steps=self.steps, end=end,
      end_cause=cause, rewards=dict(info.get("rewards", {})), records=self.records, goal=task.goal, family=task.family,
      checker=info.get("checker", f"{task.env}/1"), partial=info.get("partial"), final_screen=self.screen if self.steps else None,
      step_limit=task.limits.steps,
      notes={"popup": seen[0] if seen else "", "seconds": self.now() - self.started} | opinion,
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
    image_step=np.full(len(prompt.image_place), step, np.int32) if prompt.image_step is None else prompt.image_step,
  )


def add_record(records: list[TokenRecord], prompt: Prompt, sampled: Sampled, step: int) -> None:
  """Puts down what a step saw and wrote: the last record grows where the prompt goes on from its end, else another begins."""
  new = make_record(prompt, sampled, step)
  if not records or not _goes_on(records[-1], prompt, new):
    return records.append(new)
  old, n = records[-1], len(records[-1])
  kept = {name: np.concatenate([getattr(old, name), getattr(new, name)[n:]]) for name in ("is_action", "logp", "version", "step")}
  records[-1] = dataclasses.replace(new, **kept)


def _goes_on(old: TokenRecord, prompt: Prompt, new: TokenRecord) -> bool:
  n, m = len(old), len(old.image_place)
  same = lambda name, k: np.array_equal(getattr(old, name), getattr(new, name)[:k])
  return len(prompt.tokens) >= n and same("tokens", n) and same("image_place", m) and same("image_step", m)


def seen(prompt: Prompt, text: str, written: np.ndarray) -> Seen:
  """A step that is over, as later prompts of its episode take it."""
  newest = prompt.images[-1] if len(prompt.images) else prompt.images
  return Seen(newest.copy() if len(prompt.images) > 1 else newest, text, written)  # a view would keep all the prompt's images
