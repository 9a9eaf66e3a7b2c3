"""Gates before training: the computer can be won, doing nothing wins nothing, and the grader agrees with people.

Scripted episodes whose score is known (envs/canary.py) are played on the very computers that practice will have, and what came of
them is kept in check_env.json, which tools/diagnose reads. A scripted solution that fails is played again: one that passes then, on
the same final screen, convicts the grader, not the computer.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import ml_collections

from core.find import find
from core.knobs import require
from core.schema import SUCCESS, Screen, Task
from core.screens import write_atomic
from envs.canary import Canary, do_nothing, known_good
from rollout import labels

FILE = "check_env.json"
RERUNS = 2  # of an episode that an infra error ended


class GateClosed(ValueError):
  """Training would teach nothing, or the wrong thing. One line: what was measured, what is wanted, how to go on all the same."""


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "known_good": 8,  # practised tasks whose scripted solution must pass before training; 0 = off
      "do_nothing": 8,  # practised tasks that must not pass when nothing is done; 0 = off
      "repeats": 8,  # plays of a scripted solution until it passes
      "agreement": 0.70,  # least agreement of the grader with hand labels, where the workdir has some; 0 = off
      "labels": 30,  # fewer say too little
      "seconds": 600.0,  # longest wait for the next answer of a computer
    }
  )


def check(cfg: ml_collections.ConfigDict) -> None:
  """Domains of the knobs; each failure one line."""
  wanted = {
    "known_good": (cfg.known_good >= 0, "0 (off) or how many tasks"),
    "do_nothing": (cfg.do_nothing >= 0, "0 (off) or how many tasks"),
    "repeats": (cfg.repeats >= 1, "1 or more plays"),
    "agreement": (0 <= cfg.agreement <= 1, "0 (off) or a share up to 1"),
    "labels": (cfg.labels >= 1, "1 or more labelled episodes"),
    "seconds": (cfg.seconds > 0, "a number of seconds above 0"),
  }
  require("gate", cfg, wanted)


class Played(NamedTuple):
  """One play of a canary. score: 1.0, 0.0, or None where an infra error ended it (`cause` names it). screen: hash of the last screen."""

  canary: Canary
  score: float | None
  cause: str
  screen: str


class _Play:
  """A canary under way on one lease. `hear` every answer; a Played once it is over."""

  def __init__(self, lease: Any, canary: Canary):
    self.lease, self.canary, self.left, self.screen = lease, canary, collections.deque(canary.texts), ""
    lease.submit_reset(canary.task)

  def hear(self, result: Any) -> Played | None:
    if result.error is not None:
      return Played(self.canary, None, type(result.error).__name__, self.screen)
    info, over = result.value, True
    if result.op != "expire":
      self.screen, info = Screen.of(result.value[0]["screenshot"]).ref, result.value[-1]
      over = result.op == "step" and (result.value[2] or result.value[3])
    if over:
      return Played(self.canary, float(info["rewards"][SUCCESS] >= 1.0), "", self.screen)
    self.lease.submit_step(self.left.popleft()) if self.left else self.lease.submit_expire()
    return None


def play(computers: Any, canaries: Iterable[Canary], seconds: float) -> list[Played]:
  """Plays canaries on leased computers (envs.inside.Inside, envs.pool.Pool) and returns what came of each, in the order given."""
  waiting, running, done = collections.deque((i, c, RERUNS) for i, c in enumerate(canaries)), {}, {}
  heard = time.monotonic()
  while waiting or running:
    while waiting and (lease := computers.try_lease()) is not None:
      running[lease] = _Play(lease, waiting[0][1]), waiting.popleft()
    for lease, result in computers.wait(1.0):
      heard, (one, (i, canary, reruns)) = time.monotonic(), running[lease]
      played = one.hear(result)
      if played is not None:
        del running[lease]
        lease.release()
        if played.score is None and reruns:
          waiting.append((i, canary, reruns - 1))
        else:
          done[i] = played
    if time.monotonic() - heard > seconds:
      raise TimeoutError(
        f"no computer answered in {seconds:g} s, {len(running)} known episodes under way: see the workers, or gate.seconds"
      )
  return [done[i] for i in sorted(done)]


def solutions(suite: Any, computer: str, env_cfg: Any, tasks: Sequence[Task]) -> list[Canary]:
  """Known-good episodes: of every task given where the suite is a simulator, whose scripts write themselves; else of those tasks that the
  suite's canaries() solves. The script is read off an environment as practice has it, pop-ups included."""
  if suite.__name__ != "envs.sim":
    return [c for c in suite.canaries(computer, env_cfg) if c.score == 1.0]
  from envs.sim.base import expert_text

  env, found = suite.make(computer, env_cfg, quick=True).unwrapped, []
  for task in tasks:
    env.reset(options={"task": task})
    texts = []
    while not env.done:
      texts.append(expert_text(env))
      env.step(texts[-1])
    found.append(known_good(task, texts))
  return found


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
  """`count` tasks, evenly from the whole list; all of them where it has no more."""
  return [tasks[i * len(tasks) // count] for i in range(count)] if count < len(tasks) else list(tasks)


def examine(
  cfg: ml_collections.ConfigDict, knobs: ml_collections.ConfigDict, tasks: Sequence[Task], computers: Any, env: Any = None
) -> dict[str, Any]:
  """Plays known-good and do-nothing episodes and returns the record of check_env.json. cfg: a run's config; knobs: as `defaults`; env:
  the environment's knobs where they are not cfg.env, but what a checkpoint's policy needs."""
  suite = find("envs", cfg.env.computer.split("/")[0], having="make")
  scripts = solutions(suite, cfg.env.computer, env or cfg.env, spread(tasks, knobs.known_good)) if knobs.known_good else []
  idle = [do_nothing(task) for task in spread(tasks, knobs.do_nothing)] if knobs.do_nothing else []
  plays: dict[str, list[Played]] = collections.defaultdict(list)
  untouched = play(computers, idle, knobs.seconds)
  left = scripts
  for _ in range(knobs.repeats):
    for played in play(computers, left, knobs.seconds):
      plays[played.canary.task.id].append(played)
    left = [c for c in scripts if not any(p.score for p in plays[c.task.id])]
    if not left:
      break
  rows = [_row("known-good", c.task.id, plays[c.task.id]) for c in scripts]
  rows += [_row("do-nothing", p.canary.task.id, [p]) for p in untouched]
  return {"config": cfg.name, "computer": cfg.env.computer, "tasks": len(tasks), "time": time.time(), **totals(rows), "episodes": rows}


def _row(kind: str, task: str, plays: list[Played]) -> dict[str, Any]:
  scores, screens = [p.score for p in plays], {p.screen for p in plays if p.score is not None}
  return {
    "kind": kind, "task": task, "scores": scores, "causes": sorted({p.cause for p in plays} - {""}),
    # the same texts led to the same last screen, and it was passed one time and failed another
    "contradiction": len(set(scores) - {None}) == 2 and len(screens) == 1,
  }  # fmt: skip


def totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Shares over the tasks whose episode could be scored; None where there were none.

  known_good: the scripted solution passed at least once. first_go: at the first play. do_nothing: passed although nothing was done.
  contradictions: tasks whose one final screen got both verdicts. right: share of all verdicts that were the known one.
  """
  kinds = {kind: [r for r in rows if r["kind"] == kind and set(r["scores"]) - {None}] for kind in ("known-good", "do-nothing")}
  good, idle = kinds["known-good"], kinds["do-nothing"]
  first = lambda r: next(s for s in r["scores"] if s is not None)
  share = lambda hits, of: sum(hits) / len(of) if of else None
  verdicts = [s == 1.0 for r in good for s in r["scores"] if s is not None] + [first(r) == 0.0 for r in idle]
  return {
    "known_good": share([1.0 in r["scores"] for r in good], good), "first_go": share([first(r) == 1.0 for r in good], good),
    "do_nothing": share([first(r) == 1.0 for r in idle], idle), "contradictions": sum(r["contradiction"] for r in good),
    "right": share(verdicts, verdicts), "not_scored": sum(not set(r["scores"]) - {None} for r in rows),
    "n_known_good": len(good), "n_do_nothing": len(idle),
  }  # fmt: skip


def complaint(record: dict[str, Any]) -> str:
  """Why nobody should train on this, in one line; "" where there is no reason."""
  failed = [r["task"] for r in record["episodes"] if r["kind"] == "known-good" and r["scores"] and r["scores"][0] == 0.0]
  passed = [r["task"] for r in record["episodes"] if r["kind"] == "do-nothing" and 1.0 in r["scores"]]
  if record["contradictions"]:
    return (f"the grader contradicts itself: {record['contradictions']} of {record['n_known_good']} scripted solutions failed, then passed "
            f"on the same final screen, {failed[0]} first: mend the grader")  # fmt: skip
  if failed:
    return (
      f"{len(failed)} of {record['n_known_good']} scripted solutions did not pass, {failed[0]} first: mend the environment or its checker"
    )
  if passed:
    return (
      f"{len(passed)} of {record['n_do_nothing']} tasks pass although nothing is done, {passed[0]} first: mend their start state or checker"
    )
  if record["not_scored"]:
    causes = sorted({c for r in record["episodes"] for c in r["causes"]})
    return f"{record['not_scored']} known episodes could not be scored ({', '.join(causes)}): mend the computers"
  return ""


def write(workdir: str | os.PathLike, record: dict[str, Any]) -> pathlib.Path:
  """check_env.json, whole or not at all."""
  path = pathlib.Path(os.path.abspath(workdir)) / FILE
  path.parent.mkdir(parents=True, exist_ok=True)
  write_atomic(path, (json.dumps(record, indent=1) + "\n").encode())
  return path


def read(workdir: str | os.PathLike) -> dict[str, Any] | None:
  """The record of the last check in this workdir; None where there was none."""
  path = pathlib.Path(os.path.abspath(workdir)) / FILE
  if not path.exists():
    return None
  try:
    record = json.loads(path.read_text())
    return record | totals(record["episodes"])  # the shares are what the episodes say, whatever stands beside them
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path} cannot be read ({error!r}): run python -m tools.check_env again") from error


def gate(cfg: ml_collections.ConfigDict, tasks: Sequence[Task], computers: Any, workdir: str | os.PathLike, env: Any = None) -> str:
  """What train.py asks before it trains: GateClosed unless known episodes score as known and the labels, if any, bear the grader out.
  Returns what was seen, in one line. A larger record without complaint (tools/check_env.py) stays where this one has none either."""
  knobs, seen = cfg.gate, []
  if knobs.known_good or knobs.do_nothing:
    record, standing = examine(cfg, knobs, tasks, computers, env), read(workdir)
    path, why = pathlib.Path(os.path.abspath(workdir)) / FILE, complaint(record)
    if why or standing is None or complaint(standing) or len(standing["episodes"]) <= len(record["episodes"]):
      write(workdir, record)
    seen.append(f"{record['n_known_good']} scripted solutions pass, {record['n_do_nothing']} tasks do not pass by themselves")
    if why:
      raise GateClosed(
        f"not training on {cfg.env.computer}: {why}; see {path}; "
        "--config.gate.known_good=0 --config.gate.do_nothing=0 trains all the same"
      )
  found = labels.measured(workdir) if knobs.agreement else None
  if found and found.n >= knobs.labels and found.agreement < knobs.agreement:
    raise GateClosed(
      f"not training on {cfg.env.computer}: the grader agrees with {100 * found.agreement:.0f}% of {found.n} hand labels, wanted "
      f"{100 * knobs.agreement:.0f}%: mend the grader; --config.gate.agreement=0 trains all the same"
    )
  seen += [f"the grader agrees with {100 * found.agreement:.0f}% of {found.n} hand labels"] if found else []
  return f"gate: {'; '.join(seen) or 'off'}"
