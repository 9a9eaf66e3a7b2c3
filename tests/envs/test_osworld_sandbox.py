"""What the processes of the metrics can do to get out of their limits, and whose fault it is when they run out of time."""

import subprocess
import time

import pytest

from envs.osworld import checker, checker_child
from envs.osworld.metrics import guard

WRITE = 'for m in $(cut -d" " -f2 /proc/self/mounts); do mount -o remount,bind,rw "$m"; done; echo x >"$0"'


@pytest.mark.parametrize("before", [[], ["unshare", "--user", "--mount"]], ids=["as it is", "in more namespaces"])
def test_what_runs_enclosed_cannot_make_the_file_system_writable_again(tmp_path, before):
  if why := checker.can_enclose():
    pytest.skip(f"no namespaces here: {why}")
  (tmp_path / "own").mkdir()
  for name, written in (("beside", False), ("own/file", True)):
    argv = [*before, "sh", "-c", WRITE, str(tmp_path / name)]
    subprocess.run(checker.enclosed(argv, str(tmp_path / "own")), capture_output=True, timeout=30, check=False)
    assert (tmp_path / name).exists() == written


def test_a_metric_that_hardly_had_the_processor_is_not_the_results_fault():
  late = lambda ran: checker_child.late(0, None, began=time.process_time() - ran, seconds=60.0)
  with pytest.raises(checker_child.TooLong):  # scores 0
    late(40.0)
  with pytest.raises(checker_child.Starved):  # no score
    guard.read(lambda path: late(20.0), __file__, "result")
