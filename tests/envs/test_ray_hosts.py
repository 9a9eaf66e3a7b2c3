"""Backend `ray` without Ray: what its actor does with commands, epochs and workers, and what is said where Ray is missing."""

import asyncio
import os
import pathlib
import queue
import subprocess
import sys
import time

import numpy as np
import pytest
import rogue

from core.find import ROOT
from envs import processes, ray_actor, ray_hosts
from envs.errors import BadFrame
from envs.pool import EnvSpec, check, defaults
from envs.ray_actor import Host
from envs.shared_screens import SharedScreen
from envs.wire import Reader, WireError, pack

SUITE = str(pathlib.Path(__file__).parent / "rogue.py")
BOOT = {"op": "boot", "id": 1, "token": 0, "spec": EnvSpec(SUITE, rogue.COMPUTER, {})._asdict(), "black_frames": True}


def played(script):
  """Runs script(host) with a host in an event loop, and ends the host."""

  async def run():
    host = Host(10)
    try:
      return await asyncio.wait_for(script(host), 60)
    finally:
      await host.end(host.live)

  return asyncio.run(run())


async def told(host, epoch, kind, count=1):
  """The next `count` words of that kind."""
  out = []
  while len(out) < count:
    out += [(key, what) for key, about, what in await host.hear(epoch) if about == kind]
  return out


def message(what):
  ((data, pixels),) = [what]
  (said,) = Reader().feed(data)
  return said, pixels


def test_commands_are_carried_out_in_order_and_once(tmp_path, monkeypatch):
  """Numbers 0..5 arrive mixed up, one of them twice, and one under another epoch."""
  monkeypatch.setattr(ray_actor, "BEAT", 0.2)
  diary = tmp_path / "diary"
  reset = {"op": "reset", "id": 3, "token": 5, "task": rogue.task(diary=str(diary)), "seed": None}
  step = lambda number, text: {"op": "step", "id": 3 + number, "token": 5, "text": text, "act": number}

  async def script(host):
    await host.begin(7, 2)
    sent = [("start", 1, 0), ("send", 1, pack(BOOT)), ("size", 1, rogue.SHAPE), ("send", 1, pack(reset)), ("send", 1, pack(step(1, "a")))]
    await host.do(7, 1, *sent[1])
    await host.do(7, 0, *sent[0])
    await told(host, 7, "message")
    for number in (3, 2):
      await host.do(7, number, *sent[number])
    said = await told(host, 7, "message")
    for number in (4, 4):
      await host.do(7, number, *sent[number])
    said += await told(host, 7, "message")
    await host.do(7, 4, *sent[4])
    assert await host.hear(7) == []  # not done again, and not taken for a gap
    await host.do(6, 5, "send", 1, pack(step(2, "of another epoch")))
    await host.do(7, 5, "send", 1, pack(step(2, "b")))
    return [*said, *await told(host, 7, "message")]

  said = [message(what) for _, what in played(script)]
  assert [m["id"] for m, _ in said] == [3, 4, 5] and diary.read_text().splitlines() == ["reset", "a", "b"]
  for i, (_, pixels) in enumerate(said):
    assert np.array_equal(pixels, np.full(rogue.SHAPE, 10 + i, np.uint8))


def test_a_gap_in_the_commands_ends_the_epoch(monkeypatch):
  monkeypatch.setattr(ray_actor, "BEAT", 0.05)

  async def script(host):
    await host.begin(1, 1)
    await host.do(1, 1, "size", 1, (1, 1, 1))
    with pytest.raises(RuntimeError, match="command 0 never came, 1 later ones did"):
      await host.hear(1)

  played(script)


