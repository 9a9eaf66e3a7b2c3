"""A computer that misbehaves on request: an environment suite for the tests of workers and pool, given to them as a file.

What goes wrong is said by the config (at boot), by the task's params["reset"], or by the agent's text. Every action that is carried
out is written to the file params["diary"], so that a test can count from outside what was really done.
"""

import os
import signal
import subprocess
import sys
import time
import types

import numpy as np

from core.schema import SUCCESS, Limits, Task, Unreadable
from envs import phases
from envs.errors import CheckerFailed, InfraError, ResetFailed

SHAPE = (6, 4, 3)
COMPUTER = "rogue/one"


class OutOfInk(InfraError):
  """An infra error that only this environment knows."""


def task(name="plain", **params):
  """A task of the rogue computer; reset="hang", "raise", ... says how its reset goes wrong."""
  return Task(name, "do it", COMPUTER, "rogue", 5, params, Limits(20))


def do(what):
  """One kind of misbehaviour; anything else is fine."""
  what, _, rest = (what or "").partition(" ")
  if what == "hang":
    time.sleep(3600)
  elif what == "raise":
    raise KeyError("the disk is full")
  elif what == "infra":
    raise {"reset": ResetFailed, "checker": CheckerFailed, "ink": OutOfInk}[rest]("said by the environment")
  elif what == "exit":
    print("last words of the worker")
    os._exit(7)
  elif what == "leave":
    sys.exit(0)
  elif what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
  elif what == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
  elif what == "shout":
    for i in range(int(rest)):
      print(f"line {i} " + "x" * 1000)
  elif what == "phases":
    for name in rest.split():
      phases.enter(name) if name in phases.PHASES else time.sleep(float(name))
  elif what == "sleep":
    time.sleep(float(rest))
  elif what == "spawn":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=rest == "away")


class Rogue:
  def __init__(self, cfg):
    do(cfg.get("boot", ""))
    self.cfg, self.unwrapped, self.black_screens = cfg, self, cfg.get("black_screens", False)
    self.observation_space = {"screenshot": types.SimpleNamespace(shape=SHAPE)}
    self.count, self.solved, self.frame = 0, False, ""

  def reset(self, *, seed=None, options=None):
    self.task, self.count, self.solved, self.frame = options["task"], 0, False, ""
    self.write("reset")
    do(self.task.params.get("reset"))
    self.frame = self.task.params.get("frame", "")
    self.solved = self.task.params.get("solved", False)
    return self.look(), {"notes": {"seed": seed}}

  def step(self, text):
    self.count += 1
    self.write(text)
    do(text)
    self.frame = text if text.startswith("frame") else self.frame
    self.solved = self.solved or text == "solve"
    over = text in ("done", "give up") or self.count >= self.task.limits.steps
    info = {"action": Unreadable(text), "cause": "agent" if over else "", "notes": {"odd": object() if text == "odd" else (1, 2.5)}}
    if over:
      info |= {"rewards": self.rewards(), "partial": None}
    return self.look(), float(self.solved and over), over, False, info

  def expire(self):
    return {"action": None, "cause": "seconds", "notes": {}, "rewards": self.rewards(), "partial": None}

  def rewards(self):
    if self.cfg.get("checker", ""):
      return {SUCCESS: {"always": 1.0, "never": 0.0}[self.cfg.checker]}
    return {SUCCESS: float(self.solved)}

  def look(self):
    shape = (3, 4, 3) if self.frame == "frame short" else SHAPE
    pixels = np.full(shape, 0 if self.frame == "frame black" else 10 + self.count, np.uint8)
    return {"screenshot": None if self.frame == "frame none" else pixels, "goal": self.task.goal, "text": ""}

  def health(self):
    do(self.cfg.get("health", ""))

  def write(self, what):
    if "diary" in self.task.params:
      with open(self.task.params["diary"], "a") as file:
        file.write(what + "\n")

  def close(self):
    do(self.cfg.get("close", ""))


def make(computer, cfg, clean=False):
  return Rogue(cfg)
