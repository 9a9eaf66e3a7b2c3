"""What can break under an episode. An InfraError is never a score: the try leaves its group and is run again."""

from __future__ import annotations


class InfraError(Exception):
  """The computer or the grader broke. The class name is the cause that is counted and logged."""


class ResetFailed(InfraError):
  """The environment could not show the task's start screen."""


class CheckerFailed(InfraError):
  """The checker crashed, timed out or returned something that is not a verdict."""