def test_a_new_epoch_ends_the_workers_of_the_old_one_and_refuses_its_words():
  async def script(host):
    await host.begin(1, 1)
    await host.do(1, 0, "start", 1, 0)
    ((_, old),) = await told(host, 1, "pid")
    listening = asyncio.create_task(host.hear(1))
    await asyncio.sleep(0)
    await host.begin(2, 1)
    for late in (listening, host.hear(1), host.look(1, 1), host.begin(2, 1), host.begin(1, 1)):
      with pytest.raises(RuntimeError, match="epoch . is over, the newest is 2"):
        await late
    assert not processes.alive(*old)
    await host.do(1, 0, "start", 2, 0)
    assert not host.workers and await host.look(2, 1) == ("not started", [])

  played(script)


def test_a_host_whose_trainer_is_gone_ends_its_workers(monkeypatch):
  monkeypatch.setattr(ray_actor, "BEAT", 0.05)
  monkeypatch.setattr(ray_actor, "DESERTED", 0.5)

  async def script(host):
    await host.begin(1, 1)
    await host.do(1, 0, "start", 1, 0)
    ((_, worker),) = await told(host, 1, "pid")
    for _ in range(12):  # asked all along, it stays
      await host.hear(1)
    assert processes.alive(*worker) and host.live == 1
    until = time.monotonic() + 10
    while processes.alive(*worker) and time.monotonic() < until:
      await asyncio.sleep(0.05)
    assert not processes.alive(*worker) and host.live == 0

  played(script)


def test_how_a_worker_ended_is_told_with_its_last_lines():
  async def script(host):
    await host.begin(1, 1)
    await host.do(1, 0, "start", 1, 0)
    await host.do(1, 1, "send", 1, pack(BOOT | {"spec": EnvSpec(SUITE, rogue.COMPUTER, {"boot": "exit"})._asdict()}))
    return await told(host, 1, "end")

  assert played(script) == [(1, ("exit code 7", ["last words of the worker"], ""))]


@pytest.mark.parametrize("fault", ["torn", "stale"])
def test_a_bad_screenshot_is_raised_in_the_trainer(fault, monkeypatch):
  """The host reads another number, or another token, than the worker told."""
  read = SharedScreen.read
  if fault == "torn":
    monkeypatch.setattr(SharedScreen, "read", lambda self, told, token: (_ for _ in ()).throw(BadFrame("torn screenshot: by hand")))
  else:
    monkeypatch.setattr(SharedScreen, "read", lambda self, told, token: read(self, told | {"number": told["number"] + 1}, token))

  async def script(host):
    await host.begin(1, 1)
    reset = {"op": "reset", "id": 2, "token": 5, "task": rogue.task(), "seed": None}
    for number, command in enumerate([("start", 1, 0), ("send", 1, pack(BOOT)), ("size", 1, rogue.SHAPE), ("send", 1, pack(reset))]):
      await host.do(1, number, *command)
      await told(host, 1, "message") if number == 1 else None
    return await told(host, 1, "message")

  ((_, what),) = played(script)
  remote = ray_hosts.RayRemote(type("Backend", (), {"ready": {}}), None, 1)
  remote.hear("message", what)
  (said,) = remote.receive()
  with pytest.raises(BadFrame, match=f"{fault} screenshot"):
    remote.pixels(said["result"]["screen"], 5)


def test_what_cannot_be_understood_is_raised_as_such():
  remote = ray_hosts.RayRemote(type("Backend", (), {"ready": {}}), None, 1)
  remote.hear("message", (pack({"id": 1}), None))
  remote.hear("end", ("running", [], "a message of 9 bytes is announced"))
  assert remote.receive() == [{"id": 1}] and remote.fate() == "running"
  with pytest.raises(WireError, match="9 bytes"):
    remote.receive()
  with pytest.raises(BrokenPipeError):
    remote.send({"id": 2})
  with pytest.raises(TypeError, match="cannot leave a worker"):
    remote.send({"id": object()})


class Nobody:
  """Ray, of which a line needs nothing here: no command is sent."""

  def __init__(self):
    self.sent = []
    self.actor = self.do = self
    self.remote = lambda *what: self.sent.append(what)


