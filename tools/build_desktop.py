"""Builds a desktop for virtual machines from Debian packages: LibreOffice Writer and Calc, an editor, a file manager, a terminal.

  python -m tools.build_desktop                     as root on Debian, after `make system`; minutes; then --config.env.image=debian
  python -m tools.build_desktop --size=small        without LibreOffice
  python -m tools.build_desktop --packages=gimp     with more of Debian's packages
  python -m tools.build_desktop --list              what is built already

Packages come through mmdebstrap and apt, by name, from where this machine's own apt has its packages (or --mirror); they are kept in the
folder and only what is new is fetched. The same recipe with the same package versions gives the same files, named by their digest; what
stands in the folder already is not built again. The finished image is booted once, its ready state saved, and known-good episodes are
played on it. One that fails them is named in an error and stays where it is, to be looked at; env.image=debian never takes it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator

import numpy as np

from envs import images, processes, qemu
from envs.qemu import Machine

HERE = pathlib.Path(__file__).resolve().parent / "desktop"
EPOCH = 1767225600  # 2026-01-01: no file is newer
UUID = "70726163-7469-6365-8f6f-6c6465736b00"
SPARE_MB = 700  # room on the disk
APPEND = "console=ttyS0 quiet loglevel=3 mitigations=off nopti audit=0 no_timer_check net.ifnames=0"
SCREEN, MEMORY_MB = (1024, 768), 768

SYSTEM = "linux-image-amd64 busybox-static udev kmod dbus dbus-x11 procps iproute2 sudo python3 python3-xlib python3-pil python3-gi"
SYSTEM += " gir1.2-atspi-2.0 gir1.2-gtk-3.0 at-spi2-core wmctrl xdotool xclip xdg-utils"
SCREENS = "xserver-xorg-core xserver-xorg-input-libinput xauth xinit x11-xserver-utils x11-xkb-utils x11-utils xkb-data fonts-dejavu-core"
SCREENS += " fonts-liberation2 hicolor-icon-theme adwaita-icon-theme librsvg2-common shared-mime-info desktop-file-utils"
SCREENS += " gtk2-engines-pixbuf lxmenu-data libglib2.0-bin dconf-gsettings-backend gsettings-desktop-schemas"
PROGRAMS = "openbox tint2 pcmanfm mousepad lxterminal galculator lxappearance"
OFFICE = "libreoffice-writer libreoffice-calc libreoffice-gtk3"
SIZES = {"small": [*SYSTEM.split(), *SCREENS.split(), *PROGRAMS.split()]}
SIZES["desktop"] = SIZES["small"] + OFFICE.split()
NEEDED = ("mmdebstrap", "mke2fs", "qemu-img", "cpio", "depmod", "modprobe", "chroot")
INSTALL_SECONDS = 5400.0  # of all packages together, and of another build that is waited for
UNPACKED = ("doc", "man", "locale", "info", "help")  # below /usr/share, not installed

MEMO = "Friday: <b> & {x|y} 'a' \"b\" #1 ~50% \\ http://example.org/?q=a_b;c"


class Progress:
  """Lines with the seconds since the start."""

  def __init__(self):
    self.began = time.monotonic()

  def say(self, text: str) -> None:
    print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)


def recipe(packages: list[str], suite: str, mirror: str) -> str:
  """Names what an image is made by: the packages asked for, the release, --mirror if one was given, the constants above, and our files."""
  out = hashlib.sha256(json.dumps([sorted(packages), suite, mirror, EPOCH, APPEND, SPARE_MB, UUID]).encode())
  for path in sorted(p for p in HERE.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
    out.update(os.fspath(path.relative_to(HERE)).encode() + b"\0" + path.read_bytes())
  return out.hexdigest()[:16]


def sources(suite: str) -> list[str]:
  """The lines of apt's sources that give this machine packages of Debian's release; none where it is another system, whose apt knows no
  such release: mmdebstrap then takes what it has by default."""
  form = "$(ORIGIN)\t$(REPO_URI)\t$(RELEASE)\t$(COMPONENT)\t$(SIGNED_BY)"
  argv = ["apt-get", "indextargets", "--format", form, "Created-By: Packages"]
  told = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
  out = []
  for line in told.stdout.splitlines() if told.returncode == 0 else []:
    origin, uri, release, component, key = line.split("\t")
    if origin == "Debian" and release in (suite, f"{suite}-updates", f"{suite}-security"):
      signed = f" signed-by={key}" if key.startswith("/") else ""
      out.append(f"deb [arch=amd64{signed}] {uri} {release} {component}")
  return list(dict.fromkeys(out)) if any(f" {suite} " in line for line in out) else []


def fetching() -> list[str]:
  """How this machine's apt fetches (proxies, certificates, retries, the age of lists that it takes), as options of apt."""
  argv = ["apt-config", "dump", "--no-empty", "--format", '%f "%v";%n', "Acquire"]
  told = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
  wanted = ("http::", "https::", "Retries", "Check-Valid-Until", "Check-Date")
  return [line for line in told.stdout.splitlines() if line.removeprefix("Acquire::").startswith(wanted)] if told.returncode == 0 else []


