"""Copying, then practice: the whole loop, top to bottom.

  python train.py --config=configs/osworld.py [--workdir=runs/osworld] [--fresh] [--config.seed=1 ...]

  Task -> Env -> Step -> Episode -> Group -> Credit -> Batch -> loss -> TrainState -> Weights(version) -> Sampler -> Step ...
Exit codes: 0 done; 1 training broke down; 2 something given cannot be run (one line says what); 75 stopped by a signal; 80 parted from
the other processes of the run (core/hosts.py, docs/sharding.md).
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import jax
import numpy as np

import evaluate
import policies
from agents.base import copy_loss, follow
from configs import base
from core import config as config_lib
from core import hosts, rows
from core import learner as learner_lib
from core import mesh as mesh_lib
from core.checkpoint import Checkpointer
from core.find import find
from core.host import hold, keep_freed_memory, out_of_memory, use_compile_cache
from core.learner import make_score, make_update
from core.metrics import Alarms, CompileCounter, Metrics, Progress, Timers
from core.optimiser import check_finite, make_optimiser
from core.pack import PackItem, useful_share
from core.session import Session
from core.state import Batch, Weights
from core.stop import EXIT_PARTED, EXIT_STOPPED, Stop, StopSignals, leave
from core.watchdog import Watchdog
from envs.errors import PoolExhausted
from envs.processes import end_descendants
from models import critic
from rollout import curriculum, demos, feed, gate, instruments
from rollout.buffer import Buffer
from rollout.curriculum import Curriculum, NoTaskLeft
from rollout.gather import Gathered
from rollout.queue import Ledger
from rollout.remote import BadSample, SamplerDown
from rollout.replay import Replay
from rollout.sampler import Sampler
from rollout.scheduler import collect
from rollout.source import make as make_source
from rollout.store import EpisodeStore
from rollout.stream import StreamBroken
from rollout.taskgen import Evolution

BROKEN = (StreamBroken, PoolExhausted, SamplerDown, BadSample)  # what ends a run from outside: saved, and may be tried again


class Run:
  """What a run holds. `learner`, beside it, is what is learnt: {"states": {"policy" and each critic: TrainState}, "frozen": {}}."""

  def __init__(self, cfg, workdir: pathlib.Path):
    self.cfg, self.shared, self.workdir = cfg, workdir, hosts.own(workdir)
    self.world = evaluate.build(cfg)
    self.policy = self.world.learner or self.world.policy
    self.agent = find("agents", cfg.agent.name, having="make").make(cfg.agent)
    self.critics = {key: critic.build(kind, cfg.critic, self.policy) for key, kind in self.agent.critics.items()}
    self.scores = {"policy": make_score(self.policy, cfg.practice.temperature)} | {key: c.score for key, c in self.critics.items()}
    self.mesh = mesh_lib.make(cfg.mesh)
    mesh_lib.check_heads(self.mesh, self.policy.heads, self.policy.kv_heads)
    self.put, self.base = partial(rows.put, mesh=self.mesh), partial(self.world.base, self.mesh)
    self.jitted = {key: learner_lib.jitted(score, self.mesh) for key, score in self.scores.items()}
    policies.check_critics(cfg, self.critics)
    self.copies, self.leash = base.copies(cfg), cfg.practice.leash if base.copies(cfg) else 0.0
    given = {"copy.batch": cfg.copy.batch, "practice.leash_batch": cfg.practice.leash_batch, "practice.groups": cfg.practice.groups}
    self.batch, self.leash_batch, self.groups = (hosts.share(n, name) for name, n in given.items())
    sizes = feed.sizes(self.agent, cfg.practice.micro_batches, (self.batch, self.leash_batch) if self.copies else ())
    shapes = feed.shapes(self.policy, sizes, sum(self.world.tasks.values(), []), cfg.pack.row_tokens, **mesh_lib.multiples(self.mesh))
    self.timers, self.compiles, self.alarms = Timers(), CompileCounter(), Alarms(cfg.alarms)
    self.stop = StopSignals(grace=cfg.save.grace, end=end_descendants, written=lambda: self.session.checkpoints.written())
    self.stop.together = not hosts.alone()
    self.dog = Watchdog(cfg.watchdog, self.workdir, lambda: self.source.report() if self.source else f"{self.facts}", end_descendants)
    hosts.watched(self.dog.beat)
    self.replay, self.ledger, self.buffer = Replay(self.agent.remember), Ledger(), Buffer(max(self.agent.store, 1), 0.0)
    ready = not any(p.until for p in self.agent.phases)  # False: value pre-training comes first
    facts = {"phase": "copying", "done": 0, "version": 0, "ready": ready, "evals": {}}
    self.session = Session(workdir, cfg.seed, cfg.save.keep, facts, host=jax.process_index())
    self.rng, self.source, self.computers = self.session.rng, None, None
    self.curriculum = Curriculum(self.world.tasks["practice"], self.rng, cfg.curriculum, rated="step_value" in self.agent.needs)
    if cfg.curriculum.tasks:
      self.curriculum.only(curriculum.selected(cfg.curriculum.tasks, self.world.tasks["practice"]), cause="not selected")
    self.evolution = Evolution(cfg.env, cfg.taskgen, self.curriculum, self.rng)
    for part in ("replay", "ledger", "buffer", "alarms", "curriculum"):
      self.session.parts[part] = getattr(self, part)
    blank = lambda: np.zeros_like(self.policy.image(np.zeros(self.world.screen_shape, np.uint8)))
    self.feed = feed.Feed(self.agent, self.policy, shapes, blank, self.buffer, self.rng, self.curriculum.rate, cfg.practice.micro_batches)

  facts = property(lambda self: self.session.facts)

  def note(self, name: str, seconds: float) -> None:
    """Accounts wall time. Sampling is a sign of life; the others are turns of loops that wait."""
    self.timers.add(name, seconds)
    if name == "sampling":
      self.dog.beat(name)

  def clock(self, name: str, seconds: float) -> None:
    """Accounts waiting, and is the place where a signal ends it."""
    self.note(name, seconds)
    self.stop.poll()

  def try_on(self, sampler: Sampler, tries: list) -> Iterator:
    """Episodes of other tries than practice's, on the computers that practice has, beside what is under way on them."""
    return self.source.run(sampler, tries, self.clock) if self.source else collect(sampler, self.computers, tries, self.clock)

  def optimiser(self, key: str, copying: bool = False):
    """(optimiser, schedule) of one set of parameters."""
    knobs = self.cfg.copy if copying else self.cfg.practice if key == "policy" else self.cfg.critic
    lr = self.cfg.policy.lr if key == "policy" and self.cfg.policy.checkpoint else knobs.lr
    how = policies.stepped(self.cfg.policy)  # a critic may have the policy's trunk
    return make_optimiser(knobs, self.cfg.practice.clip_norm, self.cfg.copy.updates if copying else None, lr, **how)

  def learner(self, params, copying: bool) -> dict:
    """What is learnt, begun from `params`."""
    optimiser = lambda key: self.optimiser(key, copying and key == "policy")[0]
    return learner_lib.begin(params, optimiser, self.critics, bool(self.agent.reference), self.cfg.seed)

  def asked(self, learner: dict) -> dict:
    return learner_lib.asked(self.agent.needs, learner, self.critics, self.jitted, self.base(), self.mesh)

  def stopping(self) -> bool:
    """Whether a signal has come, to any process of the run: asked where all can save."""
    self.stop.agreed = any(hosts.everyone(self.stop.asked))
    return self.stop.agreed

  def save(self, learner: dict, snapshot: dict | None = None, block: bool = True) -> None:
    facts = (snapshot or {"facts": self.facts})["facts"]
    step = facts["done"] + (self.cfg.copy.updates if facts["phase"] != "copying" and self.copies else 0)
    with self.stop.whole:
      self.session.save(step, learner, snapshot, block)


