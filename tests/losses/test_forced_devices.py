"""Gradients of every objective on 1, 2, 4 and 8 devices and in 1, 2 and 5 micro-batches of 40 rows are one gradient.

Forced CPU devices need a fresh process: this file is also the script that the processes run. Float32 must agree to 1e-6 of a
leaf's largest gradient, float64 (jax_enable_x64) to 1e-12.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROWS, FEATURES, ACTIONS = 40, 5, 4
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
# Micro-batches and devices beside one of each, by process. Every case compiles anew: the second dtype runs the widest only.
CASES = {"float32": ((5,), (2, 8)), "float64": ((5,), (8,)), "the others": ((2,), (4,))}


def data(dtype):
  """40 rows, and a policy and critic linear in made-up features: parameters of three shapes."""
  from objectives import batch

  rng = np.random.default_rng(3)
  b = batch(rows=ROWS)
  n = len(b["old"])
  theta = {"w": rng.normal(size=(FEATURES, ACTIONS)), "b": rng.normal(size=ACTIONS), "v": rng.normal(size=FEATURES)}
  b |= {"x": rng.normal(size=(n, FEATURES)), "action": rng.integers(0, ACTIONS, n)}
  logits = b["x"] @ theta["w"] + theta["b"]
  logp = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(n), b["action"]]
  for name, size in (("old", 0.3), ("mu", 0.3), ("ref", 0.2)):
    b[name] = logp + size * rng.normal(size=n)
  b["ref"] += 0.5  # a drift with a direction: sums of one that goes both ways cancel down to the last bits of log_softmax
  b = {k: v for k, v in b.items() if k not in ("new", "value")}
  cast = lambda v: v.astype(dtype) if v.dtype == np.float64 else v
  return {k: cast(v) for k, v in theta.items()}, {k: cast(v) for k, v in b.items()}


def model(theta, b):
  import jax

  logp = jax.nn.log_softmax(b["x"] @ theta["w"] + theta["b"])
  return {"new": jax.numpy.take_along_axis(logp, b["action"][:, None], 1)[:, 0], "value": b["x"] @ theta["v"]}


def means(parts):
  """({name: loss}, {name: {leaf: gradient}}): the parts' sums added, then divided once."""
  import jax

  totals, grads = jax.tree.map(lambda *x: sum(np.asarray(one) for one in x), *parts)
  return {k: t.sum / t.count for k, t in totals.items()}, {k: {n: g / totals[k].count for n, g in grads[k].items()} for k in grads}


def worst(a, b):
  """Largest difference over the largest number, for every loss and every leaf of every gradient."""
  import jax

  gaps = {}
  for (key, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    gaps[jax.tree_util.keystr(key)] = float(np.abs(x - y).max() / max(np.abs(x).max(), 1e-30))
  return gaps


def main(name):
  import functools

  import jax
  from jax.sharding import NamedSharding, PartitionSpec
  from objectives import split, totals_and_grads

  (cuts, meshes), dtype = CASES[name], name if name in TOLERANCE else "float32"
  jax.config.update("jax_enable_x64", dtype == "float64")
  jax.config.update("jax_disable_most_optimizations", True)
  run = jax.jit(functools.partial(totals_and_grads, model=model))
  theta, b = data(dtype)
  whole = means([run(theta, b)])
  assert all(x.dtype == dtype for x in jax.tree.leaves(whole[1]))
  out = {}
  for parts in cuts:
    out[f"{parts} micro-batches"] = worst(whole, means([run(theta, piece) for piece in split(b, parts)]))
  for devices in meshes:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
    spread = {k: jax.device_put(v, NamedSharding(mesh, PartitionSpec("data"))) for k, v in b.items()}
    copied = jax.device_put(theta, NamedSharding(mesh, PartitionSpec()))
    assert len(spread["x"].addressable_shards) == devices
    out[f"{devices} devices"] = worst(whole, means([run(copied, spread)]))
  print(json.dumps(out))


@pytest.mark.parametrize("name", [c if c == "float32" else pytest.param(c, marks=pytest.mark.long) for c in CASES])
def test_devices_and_micro_batches_leave_every_gradient(name):
  here = Path(__file__).parent
  env = os.environ | {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])]),
  }
  done = subprocess.run([sys.executable, __file__, name], env=env, capture_output=True, text=True, timeout=240)
  assert done.returncode == 0, done.stderr[-3000:]
  cases = json.loads(done.stdout.splitlines()[-1])
  assert len(cases) == sum(map(len, CASES[name]))
  for case, gaps in cases.items():
    assert len(gaps) > 100  # a loss and three leaves of every objective
    if "micro" in case:  # the one that is meant to depend on the cut: TRL's bnpo
      assert min(gaps.pop(key) for key in [k for k in gaps if "micro_batch_mean" in k and "'v'" not in k]) > 1e-6
    bad = {key: gap for key, gap in gaps.items() if not gap <= TOLERANCE.get(name, TOLERANCE["float32"])}
    assert not bad, f"{case}: {bad}"


if __name__ == "__main__":
  main(sys.argv[1])
