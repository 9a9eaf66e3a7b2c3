"""The shop in a real Chromium (make system): scripted solutions pass in both grammars, pop-ups are in the way, faults leave it whole."""

import pytest

from core.schema import SUCCESS
from envs import shop

pytestmark = pytest.mark.real


@pytest.mark.parametrize("grammar", ["desktop", "web"])
def test_scripted_solutions_pass_under_popups(grammar):
  cfg = shop.defaults()
  cfg.update({"grammar": grammar, "text": grammar == "web", "popup_chance": 0.7, "popup_most": 2, "steps": 20})
  env, seen = shop.make("shop/browser", cfg), set()
  try:
    for task in shop.task_lists("shop/browser", cfg)["practice"][:6]:
      episode = shop.solve(env, task)
      assert episode.rewards == {SUCCESS: 1.0} and episode.end_cause == "agent", task.goal
      seen |= {step.notes["popup"] for step in episode.steps}
    assert len(seen) > 2
  finally:
    env.close()


def test_saying_so_is_not_doing_it_and_the_same_start_is_shown_again():
  cfg = shop.defaults()
  env = shop.make("shop/browser", cfg, clean=True)
  try:
    task = shop.task_lists("shop/browser", cfg)["practice"][0]
    first = env.reset(options={"task": task})[0]["screenshot"]
    assert env.step("Action: finished()")[4]["rewards"] == {SUCCESS: 0.0}
    assert (env.reset(options={"task": task})[0]["screenshot"] == first).all()
  finally:
    env.close()
