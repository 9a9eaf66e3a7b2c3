"""A config's sweep_*() functions as runs of train.py: here, a few at a time, or as printed commands for a cluster.

  python sweep.py --config=configs/osworld.py --sweep=lr                  every point in turn, into runs/sweeps/osworld-lr
  python sweep.py --config=configs/osworld.py --sweep=lr,seed --jobs=2    every pair of two sweeps' points, two runs at a time
  python sweep.py --config=configs/osworld.py --sweep=lr --emit=xpk --cluster=C --accelerator=v5p-32 --image=IMAGE --out=/mnt/runs/lr

`sweep_lr()` in the config file returns a grid, {"practice.lr": (1e-4, 5e-4), "seed": (0, 1)}, or a list of points, each {key: value}.
A key with a colon in front is a mode: {":agent": ("grpo", "gspo")}. Every point has a name and a folder of its own that follow from
what is run, so the same command goes on where it was cut and repeats nothing. All points are checked before one begins. A run that
fails leaves the others alone; it is tried again by the same command. --config.KEY=VALUE goes to every point.

In OUT: a folder a point (`tensorboard --logdir OUT`; log.txt in it is what the run said), results.md and results.json, children.json.
Exit codes: 0 all done; 1 some failed; 2 something given cannot be run; 75 stopped by a signal.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from absl import flags as absl_flags

from core import config as config_lib
from core.config import ConfigError
from core.find import ROOT, nearest
from core.host import hold
from core.screens import write_atomic
from core.stop import EXIT_STOPPED, StopSignals
from envs import processes
from envs.worker import die_with
from supervise import reached

GRACE = 150.0  # seconds that runs have to save in when the sweep is stopped: more than supervise.py gives its trainer
MOST = 10_000  # points of a sweep: checking them takes two minutes, and a generator need not end
EVERY = 60.0  # seconds from one look at what the runs say to the next
NEEDED = {  # flags that each way to run a point wants
  "xpk": ("cluster", "accelerator", "image", "out"), "gcloud": ("accelerator", "zone", "runtime", "out"), "slurm": ("nodes",), "": (),
}  # fmt: skip
TAKEN = {  # and those it can use besides
  "xpk": ("slices", "project", "zone", "setup"), "gcloud": ("project", "setup"), "slurm": ("gpus", "hours", "setup"), "": ("jobs", "gpus"),
}  # fmt: skip
COLUMNS = ("copying", "practice", "in_domain", "copying_greedy", "practice_greedy")  # of summary.json, fractions


class Point(NamedTuple):
  """One run. values: what the sweep chose, by key; args: for train.py, all but --workdir; id: of its folder."""

  values: dict[str, Any]
  args: list[str]
  id: str

  @property
  def digest(self) -> str:
    return self.id.rpartition("-")[2]


# ---- from a config's functions to points


def define(values: absl_flags.FlagValues) -> None:
  text = partial(absl_flags.DEFINE_string, flag_values=values)
  number = partial(absl_flags.DEFINE_integer, flag_values=values)
  absl_flags.DEFINE_list("sweep", [], "Names of sweep_NAME() functions of the config; several are multiplied.", flag_values=values)
  text("out", "", "Folder of the sweep; default runs/sweeps/CONFIG-SWEEP.")
  number("jobs", 1, "Runs at a time, on this machine.", lower_bound=1)
  number("retries", 3, "Restarts of a run that dies without progress: supervise.py's.", lower_bound=0)
  number("gpus", 0, "GPUs a run: here by CUDA_VISIBLE_DEVICES (0 = leave it as it is), in Slurm a node's.", lower_bound=0)
  absl_flags.DEFINE_enum("emit", "", ["", *filter(None, NEEDED)], "Print commands instead of running.", flag_values=values)
  text("cluster", "", "xpk: GKE cluster.")
  text("accelerator", "", "xpk, gcloud: TPU type, such as v5p-32.")
  number("slices", 1, "xpk: TPU slices a run.", lower_bound=1)
  text("image", "", "xpk: container image with this repository as its working folder.")
  text("project", "", "xpk, gcloud: Google Cloud project; empty = gcloud's default.")
  text("zone", "", "xpk, gcloud: zone.")
  text("runtime", "", "gcloud: TPU software version, such as v2-alpha-tpuv5.")
  number("nodes", 0, "slurm: nodes a run.", lower_bound=0)
  number("hours", 0, "slurm: time limit; 0 = the partition's.", lower_bound=0)
  text("setup", "", "Shell command that every host runs first, such as a mount.")


def functions(file: str) -> dict[str, Callable]:
  """The sweep_*() functions of a config file by name."""
  spec = importlib.util.spec_from_file_location("swept_config", file)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return {name.removeprefix("sweep_"): f for name, f in vars(module).items() if name.startswith("sweep_") and callable(f)}


def plain(value: Any) -> Any:
  """A value of a point with numbers of numpy as Python's own, also in tuples. ValueError for what results.json cannot hold: it is written
  when all runs have ended."""
  if isinstance(value, tuple | list):
    return type(value)(map(plain, value))
  value = value.item() if isinstance(value, np.generic) else value
  if not isinstance(value, str | int | float | None):
    raise ValueError(f"{value!r}, wanted a number, a text, or a tuple of them")
  return value


def checked(name: str, point: Mapping[str, Any]) -> dict[str, Any]:
  """A point of sweep_NAME() with plain values; ConfigError where it has others."""
  out = {}
  for key, value in point.items():
    if not isinstance(key, str):
      raise ConfigError(f"sweep_{name}: a key is {key!r}, wanted the name of a knob, such as 'practice.lr'")
    try:
      out[key] = plain(value)
    except ValueError as error:
      raise ConfigError(f"sweep_{name}: {key} is {config_lib.one_line(error)}") from error
  return out


def few(number: int, whose: str) -> None:
  if number > MOST:
    raise ConfigError(f"{whose} has more than {MOST:,} points: wanted fewer")


def expand(name: str, function: Callable[[], Any]) -> list[dict[str, Any]]:
  """The points of what sweep_NAME() returns."""
  try:
    made = function()
    made = made if isinstance(made, Mapping) or isinstance(made, str) else list(itertools.islice(made, MOST + 1))
  except Exception as error:  # noqa: BLE001 - whatever a config file raises becomes a line that names the place
    raise ConfigError(f"sweep_{name}: {type(error).__name__}: {config_lib.one_line(error)}") from error
  if isinstance(made, Mapping) and made:
    for key, values in made.items():
      if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ConfigError(f"sweep_{name}: {key} is {values!r}, wanted a list of values")
    few(math.prod(map(len, made.values())), f"sweep_{name}")
    return [checked(name, dict(zip(made, values))) for values in itertools.product(*made.values())]
  if not made or isinstance(made, str) or not all(isinstance(p, Mapping) and p for p in made):
    raise ConfigError(f"sweep_{name} returned {made!r}, wanted {{key: values}} or a list of {{key: value}}")
  few(len(made), f"sweep_{name}")
  return [checked(name, p) for p in made]


def product(sweeps: Mapping[str, list[dict]]) -> list[dict[str, Any]]:
  """Every combination of the sweeps' points."""
  few(math.prod(map(len, sweeps.values())), f"--sweep={','.join(sweeps)}")
  out = []
  for parts in itertools.product(*sweeps.values()):
    keys = [key for part in parts for key in part]
    if twice := next((k for k in keys if keys.count(k) > 1), None):
      raise ConfigError(f"{twice} is swept by two of {', '.join(sweeps)}: name one of them")
    out.append({k: v for part in parts for k, v in part.items()})
  return out


