"""Parts that models share."""

import jax
import numpy as np
import pytest

from models import layers


@pytest.mark.parametrize("rows, width, out", [((3, 4), 5, 11), ((2, 3), 7, 4), ((24,), 3, 2), ((24,), 3, 10)])
def test_gradients_of_a_product_in_either_order(rows, width, out):
  """y = x W^T, so that dL/dW = g^T x and dL/dx = g W, in float64 by numpy."""
  rng = np.random.default_rng(0)
  x, weight, g = rng.normal(size=(*rows, width)), rng.normal(size=(out, width)), rng.normal(size=(*rows, out))
  y, back = jax.vjp(lambda x, w: layers.linear({"weight": w}, x), x.astype(np.float32), weight.astype(np.float32))
  to_x, to_weight = back(g.astype(np.float32))
  flat = lambda a: a.reshape(-1, a.shape[-1])
  np.testing.assert_allclose(y, x @ weight.T, atol=1e-5)
  np.testing.assert_allclose(to_x, g @ weight, atol=1e-5)
  np.testing.assert_allclose(to_weight, flat(g).T @ flat(x), atol=1e-5)
