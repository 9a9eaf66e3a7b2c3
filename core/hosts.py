"""Processes that are one run, one a host: how they find each other, what they tell each other, what only one of them does.

Every process runs the same train.py over one mesh (core/mesh.py). Each has environments, sampler, queue and random numbers of its own and
gives an equal share of every batch; what all must decide alike they decide from `everyone`. The first writes the workdir's files, each
other one its own under workdir/hosts/INDEX; all write their part of a checkpoint. A host that dies ends the others within `heartbeat`
seconds (an abort, or core.stop.EXIT_PARTED), and supervise.py on each brings its own back: the run goes on from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import pathlib
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import ml_collections
from jax._src import clusters, distributed  # what a cluster says, and the coordinator's key-value store, have no public names

from core.stop import EXIT_PARTED

_STATUS = re.compile(r"(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): ")  # how XLA's errors begin, whatever their type
_PART = 1 << 20  # bytes of a value that the store takes at once
_SLICE = 10.0  # seconds of waiting between two signs of life
_SPARE = 30  # seconds that jax gets beyond ours
_rounds = itertools.count()
_patience = 1800.0
_beat: Callable[[str], None] = lambda what: None


class Parted(Exception):
  """The other processes of the run are not there, or no longer."""


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      # address:port of the first process, which listens there and nowhere else; "auto": the one that TPU pods, Slurm, GKE or Open MPI
      # name; "": JAX_COORDINATOR_ADDRESS where it is set, with JAX_NUM_PROCESSES and JAX_PROCESS_ID, else this process is alone
      "coordinator": "",
      "count": 0,  # processes; read with an address
      "index": -1,  # of this process, the one knob in which hosts differ
      "join": 300.0,  # seconds to wait for the others at the start
      "heartbeat": 10,  # seconds without a sign of a process until the others end
      "patience": 1800.0,  # seconds to wait for what another process has to say
    }
  )


def check(cfg: Any) -> None:
  """ValueError of one line for what cannot be."""
  address, count, index = where(cfg)
  if address in ("", "auto"):
    if count or index >= 0:
      raise ValueError(
        f"hosts.count is {count} and hosts.index {index}, which are read with an address only, but hosts.coordinator is {address!r}: "
        "give address:port of the first process, or leave them out"
      )
    return
  name, _, port = address.rpartition(":")
  if not name or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
    raise ValueError(f"hosts.coordinator is {address!r}, wanted address:port of the first process, or auto")
  if count < 1 or not 0 <= index < count:
    raise ValueError(f"hosts.index is {index} of hosts.count {count}: wanted an index of its own from 0 to count - 1 in every process")


def where(cfg: Any) -> tuple[str, int, int]:
  """(coordinator, count, index) of this process, from the knobs or the environment."""
  if cfg.coordinator or "JAX_COORDINATOR_ADDRESS" not in os.environ:
    return cfg.coordinator, cfg.count, cfg.index
  number = lambda name, default: int(os.environ.get(name, default))
  return os.environ["JAX_COORDINATOR_ADDRESS"], number("JAX_NUM_PROCESSES", cfg.count), number("JAX_PROCESS_ID", cfg.index)


def join(cfg: Any) -> None:
  """Finds the other processes; before anything else asks for a device. Parted where they do not come in time.

  A process that is back while its old companions still hold their places is refused by them until they are gone: it tries again."""
  global _patience
  address, count, index = where(cfg)
  _patience = cfg.patience
  if not address or count == 1:
    return
  jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which is core/stop.py's
  devices = None
  if address == "auto":
    address, count, index, devices = found(cfg.join)
    if count == 1:
      return
  known = {
    "coordinator_address": address, "num_processes": count, "process_id": index, "local_device_ids": devices,
    "coordinator_bind_address": address, "cluster_detection_method": "deactivate",
  }  # fmt: skip
  seconds, began = max(1.0, cfg.join), time.monotonic()
  apart = f"the processes of this run did not come together within {seconds:g} s (hosts.join): "
  why = f"fewer than {count} were started, two with one hosts.index, or process {index} does not reach {address}"
  late = threading.Timer(seconds, _late, [apart + why])
  late.daemon = True
  late.start()
  try:
    while True:
      try:
        if index == 0:
          can_listen(address)
        jax.distributed.initialize(
          **known, initialization_timeout=int(seconds) + _SPARE, heartbeat_timeout_seconds=cfg.heartbeat, shutdown_timeout_seconds=60
        )
        return
      except (RuntimeError, ValueError, OSError) as error:
        distributed.global_state.__init__()
        if isinstance(error, ValueError) and not _STATUS.match(str(error)):  # waiting would not change it
          raise ValueError(f"hosts.coordinator is {cfg.coordinator or address!r}: {error}") from error
        if time.monotonic() > began + seconds - 1:
          raise Parted(f"{apart}{error}") from error
        print(f"not joined yet: {' '.join(str(error).split())[:200]}", file=sys.stderr, flush=True)
        time.sleep(1.0)
  finally:
    late.cancel()


def _late(said: str) -> None:
  """Ends the process, which has begun nothing yet. Left to itself jax aborts it at its own deadline, with a page of C++ frames."""
  print(f"{pathlib.Path(sys.argv[0]).name}: {said}", file=sys.stderr, flush=True)
  os._exit(EXIT_PARTED)


def can_listen(address: str) -> None:
  """Raises where the first process cannot listen there, which jax answers with a segmentation fault: OSError for what may pass (another
  process's port, a name that the cluster does not know yet), ValueError for what stays."""
  name, _, port = address.rpartition(":")
  failed = None
  for family, kind, protocol, _, place in socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_STREAM):
    with socket.socket(family, kind, protocol) as probe:
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was left a moment ago is free
      try:
        probe.bind(place)
        return
      except OSError as error:
        failed = error
  if failed.errno in (errno.EADDRNOTAVAIL, errno.EACCES):
    raise ValueError(f"the first process cannot listen there ({failed.strerror}): wanted an address of its own machine") from failed
  raise OSError(failed.errno, f"{address}: {failed.strerror}") from failed


