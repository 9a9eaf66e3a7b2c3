"""Stored successes: which are kept, and that nothing about them changes."""

import dataclasses

import numpy as np
import pytest

from rollout.replay import Replay

RNG = np.random.default_rng(0)


def test_only_fresh_successes_are_stored(episode):
  replay = Replay(4)
  assert replay.add(episode(1))
  for other in (episode(0), episode(-1), episode(None), episode(1, replayed=True)):
    assert not replay.add(other)
  assert len(replay) == 1


def test_a_replayed_success_is_never_stored_again_as_new(episode):
  replay = Replay(4)
  replay.add(episode(1))
  assert not replay.add(replay.pick("task", RNG)) and len(replay) == 1


def test_a_success_keeps_what_it_was_sampled_with(episode):
  """N30: tokens, log-probabilities and version are those of its own time, whatever is trained meanwhile."""
  e = episode(1, version=3)
  e.advantage = 1.7
  replay = Replay(1)
  replay.add(e)
  got = replay.pick("task", RNG)
  assert got.replayed and not e.replayed and got.advantage is None
  assert got.records is e.records and got.oldest_version == 3 and got.rewards == e.rewards and got.steps is e.steps


@pytest.mark.parametrize("size, versions", [(1, [4]), (3, [2, 3, 4]), (9, [0, 1, 2, 3, 4])])
def test_the_latest_are_kept(episode, size, versions):
  replay = Replay(size)
  for v in range(5):
    replay.add(episode(1, version=v))
  assert [e.oldest_version for e in replay.episodes()] == versions
  assert {replay.pick("task", RNG).oldest_version for _ in range(100)} == set(versions)


def test_tasks_do_not_share(episode):
  """Decision 7: a task id names one start state; a success of another start is no help."""
  replay = Replay(1)
  replay.add(episode(1, task="shop-s1", version=1))
  replay.add(episode(1, task="shop-s2", version=2))
  assert replay.pick("shop-s1", RNG).oldest_version == 1 and replay.pick("shop-s2", RNG).oldest_version == 2
  assert replay.pick("shop-s3", RNG) is None and len(replay) == 2


def test_zero_is_off(episode):
  replay = Replay(0)
  assert not replay.add(episode(1)) and replay.pick("task", RNG) is None and len(replay) == 0
  with pytest.raises(ValueError, match=r"replay size is -1, wanted 0 \(off\)"):
    Replay(-1)


def test_the_same_random_state_picks_the_same(episode):
  replay = Replay(8)
  for v in range(8):
    replay.add(episode(1, version=v))
  picks = lambda seed: [replay.pick("task", rng).oldest_version for rng in [np.random.default_rng(seed)] for _ in range(20)]
  assert picks(3) == picks(3) != picks(4)


def test_a_resume_brings_back_the_same_store(episode):
  replay, again = Replay(2), Replay(2)
  for task, v in (("b", 1), ("a", 2), ("b", 3), ("b", 4)):
    replay.add(episode(1, task=task, version=v))
  again.restore(replay.episodes())
  order = lambda r: [(e.task_id, e.oldest_version) for e in r.episodes()]
  assert order(again) == order(replay) == [("b", 3), ("b", 4), ("a", 2)]
  again.add(episode(1, task="b", version=5))
  assert order(again) == [("b", 4), ("b", 5), ("a", 2)] and order(replay)[0] == ("b", 3)


def test_a_store_saved_with_a_larger_size_is_cut_to_the_latest(episode):
  """The size is a knob that may change between sessions: the smaller one holds from the start."""
  large, small, off = Replay(4), Replay(1), Replay(0)
  for v in range(4):
    large.add(episode(1, version=v))
  small.restore(large.episodes())
  off.restore(large.episodes())
  assert [e.oldest_version for e in small.episodes()] == [3] and len(off) == 0
  assert all(e.replayed for e in large.episodes()) and dataclasses.is_dataclass(small.episodes()[0])
