"""Virtual machines without QEMU: keys, images, saved states, and every fault, with a program of the test in QEMU's place."""

import json
import os
import signal
import string
import time
import types

import numpy as np
import pytest

from core.schema import Action
from envs import accel, images, processes, qcodes, qemu
from envs import vm as vm_lib
from envs.errors import BlackFrame, BootDeadline, Deadline, InfraError, NoComputer
from envs.images import Template
from envs.qemu import Machine
from envs.vm_input import Input
from tests.envs import qemu_double
from tests.envs.test_disk_images import raw_disk

# A US keyboard by hand: what each key types, plain and with Shift.
KEYBOARD = {f"{c}": (c, c.upper()) for c in string.ascii_lowercase}
KEYBOARD |= dict(zip("1234567890", zip("1234567890", "!@#$%^&*()")))
KEYBOARD |= {
  "minus": "-_", "equal": "=+", "bracket_left": "[{", "bracket_right": "]}", "backslash": "\\|", "semicolon": ";:", "apostrophe": "'\"",
  "grave_accent": "`~", "comma": ",<", "dot": ".>", "slash": "/?", "spc": "  ", "ret": "\n\n", "tab": "\t\t",
}  # fmt: skip


def typed(events):
  """What a person would read, and which keys are still down."""
  out, held = "", []
  for event in events:
    code = event["data"]["key"]["data"]
    if not event["data"]["down"]:
      held.remove(code)
      continue
    held.append(code)
    if code in KEYBOARD:
      out += KEYBOARD[code]["shift" in held]
  return out, held


@pytest.mark.parametrize("text", [string.printable[:95], "Hello_World (a>b) & {x|y}\n", "https://example.org/?a=B;c~d", "tab\there\n"])
def test_text_arrives_character_by_character_with_its_shift(text):
  assert typed([event for char in text for event in qcodes.stroke(char)]) == (text, [])


def test_what_no_key_types_is_told_apart():
  assert qcodes.typable(string.printable[:95] + "\n\t") and not qcodes.typable("caf\u00e9") and not qcodes.typable("a\x07")
  for name in ("\u00e9", "nokey", "AB"):
    with pytest.raises(KeyError):
      qcodes.qcode_of(name)


def test_chords_go_down_in_order_and_up_in_reverse():
  told = [(e["data"]["key"]["data"], e["data"]["down"]) for e in qcodes.chord(["ctrl", "+"])]
  assert told == [("ctrl", True), ("shift", True), ("equal", True), ("equal", False), ("shift", False), ("ctrl", False)]
  assert [e["data"]["key"]["data"] for e in qcodes.chord(["shift", "+"])] == ["shift", "equal", "equal", "shift"]  # Shift once


@pytest.mark.parametrize("length", [64, 768, 1000, 1024, 1080, 1920])
def test_every_pixel_is_aimed_at_its_middle(length):
  for at in range(length):  # the whole axis, 0 to 32767, lies over the whole screen
    value = qcodes.move((at, 0), (length, length))[0]["data"]["value"]
    assert 0 <= value <= 32767 and value * length // 32768 == at


def test_arrow_keys_are_no_mouse_buttons_and_nothing_stays_down():
  """keyDown('left') of pyautogui pressed the mouse's left button."""
  hands, sent = Input(), []
  hands.send = sent.extend
  hands.hold_key("left", True)
  hands.hold_key("a", True)
  hands.hold_key("b", True)
  hands.hold_key("b", False)
  hands.hold("right", True)
  told = [(e["type"], e["data"]["button"] if e["type"] == "btn" else e["data"]["key"]["data"], e["data"]["down"]) for e in sent]
  assert told == [("key", "left", True), ("key", "a", True), ("key", "b", True), ("key", "b", False), ("btn", "right", True)]
  sent.clear()
  hands.release()
  up = {e["data"]["button"] if e["type"] == "btn" else e["data"]["key"]["data"] for e in sent if not e["data"]["down"]}
  assert {"left", "a", "right", "middle", "shift", "ctrl", "alt", "meta_l"} <= up and "b" not in up
  assert [e["data"]["key"]["data"] for e in sent if e["type"] == "key"][:2] == ["a", "left"]


