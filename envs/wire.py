"""What trainer and worker say to each other: a length, then JSON. Values come out with the types they went in with; no pickle.

Lists, dicts, text, numbers, booleans and None are JSON's own. A tuple, a numpy array or number, bytes, and the nouns Task,
Limits, Action and Unreadable travel as {"$": kind, "v": value}, as do numbers that remember their spelling (envs.grammars.lex), so
that an episode through a worker equals one in process.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
from typing import Any

import numpy as np

from core.schema import Action, Limits, Task, Unreadable
from envs.grammars.lex import Written

MOST_BYTES = 64 << 20  # a longer message is a fault: what is large goes through shared memory
HEAD = struct.Struct(">I")
NOUNS = {noun.__name__: noun for noun in (Task, Limits, Action, Unreadable)}
TAG = "$"


class WireError(ValueError):
  """Bytes that are no message."""


def pack(message: dict) -> bytes:
  """One message, ready to be sent. TypeError, naming the place, if something in it cannot travel."""
  body = json.dumps(to_plain(message), separators=(",", ":")).encode()
  if len(body) > MOST_BYTES:
    raise WireError(f"a message of {len(body)} bytes, wanted {MOST_BYTES} at most")
  return HEAD.pack(len(body)) + body


class Reader:
  """Puts messages together from bytes as they come, in pieces of any size."""

  def __init__(self):
    self._held = bytearray()

  def feed(self, data: bytes) -> list[dict]:
    self._held += data
    out = []
    while len(self._held) >= HEAD.size:
      (length,) = HEAD.unpack_from(self._held)
      if length > MOST_BYTES:
        raise WireError(f"a message of {length} bytes is announced, wanted {MOST_BYTES} at most")
      if len(self._held) < HEAD.size + length:
        break
      body = bytes(self._held[HEAD.size : HEAD.size + length])
      del self._held[: HEAD.size + length]
      try:
        message = from_plain(json.loads(body))
      except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"not a message: {error}") from error
      if not isinstance(message, dict):
        raise WireError(f"a message is a {type(message).__name__}, wanted a dict")
      out.append(message)
    return out


def to_plain(x: Any, path: str = "message") -> Any:
  """The value in JSON's own types."""
  kind = type(x)
  if x is None or kind in (bool, int, float, str):
    return x
  if kind is dict:
    if TAG not in x and all(type(k) is str for k in x):
      return {k: to_plain(v, f"{path}.{k}") for k, v in x.items()}
    return {TAG: "dict", "v": [[to_plain(k, path), to_plain(v, f"{path}[{k!r}]")] for k, v in x.items()]}
  if kind in (list, tuple):
    items = [to_plain(v, f"{path}[{i}]") for i, v in enumerate(x)]
    return items if kind is list else {TAG: "tuple", "v": items}
  if kind.__name__ in NOUNS and NOUNS[kind.__name__] is kind:
    fields = {f.name: to_plain(getattr(x, f.name), f"{path}.{f.name}") for f in dataclasses.fields(x)}
    return {TAG: kind.__name__, "v": fields}
  if kind is Written:
    return {TAG: "written", "v": x.text}
  if kind is bytes:
    return {TAG: "bytes", "v": base64.b64encode(x).decode()}
  if isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind in "biuf":
    data = base64.b64encode(np.ascontiguousarray(x).tobytes()).decode()
    return {TAG: "array" if isinstance(x, np.ndarray) else "number", "v": [x.dtype.str, list(x.shape), data]}
  raise TypeError(f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot leave a worker: wanted plain values")


def from_plain(x: Any) -> Any:
  """The inverse of `to_plain`."""
  if isinstance(x, list):
    return [from_plain(v) for v in x]
  if not isinstance(x, dict):
    return x
  if TAG not in x:
    return {k: from_plain(v) for k, v in x.items()}
  tag, value = x[TAG], x["v"]
  if tag == "tuple":
    return tuple(from_plain(v) for v in value)
  if tag == "dict":
    return {from_plain(k): from_plain(v) for k, v in value}
  if tag == "written":
    return Written(value)
  if tag == "bytes":
    return base64.b64decode(value)
  if tag in ("array", "number"):
    dtype, shape, data = value
    array = np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape)
    return array.copy() if tag == "array" else array[()]
  if tag not in NOUNS:
    raise WireError(f"unknown kind of value {tag!r}")
  return NOUNS[tag](**{k: from_plain(v) for k, v in value.items()})
