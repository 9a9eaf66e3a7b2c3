"""Runs of train.py for benchmarks: each in a process and a workdir of its own, its output in a file, resumed if it was cut."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def train(spec: str, workdir: pathlib.Path, seed: int, overrides: list[str]) -> dict:
  """One run to its end; its summary. spec: what stands after --config=. A run that fails ends the benchmark and says where to look."""
  command = [sys.executable, "train.py", f"--config={spec}", f"--workdir={workdir}", f"--config.seed={seed}", *overrides]
  workdir.mkdir(parents=True, exist_ok=True)
  with open(workdir / "log.txt", "ab") as log:
    done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
  if done.returncode:
    raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: see {workdir / 'log.txt'}")
  return json.loads((workdir / "summary.json").read_text())
