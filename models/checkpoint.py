"""A policy from a Hugging Face checkpoint folder, whichever family its config.json names: its knobs, all checks, its parameters.

Everything that a folder can have wrong is found by `read`, from the files' headers, before anything costly begins. Parameters are read
by `load` or, where adapters alone are learnt, by `base`.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_collections
from jax.sharding import Mesh

from core import mesh as mesh_lib
from models import decoder, hf, int8, llama, lora, qwen2_5_vl, qwen3_vl, vision_language
from models.attention import BACKENDS, KERNELS, platform
from models.base import Policy
from models.config import ModelConfig

VISION = {"qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl}  # the text families are models/llama.py's
DTYPES = ("float32", "bfloat16")
# Knobs that a text model has no use for, as they stand where nobody touched them.
OF_IMAGES = {"min_pixels": 0, "max_pixels": 0, "freeze_tower": False, "features_kept": 256, "remat_tower": ""}


def defaults() -> ml_collections.ConfigDict:
  """The knobs of every family in one place; one that the checkpoint's family has no use for is refused."""
  cfg = vision_language.defaults()
  cfg.update({k: v for k, v in llama.defaults().items() if k not in cfg})
  cfg.update(
    {
      "max_prompt": 7936,  # tokens, with max_action 8192; ARPO's 15 screenshots of 1080p take 64,000
      "max_action": 256,
      "dtype": "float32",  # of the parameters; bfloat16 takes half (adapters stay float32)
      "master": True,  # bfloat16 parameters have float32 copies that the steps are added to
      "moment": "float32",  # of Adam's first moment; bfloat16 takes half
      "lr": 1e-6,  # of copying and practice, in place of copy.lr and practice.lr, which are the tiny policy's
      "lora": lora.defaults(),
    }
  )
  return cfg


class Checkpoint(NamedTuple):
  """policy: the model; learner: the same as it is learnt, where features of a frozen tower are kept; load(key, mesh) -> the parameters
  that are learnt; base(mesh) -> those that are not (None where all are), read once a mesh; without a mesh, or on one of one device, on the
  first device. frozen_tower: image features outlive an update; lighter: the policy, sampling from int8 weights."""

  policy: Policy
  learner: Policy
  load: Callable[..., Any]
  base: Callable[..., Any]
  frozen_tower: bool

  @property
  def lighter(self) -> Policy:
    return self.policy._replace(unstack=lambda params: int8.lighter(self.policy.unstack(params)))


def leaves(folder: str) -> dict:
  """Every parameter of a checkpoint folder as a tree of decoder.Leaf, whichever family it is of."""
  cfg = ModelConfig.from_hf(folder)
  return (
    decoder.leaves(cfg) if cfg.vision is None else vision_language.leaves(vision_language.read_config(folder, VISION[cfg.family].TOWER))
  )


def read(cfg: ml_collections.ConfigDict, folder: str, grammar: str, screen_size: tuple[int, int]) -> Checkpoint:
  """What a folder holds as a policy for one action grammar and screen size (W, H). ValueError of one line names what does not fit."""
  if not pathlib.Path(folder).is_dir():
    raise ValueError(f"policy.checkpoint is {folder}: there is no such folder, wanted one with config.json, *.safetensors, tokenizer.json")
  model = ModelConfig.from_hf(folder)
  _refuse(cfg, model)
  policy = VISION.get(model.family, llama).make(cfg, folder, grammar, screen_size)
  tree = leaves(folder)
  hf.locate(folder, tree)
  adapters = lora.leaves(tree, cfg.lora) if cfg.lora.rank else {}
  frozen = cfg.freeze_tower if not adapters else "visual" not in adapters
  _refuse_of_tower(cfg, frozen, "visual" in adapters)

  def whole(mesh: Mesh | None = None) -> Any:
    spread = None if mesh is None or mesh.size == 1 else mesh_lib.shardings(decoder.abstract(tree), mesh)
    return hf.load(folder, tree, dtype=cfg.dtype, shardings=spread)

  keeping = lambda policy, visual: policy.keeping(policy, visual, cfg.features_kept) if policy.keeping and cfg.features_kept else policy
  if not cfg.lora.rank:
    visual = functools.cache(lambda: hf.load(folder, tree, dtype=cfg.dtype, branch="visual")["visual"])
    learner = keeping(policy, visual) if frozen else policy
    return Checkpoint(policy, learner, lambda key, mesh=None: whole(mesh), lambda mesh=None: None, frozen)
  policy = policy._replace(
    init=functools.partial(decoder.init_leaves, adapters), join=lambda base, params: lora.combine(base, params, cfg.lora)
  )
  begin, read_once = jax.jit(policy.init), functools.cache(whole)
  base = lambda mesh=None: read_once(mesh) if mesh is not None and mesh.size > 1 else read_once()
  learner = keeping(policy, lambda: base()["visual"]) if frozen else policy
  return Checkpoint(policy, learner, lambda key, mesh=None: begin(key), base, frozen)


