"""The fault behind a flat curve: the lesson's described runs, the order, and workdirs made by hand."""

import json
import subprocess
import sys

import pytest

from core.find import ROOT
from core.metrics import Metrics
from rollout import gate, labels
from rollout.store import EpisodeStore
from tools import diagnose
from tools.diagnose import diagnose as name

# The lesson's four runs at the end of training (chapter 6): known-good, agreement, all-equal groups, entropy at the end. Every entropy
# started at 1.10. All-equal is split here: D's reward of 0.38 and 90% equal groups leave about 55% all-fail, 35% all-pass.
LESSON = {
  "A": (0.0, 0.93, 1.10, 1.10, 1.00, 0.00, "environment"),
  "B": (1.0, 0.56, 1.10, 1.10, 0.20, 0.15, "grader"),
  "C": (1.0, 0.93, 1.10, 1.10, 0.92, 0.00, "out of reach"),
  "D": (1.0, 0.93, 1.10, 0.03, 0.55, 0.35, "collapse"),
}


@pytest.mark.parametrize("run", LESSON)
def test_chapter6_the_four_runs(run):
  *measured, verdict = LESSON[run]
  assert name(*measured) == verdict


def test_the_order_is_environment_grader_collapse_reach():
  """Everything is wrong at once; each fault that is mended uncovers the next."""
  found = [0.5, 0.5, 1.0, 0.1, 0.9, 0.0]
  seen = []
  for i, mended in ((0, 1.0), (1, 0.9), (3, 0.9), (4, 0.1)):
    seen.append(name(*found))
    found[i] = mended
  assert [*seen, name(*found)] == ["environment", "grader", "collapse", "out of reach", "healthy"]


def test_a_collapsed_run_never_looks_out_of_reach():
  assert name(1.0, 0.93, 1.10, 0.21, 1.0, 0.0) == "collapse"  # 0.21 < 0.2 x 1.10 = 0.22
  assert name(1.0, 0.93, 1.10, 0.23, 1.0, 0.0) == "out of reach"


def test_the_thresholds_themselves_are_still_healthy():
  assert name(1.0, 0.70, 1.0, 0.2, 0.80, 0.0) == "healthy"
  assert name(0.999, 0.70, 1.0, 0.2, 0.80, 0.0) == "environment"
  assert name(1.0, 0.699, 1.0, 0.2, 0.80, 0.0) == "grader"
  assert name(1.0, 0.70, 1.0, 0.199, 0.80, 0.0) == "collapse"
  assert name(1.0, 0.70, 1.0, 0.2, 0.801, 0.0) == "out of reach"


def test_groups_that_all_pass_are_no_fault():
  assert name(1.0, 0.93, 1.10, 0.6, 0.02, 0.95) == "healthy"


def test_what_was_not_measured_is_passed_over():
  assert name(None, None, None, None, 0.9, 0.0) == "out of reach"
  assert name(None, 0.5, 1.0, None, 0.9, 0.0) == "grader"
  assert name(None, None, None, None, None, None) == "healthy"


@pytest.mark.parametrize(
  "where, value, words",
  [(0, 1.2, "known_good is 1.2"), (1, float("nan"), "agreement is nan"), (2, -1.0, "entropy_start is -1.0"),
   (3, float("inf"), "entropy_end is inf"), (4, 92.0, "all_fail_end is 92.0, wanted a share"), (5, -0.1, "all_pass_end")],
)  # fmt: skip
def test_undefined_figures_are_refused(where, value, words):
  figures = [1.0, 0.9, 1.0, 0.9, 0.1, 0.1]
  figures[where] = value
  with pytest.raises(ValueError, match=words):
    name(*figures)


def test_thresholds_can_be_set_and_misspelt_ones_are_named():
  assert name(1.0, 0.75, 1.0, 0.9, 0.1, 0.1, {"agreement": 0.8}) == "grader"
  with pytest.raises(ValueError, match=r"no threshold 'agrement' \(did you mean agreement\?\)"):
    name(1.0, 0.75, 1.0, 0.9, 0.1, 0.1, {"agrement": 0.8})


# ---- workdirs


