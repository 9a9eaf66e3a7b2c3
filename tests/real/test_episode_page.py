"""The episode page in a real headless Chromium (make system): labels by keyboard, 100,000 episodes, a hostile episode, light and dark."""

import contextlib
import pathlib
import signal
import subprocess
import sys
import time

import httpx2
import numpy as np
import pytest

from benchmarks.episode_page import multiply
from core.find import ROOT
from core.schema import Action, Screen
from rollout import labels as store_labels
from rollout.store import EpisodeStore
from tests.conftest import make_episode
from tests.real.browser import Reader

pytestmark = pytest.mark.real


@contextlib.contextmanager
def served(workdir: pathlib.Path):
  """The address that the program prints."""
  page = subprocess.Popen([sys.executable, "-m", "tools.episodes", f"--workdir={workdir}"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
  try:
    yield page.stdout.readline().strip()
    page.send_signal(signal.SIGTERM)
    assert page.wait(60) == 0
  finally:
    page.kill()
    page.wait(10)


def fill(workdir: pathlib.Path, passes: int, fails: int) -> None:
  with EpisodeStore(workdir / "episodes") as store:
    for i in range(passes + fails):
      store.add(make_episode(int(i < passes), index=i, group=f"g{i // 8}"), 0)


def test_twenty_episodes_labelled_by_keyboard_and_kept(tmp_path):
  fill(tmp_path, 12, 10)
  with served(tmp_path) as address, Reader(address) as reader:
    reader.open(address)
    assert "token" not in reader.js("location.href")
    reader.key("l", leaves=True)
    for i in range(20):
      key = int(reader.js("location.pathname").rpartition("/")[2])
      said = reader.text()
      assert "Did it reach the goal?" in said and "reward" not in said and "the grader" not in said
      reader.key("End")
      assert reader.text("section.on h2").startswith("step 2 of 2")
      reader.key("p" if key <= 12 and i % 5 else "f", leaves=True)  # every fifth label says fail
      assert "the grader" in reader.text(".told")
      reader.key("p")  # not asked any more: a key too many changes nothing
      if i < 19:
        reader.key("n", leaves=True)
    found = store_labels.measured(tmp_path)
    assert found.n == 20 and found.pass_fail == 0 and found.pass_pass and found.fail_fail >= 8
    reader.key("a", leaves=True)
    shown = reader.text("#agreement"), reader.text("#factor")
    assert shown == (f"{100 * (20 - found.fail_pass) / 20:.1f}%", f"{1 - found.false_pass_rate:.3f}")
    assert reader.problems == [] and reader.dialogs == []
  with served(tmp_path) as address, Reader(address) as reader:
    reader.open(address)
    reader.key("a", leaves=True)
    assert (reader.text("#agreement"), reader.text("#factor")) == shown and "20 labels" in reader.text(".cards")


def test_steps_rows_and_groups_by_keyboard(tmp_path):
  fill(tmp_path, 1, 7)
  with served(tmp_path) as address, Reader(address) as reader:
    reader.open(address)
    reader.key("/")
    reader.key("j")  # goes into the field
    assert reader.js("document.activeElement.value") == "j"
    reader.key("Escape")
    reader.key("j")
    reader.key("j")
    assert reader.text("tr.on td") == "7"
    reader.key("Enter", leaves=True)
    assert reader.js("location.pathname") == "/episode/7" and reader.text("section.on h2").startswith("step 1 of 2")
    reader.key("ArrowRight")
    reader.key("ArrowRight")  # there is no third
    assert reader.text("section.on h2").startswith("step 2 of 2") and reader.js("document.querySelectorAll('section.on').length") == 1
    reader.key("k", leaves=True)
    assert reader.js("location.pathname") == "/episode/8"
    reader.key("g", leaves=True)
    assert reader.js("document.querySelectorAll('.try').length") == 8 and "8 tries, 1 passed" in reader.text()
    assert reader.problems == []


def test_the_mark_stands_where_the_action_landed(tmp_path):
  one = make_episode(1)
  one.steps[0].screen = Screen.of(np.full((300, 200, 3), 255, np.uint8))
  one.steps[0].action, one.steps[0].point = Action("tap", {"point": [150, 75]}, {}, "phone"), (150, 75)
  with EpisodeStore(tmp_path / "episodes") as store:
    store.add(one, 0)
  with served(tmp_path) as address, Reader(address) as reader:
    reader.open(address)
    reader.open(address.partition("?")[0] + "episode/1")
    where = """(() => { const c = (what) =>
      document.querySelector('section.on ' + what).getBoundingClientRect();
      const m = c('circle.mark'), p = c('image');
      return [(m.x + m.width / 2 - p.x) / p.width, (m.y + m.height / 2 - p.y) / p.height] })()"""
    assert reader.js(where) == pytest.approx([150.5 / 200, 75.5 / 300], abs=2e-3)


def test_every_page_opens_with_100_000_episodes(tmp_path):
  """How fast is benchmarks/episode_page.py's to say; here every page is whole, and the store's pages follow each other without a gap."""
  fill(tmp_path, 4, 4)
  multiply(tmp_path, 100_000)
  with served(tmp_path) as address, Reader(address) as reader:
    reader.open(address)
    assert "100,008 episodes" in reader.text()
    site = address.partition("?")[0]
    links = "[...document.querySelectorAll('tbody a[href^=\"/episode/\"]')]"
    shown = lambda: reader.js(links + ".map(a => +a.pathname.split('/').pop())")
    reader.open(site + "?before=50000")
    first = shown()
    assert max(first) == 49_999
    reader.key("n", leaves=True)
    assert max(shown()) == min(first) - 1
    reader.open(site + "?task=task-5&verdict=pass")
    assert "task-5" in reader.text("tbody") and "task-6" not in reader.text("tbody")
    for path, words in (("?family=none", "0 episodes"), ("label", "Did it reach the goal?"), ("episode/5", "step 1 of 2")):
      reader.open(site + path)
      assert words in reader.text(), path


def test_a_hostile_episode_runs_nothing_and_asks_nobody(tmp_path):
  hostile = """</pre></script><script>alert(1)</script><img src="http://evil.example/x" onerror="alert(2)"><svg onload=alert(3)>"""
  one = make_episode(0, task="../../" + hostile, group=hostile, first=hostile)
  one.goal = one.family = hostile
  one.steps[0].action = Action("tap", {hostile: hostile}, {}, "phone", hostile)
  with EpisodeStore(tmp_path / "episodes") as store:
    store.add(one, 0)
  with served(tmp_path) as address, Reader(address) as reader:
    reader.open(address)
    for key in ("l", "f", "e"):
      reader.key(key, leaves=True)
    reader.key("j")
    reader.key("Enter", leaves=True)
    assert hostile in reader.text("section.on pre") and reader.text("h1") == hostile
    reader.key("g", leaves=True)
    time.sleep(0.2)
    assert reader.dialogs == [] and reader.problems == [] and reader.js("document.scripts.length") == 1
    asked = reader.js("performance.getEntriesByType('resource').map(e => e.name)")
    assert asked and all(name.startswith(address.partition("?")[0]) for name in asked)
    assert httpx2.get(address.partition("?")[0]).status_code == 403


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(tmp_path, dark):
  fill(tmp_path, 1, 1)
  with served(tmp_path) as address, Reader(address, dark=dark) as reader:
    reader.open(address)
    back, ink = (reader.js(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    level = lambda colour: sum(int(x) for x in colour.removeprefix("rgb(").rstrip(")").split(","))
    assert (level(back) < level(ink)) == dark and abs(level(back) - level(ink)) > 400
