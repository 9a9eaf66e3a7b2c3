"""Which task files can be run here, and the files that they need. `python -m envs.osworld --help`."""

from __future__ import annotations

import argparse
import collections
import json
import sys

from envs.errors import InfraError
from envs.osworld import hand as at_hand
from envs.osworld import taskfile
from envs.osworld.files import Files

ABOUT = """Reads OSWorld task files as they are (FOLDER/examples/<domain>/<id>.json).

  python -m envs.osworld --list --tasks=FOLDER [--json]            every id, and "runs" or why it cannot be run
  python -m envs.osworld --prefetch --tasks=FOLDER --store=FOLDER  downloads the files that those tasks name

Without --mirror or --store the list says of a task whose files are missing which one; nothing is downloaded but by --prefetch."""


def parser() -> argparse.ArgumentParser:
  p = argparse.ArgumentParser("python -m envs.osworld", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
  p.add_argument("--list", action="store_true", help="say of every task whether it can be run")
  p.add_argument("--json", action="store_true", help="the list as one JSON object a line: id, domain, path, runs, why")
  p.add_argument("--prefetch", action="store_true", help="download what --store and --mirror lack")
  p.add_argument("--tasks", required=True, metavar="FOLDER", help="env.tasks")
  p.add_argument("--index", default="", help="env.index: a file in FOLDER, ids by domain; default: all task files")
  p.add_argument("--mirror", action="append", default=[], metavar="PREFIX=FOLDER", help="one of env.mirrors; may be given again")
  p.add_argument("--store", default="", metavar="FOLDER", help="env.store")
  p.add_argument("--password", default="password", help="env.password")
  p.add_argument("--uploads", default="", metavar="FOLDER", help="env.uploads")
  p.add_argument("--evaluator", default="", metavar="PYTHON", help="env.evaluator: an interpreter with desktop-env")
  p.add_argument("--sandbox", default="auto", choices=("auto", "on", "off"), help="env.sandbox")
  return p


def rows(paths: list, hand: at_hand.Hand) -> list[dict]:
  """What is known of each task file; one that cannot be read is a row like any other."""
  out = []
  for path, task, why in at_hand.looked_at(paths, hand):
    row = {"id": path.stem if task is None else task.id, "domain": path.parent.name, "path": str(path)}
    out.append(row | {"runs": not why, "why": why})
  return out


def kind_of(why: str) -> str:
  """A reason without its particulars, to count by."""
  return why.split(":")[0].split(" (")[0].split(", which")[0] if not why.startswith("unknown") else " ".join(why.split()[:2])


def main(argv: list[str]) -> int:
  asked = parser().parse_args(argv)
  if not (asked.list or asked.prefetch):
    parser().error("nothing to do: wanted --list or --prefetch")
  try:
    files = Files(asked.mirror, asked.store)
    paths = taskfile.find(asked.tasks, asked.index)
    if asked.prefetch:
      failed = files.prefetch(url for path in paths for url in _urls(path))
      print(f"{len(failed)} files could not be had", file=sys.stderr)
      return 1 if failed else 0
    metrics, getters = at_hand.foreign(asked.evaluator, 8 << 30, asked.sandbox) if asked.evaluator else (frozenset(), frozenset())
    found = rows(paths, at_hand.Hand(files, metrics, getters, asked.password, asked.uploads))
  except (ValueError, OSError, InfraError) as error:
    print(f"envs.osworld: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
  for row in found:
    print(json.dumps(row) if asked.json else f"{row['domain']}/{row['id']}  {row['why'] or 'runs'}")
  if not asked.json:
    counts = collections.Counter(kind_of(row["why"]) for row in found if row["why"])
    print(f"\n{sum(row['runs'] for row in found)} of {len(found)} can be run")
    for why, count in counts.most_common():
      print(f"{count:4d}  {why}")
  return 0


def _urls(path) -> list[str]:
  try:
    return list(taskfile.read(path).urls())
  except ValueError as error:
    print(error, file=sys.stderr)
    return []


if __name__ == "__main__":
  try:
    sys.exit(main(sys.argv[1:]))
  except BrokenPipeError:  # the reader of the list has gone
    sys.exit(0)
