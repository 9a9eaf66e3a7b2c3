"""Sampling beside learning: nothing waits for the slowest, nothing old is trained on unnoticed, nothing finished is lost."""

import functools
import threading
import time
import types

import numpy as np
import pytest
from conftest import Broken

from agents.base import select_groups, select_scored
from core import blob
from core.schema import End, Episode, Limits, Task, TokenRecord
from envs.inside import Inside
from envs.leases import Result
from rollout.queue import GroupQueue, Ledger
from rollout.replay import Replay
from rollout.sampler import Sampled
from rollout.scheduler import Lane, Scheduler
from rollout.stream import Stream, StreamBroken
from rollout.turn import Try

SELECT = functools.partial(select_groups, use_replay=False, drop_equal=True)


class Tasks:
  """next_task(): tasks t0, t1, ... of one step each, the reward of every try given by rewards(task number, try number)."""

  def __init__(self, task, **knobs):
    self.made, self.task, self.knobs = [], task, knobs

  def __call__(self):
    made = self.task(f"t{len(self.made)}", **({"steps": 1, "reward": 1.0} | self.knobs))
    self.made.append(made)
    return made


@pytest.fixture
def stream_of(scripted_env, policy, sampler):
  """stream_of(slots=4, slow={environment: seconds}) -> a Stream over scripted environments that may sleep in a step."""
  opened, release = [], threading.Event()  # what still sleeps at the end wakes up

  def make(slots=4, slow=None, **knobs):
    envs = [scripted_env() for _ in range(slots)]
    for i, seconds in (slow or {}).items():
      step = envs[i].step
      envs[i].step = lambda text, step=step, seconds=seconds: (release.wait(seconds), step(text))[1]
    key = lambda serial, k: np.array([serial, k], np.uint32)
    stream = Stream(sampler, Inside(envs, threads=True), GroupQueue(Ledger()), key, patience=0.001, **knobs)
    stream.wake = release.set
    opened.append(stream)
    return stream

  yield make
  release.set()
  for stream in opened:
    if stream._thread.is_alive():
      stream.close()
    stream.scheduler.computers.close()


def gather(stream, tasks, update=0, select=select_scored, clock=lambda name, seconds: None, **how):
  how = {"version": 0, "groups": 2, "rounds": 2, "group_size": 2, "max_age": 1} | how
  return stream.gather(Replay(0), select, tasks, np.random.default_rng(0), update=update, clock=clock, **how)


def until(happened, seconds=30.0):
  """Waits for what another thread does."""
  deadline = time.monotonic() + seconds
  while not happened():
    assert time.monotonic() < deadline, "it never happened"
    time.sleep(0.005)


def books(stream):
  ledger = stream.groups.ledger
  return ledger.started, ledger.trained, sum(ledger.dropped.values()), len(stream.groups)


def test_groups_come_as_they_are_complete_and_every_try_is_accounted_for(stream_of, task):
  tasks = Tasks(task)
  with stream_of() as stream:
    for update in range(5):
      got = gather(stream, tasks, update, version=update, max_age=5)
      assert len(got.kept) == 2 and got.stopped == "full" and got.version == update
      assert all(len(g.episodes) == 2 for g in got.kept)
      started, trained, dropped, flying = books(stream)
      assert started == trained + dropped + flying and trained == 4 * (update + 1) and dropped == 0
  ids = [e.task_id for e in got.episodes]
  assert len(set(ids)) == 2 and set(ids) <= {t.id for t in tasks.made}


def test_what_is_under_way_is_bounded_by_the_age_that_is_allowed(stream_of, task):
  """The back-pressure: groups of 2 tries, 2 an update. With max_age 3 at most 2 (wanted) + 3 x 2 groups are open or complete;
  held back to one update ahead 2 + 2, to half of one 2 + 1; further ahead than max_age is never."""
  for max_age, ahead, most in ((0, 0, 2), (1, 0, 4), (3, 0, 8), (3, 1, 4), (3, 0.5, 3), (0, 2, 2)):
    tasks = Tasks(task)
    with stream_of(ahead=ahead) as stream:
      gather(stream, tasks, max_age=max_age)
      time.sleep(0.1)  # whatever is open ends; nothing new starts by itself
      assert len(tasks.made) <= most and (max_age or len(stream.groups) == 0)


