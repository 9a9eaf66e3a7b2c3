"""docs/reading_a_run.md can be followed: its commands exist with the flags it gives them, its curves are those that are documented."""

import re

import pytest

from core.find import ROOT

PAGE = (ROOT / "docs" / "reading_a_run.md").read_text()
COMMANDS = [line for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines() if line.startswith("python ")]


def test_commands_were_found():
  assert len(COMMANDS) >= 9


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_a_program_and_its_flags(command):
  program = command.split()[2].replace(".", "/") + ".py" if command.startswith("python -m ") else command.split()[1]
  source = (ROOT / program).read_text()
  if "load_config(" in source:
    source += (ROOT / "core" / "config.py").read_text() + 'DEFINE_string("config"'
  for flag in re.findall(r"--([a-z_]+)", command):
    assert re.search(rf"""DEFINE_\w+\(\s*"{flag}\"""", source), f"{program} has no flag --{flag}"


def test_every_item_of_the_checklist_is_there_in_order():
  assert re.findall(r"^### (\d+)\. ", PAGE, re.MULTILINE) == [str(i) for i in range(1, 11)]


def test_curves_are_documented():
  table = (ROOT / "docs" / "algorithms.md").read_text().partition("\n# Curves")[2]
  folders = "reward|groups|episodes|policy|eval|diagnosis|replay|rate|critic"
  tags = set(re.findall(rf"`((?:{folders})/[a-z_]+)`", PAGE))
  assert len(tags) > 15
  known = set(re.findall(r"`([a-z_/]+)`", table)) | {"episodes/dropped_all_fail", "episodes/dropped_all_pass"}
  assert [t for t in sorted(tags) if t not in known and t.partition("/")[2] not in known] == []
