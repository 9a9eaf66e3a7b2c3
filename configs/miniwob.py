"""MiniWoB++ in a real Chromium: GRPO on its pages, graded by the pages themselves.

  python train.py --config=configs/miniwob.py                       two pages: the n-th of three boxes, a point of a grid
  python train.py --config=configs/miniwob.py:smoke                 the same, cut down
  python train.py --config=configs/miniwob.py:agent=dapo --config.env.pages='("click-button","click-dialog")' --config.env.steps=3
                                                                    other pages; ("all",) is every one; those without a scripted
                                                                    solution (envs/miniwob_scripts.py) are practised, not copied

Needs `make system` (Chromium) and `pip install --no-deps -r requirements-web.txt` (the pages). Every environment is a worker process
with a browser of its own; there is no simulated stand-in. The tiny policy sees the 160 x 210 pixels of a page and writes clicks in the
desktop grammar. Pages that want reading are beyond it.
A machine that is busy with other things wants longer deadlines: --config.env.call_seconds=200 --config.pool.deadlines.settle=400.
Hardware: 2 CPU cores, 3 GiB with 4 browsers. Minutes and scores: docs/log.md.
"""

from configs import base
from configs.common import parse_arg


def get_config(arg=""):
  mode = parse_arg(arg, agent="grpo", smoke=False)
  cfg = base.compose("miniwob", mode.agent, "miniwob/browser")
  cfg.env.pages = ("focus-text-2", "grid-coordinate")  # the words say which, the picture where: copying alone gets some of it
  cfg.env.update({"practice_tasks": 512, "in_domain_tasks": 32, "held_out_tasks": 192, "steps": 1})  # what the two pages take
  cfg.env.capped = True  # on few cores, frames that nobody looks at cost what the other browsers need
  cfg.policy.tiny.update({"patch": 10, "max_goal": 24})
  cfg.copy.update({"demonstrations": 120, "updates": 80, "warmup": 20})  # little: what it is sure of it does not try otherwise
  cfg.practice.update({"workers": True, "slots": 4, "updates": 40, "groups": 8, "lr": 1e-3})
  cfg.eval.update({"tries": 1, "every": 10})
  cfg.pool.update({"recycle": 500})  # a browser goes on well, and starting one takes seconds
  cfg.pool.deadlines.settle = 20.0
  if mode.agent == "grpo":
    cfg.agent.update({"minibatch": 32, "epochs": 2})  # an update has sixty-four steps
  elif "minibatch" in cfg.agent:
    cfg.agent.minibatch = 64
  if mode.smoke:
    base.smoke(cfg)
    cfg.env.practice_tasks = 128
    cfg.copy.update({"demonstrations": 60, "updates": 40})
    cfg.practice.updates = 4
  return base.lock(cfg)
