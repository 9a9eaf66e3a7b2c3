"""What decides the next task: every rule by hand, off means off, and a resume goes on the same."""

import json

import numpy as np
import pytest

from core import blob, stats
from core.schema import Group
from rollout import curriculum as c
from rollout.curriculum import Curriculum, NoTaskLeft


def rng(seed=0):
  return np.random.default_rng(seed)


def knobs(**changes):
  cfg = c.defaults()
  cfg.update(changes)
  return cfg


@pytest.fixture
def make(task):
  """make(n, seed, **knobs) -> a Curriculum over tasks "0" to "n - 1"."""
  return lambda n=5, seed=0, **kw: Curriculum([task(str(i)) for i in range(n)], rng(seed), knobs(**kw))


def a_pass(curriculum, n):
  return [curriculum.next().id for _ in range(n)]


# ---------------------------------------------------------------- off


def test_with_every_rule_off_the_order_is_the_plain_one(make):
  """The plain loop, written out: a permutation each pass, taken from its end; the generator is used for nothing else."""
  plain, order, wanted = rng(7), [], []
  for _ in range(3 * 11 + 4):
    if not order:
      order = plain.permutation(11).tolist()
    wanted.append(str(order.pop()))
  curriculum = make(11, seed=7)
  assert a_pass(curriculum, len(wanted)) == wanted
  assert curriculum.rng.bit_generator.state == plain.bit_generator.state


def test_with_every_rule_off_reports_and_values_change_nothing(make, group_of):
  told, plain = make(6, seed=3), make(6, seed=3)
  out = []
  for i in range(30):
    task = told.next()
    out.append(task.id)
    told.report(group_of([0, 0], task=task.id, name=f"g{i}"))
    told.rate({task.id: 0.99})
  assert out == a_pass(plain, 30) and told.rng.bit_generator.state == plain.rng.bit_generator.state
  assert told.tries("0", 8) == 8 and told.counts() == {"open": 6, "resting": 0, "out_of_band": 0}


# ---------------------------------------------------------------- failure cool-down


def fail(curriculum, group_of, name, raws=(0, -1)):
  curriculum.report(group_of(list(raws), task=name))


def test_two_failed_visits_rest_a_task_for_three_passes(make, group_of):
  """4 tasks. "2" fails in passes 1 and 2, so passes 3, 4 and 5 have 3 tasks and pass 6 has 4 (no weight: decay 0)."""
  curriculum = make(4, rest_after=2, rest_decay=0.0, remove_at=0)
  for expected in (4, 4):
    assert len(set(a_pass(curriculum, expected))) == 4
    fail(curriculum, group_of, "2")
  for _ in range(3):
    assert set(a_pass(curriculum, 3)) == {"0", "1", "3"}
    assert curriculum.counts()["resting"] == 1
  assert set(a_pass(curriculum, 4)) == {"0", "1", "2", "3"}
  assert curriculum.counts()["resting"] == 0


def test_news_that_comes_while_the_task_waits_costs_it_this_pass_and_two_more(make, group_of):
  """Groups in flight: the second failure is heard in pass 3 before "2" has had its turn, so it misses passes 3, 4 and 5."""
  curriculum = make(4, rest_after=2, rest_decay=0.0, remove_at=0)
  a_pass(curriculum, 8)
  first = curriculum.next().id
  late = next(n for n in "0123" if n != first)
  fail(curriculum, group_of, late)
  fail(curriculum, group_of, late)
  assert late not in [first, *a_pass(curriculum, 2)]
  for _ in range(2):
    assert late not in a_pass(curriculum, 3)
  assert late in a_pass(curriculum, 4)


def test_any_pass_ends_a_row_of_failures(make, group_of):
  curriculum = make(3, rest_after=2, remove_at=3)
  for raws in ((0, 0), (0, 1), (0, 0), (1, 1), (0, -1)):
    curriculum.report(group_of(list(raws), task="1"))
  assert curriculum.counts()["open"] == 3
  fail(curriculum, group_of, "1")
  assert curriculum.counts()["resting"] == 1


