"""Composes a run's config from the defaults() of the modules that read them, plus the loop's own knobs. Locked at the end."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable

import ml_collections

from core import config as config_lib
from core import hosts, mesh, metrics, stop, watchdog
from core.find import find
from envs import health
from rollout import curriculum, gate, remote


def loop_defaults() -> ml_collections.ConfigDict:
  """The knobs that train.py itself reads."""
  return ml_collections.ConfigDict(
    {
      "copy": {
        "when": "auto",  # always or never; auto: a checkpoint practises as it came, unless copy.path or copy.start says what to copy
        "path": "",  # trajectory records (JSON lines) to copy; empty = the simulator's scripted demonstrations
        "start": "",  # folder of another run, whose copied policy practice starts from: no copying then
        "demonstrations": 1500,  # scripted episodes
        "updates": 800,
        "batch": 128,  # steps a batch
        "lr": 3e-3,
        "warmup": 60,
        "weight_decay": 0.01,
      },
      "practice": {
        "updates": 40,
        "groups": 12,  # teaching groups an update
        "mode": "auto",  # sync: sampling and learning in turn; async: beside each other; auto: async where workers are
        "workers": False,  # environments in processes of their own (docs/pool.md, pool.*) instead of in this one
        "rounds": 2,  # at most so many rounds of sampling to find them
        "max_age": 2,  # episodes older than this many versions are dropped when they would be trained on
        "ahead": 0.0,  # async: updates' worth of groups under way while the learner learns; 0 = max_age. Less is fresher, and may idle
        "temperature": 1.0,  # of sampling and scoring alike while practising; evaluation stays at 1.0
        "lr": 5e-4,
        "warmup": 5,  # optimiser steps
        "weight_decay": 0.0,
        "leash": 0.2,  # weight of a copying term on demonstrations beside the policy loss; 0 = off
        "leash_batch": 64,
        "clip_norm": 1.0,
        "max_skipped": 3,  # stop after so many non-finite optimiser steps in a row
        "slots": 64,  # environments
        "micro_batches": 1,  # parts of an optimiser step, for memory; sums and counts are added before the one division
      },
      "pack": {"row_tokens": 0},  # tokens a packed row; 0 = the longest record the policy can have
      "eval": {"tries": 4, "every": 10, "tries_during": 1},
      "save": {
        "every": 10,  # updates
        "copy_every": 250,
        "keep": 2,  # checkpoints
        "grace": 8.0,  # seconds after SIGTERM or Ctrl-C to end in; then what is under way is given up, a save apart; 0 = no limit
      },
      "log": {"episodes": 4, "groups": 1},  # sample episodes, and groups of the last update, shown in TensorBoard at each evaluation
    }
  )


def compose(name: str, agent: str, computer: str) -> ml_collections.ConfigDict:
  """A full config: agent's defaults, the environment's, the policy's and the loop's."""
  cfg = ml_collections.ConfigDict({"name": name, "seed": 0, "compile_cache": "~/.cache/practice/jax"})
  cfg.agent = find("agents", agent, having="make").defaults()
  cfg.env = find("envs", computer.split("/")[0]).defaults()
  cfg.env.update({"computer": computer})
  cfg.env.image = ""  # a QEMU disk image (osworld) or an adb serial (android); empty = the simulated computer
  cfg.policy = ml_collections.ConfigDict({"name": "tiny", "checkpoint": ""})  # a Hugging Face folder, with the knobs beside it; "" = tiny
  cfg.policy.tiny = find("models", "tiny").defaults()
  cfg.policy.update(find("models", "checkpoint").defaults())
  cfg.curriculum, cfg.taskgen = find("rollout", "curriculum").defaults(), find("rollout", "taskgen").defaults()
  cfg.update(loop_defaults())
  cfg.mesh, cfg.hosts = mesh.defaults(), hosts.defaults()
  cfg.sampler = remote.defaults()
  cfg.sampler.sessions = find("rollout", "sessions").defaults()  # of a checkpoint's sampler
  cfg.watchdog = ml_collections.ConfigDict(watchdog.defaults())
  cfg.alarms = ml_collections.ConfigDict(metrics.defaults())
  cfg.gate = gate.defaults()
  cfg.pool = health.defaults()
  del cfg.pool["slots"]  # practice.slots says it
  cfg.critic = find("models", "critic").defaults()  # read only where the algorithm has a critic
  return cfg


def saved(workdir: str | os.PathLike) -> ml_collections.ConfigDict:
  """The config of the run that stands in a workdir. Knobs that came after it have their defaults, and one line says which."""
  then = config_lib.read_config(workdir)
  try:
    cfg = compose(then["name"], then["agent"]["name"], then["env"]["computer"])
  except KeyError as error:
    raise ValueError(f"the config.json of {workdir} has no {error.args[0]}: another version wrote it, and what ran is not known") from error
  if lacking := _lacking(cfg.to_dict(), then, ""):
    print(f"{workdir} was made before there was {', '.join(lacking)}: the defaults stand for what it lacks", flush=True)
  try:
    with cfg.unlocked():
      cfg.update(then)
  except TypeError as error:
    raise ValueError(f"the config.json of {workdir} has a knob of another type than it can have: {error}") from error
  return cfg


def machine(cfg: ml_collections.ConfigDict) -> tuple[str, ...]:
  """Knobs of env that say where a computer or a judge is and how long it is waited for, which is no part of a run: a phone comes back
  behind another port, and a busy machine wants more time."""
  judge = ("base_url", "key_env", "timeout", "seconds", "retries", "backoff", "budget", "cache")
  return (*getattr(find("envs", cfg.env.computer.split("/")[0]), "MACHINE", ()), *(f"judge.{name}" for name in judge))


def same_run(workdir, cfg: ml_collections.ConfigDict) -> None:
  """core.config.same_run, with `machine` left free."""
  config_lib.same_run(workdir, cfg, lambda path: config_lib.resolved(saved(path)), tuple(f"env.{name}" for name in machine(cfg)))


def _lacking(now: dict, then: dict, above: str) -> list[str]:
  out = []
  for name, value in now.items():
    if name not in then:
      out.append(above + name)
    elif isinstance(value, dict) and isinstance(then[name], dict):
      out += _lacking(value, then[name], f"{above}{name}.")
  return out


def smoke(cfg: ml_collections.ConfigDict) -> None:
  """Cut down so that CI sees the whole loop, and real learning, in two or three minutes."""
  cfg.copy.updates = max(700, cfg.copy.updates * 4 // 5)  # much less, and there is no plain path for practice to build on
  cfg.practice.updates = 12
  cfg.eval.update({"tries": 2, "every": 5})
  cfg.save.update({"every": 5, "copy_every": 300})
  if "offline" in cfg.agent:
    cfg.agent.offline = min(cfg.agent.offline, 4)


def lock(cfg: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  cfg.lock()
  return cfg


def mode(cfg) -> str:
  """ "sync" or "async": practice.mode, decided."""
  return cfg.practice.mode if cfg.practice.mode != "auto" else "async" if cfg.practice.workers else "sync"


def copies(cfg) -> bool:
  """Whether demonstrations are copied before practice: copy.when, decided."""
  return cfg.copy.when == "always" or cfg.copy.when == "auto" and bool(not cfg.policy.checkpoint or cfg.copy.path or cfg.copy.start)


def pool(cfg) -> ml_collections.ConfigDict:
  """The knobs of the worker pool, with as many computers as practice wants."""
  return ml_collections.ConfigDict(cfg.pool.to_dict() | {"slots": cfg.practice.slots})


def real(cfg) -> bool:
  """Whether the computers are real ones. ValueError where what is given for them does not fit."""
  if cfg.env.computer.split("/")[0] == "sim":
    if cfg.env.image:
      hint = f"use configs/{'android' if cfg.env.computer == 'sim/phone' else 'osworld'}.py:real"
      raise ValueError(f"env.image is {cfg.env.image}, but {cfg.env.computer} is simulated: {hint}")
    return False
  if cfg.env.image and "image" not in find("envs", cfg.env.computer.split("/")[0]).defaults():
    raise ValueError(f"env.image is {cfg.env.image}, but {cfg.env.computer} starts its own: leave it empty")
  if not cfg.practice.workers:
    raise ValueError(f"{cfg.env.computer} is a real computer: wanted practice.workers=True, each behind a process of its own")
  if "judge" in cfg.env and cfg.env.judge.kind and cfg.env.judge.seconds >= cfg.pool.deadlines.evaluate:
    raise ValueError(
      f"env.judge.seconds is {cfg.env.judge.seconds:g}, wanted less than pool.deadlines.evaluate ({cfg.pool.deadlines.evaluate:g})"
    )
  if "settle_window" in cfg.env and (slowest := cfg.env.settle_most + cfg.env.call_seconds) >= cfg.pool.deadlines.settle:
    raise ValueError(
      f"pool.deadlines.settle is {cfg.pool.deadlines.settle:g}, wanted more than env.settle_most + env.call_seconds ({slowest:g})"
    )
  if "load_seconds" in cfg.env and (slowest := cfg.env.settle_most + cfg.env.call_seconds) >= cfg.pool.deadlines.settle:
    raise ValueError(
      f"pool.deadlines.settle is {cfg.pool.deadlines.settle:g}, wanted more than env.settle_most + env.call_seconds ({slowest:g}): the "
      "browser's own deadline for a last screenshot comes first"
    )
  devices, wanted = [d for d in cfg.env.image.split(",") if d.strip()], cfg.practice.slots + cfg.pool.spares
  if cfg.env.computer.startswith("android/") and devices and not devices[0].strip().startswith("avd:") and len(devices) < wanted:
    raise ValueError(f"env.image names {len(devices)} devices, practice.slots + pool.spares is {wanted}: every worker has one of its own")
  return True


def check(cfg, given: Iterable[str] = ()) -> None:
  """Every size and domain before any environment starts; each failure one line: name, got, wanted, what to change. given: flags' knobs."""
  p, c = cfg.practice, cfg.copy
  wanted = {
    "seed": (cfg.seed, 0 <= cfg.seed < 2**62, "0 or more, below 2^62"),
    "copy.when": (c.when, c.when in ("auto", "always", "never"), "auto, always or never"),
    "copy.demonstrations": (c.demonstrations, c.demonstrations >= 1, "1 or more episodes"),
    "copy.updates": (c.updates, c.updates >= 1, "1 or more"),
    "copy.batch": (c.batch, 1 <= c.batch <= 65536, "1 to 65536 steps"),
    "copy.lr": (c.lr, 0 < c.lr < 1, "a number between 0 and 1"),
    "practice.updates": (p.updates, p.updates >= 0, "0 or more"),
    "practice.groups": (p.groups, p.groups >= 1, "1 or more groups an update"),
    "practice.mode": (p.mode, p.mode in ("auto", "sync", "async"), "auto, sync or async"),
    "practice.rounds": (p.rounds, p.rounds >= 1, "1 or more rounds of sampling"),
    "practice.max_age": (p.max_age, p.max_age >= 0, "0 or more versions"),
    "practice.ahead": (p.ahead, 0 <= p.ahead <= p.max_age, f"0 (as far as practice.max_age) to practice.max_age ({p.max_age})"),
    "practice.temperature": (p.temperature, 0.1 <= p.temperature <= 2, "0.1 to 2, best 1.0: a greedy sampler has no chances to compare"),
    "practice.lr": (p.lr, 0 < p.lr < 1, "a number between 0 and 1"),
    "practice.leash": (p.leash, 0 <= p.leash < 1e6, "0 (off) or more"),
    "practice.leash_batch": (p.leash_batch, p.leash_batch >= 1, "1 or more steps"),
    "practice.clip_norm": (p.clip_norm, 0 < p.clip_norm < 1e9, "a number above 0"),
    "practice.warmup": (p.warmup, p.warmup >= 0, "0 or more optimiser steps"),
    "practice.weight_decay": (p.weight_decay, 0 <= p.weight_decay < 1, "a number from 0 to 1"),
    "copy.warmup": (c.warmup, c.warmup >= 0, "0 or more updates"),
    "copy.weight_decay": (c.weight_decay, 0 <= c.weight_decay < 1, "a number from 0 to 1"),
    "eval.tries_during": (cfg.eval.tries_during, cfg.eval.tries_during >= 1, "1 or more episodes a task"),
    "log.episodes": (cfg.log.episodes, cfg.log.episodes >= 0, "0 or more sample episodes"),
    "log.groups": (cfg.log.groups, cfg.log.groups >= 0, "0 or more groups"),
    "practice.micro_batches": (p.micro_batches, p.micro_batches >= 1, "1 or more"),
    "critic.lr": (cfg.critic.lr, 0 < cfg.critic.lr < 1, "a number between 0 and 1"),
    "critic.warmup": (cfg.critic.warmup, cfg.critic.warmup >= 0, "0 or more optimiser steps"),
    "critic.weight_decay": (cfg.critic.weight_decay, 0 <= cfg.critic.weight_decay < 1, "a number from 0 to 1"),
    "practice.slots": (p.slots, 1 <= p.slots <= 16384, "1 to 16384 environments"),
    "practice.max_skipped": (p.max_skipped, p.max_skipped >= 1, "1 or more"),
    "eval.tries": (cfg.eval.tries, cfg.eval.tries >= 1, "1 or more episodes a task"),
    "eval.every": (cfg.eval.every, cfg.eval.every >= 0, "0 (only at the end) or more updates"),
    "save.every": (cfg.save.every, cfg.save.every >= 1, "1 or more updates"),
    "save.copy_every": (cfg.save.copy_every, cfg.save.copy_every >= 1, "1 or more updates"),
    "save.keep": (cfg.save.keep, cfg.save.keep >= 1, "1 or more checkpoints"),
  }
  for name, (got, good, want) in wanted.items():
    if not good:
      raise ValueError(f"{name} is {got}, wanted {want}")
  _check_numbers(cfg)
  _check_idle(cfg, given)
  parts = {"curriculum": curriculum, "gate": gate, "alarms": metrics, "watchdog": watchdog, "sampler": remote, "hosts": hosts}
  for part, module in parts.items():
    module.check(cfg[part])
  stop.check(cfg.save.grace)
  health.check(pool(cfg))
  for name in ("offline", "pretrain_updates"):
    if 0 < p.updates <= cfg.agent.get(name, 0):
      raise ValueError(f"agent.{name} is {cfg.agent[name]} of practice.updates={p.updates}: none would be left to learn in, wanted fewer")
  if not p.workers and any(cfg.env.get("faults", {}).values()):
    raise ValueError("env.faults break the process they are in: wanted practice.workers=True with them, so that it is a worker's")
  check_policy(cfg)
  real(cfg)
  for name, path in (("copy.path", c.path), ("copy.start", c.start), ("curriculum.tasks", cfg.curriculum.tasks)):
    if path and not os.path.exists(path):
      raise ValueError(f"{name} is {path}: there is no such file or folder")


