"""The pool: leases, deadlines, and actions that are carried out once. Computers are played by hand (hand_played.py)."""

import pytest
import rogue
from gymnasium.error import ResetNeeded
from hand_played import TASK, begun, conserved, make_fixture, states  # noqa: F401

from core.schema import SUCCESS
from envs import errors
from envs.pool import State, check, defaults

# -- states and leases


def test_a_computer_goes_from_cold_to_leased_and_back(make):
  pool, world = make()
  assert states(pool) == [State.BOOTING]
  lease = pool.lease()
  assert states(pool) == [State.LEASED]
  world.remotes[0].mute.add("reset")
  lease.submit_reset(TASK)
  assert states(pool) == [State.RESETTING]
  world.remotes[0].inbox.append(world.remotes[0].answer(world.remotes[0].log[-1]))
  ((who, result),) = pool.wait(1)
  assert who is lease and result.op == "reset" and result.error is None and states(pool) == [State.LEASED]
  lease.release()
  assert states(pool) == [State.READY] and world.remotes[0].ops() == ["boot", "reset"]


def test_never_more_leases_than_slots_and_a_free_one_wakes_the_scheduler(make):
  pool, world = make(slots=2, spares=1)
  leases = [pool.lease(), pool.lease()]
  pool.wait(0.0)
  assert pool.try_lease() is None and states(pool).count(State.READY) == 1
  with pytest.raises(errors.NoComputer, match="1 ready, 2 of 2 leased"):
    pool.lease(timeout=7)
  assert world.now == 1007.0
  leases[0].release()
  assert pool.wait(1000.0) == [] and world.now == 1007.0  # at once: somebody had asked
  assert pool.try_lease() is not None


def test_one_thread_drives_many_and_results_come_as_they_are_ready(make):
  pool, world = make(slots=3)
  leases = [begun(pool) for _ in range(3)]
  for lease in leases:
    world.of(lease).mute.add("step")
    lease.submit_step("x")
  assert pool.wait(2.0) == [] and world.now == 1002.0
  slow = world.of(leases[1])
  slow.inbox.append(slow.answer(slow.log[-1]))
  assert [(who, r.op, r.value[1:]) for who, r in pool.wait(5.0)] == [(leases[1], "step", (0.0, False, False, {}))]
  assert world.now == 1002.0


def test_an_answer_that_nobody_heard_goes_with_its_lease(make):
  """Both answers arrive; a call that waits for its own reads them, and the other's lease ends before anybody has looked."""
  pool, _ = make(slots=2)
  first, second = begun(pool), begun(pool)
  second.submit_step("x")
  first.step("y")
  second.release()
  assert pool.wait(0.0) == [] and conserved(pool) and pool.counts["calls/step"] == 2


def test_misuse_is_not_an_infra_error(make):
  pool, world = make()
  lease = pool.lease()
  with pytest.raises(ResetNeeded):
    lease.step("x")
  with pytest.raises(ValueError, match="got NoneType"):
    lease.reset()
  with pytest.raises(ValueError, match="is for sim/phone, this pool has rogue/one"):
    lease.reset(options={"task": rogue.Task("p", "g", "sim/phone", "f", 1, {}, rogue.Limits(1))})
  lease.reset(options={"task": TASK})
  world.of(lease).mute.add("step")
  lease.submit_step("x")
  with pytest.raises(RuntimeError, match="while its step is still on its way"):
    lease.submit_step("y")
  assert pool.counts["started"] == 1 and not pool.faulted


def test_an_ended_episode_takes_no_step(make):
  pool, _ = make()
  lease = begun(pool)
  assert lease.step("pass")[2]
  with pytest.raises(ResetNeeded):
    lease.step("x")
  lease.reset(options={"task": TASK})
  assert lease.expire()["rewards"] == {SUCCESS: 0.0}
  with pytest.raises(ResetNeeded):
    lease.expire()
  assert pool.ledger() == {"started": 2, "finished": 2, "faulted": 0, "abandoned": 0, "in_flight": 0}


