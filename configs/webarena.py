"""WebRL: a browser, with self-evolving tasks.

  python train.py --config=configs/webarena.py                 the embedded default: the simulated phone's browser, a tiny policy
  python train.py --config=configs/webarena.py:smoke           the same, cut down
  python train.py --config=configs/webarena.py:agent=digirl    another algorithm, with its own defaults

Every phase of agent.reference_every updates the reference is the policy as the phase began, and new tasks are written from those
that failed, kept where the critic's value of their first screen lies between 0.05 and 0.75 and the scripted expert can do them.
Published: 8 phases of 500 new instructions, lambda 0.5, replay band 1.053 to 2.0, old data at most twice the new; Llama-3.1-8B
from 4.8 to 42.4 on WebArena-Lite's 165 tasks. Hardware: 2 CPU cores, under 4 GiB. A whole run of the embedded default: not yet made.
Real Chromium and WebArena: not run, not yet supported.
"""

from configs import base
from configs.common import parse_arg


def get_config(arg=""):
  mode = parse_arg(arg, agent="webrl", smoke=False, out_of_reach=False)
  cfg = base.compose("webarena", mode.agent, "sim/phone")
  cfg.env.popup_chance = 0.4
  cfg.practice.updates = 32
  cfg.taskgen.update({"count": 24, "every": 4})
  if mode.out_of_reach:
    cfg.env.popup_kinds = ("corner",)
  if mode.smoke:
    base.smoke(cfg)
  return base.lock(cfg)
