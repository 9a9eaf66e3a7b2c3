"""Stand-ins for the parts around a rollout: an environment, a policy and a sampler that do what a test tells them."""

import types

import numpy as np
import pytest

from core.schema import SUCCESS, Limits, Task, Unreadable
from envs import actions
from envs.errors import InfraError
from models.base import Prompt
from rollout.sampler import Sampled


class Broken(InfraError):
  """An infra error that only tests know."""


class ScriptedEnv:
  """Any text is an action. params: `steps` to the end, `reward` then (None: the limit ends it), `fault`: {place: attempts},
  where a place is "reset", a step number or "expire", and that many attempts there break;
  `told`: what `info` holds besides at the end."""

  def __init__(self, log=None):
    self.log = [] if log is None else log
    self.attempts = {}
    self.unwrapped = self

  def reset(self, *, options):
    self.task = options["task"]
    self.steps = 0
    self._break("reset")
    self.said = []
    return self._look(), {"notes": {"popup": "", "page": "start"}}

  def _break(self, place):
    key = (self.task.id, place)
    self.attempts[key] = self.attempts.get(key, 0) + 1
    if self.attempts[key] <= self.task.params.get("fault", {}).get(place, 0):
      raise Broken(f"{place} broke")

  def _look(self):
    """A screen that depends on the task and on everything said so far."""
    seed = [self.task.seed, *(b for text in self.said for b in text.encode())] if self.steps else [self.task.seed]
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 40, 3)).astype(np.uint8)
    return {"screenshot": pixels, "goal": self.task.goal, "text": ""}

  def step(self, text):
    self.steps += 1
    self.log.append((self.task.id, self.steps))
    self._break(self.steps)
    self.said.append(text)
    action = actions.parse(text, "phone", (40, 24))
    popup = "sign_in/top" if self.steps in self.task.params.get("popups", ()) else ""
    info = {"action": action, "cause": "", "notes": {"popup": popup, "page": f"page{self.steps}"}}
    last, reward = self.steps >= self.task.params["steps"], self.task.params.get("reward")
    if not last:
      return self._look(), 0.0, False, False, info
    cause = "steps" if reward is None else "checker" if reward > 0 else "unreadable" if reward < 0 else "agent"
    rewards = {SUCCESS: float((reward or 0) > 0)} | ({"unreadable": -1.0} if cause == "unreadable" else {})
    info |= {"cause": cause, "rewards": rewards, "partial": None} | self.task.params.get("told", {})
    return self._look(), reward or 0.0, reward is not None, reward is None, info

  def expire(self):
    self._break("expire")
    passed = float((self.task.params.get("reward") or 0) > 0)
    return {"rewards": {SUCCESS: passed}, "partial": 0.5, "cause": "seconds", "notes": {}, "action": Unreadable("")}


class ScriptedPolicy:
  """Prompts of 5 tokens: the goal's length, three for the image, a count. Its tokenizer writes but refuses to read: nothing in
  a rollout may tokenise agent text."""

  def __init__(self):
    self.tokenizer = types.SimpleNamespace(decode=self._decode, encode=self._refuse, eos_id=1)
    self.prompts, self.decoded = 0, []

  def _decode(self, ids):
    self.decoded.append(ids.tolist())
    return "".join({7: "wa", 8: "it()", 9: "wait()", 1: ""}.get(int(i), f"<{i}>") for i in ids)

  def _refuse(self, text):
    raise AssertionError(f"{text!r} was tokenised again")

  def prompt(self, goal, screens, text, history=()):
    self.prompts += 1
    tokens = np.array([len(goal), 2, 2, 2, self.prompts], np.int32)
    return Prompt(tokens, np.arange(5)[None], np.array([1]), screens[-1][None], 5)


class ScriptedSampler:
  """Writes "wa", "it()", <eos>: three tokens that no tokenizer would choose for the text "wait()". Counts its calls."""

  def __init__(self, policy, version=0):
    self.policy, self.version, self.batches, self.keys = policy, version, [], []

  def act(self, prompts, keys):
    self.batches.append(len(prompts))
    self.keys += [tuple(k.tolist()) for k in keys]
    out = lambda i: Sampled(np.array([7, 8, 1], np.int32), np.float32([-0.1, -0.2, -0.3]) - i, np.float32([0.5, 0.25, 0.0]), self.version)
    return [out(i) for i in range(len(prompts))]


@pytest.fixture
def policy():
  return ScriptedPolicy()


@pytest.fixture
def sampler(policy):
  return ScriptedSampler(policy)


@pytest.fixture
def scripted_env():
  """scripted_env(log=None) -> a ScriptedEnv."""
  return ScriptedEnv


@pytest.fixture
def task():
  """task(id, steps=3, reward=1, ...) -> a Task for ScriptedEnv."""

  def make(id="a", seed=0, seconds=0.0, goal="open the red mug", **params):
    params = {"steps": 3, "reward": 1} | params
    return Task(id, goal, "scripted", "family", seed, params, Limits(99, seconds))

  return make
