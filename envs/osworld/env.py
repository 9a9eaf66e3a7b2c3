"""The Gymnasium environment of OSWorld tasks on one virtual machine. What it is given: envs.qemu.Machine, or what has its surface."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from PIL import Image

from core.schema import Action, Task, Unreadable
from envs import actions, judges, phases
from envs.base import ending, observation_space, text_space
from envs.errors import BadFrame, BlackFrame, CheckerFailed, InfraError
from envs.guest import TooMuch
from envs.handset import Untypable
from envs.osworld import scoring, taskfile
from envs.osworld.checker import Checker
from envs.osworld.files import Files
from envs.osworld.getters import GETTERS, LeftBad, Looking
from envs.osworld.hand import Hand
from envs.osworld.lease import Lease
from envs.osworld.setup import Setup, values_of
from envs.referees import Judge
from envs.vm import PoweredOff
from envs.vm_input import CutShort

DESKTOP = ("click", "left_double", "right_single", "drag", "scroll", "hotkey", "type", "wait")  # what Machine.act does by itself
BLINK = 0.002  # share of pixels that may differ between two looks at a screen at rest: a caret
REST_POLL = 0.5  # seconds between two looks at a screen that should stay at rest
COMPAT_RESET, COMPAT_EVALUATE = 60.0, 20.0  # seconds that the benchmark's own runner sleeps


def perform(machine: Any, action: Action) -> None:
  """Does one action on a machine, those of computer_13 and pyautogui included. Untypable where the keyboard has no such character."""
  kind, args = action.kind, action.args
  plain = kind in DESKTOP and ("point" in args or not kind.startswith(("click", "left_", "right_"))) and "button" not in args
  if plain and "clicks" not in args and "seconds" not in args:
    return machine.act(action)
  match kind:
    case "calls":
      for one, more in args["calls"]:
        if time.monotonic() > machine.until:
          raise CutShort("the action took too long: its last calls were left out")
        perform(machine, Action(one, more, {}, action.grammar))
    case "click" | "left_double" | "right_single":
      button = args.get("button", "right" if kind == "right_single" else "left")
      machine.click(tuple(args.get("point", machine.pointer)), button, 2 if kind == "left_double" else args.get("clicks", 1))
    case "move":
      machine.move(tuple(args["point"]))
    case "drag_to":
      machine.drag(machine.pointer, tuple(args["end"]))
    case "mouse_down" | "mouse_up":
      machine.hold(args["button"], kind == "mouse_down")
    case "key_down" | "key_up":
      machine.hold_key(args["key"], kind == "key_down")
    case "wheel":
      for count, less, more in ((args["dx"], "left", "right"), (args["dy"], "down", "up")):
        if count:
          machine.scroll(machine.pointer, more if count > 0 else less, abs(count))
    case "wait":
      time.sleep(max(min(args["seconds"], machine.until - time.monotonic()), 0.0))
    case _:
      raise ValueError(f"action {kind!r} is not one of a desktop")


def rest(machine: Any, still: float, most: float) -> tuple[np.ndarray, bool]:
  """Waits until the screen has been at rest for `still` seconds, at most `most`: an application that starts also waits, for its disk, and
  is not there yet. (The last look, whether it came to rest.)"""
  until, since, frame = time.monotonic() + most, None, None
  while True:
    last, (frame, rested) = frame, machine.settle()
    now = time.monotonic()
    if not rested or last is None or last.shape != frame.shape or (last != frame).any(-1).mean() > BLINK:
      since = now if rested else None
    if since is not None and now - since >= still or now >= until:
      return frame, since is not None and now - since >= still
    time.sleep(min(REST_POLL, still))


class OSWorldEnv(gym.Env):
  """One desktop. machine: see envs.qemu.Machine. start_of(task file) -> (what the machine starts from, the setup steps left to run), or
  None to leave it as it is.

  Ends: an ending action or an unreadable one terminates; the step limit truncates, and the final state is still checked: postconfig, then
  the checks. An infra error ends the episode without a score. finished and call_user say that the agent is done, fail that it cannot be.
  notes: "unsettled" where the screen did not come to rest, "black" where the agent made it so, "refused" where the keyboard cannot type
  what was said, "cut_short" where an action took longer than env.act_seconds and its rest was left out, "postconfig" and "check" for what
  these could not do or read; "parts": the score of each check.
  """

  metadata = {"render_modes": ["rgb_array"], "render_fps": 1}
  graded = True  # scores between 0 and 1 are partial credit
  black_screens = True  # an agent can switch a screen off; a black one that is nobody's doing is found here

  def __init__(
    self, computer: str, machine: Any, hand: Hand, cfg: Any, start_of: Callable | None = None, judge: Judge | None = None
  ):  # fmt: skip
    self.computer, self.machine, self.hand, self.cfg, self.start_of, self.render_mode = computer, machine, hand, cfg, start_of, "rgb_array"
    self.judge = (judge or judges.make(cfg.judge)) if cfg.judge.beside else None
    self.files: Files = hand.files
    self.shown = tuple(cfg.shown) if any(cfg.shown) else tuple(machine.size)
    self.lease = Lease()
    memory = cfg.check_memory_mb << 20
    self.checker = Checker(str(self.lease.folder), cfg.evaluator, cfg.check_seconds, memory, cfg.sandbox)
    self.observation_space, self.action_space = observation_space(*self.shown), text_space()
    self.task: Task | None = None
    self.file: taskfile.TaskFile | None = None
    self.done, self.broken, self.graded_by = True, False, ""

  # -- an episode

  def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
    super().reset(seed=seed)
    task = (options or {}).get("task")
    if not isinstance(task, Task) or task.env != self.computer:
      raise ValueError(f"reset of {self.computer} wants options={{'task': a Task for it}}, got {getattr(task, 'env', task)!r:.100}")
    self.task, self.done, self.steps, self.texts, self.graded_by = task, True, 0, [], ""
    self.frames: collections.deque[np.ndarray] = collections.deque(maxlen=max(1, getattr(self.judge, "frames", 2) if self.judge else 0))
    self._extra: dict[str, Any] = {}
    self.file = taskfile.parse(task.params["file"], task.id, task.family)
    self.lease.clear()
    steps = self.file.config
    if self.start_of is not None:
      self.machine.start, steps = self.start_of(self.file)
    self.machine.revert()
    self._setup().before(steps, task.id)
    if self.cfg.compat_sleeps:
      time.sleep(COMPAT_RESET)
    self._look(*rest(self.machine, self.cfg.still_seconds if steps else 0.0, self.cfg.window_seconds))
    if "black" in self._extra:
      raise BlackFrame("every pixel of the screen is black after the setup steps")
    self.done = False
    return self._observe(), {"notes": dict(self._extra)}

  def step(self, text: str):
    if self.done:
      raise gym.error.ResetNeeded("this episode has ended: call reset before step")
    size = tuple(self.machine.size)
    action = actions.parse(text, self.cfg.grammar, size, self.shown if self.shown != size else None)
    self.steps, self._extra = self.steps + 1, {}
    self.texts.append(text)
    self.done = True  # what is raised below ends the episode
    if isinstance(action, Unreadable):
      return self._finish(action, "unreadable", None)
    if action.kind in actions.ENDS:
      return self._finish(action, "agent", self._verdict(action.kind == "fail"))
    try:
      self._act(action)
    except PoweredOff:
      return self._finish(action, "agent", self._off())
    if self.steps >= self.task.limits.steps:
      return self._finish(action, "steps", self._verdict(False))
    self.done = False
    return self._observe(), 0.0, False, False, self._info(action, "")

  def expire(self) -> dict:
    """Ends the episode from outside (a wall-clock limit); the final state is checked as it stands."""
    self.done, self._extra = True, {}
    return self._finish(None, "seconds", self._verdict(False))[4]

  def _act(self, action: Action) -> None:
    phases.enter("act")
    self.machine.until = time.monotonic() + self.cfg.act_seconds
    try:
      perform(self.machine, action)
    except Untypable as refused:
      self._extra["refused"] = str(refused)[:300]
    except CutShort as cut:
      self._extra["cut_short"] = str(cut)
    finally:
      self.machine.until = math.inf
    phases.enter("settle")
    self._look(*self.machine.settle())
    phases.enter("observe")

  def _off(self) -> scoring.Score:
    """The agent shut the guest down: a try that failed, since nothing on it can be looked at any more."""
    self._extra["powered_off"] = True
    return scoring.Score(0.0, ())

  def _look(self, frame: np.ndarray, rested: bool) -> None:
    if not rested:
      self._extra["unsettled"] = True
    if frame.size == 0:
      raise BadFrame("a screenshot without pixels")
    if not frame.any():
      self._extra["black"] = True
    if (frame.shape[1], frame.shape[0]) != self.shown:
      frame = np.asarray(Image.fromarray(frame).resize(self.shown, Image.Resampling.BOX))
    self.frame = frame
    self.frames.append(frame)

  # -- its score

  def _setup(self) -> Setup:
    values = values_of(tuple(self.machine.size), self.cfg.password)
    return Setup(self.machine.guest, self.files, self.lease, values, self.hand.uploads, self.cfg.step_seconds, self.cfg.window_seconds)

  def _verdict(self, gave_up: bool) -> scoring.Score:
    phases.enter("evaluate")
    claimed = scoring.by_claim(self.file, gave_up)
    if claimed is not None:
      return claimed
    try:
      self.machine.health()
      return self._checked()
    except PoweredOff:
      return self._off()
    except InfraError:
      try:
        self.machine.health()  # a guest that is shutting down answers no more before it is off
      except PoweredOff:
        return self._off()
      raise
    finally:
      self.checker.forget()

  def _checked(self) -> scoring.Score:
    """Postconfig, then the checks."""
    self.machine.release()  # what the agent still holds down would spoil postconfig's keys
    if self.cfg.compat_sleeps:
      time.sleep(COMPAT_EVALUATE)
    rest(self.machine, min(1.0, self.cfg.still_seconds), self.cfg.window_seconds)  # what is being saved is there first
    if told := self._setup().after(self.file.postconfig):
      self._extra["postconfig"] = told
    self.checker.used.clear()
    score = scoring.by_checks(self.file, self._compute)
    if wrong := [part for part in score.parts if not 0 <= part <= 1]:  # not a number is not between them
      raise CheckerFailed(f"{self.task.id}: a check came to {wrong[0]!r}, wanted a number from 0 to 1")
    self._extra["parts"] = list(score.parts)
    if score.told:
      self._extra["check"] = list(score.told)
    self.graded_by = "+".join(sorted(self.checker.used - {"practice"}))
    return score

  def _compute(self, i: int) -> tuple[float, str]:
    """Score of check i, and why it is 0 where its file could not be read."""
    check = self.file.checks[i]
    expected = self._get(check.expected, f"expected-{i}") if check.expected else None
    result = self._get(check.result, f"result-{i}")
    return self.checker.metric(check.func, result, expected, check.options, self.hand.theirs(check.func))

  def _get(self, config: dict, part: str) -> Any:
    look = Looking(self.machine.guest, self.files, self.lease, part, self.cfg.step_seconds, self.machine.waited)
    if config["type"] in GETTERS:
      return GETTERS[config["type"]](config, look)
    failed: list[InfraError] = []

    def helper(name: str, args: list) -> dict:
      try:
        return help_getter(name, args, look)
      except InfraError as error:
        failed.append(error)
        return {"failed": str(error)}

    try:
      return self.checker.getter(config["type"], config, helper)
    except CheckerFailed:
      if failed and isinstance(failed[0], TooMuch):
        raise LeftBad(str(failed[0])) from None
      if failed:
        raise failed[0] from None  # the guest broke, not the getter
      raise

  def _finish(self, action, cause: str, score: scoring.Score | None):
    value = score.value if score is not None else 0.0
    reward, terminated, truncated, told = ending(cause, value >= self.task.threshold, None if score is None else value)
    told |= judges.graded(self, self, cause)
    return self._observe(), reward, terminated, truncated, self._info(action, cause) | told

  def _info(self, action, cause: str) -> dict:
    return {"action": action, "cause": cause, "notes": dict(self._extra)}

  def _observe(self) -> dict:
    return {"screenshot": self.frame.copy(), "goal": self.task.goal, "text": ""}

  def render(self):
    return self.frame.copy()

  def health(self) -> None:
    self.machine.health()

  def close(self) -> None:
    for part in (self.checker, self.machine, self.lease):
      part.close()


def help_getter(name: str, args: list, look: Looking) -> dict:
  """What a getter of desktop-env asks of its controller, answered by the guest: {"value": ...} or {"file": path}."""
  guest, seconds = look.guest, look.seconds

  def kept(data: bytes | None) -> dict:
    return {"value": None} if data is None else {"file": look.lease.write("answer", data, f"{look.part}-asked")}

  match name:
    case "get_file":
      return kept(guest.file(args[0], seconds))
    case "get_vm_wallpaper":
      return kept(guest.wallpaper(seconds))
    case "execute_python_command":
      prefix = "import pyautogui; import time; pyautogui.FAILSAFE = False; "
      ran = guest.execute(["python", "-c", prefix + args[0]], seconds=seconds)
      return {"value": {"status": "success", "output": ran.output, "error": ran.error, "returncode": ran.returncode}}
    case "get_accessibility_tree":
      return {"value": guest.accessibility(seconds)}
    case "get_vm_directory_tree":
      return {"value": guest.list_directory(args[0], seconds)}
    case "get_vm_window_size":
      size = guest.window_size(args[0], seconds)
      return {"value": size and {"width": size[0], "height": size[1]}}
    case "get_vm_screen_size":
      width, height = guest.screen_size(seconds)
      return {"value": {"width": width, "height": height}}
    case "get_vm_desktop_path":
      return {"value": guest.desktop_path(seconds)}
    case "get_terminal_output":
      return {"value": guest.terminal(seconds)}
    case "activate_window":
      return {"value": guest.activate_window(*args, seconds=seconds)}
  return {"failed": f"a getter asked for {name!r:.60}"}
