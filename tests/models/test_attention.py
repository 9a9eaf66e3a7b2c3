"""Every backend of attention is the naive one in its numbers and gradients, with grouped heads, packed segments and ragged lengths.

Forced CPU devices need a fresh process: this file is also the script that it runs.
"""

import json
import os
import pathlib
import subprocess
import sys

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


def test_chunked_leaves_out_what_nobody_sees():
  """Blocks of two places, segments 1 1 | 1 2 | 2 2 | padding: the third block of queries begins at the second of keys, the last sees
  none."""
  seen = attention.packed(jnp.array([[1, 1, 1, 2, 2, 2, 0, 0]]))
  reach = attention._reach(attention.Visible(*(attention._blocks(a, 2) for a in seen[:4])))
  np.testing.assert_array_equal(reach, [[0, 0, 1, 4], [1, 2, 3, 0]])


def test_chunked_over_a_cache():
  """Queries at places 70.. and 3.. of a cache of 100: ragged rows, blocks that do not divide, blocks that nobody sees."""
  q, k, v = (jax.random.normal(jax.random.key(i), (2, n, h, 16)) for i, (n, h) in enumerate(((20, 4), (100, 2), (100, 2))))
  place = jnp.array([[70], [3]]) + jnp.arange(20)
  order = jnp.broadcast_to(jnp.arange(100), (2, 100))
  visible = attention.Visible(place, order, jnp.ones_like(place), jnp.ones_like(order))
  want = attention.naive(q, k, v, visible)
  np.testing.assert_allclose(attention.chunked(q, k, v, visible, query_block=8, key_block=16), want, atol=2e-6)


@pytest.mark.parametrize("parts", [(804,), (512, 192, 100), (30, 774)])
def test_one_query_over_a_cache_in_parts(parts):
  """Rows of 3, 512 and 804 places: blocks of 804, 128, 64, 100, 30 and 774 places; what lies behind a row is poison, but never NaN."""
  q, k, v = (jax.random.normal(jax.random.key(i), (3, n, h, 16)) for i, (n, h) in enumerate(((1, 6), (804, 2), (804, 2))))
  place, order = jnp.array([[2], [511], [803]]), jnp.broadcast_to(jnp.arange(804), (3, 804))
  behind = (order > place)[..., None, None]
  k, v = jnp.where(behind, 1e4, k), jnp.where(behind, -1e4, v)
  visible = attention.Visible(place, order, jnp.ones_like(place), jnp.ones_like(order))
  cut = lambda a: jnp.split(jnp.swapaxes(a, 1, 2), np.cumsum(parts)[:-1], axis=2)
  want = attention.naive(q, k, v, visible)
  np.testing.assert_allclose(attention.over_cache(q, cut(k), cut(v), visible), want, atol=2e-6)
  np.testing.assert_allclose(attention.over_cache(q, cut(k), cut(v), visible, "naive"), want, atol=2e-6)


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
  assert attention.choose("auto", attention.packed(jnp.ones((1, 1024), jnp.int32)), jnp.float32) == "chunked"  # on a CPU
  assert attention.choose("auto", visible._replace(key_order=jnp.zeros((1, 2**20))), jnp.float32) == "chunked"
  assert attention.choose("splash", visible, jnp.float32) == "splash"
  assert attention.choose("splash", visible._replace(packed=False), jnp.float32) == "naive"  # a cache


@pytest.mark.parametrize("shares", [2, 4])
def test_queries_are_dealt_so_that_all_see_as_many_keys(shares):
  """Causal: query t sees t + 1 keys. Each of the devices then has the same sum; of three everything stays in order."""
  order = attention.dealt(64, shares)
  assert sorted(order) == list(range(64))
  assert len({int((part + 1).sum()) for part in np.split(order, shares)}) == 1
  np.testing.assert_array_equal(attention.dealt(12, 3), range(12))


def test_a_function_is_taken_as_a_backend():
  q, k, v, visible = packed_inputs()
  np.testing.assert_array_equal(attention.mix(q, k, v, visible, lambda q, k, v, visible: q + 1), q + 1)


def test_splash_says_what_it_cannot_do():
  q, k, v, visible = packed_inputs(200)
  with pytest.raises(ValueError, match="a multiple of 128 tokens, got 200; use attention='chunked'"):
    attention.splash(q, k, v, visible)


def main():
  """Value and gradients of the backends that are run under shard_map, on fsdp 2 x context 2 x tensor 2, against the oracle."""
  from core import mesh as mesh_lib

  mesh, out = mesh_lib.make({**mesh_lib.defaults(), "context": 2, "tensor": 2}), {}
  q, k, v, visible = packed_inputs(256)
  real = (visible.query_segment > 0)[..., None, None]
  spread = {"chunked": attention.chunked, "splash": BACKENDS["splash"]}

  def both(name, q, k, v):
    def loss(qkv):
      with mesh_lib.use(mesh) if name != "naive" else mesh_lib.use(mesh_lib.make(mesh_lib.defaults(), jax.devices()[:1])):
        mixed = jnp.where(real, attention.mix(*qkv, visible, name), 0)
      return jnp.sin(mixed).sum(), mixed

    (_, mixed), grads = jax.value_and_grad(loss, has_aux=True)((q, k, v))
    return mixed, *grads

  attention.BACKENDS |= spread
  want = jax.jit(both, static_argnums=0)("naive", q, k, v)
  q, k, v = jax.device_put((q, k, v), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
  for name in spread:
    got = jax.jit(both, static_argnums=0)(name, q, k, v)
    out[name] = [float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(a)).max()) for a, b in zip(want, got)]
    out[name].append(len({str(s.index) for s in got[0].addressable_shards}))
  print(json.dumps(out))


@pytest.mark.slow
def test_rows_heads_and_queries_over_eight_devices():
  """Each device holds an eighth of what is mixed: its rows, its heads, its half of the queries."""
  env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
  env["PYTHONPATH"] = str(pathlib.Path(__file__).parents[2])
  done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=600, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  for name, (*gaps, parts) in json.loads(done.stdout.splitlines()[-1]).items():
    assert all(gap < 3e-6 for gap in gaps) and parts == 8, (name, gaps, parts)


if __name__ == "__main__":
  main()
