"""Virtual machines in numbers: how fast clones start, what they share, whether they start the same, whether input arrives.

  python -m benchmarks.desktop --image=debian                            all parts, one after the other
  python -m benchmarks.desktop --image=debian --parts=clone,steps        some; --clones=8 --resets=100 --keys=10000 --clicks=200

clone: starts of a clone of the ready state, one after the other, to the first screenshot and with all checks of a reset. alive: so many at
once, and the memory that each has to itself. resets: start screens and clocks. steps: an action and the look after it. keys, clicks: all
that is typed is read back, all double-clicks are counted by a window in the guest. Times are of the wall (median, largest).
"""

from __future__ import annotations

import argparse
import pathlib
import re
import statistics
import string
import sys
import time

import numpy as np

from envs import images, qemu
from envs.osworld import suite, taskfile, tasks
from envs.qemu import Machine, differing
from tools import check_desktop

PARTS = ("clone", "alive", "task", "resets", "steps", "keys", "clicks")
HOME = "/home/user"
COUNTER = f"""
import gi
gi.require_version("Gtk", "3.0")
from gi.repository import Gdk, Gtk
counts, last = [0, 0], None
def pressed(_, event):
  global last
  if (event.type, event.time) == last:  # GTK hands a press on an empty window over twice
    return
  last = (event.type, event.time)
  counts[event.type == Gdk.EventType._2BUTTON_PRESS] += 1
  open("{HOME}/clicks.txt", "w").write(f"{{counts[0]}} {{counts[1]}}")
window = Gtk.Window(title="counter")
window.add_events(Gdk.EventMask.BUTTON_PRESS_MASK)
window.connect("button-press-event", pressed)
window.fullscreen()
window.show_all()
Gtk.main()
"""


def median(seconds: list[float]) -> str:
  return f"median {statistics.median(seconds):.3f} s, largest {max(seconds):.3f} s, n = {len(seconds)}"


def memory_of(pid: int) -> dict[str, float]:
  """MB of a process: private, its share of what it shares (pss), resident."""
  said = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
  kb = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", said, re.MULTILINE)}
  return {"private": (kb["Private_Clean"] + kb["Private_Dirty"]) / 1024, "pss": kb["Pss"] / 1024, "resident": kb["Rss"] / 1024}


class Timed(Machine):
  """Knows when its first screenshot was there."""

  def _same_screen(self, *args):
    frame = super()._same_screen(*args)
    self.seen = time.monotonic()
    return frame


def clone(template, cfg, count: int) -> list[str]:
  seen, whole = [], []
  for _ in range(count):
    began = time.monotonic()
    with Timed(template, cfg) as machine:
      whole.append(time.monotonic() - began)
      seen.append(machine.seen - began)
  return [f"first screenshot, equal to the saved one: {median(seen)}", f"with the guest's clock asked: {median(whole)}"]


def alive(template, cfg, count: int) -> list[str]:
  machines: list[Machine] = []
  try:
    for _ in range(count):
      machines.append(Machine(template, cfg))
    same = sum(differing(machine.screenshot(), template.screen) == 0 for machine in machines)
    told = [memory_of(machine.pid) for machine in machines]
  finally:
    for machine in machines:
      machine.close()
  out = [f"{same} of {count} alive at once show the saved screen"]
  for name in ("private", "pss", "resident"):
    out.append(f"{name} memory of each: {statistics.mean(t[name] for t in told):.0f} MB (largest {max(t[name] for t in told):.0f})")
  return out


def task(template, cfg, count: int, family: str) -> list[str]:
  """The family's first held-out variant is prepared on a clone of the desktop's template, and saved."""
  cfg = check_desktop.knobs(cfg.image, family)
  own = suite.own_task(check_desktop.COMPUTER, cfg, family, tasks.seeds(family, 1, True)[0])
  file = taskfile.parse(own.params["file"], own.id, own.family)
  began = time.monotonic()
  start, _ = suite.starts(template, suite.hand(cfg), cfg)(file)
  told = [f"{family}'s start stands after {time.monotonic() - began:.0f} s"]
  Machine(start, cfg).close()
  return told + clone(start, cfg, 2 * count) + alive(start, cfg, count)


