"""A run's rounds of new tasks: when they come, from what, which are kept, and what a broken generator costs."""

import ml_collections
import numpy as np
import pytest

from envs.sim.generate import SimGenerator
from envs.sim.tasks import practice_tasks
from rollout import taskgen
from rollout.curriculum import Curriculum
from rollout.taskgen import Evolution, Unreachable

ENV = ml_collections.ConfigDict({"computer": "sim/phone"})


class Written:
  """A generator that writes what it is told; None stands for an endpoint that cannot be reached."""

  def __init__(self, tasks):
    self.tasks, self.asked = tasks, []

  def generate(self, failed, count, rng):
    self.asked.append(([t.id for t in failed], count))
    if self.tasks is None:
      raise Unreachable("http://127.0.0.1:1/v1 did not answer")
    return self.tasks


@pytest.fixture
def rounds(group_of):
  """rounds(written, **knobs) -> (Evolution, Curriculum, generator), after one task failed and one passed."""
  known = practice_tasks("sim/phone", 4)

  def make(written, **knobs):
    cfg = taskgen.defaults()
    cfg.update({"count": 2, "every": 3} | knobs)
    curriculum = Curriculum(known, np.random.default_rng(0))
    for task, raws in zip(known, ([0, 0], [1, 0])):
      curriculum.report(group_of(raws, task=task.id))
    evolution = Evolution(ENV, cfg, curriculum, np.random.default_rng(1))
    if cfg.count:
      evolution.generator = Written(written)
    return evolution, curriculum, evolution.generator

  return make


def test_a_round_is_due_every_so_many_updates_and_starts_from_what_failed(rounds):
  new = SimGenerator("sim/phone").generate(practice_tasks("sim/phone", 4)[:1], 2, np.random.default_rng(3))
  evolution, curriculum, generator = rounds(new)
  assert evolution.after(1, None) == [] == evolution.after(2, None) and generator.asked == []
  assert evolution.after(3, None) == new
  assert generator.asked == [([practice_tasks("sim/phone", 4)[0].id], 2)]
  assert [curriculum.next() for _ in new] == new  # they come next
  assert evolution.after(6, None) == []  # the same ids again are known


def test_the_critics_band_of_a_round_is_webrls_or_the_curriculums_own(rounds):
  """Values 0.5 and 0.9: the band 0.05 to 0.75 keeps the first, a curriculum with 0.8 to 1.0 the second."""
  new = SimGenerator("sim/phone").generate(practice_tasks("sim/phone", 4)[:1], 2, np.random.default_rng(3))
  values = lambda tasks: {t.id: v for t, v in zip(tasks, (0.5, 0.9), strict=True)}
  assert rounds(new)[0].after(3, values) == new[:1]
  evolution, curriculum, _ = rounds(new)
  curriculum.cfg.update({"critic_low": 0.8, "critic_high": 1.0})
  assert evolution.after(3, values) == new[1:]


def test_a_generator_that_cannot_be_reached_costs_the_round_and_not_the_run(rounds, capsys):
  evolution, curriculum, _ = rounds(None)
  before = curriculum.counts()
  assert evolution.after(3, None) == [] and curriculum.counts() == before
  assert "no new tasks after update 3: http://127.0.0.1:1/v1 did not answer" in capsys.readouterr().out


def test_without_a_count_nothing_is_ever_asked(rounds):
  evolution, _, generator = rounds([], count=0)
  assert generator is None and evolution.after(3, None) == []
