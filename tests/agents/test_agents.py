"""Which tries teach and how hard they push: the lesson's numbers by hand, and the contract every algorithm keeps."""

import dataclasses
import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents import arpo, dapo, grpo, gspo, step_grpo
from agents.base import NEEDS, Agent, select_groups
from core.find import available
from core.schema import SUCCESS, Credit, End, EpisodeScores, Group
from core.segments import Total
from core.state import Batch, Scores, StepBatch
from losses.advantages import group_advantages
from rollout.replay import Replay

pytestmark = pytest.mark.usefixtures("compile_quickly")
NAMES = available("agents", having="make")
every = pytest.mark.parametrize("name", NAMES)
RNG = np.random.default_rng(0)


def module(name):
  return importlib.import_module(f"agents.{name}")


def agent(module, **knobs):
  cfg = module.defaults()
  cfg.update(knobs)
  return module.make(cfg)


def pushes(agent, group):
  return [round(float(c.advantage[0]), 3) if len(set(c.advantage.tolist())) == 1 else None for c in agent.credit(group)]


# -- credit: lesson, chapter 1


def test_two_passes_in_eight(group_of):
  """Mean 0.25, population spread sqrt(0.25 * 0.75) = 0.4330: (1 - 0.25) / 0.4330 = +1.732, -0.25 / 0.4330 = -0.577."""
  got = pushes(agent(grpo), group_of([1, 0, 0, 1, 0, 0, 0, 0]))
  assert got == [1.732, -0.577, -0.577, 1.732, -0.577, -0.577, -0.577, -0.577]


def test_an_unreadable_try_is_pushed_down_hardest(group_of):
  """Mean (2 - 1) / 8 = 0.125; squares 2 * 0.765625 + 5 * 0.015625 + 1.265625 = 2.875, / 8, root = 0.59948:
  0.875 / 0.59948 = +1.460, -0.125 / 0.59948 = -0.209, -1.125 / 0.59948 = -1.877."""
  got = pushes(agent(grpo), group_of([1, 0, 0, 1, 0, 0, 0, -1]))
  assert got == [1.46, -0.209, -0.209, 1.46, -0.209, -0.209, -0.209, -1.877]


def test_the_other_spreads(group_of):
  """Sample spread of [1,0,0,1,0,0,0,0]: sqrt(1.5 / 7) = 0.46291: +1.620, -0.540. None: +0.75, -0.25."""
  group = group_of([1, 0, 0, 1, 0, 0, 0, 0])
  assert pushes(agent(grpo, spread="sample"), group)[:2] == [1.62, -0.54]
  assert pushes(agent(grpo, spread="none"), group)[:2] == [0.75, -0.25]


def test_every_step_gets_the_same_push(group_of, episode):
  group = group_of([1, 0], steps=3)
  group.episodes[1] = episode(0, index=1, steps=5)
  a, b = agent(grpo).credit(group)
  assert a.advantage.tolist() == [pytest.approx(1.0, abs=1e-5)] * 3 and b.advantage.tolist() == [pytest.approx(-1.0, abs=1e-5)] * 5
  assert a.keep.tolist() == [True] * 3 and b.keep.tolist() == [True] * 5


def test_an_equal_group_pushes_exactly_nothing_whatever_the_shaping(group_of):
  """Decision 1: equal is decided on raw rewards, so lengths that differ do not make seven fails teach."""
  for raws in ([0] * 7, [1] * 7, [0, 0, -1]):
    group = group_of(raws)
    for i, e in enumerate(group.episodes):
      e.rewards["length"] = -0.1 * i
    assert pushes(agent(grpo), group) == [0.0] * len(raws)


def test_shaping_enters_the_push_of_a_mixed_group(group_of):
  """Rewards 1, 0.5, 0: mean 0.5, spread sqrt(0.5 / 3) = 0.40825: +1.225, 0, -1.225."""
  group = group_of([1, 0, 0])
  group.episodes[1].rewards["format"] = 0.5
  assert pushes(agent(grpo), group) == [1.225, 0.0, -1.225]


