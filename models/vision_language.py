"""A vision tower and a decoder as one model, and as the Policy that the loop asks: what qwen2_5_vl.py and qwen3_vl.py share.

Parameters are the decoder's with the tower under "visual". A policy is made for one screen size, so every screenshot becomes
the same number of patches and tokens and nothing compiles twice.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from core.schema import TokenRecord
from models import decoder
from models.base import Policy, Prompt, Seen
from models.chat import Chat, Template, Turn, make_chat
from models.config import ModelConfig
from models.decoder import Vision
from models.images import ImageSpec, Patches, image_grid, image_spec, preprocess, resized
from models.positions import mrope_positions
from models.vision import Run, VisionConfig, VisionPlan, bucket_for, vision_plan


class Tower(NamedTuple):
  """What a family brings. config(raw vision_config, path of its file) -> VisionConfig; leaves(VisionConfig) -> tree of Leaf;
  encode(visual params, VisionConfig, ImageSpec, patches, plan, Run) -> features; template: of its chat; space: how it means points."""

  config: Callable
  leaves: Callable
  encode: Callable
  template: Template
  space: str


@dataclasses.dataclass(frozen=True)
class VLConfig:
  """The static sizes of one vision-language model; hashable."""

  text: ModelConfig
  vision: VisionConfig
  images: ImageSpec
  tower: Tower


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "mode": "append",  # every screenshot stays in the context | "window": the last `screens` of them
      "screens": 5,  # read by mode "window" only
      "max_prompt": 64_000,  # tokens; what goes first when there are more stands in models/chat.py
      "max_action": 1024,  # tokens the policy may write a step, the end of turn included
      "max_goal": 256,  # tokens of a goal, for critics that read it
      "min_pixels": 0,  # of a resized screenshot; 0 = the checkpoint's preprocessor_config.json
      "max_pixels": 0,
      "space": "",  # how points are meant, see models/chat.py; "" = as the grammar or the family has it
      "instruction": "",  # plain, uitars (models/chat.py) or a text file with {goal} in it; "" = uitars for Qwen2.5-VL on desktops
      "system": "",  # "" = what the family was trained with
      "freeze_tower": False,  # no gradient into the vision tower; its features are made once a screenshot
      "features_kept": 256,  # of screenshots, on the learner's host, where the tower is frozen; 0 = it runs in every step
      "remat": "full",  # what a training step keeps of each layer: see models/decoder.py
      "remat_tower": "",  # the same of the tower's blocks; "" = as remat
      "attention": "auto",  # see models/attention.py
      "dtype": "bfloat16",  # of the parameters
    }
  )


def read_config(folder: str, tower: Tower, min_pixels: int = 0, max_pixels: int = 0) -> VLConfig:
  """Everything static that a checkpoint's folder says. ValueError names the file and what is wrong with it."""
  text = ModelConfig.from_hf(folder)
  if text.vision is None:
    raise ValueError(f"{folder}/config.json: {text.family} has no vision tower; its file is models/llama.py")
  vision = tower.config(text.vision, f"{folder}/config.json")
  images = image_spec(folder, min_pixels, max_pixels)
  if (vision.patch, vision.merge) != (images.patch, images.merge):
    given, wanted = (images.patch, images.merge), (vision.patch, vision.merge)
    raise ValueError(f"{folder}: (patch, merge) is {given} in preprocessor_config.json and {wanted} in config.json; they must agree")
  if images.frames not in (0, vision.frames):
    raise ValueError(
      f"{folder}: temporal_patch_size is {images.frames} in preprocessor_config.json and {vision.frames} in config.json; they must agree"
    )
  if vision.out != text.width:
    raise ValueError(f"{folder}/config.json: image features have width {vision.out}, the decoder {text.width}; they must be equal")
  if len(vision.taps) > text.layers:
    raise ValueError(
      f"{folder}/config.json: vision_config.deepstack_visual_indexes names {len(vision.taps)} blocks, whose features go to as many layers "
      f"of the decoder: it has {text.layers}"
    )
  return VLConfig(text, vision, images, tower)


