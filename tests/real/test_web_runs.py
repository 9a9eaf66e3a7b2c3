"""train.py in real browsers (make system): copied, practised and measured end to end; what breaks is an infra error of its try."""

import importlib.util
import json
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys

import pytest

import evaluate
from configs import base, webarena
from core.schema import SUCCESS
from envs import errors, processes, shop
from envs.pool import Pool, defaults, spec_of
from envs.shop.store import Store

pytestmark = pytest.mark.real
ROOT = pathlib.Path(shop.__file__).parents[2]
SMALL = {
  "eval.tries": 1, "eval.every": 0, "env.practice_tasks": 4, "env.in_domain_tasks": 2, "env.held_out_tasks": 2, "copy.demonstrations": 4,
  "copy.updates": 2, "copy.batch": 8, "practice.updates": 2, "practice.groups": 1, "practice.slots": 2, "practice.leash_batch": 8,
  "agent.group_size": 2, "practice.rounds": 1, "policy.tiny.width": 16, "policy.tiny.layers": 1, "policy.tiny.heads": 2,
}  # fmt: skip


def run(config, workdir, **knobs):
  flags = [f"--config.{name}={value}" for name, value in (SMALL | knobs).items()]
  argv = [sys.executable, "train.py", f"--config={config}", f"--workdir={workdir}", *flags]
  done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=1800)
  assert done.returncode == 0, done.stderr[-3000:]
  with sqlite3.connect(f"file:{workdir}/episodes/index.sqlite?mode=ro", uri=True) as db:
    return done.stdout, json.loads((workdir / "summary.json").read_text()), db.execute("SELECT checker, end FROM episodes").fetchall()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("miniwob") is None, reason="pip install --no-deps -r requirements-web.txt")
def test_a_run_on_miniwob(tmp_path):
  said, summary, rows = run("configs/miniwob.py", tmp_path / "run")
  assert "4 demonstrations of 4 steps" in said and "miniwob/browser, real, 2 worker processes" in said
  assert (summary["n"], summary["config"], summary["agent"]) == (2, "miniwob", "grpo")
  assert len(rows) >= 4 and set(rows) <= {("miniwob/browser/1", "terminated"), ("miniwob/browser/1", "truncated")}


@pytest.mark.slow
def test_webrl_writes_its_own_tasks_of_the_shop(tmp_path):
  """taskgen.every=1: whatever failed in the first update is varied; the band is opened, so that the new ones are practised."""
  knobs = {"taskgen.every": 1, "taskgen.count": 3, "curriculum.critic_low": 0.0, "curriculum.critic_high": 0.999}
  said, summary, rows = run("configs/webarena.py:shop", tmp_path / "run", **knobs)
  assert summary["agent"] == "webrl" and {checker for checker, _ in rows} == {"shop/browser/1"}
  assert "new tasks from" in said and "no new tasks" not in said


def test_a_browser_that_dies_under_a_worker_is_an_infra_error_and_the_next_try_goes_on():
  cfg, knobs = shop.defaults(), defaults()
  cfg.update({"computer": "shop/browser", "popup_chance": 0.0, "families": ("open",)})
  knobs.update({"slots": 1, "quarantine_faults": 100, "backoff": 0.0})
  knobs.deadlines.update({"settle": 120.0, "act": 120.0, "observe": 120.0})
  canaries = shop.canaries("shop/browser", cfg)
  with Pool(spec_of(cfg), knobs, canaries=canaries) as pool:
    env = pool.env()
    env.reset(options={"task": canaries[0].task})
    family = processes.family(pool.slots[0].remote.pid)
    browsers = [pid for pid, _ in family if "--headless" in pathlib.Path(f"/proc/{pid}/cmdline").read_text() and is_first(pid)]
    os.kill(browsers[0], signal.SIGKILL)
    with pytest.raises(errors.InfraError) as raised:
      env.step("Action: wait()")
    assert type(raised.value).__name__ == "BrowserDied" and pool.faulted == {"BrowserDied": 1}
    env.reset(options={"task": canaries[0].task})
    for text in canaries[0].texts:
      *_, info = env.step(text)
    assert info["rewards"] == {SUCCESS: 1.0}


def test_webarenas_tasks_on_a_site_of_ours_graded_by_a_judge_where_no_code_can(tmp_path):
  """configs/webarena.py:real with two files in WebArena's format: an exact answer, and one that only a judge can score."""
  store = Store()
  say = lambda n, wanted: {
    "task_id": n, "sites": ["shopping"], "start_url": "__SHOPPING__", "intent": f"What is {n}?",
    "eval": {"eval_types": ["string_match"], "reference_answers": wanted, "reference_url": "", "program_html": []},
  }  # fmt: skip
  (tmp_path / "train.json").write_text(json.dumps([say(1, {"exact_match": "1"}), say(2, {"fuzzy_match": ["two"]})]))
  (tmp_path / "test.json").write_text(json.dumps([say(3, {"exact_match": "3"})]))
  cfg = webarena.get_config("real")
  cfg.env.update({"tasks": str(tmp_path / "train.json"), "held_out": str(tmp_path / "test.json"), "load_seconds": 120.0})
  cfg.env.sites.shopping = f"http://{store.served.place}"
  assert [t.id for t in evaluate.build(cfg).tasks["practice"]] == ["webarena-1"]  # no judge: left out, never failed
  cfg.env.judge.kind = "words"
  base.check(cfg)
  world = evaluate.build(cfg)
  env = world.make_env()
  try:
    for task, answer, rewards, checker in (
      (world.tasks["practice"][0], "1", 1.0, None), (world.tasks["practice"][1], "it is two", 1.0, "judge:words/1"),
      (world.tasks["practice"][1], "three", 0.0, "judge:words/1"), (world.tasks["held_out"][0], "4", 0.0, None),
    ):  # fmt: skip
      obs, _ = env.reset(options={"task": task})
      assert world.policy.prompt(obs["goal"], [obs["screenshot"]], obs["text"]).images.shape == (1, 720, 1280, 3)
      *_, info = env.step(f"Action: finished(content='{answer}')")
      assert (info["rewards"], info.get("checker")) == ({SUCCESS: rewards}, checker)
  finally:
    env.close()
    store.served.close()


def is_first(pid):
  """Whether it is the browser itself, not one of its renderers."""
  return "--type=" not in pathlib.Path(f"/proc/{pid}/cmdline").read_text()