def test_groups_that_say_nothing_about_the_agent_are_no_visit(make, group_of, episode):
  """An infra error is never a score; a replayed success is of another time, so a group that it rescued still failed."""
  curriculum = make(3, rest_after=2, remove_at=0)
  for _ in range(5):
    curriculum.report(group_of([None, None], task="1"))
  assert curriculum.counts()["resting"] == 0 and curriculum.chance("1") == 0.5
  for _ in range(2):
    curriculum.report(Group("g", "1", [episode(0, task="1"), episode(1, task="1", index=1, replayed=True), episode(None, index=2)]))
  assert curriculum.counts()["resting"] == 1


def test_the_third_failed_visit_removes_a_task_unless_the_knob_is_zero(make, group_of):
  curriculum = make(3, rest_after=2, rest_passes=1, rest_decay=0.0, remove_at=3)
  fail(curriculum, group_of, "1")
  fail(curriculum, group_of, "1")
  assert curriculum.counts() == {"open": 2, "resting": 1, "out_of_band": 0}
  a_pass(curriculum, 2)
  assert "1" in a_pass(curriculum, 3)
  fail(curriculum, group_of, "1")
  assert curriculum.counts() == {"open": 2, "resting": 0, "out_of_band": 0, "failing": 1}
  assert "1" not in a_pass(curriculum, 40)
  curriculum = make(2, rest_after=1, rest_passes=1, remove_at=0, rest_decay=0.0)
  for _ in range(9):
    fail(curriculum, group_of, "1")
  assert "1" in a_pass(curriculum, 4) and set(curriculum.counts()) == {"open", "resting", "out_of_band"}


def test_a_rested_task_joins_with_chance_exp_minus_f(make, group_of):
  """f = 2, decay 1: exp(-2) = 0.135 of the passes. In 2000 passes 271 +- 15 (one standard deviation)."""
  curriculum = make(3, rest_after=2, rest_passes=1, remove_at=0)
  fail(curriculum, group_of, "1")
  fail(curriculum, group_of, "1")
  a_pass(curriculum, 2)
  joined = 0
  for _ in range(2000):
    curriculum._begin_pass()
    joined += len(curriculum._order) == 3
  assert 210 < joined < 332


@pytest.mark.parametrize("seed", range(4))
def test_where_all_rest_the_first_to_be_back_comes_next(make, group_of, seed):
  """Both rest, "0" until pass 3 and "1" until pass 4: practice goes on with "0" alone in pass 4, then with both."""
  curriculum = make(2, seed, rest_after=1, rest_passes=2, rest_decay=0.0, remove_at=0)
  a_pass(curriculum, 2)  # pass 1
  fail(curriculum, group_of, "0")  # rests in passes 2 and 3
  assert a_pass(curriculum, 1) == ["1"]  # pass 2
  fail(curriculum, group_of, "1")  # rests in passes 3 and 4
  assert a_pass(curriculum, 1) == ["0"] and curriculum.counts()["resting"] == 1  # pass 4
  assert sorted(a_pass(curriculum, 2)) == ["0", "1"]  # pass 5


def test_where_luck_leaves_none_those_with_the_fewest_failures_join(make, group_of):
  """exp(-50) never comes: "0" with 1 failure joins before "1" with 3, and practice does not stop."""
  curriculum = make(2, rest_after=1, rest_passes=1, rest_decay=50.0, remove_at=0)
  fail(curriculum, group_of, "0")
  for _ in range(3):
    fail(curriculum, group_of, "1")
  assert a_pass(curriculum, 5) == ["0"] * 5


def test_nothing_left_says_so_in_one_line(make, group_of):
  curriculum = make(2, rest_after=1, remove_at=1)
  fail(curriculum, group_of, "0")
  fail(curriculum, group_of, "1")
  with pytest.raises(NoTaskLeft, match="no task is left to practise: .*'failing': 2.*remove_at") as e:
    curriculum.next()
  assert "\n" not in str(e.value)


# ---------------------------------------------------------------- solvable set


