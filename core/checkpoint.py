"""Everything a resume needs, in one atomic step: the device tree, and whatever the host must remember (cursor, random
states, replay buffer ...).

    checkpoints/8/            one complete step, renamed into place when all of it is on disk
      manifest.json           written last: leaves with shape and dtype, every file with size and hash. No manifest, no step
      tree/                   the device arrays, written by orbax under names such as "params/head/w"
      host_00000.json, .npz   the host state of process 0, no pickle (core/blob.py)
    checkpoints/8.1/          step 8 saved again by force
    checkpoints/screens/      screenshots of the host states, each written once for all steps
    checkpoints/tmp-9/        a save in progress, or one that was killed; ignored, swept at the next save

A step that is incomplete or damaged is skipped with a loud warning and the next older one is used. Old steps are deleted only
after a newer one is committed. One writer at a time; any number of readers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from core import blob, hosts, snapshot
from core.screens import ScreenStore, write_atomic
from core.snapshot import is_key, named

FORMAT = 1
HASH_LIMIT = 256 * 2**20  # larger files are checked by size only; hashing a 7B model's would take minutes
_saves = itertools.count()  # the same in every process: all save alike, in the same order
_STEP = re.compile(r"(\d+)(?:\.(\d+))?\Z")


class Damaged(Exception):
  """A step on disk that is incomplete or was changed after it was written. Never raised for a wrong target."""


class Misfit(ValueError):
  """A step is whole, and its leaves are not those of the target."""


class Saved(NamedTuple):
  """One complete step on disk. serial counts saves: a step saved by force outdates newer steps that were saved before it."""

  serial: int
  step: int
  path: pathlib.Path
  manifest: dict[str, Any]


class Checkpointer:
  """Saves and restores steps under one directory. keep: newest steps kept; keep_best: how many of the best by `score`, too."""

  def __init__(self, directory: str | os.PathLike, keep: int = 2, keep_best: int = 0):
    if "://" in str(directory):
      raise ValueError(f"checkpoints go to a local or mounted directory, got {directory}")
    if keep < 1 or keep_best < 0:
      raise ValueError(f"keep={keep}, keep_best={keep_best}: wanted keep >= 1 and keep_best >= 0")
    self.directory = pathlib.Path(os.path.abspath(directory))
    self.keep = keep
    self.keep_best = keep_best
    self.screens = ScreenStore(self.directory / "screens")
    self._thread: threading.Thread | None = None
    self._error: BaseException | None = None
    self._said = ""  # under which the processes met for the newest save
    self._damaged: set[pathlib.Path] = set()  # found damaged by restore: no longer counted as complete

  def __enter__(self) -> Checkpointer:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def close(self) -> None:
    """Finish the save in progress. Raises if it failed: a run must not end well with its last checkpoint lost."""
    self.wait()

  def written(self) -> None:
    """Block until the save in progress has ended, in whatever thread this is called; its error is left to the next `wait`."""
    if (thread := self._thread) is not None:
      thread.join()

  def wait(self) -> None:
    """Block until the save in progress is committed; raise its error, once."""
    self.written()
    self._thread = None
    if self._error is not None:
      error, self._error = self._error, None
      kind = hosts.Parted if isinstance(error, hosts.Parted) else OSError
      raise kind(f"saving a checkpoint under {self.directory} failed: {error}") from error

  def steps(self) -> list[int]:
    """Complete steps, oldest first."""
    return [s.step for s in self._saved()]

  def latest(self) -> int | None:
    steps = self.steps()
    return steps[-1] if steps else None

  def best(self) -> int | None:
    """The step with the highest score, the newer of equals; None where no step has one."""
    scored = _by_score(self._saved())
    return scored[0].step if scored else None

  def save(
    self, step: int, tree: Any, host: Any = None, *, score: float | None = None, force: bool = False, block: bool = True
  ) -> None:
    """Write one step. tree: pytree of arrays and random keys. host: nested plain values, numpy arrays and schema records.

    Both are copied before this returns, so the next update may donate the buffers. A step that is not newer than the newest
    on disk is refused; force=True writes it and drops the newer ones (a rollback). block=False writes in the background;
    its error is raised by the next save, wait or close. With several processes every process calls this with its own host
    state, and what fails in one is an error in all.
    """
    name, temp = f"saves/{next(_saves)}", self.directory / f"tmp-{step}"
    self.wait()
    with hosts.together(f"{name}/begun"):
      self._check(step, score, force)
      leaves, entries = snapshot.copied(tree)
      encoded = blob.encode(host)
      if jax.process_index() == 0:
        _remove(temp)
        snapshot.make(temp / "tree", leaves)
    hosts.forget(self._said)
    self._said = name
    with hosts.together(f"{name}/copied"):
      written = snapshot.begin(temp / "tree", leaves)
    manifest = {
      "format": FORMAT,
      "step": int(step),
      "score": score,
      "leaves": entries,
      "processes": jax.process_count(),
      "saved_at": time.time(),
    }
    if block:
      self._write(name, temp, written, encoded, manifest)
    else:
      self._thread = threading.Thread(
        target=self._write_in_background, args=(name, temp, written, encoded, manifest), name=f"checkpoint-{step}"
      )
      self._thread.start()

  def _check(self, step: int, score: float | None, force: bool) -> None:
    newest = max(self.steps(), default=-1)
    if step != int(step) or step < 0:
      raise ValueError(f"checkpoint step {step!r}, wanted a whole number >= 0")
    if step <= newest and not force:
      raise ValueError(
        f"checkpoint {step} not saved: {self.directory} already holds step {newest}; "
        "force=True replaces it and drops every step newer than the one saved"
      )
    if score is not None and not math.isfinite(score):
      raise ValueError(f"checkpoint {step}: score is {score}, wanted a finite number or None")

  def restore(self, target: Any, step: int | None = None, *, partial: bool = False, cast: bool = False, whole: str = ""):
    """-> (device tree, host state, step). target: the wanted tree, arrays or ShapeDtypeStructs; its shardings are used.

    step=None takes the newest that is whole. Leaves are matched by name and must agree in shape and dtype: anything else is
    a Misfit of one line. partial=True ignores leaves that only the checkpoint has (an evaluation needs no optimiser
    state), but for those under the name `whole`; cast=True converts dtypes.
    """
    self.wait()
    tried: set[pathlib.Path] = set()
    while True:  # listed anew each time: a run that is still training may delete a step while this one reads it
      saved = [s for s in self._saved() if s.path not in tried and step in (None, s.step)]
      if not saved:
        raise FileNotFoundError(self._nothing(step, tried))
      chosen = saved[-1]
      tried.add(chosen.path)
      try:
        _verify(chosen)
        host = self._read_host(chosen)
        return _read_tree(chosen, target, partial, cast, whole), host, chosen.step
      except Damaged as e:
        self._damaged.add(chosen.path)
        logging.warning("CHECKPOINT %s IS DAMAGED AND SKIPPED: %s", chosen.path, e)

  def _nothing(self, step: int | None, tried: set) -> str:
    wanted = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
    there = self.steps()
    damaged = f" ({len(tried)} damaged, see warnings)" if tried else ""
    return f"no {wanted} in {self.directory}{damaged}; steps there: {', '.join(map(str, there)) or 'none'}"

  def _saved(self) -> list[Saved]:
    """Complete steps that still count, in the order they were saved."""
    found = []
    for path in _step_folders(self.directory):
      try:
        if path in self._damaged:
          continue
        manifest = _read_manifest(path)
        found.append(Saved(manifest["serial"], manifest["step"], path, manifest))
      except Damaged as e:
        self._damaged.add(path)
        logging.warning("CHECKPOINT %s IS INCOMPLETE AND SKIPPED: %s", path, e)
    found.sort()
    return [s for i, s in enumerate(found) if all(later.step > s.step for later in found[i + 1 :])]

  def _write_in_background(self, name: str, temp: pathlib.Path, *args) -> None:
    try:
      self._write(name, temp, *args)
    except BaseException as e:  # noqa: BLE001 - kept, and raised by wait()
      self._error = e
      logging.error("CHECKPOINT %s WAS NOT SAVED: %s", temp, e)

  def _write(self, name: str, temp: pathlib.Path, written: Callable[[float | None], None], encoded: tuple, manifest: dict) -> None:
    """In the background it runs beside the next updates: the processes meet without a collective."""
    with hosts.together(f"{name}/written"):
      written(hosts.patience())
      self._write_host(temp, encoded)
    with hosts.together(f"{name}/committed"):
      if jax.process_index() == 0:
        self._commit(temp, manifest)

  def _commit(self, temp: pathlib.Path, manifest: dict) -> None:
    snapshot.end(temp / "tree")
    saved = self._saved()
    manifest["serial"] = 1 + max((s.serial for s in saved), default=0)
    manifest["files"] = {str(p.relative_to(temp)): _file_entry(p) for p in sorted(temp.rglob("*")) if p.is_file()}
    write_atomic(temp / "manifest.json", json.dumps(manifest, indent=1).encode())
    path = _free_name(self.directory, manifest["step"])
    os.rename(temp, path)
    _sync_folder(self.directory)
    self._damaged.discard(path)
    self._prune()

  def _write_host(self, temp: pathlib.Path, encoded: tuple) -> None:
    text, arrays, screens = encoded
    for screen in screens.values():
      self.screens.put(screen)
    name = f"host_{jax.process_index():05d}"
    (temp / f"{name}.json").write_bytes(text)
    (temp / f"{name}.npz").write_bytes(arrays)
    (temp / f"{name}.screens").write_text("".join(f"{ref}\n" for ref in sorted(screens)))

  def _read_host(self, saved: Saved) -> Any:
    count, mine = saved.manifest["processes"], jax.process_index()
    if count != jax.process_count():
      mine = min(mine, count - 1)
      logging.warning(
        "CHECKPOINT %s WAS SAVED BY %d PROCESSES, THIS RUN HAS %d: process %d takes the host state of process %d",
        saved.path,
        count,
        jax.process_count(),
        jax.process_index(),
        mine,
      )
    name = saved.path / f"host_{mine:05d}"
    try:
      text, arrays = name.with_suffix(".json").read_bytes(), name.with_suffix(".npz").read_bytes()
      return blob.decode(text, arrays, self._get_screen)
    except (OSError, zipfile.BadZipFile, json.JSONDecodeError) as e:
      raise Damaged(f"{name.name}: {e}") from e

  def _get_screen(self, ref: str):
    try:
      return self.screens.get(ref)
    except (OSError, ValueError) as e:
      raise Damaged(f"screen {ref}: {e}") from e

  def _prune(self) -> None:
    """Delete all that is neither among the newest nor among the best; called when a new step has just been committed."""
    saved = self._saved()
    kept = {s.path for s in saved[-self.keep :] + _by_score(saved)[: self.keep_best]}
    for path in _step_folders(self.directory):
      if path not in kept:
        _remove(path)
        self._damaged.discard(path)
    for path in self.directory.glob("tmp-*"):
      _remove(path)
    used: set[str] = set()
    for path in kept:
      for listed in path.glob("host_*.screens"):
        used.update(listed.read_text().split())
    self.screens.keep_only(used)


def read_numpy(path: str | os.PathLike) -> dict[str, np.ndarray]:
  """Every array of a checkpoint by name, as numpy, without mesh, model or optimiser. path: a step's folder, or the folder
  of steps for the newest. Random keys come as their raw data. Damaged where a file is not what was written."""
  path = pathlib.Path(os.path.abspath(path))
  if not _STEP.match(path.name):
    reader = Checkpointer(path)
    saved = reader._saved()
    if not saved:
      raise FileNotFoundError(reader._nothing(None, set()))
    path = saved[-1].path
  manifest = _read_manifest(path)
  _verify(Saved(manifest["serial"], manifest["step"], path, manifest))
  return _orbax_read(path, {e["name"]: _stored(e) for e in manifest["leaves"]})


# ---- the device tree


def _stored(entry: dict[str, Any], sharding: Any = None) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(entry["stored_shape"], np.dtype(entry["stored_dtype"]), sharding=sharding)


def _read_tree(saved: Saved, target: Any, partial: bool, cast: bool, whole: str) -> Any:
  """The tree with `target`'s structure, dtypes and shardings. All is compared before anything is read."""
  wanted = named(target)
  entries = {e["name"]: e for e in saved.manifest["leaves"]}
  _compare(saved, wanted, entries, partial, cast, whole)
  try:
    read = _orbax_read(saved.path, {name: _stored(entries[name], _placement(x)) for name, x in wanted})
  except (ValueError, OSError) as e:
    raise Damaged(f"tree: {' '.join(str(e).split())[:300]}") from e
  return jax.tree.unflatten(jax.tree.structure(target), [_finish(read[n], x, entries[n]) for n, x in wanted])


