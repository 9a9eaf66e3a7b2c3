"""Tasks of this project's own for the Debian desktop, in OSWorld's format: families, each a generator of variants from a seed.

  python -m envs.osworld.tasks FOLDER     writes task files and what they upload: FOLDER/examples/<domain>/<id>.json, FOLDER/files/<id>/

A variant is practised or held out by a hash of its content, never both. Every one has a checker and a scripted solution.
"""

from __future__ import annotations

import functools
import json
import pathlib
import random
import zlib

from envs.osworld.tasks import documents, texts
from envs.osworld.tasks.spec import URL, Spec

VERSION = "practice-desktop/1"
FAMILIES = {make.__name__: make for make in (*texts.FAMILIES, *documents.FAMILIES)}
DOMAINS = {
  "text": ("text_editor", "mousepad"), "shell": ("terminal", "lxterminal"), "files": ("file_manager", "pcmanfm"),
  "settings": ("settings", "mousepad"), "writer": ("libreoffice_writer", "libreoffice_writer"),
  "calc": ("libreoffice_calc", "libreoffice_calc"),
}  # fmt: skip
HELD_OUT = 4  # one variant in so many
MOST_SEEDS = 1500  # looked at for one list of a family


def digest(spec: Spec) -> int:
  """Tells start states apart: what is asked, and of which files."""
  files = [[name, place, data.hex()] for name, (place, data) in sorted(spec.files.items())]
  return zlib.crc32(json.dumps([spec.instruction, files]).encode())


def held_out(spec: Spec) -> bool:
  """Whether a variant is never practised."""
  return digest(spec) % HELD_OUT == 0


@functools.lru_cache(maxsize=4096)
def variant(family: str, seed: int) -> Spec:
  return FAMILIES[family](random.Random(f"{family}-{seed}"))


@functools.lru_cache(maxsize=256)
def seeds(family: str, count: int, kept: bool) -> tuple[int, ...]:
  """The first `count` seeds whose variants are told apart and are held out (kept) or not. Fewer where the family has no more."""
  out, seen = [], set()
  for seed in range(MOST_SEEDS):
    spec = variant(family, seed)
    if (mark := digest(spec)) not in seen and held_out(spec) == kept:
      seen.add(mark)
      out.append(seed)
      if len(out) == count:
        break
  return tuple(out)


def name_of(family: str, seed: int) -> str:
  return f"practice-{family}-{seed}"


def domain_of(family: str) -> str:
  return DOMAINS[family.partition("_")[0]][0]


def task_file(family: str, seed: int) -> dict:
  """One variant as OSWorld writes tasks."""
  spec, name = variant(family, seed), name_of(family, seed)
  app = DOMAINS[family.partition("_")[0]][1]
  uploads = [{"url": f"{URL}{name}/{file}", "path": path} for file, (path, _) in spec.files.items()]
  config = [{"type": "download", "parameters": {"files": uploads}}] if uploads else []
  return {
    "id": name, "snapshot": app, "instruction": spec.instruction, "source": VERSION, "config": [*config, *spec.config], "trajectory": "",
    "related_apps": [app], "evaluator": spec.evaluator, "warm": list(spec.warm), "proxy": False, "fixed_ip": False,
    "possibility_of_env_change": "low",
  }  # fmt: skip


def script_of(family: str, seed: int) -> tuple[str, ...]:
  """What solves it, in the desktop grammar."""
  return (*variant(family, seed).script, "Action: finished()")


def write_files(folder: pathlib.Path, family: str, seed: int) -> None:
  """The files that a variant uploads, under FOLDER/<id>/."""
  for file, (_, data) in variant(family, seed).files.items():
    path = folder / name_of(family, seed) / file
    if not path.is_file() or path.read_bytes() != data:
      path.parent.mkdir(parents=True, exist_ok=True)
      fresh = path.with_name(f".{file}.new")
      fresh.write_bytes(data)
      fresh.replace(path)
