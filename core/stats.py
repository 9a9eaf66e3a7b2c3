"""The small arithmetic of practice: what teaches, what it costs, how noisy a score is. Plain Python floats, or numpy.

Every function assumes that tries are independent unless it says otherwise. Wrong input is a ValueError, never a NaN.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np


def chance_of_no_surprise(surprise: float, steps: int) -> float:
  """Chance that nothing unexpected happens on any of `steps` steps: (1 - s)^H (lesson chapter 0)."""
  return (1.0 - _chance("surprise", surprise)) ** _whole("steps", steps, 0)


def chance_of_a_pass(p: float, tries: int) -> float:
  """Chance of at least one pass in `tries` tries: 1 - (1 - p)^k. What a task needs to survive "solved at least once"."""
  return _not_all_fail(_chance("p", p), _whole("tries", tries, 0))


def teaching_share(p: float, group_size: int, replay: bool = False) -> float:
  """Share of groups that teach: at least one pass and one fail among G tries (lesson chapter 3).

  1 - p^G - (1 - p)^G; with replay an all-fail group is rescued by a stored success, so 1 - p^G. The replay form takes it
  that a success is in store: a task that was never passed (p = 0) has none.
  """
  p, size = _chance("p", p), _whole("group_size", group_size, 1)
  return max(0.0, (1.0 if replay else _not_all_fail(p, size)) - p**size)


def episodes_per_teaching_group(p: float, group_size: int, replay: bool = False) -> float:
  """Episodes spent for one group that teaches: G / share (lesson chapter 3); infinite where no group ever teaches."""
  share = teaching_share(p, group_size, replay)
  return group_size / share if share > 0 else math.inf


def measured_teaching_share(passes: int, tries: int, group_size: int, replay: bool = False) -> float:
  """`teaching_share` of a task from its passes in some tries, without knowing p. Unbiased where the tries fill a group: the share of
  their subsets of G that hold both kinds, which no plug-in of passes / tries gives; with fewer, p is (passes + 1) / (tries + 2)."""
  c, n, size = _whole("passes", passes, 0), _whole("tries", tries, 1), _whole("group_size", group_size, 1)
  if c > n:
    raise ValueError(f"measured_teaching_share got {c} passes in {n} tries")
  if size > n:
    return teaching_share((c + 1) / (n + 2), size, replay and c > 0)
  not_all_pass = pass_at_k(n, n - c, size)
  return not_all_pass if replay and c > 0 else max(0.0, not_all_pass + pass_at_k(n, c, size) - 1.0)


def counting_noise(p: float, n: int) -> float:
  """Standard error, in points, of a score p (a fraction) measured on n tasks: 100 sqrt(p (1 - p) / n) (lesson chapter 7).

  0 at p = 0 and p = 1, where this formula knows no better: say so next to such a score.
  """
  p = _chance("p", p)
  return 100.0 * math.sqrt(p * (1.0 - p) / _whole("n", n, 1))


def clustered_noise(passes_by_task: Mapping[object, Sequence[float]] | Iterable[Sequence[float]]) -> float:
  """Standard error, in points, of the mean over all tries when tries at one task go together.

  passes_by_task: one sequence of passes (1) and fails (0) per task, as a list or by task id; lengths may differ. Residuals
  are added inside each task before they are squared: 100 sqrt(sum_t (sum_i (x_ti - mean))^2) / n, the clustered error of
  Miller 2024 (arXiv 2411.00640). With one try per task it is `counting_noise`; repeating the same tasks cannot push it
  below the spread between tasks. Infinite with a single task: nothing is known about others.
  """
  groups = passes_by_task.values() if isinstance(passes_by_task, Mapping) else passes_by_task
  tasks = [[_chance("a pass", float(x)) for x in tries] for tries in groups]
  tasks = [tries for tries in tasks if tries]
  n = sum(len(tries) for tries in tasks)
  if n == 0:
    raise ValueError("passes_by_task holds no tries: there is no score, so there is no noise")
  if len(tasks) == 1:
    return math.inf
  mean = math.fsum(x for tries in tasks for x in tries) / n
  return 100.0 * math.sqrt(math.fsum(math.fsum(x - mean for x in tries) ** 2 for tries in tasks)) / n


def pass_at_k(n: int, c: int, k: int) -> float:
  """Unbiased chance that k tries hold at least one pass, from c passes in n tries: 1 - C(n - c, k) / C(n, k).

  Codex, arXiv 2107.03374, eq 1. The naive 1 - (1 - c/n)^k is too low.
  """
  n, c, k = _whole("n", n, 1), _whole("c", c, 0), _whole("k", k, 1)
  if c > n or k > n:
    raise ValueError(f"pass_at_k got n={n}, c={c}, k={k}: passes c and tries k can be at most n")
  return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def grader_factor(error_rate: float) -> float:
  """What a grader with symmetric error rate q leaves of a real improvement: 1 - 2q (lesson chapter 6). Below 0 past q = 0.5."""
  return 1.0 - 2.0 * _chance("error_rate", error_rate)


def measured_success(true_share: float, false_pass_rate: float, false_fail_rate: float | None = None) -> float:
  """The score a grader reports when `true_share` of the episodes truly succeed (lesson chapter 6).

  true (1 - false_fail) + (1 - true) false_pass. With one rate q for both errors it is q + (1 - 2q) true.
  """
  true = _chance("true_share", true_share)
  false_pass = _chance("false_pass_rate", false_pass_rate)
  false_fail = false_pass if false_fail_rate is None else _chance("false_fail_rate", false_fail_rate)
  return true * (1.0 - false_fail) + (1.0 - true) * false_pass


def choice_entropy(probabilities: Iterable[float]) -> float:
  """Entropy of one choice in nats: -sum p ln p, with 0 ln 0 = 0 (lesson chapter 5). The chances must add up to 1."""
  chances = [_chance("a probability", p) for p in probabilities]
  if not math.isclose(math.fsum(chances), 1.0, abs_tol=1e-6):
    raise ValueError(f"the probabilities add up to {math.fsum(chances):g}, wanted 1")
  return math.fsum(-p * math.log(p) for p in chances if p > 0)


def updates_to_lift(p0: float, p1: float, band: float) -> int:
  """Updates to lift a chance from p0 to p1 if every one hits the top of the clip band: ceil(ln(p1/p0) / ln(1 + band))."""
  if not 0.0 < p0 <= p1 <= 1.0:
    raise ValueError(f"updates_to_lift got p0={p0}, p1={p1}: wanted 0 < p0 <= p1 <= 1")
  if not band > 0.0:
    raise ValueError(f"band is {band}, wanted a number above 0")
  return math.ceil(round(math.log(p1 / p0) / math.log1p(band), 9))  # rounded: 0.5 -> 0.6 at 0.2 is one update, not two


def perplexity(token_logps: Sequence[float]) -> float:
  """exp(-mean log-probability) of an action's tokens: 1 over their geometric mean; 1 = not surprised at all (chapter 3)."""
  logps = [float(x) for x in token_logps]
  if not logps or not all(x <= 0.0 for x in logps):
    raise ValueError(f"perplexity wants at least one log-probability, none above 0, got {logps[:5]}")
  return math.exp(-math.fsum(logps) / len(logps))


