"""What the models say comes back to its own record, step and try, however the records were packed."""

import types

import numpy as np
import pytest

from core.pack import PackShape, shape_for
from core.schema import Screen, TokenRecord
from rollout import scoring

POLICY = types.SimpleNamespace(positions=lambda r: np.arange(len(r))[None], image=lambda pixels: pixels, max_goal=3)
BLANK = np.zeros((24, 40, 3), np.uint8)


@pytest.fixture
def ragged(episode):
  """Seven episodes of one to three steps; records of 3 to 9 tokens, every token of its own."""
  rng, episodes, at = np.random.default_rng(1), [], 100
  for i in range(7):
    e = episode(i % 2, index=i, steps=int(rng.integers(1, 4)))
    for h in range(len(e.steps)):
      n, written = int(rng.integers(3, 10)), int(rng.integers(1, 3))
      mask = np.arange(n) >= n - written
      e.records[h] = TokenRecord(np.arange(at, at + n, dtype=np.int32), mask, np.where(mask, -0.5, 0).astype(np.float32),
                                 np.where(mask, 0, -1).astype(np.int32), np.full(n, h, np.int32), np.array([0]), np.array([h]))  # fmt: skip
      at += n
    episodes.append(e)
  return episodes


SHAPES = [shape_for(64, 9, 2, 9, 1, 1), shape_for(4, 9, 2, 30, 1, 1), shape_for(64, 9, 2, 40, 1, 1), PackShape(5, 9, 1, 1, 1, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=["a record a row", "batches of four", "packed rows", "one by one"])
def test_values_line_up_with_their_records(ragged, shape):
  calls = []
  ask = {"old_logp": lambda b: (calls.append(b), b.tokens)[1], "value_logit": lambda b: 10.0 * b.tokens * b.is_action}
  scores = scoring.judge(ragged, POLICY, shape, BLANK, ask, 8)
  total = sum(len(e.records) for e in ragged)
  assert len(calls) == -(-total // shape.episodes) and len(scores) == 7
  for e, s in zip(ragged, scores, strict=True):
    assert len(s.records) == len(e.records) and s.step_value is None and s.task_value is None
    for record, said in zip(e.records, s.records, strict=True):
      np.testing.assert_array_equal(said["old_logp"], record.tokens)
      np.testing.assert_array_equal(said["value_logit"], 10.0 * record.tokens * record.is_action)
      assert said["old_logp"].dtype == np.float32


def test_every_action_token_is_scored_and_nothing_is_pushed(ragged):
  for item in scoring.plain_items(ragged[0], POLICY):
    assert item.learn.all() and not item.advantage.any()


def test_step_values_by_hand(episode):
  """The smaller head decides: logits (0, ln 3) are chances 0.5 and 0.75, so 0.5. 5 steps in batches of 2 are three calls."""
  sizes = []

  def fn(batch):
    sizes.append(int(batch.valid.sum()))
    return np.stack([batch.frames[:, 1, 0, 0, 0] * 0.0, np.full(2, np.log(3.0))], axis=1)

  one = np.zeros((1, 1, 3), np.uint8)
  values = scoring.values_of([(one, one)] * 5, [np.array([4])] * 5, fn, 2, 3)
  np.testing.assert_allclose(values, [0.5] * 5)
  assert sizes == [2, 2, 1] and scoring.values_of([], [], fn, 2, 3).shape == (0,)


def lightness(batch):
  """A critic whose logit is the brightness of the screen now, minus a tenth of the one before; one head."""
  return batch.frames[:, 1, 0, 0, :1] / 50.0 - batch.frames[:, 0, 0, 0, :1] / 500.0


def test_a_value_before_each_step_and_on_the_final_screen(episode):
  """Screens of brightness 10, 20, 30 and at the end 40: each with the one before it, the first with itself; and per task the first."""
  e, f = episode(1, steps=3), episode(0, steps=1, index=1)
  lit = lambda v: Screen.of(np.full((24, 40, 3), v, np.uint8))
  for step, v in zip(e.steps, (10, 20, 30)):
    step.screen = lit(v)
  e.final_screen, f.steps[0].screen = lit(40), lit(50)
  ask = {"step_value": lightness, "task_value": lightness}
  a, b = scoring.judge([e, f], POLICY, SHAPES[0], BLANK, ask, 2)
  sigmoid = lambda x: 1 / (1 + np.exp(-np.array(x)))
  np.testing.assert_allclose(a.step_value, sigmoid([0.2 - 0.02, 0.4 - 0.02, 0.6 - 0.04, 0.8 - 0.06]), rtol=1e-5)
  np.testing.assert_allclose(b.step_value, sigmoid([1.0 - 0.1, 1.0 - 0.1]), rtol=1e-5)  # no final screen: the last one seen
  assert a.task_value == pytest.approx(sigmoid(0.18), rel=1e-5) and b.task_value == pytest.approx(sigmoid(0.9), rel=1e-5)
  assert a.records == [] and isinstance(a.task_value, float)


def test_the_goal_is_what_stands_before_the_first_screenshot(episode):
  """Words of each episode go to each of its steps, padded with 0."""
  e, seen = episode(1, steps=2), []
  e.records[0].image_place[:] = 2
  assert scoring.goal_tokens(e).tolist() == [0, 1]
  fn = lambda b: (seen.append(b.text[b.valid].tolist()), np.zeros((4, 1)))[1]
  scoring.judge([e], POLICY, SHAPES[0], BLANK, {"step_value": fn}, 4)
  assert seen == [[[0, 1, 0]] * 3]


def test_a_goal_that_is_too_long_for_the_critic_is_one_line(episode):
  e = episode(1, prompt=6)
  e.records[0].image_place[:] = 5
  with pytest.raises(ValueError, match="a goal has 5 tokens, the critic takes 3"):
    scoring.judge([e], POLICY, shape_for(8, 9, 2, 9, 1, 1), BLANK, {"task_value": lightness}, 4)


def test_nobody_is_judged_where_nothing_is_asked(episode):
  (s,) = scoring.judge([episode(1)], POLICY, SHAPES[0], BLANK, {}, 4)
  assert s.records == [] and s.step_value is None and s.task_value is None
  assert scoring.judge([], POLICY, SHAPES[0], BLANK, {"old_logp": lambda b: b.tokens}, 4) == []
