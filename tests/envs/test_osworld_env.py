"""OSWorld episodes on a double of a desktop that speaks the real HTTP protocol: setup, scoring rules, getters, action spaces, the processes
of the metrics."""

import dataclasses
import os
import signal
import stat
import sys
import time

import gymnasium as gym
import ml_collections
import numpy as np
import pytest

from core.schema import SUCCESS, Action, Limits, Task
from envs import judges, processes
from envs.errors import CheckerFailed, ResetFailed
from envs.guest import GuestHung
from envs.osworld import checker as checker_lib
from envs.osworld import hand as at_hand
from envs.osworld import scoring, taskfile, tasks
from envs.osworld.env import OSWorldEnv, perform, rest
from envs.osworld.files import Files
from envs.osworld.getters import FileMissing
from tests.envs.desktop_double import Desktop, DoubleMachine

COMPUTER = "osworld/desktop"
DONE, FAIL = "Action: finished()", "Action: fail()"


def knobs(**changed):
  cfg = ml_collections.ConfigDict(
    {
      "grammar": "desktop", "shown": (0, 0), "evaluator": "", "check_seconds": 20.0, "check_memory_mb": 8192, "sandbox": "auto",
      "still_seconds": 0.0, "act_seconds": 30.0, "step_seconds": 5.0, "window_seconds": 0.5, "password": "pw", "compat_sleeps": False,
    }
    | changed
  )  # fmt: skip
  cfg.judge = judges.defaults()
  return cfg


@pytest.fixture
def desktop(tmp_path):
  made = Desktop(tmp_path / "guest")
  yield made
  made.close()


@pytest.fixture
def world(desktop, tmp_path):
  """make(**knobs) -> an environment on the double; the mirror holds gold.txt."""
  (tmp_path / "mirror").mkdir()
  (tmp_path / "mirror" / "gold.txt").write_text("one\ntwo\n")
  made = []

  def make(start_of=None, **changed):
    there = at_hand.Hand(Files([f"https://files.test/={tmp_path / 'mirror'}"]), password="pw", uploads=str(tmp_path / "mirror"))
    made.append(OSWorldEnv(COMPUTER, DoubleMachine(desktop), there, knobs(**changed), start_of))
    return made[-1]

  yield make
  for env in made:
    env.close()


def check_of(func, result, expected=None, options=None) -> dict:
  return {"func": func, "result": result, "expected": expected, "options": options}


VM_FILE = {"type": "vm_file", "path": "/home/user/Desktop/a.txt", "dest": "a.txt"}
GOLD = {"type": "cloud_file", "path": "https://files.test/gold.txt", "dest": "a.txt"}  # the name of the result's file: kept apart
DOWNLOAD = {"type": "download", "parameters": {"files": [{"url": "https://files.test/gold.txt", "path": "/home/user/Desktop/a.txt"}]}}


def task_of(evaluator, config=(), steps=5) -> Task:
  said = {"id": "t-1", "instruction": "Do it.", "config": list(config), "evaluator": evaluator}
  return Task("osworld-t-1", "Do it.", COMPUTER, "os", 0, {"file": said}, Limits(steps))


def play(env, task, *texts):
  """(reward, terminated, truncated, info) at the end; the episode is expired where the texts run out."""
  env.reset(options={"task": task})
  for text in texts:
    _, reward, terminated, truncated, info = env.step(text)
    if terminated or truncated:
      return reward, terminated, truncated, info
  info = env.expire()
  return info["rewards"][SUCCESS], False, True, info


EDIT = {  # the file is downloaded, opened, and must become gold and one line more
  "func": "practice_lines", "result": VM_FILE, "expected": {"type": "rule", "rules": {"expected": ["one", "two", "three"]}}
}  # fmt: skip
OPENED = (DOWNLOAD, {"type": "launch", "parameters": {"command": ["mousepad", "/home/user/Desktop/a.txt"]}},
          {"type": "activate_window", "parameters": {"window_name": "a.txt"}})  # fmt: skip


