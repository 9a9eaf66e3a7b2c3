"""The command line of train.py and sweep.py: ordinary absl flags and ml_collections configs, with errors of one line.

  config, flags = load_config(sys.argv)         --config=FILE[:modes] --config.KEY=VALUE ... --workdir=DIR --fresh

absl and ml_collections do the parsing; this module looks first, because their tracebacks do not say what to change.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import app
from absl import flags as absl_flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_dict import FieldReference

from core.find import ROOT, available, nearest
from core.host import out_of_memory
from core.screens import write_atomic

EXIT_USAGE = 2
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "ml_collections", "tensorboard")
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", tuple: "a tuple such as (1, 2)"}
_modes: contextvars.ContextVar[dict | None] = contextvars.ContextVar("modes", default=None)


class ConfigError(ValueError):
  """Something the user wrote cannot be run. The message is one line: what was given, what is wanted, what to change."""


def run(main: Callable[[list[str]], int | None], argv: Sequence[str] | None = None) -> None:
  """Run a program's main; a ConfigError ends it with one line on stderr and exit code 2, without a traceback."""
  argv = list(sys.argv if argv is None else argv)
  try:
    sys.exit(main(argv))
  except ConfigError as e:
    print(f"{os.path.basename(argv[0])}: {one_line(e)}", file=sys.stderr)
    sys.exit(EXIT_USAGE)


def parse_flags(argv: list[str]) -> list[str]:
  """absl's own parser, with one line instead of a usage page, and quiet: a library's progress is not this command's output."""
  try:
    left = absl_flags.FLAGS(argv)
    if absl_flags.FLAGS["verbosity"].using_default_value:
      absl_flags.FLAGS.verbosity = -1  # warnings
    return left
  except absl_flags.Error as error:
    raise ValueError(str(error)) from error


def run_command(main: Callable[[Any], Any], *errors: type[Exception]) -> None:
  """A command's main under absl: what cannot be run (ValueError, OSError, `errors`) is one line, and EXIT_USAGE; memory that ran out is one
  line, and 1."""
  try:
    app.run(main, flags_parser=parse_flags)
  except (ValueError, OSError, *errors) as error:
    print(f"{pathlib.Path(sys.argv[0]).name}: {one_line(error)}", file=sys.stderr)
    sys.exit(EXIT_USAGE)
  except (RuntimeError, MemoryError) as error:
    if not (line := out_of_memory(error)):
      raise
    print(f"{pathlib.Path(sys.argv[0]).name}: {line}", file=sys.stderr)
    sys.exit(1)


def one_line(text: Any) -> str:
  return " ".join(str(text).split())


Define = Callable[[absl_flags.FlagValues], None]


def load_config(argv: Sequence[str], define: Define | None = None) -> tuple[ConfigDict, dict[str, Any]]:
  """-> (config, flags). argv as sys.argv: its first entry is the program.

  flags: config_file (absolute), config_arg (what stands after its colon), config_name, modes (what that chose), overrides
  ({key: value}), workdir (absolute; with --fresh one that does not exist yet), fresh, and what `define(flag_values)` added.
  Raises ConfigError.
  """
  values = _define_flags(define)
  argv = _expand(list(argv), values)
  if any(re.fullmatch("--?(help|helpfull|helpshort)", a) for a in argv[1:]):
    print(f"usage: {os.path.basename(argv[0])} --config=FILE[:modes] [--config.KEY=VALUE ...]\n{values.get_help()}")
    print(f"configs: {', '.join(_config_files())}")
    sys.exit(0)
  spec = _config_spec(argv)
  file, _, arg = spec.partition(":")
  config, modes = _read_config(file, arg)
  if modes.get("real") is False and "real=" not in arg and _gives_image(argv):  # an image makes it real: the mode brings what that wants
    argv = [_with_mode(a, spec, f"{spec}{',' if arg else ':'}real") for a in argv]
    config, modes = _read_config(file, f"{arg},real" if arg else "real")
  for key in _override_keys(argv):
    _check_key(key, config, modes, file)
  config_flags.DEFINE_config_file("config", None, "Config file, with modes after a colon.", flag_values=values, sys_argv=argv)
  before = {key: _value(field) for key, field in _leaves(config)}
  rest = _parse(values, argv, config)
  if rest[1:]:
    raise ConfigError(_leftover(argv, rest[1]))
  config = values.config
  _check_tuples(values["config"].override_values, before)
  out = {name: values[name].value for name in values if name.split(".")[0] != "config" and name not in ("flagfile", "undefok")}
  name = pathlib.Path(file).stem
  if values.workdir == "":
    raise ConfigError("--workdir is empty; leave it out for the default, runs/" + name)
  workdir = os.path.abspath(os.path.expanduser(values.workdir if values.workdir is not None else os.path.join("runs", name)))
  out |= {
    "config_file": os.path.abspath(file),
    "config_arg": arg,
    "config_name": name,
    "modes": modes,
    "fresh": values.fresh,
    "overrides": dict(values["config"].override_values),
    "workdir": free_workdir(workdir) if values.fresh else workdir,
  }
  return config, out


