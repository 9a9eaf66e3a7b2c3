"""Emulator processes, with a stand-in that speaks as the documented emulator does (the real one is not to be had here), and children."""

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from envs import adb, children, emulator, locks, processes
from envs.errors import BootDeadline

ROOT = pathlib.Path(emulator.__file__).parents[1]

# Prints, console and exits as told by the AVD's name. It writes the console's key into its home, as the emulator does.
STAND_IN = r"""#!{python}
import os, pathlib, socket, subprocess, sys, time
args = sys.argv[1:]
how = args[args.index("-avd") + 1]
print("emulator: stand-in " + " ".join(args), flush=True)
if how == "unknown":
  print("unknown option: -read-only", flush=True)
  sys.exit(1)
if how == "silent":
  time.sleep(3600)
if how == "family":
  print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid, flush=True)
console, _ = args[args.index("-ports") + 1].split(",")
pathlib.Path(os.environ["HOME"], ".emulator_console_auth_token").write_text("sesame")
listener = socket.create_server(("127.0.0.1", int(console)))
while True:
  talk, _ = listener.accept()
  with talk, talk.makefile("rw") as lines:
    lines.write("Android Console: Authentication required\nOK\n")
    lines.flush()
    known = False
    for line in lines:
      word = line.strip()
      if word.startswith("auth"):
        known = word == "auth sesame"
        lines.write("OK\n" if known else "KO: authentication token does not match\n")
      elif not known:
        lines.write("KO: unknown command, try 'help'\n")
      elif word == "avd snapshot load clean":
        lines.write("OK\n")
      elif word == "avd snapshot load hangup":
        break
      else:
        lines.write("KO: no such snapshot\n")
      lines.flush()
"""


@pytest.fixture
def program(tmp_path):
  path = tmp_path / "emulator"
  path.write_text(STAND_IN.replace("{python}", sys.executable))
  path.chmod(0o755)
  return str(path)


class Offline:
  """A device that is never there."""

  def attach(self, seconds):
    time.sleep(min(seconds, 0.05))
    raise adb.DeviceLost("offline")


def wait_for(condition, seconds=15.0):
  until = time.monotonic() + seconds
  while not condition() and time.monotonic() < until:
    time.sleep(0.02)
  return condition()


def left(*who):
  return [w for w in who if processes.alive(*w)]


def test_e16_an_emulator_that_exits_says_so_at_once(program):
  made = emulator.Emulator(program, "unknown")
  try:
    began = time.monotonic()
    with pytest.raises(emulator.EmulatorDied, match=r"exit code 1\) printed last: .*unknown option: -read-only"):
      made.boot(Offline(), 60)
    assert time.monotonic() - began < 10
  finally:
    made.close()


def test_e16_one_that_never_comes_up_ends_at_the_deadline_with_its_last_lines(program):
  made = emulator.Emulator(program, "silent", args=("-gpu", "off"))
  who = (made.child.pid, made.child.started)
  try:
    assert wait_for(lambda: made.child.tail())
    with pytest.raises(BootDeadline, match=r"not up within 0.5 s \(offline\).*stand-in -avd silent -read-only -no-window.*-gpu off"):
      made.boot(Offline(), 0.5)
  finally:
    made.close()
  assert left(who) == []


def test_its_flags_are_the_documented_ones(program):
  made = emulator.Emulator(program, "silent", snapshot="clean")
  try:
    assert wait_for(lambda: made.child.tail())
    said = made.child.tail()[0].split()
  finally:
    made.close()
  port = made.port
  assert said[2:] == [
    "-avd", "silent", "-read-only", "-no-window", "-no-audio", "-no-boot-anim", "-skip-adb-auth", "-snapshot", "clean",
    "-no-snapshot-save", "-ports", f"{port},{port + 1}", "-grpc", str(port + 2),
  ]  # fmt: skip
  assert made.serial == f"127.0.0.1:{port + 1}"


def test_e17_sixty_four_emulators_have_192_ports_of_their_own():
  taken = []
  try:
    for _ in range(64):
      taken.append(locks.take_ports())
    ports = {port + i for port, _ in taken for i in range(3)}
    assert len(ports) == 192 and all(locks.free(port) for port in ports)
  finally:
    for _, lock in taken:
      lock.close()
  first, lock = locks.take_ports()
  lock.close()
  assert first == min(ports)  # given back
  with socket.create_server(("127.0.0.1", first + 1)):  # somebody else's
    other, lock = locks.take_ports()
    lock.close()
    assert other == first + 4


