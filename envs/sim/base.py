"""The simulated computers as Gymnasium environments: text in, pixels out, a checker that reads the final state."""

from __future__ import annotations

import functools
import time
from typing import Any

import gymnasium as gym
import numpy as np

from core.schema import Action, End, Episode, Screen, Step, Task, Unreadable
from envs import actions
from envs.base import ending, observation_space, text_space
from envs.errors import CheckerFailed
from envs.sim import desktop, phone, tasks
from envs.sim.outline import outline
from envs.sim.popups import Luck, Popup, Popups
from envs.sim.widgets import Canvas

COMPUTERS = {"sim/phone": (phone, phone.Phone), "sim/desktop": (desktop, desktop.Desktop)}
CLOSING_KEYS = {"phone": ("press", "key", "BACK"), "desktop": ("hotkey", "keys", ["escape"])}


class SimEnv(gym.Env):
  """One simulated computer.

  computer: "sim/phone" or "sim/desktop". popups: when pop-ups come (none by default). drift: pixels by which the phone's browser
  has been redesigned since the demonstrations. text: the observation has the screen's elements as text, too. points, shown: how actions
  mean points, and the size (W, H) of the image they are on (envs.actions.parse). A step is one line of agent text.
  Ends: an ending action or an unreadable one terminates; check="every_step" also terminates on a pass; the step limit
  truncates, and the final state is still checked.
  """

  metadata = {"render_modes": ["rgb_array"], "render_fps": 4}

  def __init__(
    self, computer: str, popups: Popups | None = None, render_mode: str | None = None, drift: int = 0, text: bool = False,
    points: str | None = None, shown: tuple[int, int] | None = None,
  ):  # fmt: skip
    if computer not in COMPUTERS:
      raise ValueError(f"simulated computer {computer!r}: wanted one of {sorted(COMPUTERS)}")
    self.computer, self.popups, self.render_mode = computer, popups or Popups(), render_mode
    self.module, make = COMPUTERS[computer]
    self._make = functools.partial(make, drift=drift) if drift else make
    self.grammar, self.screen_size = self.module.GRAMMAR, (self.module.WIDTH, self.module.HEIGHT)
    self.text, self.points, self.shown = text, points, shown
    self.observation_space = observation_space(*self.screen_size)
    self.action_space = text_space()
    self.task: Task | None = None
    self.done = True

  def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
    super().reset(seed=seed)
    task = (options or {}).get("task")
    if task is None:  # plain Gymnasium use: a task drawn by the seed
      pool = tasks.practice_tasks(self.computer, 64)
      task = pool[int(self.np_random.integers(len(pool)))]
    if task.env != self.computer:
      raise ValueError(f"task {task.id} is for {task.env}, this environment is {self.computer}")
    self.task, self.app = task, self._make(task)
    self.luck = Luck(self.popups, task.seed, self.screen_size)
    self.popup: Popup | None = None
    self.steps, self.done, self._picture = 0, False, None
    return self._observe(), {"notes": self._notes()}

  def step(self, text: str):
    if self.done:
      raise gym.error.ResetNeeded("this episode has ended: call reset before step")
    action = actions.parse(text, self.grammar, self.screen_size, self.shown, mode=self.points)
    self.steps += 1
    if isinstance(action, Unreadable):
      return self._finish(action, "unreadable", passed=False)
    if action.kind in actions.ENDS:
      # Saying "fail" claims the task cannot be done; every simulated task can, so the claim itself never passes.
      return self._finish(action, "agent", passed=self._check() and action.kind not in ("fail", "call_user"))
    self._act(action)
    if self.task.check == "every_step" and self._check():
      return self._finish(action, "checker", passed=True)
    if self.steps >= self.task.limits.steps:
      return self._finish(action, "steps", passed=self._check())
    return self._observe(), 0.0, False, False, self._info(action, "")

  def expire(self) -> dict:
    """Ends the episode from outside (a wall-clock limit); the final state is checked as it stands."""
    return self._finish(None, "seconds", passed=self._check())[4]

  def _act(self, action: Action) -> None:
    if self.popup is None:
      self.app.act(action)
    elif self._closes(action):
      self.popup = None
    # Anything else is swallowed: the pop-up covers the screen, and the focus beneath it stays where it was.
    self.app.tick()
    arrived = self.luck.draw(eligible=self.popup is None and self.app.page != "loading")
    self.popup = arrived if arrived is not None else self.popup

  def _closes(self, action: Action) -> bool:
    point = action.args.get("point")
    if point is not None and action.kind in ("tap", "click", "left_double"):
      return self.popup.dismissed_at(*point)
    kind, name, value = CLOSING_KEYS[self.grammar]
    return self.popup.escapable and action.kind == kind and action.args[name] == value

  def _check(self) -> bool:
    verdict = self.app.passed()
    if not isinstance(verdict, bool):
      raise CheckerFailed(f"{self.task.id}: the checker said {verdict!r}, wanted True or False")
    return verdict

  def _finish(self, action, cause: str, passed: bool):
    self.done = True
    reward, terminated, truncated, told = ending(cause, passed, None)
    return self._observe(), reward, terminated, truncated, self._info(action, cause) | told

  def _info(self, action, cause: str) -> dict:
    return {"action": action, "cause": cause, "notes": self._notes()}

  def _notes(self) -> dict:
    kind = f"{self.popup.kind}/{self.popup.place}" if self.popup else ""
    return {"popup": kind, "page": self.app.page}

  def _observe(self) -> dict:
    key = (self.app.key(), self.popup)
    if self._picture is None or self._picture[0] != key:
      canvas = Canvas(*self.screen_size, self.app.background)
      self.app.draw(canvas)
      if self.popup is not None:
        self.popup.draw(canvas)
      self._picture = (key, canvas.pixels)
    return {"screenshot": self._picture[1].copy(), "goal": self.task.goal, "text": self._outline() if self.text else ""}

  def _outline(self) -> str:
    mode = self.points or {"phone": "fraction"}.get(self.grammar, "pixels")
    spell = lambda at: "({},{})".format(*actions.to_model_point(at, self.screen_size, self.shown, mode=mode))
    widgets = self.app.widgets() if self.popup is None else self.popup.widgets
    return outline(widgets, spell, self.popup is not None)

  def spell(self, text: str) -> str:
    """An action whose points are the screen's own pixels, or fractions of it, as this environment wants them."""
    if self.points is None:
      return text
    action = actions.parse(text, self.grammar, self.screen_size)
    return actions.format(action, self.grammar, self.screen_size, self.shown, mode=self.points)

  def render(self):
    return self._observe()["screenshot"]


