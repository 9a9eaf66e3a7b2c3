"""Memory, work and time of a train step and of decoding, by arithmetic: what a compiler's answer is set beside, and all there is for GPUs.

Parameters and optimiser state are exact: every leaf split by the rules of core/mesh.py. The rest is counted from the model's sizes. One
row of `tokens` tokens with its screenshots stands in each part of the mesh that has rows of its own (data x fsdp). Numbers are of one
device unless said otherwise. MFU = model FLOPs without recomputation (causal attention at half) / (peak x step time); step time = the
largest of compute (with recomputation, and the busiest device's share of attention), HBM and interconnect time, plus the collectives
that nothing hides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from core import mesh as mesh_lib
from models.decoder import is_leaf
from models.images import image_grid
from tools.planning.chips import GIB, Topology
from tools.planning.shapes import Shape

SPARE = 0.05  # of HBM, that a plan wants free
HELD = {"none": 16.0, "dots": 10.0, "attention": 2.0, "full": 1.0, "offload": 0.0}  # layer inputs' worth that a remat policy keeps
AGAIN = {"none": 0, "dots": 0}  # forward passes more; 1 of the other policies
QUERY_BLOCK = 512  # of the attention kernel: how often it reads all keys


class Work(NamedTuple):
  """One row: tokens, screenshots of `screen` (W, H), action tokens that are scored."""

  tokens: int
  images: int
  screen: tuple[int, int]
  actions: int


class How(NamedTuple):
  """What of a config bears on a step. dtype: of the parameters; remat: of layers; frozen: the tower is not trained; offload: the
  optimiser's state lies in the host's memory; remat_tower: of the tower's blocks, "" = as layers."""

  dtype: str
  remat: str
  frozen: bool
  optimiser: Any
  offload: bool = False
  remat_tower: str = ""

  @property
  def tower(self) -> str:
    return self.remat_tower or self.remat


@dataclasses.dataclass
class Plan:
  """What a step needs. memory: bytes by kind; flops: by kind, of all devices; seconds: compute, hbm, interconnect, exposed;
  collectives: {kind: (how many, bytes sent)}; source: "analytic", "compiled" or "refused"; notes: lines for the reader."""

  topology: Topology
  mesh: dict[str, int]
  memory: dict[str, float]
  flops: dict[str, float]
  hbm_bytes: float
  seconds: dict[str, float]
  collectives: dict[str, tuple[int, float]]
  rows: int
  source: str = "analytic"
  notes: list[str] = dataclasses.field(default_factory=list)

  @property
  def total(self) -> float:
    return sum(self.memory.values())

  @property
  def spare(self) -> float:
    return 1 - self.total / self.topology.chip.hbm

  @property
  def fits(self) -> bool:
    """With SPARE free; what a compiler refuses does not, whatever arithmetic says."""
    return self.source != "refused" and self.spare >= SPARE

  @property
  def bound(self) -> str:
    return max(("compute", "hbm", "interconnect"), key=self.seconds.__getitem__)

  @property
  def step(self) -> float:
    return self.seconds[self.bound] + self.seconds["exposed"]

  @property
  def mfu(self) -> float:
    return self.flops["model"] / (self.topology.count * self.topology.chip.peak * self.step)

  @property
  def episodes_per_hour(self) -> float:
    return 3600 * self.rows / self.step


# ---- sizes


def patches(shape: Shape, work: Work) -> int:
  """Of one screenshot."""
  return math.prod(image_grid(work.screen, shape.vl.images)) if shape.vl and work.images else 0