def test_an_episode_from_setup_to_score(world, desktop):
  env = world()
  obs, info = env.reset(options={"task": task_of(EDIT, OPENED)})
  assert obs["goal"] == "Do it." and env.observation_space.contains(obs) and obs["screenshot"][0, 0, 0] == 200
  assert desktop.launched == [["mousepad", "/home/user/Desktop/a.txt"]] and desktop.windows == ["a.txt"]
  obs, reward, terminated, truncated, info = env.step("Action: type(content='three')")
  assert (reward, terminated, truncated, info["action"].kind) == (0.0, False, False, "type")
  env.step("Action: hotkey(key='ctrl s')")
  _, reward, terminated, truncated, info = env.step(DONE)
  assert (reward, terminated, truncated, info["cause"], info["partial"]) == (1.0, True, False, "agent", 1.0)
  assert info["rewards"] == {SUCCESS: 1.0} and info["notes"]["parts"] == [1.0] and "checker" not in info
  with pytest.raises(gym.error.ResetNeeded):
    env.step(DONE)
  assert env.machine.acted[-1] == ("release",)  # nothing is held down when postconfig types
  reward, _, _, info = play(env, task_of(EDIT, OPENED), DONE)  # doing nothing, on a machine that was gone back to
  assert reward == 0.0 and env.machine.reverted == 2


def test_the_scripts_of_text_tasks_solve_them_on_the_double(world, tmp_path):
  """Of the families whose script only types at the end: the whole way from a task file of our own."""
  env = world()
  seed = tasks.seeds("text_append", 1, False)[0]
  tasks.write_files(tmp_path / "own", "text_append", seed)
  env.files.mirrors.append((tasks.URL, tmp_path / "own"))
  said = tasks.task_file("text_append", seed)
  task = Task(said["id"], said["instruction"], COMPUTER, "text_append", seed, {"file": said}, Limits(9))
  assert play(env, task, *tasks.script_of("text_append", seed))[0] == 1.0
  assert play(env, task, DONE)[0] == 0.0


def test_ends(world):
  env = world()
  task = task_of(EDIT, OPENED, steps=2)
  reward, terminated, truncated, info = play(env, task, "Action: wait()", "Action: wait()")
  assert (reward, terminated, truncated, info["cause"]) == (0.0, False, True, "steps")
  reward, terminated, _, info = play(env, task, "click here")
  assert (reward, terminated, info["cause"], info["partial"]) == (-1.0, True, "unreadable", None)
  assert env.machine.acted == []
  assert play(env, task)[3]["cause"] == "seconds"
  with pytest.raises(ValueError, match="wants options"):
    env.reset(options={"task": Task("a", "b", "android/phone", "f", 0, {}, Limits(1))})


# ---- the benchmark's rules


@pytest.mark.parametrize(
  "evaluator, texts, wanted",
  [
    ({"func": "infeasible"}, [FAIL], 1.0),
    ({"func": "infeasible"}, [DONE], 0.0),
    ({"func": "infeasible"}, ["Action: wait()"] * 2, 0.0),  # at the step limit nothing is swapped for FAIL
    ({"func": "infeasible"}, ["Action: fail() now"], -1.0),
    (check_of("compare_text_file", VM_FILE, GOLD), [DONE], 1.0),
    (check_of("compare_text_file", VM_FILE, GOLD), [FAIL], 0.0),  # it could have been done
    (check_of("compare_text_file", VM_FILE, GOLD), ["Action: wait()"] * 2, 1.0),
    (check_of("compare_text_file", VM_FILE, GOLD), ["Action: call_user()"], 1.0),
    (check_of("compare_text_file", VM_FILE | {"path": "/home/user/none.txt"}, GOLD), [DONE], 0.0),
    (check_of("check_list", {"type": "cache_file", "path": "none.out"}, {"type": "rule", "rules": {"unexpect": ["x"]}}), [DONE], 0.0),
  ],
)
def test_fail_and_infeasible(world, evaluator, texts, wanted):
  reward, *_ = play(world(), task_of(evaluator, [DOWNLOAD], steps=2), *texts)
  assert reward == wanted


