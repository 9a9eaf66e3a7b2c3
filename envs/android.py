"""Android phones behind adb as Gymnasium environments: an emulator, a phone, or the tests' double of one.

  --config.env.image=emulator-5554              a device by its serial; 127.0.0.1:5555 one to connect to; several with commas between
  --config.env.image=avd:Pixel_6                an emulator for every worker, started by it (envs/emulator.py)

The observation, the actions and `info` are the simulated phone's. docs/android.md tells the rest.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import time
from typing import Any

import gymnasium as gym
import ml_collections
import numpy as np
from PIL import Image

from core.schema import Action, Episode, Limits, Task, Unreadable
from envs import actions, judges, phases, sim
from envs.adb import Device, Server
from envs.base import ending, observation_space, text_space
from envs.canary import Canary
from envs.emulator import Emulator
from envs.errors import BadFrame
from envs.handset import Handset, Untypable
from envs.locks import Lock, take
from envs.referees import Checks, Judge, Practice, kept_for

GRAMMARS = ("phone", "digirl", "androidworld")
MACHINE = ("image", "adb", "adb_keys", "emulator", "emulator_args", "attach_seconds", "boot_seconds", "call_seconds", "start_seconds")
SETTLE_SPARE = 1.5  # seconds for the last screenshot of a screen that does not come to rest


def defaults() -> ml_collections.ConfigDict:
  """Knobs of real phones beside those of the simulated one; seconds unless said otherwise."""
  cfg = sim.defaults()
  for name in ("text", "points", "shown"):  # a phone's own grammar has fractions, and nothing reads its screen
    del cfg[name]
  cfg.update(
    {
      "image": "",  # serials or host:port, commas between, or avd:NAME; every environment has one of its own
      "grammar": "phone",  # phone, digirl or androidworld
      "screen": (0, 0),  # (width, height) the agent is shown; (0, 0): the phone's own at the start; another size is resized to it
      "tasks": "",  # a file: .txt, one goal a line, or .jsonl; "": the practice application of the test device
      "held_out": "",  # the same for tasks that are only evaluated
      "steps": 20,  # step limit of tasks that name none
      "screenshot": "raw",  # raw or png: raw is quicker for the phone, png for a slow line
      "settle_least": 0.2,  # after an action before the first look
      "settle_most": 3.0,  # then the screen counts as it is, and the notes say unsettled
      "settle_frames": 2,  # equal frames in a row that make a screen settled; 1: the first counts
      "settle_tolerance": 0.002,  # share of pixels that may differ: a caret blinks
      "call_seconds": 10.0,  # of any one adb call
      "start_seconds": 60.0,  # of starting an application
      "attach_seconds": 30.0,  # of connecting to a device, of its being offline, of its being somebody else's
      "boot_seconds": 240.0,  # of an emulator's start
      "wait_seconds": 1.0,  # of the agent's wait()
      "swipe_ms": 300,  # milliseconds
      "unicode_ime": "com.android.adbkeyboard/.AdbIME",  # types what is not ASCII, where it is installed
      "apps": {},  # name -> package, for open_app
      "adb": "adb",
      "adb_keys": "",  # a key that the phone knows, e.g. ~/.android/adbkey; "": a new one
      "emulator": "emulator",
      "emulator_args": (),
      "snapshot": "",  # a saved state of the AVD, gone back to before every episode; "": applications are stopped and cleared
    }
  )
  cfg.judge = judges.defaults()
  return cfg


def check(cfg: ml_collections.ConfigDict) -> None:
  """Domains of the knobs; each failure one line, before any device is asked."""
  judges.check(cfg.judge)
  sim.check(ml_collections.ConfigDict(cfg.to_dict() | {"computer": "sim/phone"}))
  if not places(cfg):
    raise ValueError("env.image is empty: wanted serials or host:port of devices, commas between, or avd:NAME")
  if len(set(places(cfg))) < len(places(cfg)):
    raise ValueError(f"env.image is {cfg.image!r}, wanted every device once")
  wanted = {
    "grammar": (cfg.grammar in GRAMMARS, " or ".join(GRAMMARS)),
    "screenshot": (cfg.screenshot in ("raw", "png"), "raw or png"),
    "screen": (len(cfg.screen) == 2 and all(isinstance(n, int) and 0 <= n <= 8192 for n in cfg.screen), "(width, height) or (0, 0)"),
    "steps": (cfg.steps >= 1, "1 or more"),
    "settle_frames": (1 <= cfg.settle_frames <= 20, "1 to 20"),
    "settle_tolerance": (0 <= cfg.settle_tolerance < 1, "a share, 0 or more and below 1"),
    "settle_least": (0 <= cfg.settle_least <= cfg.settle_most, "0 to env.settle_most"),
    "swipe_ms": (1 <= cfg.swipe_ms <= 60_000, "1 to 60000 milliseconds"),
    "snapshot": (not cfg.snapshot or cfg.image.startswith("avd:"), "empty, unless env.image is avd:NAME"),
  }
  wanted |= {n: (0 < cfg[n] < 3600, "seconds above 0") for n in ("settle_most", "call_seconds", "start_seconds", "attach_seconds")}
  wanted |= {n: (0 < cfg[n] < 3600, "seconds above 0") for n in ("boot_seconds", "wait_seconds")}
  for name, (good, want) in wanted.items():
    if not good:
      raise ValueError(f"env.{name} is {cfg[name]!r}, wanted {want}")
  for name in ("tasks", "held_out"):
    if cfg[name] and not os.path.isfile(cfg[name]):
      raise ValueError(f"env.{name} is {cfg[name]!r}, and there is no such file")
  if bool(cfg.tasks) != bool(cfg.held_out):
    raise ValueError("env.tasks and env.held_out: wanted both files, or neither")


def places(cfg: ml_collections.ConfigDict) -> list[str]:
  return [place.strip() for place in cfg.image.split(",") if place.strip()]


class Phone(Handset):
  """A handset with all that stands behind it: the adb server, the emulator if there is one, and the lock that keeps others off."""

  def __init__(self, cfg: ml_collections.ConfigDict, place: str, lock: Lock | None):
    self.lock, self.emulator, self.server = lock, None, None
    try:
      if place.startswith("avd:"):
        self.emulator = Emulator(cfg.emulator, place.removeprefix("avd:"), cfg.snapshot, tuple(cfg.emulator_args))
      serial = self.emulator.serial if self.emulator else place
      self.server = Server(cfg.adb, cfg.adb_keys, usb=self.emulator is None and ":" not in serial)
      super().__init__(Device(self.server.address, serial), cfg)
      if self.emulator:
        self.emulator.boot(self.device, cfg.boot_seconds)
      self.device.attach(cfg.attach_seconds)
      self.prepare()
    except BaseException:
      self.close()
      raise

  def ready(self) -> None:
    """Before an episode: whatever was lost and can be had again is."""
    if self.emulator is not None:
      self.emulator.check()
      if self.cfg.snapshot:
        self.emulator.restore()
    if self.server.ensure():
      self.device.address = self.server.address
    elif self.cfg.snapshot:  # what the saved state's adbd remembers of this connection is another time's
      self.device.detach(self.cfg.attach_seconds)
    self.device.attach(self.cfg.attach_seconds)
    if self.cfg.snapshot:
      self.health()

  def close(self) -> None:
    for part in (self.server, self.emulator, self.lock):
      if part is not None:
        part.close()


class AndroidEnv(gym.Env):
  """One phone. phone: Phone, or what has its ready, screenshot, act, health and close; referee: see envs.referees.

  A step is one line of agent text. Ends: an ending action or an unreadable one terminates; check="every_step" also terminates on a
  pass; the step limit truncates, and the final state is still checked. An infra error ends the episode without a score.
  notes: "popup", "page", "unsettled" where the screen did not come to rest, "refused" where the phone has no way to do what was said
  (text it cannot type): such a step does nothing and counts.
  """

  metadata = {"render_modes": ["rgb_array"], "render_fps": 1}

  def __init__(self, computer: str, phone: Any, referee: Any, cfg: ml_collections.ConfigDict, judge: Judge | None = None):
    self.computer, self.phone, self.referee, self.cfg, self.render_mode = computer, phone, referee, cfg, "rgb_array"
    self.judge = (judge or judges.make(cfg.judge)) if cfg.judge.beside else None
    self.grammar = cfg.grammar
    height, width = phone.screenshot(cfg.call_seconds).shape[:2]
    self.screen_size = (width, height)
    self.shown_size = tuple(cfg.screen) if any(cfg.screen) else self.screen_size
    self.observation_space = observation_space(*self.shown_size)
    self.action_space = text_space()
    self.task: Task | None = None
    self.done = True

  def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
    super().reset(seed=seed)
    task = (options or {}).get("task")
    if not isinstance(task, Task) or task.env != self.computer:
      raise ValueError(f"reset of {self.computer} wants options={{'task': a Task for it}}, got {getattr(task, 'env', task)!r:.100}")
    self.task, self.done, self.steps, self.texts = task, True, 0, []
    self.frames: collections.deque[np.ndarray] = collections.deque(maxlen=max(self.referee.keeps, kept_for(self.judge)))
    self.phone.ready()
    self.referee.begin(self.phone, task)
    self._extra = {}
    self._settle()
    self._notes = self.referee.look(self.phone)
    self.done = False
    return self._observe(), {"notes": self._notes | self._extra}

  def step(self, text: str):
    if self.done:
      raise gym.error.ResetNeeded("this episode has ended: call reset before step")
    shown = self.shown_size if self.shown_size != self.screen_size else None
    action = actions.parse(text, self.grammar, self.screen_size, shown)
    self.steps, self._extra = self.steps + 1, {}
    self.texts.append(text)
    self.done = True  # what is raised below ends the episode
    if isinstance(action, Unreadable):
      return self._finish(action, "unreadable", 0.0)
    if action.kind in actions.ENDS:
      return self._finish(action, "agent", self._verdict(action))
    self._act(action)
    if self.task.check == "every_step" and (score := self._verdict(None)) >= self.task.threshold:
      return self._finish(action, "checker", score)
    if self.steps >= self.task.limits.steps:
      return self._finish(action, "steps", self._verdict(None))
    self.done = False
    return self._observe(), 0.0, False, False, self._info(action, "")

  def expire(self) -> dict:
    """Ends the episode from outside (a wall-clock limit); the final state is checked as it stands."""
    self.done, self._extra = True, {}
    self._notes = self.referee.look(self.phone)
    return self._finish(None, "seconds", self._verdict(None))[4]

  def _act(self, action: Action) -> None:
    phases.enter("act")
    try:
      self.phone.act(action)
    except Untypable as refused:
      self._extra["refused"] = str(refused)
    phases.enter("settle")
    time.sleep(self.cfg.settle_least)
    self._settle()
    phases.enter("observe")
    self._notes = self.referee.look(self.phone)

  def _settle(self) -> None:
    """Looks until the screen is at rest, or it has been long enough."""
    until, same, frame = time.monotonic() + self.cfg.settle_most, 0, None
    while same < self.cfg.settle_frames:
      last, frame = frame, self.phone.screenshot(max(until - time.monotonic(), 0.0) + SETTLE_SPARE)
      alike = last is not None and last.shape == frame.shape
      same = same + 1 if alike and (last != frame).any(-1).mean() <= self.cfg.settle_tolerance else 1
      if time.monotonic() > until:
        if same < self.cfg.settle_frames:
          self._extra["unsettled"] = True
        break
    self.screen_size, self.frame = (frame.shape[1], frame.shape[0]), self._show(frame)
    self.frames.append(self.frame)

  def _show(self, frame: np.ndarray) -> np.ndarray:
    if frame.size == 0:
      raise BadFrame("a screenshot without pixels")
    if (frame.shape[1], frame.shape[0]) == self.shown_size:
      return frame
    return np.asarray(Image.fromarray(frame).resize(self.shown_size, Image.Resampling.BOX))

  def _verdict(self, said: Action | None) -> float:
    """The score as things stand. A claim that it cannot be done passes exactly the tasks that cannot."""
    gave_up = said is not None and said.kind == "fail"
    if self.task.params.get("infeasible", False):
      return float(gave_up)
    phases.enter("evaluate")
    if said is not None and said.kind == "answer" and hasattr(self.referee, "hear"):
      self.referee.hear(said.args["text"])
    score = self.referee.verdict(self.phone, self.task, list(self.frames), self.texts)
    return 0.0 if gave_up else score

  def _finish(self, action, cause: str, score: float):
    partial = score if self.referee.graded and cause != "unreadable" else None
    reward, terminated, truncated, told = ending(cause, score >= self.task.threshold, partial)
    told |= judges.graded(self, self.referee, cause)
    return self._observe(), reward, terminated, truncated, self._info(action, cause) | told

  def _info(self, action, cause: str) -> dict:
    return {"action": action, "cause": cause, "notes": self._notes | self._extra}

  def _observe(self) -> dict:
    return {"screenshot": self.frame.copy(), "goal": self.task.goal, "text": ""}

  def render(self):
    return self.frame.copy()

  def health(self) -> None:
    self.phone.health()

  def close(self) -> None:
    self.referee.close()
    self.phone.close()


def pick(cfg: ml_collections.ConfigDict) -> Phone:
  """A device that nobody has, this worker's by its number if it can be."""
  found = places(cfg)
  if found[0].startswith("avd:"):
    return Phone(cfg, found[0], None)
  index, lock = take("device", found, int(os.environ.get("PRACTICE_COMPUTER", "0")), cfg.attach_seconds)
  return Phone(cfg, found[index], lock)


