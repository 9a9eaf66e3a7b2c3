"""AndroidWorld's 116 tasks through its own HTTP server (android_world/server/android_server.py), with its own scores.

  --config.env.server=http://127.0.0.1:5000               one server and its emulator for every worker, commas between
  --config.env.image=127.0.0.1:5555                       the same emulators through adb: quicker screens, every action

Without env.image the screens and actions go through the server too: it sends 1080 x 2400 pixels as JSON, tens of megabytes a look.
The server was read, not run: its double in tests/envs/test_androidworld.py follows its routes.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.parse
from typing import Any

import gymnasium as gym
import ml_collections
import numpy as np

from core.schema import Action, Episode, Limits, Task
from envs import android, sim
from envs.canary import Canary
from envs.errors import BadFrame, Deadline, InfraError, ResetFailed
from envs.grammars import androidworld as grammar
from envs.grammars.lex import Bad
from envs.grammars.points import frame
from envs.handset import Untypable
from envs.locks import Lock, take
from envs.referees import score_of

MACHINE = (*android.MACHINE, "server", "reset_seconds", "score_seconds")
MOST_BYTES = 256 << 20
COMPUTER = "androidworld/phone"


class ServerLost(InfraError):
  """AndroidWorld's server is not there, or broke off."""


class ServerHung(Deadline):
  """AndroidWorld's server did not answer in time."""


class ServerFault(InfraError):
  """AndroidWorld's server answered with an error, or with what is no answer."""


def defaults() -> ml_collections.ConfigDict:
  """Knobs of envs.android, and of the server; seconds unless said otherwise."""
  cfg = android.defaults()
  cfg.update(
    {
      "computer": COMPUTER,
      "server": "",  # http://host:port of AndroidWorld's server, commas between several; every environment has one of its own
      "grammar": "androidworld",
      "suite_seed": 42,  # of the tasks' parameters
      "combinations": 2,  # instances of every task
      "held_out_every": 4,  # of the task types in alphabetical order, every so-manieth is never practised
      "infeasible": (),  # task types that cannot be done; none of the 116
      "reset_seconds": 100.0,  # of setting a task up; below pool.deadlines.reset
      "score_seconds": 100.0,  # below pool.deadlines.evaluate
    }
  )
  return cfg


def check(cfg: ml_collections.ConfigDict) -> None:
  """Domains of the knobs; each failure one line."""
  android.check(ml_collections.ConfigDict(cfg.to_dict() | ({} if cfg.image else {"image": "none"})))
  for server in servers(cfg) or [""]:
    parts = urllib.parse.urlsplit(server)
    if parts.scheme != "http" or not parts.hostname:
      raise ValueError(f"env.server is {cfg.server!r}, wanted http://host:port of AndroidWorld's server, commas between several")
  if cfg.image and len(android.places(cfg)) != len(servers(cfg)):
    raise ValueError(f"env.image is {cfg.image!r}, wanted the emulator of each of the {len(servers(cfg))} servers, in their order")
  if cfg.combinations < 1 or cfg.held_out_every < 2:
    raise ValueError(f"env.combinations, held_out_every are {cfg.combinations}, {cfg.held_out_every}, wanted 1 or more and 2 or more")


def servers(cfg: ml_collections.ConfigDict) -> list[str]:
  return [server.strip() for server in cfg.server.split(",") if server.strip()]


