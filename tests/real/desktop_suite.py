"""A suite for a pool: one virtual machine, an episode that ends by finished(). Notes tell its process, so that a test can break it."""

import os

import gymnasium as gym

from envs import actions, images, qemu
from envs.base import ending, observation_space, text_space


class Desktop(gym.Env):
  def __init__(self, cfg):
    self.machine = qemu.Machine(qemu.ready(images.find(cfg.image, cfg.cache), cfg), cfg)
    self.observation_space, self.action_space = observation_space(*self.machine.size), text_space()
    self.used = False

  def notes(self):
    return {"notes": {"pid": self.machine.pid, "folder": os.fspath(self.machine.vm.nest.folder)}}

  def look(self, frame):
    return {"screenshot": frame.copy(), "goal": self.task.goal, "text": ""}

  def reset(self, *, seed=None, options=None):
    self.task = options["task"]
    if self.used:
      self.machine.revert()
    self.used = True
    return self.look(self.machine.screenshot()), self.notes()

  def step(self, text):
    action = actions.parse(text, "desktop", self.machine.size)
    if action.kind in actions.ENDS:
      reward, terminated, truncated, told = ending("agent", True, None)
      return self.look(self.machine.screenshot()), reward, terminated, truncated, self.notes() | told | {"action": action, "cause": "agent"}
    self.machine.act(action)
    return self.look(self.machine.settle()[0]), 0.0, False, False, self.notes() | {"action": action, "cause": ""}

  def health(self):
    self.machine.health()

  def close(self):
    self.machine.close()


def make(computer, cfg, clean=False):
  return Desktop(cfg)
