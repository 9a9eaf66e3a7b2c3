"""The README's picture: one held-out task as two strips of screens, the copied policy stuck at the pop-up above, the
practised one going on below; and the learning curve.

  python -m tools.picture --workdir=runs/osworld --out=docs/practice.png
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import sys

import jax
import numpy as np
from absl import app, flags
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

import evaluate
from configs import base
from core.checkpoint import Checkpointer
from core.config import EXIT_USAGE, one_line
from core.metrics import read_jsonl
from core.schema import Episode
from core.screens import write_atomic
from core.state import Weights

FLAGS = flags.FLAGS
MOST_SCREENS = 9


def episodes_of(world: evaluate.World, params, version: int, cfg) -> dict[tuple[str, int], Episode]:
  found = evaluate.run(world, Weights(params, version), evaluate.HELD_OUT, 1, cfg.seed, cfg.practice.slots)
  return {(e.task_id, e.try_index): e for e in found}


def pick(copied: dict, practised: dict) -> tuple[Episode, Episode]:
  """The first task whose pop-up stopped the copied policy and did not stop the practised one."""
  for key in sorted(copied):
    a, b = copied[key], practised[key]
    stuck = not a.success and a.notes["popup"] and a.end_cause == "steps"
    if stuck and b.success and b.notes["popup"] and len(b.steps) <= MOST_SCREENS:
      return a, b
  raise ValueError("no held-out task shows the difference: the copied policy never got stuck where the practised one passed")


def strip(episode: Episode, title: str, scale: int) -> Image.Image:
  """The last screens of an episode that fit, each with its action beneath. What was cut is said."""
  first = max(min(next((h for h, s in enumerate(episode.steps) if s.notes["popup"]), 0) - 2, len(episode.steps) - MOST_SCREENS), 0)
  shown = episode.steps[first : first + MOST_SCREENS]
  height, width = shown[0].screen.pixels.shape[:2]
  width, height, font = width * scale, height * scale, ImageFont.load_default(13)
  image = Image.new("RGB", (MOST_SCREENS * (width + 8) + 8, height + 52), (255, 255, 255))
  pen = ImageDraw.Draw(image)
  pen.text((8, 4), title, (0, 0, 0), font)
  for i, step in enumerate(shown):
    x = 8 + i * (width + 8)
    image.paste(Image.fromarray(step.screen.pixels).resize((width, height), Image.NEAREST), (x, 24))
    action = step.text.split("Action: ")[-1].replace("start_box=", "")
    pen.text((x, height + 28), f"{first + i + 1}. {action}"[: width // 7], (150, 20, 20) if step.notes["popup"] else (60, 60, 60), font)
    if step.point is not None:
      cx, cy = x + (step.point[0] + 0.5) * scale, 24 + (step.point[1] + 0.5) * scale
      pen.ellipse((cx - 5, cy - 5, cx + 5, cy + 5), outline=(230, 30, 30), width=2)
  return image


def curve(workdir: pathlib.Path, summary: dict, width: int) -> Image.Image:
  """Success in practice by update, with held-out success before, during and after."""
  rows = read_jsonl(workdir / "metrics.jsonl")
  figure = Figure(figsize=(width / 100, 3.2), dpi=100, layout="constrained")
  axes = figure.subplots()
  axes.plot([r["update"] + 1 for r in rows], [100 * r["reward/success"] for r in rows], color="#8aa8d8", label="practised tasks")
  held = [(r["update"] + 1, 100 * r["eval/held_out"]) for r in rows if r.get("eval/held_out") is not None]
  held = [(0, 100 * summary["copying"]), *held, (rows[-1]["update"] + 1, 100 * summary["practice"])]
  axes.plot(*zip(*held), "o-", color="#b03030", label="held-out tasks")
  axes.set(xlabel="update", ylabel="passed, %", ylim=(0, 100), title=f"copying {held[0][1]:.0f}% -> practice {held[-1][1]:.0f}% "
           f"(held-out, temperature 1.0, n = {summary['n']})")  # fmt: skip
  axes.grid(alpha=0.3)
  axes.legend(loc="lower right")
  data = io.BytesIO()
  figure.savefig(data, format="png")
  return Image.open(data)


def main(argv: list[str]) -> None:
  del argv
  workdir = pathlib.Path(os.path.abspath(FLAGS.workdir))
  if not (workdir / "summary.json").is_file():
    raise ValueError(f"--workdir={workdir} holds no summary.json: give the folder of a finished run")
  cfg = base.saved(workdir)
  summary = json.loads((workdir / "summary.json").read_text())
  world = evaluate.build(cfg)
  target = {"states": {"policy": {"params": jax.eval_shape(world.policy.init, jax.random.key(0))}}}
  tries = []
  for folder in ("copied", "checkpoints"):
    with Checkpointer(workdir / folder) as checkpoints:
      tree, _, step = checkpoints.restore(target, partial=True)
    tries.append(episodes_of(world, tree["states"]["policy"]["params"], step, cfg))
  before, after = pick(*tries)
  scale = 2 if before.steps[0].screen.pixels.shape[0] < 200 else 1
  parts = [
    strip(before, f'"{before.goal}": copied, stuck at the pop-up', scale),
    strip(after, "the same task after practice", scale),
  ]
  parts.append(curve(workdir, summary, parts[0].width))
  whole = Image.new("RGB", (parts[0].width, sum(p.height for p in parts)), (255, 255, 255))
  top = 0
  for part in parts:
    whole.paste(part, (0, top))
    top += part.height
  data = io.BytesIO()
  whole.quantize(128).save(data, format="PNG", optimize=True)
  write_atomic(pathlib.Path(FLAGS.out), data.getvalue())
  print(f"{FLAGS.out}: {np.shape(whole)[1]} x {np.shape(whole)[0]} pixels, {len(data.getvalue()) // 1024} KiB")


if __name__ == "__main__":
  flags.DEFINE_string("workdir", "runs/osworld", "Folder of a finished run.")
  flags.DEFINE_string("out", "docs/practice.png", "Where the picture goes.")
  try:
    app.run(main)
  except (ValueError, OSError) as error:
    print(f"tools.picture: {one_line(error)}", file=sys.stderr)
    sys.exit(EXIT_USAGE)