def written(value: Any) -> str:
  """A value as a flag takes it."""
  return value if isinstance(value, str) else str(list(value) if isinstance(value, list) else value)


def spec(file: str, arg: str, modes: Mapping[str, Any]) -> str:
  """FILE:modes, where a swept mode takes the place of a given one."""
  given = {p.strip().partition("=")[0]: p.strip() for p in arg.split(",") if p.strip()}
  chosen = ",".join((given | {k: f"{k}={written(v)}" for k, v in modes.items()}).values())
  return f"{file}:{chosen}" if chosen else file


def title(values: Mapping[str, Any], keys: Sequence[str]) -> str:
  """What tells a point apart, short: lr=0.001,seed=1. keys: of all points."""
  last = [k.rpartition(".")[2].lstrip(":") for k in keys]
  short = {k: s if last.count(s) == 1 else k.lstrip(":") for k, s in zip(keys, last)}
  return ",".join(f"{short[k]}={written(v)}" for k, v in values.items())


def make_points(chosen: list[dict], file: str, arg: str, overrides: Mapping[str, Any]) -> list[Point]:
  keys = list(dict.fromkeys(k for values in chosen for k in values))
  if clash := next((k for k in keys if k in overrides), None):
    raise ConfigError(f"--config.{clash} is given, but {clash} is swept: leave the flag out, or sweep something else")
  out: dict[str, Point] = {}
  for values in chosen:
    modes = {k[1:]: v for k, v in values.items() if k.startswith(":")}
    knobs = dict(overrides) | {k: v for k, v in values.items() if not k.startswith(":")}
    flags = [f"--config.{k}={written(v)}" for k, v in knobs.items()]
    run = spec(file, arg, modes)
    told = [pathlib.Path(file).name + run.removeprefix(file), *sorted(flags)]  # not where the repository is, nor in which order
    digest = hashlib.sha256("\n".join(told).encode()).hexdigest()[:8]
    name = re.sub(r"[^A-Za-z0-9._+=,-]+", "-", title(values, keys))[:100]
    point = Point(values, [f"--config={run}", *flags], f"{name}-{digest}")
    if point.id in out:
      raise ConfigError(f"two points of the sweep are the same: {title(values, keys)}")
    out[point.id] = point
  return list(out.values())


