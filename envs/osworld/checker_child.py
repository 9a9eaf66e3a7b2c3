"""The program that computes metrics, in a process of its own: JSON lines on standard input and output (envs/osworld/checker.py).

  python checker_child.py MEMORY_BYTES ROOT     the metrics of envs.osworld.metrics; ROOT: the repository
  python checker_child.py MEMORY_BYTES          those of desktop-env, in a user's interpreter: nothing of this project is imported

Only the standard library is needed to start it, in Python 3.8 or later. Modules that desktop_env wants and that are not installed are
stood in for: a metric that really needs one fails with its name. What prints, prints to standard error.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import resource
import signal
import sys
import time
import types

MAX_LINE = 64 << 20


class TooLong(Exception):
  """A metric took longer than it was given."""


class Starved(BaseException):
  """A metric took longer than it was given, and had the processor for less than half of that: it may have been good for a score. No
  Exception, so that no metric takes it for a fault of the file it was reading."""


class Absent(types.ModuleType):
  """Stands in for a module that is not installed."""

  def __getattr__(self, name):
    if name.startswith("__"):
      raise AttributeError(name)
    return Absent(f"{self.__name__}.{name}")

  def __call__(self, *args, **kwargs):
    raise ModuleNotFoundError(f"{self.__name__} is not installed in {sys.executable}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Asked last: gives an Absent for what desktop_env itself imports and nobody has. Other packages go without, as they are used to."""

  def find_spec(self, name, path=None, target=None):
    frame = sys._getframe(1)
    while frame is not None and "importlib" in frame.f_code.co_filename:
      frame = frame.f_back
    asking = frame.f_globals.get("__name__", "") if frame is not None else ""
    if not asking.startswith("desktop_env") or name.startswith("desktop_env"):
      return None
    return importlib.machinery.ModuleSpec(name, self, is_package=True)

  def create_module(self, spec):
    module = Absent(spec.name)
    module.__path__ = []
    return module

  def exec_module(self, module):
    pass


class Pipe:
  """Objects from and to the parent, one a line."""

  def __init__(self):
    self.out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # desktop_env prints
    self.lines = sys.stdin.buffer

  def get(self):
    line = self.lines.readline(MAX_LINE)
    return json.loads(line) if line else None

  def put(self, value):
    self.out.write(json.dumps(value) + "\n")
    self.out.flush()

  def ask(self, name, args):
    """A call that only the parent can answer: it has the guest."""
    self.put({"call": name, "args": list(args)})
    answer = self.get()
    if answer is None or "failed" in answer:
      raise RuntimeError((answer or {}).get("failed", "the parent is gone"))
    if "file" in answer:
      with open(answer["file"], "rb") as file:
        return file.read()
    return answer["value"]


class Controller:
  """desktop_env's controller, as far as its getters use it: every method is the parent's."""

  CALLS = (
    "execute_python_command", "get_file", "get_accessibility_tree", "get_vm_directory_tree", "get_vm_window_size", "get_vm_wallpaper",
    "get_vm_screen_size", "get_vm_desktop_path", "get_terminal_output",
  )  # fmt: skip

  def __init__(self, pipe):
    for name in self.CALLS:
      setattr(self, name, lambda *args, name=name: pipe.ask(name, args))


class Env:
  """What a getter of desktop_env is given instead of a DesktopEnv."""

  vm_platform, vm_machine, vm_ip, server_port, chromium_port, vlc_port = "Linux", "x86_64", "127.0.0.1", 5000, 9222, 8080
  current_use_proxy = False

  def __init__(self, pipe, folder):
    self.controller, self.cache_dir = Controller(pipe), folder
    self.setup_controller = types.SimpleNamespace(
      _activate_window_setup=lambda name, strict=False, by_class=False: pipe.ask("activate_window", [name, strict, by_class])
    )


class Theirs:
  """desktop_env's metrics and getters."""

  def __init__(self):
    sys.meta_path.append(Finder())
    from desktop_env.evaluators import getters, metrics

    self.metrics, self.getters = metrics, getters

  def listed(self):
    functions = lambda module: [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
    try:
      from importlib.metadata import version

      which = version("desktop-env")
    except ImportError:
      which = "unknown"
    getters = [name[4:] for name in functions(self.getters) if name.startswith("get_")]
    return {"metrics": sorted(functions(self.metrics)), "getters": sorted(getters), "version": f"desktop-env {which}"}

  def metric(self, name, result, expected, options):
    arguments = (result,) if expected is None else (result, expected)
    return getattr(self.metrics, name)(*arguments, **options)

  def whose(self, error):
    return "grader"


class Ours:
  """This project's."""

  def __init__(self, root):
    sys.path.insert(0, root)
    from envs.osworld import metrics
    from envs.osworld.metrics import guard

    self.metrics, self.guard = metrics, guard

  def listed(self):
    return {"metrics": sorted(self.metrics.METRICS), "getters": [], "version": "practice"}

  def metric(self, name, result, expected, options):
    arguments = (result,) if expected is None else (result, expected)
    return self.metrics.metric(name)(*arguments, **options)

  def whose(self, error):
    """A result that cannot be read, or is too much to read, is its maker's."""
    return "result" if isinstance(error, (self.guard.BadResult, MemoryError, RecursionError, TooLong)) else "grader"


def plain(value):
  """What goes through JSON; numpy's numbers become Python's."""
  return value.item() if hasattr(value, "item") else value


def answer(asked, suite, pipe):
  if asked["do"] == "list":
    return suite.listed()
  if asked["do"] == "getter":
    return {"value": getattr(suite.getters, f"get_{asked['name']}")(Env(pipe, asked["folder"]), asked["config"])}
  return {"score": float(plain(suite.metric(asked["name"], asked["result"], asked["expected"], asked["options"])))}


def late(number, frame, began=0.0, seconds=0.0):
  raise TooLong if time.process_time() - began > 0.5 * seconds else Starved


def main():
  memory, pipe = int(sys.argv[1]), Pipe()
  for limit, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 512 << 20), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (most, most))
  try:
    suite = Ours(sys.argv[2]) if len(sys.argv) > 2 else Theirs()
    pipe.put(suite.listed())
  except Exception as error:  # noqa: BLE001 - the parent hears of it
    failed = error
    pipe.put({"error": f"{type(failed).__name__}: {failed}"[:500]})
    return 1
  while (asked := pipe.get()) is not None:
    signal.signal(signal.SIGALRM, functools.partial(late, began=time.process_time(), seconds=asked["seconds"]))
    signal.setitimer(signal.ITIMER_REAL, asked["seconds"])
    try:
      said = answer(asked, suite, pipe)
    except (Exception, Starved) as error:  # noqa: BLE001 - whatever a metric raises is for the parent to judge
      failed = error
      said = {"error": f"{type(failed).__name__}: {failed}"[:500], "whose": suite.whose(failed)}
    signal.setitimer(signal.ITIMER_REAL, 0)
    pipe.put(said)
  return 0


if __name__ == "__main__":
  sys.exit(main())
