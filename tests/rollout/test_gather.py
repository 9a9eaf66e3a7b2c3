"""Rounds of sampling: what is asked for, what is kept, what is stored, and the books at the end."""

import functools

import numpy as np
import pytest

from agents.base import select_groups
from envs.inside import Inside
from rollout.gather import gather
from rollout.queue import GroupQueue, Ledger
from rollout.replay import Replay

SELECT = functools.partial(select_groups, use_replay=True, drop_equal=True)


@pytest.fixture
def world(scripted_env, policy, sampler):
  """world(outcomes, ...) runs one gather. outcomes: for each task in turn, its id and each try's reward (None: infra error)."""
  kept = {"queue": GroupQueue(Ledger()), "replay": Replay(2), "keys": [], "asked": []}

  def run(outcomes, groups=2, rounds=2, size=2, update=0, version=0, max_age=2, select=SELECT, task=None):
    waiting, remaining = list(outcomes), {}

    def next_task():
      name, rewards = waiting.pop(0)
      kept["asked"].append(name)
      remaining.setdefault(name, []).extend(rewards)
      return task(name)

    def key(*numbers):
      kept["keys"].append(numbers)
      return np.random.SeedSequence(numbers).generate_state(2, np.uint32)

    # one environment after the other takes one try each: the k-th try of a task ends with its k-th reward
    env = scripted_env()
    reset = env.reset

    def scripted_reset(*, options):
      t = options["task"]
      reward = remaining[t.id].pop(0) if remaining[t.id] else None
      out = reset(options={"task": task(t.id, steps=1, reward=reward, fault={1: 99} if reward is None else {})})
      return out

    env.reset = scripted_reset
    got = gather(
      sampler, Inside([env]), kept["queue"], kept["replay"], select, next_task, key, np.random.default_rng(0), update=update,
      version=version, groups=groups, rounds=rounds, group_size=size, max_age=max_age, clock=lambda name, seconds: None,
    )  # fmt: skip
    return got

  return kept, run


def raws(groups):
  return [[e.raw_reward for e in g.episodes] for g in groups]


def balance(ledger):
  return ledger.started, ledger.trained, dict(ledger.dropped)


def test_enough_groups_in_the_first_round(world, task):
  kept, run = world
  got = run([("a", [1, 0]), ("b", [0, 1])], task=task)
  assert raws(got.kept) == [[1, 0], [0, 1]] and got.stopped == "full" and not got.dropped["age"]
  assert balance(kept["queue"].ledger) == (4, 4, {}) and len(got.episodes) == 4 and len(got.groups) == 2


def test_a_second_round_asks_only_for_what_is_missing(world, task):
  """Decision 8: b teaches nothing, so one more task is tried; the kept group of round one stays."""
  kept, run = world
  got = run([("a", [1, 0]), ("b", [1, 1]), ("c", [0, 1]), ("never", [1, 0])], task=task)
  assert [g.task_id for g in got.kept] == ["a", "c"] and kept["asked"] == ["a", "b", "c"] and got.stopped == "full"
  assert dict(got.dropped) == {"all_pass": 2, "age": 0} and balance(kept["queue"].ledger) == (6, 4, {"all_pass": 2})
  assert raws(got.groups) == [[1, 0], [1, 1], [0, 1]]  # every fresh group, for the curves


def test_it_stops_at_the_cap_and_says_so(world, task):
  """N17: where no task teaches, it returns within the cap with nothing, and every episode is counted."""
  kept, run = world
  got = run([(f"t{i}", [0, 0]) for i in range(9)], groups=3, rounds=3, task=task)
  assert got.kept == [] and got.stopped == "rounds" and len(got.episodes) == 18
  assert balance(kept["queue"].ledger) == (18, 0, {"all_fail": 18})


