"""MiniWoB++ in a real Chromium: the pages of the package `miniwob` (MIT), their own reward, undecayed.

A task is a page and a seed. Its goal is what the page says for that seed, which is asked of a browser once, when the lists are made, and
compared at every reset. The page ends the try; 1 passes, what lies between 0 and 1 is partial credit, less is 0.
https://miniwob.farama.org (Shi et al. 2017, Liu et al. 2018).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import pathlib
import re
import time

import ml_collections

from core.schema import Episode, Limits, Task
from envs import miniwob_scripts, scripted, web
from envs.canary import Canary, do_nothing, known_good
from envs.errors import ResetFailed
from envs.loopback import Files, Served
from envs.tabs import Window, literal

MACHINE = web.MACHINE
FOREVER = 2_000_000_000  # milliseconds: no time limit, the largest delay of a timer being 2^31 - 1
HELD_OUT = 1_000_000  # seeds from here are never practised
DEMONSTRATED = 2_000_000  # and from here only shown
FLIGHTS = ("flight.AA", "flight.Alaska", "flight.Alaska-auto", "flight.Alaska-auto-medium")
STATE = "typeof WOB_DONE_GLOBAL === 'undefined' ? [false, 0] : [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]"
READY = "document.readyState === 'complete' && typeof core !== 'undefined' && core.cover_div !== null && WOB_TASK_READY === true"
BEGIN = """(() => {
  Math.seedrandom(SEED);
  core.setDataMode && core.setDataMode('train');
  core.EPISODE_MAX_TIME = FOREVER;
  core.startEpisodeReal();
})()"""
GOAL = "(() => { const said = core.getUtterance(); return typeof said === 'string' ? said : said.utterance; })()"


def pages_folder() -> pathlib.Path:
  """Where the package keeps its pages; it is not imported."""
  spec = importlib.util.find_spec("miniwob")
  if spec is None:
    raise ModuleNotFoundError("the package miniwob is not installed: pip install --no-deps -r requirements-web.txt")
  return pathlib.Path(spec.origin).parent / "html"


def pages() -> list[str]:
  """Every page there is, FLIGHTS among them."""
  return sorted(path.stem for path in (pages_folder() / "miniwob").glob("*.html")) + list(FLIGHTS)


def defaults() -> ml_collections.ConfigDict:
  """Knobs beside those of every browser."""
  cfg = web.defaults()
  cfg.update(
    {
      "pages": ("click-test-2", "click-button", "click-dialog", "click-tab"),  # names of pages, or ("all",)
      "viewport": (500, 320),  # as in the package's own environment
      "picture": (160, 210),  # where the task is; right of it stands the reward; flights want (375, 667) in a viewport as large
      "grammar": "desktop",
      "text": False,
      "settle_frames": 1,
      "steps": 10,
      "practice_tasks": 256,  # seeds practised, spread over the pages
      "in_domain_tasks": 32,  # of those, evaluated under new sampling keys
      "held_out_tasks": 96,  # other seeds, evaluated only
    }
  )
  return cfg


def check(cfg: ml_collections.ConfigDict) -> None:
  """Domains of the knobs; each failure one line."""
  web.check(cfg)
  known = pages()
  for name in chosen(cfg):
    if name not in known:
      raise ValueError(f"env.pages has {name!r}, which is no page of miniwob; docs/web.md lists them")
  if not chosen(cfg) or len(set(chosen(cfg))) < len(chosen(cfg)):
    raise ValueError(f"env.pages is {tuple(cfg.pages)}, wanted one page or more, each once")
  if not 1 <= cfg.in_domain_tasks <= cfg.practice_tasks < HELD_OUT:
    raise ValueError(f"env.in_domain_tasks is {cfg.in_domain_tasks}, wanted 1 to env.practice_tasks ({cfg.practice_tasks})")
  if not 1 <= cfg.held_out_tasks < HELD_OUT:
    raise ValueError(f"env.held_out_tasks is {cfg.held_out_tasks}, wanted 1 or more")


def chosen(cfg: ml_collections.ConfigDict) -> list[str]:
  return [p for p in pages() if p not in FLIGHTS] if tuple(cfg.pages) == ("all",) else list(cfg.pages)


class Site:
  """The pages, served to this process's browser."""

  private, graded, keeps = False, True, 1

  def __init__(self, cfg: ml_collections.ConfigDict):
    self.cfg, self.served = cfg, Served(functools.partial(Files, directory=str(pages_folder())))

  def places(self) -> list[str]:
    return [self.served.place]

  def show(self, window: Window, page: str, seed: int) -> str:
    """Opens a page and starts an episode of it; the goal that it gives."""
    if failed := window.goto(self._address(page)):
      raise ResetFailed(f"{page}: {failed}")
    self._wait(window, page)
    return self.start(window, page, seed)

  def start(self, window: Window, page: str, seed: int) -> str:
    """Starts an episode of the page that is open; its goal."""
    window.evaluate(BEGIN.replace("SEED", literal(str(seed))).replace("FOREVER", str(FOREVER)))
    self._wait(window, page)
    return str(window.evaluate(GOAL)).strip()

  def _address(self, page: str) -> str:
    return f"http://{self.served.place}/" + (f"{page.replace('.', '/')}/wrapper.html" if page in FLIGHTS else f"miniwob/{page}.html")

  def _wait(self, window: Window, page: str) -> None:
    until = time.monotonic() + self.cfg.load_seconds
    while not window.evaluate(READY):
      if time.monotonic() > until:
        raise ResetFailed(f"{page} was not ready within {self.cfg.load_seconds:g} s")
      window.browser.pump(0.01)

  def begin(self, window: Window, task: Task) -> None:
    """A page that is open begins anew, as the package's own environment has it; one that is not, or does not say the same, is opened."""
    page = task.params["page"]
    if window.url() == self._address(page) and self.start(window, page, task.seed) == task.goal:
      return
    goal = self.show(window, page, task.seed)
    if goal != task.goal:
      raise ResetFailed(f"{task.id}: the page says {goal[:200]!r}, its list {task.goal[:200]!r}")

  def look(self, window: Window) -> dict:
    return {"popup": "", "page": ""}

  def over(self, window: Window) -> bool:
    return window.evaluate(STATE)[0]

  def verdict(self, window: Window, task: Task, frames: list, texts: list[str], answer: str | None) -> float:
    """The page's raw reward where it has ended the try; a try that it has not ended, or that left the page, is not done."""
    done, reward = window.evaluate(STATE)
    return float(min(max(reward, 0), 1)) if done else 0.0

  def close(self) -> None:
    self.served.close()


