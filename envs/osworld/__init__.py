"""OSWorld: its task files, on virtual machines. `python -m envs.osworld --help`; docs/osworld.md.

The parts stand in suite.py and load when they are asked for: the metrics' process, which imports this package too, needs none of them.
"""

from __future__ import annotations

import importlib
from typing import Any

MACHINE = ("cache", "store", "mirrors", "accel", "reserve_mb", "boots", "boot_seconds", "restore_seconds", "call_seconds", "guest_seconds")


def _suite() -> Any:
  return importlib.import_module("envs.osworld.suite")


def defaults():
  return _suite().defaults()


def check(cfg) -> None:
  _suite().check(cfg)


def make(computer, cfg, clean=False, quick=True, judge=None):
  return _suite().make(computer, cfg, clean, quick, judge)


def task_lists(computer, cfg):
  return _suite().task_lists(computer, cfg)


def demonstrations(computer, count, seed, cfg=None):
  return _suite().demonstrations(computer, count, seed, cfg)


def vocabulary(computer, cfg=None):
  return _suite().vocabulary(computer, cfg)


def canaries(computer, cfg):
  return _suite().canaries(computer, cfg)
