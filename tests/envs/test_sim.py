"""The simulated computers: what they promise to a policy, to a group of tries and to the score."""

import dataclasses
import functools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import envs.sim as sim
from core.schema import SUCCESS, End, Limits, Task, Unreadable
from envs.sim import tasks
from envs.sim.base import CLOSING_KEYS, COMPUTERS, SimEnv, expert_text, play
from envs.sim.popups import LOOKS, PLACES, Luck, Popup, Popups

NAMES = ["sim/phone", "sim/desktop"]
IDS = {"sim/phone": "practice/Phone-v0", "sim/desktop": "practice/Desktop-v0"}
WAIT = {"sim/phone": "wait()", "sim/desktop": "Action: wait()"}
WAY_OUT = {"sim/phone": "press(BACK)", "sim/desktop": "Action: hotkey(key='esc')"}
ALWAYS = Popups(1.0, 1)
both = pytest.mark.parametrize("computer", NAMES)


def at(computer, x, y):
  """Text of a tap (click) on one pixel."""
  width, height = COMPUTERS[computer][0].WIDTH, COMPUTERS[computer][0].HEIGHT
  if computer == "sim/phone":
    return f"tap({x / (width - 1):.4f}, {y / (height - 1):.4f})"
  return f"Action: click(start_box='({x},{y})')"


def started(computer, task=None, popups=None):
  env = SimEnv(computer, popups)
  env.reset(options={"task": task or sim_tasks(computer)[0]})
  return env


@functools.cache
def sim_tasks(computer):
  return tasks.practice_tasks(computer, 64)


def with_popup(computer, kind, place=1, jitter=(0, 0)):
  """An environment whose screen is covered by one given pop-up."""
  env = started(computer)
  clean = env.render()
  env.popup = Popup(kind, place, jitter, env.screen_size)
  env.luck.shown = 1
  return env, clean


# -- Gymnasium


@both
@pytest.mark.filterwarnings("error")
def test_gymnasium_accepts_it(computer):
  env = gym.make(IDS[computer], render_mode="rgb_array")
  check_env(env.unwrapped)
  env.close()


@both
def test_spaces_hold_what_passes_through_them(computer):
  env = SimEnv(computer, ALWAYS)
  obs, info = env.reset(options={"task": sim_tasks(computer)[3]})
  while True:
    assert env.observation_space.contains(obs) and isinstance(info, dict)
    text = expert_text(env)
    assert env.action_space.contains(text)  # spaces, quotes, parentheses and newlines are in the charset
    obs, _, terminated, truncated, info = env.step(text)
    if terminated or truncated:
      break
  assert env.observation_space.contains(obs)


def test_reset_without_a_task_follows_the_seed():
  env = SimEnv("sim/phone")
  first = [env.reset(seed=s)[0]["goal"] for s in (1, 2, 3, 4)]
  assert first == [env.reset(seed=s)[0]["goal"] for s in (1, 2, 3, 4)]
  assert len(set(first)) > 1


@both
def test_a_task_of_the_other_computer_is_refused(computer):
  other = next(n for n in NAMES if n != computer)
  with pytest.raises(ValueError, match=f"is for {other}, this environment is {computer}"):
    started(computer, sim_tasks(other)[0])
  with pytest.raises(ValueError, match="sim/fridge"):
    SimEnv("sim/fridge")


# -- determinism


def filmed(computer, task, popups, texts=None):
  """(screens, texts) of one try that plays the given texts, or the expert's."""
  env = started(computer, task, popups)
  screens, said = [env.render()], []
  while not env.done:
    text = expert_text(env) if texts is None else texts[len(said)]
    said.append(text)
    env.step(text)
    screens.append(env.render())
  return screens, said


@both
def test_same_task_and_actions_give_the_same_pixels(computer):
  for task in sim_tasks(computer)[:6]:
    screens, said = filmed(computer, task, Popups(0.5, 2))
    again, _ = filmed(computer, task, Popups(0.5, 2), said)
    assert len(screens) == len(again)
    assert all(np.array_equal(a, b) for a, b in zip(screens, again))


