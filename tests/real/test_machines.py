"""Real virtual machines (make system). The desktop comes from PRACTICE_DESKTOP, a folder of tools/build_desktop.py, or is built, from
packages that are kept, in the folder of env.cache; its ready state is saved once and every test clones it."""

import os
import pathlib
import shutil
import signal
import string
import time

import numpy as np
import pytest

from core.schema import Action
from envs import images, processes, qemu
from envs.errors import InfraError
from envs.guest import GuestHung
from envs.qemu import Machine, differing
from tools import build_desktop

pytestmark = pytest.mark.real
HOME, BUSY = "/home/user", 5.0  # the machine of the tests may have other work: deadlines are so many times longer


def knobs(**more):
  cfg = qemu.defaults()
  cfg.update({"image": os.environ.get("PRACTICE_DESKTOP", images.DEBIAN), "call_seconds": 30.0, "restore_seconds": 150.0})
  cfg.update({"boot_seconds": 1200.0, "guest_seconds": 75.0, "settle_most": 50.0, "settle_tolerance": 0.0} | more)
  return cfg


@pytest.fixture(scope="session")
def desktop():
  """The ready state of the desktop."""
  cfg = knobs()
  try:
    images.find(cfg.image, cfg.cache)
  except ValueError:
    build_desktop.main(["--boot_seconds=1200"])
  return qemu.ready(images.find(cfg.image, cfg.cache), cfg)


@pytest.fixture
def machine(desktop):
  with Machine(desktop, knobs()) as made:
    yield made


def act(machine, kind, **args):
  machine.act(Action(kind, args, {}, "desktop"))
  return machine.settle()[0]


def open_editor(machine, name="memo.txt", text=b""):
  path = f"{HOME}/Documents/{name}"
  machine.guest.upload(path, text)
  assert machine.guest.open_file(path, 100 * BUSY)
  machine.settle()
  return path


def test_every_character_and_many_keys_arrive(machine):
  path = open_editor(machine)
  line = string.printable[:95]
  text = "\n".join([line, line[::-1]] * 3)
  act(machine, "type", text=text, enter=False)
  act(machine, "hotkey", keys=["ctrl", "s"])
  assert machine.guest.file(path).decode().rstrip("\n") == text


def test_text_that_no_key_types_is_typed_by_the_guest(machine):
  path = open_editor(machine)
  act(machine, "type", text="caf\u00e9 \u4f60\u597d", enter=False)
  act(machine, "hotkey", keys=["ctrl", "s"])
  assert machine.guest.file(path).decode().strip() == "caf\u00e9 \u4f60\u597d"