def _placement(x: Any):
  """The sharding orbax reads a leaf into, or None to read it as numpy: for keys, numpy targets and arrays bound to no device."""
  if is_key(x) or isinstance(x, np.ndarray | np.generic) or not getattr(x, "committed", True):
    return None
  return x.sharding


def _finish(value: Any, want: Any, entry: dict[str, Any]) -> Any:
  if isinstance(want, np.ndarray | np.generic):
    return value if value.dtype == want.dtype else value.astype(want.dtype)
  if "key" in entry:
    value = jax.random.wrap_key_data(value, impl=entry["key"])
    value = jax.device_put(value, want.sharding) if want.sharding is not None else value
  elif isinstance(value, np.ndarray):
    value = jnp.array(value, want.dtype)  # copies: an array that looked into numpy's memory could not be donated
  elif value.dtype != want.dtype:
    value = value.astype(want.dtype)
  if value.dtype != want.dtype:
    raise ValueError(f"checkpoint leaf {entry['name']}: {want.dtype} is wanted, jax gives {value.dtype}; set jax_enable_x64")
  return value


def _compare(saved: Saved, wanted: list, entries: dict[str, dict], partial: bool, cast: bool, whole: str) -> None:
  """One line about the first leaf that does not fit, if any."""
  names = {n for n, _ in wanted}
  missing = [n for n, _ in wanted if n not in entries]
  extra = [n for n in entries if n not in names]
  if missing:
    raise Misfit(
      f"checkpoint {saved.path} has no leaf {missing[0]}{_more(missing)}, which the target wants"
      + (f"; it has {extra[0]}{_more(extra)} instead" if extra else "")
    )
  extra = [n for n in extra if not partial or whole and n.startswith(f"{whole}/")]
  if extra:
    raise Misfit(
      f"checkpoint {saved.path} has leaf {extra[0]}{_more(extra)}, which the target does not have"
      + ("" if partial else "; partial=True leaves such leaves out")
    )
  for name, x in wanted:
    got, want = entries[name], (list(x.shape), str(x.dtype))
    castable = cast and "key" not in got and not is_key(x)
    if got["shape"] != want[0] or (got["dtype"] != want[1] and not castable):
      hint = "; cast=True converts it" if got["shape"] == want[0] and "key" not in got and not is_key(x) else ""
      raise Misfit(f"checkpoint {saved.path}: leaf {name} is {got['dtype']} {got['shape']}, wanted {want[1]} {want[0]}{hint}")


