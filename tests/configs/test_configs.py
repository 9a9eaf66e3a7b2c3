"""The shipped configs: what design decisions fix about them, and that every mode composes and passes its own checks."""

import importlib
import json
import math
import pathlib

import pytest

from configs import base
from core import config as config_lib
from core.config import ConfigError
from core.find import available, find

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


@pytest.mark.parametrize(
  "name, mode, another",
  [("android", "real", {"env.image": "127.0.0.1:7777"}), ("android", "real", {"env.call_seconds": 60.0, "env.judge.base_url": "http://[::1]:1/v1"}),
   ("webarena", "real", {"env.sites.shopping": "http://127.0.0.1:7771", "env.browser": "chromium"}), ("osworld", "real", {"env.boots": 1})],
)  # fmt: skip
def test_a_run_goes_on_with_computers_at_another_place_and_other_deadlines(name, mode, another, tmp_path):
  cfg = get(name, mode)
  with cfg.unlocked():
    cfg.update_from_flattened_dict({"env.image": "127.0.0.1:5555"} if name == "android" else {})
  config_lib.write_config(tmp_path, cfg)
  with cfg.unlocked():
    cfg.update_from_flattened_dict(another)
  base.same_run(tmp_path, cfg)
  cfg.env.steps += 1
  with pytest.raises(ConfigError, match=r"holds another run \(config.env.steps: [0-9]+ -> [0-9]+, what is wanted now\)"):
    base.same_run(tmp_path, cfg)


@pytest.mark.parametrize("name", [name for name in available("envs", having="task_lists")])
def test_what_may_change_between_sessions_are_knobs_that_there_are(name):
  module = find("envs", name)
  assert not set(getattr(module, "MACHINE", ())) - set(module.defaults())


@pytest.mark.parametrize("knobs, says", [({"remat_tower": "full"}, "policy.remat_tower is 'full', which the tiny policy has no use for"),
                                         ({"lora.rank": 4}, "policy.lora.rank is 4, which the tiny policy")])  # fmt: skip
def test_a_checkpoints_knobs_are_refused_where_there_is_none(knobs, says):
  cfg = get("osworld")
  cfg.policy.update_from_flattened_dict(knobs)
  with pytest.raises(ValueError, match=says):
    base.check(cfg)


@pytest.mark.parametrize(
  "knobs, given, says",
  [
    ({"policy.checkpoint": "x", "copy.when": "always"}, "copy.lr", "copy.lr would do nothing, policy.lr takes its place"),
    ({"policy.checkpoint": "x"}, "policy.tiny.width", "policy.tiny.width would do nothing, it is the tiny policy's"),
    ({"policy.checkpoint": "x"}, "copy.batch", "copy.batch would do nothing, nothing is copied with copy.when=auto"),
    ({"policy.checkpoint": "x"}, "copy.when", ""),
    ({"policy.checkpoint": "x", "copy.when": "always"}, "practice.leash", ""),
    ({"copy.when": "never"}, "save.copy_every", "save.copy_every would do nothing, nothing is copied with copy.when=never"),
    ({"copy.when": "never"}, "practice.leash_batch", "practice.leash_batch would do nothing, nothing is copied"),
    ({"copy.when": "never"}, "practice.lr", ""),
    ({}, "copy.lr", ""),
    ({}, "critic.lr", "critic.lr would do nothing, arpo has no critic"),
  ],
)
def test_a_knob_that_nothing_reads_is_refused_where_it_was_given(knobs, given, says):
  cfg = get("osworld")
  cfg.update_from_flattened_dict(knobs)
  base.check(cfg)
  if not says:
    return base.check(cfg, [given])
  with pytest.raises(ValueError, match=f"--config.{says}"):
    base.check(cfg, ["seed", given])


@pytest.mark.parametrize("agent", available("agents", having="make"))
def test_a_critics_knobs_may_be_given_where_there_is_one(agent):
  cfg = get("osworld", f"agent={agent}")
  if find("agents", agent).make(cfg.agent).critics:
    base.check(cfg, ["critic.lr"])
  else:
    with pytest.raises(ValueError, match=f"critic.lr would do nothing, {agent} has no critic"):
      base.check(cfg, ["critic.lr"])


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