@both
def test_tries_of_a_group_share_start_screen_and_luck(computer):
  """Two tries that do different things from the first step on meet the same pop-up at the same step."""
  task = sim_tasks(computer)[5]
  task = dataclasses.replace(task, limits=Limits(12))
  seen = []
  for text in (WAIT[computer], at(computer, 1, 1)):
    env = started(computer, task, Popups(0.3, 3, LOOKS))
    start, arrivals = env.render(), []
    while not env.done:
      env.step(text)
      if env.popup is not None:
        assert env.app.page != "loading"
        arrivals.append((env.steps, env.popup.kind, env.popup.place, env.popup.box))
        env.popup = None  # out of the way, so that the next may come
    seen.append((start, arrivals))
  assert np.array_equal(seen[0][0], seen[1][0])
  assert seen[0][1] == seen[1][1] and len(seen[0][1]) >= 2


def test_luck_depends_on_the_seed_and_not_on_eligibility():
  size = (96, 160)
  draw = lambda seed, eligible: [luck.draw(e) for luck in [Luck(Popups(0.5, 99), seed, size)] for e in eligible]
  look = lambda popups: [p and (p.kind, p.place, p.box) for p in popups]
  full = look(draw(7, [True] * 20))
  assert look(draw(7, [False] * 5 + [True] * 15))[5:] == full[5:]  # the stream advances while none may come
  assert full != look(draw(8, [True] * 20))


@both
def test_no_popup_arrives_on_a_page_that_is_still_loading(computer):
  """There is nothing to do on such a page but to wait."""
  loading = arrived = 0
  for task in sim_tasks(computer)[:24]:
    env = started(computer, dataclasses.replace(task, limits=Limits(60)), Popups(0.6, 99))
    while not env.done:
      had = env.popup
      env.step(expert_text(env))
      loading += env.app.page == "loading"
      if env.popup is not None and env.popup is not had:
        arrived += 1
        assert env.app.page != "loading"
  assert loading > 5 and arrived > 50


# -- the expert, the lazy and the limit


@pytest.fixture(scope="module", params=NAMES)
def played(request):
  """(computer, clean episodes, episodes with many pop-ups) of the first 64 practised tasks, by the script."""
  many = Popups(0.25, 2, (*LOOKS, "corner"))
  lists = [[play(request.param, t, p) for t in sim_tasks(request.param)] for p in (Popups(), many)]
  return (request.param, *lists)


def test_expert_solves_every_task(played):
  computer, clean, surprised = played
  for episode in clean + surprised:
    assert episode.success and episode.rewards == {SUCCESS: 1.0}, (episode.task_id, episode.end_cause)
    assert episode.end == End.TERMINATED and len(episode.steps) <= tasks.STEP_LIMIT[computer]
  assert {e.family for e in clean} == set(COMPUTERS[computer][0].families())


def test_with_popups_most_tries_meet_one_and_the_script_leaves_it(played):
  _, clean, surprised = played
  met = [e for e in surprised if any(s.notes["popup"] for s in e.steps)]
  assert len(met) > 32  # 1 - 0.75 ** 6 = 0.82 of tries that can have one on 6 steps
  assert {s.notes["popup"].split("/")[0] for e in met for s in e.steps} == {"", *LOOKS, "corner"}
  assert not any(s.notes["popup"] for e in clean for s in e.steps)


@both
def test_demonstrations_are_successes_in_which_no_popup_is_ever_seen(computer):
  episodes = sim.demonstrations(computer, 40, seed=3)
  assert len(episodes) == 40
  for e in episodes:
    assert e.success and not any(s.notes["popup"] for s in e.steps)
    assert not any(isinstance(s.action, Unreadable) for s in e.steps)


@both
def test_held_out_tasks_can_be_solved_too(computer):
  assert all(play(computer, t, Popups(0.25, 1)).success for t in tasks.held_out_tasks(computer))


@both
def test_doing_nothing_scores_zero_at_exactly_the_limit(computer):
  for task in sim_tasks(computer)[:8]:
    env = started(computer, task)
    ends = []
    while not env.done:
      obs, reward, terminated, truncated, info = env.step(WAIT[computer])
      ends.append((reward, terminated, truncated))
    assert len(ends) == task.limits.steps
    assert ends[:-1] == [(0.0, False, False)] * (task.limits.steps - 1)
    assert ends[-1] == (0.0, False, True)  # a limit never counts as an end of the agent's
    assert info["cause"] == "steps" and info["rewards"] == {SUCCESS: 0.0}


