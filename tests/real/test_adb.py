"""Phones through the real adb binary (make system), against the device's double: equal to the simulated phone, whole after every fault.

Everything here is real but Android: the worker processes, the private adb server, ADB's wire protocol over TCP.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest

from core.schema import SUCCESS
from envs import adb, android, errors, processes, sim
from envs.pool import Pool, State, defaults, spec_of
from envs.sim.base import expert_text
from tests.envs.adb_device import DeviceDouble

pytestmark = pytest.mark.real
ROOT = pathlib.Path(android.__file__).parents[1]
COMPUTER = "android/phone"
HEALTHY = 120.0  # seconds for what works: long, so that a slow machine is no fault
BROKEN = 4.0  # the deadline of what hangs, hundreds of times what the same takes when it does not


@pytest.fixture
def doubles():
  made = []

  def make(count=1, **kw):
    made.extend(DeviceDouble(**kw) for _ in range(count))
    return made[-count:]

  yield make
  for double in made:
    double.close()


def knobs(*devices, **given):
  cfg = android.defaults()
  cfg.update({"computer": COMPUTER, "image": ",".join(d.serial for d in devices)})
  cfg.update({"popup_chance": 0.4, "settle_least": 0.0, "settle_most": HEALTHY / 2})
  cfg.update({"wait_seconds": 0.01, "attach_seconds": HEALTHY} | given)
  return cfg


def pool_of(cfg, slots=1, **given):
  knobs = defaults()
  knobs.update({"slots": slots, "quarantine_faults": 100, "backoff": 0.0, "park": 0, "recycle": 0})
  knobs.deadlines.update({"boot": HEALTHY, "act": HEALTHY, "settle": HEALTHY, "observe": HEALTHY, "close": 6.0})
  for name, value in given.items():
    (knobs.deadlines if name in knobs.deadlines else knobs)[name] = value
  return Pool(spec_of(cfg), knobs)


def servers_of(pool):
  """(pid, start time) of the adb servers under the pool's workers."""
  pids = [s.remote.pid for s in pool.slots if s.remote is not None]
  found = [(pid, start) for pid, start in processes.family(*pids) if "nodaemon" in pathlib.Path(f"/proc/{pid}/cmdline").read_text()]
  return sorted(found)


def gone(who, seconds=HEALTHY):
  until = time.monotonic() + seconds
  while (left := [w for w in who if processes.alive(*w)]) and time.monotonic() < until:
    time.sleep(0.02)
  return not left


def played(env, task, texts):
  """Everything that is seen, earned and told in one episode."""
  obs, info = env.reset(options={"task": task})
  out = [(obs["screenshot"].tobytes(), obs["goal"], info["notes"])]
  for text in texts:
    obs, reward, terminated, truncated, info = env.step(text)
    out.append((obs["screenshot"].tobytes(), reward, terminated, truncated, repr(info)))
    if terminated or truncated:
      break
  return out


def scripts(cfg, count):
  """(task of the simulated phone, the same for adb, the expert's texts)."""
  bare = sim.make("sim/phone", cfg)
  out = []
  for own, task in list(zip(sim.task_lists("sim/phone", cfg)["practice"], android.task_lists(COMPUTER, cfg)["practice"]))[:count]:
    bare.reset(options={"task": own})
    texts = []
    while not bare.done:
      texts.append(expert_text(bare))
      bare.step(texts[-1])
    out.append((own, task, texts))
  return out


# -- the same as the simulated phone


@pytest.mark.parametrize("screenshot, asks", [("raw", False), ("png", True)])
def test_episodes_through_workers_and_adb_equal_the_simulated_phones_bit_for_bit(doubles, screenshot, asks):
  both = doubles(2)
  for double in both:
    double.asks = asks  # wants a key first, as a phone does
  cfg = knobs(*both, screenshot=screenshot, popup_most=2)
  bare = sim.make("sim/phone", cfg)
  with pool_of(cfg, slots=2) as pool:
    envs = [pool.env(), pool.env()]
    for i, (own, task, texts) in enumerate(scripts(cfg, 6)):
      for script in (texts, ["tap(0.9, 0.1)", "swipe(0.5, 0.9, 0.5, 0.1)", "press(HOME)", "press(BACK)", "finish()"], ["nonsense"]):
        mine, theirs = played(envs[i % 2], task, script), played(bare, own, script)
        assert mine == theirs
      assert played(bare, own, texts)[-1][1:3] == (1.0, True)
    assert pool.faulted == {}


