"""The decoder of Llama, SmolLM2, Qwen2 and Qwen3: transformers' numbers (tests/golden/text, made by tests/parity/test_text_models.py),
what must not matter (cache, chunks, packing, padding, neighbours, remat), and shortcuts that must be seen."""

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decoder, hf
from models.config import ModelConfig

pytestmark = pytest.mark.usefixtures("compile_quickly")
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "text"
NAMES = ("llama", "smollm2", "qwen2", "qwen3")
LENGTHS = (24, 17)
forward = jax.jit(decoder.forward, static_argnames=("cfg", "remat", "attention"))
prefill = jax.jit(decoder.prefill, static_argnames=("cfg", "attention"))
decode = jax.jit(decoder.decode_step, static_argnames=("cfg", "attention"), donate_argnames="cache")


@pytest.fixture(scope="module", params=NAMES)
def model(request):
  return opened(request.param)


@pytest.fixture(scope="module")
def qwen3():
  return opened("qwen3")


def opened(name):
  """(config, parameters in float32, what transformers says)."""
  cfg = ModelConfig.from_hf(GOLDEN / name)
  return cfg, hf.load(GOLDEN / name, decoder.leaves(cfg), dtype=jnp.float32), dict(np.load(GOLDEN / name / "expected.npz"))


def count(tokens):
  return np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), (1, *tokens.shape))


def logits_of(cfg, params, tokens, valid):
  return np.asarray(decoder.logits(params, forward(params, cfg, tokens, count(tokens), valid.astype(np.int32))))


def test_logits_are_those_of_transformers(model):
  cfg, params, want = model
  got = logits_of(cfg, params, want["tokens"], want["valid"])
  np.testing.assert_allclose(got * want["valid"][..., None], want["logits"], atol=1e-4, rtol=0)


SHORTCUTS = {  # models.md 1g: what ports leave out, and how far off the logits then are
  "no rope scaling": ("llama", {"llama3_rope": None}, None),
  "rope scaled everywhere": ("llama", {"llama3_rope": (8.0, 1e9, 2e9, 64.0)}, None),
  "wrong theta": ("qwen2", {"rope_theta": 1e4}, None),
  "no q and k norm": ("qwen3", {"qk_norm": False}, None),
  "missing bias": ("qwen2", {}, "k_proj"),
  "norms of 1": ("smollm2", {}, "norm"),
}


@pytest.mark.parametrize("shortcut", SHORTCUTS)
def test_a_shortcut_is_seen(shortcut):
  name, change, forgotten = SHORTCUTS[shortcut]
  cfg, params, want = opened(name)
  if forgotten == "k_proj":
    params["model"]["layers"]["self_attn"]["k_proj"].pop("bias")
  elif forgotten:
    params["model"]["norm"]["weight"] = jnp.ones_like(params["model"]["norm"]["weight"])
  got = logits_of(dataclasses.replace(cfg, **change), params, want["tokens"], want["valid"])
  assert np.abs(got - want["logits"])[want["valid"]].max() > 1e-2


def test_greedy_continuation_by_the_cache(model):
  """Two ragged rows are filled at once and go on as transformers does row by row; every decoded hidden state is the full forward's."""
  cfg, params, want = model
  cache = decoder.init_cache(cfg, 2, 40)
  hidden, cache = prefill(params, cfg, want["tokens"], count(want["tokens"]), want["valid"], cache)
  hidden = hidden[jnp.arange(2), jnp.array(LENGTHS) - 1]
  apart, written, seen = decoder.unstack(params), [], []
  for _ in range(want["greedy"].shape[1]):
    written.append(jnp.argmax(decoder.logits(params, hidden), -1).astype(jnp.int32))
    hidden, cache = decode(apart, cfg, written[-1], cache)
    seen.append(hidden)
  np.testing.assert_array_equal(np.stack(written, 1), want["greedy"])
  np.testing.assert_array_equal(cache.length, np.array(LENGTHS) + 12)
  for row, n in enumerate(LENGTHS):
    whole = np.concatenate([want["tokens"][row, :n], want["greedy"][row]])[None]
    full = forward(params, cfg, whole, count(whole), np.ones_like(whole))[0, n:]
    np.testing.assert_allclose(np.stack([s[row] for s in seen]), full, atol=2e-5)