def make(computer: str, cfg: ml_collections.ConfigDict, clean: bool = False, quick: bool = True, judge: Judge | None = None) -> gym.Env:
  """One phone that nobody else has. clean: no pop-up in the practice application; real phones have what they have. judge: for
  tasks without a check of their own; by default the one of env.judge."""
  del quick  # a real phone takes the time it takes
  check(cfg)
  chance = 0.0 if clean else cfg.popup_chance
  practice = Practice({"chance": chance, "most": cfg.popup_most, "kinds": list(cfg.popup_kinds)}, cfg.drift)
  judge = judge or judges.make(cfg.judge)
  phone = pick(cfg)
  try:
    return AndroidEnv(computer, phone, Checks(judge) if cfg.tasks else practice, cfg, judge)
  except BaseException:
    phone.close()
    raise


def task_lists(computer: str, cfg: ml_collections.ConfigDict) -> dict[str, list[Task]]:
  """practice, in_domain (the first of those) and held_out: of the files, or the simulated phone's."""
  if not cfg.tasks:
    lists = sim.task_lists("sim/phone", cfg)
    return {name: [as_own(task, computer) for task in tasks] for name, tasks in lists.items()}
  practice, held_out = read_tasks(cfg.tasks, computer, cfg), read_tasks(cfg.held_out, computer, cfg)
  if both := {t.id for t in practice} & {t.id for t in held_out}:
    raise ValueError(f"env.tasks and env.held_out share {len(both)} tasks, e.g. {min(both)}: a held-out task is never practised")
  if not cfg.judge.kind and (bare := [t.id for t in practice + held_out if not t.params.keys() & {"check", "infeasible"}]):
    raise ValueError(f"{len(bare)} tasks have no check, e.g. {bare[0]}: wanted a judge of them, --config.env.judge.kind=endpoint")
  return {"practice": practice, "in_domain": practice[: cfg.in_domain_tasks], "held_out": held_out}


