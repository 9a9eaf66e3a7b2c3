"""What a run's episodes look like: curves, sample episodes and the final table. Everything finished is counted here, whatever
is trained on later."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import operator
import pathlib

import numpy as np

from core import blob, hosts
from core.metrics import read_jsonl
from core.schema import End, Episode, Group, Screen
from core.screens import write_atomic
from core.stats import agreement
from rollout.gather import Gathered


def group_curves(groups: list[Group]) -> dict[str, float]:
  """Shares of all-pass, all-fail and mixed groups, mean spread, and how many first actions differ inside a group."""
  scored = [g for g in groups if g.scored]
  if not scored:
    return {}
  kinds = collections.Counter(g.kind for g in scored)
  first = [len({e.steps[0].text for e in g.scored if e.steps}) for g in scored]
  return {
    "groups/all_pass": kinds["all_pass"] / len(scored),
    "groups/all_fail": kinds["all_fail"] / len(scored),
    "groups/mixed": kinds["mixed"] / len(scored),
    "groups/spread": float(np.mean([np.std([e.reward for e in g.scored]) for g in scored])),
    "groups/distinct_first_actions": float(np.mean(first)),
  }


def episode_curves(episodes: list[Episode], version: int) -> dict[str, float]:
  """Curves over fresh episodes. Lengths and entropies come from raw counts, not from the loss mask."""
  scored = [e for e in episodes if e.scored]
  broken = [len(e.notes.get("faults", ())) for e in episodes]  # attempts that an infra error ended and that were run again
  out = {"episodes/infra_error": (len(episodes) - len(scored) + sum(broken)) / max(len(episodes) + sum(broken), 1)}
  if not scored:
    return out
  steps = [s for e in scored for s in e.steps]
  ages = [version - e.oldest_version for e in scored if e.records]
  out |= {
    "reward/mean": float(np.mean([e.reward for e in scored])),
    "reward/success": float(np.mean([e.success for e in scored])),
    "episodes/steps": float(np.mean([len(e.steps) for e in scored])),
    "episodes/truncated": float(np.mean([e.end == End.TRUNCATED for e in scored])),
    "episodes/unreadable": float(np.mean([e.end_cause == "unreadable" for e in scored])),
    "episodes/age_mean": float(np.mean(ages)),
    "episodes/age_max": float(np.max(ages)),
    "policy/entropy_sampled": sum(s.notes["entropy"] for s in steps) / max(sum(s.agent_tokens for s in steps), 1),
  }
  opinions = [(e.success, e.notes["judge"] >= 1.0) for e in scored if "judge" in e.notes]  # of a judge beside the checker
  if opinions:
    beside = agreement(opinions)
    rates = {"agreement": beside.agreement, "true_pass_rate": beside.true_pass_rate, "false_pass_rate": beside.false_pass_rate}
    out |= {f"judge/{name}": rate for name, rate in rates.items() if rate is not None}
  for name, flag in (("entropy_popup", True), ("entropy_plain", False)):
    picked = [s.notes["entropy"] / max(s.agent_tokens, 1) for s in steps if bool(s.notes.get("popup")) == flag]
    if picked:
      out[f"policy/{name}"] = float(np.mean(picked))
  return out


def learned(outs: list[tuple[str, list[dict]]]) -> dict[str, float]:
  """An update's optimiser steps as curves: for each phase totals added over its steps, then divided once; numbers averaged.

  outs: (parameters moved, what its steps said) of each phase. The policy's first step sees the very weights that wrote the tokens of
  its version, so their drift is the mismatch between sampler and trainer. A critic's moments become its explained variance, which
  is left out where the returns do not differ. Steps that had nothing to learn from are counted where there were any.
  """
  curves: dict[str, float] = {}
  for key, said in outs:
    if not said:
      continue
    joined = {k: functools.reduce(operator.add, [o[k] for o in said]) for k in said[0] if isinstance(said[0][k], tuple)}
    fresh = joined.pop("policy/mismatch_kl", None) and said[0]["policy/mismatch_kl"]  # of the first step only
    for name, value in joined.items():
      explained, defined = value.explained_variance() if hasattr(value, "explained_variance") else (_mean(value), True)
      curves |= {name: float(explained)} if defined else {}
    if fresh and fresh.count > 0:
      curves["policy/mismatch_kl"] = _mean(fresh)
    curves |= {f"{key}/{k}": float(np.mean([o[k] for o in said])) for k in ("loss", "grad_norm")}
    curves |= {f"{key}/empty_steps": float(n)} if (n := sum(bool(o["empty"]) for o in said)) else {}
  return curves


def _mean(total) -> float:
  return float(total.sum / max(float(total.count), 1.0))


def update_curves(got: Gathered, outs: list, useful: list[float], version: int, seconds: float) -> dict[str, float]:
  """One update's curves: what was gathered, what was dropped and why, what was learned, how fast."""
  curves = group_curves(got.groups) | episode_curves(got.episodes, version) | learned(outs)
  curves |= {f"episodes/dropped_{cause}": n / len(got.episodes) for cause, n in got.dropped.items()}
  curves["rate/update_seconds"] = seconds
  if not got.episodes:  # an update that learns from stored episodes alone
    return curves
  return curves | {
    "replay/used": float(got.swapped),
    "rate/episodes_per_minute": 60 * len(got.episodes) / seconds,
    "rate/action_tokens_per_second": sum(e.action_tokens for e in got.episodes) / seconds,
    "rate/useful_tokens": float(np.mean(useful)) if useful else 0.0,
  }


