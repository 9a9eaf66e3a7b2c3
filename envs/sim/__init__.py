"""Simulated computers: the embedded default of every config, and the fast stand-in for tests of everything above.

`import envs.sim` registers `practice/Phone-v0` and `practice/Desktop-v0` with Gymnasium.
"""

from __future__ import annotations

import itertools
import os

import gymnasium as gym
import ml_collections

from core.schema import Episode, Task
from envs.actions import MODES
from envs.canary import Canary, do_nothing, known_good
from envs.sim import fragile

KINDS = ("sign_in", "rate_us", "notify")


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "popup_chance": 0.25,  # per step while none is open; demonstrations always use 0
      "popup_most": 1,  # pop-ups an episode
      "popup_kinds": KINDS,  # ("corner",) for the kind whose way out copying never finds by chance
      "drift": 0,  # pixels by which the phone's browser was redesigned since the demonstrations, 0 to 12
      "text": False,  # the elements on the screen as lines of text in the observation, for policies that read text (envs/sim/outline.py)
      "points": "",  # how actions mean points, one of envs.actions.MODES; "" = as the policy does, else as the grammar says
      "shown": (0, 0),  # (W, H) of the image that the policy is shown, for points "resized"; (0, 0) = as the policy says
      "step_seconds": 0.0,  # a step of practice takes so long, as on a real computer; 0 = as fast as it can
      "slow_share": 0.1,  # of the episodes take slow_factor times that, while step_seconds is above 0
      "slow_factor": 5.0,
      "faults": fragile.defaults(),  # chances with which an episode breaks its computer, to rehearse; practice only, with workers
      "practice_tasks": 256,  # start states practised, again and again
      "in_domain_tasks": 32,  # of those, evaluated under new sampling keys
      "held_out_tasks": 96,  # evaluated only, disjoint by construction
    }
  )


def check(cfg: ml_collections.ConfigDict) -> None:
  """Domains of the knobs; each failure one line, before any costly work."""
  if cfg.get("computer", "sim/phone") not in ("sim/phone", "sim/desktop"):
    raise ValueError(f"env.computer is {cfg.computer!r}, wanted sim/phone or sim/desktop")
  popup_rule(cfg, 1.0)
  points, shown = view(cfg)
  if points not in (None, *MODES) or (points == "resized") != (shown is not None):
    raise ValueError(f"env.points, shown are {cfg.points!r}, {cfg.shown}: wanted one of {', '.join(MODES)}, and a size with resized alone")
  if not 0 <= cfg.drift <= 12:
    raise ValueError(f"env.drift is {cfg.drift}, wanted 0 to 12 pixels: further down the last search result leaves the screen")
  if cfg.drift and cfg.get("computer", "sim/phone") != "sim/phone":
    raise ValueError(f"env.drift is {cfg.drift}, but {cfg.computer} has no browser to redesign: wanted 0")
  if not 0 <= cfg.step_seconds <= 60:
    raise ValueError(f"env.step_seconds is {cfg.step_seconds}, wanted 0 (no waiting) to 60")
  if not (0 <= cfg.slow_share <= 1 and cfg.slow_factor >= 1):
    raise ValueError(f"env.slow_share, slow_factor are {cfg.slow_share}, {cfg.slow_factor}, wanted a share and a factor of 1 or more")
  fragile.check(cfg.faults)
  if not 1 <= cfg.in_domain_tasks <= cfg.practice_tasks:
    raise ValueError(f"env.in_domain_tasks is {cfg.in_domain_tasks}, wanted 1 to env.practice_tasks ({cfg.practice_tasks})")
  if not 1 <= cfg.held_out_tasks <= 96:
    raise ValueError(f"env.held_out_tasks is {cfg.held_out_tasks}, wanted 1 to 96")


def popup_rule(cfg: ml_collections.ConfigDict, scale: float):
  """The pop-ups of practice (scale 1) or of demonstrations and clean evaluation (scale 0)."""
  from envs.sim.popups import Popups

  try:
    return Popups(cfg.popup_chance * scale, cfg.popup_most, tuple(cfg.popup_kinds))
  except ValueError as e:
    raise ValueError("env." + str(e).replace("popup ", "popup_", 1)) from e


