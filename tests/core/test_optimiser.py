"""The optimiser's schedule and clip, the stop after broken steps, and the reference that follows: by hand."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agents.base import follow
from core import learner as learner_lib
from core.optimiser import check_finite, make_optimiser, with_master
from core.segments import Total
from core.state import TrainState

pytestmark = pytest.mark.usefixtures("compile_quickly")


def knobs(**kw):
  return types.SimpleNamespace(**{"lr": 0.1, "warmup": 4, "weight_decay": 0.0} | kw)


def test_constant_after_the_warm_up():
  """Up by a quarter of 0.1 a step over four steps, then 0.1 for good."""
  _, schedule = make_optimiser(knobs(), 1.0, None)
  np.testing.assert_allclose([schedule(i) for i in (0, 1, 2, 4, 5, 10_000)], [0, 0.025, 0.05, 0.1, 0.1, 0.1], rtol=1e-6)


@pytest.mark.parametrize("steps", [None, 20])
def test_without_a_warm_up_the_rate_is_there_at_once(steps):
  assert float(make_optimiser(knobs(warmup=0), 1.0, steps)[1](0)) == pytest.approx(0.1)


def test_cosine_to_a_fiftieth():
  """Warm-up of 4, then half a cosine over the other 16 of 20: in its middle (0.1 + 0.002) / 2; a run shorter than its warm-up warms
  up for half of it."""
  _, schedule = make_optimiser(knobs(), 1.0, 20)
  np.testing.assert_allclose([schedule(i) for i in (4, 12, 20, 99)], [0.1, 0.051, 0.002, 0.002], rtol=1e-5)
  _, short = make_optimiser(knobs(warmup=60), 1.0, 10)
  assert float(short(5)) == pytest.approx(0.1)


def test_a_first_step_is_the_rate_in_every_direction_and_decay_is_apart():
  """Adam's first step is lr * sign(g) whatever its size; AdamW adds lr * decay * weight."""
  params, grads = {"w": jnp.array([1.0, -2.0])}, {"w": jnp.array([1e-3, -5.0])}
  for decay, want in ((0.0, [-0.1, 0.1]), (0.5, [-0.1 - 0.05, 0.1 + 0.1])):
    optimiser, _ = make_optimiser(knobs(warmup=0, weight_decay=decay), 1e9, None)
    step, _ = optimiser.update(grads, optimiser.init(params), params)
    np.testing.assert_allclose(step["w"], want, rtol=1e-3)


