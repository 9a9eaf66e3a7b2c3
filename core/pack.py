"""Token records -> Batch of fixed shape: first-fit-decreasing rows with segment ids, and back again for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from core.schema import Credit, Episode, TokenRecord
from core.state import Batch, StepBatch

MOST = 2**24  # tokens of a row


@dataclasses.dataclass
class PackItem:
  """One token record on its way into a batch. images: uint8, one per entry of record.image_place; advantage: f32 [T], the
  push of each token; learn: bool [T], action tokens that enter the loss; episode: index into the batch's episodes;
  step_base: added to record.step, so that steps of different episodes never share an id. extra: further f32 [T] for the
  batch by field name (ref_logp, old_logp, old_value_logit, return_); all items of a batch have the same ones.
  """

  record: TokenRecord
  images: list[np.ndarray]
  positions: np.ndarray  # [P, T]
  advantage: np.ndarray
  learn: np.ndarray
  episode: int
  step_base: int = 0
  extra: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PackShape:
  """The one shape a run compiles for. rows x row_tokens tokens, room for `images` images, `episodes` episodes and steps. blocks: parts
  that the rows are split into; row_images: the most images of a row where there are several, so that a block's rows find room in its
  part of the images (0 = any). axes: P of positions, where there is no record to tell."""

  rows: int
  row_tokens: int
  images: int
  episodes: int
  tokens_per_image: int
  row_actions: int
  steps: int = 0  # 0: as many as episodes, which holds where a record is one step
  blocks: int = 1
  row_images: int = 0
  axes: int = 1

  def __post_init__(self):
    object.__setattr__(self, "steps", self.steps or self.episodes)


def episode_items(
  episode: Episode, credit: Credit, keep: np.ndarray, positions: Callable, image: Callable, extras: list[dict] | None = None
) -> list[PackItem]:
  """One item per token record of an episode. Every action token of step h gets credit.advantage[h], or its own push where the
  credit has one; steps with keep False stay in the context but leave the loss. extras: further arrays of each record.
  `episode` and `step_base` are set when the item is put into a batch."""
  items = []
  for i, record in enumerate(episode.records):
    images = [image(episode.steps[h].screen.pixels) for h in record.image_step]
    push = credit.advantage[record.step] if credit.token_advantage is None else credit.token_advantage[i]
    extra = dict(extras[i]) if extras else {}
    if credit.token_return is not None:
      extra["return_"] = credit.token_return[i]
    advantage = np.where(record.is_action, push, 0.0).astype(np.float32)
    items.append(PackItem(record, images, positions(record), advantage, keep[record.step], 0, extra=extra))
  return items


def bins(bundles: list[list[list[PackItem]]], size: int, rng: np.random.Generator) -> list[list[PackItem]]:
  """Deals whole episodes, in random order, into as few minibatches of at most `size` records as hold them, filled evenly. The episodes of
  a bundle share a batch, and stand side by side in it."""
  dealt = deal([sum(map(len, bundle)) for bundle in bundles], size, rng)
  return [number([episode for i in b for episode in bundles[i]]) for b in dealt]


def deal(sizes: list[int], size: int, rng: np.random.Generator) -> list[list[int]]:
  """Indices of bundles of so many records each, in random order, in as few bins of at most `size` records as hold them."""
  count = max(1, -(-sum(sizes) // size))
  order = sorted(rng.permutation(len(sizes)).tolist(), key=lambda i: -sizes[i])
  while True:
    bins: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for i in order:
      b = load.index(min(load))
      bins[b].append(i)
      load[b] += sizes[i]
    if max(load) <= size:
      return [b for b in bins if b]
    if max(sizes) > size:
      raise ValueError(f"an episode has {max(sizes)} records, agent.minibatch takes {size}: raise it")
    count += 1


def number(episodes: list[list[PackItem]]) -> list[PackItem]:
  """Gives the episodes of one batch their indices 0.. and their steps ids that no other episode shares, without gaps between."""
  out, base = [], 0
  for index, items in enumerate(episodes):
    first = min((int(item.record.step.min()) for item in items), default=0)
    out += [dataclasses.replace(item, episode=index, step_base=base - first) for item in items]
    base += 1 + max((int(item.record.step.max()) for item in items), default=first) - first
  return out


def shape_for(
  records: int, longest: int, most_actions: int, row_tokens: int, images_per_record: int, tokens_per_image: int,
  steps_per_record: int = 1, blocks: int = 1, tokens_multiple: int = 1, images_multiple: int = 1, axes: int = 1,
) -> PackShape:  # fmt: skip
  """The fixed shape that any `records` records of at most `longest` tokens fit into, whatever their mix. row_tokens 0: `longest`.

  blocks: equal parts that rows, images and episodes are split into; tokens_multiple: of a row, images_multiple: of a part's images.
  What is added for them is padding."""
  row_tokens = row_tokens or -(-longest // tokens_multiple) * tokens_multiple
  if row_tokens > MOST:
    raise ValueError(f"pack.row_tokens is {row_tokens}, wanted at most {MOST}: no machine has the memory")
  if longest > row_tokens:
    raise ValueError(f"pack.row_tokens is {row_tokens}: the longest record of this policy has {longest} tokens")
  if row_tokens % tokens_multiple:
    raise ValueError(f"pack.row_tokens is {row_tokens}, wanted a multiple of {tokens_multiple}: a row is shared by mesh.context devices")
  up = lambda n, multiple: -(-n // multiple) * multiple
  a_row = row_tokens // longest
  rows, images, row_images = up(-(-records // a_row), blocks), records * images_per_record, 0
  if blocks > 1 or images_multiple > 1:
    row_images = a_row * images_per_record
    images = blocks * up(rows // blocks * row_images, images_multiple)
  shape = (rows, row_tokens, images, up(records, blocks), tokens_per_image)
  return PackShape(*shape, row_actions=a_row * most_actions, steps=records * steps_per_record, blocks=blocks, row_images=row_images,
                   axes=axes)  # fmt: skip


def fit_rows(
  lengths: Sequence[int], row_tokens: int, weights: Sequence[int] | None = None, row_weight: int | None = None,
  images: Sequence[int] | None = None, row_images: int = 0,
) -> list[list[int]]:  # fmt: skip
  """First-fit-decreasing: indices per row. weights/row_weight: a second size (action tokens) that must fit as well, images/row_images a
  third (row_images 0: any number).

  Ties keep their order, so the result depends on the input only. Raises when one record is longer than a row.
  """
  weights = weights or [0] * len(lengths)
  row_weight = row_weight if row_weight is not None else max([1, *weights])
  shown = images if images and row_images else [0] * len(lengths)
  rows: list[list[int]] = []
  room: list[tuple[int, int, int]] = []
  for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
    if lengths[i] > row_tokens:
      raise ValueError(f"a record has {lengths[i]} tokens, a row takes {row_tokens}: raise pack.row_tokens")
    if weights[i] > row_weight:
      raise ValueError(f"a record has {weights[i]} action tokens, a row takes {row_weight}")
    r = next((r for r, (t, w, m) in enumerate(room) if lengths[i] <= t and weights[i] <= w and shown[i] <= m), len(rows))
    if r == len(rows):
      rows.append([])
      room.append((row_tokens, row_weight, row_images))
    rows[r].append(i)
    room[r] = room[r][0] - lengths[i], room[r][1] - weights[i], room[r][2] - shown[i]
  return rows


def arrange(items: list[PackItem], shape: PackShape) -> list[list[int]]:
  """Rows for a batch of `shape`. Action tokens must fit as well: short records may stand closer than `shape_for` counted on."""
  actions = [int((item.record.is_action & item.learn).sum()) for item in items]
  lengths, images = [len(item.record) for item in items], [len(item.images) for item in items]
  return fit_rows(lengths, shape.row_tokens, actions, shape.row_actions, images, shape.row_images)


def to_batch(items: list[PackItem], rows: list[list[int]], shape: PackShape, blank_image: np.ndarray) -> Batch:
  """Lays rows of items out in arrays of exactly `shape` (numpy; the caller moves them to devices). Padding is segment 0."""
  if len(rows) > shape.rows:
    raise ValueError(f"{len(rows)} rows do not fit into a batch of {shape.rows}")
  size = (shape.rows, shape.row_tokens)
  axes = items[0].positions.shape[0] if items else shape.axes
  ints = {k: np.zeros(size, np.int32) for k in ("tokens", "segment_ids", "episode_id", "step_id")}
  out = ints | {"version": np.full(size, -1, np.int32), "image_slot": np.full(size, -1, np.int32)}
  out |= {"is_action": np.zeros(size, bool), "behaviour_logp": np.zeros(size, np.float32), "advantage": np.zeros(size, np.float32)}
  positions = np.zeros((axes, *size), np.int32)
  names = sorted({name for item in items for name in item.extra})
  out |= {name: np.zeros(size, np.float32) for name in names}
  images = np.broadcast_to(blank_image, (shape.images, *blank_image.shape)).copy()
  episode_valid = np.zeros(shape.episodes, bool)
  used, part = [0] * shape.blocks, shape.images // shape.blocks
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
      if sorted(item.extra) != names:
        raise ValueError(f"an item has {sorted(item.extra)}, others of its batch {names}: all or none")
      for name in names:
        out[name][r, span] = item.extra[name]
      block = r * shape.blocks // shape.rows
      for place, image in zip(record.image_place, item.images, strict=True):
        if used[block] >= part:
          raise ValueError(f"more than {part} images in a batch that was shaped for {part}")
        images[block * part + used[block]] = image
        slots = np.arange(shape.tokens_per_image) + used[block] * shape.tokens_per_image
        out["image_slot"][r, at + place : at + place + shape.tokens_per_image] = slots
        used[block] += 1
      if item.episode >= shape.episodes:
        raise ValueError(f"episode index {item.episode} in a batch that holds {shape.episodes} episodes")
      episode_valid[item.episode] = True
      at += len(record)
  most = int(out["is_action"].sum(axis=1).max(initial=0))
  if most > shape.row_actions:
    raise ValueError(f"a row holds {most} action tokens, the batch was shaped for {shape.row_actions}")
  return Batch(
    positions=positions, images=images, episode_valid=episode_valid, num_episodes=shape.episodes, num_steps=shape.steps,
    row_actions=shape.row_actions, **out,
  )  # fmt: skip


def unpack(values: np.ndarray, batch: Batch) -> list[np.ndarray]:
  """The [B, L] values of every record in a batch, in row order then segment order."""
  segment_ids = np.asarray(batch.segment_ids)
  return [np.asarray(values)[r][segment_ids[r] == s] for r in range(segment_ids.shape[0]) for s in range(1, int(segment_ids[r].max()) + 1)]


def useful_share(batch: Batch) -> float:
  """Tokens that are not padding, as a share of the batch."""
  return float((np.asarray(batch.segment_ids) > 0).mean())


def step_batch(
  frames: list[tuple[np.ndarray, np.ndarray]], texts: list[np.ndarray], labels: Sequence[float], size: int, longest: int
) -> StepBatch:
  """Steps as a critic's batch of exactly `size`, padded with the last one marked invalid. frames: (screen before, screen now) as
  the policy's encoder takes them; texts: i32 goal tokens, at most `longest`."""
  n = len(frames)
  if not 1 <= n <= size:
    raise ValueError(f"{n} steps for a batch of {size}, wanted 1 to {size}")
  text = np.zeros((size, longest), np.int32)
  for i, ids in enumerate(texts):
    if len(ids) > longest:
      raise ValueError(f"a goal has {len(ids)} tokens, the critic takes {longest}")
    text[i, : len(ids)] = ids
  pixels = np.stack([np.stack(pair) for pair in frames])
  pixels = np.concatenate([pixels, np.broadcast_to(pixels[-1:], (size - n, *pixels.shape[1:]))])
  label = np.zeros(size, np.float32)
  label[:n] = labels
  return StepBatch(pixels, text, label, np.arange(size) < n)