def known(good=1.0, idle=0.0, contradictions=0):
  """A record of 10 known-good and 10 do-nothing episodes."""
  rows = []
  for i in range(10):
    scores = [1.0] if i < 10 * good else [0.0] * 8
    scores = [0.0, *scores] if i < contradictions else scores
    rows.append({"kind": "known-good", "task": f"t{i}", "scores": scores, "causes": [], "contradiction": i < contradictions})
    rows.append({"kind": "do-nothing", "task": f"t{i}", "scores": [float(i < 10 * idle)], "causes": [], "contradiction": False})
  return {"config": "android", "computer": "sim/phone", "tasks": 10, "time": 0.0, **gate.totals(rows), "episodes": rows}


@pytest.fixture
def workdir(tmp_path, episode):
  """workdir(rows, ...) -> a folder as train.py leaves it. rows: (success, all_fail, all_pass, nats an action) by update; eight tries each,
  of two tokens an action. label(update, try index) -> what a person says, or None."""

  def make(rows, known_good=None, label=None, cause=None, held=(), summary=None):
    with Metrics(tmp_path) as metrics, EpisodeStore(tmp_path / "episodes") as store:
      said = {}
      for update, (success, fail, passed, nats) in enumerate(rows):
        row = {"reward/success": success, "groups/all_fail": fail, "groups/all_pass": passed, "groups/mixed": 1 - fail - passed}
        metrics.write(update, row | ({"eval/held_out": held[update]} if held else {}))
        for k in range(8):
          one = episode(int(k < 8 * success), group=f"u{update}", index=k)
          for step in one.steps:
            step.notes["entropy"] = nats
          if cause and k < 8 * success:
            one.end_cause = cause
          key = store.add(one, update)
          if label is not None and label(update, k) is not None:
            said[key] = label(update, k)
    if known_good is not None:
      gate.write(tmp_path, known_good)
    if said:
      labels.put(tmp_path, said)
    if summary:
      (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path

  return make


RISING = [(0.25 + 0.05 * u, 0.3, 0.1, 2.0) for u in range(12)]


def verdict(folder, **knobs):
  limits = diagnose.defaults()
  limits.update(knobs)
  return diagnose.examine(folder, limits)


def test_a_healthy_workdir_and_what_it_lacks(workdir):
  found = verdict(workdir(RISING))
  assert found["verdict"] == "healthy" and found["left_to_learn"]
  assert found["figures"]["entropy_start"] == pytest.approx(1.0)  # 2 nats an action of 2 tokens
  said = " ".join(found["not_measured"])
  assert "known-good" in said and "hand labels" in said and "not ruled out" not in said  # it has passed tasks


def test_environment_from_its_workdir_alone(workdir):
  flat = [(0.0, 1.0, 0.0, 2.0)] * 12
  assert verdict(workdir(flat, known(good=0.0)))["verdict"] == "environment"


def test_out_of_reach_from_its_workdir_alone(workdir):
  assert verdict(workdir([(0.0, 1.0, 0.0, 2.0)] * 12, known()))["verdict"] == "out of reach"


def test_collapse_is_read_from_what_was_sampled(workdir):
  """Groups are all equal, so that nothing is trained on and policy/entropy is no longer drawn: the stored tries still say it."""
  found = verdict(workdir([(0.5, 0.2, 0.2, 2.0)] * 6 + [(0.375, 0.55, 0.4, 0.1)] * 6, known()))
  assert found["verdict"] == "collapse" and found["figures"]["entropy_end"] == pytest.approx(0.05)


def test_low_entropy_where_nearly_all_is_passed_is_no_collapse(workdir):
  found = verdict(workdir([(0.5, 0.2, 0.2, 2.0)] * 6 + [(1.0, 0.0, 1.0, 0.1)] * 6, known()))
  assert (found["verdict"], found["left_to_learn"]) == ("healthy", False)
  assert "entropy fell to 5% of its start" in found["remarks"][0] and "Nothing is left" in found["fix"]


def test_a_grader_that_people_contradict(workdir):
  """8 tries an update, 2 of them passed; people fail one of those and pass two of the others: 5 of 8 agree."""
  found = verdict(workdir([(0.25, 0.3, 0.1, 2.0)] * 12, known(), label=lambda u, k: k in (1, 2, 3)))
  assert found["figures"]["agreement"] == pytest.approx(5 / 8) and found["verdict"] == "grader"


def test_a_few_labels_say_nothing(workdir):
  found = verdict(workdir(RISING, known(), label=lambda u, k: k > 3 if u < 3 else None))
  assert found["figures"]["labels"] == 24 and found["figures"]["agreement"] is None
  assert "24 graded episodes have hand labels, wanted 30" in " ".join(found["not_measured"])


def test_without_labels_a_grader_that_contradicts_itself_is_named(workdir):
  """All known-good episodes pass, 7 of 10 at the second go: 7 wrong verdicts of 27, and 0.74 is above 0.70; with 10, 20 of 30."""
  folder = workdir(RISING, known(contradictions=7))
  assert verdict(folder)["figures"]["agreement"] == pytest.approx(20 / 27)
  gate.write(folder, known(contradictions=10))
  found = verdict(folder)
  assert found["figures"]["agreement"] == pytest.approx(20 / 30) and found["verdict"] == "grader"


def test_hints_of_reward_without_the_task(workdir):
  held = [0.6 - 0.03 * u for u in range(12)]  # falls by 33 points while practice rises by more than 5
  found = verdict(workdir(RISING, known(idle=0.2), cause="steps", held=held))
  said = " ".join(found["hints"])
  assert "20% of the tasks examined pass with nothing done" in said
  assert "held-out tasks fell by 33.0" in said
  assert "passes of the last updates end on a limit" in said
  assert found["verdict"] == "healthy"  # hints are no verdict


def test_a_sound_run_has_no_hints(workdir):
  assert verdict(workdir(RISING, known(), held=[0.3 + 0.02 * u for u in range(12)]))["hints"] == []


def test_agreement_that_falls_is_a_hint(workdir):
  right = lambda u, k: k < 8 * RISING[u][0]
  found = verdict(workdir(RISING, known(), label=lambda u, k: right(u, k) if u < 6 else right(u, k) != (k < 3)))
  assert "100% of the earlier labels, on 62% of the later" in " ".join(found["hints"])  # 3 of 8 wrong: 0.625


def test_a_judge_whom_the_checker_denies(workdir, episode):
  folder = workdir(RISING, known())
  with EpisodeStore(folder / "episodes") as store:
    for i, (judge, checker) in enumerate([(1.0, 1), (1.0, 0), (1.0, 0), (0.0, 0)]):
      one = episode(checker, group="judged", index=i)
      one.notes["judge"] = judge
      store.add(one, 11)
  assert "denies 2 of the judge's 3 passes" in " ".join(verdict(folder)["hints"])


def command(folder, *more):
  done = subprocess.run([sys.executable, "tools/diagnose.py", f"--workdir={folder}", *more], cwd=ROOT, capture_output=True, text=True,
                        timeout=120)  # fmt: skip
  return done.returncode, done.stdout, done.stderr


def test_the_command_line(workdir):
  folder = workdir([(0.0, 1.0, 0.0, 2.0)] * 12, known())
  code, out, _ = command(folder)
  assert code == 13 and "OUT OF REACH" in out and "100.0%   wanted 80% or less" in out and "select_tasks" in out
  code, out, _ = command(folder, "--json", "--thresholds.all_fail=1.0")
  assert code == 0 and json.loads(out)["verdict"] == "healthy"
  code, _, err = command(folder, "--thresholds.all_fial=1.0")
  assert code == 2 and err.count("\n") == 1 and "all_fial" in err


def test_what_is_no_run_is_one_line(tmp_path):
  code, _, err = command(tmp_path)
  assert code == 2 and err.count("\n") == 1 and "holds neither metrics.jsonl nor check_env.json" in err
  code, _, err = command(tmp_path / "nowhere")
  assert code == 2 and "is no folder" in err


def test_a_run_that_has_not_practised_is_not_called_healthy(tmp_path):
  (tmp_path / "metrics.jsonl").write_text("")
  found = verdict(tmp_path)
  assert found["verdict"] == "nothing measured" and diagnose.EXIT[found["verdict"]] == 20
  gate.write(tmp_path, known(good=0.5))
  assert verdict(tmp_path)["verdict"] == "environment"  # a check before training is enough for that
