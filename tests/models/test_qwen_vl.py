"""Qwen2.5-VL and Qwen3-VL on tiny checkpoints (tests/golden) against what transformers computed for them in float32: two
screenshots of different ragged sizes with text around them. tests/parity/test_vl_models.py makes and re-checks those numbers."""

import dataclasses
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decoder, hf, qwen2_5_vl, qwen3_vl, vision, vision_language
from models.decoder import Vision
from models.images import preprocess
from models.positions import mrope_positions
from models.vision import Bucket, Run, bucket_for, pad_patches, vision_plan

pytestmark = pytest.mark.usefixtures("compile_quickly")
GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
FAMILIES = {"qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl}
IMAGE = 200
TOLERANCE = 1e-4  # of features and logits with a standard deviation of about 1; 1e-5 is reached


class Case:
  """A family's checkpoint, its expected numbers, and the two screenshots as the tower takes them."""

  def __init__(self, name):
    self.name, self.family, self.folder = name, FAMILIES[name], GOLDEN / name
    self.cfg = vision_language.read_config(self.folder, self.family.TOWER)
    self.params = hf.load(self.folder, vision_language.leaves(self.cfg), dtype=jnp.float32)
    with np.load(self.folder / "expected.npz") as file:
      self.want = dict(file)
    rng = np.random.default_rng(0)
    self.images = [preprocess(rng.integers(0, 256, (h, w, 3)).astype(np.uint8), self.cfg.images) for h, w in ((150, 410), (300, 200))]
    self.grids = [i.grid for i in self.images]
    self.bucket = bucket_for(self.grids, self.cfg.vision)

  def encode(self, params=None, bucket=None, plan=None, cfg=None, order=(0, 1), run=Run()):  # noqa: B008
    """Features of the two screenshots, each without its padding, one after the other."""
    cfg, bucket = cfg or self.cfg, bucket or self.bucket
    plan = plan or vision_plan([self.grids[i] for i in order], cfg.vision, bucket)
    patches = pad_patches([self.images[i].patches for i in order], bucket)
    encode = jax.jit(lambda params, patches, plan: vision_language.encode_images(params, cfg, patches, plan, run))
    found = encode(params or self.params, patches, plan)
    tokens, row = bucket.patches // 4, {i: r for r, i in enumerate(order)}
    rows = np.concatenate([row[i] * tokens + np.arange(self.grids[i][0] * self.grids[i][1] // 4) for i in (0, 1)])
    return {name: value[..., rows, :] for name, value in found.items()}

  def inputs(self):
    tokens = self.want["tokens"]
    slot = np.where(tokens == IMAGE, np.cumsum(tokens == IMAGE) - 1, -1).astype(np.int32)
    return tokens[None], self.want["positions"][:, None], np.ones((1, len(tokens)), np.int32), slot[None]

  def logits(self, features, positions=None, cfg=None):
    tokens, at, segments, slot = self.inputs()
    run = lambda params, features: decoder.logits(
      params,
      decoder.forward(
        params, cfg or self.cfg.text, tokens, at if positions is None else positions, segments, Vision(**features, slot=slot)
      ),
    )
    return np.asarray(jax.jit(run)(self.params, features))[0, self.want["logit_rows"]]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request):
  return Case(request.param)


@pytest.fixture(scope="module")
def features(case):
  return case.encode()


def far(a, b):
  return float(np.abs(np.asarray(a) - np.asarray(b)).max(initial=0.0))


# -- the numbers of transformers


def test_features_are_those_of_transformers(case, features):
  assert far(features["embeds"], case.want["embeds"]) < TOLERANCE and case.want["embeds"].std() > 0.5
  assert features["deepstack"].shape == case.want["deepstack"].shape
  assert far(features["deepstack"], case.want["deepstack"]) < TOLERANCE


def test_positions_are_those_of_transformers(case):
  places = [4, 4 + len(case.images[0].patches) // 4 + 4]
  at, after = mrope_positions(len(case.want["tokens"]), places, [(h // 2, w // 2) for h, w in case.grids])
  assert np.array_equal(at, case.want["positions"]) and after == case.want["next_position"]


def test_logits_are_those_of_transformers(case, features):
  got = case.logits(features)
  assert far(got, case.want["logits"]) < TOLERANCE and case.want["logits"].std() > 0.5
  assert np.array_equal(got.argmax(-1), case.want["logits"].argmax(-1))


def test_greedy_continuation_is_that_of_transformers(case, features):
  """Through the cache: a prefill in two pieces, parted inside an image, the first shorter than its buffer, then token by token."""
  tokens, at, _, slot = case.inputs()
  count, text, first = tokens.shape[1], case.cfg.text, 30
  size = count - first
  fit = lambda a, fill: np.concatenate([a[..., :first], np.full((*a.shape[:-1], size - first), fill, a.dtype)], -1)
  assert tokens[0, first - 1] == tokens[0, first] == IMAGE
  run = jax.jit(lambda params, t, p, s, valid, cache: decoder.prefill(params, text, t, p, valid, cache, Vision(**features, slot=s)))
  step = jax.jit(lambda params, t, cache: decoder.decode_step(params, text, t, cache))
  cache = jax.jit(lambda: decoder.init_cache(text, 1, count + 16))()
  _, cache = run(case.params, fit(tokens, 0), fit(at, 0), fit(slot, -1), np.arange(size)[None] < first, cache)
  rest = slice(first, None)
  hidden, cache = run(case.params, tokens[:, rest], at[:, :, rest], slot[:, rest], np.ones((1, size), bool), cache)
  hidden, out = hidden[:, -1], []
  for _ in case.want["greedy"]:
    token = jnp.argmax(decoder.logits(case.params, hidden), -1).astype(jnp.int32)
    out.append(int(token[0]))
    hidden, cache = step(case.params, token, cache)
  assert out == case.want["greedy"].tolist()


# -- what must not matter


def test_padding_changes_nothing(case, features):
  """More places, more windows, one more row, the images the other way round: the same features."""
  b = case.bucket
  bigger = Bucket(3, b.patches + 60, b.windows + 2 * bool(b.windows))
  got = case.encode(bucket=bigger, order=(1, 0))
  assert far(got["embeds"], features["embeds"]) < 1e-5 and far(got["deepstack"], features["deepstack"]) < 1e-5


def test_what_stands_in_the_padding_changes_nothing(case):
  """Other bytes there: not one bit of a feature moves."""
  bucket = case.bucket._replace(patches=case.bucket.patches + 20)
  plan = vision_plan(case.grids, case.cfg.vision, bucket)
  patches = pad_patches([i.patches for i in case.images], bucket)
  noise = np.where(plan.valid[..., None], patches, np.random.default_rng(1).integers(0, 256, patches.shape).astype(np.uint8))
  encode = jax.jit(lambda p: vision_language.encode_images(case.params, case.cfg, p, plan, Run()))
  a, b = (np.asarray(encode(p)["embeds"]).reshape(2, -1, case.cfg.vision.out) for p in (patches, noise))
  assert not np.array_equal(patches, noise) and not np.array_equal(a, b)
  for m, (h, w) in enumerate(case.grids):
    assert np.array_equal(a[m, : h * w // 4], b[m, : h * w // 4])


def test_gradients_reach_every_parameter_whatever_is_kept_of_a_layer(case):
  """Of the log-probabilities of a few tokens after both images: finite, not 0, and the same with attention in blocks and remat."""
  tokens, at, segments, slot = case.inputs()
  plan, patches = vision_plan(case.grids, case.cfg.vision, case.bucket), pad_patches([i.patches for i in case.images], case.bucket)
  rows = np.concatenate([i * case.bucket.patches // 4 + np.arange(h * w // 4) for i, (h, w) in enumerate(case.grids)])
  mask = np.zeros(tokens.shape, bool)
  mask[0, -6:] = True

  def loss(params, run):
    f = vision_language.encode_images(params, case.cfg, patches, plan, run)
    vision = Vision(f["embeds"][rows], f["deepstack"][:, rows], slot)
    hidden = decoder.forward(params, case.cfg.text, tokens, at, segments, vision, remat=run.remat)
    return decoder.token_logprobs(params, case.cfg.text, hidden, tokens, mask, 8, chunk=2)[0].sum()

  gradient = lambda run: jax.device_get(jax.jit(jax.grad(partial(loss, run=run)))(case.params))
  kept = gradient(Run("chunked", "full"))
  plain = gradient(Run()) if case.name == "qwen2_5_vl" else kept  # once is enough: it has both kinds of attention
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(plain), jax.tree.leaves(kept)):
    assert np.isfinite(a).all() and np.abs(a).max() > 0, path
    assert far(a, b) < 1e-4 * np.abs(a).max() + 1e-6, path


def test_a_frozen_tower_gets_no_gradient(case):
  plan, patches = vision_plan(case.grids, case.cfg.vision, case.bucket), pad_patches([i.patches for i in case.images], case.bucket)
  loss = lambda params: vision_language.encode_images(params, case.cfg, patches, plan, Run(), freeze=True)["embeds"].sum()
  assert not any(np.any(g) for g in jax.device_get(jax.tree.leaves(jax.jit(jax.grad(loss))(case.params))))


# -- each shortcut that other ports took is seen by the tolerance above


def wrong(case, **changed):
  return dataclasses.replace(case.cfg, vision=dataclasses.replace(case.cfg.vision, **changed))


def test_shortcuts_of_the_tower_are_seen(case, monkeypatch):
  want = case.want["embeds"]
  plan = vision_plan(case.grids, case.cfg.vision, case.bucket)
  if case.name == "qwen2_5_vl":
    assert far(case.encode(cfg=wrong(case, full=(0, 1, 2)))["embeds"], want) > 100 * TOLERANCE  # no windows
    n = case.bucket.patches  # a band of 64 neighbours in a row instead of windows
    band = np.arange(n + -n % 64).reshape(1, -1, 64)
    band = np.where(np.arange(n + -n % 64).reshape(1, -1, 64) < np.array([len(i.patches) for i in case.images])[:, None, None], band, -1)
    slot = np.broadcast_to(np.arange(n, dtype=np.int32), (2, n))
    assert far(case.encode(plan=plan._replace(windows=band.astype(np.int32), slot=slot))["embeds"], want) > 100 * TOLERANCE
  else:
    assert far(case.encode(plan=plan._replace(weights=np.roll(plan.weights, 1, -1)))["embeds"], want) > 100 * TOLERANCE  # the table
  swapped = plan._replace(place=plan.place[..., ::-1])
  assert far(case.encode(plan=swapped)["embeds"], want) > 100 * TOLERANCE  # rows taken for columns
  exact = vision.rope_tables
  rounded = lambda *args: [jax.lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7) for a in exact(*args)]
  monkeypatch.setattr(vision, "rope_tables", rounded)
  assert far(case.encode()["embeds"], want) > 10 * TOLERANCE  # turns rounded to bfloat16


def test_shortcuts_of_the_decoder_are_seen(case, features):
  want, text = case.want["logits"], case.cfg.text
  flat = np.broadcast_to(np.arange(len(case.want["tokens"]), dtype=np.int32), (3, 1, len(case.want["tokens"])))
  assert far(case.logits(features, positions=flat), want) > 100 * TOLERANCE  # 1-D rope
  other = dataclasses.replace(text, mrope_interleaved=not text.mrope_interleaved)
  assert far(case.logits(features, cfg=other), want) > 100 * TOLERANCE  # the other family's layout
  if case.name == "qwen3_vl":
    none = features | {"deepstack": features["deepstack"][:0]}
    assert far(case.logits(none), want) > 100 * TOLERANCE  # no deepstack
    late = features | {"deepstack": features["deepstack"][::-1]}
    assert far(case.logits(late), want) > 100 * TOLERANCE