def copying(run: Run, demo_items: list[PackItem], learner: dict) -> dict:
  """Supervised fine-tuning on demonstrations, in which things go right."""
  knobs, facts, states = run.cfg.copy, run.facts, learner["states"]
  optimiser, schedule = run.optimiser("policy", copying=True)
  update = make_update(make_score(run.policy), copy_loss, optimiser, mesh=run.mesh, like=states["policy"], offload=run.cfg.mesh.offload)
  progress = Progress("copying", knobs.updates, facts["done"])
  with Metrics(run.workdir / "copying", facts["done"]) as metrics:
    while facts["done"] < knobs.updates:
      if (hosts.alone() or facts["done"] % 10 == 0) and run.stopping():
        run.save(learner)
        raise Stop
      states["policy"], out = update(states["policy"], run.base(), run.put(run.feed.draw(demo_items, run.batch)), None)
      facts["done"] += 1
      run.dog.beat("copying")
      if facts["done"] % 50 == 0 or facts["done"] == knobs.updates:
        check_finite(out, run.cfg.practice.max_skipped)
        said = {"loss": float(out["loss"]), "entropy": float(out["policy/entropy"].mean()), "lr": float(schedule(facts["done"] - 1))}
        metrics.write(facts["done"] - 1, {f"copy/{k}": v for k, v in said.items()})
        progress.line(facts["done"], **said)
      progress.seldom(facts["done"])
      if facts["done"] % run.cfg.save.copy_every == 0:
        run.save(learner, block=False)
  return learner


