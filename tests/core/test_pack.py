"""Packing: where every token stands, worked by hand, and that packing is invisible to the losses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import grpo, gspo
from core.pack import (
  PackItem,
  PackShape,
  arrange,
  bins,
  episode_items,
  fit_rows,
  number,
  shape_for,
  step_batch,
  to_batch,
  unpack,
  useful_share,
)
from core.schema import Credit, TokenRecord
from core.segments import Total
from core.state import Scores

pytestmark = pytest.mark.usefixtures("compile_quickly")


def item(tokens, actions=1, episode=0, step=0, images=(), learn=None, advantage=1.0, base=0):
  """A record of `tokens` tokens, the last `actions` written by the agent. images: index of each image's first placeholder."""
  n, mask = len(tokens), np.arange(len(tokens)) >= len(tokens) - actions
  record = TokenRecord(
    np.array(tokens, np.int32), mask, np.where(mask, -0.5, 0).astype(np.float32), np.where(mask, 3, -1).astype(np.int32),
    np.full(n, step, np.int32), np.array(images, np.int32), np.full(len(images), step, np.int32),
  )  # fmt: skip
  pictures = [np.full((1, 1, 3), tokens[0] + k, np.uint8) for k in range(len(images))]
  learn = np.ones(n, bool) if learn is None else np.array(learn)
  return PackItem(record, pictures, np.arange(n)[None], np.where(mask, advantage, 0).astype(np.float32), learn, episode, base)


BLANK = np.full((1, 1, 3), 9, np.uint8)


# -- rows


def test_first_fit_decreasing_by_hand():
  """Row of 10; longest first, ties in order: 8 opens a, 4 opens b, 4 joins b, 2 joins a (full), 1 and 1 join b (full)."""
  assert fit_rows([4, 8, 1, 4, 2, 1], 10) == [[1, 4], [0, 3, 2, 5]]
  assert fit_rows([5, 5, 5], 10) == [[0, 1], [2]]
  assert fit_rows([10, 1], 10) == [[0], [1]]
  assert fit_rows([], 10) == []


def test_a_second_size_must_fit_as_well():
  """Row of 10 tokens and 3 weights: 5 (2) opens a; 4 (2) does not fit beside it and opens b; 1 (1) joins a, 1 (1) joins b."""
  assert fit_rows([5, 4, 1, 1], 10, [2, 2, 1, 1], 3) == [[0, 2], [1, 3]]
  assert fit_rows([5, 4, 1, 1], 10) == [[0, 1, 2]] + [[3]]


@pytest.mark.parametrize("seed", range(5))
def test_rows_hold_everything_once_and_never_too_much(seed):
  rng = np.random.default_rng(seed)
  lengths, weights = rng.integers(1, 41, 60).tolist(), rng.integers(0, 6, 60).tolist()
  rows = fit_rows(lengths, 50, weights, 9)
  assert sorted(sum(rows, [])) == list(range(60))
  for row in rows:
    assert sum(lengths[i] for i in row) <= 50 and sum(weights[i] for i in row) <= 9
  assert rows == fit_rows(lengths, 50, weights, 9)
  plain = fit_rows(lengths, 50)
  assert len(plain) <= np.ceil(11 / 9 * np.ceil(sum(lengths) / 50)) + 6  # first-fit-decreasing's bound, by total length


def test_what_does_not_fit_a_row():
  with pytest.raises(ValueError, match="a record has 11 tokens, a row takes 10: raise pack.row_tokens"):
    fit_rows([3, 11], 10)
  with pytest.raises(ValueError, match="a record has 4 action tokens, a row takes 3"):
    fit_rows([3, 5], 10, [1, 4], 3)
  with pytest.raises(ValueError, match="pack.row_tokens is 20: the longest record of this policy has 30 tokens"):
    shape_for(4, 30, 5, 20, 1, 6)


