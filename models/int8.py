"""Weight-only int8 for sampling: every linear map of the decoder's layers as int8 with one float32 scale an output, rounded to nearest.

Symmetric, absolute maximum a row (Dettmers et al. 2022, arXiv 2208.07339, without its outliers; lesson chapter 4). A quarter of the bytes
a token reads; embeddings, norms, biases, the head and the vision tower stay as they are. The sampler then is another policy than the
learner's by what rounding moves: `policy/mismatch_kl` shows it, and log-probabilities are those of the rounded weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def lighter(params: dict) -> dict:
  """Parameters (stacked or not) whose layers' weights [.., out, in] became {"int8": i8 [.., out, in], "scale": f32 [.., out]}."""
  if "layers" not in params.get("model", {}):  # adapters to the vision tower alone
    return params
  return params | {"model": params["model"] | {"layers": _walk(params["model"]["layers"])}}


def _walk(node):
  if isinstance(node, tuple):
    return tuple(map(_walk, node))
  if not isinstance(node, dict):
    return node
  if "weight" in node:
    rest = {k: v for k, v in node.items() if k != "weight"}
    return rest | rounded(node["weight"])
  return {k: v if k.endswith("norm") else _walk(v) for k, v in node.items()}  # stacked norms have two dimensions as well


def rounded(weight: jax.Array) -> dict:
  """One linear map's weight [.., out, in] as {"int8": i8 [.., out, in], "scale": f32 [.., out]}."""
  scale = jnp.max(jnp.abs(weight.astype(jnp.float32)), axis=-1) / 127
  scale = jnp.where(scale > 0, scale, 1.0)
  return {"int8": jnp.round(weight.astype(jnp.float32) / scale[..., None]).astype(jnp.int8), "scale": scale}
