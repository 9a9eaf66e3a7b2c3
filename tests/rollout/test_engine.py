"""The engine's programs, one by one: what a slot gets does not depend on how it was filled, nor on what stands beside or behind it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import served

from rollout.engine import Engine, draw

pytestmark = pytest.mark.usefixtures("compile_quickly")
IDS = np.random.default_rng(0).integers(0, 300, 63).astype(np.int32)
KEY = np.array([1, 2], np.uint32)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
  return served.make(tmp_path_factory.getbasetemp(), "llama")


@pytest.fixture(scope="module")
def params(policy):
  return served.weights(policy)


@pytest.fixture
def engine(policy):
  return Engine(policy, 2, (64,), (4, 16, 48), 4, (-1,), 1.0)


@pytest.fixture
def fill(engine, params):
  own, none = engine.own(params), engine.blank(params, np.zeros((0, 0), np.uint8))

  def run(slot, pieces, ids=IDS, start=0):
    """Prefills ids in pieces of (tokens, chunk size); what the last one wrote."""
    for count, size in pieces:
      at = np.arange(start, start + count, dtype=np.int32)
      out = engine.prefill(own, slot, start, start, ids[at], at[None], none, np.full(count, -1, np.int32), size, KEY, 0)
      start += count
    return out

  return run


@pytest.fixture(scope="module")
def written(policy, params):
  """written(n) -> log-probabilities of every token after the first n of IDS, by one forward pass."""
  at = np.arange(len(IDS), dtype=np.int32)[None]
  hidden = policy.forward(params, IDS[None], at[None], np.ones_like(at), None, None)
  logp = np.asarray(jax.nn.log_softmax(policy.logits(params, hidden)))[0]
  return lambda n: logp[n - 1]


@pytest.mark.parametrize("pieces", [((40, 48),), ((16, 16), (16, 16), (4, 4), (4, 4)), ((3, 48), (37, 48)), ((1, 4), (2, 16), (37, 48))])
def test_chunks_are_one_prefill(fill, written, pieces):
  out = fill(0, pieces)
  np.testing.assert_allclose(out.logp[0, 0], written(40)[out.token[0, 0]], atol=1e-5)
  np.testing.assert_allclose(out.entropy[0, 0], -(np.exp(written(40)) * written(40)).sum(), atol=1e-5)


def test_a_padded_chunk_at_the_end_of_the_cache(fill, written):
  """Place 60 of 64, 3 tokens in a chunk of 16: its padding would reach to 76. What stood before stays."""
  out = fill(0, ((48, 48), (12, 16), (3, 16)))
  np.testing.assert_allclose(out.logp[0, 0], written(63)[out.token[0, 0]], atol=1e-5)
  again = fill(0, ((1, 4),), start=62)
  assert again.token[0, 0] == out.token[0, 0]
  np.testing.assert_allclose(again.logp, out.logp, atol=1e-5)


def test_prefilling_again_from_an_earlier_place(fill, written):
  """What stood behind the place is not seen any more: first other ids, then the true ones from place 20."""
  other = np.concatenate([IDS[:20], IDS[20:][::-1]])
  fill(0, ((48, 48),), other)
  out = fill(0, ((16, 16), (4, 4)), start=20)
  np.testing.assert_allclose(out.logp[0, 0], written(40)[out.token[0, 0]], atol=1e-5)


def decode(engine, params, active, count=(0, 0), limit=(4, 4), token=(5, 6), longest=40):
  i32 = lambda a: np.array(a, np.int32)
  keys = np.stack([KEY, KEY + 1])
  return engine.decode(engine.own(params), i32(token), i32(count), i32(limit), np.array(active), keys, longest)


def test_a_slot_that_does_not_write_keeps_what_it_holds(engine, fill, params):
  fill(0, ((40, 48),))
  fill(1, ((24, 48),), IDS[::-1])
  before = jax.tree.map(np.array, engine.cache)
  out = decode(engine, params, (True, False))
  assert out.count.tolist() == [4, 0]
  after = jax.tree.map(np.array, engine.cache)
  whole = lambda cache: [np.concatenate(parts, axis=2) for parts in (*cache.k, *cache.v)]
  for a, b in zip(whole(before), whole(after)):
    assert np.array_equal(a[1, :, :24], b[1, :, :24]) and np.array_equal(a[0, :, :40], b[0, :, :40])
    assert not np.array_equal(a[0, :, 40:44], b[0, :, 40:44])
  assert after.length.tolist() == [44, 24] and after.next_position.tolist() == [44, 24]


def test_a_copied_slot_goes_on_as_its_source(engine, fill, params):
  fill(0, ((40, 48),))
  fill(1, ((48, 48),), IDS[::-1])
  engine.copy(0, 1, 40)
  keys = np.stack([KEY, KEY])
  four = np.full(2, 4, np.int32)
  out = engine.decode(engine.own(params), four, four - 4, four, np.ones(2, bool), keys, 40)
  assert (out.token[:, 0] == out.token[:, 1]).all() and len(set(out.token[:, 0].tolist())) > 1
  np.testing.assert_array_equal(out.logp[:, 0], out.logp[:, 1])


def test_each_slot_ends_at_its_own_limit_or_stop(engine, fill, params):
  """Slot 0 has written 2 of 3 and may write 1 more; slot 1 goes on to the call's 4, or ends with a stop."""
  fill(0, ((40, 48),))
  fill(1, ((40, 48),))
  free = decode(engine, params, (True, True), count=(2, 0), limit=(3, 9))
  assert free.count.tolist() == [1, 4]
  stop = int(free.token[1, 1])
  assert stop not in free.token[:1, 1]
  engine.stops = (stop,)
  engine.cache = engine.cache._replace(length=jnp.full(2, 40, jnp.int32), next_position=jnp.full(2, 40, jnp.int32))
  out = decode(engine, params, (True, True), count=(2, 0), limit=(3, 9))
  assert out.count.tolist() == [1, 2] and out.token[:2, 1].tolist() == free.token[:2, 1].tolist()