def resets(template, cfg, count: int) -> list[str]:
  equal, off, took = 0, [], []
  with Machine(template, cfg) as machine:
    for _ in range(count):
      began = time.monotonic()
      machine.revert()
      took.append(time.monotonic() - began)
      woken = time.monotonic()
      equal += differing(machine.screenshot(), template.screen) == 0
      off.append(machine.guest.clock() - template.clock - (time.monotonic() - woken))
  drift = statistics.mean(off[-count // 4 :]) - statistics.mean(off[: count // 4])
  return [
    f"{equal} of {count} start screens equal to the saved one in every pixel; a reset: {median(took)}",
    f"clock off by {min(off):.1f} to {max(off):.1f} s (told in whole seconds), last quarter against first {drift:+.2f} s",
  ]


def steps(template, cfg, count: int) -> list[str]:
  shots, acts = [], []
  with Machine(template, cfg) as machine:
    points = np.random.default_rng(0).integers(100, 600, (count, 2)).tolist()
    for point in points:
      began = time.monotonic()
      machine.screenshot()
      shots.append(time.monotonic() - began)
      began = time.monotonic()
      machine.click(tuple(point))
      machine.settle()
      acts.append(time.monotonic() - began)
  return [f"a screenshot: {median(shots)}", f"a click on the desktop and the screen at rest: {median(acts)}"]


def keys(template, cfg, count: int) -> list[str]:
  line = string.printable[:94]
  text = "\n".join([line] * (count // len(line) + 1))[:count]
  path = f"{HOME}/Documents/keys.txt"
  with Machine(template, cfg) as machine:
    machine.guest.upload(path, b"")
    machine.guest.open_file(path, 100.0)
    machine.settle(60.0)
    began = time.monotonic()
    machine.type(text)
    took = time.monotonic() - began
    machine.settle(120.0)
    machine.press(["ctrl", "s"])
    until = time.monotonic() + 120.0
    while not (got := machine.guest.file(path).decode().rstrip("\n")) and time.monotonic() < until:
      time.sleep(1.0)
  wrong = sum(a != b for a, b in zip(got, text)) + abs(len(got) - len(text))
  return [f"{len(text)} characters typed in {took:.0f} s, {len(got)} arrived, {wrong} not as typed"]


def clicks(template, cfg, count: int) -> list[str]:
  with Machine(template, cfg) as machine:
    machine.guest.upload(f"{HOME}/counter.py", COUNTER.encode())
    machine.guest.launch(["python3", f"{HOME}/counter.py"])
    while not machine.guest.activate_window("counter"):
      time.sleep(0.5)
    machine.settle(60.0)
    for point in np.random.default_rng(0).integers(50, 700, (count, 2)).tolist():
      machine.click(tuple(point), times=2)
      machine.settle()
      time.sleep(0.6)  # longer than a double-click takes: each stands alone
    single, double = map(int, (machine.guest.file(f"{HOME}/clicks.txt") or b"0 0").split())
  return [f"{double} of {count} double-clicks arrived as such ({single} presses of {2 * count})"]


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser("python -m benchmarks.desktop", description=__doc__.splitlines()[0])
  parser.add_argument("--image", default=images.DEBIAN, help="env.image")
  parser.add_argument("--parts", default=",".join(PARTS), help="some of them, with commas between")
  for name, count in (("clones", 8), ("resets", 100), ("steps", 20), ("keys", 10_000), ("clicks", 200)):
    parser.add_argument(f"--{name}", type=int, default=count)
  parser.add_argument("--family", default="writer_subscript", help="whose saved start the part task makes")
  asked = parser.parse_args(argv)
  cfg = qemu.defaults()
  cfg.update({"image": asked.image, "call_seconds": 30.0, "restore_seconds": 120.0, "guest_seconds": 60.0, "boot_seconds": 900.0})
  try:
    parts = asked.parts.split(",")
    if strange := [part for part in parts if part not in PARTS]:
      raise ValueError(f"--parts has {strange[0]!r}, wanted some of {', '.join(PARTS)}")
    qemu.check(cfg)
  except ValueError as error:
    print(f"benchmarks.desktop: {error}", file=sys.stderr)
    return 2
  template = qemu.ready(images.find(cfg.image, cfg.cache), cfg)
  Machine(template, cfg).close()  # the disk's files are in memory
  counts = {"clone": 2 * asked.clones, "alive": asked.clones, "task": asked.clones}
  more = {"task": {"family": asked.family}}
  for part in parts:
    for told in globals()[part](template, cfg, counts.get(part) or getattr(asked, part), **more.get(part, {})):
      print(f"{part:8s}{told}", flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
