"""The sampler: what it writes comes from the distribution it says, whoever else is in the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.state import Weights
from rollout.sampler import Sampler

pytestmark = pytest.mark.usefixtures("compile_quickly")
GOALS = ["red mug", "open the red mug", "mug", "the mug", "red", "open mug"]


def keys(n, seed=0):
  return np.random.default_rng(seed).integers(0, 2**32, (n, 2), np.uint32)


@pytest.fixture(scope="module")
def prompts(tiny_policy, tiny_screen):
  return [tiny_policy.prompt(g, [tiny_screen(i)], "") for i, g in enumerate(GOALS)]


def sampler(policy, params, buckets=(8,), temperature=1.0, version=0):
  s = Sampler(policy, buckets, temperature)
  s.load(Weights(params, version))
  return s


@pytest.fixture(scope="module")
def plain(tiny_policy, tiny_params):
  return sampler(tiny_policy, tiny_params, (1, 8))


@pytest.fixture(scope="module")
def forward(tiny_policy):
  """forward(params, prompt, written) -> float32 logits that each written token was drawn from: the training path."""
  length = tiny_policy.max_prompt + tiny_policy.max_action

  @jax.jit
  def logits(params, tokens, positions, segment, images, slot):
    hidden = tiny_policy.forward(params, tokens, positions, segment, tiny_policy.encode_images(params, images), slot)
    return tiny_policy.logits(params, hidden)[0]

  def run(params, prompt, written):
    n, m = len(prompt.tokens), len(prompt.tokens) + len(written)
    tokens, positions, segment = (np.zeros((1, length), np.int32) for _ in range(3))
    slot = np.full((1, length), -1, np.int32)
    tokens[0, :m], segment[0, :m] = np.concatenate([prompt.tokens, written]), 1
    positions[0, :m] = np.concatenate([prompt.positions[0], prompt.next_position + np.arange(len(written))])
    slot[0, prompt.image_place[0] : n] = np.arange(tiny_policy.tokens_per_image)
    return np.asarray(logits(params, tokens, positions[None], segment, prompt.images, slot))[n - 1 : m - 1]

  return run


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_stored_numbers_are_those_of_the_training_path(tiny_policy, tiny_params, prompts, forward, temperature):
  """Log-probability and entropy of the tempered distribution, against a teacher-forced forward pass: 1e-5."""
  s = sampler(tiny_policy, tiny_params, temperature=temperature)
  for prompt, out in zip(prompts, s.act(prompts, keys(6))):
    logp = np.asarray(jax.nn.log_softmax(forward(tiny_params, prompt, out.tokens) / temperature))
    np.testing.assert_allclose(out.logp, logp[np.arange(len(out.tokens)), out.tokens], atol=1e-5)
    np.testing.assert_allclose(out.entropy, -(np.exp(logp) * logp).sum(-1), atol=1e-5)
    assert (out.logp <= 0).all() and out.logp.dtype == np.float32


def test_greedy_is_the_argmax_of_every_step(tiny_policy, tiny_params, prompts, forward):
  s = sampler(tiny_policy, tiny_params, temperature=0)
  for prompt, out in zip(prompts, s.act(prompts, keys(6))):
    assert out.tokens.tolist() == forward(tiny_params, prompt, out.tokens).argmax(-1).tolist()
  again = s.act(prompts, keys(6, seed=1))
  assert [o.tokens.tolist() for o in again] == [o.tokens.tolist() for o in s.act(prompts, keys(6, seed=2))]


def same(a, b):
  assert a.tokens.tolist() == b.tokens.tolist()
  np.testing.assert_allclose(a.logp, b.logp, atol=1e-6)


def test_a_result_does_not_depend_on_its_batch(plain, prompts):
  """Alone in a bucket of 1, in the middle of 6 in a bucket of 8, in another order, beyond the largest bucket: the same."""
  k = keys(6)
  together = plain.act(prompts, k)
  for i in range(6):
    same(plain.act([prompts[i]], k[i : i + 1])[0], together[i])
  order = [4, 2, 0, 5, 1, 3]
  for i, out in zip(order, plain.act([prompts[i] for i in order], k[order])):
    same(out, together[i])
  many = plain.act(prompts * 3, np.concatenate([k] * 3))
  assert len(many) == 18
  for i, out in enumerate(many):
    same(out, together[i % 6])
  assert len({tuple(o.tokens) for o in together}) == 6


def test_the_key_decides(plain, prompts):
  tries = plain.act([prompts[0]] * 8, keys(8))
  assert len({tuple(o.tokens) for o in tries}) == 8
  for a, b in zip(tries, plain.act([prompts[0]] * 8, keys(8))):
    same(a, b)


def test_an_action_ends_with_its_end_token_or_at_the_limit(plain, prompts, tiny_policy):
  before, outs = plain.tokens, []
  for seed in range(40):
    outs += plain.act(prompts, keys(6, seed))
  eos = tiny_policy.tokenizer.eos_id
  for out in outs:
    n = len(out.tokens)
    assert 1 <= n <= tiny_policy.max_action and len(out.logp) == len(out.entropy) == n
    assert eos not in out.tokens[:-1] and (out.tokens[-1] == eos or n == tiny_policy.max_action)
  assert plain.tokens - before == sum(len(o.tokens) for o in outs)
  assert {len(o.tokens) for o in outs} >= {1, tiny_policy.max_action}


def constant(policy, values):
  """The policy with one distribution everywhere: its logits are `values`, token 1 is the end token."""
  row = np.array(values, np.float32)
  return policy._replace(logits=lambda params, hidden: jnp.broadcast_to(row, (*hidden.shape[:-1], len(row))))


def test_temperature_by_hand(tiny_policy, tiny_params, prompts):
  """N8: logits [2, 0] at T = 0.5 are [4, 0]: token 0 has -log(1 + e^-4) = -0.01815, token 1 has -4.01815; at T = 1
  -0.12693 and -2.12693."""
  policy = constant(tiny_policy, [2.0, 0.0])
  for temperature, want in ((0.5, [-0.01815, -4.01815]), (1.0, [-0.12693, -2.12693])):
    s, seen = sampler(policy, tiny_params, temperature=temperature), set()
    for seed in range(12):
      for out in s.act(prompts, keys(6, seed)):
        np.testing.assert_allclose(out.logp, np.array(want)[out.tokens], atol=1e-5)
        seen |= set(out.tokens.tolist())
    assert seen == {0, 1}


def test_tokens_come_with_the_stated_frequency(tiny_policy, tiny_params, prompts):
  """First tokens of 1024 tries with keys of their own: each share within 4 standard errors of softmax([1, 0, 2, -1, 0])."""
  values = np.array([1.0, 0.0, 2.0, -1.0, 0.0])
  p = np.exp(values) / np.exp(values).sum()
  outs = sampler(constant(tiny_policy, values), tiny_params, (512,)).act([prompts[0]] * 1024, keys(1024))
  share = np.bincount([o.tokens[0] for o in outs], minlength=5) / 1024
  assert (np.abs(share - p) < 4 * np.sqrt(p * (1 - p) / 1024)).all(), share
  second = np.array([o.tokens[1] for o in outs if len(o.tokens) > 1])  # another draw, not the first again
  first = np.array([o.tokens[0] for o in outs if len(o.tokens) > 1])
  assert abs((second == first).mean() - (p[[0, 2, 3, 4]] ** 2).sum() / (1 - p[1])) < 0.08


def test_versions_are_those_of_the_weights_that_wrote(tiny_policy, tiny_params, plain, prompts):
  plain.load(Weights(tiny_params, 7))
  assert {o.version for o in plain.act(prompts, keys(6))} == {7}
  other = jax.tree.map(lambda x: x * 1.5, tiny_params)
  seven = plain.act(prompts, keys(6))
  plain.load(Weights(other, 8))
  eight = plain.act(prompts, keys(6))
  assert {o.version for o in eight} == {8} and any(len(a.logp) != len(b.logp) or (a.logp != b.logp).any() for a, b in zip(seven, eight))
  plain.load(Weights(tiny_params, 0))


def test_weights_outlive_the_learners_buffers(tiny_policy, tiny_params, prompts):
  """K8: the learner donates the arrays it published; the sampler goes on with what it was given."""
  mine = jax.tree.map(jnp.copy, tiny_params)
  s = sampler(tiny_policy, mine)
  want = s.act(prompts, keys(6))
  jax.tree.map(lambda x: x.delete(), mine)
  for a, b in zip(want, s.act(prompts, keys(6))):
    same(a, b)


def test_what_it_refuses(tiny_policy, prompts):
  for temperature in (-1.0, float("nan"), float("inf")):
    with pytest.raises(ValueError, match="temperature is"):
      Sampler(tiny_policy, (8,), temperature)
  with pytest.raises(RuntimeError, match="call load before act"):
    Sampler(tiny_policy, (8,)).act(prompts, keys(6))


def test_nothing_to_do(plain):
  assert plain.act([], np.zeros((0, 2), np.uint32)) == []