def test_shape_by_hand():
  """Row of 100, records of at most 30: 3 a row, so 7 records need 3 rows; 3 x 8 action tokens a row; an image each."""
  assert shape_for(7, 30, 8, 100, 1, 6) == PackShape(rows=3, row_tokens=100, images=7, episodes=7, tokens_per_image=6, row_actions=24)
  assert shape_for(7, 30, 8, 30, 2, 6) == PackShape(7, 30, 14, 7, 6, 8)


@pytest.mark.parametrize("row_tokens", [20, 47, 64, 200])
def test_any_mix_of_records_fits_the_shape(row_tokens):
  """Records of 3 to 20 tokens with up to 8 written: many short ones stand in a row, yet no row overflows its action tokens."""
  rng = np.random.default_rng(row_tokens)
  shape = shape_for(24, 20, 8, row_tokens, 1, 1)
  for round_ in range(30):
    longest = (5, 9, 20)[round_ % 3]
    items = []
    for e in range(24):
      n = int(rng.integers(3, longest + 1))
      items.append(item(list(range(3, 3 + n)), actions=int(rng.integers(1, min(8, n - 2) + 1)), episode=e, images=[0]))
    batch = to_batch(items, arrange(items, shape), shape, BLANK)
    assert batch.tokens.shape == (shape.rows, row_tokens) and batch.images.shape == (24, 1, 1, 3)
    assert batch.is_action.sum(1).max() <= batch.row_actions
    assert batch.is_action.sum() == sum(i.record.is_action.sum() for i in items)


# -- placement


@pytest.fixture
def small():
  """Rows of 8: [a c] and [b]; a: 5 tokens of episode 1, b: 4 of episode 0, c: 3 of episode 1, step 1 with step base 10."""
  a = item([11, 2, 2, 14, 15], actions=2, episode=1, step=0, images=[1], base=10, advantage=2.0)
  b = item([21, 22, 23, 24], actions=2, episode=0, step=4, learn=[1, 1, 0, 1], advantage=-1.0)
  c = item([2, 2, 33], actions=1, episode=1, step=1, images=[0], base=10, advantage=0.5)
  return to_batch([a, b, c], [[0, 2], [1]], PackShape(3, 8, 3, 4, 2, 3), BLANK)


def test_every_token_stands_where_it_should(small):
  z = [0] * 8
  assert small.tokens.tolist() == [[11, 2, 2, 14, 15, 2, 2, 33], [21, 22, 23, 24, 0, 0, 0, 0], z]
  assert small.segment_ids.tolist() == [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0, 0, 0], z]
  assert small.positions.tolist() == [[[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 0, 0, 0, 0], z]]
  assert small.episode_id.tolist() == [[1] * 8, z, z]
  assert small.step_id.tolist() == [[10] * 5 + [11] * 3, [4] * 4 + [0] * 4, z]
  assert small.is_action.astype(int).tolist() == [[0, 0, 0, 1, 1, 0, 0, 1], [0, 0, 0, 1, 0, 0, 0, 0], z]  # 23 does not learn
  assert small.behaviour_logp.tolist() == [[0, 0, 0, -0.5, -0.5, 0, 0, -0.5], [0, 0, -0.5, -0.5, 0, 0, 0, 0], z]
  assert small.version.tolist() == [[-1, -1, -1, 3, 3, -1, -1, 3], [-1, -1, 3, 3, -1, -1, -1, -1], [-1] * 8]
  assert small.advantage.tolist() == [[0, 0, 0, 2, 2, 0, 0, 0.5], [0, 0, -1, -1, 0, 0, 0, 0], z]
  assert small.episode_valid.tolist() == [True, True, False, False]
  assert (small.num_episodes, small.row_actions, small.ref_logp) == (4, 3, None)


