"""The interface of a policy: what rollout/ and train.py may ask of a model, whichever file it lives in.

A model file `models/NAME.py` offers
  defaults() -> ml_collections.ConfigDict          knobs, once
  make(cfg, **what the environment fixes) -> Policy
and a Policy is this record. Forward functions are pure; `params` is a nested dict under checkpoint names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np


class Tokenizer(Protocol):
  """Text to ids and back. `encode` never fails on text it was not made for; `decode(encode(t)) == t`."""

  vocab_size: int
  eos_id: int
  pad_id: int
  image_id: int

  def encode(self, text: str) -> list[int]: ...

  def decode(self, ids) -> str: ...


class Prompt(NamedTuple):
  """What the policy sees before it writes. tokens i32 [T]; positions i32 [P, T]; image_place i32 [M], first index of each
  image's placeholders; images: uint8, what `encode_images` takes, one per image, the newest last; next_position: of the first
  action token; image_step i32 [M]: whose step's screenshot each is, None = all the newest's.
  """

  tokens: np.ndarray
  positions: np.ndarray
  image_place: np.ndarray
  images: np.ndarray
  next_position: int
  image_step: np.ndarray | None = None


class Seen(NamedTuple):
  """An earlier step of the episode, as `Policy.prompt` takes it: the screenshot as `Policy.image` gives it, what was to be read,
  the ids that were sampled."""

  image: np.ndarray
  text: str
  written: Sequence[int]


class Policy(NamedTuple):
  """A policy model as a record of pure functions.

  init(key) -> params
  prompt(goal, screens, text, history) -> Prompt: host side, numpy; screens are uint8 [H, W, 3], the newest last; history: Seen of
  every step before.
  positions(record) -> i32 [P, T] of a stored token record; image(screen) -> uint8, one screenshot as the encoder takes it.
  encode_images(params, images u8 [M, ...]) -> features [M * tokens_per_image, D]
  forward(params, tokens [B, L], positions [P, B, L], segment_ids [B, L], features, image_slot [B, L]) -> hidden [B, L, D]
  token_logprobs(params, hidden, tokens, mask, most, temperature=1.0) -> (logp, entropy), each f32 [B, L]; entry t scores token t
  from hidden t-1
  init_cache(batch, size) -> cache; prefill(params, tokens, positions, valid, features, image_slot, cache) -> (hidden, cache)
  decode_step(params, token [B], position [B], cache) -> (hidden [B, D], cache); logits(params, hidden) -> f32 [..., V]
  embed(params, tokens [...]) -> [..., D]: word vectors, for critics that read the goal. width: D; max_goal: its tokens at most

  heads, kv_heads: of its attention, which a mesh may share (core/mesh.py). axes: P of its positions.
  screens: observations that stay in a prompt, 0 = the episode's all. unstack(params) -> the form that decodes fastest, for samplers that
  keep a cache (rollout/sessions.py). join(base, params) -> what the functions above take, where only
  a part of the parameters is learnt. keeping(policy, visual, most) -> the policy of a learner whose vision tower never moves: its images
  are features, made once a screenshot by the tower's parameters, visual(), and `most` of them stay on the host. space, shown: how it means
  points (envs.actions.MODES, "" = as the grammar says) and in an image of which size (W, H).
  """

  name: str
  tokenizer: Any
  tokens_per_image: int
  width: int
  max_goal: int
  max_prompt: int
  max_action: int
  init: Callable
  prompt: Callable
  positions: Callable
  image: Callable
  encode_images: Callable
  forward: Callable
  token_logprobs: Callable
  init_cache: Callable
  prefill: Callable
  decode_step: Callable
  logits: Callable
  embed: Callable
  heads: int = 1
  kv_heads: int = 1
  axes: int = 1
  screens: int = 1
  unstack: Callable | None = None
  join: Callable | None = None
  keeping: Callable | None = None
  space: str = ""
  shown: tuple[int, int] = (0, 0)


class Critic(NamedTuple):
  """A critic as a record of pure functions. reads: "tokens" (a Batch: a value before every action token) or "steps" (a
  StepBatch: a value for every step).

  init(key, policy_params) -> params; score(params, frozen, batch) -> Scores with value_logit; frozen: parameters of a policy,
  without gradient.
  """

  kind: str
  reads: str
  init: Callable
  score: Callable
