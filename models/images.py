"""Screenshots into patches, on the host, the way the Qwen2-VL image processors do it: Pillow's bicubic resize to a multiple
of the merged patch, then patches in merge-block order. What leaves the host is bytes; `normalise` runs on the device.

Differs from the processor in what is handed over only: one temporal tap instead of two equal ones (the tower sums its
kernel over them) and uint8 instead of float32, an eighth of the bytes. `normalise` of NumPy patches has the processor's bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import pathlib
from typing import NamedTuple

import jax
import numpy as np
from PIL import Image

from models.config import json_of, need, object_of, only, told, whole

MAX_ASPECT = 200
MAX_PIXELS = 2**26  # of a resized image: four 4K screens a side
# What a processor's file may say, and what is done here whatever it says. resample: Pillow's number for bicubic.
DONE = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3, "do_center_crop": False,
        "do_pad": False}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ImageSpec:
  """How a checkpoint wants its images. patch: pixels a side; merge: patches a side of one token; min_pixels, max_pixels: of
  the resized image; mean, std: per channel, of values in 0..1; frames: equal ones that a still becomes, 0 = the file does not say."""

  patch: int
  merge: int
  min_pixels: int
  max_pixels: int
  mean: tuple[float, float, float]
  std: tuple[float, float, float]
  frames: int = 0

  @property
  def factor(self) -> int:
    """Pixels a side of one image token: what both sides of a resized image are multiples of."""
    return self.patch * self.merge


class Patches(NamedTuple):
  """One screenshot as a tower takes it. patches u8 [h * w, 3 * patch * patch], channels first, in merge-block order; grid
  (h, w) in patches; size (W, H) of the resized image in pixels, the space a policy's coordinates live in; key: content hash,
  equal exactly when the tower's features of it are."""

  patches: np.ndarray
  grid: tuple[int, int]
  size: tuple[int, int]
  key: str


def image_spec(folder: str | pathlib.Path, min_pixels: int = 0, max_pixels: int = 0) -> ImageSpec:
  """Reads preprocessor_config.json (or the image part of processor_config.json) of a checkpoint. Where a folder has both
  they must agree: releases of transformers differ in which of them they read.

  min_pixels, max_pixels: the policy's knobs, 0 takes the checkpoint's own. ValueError names the file and the field that is missing or
  strange, or the knob.
  """
  files = [p for name in ("preprocessor_config.json", "processor_config.json") if (p := pathlib.Path(folder) / name).is_file()]
  if not files:
    raise ValueError(f"{folder} has no preprocessor_config.json: copy it from where the checkpoint came from")
  parts = {str(p): object_of(json_of(p), "all that it holds", str(p)) for p in files}
  parts = {path: part for i, (path, part) in enumerate(parts.items()) if not i or "image_processor" in part}
  specs = [_spec(part, path, min_pixels, max_pixels) for path, part in parts.items()]
  for field in dataclasses.fields(ImageSpec):
    said = [getattr(spec, field.name) for spec in specs]
    if said[0] != said[-1]:
      raise ValueError(f"{' and '.join(parts)} differ in {field.name}: {said[0]} and {said[1]}; keep the one that the checkpoint came with")
  return specs[0]