def test_image_slots_by_hand(small):
  """Two tokens an image: a's image is the first (slots 0, 1 at places 1, 2), c's the second (2, 3 at 5, 6); the third is blank."""
  n = -1
  assert small.image_slot.tolist() == [[n, 0, 1, n, n, 2, 3, n], [n] * 8, [n] * 8]
  assert small.images[:, 0, 0, 0].tolist() == [11, 2, 9]


def test_reference_log_probabilities_stand_beside_their_tokens():
  a = dataclasses.replace(item([11, 12, 13]), extra={"ref_logp": np.array([0, 0, -0.7], np.float32)})
  b = dataclasses.replace(item([21, 22], episode=1), extra={"ref_logp": np.array([0, -0.2], np.float32)})
  shape = PackShape(1, 6, 0, 2, 1, 4)
  np.testing.assert_allclose(to_batch([a, b], [[1, 0]], shape, BLANK).ref_logp, [[0, -0.2, 0, 0, -0.7, 0]])
  with pytest.raises(ValueError, match="all or none"):  # a 0 in its place would read as "certain"
    to_batch([a, dataclasses.replace(b, extra={})], [[1, 0]], shape, BLANK)


def test_steps_of_a_batch_are_numbered_without_gaps():
  """Single steps drawn from the middle of episodes, as imitation of stored steps does: ids 0, 1, 2 and never past num_steps."""
  drawn = [item([11, 12], step=h) for h in (7, 3, 7)]
  assert [int(i.record.step[0]) + i.step_base for i in number([[d] for d in drawn])] == [0, 1, 2]
  whole = [[item([1, 2], step=0), item([1, 2], step=1)], [item([1, 2], step=0)]]
  assert [int(i.record.step[0]) + i.step_base for i in number(whole)] == [0, 1, 2]


def test_a_critics_batch_of_steps():
  a, b, goal = np.full((2, 3, 3), 4, np.uint8), np.full((2, 3, 3), 9, np.uint8), np.array([5, 6], np.int32)
  batch = step_batch([(a, a), (a, b)], [goal, goal[:1]], [1.0, 0.0], 3, 3)
  assert batch.frames.shape == (3, 2, 2, 3, 3) and batch.frames[1, :, 0, 0, 0].tolist() == [4, 9]
  assert batch.text.tolist() == [[5, 6, 0], [5, 0, 0], [0, 0, 0]] and batch.label.tolist() == [1, 0, 0]
  assert batch.valid.tolist() == [True, True, False]
  for bad in ([], [(a, a)] * 4):
    with pytest.raises(ValueError, match="wanted 1 to 3"):
      step_batch(bad, [goal] * len(bad), [0.0] * len(bad), 3, 3)
  with pytest.raises(ValueError, match="2 tokens"):
    step_batch([(a, a)], [goal], [1.0], 3, 1)


def test_useful_share(small):
  assert useful_share(small) == pytest.approx(12 / 24)


def test_unpack_is_the_inverse(small):
  parts = unpack(small.tokens, small)
  assert [p.tolist() for p in parts] == [[11, 2, 2, 14, 15], [2, 2, 33], [21, 22, 23, 24]]
  rng = np.random.default_rng(0)
  items = [item(rng.integers(3, 99, rng.integers(2, 12)).tolist(), episode=e) for e in range(20)]
  shape = shape_for(20, 12, 1, 40, 0, 1)
  rows = arrange(items, shape)
  parts = unpack(to_batch(items, rows, shape, BLANK).tokens, to_batch(items, rows, shape, BLANK))
  assert [p.tolist() for p in parts] == [items[i].record.tokens.tolist() for row in rows for i in row]


