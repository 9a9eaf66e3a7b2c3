"""Computers of this process behind the pool's interface: what they answer, what breaks, and whom a slow one holds up."""

import threading
import time

import pytest

from core.schema import Limits, Task
from envs.errors import ResetFailed
from envs.inside import Inside

TASK = Task("t", "goal", "e", "f", 0, {}, Limits(3))


class Env:
  """Says what it was asked; `says` = an exception is raised instead; waits for `gate` in a step if there is one."""

  def __init__(self, says=None, gate=None):
    self.says, self.gate, self.unwrapped, self.seeds = says, gate, self, []

  def reset(self, *, options, seed=None):
    self.seeds.append(seed)
    if self.says is not None:
      raise self.says
    return options["task"].id

  def step(self, text):
    if self.gate is not None:
      self.gate.wait(20)
    return text + "!"

  def expire(self):
    return "over"


@pytest.mark.parametrize("threads", [False, True])
def test_every_question_is_answered_once_with_its_seconds(threads):
  with Inside([Env(), Env()], threads) as computers:
    leases = [computers.try_lease() for _ in range(3)]
    assert leases[2] is None and leases[0] is not leases[1] and computers.size == 2
    leases[0].submit_reset(TASK)
    leases[1].submit_reset(TASK, seed=7)
    got = dict(wait_for(computers, 2))
    assert [(got[lease].op, got[lease].value, got[lease].error) for lease in leases[:2]] == [("reset", "t", None)] * 2
    assert leases[0].env.seeds == [None] and leases[1].env.seeds == [7] and all(r.seconds >= 0 for r in got.values())
    leases[0].submit_step("a")
    leases[1].submit_expire()
    got = dict(wait_for(computers, 2))
    assert (got[leases[0]].value, got[leases[1]].value) == ("a!", "over") and computers.wait(0.0) == []
    leases[0].release()
    assert computers.try_lease() is leases[0] and computers.report().startswith("2 of 2")


def wait_for(computers, n):
  out, until = [], time.monotonic() + 10
  while len(out) < n:
    assert time.monotonic() < until
    out += computers.wait(0.1)
  return out


@pytest.mark.parametrize("threads", [False, True])
def test_an_infra_error_is_an_answer_and_a_bug_is_raised_where_it_is_heard(threads):
  with Inside([Env(ResetFailed("no screen"))], threads) as computers:
    computers.try_lease().submit_reset(TASK)
    ((_, result),) = wait_for(computers, 1)
    assert isinstance(result.error, ResetFailed) and result.value is None
  with Inside([Env(KeyError("a bug"))], threads) as computers, pytest.raises(KeyError, match="a bug"):
    computers.try_lease().submit_reset(TASK)
    wait_for(computers, 1)


def test_one_that_hangs_holds_nobody_up_and_does_not_keep_the_process():
  gate = threading.Event()
  computers = Inside([Env(), Env(gate=gate)], threads=True)
  slow, quick = computers.try_lease(), computers.try_lease()
  slow.submit_step("x")
  quick.submit_step("y")
  ((who, result),) = wait_for(computers, 1)
  assert who is quick and result.value == "y!"
  mine = [t for t in threading.enumerate() if t.name == "computer" and t.is_alive()]
  began = time.monotonic()
  computers.close()
  assert time.monotonic() - began < 1.0 and mine and all(t.daemon for t in mine)
  gate.set()
  for thread in mine:
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("threads", [False, True])
def test_what_nobody_waits_for_any_more_is_never_heard(threads):
  """Given back in the middle of a call: the next one to have the computer hears its own answers only."""
  gate = threading.Event()
  with Inside([Env(gate=gate if threads else None)], threads) as computers:
    lease = computers.try_lease()
    lease.submit_step("old")
    lease.release()
    assert computers.try_lease() is None  # not before it is done
    gate.set()
    until = time.monotonic() + 10
    while (again := computers.try_lease()) is None and time.monotonic() < until:
      assert computers.wait(0.1) == []
    again.submit_step("new")
    assert [result.value for _, result in wait_for(computers, 1)] == ["new!"]