def test_e17_a_lock_lasts_as_long_as_its_holder_and_no_longer():
  script = "from envs.locks import Lock; import time; Lock.keep = Lock('device-test'); print('held', flush=True); time.sleep(60)"
  holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
  try:
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(BlockingIOError):
      locks.Lock("device-test")
  finally:
    holder.kill()
    holder.wait()
    holder.stdout.close()
  locks.Lock("device-test").close()


def test_the_console_goes_back_to_the_saved_state(program):
  for snapshot in ("clean", "other", "hangup"):
    made = emulator.Emulator(program, "good", snapshot)
    try:
      assert wait_for(lambda made=made: not locks.free(made.port))
      if snapshot == "clean":
        made.restore()
      else:
        cause = {"other": emulator.EmulatorRefused, "hangup": emulator.EmulatorDied}[snapshot]
        with pytest.raises(cause, match="KO: no such|console closed"):
          made.restore()
      made.child.popen.kill()
      made.child.popen.wait()
      with pytest.raises(emulator.EmulatorDied, match="ended by signal 9"):
        made.restore()
    finally:
      made.close()


def test_e15_its_whole_family_ends_with_it_and_nothing_is_left(program):
  made = emulator.Emulator(program, "family")
  assert wait_for(lambda: len(made.child.tail()) == 2)
  own, other = (made.child.pid, made.child.started), int(made.child.tail()[1])
  who = [own, (other, processes.start_time(other))]
  folder = made.nest.folder
  assert oct(folder.stat().st_mode & 0o777) == "0o700"
  made.close()
  assert wait_for(lambda: not left(*who)) and not folder.exists()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="ties children to their parent")
def test_e15_linux_ends_a_child_with_its_owner():
  script = (
    "from envs.children import Nest; import sys, time, os; nest = Nest('tied'); "
    "child = nest.start([sys.executable, '-c', 'import time; time.sleep(3600)'], os.environ); print(child.pid, flush=True); time.sleep(60)"
  )
  owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
  pid = int(owner.stdout.readline())
  who = (pid, processes.start_time(pid))
  owner.kill()
  owner.wait()
  owner.stdout.close()
  assert wait_for(lambda: not left(who))
  children.sweep("tied")


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="ties children to their parent")
def test_e15_a_child_whose_owner_ended_before_it_could_ask_does_not_begin(tmp_path, monkeypatch):
  """Linux tells of an owner's end only who has asked by then: a process that another has inherited since must see it by itself."""
  assert subprocess.run(children.tied(["touch", str(tmp_path / "of ours")]), timeout=30).returncode == 0
  monkeypatch.setattr(os, "getpid", lambda: 1)  # as if we had inherited it
  assert subprocess.run(children.tied(["touch", str(tmp_path / "orphan")]), timeout=30).returncode == 1
  assert [p.name for p in tmp_path.iterdir()] == ["of ours"]


def test_e15_what_a_dead_owner_left_is_ended_by_the_next(tmp_path, monkeypatch):
  """Killed from outside, so that nothing of it could tidy up; another owner's process, alive, is left alone."""
  monkeypatch.setenv("TMPDIR", str(tmp_path))
  monkeypatch.setattr("tempfile.tempdir", None)
  script = (
    "from envs.children import Nest; import shutil, sys, time, os; nest = Nest('test'); shutil.which = lambda name: None; "
    "child = nest.start([sys.executable, '-c', 'import time; time.sleep(3600)'], os.environ); print(child.pid, flush=True); time.sleep(60)"
  )
  owners = []
  for _ in range(2):
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    pid = int(owner.stdout.readline())
    owners.append((owner, (pid, processes.start_time(pid))))
  try:
    dead, alive = owners
    dead[0].send_signal(signal.SIGKILL)
    dead[0].wait()
    assert left(dead[1]) and children.sweep("test") == [dead[1][0]]
    assert wait_for(lambda: not left(dead[1])) and left(alive[1])
    assert len(list(tmp_path.glob("practice-test-*"))) == 1
  finally:
    for owner, who in owners:
      owner.kill()
      owner.wait()
      owner.stdout.close()
      processes.send(*who, signal.SIGKILL)


def test_a_nest_goes_with_its_process(tmp_path):
  script = "from envs.children import Nest; nest = Nest('test'); print(nest.folder)"
  done = subprocess.run(
    [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT,
    env=os.environ | {"TMPDIR": str(tmp_path)},
  )  # fmt: skip
  assert done.returncode == 0 and done.stdout.startswith(str(tmp_path)) and list(tmp_path.iterdir()) == []


def test_a_program_that_is_not_there_is_named():
  with pytest.raises(ValueError, match="env.emulator is 'no-emulator'"):
    emulator.Emulator("no-emulator", "x")
