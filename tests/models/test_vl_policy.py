"""A vision-language policy as the loop uses it: made from a checkpoint folder, sampled by rollout/sampler.py, scored as train.py does,
and at the size of the real ones without allocating anything."""

import collections
import json
import pathlib
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_checkpoints

from agents import arpo
from core.learner import make_score, make_update
from core.optimiser import make_optimiser
from core.state import Batch, TrainState
from models import decoder, qwen2_5_vl, qwen3_vl, vision_language
from models.config import ModelConfig
from models.decoder import Leaf
from models.images import ImageSpec
from models.vision_language import Seen, VLConfig
from rollout.sampler import Sampler
from rollout.turn import make_record

pytestmark = pytest.mark.usefixtures("compile_quickly")
FAMILIES = {"qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl}
SCREEN = (120, 90)  # 4 x 3 tokens at a factor of 28 or 32


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request):
  return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
  """A checkpoint folder without weights, two layers deep, and a short instruction beside it."""
  return pathlib.Path(tiny_checkpoints.folder(tmp_path_factory.mktemp("checkpoint") / family, family))


def knobs(folder, **changed):
  cfg = vision_language.defaults()
  cfg.update(dict(max_prompt=160, max_action=5, dtype="float32", remat="none", instruction=str(folder / "instruction.txt")) | changed)
  return cfg


@pytest.fixture(scope="module")
def policy(family, folder):
  return FAMILIES[family].make(knobs(folder), str(folder), "desktop", SCREEN)


def screen(seed, size=SCREEN):
  return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)


def history(policy, n):
  """n earlier steps; step h wrote one letter and the end of turn."""
  t = policy.tokenizer
  return [Seen(policy.image(screen(h)), "", [*t.encode("abcdef"[h]), t.eos_id]) for h in range(n)]


def test_prompt_with_history_by_hand(policy):
  p = policy.prompt("red", [screen(9)], "", history(policy, 2))
  n = policy.tokens_per_image
  assert n == 12 and len(p.image_place) == 3 and p.images.shape[0] == 3 and p.images.dtype == np.uint8
  for place in p.image_place:
    assert (p.tokens[place : place + n] == policy.tokenizer.image_id).all()
  for i, seed in enumerate((0, 1, 9)):
    assert np.array_equal(p.images[i], policy.image(screen(seed)))
  # an image of 3 x 4 tokens moves the position by 4 instead of 12
  assert p.positions.shape == (3, len(p.tokens)) and p.next_position == len(p.tokens) - 3 * (12 - 4)
  assert p.positions[:, -1].tolist() == [p.next_position - 1] * 3


def test_sampled_log_probabilities_are_the_trainers(policy):
  """Two prompts of different lengths with two screenshots each: through the sampler's cache, then as one packed row."""
  rng = np.random.default_rng(0)  # sharp, and no bias is 0
  params = jax.tree.map(
    lambda a: rng.normal(float(a.ndim == 1), 0.2, a.shape).astype(np.float32), jax.eval_shape(policy.init, jax.random.key(0))
  )
  from core.state import Weights

  sampler = Sampler(policy, (1,))
  sampler.load(Weights(params, 3))
  records, images = [], []
  for i in range(2):
    p = policy.prompt("open the mug"[: 4 + 8 * i], [screen(20 + i)], "", history(policy, 1))
    out = sampler.act([p], np.array([[1, i]], np.uint32))[0]
    assert 1 <= len(out.tokens) <= policy.max_action
    records.append((make_record(p, out, 0), out))
    images.append(p.images)
  n, length = policy.tokens_per_image, sum(len(r) for r, _ in records) + 7
  tokens, segments, slot, mask = (np.full((1, length), fill, np.int32) for fill in (0, 0, -1, 0))
  positions, logp, at, used = np.zeros((3, 1, length), np.int32), np.zeros(length, np.float32), 0, 0
  for i, (record, _) in enumerate(records):
    where = slice(at, at + len(record))
    tokens[0, where], segments[0, where], mask[0, where] = record.tokens, i + 1, record.is_action
    positions[:, 0, where], logp[where] = policy.positions(record), record.logp
    for place in record.image_place:
      slot[0, at + place : at + place + n] = used * n + np.arange(n)
      used += 1
    at += len(record)

  @jax.jit
  def score(params, images):
    features = policy.encode_images(params, images)
    hidden = policy.forward(params, tokens, positions, segments, features, slot)
    return policy.token_logprobs(params, hidden, tokens, mask.astype(bool), 2 * policy.max_action)[0]

  got = np.asarray(score(params, np.concatenate(images)))[0]
  np.testing.assert_allclose(got, logp, atol=2e-5)
  assert logp.min() < -0.5
  other = np.asarray(score(params, np.concatenate(images)[::-1]))[0]
  assert np.abs(other - logp).max() > 1e-3  # the screenshots matter


