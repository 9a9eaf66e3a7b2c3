"""What the session sampler remembers on the host: of a row of the cache, of a step under way, of an episode, and what it counts."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Hashable

import numpy as np

from rollout.sampler import Sampled


@dataclasses.dataclass(eq=False)
class Slot:
  """What the host knows of a row of the cache: of its first `filled` places the token, its positions, the version of the weights that
  computed it, and the images by place (content key). owner: the session whose it is, None = free, its content good for others."""

  index: int
  tokens: np.ndarray  # i32 [S]
  positions: np.ndarray  # i32 [P, S]
  stamp: np.ndarray  # i32 [S]
  images: dict[int, str] = dataclasses.field(default_factory=dict)
  filled: int = 0
  owner: Session | None = None
  used: int = 0

  def put(self, tokens: np.ndarray, positions: np.ndarray, version: int) -> None:
    end = self.filled + len(tokens)
    where = slice(self.filled, end)
    self.tokens[where], self.positions[:, where], self.stamp[where], self.filled = tokens, positions, version, end

  def cut(self, places: int) -> None:
    self.filled = places
    self.images = {p: key for p, key in self.images.items() if p < places}

  def take(self, other: Slot, places: int) -> None:
    for mine, theirs in ((self.tokens, other.tokens), (self.positions.T, other.positions.T), (self.stamp, other.stamp)):
      mine[:places] = theirs[:places]
    self.images = dict(other.images)
    self.cut(places)

  def common(self, ask: Ask) -> int:
    """How many of the first places hold what `ask` begins with: ids, positions and the images' contents."""
    n = min(self.filled, len(ask.tokens))
    differs = (self.tokens[:n] != ask.tokens[:n]) | (self.positions[:, :n] != ask.positions[:, :n]).any(0)
    n = int(differs.argmax()) if differs.any() else n
    return min([n, *(p for p, _ in self.images.items() ^ ask.images.items())])


@dataclasses.dataclass(eq=False)
class Ask:
  """A step under way. tokens, positions: the prompt and what was written so far; images: content key by place; pixels: by key."""

  session: Session
  key: np.ndarray
  prompt: int
  tokens: np.ndarray
  positions: np.ndarray
  images: dict[int, str]
  pixels: np.ndarray
  placed: bool = False  # it has its slot and is being filled
  logp: list[float] = dataclasses.field(default_factory=list)
  entropy: list[float] = dataclasses.field(default_factory=list)
  version: list[int] = dataclasses.field(default_factory=list)

  @property
  def written(self) -> np.ndarray:
    return self.tokens[self.prompt :]

  def write(self, tokens: np.ndarray, logp: np.ndarray, entropy: np.ndarray, version: int) -> None:
    at = self.positions.max() + 1 + np.arange(len(tokens), dtype=np.int32)
    self.tokens = np.concatenate([self.tokens, tokens])
    self.positions = np.concatenate([self.positions, np.broadcast_to(at, (len(self.positions), len(at)))], axis=1)
    self.logp, self.entropy = self.logp + logp.tolist(), self.entropy + entropy.tolist()
    self.version = self.version + [version] * len(tokens)

  def cut(self, written: int) -> None:
    end = self.prompt + written
    self.tokens, self.positions = self.tokens[:end], self.positions[:, :end]
    for a in (self.logp, self.entropy, self.version):
      del a[written:]

  def sampled(self) -> Sampled:
    f32, version = lambda a: np.array(a, np.float32), np.array(self.version, np.int32)
    return Sampled(self.written, f32(self.logp), f32(self.entropy), version if len(set(self.version)) > 1 else int(version[0]))


@dataclasses.dataclass(eq=False)
class Session:
  """An episode. tokens: all ids of its last step, by which the next one's new part is counted; shown: the images of its last prompt
  with their content keys."""

  name: Hashable
  slot: Slot | None = None
  ask: Ask | None = None
  tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  shown: list[tuple[np.ndarray, str]] = dataclasses.field(default_factory=list)

  def show(self, images: np.ndarray) -> list[str]:
    """Content keys of a prompt's images. Those that stood in the last prompt are compared, which is faster than hashing them again."""
    known = lambda i, image: i < len(self.shown) and np.array_equal(self.shown[i][0], image)
    self.shown = [(image, self.shown[i][1] if known(i, image) else _content(image)) for i, image in enumerate(images)]
    return [key for _, key in self.shown]


@dataclasses.dataclass
class Counts:
  """Since the sampler was made. new: prompt tokens that their session had not seen before, each step's last written one among them;
  prefilled: tokens that went through a prefill; padded: places that they took, padding included; copied: places taken over from another
  slot's cache; restarted: prompts that did not extend their session's last; evicted: slots taken from a session; stale: tokens written on
  a cache that older weights filled; images, image_hits: encoded, and found encoded."""

  new: int = 0
  prefilled: int = 0
  padded: int = 0
  decoded: int = 0
  copied: int = 0
  restarted: int = 0
  evicted: int = 0
  stale: int = 0
  images: int = 0
  image_hits: int = 0

  @property
  def amplification(self) -> float:
    """Tokens prefilled over tokens that were new: 1 is ideal, less where a group shared."""
    return self.prefilled / max(1, self.new)


def _content(image: np.ndarray) -> str:
  return hashlib.blake2b(np.ascontiguousarray(image), digest_size=16).hexdigest()
