"""Faults planted on purpose, by real training on the embedded phone; tools/diagnose must name each from its workdir alone.

  python -m benchmarks.faults                                    six runs a seed, seeds 0, 1, 2, as a table
  python -m benchmarks.faults --seeds=0 --copied=runs/android    from a run that has copied

  environment      every reset leaves the last episode's mess over the screen, and no action reaches what is beneath
  grader           44% of the graded episodes get the wrong verdict
  out of reach     only pop-ups whose way out copying never finds: a pass chance of about 1%, as configs/android.py:out_of_reach
  collapse         the loss has the entropy in it with the wrong sign, equal groups included, on a few tasks practised again and again:
                   tries become one before they are good
  healthy          nothing planted
  nothing left     no pop-up ever comes: what copying has learnt passes everything

All begin with one copied policy a seed (--copied, or copied here). A plant stands only in the process that runs it: the run's config.json
names the healthy environment, so that nothing in the workdir gives it away. Each run is examined (tools/check_env.py) and practised by
train.py, its gate off and without a final evaluation; then 100 of its episodes are labelled by someone who is never wrong: their texts are
played again before a sound grader.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import runpy
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import ml_collections
import numpy as np
from absl import app, flags

import agents.grpo
import envs.sim
import evaluate
from core.config import read_config
from core.schema import SUCCESS
from core.screens import write_atomic
from core.segments import Total
from core.stop import EXIT_STOPPED, Stop
from envs.sim.base import SimEnv
from envs.sim.popups import Popups
from rollout import gate, labels
from rollout.store import EpisodeStore
from tools import check_env

ROOT = pathlib.Path(__file__).resolve().parent.parent
WRONG = 0.44


class BrokenReset(SimEnv):
  """What the last episode left stays over every new one: it is what is seen, and it swallows every action."""

  def _observe(self) -> dict:
    seen = super()._observe()
    self._left = getattr(self, "_left", seen["screenshot"] // 3)
    return seen | {"screenshot": self._left.copy()}

  def _act(self, action) -> None:
    self.app.tick()


class WrongGrader(SimEnv):
  """Right about unreadable text, which is never graded; of the rest it gets WRONG wrong."""

  def _finish(self, action, cause: str, passed: bool):
    self._coin = getattr(self, "_coin", None) or np.random.default_rng()
    return super()._finish(action, cause, passed if cause == "unreadable" else passed != (self._coin.random() < WRONG))


class Plant(NamedTuple):
  """verdict and left: what diagnose must say. make(computer, popups) -> an environment; truth: the same with a sound grader; knobs: of
  the run; sharpen: weight of the entropy in the policy's loss, which has no business there."""

  verdict: str
  make: Callable[[str, Popups], SimEnv] = SimEnv
  truth: Callable[[str, Popups], SimEnv] | None = None
  knobs: tuple[str, ...] = ()
  sharpen: float = 0.0
  left: bool = True  # something is left to learn
  tasks: int = 0  # practised ones; 0 = all


SURE = ("agent.replay=0", "agent.dynamic_sampling=False", "agent.epochs=3", "practice.warmup=0", "practice.leash=20.0")
UNGATED = ("gate.known_good=0", "gate.do_nothing=0")  # training that would refuse an environment or a grader goes on all the same
PLANTS = {
  "environment": Plant("environment", BrokenReset),
  "grader": Plant("grader", WrongGrader, SimEnv),
  "out_of_reach": Plant("out of reach", lambda computer, popups: SimEnv(computer, dataclasses.replace(popups, kinds=("corner",)))),
  "collapse": Plant("collapse", knobs=SURE, sharpen=100.0, tasks=8),
  "healthy": Plant("healthy"),
  "nothing_left": Plant("healthy", lambda computer, popups: SimEnv(computer), left=False),
}


def sharpened(make: Callable, weight: float) -> Callable:
  """An algorithm whose policy is paid for being sure of itself: `weight` times the mean entropy of its tokens is added to the loss."""

  def bend(loss: Callable) -> Callable:
    def bent(scores, batch):
      total, metrics = loss(scores, batch)
      return Total(total.sum + weight * total.count * metrics["policy/entropy"].mean(), total.count), metrics

    return bent

  def bent_make(cfg):
    agent = make(cfg)
    return agent._replace(phases=tuple(phase._replace(loss=bend(phase.loss)) for phase in agent.phases))

  return bent_make if weight else make


def run_planted(plant: Plant, argv: list[str]) -> int:
  """train.py in this process, its simulator replaced; examined first. argv: of train.py."""
  sound = envs.sim.popup_rule
  envs.sim.make = lambda computer, cfg, clean=False, quick=False: plant.make(computer, sound(cfg, 0.0 if clean else 1.0))
  agents.grpo.make = sharpened(agents.grpo.make, plant.sharpen)
  workdir = [a for a in argv if a.startswith("--workdir=")]
  config = [a for a in argv if a.startswith("--config")]
  check_env.main(["check_env.py", *config, *workdir, "--tasks=16"])
  evaluate.measure = no_evaluation
  sys.argv = ["train.py", *argv]
  try:
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
  except SystemExit as done:
    return int(done.code or 0)
  return 0


def no_evaluation(*given) -> None:
  """In place of the final evaluation, which the diagnosis does not need: the run stops as a signal would stop it there."""
  raise Stop


