"""Where an environment says which part of a step it is in, so that each part has its own deadline.

A real computer's environment calls `enter("act")`, then `enter("settle")`, `enter("observe")` and `enter("evaluate")` as its step
goes on. In a worker the trainer hears of it; elsewhere nothing happens. An environment that never calls it has one deadline for
the whole step: the sum of the four.
"""

from __future__ import annotations

from collections.abc import Callable

PHASES = ("act", "settle", "observe", "evaluate")
_listeners: list[Callable[[str], None]] = []


def enter(name: str) -> None:
  """The step goes on to this part."""
  if name not in PHASES:
    raise ValueError(f"phase {name!r}: wanted one of {', '.join(PHASES)}")
  for listener in _listeners:
    listener(name)


def listen(listener: Callable[[str], None]) -> None:
  """Calls listener(name) at every `enter` from now on. For workers."""
  _listeners.append(listener)
