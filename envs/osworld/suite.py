"""OSWorld as train.py sees it: knobs, task lists, environments, demonstrations. Tasks are a user's (env.tasks) or this project's own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import sys
import zlib
from collections.abc import Callable

import ml_collections

from core.schema import Episode, Limits, Task
from envs import actions, images, judges, qemu, scripted
from envs.canary import Canary, do_nothing, known_good
from envs.osworld import hand as at_hand
from envs.osworld import taskfile, tasks
from envs.osworld.checker import SANDBOXES
from envs.osworld.env import OSWorldEnv, perform, rest
from envs.osworld.files import Files
from envs.osworld.lease import Lease
from envs.osworld.setup import Setup, values_of
from envs.referees import Judge

GRAMMARS = ("desktop", "computer_13", "pyautogui")
HELD_OUT = 4  # of a user's tasks without an index of held-out ones, one in so many by its id
DEMONSTRATED = 500  # seeds' places from here are shown first: practised variants come back only where a family has no others


def defaults() -> ml_collections.ConfigDict:
  """Knobs beside those of the virtual machine; seconds unless said otherwise."""
  cfg = qemu.defaults()
  cfg.update(
    {
      "tasks": "",  # a folder as the benchmark lays it out; "": this project's own, for the Debian desktop
      "index": "",  # a file in it, ids by domain, e.g. test_all.json; "": all task files
      "held_out": "",  # another, only evaluated; "": one in four, by its id
      "families": ("all",),  # of this project's own tasks
      "practice_tasks": 148,  # of them, spread over the families
      "in_domain_tasks": 32,
      "held_out_tasks": 96,
      "steps": 15,  # step limit
      "grammar": "desktop",  # desktop (UI-TARS), computer_13 or pyautogui
      "shown": (0, 0),  # (width, height) of the picture that the agent sees; (0, 0): the screen's own
      "start": "ready",  # what a machine starts from: ready (the desktop; setup steps run every time), or task (a saved state of each task)
      "mirrors": (),  # "PREFIX=FOLDER" each: where the files of URLs are
      "store": "~/.cache/practice/osworld",  # where --prefetch put others
      "uploads": "",  # the folder of upload_file's files
      "password": "password",  # of the guest's user
      "evaluator": "",  # an interpreter with desktop-env, for metrics and getters that are not built in
      "sandbox": "auto",  # of the metrics' processes: on, off, or auto, which says when there is none
      "check_seconds": 60.0,  # of one metric; below pool.deadlines.evaluate
      "check_memory_mb": 8192,  # address space of the metrics' process
      "act_seconds": 60.0,  # of one action of the agent, whose rest is left out then; below pool.deadlines.act
      "step_seconds": 90.0,  # of one setup or postconfig step, and of a getter's call
      "window_seconds": 60.0,  # until a window that setup waits for is there
      "still_seconds": 3.0,  # that the start screen must have been at rest after setup steps, at most window_seconds
      "compat_sleeps": False,  # also sleep as the benchmark's runner does: 60 s after setup, 20 s before the checks
    }
  )
  cfg.judge = judges.defaults()
  return cfg


def check(cfg: ml_collections.ConfigDict) -> None:
  """Domains of the knobs; each failure one line, before any machine starts."""
  judges.check(cfg.judge)
  size = tuple(cfg.shown)
  wanted = {
    "grammar": (cfg.grammar in GRAMMARS, " or ".join(GRAMMARS)),
    "start": (cfg.start in ("ready", "task"), "ready or task"),
    "sandbox": (cfg.sandbox in SANDBOXES, ", ".join(SANDBOXES)),
    "shown": (len(size) == 2 and all(isinstance(n, int) and 0 <= n <= 8192 for n in size), "(width, height) or (0, 0)"),
    "steps": (cfg.steps >= 1, "1 or more"),
    "practice_tasks": (1 <= cfg.practice_tasks <= 100_000, "1 to 100000"),
    "held_out_tasks": (1 <= cfg.held_out_tasks <= 100_000, "1 to 100000"),
    "in_domain_tasks": (1 <= cfg.in_domain_tasks, "1 or more"),
    "check_memory_mb": (cfg.check_memory_mb >= 512, "512 MB or more"),
    "evaluator": (not cfg.evaluator or shutil.which(os.path.expanduser(cfg.evaluator)) is not None, "empty, or an interpreter"),
    "index": (bool(cfg.tasks) or not cfg.index and not cfg.held_out, "a file in env.tasks, which is empty"),
    "families": (tuple(cfg.families) == ("all",) or bool(cfg.families), "('all',), or names"),
  }
  wanted["still_seconds"] = (0 <= cfg.still_seconds <= cfg.window_seconds, "0 to env.window_seconds")
  for name in ("act_seconds", "check_seconds", "step_seconds", "window_seconds"):
    wanted[name] = (0 < cfg[name] < 3600, "seconds above 0")
  for name, (good, want) in wanted.items():
    if not good:
      raise ValueError(f"env.{name} is {cfg[name]!r}, wanted {want}")
  for family in chosen(cfg):
    if family not in tasks.FAMILIES:
      raise ValueError(f"env.families has {family!r}, wanted ('all',) or some of {', '.join(tasks.FAMILIES)}")
  if not cfg.image:
    raise ValueError("env.image is empty: wanted a disk image, or 'debian' (python -m tools.build_desktop builds one)")
  qemu.check(cfg)


def chosen(cfg: ml_collections.ConfigDict) -> list[str]:
  return list(tasks.FAMILIES) if tuple(cfg.families) == ("all",) else list(cfg.families)


class WithOwn(Files):
  """Files of mirrors and store, and those of this project's own tasks, which are made when they are asked for."""

  def __init__(self, cfg: ml_collections.ConfigDict):
    super().__init__(tuple(cfg.mirrors), cfg.store)
    self.own = pathlib.Path(cfg.cache).expanduser() / "tasks" / tasks.VERSION

  def find(self, url: str) -> pathlib.Path | None:
    if not url.startswith(tasks.URL):
      return super().find(url)
    name, _, file = url[len(tasks.URL) :].partition("/")
    family, _, seed = name.removeprefix("practice-").rpartition("-")
    if family not in tasks.FAMILIES or not seed.isdigit() or file not in tasks.variant(family, int(seed)).files:
      return None
    tasks.write_files(self.own, family, int(seed))
    return self.own / name / file


