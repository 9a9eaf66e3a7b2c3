"""The update on one device: what meshes do with it is in test_learner_mesh.py."""

import jax.numpy as jnp
import numpy as np
import optax

from core.learner import make_update
from core.segments import Total
from core.state import TrainState


def test_the_leash_is_one_mean_however_its_demonstrations_are_dealt():
  """Four demonstrations, whole or as three and one beside padding: loss 0.5 * mean (w - x)^2 of 1, 2, 3, 10 from w = 0 is 14.25, its slope
  -4; that of the batch itself is (w - 1)^2 and -2."""
  loss = lambda w, x: (Total(jnp.sum(jnp.where(x > 0, (w - x) ** 2, 0)), jnp.sum(x > 0) * 1.0), {})
  keep = optax.GradientTransformation(jnp.zeros_like, lambda g, state, params=None: (jnp.zeros_like(g), g))  # its state is the gradient
  update = make_update(lambda params, frozen, x: params, loss, keep, 0.5, loss)
  of = lambda *numbers: np.array(numbers, np.float32)
  for demo in ((of(1, 2, 3, 10),), (of(1, 2, 3), of(10, 0, 0))):
    state, out = update(TrainState.create(jnp.zeros(()), keep), None, (of(1),), demo)
    assert float(out["loss"]) == 1 + 14.25 and float(state.opt_state) == -2 - 4
