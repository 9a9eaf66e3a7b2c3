"""Credit. Numbers are the lesson's worked examples or worked by hand; each test says which."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from losses.advantages import (
  digirl_code_credit,
  gae,
  group_advantages,
  leave_one_out,
  length_adaptive_lambda,
  simplified_gae,
  web_credit,
  webrl_code_credit,
)

ONE_GROUP = np.zeros(8, int)
TWO_PASS = np.array([1, 0, 0, 1, 0, 0, 0, 0.0])
ONE_UNREADABLE = np.array([1, 0, 0, 1, 0, 0, 0, -1.0])
V = np.array([0.15, 0.26, 0.37, 0.48, 0.18, 0.48, 0.59, 0.70, 0.81, 0.92])  # lesson, chapter 2


def near(a, b, atol=5e-4):
  np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=atol)


# --- groups ---------------------------------------------------------------------------------------------------------


def test_chapter1_eight_tries_two_pass():
  push = group_advantages(TWO_PASS, ONE_GROUP, 1)
  near(push, [1.732, -0.577, -0.577, 1.732, -0.577, -0.577, -0.577, -0.577])
  assert abs(float(push.sum())) < 1e-5  # pushes up exactly as much as down
  assert push.dtype == jnp.float32


def test_chapter1_with_an_unreadable_try():
  near(group_advantages(ONE_UNREADABLE, ONE_GROUP, 1), [1.46, -0.21, -0.21, 1.46, -0.21, -0.21, -0.21, -1.88], atol=5e-3)
  # to four digits by hand: 0.875, -0.125, -1.125 over sqrt(0.359375) = 0.599479
  near(group_advantages(ONE_UNREADABLE, ONE_GROUP, 1)[jnp.array([0, 1, 7])], [1.4596, -0.2085, -1.8766], atol=5e-5)


def test_chapter1_adding_one_to_every_reward_changes_no_push():
  near(group_advantages(TWO_PASS + 1, ONE_GROUP, 1), group_advantages(TWO_PASS, ONE_GROUP, 1), atol=1e-6)


def test_sample_spread():
  # by hand: sqrt(1.5 / 7) = 0.46291 and sqrt(2.875 / 7) = 0.64087
  near(group_advantages(TWO_PASS, ONE_GROUP, 1, spread="sample")[:2], [1.6202, -0.5401])
  near(group_advantages(ONE_UNREADABLE, ONE_GROUP, 1, spread="sample")[jnp.array([0, 1, 7])], [1.365, -0.195, -1.755])


def test_no_spread_is_reward_minus_mean():
  near(group_advantages(TWO_PASS, ONE_GROUP, 1, spread="none")[:2], [0.75, -0.25], atol=1e-6)


def test_groups_never_share_mean_or_spread():
  # A = [1,0,0,0], B = [1,1,1,0] by hand: 0.75 / 0.4330 and 0.25 / 0.4330; one mean for both would give 1.0 everywhere
  reward, group = np.array([1, 0, 0, 0, 1, 1, 1, 0.0]), np.array([0, 0, 0, 0, 1, 1, 1, 1])
  want = np.array([1.7320, -0.5773, -0.5773, -0.5773, 0.5773, 0.5773, 0.5773, -1.7320])
  near(group_advantages(reward, group, 2), want)
  order = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # fed A, B, A, B, ...
  near(group_advantages(reward[order], group[order], 2), want[order])


def test_batch_spread_divides_by_the_spread_of_all_rewards():
  # by hand: group means 0.25 and 0.75, the eight rewards spread by 0.5
  reward, group = np.array([1, 0, 0, 0, 1, 1, 1, 0.0]), np.array([0, 0, 0, 0, 1, 1, 1, 1])
  near(group_advantages(reward, group, 2, spread="batch"), [1.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.5, -1.5])


def test_an_invalid_try_leaves_mean_and_spread():
  # A loses its last try: mean 1/3, spread sqrt(2/9) -> +1.4142, -0.7071; B keeps its own numbers
  reward, group = np.array([1, 0, 0, np.nan, 1, 1, 1, 0.0]), np.array([0, 0, 0, 0, 1, 1, 1, 1])
  valid = np.array([1, 1, 1, 0, 1, 1, 1, 1], bool)
  near(group_advantages(reward, group, 2, valid_E=valid), [1.4142, -0.7071, -0.7071, 0, 0.5773, 0.5773, 0.5773, -1.7320])
  short = np.delete(reward, 3), np.delete(group, 3)  # a row dropped before: the count no longer divides by 4
  near(group_advantages(*short, 2), [1.4142, -0.7071, -0.7071, 0.5773, 0.5773, 0.5773, -1.7320])


@pytest.mark.parametrize("spread", ["population", "sample", "none", "batch"])
def test_equal_rewards_give_exact_zeros(spread):
  # seven rewards of 0.7: their float32 spread is not 0, so a test on the spread would push by 0.056
  reward, group = np.array([0.7] * 7 + [1.0, 0.0]), np.array([0] * 7 + [1, 1])
  push = np.asarray(group_advantages(reward, group, 2, spread=spread))
  assert np.array_equal(push[:7], np.zeros(7)) and push[7] > 0.4
  assert np.array_equal(leave_one_out(reward, group, 2)[:7], np.zeros(7))


@pytest.mark.parametrize("spread", ["population", "sample", "none", "batch"])
def test_fewer_than_two_valid_tries_give_zero(spread):
  reward, group = np.array([1.0, 0.0, 0.0, 1.0, 0.0]), np.array([0, 0, 1, 2, 2])
  valid = np.array([1, 0, 1, 1, 1], bool)  # group 0 keeps one try, group 1 has one, group 3 has none
  push = np.asarray(group_advantages(reward, group, 4, valid_E=valid, spread=spread))
  assert push[:3].tolist() == [0, 0, 0] and push[3] > 0 > push[4]


@pytest.mark.parametrize("poison", [np.nan, 1e30, -np.inf])
def test_poison_at_invalid_tries(poison):
  valid = np.array([1] * 8 + [0, 0], bool)
  group = np.array([0] * 8 + [0, -1])
  run = lambda function: lambda fill, **kw: function(np.append(TWO_PASS, [fill, fill]), group, 1, valid_E=valid, **kw)
  for function, keywords in ((group_advantages, {"spread": s}) for s in ("population", "sample", "none", "batch")):
    assert np.array_equal(run(function)(0.0, **keywords), run(function)(poison, **keywords))
  assert np.array_equal(run(leave_one_out)(0.0), run(leave_one_out)(poison))
  loss = lambda r: jnp.sum(group_advantages(r, group, 1, valid_E=valid) * jnp.arange(10.0))
  grad = jax.grad(loss)(jnp.append(TWO_PASS, jnp.array([poison, poison])))
  assert np.all(np.isfinite(grad)) and grad[8:].tolist() == [0, 0]


def test_a_nan_reward_that_counts_stays_visible():
  assert np.isnan(group_advantages(np.array([1.0, np.nan]), np.array([0, 0]), 1)).all()


def test_leave_one_out():
  # by hand: a pass against 1 pass in 7 others = 6/7; a fail against 2 in 7 = -2/7
  near(leave_one_out(TWO_PASS, ONE_GROUP, 1)[:2], [6 / 7, -2 / 7], atol=1e-6)
  valid = np.array([1, 1, 1, 1, 0, 0, 0, 0], bool)  # 2 passes in 4: 1 - 1/3, 0 - 2/3
  near(leave_one_out(TWO_PASS, ONE_GROUP, 1, valid_E=valid), [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0, 0, 0, 0], atol=1e-6)


def test_leave_one_out_is_the_scaled_centred_reward():
  # reduction: n / (n - 1) times reward minus mean
  near(leave_one_out(ONE_UNREADABLE, ONE_GROUP, 1), group_advantages(ONE_UNREADABLE, ONE_GROUP, 1, spread="none") * 8 / 7, 1e-6)


def test_group_functions_work_under_jit_and_vmap():
  batch = np.stack([TWO_PASS, ONE_UNREADABLE])
  for function in (group_advantages, leave_one_out):
    eager = np.stack([function(row, ONE_GROUP, 1) for row in batch])
    near(jax.jit(jax.vmap(lambda r, f=function: f(r, ONE_GROUP, 1)))(batch), eager, atol=1e-6)


def test_group_errors_name_what_is_wrong():
  with pytest.raises(ValueError, match="reward_E has length 1 but group_id_E has length 8"):
    group_advantages(np.ones(1), ONE_GROUP, 1)
  with pytest.raises(ValueError, match=r"reward_E has shape \(8, 8\)"):
    group_advantages(np.ones((8, 8)), ONE_GROUP, 1)
  with pytest.raises(ValueError, match="population, sample, none, batch"):
    group_advantages(TWO_PASS, ONE_GROUP, 1, spread="std")
  with pytest.raises(ValueError, match="segment id 4, wanted 0 .. 3"):
    leave_one_out(TWO_PASS, ONE_GROUP + 4, 4)


# --- steps ----------------------------------------------------------------------------------------------------------


def test_chapter2_ten_credits():
  credit = simplified_gae(V, 1, 0.5)
  near(credit, [0.112, 0.113, 0.117, -0.280, 0.322, 0.166, 0.221, 0.333, 0.555, 1.000], atol=6e-4)
  kept = [h + 1 for h, a in enumerate(credit) if a > 1 / 10]
  assert kept == [1, 2, 3, 5, 6, 7, 8, 9, 10]


def test_chapter2_the_two_ends_of_the_dial():
  near(simplified_gae(V, 1, 1.0), np.ones(10), atol=1e-6)
  near(simplified_gae(V, 1, 0.0), [0.11, 0.11, 0.11, -0.30, 0.30, 0.11, 0.11, 0.11, 0.11, 1.00], atol=1e-6)


def test_chapter2_a_failed_episode_leaves_the_critics_jumps():
  near(simplified_gae(V, 0, 0.5), [0.11, 0.11, 0.11, -0.3, 0.3, 0.11, 0.11, 0.11, 0.11, -0.92], atol=1e-6)


def test_chapter2_wrong_turn_at_step_8_is_still_dropped():
  # lesson: at lambda 0.5 its credit becomes +0.03, below 0.10; by hand 0.25 + 0.75 x (-0.30) = 0.025
  late = np.array([0.15, 0.26, 0.37, 0.48, 0.59, 0.70, 0.81, 0.92, 0.62, 0.92])
  assert float(simplified_gae(late, 1, 0.5)[7]) == pytest.approx(0.025, abs=1e-6)


def test_chapter2_web_mix():
  credit = web_credit(V, 1, 0.5)
  assert float(credit[3]) == pytest.approx(0.11, abs=1e-6)
  near(credit, [0.48, 0.425, 0.37, 0.11, 0.56, 0.315, 0.26, 0.205, 0.15, 0.08], atol=1e-6)
  # the last winning step: the terminal reward is in both halves, else it would get -0.42


def test_web_mix_of_a_failed_episode():
  # by hand at the last step: 0.5 (0 - 0.92) + 0.5 (0 - 0.92) = -0.92; at the first 0.5 x 0.11 - 0.5 x 0.15 = -0.02
  credit = web_credit(V, 0, 0.5)
  assert float(credit[-1]) == pytest.approx(-0.92) and float(credit[0]) == pytest.approx(0.055 - 0.075, abs=1e-6)


def test_digirl_code_credit():
  # by hand: jump - 0.05 + (1 at the last step) + 0.5^(H - h); the critic on the last screenshot still says 0.92
  want = [0.062, 0.064, 0.068, -0.334, 0.281, 0.122, 0.185, 0.310, 0.560]
  near(digirl_code_credit(V, 1, final_value=0.92), want + [1.950], atol=6e-4)
  near(digirl_code_credit(V, 1), want + [1.030], atol=6e-4)


def test_webrl_code_credit():
  # by hand: a success is +1 everywhere (reward on every step drowns the jump); a failure is +1 where the guess rose by 0.05
  assert webrl_code_credit(V, 1).tolist() == [1.0] * 10
  near(webrl_code_credit(V, 0), [1, 1, 1, -0.6, 1, 1, 1, 1, 1, -0.6], atol=1e-6)
  # one step before the end, reward to go 1 + 0.9: a drop of 2.9 leaves -2.9 - 0.05 + 1 + 1.9 = -0.05, one of 2.8 leaves 0.05
  near(webrl_code_credit(np.array([2.9, 0.0]), 1), [-0.6, 1.0], atol=1e-6)
  near(webrl_code_credit(np.array([2.8, 0.0]), 1), [1.0, 1.0], atol=1e-6)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("function", [simplified_gae, web_credit, digirl_code_credit])
def test_step_credit_under_jit_vmap_and_grad(function, lam):
  near(jax.jit(function)(V, 1.0, lam), function(V, 1.0, lam), atol=1e-6)
  two = jax.vmap(function, in_axes=(0, 0, None))(np.stack([V, V]), np.array([1.0, 0.0]), lam)
  near(two, np.stack([function(V, 1.0, lam), function(V, 0.0, lam)]), atol=1e-6)
  for grad in jax.grad(lambda v, r, x: function(v, r, x).sum(), argnums=(0, 1, 2))(jnp.array(V), 1.0, lam):
    assert np.all(np.isfinite(grad))


def test_one_step_episode_gets_its_outcome():
  assert float(simplified_gae(np.array([0.3]), 1, 0.5)[0]) == 1.0
  assert float(web_credit(np.array([0.3]), 1, 0.5)[0]) == pytest.approx(0.7)


@pytest.mark.parametrize("length, lam", [(100, 0.80), (1000, 0.98), (20, 0.0), (10, 0.0), (1, 0.0)])
def test_chapter2_length_adaptive_lambda(length, lam):
  # 100 and 1000 from the lesson; at 20 tokens and below the formula is 0 or negative and is held at 0
  assert float(length_adaptive_lambda(length)) == pytest.approx(lam, abs=1e-6)
  assert float(jax.jit(length_adaptive_lambda)(length)) == pytest.approx(lam, abs=1e-6)


def test_length_adaptive_lambda_of_many_and_of_nonsense():
  near(length_adaptive_lambda(np.array([10, 100, 1000])), [0, 0.8, 0.98], atol=1e-6)
  for length in (0, -3, np.array([100, 0]), float("nan")):
    with pytest.raises(ValueError, match="at least 1 agent token"):
      length_adaptive_lambda(length)
  with pytest.raises(ValueError, match="alpha"):
    length_adaptive_lambda(100, alpha=0.0)


# --- tokens ---------------------------------------------------------------------------------------------------------

ONES, LAST = np.ones(3), np.array([1.0, 1.0, 0.0])


def test_gae_by_hand():
  # deltas 0.1, 0.1, 0.7; 0.1 + 0.9 x 0.7 = 0.73; 0.1 + 0.9 x 0.73 = 0.757
  advantage, target = gae(np.array([0, 0, 1.0]), np.array([0.1, 0.2, 0.3]), LAST, 0.9)
  near(advantage, [0.757, 0.73, 0.7], atol=1e-6)
  near(target, [0.857, 0.93, 1.0], atol=1e-6)


def test_gae_packed_episodes_do_not_leak():
  # the episode above, then r = [0, 1], V = [0, 0]: [0.9, 1.0]; nothing crosses the entry with discount 0
  reward, value = np.array([0, 0, 1.0, 0, 1.0]), np.array([0.1, 0.2, 0.3, 0, 0])
  near(gae(reward, value, np.array([1, 1, 0, 1, 0.0]), 0.9)[0], [0.757, 0.73, 0.7, 0.9, 1.0], atol=1e-6)


def test_gae_with_a_discount():
  # by hand, discount 0.5, lambda 1: A_1 = 1 - 0.4 = 0.6; A_0 = 0 + 0.5 x 0.4 - 0.2 + 0.5 x 0.6 = 0.3
  near(gae(np.array([0, 1.0]), np.array([0.2, 0.4]), np.array([0.5, 0.0]), 1.0)[0], [0.3, 0.6], atol=1e-6)


@pytest.mark.parametrize("poison", [0.9, np.nan, 1e30, -np.inf])
def test_gae_passes_over_a_screenshot_undecayed(poison):
  # r = [0,0,0,0,1], V = [.2,-,-,-,.5], mask = [1,0,0,0,1]: 0.5 - 0.2 + 0.95 x 0.5 = 0.775; decaying over it gives 0.764
  mask = np.array([1, 0, 0, 0, 1])
  fill = lambda first, last: np.array([first, poison, poison, poison, last])
  args = fill(0.0, 1.0), fill(0.2, 0.5), fill(1.0, 1.0), fill(0.95, 0.95)
  advantage, target = gae(*args, mask_N=mask, bootstrap_N=fill(0.0, 0.0))
  near(advantage, [0.775, 0, 0, 0, 0.5], atol=1e-6)
  near(target, [0.975, 0, 0, 0, 1.0], atol=1e-6)
  clean = gae(np.array([0, 0, 0, 0, 1.0]), np.array([0.2, 0, 0, 0, 0.5]), np.ones(5), 0.95, mask_N=mask)
  assert np.array_equal(advantage, clean[0]) and np.array_equal(target, clean[1])
  weigh = lambda *a: jnp.sum(gae(*a, mask_N=mask)[0] * jnp.array([1.0, 7, 7, 7, 2.0]))
  for grad in jax.grad(weigh, argnums=(0, 1, 2, 3))(*map(jnp.asarray, args)):
    assert np.all(np.isfinite(grad)) and grad[1:4].tolist() == [0, 0, 0]


@pytest.mark.parametrize("discount", [[1, 1, 1], [1, 0, 0], [1, 0, 1]])
def test_gae_padding_does_not_bootstrap(discount):
  # r = [0, 1], V = [0, 0], padding with V = 50 -> [0.95, 1.0]; masking after the scan would give 50 and more
  advantage, target = gae(np.array([0, 1, 50.0]), np.array([0, 0, 50.0]), np.array(discount), 0.95, mask_N=np.array([1, 1, 0]))
  near(advantage, [0.95, 1.0, 0], atol=1e-6)
  near(target, [0.95, 1.0, 0], atol=1e-6)


def test_gae_reward_on_a_trailing_observation_goes_to_the_last_agent_token():
  # the episode's last entry is a screenshot and carries the reward; the next episode's value 0.8 must not come back over it
  reward, value = np.array([0, 0, 1.0, 0, 0.5]), np.array([0.1, 0.2, 0, 0.8, 0.8])
  advantage, _ = gae(reward, value, np.array([1, 1, 0, 1, 0.0]), 1.0, mask_N=np.array([1, 1, 0, 1, 1]))
  near(advantage, [0.9, 0.8, 0, -0.3, -0.3], atol=1e-6)


def test_gae_reward_after_the_end_is_not_picked_up():
  # the agent token at slot 1 ends its episode; what stands on padding behind it belongs to nobody
  reward = np.array([0, 1.0, 7.0])
  near(gae(reward, np.zeros(3), np.array([1, 0, 0.0]), 1.0, mask_N=np.array([1, 1, 0]))[0], [1, 1, 0], atol=1e-6)


def test_gae_truncated_end_bootstraps():
  # by hand: 0 + 0.6 - 0.4 = 0.2, then 0.4 - 0.2 + 0.2 = 0.4; without it the episode reads as a fail
  args = np.zeros(2), np.array([0.2, 0.4]), np.array([1.0, 0.0]), 1.0
  advantage, target = gae(*args, bootstrap_N=np.array([0, 0.6]))
  near(advantage, [0.4, 0.2], atol=1e-6)
  near(target, [0.6, 0.6], atol=1e-6)
  near(gae(*args)[0], [-0.2, -0.4], atol=1e-6)


def test_gae_bootstrap_on_a_trailing_observation():
  value, mask = np.array([0.2, 0.4, 0.0]), np.array([1, 1, 0])
  advantage, _ = gae(np.zeros(3), value, LAST, 1.0, mask_N=mask, bootstrap_N=np.array([0, 0, 0.6]))
  near(advantage, [0.4, 0.2, 0], atol=1e-6)


def test_gae_lambda_one_is_monte_carlo_and_zero_is_one_step():
  rng = np.random.default_rng(0)
  reward, value = rng.normal(size=6), rng.normal(size=6)
  discount = np.array([1, 1, 0, 1, 1, 0.0])
  to_go = np.concatenate([np.cumsum(reward[:3][::-1])[::-1], np.cumsum(reward[3:][::-1])[::-1]])
  advantage, target = gae(reward, value, discount, 1.0)
  near(target, to_go, atol=1e-5)
  near(advantage, to_go - value, atol=1e-5)
  near(gae(reward, value, discount, 0.0)[0], reward + discount * np.append(value[1:], 0) - value, atol=1e-5)


def test_gae_lambda_per_token_is_each_episodes_own():
  reward, value = np.array([0, 0, 1.0, 0, 0, 1.0]), np.array([0.1, 0.2, 0.3, 0.1, 0.2, 0.3])
  discount = np.tile(LAST, 2)
  lam = np.repeat([0.9, 1.0], 3)
  near(gae(reward, value, discount, lam)[0], [0.757, 0.73, 0.7, 0.9, 0.8, 0.7], atol=1e-6)


def test_gae_under_jit_vmap_and_grad():
  rng = np.random.default_rng(1)
  reward, value = rng.normal(size=(4, 9)), rng.normal(size=(4, 9))
  discount, mask = np.ones((4, 9)), rng.random((4, 9)) < 0.6
  discount[:, [3, 8]] = 0
  run = lambda r, v, d, m: gae(r, v, d, 0.9, mask_N=m)
  eager = [run(*row) for row in zip(reward, value, discount, mask)]
  batched = jax.jit(jax.vmap(run))(reward, value, discount, mask)
  near(batched[0], np.stack([a for a, _ in eager]), atol=1e-5)
  near(batched[1], np.stack([t for _, t in eager]), atol=1e-5)


@pytest.mark.parametrize("lam", [-0.1, 1.5, float("nan")])
def test_a_lambda_outside_0_and_1_is_refused(lam):
  for call in (
    lambda: simplified_gae(V, 1, lam),
    lambda: digirl_code_credit(V, 1, lam),
    lambda: web_credit(V, 1, lam),
    lambda: gae(ONES, ONES, LAST, lam),
  ):
    with pytest.raises(ValueError, match=f"lam is {lam}, wanted a number from 0 to 1"):
      call()
  with pytest.raises(ValueError, match="discount is"):
    webrl_code_credit(V, 1, lam)


def test_gae_errors_name_both_lengths():
  with pytest.raises(ValueError, match="reward_N has length 1 but value_N has length 3"):
    gae(np.ones(1), ONES, LAST, 0.9)
  with pytest.raises(ValueError, match="lam has length 2"):
    gae(ONES, ONES, LAST, np.ones(2))
