"""What a checkpoint's own config.json says about a decoder, whichever of the three layouts it was written in.

  flat              Llama, Qwen2, Qwen3, SmolLM2; Qwen2.5-VL as transformers 4 wrote it (text fields at the top level)
  text_config       nested, rope_theta + rope_scaling (Qwen3-VL as transformers 4 wrote it)
  rope_parameters   nested or flat, as transformers 5 writes it
No value is taken from a library's defaults: they differ from those of the published checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, NamedTuple

ROPE_TYPES = ("default", "mrope", "llama3")
MOST = 2**24  # of any whole number: no model is so wide, deep or long, and loops over layers would not end
LAYERS = 1024


class Family(NamedTuple):
  """How an architecture differs from plain Llama. bias: of q, k and v; "config": where attention_bias says so (then o as well)."""

  bias: str  # "always" | "config"
  qk_norm: bool
  vision: bool


FAMILIES = {
  "llama": Family("config", False, False),
  "qwen2": Family("always", False, False),
  "qwen3": Family("config", True, False),
  "qwen2_5_vl": Family("always", False, True),
  "qwen3_vl": Family("config", True, True),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The static sizes and switches of one decoder; hashable, so that jit may take it as a static argument."""

  family: str
  vocab: int
  width: int  # D
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp: int
  eps: float
  rope_theta: float
  max_position: int
  tied: bool
  qkv_bias: bool = False
  o_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  llama3_rope: tuple[float, float, float, float] | None = None  # factor, low, high, original length
  mrope_section: tuple[int, ...] = ()  # frequencies that turn with T, H and W; () = one position axis
  mrope_interleaved: bool = False
  image_token_id: int = -1
  vision_json: str = ""  # the checkpoint's vision_config, sorted; text because a dict could not be hashed

  @property
  def vision(self) -> dict[str, Any] | None:
    """The checkpoint's vision_config as it stands there, None for a text model."""
    return json.loads(self.vision_json) if self.vision_json else None

  @classmethod
  def from_hf(cls, folder: str | pathlib.Path) -> ModelConfig:
    """Reads FOLDER/config.json; ValueError of one line that names the file and the field otherwise."""
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
      raise ValueError(f"{path} does not exist: wanted a checkpoint folder with config.json, *.safetensors and tokenizer.json")
    return cls.from_dict(json_of(path), str(path))

  @classmethod
  def from_dict(cls, raw: dict[str, Any], path: str = "config.json") -> ModelConfig:
    """The same from a dict. path: named in errors."""
    got = raw.get("model_type") if isinstance(raw, dict) else raw
    if not isinstance(raw, dict) or not isinstance(got, str) or got not in FAMILIES:
      raise ValueError(f"{path}: model_type is {told(got)}; the architectures known are {', '.join(FAMILIES)}")
    family = FAMILIES[raw["model_type"]]
    inner = object_of(raw.get("text_config", {}), "text_config", path)
    text = raw | inner
    _refuse(text, path)
    width, heads = whole(text, "hidden_size", path), whole(text, "num_attention_heads", path)
    kv_heads = whole(text, "num_key_value_heads", path)
    head_dim = whole(text, "head_dim", path) if text.get("head_dim") is not None else width // heads
    if heads % kv_heads or head_dim % 2 or (text.get("head_dim") is None and width % heads):
      raise ValueError(f"{path}: {heads} heads, {kv_heads} key-value heads, head_dim {head_dim} of hidden_size {width} do not fit together")
    bias = _flag(text, "attention_bias", path)
    return cls(
      family=raw["model_type"], vocab=whole(text, "vocab_size", path), width=width,
      layers=whole(text, "num_hidden_layers", path, LAYERS),
      heads=heads, kv_heads=kv_heads, head_dim=head_dim, mlp=whole(text, "intermediate_size", path),
      eps=_positive(text, "rms_norm_eps", path, below=1), max_position=whole(text, "max_position_embeddings", path),
      tied=_flag(raw, "tie_word_embeddings", path) or _flag(inner, "tie_word_embeddings", path),
      qkv_bias=family.bias == "always" or bias, o_bias=family.bias == "config" and bias, mlp_bias=_flag(text, "mlp_bias", path),
      qk_norm=family.qk_norm, **_rope(text, head_dim, raw["model_type"], path), **_vision(raw, family, path),
    )  # fmt: skip


def json_of(path: pathlib.Path) -> Any:
  """What a JSON file of a checkpoint holds."""
  if not path.is_file():
    raise ValueError(f"{path} is no file: a folder, a pipe or a link that leads nowhere")
  try:
    return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
  except (OSError, ValueError, RecursionError) as e:  # ValueError: no JSON or UTF-8, a key twice, a number of too many digits
    raise ValueError(f"{path} is not JSON that can be read: {e}") from e


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """An object of JSON in which no key stands twice: readers differ in which of both they take."""
  fields = dict(pairs)
  if len(fields) < len(pairs):
    names = [name for name, _ in pairs]
    raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands twice in one object")
  return fields