def found(seconds: float) -> tuple[str, int, int, Any]:
  """(coordinator, count, index, this process's devices or None) as the cluster says. jax's own way would listen on every interface."""
  try:
    address, count, index, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, int(seconds))
  except (RuntimeError, OSError, KeyError) as error:
    raise ValueError(f"hosts.coordinator is 'auto', and the cluster does not say where: {' '.join(str(error).split())[:200]}") from error
  if None in (address, count, index):
    raise ValueError(
      "hosts.coordinator is 'auto', but there is no cluster here that auto knows (TPU pods, Slurm, GKE, Open MPI): give address:port of "
      "the first process"
    )
  return address, count, index, devices


def alone() -> bool:
  """Whether this process is the whole run. Asks for no device."""
  return not jax.distributed.is_initialized() or jax.process_count() == 1


def part() -> None:
  """At the end of a run that all processes have come to: waits for the others, so that none takes the end of one for its death."""
  if not alone():
    jax.distributed.shutdown()


def own(workdir: pathlib.Path) -> pathlib.Path:
  """The folder that this process alone writes: the workdir in the first one."""
  return workdir if jax.process_index() == 0 else workdir / "hosts" / str(jax.process_index())


def everyone(value: Any) -> list[Any]:
  """What each process says, in their order; plain values as JSON holds them. All must call this in the same places."""
  if alone():
    return [value]
  turn = next(_rounds)  # all have spoken in this round, so none is behind the one before
  return [json.loads(text) for text in _exchange(str(turn), json.dumps(value).encode(), over=str(turn - 2) if turn > 1 else "")]


def parted(error: BaseException) -> bool:
  """Whether an error says that the other processes are gone: a collective that broke off, too."""
  return isinstance(error, Parted) or not alone() and bool(_STATUS.match(str(error)))


def share(number: int, name: str) -> int:
  """This process's equal part of what a knob says of the whole run. ValueError where there is none."""
  count = 1 if alone() else jax.process_count()
  if number % count:
    raise ValueError(f"{name} is {number}, wanted a multiple of the {count} processes of this run: each gives an equal share")
  return number // count


def deal(things: list) -> list:
  """Every count-th of things that all processes have alike, from this one's index on."""
  return things if alone() else things[jax.process_index() :: jax.process_count()]


