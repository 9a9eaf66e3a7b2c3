"""What is learnt, as one tree: {"states": {"policy" and each critic: TrainState}, "frozen": {copies of the policy that stay behind}}; and
the two jitted functions over it, `score` and `update`, on one device or split over a mesh (core/mesh.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from core import mesh as mesh_lib
from core import rows
from core.state import Batch, Scores, TrainState


def make_score(policy, temperature: float = 1.0):
  """score(params, frozen, batch) -> Scores: log-probability and entropy of every action token, by the path that also samples.

  frozen: parameters that do not move: of another model, for critics that read one, or those that the policy's adapters join."""
  tempered = {} if temperature == 1.0 else {"temperature": temperature}

  def score(params, frozen, batch: Batch) -> Scores:
    params = params if frozen is None else policy.join(frozen, params)
    features = policy.encode_images(params, batch.images)
    hidden = policy.forward(params, batch.tokens, batch.positions, batch.segment_ids, features, batch.image_slot)
    return Scores(*policy.token_logprobs(params, hidden, batch.tokens, batch.is_action, batch.row_actions, **tempered))

  return score


def jitted(score: Callable, mesh: Mesh) -> Callable:
  """score, compiled for a mesh; what it returns is on every device."""
  if mesh.size == 1:
    return jax.jit(score)

  def on_mesh(params, frozen, batch):
    with mesh_lib.use(mesh):
      return score(params, frozen, batch)

  return jax.jit(on_mesh, out_shardings=NamedSharding(mesh, PartitionSpec()))


def adder(score: Callable, loss: Callable) -> Callable:
  """added(params, frozen, batches) -> (sum of the losses, count, metrics, gradients of the sum in float32) of micro-batches, one after
  another: there is room for one at a time."""

  def summed(params, frozen, batch):
    total, metrics = loss(score(params, frozen, batch), batch)
    return total.sum, (total.count, metrics)

  def part(params, frozen, batch):
    (value, (count, metrics)), grads = jax.value_and_grad(summed, has_aux=True)(params, frozen, batch)
    return value, count, metrics, jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)

  def added(params, frozen, batches):
    if len(batches) == 1:
      return part(params, frozen, batches[0])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(part, params, frozen, batches[0]))
    add = lambda sums, batch: (jax.tree.map(jnp.add, sums, part(params, frozen, batch)), None)
    return jax.lax.scan(add, zero, stacked)[0]

  return added


def make_update(
  score, loss, optimiser, leash: float = 0.0, leash_loss: Callable | None = None, *, mesh: Mesh | None = None, like: Any = None,
  offload: bool = False,
):  # fmt: skip
  """update(state, frozen, batches, demo) -> (state, {name: Total or number}), the state donated. One optimiser step.

  batches: micro-batches, whose sums and counts are added (`adder`) before the one division. leash: weight of the mean of `leash_loss` on
  `demo`, demonstrations in micro-batches too, so that the plain path is not unlearnt. A step whose loss or gradient is not finite, or whose
  mask left nothing to learn from, is refused whole: parameters and optimiser stay as they were, and it is counted ("skipped", "empty").
  mesh: of more than one device: states like `like` (anything with its shapes) come and go as core/mesh.py splits them, batches come as
  rows.put puts them, numbers go to every device. offload: the optimiser's state comes and goes by the host's memory.
  """

  added = adder(score, loss)

  def pulled(params, frozen, demo):
    return leash * leash_loss(score(params, frozen, demo), demo)[0].mean()

  def pull_of(params, frozen, demo):
    if len(demo) == 1:
      return jax.value_and_grad(pulled)(params, frozen, demo[0])
    total, count, _, grads = adder(score, leash_loss)(params, frozen, demo)
    weight = leash / jnp.maximum(count, 1e-9)
    return weight * total, jax.tree.map(lambda g: weight * g, grads)

  def update(state: TrainState, frozen, batches: tuple[Batch, ...], demo: tuple[Batch, ...] | None):
    value, counted, metrics, grads = added(state.params, frozen, batches)
    count = jnp.maximum(counted, 1e-9)
    value, grads = value / count, jax.tree.map(lambda g: g / count, grads)
    if leash:
      more, pull = pull_of(state.params, frozen, demo)
      value, grads = value + more, jax.tree.map(jnp.add, grads, pull)
    norm = optax.tree.norm(grads)
    good = jnp.isfinite(value) & jnp.isfinite(norm)
    grads = jax.tree.map(lambda g: jnp.where(good, g, 0.0), grads)
    step, opt_state = optimiser.update(grads, state.opt_state, state.params)
    new = TrainState(optax.apply_updates(state.params, step), opt_state, state.updates + 1, jnp.zeros_like(state.skipped))
    old, empty = dataclasses.replace(state, skipped=jnp.where(good, state.skipped, state.skipped + 1)), counted == 0
    state = jax.tree.map(lambda a, b: jnp.where(good & ~empty, a, b), new, old)
    return state, metrics | {"loss": value, "grad_norm": norm, "skipped": state.skipped, "empty": empty}

  if mesh is None or mesh.size == 1 and not offload:
    return jax.jit(update, donate_argnums=0)

  def on_mesh(state, *args):
    with mesh_lib.use(mesh):
      if offload:
        state = dataclasses.replace(state, opt_state=jax.device_put(state.opt_state, jax.memory.Space.Device))
      return update(state, *args)

  states = mesh_lib.shardings(like, mesh, offload)
  return jax.jit(
    on_mesh, donate_argnums=0, in_shardings=(states, None, None, None), out_shardings=(states, NamedSharding(mesh, PartitionSpec()))
  )