def test_a_success_does_not_rescue_its_own_group_but_a_later_one(world, task):
  kept, run = world
  first = run([("a", [0, 0]), ("b", [1, 0])], rounds=1, task=task)
  assert [g.task_id for g in first.kept] == ["b"] and first.swapped == 0 and len(kept["replay"]) == 1
  second = run([("b", [0, 0]), ("a", [0, 0])], rounds=1, update=1, version=1, task=task)
  assert raws(second.kept) == [[1, 0]] and second.swapped == 1 and second.kept[0].episodes[0].replayed
  assert [e.raw_reward for e in second.episodes] == [0, 0, 0, 0]  # the logged episodes are fresh ones only
  assert len(kept["replay"]) == 1  # not stored again as new
  ledger = kept["queue"].ledger
  assert balance(ledger) == (8, 3, {"all_fail": 4, "replaced": 1}) and ledger.in_flight == 0


def test_a_success_does_not_rescue_a_sibling_of_the_same_round(world, task):
  """One task drawn twice: stored after the swap, so what a round teaches does not depend on the order of its groups."""
  kept, run = world
  got = run([("a", [1, 0]), ("a", [0, 0])], rounds=1, task=task)
  assert raws(got.kept) == [[1, 0]] and got.swapped == 0 and len(kept["replay"]) == 1


def test_a_success_of_an_all_pass_group_is_stored_too(world, task):
  kept, run = world
  run([("a", [1, 1])], groups=1, rounds=1, task=task)
  assert [e.task_id for e in kept["replay"].episodes()] == ["a", "a"]


def test_a_replayed_success_has_no_age_limit(world, sampler, task):
  """Decision 7: stored at version 0, swapped in at version 50 with max_age 2, as old as it is."""
  kept, run = world
  run([("a", [1, 0])], groups=1, rounds=1, task=task)
  sampler.version = 50
  got = run([("a", [0, 0])], groups=1, rounds=1, update=50, version=50, task=task)
  assert raws(got.kept) == [[1, 0]] and [e.oldest_version for e in got.kept[0].episodes] == [0, 50]


def test_old_episodes_are_dropped_with_their_cause(world, sampler, task):
  """Sampled at version 3 and trained on at 6 with max_age 2."""
  kept, run = world
  sampler.version = 3
  got = run([("a", [1, 0])], groups=1, rounds=1, version=6, task=task)
  assert got.kept == [] and dict(got.dropped) == {"age": 2} and balance(kept["queue"].ledger) == (2, 0, {"age": 2})
  assert len(got.episodes) == 2 and len(kept["replay"]) == 0
  got = run([("b", [1, 0])], groups=1, rounds=1, update=1, version=5, task=task)
  assert raws(got.kept) == [[1, 0]]


def test_infra_errors_are_run_again_and_then_leave_the_group(world, task):
  """E1: a try that breaks on each of its three attempts is dropped as infra error; its siblings are compared without it."""
  kept, run = world
  got = run([("a", [1, 0, None])], groups=1, rounds=1, size=3, task=task)
  assert raws(got.kept) == [[1, 0]] and dict(got.dropped) == {"infra_error": 1, "age": 0}
  assert got.episodes[-1].notes["faults"] == ["Broken", "Broken"]
  assert balance(kept["queue"].ledger) == (3, 2, {"infra_error": 1})


def test_a_group_of_errors_makes_no_update_and_another_is_sampled(world, task):
  kept, run = world
  got = run([("a", []), ("b", [1, 0])], groups=1, rounds=2, task=task)
  assert [g.task_id for g in got.kept] == ["b"] and dict(got.dropped) == {"infra_error": 2, "age": 0}


def test_every_try_has_its_own_key_and_every_group_its_own_name(world, task):
  kept, run = world
  got = run([(f"t{i}", [0, 0, 0]) for i in range(6)], groups=3, rounds=2, size=3, update=4, task=task)
  assert kept["keys"] == [(4, r, g, k) for r in range(2) for g in range(3) for k in range(3)]
  assert len({g.id for g in got.groups}) == 6
  again = run([("t0", [1, 0, 0])], groups=1, rounds=1, size=3, update=5, task=task)
  assert not {g.id for g in got.groups} & {g.id for g in again.groups}


def test_an_episode_lost_on_the_way_is_noticed(world, task):
  """A selection that forgets to count what it drops breaks the law at once."""
  _, run = world
  with pytest.raises(RuntimeError, match="episodes do not add up"):
    run([("a", [1, 0])], groups=1, rounds=1, select=lambda groups, replay, rng: ([], {}, 0), task=task)
