"""The check that every part makes of its knobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def require(part: str, cfg: Mapping[str, Any], wanted: Mapping[str, tuple[bool, str]]) -> None:
  """ValueError, one line, for the first knob of `part` that is not good. wanted: knob -> (whether it is good, what is wanted)."""
  for name, (good, want) in wanted.items():
    if not good:
      raise ValueError(f"{part}.{name} is {cfg[name]}, wanted {want}")
