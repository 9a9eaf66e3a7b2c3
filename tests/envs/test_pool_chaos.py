"""The pool over real worker processes: equal to an environment in process, whole after every kind of misbehaviour, gone when closed."""

import collections
import os
import pathlib
import random
import signal
import threading
import time

import numpy as np
import pytest
import rogue
from hand_played import conserved

from core.schema import SUCCESS
from envs import canary, errors, processes, sim
from envs.inside import Inside
from envs.pool import EnvSpec, Pool, State, defaults, spec_of
from envs.sim.base import expert_text, play
from envs.sim.popups import Popups

SUITE = str(pathlib.Path(__file__).parent / "rogue.py")


def knobs(**given):
  cfg = defaults()
  cfg.update({"slots": 1, "quarantine_faults": 100, "backoff": 0.0, "park": 0, "recycle": 0})
  cfg.deadlines.update({"boot": 60.0, "reset": 20.0, "act": 20.0, "close": 1.0})
  for name, value in given.items():
    if name in cfg.deadlines:
      cfg.deadlines[name] = value
    else:
      cfg[name] = value
  return cfg


def rogues(config=None, canaries=(), **given):
  return Pool(EnvSpec(SUITE, rogue.COMPUTER, config or {}), knobs(**given), canaries=canaries)


def workers(pool):
  """(pid, start time) of every worker process."""
  return [(s.remote.pid, s.remote.started) for s in pool.slots if s.remote is not None]


def left_over(who, seconds=10.0):
  until = time.monotonic() + seconds
  while (left := [w for w in who if processes.alive(*w)]) and time.monotonic() < until:
    time.sleep(0.01)
  return left


# -- the same as in process


@pytest.fixture(scope="module")
def phone():
  cfg = sim.defaults()
  cfg.update({"computer": "sim/phone", "popup_chance": 0.4, "popup_most": 2})
  return cfg


@pytest.fixture(scope="module")
def phones(phone):
  with Pool(spec_of(phone), knobs(slots=2)) as pool:
    yield pool


def told(env, task, texts):
  """Everything an environment says in one try: frames by their bytes, the rest by its types and digits."""
  obs, info = env.reset(options={"task": task})
  out = [(obs.pop("screenshot"), sorted(obs.items()), repr(info))]
  for text in texts:
    if text is None:
      return [*out, repr(env.unwrapped.expire())]
    obs, *rest = env.step(text)
    out.append((obs.pop("screenshot"), sorted(obs.items()), repr(rest)))
    if rest[1] or rest[2]:
      break
  return out


def expert_texts(env, task):
  env.reset(options={"task": task})
  texts = []
  while not env.done:
    texts.append(expert_text(env))
    env.step(texts[-1])
  return texts


def test_an_episode_through_a_worker_is_the_same_bit_for_bit(phone, phones):
  """Solved, given up, unreadable, out of steps, expired; with pop-ups; two tasks in turn on each computer."""
  inside, through = sim.make("sim/phone", phone), phones.env()
  for i, task in enumerate(sim.task_lists("sim/phone", phone)["practice"][:6]):
    solution = expert_texts(inside, task)
    for texts in (
      solution,
      [*solution[:2], "finish()"],
      ["tap(0.5, 0.5)", ("no action", "x" * 200_000)[i % 2]],
      ["wait()"] * 20,
      [*solution[:3], None],
    ):
      ours, theirs = told(inside, task, texts), told(through, task, texts)
      assert len(ours) == len(theirs) >= 2
      for a, b in zip(ours, theirs):
        assert a == b if isinstance(a, str) else a[1:] == b[1:]
        if not isinstance(a, str):
          assert a[0].dtype == b[0].dtype and np.array_equal(a[0], b[0])
  assert conserved(phones) and phones.ledger()["finished"] == phones.counts["leases"] == 30 and not phones.faulted