@both
def test_no_start_state_passes_already(computer):
  assert not any(started(computer, t).app.passed() for t in sim_tasks(computer) + tasks.held_out_tasks(computer))


def test_a_pass_on_the_very_last_step_counts():
  """The desktop's checker looks at the end: a task whose last needed click is the last one allowed is passed and truncated."""
  task = sim_tasks("sim/desktop")[0]
  needed = len(play("sim/desktop", task, Popups()).steps) - 1  # without saying finished
  for steps, reward in ((needed, 1.0), (needed - 1, 0.0)):
    env = started("sim/desktop", dataclasses.replace(task, limits=Limits(steps)))
    for _ in range(steps):
      _, got, terminated, truncated, info = env.step(expert_text(env))
    assert (got, terminated, truncated) == (reward, False, True)
    assert info["rewards"] == {SUCCESS: reward} and info["cause"] == "steps"


def test_on_the_phone_a_pass_ends_the_episode_whichever_step_it_is():
  task = sim_tasks("sim/phone")[0]
  needed = len(play("sim/phone", task, Popups()).steps)
  for limit in (needed, needed + 5):
    env = started("sim/phone", dataclasses.replace(task, limits=Limits(limit)))
    for _ in range(needed):
      _, reward, terminated, truncated, info = env.step(expert_text(env))
    assert (reward, terminated, truncated, info["cause"]) == (1.0, True, False, "checker")


@both
def test_after_an_end_there_are_no_more_steps(computer):
  """E4: five step() calls on a three-step limit store one three-step episode, and the last screen is step three's."""
  env = started(computer, dataclasses.replace(sim_tasks(computer)[0], limits=Limits(3)))
  screens = [env.step(expert_text(env))[0]["screenshot"] for _ in range(3)]
  for _ in range(2):
    with pytest.raises(gym.error.ResetNeeded):
      env.step(WAIT[computer])
  assert env.steps == 3 and np.array_equal(env.render(), screens[-1])
  env.reset(options={"task": env.task})
  assert env.steps == 0 and not env.done and not np.array_equal(env.render(), screens[-1])


def test_a_wall_clock_limit_checks_the_state_as_it_stands():
  env = started("sim/desktop")
  assert env.expire()["rewards"] == {SUCCESS: 0.0} and env.done
  env = started("sim/desktop")
  while not env.app.passed():
    env.step(expert_text(env))
  info = env.expire()
  assert info["rewards"] == {SUCCESS: 1.0} and info["cause"] == "seconds"


# -- unreadable, fail


@both
@pytest.mark.parametrize("text", ["", "hello", "tap(2, 2)", "click(start_box='(9999,1)')", "wait() wait()", "x" * 200_000, "\x00"])
def test_unreadable_text_costs_the_episode_and_the_worker_lives(computer, text):
  env = started(computer)
  obs, reward, terminated, truncated, info = env.step(text)
  assert (reward, terminated, truncated) == (-1.0, True, False)
  assert isinstance(info["action"], Unreadable) and info["action"].reason and info["cause"] == "unreadable"
  assert info["rewards"] == {SUCCESS: 0.0, "unreadable": -1.0}
  assert env.observation_space.contains(obs)
  env.reset(options={"task": env.task})
  assert env.step(WAIT[computer])[1:4] == (0.0, False, False)


def test_unreadable_does_not_pass_even_where_the_state_does():
  env = started("sim/desktop")
  while not env.app.passed():
    env.step(expert_text(env))
  assert env.step("done!")[1:3] == (-1.0, True)


@pytest.mark.parametrize("text, reward", [("fail()", 0.0), ("call_user()", 0.0), ("finished()", 1.0), ("finished(content='x')", 1.0)])
def test_giving_up_never_passes_and_finishing_is_checked(text, reward):
  for solve in (False, True):
    env = started("sim/desktop")
    while solve and not env.app.passed():
      env.step(expert_text(env))
    _, got, terminated, truncated, info = env.step("Action: " + text)
    assert (got, terminated, truncated, info["cause"]) == (reward * solve, True, False, "agent")