def held_images(work: Work, mesh: Mapping[str, int]) -> int:
  """Screenshots of a row, padded so that they split over the devices of its part."""
  part = mesh["context"] * mesh["tensor"]
  return -(-work.images // part) * part


def forward_flops(shape: Shape, work: Work) -> dict[str, float]:
  """Of one row, forward, causal attention at half, by part."""
  t, linears = shape.text, 0
  for leaf in jax.tree.leaves(shape.leaves["model"]["layers"], is_leaf=is_leaf):
    linears += math.prod(leaf.shape) if len(leaf.shape) == 3 else 0
  out = {
    "linear": 2.0 * linears * work.tokens,
    "attention": 2.0 * t.layers * t.heads * t.head_dim * work.tokens**2,
    "head": 2.0 * t.vocab * t.width * min(work.actions, work.tokens),
    "tower": 0.0,
  }
  if n := patches(shape, work):
    v, count, visual = shape.vl.vision, work.images * n, shape.leaves["visual"]
    size = lambda tree, dims: sum(math.prod(x.shape) for x in jax.tree.leaves(tree, is_leaf=is_leaf) if len(x.shape) == dims)
    merged = sum(size(visual[k], 2) + size(visual[k], 3) for k in visual if "merger" in k)
    per_patch = size(visual["blocks"], 3) + merged / v.group + math.prod(visual["patch_embed"]["proj"]["weight"].shape) / v.frames
    whole = len(v.full) if v.window else v.depth
    seen = 4.0 * v.width * (n * whole + v.window**2 * (v.depth - whole))  # scores and mixing, a patch
    out["tower"] = count * (2.0 * per_patch + seen)
  return out


def step_flops(shape: Shape, work: Work, how: How, mesh: Mapping[str, int]) -> tuple[float, float]:
  """(model FLOPs of a row, what its busiest device computes times the devices of the row): forward 1, backward 2, recomputed layers 1
  more; the attention kernel computes scores twice in its backward pass (7 products for 4)."""
  f = forward_flops(shape, work)
  again = AGAIN.get(how.remat, 1)
  model = 3 * (f["linear"] + f["attention"] + f["head"]) + (1 if how.frozen else 3) * f["tower"]
  c = mesh["context"]
  busiest = 1.0 if c % 2 == 0 else (2 * c - 1) / c  # an even number of devices deals early and late queries to each
  mixing = f["attention"] * (1 + (how.remat not in ("none", "attention")) + 3.5) * busiest
  images = held_images(work, mesh) / work.images if work.images else 1.0
  tower = f["tower"] * (1 if how.frozen else 3 + AGAIN.get(how.tower, 1)) * images
  return model, (3 + again) * f["linear"] + mixing + 4 * f["head"] + tower


def split_bytes(tree: Any, mesh: Mapping[str, int]) -> float:
  """Bytes of a tree of shapes on one device."""
  shapes = SimpleNamespace(shape=dict(mesh))
  total = 0.0
  for name, leaf in mesh_lib.names(tree):
    spec = mesh_lib.spec(name, leaf.shape, shapes)
    parts = math.prod(mesh[axis] for axes in spec for axis in ((axes,) if isinstance(axes, str) else axes or ()))
    total += math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize / parts
  return total


def memory(shape: Shape, work: Work, how: How, mesh: Mapping[str, int], state: Any) -> dict[str, float]:
  """Bytes on one device by kind, at the fullest moment: the backward pass, with every layer's input kept."""
  t, size, itemsize = shape.text, work.tokens / mesh["context"], jnp.dtype(how.dtype).itemsize
  gradients = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, jnp.float32)), state.params)
  one_layer = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(state.params["model"]["layers"])) * itemsize / mesh["tensor"]
  table = t.vocab * t.width / mesh["tensor"]
  out = {
    "parameters": split_bytes(state.params, mesh),
    "optimiser": 0.0 if how.offload else split_bytes(state.opt_state, mesh),
    "gradients": split_bytes(gradients, mesh),
    "gathered": 2 * one_layer + 4 * one_layer / itemsize + table * (itemsize + 4),
    "layers' inputs": HELD[how.remat] * t.layers * size * t.width * itemsize,
    "a layer": size * itemsize * (3.0 * t.mlp + 6.0 * t.heads * t.head_dim) / mesh["tensor"] + 6 * size * t.width * itemsize,
    "keys, values": 6.0 * work.tokens * t.kv_heads * t.head_dim / mesh["tensor"] * itemsize,
    "head": 12.0 * 1024 * t.vocab / mesh["tensor"],
    "batch": 13 * 4.0 * size,
  }
  if n := patches(shape, work):
    v, mine = shape.vl.vision, held_images(work, mesh) / (mesh["context"] * mesh["tensor"])
    out["tower's inputs"] = (0 if how.frozen else HELD[how.tower] * v.depth) * mine * n * v.width * itemsize
    out["images"] = mine * n * (3 * v.patch**2 + 2 * t.width * itemsize / v.group) + work.images * n / v.group * t.width * itemsize
  return out