def as_own(task: Task, computer: str) -> Task:
  """A task of the simulated phone for the practice application of this computer."""
  return Task(**{name: getattr(task, name) for name in task.__dataclass_fields__} | {"env": computer})


def read_tasks(path: str, computer: str, cfg: ml_collections.ConfigDict) -> list[Task]:
  """Tasks of a file: goals, one a line (DigiRL's task sets), judged at every step from the home screen; or JSON lines with goal, and as
  they are needed id, family, start, stop, clear, check, infeasible, steps, when ("end" or "every_step")."""
  out = []
  for number, line in enumerate(pathlib.Path(path).read_text(encoding="utf-8").splitlines()):
    if not line.strip():
      continue
    try:
      said = {"when": "every_step", "goal": line.strip()} if not path.endswith(".jsonl") else json.loads(line)
      if unknown := said.keys() - {"goal", "id", "family", "start", "stop", "clear", "check", "infeasible", "steps", "when"}:
        raise ValueError(f"unknown {', '.join(sorted(unknown))}")
      params = {k: said[k] for k in ("start", "stop", "clear", "check", "infeasible") if k in said}
      name = f"{pathlib.Path(path).stem}-{said.get('id', said['goal'])}"
      limits = Limits(said.get("steps", cfg.steps))
      out.append(Task(name, said["goal"], computer, said.get("family", "android"), 0, params, limits, said.get("when", "end")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise ValueError(f"{path}, line {number + 1}: {error}: wanted a goal, or a JSON object with one") from None
  if not out or len({t.id for t in out}) < len(out):
    raise ValueError(f"{path}: wanted tasks, no two with one id or goal; got {len(out)} with {len({t.id for t in out})} ids")
  return out


def demonstrations(computer: str, count: int, seed: int, cfg: ml_collections.ConfigDict | None = None) -> list[Episode]:
  """Scripted demonstrations, played on the simulated phone, which is what the practice application shows. No knob of cfg changes them."""
  del cfg
  return sim.demonstrations("sim/phone", count, seed)


def vocabulary(computer: str, cfg: ml_collections.ConfigDict | None = None) -> tuple[list[str], tuple[int, int]]:
  """(pieces of text for a small tokenizer, (width, height) that the agent is shown)."""
  pieces, size = sim.vocabulary("sim/phone")
  return pieces, size if cfg is None or not any(cfg.screen) else tuple(cfg.screen)


def canaries(computer: str, cfg: ml_collections.ConfigDict) -> list[Canary]:
  """Of the practice application; tasks of a file have no scripted solution here."""
  if cfg.tasks or cfg.grammar != "phone":
    return []
  return [canary._replace(task=as_own(canary.task, computer)) for canary in sim.canaries("sim/phone", cfg)]
