"""The optimiser of a run, and the check that stops a broken one."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


def make_optimiser(
  knobs, clip_norm: float, steps: int | None, lr: float | None = None, *, frozen: str = "", master: bool = False, moment: Any = None
):  # fmt: skip
  """AdamW after a clip of the global norm. steps: cosine decay over so many, None = constant after the warm-up. lr: None = knobs.lr.

  frozen: searched for in names of leaves ("visual/"), which get no step and keep no state; "" = none. master: see `with_master`.
  moment: dtype of Adam's first moment, None = float32, which the second always has."""
  lr = knobs.lr if lr is None else lr
  if steps is None:
    constant = optax.schedules.constant_schedule(lr)  # a warm-up of 0 steps would stay at its start, 0, for good
    schedule = optax.schedules.warmup_constant_schedule(0.0, lr, knobs.warmup) if knobs.warmup else constant
  else:
    schedule = optax.schedules.warmup_cosine_decay_schedule(0.0, lr, min(knobs.warmup, steps // 2), steps, 0.02 * lr)
  adam = optax.adamw(schedule, b2=0.99, weight_decay=knobs.weight_decay, mu_dtype=moment)
  plain = optax.chain(optax.clip_by_global_norm(clip_norm), adam)
  # gradients come in float32: a state begun in a narrower dtype would change it with the first step, and fit no checkpoint
  optimiser = with_master(plain) if master else optax.GradientTransformation(lambda params: plain.init(_wide(params)), plain.update)
  return (without(optimiser, frozen) if frozen else optimiser), schedule


def _wide(tree: Any) -> Any:
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


class Master(NamedTuple):
  """master: the parameters in float32; inner: what the optimiser that moves them keeps."""

  master: Any
  inner: Any


def with_master(inner: optax.GradientTransformation) -> optax.GradientTransformation:
  """`inner` on float32 copies of the parameters: steps smaller than 1/256 of a bfloat16 weight add up there. Its updates are the way from
  the rounded weight to the copy, which is exact in float32 where the two are within a factor of 2 (Sterbenz)."""

  def init(params):
    return Master(jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params), inner.init(_wide(params)))

  def update(grads, state, params):
    step, kept = inner.update(_wide(grads), state.inner, state.master)
    master = optax.apply_updates(state.master, step)
    return jax.tree.map(jnp.subtract, master, _wide(params)), Master(master, kept)

  return optax.GradientTransformation(init, update)


def without(inner: optax.GradientTransformation, pattern: str) -> optax.GradientTransformation:
  """`inner` on the leaves whose name the pattern is not found in; the others stay as they are, without a state."""
  free = lambda path, _: not re.search(pattern, jax.tree_util.keystr(path, simple=True, separator="/"))
  moved = lambda tree: jax.tree_util.tree_map_with_path(free, tree)
  still = lambda tree: jax.tree.map(lambda m: not m, moved(tree))
  return optax.chain(optax.masked(inner, moved), optax.masked(optax.set_to_zero(), still))


def check_finite(out: dict, most: int) -> None:
  """Stops for good after too many refused steps in a row: something is broken, and going on would not mend it."""
  if int(out["skipped"]) >= most:
    raise FloatingPointError(f"{int(out['skipped'])} optimiser steps in a row had a loss or gradient that is not finite: stopped")
