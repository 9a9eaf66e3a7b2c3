"""Credit and loss of the algorithms with critics, and of the simple ones beside them, worked by hand."""

import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.schema import End, EpisodeScores, Screen
from core.state import Batch, Scores, StepBatch

pytestmark = pytest.mark.usefixtures("compile_quickly")


def agent(name, **knobs):
  module = importlib.import_module(f"agents.{name}")
  cfg = module.defaults()
  cfg.update(knobs)
  return module.make(cfg)


def run(phase, ratios=(), push=(), episode=(), step=None, chances=None, ref=None, mask=None, **extra):
  """(loss, gradient in each log-probability, total, metrics). Sampled at log-probability -1; the policy at ratios times that, or at
  `chances`; ref: log-probabilities of the reference."""
  logp = np.log(chances) if chances is not None else -1.0 + np.log(ratios)
  n = len(logp)
  row = lambda x, kind=np.float32: np.array([x], kind)
  batch = Batch(
    tokens=row([0] * n, np.int32), segment_ids=row([1] * n, np.int32), positions=None, episode_id=row(episode or [0] * n, np.int32),
    step_id=row(step or episode or [0] * n, np.int32), is_action=row([1] * n if mask is None else mask, bool),
    behaviour_logp=row([-1] * n), version=row([0] * n, np.int32), advantage=row(push or [0] * n), image_slot=None, images=None,
    episode_valid=None, ref_logp=row(ref if ref is not None else [-1] * n), num_episodes=6, num_steps=6, row_actions=n,
    **{k: row(v) for k, v in extra.items()},
  )  # fmt: skip

  def loss(logp):
    total, metrics = phase.loss(Scores(logp[None], jnp.full((1, n), 0.5)), batch)
    return total.sum, (total, metrics)

  (_, (total, metrics)), grad = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(logp, jnp.float32))
  return float(total.mean()), np.asarray(grad), total, metrics


def of_policy(agent):
  return next(p for p in agent.phases if p.params_key == "policy")


def said(group, **fields):
  """EpisodeScores of a group: step_value and task_value as lists over its tries; record fields as one number at every token."""
  out = []
  for i, e in enumerate(group.episodes):
    names = [k for k in fields if k not in ("step_value", "task_value")]
    records = [{k: np.full(len(r), fields[k][i], np.float32) for k in names} for r in e.records]
    step = np.float32(fields["step_value"][i]) if "step_value" in fields else None
    out.append(EpisodeScores(records, step, fields["task_value"][i] if "task_value" in fields else None))
  return out


# -- the simple ones


def test_rloo_credit(group_of):
  """Against the mean of the other three: 1 + 1/3, 0 - 0, 0 - 0, -1 - 1/3; and 1 - 0, 0 - 1/3."""
  pushes = [c.advantage[0] for c in agent("rloo").credit(group_of([1, 0, 0, -1]))]
  np.testing.assert_allclose(pushes, [4 / 3, 0, 0, -4 / 3], atol=1e-6)
  pushes = [c.advantage[0] for c in agent("rloo").credit(group_of([1, 0, 0, 0]))]
  np.testing.assert_allclose(pushes, [1, -1 / 3, -1 / 3, -1 / 3], atol=1e-6)


def test_dr_grpo_credit_and_loss(group_of):
  """Centred, not divided: 0.75 and -0.25. Loss: token sum over 50 an episode, whatever its length: (-3 - 1) / 100."""
  made = agent("dr_grpo")
  np.testing.assert_allclose([c.advantage[0] for c in made.credit(group_of([1, 0, 0, 0]))], [0.75, -0.25, -0.25, -0.25], atol=1e-6)
  value, grad, *_ = run(of_policy(made), [1.0] * 4, [1.0] * 4, [0, 0, 0, 1])
  assert value == pytest.approx(-4 / 100) and (grad == -1).all()


def test_cispo_loss_and_its_cap():
  """Ratio 8 is held at 5 and keeps its gradient -5; 0.1 pushed up keeps its weight 0.1: no lower side."""
  _, grad, _, metrics = run(of_policy(agent("cispo")), [8.0, 0.1], [1.0, 1.0])
  np.testing.assert_allclose(grad, [-5, -0.1], rtol=1e-5)
  assert metrics["policy/clipped_share"].mean() == 0.5
  with pytest.raises(ValueError, match="agent.clip_high is 0.28: cispo takes the cap on the weight itself, wanted 1 or more"):
    agent("cispo", clip_high=0.28)