# -- acceleration


def program(path, body):
  path.write_text(f"#!/bin/sh\n{body}\n")
  path.chmod(0o755)
  return str(path)


def test_acceleration_is_asked_of_a_guest(tmp_path, capsys):
  good = program(tmp_path / "good", "exit 33")
  hangs = program(tmp_path / "hangs", "exec sleep 60")
  fails = program(tmp_path / "fails", "echo no such msr >&2; exit 1")
  device = str(tmp_path / "kvm")
  assert accel.chosen(good, "auto", str(tmp_path / "none")) == "tcg" and "there is none" in capsys.readouterr().err
  (tmp_path / "kvm").touch()
  assert accel.chosen(good, "auto", device) == "kvm" and capsys.readouterr().err == ""
  assert accel.ran(hangs, "kvm", 0.3) == "a guest of one instruction did not end within 0.3 s"
  assert accel.chosen(fails, "auto", device) == "tcg"
  said = capsys.readouterr().err
  assert "NO KVM" in said and "EMULATED" in said and "no such msr" in said
  with pytest.raises(ValueError, match="env.accel is kvm.*no such msr"):
    accel.chosen(fails, "kvm", device)


def test_kvm_on_which_guests_crawl_is_not_taken(tmp_path, monkeypatch, capsys):
  """Seen: a guest of one instruction ends in 0.1 s emulated and in 4.7 s on KVM, where a kernel then prints nothing in 25 s."""
  monkeypatch.setattr(accel, "SLACK_SECONDS", 0.3)
  monkeypatch.setattr(accel, "SLACK", 0.0)
  crawls = program(tmp_path / "crawls", 'case "$*" in *"-accel kvm"*) sleep 2;; esac; exit 33')
  assert accel.ran(crawls, "kvm") == ""  # it ends, in time for a patient asker
  (tmp_path / "kvm").touch()
  assert accel.chosen(crawls, "auto", str(tmp_path / "kvm")) == "tcg"
  assert "did not end within 0.3 s" in capsys.readouterr().err


# -- machines, with the test's program in QEMU's place


@pytest.fixture
def vm(tmp_path, monkeypatch):
  """vm(**told) -> a machine restored from a saved state; vm.told(**) changes what its QEMU does from now on."""
  bin = tmp_path / "bin"
  bin.mkdir()
  path = qemu_double.install(bin)
  monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
  cfg = qemu.defaults()
  cfg.update({"accel": "tcg", "call_seconds": 10.0, "restore_seconds": 20.0, "settle_most": 2.0, "settle_window": 0.02, "reserve_mb": 0})
  cfg.update({"memory_mb": 128, "image": str(raw_disk(tmp_path / "disk.img")), "wait_seconds": 0.01})
  image = images.find(cfg.image, "")
  folder = tmp_path / "template"
  folder.mkdir()
  for part in ("disk.qcow2", "memory", "state"):
    (folder / part).touch()
  screen = np.full((48, 64, 3), 90, np.uint8)
  screen[0, 0] = (0, 255, 0)  # where the stand-in's pointer is at first
  template = Template(folder, image, "memory", qemu_double.CLOCK)
  template.write(screen)
  made = []

  def make(**told):
    make.told(**told)
    made.append(Machine(template, cfg))
    return made[-1]

  make.told = lambda **told: (path.with_name("new.json").write_text(json.dumps(told)), os.replace(path.with_name("new.json"), path))
  make.asked, make.cfg, make.template, make.image = path.parent / "asked.txt", cfg, template, image
  yield make
  for machine in made:
    machine.close()


