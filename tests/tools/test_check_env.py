"""The command that asks whether the computers can be won."""

import json
import subprocess
import sys

import pytest

from core.find import ROOT
from rollout import gate
from tools import check_env


def command(*arguments):
  done = subprocess.run([sys.executable, "tools/check_env.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
  return done.returncode, done.stdout, done.stderr


def test_the_embedded_phone_passes(tmp_path):
  code, out, err = command("--config=configs/android.py", "--tasks=3", f"--workdir={tmp_path}/run")
  assert code == 0, err
  assert "100.0% of 3" in out and "check_env.json" in out
  record = gate.read(tmp_path / "run")
  assert record["n_known_good"] == record["n_do_nothing"] == 3 and gate.complaint(record) == ""


@pytest.mark.parametrize(
  "arguments, words",
  [
    (["--tasks=3"], "wanted --config=FILE or --workdir=RUN"),
    (["--workdir=/nowhere"], "cannot be read"),
    (["--config=configs/androit.py"], "did you mean configs/android.py?"),
    (["--config=configs/android.py", "--tasks=-1"], "tasks"),
    (["--config=configs/android.py", "--config.env.popup_chance=2.0"], "popup_chance"),
  ],
)
def test_what_cannot_be_run_is_one_line(arguments, words, capsys):
  assert check_env.main(["check_env.py", *arguments]) == 2
  said = capsys.readouterr().err
  assert said.count("\n") == 1 and words in said


def test_a_run_that_stands_is_examined_from_its_workdir(copied_run, capsys):
  assert check_env.main(["check_env.py", f"--workdir={copied_run}"]) == 0
  record = gate.read(copied_run)
  assert (record["tasks"], record["n_known_good"]) == (4, 4) and record["config"] == "android"
  assert "100.0% of 4" in capsys.readouterr().out


def test_a_broken_computer_is_exit_code_one(copied_run, capsys, monkeypatch):
  import envs.sim
  from envs.sim.base import SimEnv

  monkeypatch.setattr(SimEnv, "_act", lambda self, action: self.app.tick())
  assert check_env.main(["check_env.py", f"--workdir={copied_run}", "--tasks=2"]) == 1
  assert "DO NOT TRAIN: 2 of 2 scripted solutions did not pass" in capsys.readouterr().out
  assert json.loads((copied_run / gate.FILE).read_text())["known_good"] == 0.0
  assert envs.sim  # the suite itself is whole


def test_a_suite_without_solutions_says_so():
  rows = [{"kind": "do-nothing", "task": "t", "scores": [0.0], "causes": [], "contradiction": False}]
  page = check_env.table({"config": "c", "computer": "x", "tasks": 1, "episodes": rows, **gate.totals(rows)})
  assert "not measured" in page and "play one by hand" in page
