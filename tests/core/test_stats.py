"""The lesson's arithmetic. Numbers are the lesson's worked examples unless a comment says otherwise."""

import math

import numpy as np
import pytest

from core import stats


def test_chapter0_surprises():
  assert stats.chance_of_no_surprise(0.05, 10) == pytest.approx(0.599, abs=5e-4)
  assert stats.chance_of_no_surprise(0.05, 20) == pytest.approx(0.358, abs=5e-4)
  assert stats.chance_of_no_surprise(0.05, 0) == 1.0


def test_chapter0_what_practice_bought():
  points, _ = stats.points_gained(17.7, 67.2)
  assert points == pytest.approx(49.5)
  # about 17 and 64 or 65 of 96 tasks
  assert 17.7 / stats.task_worth(96) == pytest.approx(17, abs=0.05) and 67.2 / stats.task_worth(96) == pytest.approx(64.5, abs=0.05)


@pytest.mark.parametrize(
  "p, share", [(0.01, 0.077), (0.05, 0.337), (0.10, 0.570), (0.25, 0.900), (0.50, 0.992), (0.90, 0.570), (0.99, 0.077)]
)
def test_chapter3_share_of_groups_that_teach(p, share):
  assert stats.teaching_share(p, 8) == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize(
  "p, size, share",
  [(0.05, 4, 0.185), (0.05, 8, 0.337), (0.05, 16, 0.560), (0.10, 4, 0.344), (0.10, 8, 0.570), (0.10, 16, 0.815)],
)
def test_chapter3_group_size(p, size, share):
  assert stats.teaching_share(p, size) == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize("p, share", [(0.01, 1.000), (0.90, 0.570), (0.99, 0.077)])
def test_chapter3_share_with_replay(p, share):
  assert stats.teaching_share(p, 8, replay=True) == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize("p, episodes", [(0.01, 104), (0.10, 14.0), (0.50, 8.1)])
def test_chapter3_episodes_per_teaching_group(p, episodes):
  assert stats.episodes_per_teaching_group(p, 8) == pytest.approx(episodes, rel=5e-3)


def test_chapter3_hours_of_thinking_for_one_push():
  # 104 episodes x 15 steps x 4.0 s = 6,240 s, about 1.7 hours
  seconds = round(stats.episodes_per_teaching_group(0.01, 8)) * 15 * 4.0
  assert seconds == 6240 and seconds / 3600 == pytest.approx(1.7, abs=0.05)


def test_chapter3_surviving_the_16_try_test():
  assert stats.chance_of_a_pass(0.05, 16) == pytest.approx(0.56, abs=5e-3)


def test_chapter3_perplexity_band():
  assert stats.perplexity([math.log(0.95)] * 3) == pytest.approx(1.053, abs=5e-4)
  assert stats.perplexity([math.log(0.5)]) == pytest.approx(2.0)
  # by hand: geometric mean of 0.8 and 0.2 is 0.4, so 2.5; the product 0.16 would give 6.25
  assert stats.perplexity([math.log(0.8), math.log(0.2)]) == pytest.approx(2.5)


def test_chapter5_entropy_of_a_choice():
  assert stats.choice_entropy([0.5, 0.5]) == pytest.approx(0.693, abs=5e-4)
  assert stats.choice_entropy([0.9, 0.1]) == pytest.approx(0.325, abs=5e-4)
  assert stats.choice_entropy([0.99, 0.01]) == pytest.approx(0.056, abs=5e-4)
  assert stats.choice_entropy([1.0, 0.0]) == 0.0


def test_chapter5_updates_to_lift_a_rare_action():
  assert stats.updates_to_lift(0.01, 0.5, 0.2) == 22
  assert stats.updates_to_lift(0.01, 0.5, 0.28) == 16
  assert stats.updates_to_lift(0.1, 0.1728, 0.2) == 3  # by hand: 1.2^3 = 1.728; rounding up a rounding error gives 4
  assert stats.updates_to_lift(0.5, 0.5, 0.2) == 0


