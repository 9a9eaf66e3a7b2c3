"""ARPO on a desktop.

  python train.py --config=configs/osworld.py                 the embedded default: a simulated desktop, a tiny policy
  python train.py --config=configs/osworld.py:smoke           the same, cut down for CI
  python train.py --config=configs/osworld.py:out_of_reach    only the pop-up whose way out copying never finds
  python train.py --config=configs/osworld.py:agent=gspo      another algorithm, with its own defaults

Hardware: 2 CPU cores, under 4 GiB. Expected hours and scores: README's table; how they were measured: docs/log.md.
Real OSWorld with UI-TARS-1.5-7B (ARPO reports 23.5 -> 29.9 on 369 tasks at 15 steps): not run, not yet supported.
"""

from configs import base
from configs.common import parse_arg


def get_config(arg=""):
  mode = parse_arg(arg, agent="arpo", smoke=False, out_of_reach=False)
  cfg = base.compose("osworld", mode.agent, "sim/desktop")
  cfg.copy.updates = 1300  # four families take longer to copy than the phone's one
  if mode.out_of_reach:
    cfg.env.popup_kinds = ("corner",)
  if mode.smoke:
    base.smoke(cfg)
  return base.lock(cfg)


def sweep_seed():
  return {"seed": (0, 1, 2)}


def sweep_lr():
  return {"practice.lr": (2e-4, 5e-4, 1e-3)}


def sweep_replay():
  """ARPO with its replay, with the lesson's one success a task, and without."""
  return {"agent.replay": (8, 1, 0)}


def sweep_band():
  """Both ends of the clip band: ARPO's, and GRPO's."""
  return [{"agent.clip_low": 0.2, "agent.clip_high": 0.3}, {"agent.clip_low": 0.2, "agent.clip_high": 0.2}]
