"""The nouns of the host side: Task, Observation, Action, Step, Episode, Group, Credit and the three ends.

numpy only. Everything right of `Batch` (core/state.py) is jax; everything here is plain Python and numpy, so that an
environment worker can import it without ever touching an accelerator.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from typing import Any

import numpy as np


class End(str, enum.Enum):
  """How an episode ended. Three ends, never mixed: an infra error is never a score."""

  TERMINATED = "terminated"  # the agent ended it (finished, fail, unreadable) or the checker saw a pass
  TRUNCATED = "truncated"  # a limit ended it; `Episode.end_cause` says which: "steps" or "seconds"
  INFRA_ERROR = "infra_error"  # the computer or the grader broke; `Episode.end_cause` says how; no reward exists


# Named rewards of an episode. Decisions 1, 3 and 8 of the design read SUCCESS and UNREADABLE only; others are shaping.
SUCCESS = "success"
UNREADABLE_REWARD = -1.0


@dataclasses.dataclass(frozen=True)
class Limits:
  """What ends an episode from outside. steps: agent steps; seconds: wall clock of the whole try (0 = no limit)."""

  steps: int
  seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Task:
  """One start state with a goal and a checker. Two tasks with the same id show the same first screen.

  id: names one start state (in the simulators the start seed is part of it, so replay swaps like for like).
  goal: the sentence the agent reads. env: environment name as registered. params: what the environment needs to set
  the start state up and to check the end, JSON values only. check: "end" or "every_step" (a pass ends the episode).
  """

  id: str
  goal: str
  env: str
  family: str
  seed: int
  params: dict[str, Any]
  limits: Limits
  check: str = "end"
  threshold: float = 1.0

  def __post_init__(self):
    if self.check not in ("end", "every_step"):
      raise ValueError(f"task {self.id}: check is {self.check!r}, wanted 'end' or 'every_step'")


@dataclasses.dataclass(frozen=True)
class Action:
  """One readable action.

  kind: the grammar's name of it ("tap", "left_double", ...). args: what the environment executes, points already in
  input pixels (ints). model_args: the numbers and strings as the agent wrote them, in model space; `format` prints
  these, so `format(parse(t)) == t` for canonical text. thought: text before the action marker, if the grammar has one.
  """

  kind: str
  args: dict[str, Any]
  model_args: dict[str, Any]
  grammar: str
  thought: str = ""


@dataclasses.dataclass(frozen=True)
class Unreadable:
  """Text that is not exactly one action of the grammar. reason: one short line for logs and the episode page."""

  reason: str


@dataclasses.dataclass(frozen=True)
class Screen:
  """A screenshot and its content hash. pixels: uint8 [H, W, 3]; ref: hex sha1 of shape and bytes, the store's file name."""

  ref: str
  pixels: np.ndarray

  @staticmethod
  def of(pixels: np.ndarray) -> "Screen":
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
      raise ValueError(f"screenshot is {pixels.dtype} {pixels.shape}, wanted uint8 [H, W, 3]")
    digest = hashlib.sha1(str(pixels.shape).encode() + np.ascontiguousarray(pixels).tobytes())
    return Screen(digest.hexdigest(), pixels)


@dataclasses.dataclass
class Step:
  """One look and one action. raw_point/point: where the action aimed, in model space and in input pixels (or None).

  agent_tokens: how many tokens the agent wrote. think_seconds/env_seconds: wall clock of the two halves of the step.
  notes: what the environment says about this step for instruments only (e.g. popup kind on screen); never shown to
  the policy. seen: the observation's text, "" where there was none.
  """

  screen: Screen
  text: str
  action: Action | Unreadable
  agent_tokens: int
  raw_point: tuple[float, float] | None = None
  point: tuple[int, int] | None = None
  think_seconds: float = 0.0
  env_seconds: float = 0.0
  notes: dict[str, Any] = dataclasses.field(default_factory=dict)
  seen: str = ""


@dataclasses.dataclass
class TokenRecord:
  """Exactly what one context held when tokens were sampled from it. Tokens in, tokens out.

  tokens i32 [T]; is_action bool [T], True only on tokens the agent sampled; logp f32 [T], the sampler's
  log-probability at action tokens, 0 elsewhere; version i32 [T], the policy version that wrote each action token, -1
  elsewhere; step i32 [T], the episode step each token belongs to; image_place i32 [M], the index in `tokens` of each
  image's first placeholder, and image_step i32 [M], whose step's screenshot it is.
  """

  tokens: np.ndarray
  is_action: np.ndarray
  logp: np.ndarray
  version: np.ndarray
  step: np.ndarray
  image_place: np.ndarray
  image_step: np.ndarray

  def __post_init__(self):
    n = len(self.tokens)
    for name in ("is_action", "logp", "version", "step"):
      got = getattr(self, name).shape
      if got != (n,):
        raise ValueError(f"token record: {name} has shape {got}, wanted ({n},) like tokens")

  def __len__(self) -> int:
    return len(self.tokens)