def _refuse(cfg: ml_collections.ConfigDict, model: ModelConfig) -> None:
  """Knobs that are not what they can be, or do nothing for this family."""
  for name, known in (("dtype", DTYPES), ("moment", DTYPES), ("attention", ("auto", *BACKENDS))):
    if cfg[name] not in known:
      raise ValueError(f"policy.{name} is {cfg[name]!r}, wanted one of {', '.join(known)}")
  if (wanted := KERNELS.get(cfg.attention, platform())) != platform():
    raise ValueError(
      f"policy.attention is {cfg.attention!r}, a kernel for a {wanted.upper()}, and this process has a {platform().upper()}: wanted "
      "auto or chunked"
    )
  if cfg.attention == "cudnn" and cfg.dtype != "bfloat16":
    raise ValueError(f"policy.attention is 'cudnn', a kernel of 16-bit numbers: wanted policy.dtype=bfloat16, it is {cfg.dtype}")
  if cfg.lora.rank < 0 or not 0 < cfg.lora.alpha <= 1e6:
    raise ValueError(
      f"policy.lora.rank, alpha are {cfg.lora.rank}, {cfg.lora.alpha}: wanted a rank of 0 (off) or more, an alpha above 0, at most 1e6"
    )
  if cfg.features_kept < 0:
    raise ValueError(f"policy.features_kept is {cfg.features_kept}, wanted 0 (off) or more")
  if not 0 < cfg.lr < 1:
    raise ValueError(f"policy.lr is {cfg.lr}, wanted a number between 0 and 1")
  off = {"template": ""} if model.vision is not None else OF_IMAGES
  for name, value in off.items():
    if cfg[name] != value:
      raise ValueError(f"policy.{name} is {cfg[name]!r}, which a {model.family} checkpoint has no use for: leave it at {value!r}")
  flat = lambda knobs: {**knobs, **{f"lora.{name}": value for name, value in knobs.lora.items()}}
  given, usual, no_adapters = flat(cfg), flat(defaults()), "there are no adapters with policy.lora.rank=0"
  idle = {  # where a knob does nothing, and why
    "lora.alpha": (not cfg.lora.rank, no_adapters),
    "lora.targets": (not cfg.lora.rank, no_adapters),
    "screens": (cfg.mode == "append", "policy.mode=append keeps all that fit"),
    "max_goal": (True, "only critics of steps read goals, and a checkpoint has none"),
    "master": (cfg.dtype == "float32" or cfg.lora.rank > 0, "what learns is float32 already"),
  }
  for name, (off, why) in idle.items():
    if off and given[name] != usual[name]:
      raise ValueError(f"policy.{name} is {given[name]!r} and would do nothing, {why}: leave it at {usual[name]!r}")


def _refuse_of_tower(cfg: ml_collections.ConfigDict, frozen: bool, adapted: bool) -> None:
  """What does not go with a tower that learns, or with one that does not. adapted: it learns by adapters."""
  if adapted and cfg.freeze_tower:
    raise ValueError(f"policy.freeze_tower is on, and policy.lora.targets {cfg.lora.targets!r} finds maps of the tower: change one of them")
  if frozen and cfg.remat_tower:
    raise ValueError(f"policy.remat_tower is {cfg.remat_tower!r} and would do nothing, the tower is frozen: leave it out")
  usual = defaults().features_kept
  if not frozen and cfg.features_kept not in (0, usual):
    raise ValueError(
      f"policy.features_kept is {cfg.features_kept} and would do nothing, the tower learns: leave it at {usual}, or give "
      + ("policy.lora.targets that leave the tower out" if adapted else "policy.freeze_tower=True")
    )
