"""The house rules, read from the syntax trees: who may import whom, how long things may be, what is never written."""

import ast
import pathlib
import subprocess
import sys
from collections import Counter

import pytest

from core.find import ROOT, packages

SKIPPED = {"runs", "shared", "build"}  # run folders and what is not ours
MAY_IMPORT = {  # first-party, besides the package itself; None = everything but train
  "core": (),
  "losses": ("core.segments",),
  "agents": ("losses", "core"),
  "models": ("core",),
  "envs": ("core.schema",),
  "rollout": ("core", "envs", "models.base"),
  "configs": ("core", "agents", "envs", "models", "rollout"),
  "tools": None,
  "benchmarks": None,
}
BASE = {"numpy", "ml_collections"}
THIRD_PARTY = {  # besides BASE and the standard library; packages that are not here answer to JAX_FREE or to nothing
  "core": {"jax", "flax", "optax", "orbax", "etils", "tensorboard", "absl", "ml_dtypes"},
  "losses": {"jax", "chex"},
  "agents": {"jax"},
  "models": {"jax", "flax", "safetensors", "tokenizers", "PIL"},
  "rollout": {"jax", "PIL", "httpx2"},
  "configs": set(),
}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}
JAX_FREE = ("envs", "core/schema.py", "core/stats.py", "core/__init__.py")
NUMPY_ONLY = ("core/schema.py", "core/stats.py")


def files(*below):
  """First-party Python files, tests among them, as paths relative to the repository."""
  found = sorted(ROOT.glob("*.py")) + sorted(ROOT.glob("*/**/*.py"))
  names = [p.relative_to(ROOT) for p in found]
  names = [n for n in names if not any(part.startswith(".") or part in SKIPPED for part in n.parts)]
  return [n for n in names if not below or str(n).startswith(below)]


def code():
  return [n for n in files() if n.parts[0] != "tests"]


def tree(name):
  return ast.parse((ROOT / name).read_text(encoding="utf-8"), filename=str(name))