def leaves(cfg: VLConfig) -> dict:
  """Every parameter as a nested dict of Leaf."""
  return decoder.leaves(cfg.text) | {"visual": cfg.tower.leaves(cfg.vision)}


def encode_images(params: dict, cfg: VLConfig, patches: jax.Array, plan: VisionPlan, run: Run, freeze: bool = False) -> dict:
  """patches u8 [M, P, 3 * patch * patch] -> {"embeds": [M * P / 4, D], "deepstack": [K, M * P / 4, D]}. freeze: without gradient."""
  visual = jax.lax.stop_gradient(params["visual"]) if freeze else params["visual"]
  return cfg.tower.encode(visual, cfg.vision, cfg.images, patches, plan, run)


@dataclasses.dataclass(frozen=True)
class Setup:
  """One policy: a model, a chat and a screen size. plan: of one screenshot; size: its (rows, columns) in tokens."""

  cfg: VLConfig
  chat: Chat
  screen_size: tuple[int, int]
  plan: VisionPlan
  size: tuple[int, int]
  run: Run
  freeze: bool
  dtype: jnp.dtype
  remat: str

  @property
  def tokens_per_image(self) -> int:
    return self.size[0] * self.size[1]


def make(cfg: ml_collections.ConfigDict, folder: str, tower: Tower, grammar: str, screen_size: tuple[int, int]) -> Policy:
  """A policy for one checkpoint folder, action grammar and screen size (W, H)."""
  s = setup(cfg, folder, tower, grammar, screen_size)
  text = s.cfg.text
  return Policy(
    name=text.family,
    tokenizer=s.chat.tokenizer,
    tokens_per_image=s.tokens_per_image,
    width=text.width,
    max_goal=cfg.max_goal,
    max_prompt=cfg.max_prompt,
    max_action=cfg.max_action,
    init=lambda key: decoder.init_leaves(leaves(s.cfg), key, s.dtype),
    prompt=partial(prompt, s),
    positions=partial(positions, s),
    image=lambda screen: image(s, screen).patches,
    encode_images=partial(encode_screens, s),
    forward=partial(forward, s),
    token_logprobs=lambda params, *args, **kwargs: decoder.token_logprobs(params, text, *args, **kwargs),
    init_cache=lambda batch, size: decoder.init_cache(text, batch, size, s.dtype),
    prefill=partial(prefill, s),
    decode_step=lambda params, token, position, cache: decoder.decode_step(
      params, text, token, cache, attention=s.run.attention
    ),
    logits=decoder.logits,
    embed=decoder.embed,
    heads=text.heads,
    kv_heads=text.kv_heads,
    axes=3,
    screens=s.chat.screens,
    unstack=decoder.unstack,
    space=s.chat.space,
    shown=resized(screen_size, s.cfg.images),
    keeping=partial(keeping, s),
  )


