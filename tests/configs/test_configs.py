"""The shipped configs: what design decisions fix about them, and that every mode composes and passes its own checks."""

import importlib
import pathlib

import pytest

from configs import base
from core.config import ConfigError
from core.find import available

CONFIGS = sorted(p.stem for p in pathlib.Path(base.__file__).parent.glob("*.py") if p.stem not in ("__init__", "base", "common"))


def get(name: str, arg: str = ""):
  return importlib.import_module(f"configs.{name}").get_config(arg)


def test_the_folder_holds_one_file_a_system():
  assert CONFIGS == ["android", "miniwob", "osworld", "uitars2", "webarena"]


def test_bands_and_agents_are_the_systems_own():
  # ARPO: 0.2 below, 0.3 above, up to 8 successes per task (arXiv 2505.16282); DAPO's Clip-Higher 0.2 / 0.28 for GRPO (lesson ch. 4)
  desktop, phone = get("osworld"), get("android")
  assert (desktop.agent.name, desktop.agent.clip_low, desktop.agent.clip_high, desktop.agent.replay) == ("arpo", 0.2, 0.3, 8)
  assert (phone.agent.name, phone.agent.clip_low, phone.agent.clip_high) == ("grpo", 0.2, 0.28)
  for cfg in (desktop, phone):
    assert cfg.agent.group_size == 8 and cfg.practice.max_age == 2 and cfg.practice.temperature == 1.0
    assert (cfg.env.practice_tasks, cfg.env.in_domain_tasks, cfg.env.held_out_tasks) == (256, 32, 96)


def test_the_other_systems_have_their_published_constants():
  """algorithms.md, sections 5 and 7: WebRL's lambda 0.5, band 0.5 to 0.95, old data at most twice the new, new tasks from failed
  ones; UI-TARS-2's critic lambda 1.0, policy lambda by length with alpha 0.05, value pre-training."""
  web, tars = get("webarena"), get("uitars2")
  a = web.agent
  assert (a.name, a.lam, a.low, a.high, a.old_per_new) == ("webrl", 0.5, 0.5, 0.95, 2.0) and web.taskgen.count > 0
  assert web.taskgen.every == a.reference_every
  b = tars.agent
  assert (b.name, b.lam_critic, b.lam_policy, b.lam_alpha) == ("ppo", 1.0, -1.0, 0.05) and b.pretrain_updates > 0
  d = get("android", "agent=digirl").agent
  assert (d.lam, d.probability, d.filter_h) == (0.5, (0.001, 0.99), "limit")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("arg", ["", "smoke", *(f"agent={a}" for a in available("agents", having="make"))])
def test_every_mode_composes_locks_and_passes_its_checks(name, arg):
  composes(name, arg)


@pytest.mark.parametrize(
  "name, arg", [(n, "out_of_reach") for n in CONFIGS if n != "miniwob"] + [("webarena", m) for m in ("shop", "shop,smoke", "real")]
)
def test_the_modes_of_some_compose_too(name, arg):
  composes(name, arg)


def composes(name, arg):
  cfg = get(name, arg)
  assert cfg.is_locked and cfg.name == name
  base.check(cfg)
  if arg.startswith("agent="):
    assert cfg.agent.name == arg.split("=")[1]


def test_gspo_brings_its_own_band_with_it():
  assert (get("osworld", "agent=gspo").agent.clip_low, get("osworld", "agent=gspo").agent.clip_high) == (3e-4, 4e-4)


def test_out_of_reach_shows_only_the_pop_up_that_copying_cannot_close():
  assert get("android", "out_of_reach").env.popup_kinds == ("corner",)
  assert "corner" not in get("android").env.popup_kinds


def test_smoke_is_smaller_in_every_costly_size():
  for name in CONFIGS:
    small, full = get(name, "smoke"), get(name)
    assert small.copy.updates < full.copy.updates and small.practice.updates < full.practice.updates
    assert small.env.held_out_tasks == full.env.held_out_tasks  # the same protocol, fewer tries


