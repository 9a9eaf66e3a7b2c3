"""Whether guests run on this machine's KVM: asked of a real guest, since a KVM device that opens and then hangs every guest exists, and one
on which they run, forty times slower than emulated."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import time

PROBE_SECONDS = 5.0
SLACK_SECONDS, SLACK = 2.0, 3.0  # a guest on KVM may take these seconds and so many times an emulated one's
EXIT_CODE = (0x10 << 1) | 1  # what isa-debug-exit makes of the byte that the guest below writes
# mov al, 0x10; out 0xf4, al; hlt; jmp $-1: a boot sector that ends its machine
BOOT_SECTOR = bytes([0xB0, 0x10, 0xE6, 0xF4, 0xF4, 0xEB, 0xFD]).ljust(510, b"\0") + b"\x55\xaa"


def ran(program: str, kind: str, seconds: float = PROBE_SECONDS) -> str:
  """Starts a guest that does nothing but end itself. "" if it did within `seconds`, else why not, in one line."""
  with tempfile.TemporaryDirectory(prefix="practice-probe-") as folder:
    sector = pathlib.Path(folder) / "sector"
    sector.write_bytes(BOOT_SECTOR + bytes(512 * 2047))
    argv = [program, "-nodefaults", "-no-user-config", "-M", "q35", "-accel", kind, "-m", "16", "-display", "none", "-monitor", "none"]
    argv += ["-serial", "none", "-no-reboot", "-device", "isa-debug-exit,iobase=0xf4,iosize=0x01"]
    argv += ["-drive", f"file={sector},format=raw,if=none,id=d,read-only=on", "-device", "virtio-blk-pci,drive=d,bootindex=0"]
    try:
      done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
      return f"a guest of one instruction did not end within {seconds:.2g} s"
    if done.returncode == EXIT_CODE:
      return ""
    return f"a guest of one instruction ended with code {done.returncode}: {done.stderr.strip()[-200:] or 'no word'}"


def slower(program: str) -> str:
  """Why KVM is worth less than emulation here, in one line; "" if it is not. The measure is the time that the same guest takes emulated."""
  began = time.monotonic()
  fault = ran(program, "tcg")
  took = time.monotonic() - began
  return ran(program, "kvm", PROBE_SECONDS if fault else min(PROBE_SECONDS, SLACK_SECONDS + SLACK * took))


@functools.lru_cache
def chosen(program: str, wanted: str, device: str = "/dev/kvm") -> str:
  """"kvm" or "tcg". wanted: one of these, or "auto": KVM where a guest runs on it, else emulation, with a line that says so.

  ValueError where KVM was asked for and no guest runs on it."""
  if wanted == "tcg":
    return "tcg"
  fault = "there is none" if not os.path.exists(device) else "" if os.access(device, os.R_OK | os.W_OK) else "this user may not use it"
  fault = fault or slower(program)
  if not fault:
    return "kvm"
  if wanted == "kvm":
    raise ValueError(f"env.accel is kvm, but {device}: {fault}; wanted auto or tcg here")
  print(f"WARNING: NO KVM ({device}: {fault}): virtual machines are EMULATED, some 10 to 20 times slower", file=sys.stderr, flush=True)
  return "tcg"
