"""Turns: what was sampled is what is stored, every end is told apart, and a free environment never waits."""

import types

import jax
import numpy as np
import pytest

from core.schema import SUCCESS, End, Unreadable
from core.state import Weights
from envs.inside import Inside
from envs.sim import tasks as sim_tasks
from envs.sim.base import SimEnv
from envs.sim.popups import Popups
from models.base import Prompt
from rollout import turn as turn_module
from rollout.sampler import Sampled, Sampler
from rollout.scheduler import collect
from rollout.turn import Try, Turn

KEY = np.array([1, 2], np.uint32)


def tries(*tasks, group="g"):
  return [Try(t, group, i, np.array([i, 7], np.uint32)) for i, t in enumerate(tasks)]


def run_one(env, policy, sampler, task, versions=None):
  """Plays one try by hand, with the sampler's version changed before each step if asked."""
  computers = Inside([env])
  turn = Turn(computers.try_lease(), policy, Try(task, "g", 4, KEY))
  while True:
    ((_, result),) = computers.wait(0.0)
    episode = turn.hear(result)
    if episode is not None:
      return episode
    if turn.asks:
      if versions:
        sampler.version = versions.pop(0)
      prompt = turn.prompt()
      (sampled,) = sampler.act([prompt], turn.key()[None])
      turn.act(prompt, sampled, 0.125)


# -- tokens in, tokens out


class GrowingPolicy:
  """Prompts that keep what came before: the goal's length, then for every step an image of one token and a count, and what was written.
  forgets: steps after which the oldest observation is dropped."""

  def __init__(self, forgets=99):
    self.tokenizer, self.forgets = types.SimpleNamespace(decode=lambda ids: "wait()"), forgets

  def prompt(self, goal, screens, text, history=()):
    first = max(0, len(history) + 1 - self.forgets)
    tokens, place = [len(goal)], []
    for h, written in enumerate([*(s.written.tolist() for s in history), []]):
      if h >= first:
        place.append(len(tokens))
        tokens += [2, 20 + h]
      tokens += written
    images = np.stack([*(s.image for s in history), screens[-1]])[first:]
    whose = np.arange(first, len(history) + 1, dtype=np.int32)
    return Prompt(np.array(tokens, np.int32), np.arange(len(tokens))[None], np.array(place), images, len(tokens), whose)


def test_an_episode_whose_prompts_go_on_is_one_record(scripted_env, sampler, task):
  """Three steps of 2 + 3 tokens after the goal's: every action keeps the numbers it was sampled with, every token its step."""
  e = run_one(scripted_env(), GrowingPolicy(), sampler, task(steps=3), versions=[4, 5, 6])
  (r,) = e.records
  assert r.tokens.tolist() == [16, 2, 20, 7, 8, 1, 2, 21, 7, 8, 1, 2, 22, 7, 8, 1]
  assert r.is_action.tolist() == [False] + [False, False, True, True, True] * 3
  np.testing.assert_array_equal(r.logp, np.float32([0] + [0, 0, -0.1, -0.2, -0.3] * 3))
  assert r.version.tolist() == [-1] + [-1, -1, 4, 4, 4] + [-1, -1, 5, 5, 5] + [-1, -1, 6, 6, 6]
  assert r.step.tolist() == [0] * 6 + [1] * 5 + [2] * 5
  assert (r.image_place.tolist(), r.image_step.tolist()) == ([1, 6, 11], [0, 1, 2])
  assert (e.oldest_version, e.action_tokens) == (4, 9)


def test_a_prompt_that_forgets_begins_a_record(scripted_env, sampler, task):
  """Two observations stay: steps 0 and 1 are one record, each later step one of its own with the two last images."""
  e = run_one(scripted_env(), GrowingPolicy(2), sampler, task(steps=4))
  assert [r.image_step.tolist() for r in e.records] == [[0, 1], [1, 2], [2, 3]]
  assert [r.is_action.sum() for r in e.records] == [6, 3, 3] and e.action_tokens == 12
  assert e.records[1].tokens.tolist() == [16, 7, 8, 1, 2, 21, 7, 8, 1, 2, 22, 7, 8, 1] and set(e.records[1].step) == {2}


