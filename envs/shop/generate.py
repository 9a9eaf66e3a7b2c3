"""New tasks for the shop, from failed ones. See envs/variations.py."""

from __future__ import annotations

import ml_collections

from core.schema import Limits, Task
from envs import shop
from envs.shop.store import SHOWN, Store
from envs.variations import Space


def space(cfg: ml_collections.ConfigDict) -> Space:
  """What cfg.families ask for, without what is held out."""
  make = lambda family, params, seed: shop.task_of(cfg.computer, params, seed, Limits(cfg.steps))
  held, rest = ([(p["family"], p) for family in cfg.families for p in shop.split(family)[part]] for part in (0, 1))
  return Space(cfg.computer, held, rest, make, feasible)


def feasible(task: Task) -> bool:
  """Whether the shop of the task's seed sells what it is about, on the first page of results."""
  store = Store()
  try:
    store.begin(task.seed, 0.0, 0, ())
    p = task.params
    rows = store.results(f"{p.get('make', '')} {p['color']} {p['noun']}")[:SHOWN]
    return len(rows) > p.get("place", 0) and (p["family"] == "open" or shop.target(store, p) in {row[0] for row in rows})
  finally:
    store.served.close()