@dataclasses.dataclass
class Episode:
  """One whole try. `rewards` is empty exactly when end is INFRA_ERROR: what could not be checked has no score."""

  task_id: str
  group: str  # unique per group: two groups of one task never merge
  try_index: int
  seed: int
  steps: list[Step]
  end: End
  end_cause: str  # "agent", "checker", "unreadable", "steps", "seconds", or the infra error's class name
  rewards: dict[str, float]
  records: list[TokenRecord]
  goal: str = ""
  family: str = ""
  checker: str = ""  # id and version of what graded it
  partial: float | None = None  # partial credit, kept apart from success
  advantage: float | None = None  # filled in by the agent's credit, for the trajectory record
  replayed: bool = False  # True for a stored success that was swapped into a group
  final_screen: Screen | None = None
  notes: dict[str, Any] = dataclasses.field(default_factory=dict)
  step_limit: int = 0  # steps the try could have taken; 0 = not known

  @property
  def scored(self) -> bool:
    return self.end != End.INFRA_ERROR

  @property
  def success(self) -> bool:
    return self.scored and self.rewards[SUCCESS] >= 1.0

  @property
  def raw_reward(self) -> float:
    """Pass 1, fail 0, unreadable -1: what 'all equal', replay and dynamic sampling look at, before any shaping."""
    if not self.scored:
      raise ValueError(f"episode {self.group}/{self.try_index} ended with infra error {self.end_cause}: it has no reward")
    return UNREADABLE_REWARD if self.end_cause == "unreadable" else float(self.rewards[SUCCESS] >= 1.0)

  @property
  def reward(self) -> float:
    """The reward the advantage uses: the sum of all named rewards, an unreadable try being -1 (design decision 2)."""
    if not self.scored:
      raise ValueError(f"episode {self.group}/{self.try_index} ended with infra error {self.end_cause}: it has no reward")
    return float(sum(self.rewards.values()))

  @property
  def oldest_version(self) -> int:
    versions = [int(r.version[r.is_action].min()) for r in self.records if r.is_action.any()]
    return min(versions) if versions else -1

  @property
  def action_tokens(self) -> int:
    return int(sum(r.is_action.sum() for r in self.records))


@dataclasses.dataclass
class Group:
  """The tries at one task that are compared. Members share the task and its start state; sampling keys differ."""

  id: str
  task_id: str
  episodes: list[Episode]

  @property
  def scored(self) -> list[Episode]:
    return [e for e in self.episodes if e.scored]

  @property
  def kind(self) -> str:
    """'all_pass', 'all_fail', 'mixed' or 'unscored', decided on raw rewards (decisions 1 and 3: max <= 0 is all-fail)."""
    raw = [e.raw_reward for e in self.scored]
    if not raw:
      return "unscored"
    if max(raw) <= 0:
      return "all_fail"
    return "all_pass" if min(raw) == max(raw) else "mixed"


@dataclasses.dataclass
class EpisodeScores:
  """What the models say of one finished episode before its credit is computed; only what the algorithm `needs` is there.

  records: per token record a dict of f32 [T] by name: old_logp (the learner's policy now), ref_logp (the reference policy),
  value_logit (the critic's logit before each action token). step_value: f32 [H + 1], the step critic's chance of success
  before each step and, last, on the final screen. task_value: its guess from the task alone.
  """

  records: list[dict[str, np.ndarray]]
  step_value: np.ndarray | None = None
  task_value: float | None = None


@dataclasses.dataclass
class Credit:
  """The push of one episode. advantage: f32 [H], one number per step (all equal for group methods); every action token
  of step h gets advantage[h]. keep: bool [H], steps that enter the loss. token_advantage, token_return: one f32 [T] per token
  record where a critic gives every token its own push and value target; they then take the place of advantage. reward: what a
  group method compared it by, shaping included; 0 where nothing was.
  """

  advantage: np.ndarray
  keep: np.ndarray
  token_advantage: list[np.ndarray] | None = None
  token_return: list[np.ndarray] | None = None
  reward: float = 0.0

  @staticmethod
  def uniform(value: float, steps: int) -> "Credit":
    return Credit(np.full(steps, value, np.float32), np.ones(steps, bool))
