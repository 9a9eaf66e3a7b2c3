"""ARPO on a desktop.

  python train.py --config=configs/osworld.py                 the embedded default: a simulated desktop, a tiny policy
  python train.py --config=configs/osworld.py:smoke           the same, cut down for CI
  python train.py --config=configs/osworld.py:out_of_reach    only the pop-up whose way out copying never finds
  python train.py --config=configs/osworld.py:agent=gspo      another algorithm, with its own defaults
  python train.py --config=configs/osworld.py --config.env.image=debian
                                                              virtual machines of the Debian desktop that tools/build_desktop.py makes,
                                                              on this project's own tasks (the image chooses the mode "real")
  python train.py --config=configs/osworld.py --config.env.image=Ubuntu.qcow2 --config.env.tasks=evaluation_examples
    --config.env.index=test_nogdrive.json --config.env.mirrors='("https://huggingface.co/=/data/mirror",)'
    --config.policy.checkpoint=UI-TARS-1.5-7B                 OSWorld itself: docs/osworld.md

Hardware: 2 CPU cores, under 4 GiB; a virtual machine more takes 0.3 to 0.5 GiB. Expected hours and scores: README's table; how they were
measured: docs/log.md. Real OSWorld with UI-TARS-1.5-7B (ARPO reports 23.5 -> 29.9 on 369 tasks at 15 steps): not run.
"""

from configs import base
from configs.common import parse_arg


def get_config(arg=""):
  mode = parse_arg(arg, agent="arpo", smoke=False, out_of_reach=False, real=False)
  cfg = base.compose("osworld", mode.agent, "osworld/desktop" if mode.real else "sim/desktop")
  if mode.real:
    _real(cfg)
  else:
    cfg.copy.updates = 1300  # four families take longer to copy than the phone's one
  if mode.out_of_reach and mode.real:
    raise ValueError("out_of_reach is about the simulated desktop's pop-ups: leave out real and env.image, or out_of_reach")
  if mode.out_of_reach:
    cfg.env.popup_kinds = ("corner",)
  if mode.smoke:
    base.smoke(cfg)
  return base.lock(cfg)


def _real(cfg):
  """A few virtual machines on one machine without KVM; the tiny policy sees a quarter of the screen each way."""
  cfg.env.update({"families": ("writer_subscript",), "start": "task", "practice_tasks": 8, "in_domain_tasks": 8, "held_out_tasks": 4})
  cfg.env.update({"shown": (256, 192), "steps": 10})
  cfg.policy.tiny.update({"patch": 16, "max_goal": 48})
  cfg.copy.update({"demonstrations": 24, "updates": 400})
  cfg.practice.update({"workers": True, "slots": 4, "updates": 20, "groups": 4, "rounds": 1})
  cfg.eval.update({"tries": 2, "every": 20})
  cfg.pool.boots = 2
  cfg.pool.deadlines.update({"boot": 900.0, "reset": 900.0, "act": 90.0, "settle": 60.0, "evaluate": 180.0})
  if "minibatch" in cfg.agent:
    cfg.agent.minibatch = 64


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