def test_a_paused_restore_is_told_to_run_and_one_that_does_not_is_an_infra_error(vm):
  vm()
  asked = vm.asked.read_text().split()
  assert asked.index("migrate-set-capabilities") < asked.index("migrate-incoming") < asked.index("cont")
  with pytest.raises(qemu.RestoreFailed, match="'paused' after its state was loaded and it was told to run"):
    vm(status=["inmigrate", "paused", "paused"])
  with pytest.raises(qemu.RestoreFailed, match="'internal-error' after its state was loaded, wanted 'paused'"):
    vm(status=["inmigrate", "internal-error"])
  vm.cfg.restore_seconds = 3.0
  with pytest.raises(qemu.RestoreFailed, match="not loaded within 3 s"):
    vm(status=["inmigrate"])


@pytest.mark.parametrize(
  "told, error, said",
  [
    ({"color": 91}, qemu.RestoreFailed, "the start screen differs from the saved one in 1e\\+02%"),
    ({"drift": 60.0}, qemu.RestoreFailed, "the guest's clock is 60.0 s past the saved time"),
    ({"drift": -3.0}, qemu.RestoreFailed, "the guest's clock is -3.0 s past"),
    ({"die": "migrate-incoming"}, qemu.RestoreFailed, "refused: QEMU .* ended in migrate-incoming: exit code 7"),
    ({"refuse": "migrate-incoming"}, qemu.VmFault, "migrate-incoming: refused for the test"),
    ({"early": "qemu: could not load the firmware"}, qemu.VmDied, "exit code 1; it printed last: qemu: could not load the firmware"),
    ({"hang": ["qmp_capabilities"]}, qemu.VmHung, "did not answer its greeting within 3 s"),
  ],
)
def test_a_restore_that_goes_wrong_says_how_and_leaves_no_process(vm, told, error, said):
  if "hang" in told:  # the others end by themselves, on a busy machine later
    vm.cfg.restore_seconds = 3.0
  if "color" in told:  # looked at until the time is over
    vm.cfg.restore_seconds = 8.0
  before = processes.family(os.getpid())
  with pytest.raises(error, match=said) as raised:
    vm(**told)
  assert isinstance(raised.value, InfraError) and "\n" not in str(raised.value)
  assert processes.family(os.getpid()) == before


CLICK = Action("click", {"point": (10, 12)}, {}, "desktop")


@pytest.mark.parametrize(
  "break_it, error, said",
  [
    (lambda vm, m: os.kill(m.pid, signal.SIGKILL), qemu.VmDied, "ended by signal 9"),
    (lambda vm, m: os.kill(m.pid, signal.SIGSTOP), qemu.VmHung, "did not answer query-status within 1 s"),
    (lambda vm, m: vm.told(die="input-send-event"), qemu.VmDied, "ended in input-send-event: exit code 7"),
    (lambda vm, m: vm.told(hang=["screendump"]), qemu.VmHung, "did not answer screendump"),
    (lambda vm, m: vm.told(status=["io-error"]), qemu.OverlayFull, r"may take 4096 MB \(env.overlay_mb\), the host's disk has \d+ MB left"),
    (lambda vm, m: vm.told(status=["paused"]), qemu.VmPaused, "'paused', wanted 'running'"),
    (lambda vm, m: vm.told(reset=True), qemu.VmRestarted, "reboot from inside"),  # it runs, but what stands there is another state
    (lambda vm, m: vm.told(status=["guest-panicked"]), qemu.VmPanicked, "it printed last: starting . kernel panic"),
    (lambda vm, m: vm.told(color=0, mute=True), BlackFrame, "every pixel of the machine's screen is black, and its server is no better"),
    (lambda vm, m: vm.told(status=["shutdown"]), qemu.PoweredOff, "shut down"),
  ],
)
def test_a_machine_that_breaks_in_a_step_says_how_and_comes_back(vm, break_it, error, said):
  machine = vm()
  before = processes.family(os.getpid())
  break_it(vm, machine)
  vm.cfg.call_seconds = 1.0 if error is qemu.VmHung else 10.0
  with pytest.raises(error, match=said) as raised:
    machine.act(CLICK)
    machine.settle()
  assert isinstance(raised.value, InfraError) == (error is not qemu.PoweredOff)  # a policy can shut a guest down
  assert isinstance(raised.value, Deadline) == (error is qemu.VmHung)
  vm.told()
  vm.cfg.call_seconds = 10.0
  machine.revert()
  assert not [p for p, start in before if processes.alive(p, start)]
  machine.act(CLICK)
  assert machine.settle()[0][12, 10].tolist() == [0, 255, 0]


