"""Sampling beside learning: environments never wait for the slowest, nor for the learner. Lesson chapter 4.

A thread of its own starts tries, batches whatever asks for an action, and files finished episodes; every environment steps in
a thread of its own, so slow ones (another process, a virtual machine) hold nobody up. The learner takes complete groups when
it wants them; the weights it publishes are used from the next action on, also in the middle of an episode, and every token
says which version wrote it.
"""

from __future__ import annotations

import collections
import queue as queues
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from core.schema import Episode, Group, Task
from rollout.gather import Gathered
from rollout.queue import GroupQueue
from rollout.replay import Replay
from rollout.sampler import Sampler
from rollout.turn import Try, Turn


class StreamBroken(RuntimeError):
  """The sampling thread ended with an error, or gave no sign of life for too long. The cause is chained or named."""


class Stream:
  """`with Stream(...) as stream:` then `stream.gather(...)` at every update.

  key(serial, try) -> uint32 [2]: a sampling key of its own for every try. reruns: how often a try that an infra error ended is
  run again. patience: seconds to wait for more environments to ask before a batch is sampled. silence: seconds without any
  event after which waiting learners are told that something hangs. note(name, seconds) accounts wall time.
  """

  def __init__(
    self, sampler: Sampler, envs: list, groups: GroupQueue, key: Callable[..., np.ndarray], *, reruns: int = 2, patience: float = 0.005,
    silence: float = 1800.0, note: Callable[[str, float], None] = lambda name, seconds: None,
  ):  # fmt: skip
    self.sampler, self.groups, self.key, self.note = sampler, groups, key, note
    self.reruns, self.patience, self.silence = reruns, patience, silence
    self.changed = threading.Condition()
    self.serial = 0  # groups ever opened
    self.plans: dict[str, tuple[Task, int, int]] = {}  # open groups: task, serial, tries
    self._waiting: collections.deque[Try] = collections.deque()
    self._faults: dict[tuple[str, int], list[str]] = collections.defaultdict(list)
    self._idle = [Turn(env, sampler.policy) for env in envs]
    self._busy = 0
    self._events: queues.SimpleQueue = queues.SimpleQueue()
    self._closing, self._error, self._alive = threading.Event(), None, time.monotonic()
    self._workers = ThreadPoolExecutor(max_workers=len(envs), thread_name_prefix="env")
    self._thread = threading.Thread(target=self._guarded, name="stream", daemon=True)

  def __enter__(self) -> Stream:
    self._thread.start()
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def close(self, seconds: float = 10.0) -> None:
    """Ends the thread. An environment that hangs in a step is left to its own deadline; nothing waits for it here."""
    self._closing.set()
    self._thread.join(seconds)
    self._workers.shutdown(wait=False, cancel_futures=True)

  # -- what the learner calls, from its own thread

  def top_up(self, ahead: int, next_task: Callable[[], Task], tries: Callable[[str, int], int], group_size: int) -> None:
    """Opens groups until `ahead` are open or complete: the back-pressure. What is open is never thrown away for it."""
    with self.changed:
      while len(self.plans) + self.groups.complete < ahead:
        task = next_task()
        self._open(f"s{self.serial}", task, self.serial, tries(task.id, group_size), ())
        self.groups.ledger.started += self.plans[f"s{self.serial}"][2]
        self.serial += 1

  def gather(
    self, replay: Replay, select: Callable, next_task: Callable[[], Task], rng: np.random.Generator, *, update: int, version: int,
    groups: int, rounds: int, group_size: int, max_age: int, clock: Callable,
    tries: Callable[[str, int], int] = lambda task_id, default: default,
  ) -> Gathered:  # fmt: skip
    """Complete groups until `groups` of them teach, at most rounds x groups of them. Age is checked here, as they are taken.

    While the learner trains, groups worth max_age further updates are under way; with max_age 0 none is: the next update's
    tries all start under the next weights.
    """
    del update  # keys go by the groups' own numbers: an update has no tries of its own here
    out, ledger, most = Gathered(version=version), self.groups.ledger, rounds * groups
    while len(out.kept) < groups and len(out.groups) < most:
      wanted = groups - len(out.kept)
      ahead = min(wanted, most - len(out.groups)) if max_age == 0 else wanted + max_age * groups
      self.top_up(ahead, next_task, tries, group_size)
      fresh, old = self._take(version, max_age, wanted, clock)
      kept, dropped, swapped = select(fresh, replay, rng)
      for episode in (e for group in fresh for e in group.episodes):
        replay.add(episode)
        out.episodes.append(episode)
      ledger.dropped.update(dropped)
      out.dropped.update(dropped | {"age": old})
      out.kept, out.groups, out.swapped = out.kept + kept, out.groups + fresh, out.swapped + swapped
    out.stopped = "full" if len(out.kept) >= groups else "rounds"
    ledger.trained += sum(not e.replayed for group in out.kept for e in group.episodes)
    with self.changed:
      ledger.check(in_flight=len(self.groups))
    return out

  def _take(self, version: int, max_age: int, most: int, clock: Callable) -> tuple[list[Group], int]:
    """At most `most` complete groups, waiting for the first. clock("waiting", seconds) is where a signal ends the wait."""
    while True:
      began = time.monotonic()
      with self.changed:
        if not self.groups.complete and self._error is None:
          self.changed.wait(0.2)
        if self._error is not None:
          raise StreamBroken(f"sampling ended: {self._error!r}") from self._error
        groups, old = self.groups.take(version, max_age, most)
      clock("waiting", time.monotonic() - began)
      if groups or old:
        return groups, old
      if time.monotonic() - self._alive > self.silence:
        raise StreamBroken(f"no environment gave a sign of life for {self.silence:.0f} seconds: {self._busy} are busy, "
                           f"{len(self._waiting)} tries wait")  # fmt: skip

  def state(self) -> dict:
    """Groups in the making with their finished tries, and complete ones: nothing finished is lost with a save."""
    with self.changed:
      opened = [{"name": n, "task": t, "serial": s, "tries": k, "episodes": list(self.groups.so_far(n))}
                for n, (t, s, k) in self.plans.items()]  # fmt: skip
      return {"serial": self.serial, "open": opened, "complete": self.groups.waiting()}

  def restore(self, state: dict) -> None:
    """Goes on where `state` was taken: what was in flight is tried again under its own key."""
    with self.changed:
      self.serial = state["serial"]
      self.groups.put_back(state["complete"])
      for o in state["open"]:
        self._open(o["name"], o["task"], o["serial"], o["tries"], o["episodes"])

  def _open(self, name: str, task: Task, serial: int, size: int, episodes) -> None:
    """A group in the making, `episodes` of whose tries are there already."""
    self.plans[name] = (task, serial, size)
    self.groups.reopen(name, task.id, size, list(episodes))
    done = {e.try_index for e in episodes}
    self._waiting.extend(Try(task, name, k, self.key(serial, k)) for k in range(size) if k not in done)

  # -- the sampling thread

  def _guarded(self) -> None:
    try:
      self._run()
    except BaseException as error:  # noqa: BLE001 - handed to the learner's thread, which raises it
      self._error = error
      with self.changed:
        self.changed.notify_all()

  def _run(self) -> None:
    asking: list[Turn] = []
    while not self._closing.is_set():
      self._start_tries()
      asking += self._drain(0.0 if asking else 0.05)
      if asking and len(asking) < self._busy:
        asking += self._drain(self.patience)
      if not asking:
        continue
      prompts, keys = [t.prompt() for t in asking], np.stack([t.key() for t in asking])
      began = time.monotonic()
      sampled = self.sampler.act(prompts, keys)
      seconds = time.monotonic() - began
      self.note("sampling", seconds)
      for turn, prompt, out in zip(asking, prompts, sampled, strict=True):
        self._workers.submit(self._step, turn, turn.advance, prompt, out, seconds)
      asking = []

  def _start_tries(self) -> None:
    with self.changed:
      while self._idle and self._waiting:
        turn, trial = self._idle.pop(), self._waiting.popleft()
        self._busy += 1
        self._workers.submit(self._step, turn, turn.begin, trial)

  def _step(self, turn: Turn, act: Callable, *args) -> None:
    """One environment's own work, in its own thread."""
    began, episode, broke = time.monotonic(), None, None
    try:
      episode = act(*args)
    except BaseException as error:  # noqa: BLE001 - raised again in the sampling thread
      broke = error
    self._events.put((turn, episode, broke))
    self.note("environments", time.monotonic() - began)

  def _drain(self, seconds: float) -> list[Turn]:
    """Environments that ask for an action; waits up to `seconds` for the first. Files the episodes that ended."""
    asking, wait = [], seconds
    while True:
      try:
        turn, episode, error = self._events.get(timeout=wait) if wait else self._events.get_nowait()
      except queues.Empty:
        return asking
      if error is not None:
        raise error
      self._alive, wait = time.monotonic(), 0.0
      if episode is None:
        asking.append(turn)
      else:
        self._ended(turn, episode)

  def _ended(self, turn: Turn, episode: Episode) -> None:
    before = self._faults[episode.group, episode.try_index]
    with self.changed:
      self._idle.append(turn)
      self._busy -= 1
      if not episode.scored and len(before) < self.reruns:
        before.append(episode.end_cause)
        self._waiting.appendleft(turn.trial)
        return
      episode.notes["faults"] = self._faults.pop((episode.group, episode.try_index))
      if self.groups.add(episode):
        del self.plans[episode.group]
        self.changed.notify_all()