def test_chapter6_grader_arithmetic():
  assert stats.measured_success(0.20, 0.44) == pytest.approx(0.464)
  assert stats.measured_success(0.40, 0.44) == pytest.approx(0.488)
  assert stats.grader_factor(0.44) == pytest.approx(0.12)
  assert stats.grader_factor(0.028) == pytest.approx(0.944)
  assert stats.measured_success(0.20, 0.028) == pytest.approx(0.217, abs=5e-4)
  assert stats.measured_success(0.40, 0.028) == pytest.approx(0.406, abs=5e-4)
  assert stats.grader_factor(1 - 0.794) == pytest.approx(0.59, abs=5e-3)


def test_chapter6_all_equal_groups_out_of_reach():
  assert 1 - stats.teaching_share(0.01, 8) == pytest.approx(0.923, abs=5e-4)


def test_a_grader_with_two_error_rates():
  # by hand: 0.5 x (1 - 0.2) + 0.5 x 0.1 = 0.45
  assert stats.measured_success(0.5, 0.1, 0.2) == pytest.approx(0.45)


@pytest.mark.parametrize("p, n, points", [(0.672, 96, 4.8), (0.424, 165, 3.8), (0.299, 369, 2.4)])
def test_chapter7_counting_noise(p, n, points):
  assert stats.counting_noise(p, n) == pytest.approx(points, abs=0.05)


def test_chapter7_counting_noise_to_two_digits():
  # by hand: sqrt(0.672 x 0.328 / 96) = 0.047917, sqrt(0.299 x 0.701 / 369) = 0.023833
  assert stats.counting_noise(0.672, 96) == pytest.approx(4.79, abs=5e-3)
  assert stats.counting_noise(0.299, 369) == pytest.approx(2.38, abs=5e-3)


def test_chapter7_counting_noise_at_the_ends_is_zero():
  assert stats.counting_noise(0.0, 96) == 0.0 and stats.counting_noise(1.0, 96) == 0.0


def test_chapter7_points_and_percent():
  assert stats.points_gained(43.0, 47.5) == pytest.approx((4.5, 10.5), abs=0.05)
  assert stats.points_gained(64.6, 73.3) == pytest.approx((8.7, 13.5), abs=0.05)


@pytest.mark.parametrize("n, points", [(96, 1.04), (116, 0.86), (165, 0.61), (300, 0.33), (369, 0.27)])
def test_chapter7_one_tasks_worth(n, points):
  assert stats.task_worth(n) == pytest.approx(points, abs=5e-3)


@pytest.mark.parametrize(
  "before, after, n, tasks", [(17.7, 67.2, 96, (17, 64.5, 47.5)), (20.6, 42.4, 165, (34, 70, 36)), (23.5, 29.9, 369, (87, 110, 24))]
)
def test_chapter7_in_tasks(before, after, n, tasks):
  gain = stats.points_gained(before, after)[0]
  assert [x / stats.task_worth(n) for x in (before, after, gain)] == pytest.approx(tasks, abs=0.5)


def test_chapter7_offline_shortcuts_by_the_counting_noise():
  # replay practice 27.3, group practice 26.0, copying successes 21.8 on 369 tasks: +-2.3, so neighbours blur and the ends do not
  noise = stats.counting_noise(0.26, 369)
  assert noise == pytest.approx(2.3, abs=0.05)
  assert stats.points_gained(26.0, 27.3)[0] < noise < stats.points_gained(21.8, 27.3)[0] == pytest.approx(5.5)


def test_pass_at_k_is_unbiased():
  # by hand: 1 - C(6,4)/C(8,4) = 1 - 15/70 = 0.7857; the naive 1 - 0.75^4 is 0.6836
  assert stats.pass_at_k(8, 2, 4) == pytest.approx(0.7857, abs=5e-5)
  assert stats.pass_at_k(8, 2, 1) == pytest.approx(0.25)
  assert stats.pass_at_k(8, 0, 8) == 0.0
  assert stats.pass_at_k(8, 5, 4) == 1.0  # only 3 fails: any 4 hold a pass
  assert stats.pass_at_k(10**4, 1, 10**3) == pytest.approx(0.1)  # no overflow


