"""Two policies on the same tasks: the arithmetic of the table, and what a cut comparison repeats."""

import json
import pathlib
import shutil

import pytest

import evaluate
from core.schema import Limits, Task
from tools import compare


def results(passes, lost=()):
  """Rows of a measurement. passes: {task: [1, 0, ...]}; (task, try) pairs in `lost` were not scored."""
  rows = []
  for task, tries in passes.items():
    for k, passed in enumerate(tries):
      scored = (task, k) not in lost
      cause = ("checker" if passed else "steps") if scored else "ResetFailed"
      rows.append({"task": task, "try": k, "success": bool(passed and scored), "scored": scored, "end_cause": cause, "steps": 1,
                   "popup": "none", "nats_popup": [], "nats_plain": [0.5]})  # fmt: skip
  return rows


def score(rows):
  task = Task("t", "g", "sim/phone", "f", 0, {}, Limits(14))
  return evaluate.score(rows, evaluate.HELD_OUT, 3, [task])


A = {"t1": [1, 0], "t2": [1, 1], "t3": [0, 0], "t4": [0, 0]}
B = {"t1": [1, 1], "t2": [1, 1], "t3": [1, 0], "t4": [0, 0]}


def test_the_table_by_hand():
  one, two = score(results(A)), score(results(B))
  assert (one.avg_at_k, two.avg_at_k, one.pass_at_k, two.pass_at_k) == pytest.approx((0.375, 0.625, 0.5, 0.75))
  assert (one.passes, one.attempted, one.finished, one.errors, one.tries, one.step_limit) == (3, 8, 8, {}, 2, 14)
  got = compare.difference(one, two, *(evaluate.by_task(results(x)) for x in (A, B)))
  # gaps 0.5, 0, 0.5, 0: 25 points, 100 sqrt(4 x 0.0625) / 4 = 12.5; one of the four tasks; 0.25 / 0.375 = 66.7% relative
  assert (got["points"], got["noise_points"], got["tasks"], got["relative_percent"]) == pytest.approx((25.0, 12.5, 1.0, 66.667), abs=1e-3)
  assert not got["above_noise"]  # 25 is exactly twice the noise, not above it
  assert got["noise_unpaired"] > got["noise_points"]


def test_a_lost_try_is_no_pass_and_is_shown():
  """The catalogue's example in small: passes over attempted, and over finished."""
  found = score(results(A, lost={("t3", 0), ("t4", 1)}))
  assert (found.passes, found.attempted, found.finished, found.errors) == (3, 8, 6, {"ResetFailed": 2})
  assert found.success_finished == pytest.approx(0.5) and found.avg_at_k == pytest.approx(0.375)


def test_a_score_of_zero_says_what_it_leaves_open():
  found = score(results({f"t{i}": [0] for i in range(96)}))
  assert found.noise_points == 0.0 and found.at_most_95 == pytest.approx(0.0307, abs=5e-5)
  assert "0.0 (95%: within 3.1)" in evaluate.table([("a", found)])[2]
  assert score(results(A)).at_most_95 is None


def test_relative_gain_from_nothing_is_not_a_number():
  none = {t: [0, 0] for t in A}
  got = compare.difference(score(results(none)), score(results(B)), *(evaluate.by_task(results(x)) for x in (none, B)))
  assert got["relative_percent"] is None and got["points"] == pytest.approx(62.5)


def test_policies_are_named_and_others_refused(copied_run):
  assert evaluate.load(str(copied_run)).name == "run:7"
  assert evaluate.load(f"{copied_run}:copied").name == "run:copied"
  for spec, words in ((f"{copied_run}:best", "wanted RUN, RUN:STEP or RUN:copied"), ("/nowhere", "cannot be read")):
    with pytest.raises(ValueError, match=words):
      evaluate.load(spec)


def test_another_exam_is_refused(copied_run):
  a, b = evaluate.load(str(copied_run)), evaluate.load(f"{copied_run}:copied")
  with b.cfg.unlocked():
    b.cfg.env.popup_chance = 0.1
  with pytest.raises(ValueError, match=r"differ in env.popup_chance \(0.4, 0.1\)"):
    compare.comparable(a, b)


@pytest.mark.slow
def test_cut_and_resumed_equals_straight(copied_run, tmp_path, compile_quickly):
  """Two step limits side by side; half of one file's lines are taken away, and the second run brings back the very same rows."""
  folder = pathlib.Path(shutil.copytree(copied_run, tmp_path / "run"))
  a, b = evaluate.load(f"{folder}:copied"), evaluate.load(str(folder))
  first = compare.compare(a, b, evaluate.HELD_OUT, 2, 0, [3, 5])
  assert [s["step_limit"] for s in first["scores"]] == [3, 3, 5, 5] and all(s["attempted"] == 8 for s in first["scores"])
  assert all(d["points"] == 0.0 for d in first["differences"])  # one policy under two names, with one set of sampling keys
  kept = sorted((folder / "eval" / "episodes").glob("*.jsonl"))
  assert len(kept) == 4
  whole = {p: sorted(p.read_text().splitlines()) for p in kept}
  lines = kept[0].read_text().splitlines(keepends=True)
  kept[0].write_text("".join(lines[: len(lines) // 2]))
  assert compare.compare(a, b, evaluate.HELD_OUT, 2, 0, [3, 5]) == first
  assert {p: sorted(p.read_text().splitlines()) for p in kept} == whole
  table = "\n".join(compare.markdown(first))
  assert "avg@k %" in table and "difference in points" in table and "relative gain %" in table and "no last action is rewritten" in table
  json.dumps(first, allow_nan=False)
