"""Host objects as bytes without pickle: `encode` turns nested values with numpy arrays, Episodes and Screens into JSON, one
npz of all arrays and a dict of screens; `decode` turns them back, bit for bit.

Held: None, bool, int, float, str, bytes, Enum, list, tuple, dict (any keys), numpy arrays and scalars of any plain type
(bfloat16 too), the dataclasses of core/schema.py and those named to `register`. Anything else is an error that says where
it stands. JSON tags: {"~": kind, ...}; arrays of one type lie end to end in one npz member, because an npz with
thousands of members is slow.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import json
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from core import schema
from core.schema import Screen

_NATIVE = "biufcSUmM"  # numpy's own kinds; others (bfloat16 ...) are stored as unsigned integers of the same size
_CLASSES: dict[str, type] = {}


def register(cls: type) -> type:
  """Let `encode` hold this dataclass or Enum; usable as a decorator. Its name is what the file stores."""
  if not (dataclasses.is_dataclass(cls) or issubclass(cls, enum.Enum)):
    raise ValueError(f"{cls.__name__} is neither a dataclass nor an Enum")
  if _CLASSES.setdefault(cls.__name__, cls) is not cls:
    raise ValueError(f"another class named {cls.__name__} is registered: {_CLASSES[cls.__name__].__module__}")
  return cls


for _cls in vars(schema).values():
  if isinstance(_cls, type) and _cls.__module__ == schema.__name__:
    register(_cls)


def encode(value: Any) -> tuple[bytes, bytes, dict[str, Screen]]:
  """value -> (JSON, npz, screens by ref). A snapshot: later changes to `value`'s arrays do not show, screens excepted."""
  writer = _Writer()
  tree = writer.encode(value, "host")
  return json.dumps(tree, separators=(",", ":")).encode(), writer.npz(), writer.screens


def decode(text: bytes, arrays: bytes, get_screen: Callable[[str], Screen]) -> Any:
  """The inverse of encode. Each screen is fetched once and shared by everything that shows it."""
  with np.load(io.BytesIO(arrays), allow_pickle=False) as f:
    pools = {name: f[name] for name in f.files}
  return _Reader(pools, get_screen).decode(json.loads(text))


class _Writer:
  def __init__(self):
    self.pools: dict[str, list[np.ndarray]] = {}
    self.used: dict[str, int] = {}
    self.screens: dict[str, Screen] = {}

  def encode(self, x: Any, where: str) -> Any:
    if x is None or type(x) in (bool, int, float, str):
      return x
    if isinstance(x, np.ndarray | np.generic):
      return self.array(np.asarray(x), "array" if isinstance(x, np.ndarray) else "number", where)
    if isinstance(x, Screen):
      self.screens[x.ref] = x
      return {"~": "screen", "ref": x.ref}
    if type(x) in (list, tuple):
      items = [self.encode(v, f"{where}[{i}]") for i, v in enumerate(x)]
      return items if type(x) is list else {"~": "tuple", "v": items}
    if type(x) is dict:
      if all(type(k) is str for k in x) and "~" not in x:
        return {k: self.encode(v, f"{where}.{k}") for k, v in x.items()}
      return {"~": "dict", "v": [[self.encode(k, f"{where} key"), self.encode(v, f"{where}[{k!r}]")] for k, v in x.items()]}
    if type(x) is bytes:
      return {**self.array(np.frombuffer(x, np.uint8), "bytes", where)}
    if _CLASSES.get(type(x).__name__) is type(x):
      if isinstance(x, enum.Enum):
        return {"~": "enum", "c": type(x).__name__, "v": self.encode(x.value, where)}
      fields = {f.name: self.encode(getattr(x, f.name), f"{where}.{f.name}") for f in dataclasses.fields(x)}
      return {"~": "object", "c": type(x).__name__, "v": fields}
    raise ValueError(
      f"{where} is a {type(x).__module__}.{type(x).__name__}, which a checkpoint's host state cannot hold; "
      "use plain values, numpy arrays, schema records, or core.blob.register its dataclass"
    )

  def array(self, x: np.ndarray, kind: str, where: str) -> dict:
    if x.dtype.hasobject or x.dtype.names:
      raise ValueError(f"{where} is a numpy array of {x.dtype}, which cannot be stored without pickle")
    name = x.dtype.str if x.dtype.kind in _NATIVE else x.dtype.name
    start = self.used.get(name, 0)
    self.used[name] = start + x.size
    self.pools.setdefault(name, []).append(x.reshape(-1))  # `npz` copies
    return {"~": kind, "d": name, "o": start, "s": list(x.shape)}

  def npz(self) -> bytes:
    out = io.BytesIO()
    whole = {name: np.concatenate(parts, dtype=parts[0].dtype) for name, parts in self.pools.items()}
    np.savez(out, **{n: x if x.dtype.kind in _NATIVE else x.view(f"u{x.itemsize}") for n, x in whole.items()})
    return out.getvalue()


class _Reader:
  def __init__(self, pools: dict[str, np.ndarray], get_screen: Callable[[str], Screen]):
    self.pools = pools
    self.get_screen = get_screen
    self.screens: dict[str, Screen] = {}

  def decode(self, x: Any) -> Any:
    if isinstance(x, list):
      return [self.decode(v) for v in x]
    if not isinstance(x, dict):
      return x
    kind = x.get("~")
    if kind is None:
      return {k: self.decode(v) for k, v in x.items()}
    if kind == "tuple":
      return tuple(self.decode(v) for v in x["v"])
    if kind == "dict":
      return {self.decode(k): self.decode(v) for k, v in x["v"]}
    if kind == "screen":
      if x["ref"] not in self.screens:
        self.screens[x["ref"]] = self.get_screen(x["ref"])
      return self.screens[x["ref"]]
    if kind in ("array", "number", "bytes"):
      found = self.array(x)
      return found if kind == "array" else found[()] if kind == "number" else found.tobytes()
    if kind == "enum":
      return _class(x["c"])(self.decode(x["v"]))
    if kind == "object":
      return self.record(x)
    raise ValueError(f"host state holds a value of unknown kind {kind!r}: written by a newer version")

  def array(self, x: dict) -> np.ndarray:
    pool = self.pools[x["d"]]
    size = int(np.prod(x["s"], dtype=np.int64))
    found = pool[x["o"] : x["o"] + size].reshape(x["s"]).copy()
    return found if np.dtype(pool.dtype).str == x["d"] else found.view(getattr(ml_dtypes, x["d"]))

  def record(self, x: dict) -> Any:
    cls = _class(x["c"])
    known = {f.name for f in dataclasses.fields(cls)}
    if extra := sorted(set(x["v"]) - known):
      raise ValueError(f"stored {x['c']} has field {extra[0]!r}, which this version does not know")
    return cls(**{k: self.decode(v) for k, v in x["v"].items()})


def _class(name: str) -> type:
  if name not in _CLASSES:
    raise ValueError(f"host state holds a {name}, which no module has registered (core.blob.register)")
  return _CLASSES[name]
