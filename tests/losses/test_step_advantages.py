"""Credit per step. Numbers by hand, or from the lesson where a test says so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from losses.advantages import group_advantages
from losses.step_advantages import (
  discounted_returns,
  gigpo_step_advantages,
  process_advantages,
  step_pooled_advantages,
  whiten,
)


def near(a, b, atol=1e-5):
  np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=atol)


def test_discounted_returns():
  # discount 0.5, from the back: 4; 2 + 2 = 4; 1 + 2 = 3
  near(discounted_returns(np.array([1.0, 2.0, 4.0]), 0.5), [3, 4, 4])
  near(discounted_returns(np.array([0.0, 0.0, 1.0]), 0.95), [0.9025, 0.95, 1])
  near(discounted_returns(np.array([1.0, 2.0, 4.0]), 0.0), [1, 2, 4])
  near(discounted_returns(np.array([1.0, 2.0, 4.0]), 1.0), [7, 6, 4])


def test_gigpo_compares_steps_from_the_same_screen():
  # try A passes in two steps: start, next screen; try B fails after two steps that both left it at the start. Discount 0.95:
  # A 0.95 and 1, B 0 and 0. Start: mean 0.95 / 3 = 0.31667 -> +0.63333 and twice -0.31667; the next screen was seen once: 0
  credit = gigpo_step_advantages(np.array([0.95, 1.0, 0.0, 0.0]), np.array([0, 1, 0, 0]), 2)
  near(credit, [0.63333, 0, -0.31667, -0.31667])
  assert credit[1] == 0


def test_gigpo_with_a_spread_and_with_equal_returns():
  # 1, 0, 0.5: spread sqrt(0.5 / 3) = 0.40825; seven returns of 0.7 must be exactly 0
  credit = gigpo_step_advantages(np.array([1, 0, 0.5] + [0.7] * 7), np.array([0] * 3 + [1] * 7), 2, spread="population")
  near(credit[:3], [1.22474, -1.22474, 0], atol=2e-5)
  assert credit[3:].tolist() == [0] * 7


def test_step_pooled_lets_a_long_try_move_the_mean():
  # a pass of 2 steps, a fail of 4: mean 1/3, spread sqrt(2/9) = 0.47140; compared as tries they would get +1 and -1
  reward = np.array([1.0, 1, 0, 0, 0, 0])
  near(step_pooled_advantages(reward, np.zeros(6, int), 1), [1.41421] * 2 + [-0.70711] * 4)
  near(step_pooled_advantages(reward, np.zeros(6, int), 1, spread="none"), [2 / 3] * 2 + [-1 / 3] * 4)


# tries A = [1, 1] and B = [0, 0, 1]: mean 0.6, spread sqrt(0.24) = 0.489898 -> +0.816497 and -1.224745
PROCESS = np.array([1.0, 1, 0, 0, 1]), np.zeros(5, int), np.array([0, 0, 1, 1, 1])
WANTED = np.array([1.632993, 0.816497, -1.632993, -0.408248, 0.816497])  # sums from each step to its try's end


def test_process_advantages_sum_what_is_still_to_come():
  near(process_advantages(*PROCESS, 1, 2), WANTED)


def test_process_advantages_of_interleaved_and_shuffled_steps():
  between = np.array([2, 0, 3, 1, 4])  # B, A, B, A, B: each try's own steps still in order
  near(process_advantages(*(x[between] for x in PROCESS), 1, 2), WANTED[between])
  shuffled, place = np.array([4, 1, 0, 3, 2]), np.array([0, 1, 0, 1, 2])
  near(process_advantages(*(x[shuffled] for x in PROCESS), 1, 2, step_S=place[shuffled]), WANTED[shuffled])


def test_process_advantages_keep_groups_apart():
  twice = np.concatenate([PROCESS[0], 5 * PROCESS[0] - 1]), np.repeat([1, 0], 5), np.concatenate([PROCESS[2], PROCESS[2] + 2])
  near(process_advantages(*twice, 2, 4), np.tile(WANTED, 2))  # another scale and zero point: normalised away


def test_process_advantages_of_one_step_tries_are_group_advantages():
  reward, group = np.array([1.0, 0, 0, 1, -1, 0]), np.array([0, 0, 0, 1, 1, 1])
  near(process_advantages(reward, group, np.arange(6), 2, 6), group_advantages(reward, group, 2))


def test_poison_at_invalid_steps():
  valid = np.array([1, 1, 1, 0, 1, 1], bool)  # an invalid step in the middle of B, ids out of range
  group, episode = np.array([0, 0, 0, -7, 0, 0]), np.array([0, 0, 1, 99, 1, 1])
  functions = {
    "process": lambda r: process_advantages(r, group, episode, 1, 2, valid_S=valid),
    "gigpo": lambda r: gigpo_step_advantages(r, group, 1, valid_S=valid),
    "pooled": lambda r: step_pooled_advantages(r, group, 1, valid_S=valid),
    "whiten": lambda r: whiten(r, valid),
    "whiten_kept": lambda r: whiten(r, valid, shift=False),
  }

  @jax.jit
  def run(r):
    slope = lambda f: jax.grad(lambda r: jnp.sum(f(r) * jnp.arange(1.0, 7)))(r)
    return {name: (f(r), slope(f)) for name, f in functions.items()}

  clean = run(np.insert(PROCESS[0], 3, 0.0))
  near(clean["process"][0], np.insert(WANTED, 3, 0))
  for poison in (np.nan, 1e30, -np.inf):
    dirty = run(np.insert(PROCESS[0], 3, poison))
    for name, (value, slope) in dirty.items():
      assert np.array_equal(value, clean[name][0]) and value[3] == 0, name
      assert np.array_equal(slope, clean[name][1]) and slope[3] == 0 and slope.any(), name


def test_whiten():
  # 1, 2, 3: spread sqrt(2/3) = 0.81650, sample spread 1; the fourth is masked
  x, mask = np.array([1.0, 2, 3, 50]), np.array([1, 1, 1, 0])
  near(whiten(x, mask), [-1.22474, 0, 1.22474, 0], atol=2e-5)
  near(whiten(x, mask, spread="sample"), [-1, 0, 1, 0])
  near(whiten(x, mask, spread="sample", shift=False), [1, 2, 3, 0])
  assert whiten(np.full(7, 0.7), np.ones(7)).tolist() == [0] * 7


def test_vmap_equals_a_loop():
  rng = np.random.default_rng(0)
  reward, group, episode = rng.normal(size=(3, 12)), rng.integers(0, 2, (3, 12)), rng.integers(0, 4, (3, 12))
  valid = rng.random((3, 12)) < 0.8
  for run in (
    lambda r, g, e, v: process_advantages(r, g, e, 2, 4, valid_S=v),
    lambda r, g, e, v: gigpo_step_advantages(r, e, 4, valid_S=v),
    lambda r, g, e, v: step_pooled_advantages(r, g, 2, valid_S=v),
    lambda r, g, e, v: whiten(r, v),
    lambda r, g, e, v: discounted_returns(r, 0.9),
  ):
    looped = np.stack([jax.jit(run)(*row) for row in zip(reward, group, episode, valid)])
    near(jax.jit(jax.vmap(run))(reward, group, episode, valid), looped)


def test_errors_say_what_was_wanted():
  three, ids = np.ones(3), np.zeros(3, int)
  for match, call in {
    "return_S has length 3 but anchor_id_S has length 2": lambda: gigpo_step_advantages(three, ids[:2], 1),
    "reward_S has length 3 but group_id_S has length 2": lambda: step_pooled_advantages(three, ids[:2], 1),
    "step_S has length 2": lambda: process_advantages(three, ids, ids, 1, 1, step_S=ids[:2]),
    "segment id 5, wanted 0 .. 0": lambda: process_advantages(three, ids, ids + 5, 1, 1),
    "discount is 1.5": lambda: discounted_returns(three, 1.5),
    "rank 1": lambda: discounted_returns(np.ones((2, 3)), 0.9),
    "population, sample": lambda: gigpo_step_advantages(three, ids, 1, spread="std"),
    "'population' or 'sample'": lambda: whiten(three, three, spread="none"),
  }.items():
    with pytest.raises(ValueError, match=match):
      call()
