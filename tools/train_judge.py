"""A judge trained on labelled episodes: goal and final screen in, YES or NO out; how far it agrees with labels it has not seen.

  python -m tools.train_judge --workdir=runs/android                     labels: what the run's checker said
  python -m tools.train_judge --workdir=runs/android --labels=hand       labels: those given on the episode page (tools/episodes.py)

WebRL's outcome-supervised reward model (arXiv 2411.02337, section 3.2): the policy's own model, from the run's newest parameters, with a
head that says YES. It reads what the policy reads, the goal and one screen, the last. A share of the tasks, not of the episodes, is held
out. Leaves WORKDIR/judge (parameters and judge.json with the figures); tools/serve_judge.py answers for it. Exit code 0; 2 for what cannot
be used.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sqlite3
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from absl import flags

if __package__ in (None, ""):  # python tools/train_judge.py
  sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

import evaluate
from core import config as config_lib
from core.checkpoint import Checkpointer
from core.optimiser import make_optimiser
from core.pack import PackItem, arrange, number, shape_for, to_batch
from core.screens import ScreenStore, write_atomic
from core.state import Batch
from core.stats import Agreement, agreement
from losses.value import critic_cross_entropy
from models import critic
from models.base import Policy
from rollout import scoring
from rollout.sampler import Sampled
from rollout.turn import make_record
from tools import labels

BATCH = 64


class Labelled(NamedTuple):
  """One episode as a judge sees it. screen: uint8 [H, W, 3], the final one."""

  task_id: str
  goal: str
  screen: np.ndarray
  passed: bool


def read(workdir: str, by: str) -> list[Labelled]:
  """The graded episodes of a workdir with their labels, oldest first. by: "checker" or "hand". What ended unreadable was not graded."""
  where = "e.success IS NOT NULL AND e.end_cause != 'unreadable' AND e.final_screen IS NOT NULL"
  source = "episodes e JOIN labels l ON l.episode_id = e.id" if by == "hand" else "episodes e"
  index = labels.index_of(workdir)
  with labels.reading(index) as db:
    if by == "hand" and not labels.has_labels(db):
      raise ValueError(f"--labels=hand, but {workdir} has none: give them with python -m tools.episodes --workdir={workdir}")
    label = "l.passed" if by == "hand" else "e.success"
    rows = db.execute(f"SELECT e.task_id, e.goal, e.final_screen, {label} FROM {source} WHERE {where} ORDER BY e.id").fetchall()
  screens = ScreenStore(index.parent / "screens")
  return [Labelled(task, goal, screens.get(ref).pixels, bool(passed)) for task, goal, ref, passed in rows]


def split(found: Sequence[Labelled], share: float) -> tuple[list[Labelled], list[Labelled]]:
  """(to learn from, held out), by task: the same tasks in every run."""
  held = lambda task: int(hashlib.sha1(task.encode()).hexdigest()[:8], 16) / 16**8 < share
  parts = [e for e in found if not held(e.task_id)], [e for e in found if held(e.task_id)]
  for name, part in zip(("to learn from", "held out"), parts):
    if len({e.passed for e in part}) < 2:
      raise ValueError(f"{len(part)} labels are {name}, of one kind only: wanted passes and fails on both sides, in more tasks")
  return parts


class Judge:
  """The policy's model with a head on what it made of a goal and a screen. knobs: models.critic's."""

  def __init__(self, policy: Policy, knobs: ml_collections.ConfigDict, batch: int = BATCH):
    self.policy = policy
    self.critic = critic.build("trunk", ml_collections.ConfigDict(knobs.to_dict() | {"trunk": "copy"}), policy)
    self.shape = shape_for(
      batch, longest=policy.max_prompt + 1, most_actions=1, row_tokens=0, images_per_record=1, tokens_per_image=policy.tokens_per_image
    )
    self.score = jax.jit(lambda params, batch: self.critic.score(params, None, batch).value_logit)

  def item(self, goal: str, screen: np.ndarray, label: float = 0.0) -> PackItem:
    """The policy's prompt and one token, before which the head is read. The label takes the place of the push."""
    nothing = np.zeros(1, np.float32)
    sampled = Sampled(np.array([self.policy.tokenizer.eos_id], np.int32), nothing, nothing, -1)
    record = make_record(self.policy.prompt(goal, [screen], ""), sampled, 0)
    push = np.where(record.is_action, label, 0.0).astype(np.float32)
    return PackItem(record, [self.policy.image(screen)], self.policy.positions(record), push, np.ones(1, bool)[record.step], 0)

  def batch(self, items: Sequence[PackItem]) -> Batch:
    items = number([[one] for one in items])
    return to_batch(items, arrange(items, self.shape), self.shape, np.zeros_like(items[0].images[0]))

  def chances(self, params: Any, seen: Sequence[tuple[str, np.ndarray]]) -> np.ndarray:
    """f32 [n]: the chance that each (goal, uint8 screen) is a pass."""
    items = [self.item(goal, screen) for goal, screen in seen]
    found = scoring.score_records(items, self.shape, np.zeros_like(items[0].images[0]), {"logit": lambda b: self.score(params, b)})
    return 1.0 / (1.0 + np.exp(-np.array([one["logit"][-1] for one in found], np.float32)))

  def loss(self, params: Any, batch: Batch) -> jax.Array:
    """Mean cross-entropy of the labels."""
    place = jnp.asarray(batch.is_action).reshape(-1)
    logit = self.critic.score(params, None, batch).value_logit.reshape(-1)
    each = critic_cross_entropy(logit, jnp.asarray(batch.advantage).reshape(-1))
    return jnp.sum(jnp.where(place, each, 0.0)) / jnp.maximum(place.sum(), 1)

  def learn(self, policy_params: Any, found: Sequence[Labelled], cfg: ml_collections.ConfigDict, say=lambda line: None) -> Any:
    """Parameters after cfg.updates minibatches of labelled episodes, from the policy's."""
    rng = np.random.default_rng(cfg.seed)
    optimiser, _ = make_optimiser(cfg, 1.0, cfg.updates)
    params = self.critic.init(jax.random.key(cfg.seed), policy_params)
    items = [self.item(e.goal, e.screen, float(e.passed)) for e in found]

    @jax.jit
    def update(params, state, batch):
      value, grads = jax.value_and_grad(self.loss)(params, batch)
      step, state = optimiser.update(grads, state, params)
      return optax.apply_updates(params, step), state, value

    state = optimiser.init(params)
    for n in range(cfg.updates):
      picked = rng.choice(len(items), min(self.shape.episodes, len(items)), replace=False)
      params, state, value = update(params, state, self.batch([items[i] for i in picked]))
      if not np.isfinite(float(value)):
        raise FloatingPointError(f"the judge's loss is {float(value)} at update {n + 1}: stopped")
      if (n + 1) % 50 == 0 or n + 1 == cfg.updates:
        say(f"update {n + 1} of {cfg.updates}, loss {float(value):.3f}")
    return params


