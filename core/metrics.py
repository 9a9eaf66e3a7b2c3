"""What a run writes while it goes on (TensorBoard event files and metrics.jsonl), and what watches it: timers, a counter of
compilations, alarms, the line printed for each update.

Every scalar of every update is one key of one line in metrics.jsonl (TensorBoard shows 1,000 points a curve and 10 pictures
unless started with --samples_per_plugin=scalars=0,images=1000; analysis reads the JSON lines). Tags are those of
docs/reading_a_run.md.
"""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import os
import pathlib
import re
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams import metadata as hparams_plugin
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.plugins.text import metadata as text_plugin
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util

from core import layout
from core.find import nearest
from core.knobs import require
from core.screens import encode_png

MAX_TAGS = 60  # more make TensorBoard crawl; a number per task belongs in the episode store
NONFINITE = "diagnosis/nonfinite"
SHARES = ("environments", "sampling", "training", "publish", "waiting")
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_TAG = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*\Z")


class Metrics:
  """Writer of one run. start_update: the first update this session will write; anything at or after it, left by a session
  that went further than its last checkpoint, is dropped from both files' readers. knobs: the run's config, nested, for TensorBoard's
  table of runs. active=False writes nothing (other hosts)."""

  def __init__(
    self, workdir: str | os.PathLike, start_update: int = 0, knobs: Mapping[str, Any] | None = None, active: bool = True
  ):  # fmt: skip
    self.workdir = pathlib.Path(os.path.abspath(workdir))
    self.active = active
    self.tags: set[str] = set()
    self.nonfinite = 0  # values so far that were NaN or infinite
    self._last = start_update - 1
    self._closed = False
    if not active:
      return
    self.workdir.mkdir(parents=True, exist_ok=True)
    path = self.workdir / "metrics.jsonl"
    self.nonfinite = _rewind(path, start_update)
    self._lines = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    self._events = EventFileWriter(str(self.workdir))
    # A START mark tells every reader of event files to forget what earlier sessions wrote at this step and later.
    mark = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._events.add_event(event_pb2.Event(wall_time=time.time(), step=start_update, session_log=mark))
    self._add(start_update, [*layout.summary().value, *([_hparams(knobs)] if knobs else [])])

  def __enter__(self) -> Metrics:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def write(self, update: int, scalars: Mapping[str, Any]) -> dict[str, float | int | None]:
    """All scalars of one update, once per update; on disk when this returns. Returns the row without `update`.

    NaN and infinite values are null in the row, left out of TensorBoard and counted in diagnosis/nonfinite.
    """
    if update != int(update) or update <= self._last:
      raise ValueError(f"metrics of update {update} after update {self._last}: write each update once, in order")
    row = {tag: _number(tag, value) for tag, value in scalars.items()}
    self.nonfinite += sum(not math.isfinite(v) for v in row.values())
    row[NONFINITE] = self.nonfinite
    self._admit(row)
    self._last = int(update)
    row = {tag: value if math.isfinite(value) else None for tag, value in row.items()}
    if self.active:
      line = json.dumps({"update": int(update)} | row, allow_nan=False) + "\n"
      _append(self._lines, line.encode())
      values = [summary_pb2.Summary.Value(tag=t, simple_value=v) for t, v in row.items() if v is not None]
      self._add(update, values)
    return row

  def final(self, update: int, scalars: Mapping[str, float]) -> None:
    """What was measured after the last update, as points of TensorBoard alone: a row of metrics.jsonl is an update, and summary.json
    has these."""
    if self.active:
      self._add(update, [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()])

  def image(self, tag: str, pixels: np.ndarray, update: int) -> None:
    """A picture, uint8 [H, W, 3]."""
    _check_tag(tag)
    if self.active:
      height, width, _ = pixels.shape
      shown = summary_pb2.Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encode_png(pixels))
      self._add(update, [summary_pb2.Summary.Value(tag=tag, image=shown)])

  def text(self, tag: str, text: str, update: int = 0) -> None:
    """A text; TensorBoard renders it as Markdown. Indent by four spaces what must stay as it is."""
    _check_tag(tag)
    if self.active:
      tensor = tensor_util.make_tensor_proto(np.array([text.encode()], dtype=object))
      kind = text_plugin.create_summary_metadata(display_name=tag, description="")
      self._add(update, [summary_pb2.Summary.Value(tag=tag, tensor=tensor, metadata=kind)])

  def flush(self) -> None:
    if self.active and not self._closed:
      self._events.flush()

  def close(self) -> None:
    if self.active and not self._closed:
      self._closed = True
      self._events.close()
      os.close(self._lines)

  def _admit(self, row: Mapping[str, Any]) -> None:
    new = [t for t in row if t not in self.tags]
    for tag in new:
      _check_tag(tag)
    if len(self.tags) + len(new) > MAX_TAGS:
      raise ValueError(
        f"{len(self.tags) + len(new)} scalar tags with {new[-1]}, at most {MAX_TAGS} are written; "
        "put numbers per task or per episode into the episode store"
      )
    self.tags.update(new)

  def _add(self, update: int, values: list) -> None:
    self._events.add_event(event_pb2.Event(wall_time=time.time(), step=int(update), summary=summary_pb2.Summary(value=values)))
    self._events.flush()


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Rows of a metrics.jsonl. A last line without its end (the writer was killed, or is writing) is left out."""
  whole = pathlib.Path(path).read_bytes().rpartition(b"\n")[0]
  return [json.loads(line) for line in whole.splitlines()]


def _hparams(knobs: Mapping[str, Any]) -> summary_pb2.Summary.Value:
  """Every knob by its dotted name: TensorBoard's hparams tab shows those in which the runs of a sweep differ, beside their curves."""
  info = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
  for name, value in leaves(knobs):
    kind = "bool_value" if isinstance(value, bool) else "number_value" if isinstance(value, numbers.Real) else "string_value"
    setattr(info.hparams[name], kind, str(value) if kind == "string_value" else value)
  kind = hparams_plugin.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_start_info=info))
  tag = hparams_plugin.SESSION_START_INFO_TAG
  return summary_pb2.Summary.Value(tag=tag, metadata=kind, tensor=hparams_plugin.NULL_TENSOR)