def test_everything_that_is_typed_arrives(doubles):
  (double,) = doubles()
  env = android.make(COMPUTER, knobs(double))
  try:
    texts = [
      "".join(map(chr, range(32, 127))),
      "naïve 你好 🙂 e\u0301 Ω \u00a0",
      "%s %%s & 'x' \"y\" $(reboot) `id` \\ ; | > <",
      "a\tb",
      "x" * 5000,
    ]
    task = android.task_lists(COMPUTER, env.cfg)["practice"][0]
    for text in texts:
      env.reset(options={"task": task})
      quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t")
      info = env.step(f'type("{quoted}")')[4]
      assert info["action"].args["text"] == text and "refused" not in info["notes"]
      assert double.shell.typed[-1] == text
  finally:
    env.close()


def test_what_a_step_costs_beside_the_bare_simulator(doubles, capsys):
  (double,) = doubles()
  cfg = knobs(double)
  env, bare = android.make(COMPUTER, cfg), sim.make("sim/phone", cfg)
  times = {"adb": [], "bare": []}
  try:
    for own, task, texts in scripts(cfg, 10):
      for name, one, what in (("adb", env, task), ("bare", bare, own)):
        one.reset(options={"task": what})
        for text in texts:
          began = time.perf_counter()
          one.step(text)
          times[name].append(time.perf_counter() - began)
  finally:
    env.close()
  median = {name: 1e3 * float(np.median(t)) for name, t in times.items()}
  with capsys.disabled():
    print(
      f"\na step of {len(times['adb'])}: {median['adb']:.1f} ms through adb (1 input, 2 screencaps, 1 query), {median['bare']:.2f} ms bare"
    )
  assert len(times["adb"]) == len(times["bare"]) > 20


# -- faults: each an infra error with its cause, and the pool goes on