def test_an_environment_for_rollouts_holds_a_computer_only_during_an_episode(make):
  pool, world = make()
  env = pool.env()
  env.reset(options={"task": TASK})
  assert pool.leased == 1 and not env.step("x")[2]
  assert env.step("fail")[2] and pool.leased == 0
  env.reset(options={"task": TASK})
  assert env.unwrapped.expire()["rewards"] and pool.leased == 0
  env.reset(options={"task": TASK})
  world.remotes[0].gone = "before"
  with pytest.raises(errors.WorkerDied):
    env.step("x")
  env.reset(options={"task": TASK})  # on a new worker, as if nothing had been
  assert len(world.remotes) == 2 and pool.leased == 1
  with pytest.raises(RuntimeError, match="call reset"):
    pool.env().step("x")


# -- deadlines


@pytest.mark.parametrize(
  "op, limits, kind, seconds",
  [("reset", {"reset": 7}, "ResetDeadline", 7), ("step", {"act": 3, "settle": 1, "observe": 2, "evaluate": 4}, "ActDeadline", 10),
   ("expire", {"evaluate": 6}, "EvaluateDeadline", 6), ("step", {"episode": 8}, "EpisodeDeadline", 8)],
)  # fmt: skip
def test_past_its_deadline_a_call_is_an_infra_error_that_says_which(make, op, limits, kind, seconds):
  pool, world = make(**limits)
  lease = pool.lease() if op == "reset" else begun(pool)
  worker, began = world.of(lease), world.now
  worker.mute.add(op)
  ask = {"reset": lambda: lease.reset(options={"task": TASK}), "step": lambda: lease.step("x"), "expire": lease.expire}[op]
  with pytest.raises(errors.InfraError) as caught:
    ask()
  assert type(caught.value).__name__ == kind and world.now == began + seconds
  said = str(caught.value)
  assert all(f"{name} {n}" in said for name, n in limits.items()) and "last line" in said and "task a" in said
  assert worker.killed and states(pool) == [State.BROKEN]
  assert pool.faulted == {kind: 1} and conserved(pool)
  with pytest.raises(errors.InfraError):
    lease.reset(options={"task": TASK})  # this lease is over
  assert begun(pool).step("pass")[2]  # the computer is not


def test_a_boot_that_never_ends(make):
  pool, world = make(mute=["boot"], boot=30, backoff=0.0, lease=40)
  with pytest.raises(errors.NoComputer, match="1 booting"):
    pool.lease()
  assert pool.counts["fault/BootDeadline"] == 1 and world.remotes[0].killed and world.now == 1040.0 and not pool.faulted


@pytest.mark.parametrize(
  "phases, kind, seconds", [(["act"], "ActDeadline", 3), (["act", "settle"], "SettleDeadline", 1), (["observe"], "ObserveDeadline", 2),
                            (["act", "settle", "observe", "evaluate"], "EvaluateDeadline", 4)],
)  # fmt: skip
def test_an_environment_that_says_where_it_is_has_a_deadline_for_each_part(make, phases, kind, seconds):
  pool, world = make(act=3, settle=1, observe=2, evaluate=4)
  lease = begun(pool)
  worker, began = world.of(lease), world.now
  worker.mute.add("step")
  lease.submit_step("x")
  worker.inbox += [{"id": worker.log[-1]["id"], "token": lease.token, "phase": name} for name in phases]
  ((_, result),) = pool.wait(100)
  assert type(result.error).__name__ == kind and world.now == began + seconds
  assert isinstance(result.error, errors.ActionAmbiguous) == (kind == "ActDeadline")


def test_siblings_of_a_late_one_go_on(make):
  pool, world = make(slots=2, act=5, settle=1, observe=1, evaluate=1)
  late, well = begun(pool), begun(pool)
  world.of(late).mute.add("step")
  late.submit_step("x")
  for i in range(20):
    assert well.step(f"{i}")[1] == 0.0
  assert world.now == 1000.0  # not a moment was waited for the late one