def test_after_a_barrier_all_computers_are_busy_at_once(stream_of, task):
  """max_age 0: when an update's groups are taken nothing is under way; one turn of the scheduler later all 8 computers are busy again."""
  tasks = Tasks(task)
  stream = stream_of(slots=8, threaded=False)
  for _ in range(2):
    gather(stream, tasks, group_size=4, max_age=0)
    assert stream.scheduler.busy == 0 and len(stream.groups) == 0
    stream.scheduler._hear = lambda wait: []  # nothing is heard: only starts
    stream.top_up(2, tasks, lambda task_id, default: default, 4)
    stream._advance(0.0)
    assert stream.scheduler.busy == 8
    del stream.scheduler._hear


def test_max_age_0_means_that_every_token_is_of_the_version_that_is_trained(stream_of, task, sampler):
  tasks = Tasks(task, steps=3)
  with stream_of(slow={0: 0.02}) as stream:
    for version in range(4):
      sampler.version = version
      got = gather(stream, tasks, version=version, max_age=0)
      written = {int(v) for e in got.episodes for r in e.records for v in r.version[r.is_action]}
      assert written == {version} and got.dropped["age"] == 0


def test_an_episode_goes_on_under_new_weights_and_its_tokens_say_so(stream_of, task, sampler):
  """A slow episode of 6 steps begins under version 0; version 1 is published while its first is done. Its age counts from the oldest."""
  tasks = Tasks(task, steps=6)
  with stream_of(slots=1, slow={0: 30.0}) as stream:
    stream.top_up(1, tasks, lambda task_id, default: default, 1)
    until(lambda: [turn for turn, _ in list(stream.scheduler.turns.values()) if hasattr(turn, "written")])
    sampler.version = 1
    stream.wake()
    got = gather(stream, tasks, groups=1, group_size=1, version=1, max_age=1)
  written = [int(r.version[r.is_action][0]) for e in got.episodes for r in e.records]
  assert written == [0, 1, 1, 1, 1, 1] and got.episodes[0].oldest_version == 0


def test_what_is_too_old_when_it_would_be_trained_on_is_dropped_and_replaced(stream_of, task, sampler):
  """max_age 1, and the trainer is at version 2 when it takes what version 0 wrote: dropped by age, and others sampled."""
  tasks = Tasks(task)
  with stream_of() as stream:
    stream.top_up(2, tasks, lambda task_id, default: default, 2)
    until(lambda: stream.groups.complete == 2)
    sampler.version = 2
    got = gather(stream, tasks, version=2, max_age=1)
    assert got.dropped["age"] == 4 and len(got.kept) == 2
    assert {e.oldest_version for e in got.episodes} == {2}
    started, trained, dropped, flying = books(stream)
    assert started == trained + dropped + flying and dropped == 4


def test_a_slow_computer_holds_nobody_up(stream_of, task):
  """Four computers, one of which takes 20 s a step: the others bring 8 groups of one try while its first step still runs."""
  tasks = Tasks(task)
  with stream_of(slow={0: 20.0}) as stream:
    got = gather(stream, tasks, groups=8, group_size=1, max_age=4)
    assert len(got.kept) == 8 and len(stream.plans) >= 1 and stream.scheduler.busy >= 1


def test_a_group_that_cannot_teach_is_followed_by_others_up_to_the_cap(stream_of, task):
  tasks = Tasks(task)  # every try passes: no group is mixed
  with stream_of() as stream:
    got = gather(stream, tasks, select=SELECT, groups=2, rounds=3)
    assert got.kept == [] and got.stopped == "rounds" and len(got.groups) == 6 and got.dropped["all_pass"] == 12


def test_a_try_that_broke_is_run_again_and_the_third_time_it_is_an_infra_error(stream_of, task):
  """One fault in the first attempt: scored, with the fault on record. Three faults: no score, never a 0."""
  with stream_of(slots=1) as stream:
    got = gather(stream, Tasks(task, fault={1: 1}), groups=1, group_size=1, max_age=0)
    assert got.episodes[0].success and got.episodes[0].notes["faults"] == ["Broken"]
  with stream_of(slots=1) as stream:
    got = gather(stream, Tasks(task, fault={1: 99}), groups=1, group_size=1, rounds=1, max_age=0)
    assert got.kept == [] and got.dropped["infra_error"] == 1 and got.episodes[0].end == End.INFRA_ERROR


def test_an_error_in_the_sampling_thread_reaches_the_learner(stream_of, task, sampler):
  class Bug(Exception):
    pass

  def broken(*args):
    raise Bug("of ours")

  stream = stream_of()
  sampler.act = broken
  with stream, pytest.raises(StreamBroken, match="Bug"):
    gather(stream, Tasks(task))


