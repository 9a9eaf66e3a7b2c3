"""Disk images of virtual machines, and the saved states (templates) that episodes start from. docs/desktop.md."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np

from envs.errors import BootDeadline

DEBIAN = "debian"  # env.image: the desktop that tools/build_desktop.py made
ABOUT = "desktop.json"
MAGIC = {b"QFI\xfb": "qcow2", b"KDMV": "vmdk", b"vhdxfile": "vhdx", b"conectix": "vpc"}
BUILD = "python -m tools.build_desktop builds one"
PARTS = {"digest": str, "append": str, "memory_mb": int, "screen": list}  # of a desktop.json
STANDS = "wanted one that stands alone (qemu-img convert -O qcow2 OLD NEW makes one)"
CHECKED = (0, 3, 63)  # what qemu-img check ends with: no fault, room that nobody uses, a format that cannot be checked


def program(name: str) -> str:
  """The path of one of QEMU's programs."""
  found = shutil.which(name)
  if found is None:
    raise ValueError(f"there is no program {name}: real desktops want QEMU, `make system` (as root) installs it on Debian")
  return found


@functools.lru_cache
def version(path: str) -> str:
  """What `--version` says first."""
  return subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]


def run(argv: Sequence[str], seconds: float = 120.0, fine: Sequence[int] = (0,)) -> str:
  """Runs one of QEMU's tools. ValueError with its words where it fails. fine: the exit codes that are no failure."""
  try:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
  except subprocess.TimeoutExpired:
    raise ValueError(f"{pathlib.Path(argv[0]).name} {argv[1]} did not end within {seconds:g} s") from None
  if done.returncode not in fine:
    raise ValueError(f"{pathlib.Path(argv[0]).name} {argv[1]}: {' '.join(done.stderr.split())[-300:] or f'exit code {done.returncode}'}")
  return done.stdout


@dataclasses.dataclass(frozen=True)
class Image:
  """A disk that is never written. kernel, initrd, append: what starts it; None and "": its own boot loader. digest: names its content.
  ours: built by tools/build_desktop.py, whose server types what no keyboard has. memory_mb, screen: what it wants if nobody says."""

  disk: pathlib.Path
  format: str
  digest: str
  kernel: pathlib.Path | None = None
  initrd: pathlib.Path | None = None
  append: str = ""
  ours: bool = False
  memory_mb: int = 4096
  screen: tuple[int, int] = (1920, 1080)


def find(name: str, cache: str) -> Image:
  """What env.image names: a disk (qcow2, raw, vmdk, vhdx), a folder that tools/build_desktop.py made, or "debian" for the last one made in
  `cache`. ValueError with one line if it is none of these."""
  folder = pathlib.Path(cache).expanduser()
  if name == DEBIAN:
    built = sorted(folder.glob(f"images/*/{ABOUT}"), key=lambda p: p.stat().st_mtime)
    made = [about for about in built if _read(about, f"the desktop in {about.parent}").get("passed")]
    if not made:
      raise ValueError(f"env.image is {DEBIAN!r}, and there is no desktop in {folder} whose build was finished: {BUILD}")
    return _built(made[-1])
  path = pathlib.Path(name).expanduser()
  try:
    mode = path.stat().st_mode
  except (OSError, ValueError):
    mode = 0
  if not mode:
    raise ValueError(f"env.image is {name!r}: there is no such file or folder; wanted a disk image, or {DEBIAN!r} ({BUILD})")
  if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode) or stat.S_ISBLK(mode)):  # a pipe would be waited for
    raise ValueError(f"env.image is {name!r}, which is no file: wanted a disk image, or {DEBIAN!r} ({BUILD})")
  if stat.S_ISDIR(mode):
    if not (path / ABOUT).is_file():
      raise ValueError(f"env.image is the folder {name!r} without a {ABOUT}: wanted a disk image, or what {BUILD.split()[2]} made")
    return _built(path / ABOUT)
  if (path.parent / ABOUT).is_file() and (image := _built(path.parent / ABOUT)).disk == path.resolve():
    return image
  now = path.stat()
  digest = hashlib.sha256(f"{path.resolve()} {now.st_size} {now.st_mtime_ns}".encode()).hexdigest()
  return Image(path.resolve(), _format(path), digest)