def test_filtered_imitation_copies_passes_only(group_of):
  made = agent("filtered_imitation")
  credits = made.credit(group_of([1, 0, -1]))
  assert [c.keep.tolist() for c in credits] == [[True] * 2, [False] * 2, [False] * 2]
  assert [c.advantage.tolist() for c in credits] == [[1, 1], [0, 0], [0, 0]]
  value, grad, *_ = run(of_policy(made), chances=[0.5, 0.25, 0.125], mask=[1, 1, 0])
  assert value == pytest.approx(math.log(2) * 1.5, rel=1e-5) and grad.tolist() == [-1, -1, 0]


def test_gigpo_adds_a_comparison_of_steps_from_one_screen(group_of):
  """Two tries of two steps, a pass and a fail: +-1 as a group. Returns 0.95, 1 and 0, 0. All begin at one screen: +-0.475 around its
  mean; their second screens differ: nothing to compare with, so +-1 stays."""
  group = group_of([1, 0])
  for e in group.episodes:
    e.steps[1].screen = Screen.of(np.full((24, 40, 3), 10 * e.try_index, np.uint8))
  a, b = agent("gigpo").credit(group)
  np.testing.assert_allclose([a.advantage, b.advantage], [[1.475, 1.0], [-1.475, -1.0]], atol=1e-5)
  a, b = agent("gigpo", step_weight=2.0).credit(group)
  np.testing.assert_allclose([a.advantage, b.advantage], [[1.95, 1.0], [-1.95, -1.0]], atol=1e-5)
  a, _ = agent("gigpo", step_spread="population").credit(group)  # 0.475 over a spread of 0.475
  np.testing.assert_allclose(a.advantage, [2.0, 1.0], atol=1e-4)
  plain = agent("grpo").credit(group)
  for c, p in zip(agent("gigpo", step_weight=0.0).credit(group), plain, strict=True):
    assert np.array_equal(c.advantage, p.advantage)
  assert not any(c.advantage.any() for c in agent("gigpo").credit(group_of([0, 0])))


# -- preferences


def test_dpo_by_hand():
  """Pair 1: pass +0.5 and -0.1, fail -0.3, so 0.4 + 0.3 = 0.7 apart; pair 2: 0 and 0.2, -0.2 apart. beta 0.5: softplus(-0.35) =
  ln 1.70469 = 0.53338 and softplus(0.1) = ln 2.10517 = 0.74440. A lone fifth episode counts in no pair."""
  drift, episode = [0.5, -0.1, -0.3, 0.0, 0.2, 3.0], [0, 0, 1, 2, 3, 4]
  value, grad, total, metrics = run(of_policy(agent("dpo", beta=0.5)), np.exp(drift), episode=episode)
  assert value == pytest.approx((0.53338 + 0.74440) / 2, rel=1e-5) and total.count == 2
  one, two = 0.5 / (1 + math.exp(0.35)), 0.5 / (1 + math.exp(-0.1))
  np.testing.assert_allclose(grad, [-one, -one, one, -two, two, 0], rtol=1e-4, atol=1e-7)
  assert metrics["policy/pairs_won"].mean() == 0.5


def test_kto_by_hand():
  """Passes at +0.6 and 0, fail at -0.3: reference point 0.1. beta 0.5: 1 - s(0.25), 1 - s(-0.05), 1 - s(0.2)."""
  value, grad, total, _ = run(of_policy(agent("kto", beta=0.5)), np.exp([0.6, 0.0, -0.3]), [1, 1, -1], [0, 1, 2])
  s = lambda x: 1 / (1 + math.exp(-x))
  assert value == pytest.approx((s(-0.25) + s(0.05) + s(-0.2)) / 3, rel=1e-5) and total.count == 3
  np.testing.assert_allclose(grad, [-0.5 * s(0.25) * s(-0.25), -0.5 * s(0.05) * s(-0.05), 0.5 * s(0.2) * s(-0.2)], rtol=1e-4)
  _, heavier, *_ = run(of_policy(agent("kto", beta=0.5, weight_neg=2.0)), np.exp([0.6, 0.0, -0.3]), [1, 1, -1], [0, 1, 2])
  np.testing.assert_allclose(heavier / grad, [1, 1, 2], rtol=1e-5)
  # the point is never below 0: all drifts negative, mean -0.2, point 0
  assert run(of_policy(agent("kto", beta=0.5)), np.exp([-0.2]), [1], [0])[0] == pytest.approx(s(0.1), rel=1e-5)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_preferences_are_the_checkers_and_the_reference_stays(name, group_of):
  made = agent(name)
  assert [c.advantage.tolist() for c in made.credit(group_of([1, 0, -1]))] == [[1, 1], [-1, -1], [-1, -1]]
  assert made.reference[0] == "fixed" and made.needs == {"ref_logp"} and made.offline == 10
  assert (of_policy(made).pairs, of_policy(made).data) == (name == "dpo", "store")