def prepare(argv: list[str]) -> tuple[dict[str, Any], list[Point]]:
  """(flags, points), every one of them a config that train.py would take. ConfigError, one line, otherwise."""
  from configs import base  # jax comes with it, which the process that starts the runs must not hold

  _, flags = config_lib.load_config(argv, define)
  if given := next((a for a in argv[1:] if re.match("--?(no)?(workdir|fresh)", a)), None):
    raise ConfigError(f"{given}: every point of a sweep has a folder of its own; say where they are with --out")
  check(flags)
  known, name = functions(flags["config_file"]), flags["config_name"]
  there = f"it has: {', '.join(sorted(known))}" if known else "it has no sweep_NAME() function"
  if not flags["sweep"]:
    raise ConfigError(f"--sweep is missing; {there} ({name}.py)")
  for wanted in flags["sweep"]:
    if wanted not in known:
      raise ConfigError(f"there is no sweep_{wanted}() in {name}.py{nearest(wanted, known)}; {there}")
    if flags["sweep"].count(wanted) > 1:
      raise ConfigError(f"--sweep={','.join(flags['sweep'])} names {wanted} twice")
  chosen = product({s: expand(s, known[s]) for s in flags["sweep"]})
  file = pathlib.Path(flags["config_file"])
  shown = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)
  points = make_points(chosen, shown, flags["config_arg"], flags["overrides"])
  for point in points:
    across = next((int(a.rpartition("=")[2]) for a in point.args if a.startswith("--config.mesh.data=")), flags["slices"])
    if across % flags["slices"]:
      raise ConfigError(f"point {point.id}: mesh.data is {across}, wanted a multiple of --slices={flags['slices']}, or left out")
    try:
      cfg, told = config_lib.load_config(["train.py", *point.args])
      base.check(cfg, told["overrides"])
    except ValueError as error:
      raise ConfigError(f"point {point.id}: {config_lib.one_line(error)}") from error
  out = flags["out"] or os.path.join("runs", "sweeps", f"{name}-{'-'.join(flags['sweep'])}")
  return flags | {"out": out if flags["emit"] else os.path.abspath(os.path.expanduser(out)), "name": name}, points


def check(flags: Mapping[str, Any]) -> None:
  """What is printed for a cluster must be known, and no flag may be given that does nothing."""
  kind, defaults = flags["emit"], {"jobs": 1, "slices": 1}
  way = f"--emit={kind}" if kind else "running here"
  if missing := [f for f in NEEDED[kind] if not flags[f]]:
    raise ConfigError(f"{way} wants --{' and --'.join(missing)}")
  others = {f for known in (*NEEDED.values(), *TAKEN.values()) for f in known} - {*NEEDED[kind], *TAKEN[kind], "out"}
  if idle := sorted(f for f in others if flags[f] != defaults.get(f, type(flags[f])())):
    raise ConfigError(f"--{idle[0]} does nothing with {way}: leave it out")


