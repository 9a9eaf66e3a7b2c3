"""Solved and idle episodes of this project's own tasks on the real desktop: the scripts pass, doing nothing does not (make system; the
image as in test_qemu.py). Three families always, the others with the marker slow."""

import os

import pytest

from core.schema import SUCCESS
from envs import images, scripted
from envs.osworld import suite, tasks
from tools import build_desktop

pytestmark = pytest.mark.real
ALWAYS = ("writer_subscript", "text_append", "shell_make_folder")


@pytest.fixture(scope="module")
def env():
  cfg = suite.defaults()
  cfg.update({"image": os.environ.get("PRACTICE_DESKTOP", images.DEBIAN), "call_seconds": 30.0, "restore_seconds": 150.0, "steps": 20})
  cfg.update({"boot_seconds": 1200.0, "guest_seconds": 75.0, "settle_most": 50.0, "step_seconds": 300.0, "window_seconds": 240.0})
  try:
    images.find(cfg.image, cfg.cache)
  except ValueError:
    build_desktop.main(["--boot_seconds=1200"])
  made = suite.make("osworld/desktop", cfg)
  yield made
  made.close()


@pytest.mark.parametrize("family", [f if f in ALWAYS else pytest.param(f, marks=pytest.mark.slow) for f in tasks.FAMILIES])
def test_the_script_solves_it_and_doing_nothing_does_not(env, family):
  seed = tasks.seeds(family, 1, True)[0]
  task = suite.own_task("osworld/desktop", env.cfg, family, seed)
  solved = scripted.play(env, task, tasks.script_of(family, seed), tasks.VERSION)
  assert solved.rewards[SUCCESS] == 1.0, [step.notes for step in solved.steps]
  assert scripted.play(env, task, (), tasks.VERSION).rewards[SUCCESS] == 0.0
