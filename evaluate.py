"""The frozen protocol: held-out and in-domain tasks, passes counted with their noise and every end accounted for.

  python evaluate.py --workdir=runs/osworld                                  the latest checkpoint on every protocol
  python evaluate.py --workdir=runs/osworld --tries=8 --step=30              avg@8 and pass@8 of checkpoint 30
  python evaluate.py --workdir=runs/osworld --protocols=held_out --limits=14,28      two step limits side by side
  python evaluate.py --workdir=runs/osworld --against=runs/osworld:copied    paired with another policy on the same tasks (tools/compare.py)

Every episode is kept as it ends, in eval/episodes/ of the workdir, under its task, try and seed: the same command goes on where it was cut
and repeats nothing; only tries lost to the computers are run again. Writes eval/<version>-<protocol>-tries<n>-seed<s>.json (with -steps<l>
where --limits gives one) and the results table, eval/table-<step>-tries<n>-seed<s>.md and .json. Exit code 0; 1 when nothing could be
scored; 2 when something given cannot be run; 75 when a signal ended it. Real computers are worker processes, as in train.py.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
from absl import flags

import policies
from configs import base
from core import config as config_lib
from core import hosts, stats
from core import mesh as mesh_lib
from core.checkpoint import Checkpointer
from core.find import find
from core.host import hold, keep_freed_memory, use_compile_cache
from core.metrics import Progress
from core.schema import Episode, Limits, Task
from core.screens import write_atomic
from core.state import Weights
from core.stop import EXIT_STOPPED, Stop, StopSignals
from envs.inside import Inside
from envs.pool import Pool, spec_of
from envs.processes import end_descendants
from models.base import Policy
from rollout import instruments
from rollout.curriculum import solvable
from rollout.remote import RemoteSampler
from rollout.results import Results, row_of
from rollout.sampler import Sampler
from rollout.scheduler import collect
from rollout.turn import Try

BUCKETS = (16, 64)
RULE = "strict: the checker judges the state that the agent left; no last action is rewritten; a try lost to the computers is no pass"
PACE = ("step_seconds", "slow_share", "slow_factor", "faults")  # knobs of an environment that no screen and no score shows


class Protocol(NamedTuple):
  """What is held fixed. tasks: a list's name; clean: no pop-ups; greedy: temperature 0 instead of 1."""

  name: str
  tasks: str
  clean: bool = False
  greedy: bool = False


HELD_OUT = Protocol("held_out", "held_out")
HELD_OUT_GREEDY = Protocol("held_out_greedy", "held_out", greedy=True)
CLEAN = Protocol("clean", "held_out", clean=True)
CLEAN_GREEDY = Protocol("clean_greedy", "held_out", clean=True, greedy=True)
IN_DOMAIN = Protocol("in_domain", "in_domain")
PRACTISED = Protocol("practised", "practice")
PROTOCOLS = (HELD_OUT, HELD_OUT_GREEDY, CLEAN, CLEAN_GREEDY, IN_DOMAIN)


@dataclasses.dataclass
class Score:
  """One protocol's result. success = passes / attempted (errors count as not passed and are shown); noise_points: standard
  error in points, clustered by task; finished: episodes that could be scored. tries: k of avg_at_k and pass_at_k, the most that a task
  had; at_most_95: where all or none pass, the share that n_tasks tasks still leave open; rerun: tries that the computers lost before."""

  protocol: str
  version: int
  passes: int
  attempted: int
  finished: int
  n_tasks: int
  success: float
  success_finished: float | None
  noise_points: float
  unreadable: float
  ended_by: dict[str, int]
  errors: dict[str, int]
  by_popup: dict[str, list[int]]
  entropy_popup: float | None
  entropy_plain: float | None
  step_limit: int
  task_list: str
  tries: int
  avg_at_k: float
  pass_at_k: float
  at_most_95: float | None
  rerun: int = 0

  def line(self) -> str:
    errors = f", {sum(self.errors.values())} errors" if self.errors else ""
    return (f"{self.protocol:16} {100 * self.success:5.1f}% +- {self.noise_points:.1f} points "
            f"({self.passes} of {self.attempted} episodes, {self.n_tasks} tasks, {self.step_limit} steps{errors})")  # fmt: skip


