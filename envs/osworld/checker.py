"""Metrics are computed in processes of their own, with a limit on time and memory, without a network and, where Linux lets us, with a
file system that they can only read: what they look at was made by an agent, and some of desktop-env's run it.

Two programs, started when first needed: this project's metrics under this interpreter, and desktop-env's under a user's (env.evaluator).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from envs import children, processes
from envs.errors import CheckerFailed, InfraError

PROGRAM = pathlib.Path(__file__).with_name("checker_child.py")
ROOT = PROGRAM.parents[2]
START_SECONDS = 90.0  # desktop-env takes 20 s to import on a cold disk
SPARE = 5.0  # seconds that a metric has beyond its own alarm before its process is ended
MAX_LINE = 64 << 20
SANDBOXES = ("auto", "on", "off")


class SandboxMissing(ValueError):
  """This machine cannot give a process namespaces of its own."""


def enclosed(argv: list[str], folder: str) -> list[str]:
  """The command line in namespaces of its own: no network, no other processes, a file system to read, and one folder to write. Without the
  capabilities of these namespaces, with which it could make the file system writable again."""
  script = (
    'mount --bind "$0" "$0" && for m in $(cut -d" " -f2 /proc/self/mounts); do mount -o remount,bind,ro "$m" 2>/dev/null; done; '
    'mount -o remount,bind,rw "$0" && cd "$0" && exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs -- "$@"'
  )
  spaces = ["--user", "--map-root-user", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
  return ["unshare", *spaces, "--", "sh", "-c", script, folder, *argv]


@functools.lru_cache(maxsize=1)
def can_enclose() -> str:
  """Why a process cannot be enclosed here; "" where it can. Tried once."""
  if shutil.which("unshare") is None:
    return "util-linux's unshare is not installed"
  with tempfile.TemporaryDirectory(prefix="practice-enclosed-") as folder:
    tries = "touch inside && ! mount -o remount,bind,rw / 2>/dev/null && ! touch ../practice-outside 2>/dev/null"
    probe = enclosed(["sh", "-c", tries], folder)
    try:
      done = subprocess.run(probe, capture_output=True, timeout=20, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
      return "unshare did not come back"
    return "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip()[:200] or f"unshare ended with {done.returncode}"


class Program:
  """One such process. folder: the only one that it may write; python: its interpreter; theirs: desktop-env's metrics, else ours."""

  def __init__(self, folder: str, python: str, theirs: bool, memory: int, sandbox: str):
    python = os.path.expanduser(python)
    python = os.path.abspath(shutil.which(python) or python)  # it runs in another folder; a virtual environment's link stays one
    argv = [python, "-u", str(PROGRAM), str(memory), *([] if theirs else [str(ROOT)])]
    why = can_enclose() if sandbox != "off" else ""
    if why and sandbox == "on":
      raise SandboxMissing(f"env.sandbox is 'on', and this machine has none: {why}")
    if sandbox != "off" and not why:
      argv = enclosed(argv, folder)
    elif sandbox == "auto":
      print(f"metrics run with limits on time and memory, but not enclosed: {why}", file=sys.stderr, flush=True)
    names = ("PATH", "LANG", "LC_ALL")
    env = {name: os.environ[name] for name in names if name in os.environ}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "HOME": folder, "TMPDIR": folder}
    self.log = tempfile.TemporaryFile()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
    self.popen = subprocess.Popen(children.tied(argv), cwd=folder, env=env, **pipes)
    os.set_blocking(self.popen.stdin.fileno(), False)  # one that is stopped takes nothing
    self._held = b""
    try:
      self.listed = self._get(time.monotonic() + START_SECONDS)
      if "error" in self.listed:
        raise CheckerFailed(f"{python} cannot compute metrics: {self.listed['error']}")
    except BaseException:
      self.close()
      raise

  def ask(self, asked: dict, seconds: float, helper: Callable[[str, list], dict] | None = None) -> dict:
    """One question and its answer; on the way the program may call the helper. CheckerFailed if there is no answer in time."""
    until = time.monotonic() + seconds + SPARE
    self._put(asked | {"seconds": seconds}, until)
    while True:
      said = self._get(until)
      if "call" not in said:
        return said
      if helper is None:
        raise CheckerFailed(f"a metric asked for {said['call']!r:.60}")
      self._put(helper(said["call"], said["args"]), until)

  def _put(self, value: dict, until: float) -> None:
    left, pipe = memoryview(json.dumps(value).encode() + b"\n"), self.popen.stdin.fileno()
    while left:
      if not select.select([], [pipe], [], max(until - time.monotonic(), 0.0))[1]:
        raise CheckerFailed(f"the metric did not end in time, nor take what it was asked: {self._told()}")
      try:
        left = left[os.write(pipe, left) :]
      except BlockingIOError:
        continue
      except OSError:
        raise CheckerFailed(f"the process of the metrics is gone: {self._told()}") from None

  def _get(self, until: float) -> dict:
    while b"\n" not in self._held:
      left = until - time.monotonic()
      if left <= 0 or not select.select([self.popen.stdout], [], [], left)[0]:
        raise CheckerFailed(f"the metric did not end in time: {self._told()}")
      chunk = os.read(self.popen.stdout.fileno(), 1 << 16)
      if not chunk or len(self._held) > MAX_LINE:
        with contextlib.suppress(subprocess.TimeoutExpired):
          self.popen.wait(1.0)  # its pipe closes a moment before it can be reaped
        raise CheckerFailed(f"the process of the metrics ended: {self._told()}")
      self._held += chunk
    line, self._held = self._held.split(b"\n", 1)
    try:
      said = json.loads(line)
    except (ValueError, RecursionError):
      said = None
    if not isinstance(said, dict):
      raise CheckerFailed(f"the process of the metrics said {line[:100]!r}")
    return said

  def _told(self) -> str:
    self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 2000))
    lines = self.log.read().decode(errors="replace").strip().splitlines()
    return f"exit {self.popen.poll()}, {lines[-1][:200] if lines else 'nothing said'}"

  def close(self) -> None:
    others = processes.family(self.popen.pid) if self.popen.poll() is None else []
    for pid, start in [(self.popen.pid, None), *others]:
      if pid != self.popen.pid or self.popen.poll() is None:
        processes.send(pid, start, 9)
    self.popen.wait(10)
    for pipe in (self.popen.stdin, self.popen.stdout, self.log):
      try:
        pipe.close()
      except BrokenPipeError:
        pass


