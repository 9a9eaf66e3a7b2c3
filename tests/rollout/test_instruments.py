"""The curves and tables of a run, each number by hand."""

import collections

import numpy as np
import pytest

from core.schema import Group, Screen
from core.segments import Total
from losses.value import return_moments
from rollout import instruments
from rollout.gather import Gathered


def test_shares_of_groups(group_of):
  """L1: 8 groups: 3 all-pass, 4 all-fail (one with an unreadable try in it), 1 mixed: 0.375, 0.5, 0.125."""
  raws = [[1, 1]] * 3 + [[0, 0]] * 3 + [[0, -1]] + [[1, 0]]
  got = instruments.group_curves([group_of(r) for r in raws])
  assert (got["groups/all_pass"], got["groups/all_fail"], got["groups/mixed"]) == (0.375, 0.5, 0.125)
  assert got["groups/spread"] == pytest.approx((0.5 + 0.5) / 8)  # [0, -1] and [1, 0] have a spread of 0.5, the others 0


def test_distinct_first_actions(group_of, episode):
  """Three different first texts among four tries, and one among two: mean 2."""
  first = ("tap(0, 0)", "wait()", "tap(0, 0)", "press(BACK)")
  a = Group("a", "t", [episode(0, index=i, first=t) for i, t in enumerate(first)])
  assert instruments.group_curves([a, group_of([0, 0])])["groups/distinct_first_actions"] == 2.0


def test_groups_without_a_score_are_no_groups(group_of):
  assert instruments.group_curves([group_of([None, None])]) == {} == instruments.group_curves([])
  got = instruments.group_curves([group_of([None, 1, None]), group_of([0, 0]), group_of([None, None])])
  assert (got["groups/all_pass"], got["groups/all_fail"], got["groups/mixed"]) == (0.5, 0.5, 0.0)


def test_curves_of_episodes(episode):
  """Rewards 1, 0 (cut off), -1 and an infra error: mean 0 over the three scored, success 1/3; ages 5 - 5, 5 - 4, 5 - 3."""
  episodes = [episode(1, version=5, steps=2), episode(0, version=4, steps=5), episode(-1, version=3, steps=1), episode(None, version=0)]
  got = instruments.episode_curves(episodes, 5)
  want = {"reward/mean": 0.0, "reward/success": 1 / 3, "episodes/steps": 8 / 3, "episodes/truncated": 1 / 3, "episodes/unreadable": 1 / 3}
  want |= {"episodes/infra_error": 0.25, "episodes/age_mean": 1.0, "episodes/age_max": 2.0}
  assert {k: got[k] for k in want} == pytest.approx(want)


def test_lengths_come_from_raw_counts(episode):
  """L7: 10 and 20 steps, the longer one cut off: mean 15, half truncated, whatever the loss masks."""
  got = instruments.episode_curves([episode(1, steps=10), episode(0, steps=20)], 0)
  assert (got["episodes/steps"], got["episodes/truncated"]) == (15.0, 0.5)


def test_attempts_that_broke_and_were_run_again_count(episode):
  """Two episodes, one of which broke twice before: 2 of 4 attempts were infra errors."""
  episodes = [episode(1), episode(0)]
  episodes[1].notes["faults"] = ["ResetFailed", "ResetFailed"]
  assert instruments.episode_curves(episodes, 0)["episodes/infra_error"] == 0.5


def test_nothing_scored_is_no_score(episode):
  assert instruments.episode_curves([episode(None)], 0) == {"episodes/infra_error": 1.0}
  assert instruments.episode_curves([], 0) == {"episodes/infra_error": 0.0}


def test_a_judge_beside_the_checker_is_compared_with_it(episode):
  """(checker, judge): 1 1, 1 1, 1 0, 0 1, 0 1, 0 0, and one that was not asked: they agree on 3 of 6; it passes 2 of the checker's 3
  passes and 2 of its 3 fails. The other way round it would be 1 of 2 both times."""
  episodes = [episode(c, index=i) for i, c in enumerate((1, 1, 1, 0, 0, 0, 0))]
  for e, judge in zip(episodes, (1.0, 1.0, 0.0, 1.0, 1.0, 0.0)):
    e.notes["judge"] = judge
  got = instruments.episode_curves(episodes, 0)
  assert [got[f"judge/{name}"] for name in ("agreement", "true_pass_rate", "false_pass_rate")] == pytest.approx([0.5, 2 / 3, 2 / 3])
  assert "judge/agreement" not in instruments.episode_curves(episodes[6:], 0)