def test_what_does_not_fit_a_batch():
  one, two = item([1, 2, 3]), item([1, 2, 3], episode=1, images=[0])
  with pytest.raises(ValueError, match="2 rows do not fit into a batch of 1"):
    to_batch([one, two], [[0], [1]], PackShape(1, 8, 1, 2, 1, 2), BLANK)
  with pytest.raises(ValueError, match="episode index 1 in a batch that holds 1 episodes"):
    to_batch([one, two], [[0, 1]], PackShape(1, 8, 1, 1, 1, 2), BLANK)
  with pytest.raises(ValueError, match="more than 0 images"):
    to_batch([two], [[0]], PackShape(1, 8, 0, 2, 1, 2), BLANK)
  with pytest.raises(ValueError, match="a row holds 2 action tokens, the batch was shaped for 1"):
    to_batch([one, two], [[0, 1]], PackShape(1, 8, 1, 2, 1, 1), BLANK)
  with pytest.raises(ValueError):  # an image that came without its pixels
    to_batch([dataclasses.replace(two, images=[])], [[0]], PackShape(1, 8, 1, 2, 1, 2), BLANK)


def test_an_empty_batch_has_the_shape_and_teaches_nothing():
  batch = to_batch([], [], PackShape(2, 8, 1, 2, 1, 3), BLANK)
  assert batch.tokens.shape == (2, 8) and not batch.is_action.any() and not batch.episode_valid.any()


# -- episodes


def of_episode(e):
  """Items of a two-step episode, pushed by 0.5 and -2, with the second step left out of the loss."""
  push, keep = Credit(np.array([0.5, -2.0], np.float32), None), np.array([True, False])
  return episode_items(e, push, keep, positions=lambda record: np.arange(len(record))[None], image=lambda pixels: pixels)


def test_each_token_gets_the_push_of_its_step(episode):
  """Two steps of 3 prompt and 2 written tokens; step 1 is left out of the loss but stays in the context."""
  e = episode(1)
  items = of_episode(e)
  assert [i.advantage.tolist() for i in items] == [[0, 0, 0, 0.5, 0.5], [0, 0, 0, -2, -2]]
  assert [i.learn.tolist() for i in items] == [[True] * 5, [False] * 5]
  assert [np.array_equal(i.images[0], e.steps[h].screen.pixels) for h, i in enumerate(items)] == [True, True]


def test_a_record_of_several_steps_gets_several_pushes(episode):
  """The whole episode as one sequence: each action token looks up its own step."""
  e = episode(1)
  a, b = e.records
  names = [f.name for f in dataclasses.fields(TokenRecord)]
  whole = TokenRecord(**{n: np.concatenate([getattr(a, n), getattr(b, n)]) for n in names})
  e = dataclasses.replace(e, records=[dataclasses.replace(whole, image_place=np.array([1, 6]))])
  (only,) = of_episode(e)
  assert only.advantage.tolist() == [0, 0, 0, 0.5, 0.5, 0, 0, 0, -2, -2]
  assert only.learn.tolist() == [True] * 5 + [False] * 5
  assert [np.array_equal(p, e.steps[h].screen.pixels) for h, p in enumerate(only.images)] == [True, True]


def test_numbering_keeps_steps_of_different_episodes_apart():
  episodes = [[item([1, 2], step=0), item([1, 2], step=1)], [item([1, 2], step=0)], [item([1, 2], step=0), item([1, 2], step=3)]]
  items = number(episodes)
  assert [i.episode for i in items] == [0, 0, 1, 2, 2]
  assert [int(i.record.step[0]) + i.step_base for i in items] == [0, 1, 2, 3, 6]


@pytest.mark.parametrize("size, counts", [(6, [4, 1, 2, 3, 6, 2]), (7, [3] * 9), (100, [2, 3]), (5, [5, 5, 1])])
def test_minibatches_keep_episodes_whole_and_cover_everything_once(size, counts):
  episodes = [[item([e + 3, k + 3]) for k in range(n)] for e, n in enumerate(counts)]
  batches = bins([[e] for e in episodes], size, np.random.default_rng(0))
  names = [[tuple(i.record.tokens.tolist()) for i in b] for b in batches]
  assert sorted(sum(names, [])) == sorted((e + 3, k + 3) for e, n in enumerate(counts) for k in range(n))
  owners = [{t[0] for t in b} for b in names]
  assert sum(map(len, owners)) == len(counts)  # no episode in two batches
  assert all(len(b) <= size for b in batches)
  for b in batches:
    assert sorted({i.episode for i in b}) == list(range(len({int(i.record.tokens[0]) for i in b})))