NONSENSE = [  # (agent, knobs, what is said): given to a config as the command line gives them
  ("grpo", {"agent.clip_high": 4e-4}, "a band for episode ratios"),
  ("grpo", {"agent.clip_high": 5.0}, "a cap on the weight is"),
  ("dapo", {"agent.surrogate": "cispo"}, "cispo takes the cap"),
  ("gspo", {"agent.clip_low": 0.2}, "gspo clips episode ratios"),
  ("gspo", {"agent.surrogate": "gmpo"}, "gmpo clips the log-ratios"),
  ("cispo", {"agent.surrogate": "clip"}, "cispo clips tokens"),
  ("cispo", {"agent.surrogate": "dppo"}, "dppo drops a token"),
  ("ppo", {"agent.clip_high": 4e-4}, "ppo clips tokens"),
  ("grpo", {"agent.kl_beta": math.inf}, "agent.kl_beta is inf, wanted a finite number"),
  ("webrl", {"agent.beta": math.inf}, "agent.beta is inf"),
  ("dpo", {"agent.beta": math.inf}, "agent.beta is inf"),
  ("kto", {"agent.weight_pos": math.inf}, "agent.weight_pos is inf"),
  ("grpo", {"agent.eps": math.inf}, "agent.eps is inf"),
  ("grpo", {"agent.constant": math.inf}, "agent.constant is inf"),
  ("gigpo", {"agent.step_weight": math.inf}, "agent.step_weight is inf"),
  ("ppo", {"agent.value_high": math.inf}, "agent.value_high is inf"),
  ("ppo", {"agent.pretrain_variance": math.nan}, "agent.pretrain_variance is nan"),
  ("digirl", {"agent.step_cost": math.nan}, "agent.step_cost"),
  ("webrl", {"agent.old_per_new": math.inf}, "agent.old_per_new is inf"),
  ("grpo", {"critic.lr": math.nan}, "critic.lr is nan"),
  ("grpo", {"agent.minibatch": 10**8}, "agent.minibatch is 100000000, wanted at most 65536"),
  ("grpo", {"agent.group_size": 10**9}, "agent.group_size is 1000000000"),
  ("digirl", {"agent.critic_epochs": 10**6}, "agent.critic_epochs"),
]


@pytest.mark.parametrize("name, knobs, says", NONSENSE)
def test_a_number_that_makes_no_sense_is_one_line(name, knobs, says):
  cfg = get("android", f"agent={name}")
  cfg.update_from_flattened_dict(knobs)
  with pytest.raises(ValueError) as error:
    base.check(cfg)
    find("agents", name, having="make").make(cfg.agent)
  assert says in str(error.value) and "\n" not in str(error.value)