def test_a_learner_with_a_frozen_tower_encodes_a_screenshot_once(policy):
  """Four screenshots, three contents, two of which are kept: features, deepstack among them, are the tower's own, in the images' order."""
  rng, made = np.random.default_rng(1), []
  params = jax.tree.map(lambda a: rng.normal(0, 0.2, a.shape).astype(np.float32), jax.eval_shape(policy.init, jax.random.key(0)))
  learner = policy.keeping(policy, lambda: made.append(1) or params["visual"], 2)
  seeds = (1, 2, 1, 3)
  images = np.stack([learner.image(screen(i)) for i in seeds])
  assert len(made) == 3 and images.shape[2:] == (policy.tokens_per_image, policy.width)
  got = learner.encode_images(None, images)
  want = policy.encode_images(params, np.stack([policy.image(screen(i)) for i in seeds]))
  assert jax.tree.map(np.shape, got) == jax.tree.map(np.shape, want)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
  learner.image(screen(1))  # asked for after 2, so 3 took the place of 2
  assert len(made) == 3
  learner.image(screen(2))
  assert len(made) == 4


def test_init_makes_every_leaf(policy):
  """As the tree says it and in the dtype asked for; its numbers are decoder.init_leaves'."""
  tree = vision_language.leaves(policy.prompt.args[0].cfg)
  want = jax.tree.map(lambda leaf: (leaf.shape, jnp.float32), tree, is_leaf=lambda x: isinstance(x, Leaf))
  assert jax.tree.map(lambda a: (a.shape, a.dtype), jax.eval_shape(policy.init, jax.random.key(0))) == want


def test_stored_records_get_the_positions_they_were_sampled_at(policy):
  from rollout.sampler import Sampled

  p = policy.prompt("red", [screen(9)], "", history(policy, 1))
  record = make_record(p, Sampled(np.arange(3, dtype=np.int32), np.zeros(3), np.zeros(3), 0), 0)
  written = np.broadcast_to(p.next_position + np.arange(3), (3, 3))
  assert np.array_equal(policy.positions(record), np.concatenate([p.positions, written], 1))


def test_window_forgets_screenshots(family, folder):
  policy = FAMILIES[family].make(knobs(folder, mode="window", screens=2), str(folder), "desktop", SCREEN)
  p = policy.prompt("red", [screen(9)], "", history(policy, 3))
  assert (
    p.images.shape[0] == 2 and np.array_equal(p.images[1], policy.image(screen(9))) and np.array_equal(p.images[0], policy.image(screen(2)))
  )


