"""Setup steps, run in the guest, their results checked. Before an episode a step that fails is a ResetFailed: a start screen without its
file or window is not the task's. After it (postconfig) the agent may have closed the window that a step looks for: that is noted.

Differs from the benchmark's runner: nothing is retried or swallowed, every wait has a deadline, files come from this machine only.
"""

from __future__ import annotations

import pathlib
import time
from typing import Any

from envs.errors import ResetFailed
from envs.guest import CommandTimeout, Guest, Ran, TooMuch
from envs.osworld.files import Files
from envs.osworld.lease import Lease
from envs.osworld.taskfile import fill

POLL = 0.3  # seconds between two runs of a command
WINDOW_POLL = 1.0  # between two looks for a window, which a slow guest pays for while it starts the application
TEXT_LIMIT = 16 << 20


class StepFailed(Exception):
  """A step did not do what it says. One line."""


def values_of(size: tuple[int, int], password: str) -> dict[str, str]:
  """What placeholders of commands stand for. size: (width, height) of the screen."""
  width, height = size
  halves = {"SCREEN_WIDTH_HALF": str(width // 2), "SCREEN_HEIGHT_HALF": str(height // 2)}
  return {"CLIENT_PASSWORD": password, "SCREEN_WIDTH": str(width), "SCREEN_HEIGHT": str(height)} | halves


class Setup:
  """Runs steps in one guest. values: of placeholders; step_seconds: of one step; window_seconds: until a window is there."""

  def __init__(
    self, guest: Guest, files: Files, lease: Lease, values: dict[str, str], uploads: str, step_seconds: float, window_seconds: float
  ):  # fmt: skip
    self.guest, self.files, self.lease, self.values, self.uploads = guest, files, lease, values, uploads
    self.step_seconds, self.window_seconds = step_seconds, window_seconds

  def before(self, steps: tuple[dict, ...], name: str) -> None:
    """Setup of a task. ResetFailed names the step."""
    for number, step in enumerate(steps):
      try:
        self.run(step)
      except StepFailed as failed:
        raise ResetFailed(f"{name}: setup step {number} ({step['type']}): {failed}") from failed

  def after(self, steps: tuple[dict, ...]) -> list[str]:
    """Postconfig: what failed, to be noted."""
    told = []
    for number, step in enumerate(steps):
      try:
        self.run(step, patient=False)
      except StepFailed as failed:
        told.append(f"postconfig step {number} ({step['type']}): {failed}"[:200])
    return told

  def run(self, step: dict, patient: bool = True) -> None:
    """One step; StepFailed if it did not do it, an infra error if the guest broke. patient: windows are waited for."""
    kind, given = step["type"], step["parameters"]
    handler = getattr(self, f"_{kind}", None)
    if handler is None:
      raise StepFailed("there is no way to do it here")
    if kind in ("activate_window", "close_window"):
      handler(patient=patient, **given)
    else:
      handler(**given)

  def _download(self, files: list[dict]) -> None:
    for file in files:
      found = self.files.find(file["url"])
      if found is None:
        raise StepFailed(f"{file['url']} is not on this machine")
      self.guest.upload(file["path"], found.read_bytes(), self.step_seconds)

  def _upload_file(self, files: list[dict]) -> None:
    root = pathlib.Path(self.uploads).expanduser().resolve()
    for file in files:
      path = (root / file["local_path"]).resolve()
      if not path.is_relative_to(root) or not path.is_file():
        raise StepFailed(f"{file['local_path']} is no file of env.uploads ({root})")
      self.guest.upload(file["path"], path.read_bytes(), self.step_seconds)

  def _launch(self, command: Any, shell: bool = False) -> None:
    if not shell and isinstance(command, str):
      command = command.split()
    self.guest.launch(fill(command, self.values, "launch"), shell, self.step_seconds)

  def _open(self, path: str) -> None:
    if not self.guest.open_file(path, self.step_seconds):
      raise StepFailed(f"there is no file {path}")

  def _execute(self, command: Any, stdout: str = "", stderr: str = "", shell: bool = False, until: dict | None = None) -> None:
    """Once, whatever it returns; with `until`, again and again until it returns or prints that."""
    command, limit = fill(command, self.values, "execute"), time.monotonic() + self.step_seconds
    while True:
      try:
        ran = self.guest.execute(command, shell, max(limit - time.monotonic(), 1.0))
      except TooMuch as much:
        raise StepFailed(str(much)) from None
      except CommandTimeout:
        raise StepFailed(f"{str(command)[:80]} did not end within {self.step_seconds:g} s") from None
      for name, text in ((stdout, ran.output), (stderr, ran.error)):
        if name:
          self.lease.write(name, text[:TEXT_LIMIT].encode(errors="replace"))  # JSON can hold half of a surrogate pair
      if not until or _holds(ran, until):
        return
      if time.monotonic() > limit:
        last = f"{ran.returncode}: {(ran.error or ran.output)[:80]!r}"
        raise StepFailed(f"{str(command)[:80]} never came to {until}, last it returned {last}")
      time.sleep(POLL)

  _command = _execute

  def _execute_with_verification(
    self, command: Any, verification: dict | None = None, max_wait_time: float = 10, check_interval: float = 1.0, shell: bool = False
  ) -> None:  # fmt: skip
    wait = min(float(max_wait_time), self.step_seconds)
    command = fill(command, self.values, "execute_with_verification")
    ran = self.guest.execute_with_verification(command, verification or {}, shell, wait, float(check_interval), wait + self.step_seconds)
    if ran is None:
      raise StepFailed(f"{verification} did not come true within {wait:g} s")

  def _sleep(self, seconds: float) -> None:
    time.sleep(min(float(seconds), self.step_seconds))

  def _activate_window(self, window_name: str, strict: bool = False, by_class: bool = False, patient: bool = True) -> None:
    self._window(lambda: self.guest.activate_window(window_name, strict, by_class, self.step_seconds), window_name, patient)

  def _close_window(self, window_name: str, strict: bool = False, by_class: bool = False, patient: bool = True) -> None:
    self._window(lambda: self.guest.close_window(window_name, strict, by_class, self.step_seconds), window_name, patient)

  def _window(self, act: Any, name: str, patient: bool) -> None:
    limit = time.monotonic() + (self.window_seconds if patient else 0)
    while not act():
      if time.monotonic() >= limit:
        raise StepFailed(f"there is no window {name!r}")
      time.sleep(min(WINDOW_POLL, self.window_seconds))

  def _change_wallpaper(self, path: str) -> None:
    if not self.guest.change_wallpaper(path, self.step_seconds):
      raise StepFailed(f"there is no file {path}")


def _holds(ran: Ran, until: dict) -> bool:
  return (
    "returncode" in until and ran.returncode == until["returncode"]
    or "stdout" in until and until["stdout"] in ran.output
    or "stderr" in until and until["stderr"] in ran.error
  )  # fmt: skip
