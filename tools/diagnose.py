"""Which of the four faults flattens this curve? One command, from a workdir alone, in the order of lesson chapter 6.

  python -m tools.diagnose --workdir=runs/android                   verdict, figures, fix, where to look next
  python -m tools.diagnose --workdir=runs/android --json            the same for programs
  python -m tools.diagnose --workdir=runs/android --thresholds.agreement=0.8

Reads metrics.jsonl, summary.json, the episode store with its hand labels, and check_env.json (tools/check_env.py). What is not there is
passed over and said. Thresholds are rules of thumb. Exit code: 0 healthy, 10 environment, 11 grader, 12 collapse, 13 out of reach,
20 nothing measured yet, 2 the workdir cannot be read.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sqlite3
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
from absl import flags

if __package__ in (None, ""):  # python tools/diagnose.py
  sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from core.config import run_command
from core.find import nearest
from core.metrics import read_jsonl
from core.stats import agreement
from rollout import gate, labels

EXIT = {"healthy": 0, "environment": 10, "grader": 11, "collapse": 12, "out of reach": 13, "nothing measured": 20}
FIXES = {
  "environment": "No training setting can help. Play a known-good episode by hand, look at its last screen with your own eyes, mend the "
  "image, the reset or the checker, until it scores 1.",
  "grader": "Get a better grader: check the final state directly where you can (the file exists, the setting changed); give a judge "
  "the task's reference answer; show it more of the episode (the whole text, the last five screens).",
  "collapse": "Keep the tries different: a wider top of the clip band (agent.clip_high), temperature 1.0, a token-level mean "
  "(agent.average=token); smaller steps (practice.lr), the leash (practice.leash). Go on from a checkpoint before the fall.",
  "out of reach": "Change the tasks, not the optimiser: keep those that are passed at least once in k tries (tools/select_tasks.py, "
  "curriculum.solvable_tries), drop groups that cannot teach (agent.dynamic_sampling), replay successes (agent.replay), more tries a "
  "task (agent.group_size), new tasks at the edge (taskgen).",
  "healthy": "Nothing to mend.",
  "nothing measured": "Let the run write an update of practice first.",
}
NOTHING_LEFT = "Nothing is left to learn here: nearly every group passes. Stop, or give it harder tasks (tools/select_tasks.py)."
LOOK = {
  "environment": ["python -m tools.check_env --workdir={0}", "groups/spread and reward/success, exactly 0"],
  "grader": ["the labelled episodes on which people and grader differ (tools/episodes.py)", "python -m tools.check_env --workdir={0}"],
  "collapse": ["policy/entropy, groups/distinct_first_actions: when did they fall?", "policy/clipped_share, policy/grad_norm just before"],
  "out of reach": ["python -m tools.select_tasks --workdir={0}", "groups/all_fail; where the failed episodes stop (tools/episodes.py)"],
  "healthy": ["eval/held_out beside reward/success", "python -m tools.report --workdir={0}"],
  "nothing measured": ["python -m tools.check_env --workdir={0}"],
}


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "known_good": 1.0,  # environment: the known-good episodes score less
      "agreement": 0.70,  # grader: it agrees with hand labels on less
      "collapse": 0.2,  # collapse: entropy under this share of its start
      "all_fail": 0.80,  # out of reach: more of the last groups fail throughout
      "all_pass": 0.80,  # nothing left to learn: more of the last groups pass throughout
      "learnt": 0.9,  # from this share of passes on, tries that agree and low entropy are no collapse (core.metrics.Alarms)
      "window": 5,  # updates at the end that are averaged
      "labels": 30,  # fewer hand labels say too little
      "points": 5.0,  # hints: smaller changes of a score are no sign
      "limit_passes": 0.2,  # hints: share of passes that end on a limit, or with FAIL
    }
  )


def diagnose(
  known_good: float | None, agreement: float | None, entropy_start: float | None, entropy_end: float | None,
  all_fail_end: float | None, all_pass_end: float | None, thresholds: Mapping[str, float] | None = None,
) -> str:  # fmt: skip
  """ "environment", "grader", "collapse", "out of reach" or "healthy", checked in that order. Lesson chapter 6.

  known_good: score of the known-good episodes. agreement: share of hand labels on which the grader says the same. entropy: nats a
  token. all_fail_end, all_pass_end: shares of the last groups; over `all_pass` is healthy, with nothing left to learn. None = not
  measured: that check is passed over. ValueError for shares outside 0 to 1, negative or undefined entropies, unknown thresholds.
  """
  limit = defaults().to_dict()
  if unknown := sorted(set(thresholds or {}) - set(limit)):
    raise ValueError(f"no threshold {unknown[0]!r}{nearest(unknown[0], limit)}; there are: {', '.join(limit)}")
  limit |= thresholds or {}
  shares = {"known_good": known_good, "agreement": agreement, "all_fail_end": all_fail_end, "all_pass_end": all_pass_end}
  for name, value in shares.items():
    if value is not None and not 0.0 <= value <= 1.0:  # NaN fails too
      raise ValueError(f"{name} is {value}, wanted a share from 0 to 1, or None where it was not measured")
  for name, value in (("entropy_start", entropy_start), ("entropy_end", entropy_end)):
    if value is not None and not 0.0 <= value < float("inf"):
      raise ValueError(f"{name} is {value}, wanted nats from 0, or None where it was not measured")
  if known_good is not None and known_good < limit["known_good"]:
    return "environment"
  if agreement is not None and agreement < limit["agreement"]:
    return "grader"
  if None not in (entropy_start, entropy_end) and entropy_end < limit["collapse"] * entropy_start:
    return "collapse"
  if all_fail_end is not None and all_fail_end > limit["all_fail"]:
    return "out of reach"
  return "healthy"


class Run:
  """What a workdir holds: rows of metrics.jsonl, the known-good record, labels, and the episode index (read only; None = no store)."""

  def __init__(self, workdir: pathlib.Path, knobs: ml_collections.ConfigDict):
    if not workdir.is_dir():
      raise ValueError(f"--workdir={workdir} is no folder: give the folder of a run that train.py made")
    self.workdir, self.knobs = workdir, knobs
    metrics, summary, index = workdir / "metrics.jsonl", workdir / "summary.json", workdir / "episodes" / "index.sqlite"
    if not metrics.exists() and not (workdir / gate.FILE).exists():
      raise ValueError(f"{workdir} holds neither metrics.jsonl nor {gate.FILE}: give the folder of a run that train.py made")
    self.rows = read_jsonl(metrics) if metrics.exists() else []
    self.summary = json.loads(summary.read_text()) if summary.exists() else {}
    self.known, self.labels = gate.read(workdir), labels.read(workdir)
    self.index = index if index.exists() else None

  def sql(self, query: str, *values: Any) -> list[tuple]:
    if self.index is None:
      return []
    with contextlib.closing(sqlite3.connect(f"{self.index.as_uri()}?mode=ro", uri=True, timeout=60)) as db:
      return db.execute(query, values).fetchall()

  @property
  def window(self) -> int:
    """Updates at the start and at the end that are averaged: no more than half the run, so that a short one has both."""
    return max(1, min(self.knobs.window, len(self.rows) // 2))

  def mean(self, tag: str, rows: Sequence[Mapping[str, Any]]) -> float | None:
    values = [r[tag] for r in rows if r.get(tag) is not None]
    return statistics.fmean(values) if values else None

  def tail(self, tag: str) -> float | None:
    return self.mean(tag, self.rows[-self.window :])

  def head(self, tag: str) -> float | None:
    return self.mean(tag, self.rows[: self.window])

  @property
  def last_updates(self) -> tuple[int, int]:
    """First and last update of the window at the end."""
    updates = [r["update"] for r in self.rows[-self.window :]]
    return (updates[0], updates[-1]) if updates else (0, -1)

  def entropy(self) -> tuple[float | None, float | None]:
    """Nats a token at the first update and over the last window: of everything that was sampled, where the store has it (a run all of
    whose groups are equal trains on nothing, so that policy/entropy stops); else the curve policy/entropy."""
    query = """SELECT sum(json_extract(s.notes, '$.entropy')), sum(s.agent_tokens) FROM steps s JOIN episodes e ON e.id = s.episode_id
               WHERE e.replayed = 0 AND e.at_update BETWEEN ? AND ? AND json_extract(s.notes, '$.entropy') IS NOT NULL"""
    found = []
    first = self.rows[0]["update"] if self.rows else 0
    for begin, end in ((first, first), self.last_updates):
      nats, tokens = (self.sql(query, begin, end) or [(None, None)])[0]
      found.append(nats / tokens if nats is not None and tokens else None)
    return tuple(found) if None not in found else (self.head("policy/entropy"), self.tail("policy/entropy"))


def figures(run: Run) -> tuple[dict[str, float | None], list[str]]:
  """(figures by name, what could not be measured and how to measure it)."""
  missing, known, knobs = [], run.known, run.knobs
  good = known["known_good"] if known else None
  if good is None:
    won = any(r.get("reward/success") for r in run.rows)
    doubt = "ruled out only for the tasks that were passed" if won else "not ruled out, for not one try passed"
    missing.append(f"known-good episodes: run python -m tools.check_env --workdir={run.workdir}; a broken environment is {doubt}")
  agree, n = None, len(run.labels)
  if n >= knobs.labels:
    agree = agreement((label, grader) for label, grader, _ in run.labels).agreement
  elif known and known["contradictions"]:
    agree = known["right"]
    missing.append(f"hand labels: {n}, wanted {knobs.labels} or more; agreement is that with the known-good and do-nothing episodes")
  else:
    missing.append(f"agreement: {n} graded episodes have hand labels, wanted {knobs.labels} or more, best 100 (tools/episodes.py)")
  start, end = run.entropy()
  if start is None or end is None:
    missing.append("entropy: neither the episode store nor policy/entropy has it")
  out = {
    "known_good": good, "agreement": agree, "entropy_start": start, "entropy_end": end,
    "all_fail_end": run.tail("groups/all_fail"), "all_pass_end": run.tail("groups/all_pass"), "success_start": run.head("reward/success"),
    "success_end": run.tail("reward/success"), "do_nothing": known["do_nothing"] if known else None, "labels": n, "updates": len(run.rows),
  }  # fmt: skip
  if out["all_fail_end"] is None:
    missing.append("groups: no update of practice with a scored group yet")
  return out, missing


def hints(run: Run, found: Mapping[str, float | None]) -> list[str]:
  """Signs that reward is got without doing the task."""
  out, knobs = [], run.knobs
  if found["do_nothing"]:
    out.append(f"{100 * found['do_nothing']:.0f}% of the tasks examined pass with nothing done: their reward is free")
  before, after = run.summary.get("copying"), run.summary.get("practice")
  held = [r["eval/held_out"] for r in run.rows if r.get("eval/held_out") is not None]
  held = [*([before] if before is not None else []), *held, *([after] if after is not None else [])]
  if len(held) > 1 and None not in (found["success_start"], found["success_end"]):
    gain, fall = 100 * (found["success_end"] - found["success_start"]), 100 * (max(held[:-1]) - held[-1])
    if gain > knobs.points and fall > max(knobs.points, 2 * run.summary.get("noise_points", 0.0)):
      out.append(f"practice rose by {gain:.1f} points, held-out tasks fell by {fall:.1f} from their best: memorised, or the marker learnt")
  half = len(run.labels) // 2
  if half >= knobs.labels // 2:
    early, late = (agreement((label, grader) for label, grader, _ in part).agreement for part in (run.labels[:half], run.labels[half:]))
    if early - late > 0.15:
      out.append(f"the grader agreed with people on {100 * early:.0f}% of the earlier labels, on {100 * late:.0f}% of the later ones")
  return out + _endings(run) + _denied(run)


def _endings(run: Run) -> list[str]:
  """Passes that end on a limit, or with FAIL."""
  rows = run.sql(
    """SELECT e.end_cause IN ('steps', 'seconds'), json_extract(s.action, '$.kind') = 'fail', count(*) FROM episodes e
       LEFT JOIN steps s ON s.episode_id = e.id AND s.step = e.steps - 1
       WHERE e.success = 1 AND e.replayed = 0 AND e.at_update BETWEEN ? AND ? GROUP BY 1, 2""",
    *run.last_updates,
  )
  passes = sum(n for *_, n in rows)
  shares = {"end on a limit": sum(n for limit, _, n in rows if limit), "end with FAIL": sum(n for _, fail, n in rows if fail)}
  return [
    f"{100 * n / passes:.0f}% of the {passes} passes of the last updates {how}: read some; a score without doing ends so"
    for how, n in shares.items() if passes and n / passes > run.knobs.limit_passes
  ]  # fmt: skip


def _denied(run: Run) -> list[str]:
  """Passes of a judge beside the checker (env.judge.beside) that the checker denies."""
  query = "SELECT count(*), sum(success = 0) FROM episodes WHERE json_extract(notes, '$.judge') >= 1 AND success IS NOT NULL"
  ((n, denied),) = run.sql(query) or [(0, 0)]
  return [f"the checker denies {denied} of the judge's {n} passes: the judge can be pleased without doing the task"] if n and denied else []


def examine(workdir: str | os.PathLike, knobs: ml_collections.ConfigDict | None = None) -> dict[str, Any]:
  """Everything this tool says of a workdir, as plain values."""
  knobs = knobs or defaults()
  run = Run(pathlib.Path(os.path.abspath(workdir)), knobs)
  found, missing = figures(run)
  names = ("known_good", "agreement", "entropy_start", "entropy_end", "all_fail_end", "all_pass_end")
  verdict, remarks = diagnose(*(found[n] for n in names), knobs.to_dict()), []
  if verdict == "collapse" and found["success_end"] is not None and found["success_end"] >= knobs.learnt:
    verdict = "healthy"
    remarks.append(
      f"entropy fell to {found['entropy_end'] / found['entropy_start']:.0%} of its start, but {found['success_end']:.0%} of the tries "
      "pass: they agree because little is left to learn, which is no collapse"
    )
  if verdict == "healthy" and found["all_fail_end"] is None:
    verdict = "nothing measured"
  left = not (verdict == "healthy" and found["all_pass_end"] is not None and found["all_pass_end"] > knobs.all_pass)
  last = run.rows[-1] if run.rows else {}
  return {
    "workdir": str(run.workdir), "verdict": verdict, "left_to_learn": left, "figures": found, "thresholds": knobs.to_dict(),
    "not_measured": missing, "remarks": remarks, "hints": hints(run, found),
    "alarms": sorted(t.partition("/")[2] for t, v in last.items() if t.startswith("diagnosis/") and v),
    "fix": FIXES[verdict] if left else NOTHING_LEFT, "next": [line.format(workdir) for line in LOOK[verdict]],
  }  # fmt: skip


def text(found: Mapping[str, Any]) -> str:
  """The same for people."""
  f, t = found["figures"], found["thresholds"]
  number = lambda name, form="{:.1%}": "not measured" if f[name] is None else form.format(f[name])
  floor = None if f["entropy_start"] is None else t["collapse"] * f["entropy_start"]
  lines = [
    f"{found['workdir']}: {found['verdict'].upper()}" + ("" if found["left_to_learn"] else ", nothing left to learn"), "",
    f"  1 environment   known-good episodes pass   {number('known_good'):>13}   wanted {t['known_good']:.0%}",
    f"  2 grader        agrees with hand labels    {number('agreement'):>13}   wanted {t['agreement']:.0%} or more; {f['labels']} labels",
    f"  3 collapse      nats a token, start        {number('entropy_start', '{:.4f}'):>13}",
    f"                  nats a token, now          {number('entropy_end', '{:.4f}'):>13}"
    + ("" if floor is None else f"   wanted {floor:.4f} or more, until {t['learnt']:.0%} of the tries pass"),
    f"  4 out of reach  groups that all fail       {number('all_fail_end'):>13}   wanted {t['all_fail']:.0%} or less",
    f"    all learnt    groups that all pass       {number('all_pass_end'):>13}   over {t['all_pass']:.0%} nothing is left to learn",
    f"    tries passed  first updates              {number('success_start'):>13}",
    f"                  last updates               {number('success_end'):>13}   of {f['updates']} updates", "",
    f"fix: {found['fix']}",
  ]  # fmt: skip
  parts = {"look at": found["next"], "note": found["remarks"], "not measured": found["not_measured"], "reward hacking?": found["hints"],
           "alarm ringing": found["alarms"]}  # fmt: skip
  return "\n".join([*lines, *(f"{name}: {line}" for name, said in parts.items() for line in said)])


def main(argv: Sequence[str]) -> int:
  if argv[1:]:
    raise ValueError(f"{argv[1]} is no flag: write --workdir={argv[1]}")
  knobs = ml_collections.ConfigDict({name: FLAGS[f"thresholds.{name}"].value for name in defaults()})
  found = examine(FLAGS.workdir, knobs)
  print(json.dumps(found, indent=1) if FLAGS.json else text(found), flush=True)
  return EXIT[found["verdict"]]


FLAGS = flags.FLAGS


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder of a run that train.py made.", required=True)
  flags.DEFINE_bool("json", False, "Print JSON.")
  for _name, _value in defaults().items():
    _define = flags.DEFINE_integer if isinstance(_value, int) else flags.DEFINE_float
    _define(f"thresholds.{_name}", _value, "See tools.diagnose.defaults.", lower_bound=0)
  run_command(main, sqlite3.DatabaseError)