def test_a_shorter_pass_is_worth_more_where_the_config_says_so(group_of, episode):
  """Passes of 2 and 4 steps and a fail, alpha 0.5: 1 and 1 - 0.5 (4 - 2) / 4 = 0.75, fail 0. Mean 0.58333, spread
  sqrt((.41667^2 + .16667^2 + .58333^2) / 3) = 0.42492: +0.981, +0.392, -1.373."""
  group = group_of([1, 1, 0])
  group.episodes[1] = episode(1, index=1, steps=4)
  assert pushes(agent(grpo, shortest_path=0.5), group) == [0.981, 0.392, -1.373]
  assert pushes(agent(grpo), group) == [0.707, 0.707, -1.414]


def test_steps_of_a_group_are_pooled(group_of, episode):
  """A pass of 2 steps and a fail of 4: pool 1, 1, 0, 0, 0, 0: mean 1/3, spread sqrt(2/9) = 0.47140: +1.414 and -0.707.
  With an unreadable last step in the fail, -1: mean 1/6, spread sqrt(17/36) = 0.68718: +1.213, -0.243 and -1.698 there."""
  group = group_of([1, 0])
  group.episodes[1] = episode(0, index=1, steps=4)
  assert pushes(agent(step_grpo), group) == [1.414, -0.707]
  group.episodes[1] = episode(-1, index=1, steps=4)
  a, b = agent(step_grpo).credit(group)
  np.testing.assert_allclose(a.advantage, [1.2127, 1.2127], atol=1e-3)
  np.testing.assert_allclose(b.advantage, [-0.2425, -0.2425, -0.2425, -1.6977], atol=1e-3)


# -- selection: decisions 1, 3, 5, 7, 8


def choose(groups, stored=(), use_replay=True, drop_equal=True, size=1):
  replay = Replay(size)
  for e in stored:
    assert replay.add(e)
  before = sum(len(g.episodes) for g in groups)
  kept, dropped, swapped = select_groups(groups, replay, RNG, use_replay=use_replay, drop_equal=drop_equal)
  fresh = sum(not e.replayed for g in kept for e in g.episodes)
  assert before == fresh + sum(dropped.values())  # whatever is dropped is counted, once
  return kept, dropped, swapped


def raws(group):
  return [e.raw_reward for e in group.episodes]


def test_equal_groups_are_dropped_and_counted_by_kind(group_of):
  groups = [group_of([1, 1, 1]), group_of([0, 0, 0]), group_of([1, 0, 1]), group_of([-1, -1, -1])]
  kept, dropped, swapped = choose(groups)
  assert [raws(g) for g in kept] == [[1, 0, 1]] and dropped == {"all_pass": 3, "all_fail": 6} and swapped == 0


def test_plain_fails_beside_an_unreadable_try_are_all_fail(group_of):
  """Decision 3, N13: the plain fails would get +0.378 and learn to loop; without a stored success the group goes."""
  kept, dropped, _ = choose([group_of([0, 0, 0, 0, 0, 0, 0, -1])])
  assert kept == [] and dropped == {"all_fail": 8}
  (group,), _, _ = choose([group_of([0, 0, -1])], drop_equal=False)
  assert pushes(agent(grpo), group) == [0.0, 0.0, 0.0]  # kept in the batch, but nothing is pushed up


@pytest.mark.parametrize("raws_, slot", [([0, 0, 0], 0), ([-1, 0, 0], 1), ([-1, -1, 0], 2), ([-1, -1, -1], 0)])
def test_a_stored_success_replaces_the_first_plain_fail_else_the_first_try(group_of, episode, raws_, slot):
  (group,), dropped, swapped = choose([group_of(raws_)], [episode(1, group="old", index=5, version=3)])
  assert swapped == 1 and dropped == {"replaced": 1}
  assert [e.replayed for e in group.episodes] == [i == slot for i in range(3)]
  want = list(raws_)
  want[slot] = 1
  assert raws(group) == want and group.kind == "mixed"


