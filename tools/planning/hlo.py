"""Collectives of a compiled program, read from its text: kinds, sizes, how often loops run them, and which ones nothing runs beside."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all")
SIZES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OP = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?)\s([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]*)\]")
_CALLED = re.compile(r"(calls|to_apply|body|condition|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONSTANT = re.compile(r"^\s+%?([\w.\-]+) = [su]32\[\]\S* constant\((\d+)\)")
_ELEMENT = re.compile(r"^\s+%?([\w.\-]+) = [su]32\[\]\S* get-tuple-element\([^)]*\), index=(\d+)")
_BELOW = re.compile(r" compare\(%?([\w.\-]+), %?([\w.\-]+)\).*direction=LT")
_ADD = re.compile(r"%?([\w.\-]+) = [su]32\[\]\S* add\(%?([\w.\-]+), %?([\w.\-]+)\)")


class Collective(NamedTuple):
  """One place in the program. kind; shapes: of its result, as text; size: bytes of its largest result; group: devices that take part;
  times: how often a step runs it; alone: nothing is scheduled beside it."""

  kind: str
  shapes: str
  size: float
  group: int
  times: int
  alone: bool

  @property
  def sent(self) -> float:
    """Bytes that a device sends in a step, by the usual rings."""
    part = (self.group - 1) / self.group
    each = {"all-gather": part, "all-reduce": 2 * part, "reduce-scatter": self.group * part, "collective-permute": 1.0}.get(self.kind, part)
    return each * self.size * self.times


def largest(text: str) -> float:
  """Bytes of the largest array in a result's type."""
  found = _SHAPE.findall(text)
  return max((SIZES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in found), default=0)


def computations(text: str) -> tuple[dict[str, list[str]], str]:
  """{name: lines of its instructions}, and the entry's name."""
  out, name, entry = {}, "", ""
  for row in text.splitlines():
    if head := _HEAD.match(row):
      name = head[2]
      out[name] = []
      entry = name if head[1] else entry
    elif row.rstrip() == "}":  # an instruction's attributes may have lines of their own, and begin them so
      name = ""
    elif name:
      out[name].append(row)
  return out, entry


def group_size(row: str, devices: int) -> int:
  """Devices of a replica group; all where none is named."""
  if found := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", row):  # a mesh's axes and sizes, and those that take part
    sizes = {axis: int(n) for axis, n in re.findall(r"('[^']*')=(\d+)", found[1])}
    return math.prod(sizes[axis] for axis in re.findall(r"'[^']*'", found[2]))
  if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", row):
    return int(found[2])
  if found := re.search(r"replica_groups=\{\{([\d,]+)\}", row):
    return found[1].count(",") + 1
  return devices


def turns(condition: list[str], body: list[str]) -> int:
  """How often a loop runs: its counter starts from 0, the body adds a constant, the condition keeps it below one. 1 where it is not so."""
  constants = {m[1]: int(m[2]) for row in condition + body if (m := _CONSTANT.match(row))}
  places = {m[1]: m[2] for row in condition if (m := _ELEMENT.match(row))}
  limit = next((m for row in condition if (m := _BELOW.search(row)) and m[1] in places and m[2] in constants), None)
  if limit is None:
    return 1
  handed = next((row.rpartition(" tuple(")[2].partition(")")[0] for row in body if row.lstrip().startswith("ROOT")), "")
  names = re.findall(r"%?([A-Za-z_][\w.\-]*)", re.sub(r"/\*[^*]*\*/", "", handed))
  place = int(places[limit[1]])
  adds = (m for row in body if (m := _ADD.search(row)) and place < len(names) and m[1] == names[place])
  step = next((constants[name] for m in adds for name in (m[2], m[3]) if name in constants), 1)
  return -(-constants[limit[2]] // max(1, step))


def called(row: str, known: dict[str, list[str]]) -> Iterator[tuple[str, int]]:
  """(computation, how often) that an instruction runs."""
  callees = [(kind, name) for kind, names in _CALLED.findall(row) for name in re.findall(r"[\w.\-]+", names)]
  condition = next((name for kind, name in callees if kind == "condition"), None)
  trips = _TRIPS.search(row)
  body = next((name for kind, name in callees if kind == "body"), None)
  times = int(trips[1]) if trips else turns(known.get(condition, []), known.get(body, []))
  for kind, name in callees:
    yield name, times if kind in ("body", "condition") else 1


def collectives(text: str, devices: int) -> list[Collective]:
  """Every collective that the entry reaches, those in branches too (at most one branch runs: an upper bound)."""
  known, entry = computations(text)
  times: dict[str, int] = collections.Counter()
  beside: set[str] = set()  # computations of asynchronous instructions

  def walk(name: str, count: int, hidden: bool) -> None:
    times[name] += count
    if hidden:
      beside.add(name)
    for row in known.get(name, ()):
      op = _OP.match(row)
      for callee, more in called(row, known) if op else ():
        walk(callee, count * more, hidden or op[2] == "async-start")

  walk(entry, 1, False)
  out = []
  for name, count in times.items():
    for row in known.get(name, ()):
      op = _OP.match(row)
      kind = op[2].removesuffix("-start") if op else ""
      if kind in KINDS:
        alone = not op[2].endswith("-start") and name not in beside
        group = 2 if kind == "collective-permute" else group_size(row, devices)  # a neighbour at a time
        out.append(Collective(kind, op[1], largest(op[1]), group, count, alone))
  return out


def gathered_logits(found: list[Collective], vocab: int, width: int) -> list[Collective]:
  """All-gathers whose result has the vocabulary as a dimension and is not a table of word vectors."""
  bad = []
  for c in found:
    dims = [[int(n) for n in d.split(",") if n] for _, d in _SHAPE.findall(c.shapes)]
    if c.kind == "all-gather" and any(vocab in d and width not in d and len(d) > 1 for d in dims):
      bad.append(c)
  return bad