def test_a_screen_that_an_agent_switched_off_is_no_fault(vm):
  """xset dpms force off: a moved pointer switches it on. xrandr --off: it stays black, whatever is done, and the guest is well."""
  machine = vm()
  machine.act(CLICK)
  vm.told(asleep=True)
  frame, rested = machine.settle()
  assert rested and frame[0, 0].tolist() == [90, 90, 90] and frame[12, 10].tolist() == [0, 255, 0]  # and the pointer is where it was
  vm.told(color=0)
  for _ in range(qemu.STILL + 2):  # so often nothing has changed
    machine.act(CLICK)
    frame, rested = machine.settle()
    assert rested and not frame.any()
  vm.told()
  assert machine.settle()[0].any()


def test_a_black_screen_is_no_start(vm, tmp_path):
  machine = vm()
  machine.workshop = tmp_path
  vm.told(color=0)
  with pytest.raises(BlackFrame, match="no episode may begin there"):
    machine.save()


def test_a_folder_for_temporary_files_may_have_a_long_path(vm, tmp_path, monkeypatch):
  """A socket's path has 107 bytes: a cluster's TMPDIR of a hundred ended with "AF_UNIX path too long"."""
  place = tmp_path / ("a" * 100)
  place.mkdir()
  monkeypatch.setattr("tempfile.tempdir", str(place))
  vm().act(CLICK)


def test_each_half_of_a_click_is_a_frame_of_its_own(vm):
  """What one input-send-event says ends in one SYN, and a press and a release before the same SYN are no click to libinput."""
  machine = vm()
  count = vm.asked.read_text().count("input-send-event")
  machine.act(Action("left_double", {"point": (10, 12)}, {}, "desktop"))
  assert vm.asked.read_text().count("input-send-event") - count == 1 + 4  # the movement; down, up, down, up


def test_an_action_that_takes_too_long_is_cut_short_with_nothing_left_down(vm):
  """A keyboard takes two dozen events at once, and no text of 32,000 characters may outlast the deadline of a step."""
  machine = vm()
  count = lambda: vm.asked.read_text().count("input-send-event")
  sent = count()
  machine.until = 0.0
  for late in (lambda: machine.click((5, 5), times=10), lambda: machine.type("a" * 32_000), lambda: machine.scroll((5, 5), "up", 1000)):
    with pytest.raises(qemu.CutShort, match="took too long"):
      late()
  assert count() - sent == 2  # the two movements; no button and no key
  machine.until = time.monotonic() + 600.0
  machine.click((5, 5), times=2)
  machine.type("ab")
  assert count() - sent == 2 + 1 + 4 + 1


@pytest.mark.parametrize(
  "ran, waited, asleep, rests",
  [
    (5, 1, True, True), (60, 10, True, False),  # a host with time: 5 and 60 of 250 ms
    (4, 200, True, True),  # a starved host: it ran 4 of the 50 ms in which it could, and sleeps
    (20, 229, False, False), (20, 229, True, False),  # 20 of 21, or 21 of 21: it has work whenever it may
    (0, 0, False, False),  # it has waited for all of the time, which is not counted until it runs
  ],
)  # fmt: skip
def test_a_processor_rests_that_sleeps_when_it_could_run(ran, waited, asleep, rests):
  assert vm_lib.resting(250e6, int(ran * 1e6), int(waited * 1e6), asleep) == rests