def setup(cfg: ml_collections.ConfigDict, folder: str, tower: Tower, grammar: str, screen_size: tuple[int, int]) -> Setup:
  """Checks the knobs against the checkpoint and the screen; ValueError of one line where they do not fit together."""
  for name in ("remat", "remat_tower"):
    if cfg[name] not in decoder.REMAT and (cfg[name] or name == "remat"):
      raise ValueError(f"policy.{name} is {cfg[name]!r}; there are {', '.join(decoder.REMAT)}")
  model = read_config(folder, tower, cfg.min_pixels, cfg.max_pixels)
  shown = resized(screen_size, model.images)
  chat = make_chat(cfg, folder, tower.template, model.text, grammar, tower.space, screen_size, shown)
  image_id = chat.tokenizer.image_id
  if image_id != model.text.image_token_id:
    raise ValueError(f"{folder}: an image token is {image_id} in tokenizer.json and {model.text.image_token_id} in config.json")
  grid = image_grid(screen_size, model.images)
  plan = vision_plan([grid], model.vision, bucket_for([grid], model.vision))
  s = Setup(
    model, chat, tuple(screen_size), plan, (grid[0] // model.images.merge, grid[1] // model.images.merge),
    Run(cfg.attention, cfg.remat_tower or cfg.remat, grid), cfg.freeze_tower, jnp.dtype(cfg.dtype), cfg.remat,
  )  # fmt: skip
  chat.prompt("", [Turn(s.size, "", None)])  # refuses a budget that no prompt fits into
  return s


def image(s: Setup, screen: np.ndarray) -> Patches:
  """A screenshot as the tower takes it. ValueError for another size than the policy was made for."""
  width, height = s.screen_size
  if screen.shape != (height, width, 3) or screen.dtype != np.uint8:
    raise ValueError(f"screenshot is {screen.dtype} {screen.shape}, the policy was made for uint8 {(height, width, 3)}")
  return preprocess(screen, s.cfg.images)


def prompt(s: Setup, goal: str, screens: list[np.ndarray], text: str = "", history: Sequence[Seen] = ()) -> Prompt:
  """The newest screenshot after what was seen and written before. images u8 [M, P, 3 * patch * patch], those that stay."""
  newest = image(s, screens[-1])
  turns = [Turn(s.size, h.text, h.written) for h in history] + [Turn(s.size, text, None)]
  context = s.chat.prompt(goal, turns)
  at, after = mrope_positions(len(context.tokens), context.image_place, context.sizes)
  shown = [*(h.image for h in history), newest.patches]
  return Prompt(context.tokens, at, context.image_place, np.stack([shown[h] for h in context.image_turn]), after, context.image_turn)


def positions(s: Setup, record: TokenRecord) -> np.ndarray:
  """Positions i32 [3, T] of a stored record, the same as when it was sampled."""
  return mrope_positions(len(record), record.image_place, [s.size] * len(record.image_place))[0]


def encode_screens(s: Setup, params: dict, images: jax.Array) -> dict:
  """u8 [M, P, 3 * patch * patch] of M screenshots of the policy's size -> features of M * tokens_per_image tokens."""
  plan = jax.tree.map(lambda a: jnp.broadcast_to(a, (images.shape[0], *a.shape[1:])), s.plan)
  return encode_images(params, s.cfg, images, plan, s.run, s.freeze)


def keeping(s: Setup, policy: Policy, visual: Callable, most: int) -> Policy:
  """The policy for a learner whose tower never moves. Its images are features [1 + K, tokens_per_image, D], embeds before deepstack, which
  visual(), the tower's parameters, makes once for each content: the last `most` that were asked for stay on the host."""
  encode = jax.jit(policy.encode_images)
  kept: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()

  def image_of(screen: np.ndarray) -> np.ndarray:
    given = image(s, screen)
    if given.key not in kept:
      made = encode({"visual": visual()}, given.patches[None])
      kept[given.key] = np.concatenate([made["embeds"][None], made["deepstack"]])
    kept.move_to_end(given.key)
    features = kept[given.key]
    while len(kept) > most:
      kept.popitem(last=False)
    return features

  def lay_out(params: dict, images: jax.Array) -> dict:
    flat = jnp.moveaxis(images, 1, 0).reshape(images.shape[1], -1, images.shape[-1])
    return {"embeds": flat[0], "deepstack": flat[1:]}

  return policy._replace(image=image_of, encode_images=lay_out)


def forward(s: Setup, params: dict, tokens, positions, segment_ids, features: dict, image_slot) -> jax.Array:
  """Hidden states [B, L, D] of packed rows."""
  vision = Vision(**features, slot=image_slot)
  return decoder.forward(params, s.cfg.text, tokens, positions, segment_ids, vision, remat=s.remat, attention=s.run.attention)


def prefill(s: Setup, params: dict, tokens, positions, valid, features: dict, image_slot, cache) -> tuple:
  """Appends a chunk to every row of the cache: (hidden [B, T, D], cache)."""
  vision = Vision(**features, slot=image_slot)
  return decoder.prefill(params, s.cfg.text, tokens, positions, valid, cache, vision, attention=s.run.attention)