def test_a_computer_that_hangs_ends_the_wait_and_closing_does_not_wait_for_it(stream_of, task):
  began = time.monotonic()
  says = "sign of life for 0 seconds: 1 computers are busy"
  with stream_of(slots=1, slow={0: 20.0}, silence=0.3) as stream, pytest.raises(StreamBroken, match=says):
    gather(stream, Tasks(task), groups=1, group_size=1, max_age=0)
  assert time.monotonic() - began < 15.0


def test_a_signal_ends_the_wait(stream_of, task):
  class Stop(Exception):
    pass

  def clock(name, seconds):
    raise Stop

  with stream_of(slots=1, slow={0: 30.0}) as stream, pytest.raises(Stop):
    gather(stream, Tasks(task), clock=clock, groups=1, group_size=1)


def test_a_save_keeps_what_is_finished_and_tries_the_rest_again_under_its_own_keys(stream_of, task):
  """Two groups of 2: one complete, one half done. The resumed stream starts one try only, and the books close over both."""
  tasks = Tasks(task)
  stream = stream_of(slots=3, slow={0: 30.0})  # the last environment takes the first try
  with stream:
    stream.top_up(2, tasks, lambda task_id, default: default, 2)
    until(lambda: sum(len(stream.groups.so_far(n)) for n in stream.plans) == 3)
    text, arrays, screens = blob.encode({"stream": stream.state(), "ledger": stream.groups.ledger.state()})
  saved = blob.decode(text, arrays, screens.__getitem__)
  again = stream_of()
  again.groups.ledger.restore(saved["ledger"])
  again.restore(saved["stream"])
  left = list(again._waiting)
  assert len(left) == 1 and again.groups.complete == 1 and books(again) == (4, 0, 0, 4)
  serial = again.plans[left[0].group].serial
  assert left[0].key.tolist() == [serial, left[0].index] and again.serial == 2
  with again:
    time.sleep(0.1)  # the run loads its weights here: nothing is tried before the learner asks
    assert list(again._waiting) == left
    got = gather(again, tasks, max_age=0)
  assert len(got.kept) == 2 and len(tasks.made) == 2 and books(again) == (4, 4, 0, 0)


def test_many_updates_with_random_delays_end_and_leave_no_thread(stream_of, task, sampler):
  """64 environments, one group an update and one ahead, weights published at every update, 200 updates, random delays: no deadlock, and
  the law holds at each."""
  rng = np.random.default_rng(0)
  tasks = Tasks(task, steps=2)
  threads = threading.active_count()
  with stream_of(slots=64, slow={i: float(d) for i, d in enumerate(rng.exponential(0.004, 64))}) as stream:
    for version in range(200):
      sampler.version = version
      got = gather(stream, tasks, version=version, groups=1, max_age=1)
      assert len(got.kept) == 1
      assert max(version - e.oldest_version for e in got.episodes) <= 1
  stream.scheduler.computers.close()
  deadline = time.monotonic() + 5
  while threading.active_count() > threads and time.monotonic() < deadline:
    time.sleep(0.02)
  assert threading.active_count() <= threads


def test_a_group_that_lost_tries_to_age_gets_fresh_ones_once(stream_of, task, sampler):
  """Two computers, a group of 2: one try is done under version 0, the slow one ends under version 3. Taken at version 3 with max_age 1
  the first is too old: it is dropped and tried again, and the group comes whole. Books: 2 + 1 started, 1 dropped, 2 trained."""
  tasks = Tasks(task)
  with stream_of(slots=2, slow={0: 30.0}) as stream:
    stream.top_up(1, tasks, lambda task_id, default: default, 2)
    first = next(iter(stream.plans))
    until(lambda: stream.groups.so_far(first))
    (slow,) = (turn for turn, _ in list(stream.scheduler.turns.values()))
    until(lambda: hasattr(slow, "written"))  # it may have been asked later than the other, which has already ended
    slow.written = (slow.written[0], slow.written[1]._replace(version=3), *slow.written[2:])  # written under version 3
    sampler.version = 3
    stream.wake()
    until(lambda: stream.groups.complete)
    taken = [gather(stream, tasks, groups=1, version=3, max_age=1)]
    assert taken[0].dropped["age"] == 1
    while first not in {g.id for got in taken for g in got.kept}:  # others may be complete before it
      taken.append(gather(stream, tasks, groups=1, version=3, max_age=1))
    assert all(len(g.episodes) == 2 and {e.oldest_version for e in g.episodes} == {3} for got in taken for g in got.kept)
    assert stream.groups.ledger.trained == 2 * len(taken) and stream.groups.ledger.dropped["age"] == 1
  assert len(set(sampler.keys)) == len(sampler.keys)  # the fresh try has a key of its own


