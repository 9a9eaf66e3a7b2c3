"""GRPO on a phone: the lesson's shopping task.

  python train.py --config=configs/android.py                 the embedded default: a simulated phone, a tiny policy
  python train.py --config=configs/android.py:smoke           the same, cut down for CI
  python train.py --config=configs/android.py:out_of_reach    only the pop-up whose way out copying never finds
  python train.py --config=configs/android.py:agent=gspo      another algorithm, with its own defaults

Hardware: 2 CPU cores, under 4 GiB. Expected hours and scores: README's table; how they were measured: docs/log.md.
Real Android emulators (DigiRL reports 17.7 -> 67.2 on 96 shopping tasks): not run, not yet supported.
"""

from configs import base
from configs.common import parse_arg


def get_config(arg=""):
  mode = parse_arg(arg, agent="grpo", smoke=False, out_of_reach=False)
  cfg = base.compose("android", mode.agent, "sim/phone")
  cfg.env.popup_chance = 0.4
  cfg.practice.updates = 50
  if mode.out_of_reach:
    cfg.env.popup_kinds = ("corner",)
  if mode.smoke:
    base.smoke(cfg)
  return base.lock(cfg)
