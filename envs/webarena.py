"""WebArena and WebArena-Lite: their task files, on sites that are yours, with string, URL and page checkers.

  --config.env.tasks=test.raw.json --config.env.sites.shopping=http://127.0.0.1:7770

Differs from WebArena's own checkers (docs/web.md): numbers, dates and URLs are compared as such and words as whole words. What only a
judge or a site's private interface can score is left out of the lists, and `left_out` says why. The JavaScript of a task's locators is
run in its page; nothing that an agent writes ever is.
"""

from __future__ import annotations

import html
import json
import os
import pathlib
import re
import time
import urllib.parse

import ml_collections

from core.schema import Episode, Limits, Task
from envs import answers, judges, scripted, web
from envs.canary import Canary
from envs.chromium import PageClosed, Refused
from envs.errors import CheckerFailed, ResetFailed
from envs.referees import Judge, judged, kept_for
from envs.tabs import Window

MACHINE = (*web.MACHINE, "sites")
PLACES = ("shopping", "shopping_admin", "reddit", "gitlab", "map", "wikipedia", "homepage")
KINDS = ("string_match", "url_match", "program_html")
POST = re.compile(r"func:reddit_get_post_url\('__last_url__'\)")


def defaults() -> ml_collections.ConfigDict:
  """Knobs beside those of every browser."""
  cfg = web.defaults()
  cfg.update(
    {
      "tasks": "",  # a JSON file in WebArena's format: practised, but for those of held_out
      "held_out": "",  # the same, evaluated only; WebArena-Lite's 165 for WebRL
      "exclude": (),  # task ids with known faults
      "sites": {name: "" for name in PLACES},  # where they are, e.g. http://127.0.0.1:7770
      "states": "",  # folder of Playwright storage states, by the file names in the tasks: their cookies sign the browser in
      "in_domain_tasks": 32,
      "steps": 30,
    }
  )
  return cfg


def check(cfg: ml_collections.ConfigDict) -> None:
  """Domains of the knobs; each failure one line."""
  web.check(cfg)
  for name in ("tasks", "held_out"):
    if not os.path.isfile(cfg[name]):
      raise ValueError(f"env.{name} is {cfg[name]!r}, wanted a JSON file of tasks in WebArena's format")
  for name, url in cfg.sites.items():
    parts = urllib.parse.urlsplit(url)
    if url and (parts.scheme not in ("http", "https") or not parts.hostname):
      raise ValueError(f"env.sites.{name} is {url!r}, wanted http://host:port")
  if not any(cfg.sites.values()):
    raise ValueError("env.sites is empty: wanted the address of at least one site, e.g. --config.env.sites.shopping=http://127.0.0.1:7770")
  if cfg.states and not os.path.isdir(cfg.states):
    raise ValueError(f"env.states is {cfg.states!r}, and there is no such folder")


def place_of(url: str) -> str:
  parts = urllib.parse.urlsplit(url)
  return f"{parts.hostname}:{parts.port or {'http': 80, 'https': 443}[parts.scheme]}"


def fill(text: str, sites: dict[str, str]) -> str:
  """The text with every __SITE__ replaced by its address."""
  return re.sub(r"__([A-Z_]+?)__", lambda found: sites.get(found[1].lower(), "").rstrip("/") or found[0], text)


def why_not(said: dict, sites: dict[str, str], judge: bool) -> str:
  """Why a task cannot be run here, or ""."""
  if missing := [name for name in said["sites"] if not sites.get(name)]:
    return f"no address of {', '.join(missing)}"
  how = said["eval"]
  if unknown := set(how["eval_types"]) - set(KINDS):
    return f"checker {', '.join(sorted(unknown))}"
  if "string_match" in how["eval_types"] and "fuzzy_match" in how["reference_answers"] and not judge:
    return "only a judge can score it"
  for target in how["program_html"] or [] if "program_html" in how["eval_types"] else []:
    if target["locator"].startswith("func:") or (target["url"].startswith("func:") and not POST.fullmatch(target["url"])):
      return "its checker asks a site's private interface"
  return ""