def learn(run: Run, learner: dict, updates: list, got: Gathered, demo_items: list[PackItem]) -> tuple[list, list]:
  """One update: every phase in turn. Returns what its optimiser steps said, by phase, and their useful-token shares."""
  states, knobs, outs, useful = learner["states"], run.cfg.practice, [], []
  for phase, update in zip(run.agent.phases, updates, strict=True):
    said: list[dict] = []
    if run.facts["ready"] or phase.until:
      for batches in run.feed.steps(phase, got, run.asked(learner)):
        demo = run.put(run.feed.draw(demo_items, run.leash_batch)) if run.leash and phase.params_key == "policy" else None
        frozen = learner_lib.frozen(learner, run.critics, phase.params_key, run.base())
        states[phase.params_key], out = update(states[phase.params_key], frozen, sum(map(run.put, batches), ()), demo)
        said.append(jax.device_get(out))
        run.dog.beat("training")
        check_finite(said[-1], knobs.max_skipped)
        useful += [useful_share(b) for b in batches if isinstance(b, Batch)]
    outs.append((phase.params_key, said))
  return outs, useful


def write_down(run: Run, learner: dict, metrics: Metrics, curves: dict[str, float]) -> None:
  """The curves of the update just done, with an evaluation where one is due. A signal in it is obeyed at once: the resumed run makes it."""
  done = run.facts["done"]
  if evaluate.due(run.cfg, done):
    run.facts["curves"] = curves
    try:
      curves = curves | evaluate.midway(run, learner["states"]["policy"].params, metrics)
    except Stop:
      run.save(learner)
      raise
    del run.facts["curves"]
  metrics.write(done - 1, curves | run.alarms.check(done - 1, curves))