def free_workdir(workdir: str | os.PathLike) -> str:
  """runs/osworld, or the first of runs/osworld-2, -3 ... that does not exist: --fresh never touches an old run."""
  path = os.path.abspath(workdir)
  return next(p for p in (path, *(f"{path}-{i}" for i in range(2, 10**6))) if not os.path.lexists(p))


def note_modes(modes: Mapping[str, Any]) -> None:
  """Called by configs.common.parse_arg, so that load_config knows what the modes of a config chose."""
  noted = _modes.get()
  if noted is not None:
    noted.update(modes)


# ---- the resolved config


def resolved(config: ConfigDict) -> dict[str, Any]:
  """The config as plain values: references followed, placeholders None, tuples as lists."""
  return _plain(config.to_dict(), "config")


def write_config(
  workdir: str | os.PathLike,
  config: ConfigDict,
  flags: Mapping[str, Any] | None = None,
  *,
  tasks_hash: str = "",
  argv: Sequence[str] | None = None,
) -> list[str]:
  """Write workdir/config.json: all that is needed to run this again. -> "key: old -> new" for what changed since the
  session before, whose file is kept as config.1.json, config.2.json ... so that no session's record is lost.
  """
  workdir = pathlib.Path(os.path.abspath(workdir))
  workdir.mkdir(parents=True, exist_ok=True)
  path = workdir / "config.json"
  flags = flags or {}
  record = {
    "config": resolved(config),
    "modes": dict(flags.get("modes", {})),
    "overrides": _plain(flags.get("overrides", {}), "flag"),
    "config_file": flags.get("config_file", ""),
    "command": shlex.join(sys.argv if argv is None else argv),
    "tasks": tasks_hash,
    "versions": versions(),
    "git": git_state(),
  }
  changes = []
  if path.exists():
    old = json.loads(path.read_text())
    changes = differences(old, record)
    if old == record:
      return []
    os.replace(path, next(p for p in (workdir / f"config.{i}.json" for i in range(1, 10**6)) if not p.exists()))
  write_atomic(path, (json.dumps(record, indent=2, allow_nan=False) + "\n").encode())
  return changes


# What makes a run the run it is: another value would mix two runs in one folder. Other knobs may change between sessions.
_IDENTITY = ("name", "seed", "env.", "policy.", "copy.", "agent.name")


def read_config(workdir: str | os.PathLike) -> dict[str, Any]:
  """The config of a workdir's config.json, as plain values. ConfigError naming the file where it cannot be read."""
  path = pathlib.Path(workdir) / "config.json"
  try:
    config = json.loads(path.read_text())["config"]
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise ConfigError(f"{path} cannot be read ({one_line(e)}): give the folder of a run that train.py made") from e
  if not isinstance(config, dict) or not all(isinstance(config.get(part), dict) for part in ("agent", "env", "policy")):
    raise ConfigError(f"{path} holds no config of a run: give the folder of a run that train.py made")
  return config


