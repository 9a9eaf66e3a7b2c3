"""What is learnt, as one tree: {"states": {"policy" and each critic: TrainState}, "frozen": {copies of the policy that stay behind}}."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from core.state import TrainState


def begin(params: Any, optimiser: Callable[[str], Any], critics: Mapping[str, Any], reference: bool, seed: int) -> dict:
  """Everything that is learnt, begun: from the policy's `params`, with critics of their own. optimiser(key): of one set of
  parameters; critics: models.base.Critic by key; reference: whether a copy of the policy stays behind as one."""
  key = jax.random.key(seed + 1)
  states = {"policy": TrainState.create(params, optimiser("policy"))}
  for i, (name, critic) in enumerate(critics.items()):
    states[name] = TrainState.create(critic.init(jax.random.fold_in(key, i), params), optimiser(name))
  kept = (["reference"] if reference else []) + (["copied"] if any(c.reads == "steps" for c in critics.values()) else [])
  return {"states": states, "frozen": {name: jax.tree.map(jnp.copy, params) for name in kept}}


def frozen(learner: dict, critics: Mapping[str, Any], key: str, base: Any = None) -> Any:
  """The parameters that the model of this key reads without moving them. base: the policy's, where adapters to it are learnt."""
  if key == "policy":
    return base
  return learner["frozen"]["copied"] if critics[key].reads == "steps" else learner["states"]["policy"].params


def asked(
  needs: Collection[str], learner: dict, critics: Mapping[str, Any], scores: Mapping[str, Callable], base: Any = None
) -> dict[str, Callable]:
  """What an algorithm needs to know of every episode before it gives credit, as functions of a batch. scores: of each key; base: see
  `frozen`."""
  states = learner["states"]
  ask = lambda key, params, name: lambda batch: getattr(scores[key](params, frozen(learner, critics, key, base), batch), name)
  policies = {"old_logp": states["policy"].params, "ref_logp": learner["frozen"].get("reference")}
  offers = {need: ("policy", params, "logp") for need, params in policies.items()}
  heads = {"value_logit": "critic", "step_value": "critic", "task_value": "instruction"}
  offers |= {need: (key, states[key].params, "value_logit") for need, key in heads.items() if key in states}
  return {need: ask(*offers[need]) for need in needs}