def test_chunks_of_a_prefill_are_one_prefill(qwen3):
  """Row 0 in chunks of 10, 0 and 14, row 1 in 5, 12 and 0: a row without new tokens keeps its cache bit for bit."""
  cfg, params, want = qwen3
  once, filled = prefill(params, cfg, want["tokens"], count(want["tokens"]), want["valid"], decoder.init_cache(cfg, 2, 32))
  cache, at, seen = decoder.init_cache(cfg, 2, 32), np.zeros(2, int), [[], []]
  for sizes in ((10, 5), (0, 12), (14, 0)):
    tokens, positions, valid = np.zeros((2, 14), np.int32), np.zeros((1, 2, 14), np.int32), np.zeros((2, 14), bool)
    for row, size in enumerate(sizes):
      span = slice(at[row], at[row] + size)
      tokens[row, :size], positions[0, row, :size], valid[row, :size] = want["tokens"][row, span], np.arange(24)[span], True
    before = cache
    hidden, cache = prefill(params, cfg, tokens, positions, valid, cache)
    for row, size in enumerate(sizes):
      seen[row].append(hidden[row, :size])
      if not size:
        assert all((a[row] == b[row]).all() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(cache)))
    at += sizes
  for row, n in enumerate(LENGTHS):
    np.testing.assert_allclose(np.concatenate(seen[row]), once[row, :n], atol=2e-5)
    np.testing.assert_allclose(cache.k[1][row, :, :n], filled.k[1][row, :, :n], atol=2e-5)
  np.testing.assert_array_equal(cache.next_position, LENGTHS)


def test_what_lies_in_the_cache_beyond_a_row_is_never_read(qwen3):
  """A slot is handed on without being cleared: the last session's keys must not be seen."""
  cfg, params, want = qwen3
  fresh = decoder.init_cache(cfg, 2, 40)
  used = fresh._replace(k=tuple(a + 50.0 for a in fresh.k), v=tuple(a - 50.0 for a in fresh.v))
  args = (params, cfg, want["tokens"], count(want["tokens"]), want["valid"])
  clean, filled = prefill(*args, fresh)
  dirty, refilled = prefill(*args, used)
  np.testing.assert_allclose(np.asarray(dirty)[want["valid"]], np.asarray(clean)[want["valid"]], atol=1e-6)
  token = jnp.array([3, 5], jnp.int32)
  np.testing.assert_allclose(decode(params, cfg, token, refilled)[0], decode(params, cfg, token, filled)[0], atol=5e-6)


@pytest.mark.parametrize("sizes", [(25,), (7, 18)])
def test_tokens_written_in_turn_as_on_a_tpu_are_those_written_at_once(qwen3, sizes, monkeypatch):
  """Rows of 24 and 17 places, so that of the parts each row writes in one and nowhere in the others. The same numbers, bit for bit."""
  cfg, params, want = qwen3
  _, filled = prefill(params, cfg, want["tokens"], count(want["tokens"]), want["valid"], decoder.init_cache(cfg, 2, 40))
  cut = lambda a: jnp.split(a[:, :, : sum(sizes)], np.cumsum(sizes)[:-1], axis=2)
  parts = filled._replace(k=tuple(map(cut, filled.k)), v=tuple(map(cut, filled.v)))
  step = lambda: jax.jit(lambda *args: decoder.decode_step(params, cfg, *args))(jnp.array([3, 5], jnp.int32), parts)
  at_once = step()
  monkeypatch.setattr(decoder, "platform", lambda: "tpu")
  found = step()
  for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(at_once), strict=True):
    np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("sizes", [(25,), (7, 18), (16, 8, 16), (24, 16)])