@pytest.mark.parametrize("text", ["fail()", "finish()", 'answer("item")'])
def test_phone_endings_do_not_pass_an_unsolved_task(text):
  assert started("sim/phone").step(text)[1:4] == (0.0, True, False)


# -- pop-ups


@both
@pytest.mark.parametrize("most", [0, 1, 2])
def test_at_most_so_many_popups(computer, most):
  for task in sim_tasks(computer)[:6]:
    env = started(computer, task, Popups(1.0, most))
    count = 0
    while not env.done:
      had = env.popup
      env.step(expert_text(env))
      count += env.popup is not None and env.popup is not had
    assert count == most


@both
@pytest.mark.parametrize("place", range(len(PLACES)))
@pytest.mark.parametrize("kind", [*LOOKS, "corner"])
def test_a_popup_dims_the_screen_around_it_and_lies_inside(computer, kind, place):
  for jitter in ((-3, -3), (3, 3)):
    env, clean = with_popup(computer, kind, place, jitter)
    box, now = env.popup.box, env.render()
    assert 0 <= box.x0 and box.x1 <= env.screen_size[0] and 0 <= box.y0 and box.y1 <= env.screen_size[1]
    outside = np.ones(now.shape[:2], bool)
    outside[box.y0 : box.y1, box.x0 : box.x1] = False
    bright = clean.astype(int).sum(2) > 300
    assert (now.astype(int).sum(2) < clean.astype(int).sum(2))[outside & bright].all()
    assert np.array_equal(now[outside], (clean[outside] >> 1) + 15)  # dimmed evenly: what lies beneath stays legible
    assert not np.array_equal(now[~outside], (clean[~outside] >> 1) + 15)


def focused(computer):
  """An environment with the focus in a text field, the text it holds, and how to type."""
  if computer == "sim/phone":
    env = started(computer)
    while env.app.focus != "bar":
      env.step(expert_text(env))
    return env, lambda: env.app.bar_text, 'type("hello")'
  env = started(computer, next(t for t in sim_tasks(computer) if t.family == "form"))
  while env.app.focus != "name":
    env.step(expert_text(env))
  return env, lambda: env.app.fields["name"], "Action: type(content='hello')"


@both
def test_a_popup_swallows_everything_else_and_keeps_the_focus(computer):
  env, text, typing = focused(computer)
  focus, state = env.app.focus, env.app.key()
  env.popup = Popup("sign_in", 1, (0, 0), env.screen_size)
  decoy = next(w for w in env.popup.widgets if w.name == "decoy").rect.center
  box = env.popup.box
  for x, y in (decoy, (box.x0 + 1, box.y0 + 1), (1, 1), (env.screen_size[0] - 1, env.screen_size[1] - 1)):
    env.step(at(computer, x, y))
    assert env.popup is not None and env.app.key() == state
  env.step(typing)
  assert env.popup is not None and text() != "hello"
  env.step(WAY_OUT[computer])
  assert env.popup is None and env.app.key() == state and env.app.focus == focus
  env.step(typing)
  assert text() == "hello"  # the focus beneath was kept


@both
@pytest.mark.parametrize("place", range(len(PLACES)))
@pytest.mark.parametrize("kind", [*LOOKS, "corner"])
def test_its_own_button_closes_it_and_only_that(computer, kind, place):
  env, clean = with_popup(computer, kind, place)
  rect = next(w for w in env.popup.widgets if w.name == "dismiss").rect
  popup = env.popup
  inside = {(x, y) for x in range(env.screen_size[0]) for y in range(env.screen_size[1]) if popup.dismissed_at(x, y)}
  assert inside == {(x, y) for x in range(rect.x0, rect.x1) for y in range(rect.y0, rect.y1)}
  env.step(at(computer, *rect.center))
  assert env.popup is None and np.array_equal(env.render(), clean)


@both
def test_back_and_esc_close_all_but_the_corner_kind(computer):
  for kind in (*LOOKS, "corner"):
    env, clean = with_popup(computer, kind)
    state = env.app.key()
    env.step(WAY_OUT[computer])
    assert (env.popup is None) == (kind != "corner")
    assert env.app.key() == state  # the key went to the pop-up, not to what lies beneath
  assert CLOSING_KEYS.keys() == {COMPUTERS[n][0].GRAMMAR for n in NAMES}


