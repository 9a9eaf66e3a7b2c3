"""Token records -> Batch of fixed shape: first-fit-decreasing rows with segment ids, and back again for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from core.schema import Credit, Episode, TokenRecord
from core.state import Batch


@dataclasses.dataclass
class PackItem:
  """One token record on its way into a batch. images: uint8, one per entry of record.image_place; advantage: f32 [T], the
  push of each token; learn: bool [T], action tokens that enter the loss; episode: index into the batch's episodes;
  step_base: added to record.step, so that steps of different episodes never share an id.
  """

  record: TokenRecord
  images: list[np.ndarray]
  positions: np.ndarray  # [P, T]
  advantage: np.ndarray
  learn: np.ndarray
  episode: int
  step_base: int = 0
  ref_logp: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class PackShape:
  """The one shape a run compiles for. rows x row_tokens tokens, room for `images` images and `episodes` episodes."""

  rows: int
  row_tokens: int
  images: int
  episodes: int
  tokens_per_image: int
  row_actions: int


def episode_items(episode: Episode, credit: Credit, keep: np.ndarray, positions: Callable, image: Callable) -> list[PackItem]:
  """One item per token record of an episode. Every action token of step h gets credit.advantage[h]; steps with keep False
  stay in the context but leave the loss. `episode` and `step_base` are set when the item is put into a batch."""
  items = []
  for record in episode.records:
    images = [image(episode.steps[h].screen.pixels) for h in record.image_step]
    advantage = np.where(record.is_action, credit.advantage[record.step], 0.0).astype(np.float32)
    items.append(PackItem(record, images, positions(record), advantage, keep[record.step], 0))
  return items


def minibatches(episodes: list[list[PackItem]], size: int, rng: np.random.Generator) -> list[list[PackItem]]:
  """Deals whole episodes, in random order, into as few minibatches of at most `size` records as hold them, filled evenly."""
  count = max(1, -(-sum(map(len, episodes)) // size))
  order = sorted(rng.permutation(len(episodes)).tolist(), key=lambda i: -len(episodes[i]))
  while True:
    bins: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for i in order:
      b = load.index(min(load))
      bins[b].append(i)
      load[b] += len(episodes[i])
    if max(load) <= size:
      break
    if any(len(e) > size for e in episodes):
      raise ValueError(f"an episode has {max(map(len, episodes))} records, agent.minibatch takes {size}: raise it")
    count += 1
  return [number([episodes[i] for i in b]) for b in bins if b]


def number(episodes: list[list[PackItem]]) -> list[PackItem]:
  """Gives the episodes of one batch their indices 0.. and their steps ids that no other episode shares."""
  out, base = [], 0
  for index, items in enumerate(episodes):
    out += [dataclasses.replace(item, episode=index, step_base=base) for item in items]
    base += 1 + max((int(item.record.step.max()) for item in items), default=0)
  return out


def shape_for(
  records: int, longest: int, most_actions: int, row_tokens: int, images_per_record: int, tokens_per_image: int
) -> PackShape:
  """The fixed shape that any `records` records of at most `longest` tokens fit into, whatever their mix."""
  if longest > row_tokens:
    raise ValueError(f"pack.row_tokens is {row_tokens}: the longest record of this policy has {longest} tokens")
  a_row = row_tokens // longest
  shape = (-(-records // a_row), row_tokens, records * images_per_record, records, tokens_per_image)
  return PackShape(*shape, row_actions=a_row * most_actions)


def fit_rows(
  lengths: Sequence[int], row_tokens: int, weights: Sequence[int] | None = None, row_weight: int | None = None
) -> list[list[int]]:
  """First-fit-decreasing: indices per row. weights/row_weight: a second size (action tokens) that must fit as well.

  Ties keep their order, so the result depends on the input only. Raises when one record is longer than a row.
  """
  weights = weights or [0] * len(lengths)
  row_weight = row_weight if row_weight is not None else max([1, *weights])
  rows: list[list[int]] = []
  room: list[tuple[int, int]] = []
  for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
    if lengths[i] > row_tokens:
      raise ValueError(f"a record has {lengths[i]} tokens, a row takes {row_tokens}: raise pack.row_tokens")
    if weights[i] > row_weight:
      raise ValueError(f"a record has {weights[i]} action tokens, a row takes {row_weight}")
    r = next((r for r, (t, w) in enumerate(room) if lengths[i] <= t and weights[i] <= w), len(rows))
    if r == len(rows):
      rows.append([])
      room.append((row_tokens, row_weight))
    rows[r].append(i)
    room[r] = room[r][0] - lengths[i], room[r][1] - weights[i]
  return rows


def arrange(items: list[PackItem], shape: PackShape) -> list[list[int]]:
  """Rows for a batch of `shape`. Action tokens must fit as well: short records may stand closer than `shape_for` counted on."""
  actions = [int((item.record.is_action & item.learn).sum()) for item in items]
  return fit_rows([len(item.record) for item in items], shape.row_tokens, actions, shape.row_actions)


def to_batch(items: list[PackItem], rows: list[list[int]], shape: PackShape, blank_image: np.ndarray) -> Batch:
  """Lays rows of items out in arrays of exactly `shape` (numpy; the caller moves them to devices). Padding is segment 0."""
  if len(rows) > shape.rows:
    raise ValueError(f"{len(rows)} rows do not fit into a batch of {shape.rows}")
  size = (shape.rows, shape.row_tokens)
  axes = items[0].positions.shape[0] if items else 1
  ints = {k: np.zeros(size, np.int32) for k in ("tokens", "segment_ids", "episode_id", "step_id")}
  out = ints | {"version": np.full(size, -1, np.int32), "image_slot": np.full(size, -1, np.int32)}
  out |= {"is_action": np.zeros(size, bool), "behaviour_logp": np.zeros(size, np.float32), "advantage": np.zeros(size, np.float32)}
  positions = np.zeros((axes, *size), np.int32)
  ref_logp = np.zeros(size, np.float32) if any(i.ref_logp is not None for i in items) else None
  images = np.broadcast_to(blank_image, (shape.images, *blank_image.shape)).copy()
  episode_valid = np.zeros(shape.episodes, bool)
  used = 0
  for r, row in enumerate(rows):
    at = 0
    for segment, index in enumerate(row, start=1):
      item = items[index]
      record, span = item.record, slice(at, at + len(item.record))
      out["tokens"][r, span] = record.tokens
      out["segment_ids"][r, span] = segment
      out["episode_id"][r, span] = item.episode
      out["step_id"][r, span] = record.step + item.step_base
      out["is_action"][r, span] = record.is_action & item.learn
      out["behaviour_logp"][r, span] = record.logp
      out["version"][r, span] = record.version
      out["advantage"][r, span] = item.advantage
      positions[:, r, span] = item.positions
      if ref_logp is not None and item.ref_logp is not None:
        ref_logp[r, span] = item.ref_logp
      for place, image in zip(record.image_place, item.images, strict=True):
        if used >= shape.images:
          raise ValueError(f"more than {shape.images} images in a batch that was shaped for {shape.images}")
        images[used] = image
        slots = np.arange(shape.tokens_per_image) + used * shape.tokens_per_image
        out["image_slot"][r, at + place : at + place + shape.tokens_per_image] = slots
        used += 1
      if item.episode >= shape.episodes:
        raise ValueError(f"episode index {item.episode} in a batch that holds {shape.episodes} episodes")
      episode_valid[item.episode] = True
      at += len(record)
  most = int(out["is_action"].sum(axis=1).max(initial=0))
  if most > shape.row_actions:
    raise ValueError(f"a row holds {most} action tokens, the batch was shaped for {shape.row_actions}")
  return Batch(
    positions=positions, images=images, episode_valid=episode_valid, ref_logp=ref_logp, num_episodes=shape.episodes,
    row_actions=shape.row_actions, **out,
  )  # fmt: skip


def unpack(values: np.ndarray, batch: Batch) -> list[np.ndarray]:
  """The [B, L] values of every record in a batch, in row order then segment order."""
  segment_ids = np.asarray(batch.segment_ids)
  return [
    np.asarray(values)[r][segment_ids[r] == s] for r in range(segment_ids.shape[0]) for s in range(1, int(segment_ids[r].max()) + 1)
  ]


def useful_share(batch: Batch) -> float:
  """Tokens that are not padding, as a share of the batch."""
  return float((np.asarray(batch.segment_ids) > 0).mean())
