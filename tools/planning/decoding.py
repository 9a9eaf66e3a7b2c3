"""What is left for a sampler on a device that also holds its part of a learner: by arithmetic, and of the program itself as the TPU's
compiler has it on this machine's CPU."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from core.config import one_line
from models import decoder, int8
from models.base import Policy
from rollout import engine
from tools.planning import analytic
from tools.planning.analytic import How, Plan
from tools.planning.chips import GIB
from tools.planning.shapes import Shape


class Decoding(NamedTuple):
  """One token for each of `sessions` with `filled` places, on one device beside a plan's learner, or alone where `beside` is False. held:
  bytes by kind; read: bytes a token of each reads; room: sessions that fit; said: of the compiler."""

  sessions: int
  filled: int
  int8: bool
  beside: bool
  held: dict[str, float]
  read: float
  room: int
  said: str = "analytic"


def estimate(shape: Shape, how: How, plan: Plan, filled: int, light: bool) -> Decoding:
  """As many sessions as fit beside the learner; where none does, as many as fit on a device of their own."""
  chip, each = plan.topology.chip, analytic.decode(shape, how, plan.topology, 1, filled, light)
  room = lambda taken: max(0, int(((1 - analytic.SPARE) * chip.hbm - taken - each["weights"]) // each["cache"]))
  beside = room(plan.total) > 0
  fits = room(plan.total if beside else 0.0)
  d = analytic.decode(shape, how, plan.topology, max(1, fits), filled, light)
  return Decoding(max(1, fits), filled, light, beside, {"weights": d["weights"], "cache": d["cache"]}, d["read"], fits)


def compile_for(d: Decoding, shape: Shape, how: How, device: Any, steps: int) -> Decoding:
  """The session sampler's own program (rollout/engine.py), compiled for one device of the slice; bytes read are the compiler's count."""
  text, dtype = shape.text, jnp.dtype(how.dtype)
  unstack = (lambda p: int8.lighter(decoder.unstack(p))) if d.int8 else decoder.unstack
  policy = Policy(*[None] * len(Policy._fields))._replace(
    name=text.family, logits=decoder.logits, unstack=unstack, encode_images=lambda params, images: None,
    init_cache=lambda batch, size: decoder.init_cache(text, batch, size, dtype),
    decode_step=lambda params, token, position, cache: decoder.decode_step(params, text, token, cache),
  )  # fmt: skip
  cache = jax.eval_shape(lambda: engine.empty_cache(policy, d.sessions, (d.filled,)))
  there = jax.sharding.SingleDeviceSharding(device)
  give = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), tree)
  row = lambda dtype, *more: jax.ShapeDtypeStruct((d.sessions, *more), np.dtype(dtype), sharding=there)
  params = give(jax.eval_shape(unstack, decoder.abstract(shape.leaves, dtype)))
  stops = jax.ShapeDtypeStruct((1,), np.dtype("i4"), sharding=there)
  given = (params, give(cache), row("i4"), row("i4"), row("i4"), row("?"), row("u4", 2), stops)
  began = time.monotonic()
  alone = jax.sharding.Mesh(np.array([device]), ("device",)).abstract_mesh  # says what it will run on (models.attention.platform)
  try:
    with jax.sharding.use_abstract_mesh(alone):
      program = engine.programs(policy, 1.0).decode.trace(*given, steps=steps).lower(lowering_platforms=("tpu",)).compile()
  except jax.errors.JaxRuntimeError as error:
    return d._replace(room=0, said=f"the compiler refuses it: {one_line(error)}")
  m = program.memory_analysis()
  sizes = {"weights": size_of(params), "cache": size_of(cache)}
  more = m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes  # beside the weights and the cache, which is donated
  read = program.cost_analysis().get("bytes accessed", 0.0)
  said = f"compiled in {time.monotonic() - began:.0f} s"
  return d._replace(held=sizes | {"temporaries": more + m.generated_code_size_in_bytes}, read=read, said=said)


def size_of(tree: Any) -> float:
  return float(sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree)))


def text(d: Decoding, plan: Plan) -> str:
  """One or two lines."""
  chip, held = plan.topology.chip, sum(d.held.values())
  where = "beside the learner on one device of a host" if d.beside else "not beside the learner; on a device of its own"
  sizes = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in d.held.items())
  spare = 1 - (held + (plan.total if d.beside else 0.0)) / chip.hbm
  seconds = d.read / chip.bandwidth
  fits = d.room > 0 and spare >= analytic.SPARE
  lines = [f"  decode {where}: {d.sessions} sessions of {d.filled:,} tokens{', int8' if d.int8 else ''}, {sizes} GiB, "
           f"{f'{spare:.0%} to spare' if spare >= 0 else f'{-spare:.0%} too much'}; a token of each reads {d.read / 1e9:.1f} GB, "
           f"{1e3 * seconds:.1f} ms (HBM-bound), {d.sessions / seconds:,.0f} tokens a second [{d.said}]"]  # fmt: skip
  if not fits or not d.beside:
    advice = [] if d.int8 else ["--config.sampler.sessions.int8=True halves the weights"]
    advice += ["fewer or shorter sessions (--config.sampler.sessions.slots, --config.policy.max_prompt)"] if fits else []
    advice += ["a larger --config.mesh.context or slice leaves more of a device (train.py samples where it learns)"]
    lines.append(f"    {'to sample beside the learner' if fits else 'it does not fit'}: " + "; ".join(advice))
  return "\n".join(lines)