class Sessions:
  """A sampler with sessions that takes `slow` polls for odd tries and one for even ones."""

  def __init__(self, slow=3):
    self.slow, self.left, self.log, self.ended = slow, {}, [], []

  def ask(self, session, prompt, key):
    assert session not in self.left
    self.left[session] = self.slow if session.trial.index % 2 else 1

  def poll(self):
    self.left = {s: n - 1 for s, n in self.left.items()}
    done = [s for s, n in self.left.items() if not n]
    self.log.append((sorted(s.trial.index for s in self.left), sorted(s.trial.index for s in done)))
    for s in done:
      del self.left[s]
    return [(s, Sampled(np.array([7, 8, 1], np.int32), np.zeros(3, np.float32), np.zeros(3, np.float32), 0)) for s in done]

  def end(self, session):
    self.left.pop(session, None)
    self.ended.append((session.trial.task.id, session.trial.index))


def test_a_sampler_with_sessions_is_never_waited_for(scripted_env, policy, task):
  """Of two tries of 2 steps, one needs 3 polls a step, the other 1: the quick one is over after 2 polls, the slow one after 6. Each
  session ends with its episode."""
  sampler = Sessions()
  sampler.policy = policy
  episodes = list(collect(sampler, Inside([scripted_env(), scripted_env()]), tries(task("a", steps=2), task("b", steps=2))))
  assert [e.task_id for e in episodes] == ["a", "b"] and all(e.success for e in episodes)
  assert sampler.log == [([0, 1], [0]), ([0, 1], [0]), ([1], [1]), ([1], []), ([1], []), ([1], [1])]
  assert sampler.ended == [("a", 0), ("b", 1)] and not sampler.left


def test_a_session_ends_with_a_computer_that_breaks(scripted_env, policy, task):
  """The step breaks once: the try's session is over, another one runs it again."""
  sampler = Sessions()
  sampler.policy = policy
  (episode,) = collect(sampler, Inside([scripted_env()]), tries(task("a", steps=2, fault={1: 1})))
  assert episode.success and episode.notes["faults"] == ["Broken"] and sampler.ended == [("a", 0), ("a", 0)]


def test_a_record_is_the_prompt_and_exactly_what_was_sampled(scripted_env, policy, sampler, task):
  """The text "wait()" was written as "wa", "it()", <eos>; those ids are stored, decoded once and never read back."""
  e = run_one(scripted_env(), policy, sampler, task(steps=2))
  assert [s.text for s in e.steps] == ["wait()"] * 2 and policy.decoded == [[7, 8, 1]] * 2
  for h, r in enumerate(e.records):
    assert r.tokens.tolist() == [16, 2, 2, 2, h + 1, 7, 8, 1] and r.tokens.dtype == np.int32
    assert r.is_action.tolist() == [False] * 5 + [True] * 3
    np.testing.assert_array_equal(r.logp, np.float32([0, 0, 0, 0, 0, -0.1, -0.2, -0.3]))
    assert r.version.tolist() == [-1] * 5 + [0] * 3 and r.step.tolist() == [h] * 8
    assert (r.image_place.tolist(), r.image_step.tolist()) == ([1], [h])
  assert e.action_tokens == 6 and [s.agent_tokens for s in e.steps] == [3, 3]


def test_every_step_stores_the_screen_its_action_saw(scripted_env, policy, sampler, task):
  env, seen = scripted_env(), []
  real = policy.prompt
  policy.prompt = lambda goal, screens, text, history: seen.append(screens[-1]) or real(goal, screens, text, history)
  e = run_one(env, policy, sampler, task(steps=3))
  assert len({s.screen.ref for s in e.steps}) == 3
  assert all(np.array_equal(s.screen.pixels, p) for s, p in zip(e.steps, seen, strict=True))
  assert np.array_equal(e.final_screen.pixels, env._look()["screenshot"])  # the last screen, not the next reset's
  assert e.final_screen.ref not in {s.screen.ref for s in e.steps}


def test_training_rebuilds_the_context_that_was_shown(scripted_env, tiny_policy, tiny_params, task):
  """E12: image, positions and placeholders from the stored episode are those of the prompt the sampler saw."""
  s = Sampler(tiny_policy, (1,))
  s.load(Weights(tiny_params, 0))
  shown, real = [], s.act
  s.act = lambda prompts, keys: shown.extend(prompts) or real(prompts, keys)
  episode = run_one(scripted_env(), tiny_policy, s, task(steps=3))
  for prompt, record in zip(shown, episode.records, strict=True):
    n = len(prompt.tokens)
    assert record.tokens[:n].tolist() == prompt.tokens.tolist()
    assert tiny_policy.positions(record)[:, :n].tolist() == prompt.positions.tolist()
    assert tiny_policy.positions(record)[0, n] == prompt.next_position
    (place,), (h,) = record.image_place, record.image_step
    assert np.array_equal(tiny_policy.image(episode.steps[h].screen.pixels), prompt.images[0])
    assert (record.tokens == tiny_policy.tokenizer.image_id)[place : place + tiny_policy.tokens_per_image].all()


