"""Plans for ragged images and attention by them. Expected values by hand, by loops, or from one big mask instead of gathers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.positions import mrope_positions
from models.vision import (
  Bucket,
  VisionConfig,
  attend_whole,
  attend_windows,
  bucket_for,
  cut_windows,
  embed_patches,
  layer_norm,
  pad_patches,
  rope_tables,
  vision_plan,
)

# Windows of 4 x 4 patches (2 x 2 tokens) and a position table of 5 x 5, which no one tower has both of.
CFG = VisionConfig(
  depth=2, width=16, heads=2, hidden=16, out=8, patch=2, merge=2, frames=2, full=(1,), window=4, table=5, theta=10_000.0
)  # fmt: skip
GRIDS = [(6, 10), (4, 4), (2, 8)]


@pytest.fixture(scope="module")
def plan():
  return vision_plan(GRIDS, CFG, Bucket(4, 64, 7))


def order(h, w):
  """(row, column) of the patches in merge-block order, by loops."""
  return [(2 * i + a, 2 * j + b) for i in range(h // 2) for j in range(w // 2) for a in range(2) for b in range(2)]


def test_bucket_by_hand():
  """6 x 10 has 60 patches and 2 x 3 windows of 4 x 4, 2 x 8 has 1 x 2."""
  assert bucket_for(GRIDS, CFG) == Bucket(3, 60, 6)
  assert bucket_for(GRIDS[1:], CFG, images=5) == Bucket(5, 16, 2)


def test_places_and_windows_by_loops(plan):
  assert plan.valid.sum(1).tolist() == [60, 16, 16, 0]
  for m, (h, w) in enumerate(GRIDS):
    places = order(h, w)
    assert plan.place[m, : h * w].tolist() == [list(p) for p in places]
    want = {}
    for i, (row, column) in enumerate(places):
      want.setdefault((row // 4, column // 4), set()).add(i)
    got = [set(window[window >= 0].tolist()) for window in plan.windows[m]]
    assert sorted(map(sorted, filter(None, got))) == sorted(map(sorted, want.values()))
    flat = plan.windows[m].reshape(-1)
    assert flat[plan.slot[m, : h * w]].tolist() == list(range(h * w))  # there and back
  assert (plan.windows[3] == -1).all()


def test_table_taps_by_hand(plan):
  """An image of 4 x 4 patches over a table of 5 x 5: row r stands at r * 4 / 3. Patch (1, 2) at (1.3333, 2.6667): between rows 1, 2 and
  columns 2, 3 with weights 2/3, 1/3 and 1/3, 2/3. Corners stand on corners."""
  at = order(4, 4).index((1, 2))
  assert plan.taps[1, at].tolist() == [7, 8, 12, 13]
  np.testing.assert_allclose(plan.weights[1, at], [2 / 9, 4 / 9, 1 / 9, 2 / 9], rtol=1e-5)
  for corner, entry in (((0, 0), 0), ((0, 3), 4), ((3, 0), 20), ((3, 3), 24)):
    i = order(4, 4).index(corner)
    assert plan.taps[1, i][plan.weights[1, i] > 1e-6].tolist() == [entry]
  np.testing.assert_allclose(plan.weights.sum(-1), plan.valid, atol=1e-6)


def test_what_does_not_fit_is_refused():
  with pytest.raises(ValueError, match="4 images, the bucket takes 3"):
    vision_plan([*GRIDS, (2, 2)], CFG, bucket_for(GRIDS, CFG))
  with pytest.raises(ValueError, match="image 1 has 8 x 8 patches, wanted multiples of 2 and at most 60 in all"):
    vision_plan([(2, 2), (8, 8)], CFG, bucket_for(GRIDS, CFG))
  with pytest.raises(ValueError, match="image 0 has 3 x 2 patches"):
    vision_plan([(3, 2)], CFG, bucket_for(GRIDS, CFG))
  with pytest.raises(ValueError, match="image 0 of 2 x 28 patches has 7 windows, the bucket takes 6"):
    vision_plan([(2, 28)], CFG, bucket_for(GRIDS, CFG))


def softmax_oracle(q, k, v, seen):
  """NumPy attention of one image, seen bool [n, n]."""
  score = np.where(seen[None], np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1]), -np.inf)
  weight = np.exp(score - score.max(-1, keepdims=True))
  return np.einsum("hts,shd->thd", weight / weight.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("attention", ["auto", "chunked"])
def test_attention_is_that_of_one_mask_per_image(plan, attention):
  q, k, v = np.random.default_rng(0).normal(size=(3, 4, 64, 2, 8)).astype(np.float32)
  whole = np.asarray(attend_whole(q, k, v, plan, attention))
  windows = np.asarray(attend_windows(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), plan))
  for m, (h, w) in enumerate(GRIDS):
    n, window = h * w, np.array([(r // 4) * 100 + c // 4 for r, c in order(h, w)])
    cut = (q[m, :n], k[m, :n], v[m, :n])
    np.testing.assert_allclose(whole[m, :n], softmax_oracle(*cut, np.ones((n, n), bool)), atol=2e-6)
    np.testing.assert_allclose(windows[m, :n], softmax_oracle(*cut, window[:, None] == window[None]), atol=2e-6)
  assert np.isfinite(whole).all() and np.isfinite(windows).all()


@pytest.mark.parametrize("grid", [(6, 10), (8, 4)])  # over both edges of the windows, and over none
def test_windows_cut_by_transposition_are_the_gathered_ones(grid, compile_quickly):
  plan = vision_plan([grid] * 2, CFG, bucket_for([grid] * 2, CFG))
  q, k, v, push = np.random.default_rng(0).normal(size=(4, 2, grid[0] * grid[1], 2, 8)).astype(np.float32)
  with_grads = lambda f: jax.jit(jax.value_and_grad(lambda *qkv: jnp.sum(f(*qkv) * push), argnums=(0, 1, 2)))(q, k, v)
  want, got = with_grads(lambda *qkv: attend_windows(*qkv, plan)), with_grads(lambda *qkv: cut_windows(*qkv, grid, CFG))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_rope_tables_by_hand():
  """A head of 8 has 2 frequencies, 1 and 1 / 100, by row and again by column."""
  cos, sin = rope_tables(jnp.array([[[3, 7]]]), CFG)
  np.testing.assert_allclose(cos[0, 0], np.cos([3, 0.03, 7, 0.07]), rtol=1e-6)
  np.testing.assert_allclose(sin[0, 0], np.sin([3, 0.03, 7, 0.07]), rtol=1e-5)


def test_one_frame_through_the_summed_kernel_is_two_frames():
  """Against the kernel of two frames applied to two equal ones, in float64."""
  from models.images import ImageSpec

  spec = ImageSpec(2, 2, 1, 100, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
  rng = np.random.default_rng(0)
  weight, bias = rng.normal(size=(16, 3, 2, 2, 2)).astype(np.float32), rng.normal(size=16).astype(np.float32)
  patches = rng.integers(0, 256, (1, 5, 12)).astype(np.uint8)
  x = (patches.reshape(5, 3, 2, 2) / 255 - np.array(spec.mean)[:, None, None]) / np.array(spec.std)[:, None, None]
  want = np.einsum("ncij,octij->no", x, weight.astype(np.float64)) + bias
  got = embed_patches({"weight": jnp.asarray(weight), "bias": jnp.asarray(bias)}, jnp.asarray(patches), spec)
  np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-5)


def test_layer_norm_in_numpy():
  x = np.random.default_rng(0).normal(3, 5, size=(4, 16)).astype(np.float32)
  p = {"weight": np.linspace(1, 2, 16, dtype=np.float32), "bias": np.linspace(-1, 1, 16, dtype=np.float32)}
  want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p["weight"] + p["bias"]
  np.testing.assert_allclose(layer_norm(jnp.asarray(x), p), want, rtol=1e-5, atol=1e-5)
  assert layer_norm(jnp.asarray(x, jnp.bfloat16), p).dtype == jnp.bfloat16


def test_one_plan_shape_compiles_once():
  traced = []

  @jax.jit
  def run(q, plan):
    traced.append(1)
    return attend_windows(q, q, q, plan)

  bucket = Bucket(2, 64, 7)
  for grids in ([(6, 10)], [(4, 4), (2, 8)], GRIDS[:2]):
    run(jnp.ones((2, 64, 2, 8)), vision_plan(grids, CFG, bucket))
  assert traced == [1]


def test_pad_patches():
  got = pad_patches([np.ones((3, 12), np.uint8), np.full((2, 12), 7, np.uint8)], Bucket(3, 4, 0))
  assert got.sum(-1).tolist() == [[12, 12, 12, 0], [84, 84, 0, 0], [0, 0, 0, 0]] and got.dtype == np.uint8


# -- positions


def test_positions_by_hand():
  """Two words, an image of 2 x 3 tokens, one word: the image has time 2, rows 2-3 and columns 2-4; the word stands at 2 + 3 = 5."""
  at, after = mrope_positions(9, [2], [(2, 3)])
  assert at.tolist() == [[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]] and after == 6
  assert mrope_positions(3, [], [])[0].tolist() == [[0, 1, 2]] * 3


def test_positions_in_pieces_are_positions_at_once():
  """A prompt that grows: the next piece starts where the last one said."""
  sizes, places = [(2, 3), (4, 1), (1, 5)], [1, 9, 14]
  whole, after = mrope_positions(22, places, sizes)
  first, next_ = mrope_positions(8, places[:1], sizes[:1])
  second, end = mrope_positions(14, [p - 8 for p in places[1:]], sizes[1:], start=next_)
  assert np.array_equal(np.concatenate([first, second], 1), whole) and end == after


def test_images_that_overlap_or_run_over_the_end_are_refused():
  for length, places in ((20, [2, 5]), (10, [2, 8]), (20, [9, 2])):
    with pytest.raises(ValueError, match="image of 2 x 3 tokens at .* does not fit"):
      mrope_positions(length, places, [(2, 3), (2, 3)])