def test_the_norm_is_clipped_over_all_leaves_before_adam():
  """Gradient (3, 4) of norm 5 is scaled to norm 1: (0.6, 0.8). Adam's first moment after one step is 0.1 of it."""
  params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
  optimiser, _ = make_optimiser(knobs(), 1.0, None)
  _, state = optimiser.update({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, optimiser.init(params), params)
  mu = next(s.mu for s in jnp_tree(state) if hasattr(s, "mu"))
  np.testing.assert_allclose([mu["a"][0], mu["b"][0]], [0.06, 0.08], rtol=1e-5)


def jnp_tree(state):
  """Every named tuple inside an optimiser's state."""
  yield state
  if isinstance(state, tuple):
    for part in state:
      yield from jnp_tree(part)


def test_broken_steps_in_a_row_stop_the_run():
  check_finite({"skipped": np.int32(2)}, 3)
  with pytest.raises(FloatingPointError, match="3 optimiser steps in a row") as error:
    check_finite({"skipped": np.int32(3)}, 3)
  assert "\n" not in str(error.value)


def test_small_steps_add_up_in_the_float32_copy():
  """bfloat16 has 1 - 2^-8 below 1. Steps of -2^-10: three of them are past the half way, where a weight without a copy never moves."""
  step = optax.sgd(1.0)
  for optimiser, want in ((with_master(step), [1.0, 1.0, 1 - 2**-8, 1 - 2**-8]), (step, [1.0, 1.0, 1.0, 1.0])):
    params, seen = {"w": jnp.ones(1, jnp.bfloat16)}, []
    state = optimiser.init(params)
    for _ in range(4):
      updates, state = optimiser.update({"w": jnp.full(1, 2**-10, jnp.float32)}, state, params)
      params = optax.apply_updates(params, updates)
      seen.append(float(params["w"][0]))
    assert seen == want and params["w"].dtype == jnp.bfloat16
  assert float(with_master(step).init(params).master["w"][0]) == 1.0


def test_what_is_frozen_neither_moves_nor_has_a_state():
  """Weight decay 0.5 and a gradient pull at both; of Adam's two moments the frozen leaf has none."""
  params = {"visual": {"w": jnp.ones(3)}, "model": {"w": jnp.ones(2)}}
  optimiser, _ = make_optimiser(knobs(warmup=0, weight_decay=0.5), 1e9, None, frozen="(^|/)visual/")
  state = optimiser.init(params)
  assert sorted(x.size for x in jax.tree.leaves(state) if x.ndim) == [2, 2]
  step, _ = optimiser.update(jax.tree.map(jnp.ones_like, params), state, params)
  assert step["visual"]["w"].tolist() == [0, 0, 0]
  np.testing.assert_allclose(step["model"]["w"], [-0.15, -0.15], rtol=1e-5)  # 0.1 of Adam's sign, 0.1 * 0.5 of decay


def test_a_step_that_cannot_be_taken_leaves_everything_as_it_was():
  """Faults N5, N19: on a gradient of 0 Adam's momentum would move the weights all the same. An empty step is no broken one; a broken
  micro-batch poisons no later step."""
  optimiser = optax.adam(0.1)
  loss = lambda x, b: (Total(x * b, jnp.where(b == 0, 0.0, 1.0)), {})  # a micro-batch of 0 has no token
  update = learner_lib.make_update(lambda params, frozen, batch: params, loss, optimiser)
  run = lambda state, *parts: update(state, None, tuple(jnp.float32(p) for p in parts), None)
  first, out = jax.device_get(run(TrainState.create(jnp.ones(()), optimiser), 2.0))
  assert not out["empty"] and first.updates == 1 and first.params != 1.0
  still, out = jax.device_get(run(jax.tree.map(jnp.array, first), 0.0, 0.0))
  assert out["empty"] and out["skipped"] == 0 and jax.tree.all(jax.tree.map(np.array_equal, first, still))
  broken, out = jax.device_get(run(jax.tree.map(jnp.array, still), 1.0, np.nan, 1.0))
  assert not out["empty"] and out["skipped"] == 1 and broken.updates == 1 and broken.params == first.params
  empty, out = jax.device_get(run(jax.tree.map(jnp.array, broken), 0.0))
  assert out["empty"] and out["skipped"] == 1  # says nothing about the broken one
  third, out = jax.device_get(run(jax.tree.map(jnp.array, empty), 0.0, 2.0))
  assert not out["empty"] and out["skipped"] == 0 and third.updates == 2 and np.isfinite(third.params) and third.params < first.params


def learner():
  weights = lambda x: {"w": jnp.full(2, x), "deep": {"b": jnp.full(3, x)}}
  return {"states": {"policy": types.SimpleNamespace(params=weights(1.0))}, "frozen": {"reference": weights(0.0), "copied": weights(-7.0)}}


@pytest.mark.parametrize("rule, after", [
  (None, [0, 0, 0, 0]), (("fixed", 1, 1.0), [0, 0, 0, 0]), (("phase", 2, 0.25), [0, 1, 1, 1]),
  (("moving", 2, 0.25), [0, 0.25, 0.25, 0.4375]), (("moving", 1, 1.0), [1, 1, 1, 1]),
])  # fmt: skip
def test_the_reference_after_each_of_four_updates(rule, after):
  """Policy at 1, reference at 0. A share of 0.25 every second update: 0.25, then 0.25 + 0.25 * 0.75 = 0.4375."""
  held = learner()
  if rule is None:
    del held["frozen"]["reference"]  # an algorithm without a reference keeps none
  seen = []
  for done in (1, 2, 3, 4):
    follow(held, done, rule)
    seen.append(float(held["frozen"]["reference"]["deep"]["b"][0]) if rule else 0)
  np.testing.assert_allclose(seen, after)
  assert float(held["frozen"]["copied"]["w"][0]) == -7 and float(held["states"]["policy"].params["w"][0]) == 1


def test_a_reference_keeps_its_own_arrays():
  """The policy's arrays are given away at its next step: a reference that has become the policy must not share them."""
  held = learner()
  follow(held, 1, ("phase", 1, 1.0))
  policy, reference = held["states"]["policy"].params["w"], held["frozen"]["reference"]["w"]
  assert reference is not policy and reference.unsafe_buffer_pointer() != policy.unsafe_buffer_pointer()
  policy.delete()
  assert reference.tolist() == [1, 1]


@pytest.mark.parametrize("moment", [None, "bfloat16"])
def test_a_state_of_bfloat16_parameters_keeps_its_dtypes(moment):
  """Gradients are float32: what changed its dtype with the first step would compile anew and fit no checkpoint."""
  params, grads = {"w": jnp.ones(3, jnp.bfloat16)}, {"w": jnp.ones(3)}
  optimiser, _ = make_optimiser(knobs(), 1.0, None, moment=moment)
  before = optimiser.init(params)
  after = optimiser.update(grads, before, params)[1]
  kinds = lambda tree: jax.tree.map(lambda x: x.dtype.name, tree)
  assert kinds(after) == kinds(before)