class World(NamedTuple):
  """What a config fixes besides the parameters: the policy, the task lists and how to make an environment. The last four are a
  checkpoint's: what its parameters begin as, those that are not learnt, the environment as its policy wants it, the policy as it is
  learnt."""

  policy: Policy
  screen_shape: tuple[int, int, int]
  tasks: dict[str, list[Task]]
  make_env: Any  # make_env(clean=False, quick=True) -> environment; practice asks for one as slow as the config says
  demonstrations: Any  # demonstrations(count, seed) -> episodes
  canaries: Any  # canaries() -> scripted episodes with a known score, for worker processes
  sampler: Callable  # sampler(temperature) -> a sampler of this process without weights
  real: bool = False  # the computers are real: all there are belong to practice, and pop-ups come as they come
  start: Callable | None = None  # start(key, mesh) -> parameters; None: policy.init's
  base: Callable = lambda mesh=None: None
  env: Any = None
  learner: Policy | None = None


def build(cfg: ml_collections.ConfigDict) -> World:
  """The parts a config names, all sizes checked. What a suite starts to make its lists (a browser to read goals) is gone again."""
  computer, env, given, own = cfg.env.computer, cfg.env, {}, cfg.policy.get("checkpoint")
  suite = find("envs", computer.split("/")[0], having="make")
  suite.check(env)
  pieces, size = suite.vocabulary(computer, env)
  tasks = suite.task_lists(computer, env)
  if own:
    grammar = env.get("grammar") or suite.grammar(computer)
    read = find("models", "checkpoint").read(cfg.policy, own, grammar, size)
    policy, env = read.policy, policies.suited(env, read.policy, grammar)
    suite.check(env)
    given = {"start": read.load, "base": read.base, "learner": read.learner}
  elif cfg.policy.name not in cfg.policy:
    raise ValueError(f"policy.name is {cfg.policy.name!r}: this version's configs hold the knobs of 'tiny', and policy.checkpoint")
  else:
    policy = find("models", cfg.policy.name, having="make").make(cfg.policy[cfg.policy.name], pieces, size)
  goals = {task.goal for some in tasks.values() for task in some}
  for goal in {max(goals, key=len)} if cfg.policy.checkpoint else goals:
    policy.prompt(goal, [np.zeros((size[1], size[0], 3), np.uint8)], "")  # refuses a budget that no prompt of it fits into
  return World(
    policy=policy,
    screen_shape=(size[1], size[0], 3),
    tasks=tasks,
    make_env=lambda clean=False, quick=True: suite.make(computer, env, clean, quick),
    demonstrations=lambda count, seed: suite.demonstrations(computer, count, seed, env),
    canaries=lambda: suite.canaries(computer, env),
    sampler=policies.sessions(cfg, read) if own else lambda temperature: Sampler(policy, BUCKETS, temperature),
    real=base.real(cfg), env=env, **given,
  )  # fmt: skip


def task_list_hash(tasks: list[Task]) -> str:
  """Names a task list: two scores compare only where these are equal."""
  return hashlib.sha1("\n".join(t.id for t in tasks).encode()).hexdigest()[:12]


def computers(cfg: ml_collections.ConfigDict, world: World, tick: Callable[[], None]) -> Pool | Inside:
  """What a run practises on: worker processes (practice.workers), which must first score their canaries right, or environments of this
  process. tick: called while something waits for a worker; what it raises ends the wait."""
  if not cfg.practice.workers:
    return Inside([world.make_env(False, False) for _ in range(cfg.practice.slots)], threads=base.mode(cfg) == "async")
  return Pool(spec_of(world.env), base.pool(cfg), canaries=world.canaries(), seed=cfg.seed, tick=tick)


def sampler(cfg: ml_collections.ConfigDict, world: World, workdir: pathlib.Path, tick: Callable[[], None]) -> Any:
  """What writes the tries of practice: the sampler of this process, or the servers of sampler.endpoints. tick: called while it waits
  for those; what it raises ends the wait."""
  if not cfg.sampler.endpoints:
    return world.sampler(cfg.practice.temperature)
  from tools.serve import export_params  # which imports this file

  folder = cfg.sampler.folder or workdir / "published"
  return RemoteSampler(world.policy, cfg.sampler, export_params, folder, cfg.practice.temperature, tick)


