"""Which tasks are worth practising: the kept set, the hill and the cost, by hand."""

import json
import math
import pathlib
import shutil
import subprocess
import sys

import pytest

from core.find import ROOT
from tools import select_tasks

# 16 tries each: never, once, half, always; and one whose every try was lost to the computers
RESULTS = {"never": (0, 16), "once": (1, 16), "half": (8, 16), "always": (16, 16), "lost": (0, 0)}


def test_the_lesson_s_rule_keeps_what_was_solved_once():
  found = select_tasks.select(RESULTS, 1, None, 8, replay=False)
  assert found["kept"] == ["once", "half", "always", "lost"] and found["dropped"] == ["never"]
  assert found["unscored"] == ["lost"] and found["histogram"] == {0: 1, 1: 1, 8: 1, 16: 1}


def test_an_upper_edge_drops_what_has_nothing_left_to_teach():
  found = select_tasks.select(RESULTS, 1, 15, 8, replay=False)
  assert found["kept"] == ["once", "half", "lost"] and found["dropped"] == ["never", "always"]


def test_what_a_teaching_group_costs():
  found = select_tasks.select(RESULTS, 1, None, 8, replay=False)
  # by hand: of the C(16, 8) = 12870 eights, those without the one pass are C(15, 8) = 6435, so "once" teaches in half of them; of "half"
  # 1 is all-pass and 1 all-fail: 1 - 2/12870; the two ends never teach. Mean of four, and of the three that are kept
  half = 1 - 2 / 12870
  assert found["teaching_share"]["all"] == pytest.approx((0.5 + half) / 4)
  assert found["teaching_share"]["kept"] == pytest.approx((0.5 + half) / 3)
  assert found["episodes_per_teaching_group"]["kept"] == pytest.approx(8 / ((0.5 + half) / 3))


def test_replay_rescues_what_was_passed_once_and_nothing_else():
  found = select_tasks.select(RESULTS, 1, None, 8, replay=True)
  assert found["teaching_share"]["all"] == pytest.approx((0 + 1 + (1 - 1 / 12870) + 0) / 4)


def test_where_no_group_teaches_there_is_no_cost():
  found = select_tasks.select({"a": (0, 4), "b": (4, 4)}, 1, None, 4, replay=False)
  assert found["episodes_per_teaching_group"] == {"all": None, "kept": None}
  assert math.isinf(select_tasks.cost({"a": (0, 4)}, 4, False)[1])
  assert select_tasks.hours(None, 10, 60.0) is None


def test_hours_at_a_measured_speed():
  # 104 episodes a teaching group, 480 groups, 600 episodes a minute: 49920 / 600 / 60
  assert select_tasks.hours(104, 480, 600.0) == pytest.approx(1.3867, abs=1e-4)
  assert select_tasks.hours(104, 480, None) is None


def test_nothing_scored_is_no_selection():
  with pytest.raises(ValueError, match="not one try at 2 tasks could be scored"):
    select_tasks.select({"a": (0, 0), "b": (0, 0)}, 1, None, 8, False)


def test_the_first_tries_count():
  rows = {("a", k): {"success": k > 1, "scored": k != 3} for k in range(4)}
  assert select_tasks.outcomes(rows, 4) == {"a": (2, 3)} and select_tasks.outcomes(rows, 2) == {"a": (0, 2)}


def test_speed_is_the_run_s_own(tmp_path):
  assert select_tasks.speed(tmp_path) is None
  lines = [{"update": i, "rate/episodes_per_minute": x} for i, x in enumerate((100.0, 900.0, 1000.0))] + [{"update": 3}]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
  assert select_tasks.speed(tmp_path) == 900.0


def test_the_page_shows_the_hill():
  found = select_tasks.select(RESULTS, 1, None, 8, replay=False)
  found |= {"hours": {"all": 2.5, "kept": None}, "groups": 480, "episodes_per_minute": 600.0, "speed_from": "here"}
  page = select_tasks.report(found, 16)
  assert "0 of 16      1    0.0%" in page and "dropped" in page.splitlines()[1]
  assert "8 of 16      1   99.2%" in page  # the lesson's 0.992 at p = 0.5
  assert "2.50 hours for 480 of them" in page and "at 600 episodes a minute (here)" in page


@pytest.mark.slow
def test_the_command_line(copied_run, tmp_path):
  """A policy that has learnt nothing passes nothing: no task is kept, and the exit code says so."""
  folder = pathlib.Path(shutil.copytree(copied_run, tmp_path / "run"))
  command = [sys.executable, "tools/select_tasks.py", f"--workdir={folder}", "--tries=2"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
  assert done.returncode == 1, done.stderr[-2000:]
  assert not [line for line in done.stderr.splitlines() if line.startswith("I1") or line.startswith("I0")]  # what a library tells its log
  written = json.loads((folder / "tasks.json").read_text())
  assert written["kept"] == [] and len(written["dropped"]) == 4 and written["policy"] == "run:copied"
  assert all(tries == 2 for _, tries in written["passes"].values())