def read(path: str) -> list[dict]:
  said = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
  for number, task in enumerate(said):
    if missing := {"task_id", "sites", "intent", "start_url", "eval"} - task.keys():
      raise ValueError(f"{path}, task {number}: lacks {', '.join(sorted(missing))}")
  return said


def left_out(path: str, cfg: ml_collections.ConfigDict) -> dict[int, str]:
  """Task id -> why it is not in the lists."""
  found = {said["task_id"]: why_not(said, cfg.sites.to_dict(), bool(cfg.judge.kind)) for said in read(path)}
  return {name: "excluded" if name in cfg.exclude else why for name, why in found.items() if why or name in cfg.exclude}


def tasks_of(path: str, computer: str, cfg: ml_collections.ConfigDict) -> list[Task]:
  skipped, sites, out = left_out(path, cfg), cfg.sites.to_dict(), []
  for said in read(path):
    if said["task_id"] not in skipped:
      params = {"start": fill(said["start_url"], sites), "eval": json.loads(fill(json.dumps(said["eval"]), sites))}
      params |= {"state": os.path.basename(said["storage_state"])} if said.get("storage_state") else {}
      family = "+".join(said["sites"])
      out.append(Task(f"webarena-{said['task_id']}", said["intent"], computer, family, 0, params, Limits(cfg.steps)))
  return out


class Site:
  """Sites of the user's. judge: see envs.referees.Judge; the reference is in the task's params["eval"]."""

  private, graded = True, False

  def __init__(self, cfg: ml_collections.ConfigDict, judge: Judge | None):
    self.cfg, self.judge, self.graded_by = cfg, judge, ""
    self.keeps = max(1, kept_for(judge))

  def places(self) -> list[str]:
    return sorted({place_of(url) for url in self.cfg.sites.values() if url})

  def begin(self, window: Window, task: Task) -> None:
    if "state" in task.params and self.cfg.states:
      state = json.loads((pathlib.Path(self.cfg.states) / task.params["state"]).read_text())
      wanted = {"browserContextId": window.context, "cookies": [cookie_of(c) for c in state["cookies"]]}
      window.browser.call("Storage.setCookies", wanted, seconds=window.seconds)
    for i, url in enumerate(task.params["start"].split(" |AND| ")):
      if i:
        window.new_tab()
      if failed := window.goto(url):
        raise ResetFailed(f"{task.id}: {url}: {failed}")
    window.show(0)

  def look(self, window: Window) -> dict:
    return {"popup": "", "page": window.url()}

  def over(self, window: Window) -> bool:
    return False

  def verdict(self, window: Window, task: Task, frames: list, texts: list[str], answer: str | None) -> float:
    """1 if every checker of the task passes."""
    how, self.graded_by = task.params["eval"], ""
    last = window.url()
    if "string_match" in how["eval_types"] and not self._answered(task, how, frames, texts, answer or ""):
      return 0.0
    if "url_match" in how["eval_types"] and not answers.same_url(how["reference_url"], last):
      return 0.0
    if "program_html" in how["eval_types"]:
      return float(all(self._shows(window, target, last) for target in how["program_html"]))
    return 1.0

  def _answered(self, task: Task, how: dict, frames: list, texts: list[str], answer: str) -> bool:
    for kind, wanted in how["reference_answers"].items():
      if kind == "exact_match":
        good = answers.same(wanted, answer)
      elif kind == "must_include":
        good = all(any(answers.includes(one, answer) for one in each.split(" |OR| ")) for each in wanted)
      elif kind == "fuzzy_match":
        good = bool(answer) and (wanted == "N/A" and answers.same("N/A", answer) or self._judged(task, frames, texts))
      else:
        raise CheckerFailed(f"{task.id}: unknown kind of answer {kind!r}")
      if not good:
        return False
    return True

  def _judged(self, task: Task, frames: list, texts: list[str]) -> bool:
    if self.judge is None:
      raise CheckerFailed(f"{task.id}: only a judge can score it, and there is none")
    score, self.graded_by = judged(self.judge, task, frames, texts)
    return score >= task.threshold

  def _shows(self, window: Window, target: dict, last: str) -> bool:
    """Whether the page named by one target, or the last one, shows what is required."""
    url, front = target["url"], window.front
    if POST.fullmatch(url):
      url = post_url(last)
    elif url.startswith("func:"):
      raise CheckerFailed(f"{url[:200]}: a site's private interface is not asked")
    if url == "last":
      return required(self._selected(window, target), target["required_contents"])
    window.new_tab()
    try:
      if window.goto(url) or not window.loaded(time.monotonic() + self.cfg.load_seconds):
        raise CheckerFailed(f"{url[:200]} did not load")
      return required(self._selected(window, target), target["required_contents"])
    finally:
      window.close_tab()
      window.front = front if front in window.tabs else window.front

  def _selected(self, window: Window, target: dict) -> str:
    """What the target's locator finds on the page in front; "" where the page has none of it."""
    locator = target["locator"].strip()
    try:
      for prepare in target.get("prep_actions", []):
        window.evaluate(prepare)
      found = window.evaluate(locator or "document.documentElement.outerHTML")
    except PageClosed:
      raise
    except Refused:
      return ""
    return "" if found is None else html.unescape(str(found))

  def close(self) -> None:
    pass