def plan(world: World, weights: Weights, protocol: Protocol, tries: int, seed: int) -> tuple[Sampler, list[Try]]:
  """The policy as the protocol samples it, and `tries` tries of every task under keys that no training run uses."""
  tries = 1 if protocol.greedy else tries  # a greedy try repeated is the same try
  sampler = world.sampler(0.0 if protocol.greedy else 1.0)
  sampler.load(weights)
  mark = sum(protocol.name.encode())
  key = lambda t, k: np.random.SeedSequence([seed, 0xE7A1, mark, t, k]).generate_state(2, np.uint32)
  tasks = enumerate(world.tasks[protocol.tasks])
  return sampler, [Try(task, f"eval-{protocol.name}-{i}", k, key(i, k)) for i, task in tasks for k in range(tries)]


def run(
  world: World, weights: Weights, protocol: Protocol, tries: int, seed: int, slots: int, clock=lambda n, s: None,
  through: Callable | None = None,
) -> list[Episode]:  # fmt: skip
  """The episodes of `plan`; of several processes that are one run, this one's share of them. through(sampler, tries) -> episodes: the
  computers that practice has, where they are not in this process; simulated ones without pop-ups are in this process always."""
  sampler, asked = plan(world, weights, protocol, tries, seed)
  asked = hosts.deal(asked)
  if not asked:
    return []
  with closing(sampler):
    if through is not None and (world.real or not protocol.clean):
      episodes = through(sampler, asked)
    else:
      computers = Inside([world.make_env(protocol.clean) for _ in range(min(slots, len(asked)))])
      episodes = collect(sampler, computers, asked, clock)
    progress, found = Progress(protocol.name, len(asked)), []
    for episode in episodes:
      found.append(episode)
      progress.seldom(len(found))
    return found


