"""From groups and stored episodes to minibatches: who enters which batch, in what company, and how often."""

import collections
import types

import numpy as np
import pytest

from agents.base import Agent, Phase, keep_all
from core.pack import shape_for
from core.schema import Credit, Group
from rollout import feed as feed_lib
from rollout.buffer import Buffer
from rollout.feed import Feed
from rollout.gather import Gathered

POLICY = types.SimpleNamespace(positions=lambda r: np.arange(len(r))[None], image=lambda pixels: pixels, max_goal=3)


def one(group):
  """+1 for a pass, -1 for a fail."""
  return [Credit.uniform(1.0 if e.success else -1.0, len(e.steps)) for e in group.episodes]


@pytest.fixture
def named(episode):
  """named(i, raw, ...) -> an episode whose tokens are 1000 i + 10 * step + place, so that a batch says whose they are."""

  def make(i, raw, steps=2, **kw):
    e = episode(raw, index=i, steps=steps, **kw)
    for r in e.records:
      r.tokens[:] += 1000 * i
    return e

  return make


def feed(sizes=(8,), credit=one, needs=(), keep=keep_all, buffer=None, micro=1, rated=None, seed=0):
  agent = Agent(frozenset(needs), None, lambda group, scores=None: credit(group), keep, ())
  shapes = {n: shape_for(n, 5, 2, 5, 1, 1) for n in sizes}
  rate = rated.update if rated is not None else None
  blank = lambda: np.zeros((24, 40, 3), np.uint8)
  return Feed(agent, POLICY, shapes, blank, buffer or Buffer(1000, 0.0), np.random.default_rng(seed), rate, micro)


def got(*groups, version=0):
  return Gathered(kept=[Group(str(i), "task", g) for i, g in enumerate(groups)], version=version)


def phase(minibatch=8, epochs=1, key="policy", **kw):
  return Phase(key, None, epochs, minibatch, **kw)