def test_solvable_keeps_what_was_passed_once():
  """ARPO's rule by hand: of passes 0, 1, 16, 0, 3 in 16 tries the three above 0 stay; the histogram counts all five tasks."""
  results = {"a": (0, 16), "b": (1, 16), "c": (16, 16), "d": (0, 16), "e": (3, 16)}
  assert c.solvable(results) == (["b", "c", "e"], {0: 2, 1: 1, 3: 1, 16: 1})
  assert c.solvable(results, highest=15).kept == ["b", "e"]
  assert c.solvable(results, lowest=0).kept == list(results)
  assert list(c.solvable(dict(reversed(results.items()))).histogram) == [0, 1, 3, 16]
  assert c.solvable({}) == ([], {})


def test_only_removes_the_rest_for_good(make):
  curriculum = make(5)
  a_pass(curriculum, 2)
  curriculum.only(["1", "3"])
  assert set(a_pass(curriculum, 9)[1:]) == {"1", "3"} and curriculum.counts()["unsolvable"] == 3


def test_the_kept_tasks_of_a_selection_are_read(tmp_path, task):
  tasks, path = [task(str(i)) for i in range(4)], tmp_path / "tasks.json"
  path.write_text(json.dumps({"kept": ["1", "3"], "dropped": ["0", "2"]}))
  assert c.selected(path, tasks) == ["1", "3"]
  for said, words in (('{"kept": ["1", "9"]}', "1 of its 2 kept tasks are not this run's, 9 first"), ('{"kept": []}', "it keeps no task"),
                      ('["1"]', "wanted a tasks.json"), ("{", "wanted a tasks.json")):  # fmt: skip
    path.write_text(said)
    with pytest.raises(ValueError, match=words):
      c.selected(path, tasks)


def test_teaching_order_follows_the_hill():
  """Shares at G = 8 (lesson chapter 3): p = .5 0.992, .25 0.900, .1 and .9 0.570, .05 0.337, .01 0.077; equal ones by id."""
  chances = {"e": 0.01, "b": 0.9, "a": 0.1, "d": 0.05, "f": 0.5, "c": 0.25, "z": 0.0}
  assert c.teaching_order(chances) == ["f", "c", "a", "b", "d", "e", "z"]
  # with replay 1 - p^8: the hardest first, but for the one never passed, which has nothing to replay: core.stats gives it 1 too
  assert c.teaching_order({"x": 0.9, "y": 0.5, "w": 0.99}, replay=True) == ["y", "x", "w"]


def test_orders_do_not_depend_on_the_order_given():
  chances = {f"t{i}": (i * 7 % 17) / 16 for i in range(17)} | {"u": 0.25, "v": 0.75}
  shuffled = {k: chances[k] for k in rng(1).permutation(list(chances)).tolist()}
  assert c.teaching_order(chances) == c.teaching_order(shuffled)
  assert c.critic_order(chances) == c.critic_order(shuffled)
  assert c.teaching_order(chances).index("u") == c.teaching_order(chances).index("v") - 1  # mirrors tie and go by id


def visit(curriculum, group_of, name, passes, tries=8):
  curriculum.report(group_of([1] * passes + [0] * (tries - passes), task=name))


def test_practice_can_take_the_best_teachers_first(make, group_of):
  """Passes in 8 tries: 0 -> p 1/10, 4 -> 1/2, 7 -> 8/10, 2 -> 3/10; 2 p (1 - p) = .18, .5, .32, .42."""
  curriculum = make(4, order="teaching")
  for name, passes in zip("0123", (0, 4, 7, 2)):
    visit(curriculum, group_of, name, passes)
  assert a_pass(curriculum, 4) == ["1", "3", "2", "0"] == a_pass(curriculum, 4)


def test_equal_teachers_come_in_random_order(make):
  passes = {tuple(a_pass(curriculum, 3)) for curriculum in [make(3, order="teaching")] for _ in range(60)}
  assert len(passes) == 6


def test_the_estimate_follows_the_latest_visits(make, group_of):
  """(passes + 1) / (tries + 2): none 1/2; 0 of 8 -> 1/10; 0 + 8 of 16 -> 9/18; then the first is forgotten: 16 of 16 -> 17/18."""
  curriculum = make(2, memory=2)
  got = [curriculum.chance("0")]
  for passes in (0, 8, 8):
    visit(curriculum, group_of, "0", passes)
    got.append(curriculum.chance("0"))
  assert got == [1 / 2, 1 / 10, 9 / 18, 17 / 18] and curriculum.chance("1") == 0.5
  curriculum.report(group_of([1, -1, None, 0], task="1"))  # three scored tries, one passed
  assert curriculum.chance("1") == 2 / 5


