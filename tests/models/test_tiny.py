"""The tiny policy. Expected values come from NumPy written out below, or from a second way through the same weights."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs.sim as sim
from envs.sim.base import COMPUTERS
from models import tiny
from models.tiny import Tokenizer

pytestmark = pytest.mark.usefixtures("compile_quickly")
TEXTS = ["red mug", "open the red mug", "mug", "the mug"]  # 2, 4, 3 and 4 tokens: ragged on purpose


# -- the tokenizer


def test_any_printable_text_survives_encode_and_decode(tiny_policy):
  rng = np.random.default_rng(0)
  characters = [chr(c) for c in range(32, 127)] + ["\n", "\t"]
  t = tiny_policy.tokenizer
  for size in [0, 1, 2, 5, 20, 200] * 10:
    text = "".join(rng.choice(characters, size=size))
    assert t.decode(t.encode(text)) == text
  for text in ("".join(characters), "<pad><eos><image>", "taptap(tap(0.500.5", "  open  the red mug "):
    assert t.decode(t.encode(text)) == text


def test_tokenizer_takes_the_longest_piece_first():
  t = Tokenizer(["ab", "abc", "cd"])
  words = lambda text: [t.pieces[i] for i in t.encode(text)]
  assert words("abcd") == ["abc", "d"]
  assert words("abxcd") == ["ab", "x", "cd"]
  assert (t.pad_id, t.eos_id, t.image_id) == (0, 1, 2) and t.vocab_size == len(t.pieces) == 3 + 97 + 3


def test_typed_names_of_special_tokens_are_plain_text(tiny_policy):
  """A goal that says "<eos>" must not end anything."""
  assert min(tiny_policy.tokenizer.encode("<pad> <eos> <image>")) > 2


def test_stray_special_tokens_do_not_pass_for_clean_text(tiny_policy):
  t = tiny_policy.tokenizer
  assert t.decode([*t.encode("wait()"), t.eos_id]) == "wait()"
  for stray in (t.pad_id, t.image_id):
    assert t.decode([*t.encode("wait"), stray, *t.encode("()"), t.eos_id]) not in ("wait()", "wait", "()")


def test_unknown_characters_are_named():
  with pytest.raises(ValueError, match="'é' at 3 of 'café'"):
    Tokenizer([]).encode("café")


@pytest.mark.parametrize("computer", ["sim/phone", "sim/desktop"])
def test_every_goal_and_demonstrated_action_fits_the_default_policy(computer):
  pieces, size = sim.vocabulary(computer)
  cfg, t = tiny.defaults(), Tokenizer(pieces)
  module = COMPUTERS[computer][0]
  for family, combos in module.families().items():
    for i, params in enumerate(combos):
      goal = module.goal(family, params, i)
      ids = t.encode(goal)
      assert t.decode(ids) == goal and len(ids) <= cfg.max_goal, goal
  for text in {s.text for e in sim.demonstrations(computer, 60, seed=1) for s in e.steps}:
    ids = t.encode(text)
    assert t.decode(ids) == text and len(ids) + 1 <= cfg.max_action, text
  assert tiny.make(cfg, pieces, size).tokenizer.vocab_size == t.vocab_size


# -- prompts


def test_prompt_layout_by_hand(tiny_policy, tiny_screen):
  """"open ", "the ", "red", " mug", then 6 image tokens that share the position after the longest goal (6), then the action at 7."""
  shown = tiny_screen(1)
  p = tiny_policy.prompt("open the red mug", [tiny_screen(0), shown], "text it does not read")
  names = [tiny_policy.tokenizer.pieces[i] for i in p.tokens]
  assert names == ["open ", "the ", "red", " mug"] + ["<image>"] * 6
  assert p.positions.tolist() == [[0, 1, 2, 3] + [6] * 6] and p.next_position == 7
  assert p.image_place.tolist() == [4] and np.array_equal(p.images, shown[None])  # the newest screen


def test_stored_records_get_the_positions_they_were_sampled_at(tiny_policy, tiny_screen):
  from rollout.sampler import Sampled
  from rollout.turn import make_record

  for goal in TEXTS:
    p = tiny_policy.prompt(goal, [tiny_screen()], "")
    record = make_record(p, Sampled(np.arange(3, dtype=np.int32), np.zeros(3), np.zeros(3), 0), 0)
    written = p.next_position + np.arange(3)
    assert tiny_policy.positions(record).tolist() == [p.positions[0].tolist() + written.tolist()]


def test_what_does_not_fit_is_refused_in_one_line(tiny_policy, tiny_screen, tiny_with):
  with pytest.raises(ValueError, match="has 7 tokens, the tiny policy takes 6: raise policy.tiny.max_goal"):
    tiny_policy.prompt("redredredredredredred", [tiny_screen()], "")
  with pytest.raises(ValueError, match=r"uint8 \(23, 40, 3\), the policy was made for uint8 \(24, 40, 3\)"):
    tiny_policy.prompt("red", [tiny_screen()[1:]], "")
  with pytest.raises(ValueError, match="screenshot is float32"):
    tiny_policy.prompt("red", [tiny_screen().astype(np.float32)], "")
  with pytest.raises(ValueError, match="policy.tiny.patch is 16: the screen of 40 x 24"):
    tiny_with(patch=16)
  with pytest.raises(ValueError, match="policy.tiny.heads is 3: the width of 16"):
    tiny_with(heads=3)


# -- the parameters


def test_parameters_are_named_as_in_a_checkpoint_and_drawn_from_the_key(tiny_policy, tiny_params):
  assert set(tiny_params) == {"visual", "embed_tokens", "embed_positions", "norm", "layers"} and set(tiny_params["layers"]) == {"0", "1"}
  assert tiny_params["embed_tokens"].shape == (tiny_policy.tokenizer.vocab_size, 16)
  assert tiny_params["layers"]["1"]["qkv_proj"].shape == (48, 16)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(tiny_params))
  init = jax.jit(tiny_policy.init)  # twice by one program: another test's module may have had tiny_params made with XLA's optimiser off
  params, same, other = (init(jax.random.key(seed)) for seed in (0, 0, 1))
  assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), params, same))
  drawn = lambda p: p["layers"]["0"]["up_proj"]
  assert not (drawn(params) == drawn(other)).any()
  assert not (drawn(params) == params["layers"]["1"]["up_proj"]).any()


# -- images


def encode_by_hand(params, image, window, stride, down, across):
  """One image, window by window, in NumPy."""
  v = jax.tree.map(np.asarray, params["visual"])
  rows, cols, width = v["patch_pos"].shape
  grid = np.zeros((rows + 9, cols + 9, width))  # zeros beyond the edge
  for r, c in itertools.product(range(rows), range(cols)):
    pixels = image[8 * r : 8 * r + 8, 8 * c : 8 * c + 8].reshape(-1) / 128.0 - 1.0
    grid[r, c] = np.maximum(v["patch_embed"] @ pixels + v["patch_pos"][r, c], 0)
  out = []
  for r, c in itertools.product(range(down), range(across)):
    seen = grid[r * stride : r * stride + window, c * stride : c * stride + window].reshape(-1)
    out.append(v["merge_out"] @ np.maximum(v["merge_in"] @ seen, 0) + v["pos"][len(out)])
  return np.array(out)


@pytest.mark.parametrize("window, stride, down, across", [(2, 2, 2, 3), (3, 2, 1, 2), (4, 4, 1, 2)])
def test_image_tokens_against_numpy(tiny_with, tiny_screen, window, stride, down, across):
  policy = tiny_with(window=window, stride=stride)
  rng = np.random.default_rng(3)
  params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) * 0.2, jax.eval_shape(policy.init, jax.random.key(0)))
  images = np.stack([tiny_screen(1), tiny_screen(2)])
  got = jax.jit(policy.encode_images)(params, images)
  assert policy.tokens_per_image == down * across and got.shape == (2 * down * across, 16)
  want = np.concatenate([encode_by_hand(params, i, window, stride, down, across) for i in images])
  np.testing.assert_allclose(got, want, atol=2e-5)


# -- one path for sampling and training


@functools.cache
def jitted(policy):
  return jax.jit(policy.forward), jax.jit(policy.prefill), jax.jit(policy.decode_step), jax.jit(policy.encode_images)


def contexts(policy, params, tiny_screen, actions=4):
  """Ragged contexts: for each goal a prompt, some action tokens and the features of its own screenshot."""
  rng, out = np.random.default_rng(1), []
  for i, goal in enumerate(TEXTS):
    p = policy.prompt(goal, [tiny_screen(i)], "")
    written = rng.integers(3, policy.tokenizer.vocab_size, actions).astype(np.int32)
    out.append((p, written, jitted(policy)[3](params, p.images)))
  return out


def row_of(policy, p, written, length=None, slot=0):
  """(tokens, positions, segment, image_slot) of one context, padded to `length`."""
  n, m = len(p.tokens), len(p.tokens) + len(written)
  length = length or m
  tokens, positions, segment = np.zeros(length, np.int32), np.zeros(length, np.int32), np.zeros(length, np.int32)
  tokens[:m], segment[:m] = np.concatenate([p.tokens, written]), 1
  positions[:m] = np.concatenate([p.positions[0], p.next_position + np.arange(len(written))])
  slots = np.full(length, -1, np.int32)
  slots[p.image_place[0] : n] = slot * policy.tokens_per_image + np.arange(policy.tokens_per_image)
  return tokens, positions, segment, slots


def full(policy, params, p, written, features, length=20):
  tokens, positions, segment, slots = row_of(policy, p, written, length)
  hidden = jitted(policy)[0](params, tokens[None], positions[None, None], segment[None], features, slots[None])
  return hidden[0, : len(p.tokens) + len(written)]


@pytest.fixture(scope="module")
def texts(tiny_policy, tiny_params, tiny_screen):
  return contexts(tiny_policy, tiny_params, tiny_screen)


@pytest.fixture(scope="module")
def hidden_alone(tiny_policy, tiny_params, texts):
  """Hidden states of each context in a row of its own."""
  return [np.asarray(full(tiny_policy, tiny_params, *c)) for c in texts]


def prefilled(policy, params, texts, cuts=()):
  """The prompts of all contexts through the cache, in chunks cut at `cuts`: (hidden at each prompt place, cache)."""
  size, length = len(texts), policy.max_prompt
  arrays = [np.stack(a) for a in zip(*(row_of(policy, p, [], length, slot=i) for i, (p, _, _) in enumerate(texts)))]
  tokens, positions, segment, slots = arrays
  features = jnp.concatenate([f for _, _, f in texts])
  cache, hidden = policy.init_cache(size, length + 5), []
  for start, end in itertools.pairwise((0, *cuts, length)):
    t, p, g, s = (a[:, start:end] for a in (tokens, positions, segment, slots))
    h, cache = jitted(policy)[1](params, t, p[None], g > 0, features, s, cache)
    hidden.append(h)
  return jnp.concatenate(hidden, axis=1), cache


def test_cached_decoding_sees_what_the_full_forward_sees(tiny_policy, tiny_params, texts, hidden_alone):
  hidden, cache = prefilled(tiny_policy, tiny_params, texts)
  for i, (p, _, _) in enumerate(texts):
    np.testing.assert_allclose(hidden[i, : len(p.tokens)], hidden_alone[i][: len(p.tokens)], atol=1e-5)
  logits = jax.jit(lambda h: jax.nn.log_softmax(tiny_policy.logits(tiny_params, h)))
  for t in range(4):
    token = np.array([w[t] for _, w, _ in texts])
    position = np.array([p.next_position + t for p, _, _ in texts])
    step, cache = jitted(tiny_policy)[2](tiny_params, token, position, cache)
    for i, (p, _, _) in enumerate(texts):
      want = hidden_alone[i][len(p.tokens) + t]
      np.testing.assert_allclose(logits(step[i]), logits(want), atol=1e-5)


@pytest.mark.parametrize("cuts", [(5,), (2, 3, 9)])
def test_prefill_in_chunks_is_one_prefill(tiny_policy, tiny_params, texts, cuts):
  whole, cache = prefilled(tiny_policy, tiny_params, texts)
  parts, other = prefilled(tiny_policy, tiny_params, texts, cuts)
  for i, (p, _, _) in enumerate(texts):
    np.testing.assert_allclose(parts[i, : len(p.tokens)], whole[i, : len(p.tokens)], atol=1e-5)
  assert int(cache["filled"]) == int(other["filled"]) == tiny_policy.max_prompt
  assert np.array_equal(cache["valid"], other["valid"])


def packed(policy, texts, order, length, slots):
  """Several contexts in one row: (tokens, positions, segment, image_slot), features at the given image slots."""
  rows, at = [np.zeros(length, np.int32) for _ in range(3)] + [np.full(length, -1, np.int32)], 0
  for segment, i in enumerate(order, start=1):
    p, written, _ = texts[i]
    parts = row_of(policy, p, written, slot=slots[i])
    n = len(parts[0])
    for row, part in zip(rows, parts):
      row[at : at + n] = part
    rows[2][at : at + n] = segment
    at += n
  return [r[None] for r in rows]


@pytest.mark.parametrize("order", [(0, 1, 2), (3, 1, 0, 2)])
def test_packed_contexts_do_not_see_each_other(tiny_policy, tiny_params, texts, hidden_alone, order):
  slots = [2, 0, 3, 1]  # features stand in another order than the contexts
  features = jnp.concatenate([texts[slots.index(s)][2] for s in range(4)])
  tokens, positions, segment, slot = packed(tiny_policy, texts, order, 64, slots)
  hidden = jitted(tiny_policy)[0](tiny_params, tokens, positions[None], segment, features, slot)[0]
  for number, i in enumerate(order, start=1):
    np.testing.assert_allclose(hidden[segment[0] == number], hidden_alone[i], atol=1e-5)


def test_garbage_in_masked_places_changes_nothing(tiny_policy, tiny_params, texts):
  """Other tokens and positions in the padding, NaN in features that no place refers to: the same bits, the same gradients."""
  tokens, positions, segment, slot = packed(tiny_policy, texts, (1, 0), 40, [1, 2, 0, 0])
  per, pad = tiny_policy.tokens_per_image, segment == 0
  clean = jnp.concatenate([jnp.zeros((per, 16)), texts[0][2], texts[1][2], jnp.zeros((per, 16))])
  mask = np.zeros_like(pad)
  mask[0, [12, 13, 25]] = True

  def loss(params, tokens, positions, features):
    hidden = tiny_policy.forward(params, tokens, positions[None], segment, features, slot)
    logp, entropy = tiny_policy.token_logprobs(params, hidden, tokens, mask, 4)
    return logp.sum() + entropy.sum(), (hidden, logp, entropy)

  run = jax.jit(jax.value_and_grad(loss, argnums=(0, 3), has_aux=True))
  (value, (hidden, *_)), (grads, pull) = run(tiny_params, tokens, positions, clean)
  dirty = clean.at[:per].set(jnp.nan).at[-per:].set(1e30)
  (value2, (hidden2, *_)), (grads2, pull2) = run(tiny_params, np.where(pad, 77, tokens), np.where(pad, 9, positions), dirty)
  assert value == value2 and np.isfinite(value)
  assert np.array_equal(hidden[~pad], hidden2[~pad])
  assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), grads, grads2))
  assert np.abs(pull[per:-per]).max() > 0
  assert not pull2[:per].any() and not pull2[-per:].any() and np.array_equal(pull, pull2)


# -- log-probabilities


@pytest.fixture(scope="module")
def head():
  """Random hidden states, tokens and a ragged mask: [6, 12, 16]; no mask place is a row's first."""
  rng = np.random.default_rng(5)
  mask = rng.random((6, 12)) < 0.4
  mask[:, 0] = mask[2] = False
  return rng.normal(size=(6, 12, 16)).astype(np.float32) * 3, rng.integers(0, 100, (6, 12)).astype(np.int32), mask


