"""Chips by name, with what their makers publish, and slices of them: "v5p:2x2x4", "h100:8", "h100:2x8".

Sources. v5e, v5p, v6e: Google Cloud's pages of each TPU (peak, HBM, bandwidth, topologies); a link's one-way bandwidth from the published
inter-chip totals over the number of links (v5e 4 x 50 GB/s each way, v5p 6 x 100, v6e 4 x 100, ten percent taken off). H100 and H200 SXM:
NVIDIA's data sheets (dense bfloat16, NVLink's 900 GB/s both ways together, 400 Gbit/s a GPU between nodes). `hbm` is what a program can
have: of TPUs what the compiler refuses to exceed, of GPUs the memory less 2 GiB of driver.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from core.find import nearest

GIB = 2**30


class Chip(NamedTuple):
  """peak: bfloat16 FLOP/s; hbm: bytes; bandwidth: of it, bytes/s; link: bytes/s one way, of one ICI link or of NVLink; axes: of the torus,
  0 = a switch; outside: bytes/s one way that a chip has between nodes (GPU). slices: of few chips; larger ones have multiples of 4."""

  name: str
  peak: float
  hbm: float
  bandwidth: float
  link: float
  axes: int
  slices: tuple[str, ...]
  outside: float = 0.0

  @property
  def tpu(self) -> bool:
    return self.axes > 0

  @property
  def lanes(self) -> int:
    """A device's part of a row is a multiple of it: what the TPU's attention kernel wants."""
    return 128 if self.tpu else 1


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CHIPS = {
  c.name: c
  for c in (
    Chip("v5e", 197e12, 15.75 * GIB, 819e9, 45e9, 2, _FLAT),
    Chip("v6e", 918e12, 31.25 * GIB, 1640e9, 90e9, 2, _FLAT),
    Chip("v5p", 459e12, 95.74 * GIB, 2765e9, 90e9, 3, ("2x2x1", "2x2x2", "2x2x4", "2x4x4")),
    Chip("h100", 989e12, 80e9 - 2 * GIB, 3.35e12, 450e9, 0, (), 50e9),
    Chip("h200", 989e12, 141e9 - 2 * GIB, 4.8e12, 450e9, 0, (), 50e9),
  )
}


class Topology(NamedTuple):
  """A slice of one kind of chip, or GPUs on nodes. shape: of the torus, or (nodes, GPUs a node)."""

  chip: Chip
  shape: tuple[int, ...]

  @property
  def count(self) -> int:
    return math.prod(self.shape)

  @property
  def name(self) -> str:
    return f"{self.chip.name}:{'x'.join(map(str, self.shape if self.chip.tpu or self.shape[0] > 1 else self.shape[1:]))}"

  @property
  def of_a_host(self) -> int:
    """Devices of one host, which is one process: TPU slices beyond a single host's (8 chips, v5p 4) have hosts of 4."""
    if not self.chip.tpu:
      return self.shape[1]
    return self.count if self.count <= (4 if self.chip.axes == 3 else 8) else 4

  def bandwidth(self, group: int) -> float:
    """Bytes/s that a chip can send in a collective over `group` chips: over every axis of the torus where all take part, else over one;
    no ring is assumed closed."""
    if self.chip.tpu:
      return self.chip.link * (sum(n > 1 for n in self.shape) if group >= self.count else 1)
    return self.chip.link if group <= self.shape[1] else self.chip.outside


def parse(text: str) -> Topology:
  """ValueError of one line for what does not exist."""
  name, _, shape = text.partition(":")
  if name not in CHIPS:
    raise ValueError(f"--topology={text}: there is no chip {name!r}{nearest(name, CHIPS)}; known are {', '.join(CHIPS)}")
  chip = CHIPS[name]
  if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
    raise ValueError(f"--topology={text}: wanted {name}:{'2x2x4' if chip.axes == 3 else '4x4' if chip.tpu else '8'}, sizes joined by x")
  sizes = tuple(map(int, shape.split("x")))
  if not chip.tpu:
    if len(sizes) > 2 or sizes[-1] > 8:
      raise ValueError(f"--topology={text}: wanted {name}:GPUS of one node (at most 8) or {name}:NODESxGPUS")
    return Topology(chip, sizes if len(sizes) == 2 else (1, *sizes))
  large = chip.axes == 3 and len(sizes) == 3 and all(n % 4 == 0 for n in sizes)
  if shape not in chip.slices and not large:
    more = " and AxBxC of multiples of 4" if chip.axes == 3 else ""
    raise ValueError(f"--topology={text}: there is no such slice; {name} has {', '.join(chip.slices)}{more}")
  return Topology(chip, sizes)