def test_a_cache_in_parts_is_the_cache(qwen3, sizes):
  """Rows end in different parts (24 and 17 places), one of them where a part does."""
  cfg, params, want = qwen3
  args = (params, cfg, want["tokens"], count(want["tokens"]), want["valid"])
  once, filled = prefill(*args, decoder.init_cache(cfg, 2, 40))
  cut = lambda a: jnp.split(a[:, :, : sum(sizes)], np.cumsum(sizes)[:-1], axis=2)
  empty = decoder.init_cache(cfg, 2, 40)
  parts = empty._replace(k=tuple(map(cut, empty.k)), v=tuple(map(cut, empty.v)))
  hidden, parts = prefill(*args, parts)
  np.testing.assert_allclose(np.asarray(hidden)[want["valid"]], np.asarray(once)[want["valid"]], atol=2e-5)
  token = jnp.array([3, 5], jnp.int32)
  (hidden, parts), (want_hidden, filled) = decode(params, cfg, token, parts), decode(params, cfg, token, filled)
  np.testing.assert_allclose(hidden, want_hidden, atol=2e-5)
  for row, n in enumerate(LENGTHS):
    for mine, theirs in zip(parts.k + parts.v, filled.k + filled.v):
      np.testing.assert_allclose(jnp.concatenate(mine, axis=2)[row, :, : n + 1], theirs[row, :, : n + 1], atol=2e-5)


def test_an_inactive_row_is_left_as_it_was(qwen3):
  cfg, params, want = qwen3
  _, cache = prefill(params, cfg, want["tokens"], count(want["tokens"]), want["valid"], decoder.init_cache(cfg, 2, 32))
  kept = jax.tree.map(np.asarray, cache)
  _, after = decode(params, cfg, jnp.array([3, 5], jnp.int32), cache, jnp.array([False, True]))
  assert all((np.asarray(a)[0] == b[0]).all() for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(kept)))
  np.testing.assert_array_equal(after.length, [24, 18])
  assert (np.asarray(after.k[0])[1, :, 17] != kept.k[0][1, :, 17]).any()


def test_a_full_row_drops_what_is_more(qwen3):
  """The caller sees to sizes; a slip must not move another token's keys."""
  cfg, params, want = qwen3
  _, cache = prefill(params, cfg, want["tokens"], count(want["tokens"]), want["valid"], decoder.init_cache(cfg, 2, 24))
  kept = np.asarray(cache.k[2])
  _, after = decode(params, cfg, jnp.array([3, 5], jnp.int32), cache)
  np.testing.assert_array_equal(np.asarray(after.k[2])[0], kept[0])


def test_packed_rows_are_the_rows_apart_whatever_fills_the_padding(model):
  """Both rows in one of 41 tokens and 7 of padding; other ids in the padding change no bit."""
  cfg, params, want = model
  apart = forward(params, cfg, want["tokens"], count(want["tokens"]), want["valid"].astype(np.int32))
  line = lambda parts, fill: np.concatenate([*parts, np.full(7, fill)])[None].astype(np.int32)
  parts = [want["tokens"][i, :n] for i, n in enumerate(LENGTHS)]
  segments = line([np.full(24, 1), np.full(17, 2)], 0)
  positions = line([np.arange(24), np.arange(17)], 0)[None]
  together = forward(params, cfg, line(parts, 0), positions, segments)
  for i, (n, start) in enumerate(zip(LENGTHS, (0, 24))):
    np.testing.assert_allclose(together[0, start : start + n], apart[i, :n], atol=2e-5)
  other = forward(params, cfg, line(parts, 77), positions, segments)
  np.testing.assert_array_equal(other[0, :41], together[0, :41])


def test_remat_leaves_the_gradient(qwen3):
  cfg, params, want = qwen3

  def gradient(remat):
    hidden = lambda p: decoder.forward(p, cfg, want["tokens"], count(want["tokens"]), want["valid"].astype(np.int32), remat=remat)
    return jax.jit(jax.grad(lambda p: jnp.sin(hidden(p)).sum()))(params)

  plain = jax.tree.leaves(gradient("none"))
  for remat in decoder.REMAT[1:]:
    for a, b in zip(plain, jax.tree.leaves(gradient(remat))):
      np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.abs(a).max()), err_msg=remat)


def test_what_remat_makes_again(qwen3):
  """Counted by hand in a layer (the scan's body stands once): products q, k, v, o, gate, up, down, and attention's two. "dots" keeps those
  seven and makes attention's again, since their batch axes do not; "full" makes all again but down, whose result nothing reads."""
  cfg, params, want = qwen3

  def products(remat):
    hidden = lambda p: decoder.forward(p, cfg, want["tokens"], count(want["tokens"]), want["valid"].astype(np.int32), remat=remat)
    return str(jax.make_jaxpr(jax.grad(lambda p: jnp.sin(hidden(p)).sum()))(params)).count("dot_general[")

  assert {remat: products(remat) - products("none") for remat in ("dots", "full")} == {"dots": 2, "full": 8}