def by_task(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
  """Passes by task, in the order of the tries; a lost try is no pass."""
  found = collections.defaultdict(list)
  for row in sorted(rows, key=lambda r: (r["task"], r["try"])):
    found[row["task"]].append(float(row["success"]))
  return dict(found)


def score(rows: Sequence[Mapping[str, Any]], protocol: Protocol, version: int, tasks: list[Task], rerun: int = 0) -> Score:
  """Counts passes over everything attempted, from rows of rollout.results. No episodes is no result, never 0%."""
  if not rows:
    raise ValueError(f"{protocol.name}: no episode was attempted, so there is no score")
  finished, passes, passed = [r for r in rows if r["scored"]], sum(r["success"] for r in rows), by_task(rows)
  by_popup: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
  for r in rows:
    by_popup[r["popup"]][0] += r["success"]
    by_popup[r["popup"]][1] += 1
  mean = lambda name: float(np.mean(x)) if (x := [nats for r in finished for nats in r[name]]) else None
  tries = max(map(len, passed.values()))
  whole = {task: p for task, p in passed.items() if len(p) == tries}  # all of them, unless a signal cut the evaluation short
  return Score(
    protocol=protocol.name, version=version, passes=passes, attempted=len(rows), finished=len(finished), n_tasks=len(passed),
    success=passes / len(rows), success_finished=passes / len(finished) if finished else None,
    noise_points=stats.clustered_noise(passed), unreadable=sum(r["end_cause"] == "unreadable" for r in finished) / max(len(finished), 1),
    ended_by=dict(collections.Counter(r["end_cause"] for r in finished)),
    errors=dict(collections.Counter(r["end_cause"] for r in rows if not r["scored"])), by_popup=dict(sorted(by_popup.items())),
    entropy_popup=mean("nats_popup"), entropy_plain=mean("nats_plain"), step_limit=tasks[0].limits.steps,
    task_list=task_list_hash(tasks), tries=tries, avg_at_k=stats.avg_at_k(passed), pass_at_k=stats.mean_pass_at_k(whole, tries),
    at_most_95=stats.unseen_bound(len(passed)) if passes in (0, len(rows)) else None, rerun=rerun,
  )  # fmt: skip


def tried(trainer: Any, weights: Weights, protocol: Protocol, tries: int) -> list[Episode]:
  """`run` in a run of train.py (its Run): on its worker processes, where it has some."""
  weights = Weights(mesh_lib.local(weights.params, trainer.mesh), weights.version)
  cfg, through = trainer.cfg, trainer.try_on if trainer.cfg.practice.workers else None
  return run(trainer.world, weights, protocol, tries, cfg.seed, cfg.practice.slots, trainer.clock, through)


def measure(trainer: Any, params: Any, protocol: Protocol, tries: int, name: str) -> Score:
  """A protocol in a run of train.py (its Run), saved and written down under a name; trainer.samples: its episodes."""
  weights = Weights(params, trainer.facts["version"])
  trainer.samples = tried(trainer, weights, protocol, tries)
  rows = sum(hosts.everyone([row_of(e) for e in trainer.samples]), start=[])
  result = score(rows, protocol, weights.version, trainer.world.tasks[protocol.tasks])
  save(trainer.workdir, result)
  trainer.facts["evals"][name] = dataclasses.asdict(result)
  print(f"  {name}: {result.line()}", flush=True)
  return result


def due(cfg, done: int) -> bool:
  """Whether a short evaluation follows on `done` updates: not on the last, after which the final ones come."""
  return bool(cfg.eval.every) and done % cfg.eval.every == 0 and done < cfg.practice.updates


def midway(trainer: Any, params: Any, metrics: Any) -> dict[str, float]:
  """Curves of a short evaluation in the middle of practice, with sample episodes."""
  tries = trainer.cfg.eval.tries_during
  held_out = measure(trainer, params, HELD_OUT, tries, "practising").success
  instruments.show(metrics, trainer.samples[: trainer.cfg.log.episodes], trainer.facts["done"] - 1)
  return {"eval/held_out": held_out, "eval/in_domain": measure(trainer, params, IN_DOMAIN, tries, "practising_in_domain").success}


def check_start(cfg) -> None:
  """ValueError unless cfg.copy.start, where it is given, is a run that has copied in this run's environment with its policy."""
  if not cfg.copy.start:
    return
  workdir = pathlib.Path(cfg.copy.start)
  theirs, ours = config_lib.read_config(workdir), config_lib.resolved(cfg)
  if not (workdir / "copied").is_dir():
    raise ValueError(f"copy.start is {workdir}, a run that has not finished copying: wait for it, or give another")
  free = (*PACE, *base.machine(cfg))
  for part in ("env", "policy"):
    names = [k for k in ours[part] if ours[part][k] != theirs[part].get(k) and k not in free]
    if names:
      raise ValueError(f"copy.start is {workdir}, whose {part} differs from this run's in {', '.join(names)}: give the same, or copy anew")


def copied(cfg, policy: Policy) -> tuple[Any, dict]:
  """(parameters, scores by name) of the policy that another run, the folder cfg.copy.start, copied: practice starts from there, so
  that algorithms are compared from one start. `check_start` says whether it can be."""
  workdir = pathlib.Path(cfg.copy.start)
  with Checkpointer(workdir / "copied") as checkpoints:
    target = {"states": {"policy": {"params": jax.eval_shape(policy.init, jax.random.key(0))}}}
    tree, host, _ = checkpoints.restore(target, partial=True)
  print(f"starting from the policy that {workdir} copied", flush=True)
  return tree["states"]["policy"]["params"], {k: v for k, v in host["facts"]["evals"].items() if k.startswith("copying_")}


def solvable_tasks(trainer: Any, params: Any) -> list[str]:
  """Ids of the practised tasks that the starting policy of a run of train.py (its Run) passes often enough in
  curriculum.solvable_tries tries (ARPO: 16, once)."""
  knobs = trainer.cfg.curriculum
  passes: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
  tries = [(e.task_id, e.success, e.scored) for e in tried(trainer, Weights(params, 0), PRACTISED, knobs.solvable_tries)]
  for task, success, scored in sum(hosts.everyone(tries), start=[]):
    passes[task][0] += success
    passes[task][1] += scored
  results = {task: (won, tried) for task, (won, tried) in passes.items() if tried}
  unscored = [task for task, (_, tried) in passes.items() if not tried]  # infra errors alone say nothing against a task
  kept = solvable(results, knobs.solvable_lowest, knobs.solvable_highest or None)
  print(f"  solvable: {len(kept.kept)} of {len(results)} tasks; tasks by passes {kept.histogram}; not scored {len(unscored)}", flush=True)
  return kept.kept + unscored


def save(workdir: pathlib.Path, result: Score, suffix: str = "") -> None:
  """Writes eval/<version>-<protocol>.json; a measurement made later has a suffix, so that the run's own is never replaced."""
  path = workdir / "eval" / f"{result.version}-{result.protocol}{suffix}.json"
  path.parent.mkdir(parents=True, exist_ok=True)
  write_atomic(path, (json.dumps(dataclasses.asdict(result), indent=2) + "\n").encode())


class Subject(NamedTuple):
  """A policy of a run. step: its checkpoint, or "copied"."""

  workdir: pathlib.Path
  step: str
  cfg: ml_collections.ConfigDict
  world: World
  weights: Weights

  @property
  def name(self) -> str:
    return f"{self.workdir.name}:{self.step}"


def load(spec: str) -> Subject:
  """The policy named RUN, RUN:STEP or RUN:copied."""
  path, _, which = spec.rpartition(":") if ":" in spec else (spec, "", "")
  if which not in ("", "copied") and not which.isdecimal():
    raise ValueError(f"policy {spec!r}: wanted RUN, RUN:STEP or RUN:copied, got {which!r} after the colon")
  workdir = pathlib.Path(os.path.abspath(path))
  cfg = base.saved(workdir)
  folder = workdir / ("copied" if which == "copied" else "checkpoints")
  if not folder.is_dir():
    raise ValueError(f"policy {spec!r}: there is no {folder}: has the run finished copying?")
  world = build(cfg)
  with Checkpointer(folder) as checkpoints:
    target = {"states": {"policy": {"params": jax.eval_shape(world.policy.init, jax.random.key(0))}}}
    tree, host, step = checkpoints.restore(target, int(which) if which.isdecimal() else None, partial=True)
  policies.same_base(host["facts"], cfg.policy.checkpoint, workdir)
  weights = Weights(tree["states"]["policy"]["params"], host["facts"]["version"])
  world.base()  # what adapters join is read, and refused, before a computer starts
  return Subject(workdir, "copied" if which == "copied" else str(step), cfg, world, weights)


def machines(subject: Subject, tick: Callable[[], None]) -> contextlib.AbstractContextManager[Pool | None]:
  """Worker processes of a run whose computers are real; None where they are simulated, in this process."""
  return computers(subject.cfg, subject.world, tick) if subject.world.real else contextlib.nullcontext()


def examine(
  subject: Subject, protocol: Protocol, tries: int, seed: int, limit: int = 0, on: Pool | None = None,
  tick: Callable[[], None] = lambda: None,
) -> tuple[Results, Score]:  # fmt: skip
  """(what is kept, the score of the first `tries` tries of every task); tries that stand are not run again. limit: steps; 0 = the tasks'
  own. on: `machines` that stand already. tick: called in every wait; what it raises ends it."""
  tasks = subject.world.tasks[protocol.tasks]
  if limit:
    tasks = [dataclasses.replace(t, limits=Limits(limit, t.limits.seconds)) for t in tasks]
  world = subject.world._replace(tasks=subject.world.tasks | {protocol.tasks: tasks})
  about = {"checkpoint": subject.step, "protocol": protocol.name, "seed": seed, "steps": tasks[0].limits.steps,
           "task_list": task_list_hash(tasks)}  # fmt: skip
  folder = subject.workdir / "eval" / "episodes"
  with hold(folder):
    results = Results(folder / f"{subject.step}-{protocol.name}-seed{seed}-steps{about['steps']}.jsonl", about)
    sampler, asked = plan(world, subject.weights, protocol, tries, seed)
    if left := [t for t in asked if results.missing(t.task.id, t.index)]:
      print(f"  {subject.name}, {about['steps']} steps: {len(asked) - len(left)} of {len(asked)} tries stand", flush=True)
      with contextlib.nullcontext(on) if on is not None else machines(subject, tick) as there:
        there = there or Inside([world.make_env(protocol.clean) for _ in range(min(subject.cfg.practice.slots, len(left)))])
        progress = Progress(protocol.name, len(left))
        for done, episode in enumerate(collect(sampler, there, left, lambda name, seconds: tick()), 1):
          results.add(episode)
          progress.seldom(done)
  return results, score(results.first(tries), protocol, subject.weights.version, tasks, results.lost)


def table(scores: Sequence[tuple[str, Score]]) -> list[str]:
  """(policy, Score) pairs as the rows of a Markdown table: everything a score must be read with."""
  columns = "policy,protocol,step limit,k,avg@k %,+- points,pass@k %,passes / attempted,passes / finished %,errors,ended by"
  lines = heading(columns)
  for name, s in scores:
    ended = ", ".join(f"{cause} {n}" for cause, n in sorted(s.ended_by.items(), key=lambda c: -c[1]))
    noise = f"{s.noise_points:.1f}" if s.at_most_95 is None else f"0.0 (95%: within {100 * s.at_most_95:.1f})"
    finished = "no result" if s.success_finished is None else f"{100 * s.success_finished:.1f}"
    cells = (name, s.protocol, s.step_limit, s.tries, f"{100 * s.avg_at_k:.1f}", noise, f"{100 * s.pass_at_k:.1f}",
             f"{s.passes} / {s.attempted}", finished, sum(s.errors.values()), ended)  # fmt: skip
    lines.append("| " + " | ".join(map(str, cells)) + " |")
  return lines


def heading(columns: str) -> list[str]:
  """First two lines of a Markdown table. columns: names with commas between."""
  names = columns.split(",")
  return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]


