"""The policy objective from its parts, worked by hand: surrogates, ratio units, averages, corrections and KL terms."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

from agents import grpo, gspo, objective, ppo, shaping
from core import learner as learner_lib
from core.pack import PackItem, arrange, number, shape_for, to_batch
from core.schema import EpisodeScores
from core.state import Batch, Scores, TrainState
from models import critic
from rollout.sampler import Sampled
from rollout.turn import make_record

pytestmark = pytest.mark.usefixtures("compile_quickly")
L15, L2 = math.log(1.5), math.log(2)


def config(**knobs):
  cfg = ml_collections.ConfigDict({"name": "some", "dual_clip": 3.0} | objective.defaults())
  cfg.update(knobs)
  return cfg


def run(cfg, ratios, advantage, episode=None, step=None, mask=None, old=None, ref=None, version=None, now=0):
  """(loss, gradient of the sum in each log-probability, total, metrics). The sampler found every token at log-probability -1, the
  policy at `ratios` times that; old, ref: chances of the learner at the update's start and of the reference, as ratios too."""
  n = len(ratios)
  row = lambda x, kind=np.float32: np.array([x], kind)
  logs = lambda x: row(-1.0 + np.log(x))
  episode = [0] * n if episode is None else episode
  batch = Batch(
    tokens=row([0] * n, np.int32), segment_ids=row([1] * n, np.int32), positions=None, episode_id=row(episode, np.int32),
    step_id=row(episode if step is None else step, np.int32), is_action=row([1] * n if mask is None else mask, bool),
    behaviour_logp=logs(np.ones(n)), version=row(version or [0] * n, np.int32), now=np.int32(now), advantage=row(advantage),
    image_slot=None, images=None, episode_valid=None,
    old_logp=logs(old if old is not None else np.ones(n)), ref_logp=logs(ref if ref is not None else np.ones(n)), num_episodes=8,
    num_steps=8, row_actions=n,
  )  # fmt: skip

  def loss(logp):
    total, metrics = objective.make_loss(cfg)(Scores(logp[None], jnp.full((1, n), 0.5)), batch)
    return total.sum, (total, metrics)

  (_, (total, metrics)), grad = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(logs(ratios)[0]))
  return float(total.mean()), np.asarray(grad), total, metrics


# -- surrogates. Four tokens of chance 1.5, 0.5, 1 and 2 times the sampler's e^-1, pushed up, up, down, down
FOUR = ([1.5, 0.5, 1.0, 2.0], [1.0, 1.0, -1.0, -1.0])


def test_clip():
  """1.5 up is held at 1.28; 0.5 up, 1 down and 2 down are free: -1.28 - 0.5 + 1 + 2 = 1.22 over 4 tokens."""
  value, grad, total, metrics = run(config(), *FOUR)
  assert value == pytest.approx(1.22 / 4) and total.count == 4 and metrics["policy/clipped_share"].mean() == 0.25
  np.testing.assert_allclose(grad, [0, -0.5, 1, 2], rtol=1e-5)
  assert metrics["policy/ratio_mean"].mean() == pytest.approx(5 / 4) and metrics["policy/entropy"].mean() == pytest.approx(0.5)


def test_cispo():
  """Weights 1.2 (capped), 0.5, 1, 1.2 (capped); loss -weight A log pi, gradient -weight A, the capped tokens' too."""
  value, grad, _, metrics = run(config(surrogate="cispo", clip_high=1.2), *FOUR)
  want = -1.2 * (L15 - 1) - 0.5 * (-L2 - 1) + 1.0 * (-1) + 1.2 * (L2 - 1)
  assert value == pytest.approx(want / 4, rel=1e-5) and metrics["policy/clipped_share"].mean() == 0.5
  np.testing.assert_allclose(grad, [-1.2, -0.5, 1, 1.2], rtol=1e-5)


def test_sapo():
  """-(4 / tau) sigmoid(tau (rho - 1)) A, tau 1 up and 1.05 down: -4 * 0.62246, -4 * 0.37754, +3.80952 * 0.5, +3.80952 * 0.74077."""
  value, grad, *_ = run(config(surrogate="sapo"), *FOUR)
  assert value == pytest.approx((-4 * 0.62246 - 4 * 0.37754 + 3.80952 * 0.5 + 3.80952 * 0.74077) / 4, rel=1e-4)
  # its slope in log rho is 4 s (1 - s) rho
  want = [-4 * 0.62246 * 0.37754 * 1.5, -4 * 0.37754 * 0.62246 * 0.5, 1.0, 4 * 0.74077 * 0.25923 * 2]
  np.testing.assert_allclose(grad, want, rtol=1e-4)


