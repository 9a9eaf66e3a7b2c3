"""The optimiser of a run, and the check that stops a broken one."""

from __future__ import annotations

import optax


def make_optimiser(knobs, clip_norm: float, steps: int | None, lr: float | None = None):
  """AdamW after a clip of the global norm. steps: cosine decay over so many, None = constant after the warm-up. lr: None = knobs.lr."""
  lr = knobs.lr if lr is None else lr
  if steps is None:
    constant = optax.schedules.constant_schedule(lr)  # a warm-up of 0 steps would stay at its start, 0, for good
    schedule = optax.schedules.warmup_constant_schedule(0.0, lr, knobs.warmup) if knobs.warmup else constant
  else:
    schedule = optax.schedules.warmup_cosine_decay_schedule(0.0, lr, min(knobs.warmup, steps // 2), steps, 0.02 * lr)
  adam = optax.adamw(schedule, b2=0.99, weight_decay=knobs.weight_decay)
  return optax.chain(optax.clip_by_global_norm(clip_norm), adam), schedule


def check_finite(out: dict, most: int) -> None:
  """Stops for good after too many refused steps in a row: something is broken, and going on would not mend it."""
  if int(out["skipped"]) >= most:
    raise FloatingPointError(f"{int(out['skipped'])} optimiser steps in a row had a loss or gradient that is not finite: stopped")
