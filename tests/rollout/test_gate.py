"""Known episodes before training: what a broken computer, a broken checker and a fickle grader look like, and what is let through."""

import json

import numpy as np
import pytest

import envs.sim
from configs import android
from envs.canary import do_nothing
from envs.errors import ResetFailed
from envs.inside import Inside
from envs.sim.base import SimEnv
from rollout import gate, labels
from rollout.store import EpisodeStore


class Deaf(SimEnv):
  """A reset that leaves a screen which nothing reaches."""

  def _act(self, action):
    self.app.tick()


class PassesAll(SimEnv):
  def _finish(self, action, cause, passed):
    return super()._finish(action, cause, True)


class Fickle(SimEnv):
  """Every first verdict on a task is wrong."""

  seen: set = set()

  def _finish(self, action, cause, passed):
    new = (self.task.id, self.steps) not in self.seen
    self.seen.add((self.task.id, self.steps))
    return super()._finish(action, cause, passed != new)


class Dead(SimEnv):
  def reset(self, **kw):
    raise ResetFailed("by hand")


@pytest.fixture(scope="module")
def cfg():
  cfg = android.get_config()
  with cfg.unlocked():
    cfg.gate = gate.defaults()
    cfg.gate.known_good = cfg.gate.do_nothing = 3
    cfg.gate.repeats = 3
  return cfg


@pytest.fixture(scope="module")
def tasks(cfg):
  return envs.sim.task_lists(cfg.env.computer, cfg.env)["practice"]


def record(cfg, tasks, make=SimEnv, seats=2):
  """Scripts are written for a sound computer, then played on the given one."""
  computers = Inside([make("sim/phone", envs.sim.popup_rule(cfg.env, 1.0)) for _ in range(seats)])
  found = gate.examine(cfg, cfg.gate, tasks, computers)
  assert len(computers.free) == seats  # every lease was given back
  return found


def test_a_sound_computer_is_let_through(cfg, tasks):
  found = record(cfg, tasks)
  assert (found["known_good"], found["first_go"], found["do_nothing"]) == (1.0, 1.0, 0.0)
  assert (found["n_known_good"], found["n_do_nothing"], found["not_scored"], found["contradictions"]) == (3, 3, 0, 0)
  assert gate.complaint(found) == ""
  assert [r["task"] for r in found["episodes"][:3]] == [tasks[0].id, tasks[85].id, tasks[170].id]  # a third of 256 apart


def test_a_computer_that_cannot_be_won(cfg, tasks):
  found = record(cfg, tasks, Deaf)
  assert (found["known_good"], found["do_nothing"], found["contradictions"]) == (0.0, 0.0, 0)
  assert all(r["scores"] == [0.0] * 3 for r in found["episodes"] if r["kind"] == "known-good")  # tried three times
  assert "3 of 3 scripted solutions did not pass" in gate.complaint(found)


def test_a_checker_that_passes_everything(cfg, tasks):
  found = record(cfg, tasks, PassesAll)
  assert found["do_nothing"] == 1.0 and "3 of 3 tasks pass although nothing is done" in gate.complaint(found)


def test_a_grader_that_contradicts_itself_is_no_broken_computer(cfg, tasks):
  Fickle.seen = set()
  found = record(cfg, tasks, Fickle)
  assert (found["known_good"], found["first_go"], found["contradictions"]) == (1.0, 0.0, 3)
  # by hand: each script failed, then passed; each idle episode passed: 3 right verdicts of 9
  assert found["right"] == pytest.approx(3 / 9)
  assert "the grader contradicts itself: 3 of 3" in gate.complaint(found)


def test_what_cannot_be_scored_is_neither_pass_nor_fail(cfg, tasks):
  found = record(cfg, tasks, Dead)
  assert found["known_good"] is None and found["do_nothing"] is None and found["not_scored"] == 6
  assert "could not be scored (ResetFailed)" in gate.complaint(found)


def test_a_computer_that_never_answers_is_a_deadline(tasks):
  class Silent:
    def submit_reset(self, task):
      pass

  class Computers:
    def __init__(self):
      self.one = [Silent()]

    def try_lease(self):
      return self.one.pop() if self.one else None

    def wait(self, timeout):
      return []

  with pytest.raises(TimeoutError, match="no computer answered in 0.05 s, 1 known episodes under way"):
    gate.play(Computers(), [do_nothing(tasks[0])], 0.05)


def test_the_gate_writes_what_it_saw_and_refuses(cfg, tasks, tmp_path):
  popups = envs.sim.popup_rule(cfg.env, 1.0)
  with pytest.raises(gate.GateClosed, match="not training on sim/phone: 3 of 3 scripted.*--config.gate.known_good=0"):
    gate.gate(cfg, tasks, Inside([Deaf("sim/phone", popups)]), tmp_path)
  assert gate.read(tmp_path)["known_good"] == 0.0
  gate.gate(cfg, tasks, Inside([SimEnv("sim/phone", popups)]), tmp_path)
  assert gate.read(tmp_path)["known_good"] == 1.0