def test_every_token_says_which_version_wrote_it(scripted_env, policy, sampler, task):
  """Q6: weights swapped between steps; the episode is as old as its oldest token."""
  e = run_one(scripted_env(), policy, sampler, task(steps=3), versions=[4, 4, 6])
  assert [sorted(set(r.version[r.is_action].tolist())) for r in e.records] == [[4], [4], [6]]
  assert e.oldest_version == 4


def test_what_the_environment_notes_belongs_to_the_screen_before_the_action(scripted_env, policy, sampler, task):
  """A pop-up that arrives with step 1's new screen is on the screen of step 2."""
  e = run_one(scripted_env(), policy, sampler, task(steps=4, popups=(1, 2)))
  assert [s.notes["popup"] for s in e.steps] == ["", "sign_in/top", "sign_in/top", ""] and e.notes["popup"] == "sign_in/top"
  assert [s.notes["entropy"] for s in e.steps] == [0.75] * 4 and [s.think_seconds for s in e.steps] == [0.125] * 4


# -- the ends


@pytest.mark.parametrize(
  "reward, end, cause, rewards",
  [(1, End.TERMINATED, "checker", {SUCCESS: 1.0}), (0, End.TERMINATED, "agent", {SUCCESS: 0.0}),
   (-1, End.TERMINATED, "unreadable", {SUCCESS: 0.0, "unreadable": -1.0}), (None, End.TRUNCATED, "steps", {SUCCESS: 0.0})],
)  # fmt: skip
def test_scored_ends(scripted_env, policy, sampler, task, reward, end, cause, rewards):
  e = run_one(scripted_env(), policy, sampler, task(reward=reward))
  assert (e.end, e.end_cause, e.rewards) == (end, cause, rewards)
  assert (e.task_id, e.group, e.try_index, len(e.steps), e.goal) == ("a", "g", 4, 3, "open the red mug")
  assert e.scored and e.raw_reward == (reward or 0)


@pytest.mark.parametrize("place, steps", [("reset", 0), (1, 0), (3, 2)])
def test_a_broken_computer_is_never_a_score(scripted_env, policy, sampler, task, place, steps):
  e = run_one(scripted_env(), policy, sampler, task(fault={place: 1}))
  assert (e.end, e.end_cause, e.rewards, e.partial) == (End.INFRA_ERROR, "Broken", {}, None)
  assert len(e.steps) == len(e.records) == steps and not e.scored
  with pytest.raises(ValueError, match="it has no reward"):
    _ = e.reward


def test_a_bug_is_not_an_infra_error(scripted_env, policy, sampler, task):
  env = scripted_env()
  env.step = lambda text: 1 / 0
  with pytest.raises(ZeroDivisionError):
    run_one(env, policy, sampler, task())


@pytest.fixture
def slow(monkeypatch, scripted_env):
  """An environment whose every step takes 10 seconds of a clock that only tests move."""
  now = [100.0]
  monkeypatch.setattr(turn_module.time, "monotonic", lambda: now[0])
  env = scripted_env()
  real = env.step

  def step(text):
    now[0] += 10
    return real(text)

  env.step = step
  return env


@pytest.mark.parametrize("reward, passed", [(1, 1.0), (0, 0.0)])
def test_a_wall_clock_limit_truncates_and_the_final_state_is_checked(slow, policy, sampler, task, reward, passed):
  e = run_one(slow, policy, sampler, task(steps=9, reward=reward, seconds=25.0))
  assert (e.end, e.end_cause, len(e.steps)) == (End.TRUNCATED, "seconds", 3)  # 10, 20, 30 > 25
  assert e.rewards == {SUCCESS: passed} and e.partial == 0.5 and e.notes["seconds"] == 30.0
  assert [s.env_seconds for s in e.steps] == [10.0] * 3


