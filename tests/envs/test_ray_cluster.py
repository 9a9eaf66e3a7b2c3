"""The pool's backend `ray`: the contract of the local one, on a real Ray cluster of several nodes, and what only hosts can suffer.

The nodes are processes of this machine, all on loopback; their actors, raylets and workers are killed and stopped as machines are."""

import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import rogue
import test_pool_chaos
from hand_played import conserved
from test_pool_chaos import (  # noqa: F401 - the contract; their pools are made by `on_ray` here
  knobs,
  left_over,
  phone,
  phones,
  pool,
  rogues,
  scheduled,
  test_a_boot_that_goes_wrong,
  test_a_reset_that_goes_wrong,
  test_a_step_that_goes_wrong_is_an_infra_error_and_the_next_episode_is_well,
  test_an_episode_through_a_worker_is_the_same_bit_for_bit,
  test_output_without_end_holds_nobody_up,
  test_siblings_of_the_dead_the_hung_and_the_raising_finish,
)

from core.find import ROOT
from core.schema import SUCCESS
from envs import errors, processes, ray_hosts
from envs.pool import Pool
from envs.ray_hosts import KEEP_TO_LOOPBACK, RayBackend

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def cluster():
  """A head that hosts nothing and two nodes that do."""
  with pytest.MonkeyPatch.context() as patch:
    for name, value in (KEEP_TO_LOOPBACK | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 32}).items():
      patch.setenv(name, value)
    import ray
    from ray.cluster_utils import Cluster

    # a raylet that is gone fails its five checks within as many seconds; one that is slow on a busy machine has ten for each: a node
    # that is given up wrongly is given up for all tests that follow
    quick = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 10000}
    node = {"node_ip_address": "127.0.0.1", "object_store_memory": 100 << 20}
    made = Cluster(initialize_head=True, head_node_args=node | {"num_cpus": 0, "include_dashboard": False, "_system_config": quick})
    made.new_node = lambda: made.add_node(**node, num_cpus=2)
    for _ in range(2):
      made.new_node()
    ray.init(made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module", autouse=True)
def on_ray(cluster):
  """Every pool that test_pool_chaos makes is on the cluster while this module runs."""

  def make(spec, cfg, **kw):
    return Pool(spec, cfg, backend=RayBackend(cfg.slots + cfg.spares, cfg.log_lines, cluster.address), **kw)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(test_pool_chaos, "Pool", make)
    yield


@pytest.fixture(autouse=True)
def two_nodes(cluster):
  """Every test begins with two nodes that live, whatever became of those of the test before."""
  import ray

  alive = lambda: sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
  for _ in range(2 - alive()):
    cluster.new_node()
  assert until(lambda: alive() >= 2)


def hosts(computers):
  return list(computers.backend.hosts.values())


def by_host(computers):
  """How many computers each host has."""
  return collections.Counter(s.remote.host.name for s in computers.slots if s.remote is not None)


def all_leased(computers):
  leases = [computers.lease(60) for _ in range(computers.cfg.slots)]
  for lease in leases:
    lease.reset(options={"task": rogue.task()})
  return leases


def name_of(pid):
  return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode().strip()


def until(true, seconds=20.0):
  end = time.monotonic() + seconds
  while not true() and time.monotonic() < end:
    time.sleep(0.02)
  return true()


def solved(computers):
  """A whole episode on every computer."""
  leases = all_leased(computers)
  for lease in leases:
    lease.step("solve")
    assert lease.step("done")[4]["rewards"] == {SUCCESS: 1.0}
    lease.release()


# -- hosts


def test_computers_are_spread_and_no_actor_has_jax():
  with rogues(slots=4) as computers:
    leases = all_leased(computers)
    assert sorted(by_host(computers).values()) == [2, 2]
    parents = {processes._stat(lease.slot.remote.pid)[1] for lease in leases}
    assert parents == {str(host.process[0]) for host in hosts(computers)} and len(parents) == 2
    for pid in [*parents, *(lease.slot.remote.pid for lease in leases)]:
      mapped = pathlib.Path(f"/proc/{pid}/maps").read_text()
      assert "numpy" in mapped and "jaxlib" not in mapped


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_actor_takes_only_its_own_computers_down_and_comes_back(how, tmp_path, monkeypatch):
  """Its leases are infra errors that name the host, what was sent to it is not sent again, its workers are gone, the others go on,
  and when Ray has started it anew it has computers again."""
  monkeypatch.setattr(ray_hosts, "SILENCE", 10.0)
  with rogues(slots=4) as computers:
    leases = all_leased(computers)
    for i, lease in enumerate(leases):
      lease.reset(options={"task": rogue.task(f"t{i}", diary=str(tmp_path / str(i)))})
    lost = hosts(computers)[1]
    hit = [lease for lease in leases if lease.slot.remote.host is lost]
    dying, first = [(lease.slot.remote.pid, lease.slot.remote.started) for lease in hit], lost.process
    for lease in leases:
      lease.submit_step("sleep 1.5")
    assert until(lambda: all("sleep" in path.read_text() for path in tmp_path.iterdir()))  # it has arrived everywhere
    os.kill(first[0], signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    came = {}
    while len(came) < 4:
      came |= {lease: result for lease, result in computers.wait(30)}
    for lease, result in came.items():
      if lease in hit:
        assert type(result.error) is errors.ActionAmbiguous, result
        assert f"died during step: {lost.name} was lost: " in str(result.error)
        assert "unavailable" in str(result.error) if how == "killed" else "no word in 10 s" in str(result.error)
      else:
        assert result.error is None and lease.step("solve")[1] == 0.0
    assert len(hit) == 2 and not left_over(dying)
    for lease in leases:
      lease.release()
    solved(computers)
    assert until(lambda: computers.wait(0.05) == [] and lost.state == "up") and lost.process != first and not processes.alive(*first)
    assert sum(by_host(computers).values()) == 4 and lost.name in by_host(computers)
    for i, lease in enumerate(leases):
      done = (tmp_path / str(i)).read_text().splitlines()
      assert done == ["reset", "sleep 1.5"] + ["solve"] * (lease not in hit)
    assert conserved(computers) and computers.faulted == {"ActionAmbiguous": 2}


@pytest.mark.parametrize("how", ["removed", "raylet killed"])
def test_a_lost_node_is_named_and_its_computers_go_to_the_others(cluster, how):
  with rogues(slots=4) as computers:
    leases = all_leased(computers)
    node = sorted(cluster.worker_nodes, key=lambda n: n.node_id)[0]
    lost = computers.backend.hosts[node.node_id]
    hit = [lease for lease in leases if lease.slot.remote.host is lost]
    dying = [(lease.slot.remote.pid, lease.slot.remote.started) for lease in hit] + [lost.process]
    if how == "removed":
      cluster.remove_node(node)
    else:
      node.all_processes["raylet"][0].process.kill()
      node.all_processes["raylet"][0].process.wait()
    for lease in leases:
      if lease in hit:
        assert until(lambda lease=lease: computers.wait(0.05) == [] and lease.error is not None)
        assert type(lease.error) is errors.WorkerDied and f"{lost.name} was lost: " in str(lease.error)
      else:
        assert lease.step("solve")[1] == 0.0
      lease.release()
    assert len(hit) == 2 and not left_over(dying)
    solved(computers)
    assert len(by_host(computers)) == 1 and lost.name not in by_host(computers)
    if how != "removed":
      cluster.remove_node(node, allow_graceful=False)
    cluster.new_node()
    time.sleep(ray_hosts.LOOK)  # who has just looked does not look again
    before = computers.counts["fault/WorkerDied"]
    for slot in computers.slots[:2]:
      os.kill(slot.remote.pid, signal.SIGKILL)
    assert until(lambda: computers.wait(0.05) == [] and computers.counts["fault/WorkerDied"] == before + 2)
    solved(computers)
    assert sorted(by_host(computers).values()) == [2, 2]  # the new node is found


def test_a_late_command_of_an_older_epoch_is_refused(cluster, tmp_path):
  """As after a network that was away: the trainer believes the actor lost, begins anew, and the old words arrive after that."""
  import ray

  with rogues(slots=3) as computers:
    lease = computers.lease(60)
    lease.reset(options={"task": rogue.task(diary=str(tmp_path / "diary"))})
    remote, host = lease.slot.remote, lease.slot.remote.host
    old = (remote.pid, remote.started)
    step = ray_hosts.pack({"op": "step", "id": 77, "token": lease.token, "text": "buy", "act": 1})
    ray.get(host.actor.begin.remote(host.epoch + 1, 3))
    assert not left_over([old], 0.5)  # what the older epoch left was ended first
    ray.get(host.actor.do.remote(host.epoch, host.number, "send", remote.key, step))
    ray.get(host.actor.do.remote(host.epoch + 1, 0, "send", remote.key, step))  # the new one knows no such worker
    with pytest.raises(RuntimeError, match="is over, the newest is"):
      ray.get(host.actor.begin.remote(host.epoch, 3))
    with pytest.raises(errors.InfraError, match="was lost: RuntimeError: epoch"):
      lease.step("x")
    assert (tmp_path / "diary").read_text().splitlines() == ["reset"]
    lease.release()
    assert until(lambda: computers.wait(0.05) == [] and host.state == "up")  # the trainer counts on until it is heard
    solved(computers)


def test_all_hosts_gone_is_said(cluster):
  with rogues(slots=1, quarantine_faults=2) as computers:
    lease = computers.lease(60)
    for host in hosts(computers):
      computers.backend.ray.kill(host.actor, no_restart=True)
    assert until(lambda: computers.wait(0.05) == [] and {h.state for h in hosts(computers)} == {"dead"})
    lease.release()
    with pytest.raises(errors.PoolExhausted, match="host 127.0.0.1"):
      computers.lease(60)
    with pytest.raises(OSError, match="no host is left: host 127.0.0.1 .*killed by `ray.kill`.*; host 127.0.0.1 "):
      computers.backend.start(0)


def test_chaos(tmp_path):
  """60 short episodes: some workers are killed, some hang or raise, and an actor is killed in the middle. Every well-behaved episode that
  was not on it gets the score its script earns, nothing is lost, carried out twice, or left."""
  rng, plan, want, seen = random.Random(3), [], [], set()
  for i in range(60):
    fate = rng.choices(["killed", "hang", "raise", "frame black", "well"], [10, 5, 5, 5, 75])[0]
    solves = rng.random() < 0.5
    texts = [f"look {i}"] + ["solve"] * solves + ["look again"] + ["done"] * rng.randint(0, 1)
    if fate not in ("killed", "well"):
      texts.insert(rng.randrange(len(texts)), fate)
    plan.append((rogue.task(f"t{i}", diary=str(tmp_path / str(i))), texts, rng.randint(1, 2) if fate == "killed" else None))
    want.append({SUCCESS: float(solves)} if fate == "well" else fate)
  lost = {"ActionAmbiguous", "WorkerDied"}
  kinds = {"killed": lost, "hang": {"ActDeadline"}, "raise": {"WorkerFault"}, "frame black": {"BlackFrame"}}
  computers = rogues(slots=3, spares=1, recycle=8, act=2.5, settle=0.1, observe=0.1, evaluate=0.3)
  try:
    killed = []

    def tick():
      seen.update((s.remote.pid, s.remote.started) for s in computers.slots if s.remote is not None and s.remote.pid)
      if not killed and computers.counts["finished"] >= 20:
        killed.append(hosts(computers)[0].process)
        os.kill(killed[0][0], signal.SIGKILL)

    computers._tick = tick
    got = dict(scheduled(computers, plan, 100))
    assert sorted(got) == list(range(60)) and killed
    unlucky = [i for i, wanted in enumerate(want) if isinstance(wanted, dict) and isinstance(got[i], Exception)]
    assert len(unlucky) <= 4 and {type(got[i]).__name__ for i in unlucky} <= lost
    for i, wanted in enumerate(want):
      assert i in unlucky or (got[i] == wanted if isinstance(wanted, dict) else type(got[i]).__name__ in kinds[wanted] | lost), (i, got[i])
    ledger, faults = computers.ledger(), sum(isinstance(v, Exception) for v in got.values())
    assert ledger == {"started": 60, "finished": 60 - faults, "faulted": faults, "abandoned": 0, "in_flight": 0} and faults >= 10
    for i in range(60):
      done = (tmp_path / str(i)).read_text().splitlines() if (tmp_path / str(i)).exists() else []
      assert done == (["reset"] + plan[i][1])[: len(done)] and len(done) == len(set(done))
  finally:
    computers.close()
  assert len(seen) > 10 and not left_over(seen)


def test_starts_and_stops_leave_nothing_behind():
  lines = lambda: sum(thread.name.startswith("host ") for thread in threading.enumerate())
  counts, before = [], lines()
  for _ in range(3):
    computers = rogues(slots=2)
    leases = all_leased(computers)
    actors = [host.process for host in hosts(computers)] + [(lease.slot.remote.pid, lease.slot.remote.started) for lease in leases]
    leases[0].submit_step("hang")
    began = time.monotonic()
    computers.close()
    assert time.monotonic() - began < 10 and not left_over(actors, 5.0) and conserved(computers)
    counts.append((len(os.listdir("/proc/self/fd")), lines()))
  # Ray opens and closes connections of its own; one left for every host and pool would be four
  assert counts[-1][0] - counts[0][0] < 4 and {threads for _, threads in counts} == {before}, counts


# -- a cluster of this machine alone, as a run starts it


ALONE = """
  import json, os, pathlib, signal, sys, time
  sys.path[:0] = [{tests!r}, {root!r}]
  import rogue
  from envs import processes
  from envs.pool import EnvSpec, Pool, defaults
  from envs.ray_hosts import RayBackend

  def listening(pids):
    inodes, out = set(), []
    for pid in pids:
      for fd in pathlib.Path(f"/proc/{{pid}}/fd").glob("*"):
        try:
          inodes.add(os.readlink(fd))
        except OSError:
          continue
    for table in ("tcp", "tcp6", "udp", "udp6"):
      for line in pathlib.Path(f"/proc/self/net/{{table}}").read_text().splitlines()[1:]:
        words = line.split()
        if (words[3] == "0A" or table.startswith("udp")) and f"socket:[{{words[9]}}]" in inodes:
          out.append(table + " " + words[1].partition(":")[0])
    return out

  handler = signal.getsignal(signal.SIGTERM)
  cfg = defaults()
  cfg.update({{"slots": 2}})
  backend = RayBackend(2, cfg.log_lines)
  pool = Pool(EnvSpec({suite!r}, rogue.COMPUTER, {{}}), cfg, backend=backend)
  lease = pool.lease(100)
  lease.reset(options={{"task": rogue.task()}})
  family = [(p, s) for p, s in processes.family(os.getpid())]
  said = {{"handler": signal.getsignal(signal.SIGTERM) is handler, "family": family, "folder": RayBackend.folder,
          "listening": listening([os.getpid(), *(p for p, _ in family)])}}
  print(json.dumps(said), flush=True)
  if sys.argv[1] == "wait":
    time.sleep(600)
  deaf = [backend.hosts.popitem()[1].process[0]] if sys.argv[1] == "stop" else [p for p, _ in RayBackend.started]
  for pid in deaf:
    os.kill(pid, signal.SIGSTOP)
  lease.submit_step("hang")
  began, failed = time.monotonic(), ""
  try:
    pool.close()
  except RuntimeError as error:
    failed = str(error)
  print(json.dumps([time.monotonic() - began, failed]), flush=True)
  if failed:
    os._exit(0)  # Ray's own end would wait for it
"""


@pytest.mark.parametrize("how", ["stop", "stop all", "wait"])
def test_a_cluster_of_this_machine_keeps_to_loopback_and_leaves_nothing(how, tmp_path):
  """Closed while its actor is stopped, or all of Ray is, or its trainer killed. No token file, no folder, no
  process, nothing heard from outside."""
  code = textwrap.dedent(ALONE).format(tests=str(pathlib.Path(__file__).parent), root=str(ROOT), suite=test_pool_chaos.SUITE)
  clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"HOME": str(tmp_path)}
  run = subprocess.Popen([sys.executable, "-c", code, how], env=clean, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
  family = []
  try:
    said = json.loads(run.stdout.readline())
    assert said["handler"] and len(said["family"]) >= 8
    # 127.0.0.1, as IPv4 and as IPv6 that holds it, in the byte order of /proc
    assert set(said["listening"]) == {"tcp 0100007F", "tcp6 0000000000000000FFFF00000100007F"}, said["listening"]
    if how == "wait":
      run.kill()
    else:
      seconds, failed = json.loads(run.stdout.readline())
      assert seconds < 10 and failed == ("Ray did not end within 6 s" if how == "stop all" else "")
    run.wait(30)
    assert run.returncode == (-signal.SIGKILL if how == "wait" else 0)
    family = [tuple(p) for p in said["family"]]
    if how == "wait":  # two of Ray's own look for its head for a minute before they give up
      assert until(lambda: {name_of(pid) for pid, _ in left_over(family, 0.0)} <= {"ray::DashboardAgent", "ray::RuntimeEnvAgent"})
    else:
      assert not left_over(family, 3)
    assert list(tmp_path.iterdir()) == [] and (how == "wait" or not os.path.exists(said["folder"]))
  finally:
    run.kill()
    run.wait(30)
    for pid, start in family:
      processes.send(pid, start, signal.SIGKILL)
