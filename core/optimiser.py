"""The optimiser of a run, and the check that stops a broken one."""

from __future__ import annotations

import jax
import optax


def make_optimiser(knobs, clip_norm: float, steps: int | None):
  """AdamW after a clip of the global norm. steps: cosine decay over so many, or None for constant after the warm-up."""
  if steps is None:
    constant = optax.schedules.constant_schedule(knobs.lr)  # a warm-up of 0 steps would stay at its start, 0, for good
    schedule = optax.schedules.warmup_constant_schedule(0.0, knobs.lr, knobs.warmup) if knobs.warmup else constant
  else:
    schedule = optax.schedules.warmup_cosine_decay_schedule(0.0, knobs.lr, min(knobs.warmup, steps // 2), steps, 0.02 * knobs.lr)
  adam = optax.adamw(schedule, b2=0.99, weight_decay=knobs.weight_decay)
  return optax.chain(optax.clip_by_global_norm(clip_norm), adam), schedule


def check_finite(out: dict, most: int) -> None:
  """Stops for good after too many refused steps in a row: something is broken, and going on would not mend it."""
  if int(out["skipped"]) >= most:
    raise FloatingPointError(f"{int(out['skipped'])} optimiser steps in a row had a loss or gradient that is not finite: stopped")


def follow(learner: dict, done: int, rule: tuple[str, int, float] | None) -> None:
  """Moves the reference policy, after update `done`, by an algorithm's rule (kind, every, mix): "fixed" stays, "phase" becomes
  the policy itself every `every` updates, "moving" then takes a share `mix` of it."""
  kind, every, mix = rule or ("fixed", 1, 1.0)
  if kind == "fixed" or done % every:
    return
  share = 1.0 if kind == "phase" else mix
  frozen, policy = learner["frozen"], learner["states"]["policy"].params
  frozen["reference"] = jax.tree.map(lambda old, new: (1.0 - share) * old + share * new, frozen["reference"], policy)
