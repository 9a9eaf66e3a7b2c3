"""Web pages in a real Chromium as Gymnasium environments. The suites: envs/miniwob.py, envs/shop, envs/webarena.py; docs/web.md.

A suite gives a *site*: what has
  places() -> the host:port that pages may reach          begin(window, task): shows the task's first page
  over(window) -> whether the page itself ended the try    verdict(window, task, frames, texts, answer) -> a score from 0 to 1
  look(window) -> notes for instruments                    close()
  private: whether every try gets a browser context of its own, without the cookies and the cache of the one before;
  graded: whether scores between 0 and 1 are partial credit; keeps: how many of the last frames a verdict reads
and may have graded_by: the version of the judge that gave the last verdict, "" if none did
"""

from __future__ import annotations

import collections
import contextlib
import os
import time
from typing import Any

import gymnasium as gym
import ml_collections
import numpy as np

from core.schema import Action, Task, Unreadable
from envs import actions, judges, phases
from envs.base import ending, observation_space, text_space
from envs.chromium import Browser, PageClosed, Refused, find_binary
from envs.errors import CheckerFailed, InfraError, ResetFailed
from envs.referees import Judge, kept_for
from envs.tabs import CannotDo, Window

GRAMMARS = ("web", "desktop")
MACHINE = ("browser", "browser_flags", "boot_seconds", "call_seconds", "load_seconds")


class BrowserFault(InfraError):
  """The browser answered what always works with an error."""


def defaults() -> ml_collections.ConfigDict:
  """Knobs of every browser; seconds unless said otherwise."""
  cfg = ml_collections.ConfigDict(
    {
      "browser": "",  # its program; "": chromium-headless-shell if it is installed, else chromium
      "browser_flags": (),
      "sandbox": "auto",  # on, off, or auto: on unless run as root, under whom Chromium has none
      "network": "sites",  # what pages may reach: the task's sites and env.allowed; or "open": everything
      "allowed": (),  # host:port
      "viewport": (1280, 720),  # (width, height) in CSS pixels
      "picture": (0, 0),  # the top left part of it that is shown; (0, 0): all
      "scale": 1.0,  # pixels of the picture per CSS pixel
      "capped": False,  # True: 60 frames a second at most, as on a screen; a screenshot then waits for its frame
      "grammar": "web",  # web (numbered elements) or desktop (points of the picture)
      "text": True,  # the page's outline in the observation; the web grammar needs it
      "text_chars": 16_000,  # most characters of it
      "dialogs": "dismiss",  # confirm and prompt: dismiss or accept; what they said is in the text
      "settle_least": 0.0,  # after an action before the first look
      "settle_most": 4.0,  # then the page counts as it is, and the notes say unsettled; below pool.deadlines.settle
      "settle_frames": 2,  # equal pictures in a row that make a page settled; 1: the first after it has loaded and drawn counts
      "settle_tolerance": 0.002,  # share of pixels that may differ: a caret blinks
      "call_seconds": 10.0,  # of any one call to the browser
      "boot_seconds": 30.0,
      "load_seconds": 30.0,  # of a task's first page
      "wait_seconds": 1.0,  # of the agent's wait
      "steps": 20,  # step limit of tasks that name none
    }
  )
  cfg.judge = judges.defaults()
  return cfg


def check(cfg: ml_collections.ConfigDict) -> None:
  """Domains of the knobs; each failure one line, before any browser starts."""
  judges.check(cfg.judge)
  find_binary(cfg.browser)
  numbers = lambda pair: len(pair) == 2 and all(isinstance(n, int) and 16 <= n <= 8192 for n in pair)
  wanted = {
    "sandbox": (cfg.sandbox in ("auto", "on", "off"), "auto, on or off"),
    "network": (cfg.network in ("sites", "open"), "sites or open"),
    "viewport": (numbers(cfg.viewport), "(width, height), 16 to 8192 CSS pixels"),
    "picture": (
      not any(cfg.picture) or numbers(cfg.picture) and all(a <= b for a, b in zip(cfg.picture, cfg.viewport)),
      "(0, 0), or (width, height) of at most env.viewport",
    ),
    "scale": (0.25 <= cfg.scale <= 4, "0.25 to 4"),
    "grammar": (cfg.grammar in GRAMMARS, " or ".join(GRAMMARS)),
    "text": (cfg.text or cfg.grammar != "web", "True: the web grammar names elements by their number in the text"),
    "text_chars": (500 <= cfg.text_chars <= 60_000, "500 to 60000 characters"),
    "dialogs": (cfg.dialogs in ("dismiss", "accept"), "dismiss or accept"),
    "settle_frames": (1 <= cfg.settle_frames <= 20, "1 to 20"),
    "settle_tolerance": (0 <= cfg.settle_tolerance < 1, "a share, 0 or more and below 1"),
    "settle_least": (0 <= cfg.settle_least <= cfg.settle_most, "0 to env.settle_most"),
    "steps": (cfg.steps >= 1, "1 or more"),
  }
  for name in ("settle_most", "call_seconds", "boot_seconds", "load_seconds", "wait_seconds"):
    wanted[name] = (0 < cfg[name] < 3600, "seconds above 0")
  wanted["allowed"] = (all(place.rpartition(":")[2].isdigit() for place in cfg.allowed), "host:port of each")
  for name, (good, want) in wanted.items():
    if not good:
      raise ValueError(f"env.{name} is {cfg[name]!r}, wanted {want}")


