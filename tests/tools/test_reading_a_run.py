"""docs/reading_a_run.md can be followed: its commands exist with the flags it gives them, its curves are those that are documented."""

import re

import pytest

from core.find import ROOT, available, find
from core.metrics import Alarms, Timers

PAGE = (ROOT / "docs" / "reading_a_run.md").read_text()
COMMANDS = [line for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines() if line.startswith("python ")]


def agent(name):
  module = find("agents", name, having="make")
  return module.make(module.defaults())


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


GLOSSARY = (ROOT / "docs" / "algorithms.md").read_text().partition("\n# Curves")[2]


def glossary() -> set[str]:
  """Every curve named in the first column of the glossary; one without a folder has that of the name before it."""
  names = set()
  for row in re.findall(r"^\| (`.*?) \|", GLOSSARY, re.MULTILINE):
    folder = ""
    for name in re.findall(r"`([^`]+)`", row):
      folder = name.partition("/")[0] if "/" in name else folder
      names.add(name if "/" in name else f"{folder}/{name}")
  return names


def test_every_curve_that_a_run_writes_is_in_the_glossary():
  """Those spelt out in the code, and those made of a name: each set of parameters' own, shares of time, alarms."""
  tag = re.compile(r'"((?:reward|groups|episodes|replay|policy|critic|instruction|eval|rate)/[a-z_]+)"')
  files = [p for d in ("agents", "rollout", "core") for p in (ROOT / d).glob("*.py")] + [ROOT / "train.py", ROOT / "evaluate.py"]
  written = {t for p in files for t in tag.findall(p.read_text())} - {"critic/updates", "critic/loss_before"}  # those two are no curves
  keys = {"policy"} | {key for name in available("agents", having="make") for key in agent(name).critics}
  assert keys == {"policy", "critic", "instruction"}
  written |= {f"{key}/{k}" for key in keys for k in ("loss", "grad_norm", "empty_steps")}
  written |= {"instruction/explained_variance", "copy/loss", "copy/entropy", "copy/lr", "policy/entropy_popup", "policy/entropy_plain"}
  written |= {t for t in Timers().shares()} | {f"diagnosis/{n}" for n in Alarms.NAMES}
  assert len(written) > 50 and sorted(written - glossary()) == []


def test_curves_are_documented():
  table = GLOSSARY
  folders = "reward|groups|episodes|policy|eval|diagnosis|replay|rate|critic"
  tags = set(re.findall(rf"`((?:{folders})/[a-z_]+)`", PAGE))
  assert len(tags) > 15
  known = set(re.findall(r"`([a-z_/]+)`", table)) | {"episodes/dropped_all_fail", "episodes/dropped_all_pass"}
  assert [t for t in sorted(tags) if t not in known and t.partition("/")[2] not in known] == []