def _check_numbers(cfg) -> None:
  """No number is infinite or none at all; no batch is larger than a machine's memory, or cannot be cut into its micro-batches."""
  for part, knobs in cfg.items():
    for name, value in knobs.items() if isinstance(knobs, ml_collections.ConfigDict) else ():
      if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{part}.{name} is {value}, wanted a finite number")
  most = {"group_size": 4096, "epochs": 1000, "critic_epochs": 1000, "minibatch": 65536, "critic_minibatch": 65536, "store": 10**7}
  for name, limit in most.items():
    if cfg.agent.get(name, 0) > limit:
      raise ValueError(f"agent.{name} is {cfg.agent[name]}, wanted at most {limit}")
  for name in ("minibatch", "critic_minibatch"):
    if cfg.agent.get(name, 0) % cfg.practice.micro_batches:
      raise ValueError(f"practice.micro_batches is {cfg.practice.micro_batches}, wanted a divisor of agent.{name} ({cfg.agent[name]})")


def _check_idle(cfg, given: Iterable[str]) -> None:
  """Nothing was given on the command line that this run reads nowhere, and that a default may hold all the same."""
  idle = {}
  if cfg.policy.checkpoint:
    idle = {r"(practice|copy)\.lr": "policy.lr takes its place for a checkpoint", r"policy\.(name|tiny\..*)": "it is the tiny policy's"}
  if not copies(cfg):
    idle[r"copy\.(?!when$).*|practice\.leash(_batch)?|save\.copy_every"] = f"nothing is copied with copy.when={cfg.copy.when}"
  if "critic_epochs" not in cfg.agent:  # agents with a critic say how often it learns
    idle[r"critic\..*"] = f"{cfg.agent.name} has no critic"
  for name in given:
    if why := next((why for pattern, why in idle.items() if re.fullmatch(pattern, name)), ""):
      raise ValueError(f"--config.{name} would do nothing, {why}: leave it out")


