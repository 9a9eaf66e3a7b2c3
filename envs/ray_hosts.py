"""Backend `ray`: the computers of a pool on the hosts of a Ray cluster. One actor a host owns its workers, which envs.local starts.

  Pool(spec, cfg, backend=RayBackend(slots))                     # a cluster of this machine alone, on loopback, gone with the pool
  Pool(spec, cfg, backend=RayBackend(slots, address="10.0.0.1:6379"))      # the hosts of a cluster that stands

Messages cross hosts as the bytes of envs.wire, screenshots as arrays beside them; shared memory stays inside a host. A host is begun
under an epoch, a number that grows: what an older epoch asked for is refused, and what it left is ended first, so that an actor that
Ray started anew, or one that was only out of reach, never carries out anything twice. Ray is imported when a backend is made.
"""

from __future__ import annotations

import collections
import os
import pathlib
import queue
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np

from envs import processes
from envs.local import ROOT
from envs.ray_actor import Host
from envs.wire import Reader, WireError, pack

SILENCE = 20.0  # seconds without a word after which a host's actor is ended and started anew
START = 120.0  # seconds for an actor to come up
PATIENCE = 5.0  # seconds for an answer about one worker
RETURN = 15.0  # seconds for which computers wait for a host that was lost rather than go to another
LOOK = 2.0  # seconds between looks for new hosts
LOOPBACK = "127.0.0.1"
# Ray gives a node its outside address, even one that is told a loopback address, and listens on all there are; under this switch,
# made for systems with a firewall that asks, it keeps to loopback.
KEEP_TO_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


class RayRemote:
  """One worker process on some host, with the manners of envs.local.LocalRemote. pid, started: once the host has said them."""

  def __init__(self, backend: RayBackend, host: HostLine, key: int):
    self.backend, self.host, self.key = backend, host, key
    self.pid = self.started = None
    self.how = self.garbled = ""  # how it ended; why it could not be understood
    self._said: collections.deque[tuple[bytes, Any]] = collections.deque()
    self._lines: list[str] = []

  def hear(self, kind: str, what: Any) -> None:
    """Takes a word of the host."""
    if kind == "pid":
      self.pid, self.started = what
      return
    if kind == "message":
      self._said.append(what)
    else:
      self.how, self._lines, self.garbled = what
    self.backend.ready[self] = None

  def send(self, message: dict) -> None:
    """OSError if the worker is known to be gone; one that is lost while the message travels is found out later, as ambiguous."""
    data = pack(message)
    if self.how:
      raise BrokenPipeError(self.how)
    self.host.ask("send", self.key, data)

  def receive(self) -> list[dict]:
    out = []
    while self._said:
      data, pixels = self._said.popleft()
      (message,) = Reader().feed(data)
      if pixels is not None:
        message["result"]["screen"] = pixels
      out.append(message)
    if not self.how:
      self.backend.ready.pop(self, None)
    elif not out:
      raise WireError(self.garbled) if self.garbled else EOFError
    return out

  def size(self, shape: tuple[int, ...]) -> None:
    self.host.ask("size", self.key, tuple(shape))

  def pixels(self, told: np.ndarray | Exception, token: int) -> np.ndarray:
    """A copy of the screenshot that came with the message; BadFrame if the host found it torn or stale. The host compared tokens."""
    del token
    if isinstance(told, Exception):
      raise told
    return np.array(told)

  def _look(self) -> tuple[str, list[str]]:
    return (self.how, self._lines) if self.how else self.host.look(self.key)

  def fate(self, wait: float = 0.0) -> str:
    """'running', or how the process or its host ended."""
    del wait  # the host has waited
    return self._look()[0]

  def last_lines(self) -> list[str]:
    return self._look()[1]

  def terminate(self) -> None:
    if not self.how:
      self.host.ask("terminate", self.key)

  def kill(self) -> None:
    self.backend.ready.pop(self, None)
    if self.backend.remotes.pop(self.key, None) is not None and not self.how:
      self.host.ask("kill", self.key)


class NodeGone(Exception):
  """The cluster has given a node up."""