# ---- time


def bytes_moved(shape: Shape, work: Work, how: How, mesh: Mapping[str, int], mem: Mapping[str, float]) -> float:
  """HBM bytes of a step on one device: gathered weights written and read in each pass, optimiser state, activations in and out of every
  product, keys and values that each block of queries reads."""
  t, size, itemsize = shape.text, work.tokens / mesh["context"], jnp.dtype(how.dtype).itemsize
  passes = 3 if how.remat in ("none", "dots") else 4
  gathered = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shape.leaves, is_leaf=is_leaf)) * itemsize / mesh["tensor"]
  per_token = itemsize * (12.0 * t.width + (4.0 * t.mlp + 4.0 * t.heads * t.head_dim) / mesh["tensor"])
  keys = t.heads / mesh["tensor"] * (size / QUERY_BLOCK) * (work.tokens / 2) * t.head_dim * 2 * itemsize
  moved = 2 * passes * gathered + 2 * (mem["parameters"] + mem["optimiser"]) + 3 * mem["gradients"]
  moved += t.layers * (passes * size * per_token + 5 * keys)
  if n := patches(shape, work):
    v, mine = shape.vl.vision, held_images(work, mesh) / (mesh["context"] * mesh["tensor"])
    moved += (1 if how.frozen else passes) * v.depth * mine * n * itemsize * (14.0 * v.width + 4.0 * v.hidden)
  return moved


def collectives(shape: Shape, work: Work, how: How, mesh: Mapping[str, int], topology: Topology) -> dict[str, tuple[int, float, int]]:
  """{kind: (how many, bytes that a device sends, devices that take part)}."""
  t, itemsize = shape.text, jnp.dtype(how.dtype).itemsize
  group, out = mesh["fsdp"] * mesh["context"], {}
  weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shape.leaves, is_leaf=is_leaf)) / mesh["tensor"]
  passes = 2 if how.remat in ("none", "dots") else 3
  if group > 1:
    out["all-gather (weights)"] = (passes * t.layers, passes * weights * itemsize * (group - 1) / group, group)
    out["reduce-scatter (gradients)"] = (t.layers, weights * 4 * (group - 1) / group, group)
  if mesh["data"] > 1:
    out["all-reduce (gradients)"] = (t.layers, 2 * 4 * weights / group * (mesh["data"] - 1) / mesh["data"], mesh["data"])
  if (c := mesh["context"]) > 1:
    kv = 2.0 * work.tokens * t.kv_heads * t.head_dim / mesh["tensor"] * itemsize * (c - 1) / c
    out["all-gather (keys, values)"] = (2 * t.layers, 2 * t.layers * kv, c)
    out["reduce-scatter (keys, values)"] = (t.layers, t.layers * kv, c)
  if (p := mesh["tensor"]) > 1:
    passed = 2.0 * work.tokens / mesh["context"] * t.width * itemsize * (p - 1) / p
    out["all-reduce (activations)"] = (6 * t.layers, 6 * t.layers * passed, p)
  return out