def test_minibatches_are_few_even_and_shuffled():
  episodes = [[item([e + 3, 1])] for e in range(40)]
  batches = bins([[e] for e in episodes], 16, np.random.default_rng(0))
  assert sorted(map(len, batches)) == [13, 13, 14]  # 40 records of at most 16: three, filled evenly
  order = lambda seed: [int(i.record.tokens[0]) for b in bins([[e] for e in episodes], 16, np.random.default_rng(seed)) for i in b]
  assert order(1) == order(1) != order(2)


def test_an_episode_larger_than_a_minibatch_is_refused():
  with pytest.raises(ValueError, match="an episode has 5 records, agent.minibatch takes 4: raise it"):
    bins([[[item([1, 2])] * 5], [[item([1, 2])]]], 4, np.random.default_rng(0))


# -- packing is invisible: the same loss and the same gradients however the same episodes are laid out


@pytest.fixture(scope="module")
def learner(tiny_policy):
  """{agent: run(params, batch) -> ((sum, (total, metrics)), gradients)}, from screenshots to the loss."""

  def compiled(module):
    phase = module.make(module.defaults()).phases[0]

    def objective(params, batch):
      features = tiny_policy.encode_images(params, batch.images)
      hidden = tiny_policy.forward(params, batch.tokens, batch.positions, batch.segment_ids, features, batch.image_slot)
      scores = Scores(*tiny_policy.token_logprobs(params, hidden, batch.tokens, batch.is_action, batch.row_actions))
      total, metrics = phase.loss(scores, batch)
      return total.sum, (total, metrics)

    return jax.jit(jax.value_and_grad(objective, has_aux=True))

  return {"grpo": compiled(grpo), "gspo": compiled(gspo)}


@pytest.fixture(scope="module")
def items(tiny_policy, tiny_screen):
  """Five episodes of one to three steps with ragged goals and actions, pushes of both signs and drifted log-probabilities."""
  from rollout.sampler import Sampled
  from rollout.turn import make_record

  rng, episodes = np.random.default_rng(2), []
  for e, steps in enumerate((2, 1, 3, 1, 2)):
    records = []
    for h in range(steps):
      n = int(rng.integers(1, 6))
      goal = ("red", "open the red mug", "the mug")[(e + h) % 3]
      ids = rng.integers(3, 100, n).astype(np.int32)
      sampled = Sampled(ids, (-4.5 + 0.3 * rng.normal(size=n)).astype(np.float32), np.zeros(n), 0)
      record = make_record(tiny_policy.prompt(goal, [tiny_screen(10 * e + h)], ""), sampled, h)
      push = np.where(record.is_action, (-1.0, 0.5, 1.5, -0.2, 1.0)[e], 0).astype(np.float32)
      picture = tiny_policy.image(tiny_screen(10 * e + h))
      records.append(PackItem(record, [picture], tiny_policy.positions(record), push, np.ones(len(record), bool), 0))
    episodes.append(records)
  return episodes


TIGHT, ROOMY = PackShape(9, 17, 9, 5, 6, 5), PackShape(7, 40, 11, 8, 6, 17)


def laid_out(episodes, shape, rows=None):
  flat = number(episodes)
  return to_batch(flat, rows or arrange(flat, shape), shape, np.zeros((24, 40, 3), np.uint8))


def learned(run, params, batches):
  """(loss, gradients) of a whole optimiser step given in any number of batches: totals are added, then divided once."""
  outs = [run(params, b) for b in batches]
  total = sum([Total(*o[0][1][0]) for o in outs])
  grads = jax.tree.map(lambda *g: sum(g) / total.count, *[o[1] for o in outs])
  return float(total.mean()), grads, float(total.count)


