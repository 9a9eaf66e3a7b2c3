"""train.py in two processes on one machine: one run, killed and brought back by its supervisors; hosts that were started unalike."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ports import free_address
from test_train import ROOT, assert_same_run, command

from core import hosts
from core.checkpoint import read_numpy
from core.metrics import read_jsonl
from core.stop import EXIT_PARTED
from envs import processes

SMALL = {
  "copy__demonstrations": 6, "copy__updates": 3, "practice__updates": 3, "practice__slots": 4, "eval__every": 0, "env__held_out_tasks": 2,
  "gate__known_good": 0, "gate__do_nothing": 0, "watchdog__seconds": 300.0, "watchdog__compiling": 300.0,
}  # fmt: skip


def begin(program, workdir, address, index, folder, **changed):
  """One process of two, with one device."""
  knobs = SMALL | {"hosts__coordinator": address, "hosts__count": 2, "hosts__index": index, "hosts__join": 120.0} | changed
  argv = [*program, *command(workdir, **knobs)[1:]]
  env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"}
  with open(folder / f"{workdir.name}-{index}.log", "wb") as log:
    return subprocess.Popen([sys.executable, *argv], cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)


def finish(children, folder, seconds=900):
  """Exit codes; nothing of them is left."""
  try:
    return [child.wait(timeout=seconds) for child in children]
  finally:
    for child in children:
      for pid, start in processes.family(child.pid):
        processes.send(pid, start, signal.SIGKILL)
      with contextlib.suppress(ProcessLookupError):
        child.kill()


def trainer_of(guard):
  """(pid, start time) of the train.py under a supervisor."""
  for pid, start in processes.family(guard.pid):
    with contextlib.suppress(OSError):
      words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
      if any(word.endswith(b"train.py") for word in words[:2]):
        return pid, start
  raise AssertionError("there is no trainer")


def wait_for(what, seconds=600):
  until = time.monotonic() + seconds
  while not what():
    assert time.monotonic() < until, "it did not come"
    time.sleep(0.2)


@pytest.mark.long
@pytest.mark.parametrize("context", [1, 2], ids=["whole rows", "rows on devices of both"])
def test_a_killed_process_ends_the_other_and_both_come_back_to_the_same_curve(context, tmp_path):
  """Kill -9 in the second update or later. The other one notices within 30 seconds; both supervisors start theirs again."""
  address = free_address()
  straight = [begin(["train.py"], tmp_path / "straight", address, i, tmp_path, mesh__context=context) for i in range(2)]
  assert finish(straight, tmp_path) == [0, 0], (tmp_path / "straight-1.log").read_text()[-2000:]
  workdir, address = tmp_path / "killed", free_address()
  guards = [begin(["supervise.py", "--"], workdir, address, i, tmp_path, mesh__context=context) for i in range(2)]
  try:
    curve = workdir / "metrics.jsonl"
    wait_for(lambda: curve.exists() and len(read_jsonl(curve)) >= 1)
    other, (pid, start) = trainer_of(guards[0]), trainer_of(guards[1])
    processes.send(pid, start, signal.SIGKILL)
    wait_for(lambda: processes.start_time(other[0]) != other[1], seconds=30)
  finally:
    codes = finish(guards, tmp_path)
  assert codes == [0, 0], (tmp_path / "killed-0.log").read_text()[-2000:]
  deaths = [row for part in ("", "hosts/1") for row in read_jsonl(workdir / part / "restarts.jsonl")]
  assert len(deaths) >= 2 and -9 in [d["exit"] for d in deaths] and all(d["restart"] for d in deaths)
  assert_same_run(tmp_path / "straight", workdir)
  mine, theirs = (read_jsonl(tmp_path / "straight" / part / "metrics.jsonl") for part in ("", "hosts/1"))
  for a, b in zip(mine, theirs, strict=True):  # both counted the episodes of both
    assert {k: v for k, v in a.items() if k.startswith(("reward", "groups", "policy"))} == {
      k: v for k, v in b.items() if k.startswith(("reward", "groups", "policy"))
    }


@pytest.mark.long
def test_a_run_whose_rows_lie_on_devices_of_both_learns_what_one_with_whole_rows_does(tmp_path):
  """A row's tokens over one device of each: the copied policy, and the first update of practice, are the other run's but for rounding. The
  old policy's log-probabilities come home to whoever asked, the leash is dealt too, and nothing compiles once the second update is done."""
  changed = {"agent__old_logp": "recompute", "practice__updates": 4, "practice__leash": 0.1}
  for name, context in (("shared", 2), ("whole", 1)):
    address = free_address()
    both = [begin(["train.py"], tmp_path / name, address, i, tmp_path, mesh__context=context, **changed) for i in range(2)]
    assert finish(both, tmp_path) == [0, 0], (tmp_path / f"{name}-0.log").read_text()[-2000:]
  said = (tmp_path / "shared-0.log").read_text()
  assert "learner: context 2 (2 of cpu, 2 processes), rows on devices of several processes, 2 parts of every micro-batch" in said
  shared, whole = ([read_jsonl(tmp_path / name / part / "metrics.jsonl") for part in ("", "hosts/1")] for name in ("shared", "whole"))
  keep = lambda row: {k: v for k, v in row.items() if k.startswith(("reward", "groups", "policy"))}
  assert list(map(keep, shared[0])) == list(map(keep, shared[1])) and len(shared[0]) == 4
  first, other = keep(shared[0][0]), keep(whole[0][0])
  assert first["policy/grad_norm"] > 0 and first.keys() == other.keys()
  assert first == pytest.approx(other, rel=1e-3, abs=1e-5)
  assert [row["rate/compiles"] for rows in shared for row in rows[2:]] == [0.0] * 4
  copied, wanted = (read_numpy(newest_copied(tmp_path / name)) for name in ("shared", "whole"))
  for name, x in wanted.items():
    np.testing.assert_allclose(copied[name], x, rtol=1e-3, atol=1e-5, err_msg=name)


