"""Task lists of the simulated computers, what a task's id promises, and knobs that are refused or honoured."""

import functools
import json
import time

import numpy as np
import pytest

import envs.sim as sim
from envs.sim import desktop, phone, tasks
from envs.sim.base import COMPUTERS, SimEnv, expert_text
from envs.sim.popups import Popups

both = pytest.mark.parametrize("computer", ["sim/phone", "sim/desktop"])


@functools.cache
def sim_tasks(computer):
  return tasks.practice_tasks(computer, 64)


def start_screen(computer, task):
  env = SimEnv(computer)
  return env.reset(options={"task": task})[0]["screenshot"]


def what(task):
  return task.family, json.dumps(task.params, sort_keys=True)


@both
def test_task_lists(computer):
  lists = sim.task_lists(computer, sim.defaults())
  assert {k: len(v) for k, v in lists.items()} == {"practice": 256, "in_domain": 32, "held_out": 96}
  assert lists["in_domain"] == lists["practice"][:32]
  shown = tasks.demonstration_tasks(computer, 2000, 0) + tasks.demonstration_tasks(computer, 200, 5)
  everything = lists["practice"] + lists["held_out"] + shown
  assert len({t.id for t in everything}) == len(everything)
  held = {what(t) for t in lists["held_out"]}
  assert len(held) == 96
  assert not held & {what(t) for t in lists["practice"] + shown}
  assert not {t.seed for t in lists["practice"]} & {t.seed for t in shown + lists["held_out"]}
  for t in everything:
    assert json.loads(json.dumps(t.params)) == t.params
  again = sim.task_lists(computer, sim.defaults())
  assert again == lists


