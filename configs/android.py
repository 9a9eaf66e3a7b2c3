"""GRPO on a phone: the lesson's shopping task.

  python train.py --config=configs/android.py                 the embedded default: a simulated phone, a tiny policy
  python train.py --config=configs/android.py:smoke           the same, cut down for CI
  python train.py --config=configs/android.py:out_of_reach    only the pop-up whose way out copying never finds
  python train.py --config=configs/android.py:agent=digirl    another algorithm, with its own defaults
  python train.py --config=configs/android.py:real --config.env.image=127.0.0.1:5555,127.0.0.1:5557 --config.practice.slots=2
                                                              phones behind adb, or emulators (avd:NAME): docs/android.md

Hardware: 2 CPU cores, under 4 GiB. Expected hours and scores: README's table; how they were measured: docs/log.md.
Google's emulator and real phones (DigiRL reports 17.7 -> 67.2 on 96 shopping tasks): not run; what is behind the real adb in the tests
is the simulated phone.
"""

from configs import base
from configs.common import parse_arg


def get_config(arg=""):
  mode = parse_arg(arg, agent="grpo", smoke=False, out_of_reach=False, real=False)
  cfg = base.compose("android", mode.agent, "android/phone" if mode.real else "sim/phone")
  cfg.env.popup_chance = 0.4
  cfg.practice.updates = 50
  if mode.real:
    cfg.practice.update({"workers": True, "slots": 4})
  if mode.out_of_reach:
    cfg.env.popup_kinds = ("corner",)
  if mode.smoke:
    base.smoke(cfg)
  return base.lock(cfg)


def sweep_seed():
  return {"seed": (0, 1, 2)}


def sweep_lr():
  return {"practice.lr": (2e-4, 5e-4, 1e-3)}


def sweep_agent():
  return {":agent": ("grpo", "gspo", "dapo", "ppo", "digirl")}


def sweep_group():
  """The same number of tries an update, in groups of other sizes."""
  return [{"agent.group_size": n, "practice.groups": 96 // n} for n in (4, 8, 16)]