def test_a_frozen_screen_is_found_after_actions_that_changed_nothing(vm):
  machine = vm()
  vm.told(frozen=True)
  with pytest.raises(qemu.ScreenFrozen, match="no pixel changed"):
    for _ in range(qemu.STILL + 2):
      machine.act(Action("wait", {}, {}, "desktop"))
  vm.told()
  machine.revert()
  for _ in range(2 * qemu.STILL):  # a screen that only shows nothing new is alive
    machine.act(Action("wait", {}, {}, "desktop"))


def test_text_that_no_key_types_does_nothing_where_the_guest_cannot_help(vm):
  machine = vm()
  count = vm.asked.read_text().count("input-send-event")
  with pytest.raises(qemu.Untypable, match="caf\u00e9"):
    machine.act(Action("type", {"text": "caf\u00e9", "enter": False}, {}, "desktop"))
  assert vm.asked.read_text().count("input-send-event") == count


def test_a_disk_file_that_cannot_be_made_is_an_infra_error(vm):
  machine = vm()
  tool = vm.asked.parent / "qemu-img"
  tool.unlink(missing_ok=True)
  tool.write_text("#!/bin/sh\necho No space left on device >&2\nexit 1\n")
  tool.chmod(0o755)
  with pytest.raises(qemu.VmFault, match="No space left on device"):
    machine.revert()


def test_memory_that_is_not_there_is_not_taken(vm):
  vm.cfg.reserve_mb = 1 << 30
  with pytest.raises(NoComputer, match=r"wants \d+ MB with env.reserve_mb, this machine has \d+ MB left"):
    vm()


def test_a_disk_that_cannot_hold_a_saved_state_is_named_before_the_boot(vm, monkeypatch):
  """QEMU was killed by SIGBUS in the middle of its boot, and had printed "nothing"."""
  asked = vm.asked.read_text() if vm.asked.exists() else ""
  monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=100 << 20))
  vm.cfg.cache = str(vm.asked.parent)
  with pytest.raises(qemu.OverlayFull, match=r"may take 128 MB in .*/states \(env.cache\), 100 MB are left"):
    qemu.ready(vm.image, vm.cfg)
  assert (vm.asked.read_text() if vm.asked.exists() else "") == asked


def test_a_boot_whose_guest_or_screen_never_comes_ends_with_why(vm):
  vm.cfg.boot_seconds, vm.cfg.settle_window = 2.0, 30.0  # no processor is idle for so long
  with pytest.raises(BootDeadline, match="screen did not come to rest within 2 s"):
    Machine(vm.image, vm.cfg)
  vm.told(mute=True)
  with pytest.raises(BootDeadline, match="no desktop within 2 s: guest at .*; the guest printed last: starting . kernel panic"):
    Machine(vm.image, vm.cfg)


def test_states_of_other_parts_do_not_fit(vm):
  key = qemu.key_of(vm.image, vm.cfg, "ready")
  keys = {key, qemu.key_of(vm.image, vm.cfg, "other")}
  for name, value in {"memory_mb": 256, "screen": (800, 600), "cpus": 2, "network": "open", "state": "snapshot"}.items():
    cfg = vm.cfg.copy_and_resolve_references()
    cfg[name] = value
    keys.add(qemu.key_of(vm.image, cfg, "ready"))
  assert len(keys) == 7 and key == qemu.key_of(vm.image, vm.cfg, "ready")


@pytest.mark.parametrize("name, value", [("accel", "hvf"), ("cpus", 0), ("screen", (10, 10)), ("network", "lan"), ("boot_seconds", 0.0)])
def test_knobs_out_of_their_domain_are_one_line(vm, name, value):
  vm.cfg[name] = value
  with pytest.raises(ValueError, match=f"env.{name} is .*, wanted "):
    qemu.check(vm.cfg)