# -- the draw


def test_draw_by_hand():
  """N8: logits [2, 0] at T = 0.5 are [4, 0]: -log(1 + e^-4) = -0.01815 and -4.01815; at T = 1 -0.12693 and -2.12693. Entropy of the first:
  0.98201 * 0.01815 + 0.01799 * 4.01815 = 0.09010."""
  logits, keys, index = jnp.tile(jnp.array([2.0, 0.0]), (400, 1)), jnp.tile(jnp.array(KEY), (400, 1)), jnp.arange(400)
  for temperature, want, entropy in ((0.5, [-0.01815, -4.01815], 0.09010), (1.0, [-0.12693, -2.12693], 0.36533)):
    token, logp, got = draw(logits, keys, index, temperature)
    np.testing.assert_allclose(logp, np.array(want)[token], atol=1e-5)
    np.testing.assert_allclose(got, entropy, atol=1e-5)
    assert set(token.tolist()) == {0, 1}
  token, logp, _ = draw(logits, keys, index, 0)
  assert set(token.tolist()) == {0} and np.allclose(logp, -0.12693, atol=1e-5)


def test_tokens_come_with_the_stated_frequency():
  """4096 draws, by index under one key and by key at one index: each share within 4 standard errors of softmax([1, 0, 2, -1])."""
  logits, n = jnp.array([1.0, 0.0, 2.0, -1.0]), 4096
  p = np.asarray(jax.nn.softmax(logits))
  keys = np.random.default_rng(0).integers(0, 2**32, (n, 2), np.uint32)
  for key, index in ((jnp.tile(jnp.array(KEY), (n, 1)), jnp.arange(n)), (jnp.array(keys), jnp.zeros(n, jnp.int32))):
    token, _, _ = draw(jnp.tile(logits, (n, 1)), key, index, 1.0)
    share = np.bincount(token, minlength=4) / n
    assert (np.abs(share - p) < 4 * np.sqrt(p * (1 - p) / n)).all(), share
