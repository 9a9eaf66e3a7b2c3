"""What a metric looks at: the five most used getters of the benchmark, and cache_file and accessibility_tree, which cost a line each.

A getter is get(config, Looking) -> a value for the metric: a path, a text, an object, or None where there is nothing. Two ends score 0:
FileMissing, where the benchmark has no file, and LeftBad, where what an agent left cannot be looked at. Result and expected file of every
check have folders of their own: in the benchmark two with one name are one file.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from typing import Any

from envs.errors import CheckerFailed
from envs.guest import CommandTimeout, Guest, TooMuch
from envs.osworld.files import Files
from envs.osworld.lease import Lease, inside

BROWSERS = ("Google Chrome", "Chromium")
NEED_CHROME = {  # getters of desktop-env that speak to Chrome's debugging port or to the live web
  "active_tab_info", "active_tab_html_parse", "active_tab_url_parse", "open_tabs_info", "page_info", "pdf_from_url", "url_dashPart",
  "url_path_parse", "gotoRecreationPage_and_get_html_content", "chrome_appearance_mode_ui", "info_from_website", "number_of_search_results",
}  # fmt: skip
NEED_ACCOUNT = {"googledrive_file"}
NEED_HTTP = {"vm_command_error", "vlc_playing_info", "list_directory"}  # they open connections of their own, which the sandbox has not


class FileMissing(Exception):
  """A file that the check wants is not there."""


class LeftBad(Exception):
  """What is there cannot be looked at, by the doing of whoever left it: too much, or a program that does not end."""


MOST_TEXT = 16 << 20  # characters of what a command prints
STARVED = 0.5  # share of a command's time in which the guest waited for a processor of the host, from which its lateness is not its own


@dataclasses.dataclass
class Looking:
  """What getters look through. part: the folder of the lease for this side of this check; seconds: of a command in the guest; waited: how
  many seconds the guest has waited for a processor so far."""

  guest: Guest
  files: Files
  lease: Lease
  part: str
  seconds: float
  waited: Callable[[], float] = lambda: 0.0


def _several(config: dict) -> list[tuple[str, str, bool]]:
  """(path, dest, whether the metric is given it) of a config for one file or many."""
  if not config.get("multi", False):
    return [(config["path"], config["dest"], True)]
  gives = set(config.get("gives", [0]))
  return [(path, dest, i in gives) for i, (path, dest) in enumerate(zip(config["path"], config["dest"], strict=True))]


def vm_file(config: dict, look: Looking) -> Any:
  """Paths of files of the guest, fetched; None for one that is not there."""
  out = []
  for path, dest, given in _several(config):
    if config.get("time_suffix", False):
      stem, ending = os.path.splitext(dest)
      dest = f"{stem}_{time.strftime(config.get('time_format', '%Y%m%d_%H%M%S'))}{ending}"
    try:
      data = look.guest.file(path, look.seconds)
    except TooMuch as much:
      raise LeftBad(f"{path}: {much}") from None
    local = None if data is None else look.lease.write(dest, data, look.part)
    out += [local] if given else []
  return out[0] if len(out) == 1 else out


def cloud_file(config: dict, look: Looking) -> Any:
  """Paths of files of this machine's mirror, copied into the lease."""
  out = []
  for url, dest, given in _several(config):
    found = look.files.find(url)
    if found is None:
      raise CheckerFailed(f"{url} is not in the mirror")
    path = look.lease.path(dest, look.part)
    shutil.copyfile(found, path)
    out += [str(path)] if given else []
  return out[0] if len(out) == 1 else out


def rule(config: dict, look: Looking) -> Any:
  """The rules as they are written."""
  return config["rules"]


