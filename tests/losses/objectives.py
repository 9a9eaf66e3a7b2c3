"""Every objective the losses can express, on one batch: what the tests of invariances and of forced devices run over.

A batch is a dict of arrays. [N] tokens: new and value (these are learned: `theta`), old, mu, ref, version, push, label, return_,
old_value, mask, episode, step. [E] episodes: push_E, passed. [S] steps, two per episode: push_S. [P] pairs of episodes: chosen,
rejected.
"""

import jax
import jax.numpy as jnp
import numpy as np

from core.segments import segment_gather, segment_sum
from losses.correction import approximate_old_logp, geometric_reject, k3_reject, off_policy_mask, sequence_weight
from losses.kl import KINDS, kl_loss
from losses.policy import (
  advantage_weighted_loss,
  cispo_loss,
  clipped_loss,
  dppo_loss,
  dro_loss,
  gmpo_loss,
  imitation_loss,
  reference_match_code_loss,
  reference_match_loss,
  sapo_loss,
)
from losses.preference import dpo_loss, episode_logratio, kto_loss
from losses.ratios import band_weight, sequence_ratio, sequence_token_ratio, token_ratio, truncated_weight
from losses.reduce import constant_norm, episode_mean, episode_sum_mean, micro_batch_mean, token_mean
from losses.value import bounded_value, clipped_value_loss, critic_cross_entropy

GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}
EMPTY = 3  # an episode of every batch without a token