# -- ppo


def test_ppo_lambda_follows_the_length_and_the_truncated_may_be_masked(episode, group_of):
  """20 steps of 2 tokens are 40: lambda 1 - 1 / (0.05 * 40) = 0.5. Values all 0, so a pass earns 0.5^k, k tokens before its end."""
  made, group = agent("ppo"), group_of([1], steps=20)
  (c,) = made.credit(group, said(group, value_logit=[0.0]))
  np.testing.assert_allclose(np.concatenate([a[3:] for a in c.token_advantage])[-4:], [0.125, 0.25, 0.5, 1.0], rtol=1e-5)
  np.testing.assert_allclose(np.concatenate([a[3:] for a in c.token_return]), 1.0, rtol=1e-5)  # lambda 1 for the critic
  (c,) = agent("ppo", lam_policy=1.0).credit(group, said(group, value_logit=[0.0]))
  np.testing.assert_allclose(np.concatenate([a[3:] for a in c.token_advantage]), 1.0, rtol=1e-5)
  cut = group_of([0, 0])
  cut.episodes[1].end = End.TERMINATED
  keeps = lambda made: [c.keep.tolist() for c in made.credit(cut, said(cut, value_logit=[0.0, 0.0]))]
  assert keeps(agent("ppo", truncation="mask")) == [[False] * 2, [True] * 2] and keeps(made) == [[True] * 2] * 2


def test_ppo_policy_loss_and_vapos_imitation():
  """Clip as in grpo. With weight 0.1 the tokens of returns at the highest reward are also copied: -0.1 more slope at the first."""
  args = dict(ratios=[1.0, 1.5], push=[0.5, 1.0], return_=[1.0, 0.9])
  value, grad, total, _ = run(of_policy(agent("ppo")), **args)
  assert value == pytest.approx((-0.5 - 1.28) / 2, rel=1e-5) and grad.tolist() == pytest.approx([-0.5, 0])
  value, grad, total, _ = run(of_policy(agent("ppo", imitation=0.1)), **args)
  assert value == pytest.approx((-0.5 - 1.28 + 0.1 * 1.0) / 2, rel=1e-5) and total.count == 2
  np.testing.assert_allclose(grad, [-0.6, 0], atol=1e-6)


def test_ppo_copies_every_token_of_a_pass_though_returns_are_rounded(group_of):
  """Advantage plus value is 1 at every token of a pass, but in float32 0.9999998 at many: all 60 are copied, none of the fail's."""
  made, group = agent("ppo", imitation=0.1), group_of([1, 0], steps=30)
  rng = np.random.default_rng(0)
  random = lambda e: EpisodeScores([{"value_logit": rng.normal(size=len(r)).astype(np.float32)} for r in e.records])
  credits = made.credit(group, [random(e) for e in group.episodes])
  target = np.concatenate([t[r.is_action] for c, e in zip(credits, group.episodes) for t, r in zip(c.token_return, e.records)])
  assert (target[:60] < 1).any()
  _, grad, *_ = run(of_policy(made), ratios=[1.0] * 120, push=[0.0] * 120, return_=target)
  np.testing.assert_allclose(grad, [-0.1] * 60 + [0.0] * 60, atol=1e-6)


def test_ppo_value_loss():
  """Values 0.8 (logit ln 9), 0 and -0.5 (logit -ln 3) of a critic between -1 and 1, from 0 before; targets 1, 1, -1, clip 0.5.
  0.5 * max(0.04, 0.25): held, no slope; 0.5 * 1; 0.5 * 0.25. Slope of value in logit: (1 - v^2) / 2."""
  made = agent("ppo")
  phase = next(p for p in made.phases if p.params_key == "critic")
  row = lambda x: np.array([x], np.float32)
  batch = Batch(*[None] * 5, is_action=np.array([[1, 1, 1, 0]], bool), behaviour_logp=None, version=None, advantage=None, image_slot=None,
                images=None, episode_valid=None, old_value_logit=row([0, 0, 0, np.nan]), return_=row([1, 1, -1, np.nan]))  # fmt: skip

  def loss(logit):
    total, metrics = phase.loss(Scores(None, None, logit[None]), batch)
    return total.sum, (total, metrics)

  logit = jnp.array([math.log(9), 0.0, -math.log(3), jnp.nan])
  (_, (total, metrics)), grad = jax.value_and_grad(loss, has_aux=True)(logit)
  assert float(total.mean()) == pytest.approx((0.125 + 0.5 + 0.125) / 3, rel=1e-5) and total.count == 3
  np.testing.assert_allclose(grad, [0, -1 * 0.5, 0.5 * 0.375, 0], atol=1e-6)
  # explained variance is of the values before the update: all 0, so errors vary as the returns do, and nothing is explained
  assert float(metrics["critic/explained_variance"].explained_variance()[0]) == pytest.approx(0, abs=1e-6)


