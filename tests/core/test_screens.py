import io

import numpy as np
import pytest
from PIL import Image

from core.schema import Screen
from core.screens import ScreenStore, decode_png, encode_png, write_atomic


def picture(seed=0, height=9, width=13):
  return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (48, 64)])
def test_png_is_read_alike_by_pillow_and_by_us(shape):
  pixels = picture(0, *shape)
  data = encode_png(pixels)
  np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")), pixels)
  np.testing.assert_array_equal(decode_png(data), pixels)


def test_a_sliced_picture_is_written_as_it_looks():
  pixels = picture(0, 20, 30)[::2, ::-3]
  np.testing.assert_array_equal(decode_png(encode_png(pixels)), pixels)


@pytest.mark.parametrize(
  "bad",
  [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8)],
)
def test_only_rgb_bytes_become_a_png(bad):
  with pytest.raises(ValueError, match="wanted uint8"):
    encode_png(bad)


def test_store_writes_a_screen_once_and_gives_it_back(tmp_path):
  store, screen = ScreenStore(tmp_path), Screen.of(picture())
  path = store.put(screen)
  before = path.stat().st_mtime_ns, path.stat().st_ino
  assert store.put(Screen.of(picture())) == path
  assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
  assert path.parent.name == screen.ref[:2] and [p.name for p in tmp_path.rglob("*.*")] == [f"{screen.ref}.png"]
  np.testing.assert_array_equal(store.get(screen.ref).pixels, screen.pixels)


def test_a_file_cut_short_is_noticed_and_written_again(tmp_path):
  store, screen = ScreenStore(tmp_path), Screen.of(picture())
  path = store.put(screen)
  path.write_bytes(path.read_bytes()[:-20])
  with pytest.raises(ValueError, match="not a complete PNG"):
    store.get(screen.ref)
  store.put(screen)
  np.testing.assert_array_equal(store.get(screen.ref).pixels, screen.pixels)


def test_another_picture_under_the_name_is_noticed(tmp_path):
  store, screen = ScreenStore(tmp_path), Screen.of(picture())
  store.put(screen).write_bytes(encode_png(picture(1)))
  with pytest.raises(ValueError, match="pixels hash to"):
    store.get(screen.ref)


@pytest.mark.parametrize("place", [19, 60, -13])  # in the width, in the pixels, in their check sum
def test_a_flipped_bit_is_noticed(tmp_path, place):
  store, screen = ScreenStore(tmp_path), Screen.of(picture())
  path = store.put(screen)
  data = bytearray(path.read_bytes())
  data[place] ^= 1
  path.write_bytes(data)
  with pytest.raises(ValueError, match="damaged"):
    store.get(screen.ref)


@pytest.mark.parametrize("ref", ["../../etc/passwd", "", "abc", "A" * 40, "g" * 40, "0" * 40 + "\n", None])
def test_only_hashes_become_paths(tmp_path, ref):
  with pytest.raises(ValueError, match="not a hash"):
    ScreenStore(tmp_path).path(ref)


def test_keep_only_deletes_the_rest(tmp_path):
  store = ScreenStore(tmp_path)
  screens = [Screen.of(picture(i)) for i in range(4)]
  for s in screens:
    store.put(s)
  assert store.keep_only({screens[1].ref, "0" * 40}) == 3
  assert store.refs() == {screens[1].ref}


def test_write_atomic_keeps_the_old_file_when_the_new_one_cannot_be_written(tmp_path):
  path = tmp_path / "x"
  write_atomic(path, b"old")
  with pytest.raises(TypeError):
    write_atomic(path, "text, not bytes")
  assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["x"]
