"""What an evaluation keeps of its episodes: nothing is run twice but what the computers lost."""

import pytest

from rollout.results import Results, row_of

ABOUT = {"checkpoint": "7", "protocol": "held_out", "seed": 0, "steps": 14, "task_list": "abc"}
A = {"t1": [1, 0], "t2": [1, 1], "t3": [None, 0], "t4": [0, 0]}  # None: lost to the computers


@pytest.fixture
def results(tmp_path, episode):
  """results() -> the measurement of A, written anew; and how to add a try."""
  path = tmp_path / "a.jsonl"
  found = Results(path, ABOUT)
  add = lambda to, task, k, raw: to.add(episode(raw, task=task, index=k))
  for task, tries in A.items():
    for k, raw in enumerate(tries):
      add(found, task, k, raw)
  return path, found, add


def test_a_row_says_what_a_score_needs(episode):
  one = episode(1, task="t", index=3, steps=2)
  one.notes["popup"] = "notify/top"
  for step, nats, popup in zip(one.steps, (0.25, 0.75), (True, False)):
    step.notes |= {"entropy": nats, "popup": popup}
  got = row_of(one)
  assert (got["task"], got["try"], got["success"], got["scored"], got["steps"], got["popup"]) == ("t", 3, True, True, 2, "notify")
  assert (got["nats_popup"], got["nats_plain"]) == ([0.25], [0.75])
  assert row_of(episode(None))["scored"] is False and row_of(episode(0))["popup"] == "none"


def test_fewer_tries_are_the_first_ones(results):
  _, found, _ = results
  assert [(r["task"], r["try"], r["success"]) for r in found.first(1)] == [
    ("t1", 0, True),
    ("t2", 0, True),
    ("t3", 0, False),
    ("t4", 0, False),
  ]
  assert len(found.first(2)) == 8


def test_what_is_kept_is_not_run_again_but_what_broke_is(results):
  path, _, add = results
  found = Results(path, ABOUT)
  assert not found.missing("t1", 0) and found.missing("t3", 0) and found.missing("t1", 2) and found.fresh == 0
  add(found, "t3", 0, 1)
  again = Results(path, ABOUT)
  assert not again.missing("t3", 0) and again.lost == 1 and len(again.rows) == 8


def test_a_line_that_a_kill_cut_is_run_again(results):
  path, _, add = results
  path.write_bytes(path.read_bytes()[:-7])
  found = Results(path, ABOUT)
  assert len(found.rows) == 7 and found.missing("t4", 1)
  add(found, "t4", 1, 0)
  assert len(Results(path, ABOUT).rows) == 8


def test_another_measurement_and_a_repeated_try_are_refused(results):
  path, found, add = results
  with pytest.raises(ValueError, match="holds a measurement of .*'steps': 14"):
    Results(path, ABOUT | {"steps": 28})
  with pytest.raises(ValueError, match="holds try 0 of t1 twice"):
    add(found, "t1", 0, 1)