def check_policy(cfg) -> None:
  """What of the run does not go with a checkpoint's policy. The checkpoint's own knobs are checked where it is read."""
  if cfg.policy.checkpoint and cfg.sampler.endpoints:
    raise ValueError("sampler.endpoints with policy.checkpoint: servers take the tiny policy only in this version, leave one of them empty")
  if cfg.policy.checkpoint:
    return
  parts = {
    "policy": (cfg.policy, find("models", "checkpoint").defaults()),
    "policy.lora": (cfg.policy.lora, find("models", "lora").defaults()),
    "sampler.sessions": (cfg.sampler.sessions, find("rollout", "sessions").defaults()),
  }
  for part, (got, usual) in parts.items():
    for name in usual:
      if name != "lora" and got[name] != usual[name]:
        raise ValueError(f"{part}.{name} is {got[name]!r}, which the tiny policy has no use for: give policy.checkpoint, or leave it out")


def policy(cfg) -> str:
  """Which policy is trained and how it begins, in words."""
  knobs = cfg.policy
  begins = f"copies {cfg.copy.path or cfg.copy.start or 'scripted demonstrations'} first" if copies(cfg) else "practises as it is"
  if not knobs.checkpoint:
    return f"tiny, {begins} (a real one: --config.policy.checkpoint=FOLDER, docs/policies.md)"
  learnt = f"adapters of rank {knobs.lora.rank} learn" if knobs.lora.rank else "all parameters learn"
  context = f"the last {knobs.screens} observations" if knobs.mode == "window" else "all observations of an episode"
  return f"{knobs.checkpoint}, {begins}; {learnt} at lr {knobs.lr:g} in {knobs.dtype}; it sees {context}, at most {knobs.max_prompt} tokens"