def test_an_overridden_gate_plays_nothing(cfg, tasks, tmp_path):
  import copy

  off = copy.deepcopy(cfg)
  with off.unlocked():
    off.gate.known_good = off.gate.do_nothing = 0
  gate.gate(off, tasks, None, tmp_path)
  assert gate.read(tmp_path) is None


def test_a_larger_clean_record_stays_a_faulty_one_goes(cfg, tasks, tmp_path, monkeypatch):
  """The whole list was checked by hand; the gate's sample does not take its place, unless one of them has a complaint."""
  rows = lambda n, score: [
    {"kind": "known-good", "task": f"t{i}", "scores": [score], "causes": [], "contradiction": False} for i in range(n)
  ]
  seen = lambda n, score=1.0: {"time": 0.0, **gate.totals(rows(n, score)), "episodes": rows(n, score)}
  run = lambda record: (monkeypatch.setattr(gate, "examine", lambda *a: record), gate.gate(cfg, tasks, None, tmp_path))[1]
  kept = lambda: len(gate.read(tmp_path)["episodes"])
  gate.write(tmp_path, seen(9))
  assert "4 scripted solutions pass" in run(seen(4)) and kept() == 9
  gate.write(tmp_path, seen(9, 0.0))
  run(seen(4))
  assert kept() == 4
  gate.write(tmp_path, seen(9))
  with pytest.raises(gate.GateClosed):
    run(seen(4, 0.0))
  assert kept() == 4


def test_shares_come_from_the_episodes_not_from_the_file(cfg, tasks, tmp_path):
  found = record(cfg, tasks)
  path = gate.write(tmp_path, found | {"known_good": 0.0})
  assert gate.read(tmp_path)["known_good"] == 1.0
  path.write_text(json.dumps({"known_good": 1.0}))
  with pytest.raises(ValueError, match="cannot be read"):
    gate.read(tmp_path)


@pytest.mark.parametrize("knob, value", [("known_good", -1), ("repeats", 0), ("agreement", 1.5), ("labels", 0), ("seconds", 0.0)])
def test_domains(knob, value):
  cfg = gate.defaults()
  gate.check(cfg)
  cfg[knob] = value
  with pytest.raises(ValueError, match=f"gate.{knob} is {value}"):
    gate.check(cfg)


# ---- labels


@pytest.fixture
def stored(tmp_path, episode):
  """Ten episodes: passes at even tries, the last one unreadable, one of them lost."""
  with EpisodeStore(tmp_path / "episodes") as store:
    raws = [1, 0] * 4 + [-1, None]
    keys = [store.add(episode(raw, index=i), i) for i, raw in enumerate(raws)]
  return tmp_path, keys


def test_labels_are_kept_and_can_be_changed(stored):
  folder, keys = stored
  assert labels.read(folder) == [] and labels.measured(folder) is None
  labels.put(folder, {keys[0]: True, keys[1]: True}, by="me")
  labels.put(folder, {keys[1]: False})
  assert labels.read(folder) == [(True, True, 0), (False, False, 1)]


def test_what_never_reached_the_grader_says_nothing_of_it(stored):
  folder, keys = stored
  labels.put(folder, {key: False for key in keys})
  found = labels.measured(folder)
  assert found.n == 8 and found.fail_pass == 4 and found.agreement == pytest.approx(0.5)


def test_labels_of_an_unknown_episode_are_refused_whole(stored):
  import sqlite3

  folder, keys = stored
  with pytest.raises(sqlite3.IntegrityError):
    labels.put(folder, {keys[0]: True, 10**6: True})
  assert labels.read(folder) == []


def test_a_label_goes_with_an_episode_that_is_taken_back(stored):
  folder, keys = stored
  labels.put(folder, {keys[0]: True, keys[7]: False})
  with EpisodeStore(folder / "episodes", start_update=5):
    pass
  assert labels.read(folder) == [(True, True, 0)]


def test_the_gate_reads_labels(cfg, tasks, stored):
  folder, keys = stored
  import copy

  strict = copy.deepcopy(cfg)
  with strict.unlocked():
    strict.gate.known_good = strict.gate.do_nothing = 0
    strict.gate.labels = 8
  labels.put(folder, {key: bool(i % 2) for i, key in enumerate(keys)})  # every verdict contradicted
  with pytest.raises(gate.GateClosed, match=r"agrees with 0% of 8 hand labels, wanted 70%"):
    gate.gate(strict, tasks, None, folder)
  with strict.unlocked():
    strict.gate.labels = 9  # too few to say
  gate.gate(strict, tasks, None, folder)


def test_evenly_spread_samples():
  assert gate.spread(list(range(10)), 3) == [0, 3, 6]
  assert gate.spread([1, 2], 5) == [1, 2]
  assert np.diff(gate.spread(list(range(100)), 10)).tolist() == [10] * 9


def test_two_verdicts_on_two_screens_are_no_contradiction(tasks):
  """A computer that behaves differently each time may well end up passed once and failed once: that is not the grader's doing."""
  plays = lambda *screens: [gate.Played(do_nothing(tasks[0]), score, "", s) for score, s in zip((0.0, 1.0), screens)]
  assert gate._row("known-good", "t", plays("same", "same"))["contradiction"] is True
  assert gate._row("known-good", "t", plays("one", "other"))["contradiction"] is False
