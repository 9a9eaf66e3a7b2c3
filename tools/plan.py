"""Will it fit, and how fast: the train step of a config on slices of TPUs that nobody has to own, and what is left for decoding.

  python -m tools.plan --config=configs/osworld.py --topology=v5p:2x2x4 --topology=v6e:4x4 --config.policy.dtype=bfloat16
  python -m tools.plan --config=configs/osworld.py --topology=h100:8 --analytic            without the compiler, for GPUs too

The real train step is compiled by the TPU's compiler on this machine's CPU (requirements-tpu.txt; a minute or more each), and its memory
and collectives are read from the result; FLOPs are counted from the model's sizes, since a compiler counts the body of a scan once.
--analytic does it all by arithmetic, in a second. What --config names says how: policy.dtype, remat, remat_tower, freeze_tower, mesh.*,
agent. The model is policy.checkpoint's, or --model (a name of tools/planning/shapes.py or a checkpoint folder). Where no --config.mesh.*
is given, the smallest mesh.context that fits by arithmetic is taken, and said.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from absl import flags as absl_flags

import policies
from core import config as config_lib
from core import mesh as mesh_lib
from core.config import ConfigError
from core.optimiser import make_optimiser
from core.state import TrainState
from models import checkpoint, decoder
from tools.planning import analytic, chips, decoding, shapes, show
from tools.planning.analytic import How, Plan, Work

DEFAULT_MODEL = "qwen2.5-vl-7b"


def define(values: absl_flags.FlagValues) -> None:
  absl_flags.DEFINE_multi_string("topology", [], "CHIP:SHAPE, such as v5p:2x2x4, v6e:4x4, v5e:8x8, h100:8; several.", flag_values=values)
  absl_flags.DEFINE_string("model", "", f"A known model or a folder; default policy.checkpoint, or {DEFAULT_MODEL}.", flag_values=values)
  absl_flags.DEFINE_integer("tokens", 65536, "Tokens a row.", lower_bound=128, flag_values=values)
  absl_flags.DEFINE_integer("images", 15, "Screenshots a row.", lower_bound=0, flag_values=values)
  absl_flags.DEFINE_string("screen", "1920x1080", "Pixels of a screenshot.", flag_values=values)
  absl_flags.DEFINE_integer("actions", 8192, "Action tokens a row.", lower_bound=1, flag_values=values)
  absl_flags.DEFINE_bool("analytic", False, "By arithmetic, without the compiler.", flag_values=values)
  absl_flags.DEFINE_string("hlo", "", "A folder that gets the text of every compiled program.", flag_values=values)
  absl_flags.DEFINE_bool("table", False, "As a Markdown table.", flag_values=values)


def work(flags: Mapping[str, Any], shape: shapes.Shape) -> Work:
  """The rows that are asked for; ConfigError where they cannot be."""
  if not (found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", flags["screen"])):
    raise ConfigError(f"--screen={flags['screen']}: wanted WIDTHxHEIGHT in pixels")
  images = flags["images"] if shape.vl else 0
  rows = Work(flags["tokens"], images, (int(found[1]), int(found[2])), min(flags["actions"], flags["tokens"]))
  if images:
    seen = analytic.patches(shape, rows) // shape.vl.vision.group
    if images * seen + rows.actions > rows.tokens:
      raise ConfigError(f"{images} screenshots of {seen} tokens and {rows.actions} action tokens do not fit into --tokens={rows.tokens}")
  return rows


def meshes(topology: chips.Topology, cfg: Any, given: bool, tokens: int) -> Iterator[dict[str, int]]:
  """The config's mesh, or one for each context that divides the slice."""
  if given:
    yield dict(zip(mesh_lib.AXES, mesh_lib.sizes(cfg, topology.count)))
    return
  if tokens % topology.chip.lanes:
    raise ConfigError(f"--tokens={tokens} on {topology.name}: wanted a multiple of {topology.chip.lanes}")
  for context in itertools.takewhile(lambda n: n <= topology.count, (1, 2, 4, 8, 16, 32)):
    if topology.count % context == 0 and tokens % (topology.chip.lanes * context) == 0:
      yield {"data": 1, "fsdp": topology.count // context, "context": context, "tensor": 1}


def choose(topology: chips.Topology, cfg: Any, given: bool, shape: shapes.Shape, rows: Work, how: How, state: Any) -> Plan:
  """The analytic plan of the first mesh that fits; of the roomiest where none does."""
  plans = []
  for mesh in meshes(topology, cfg, given, rows.tokens):
    check_mesh(mesh, shape, rows, topology)
    plans.append(analytic.estimate(shape, rows, how, mesh, topology, state))
    if plans[-1].spare >= analytic.SPARE:
      break
  best = max(plans, key=lambda p: p.spare)
  if not given and best.mesh["context"] > 1:
    best.notes.insert(0, f"chosen: --config.mesh.context={best.mesh['context']} (give --config.mesh.* to choose yourself)")
  shared, mine = best.mesh["context"] * best.mesh["tensor"], topology.of_a_host
  if topology.count > mine and shared % mine == 0 and shared > mine:
    takes = f"train.py takes {shared // mine} micro-batches a step, this is one"
    best.notes.insert(0, f"rows on several hosts: {shared} devices share a row, hosts have {mine} and a row each: {takes}")
  elif topology.count > mine and mine % shared:
    best.notes.insert(0, f"refused by train.py: {shared} devices share a row, hosts have {mine}: wanted a divisor or a multiple of it")
  return best


def check_mesh(mesh: Mapping[str, int], shape: shapes.Shape, rows: Work, topology: chips.Topology) -> None:
  t = shape.text
  if t.kv_heads % mesh["tensor"] or t.heads % mesh["tensor"]:
    fits = [n for n in range(1, t.kv_heads + 1) if t.kv_heads % n == 0 and t.heads % n == 0]
    raise ConfigError(
      f"mesh.tensor is {mesh['tensor']}, {shape.name} has {t.heads} heads and {t.kv_heads} key-value heads: wanted one of "
      f"{', '.join(map(str, fits))}"
    )
  wanted = topology.chip.lanes * mesh["context"]
  if rows.tokens % wanted:
    raise ConfigError(f"--tokens={rows.tokens} on mesh.context={mesh['context']}: wanted a multiple of {wanted}")


def how_of(cfg: Any) -> How:
  if cfg.policy.lora.rank:
    raise ConfigError("policy.lora.rank is above 0: only steps in which all parameters learn are planned, set it to 0")
  remats, dtypes = decoder.REMAT, checkpoint.DTYPES  # what train.py takes, which sees them when it reads a checkpoint
  for name, known in (("dtype", dtypes), ("moment", dtypes), ("remat", remats), ("remat_tower", ("", *remats))):
    if cfg.policy[name] not in known:
      raise ConfigError(f"policy.{name} is {cfg.policy[name]!r}, wanted one of {', '.join(filter(None, known))}")
  knobs = ml_collections.ConfigDict(cfg.policy.to_dict() | {"checkpoint": cfg.policy.checkpoint or DEFAULT_MODEL})  # as if it were here
  optimiser = make_optimiser(cfg.practice, cfg.practice.clip_norm, None, cfg.policy.lr, **policies.stepped(knobs))[0]
  return How(cfg.policy.dtype, cfg.policy.remat, cfg.policy.freeze_tower, optimiser, cfg.mesh.offload, cfg.policy.remat_tower)


def described(flags: Mapping[str, Any], shape: shapes.Shape, rows: Work) -> str:
  if not rows.images:
    return f"{rows.tokens:,} tokens"
  each = analytic.patches(shape, rows) // shape.vl.vision.group
  return f"{rows.tokens:,} tokens with {rows.images} screenshots of {flags['screen']} ({each:,} tokens each)"


def main(argv: list[str]) -> int:
  if "--help" in argv[1:]:
    print(__doc__.strip())
    return 0
  cfg, flags = config_lib.load_config(argv, define)
  try:
    if not flags["topology"]:
      raise ConfigError(f"--topology is missing: wanted CHIP:SHAPE, such as v5p:2x2x4; chips are {', '.join(chips.CHIPS)}")
    slices = [chips.parse(text) for text in flags["topology"]]
    if unowned := [t.name for t in slices if not t.chip.tpu and not flags["analytic"]]:
      raise ConfigError(f"{unowned[0]} has no compiler on this machine: give --analytic")
    shape = shapes.load(flags["model"] or cfg.policy.checkpoint or DEFAULT_MODEL)
    rows, how = work(flags, shape), how_of(cfg)
    params = decoder.abstract(shape.leaves, jnp.dtype(how.dtype))
    state = jax.eval_shape(lambda p: TrainState.create(p, how.optimiser), params)
    given = any(key.startswith("mesh.") for key in flags["overrides"])
    plans = [choose(t, cfg.mesh, given, shape, rows, how, state) for t in slices]
    what = f"{described(flags, shape, rows)}; {shape.name} in {how.dtype}, agent {cfg.agent.name}, remat {how.remat}"
    if not flags["analytic"]:
      from tools.planning import compiled  # needs libtpu, which says a lot when it is loaded

      plans = [compiled.train(plan, shape, rows, how, cfg, state, flags["hlo"]) for plan in plans]
    samplers = cfg.sampler.sessions
    for plan in () if flags["table"] else plans:
      print(show.text(plan, what), flush=True)
      sampler = decoding.estimate(shape, how, plan, rows.tokens, samplers.int8)
      if not flags["analytic"]:
        sampler = decoding.compile_for(sampler, shape, how, compiled.devices(plan.topology)[0], samplers.steps)
      print(decoding.text(sampler, plan), flush=True)
    if flags["table"]:
      print(f"{what}\n\n{show.table(plans)}")
  except ValueError as error:
    raise ConfigError(str(error)) from error
  return 0 if all(plan.fits for plan in plans) else 1


if __name__ == "__main__":
  config_lib.run(main)