def shown(cfg: ml_collections.ConfigDict) -> tuple[int, int]:
  """(width, height) of what is shown, in CSS pixels."""
  return tuple(cfg.picture) if any(cfg.picture) else tuple(cfg.viewport)


class WebEnv(gym.Env):
  """One browser on one site. A step is one action of agent text.

  Ends: an ending action or an unreadable one terminates; so does the page itself where the site says so, and with check="every_step"
  a pass; the step limit truncates, and the final state is still checked. An infra error ends the episode without a score, and the next
  reset starts another browser. notes: what the site says, "unsettled" where the page did not come to rest, "refused" where the action
  cannot be done on this page: such a step does nothing and counts. judge: asked at the end beside the site's own verdict
  (env.judge.beside); info["judge"] is its opinion, info["checker"] the judge that graded where the site asked one.
  """

  metadata = {"render_modes": ["rgb_array"], "render_fps": 1}

  def __init__(self, computer: str, site: Any, cfg: ml_collections.ConfigDict, judge: Judge | None = None):
    self.computer, self.site, self.cfg, self.render_mode = computer, site, cfg, "rgb_array"
    self.judge = (judge or judges.make(cfg.judge)) if cfg.judge.beside else None
    self.window: Window | None = None
    self.broken, self.done, self.task = False, True, None
    with self._guarded():
      self._start()
    self.observation_space = observation_space(*self.window.picture_size)
    self.action_space = text_space()

  def _start(self) -> None:
    cfg = self.cfg
    sandbox = cfg.sandbox == "on" or (cfg.sandbox == "auto" and os.geteuid() != 0)
    allowed = [*self.site.places(), *cfg.allowed] if cfg.network == "sites" else None
    browser = Browser(
      find_binary(cfg.browser), allowed, sandbox=sandbox, capped=cfg.capped, boot_seconds=cfg.boot_seconds, flags=tuple(cfg.browser_flags)
    )
    try:
      self.window = Window(browser, tuple(cfg.viewport), shown(cfg), cfg.scale, cfg.dialogs == "accept", cfg.call_seconds)
      self.window.fresh()
      ratio = self.window.evaluate("devicePixelRatio")
      if abs(ratio - cfg.scale) > 1e-6:
        raise BrowserFault(f"env.scale is {cfg.scale}, but the page has {ratio} pixels per CSS pixel")
    except BaseException:
      browser.close()
      raise

  @contextlib.contextmanager
  def _guarded(self):
    """What the browser refuses becomes an infra error; after any infra error there is another browser."""
    try:
      yield
    except Refused as refused:
      self.broken = True
      raise BrowserFault(str(refused)) from refused
    except InfraError:
      self.broken = True
      raise

  def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
    super().reset(seed=seed)
    task = (options or {}).get("task")
    if not isinstance(task, Task) or task.env != self.computer:
      raise ValueError(f"reset wants options={{'task': a Task of {self.computer}}}, got {getattr(task, 'env', task)!r:.100}")
    self.task, self.done, self.steps, self.texts = task, True, 0, []
    self.frames: collections.deque[np.ndarray] = collections.deque(maxlen=max(1, self.site.keeps, kept_for(self.judge)))
    with self._guarded():
      if self.broken:
        self.window.browser.close()
        self._start()
        self.broken = False
      if self.site.private or len(self.window.tabs) != 1:
        self.window.fresh()
      self.site.begin(self.window, task)
      self._extra = {}
      if not self.window.loaded(time.monotonic() + self.cfg.load_seconds):
        raise ResetFailed(f"{task.id}: its first page did not load within {self.cfg.load_seconds:g} s")
      self._look(rested=True)
      self._notes = self.site.look(self.window)
    self.done = False
    return self._observe(), {"notes": self._notes | self._extra}

  def step(self, text: str):
    if self.done:
      raise gym.error.ResetNeeded("this episode has ended: call reset before step")
    action = actions.parse(text, self.cfg.grammar, self.window.picture_size)
    self.steps, self._extra = self.steps + 1, {}
    self.texts.append(text)
    self.done = True  # what is raised below ends the episode
    if isinstance(action, Unreadable):
      return self._finish(action, "unreadable", 0.0)
    with self._guarded():
      if action.kind in actions.ENDS:
        return self._finish(action, "agent", self._verdict(action))
      self._act(action)
      if self.site.over(self.window):
        return self._finish(action, "checker", self._verdict(None))
      if self.task.check == "every_step" and (score := self._verdict(None)) >= self.task.threshold:
        return self._finish(action, "checker", score)
      if self.steps >= self.task.limits.steps:
        return self._finish(action, "steps", self._verdict(None))
    self.done = False
    return self._observe(), 0.0, False, False, self._info(action, "")

  def expire(self) -> dict:
    """Ends the episode from outside (a wall-clock limit); the final state is checked as it stands."""
    self.done, self._extra = True, {}
    with self._guarded():
      return self._finish(None, "seconds", self._verdict(None))[4]

  def _act(self, action: Action) -> None:
    phases.enter("act")
    try:
      perform(self.window, action, self.cfg.wait_seconds)
    except CannotDo as refused:
      self._extra["refused"] = str(refused)[:300]
    except PageClosed:
      pass  # what it did closed the page
    phases.enter("settle")
    time.sleep(self.cfg.settle_least)
    self._look()
    phases.enter("observe")
    self._notes = self.site.look(self.window)

  def _look(self, rested: bool = False) -> None:
    """Looks until the page has loaded and is at rest, or it has been long enough; then reads its text. rested: it has just loaded."""
    cfg, until, same, frame = self.cfg, time.monotonic() + self.cfg.settle_most, 0, None
    while same < cfg.settle_frames:
      rested = (rested and frame is None) or self.window.loaded(until)
      last, frame = frame, self.window.screenshot()
      same = same + 1 if last is not None and (last != frame).any(-1).mean() <= cfg.settle_tolerance else 1
      if not rested or time.monotonic() > until:
        self._extra["unsettled"] = True
        break
    self.frame = frame
    self.frames.append(frame)
    self._text = ""
    for _ in range(5 if cfg.text else 0):
      with contextlib.suppress(PageClosed):
        self._text = self.window.text(cfg.text_chars)
        break

  def _verdict(self, said: Action | None) -> float:
    phases.enter("evaluate")
    answer = said.args.get("text", "") if said is not None else None
    try:
      score = self.site.verdict(self.window, self.task, list(self.frames), self.texts, answer)
    except Refused as refused:
      raise CheckerFailed(f"{self.task.id}: {refused}") from refused
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not 0 <= score <= 1:  # not a number is not between them
      raise CheckerFailed(f"{self.task.id}: the checker said {score!r:.100}, wanted a number from 0 to 1")
    return float(score)

  def _finish(self, action, cause: str, score: float):
    partial = score if self.site.graded and cause != "unreadable" else None
    reward, terminated, truncated, told = ending(cause, score >= self.task.threshold, partial)
    told |= judges.graded(self, self.site, cause)
    return self._observe(), reward, terminated, truncated, self._info(action, cause) | told

  def _info(self, action, cause: str) -> dict:
    return {"action": action, "cause": cause, "notes": self._notes | self._extra}

  def _observe(self) -> dict:
    return {"screenshot": self.frame.copy(), "goal": self.task.goal, "text": self._text}

  def render(self):
    return self.frame.copy()

  def health(self) -> None:
    """InfraError if the browser does not answer; a browser that is to be replaced anyway is not asked."""
    if not self.broken:
      with self._guarded():
        self.window.browser.call("Browser.getVersion", seconds=self.cfg.call_seconds)

  def close(self) -> None:
    if self.window is not None:
      self.window.browser.close()
    self.site.close()