def test_one_row_of_one_group_is_replaced_and_all_of_it(group_of, episode):
  """N25: only group 2 is all-fail with a success of its own task stored; record, reward and version are the stored one's."""
  stored = episode(1, task="c", group="old", version=3, written=4)
  groups = [group_of([1, 0], "a", "a"), group_of([0, 0], "b", "b"), group_of([0, 0], "c", "c", version=9)]
  kept, dropped, swapped = choose(groups, [stored])
  assert swapped == 1 and [g.id for g in kept] == ["a", "c"] and dropped == {"all_fail": 2, "replaced": 1}
  swapped_in, sibling = kept[1].episodes
  assert swapped_in.records is stored.records and swapped_in.oldest_version == 3 and swapped_in.rewards == {SUCCESS: 1.0}
  assert not sibling.replayed and sibling.oldest_version == 9
  assert not any(e.replayed for e in groups[2].episodes)  # what was gathered stays as it was


def test_no_replay_of_another_task_or_when_off(group_of, episode):
  stored = [episode(1, task="other")]
  assert choose([group_of([0, 0])], stored)[1:] == ({"all_fail": 2}, 0)
  assert choose([group_of([0, 0])], [episode(1)], use_replay=False)[1:] == ({"all_fail": 2}, 0)
  assert choose([group_of([1, 1])], [episode(1)])[1:] == ({"all_pass": 2}, 0)  # and only for groups that all failed


def test_the_latest_success_is_kept_with_size_one_and_any_of_the_last_with_more(group_of, episode):
  stored = [episode(1, version=v) for v in range(5)]
  versions = lambda size: {choose([group_of([0, 0])], stored, size=size)[0][0].episodes[0].oldest_version for _ in range(60)}
  assert versions(1) == {4}
  assert versions(3) == {2, 3, 4}


def test_infra_errors_leave_before_mean_and_spread(group_of):
  """Decision 5, E1: [1, 0, 1, error] is [1, 0, 1]: +0.707, -1.414, +0.707; an error taken for a fail would give +-1."""
  (group,), dropped, _ = choose([group_of([1, 0, 1, None])])
  assert dropped == {"infra_error": 1} and [e.try_index for e in group.episodes] == [0, 1, 2]
  assert pushes(agent(grpo), group) == [0.707, -1.414, 0.707]


def test_what_errors_leave_of_a_group(group_of):
  assert choose([group_of([None] * 4)]) == ([], {"infra_error": 4}, 0)
  assert choose([group_of([1, None, None])]) == ([], {"infra_error": 2, "alone": 1}, 0)
  assert choose([group_of([1, 1, None])]) == ([], {"infra_error": 1, "all_pass": 2}, 0)
  assert choose([group_of([None, 0, 0])], use_replay=False)[1] == {"infra_error": 1, "all_fail": 2}


def test_an_error_is_not_rescued_but_its_siblings_are(group_of, episode):
  (group,), dropped, swapped = choose([group_of([None, 0, 0])], [episode(1)])
  assert raws(group) == [1, 0] and dropped == {"infra_error": 1, "replaced": 1} and swapped == 1


def test_dynamic_sampling_looks_at_success_before_shaping(group_of):
  """Decision 8: shaping that differs does not save an all-fail group, nor condemn a mixed one whose sums are equal."""
  fails, mixed = group_of([0, 0, 0]), group_of([1, 0])
  for i, e in enumerate(fails.episodes):
    e.rewards["format"] = 0.3 * i
  mixed.episodes[1].rewards["format"] = 1.0
  kept, dropped, _ = choose([fails, mixed])
  assert kept[0].episodes == mixed.episodes and dropped == {"all_fail": 3}


def test_everything_off_is_the_plain_rule(group_of):
  """Replay and dynamic sampling off: every group stays as it came, and its push is the textbook's, bit for bit."""
  plain = agent(grpo, replay=0, dynamic_sampling=False)
  replay = Replay(plain.remember)
  groups = [group_of(r, name=str(i)) for i, r in enumerate([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, -1, 0, 0]])]
  assert not replay.add(groups[0].episodes[0])
  kept, dropped, swapped = plain.select(groups, replay, RNG)
  assert [g.episodes for g in kept] == [g.episodes for g in groups] and dropped == {} and swapped == 0
  reward = np.array([e.reward for g in groups for e in g.episodes], np.float32)
  want = group_advantages(reward, np.repeat(np.arange(4), 4), 4)
  got = [c.advantage[0] for g in kept for c in plain.credit(g)]
  np.testing.assert_array_equal(got, want)