@pytest.mark.parametrize(
  "computer, text",
  [("sim/phone", "press(HOME)"), ("sim/phone", "press(ENTER)"), ("sim/phone", "wait()"), ("sim/phone", "swipe(0.5, 0.8, 0.5, 0.2)"),
   ("sim/desktop", "Action: hotkey(key='enter')"), ("sim/desktop", "Action: hotkey(key='ctrl esc')"), ("sim/desktop", "Action: wait()")],
)  # fmt: skip
def test_other_keys_do_not_close_it(computer, text):
  env, _ = with_popup(computer, "notify")
  state = env.app.key()
  env.step(text)
  assert env.popup is not None and env.app.key() == state


@both
def test_the_corner_x_is_no_wider_than_ten_pixels_and_away_from_where_demonstrations_aim(computer):
  """Its point is that copying has (almost) no chance to hit it: 100 of the pop-up's 5120 pixels."""
  env, _ = with_popup(computer, "corner")
  rect = next(w for w in env.popup.widgets if w.name == "dismiss").rect
  assert (rect.x1 - rect.x0) * (rect.y1 - rect.y0) == 100
  box = env.popup.box
  assert (box.x1 - box.x0) * (box.y1 - box.y0) == 5120


# -- nothing leaks


@both
def test_the_observation_says_nothing_but_pixels_and_the_goal(computer):
  task = sim_tasks(computer)[2]
  env = SimEnv(computer, Popups(0.5, 3, (*LOOKS, "corner")))
  obs, _ = env.reset(options={"task": task})
  met = False
  while not env.done:
    assert set(obs) == {"screenshot", "goal", "text"} and obs["goal"] == task.goal and obs["text"] == ""
    met |= env.popup is not None
    obs = env.step(expert_text(env))[0]
  assert met and obs["goal"] == task.goal and obs["text"] == ""


@both
def test_the_picture_is_always_the_one_of_this_moment(computer):
  """Pictures are cached by what they depend on: at every step of the script, and of clicks all over, a fresh drawing is the same."""
  rng = np.random.default_rng(0)
  for task in sim_tasks(computer)[:12]:
    env = started(computer, dataclasses.replace(task, limits=Limits(60)), Popups(0.1, 2))
    while not env.done:
      scatter = at(computer, int(rng.integers(env.screen_size[0])), int(rng.integers(env.screen_size[1])))
      shown = env.step(scatter if rng.random() < 0.4 else expert_text(env))[0]["screenshot"]
      env._picture = None
      assert np.array_equal(shown, env.render()), (task.id, env.steps)


@both
def test_the_start_screen_depends_on_the_seed_alone(computer):
  """The same start state with another goal looks the same: the wanted answer is nowhere in the picture."""
  module = COMPUTERS[computer][0]
  for family, combos in module.families().items():
    screens = set()
    for params in (combos[0], combos[len(combos) // 2], combos[-1]):
      env = started(computer, Task("t", "g", computer, family, 77, params, Limits(9), tasks.CHECK[computer]))
      screens.add(env.render().tobytes())
    assert len(screens) == 1


@both
def test_screens_handed_out_are_the_callers_own(computer):
  """A screen that is kept is never drawn over, and drawing on it changes no later one (the picture is cached inside)."""
  env = started(computer)
  obs, _ = env.reset(options={"task": env.task})
  kept = obs["screenshot"].copy()
  obs["screenshot"][:] = 7
  assert np.array_equal(env.render(), kept)
  while not env.done:
    env.step(expert_text(env))
  assert (obs["screenshot"] == 7).all()


def test_environments_share_the_tables_of_their_spaces_but_no_random_state():
  """64 environments must not hold 64 charsets (4 MB each, three to an environment), nor draw from one stream."""
  first, second = SimEnv("sim/phone"), SimEnv("sim/phone")
  assert first.action_space._char_index is second.action_space._char_index
  for space in (first.action_space, second.action_space):
    space.seed(1)
  assert first.action_space.sample() == second.action_space.sample()
