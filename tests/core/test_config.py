import json
import os
import re
import subprocess
import sys

import ml_collections
import pytest
from absl import flags as absl_flags

from configs.common import parse_arg
from core import config as config_module
from core.config import (
  ConfigError,
  differences,
  free_workdir,
  git_state,
  load_config,
  one_line,
  resolved,
  versions,
  write_config,
)
from core.find import ROOT

CONFIG = """
import ml_collections
from configs.common import optional, parse_arg

def get_config(arg=""):
  mode = parse_arg(arg, agent="arpo", smoke=False)
  c = ml_collections.ConfigDict({
    "lr": 0.1, "group_size": 8, "use_replay": True, "name": "x", "kinds": ("a", "b"), "sizes": (1, 2), "rates": (0.5,),
    "empty": (), "agent": {"name": mode.agent, "clip_low": 0.2}, "practice": {"kl": 0.1, "updates": 1 if mode.smoke else 40}})
  c.resume_from = optional(str)
  c.limit = optional(int, 3)
  c.bare = None
  return c.lock()
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "study.py").write_text(CONFIG)
  return lambda *args, modes="", **kw: load_config(["train.py", f"--config=study.py{modes}", *args], **kw)


def field(config, key):
  for part in key.split("."):
    config = config[part]
  return config


@pytest.mark.parametrize(
  "args, key, value",
  [
    (["--config.lr=1"], "lr", 1.0),
    (["--config.lr", "1e-3"], "lr", 1e-3),
    (["--config.lr=1", "--config.lr=2"], "lr", 2.0),
    (["--config.group_size=0"], "group_size", 0),
    (["--config.use_replay=false"], "use_replay", False),
    (["--config.use_replay=False"], "use_replay", False),
    (["--config.use_replay=0"], "use_replay", False),
    (["--noconfig.use_replay"], "use_replay", False),
    (["--config.use_replay"], "use_replay", True),
    (["--config.name="], "name", ""),
    (["--config.agent.clip_low=0"], "agent.clip_low", 0.0),
    (["--config.resume_from=/x"], "resume_from", "/x"),
    (["--config.limit=0"], "limit", 0),
    (["--config.kinds=('c',)"], "kinds", ("c",)),
    (["--config.kinds=c"], "kinds", ("c",)),
    (["--config.kinds=()"], "kinds", ()),
    (["--config.rates=(1, 0.5)"], "rates", (1, 0.5)),
    (["--config.empty=(1, 'x')"], "empty", (1, "x")),
    ([], "resume_from", None),
  ],
)
def test_a_good_override_is_honoured_with_its_type(load, args, key, value):
  config, flags = load(*args)
  assert field(config, key) == value and type(field(config, key)) is type(value)
  assert flags["overrides"] == ({key: value} if args else {})


@pytest.mark.parametrize(
  "args, line",
  [
    (
      ["--config.lrr=1"],
      r"--config.lrr: there is no 'lrr' in config \(did you mean lr\?\); it has: agent, bare, empty, group_size",
    ),
    (["--config.agent.clip_lo=1"], r"there is no 'clip_lo' in config.agent \(did you mean clip_low\?\); it has: clip_low, name"),
    (["--config.clip_low=1"], r"there is no 'clip_low' in config \(did you mean agent.clip_low\?\)"),
    (["--config.lr.x=1"], r"--config.lr.x: lr is a float, it has no field 'x'"),
    (["--config.practice=3"], r"--config.practice is a group of fields, not one; it has: kl, updates"),
    (["--config.kl=1"], r"there is no 'kl' in config \(did you mean practice.kl\?\)"),
    (["--config.bare=1"], r"--config.bare: the field is None and has no type; .*configs.common.optional"),
    (["--config.group_size=8.5"], r"--config.group_size=8.5: wanted a whole number, like its default 8"),
    (["--config.group_size=1e3"], r"--config.group_size=1e3: wanted a whole number"),
    (["--config.practice.updates="], r"--config.practice.updates=: wanted a whole number, like its default 40"),
    (["--config.limit=x"], r"--config.limit=x: wanted a whole number, like its default 3"),
    (["--config.lr=abc"], r"--config.lr=abc: wanted a number, like its default 0.1"),
    (["--config.use_replay=maybe"], r"--config.use_replay=maybe: wanted true or false"),
    (["--config.use_replay", "False"], r"'False' is left over after --config.use_replay; write --config.use_replay=False"),
    (["--fresh", "0", "--config.lr=3"], r"'0' is left over after --fresh; write --fresh=0"),
    (["study2.py"], r"'study2.py' is left over: every argument is a flag"),
    (["--", "--config.lr=1"], r"'--config.lr=1' is left over"),
    (
      ["--config.agent=gspo"],
      r"--config.agent cannot be overridden: the mode 'agent' chooses it .*; use --config=study.py:agent=VALUE",
    ),
    (["--config.agent.name=gspo"], r"use --config=study.py:agent=VALUE"),
    (["--config.smoke=true"], r"--config.smoke cannot be overridden: .*; use --config=study.py:smoke$"),
    (["--config.sizes=('a',)"], r"--config.sizes=\('a',\): wanted elements like those of its default \(1, 2\)"),
    (["--config.sizes=(1.5,)"], r"wanted elements like those of its default"),
    (["--config.kinds=c,d"], r"--config.kinds=c,d: wanted a tuple, quoted for the shell"),
    (["--config.kinds=(c)"], r"--config.kinds=\(c\): wanted a tuple"),
    (["--config.lr"], r"Missing value for flag --config.lr"),
    (["--freshh"], r"there is no flag --freshh \(did you mean fresh\?\); flags: --config, --fresh, --workdir"),
    (["--lr=3"], r"there is no flag --lr \(did you mean config.lr\?\)"),
    (["--fresh=maybe"], r"flag --fresh=maybe"),
    (["--workdir="], r"--workdir is empty"),
    (["--config=study.py"], r"--config is given 2 times"),
    (["--flagfile=none.txt"], r"Unable to open flagfile: .*none.txt"),
  ],
)
def test_a_wrong_argument_is_one_line(load, args, line):
  with pytest.raises(ConfigError, match=line) as e:
    load(*args)
  assert "\n" not in str(e.value) and "Traceback" not in str(e.value)


@pytest.mark.parametrize("args", [[], ["--config"], ["--config="], ["--workdir=x"]])
def test_without_a_config_the_line_lists_them(args):
  with pytest.raises(
    ConfigError, match=r"no --config is given; write --config=FILE once, FILE being one of: .*configs/osworld.py"
  ):
    load_config(["train.py", *args])


def test_an_override_before_the_config_is_told_to_move(load):
  with pytest.raises(ConfigError, match=r"--config.lr=1 stands before --config=study.py; put --config first"):
    load_config(["train.py", "--config.lr=1", "--config=study.py"])


def test_a_missing_config_file_names_the_nearest():
  with pytest.raises(
    ConfigError, match=r"config file configs/osworl.py does not exist \(did you mean configs/osworld.py\?\); there are:"
  ):
    load_config(["train.py", "--config=configs/osworl.py:smoke"])


@pytest.mark.parametrize(
  "text, line",
  [
    ("def get_config(arg=''):\n  x = 1\n  return y\n", r"study.py line 3: NameError: name 'y' is not defined"),
    ("def get_config(arg=''):\n  return (\n", r"study.py line 2: SyntaxError"),
    ("import no_such_thing\n", r"study.py line 1: ModuleNotFoundError: No module named 'no_such_thing'"),
    ("x = 1\n", r"study.py: AttributeError: .*get_config"),
    ("def get_config(arg=''):\n  pass\n", r"study.py: get_config\(\) returned NoneType, wanted a ConfigDict"),
    (
      "from core.config import ConfigError\ndef get_config(arg=''):\n  raise ConfigError('G = 1:\\n too few')\n",
      r"study.py: G = 1: too few$",
    ),
  ],
)
def test_a_broken_config_file_names_its_line(load, tmp_path, text, line):
  (tmp_path / "study.py").write_text(text)
  with pytest.raises(ConfigError, match=line) as e:
    load()
  assert "\n" not in str(e.value)


def test_a_folder_or_a_text_is_no_config(load, tmp_path):
  (tmp_path / "study.txt").write_text(CONFIG)
  for name in ("study.txt", "."):
    with pytest.raises(ConfigError, match="not a Python file|does not exist"):
      load_config(["train.py", f"--config={name}"])


def test_modes_reach_the_config_and_the_flags(load):
  config, flags = load("--config.lr=2", modes=":agent=gspo,smoke")
  assert (config.agent.name, config.practice.updates, config.lr) == ("gspo", 1, 2.0)
  assert flags["modes"] == {"agent": "gspo", "smoke": True} and flags["config_name"] == "study"
  with pytest.raises(ConfigError, match=r"study.py: config mode 'smke' is unknown \(did you mean smoke\?\)"):
    load(modes=":smke")


def test_the_config_stays_locked(load):
  config, _ = load()
  with pytest.raises((AttributeError, KeyError)):
    config.new = 1


def test_workdir_is_absolute_from_the_start(load, tmp_path, monkeypatch):
  assert load()[1]["workdir"] == str(tmp_path / "runs" / "study")
  assert load("--workdir=./x/../y")[1]["workdir"] == str(tmp_path / "y")
  assert load("--workdir=~/z")[1]["workdir"] == os.path.expanduser("~/z")
  assert load()[1]["config_file"] == str(tmp_path / "study.py")


def test_fresh_goes_beside_an_old_run(load, tmp_path):
  assert load("--fresh")[1]["workdir"] == str(tmp_path / "runs" / "study")
  for name, following in (("study", "study-2"), ("study-2", "study-3")):
    (tmp_path / "runs" / name).mkdir(parents=True)
    assert load("--fresh")[1]["workdir"] == str(tmp_path / "runs" / following)
  assert load()[1] == load("--nofresh")[1] and load()[1]["workdir"] == str(tmp_path / "runs" / "study")
  assert free_workdir(tmp_path / "none") == str(tmp_path / "none")


def test_a_program_can_add_flags_and_they_are_checked(load):
  def define(values):
    absl_flags.DEFINE_integer("tries", 4, "Tries a task.", lower_bound=1, flag_values=values)

  assert load(define=define)[1]["tries"] == 4
  assert load("--tries=7", define=define)[1]["tries"] == 7
  with pytest.raises(ConfigError, match="tries"):
    load("--tries=0", define=define)
  assert "tries" not in load()[1]


def test_a_flagfile_is_read_and_checked_like_the_command_line(load, tmp_path):
  (tmp_path / "more.txt").write_text("--config.lr=3\n# a comment\n--fresh\n")
  config, flags = load("--flagfile=more.txt", "--config.group_size=4")
  assert (config.lr, config.group_size, flags["fresh"]) == (3.0, 4, True)
  (tmp_path / "more.txt").write_text("--config.lrr=3\n")
  with pytest.raises(ConfigError, match="did you mean lr"):
    load("--flagfile=more.txt")


def test_the_config_may_stand_after_a_space(load):
  assert load_config(["train.py", "--fresh", "--config", "study.py:smoke", "--config.lr=2"])[0].lr == 2.0
  assert load_config(["train.py", "-config", "study.py", "-config.lr=2"])[0].lr == 2.0


def test_two_configs_do_not_see_each_other(load):
  _, flags = load()
  parse_arg("size=3", size=0)
  assert flags["modes"] == {"agent": "arpo", "smoke": False}
  load("--config.lr=5")
  assert load()[0].lr == 0.1 and "config" not in absl_flags.FLAGS


def test_help_shows_flags_and_configs(load, capsys):
  with pytest.raises(SystemExit) as e:
    load("--help")
  shown = capsys.readouterr().out
  assert e.value.code == 0 and "--[no]fresh" in shown and "configs/osworld.py" in shown


def test_the_program_ends_with_one_line_and_a_code(load, tmp_path):
  program = tmp_path / "train.py"
  program.write_text(
    "import sys\nfrom core import config\n"
    "def main(argv):\n  print(config.load_config(argv)[0].lr)\n  if argv[-1] == '--fresh': raise KeyError('a bug')\n"
    "config.run(main)\n"
  )

  def call(*args):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
      [sys.executable, str(program), *args], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60
    )
    return done.returncode, done.stdout, done.stderr

  assert call("--config=study.py") == (0, "0.1\n", "")
  code, out, err = call("--config=study.py", "--config.lrr=1")
  assert (code, out) == (2, "") and re.fullmatch(r"train.py: --config.lrr: there is no 'lrr' .*\n", err)
  code, _, err = call("--config=study.py", "--fresh")
  assert code == 1 and "Traceback" in err and "KeyError: 'a bug'" in err  # a bug keeps its traceback


def test_run_passes_the_exit_code_on():
  with pytest.raises(SystemExit) as e:
    config_module.run(lambda argv: 75, ["x"])
  assert e.value.code == 75


# ---- config.json


def test_config_json_holds_what_is_needed_to_run_again(load, tmp_path):
  config, flags = load("--config.lr=2", modes=":smoke")
  argv = ["train.py", "--config=study.py:smoke", "--config.name=a b"]
  assert write_config(tmp_path / "run", config, flags, tasks_hash="abc", argv=argv) == []
  found = json.loads((tmp_path / "run" / "config.json").read_text())
  assert found["config"]["lr"] == 2.0 and found["config"]["kinds"] == ["a", "b"] and found["config"]["resume_from"] is None
  assert found["config"]["agent"] == {"name": "arpo", "clip_low": 0.2}
  assert found["modes"] == {"agent": "arpo", "smoke": True} and found["overrides"] == {"lr": 2.0} and found["tasks"] == "abc"
  assert found["command"] == "train.py --config=study.py:smoke '--config.name=a b'"
  assert found["versions"]["jax"] == versions()["jax"] and found["versions"]["python"].startswith("3.")
  assert found["config_file"] == str(tmp_path / "study.py") and found["git"] == git_state()


def test_a_resumed_run_is_told_what_changed_and_keeps_the_old_record(load, tmp_path):
  config, flags = load()
  write_config(tmp_path / "run", config, flags, tasks_hash="abc", argv=["a"])
  assert write_config(tmp_path / "run", config, flags, tasks_hash="abc", argv=["a"]) == []
  assert [p.name for p in (tmp_path / "run").iterdir()] == ["config.json"]  # nothing changed: no second record
  config, flags = load("--config.lr=2", modes=":smoke")
  changes = write_config(tmp_path / "run", config, flags, tasks_hash="def", argv=["a"])
  assert changes == [
    "config.lr: 0.1 -> 2.0",
    "config.practice.updates: 40 -> 1",
    "modes.smoke: False -> True",
    "tasks: 'abc' -> 'def'",
  ]
  assert json.loads((tmp_path / "run" / "config.1.json").read_text())["tasks"] == "abc"
  config, flags = load("--config.lr=3")
  write_config(tmp_path / "run", config, flags, argv=["a"])
  assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["config.1.json", "config.2.json", "config.json"]


def test_versions_and_code_count_as_changes():
  old = {"config": {"a": 1, "gone": 2}, "versions": {"jax": "1"}, "git": {"commit": "x"}, "command": "a"}
  new = {"config": {"a": 1}, "versions": {"jax": "2"}, "git": {}, "command": "b"}
  assert differences(old, new) == ["config.gone: 2 -> None", "git.commit: 'x' -> None", "versions.jax: '1' -> '2'"]


def test_the_resolved_config_is_json():
  c = ml_collections.ConfigDict({"a": float("inf"), "n": float("nan"), "t": (1, (2,)), "s": {"b": None}})
  c.ref = c.get_ref("t")
  assert resolved(c) == {"a": "inf", "n": "nan", "t": [1, [2]], "s": {"b": None}, "ref": [1, [2]]}
  with pytest.raises(ConfigError, match="config.f is a function, wanted a plain value"):
    resolved(ml_collections.ConfigDict({"f": lambda: 0}))


def test_git_state_of_a_repository_and_of_none(tmp_path):
  assert git_state(tmp_path) == {}
  git = lambda *a: subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x", *a], check=True)  # noqa: E731
  git("init", "-q")
  assert git_state(tmp_path) == {}  # no commit yet
  (tmp_path / "a").write_text("1")
  git("add", "a")
  git("commit", "-q", "-m", "first")
  state = git_state(tmp_path)
  assert len(state["commit"]) == 40 and state["changed"] is False
  (tmp_path / "inside").mkdir()
  assert git_state(tmp_path / "inside") == {}  # the commit of a repository around the code says nothing about the code
  (tmp_path / "a").write_text("2")
  assert git_state(tmp_path) == state | {"changed": True}


def test_one_line():
  assert one_line("a\n  b\t c\n") == "a b c"