def who(batch):
  """{(episode's name, step)} of the records in a batch that have a token to learn from."""
  tokens = batch.tokens[batch.is_action]
  return collections.Counter((int(t) // 1000, int(t) % 1000 // 10) for t in tokens)


def flat(steps):
  return [b for micro in steps for b in micro]


def test_nothing_gathered_and_nothing_stored_is_nothing_to_learn_from():
  for p in (phase(), *(phase(data="store", **kw) for kw in ({}, {"drawn": True}, {"pairs": True}, {"key": "critic"}))):
    assert list(feed().steps(p, Gathered(), {})) == []


def test_one_pass_covers_every_record_once_and_epochs_repeat_it(named):
  groups = [[named(10 * g + i, i % 2, group=str(g)) for i in range(4)] for g in range(3)]
  whole = {(10 * g + i, h) for g in range(3) for i in range(4) for h in range(2)}
  f = feed()
  batches = flat(f.steps(phase(epochs=2), got(*groups, version=7), {}))
  assert len(batches) == 6 and all(int(b.now) == 7 for b in batches)
  for half in (batches[:3], batches[3:]):
    assert {x for b in half for x in who(b)} == whole and sum(len(who(b)) for b in half) == len(whole)
  assert who(batches[0]) != who(batches[3])  # in another order


def test_a_process_with_less_gives_padding_until_all_have_made_as_many_steps(named, monkeypatch):
  """Fault S2. This process has two steps' worth of records, another says that it has three steps, whose batches have returns."""
  monkeypatch.setattr(feed_lib.hosts, "alone", lambda: False)
  monkeypatch.setattr(feed_lib.hosts, "everyone", lambda said: [said, [3, ["return_"]]])
  monkeypatch.setattr(feed_lib.hosts, "share", lambda number, name: number)
  episodes = [named(i, i % 2) for i in range(8)]
  steps = list(feed().steps(phase(), got(episodes), {}))
  assert [sum(who(b).values()) > 0 for (b,) in steps] == [True, True, False]
  (blank,) = list(feed().steps(phase(), Gathered(), {}))[2]  # one that has nothing at all makes as many, of the same fields
  assert not blank.is_action.any() and not blank.episode_valid.any() and not blank.return_.any()
  assert blank.tokens.shape == steps[0][0].tokens.shape and blank.return_.shape == blank.tokens.shape


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_an_episode_never_straddles_micro_batches(named, micro):
  """Five tries of three records each, 8 records an optimiser step in 1, 2 parts; 4 parts of 2 records are too small."""
  groups = [[named(i, i % 2, steps=3) for i in range(5)]]
  f = feed(sizes=(8 // micro,), micro=micro)
  if micro == 4:
    with pytest.raises(ValueError, match="an episode has 3 records, agent.minibatch takes 2"):
      list(f.steps(phase(), got(*groups), {}))
    return
  steps = list(f.steps(phase(), got(*groups), {}))
  assert all(len(parts) == micro for parts in steps)
  homes = collections.defaultdict(set)
  for n, batch in enumerate(flat(steps)):
    for name, _ in who(batch):
      homes[name].add(n)
  assert set(homes) == set(range(5)) and all(len(h) == 1 for h in homes.values())
  empty = [b for b in flat(steps) if not b.is_action.any()]
  assert len(empty) == (5 % 2 if micro == 2 else 0) and not any(b.episode_valid.any() for b in empty)  # fills up the last step


def test_pairs_are_a_pass_and_a_fail_of_one_group_side_by_side(named):
  raws = {"a": [1, 0, 0], "b": [1, 1, 1, 0], "c": [1, 1], "d": [0, 0], "e": [1, 0, 1, 0]}
  episodes, owner = [], {}
  for g, (name, group) in enumerate(raws.items()):
    for i, raw in enumerate(group):
      owner[10 * g + i] = (name, raw)
      episodes.append(named(10 * g + i, raw, steps=1 + raw, group=name))  # passes are longer, so that sorting would part them
  buffer = Buffer(1000, 0.0)
  for e in episodes:
    assert buffer.add(e)
  seen = collections.Counter()
  for (batch,) in feed(buffer=buffer).steps(phase(data="store", pairs=True), Gathered(), {}):
    by_place = {int(i): int(t) // 1000 for i, t in zip(batch.episode_id[batch.is_action], batch.tokens[batch.is_action])}
    assert sorted(by_place) == list(range(len(by_place))) and len(by_place) % 2 == 0
    for k in range(0, len(by_place), 2):
      (good_group, good), (bad_group, bad) = owner[by_place[k]], owner[by_place[k + 1]]
      assert (good, bad) == (1, 0) and good_group == bad_group
      assert (batch.advantage[(batch.episode_id == k) & batch.is_action] == 1).all()
      assert (batch.advantage[(batch.episode_id == k + 1) & batch.is_action] == -1).all()
    seen.update(by_place.values())
  assert max(seen.values()) == 1  # each try at most once
  assert collections.Counter(owner[i][0] for i in seen) == {"a": 2, "b": 2, "e": 4}


def test_groups_are_credited_one_by_one_and_the_store_as_one(named):
  sizes = []
  credit = lambda group: (sizes.append([e.replayed for e in group.episodes]), one(group))[1]
  buffer = Buffer(1000, 0.0)
  for i in range(3):
    buffer.add(named(20 + i, 1, group="old"))
  f, groups = feed(credit=credit, buffer=buffer), [[named(0, 1), named(1, 0)], [named(2, 1)]]
  assert {n for b in flat(f.steps(phase(), got(*groups), {})) for n, _ in who(b)} == {0, 1, 2}
  assert sizes == [[False, False], [False]]
  sizes.clear()
  assert {n for b in flat(f.steps(phase(data="store"), got(*groups), {})) for n, _ in who(b)} == {0, 1, 2, 20, 21, 22}
  assert sizes == [[False] * 3 + [True] * 3]
  assert not any(e.replayed for e in buffer.episodes())  # the store's own are as they were
  assert [e.advantage for g in groups for e in g] == [1.0, -1.0, 1.0]


def test_steps_left_out_stay_in_the_context_but_do_not_learn(named):
  credit = lambda group: [Credit(np.ones(2, np.float32), np.array([False, True])) for _ in group.episodes]
  (batch,) = flat(feed(credit=credit).steps(phase(), got([named(3, 1)]), {}))
  assert who(batch) == {(3, 1): 2} and (batch.segment_ids > 0).sum() == 10


def test_drawn_records_are_kept_ones_with_replacement_each_as_likely(named):
  """Kept: 1 step of try 0 and 3 of try 1. 200 minibatches of 8: 400 draws of each step, give or take 5 * sqrt(1600 * 3 / 16) = 87."""
  keeps = {0: [True, False], 1: [True, True, True], 2: [False]}
  credit = lambda group: [Credit(np.ones(len(e.steps), np.float32), np.array(keeps[e.try_index])) for e in group.episodes]
  groups = [[named(0, 1, steps=2), named(1, 1, steps=3), named(2, 0, steps=1)]]
  batches = flat(feed(credit=credit).steps(phase(epochs=200, data="store", drawn=True), got(*groups), {}))
  assert len(batches) == 200
  counts, twice = collections.Counter(), False
  for b in batches:
    found = collections.Counter({k: n // 2 for k, n in who(b).items()})  # two tokens a record
    assert sum(found.values()) == 8
    assert sorted(set(b.episode_id[b.is_action].tolist())) == list(range(8))  # every draw stands for itself
    twice |= max(found.values()) > 1
    counts += found
  assert twice and set(counts) == {(0, 0), (1, 0), (1, 1), (1, 2)}
  assert all(abs(n - 400) < 87 for n in counts.values()), counts


def test_nothing_kept_is_no_minibatch(named):
  credit = lambda group: [Credit(np.zeros(len(e.steps), np.float32), np.zeros(len(e.steps), bool)) for e in group.episodes]
  assert list(feed(credit=credit).steps(phase(epochs=3, data="store", drawn=True), got([named(0, 0)]), {})) == []


def test_a_critics_steps_are_uniform_over_steps_not_episodes(named):
  """A pass of one step and a fail of three: a quarter of the steps is a pass's, 0.25 +- 5 * sqrt(0.1875 / 1600) = 0.054."""
  good, bad = named(0, 1, steps=1), named(1, 0, steps=3)
  batches = flat(feed().steps(phase(epochs=200, key="critic", data="store", drawn=True), got([good, bad]), {}))
  assert len(batches) == 200 and all(b.valid.all() and b.label.shape == (8,) for b in batches)
  assert abs(np.mean([b.label for b in batches]) - 0.25) < 0.054
  screens = [s.screen.pixels for s in bad.steps]
  looks = {tuple(next(k for k, s in enumerate(screens) if np.array_equal(f, s)) for f in pair)
           for b in batches for pair, label in zip(b.frames, b.label) if label == 0}  # fmt: skip
  assert looks == {(0, 0), (0, 1), (1, 2)}  # the screen before and now; a first step has only its own
  assert {tuple(t) for b in batches for t in b.text} == {(0, 0, 0), (1000, 0, 0)}  # what stands before the first image


def test_what_the_models_say_stands_beside_its_token(named):
  """old_logp and value_logit asked of the batch come back record by record and enter the batch under the loss's names."""
  ask = {"old_logp": lambda b: -b.tokens.astype(np.float32), "value_logit": lambda b: b.tokens / 2.0}
  f = feed(needs=("old_logp", "value_logit"))
  batches = flat(f.steps(phase(), got([named(i, i % 2, steps=1 + i) for i in range(4)]), ask))
  for b in batches:
    inside = b.segment_ids > 0
    np.testing.assert_array_equal(b.old_logp[inside], -b.tokens[inside])
    np.testing.assert_array_equal(b.old_value_logit[inside], b.tokens[inside] / 2)
    assert b.ref_logp is None and not b.old_logp[~inside].any()


def test_the_curriculum_hears_of_fresh_tries_only(named):
  rated, buffer = {}, Buffer(1000, 0.0)
  buffer.add(named(5, 1, task="old", group="old"))
  f = feed(needs=("step_value",), rated=rated, buffer=buffer)
  ask = {"step_value": lambda b: np.full((8, 2), np.log(3.0), np.float32)}
  list(f.steps(phase(data="store"), got([named(0, 1, task="new")]), ask))
  assert rated == {"new": pytest.approx(0.75)}


def test_a_seed_decides_the_order(named):
  groups = [[named(i, i % 2) for i in range(8)]]
  order = lambda seed: [sorted(who(b)) for b in flat(feed(seed=seed).steps(phase(), got(*groups), {}))]
  assert order(1) == order(1) != order(2)


def test_the_critics_value_of_a_tasks_first_screen(task):
  """start_values resets the environment to each task and asks about its first screen, seen twice, and its goal."""
  screens = {"a": np.full((24, 40, 3), 5, np.uint8), "b": np.full((24, 40, 3), 200, np.uint8)}
  closed = []
  env = types.SimpleNamespace(
    close=lambda: closed.append(1), reset=lambda options: ({"screenshot": screens[options["task"].id], "goal": "", "text": ""}, {})
  )
  prompt = lambda goal, shown, text: types.SimpleNamespace(images=shown[-1][None], tokens=np.array([7, 2, 2]), image_place=np.array([1]))
  f = feed()
  f.policy = types.SimpleNamespace(**vars(POLICY), prompt=prompt)

  def ask(batch):
    assert np.array_equal(batch.frames[:, 0], batch.frames[:, 1]) and batch.text[0].tolist() == [7, 0, 0]
    bright = batch.frames[:, 1, 0, 0, 0] > 100
    return np.stack([np.where(bright, np.log(3.0), 0.0), np.full(8, 9.0)], axis=1)

  values = f.start_values([task("a"), task("b")], lambda clean: env if clean else None, {"step_value": ask})
  assert values == {"a": pytest.approx(0.5), "b": pytest.approx(0.75)} and closed == [1]