def everyones(got: Gathered) -> Gathered:
  """What all processes of a run have gathered, for `update_curves`: without screens, prompts and what is kept."""
  if hosts.alone():
    return got
  nothing = Screen.of(np.zeros((1, 1, 3), np.uint8))

  def slim(e: Episode) -> Episode:
    steps = [dataclasses.replace(s, screen=nothing) for s in e.steps]
    own = lambda r: {f: getattr(r, f)[r.is_action] for f in ("tokens", "is_action", "logp", "version", "step")}
    none = np.zeros(0, np.int32)
    records = [dataclasses.replace(r, **own(r), image_place=none, image_step=none) for r in e.records]
    return dataclasses.replace(e, steps=steps, records=records, final_screen=None)

  groups = [dataclasses.replace(g, episodes=[slim(e) for e in g.episodes]) for g in got.groups]
  said = {"groups": groups, "episodes": [slim(e) for e in got.episodes], "dropped": dict(got.dropped), "swapped": got.swapped}
  text, arrays, _ = blob.encode(said)
  found = [blob.decode(*(bytes.fromhex(x) for x in one), lambda ref: nothing) for one in hosts.everyone([text.hex(), arrays.hex()])]
  joined = lambda name: sum((one[name] for one in found), start=[])
  dropped = sum((collections.Counter(one["dropped"]) for one in found), start=collections.Counter())
  swapped = sum(one["swapped"] for one in found)
  return Gathered([], joined("groups"), joined("episodes"), dropped, swapped, got.version, got.stopped)


def strip(episode: Episode) -> tuple[np.ndarray, str]:
  """(screens of an episode side by side, its goal, end and texts as Markdown): what TensorBoard shows of it."""
  lines = [f"{h + 1}. {s.text}" for h, s in enumerate(episode.steps)]
  head = f"**{episode.goal}** -> {episode.end_cause}, rewards {episode.rewards}"
  screens = [s.screen.pixels for s in episode.steps] or [np.zeros((1, 1, 3), np.uint8)]  # an infra error may leave no step
  return np.concatenate(screens, axis=1), "\n\n".join([head, *lines])


def show(metrics, episodes: list[Episode], update: int) -> None:
  """Sample episodes into TensorBoard."""
  for i, episode in enumerate(episodes):
    pixels, text = strip(episode)
    metrics.image(f"episode/{i}", pixels, update)
    metrics.text(f"episode/{i}", text, update)


THUMB = 160  # longest side of a screen in the picture of a group, in pixels
PASS, FAIL = (45, 138, 78), (176, 48, 48)