# ---------------------------------------------------------------- the instruction critic


def test_gaps_are_outcome_less_expectation():
  """a: |1 - .2| = .8, b: |0 - .9| = .9, c: two heads, the smaller one: |.5 - .4| = .1."""
  gaps = c.critic_gaps({"a": 1.0, "b": 0.0, "c": 0.5}, {"a": 0.2, "b": [0.9], "c": [0.7, 0.4], "unused": 0.1})
  assert gaps == pytest.approx({"a": 0.8, "b": 0.9, "c": 0.1})
  signed = c.critic_gaps({"a": 1.0, "b": 0.0, "c": 0.5}, {"a": 0.2, "b": 0.9, "c": 0.4}, signed=True)
  assert signed == pytest.approx({"a": 0.8, "b": -0.9, "c": 0.1})
  assert c.critic_order(gaps) == ["b", "a", "c"] and c.critic_order(signed) == ["a", "c", "b"]


def test_the_top_fraction_keeps_ties():
  """Gaps 0 .. 9: the 0.9 quantile is 8.1, so only 9 stays; with ten 5s everything ties and stays (DigiRL's code does so)."""
  assert c.top_fraction({str(i): float(i) for i in range(10)}) == ["9"]
  assert c.top_fraction({str(i): float(i) for i in range(11)}, 0.2) == ["8", "9", "10"]  # the 0.8 quantile is 8
  assert len(c.top_fraction({str(i): 5.0 for i in range(10)})) == 10
  assert c.top_fraction({"a": 1.0, "b": 0.0}, 1.0) == ["a", "b"] and c.top_fraction({}) == []


def test_the_band_is_inclusive_and_one_head_is_enough():
  values = {"a": 0.05, "b": 0.75, "c": 0.76, "d": 0.04, "e": [0.9, 0.3], "f": [0.9, 0.01], "g": np.float32(0.5)}
  assert c.critic_band(values) == ["a", "b", "e", "g"]
  assert c.critic_band(values, 0.0, 1.0) == list(values)


def test_practice_keeps_to_the_band(make):
  """Tasks without a value stay; values come into force with the next pass."""
  curriculum = make(4, critic_low=0.05, critic_high=0.75)
  a_pass(curriculum, 4)
  curriculum.rate({"0": 0.9, "1": 0.75, "2": [0.01, 0.02]})
  assert set(a_pass(curriculum, 2)) == {"1", "3"} and curriculum.counts() == {"open": 2, "resting": 0, "out_of_band": 2}
  curriculum.rate({"0": 0.5})
  assert set(a_pass(curriculum, 3)) == {"0", "1", "3"}
  curriculum.rate({str(i): 0.99 for i in range(4)})
  with pytest.raises(NoTaskLeft, match="'out_of_band': 4"):
    curriculum.next()


def test_practice_can_take_the_most_surprising_first(make, group_of):
  """r after 7 passes in 8 is 8/10, after 1 in 8 is 2/10. "0": |.8 - .1| = .7, "1": |.2 - .3| = .1, "2": |.8 - .5| = .3;
  "3" was never tried: nothing is known, so it comes first."""
  curriculum = make(4, order="critic")
  for name, passes in (("0", 7), ("1", 1), ("2", 7)):
    visit(curriculum, group_of, name, passes)
  curriculum.rate({"0": 0.1, "1": 0.3, "2": 0.5, "3": 0.8})
  assert a_pass(curriculum, 4) == ["3", "0", "2", "1"]


# ---------------------------------------------------------------- how many tries