def hand(cfg: ml_collections.ConfigDict) -> at_hand.Hand:
  """What is at hand; starts env.evaluator once, if there is one."""
  found = (frozenset(), frozenset())
  if cfg.evaluator:
    found = at_hand.foreign(cfg.evaluator, cfg.check_memory_mb << 20, cfg.sandbox)
  return at_hand.Hand(WithOwn(cfg), *found, cfg.password, cfg.uploads)


# ---- task lists


def task_lists(computer: str, cfg: ml_collections.ConfigDict) -> dict[str, list[Task]]:
  """practice, in_domain (the first of those) and held_out. Tasks that cannot be run here are left out, and it is said how many."""
  practice, held_out = users(computer, cfg) if cfg.tasks else own(computer, cfg)
  if not practice or not held_out:
    raise ValueError(f"{len(practice)} tasks to practise and {len(held_out)} held out can be run with what is at hand: "
                     "python -m envs.osworld --list says why")  # fmt: skip
  return {"practice": practice, "in_domain": practice[: cfg.in_domain_tasks], "held_out": held_out}


def own(computer: str, cfg: ml_collections.ConfigDict) -> tuple[list[Task], list[Task]]:
  return tuple(
    [own_task(computer, cfg, *one) for one in spread(chosen(cfg), count, kept)]
    for count, kept in ((cfg.practice_tasks, False), (cfg.held_out_tasks, True))
  )  # fmt: skip