class Server:
  """A client of one server. Requests are sent once; every one has a deadline over the whole of it."""

  def __init__(self, base: str, seconds: float):
    parts = urllib.parse.urlsplit(base)
    self.base, self.host, self.port, self.seconds = base, parts.hostname, parts.port or 80, seconds

  def ask(self, method: str, path: str, seconds: float | None = None, body: Any = None, **params) -> Any:
    """The JSON that came back."""
    seconds = seconds or self.seconds
    until, what = time.monotonic() + seconds, f"{method} {self.base}{path}"
    query = urllib.parse.urlencode({k: str(v).lower() if isinstance(v, bool) else v for k, v in params.items()})
    talk = http.client.HTTPConnection(self.host, self.port, timeout=seconds)
    try:
      said = None if body is None else json.dumps(body)
      talk.request(method, path + (f"?{query}" if query else ""), said, {"Content-Type": "application/json"} if said else {})
      reply, data = talk.getresponse(), bytearray()
      while piece := reply.read1(1 << 20):
        data += piece
        if time.monotonic() > until:
          raise TimeoutError
        if len(data) > MOST_BYTES:
          raise ServerFault(f"{what}: more than {MOST_BYTES} bytes")
      if reply.status != 200:
        raise ServerFault(f"{what}: status {reply.status}: {data[:300].decode(errors='replace')}")
      return json.loads(data)
    except TimeoutError:
      raise ServerHung(f"{what}: no answer within {seconds:g} s") from None
    except (OSError, http.client.HTTPException) as error:
      raise ServerLost(f"{what}: {error}") from None
    except ValueError:
      raise ServerFault(f"{what}: not JSON: {bytes(data[:100])!r}") from None
    finally:
      talk.close()

  def get(self, name: str, path: str, kind: type | tuple, **params) -> Any:
    """One value of the answer, of a type."""
    said = self.ask("GET", path, **params)
    if not isinstance(said, dict) or not isinstance(said.get(name), kind):
      raise ServerFault(f"{self.base}{path}: wanted {name}, got {said!r:.200}")
    return said[name]


class HttpPhone:
  """The emulator behind the server, seen and touched through it."""

  def __init__(self, server: Server, lock: Lock | None = None):
    self.server, self.lock, self.size = server, lock, (0, 0)

  def ready(self) -> None:
    self.health()

  def screenshot(self, seconds: float) -> np.ndarray:
    """uint8 [H, W, 3]; the server waits until the screen is at rest, within its own time."""
    rows = self.server.get("pixels", "/screenshot", list, wait_to_stabilize=True)
    try:
      pixels = np.asarray(rows)
    except ValueError as error:
      raise BadFrame(f"{self.server.base}: {error}") from None
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype.kind not in "iu" or pixels.min() < 0 or pixels.max() > 255:
      raise BadFrame(f"{self.server.base}: a screenshot of {pixels.dtype} {pixels.shape}, wanted bytes [H, W, 3]")
    self.size = (pixels.shape[1], pixels.shape[0])
    return pixels.astype(np.uint8)

  def act(self, action: Action) -> None:
    self.server.ask("POST", "/execute_action", body=as_json(action, self.size))

  def on_top(self) -> str:
    return ""

  def health(self) -> None:
    self.server.ask("GET", "/health")

  def close(self) -> None:
    if self.lock is not None:
      self.lock.close()


def as_json(action: Action, size: tuple[int, int]) -> dict:
  """An action in AndroidWorld's words, in pixels of the screen; Untypable if it has none for it."""
  try:
    said = grammar.derive(action.kind, action.args, frame(size, None, None, "pixels"))
  except (Bad, ValueError, KeyError) as error:
    raise Untypable(f"AndroidWorld has no such action: {action.kind} {action.args!r:.80} ({error})") from None
  if "point" in said:
    said["x"], said["y"] = (int(v) for v in said.pop("point"))
  elif said["action_type"] == "input_text":
    raise Untypable("AndroidWorld's input_text wants a place to tap first")
  return said


class Referee:
  """AndroidWorld itself: it sets its tasks up, and its score is the verdict."""

  graded, keeps = True, 0

  def __init__(self, server: Server, cfg: ml_collections.ConfigDict):
    self.server, self.cfg = server, cfg
    self.open: dict | None = None  # the task that is set up
    reinitialize(server, cfg)

  def begin(self, phone: Any, task: Task) -> None:
    which = {"task_type": task.params["type"], "task_idx": task.params["index"]}
    slow = self.cfg.reset_seconds
    if self.open is not None:
      self._tear_down(self.open)
    self.server.ask("POST", "/reset", slow, go_home=True)
    try:
      self.server.ask("POST", "/task/initialize", slow, **which)
    except ServerFault:  # refused where a worker that died left this task set up: once more, from the beginning
      self._tear_down(which)
      self.server.ask("POST", "/task/initialize", slow, **which)
    self.open = which
    goal = self.server.get("goal", "/task/goal", str, **which)
    if goal != task.goal:
      raise ResetFailed(f"{task.id}: the server's goal is {goal!r:.80}, the task's is {task.goal!r:.80}: another env.suite_seed?")

  def _tear_down(self, which: dict) -> None:
    self.open = None
    self.server.ask("POST", "/task/tear_down", self.cfg.reset_seconds, **which)

  def look(self, phone: Any) -> dict:
    return {"popup": "", "page": phone.on_top()}

  def hear(self, text: str) -> None:
    """The agent's answer, where the score looks for it."""
    self.server.ask("POST", "/execute_action", body={"action_type": "answer", "text": text})

  def verdict(self, phone: Any, task: Task, frames: list, texts: list[str]) -> float:
    score = self.server.ask("GET", "/task/score", self.cfg.score_seconds, **self.open)
    return score_of(score.get("score") if isinstance(score, dict) else score, task, "AndroidWorld's server")

  def close(self) -> None:
    if self.open is not None:
      try:
        self._tear_down(self.open)
      except InfraError as fault:
        print(f"{self.server.base}: its task was left set up: {fault}", flush=True)