def test_an_end_of_its_own_comes_before_the_wall_clock(slow, policy, sampler, task):
  e = run_one(slow, policy, sampler, task(steps=3, reward=1, seconds=25.0))
  assert (e.end, e.end_cause) == (End.TERMINATED, "checker")
  assert run_one(slow, policy, sampler, task(steps=5, reward=0)).end_cause == "agent"  # 0 seconds is no limit


def test_a_checker_that_breaks_at_the_wall_clock_is_an_infra_error(slow, policy, sampler, task):
  e = run_one(slow, policy, sampler, task(steps=9, seconds=25.0, fault={"expire": 1}))
  assert (e.end, e.end_cause, e.rewards) == (End.INFRA_ERROR, "Broken", {})


def test_the_step_limit_of_a_simulated_phone(policy, sampler):
  """E5: an agent that only waits: 16 steps, truncated and not terminated, and checked all the same."""
  t = sim_tasks.practice_tasks("sim/phone", 1)[0]
  e = run_one(SimEnv("sim/phone"), policy, sampler, t)
  assert (e.end, e.end_cause, len(e.steps), e.rewards) == (End.TRUNCATED, "steps", t.limits.steps, {SUCCESS: 0.0})


def test_unreadable_text_keeps_its_tokens(policy, sampler):
  """The tokens that spoiled the action are what the -1 teaches about."""
  t = sim_tasks.practice_tasks("sim/phone", 1)[0]
  policy.tokenizer.decode = lambda ids: "tap tap"
  e = run_one(SimEnv("sim/phone"), policy, sampler, t)
  assert e.raw_reward == e.reward == -1.0 and isinstance(e.steps[0].action, Unreadable)
  assert e.records[0].tokens[-3:].tolist() == [7, 8, 1] and e.steps[0].point is None


def test_points_as_written_and_as_executed(policy, sampler):
  t = sim_tasks.practice_tasks("sim/phone", 1)[0]
  policy.tokenizer.decode = lambda ids: "tap(0.50, 0.10)"
  e = run_one(SimEnv("sim/phone"), policy, sampler, t)
  assert e.steps[0].raw_point == (0.5, 0.1) and e.steps[0].point == (48, 16)  # round(0.5 * 95), round(0.1 * 159)


# -- many turns


def test_all_tries_come_back_once_and_nobody_waits(scripted_env, policy, sampler, task):
  """Two environments; one try of 10 steps and nine of 1: the short ones pass through the other environment meanwhile, so 10
  sampler calls do (with a barrier each pair would wait for its slower half)."""
  plan = tries(task("long", steps=10), *(task(f"short{i}", steps=1) for i in range(9)))
  done = [e.task_id for e in collect(sampler, Inside([scripted_env(), scripted_env()]), plan)]
  assert sorted(done) == sorted(t.task.id for t in plan)
  assert sampler.batches == [2] * 9 + [1] and done[-1] == "long"


def test_episodes_are_handed_over_as_they_finish(scripted_env, policy, sampler, task):
  log = []
  stream = collect(sampler, Inside([scripted_env(log), scripted_env(log)]), tries(task("long", steps=50), task("short", steps=2)))
  assert next(stream).task_id == "short" and len(log) == 4
  assert next(stream).task_id == "long" and len(log) == 52
  assert next(stream, None) is None


def test_tries_are_taken_when_there_is_room(scripted_env, policy, sampler, task):
  taken = []
  plan = (taken.append(t.index) or t for t in tries(*(task(f"t{i}", steps=2) for i in range(5))))
  stream = collect(sampler, Inside([scripted_env()]), plan)
  assert (next(stream).try_index, taken) == (0, [0, 1])  # the next one is at hand
  assert (next(stream).try_index, taken) == (1, [0, 1, 2])


def test_fewer_tries_than_environments_and_none(scripted_env, policy, sampler, task):
  assert len(list(collect(sampler, Inside([scripted_env() for _ in range(4)]), tries(task())))) == 1
  assert list(collect(sampler, Inside([scripted_env()]), [])) == [] and max(sampler.batches) == 1