def points_gained(before: float, after: float) -> tuple[float, float]:
  """(points, percent relative) between two scores given in percent (lesson chapter 7). Prefer points."""
  if not before > 0.0:
    raise ValueError(f"before is {before}: a relative gain needs a start above 0")
  return after - before, 100.0 * (after - before) / before


def task_worth(n: int) -> float:
  """One task's worth in points on a test set of n tasks: 100 / n (lesson chapter 7)."""
  return 100.0 / _whole("n", n, 1)


def avg_at_k(passes_by_task: Mapping[str, Sequence[float]]) -> float:
  """Mean over tasks of each task's share of passes: every task counts once, however many tries it had. A fraction."""
  shares = _task_means(passes_by_task)
  return math.fsum(shares.values()) / len(shares)


def mean_pass_at_k(passes_by_task: Mapping[str, Sequence[float]], k: int) -> float:
  """Mean over tasks of the unbiased `pass_at_k`: the chance that k tries at a task of this list hold a pass."""
  _task_means(passes_by_task)
  return math.fsum(pass_at_k(len(tries), round(sum(tries)), k) for tries in passes_by_task.values()) / len(passes_by_task)


def paired_difference(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> tuple[float, float]:
  """(points, noise in points) of b over a on the same tasks: the mean over tasks of the difference of their shares of passes.

  The noise is the standard error of that mean, 100 sqrt(sum_t (d_t - mean)^2) / T: what both find easy or hard cancels, so that
  it is smaller than that of two scores taken apart (Miller 2024, arXiv 2411.00640, section 4.2). Infinite with a single task.
  """
  shares_a, shares_b = _task_means(a), _task_means(b)
  if shares_a.keys() != shares_b.keys():
    odd = sorted(shares_a.keys() ^ shares_b.keys())
    raise ValueError(f"{len(odd)} tasks were tried on one side only, {odd[0]} first: a paired comparison wants the same tasks")
  gaps = [shares_b[t] - shares_a[t] for t in shares_a]
  mean = math.fsum(gaps) / len(gaps)
  noise = 100.0 * math.sqrt(math.fsum((d - mean) ** 2 for d in gaps)) / len(gaps) if len(gaps) > 1 else math.inf
  return 100.0 * mean, noise


def unseen_bound(n: int) -> float:
  """The largest chance that n tries without a single pass (or fail) still leave open at 95%: 1 - 0.05^(1/n), about 3 / n."""
  return 1.0 - 0.05 ** (1.0 / _whole("n", n, 1))


class Agreement(NamedTuple):
  """A grader beside hand labels. The counts are of (label, grader): pass_pass, pass_fail, fail_pass, fail_fail."""

  pass_pass: int
  pass_fail: int
  fail_pass: int
  fail_fail: int

  @property
  def n(self) -> int:
    return sum(self)

  @property
  def agreement(self) -> float:
    """Share of the labelled episodes on which both say the same (lesson chapter 6)."""
    return (self.pass_pass + self.fail_fail) / self.n

  @property
  def noise_points(self) -> float:
    return counting_noise(self.agreement, self.n)

  @property
  def true_pass_rate(self) -> float | None:
    """Share of the true passes that the grader passes; None where no label is a pass."""
    passes = self.pass_pass + self.pass_fail
    return self.pass_pass / passes if passes else None

  @property
  def false_pass_rate(self) -> float | None:
    """Share of the true fails that the grader passes; None where no label is a fail."""
    fails = self.fail_pass + self.fail_fail
    return self.fail_pass / fails if fails else None

  @property
  def factor(self) -> float:
    """What is left of a real improvement: true-pass rate - false-pass rate; 1 - 2q where the labels hold one kind only."""
    true, false = self.true_pass_rate, self.false_pass_rate
    return grader_factor(1.0 - self.agreement) if true is None or false is None else true - false


def agreement(pairs: Iterable[tuple[bool, bool]]) -> Agreement:
  """Counts (label, grader) pairs, True being a pass. No pairs are no agreement: ValueError."""
  found = [(bool(label), bool(grader)) for label, grader in pairs]
  if not found:
    raise ValueError("no labels: agreement wants one labelled episode or more")
  return Agreement(*(found.count(kind) for kind in ((True, True), (True, False), (False, True), (False, False))))


def _task_means(passes_by_task: Mapping[str, Sequence[float]]) -> dict[str, float]:
  if not passes_by_task or not all(len(tries) for tries in passes_by_task.values()):
    raise ValueError("passes_by_task wants one task or more and a try or more of each")
  return {task: math.fsum(_chance("a pass", float(x)) for x in tries) / len(tries) for task, tries in passes_by_task.items()}


def _not_all_fail(p: float, tries: int) -> float:
  """1 - (1 - p)^k, exact for tiny p too: written as 1 - (1 - p) it would round a p of 1e-18 to no chance at all."""
  return float(tries > 0) if p == 1.0 else -math.expm1(tries * math.log1p(-p))


def _chance(name: str, value: float) -> float:
  if not 0.0 <= value <= 1.0:  # NaN fails too
    raise ValueError(f"{name} is {value}, wanted a fraction from 0 to 1")
  return float(value)


def _whole(name: str, value: int, least: int) -> int:
  number = operator.index(value)
  if number < least:
    raise ValueError(f"{name} is {number}, wanted at least {least}")
  return number


def action_probabilities(token_logps: Iterable[Sequence[float]], product: bool = False) -> np.ndarray:
  """One probability for each action from its tokens' log-probabilities: the geometric mean, or the product. f64 [actions]."""
  out = []
  for i, logps in enumerate(token_logps):
    logps = np.asarray(logps, np.float64)
    if logps.ndim != 1 or not len(logps) or not (logps <= 0.0).all():
      raise ValueError(f"action {i}: wanted one or more log-probabilities, none above 0, got {logps.tolist()[:5]}")
    out.append(math.exp(math.fsum(logps) / (1 if product else len(logps))))
  return np.array(out, np.float64)


def perplexity_keep(
  action_probabilities: Sequence[float], low: float = 0.5, high: float = 0.95, variant: str = "paper"
) -> np.ndarray:  # fmt: skip
  """Old actions that are neither too sure nor too strange: bool, low <= p <= high; variant "code" wants p > low. WebRL.

  The band on probabilities is one on perplexity 1 / p: 1.053 to 2.0. p must be that of the agent as it is now.
  """
  if variant not in ("paper", "code"):
    raise ValueError(f"variant is {variant!r}, wanted 'paper' (low <= p) or 'code' (low < p)")
  if not 0.0 <= low <= high <= 1.0:
    raise ValueError(f"the band is {low} to {high}, wanted 0 <= low <= high <= 1")
  p = np.asarray(action_probabilities, np.float64)
  if p.ndim != 1 or not ((p >= 0.0) & (p <= 1.0)).all():
    raise ValueError("action_probabilities: wanted a list of probabilities, each from 0 to 1")
  return (p >= low if variant == "paper" else p > low) & (p <= high)