@functools.cache
def score(policy):
  return jax.jit(functools.partial(policy.token_logprobs, most=12))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_against_a_full_softmax(tiny_policy, tiny_params, head, temperature):
  """Entry t scores token t from hidden t-1 (NumPy, float64), logits over the temperature; masked entries are 0."""
  hidden, tokens, mask = head
  logits = (hidden @ np.asarray(tiny_params["embed_tokens"]).T).astype(np.float64) * 0.5 / temperature
  logp = logits - logits.max(-1, keepdims=True)
  logp = logp - np.log(np.exp(logp).sum(-1, keepdims=True))
  want, spread = np.zeros(mask.shape), np.zeros(mask.shape)
  for b, t in zip(*mask.nonzero()):
    want[b, t] = logp[b, t - 1, tokens[b, t]]
    spread[b, t] = -(np.exp(logp[b, t - 1]) * logp[b, t - 1]).sum()
  scored = score(tiny_policy) if temperature == 1.0 else functools.partial(tiny_policy.token_logprobs, most=12, temperature=temperature)
  got, entropy = scored(tiny_params, hidden, tokens, mask)
  np.testing.assert_allclose(got, want, atol=1e-5)
  np.testing.assert_allclose(entropy, spread, atol=1e-5)
  assert got.dtype == entropy.dtype == jnp.float32
  assert (got <= 0).all() and (entropy >= 0).all() and (entropy[mask] > 0).all()