def test_a_busy_trainer_blames_no_worker(make):
  """What had arrived by the time the pool is driven again is never late; thinking does not count."""
  pool, world = make(act=3, settle=1, observe=1, evaluate=1, episode=20, agent=5000)
  lease = begun(pool)
  lease.submit_step("x")
  world.now += 1000
  ((_, result),) = pool.wait(0)
  assert result.error is None
  world.now += 3000
  assert lease.step("y")[1] == 0.0 and not pool.faulted


def test_an_episode_may_spend_so_long_inside_the_environment(make):
  pool, world = make(episode=25, act=30)
  lease = begun(pool)
  worker = world.of(lease)
  worker.mute.add("step")

  def step(seconds):
    lease.submit_step("x")
    assert pool.wait(seconds) == []
    worker.inbox.append(worker.answer(worker.log[-1]))
    return pool.wait(0)[0][1].error

  assert step(10) is None and step(10) is None
  world.now += 500  # thinking
  lease.submit_step("x")
  ((_, result),) = pool.wait(100)
  assert isinstance(result.error, errors.EpisodeDeadline) and world.now == 1525.0 and "episode 25" in str(result.error)


def test_an_agent_that_never_comes_back_loses_its_computer(make):
  pool, world = make(agent=60)
  lease = begun(pool)
  pool.wait(59)
  assert states(pool) == [State.LEASED]
  pool.wait(2)
  assert states(pool) == [State.READY] and pool.leased == 0 and not world.remotes[0].killed
  with pytest.raises(errors.AgentDeadline, match="no call in 60 s"):
    lease.step("x")
  assert pool.faulted == {"AgentDeadline": 1} and conserved(pool)
  assert not pool.slots[0].record.in_a_row  # the computer is not to blame
  pool, _ = make(agent=0)
  begun(pool)
  pool.wait(10**7)
  assert states(pool) == [State.LEASED]  # 0: as long as it likes


# -- exactly once, fencing


def test_a_worker_lost_after_an_action_was_sent_is_ambiguous_and_it_is_never_sent_again(make):
  pool, world = make()
  lease = begun(pool)
  worker = world.of(lease)
  worker.mute.add("step")
  lease.submit_step("buy")
  worker.die()
  ((_, result),) = pool.wait(10)
  assert type(result.error) is errors.ActionAmbiguous and "during step: exit code 3" in str(result.error)
  with pytest.raises(errors.ActionAmbiguous):
    lease.step("buy")
  again = begun(pool)
  again.step("other")
  assert [m["text"] for r in world.remotes for m in r.log if m["op"] == "step"] == ["buy", "other"]


def test_a_worker_lost_before_an_action_was_sent_is_not(make):
  pool, world = make()
  lease = begun(pool)
  world.of(lease).gone = "before"
  with pytest.raises(errors.WorkerDied) as caught:
    lease.step("buy")
  assert not isinstance(caught.value, errors.ActionAmbiguous)


def test_actions_are_numbered_within_an_episode(make):
  pool, world = make()
  lease = begun(pool)
  lease.step("a"), lease.step("b")
  lease.reset(options={"task": TASK})
  lease.step("c")
  assert [m["act"] for m in world.of(lease).log if m["op"] == "step"] == [1, 2, 1]