# -- what the algorithms add


def test_dapo_keeps_cut_off_tries_out_of_the_loss_but_in_the_group(group_of, episode):
  """Decision 4: [1, 0, 0 cut off, 0 cut off]: mean 0.25, spread 0.433, all four pushed alike, two of them masked."""
  group = group_of([1, 0, 0, 0])
  group.episodes[1] = episode(0, index=1, end=End.TERMINATED)
  credits = agent(dapo).credit(group)
  assert [round(float(c.advantage[0]), 3) for c in credits] == [1.732, -0.577, -0.577, -0.577]
  assert [c.keep.tolist() for c in credits] == [[True] * 2, [True] * 2, [False] * 2, [False] * 2]
  assert all(c.keep.all() for c in agent(dapo, truncation="learn").credit(group))
  assert all(c.keep.all() for c in agent(grpo).credit(group))


def test_published_bands_and_sizes():
  """Lesson, chapters 4 and 5; ARPO's and DAPO's papers."""
  band = lambda m: (m.defaults().clip_low, m.defaults().clip_high)
  assert [band(m) for m in (grpo, dapo, arpo, gspo)] == [(0.2, 0.28), (0.2, 0.28), (0.2, 0.3), (3e-4, 4e-4)]
  assert (arpo.defaults().replay, grpo.defaults().replay, dapo.defaults().replay) == (8, 1, 0)
  assert dapo.defaults().group_size == 16 and grpo.defaults().eps == 1e-6 and grpo.defaults().spread == "population"


@every
def test_critic_losses_are_totals_too(name):
  """A critic's own loss: a gradient where it is asked, none at masked tokens or padded steps, whatever stands there."""
  for phase in agent(module(name)).phases:
    if phase.params_key == "policy":
      continue
    mask = np.array([True, True, False, True, False])
    if agent(module(name)).critics[phase.params_key] == "trunk":
      _, batch = flat_batch([0.0] * 5, [0.0] * 5, [0, 0, 0, 1, 1], mask=mask)
      batch = dataclasses.replace(batch, return_=np.array([[1, 1, 0, -1, 0]], np.float32))
      dirty = dataclasses.replace(batch, return_=np.where(mask, batch.return_, np.nan).astype(np.float32))
      scores = lambda x: Scores(None, None, x[None])
    else:
      frames, text = np.zeros((5, 2, 1, 1, 3), np.uint8), np.zeros((5, 2), np.int32)
      batch = StepBatch(frames, text, np.array([1, 1, 0, 0, 0], np.float32), mask)
      dirty = dataclasses.replace(batch, label=np.where(mask, batch.label, np.nan).astype(np.float32))
      scores = lambda x: Scores(None, None, jnp.stack([x, x], axis=1))

    def loss(x, batch, scores=scores, phase=phase):
      total, metrics = phase.loss(scores(x), batch)
      return total.sum, (total, metrics)

    x = jnp.asarray([0.3, -0.2, 0.1, 0.4, 0.0])
    (_, (total, metrics)), grad = jax.value_and_grad(loss, has_aux=True)(x, batch)
    assert isinstance(total, Total) and total.count == 3 and f"{phase.params_key}/loss" in metrics
    assert np.asarray(grad)[mask].all() and not np.asarray(grad)[~mask].any()
    (_, (total2, _)), grad2 = jax.value_and_grad(loss, has_aux=True)(jnp.where(mask, x, jnp.inf), dirty)
    assert total2 == total and np.array_equal(grad, grad2)


def flat_batch(log_ratio, advantage, episode_id, mask=None, behaviour=-1.0, episodes=2):
  """One row: scores with log-probability behaviour + log_ratio, and the batch they belong to."""
  n = len(log_ratio)
  mask = np.ones((1, n), bool) if mask is None else np.array([mask], bool)
  logp = np.full((1, n), behaviour, np.float32)
  zeros = np.zeros((1, n), np.int32)
  batch = Batch(
    tokens=zeros, segment_ids=zeros + 1, positions=zeros[None],
    episode_id=np.array([episode_id]), step_id=np.array([episode_id]), is_action=mask,
    behaviour_logp=logp, version=zeros, advantage=np.array([advantage], np.float32), image_slot=zeros - 1, images=None,
    episode_valid=np.ones(episodes, bool), ref_logp=logp, old_logp=logp, old_value_logit=np.zeros_like(logp), return_=np.zeros_like(logp),
    num_episodes=episodes, num_steps=2, row_actions=n,
  )  # fmt: skip
  score = lambda ratios: Scores(logp + jnp.asarray([ratios], jnp.float32), jnp.full((1, n), 0.5), jnp.zeros((1, n)))
  return score, batch