def vm_command_line(config: dict, look: Looking) -> str:
  """What a command prints in the guest."""
  before = look.waited()
  try:
    output = look.guest.execute(config["command"], config.get("shell", False), look.seconds).output
  except TooMuch as much:
    raise LeftBad(str(much)) from None
  except CommandTimeout as late:
    if look.waited() - before > STARVED * look.seconds:
      raise CheckerFailed(f"{late}, and the guest hardly got a processor") from late
    raise LeftBad(str(late)) from None  # a check may run what the agent wrote, or read a pipe that it left
  if len(output) > MOST_TEXT:
    raise LeftBad(f"{str(config['command'])[:80]} printed {len(output)} characters, more than {MOST_TEXT}")
  return output


def cache_file(config: dict, look: Looking) -> str:
  """A file that a setup or postconfig step left in the lease (stdout of execute)."""
  path = look.lease.path(config["path"])
  if not path.is_file():
    raise FileMissing(config["path"])
  return str(path)


def accessibility_tree(config: dict, look: Looking) -> str:
  return look.guest.accessibility(look.seconds)


def active_url(config: dict, look: Looking) -> str | None:
  """What stands in the address bar of Chrome or Chromium, after goto_prefix; None where there is none."""
  import defusedxml.ElementTree

  try:
    root = defusedxml.ElementTree.fromstring(look.guest.accessibility(look.seconds), forbid_dtd=True)
  except (ValueError, SyntaxError) as error:
    raise CheckerFailed(f"the accessibility tree cannot be read: {error}"[:200]) from error
  bars = [
    entry
    for application in root.iter("application")
    if application.get("name") in BROWSERS
    for entry in application.iter("entry")
    if entry.get("name") == "Address and search bar"
  ]
  return config.get("goto_prefix", "https://") + bars[0].text if bars and bars[0].text and bars[-1].text else None


GETTERS: dict[str, Callable[[dict, Looking], Any]] = {
  "vm_file": vm_file,
  "cloud_file": cloud_file,
  "rule": rule,
  "vm_command_line": vm_command_line,
  "active_url_from_accessTree": active_url,
  "cache_file": cache_file,
  "accessibility_tree": accessibility_tree,
}


def misfit(config: dict) -> str:
  """What is wrong with the config of a built-in getter; "" if nothing is."""
  kind = config["type"]
  if kind in ("vm_file", "cloud_file"):
    if missing := [name for name in ("path", "dest") if not config.get(name)]:
      return f"getter {kind} lacks {', '.join(missing)}"
    several = isinstance(config["path"], list), isinstance(config["dest"], list)
    if several != (bool(config.get("multi", False)),) * 2 or several[0] and len(config["path"]) != len(config["dest"]):
      return f"getter {kind}: path and dest are lists of one length with multi, texts without"
  if kind == "vm_command_line" and not isinstance(command := config.get("command", ""), str):
    if not (isinstance(command, list) and all(isinstance(word, str) for word in command)):
      return f"getter vm_command_line: command is {command!r:.60}, wanted a text or a list of texts"
  if kind in ("vm_file", "cloud_file"):
    gives, form = config.get("gives", [0]), config.get("time_format", "")
    if not (isinstance(gives, list) and all(type(i) is int for i in gives)):
      return f"getter {kind}: gives is {gives!r:.60}, wanted a list of whole numbers"
    if not isinstance(form, str) or "/" in form:
      return f"getter {kind}: time_format is {form!r:.60}, wanted a text without a slash"
  if kind == "active_url_from_accessTree" and not isinstance(prefix := config.get("goto_prefix", ""), str):
    return f"getter {kind}: goto_prefix is {prefix!r:.60}, wanted a text"
  wanted = {"rule": ("rules",), "vm_command_line": ("command",), "cache_file": ("path",)}.get(kind, ())
  if missing := [name for name in wanted if name not in config]:
    return f"getter {kind} lacks {', '.join(missing)}"
  names = {"vm_file": "dest", "cloud_file": "dest", "cache_file": "path"}.get(kind)
  for name in (config[names] if kind != "cache_file" and isinstance(config[names], list) else [config[names]]) if names else ():
    if not isinstance(name, str) or not inside(name):
      return f"getter {kind}: {name!r:.60} is no name of a file in the cache"
  return ""