def test_unknown_names_are_one_line(qwen3):
  cfg, params, want = qwen3
  args = (params, cfg, want["tokens"], count(want["tokens"]), want["valid"].astype(np.int32))
  with pytest.raises(ValueError, match="remat 'half': there are none, dots, attention, full, offload"):
    decoder.forward(*args, remat="half")
  with pytest.raises(ValueError, match="attention 'flash': there are auto, naive, chunked, splash, cudnn"):
    decoder.forward(*args, attention="flash")
  with pytest.raises(ValueError, match=r"positions have shape \(3, 2, 24\), wanted \[1, B, T\] for qwen3"):
    decoder.forward(params, cfg, want["tokens"], np.zeros((3, 2, 24), np.int32), args[-1])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probabilities_from_chunks_are_those_of_the_whole_logits(qwen3, temperature):
  """Against numpy's log-softmax of all logits; NaN in hidden states that score nothing reaches neither value nor gradient."""
  cfg, params, want = qwen3
  rng = np.random.default_rng(0)
  mask = (rng.random((2, 24)) < 0.4) & want["valid"]
  mask[:, 0] = False
  hidden = np.array(forward(params, cfg, want["tokens"], count(want["tokens"]), want["valid"].astype(np.int32)))
  scaled = want["logits"].astype(np.float64) / temperature
  all_logp = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
  row, at = np.nonzero(mask)
  logp, entropy = np.zeros((2, 24)), np.zeros((2, 24))
  logp[row, at] = all_logp[row, at - 1, want["tokens"][row, at]]
  entropy[row, at] = -(np.exp(all_logp) * all_logp).sum(-1)[row, at - 1]
  scores_something = np.zeros((2, 24), bool)
  scores_something[row, at - 1] = True
  hidden[~scores_something] = np.nan

  def summed(hidden, chunk):
    found = decoder.token_logprobs(params, cfg, hidden, want["tokens"], mask, 20, chunk=chunk, temperature=temperature)
    return found[0].sum(), found

  for chunk in (6, 1024):
    (_, found), grad = jax.jit(jax.value_and_grad(summed, has_aux=True), static_argnums=1)(hidden, chunk)
    np.testing.assert_allclose(found[0], logp, atol=1e-4)
    np.testing.assert_allclose(found[1], entropy, atol=1e-4)
    assert np.isfinite(grad).all() and not np.asarray(grad)[~scores_something].any()


def test_no_array_of_the_size_of_all_logits_at_real_shapes():
  """Llama-3.1-8B, one row of 65,536 tokens of which 8,192 are actions: traced, never allocated. All logits would be 8.4e9 numbers."""
  cfg = ModelConfig(
    "llama", 128256, 4096, 32, 32, 8, 128, 14336, 1e-5, 5e5, 131072, False, llama3_rope=(8.0, 1.0, 4.0, 8192.0)
  )  # fmt: skip
  length = 65536
  params = decoder.abstract(decoder.leaves(cfg), jnp.bfloat16)
  assert sum(math.prod(x.shape) for x in jax.tree.leaves(params)) == 8_030_261_248  # the published count

  def loss(params, tokens, positions, segments, mask):
    hidden = decoder.forward(params, cfg, tokens, positions, segments, remat="full")
    return decoder.token_logprobs(params, cfg, hidden, tokens, mask, 8192)[0].sum()

  ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
  positions, mask = jax.ShapeDtypeStruct((1, 1, length), jnp.int32), jax.ShapeDtypeStruct((1, length), bool)
  traced = jax.make_jaxpr(jax.grad(loss))(params, ids, positions, ids, mask)
  found = list(shapes(traced.jaxpr))
  assert max(math.prod(s) for s in found if 128256 in s) == 128256 * 4096  # the head's gradient; a chunk's logits are 1024 x 128,256
  assert max(map(math.prod, found)) == 32 * length * 4096  # the inputs of 32 layers: no T x T scores either


def shapes(jaxpr):
  """Shapes of everything computed in a jaxpr and in those it calls."""
  for eqn in jaxpr.eqns:
    yield from (v.aval.shape for v in eqn.outvars if hasattr(v.aval, "shape"))
    for value in eqn.params.values():
      for inner in value if isinstance(value, tuple | list) else [value]:
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          yield from shapes(inner)