@pytest.mark.parametrize(
  "conj, scores, value, computed",
  [
    ("and", [1, 1], 1.0, 2),
    ("and", [1, 0.5], 0.75, 2),
    ("and", [0, 1], 0.0, 1),  # at the first zero
    ("and", [0.5, 0, 1], 0.0, 2),
    ("and", [None, 1], 0.0, 1),
    ("or", [0, 1, 1], 1.0, 2),  # at the first one
    ("or", [0.2, 0.6, 0.4], 0.6, 3),
    ("or", [None, 0.4], 0.4, 2),
    ("or", [0, 0], 0.0, 2),
    ("and", [0.3], 0.3, 1),
    ("or", [1], 1.0, 1),
  ],
)
def test_and_or_and_missing_files(conj, scores, value, computed):
  """None: the file that the check wants is not there."""
  evaluator = {"func": ["exact_match"] * len(scores), "result": [VM_FILE] * len(scores), "conj": conj}
  said = {"id": "t", "instruction": "x", "evaluator": evaluator}

  def compute(i):
    if scores[i] is None:
      raise FileMissing("gone.txt")
    return float(scores[i]), ""

  got = scoring.by_checks(taskfile.parse(said, "t"), compute)
  assert (got.value, len(got.parts)) == (pytest.approx(value), computed)
  assert got.told == (("no file gone.txt",) if None in scores else ())


def test_partial_credit_is_kept_apart(world):
  gold = "two\nthree\n"
  env = world()
  (env.files.mirrors[0][1] / "half.txt").write_text("one\n" + gold[4:])
  half = check_of("diff_text_file", VM_FILE, GOLD | {"path": "https://files.test/half.txt"})
  reward, _, _, info = play(env, task_of(half, [DOWNLOAD]), DONE)  # one of two lines on each side: 2 * 1 / 4
  assert (reward, info["rewards"][SUCCESS], info["partial"]) == (0.0, 0.0, 0.5)


def test_result_and_expected_of_one_name_are_two_files(world, desktop):
  reward, *_ = play(world(), task_of(check_of("compare_text_file", VM_FILE, GOLD)), DONE)  # nothing was downloaded: there is no result
  assert reward == 0.0
  env = world()
  env.reset(options={"task": task_of(check_of("compare_text_file", VM_FILE, GOLD))})
  desktop.path(VM_FILE["path"]).write_text("wrong\n")
  assert env.step(DONE)[1] == 0.0  # the benchmark compares the first of the two with itself here


def test_several_checks_and_postconfig(world, desktop):
  post = [
    {"type": "execute", "parameters": {"command": "echo {SCREEN_WIDTH_HALF} {CLIENT_PASSWORD}", "shell": True, "stdout": "said.out"}},
    {"type": "close_window", "parameters": {"window_name": "not there"}},
    {"type": "sleep", "parameters": {"seconds": 0.01}},
  ]
  evaluator = {
    "func": ["check_list", "check_include_exclude", "is_expected_active_tab", "exact_match"], "postconfig": post,
    "result": [{"type": "cache_file", "path": "said.out"}, {"type": "vm_command_line", "command": ["echo", "hello"]},
               {"type": "active_url_from_accessTree", "goto_prefix": "https://"}, {"type": "rule", "rules": 5}],
    "expected": [{"type": "rule", "rules": rules} for rules in (
      {"expect": ["^32 pw$"]}, {"include": ["hello"]}, {"type": "url", "url": "https://a.test/x"}, {"expected": 5})],
  }  # fmt: skip
  reward, _, _, info = play(world(), task_of(evaluator), DONE)
  assert reward == 1.0 and info["notes"]["parts"] == [1.0] * 4
  assert ["close_window" in told for told in info["notes"]["postconfig"]] == [True]  # the agent may have closed it: noted, no fault
  desktop.tree = "<desktop/>"
  assert play(world(), task_of(evaluator), DONE)[3]["partial"] == 0.0