def practice(run: Run, demo_items: list[PackItem], learner: dict) -> dict:
  """Own tries, graded, compared or judged, pushed up or down, and again under the new weights."""
  cfg, facts, knobs, states = run.cfg, run.facts, run.cfg.practice, learner["states"]
  phases = [(p.params_key, p.loss, run.leash if p.params_key == "policy" else 0.0) for p in run.agent.phases]
  make = lambda key, loss, leash: make_update(
    run.scores[key], loss, run.optimiser(key)[0], leash, copy_loss, mesh=run.mesh, like=states[key], offload=cfg.mesh.offload
  )
  updates = [make(*phase) for phase in phases]
  sampler, schedule = evaluate.sampler(cfg, run.world, run.workdir, run.stop.poll), run.optimiser("policy")[1]
  store, progress = EpisodeStore(run.workdir / "episodes", facts["done"]), Progress("practice", knobs.updates, facts["done"])
  run.source = make_source(base.mode(cfg), sampler, run.computers, run.session, run.ledger, run.note, knobs.ahead)
  unwritten = int("curves" in facts)  # a signal came in the evaluation after the last update
  with Metrics(run.workdir, facts["done"] - unwritten, config_lib.resolved(cfg)) as metrics, store, run.source, closing(sampler):
    if unwritten:
      write_down(run, learner, metrics, facts["curves"])
    while facts["done"] < knobs.updates:
      before, began, sampling = run.session.snapshot(), time.monotonic(), not 0 < run.agent.offline <= facts["done"]
      try:
        with run.timers("publish"):
          sampler.load(Weights(mesh_lib.local(states["policy"].params, run.mesh), facts["version"]))
        run.curriculum.drop(list(run.computers.parked))
        got = run.source.gather(
          run.replay, run.agent.select, run.curriculum.next, run.rng, tries=run.curriculum.tries, update=facts["done"],
          version=facts["version"], groups=run.groups, rounds=knobs.rounds, group_size=cfg.agent.group_size,
          max_age=knobs.max_age, clock=run.clock,
        ) if sampling else Gathered()  # fmt: skip
        run.stop.poll()
      except (Stop, *BROKEN):
        if hosts.alone() or run.stop.agreed:  # what broke in one process alone, all go back to the last save for
          run.save(learner, before)  # the tries in flight were never trained on: the resumed run starts this update anew
        raise
      with run.timers("training"):
        outs, useful = ([], []) if sampling and run.agent.offline else learn(run, learner, updates, got, demo_items)
      for group in got.groups:
        run.curriculum.report(group)
      for episode in (e for g in got.kept for e in g.episodes if run.agent.store):
        run.buffer.add(episode)
      facts["done"] += 1
      facts["version"] += any(said for key, said in outs if key == "policy")
      follow(learner, facts["done"], run.agent.reference)
      values = lambda tasks: run.feed.start_values(tasks, run.world.make_env, run.asked(learner))
      run.evolution.after(facts["done"], values if "step_value" in run.agent.needs else None)
      for episode in got.episodes:
        store.add(episode, facts["done"] - 1)
      curves = instruments.update_curves(instruments.everyones(got), outs, useful, before["facts"]["version"], time.monotonic() - began)
      curves |= run.source.curves() | run.timers.shares() | {"rate/compiles": float(run.compiles.take())}
      curves["policy/lr"] = float(schedule(int(states["policy"].updates)))
      if not facts["ready"]:
        told = curves | {"critic/updates": facts["done"], "critic/loss_before": facts.get("critic_loss")}
        facts["ready"] = all(p.until(told) for p in run.agent.phases if p.until)
        facts["critic_loss"] = curves.get("critic/loss")
      progress.line(facts["done"], **instruments.progress_values(curves))
      if evaluate.due(cfg, facts["done"]):
        instruments.show_groups(metrics, (got.kept or got.groups)[: cfg.log.groups], facts["done"] - 1)
      write_down(run, learner, metrics, curves)
      stopping = run.stopping()
      last = facts["done"] == knobs.updates or stopping
      if last or facts["done"] % cfg.save.every == 0:
        run.save(learner, block=last)
  run.source = None
  return learner


def conclude(run: Run, params) -> None:
  """The final evaluations, table and summary.json."""
  cfg, protocols = run.cfg, (evaluate.HELD_OUT, evaluate.HELD_OUT_GREEDY, evaluate.CLEAN, evaluate.IN_DOMAIN)
  final = {p.name: dataclasses.asdict(evaluate.measure(run, params, p, cfg.eval.tries, f"practice_{p.name}")) for p in protocols}
  about = {"seconds": run.session.seconds, "seed": cfg.seed, "agent": cfg.agent.name, "config": cfg.name, "updates": cfg.practice.updates}
  with Metrics(run.workdir, cfg.practice.updates) as metrics:
    metrics.final(cfg.practice.updates, {f"eval/{name}": final[name]["success"] for name in ("held_out", "in_domain")})
  print(instruments.conclude(run.workdir, run.facts["evals"], final, about), flush=True)