def banner(cfg: ml_collections.ConfigDict, workdir) -> str:
  """Says in plain words what a run is, before anything costly."""
  agent = cfg.agent
  return "\n".join(
    [
      f"practice: {cfg.name}, agent {agent.name}, seed {cfg.seed}, workdir {workdir}",
      f"environment: {cfg.env.computer}, {(cfg.env.image or 'real') if real(cfg) else 'simulated'}, {cfg.practice.slots} "
      + (f"worker processes ({cfg.pool.backend}), {mode(cfg)}" if cfg.practice.workers else f"in this process, {mode(cfg)}")
      + ("" if real(cfg) else " (real ones: --config.env.image=..., with configs/android.py a phone, with configs/osworld.py a desktop)"),
      f"policy: {policy(cfg)}",
      *([f"sampler: {len(cfg.sampler.endpoints)} servers, {cfg.sampler.dialect}"] if cfg.sampler.endpoints else []),
      f"tries a task {agent.group_size}, age limit {cfg.practice.max_age}, temperature {cfg.practice.temperature}"
      + (
        f", {agent.surrogate} on {agent.ratio} ratios, band {agent.clip_low} / {agent.clip_high}, average by {agent.average}"
        if "surrogate" in agent
        else ""
      )
      + (f", spread {agent.spread}, eps {agent.eps}" if "spread" in agent else ""),
    ]
  )
