"""A small shop of our own in a real Chromium: the lesson's shopping tasks, pop-ups included, checked in the shop's own database.

Families: "open" (a result by its place), "cart" (so many of a product, and nothing else), "buy" (the cheapest of a kind, one order).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import ml_collections

from core.schema import Episode, Limits, Task
from envs import miniwob_scripts, scripted, web
from envs.canary import Canary, do_nothing, known_good
from envs.errors import ResetFailed
from envs.miniwob_scripts import Move, find
from envs.shop.store import COLORS, KINDS, MAKES, NOUNS, POPUPS, Store
from envs.tabs import Window

FAMILIES, PLACES = ("open", "cart", "buy"), ("first", "second", "third", "fourth")
MACHINE = web.MACHINE
HELD_OUT_MOST = 96
SHOWN_SEED = 5_000_000  # start states from here are only shown, never practised


def defaults() -> ml_collections.ConfigDict:
  """Knobs beside those of every browser."""
  cfg = web.defaults()
  cfg.update(
    {
      "viewport": (320, 240),
      "grammar": "desktop",
      "text": False,
      "settle_frames": 1,
      "steps": 16,
      "families": FAMILIES,
      "popup_chance": 0.25,  # a page while none is open; demonstrations always use 0
      "popup_most": 1,  # pop-ups an episode
      "popup_kinds": KINDS,
      "practice_tasks": 256,  # start states practised
      "in_domain_tasks": 32,  # of those, evaluated under new sampling keys
      "held_out_tasks": 96,  # evaluated only; what they ask for is never practised
    }
  )
  return cfg


def check(cfg: ml_collections.ConfigDict) -> None:
  """Domains of the knobs; each failure one line."""
  web.check(cfg)
  wanted = {
    "families": (0 < len(cfg.families) == len(set(cfg.families)) and set(cfg.families) <= set(FAMILIES), f"some of {', '.join(FAMILIES)}"),
    "popup_chance": (0 <= cfg.popup_chance <= 1, "0 to 1"),
    "popup_most": (0 <= cfg.popup_most <= 100, "0 to 100"),
    "popup_kinds": (0 < len(cfg.popup_kinds) and set(cfg.popup_kinds) <= set(KINDS), f"some of {', '.join(KINDS)}"),
    "in_domain_tasks": (1 <= cfg.in_domain_tasks <= cfg.practice_tasks, "1 to env.practice_tasks"),
    "held_out_tasks": (1 <= cfg.held_out_tasks <= HELD_OUT_MOST, f"1 to {HELD_OUT_MOST}"),
  }
  for name, (good, want) in wanted.items():
    if not good:
      raise ValueError(f"env.{name} is {cfg[name]!r}, wanted {want}")


class Site:
  """The shop. look: which pop-up is open and which page is shown."""

  private, graded, keeps = False, False, 1  # its pages set no cookie and are not stored; a browser context a try costs a new renderer

  def __init__(self, chance: float, most: int, kinds: tuple[str, ...]):
    self.store, self.popups = Store(), (chance, most, kinds)

  def places(self) -> list[str]:
    return [self.store.served.place]

  def begin(self, window: Window, task: Task) -> None:
    self.store.begin(task.seed, *self.popups)
    if failed := window.goto(f"http://{self.store.served.place}/"):
      raise ResetFailed(f"{task.id}: {failed}")

  def look(self, window: Window) -> dict:
    return {"popup": self.store.popup, "page": window.url().partition("//")[2].partition("/")[2].partition("?")[0]}

  def over(self, window: Window) -> bool:
    return False

  def verdict(self, window: Window, task: Task, frames: list, texts: list[str], answer: str | None) -> float:
    return float(done(self.store, task.params))

  def close(self) -> None:
    self.store.served.close()


def target(store: Store, params: dict) -> int:
  """The product that a task is about, in the shop as its seed made it."""
  rows = store.results(f"{params.get('make', '')} {params['color']} {params['noun']}")
  return min(rows, key=lambda row: row[2])[0] if params["family"] == "buy" else rows[params.get("place", 0)][0]


def done(store: Store, params: dict) -> bool:
  """Whether the database is as the task wants it."""
  product = target(store, params)
  cart, lines = store.ask("SELECT product, count FROM cart"), store.ask("SELECT product, count FROM lines")
  if params["family"] == "open":
    views = store.ask("SELECT product FROM views ORDER BY at DESC LIMIT 1")
    return views == [(product,)] and not cart and not lines
  if params["family"] == "cart":
    return cart == [(product, params["count"])] and not lines
  return lines == [(product, 1)] and not cart


def goal(params: dict) -> str:
  things = f"{params['color']} {params['noun']}"
  if params["family"] == "open":
    return f"Search for {things} and open the {PLACES[params['place']]} result."
  if params["family"] == "cart":
    return f"Put {params['count']} {params['make']} {things} in the cart and nothing else."
  return f"Buy the cheapest {things}."


def combinations(family: str) -> list[dict]:
  """Everything that a family asks for."""
  base = [{"family": family, "color": c, "noun": n} for c in COLORS for n in NOUNS]
  if family == "open":
    return [b | {"place": p} for b in base for p in range(len(PLACES))]
  return base if family == "buy" else [b | {"make": m, "count": k} for b in base for m in MAKES for k in (1, 2)]


def split(family: str) -> tuple[list[dict], list[dict]]:
  """(held out, the rest), a quarter and three quarters; the same in every run."""
  every = combinations(family)
  random.Random(family).shuffle(every)
  return every[: len(every) // 4], every[len(every) // 4 :]


def tasks_of(computer: str, cfg: ml_collections.ConfigDict, count: int, first: int, held_out: bool) -> list[Task]:
  """`count` tasks, the families in turn, their shops' seeds from `first`."""
  out = []
  for i in range(count):
    family = cfg.families[i % len(cfg.families)]
    pool = split(family)[0 if held_out else 1]
    params, seed = pool[(first + i) // len(cfg.families) % len(pool)], first + i
    out.append(task_of(computer, params, seed, Limits(cfg.steps)))
  return out


def task_of(computer: str, params: dict, seed: int, limits: Limits) -> Task:
  """What these parameters ask for, in the shop of this seed."""
  words = "-".join(str(value) for value in params.values())
  return Task(f"shop-{words}-s{seed}", goal(params), computer, params["family"], seed, params, limits)


def task_lists(computer: str, cfg: ml_collections.ConfigDict) -> dict[str, list[Task]]:
  """practice, in_domain (the first of those) and held_out, which asks for other things in other shops."""
  practice = tasks_of(computer, cfg, cfg.practice_tasks, 0, False)
  held_out = tasks_of(computer, cfg, cfg.held_out_tasks, 1_000_000, True)
  return {"practice": practice, "in_domain": practice[: cfg.in_domain_tasks], "held_out": held_out}


def make(computer: str, cfg: ml_collections.ConfigDict, clean: bool = False, quick: bool = True) -> web.WebEnv:
  """One shop and its browser. clean: no pop-up ever comes."""
  del quick
  check(cfg)
  site = Site(0.0 if clean else cfg.popup_chance, cfg.popup_most, tuple(cfg.popup_kinds))
  try:
    return web.WebEnv(computer, site, cfg)
  except BaseException:
    site.close()
    raise


def moves(site: Site, params: dict) -> Iterator[Move]:
  """The scripted solution; a pop-up in the way is closed first."""
  product, store = target(site.store, params), site.store

  def closed() -> Iterator[Move]:
    while store.popup:
      yield "click", find(".popup button", POPUPS[store.popup][1])

  yield from closed()
  words = " ".join(params[name] for name in ("make", "color", "noun") if name in params)
  for _ in range(params.get("count", 1)):
    yield "type", find("header input"), words
    yield "click", find("header button")
    yield from closed()
    yield "click", find(f"a[href='/product/{product}']")
    yield from closed()
    if params["family"] != "open":
      yield "click", find("main button", "Add to cart")
      yield from closed()
  if params["family"] == "buy":
    yield "click", find("main button", "Place order")


def texts(env: web.WebEnv, task: Task) -> Iterator[str]:
  for move in moves(env.site, task.params):
    yield from miniwob_scripts.write(env.window, move, env.cfg.grammar)
  yield {"web": "exit()", "desktop": "Action: finished()"}[env.cfg.grammar]


def solve(env: web.WebEnv, task: Task) -> Episode:
  """The scripted solution of one task, played in the browser."""
  return scripted.play(env, task, texts(env, task), "shop/1")


def demonstrations(computer: str, count: int, seed: int, cfg: ml_collections.ConfigDict | None = None) -> list[Episode]:
  """Scripted solutions without pop-ups, of things that are practised, in shops that are not; played in a browser now. Those that do
  not pass are left out."""
  cfg = cfg or defaults()
  env = make(computer, cfg, clean=True)
  try:
    return scripted.passing(solve, env, tasks_of(computer, cfg, count, SHOWN_SEED + 10_000 * seed, False), computer)
  finally:
    env.close()


def vocabulary(computer: str, cfg: ml_collections.ConfigDict | None = None) -> tuple[list[str], tuple[int, int]]:
  """(pieces of text for a small tokenizer, (width, height) that the agent is shown)."""
  cfg = cfg or defaults()
  size = tuple(round(n * cfg.scale) for n in web.shown(cfg))
  pieces = ["Action: ", "click(start_box='(", ",", ")')", "type(content='", "')", "hotkey(key='", "finished()", "wait()"]
  pieces += [*COLORS, *NOUNS, *MAKES, *PLACES, "Search for ", " and open the ", " result.", "Put ", " in the cart and nothing else."]
  pieces += ["Buy the cheapest ", *(str(n) for n in range(max(size) + 1)), *(chr(n) for n in range(32, 127))]
  return list(dict.fromkeys(pieces)), size


def canaries(computer: str, cfg: ml_collections.ConfigDict) -> list[Canary]:
  """A solved episode and one in which nothing is done, of the first practised task, under the pop-ups that practice has."""
  task, env = task_lists(computer, cfg)["practice"][0], make(computer, cfg)
  try:
    return [known_good(task, [step.text for step in solve(env, task).steps]), do_nothing(task)]
  finally:
    env.close()