def test_ppo_value_pretraining_ends_when_the_critic_explains_enough_or_time_is_up():
  until = lambda made: next(p for p in made.phases if p.params_key == "critic").until
  ready = until(agent("ppo", pretrain_fall=1.0))
  curves = lambda variance, updates: {"critic/explained_variance": variance, "critic/updates": updates}
  assert [ready(curves(*x)) for x in ((0.39, 4), (0.4, 1), (-3.0, 5), (0.0, 6))] == [False, True, True, True]
  assert [ready({"critic/updates": n}) for n in (4, 5)] == [False, True]  # nothing was learnt, or no return differed
  # and its loss has to have settled: 0.5 to 0.46 is a fall of 8%, to 0.44 of 12%, and the first update has nothing to compare with
  ready = until(agent("ppo"))
  told = lambda loss, before: {"critic/explained_variance": 0.9, "critic/updates": 2, "critic/loss": loss, "critic/loss_before": before}
  assert [ready(told(*x)) for x in ((0.46, 0.5), (0.44, 0.5), (0.6, 0.5), (0.4, None), (None, 0.5))] == [True, False, True, False, False]
  assert not ready(told(0.5, 0.5) | {"critic/explained_variance": 0.39})
  assert until(agent("ppo", pretrain_updates=0)) is None and of_policy(agent("ppo")).until is None


# -- digirl


def test_digirl_keeps_the_helpful_steps_of_the_surprising_tries(group_of, episode):
  """lambda 0.5, two steps, H = 5, threshold 0.2. A pass at values 0.5, 0.8: 0.5 + 0.5 * 0.3 = 0.65 and 1. A fail at 0.2, 0.6:
  +0.4 and -0.6: its first step is kept. But the tries that beat the instruction critic least (1 - 0.9 = 0.1 and 0 - 0.7) are out."""
  group = group_of([1, 0, 1, 0])
  for e in group.episodes:
    e.step_limit = 5
  value = [[0.5, 0.8, 0.9], [0.2, 0.6, 0.1], [0.5, 0.8, 0.9], [0.2, 0.6, 0.1]]
  credits = agent("digirl").credit(group, said(group, step_value=value, task_value=[0.3, 0.05, 0.9, 0.7]))
  assert [c.keep.tolist() for c in credits] == [[True, True], [False, False], [True, True], [False, False]]
  credits = agent("digirl", top=1.0).credit(group, said(group, step_value=value, task_value=[0.3, 0.05, 0.9, 0.7]))
  assert [c.keep.tolist() for c in credits] == [[True, True], [True, False]] * 2
  assert [c.advantage.tolist() for c in credits] == [[1, 1], [1, 0]] * 2  # equal weight, however large the push
  credits = agent("digirl", top=1.0, filter_h="length").credit(group, said(group, step_value=value, task_value=[0.5] * 4))
  assert [c.keep.tolist() for c in credits] == [[True] * 2, [False] * 2] * 2  # threshold 1 / 2: the fail's 0.4 is no longer enough


def test_digirl_as_released(group_of):
  """Jump - 0.05 + reward at the end + 0.5^(H - h) r, above 0: a pass 0.3 - 0.05 + 0.5, 0.1 - 0.05 + 1 + 1; a fail +0.35, -0.55."""
  group = group_of([1, 0])
  scores = said(group, step_value=[[0.5, 0.8, 0.9], [0.2, 0.6, 0.1]], task_value=[0.5, 0.5])
  credits = agent("digirl", variant="code", top=1.0).credit(group, scores)
  assert [c.keep.tolist() for c in credits] == [[True, True], [True, False]]