def line_of(backend, name):
  """A host's line without its thread."""
  line = ray_hosts.HostLine.__new__(ray_hosts.HostLine)
  line.backend, line.name, line.node, line.state, line.since, line.cause = backend, name, name, "coming", time.monotonic(), ""
  line.epoch, line.number, line.process, line._waiting, line.actor = 0, 0, None, [], Nobody()
  return line


def test_computers_that_wait_for_a_lost_host_go_to_another_when_it_is_late(monkeypatch):
  """Host b was up and is lost: what starts meanwhile waits for it, for RETURN seconds and no longer, as long as a is there."""
  now = [100.0]
  monkeypatch.setattr(ray_hosts.time, "monotonic", lambda: now[0])
  backend = ray_hosts.RayBackend.__new__(ray_hosts.RayBackend)
  backend.inbox, backend.remotes, backend.ready, backend._key, backend._looked = queue.SimpleQueue(), {}, {}, 0, 1e9
  a, b = line_of(backend, "host a"), line_of(backend, "host b")
  backend.hosts = {"a": a, "b": b}
  for host in (a, b):
    host.hear("up", (1, (1, 1)))
  first = [backend.start(i) for i in range(2)]
  assert {r.host for r in first} == {a, b}
  b.hear("lost", "its actor died")
  ended = [r for r in first if r.host is b]
  assert backend.poll(0.0) == ended and ended[0].how == "host b was lost: its actor died"
  backend.remotes.pop(ended[0].key)
  ended[0].kill()
  again = backend.start(1)
  assert again.host is b  # it has the fewest, and may come back in a moment
  now[0] += ray_hosts.RETURN
  assert backend.poll(0.0) == [] and not again.how
  now[0] += 1.0
  a.state = "coming"  # nobody is there to go to
  assert backend.poll(0.0) == []
  a.state = "up"
  assert backend.poll(0.0) == [again] and again.how == "host b has not come in 16 s: its actor died"
  backend.remotes.pop(again.key)
  assert backend.start(1).host is a


def test_the_pool_is_imported_without_ray_and_the_actor_without_jax():
  code = "import envs.pool, envs.ray_hosts, envs.ray_actor, sys; print([m for m in ('ray', 'jax', 'jaxlib') if m in sys.modules])"
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
  assert done.stdout == "[]\n", done.stderr


@pytest.fixture
def untouched(monkeypatch):
  """The environment's variables as they were, afterwards; none of Ray's before."""
  for name in [name for name in os.environ if name.startswith("RAY_")]:
    monkeypatch.delenv(name)
  for name in (*ray_hosts.KEEP_TO_LOOPBACK, "RAY_USAGE_STATS_ENABLED", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
    monkeypatch.setenv(name, "before")
    monkeypatch.delenv(name)


def test_without_ray_one_line_says_what_to_install(monkeypatch, untouched):
  monkeypatch.setitem(sys.modules, "ray", None)
  for name, value in ray_hosts.KEEP_TO_LOOPBACK.items():
    monkeypatch.setenv(name, value)
  with pytest.raises(ImportError, match="pip install -r requirements-ray.txt") as caught:
    ray_hosts.RayBackend(1)
  assert "\n" not in str(caught.value)


def test_a_ray_that_would_listen_to_all_is_refused(monkeypatch, untouched):
  monkeypatch.setitem(sys.modules, "ray", object())
  for address in ("", "127.0.0.1:6379"):
    with pytest.raises(ValueError, match="would listen on all addresses: set it before"):
      ray_hosts.RayBackend(1, address=address)


def test_knobs():
  cfg = defaults()
  cfg.address = "10.0.0.1:6379"
  with pytest.raises(ValueError, match="pool.address is '10.0.0.1:6379', which is for pool.backend='ray' only"):
    check(cfg)
  cfg.backend = "ray"
  check(cfg)