def _more(names: list[str]) -> str:
  return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _orbax_read(path: pathlib.Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
  """Leaves by name; numpy where no sharding is given. Raises what orbax raises."""
  full = {n: w for n, w in wanted.items() if w.size}
  out = {n: np.zeros(w.shape, w.dtype) for n, w in wanted.items() if not w.size}
  if full:
    how = {
      n: ocp.RestoreArgs(restore_type=np.ndarray) if w.sharding is None else ocp.ArrayRestoreArgs(sharding=w.sharding)
      for n, w in full.items()
    }
    request = ocp.args.PyTreeRestore(item=full, restore_args=how, partial_restore=True)
    out |= ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path / "tree", args=request)
  return out


# ---- folders and files


def _step_folders(directory: pathlib.Path) -> list[pathlib.Path]:
  return [p for p in directory.iterdir() if _STEP.match(p.name) and p.is_dir()] if directory.is_dir() else []


def _free_name(directory: pathlib.Path, step: int) -> pathlib.Path:
  """8, or 8.1, 8.2 ... where that is taken: a forced save never has to remove the old one first."""
  names = [directory / str(step)] + [directory / f"{step}.{i}" for i in range(1, 1000)]
  return next(p for p in names if not p.exists())


def _read_manifest(path: pathlib.Path) -> dict[str, Any]:
  """The manifest, with every file it names seen to be there in full length."""
  try:
    manifest = json.loads((path / "manifest.json").read_bytes())
    _ = [manifest[name] for name in ("serial", "step", "processes", "score")]
    _ = [[e[name] for name in ("name", "shape", "dtype", "stored_shape", "stored_dtype")] for e in manifest["leaves"]]
    short = [n for n, e in manifest["files"].items() if (path / n).stat().st_size != e["bytes"]]
  except FileNotFoundError as e:
    raise Damaged(f"{os.path.relpath(e.filename, path)} is missing") from e
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise Damaged(f"manifest.json: {type(e).__name__}: {e}") from e
  if short:
    raise Damaged(f"{short[0]} has not the size it was written with")
  if manifest["format"] != FORMAT:
    raise ValueError(f"checkpoint {path} has format {manifest['format']}, this version reads format {FORMAT}")
  return manifest