def test_clustered_noise_with_one_try_per_task_is_counting_noise():
  passes = [[1]] * 65 + [[0]] * 31
  assert stats.clustered_noise(passes) == pytest.approx(stats.counting_noise(65 / 96, 96))


def test_clustered_noise_is_not_fooled_by_repeating_tasks():
  # by hand: 4 tasks, 2 always pass and 2 always fail: the error of 4 coins, 25 points, however often they are repeated
  for tries in (1, 5, 100):
    assert stats.clustered_noise([[1] * tries, [1] * tries, [0] * tries, [0] * tries]) == pytest.approx(25.0)
  assert stats.counting_noise(0.5, 400) == pytest.approx(2.5)  # what treating the 400 tries as independent would say


def test_clustered_noise_of_mixed_tasks():
  # by hand: mean 3/5 = 0.6; residual sums (1-.6)+(0-.6) = -0.2, (1-.6)+(1-.6)+(0-.6) = 0.2; 100 sqrt(0.04+0.04)/5 = 5.657
  assert stats.clustered_noise({"a": [1, 0], "b": np.array([1, 1, 0])}) == pytest.approx(5.657, abs=5e-4)


def test_clustered_noise_of_one_task_says_nothing_about_others():
  assert stats.clustered_noise([[1, 0, 1]]) == math.inf


def test_teaching_share_at_the_ends():
  assert stats.teaching_share(0.0, 8) == 0.0 and stats.teaching_share(1.0, 8) == 0.0
  assert stats.teaching_share(0.3, 1) == 0.0  # one try compares with nothing
  assert stats.episodes_per_teaching_group(0.0, 8) == math.inf
  assert stats.teaching_share(1e-18, 8) == pytest.approx(8e-18)  # not lost to rounding
  assert stats.teaching_share(1.0, 8, replay=True) == 0.0


@pytest.mark.parametrize(
  "call",
  [
    lambda: stats.teaching_share(1.5, 8),
    lambda: stats.teaching_share(math.nan, 8),
    lambda: stats.teaching_share(0.5, 0),
    lambda: stats.counting_noise(0.5, 0),
    lambda: stats.counting_noise(67.2, 96),  # percent where a fraction is wanted
    lambda: stats.pass_at_k(4, 5, 2),
    lambda: stats.pass_at_k(4, 2, 5),
    lambda: stats.clustered_noise([]),
    lambda: stats.clustered_noise([[], []]),
    lambda: stats.choice_entropy([0.5, 0.6]),
    lambda: stats.updates_to_lift(0.5, 0.1, 0.2),
    lambda: stats.updates_to_lift(0.1, 0.5, 0.0),
    lambda: stats.perplexity([0.1]),
    lambda: stats.perplexity([]),
    lambda: stats.points_gained(0.0, 5.0),
  ],
)
def test_wrong_input_is_a_value_error(call):
  with pytest.raises(ValueError):
    call()


# ---- comparisons

A = {"t1": [1, 0], "t2": [1, 1], "t3": [0, 0], "t4": [0, 0]}
B = {"t1": [1, 1], "t2": [1, 1], "t3": [1, 0], "t4": [0, 0]}


def test_paired_difference_by_hand():
  # gaps 0.5, 0, 0.5, 0: mean 0.25; residuals +-0.25, so 100 sqrt(4 x 0.0625) / 4 = 12.5
  assert stats.paired_difference(A, B) == pytest.approx((25.0, 12.5))
  assert stats.paired_difference(B, A) == pytest.approx((-25.0, 12.5))


def test_what_both_find_hard_cancels():
  # 50 tasks that both pass and 50 that both fail: apart each score is 50 +- 5 points, together there is no difference at all
  same = {str(i): [i % 2] for i in range(100)}
  assert stats.paired_difference(same, same) == (0.0, 0.0)
  assert stats.clustered_noise(same) == pytest.approx(5.0)


