"""Other processes, told apart by pid and start time, and found by descent: a pid alone may be somebody else's by now."""

from __future__ import annotations

import os
import pathlib
import signal

PROC = pathlib.Path("/proc")


def _stat(pid: int) -> list[str] | None:
  """Fields 3 and on of /proc/PID/stat (state, parent, group, session, ...), or None if there is no such process."""
  try:
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
  except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
    return None


def start_time(pid: int) -> int | None:
  """Clock ticks from boot to the start of the process; None where it cannot be known."""
  stat = _stat(pid)
  return int(stat[19]) if stat else None


def alive(pid: int, start: int | None) -> bool:
  """Whether this very process still runs; one that has ended and waits to be collected does not."""
  stat = _stat(pid)
  return stat is not None and stat[0] not in "ZX" and (start is None or int(stat[19]) == start)


def family(*pids: int) -> list[tuple[int, int]]:
  """(pid, start time) of every other process in the sessions that these lead, and of all their descendants. One look at all there is."""
  stats = {int(p.name): stat for p in PROC.glob("[0-9]*") if (stat := _stat(int(p.name))) is not None}
  leaders = set(pids)
  found = {p for p, stat in stats.items() if int(stat[3]) in leaders}
  more = leaders
  while more:
    more = {p for p, stat in stats.items() if int(stat[1]) in more} - found - leaders
    found |= more
  return [(p, int(stats[p][19])) for p in sorted(found - leaders)]


def send(pid: int, start: int | None, what: signal.Signals) -> bool:
  """Signals this very process; False if it is gone."""
  if start is not None and start_time(pid) != start:
    return False
  try:
    os.kill(pid, what)
  except ProcessLookupError:
    return False
  return True


def send_group(leader: int, start: int | None, what: signal.Signals) -> None:
  """Signals a process group by its leader, which must not have been collected yet: until then the number is its own."""
  if start is not None and start_time(leader) != start:
    return
  try:
    os.killpg(leader, what)
  except ProcessLookupError:
    return


def end_descendants() -> None:
  """Kills all that descends from this process, as it is now; collecting it is left to whoever started it."""
  for pid, start in family(os.getpid()):
    send(pid, start, signal.SIGKILL)