def begin(params: Any, optimiser: Callable[[str], Any], critics: Mapping[str, Any], reference: bool, seed: int) -> dict:
  """Everything that is learnt, begun: from the policy's `params`, with critics of their own. optimiser(key): of one set of
  parameters; critics: models.base.Critic by key; reference: whether a copy of the policy stays behind as one."""
  key = jax.random.key(seed + 1)
  states = {"policy": TrainState.create(params, optimiser("policy"))}
  for i, (name, critic) in enumerate(critics.items()):
    states[name] = TrainState.create(critic.init(jax.random.fold_in(key, i), params), optimiser(name))
  kept = (["reference"] if reference else []) + (["copied"] if any(c.reads == "steps" for c in critics.values()) else [])
  return {"states": states, "frozen": {name: jax.tree.map(jnp.copy, params) for name in kept}}


def compiled(make: Callable, given: Any, mesh: Mesh, offload: bool = False, **how) -> Callable:
  """jax.jit(make), whose result (a learner) lies as core/mesh.py says. given: what it will be called with, or its shapes; how: for jit."""
  if mesh.size > 1 or offload:
    how["out_shardings"] = mesh_lib.shardings(jax.eval_shape(make, given), mesh, offload)
  else:  # bound to the device, as a checkpoint's weights are: what is not would be after its first update, which were compiled again
    how["out_shardings"] = SingleDeviceSharding(mesh.devices.flat[0])
  return jax.jit(make, **how)


def frozen(learner: dict, critics: Mapping[str, Any], key: str, base: Any = None) -> Any:
  """The parameters that the model of this key reads without moving them. base: the policy's, where adapters to it are learnt."""
  if key == "policy":
    return base
  return learner["frozen"]["copied"] if critics[key].reads == "steps" else learner["states"]["policy"].params


def asked(
  needs: Collection[str], learner: dict, critics: Mapping[str, Any], scores: Mapping[str, Callable], base: Any = None,
  mesh: Mesh | None = None,
) -> dict[str, Callable]:  # fmt: skip
  """What an algorithm needs to know of every episode before it gives credit, as functions of a batch. scores: of each key; base: see
  `frozen`; mesh: where all of it is, of which every process brings and takes its own rows."""
  states = learner["states"]

  def ask(key, params, name):
    score = lambda batch: getattr(scores[key](params, frozen(learner, critics, key, base), batch), name)
    return score if mesh is None else lambda batch: rows.mine([score(part) for part in rows.put(batch, mesh)], mesh)

  policies = {"old_logp": states["policy"].params, "ref_logp": learner["frozen"].get("reference")}
  offers = {need: ("policy", params, "logp") for need, params in policies.items()}
  heads = {"value_logit": "critic", "step_value": "critic", "task_value": "instruction"}
  offers |= {need: (key, states[key].params, "value_logit") for need, key in heads.items() if key in states}
  return {need: ask(*offers[need]) for need in needs}