def differentiate(phase, score):
  """(log-ratios, batch) -> ((sum, (total, metrics)), gradient of the sum in the log-ratios)."""

  def loss(ratios, batch):
    total, metrics = phase.loss(score(ratios), batch)
    return total.sum, (total, metrics)

  return jax.value_and_grad(loss, has_aux=True)


def run_loss(agent, log_ratio, advantage, episode_id, **kw):
  score, batch = flat_batch(log_ratio, advantage, episode_id, **kw)
  (_, (total, metrics)), grad = differentiate(agent.phases[0], score)(jnp.asarray(log_ratio, jnp.float32), batch)
  return float(total.mean()), np.asarray(grad), total, metrics


def test_grpo_clips_each_token():
  """N7: log-ratio +0.5 is 1.6487, clipped to 1.28 for a push up (no gradient), free for a push down; the mean is over tokens."""
  value, grad, total, metrics = run_loss(agent(grpo), [0.5, 0.5, 0.0], [1.0, -1.0, 1.0], [0, 0, 1])
  assert value == pytest.approx((-1.28 + np.exp(0.5) - 1.0) / 3, abs=1e-5) and total.count == 3
  np.testing.assert_allclose(grad, [0, np.exp(0.5), -1.0], atol=1e-5)
  assert metrics["policy/clipped_share"].mean() == pytest.approx(1 / 3)
  assert metrics["policy/ratio_mean"].mean() == pytest.approx((2 * np.exp(0.5) + 1) / 3, abs=1e-5)
  assert metrics["policy/entropy"].mean() == pytest.approx(0.5)
  assert metrics["policy/drift_kl"].mean() == pytest.approx(2 * (np.exp(0.5) - 1 - 0.5) / 3, abs=1e-5)


def test_grpo_dual_clip_bounds_a_push_down_and_zero_turns_it_off():
  """Log-ratio 2 is 7.389: with a push of -1 the loss stops at 3 (no gradient), without the dual clip it is 7.389."""
  value, grad, *_ = run_loss(agent(grpo), [2.0], [-1.0], [0])
  assert value == pytest.approx(3.0) and grad[0] == 0.0
  value, grad, *_ = run_loss(agent(grpo, dual_clip=0.0), [2.0], [-1.0], [0])
  assert value == pytest.approx(np.exp(2), abs=1e-4) and grad[0] == pytest.approx(np.exp(2), abs=1e-4)


def test_gspo_has_one_ratio_per_episode():
  """N20: +0.4 and -0.4 average to ratio 1, so nothing is clipped, though either token alone would be; the third is masked."""
  value, grad, total, metrics = run_loss(agent(gspo), [0.4, -0.4, 3.0], [1.0, 1.0, 1.0], [0, 0, 0], mask=[1, 1, 0])
  assert value == pytest.approx(-1.0) and total.count == 1 and metrics["policy/clipped_share"].mean() == 0.0
  np.testing.assert_allclose(grad, [-0.5, -0.5, 0.0], atol=1e-6)


@pytest.mark.parametrize("drift, push, clipped", [(5e-4, 1.0, 1), (2e-4, 1.0, 0), (-4e-4, -1.0, 1), (-2e-4, -1.0, 0), (5e-4, -1.0, 0)])
def test_gspo_band(drift, push, clipped):
  """N31: 1.0005 with a push up lies outside 1 + 4e-4, 1.0002 inside; below, 1 - 3e-4 for a push down."""
  _, grad, _, metrics = run_loss(agent(gspo), [drift, drift], [push, push], [0, 0])
  assert float(metrics["policy/clipped_share"].mean()) == clipped and (grad == 0).all() == bool(clipped)


