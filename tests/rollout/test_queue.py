"""The queue: groups complete as their tries do, ages are taken when training is, and every episode is accounted for."""

import dataclasses

import numpy as np
import pytest

from rollout.queue import GroupQueue, Ledger


@pytest.fixture
def queue():
  return GroupQueue(Ledger())


def fill(queue, episode, raws, group="group", task="task", **kw):
  queue.open(group, task, len(raws))
  for i, raw in enumerate(raws):
    queue.add(episode(raw, task=task, group=group, index=i, **kw))


# -- groups


def test_a_group_is_handed_over_when_its_last_try_is_in(queue, episode):
  queue.open("a", "task", 2)
  queue.open("b", "other", 2)
  queue.add(episode(1, group="a", index=1))
  queue.add(episode(0, group="b", task="other", index=0))
  assert queue.take(0, 2) == ([], 0)
  queue.add(episode(0, group="b", task="other", index=1))
  queue.add(episode(0, group="a", index=0))
  groups, _ = queue.take(0, 2)
  assert [(g.id, g.task_id) for g in groups] == [("b", "other"), ("a", "task")]  # in the order they were complete
  assert [e.try_index for e in groups[1].episodes] == [0, 1]  # by try, whichever came first
  assert queue.take(0, 2) == ([], 0)  # handed over once


def test_two_groups_of_one_task_never_merge(queue, episode):
  fill(queue, episode, [1, 0], "u0")
  fill(queue, episode, [0, 0], "u1")
  groups, _ = queue.take(0, 2)
  assert [[e.raw_reward for e in g.episodes] for g in groups] == [[1, 0], [0, 0]]


def test_strangers_and_doubles_are_refused(queue, episode):
  queue.open("a", "task", 2)
  with pytest.raises(ValueError, match="group a is already open"):
    queue.open("a", "task", 2)
  with pytest.raises(ValueError, match="episode of group b, which is not open"):
    queue.add(episode(1, group="b"))
  queue.add(episode(1, group="a", index=0))
  with pytest.raises(ValueError, match="group a already has try 0"):
    queue.add(episode(0, group="a", index=0))


# -- age: Q1


@pytest.mark.parametrize("max_age, kept", [(2, [0, 2]), (0, [0]), (3, [0, 2, 3]), (10, [0, 2, 3])])
def test_older_than_the_limit_is_dropped_and_equal_is_kept(queue, episode, max_age, kept):
  """Trainer at version 7: ages 0, 2 and 3 are episodes of versions 7, 5 and 4."""
  queue.open("group", "task", 3)
  for i, age in enumerate((0, 2, 3)):
    queue.add(episode(1, index=i, version=7 - age))
  groups, old = queue.take(7, max_age)
  assert [7 - e.oldest_version for g in groups for e in g.episodes] == kept
  assert old == 3 - len(kept) == queue.ledger.dropped["age"]


def test_age_is_measured_when_the_group_is_taken_not_when_it_is_filed(queue, episode):
  """Filed at age 1; the trainer publishes twice while it waits: age 3."""
  fill(queue, episode, [1, 0], version=4)
  assert queue.take(7, 2) == ([], 2)
  fill(queue, episode, [1, 0], "h", version=4)
  groups, old = queue.take(6, 2)
  assert len(groups) == 1 and old == 0


def test_one_old_sibling_leaves_the_others(queue, episode):
  """Q5: versions [41 x 7, 38], now 41, limit 2: seven survive."""
  queue.open("group", "task", 8)
  for i in range(8):
    queue.add(episode(i % 2, index=i, version=38 if i == 5 else 41))
  ((group,), old) = queue.take(41, 2)
  assert [e.try_index for e in group.episodes] == [0, 1, 2, 3, 4, 6, 7] and old == 1


def test_an_episode_is_as_old_as_its_oldest_token(queue, episode):
  e = episode(1, version=9)
  first = e.records[0]
  e.records[0] = dataclasses.replace(first, version=np.array([-1, -1, -1, 9, 5], np.int32))  # weights swapped inside one action
  assert first.is_action.tolist() == [False, False, False, True, True]
  queue.open("group", "task", 1)
  queue.add(e)
  assert e.oldest_version == 5 and queue.take(9, 3) == ([], 1)


def test_a_try_that_never_saw_a_screen_has_no_age(queue, episode):
  """An infra error at reset holds no token: its cause is the error, not its age."""
  queue.open("group", "task", 2)
  queue.add(episode(None, index=0, steps=0))
  queue.add(episode(1, index=1, version=50))
  ((group,), old) = queue.take(50, 0)
  assert [e.scored for e in group.episodes] == [False, True] and old == 0


# -- the conservation law: Q2


def test_started_is_trained_plus_dropped_plus_in_flight(queue, episode):
  ledger = queue.ledger
  queue.open("open", "task", 4)
  queue.add(episode(1, group="open"))
  fill(queue, episode, [1, 0, 0], "new", version=5)
  fill(queue, episode, [1, 0], "old", version=1)
  assert (ledger.started, ledger.in_flight, len(queue)) == (9, 9, 9)
  ledger.check(in_flight=len(queue))
  groups, old = queue.take(5, 2)
  ledger.dropped["all_fail"] += 1
  ledger.trained += 2
  assert (old, len(queue), ledger.in_flight) == (2, 4, 4)
  ledger.check(in_flight=len(queue))
  ledger.trained += 1
  with pytest.raises(RuntimeError, match="9 started, 3 trained, dropped .*age.*so 3 in flight, but 4 are"):
    ledger.check(in_flight=len(queue))


def test_a_fast_producer_loses_nothing(queue, episode):
  """1,000 episodes in groups of 4, taken ten groups at a time at versions that run ahead: the sums match, in any order of arrival."""
  rng, trained = np.random.default_rng(0), 0
  for burst in range(25):
    waiting = []
    for g in range(10):
      queue.open(f"{burst}-{g}", "task", 4)
      waiting += [episode(1, group=f"{burst}-{g}", index=i, version=burst - int(rng.integers(4)), steps=1) for i in range(4)]
    for i in rng.permutation(40):
      queue.add(waiting[i])
    groups, _ = queue.take(burst, 2)
    trained += sum(len(g.episodes) for g in groups)
    queue.ledger.trained = trained
    queue.ledger.check(in_flight=len(queue))
  assert queue.ledger.started == 1000 == trained + queue.ledger.dropped["age"] and queue.ledger.dropped["age"] > 100


def test_the_ledger_survives_a_resume():
  ledger = Ledger()
  ledger.started, ledger.trained = 10, 4
  ledger.dropped.update({"age": 2, "all_pass": 1})
  again = Ledger()
  again.restore(ledger.state())
  assert again.state() == ledger.state() and again.in_flight == 3
  again.dropped["age"] += 1
  assert ledger.dropped["age"] == 2  # a copy