def test_a_group_is_topped_up_once_and_then_goes_on_without_the_old(policy):
  queue = GroupQueue(Ledger())
  queue.open("g", "t", 3)
  for k, version in enumerate((0, 4, 5)):
    queue.add(written("g", k, version))
  assert queue.renew(5, 2, lambda name: False) == {} and queue.complete == 1
  assert queue.renew(5, 2, lambda name: True) == {"g": [0]} and queue.complete == 0 and len(queue) == 3
  assert queue.ledger.started == 4 and queue.ledger.dropped["age"] == 1
  queue.add(written("g", 0, 5))
  groups, old = queue.take(7, 2)
  assert old == 1 and [e.try_index for e in groups[0].episodes] == [0, 2]  # version 4 is 3 old by then


def written(group, index, version):
  record = TokenRecord(
    np.array([1, 7], np.int32), np.array([False, True]), np.zeros(2, np.float32), np.array([-1, version], np.int32),
    np.zeros(2, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32),
  )  # fmt: skip
  return Episode("t", group, index, 0, [], End.TERMINATED, "agent", {"success": 1.0}, [record])


def test_other_tries_share_the_computers_and_go_first(stream_of, task, policy):
  """An evaluation of 6 tries while practice is under way: written by its own sampler, none of them in practice's books."""
  tasks, judge = Tasks(task, steps=3), _Judge(policy)
  with stream_of(slots=3) as stream:
    stream.top_up(4, tasks, lambda task_id, default: default, 2)
    plan = [Try(task(f"e{i}", steps=2), "eval", i, np.array([9, i], np.uint32)) for i in range(6)]
    episodes = list(stream.run(judge, plan, lambda name, seconds: None))
    assert sorted(e.try_index for e in episodes) == list(range(6)) and all(e.group == "eval" for e in episodes)
    assert {int(v) for e in episodes for r in e.records for v in r.version[r.is_action]} == {77}
    got = gather(stream, tasks, groups=4, version=0, max_age=2)
    assert len(got.kept) == 4 and {e.oldest_version for e in got.episodes} == {0}


class _Judge:
  """Another sampler: version 77."""

  def __init__(self, policy):
    self.policy = policy

  def act(self, prompts, keys):
    return [Sampled(np.array([9, 1], np.int32), np.zeros(2, np.float32), np.zeros(2, np.float32), 77) for _ in prompts]


def test_without_a_thread_the_learner_drives(policy, sampler, scripted_env, task):
  """For simulated fleets: nothing happens but in the learner's own waits, and in `drive`."""
  tasks = Tasks(task, steps=2)
  stream = Stream(sampler, Inside([scripted_env() for _ in range(2)]), GroupQueue(Ledger()), lambda s, k: np.array([s, k], np.uint32),
                  patience=0.0, threaded=False)  # fmt: skip
  with stream:
    stream.top_up(2, tasks, lambda task_id, default: default, 2)
    assert not sampler.batches
    got = gather(stream, tasks, max_age=0)
    assert len(got.kept) == 2 and threading.active_count() >= 1 and sampler.batches == [2] * 4


def test_how_busy_the_computers_are():
  """By hand: 2 computers, 10 seconds; one holds a try from 0 to 8 and steps for 5 of them: (8 + 0) / 20 and 5 / 20."""
  now = [0.0]

  class One:
    size, parked, answers = 2, {}, []

    def try_lease(self):
      return self if not self.answers else None

    def submit_reset(self, task):
      self.answers = [Result("reset", None, Broken("x"), 5.0)]

    def wait(self, seconds):
      now[0] = 8.0
      return [(self, self.answers[0])]

    def release(self):
      pass

  lane = Lane(types.SimpleNamespace(policy=None), iter([Try(Task("t", "g", "e", "f", 0, {}, Limits(1)), "g", 0, None), None]).__next__)
  scheduler = Scheduler(One(), reruns=0, now=lambda: now[0])
  ((_, episode),) = scheduler.advance([lane])
  now[0] = 10.0
  assert episode.end_cause == "Broken" and scheduler.utilisation() == {
    "rate/environment_utilisation": 0.4,
    "rate/environment_stepping": 0.25,
  }
  now[0] = 20.0
  assert scheduler.utilisation() == {"rate/environment_utilisation": 0.0, "rate/environment_stepping": 0.0}