def test_answers_to_an_old_lease_or_call_are_dropped(make):
  pool, world = make()
  lease = begun(pool)
  worker = world.of(lease)
  worker.mute.add("step")
  lease.submit_step("slow")
  lease.release()
  assert states(pool) == [State.RESETTING] and pool.try_lease() is None  # it has to finish first
  worker.inbox.append(worker.answer(worker.log[-1]))
  worker.mute.clear()
  new = pool.lease()
  assert new.token > lease.token and pool.counts["dropped_answers"] == 1
  new.submit_reset(TASK)
  worker.inbox.insert(0, {"id": 1, "token": lease.token, "result": {"nonsense": 1}})
  old = {"screen": {}, "obs": {}, "info": "of an old lease"}
  worker.inbox.insert(0, worker.inbox[-1] | {"token": lease.token, "result": old})  # the right number under the old token
  ((who, result),) = pool.wait(1)
  assert who is new and result.value[1] == {"notes": {}} and pool.counts["dropped_answers"] == 3
  with pytest.raises(errors.LeaseLost, match="was released"):
    lease.step("late")
  assert worker.ops() == ["boot", "reset", "step", "reset"] and pool.ledger()["abandoned"] == 1 and conserved(pool)


def test_a_worker_that_talks_nonsense_is_ended(make):
  pool, world = make()
  lease = begun(pool)
  world.of(lease).said["step"] = {"result": {"reward": 1.0}}
  with pytest.raises(errors.WorkerFault, match="step was answered with nonsense: KeyError"):
    lease.step("x")
  assert world.remotes[0].killed and pool.faulted == {"WorkerFault": 1}


# -- telling, closing, config


def test_who_waits_for_what(make):
  pool, world = make(slots=2, mute=["step"])
  lease = begun(pool)
  lease.submit_step("x")
  pool.wait(3)
  lines = pool.report().splitlines()
  assert lines[0] == f"computer 0 leased, step  for 3.0 s, 167.0 s left, lease {lease.token}, task a, 1 actions"
  assert lines[1].startswith("computer 1 ready, looked after in")
  snapshot = pool.snapshot()
  assert (snapshot["computers/leased"], snapshot["computers/ready"], snapshot["episodes/in_flight"]) == (1, 1, 1)
  assert all(isinstance(v, float) for v in snapshot.values())


def test_a_tick_can_end_a_wait(make):
  class Stop(Exception):
    pass

  def tick():
    if world.now > 1005:
      raise Stop

  pool, world = make(tick=tick)
  lease = begun(pool)
  world.of(lease).mute.add("step")
  with pytest.raises(Stop):
    lease.step("x")
  assert world.now <= 1007


def test_a_closed_pool_has_ended_every_lease(make):
  pool, world = make(slots=2, mute=["close"])
  lease = begun(pool)
  pool.close()
  assert all(r.killed for r in world.remotes) and pool.ledger()["abandoned"] == 1 and conserved(pool)
  with pytest.raises(errors.LeaseLost, match="closed"):
    lease.step("x")
  with pytest.raises(RuntimeError, match="the pool is closed"):
    pool.lease()
  lease.release()
  pool.close()


@pytest.mark.parametrize(
  "name, value, said",
  [("slots", 0, "pool.slots is 0, wanted a whole number, 1 or more"), ("spares", -1, "pool.spares"), ("ping", 0.0, "pool.ping is 0.0"),
   ("backend", "cloud", "pool.backend is 'cloud', wanted 'local'"), ("recycle_jitter", 1.0, "pool.recycle_jitter"),
   ("backoff", float("nan"), "pool.backoff is nan"), ("quarantine_faults", 0, "pool.quarantine_faults"),
   ("deadlines.act", 0.0, "pool.deadlines.act is 0.0, wanted seconds above 0"),
   ("deadlines.reset", float("inf"), "pool.deadlines.reset is inf"),
   ("deadlines.close", 9.0, "wanted 6 seconds at most"), ("deadlines.agent", -1.0, "or 0 .no limit."),
   ("slotz", 3, "there is no pool.slotz")],
)  # fmt: skip
def test_knobs_outside_their_domain_stop_in_one_line(name, value, said):
  cfg = defaults()
  if name == "slotz":
    cfg.slotz = value
  else:
    cfg.update_from_flattened_dict({name: value})
  with pytest.raises(ValueError, match=said) as caught:
    check(cfg)
  assert "\n" not in str(caught.value)
  check(defaults())
