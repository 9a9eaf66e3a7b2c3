"""What a process asks of its machine (core/host.py)."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TWICE = """
import resource
import sys
import numpy as np
from core.host import keep_freed_memory
assert keep_freed_memory()
def faults(size):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  np.empty(size, np.uint8)[::4096] = 1
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults(int(sys.argv[1])), faults(int(sys.argv[1])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
@pytest.mark.parametrize("size", [96 << 20, 3 << 29], ids=["96 MiB", "1.5 GiB"])
def test_memory_of_any_size_is_kept_when_it_is_freed(size):
  """The first time every page is new: one fault a huge page of 2 MiB at least. The second time none is."""
  done = subprocess.run([sys.executable, "-c", TWICE, str(size)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
  first, second = map(int, done.stdout.split())
  assert first >= size >> 21 and second <= first / 10