def test_entropy_of_popup_screens_stands_apart(episode):
  """Per token: 0.5 nats over 2 tokens on plain screens; 0.5 over 4 where a pop-up is shown. The mean would hide a collapse."""
  got = instruments.episode_curves([episode(1), episode(0, popup="notify/top", written=4)], 0)
  assert (got["policy/entropy_plain"], got["policy/entropy_popup"]) == (0.25, 0.125)
  assert got["policy/entropy_sampled"] == pytest.approx(2.0 / 12)  # 4 steps of 0.5 nats over 2 + 2 + 4 + 4 tokens
  assert "policy/entropy_popup" not in instruments.episode_curves([episode(1)], 0)


def test_totals_of_an_update_are_added_and_divided_once():
  """Steps of 3 and 1 tokens: (6 + 4) / 4 = 2.5, not the mean of 2 and 4; the mismatch is the first step's, of its 2 fresh tokens:
  0.3 / 2; without fresh tokens there is none."""

  def step(total, count, drift, loss):
    totals = {"policy/entropy": Total(np.float32(total), np.float32(count)), "policy/drift_kl": Total(np.float32(drift), np.float32(count))}
    totals["policy/mismatch_kl"] = Total(np.float32(drift), np.float32(max(count - 1, 0)))
    return totals | {"loss": loss, "grad_norm": 2 * loss, "skipped": 0, "empty": count == 0}

  got = instruments.learned([("policy", [step(6, 3, 0.3, 1.0), step(4, 1, 0.9, 2.0)]), ("critic", [])])
  assert got["policy/entropy"] == 2.5 and got["policy/drift_kl"] == pytest.approx(0.3)
  assert got["policy/mismatch_kl"] == pytest.approx(0.15) and (got["policy/loss"], got["policy/grad_norm"]) == (1.5, 3.0)
  assert "policy/mismatch_kl" not in instruments.learned([("policy", [step(4, 1, 0.9, 2.0)])])
  got = instruments.learned([("policy", [step(6, 3, 0.3, 1.0), step(0, 0, 0, 0.0), step(0, 0, 0, 0.0)])])
  assert got["policy/empty_steps"] == 2.0 and "policy/empty_steps" not in instruments.learned([("policy", [step(6, 3, 0.3, 1.0)])])
  assert instruments.learned([]) == {} and instruments.learned([("policy", [step(0, 0, 0, 0.0)])])["policy/entropy"] == 0.0


