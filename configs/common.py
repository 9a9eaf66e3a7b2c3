"""Helpers for config files: modes in the config argument, and typed optional fields.

python train.py --config=configs/osworld.py:agent=gspo,smoke

def get_config(arg=""):
  mode = parse_arg(arg, agent="arpo", smoke=False)
"""

from __future__ import annotations

from typing import Any

import ml_collections
from ml_collections.config_dict import FieldReference

from core.config import ConfigError, note_modes
from core.find import nearest

_TRUE, _FALSE = ("true", "t", "1", "yes"), ("false", "f", "0", "no")  # what absl takes on the command line, and yes and no


def parse_arg(arg: str, **defaults: bool | int | float | str) -> ml_collections.ConfigDict:
  """ "agent=gspo,smoke" -> the modes, typed like their defaults. A bool may stand alone; 0, false and '' count as given.

  core.config.load_config learns the modes from here, so that `--config.agent=gspo` can say to use `:agent=gspo`.
  """
  for name, default in defaults.items():
    if type(default) not in (bool, int, float, str):
      raise TypeError(f"mode {name} has default {default!r}; wanted a bool, int, float or str, which gives the mode its type")
  modes, given = dict(defaults), set()
  for part in arg.split(",") if arg else []:
    name, equals, value = part.strip().partition("=")
    if name not in defaults:
      listed = ", ".join(f"{n}={v}" if type(v) is not bool else n for n, v in defaults.items()) or "none"
      raise ConfigError(f"config mode {name!r} is unknown{nearest(name, defaults)}; this config has: {listed}")
    if name in given:
      raise ConfigError(f"config mode {name!r} is given twice in {arg!r}")
    given.add(name)
    modes[name] = _typed(name, value if equals else None, defaults[name])
  note_modes(modes)
  return ml_collections.ConfigDict(modes)


def _typed(name: str, value: str | None, default: Any) -> Any:
  kind = type(default)
  if value is None:
    if kind is not bool:
      raise ConfigError(f"config mode {name!r} needs a value: {name}={default}")
    return True
  if kind is bool:
    if value.lower() not in _TRUE + _FALSE:
      raise ConfigError(f"config mode {name}={value}: wanted true or false")
    return value.lower() in _TRUE
  try:
    return kind(value)
  except ValueError as e:
    wanted = "a whole number" if kind is int else "a number"
    raise ConfigError(f"config mode {name}={value}: wanted {wanted}, like its default {default}") from e


def optional(kind: type, default: Any = None) -> FieldReference:
  """A field that may be None and still takes `--config.field=...` as `kind`: ml_collections cannot type a bare None."""
  return FieldReference(default, field_type=kind)