# ---- runs on this machine


class Local:
  """Runs points in folders of `out`, at most `jobs` at a time. command(point, workdir): what is started; every: seconds after which it is
  printed how far each is.

  Every child leads a session of its own, dies with this process, and stands in children.json by pid and start time.
  """

  def __init__(
    self, out: pathlib.Path, jobs: int, gpus: int, command: Callable[[Point, pathlib.Path], list[str]], grace: float = GRACE,
    every: float = EVERY,
  ):  # fmt: skip
    self.out, self.jobs, self.gpus, self.command, self.grace, self.every = out, jobs, gpus, command, grace, every
    self.running: dict[str, tuple[subprocess.Popen, int | None, int]] = {}  # by point: process, its start time, its place of `jobs`
    self.failed: dict[str, int] = {}  # exit codes

  def run(self, points: Sequence[Point], stop: StopSignals) -> None:
    """Until every point is done or has failed, or a signal asks for an end."""
    waiting = [p for p in points if not done(self.out / p.id)]
    print(f"{len(points)} points in {self.out}, {len(points) - len(waiting)} of them done before", flush=True)
    count, self.total, looked = len(points) - len(waiting), len(points), time.monotonic()
    try:
      while (waiting or self.running) and not stop.asked:
        while waiting and len(self.running) < self.jobs:
          self._start(waiting.pop(0))
        time.sleep(0.1)
        for point in [p for p, (popen, _, _) in self.running.items() if popen.poll() is not None]:
          count += 1
          self._ended(point, count)
        if time.monotonic() - looked >= self.every:
          looked = time.monotonic()
          for point in self.running:
            print(f"[{count}/{self.total}] {point}: {last_line(self.out / point / 'log.txt')}", flush=True)
    finally:
      self._end()

  def _start(self, point: Point) -> None:
    place = next(i for i in range(self.jobs) if i not in {at for _, _, at in self.running.values()})
    workdir = self.out / point.id
    workdir.mkdir(parents=True, exist_ok=True)
    mine = ",".join(str(g) for g in range(place * self.gpus, (place + 1) * self.gpus))
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": mine} if self.gpus else {})
    with open(workdir / "log.txt", "ab") as log:
      popen = subprocess.Popen(
        self.command(point, workdir), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        env=environment, preexec_fn=partial(die_with, os.getpid()),
      )  # fmt: skip
    self.running[point.id] = (popen, processes.start_time(popen.pid), place)
    self._record()

  def _ended(self, point: str, count: int) -> None:
    code = self.running.pop(point)[0].returncode
    self._record()
    if code == 0 and done(self.out / point):
      print(f"[{count}/{self.total}] {point}: done, {headline(self.out / point)}", flush=True)
      return
    self.failed[point] = code
    print(f"[{count}/{self.total}] {point}: failed (exit {code}): {last_line(self.out / point / 'log.txt')}", flush=True)

  def _end(self) -> None:
    """Asks all that runs to end, and sees it gone."""
    families = {p: processes.family(popen.pid) for p, (popen, _, _) in self.running.items()}
    for popen, start, _ in self.running.values():
      processes.send(popen.pid, start, signal.SIGTERM)
    until = time.monotonic() + self.grace
    for point, (popen, _, _) in list(self.running.items()):
      try:
        popen.wait(max(0.1, until - time.monotonic()))
      except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait(10)
      for pid, start in families[point]:
        processes.send(pid, start, signal.SIGKILL)
      del self.running[point]
    self._record()

  def _record(self) -> None:
    children = {point: [popen.pid, start] for point, (popen, start, _) in self.running.items()}
    write_atomic(self.out / "children.json", json.dumps({"children": children}).encode())


def claim(out: pathlib.Path) -> io.TextIOWrapper:
  """Makes the folder and locks it for this sweep, until the returned file is closed; ConfigError where another one is at work there,
  or where nothing can be written."""
  try:
    return hold(out)
  except OSError as error:
    raise ConfigError(f"--out is {out}: {error.strerror}: wanted a folder that this user may write to") from error
  except ValueError as error:
    raise ConfigError(f"{out} is in use by another sweep.py: wait for it, or give another --out") from error


