"""Copies of a pytree's leaves under their names, and their way to disk while the run goes on.

Nothing here meets other processes, so that it may go on in a thread: a collective beside those of the train step would come in another
order in every process. core/checkpoint.py says when all have come so far.
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable, Coroutine
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath  # the paths orbax's handlers take, which it brings along

from core.mesh import names


def named(tree: Any) -> list[tuple[str, Any]]:
  """Leaves with names such as "opt_state/0/mu/head/w": the same for a dict, a dataclass and a namedtuple."""
  return [(name or "value", x) for name, x in names(tree)]


def is_key(x: Any) -> bool:
  return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def copied(tree: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """Leaves by name for `begin`, and their entries for the manifest. What lies on devices of several processes lies there until `begin` has
  returned; of all else these are copies."""
  leaves, entries = {}, {}
  for name, x in named(tree):
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
      raise ValueError(f"checkpoint leaf {name} is a {type(x).__name__}, wanted an array; plain values belong in the host state")
    if name in entries:
      raise ValueError(f"two checkpoint leaves are called {name}; rename one")
    entry = {"name": name, "shape": list(x.shape), "dtype": str(x.dtype)}
    if is_key(x):
      entry["key"] = str(jax.random.key_impl(x))
      x = jax.random.key_data(x)
    elif x.dtype.hasobject:
      raise ValueError(f"checkpoint leaf {name} is an array of Python objects, wanted numbers")
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
      x = np.array(x, copy=True)  # a copy even on CPU, where numpy would otherwise look into the donated buffer
    entries[name] = entry | {"stored_shape": list(x.shape), "stored_dtype": str(x.dtype)}
    leaves[name] = x
  return {n: x for n, x in leaves.items() if x.size}, list(entries.values())  # orbax refuses empty arrays; none is needed


def make(folder: pathlib.Path, leaves: dict[str, Any]) -> None:
  """By one process, before any begins: the folder. With the one inside it for which orbax would have the others wait, ten minutes where
  the first one fails."""
  (folder / "array_metadatas" if _on_devices(leaves) else folder).mkdir(parents=True)


def begin(folder: pathlib.Path, leaves: dict[str, Any]) -> Callable[[float | None], None]:
  """Orbax takes this process's part. When this returns numpy has it all in the host's memory, so that the next update may donate the
  buffers (what numpy only looks into, on CPU, jax copies instead of donating). What it returns blocks until the part is on disk, for so
  many seconds at most."""
  if not leaves:
    return lambda seconds: None
  handler, args = ocp.PyTreeCheckpointHandler(), ocp.args.PyTreeSave(leaves)
  start = lambda: _run(handler.async_save(epath.Path(folder), args=args)) or []
  if not _on_devices(leaves):  # copies already: all that is left may be done in the background
    return lambda seconds: _wait(start(), seconds)
  begun = start()
  return lambda seconds: _wait(begun, seconds)


def _wait(futures: list, seconds: float | None) -> None:
  for future in futures:
    future.result(timeout=seconds)


def _on_devices(leaves: dict[str, Any]) -> bool:
  return any(isinstance(x, jax.Array) for x in leaves.values())


def end(folder: pathlib.Path) -> None:
  """By one process, when all have written their part: makes one tree of the parts."""
  if any(folder.iterdir()):
    ocp.PyTreeCheckpointHandler().finalize(epath.Path(folder))


def _run(coroutine: Coroutine) -> Any:
  """As asyncio.run, which looks at the tasks of all threads when it ends: orbax's may be running."""
  loop = asyncio.new_event_loop()
  try:
    return loop.run_until_complete(coroutine)
  finally:
    loop.close()
