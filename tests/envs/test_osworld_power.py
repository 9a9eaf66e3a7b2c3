"""A guest that its agent shut down."""

import pytest

from core.schema import SUCCESS
from envs.vm import PoweredOff
from tests.envs.test_osworld_env import DONE, EDIT, OPENED, desktop, task_of, world  # noqa: F401 - two are fixtures


@pytest.mark.parametrize("part", ["settle", "health"])  # in a step; between the last step and the verdict
def test_a_guest_that_the_agent_shut_down_is_a_failed_try_and_no_fault(world, monkeypatch, part):  # noqa: F811
  env = world()
  env.reset(options={"task": task_of(EDIT, OPENED)})
  env.step("Action: type(content='three')")
  env.step("Action: hotkey(key='ctrl s')")  # a pass, had it been left on

  def off(*args):
    raise PoweredOff("the guest was shut down")

  monkeypatch.setattr(env.machine, part, off)
  _, reward, terminated, truncated, info = env.step(DONE if part == "health" else "Action: wait()")
  assert (reward, terminated, truncated, info["cause"]) == (0.0, True, False, "agent")
  assert info["rewards"] == {SUCCESS: 0.0} and info["notes"]["powered_off"] is True
