"""The phone's environment on the device's double, without adb: equal to the simulated phone, and what real phones bring."""

import itertools
import json
import threading

import gymnasium as gym
import numpy as np
import pytest
from adb_device import ServerDouble, Shell

from core.schema import SUCCESS, Limits, Task, Unreadable
from envs import adb, android, errors, judges, locks, sim
from envs.actions import format, parse
from envs.errors import BadFrame, CheckerFailed, ResetFailed
from envs.handset import Handset
from envs.referees import Checks, Practice
from envs.sim.base import expert_text

COMPUTER = "android/phone"


class Held(Handset):
  """A handset whose server is looked after by the test."""

  def ready(self):
    self.device.attach(2)

  def close(self):
    pass


def knobs(**given):
  cfg = android.defaults()
  cfg.update({"image": "double", "settle_least": 0.0, "wait_seconds": 0.01, "popup_chance": 0.4} | given)
  return cfg


class Bench:
  """A double and an environment on it."""

  def __init__(self, path, cfg=None, referee=None, **kw):
    self.cfg, self.shell = cfg or knobs(), Shell(**kw)
    self.server = ServerDouble(path / "adb.sock", self.shell)
    phone = Held(adb.Device(self.server.address, "double"), self.cfg)
    phone.prepare()
    popups = {"chance": self.cfg.popup_chance, "most": self.cfg.popup_most, "kinds": list(self.cfg.popup_kinds)}
    self.env = android.AndroidEnv(COMPUTER, phone, referee or Practice(popups, self.cfg.drift), self.cfg)

  def close(self):
    self.shell.ended.set()
    self.server.close()


@pytest.fixture
def bench(tmp_path):
  made = []

  def make(*args, **kw):
    made.append(Bench(tmp_path, *args, **kw))
    return made[-1]

  yield make
  for one in made:
    one.close()


def a_task(**params):
  given = {"steps": 3, "check": "end", "threshold": 1.0} | {k: params.pop(k) for k in ("steps", "check_when", "threshold") if k in params}
  return Task("t", "turn it on", COMPUTER, "f", 0, params, Limits(given["steps"]), given.get("check_when", "end"), given["threshold"])


# -- equal to the simulated phone


@pytest.mark.parametrize("screenshot", ["raw", "png"])
def test_episodes_equal_the_simulated_phones_bit_for_bit(bench, screenshot):
  cfg = knobs(screenshot=screenshot, popup_most=2)
  env, bare = bench(cfg).env, sim.make("sim/phone", cfg)
  for own, task in list(zip(sim.task_lists("sim/phone", cfg)["practice"], android.task_lists(COMPUTER, cfg)["practice"]))[:4]:
    for script in (
      None,
      ["tap(0.9, 0.9)", "swipe(0.1, 0.9, 0.1, 0.2)", "press(HOME)", "finish()"],
      ["wait()", "fail()"],
      ["wait()", "tap(2, 2)"],
    ):
      (mine, told), (theirs, said) = env.reset(options={"task": task}), bare.reset(options={"task": own})
      ended, k = False, 0
      while not ended:
        assert (mine["screenshot"] == theirs["screenshot"]).all() and mine["goal"] == theirs["goal"] and told == said
        text = expert_text(bare) if script is None else script[k]
        theirs, *rest, said = bare.step(text)
        mine, *others, told = env.step(text)
        assert rest == others
        ended, k = rest[1] or rest[2], k + 1
      assert (
        (mine["screenshot"] == theirs["screenshot"]).all() and told == said and (script is not None) != (said["rewards"][SUCCESS] == 1.0)
      )


def test_other_grammars_do_the_same(bench):
  cfg = knobs(grammar="digirl")
  env, bare = bench(cfg).env, sim.make("sim/phone", cfg)
  env.reset(options={"task": android.task_lists(COMPUTER, cfg)["practice"][1]})
  theirs, _ = bare.reset(options={"task": sim.task_lists("sim/phone", cfg)["practice"][1]})
  while not bare.done:
    text = expert_text(bare)
    theirs, reward, *_ = bare.step(text)
    mine, mine_reward, *_ = env.step(format(parse(text, "phone", bare.screen_size), "digirl", env.screen_size))
    assert (mine["screenshot"] == theirs["screenshot"]).all() and mine_reward == reward
  assert reward == 1.0


