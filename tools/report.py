"""A run as one HTML file: verdict, scores with their noise, every curve in the order of the checklist, some episodes. No outside asset.

  python -m tools.report --workdir=runs/android [--out=report.html]        default: report.html in the workdir

Everything an agent, a task or a config wrote is shown as text; the page forbids scripts and anything from elsewhere. Exit code 0; 2 for
what cannot be read.
"""

from __future__ import annotations

import base64
import contextlib
import html
import json
import math
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import flags

if __package__ in (None, ""):  # python tools/report.py
  sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from core.config import read_config, run_command
from core.layout import SECTIONS, Chart
from core.metrics import read_jsonl
from core.screens import write_atomic
from rollout.store import EpisodeStore
from tools import diagnose

WIDTH, HEIGHT, MARGIN = 380, 170, 34  # of a chart, in pixels
MOST_POINTS = 300  # a longer curve shows the smallest and largest value of each of its parts, so that no spike is lost
COLOURS = ("#2f5fb3", "#b03030", "#2d8a4e", "#9a6b00", "#6a3fa0", "#007d8a", "#8a8a8a", "#c0568a")
EPISODES = 2  # of each kind
STYLE = """body{font:14px/1.45 sans-serif;margin:24px auto;max-width:1240px;color:#222}h2{border-bottom:1px solid #ccc;margin-top:28px}
pre{background:#f5f5f5;padding:10px;white-space:pre-wrap}table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:3px 8px;
text-align:right}td:first-child,th:first-child{text-align:left}figure{display:inline-block;margin:4px 10px 10px 0;vertical-align:top}
figcaption{font-weight:bold}.strip{overflow-x:auto;white-space:nowrap}.strip div{display:inline-block;vertical-align:top;width:170px;
margin-right:6px;white-space:normal;font-size:12px;overflow-wrap:anywhere}.strip img{width:160px;image-rendering:pixelated}"""
CSP = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

text = html.escape