def estimate(shape: Shape, work: Work, how: How, mesh: Mapping[str, int], topology: Topology, state: Any) -> Plan:
  """state: the train state's shapes."""
  rows, chip, mem = mesh["data"] * mesh["fsdp"], topology.chip, memory(shape, work, how, mesh, state)
  model, computed = step_flops(shape, work, how, mesh)
  moved, sent = bytes_moved(shape, work, how, mesh, mem), collectives(shape, work, how, mesh, topology)
  share = mesh["context"] * mesh["tensor"]
  seconds = {
    "compute": computed / share / chip.peak, "hbm": moved / chip.bandwidth,
    "interconnect": sum(size / topology.bandwidth(group) for _, size, group in sent.values()),
    # what a layer cannot begin without: the first gather, and what stands between a layer's own products
    "exposed": sum(size / topology.bandwidth(group) * (1 if "activations" in kind or "keys" in kind else 1 / shape.text.layers)
                   for kind, (_, size, group) in sent.items()),
  }  # fmt: skip
  flops = {"model": model * rows, "computed": computed * rows}
  kinds = {kind: (count, size) for kind, (count, size, _) in sent.items()}
  plan = Plan(topology, dict(mesh), mem, flops, moved, seconds, kinds, rows)
  plan.notes += advice(plan, shape, how, work)
  return plan


def advice(plan: Plan, shape: Shape, how: How, work: Work) -> list[str]:
  """What to change where it does not fit, the largest gain first."""
  if plan.spare >= SPARE:
    return []
  m, lacking, out = plan.memory, plan.total - (1 - SPARE) * plan.topology.chip.hbm, []
  held = m["layers' inputs"] + m.get("tower's inputs", 0.0) + m["a layer"]
  bigger = plan.mesh["context"] * 2
  if bigger <= plan.mesh["fsdp"] * plan.mesh["context"] and work.tokens % (128 * bigger) == 0:
    out.append((held / 2, f"--config.mesh.context={bigger} halves what a device holds of a row ({held / 2 / GIB:.1f} GiB less)"))
  if how.remat not in ("full", "offload"):
    out.append((m["layers' inputs"] * 0.8, "--config.policy.remat=full keeps a layer's input only"))
  if m.get("tower's inputs") and not how.frozen:
    gain = m["tower's inputs"]
    out.append((gain, f"--config.policy.freeze_tower=True keeps nothing of the tower ({gain / GIB:.1f} GiB less)"))
    if how.tower != "offload":
      out.append((gain, f"--config.policy.remat_tower=offload keeps it in the host's memory ({gain / GIB:.1f} GiB less)"))
  if not how.offload:
    out.append((m["optimiser"], f"--config.mesh.offload=True: the optimiser's state on the host ({m['optimiser'] / GIB:.1f} GiB less)"))
  if how.dtype == "float32":
    out.append((m["parameters"] + m["optimiser"] / 2, "--config.policy.dtype=bfloat16 halves parameters and activations"))
  state = m["parameters"] + m["optimiser"] + m["gradients"]
  out.append((state / 2, f"twice the chips halve parameters, optimiser state and gradients ({state / 2 / GIB:.1f} GiB less)"))
  lines = [text for _, text in sorted(out, key=lambda pair: -pair[0])]
  return [f"{lacking / GIB:.1f} GiB too much for {SPARE:.0%} to spare; in order of gain:", *lines]


def decode(shape: Shape, how: How, topology: Topology, sessions: int, filled: int, int8: bool = False) -> dict[str, float]:
  """One token for each of `sessions` with `filled` places in their caches, on one device: bytes held and read, and seconds. int8: of the
  weights. The tower and the embedding table are held and not read."""
  t, itemsize = shape.text, jnp.dtype(how.dtype).itemsize
  count = lambda tree: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree, is_leaf=is_leaf))
  size = 1 if int8 else itemsize
  idle = count(shape.leaves.get("visual", {})) + (0 if t.tied else t.vocab * t.width)
  cache = 2.0 * t.layers * t.kv_heads * t.head_dim * itemsize * filled * sessions
  read = (count(shape.leaves) - idle) * size + cache
  return {"weights": count(shape.leaves) * size, "cache": cache, "read": read, "seconds": read / topology.chip.bandwidth}