def install(root: pathlib.Path, packages: list[str], args, cache: pathlib.Path, progress: Progress) -> None:
  """The packages and all they need, unpacked and configured in `root`."""
  (cache / "partial").mkdir(parents=True, exist_ok=True)
  argv = ["mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory", f"--include={','.join(packages)}"]
  argv += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in UNPACKED] + ["--dpkgopt=force-unsafe-io"]
  argv += ["--skip=essential/unlink,download/empty,cleanup/apt", '--setup-hook=mkdir -p "$1"/var/cache/apt/archives/']
  argv += [f"--setup-hook=sync-in {cache} /var/cache/apt/archives/", f"--customize-hook=sync-out /var/cache/apt/archives {cache}"]
  argv += [f"--aptopt={line}" for line in fetching()]
  argv += [args.suite, os.fspath(root), *([args.mirror] if args.mirror else sources(args.suite))]
  log = root.parent / "mmdebstrap.log"
  # INITRD: the kernel's package makes none, finish.sh does. HOME: a package's script writes it down, and the builder's would differ
  with log.open("w") as out:
    started = subprocess.Popen(
      argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
      env=os.environ | {"SOURCE_DATE_EPOCH": str(EPOCH), "LC_ALL": "C", "INITRD": "No", "HOME": "/root"},
    )  # fmt: skip
    late = threading.Event()
    timer = threading.Timer(INSTALL_SECONDS, lambda: (late.set(), processes.send_group(started.pid, None, signal.SIGTERM)))
    timer.start()
    try:
      for line in started.stdout:
        out.write(line)
        if line.startswith("I: ") and line.rstrip().endswith(("...", "chroot")):
          progress.say(line[3:].strip())
      code = started.wait(60.0)
    except BaseException:
      processes.send_group(started.pid, None, signal.SIGTERM)  # it takes down what it mounted, and goes
      started.wait(60.0)
      raise
    finally:
      timer.cancel()
  last = " | ".join(log.read_text(errors="replace").splitlines()[-8:])[-1500:]
  if late.is_set():
    raise ValueError(f"mmdebstrap did not end within {INSTALL_SECONDS:g} s; it printed last: {last}")
  if code:
    raise ValueError(f"mmdebstrap ended with code {code}: {last}")


def versions(root: pathlib.Path) -> dict[str, str]:
  """Package -> version of all that is installed."""
  said = (root / "var/lib/dpkg/status").read_text()
  return dict(sorted(re.findall(r"^Package: (\S+)\nStatus: install ok installed\n(?:.*\n)*?Version: (\S+)$", said, re.MULTILINE)))


def digest(root: pathlib.Path) -> str:
  """Of every path below root: name, kind, owner, mode, time and content."""
  out = hashlib.sha256()
  for path in sorted(root.rglob("*")):
    at = path.lstat()
    out.update(json.dumps([os.fspath(path.relative_to(root)), at.st_mode, at.st_uid, at.st_gid, int(at.st_mtime)]).encode())
    if stat.S_ISLNK(at.st_mode):
      out.update(os.readlink(path).encode())
    elif stat.S_ISREG(at.st_mode):
      with path.open("rb") as file:
        out.update(hashlib.file_digest(file, "sha256").digest())
  return out.hexdigest()


def make_disk(root: pathlib.Path, out: pathlib.Path) -> None:
  """disk.qcow2: an ext4 file system of root's files, without a loop device or a mount."""
  megabytes = int(subprocess.run(["du", "-s", "-m", root], capture_output=True, text=True, check=True).stdout.split()[0])
  raw = out / "disk.raw"
  features = ["-t", "ext4", "-O", "^has_journal,^metadata_csum", "-m", "0", "-U", UUID, "-E", f"lazy_itable_init=1,hash_seed={UUID}"]
  images.run(["mke2fs", "-q", *features, "-d", os.fspath(root), os.fspath(raw), f"{megabytes + SPARE_MB}M"], 1800)
  images.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", os.fspath(raw), os.fspath(out / "disk.qcow2")], 1800)
  raw.unlink()


