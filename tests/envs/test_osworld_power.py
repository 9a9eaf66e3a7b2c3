"""What an agent does to its machine: shuts it down, switches its screen off, keeps it busy for longer than a step may take."""

import time

import numpy as np
import pytest

from core.schema import SUCCESS
from envs.errors import BlackFrame
from envs.guest import GuestLost
from envs.vm import PoweredOff
from tests.envs.test_osworld_env import DONE, EDIT, OPENED, desktop, task_of, world  # noqa: F401 - two are fixtures


@pytest.mark.parametrize("part", ["settle", "health", "release"])  # in a step; between the last step and the verdict; within that
def test_a_guest_that_the_agent_shut_down_is_a_failed_try_and_no_fault(world, monkeypatch, part):  # noqa: F811
  env = world()
  env.reset(options={"task": task_of(EDIT, OPENED)})
  env.step("Action: type(content='three')")
  env.step("Action: hotkey(key='ctrl s')")  # a pass, had it been left on

  def off(*args):
    raise PoweredOff("the guest was shut down")

  monkeypatch.setattr(env.machine, part, off)
  _, reward, terminated, truncated, info = env.step(DONE if part != "settle" else "Action: wait()")
  assert (reward, terminated, truncated, info["cause"]) == (0.0, True, False, "agent")
  assert info["rewards"] == {SUCCESS: 0.0} and info["notes"]["powered_off"] is True


def test_a_server_that_is_gone_because_the_agent_shut_down_is_no_fault_and_one_that_is_just_gone_is(world, monkeypatch):  # noqa: F811
  for was_off in (True, False):
    env = world()
    env.reset(options={"task": task_of(EDIT, OPENED)})
    asked = []

    def health(asked=asked, was_off=was_off):
      asked.append(1)
      if was_off and len(asked) > 1:
        raise PoweredOff("the guest was shut down")

    def lost(*args):
      raise GuestLost("nobody answers")

    monkeypatch.setattr(env.machine, "health", health)
    monkeypatch.setattr(env.machine, "release", lost)
    if was_off:
      assert env.step(DONE)[4]["rewards"] == {SUCCESS: 0.0}
    else:
      with pytest.raises(GuestLost):
        env.step(DONE)


def test_an_action_of_too_many_calls_is_cut_short_and_the_episode_goes_on(world):  # noqa: F811
  env = world(grammar="pyautogui", act_seconds=0.3)
  env.reset(options={"task": task_of(EDIT, OPENED)})
  began = time.monotonic()
  _, _, terminated, truncated, info = env.step("time.sleep(60)\npyautogui.moveTo(3, 4)\npyautogui.moveTo(5, 6)")
  assert time.monotonic() - began < 30 and not (terminated or truncated)
  assert "cut_short" in info["notes"] and not [one for one in env.machine.acted if one[0] == "move"]
  assert "cut_short" not in env.step("pyautogui.moveTo(3, 4)")[4]["notes"] and env.machine.acted[-1] == ("move", (3, 4))


def test_a_screen_that_the_agent_switched_off_is_what_it_sees_and_no_start(world, monkeypatch):  # noqa: F811
  env = world()
  env.reset(options={"task": task_of(EDIT, OPENED)})
  black = np.zeros((48, 64, 3), np.uint8)
  monkeypatch.setattr(env.machine, "settle", lambda seconds=None: (black, True))
  env.step("Action: type(content='three')")
  obs, _, terminated, truncated, info = env.step("Action: hotkey(key='ctrl s')")
  assert info["notes"] == {"black": True} and not obs["screenshot"].any() and not (terminated or truncated)
  assert env.step(DONE)[4]["rewards"] == {SUCCESS: 1.0}  # what it left is looked at as ever
  with pytest.raises(BlackFrame, match="after the setup steps"):
    env.reset(options={"task": task_of(EDIT, OPENED)})