def test_tries_until_a_group_teaches():
  """Lesson chapter 3: at p = 0.10, G = 4, 8, 16 teach .344, .570, .815; 1 - .9^15 = .794 and 1 - .9^16 = .815, less p^G."""
  assert c.tries_for(0.1, 0.34, 2, 32) == 4 and c.tries_for(0.1, 0.569, 2, 32) == 8
  assert c.tries_for(0.1, 0.8, 2, 32) == 16 == c.tries_for(0.9, 0.8, 2, 32)
  assert c.tries_for(0.05, 0.56, 2, 32) == 17 and c.tries_for(0.05, 0.5598, 2, 32) == 16  # 16 tries: 1 - .95^16 = .5599
  assert c.tries_for(0.5, 0.5, 2, 32) == 2  # 1 - .25 - .25
  assert c.tries_for(0.5, 0.5, 4, 32) == 4  # the floor
  assert c.tries_for(0.01, 0.9, 4, 32) == 32  # out of reach: the ceiling
  assert c.tries_for(0.0, 0.5, 4, 32) == 4 == c.tries_for(1.0, 0.5, 4, 32)
  assert c.tries_for(0.1, 0.9, 2, 32, replay=True) == 2  # 1 - .1^2 = .99


def test_a_group_is_topped_up_until_it_likely_teaches():
  """All 4 failed, p = .1: 1 - .9^k >= .8 from k = 16 on (.794 at 15). All 4 passed: it lacks a fail, chance .9: k = 1."""
  assert c.top_up(0, 4, 0.1, 0.8, 64) == 16
  assert c.top_up(4, 0, 0.1, 0.8, 64) == 1
  assert c.top_up(0, 4, 0.1, 0.8, 12) == 8  # up to 12 in all
  assert c.top_up(0, 4, 0.1, 0.8, 3) == 0
  assert c.top_up(1, 3, 0.1, 0.8, 64) == 0  # teaches already
  assert c.top_up(0, 4, 0.0, 0.8, 64) == 0 == c.top_up(4, 0, 1.0, 0.8, 64)  # nothing will bring what it lacks


def test_tasks_get_the_tries_they_need(make, group_of):
  """0 of 16 and 16 of 16 -> p 1/18 and 17/18: 1 - (17/18)^k >= .6 from k = 17 on ((17/18)^16 = .4007); 1/2: G = 3 gives .75."""
  curriculum = make(3, teaching_target=0.6, tries_lowest=2, tries_highest=32)
  visit(curriculum, group_of, "0", 0, 16)
  visit(curriculum, group_of, "1", 16, 16)
  assert [curriculum.tries(n, 8) for n in "012"] == [17, 17, 3]


def test_an_action_counts_by_the_geometric_mean_of_its_tokens():
  """.9 and .4: sqrt(.36) = .6, product .36; one token .5 either way."""
  logps = [np.log([0.9, 0.4]), np.log([0.5])]
  assert stats.action_probabilities(logps) == pytest.approx([0.6, 0.5])
  assert stats.action_probabilities(logps, product=True) == pytest.approx([0.36, 0.5])
  assert stats.action_probabilities([]).shape == (0,)


def test_the_perplexity_band_is_inclusive():
  """Perplexity 1.053 to 2.0 is probability .95 to .5 (lesson chapter 3); the code's lower edge is open."""
  p = [0.49, 0.5, 0.7, 0.95, 0.96, 1.0, 0.0]
  assert stats.perplexity_keep(p).tolist() == [False, True, True, True, False, False, False]
  assert stats.perplexity_keep(p, variant="code").tolist() == [False, False, True, True, False, False, False]
  assert stats.perplexity_keep(p, 0.0, 1.0).all() and stats.perplexity_keep([]).dtype == bool


# ---------------------------------------------------------------- state

ALL = {"order": "teaching", "rest_after": 2, "rest_passes": 2, "remove_at": 5, "critic_low": 0.05, "critic_high": 0.95,
       "teaching_target": 0.7, "memory": 3}  # fmt: skip


def practise(curriculum, group_of, luck, steps):
  """A stretch of practice; returns everything that was decided. luck: how tries end, and what the critic says."""
  out = []
  for i in range(steps):
    task = curriculum.next()
    tries = curriculum.tries(task.id, 4)
    p = (1 + sum(map(ord, task.id)) % 10) / 12
    curriculum.report(group_of([int(x) for x in luck.random(tries) < p], task=task.id, name=f"g{i}"))
    if i % 7 == 3:
      curriculum.rate({task.id: luck.random(2).tolist()})
    out.append((task.id, tries, tuple(curriculum.counts().items()), curriculum.chance(task.id)))
  return out