def main(argv: list[str]) -> int:
  del argv
  unknown = sorted(set(FLAGS.protocols) - {p.name for p in PROTOCOLS})
  if unknown:
    raise ValueError(f"--protocols has {', '.join(unknown)}: wanted some of {', '.join(p.name for p in PROTOCOLS)}")
  wanted, limits = [p for p in PROTOCOLS if not FLAGS.protocols or p.name in FLAGS.protocols], step_limits(FLAGS.limits)
  keep_freed_memory()
  subject = load(FLAGS.workdir if FLAGS.step < 0 else f"{FLAGS.workdir}:{FLAGS.step}")
  use_compile_cache(subject.cfg.compile_cache)
  if FLAGS.against:
    from tools import compare  # which imports this file

    return compare.publish(load(FLAGS.against), subject, [p.name for p in wanted], FLAGS.tries, FLAGS.seed, limits)
  print(f"{subject.workdir}: checkpoint {subject.step} (policy version {subject.weights.version})", flush=True)
  stop, scores = StopSignals(grace=subject.cfg.save.grace, end=end_descendants), []
  try:
    with stop, machines(subject, stop.poll) as on:
      for protocol, limit in itertools.product(wanted, limits or [0]):
        _, result = examine(subject, protocol, FLAGS.tries, FLAGS.seed, limit, on, stop.poll)
        save(subject.workdir, result, f"-tries{FLAGS.tries}-seed{FLAGS.seed}" + (f"-steps{limit}" if limit else ""))
        scores.append(result)
        print(result.line(), "ended by", result.ended_by, flush=True)
  except Stop:
    print("stopped: the episodes that ended are kept, and the same command goes on", flush=True)
    return EXIT_STOPPED
  lines = [f"Rule, {RULE}.", "", *table([(subject.name, s) for s in scores])]
  path = subject.workdir / "eval" / f"table-{subject.step}-tries{FLAGS.tries}-seed{FLAGS.seed}"
  write_table(path, {"policy": subject.name, "rule": RULE, "seed": FLAGS.seed, "scores": [dataclasses.asdict(s) for s in scores]}, lines)
  return 0 if any(s.finished for s in scores) else 1