def same_run(
  workdir: str | os.PathLike, config: ConfigDict, saved: Callable[..., Mapping[str, Any]], free: Sequence[str] = ()
) -> None:
  """ConfigError if a run stands in workdir whose identity (config, seed, environment, policy, copying, agent) differs. saved: its config as
  plain values from its workdir, with defaults for knobs that came later. free: knobs, or parts of knobs, that may differ all the same."""
  stands = next(p for p in (pathlib.Path(os.path.abspath(workdir)), *pathlib.Path(os.path.abspath(workdir)).parents) if p.exists())
  if not stands.is_dir():
    raise ConfigError(f"--workdir is {workdir}, but {stands} is a file: give a folder")
  if not (pathlib.Path(workdir) / "config.json").exists():
    return
  changed = differences({"config": saved(workdir)}, {"config": resolved(config)})
  changed = [c for c in changed if c.removeprefix("config.").startswith(_IDENTITY)]
  changed = [c for c in changed if not any(c.startswith((f"config.{name}:", f"config.{name}.")) for name in free)]
  if changed:
    raise ConfigError(f"{workdir} holds another run ({'; '.join(changed[:3])}, what is wanted now): give another --workdir, or --fresh")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """What differs between two records of write_config in what can change a run: config, modes, tasks, versions and code."""
  parts = ("config", "modes", "tasks", "versions", "git")
  before, after = ({k: v for part in parts for k, v in _flat(part, record.get(part))} for record in (old, new))
  changed = [k for k in sorted(before.keys() | after.keys()) if before.get(k) != after.get(k)]
  return [f"{k}: {before.get(k)!r} -> {after.get(k)!r}" for k in changed]


def versions() -> dict[str, str]:
  out = {"python": sys.version.split()[0]}
  for name in PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      out[name] = importlib.metadata.version(name)
  return out


def git_state(root: str | os.PathLike = ROOT) -> dict[str, Any]:
  """{"commit", "changed": files differ from it}, or {} where the code is not in git or there is no git."""

  def git(*args: str) -> str:
    return subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=20, check=True).stdout.strip()

  if not (pathlib.Path(root) / ".git").exists():
    return {}
  try:
    return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "--untracked-files=no"))}
  except (OSError, subprocess.SubprocessError):
    return {}


def _plain(value: Any, where: str) -> Any:
  if isinstance(value, Mapping):
    return {str(k): _plain(v, f"{where}.{k}") for k, v in value.items()}
  if isinstance(value, list | tuple | set | frozenset):
    return [_plain(v, f"{where}[{i}]") for i, v in enumerate(sorted(value) if isinstance(value, set | frozenset) else value)]
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)  # JSON has no inf
  if value is None or isinstance(value, bool | int | float | str):
    return value
  raise ConfigError(f"{where} is a {type(value).__name__}, wanted a plain value: a config must be readable as JSON")


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
  if isinstance(value, Mapping):
    for k, v in value.items():
      yield from _flat(f"{name}.{k}", v)
  else:
    yield name, value


# ---- looking before parsing


def _define_flags(define: Define | None) -> absl_flags.FlagValues:
  values = absl_flags.FlagValues()
  absl_flags.DEFINE_string("workdir", None, "Folder of the run; default runs/NAME of the config.", flag_values=values)
  absl_flags.DEFINE_bool("fresh", False, "Start anew beside an old run instead of resuming it.", flag_values=values)
  absl_flags.DEFINE_string("flagfile", "", "Read flags from this file, one a line.", flag_values=values)
  absl_flags.DEFINE_string("undefok", "", "Not used.", flag_values=values)
  if define is not None:
    define(values)
  return values


def _expand(argv: list[str], values: absl_flags.FlagValues) -> list[str]:
  try:
    return values.read_flags_from_files(argv, force_gnu=False)
  except (absl_flags.Error, OSError) as e:
    raise ConfigError(one_line(e).removeprefix("ERROR:: ")) from e


def _config_files() -> list[str]:
  return [f"configs/{name}.py" for name in available("configs", having="get_config")]


