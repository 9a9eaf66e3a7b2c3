"""WebRL: a browser, with self-evolving tasks.

  python train.py --config=configs/webarena.py                 the embedded default: the simulated phone's browser, a tiny policy
  python train.py --config=configs/webarena.py:smoke           the same, cut down
  python train.py --config=configs/webarena.py:agent=digirl    another algorithm, with its own defaults
  python train.py --config=configs/webarena.py:shop            a shop of our own in a real Chromium (make system): docs/web.md
  python train.py --config=configs/webarena.py:real --config.env.tasks=train.json --config.env.held_out=test.json
      --config.env.sites.shopping=http://127.0.0.1:7770 --config.copy.path=demonstrations.jsonl
                                                               WebArena's or WebArena-Lite's task files on sites that are yours;
                                                               --config.env.judge.* for tasks that only a judge can score: docs/judges.md

Every phase of agent.reference_every updates the reference is the policy as the phase began, and new tasks are written from those
that failed, kept where the critic's value of their first screen lies between 0.05 and 0.75 and the scripted expert (the shop: its
database) says that they can be done. With :real no task is written: nothing but a judge could say what a new one is worth.
Published: 8 phases of 500 new instructions, lambda 0.5, replay band 1.053 to 2.0, old data at most twice the new; Llama-3.1-8B
from 4.8 to 42.4 on WebArena-Lite's 165 tasks. Hardware: 2 CPU cores, under 4 GiB. Scores of :shop: docs/log.md.
WebArena's sites: not run. The tiny policy of :real sees pixels and writes points; it is there so that the loop can be tried.
"""

from configs import base
from configs.common import parse_arg
from core.config import ConfigError


def get_config(arg=""):
  mode = parse_arg(arg, agent="webrl", smoke=False, out_of_reach=False, shop=False, real=False)
  if mode.shop and mode.real:
    raise ConfigError("configs/webarena.py has the modes shop and real: wanted one of them")
  cfg = base.compose("webarena", mode.agent, "webarena/browser" if mode.real else "shop/browser" if mode.shop else "sim/phone")
  cfg.practice.updates = 32
  if mode.shop or mode.real:
    cfg.practice.update({"workers": True, "slots": 4, "groups": 6})
    cfg.env.capped = True  # on few cores, frames that nobody looks at cost what the other browsers need
    cfg.pool.update({"recycle": 500})  # a browser goes on well, and starting one takes seconds
    cfg.pool.deadlines.settle = 20.0
  if mode.shop:  # the tiny policy tells pages apart at half their size, and places of results, not names or prices
    cfg.env.update({"viewport": (320, 176), "scale": 0.5, "families": ("open",), "steps": 10})
    cfg.copy.update({"demonstrations": 100, "updates": 300})
  if mode.real:
    cfg.env.update({"grammar": "desktop", "text": False})
    cfg.policy.tiny.update({"patch": 20, "window": 8, "stride": 8, "max_goal": 400, "max_action": 100})
  if not mode.real:
    cfg.env.popup_chance = 0.25 if mode.shop else 0.4
    cfg.taskgen.update({"count": 24, "every": 4})
  if mode.out_of_reach:
    if mode.shop or mode.real:
      raise ConfigError("configs/webarena.py:out_of_reach is of the simulated browser: wanted it without shop and real")
    cfg.env.popup_kinds = ("corner",)
  if mode.smoke:
    demonstrations = cfg.copy.demonstrations
    base.smoke(cfg)
    if mode.shop:
      cfg.copy.update({"demonstrations": demonstrations // 2, "updates": 100})
      cfg.practice.updates = 4
  return base.lock(cfg)