def step_limits(given: Sequence[str]) -> list[int]:
  """--limits as numbers. ValueError for what is no step limit."""
  if any(not x.isdecimal() or int(x) < 1 for x in given):
    raise ValueError(f"--limits={','.join(given)}: wanted step limits of 1 or more, as 14,28")
  return [int(x) for x in given]


def write_table(path: pathlib.Path, result: Mapping[str, Any], lines: Sequence[str]) -> None:
  """A results table as Markdown and as JSON beside each other, printed too."""
  text = "\n".join(lines)
  write_atomic(path.with_name(path.name + ".json"), (json.dumps(result, indent=2) + "\n").encode())
  write_atomic(path.with_name(path.name + ".md"), (text + "\n").encode())
  print(f"\n{text}\n\nwritten to {path}.md and .json", flush=True)


FLAGS = flags.FLAGS


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder of a run that train.py made.", required=True)
  flags.DEFINE_integer("tries", 4, "Episodes per task at temperature 1.0: k of avg@k and pass@k.", lower_bound=1)
  flags.DEFINE_integer("step", -1, "Which checkpoint; -1 = the latest.")
  flags.DEFINE_integer("seed", 0, "Of the sampling keys: other seeds measure the same policy again.", lower_bound=0)
  flags.DEFINE_list("limits", [], "Step limits, side by side; empty = the tasks' own.")
  flags.DEFINE_string("against", "", "Another policy, RUN, RUN:STEP or RUN:copied: the difference on the same tasks, paired.")
  flags.DEFINE_list("protocols", [], "Some of held_out, held_out_greedy, clean, clean_greedy, in_domain; empty = all.")
  config_lib.run_command(main)
