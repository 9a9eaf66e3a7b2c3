"""What an agent leaves behind so that it cannot be looked at scores 0, with a note, and is no fault of the computer: else a try that goes
badly could be had again by spoiling its own check."""

import dataclasses
import importlib.util
import pathlib
import re
import sys
import threading
import types
import xml.etree.ElementTree as ET

import pytest

from envs import guest as guest_lib
from envs.errors import CheckerFailed
from envs.guest import CommandTimeout, Guest, GuestFault
from tests.envs.test_osworld_env import DONE, DOWNLOAD, VM_FILE, check_of, desktop, foreign, play, task_of, world  # noqa: F401 - fixtures

SERVER = pathlib.Path(__file__).parents[2] / "tools/desktop/overlay/usr/lib/practice/guest_server.py"
RULE = {"type": "rule", "rules": {"expected": "x"}}


def told(env, evaluator, then=lambda: None):
  """The note of the check. then: what happens after the reset."""
  env.reset(options={"task": task_of(evaluator, [DOWNLOAD])})
  then()
  _, reward, terminated, _, info = env.step(DONE)
  assert (reward, terminated) == (0.0, True)
  return " ".join(info["notes"]["check"])


@pytest.mark.parametrize(
  "result, said",
  [(VM_FILE, "a.txt: .*more than 5 bytes"), ({"type": "vm_command_line", "command": ["echo", "a long line"]}, "more than 5 bytes")],
)
def test_more_than_anybody_looks_at_is_a_fail(world, monkeypatch, result, said):  # noqa: F811
  less = lambda: monkeypatch.setattr(guest_lib, "MOST_BYTES", 5)  # gold.txt has 8
  assert re.search(said, told(world(), check_of("exact_match", result, RULE), less))


def test_a_command_that_prints_more_than_a_metric_reads_is_a_fail(world, monkeypatch):  # noqa: F811
  monkeypatch.setattr("envs.osworld.getters.MOST_TEXT", 5)
  said = told(world(), check_of("exact_match", {"type": "vm_command_line", "command": ["echo", "a long line"]}, RULE))
  assert "printed 12 characters, more than 5" in said


def test_a_program_of_the_agent_that_does_not_end_is_a_fail_unless_the_guest_was_starved(world, monkeypatch):  # noqa: F811
  """One of the benchmark's tasks runs a script that the agent wrote, and takes what it prints."""
  env = world()
  spent = iter([0.0, 1.0, 1.0, 4.5])  # of 5 s: a fifth first, then seven tenths

  def late(self, *args):
    raise CommandTimeout("timed out after 3 seconds")

  monkeypatch.setattr(Guest, "execute", late)
  monkeypatch.setattr(env.machine, "waited", lambda: next(spent))
  evaluator = check_of("exact_match", {"type": "vm_command_line", "command": ["python", "agents.py"]}, RULE)
  assert "timed out after 3 seconds" in told(env, evaluator)
  with pytest.raises(CheckerFailed, match="hardly got a processor"):
    play(env, task_of(evaluator), DONE)


def test_more_than_anybody_looks_at_is_a_fail_for_a_getter_of_theirs_too(world, foreign, monkeypatch):  # noqa: F811
  env = world()
  env.checker = foreign
  env.hand = dataclasses.replace(env.hand, metrics=frozenset({"loud"}), getters=frozenset({"home"}))

  def much(self, *args):
    raise guest_lib.TooMuch("answered with more than 5 bytes")

  less = lambda: monkeypatch.setattr(Guest, "file", much)
  assert "more than 5 bytes" in told(env, check_of("loud", {"type": "home"}, RULE), less)


# -- the server that answers in our guests, on this machine


@pytest.fixture(scope="module")
def server():
  """(its module, a client of it)"""
  sys.path.insert(0, str(SERVER.parent))
  spec = importlib.util.spec_from_file_location("guest_server", SERVER)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  serving = module.Server(("127.0.0.1", 0), module.Handler)
  threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
  yield module, Guest(serving.server_address[1], seconds=20.0)
  serving.shutdown()
  serving.server_close()
  sys.path.remove(str(SERVER.parent))


def test_a_file_comes_in_parts_and_one_that_may_not_be_read_is_none(server, tmp_path, monkeypatch):
  module, guest = server
  data = bytes(range(256)) * 12_000  # three parts
  (tmp_path / "a.bin").write_bytes(data)
  assert guest.file(str(tmp_path / "a.bin")) == data and guest.file(str(tmp_path)) is None and guest.file(str(tmp_path / "b")) is None
  (tmp_path / "huge").touch()
  with (tmp_path / "huge").open("r+b") as huge:
    huge.truncate(1 << 40)  # a terabyte of nothing: what the server would hold in memory, and the client waits for
  with pytest.raises(guest_lib.TooMuch, match="more than 268435456 bytes"):
    guest.file(str(tmp_path / "huge"))

  def refused(*args):
    raise PermissionError(13, "Permission denied")

  monkeypatch.setattr(module.pathlib.Path, "open", refused)  # the tests' user may be root, who reads everything
  assert guest.file(str(tmp_path / "a.bin")) is None


def test_a_folder_that_may_not_be_read_is_said_in_its_place(server, tmp_path, monkeypatch):
  """It was an answer of 500, and that an infra error. As the benchmark's server has it: {"error": ...} among the others."""
  module, guest = server
  for name in ("open", "shut"):
    (tmp_path / name).mkdir()
  list_it = module.pathlib.Path.iterdir

  def iterdir(self):
    if self.name == "shut":
      raise PermissionError(13, "Permission denied")
    return list_it(self)

  monkeypatch.setattr(module.pathlib.Path, "iterdir", iterdir)
  children = guest.list_directory(str(tmp_path))["children"]
  assert children == [{"type": "directory", "name": "open", "children": []}, {"error": "[Errno 13] Permission denied"}]


def test_a_request_that_makes_no_sense_is_answered(server):
  module, guest = server
  module.SCREEN = types.SimpleNamespace(find=lambda name, *how: name.lower())
  with pytest.raises(GuestFault, match="answered 500.*AttributeError"):  # it was a connection that broke
    guest.activate_window(5)


def test_every_title_can_be_written_as_xml(server):
  """A window's title with a control character, which an agent can give a file, made the whole tree unreadable, and its check a fault."""
  clean = sys.modules["accessible"].clean
  title = "".join(chr(n) for n in (*range(0xD800), *range(0xE000, 0x10002)))
  tree = ET.tostring(ET.Element("frame", {"name": clean(title)}), encoding="unicode")
  assert ET.fromstring(tree).get("name") == clean(title) and "\U00010001" in clean(title) and clean("caf\u00e9\n") == "caf\u00e9\n"