def need(fields: dict, name: str, path: str) -> Any:
  """The field of that name. Of a dotted name the last part is looked up, the rest says in errors where it stands."""
  value = fields.get(name.rpartition(".")[2])
  if value is None:
    raise ValueError(f"{path} lacks {name}, and no default is assumed: add the value the checkpoint was trained with")
  return value


def told(value: Any) -> str:
  """A value in an error's one line, cut where it is long."""
  text = repr(value)
  return text if len(text) <= 80 else f"{text[:77]}..."


def whole(fields: dict, name: str, path: str, most: int = MOST) -> int:
  value = need(fields, name, path)
  if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
    raise ValueError(f"{path}: {name} is {told(value)}, wanted a whole number of 1 or more, at most {most}")
  return value


def only(fields: dict, name: str, built: Any, path: str) -> None:
  """ValueError where the field of that name (see `need`) is there and has another value than the one that is built."""
  value = fields.get(name.rpartition(".")[2])
  number = lambda x: isinstance(x, int | float) and not isinstance(x, bool)
  if value is not None and (value != built or type(value) is not type(built) and not (number(value) and number(built))):
    raise ValueError(f"{path}: {name} is {told(value)}; only {built!r} is built")


def _flag(fields: dict, name: str, path: str, usual: bool = False) -> bool:
  """A switch; what is not there or null is as usual."""
  value = fields.get(name)
  if value is not None and not isinstance(value, bool):
    raise ValueError(f"{path}: {name} is {told(value)}, wanted true or false")
  return usual if value is None else value


def _positive(fields: dict, name: str, path: str, below: float = 1e30) -> float:
  value = need(fields, name, path)
  if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < below:
    raise ValueError(f"{path}: {name} is {told(value)}, wanted a number above 0 and below {below:g}")
  return float(value)


def blocks(fields: dict, name: str, path: str, depth: int) -> tuple[int, ...]:
  """A list of some of `depth` blocks, by their numbers."""
  value = need(fields, name, path)
  if not isinstance(value, list) or not all(type(n) is int and 0 <= n < depth for n in value):
    raise ValueError(f"{path}: {name} is {told(value)}, wanted a list of block numbers, each from 0 to {depth - 1} (depth is {depth})")
  return tuple(value)


def object_of(value: Any, name: str, path: str) -> dict:
  if not isinstance(value, dict):
    raise ValueError(f"{path}: {name} is {told(value)}, wanted an object of fields")
  return value


def _refuse(text: dict, path: str) -> None:
  """What would change the numbers and is not built."""
  for name, built in (("hidden_act", "silu"), ("use_sliding_window", False), ("partial_rotary_factor", 1.0)):
    only(text, name, built, path)
  if text.get("quantization_config") is not None:
    raise ValueError(f"{path} has a quantization_config, and quantised weights are not read: take the checkpoint's unquantised version")
  kinds = text.get("layer_types")
  if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
    raise ValueError(f"{path}: layer_types is {told(kinds)}; only 'full_attention' is built")


def _rope(text: dict, head_dim: int, name: str, path: str) -> dict[str, Any]:
  new = text.get("rope_parameters")
  old = text.get("rope_scaling")
  rope = object_of(new, "rope_parameters", path) if new is not None else object_of({} if old is None else old, "rope_scaling", path)
  theta = _positive(rope if new is not None else text, "rope_theta", path)
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind not in ROPE_TYPES:
    raise ValueError(f"{path}: rope_type is {told(kind)}; built are {', '.join(ROPE_TYPES)}")
  only(rope, "partial_rotary_factor", 1.0, path)
  out: dict[str, Any] = {"rope_theta": theta}
  if kind == "llama3":
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    out["llama3_rope"] = _, low, high, _ = tuple(_positive(rope, n, path) for n in names)
    if low >= high:
      raise ValueError(f"{path}: low_freq_factor is {low:g}, wanted less than high_freq_factor ({high:g})")
  if FAMILIES[name].vision:
    section = need(rope, "mrope_section", path)
    three = isinstance(section, list | tuple) and len(section) == 3 and all(type(n) is int and n >= 0 for n in section)
    if not three or sum(section) != head_dim // 2:
      raise ValueError(f"{path}: mrope_section is {told(section)}, wanted three numbers that add up to head_dim / 2 = {head_dim // 2}")
    out["mrope_section"] = tuple(section)
    out["mrope_interleaved"] = _flag(rope, "mrope_interleaved", path, name == "qwen3_vl")
  return out


def _vision(raw: dict, family: Family, path: str) -> dict[str, Any]:
  if not family.vision:
    return {}
  vision = json.dumps(object_of(need(raw, "vision_config", path), "vision_config", path), sort_keys=True)
  return {"image_token_id": whole(raw, "image_token_id", path), "vision_json": vision}
