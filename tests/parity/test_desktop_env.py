"""Every built-in metric against desktop-env's own, on the generated files of the suite: the same score for every case.

PRACTICE_DESKTOP_ENV names an interpreter made by requirements-desktop-env.txt; its metrics run as they do for users (env.evaluator).
"""

import os

import pytest

from envs.errors import CheckerFailed
from envs.osworld import metrics
from envs.osworld.checker import Checker
from tests.envs import office_cases

pytestmark = pytest.mark.parity
PYTHON = os.environ.get("PRACTICE_DESKTOP_ENV", "")


@pytest.fixture(scope="module")
def lease(tmp_path_factory):
  folder = tmp_path_factory.mktemp("lease")
  office_cases.write(folder)
  return folder


@pytest.fixture(scope="module")
def checker(lease):
  made = Checker(str(lease), PYTHON)
  yield made
  made.close()


def test_it_has_every_metric_that_is_built_in(checker):
  theirs = set(checker.listed(theirs=True)["metrics"])
  assert {name for name in metrics.METRICS if not name.startswith("practice_")} <= theirs


@pytest.mark.parametrize("case", office_cases.CASES, ids=[f"{i}-{c[0]}-{c[4]:.2g}" for i, c in enumerate(office_cases.CASES)])
def test_scores_are_theirs(checker, lease, case):
  name, result, expected, options, _ = case
  result, expected = office_cases.placed(result, lease), office_cases.placed(expected, lease)
  ours, _ = checker.metric(name, result, expected, options)
  try:
    theirs, _ = checker.metric(name, result, expected, options, theirs=True)
  except CheckerFailed as failed:
    theirs = str(failed)
  assert ours == pytest.approx(theirs, abs=1e-6)
