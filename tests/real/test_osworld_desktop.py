"""Solved and idle episodes of this project's own tasks on the real desktop: the scripts pass, doing nothing does not (make system; the
image as in test_machines.py). Three families always, the others with the marker slow."""

import os

import pytest

from envs import images
from envs.osworld import suite, tasks
from tools import build_desktop, check_desktop

pytestmark = pytest.mark.real
ALWAYS = ("writer_subscript", "text_append", "shell_make_folder")


@pytest.fixture(scope="module")
def env():
  image = os.environ.get("PRACTICE_DESKTOP", images.DEBIAN)
  try:
    images.find(image, suite.defaults().cache)
  except ValueError:
    build_desktop.main(["--boot_seconds=1200"])
  made = suite.make(check_desktop.COMPUTER, check_desktop.knobs(image))
  yield made
  made.close()


@pytest.mark.parametrize("family", [f if f in ALWAYS else pytest.param(f, marks=pytest.mark.slow) for f in tasks.FAMILIES])
def test_the_script_solves_it_and_doing_nothing_does_not(env, family):
  row = check_desktop.play(env, family, 0, None)
  assert row.right, str(row)
