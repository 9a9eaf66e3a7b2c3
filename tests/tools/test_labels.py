import json
import subprocess
import sys
import threading
import time

import pytest

from core.find import ROOT
from rollout import labels as store_labels
from rollout.store import EpisodeStore
from tools import labels


@pytest.fixture
def workdir(tmp_path, episode):
  """16 episodes: ids 1 to 8 graded pass, 9 to 16 fail, but 15 is unreadable and 16 an infra error."""
  with EpisodeStore(tmp_path / "episodes") as store:
    for i, raw in enumerate([1] * 8 + [0] * 6 + [-1, None]):
      store.add(episode(raw, index=i), 0)
  return tmp_path


def test_figures_by_hand(workdir):
  # true passes: 1-6 and 9, 10 (graded fail); true fails: 7, 8 (graded pass) and 11-14. So 6 of 8 passes are seen, 2 of 6 fails passed.
  store_labels.put(workdir, {i: i <= 6 or i in (9, 10) for i in range(1, 17)})
  got = labels.figures(store_labels.measured(workdir))
  assert got["confusion"] == {"pass_pass": 6, "pass_fail": 2, "fail_pass": 2, "fail_fail": 4} and got["n"] == 14
  assert got["agreement"] == pytest.approx(10 / 14) and got["true_pass_rate"] == 0.75 and got["false_pass_rate"] == pytest.approx(1 / 3)
  assert got["factor"] == pytest.approx(0.75 - 1 / 3)  # what is left of a real improvement
  assert got["noise_points"] == pytest.approx(12.0736, abs=1e-3)  # 100 sqrt(10/14 x 4/14 / 14)


def test_the_lessons_grader_that_agrees_with_people_on_56_of_100(tmp_path, episode):
  with EpisodeStore(tmp_path / "episodes") as store:  # 22 errors on 50 passes, 22 on 50 fails
    for i in range(100):
      store.add(episode(int(i < 28 or 50 <= i < 72), index=i, steps=0), 0)
  store_labels.put(tmp_path, {i + 1: i < 50 for i in range(100)})
  found = store_labels.measured(tmp_path)
  assert labels.figures(found)["agreement"] == 0.56 and labels.figures(found)["factor"] == pytest.approx(0.12)
  assert labels.text(found).splitlines()[1:] == [
    "label: pass               28            22",
    "label: fail               22            28",
    "agreement 56.0% of 100 +- 5.0 points",  # 100 sqrt(0.56 x 0.44 / 100) = 4.96
    "true-pass rate 56.0%, false-pass rate 44.0%",
    "factor 0.120: a real gain of 10 points shows as 1.2 on the curve",
  ]


def test_labels_of_one_kind_take_both_errors_as_equally_likely(workdir):
  store_labels.put(workdir, {1: True, 2: True, 3: True, 9: True})
  got = labels.figures(store_labels.measured(workdir))
  assert got["false_pass_rate"] is None and got["factor"] == pytest.approx(1 - 2 * 0.25)
  assert "false-pass rate no such label" in labels.text(store_labels.measured(workdir))


def test_records_say_what_was_labelled_and_what_the_grader_said(workdir):
  assert labels.records(workdir) == [] and labels.jsonl(workdir) == b"" and not labels.withdraw(workdir, 1)
  store_labels.put(workdir, {16: True, 9: True, 1: False}, by="ann")
  lines = [json.loads(line) for line in labels.jsonl(workdir).splitlines()]
  assert [(r["episode_id"], r["episode"], r["label"], r["grader"]) for r in lines] == [
    (1, 0, False, True), (9, 8, True, False), (16, 15, True, None)]  # fmt: skip
  assert lines[0] | {"label": 0, "grader": 0} == {
    "episode_id": 1, "group": "group", "episode": 0, "update": 0, "task_id": "task", "checker": "", "end_cause": "checker", "label": 0,
    "grader": 0, "by": "ann"}  # fmt: skip


def test_a_label_is_taken_back_and_leaves_with_its_episode(workdir):
  store_labels.put(workdir, {1: True, 2: True})
  assert labels.withdraw(workdir, 1) and not labels.withdraw(workdir, 1)
  assert [r["episode_id"] for r in labels.records(workdir)] == [2]
  with EpisodeStore(workdir / "episodes", start_update=0):  # a resumed run writes update 0 again
    pass
  assert labels.records(workdir) == []


def test_the_run_writes_on_while_a_reader_looks_and_labels_are_given(workdir, episode):
  done = threading.Event()

  def label():
    while not done.is_set():
      store_labels.put(workdir, {1: True, 2: False})
      labels.withdraw(workdir, 2)
      time.sleep(0.01)  # SQLite's waiting is not fair: without a pause one writer could starve the other

  thread = threading.Thread(target=label)
  with EpisodeStore(workdir / "episodes") as store, labels.reading(labels.index_of(workdir)) as db:
    store._db.execute("PRAGMA busy_timeout = 10000")  # the run waits for a label no longer than this, or fails
    cursor = db.execute("SELECT id FROM episodes")  # a look that is not finished
    cursor.fetchone()
    thread.start()
    try:
      for i in range(20):
        store.add(episode(1, group="later", index=i, steps=1), 1)
    finally:
      done.set()
      thread.join(30)
    assert len(store) == 36 and len(cursor.fetchall()) == 15  # the look shows the moment at which it began
  assert not thread.is_alive() and [r["episode_id"] for r in labels.records(workdir)] == [1]


def test_a_folder_without_a_store_is_named():
  with pytest.raises(ValueError, match=r"--workdir=/nowhere holds no episodes/index\.sqlite: give the folder of a run"):
    labels.index_of("/nowhere")


def test_the_command_prints_and_exports(workdir, tmp_path):
  store_labels.put(workdir, {1: True, 9: False})
  run = lambda *args: subprocess.run([sys.executable, "-m", "tools.labels", *args], cwd=ROOT, capture_output=True, text=True, timeout=120)
  done = run(f"--workdir={workdir}", f"--export={tmp_path / 'out.jsonl'}")
  assert done.returncode == 0 and "agreement 100.0% of 2" in done.stdout
  assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
  lost = run("--workdir=/nowhere")
  assert lost.returncode == 2 and lost.stderr.startswith("labels.py: --workdir=/nowhere holds no") and lost.stderr.count("\n") == 1
