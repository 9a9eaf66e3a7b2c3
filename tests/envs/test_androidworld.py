"""AndroidWorld's server as a source of tasks, against a double that follows its published routes; the real server was never run."""

import contextlib
import http.server
import json
import threading
import time
import urllib.parse

import numpy as np
import pytest

from core.schema import SUCCESS
from envs import androidworld
from envs.actions import parse
from envs.androidworld import COMPUTER, HttpPhone, Server, ServerFault, ServerHung, ServerLost, as_json
from envs.errors import BadFrame, CheckerFailed, Deadline, NoComputer, ResetFailed
from envs.grammars.androidworld import KINDS
from envs.handset import Untypable

TYPES = ["ContactsAddContact", "AudioRecorderRecordAudio", "ClockStopWatchRunning", "FilesDeleteFile", "SystemWifiTurnOn"]
JSON_ACTIONS = {"click", "double_tap", "scroll", "swipe", "input_text", "navigate_home", "navigate_back", "keyboard_enter", "open_app",
                "status", "wait", "long_press", "answer", "unknown"}  # fmt: skip
NAMES = {"action_type", "index", "x", "y", "text", "direction", "goal_status", "app_name", "keycode", "clear_text"}


class World:
  """What stands behind the routes of android_server.py: a suite, an emulator's pixels, and the rules that raise (answered as 500)."""

  def __init__(self):
    self.suite, self.set_up, self.actions, self.answer, self.calls = (2, 42), set(), [], None, []
    self.score, self.goal_of, self.sleep, self.pixels, self.broken = 1.0, "goal of {} {} under {}", 0.0, None, ""

  def handle(self, method, path, params, body):
    self.calls.append(f"{method} {path}")
    time.sleep(self.sleep)
    if path == self.broken:
      raise RuntimeError("broken")
    which = (params.get("task_type"), int(params.get("task_idx", -1)))
    if path == "/suite/reinitialize" and method == "GET":
      assert params["task_family"] == "android_world"
      self.suite = int(params["n_task_combinations"]), int(params["seed"])
      return {"status": "success", "message": "Task suite re-initialized."}
    if path == "/suite/task_list" and method == "GET":
      return {"task_list": TYPES if int(params["max_index"]) < 0 else TYPES[: int(params["max_index"])]}
    if path == "/suite/task_length" and method == "GET":
      return {"length": {name: self.suite[0] for name in TYPES}[params["task_type"]]}
    if path == "/task/goal" and method == "GET":
      return {"goal": self.goal_of.format(*which, self.suite[1])}
    if path == "/task/initialize" and method == "POST":
      if which in self.set_up:
        raise RuntimeError("initialize_task() can only be called once.")
      self.set_up.add(which)
      return {"status": "success"}
    if path == "/task/tear_down" and method == "POST":
      self.set_up.discard(which)
      return {"status": "success"}
    if path == "/task/score" and method == "GET":
      assert which in self.set_up
      return {"score": self.score(self) if callable(self.score) else self.score}
    if path == "/execute_action" and method == "POST":
      return self.execute(body)
    if path == "/screenshot" and method == "GET":
      assert params["wait_to_stabilize"] in ("true", "false")
      return {"pixels": np.full((24, 12, 3), 7 + len(self.actions), int).tolist() if self.pixels is None else self.pixels}
    if (method, path) in (("POST", "/reset"), ("GET", "/health")):
      assert path != "/reset" or params["go_home"] == "true"
      return {"status": "success"}
    raise LookupError(path)

  def execute(self, said):
    if said["action_type"] not in JSON_ACTIONS or not said.keys() <= NAMES:
      raise ValueError(f"Invalid action: {said}")
    if said["action_type"] in ("click", "double_tap", "long_press", "input_text") and not (type(said["x"]) is type(said["y"]) is int):
      raise ValueError(f"Invalid click action: {said}")
    if said["action_type"] == "answer":
      self.answer = said["text"]
    self.actions.append(said)
    return {"status": "success", "message": "Action executed."}


@contextlib.contextmanager
def serving(world):
  class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
      parts = urllib.parse.urlsplit(self.path)
      body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
      try:
        said, status = (
          world.handle(self.command, parts.path, dict(urllib.parse.parse_qsl(parts.query)), json.loads(body) if body else None),
          200,
        )
      except LookupError:
        said, status = {"detail": "Not Found"}, 404
      except (RuntimeError, ValueError, AssertionError):
        said, status = "Internal Server Error", 500
      data = (json.dumps(said) if status != 500 else said).encode()
      with contextlib.suppress(OSError):  # a client that gave up
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = answer
    log_message = lambda self, *args: None

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  server.daemon_threads = True
  threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
  try:
    yield f"http://127.0.0.1:{server.server_port}"
  finally:
    server.shutdown()
    server.server_close()