def test_the_tower_keeps_what_its_own_policy_says(family, folder):
  """jax.checkpoint stands in the program of the tower, of the decoder, or of both."""

  def kept(**remat):
    p = FAMILIES[family].make(knobs(folder, **remat), str(folder), "desktop", SCREEN)
    params = jax.eval_shape(p.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((1, *p.image(screen(0)).shape), np.uint8)
    row = jax.ShapeDtypeStruct((1, 96), np.int32)
    features = jax.eval_shape(p.encode_images, params, images)
    tower = jax.make_jaxpr(p.encode_images)(params, images)
    decoder = jax.make_jaxpr(p.forward)(params, row, jax.ShapeDtypeStruct((3, 1, 96), np.int32), row, features, row)
    return tuple("policy=" in str(program) for program in (tower, decoder))

  assert kept(remat="none", remat_tower="full") == (True, False) and kept(remat="full", remat_tower="none") == (False, True)
  assert kept(remat="full") == (True, True) and kept(remat="none") == (False, False)


def test_what_does_not_fit_together_is_one_line(family, folder, policy, tmp_path):
  make = lambda folder=folder, screen=SCREEN, **changed: FAMILIES[family].make(knobs(folder, **changed), str(folder), "desktop", screen)
  with pytest.raises(ValueError, match="mode is 'all', wanted one of append, window"):
    make(mode="all")
  with pytest.raises(ValueError, match="screens is 0, wanted 1 or more"):
    make(screens=0)
  with pytest.raises(ValueError, match="remat is 'some'; there are none, dots"):
    make(remat="some")
  with pytest.raises(ValueError, match="remat_tower is 'some'; there are none, dots"):
    make(remat_tower="some")
  with pytest.raises(ValueError, match="does not fit into 20: raise policy.max_prompt or lower policy.max_pixels"):
    make(max_prompt=20)
  with pytest.raises(ValueError, match=r"uint8 \(90, 121, 3\), the policy was made for uint8 \(90, 120, 3\)"):
    policy.prompt("red", [screen(0, (121, 90))])
  bad = tmp_path / "bad"
  shutil.copytree(folder, bad)
  (bad / "instruction.txt").write_text("Go: {goal}")
  config = json.loads((bad / "config.json").read_text())
  for change, message in (
    (lambda c: c.update(image_token_id=5), "an image token is .* in tokenizer.json and 5 in config.json"),
    (lambda c: c["vision_config"].update(out_hidden_size=8), "image features have width 8, the decoder 32"),
    (lambda c: c["vision_config"].update(patch_size=7), r"\(patch, merge\) is \(1[46], 2\) in preprocessor_config.json and \(7, 2\)"),
    (lambda c: c["vision_config"].pop("depth"), "config.json lacks vision_config.depth, and no default is assumed"),
    (lambda c: c["text_config"].update(vocab_size=300), "tokenizer.json has ids up to .*, the model of config.json 300 tokens"),
    (lambda c: c["text_config"].update(max_position_embeddings=100), r"max_prompt \+ max_action is 165; .* was trained for 100 positions"),
  ):
    changed = json.loads(json.dumps(config))
    change(changed)
    (bad / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=message):
      make(bad)
  (bad / "config.json").write_text(json.dumps(config))
  tokens = json.loads((bad / "tokenizer.json").read_text())
  tokens["model"]["vocab"]["a"] = 9000  # as many tokens as before, one of them beyond the embedding
  (bad / "tokenizer.json").write_text(json.dumps(tokens))
  with pytest.raises(ValueError, match="tokenizer.json has ids up to 9000, the model of config.json"):
    make(bad)


def test_a_qwen2_5_vl_is_told_as_ui_tars_on_a_desktop(family, folder):
  """UI-TARS-1.5 is a Qwen2.5-VL: output in a fence, the actions, notes with the size of the image in pixels, then the task. A phone's
  grammar, another family and the knob have the plain text."""
  heads = ["Output Format", "Action Space", "Note", "User Instruction"]

  def told(grammar, **changed):
    cfg = knobs(folder, max_prompt=1500, **{"instruction": ""} | changed)
    return FAMILIES[family].make(cfg, str(folder), grammar, SCREEN).prompt.args[0].chat.instruction

  sections = lambda text: [line[3:] for line in text.split("\n") if line.startswith("## ")]
  usual, asked = told("desktop"), told("desktop", instruction="uitars")
  assert sections(asked) == heads and "```\nThought: ...\nAction: ...\n```" in asked and asked.endswith("## User Instruction\n{goal}")
  assert (usual == asked) == (family == "qwen2_5_vl")
  if family == "qwen2_5_vl":  # 120 x 90 becomes 112 x 84: multiples of 28
    assert "pixels of the screenshot, which is 112 wide and 84 high" in usual
  for plain in (told("phone"), told("desktop", instruction="plain")):
    assert sections(plain) == [h for h in heads if h != "Note"] and "```" not in plain


# -- the numbers of a tower that cannot be


def tower(family, **changed):
  return json.loads((tiny_checkpoints.GOLDEN / family / "config.json").read_text())["vision_config"] | changed


EITHER = [
  ({"depth": "x"}, "depth is 'x', wanted a whole number of 1 or more"),
  ({"spatial_merge_size": 0}, "spatial_merge_size is 0, wanted a whole number of 1 or more"),
  ({"num_heads": 0}, "num_heads is 0, wanted a whole number of 1 or more"),
  ({"num_heads": 5}, "num_heads is 5 of hidden_size 24, wanted as many as leave each a multiple of 4 numbers"),
  ({"num_heads": 4}, "num_heads is 4 of hidden_size 24, wanted as many as leave each a multiple of 4 numbers"),  # 6: no pairs of two axes
]
IMPOSSIBLE = [
  *((family, *case) for family in FAMILIES for case in EITHER),
  ("qwen2_5_vl", {"window_size": "x"}, "window_size is 'x', wanted a whole number of 1 or more"),
  ("qwen2_5_vl", {"window_size": 0}, "window_size is 0, wanted a whole number of 1 or more"),
  ("qwen2_5_vl", {"window_size": 27}, "window_size is 27, wanted 28 pixels or more: spatial_merge_size x patch_size"),
  ("qwen2_5_vl", {"fullatt_block_indexes": None}, "fullatt_block_indexes, and no default is assumed"),
  ("qwen2_5_vl", {"fullatt_block_indexes": [0, 3]}, "fullatt_block_indexes is [0, 3], wanted a list of block numbers, each from 0 to 2"),
  ("qwen2_5_vl", {"fullatt_block_indexes": 2}, "fullatt_block_indexes is 2, wanted a list of block numbers"),
  ("qwen3_vl", {"deepstack_visual_indexes": [1, 0]}, "deepstack_visual_indexes is [1, 0], wanted one block or more, each after the last"),
  ("qwen3_vl", {"deepstack_visual_indexes": []}, "deepstack_visual_indexes is [], wanted one block or more"),
  ("qwen3_vl", {"deepstack_visual_indexes": [0, 3]}, "deepstack_visual_indexes is [0, 3], wanted a list of block numbers"),
  ("qwen3_vl", {"num_position_embeddings": 35}, "num_position_embeddings is 35, wanted a square"),
]


@pytest.mark.parametrize(("family", "changed", "line"), IMPOSSIBLE)
def test_a_tower_that_cannot_be_is_one_line_with_the_file_and_the_field(family, changed, line):
  config = FAMILIES[family].TOWER.config
  config(tower(family), "here/config.json")
  with pytest.raises(ValueError) as e:
    config(tower(family, **changed), "here/config.json")
  said = str(e.value)
  assert said.startswith(("here/config.json: vision_config.", "here/config.json lacks vision_config.")) and line in said
  assert "\n" not in said


def test_more_deepstack_than_layers_of_the_decoder(tmp_path):
  folder = pathlib.Path(tiny_checkpoints.folder(tmp_path / "ck", "qwen3_vl"))
  config = json.loads((folder / "config.json").read_text())
  config["vision_config"]["deepstack_visual_indexes"] = [0, 1, 2]
  (folder / "config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match="deepstack_visual_indexes names 3 blocks, .* the decoder: it has 2"):
    vision_language.read_config(str(folder), qwen3_vl.TOWER)


# -- the real sizes


CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
QWEN3_ROPE = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
ROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}
QWEN25 = dict(
  model_type="qwen2_5_vl", rms_norm_eps=1e-6, max_position_embeddings=128_000, rope_theta=1e6, rope_scaling=ROPE, image_token_id=151655
)
QWEN25_VISION = dict(depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420, patch_size=14, spatial_merge_size=2,
                     temporal_patch_size=2, window_size=112, fullatt_block_indexes=[7, 15, 23, 31])  # fmt: skip
QWEN3 = dict(model_type="qwen3_vl", rms_norm_eps=1e-6, max_position_embeddings=262_144, vocab_size=151936, num_key_value_heads=8,
             head_dim=128, rope_theta=5e6, rope_scaling=QWEN3_ROPE, image_token_id=151655)  # fmt: skip
QWEN3_VISION = dict(num_heads=16, patch_size=16, spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=2304)


def text(base, width, layers, heads, mlp, **more):
  return base | dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=mlp) | more