class Checker:
  """folder: the lease's. evaluator: an interpreter with desktop-env, "" for none. seconds: of one metric; memory: bytes of a process."""

  def __init__(self, folder: str, evaluator: str = "", seconds: float = 60.0, memory: int = 8 << 30, sandbox: str = "auto"):
    self.folder, self.evaluator, self.seconds, self.memory, self.sandbox = folder, evaluator, seconds, memory, sandbox
    self._programs: dict[bool, Program] = {}
    self.used: set[str] = set()  # versions of what has graded since it was cleared

  def program(self, theirs: bool) -> Program:
    if theirs not in self._programs:
      if theirs and not self.evaluator:
        raise CheckerFailed("this metric is desktop-env's: wanted env.evaluator, an interpreter that has it")
      python = self.evaluator if theirs else sys.executable
      self._programs[theirs] = Program(self.folder, python, theirs, self.memory, self.sandbox)
    return self._programs[theirs]

  def listed(self, theirs: bool) -> dict:
    """metrics and getters, by name, and the version."""
    return self.program(theirs).listed

  def metric(self, name: str, result: Any, expected: Any, options: dict, theirs: bool = False) -> tuple[float, str]:
    """(score, why it is 0 where the result could not be read). CheckerFailed where there is no score."""
    said = self._ask({"do": "metric", "name": name, "result": result, "expected": expected, "options": options}, theirs)
    if "error" in said:
      if said.get("whose") == "result":
        return 0.0, said["error"]
      raise CheckerFailed(f"metric {name}: {said['error']}")
    self.used.add(self.program(theirs).listed["version"])
    return said["score"], ""

  def getter(self, name: str, config: dict, helper: Callable[[str, list], dict]) -> Any:
    """What desktop-env's getter finds; it reaches the guest through the helper. An infra error of the helper ends it."""
    said = self._ask({"do": "getter", "name": name, "config": config, "folder": self.folder}, True, helper)
    if "error" in said:
      raise CheckerFailed(f"getter {name}: {said['error']}")
    return said["value"]

  def _ask(self, asked: dict, theirs: bool, helper: Callable | None = None) -> dict:
    program = self.program(theirs)
    try:
      return program.ask(asked, self.seconds, helper)
    except InfraError:
      self._programs.pop(theirs).close()  # in the middle of something; the next one is fresh
      raise

  def forget(self) -> None:
    """Ends desktop-env's process: what it keeps of one episode (some of its metrics run what an agent wrote) never meets the next."""
    if (program := self._programs.pop(True, None)) is not None:
      program.close()

  def close(self) -> None:
    while self._programs:
      self._programs.popitem()[1].close()