def _read(about: pathlib.Path, whose: str, again: str = f"remove the folder and build it again ({BUILD})") -> dict[str, Any]:
  """A JSON object of ours; ValueError, one line, where it is damaged."""
  try:
    told = json.loads(about.read_text())
  except (ValueError, RecursionError) as error:
    told = f"{type(error).__name__}: {error}"[:80]
  if not isinstance(told, dict):
    raise ValueError(f"{whose} is damaged: {about.name} is no JSON object ({told!s:.80}): {again}")
  return told


def _built(about: pathlib.Path) -> Image:
  told, folder = _read(about, f"the desktop in {about.parent}"), about.parent.resolve()
  if lacking := [n for n in ("disk.qcow2", "vmlinuz", "initrd.img") if not (folder / n).is_file()]:
    raise ValueError(f"the desktop in {folder} has no {', '.join(lacking)}: remove the folder and build it again ({BUILD})")
  if lacking := [name for name, kind in PARTS.items() if not isinstance(told.get(name), kind)]:
    raise ValueError(f"{about} has no {', '.join(lacking)}: remove the folder and build it again ({BUILD})")
  disk = folder / "disk.qcow2"
  return Image(
    disk, _format(disk), told["digest"], folder / "vmlinuz", folder / "initrd.img", told["append"], True, told["memory_mb"],
    tuple(told["screen"]),
  )  # fmt: skip


def _format(path: pathlib.Path) -> str:
  """The image's format, by its own first bytes. ValueError if it is no disk."""
  with path.open("rb") as file:
    head = file.read(2048)
  kind = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), "")
  if not kind and head[510:512] == b"\x55\xaa" and path.stat().st_size % 512 == 0:
    kind = "raw"
  if not kind:
    raise ValueError(f"env.image is {os.fspath(path)!r}, which is no disk: it begins with {head[:16]!r}, wanted qcow2, vmdk, vhdx or raw")
  now = path.stat()
  _look_into(path, kind, now.st_size, now.st_mtime_ns)
  return kind


@functools.lru_cache
def _look_into(path: pathlib.Path, kind: str, size: int, changed: int) -> None:
  """ValueError for a disk that is cut short, encrypted, or not all in this file: `size` and `changed` stand for its content, here and in
  the keys of saved states, and an image of others could name any file of this machine, or a server, as its base."""
  name = f"env.image is {os.fspath(path)!r}, which"
  try:
    told = json.loads(run([program("qemu-img"), "info", "-U", "--output=json", "-f", kind, os.fspath(path)]))
  except ValueError as error:
    raise ValueError(f"{name} cannot be read as {kind}: {error}") from None
  more = told.get("format-specific", {}).get("data", {})
  others = [told.get("backing-filename"), more.get("data-file"), *(extent["filename"] for extent in more.get("extents", []))]
  if other := next((other for other in others if other and other != os.fspath(path)), ""):
    raise ValueError(f"{name} is not whole without {other!r:.100}: {STANDS}")
  if told.get("encrypted"):
    raise ValueError(f"{name} is encrypted: {STANDS}")
  try:
    run([program("qemu-img"), "check", "-q", "-U", "-f", kind, os.fspath(path)], fine=CHECKED)
  except ValueError as error:
    raise ValueError(f"{name} is cut short or damaged: {error}") from None


AGAIN = "remove the folder, and it is made anew when it is asked for"