def build(args, packages: list[str], folder: pathlib.Path, progress: Progress) -> None:
  """Makes the image's folder, whole or not at all."""
  fresh = folder.with_name(folder.name + ".new")
  shutil.rmtree(fresh, ignore_errors=True)
  (fresh / "out").mkdir(parents=True)
  root, out = fresh / "root", fresh / "out"
  source = args.mirror or "the sources of this machine's apt"
  progress.say(f"installing {len(packages)} packages of {args.suite} and what they need, from {source}")
  install(root, packages, args, pathlib.Path(args.folder).expanduser() / "packages", progress)
  progress.say("our files, fonts, kernel and first memory disk")
  images.run(["sh", os.fspath(HERE / "finish.sh"), os.fspath(root), os.fspath(HERE), os.fspath(out), str(EPOCH)], 1800)
  about = {"size": args.size, "suite": args.suite, "append": APPEND, "memory_mb": MEMORY_MB, "screen": SCREEN, "asked": packages}
  about |= {"digest": digest(root), "packages": versions(root)}
  progress.say(f"{len(about['packages'])} packages, tree {about['digest'][:16]}; writing the disk")
  make_disk(root, out)
  shutil.rmtree(root)
  for path in out.iterdir():
    path.chmod(0o444)
  write_about(out, about)
  shutil.rmtree(folder, ignore_errors=True)
  os.replace(out, folder)
  shutil.rmtree(fresh)
  progress.say(f"{folder}: disk {(folder / 'disk.qcow2').stat().st_size / 1e6:.0f} MB")


def write_about(folder: pathlib.Path, about: dict) -> None:
  (folder / "about.new").write_text(json.dumps(about, indent=1))
  os.replace(folder / "about.new", folder / images.ABOUT)


@contextlib.contextmanager
def locked(path: pathlib.Path, progress: Progress) -> Iterator[None]:
  """One build at a time in a folder; another is waited for, which is said."""
  until, told = time.monotonic() + INSTALL_SECONDS, False
  with path.open("w") as lock:
    while True:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        if time.monotonic() > until:
          raise ValueError(f"another build has held {path} for {INSTALL_SECONDS:g} s") from None
        if not told:
          progress.say(f"waiting for another build, which holds {path}")
        told = True
        time.sleep(1.0)
    yield