def group_picture(group: Group) -> tuple[np.ndarray, str]:
  """(the tries of a group as rows, each its verdict and its push as a bar before its screens, uint8 [H, W, 3]; what they are, as
  Markdown). The bar: green for a pass, red for a fail, as long as the push is large; a push of 0 is a sliver."""
  most = max((abs(e.advantage) for e in group.scored if e.advantage), default=0.0) or 1.0
  rows, lines = [], [f"**{group.episodes[0].goal}**, group {group.id}, {group.kind}"]
  for e in group.episodes:
    screens = [s.screen.pixels[:: _stride(s.screen), :: _stride(s.screen)] for s in e.steps] or [np.zeros((8, 8, 3), np.uint8)]
    bar = np.full((len(screens[0]), THUMB // 4, 3), 255, np.uint8)
    bar[2:-2, : max(2, round(THUMB // 4 * abs(e.advantage or 0.0) / most))] = PASS if e.success else FAIL
    rows.append(np.concatenate([bar, *screens], axis=1))
    push = "no push" if e.advantage is None else f"push {e.advantage:+.3f}"
    lines.append(f"{e.try_index + 1}. {'pass' if e.success else 'fail'} ({e.end_cause}), {len(e.steps)} steps, {push}")
  wide = max(r.shape[1] for r in rows)
  rows = [np.pad(r, ((1, 1), (0, wide - r.shape[1]), (0, 0)), constant_values=255) for r in rows]
  return np.concatenate(rows), "\n\n".join(lines)


def _stride(screen) -> int:
  return -(-max(screen.pixels.shape) // THUMB)


def show_groups(metrics, groups: list[Group], update: int) -> None:
  """Groups into TensorBoard, tries as rows."""
  for i, group in enumerate(groups):
    pixels, text = group_picture(group)
    metrics.image(f"group/{i}", pixels, update)
    metrics.text(f"group/{i}", text, update)


def progress_values(curves: dict[str, float]) -> dict[str, float | None]:
  """What the progress line says of an update."""
  mixed = curves.get("groups/mixed")
  return {
    "success": curves.get("reward/success"), "all_equal": None if mixed is None else 1 - mixed, "entropy": curves.get("policy/entropy"),
    "explained": curves.get("critic/explained_variance"), "episodes_a_minute": curves.get("rate/episodes_per_minute"),
  }  # fmt: skip


def conclude(workdir: pathlib.Path, evals: dict[str, dict], final: dict[str, dict], about: dict) -> str:
  """Writes summary.json and returns the table. final: the practised policy's scores by protocol; about: facts of the run."""
  result = summary(evals, final)
  rows = read_jsonl(workdir / "metrics.jsonl")[-5:]  # where practice stands: what share of the groups cannot teach any more
  for k in ("all_fail", "all_pass"):
    result[f"{k}_end"] = float(np.mean([r.get(f"groups/{k}", 0.0) for r in rows])) if rows else None
  result |= about
  write_atomic(workdir / "summary.json", (json.dumps(result, indent=2) + "\n").encode())
  return table(result, evals["copying_held_out"], final["held_out"])


def summary(evals: dict[str, dict], final: dict[str, dict]) -> dict:
  """summary.json without what the run itself knows. evals: scores of the copied policy by name; final: of the practised one."""
  copied, practised = evals["copying_held_out"], final["held_out"]
  return {
    "clean": evals["copying_clean"]["success"],
    "copying": copied["success"],
    "practice": practised["success"],
    "clean_greedy": evals["copying_clean_greedy"]["success"],
    "copying_greedy": evals["copying_held_out_greedy"]["success"],
    "practice_greedy": final["held_out_greedy"]["success"],
    "practice_clean": final["clean"]["success"],
    "in_domain": final["in_domain"]["success"],
    "n": practised["attempted"],
    "n_tasks": practised["n_tasks"],
    "noise_points": practised["noise_points"],
    "copying_noise_points": copied["noise_points"],
    "by_popup": {"copying": copied["by_popup"], "practice": practised["by_popup"]},
  }


def table(s: dict, copied: dict, practised: dict) -> str:
  """The result as a person reads it."""
  pct = lambda x: f"{100 * x:5.1f}%"
  share = lambda pair: f"{100 * pair[0] / max(pair[1], 1):5.1f}% of {pair[1]:3d}"
  kinds = sorted(set(copied["by_popup"]) | set(practised["by_popup"]))
  rows = [
    "", f"{s['config']}, agent {s['agent']}, seed {s['seed']}: copying {pct(s['copying'])} -> practice {pct(s['practice'])} "
    f"on {s['n_tasks']} held-out tasks, n = {s['n']} episodes, +- {s['noise_points']:.1f} points "
    f"({100 * (s['practice'] - s['copying']):+.1f} points, {s['seconds']:.0f} s)", "",
    f"{'held-out, temperature 1.0':34}{'copying':>16}{'practice':>16}",
    f"{'without pop-ups':34}{pct(s['clean']):>16}{pct(s['practice_clean']):>16}",
    f"{'with pop-ups':34}{pct(s['copying']):>16}{pct(s['practice']):>16}",
    f"{'with pop-ups, greedy':34}{pct(s['copying_greedy']):>16}{pct(s['practice_greedy']):>16}",
    *(f"{'  episodes with ' + k if k != 'none' else '  episodes without a pop-up':34}"
      f"{share(copied['by_popup'].get(k, [0, 0])):>16}{share(practised['by_popup'].get(k, [0, 0])):>16}" for k in kinds),
    f"{'unreadable':34}{pct(copied['unreadable']):>16}{pct(practised['unreadable']):>16}",
    f"{'nats an action on pop-up screens':34}{copied['entropy_popup'] or 0:16.2f}{practised['entropy_popup'] or 0:16.2f}",
    f"{'nats an action on other screens':34}{copied['entropy_plain'] or 0:16.2f}{practised['entropy_plain'] or 0:16.2f}",
    f"groups of the last 5 updates: all-fail {pct(s['all_fail_end'] or 0)}, all-pass {pct(s['all_pass_end'] or 0)}",
    f"in-domain (practised tasks, new keys): {pct(s['in_domain'])}",
  ]  # fmt: skip
  return "\n".join(rows)