def test_the_banner_says_in_plain_words_that_this_is_the_embedded_default():
  text = base.banner(get("android"), "runs/x")
  assert "simulated" in text and "--config.env.image" in text and "--config.policy.checkpoint" in text


@pytest.mark.parametrize(
  "mode, knobs, says",
  [("", {"env.image": "x"}, "env.image is x, but sim/phone is simulated: use configs/android.py:real"),
   ("real", {"env.image": "a,b", "practice.slots": 3}, "env.image names 2 devices, practice.slots [+] pool.spares is 3"),
   ("real", {"env.image": "a,b", "practice.slots": 2, "pool.spares": 1}, "names 2 devices"),
   ("real", {"env.image": "a", "practice.workers": False}, "android/phone is a real computer: wanted practice.workers=True")],
)  # fmt: skip
def test_what_is_given_for_real_computers_must_fit(mode, knobs, says):
  cfg = get("android", mode)
  with cfg.unlocked():
    cfg.update_from_flattened_dict(knobs)
  with pytest.raises(ValueError, match=says):
    base.check(cfg)


@pytest.mark.parametrize("mode, computer", [("shop", "shop/browser"), ("real", "webarena/browser"), ("", "sim/phone")])
def test_webrl_has_three_places_to_practise_in(mode, computer):
  cfg = get("webarena", mode)
  assert cfg.env.computer == computer and base.real(cfg) == bool(mode) == cfg.practice.workers and cfg.agent.name == "webrl"
  assert (cfg.taskgen.count > 0) == (mode != "real")  # nothing says whether a new task of a user's site can be done


@pytest.mark.parametrize("mode, said", [("shop,real", "wanted one of them"), ("shop,out_of_reach", "of the simulated browser")])
def test_modes_that_exclude_each_other_are_refused(mode, said):
  with pytest.raises(ConfigError, match=said):
    get("webarena", mode)


def test_a_browser_is_not_an_image():
  cfg = get("miniwob")
  cfg.env.image = "x.qcow2"
  with pytest.raises(ValueError, match="env.image is x.qcow2, but miniwob/browser starts its own"):
    base.check(cfg)
  cfg.env.image, cfg.practice.workers = "", False
  with pytest.raises(ValueError, match="miniwob/browser is a real computer: wanted practice.workers=True"):
    base.check(cfg)
  cfg.practice.workers = True
  assert "miniwob/browser, real, 4 worker processes" in base.banner(cfg, "runs/x")


def test_a_browsers_own_deadlines_come_before_the_pools():
  cfg = get("miniwob")
  assert cfg.env.settle_most + cfg.env.call_seconds < cfg.pool.deadlines.settle
  cfg.pool.deadlines.settle = 14.0
  with pytest.raises(ValueError, match=r"pool.deadlines.settle is 14, wanted more than env.settle_most [+] env.call_seconds \(14\)"):
    base.check(cfg)


def test_a_verdict_must_come_before_the_pool_gives_up():
  cfg = get("webarena", "real")
  cfg.env.judge.update({"kind": "endpoint", "base_url": "http://127.0.0.1:8000/v1", "model": "m"})
  base.check(cfg)
  cfg.env.judge.seconds = 120.0
  with pytest.raises(ValueError, match=r"env.judge.seconds is 120, wanted less than pool.deadlines.evaluate \(120\)"):
    base.check(cfg)


def test_real_computers_work_beside_learning_each_behind_a_process():
  cfg = get("android", "real")
  cfg.update_from_flattened_dict({"env.image": "avd:Pixel", "practice.slots": 3})
  base.check(cfg)
  assert base.real(cfg) and base.mode(cfg) == "async" and base.pool(cfg).slots == 3 and not base.real(get("android"))
  cfg.practice.mode = "sync"
  assert base.mode(cfg) == "sync" and base.mode(get("osworld")) == "sync" and "avd:Pixel" in base.banner(cfg, "runs/x")