def edit_a_file(machine: Machine) -> bool:
  """Known-good: a double-click on an icon, all of it replaced by typing, saved."""
  path, before, icon = "/home/user/Desktop/memo.txt", rest(machine), np.empty((0, 2), int)
  machine.guest.upload(path, b"Monday\n")

  def shown() -> bool:  # what is new on the screen
    nonlocal icon
    icon = np.argwhere((rest(machine) != before).any(-1))
    return len(icon) > 0

  if not comes(machine, shown):
    return False
  top, left = icon.min(0)
  machine.click((int((left + icon[:, 1].max()) // 2), int(top) + 16), times=2)
  wait_for(machine, "memo.txt")
  machine.press(["ctrl", "a"])
  machine.type(MEMO)
  machine.press(["ctrl", "s"])
  return comes(machine, lambda: machine.guest.file(path) == MEMO.encode())


def write_a_letter(machine: Machine) -> bool:
  """Known-good: Writer is started, a line typed and saved as a document."""
  path = "/home/user/Documents/letter.odt"
  machine.guest.launch(["libreoffice", "--norestore", "--writer"])
  wait_for(machine, "Writer")
  machine.type("H2O")
  machine.press(["ctrl", "s"])
  wait_for(machine, "Save")
  machine.press(["ctrl", "a"])
  machine.type(f"{path}\n")
  wait_for(machine, "letter.odt")
  letter = machine.guest.file(path)
  return letter is not None and b"H2O" in zipfile.ZipFile(io.BytesIO(letter)).read("content.xml")


def comes(machine: Machine, true: Callable[[], bool]) -> bool:
  """Whether it comes true before a boot would have to: a busy host makes all of it slow."""
  until = time.monotonic() + machine.cfg.boot_seconds
  while not (found := true()) and time.monotonic() < until:
    time.sleep(1.0)
  return found


def rest(machine: Machine) -> np.ndarray:
  """The screen once it is at rest, which on a busy machine can take as long as a boot."""
  return machine.settle(machine.cfg.boot_seconds)[0]


def wait_for(machine: Machine, title: str) -> None:
  """Until a window of that title is in front and the screen is at rest."""
  if not comes(machine, lambda: machine.guest.activate_window(title)):
    raise ValueError(f"no window {title!r} within {machine.cfg.boot_seconds:g} s")
  rest(machine)


def verify(folder: pathlib.Path, cfg, size: str, progress: Progress) -> list[str]:
  """Boots the image once, saves its ready state, and plays the episodes whose outcome is known: their names. ValueError if one is wrong."""
  image = images.find(os.fspath(folder), cfg.cache)
  progress.say("booting it, to save its ready state")
  template = qemu.ready(image, cfg)
  episodes = [edit_a_file, *([write_a_letter] if size == "desktop" else [])]
  with Machine(template, cfg) as machine:
    for episode in episodes:
      if (fresh := machine.guest.file("/home/user/Desktop/memo.txt")) is not None:
        raise ValueError(f"a fresh clone has what an episode left: {fresh[:60]!r}")
      if not episode(machine):
        raise ValueError(f"the known-good episode {episode.__name__} failed on {folder}: the image is not to be used")
      progress.say(f"known-good episode {episode.__name__}: passed")
      machine.revert()
  return [episode.__name__ for episode in episodes]


def check(args) -> None:
  """What the build needs; one line says what is missing."""
  if missing := [name for name in NEEDED if shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is None]:
    raise ValueError(f"there is no {', '.join(missing)}: `make system` (as root, Debian) installs what the build needs")
  if os.geteuid() != 0:
    raise ValueError("the build wants root, for the owners of the image's files: run it as root or in a container; using it does not")
  if strange := [name for name in args.packages if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", name)]:
    raise ValueError(f"--packages names {strange[0]!r}, wanted names of Debian packages with commas between")


def main(argv: list[str] | None = None) -> None:
  known = qemu.defaults()
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--folder", default=known.cache, help="where images, packages and saved states are kept (env.cache)")
  parser.add_argument("--size", choices=sorted(SIZES), default="desktop", help="small: without LibreOffice")
  parser.add_argument("--packages", default=[], type=lambda text: text.split(","), help="more packages, by name, with commas between")
  parser.add_argument("--suite", default="bookworm", help="Debian's release")
  parser.add_argument("--mirror", default="", help="where packages come from; default: as this machine's apt has it")
  parser.add_argument("--accel", choices=("auto", "kvm", "tcg"), default="auto")
  parser.add_argument("--boot_seconds", type=float, default=known.boot_seconds, help="of the first boot, which a busy machine makes long")
  parser.add_argument("--fresh", action="store_true", help="build again what is there")
  parser.add_argument("--list", action="store_true", help="what is built already")
  args = parser.parse_args(argv)
  folder = pathlib.Path(args.folder).expanduser().resolve()
  if args.list:
    for about in sorted(folder.glob(f"images/*/{images.ABOUT}")):
      told = json.loads(about.read_text())
      state = "verified" if told.get("passed") else "not verified"
      print(f"{about.parent} {told['size']} {len(told['packages'])} packages, tree {told['digest'][:16]}, {state}")
    return
  check(args)
  os.environ["PATH"] += ":/usr/sbin:/sbin"
  progress, packages = Progress(), SIZES[args.size] + args.packages
  place = folder / "images" / f"{args.size}-{recipe(packages, args.suite, args.mirror)}"
  place.parent.mkdir(parents=True, exist_ok=True)
  with locked(place.parent / ".lock", progress):
    if args.fresh or not (place / images.ABOUT).is_file():
      build(args, packages, place, progress)
    else:
      progress.say(f"{place} is built already (--fresh builds it again)")
    cfg = known
    cfg.update({"image": os.fspath(place), "cache": os.fspath(folder), "accel": args.accel, "boot_seconds": args.boot_seconds})
    qemu.check(cfg)
    passed = verify(place, cfg, args.size, progress)
    write_about(place, json.loads((place / images.ABOUT).read_text()) | {"passed": passed})  # the last one that did is "debian"
  progress.say(f"ready: --config.env.image={place}, or --config.env.image={images.DEBIAN} for the last one made")


if __name__ == "__main__":
  try:
    main()
  except ValueError as error:
    sys.exit(f"build_desktop: {error}")