REAL = {  # billions of parameters in all and of the tower, counted in transformers' own models on a meta device
  "Qwen2.5-VL-3B": (
    text(QWEN25, 2048, 36, 16, 11008, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True), QWEN25_VISION, 3.755, 0.669,
  ),
  "Qwen2.5-VL-7B": (text(QWEN25, 3584, 28, 28, 18944, num_key_value_heads=4, vocab_size=152064), QWEN25_VISION, 8.292, 0.677),
  "Qwen3-VL-2B": (
    text(QWEN3, 2048, 28, 16, 6144, tie_word_embeddings=True),
    QWEN3_VISION | dict(depth=24, hidden_size=1024, intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17]), 2.128, 0.407,
  ),
  "Qwen3-VL-4B": (
    text(QWEN3, 2560, 36, 32, 9728, tie_word_embeddings=True),
    QWEN3_VISION | dict(depth=24, hidden_size=1024, intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17]), 4.438, 0.415,
  ),
  "Qwen3-VL-8B": (
    text(QWEN3, 4096, 36, 32, 12288),
    QWEN3_VISION | dict(depth=27, hidden_size=1152, intermediate_size=4304, deepstack_visual_indexes=[8, 16, 24]), 8.767, 0.576,
  ),
}  # fmt: skip


def real(name):
  raw, tower_raw, _, _ = REAL[name]
  tower_raw = tower_raw | {"out_hidden_size": raw["hidden_size"]}
  tower = FAMILIES[raw["model_type"]].TOWER
  spec = ImageSpec(tower_raw["patch_size"], 2, 78_400, 2_116_800, *CLIP)
  return VLConfig(ModelConfig.from_dict(raw | {"vision_config": tower_raw}), tower.config(tower_raw), spec, tower)