def test_the_step_limit_and_the_clock_leave_the_state_to_the_checker(bench):
  env = bench().env
  env.reset(options={"task": android.task_lists(COMPUTER, env.cfg)["practice"][0]})
  for _ in range(14):  # the simulated phone's limit
    _, reward, terminated, truncated, info = env.step("wait()")
  assert (reward, terminated, truncated, info["cause"]) == (0.0, False, True, "steps")
  with pytest.raises(gym.error.ResetNeeded):
    env.step("wait()")
  env.reset(options={"task": android.task_lists(COMPUTER, env.cfg)["practice"][0]})
  info = env.expire()
  assert info["cause"] == "seconds" and info["rewards"] == {SUCCESS: 0.0}


def test_gymnasium_spaces(bench):
  env = bench().env
  obs, _ = env.reset(options={"task": android.task_lists(COMPUTER, env.cfg)["practice"][0]})
  assert env.observation_space.contains(obs) and env.action_space.contains("tap(0.5, 0.5)")
  with pytest.raises(ValueError, match="wants options"):
    env.reset()
  with pytest.raises(ValueError, match="got 'sim/phone'"):
    env.reset(options={"task": sim.task_lists("sim/phone", env.cfg)["practice"][0]})


# -- what real phones bring


def test_a_text_that_cannot_be_typed_is_a_step_that_does_nothing(bench):
  rig = bench(referee=Checks(lambda *_: 0.0), has_ime=False)
  rig.env.reset(options={"task": a_task(check={"activity": "a/.B"})})
  before = rig.shell.lines[:]
  _, reward, terminated, _, info = rig.env.step('type("é")')
  assert "not ASCII" in info["notes"]["refused"] and not terminated and reward == 0.0
  assert not any(line.startswith(("input", "am broadcast")) for line in rig.shell.lines[len(before) :])
  assert "refused" not in rig.env.step("press(BACK)")[4]["notes"]


def test_unreadable_text_costs_the_episode_and_touches_nothing(bench):
  rig = bench(referee=Checks())
  rig.env.reset(options={"task": a_task(check={"activity": "launcher/.Home"})})
  before = len(rig.shell.lines)
  _, reward, terminated, truncated, info = rig.env.step("tap 5 5; reboot")
  assert (reward, terminated, truncated, info["cause"]) == (-1.0, True, False, "unreadable") and isinstance(info["action"], Unreadable)
  assert info["rewards"] == {SUCCESS: 0.0, "unreadable": -1.0} and len(rig.shell.lines) == before


def test_a_screen_that_never_rests_is_looked_at_and_noted(bench, monkeypatch):
  rig = bench(knobs(settle_most=20.0, settle_frames=3), Checks())
  rig.env.reset(options={"task": a_task(check={"activity": "a/.B"})})
  assert "unsettled" not in rig.env.step("press(BACK)")[4]["notes"]
  looks, rig.env.cfg.settle_most = itertools.count(1), 0.2
  monkeypatch.setattr(rig.env.phone, "screenshot", lambda seconds=None: np.full((160, 96, 3), next(looks) % 255, np.uint8))
  assert rig.env.step("press(BACK)")[4]["notes"]["unsettled"] is True


def test_a_blinking_caret_does_not_keep_a_screen_from_resting(bench, monkeypatch):
  rig = bench(knobs(settle_most=5.0, settle_tolerance=0.002), Checks())
  rig.env.reset(options={"task": a_task(check={"activity": "a/.B"})})
  still, calls = np.full((160, 96, 3), 9, np.uint8), []

  def blink(seconds=None):
    frame = still.copy()
    frame[5:20, 7] = 255 * (len(calls) % 2)  # 15 of 15360 pixels: a thousandth
    calls.append(1)
    return frame

  monkeypatch.setattr(rig.env.phone, "screenshot", blink)
  assert "unsettled" not in rig.env.step("press(BACK)")[4]["notes"] and len(calls) == 2


def test_a_turned_phone_is_shown_in_the_same_size_and_hit_where_it_is(bench):
  rig = bench(referee=Checks())
  rig.env.reset(options={"task": a_task(check={"activity": "a/.B"})})
  rig.shell.wide = True  # 160 x 96 from now on
  obs, *_ = rig.env.step("press(BACK)")
  assert obs["screenshot"].shape == (160, 96, 3)
  rig.env.step("tap(1, 0.5)")  # 1 * 159; 0.5 * 95 = 47.5, a tie, to the even 48
  assert "input tap 159 48" in rig.shell.lines