@pytest.mark.parametrize("changes", [{}, ALL, {"order": "critic", "rest_after": 1, "remove_at": 0}])
@pytest.mark.parametrize("through", ["json", "blob"])
def test_a_resume_goes_on_bit_for_bit(make, task, group_of, changes, through):
  straight = make(12, **changes)
  luck = rng(9)
  practise(straight, group_of, luck, 40)
  added = [task(f"new{i}") for i in range(3)] if through == "blob" else []
  straight.extend(added)
  practise(straight, group_of, luck, 25)
  state, random, chance = straight.state(), straight.rng.bit_generator.state, luck.bit_generator.state
  if through == "json":
    state = json.loads(json.dumps(state))
  else:
    text, arrays, screens = blob.encode(state)
    state = blob.decode(text, arrays, screens.__getitem__)
  wanted = practise(straight, group_of, luck, 150)
  again, luck = make(12, seed=99, **changes), rng(1)
  practise(again, group_of, luck, 17)  # whatever it did before is forgotten
  again.restore(state)
  again.rng.bit_generator.state, luck.bit_generator.state = random, chance
  assert practise(again, group_of, luck, 150) == wanted
  assert again.state() == straight.state()


def test_a_state_is_a_snapshot(make, group_of):
  curriculum = make(4, **ALL)
  luck = rng(0)
  practise(curriculum, group_of, luck, 20)
  state = curriculum.state()
  before = json.dumps(state)
  practise(curriculum, group_of, luck, 20)
  assert json.dumps(state) == before != json.dumps(curriculum.state())
  again = make(4, **ALL)
  again.restore(state)
  practise(again, group_of, luck, 20)
  assert json.dumps(state) == before


def test_every_task_is_counted_once(make, group_of):
  curriculum = make(12, rest_after=1, rest_decay=0.1, remove_at=2, critic_low=0.3, critic_high=0.9)
  luck, kinds = rng(4), set()
  curriculum.only([str(i) for i in range(11)])
  for _ in range(20):
    practise(curriculum, group_of, luck, 4)
    counts = curriculum.counts()
    assert sum(counts.values()) == 12
    kinds |= {k for k, n in counts.items() if n}
  assert kinds == {"open", "resting", "out_of_band", "failing", "unsolvable"}


def test_new_tasks_come_next_and_in_every_later_pass(make, task):
  curriculum = make(3)
  a_pass(curriculum, 1)
  curriculum.extend([task("x"), task("y")])
  assert a_pass(curriculum, 2) == ["x", "y"]
  assert not {"x", "y"} & set(a_pass(curriculum, 2))
  assert set(a_pass(curriculum, 5)) == {"0", "1", "2", "x", "y"}


@pytest.mark.parametrize(
  "changes, words",
  [({"order": "best"}, "curriculum.order is best, wanted one of random, teaching, critic"),
   ({"rest_after": -1}, r"curriculum.rest_after is -1, wanted 0 \(off\)"),
   ({"rest_passes": 0}, "curriculum.rest_passes is 0, wanted 1 or more"), ({"rest_decay": float("nan")}, "curriculum.rest_decay is nan"),
   ({"remove_at": -1}, "curriculum.remove_at is -1"), ({"solvable_tries": -1}, "curriculum.solvable_tries is -1"),
   ({"solvable_tries": 4, "solvable_lowest": 5}, r"solvable_lowest is 5, wanted at most solvable_tries \(4\)"),
   ({"solvable_lowest": -1}, "curriculum.solvable_lowest is -1"),
   ({"solvable_lowest": 3, "solvable_highest": 2}, "curriculum.solvable_highest is 2"),
   ({"critic_low": 0.8, "critic_high": 0.7}, "curriculum.critic_low is 0.8"), ({"critic_high": 1.5}, "curriculum.critic_high is 1.5"),
   ({"teaching_target": 1.0}, r"curriculum.teaching_target is 1.0, wanted 0 \(off\) or a chance below 1"),
   ({"tries_lowest": 1}, "curriculum.tries_lowest is 1, wanted 2"),
   ({"tries_lowest": 9, "tries_highest": 8}, "curriculum.tries_lowest is 9"), ({"memory": 0}, "curriculum.memory is 0")],
)  # fmt: skip
def test_bad_knobs_give_one_clear_line(make, changes, words):
  with pytest.raises(ValueError, match=words) as e:
    make(**changes)
  assert "\n" not in str(e.value)