@pytest.mark.parametrize("name", sorted(REAL))
def test_parameters_of_the_published_sizes(name):
  count = lambda tree: sum(np.prod(leaf.shape, dtype=float) for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Leaf))) / 1e9
  tree = vision_language.leaves(real(name))
  assert round(count(tree), 3) == REAL[name][2] and round(count(tree["visual"]), 3) == REAL[name][3]


def shapes(jaxpr, found):
  """Every array of a program and of the programs inside it."""
  for eqn in jaxpr.eqns:
    found.update(v.aval.shape for v in [*eqn.invars, *eqn.outvars] if hasattr(v.aval, "shape"))
    for param in eqn.params.values():
      for inner in param if isinstance(param, tuple | list) else [param]:
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          shapes(inner, found)
  return found


@pytest.mark.parametrize("what", ["score", "train"])
def uitars(path, length, actions):
  """The policy of a UI-TARS-1.5-7B on a 1080p desktop as a run makes it, from a folder with the real sizes and no weights."""
  folder = pathlib.Path(tiny_checkpoints.folder(path, "qwen2_5_vl"))
  raw, tower_raw, _, _ = REAL["Qwen2.5-VL-7B"]
  image = json.loads((folder / "config.json").read_text())["image_token_id"]  # the little tokenizer's
  raw = raw | {"vision_config": tower_raw | {"out_hidden_size": raw["hidden_size"]}, "image_token_id": image}
  (folder / "config.json").write_text(json.dumps(raw))
  cfg = knobs(folder, max_prompt=length - actions, max_action=actions, max_pixels=2_116_800, dtype="bfloat16", remat="full")
  return qwen2_5_vl.make(cfg, str(folder), "desktop", (1920, 1080))


@pytest.mark.parametrize("what", ["score", "update"])
def test_no_array_is_as_large_as_the_full_logits(what, tmp_path):
  """The learner's own two functions, ARPO's loss and AdamW over float32 copies: one row of 65,536 tokens of a 7B policy with 15 screenshots
  of 1080p, 8,192 of them action tokens. Full logits would be 37 GiB of float32, those of the action tokens 4.6. The vocabulary is a side
  of the head, the embedding and a chunk of 1024 tokens only."""
  length, count, actions = 65_536, 15, 8192
  policy = uitars(tmp_path / "ck", length, actions)
  assert policy.tokens_per_image == 2691  # 1932 x 1092 pixels, 28 x 28 a token
  of = lambda kind, *size: jax.ShapeDtypeStruct(size, np.dtype(kind))
  row = {name: of("f4", 1, length) for name in ("behaviour_logp", "advantage")} | {"is_action": of("?", 1, length)}
  row |= {name: of("i4", 1, length) for name in ("tokens", "segment_ids", "episode_id", "step_id", "version", "image_slot")}
  batch = Batch(
    **row, positions=of("i4", 3, 1, length), images=of("u1", count, 4 * 2691, 3 * 14 * 14), episode_valid=of("?", 1), now=of("i4"),
    num_episodes=1, num_steps=count, row_actions=actions,
  )  # fmt: skip
  score = make_score(policy)
  params = decoder.abstract(vision_language.leaves(policy.prompt.args[0].cfg), jnp.bfloat16)
  if what == "score":
    program = jax.make_jaxpr(score)(params, None, batch)
  else:
    loss = arpo.make(arpo.defaults()).phases[0].loss
    optimiser = make_optimiser(types.SimpleNamespace(lr=1e-6, warmup=5, weight_decay=0.0), 1.0, None, master=True)[0]
    state = jax.eval_shape(lambda params: TrainState.create(params, optimiser), params)
    program = jax.make_jaxpr(make_update(score, loss, optimiser))(state, None, (batch,), None)
  found = shapes(program.jaxpr, collections.Counter())
  vocab, width, size = 152_064, 3584, lambda shape: np.prod(shape, dtype=float)
  assert max(map(size, found)) < length * vocab / 1.4  # what a training step keeps: the input of each layer and block, 12 GiB each
  assert max(size(s) for s in found if vocab in s) == width * vocab and (1, 1024, vocab) in found
  assert not [s for s in found if length in s and s.count(length) > 1]  # nor all scores of a row