def _spec(raw: dict, path: str, min_pixels: int, max_pixels: int) -> ImageSpec:
  """What one file says."""
  raw = object_of(raw.get("image_processor", raw), "image_processor", path)
  size = raw.get("size")
  size = object_of({} if size is None else size, "size", path)
  for name, built in DONE.items():
    only(raw, name, built, path)
  factor = raw.get("rescale_factor")
  if factor is not None and (type(factor) not in (int, float) or not math.isclose(factor, 1 / 255, rel_tol=1e-6)):
    raise ValueError(f"{path}: rescale_factor is {told(factor)}; only 1 / 255 is built")
  sides = {"min_pixels": (min_pixels, "shortest_edge"), "max_pixels": (max_pixels, "longest_edge")}
  said = {name: f"policy.{name}" if knob else f"{name} of {path}" for name, (knob, _) in sides.items()}
  pixels = {}
  for name, (knob, edge) in sides.items():
    if not 0 <= knob <= MAX_PIXELS:
      raise ValueError(f"policy.{name} is {knob}, wanted 0 (the checkpoint's own) or a number of pixels, at most {MAX_PIXELS}")
    given = next((v for v in (raw.get(name), size.get(edge), size.get(name)) if v is not None), None)
    pixels[name] = knob or whole({name: given}, name, path, MAX_PIXELS)
  if pixels["min_pixels"] > pixels["max_pixels"]:
    least, most = pixels.values()
    raise ValueError(f"{said['min_pixels']} is {least}, more than the {most} that {said['max_pixels']} is: wanted at most as many")
  sizes = (whole(raw, name, path) for name in ("patch_size", "merge_size"))
  frames = whole(raw, "temporal_patch_size", path) if raw.get("temporal_patch_size") is not None else 0
  return ImageSpec(*sizes, **pixels, mean=_three(raw, "image_mean", path), std=_three(raw, "image_std", path, above=1e-6), frames=frames)


def _three(raw: dict, name: str, path: str, above: float = -1e6) -> tuple[float, ...]:
  """A number for each channel."""
  value = need(raw, name, path)
  if not isinstance(value, list) or len(value) != 3 or not all(type(v) in (int, float) and above < v < 1e6 for v in value):
    raise ValueError(f"{path}: {name} is {told(value)}, wanted three numbers above {above:g} and below 1e6")
  return tuple(map(float, value))


def resized(screen_size: tuple[int, int], spec: ImageSpec) -> tuple[int, int]:
  """(W, H) of a screen -> (W, H) of the image the model is shown: multiples of spec.factor, halves rounded to even, then
  shrunk or grown at the same aspect until the pixels are within bounds. ValueError where one side is over 200 times the other."""
  width, height = screen_size
  if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
    raise ValueError(f"screenshot of {width} x {height} pixels: the longer side may be {MAX_ASPECT} times the shorter at most")
  step = spec.factor
  w, h = round(width / step) * step, round(height / step) * step
  if w * h > spec.max_pixels:
    shrink = math.sqrt(height * width / spec.max_pixels)
    w, h = (max(step, math.floor(side / shrink / step) * step) for side in (width, height))
  elif w * h < spec.min_pixels:
    grow = math.sqrt(spec.min_pixels / (height * width))
    w, h = (math.ceil(side * grow / step) * step for side in (width, height))
  return w, h


def image_grid(screen_size: tuple[int, int], spec: ImageSpec) -> tuple[int, int]:
  """(h, w) in patches that a screen of (W, H) pixels becomes."""
  w, h = resized(screen_size, spec)
  return h // spec.patch, w // spec.patch


def preprocess(screen: np.ndarray, spec: ImageSpec) -> Patches:
  """uint8 [H, W, 3] -> Patches. ValueError for another dtype or shape: nothing is converted silently."""
  if screen.dtype != np.uint8 or screen.ndim != 3 or screen.shape[2] != 3:
    raise ValueError(f"screenshot is {screen.dtype} {screen.shape}, wanted uint8 [H, W, 3]")
  w, h = resized((screen.shape[1], screen.shape[0]), spec)
  image = np.asarray(Image.fromarray(screen).resize((w, h), Image.Resampling.BICUBIC))
  p, m = spec.patch, spec.merge
  blocks = image.reshape(h // spec.factor, m, p, w // spec.factor, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
  patches = np.ascontiguousarray(blocks).reshape(-1, 3 * p * p)
  grid = (h // p, w // p)
  return Patches(patches, grid, (w, h), hashlib.sha1(str((grid, p, m)).encode() + patches.tobytes()).hexdigest())


def normalise(patches: np.ndarray | jax.Array, spec: ImageSpec) -> np.ndarray | jax.Array:
  """uint8 [..., 3 * patch * patch] -> f32 of the same shape: (x / 255 - mean) / std, channel by channel."""
  per_pixel = lambda values: np.repeat(np.asarray(values, np.float32), spec.patch**2)
  return (patches.astype(np.float32) / np.float32(255) - per_pixel(spec.mean)) / per_pixel(spec.std)