def reinitialize(server: Server, cfg: ml_collections.ConfigDict) -> None:
  """The same tasks with the same parameters on every server."""
  server.ask("GET", "/suite/reinitialize", cfg.reset_seconds, n_task_combinations=cfg.combinations, seed=cfg.suite_seed,
             task_family="android_world")  # fmt: skip


def make(computer: str, cfg: ml_collections.ConfigDict, clean: bool = False, quick: bool = True) -> gym.Env:
  """One of AndroidWorld's phones that nobody else has."""
  del clean, quick  # what comes up on a real phone comes up
  check(cfg)
  found = servers(cfg)
  index, lock = take("server", found, int(os.environ.get("PRACTICE_COMPUTER", "0")), cfg.attach_seconds)
  server = Server(found[index], cfg.call_seconds)
  try:
    referee = Referee(server, cfg)
    phone = android.Phone(cfg, android.places(cfg)[index], lock) if cfg.image else HttpPhone(server, lock)
  except BaseException:
    lock.close()
    raise
  try:
    if not cfg.image:  # the server waits for the screen to be at rest
      cfg = ml_collections.ConfigDict(cfg.to_dict() | {"settle_least": 0.0, "settle_frames": 1})
    return android.AndroidEnv(computer, phone, referee, cfg)
  except BaseException:
    phone.close()
    raise


def task_lists(computer: str, cfg: ml_collections.ConfigDict) -> dict[str, list[Task]]:
  """practice, in_domain and held_out: whole task types apart, asked of the first server. ValueError if it does not answer."""
  server = Server(servers(cfg)[0], cfg.call_seconds)
  lists: dict[str, list[Task]] = {"practice": [], "held_out": []}
  try:
    reinitialize(server, cfg)
    for place, kind in enumerate(sorted(server.get("task_list", "/suite/task_list", list, max_index=-1))):
      for index in range(server.get("length", "/suite/task_length", int, task_type=kind)):
        goal = server.get("goal", "/task/goal", str, task_type=kind, task_idx=index)
        params = {"type": kind, "index": index} | ({"infeasible": True} if kind in cfg.infeasible else {})
        name = f"androidworld-{kind}-{index}-s{cfg.suite_seed}"
        split = "held_out" if place % cfg.held_out_every == cfg.held_out_every - 1 else "practice"
        lists[split].append(Task(name, goal, computer, kind, cfg.suite_seed, params, Limits(cfg.steps)))
  except InfraError as fault:
    raise ValueError(f"env.server: {fault}") from None
  if not all(lists.values()):
    raise ValueError(f"env.server {server.base} has too few tasks: {len(lists['practice'])} to practise, {len(lists['held_out'])} held out")
  return lists | {"in_domain": lists["practice"][: cfg.in_domain_tasks]}


def demonstrations(computer: str, count: int, seed: int, cfg: ml_collections.ConfigDict | None = None) -> list[Episode]:
  """AndroidWorld comes without any."""
  raise ValueError("AndroidWorld has no demonstrations: copy from elsewhere, or begin with --config.policy.checkpoint=...")


def vocabulary(computer: str, cfg: ml_collections.ConfigDict | None = None) -> tuple[list[str], tuple[int, int]]:
  """For a small tokenizer, the simulated phone's; a real policy brings its own."""
  return sim.vocabulary("sim/phone") if cfg is None or not any(cfg.screen) else (sim.vocabulary("sim/phone")[0], tuple(cfg.screen))


def canaries(computer: str, cfg: ml_collections.ConfigDict) -> list[Canary]:
  """None: a solution of its tasks is not known here."""
  return []
