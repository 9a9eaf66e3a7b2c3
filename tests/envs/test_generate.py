"""Generated tasks of the simulated computers: never held out, always doable, the same again from the same random state."""

import dataclasses
import json

import numpy as np
import pytest

from core.schema import Limits
from envs.sim import generate, tasks

both = pytest.mark.parametrize("computer", ["sim/phone", "sim/desktop"])


def what(task):
  return task.family, json.dumps(task.params, sort_keys=True)


def held(computer):
  return {what(t) for t in tasks.held_out_tasks(computer)}


def rng(seed=0):
  return np.random.default_rng(seed)


@both
def test_generated_tasks_are_never_held_out(computer):
  """Also where the failed tasks are the held-out ones themselves, whose every neighbour might be."""
  assert len(held(computer)) == 96
  for failed in (tasks.practice_tasks(computer, 40), tasks.held_out_tasks(computer)):
    made = generate.SimGenerator(computer).generate(failed, 400, rng())
    assert len(made) == 400 and not {what(t) for t in made} & held(computer)


@both
def test_one_or_two_parameters_change(computer):
  failed = tasks.practice_tasks(computer, 8)
  for start in failed:
    seen = set()
    for task in generate.SimGenerator(computer).generate([start], 60, rng()):
      assert (task.env, task.family, task.limits, task.check) == (start.env, start.family, start.limits, start.check)
      assert set(task.params) == set(start.params)
      seen.add(sum(task.params[k] != start.params[k] for k in start.params))
    assert seen == {1, 2}
  one = generate.SimGenerator(computer, most_changes=1).generate(failed, 80, rng())
  near = lambda t: min(sum(t.params[k] != s.params[k] for k in t.params) for s in failed if s.family == t.family and s.env == t.env)
  assert {near(t) for t in one} <= {0, 1}  # 0: a change may lead to another failed task's parameters, with another start


@both
def test_ids_and_start_states_are_new(computer):
  failed = tasks.practice_tasks(computer, 20)
  old = tasks.practice_tasks(computer) + tasks.held_out_tasks(computer) + tasks.demonstration_tasks(computer, 500)
  made = generate.SimGenerator(computer).generate(failed, 300, rng())
  assert len({t.id for t in made}) == len({t.seed for t in made}) == 300
  assert not {t.seed for t in made} & {t.seed for t in old} and not {t.id for t in made} & {t.id for t in old}
  assert all(2**40 <= t.seed < 2**41 and type(t.seed) is int for t in made)
  assert all(json.loads(json.dumps(t.params)) == t.params for t in made)


@both
def test_the_random_state_decides(computer):
  failed = tasks.practice_tasks(computer, 10)
  make = lambda seed: generate.SimGenerator(computer).generate(failed, 50, rng(seed))
  assert make(3) == make(3) != make(4)
  one, again = rng(3), rng(3)
  generator = generate.SimGenerator(computer)
  first = generator.generate(failed, 20, one) + generator.generate(failed, 20, one)
  fresh = generate.SimGenerator(computer)
  assert first == fresh.generate(failed, 20, again) + generate.SimGenerator(computer).generate(failed, 20, again)


def test_failed_tasks_are_varied_in_turn():
  """8 failed tasks, two of each of 4 families, 40 new ones: each is varied exactly 5 times, so every family gets 10."""
  failed = tasks.practice_tasks("sim/desktop", 8)
  made = generate.SimGenerator("sim/desktop").generate(failed, 40, rng())
  families = [t.family for t in made]
  assert {families.count(t.family) for t in failed} == {10}


@both
def test_the_scripted_expert_passes_generated_tasks(computer):
  made = generate.SimGenerator(computer).generate(tasks.practice_tasks(computer, 8), 16, rng(1))
  assert all(generate.feasible(t) for t in made)


