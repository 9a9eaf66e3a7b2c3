"""Where tokens stand when there are images among them: M-RoPE position ids, three to a token (time, row, column).

Text counts on, the same number on all three axes. An image has one time, and rows and columns counted from there; what
follows goes on after the larger of its sides, so a position advances far less than the tokens do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mrope_positions(length: int, image_place: Sequence[int], sizes: Sequence[tuple[int, int]], start: int = 0) -> tuple[np.ndarray, int]:
  """(positions i32 [3, length], the position of the token after them).

  length: tokens in all; image_place [M]: index of each image's first placeholder, ascending; sizes [M]: (rows, columns) in
  tokens; start: position of the first token, what this function returned for the tokens before it. ValueError where an image
  overlaps another or the end.
  """
  out = np.empty((3, length), np.int32)
  at, now = 0, start
  for place, (rows, columns) in zip(image_place, sizes, strict=True):
    if place < at or place + rows * columns > length:
      raise ValueError(f"an image of {rows} x {columns} tokens at {place} does not fit between {at} and {length}")
    out[:, at:place] = now + np.arange(place - at)
    now += int(place) - at
    at = int(place) + rows * columns
    out[:, place:at] = now + np.stack([np.zeros(rows * columns, np.int32), *np.divmod(np.arange(rows * columns), columns)])
    now += max(rows, columns)
  out[:, at:] = now + np.arange(length - at)
  return out, now + length - at
