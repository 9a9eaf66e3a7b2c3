"""Real virtual machines behind the pool: one breaks in the middle of a step, the tries are all made, nothing is left."""

import os
import pathlib
import signal
import time

import pytest

from core.schema import Limits, Task
from envs import pool, processes
from envs.errors import InfraError
from tests.real.test_machines import desktop, knobs  # noqa: F401 - a fixture

pytestmark = pytest.mark.real
TASK = Task("look", "Look at the desktop.", "desktop", "look", 0, {}, Limits(5))
BREAKS = {signal.SIGKILL: "VmDied", signal.SIGSTOP: "VmHung"}


def test_a_group_is_completed_whatever_machine_breaks(desktop):  # noqa: F811
  suite = str(pathlib.Path(__file__).with_name("desktop_suite.py"))
  cfg = pool.defaults()
  cfg.update({"slots": 2, "backoff": 0.1, "quarantine_faults": 20, "park": 0})
  for name in ("boot", "reset", "act", "settle", "observe", "evaluate"):
    cfg.deadlines[name] = 600.0
  spec = pool.EnvSpec(suite, "desktop", knobs(call_seconds=20.0).to_dict())
  passed, causes, folders, breaks = 0, [], set(), list(BREAKS)
  with pool.Pool(spec, cfg) as computers:
    family = lambda: processes.family(os.getpid())
    for _ in range(8):
      with computers.lease(600.0) as lease:
        try:
          _, info = lease.reset(options={"task": TASK})
          folders.add(info["notes"]["folder"])
          if breaks:
            lease.submit_step("Action: wait()")
            os.kill(info["notes"]["pid"], breaks[0])
            ((_, result),) = computers.wait(600.0)
            raise result.error
          lease.step("Action: click(start_box='(300,300)')")
          _, reward, terminated, *_ = lease.step("Action: finished()")
          passed += reward == 1.0 and terminated
        except InfraError as fault:
          causes.append(type(fault).__name__)
          breaks.pop(0)
      if passed == 3:
        break
    seen, ledger = family(), computers.ledger()
  assert causes == list(BREAKS.values()) and passed == 3
  assert (ledger["started"], ledger["finished"], ledger["faulted"]) == (5, 3, 2)
  until = time.monotonic() + 20
  while (left := [p for p, start in seen if processes.alive(p, start)]) and time.monotonic() < until:
    time.sleep(0.1)
  assert not left and not [f for f in folders if pathlib.Path(f).exists()]
