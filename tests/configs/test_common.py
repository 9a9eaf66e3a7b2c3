import ml_collections
import pytest

from configs.common import optional, parse_arg
from core.config import ConfigError


def parse(arg):
  return parse_arg(arg, agent="arpo", smoke=False, replay=True, size=3, scale=0.5).to_dict()


DEFAULT = {"agent": "arpo", "smoke": False, "replay": True, "size": 3, "scale": 0.5}


@pytest.mark.parametrize(
  "arg, changed",
  [
    ("", {}),
    ("agent=gspo,smoke", {"agent": "gspo", "smoke": True}),
    (" smoke , size=4 ", {"smoke": True, "size": 4}),
    ("smoke=true,replay=False", {"smoke": True, "replay": False}),
    ("smoke=1,replay=0", {"smoke": True, "replay": False}),
    ("size=0,scale=0,agent=", {"size": 0, "scale": 0.0, "agent": ""}),
    ("scale=1e-3,size=-2", {"scale": 0.001, "size": -2}),
    ("agent=a=b:c", {"agent": "a=b:c"}),
  ],
)
def test_modes_take_the_type_of_their_default(arg, changed):
  found = parse(arg)
  assert found == DEFAULT | changed
  assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in DEFAULT.items()}


@pytest.mark.parametrize(
  "arg, line",
  [
    (
      "smok",
      r"config mode 'smok' is unknown \(did you mean smoke\?\); this config has: agent=arpo, smoke, replay, size=3, scale=0.5",
    ),
    ("agent=gspo,", r"config mode '' is unknown; this config has"),
    ("agent", r"config mode 'agent' needs a value: agent=arpo"),
    ("size=4.5", r"config mode size=4.5: wanted a whole number, like its default 3"),
    ("scale=big", r"config mode scale=big: wanted a number, like its default 0.5"),
    ("smoke=maybe", r"config mode smoke=maybe: wanted true or false"),
    ("smoke,smoke=0", r"config mode 'smoke' is given twice in 'smoke,smoke=0'"),
  ],
)
def test_a_wrong_mode_is_one_line(arg, line):
  with pytest.raises(ConfigError, match=line) as e:
    parse(arg)
  assert "\n" not in str(e.value)


def test_a_config_without_modes_says_so():
  with pytest.raises(ConfigError, match="this config has: none"):
    parse_arg("smoke")


def test_a_default_gives_the_type_so_none_is_no_default():
  with pytest.raises(TypeError, match="mode agent has default None"):
    parse_arg("", agent=None)


def test_an_optional_field_has_a_type_while_it_is_none():
  c = ml_collections.ConfigDict({"path": optional(str), "seed": optional(int, 0)})
  assert (c.path, c.seed) == (None, 0)
  c.path = "/x"
  assert c.path == "/x"
  with pytest.raises(TypeError):
    c.path = 3
  with pytest.raises(TypeError):
    c.seed = 0.5