@both
def test_held_out_tasks_come_from_every_family_alike(computer):
  families = [t.family for t in tasks.held_out_tasks(computer)]
  assert {families.count(f) for f in families} == {96 // len(set(families))}
  practised = [t.family for t in tasks.practice_tasks(computer, 256)]
  assert max(map(practised.count, set(practised))) - min(map(practised.count, set(practised))) <= 1


@both
def test_an_id_names_one_start_state(computer):
  """Within a seed, different parameters have different ids; and the same id has the same goal, params and picture."""
  named = {}
  for family, combos in COMPUTERS[computer][0].families().items():
    for params in combos:
      task = tasks._task(computer, family, params, 5)
      assert named.setdefault(task.id, (family, params)) == (family, params)
  task = sim_tasks(computer)[1]
  again = tasks.practice_tasks(computer, 2)[1]
  assert again == task and np.array_equal(start_screen(computer, task), start_screen(computer, again))


def knobs(**changes):
  cfg = sim.defaults()
  cfg.update(changes)
  return cfg


@pytest.mark.parametrize(
  "changes, words",
  [({"popup_chance": 1.5}, "env.popup_chance is 1.5, wanted a number from 0 to 1"),
   ({"popup_chance": -0.1}, "env.popup_chance is -0.1"),
   ({"popup_chance": float("nan")}, "env.popup_chance is nan"),
   ({"popup_most": -1}, "env.popup_most is -1, wanted 0 or more"),
   ({"popup_kinds": ("sign_in", "banner")}, "env.popup_kinds are .*banner.*corner.*notify"),
   ({"popup_kinds": ()}, r"env.popup_kinds are \[\], wanted one or more"),
   ({"in_domain_tasks": 0}, "env.in_domain_tasks is 0"),
   ({"practice_tasks": 16}, r"env.in_domain_tasks is 32, wanted 1 to env.practice_tasks \(16\)"),
   ({"practice_tasks": 0}, "env.practice_tasks"),
   ({"held_out_tasks": 97}, "env.held_out_tasks is 97, wanted 1 to 96"),
   ({"held_out_tasks": 0}, "env.held_out_tasks is 0")],
)  # fmt: skip
def test_bad_knobs_give_one_clear_line(changes, words):
  with pytest.raises(ValueError, match=words) as e:
    sim.check(knobs(**changes))
  assert "\n" not in str(e.value)


def test_explicit_zeros_are_honoured():
  sim.check(knobs(popup_chance=0.0, popup_most=0))
  assert sim.make("sim/phone", knobs(popup_chance=0.0)).popups.chance == 0.0
  assert sim.make("sim/phone", knobs(popup_most=0)).popups.most == 0
  env = sim.make("sim/desktop", knobs(popup_chance=1.0), clean=True)
  assert env.popups.chance == 0.0
  assert sim.make("sim/phone", knobs(popup_kinds=("corner",))).popups.kinds == ("corner",)


@both
def test_the_vocabulary_is_the_computers_own(computer):
  pieces, size = sim.vocabulary(computer)
  module = {"sim/phone": phone, "sim/desktop": desktop}[computer]
  assert size == (module.WIDTH, module.HEIGHT) == start_screen(computer, sim_tasks(computer)[0]).shape[1::-1]
  assert set(pieces) == set(module.pieces())


def test_a_redesign_moves_the_browser_down_and_leaves_every_task_solvable():
  """drift 12: the address bar's rectangle is 12 pixels lower, and the script, which aims at what it sees, still passes everything,
  pop-ups included; without drift not a pixel changes."""
  for task in tasks.practice_tasks("sim/phone", 64):
    before, after = phone.Phone(task), phone.Phone(task, drift=12)
    place = lambda p: next((w.rect.y0 for w in p.widgets() if w.name == "bar"), None)
    assert place(before) is None and place(after) is None or place(after) == place(before) + 12
    env, plain = SimEnv("sim/phone", Popups(0.4), drift=12), SimEnv("sim/phone", Popups(0.4), drift=0)
    env.reset(options={"task": task})
    a, b = plain.reset(options={"task": task})[0], SimEnv("sim/phone", Popups(0.4)).reset(options={"task": task})[0]
    np.testing.assert_array_equal(a["screenshot"], b["screenshot"])
    done = False
    while not done:
      _, reward, terminated, truncated, _ = env.step(expert_text(env))
      done = terminated or truncated
    assert reward == 1.0, task.id


@pytest.mark.parametrize("computer, drift, words", [("sim/phone", 13, "wanted 0 to 12"), ("sim/phone", -1, "wanted 0 to 12"),
                                                    ("sim/desktop", 4, "no browser to redesign")])  # fmt: skip
def test_a_drift_that_cannot_be_is_refused(computer, drift, words):
  cfg = sim.defaults()
  cfg.update({"drift": drift})
  cfg.computer = computer
  with pytest.raises(ValueError, match=words):
    sim.check(cfg)


def test_a_slow_computer_shows_and_scores_the_same_and_takes_its_time():
  """0.01 s a step, every episode slow by 3: an episode of n steps takes 0.03 n seconds at least, and not a pixel differs."""
  cfg = sim.defaults()
  cfg.update({"step_seconds": 0.01, "slow_share": 1.0, "slow_factor": 3.0})
  slow, quick = sim.make("sim/phone", cfg, quick=False), sim.make("sim/phone", cfg)
  task = tasks.practice_tasks("sim/phone", 1)[0]
  a, b = (e.reset(options={"task": task})[0] for e in (slow, quick))
  began, steps, done = time.monotonic(), 0, False
  while not done:
    np.testing.assert_array_equal(a["screenshot"], b["screenshot"])
    text = expert_text(slow.unwrapped)
    (a, *one), (b, *two) = slow.step(text), quick.step(text)
    assert one[:3] == two[:3]
    steps, done = steps + 1, one[1] or one[2]
  assert time.monotonic() - began >= 0.03 * steps and slow.unwrapped.expire()["cause"] == "seconds"


@pytest.mark.parametrize("knobs", [{"step_seconds": -1.0}, {"step_seconds": float("nan")}, {"slow_share": 2.0}, {"slow_factor": 0.5}])
def test_a_slowness_that_cannot_be_is_refused(knobs):
  cfg = sim.defaults()
  cfg.update(knobs)
  with pytest.raises(ValueError, match="wanted") as e:
    sim.check(cfg)
  assert "\n" not in str(e.value)