def test_what_an_agent_made_unreadable_scores_0_and_says_why(world, desktop):
  env = world()
  env.reset(options={"task": task_of(check_of("compare_text_file", VM_FILE, GOLD))})
  desktop.path(VM_FILE["path"]).write_bytes(b"\xff\xfe")
  _, reward, _, _, info = env.step(DONE)
  assert reward == 0.0 and "UnicodeDecodeError" in info["notes"]["check"][0]


def test_what_the_task_got_wrong_is_no_score(world):
  for evaluator in (
    check_of("is_extension_installed", {"type": "vm_command_line", "command": ["true"]}, {"type": "rule", "rules": {"type": "x"}}),
    check_of("exact_match", VM_FILE, {"type": "rule", "rules": {}}),
    check_of("compare_text_file", VM_FILE, GOLD | {"path": "https://files.test/none"}),
  ):
    with pytest.raises(CheckerFailed):
      play(world(), task_of(evaluator, [DOWNLOAD]), DONE)


# ---- setup


@pytest.mark.parametrize(
  "step, words",
  [
    ({"type": "open", "parameters": {"path": "/home/user/none.txt"}}, "setup step 0 (open): there is no file"),
    ({"type": "activate_window", "parameters": {"window_name": "Writer"}}, "there is no window 'Writer'"),
    ({"type": "execute", "parameters": {"command": "exit 3", "shell": True, "until": {"returncode": 0}}}, "never came to"),
    ({"type": "execute_with_verification", "parameters": {"command": ["true"], "verification": {"command_success": "false"}}}, "come true"),
    ({"type": "change_wallpaper", "parameters": {"path": "/home/user/none.png"}}, "there is no file"),
    ({"type": "upload_file", "parameters": {"files": [{"local_path": "../secret", "path": "/a"}]}}, "no file of env.uploads"),
    ({"type": "replay", "parameters": {"trajectory": "x"}}, "no way to do it"),
  ],
)
def test_a_setup_step_that_fails_is_a_failed_reset_that_names_it(world, step, words):
  with pytest.raises(ResetFailed) as caught:
    world(step_seconds=1.0).reset(options={"task": task_of({"func": "infeasible"}, [step])})
  assert words in str(caught.value) and "\n" not in str(caught.value) and "osworld-t-1" in str(caught.value)


def test_setup_steps_that_work(world, desktop):
  steps = [
    {"type": "upload_file", "parameters": {"files": [{"local_path": "gold.txt", "path": "/home/user/up.txt"}]}},
    {"type": "open", "parameters": {"path": "/home/user/up.txt"}},
    {"type": "close_window", "parameters": {"window_name": "up.txt", "strict": True}},
    {"type": "execute", "parameters": {"command": "exit 3", "shell": True}},  # what it returns does not matter without until
    {"type": "command", "parameters": {"command": ["sh", "-c", "echo x >> n; test $(wc -l < n) = 3"], "until": {"returncode": 0}}},
    {"type": "launch", "parameters": {"command": "galculator --now"}},
  ]
  world().reset(options={"task": task_of({"func": "infeasible"}, steps)})
  assert desktop.path("/home/user/up.txt").read_text() == "one\ntwo\n" and desktop.launched == [["galculator", "--now"]]
  assert desktop.path("/home/user/n").read_text() == "x\n" * 3 and desktop.windows == ["--now"]


def test_a_guest_that_hangs_is_an_infra_error_and_not_a_score(world, desktop):
  desktop.slow["/file"] = 3.0
  env = world(step_seconds=0.4)
  with pytest.raises(GuestHung):
    play(env, task_of(check_of("compare_text_file", VM_FILE, GOLD)), DONE)