def _config_spec(argv: list[str]) -> str:
  """The value of --config, which must be there once and before its overrides."""
  found = []
  for i, a in enumerate(argv[1:], 1):
    if re.fullmatch("--?config", a) and i + 1 < len(argv):
      found.append((i, argv[i + 1]))
    elif match := re.match("--?config=(.*)", a, re.DOTALL):
      found.append((i, match[1]))
  if len(found) != 1 or not found[0][1]:
    problem = "no --config is given" if not found or not found[0][1] else f"--config is given {len(found)} times"
    raise ConfigError(f"{problem}; write --config=FILE once, FILE being one of: {', '.join(_config_files())}")
  early = [a for a in argv[1 : found[0][0]] if re.match(r"--?(no)?config\.", a)]
  if early:
    raise ConfigError(f"{early[0]} stands before --config={found[0][1]}; put --config first")
  return found[0][1]


def _gives_image(argv: list[str]) -> bool:
  """Whether the command line names an image of the environment: --config.env.image=X or --config.env.image X, X not empty."""
  for i, a in enumerate(argv):
    found = re.fullmatch(r"--?config\.env\.image(?:=(.*))?", a, re.DOTALL)
    if found and (found[1] if found[1] is not None else (argv[i + 1] if i + 1 < len(argv) else "")):
      return True
  return False


def _with_mode(argument: str, spec: str, new: str) -> str:
  """An argument of the command line, with the config's modes replaced if it is the one that names the config."""
  named = re.fullmatch(r"(--?config=)" + re.escape(spec), argument)
  return new if argument == spec else named[1] + new if named else argument


def _read_config(file: str, arg: str) -> tuple[ConfigDict, dict[str, Any]]:
  """Run the config file once by ourselves: here its errors still have their own words."""
  if not os.path.isfile(file):
    known = _config_files()
    raise ConfigError(f"config file {file} does not exist{nearest(file, known)}; there are: {', '.join(known)}")
  modes: dict[str, Any] = {}
  token = _modes.set(modes)
  try:
    spec = importlib.util.spec_from_file_location("looked_at_config", file)
    if spec is None:
      raise ConfigError(f"config file {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(arg) if arg else module.get_config()
  except ConfigError as e:
    raise ConfigError(f"{file}: {one_line(e)}") from e
  except Exception as e:  # noqa: BLE001 - whatever a config file raises becomes a ConfigError that names the place
    raise ConfigError(f"{file}{_line_in(file, e)}: {type(e).__name__}: {one_line(e)}") from e
  finally:
    _modes.reset(token)
  if not isinstance(config, ConfigDict):
    raise ConfigError(f"{file}: get_config() returned {type(config).__name__}, wanted a ConfigDict")
  return config, modes


def _line_in(file: str, error: Exception) -> str:
  if isinstance(error, SyntaxError) and error.filename and os.path.abspath(error.filename) == os.path.abspath(file):
    return f" line {error.lineno}"
  lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if os.path.abspath(f.filename) == os.path.abspath(file)]
  return f" line {lines[-1]}" if lines else ""


def _override_keys(argv: list[str]) -> list[str]:
  """Keys of all --config.KEY..., a leading "no" (for --noconfig.KEY) left out."""
  return [m[1] for a in argv[1:] if (m := re.match(r"--?(?:no)?config\.([^=]*)", a, re.DOTALL))]