def batch(rows=4, row=12, seed=0):
  """`rows` packed rows of two episodes each, half-masked at random, as numpy."""
  rng = np.random.default_rng(seed)
  n, e = rows * row, 2 * rows
  episode = np.repeat(np.arange(e), row // 2)
  step = 2 * episode + np.tile(np.repeat([0, 1], row // 4), e)
  old = -rng.exponential(size=n)
  push_E, push_S = rng.normal(size=e) + 0.3, rng.normal(size=2 * e) + 0.3
  mask = rng.random(n) < 0.7
  mask[:: row // 2] = True
  mask[episode == EMPTY] = False
  normal = lambda size: size * rng.normal(size=n)
  return {
    "new": old + normal(0.3), "value": normal(1.0), "old": old, "mu": old + normal(0.1), "ref": old + normal(0.2),
    "version": rng.integers(0, 4, n), "push": push_E[episode], "label": rng.random(n), "return_": normal(1.0),
    "old_value": normal(1.0), "mask": mask, "episode": episode, "step": step, "push_E": push_E, "passed": push_E > 0,
    "push_S": push_S, "chosen": np.arange(0, e, 2), "rejected": np.arange(1, e, 2),
  }  # fmt: skip


def units(b, unit, size):
  """bool [U]: units with a token."""
  return segment_sum(jnp.asarray(b["mask"]) * 1.0, b[unit], size, b["mask"]) > 0


def clipped(b, old="old"):
  return clipped_loss(token_ratio(b["new"], b[old], b["mask"]), b["push"], dual_clip=3.0)[0]


def policy(b, mask, e, s):
  """Per-token and per-unit policy objectives: name -> a function that gives (x, mask of x)."""
  new, old, mu, ref, push = (b[k] for k in ("new", "old", "mu", "ref", "push"))
  ratio, spread = lambda: token_ratio(new, old, mask), lambda: sequence_token_ratio(new, old, mask, b["step"], s)
  some_E, some_S = lambda: units(b, "episode", e), lambda: units(b, "step", s)
  return {
    "clipped": lambda: (clipped(b), mask),
    "gspo": lambda: (clipped_loss(sequence_ratio(new, old, mask, b["episode"], e), b["push_E"], **GSPO)[0], some_E()),
    "gspo_token": lambda: (clipped_loss(spread(), segment_gather(b["push_S"], b["step"]), **GSPO)[0], mask),
    "cispo": lambda: (cispo_loss(new, ratio(), push, mask)[0], mask),
    "sapo": lambda: (sapo_loss(ratio(), push), mask),
    "gmpo": lambda: (gmpo_loss(new, old, b["push_E"], mask, b["episode"], e)[0], some_E()),
    "dppo_tv": lambda: (dppo_loss(new, old, push, mask)[0], mask),
    "dppo_kl": lambda: (dppo_loss(new, old, push, mask, divergence="kl")[0], mask),
    "advantage_weighted": lambda: (advantage_weighted_loss(new, push, mask, beta=0.5), mask),
    "imitation": lambda: (imitation_loss(new, mask, push > 0, clip=(1e-3, 0.99)), mask),
    "dro": lambda: (dro_loss(new, mu, push, mask, beta=0.5), mask),
    "match": lambda: (reference_match_loss(new, ref, b["push_S"], mask, b["step"], s, beta=0.5), some_S()),
    "match_code": lambda: (reference_match_code_loss(new, ref, b["push_S"], mask, b["step"], s), some_S()),
  }


def corrected(b, mask, e, s):
  """The decoupled objective with every kind of weight."""
  old, mu, ep = b["old"], b["mu"], b["episode"]
  at = lambda weight_E: segment_gather(weight_E, ep)
  near = lambda: approximate_old_logp(b["new"], mu, mask, b["version"], 3, 4)
  weights = {
    "truncated": lambda: truncated_weight(old, mu, mask, cap=1.1),
    "band": lambda: band_weight(old, mu, mask, low=0.9, high=1.1),
    "sequence": lambda: at(sequence_weight(old, mu, mask, ep, e, low=0.95, high=1.1)),
    "geometric": lambda: at(geometric_reject(old, mu, mask, ep, e, low=0.95, high=1.05)),
    "k3": lambda: at(k3_reject(old, mu, mask, ep, e, threshold=0.005)),
    "off_policy": lambda: at(off_policy_mask(b["new"], mu, b["push_E"], mask, ep, e, delta=0.05)),
  }
  out = {name: lambda weight=weight: (weight() * clipped(b), mask) for name, weight in weights.items()}
  return out | {"a3po": lambda: (clipped(b | {"near": near()}, "near"), mask)}


def other(b, mask, e):
  """KL, critic, preferences."""
  kl = {f"kl_{kind}": lambda kind=kind: (kl_loss(b["new"], b["ref"], beta=0.04, kind=kind), mask) for kind in KINDS}
  ratio_E = lambda: episode_logratio(b["new"], b["ref"], mask, b["episode"], e)
  return kl | {
    "cross_entropy": lambda: (critic_cross_entropy(b["value"], b["label"]), mask),
    "value": lambda: (clipped_value_loss(bounded_value(b["value"], -1.0, 1.0), b["old_value"], b["return_"]), mask),
    "dpo": lambda: (dpo_loss(*(ratio_E()[b[k]] for k in ("chosen", "rejected")), beta=0.5), np.ones(len(b["chosen"]))),
    "kto": lambda: (kto_loss(ratio_E(), b["passed"], 0.1, beta=0.5, weight_neg=1.2), units(b, "episode", e)),
  }


def objectives(b):
  """name -> a function without arguments that gives the objective's Total."""
  mask, e, s = b["mask"], len(b["push_E"]), len(b["push_S"])
  parts = policy(b, mask, e, s) | corrected(b, mask, e, s) | other(b, mask, e)
  return {name: lambda xm=xm: token_mean(*xm()) for name, xm in parts.items()} | {
    "episode_mean": lambda: episode_mean(clipped(b), mask, b["episode"], e),
    "episode_sum_mean": lambda: episode_sum_mean(clipped(b), mask, b["episode"], e),
    "constant_norm": lambda: constant_norm(clipped(b), mask, 6.0 * e),
    "micro_batch_mean": lambda: micro_batch_mean(clipped(b), mask),
  }


def totals_and_grads(theta, b, model=None):
  """({name: Total}, {name: gradient of its sum}). Sums, not means: micro-batches add both, then divide once.

  model(theta, b) gives {"new", "value"}; without one theta is those two. The model's own backward pass is run on all objectives'
  gradients at once, which compiles much faster than one pass each.
  """
  learned, pull = (theta, None) if model is None else jax.vjp(lambda theta: model(theta, b), theta)

  def one(learned, name):
    total = objectives(b | learned)[name]()
    return total.sum, total

  both = {name: jax.grad(one, has_aux=True)(learned, name) for name in objectives(b | learned)}
  totals, grads = ({name: pair[i] for name, pair in both.items()} for i in (1, 0))
  if pull is not None:
    pulled = jax.vmap(pull)(jax.tree.map(lambda *g: jnp.stack(g), *grads.values()))[0]
    grads = {name: jax.tree.map(lambda g, i=i: g[i], pulled) for i, name in enumerate(grads)}
  return totals, grads


def means(out, grads):
  """({name: loss}, {name: gradient of the loss})."""
  share = {name: 1.0 / jnp.maximum(t.count, 1.0) for name, t in out.items()}
  return {k: t.mean() for k, t in out.items()}, {k: jax.tree.map(lambda g, k=k: g * share[k], grads[k]) for k in grads}


def split(b, parts):
  """The batch cut into `parts` micro-batches of whole rows, ids counted from 0 in each."""
  pieces = {k: np.split(v, parts) for k, v in b.items()}
  base = {"episode": len(b["push_E"]) // parts, "step": len(b["push_S"]) // parts}
  base |= {"chosen": base["episode"], "rejected": base["episode"]}
  return [{k: v[i] - i * base[k] if k in base else v[i] for k, v in pieces.items()} for i in range(parts)]
