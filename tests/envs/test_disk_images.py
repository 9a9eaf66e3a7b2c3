"""Disk images and saved states: what is one, what is refused and in which words, who makes a state, what is left of one."""

import json
import os
import threading

import numpy as np
import pytest

from envs import images
from envs.errors import BootDeadline
from envs.images import Image, Template
from tests.envs import qemu_double


def raw_disk(path):
  path.write_bytes(bytes(510) + b"\x55\xaa" + bytes(512))
  return path


def test_what_is_no_image_is_one_clear_line(tmp_path, monkeypatch):
  qemu_double.install(tmp_path)
  monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
  text, folder, pipe = tmp_path / "letter.txt", tmp_path / "empty", tmp_path / "pipe"
  os.mkfifo(pipe)
  text.write_text("Dear disk")
  folder.mkdir()
  wrong = {"": "no such file|without a desktop.json", str(tmp_path / "none.qcow2"): "there is no such file or folder"}
  wrong |= {str(text): "is no disk: it begins with b'Dear disk'", str(folder): "without a desktop.json", "debian": "there is no desktop in"}
  wrong |= {str(pipe): "is no file", "a" * 5000: "there is no such file", "a\0b": "there is no such file"}  # a pipe was waited for
  for name, said in wrong.items():
    with pytest.raises(ValueError, match=said) as raised:
      images.find(name, str(tmp_path / "cache"))
    assert "\n" not in str(raised.value) and "env.image" in str(raised.value)
  assert images.find(str(raw_disk(tmp_path / "disk.img")), "").format == "raw"


def test_a_disk_that_cannot_be_read_is_said_with_qemus_words(tmp_path, monkeypatch):
  qemu_double.install(tmp_path)
  (tmp_path / "qemu-img").write_text("#!/bin/sh\necho 'qemu-img: Could not open: Image is corrupt' >&2\nexit 1\n")
  monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
  (tmp_path / "torn.qcow2").write_bytes(b"QFI\xfb torn")
  with pytest.raises(ValueError, match="cannot be read as qcow2: .*Image is corrupt"):
    images.find(str(tmp_path / "torn.qcow2"), "")


@pytest.mark.parametrize(
  "told, fault, said",  # told: of QEMU 7.2's own qemu-img info, shortened
  [
    ({"backing-filename": "nbd://127.0.0.1:9/x", "backing-filename-format": "raw"}, "", "not whole without 'nbd://127.0.0.1:9/x'.*convert"),
    ({"format-specific": {"type": "qcow2", "data": {"data-file": "/data.raw"}}}, "", "not whole without '/data.raw'"),
    ({"format-specific": {"type": "vmdk", "data": {"extents": [{"filename": "/etc/passwd"}]}}}, "", "not whole without '/etc/passwd'"),
    ({"encrypted": True}, "", "is encrypted"),
    ({}, "echo ERROR: region exceeding the end of the file >&2; exit 2", "cut short or damaged: qemu-img check: ERROR: region exceeding"),
    ({}, "echo 3 leaked clusters >&2; exit 3", ""),
    ({}, "exit 63", ""),  # a format that cannot be checked
  ],
)
def test_a_disk_that_is_not_all_there_is_refused_before_it_is_booted(tmp_path, monkeypatch, told, fault, said):
  """Each of them came as far as a boot, which failed five minutes later as a fault of the computer."""
  disk = tmp_path / "disk.qcow2"
  disk.write_bytes(b"QFI\xfb")
  script = f"#!/bin/sh\n[ \"$1\" = info ] && echo '{json.dumps(told)}' && exit 0\n{fault}\n"
  (tmp_path / "qemu-img").write_text(script)
  (tmp_path / "qemu-img").chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
  if not said:
    assert images.find(str(disk), "").format == "qcow2"
    return
  with pytest.raises(ValueError, match=f"env.image is .*{said}") as raised:
    images.find(str(disk), "")
  assert "\n" not in str(raised.value)


