"""Steps a second of MiniWoB++ in real Chromium: one environment, then eight, each with a browser and a process of its own.

  python -m benchmarks.web --envs=1,8 --seconds=10

A step is a click, the page at rest, a screenshot and the question whether the page has ended the try.
Prints steps a second and the ratio to the first, with and without the limit of 60 frames a second. --selenium measures as many of the
package's own environment beside them; it wants selenium (pip), MINIWOB_CHROMEDRIVER and MINIWOB_CHROME_BINARY.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

PAGE = "click-test-2"


def drive(env, seconds: float, reset: Callable, step: Callable) -> None:
  """Episodes of ten steps at most, for so long from the moment a line comes in; prints the counts. reset(number of the episode)."""
  print("ready", flush=True)
  sys.stdin.readline()
  steps = episodes = 0
  resets, until = 0.0, time.monotonic() + seconds
  while time.monotonic() < until:
    began = time.monotonic()
    reset(episodes)
    resets += time.monotonic() - began
    for _ in range(10):
      _, _, terminated, truncated, _ = step()
      steps += 1
      if terminated or truncated or time.monotonic() > until:
        break
    episodes += 1
  env.close()
  print(json.dumps({"steps": steps, "episodes": episodes, "resets": resets}), flush=True)


def work(seconds: float, capped: bool) -> None:
  """One of our environments."""
  from core.schema import Limits, Task
  from envs import miniwob

  cfg = miniwob.defaults()
  cfg.update({"capped": capped, "boot_seconds": 120.0, "load_seconds": 120.0, "call_seconds": 60.0, "settle_most": 60.0})
  env = miniwob.make("miniwob/browser", cfg)
  goals = [env.site.show(env.window, PAGE, seed) for seed in range(8)]
  tasks = [Task(f"{PAGE}-{seed}", goals[seed], "miniwob/browser", PAGE, seed, {"page": PAGE}, Limits(10)) for seed in range(8)]
  beside = "Action: click(start_box='(150,200)')"  # beside every button
  drive(env, seconds, lambda n: env.reset(options={"task": tasks[n % len(tasks)]}), lambda: env.step(beside))


def work_selenium(seconds: float) -> None:
  """The same with the package's own environment: the same page, click and screenshot; it reads the page's elements, too."""
  import gymnasium
  import miniwob
  from miniwob.action import ActionTypes

  gymnasium.register_envs(miniwob)
  env = gymnasium.make(f"miniwob/{PAGE}-v1").unwrapped
  env.reset(seed=0)

  def step():
    out = env.step(env.create_action(ActionTypes.CLICK_COORDS, coords=np.array([150, 200], np.float32)))
    if out[0]["screenshot"].shape != (210, 160, 3):
      raise RuntimeError(f"the package shows {out[0]['screenshot'].shape}, wanted (210, 160, 3)")
    return out

  drive(env, seconds, lambda n: env.reset(seed=n % 8), step)


def measure(count: int, seconds: float, capped: bool, whose: str = "--work") -> dict:
  """Sums over `count` processes that start together."""
  argv = [sys.executable, "-m", "benchmarks.web", whose, f"--seconds={seconds}", f"--capped={int(capped)}"]
  pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
  children = [subprocess.Popen(argv, start_new_session=True, **pipes) for _ in range(count)]
  try:
    for child in children:
      if not select.select([child.stdout], [], [], 300)[0] or child.stdout.readline() != "ready\n":
        raise RuntimeError("an environment did not start within 300 s")
    for child in children:
      child.stdin.write("go\n")
      child.stdin.flush()
    said = [json.loads(child.communicate(timeout=seconds + 300)[0].splitlines()[-1]) for child in children]
  finally:
    for child in children:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # with its browser, which the package's own environment leaves behind
      child.wait(10)
  return {name: sum(one[name] for one in said) for name in said[0]}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--envs", default="1,8")
  parser.add_argument("--seconds", type=float, default=10.0)
  parser.add_argument("--capped", default="0,1", help="0: frames as fast as they come; 1: 60 a second")
  parser.add_argument("--selenium", action="store_true", help="the package's own environment beside ours")
  parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
  parser.add_argument("--work-selenium", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.work:
    return work(args.seconds, args.capped == "1")
  if args.work_selenium:
    return work_selenium(args.seconds)
  print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; page {PAGE}, {args.seconds:g} s each")
  counts = [int(n) for n in args.envs.split(",")]
  for capped in (bool(int(c)) for c in args.capped.split(",")):
    ours: dict[int, float] = {}
    for count in counts:
      got = measure(count, args.seconds, capped)
      ours[count] = rate = got["steps"] / args.seconds
      reset = got["resets"] / max(got["episodes"], 1)
      frames = "60 frames/s" if capped else "uncapped"
      print(f"{frames:12s} {count:3d} environments: {rate:6.1f} steps/s ({rate / ours[counts[0]]:.2f}x), reset {reset:.3f} s", flush=True)
    for count in counts if args.selenium else []:
      got = measure(count, args.seconds, capped, "--work-selenium")
      rate, reset = got["steps"] / args.seconds, got["resets"] / max(got["episodes"], 1)
      times = f"as many of ours: {ours[count] / rate:.2f}x"
      print(f"selenium     {count:3d} environments: {rate:6.1f} steps/s ({times}), reset {reset:.3f} s", flush=True)


if __name__ == "__main__":
  main()
