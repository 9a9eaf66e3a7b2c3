"""What simulated screens are made of: a canvas drawn with Pillow glyphs and NumPy blits, and clickable widgets."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Color = tuple[int, int, int]
INK, PAPER, FAINT = (30, 30, 40), (250, 250, 250), (205, 210, 220)


@functools.lru_cache(maxsize=1)
def _font() -> ImageFont.ImageFont:
  return ImageFont.load_default_imagefont()  # 6 x 11 pixel glyphs, shipped inside Pillow: the same on every machine


@functools.lru_cache(maxsize=4096)
def glyphs(text: str) -> np.ndarray:
  """Mask of one line of text, bool [h, w]. Cached: a simulator draws the same words over and over."""
  box = _font().getbbox(text)
  image = Image.new("1", (max(int(box[2]), 1), max(int(box[3]), 1)))
  ImageDraw.Draw(image).text((0, 0), text, font=_font(), fill=1)
  return np.asarray(image, bool)


class Canvas:
  """A screen being drawn. pixels: uint8 [H, W, 3]. Everything is clipped to the screen."""

  def __init__(self, width: int, height: int, background: Color):
    self.pixels = np.empty((height, width, 3), np.uint8)
    self.pixels[:] = background

  def box(self, rect: "Rect", fill: Color, edge: Color | None = None) -> None:
    x0, y0, x1, y1 = max(rect.x0, 0), max(rect.y0, 0), rect.x1, rect.y1
    if edge is not None:
      self.pixels[y0:y1, x0:x1] = edge
      x0, y0, x1, y1 = x0 + 1, y0 + 1, x1 - 1, y1 - 1
    self.pixels[y0:y1, x0:x1] = fill

  def text(self, x: int, y: int, text: str, color: Color = INK) -> None:
    mask = glyphs(text)
    height, width = self.pixels.shape[:2]
    top, left = max(-y, 0), max(-x, 0)
    mask = mask[top : max(height - y, 0), left : max(width - x, 0)]
    y, x = y + top, x + left
    self.pixels[y : y + mask.shape[0], x : x + mask.shape[1]][mask] = color

  def label(self, rect: "Rect", text: str, color: Color = INK) -> None:
    """Text centred in a rectangle."""
    mask = glyphs(text)
    x = rect.x0 + max((rect.x1 - rect.x0 - mask.shape[1]) // 2, 1)
    self.text(x, rect.y0 + (rect.y1 - rect.y0 - mask.shape[0]) // 2, text, color)

  def dim(self) -> None:
    """What lies under a pop-up gets visibly darker."""
    self.pixels = (self.pixels >> 1) + 15


@dataclasses.dataclass(frozen=True)
class Rect:
  """Pixels x0 <= x < x1, y0 <= y < y1."""

  x0: int
  y0: int
  x1: int
  y1: int

  def holds(self, x: int, y: int) -> bool:
    return self.x0 <= x < self.x1 and self.y0 <= y < self.y1

  @property
  def center(self) -> tuple[int, int]:
    return (self.x0 + self.x1 - 1) // 2, (self.y0 + self.y1 - 1) // 2


@dataclasses.dataclass(frozen=True)
class Widget:
  """One thing on a screen. name: what the application calls it when it is hit. style: how it is drawn."""

  name: str
  rect: Rect
  label: str = ""
  style: str = "button"


STYLES: dict[str, tuple[Color | None, Color | None, Color]] = {  # fill, edge, ink
  "button": ((60, 110, 210), (30, 60, 130), (255, 255, 255)),
  "decoy": ((90, 90, 100), (60, 60, 70), (215, 215, 215)),
  "field": (PAPER, (120, 120, 130), INK),
  "focus": ((255, 253, 220), (230, 150, 20), INK),
  "row": ((236, 240, 246), (190, 195, 205), INK),
  "bar": ((222, 226, 234), (160, 165, 175), INK),
  "menu": ((245, 245, 245), (110, 110, 120), INK),
  "text": (None, None, INK),
  "title": ((40, 60, 90), None, (240, 240, 240)),
  "on": ((70, 170, 90), (30, 100, 50), (255, 255, 255)),
  "off": ((190, 190, 195), (130, 130, 140), INK),
  "picked": ((150, 190, 250), (60, 110, 210), INK),
  "panel": (PAPER, (90, 90, 100), INK),
  "app0": ((120, 170, 240), INK, INK),
  "app1": ((240, 200, 90), INK, INK),
  "app2": ((180, 185, 195), INK, INK),
  "app3": ((150, 215, 150), INK, INK),
}


def draw(canvas: Canvas, widgets: list[Widget]) -> None:
  """Paints widgets in order; later ones lie on top."""
  for w in widgets:
    fill, edge, ink = STYLES[w.style]
    if fill is not None:
      canvas.box(w.rect, fill, edge)
    if not w.label:
      continue
    if w.style in ("field", "focus", "row", "bar", "menu", "text", "title", "picked"):
      canvas.text(w.rect.x0 + 3, w.rect.y0 + (w.rect.y1 - w.rect.y0 - 11) // 2, w.label, ink)
    else:
      canvas.label(w.rect, w.label, ink)


def hit(widgets: list[Widget], x: int, y: int) -> Widget | None:
  """The topmost widget at a pixel, or None."""
  for w in reversed(widgets):
    if w.rect.holds(x, y):
      return w
  return None


def aim(rect: Rect, grid_x: list[int], grid_y: list[int]) -> tuple[int, int]:
  """Indices (i, j) of the grid lines nearest to a rectangle's centre whose pixel lies inside it."""
  cx, cy = rect.center
  inside = [(i, j) for i, x in enumerate(grid_x) for j, y in enumerate(grid_y) if rect.holds(x, y)]
  if not inside:
    raise ValueError(f"no grid point lies in {rect}: the widget is too small to be aimed at")
  return min(inside, key=lambda p: math.hypot(grid_x[p[0]] - cx, grid_y[p[1]] - cy))
