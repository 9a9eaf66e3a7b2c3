"""Two policies on the same tasks: what is kept, what is repeated, and the arithmetic of the table."""

import json
import pathlib
import shutil

import pytest

import evaluate
from tools import compare

ABOUT = {"checkpoint": "7", "protocol": "held_out", "seed": 0, "steps": 14, "task_list": "abc"}


def results(path, passes, scored=None):
  """passes: {task: [1, 0, ...]}; every try scored unless it is among `scored`' missing."""
  found = compare.Results(path, ABOUT)
  for task, tries in passes.items():
    for k, passed in enumerate(tries):
      add(found, task, k, passed, (task, k) not in (scored or ()))
  return found


def add(found, task, index, passed, scored=True):
  import types

  cause = ("checker" if passed else "steps") if scored else "ResetFailed"
  found.add(
    types.SimpleNamespace(task_id=task, try_index=index, success=bool(passed and scored), scored=scored, end_cause=cause, steps=[1])
  )


A = {"t1": [1, 0], "t2": [1, 1], "t3": [0, 0], "t4": [0, 0]}
B = {"t1": [1, 1], "t2": [1, 1], "t3": [1, 0], "t4": [0, 0]}


def test_the_table_by_hand(tmp_path):
  a, b = results(tmp_path / "a.jsonl", A), results(tmp_path / "b.jsonl", B)
  one, two = compare.score("a", a, 2), compare.score("b", b, 2)
  assert (one["avg_at_k"], two["avg_at_k"], one["pass_at_k"], two["pass_at_k"]) == pytest.approx((0.375, 0.625, 0.5, 0.75))
  assert (one["passes"], one["attempted"], one["finished"], one["errors"]) == (3, 8, 8, 0)
  got = compare.difference(one, two, compare.by_task(a, 2), compare.by_task(b, 2))
  # gaps 0.5, 0, 0.5, 0: 25 points, 100 sqrt(4 x 0.0625) / 4 = 12.5; one of the four tasks; 0.25 / 0.375 = 66.7% relative
  assert (got["points"], got["noise_points"], got["tasks"], got["relative_percent"]) == pytest.approx((25.0, 12.5, 1.0, 66.667), abs=1e-3)
  assert not got["above_noise"]  # 25 is exactly twice the noise, not above it
  assert got["noise_unpaired"] > got["noise_points"]


def test_fewer_tries_are_the_first_ones(tmp_path):
  a = results(tmp_path / "a.jsonl", A)
  assert compare.by_task(a, 1) == {"t1": [1.0], "t2": [1.0], "t3": [0.0], "t4": [0.0]}


def test_a_lost_try_is_no_pass_and_is_shown(tmp_path):
  """The catalogue's example in small: passes over attempted, and over finished."""
  found = compare.score("a", results(tmp_path / "a.jsonl", A, scored={("t3", 0), ("t4", 1)}), 2)
  assert (found["passes"], found["attempted"], found["finished"], found["errors"]) == (3, 8, 6, 2)
  assert found["of_finished"] == pytest.approx(0.5) and found["avg_at_k"] == pytest.approx(0.375)


def test_a_score_of_zero_says_what_it_leaves_open(tmp_path):
  found = compare.score("a", results(tmp_path / "a.jsonl", {f"t{i}": [0] for i in range(96)}), 1)
  assert found["noise_points"] == 0.0 and found["at_most_95"] == pytest.approx(0.0307, abs=5e-5)


def test_relative_gain_from_nothing_is_not_a_number(tmp_path):
  a, b = results(tmp_path / "a.jsonl", {t: [0, 0] for t in A}), results(tmp_path / "b.jsonl", B)
  got = compare.difference(compare.score("a", a, 2), compare.score("b", b, 2), compare.by_task(a, 2), compare.by_task(b, 2))
  assert got["relative_percent"] is None and got["points"] == pytest.approx(62.5)


def test_what_is_kept_is_not_run_again_but_what_broke_is(tmp_path):
  path = tmp_path / "a.jsonl"
  results(path, A, scored={("t3", 0)})
  found = compare.Results(path, ABOUT)
  assert not found.missing("t1", 0) and found.missing("t3", 0) and found.missing("t1", 2) and found.fresh == 0
  add(found, "t3", 0, 1)
  again = compare.Results(path, ABOUT)
  assert not again.missing("t3", 0) and again.lost == 1 and len(again.rows) == 8


def test_a_line_that_a_kill_cut_is_run_again(tmp_path):
  path = tmp_path / "a.jsonl"
  results(path, A)
  path.write_bytes(path.read_bytes()[:-7])
  found = compare.Results(path, ABOUT)
  assert len(found.rows) == 7 and found.missing("t4", 1)
  add(found, "t4", 1, 0)
  assert len(compare.Results(path, ABOUT).rows) == 8


def test_another_measurement_and_a_repeated_try_are_refused(tmp_path):
  path = tmp_path / "a.jsonl"
  found = results(path, A)
  with pytest.raises(ValueError, match="holds a measurement of .*'steps': 14"):
    compare.Results(path, ABOUT | {"steps": 28})
  with pytest.raises(ValueError, match="holds try 0 of t1 twice"):
    add(found, "t1", 0, 1)


def test_policies_are_named_and_others_refused(copied_run):
  assert compare.load(str(copied_run)).name == "run:7"
  assert compare.load(f"{copied_run}:copied").name == "run:copied"
  for spec, words in ((f"{copied_run}:best", "wanted RUN, RUN:STEP or RUN:copied"), ("/nowhere", "cannot be read")):
    with pytest.raises(ValueError, match=words):
      compare.load(spec)


def test_another_exam_is_refused(copied_run):
  a, b = compare.load(str(copied_run)), compare.load(f"{copied_run}:copied")
  with b.cfg.unlocked():
    b.cfg.env.popup_chance = 0.1
  with pytest.raises(ValueError, match=r"differ in env.popup_chance \(0.4, 0.1\)"):
    compare.comparable(a, b)


@pytest.mark.slow
def test_cut_and_resumed_equals_straight(copied_run, tmp_path, compile_quickly):
  """Two step limits side by side; half of one file's lines are taken away, and the second run brings back the very same rows."""
  folder = pathlib.Path(shutil.copytree(copied_run, tmp_path / "run"))
  a, b = compare.load(f"{folder}:copied"), compare.load(str(folder))
  first = compare.compare(a, b, evaluate.HELD_OUT, 2, 0, [3, 5])
  assert [s["steps"] for s in first["scores"]] == [3, 3, 5, 5] and all(s["attempted"] == 8 for s in first["scores"])
  assert all(d["points"] == 0.0 for d in first["differences"])  # one policy under two names, with one set of sampling keys
  kept = sorted((folder / "eval" / "episodes").glob("*.jsonl"))
  assert len(kept) == 4
  whole = {p: sorted(p.read_text().splitlines()) for p in kept}
  lines = kept[0].read_text().splitlines(keepends=True)
  kept[0].write_text("".join(lines[: len(lines) // 2]))
  assert compare.compare(a, b, evaluate.HELD_OUT, 2, 0, [3, 5]) == first
  assert {p: sorted(p.read_text().splitlines()) for p in kept} == whole
  table = compare.markdown(first)
  assert "avg@2 %" in table and "difference in points" in table and "relative gain %" in table and "no last action is rewritten" in table
  json.dumps(first, allow_nan=False)