def test_dppo():
  """Chances e^-1 * (1.5, 0.5, 1, 2): the first rose by 0.184 > 0.1 and is dropped; the last rose though pushed down: kept."""
  value, grad, _, metrics = run(config(surrogate="dppo", clip_high=0.1), *FOUR)
  assert value == pytest.approx((0 - 0.5 * (-L2 - 1) + 1.0 * (-1) + 2.0 * (L2 - 1)) / 4, rel=1e-5)
  np.testing.assert_allclose(grad, [0, -0.5, 1, 2], rtol=1e-5)
  assert metrics["policy/clipped_share"].mean() == 0.25


def test_dppo_by_kl():
  """Bernoulli KL of chances 0.368 -> 0.552, 0.184, 0.368, 0.736: 0.0682 and 0.296 (rose though pushed down); the first alone can be
  dropped, and is at 0.05 but not at 0.1, where total variation (0.184) would drop it."""
  at = lambda high: run(config(surrogate="dppo_kl", clip_high=high), *FOUR)[1]
  np.testing.assert_allclose(at(0.05), [0, -0.5, 1, 2], rtol=1e-5)
  np.testing.assert_allclose(at(0.1), [-1.5, -0.5, 1, 2], rtol=1e-5)


def test_gmpo():
  """Episode 0 (up): ln 1.5 = 0.405 is held at 0.4, mean of 0.4 and -0.693 is -0.1466: -0.8637. Episode 1 (down): sqrt 2."""
  cfg = config(surrogate="gmpo", ratio="episode", average="episode", clip_low=0.4, clip_high=0.4)
  value, grad, total, _ = run(cfg, *FOUR, episode=[0, 0, 1, 1])
  assert value == pytest.approx((-math.exp((0.4 - L2) / 2) + math.sqrt(2)) / 2, rel=1e-5) and total.count == 2
  np.testing.assert_allclose(grad, [0, -0.86366 / 2, 1.41421 / 2, 1.41421 / 2], rtol=1e-4)


def test_dro():
  """-(A log pi - 0.25 (ln rho)^2) with beta 0.5; slope -A + 0.5 ln rho: nothing is clipped, a square pulls back to the sampler."""
  value, grad, *_ = run(config(surrogate="dro", surrogate_beta=0.5), *FOUR)
  square = 0.25 * (L15**2 + L2**2 + 0 + L2**2)
  assert value == pytest.approx((-(L15 - 1) - (-L2 - 1) + (-1) + (L2 - 1) + square) / 4, rel=1e-5)
  np.testing.assert_allclose(grad, [-1 + L15 / 2, -1 - L2 / 2, 1, 1 + L2 / 2], rtol=1e-5)


def test_awr():
  """Copying with weight exp(A / 0.5) = e^2 for the good, e^-2 for the bad, at most 20; no ratio."""
  _, grad, *_ = run(config(surrogate="awr", surrogate_beta=0.5), *FOUR)
  np.testing.assert_allclose(grad, [-(math.e**2)] * 2 + [-(math.e**-2)] * 2, rtol=1e-5)
  np.testing.assert_allclose(run(config(surrogate="awr", surrogate_beta=0.1), *FOUR)[1][:2], [-20, -20], rtol=1e-5)


# -- units