FAULTS = {  # how the device goes wrong, and what it is called
  "hang": ("DeviceHung", lambda double: setattr(double.shell, "hang", ("sleep",))),
  "hanging screencap": ("DeviceHung", lambda double: setattr(double.shell, "hang", ("screencap",))),
  "torn screencap": ("BadFrame", lambda double: setattr(double.shell, "torn", True)),
  "black screen": ("BlackFrame", lambda double: setattr(double.shell, "black", True)),
  "slow": ("DeviceHung", lambda double: setattr(double.shell, "slow", 5 * BROKEN)),
  "offline": ("DeviceLost", lambda double: (setattr(double, "offline", True), double.drop())),
  "death in mid-action": ("DeviceLost", lambda double: setattr(double, "dying", ("sleep",))),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_device_that_goes_wrong_is_an_infra_error_and_is_had_again(doubles, what):
  (double,) = doubles()
  cause, go_wrong = FAULTS[what]
  cfg = knobs(double, call_seconds=BROKEN, settle_most=BROKEN, popup_chance=0.0)  # a look may take what is left of the settling
  ((own, task, texts),) = scripts(cfg, 1)
  with pool_of(cfg) as pool:
    env = pool.env()
    env.reset(options={"task": task})
    go_wrong(double)
    with pytest.raises(errors.InfraError) as caught:
      env.step("wait()")
    assert type(caught.value).__name__ == cause, caught.value  # by its own deadline, not the pool's ActDeadline
    port, fresh = double.port, double
    if what == "death in mid-action":
      (fresh,) = doubles(port=port)  # switched on again
    else:
      double.offline, double.dying, double.shell.black, double.shell.torn, double.shell.slow = False, (), False, False, 0.0
      double.shell.hang = ()
      double.shell.ended.set()
    assert played(env, task, texts) == played(sim.make("sim/phone", cfg), own, texts)
    assert pool.faulted == {cause: 1} and pool.ledger()["finished"] == 1


def test_a_device_that_stays_away_costs_its_own_worker_only(doubles):
  good, bad = doubles(2)
  cfg = knobs(good, bad, popup_chance=0.0)
  ((_, task, texts),) = scripts(cfg, 1)
  with pool_of(cfg, slots=2, boots=2) as pool:
    one, two = pool.lease(), pool.lease()
    for lease in (one, two):
      lease.reset(options={"task": task})
    bad.close()
    ends = []
    for lease in (one, two):
      try:
        lease.step("wait()")
        ends.append("well")
      except errors.InfraError as fault:
        ends.append(type(fault).__name__)
    assert sorted(ends) == ["DeviceLost", "well"]
    well = (one, two)[ends.index("well")]
    for _ in range(3):
      assert played(well, task, texts)[-1][1] == 1.0


def test_an_adb_server_that_is_killed_is_an_infra_error_and_is_started_again(doubles):
  (double,) = doubles()
  cfg = knobs(double, popup_chance=0.0, call_seconds=BROKEN)
  ((own, task, texts),) = scripts(cfg, 1)
  with pool_of(cfg) as pool:
    env = pool.env()
    env.reset(options={"task": task})
    (server,) = servers_of(pool)
    os.kill(server[0], signal.SIGKILL)
    with pytest.raises(errors.InfraError) as caught:
      env.step("wait()")
    assert type(caught.value).__name__ == "AdbServerLost"
    worker = pool.slots[0].remote.pid
    assert played(env, task, texts) == played(sim.make("sim/phone", cfg), own, texts)
    assert pool.slots[0].remote.pid == worker and servers_of(pool) != [server] and len(servers_of(pool)) == 1
    (server,) = servers_of(pool)
    env.reset(options={"task": task})
    os.kill(server[0], signal.SIGSTOP)  # there, and says nothing
    with pytest.raises(errors.InfraError) as caught:
      env.step("wait()")
    assert type(caught.value).__name__ == "AdbServerLost"
    assert played(env, task, texts)[-1][1] == 1.0
  assert gone([server])


def test_a_worker_that_is_killed_takes_its_adb_server_along(doubles):
  (double,) = doubles()
  cfg = knobs(double, popup_chance=0.0)
  ((_, task, texts),) = scripts(cfg, 1)
  with pool_of(cfg) as pool:
    env = pool.env()
    env.reset(options={"task": task})
    (server,) = servers_of(pool)
    os.kill(pool.slots[0].remote.pid, signal.SIGKILL)
    with pytest.raises((errors.ActionAmbiguous, errors.WorkerDied)):  # as its end is seen after the action was sent, or before
      env.step("wait()")
    assert gone([server])
    assert played(env, task, texts)[-1][1] == 1.0  # a new worker has the device


def test_a_trainer_that_is_killed_leaves_nothing(doubles):
  (double,) = doubles()
  folder = tempfile.mkdtemp(prefix="adb-", dir="/tmp")  # short: the server's socket is a file in it, and tmp_path can be too long for one
  script = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.real.test_adb import knobs, pool_of, servers_of, android, COMPUTER
class D: serial = {double.serial!r}
pool = pool_of(knobs(D))
env = pool.env()
env.reset(options={{"task": android.task_lists(COMPUTER, knobs(D))["practice"][0]}})
print(pool.slots[0].remote.pid, *servers_of(pool)[0], flush=True)
time.sleep(600)
"""
  env = os.environ | {"TMPDIR": folder}
  trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
  try:
    worker, server, started = (int(n) for n in trainer.stdout.readline().split())
    assert processes.alive(server, started)
  finally:
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
  assert gone([(server, started), (worker, None)])
  shutil.rmtree(folder)


# -- nothing is left


@pytest.mark.slow
def test_fifty_starts_and_stops_leave_no_process_and_no_descriptor(doubles, monkeypatch):
  (double,) = doubles()
  cfg = knobs(double)
  task = android.task_lists(COMPUTER, cfg)["practice"][0]
  children = lambda: processes.family(os.getpid())
  monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(prefix="fifty-"))
  before, open_before = children(), len(os.listdir("/proc/self/fd"))
  for i in range(50):
    env = android.make(COMPUTER, cfg)
    env.reset(options={"task": task})
    env.step("wait()")
    if i % 5 == 0:  # one in five ends badly
      os.kill(env.phone.server.child.pid, signal.SIGKILL)
      with pytest.raises(adb.AdbServerLost):
        env.step("wait()")
    env.close()
  until = time.monotonic() + HEALTHY
  while len(os.listdir("/proc/self/fd")) > open_before and time.monotonic() < until:
    time.sleep(0.05)  # the double's own ends of connections
  assert children() == before and len(os.listdir("/proc/self/fd")) <= open_before
  assert list(pathlib.Path(tempfile.tempdir).glob("practice-adb-*")) == []
  shutil.rmtree(tempfile.tempdir)


def test_the_server_is_private(doubles, monkeypatch, tmp_path):
  """No port, no key of the user's, no other's emulators; a second environment cannot have the device."""
  (double,) = doubles()
  home = tmp_path / "home"
  home.mkdir()
  monkeypatch.setenv("HOME", str(home))
  monkeypatch.setenv("ADB_VENDOR_KEYS", str(home / "never.key"))
  env = android.make(COMPUTER, knobs(double))
  try:
    pid = env.phone.server.child.pid
    sockets = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    listening = [line.split()[9] for line in pathlib.Path("/proc/net/tcp").read_text().splitlines() if line.split()[3] == "0A"]
    assert not {f"socket:[{inode}]" for inode in listening} & sockets
    environment = pathlib.Path(f"/proc/{pid}/environ").read_text()
    assert f"HOME={home}\0" not in environment and "never.key" not in environment and list(home.iterdir()) == []
    assert oct(env.phone.server.nest.folder.stat().st_mode & 0o777) == "0o700"
    with pytest.raises(errors.NoComputer, match="in use for 1 s"):
      android.make(COMPUTER, knobs(double, attach_seconds=1.0))
  finally:
    env.close()


def test_a_device_that_is_not_there_says_so_at_boot(doubles):
  (double,) = doubles()
  double.offline = True
  cfg = knobs(double, attach_seconds=1.0)
  with pytest.raises(adb.DeviceLost, match=f"{double.serial}: not ready within 1 s"):
    android.make(COMPUTER, cfg)
  double.close()
  with pytest.raises(adb.DeviceLost, match="not ready within 1 s: .*(failed|cannot|refused|unable)"):
    android.make(COMPUTER, cfg)


def test_canaries_are_played_through_adb(doubles):
  (double,) = doubles()
  cfg = knobs(double)
  canaries = android.canaries(COMPUTER, cfg)
  assert [c.name for c in canaries] == ["known-good", "do-nothing"]
  spec, given = spec_of(cfg), defaults()
  given.update({"slots": 1})
  with Pool(spec, given, canaries=canaries) as pool:
    pool.lease().release()
    assert pool.slots[0].state is State.READY and pool.counts["canaries"] == 2


def test_a_policy_that_acts_by_chance_scores_alike_on_both(doubles):
  """Agent texts drawn by chance, unreadable ones among them: the same ends, rewards and frames."""
  (double,) = doubles()
  cfg = knobs(double)
  env, bare = android.make(COMPUTER, cfg), sim.make("sim/phone", cfg)
  rng, ends = np.random.default_rng(0), []
  try:
    for own, task, _ in scripts(cfg, 8):
      draw = lambda: ("tap({:.2f}, {:.2f})", 'type("red mug")', "press(BACK)", "press(ENTER)", "wait()", "press(HOME)", "tap(", "finish()")[
        rng.choice(8, p=[0.6, 0.1, 0.08, 0.08, 0.06, 0.04, 0.02, 0.02])
      ].format(*rng.random(2))
      texts = [draw() for _ in range(14)]
      mine, theirs = played(env, task, texts), played(bare, own, texts)
      assert mine == theirs
      ends.append(mine[-1][1])
    assert SUCCESS and len(ends) == 8
  finally:
    env.close()