class Writer:
  """A policy and its sampler that read nothing and write the script."""

  policy = property(lambda self: self)

  class tokenizer:
    decode = staticmethod(lambda tokens: ("wait()", "tap(0.50, 0.20)", "press(BACK)", "oops")[int(tokens[0])])

  def prompt(self, goal, screens, text, history=()):
    from models.base import Prompt

    return Prompt(np.zeros(1, np.int32), np.zeros((1, 1), np.int32), np.zeros(1, np.int32), np.zeros((1, 4), np.uint8), 1)

  def act(self, prompts, keys):
    from rollout.sampler import Sampled

    one = lambda key: Sampled(np.array([key[0] % 16 // 5], np.int32), np.zeros(1, np.float32), np.zeros(1, np.float32), 0)
    return [one(key) for key in keys]


def test_rollouts_drive_it_like_an_environment_in_process(phone, phones):
  """jax runs in the trainer by then, and no worker has it."""
  import jax

  from rollout.scheduler import collect
  from rollout.turn import Try

  jax.devices()
  tasks = sim.task_lists("sim/phone", phone)["practice"][:5]
  plan = [Try(task, f"g{i}", k, np.array([i, k], np.uint32)) for i, task in enumerate(tasks) for k in range(2)]
  shown = []
  for computers in (Inside([sim.make("sim/phone", phone) for _ in range(2)]), phones):
    episodes = sorted(collect(Writer(), computers, plan), key=lambda e: (e.group, e.try_index))
    shown.append(
      [(e.group, e.try_index, e.end, e.end_cause, e.rewards, e.final_screen.ref,
        [(s.screen.ref, s.text, s.action, s.point, s.notes) for s in e.steps])
       for e in episodes]
    )  # fmt: skip
  assert shown[0] == shown[1] and len(shown[0]) == 10
  lease = phones.lease()
  lease.slot.remote.send({"op": "ping", "id": -5, "token": 0})
  (said,) = [m for _ in range(100) for r in phones.backend.poll(0.1) if r is lease.slot.remote for m in r.receive()][:1]
  assert said["result"]["accelerated"] == []
  lease.release()


def test_canaries_of_a_simulated_phone(phone):
  task = sim.task_lists("sim/phone", phone)["practice"][0]
  solution = [s.text for s in play("sim/phone", task, Popups()).steps]
  with Pool(spec_of(phone, clean=True), knobs(), canaries=[canary.known_good(task, solution), canary.do_nothing(task)]) as pool:
    assert pool.lease(60) and pool.counts["canaries"] == 2


@pytest.mark.parametrize("checker, reason", [("never", "known-good on task t scored 0"), ("always", "do-nothing on task t scored 1")])
def test_a_checker_that_lies_keeps_its_computer_out(checker, reason):
  checks = [canary.known_good(rogue.task("t"), ["solve", "done"]), canary.do_nothing(rogue.task("t"))]
  with rogues({"checker": checker}, checks) as pool, pytest.raises(errors.PoolExhausted, match=reason):
    pool.lease(60)


# -- misbehaviour


HANG = {"act": 0.2, "settle": 0.1, "observe": 0.1, "evaluate": 0.1}


@pytest.fixture(scope="module")
def pool():
  with rogues(slots=2) as pool:
    yield pool


@pytest.mark.parametrize(
  "text, kind, said",
  [("hang", "ActDeadline", "running, no answer in"),
   ("stop", "ActDeadline", "act 0.2 . settle 0.1"), ("phases act settle 9", "SettleDeadline", "settle 0.1 s"),
   ("raise", "WorkerFault", "in step: KeyError: 'the disk is full'"), ("odd", "WorkerFault", "info.notes.odd is a builtins.object"),
   ("exit", "ActionAmbiguous", "during step: exit code 7\n.*last words of the worker"), ("kill", "ActionAmbiguous", "ended by signal 9"),
   ("leave", "ActionAmbiguous", "exit code 0"), ("frame black", "BlackFrame", "black"), ("frame short", "BadFrame", "3, 4, 3"),
   ("frame none", "BadFrame", "NoneType"), ("infra checker", "CheckerFailed", "said by the env"), ("infra ink", "OutOfInk", "said by")],
)  # fmt: skip
def test_a_step_that_goes_wrong_is_an_infra_error_and_the_next_episode_is_well(pool, text, kind, said, tmp_path):
  pool._limits |= HANG if "Deadline" in kind else {}
  before, task = pool.faulted[kind], rogue.task(diary=str(tmp_path / "diary"))
  try:
    env = pool.env()
    env.reset(options={"task": task})
    with pytest.raises(errors.InfraError, match="(?s)" + said) as caught:
      env.step(text)
  finally:
    pool._limits |= {name: float(seconds) for name, seconds in pool.cfg.deadlines.items()}
  assert type(caught.value).__name__ == kind and pool.faulted[kind] == before + 1
  env.reset(options={"task": task})
  env.step("solve")
  assert env.step("done")[4]["rewards"] == {SUCCESS: 1.0} and conserved(pool) and pool.in_flight == 0
  assert (tmp_path / "diary").read_text().splitlines() == ["reset", text, "reset", "solve", "done"]  # nothing twice


@pytest.mark.parametrize(
  "how, kind",
  [({"reset": "hang"}, "ResetDeadline"), ({"reset": "raise"}, "WorkerFault"), ({"reset": "exit"}, "WorkerDied"),
   ({"reset": "infra reset"}, "ResetFailed"), ({"frame": "frame black"}, "BlackFrame")],
)  # fmt: skip
def test_a_reset_that_goes_wrong(pool, how, kind):
  pool._limits["reset"] = 0.3 if kind == "ResetDeadline" else 20.0
  with pytest.raises(errors.InfraError) as caught:
    pool.env().reset(options={"task": rogue.task(**how)})
  pool._limits["reset"] = 20.0
  assert type(caught.value).__name__ == kind and conserved(pool)
  assert pool.env().reset(options={"task": rogue.task()})[1] == {"notes": {"seed": None}}
  [s.lease.release() for s in pool.slots if s.lease]


def test_output_without_end_holds_nobody_up(pool):
  env = pool.env()
  env.reset(options={"task": rogue.task()})
  env.step("shout 2000")
  with pytest.raises(errors.ActionAmbiguous) as caught:
    env.step("exit")
  lines = str(caught.value).splitlines()
  assert len(lines) == 51 and lines[-1] == "  last words of the worker" and "line 1999" in lines[-2]


def test_a_boot_that_goes_wrong():
  with (
    rogues({"boot": "hang"}, boot=0.3, quarantine_faults=2) as pool,
    pytest.raises(errors.PoolExhausted, match="2 faults .* BootDeadline"),
  ):
    pool.lease(30)
  with rogues({"boot": "raise"}, quarantine_faults=1) as pool, pytest.raises(errors.PoolExhausted, match="WorkerFault: .*the disk is full"):
    pool.lease(60)


def test_siblings_of_the_dead_the_hung_and_the_raising_finish():
  """Each of three computers goes wrong at its third step; the fourth plays on, and all four are there again afterwards."""
  with rogues(slots=4, act=0.5, settle=0.1, observe=0.1, evaluate=0.1) as pool:
    leases = [pool.lease(60) for _ in range(4)]
    pool._limits |= {"act": 3.0}
    for lease in leases:
      lease.reset(options={"task": rogue.task()})
      lease.step("a"), lease.step("b")
    for lease, text in zip(leases, ("exit", "hang", "raise")):
      lease.submit_step(text)
    began = time.monotonic()
    leases[3].step("solve")
    assert leases[3].step("done")[2] and time.monotonic() - began < 3.0
    ended = {}
    while len(ended) < 3:
      ended |= {who.token: type(result.error).__name__ for who, result in pool.wait(5.0)}
    assert [ended[lease.token] for lease in leases[:3]] == ["ActionAmbiguous", "ActDeadline", "WorkerFault"]
    leases[3].release()
    assert len([pool.lease(60) for _ in range(4)]) == 4


# -- nothing is left


def test_a_pool_closes_from_any_state():
  """Booting, idle, hung in a step, stopped, hung in its own close."""
  for config, text in (({}, "hang"), ({}, "stop"), ({"close": "hang"}, None), ({"boot": "hang"}, None)):
    pool = rogues(config, slots=2)
    if "boot" not in config:
      lease = pool.lease(60)
      lease.reset(options={"task": rogue.task()})
      if text:
        lease.submit_step(text)
        pool.wait(0.2)
    who, began = workers(pool), time.monotonic()
    assert len(who) == 2
    pool.close()
    assert time.monotonic() - began < 10 and not left_over(who, 0.0) and conserved(pool) and pool.in_flight == 0


def test_a_pool_closes_though_its_keeper_is_stuck():
  """As in the start of a process on a file system that hangs."""
  pool, stuck = rogues(slots=2), threading.Event()
  pool.lease(60)
  who, keeper = workers(pool), pool.backend.keeper
  keeper.ask(lambda: stuck.wait(60))
  pool.close()
  assert len(who) == 2 and not left_over(who, 0.0) and keeper._thread.is_alive()
  stuck.set()
  keeper._thread.join(5)
  assert not keeper._thread.is_alive()


def test_twenty_starts_and_stops_leave_nothing_behind():
  def held():
    keepers = sum(thread.name == "worker keeper" for thread in threading.enumerate())
    return len(os.listdir("/proc/self/fd")), keepers, len(processes.family(os.getpid()))

  counts = []
  for i in range(20):
    pool = rogues(slots=1)
    if i % 4 == 0:
      pool.env().reset(options={"task": rogue.task()})
    if i % 4 == 1:
      os.kill(workers(pool)[0][0], signal.SIGKILL)
      pool.wait(0.05)
    pool.close()
    counts.append(held())
  assert len(set(counts[1:])) == 1, counts


# -- chaos


def scheduled(pool, plan, seconds):
  """Plays the plan, a list of (task, texts, kill before step or None), as a scheduler does; [(index, what came of it)]."""
  waiting, playing, out, until = list(enumerate(plan)), {}, [], time.monotonic() + seconds
  while waiting or playing:
    assert time.monotonic() < until, pool.report()
    while waiting and (lease := pool.try_lease()) is not None:
      index, (task, texts, kill) = waiting.pop(0)
      playing[lease] = [index, list(texts), kill]
      lease.submit_reset(task)
    for lease, result in pool.wait(1.0):
      index, texts, kill = playing[lease]
      over = result.error is not None or (result.op == "step" and (result.value[2] or result.value[3])) or result.op == "expire"
      if over:
        said = result.error or (result.value[4] if result.op == "step" else result.value)["rewards"]
        out.append((index, said))
        del playing[lease]
        lease.release()
        continue
      playing[lease][2] = kill = None if kill is None else kill - 1
      if kill == 0:
        os.kill(lease.slot.remote.pid, signal.SIGKILL)
      lease.submit_step(texts.pop(0)) if texts else lease.submit_expire()
  return out


def test_chaos(tmp_path):
  """150 short episodes: a tenth of them are killed from outside, 5% hang, 5% raise, and some screens are black or cut short. Every
  well-behaved one gets the score that its script earns, none of the others gets any, and nothing is lost, repeated or left."""
  rng, plan, want, diaries = random.Random(7), [], [], []
  for i in range(150):
    fate = rng.choices(["killed", "hang", "raise", "frame black", "frame short", "well"], [10, 5, 5, 3, 3, 74])[0]
    solved, ending = rng.random() < 0.5, rng.choice(["done", None])
    texts = [f"look {i}"] + ["solve"] * solved + ["look again"] + [ending] * (ending is not None)
    if fate not in ("killed", "well"):
      texts.insert(rng.randrange(len(texts)), fate)
    diaries.append(tmp_path / f"{i}")
    plan.append((rogue.task(f"t{i}", diary=str(diaries[-1])), texts, rng.randint(1, 2) if fate == "killed" else None))
    want.append({SUCCESS: float(solved)} if fate == "well" else fate)
  kinds = {"killed": {"ActionAmbiguous", "WorkerDied"}, "hang": {"ActDeadline"}, "raise": {"WorkerFault"}, "frame black": {"BlackFrame"},
           "frame short": {"BadFrame"}}  # fmt: skip
  pool = rogues(slots=3, spares=1, boots=2, recycle=8, recycle_jitter=0.5, act=0.8, settle=0.1, observe=0.1, evaluate=1.5, ping=1000.0)
  seen = set()
  try:
    started = pool.backend.start
    pool.backend.start = lambda slot: [remote := started(slot), seen.add((remote.pid, remote.started))][0]
    seen |= set(workers(pool))
    got = dict(scheduled(pool, plan, 80))
    assert sorted(got) == list(range(150))
    for i, wanted in enumerate(want):
      if isinstance(wanted, dict):
        assert got[i] == wanted, i
      else:
        assert type(got[i]).__name__ in kinds[wanted], (i, got[i])
    faults = collections.Counter(type(v).__name__ for v in got.values() if isinstance(v, Exception))
    assert faults == pool.faulted and sum(faults.values()) >= 25
    ledger = pool.ledger()
    assert ledger == {
      "started": 150,
      "finished": 150 - sum(faults.values()),
      "faulted": sum(faults.values()),
      "abandoned": 0,
      "in_flight": 0,
    }
    for i, diary in enumerate(diaries):  # what was done, in order, never twice
      done = diary.read_text().splitlines()
      assert done == (["reset"] + [t for t in plan[i][1]])[: len(done)] and len(done) == len(set(done))
    assert pool.counts["recycled"] >= 2 and pool.counts["promoted"] >= 1
  finally:
    pool.close()
  assert len(seen) > 20 and not left_over(seen)
  assert all(s.remote is None and s.state in (State.COLD, State.BROKEN) for s in pool.slots)