def test_digirl_copies_kept_tokens_inside_its_band():
  """Chances 0.5, 0.0005 (below 0.001) and 0.995 (above 0.99): only the first has a gradient; a push of 0 has none."""
  value, grad, *_ = run(of_policy(agent("digirl")), chances=[0.5, 0.0005, 0.995, 0.5], push=[1, 1, 1, 0])
  np.testing.assert_allclose(grad, [-1, 0, 0, 0], atol=1e-6)
  assert value == pytest.approx((math.log(2) + math.log(1000) - math.log(0.99)) / 4, rel=1e-4)


def test_the_step_critics_loss_adds_its_heads():
  """Logits (0, ln 3) on a pass: ln 2 + ln 4/3; (0, 0) on a fail: 2 ln 2; the third is padding. The guess is the smaller chance."""
  phase = next(p for p in agent("digirl").phases if p.params_key == "critic")
  frames = np.zeros((3, 2, 1, 1, 3), np.uint8)
  batch = StepBatch(frames, np.zeros((3, 2), np.int32), np.float32([1, 0, 1]), np.array([True, True, False]))
  total, metrics = phase.loss(Scores(None, None, jnp.array([[0, math.log(3)], [0, 0], [9, 9]])), batch)
  assert float(total.mean()) == pytest.approx((math.log(2) + math.log(4 / 3) + 2 * math.log(2)) / 2, rel=1e-5) and total.count == 2
  assert float(metrics["critic/explained_variance"].explained_variance()[0]) == pytest.approx(0, abs=1e-6)  # 0.5 for both


# -- webrl


def test_webrl_credit(group_of):
  """lambda 0.5 at values 0.5, 0.8: pass 0.5 * 0.3 + 0.5 * 0.5 = 0.4 and 0.5 * (1 - 0.8) + 0.5 * 0.2 = 0.2; fail 0.15 - 0.25 = -0.1
  and -0.8."""
  group = group_of([1, 0])
  credits = agent("webrl").credit(group, said(group, step_value=[[0.5, 0.8, 0.3]] * 2, old_logp=[-0.3] * 2, ref_logp=[-0.3] * 2))
  np.testing.assert_allclose([c.advantage for c in credits], [[0.4, 0.2], [-0.1, -0.8]], atol=1e-6)
  assert all(c.keep.all() for c in credits)  # fresh ones are learnt from whole, fails too


def test_webrl_replays_old_successes_inside_the_band_and_under_the_cap(group_of, episode):
  """Chances of old actions: e^-0.3 = 0.74 inside 0.5 to 0.95; e^-0.01 too sure, e^-1 too strange, a fail never. One fresh try of 2
  steps: at most 4 old ones, the newest first."""
  old = lambda raw: episode(raw, replayed=True)
  group = group_of([0])
  group.episodes += [old(1), old(1), old(1), old(0), old(1), old(1)]
  logp = [-0.3, -0.3, -0.3, -0.01, -0.3, -1.0, -0.3]
  scores = said(group, step_value=[[0.5, 0.5, 0.5]] * 7, old_logp=logp, ref_logp=logp)
  word = lambda keep: bool(keep.all()) if keep.all() == keep.any() else "part"
  kept = lambda **knobs: [word(c.keep) for c in agent("webrl", **knobs).credit(group, scores)]
  assert kept() == [True, False, True, False, False, False, True]
  assert kept(old_per_new=1.0) == [True, False, False, False, False, False, True]
  assert kept(old_per_new=1.5) == [True, False, "part", False, False, False, True]
  assert kept(old_per_new=0.0) == [True] + [False] * 6
  assert kept(perplexity="action", low=0.6) == [True] + [False] * 6  # two tokens of 0.74: 0.55 as a product


def test_webrl_pulls_the_log_ratio_of_a_step_to_its_credit():
  """beta 2. Step 0: log-ratios 0.1 + 0.2, credit 1: (0.6 - 1)^2; step 1: -0.1, credit -0.5: (-0.2 + 0.5)^2. Slope 2 beta (beta x - A)."""
  logp = np.array([0.5, 0.4, 0.3])
  ref = np.log(logp) - np.array([0.1, 0.2, -0.1])
  args = dict(chances=logp, push=[1, 1, -0.5], step=[0, 0, 1], ref=ref)
  value, grad, total, _ = run(of_policy(agent("webrl", beta=2.0)), **args)
  assert value == pytest.approx((0.16 + 0.09) / 2, rel=1e-4) and total.count == 2
  np.testing.assert_allclose(grad, [-1.6, -1.6, 1.2], rtol=1e-4)
  value, grad, *_ = run(of_policy(agent("webrl", beta=2.0, average="mean")), **args)  # 2 * 0.15 - 1 = -0.7
  assert value == pytest.approx((0.49 + 0.09) / 2, rel=1e-4)
  np.testing.assert_allclose(grad, [-1.4, -1.4, 1.2], rtol=1e-4)