def _file_entry(path: pathlib.Path) -> dict[str, Any]:
  """Size and hash of a file, which is forced to disk on the way."""
  with open(path, "rb") as f:
    size = os.fstat(f.fileno()).st_size
    digest = hashlib.file_digest(f, "sha256").hexdigest() if size <= HASH_LIMIT else None
    os.fsync(f.fileno())
  return {"bytes": size, "sha256": digest}


def _verify(saved: Saved) -> None:
  for name, entry in saved.manifest["files"].items():
    if entry["sha256"] is None:
      continue
    try:
      with open(saved.path / name, "rb") as f:
        if hashlib.file_digest(f, "sha256").hexdigest() != entry["sha256"]:
          raise Damaged(f"{name} has not the content it was written with")
    except OSError as e:
      raise Damaged(f"{name}: {e}") from e


def _by_score(saved: list[Saved]) -> list[Saved]:
  """Those with a score, best first, the newer of equals first."""
  scored = [s for s in saved if s.manifest["score"] is not None]
  return sorted(scored, key=lambda s: (s.manifest["score"], s.serial), reverse=True)


def _remove(path: pathlib.Path) -> None:
  """Delete a folder, its completeness mark first: what is left of an interrupted delete is an incomplete step."""
  (path / "manifest.json").unlink(missing_ok=True)
  shutil.rmtree(path, ignore_errors=True)


def _sync_folder(path: pathlib.Path) -> None:
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)