@pytest.fixture
def world():
  made = World()
  with serving(made) as made.url:
    yield made


@pytest.fixture
def cfg(world):
  cfg = androidworld.defaults()
  cfg.server, cfg.call_seconds, cfg.reset_seconds, cfg.score_seconds = world.url, 5.0, 5.0, 5.0
  return cfg


@pytest.fixture
def env(cfg):
  made = androidworld.make(COMPUTER, cfg)
  yield made
  made.close()


def first(cfg):
  return androidworld.task_lists(COMPUTER, cfg)["practice"][0]


def test_its_tasks_are_ours_by_type(cfg, world):
  cfg.suite_seed, cfg.combinations = 7, 3
  lists = androidworld.task_lists(COMPUTER, cfg)
  assert world.suite == (3, 7)
  # alphabetical: Audio, Clock, Contacts, Files, System; every fourth is held out
  assert {t.family for t in lists["held_out"]} == {"FilesDeleteFile"} and len(lists["held_out"]) == 3 and len(lists["practice"]) == 12
  task = lists["practice"][0]
  assert (task.id, task.goal) == ("androidworld-AudioRecorderRecordAudio-0-s7", "goal of AudioRecorderRecordAudio 0 under 7")
  assert not {t.id for t in lists["held_out"]} & {t.id for t in lists["practice"]} and lists["in_domain"] == lists["practice"][:12]


def test_an_episode_sends_what_the_agent_said_and_takes_its_score(env, cfg, world):
  world.score = lambda w: 1.0 if w.answer == "4" and w.actions[0] == {"action_type": "click", "x": 5, "y": 20} else 0.0
  obs, info = env.reset(options={"task": first(cfg)})
  assert obs["screenshot"].shape == (24, 12, 3) and (obs["screenshot"] == 7).all() and world.set_up == {("AudioRecorderRecordAudio", 0)}
  obs, reward, *ends, info = env.step('Reason: there.\nAction: {"action_type": "click", "x": 5, "y": 20}')
  assert (obs["screenshot"] == 8).all() and reward == 0.0 and ends == [False, False]
  env.step('{"action_type": "scroll", "direction": "down"}')
  env.step('{"action_type": "input_text", "text": "a \\"b\\" é", "x": 1, "y": 2}')
  _, reward, terminated, _, info = env.step('{"action_type": "answer", "text": "4"}')
  assert reward == 1.0 and terminated and info["rewards"] == {SUCCESS: 1.0} and info["partial"] == 1.0
  assert world.actions[1:] == [
    {"action_type": "scroll", "direction": "down"},
    {"action_type": "input_text", "text": 'a "b" é', "x": 1, "y": 2},
    {"action_type": "answer", "text": "4"},
  ]
  env.reset(options={"task": first(cfg)})  # the last one is taken down first
  assert world.calls.count("POST /task/tear_down") == 1


def test_partial_scores_do_not_pass_and_giving_up_never_does(env, cfg, world):
  for score, text, reward, partial in (
    (0.5, '{"action_type": "status", "goal_status": "complete"}', 0.0, 0.5),
    (1.0, '{"action_type": "status", "goal_status": "infeasible"}', 0.0, 0.0),
    (1, '{"action_type": "status", "goal_status": "complete"}', 1.0, 1.0),
    (True, '{"action_type": "status", "goal_status": "complete"}', 1.0, 1.0),
  ):
    world.score = score
    env.reset(options={"task": first(cfg)})
    _, got, terminated, _, info = env.step(text)
    assert (got, terminated, info["partial"]) == (reward, True, partial)
  cfg.steps = 2
  env.reset(options={"task": first(cfg)})
  env.step('{"action_type": "wait"}')
  _, got, terminated, truncated, info = env.step('{"action_type": "wait"}')
  assert (got, terminated, truncated, info["cause"]) == (1.0, False, True, "steps")  # checked all the same


@pytest.mark.parametrize("score", [None, "1", -0.1, 1.5, float("nan"), [1]])
def test_a_score_that_is_none_is_no_score(env, cfg, world, score):
  world.score = score
  env.reset(options={"task": first(cfg)})
  with pytest.raises(CheckerFailed, match="AndroidWorld's server said"):
    env.step('{"action_type": "status", "goal_status": "complete"}')


