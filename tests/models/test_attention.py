"""Every backend of attention is the naive one in its numbers and gradients, with grouped heads, packed segments and ragged lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention

pytestmark = pytest.mark.usefixtures("compile_quickly")
BACKENDS = {
  "chunked": lambda *a: attention.chunked(*a, query_block=48, key_block=32),
  "splash": lambda *a: attention.splash(*a, interpret=True),
  "cudnn": lambda *a: attention.cudnn(*a, implementation="xla"),  # the same call as on a GPU
}


def packed_inputs(length=128):
  """4 heads over 2 key-value heads; row 0: segments of 50, 70 and 8 of padding; row 1: one of 128."""
  q, k, v = (jax.random.normal(jax.random.key(i), (2, length, h, 16)) for i, h in enumerate((4, 2, 2)))
  segments = np.ones((2, length), np.int32)
  segments[0, 50:], segments[0, 120:] = 2, 0
  return q, k, v, attention.packed(jnp.asarray(segments))


def test_the_oracle_by_hand():
  """Scores 0, so a query's output is the mean of the values it sees. Segments 1 1 2, values 1 3 10: 1, (1 + 3) / 2 = 2, 10."""
  q, v = jnp.zeros((1, 3, 1, 2)), jnp.array([1.0, 3.0, 10.0]).reshape(1, 3, 1, 1) * jnp.ones(2)
  out = attention.naive(q, jnp.ones((1, 3, 1, 2)), v, attention.packed(jnp.array([[1, 1, 2]])))
  np.testing.assert_allclose(out[0, :, 0, 0], [1, 2, 10])


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_the_oracle(name):
  q, k, v, visible = packed_inputs()
  real = (visible.query_segment > 0)[..., None, None]

  def value_and_grad(backend):
    loss = lambda qkv: jnp.where(real, jnp.sin(backend(*qkv, visible)), 0).sum()
    return jnp.where(real, backend(q, k, v, visible), 0), jax.grad(loss)((q, k, v))

  want, got = value_and_grad(attention.naive), value_and_grad(BACKENDS[name])
  np.testing.assert_allclose(got[0], want[0], atol=2e-6)
  for a, b in zip(got[1], want[1]):
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_chunked_over_a_cache():
  """Queries at places 70.. and 3.. of a cache of 100: ragged rows, blocks that do not divide, blocks that nobody sees."""
  q, k, v = (jax.random.normal(jax.random.key(i), (2, n, h, 16)) for i, (n, h) in enumerate(((20, 4), (100, 2), (100, 2))))
  place = jnp.array([[70], [3]]) + jnp.arange(20)
  order = jnp.broadcast_to(jnp.arange(100), (2, 100))
  visible = attention.Visible(place, order, jnp.ones_like(place), jnp.ones_like(order))
  want = attention.naive(q, k, v, visible)
  np.testing.assert_allclose(attention.chunked(q, k, v, visible, query_block=8, key_block=16), want, atol=2e-6)


def test_chunked_memory_grows_with_length_not_with_its_square():
  """Temporaries of value and gradient, as XLA counts them: over 4096 tokens all scores of 4 heads alone are 268 MB."""

  def temporaries(backend, length):
    like = lambda heads: jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32)
    visible = attention.packed(jnp.ones((1, length), jnp.int32))
    loss = lambda q, k, v: backend(q, k, v, visible).sum()
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(like(4), like(2), like(2)).compile().memory_analysis().temp_size_in_bytes

  half, whole = (temporaries(attention.chunked, n) for n in (2048, 4096))
  assert whole < 2.6 * half
  assert 5 * whole < temporaries(attention.naive, 4096)


def test_what_is_chosen():
  _, _, _, visible = packed_inputs()
  assert attention.choose("auto", visible, jnp.float32) == "naive"
  assert attention.choose("auto", visible._replace(key_order=jnp.zeros((1, 2**20))), jnp.float32) == "chunked"
  assert attention.choose("splash", visible, jnp.float32) == "splash"


def test_a_function_is_taken_as_a_backend():
  q, k, v, visible = packed_inputs()
  np.testing.assert_array_equal(attention.mix(q, k, v, visible, lambda q, k, v, visible: q + 1), q + 1)


def test_splash_says_what_it_cannot_do():
  q, k, v, visible = packed_inputs(200)
  with pytest.raises(ValueError, match="a multiple of 128 tokens, got 200; use attention='chunked'"):
    attention.splash(q, k, v, visible)