@pytest.mark.parametrize("most, chunk", [(8, 65536), (12, 12), (8, 20)])
def test_how_the_head_is_cut_changes_nothing(tiny_policy, tiny_params, head, most, chunk):
  hidden, tokens, mask = head
  assert mask.sum(1).max() <= 8

  def loss(params, hidden, most, chunk):
    logp, entropy = tiny_policy.token_logprobs(params, hidden, tokens, mask, most, chunk)
    return (logp * np.arange(12)).sum() + entropy.sum(), (logp, entropy)

  run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=(2, 3))
  (_, want), (grads, pull) = run(tiny_params, hidden, 12, 65536)
  (_, got), (grads2, pull2) = run(tiny_params, hidden, most, chunk)
  for a, b in zip(want, got):
    np.testing.assert_allclose(a, b, atol=1e-6)
  np.testing.assert_allclose(pull, pull2, atol=1e-5)
  np.testing.assert_allclose(grads["embed_tokens"], grads2["embed_tokens"], rtol=1e-4, atol=1e-4)


def test_log_probabilities_of_a_certain_policy_are_not_above_zero(tiny_policy, tiny_params, head):
  hidden, tokens, mask = head
  loud = tiny_params | {"embed_tokens": tiny_params["embed_tokens"] * 300}
  logp, entropy = score(tiny_policy)(loud, hidden, tokens, mask)
  assert (logp <= 0).all() and (entropy >= 0).all() and np.isfinite(logp).all()
  assert float(entropy[mask].min()) == 0.0  # some distribution is a single token to float32: its entropy is 0, not -0.0..1


def test_an_empty_mask_scores_nothing(tiny_policy, tiny_params, head):
  hidden, tokens, mask = head
  for array in score(tiny_policy)(tiny_params, hidden, tokens, np.zeros_like(mask)):
    assert not array.any()