def test_the_last_desktop_made_is_debian(tmp_path, monkeypatch):
  qemu_double.install(tmp_path)
  monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
  for age, name in ((20, "old"), (10, "new"), (5, "failed")):
    folder = tmp_path / "images" / name
    folder.mkdir(parents=True)
    (folder / "disk.qcow2").write_bytes(b"QFI\xfb")
    for part in ("vmlinuz", "initrd.img"):
      (folder / part).touch()
    about = {"digest": name, "append": "quiet", "memory_mb": 768, "screen": [1024, 768], "passed": ["edit_a_file"]}
    if name == "failed":
      del about["passed"]  # its build did not come to its end
    (folder / "desktop.json").write_text(json.dumps(about))
    os.utime(folder / "desktop.json", (1e9 - age, 1e9 - age))
  found = images.find("debian", str(tmp_path))
  assert (found.digest, found.ours, found.screen, found.memory_mb) == ("new", True, (1024, 768), 768)
  assert images.find(str(tmp_path / "images/old/disk.qcow2"), str(tmp_path)).digest == "old"  # the disk by its own path too
  (tmp_path / "images/new/vmlinuz").unlink()
  with pytest.raises(ValueError, match="has no vmlinuz"):
    images.find("debian", str(tmp_path))
  (tmp_path / "images/new/vmlinuz").touch()
  for said in ("", "[]", "[" * 100_000, '{"passed": 1, "digest": "x", "append": "", "memory_mb": "all", "screen": 3}'):
    (tmp_path / "images/new/desktop.json").write_text(said)
    with pytest.raises(ValueError, match="new is damaged: desktop.json is no|new/desktop.json has no memory_mb, screen: ") as raised:
      images.find("debian", str(tmp_path))
    assert "\n" not in str(raised.value) and "build it again" in str(raised.value)


IMAGE = Image(disk=None, format="raw", digest="x")


def shown(folder):
  return [name for name in os.listdir(folder) if not name.startswith(".")]


def write(folder):
  for part in ("disk.qcow2", "memory", "state"):
    (folder / part).touch()
  Template(folder, IMAGE, "memory", 5.0).write(np.zeros((2, 2, 3), np.uint8))


def test_a_saved_state_is_made_once_and_whole(tmp_path):
  made, together = [], threading.Barrier(4)

  def make(folder):
    made.append(folder)
    write(folder)

  def ask():
    together.wait()
    out.append(images.made_once(tmp_path / "one", IMAGE, 20.0, make))

  out = []
  threads = [threading.Thread(target=ask) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(made) == 1 and [t.clock for t in out] == [5.0] * 4 and shown(tmp_path) == ["one"]


def test_a_saved_state_that_fails_leaves_nothing_and_the_next_one_tries_again(tmp_path):
  def fail(folder):
    (folder / "half").touch()
    raise BootDeadline("for the test")

  with pytest.raises(BootDeadline):
    images.made_once(tmp_path / "one", IMAGE, 5.0, fail)
  assert shown(tmp_path) == []
  assert images.made_once(tmp_path / "one", IMAGE, 5.0, write).screen.shape == (2, 2, 3)


@pytest.mark.parametrize(
  "name, content",
  [
    ("about.json", b""), ("about.json", b"[]"), ("about.json", b'{"kind": "memory"}'), ("about.json", b'{"kind": 3, "clock": 5.0}'),
    ("memory", None), ("state", None), ("disk.qcow2", None), ("screen.npy", None), ("screen.npy", b""), ("screen.npy", b"\x93NUMPY\1\0"),
  ],
)  # fmt: skip
def test_a_saved_state_that_is_damaged_is_named_and_what_to_do(tmp_path, name, content):
  images.made_once(tmp_path / "one", IMAGE, 5.0, write)
  (tmp_path / "one" / name).unlink()
  if content is not None:
    (tmp_path / "one" / name).write_bytes(content)
  with pytest.raises(ValueError, match=f"{tmp_path / 'one'} is damaged: .*{name}.*: remove the folder") as raised:
    images.made_once(tmp_path / "one", IMAGE, 5.0, write)
  assert "\n" not in str(raised.value)


def test_what_is_left_of_a_saved_state_gives_way_to_a_new_one(tmp_path):
  """It was booted for minutes, and then could not be put where the rest of the old one was: every time."""
  (tmp_path / "one").mkdir()
  (tmp_path / "one" / "memory").touch()
  assert images.made_once(tmp_path / "one", IMAGE, 5.0, write).clock == 5.0 and shown(tmp_path) == ["one"]


def test_a_folder_that_cannot_be_written_is_named_with_its_knob(tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(ValueError, match=r"file/states \(env.cache\): Not a directory"):
    images.made_once(tmp_path / "file" / "states" / "one", IMAGE, 5.0, write)