def test_a_start_screen_must_stay_at_rest(desktop):
  """Looks at a screen: what is drawn late begins the wait anew; one that never rests is given up."""
  class Screen:
    def __init__(self, looks):
      self.looks, self.count = looks, 0

    def settle(self):
      self.count += 1
      shade, rested = self.looks[min(self.count, len(self.looks)) - 1]
      return np.full((2, 2, 3), shade, np.uint8), rested

  late = Screen([(1, True), (2, True), (2, True)])
  frame, rested = rest(late, 0.05, 5.0)
  assert rested and frame[0, 0, 0] == 2 and late.count >= 3
  frame, rested = rest(Screen([(1, True)]), 0.0, 5.0)
  assert rested and frame[0, 0, 0] == 1
  assert rest(Screen([(n % 7, True) for n in range(1000)]), 0.05, 0.3)[1] is False
  assert rest(Screen([(1, False)]), 0.0, 0.1)[1] is False


def test_starts_of_a_task_replace_its_setup(world, desktop):
  env = world(start_of=lambda file: (f"state of {file.id}", ()))
  env.reset(options={"task": task_of(EDIT, OPENED)})
  assert env.machine.start == "state of t-1" and desktop.launched == []


def test_the_lease_is_emptied_and_files_of_others_are_out_of_reach(world):
  one, other = world(), world()
  for env in (one, other):
    play(env, task_of(check_of("compare_text_file", VM_FILE, GOLD), [DOWNLOAD]), DONE)
  assert one.lease.folder != other.lease.folder
  assert sorted(p.name for p in one.lease.folder.iterdir()) == ["expected-0", "result-0"]
  one.reset(options={"task": task_of(EDIT, OPENED)})
  assert list(one.lease.folder.iterdir()) == [] and len(list(other.lease.folder.iterdir())) == 2
  for name in ("../x", "/x", "a/../../x", ""):
    with pytest.raises(ValueError, match="no name of a file"):
      one.lease.path(name)


# ---- action spaces


@pytest.mark.parametrize(
  "grammar, text, wanted",
  [
    ("computer_13", '{"action_type": "MOVE_TO", "x": 3, "y": 4}', [("move", (3, 4))]),
    ("computer_13", '{"action_type": "CLICK"}', [("click", (32, 24), "left", 1)]),  # where the pointer is
    ("computer_13", '{"action_type": "CLICK", "x": 3, "y": 4, "num_clicks": 3}', [("click", (3, 4), "left", 3)]),
    ("computer_13", '{"action_type": "CLICK", "x": 3, "y": 4}', [("click", {"point": (3, 4)})]),  # the machine's own
    ("computer_13", '{"action_type": "DRAG_TO", "x": 3, "y": 4}', [("drag", (32, 24), (3, 4))]),
    ("computer_13", '{"action_type": "SCROLL", "dx": -2, "dy": 3}', [("scroll", (32, 24), "left", 2), ("scroll", (32, 24), "up", 3)]),
    ("computer_13", '{"action_type": "MOUSE_DOWN"}', [("hold", "left", True)]),
    ("computer_13", '{"action_type": "KEY_UP", "key": "shiftleft"}', [("hold_key", "shift", False)]),
    ("pyautogui", "pyautogui.rightClick()", [("click", (32, 24), "right", 1)]),
    (
      "pyautogui", "pyautogui.moveTo(1, 2); pyautogui.dragTo(3, 4)\ntime.sleep(0.01)\npyautogui.write('hi\\n')",
      [("move", (1, 2)), ("drag", (1, 2), (3, 4)), ("type", {"text": "hi", "enter": True})],
    ),
  ],
)  # fmt: skip
def test_every_action_space_reaches_the_machine(world, grammar, text, wanted):
  env = world(grammar=grammar)
  env.reset(options={"task": task_of({"func": "infeasible"})})
  _, _, _, _, info = env.step(text)
  assert isinstance(info["action"], Action) and env.machine.acted == wanted


