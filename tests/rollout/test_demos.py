"""Demonstrations become token records in the very contexts in which the policy would have written them."""

import numpy as np
import pytest

import envs.sim as sim
from core.schema import Action, End, Episode, Screen, Step
from envs.inside import Inside
from envs.sim import tasks
from models import tiny
from rollout import demos
from rollout.sampler import Sampled
from rollout.turn import Try, Turn


@pytest.fixture(scope="module", params=["sim/phone", "sim/desktop"])
def copied(request):
  """(computer, policy, demonstrations) with the default policy of each computer."""
  policy = tiny.make(tiny.defaults(), *sim.vocabulary(request.param))
  return request.param, policy, sim.demonstrations(request.param, 6, seed=2)


def test_a_demonstrated_step_is_the_prompt_its_text_and_an_end(copied):
  _, policy, episodes = copied
  for e in episodes:
    made = demos.with_records(e, policy)
    assert len(made.records) == len(e.steps) > 0
    for step, r in zip(made.steps, made.records):
      n = len(r.tokens) - int(r.is_action.sum())
      assert r.is_action.tolist() == [False] * n + [True] * (len(r.tokens) - n)  # agent tokens only, prompt never
      assert r.tokens[-1] == policy.tokenizer.eos_id and policy.tokenizer.decode(r.tokens[n:]) == step.text
      assert r.tokens[:n].tolist() == policy.prompt(e.goal, [step.screen.pixels], "").tokens.tolist()
      assert not r.logp.any() and (r.version == -1).all()  # nobody sampled these


def test_practice_sees_the_same_contexts_as_copying(copied):
  """The script plays by tokens, through the environment: its records are the demonstration's, but for what sampling adds."""
  computer, policy, episodes = copied
  e = demos.with_records(episodes[0], policy)
  task = next(t for t in tasks.demonstration_tasks(computer, 6, 2) if t.id == e.task_id)
  computers = Inside([sim.make(computer, sim.defaults(), clean=True)])
  turn = Turn(computers.try_lease(), policy, Try(task, "g", 0, np.array([0, 0], np.uint32)))
  played = turn.hear(computers.wait(0.0)[0][1])
  for r in e.records:
    assert played is None
    ids = r.tokens[r.is_action]
    turn.act(turn.prompt(), Sampled(ids, np.full(len(ids), -0.5, np.float32), np.zeros(len(ids), np.float32), 3))
    played = turn.hear(computers.wait(0.0)[0][1])
  assert played.success and [s.text for s in played.steps] == [s.text for s in e.steps]
  for a, b in zip(played.records, e.records, strict=True):
    for name in ("tokens", "is_action", "step", "image_place", "image_step"):
      assert np.array_equal(getattr(a, name), getattr(b, name)), name
  assert [s.screen.ref for s in played.steps] == [s.screen.ref for s in e.steps]


def test_items_are_the_steps_ready_to_be_copied(copied):
  _, policy, episodes = copied
  items = demos.items(episodes, policy)
  assert len(items) == sum(len(e.steps) for e in episodes)
  for item, step in zip(items, (s for e in episodes for s in e.steps), strict=True):
    assert item.learn.all() and not item.advantage.any()
    assert np.array_equal(item.images[0], step.screen.pixels) and len(item.images) == 1
    assert item.positions.shape == (1, len(item.record))


def test_records_are_made_once_however_often_they_are_asked_for(copied):
  _, policy, episodes = copied
  once = demos.with_records(episodes[1], policy)
  twice = demos.with_records(once, policy)
  assert len(twice.records) == len(once.records) == len(once.steps) and not episodes[1].records
  assert len(demos.items(episodes, policy)) == len(demos.items(episodes, policy))


def test_a_demonstration_the_policy_cannot_write_is_named(tiny_policy, tiny_screen):
  text = 'type("a long line of letters")'
  step = Step(Screen.of(tiny_screen()), text, Action("type", {}, {}, "phone"), 0)
  e = Episode("task7", "scripted", 0, 0, [step], End.TERMINATED, "agent", {"success": 1.0}, [], goal="red mug")
  words = "demonstration task7 step 1: .*type.* has 31 tokens, .*at most 5 a step: raise policy.tiny.max_action"
  with pytest.raises(ValueError, match=words):
    demos.items([e], tiny_policy)
