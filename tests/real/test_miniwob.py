"""MiniWoB++ in a real Chromium (make system): every page opens, scripted solutions get the page's own full reward, wrong ones do not."""

import importlib.util

import pytest

from core.schema import SUCCESS, Limits, Task
from envs import errors, miniwob, miniwob_scripts

pytestmark = [
  pytest.mark.real,
  pytest.mark.skipif(importlib.util.find_spec("miniwob") is None, reason="pip install --no-deps -r requirements-web.txt"),
]


@pytest.fixture(scope="module")
def env():
  env = miniwob.make("miniwob/browser", miniwob.defaults())
  yield env
  env.close()


def task_of(env, page, seed, steps=12):
  return Task(f"{page}-{seed}", env.site.show(env.window, page, seed), "miniwob/browser", page, seed, {"page": page}, Limits(steps))


@pytest.mark.slow
def test_all_pages_open_and_give_the_same_goal_for_the_same_seed(env):
  names = miniwob.pages()
  assert len(names) == 134  # 130 files miniwob/*.html of version 1.1.0 and four flights
  for name in names:
    first = env.site.show(env.window, name, 7)
    env.site.start(env.window, name, 8)  # begun again without being loaded again
    assert env.site.start(env.window, name, 7) == first, name
    assert len(first) > 10 and env.site.show(env.window, name, 7) == first, name
    assert env.window.evaluate(miniwob.STATE) == [False, 0], name


@pytest.mark.parametrize("page", sorted(miniwob_scripts.SCRIPTS))
def test_scripted_solutions_get_the_full_reward(env, page):
  episode = miniwob.solve(env, task_of(env, page, 11))
  assert (episode.rewards[SUCCESS], episode.partial, episode.end_cause) == (1.0, 1.0, "checker")


def test_the_wrong_button_ends_the_try_without_a_reward(env):
  task = task_of(env, "click-test-2", 1)
  env.reset(options={"task": task})
  other = miniwob_scripts.write(env.window, ("click", miniwob_scripts.find("button", "TWO")), "desktop")[0]
  _, reward, terminated, _, info = env.step(other)
  assert (reward, terminated, info["cause"], info["partial"]) == (0.0, True, "checker", 0.0)
  assert env.window.evaluate("WOB_RAW_REWARD_GLOBAL") == -1


def test_the_reward_does_not_decay_and_saying_so_is_not_doing_it(env):
  task = task_of(env, "click-test", 2)
  env.reset(options={"task": task})
  assert env.step("Action: finished()")[4]["rewards"] == {SUCCESS: 0.0}
  env.reset(options={"task": task})
  env.window.evaluate("core.ept0 -= 9000000; 0")  # as if two hours and a half had gone by
  text = next(miniwob_scripts.texts(env, task.goal, "click-test", "desktop"))
  assert env.step(text)[4]["rewards"] == {SUCCESS: 1.0}


def test_half_of_it_is_partial_and_no_pass(env):
  task = task_of(env, "odd-or-even", 3)
  env.reset(options={"task": task})
  wrong = list(miniwob_scripts.SCRIPTS["odd-or-even"](miniwob_scripts.Page(env.window, task.goal)))
  first = wrong[0][1]
  wrong[0] = ("click", first.replace(".odd", ".x").replace(".even", ".odd").replace(".x", ".even"))
  for move in wrong:
    *_, info = env.step(miniwob_scripts.write(env.window, move, "desktop")[0])
  rows = len(wrong) - 1
  assert info["rewards"] == {SUCCESS: 0.0} and info["partial"] == pytest.approx((rows - 2) / rows)  # one of them costs its own share twice


def test_a_page_that_is_open_begins_anew_and_one_that_was_left_is_opened(env):
  """The same first screen for the same seed, whatever the try before did: it was solved, left half done, or the page was left."""
  task, other = task_of(env, "click-test-2", 5), task_of(env, "focus-text", 5)
  loads = lambda: env.window.evaluate("performance.timeOrigin")
  first = env.reset(options={"task": task})[0]["screenshot"]
  loaded = loads()
  assert miniwob.solve(env, task).rewards == {SUCCESS: 1.0}
  assert (env.reset(options={"task": task})[0]["screenshot"] == first).all()
  env.step("Action: click(start_box='(150,200)')")
  assert (env.reset(options={"task": task})[0]["screenshot"] == first).all() and loads() == loaded
  env.reset(options={"task": other})
  assert (env.reset(options={"task": task})[0]["screenshot"] == first).all() and loads() > loaded
  env.window.evaluate("core.getUtterance = () => 'something else'; 0")  # a page that says another thing is loaded anew
  loaded = loads()
  assert (env.reset(options={"task": task})[0]["screenshot"] == first).all() and loads() > loaded


def test_another_goal_than_the_lists_is_a_failed_reset(env):
  task = Task("x", "Click button TWELVE.", "miniwob/browser", "click-test-2", 1, {"page": "click-test-2"}, Limits(3))
  with pytest.raises(errors.ResetFailed, match="Click button ONE"):
    env.reset(options={"task": task})


def test_lists_hold_out_other_seeds_and_demonstrations_are_of_neither():
  cfg = miniwob.defaults()
  cfg.update({"practice_tasks": 5, "in_domain_tasks": 2, "held_out_tasks": 4, "pages": ("click-button", "click-link")})
  lists = miniwob.task_lists("miniwob/browser", cfg)
  wanted = ["click-button 0", "click-link 0", "click-button 1", "click-link 1", "click-button 2"]
  assert [f"{t.family} {t.seed}" for t in lists["practice"]] == wanted
  assert lists["in_domain"] == lists["practice"][:2]
  assert not {t.id for t in lists["practice"]} & {t.id for t in lists["held_out"]}
  shown = miniwob.demonstrations("miniwob/browser", 2, 0, cfg)
  assert [e.family for e in shown] == ["click-button", "click-link"] and all(e.success for e in shown)
  assert not {e.task_id for e in shown} & {t.id for name in lists for t in lists[name]}


@pytest.mark.parametrize("name, value, said", [("pages", ("click-buton",), "no page"), ("pages", ("click-test", "click-test"), "each once"),
  ("grammar", "web", "wanted True"), ("picture", (600, 100), "at most env.viewport")])  # fmt: skip
def test_knobs_are_checked_before_a_browser_starts(name, value, said):
  cfg = miniwob.defaults()
  cfg[name] = value
  with pytest.raises(ValueError, match=said):
    miniwob.check(cfg)
