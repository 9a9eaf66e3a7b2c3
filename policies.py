"""What a checkpoint's policy (models/checkpoint.py) needs of the other parts: an environment that means points as it does, samplers with
sessions, algorithms that it can learn by, parameters to begin with."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import ml_collections

from core import hosts
from core import learner as learner_lib
from core import mesh as mesh_lib
from models import hf
from models.base import Policy
from models.chat import SPACE_OF
from rollout import sessions as sessions_lib
from rollout.sessions import SessionSampler


def suited(env: ml_collections.ConfigDict, policy: Policy, grammar: str) -> ml_collections.ConfigDict:
  """An environment's knobs as a checkpoint's policy needs them: how it means points. ValueError where the environment cannot have it so,
  or shows a policy that reads text none."""
  if not policy.tokens_per_image and not env.get("text"):
    hint = "give --config.env.text=True" if "text" in env else "and this environment has no text to show"
    raise ValueError(f"a {policy.name} checkpoint reads text, no screenshots: {hint}")
  usual = SPACE_OF.get(grammar, "pixels")
  if policy.space in ("", usual) or env.get("points"):
    return env
  if "points" not in env:
    raise ValueError(
      f"policy.space is {policy.space!r}, but {env.computer} takes points as {usual!r} only: give --config.policy.space={usual}"
    )
  return ml_collections.ConfigDict(
    env.to_dict() | {"points": policy.space, "shown": tuple(policy.shown) if policy.space == "resized" else (0, 0)}
  )


def sessions(cfg: ml_collections.ConfigDict, read: Any) -> Callable:
  """What makes the samplers of a checkpoint (models.checkpoint.read's)."""
  knobs, policy = cfg.sampler.sessions, read.lighter if cfg.sampler.sessions.int8 else read.policy
  longest = policy.max_prompt + policy.max_action
  spans = tuple(knobs.spans) or tuple(sorted({min(longest, -(-longest // part // 128) * 128) for part in (4, 2)} | {longest}))
  chunks = tuple(knobs.chunks) or tuple(c for c in (32, 128, 512) if c <= longest) or (longest,)
  slots = knobs.slots or cfg.practice.slots
  how = {name: knobs[name] for name in ("steps", "stop", "on_load", "burst", "images_kept")} | {"chunks": chunks}
  sessions_lib.check(policy, slots, spans, temperature=1.0, most=0, **how)
  if not policy.tokens_per_image and knobs.images_kept != (usual := sessions_lib.defaults().images_kept):
    raise ValueError(
      f"sampler.sessions.images_kept is {knobs.images_kept} and would do nothing, {policy.name} reads text: leave it at {usual}"
    )
  if max(spans) < longest:
    raise ValueError(f"sampler.sessions.spans end at {max(spans)}, policy.max_prompt + max_action is {longest}: raise or lower one")
  _check_room(policy, slots, max(spans))
  return lambda temperature: SessionSampler(
    policy, slots, spans, temperature=temperature, base=read.base(), frozen_tower=read.frozen_tower, warm=knobs.warm, **how
  )


def _check_room(policy: Any, slots: int, places: int) -> None:
  """ValueError where the samplers' cache alone is more than the device has, which would be found when it is made: after the weights."""
  leaves = jax.tree.leaves(jax.eval_shape(lambda: policy.init_cache(slots, places)))
  wanted = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) / 2**30
  stats = jax.local_devices()[0].memory_stats() or {}
  there = stats.get("bytes_limit", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / 2**30
  if wanted > there:
    raise ValueError(
      f"the cache of {slots} sessions of {places} tokens is {wanted:.1f} GiB, and the sampler's device has {there:.1f} GiB: lower "
      "sampler.sessions.slots (0: practice.slots), policy.max_prompt or policy.max_action"
    )


def check_critics(cfg: ml_collections.ConfigDict, critics: Mapping[str, Any]) -> None:
  """ValueError where an algorithm's critics do not go with a checkpoint's policy in this version."""
  steps = [name for name, critic in critics.items() if critic.reads == "steps"]
  if steps and not hosts.alone():
    raise ValueError(f"agent {cfg.agent.name} does not learn in several processes: its critic of steps ({steps[0]}) is no part of them yet")
  if cfg.policy.checkpoint and (steps or critics and cfg.policy.lora.rank):
    why = f"its critic of steps ({steps[0]}) reads the tiny policy only" if steps else "a critic of tokens needs policy.lora.rank=0"
    raise ValueError(f"agent {cfg.agent.name} does not learn from policy.checkpoint: {why}")


def stepped(knobs: ml_collections.ConfigDict) -> dict[str, Any]:
  """How core.optimiser.make_optimiser moves a policy with these knobs (config.policy): what stays frozen has no state."""
  whole = bool(knobs.checkpoint) and not knobs.lora.rank  # adapters are float32, and all of them learn
  return {
    "frozen": "(^|/)visual/" if whole and knobs.freeze_tower else "",
    "master": whole and knobs.dtype == "bfloat16" and knobs.master,
    "moment": knobs.moment if knobs.checkpoint and knobs.moment != "float32" else None,
  }


def restored(run: Any) -> Any:
  """What a run of train.py learns: as it was saved last, or as it begins. ValueError where a checkpoint's tensor holds no numbers: this
  reads every one that the run will use. It comes before computers are started, which takes longer, and holds machines."""
  found, facts = run.session.restore(begun(run, abstract=True)), run.facts
  facts["base"] = same_base(facts, run.cfg.policy.checkpoint, run.workdir)
  if found:
    print(f"resuming {run.workdir} at {facts['phase']} update {facts['done']} (policy version {facts['version']})", flush=True)
    if run.mesh.size == 1 and not run.cfg.mesh.offload:
      found = jax.device_put(found, run.mesh.devices.flat[0])  # bound to it, as learner_lib.compiled leaves what begins
  run.base()  # what adapters join is read by nothing else yet
  return found or begun(run)


def same_base(facts: Mapping[str, Any], folder: str, workdir: Any) -> str:
  """The fingerprint of a checkpoint's folder, "" of none. ValueError where a run began from other weights than now stand there: adapters
  would join another model."""
  began, found = facts.get("base", ""), hf.fingerprint(folder) if folder else ""
  if began and found and began != found:  # of a run that was made before this was noted, nothing can be said
    raise ValueError(f"{folder} holds other weights than {workdir} began from: put those back, or begin anew with --fresh")
  return found


def begun(run: Any, abstract: bool = False) -> Any:
  """What a run of train.py learns, as it begins: the policy's first parameters and what belongs to them. abstract: shapes alone."""
  key, learner = jax.random.key(run.cfg.seed), partial(run.learner, copying=True)
  fresh = lambda key: learner(run.policy.init(key))
  offload = run.cfg.mesh.offload
  if abstract:
    shapes = jax.eval_shape(fresh, key)
    return shapes if run.mesh.size == 1 and not offload else mesh_lib.placed(shapes, run.mesh, offload)
  if run.world.start is None:
    return learner_lib.compiled(fresh, key, run.mesh, offload)(key)
  params = run.world.start(key, run.mesh)
  return learner_lib.compiled(learner, params, run.mesh, offload, donate_argnums=0)(params)
