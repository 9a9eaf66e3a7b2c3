"""Keeps a run going: starts train.py, and starts it again from its checkpoint when it died.

  python supervise.py [--retries=3] [--grace=120] -- --config=configs/osworld.py [--workdir=... --config.seed=1 ...]

What stands after the -- goes to train.py. Tried again: killed by a signal (out of memory, too), ended by the watchdog, broken down.
Not tried again: done; input that cannot be run (exit 2); broken down in the same update twice; `retries` deaths without a newer
checkpoint or update in between, or 20 restarts within an hour. Pauses grow from 2 seconds to 5 minutes, with jitter, and fall
back once a run gets further. Every death is one line on stderr and in WORKDIR/restarts.jsonl (of other hosts: in their folder of
WORKDIR/hosts, since no two may write to one file over a network).

SIGTERM or Ctrl-C is passed on; the trainer saves, and is killed if it has not ended `grace` seconds later. The exit code is the
trainer's last (128 + the signal's number where one killed it). What you start is a guard; the supervisor is its child, the trainer
the supervisor's, each leading a session of its own. When any of the three is killed all else is ended, whatever the trainer had
started included: orphans come to the guard or the supervisor, not to init. Linux only.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import pathlib
import random
import re
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

from absl import flags as absl_flags

from core import config as config_lib
from core.find import ROOT
from core.stop import EXIT_PARTED, EXIT_STOPPED, StopSignals
from core.watchdog import EXIT_HUNG, STUCK_FILE
from envs import processes
from envs.worker import die_with

MOST_AN_HOUR = 20
LONGEST_PAUSE = 300.0
PR_SET_CHILD_SUBREAPER = 36


class Reached(NamedTuple):
  """How far a run has got, from its files alone."""

  checkpoint: int  # newest complete step, -1 = none
  copying: int  # updates
  practice: int

  def __str__(self) -> str:
    what = f"practice update {self.practice}" if self.practice else f"copying update {self.copying}"
    return f"{what}, {f'checkpoint {self.checkpoint}' if self.checkpoint >= 0 else 'no checkpoint'}"


def reached(workdir: pathlib.Path) -> Reached:
  steps = [p.parent.name for p in (workdir / "checkpoints").glob("[0-9]*/manifest.json")]
  newest = max((int(s.partition(".")[0]) for s in steps if re.fullmatch(r"\d+(\.\d+)?", s)), default=-1)
  return Reached(newest, _updates(workdir / "copying" / "metrics.jsonl"), _updates(workdir / "metrics.jsonl"))


def _updates(path: pathlib.Path) -> int:
  """Updates in a metrics.jsonl, by its last whole line; only the end is read."""
  if not path.is_file():
    return 0
  with open(path, "rb") as f:
    f.seek(max(0, path.stat().st_size - (1 << 16)))
    lines = f.read().rpartition(b"\n")[0].splitlines()
  for line in reversed(lines):
    try:
      return json.loads(line)["update"] + 1
    except (ValueError, TypeError, KeyError):  # cut by a kill
      continue
  return 0


def short_of_memory() -> int:
  """Processes that the kernel has ended on this machine for want of memory."""
  found = re.search(r"^oom_kill (\d+)$", pathlib.Path("/proc/vmstat").read_text(), re.MULTILINE)
  return int(found[1]) if found else 0


def cause(code: int, starved: bool, stuck: bool) -> str:
  """code: of the trainer, negative = a signal. starved: memory ran out meanwhile. stuck: the last line of defence has written."""
  if code < 0:
    return f"killed by signal {-code} ({signal.strsignal(-code)})" + (", and the kernel was short of memory" if starved else "")
  if code == 1 and stuck:
    return f"hung inside C code and was ended (exit 1): see {STUCK_FILE}"
  known = {
    0: "done", config_lib.EXIT_USAGE: "something given cannot be run", EXIT_STOPPED: "stopped by a signal that did not come from here",
    EXIT_HUNG: "hung and was ended by its watchdog: see hang-*.txt", EXIT_PARTED: "lost the other processes of its run",
  }  # fmt: skip
  return f"{known.get(code, 'broke down')} (exit {code})"


def exit_code(code: int) -> int:
  return 128 - code if code < 0 else code


def adopt() -> None:
  """From now on the orphans among this process's descendants become its own children."""
  if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
    raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def collect(but: int = 0) -> None:
  """Takes leave of children that have ended, except `but`, which has a Popen of its own."""
  try:
    while (seen := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None and seen.si_pid != but:
      os.waitpid(seen.si_pid, 0)
  except ChildProcessError:  # there is none at all
    return


def end_descendants(spared: frozenset = frozenset(), seconds: float = 10.0) -> None:
  """Kills all that descends from this process, `spared` (pid, start time) apart, and sees it gone."""
  until = time.monotonic() + seconds
  while left := [p for p in processes.family(os.getpid()) if p not in spared]:
    if time.monotonic() > until:
      say(f"processes {[pid for pid, _ in left]} did not end when killed")
      return
    for pid, start in left:
      processes.send(pid, start, signal.SIGKILL)
    time.sleep(0.01)
    collect()


def say(text: str) -> None:
  try:
    print(f"SUPERVISOR: {text}", file=sys.stderr, flush=True)
  except OSError:  # the terminal is gone: no reason to leave a run alone
    return


class Supervisor:
  """`command` is started until it is done, or until there is no point. pause: seconds before the first restart.

  lifeline: a descriptor that becomes readable when the guard is gone, which is a request to stop. own: the folder in `workdir` that only
  this process of the run writes; None = the workdir itself."""

  def __init__(
    self, command: list[str], workdir: pathlib.Path, lifeline: int, *, retries: int, grace: float, pause: float,
    own: pathlib.Path | None = None,
  ):  # fmt: skip
    self.command, self.workdir, self.lifeline, self.own = command, workdir, lifeline, own or workdir
    self.retries, self.grace, self.pause = retries, grace, pause
    self.stop = StopSignals()
    self.best = reached(workdir)
    self.tries = 0  # restarts since the run last got further
    self.restarts: list[float] = []  # when
    self.last: tuple[int, Reached] | None = None  # how and where it ended before

  def run(self) -> int:
    """The trainer's last exit code."""
    adopt()
    with self.stop:
      while True:
        starved, began = short_of_memory(), time.time()
        popen = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=partial(die_with, os.getpid()))
        start = processes.start_time(popen.pid)
        self._attend(popen)
        code, stuck = popen.returncode, self._stuck(began)
        why = cause(code, short_of_memory() > starved, stuck)
        end_descendants()  # before anything else: what is left holds devices, ports and the workdir
        over = self._over(code, stuck)
        pause = 0.0 if over else self._pause()
        if code != 0:
          self._tell(popen.pid, start, code, why, over, pause)
        if over:
          return exit_code(code)
        until = time.monotonic() + pause
        while time.monotonic() < until and not self.stop.asked:
          self._look()
        if self.stop.asked:
          return exit_code(code)

  def _look(self) -> None:
    """Waits for a moment, and for the guard's end."""
    if self.stop.asked:
      time.sleep(0.1)
    elif select.select([self.lifeline], [], [], 0.1)[0]:
      self.stop.asked = True

  def _attend(self, popen: subprocess.Popen) -> None:
    """Until the trainer has ended: by itself, asked, or killed."""
    until = None
    while popen.poll() is None:
      if self.stop.asked and until is None:
        popen.terminate()
        until = time.monotonic() + self.grace
      if until is not None and time.monotonic() > until:
        say(f"the trainer has not ended {self.grace:g} s after it was asked to: killed")
        popen.kill()
        popen.wait(timeout=30)
      self._look()
      collect(but=popen.pid)

  def _stuck(self, began: float) -> bool:
    """Whether this session's watchdog needed its last line of defence."""
    written = lambda path: path.is_file() and path.stat().st_size > 0 and path.stat().st_mtime >= began - 1
    return any(written(folder / STUCK_FILE) for folder in {self.own, self.workdir})

  def _over(self, code: int, stuck: bool) -> str:
    """Why there is no other try; empty = there is one, which is counted."""
    here, before, now = reached(self.workdir), self.last, time.monotonic()
    further = any(a > b for a, b in zip(here, self.best))
    self.best, self.last = Reached(*map(max, here, self.best)), (code, here)
    self.tries = 0 if further else self.tries
    self.restarts = [at for at in self.restarts if now - at < 3600]
    if code == 0:
      return "done"
    if self.stop.asked:
      return "asked to stop"
    if code == config_lib.EXIT_USAGE and not further:
      return "another try would be refused as well"
    if code > 0 and code not in (EXIT_STOPPED, EXIT_HUNG, EXIT_PARTED) and not stuck and self.last == before:
      return "it broke down at the same place twice: what is above this line will happen again"
    if self.tries >= self.retries:
      return f"{self.tries} restarts got it no further"
    if len(self.restarts) >= MOST_AN_HOUR:
      return f"{MOST_AN_HOUR} restarts within an hour"
    self.tries += 1
    self.restarts.append(now)
    return ""

  def _pause(self) -> float:
    return min(LONGEST_PAUSE, self.pause * 2.0 ** (self.tries - 1)) * random.uniform(0.5, 1.5)

  def _tell(self, pid: int, start: int | None, code: int, why: str, over: str, pause: float) -> None:
    """One line to whoever looks, and one that stays."""
    left = self.retries - self.tries
    what = f"not started again: {over}" if over else f"starts again in {pause:.1f} s, {left} attempts left"
    say(f"the trainer (process {pid}) {why}; reached: {self.last[1]}; {what}")
    row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "pid": pid, "start": start, "exit": code, "cause": why}
    row |= self.last[1]._asdict() | {"restart": not over, "why_not": over, "attempts_left": left, "pause": round(pause, 2)}
    try:
      if not over or self.workdir.is_dir():  # a refused run leaves no folder behind
        self.own.mkdir(parents=True, exist_ok=True)
        with open(self.own / "restarts.jsonl", "a") as f:
          f.write(json.dumps(row) + "\n")
    except OSError as error:  # a full disk may be why the trainer died, and need not stay full
      say(f"restarts.jsonl could not be written: {error}")


