"""Screenshots into patches. Sizes are those of the UI-TARS and Qwen documentation or worked out by hand; pixel values are what
transformers' processor made of the same screenshot (tests/golden, written by tests/parity/test_vl_models.py)."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from models.images import ImageSpec, image_grid, image_spec, normalise, preprocess, resized

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
UITARS = ImageSpec(14, 2, 100 * 28 * 28, 2_116_800, (0.5,) * 3, (0.5,) * 3)  # ARPO's max_pixels


def screen(width, height, seed=0):
  return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.mark.parametrize(
  "screen_size, size",
  [
    ((1920, 1080), (1932, 1092)),
    ((1280, 720), (1288, 728)),
    ((1522, 1022), (1512, 1008)),  # 1022 / 28 = 36.5 and 1522 / 28 = 54.36: the half goes to the even 36
    ((1022, 1522), (1008, 1512)),
    ((1366, 768), (1372, 756)),
    ((1080, 2400), (952, 2156)),  # 1092 x 2408 is too many pixels; 28 fits 34.9 and 77.5 times into each side / sqrt(2592000 / 2116800)
    ((10, 10), (280, 280)),  # 100 * 28 * 28 pixels at least
    ((28, 5600), (28, 5600)),  # 200 to 1 is the last aspect taken
  ],
)
def test_resized_by_hand(screen_size, size):
  assert resized(screen_size, UITARS) == size


def test_tokens_of_a_1080p_screen():
  """2691 for UI-TARS and 2040 for Qwen3-VL with its patches of 16."""
  h, w = image_grid((1920, 1080), UITARS)
  assert h * w // 4 == 2691
  h, w = image_grid((1920, 1080), dataclasses.replace(UITARS, patch=16))
  assert h * w // 4 == 2040


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_pixels_have_the_bits_of_the_reference_processor(family):
  spec = image_spec(GOLDEN / family)
  with np.load(GOLDEN / family / "expected.npz") as want:
    pixels, grid = want["pixels"], want["grid"]
  rng = np.random.default_rng(0)
  first = preprocess(rng.integers(0, 256, (150, 410, 3)).astype(np.uint8), spec)
  assert list(first.grid) == grid[0].tolist() and first.patches.shape == (first.grid[0] * first.grid[1], 3 * spec.patch**2)
  both = np.repeat(normalise(first.patches[: len(pixels)], spec).reshape(len(pixels), 3, 1, -1), 2, axis=2).reshape(pixels.shape)
  assert both.dtype == np.float32 and np.array_equal(both, pixels)


def test_patches_stand_in_merge_block_order():
  """Without a resize (the sides are multiples of 28): patch by patch, by loops."""
  shown = screen(84, 56)
  spec = ImageSpec(14, 2, 1, 10**6, (0.0,) * 3, (1.0,) * 3)
  got = preprocess(shown, spec)
  assert got.size == (84, 56) and got.grid == (4, 6)
  want = [
    shown[14 * (2 * i + a) :][:14, 14 * (2 * j + b) :][:, :14].transpose(2, 0, 1).reshape(-1)
    for i in range(2) for j in range(3) for a in range(2) for b in range(2)
  ]  # fmt: skip
  assert np.array_equal(got.patches, want)


def test_normalising_on_the_device_is_normalising_on_the_host():
  spec = image_spec(GOLDEN / "qwen2_5_vl")
  every = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3 * 14 * 14, axis=1)
  host = normalise(every, spec)
  np.testing.assert_allclose(jax.jit(lambda x: normalise(x, spec))(every), host, rtol=0, atol=5e-7)
  assert abs(host[255, 0] - (1 - 0.48145466) / 0.26862954) < 1e-6 and abs(host[0, -1] + 0.40821073 / 0.27577711) < 1e-6


def test_equal_keys_are_equal_contents():
  spec = image_spec(GOLDEN / "qwen2_5_vl")
  a, again, b = preprocess(screen(200, 100), spec), preprocess(screen(200, 100).copy(), spec), preprocess(screen(200, 100, 1), spec)
  assert a.key == again.key != b.key
  turned = preprocess(np.zeros((100, 200, 3), np.uint8), spec), preprocess(np.zeros((200, 100, 3), np.uint8), spec)
  assert turned[0].patches.tobytes() == turned[1].patches.tobytes() and turned[0].key != turned[1].key  # another grid


def test_screens_are_never_converted_silently():
  for bad in (screen(56, 56).astype(np.float32), screen(56, 56)[..., :2], screen(56, 56)[..., 0], np.zeros((56, 56, 4), np.uint8)):
    with pytest.raises(ValueError, match=r"screenshot is .*, wanted uint8 \[H, W, 3\]"):
      preprocess(bad, UITARS)
  for width, height in ((10, 2001), (2001, 10), (0, 5)):
    with pytest.raises(ValueError, match=f"{width} x {height} pixels: the longer side may be 200 times"):
      resized((width, height), UITARS)


# -- what the checkpoint says


RAW = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12845056, "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}


def written(tmp_path, raw, name="preprocessor_config.json"):
  (tmp_path / name).write_text(json.dumps(raw))
  return tmp_path


def test_the_three_layouts_of_the_processor_file(tmp_path):
  want = ImageSpec(14, 2, 3136, 12845056, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
  assert image_spec(written(tmp_path, RAW)) == want
  size = {"size": {"shortest_edge": 3136, "longest_edge": 12845056}}
  assert image_spec(written(tmp_path, {k: v for k, v in RAW.items() if "pixels" not in k} | size)) == want
  assert image_spec(written(tmp_path, RAW), max_pixels=2116800).max_pixels == 2116800
  # where both stand there the pixels are meant, as in the reference processor
  assert image_spec(written(tmp_path, RAW | {"size": {"shortest_edge": 1, "longest_edge": 2}})) == want
  usual = {"do_resize": True, "do_rescale": True, "resample": 3, "rescale_factor": 0.00392156862745098, "temporal_patch_size": 2}
  assert image_spec(written(tmp_path, RAW | usual)) == dataclasses.replace(want, frames=2)
  written(tmp_path, {"image_processor": RAW | usual | {"image_mean": [0, 0, 0]}}, "processor_config.json")
  with pytest.raises(ValueError, match=r"preprocessor_config.json and \S+/processor_config.json differ in mean: \(0.1, 0.2, 0.3\) and"):
    image_spec(tmp_path)
  written(tmp_path, {"processor_class": "Qwen2_5_VLProcessor"}, "processor_config.json")
  assert image_spec(tmp_path) == dataclasses.replace(want, frames=2)
  (tmp_path / "preprocessor_config.json").unlink()
  assert image_spec(written(tmp_path, {"image_processor": RAW}, "processor_config.json")) == want


def test_what_is_missing_or_strange_is_named(tmp_path):
  with pytest.raises(ValueError, match="has no preprocessor_config.json"):
    image_spec(tmp_path)
  for name in ("patch_size", "merge_size", "min_pixels", "max_pixels", "image_mean", "image_std"):
    with pytest.raises(ValueError, match=f"preprocessor_config.json lacks {name}, and no default is assumed"):
      image_spec(written(tmp_path, {k: v for k, v in RAW.items() if k != name}))
  for raw, line in STRANGE:
    with pytest.raises(ValueError) as e:
      image_spec(written(tmp_path, raw))
    assert f"{tmp_path}/preprocessor_config.json: {line}" in str(e.value) and "\n" not in str(e.value)


STRANGE = [
  ([1], "all that it holds is [1], wanted an object of fields"),
  ({"image_processor": 5}, "image_processor is 5, wanted an object of fields"),
  (RAW | {"size": 5}, "size is 5, wanted an object of fields"),
  (RAW | {"image_mean": 0.5}, "image_mean is 0.5, wanted three numbers"),
  (RAW | {"image_mean": "x"}, "image_mean is 'x', wanted three numbers"),
  (RAW | {"image_mean": ["a", "b", "c"]}, "image_mean is ['a', 'b', 'c'], wanted three numbers"),
  (RAW | {"image_std": [1, 0, 1]}, "image_std is [1, 0, 1], wanted three numbers above 1e-06 and below 1e6"),
  (RAW | {"image_std": [1, float("nan"), 1]}, "image_std is [1, nan, 1], wanted three numbers above"),  # Python's JSON has one
  (RAW | {"patch_size": 0}, "patch_size is 0, wanted a whole number of 1 or more"),
  (RAW | {"merge_size": "2"}, "merge_size is '2', wanted a whole number of 1 or more"),
  (RAW | {"do_resize": False}, "do_resize is False; only True is built"),
  (RAW | {"do_rescale": 1}, "do_rescale is 1; only True is built"),
  (RAW | {"do_normalize": "yes"}, "do_normalize is 'yes'; only True is built"),
  (RAW | {"do_center_crop": True}, "do_center_crop is True; only False is built"),
  (RAW | {"resample": 2}, "resample is 2; only 3 is built"),
  (RAW | {"rescale_factor": 1}, "rescale_factor is 1; only 1 / 255 is built"),
  (RAW | {"rescale_factor": "x"}, "rescale_factor is 'x'; only 1 / 255 is built"),
  (RAW | {"temporal_patch_size": "2"}, "temporal_patch_size is '2', wanted a whole number"),
  (RAW | {"min_pixels": 0}, "min_pixels is 0, wanted a whole number of 1 or more"),
  (RAW | {"size": []}, "size is [], wanted an object of fields"),
  (RAW | {"image_mean": [0, 1e300, 0]}, "image_mean is [0, 1e+300, 0], wanted three numbers above -1e+06 and below 1e6"),
  (RAW | {"max_pixels": 2**26 + 1}, "max_pixels is 67108865, wanted a whole number of 1 or more, at most 67108864"),
  (RAW | {"max_pixels": 1e6}, "max_pixels is 1000000.0, wanted a whole number of 1 or more"),
]


def test_bounds_that_cross_are_blamed_on_whoever_set_them(tmp_path):
  """3136 pixels at least and 12845056 at most in the file; the knobs are config.policy's."""
  folder = written(tmp_path, RAW)
  file = f"{folder}/preprocessor_config.json"
  for knobs, line in (
    ({"max_pixels": 784}, f"min_pixels of {file} is 3136, more than the 784 that policy.max_pixels is"),
    ({"min_pixels": 2 * 10**7}, f"policy.min_pixels is 20000000, more than the 12845056 that max_pixels of {file} is"),
    ({"max_pixels": 2**26 + 1}, "policy.max_pixels is 67108865, wanted 0 (the checkpoint's own) or a number of pixels, at most 67108864"),
    ({"min_pixels": -1}, "policy.min_pixels is -1, wanted 0 (the checkpoint's own) or a number of pixels"),
  ):
    with pytest.raises(ValueError) as e:
      image_spec(folder, **knobs)
    assert str(e.value).startswith(line)
