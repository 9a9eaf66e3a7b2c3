"""A run's policy as a Hugging Face folder, and several checkpoints merged into one.

  python -m tools.export --workdir=runs/osworld --out=exported [--base=UI-TARS-1.5-7B] [--step=400]
  python -m tools.export --merge phone=0.5 desktop=0.3 web=0.2 --out=merged

The first writes the newest policy (or that of --step) over a copy of the checkpoint it began from: same files, names and dtypes, adapters
merged. The second is the weighted sum of checkpoints that share one shape and one ancestor, as UI-TARS-2 joins its specialists.
"""

from __future__ import annotations

import argparse
import pathlib

import jax.numpy as jnp
import ml_collections

import policies
from core import config as config_lib
from core.checkpoint import Checkpointer, Misfit
from core.host import out_of_memory
from models import decoder, hf, lora
from models.checkpoint import leaves


def export_run(workdir: str, out: str, base: str = "", step: int | None = None) -> str:
  """Writes a run's policy to `out`; returns one line that says what was written. base: "" = the checkpoint the run began from."""
  knobs = ml_collections.ConfigDict({"checkpoint": "", "lora": lora.defaults()})
  said = config_lib.read_config(workdir)["policy"]
  try:
    knobs.update({name: said[name] for name in knobs if name in said})
  except (TypeError, AttributeError) as e:
    raise ValueError(f"the config.json of {workdir} has a policy.checkpoint or policy.lora of another type than they can have: {e}") from e
  began, base, knobs = "" if base else knobs.checkpoint, base or knobs.checkpoint, knobs.lora
  if not base:
    raise ValueError(f"{workdir} began from no checkpoint (the embedded policy); --base=FOLDER names one whose shape it has")
  tree = leaves(base)
  trained = lora.leaves(tree, knobs) if knobs.rank else tree
  with Checkpointer(pathlib.Path(workdir) / "checkpoints") as checkpoints:
    target = {"states": {"policy": {"params": decoder.abstract(trained, jnp.float32)}}}
    try:
      restored, host, step = checkpoints.restore(target, step, partial=True, cast=True, whole="states/policy/params")
    except Misfit as e:
      hint = "give --base=FOLDER, the checkpoint it began from"
      raise ValueError(f"{base} has not the shape of the policy in {workdir} ({e}): {hint}") from e
  policies.same_base(host["facts"], began, workdir)
  params = restored["states"]["policy"]["params"]
  hf.export(lora.merge(hf.load(base, tree, dtype=jnp.float32), params, knobs) if knobs.rank else params, base, out)
  return f"{out}: policy version {host['facts']['version']} of {workdir} (checkpoint {step}), files as in {base}"


def merge(pairs: list[str], out: str) -> str:
  """pairs: FOLDER=WEIGHT."""
  folders, weights = [], []
  for pair in pairs:
    folder, _, weight = pair.rpartition("=")
    try:
      weights.append(float(weight))
    except ValueError as e:
      raise ValueError(f"--merge got {pair!r}, wanted FOLDER=WEIGHT") from e
    folders.append(folder)
  hf.merge(folders, weights, out)
  return f"{out}: {' + '.join(f'{w:g} x {f}' for f, w in zip(folders, weights))}"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument("--workdir", help="a run")
  source.add_argument("--merge", nargs="+", metavar="FOLDER=WEIGHT", help="checkpoints to merge; weights add up to 1")
  parser.add_argument("--out", required=True, help="the folder to write; it must not exist")
  parser.add_argument("--base", default="", help="the checkpoint the run began from, where config.json does not say")
  parser.add_argument("--step", type=int, help="the saved step; the newest otherwise")
  args = parser.parse_args()
  try:
    if args.merge and (args.base or args.step is not None):
      raise ValueError("--base and --step say what --workdir is exported with: leave them out with --merge")
    hf.unwritten(args.out)  # before anything is read
    said = merge(args.merge, args.out) if args.merge else export_run(args.workdir, args.out, args.base, args.step)
  except (ValueError, OSError) as e:
    parser.exit(2, f"{' '.join(str(e).split())}\n")
  except (RuntimeError, MemoryError) as e:
    if not (line := out_of_memory(e)):
      raise
    parser.exit(1, f"{line}\n")
  print(said)


if __name__ == "__main__":
  main()