def _check_key(key: str, config: ConfigDict, modes: Mapping[str, Any], file: str) -> None:
  for mode, value in modes.items():
    if key in (mode, f"{mode}.name"):
      example = f":{mode}" if isinstance(value, bool) else f":{mode}=VALUE"
      raise ConfigError(
        f"--config.{key} cannot be overridden: the mode {mode!r} chooses it and brings its defaults; use --config={file}{example}"
      )
  at: Any = config
  for i, part in enumerate(key.split(".")):
    held = ".".join(key.split(".")[:i])
    if not isinstance(at, ConfigDict):
      raise ConfigError(f"--config.{key}: {held} is a {_kind(at).__name__}, it has no field {part!r}")
    fields = _fields(at)
    if part not in fields:
      names = [k for k, _ in _leaves(config)]
      near = _same_name(part, names) or nearest(part, fields) or nearest(key, names)
      inside = f"config.{held}" if held else "config"
      raise ConfigError(f"--config.{key}: there is no {part!r} in {inside}{near}; it has: {', '.join(sorted(fields))}")
    at = fields[part]
  if isinstance(at, ConfigDict):
    raise ConfigError(f"--config.{key} is a group of fields, not one; it has: {', '.join(sorted(_fields(at)))}")
  if at is None:
    raise ConfigError(f"--config.{key}: the field is None and has no type; its config must make it configs.common.optional(...)")


def _fields(config: ConfigDict) -> dict[str, Any]:
  """Fields as they are kept: a reference tells its type even while its value is None."""
  return dict(config.items(preserve_field_references=True))


def _kind(field: Any) -> type:
  return field.get_type() if isinstance(field, FieldReference) else type(field)


def _value(field: Any) -> Any:
  return field.get() if isinstance(field, FieldReference) else field


def _leaves(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
  for key, field in _fields(config).items():
    if isinstance(field, ConfigDict):
      yield from _leaves(field, f"{prefix}{key}.")
    else:
      yield prefix + key, field


def _same_name(part: str, keys: Sequence[str]) -> str:
  """The field may be right and only its group be missing: --config.lr for --config.optimiser.lr."""
  match = [k for k in keys if k.split(".")[-1] == part]
  return f" (did you mean {match[0]}?)" if match else ""


def _parse(values: absl_flags.FlagValues, argv: list[str], config: ConfigDict) -> list[str]:
  try:
    return values(argv)
  except absl_flags.UnrecognizedFlagError as e:
    names = ["config", *(n for n in values if n not in ("flagfile", "undefok"))]
    fields = [f"config.{k}" for k, _ in _leaves(config)]
    near = _same_name(e.flagname, fields) or nearest(e.flagname, names)
    raise ConfigError(
      f"there is no flag --{e.flagname}{near}; flags: {', '.join('--' + n for n in sorted(set(names)) if '.' not in n)}"
    ) from e
  except absl_flags.IllegalFlagValueError as e:
    match = re.search(r"flag --config\.(\S+?)=(.*?): ", str(e), re.DOTALL)
    if not match:
      raise ConfigError(one_line(e)) from e
    field = dict(_leaves(config))[match[1]]
    wanted = _KINDS.get(_kind(field), _kind(field).__name__)
    raise ConfigError(f"--config.{match[1]}={match[2]}: wanted {wanted}, like its default {_value(field)!r}") from e
  except (absl_flags.Error, ValueError, TypeError, KeyError, AttributeError) as e:
    raise ConfigError(one_line(e.args[0] if e.args else e)) from e


def _check_tuples(overrides: Mapping[str, Any], before: Mapping[str, Any]) -> None:
  """ml_collections types a tuple but not what is in it, and takes `a,b` for one text with a comma."""
  for key, new in overrides.items():
    old = before[key]
    if not isinstance(new, tuple):
      continue
    if len(new) == 1 and isinstance(new[0], str) and re.search(r"[][(){},]", new[0]):
      raise ConfigError(f"--config.{key}={new[0]}: wanted a tuple, quoted for the shell: --config.{key}=\"('a', 'b')\"")
    kinds = {type(x) for x in old or ()}
    if kinds == {float}:
      kinds.add(int)
    if kinds and not {type(x) for x in new} <= kinds:
      raise ConfigError(f"--config.{key}={new}: wanted elements like those of its default {old}")


def _leftover(argv: list[str], word: str) -> str:
  before = argv[argv.index(word) - 1] if word in argv[1:] else ""
  if re.match("--?[a-zA-Z]", before) and "=" not in before:
    return f"{word!r} is left over after {before}; write {before}={word}"
  return f"{word!r} is left over: every argument is a flag, written --flag=value"