def clear(out: pathlib.Path, seconds: float = GRACE) -> None:
  """Ends what a sweep that is gone left running in `out`, which is claimed."""
  record = read(out / "children.json", "remove it once nothing runs there that an earlier sweep began", ("children",))
  left = [(pid, start) for pid, start in record["children"].values() if processes.alive(pid, start)] if record else []
  for pid, start in left:
    processes.send(pid, start, signal.SIGTERM)
  until = time.monotonic() + seconds
  while time.monotonic() < until and any(processes.alive(*child) for child in left):
    time.sleep(0.1)
  for pid, start in [c for child in left if processes.alive(*child) for c in (child, *processes.family(child[0]))]:
    processes.send(pid, start, signal.SIGKILL)


def read(path: pathlib.Path, hint: str, wanted: Sequence[str]) -> dict[str, Any] | None:
  """A file of JSON with these keys, None where there is none; ConfigError with a hint where it is something else."""
  try:
    found = json.loads(path.read_bytes())
    _ = [found[key] for key in wanted]
  except FileNotFoundError:
    return None
  except (OSError, ValueError, TypeError, KeyError) as error:
    raise ConfigError(f"{path} cannot be read ({type(error).__name__}: {config_lib.one_line(error)}): {hint}") from error
  return found


def summary(workdir: pathlib.Path) -> dict[str, Any] | None:
  """What a run that is done came to; None of one that is not."""
  return read(workdir / "summary.json", "remove it, and the run is taken to its end again", (*COLUMNS, "noise_points", "n", "seconds"))


def done(workdir: pathlib.Path) -> bool:
  return summary(workdir) is not None


def last_line(log: pathlib.Path) -> str:
  lines = log.read_bytes()[-4000:].decode(errors="replace").split("\n") if log.is_file() else []
  return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")


# ---- results


def headline(workdir: pathlib.Path) -> str:
  s = summary(workdir)
  return f"held-out {100 * s['practice']:.1f}% after practice (copying {100 * s['copying']:.1f}%), {s['seconds']:.0f} s"


def results(points: Sequence[Point], out: pathlib.Path, failed: Mapping[str, int]) -> list[dict[str, Any]]:
  """A row a point: its values, its folder, how far it is, and its scores where it is done."""
  rows = []
  for p in points:
    row = {"point": p.id, "values": p.values, "state": f"failed (exit {failed[p.id]})" if p.id in failed else f"{reached(out / p.id)}"}
    if found := summary(out / p.id):
      row |= {"state": "done", "summary": found}
    rows.append(row)
  return rows


def table(rows: Sequence[Mapping[str, Any]], points: Sequence[Point]) -> str:
  """Markdown: a line a point, and where seeds are swept, a line for each set of the other values with its error over seeds."""
  keys = list(dict.fromkeys(k for p in points for k in p.values))
  percent = lambda x: f"{100 * x:.1f}" if x is not None else "-"
  line = lambda cells: "| " + " | ".join(map(str, cells)) + " |"
  head = [*keys, *COLUMNS, "+- points", "n", "seconds", "state"]
  lines = [line(head), "|---" * len(head) + "|"]
  for row in rows:
    s = row.get("summary", {})
    cells = [written(row["values"].get(k, "")) for k in keys] + [percent(s.get(c)) for c in COLUMNS]
    cells += [f"{s['noise_points']:.1f}", s["n"], f"{s['seconds']:.0f}"] if s else ["-", "-", "-"]
    lines.append(line([*cells, row["state"]]))
  groups: dict[str, list] = {}
  for row in rows if "seed" in keys else ():
    if "summary" in row:
      groups.setdefault(title({k: v for k, v in row["values"].items() if k != "seed"}, keys) or "all", []).append(row["summary"])
  if any(len(found) > 1 for found in groups.values()):
    head = ["over seeds", "seeds", "copying", "practice", "+- over seeds"]
    lines += ["", line(head), "|---" * len(head) + "|"]
    for name, found in groups.items():
      spread = 100 * np.std([s["practice"] for s in found], ddof=1) / len(found) ** 0.5 if len(found) > 1 else None
      means = [percent(float(np.mean([s[c] for s in found]))) for c in ("copying", "practice")]
      lines.append(line([name, len(found), *means, f"{spread:.1f}" if spread is not None else "-"]))
  return "\n".join(lines)


