"""Generalised advantages over an episode's action tokens, by hand, and where they stand in its records."""

import math

import jax
import numpy as np
import pytest

from agents.values import PAD, gae_credit, token_credit
from core.schema import EpisodeScores

pytestmark = pytest.mark.usefixtures("compile_quickly")
logit = lambda v: math.log((1 + v) / (1 - v))  # of a value between -1 and 1: v = 2 sigmoid(x) - 1


def said(episode, values):
  """Scores in which the critic gives `values` before the episode's action tokens and nonsense everywhere else."""
  out, left = [], list(values)
  for r in episode.records:
    x = np.full(len(r), 88.0, np.float32)
    x[r.is_action] = [logit(left.pop(0)) for _ in range(int(r.is_action.sum()))]
    out.append({"value_logit": x})
  assert not left
  return EpisodeScores(out)


def test_pushes_and_targets_by_hand(episode):
  """Two steps of 3 prompt and 2 written tokens, values 0.1 0.2 | 0.3 0.4, reward 1 at the last token, lambda 0.9 from the back:
  1 - 0.4 = 0.6; 0.4 - 0.3 + 0.9 * 0.6 = 0.64; 0.1 + 0.9 * 0.64 = 0.676; 0.1 + 0.9 * 0.676 = 0.7084. Targets at lambda 1: all 1."""
  e = episode(1)
  (c,) = gae_credit([e], [said(e, [0.1, 0.2, 0.3, 0.4])], np.float32([0.9]), 1.0, -1.0, 1.0)
  np.testing.assert_allclose(c.token_advantage[0], [0, 0, 0, 0.7084, 0.676], atol=1e-6)
  np.testing.assert_allclose(c.token_advantage[1], [0, 0, 0, 0.64, 0.6], atol=1e-6)
  np.testing.assert_allclose(np.stack(c.token_return), [[0, 0, 0, 1, 1]] * 2, atol=1e-6)
  np.testing.assert_allclose(c.advantage, [(0.7084 + 0.676) / 2, 0.62], atol=1e-6)
  assert c.keep.tolist() == [True, True] and c.advantage.dtype == c.token_advantage[0].dtype == np.float32


def test_the_two_lambdas_are_apart(episode):
  """Policy at lambda 0: the one-step jumps 0.1, 0.1, 0.1, 0.6. Critic at 0.5: 0.6; 0.1 + 0.3 = 0.4; 0.3; 0.25; targets + value."""
  e = episode(1)
  (c,) = gae_credit([e], [said(e, [0.1, 0.2, 0.3, 0.4])], np.float32([0.0]), 0.5, -1.0, 1.0)
  np.testing.assert_allclose(np.concatenate([a[3:] for a in c.token_advantage]), [0.1, 0.1, 0.1, 0.6], atol=1e-6)
  np.testing.assert_allclose(np.concatenate([a[3:] for a in c.token_return]), [0.35, 0.5, 0.7, 1.0], atol=1e-6)


def test_bounds_of_the_critic(episode):
  """Logit 0 is the middle: 0 between -1 and 1, 0.5 between 0 and 1. A fail earns 0: pushes 0 - 0 and 0 - 0.5."""
  e = episode(0, steps=1, written=1)
  scores = [EpisodeScores([{"value_logit": np.zeros(4, np.float32)}])]
  for low, want in ((-1.0, 0.0), (0.0, -0.5)):
    assert gae_credit([e], scores, np.float32([1.0]), 1.0, low, 1.0)[0].token_advantage[0][3] == pytest.approx(want, abs=1e-6)


def test_episodes_do_not_reach_into_each_other(episode):
  """Alone or in company, in any order, with lambdas of their own: the same credit; an unreadable one earns -1 at its end only."""
  rng = np.random.default_rng(0)
  episodes = [episode(r, index=i, steps=s, written=w) for i, (r, s, w) in enumerate([(1, 2, 3), (-1, 1, 2), (0, 4, 1)])]
  scores = [said(e, rng.uniform(-0.8, 0.8, e.action_tokens)) for e in episodes]
  lam = np.float32([0.3, 0.6, 0.95])
  together = gae_credit(episodes, scores, lam, 0.8, -1.0, 1.0)
  back = gae_credit(episodes[::-1], scores[::-1], lam[::-1], 0.8, -1.0, 1.0)[::-1]
  for i, e in enumerate(episodes):
    (alone,) = gae_credit([e], [scores[i]], lam[i : i + 1], 0.8, -1.0, 1.0)
    for other in (together[i], back[i]):
      assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-6), vars(alone), vars(other)))
  last = together[1].token_return[0]
  assert last[-1] == pytest.approx(-1.0)  # the last token's target is the reward


def test_long_company_needs_more_than_one_pad(episode):
  """More tokens than one padded length: nothing is lost at the seam."""
  episodes = [episode(1, index=i, steps=10, written=8) for i in range(8)]
  assert sum(e.action_tokens for e in episodes) > PAD
  credits = gae_credit(episodes, [said(e, [0.5] * 80) for e in episodes], np.ones(8, np.float32), 1.0, -1.0, 1.0)
  for c in credits:
    np.testing.assert_allclose(np.stack(c.token_advantage)[:, 3:], 0.5, atol=1e-5)


def test_numbers_are_laid_back_in_the_order_they_were_written(episode):
  """One record that holds two steps: each step's shown push is the mean of its own tokens."""
  e = episode(1)
  a, b = e.records
  join = lambda name: np.concatenate([getattr(a, name), getattr(b, name)])
  e.records = [type(a)(*[join(n) for n in ("tokens", "is_action", "logp", "version", "step", "image_place", "image_step")])]
  c = token_credit(e, np.float32([1, 2, 3, 5]), np.float32([9, 8, 7, 6]))
  assert c.token_advantage[0].tolist() == [0, 0, 0, 1, 2, 0, 0, 0, 3, 5] and c.token_return[0].tolist() == [0, 0, 0, 9, 8, 0, 0, 0, 7, 6]
  assert c.advantage.tolist() == [1.5, 4.0]


def test_a_score_that_does_not_fit_the_records_is_refused(episode):
  e = episode(1)
  with pytest.raises(ValueError):
    gae_credit([e], [EpisodeScores([{"value_logit": np.zeros(5, np.float32)}])], np.float32([1.0]), 1.0, -1.0, 1.0)
