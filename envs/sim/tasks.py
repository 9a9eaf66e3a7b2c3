"""Task lists of the simulated computers: practised, held-out and demonstrated, disjoint by construction."""

from __future__ import annotations

import functools
import json

import numpy as np

from core.schema import Limits, Task
from envs.sim import desktop, phone

MODULES = {"sim/phone": phone, "sim/desktop": desktop}
STEP_LIMIT = {"sim/phone": 14, "sim/desktop": 16}
CHECK = {"sim/phone": "every_step", "sim/desktop": "end"}
HELD_OUT = 96


@functools.lru_cache(maxsize=4)
def _pools(computer: str) -> tuple[list[tuple[str, dict]], list[tuple[str, dict]]]:
  """(held-out combinations, the rest): every family gives its equal share of the 96 held-out ones. The same in every run."""
  if computer not in MODULES:
    raise ValueError(f"simulated computer {computer!r}: wanted one of {sorted(MODULES)}")
  families = MODULES[computer].families()
  share = HELD_OUT // len(families)
  held, rest = [], []
  for index, (family, combos) in enumerate(sorted(families.items())):
    order = np.random.default_rng([977, index]).permutation(len(combos))
    held += [(family, combos[i]) for i in order[:share]]
    rest += [(family, combos[i]) for i in order[share:]]
  return held, rest


def _task(computer: str, family: str, params: dict, seed: int) -> Task:
  """The seed fixes layout, luck and the goal's wording, so the id, which holds it, names one start state."""
  name = "-".join(str(v) if not isinstance(v, list) else "".join(map(str, v)) for v in params.values())
  return Task(
    id=f"{computer.split('/')[1]}-{family}-{name}-s{seed}", goal=MODULES[computer].goal(family, params, seed), env=computer,
    family=family, seed=seed, params=json.loads(json.dumps(params)), limits=Limits(STEP_LIMIT[computer]), check=CHECK[computer],
  )  # fmt: skip


def held_out_tasks(computer: str, count: int = HELD_OUT) -> list[Task]:
  """Tasks whose parameters are never practised nor demonstrated."""
  held, _ = _pools(computer)
  if not 1 <= count <= len(held):
    raise ValueError(f"held-out tasks: got {count}, wanted 1 to {len(held)}")
  order = np.random.default_rng(978).permutation(len(held))[:count]
  return [_task(computer, *held[i], seed=1_000_000 + int(i)) for i in order]


def practice_tasks(computer: str, count: int = 256) -> list[Task]:
  """A finite list of start states, visited again and again, families in turn."""
  return _draw(computer, count, seed=979, first=2_000_000)


def demonstration_tasks(computer: str, count: int, seed: int = 0) -> list[Task]:
  """Start states for scripted demonstrations: other seeds than practice, held-out parameters never among them."""
  return _draw(computer, count, seed=980 + seed, first=3_000_000 + 100_000 * seed)


def _draw(computer: str, count: int, seed: int, first: int) -> list[Task]:
  if count < 1:
    raise ValueError(f"number of tasks: got {count}, wanted 1 or more")
  _, rest = _pools(computer)
  rng = np.random.default_rng(seed)
  by_family: dict[str, list] = {}
  for family, params in rest:
    by_family.setdefault(family, []).append(params)
  names = sorted(by_family)
  out = []
  for i in range(count):
    combos = by_family[names[i % len(names)]]
    out.append(_task(computer, names[i % len(names)], combos[int(rng.integers(len(combos)))], seed=first + i))
  return out