BAND = {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": 0.0, "average": "episode"}


def test_episode_ratio():
  """sqrt(1.5 * 0.5) = 0.86603 up, free; sqrt(1 * 2) = 1.41421 down, free: every token of an episode gets s / 2."""
  value, grad, total, _ = run(config(ratio="episode", **BAND), *FOUR, episode=[0, 0, 1, 1])
  assert value == pytest.approx((-0.866025 + 1.414214) / 2, rel=1e-5) and total.count == 2
  np.testing.assert_allclose(grad, [-0.433013, -0.433013, 0.707107, 0.707107], rtol=1e-5)


def test_step_ratio():
  """Steps of 1, 1 and 2 tokens: 1.5 up is held at 1.0004, 0.5 up free, sqrt 2 down free; three units."""
  value, grad, total, metrics = run(config(ratio="step", **BAND), *FOUR, episode=[0, 0, 1, 1], step=[0, 1, 2, 2])
  assert value == pytest.approx((-1.0004 - 0.5 + 1.414214) / 3, rel=1e-5) and total.count == 3
  np.testing.assert_allclose(grad, [0, -0.5, 0.707107, 0.707107], rtol=1e-5)
  assert metrics["policy/clipped_share"].mean() == 0.25  # of tokens


SIX = ([1.0002, 1.0003, 1.3, 0.7, 1.0, 1.0006], [0.7, 0.7, -1.2, -1.2, 2.0, 0.0], [0, 0, 1, 1, 2, 3], [1, 1, 1, 1, 1, 0])


def test_gspo_token_with_one_push_an_episode_is_gspo():
  ratios, push, episode, mask = SIX
  a = run(config(ratio="episode", **BAND), ratios, push, episode, mask=mask)
  b = run(config(ratio="episode", token_form=True, **BAND), ratios, push, episode, mask=mask)
  assert a[0] == pytest.approx(b[0], abs=1e-6) and a[2].count == b[2].count == 3
  np.testing.assert_allclose(a[1], b[1], atol=1e-6)
  for name in ("policy/clipped_share", "policy/ratio_mean"):
    assert a[3][name].mean() == pytest.approx(float(b[3][name].mean()), abs=1e-6)
  assert (a[1][:2] != 0).all() and a[1][5] == 0


def test_on_episodes_of_one_token_gspo_is_the_token_form():
  ratios, push = [1.0002, 1.0006, 0.9996, 1.3], [1.0, 1.0, -1.0, -0.5]
  a = run(config(ratio="episode", **BAND), ratios, push, [0, 1, 2, 3])
  b = run(config(ratio="token", **BAND | {"average": "token"}), ratios, push, [0, 1, 2, 3])
  assert a[0] == pytest.approx(b[0], abs=1e-6) and a[2].count == b[2].count
  np.testing.assert_allclose(a[1], b[1], atol=1e-6)
  assert (a[1] == 0).tolist() == [False, True, True, False]


@pytest.mark.parametrize("surrogate, ratio, share", [
  ("clip", "token", 1), ("cispo", "token", 1), ("sapo", "token", 1), ("dppo", "token", 1), ("clip", "episode", 2), ("gmpo", "episode", 2),
  ("clip", "step", 2), ("gmpo", "step", 2),
])  # fmt: skip
def test_at_ratio_one_every_surrogate_has_reinforces_gradient(surrogate, ratio, share):
  """-A at every token; where a unit of two tokens is averaged first, half of it."""
  average = "token" if ratio == "token" else "episode"
  knobs = {"clip_high": 5.0} if surrogate == "cispo" else {}
  push = [1.0, 1.0, -0.5, -0.5]
  grad = run(config(surrogate=surrogate, ratio=ratio, average=average, **knobs), [1.0] * 4, push, [0, 0, 1, 1])[1]
  np.testing.assert_allclose(grad, -np.array(push) / share, rtol=1e-6)


# -- averages: clipped losses -1.28, -0.5 and 1 of one episode, 2 of another


@pytest.mark.parametrize("average, want", [
  ("token", 1.22 / 4), ("episode", (-0.78 / 3 + 2) / 2), ("episode_sum", (-0.78 + 2) / 2), ("constant", 1.22 / (2 * 50)),
  ("micro_batch", 1.22 / 4),
])  # fmt: skip
def test_averages(average, want):
  assert run(config(average=average, constant=50.0), *FOUR, episode=[0, 0, 0, 1])[0] == pytest.approx(want, rel=1e-5)


def test_under_the_constant_a_part_without_episodes_adds_nothing_to_the_divisor():
  """Two episodes in one micro-batch, an empty one beside it: 2 x 50, not 2 x 50 + 1."""
  part = lambda mask: run(config(average="constant", constant=50.0), *FOUR, episode=[0, 0, 0, 1], mask=mask)[2]
  assert float((part([1] * 4) + part([0] * 4)).count) == 100.0


def test_average_by_step():
  """Steps of 1, 2 and 1 tokens: -1.28, (-0.5 + 1) / 2 and 2, over 3."""
  value, _, total, _ = run(config(average="step"), *FOUR, episode=[0, 0, 0, 1], step=[0, 1, 1, 2])
  assert value == pytest.approx((-1.28 + 0.25 + 2) / 3, rel=1e-5) and total.count == 3


def test_under_the_constant_a_tokens_push_does_not_depend_on_its_episodes_length():
  """1 / (episodes * 50) a token for a long and for a short try; under "episode" the long one's tokens are pushed more quietly."""
  push = [1.0] * 6
  step = lambda average: (lambda r: r[1] / float(r[2].count))(run(config(average=average, constant=50.0), push, push, [0, 0, 0, 0, 0, 1]))
  np.testing.assert_allclose(step("constant"), [-1 / 100] * 6, rtol=1e-6)
  np.testing.assert_allclose(step("episode"), [-1 / 10] * 5 + [-1 / 2], rtol=1e-6)


# -- recomputed ratios and their correction: learner over sampler 1, 3, 0.4 and 1.5 as the update began

OLD = [1.0, 3.0, 0.4, 1.5]


@pytest.mark.parametrize("correction, weight", [("none", [1, 1, 1, 1]), ("truncate", [1, 2, 0.4, 1.5]), ("mask", [1, 0, 0, 1.5])])
def test_corrections(correction, weight):
  """The ratio is against the old policy, here 1.1 everywhere; the weight multiplies the loss and the count stays 4."""
  cfg = config(old_logp="recompute", correction=correction)
  value, grad, total, metrics = run(cfg, [1.1 * o for o in OLD], [1.0] * 4, old=OLD)
  np.testing.assert_allclose(grad, -1.1 * np.array(weight), rtol=1e-5)
  assert value == pytest.approx(-1.1 * sum(weight) / 4, rel=1e-5) and total.count == 4
  assert metrics["policy/ratio_mean"].mean() == pytest.approx(1.1, rel=1e-5)


@pytest.mark.parametrize("knobs, weight", [
  ({"correction": "sequence"}, [3**0.5, 3**0.5, 0.6**0.5, 0.6**0.5]), ({"correction": "sequence_product"}, [0, 0, 0.6, 0.6]),
  ({"correction": "geometric", "correction_low": 0.8}, [1, 1, 0, 0]), ({"correction": "k3", "correction_cap": 0.3}, [0, 0, 1, 1]),
  ({"correction": "geometric", "correction_low": 0.8, "correction_token_cap": 2.0}, [1, 2, 0, 0]),
  ({"correction": "k3", "correction_cap": 0.3, "correction_token_cap": 1.2}, [0, 0, 0.4, 1.2]),
])  # fmt: skip
def test_corrections_by_episode(knobs, weight):
  """Episodes of 1 and 3, and of 0.4 and 1.5: geometric means 1.732 and 0.775, products 3 (above 2) and 0.6; mean k3
  (0 + 3 - 1 - ln 3) / 2 = 0.451 and (0.4 - 1 - ln 0.4 + 1.5 - 1 - ln 1.5) / 2 = 0.205."""
  cfg = config(old_logp="recompute", **knobs)
  _, grad, total, _ = run(cfg, [1.1 * o for o in OLD], [1.0] * 4, [0, 0, 1, 1], old=OLD)
  np.testing.assert_allclose(grad, -1.1 * np.array(weight), rtol=1e-5, atol=1e-7)
  assert total.count == 4


def test_off_policy_mask():
  """Pushed down and already half as likely as sampled (ln 2 = 0.69 a token > 0.5): left out. Likelier, or pushed up: kept."""
  cfg = config(opsm=0.5, clip_low=0.9)
  _, grad, total, _ = run(cfg, [0.5, 0.5, 2, 2, 0.5, 0.5], [-1, -1, -1, -1, 1, 1], [0, 0, 1, 1, 2, 2])
  np.testing.assert_allclose(grad, [0, 0, 2, 2, -0.5, -0.5], rtol=1e-5)
  assert total.count == 6


def test_approximate_old_policy():
  """Written by version 0, the update begins at 1 and makes 2: half of the drift of 1.44 is the old policy's, so the ratio is 1.2.
  Written by version 1 there is no age: the ratio is 1.44, held at 1.28."""
  value, grad, *_ = run(config(old_logp="approximate"), [1.44, 1.44], [1.0, 1.0], version=[0, 1], now=1)
  np.testing.assert_allclose(grad, [-1.2, 0], rtol=1e-5)
  assert value == pytest.approx(-(1.2 + 1.28) / 2, rel=1e-5)


def test_old_logp_sampler_does_not_read_the_recomputed_ones():
  value, *_ = run(config(), [1.1] * 4, [1.0] * 4, old=[math.nan] * 4)
  assert value == pytest.approx(-1.1, rel=1e-5)


# -- KL. One token twice as likely as the reference has it, one half as likely; no push

KINDS = {  # values and gradients in log pi, from d = ln ref - ln pi = -ln 2, +ln 2
  "k1": ([L2, -L2], [1, 1]), "abs": ([L2, L2], [1, -1]), "k2": ([L2**2 / 2] * 2, [L2, -L2]),
  "k3": ([0.5 + L2 - 1, 2 - L2 - 1], [0.5, -1]), "k3+": ([0.5 + L2 - 1, 2 - L2 - 1], [L2, -L2]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kl_in_the_loss(kind):
  values, slopes = KINDS[kind]
  value, grad, total, metrics = run(config(kl_beta=0.1, kl_kind=kind), [2.0, 0.5], [0.0, 0.0])
  assert value == pytest.approx(0.1 * sum(values) / 2, rel=1e-5, abs=1e-7) and total.count == 2
  np.testing.assert_allclose(grad, 0.1 * np.array(slopes), rtol=1e-5)
  assert metrics["policy/kl_ref"].mean() == pytest.approx((0.5 + L2 - 1 + 2 - L2 - 1) / 2, rel=1e-5)  # the curve is always k3


def test_kl_follows_the_average():
  """k1 of ln 2 at three tokens of one episode, of -ln 2 at one of another: (ln 2 - ln 2) / 2 = 0 by episode, 2 ln 2 / 4 by token."""
  kl = lambda average: run(config(kl_beta=1.0, kl_kind="k1", average=average), [2, 2, 2, 0.5], [0.0] * 4, [0, 0, 0, 1])[0]
  assert kl("episode") == pytest.approx(0, abs=1e-6) and kl("token") == pytest.approx(L2 / 2, rel=1e-5)


def test_kl_in_the_reward_leaves_the_loss_alone_and_lowers_rewards(group_of):
  """Sampled at -0.25 where the reference has -0.5: k1 of 4 tokens is 1, times beta 0.1. The other try: 4 * (-0.25 + 0.15) = -0.4."""
  value, grad, *_ = run(config(kl_beta=0.1, kl_in="reward"), [2.0, 0.5], [0.0, 0.0])
  assert value == 0 and not grad.any()
  group = group_of([1, 0])
  said = lambda e, ref: EpisodeScores([{"ref_logp": np.where(r.is_action, ref, 77.0).astype(np.float32)} for r in e.records])
  scores = [said(group.episodes[0], -0.5), said(group.episodes[1], -0.15)]
  cfg = grpo.defaults()
  cfg.update({"kl_beta": 0.1, "kl_in": "reward"})
  np.testing.assert_allclose(sum(shaping.rewards(cfg, group, scores).values()), [0.9, 0.04], rtol=1e-5)
  cfg.update({"kl_in": "loss"})
  np.testing.assert_allclose(sum(shaping.rewards(cfg, group, None).values()), [1, 0])


def test_nearness_to_the_step_limit_lowers_rewards(group_of, episode):
  """DAPO eq 13 in steps: limit 10, the last 4 fade: 6 steps cost nothing, 8 cost 0.5, 10 cost 1."""
  group = group_of([1, 1, 0])
  group.episodes = [episode(r, index=i, steps=n) for i, (r, n) in enumerate([(1, 6), (1, 8), (0, 10)])]
  for e in group.episodes:
    e.step_limit = 10
  cfg = grpo.defaults()
  cfg.overlong = 4
  np.testing.assert_allclose(sum(shaping.rewards(cfg, group, None).values()), [1, 0.5, -1])


def test_what_is_computed_before_credit_and_which_reference_is_kept():
  made = lambda **knobs: (lambda cfg: (cfg.update(knobs), grpo.make(cfg))[1])(grpo.defaults())
  assert made().needs == frozenset() and made().reference is None
  assert made(reference="moving").reference is None  # without a KL term nobody reads it
  assert made(kl_beta=0.1).needs == {"ref_logp"} and made(kl_beta=0.1).reference == ("fixed", 10, 0.6)
  assert made(kl_beta=0.1, reference="moving", reference_every=5, reference_mix=0.5).reference == ("moving", 5, 0.5)
  assert made(old_logp="recompute").needs == {"old_logp"}
  assert made(old_logp="recompute", kl_beta=1.0, kl_in="reward").needs == {"old_logp", "ref_logp"}


def test_masked_places_change_nothing():
  """NaN and 1e30 at a masked token, in every array that is read there: the same bits."""
  for knobs in ({}, {"surrogate": "cispo"}, {"surrogate": "sapo"}, {"ratio": "episode", **BAND},
                {"surrogate": "gmpo", "ratio": "episode", "average": "episode"}, {"surrogate": "dppo"}, {"surrogate": "dppo_kl"},
                {"surrogate": "dro"}, {"surrogate": "awr"}, {"average": "constant"}, {"average": "micro_batch"}, {"opsm": 0.1},
                {"old_logp": "recompute", "correction": "k3", "correction_cap": 0.5}, {"old_logp": "approximate"},
                {"old_logp": "recompute", "correction": "truncate", "kl_beta": 0.1}):  # fmt: skip
    clean, bad = run(config(**knobs), [1.1, 0.9, 1.0], [1.0, 1.0, 1.0], mask=[1, 1, 0]), [1.1, 0.9, math.nan]
    dirty = run(config(**knobs), bad, [1.0, 1.0, 1e30], mask=[1, 1, 0], old=[1, 1, math.nan], ref=[1, 1, 1e30])
    assert clean[0] == dirty[0] and np.array_equal(clean[1], dirty[1]) and clean[1][2] == 0, knobs
    assert clean[3] == dirty[3], knobs


REFUSED = [
  ({"ratio": "episode", "average": "episode"}, "some clips episode ratios, wanted 3e-4, 4e-4"),
  ({"clip_low": 3e-4}, "a band for episode ratios"),
  ({"surrogate": "cispo", "ratio": "step", "average": "episode"}, "agent.surrogate cispo works on token ratios, not on step ratios"),
  ({"surrogate": "gmpo"}, "set agent.ratio=episode or step"), ({"token_form": True}, "agent.token_form is a form of step and"),
  ({"opsm": 0.5, "ratio": "episode", **BAND}, "episode ratios want agent.token_form=True"), ({"opsm": -0.5}, "agent.opsm is -0.5"),
  ({"surrogate_beta": 0.0}, "agent.surrogate_beta is 0.0"),
  ({"ratio": "episode", "clip_low": 3e-4, "clip_high": 4e-4}, "agent.average is token: with episode ratios wanted episode"),
  ({"correction": "mask"}, "counts the same drift twice: set agent.old_logp=recompute"),
  ({"correction": "truncate", "old_logp": "recompute", "ratio": "step", **BAND}, "step ratios want agent.token_form=True"),
  ({"ratio": "turn"}, "agent.ratio is turn, wanted one of token, step, episode"), ({"surrogate": "ppo"}, "agent.surrogate is ppo"),
  ({"average": "batch"}, "agent.average is batch"), ({"constant": 0.0}, "agent.constant"), ({"old_logp": "learner"}, "agent.old_logp"),
  ({"correction": "clip"}, "agent.correction is clip"), ({"correction_cap": 0.5}, "agent.correction_cap is 0.5, wanted 1 or more"),
  ({"correction_low": 1.0}, "agent.correction_low"), ({"kl_beta": -0.1}, "agent.kl_beta is -0.1, wanted 0"),
  ({"kl_beta": math.nan}, "agent.kl_beta is nan"), ({"kl_kind": "k4"}, "agent.kl_kind is k4, wanted one of k1, abs, k2, k3"),
  ({"kl_in": "advantage"}, "agent.kl_in"), ({"reference": "best"}, "agent.reference is best, wanted fixed, phase or moving"),
  ({"reference_every": 0}, "agent.reference_every is 0"), ({"reference_mix": 0.0}, "agent.reference_mix is 0.0"),
  ({"clip_high": 4e-4}, "agent.clip_low, clip_high are 0.2, 0.0004, a band for episode ratios"),
  ({"clip_high": 5.0}, "wanted about 0.2, 0.28 (a cap on the weight is agent.surrogate=cispo)"),
  ({"surrogate": "cispo"}, "agent.clip_high is 0.28: cispo takes the cap on the weight itself"),
  ({"surrogate": "gmpo", "ratio": "episode", **BAND}, "gmpo clips the log-ratios of tokens, wanted about 0.4, 0.4"),
  ({"surrogate": "dppo", "clip_high": 5.0}, "dppo drops a token by how far its probability moved"),
  ({"surrogate": "dppo_kl", "clip_low": 3e-4, "clip_high": 4e-4}, "dppo_kl drops a token by how far"),
  ({"correction": "k3", "old_logp": "recompute"}, "agent.correction_cap is 2.0, wanted 1 or more (k3: about 0.005)"),
  ({"correction": "mask", "old_logp": "recompute", "correction_token_cap": 2.0}, "corrections geometric and k3, not of mask, wanted 0"),
  ({"correction_token_cap": 0.5}, "agent.correction_token_cap is 0.5"),
  ({"correction": "truncate", "old_logp": "recompute", "surrogate": "sapo"}, "sapo's gate already answers for the drift"),
  ({"reference_mix": 1.1}, "agent.reference_mix"), ({"clip_high": -0.1}, "agent.clip_high"), ({"dual_clip": 1.0}, "agent.dual_clip is 1.0"),
]  # fmt: skip


@pytest.mark.parametrize("knobs, words", REFUSED, ids=[",".join(map(str, k)) for k, _ in REFUSED])
def test_what_does_not_belong_together_is_one_line(knobs, words):
  objective.check(config())
  with pytest.raises(ValueError) as error:
    objective.check(config(**knobs))
  assert words in str(error.value) and "\n" not in str(error.value)


# -- the optimiser step: 40 records of the tiny policy, in one part or several, on one device or many

SMALL = {"width": 8, "layers": 1, "heads": 1, "mlp": 1, "patch_width": 4, "max_action": 3}
ROWS = 40


def forty_records(policy, screen) -> list[list[PackItem]]:
  """20 episodes of two steps with ragged goals and actions, both signs of push, sampled near the chances of a fresh policy."""
  rng, episodes = np.random.default_rng(5), []
  for e in range(ROWS // 2):
    items = []
    for h in range(2):
      n, seen = int(rng.integers(1, 4)), screen(2 * e + h)
      sampled = Sampled(rng.integers(3, 100, n).astype(np.int32), np.log(1 / 110) + 0.1 * rng.standard_normal(n), np.zeros(n), 0)
      record = make_record(policy.prompt(("red", "open the red mug", "the mug")[(e + h) % 3], [seen], ""), sampled, h)
      number_ = lambda scale: np.where(record.is_action, scale * rng.standard_normal(len(record)), 0).astype(np.float32)  # noqa: B023
      push = np.where(record.is_action, rng.standard_normal(), 0).astype(np.float32)
      extra = {"return_": number_(1.0), "old_value_logit": number_(0.1)}
      items.append(PackItem(record, [policy.image(seen)], policy.positions(record), push, np.ones(len(record), bool), 0, extra=extra))
    episodes.append(items)
  return episodes


def dealt(policy, episodes, parts):
  """The episodes as so many batches of equal size, two records an episode."""
  size = ROWS // parts
  shape = shape_for(size, policy.max_prompt + policy.max_action, policy.max_action, policy.max_prompt + policy.max_action, 1,
                    policy.tokens_per_image)  # fmt: skip
  out = []
  for i in range(parts):
    items = number(episodes[i * size // 2 : (i + 1) * size // 2])
    out.append(to_batch(items, arrange(items, shape), shape, np.zeros_like(items[0].images[0])))
  return tuple(out)


def stepper(policy, name):
  """(parameters, step(parameters, batches) -> gradient of the whole optimiser step) for grpo, gspo or ppo's value loss. The
  "optimiser" takes no step and keeps the gradient."""
  zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
  keeper = optax.GradientTransformation(zeros, lambda g, state, params=None: (zeros(g), g))
  params, score = jax.jit(policy.init)(jax.random.key(0)), learner_lib.make_score(policy)
  module = {"grpo": grpo, "gspo": gspo, "value": ppo}[name]
  phase = module.make(module.defaults()).phases[name == "value"]
  if name == "value":
    cfg = critic.defaults()
    cfg.width = 8
    made = critic.build("trunk", cfg, policy)
    params, score = made.init(jax.random.key(1), params), made.score
  update = learner_lib.make_update(score, phase.loss, keeper)

  def step(params, batches):
    state, out = update(TrainState.create(jax.tree.map(jnp.copy, params), keeper), None, batches, None)
    assert int(out["skipped"]) == 0 and int(state.updates) == 1
    return jax.device_get(state.opt_state)

  return params, step


def worst(a, b) -> float:
  """Largest difference over the largest entry, of any leaf."""
  gap = lambda x, y: float(np.abs(x - y).max() / max(np.abs(x).max(), 1e-30))
  return max(jax.tree.leaves(jax.tree.map(gap, a, b)))


@pytest.mark.parametrize("name", ["grpo", *(pytest.param(name, marks=pytest.mark.long) for name in ("gspo", "value"))])
def test_micro_batches_leave_the_step_as_it_is(name, tiny_with, tiny_screen):
  policy = tiny_with(**SMALL)
  episodes = forty_records(policy, tiny_screen)
  params, step = stepper(policy, name)
  whole = step(params, dealt(policy, episodes, 1))
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(whole["head"] if name == "value" else whole))
  for parts in (2, 5):
    assert worst(whole, step(params, dealt(policy, episodes, parts))) <= 1e-6, parts
  if name == "value":
    return
  (batch,) = dealt(policy, episodes, 1)
  dirty = batch.replace(behaviour_logp=np.where(batch.is_action, batch.behaviour_logp, np.nan).astype(np.float32),
                        advantage=np.where(batch.is_action, batch.advantage, 1e30).astype(np.float32))  # fmt: skip
  assert jax.tree.all(jax.tree.map(np.array_equal, whole, step(params, (dirty,))))


# Devices of each step; the first is what the others are compared with. Every one compiles anew.
CASES = {"widest": {"grpo": (1, 2, 8), "gspo": (1, 8)}, "the others": {"grpo": (1, 4), "value": (1, 8)}}


def main(kind: str) -> None:
  from conftest import make_tiny, screen
  from jax.sharding import NamedSharding, PartitionSpec

  jax.config.update("jax_disable_most_optimizations", True)
  policy, gaps = make_tiny(**SMALL), {}
  (batch,) = dealt(policy, forty_records(policy, screen), 1)
  for name, meshes in CASES[kind].items():
    params, step = stepper(policy, name)
    whole = None
    for devices in meshes:
      mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("rows",))
      # [B, L] and images by their first axis, positions [P, B, L] by their second, what is per episode on every device
      spec = lambda x: ("rows",) if np.shape(x)[:1] == (ROWS,) else (None, "rows") if np.shape(x)[1:2] == (ROWS,) else ()
      spread = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec(x)))), batch)  # noqa: B023
      assert len(spread.tokens.addressable_shards) == devices and spread.tokens.addressable_shards[0].data.shape[0] == ROWS // devices
      grads = step(jax.device_put(params, NamedSharding(mesh, PartitionSpec())), (spread,))
      whole = grads if devices == 1 else whole
      gaps[f"{name} {devices}"] = worst(whole, grads)
  print(json.dumps(gaps))


@pytest.mark.parametrize("kind", ["widest", pytest.param("the others", marks=pytest.mark.long)])
@pytest.mark.slow
def test_forced_devices_leave_the_step_as_it_is(kind):
  """Rows spread over 1, 2, 4 and 8 forced CPU devices; a fresh process, for which this file is also the script."""
  tests = Path(__file__).resolve().parents[1]
  env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu",
                      "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}  # fmt: skip
  done = subprocess.run([sys.executable, __file__, kind], env=env, capture_output=True, text=True, timeout=240, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  gaps = json.loads(done.stdout.splitlines()[-1])
  assert len(gaps) == sum(map(len, CASES[kind].values())) and all(gap <= 1e-6 for gap in gaps.values()), gaps


if __name__ == "__main__":
  main(sys.argv[1])