class HostLine:
  """The trainer's end of the line to one host. A thread of its own waits for what the host says; the pool's thread asks."""

  def __init__(self, backend: RayBackend, node: dict):
    self.backend, self.node = backend, node["NodeID"]
    self.name = f"host {node['NodeManagerAddress']} (node {node['NodeID'][:8]})"
    self.state, self.since, self.cause = "coming", time.monotonic(), ""  # or "up", or "dead" for good
    self.epoch = self.number = 0
    self.process: tuple[int, int | None] | None = None
    self.unanswered = -PATIENCE  # when it last left a question without an answer
    self._waiting: list[tuple[str, int, Any]] = []
    ray = backend.ray
    place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "scheduling_strategy": place}
    if str(ROOT) not in (os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0]))):  # where Ray's workers look by themselves
      options["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), "${PYTHONPATH}"])}}  # takes twice the time
    self.actor = ray.remote(Host).options(**options).remote(backend.log_lines)
    self.thread = threading.Thread(target=self._listen, name=self.name, daemon=True)
    self.thread.start()

  def _listen(self) -> None:
    """The thread: begins epoch after epoch, as often as the actor is lost, until the host is gone for good or the pool is closed."""
    ray, epoch, left = self.backend.ray, 0, time.monotonic()
    while not self.backend.closed:
      epoch, up = epoch + 1, False
      try:
        process = self._begin(epoch)
        up = True
        self._tell("up", (epoch, process))
        while True:
          self._tell("said", ray.get(self.actor.hear.remote(epoch), timeout=SILENCE))
      except ray.exceptions.GetTimeoutError:
        cause = f"no word in {SILENCE if up else START:g} s"
        ray.kill(self.actor, no_restart=False)
      except ray.exceptions.ActorDiedError as error:
        return self._tell("dead", short(error))
      except (ray.exceptions.RayError, NodeGone) as error:
        cause = short(error)
      if not self._alive():
        ray.kill(self.actor, no_restart=True)
        return self._tell("dead", f"its node has died: {cause}")
      if up or time.monotonic() - left > RETURN:  # what waits for it need not wait any longer
        left = time.monotonic()
        self._tell("lost", cause)
      time.sleep(0.2)
    return None

  def _begin(self, epoch: int) -> tuple[int, int | None]:
    """Begins the epoch once the actor is there. NodeGone if it never will be."""
    ref, until = self.actor.begin.remote(epoch, self.backend.slots), time.monotonic() + START
    while not self.backend.ray.wait([ref], timeout=1.0)[0] and time.monotonic() < until:
      if not self._alive():
        raise NodeGone("its actor waits for it in vain")
    return self.backend.ray.get(ref, timeout=1.0)

  def _alive(self) -> bool:
    """Whether the cluster still counts on the node."""
    return any(node["NodeID"] == self.node and node["Alive"] for node in self.backend.ray.nodes())

  def _tell(self, kind: str, what: Any) -> None:
    self.backend.inbox.put((self, kind, what))

  def ask(self, op: str, key: int, what: Any = None) -> None:
    """Sends a command once, never again; while the host comes up it waits for it."""
    if self.state == "up":
      self.actor.do.remote(self.epoch, self.number, op, key, what)
      self.number += 1
    elif self.state == "coming":
      self._waiting.append((op, key, what))

  def look(self, key: int) -> tuple[str, list[str]]:
    """How a worker fares and what it printed last, if the host answers; one that just did not is not asked again at once."""
    if self.state == "up" and time.monotonic() - self.unanswered > PATIENCE:
      try:
        return self.backend.ray.get(self.actor.look.remote(self.epoch, key), timeout=PATIENCE)
      except self.backend.ray.exceptions.RayError:
        self.unanswered = time.monotonic()
    return f"nothing known, {self.name} is {self.state if self.state != 'up' else 'without an answer'}", []

  def hear(self, kind: str, what: Any) -> None:
    """Takes a word of the thread, in the pool's own."""
    remotes = self.backend.remotes
    if kind == "said":
      for key, about, value in what:
        if key in remotes:
          remotes[key].hear(about, value)
    elif kind == "up":
      (self.epoch, self.process), self.number, self.state = what, 0, "up"
      waiting, self._waiting = self._waiting, []
      for command in waiting:
        self.ask(*command)
    else:
      self.state, self.cause = "dead" if kind == "dead" else "coming", what
      self.since = time.monotonic()
      self._end_all(f"was lost: {what}")

  def _end_all(self, how: str) -> None:
    """All that was to run there has ended, or never began."""
    self._waiting = []
    for remote in [r for r in self.backend.remotes.values() if r.host is self and not r.how]:
      remote.hear("end", (f"{self.name} {how}", [], ""))

  @property
  def late(self) -> bool:
    """Whether what waits for it should go elsewhere: it was lost and has not come back, or was never there, for too long."""
    return self.state == "coming" and time.monotonic() - self.since > (RETURN if self.epoch else START)

  def give_up(self) -> None:
    """Computers that wait for a late host start on another, as after a fault."""
    if self.late and self._waiting:
      self._end_all(f"has not come in {time.monotonic() - self.since:.0f} s: {self.cause or 'it was never there'}")


class RayBackend:
  """Starts workers on the hosts of a Ray cluster, each on the host with the fewest.

  slots: workers at most; log_lines: how many printed lines of each are kept; address: HOST:PORT of a cluster that stands, or "" for
  one of this machine alone. Nodes without CPUs host nothing. ImportError, ValueError or ConnectionError, in one line, if there is no
  Ray or no host.
  """

  name = "ray"
  using: set[RayBackend] = set()  # open backends of this process: they share the one connection that Ray allows it
  folder = ""  # of the cluster that the first of them started, if one did
  started: list[tuple[int, int]] = []  # pid and start time of that cluster's processes
  connected_here = False

  def __init__(self, slots: int, log_lines: int = 50, address: str = ""):
    self.slots, self.log_lines, self.closed = slots, log_lines, False
    self.ray = connect(address, slots)
    self.inbox: queue.SimpleQueue[tuple[HostLine, str, Any]] = queue.SimpleQueue()
    self.remotes: dict[int, RayRemote] = {}
    self.ready: dict[RayRemote, None] = {}  # in order: those that have something to say
    self.hosts: dict[str, HostLine] = {}
    self._key = 0
    self.using.add(self)
    self._find_hosts()
    if not self.hosts:
      self.close()
      raise ValueError(f"the Ray cluster at {address or 'this machine'} has no node with CPUs, wanted one at least: ray start --num-cpus=N")

  def _find_hosts(self) -> None:
    self._looked = time.monotonic()
    for node in self.ray.nodes():
      if node["Alive"] and node["Resources"].get("CPU", 0) > 0 and node["NodeID"] not in self.hosts:
        self.hosts[node["NodeID"]] = HostLine(self, node)

  def start(self, slot: int) -> RayRemote:
    """A worker on the host with the fewest. OSError if no host is left."""
    if time.monotonic() - self._looked > LOOK:
      self._find_hosts()
    there = [host for host in self.hosts.values() if host.state != "dead"]
    if not there:
      raise OSError("no host is left: " + "; ".join(f"{host.name}: {host.cause}" for host in self.hosts.values()))
    count = collections.Counter(remote.host for remote in self.remotes.values() if not remote.how)
    soon = [host for host in there if not host.late] or there
    self._key += 1
    remote = RayRemote(self, min(soon, key=lambda host: count[host]), self._key)
    self.remotes[self._key] = remote
    remote.host.ask("start", self._key, slot)
    return remote

  def poll(self, timeout: float) -> list[RayRemote]:
    """Remotes that have something to say, once one has, or something happened to a host, or the time is over."""
    if any(host.state == "up" for host in self.hosts.values()):
      for host in self.hosts.values():
        host.give_up()
    wait = 0.0 if self.ready else timeout
    if any(host.state == "coming" for host in self.hosts.values()):
      wait = min(wait, LOOK)  # not past the moment when it is late
    while True:
      try:
        host, kind, what = self.inbox.get(timeout=wait) if wait else self.inbox.get_nowait()
      except queue.Empty:
        return list(self.ready)
      host.hear(kind, what)
      wait = 0.0

  def close(self, seconds: float = 6.0) -> None:
    """Ends what is left, the actors too, and the cluster if it was started here and nobody else uses it. Where Ray itself does not
    answer for so long, the cluster that was started here is ended by its processes' ids, and another one is left: its hosts end what
    they have once they miss their trainer. RuntimeError where a host could not end its workers."""
    self.closed = True
    failed: list[str] = []
    ending = threading.Thread(target=self._close, args=(failed, seconds / 3), name="ray ending", daemon=True)
    ending.start()
    ending.join(seconds)
    if ending.is_alive():
      self.using.discard(self)
      end_cluster()
      failed.append(f"Ray did not end within {seconds:g} s")
    if failed:
      raise RuntimeError("; ".join(failed))

  def _close(self, failed: list[str], seconds: float) -> None:
    ray, hosts = self.ray, [host for host in self.hosts.values() if host.state != "dead"]
    asked = {host.actor.end.remote(host.epoch): host for host in hosts if host.state == "up"}
    for ref in ray.wait(list(asked), num_returns=len(asked), timeout=seconds)[0] if asked else []:
      try:
        ray.get(ref)
      except ray.exceptions.RayTaskError as error:
        failed.append(f"{asked[ref].name}: {short(error)}")
      except ray.exceptions.RayError:  # lost just now, and its workers with it
        continue
    for host in hosts:
      ray.kill(host.actor, no_restart=True)
    until = time.monotonic() + seconds
    for host in hosts:
      host.thread.join(max(0.0, until - time.monotonic()))
    self.using.discard(self)
    if not self.using and RayBackend.connected_here:
      disconnect(ray, [host.process for host in hosts if host.process])


def short(error: Exception) -> str:
  """What Ray says, in one line: the error's name and the lines that tell why."""
  cause = getattr(error, "cause", None)
  lines = [line.strip() for line in str(cause or error).splitlines()]
  return f"{type(cause or error).__name__}: " + " ".join(line for line in lines if line)[:500]


def connect(address: str, slots: int) -> Any:
  """The module ray, connected: to the cluster at the address, or to a new one of this machine that listens on loopback only, asks for
  a token that is written nowhere, and sends no statistics. A connection that stands already is used."""
  os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
  local = not address or address.rpartition(":")[0] in (LOOPBACK, "localhost")
  if local:
    if "ray" in sys.modules and any(os.environ.get(name) != value for name, value in KEEP_TO_LOOPBACK.items()):
      (name, value), *_ = KEEP_TO_LOOPBACK.items()
      raise ValueError(f"ray was imported without {name}={value} and would listen on all addresses: set it before")
    os.environ.update(KEEP_TO_LOOPBACK)
  if not address:
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    if "ray" not in sys.modules:  # it reads the mode once, and turns it on by itself where it finds none
      os.environ.setdefault("RAY_AUTH_MODE", "token")
  try:
    import ray
    import ray.util.scheduling_strategies
  except ImportError as error:
    raise ImportError(f"pool.backend is 'ray', which is not installed ({error}): pip install -r requirements-ray.txt") from error
  if ray.is_initialized():
    if address and (there := ray.get_runtime_context().gcs_address) != address:
      raise ValueError(f"Ray is connected to {there} already, wanted {address}: one process has one connection")
    return ray
  told, before = {"log_to_driver": False, "logging_level": "ERROR"}, signal.getsignal(signal.SIGTERM)
  others = processes.family(os.getpid())
  if not address:
    RayBackend.folder = tempfile.mkdtemp(prefix="ray_")
    memory = (256 << 20) + slots * (16 << 20)  # a screen on its way for every computer, and two more
    told |= {"include_dashboard": False, "_node_ip_address": LOOPBACK, "_temp_dir": RayBackend.folder, "object_store_memory": memory}
  try:
    ray.init(address or "local", **told)
  except Exception as error:  # noqa: BLE001 - what it raises where a part does not come up has no class of its own
    RayBackend.started = [p for p in processes.family(os.getpid()) if p not in others]
    end_cluster()
    raise ConnectionError(f"Ray did not start, or is not at {address or 'this machine'}: {short(error)}") from error
  RayBackend.started = [] if address else [p for p in processes.family(os.getpid()) if p not in others]
  if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGTERM, before)  # how a run ends is its own affair
  RayBackend.connected_here = True
  return ray


def disconnect(ray: Any, actors: list[tuple[int, int | None]]) -> None:
  """Ends the connection, and the cluster if it was started here; an actor of that one that is stopped and hears nothing is ended by id."""
  ray.shutdown()
  RayBackend.connected_here = False
  if RayBackend.folder:
    for pid, start in actors:
      processes.send(pid, start, signal.SIGKILL)
    end_cluster()


def end_cluster() -> None:
  """Ends what is left of the cluster that was started here: its processes, what they started, its folder."""
  for pid, start in [*processes.family(*(p for p, s in RayBackend.started if processes.alive(p, s))), *RayBackend.started]:
    processes.send(pid, start, signal.SIGKILL)
  if RayBackend.folder:
    shutil.rmtree(pathlib.Path(RayBackend.folder), ignore_errors=True)
  RayBackend.folder, RayBackend.started = "", []
