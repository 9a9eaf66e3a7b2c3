"""What a run's episodes look like: curves, sample episodes and the final table. Everything finished is counted here, whatever
is trained on later."""

from __future__ import annotations

import collections

import numpy as np

from core.schema import End, Episode, Group
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
  }
  for name, flag in (("entropy_popup", True), ("entropy_plain", False)):
    picked = [s.notes["entropy"] / max(s.agent_tokens, 1) for s in steps if bool(s.notes.get("popup")) == flag]
    if picked:
      out[f"policy/{name}"] = float(np.mean(picked))
  return out


def learned(outs: list[dict]) -> dict[str, float]:
  """An update's optimiser steps as curves: totals added over the steps, then divided once; numbers averaged.

  The first step sees the very weights that sampled, so its drift is the mismatch between sampler and trainer.
  """
  if not outs:
    return {}
  totals = {k: sum([o[k] for o in outs]) for k in outs[0] if hasattr(outs[0][k], "count")}
  curves = {k: float(v.sum / max(float(v.count), 1.0)) for k, v in totals.items()}
  curves["policy/mismatch_kl"] = float(outs[0]["policy/drift_kl"].sum / max(float(outs[0]["policy/drift_kl"].count), 1.0))
  return curves | {k: float(np.mean([o[k] for o in outs])) for k in ("policy/loss", "policy/grad_norm")}


def update_curves(got: Gathered, outs: list[dict], useful: list[float], version: int, seconds: float) -> dict[str, float]:
  """One update's curves: what was gathered, what was dropped and why, what was learned, how fast."""
  curves = group_curves(got.groups) | episode_curves(got.episodes, version) | learned(outs)
  curves |= {f"episodes/dropped_{cause}": n / len(got.episodes) for cause, n in got.dropped.items()}
  return curves | {
    "replay/used": float(got.swapped),
    "rate/episodes_per_minute": 60 * len(got.episodes) / seconds,
    "rate/action_tokens_per_second": sum(e.action_tokens for e in got.episodes) / seconds,
    "rate/useful_tokens": float(np.mean(useful)) if useful else 0.0,
  }


def strip(episode: Episode) -> tuple[np.ndarray, str]:
  """(screens of an episode side by side, its goal, end and texts as Markdown): what TensorBoard shows of it."""
  lines = [f"{h + 1}. {s.text}" for h, s in enumerate(episode.steps)]
  head = f"**{episode.goal}** -> {episode.end_cause}, rewards {episode.rewards}"
  screens = [s.screen.pixels for s in episode.steps] or [np.zeros((1, 1, 3), np.uint8)]  # an infra error may leave no step
  return np.concatenate(screens, axis=1), "\n\n".join([head, *lines])


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
