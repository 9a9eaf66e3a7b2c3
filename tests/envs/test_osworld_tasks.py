"""This project's own tasks for the Debian desktop: families, variants, scripts, and the files they upload."""

import json

import pytest

from envs.osworld import hand as at_hand
from envs.osworld import suite, taskfile, tasks
from envs.osworld.files import Files

DONE = "Action: finished()"


@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_every_family_makes_tasks_that_are_read_and_told_apart(family, tmp_path):
  practised, kept = tasks.seeds(family, 4, False), tasks.seeds(family, 2, True)
  assert len(practised) == 4 and len(kept) == 2 and not set(practised) & set(kept)
  there = at_hand.Hand(Files([f"{tasks.URL}={tmp_path}"]))
  for seed in (*practised[:2], kept[0]):
    said = json.loads(json.dumps(tasks.task_file(family, seed)))
    file = taskfile.parse(said, said["id"])
    tasks.write_files(tmp_path, family, seed)
    assert at_hand.why_not(file, there) == "" and tasks.task_file(family, seed) == said
    assert tasks.script_of(family, seed)[-1] == DONE and len(tasks.script_of(family, seed)) <= 15


def test_there_are_24_families_or_more_of_every_kind():
  kinds = {family.partition("_")[0] for family in tasks.FAMILIES}
  assert len(tasks.FAMILIES) >= 24 and kinds == {"text", "shell", "files", "settings", "writer", "calc"}
  assert {"writer_subscript", "writer_subscript_docx", "writer_two_subscripts", "writer_superscript"} <= tasks.FAMILIES.keys()


def test_office_files_are_what_office_libraries_read(tmp_path):
  openpyxl, docx = pytest.importorskip("openpyxl"), pytest.importorskip("docx")
  from envs.osworld.tasks import office

  (tmp_path / "a.xlsx").write_bytes(office.xlsx([["a", 1], [None, "<b> & c"]]))
  assert [[c.value for c in row] for row in openpyxl.load_workbook(tmp_path / "a.xlsx")["Sheet1"].rows] == [["a", 1], [None, "<b> & c"]]
  (tmp_path / "a.docx").write_bytes(office.docx([" H2O", "<x>"]))
  assert [p.text for p in docx.Document(tmp_path / "a.docx").paragraphs] == [" H2O", "<x>"]
  assert office.odt(["x"]) == office.odt(["x"]) and office.odt(["x"]) != office.odt(["y"])


def test_words_that_solutions_type_are_pieces_of_the_vocabulary():
  """A day is " Friday" in the goal and "Friday" in type(content='Friday'): as letters it is longer than a small policy may write."""
  cfg = suite.defaults()
  cfg.update({"shown": (64, 48), "families": ("text_append",), "practice_tasks": 2, "held_out_tasks": 2})
  pieces, size = suite.vocabulary("osworld/desktop", cfg)
  days = {tasks.script_of("text_append", seed)[1].split("'")[1] for kept in (False, True) for seed in tasks.seeds("text_append", 2, kept)}
  assert size == (64, 48) and days and days <= set(pieces) and {f" {day}" for day in days} <= set(pieces)
  assert "ctrl end" in pieces and "line" not in pieces and " line" in pieces  # said in the goal, typed by nobody