def test_unpaired_tasks_are_refused():
  with pytest.raises(ValueError, match="1 tasks were tried on one side only, t4"):
    stats.paired_difference(A, {t: B[t] for t in ("t1", "t2", "t3")})


def test_avg_and_pass_at_k_count_every_task_once():
  assert stats.avg_at_k(A) == pytest.approx(0.375)  # (0.5 + 1 + 0 + 0) / 4
  assert stats.avg_at_k({"a": [1], "b": [0, 0, 0]}) == pytest.approx(0.5)  # not 1 of 4 tries
  assert stats.mean_pass_at_k(A, 2) == pytest.approx(0.5)  # t1 and t2 of four
  # by hand: C(6,4)/C(8,4) = 15/70 for 2 passes in 8, and 0 for none: (55/70 + 0) / 2
  assert stats.mean_pass_at_k({"a": [1, 1] + [0] * 6, "b": [0] * 8}, 4) == pytest.approx(55 / 140)


def test_a_score_of_nothing_leaves_a_bound():
  # by hand: 1 - 0.05^(1/96) = 0.0307, near 3/96 = 0.03125; one try that failed leaves 95%
  assert stats.unseen_bound(96) == pytest.approx(0.0307, abs=5e-5)
  assert stats.unseen_bound(1) == pytest.approx(0.95)


def test_agreement_of_a_one_sided_grader():
  # 10 true passes, 8 seen; 30 true fails, 6 passed: 32 of 40 agree; rates 0.8 and 0.2; factor 0.6, as 1 - 2 x 0.2 gives too
  got = stats.agreement([(True, True)] * 8 + [(True, False)] * 2 + [(False, True)] * 6 + [(False, False)] * 24)
  assert got == (8, 2, 6, 24) and got.n == 40
  assert (got.agreement, got.true_pass_rate, got.false_pass_rate) == pytest.approx((0.8, 0.8, 0.2))
  assert got.factor == pytest.approx(0.6)
  # a grader that passes everything agrees on the 90 passes of 100 and says nothing at all
  blind = stats.agreement([(True, True)] * 90 + [(False, True)] * 10)
  assert blind.agreement == pytest.approx(0.9) and blind.factor == pytest.approx(0.0)


def test_agreement_where_one_kind_is_missing():
  got = stats.agreement([(False, False)] * 9 + [(False, True)])
  assert got.true_pass_rate is None and got.false_pass_rate == pytest.approx(0.1)
  assert got.factor == pytest.approx(0.8)  # 1 - 2 x 0.1, the lesson's symmetric case
  with pytest.raises(ValueError, match="no labels"):
    stats.agreement([])


def test_teaching_share_from_tries():
  # by hand, 2 passes in 4 tries, groups of 2: of the 6 pairs, 4 hold one of each kind; plugging in p = 0.5 would give 0.5
  assert stats.measured_teaching_share(2, 4, 2) == pytest.approx(4 / 6)
  assert stats.measured_teaching_share(0, 16, 8) == 0.0 and stats.measured_teaching_share(16, 16, 8) == 0.0
  # with replay only an all-pass pair teaches nothing: 5 of 6; a task that was never passed has nothing in store
  assert stats.measured_teaching_share(2, 4, 2, replay=True) == pytest.approx(5 / 6)
  assert stats.measured_teaching_share(0, 4, 2, replay=True) == 0.0
  # fewer tries than a group: p = (1 + 1) / (2 + 2) = 0.5, the lesson's 0.992 at G = 8
  assert stats.measured_teaching_share(1, 2, 8) == pytest.approx(0.992, abs=5e-4)


def test_teaching_share_from_tries_is_unbiased():
  """Every outcome of 6 tries, weighted by its chance, must give the share itself; here p = 0.3, G = 4."""
  p, n, size = 0.3, 6, 4
  chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
  mean = sum(w * stats.measured_teaching_share(c, n, size) for c, w in enumerate(chance))
  assert mean == pytest.approx(stats.teaching_share(p, size), abs=1e-12)