def newest_copied(workdir):
  (folder,) = [path for path in (workdir / "copied").iterdir() if path.is_dir()]
  return folder


@pytest.mark.slow
def test_processes_with_different_configs_say_so_in_one_line(tmp_path):
  address = free_address()
  children = [begin(["train.py"], tmp_path / "run", address, i, tmp_path, practice__lr=(5e-4, 1e-3)[i]) for i in range(2)]
  assert finish(children, tmp_path, 300) == [2, 2]
  for i in range(2):
    said = (tmp_path / f"run-{i}.log").read_text()
    assert "config.practice.lr is 0.001 in process 1 and 0.0005 in process 0: start all with one config" in said
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("knobs, words", [
  ({"coordinator": "10.0.0.1"}, "wanted address:port"),
  ({"coordinator": "10.0.0.1:99999", "count": 2, "index": 0}, "wanted address:port"),
  ({"coordinator": ":99", "count": 2, "index": 0}, "wanted address:port"),
  ({"coordinator": "10.0.0.1:99", "count": 2}, "hosts.index is -1 of hosts.count 2"),
  ({"count": 2, "index": 0}, "hosts.count is 2 and hosts.index 0, which are read with an address only, but hosts.coordinator is ''"),
  ({"coordinator": "auto", "index": 1}, "read with an address only, but hosts.coordinator is 'auto'"),
  ({"coordinator": "10.0.0.1:99", "count": 2, "index": 2}, "hosts.index is 2 of hosts.count 2"),
])  # fmt: skip
def test_what_says_no_place_is_one_line(knobs, words):
  cfg = hosts.defaults()
  hosts.check(cfg)
  cfg.update(knobs)
  with pytest.raises(ValueError, match=words):
    hosts.check(cfg)


def on_auto(monkeypatch, said):
  """What jax.distributed was started with, where a cluster says so much."""
  started = []
  monkeypatch.setattr(hosts.clusters.ClusterEnv, "auto_detect_unset_distributed_params", lambda *_: said)
  monkeypatch.setattr(hosts.jax.distributed, "initialize", lambda **how: started.append(how))
  cfg = hosts.defaults()
  cfg.update({"coordinator": "auto", "join": 0.0})
  hosts.join(cfg)
  return started


