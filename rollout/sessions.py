"""The in-process sampler for real policies: many episodes on the slots of one cache, each prefilling only what is new to it.

A session is an episode. It asks with a whole Prompt; what the cache already holds of it (the session's own slot, or the slot of a sibling
that begins the same) is not computed again. A session may lose its slot to another under pressure: it keeps its ids and is filled anew when
it asks, with the same result. docs/sampler.md says how to choose the sizes.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
from collections.abc import Hashable, Sequence
from typing import Any

import ml_collections
import numpy as np

from core.state import Weights
from models.base import Policy, Prompt
from rollout.engine import Engine, Written
from rollout.sampler import Sampled
from rollout.slots import Ask, Counts, Session, Slot


class SessionSampler:
  """Samples actions for episodes that come back. One thread asks and polls; `load` may be called from any.

  policy: see Engine for what its functions must take; slots: episodes that write at once; spans, chunks, steps: see Engine, the longest
  span is the cache's length; temperature: 1.0 while training, 0 = greedy, for evaluation only; stop: texts that end an action as the end
  of turn does; stop_ids: ids that do; most: tokens an action may have, 0 = the policy's; on_load: "keep" caches that older weights
  filled, within their own session, or "rebuild" them before the next token; frozen_tower: image features outlive a load; burst: tokens of
  prefill after which those that write get their turn; images_kept: features kept on the device; base: parameters that are never loaded
  again, where what is loaded joins them (`policy.join`); warm: the first prompt compiles every program before it is read.
  """

  def __init__(
    self, policy: Policy, slots: int, spans: Sequence[int], *, chunks: Sequence[int] = (32, 128, 512), steps: int = 8,
    temperature: float = 1.0, stop: Sequence[str] = (), stop_ids: Sequence[int] = (), most: int = 0, on_load: str = "keep",
    frozen_tower: bool = False, burst: int = 4096, images_kept: int = 64, base: Any = None,
    warm: bool = False,
  ):  # fmt: skip
    check(policy, slots, spans, chunks, steps, temperature, stop, most, on_load, burst, images_kept)
    self.policy, self.temperature, self.stop, self.on_load, self.burst = policy, temperature, tuple(stop), on_load, burst
    self.frozen_tower, self.images_kept, self.most = frozen_tower, images_kept, most or policy.max_action
    self.engine = Engine(policy, slots, spans, chunks, steps, (policy.tokenizer.eos_id, *stop_ids), temperature)
    self._cold = warm
    self._base = None if base is None else self.engine.own(base)
    self.slots: list[Slot] = []  # made by the first prompt, which says how many axes positions have
    self.sessions: dict[Hashable, Session] = {}
    self.counts, self._told = Counts(), Counts()
    self.weights: Weights | None = None
    self._next: Weights | None = None
    self._loading = threading.Lock()
    self._waiting: collections.deque[Ask] = collections.deque()
    self._writing: list[Ask] = []
    self._ready: list[tuple[Hashable, Sampled]] = []
    self._features: collections.OrderedDict[str, Any] = collections.OrderedDict()
    self._blank: dict[tuple[int, ...], Any] = {}
    self._clock = 0

  @property
  def tokens(self) -> int:
    """Action tokens written so far."""
    return self.counts.decoded

  def curves(self) -> dict[str, float]:
    """Since it was last asked for."""
    now, before, self._told = dataclasses.replace(self.counts), self._told, dataclasses.replace(self.counts)
    for name, value in vars(before).items():
      setattr(now, name, getattr(now, name) - value)
    return {"rate/prefill_amplification": now.amplification, "rate/stale_tokens": now.stale / max(1, now.decoded)}

  @property
  def busy(self) -> int:
    """Sessions that ask: while there are any, `poll` has work."""
    return len(self._waiting) + len(self._writing)

  # -- what its users call

  def load(self, weights: Weights) -> None:
    """Swaps the weights before the next token. A copy is kept: the learner donates its own."""
    params = self.engine.own(weights.params)
    mine = Weights(params if self._base is None else self.policy.join(self._base, params), weights.version)
    with self._loading:
      self._next = mine

  def close(self) -> None:
    """Forgets all sessions and lets go of the cache."""
    self.sessions.clear()
    self._waiting.clear()
    self._writing.clear()
    self.slots, self.engine.cache = [], None

  def end(self, session: Hashable) -> None:
    """The episode is over. What its slot holds serves others that begin the same, until the slot is needed."""
    known = self.sessions.pop(session, None)
    if known is None:
      return
    if known.slot is not None:
      known.slot.owner = None
    self._waiting = collections.deque(a for a in self._waiting if a.session is not known)
    self._writing = [a for a in self._writing if a.session is not known]

  def ask(self, session: Hashable, prompt: Prompt, key: np.ndarray) -> None:
    """Queues a step of a session, which is opened where it is new: `poll` will return what it writes. prompt: whole, as the policy shows
    it now; key uint32 [2]: this step's own, so that a result does not depend on who else asks, nor when. ValueError where the step cannot
    fit into the cache, or the session is asking already; nothing changes then."""
    known = self.sessions.get(session) or Session(session)
    self._refuse(known, prompt)
    if self._cold:
      self.warm_up(prompt)
    if not self.slots:
      axes, places = prompt.positions.shape[0], self.engine.spans[-1]
      zeros = lambda *shape: np.zeros(shape, np.int32)
      self.slots = [Slot(i, zeros(places), zeros(axes, places), zeros(places)) for i in range(self.engine.slots)]
    self.sessions[session] = known
    n = min(len(known.tokens), len(prompt.tokens) - 1)
    extends = np.array_equal(known.tokens[:n], prompt.tokens[:n]) and n >= len(known.tokens) - 1
    self.counts.restarted += not extends
    self.counts.new += len(prompt.tokens) - (max(0, len(known.tokens) - 1) if extends else 0)
    images = dict(zip(map(int, prompt.image_place), known.show(prompt.images[: len(prompt.image_place)]), strict=True))
    tokens, positions = np.asarray(prompt.tokens, np.int32), np.asarray(prompt.positions, np.int32)
    known.ask = Ask(known, np.asarray(key, np.uint32), len(tokens), tokens, positions, images, prompt.images)
    self._waiting.append(known.ask)

  def poll(self, burst: float | None = None) -> list[tuple[Hashable, Sampled]]:
    """A little work for whoever asks: prefills up to `burst` tokens (None: the sampler's), then writes up to `steps` in every session
    that can. Returns the steps that are done."""
    self._swap()
    left = self.burst if burst is None else burst
    while self._waiting and left > 0 and self._place(self._waiting[0]):
      left -= self._chunk(self._waiting[0])
    if self._writing:
      self._decode()
    ready, self._ready = self._ready, []
    return ready

  def act(self, prompts: list[Prompt], keys: np.ndarray, sessions: Sequence[Hashable] | None = None) -> list[Sampled]:
    """One action for each prompt. keys uint32 [n, 2]: each prompt's own. sessions: a name for each, such as (group, try); without names
    each step finds by its beginning what a slot still holds of it."""
    names = [object() for _ in prompts] if sessions is None else list(sessions)
    if len(set(names)) != len(prompts) or len(keys) != len(prompts):
      raise ValueError(f"{len(prompts)} prompts came with {len(set(names))} session names and {len(keys)} keys, wanted as many of each")
    for name, prompt in zip(names, prompts):
      self._refuse(self.sessions.get(name) or Session(name), prompt)
    for name, prompt, key in zip(names, prompts, keys):
      self.ask(name, prompt, key)
    done: dict[Hashable, Sampled] = {}
    others, mine = [], set(names)
    while len(done) < len(names):
      for name, out in self.poll(math.inf):  # all are waited for: who wrote before the others could would only write to fewer
        if name in mine:
          done[name] = out
        else:
          others.append((name, out))
    self._ready += others
    if sessions is None:
      for name in names:
        self.end(name)
    return [done[name] for name in names]

  def warm_up(self, prompt: Prompt) -> None:
    """Compiles everything that prompts like this one will need, before any episode runs: what the slots hold is lost."""
    if self.busy:
      raise RuntimeError(f"{self.busy} sessions are asking; warm up before the first one does")
    self._swap()
    for session in self.sessions.values():
      session.slot = None
    self.slots, self._cold = [], False
    self.engine.warm_up(self.weights.params, prompt.images, prompt.positions.shape[0])

  # -- weights

  def _swap(self) -> None:
    with self._loading:
      new, self._next = self._next, None
    if new is None and self.weights is None:
      raise RuntimeError("the sampler has no weights: call load before it is asked for anything")
    if new is None:
      return
    self.weights = new
    if not self.frozen_tower:
      self._features.clear()
    if not self.sessions:  # nothing is under way: begun as a new sampler would, which a resumed run has
      self.slots, self._clock = [], 0
    if self.on_load == "rebuild":
      for slot in self.slots:
        slot.cut(0)
      for ask in (*self._waiting, *self._writing):
        ask.placed = False
      self._waiting.extendleft(reversed(self._writing))  # what was written stands; the cache under it is filled anew
      self._writing = []

  def _stale(self, slot: Slot) -> bool:
    return bool((slot.stamp[: slot.filled] != self.weights.version).any())

  # -- slots

  def _share(self, slot: Slot, ask: Ask) -> int:
    """How many places of a slot serve `ask`. One token is always left to prefill: the next is drawn from its hidden state. What older
    weights filled serves the session that was under way then, no other."""
    n = min(slot.common(ask), len(ask.tokens) - 1)
    if slot.owner is not ask.session or self.on_load == "rebuild":
      other = slot.stamp[:n] != self.weights.version
      n = int(other.argmax()) if other.any() else n
    return n

  def _place(self, ask: Ask) -> bool:
    """Gives the session a slot that holds the longest beginning there is; False where all are writing."""
    if ask.placed:
      return True
    session, own = ask.session, ask.session.slot
    goes_on = own is not None and 0 < own.filled == self._share(own, ask)  # then no other slot is asked
    known = [own] if goes_on else self.slots
    share = {slot.index: self._share(slot, ask) for slot in known}
    best = max(known, key=lambda s: (share[s.index], s.owner is session, s.owner is None, s.used))
    slot = own or (best if best.owner is None and share[best.index] else self._victim(best))
    if slot is None:
      return False
    if slot.owner not in (None, session):
      slot.owner.slot = None
      self.counts.evicted += 1
    n = share[best.index]
    if slot is not best and n > share[slot.index]:
      self.engine.copy(best.index, slot.index, n)
      slot.take(best, n)
      self.counts.copied += n
    slot.cut(max(n, share[slot.index]))
    slot.owner, session.slot, ask.placed = session, slot, True
    self._touch(slot)
    return True

  def _victim(self, best: Slot) -> Slot | None:
    """The slot to take: a free one, else that of the session idle for longest, else of the one that waits and is served last; the one
    with the longest shared beginning only where there is no other."""
    busy = {a.session.name for a in self._writing} | {a.session.name for a in self._waiting if a.placed}
    turn = {a.session.name: len(self._waiting) - i for i, a in enumerate(self._waiting)}  # 1: served last
    rank = lambda s: (s.owner is not None, turn.get(s.owner.name, 0) if s.owner else 0, s is best, s.used)
    return min((s for s in self.slots if s.owner is None or s.owner.name not in busy), key=rank, default=None)

  def _touch(self, slot: Slot) -> None:
    self._clock += 1
    slot.used = self._clock

  # -- work

  def _chunk(self, ask: Ask) -> int:
    """Prefills one chunk; returns its size, padding included. After the last one the ask has its next token and writes on."""
    slot, start, tokens = ask.session.slot, ask.session.slot.filled, ask.tokens
    shown = [p for p in ask.images if p + self.policy.tokens_per_image > start]  # ascending; a chunk holds one of them at most
    size, count = self._size(min([len(tokens), *shown[1:2]]) - start)
    end, image_slot, features = start + count, np.full(count, -1, np.int32), self._no_image(ask)
    if shown and shown[0] < end:
      row = np.arange(start, end) - shown[0]
      image_slot = np.where((row >= 0) & (row < self.policy.tokens_per_image), row, -1).astype(np.int32)
      features = self._encoded(ask, shown[0])
    at = ask.positions[:, start:end]
    before = int(ask.positions[:, :start].max(initial=-1)) + 1
    out = self.engine.prefill(
      self.weights.params, slot.index, start, before, tokens[start:end], at, features, image_slot, size, ask.key, len(ask.written)
    )
    slot.put(tokens[start:end], at, self.weights.version)
    slot.images |= {p: key for p, key in ask.images.items() if start <= p < end}
    self.counts.prefilled, self.counts.padded = self.counts.prefilled + count, self.counts.padded + size
    if end == len(tokens):
      self._waiting.popleft()
      self._hear(ask, Written(*map(np.asarray, out)), 0)
    return size

  def _size(self, rest: int) -> tuple[int, int]:
    """(chunk size, tokens in it) for what is left: the largest that is full, or one that is padded by a quarter at most."""
    chunks = self.engine.chunks
    over = next((c for c in chunks if c >= rest), None)
    if over is not None and (over == chunks[0] or rest >= 0.75 * over):
      return over, rest
    full = max(c for c in chunks if c <= rest)
    return full, full

  def _no_image(self, ask: Ask) -> Any:
    shape = ask.pixels.shape[1:]
    if shape not in self._blank:
      self._blank[shape] = self.engine.blank(self.weights.params, ask.pixels)
    return self._blank[shape]

  def _encoded(self, ask: Ask, place: int) -> Any:
    key = ask.images[place]
    if key in self._features:
      self.counts.image_hits += 1
    else:
      self.counts.images += 1
      self._features[key] = self.engine.encode(self.weights.params, ask.pixels[list(ask.images).index(place)])
    self._features.move_to_end(key)
    while len(self._features) > self.images_kept:
      self._features.popitem(last=False)
    return self._features[key]

  def _decode(self) -> None:
    rows, n = [a.session.slot.index for a in self._writing], self.engine.slots
    token, count, limit = (np.zeros(n, np.int32) for _ in range(3))
    active, key = np.zeros(n, bool), np.zeros((n, 2), np.uint32)
    token[rows], count[rows] = [a.tokens[-1] for a in self._writing], [len(a.written) for a in self._writing]
    active[rows], limit[rows], key[rows] = True, self.most, [a.key for a in self._writing]
    longest = max(a.session.slot.filled for a in self._writing)
    out = self.engine.decode(self.weights.params, token, count, limit, active, key, longest)
    writing, self._writing = self._writing, []
    for ask, row in zip(writing, rows):
      slot, before, m = ask.session.slot, len(ask.tokens), int(out.count[row])
      self._hear(ask, out, row)
      fed = slice(before - 1, min(before - 1 + m, len(ask.tokens)))  # each token went in before the next was drawn
      slot.put(ask.tokens[fed], ask.positions[:, fed], self.weights.version)

  def _hear(self, ask: Ask, out: Written, row: int) -> None:
    """Takes up what a slot wrote, to the end of its action, and either goes on or has it ready."""
    before, version, slot = len(ask.written), self.weights.version, ask.session.slot
    stale = self._stale(slot)
    if stale and self.on_load == "rebuild":
      raise RuntimeError(f"slot {slot.index} holds keys and values of other weights than version {version}, which were not rebuilt")
    ask.write(*(a[: out.count[row], row] for a in out[:3]), version)
    stopped = self._stopped(ask, before)
    if stopped is not None:
      ask.cut(stopped)
    fresh = len(ask.written) - before
    self.counts.decoded += fresh
    self.counts.stale += fresh * stale
    if stopped is not None or ask.written[-1] in self.engine.stops or len(ask.written) >= self.most:
      session = ask.session
      session.ask, session.tokens = None, ask.tokens
      self._touch(session.slot)
      self._ready.append((session.name, ask.sampled()))
    else:
      self._writing.append(ask)

  def _stopped(self, ask: Ask, before: int) -> int | None:
    """The number of written tokens with which a stop text is first whole, or None. Tokens are decoded together: a text may lie across."""
    has = lambda n: any(text in self.policy.tokenizer.decode(ask.written[:n]) for text in self.stop)
    if not self.stop or not has(len(ask.written)):
      return None
    return next(n for n in range(before + 1, len(ask.written) + 1) if has(n))

  def _refuse(self, session: Session, prompt: Prompt) -> None:
    """ValueError for a step that cannot be done, before anything is."""
    places, n = self.engine.spans[-1], len(prompt.tokens)
    if session.ask is not None:
      raise ValueError(f"session {session.name!r} asks while its last step is under way; poll until that is done, or end the session")
    if not n or prompt.next_position != prompt.positions.max() + 1:
      raise ValueError(f"session {session.name!r}: a prompt of {n} tokens goes on at {prompt.next_position}, wanted 1 or more and then on")
    if n + self.most > places:
      raise ValueError(
        f"session {session.name!r}: a prompt of {n} tokens and up to {self.most} to write do not fit into the {places} places of a slot; "
        "lower the policy's max_prompt or raise the longest span"
      )


def defaults() -> ml_collections.ConfigDict:
  """Knobs of a run, sampler.sessions; docs/sampler.md says how to choose them."""
  return ml_collections.ConfigDict(
    {
      "slots": 0,  # episodes that write at once; 0 = practice.slots
      "spans": (),  # lengths of the cache that a program may read; () = a quarter, half and all of what a step may need
      "chunks": (),  # tokens of a prefill; () = 32, 128 and 512, those that the longest span holds
      "steps": 8,  # tokens written before the host hears of it
      "stop": (),  # texts that end an action
      "on_load": "keep",  # caches that older weights filled; or "rebuild" them
      "burst": 4096,  # tokens of prefill after which those that write get their turn
      "images_kept": 64,  # features of screenshots on the device
      "warm": True,  # compile every program before the first episode, not where one first needs it
      "int8": False,  # the sampler's weights as int8, a scale a row: lighter, and no longer the learner's (policy/mismatch_kl)
    }
  )


def check(policy, slots, spans, chunks, steps, temperature, stop, most, on_load, burst, images_kept) -> None:
  """Domains of what a SessionSampler is made with; each failure one line."""
  whole = lambda *values: all(isinstance(v, int) and v >= 1 for v in values)
  spanned = len(spans) and whole(*spans)
  longest = max(spans) if spanned else 0
  wanted = (
    ("slots", slots, whole(slots), "1 or more"),
    ("spans", spans, spanned, "one or more lengths, whole numbers of 1 or more"),
    ("chunks", chunks, len(chunks) and whole(*chunks) and max(chunks) <= longest, f"whole numbers of 1 to {longest}, the longest span"),
    ("steps", steps, whole(steps) and steps <= max(longest, 1), f"1 or more, at most {longest}, the longest span"),
    ("temperature", temperature, 0 <= temperature < float("inf"), "0 (greedy, evaluation only) or more"),
    ("stop", stop, not isinstance(stop, str) and all(isinstance(text, str) and text for text in stop), "texts that are not empty"),
    ("most", most, 0 <= most <= policy.max_action, f"0 to {policy.max_action}, the policy's max_action"),
    ("on_load", on_load, on_load in ("keep", "rebuild"), "keep or rebuild"),
    ("burst", burst, whole(burst), "1 or more"),
    ("images_kept", images_kept, whole(images_kept), "1 or more"),
  )
  knobs = defaults()
  for name, value, good, want in wanted:
    if not good:
      raise ValueError(f"sampler{'.sessions.' if name in knobs else ' '}{name} is {value!r}, wanted {want}")