@dataclasses.dataclass(frozen=True)
class Template:
  """A saved state that machines start from, as a folder: about.json, disk.qcow2, screen.npy and the memory, as a file that every clone
  maps and none writes (kind "memory", with state) or inside the disk (kind "snapshot")."""

  folder: pathlib.Path
  image: Image
  kind: str
  clock: float  # the guest's time when it was saved, seconds since 1970; nan: the guest has no server to ask

  @property
  def disk(self) -> pathlib.Path:
    return self.folder / "disk.qcow2"

  @property
  def memory(self) -> pathlib.Path:
    return self.folder / "memory"

  @property
  def state(self) -> pathlib.Path:
    return self.folder / "state"

  @functools.cached_property
  def screen(self) -> np.ndarray:
    """uint8 [H, W, 3]: what the screen showed when it was saved."""
    return np.load(self.folder / "screen.npy")

  def write(self, frame: np.ndarray) -> None:
    """The last part of a template; before it the folder is none."""
    np.save(self.folder / "screen.npy", frame)
    fresh = self.folder / "about.new"
    fresh.write_text(json.dumps({"kind": self.kind, "clock": self.clock}))
    os.replace(fresh, self.folder / "about.json")


def saved(folder: pathlib.Path, image: Image) -> Template | None:
  """The template in a folder; None where there is none. ValueError, one line, where there is less than a whole one."""
  if not (folder / "about.json").exists():
    return None
  told = _read(folder / "about.json", f"the saved state in {folder}", AGAIN)
  kind, clock = told.get("kind"), told.get("clock")
  if kind not in ("memory", "snapshot") or not isinstance(clock, float):
    raise ValueError(f"the saved state in {folder} is damaged: about.json has kind {kind!r:.40} and clock {clock!r:.40}: {AGAIN}")
  template = Template(folder, image, kind, clock)
  wanted = (template.disk, *((template.memory, template.state) if kind == "memory" else ()))
  if lacking := [path.name for path in wanted if not path.is_file()]:
    raise ValueError(f"the saved state in {folder} is damaged: it has no {', '.join(lacking)}: {AGAIN}")
  try:
    np.load(folder / "screen.npy", mmap_mode="r")
  except (OSError, ValueError, EOFError) as error:
    raise ValueError(f"the saved state in {folder} is damaged: screen.npy: {str(error)[:80]}: {AGAIN}") from None
  return template


def made_once(folder: pathlib.Path, image: Image, seconds: float, make: Callable[[pathlib.Path], object]) -> Template:
  """The template in `folder`. Where there is none, make(a new folder beside it) writes one, by one process while the others wait."""
  until = time.monotonic() + seconds
  while (template := saved(folder, image)) is None:
    with contextlib.suppress(BlockingIOError), _lock(folder) as lock:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      if saved(folder, image) is None:
        shutil.rmtree(folder, ignore_errors=True)  # without its about.json, its last part, it is none
        with _workshop(folder) as fresh:
          make(fresh)
          os.replace(fresh, folder)
      continue
    if time.monotonic() > until:
      raise BootDeadline(f"another process did not finish the template {folder} within {seconds:g} s")
    time.sleep(0.1)
  return template


def _lock(folder: pathlib.Path) -> IO[str]:
  """Beside the folder, not among the locks of envs.locks: processes with another TMPDIR share the folder too."""
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder.with_name(f".{folder.name}.lock").open("w")
  except OSError as error:
    raise ValueError(f"a saved state cannot be kept in {folder.parent} (env.cache): {error.strerror}") from None


@contextlib.contextmanager
def _workshop(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """A folder beside, for the holder of the lock alone; what a dead one left there goes first."""
  fresh = folder.with_name(folder.name + ".new")
  shutil.rmtree(fresh, ignore_errors=True)
  fresh.mkdir()
  try:
    yield fresh
  finally:
    shutil.rmtree(fresh, ignore_errors=True)


def available_mb() -> float:
  """Memory that this machine has left for new processes."""
  said = re.search(r"^MemAvailable:\s+(\d+) kB", pathlib.Path("/proc/meminfo").read_text(), re.MULTILINE)
  return int(said[1]) / 1024
