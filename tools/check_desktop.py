"""Plays a solved and an idle episode of each family of this project's own tasks on a virtual machine, and prints what came of it.

  python -m tools.check_desktop --image=debian                                every family, one after the other; an hour without KVM
  python -m tools.check_desktop --image=debian --families=files_copy,writer_bold --out=runs/look      two, with every screen as a picture
  python -m tools.check_desktop --image=debian --machines=2                   two at a time

A known-good episode must score 1 and doing nothing 0. Both start from one saved state of the task (env.start=task), which is removed
afterwards. Exit code 0: all of them did; 1: one did not, or could not be scored; 2: something given cannot be run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import pathlib
import shutil
import sys
import threading
import time
from typing import NamedTuple

from PIL import Image

from core.schema import SUCCESS, Episode
from envs import images, scripted
from envs.errors import InfraError
from envs.osworld import suite, tasks

COMPUTER = "osworld/desktop"


class Row(NamedTuple):
  """good, idle: scores, None where there was none; setup: seconds to the saved state; each: seconds of the solved and the idle episode."""

  family: str
  good: float | None
  idle: float | None
  setup: float
  each: tuple[float, float]
  told: str = ""

  @property
  def right(self) -> bool:
    return (self.good, self.idle) == (1.0, 0.0)

  def __str__(self) -> str:
    score = lambda value: "-" if value is None else f"{value:g}"
    times = f"{self.setup:7.1f} {self.each[0]:7.1f} {self.each[1]:7.1f}"
    return f"{self.family:24s} {score(self.good):>4s} {score(self.idle):>4s} {times}  {self.told}"


HEAD = f"{'family':24s} good idle   setup  solved    idle  (seconds)"


def play(env, family: str, at: int, out: pathlib.Path | None) -> Row:
  """The two episodes of one variant, the at-th of those held out."""
  seeds = tasks.seeds(family, at + 1, True)
  seed = seeds[min(at, len(seeds) - 1)]
  task, script = suite.own_task(COMPUTER, env.cfg, family, seed), tasks.script_of(family, seed)
  scores: list[float | None] = [None, None]
  marks, state, told = [time.monotonic()], None, ""
  try:
    env.machine.close()  # the next episode starts another: one at a time is enough
    state, _ = env.start_of(suite.taskfile.parse(task.params["file"], task.id, task.family))
    marks.append(time.monotonic())
    for which, texts in enumerate((script, ())):
      episode = scripted.play(env, task, texts, tasks.VERSION)
      scores[which] = episode.rewards[SUCCESS]
      marks.append(time.monotonic())
      if out is not None or scores[which] != 1.0 - which:
        told += " ".join(str(step.notes) for step in episode.steps if step.notes)
        told += keep(episode, out, f"{family}-{('good', 'idle')[which]}")
  except InfraError as fault:
    told += f"{type(fault).__name__}: {fault}"[:300]
  finally:
    if state is not None:
      shutil.rmtree(state.folder, ignore_errors=True)
  marks += [marks[-1]] * (4 - len(marks))
  return Row(family, *scores, marks[1] - marks[0], (marks[2] - marks[1], marks[3] - marks[2]), told)


def keep(episode: Episode, out: pathlib.Path | None, name: str) -> str:
  """Writes what was on the screen before each step and at the end; where, for the table."""
  if out is None:
    return ""
  out.mkdir(parents=True, exist_ok=True)
  for number, screen in enumerate([*(step.screen for step in episode.steps), episode.final_screen]):
    Image.fromarray(screen.pixels).save(out / f"{name}-{number}.png")
  return f" {out}/{name}-*.png"


def knobs(image: str, families: str = ""):
  """The suite's knobs, with deadlines for a machine that has other work. families: names with commas between, "" for all."""
  cfg = suite.defaults()
  cfg.update({"image": image, "start": "task", "steps": 24, "call_seconds": 30.0, "restore_seconds": 120.0, "settle_most": 30.0})
  cfg.update({"boot_seconds": 900.0, "guest_seconds": 60.0, "step_seconds": 240.0, "window_seconds": 240.0})
  cfg.families = tuple(families.split(",")) if families else ("all",)
  suite.check(cfg)
  return cfg


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser("python -m tools.check_desktop", description=__doc__.splitlines()[0])
  parser.add_argument("--image", default=images.DEBIAN, help="env.image")
  parser.add_argument("--families", default="", help="names with commas between; default: all")
  parser.add_argument("--variant", type=int, default=0, help="which of a family's held-out variants")
  parser.add_argument("--machines", type=int, default=1, help="virtual machines at a time")
  parser.add_argument("--out", default="", help="a folder for the screens of every episode")
  asked = parser.parse_args(argv)
  try:
    cfg = knobs(asked.image, asked.families)
  except ValueError as error:
    print(f"check_desktop: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
  out, left, rows, lock = pathlib.Path(asked.out) if asked.out else None, suite.chosen(cfg)[::-1], [], threading.Lock()
  print(HEAD, flush=True)

  def work() -> None:
    env = suite.make(COMPUTER, cfg)
    try:
      while True:
        with lock:
          if not left:
            return
          family = left.pop()
        row = play(env, family, asked.variant, out)
        with lock:
          rows.append(row)
          print(row, flush=True)
    finally:
      env.close()

  with concurrent.futures.ThreadPoolExecutor(asked.machines) as threads:
    for done in [threads.submit(work) for _ in range(max(1, asked.machines))]:
      done.result()
  right = sum(row.right for row in rows)
  print(f"{right} of {len(rows)} families: known-good 1, do-nothing 0")
  return 0 if right == len(rows) else 1


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