def perform(window: Window, action: Action, wait_seconds: float) -> None:
  """Does one action of the web or the desktop grammar. CannotDo where this page does not let it."""
  kind, args = action.kind, action.args
  place = window.element(args["element"]) if "element" in args else None
  at = window.css(args["point"]) if "point" in args else (window.size[0] / 2, window.size[1] / 2)
  match kind:
    case "click" | "right_click" if place is not None:
      window.click_element(place, "right" if kind == "right_click" else "left")
    case "click" | "left_double" | "right_single":
      window.click(at, "right" if kind == "right_single" else "left", 2 if kind == "left_double" else 1)
    case "hover":
      window.hover(window.middle(place))
    case "type":
      window.fill(place, args["text"]) if place is not None else window.type(args["text"])
      if args["enter"]:
        window.press(["enter"])
    case "select":
      window.select(place, args["option"])
    case "press" | "hotkey":
      window.press(args["keys"])
    case "scroll":
      window.scroll(at, args["direction"])
    case "drag":
      window.drag(window.css(args["start"]), window.css(args["end"]))
    case "goto":
      if failed := window.goto(args["url"]):
        raise CannotDo(f"{args['url'][:200]}: {failed}")
    case "tab_focus":
      window.show(args["tab"])
    case "new_tab":
      window.new_tab()
    case "close_tab":
      window.close_tab()
    case "go_back" | "go_forward":
      window.travel(-1 if kind == "go_back" else 1)
    case "wait":
      time.sleep(wait_seconds)
    case _:
      raise ValueError(f"action {kind!r} is not one of a browser")