def assert_same(a, b):
  assert a[0] == pytest.approx(b[0], abs=1e-6) and a[2] == b[2]
  for x, y in zip(jax.tree.leaves(a[1]), jax.tree.leaves(b[1])):
    np.testing.assert_allclose(x, y, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("agent", ["grpo", "gspo"])
def test_layout_changes_neither_loss_nor_gradients(agent, learner, items, tiny_params):
  run = learner[agent]
  want = learned(run, tiny_params, [laid_out(items, TIGHT)])
  assert abs(want[0]) > 1e-3 and max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want[1])) > 1e-3
  flat = [i for e in items for i in e]
  count = {"grpo": sum(int(i.record.is_action.sum()) for i in flat), "gspo": 5}[agent]
  assert want[2] == count
  permuted = [items[i] for i in (3, 0, 4, 2, 1)]
  backwards = [[i] for i in range(8, -1, -1)]
  assert_same(learned(run, tiny_params, [laid_out(permuted, TIGHT)]), want)
  assert_same(learned(run, tiny_params, [laid_out(items, TIGHT, backwards)]), want)
  assert_same(learned(run, tiny_params, [laid_out(items, ROOMY)]), want)  # packed rows, and padding in every direction
  assert_same(learned(run, tiny_params, [laid_out(items[:2], ROOMY), laid_out(items[2:3], ROOMY), laid_out(items[3:], ROOMY)]), want)


@pytest.mark.parametrize("agent", ["grpo", "gspo"])
def test_poison_in_masked_places_changes_not_a_bit(agent, learner, items, tiny_params):
  batch = laid_out(items, ROOMY)
  mask, pad = batch.is_action, batch.segment_ids == 0
  assert pad.any() and (~mask & ~pad).any()
  want = learned(learner[agent], tiny_params, [batch])
  for filler in (np.nan, 1e30, -np.inf):
    dirty = dataclasses.replace(
      batch, behaviour_logp=np.where(mask, batch.behaviour_logp, filler).astype(np.float32),
      advantage=np.where(mask, batch.advantage, filler).astype(np.float32), tokens=np.where(pad, 50, batch.tokens),
      positions=np.where(pad, 3, batch.positions), version=np.where(mask, batch.version, 10**6),
    )  # fmt: skip
    got = learned(learner[agent], tiny_params, [dirty])
    assert got[0] == want[0] and got[2] == want[2]
    assert jax.tree.all(jax.tree.map(np.array_equal, got[1], want[1]))


@pytest.mark.parametrize("agent", ["grpo", "gspo"])
def test_a_step_left_out_is_as_good_as_absent(agent, learner, items, tiny_params):
  """keep = False masks a step's tokens; a batch without that record gives the same loss and gradients."""
  run = learner[agent]
  masked = [*items[:2], [items[2][0], dataclasses.replace(items[2][1], learn=np.zeros_like(items[2][1].learn)), items[2][2]], *items[3:]]
  absent = [*items[:2], [items[2][0], items[2][2]], *items[3:]]
  assert_same(learned(run, tiny_params, [laid_out(masked, ROOMY)]), learned(run, tiny_params, [laid_out(absent, ROOMY)]))


@pytest.mark.parametrize("agent", ["grpo", "gspo"])
def test_a_batch_in_which_nothing_learns_moves_nothing(agent, learner, items, tiny_params):
  nothing = [[dataclasses.replace(i, learn=np.zeros_like(i.learn)) for i in e] for e in items]
  (_, (total, _)), grads = learner[agent](tiny_params, laid_out(nothing, ROOMY))
  assert float(total.mean()) == 0.0 and float(total.count) == 0.0
  assert not any(np.asarray(g).any() for g in jax.tree.leaves(grads))