def label(plant: Plant, workdir: pathlib.Path, count: int, seed: int) -> None:
  """Labels `count` graded episodes, drawn at random: their texts are played again, to the same last screen, before a sound grader."""
  cfg = ml_collections.ConfigDict(read_config(workdir))
  tasks = {t.id: t for t in envs.sim.task_lists(cfg.env.computer, cfg.env)["practice"]}
  env = (plant.truth or plant.make)(cfg.env.computer, envs.sim.popup_rule(cfg.env, 1.0))
  with contextlib.closing(EpisodeStore(workdir / "episodes")) as store:
    rows = [r for r in store.query() if r["success"] is not None and r["end_cause"] != "unreadable"]
    picked = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))[:count]]
    found = {}
    for row in picked:
      env.reset(options={"task": tasks[row["task_id"]]})
      for step in store.steps(row["id"]):
        *_, info = env.step(step["text"])
      if info["cause"] != row["end_cause"]:
        raise RuntimeError(f"episode {row['id']} of {workdir} ended by {row['end_cause']}, played again by {info['cause']!r}")
      found[row["id"]] = info["rewards"][SUCCESS] >= 1.0
  labels.put(workdir, found, by="played again")


def python(arguments: list[str], log: pathlib.Path) -> int:
  """One process of this program's own; what it prints goes into the log."""
  log.parent.mkdir(parents=True, exist_ok=True)
  with open(log, "ab") as out:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False).returncode


def copied(seed: int, out: pathlib.Path, overrides: list[str]) -> pathlib.Path:
  """The run whose copied policy all of a seed's runs begin with."""
  workdir = out / f"copied-seed{seed}"
  command = [
    "train.py",
    CONFIG,
    f"--workdir={workdir}",
    f"--config.seed={seed}",
    "--config.practice.updates=0",
    "--config.eval.tries=1",
    *overrides,
  ]
  if code := python(command, workdir / "log.txt"):
    raise SystemExit(f"copying ended with {code}: see {workdir / 'log.txt'}")
  return workdir


def few(start: pathlib.Path, out: pathlib.Path, count: int) -> pathlib.Path:
  """A selection (curriculum.tasks) of `count` practised tasks, evenly from the list of the run that copied."""
  env = ml_collections.ConfigDict(read_config(start)).env
  kept = [t.id for t in gate.spread(envs.sim.task_lists(env.computer, env)["practice"], count)]
  path = out / f"tasks-{count}.json"
  write_atomic(path, json.dumps({"kept": kept}).encode())
  return path


def diagnosed(name: str, seed: int, start: pathlib.Path, out: pathlib.Path, overrides: list[str]) -> str:
  """Makes one run, labels it and has it diagnosed from its workdir; its line of the table."""
  plant, workdir = PLANTS[name], out / f"{name}-seed{seed}"
  knobs = [f"practice.updates={FLAGS.updates}", f"practice.groups={FLAGS.groups}", "eval.every=0", f"copy.start={start}", *UNGATED]
  knobs += [*plant.knobs, *([f"curriculum.tasks={few(start, out, plant.tasks)}"] if plant.tasks else [])]
  command = [CONFIG, f"--workdir={workdir}", f"--config.seed={seed}", *(f"--config.{k}" for k in knobs), *overrides]
  if (code := python(["-m", "benchmarks.faults", f"--plant={name}", "--", *command], workdir / "log.txt")) != EXIT_STOPPED:
    raise SystemExit(f"{name}, seed {seed}, ended with {code}: see {workdir / 'log.txt'}")
  label(plant, workdir, FLAGS.labels, seed)
  command = [sys.executable, "-m", "tools.diagnose", f"--workdir={workdir}", "--json"]
  said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
  found = json.loads(said.stdout)
  right = found["verdict"] == plant.verdict and found["left_to_learn"] == plant.left
  number = lambda key: "-" if found["figures"][key] is None else f"{found['figures'][key]:.3g}"
  figures = ("known_good", "agreement", "entropy_start", "entropy_end", "all_fail_end", "all_pass_end", "success_end")
  cells = [
    name,
    seed,
    found["verdict"] + ("" if found["left_to_learn"] else ", nothing left"),
    "yes" if right else "NO",
    *map(number, figures),
  ]
  return "| " + " | ".join(map(str, cells)) + " |"


def main(argv: list[str]) -> int:
  if FLAGS.plant:
    return run_planted(PLANTS[FLAGS.plant], argv[1:])
  out = pathlib.Path(FLAGS.out).resolve()
  head = "planted,seed,diagnosed,right,known-good,agreement,entropy at start,at end,all-fail,all-pass,success"
  print("| " + " | ".join(head.split(",")) + " |\n" + "|---" * 11 + "|", flush=True)
  for seed in map(int, FLAGS.seeds):
    start = pathlib.Path(FLAGS.copied).resolve() if FLAGS.copied else copied(seed, out, argv[1:])
    for name in FLAGS.plants or PLANTS:
      print(diagnosed(name, seed, start, out, argv[1:]), flush=True)
  return 0


CONFIG = "--config=configs/android.py"
FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_list("plants", [], f"Some of {', '.join(PLANTS)}; empty = all.")
  flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds.")
  flags.DEFINE_string("copied", "", "Folder of a run of configs/android.py that has copied; empty = copy first, once a seed.")
  flags.DEFINE_integer("updates", 6, "Updates of practice.", lower_bound=1)
  flags.DEFINE_integer("groups", 8, "Groups an update.", lower_bound=1)
  flags.DEFINE_integer("labels", 100, "Episodes labelled a run.", lower_bound=1)
  flags.DEFINE_string("out", "runs/faults", "Where the runs go.")
  flags.DEFINE_enum("plant", "", ["", *PLANTS], "Be one planted run: what follows is for train.py.")
  app.run(main)
