"""Qwen2.5-VL and Qwen3-VL on tiny checkpoints (tests/golden) against what transformers computed for them in float32: two
screenshots of different ragged sizes with text around them. tests/parity/test_vl_models.py makes and re-checks those numbers."""

import json
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
      decoder.forward(params, cfg or self.cfg.text, tokens, at if positions is None else positions, segments, Vision(**features, slot=slot)),
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
  """Through the cache: one prefill in two uneven pieces, the first of which ends inside an image, then token by token."""
  tokens, at, _, slot = case.inputs()
  cache = decoder.init_cache(case.cfg.text, 1, len(case.want["tokens"]) + 16)
  fill = jax.jit(lambda params, t, p, s, cache: decoder.prefill(params, case.cfg.text, t, p, np.ones(t.shape, bool), cache, Vision(**features, slot=s)))
  step = jax.jit(lambda params, t, cache: decoder.decode_step(params, case.cfg.text, t, cache))
  for part in (slice(0, 30), slice(30, None)):
    hidden, cache = fill(case.params, tokens[:, part], at[:, :, part], slot[:, part], cache)
  hidden, out = hidden[:, -1], []
  for _ in case.want["greedy"]:
    token = jnp.argmax(decoder.logits(case.params, hidden), -1).astype(jnp.int32)
    out.append(int(token[0]))
    hidden, cache = step(case.params, token, cache)
  assert out == case.want["greedy"].tolist()
