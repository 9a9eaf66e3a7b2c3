import ast

import pytest

from core import find as find_module
from core.find import available, find, nearest


@pytest.fixture
def house(tmp_path, monkeypatch):
  """A small tree of its own: what these tests say must not change with the files of the repository."""
  package = tmp_path / "zoo"
  (package / "birds").mkdir(parents=True)
  (package / "__init__.py").touch()
  (package / "birds" / "__init__.py").touch()
  (package / "grpo.py").write_text("def make(cfg):\n  return cfg\n")
  (package / "gspo.py").write_text("from zoo.grpo import make\n")
  (package / "base.py").write_text("class Agent: pass\n")
  (package / "broken.py").write_text("import no_such_library_here\n")
  (package / "_private.py").touch()
  (tmp_path / "not_a_package").mkdir()
  monkeypatch.setattr(find_module, "ROOT", tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))


def test_finds_a_module_by_its_file_name(house):
  assert find("zoo", "grpo").make(3) == 3
  assert find("zoo", "birds").__name__ == "zoo.birds"


def test_lists_files_and_folders_but_nothing_private(house):
  assert available("zoo") == ["base", "birds", "broken", "grpo", "gspo"]


def test_having_keeps_modules_that_define_the_name(house):
  assert available("zoo", having="make") == ["grpo", "gspo"]
  with pytest.raises(ValueError, match=r"no 'base' in zoo/.*there is: grpo, gspo$"):
    find("zoo", "base", having="make")


def test_unknown_name_says_the_nearest_and_all(house):
  with pytest.raises(
    ValueError, match=r"^no 'GRPO2' in zoo/ \(did you mean grpo\?\); there is: base, birds, broken, grpo, gspo$"
  ):
    find("zoo", "GRPO2")


def test_unknown_package_says_what_packages_exist(house):
  with pytest.raises(ValueError, match=r"^no package 'zo' \(did you mean zoo\?\); there are: zoo$"):
    find("zo", "grpo")


@pytest.mark.parametrize(
  "name", ["", "os.path", "grpo.make", "../zoo/grpo", "/etc/passwd", "_private", "__init__", "grpo\n", None, 3]
)
def test_only_plain_names_of_listed_modules_are_imported(house, name):
  with pytest.raises(ValueError, match="there is: base"):
    find("zoo", name)


@pytest.mark.parametrize("package", ["os", "..", "zoo.birds", "not_a_package", ""])
def test_only_first_party_packages(house, package):
  with pytest.raises(ValueError, match="there are: zoo"):
    available(package)


def test_an_error_inside_the_module_is_not_hidden(house):
  with pytest.raises(ModuleNotFoundError, match="no_such_library_here"):
    find("zoo", "broken")


def test_nearest_says_nothing_when_nothing_is_near():
  assert nearest("quux", ["grpo", "digirl"]) == ""
  assert nearest("learning-rate", ["learning_rate"]) == " (did you mean learning_rate?)"


def test_every_agent_of_the_repository_can_be_found_by_its_file():
  names = available("agents")
  for path in (find_module.ROOT / "agents").glob("[a-z]*.py"):
    assert path.stem in names
    ast.parse(path.read_text())