def test_a_task_that_cannot_be_done_in_time_is_not_feasible():
  task = tasks.practice_tasks("sim/phone", 1)[0]
  assert generate.feasible(task) and not generate.feasible(dataclasses.replace(task, limits=Limits(1)))


@both
def test_parameters_are_those_of_the_families(computer):
  shown = generate.space_of(computer).parameters()
  families = tasks.MODULES[computer].families()
  assert set(shown) == set(families)
  for family, combos in families.items():
    for key, values in shown[family].items():
      wanted = {json.dumps(c[key]) for c in combos}
      assert {json.dumps(v) for v in values} == wanted and len(values) == len(wanted)
  assert json.loads(json.dumps(shown)) == shown


@both
def test_every_practised_combination_can_be_built_and_no_held_out_one(computer):
  heldout = held(computer)
  for family, combos in tasks.MODULES[computer].families().items():
    for params in combos:
      is_held = (family, json.dumps(params, sort_keys=True)) in heldout
      assert generate.space_of(computer).refusal(family, params) == ("held_out" if is_held else "")
  with pytest.raises(ValueError, match="held_out"):
    t = tasks.held_out_tasks(computer)[0]
    generate.space_of(computer).build(t.family, t.params, 5)


def test_the_order_of_given_parameters_does_not_matter():
  task = tasks.practice_tasks("sim/phone", 1)[0]
  shuffled = dict(reversed(task.params.items()))
  assert list(shuffled) != list(task.params)
  assert generate.space_of("sim/phone").build("shopping", shuffled, task.seed) == task


@pytest.mark.parametrize(
  "family, params, why",
  [
    ("shopping", {"shop": "shopmart", "adj": "red", "noun": "mug"}, "wrong_parameters"),
    ("shopping", {"shop": "shopmart", "adj": "red", "noun": "mug", "rank": 4}, "wrong_parameters"),
    ("shopping", {"shop": "shopmart", "adj": "red", "noun": "mug", "rank": True}, "wrong_parameters"),  # true is not 1
    ("shopping", {"shop": "shopmart", "adj": "red", "noun": "mug", "rank": 1.0}, "wrong_parameters"),
    ("shopping", {"shop": "shopmart", "adj": "red", "noun": "mug", "rank": float("nan")}, "wrong_parameters"),
    ("shopping", {"shop": "shopmart", "adj": "red", "noun": "mug", "rank": 1, "goal": "x"}, "wrong_parameters"),
    ("shopping", ["shopmart"], "wrong_parameters"),
    ("shopping", {"shop": {1}}, "wrong_parameters"),
    ("rename", {"rank": 0, "name": "plan", "shift": 0}, "unknown_family"),
    (["shopping"], {}, "unknown_family"),
    (None, None, "unknown_family"),
  ],
)
def test_what_is_no_combination_is_refused(family, params, why):
  assert generate.space_of("sim/phone").refusal(family, params) == why
  with pytest.raises(ValueError, match=why):
    generate.space_of("sim/phone").build(family, params, 5)


@pytest.mark.parametrize(
  "act, words",
  [
    (lambda f: generate.SimGenerator("sim/watch"), "simulated computer 'sim/watch'"),
    (lambda f: generate.SimGenerator("sim/phone", 0), "most_changes is 0, wanted 1 or more"),
    (lambda f: generate.SimGenerator("sim/phone").generate([], 3, rng()), "no failed task was given"),
    (lambda f: generate.SimGenerator("sim/phone").generate(f, 0, rng()), "got 0, wanted 1 or more"),
    (lambda f: generate.SimGenerator("sim/desktop").generate(f, 3, rng()), "is for sim/phone, this generator is for sim/desktop"),
    (lambda f: generate.space_of("sim/phone").build(f[0].family, f[0].params, -1), "task seed is -1"),
  ],
)
def test_bad_input_gives_one_clear_line(act, words):
  with pytest.raises(ValueError, match=words) as e:
    act(tasks.practice_tasks("sim/phone", 2))
  assert "\n" not in str(e.value)