def test_auto_where_there_is_no_cluster_is_told_at_once(monkeypatch):
  with pytest.raises(ValueError, match="hosts.coordinator is 'auto', but there is no cluster here that auto knows"):
    on_auto(monkeypatch, (None, None, None, None))


def test_auto_listens_where_the_cluster_says_and_nowhere_else(monkeypatch):
  """jax's own way binds [::], every interface of the first host."""
  (how,) = on_auto(monkeypatch, ("10.128.0.2:8476", 4, 1, None))
  assert how["coordinator_address"] == how["coordinator_bind_address"] == "10.128.0.2:8476"
  assert (how["num_processes"], how["process_id"]) == (4, 1)
  assert on_auto(monkeypatch, ("10.128.0.2:8476", 1, 0, None)) == []  # alone: nobody needs to find it


def test_the_first_process_listens_on_an_address_of_its_own_that_nobody_has():
  """jax itself ends in a segmentation fault where it cannot. 198.51.100.0/24 is nobody's (RFC 5737)."""
  hosts.can_listen(free_address())
  with pytest.raises(ValueError, match="cannot listen there .*: wanted an address of its own machine"):
    hosts.can_listen("198.51.100.1:8476")
  with socket.create_server(("127.0.0.1", 0)) as other:
    with pytest.raises(OSError, match=f"127.0.0.1:{other.getsockname()[1]}: Address already in use"):
      hosts.can_listen(f"127.0.0.1:{other.getsockname()[1]}")


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_whose_others_never_come_ends_with_one_line(index):
  """jax itself would abort it, with a page of C++ frames."""
  knobs = {"coordinator": free_address(), "count": 2, "index": index, "join": 1.0}
  code = f"from core import hosts; cfg = hosts.defaults(); cfg.update({knobs}); hosts.join(cfg)"
  env = os.environ | {"JAX_PLATFORMS": "cpu"}
  ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
  assert ended.returncode == EXIT_PARTED
  assert ended.stderr.count("\n") == 1 and "did not come together within 1 s (hosts.join): fewer than 2 were started" in ended.stderr


def test_waiting_for_another_process_is_a_sign_of_life_until_patience_ends(monkeypatch):
  class Store:
    asked = 0

    def blocking_key_value_get_bytes(self, key, milliseconds):
      self.asked += 1
      if self.asked < 4:
        raise RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
      return key.encode()

  beats = []
  monkeypatch.setattr(hosts, "_beat", beats.append)
  assert hosts._awaited(Store(), "a", time.monotonic() + 100) == b"a" and len(beats) == 3
  with pytest.raises(RuntimeError, match="DEADLINE_EXCEEDED"):  # the last slice is the last
    hosts._awaited(Store(), "a", time.monotonic() + 5)
  assert len(beats) == 3
  with ThreadPoolExecutor(1) as saving:  # what waits beside the main thread does not vouch for that
    assert saving.submit(hosts._awaited, Store(), "a", time.monotonic() + 100).result(60) == b"a" and len(beats) == 3


def test_alone_a_process_says_it_all():
  assert hosts.alone() and hosts.everyone({"a": 1}) == [{"a": 1}] and hosts.most(3) == 3 and hosts.deal([1, 2]) == [1, 2]
  assert hosts.share(7, "x") == 7 and hosts.own(pathlib.Path("/run")) == pathlib.Path("/run")
  hosts.same_config({"a": np.float64(1.0).item()})


def test_a_collective_that_broke_off_is_no_bad_input(monkeypatch):
  """gloo's error as it came out of a run whose other process was killed, a ValueError; a knob's is one in any run."""
  broken, knob = ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), ValueError("practice.lr is 3, wanted less")
  assert not hosts.parted(broken) and hosts.parted(hosts.Parted("gone"))
  monkeypatch.setattr(hosts, "alone", lambda: False)
  assert hosts.parted(broken) and not hosts.parted(knob)