def test_the_pointer_lands_on_the_pixel(machine):
  width, height = machine.size
  for x, y in [(0, 0), (1, 1), (width - 1, height - 1), (width // 2, height // 3), (511, 383), (777, 5), (3, 700)]:
    machine.move((x, y))
    assert machine.guest.cursor_position() == (x, y)


def test_an_icon_opens_by_a_double_click_every_time(machine):
  for _ in range(3):
    assert build_desktop.edit_a_file(machine)
    machine.revert()


def test_resets_start_from_the_same_screen_and_the_same_time(machine, desktop):
  clocks = []
  for index in range(8):
    frame = machine.screenshot()
    assert differing(frame, desktop.screen) == 0
    clocks.append(machine.guest.clock())
    machine.guest.upload(f"{HOME}/Desktop/left-{index}.txt", b"left over")
    act(machine, "click", point=(300, 300))
    machine.revert()
    assert machine.guest.file(f"{HOME}/Desktop/left-{index}.txt") is None
  assert max(clocks) - min(clocks) < 20 * BUSY and min(clocks) >= desktop.clock  # each starts at the saved time, none later than the last


def test_clones_share_the_saved_memory(desktop):
  machines = [Machine(desktop, knobs()) for _ in range(2)]
  try:
    for machine in machines:
      maps = pathlib.Path(f"/proc/{machine.pid}/smaps").read_text().split("VmFlags")
      memory = next(m for m in maps if str(desktop.memory) in m)
      size = {k: int(v.split()[0]) for k, v in (line.split(":", 1) for line in memory.splitlines() if "kB" in line)}
      assert size["Private_Dirty"] < 0.5 * size["Size"]
      assert size["Rss"] > size["Private_Dirty"]  # the rest of what it touched is the file's
    machines[0].guest.upload(f"{HOME}/Desktop/mine.txt", b"mine")
    assert machines[1].guest.file(f"{HOME}/Desktop/mine.txt") is None
  finally:
    for machine in machines:
      machine.close()


def test_a_template_has_its_application_open_and_its_clones_differ_from_it_in_nothing(desktop, tmp_path):
  cfg = knobs(cache=str(tmp_path))

  def prepare(machine):
    open_editor(machine, "letter.txt", b"Dear Sir\n")
    act(machine, "hotkey", keys=["ctrl", "s"])

  template = qemu.derive(desktop, "editor-1", prepare, cfg)
  assert qemu.derive(desktop, "editor-1", None, cfg).clock == template.clock  # made once
  with Machine(template, cfg) as machine:
    assert differing(machine.screenshot(), template.screen) == 0 and differing(template.screen, desktop.screen) > 0.05
    act(machine, "hotkey", keys=["ctrl", "end"])
    act(machine, "type", text="Yours", enter=False)
    act(machine, "hotkey", keys=["ctrl", "s"])
    assert machine.guest.file(f"{HOME}/Documents/letter.txt").strip() == b"Dear Sir\nYours"


def test_a_state_inside_the_disk_comes_back_too(desktop, tmp_path):
  """For images whose memory cannot be a file."""
  cfg = knobs(cache=str(tmp_path), state="snapshot", settle_tolerance=0.0)
  with Machine(desktop, cfg, workshop(tmp_path)) as machine:
    template = machine.save(300.0)
  with Machine(template, cfg) as machine:
    for _ in range(2):
      assert differing(machine.screenshot(), template.screen) == 0
      machine.guest.upload(f"{HOME}/Desktop/left.txt", b"left over")
      machine.revert()
      assert machine.guest.file(f"{HOME}/Desktop/left.txt") is None


def workshop(folder):
  made = folder / "workshop"
  made.mkdir()
  return made


def test_the_guest_reaches_nothing(machine):
  code = "import socket\nfor host, port in (('10.0.2.2', 22), ('8.8.8.8', 53), ('10.0.2.3', 53)):\n  s = socket.socket(); s.settimeout(3)\n"
  code += "  try:\n    s.connect((host, port)); print('reached', host)\n  except OSError: pass\n"
  ran = machine.guest.run_python(code)
  assert (ran.returncode, ran.output) == (0, ""), ran.error


def fill_the_disk(machine):
  machine.guest.launch("dd if=/dev/urandom of=/home/user/big bs=1M count=200; sync", shell=True)


def hang_the_server(machine):
  machine.guest.launch("pkill -STOP -f guest_server.py", shell=True)
  time.sleep(2.0)


@pytest.mark.parametrize(
  "break_it, error, more",
  [
    (lambda m: os.kill(m.pid, signal.SIGKILL), qemu.VmDied, {}),
    (lambda m: os.kill(m.pid, signal.SIGSTOP), qemu.VmHung, {}),
    (lambda m: m.vm.call("stop"), qemu.VmPaused, {}),
    (fill_the_disk, qemu.OverlayFull, {"overlay_mb": 64}),
    (hang_the_server, GuestHung, {}),
  ],
)
def test_what_breaks_is_an_infra_error_with_its_cause_and_the_machine_comes_back(desktop, break_it, error, more):
  with Machine(desktop, knobs(**more)) as machine:
    family, folder = processes.family(os.getpid()), machine.vm.nest.folder
    break_it(machine)
    machine.cfg.call_seconds = 5.0 if error is qemu.VmHung else 30.0
    with pytest.raises(error) as raised:
      for _ in range(60):  # a disk takes a while to fill
        act(machine, "click", point=(200, 200))
        machine.guest.platform(3.0)
        time.sleep(0.5)
    assert isinstance(raised.value, InfraError) and "\n" not in str(raised.value)
    machine.cfg.call_seconds = 30.0
    machine.revert()
    assert not folder.exists() and not [p for p, start in family if processes.alive(p, start)]
    assert machine.guest.file(f"{HOME}/big") is None and machine.guest.platform() == "Linux"
    pid = machine.pid
  assert not processes.alive(pid, None) and not folder.exists()


def test_a_shutdown_from_inside_is_no_fault(machine):
  machine.guest.launch("echo password | sudo -S busybox poweroff -f", shell=True)
  with pytest.raises(qemu.PoweredOff):
    for _ in range(60):
      machine.settle()
      time.sleep(0.5)
  machine.revert()
  assert machine.settle()[0].any()


def test_a_restore_of_a_torn_state_is_an_infra_error(desktop, tmp_path):
  torn = tmp_path / "torn"
  torn.mkdir()
  for name in ("about.json", "screen.npy", "disk.qcow2"):
    shutil.copy(desktop.folder / name, torn / name)
  (torn / "memory").symlink_to(desktop.memory)
  (torn / "state").write_bytes(desktop.state.read_bytes()[: desktop.state.stat().st_size // 2])
  before = processes.family(os.getpid())
  with pytest.raises(qemu.RestoreFailed):
    Machine(images.saved(torn, desktop.image), knobs())
  np.save(torn / "screen.npy", 255 - desktop.screen)
  (torn / "state").write_bytes(desktop.state.read_bytes())
  with pytest.raises(qemu.RestoreFailed, match="differs from the saved one in 1e.02%"):
    Machine(images.saved(torn, desktop.image), knobs(restore_seconds=20.0))
  assert processes.family(os.getpid()) == before


def test_no_such_image_and_no_disk_are_one_line_of_real_qemu(tmp_path):
  torn = tmp_path / "torn.qcow2"
  torn.write_bytes(b"QFI\xfb" + bytes(100))
  with pytest.raises(ValueError, match="cannot be read as qcow2: qemu-img info: .*"):
    qemu.check(knobs(image=str(torn)))
  with pytest.raises(ValueError, match="there is no such file or folder"):
    qemu.check(knobs(image=str(tmp_path / "none.qcow2")))


def test_disks_that_are_not_all_there_are_one_line_of_real_qemu(tmp_path, desktop):
  make = lambda form, name, *more: images.run(["qemu-img", "create", "-q", "-f", form, *more, str(tmp_path / name), "64M"])
  make("qcow2", "base.qcow2")
  make("vmdk", "whole.vmdk")
  make("qcow2", "over.qcow2", "-b", str(tmp_path / "base.qcow2"), "-F", "qcow2")
  make("qcow2", "beside.qcow2", "-o", f"data_file={tmp_path / 'beside.raw'}")
  secret = ["--object", "secret,id=s,data=abcdefgh", "-o", "encrypt.format=aes,encrypt.key-secret=s"]
  make("qcow2", "locked.qcow2", *secret)
  with desktop.image.disk.open("rb") as whole:
    (tmp_path / "cut.qcow2").write_bytes(whole.read(64 << 20))
  wrong = {"over": "not whole without .*base.qcow2", "beside": "not whole without .*beside.raw", "locked": "encrypted", "cut": "cut short"}
  for name, said in wrong.items():
    with pytest.raises(ValueError, match=said):
      images.find(str(tmp_path / f"{name}.qcow2"), "")
  assert images.find(str(tmp_path / "base.qcow2"), "").format == "qcow2" and images.find(str(tmp_path / "whole.vmdk"), "").format == "vmdk"


def test_the_guests_server_tells_what_is_there(machine):
  guest = machine.guest
  assert guest.platform() == "Linux" and guest.screen_size() == machine.size and guest.desktop_path() == f"{HOME}/Desktop"
  assert guest.list_directory(f"{HOME}/none") is None and guest.file(f"{HOME}/none") is None and not guest.open_file(f"{HOME}/none")
  assert {c["name"] for c in guest.list_directory(HOME)["children"]} >= {"Desktop", "Documents"}
  ran = guest.execute("echo out; echo err >&2; exit 3", shell=True)
  assert (ran.output, ran.error, ran.returncode) == ("out\n", "err\n", 3)
  assert guest.run_bash("echo $((6 * 7)) >&2").output == "42\n" and guest.run_python("print(6 * 7)").output == "42\n"
  guest.launch(["lxterminal"])
  build_desktop.wait_for(machine, "user@")
  act(machine, "type", text="echo $((6 * 7))", enter=True)
  assert "\n42" in guest.terminal(60.0)
  assert guest.window_size("lxterminal.Lxterminal")[0] > 200 and guest.window_size("none") is None
  assert "<terminal" in guest.accessibility(120.0)
  assert guest.close_window("user@") and not guest.close_window("no such window")
  seen = guest.screenshot()
  assert seen.shape == machine.screenshot().shape


def test_pyautogui_in_the_guest_does_what_it_is_told(machine):
  path = open_editor(machine)
  code = "import pyautogui as p\np.FAILSAFE = False\np.write('a<b> {c|d} \u00e9', interval=0.02)\np.press('enter')\np.hotkey('ctrl', 's')\n"
  code += "p.moveTo(123, 456)\nprint(p.position(), p.size())"
  ran = machine.guest.run_python(code, 60.0)
  assert ran.output == f"(123, 456) {machine.size}\n", ran.error
  machine.settle()
  assert machine.guest.file(path).decode() == "a<b> {c|d} \u00e9\n"


def test_a_screen_that_is_switched_off_comes_back_and_one_without_output_stays_black(machine):
  seen = machine.settle()[0]
  machine.guest.execute("DISPLAY=:0 xset dpms force off", True)
  time.sleep(1.0)
  assert not machine.screenshot().any() and differing(machine.settle()[0], seen) < 0.01
  machine.guest.execute("DISPLAY=:0 xrandr --output $(xrandr | awk '/ connected/{print $1}') --off", True)
  assert not machine.settle()[0].any()


def test_a_folder_that_nobody_may_read_is_said_in_its_place(machine):
  machine.guest.execute("mkdir -p ~/Documents/shut && chmod 000 ~/Documents/shut", True)
  below = {c.get("name", c.get("error", "")[:40]) for c in machine.guest.list_directory(f"{HOME}/Documents")["children"]}
  assert any("Permission denied" in name or "Errno 13" in name for name in below)