def policy_of(workdir: pathlib.Path) -> tuple[Policy, Any, ml_collections.ConfigDict]:
  """(the policy of a run, its newest parameters, the run's config)."""
  cfg = ml_collections.ConfigDict(config_lib.read_config(workdir))
  if cfg.policy.get("checkpoint"):
    raise ValueError(f"{workdir} practises {cfg.policy.checkpoint}: judges are trained from the embedded policy only, so far")
  subject = evaluate.load(str(workdir))
  return subject.world.policy, subject.weights.params, subject.cfg


def report(got: Agreement, shares: dict[str, Any]) -> str:
  """What is printed: agreement on held-out labels beside what always saying the commoner verdict of the others would have."""
  lines = [f"{shares['learned']} labels learned from, {shares['held_out']} held out (other tasks); rows: label, columns: judge"]
  lines += [labels.text(got), f"always the commoner verdict: {100 * shares['constant']:.1f}%"]
  return "\n".join(lines)


def train_judge(workdir: str, by: str, cfg: ml_collections.ConfigDict, say=print) -> tuple[Agreement, dict[str, Any]]:
  """Trains and saves a judge; (its agreement on held-out labels, the numbers about it that judge.json holds)."""
  folder = pathlib.Path(workdir)
  policy, policy_params, run_cfg = policy_of(folder)
  learned, held = split(read(workdir, by), cfg.held_out)
  judge = Judge(policy, run_cfg.critic)
  params = judge.learn(policy_params, learned, cfg, say)
  said = judge.chances(params, [(e.goal, e.screen) for e in held]) >= 0.5
  got = agreement((e.passed, bool(yes)) for e, yes in zip(held, said, strict=True))
  common = float(np.mean([e.passed for e in learned])) >= 0.5
  about = {"labels": by, "learned": len(learned), "held_out": len(held), "seed": cfg.seed, "updates": cfg.updates,
           "constant": float(np.mean([e.passed == common for e in held]))} | labels.figures(got)  # fmt: skip
  with Checkpointer(folder / "judge", keep=1) as checkpoints:
    checkpoints.save(cfg.updates, {"params": params}, about, force=True)
  write_atomic(folder / "judge" / "judge.json", (json.dumps(about, indent=2) + "\n").encode())
  return got, about


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {"updates": 300, "lr": 1e-3, "warmup": 20, "weight_decay": 0.01, "held_out": 0.25, "seed": 0}  # held_out: share of the tasks
  )


def main(argv: Sequence[str]) -> int:
  if argv[1:]:
    raise ValueError(f"{argv[1]} is no flag: write --workdir={argv[1]}")
  cfg = defaults()
  cfg.update({name: FLAGS[name].value for name in ("updates", "lr", "held_out", "seed")})
  got, about = train_judge(FLAGS.workdir, FLAGS.labels, cfg, lambda line: print(line, flush=True))
  print(report(got, about), flush=True)
  return 0


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder of a run that train.py made.", required=True)
  flags.DEFINE_enum("labels", "checker", ["checker", "hand"], "Whose labels: the run's checker's, or hand labels.")
  flags.DEFINE_integer("updates", 300, "Minibatches.", lower_bound=1)
  flags.DEFINE_float("lr", 1e-3, "Learning rate.", lower_bound=0.0)
  flags.DEFINE_float("held_out", 0.25, "Share of the tasks held out.", lower_bound=0.01, upper_bound=0.99)
  flags.DEFINE_integer("seed", 0, "Of the head and of the order.", lower_bound=0)
  config_lib.run_command(main, sqlite3.DatabaseError, FloatingPointError)