def test_a_critics_moments_are_joined_before_they_are_divided():
  """Values (0, 1) for returns (0, 1), then (1, 0) for (0, 1): errors 0, 0, -1, 1, variance 1/2; returns' variance 1/4: 1 - 2 = -1.
  The mean of the two minibatches' own numbers would be (1 - 3) / 2 = -1 as well, so the third has other returns: see below."""
  moments = lambda v, r: return_moments(np.array(v, np.float32), np.array(r, np.float32), np.ones(len(v), bool))
  said = lambda *sets: [{"critic/explained_variance": moments(v, r), "loss": 1.0, "grad_norm": 1.0, "empty": False} for v, r in sets]
  got = instruments.learned([("critic", said(([0, 1], [0, 1]), ([1, 0], [0, 1])))])
  assert got["critic/explained_variance"] == pytest.approx(-1.0) and got["critic/loss"] == 1.0 and "policy/loss" not in got
  # returns (0, 1) and (1, 1), values all 1/2: errors -.5, .5, .5, .5: variance 3/16, returns' 3/16: 0; the second set alone is undefined
  got = instruments.learned([("critic", said(([0.5, 0.5], [0, 1]), ([0.5, 0.5], [1, 1])))])
  assert got["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
  # all returns 1, nothing to explain: no point on the curve, since 0 would read as "no better than the mean"
  assert "critic/explained_variance" not in instruments.learned([("critic", said(([0.5, 0.5], [1, 1])))])


def test_what_an_update_dropped_is_a_share_of_what_it_gathered(group_of):
  groups = [group_of([1, 0]), group_of([0, 0])]
  got = Gathered(kept=groups[:1], groups=groups, episodes=[e for g in groups for e in g.episodes], swapped=1)
  got.dropped.update({"all_fail": 2, "age": 1})
  curves = instruments.update_curves(got, [], [0.5, 1.0], version=0, seconds=30.0)
  assert (curves["episodes/dropped_all_fail"], curves["episodes/dropped_age"], curves["replay/used"]) == (0.5, 0.25, 1.0)
  assert curves["rate/episodes_per_minute"] == 8.0 and curves["rate/useful_tokens"] == 0.75
  assert curves["rate/action_tokens_per_second"] == pytest.approx(16 / 30)  # 4 episodes of 2 steps of 2 tokens
  assert curves["groups/mixed"] == 0.5 and curves["reward/success"] == 0.25


def test_chapter4_where_the_time_goes(group_of):
  """The lesson's rates: a full pass of 128 x 8 = 1,024 episodes in 6 hours is 21 s an episode on 8 computers, in 1.2 hours 4.2 s on 256,
  five times as many a minute, though a batch took 19 / 3 = 6.3 times longer; 29.6 tokens a second are 33.8 ms each, so that a step of 4.0 s
  is 118 tokens and 15 of them take 60 s."""
  (group,) = [group_of([1] + [0] * 7)]
  tokens = sum(e.action_tokens for e in group.episodes)
  rates = lambda n, seconds: instruments.update_curves(Gathered(groups=[group], episodes=group.episodes * n), [], [], 0, seconds)
  few, many = (60 / rates(128, hours * 3600.0)["rate/episodes_per_minute"] for hours in (6, 1.2))
  assert few == pytest.approx(21, abs=0.1) and many == pytest.approx(4.2, abs=0.05) and few / many == pytest.approx(5)
  apart, one = (rates(1, 8 / a_minute * 60)["rate/episodes_per_minute"] for a_minute in (1.74, 0.74))
  assert apart / one == pytest.approx(2.35, abs=5e-3)
  speed = rates(1, tokens / 29.6)["rate/action_tokens_per_second"]
  assert 1000 / speed == pytest.approx(33.8, abs=0.05) and 15 * round(4.0 * speed) / speed == pytest.approx(60, abs=0.3)


def test_a_strip_shows_every_screen_and_text(episode):
  e = episode(0, steps=3)
  pixels, text = instruments.strip(e)
  assert pixels.shape == (24, 120, 3)
  assert all(np.array_equal(pixels[:, 40 * h : 40 * h + 40], s.screen.pixels) for h, s in enumerate(e.steps))
  assert text.split("\n\n") == ["**open the red mug** -> steps, rewards {'success': 0.0}", "1. wait()", "2. wait()", "3. wait()"]


def test_a_strip_of_an_episode_that_never_began(episode):
  pixels, text = instruments.strip(episode(None, steps=0))
  assert pixels.ndim == 3 and pixels.dtype == np.uint8 and "ResetFailed" in text


def test_a_group_is_a_picture_of_rows(episode):
  """Two tries of 2 and 1 steps on screens of 4 x 6: rows of 4 pixels between white lines, a bar of 40 pixels before the screens. The
  push of the second is half the first's: 40 and 20 pixels, without the bar's own edge of 2 above and below nothing is left in between."""
  a, b = episode(1, steps=2, index=0), episode(0, steps=1, index=1)
  for e, grey in ((a, 100), (b, 200)):
    for s in e.steps:
      s.screen = Screen.of(np.full((8, 6, 3), grey, np.uint8))
  a.advantage, b.advantage = 1.0, -0.5
  pixels, text = instruments.group_picture(Group("g", "t", [a, b]))
  assert pixels.shape == (20, 40 + 12, 3) and pixels.dtype == np.uint8
  assert (pixels[1:9, 40:52] == 100).all() and (pixels[11:19, 40:46] == 200).all() and (pixels[11:19, 46:] == 255).all()
  assert (pixels[3:7, :40] == instruments.PASS).all() and (pixels[13:17, :20] == instruments.FAIL).all()
  assert (pixels[13:17, 20:40] == 255).all() and (pixels[:, :40][[0, 1, 9, 10, 11, 19]] == 255).all()
  assert "1. pass" in text and "push +1.000" in text and "2. fail" in text and "push -0.500" in text


def test_large_screens_are_shown_small(episode):
  one = episode(1, steps=1)
  one.steps[0].screen = Screen.of(np.zeros((1080, 1920, 3), np.uint8))
  pixels, _ = instruments.group_picture(Group("g", "t", [one]))
  assert pixels.shape == (92, 40 + 160, 3)  # every twelfth pixel: 160 x 90, and a line above and below


def score(success, **kw):
  base = {"success": success, "attempted": 384, "n_tasks": 96, "noise_points": 2.5, "unreadable": 0.125, "entropy_popup": None,
          "entropy_plain": 0.5, "by_popup": {"none": [90, 100], "notify": [5, 20]}}  # fmt: skip
  return base | kw


def test_the_summary_names_the_right_evaluation():
  """Eight different fractions, so that no two can be confused."""
  names = ("copying_clean", "copying_held_out", "copying_clean_greedy", "copying_held_out_greedy")
  evals = {name: score(0.1 + i / 100) for i, name in enumerate(names)}
  final = {name: score(0.8 + i / 100, noise_points=1.5) for i, name in enumerate(("held_out", "held_out_greedy", "clean", "in_domain"))}
  got = instruments.summary(evals, final)
  want = {"clean": 0.1, "copying": 0.11, "clean_greedy": 0.12, "copying_greedy": 0.13, "practice": 0.8, "practice_greedy": 0.81}
  want |= {"practice_clean": 0.82, "in_domain": 0.83, "n": 384, "n_tasks": 96, "noise_points": 1.5, "copying_noise_points": 2.5}
  assert {k: got[k] for k in want} == pytest.approx(want)
  s = got | {"config": "osworld", "agent": "arpo", "seed": 3, "seconds": 60.0, "all_fail_end": 0.25, "all_pass_end": 0.5}
  table = instruments.table(s, evals["copying_held_out"], final["held_out"])
  assert "osworld, agent arpo, seed 3: copying  11.0% -> practice  80.0% on 96 held-out tasks, n = 384 episodes, " in table
  assert "+- 1.5 points (+69.0 points, 60 s)" in table
  rows = {line[:34].strip(): line[34:].split() for line in table.splitlines()}
  assert rows["with pop-ups"] == ["11.0%", "80.0%"] and rows["without pop-ups"] == ["10.0%", "82.0%"]
  assert rows["with pop-ups, greedy"] == ["13.0%", "81.0%"] and rows["unreadable"] == ["12.5%", "12.5%"]
  assert rows["episodes with notify"] == "25.0% of 20 25.0% of 20".split() and rows["episodes without a pop-up"][0] == "90.0%"


def test_curves_of_two_processes_are_those_of_all_their_episodes(group_of, monkeypatch):
  """Fault S7: 3 of 4 passes in one process and 0 of 4 in the other are 3 of 8 in both."""
  halves = []
  for name, raws in (("a", [1, 1, 0, 1]), ("b", [0, 0, None, 0])):
    group = group_of(raws, name=name, task=name)
    halves.append(Gathered([group], [group], list(group.episodes), collections.Counter(all_fail=4), 1, 0))
  said = []
  monkeypatch.setattr(instruments.hosts, "alone", lambda: False)
  monkeypatch.setattr(instruments.hosts, "everyone", lambda value: said.append(value) or list(said))
  instruments.everyones(halves[0])
  both = instruments.everyones(halves[1])
  whole = Gathered(groups=halves[0].groups + halves[1].groups, episodes=halves[0].episodes + halves[1].episodes,
                   dropped=collections.Counter(all_fail=8), swapped=2)  # fmt: skip
  got, want = (instruments.update_curves(g, [], [], 0, 1.0) for g in (both, whole))
  assert got == want and got["reward/success"] == pytest.approx(3 / 7) and got["episodes/infra_error"] == 1 / 8
  assert all(step.screen.pixels.size == 3 for e in both.episodes for step in e.steps)  # screens stay where they are
