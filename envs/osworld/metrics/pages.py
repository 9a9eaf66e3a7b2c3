"""Metrics of web addresses and of pictures. Semantics: desktop-env's desktop_env/evaluators/metrics (chrome, vlc, utils), Apache 2.0."""

from __future__ import annotations

import re
import urllib.parse
from typing import Any

import numpy as np

from envs.osworld.metrics import guard

SECOND_LEVEL = {"ac", "co", "com", "edu", "gov", "net", "org"}  # before a country's two letters they belong to the suffix
PICTURES = ("BMP", "GIF", "ICO", "JPEG", "JPEG2000", "PNG", "PPM", "TGA", "TIFF", "WEBP")  # EPS would run what an agent wrote (Ghostscript)
WINDOW = 7  # pixels of the structural similarity's window


def is_expected_url_pattern_match(result: Any, rules: dict) -> float:
  """Every pattern of expected is found in the address."""
  url = result.get("url") if isinstance(result, dict) else result
  return float(bool(url) and isinstance(url, str) and all(re.search(pattern, url) for pattern in rules["expected"]))


def is_expected_active_tab(result: Any, rules: dict) -> float:
  """The tab in front shows the address of the rule."""
  url = result.get("url") if isinstance(result, dict) else result
  return float(bool(url) and rules["type"] == "url" and same_address(rules["url"], url))


def is_expected_tabs(result: list[dict] | None, rules: dict) -> float:
  """As many tabs as addresses, each address in one of them."""
  if not result or rules["type"] != "url":
    return 0.0
  open_now = [tab["url"] for tab in result]
  return float(len(open_now) == len(rules["urls"]) and all(any(same_address(u, o) for o in open_now) for u in rules["urls"]))


def same_address(one: str, other: str) -> bool:
  """Scheme (http if there is none), host without www and without its suffix (.com, .co.uk), path, query and fragment are the same."""
  return _address(one) == _address(other)


def _address(url: str) -> tuple:
  try:
    return _parts(url)
  except ValueError:  # no address ("http://["), and like no other
    return (url,)


def _parts(url: str) -> tuple:
  parts = urllib.parse.urlparse(url if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", url) else f"http://{url}")
  host = parts.netloc.lower().rpartition("@")[2].partition(":")[0]
  labels = host.split(".")
  suffix = 0 if re.fullmatch(r"[\d.]+", host) or len(labels) < 2 else 1
  if suffix and len(labels) > 2 and len(labels[-1]) == 2 and labels[-2] in SECOND_LEVEL:
    suffix = 2
  labels = labels[: len(labels) - suffix]
  labels = labels[1:] if len(labels) == 2 and labels[0] == "www" else labels
  return parts.scheme.lower(), ".".join(labels), parts.path if parts.path != "/" else "", parts.params, parts.query, parts.fragment


def compare_images(result: str | None, expected: str | None, reference_base_result: float | None = None, **options) -> float:
  """Structural similarity (Wang et al. 2004, 7 x 7 windows) of the grey pictures, both at the smaller one's size. reference_base_result:
  the score that stands for 0."""
  if not result or not expected:
    return 0.0
  sides = [guard.read(_grey, path, side) for path, side in zip((result, expected), guard.SIDES)]
  from PIL import Image

  size = min(side.size for side in sides)
  if min(size) < WINDOW:
    raise guard.BadResult(f"a picture of {size[0]} x {size[1]} pixels is too small to compare")
  score = similarity(*(np.asarray(side.resize(size, Image.Resampling.LANCZOS), np.float64) for side in sides))
  if reference_base_result is None:
    return max(score, 0.0)
  return (score - reference_base_result) / (1 - reference_base_result) if score >= reference_base_result + 0.01 else 0.0


def _grey(path: str) -> Any:
  from PIL import Image

  with Image.open(path, formats=PICTURES) as image:
    if image.width * image.height > guard.MAX_PIXELS:
      raise ValueError(f"{image.width} x {image.height} pixels")
    return image.convert("L")


def similarity(a_HW: np.ndarray, b_HW: np.ndarray) -> float:
  """Mean structural similarity of two grey pictures in 0 to 255: uniform windows, sample covariance, windows inside the picture."""

  def mean(x_HW: np.ndarray) -> np.ndarray:
    total = np.pad(x_HW, ((1, 0), (1, 0))).cumsum(0).cumsum(1)
    n = WINDOW
    return (total[n:, n:] - total[:-n, n:] - total[n:, :-n] + total[:-n, :-n]) / n**2

  scale = WINDOW**2 / (WINDOW**2 - 1)
  ma, mb = mean(a_HW), mean(b_HW)
  va, vb, vab = (scale * (mean(x * y) - m) for x, y, m in ((a_HW, a_HW, ma * ma), (b_HW, b_HW, mb * mb), (a_HW, b_HW, ma * mb)))
  c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
  return float((((2 * ma * mb + c1) * (2 * vab + c2)) / ((ma**2 + mb**2 + c1) * (va + vb + c2))).mean())