def test_errors_of_the_server_are_infra_errors_each_with_its_cause(env, cfg, world):
  task = first(cfg)
  env.reset(options={"task": task})
  world.broken = "/execute_action"
  with pytest.raises(ServerFault, match="POST .*/execute_action: status 500: Internal Server Error"):
    env.step('{"action_type": "wait"}')
  world.broken = "/task/score"
  env.reset(options={"task": task})
  with pytest.raises(ServerFault, match="/task/score: status 500"):
    env.step('{"action_type": "status", "goal_status": "complete"}')
  world.broken, world.goal_of = "", "another"
  with pytest.raises(ResetFailed, match="the server's goal is 'another'.*env.suite_seed"):
    env.reset(options={"task": task})
  world.sleep, hung = 0.6, Server(world.url, 0.2)
  began = time.monotonic()
  with pytest.raises(ServerHung, match="no answer within 0.2 s"):
    hung.ask("GET", "/health")
  assert time.monotonic() - began < 2 and issubclass(ServerHung, Deadline)
  with pytest.raises(ServerLost, match="refused"):
    Server("http://127.0.0.1:1", 1.0).ask("GET", "/health")
  world.sleep = 0.0
  with pytest.raises(ServerFault, match="status 404"):
    Server(world.url, 5.0).ask("GET", "/nothing")


def test_a_task_that_a_dead_worker_left_set_up_is_begun_anew(env, cfg, world):
  task = first(cfg)
  world.set_up.add((task.params["type"], 0))
  env.reset(options={"task": task})
  wanted = ["POST /reset", "POST /task/initialize", "POST /task/tear_down", "POST /task/initialize", "GET /task/goal", "GET /screenshot"]
  assert world.calls[-6:] == wanted
  world.broken = "/task/initialize"
  with pytest.raises(ServerFault, match="initialize"):
    env.reset(options={"task": task})


def test_torn_screens(world):
  for pixels in ([], [[1, 2], [3]], [[[1, 2]]], [[[1, 2, 300]]], [[[0.5, 1, 2]]], [[["a", 1, 2]]], [[[-1, 0, 0]]]):
    world.pixels = pixels
    with pytest.raises((BadFrame, ServerFault)):
      HttpPhone(Server(world.url, 5.0)).screenshot(1.0)


def test_every_kind_of_the_grammar_can_be_sent_and_comes_out_as_it_was_written():
  texts = [
    '{"action_type": "click", "x": 5, "y": 20}', '{"action_type": "double_tap", "x": 5, "y": 20}',
    '{"action_type": "long_press", "x": 5, "y": 20}', '{"action_type": "input_text", "text": "a", "x": 5, "y": 6, "clear_text": true}',
    '{"action_type": "swipe", "direction": "left"}', '{"action_type": "scroll", "direction": "up"}', '{"action_type": "wait"}',
    '{"action_type": "navigate_home"}', '{"action_type": "navigate_back"}', '{"action_type": "keyboard_enter"}',
    '{"action_type": "open_app", "app_name": "Files"}', '{"action_type": "answer", "text": "4"}',
    '{"action_type": "status", "goal_status": "complete"}', '{"action_type": "status", "goal_status": "infeasible"}',
  ]  # fmt: skip
  seen = set()
  for text in texts:
    action = parse(text, "androidworld", (12, 24))
    assert as_json(action, (12, 24)) == json.loads(text)
    seen.add(action.kind)
  assert seen == set(KINDS)
  for text in ('type("a")', "swipe(0.1, 0.2, 0.3, 0.4)"):  # another grammar may say what the server has no word for
    with pytest.raises(Untypable):
      as_json(parse(text, "phone", (12, 24)), (12, 24))


def test_knobs(cfg, world):
  for server in ("", "127.0.0.1:5000", "https://x", "http://"):
    cfg.server = server
    with pytest.raises(ValueError, match="env.server is .*wanted http://host:port"):
      androidworld.check(cfg)
  cfg.server = "http://127.0.0.1:1"
  with pytest.raises(ValueError, match="env.server: GET http://127.0.0.1:1/suite/reinitialize: .*refused"):
    androidworld.task_lists(COMPUTER, cfg)
  cfg.server, cfg.image, cfg.attach_seconds = world.url, "a:1,b:2", 0.2
  with pytest.raises(ValueError, match="env.image is 'a:1,b:2', wanted the emulator of each of the 1 servers"):
    androidworld.check(cfg)
  cfg.image = ""
  held = androidworld.make(COMPUTER, cfg)
  with pytest.raises(NoComputer, match="every environment wants a server of its own"):
    androidworld.make(COMPUTER, cfg)
  held.close()
  androidworld.make(COMPUTER, cfg).close()
