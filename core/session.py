"""The host side of a run between two saves: plain facts, random numbers and parts with a state, saved with the train state."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import numpy as np

from core import hosts
from core.checkpoint import Checkpointer


class Session:
  """Everything besides the train state that a resume needs.

  facts: plain values by name, what the loop writes down (phase, done, version ...). parts: objects with state() and
  restore(state). rng: the run's generator. host: index of this process, whose random numbers are its own. seconds: wall time
  of the run, earlier sessions included.
  """

  def __init__(self, workdir: pathlib.Path, seed: int, keep: int, facts: dict[str, Any], host: int = 0):
    self.host, self.seeds, self.facts = host, [seed, 0x405, host] if host else [seed], facts
    self.parts: dict[str, Any] = {}
    self._held: dict[str, Any] = {}  # states of parts that are not there yet
    self.rng = np.random.default_rng(self.seeds if host else seed)
    self.checkpoints = Checkpointer(workdir / "checkpoints", keep=keep)
    self._before, self._started = 0.0, time.monotonic()

  @property
  def seconds(self) -> float:
    return self._before + time.monotonic() - self._started

  def key(self, *numbers: int) -> np.ndarray:
    """uint32 [2]: a sampling key of its own for every (update, round, group, try), the same in a resumed run."""
    return np.random.SeedSequence([*self.seeds, *numbers]).generate_state(2, np.uint32)

  def attach(self, name: str, part: Any) -> None:
    """Adds a part that comes late; a state that was restored before it came is its own now."""
    self.parts[name] = part
    if name in self._held:
      part.restore(self._held.pop(name))

  def snapshot(self) -> dict[str, Any]:
    """What `restore` takes back, as it is now."""
    facts = {k: dict(v) if isinstance(v, dict) else v for k, v in self.facts.items()}
    parts = self._held | {name: part.state() for name, part in self.parts.items()}
    return {"facts": facts, "parts": parts, "rng": self.rng.bit_generator.state, "seconds": self.seconds, "host": self.host}

  def save(self, step: int, tree: Any, snapshot: dict[str, Any] | None = None, block: bool = True) -> None:
    """block=False: both are copied before this returns and written while the run goes on (Checkpointer.save)."""
    self.checkpoints.save(step, tree, snapshot or self.snapshot(), force=True, block=block)

  def restore(self, target: Any) -> Any | None:
    """The newest whole checkpoint's tree, with everything else put back; None where there is none. ValueError where there are
    checkpoints and none is whole."""
    folder, found = self.checkpoints.directory, hosts.everyone(self.checkpoints.latest())
    if len(set(found)) > 1:
      raise ValueError(f"{folder}: its newest checkpoint is {found} to the processes of this run, wanted one folder that all see")
    if found[0] is None:
      if any(p.name[0].isdigit() for p in self.checkpoints.directory.glob("*")):
        raise ValueError(f"{folder} holds checkpoints but none is whole: nothing was touched; --fresh starts anew beside it")
      return None
    tree, saved, step = self.checkpoints.restore(target)
    if len(set(read := hosts.everyone(step))) > 1:
      raise ValueError(f"{folder}: the processes of this run could read checkpoints {read}, wanted the same: remove the damaged one")
    if lacking := sorted(self.parts.keys() - saved.get("parts", {}).keys()):
      raise ValueError(f"the checkpoint in {folder} holds no {', '.join(lacking)}: another version wrote it; --fresh starts anew beside it")
    self._held = {name: state for name, state in saved["parts"].items() if name not in self.parts}
    for name, part in self.parts.items():
      part.restore(saved["parts"][name])
    if saved.get("host", self.host) == self.host:
      self.rng.bit_generator.state = saved["rng"]
    else:  # of fewer processes than there are now: two that drew the same would be one
      self.rng.bit_generator.state = np.random.default_rng([*self.seeds, step]).bit_generator.state
    self.facts, self._before = saved["facts"], saved["seconds"]
    return tree