def test_a_larger_screen_is_shown_as_small_as_asked(bench):
  rig = bench(knobs(screen=(48, 80)), Checks())
  obs, _ = rig.env.reset(options={"task": a_task(check={"activity": "a/.B"})})
  whole = rig.env.phone.screenshot().astype(float)
  mean = whole.reshape(80, 2, 48, 2, 3).mean((1, 3))  # every pixel shown is the mean of four
  assert np.abs(obs["screenshot"] - mean).max() <= 0.5
  rig.env.step("tap(1, 1)")
  assert "input tap 95 159" in rig.shell.lines


def test_a_fault_ends_the_episode_without_a_score(bench):
  rig = bench()
  task = android.task_lists(COMPUTER, rig.cfg)["practice"][0]
  rig.env.reset(options={"task": task})
  rig.shell.torn = True
  with pytest.raises(BadFrame, match="raw screencap of"):
    rig.env.step("wait()")
  with pytest.raises(gym.error.ResetNeeded):
    rig.env.step("wait()")
  rig.shell.torn = False
  rig.env.reset(options={"task": task})
  rig.server.state = "offline"
  with pytest.raises(adb.DeviceLost, match="offline"):
    rig.env.step("wait()")
  with pytest.raises(adb.DeviceLost, match="not ready"):
    rig.env.reset(options={"task": task})
  rig.server.state = "device"
  rig.env.reset(options={"task": task})
  rig.env.health()


# -- checks and judges


def test_checks_read_the_phone(bench):
  rig = bench(referee=Checks())
  both = {"activity": "com.x/com.x.Main", "settings": {"global/wifi": "1"}}
  rig.env.reset(options={"task": a_task(check=both, start={"activity": "com.x/.Main"}, stop=["com.x"])})
  assert "am force-stop com.x" in "; ".join(rig.shell.lines)
  assert rig.env.step("finish()")[1] == 0.0
  rig.env.reset(options={"task": a_task(check=both, start={"activity": "com.x/.Main"})})
  rig.shell.settings["global", "wifi"] = "1"
  _, reward, terminated, _, info = rig.env.step("finish()")
  assert reward == 1.0 and terminated and info["notes"]["page"] == "com.x/.Main"
  rig.env.reset(options={"task": a_task(check=both, start={"activity": "com.x/.Main"})})
  assert rig.env.step("fail()")[1] == 0.0  # it could be done
  with pytest.raises(ResetFailed):
    rig.env.reset(options={"task": a_task(check=both, start={"activity": "no.such/.Thing"})})


def test_only_giving_up_passes_what_cannot_be_done(bench):
  env = bench(referee=Checks(lambda *_: 1.0)).env
  for text, reward in (("fail()", 1.0), ("finish()", 0.0)):
    env.reset(options={"task": a_task(infeasible=True)})
    assert env.step(text)[1] == reward


def test_a_judge_sees_the_last_frames_and_may_not_know(bench):
  asked, verdicts = [], iter([False, 0.4, True, None, float("nan"), 3])
  env = bench(referee=Checks(lambda *seen: asked.append(seen) or next(verdicts))).env
  task = a_task(check_when="every_step", steps=9)
  env.reset(options={"task": task})
  assert [env.step("wait()")[1] for _ in range(3)] == [0.0, 0.0, 1.0]
  who, frames, texts = asked[-1]
  assert who is task and len(frames) == 2 and texts == ["wait()"] * 3 and frames[0].shape == (160, 96, 3)
  for said in ("None", "nan", "3"):
    env.reset(options={"task": task})
    with pytest.raises(CheckerFailed, match=f"the judge said {said}"):
      env.step("wait()")
  env.referee.judge = None
  env.reset(options={"task": task})
  with pytest.raises(CheckerFailed, match="no check, and there is no judge"):
    env.step("finish()")


def test_the_judge_that_graded_is_told_and_one_beside_a_check_gives_its_opinion(bench):
  cfg = knobs()
  cfg.judge.update({"kind": "words", "beside": True})
  rig = bench(cfg, referee=Checks(judges.make(cfg.judge)))
  rig.env.reset(options={"task": a_task(reference="42")})
  info = rig.env.step('answer("it is 42")')[4]
  assert (info["rewards"], info["checker"]) == ({SUCCESS: 1.0}, "judge:words/1") and "judge" not in info
  for answer, said in (("42", 1.0), ("41", 0.0)):
    rig.env.reset(options={"task": a_task(reference="42", check={"settings": {"global/wifi": "1"}})})
    info = rig.env.step(f'answer("{answer}")')[4]
    assert (info["rewards"], info["judge"]) == ({SUCCESS: 0.0}, said) and "checker" not in info