# ---- commands for a cluster


def supervised(point: Point, workdir: Any, retries: int, python: str = "python", more: Sequence[str] = ()) -> list[str]:
  return [python, "supervise.py", f"--retries={retries}", "--", *point.args, *more, f"--workdir={workdir}"]


def commands(kind: str, point: Point, flags: Mapping[str, Any]) -> Iterator[str]:
  """Shell lines that run a point on a cluster; its folder is OUT/ID as the hosts see it."""
  workdir = f"{flags['out'].rstrip('/')}/{point.id}"
  hosts = ["--config.hosts.coordinator=auto"] if kind != "slurm" or flags["nodes"] > 1 else []  # they find each other by the cluster
  if kind == "xpk" and flags["slices"] > 1 and not any(a.startswith("--config.mesh.data=") for a in point.args):
    hosts.append(f"--config.mesh.data={flags['slices']}")  # parameters are gathered within a slice, over its own links
  run = shlex.join(supervised(point, workdir, flags["retries"], more=hosts))
  first = f"{flags['setup']} && " if flags["setup"] else ""
  label = re.sub("[^a-z0-9]+", "-", f"{flags['name']}-{'-'.join(flags['sweep'])}".lower()).strip("-")[:30] + "-" + point.digest
  where = [f"--{k}={flags[k]}" for k in ("project", "zone") if flags[k]]
  if kind == "xpk":
    yield shlex.join(
      ["xpk", "workload", "create", f"--workload={label}", f"--cluster={flags['cluster']}", f"--tpu-type={flags['accelerator']}",
       f"--num-slices={flags['slices']}", f"--docker-image={flags['image']}", *where, f"--command={first}{run}"]
    )  # fmt: skip
  elif kind == "gcloud":
    vm = ["gcloud", "compute", "tpus", "tpu-vm"]
    yield shlex.join([*vm, "create", label, *where, f"--accelerator-type={flags['accelerator']}", f"--version={flags['runtime']}"])
    yield shlex.join([*vm, "ssh", label, *where, "--worker=all", f"--command={first}{run}"])
    yield shlex.join([*vm, "delete", label, *where, "--quiet"])
  else:
    asked = [f"--nodes={flags['nodes']}", "--ntasks-per-node=1", *([f"--gpus-per-node={flags['gpus']}"] if flags["gpus"] else [])]
    asked += [f"--time={flags['hours']}:00:00"] if flags["hours"] else []
    there = f"bash -c {shlex.quote(first + run)}" if first else run  # on every node, not where the job's script runs alone
    yield f"mkdir -p {shlex.quote(workdir)} && " + shlex.join(
      ["sbatch", f"--job-name={label}", *asked, "--requeue", f"--output={workdir}/slurm-%j.txt", f"--wrap=srun {there}"]
    )


def main(argv: list[str]) -> int:
  if "--help" in argv[1:]:
    print(__doc__.strip())
    return 0
  with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), die_with, (os.getpid(),)) as reader:
    flags, points = reader.submit(prepare, argv).result()
  out = pathlib.Path(flags["out"])
  if flags["emit"]:
    for point in points:
      print(f"# {point.id}" + (": done" if done(out / point.id) else ""))
      for line in () if done(out / point.id) else commands(flags["emit"], point, flags):
        print(line)
    return 0
  lock = claim(out)
  clear(out)
  local = Local(out, flags["jobs"], flags["gpus"], lambda p, workdir: supervised(p, workdir, flags["retries"], sys.executable))
  with lock, StopSignals() as stop:
    local.run(points, stop)
  rows = results(points, out, local.failed)
  write_atomic(out / "results.json", (json.dumps(rows, indent=2) + "\n").encode())
  write_atomic(out / "results.md", (table(rows, points) + "\n").encode())
  print(f"{table(rows, points)}\n\ntensorboard --logdir {out}")
  left = sum(row["state"] != "done" for row in rows)
  if stop.asked and left:
    print(f"stopped, {left} points are left: the same command goes on", flush=True)
    return EXIT_STOPPED
  return 1 if local.failed else 0


if __name__ == "__main__":
  config_lib.run(main)