def test_webrl_as_released_learns_from_good_steps_only(group_of):
  """+1 where jump - 0.05 + r + (the rewards to go at 0.9) >= 0, else -0.6: a fail with a jump of 0.3 is +1, and -0.6 at its end."""
  group = group_of([1, 0])
  scores = said(group, step_value=[[0.5, 0.8, 0.3]] * 2, old_logp=[-0.3] * 2, ref_logp=[-0.3] * 2)
  credits = agent("webrl", variant="code").credit(group, scores)
  np.testing.assert_allclose([c.advantage for c in credits], [[1, 1], [1, -0.6]], atol=1e-6)
  _, grad, *_ = run(of_policy(agent("webrl", variant="code")), chances=[0.5, 0.5], push=[1, -0.6], step=[0, 1], ref=np.log([0.45, 0.45]))
  assert grad[0] < 0 and grad[1] == 0


def test_webrls_reference_changes_with_the_phase():
  assert agent("webrl", reference_every=7).reference == ("phase", 7, 1.0)


@pytest.mark.parametrize("name, knobs, words", [
  ("ppo", {"lam_policy": 1.5}, "agent.lam_policy is 1.5"), ("ppo", {"lam_critic": -0.1}, "agent.lam_critic is -0.1"),
  ("ppo", {"lam_alpha": 0.0}, "agent.lam_alpha"), ("ppo", {"value_low": 1.0}, "agent.value_low is 1.0, wanted at most 0"),
  ("ppo", {"critic_epochs": 0}, "ppo needs its critic"), ("ppo", {"imitation": -1.0}, "agent.imitation"),
  ("ppo", {"value_clip": 0.0}, "agent.value_clip"), ("ppo", {"pretrain_updates": -1}, "agent.pretrain_updates"),
  ("digirl", {"lam": 1.01}, "agent.lam is 1.01, wanted a number from 0 to 1"), ("digirl", {"top": 0.0}, "agent.top is 0.0"),
  ("digirl", {"filter_h": "H"}, "agent.filter_h is H"), ("digirl", {"variant": "book"}, "agent.variant is book, wanted paper or code"),
  ("digirl", {"probability": (0.9, 0.1)}, "two probabilities, rising"), ("webrl", {"beta": 0.0}, "agent.beta is 0.0"),
  ("webrl", {"low": 0.96}, "agent.low is 0.96"), ("webrl", {"high": 1.5}, "agent.high"), ("webrl", {"average": "max"}, "agent.average"),
  ("webrl", {"old_per_new": -1.0}, "agent.old_per_new"), ("webrl", {"lam": math.nan}, "agent.lam is nan"),
  ("ppo", {"value_high": 0.5}, "agent.value_high is 0.5, wanted at least 1"), ("ppo", {"value_low": math.nan}, "agent.value_low is nan"),
  ("ppo", {"imitation": 0.1, "lam_critic": 0.9}, "agent.imitation is 0.1, wanted 0 (off), or more with agent.lam_critic=1"),
  ("ppo", {"pretrain_variance": 1.0}, "agent.pretrain_variance is 1.0"), ("ppo", {"pretrain_fall": -0.1}, "agent.pretrain_fall is -0.1"),
  ("digirl", {"step_cost": -0.05}, "agent.step_cost is -0.05"), ("digirl", {"step_cost": math.nan}, "agent.step_cost is nan"),
  ("gigpo", {"step_weight": -1.0}, "agent.step_weight is -1.0"), ("gigpo", {"discount": 1.1}, "agent.discount is 1.1"),
  ("gigpo", {"step_spread": "sample"}, "agent.step_spread"), ("dpo", {"beta": 0.0}, "agent.beta is 0.0"),
  ("kto", {"weight_pos": -1.0}, "agent.weight_pos"), ("dpo", {"offline": -1}, "agent.offline is -1"),
  ("filtered_imitation", {"store": 0}, "agent.store is 0, wanted 1 or more"),
])  # fmt: skip
def test_bad_knobs_are_one_line(name, knobs, words):
  with pytest.raises(ValueError) as error:
    agent(name, **knobs)
  assert words in str(error.value) and "\n" not in str(error.value)