@pytest.mark.parametrize("place", ["reset", 2])
@pytest.mark.parametrize("times, reruns, faults, scored", [(1, 2, 1, True), (2, 2, 2, True), (3, 2, 2, False), (1, 0, 0, False)])
def test_a_broken_try_is_run_again_up_to_a_cap(scripted_env, policy, sampler, task, place, times, reruns, faults, scored):
  plan = tries(task("bad", fault={place: times}), task("good"), task("fine"))
  done = {e.task_id: e for e in collect(sampler, Inside([scripted_env()]), plan, reruns=reruns)}
  assert set(done) == {"bad", "good", "fine"} and done["good"].success and done["fine"].success
  assert done["bad"].scored == scored and done["bad"].notes["faults"] == ["Broken"] * faults
  assert done["good"].notes["faults"] == []
  assert done["bad"].try_index == 0 and len(done["bad"].records) == (3 if scored else 0 if place == "reset" else 1)


def test_the_clock_is_told_where_the_time_went(scripted_env, policy, sampler, task, monkeypatch):
  """The environment's step takes 10, the sampler 3 of a clock that only they move."""
  now, told = [0.0], []
  monkeypatch.setattr(turn_module.time, "monotonic", lambda: now[0])
  env, act = scripted_env(), sampler.act
  step = env.step
  env.step = lambda text: now.__setitem__(0, now[0] + 10) or step(text)
  sampler.act = lambda p, k: now.__setitem__(0, now[0] + 3) or act(p, k)
  (e,) = collect(sampler, Inside([env]), tries(task(steps=2)), clock=lambda name, seconds: told.append((name, seconds)))
  assert [t for t in told if t[1]] == [("sampling", 3.0), ("environments", 10.0)] * 2
  assert [s.think_seconds for s in e.steps] == [3.0, 3.0] and [s.env_seconds for s in e.steps] == [10.0, 10.0]


# -- keys


def test_every_step_of_every_try_has_its_own_key(scripted_env, policy, sampler, task):
  list(collect(sampler, Inside([scripted_env() for _ in range(3)]), tries(*(task(f"t{i}", steps=4) for i in range(8)))))
  assert len(sampler.keys) == len(set(sampler.keys)) == 32


@pytest.fixture(scope="module")
def real_sampler(tiny_policy, tiny_params):
  s = Sampler(tiny_policy, (8,))
  s.load(Weights(jax.device_get(tiny_params), 0))
  return s


def told(episodes):
  return {(e.task_id, e.try_index): [r.tokens.tolist() for r in e.records] for e in episodes}


def test_the_same_keys_give_the_same_episodes_whatever_the_slots(real_sampler, tiny_policy, scripted_env, task):
  """E11: a real policy whose words change the screens it sees next; 1, 3 and 8 environments, and the tries in another order."""
  plan = tries(*(task(f"t{i % 2}", seed=i % 2, steps=3) for i in range(8)))
  run = lambda slots, order: told(collect(real_sampler, Inside([scripted_env() for _ in range(slots)]), order))
  want = run(8, plan)
  assert len(want) == 8 and run(1, plan) == want and run(3, plan) == want and run(3, plan[::-1]) == want


def test_tries_of_a_group_share_the_start_and_differ_in_what_they_do(real_sampler, tiny_policy, scripted_env, task):
  plan = tries(*[task("t", seed=5, steps=2)] * 8)
  episodes = list(collect(real_sampler, Inside([scripted_env() for _ in range(8)]), plan))
  assert len({e.steps[0].screen.ref for e in episodes}) == 1
  assert len({e.steps[0].text for e in episodes}) > 4


def test_two_tries_at_a_simulated_phone_that_say_the_same_see_the_same(policy, sampler):
  t = sim_tasks.practice_tasks("sim/phone", 1)[0]
  envs = [SimEnv("sim/phone", Popups(0.5, 1)) for _ in range(2)]
  first, second = collect(sampler, Inside(envs), tries(t, t))
  assert first.steps[0].screen.ref == second.steps[0].screen.ref
  assert [s.screen.ref for s in first.steps] == [s.screen.ref for s in second.steps]  # same words, same luck
  assert first.notes["popup"] == second.notes["popup"] != ""


def test_who_graded_is_kept_and_so_is_the_opinion_of_a_judge_beside_the_checker(scripted_env, policy, sampler, task):
  play = lambda **told: run_one(scripted_env(), policy, sampler, task(steps=1, told=told))
  one, two = play(judge=0.0), play(checker="judge:m/status/1")
  assert (one.notes["judge"], one.rewards, one.reward) == (0.0, {SUCCESS: 1.0}, 1.0)  # an opinion is no reward
  assert one.checker == f"{task().env}/1" and two.checker == "judge:m/status/1" and "judge" not in two.notes
