"""LoRA (Hu et al. 2021, arXiv 2106.09685): y = W x + alpha / rank * B A x, with W frozen and B zero at the start.

Adapters are a tree of their own beside the base: they alone are differentiated, optimised, published and checkpointed. `combine` puts
them where layers.linear finds them; `merge` adds them into the weights for an export.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_collections

from models.config import told
from models.decoder import Leaf

TABLES = ("embed_tokens", "pos_embed")  # looked up, never multiplied
SECONDS = 5.0  # that a search of policy.lora.targets may take: some expressions would need years
SEARCH = """
import json, re, sys
pattern, names = json.load(sys.stdin)
try:
  wanted = re.compile(pattern)
except (re.error, RecursionError, OverflowError) as e:
  print(json.dumps(str(e) or type(e).__name__))
else:
  print(json.dumps([name for name in names if wanted.search(name)]))
"""


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "rank": 0,  # 0 = no adapters, all parameters are trained
      "alpha": 32.0,
      "targets": r"(self_attn|mlp)\.\w+_proj",  # searched for in the dotted names of linear maps, e.g. model.layers.self_attn.q_proj
    }
  )


def leaves(tree: dict, cfg: ml_collections.ConfigDict) -> dict:
  """The adapters of a tree of Leaf: lora_a [.., rank, in] and lora_b [.., out, rank] for every linear map whose name fits cfg.targets.

  decoder.init_leaves and abstract take it as they take the base. ValueError where nothing fits, or a map is smaller than the rank.
  """
  if cfg.rank < 1:
    raise ValueError(f"policy.lora.rank is {cfg.rank}, wanted 1 or more (0 means: call nothing of this file)")
  maps = _linear_maps(tree)
  found = _search(cfg.targets, tuple(".".join(path) for path in maps))
  out: dict = {}
  for path, weight in maps.items():
    if ".".join(path) in found:
      front, (rows, cols) = weight.shape[:-2], weight.shape[-2:]
      axes, (row_axis, col_axis) = weight.axes[:-2], weight.axes[-2:]
      if cfg.rank > min(rows, cols):
        raise ValueError(f"policy.lora.rank is {cfg.rank}, wanted at most {min(rows, cols)}: {'.'.join(path)} is {rows} x {cols}")
      node = out
      for key in path:
        node = node.setdefault(key, {})
      node["lora_a"] = Leaf((*front, cfg.rank, cols), (*axes, None, col_axis), cols**-0.5)
      node["lora_b"] = Leaf((*front, rows, cfg.rank), (*axes, row_axis, None), 0.0)
  if not out:
    raise ValueError(f"policy.lora.targets {told(cfg.targets)} fits none of the linear maps: {', '.join('.'.join(p) for p in maps)}")
  return out


@functools.cache
def _search(pattern: str, names: tuple[str, ...]) -> frozenset[str]:
  """The names in which the expression is found. In a process of its own: nothing else ends a search that has begun."""
  asked, how = json.dumps([pattern, names]), {"capture_output": True, "text": True, "timeout": SECONDS, "check": True}
  try:
    said = subprocess.run([sys.executable, "-I", "-S", "-c", SEARCH], input=asked, **how).stdout
  except subprocess.TimeoutExpired as e:
    raise ValueError(
      f"policy.lora.targets is {told(pattern)}, and a search for it takes more than {SECONDS:g} s: wanted one with fewer repetitions"
    ) from e
  found = json.loads(said)
  if isinstance(found, str):
    raise ValueError(f"policy.lora.targets is {told(pattern)}, wanted a regular expression: {found}")
  return frozenset(found)


def _linear_maps(tree: dict, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Leaf]:
  weight = tree.get("weight")
  if isinstance(weight, Leaf):
    two_sided = len(weight.shape) - weight.stacked == 2
    return {path: weight} if two_sided and path[-1] not in TABLES else {}
  return {p: w for key, below in tree.items() if isinstance(below, dict) for p, w in _linear_maps(below, (*path, key)).items()}


def combine(base: dict, adapters: dict, cfg: ml_collections.ConfigDict) -> dict:
  """The base, without gradient, with the adapters in it: what forward functions take."""
  return _join(
    jax.lax.stop_gradient(base), adapters, lambda p, a: p | {"lora_a": a["lora_a"] * (cfg.alpha / cfg.rank), "lora_b": a["lora_b"]}
  )


def merge(base: dict, adapters: dict, cfg: ml_collections.ConfigDict) -> dict:
  """The base with the adapters added into its weights, in float32, cast back to each weight's dtype: what an export writes."""

  def add(p: dict, a: dict) -> dict:
    moved = jnp.einsum("...or,...ri->...oi", a["lora_b"], a["lora_a"], preferred_element_type=jnp.float32) * (cfg.alpha / cfg.rank)
    return p | {"weight": (p["weight"].astype(jnp.float32) + moved).astype(p["weight"].dtype)}

  return _join(base, adapters, add)


def _join(base: dict, adapters: dict, leaf) -> dict:
  """base with leaf(linear map, adapter) in place of every linear map that has an adapter."""
  if isinstance(base, tuple):  # layers unstacked, as the sampler has them
    return tuple(_join(b, a, leaf) for b, a in zip(base, adapters, strict=True))
  if "lora_a" in adapters:
    return leaf(base, adapters)
  return base | {key: _join(base[key], below, leaf) for key, below in adapters.items()}