def required(found: str, wanted: dict) -> bool:
  if "exact_match" in wanted:
    return answers.same(wanted["exact_match"], found)
  if "must_include" not in wanted:
    raise CheckerFailed(f"unknown required contents {', '.join(wanted)}")
  return all(any(answers.includes(one, found) for one in each.split(" |OR| ")) for each in wanted["must_include"])


def post_url(url: str) -> str:
  """The post of the forum that a page belongs to; the page itself if it belongs to none."""
  parts = urllib.parse.urlsplit(url)
  words = parts.path.split("/")
  return f"{parts.scheme}://{parts.netloc}/f/{words[2]}/{words[3]}/" if len(words) > 3 and words[1] == "f" else url


def cookie_of(saved: dict) -> dict:
  """A cookie of a Playwright storage state as DevTools takes it."""
  out = {k: saved[k] for k in ("name", "value", "domain", "path", "httpOnly", "secure", "sameSite") if k in saved}
  return out | ({"expires": saved["expires"]} if saved.get("expires", -1) > 0 else {})


def make(computer: str, cfg: ml_collections.ConfigDict, clean: bool = False, quick: bool = True, judge: Judge | None = None) -> web.WebEnv:
  """One browser on the user's sites, which are as they are. judge: by default the one of env.judge."""
  del clean, quick
  check(cfg)
  judge = judge or judges.make(cfg.judge)
  return web.WebEnv(computer, Site(cfg, judge), cfg, judge)


def task_lists(computer: str, cfg: ml_collections.ConfigDict) -> dict[str, list[Task]]:
  """practice (without what is held out), in_domain (the first of those) and held_out."""
  held_out = tasks_of(cfg.held_out, computer, cfg)
  kept = {task.id for task in held_out}
  practice = [task for task in tasks_of(cfg.tasks, computer, cfg) if task.id not in kept]
  if not practice or not held_out:
    raise ValueError(f"{len(practice)} tasks to practise and {len(held_out)} held out can be run with the sites and checkers there are")
  return {"practice": practice, "in_domain": practice[: cfg.in_domain_tasks], "held_out": held_out}


def demonstrations(computer: str, count: int, seed: int, cfg: ml_collections.ConfigDict | None = None) -> list[Episode]:
  raise ValueError(f"WebArena has no scripted demonstrations: {scripted.INSTEAD}")


def vocabulary(computer: str, cfg: ml_collections.ConfigDict | None = None) -> tuple[list[str], tuple[int, int]]:
  """(pieces of text for a small tokenizer, (width, height) that the agent is shown)."""
  cfg = cfg or defaults()
  return [chr(n) for n in range(32, 127)], tuple(round(n * cfg.scale) for n in web.shown(cfg))


def canaries(computer: str, cfg: ml_collections.ConfigDict) -> list[Canary]:
  """None: its tasks have no scripted solution here."""
  return []
