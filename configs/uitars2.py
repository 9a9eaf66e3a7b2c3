"""UI-TARS-2's recipe: PPO with a critic, value pre-training, one lambda for the critic and one by length for the policy.

  python train.py --config=configs/uitars2.py                 the embedded default: a simulated desktop, a tiny policy
  python train.py --config=configs/uitars2.py:smoke           the same, cut down
  python train.py --config=configs/uitars2.py:agent=grpo      another algorithm, with its own defaults

Published: critic lambda 1.0, policy lambda 1 - 1 / (0.05 tokens), value pre-training until explained variance settles; OSWorld
47.5, AndroidWorld 73.3 with 23 billion active weights. Its compressed episodic memory (context "summary") is not supported.
Hardware: 2 CPU cores, under 4 GiB. The embedded default, seed 0: 37.0 copied, 96.1 after practice, n = 384.
The real thing: not run, not yet supported.
"""

from configs import base
from configs.common import parse_arg


def get_config(arg=""):
  mode = parse_arg(arg, agent="ppo", smoke=False, out_of_reach=False)
  cfg = base.compose("uitars2", mode.agent, "sim/desktop")
  cfg.copy.updates = 1300
  if mode.out_of_reach:
    cfg.env.popup_kinds = ("corner",)
  if mode.smoke:
    base.smoke(cfg)
  return base.lock(cfg)
