"""Copying, then practice: the whole loop, top to bottom.

  python train.py --config=configs/osworld.py [--workdir=runs/osworld] [--fresh] [--config.seed=1 ...]

  Task -> Env -> Step -> Episode -> Group -> Credit -> Batch -> loss -> TrainState -> Weights(version) -> Sampler -> Step ...

Exit codes: 0 done; 2 something given cannot be run (one line says what); 1 training broke down; 75 stopped by SIGTERM or
Ctrl-C after saving: the same command goes on.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import evaluate
from configs import base
from core import config as config_lib
from core.checkpoint import Checkpointer
from core.find import find
from core.host import hold, keep_freed_memory, use_compile_cache
from core.metrics import Alarms, CompileCounter, Metrics, Progress, Timers, read_jsonl
from core.optimiser import check_finite, make_optimiser
from core.pack import PackItem, arrange, episode_items, minibatches, number, shape_for, to_batch, useful_share
from core.screens import write_atomic
from core.state import Batch, Scores, TrainState, Weights
from core.stop import Stop, StopSignals
from losses.policy import imitation_loss
from losses.reduce import token_mean
from rollout import demos, instruments
from rollout.gather import gather
from rollout.queue import GroupQueue, Ledger
from rollout.replay import Replay
from rollout.sampler import Sampler
from rollout.store import EpisodeStore
from rollout.trajectories import read_trajectories

EXIT_STOPPED = 75


# ---------------------------------------------------------------- the two jitted functions


def make_score(policy):
  """score(params, batch) -> Scores: log-probability and entropy of every action token, by the path that also samples."""

  def score(params, batch: Batch) -> Scores:
    features = policy.encode_images(params, batch.images)
    hidden = policy.forward(params, batch.tokens, batch.positions, batch.segment_ids, features, batch.image_slot)
    return Scores(*policy.token_logprobs(params, hidden, batch.tokens, batch.is_action, batch.row_actions))

  return score


def make_update(score, loss, optimiser, leash: float):
  """update(state, batch, demo) -> (state, {name: Total or number}), the state donated. One optimiser step.

  leash: weight of a copying term on `demo`, a batch of demonstrations, so that the plain path is not unlearnt. A step
  whose loss or gradient is not finite is refused whole: parameters and optimiser stay as they were, and it is counted.
  """

  def objective(params, batch, demo):
    total, metrics = loss(score(params, batch), batch)
    value = total.mean()
    if leash:
      copied, _ = copy_loss(score(params, demo), demo)
      value = value + leash * copied.mean()
    return value, metrics

  @partial(jax.jit, donate_argnums=0)
  def update(state: TrainState, batch: Batch, demo: Batch | None):
    (value, metrics), grads = jax.value_and_grad(objective, has_aux=True)(state.params, batch, demo)
    norm = optax.tree.norm(grads)
    good = jnp.isfinite(value) & jnp.isfinite(norm)
    grads = jax.tree.map(lambda g: jnp.where(good, g, 0.0), grads)
    step, opt_state = optimiser.update(grads, state.opt_state, state.params)
    new = TrainState(optax.apply_updates(state.params, step), opt_state, state.updates + 1, jnp.zeros_like(state.skipped))
    old = dataclasses.replace(state, skipped=state.skipped + 1)
    state = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
    return state, metrics | {"policy/loss": value, "policy/grad_norm": norm, "skipped": state.skipped}

  return update


def copy_loss(scores: Scores, batch: Batch):
  """Supervised fine-tuning: make the demonstrated tokens likely. The same mask as practice: agent tokens only."""
  mask = batch.is_action.reshape(-1)
  return token_mean(imitation_loss(scores.logp.reshape(-1), mask), mask), {"policy/entropy": token_mean(scores.entropy.reshape(-1), mask)}


class Run:
  """What a run holds. `host` is everything besides the train state that a resume needs; it is saved with it in one step."""

  def __init__(self, cfg, workdir: pathlib.Path):
    self.cfg, self.workdir = cfg, workdir
    self.world = evaluate.build(cfg)
    self.policy = self.world.policy
    self.agent = find("agents", cfg.agent.name, having="make").make(cfg.agent)
    self.phase = self.agent.phases[0]
    longest = self.policy.max_prompt + self.policy.max_action
    size = partial(
      shape_for, longest=longest, most_actions=self.policy.max_action, row_tokens=cfg.pack.row_tokens or longest,
      images_per_record=1, tokens_per_image=self.policy.tokens_per_image,
    )  # fmt: skip
    self.shape, self.copy_shape, self.leash_shape = size(self.phase.minibatch), size(cfg.copy.batch), size(cfg.practice.leash_batch)
    self.blank = np.zeros_like(self.policy.image(np.zeros(self.world.screen_shape, np.uint8)))
    self.checkpoints = Checkpointer(workdir / "checkpoints", keep=cfg.save.keep)
    self.timers, self.compiles, self.alarms = Timers(), CompileCounter(), Alarms()
    self.score = make_score(self.policy)
    self.stop = StopSignals()
    self.rng = np.random.default_rng(cfg.seed)
    self.replay, self.ledger = Replay(self.agent.remember), Ledger()
    self.host = {"phase": "copying", "done": 0, "version": 0, "order": [], "seconds": 0.0, "evals": {}}
    self.started = time.monotonic()

  def clock(self, name: str, seconds: float) -> None:
    """Accounts waiting, and is the place where a signal ends it."""
    self.timers.add(name, seconds)
    self.stop.poll()

  def snapshot(self) -> dict:
    seconds = self.host["seconds"] + time.monotonic() - self.started
    parts = {"rng": self.rng.bit_generator.state, "ledger": self.ledger.state(), "replay": self.replay.episodes()}
    parts |= {"alarms": self.alarms.state(), "order": list(self.host["order"]), "evals": dict(self.host["evals"])}
    return self.host | parts | {"seconds": seconds}

  def save(self, state: TrainState, host: dict) -> None:
    offset = 0 if host["phase"] == "copying" else self.cfg.copy.updates
    self.checkpoints.save(offset + host["done"], state, host, force=True)

  def restore(self, target) -> TrainState:
    state, host, step = self.checkpoints.restore(target)
    self.rng.bit_generator.state = host.pop("rng")
    self.ledger.restore(host.pop("ledger"))
    self.replay.restore(host.pop("replay"))
    self.alarms.load(host.pop("alarms"))
    self.host = host
    print(f"resuming {self.workdir} at {host['phase']} update {host['done']} (policy version {host['version']})", flush=True)
    return state

  def key(self, *numbers: int) -> np.ndarray:
    """A sampling key of its own for every (update, round, group, try), the same in a resumed run."""
    return np.random.SeedSequence([self.cfg.seed, *numbers]).generate_state(2, np.uint32)

  def next_task(self):
    """Tasks in a fresh random order each pass, so that every start state is visited as often as any other."""
    tasks = self.world.tasks["practice"]
    if not self.host["order"]:
      self.host["order"] = self.rng.permutation(len(tasks)).tolist()
    return tasks[self.host["order"].pop()]

  def batch(self, items: list[PackItem], shape) -> Batch:
    return to_batch(items, arrange(items, shape), shape, self.blank)

  def evaluate(self, params, protocol, tries: int, name: str) -> evaluate.Score:
    weights, slots = Weights(params, self.host["version"]), self.cfg.practice.slots
    episodes = evaluate.run(self.world, weights, protocol, tries, self.cfg.seed, slots)
    result = evaluate.score(episodes, protocol, weights.version, self.world.tasks[protocol.tasks])
    evaluate.save(self.workdir, result)
    self.host["evals"][name] = dataclasses.asdict(result)
    self.samples = episodes
    print(f"  {name}: {result.line()}", flush=True)
    return result


def copying(run: Run, demo_items: list[PackItem], state: TrainState) -> TrainState:
  """Supervised fine-tuning on demonstrations, in which things go right."""
  knobs, host = run.cfg.copy, run.host
  optimiser, schedule = make_optimiser(knobs, run.cfg.practice.clip_norm, knobs.updates)
  update = make_update(run.score, copy_loss, optimiser, 0.0)
  progress = Progress("copying", knobs.updates, host["done"])
  with Metrics(run.workdir / "copying", host["done"]) as metrics:
    while host["done"] < knobs.updates:
      if run.stop.asked:
        run.save(state, run.snapshot())
        raise Stop
      picked = run.rng.integers(len(demo_items), size=knobs.batch)
      state, out = update(state, run.batch(number([[demo_items[i]] for i in picked]), run.copy_shape), None)
      host["done"] += 1
      if host["done"] % 50 == 0 or host["done"] == knobs.updates:
        check_finite(out, run.cfg.practice.max_skipped)
        loss, entropy = float(out["policy/loss"]), float(out["policy/entropy"].mean())
        metrics.write(host["done"] - 1, {"copy/loss": loss, "copy/entropy": entropy, "copy/lr": float(schedule(host["done"] - 1))})
        progress.line(host["done"], loss=loss, entropy=entropy)
      if host["done"] % run.cfg.save.copy_every == 0:
        run.save(state, run.snapshot())
  return state



def credited(run: Run, groups: list) -> list[list[PackItem]]:
  """Groups -> the token records of each episode with its push on them."""
  out = []
  for group in groups:
    for episode, credit in zip(group.episodes, run.agent.credit(group)):
      episode.advantage = float(np.mean(credit.advantage))
      keep = run.agent.keep(credit)
      out.append(episode_items(episode, credit, keep, run.policy.positions, run.policy.image))
  return out


def practice(run: Run, demo_items: list[PackItem], state: TrainState) -> TrainState:
  """Own tries, graded, compared inside their group, pushed up or down, and again under the new weights."""
  cfg, host, knobs = run.cfg, run.host, run.cfg.practice
  optimiser, schedule = make_optimiser(knobs, knobs.clip_norm, None)
  learn = make_update(run.score, run.phase.loss, optimiser, knobs.leash)
  sampler = Sampler(run.policy, evaluate.BUCKETS, knobs.temperature)
  envs = [run.world.make_env() for _ in range(knobs.slots)]
  store = EpisodeStore(run.workdir / "episodes")
  store.rewind(host["done"])
  progress = Progress("practice", knobs.updates, host["done"])
  with Metrics(run.workdir, host["done"]) as metrics:
    while host["done"] < knobs.updates:
      before, began = run.snapshot(), time.monotonic()
      with run.timers("publish"):
        sampler.load(Weights(state.params, host["version"]))
      try:
        got = gather(
          sampler, envs, GroupQueue(run.ledger), run.replay, run.agent.select, run.next_task, run.key, run.rng,
          update=host["done"], version=host["version"], groups=knobs.groups, rounds=knobs.rounds,
          group_size=cfg.agent.group_size, max_age=knobs.max_age, clock=run.clock,
        )  # fmt: skip
        run.stop.poll()
      except Stop:
        run.save(state, before)  # the tries in flight were never trained on: the resumed run starts this update anew
        raise
      with run.timers("training"):
        outs, useful = [], []
        episodes = credited(run, got.kept)
        for _ in range(run.phase.epochs if episodes else 0):
          for items in minibatches(episodes, run.phase.minibatch, run.rng):
            batch = run.batch(items, run.shape)
            picked = run.rng.integers(len(demo_items), size=knobs.leash_batch if knobs.leash else 0)
            demo = run.batch(number([[demo_items[i]] for i in picked]), run.leash_shape) if knobs.leash else None
            state, out = learn(state, batch, demo)
            outs.append(jax.device_get(out))
            useful.append(useful_share(batch))
            check_finite(outs[-1], knobs.max_skipped)
      host["done"] += 1
      host["version"] += bool(outs)
      for episode in got.episodes:
        store.add(episode, host["done"] - 1)
      seconds = time.monotonic() - began
      curves = instruments.update_curves(got, outs, useful, before["version"], seconds) | run.timers.shares()
      curves |= {"policy/lr": float(schedule(int(state.updates))), "rate/compiles": float(run.compiles.take())}
      progress.line(
        host["done"], success=curves.get("reward/success"), all_equal=1 - curves.get("groups/mixed", 0.0),
        entropy=curves.get("policy/entropy"), episodes_a_minute=curves["rate/episodes_per_minute"],
      )  # fmt: skip
      if cfg.eval.every and host["done"] % cfg.eval.every == 0 and host["done"] < knobs.updates:
        curves["eval/held_out"] = run.evaluate(state.params, evaluate.HELD_OUT, cfg.eval.tries_during, "practising").success
        for i, episode in enumerate(run.samples[: cfg.log.episodes]):
          pixels, text = instruments.strip(episode)
          metrics.image(f"episode/{i}", pixels, host["done"] - 1)
          metrics.text(f"episode/{i}", text, host["done"] - 1)
        curves["eval/in_domain"] = run.evaluate(state.params, evaluate.IN_DOMAIN, cfg.eval.tries_during, "practising_in_domain").success
      metrics.write(host["done"] - 1, curves | run.alarms.check(host["done"] - 1, curves))
      if host["done"] % cfg.save.every == 0 or host["done"] == knobs.updates:
        run.save(state, run.snapshot())
  store.close()
  return state


def conclude(run: Run, params) -> None:
  """The final table, summary.json and a picture of what changed."""
  evals, cfg = run.host["evals"], run.cfg
  final = {p.name: run.evaluate(params, p, cfg.eval.tries, f"practice_{p.name}") for p in
           (evaluate.HELD_OUT, evaluate.HELD_OUT_GREEDY, evaluate.CLEAN, evaluate.IN_DOMAIN)}  # fmt: skip
  summary = instruments.summary(evals, {k: dataclasses.asdict(v) for k, v in final.items()})
  rows = read_jsonl(run.workdir / "metrics.jsonl")[-5:]  # where practice stands: what share of the groups cannot teach any more
  for k in ("all_fail", "all_pass"):
    summary[f"{k}_end"] = float(np.mean([r.get(f"groups/{k}", 0.0) for r in rows])) if rows else None
  summary |= {"seconds": run.snapshot()["seconds"], "seed": cfg.seed, "agent": cfg.agent.name, "config": cfg.name,
              "updates": cfg.practice.updates}  # fmt: skip
  write_atomic(run.workdir / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
  print(instruments.table(summary, evals["copying_held_out"], dataclasses.asdict(final["held_out"])), flush=True)


def train(run: Run) -> None:
  cfg = run.cfg
  episodes = read_trajectories(cfg.copy.path) if cfg.copy.path else run.world.demonstrations(cfg.copy.demonstrations, cfg.seed)
  demo_items = demos.items(episodes, run.policy)
  print(f"{len(episodes)} demonstrations of {len(demo_items)} steps", flush=True)
  optimiser, _ = make_optimiser(cfg.copy, cfg.practice.clip_norm, cfg.copy.updates)
  state = jax.jit(lambda key: TrainState.create(run.policy.init(key), optimiser))(jax.random.key(cfg.seed))
  if run.checkpoints.latest() is not None:
    state = run.restore(state)
  elif any(p.name[0].isdigit() for p in run.checkpoints.directory.glob("*")):
    raise ValueError(f"{run.checkpoints.directory} holds checkpoints but none is whole: nothing was touched; --fresh starts anew beside it")
  if run.host["phase"] == "copying":
    state = copying(run, demo_items, state)
    run.save(state, run.snapshot())  # before the evaluations, which a signal may cut short
    for protocol in (evaluate.CLEAN, evaluate.CLEAN_GREEDY, evaluate.HELD_OUT, evaluate.HELD_OUT_GREEDY):
      run.stop.poll()
      run.evaluate(state.params, protocol, cfg.eval.tries, f"copying_{protocol.name}")
    with Checkpointer(run.workdir / "copied", keep=1) as copied:  # what tools.picture and comparisons start from
      copied.save(0, {"params": state.params}, run.host, force=True)
    run.host.update({"phase": "practice", "done": 0})
    optimiser, _ = make_optimiser(cfg.practice, cfg.practice.clip_norm, None)
    state = jax.jit(lambda params: TrainState.create(params, optimiser))(state.params)
    run.save(state, run.snapshot())
  state = practice(run, demo_items, state)
  conclude(run, state.params)


def main(argv: list[str]) -> int:
  try:
    cfg, flags = config_lib.load_config(argv)
    base.check(cfg)
    keep_freed_memory()
    use_compile_cache(cfg.compile_cache)
    workdir = pathlib.Path(flags["workdir"])
    run = Run(cfg, workdir)
    config_lib.same_run(workdir, cfg)
    if (workdir / "summary.json").exists():
      print(f"{workdir} is finished: its summary.json stands; --fresh starts another run beside it")
      return 0
    lock = hold(workdir)  # one process a workdir, until the end
    tasks = evaluate.task_list_hash(run.world.tasks["practice"])
    for change in config_lib.write_config(workdir, cfg, flags, tasks_hash=tasks):
      print(f"changed since the last session here: {change}")
    print(base.banner(cfg, workdir), flush=True)
    with lock, run.stop, run.checkpoints:
      train(run)
  except Stop:
    print(f"stopped after saving: the same command with --workdir={workdir} and without --fresh goes on", flush=True)
    return EXIT_STOPPED
  except (ValueError, OSError) as error:
    print(f"train.py: {config_lib.one_line(error)}", file=sys.stderr)
    return config_lib.EXIT_USAGE
  except FloatingPointError as error:
    print(f"train.py: {error}", file=sys.stderr)
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
