"""What a process asks of its machine before it computes: freed memory kept at hand, compiled programs kept on disk,
a folder to itself; and what to say where the machine is too small."""

from __future__ import annotations

import ctypes
import fcntl
import io
import os
import pathlib
import sys

# glibc's mallopt parameters
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> bool:
  """Asks glibc to keep what is freed. Call before the first computation; returns whether it was done (Linux with glibc).

  XLA's CPU backend allocates and frees its temporaries at every call. By default glibc gives such large blocks back to the
  kernel at once, and every step pays for some 25,000 page faults: a third of the CPU time of the embedded default. A learner of
  135M parameters has one block of gigabytes and paid for 1.6 million of them: no size may be an exception.
  """
  if sys.platform != "linux":
    return False
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
  if mallopt is None:
    return False
  wanted = ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 64 << 20))  # trim -1: never
  return all([mallopt(parameter, value) for parameter, value in wanted])


def use_compile_cache(directory: str) -> None:
  """A second start takes its compiled programs from here: those that took a tenth of a second, or as long as jax was told already, where
  that is less. Empty = off."""
  if directory:
    import jax  # here: whoever only holds a folder must not hold devices

    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min(0.1, jax.config.jax_persistent_cache_min_compile_time_secs))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def out_of_memory(error: BaseException) -> str:
  """One line on what to lower where an error says that a device or the machine has no memory left; "" of any other error."""
  said = " ".join(str(error).split())
  if not isinstance(error, MemoryError) and not said.startswith("RESOURCE_EXHAUSTED"):
    return ""
  where = "this machine" if isinstance(error, MemoryError) else "the device"
  return (
    f"{where} has no memory left ({said.removeprefix('RESOURCE_EXHAUSTED: ')[:150].rstrip('. ')}): lower agent.minibatch or raise "
    "practice.micro_batches where it learns, lower copy.batch where it copies, practice.slots or sampler.sessions.slots where it samples; "
    "a checkpoint takes less with policy.dtype=bfloat16, policy.lora.rank, policy.freeze_tower, a lower policy.max_prompt or max_pixels"
  )


def hold(workdir: pathlib.Path) -> io.TextIOWrapper:
  """Makes the folder and locks it for this process, until the returned file is closed. ValueError if another process has it."""
  workdir.mkdir(parents=True, exist_ok=True)
  lock = open(workdir / ".lock", "a+")  # noqa: SIM115 the caller closes it
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    lock.close()
    raise ValueError(f"{workdir} is in use by another process: wait for it, or give another --workdir") from None
  return lock