def test_gspo_honours_its_dual_clip():
  value, grad, *_ = run_loss(agent(gspo, dual_clip=3.0), [2.0, 2.0], [-1.0, -1.0], [0, 0])
  assert value == pytest.approx(3.0) and (grad == 0).all()
  assert run_loss(agent(gspo), [2.0, 2.0], [-1.0, -1.0], [0, 0])[0] == pytest.approx(np.exp(2), abs=1e-4)


# -- the contract


def test_the_folder_holds_the_algorithms_of_the_lesson():
  wanted = "arpo cispo dapo digirl dpo dr_grpo filtered_imitation gigpo grpo gspo gspo_token kto ppo rloo webrl"
  assert set(wanted.split()) <= set(NAMES) and not {"base", "objective", "values"} & set(NAMES)


@every
def test_an_algorithm_file_says_where_it_comes_from_and_how_it_differs(name):
  text = module(name).__doc__
  assert "Paper: " in text and "arXiv" in text and "Differs from the paper" in text
  assert len(pathlib.Path(module(name).__file__).read_text().splitlines()) <= 120


@every
def test_defaults_make_an_agent(name):
  cfg = module(name).defaults()
  assert cfg.name == name
  made = module(name).make(cfg)
  assert isinstance(made, Agent) and made.phases and made.remember == cfg.get("replay", 0)
  assert made.needs <= NEEDS
  for phase in made.phases:
    assert phase.epochs >= 1 and phase.minibatch >= 1 and phase.data in ("batch", "store")
    assert phase.params_key == "policy" or phase.params_key in made.critics
  assert made.store > 0 or not any(p.data == "store" for p in made.phases) and not made.offline
  assert ("ref_logp" in made.needs) == (made.reference is not None)
  assert module(name).defaults() == cfg  # making one changes no default


def scores_of(group):
  """What the models might say of a group: a critic that leans to 0.4, a policy and a reference at the sampled chances."""
  records = lambda e: [{"old_logp": r.logp, "ref_logp": r.logp, "value_logit": np.where(r.is_action, -0.4, 0).astype(np.float32)}
                       for r in e.records]  # fmt: skip
  value = lambda e: np.linspace(0.3, 0.6, len(e.steps) + 1).astype(np.float32)
  return [EpisodeScores(records(e), value(e), 0.4) for e in group.episodes]


@every
def test_what_an_algorithm_needs_and_does_not_get_stops_it(name, group_of):
  made = agent(module(name))
  if made.needs & {"value_logit", "step_value", "task_value"}:
    with pytest.raises(ValueError, match="needs .* before credit"):
      made.credit(group_of([1, 0]))
  else:
    assert len(made.credit(group_of([1, 0]), scores_of(group_of([1, 0])))) == 2


@every
def test_credit_has_a_number_for_every_step(name, group_of, episode):
  made = agent(module(name))
  group = group_of([1, 0, 0, -1])
  group.episodes[2] = episode(0, index=2, steps=5)
  credits = made.credit(group, scores_of(group) if made.needs else None)
  for e, credit in zip(group.episodes, credits, strict=True):
    assert isinstance(credit, Credit) and credit.advantage.shape == credit.keep.shape == (len(e.steps),)
    assert credit.advantage.dtype == np.float32 and np.isfinite(credit.advantage).all() and credit.keep.dtype == bool
    keep = made.keep(credit)
    assert keep.shape == (len(e.steps),) and keep.dtype == bool
  # the pass is pushed up; the unreadable try down, or left out where passes are copied
  assert credits[0].advantage.max() > 0
  assert credits[3].advantage.min() < 0 or not credits[3].keep.any()


@every
def test_selection_accounts_for_every_try(name, group_of):
  made = agent(module(name))
  groups = [group_of(r, name=str(i)) for i, r in enumerate([[1, 0], [0, 0], [1, 1], [None, 1], [None, None], [1, 0, None]])]
  kept, dropped, swapped = made.select(groups, Replay(made.remember), RNG)
  assert sum(len(g.episodes) for g in kept) + sum(dropped.values()) == 13 and swapped == 0
  assert {"0", "5"} <= {g.id for g in kept} and all(e.scored for g in kept for e in g.episodes)
  assert all(isinstance(g, Group) for g in kept)