def test_section_14_every_cell_of_the_matrix_is_a_line_of_overrides():
  """algorithms.md, section 14: what a group method, or the algorithm of its own, is made from with those knobs set."""
  decoupled, unit = {"old_logp": "recompute"}, {"ratio": "episode", "average": "episode", "clip_low": 3e-4, "clip_high": 4e-4}
  band, cells = {"clip_low": 0.4, "clip_high": 0.4}, []
  cells += [("grpo", {"spread": s}) for s in ("population", "sample", "none", "batch")]
  cells += [(n, {}) for n in ("rloo", "gigpo", "step_grpo", "webrl", "filtered_imitation")]
  cells += [("ppo", {"lam_policy": lam, "lam_critic": 0.9}) for lam in (0.95, -1.0)] + [
    ("digirl", {"variant": v}) for v in ("paper", "code")
  ]
  cells += [("webrl", {"variant": "code"}), ("grpo", unit), ("grpo", unit | {"ratio": "step"}), ("grpo", unit | {"token_form": True})]
  cells += [("grpo", {"surrogate": s}) for s in ("clip", "sapo", "dppo", "dppo_kl", "awr", "dro")]
  cells += [("grpo", {"surrogate": "cispo", "clip_high": 5.0}), ("grpo", unit | band | {"surrogate": "gmpo"}), ("grpo", {"dual_clip": 0.0})]
  cells += [("grpo", decoupled | {"correction": c}) for c in ("none", "truncate", "mask", "sequence", "sequence_product", "geometric")]
  cells += [
    ("grpo", decoupled | {"correction": "k3", "correction_cap": 0.005}),
    ("grpo", {"opsm": 0.5}),
    ("grpo", {"old_logp": "approximate"}),
  ]
  cells += [("grpo", {"average": a}) for a in ("token", "episode", "episode_sum", "constant", "micro_batch", "step")]
  cells += [("grpo", {"kl_beta": 0.04, "kl_kind": k, "kl_in": i}) for k in ("k1", "k2", "k3", "k3+") for i in ("loss", "reward")]
  cells += [("grpo", {"kl_beta": 0.04, "reference": r, "reference_every": 512}) for r in ("fixed", "phase", "moving")]
  cells += [
    ("grpo", {"replay": 8, "dynamic_sampling": False}),
    ("webrl", {"low": 0.5, "high": 0.95, "old_per_new": 2.0}),
    ("digirl", {"top": 0.1}),
  ]
  cells += [("grpo", x) for x in ({"overlong": 4}, {"step_budget": 0.3}, {"shortest_path": 1.0}, {"unreadable": 0.5}, {"combine": "gdpo"})]
  for name, knobs in cells:
    cfg = get("android", f"agent={name}")
    cfg.agent.update(knobs)
    base.check(cfg)
    made = find("agents", name, having="make").make(cfg.agent)
    assert made.phases and (made.reference is not None) == (bool(knobs.get("kl_beta")) or name == "webrl"), (name, knobs)
  cfg = get("android", "agent=webrl")  # the data rules that are the curriculum's, whatever the algorithm
  cfg.curriculum.update(
    {"solvable_tries": 16, "critic_low": 0.05, "critic_high": 0.75, "rest_after": 2, "remove_at": 3, "teaching_target": 0.8}
  )
  base.check(cfg)


def test_the_config_of_a_run_that_stands_is_its_own_and_what_came_later_has_its_default(tmp_path, capsys):
  made, _ = config_lib.load_config(["train.py", "--config=configs/android.py:real", "--config.seed=7", "--config.practice.lr=0.25"])
  config_lib.write_config(tmp_path, made)
  assert config_lib.resolved(base.saved(tmp_path)) == config_lib.resolved(made) and capsys.readouterr().out == ""
  record = json.loads((tmp_path / "config.json").read_text())
  del record["config"]["save"]["keep"], record["config"]["watchdog"]
  (tmp_path / "config.json").write_text(json.dumps(record))
  cfg = base.saved(tmp_path)
  assert "was made before there was save.keep, watchdog: the defaults" in capsys.readouterr().out
  assert (cfg.save.keep, cfg.watchdog.seconds, cfg.seed, cfg.practice.lr) == (2, 1800.0, 7, 0.25)
  del record["config"]["agent"]["name"]
  (tmp_path / "config.json").write_text(json.dumps(record))
  with pytest.raises(ValueError, match="has no name: another version wrote it"):
    base.saved(tmp_path)


def test_an_image_makes_a_config_real():
  """--config.env.image=X chooses the mode "real" and the defaults that it brings; modes given stay; an empty one chooses none."""
  load = lambda *argv: config_lib.load_config(["train.py", *argv])[0]
  made = load("--config=configs/osworld.py:agent=gspo", "--config.env.image=debian", "--config.env.steps=3")
  assert (made.env.computer, made.agent.name, made.practice.workers, made.env.steps) == ("osworld/desktop", "gspo", True, 3)
  assert base.real(made) and "osworld/desktop, debian, 4 worker processes" in base.banner(made, "runs/x")
  assert load("--config", "configs/android.py", "--config.env.image", "emulator-5554").env.computer == "android/phone"
  for argv in (["--config=configs/osworld.py"], ["--config=configs/osworld.py", "--config.env.image="]):
    assert load(*argv).env.computer == "sim/desktop"
  with pytest.raises(ValueError, match="pool.deadlines.settle"):
    base.real(load("--config=configs/osworld.py:real", "--config.env.image=x", "--config.pool.deadlines.settle=5.0"))
