"""What can break under an episode. An InfraError is never a score: the try leaves its group and is run again."""

from __future__ import annotations


class InfraError(Exception):
  """The computer or the grader broke. The class name is the cause that is counted and logged."""


class ResetFailed(InfraError):
  """The environment could not show the task's start screen."""


class CheckerFailed(InfraError):
  """The checker crashed, timed out or returned something that is not a verdict."""


class WorkerFault(InfraError):
  """A worker raised what no environment should raise, or spoke what no worker says. It is ended and started anew."""


class WorkerDied(InfraError):
  """A worker's process ended by itself or was killed from outside."""


class ActionAmbiguous(InfraError):
  """A worker was lost after an action was sent: whether it was carried out is not known, and it is never sent again."""


class Deadline(InfraError):
  """A worker said nothing for too long. The class name says in which part of its work."""


class BootDeadline(Deadline):
  """The environment was not built in time."""


class ResetDeadline(Deadline):
  """The start screen did not come in time."""


class ActDeadline(Deadline, ActionAmbiguous):
  """An action was sent and nothing came back in time."""


class SettleDeadline(Deadline):
  """The action was carried out, but the screen never came to rest."""


class ObserveDeadline(Deadline):
  """A screenshot, or the answer to a ping, did not come in time."""


class EvaluateDeadline(Deadline):
  """The checker did not answer in time."""


class EpisodeDeadline(Deadline):
  """One episode spent too long inside the environment, all its calls together."""


class AgentDeadline(InfraError):
  """The agent thought for so long that its computer was given to another try."""


class LeaseLost(InfraError):
  """A call on a lease that has ended: it was released, taken back, or its worker broke."""


class StaleToken(InfraError):
  """A worker was asked under another lease's token, or for an action out of turn, and refused."""


class BadFrame(InfraError):
  """A screenshot that is torn, stale, of another size or no image at all."""


class BlackFrame(InfraError):
  """A screenshot that is black in every pixel: the screen is off, locked, or was never drawn."""


class TaskParked(InfraError):
  """The task broke several computers, or passes untouched: it is not started until somebody has looked at it."""


class NoComputer(InfraError):
  """No computer became free in time."""


class PoolExhausted(RuntimeError):
  """Every computer is quarantined: nothing can be tried, and waiting will not help. Not an infra error of one try."""


_OTHERS: dict[str, type[InfraError]] = {}


def named(name: str) -> type[InfraError]:
  """The InfraError of that class name; an environment's own, unknown here, becomes a class of the same name."""
  found = globals().get(name)
  if isinstance(found, type) and issubclass(found, InfraError):
    return found
  if name not in _OTHERS:
    _OTHERS[name] = type(str(name), (InfraError,), {"__doc__": "Raised by an environment in a worker."})
  return _OTHERS[name]