def most(number: int) -> int:
  """The largest of what the processes say."""
  return max(everyone(number))


@contextlib.contextmanager
def together(name: str):
  """What all processes do, and have done when this ends: an error of one is an error in every one (OSError with its words where it is
  another's). For threads beside the main one too: no device is asked, and `everyone` is not mixed up. name: of this meeting alone."""
  error = None
  try:
    yield
  except Exception as own:
    if alone():
      raise
    error = own
  if alone():
    return
  try:
    said = _exchange(name, b"" if error is None else f"{type(error).__name__}: {error}".encode())
  except Parted as lost:
    raise lost from (error or lost.__cause__)
  if error is not None:
    raise error
  if told := [f"process {i}: {words.decode()}" for i, words in enumerate(said) if words]:
    raise OSError(told[0])


def patience() -> float | None:
  """Seconds that other processes wait for what this one does; None where there are none."""
  return None if alone() else _patience


def forget(name: str) -> None:
  """What was said in meetings under this name; after a later one, to which all that were in it have come."""
  if name and not alone() and jax.process_index() == 0:
    distributed.global_state.client.key_value_delete(f"practice/{name}/")


def _exchange(name: str, mine: bytes, over: str = "") -> list[bytes]:
  """Every process's bytes, by the coordinator's store: no device is asked, nothing compiles. name: of this exchange alone; over: the name
  of one that all have left, which is forgotten."""
  try:
    found = _exchanged(f"practice/{name}", mine)
    forget(over)
  except RuntimeError as error:
    raise Parted(f"a process of this run did not answer: {' '.join(str(error).split())[:200]}") from error
  return found


def _exchanged(place: str, mine: bytes) -> list[bytes]:
  client, index = distributed.global_state.client, jax.process_index()
  parts = [mine[i : i + _PART] for i in range(0, len(mine), _PART)] or [b""]
  client.key_value_set_bytes(f"{place}/{index}", str(len(parts)).encode())
  for i, part in enumerate(parts):
    client.key_value_set_bytes(f"{place}/{index}/{i}", part)
  until, found = time.monotonic() + _patience, []
  wait = lambda key: _awaited(client, key, until)
  for other in range(jax.process_count()):
    n = int(wait(f"{place}/{other}"))
    found.append(b"".join(wait(f"{place}/{other}/{i}") for i in range(n)) if other != index else mine)
  return found


def _awaited(client: Any, key: str, until: float) -> bytes:
  """What another process says, with a sign of life meanwhile: this wait has a limit of its own (`patience`), and a process that hangs is
  ended by its own watchdog, not by those of all others."""
  while True:
    left = until - time.monotonic()
    try:
      return client.blocking_key_value_get_bytes(key, max(1, int(1000 * min(_SLICE, left))))
    except RuntimeError as error:
      if "DEADLINE_EXCEEDED" not in str(error) or left <= _SLICE:
        raise
      if threading.current_thread() is threading.main_thread():  # another thread's waiting is no sign of the main one's life
        _beat("waiting for other processes")


def watched(beat: Callable[[str], None]) -> None:
  """beat(what): called now and then while other processes are waited for (core/watchdog.py)."""
  global _beat
  _beat = beat


def same_config(resolved: dict[str, Any]) -> None:
  """ValueError naming what differs where the processes were not started with one config; before anything compiles."""
  flat = {k: v for k, v in _flat("config", resolved) if k != "config.hosts.index"}
  first = everyone(flat)[0]
  found = everyone({k: flat.get(k) for k in sorted(first.keys() | flat.keys()) if first.get(k) != flat.get(k)})
  other = next((i for i, differs in enumerate(found) if differs), None)
  if other is not None:
    part()  # all know by now; the first one would take the others with it if it just ended
    name, got = next(iter(found[other].items()))
    more = f" (and {len(found[other]) - 1} more)" if len(found[other]) > 1 else ""
    raise ValueError(f"{name}{more} is {got!r} in process {other} and {first.get(name)!r} in process 0: start all with one config")


def _flat(name: str, value: Any):
  if isinstance(value, dict):
    for k, v in value.items():
      yield from _flat(f"{name}.{k}", v)
  else:
    yield name, value
