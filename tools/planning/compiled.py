"""The real train step, compiled for a slice of TPUs on this machine's CPU, and what its memory and collectives are."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.util
import os
import pathlib
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from core import learner
from core import mesh as mesh_lib
from core.find import find
from core.screens import write_atomic
from core.state import Batch
from models import decoder, vision_language
from models.images import image_grid
from models.vision import Run, bucket_for, vision_plan
from tools.planning import hlo
from tools.planning.analytic import SPARE, How, Plan, Work, advice, held_images, split_bytes
from tools.planning.chips import GIB, Topology
from tools.planning.shapes import Shape


def devices(topology: Topology) -> list[Any]:
  """The slice's devices, none of which is here."""
  if importlib.util.find_spec("libtpu") is None:
    raise ValueError("libtpu is not installed: pip install -r requirements-tpu.txt, or give --analytic")
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no TPU is held: other processes may compile too
  from jax.experimental import topologies

  try:
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology.name).devices)
  except jax.errors.JaxRuntimeError as error:
    raise ValueError(f"--topology={topology.name}: the TPU's compiler says {str(error).splitlines()[0]}") from error


def policy(shape: Shape, work: Work, cfg: Any) -> Any:
  """What `core.learner.make_score` calls of a policy, without tokenizer and weights."""
  knobs, text = cfg.policy, shape.text
  logprobs = lambda params, *args, **kwargs: decoder.token_logprobs(params, text, *args, **kwargs)
  if not work.images:
    how = {"remat": knobs.remat, "attention": knobs.attention}
    forward = lambda params, tokens, at, segments, features, slot: decoder.forward(params, text, tokens, at, segments, **how)
    return SimpleNamespace(encode_images=lambda params, images: None, forward=forward, token_logprobs=logprobs, join=None)
  grid = image_grid(work.screen, shape.vl.images)
  plan = vision_plan([grid], shape.vl.vision, bucket_for([grid], shape.vl.vision))
  size = tuple(n // shape.vl.images.merge for n in grid)
  run = Run(knobs.attention, knobs.remat_tower or knobs.remat, grid)
  s = vision_language.Setup(shape.vl, None, work.screen, plan, size, run, knobs.freeze_tower, jnp.dtype(knobs.dtype), knobs.remat)
  encode, forward = (functools.partial(f, s) for f in (vision_language.encode_screens, vision_language.forward))
  return SimpleNamespace(encode_images=encode, forward=forward, token_logprobs=logprobs, join=None)


def batch(shape: Shape, work: Work, mesh: Any, needs: frozenset) -> Batch:
  """One row for each part of the mesh that has rows of its own, as shapes with shardings."""
  rows = mesh_lib.blocks(mesh)
  kinds = {"tokens": "i4", "segment_ids": "i4", "episode_id": "i4", "step_id": "i4", "is_action": "?", "behaviour_logp": "f4",
           "version": "i4", "advantage": "f4", "image_slot": "i4"} | {n: "f4" for n in ("ref_logp", "old_logp") if n in needs}  # fmt: skip
  of = lambda kind, *size: jax.ShapeDtypeStruct(size, np.dtype(kind))
  axes, images = (3 if shape.text.mrope_section else 1), of("u1", rows, 0)
  if work.images:
    grid = image_grid(work.screen, shape.vl.images)
    images = of("u1", rows * held_images(work, dict(mesh.shape)), grid[0] * grid[1], 3 * shape.vl.images.patch**2)
  out = Batch(
    **{name: of(kind, rows, work.tokens) for name, kind in kinds.items()}, positions=of("i4", axes, rows, work.tokens), images=images,
    episode_valid=of("?", rows), now=of("i4"), num_episodes=rows, num_steps=rows * max(1, work.images), row_actions=work.actions,
  )  # fmt: skip
  give = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
  return jax.tree.map(give, out, mesh_lib.batch_shardings(out, mesh))


def train(plan: Plan, shape: Shape, work: Work, how: How, cfg: Any, state: Any, hlo_folder: str = "") -> Plan:
  """The analytic plan with memory and collectives as the compiler has them. hlo_folder: where the program's text goes, "" = nowhere."""
  mesh = mesh_lib.make(plan.mesh, devices(plan.topology))
  agent = find("agents", cfg.agent.name, having="make").make(cfg.agent)
  phase = next(p for p in agent.phases if p.params_key == "policy")
  score = learner.make_score(policy(shape, work, cfg), cfg.practice.temperature)
  update = learner.make_update(score, phase.loss, how.optimiser, mesh=mesh, like=state, offload=how.offload)
  began, given = time.monotonic(), (mesh_lib.placed(state, mesh, how.offload), None, (batch(shape, work, mesh, agent.needs),), None)
  lowered = update.trace(*given).lower(lowering_platforms=("tpu",))
  try:
    program = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    said = next((row for row in str(error).splitlines() if "hbm" in row.lower()), str(error).splitlines()[0])
    return dataclasses.replace(plan, notes=[f"the compiler refuses it: {said.strip()[:300]}", *plan.notes], source="refused")
  seconds = time.monotonic() - began
  if hlo_folder:
    path = pathlib.Path(hlo_folder) / f"train-{plan.topology.name.replace(':', '-')}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, program.as_text().encode())
  return read(plan, program, shape, how, work, state, seconds)


def read(plan: Plan, program: Any, shape: Shape, how: How, work: Work, state: Any, seconds: float) -> Plan:
  """What a compiled step says of itself. Interconnect time is that of its collectives; those that run alone are exposed."""
  m, text = program.memory_analysis(), program.as_text()
  known = {"parameters": split_bytes(state.params, plan.mesh), "optimiser": 0.0 if how.offload else split_bytes(state.opt_state, plan.mesh)}
  memory = known | {
    "batch": m.argument_size_in_bytes - sum(known.values()), "temporaries": m.temp_size_in_bytes,
    "results": m.output_size_in_bytes - m.alias_size_in_bytes, "program": m.generated_code_size_in_bytes,
  }  # fmt: skip
  found = hlo.collectives(text, plan.topology.count)
  total: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
  for c in found:
    total[c.kind][0] += c.times
    total[c.kind][1] += c.sent
  spent = lambda cs: sum(c.sent / plan.topology.bandwidth(c.group) for c in cs)
  times = plan.seconds | {"interconnect": spent(found), "exposed": spent(c for c in found if c.alone)}
  logits = hlo.gathered_logits(found, shape.text.vocab, shape.text.width)
  notes = [n for n in plan.notes if n.startswith(("chosen", "rows on several", "refused"))] + [
    f"compiled in {seconds:.0f} s; all-gathers of logits: {len(logits) or 'none'}; donated {m.alias_size_in_bytes / GIB:.2f} GiB; "
    f"the compiler's own count, each loop's body once: {program.cost_analysis().get('flops', 0) / 1e12:.1f} TFLOP a device",
  ]  # fmt: skip
  sent = {kind: (int(n), size) for kind, (n, size) in total.items()}
  done = dataclasses.replace(plan, memory=memory, collectives=sent, seconds=times, notes=notes, source="compiled")
  if done.spare < SPARE:
    done.notes += advice(plan, shape, how, work) or ["by arithmetic it would fit: the compiler keeps more than --analytic counts"]
  return done