@pytest.mark.parametrize(
  "act, words",
  [(lambda: c.solvable({"a": (3, 2)}), "task a has 3 passes in 2 tries"),
   (lambda: c.solvable({"a": (0, 0)}), "task a has 0 passes in 0 tries"), (lambda: c.solvable({}, 3, 2), "lowest=3, highest=2"),
   (lambda: c.success_estimate(3, 2), "3 passes in 2 tries"), (lambda: c.teaching_order({"a": 1.2}), "p is 1.2"),
   (lambda: c.critic_gaps({"b": 1.0, "a": 1.0}, {}), "2 tasks have a reward but no critic value, a first"),
   (lambda: c.critic_band({"a": float("nan")}), "task a has critic value nan, wanted a chance from 0 to 1"),
   (lambda: c.critic_band({"a": []}), r"task a has critic value \[\]"),
   (lambda: c.critic_band({"a": [0.5, -3.0]}), "task a has critic value"),  # a logit is no chance
   (lambda: c.top_fraction({"a": 1.0}, 0.0), "fraction is 0.0"),
   (lambda: c.tries_for(0.5, 1.0, 2, 8), "target is 1.0, wanted a chance between 0 and 1"),
   (lambda: c.tries_for(0.5, 0.5, 8, 2), "lowest=8, highest=2"), (lambda: c.tries_for(float("nan"), 0.5, 2, 8), "p is nan"),
   (lambda: c.top_up(0, 0, 0.5, 0.5, 8), "a group without a scored try"), (lambda: c.top_up(-1, 2, 0.5, 0.5, 8), "-1 passes"),
   (lambda: c.top_up(0, 2, 1.5, 0.5, 8), "p is 1.5"),
   (lambda: stats.action_probabilities([[-0.1], []]), "action 1: wanted one or more log-probabilities"),
   (lambda: stats.action_probabilities([[0.1]]), "action 0: .*none above 0"),
   (lambda: stats.perplexity_keep([0.5], 0.9, 0.5), "the band is 0.9 to 0.5"),
   (lambda: stats.perplexity_keep([-0.5]), "each from 0 to 1"),  # log-probabilities given by mistake
   (lambda: stats.perplexity_keep([0.5], variant="webrl"), "variant is 'webrl', wanted 'paper'"),
   (lambda: Curriculum([], rng()), "wants one task or more, got none")],
)  # fmt: skip
def test_bad_input_gives_one_clear_line(act, words):
  with pytest.raises(ValueError, match=words) as e:
    act()
  assert "\n" not in str(e.value)


def test_strangers_are_refused(make, task, group_of):
  curriculum = make(3)
  for act in (lambda: curriculum.report(group_of([1], task="x")), lambda: curriculum.rate({"x": 0.5}), lambda: curriculum.only(["0", "x"])):
    with pytest.raises(ValueError, match="task x is not one of the curriculum's 3"):
      act()
  with pytest.raises(ValueError, match="task 1 is there twice"):
    curriculum.extend([task("x"), task("1")])
  with pytest.raises(ValueError, match="task a is there twice"):
    Curriculum([task("a"), task("a")], rng())
  with pytest.raises(ValueError, match="another task list"):
    curriculum.restore(make(4).state())


def test_what_is_parked_leaves_for_good_and_strangers_are_passed_over(make):
  curriculum = make(4)
  curriculum.drop({"1": "broke three computers", "held-out": "elsewhere"})
  curriculum.drop(["1"])
  assert sorted(a_pass(curriculum, 3) + a_pass(curriculum, 3)) == ["0", "0", "2", "2", "3", "3"]
  curriculum.drop(["0", "2", "3"])
  with pytest.raises(NoTaskLeft, match="parked"):
    curriculum.next()
