"""Text policies: Llama 3, SmolLM2, Qwen2 and Qwen3 on what the environment offers as text (an accessibility tree, a page's elements).

The screenshot is not read. Everything that computes stands in models/decoder.py; here it becomes the Policy that the loop asks.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import ml_collections
import numpy as np

from core.schema import TokenRecord
from models import decoder
from models.base import Policy, Prompt, Seen
from models.chat import TEMPLATES, Chat, Turn, make_chat
from models.config import ModelConfig

CHATS = {"llama": "llama3", "qwen2": "chatml", "qwen3": "chatml"}  # unless cfg.template says otherwise


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "mode": "append",  # every observation stays in the context | "window": the last `screens` of them
      "screens": 5,  # read by mode "window" only
      "max_prompt": 7936,  # tokens, with max_action 8192; what goes first when there are more stands in models/chat.py
      "max_action": 256,  # tokens the policy may write a step, the end of turn included
      "max_goal": 256,  # tokens of a goal, for critics that read it
      "template": "",  # of the chat, see models/chat.py; "" = the family's. SmolLM2 is a Llama that wants "smollm2"
      "space": "",  # how points are meant, see models/chat.py; "" = as the grammar has it
      "instruction": "",  # plain or uitars (models/chat.py), or a text file with {goal} in it; "" = plain
      "system": "",  # "" = what the family was trained with
      "remat": "full",  # what a training step keeps of each layer: see models/decoder.py
      "attention": "auto",  # see models/attention.py
      "dtype": "bfloat16",  # of the parameters
    }
  )


def make(cfg: ml_collections.ConfigDict, folder: str, grammar: str, screen_size: tuple[int, int]) -> Policy:
  """A policy for one checkpoint folder and action grammar. ValueError of one line where the knobs do not fit the checkpoint."""
  model, chat = _check(cfg, folder, grammar, screen_size)
  dtype, how = jnp.dtype(cfg.dtype), {"attention": cfg.attention}
  return Policy(
    name=model.family,
    tokenizer=chat.tokenizer,
    tokens_per_image=0,
    width=model.width,
    max_goal=cfg.max_goal,
    max_prompt=cfg.max_prompt,
    max_action=cfg.max_action,
    init=lambda key: decoder.init(model, key, dtype),
    prompt=lambda goal, screens, text="", history=(): prompt(chat, goal, text, history),
    positions=positions,
    image=lambda screen: np.zeros((0,), np.uint8),
    encode_images=lambda params, images: jnp.zeros((0, model.width), dtype),
    forward=lambda params, tokens, at, segments, features, image_slot: decoder.forward(
      params, model, tokens, at, segments, remat=cfg.remat, **how
    ),
    token_logprobs=lambda params, *args, **kwargs: decoder.token_logprobs(params, model, *args, **kwargs),
    init_cache=lambda batch, size: decoder.init_cache(model, batch, size, dtype),
    prefill=lambda params, tokens, at, valid, features, image_slot, cache: decoder.prefill(params, model, tokens, at, valid, cache, **how),
    decode_step=lambda params, token, position, cache: decoder.decode_step(params, model, token, cache, **how),
    logits=decoder.logits,
    embed=decoder.embed,
    heads=model.heads,
    kv_heads=model.kv_heads,
    screens=chat.screens,
    unstack=decoder.unstack,
    space=chat.space,
    shown=screen_size,
  )


def _check(cfg: ml_collections.ConfigDict, folder: str, grammar: str, screen_size: tuple[int, int]) -> tuple[ModelConfig, Chat]:
  if cfg.template and cfg.template not in TEMPLATES:
    raise ValueError(f"policy.template is {cfg.template!r}; there are {', '.join(TEMPLATES)}")
  if cfg.remat not in decoder.REMAT:
    raise ValueError(f"policy.remat is {cfg.remat!r}; there are {', '.join(decoder.REMAT)}")
  model = ModelConfig.from_hf(folder)
  if model.vision is not None:
    raise ValueError(f"{folder}/config.json: {model.family} sees screenshots; its file is models/{model.family}.py")
  template = TEMPLATES[cfg.template or CHATS[model.family]]._replace(image=None)
  chat = make_chat(cfg, folder, template, model, grammar, "pixels", screen_size)
  prompt(chat, "", "")  # refuses a budget that no prompt fits into
  return model, chat


def prompt(chat: Chat, goal: str, text: str, history: Sequence[Seen] = ()) -> Prompt:
  """The newest text after what was read and written before."""
  turns = [Turn((0, 0), h.text, h.written) for h in history]
  tokens = chat.prompt(goal, [*turns, Turn((0, 0), text, None)]).tokens
  return Prompt(tokens, _count(len(tokens)), np.zeros(0, np.int32), np.zeros((0, 0), np.uint8), len(tokens))


def positions(record: TokenRecord) -> np.ndarray:
  """Positions i32 [1, T] of a stored record."""
  return _count(len(record))


def _count(length: int) -> np.ndarray:
  return np.arange(length, dtype=np.int32)[None]
