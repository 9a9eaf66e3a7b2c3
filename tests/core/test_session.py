"""A run's facts, random numbers and parts: saved with the train state and put back bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from core import hosts
from core.session import Session
from rollout.replay import Replay


class Counter:
  """A part with a state."""

  def __init__(self, n=0):
    self.n = n

  def state(self):
    return {"n": self.n, "half": np.float32(self.n) / 2}

  def restore(self, state):
    self.n = int(state["n"])


def begun(path, seed=3):
  session = Session(path, seed, 2, {"phase": "copying", "done": 0, "evals": {}})
  session.parts["counter"] = Counter()
  return session


TREE = {"w": jnp.arange(4.0) / 3, "n": jnp.zeros((), jnp.int32)}


def test_nothing_saved_is_nothing_restored(tmp_path):
  session = begun(tmp_path)
  assert session.restore(TREE) is None and session.facts["done"] == 0 and session.parts["counter"].n == 0


def test_restored_is_as_saved_to_the_last_bit(tmp_path):
  a = begun(tmp_path)
  a.rng.random(7)
  a.facts.update({"done": 5, "evals": {"held_out": {"success": 0.1 + 0.2}}})
  a.parts["counter"].n = 9
  a.save(5, TREE)
  want = a.rng.random(5).tolist()
  b = begun(tmp_path, seed=99)
  tree = b.restore({"w": jnp.zeros(4), "n": jnp.ones((), jnp.int32)})
  assert np.array_equal(tree["w"], TREE["w"]) and tree["n"] == 0
  assert b.rng.random(5).tolist() == want and b.facts == a.facts and b.parts["counter"].n == 9
  assert b.seconds >= a._before


def test_the_generator_is_the_one_that_others_hold(tmp_path):
  """A curriculum drew from the run's generator before the restore: it must go on with the same object."""
  a = begun(tmp_path)
  a.save(1, TREE)
  want = a.rng.random()
  b = begun(tmp_path, seed=99)
  held = b.rng
  b.restore(TREE)
  assert held is b.rng and held.random() == want


def test_a_part_that_comes_late_gets_its_own_state_and_is_not_lost_meanwhile(tmp_path, episode):
  a = begun(tmp_path)
  replay = Replay(2)
  replay.add(episode(1))
  a.attach("replay", replay)
  a.save(1, TREE)
  b = begun(tmp_path)
  b.restore(TREE)
  b.save(2, TREE)  # before the part is there
  c = begun(tmp_path)
  c.restore(TREE)
  late = Replay(2)
  c.attach("replay", late)
  (back,), (was,) = late.episodes(), replay.episodes()
  assert np.array_equal(back.records[0].tokens, was.records[0].tokens) and back.rewards == was.rewards
  assert np.array_equal(back.records[1].logp, was.records[1].logp) and back.replayed


def test_a_snapshot_does_not_change_afterwards(tmp_path):
  """The run goes on for an update and is then stopped: what is saved is where it stood."""
  a = begun(tmp_path)
  a.facts["evals"]["first"] = 1
  before = a.snapshot()
  want = a.rng.random()
  a.facts["done"], a.facts["evals"]["second"], a.parts["counter"].n = 8, 2, 4
  a.save(7, TREE, before)
  b = begun(tmp_path)
  b.restore(TREE)
  assert b.facts == {"phase": "copying", "done": 0, "evals": {"first": 1}} and b.parts["counter"].n == 0 and b.rng.random() == want


def test_time_of_earlier_sessions_counts(tmp_path, monkeypatch):
  now = [100.0]
  monkeypatch.setattr("core.session.time.monotonic", lambda: now[0])
  a = begun(tmp_path)
  now[0] = 130.0
  assert a.seconds == 30.0
  a.save(1, TREE)
  now[0] = 1000.0
  b = begun(tmp_path)
  b.restore(TREE)
  now[0] = 1012.0
  assert b.seconds == 42.0


def test_keys_are_each_tries_own_and_the_same_again(tmp_path):
  a, b, other = begun(tmp_path), begun(tmp_path), begun(tmp_path, seed=4)
  numbers = [(u, r, g, t) for u in range(3) for r in range(2) for g in range(4) for t in range(4)]
  keys = [tuple(a.key(*n).tolist()) for n in numbers]
  assert len(set(keys)) == len(keys) and keys == [tuple(b.key(*n).tolist()) for n in numbers[::-1]][::-1]
  assert not set(keys) & {tuple(other.key(*n).tolist()) for n in numbers}
  assert a.key(1, 2).dtype == np.uint32 and a.key(1, 2).shape == (2,)


def test_a_folder_whose_checkpoints_are_all_broken_is_refused_in_one_line(tmp_path):
  (tmp_path / "checkpoints" / "3").mkdir(parents=True)
  with pytest.raises(ValueError, match="holds checkpoints but none is whole") as error:
    begun(tmp_path).restore(TREE)
  assert "\n" not in str(error.value) and (tmp_path / "checkpoints" / "3").exists()


def test_a_state_that_is_missing_is_not_passed_over(tmp_path):
  begun(tmp_path).save(1, TREE)
  b = begun(tmp_path)
  b.parts["newer"] = Counter()
  with pytest.raises(ValueError, match="holds no newer: another version wrote it"):
    b.restore(TREE)


def test_a_process_that_the_checkpoint_did_not_know_draws_otherwise_than_the_one_whose_state_it_takes(tmp_path):
  a = begun(tmp_path)
  a.save(5, TREE)
  want = a.rng.random(5).tolist()
  more = [Session(tmp_path, 3, 2, {}, host=1) for _ in range(2)]
  for session in more:
    session.restore(TREE)
  assert more[0].rng.random(5).tolist() == more[1].rng.random(5).tolist() != want


@pytest.mark.parametrize("call, said", [(1, "wanted one folder that all see"), (2, "could read checkpoints")])
def test_processes_that_would_go_on_from_different_places_are_refused(tmp_path, monkeypatch, call, said):
  """The other process has another folder (its newest step differs), or cannot read the newest step."""
  begun(tmp_path).save(5, TREE)
  asked = []
  monkeypatch.setattr(hosts, "everyone", lambda value: asked.append(value) or [value, 4 if len(asked) == call else value])
  with pytest.raises(ValueError, match=said) as error:
    begun(tmp_path).restore(TREE)
  assert "[5, 4]" in str(error.value) and "\n" not in str(error.value)