def view(cfg: ml_collections.ConfigDict) -> tuple[str | None, tuple[int, int] | None]:
  """(points, shown) as envs.actions takes them. Android's configs, which borrow ours, have neither."""
  shown = tuple(cfg.get("shown", (0, 0)))
  return cfg.get("points") or None, shown if any(shown) else None


def grammar(computer: str) -> str:
  """The action grammar of a simulated computer."""
  from envs.sim.tasks import MODULES

  return MODULES[computer].GRAMMAR


def make(computer: str, cfg: ml_collections.ConfigDict, clean: bool = False, quick: bool = False) -> gym.Env:
  """One simulated computer, "sim/phone" or "sim/desktop"; clean = no pop-up ever comes; quick = step_seconds and faults do not
  hold, as in evaluations."""
  from envs.sim.base import SimEnv, Slow

  points, shown = view(cfg)
  env = SimEnv(computer, popup_rule(cfg, 0.0 if clean else 1.0), drift=cfg.drift, text=cfg.get("text", False), points=points, shown=shown)
  if cfg.step_seconds and not quick:
    env = Slow(env, cfg.step_seconds, cfg.slow_share, cfg.slow_factor, next(_seeds))
  return fragile.Fragile(env, cfg.faults.to_dict()) if sum(cfg.faults.values()) and not quick else env


def canaries(computer: str, cfg: ml_collections.ConfigDict) -> list[Canary]:
  """A solved episode and one in which nothing is done, of the first practised task, under the pop-ups that practice has."""
  from envs.sim.base import expert_text

  env, task, texts = make(computer, cfg, quick=True), task_lists(computer, cfg)["practice"][0], []
  env.reset(options={"task": task})
  while not env.done:
    texts.append(expert_text(env))
    env.step(texts[-1])
  return [known_good(task, texts), do_nothing(task)]


def task_lists(computer: str, cfg: ml_collections.ConfigDict) -> dict[str, list[Task]]:
  """The finite task lists: practice, in_domain (the first of those) and held_out."""
  from envs.sim import tasks as lists

  practice = lists.practice_tasks(computer, cfg.practice_tasks)
  return {
    "practice": practice,
    "in_domain": practice[: cfg.in_domain_tasks],
    "held_out": lists.held_out_tasks(computer, cfg.held_out_tasks),
  }


def demonstrations(computer: str, count: int, seed: int, cfg: ml_collections.ConfigDict | None = None) -> list[Episode]:
  """Scripted demonstrations: clean episodes that go right, in which no pop-up is ever seen, let alone closed. cfg: how they are seen and
  written (text, points, shown); nothing else of it counts."""
  from envs.sim.base import play
  from envs.sim.popups import Popups
  from envs.sim.tasks import demonstration_tasks

  (points, shown), text = view(cfg or defaults()), bool(cfg) and cfg.get("text", False)
  return [play(computer, task, Popups(), text=text, points=points, shown=shown) for task in demonstration_tasks(computer, count, seed)]


def vocabulary(computer: str, cfg: ml_collections.ConfigDict | None = None) -> tuple[list[str], tuple[int, int]]:
  """(pieces of text for a small tokenizer, screen size (W, H)). No knob of cfg changes either."""
  from envs.sim.tasks import MODULES

  del cfg

  module = MODULES[computer]
  return module.pieces(), (module.WIDTH, module.HEIGHT)


# of slow computers: which episodes are slow differs from one to the next, in processes of their own too (envs/worker.py)
_seeds = itertools.count(int(os.environ.get("PRACTICE_COMPUTER", "0")))

for _name, _computer in (("Phone", "sim/phone"), ("Desktop", "sim/desktop")):
  gym.register(f"practice/{_name}-v0", entry_point="envs.sim.base:SimEnv", kwargs={"computer": _computer})
