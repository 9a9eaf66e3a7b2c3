"""The ring of latest episodes: what is stored, what leaves, how it is split and drawn from."""

import collections
import hashlib

import numpy as np
import pytest

from core import blob
from rollout.buffer import Buffer, is_validation


def names(episodes):
  return [(e.group, e.try_index) for e in episodes]


def filled(episode, lengths, capacity=10**6, **kw):
  buffer = Buffer(capacity, **kw)
  for i, n in enumerate(lengths):
    buffer.add(episode(i % 2, group=f"g{i}", index=i, steps=n))
  return buffer


def test_whole_episodes_leave_oldest_first(episode):
  """Capacity 10. Adding 4, 3, 3 steps fills it; 2 more push the 4 out (8 left); 6 more push both 3s out: 2 + 6 = 8."""
  buffer = Buffer(10)
  lengths = []
  for i, n in enumerate((4, 3, 3, 2, 6)):
    assert buffer.add(episode(1, group=f"g{i}", steps=n))
    lengths.append(len(buffer))
  assert lengths == [4, 7, 10, 8, 8]
  assert names(buffer.episodes()) == [("g3", 0), ("g4", 0)]


def test_what_is_no_new_outcome_is_never_stored(episode):
  buffer = Buffer(10)
  for other in (episode(None), episode(1, replayed=True), episode(0, steps=0)):
    assert not buffer.add(other)
  assert len(buffer) == 0 and buffer.episodes() == []
  for i, raw in enumerate((1, 0, -1)):  # an unreadable try is the policy's own doing: stored
    assert buffer.add(episode(raw, index=i))
  assert len(buffer) == 6


def test_stored_episodes_are_the_ones_given(episode):
  e = episode(1, version=3)
  buffer = Buffer(10)
  buffer.add(e)
  assert buffer.episodes()[0] is e and not e.replayed


def test_the_split_is_a_hash_of_group_and_try(episode):
  """Expected from the hash's definition: the first 8 bytes of sha1("group/try") as a fraction of 2^64, below 0.2."""
  for i in range(50):
    e = episode(1, group=f"u3-r0-g{i}", index=i % 8)
    fraction = int(hashlib.sha1(f"u3-r0-g{i}/{i % 8}".encode()).hexdigest()[:16], 16) / 2**64
    assert is_validation(e) == (fraction < 0.2)
  many = [is_validation(episode(1, group=f"u{i}-r0-g{i % 12}", index=i % 8, steps=1)) for i in range(2000)]
  assert 360 < sum(many) < 440  # 400 expected, standard deviation sqrt(2000 x .2 x .8) = 18


def test_a_split_does_not_depend_on_what_else_is_stored(episode):
  everything = filled(episode, [1] * 60)
  few = filled(episode, [1] * 60, capacity=25)
  kept = set(names(few.episodes()))
  assert names(few.episodes("validation")) == [n for n in names(everything.episodes("validation")) if n in kept]
  both = names(everything.episodes("train")) + names(everything.episodes("validation"))
  assert sorted(both) == sorted(names(everything.episodes())) and 0 < len(everything.episodes("validation")) < 30


def test_no_share_no_validation(episode):
  buffer = filled(episode, [1] * 30, validation=0.0)
  assert buffer.episodes("validation") == [] and len(buffer.episodes("train")) == 30


def test_steps_are_drawn_alike_wherever_they_stand(episode):
  """Episodes of 1, 2 and 5 steps: each of the 8 steps is drawn 1/8 of the time, so 1000 of 8000, give or take 4 x 30."""
  buffer = filled(episode, [1, 2, 5], validation=0.0)
  drawn = buffer.sample_steps(np.random.default_rng(0), 8000)
  counts = collections.Counter((e.group, h) for e, h in drawn)
  assert sorted(counts) == [("g0", 0), ("g1", 0), ("g1", 1)] + [("g2", h) for h in range(5)]
  assert all(880 < n < 1120 for n in counts.values()) and len(drawn) == 8000


def test_the_same_generator_state_draws_the_same(episode):
  buffer = filled(episode, [3, 1, 4, 1, 5])
  draw = lambda seed: [(e.group, h) for e, h in buffer.sample_steps(np.random.default_rng(seed), 40)]
  assert draw(1) == draw(1) != draw(2)


def test_parts_are_drawn_from_apart(episode):
  buffer = filled(episode, [2] * 40)
  for part in ("train", "validation"):
    allowed = set(names(buffer.episodes(part)))
    drawn = {(e.group, e.try_index) for e, _ in buffer.sample_steps(np.random.default_rng(0), 600, part)}
    assert drawn == allowed
  assert len({id(e) for e, _ in buffer.sample_steps(np.random.default_rng(0), 2000, "all")}) == 40


def test_a_resume_goes_on_the_same(episode):
  """Through the checkpoint's own encoding: the same draws, and the same episodes leave next."""
  buffer, again = filled(episode, [3, 1, 4, 1, 5], capacity=14), Buffer(14)
  text, arrays, screens = blob.encode(buffer.episodes())
  again.restore(blob.decode(text, arrays, screens.__getitem__))
  assert len(again) == len(buffer) == 14
  draw = lambda b: [(e.group, h) for e, h in b.sample_steps(np.random.default_rng(5), 30, "all")]
  assert draw(buffer) == draw(again)
  for b in (buffer, again):
    b.add(episode(1, group="late", steps=4))
  assert names(buffer.episodes()) == names(again.episodes()) == [("g2", 2), ("g3", 3), ("g4", 4), ("late", 0)]


def test_a_smaller_buffer_takes_the_latest(episode):
  small = Buffer(6)
  small.restore(filled(episode, [3, 1, 4, 1, 5]).episodes())
  assert names(small.episodes()) == [("g3", 3), ("g4", 4)] and len(small) == 6


@pytest.mark.parametrize(
  "act, words",
  [
    (lambda b, e: Buffer(0), "buffer capacity is 0, wanted 1 or more steps"),
    (lambda b, e: Buffer(5, 1.0), "buffer validation is 1.0, wanted a share"),
    (lambda b, e: b.add(e(1, group="g0", index=0)), "episode g0/0 is in the buffer already"),
    (lambda b, e: b.add(e(1, group="long", steps=11)), "episode long/0 has 11 steps, more than the buffer's 10"),
    (lambda b, e: b.episodes("test"), "buffer part is 'test', wanted one of all, train, validation"),
    (lambda b, e: Buffer(5).sample_steps(np.random.default_rng(0), 1), "part 'train' has no step"),
    (lambda b, e: b.sample_steps(np.random.default_rng(0), -1), "got -1, wanted 0 or more"),
  ],
)
def test_bad_input_gives_one_clear_line(episode, act, words):
  buffer = filled(episode, [2], capacity=10)
  with pytest.raises(ValueError, match=words) as e:
    act(buffer, episode)
  assert "\n" not in str(e.value)
  assert names(buffer.episodes()) == [("g0", 0)]


def test_nothing_asked_nothing_drawn():
  assert Buffer(5).sample_steps(np.random.default_rng(0), 0) == []
