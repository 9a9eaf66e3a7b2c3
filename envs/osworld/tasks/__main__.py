"""Writes this project's own tasks as OSWorld task files: python -m envs.osworld.tasks FOLDER [variants of each family]."""

from __future__ import annotations

import json
import pathlib
import sys

from envs.osworld import tasks


def main(argv: list[str]) -> int:
  if not argv or len(argv) > 2 or argv[0].startswith("-") or (len(argv) > 1 and not argv[1].isdigit()):
    print(__doc__, file=sys.stderr)
    return 2
  folder, count = pathlib.Path(argv[0]), int(argv[1]) if len(argv) > 1 else 4
  lists: dict[str, dict[str, list[str]]] = {"practice.json": {}, "held_out.json": {}}
  for family in tasks.FAMILIES:
    for index, kept in (("practice.json", False), ("held_out.json", True)):
      for seed in tasks.seeds(family, count, kept):
        domain, name = tasks.domain_of(family), tasks.name_of(family, seed)
        path = folder / "examples" / domain / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tasks.task_file(family, seed), indent=2) + "\n")
        tasks.write_files(folder / "files", family, seed)
        lists[index].setdefault(domain, []).append(name)
  for index, domains in lists.items():
    (folder / index).write_text(json.dumps(domains, indent=1) + "\n")
  print(f"{folder}: {len(tasks.FAMILIES)} families; --mirror={tasks.URL}={folder / 'files'} finds their files")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
