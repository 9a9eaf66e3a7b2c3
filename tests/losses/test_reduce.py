"""Totals. Numbers from the lesson or by hand; each test says which."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.segments import Total
from losses.policy import clipped_loss
from losses.ratios import token_ratio
from losses.reduce import constant_norm, episode_mean, episode_sum_mean, micro_batch_mean, token_mean

# per token [[2, 4, 99], [6, -7, 5]], mask [[1, 1, 0], [1, 0, 0]], flat
X = np.array([2.0, 4.0, 99.0, 6.0, -7.0, 5.0])
MASK = np.array([1, 1, 0, 1, 0, 0])
EPISODE = np.array([0, 0, 0, 1, 1, 1])
REDUCTIONS = {
  "token_mean": lambda x, mask, episode, n: token_mean(x, mask),
  "episode_mean": episode_mean,
  "episode_sum_mean": episode_sum_mean,
  "constant_norm": lambda x, mask, episode, n: constant_norm(x, mask, 3.0 * n),
  "micro_batch_mean": lambda x, mask, episode, n: micro_batch_mean(x, mask),
}


def test_each_reduction_by_hand():
  # tokens 2 + 4 + 6 over 3; episodes (3 + 6) / 2; sums (6 + 6) / 2; 12 over 2 episodes x 3 tokens. Leaky: 36.33
  assert token_mean(X, MASK).mean() == 4.0
  assert episode_mean(X, MASK, EPISODE, 2).mean() == 4.5
  assert episode_sum_mean(X, MASK, EPISODE, 2).mean() == 6.0
  assert constant_norm(X, MASK, 6.0).mean() == 2.0


def test_a_mean_of_micro_batches_depends_on_the_cut_and_only_it_does():
  # tokens 2 and 4 | 6: (3 + 6) / 2 = 4.5, episode_mean's; 2 | 4 and 6: (2 + 5) / 2 = 3.5; uncut 4, token_mean's; nothing counted: 0 of 0
  cut = lambda at, reduce: sum((reduce(X[s], MASK[s]) for s in (slice(0, at), slice(at, 6))), Total(0.0, 0.0)).mean()
  assert [float(cut(at, micro_batch_mean)) for at in (3, 1)] == [4.5, 3.5]
  assert [float(cut(at, token_mean)) for at in (3, 1)] == [4.0, 4.0] == [float(micro_batch_mean(X, MASK).mean())] * 2
  nothing = micro_batch_mean(np.full(3, np.nan), np.zeros(3))
  assert (nothing.sum, nothing.count) == (0.0, 0.0) and float(cut(4, micro_batch_mean)) == 4.0


def test_chapter5_long_episodes_get_quiet_pushes():
  # a pass of 100 tokens pushed by +1 and a looping fail of 1,000 pushed by -1: what one token of each weighs
  episode = np.repeat([0, 1], [100, 1000])
  mask, push = np.ones(1100), np.where(episode == 0, 1.0, -1.0)
  weigh = lambda reduce: np.asarray(jax.grad(lambda x: reduce(x).mean())(jnp.array(push)))
  by_episode = weigh(lambda x: episode_mean(x, mask, episode, 2))
  np.testing.assert_allclose(by_episode[[0, 100]], [0.005, 0.0005], rtol=1e-5)
  by_token = weigh(lambda x: token_mean(x, mask))
  np.testing.assert_allclose(by_token, np.full(1100, 0.00091), atol=5e-6)
  assert by_token[100:].sum() == pytest.approx(0.91, abs=5e-3)  # the long fail carries 91% of the push


def test_chapter1_masked_loss_of_a_group():
  # the lesson's -(adv * mask * logp).sum() / mask.sum(): same gradient as the clipped loss with unchanged weights
  push, mask = np.repeat([1.73, -0.58], 3), np.array([1, 1, 0, 1, 0, 0])
  logp = jnp.linspace(-2.0, -0.1, 6)
  lesson = jax.grad(lambda x: -(push * mask * x).sum() / mask.sum())(logp)
  ours = jax.grad(lambda x: token_mean(clipped_loss(token_ratio(x, logp, mask), push)[0], mask).mean())(logp)
  np.testing.assert_allclose(ours, lesson, atol=1e-6)


def test_truncation_changes_the_mask_and_so_the_count():
  # 40 agent tokens, 10 of them masked as truncated, each loss 1: 1.0, not 0.75
  mask = np.arange(40) < 30
  assert token_mean(np.ones(40), mask).mean() == 1.0


def test_rejection_keeps_the_count():
  # the same 10 tokens rejected by a weight 0 inside x: 30 / 40, so the kept tokens are not pushed harder
  weight = (np.arange(40) < 30).astype(np.float32)
  total = token_mean(np.ones(40) * weight, np.ones(40))
  assert total.count == 40 and total.mean() == 0.75


def test_a_fully_masked_episode_leaves_the_mean_over_episodes():
  mask = np.array([1, 1, 0, 0, 0, 0])
  assert episode_mean(X, mask, EPISODE, 4).mean() == 3.0  # (2 + 4) / 2, one episode; 0.75 if all four ids counted
  assert episode_sum_mean(X, mask, EPISODE, 4).mean() == 6.0
  assert episode_mean(X, mask, EPISODE, 4).count == 1.0


@pytest.mark.parametrize("name", REDUCTIONS)
def test_nothing_left_is_zero_with_zero_gradient(name):
  x = jnp.array([1.0, jnp.inf, -jnp.inf, jnp.nan, 1e30, 2.0])
  value, grad = jax.value_and_grad(lambda x: REDUCTIONS[name](x, np.zeros(6), EPISODE, 2).mean())(x)
  assert value == 0.0 and grad.tolist() == [0.0] * 6


@pytest.mark.parametrize("poison", [np.nan, 1e30, -np.inf])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_poison_at_masked_places(name, poison):
  run = jax.value_and_grad(lambda x: REDUCTIONS[name](x, MASK, EPISODE, 2).mean())
  clean, dirty = run(jnp.array(X)), run(jnp.where(MASK, X, poison))
  assert clean[0] == dirty[0] and np.array_equal(clean[1], dirty[1])
  assert dirty[1][jnp.array([2, 4, 5])].tolist() == [0, 0, 0]


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("name", [n for n in REDUCTIONS if n != "micro_batch_mean"])  # that one is meant to change
def test_micro_batches_change_nothing(name, parts):
  # 10 episodes of 1 to 10 tokens, whole episodes per micro-batch
  rng = np.random.default_rng(0)
  lengths = np.arange(1, 11)
  x, mask = rng.normal(size=55), rng.random(55) < 0.8
  pieces = np.array_split(np.arange(10), parts)
  episode = np.repeat(np.arange(10), lengths)
  whole = REDUCTIONS[name](x, mask, episode, 10)
  total = 0
  for piece in pieces:
    here = np.isin(episode, piece)
    total = total + REDUCTIONS[name](x[here], mask[here], episode[here] - piece[0], len(piece))
  np.testing.assert_allclose(total.mean(), whole.mean(), rtol=1e-5)
  np.testing.assert_allclose(total.count, whole.count)


def test_a_mean_of_micro_batch_means_would_be_another_number():
  # by hand: tokens 2, 4, 6 in one micro-batch and 8 in another: 20 / 4 = 5, where the mean of 4 and 8 is 6
  parts = token_mean(np.array([2.0, 4.0, 6.0]), np.ones(3)), token_mean(np.array([8.0, 99.0, 99.0]), np.array([1, 0, 0]))
  assert (parts[0] + parts[1]).mean() == 5.0
  assert (parts[0].mean() + parts[1].mean()) / 2 == 6.0


@pytest.mark.parametrize("function", [episode_mean, episode_sum_mean])
def test_an_episode_may_be_spread_over_micro_batches(function):
  # by hand: episode 0 = (1, 2, 6), episode 1 = (10,); cut after two tokens. Means 3 and 10: 6.5; sums 9 and 10: 9.5
  x, episode = np.array([1.0, 2.0, 6.0, 10.0]), np.array([0, 0, 0, 1])
  tokens = np.array([3, 1, 0])
  parts = [function(x[k], np.ones(2), episode[k], 3, tokens_E=tokens) for k in (slice(0, 2), slice(2, 4))]
  total = parts[0] + parts[1]
  assert float(total.mean()) == pytest.approx({"episode_mean": 6.5, "episode_sum_mean": 9.5}[function.__name__], rel=1e-6)
  assert float(total.count) == pytest.approx(2.0)


def test_equal_lengths_make_token_and_episode_means_equal():
  x = np.arange(6.0)
  assert token_mean(x, np.ones(6)).mean() == episode_mean(x, np.ones(6), EPISODE, 2).mean() == 2.5


def test_episode_arrays_take_token_mean_with_an_episode_mask():
  # a per-episode loss (GSPO): padding episodes leave sum and count
  assert token_mean(np.array([1.0, 3.0, np.nan]), np.array([True, True, False])).mean() == 2.0


def test_entropy_ignores_what_the_loss_ignores():
  # logits [0, 0] and [9, 0], the second masked: ln 2; the unmasked mean would be about 0.347
  logp = jax.nn.log_softmax(jnp.array([[0.0, 0.0], [9.0, 0.0]]))
  entropy = -(jnp.exp(logp) * logp).sum(-1)
  assert float(token_mean(entropy, np.array([1, 0])).mean()) == pytest.approx(0.6931, abs=5e-5)
  padded = jnp.append(entropy, jnp.full(50, -1.0))
  assert float(token_mean(padded, np.arange(52) < 1).mean()) == pytest.approx(0.6931, abs=5e-5)


def test_clipped_share_is_a_token_mean_of_booleans():
  assert float(token_mean(np.array([True, False, True, True]), np.array([1, 1, 1, 0])).mean()) == pytest.approx(2 / 3)


def test_jit_vmap_and_dtype():
  half = jnp.array(X, jnp.bfloat16)
  for name, reduce in REDUCTIONS.items():
    run = lambda x, f=reduce: f(x, MASK, EPISODE, 2)
    assert run(half).sum.dtype == run(half).count.dtype == jnp.float32, name
    np.testing.assert_allclose(jax.jit(jax.vmap(run))(np.stack([X, 2 * X])).mean(), run(X).mean() * np.array([1, 2]), rtol=1e-6)


def test_errors_name_both_lengths():
  with pytest.raises(ValueError, match="x_N has length 6 but mask_N has length 1"):
    token_mean(X, np.ones(1))
  with pytest.raises(ValueError, match="tokens_E has length 3"):
    episode_mean(X, MASK, EPISODE, 2, tokens_E=np.ones(3))
  with pytest.raises(ValueError, match="rank 1"):
    token_mean(np.ones((2, 3)), np.ones((2, 3)))
  with pytest.raises(ValueError, match="constant is 0"):
    constant_norm(X, MASK, 0)