class Slow(gym.Wrapper):
  """A simulated computer that takes its time, as real ones do: every step `seconds`, in a share of the episodes `factor` times that.

  Which episodes are slow depends on the wrapper's own seed and how many it has had; what they show and score is unchanged.
  """

  def __init__(self, env: SimEnv, seconds: float, share: float, factor: float, seed: int = 0):
    super().__init__(env)
    self.seconds, self.share, self.factor = seconds, share, factor
    self._rng, self._now = np.random.default_rng(seed), seconds

  def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
    self._now = self.seconds * (self.factor if self._rng.random() < self.share else 1.0)
    return self.env.reset(seed=seed, options=options)

  def step(self, text: str):
    time.sleep(self._now)
    return self.env.step(text)


def expert_text(env: SimEnv) -> str:
  """The scripted next action, in the environment's grammar: closes a pop-up if one is there, else goes on with the task.

  With pop-ups off these are the demonstrations (no pop-up is ever closed in them); with pop-ups on, known-good episodes.
  """
  thought, kind, args = env.app.expert()
  widgets = env.app.widgets()
  if env.popup is not None:
    thought, kind, args = env.module.CLOSE_POPUP
    widgets = env.popup.widgets
  args = dict(args)
  if "at" in args:
    name = args.pop("at")
    rect = next(w.rect for w in reversed(widgets) if w.name == name)
    args["at"] = rect
  return env.spell(env.module.write(thought, kind, args))


def play(computer: str, task: Task, popups: Popups, **seen) -> Episode:
  """The scripted solution of one task as an Episode without token records: a demonstration, or a known-good episode. seen: text, points
  and shown of the environment."""
  env = SimEnv(computer, popups, **seen)
  obs, info = env.reset(options={"task": task})
  steps: list[Step] = []
  while True:
    screen, notes, text, read = Screen.of(obs["screenshot"]), info["notes"], expert_text(env), obs["text"]
    obs, _, terminated, truncated, info = env.step(text)
    steps.append(Step(screen, text, info["action"], 0, notes=notes, seen=read))
    if terminated or truncated:
      break
  return Episode(
    task_id=task.id, group="scripted", try_index=0, seed=task.seed, steps=steps,
    end=End.TERMINATED if terminated else End.TRUNCATED, end_cause=info["cause"], rewards=info["rewards"], records=[],
    goal=task.goal, family=task.family, checker=f"{computer}/1", final_screen=Screen.of(obs["screenshot"]),
    step_limit=task.limits.steps,
  )  # fmt: skip