def test_the_practice_application_may_be_missing(bench):
  rig = bench()
  rig.shell.command = lambda words, inputs: (0, b"Error: Activity class {practice/.Task} does not exist.\n", b"")
  with pytest.raises(ResetFailed, match="does not exist"):
    rig.env.reset(options={"task": android.task_lists(COMPUTER, rig.cfg)["practice"][0]})


# -- knobs and files


def test_task_files(tmp_path):
  goals, held = tmp_path / "train.txt", tmp_path / "test.jsonl"
  goals.write_text("Go to ebay.com, search for a mug\n\nOpen the clock\n")
  held.write_text(json.dumps({"goal": "wifi on", "id": "w", "check": {"settings": {"global/wifi_on": "1"}}, "steps": 7}) + "\n")
  cfg = knobs(tasks=str(goals), held_out=str(held), in_domain_tasks=1)
  android.check(cfg)
  with pytest.raises(ValueError, match="2 tasks have no check, e.g. train-Go to ebay.com, search for a mug: wanted a judge"):
    android.task_lists(COMPUTER, cfg)
  cfg.judge.kind = "words"
  lists = android.task_lists(COMPUTER, cfg)
  assert [t.goal for t in lists["practice"]] == ["Go to ebay.com, search for a mug", "Open the clock"] and len(lists["in_domain"]) == 1
  first, last = lists["practice"][0], lists["held_out"][0]
  assert (first.check, first.limits.steps, first.env) == ("every_step", 20, COMPUTER)
  assert (last.id, last.limits.steps, last.check, last.params) == ("test-w", 7, "end", {"check": {"settings": {"global/wifi_on": "1"}}})
  for text, told in (
    ('{"gaol": "x"}', "line 1: unknown gaol"),
    ("[1]", "line 1"),
    ("nonsense", "line 1"),
    ("", "got 0"),
    ('{"id": 1}', "'goal'"),
  ):
    held.write_text(text + "\n")
    with pytest.raises(ValueError, match=told):
      android.task_lists(COMPUTER, cfg)
  with pytest.raises(ValueError, match="share 2 tasks"):
    android.task_lists(COMPUTER, knobs(tasks=str(goals), held_out=str(goals)))


@pytest.mark.parametrize(
  "given, told",
  [
    ({"image": ""}, "env.image is empty"),
    ({"image": "a:1,a:1"}, "env.image is 'a:1,a:1', wanted every device once"),
    ({"grammar": "desktop"}, "env.grammar is 'desktop', wanted phone or digirl"),
    ({"screenshot": "jpg"}, "env.screenshot is 'jpg', wanted raw or png"),
    ({"snapshot": "clean"}, "env.snapshot is 'clean', wanted empty"),
    ({"settle_least": 9.0}, "env.settle_least is 9.0"),
    ({"tasks": "no/such.txt", "held_out": "x"}, "there is no such file"),
    ({"popup_chance": 2.0}, "env.popup_chance"),
    ({"call_seconds": 0.0}, "env.call_seconds is 0.0, wanted seconds above 0"),
  ],
)
def test_knobs_are_checked_before_any_device_is_asked(given, told):
  with pytest.raises(ValueError, match=told):
    android.make(COMPUTER, knobs(**given))


def test_every_environment_has_a_device_of_its_own():
  names = ["a:1", "b:2", "c:3"]
  taken = [locks.take("device-test", names, first, 1) for first in (1, 1, 1)]
  assert [index for index, _ in taken] == [1, 2, 0]
  with pytest.raises(errors.NoComputer, match="all of a:1, b:2, c:3 are in use for 0.1 s"):
    locks.take("device-test", names, 0, 0.1)
  threading.Timer(0.2, taken[1][1].close).start()  # whoever has it is on its way out
  taken.append(locks.take("device-test", names, 0, 10))
  assert taken[-1][0] == 2
  for _, lock in taken:
    lock.close()


def test_there_must_be_an_adb(monkeypatch):
  with pytest.raises(ValueError, match="env.adb is 'no-such-adb'.*make system"):
    android.make(COMPUTER, knobs(adb="no-such-adb", image="127.0.0.1:1"))
