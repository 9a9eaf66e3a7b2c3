"""Families for the text editor (mousepad), the terminal (lxterminal), the file manager (pcmanfm) and the desktop's settings."""

from __future__ import annotations

import json
import random

from envs.osworld.tasks.spec import DESKTOP, DOCUMENTS, HOME, Spec, fetched, keys, launch, printed, shell, window, write

NAMES = ("memo", "list", "plan", "notes", "stock", "guests", "errands", "songs")
ITEMS = (
  "apples", "bread", "candles", "dates", "eggs", "flour", "grapes", "honey", "ink", "jam", "kettle", "lamp", "milk", "nails", "oats",
  "paper", "quinces", "rice", "salt", "tea", "vinegar", "wool",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
FOLDERS = ("reports", "photos", "letters", "archive", "invoices", "drafts", "recipes", "travel")


def _lines(rng: random.Random, count: int = 4) -> tuple[str, list[str]]:
  return f"{rng.choice(NAMES)}.txt", rng.sample(ITEMS, count)


def _edited(name: str, lines: list[str], instruction: str, wanted: list[str], script: tuple[str, ...]) -> Spec:
  """A text file that is open in the editor, to be changed and saved."""
  path = f"{DESKTOP}/{name}"
  return Spec(
    f"{instruction} The file {name} on the Desktop is open in the text editor; save it when you are done.",
    (launch("mousepad", path), window(name)),
    fetched(path, "practice_lines", {"expected": wanted}),
    script + keys("ctrl s"),
    {name: (path, ("\n".join(lines) + "\n").encode())},
  )


def text_append(rng: random.Random) -> Spec:
  name, lines = _lines(rng)
  day = rng.choice(DAYS)
  return _edited(name, lines, f"Add the line {day} at the end.", [*lines, day], (*keys("ctrl end"), write(day)))


def text_prepend(rng: random.Random) -> Spec:
  name, lines = _lines(rng)
  day = rng.choice(DAYS)
  return _edited(name, lines, f"Add the line {day} above the first line.", [day, *lines], (*keys("ctrl home"), write(f"{day}\n")))


def text_delete_line(rng: random.Random) -> Spec:
  name, lines = _lines(rng)
  at = rng.randrange(3)
  script = keys("ctrl home", *["down"] * at, "shift down", "delete")
  return _edited(name, lines, f"Delete the line {lines[at]}.", lines[:at] + lines[at + 1 :], script)


def text_replace_line(rng: random.Random) -> Spec:
  name, lines = _lines(rng)
  at, day = rng.randrange(3), rng.choice(DAYS)
  script = (*keys("ctrl home", *["down"] * at, "shift end"), write(day))
  return _edited(name, lines, f"Replace the line {lines[at]} by {day}.", [*lines[:at], day, *lines[at + 1 :]], script)


def text_rewrite(rng: random.Random) -> Spec:
  name, lines = _lines(rng)
  first, second = rng.sample(DAYS, 2)
  script = (*keys("ctrl a"), write(f"{first}\n"), write(second))
  return _edited(name, lines, f"Replace all of the text by two lines, {first} and {second}.", [first, second], script)


def text_copy_line(rng: random.Random) -> Spec:
  name, lines = _lines(rng)
  script = keys("ctrl home", "shift down", "ctrl c", "ctrl end", "ctrl v")
  return _edited(name, lines, "Copy the first line to the end, so that it stands there twice.", [*lines, lines[0]], script)


def text_change_number(rng: random.Random) -> Spec:
  name, items = _lines(rng, 3)
  counts = rng.sample(range(10, 99), 4)
  lines = [f"{item} {count}" for item, count in zip(items, counts)]
  at = rng.randrange(2)
  wanted = [*lines[:at], f"{items[at]} {counts[3]}", *lines[at + 1 :]]
  script = (*keys("ctrl home", *["down"] * at, "end", "backspace", "backspace"), write(str(counts[3])))
  return _edited(name, lines, f"Change the number of {items[at]} from {counts[at]} to {counts[3]}.", wanted, script)


def _terminal(instruction: str, evaluator: dict, line: str, files: dict | None = None) -> Spec:
  """A terminal is open in the home folder; one line does it."""
  opened = launch("lxterminal", f"--working-directory={HOME}", "--title=Terminal", "-e", "bash --norc")
  setup = (opened, window("Terminal"))
  return Spec(f"{instruction} A terminal is open in your home folder.", setup, evaluator, (write(line + "\n"),), files or {})


def shell_make_folder(rng: random.Random) -> Spec:
  folder, inner = rng.sample(FOLDERS, 2)
  check = printed(f"test -d {DOCUMENTS}/{folder}/{inner} && echo it is there", ["it is there"])
  return _terminal(f"Make the folder {folder} in Documents, and in it the folder {inner}.", check, f"mkdir -p Documents/{folder}/{inner}")


def shell_move(rng: random.Random) -> Spec:
  name, lines = _lines(rng)
  new = rng.choice([n for n in NAMES if n not in name])
  check = printed(f"ls {DOCUMENTS}; cat {DOCUMENTS}/{new}.md", [f"{new}.md", *lines], [name])
  files = {name: (f"{DOCUMENTS}/{name}", ("\n".join(lines) + "\n").encode())}
  return _terminal(f"Rename the file {name} in Documents to {new}.md.", check, f"mv Documents/{name} Documents/{new}.md", files)


def shell_count(rng: random.Random) -> Spec:
  name, lines = _lines(rng, rng.randrange(3, 12))
  check = fetched(f"{DESKTOP}/count.txt", "practice_lines", {"expected": [str(len(lines))]})
  files = {name: (f"{DOCUMENTS}/{name}", ("\n".join(lines) + "\n").encode())}
  told = f"Count the lines of {name} in Documents and write only that number into count.txt on the Desktop."
  return _terminal(told, check, f"wc -l < Documents/{name} > Desktop/count.txt", files)


def shell_sort(rng: random.Random) -> Spec:
  name, lines = _lines(rng, 5)
  check = fetched(f"{DESKTOP}/sorted.txt", "practice_lines", {"expected": sorted(lines)})
  files = {name: (f"{DOCUMENTS}/{name}", ("\n".join(lines) + "\n").encode())}
  told = f"Write the lines of {name} in Documents, sorted by the alphabet, into sorted.txt on the Desktop."
  return _terminal(told, check, f"sort Documents/{name} > Desktop/sorted.txt", files)


def shell_executable(rng: random.Random) -> Spec:
  name = f"{rng.choice(NAMES)}-{rng.randrange(10, 99)}.sh"
  check = printed(f"test -x {DOCUMENTS}/{name} && echo it may run", ["it may run"])
  files = {name: (f"{DOCUMENTS}/{name}", b"#!/bin/sh\necho done\n")}
  return _terminal(f"Make the script {name} in Documents executable.", check, f"chmod +x Documents/{name}", files)


def shell_archive(rng: random.Random) -> Spec:
  name, lines = _lines(rng)
  folder = rng.choice(FOLDERS)
  check = printed(f"tar -tzf {DESKTOP}/{folder}.tar.gz", [f"{folder}/{name}"])
  files = {name: (f"{DOCUMENTS}/{folder}/{name}", ("\n".join(lines) + "\n").encode())}
  told = f"Pack the folder {folder} of Documents, with that name, into {folder}.tar.gz on the Desktop."
  return _terminal(told, check, f"tar -C Documents -czf Desktop/{folder}.tar.gz {folder}", files)


def _folder(rng: random.Random) -> tuple[str, str, dict, tuple[dict, ...]]:
  """A folder of one file, open in the file manager: (folder, file, files, setup)."""
  folder, (name, lines) = rng.choice(FOLDERS), _lines(rng)
  files = {name: (f"{DOCUMENTS}/{folder}/{name}", ("\n".join(lines) + "\n").encode())}
  return folder, name, files, (launch("pcmanfm", f"{DOCUMENTS}/{folder}"), window(folder))


def _managed(instruction: str, folder: str, setup: tuple[dict, ...], evaluator: dict, script: tuple[str, ...], files: dict) -> Spec:
  return Spec(f"{instruction} The folder {folder} of Documents is open in the file manager.", setup, evaluator, script, files)


def files_rename(rng: random.Random) -> Spec:
  folder, name, files, setup = _folder(rng)
  new = f"{rng.choice([n for n in NAMES if n not in name])}.txt"
  check = printed(f"ls {DOCUMENTS}/{folder}", [new], [name])
  script = (*keys("ctrl a", "f2", "ctrl a"), write(f"{new}\n"))
  return _managed(f"Rename the file {name} to {new}.", folder, setup, check, script, files)


def files_new_folder(rng: random.Random) -> Spec:
  folder, _, files, setup = _folder(rng)
  new = rng.choice([n for n in FOLDERS if n != folder])
  check = printed(f"test -d {DOCUMENTS}/{folder}/{new} && echo it is there", ["it is there"])
  script = (*keys("ctrl shift n", "ctrl a"), write(f"{new}\n"))
  return _managed(f"Make a new folder named {new} in it.", folder, setup, check, script, files)


def files_copy(rng: random.Random) -> Spec:
  folder, name, files, setup = _folder(rng)
  there = rng.choice([n for n in FOLDERS if n != folder])
  check = printed(f"ls {DOCUMENTS}/{folder}; echo and; ls {DOCUMENTS}/{there}", [f"{name}\nand\n{name}"])
  script = (*keys("ctrl a", "ctrl c", "ctrl l"), write(f"{DOCUMENTS}/{there}\n"), *keys("ctrl v"))
  told = f"Copy the file {name} into the folder {there}, which is in Documents as well."
  return _managed(told, folder, (shell(f"mkdir -p {DOCUMENTS}/{there}"), *setup), check, script, files)


def files_move(rng: random.Random) -> Spec:
  folder, name, files, setup = _folder(rng)
  there = rng.choice([n for n in FOLDERS if n != folder])
  check = printed(f"ls {DOCUMENTS}/{folder}; echo and; ls {DOCUMENTS}/{there}", [f"and\n{name}"], [f"{name}\nand"])
  script = (*keys("ctrl a", "ctrl x", "ctrl l"), write(f"{DOCUMENTS}/{there}\n"), *keys("ctrl v"))
  told = f"Move the file {name} into the folder {there}, which is in Documents as well."
  return _managed(told, folder, (shell(f"mkdir -p {DOCUMENTS}/{there}"), *setup), check, script, files)


def files_delete(rng: random.Random) -> Spec:
  folder, name, files, setup = _folder(rng)
  check = printed(f"test -d {DOCUMENTS}/{folder} && ls {DOCUMENTS}/{folder}; echo looked", ["looked"], [name])
  return _managed(f"Delete the file {name} for good.", folder, setup, check, keys("ctrl a", "shift delete", "enter"), files)


def settings_json(rng: random.Random) -> Spec:
  """A program's settings file, as JSON, in the editor."""
  size, new = rng.sample((2, 3, 4, 6, 8), 2)
  name, path = "settings.json", f"{HOME}/.config/editor/settings.json"
  text = json.dumps({"tabSize": size, "wordWrap": "on", "theme": "light"}, indent=1)
  script = (*keys("ctrl home", "down", "end", "left", "backspace"), write(str(new)), *keys("ctrl s"))
  return Spec(
    f"Set the tab size of the editor to {new} in its settings file, which is open in the text editor, and save it.",
    (launch("mousepad", path), window(name)),
    fetched(path, "check_json_settings", {"expected": {"tabSize": new, "wordWrap": "on", "theme": "light"}}),
    script,
    {name: (path, text.encode())},
  )


def settings_ini(rng: random.Random) -> Spec:
  size, new = rng.sample(range(8, 20), 2)
  name, path = "settings.ini", f"{HOME}/.config/reader/settings.ini"
  lines = ["[Settings]", f"font-size={size}", "font=DejaVu Sans"]
  script = (*keys("ctrl home", "down", "shift end"), write(f"font-size={new}"), *keys("ctrl s"))
  return Spec(
    f"Set the font size of the reader to {new} in its settings file, which is open in the text editor, and save it.",
    (launch("mousepad", path), window(name)),
    fetched(path, "practice_lines", {"expected": [lines[0], f"font-size={new}", lines[2]]}),
    script,
    {name: (path, ("\n".join(lines) + "\n").encode())},
  )


def settings_screen_saver(rng: random.Random) -> Spec:
  seconds = rng.randrange(61, 599)
  check = printed("xset q", [f"timeout:  {seconds} "])
  return _terminal(f"Have the screen saver of this display start after {seconds} seconds (xset).", check, f"xset s {seconds}")


def settings_alias(rng: random.Random) -> Spec:
  name = rng.choice(("ll", "la", "lt", "lr"))
  flag = rng.choice(("l", "la", "lt", "lS"))
  check = printed(f"grep -x \"alias {name}='ls -{flag}'\" {HOME}/.bashrc", [f"alias {name}='ls -{flag}'"])
  line = f"echo \"alias {name}='ls -{flag}'\" >> .bashrc"
  return _terminal(f"Add a line to .bashrc that makes {name} an alias of ls -{flag}, written as alias {name}='ls -{flag}'.", check, line)


FAMILIES = (
  text_append, text_prepend, text_delete_line, text_replace_line, text_rewrite, text_copy_line, text_change_number,
  shell_make_folder, shell_move, shell_count, shell_sort, shell_executable, shell_archive,
  files_rename, files_new_folder, files_copy, files_move, files_delete, settings_json, settings_ini, settings_screen_saver, settings_alias,
)  # fmt: skip