def number(x: float) -> str:
  return f"{x:.3g}" if x == 0 or 1e-3 <= abs(x) < 1e5 else f"{x:.1e}"


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
  """At most MOST_POINTS of them: of each part the smallest and the largest, in their order."""
  if len(points) <= MOST_POINTS:
    return list(points)
  parts = MOST_POINTS // 2
  out = []
  for i in range(parts):
    part = points[i * len(points) // parts : (i + 1) * len(points) // parts]
    out += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
  return out


def svg(curves: Mapping[str, Sequence[tuple[float, float | None]]]) -> str:
  """Curves over updates as inline SVG with a legend. A value that is missing leaves a gap; single points are dots."""
  values = [y for points in curves.values() for _, y in points if y is not None]
  updates = [x for points in curves.values() for x, _ in points]
  low, high = min(values), max(values)
  low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
  first, last = min(updates), max(max(updates), min(updates) + 1)
  across = lambda x: MARGIN + 6 + (x - first) / (last - first) * (WIDTH - MARGIN - 14)
  up = lambda y: HEIGHT - 20 - (y - low) / (high - low) * (HEIGHT - 32)
  parts = [f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="10" fill="#555">']
  for y in (low, (low + high) / 2, high):
    parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - 4}" y1="{up(y):.1f}" y2="{up(y):.1f}" stroke="#e4e4e4"/>')
    parts.append(f'<text x="{MARGIN - 3}" y="{up(y) + 3:.1f}" text-anchor="end">{number(y)}</text>')
  parts += [f'<text x="{across(x):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{x:g}</text>' for x in (first, last)]
  for (name, points), colour in zip(curves.items(), _cycle()):
    for run in _runs(points):
      at = [f"{across(x):.1f},{up(y):.1f}" for x, y in thin(run)]
      parts.append(
        f'<polyline points="{" ".join(at)}" fill="none" stroke="{colour}" stroke-width="1.5"><title>{text(name)}</title></polyline>'
      )
      if len(run) == 1:
        parts.append(f'<circle cx="{at[0].split(",")[0]}" cy="{at[0].split(",")[1]}" r="2" fill="{colour}"/>')
  return "".join([*parts, "</svg>"])


def _cycle() -> Iterable[str]:
  while True:
    yield from COLOURS


def _runs(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
  """Stretches without a gap; a curve drawn now and then (evaluations) is one stretch."""
  found = [(x, y) for x, y in points if y is not None]
  if len(found) * 2 <= len(points):
    return [found] if found else []
  runs: list[list[tuple[float, float]]] = [[]]
  for x, y in points:
    if y is None:
      runs.append([])
    else:
      runs[-1].append((x, y))
  return [r for r in runs if r]


def chart(one: Chart, rows: Sequence[Mapping[str, Any]]) -> str:
  """One picture, or nothing where no curve of it was drawn."""
  tags = [t for t in dict.fromkeys(t for r in rows for t in r if t != "update") if one.shows(t)]
  curves = {t: [(r["update"], r.get(t)) for r in rows] for t in tags if any(r.get(t) is not None for r in rows)}
  if not curves:
    return ""
  last = {t: next(y for _, y in reversed(points) if y is not None) for t, points in curves.items()}
  legend = "<br>".join(f'<span style="color:{c}">&#9632;</span> {text(t)} {number(last[t])}' for t, c in zip(curves, _cycle()))
  return f"<figure><figcaption>{text(one.title)}</figcaption>{svg(curves)}<div>{legend}</div></figure>"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
  line = lambda cells, tag: "<tr>" + "".join(f"<{tag}>{text(str(c))}</{tag}>" for c in cells) + "</tr>"
  return f"<table>{line(head, 'th')}{''.join(line(r, 'td') for r in rows)}</table>"


def scores(workdir: pathlib.Path) -> str:
  """Every evaluation that stands in the workdir, with its noise and its ends."""
  rows = []
  for path in sorted((workdir / "eval").glob("*.json")):
    s = json.loads(path.read_text())
    if "protocol" not in s or "noise_points" not in s:
      continue
    ended = ", ".join(f"{k} {n}" for k, n in sorted(s["ended_by"].items(), key=lambda e: -e[1]))
    noise = f"{s['noise_points']:.1f}" if 0 < s["success"] < 1 else "0.0 (none seen)"
    rows.append((s["protocol"], s["version"], f"{100 * s['success']:.1f}", noise, f"{s['passes']} of {s['attempted']}", s["n_tasks"],
                 s["step_limit"], sum(s["errors"].values()), ended))  # fmt: skip
  rows.sort(key=lambda r: (r[0], r[1]))
  head = ("protocol", "policy version", "passed %", "+- points", "episodes", "tasks", "step limit", "errors", "ended by")
  return table(head, rows) if rows else "<p>No evaluation yet.</p>"


def headline(workdir: pathlib.Path) -> str:
  """What practice bought, in points, once the run is finished."""
  path = workdir / "summary.json"
  if not path.exists():
    return "The run is not finished: there is no summary.json."
  s = json.loads(path.read_text())
  gain, noise = 100 * (s["practice"] - s["copying"]), math.hypot(s["noise_points"], s.get("copying_noise_points", 0.0))
  gained = f"Held-out: {100 * s['copying']:.1f}% copied, {100 * s['practice']:.1f}% practised: {gain:+.1f} points"
  measured = f"{s['n']} episodes on {s['n_tasks']} tasks, {s['seconds']:.0f} s"
  return f"{gained}, +- {noise:.1f} if the two are measured apart (tools/compare.py pairs them); {measured}."


def episodes(workdir: pathlib.Path) -> str:
  """The newest passes and fails, screen by screen."""
  if not (workdir / "episodes" / "index.sqlite").exists():
    return "<p>No episode is stored.</p>"
  parts = []
  with contextlib.closing(EpisodeStore(workdir / "episodes")) as store:
    for passed in (True, False):
      for row in store.query(newest_first=True, limit=EPISODES, success=passed):
        head = f"{'pass' if passed else 'fail'}, {row['end_cause']}, update {row['at_update']}: {row['goal']}"
        steps = "".join(f"<div>{_picture(store, s['screen'])}<br>{s['step'] + 1}. {text(s['text'])}</div>" for s in store.steps(row["id"]))
        parts.append(f"<h3>{text(head)}</h3><p>{text(row['task_id'])}, group {text(row['group_id'])}, try {row['try_index']}</p>"
                     f'<div class="strip">{steps}</div>')  # fmt: skip
  return "".join(parts)


def _picture(store: EpisodeStore, ref: str) -> str:
  path = store.screens.path(ref)
  if not path.exists():
    return "(picture missing)"
  return f'<img alt="" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'


def render(workdir: pathlib.Path) -> str:
  """The whole page."""
  cfg, rows = read_config(workdir), read_jsonl(workdir / "metrics.jsonl") if (workdir / "metrics.jsonl").exists() else []
  title = f"{cfg['name']}, agent {cfg['agent']['name']}, seed {cfg['seed']}"
  parts = [f"<h1>{text(title)}</h1><p>{text(headline(workdir))}</p>", "<h2>Diagnosis</h2>"]
  parts.append(f"<pre>{text(diagnose.text(diagnose.examine(workdir)))}</pre><h2>Scores</h2>{scores(workdir)}")
  for name, charts in SECTIONS:
    drawn = "".join(chart(c, rows) for c in charts)
    parts.append(f"<h2>{text(name)}</h2>{drawn or '<p>No curve of this run.</p>'}")
  parts.append(f"<h2>Episodes</h2>{episodes(workdir)}<h2>Config</h2><details><summary>config.json</summary>")
  parts.append(f"<pre>{text(json.dumps(cfg, indent=1))}</pre></details>")
  head = (
    f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{CSP}"><title>{text(title)}</title><style>{STYLE}</style>'
  )
  return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def main(argv: Sequence[str]) -> int:
  if argv[1:]:
    raise ValueError(f"{argv[1]} is no flag: write --workdir={argv[1]}")
  workdir = pathlib.Path(os.path.abspath(FLAGS.workdir))
  page = render(workdir).encode()
  out = pathlib.Path(os.path.abspath(FLAGS.out)) if FLAGS.out else workdir / "report.html"
  write_atomic(out, page)
  print(f"{out}: {len(page) // 1024} KiB", flush=True)
  return 0


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder of a run that train.py made.", required=True)
  flags.DEFINE_string("out", "", "Where the page goes; empty = report.html in the workdir.")
  run_command(main)