@every
def test_losses_are_totals_that_masked_places_do_not_reach(name):
  mask = [True, True, False, True, False]
  for phase in agent(module(name)).phases:
    if phase.params_key != "policy":
      continue  # critics: test_critic_losses_are_totals_too
    score, batch = flat_batch([0.1, -0.05, 0.2, 0.01, 0.3], [1.0, 1.0, 1.0, -1.0, -1.0], [0, 0, 0, 1, 1], mask=mask)
    run = jax.jit(differentiate(phase, score))
    ratios = np.array([0.1, -0.05, 0.2, 0.01, 0.3], np.float32)
    (_, (total, metrics)), grad = jax.device_get(run(ratios, batch))
    assert isinstance(total, Total) and total.sum.shape == total.count.shape == () and total.sum.dtype == jnp.float32
    assert total.count > 0 and all(isinstance(m, Total) for m in metrics.values())
    assert grad[[0, 1, 3]].any() and not grad[[2, 4]].any()
    logp, push = np.where(mask, batch.behaviour_logp, np.nan), np.where(mask, batch.advantage, 1e30)
    dirty = dataclasses.replace(batch, behaviour_logp=logp.astype(np.float32), advantage=push.astype(np.float32))
    (_, (total2, metrics2)), grad2 = jax.device_get(run(np.where(mask, ratios, np.inf), dirty))
    assert total2 == total and np.array_equal(grad, grad2) and metrics2 == metrics


BAD = [
  ({"group_size": 1}, "agent.group_size is 1, wanted 2 or more"), ({"group_size": 0}, "agent.group_size is 0"),
  ({"spread": "std"}, "agent.spread is std, wanted one of population, sample"), ({"eps": 0.0}, "agent.eps is 0.0"),
  ({"eps": float("nan")}, "agent.eps is nan"), ({"clip_low": 0.0}, "agent.clip_low"), ({"clip_low": 1.0}, "agent.clip_low"),
  ({"clip_low": -0.2}, "agent.clip_low"), ({"clip_high": 0.0}, "agent.clip_high"), ({"clip_high": float("nan")}, "agent.clip_high"),
  ({"dual_clip": 0.5}, r"agent.dual_clip is 0.5, wanted 0 \(off\)"), ({"dual_clip": -3.0}, "agent.dual_clip"),
  ({"replay": -1}, "agent.replay is -1"), ({"epochs": 0}, "agent.epochs is 0"), ({"minibatch": 0}, "agent.minibatch is 0"),
]  # fmt: skip


def has(name, knobs):
  """Whether an algorithm has these knobs, and means the same by them."""
  cfg = module(name).defaults()
  own_band = {"clip_low", "clip_high"} & set(knobs) and cfg.get("surrogate") != "clip"
  alone = "group_size" in knobs and knobs["group_size"] == 1 and "spread" not in cfg and name not in ("dpo", "kto")
  return set(knobs) <= set(cfg.keys()) and not own_band and not alone


@pytest.mark.parametrize("name, knobs, words", [(n, k, w) for n in NAMES for k, w in BAD if has(n, k)])
def test_bad_knobs_stop_with_one_line(name, knobs, words):
  with pytest.raises(ValueError, match=words) as e:
    agent(module(name), **knobs)
  assert "\n" not in str(e.value)


@pytest.mark.parametrize("knobs", [{"clip_low": 0.2, "clip_high": 0.28}, {"clip_low": 0.2}, {"clip_high": 0.28}])
def test_gspo_with_a_token_band_is_refused(knobs):
  with pytest.raises(ValueError, match="gspo clips episode ratios, wanted 3e-4, 4e-4"):
    agent(gspo, **knobs)


@pytest.mark.parametrize("made", [grpo, dapo, arpo])
def test_token_agents_with_an_episode_band_are_refused(made):
  with pytest.raises(ValueError, match="a band for episode ratios"):
    agent(made, clip_low=3e-4, clip_high=4e-4)


def test_dapo_truncation_is_one_of_two():
  with pytest.raises(ValueError, match="agent.truncation is drop, wanted"):
    agent(dapo, truncation="drop")