@pytest.mark.parametrize("grammar, done, fail", [("computer_13", "DONE", "FAIL"), ("pyautogui", "```DONE```", "FAIL")])
def test_their_words_end_the_episode(world, grammar, done, fail):
  env = world(grammar=grammar)
  assert play(env, task_of({"func": "infeasible"}), fail)[0] == 1.0 and play(env, task_of({"func": "infeasible"}), done)[0] == 0.0
  assert play(env, task_of({"func": "infeasible"}), "__import__('os')")[0] == -1.0


def test_points_are_read_in_the_picture_that_is_shown(world):
  env = world(shown=(32, 24))
  obs, _ = env.reset(options={"task": task_of({"func": "infeasible"})})
  assert obs["screenshot"].shape == (24, 32, 3)
  env.step("Action: click(start_box='(10,20)')")
  assert env.machine.acted == [("click", {"point": (20, 40)})]  # 64 x 48 behind it


def test_an_action_of_no_desktop_is_a_programs_mistake(desktop):
  with pytest.raises(ValueError, match="not one of a desktop"):
    perform(DoubleMachine(desktop), Action("goto", {"url": "x"}, {}, "web"))


# ---- the processes of the metrics

FOREIGN = '''
import time, vlc_bindings_that_nobody_has as vlc
def loud(result, expected=None, **options): print("noise"); return result == expected
def forever(result): time.sleep(60)
def hungry(result): return len(bytearray(1 << 34))
def wrong(result): return 7
def needs(result): return vlc.media(result)
def outside(result):
  import socket
  socket.create_connection(("127.0.0.1", int(result)), 2)
  return 1.0
def writes(result):
  open(result, "w").write("x")
  return 1.0
def dies(result):
  import os
  os._exit(3)
'''
GETTERS = '''
def get_home(env, config): return env.controller.get_file("/home/user/a.txt").decode() + str(env.controller.get_vm_screen_size()["width"])
def get_broken(env, config): return env.controller.get_file("/home/user/none.txt").decode()
'''


@pytest.fixture
def foreign(tmp_path, monkeypatch):
  """An interpreter in whose path there is a desktop_env of these metrics."""
  package = tmp_path / "site" / "desktop_env" / "evaluators"
  package.mkdir(parents=True)
  (tmp_path / "site" / "desktop_env" / "__init__.py").write_text("")
  (package / "__init__.py").write_text("")
  (package / "metrics.py").write_text(FOREIGN)
  (package / "getters.py").write_text(GETTERS)
  python = tmp_path / "python"
  python.write_text(f"#!/bin/sh\nPYTHONPATH={tmp_path / 'site'} exec {sys.executable} \"$@\"\n")
  python.chmod(python.stat().st_mode | stat.S_IXUSR)
  lease = tmp_path / "lease"
  lease.mkdir()
  made = checker_lib.Checker(str(lease), str(python), seconds=2.0, memory=4 << 30)
  yield made
  made.close()


def test_a_users_metrics(foreign):
  assert "loud" in foreign.listed(True)["metrics"] and foreign.listed(True)["getters"] == ["broken", "home"]
  assert foreign.metric("loud", "a", "a", {}, True) == (1.0, "") and foreign.metric("loud", "a", "b", {}, True) == (0.0, "")
  assert len(foreign.used) == 1 and next(iter(foreign.used)).startswith("desktop-env")
  first = foreign.program(True).popen.pid
  for name, words in (
    ("needs", "vlc_bindings_that_nobody_has.* is not installed"), ("hungry", "MemoryError"), ("absent", "absent"), ("forever", "Starved")
  ):  # fmt: skip
    with pytest.raises(CheckerFailed, match=words):
      foreign.metric(name, "a", None, {}, True)
  assert foreign.metric("wrong", "a", None, {}, True) == (7.0, "")  # out of range: the environment refuses it
  assert foreign.program(True).popen.pid == first
  with pytest.raises(CheckerFailed, match="ended: exit 3"):
    foreign.metric("dies", "a", None, {}, True)
  assert not os.path.exists(f"/proc/{first}") and foreign.metric("loud", 1, 1, {}, True) == (1.0, "")  # a fresh one