def train(run: Run, demo_items: list[PackItem]) -> None:
  learner = policies.restored(run)  # all weights are read, and refused, before a computer starts
  cfg, facts = run.cfg, run.facts
  with evaluate.computers(cfg, run.world, run.stop.poll) as run.computers:
    print(gate.gate(cfg, run.world.tasks["practice"], run.computers, run.workdir, run.world.env), flush=True)
    if facts["phase"] == "copying":
      if cfg.copy.start:
        params, facts["evals"] = evaluate.copied(cfg, run.policy)
      else:
        learner = copying(run, demo_items, learner) if run.copies else learner
        run.save(learner)  # before the evaluations, which a signal may cut short
        params = learner["states"]["policy"].params
        for protocol in (evaluate.CLEAN, evaluate.CLEAN_GREEDY, evaluate.HELD_OUT, evaluate.HELD_OUT_GREEDY):
          run.stop.poll()
          evaluate.measure(run, params, protocol, cfg.eval.tries, f"copying_{protocol.name}")
      if cfg.curriculum.solvable_tries:
        run.curriculum.only(evaluate.solvable_tasks(run, params))
      if run.copies:
        with Checkpointer(run.shared / "copied", keep=1) as copied:  # what tools.picture and copy.start begin from
          copied.save(0, {"states": {"policy": {"params": params}}}, {"facts": dict(facts)}, force=True)
      facts.update({"phase": "practice", "done": 0})
      learner = learner_lib.compiled(partial(run.learner, copying=False), params, run.mesh, cfg.mesh.offload)(params)
      run.save(learner)
    conclude(run, practice(run, demo_items, learner)["states"]["policy"].params)


def main(argv: list[str]) -> int:
  try:
    cfg, flags = config_lib.load_config(argv)
    base.check(cfg, flags["overrides"])
    keep_freed_memory()
    use_compile_cache(cfg.compile_cache)
    hosts.join(cfg.hosts)
    hosts.same_config(config_lib.resolved(cfg))
    shared = pathlib.Path(hosts.everyone(flags["workdir"])[0])
    run, workdir = Run(cfg, shared), hosts.own(shared)
    base.same_run(workdir, cfg)
    if all(hosts.everyone((workdir / "summary.json").exists())):
      print(f"{workdir} is finished: its summary.json stands; --fresh starts another run beside it")
      return 0
    evaluate.check_start(cfg)
    episodes = demos.episodes(cfg.copy, cfg.seed, run.world.demonstrations) if run.copies else []
    demo_items = demos.items(episodes, run.policy)
    lock = hold(workdir)  # one process a workdir, until the end
    for change in config_lib.write_config(workdir, cfg, flags, tasks_hash=evaluate.task_list_hash(run.world.tasks["practice"])):
      print(f"changed since the last session here: {change}")
    print(f"{base.banner(cfg, workdir)}\nlearner: {mesh_lib.describe(run.mesh)}", flush=True)
    print(f"{len(episodes)} demonstrations of {len(demo_items)} steps", flush=True)
    with lock, run.stop, run.dog, run.session.checkpoints:
      train(run, demo_items)
  except Stop:
    print(f"stopped after saving: the same command with --workdir={shared} and without --fresh goes on", flush=True)
    return EXIT_STOPPED
  except (ValueError, OSError, MemoryError, hosts.Parted, jax.errors.JaxRuntimeError) as error:
    if hosts.parted(error):
      print(f"train.py: parted from the other processes: {config_lib.one_line(error)[:300]}", file=sys.stderr)
      return EXIT_PARTED
    if line := out_of_memory(error):
      print(f"train.py: {line}", file=sys.stderr)
      return 1
    if isinstance(error, jax.errors.JaxRuntimeError):
      raise
    print(f"train.py: {config_lib.one_line(error)}", file=sys.stderr)
    return config_lib.EXIT_USAGE
  except (FloatingPointError, NoTaskLeft, *BROKEN) as error:
    print(f"train.py: {error}", file=sys.stderr)
    return 1
  return 0


if __name__ == "__main__":
  code, several = main(sys.argv), not hosts.alone()
  if code in (0, EXIT_STOPPED):
    hosts.part()
  leave(code, at_once=several)