def imports(name):
  """Dotted names of everything a file imports, wherever in the file it does; `from a import b` gives a.b if that is a module."""
  out = set()
  for node in ast.walk(tree(name)):
    if isinstance(node, ast.Import):
      out |= {a.name for a in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{name}:{node.lineno} imports relative to itself"
      for alias in node.names:
        dotted = f"{node.module}.{alias.name}"
        path = ROOT / dotted.replace(".", "/")
        out.add(dotted if path.with_suffix(".py").exists() or (path / "__init__.py").exists() else node.module)
  return out


def first_party(dotted):
  top = dotted.partition(".")[0]
  return (ROOT / top).is_dir() and (ROOT / top / "__init__.py").exists() or (ROOT / f"{top}.py").exists()


def covers(allowed, dotted):
  return any(dotted == a or dotted.startswith(a + ".") for a in allowed)


@pytest.mark.parametrize("package", packages())
def test_first_party_imports_follow_the_arrows(package):
  assert package in MAY_IMPORT, f"{package}/ is new: say in MAY_IMPORT (and in the design) whom it may import"
  allowed = MAY_IMPORT[package]
  for name in files(package + "/"):
    for dotted in filter(first_party, imports(name)):
      good = dotted.partition(".")[0] != "train" if allowed is None else covers((package, *allowed), dotted)
      assert good, f"{name} imports {dotted}; {package} may import {allowed}"


def test_nothing_imports_train():
  assert not [str(n) for n in code() if "train" in imports(n)]


@pytest.mark.parametrize("package", sorted(THIRD_PARTY))
def test_third_party_imports_are_the_listed_ones(package):
  allowed = THIRD_PARTY[package] | BASE | sys.stdlib_module_names
  for name in files(package + "/"):
    strange = {d for d in imports(name) if not first_party(d) and d.partition(".")[0] not in allowed}
    assert not strange, f"{name} imports {sorted(strange)}"


def test_host_side_files_name_no_jax():
  for name in files(*JAX_FREE):
    found = {d for d in imports(name) if d.partition(".")[0] in JAX}
    assert not found, f"{name} imports {sorted(found)}: a worker would claim the accelerator"
  for name in NUMPY_ONLY:
    third = {d.partition(".")[0] for d in imports(name) if not first_party(d)} - sys.stdlib_module_names
    assert third <= {"numpy"}, name
  assert not imports(pathlib.Path("core/__init__.py"))


def test_an_environment_process_never_loads_jax():
  modules = ["core.schema", "core.stats", "core.find"] + [
    ".".join(n.with_suffix("").parts) for n in files("envs/sim/", "envs/base", "envs/errors", "envs/actions") if n.stem != "__init__"
  ]
  script = f"import {', '.join(modules)}, envs.sim, sys; print([m for m in {sorted(JAX)} if m in sys.modules])"
  done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout == "[]\n"


def test_configs_take_nothing_from_other_parts_but_their_defaults():
  """find(...) hands a config a whole module: only its defaults() is asked for, and which of those are the machine's (getattr)."""
  for name in files("configs/"):
    for node in ast.walk(tree(name)):
      if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "find":
        assert node.attr == "defaults", f"{name}:{node.lineno} takes {node.attr}"


def test_sizes():
  for name in files():
    lines = (ROOT / name).read_text(encoding="utf-8").count("\n")
    most = 349 if str(name) == "train.py" else 500
    assert lines <= most, f"{name} has {lines} lines, wanted {most} at most"


def test_function_lengths():
  """60 lines, decorators not counted; in train.py one function, the loop, may be longer."""
  long = []
  for name in files():
    for node in ast.walk(tree(name)):
      if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno + 1 > 60:
        long.append((str(name), node.name))
  assert [f for f in long if f[0] != "train.py"] == []
  assert len(long) <= 1, f"train.py has more than one loop: {long}"


def test_no_root_file_shadows_the_standard_library():
  """`python train.py` puts the root first on the path: a types.py there and `import jax` dies."""
  assert not {p.stem for p in ROOT.glob("*.py")} & sys.stdlib_module_names
  assert not set(packages()) & sys.stdlib_module_names


def test_no_two_files_of_tests_share_a_name():
  """pytest imports them by their names alone: a run of both would not begin, and a run of either would not say so."""
  names = Counter(p.name for p in (ROOT / "tests").rglob("test_*.py"))
  assert not [name for name, count in names.items() if count > 1]


def test_never_written():
  """No code from text, no shell, no swallowed error, no nnx.jit. Catching everything is for keeping or naming the error only."""
  found = []
  for name in code():
    for node in ast.walk(tree(name)):
      found += [f"{name}:{node.lineno} {what}" for what in sins(node)]
  assert not found, "\n".join(found)


def sins(node):
  if isinstance(node, ast.ExceptHandler):
    caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    everything = node.type is None or any(getattr(c, "id", "") in ("Exception", "BaseException") for c in caught)
    raised = any(isinstance(n, ast.Raise) for n in ast.walk(node))
    kept = any(isinstance(n, ast.Assign) and getattr(n.value, "id", "") == node.name for n in node.body) and node.name
    if everything and not raised and not kept:
      yield "swallows every error"
  if isinstance(node, ast.Call):
    if getattr(node.func, "id", "") in ("eval", "exec", "compile", "__import__"):
      yield f"calls {node.func.id}"
    if any(k.arg == "shell" and not (isinstance(k.value, ast.Constant) and not k.value.value) for k in node.keywords):
      yield "starts a shell"
  if isinstance(node, ast.Attribute):
    if node.attr in ("system", "popen") and getattr(node.value, "id", "") == "os":
      yield f"uses os.{node.attr}"
    if node.attr == "jit" and getattr(node.value, "id", "") == "nnx":
      yield "uses nnx.jit"
  if isinstance(node, ast.ImportFrom):
    names = {(node.module, a.name) for a in node.names}
    if names & {("flax.nnx", "jit"), ("os", "system"), ("os", "popen"), ("subprocess", "getoutput")}:
      yield "imports what is never used"


@pytest.mark.parametrize(
  "text",
  ["try: pass\nexcept: pass", "try: pass\nexcept Exception: pass", "try: pass\nexcept (ValueError, Exception) as e: log(e)", "eval('1')",
   "exec(t)", "os.system('ls')", "run('ls', shell=True)", "run('ls', shell=flag)", "nnx.jit(f)", "from flax.nnx import jit"],
)  # fmt: skip
def test_the_checker_of_sins_sees_each_kind(text):
  assert [s for node in ast.walk(ast.parse(text)) for s in sins(node)]


def test_agent_text_is_tokenised_in_one_place():
  """Tokens in, tokens out: outside the models, only the copying of demonstrations turns text into ids."""
  users = set()
  for name in code():
    for node in ast.walk(tree(name)):
      if isinstance(node, ast.Attribute) and node.attr == "encode":
        owner = getattr(node.value, "attr", getattr(node.value, "id", ""))  # policy.tokenizer.encode, tokenizer.encode
        users |= {str(name)} if owner == "tokenizer" else set()
  assert {u for u in users if not u.startswith("models/")} == {"rollout/demos.py"}