def leaves(knobs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
  """("agent.clip_high", 0.28) ... of nested dicts."""
  for name, value in knobs.items():
    if isinstance(value, Mapping):
      yield from leaves(value, f"{prefix}{name}.")
    else:
      yield prefix + name, value


def _number(tag: str, value: Any) -> float | int:
  """A Python int or float. Arrays of one element are fine; anything else is the caller's mistake."""
  if isinstance(value, numbers.Real) and not isinstance(value, np.generic):
    return int(value) if isinstance(value, numbers.Integral) else float(value)
  found = np.asarray(value)
  if found.size != 1 or not (found.dtype.kind in "biuf" or found.dtype.name.startswith(("bfloat", "float"))):
    raise ValueError(f"metric {tag} is {type(value).__name__} {found.dtype} {found.shape}, wanted one number")
  return int(found.item()) if found.dtype.kind in "biu" else float(found.item())


def _check_tag(tag: str) -> None:
  if not isinstance(tag, str) or not _TAG.match(tag) or tag == "update":
    raise ValueError(f"metric tag {tag!r}, wanted letters, digits, '_', '.', '-' and '/' between parts, e.g. reward/mean")


def _append(handle: int, line: bytes) -> None:
  """One write call a line: a reader sees whole lines, and a kill cuts at most the last one."""
  done = os.write(handle, line)
  while done < len(line):  # the disk is full or a signal came; go on, so that a line is never left half
    done += os.write(handle, line[done:])


def _rewind(path: pathlib.Path, start_update: int) -> int:
  """Keep the rows before start_update; returns their last count of non-finite values. Streams: a long run has a large file."""
  if not path.exists():
    return 0
  temp, nonfinite = path.with_name(".metrics.jsonl.tmp"), 0
  with open(path, "rb") as old, open(temp, "wb") as new:
    for line in old:
      try:
        row = json.loads(line)
        keep = line.endswith(b"\n") and row["update"] < start_update
      except (ValueError, TypeError, KeyError):  # cut by a kill
        keep = False
      if keep:
        new.write(line)
        nonfinite = row.get(NONFINITE) or 0
    new.flush()
    os.fsync(new.fileno())
  os.replace(temp, path)
  return nonfinite


# ---- instruments


class Timers:
  """`with timers("sampling"): ...` -> time/* tags: shares of the wall time since the last reading.

  Inside one thread a timer within a timer stops the outer one, so shares add up to at most 1. Threads are added: with
  sampling and training side by side the sum may exceed 1. A section still open when read counts up to that moment.
  """

  def __init__(self, clock: Callable[[], float] = time.perf_counter, names: tuple[str, ...] = SHARES):
    self._clock = clock
    self._seconds = dict.fromkeys(names, 0.0)
    self._lock = threading.Lock()
    self._open: dict[int, list[str]] = {}  # thread -> names of its open sections, the innermost last
    self._since: dict[int, float] = {}  # thread -> from when its innermost section is not yet charged
    self._start = clock()

  @contextlib.contextmanager
  def __call__(self, name: str) -> Iterator[None]:
    self._check(name)
    thread = threading.get_ident()
    with self._lock:
      self._charge(thread)
      self._open.setdefault(thread, []).append(name)
    try:
      yield
    finally:
      with self._lock:
        self._charge(thread)
        self._open[thread].pop()
        if not self._open[thread]:
          del self._open[thread], self._since[thread]

  def add(self, name: str, seconds: float) -> None:
    """Seconds of `name` that were measured elsewhere; taken out of the section this thread has open, if any."""
    self._check(name)
    thread = threading.get_ident()
    with self._lock:
      self._charge(thread)
      self._seconds[name] += seconds
      if thread in self._open:
        outer = self._open[thread][-1]
        self._seconds[outer] -= min(seconds, self._seconds[outer])

  def shares(self) -> dict[str, float]:
    """{"time/sampling": 0.61, ...} since the last call, every name always there; starts anew."""
    with self._lock:
      for thread in self._open:
        self._charge(thread)
      now = self._clock()
      wall = now - self._start
      out = {f"time/{n}": s / wall if wall > 0 else 0.0 for n, s in self._seconds.items()}
      self._seconds = dict.fromkeys(self._seconds, 0.0)
      self._start = now
    return out

  def _check(self, name: str) -> None:
    if name not in self._seconds:
      raise ValueError(f"no timer {name!r}{nearest(name, self._seconds)}; there are: {', '.join(self._seconds)}")

  def _charge(self, thread: int) -> None:
    now = self._clock()
    if thread in self._open:
      self._seconds[self._open[thread][-1]] += now - self._since[thread]
    self._since[thread] = now


class CompileCounter:
  """Counts XLA compilations of this process while open; `rate/compiles` should be 0 once a run is warm."""

  def __init__(self):
    self.total = 0
    self.seconds = 0.0
    self._taken = 0
    self._lock = threading.Lock()
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def __enter__(self) -> CompileCounter:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def _listen(self, event: str, seconds: float, **kwargs: Any) -> None:
    if event == _COMPILE_EVENT:
      with self._lock:
        self.total += 1
        self.seconds += seconds

  def take(self) -> int:
    """Compilations since the last take."""
    with self._lock:
      new, self._taken = self.total - self._taken, self.total
    return new

  def close(self) -> None:
    jax.monitoring.unregister_event_duration_listener(self._listen)


SILENT = 30.0  # seconds after which long work says how far it is


class Progress:
  """Prints one line an update: `update 12/40  success 31%  all-equal 45%  entropy 1.32  84 episodes/min  0:12:31 left`."""

  FORMS = {
    "success": "success {:.0%}",
    "all_equal": "all-equal {:.0%}",
    "entropy": "entropy {:.2f}",
    "episodes_a_minute": "{:.0f} episodes/min",
  }

  def __init__(
    self,
    name: str,
    total: int,
    done: int = 0,
    out: Callable[[str], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
  ):
    self.name = name
    self.total = total
    self._out = out or (lambda text: print(text, flush=True))
    self._clock = clock
    self._last = (done, clock())
    self._paces: deque[float] = deque(maxlen=10)  # seconds an update; old ones (the compiling ones) fall out

  def line(self, done: int, **values: float | str | None) -> str:
    """done: updates finished so far. values: what to show, in order; None, NaN and '' are left out, a text stands as it is."""
    now = self._clock()
    if done > self._last[0]:
      self._paces.append((now - self._last[1]) / (done - self._last[0]))
    self._last = (done, now)
    parts = [f"{self.name} {done}/{self.total}"]
    for name, value in values.items():
      if isinstance(value, str):
        parts += [value] if value else []
      elif _finite(value) is not None:
        parts.append(self.FORMS.get(name, name + " {:.3g}").format(value))
    if self._paces:
      parts.append(f"{_clock_time(statistics.median(self._paces) * max(0, self.total - done))} left")
    text = "  ".join(parts)
    self._out(text)
    return text

  def seldom(self, done: int) -> None:
    """A line where none came for SILENT seconds: between those that come after a number of updates, which may take their time."""
    if self._clock() - self._last[1] >= SILENT:
      self.line(done)


def defaults() -> dict[str, Any]:
  """Knobs of `Alarms`. Each is off at 0."""
  return {
    "entropy_low": 0.2,  # collapse: entropy under this share of its start (as in tools/diagnose)
    "entropy_high": 1.8,  # explosion: entropy over this multiple of its start, and 0.3 nats above it
    "all_equal": 0.8,  # share of groups that teach nothing, mean over `window` updates
    "mismatch": 0.01,  # policy/mismatch_kl between sampler and trainer on fresh episodes
    "age": 4,  # episodes/age_max
    "infra_error": 0.1,  # share of tries lost to the computers, mean over `window` updates
    "window": 5,
    "learnt": 0.9,  # from this success on, equal groups and low entropy are no fault
  }


def check(cfg: Mapping[str, Any]) -> None:
  """Domains of the alarms' knobs; each failure one line."""
  wanted = {name: (cfg[name] >= 0, "0 (off) or more") for name in defaults()}
  require("alarms", cfg, wanted | {"window": (cfg["window"] >= 1, "1 or more updates")})


class Alarms:
  """Looks at every row and gives a diagnosis/* tag (1 = ringing) per alarm; the log gets one line when one begins to ring.

  The entropy at the start is the median of the first `window` updates that do not ring low; `state`/`load` carry it through a checkpoint.
  """

  NAMES = ("entropy_low", "entropy_high", "all_equal", "mismatch", "age", "infra_error")

  def __init__(self, cfg: Mapping[str, Any] | None = None, out: Callable[[str], Any] = logging.warning):
    for key in cfg or {}:
      if key not in defaults():
        raise ValueError(f"no alarm knob {key!r}{nearest(key, defaults())}; there are: {', '.join(defaults())}")
    self.cfg = defaults() | dict(cfg or {})
    self._out = out
    self._first: list[float] = []  # entropies of the first updates
    self._recent: dict[str, list[float]] = {"all_equal": [], "infra_error": []}
    self._ringing: list[str] = []

  def check(self, update: int, scalars: Mapping[str, Any]) -> dict[str, int]:
    """Tags for the row of this update. What a row lacks, or has as NaN or null, rings no alarm."""
    # of what was sampled: an update's many steps may take the policy far, and a run all of whose groups are equal trains on nothing
    heard = self._entropy(_finite(scalars.get("policy/entropy_sampled", scalars.get("policy/entropy"))))
    passed, failed = _finite(scalars.get("groups/all_pass")), _finite(scalars.get("groups/all_fail"))
    equal = None if passed is None or failed is None else passed + failed
    heard["all_equal"] = self._above("all_equal", self._mean("all_equal", equal), "of the groups teach nothing: all equal")
    heard["infra_error"] = self._above(
      "infra_error",
      self._mean("infra_error", _finite(scalars.get("episodes/infra_error"))),
      "of the tries were lost to infra errors",
    )
    heard["mismatch"] = self._above(
      "mismatch", _finite(scalars.get("policy/mismatch_kl")), "KL between sampler and trainer on the same weights"
    )
    heard["age"] = self._above("age", _finite(scalars.get("episodes/age_max")), "versions is the oldest episode trained on")
    success = _finite(scalars.get("reward/success"))
    if self.cfg["learnt"] and success is not None and success >= self.cfg["learnt"]:
      heard |= {"entropy_low": "", "all_equal": ""}  # tries that nearly all pass agree because there is little left to learn
    for name in self.NAMES:
      if heard[name] and name not in self._ringing:
        self._out(f"ALARM {name} at update {update}: {heard[name]}")
    self._ringing = [n for n in self.NAMES if heard[n]]
    return {f"diagnosis/{n}": int(n in self._ringing) for n in self.NAMES}

  def state(self) -> dict[str, Any]:
    return {"first": list(self._first), "recent": {k: list(v) for k, v in self._recent.items()}, "ringing": list(self._ringing)}

  def restore(self, state: Mapping[str, Any]) -> None:
    self._first, self._ringing = list(state["first"]), list(state["ringing"])
    self._recent = {k: list(v) for k, v in state["recent"].items()}

  def _entropy(self, now: float | None) -> dict[str, str]:
    heard = {"entropy_low": "", "entropy_high": ""}
    if now is None:
      return heard
    low, high = self.cfg["entropy_low"], self.cfg["entropy_high"]
    if len(self._first) < self.cfg["window"] and not (self._first and now < low * self._first[0]):  # a fall is no start
      self._first.append(now)
    start = statistics.median(self._first)
    # The first entropies are compared with the very first, so that a policy gone in two updates is heard as well.
    start = self._first[0] if len(self._first) < self.cfg["window"] else start
    if low and now < low * start:
      heard["entropy_low"] = f"entropy {now:.3g} is under {low:g} of its start {start:.3g}: the tries collapse into one"
    if high and now > high * start and now > start + 0.3:
      heard["entropy_high"] = f"entropy {now:.3g} is over {high:g} times its start {start:.3g}: the policy dissolves into noise"
    return heard

  def _mean(self, name: str, value: float | None) -> float | None:
    recent = self._recent[name]
    if value is not None:
      recent.append(value)
      del recent[: -self.cfg["window"]]
    return sum(recent) / len(recent) if len(recent) >= self.cfg["window"] else None

  def _above(self, name: str, value: float | None, words: str) -> str:
    limit = self.cfg[name]
    return f"{value:.3g} {words} (limit {limit:g})" if limit and value is not None and value > limit else ""


def _finite(value: Any) -> float | None:
  return float(value) if value is not None and math.isfinite(value) else None


def _clock_time(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
