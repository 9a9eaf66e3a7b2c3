"""find("agents", "grpo") -> the module agents/grpo.py. Parts are found by their file name; there is no registry to keep.

A name that is not there stops with one line: what was asked, the nearest name and everything that exists. Folders are read,
never imported, so listing what exists costs nothing and an environment worker that lists `envs` does not import jax.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import pathlib
import re
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")


def nearest(name: str, names) -> str:
  """' (did you mean X?)' for error lines, or '' where nothing is close. Case and '-' against '_' do not count."""
  names = [str(n) for n in names]
  plain = {n.lower().replace("-", "_"): n for n in names}
  close = difflib.get_close_matches(str(name).lower().replace("-", "_"), plain, n=1, cutoff=0.5)
  return f" (did you mean {plain[close[0]]}?)" if close else ""


def packages() -> list[str]:
  """First-party packages: the folders beside this one that hold an __init__.py."""
  return sorted(p.parent.name for p in ROOT.glob("*/__init__.py") if _NAME.match(p.parent.name))


def available(package: str, having: str | None = None) -> list[str]:
  """Names of the modules (and packages) directly inside `package`, sorted; those starting with '_' are private.

  having: keep only modules whose file defines this name at top level, e.g. "make" for agents: base.py is not an agent.
  """
  return sorted(n for n, p in _files(package).items() if having is None or having in _defines(p))


def find(package: str, name: str, having: str | None = None) -> types.ModuleType:
  """The module `package.name`. An error inside that module (a missing library, a bug) is raised as it is."""
  path = _files(package).get(name) if isinstance(name, str) else None
  if path is None or not (having is None or having in _defines(path)):
    names = available(package, having)  # every file is read: for the message alone
    listed = ", ".join(names) or "nothing"
    raise ValueError(f"no {name!r} in {package}/{nearest(name, names)}; there is: {listed}")
  return importlib.import_module(f"{package}.{name}")


def _files(package: str) -> dict[str, pathlib.Path]:
  """{name: file} of a package's modules."""
  if package not in packages():
    raise ValueError(f"no package {package!r}{nearest(package, packages())}; there are: {', '.join(packages())}")
  found = {p.stem: p for p in (ROOT / package).glob("*.py")} | {p.parent.name: p for p in (ROOT / package).glob("*/__init__.py")}
  return {n: p for n, p in found.items() if _NAME.match(n)}


def _defines(path: pathlib.Path) -> set[str]:
  """Names that a file binds at top level by def, class, assignment or from-import."""
  names = set()
  for node in ast.parse(path.read_text(encoding="utf-8"), filename=str(path)).body:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
      names.add(node.name)
    elif isinstance(node, ast.Assign):
      names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      names.add(node.target.id)
    elif isinstance(node, ast.ImportFrom):
      names |= {a.asname or a.name for a in node.names}
  return names