def spread(families: list[str], count: int, kept: bool) -> list[tuple[str, int]]:
  """At most `count` (family, seed) pairs, the families in turn. kept: those that are held out."""
  each = -(-count // len(families))
  columns = [[(family, seed) for seed in tasks.seeds(family, each, kept)] for family in families]
  return [column[i] for i in range(each) for column in columns if i < len(column)][:count]


def own_task(computer: str, cfg: ml_collections.ConfigDict, family: str, seed: int) -> Task:
  said = tasks.task_file(family, seed)
  return Task(said["id"], said["instruction"], computer, family, seed, {"file": said}, Limits(cfg.steps))


def users(computer: str, cfg: ml_collections.ConfigDict) -> tuple[list[Task], list[Task]]:
  """A user's tasks; a file that is wrong, or asks for what nobody has, stops nothing but itself."""
  there, left = hand(cfg), {}
  lists: list[list[Task]] = []
  for index in (cfg.index, *([cfg.held_out] if cfg.held_out else [])):
    found = []
    for path, file, why in at_hand.looked_at(taskfile.find(cfg.tasks, index), there):
      if why:
        left[path.stem] = why
      else:
        found.append(Task(f"osworld-{file.id}", file.instruction, computer, file.domain, 0, {"file": file.said}, Limits(cfg.steps)))
    lists.append(found)
  if left:
    name, why = next(iter(left.items()))
    print(f"{len(left)} tasks are left out, e.g. {name}: {why}", file=sys.stderr, flush=True)
  if cfg.held_out:
    kept = {task.id for task in lists[1]}
    return [task for task in lists[0] if task.id not in kept], lists[1]
  apart = lambda task: zlib.crc32(task.id.encode()) % HELD_OUT == 0
  return [task for task in lists[0] if not apart(task)], [task for task in lists[0] if apart(task)]


# ---- environments


def make(computer: str, cfg: ml_collections.ConfigDict, clean: bool = False, quick: bool = True, judge: Judge | None = None) -> OSWorldEnv:
  """One virtual machine. clean and quick: a real desktop has no pop-ups to leave out, and takes the time it takes."""
  del clean, quick
  check(cfg)
  there = hand(cfg)
  base = qemu.ready(images.find(cfg.image, cfg.cache), cfg)
  machine = qemu.Machine(base, cfg)
  try:
    return OSWorldEnv(computer, machine, there, cfg, starts(base, there, cfg), judge)
  except BaseException:
    machine.close()
    raise


def starts(base: qemu.Template, there: at_hand.Hand, cfg: ml_collections.ConfigDict) -> Callable[[taskfile.TaskFile], tuple]:
  """env.start: what a task's episodes start from, and the setup steps that are left to run then."""

  def of(file: taskfile.TaskFile) -> tuple[qemu.Template, tuple[dict, ...]]:
    if cfg.start == "ready":
      return base, file.config
    warm = file.said.get("warm", [])
    contents = [hashlib.sha256(path.read_bytes()).hexdigest() for url in file.urls() if (path := there.files.find(url)) is not None]
    said = json.dumps([file.config, warm, contents], sort_keys=True)
    name = f"task-{hashlib.sha256(said.encode()).hexdigest()[:20]}"
    return qemu.derive(base, name, lambda machine: prepare(machine, file, warm, there, cfg), cfg), ()

  return of


def prepare(machine: qemu.Machine, file: taskfile.TaskFile, warm: list[str], there: at_hand.Hand, cfg: ml_collections.ConfigDict) -> None:
  """Brings a task's start about, to be saved: its setup, and what is done once so that the agent does not wait for it (warm)."""
  values = values_of(tuple(machine.size), cfg.password)
  with contextlib.closing(Lease()) as lease:
    Setup(machine.guest, there.files, lease, values, there.uploads, cfg.step_seconds, cfg.window_seconds).before(file.config, file.id)
  rest(machine, cfg.still_seconds, cfg.window_seconds)
  for text in warm:
    perform(machine, actions.parse(text, "desktop", machine.size))
    rest(machine, cfg.still_seconds, cfg.window_seconds)


# ---- what goes before practice


def demonstrations(computer: str, count: int, seed: int, cfg: ml_collections.ConfigDict | None = None) -> list[Episode]:
  """Scripted solutions of this project's own tasks, played on a machine now, the families in turn. Those that do not pass are left out."""
  cfg = cfg or defaults()
  if cfg.tasks:
    raise ValueError(f"a user's tasks have no scripted demonstrations: {scripted.INSTEAD}")
  if cfg.grammar != "desktop":
    raise ValueError(f"scripted demonstrations are written in the desktop grammar, env.grammar is {cfg.grammar}: {scripted.INSTEAD}")
  families = chosen(cfg)
  each = -(-count // len(families))
  columns = [tasks.seeds(family, DEMONSTRATED, False)[::-1] for family in families]  # the last seeds: practice takes the first
  wanted = [(family, column[(i + seed) % len(column)]) for i in range(each) for family, column in zip(families, columns)][:count]
  solve = lambda env, task: scripted.play(env, task, tasks.script_of(task.family, task.seed), tasks.VERSION)
  env = make(computer, cfg)
  try:
    return scripted.passing(solve, env, (own_task(computer, cfg, *one) for one in wanted), computer)
  finally:
    env.close()


def vocabulary(computer: str, cfg: ml_collections.ConfigDict | None = None) -> tuple[list[str], tuple[int, int]]:
  """(pieces of text for a small tokenizer, (width, height) that the agent is shown). Of this project's own tasks the words of the goals,
  those of them that solutions type, and whole hotkeys are pieces."""
  cfg = cfg or defaults()
  size = tuple(cfg.shown) if any(cfg.shown) else qemu.screen_of(images.find(cfg.image, cfg.cache), cfg)
  pieces = ["Action: ", "hotkey(key='", "type(content='", "click(start_box='(", ",", ")')", "')", "wait()", "finished()", "fail()", "\\n"]
  letters = [chr(n) for n in range(32, 127)]
  if cfg.tasks:
    return [*pieces, *letters], size
  lists = own(computer, cfg)
  words = [word for some in lists for task in some for word in re.findall(r" ?[A-Za-z0-9.]+", task.goal)]
  scripts = (text for some in lists for task in some for text in tasks.script_of(task.family, task.seed))
  typed = {word for text in scripts if "type(" in text for word in re.findall(r"[A-Za-z0-9.]{2,}", text)}
  words += [word.strip() for word in words if word.strip() in typed]
  said = [text for family in chosen(cfg) for seed in tasks.seeds(family, 8, False) for text in tasks.script_of(family, seed)]
  hotkeys = [found[1] for text in said if (found := re.fullmatch(r"Action: hotkey\(key='([a-z0-9 +]+)'\)", text))]
  return list(dict.fromkeys([*pieces, *hotkeys, *letters, *words])), size


def canaries(computer: str, cfg: ml_collections.ConfigDict) -> list[Canary]:
  """A solved episode and one in which nothing is done, of the first practised task; a user's tasks have no scripted solution here."""
  if cfg.tasks or cfg.grammar != "desktop":
    return []
  family, seed = spread(chosen(cfg), cfg.practice_tasks, False)[0]
  task = own_task(computer, cfg, family, seed)
  return [known_good(task, tasks.script_of(family, seed)), do_nothing(task)]