def make(computer: str, cfg: ml_collections.ConfigDict, clean: bool = False, quick: bool = True) -> web.WebEnv:
  """One browser. Pages have no pop-ups to leave out, and take the time they take."""
  del clean, quick
  check(cfg)
  site = Site(cfg)
  try:
    return web.WebEnv(computer, site, cfg)
  except BaseException:
    site.close()
    raise


@functools.lru_cache(maxsize=16)
def _goals(text: str, wanted: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
  """The goals of pages and seeds, asked of a browser. text: the config, as JSON."""
  env, said, last = make("miniwob/browser", ml_collections.ConfigDict(json.loads(text))), {}, None
  try:
    for page, seed in sorted(wanted):
      ask = env.site.start if page == last else env.site.show
      said[page, seed], last = ask(env.window, page, seed), page
    return tuple(said[one] for one in wanted)
  finally:
    env.close()


def tasks_of(computer: str, cfg: ml_collections.ConfigDict, wanted: list[tuple[str, int]]) -> list[Task]:
  """Tasks of (page, seed) pairs."""
  goals = _goals(json.dumps(cfg.to_dict()), tuple(wanted))
  limits = Limits(cfg.steps)
  return [Task(f"miniwob-{p}-{s}", goal, computer, p, s, {"page": p}, limits) for (p, s), goal in zip(wanted, goals)]


def spread(cfg: ml_collections.ConfigDict, count: int, first: int) -> list[tuple[str, int]]:
  """`count` (page, seed) pairs, the pages in turn, seeds from `first`."""
  names = chosen(cfg)
  return [(names[i % len(names)], first + i // len(names)) for i in range(count)]


def task_lists(computer: str, cfg: ml_collections.ConfigDict) -> dict[str, list[Task]]:
  """practice, in_domain (the first of those) and held_out. Starts a browser to read the goals."""
  practice = tasks_of(computer, cfg, spread(cfg, cfg.practice_tasks, 0))
  held_out = tasks_of(computer, cfg, spread(cfg, cfg.held_out_tasks, HELD_OUT))
  return {"practice": practice, "in_domain": practice[: cfg.in_domain_tasks], "held_out": held_out}


def solve(env: web.WebEnv, task: Task) -> Episode:
  """The scripted solution of one task, played in the browser."""
  texts = miniwob_scripts.texts(env, task.goal, task.params["page"], env.cfg.grammar)
  return scripted.play(env, task, texts, "miniwob/1")


def demonstrations(computer: str, count: int, seed: int, cfg: ml_collections.ConfigDict | None = None) -> list[Episode]:
  """Scripted solutions, played in a browser now: of the pages of cfg that have a script, in turn. Those that do not pass are left out."""
  cfg = ml_collections.ConfigDict((cfg or defaults()).to_dict())
  cfg.pages = tuple(page for page in chosen(cfg) if page in miniwob_scripts.SCRIPTS)
  if not cfg.pages:
    raise ValueError(f"none of env.pages has a scripted solution; those that do: {', '.join(miniwob_scripts.SCRIPTS)}")
  tasks = tasks_of(computer, cfg, spread(cfg, count, DEMONSTRATED + seed * 1000))
  env = make(computer, cfg)
  try:
    return scripted.passing(solve, env, tasks, computer)
  finally:
    env.close()


def vocabulary(computer: str, cfg: ml_collections.ConfigDict | None = None) -> tuple[list[str], tuple[int, int]]:
  """(pieces of text for a small tokenizer, (width, height) that the agent is shown). The words of the goals practised are pieces."""
  cfg = cfg or defaults()
  letters = [chr(n) for n in range(32, 127)]
  size = tuple(round(n * cfg.scale) for n in web.shown(cfg))
  pieces = ["Action: ", "click(start_box='(", ",", ")')", "type(content='", "')", "hotkey(key='", "scroll(", "wait()", "finished()"]
  words = [word for task in task_lists(computer, cfg)["practice"] for word in re.findall(r" ?[A-Za-z]+", task.goal)]
  return list(dict.fromkeys([*pieces, *(str(n) for n in range(max(size) + 1)), *letters, *words])), size


def canaries(computer: str, cfg: ml_collections.ConfigDict) -> list[Canary]:
  """A solved episode and one in which nothing is done, of the first practised page that has a script."""
  name = next((page for page in chosen(cfg) if page in miniwob_scripts.SCRIPTS), None)
  if name is None:
    return []
  task, env = tasks_of(computer, cfg, [(name, 0)])[0], make(computer, cfg)
  try:
    episode = solve(env, task)
  finally:
    env.close()
  return [known_good(task, [step.text for step in episode.steps]), do_nothing(task)]