def supervise(
  command: list[str], workdir: pathlib.Path, *, retries: int, grace: float, pause: float = 2.0, own: pathlib.Path | None = None
) -> int:
  """The guard: runs a Supervisor in a process of its own, passes signals on, and ends all that is left when it is gone. Returns
  the exit code, in both processes: the caller has nothing left to do but to exit with it."""
  spared = frozenset(processes.family(os.getpid()))
  adopt()
  lifeline, held = os.pipe()
  pid = os.fork()
  if pid == 0:
    os.close(held)
    os.setsid()
    return Supervisor(command, workdir, lifeline, retries=retries, grace=grace, pause=pause, own=own).run()
  os.close(lifeline)
  for s in (signal.SIGTERM, signal.SIGINT):
    signal.signal(s, lambda s, _: os.kill(pid, s))
  seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # not collected yet, so that a late signal goes to nobody else
  for s in (signal.SIGTERM, signal.SIGINT):
    signal.signal(s, signal.SIG_IGN)
  code = seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
  if code < 0:
    say(f"the supervisor (process {pid}) was killed by signal {-code}: its run is ended; the same command goes on with it")
  end_descendants(spared)
  return exit_code(code)


def folders(args: list[str]) -> tuple[str, str]:
  """Absolute paths of the run's folder (with --fresh one that does not exist) and of the one in it that this process alone writes, as far
  as it can be known before the processes of a run have met: core.hosts.own. ConfigError as train.py has it."""
  from core import hosts  # and jax, which the supervisor must never hold

  cfg, flags = config_lib.load_config(["train.py", *args])
  address, _, index = hosts.where(cfg.hosts)
  if address == "auto":
    return flags["workdir"], os.path.join(flags["workdir"], "hosts", os.uname().nodename)
  return flags["workdir"], os.path.join(flags["workdir"], "hosts", str(index)) if index > 0 else flags["workdir"]