def test_a_metric_that_no_alarm_reaches_is_ended_from_outside(foreign, monkeypatch):
  monkeypatch.setattr(checker_lib, "SPARE", 0.3)
  program = foreign.program(True)
  began = time.monotonic()
  for pid, start in [(program.popen.pid, None), *processes.family(program.popen.pid)]:
    processes.send(pid, start, signal.SIGSTOP)  # as deaf as one that hangs in a library of C
  with pytest.raises(CheckerFailed, match="did not end in time"):
    foreign.seconds = 0.2
    foreign.metric("loud", "x" * (1 << 20), 1, {}, True)  # more than a pipe holds
  assert time.monotonic() - began < 15 and program.popen.returncode is not None
  foreign.seconds = 5.0
  assert foreign.metric("loud", 1, 1, {}, True) == (1.0, "")


def test_metrics_reach_no_network_and_write_only_their_own_folder(foreign, desktop, tmp_path):
  if why := checker_lib.can_enclose():
    pytest.skip(f"no namespaces here: {why}")
  with pytest.raises(CheckerFailed, match="unreachable"):
    foreign.metric("outside", str(desktop.server.server_port), None, {}, True)
  with pytest.raises(CheckerFailed, match="Read-only"):
    foreign.metric("writes", str(tmp_path / "beside"), None, {}, True)
  assert foreign.metric("writes", str(tmp_path / "lease" / "own"), None, {}, True) == (1.0, "")
  assert not (tmp_path / "beside").exists() and (tmp_path / "lease" / "own").read_text() == "x"


def test_getters_of_theirs_reach_the_guest_through_us(world, desktop, foreign):
  env = world()
  env.checker = foreign
  env.hand = dataclasses.replace(env.hand, metrics=frozenset({"loud", "wrong"}), getters=frozenset({"home", "broken"}))
  desktop.fresh()
  evaluator = check_of("loud", {"type": "home"}, {"type": "rule", "rules": "content64"})
  env.reset(options={"task": task_of(evaluator)})
  desktop.path("/home/user/a.txt").write_text("content")
  env.machine.guest.screen_size = lambda seconds=None: (64, 48)
  first = foreign.program(True).popen.pid
  _, reward, _, _, info = env.step(DONE)
  assert not os.path.exists(f"/proc/{first}")  # what it keeps of this episode never meets the next
  assert reward == 1.0 and info["checker"].startswith("desktop-env")
  env.reset(options={"task": task_of(check_of("loud", {"type": "broken"}))})
  with pytest.raises(CheckerFailed, match="getter broken"):
    env.step(DONE)
  env.reset(options={"task": task_of(check_of("wrong", {"type": "rule", "rules": 1}))})
  with pytest.raises(CheckerFailed, match="came to 7"):
    env.step(DONE)
  desktop.slow["/file"], env.cfg.step_seconds = 3.0, 0.3
  env.reset(options={"task": task_of(evaluator)})
  with pytest.raises(GuestHung):  # the guest's fault keeps its name
    env.step(DONE)


def test_an_interpreter_that_has_none_is_one_line(tmp_path):
  made = checker_lib.Checker(str(tmp_path), sys.executable, seconds=2.0)
  with pytest.raises(CheckerFailed, match="No module named 'desktop_env'|cannot compute metrics"):
    made.listed(True)
  made.close()
  with pytest.raises(CheckerFailed, match="env.evaluator"):
    checker_lib.Checker(str(tmp_path)).metric("vlc", 1, 1, {}, True)
