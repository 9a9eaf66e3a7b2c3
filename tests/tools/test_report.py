"""A run as one page: whole, readable, and harmless whatever an agent wrote."""

import re
import shutil
import xml.dom.minidom

import pytest

from core.metrics import Metrics
from rollout.store import EpisodeStore
from tools import report

HOSTILE = "<script>alert(1)</script><img src=http://elsewhere/x.png onerror=alert(1)>"


@pytest.fixture
def folder(copied_run, tmp_path, episode):
  workdir = tmp_path / "run"
  shutil.copytree(copied_run, workdir)
  with Metrics(workdir) as metrics, EpisodeStore(workdir / "episodes") as store:
    for update in range(6):
      row = {"reward/success": 0.1 * update, "groups/all_fail": 0.5, "groups/all_pass": 0.1, "policy/entropy": 1.0 - 0.1 * update}
      metrics.write(update, row | ({"eval/held_out": 0.3} if update == 2 else {}) | ({"policy/loss": float("nan")} if update == 3 else {}))
      one = episode(update % 2, group=f"u{update}", task="../../etc/passwd", first=HOSTILE)
      one.goal = HOSTILE
      store.add(one, update)
  return workdir


def test_the_page_is_whole_and_its_pictures_are_valid(folder):
  page = report.render(folder)
  pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
  # success and held-out, groups, entropy, held-out alone, and the count of the loss that was not finite, which itself is no picture
  assert len(pictures) == 5 and ">policy/loss" not in page
  for picture in pictures:
    xml.dom.minidom.parseString(picture)
  for title in ("1 Can the computers be won?", "10 What is it worth?", "Diagnosis", "Episodes"):
    assert f"<h2>{title}</h2>" in page
  assert page.count("<h3>pass") == 2 and page.count("<h3>fail") == 2 and page.count("data:image/png;base64,") == 8


def test_hostile_text_stays_text_and_nothing_comes_from_elsewhere(folder):
  page = report.render(folder)
  assert "&lt;script&gt;alert(1)" in page
  assert "<script" not in page and "onerror=alert(1)>" not in page.replace("&gt;", "")
  assert set(re.findall(r'src="([a-z]+):', page)) == {"data"} and "href=" not in page and "url(" not in page
  assert "default-src 'none'" in page


def test_a_missing_picture_is_said(folder):
  shutil.rmtree(folder / "episodes" / "screens")
  assert report.render(folder).count("(picture missing)") == 8


def coordinates(picture):
  return [[tuple(map(float, p.split(","))) for p in line.split()] for line in re.findall(r'points="([^"]*)"', picture)]


def test_a_curve_rises_where_its_values_rise_and_breaks_where_they_are_missing():
  (line,) = coordinates(report.svg({"a": [(0, 0.0), (1, 1.0), (2, 0.5)]}))
  xs, ys = zip(*line)
  assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1]) and ys[0] > ys[2] > ys[1]  # down is larger in a picture
  assert ys[2] == pytest.approx((ys[0] + ys[1]) / 2, abs=0.06)  # 0.5 lies half way; coordinates have one digit
  assert len(coordinates(report.svg({"a": [(0, 1.0), (1, 2.0), (2, None), (3, 1.0), (4, 3.0)]}))) == 2


def test_a_constant_or_single_value_is_drawn():
  assert "<circle" in report.svg({"a": [(5, 2.0)]})
  assert len(coordinates(report.svg({"a": [(0, 1.0), (1, 1.0)]}))) == 1


def test_a_long_curve_keeps_its_spikes():
  points = [(float(i), 0.0) for i in range(10_000)]
  points[7321] = (7321.0, 9.0)
  thinned = report.thin(points)
  assert len(thinned) <= report.MOST_POINTS and (7321.0, 9.0) in thinned and thinned == sorted(thinned)


def test_evaluations_stand_with_their_noise(folder):
  (folder / "eval").mkdir()
  (folder / "eval" / "7-held_out.json").write_text(
    '{"protocol": "held_out", "version": 7, "passes": 64, "attempted": 96, "n_tasks": 96, "success": 0.6667, "noise_points": 4.8,'
    ' "ended_by": {"checker": 64, "steps": 32}, "errors": {}, "step_limit": 14}'
  )
  (folder / "eval" / "compare-a-b.json").write_text('{"protocol": "held_out", "scores": []}')
  page = report.render(folder)
  assert "<td>66.7</td><td>4.8</td><td>64 of 96</td><td>96</td><td>14</td><td>0</td><td>checker 64, steps 32</td>" in page