def main(argv: list[str]) -> int:
  values = absl_flags.FlagValues()
  absl_flags.DEFINE_integer("retries", 3, "Restarts without progress.", lower_bound=0, flag_values=values)
  absl_flags.DEFINE_integer("grace", 120, "Seconds to save in.", lower_bound=0, flag_values=values)
  own, dash, theirs = argv[1:], "", []
  if "--" in own:
    own, dash, theirs = own[: own.index("--")], "--", own[own.index("--") + 1 :]
  if "--help" in own:
    print(__doc__.strip())
    return 0
  form = "write supervise.py [--retries=3] [--grace=120] -- and then what train.py takes"
  if not dash:
    raise config_lib.ConfigError(form)
  try:
    rest = values([argv[0], *own])[1:]
  except absl_flags.Error as error:
    raise config_lib.ConfigError(f"{config_lib.one_line(error)}; {form}") from error
  if rest:
    raise config_lib.ConfigError(f"{rest[0]} stands alone before the --; {form}")
  # in a process of its own: reading a config imports jax, which the supervisor must never hold
  with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), die_with, (os.getpid(),)) as reader:
    workdir, mine = reader.submit(folders, theirs).result()
  # --fresh has chosen the folder: a restart must go on in it, not start beside it
  command = [sys.executable, str(ROOT / "train.py"), *theirs, f"--workdir={workdir}", "--nofresh"]
  return supervise(command, pathlib.Path(workdir), retries=values.retries, grace=values.grace, own=pathlib.Path(mine))


if __name__ == "__main__":
  config_lib.run(main)
