"""config.json of all three layouts, and one line for each that cannot be used."""

import json

import numpy as np
import pytest

from models.config import FAMILIES, ModelConfig
from models.layers import rope_axis, rope_frequencies

TEXT = {
  "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
  "intermediate_size": 48, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
}  # fmt: skip
ROOT = {"image_token_id": 60, "vision_config": {"depth": 2}}
SECTION = {"mrope_section": [2, 1, 1]}  # head_dim 32 / 4 = 8, so 4 frequencies


def test_one_model_in_three_layouts():
  """Qwen2.5-VL as transformers 4 wrote it (flat), nested with rope_scaling, and as transformers 5 writes it: one config."""
  flat = TEXT | ROOT | {"model_type": "qwen2_5_vl", "rope_theta": 1e6, "rope_scaling": {"type": "mrope", **SECTION}}
  old = {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default", **SECTION}, "tie_word_embeddings": False}
  nested = {"model_type": "qwen2_5_vl", "text_config": TEXT | old | {"model_type": "qwen2_5_vl_text"}, **ROOT}
  rope = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", **SECTION}}
  new = {"model_type": "qwen2_5_vl", "text_config": TEXT | rope | {"model_type": "qwen2_5_vl_text"}, "tie_word_embeddings": False, **ROOT}
  want = ModelConfig(
    "qwen2_5_vl", 64, 32, 2, 4, 2, 8, 48, 1e-6, 1e6, 128, False, qkv_bias=True, mrope_section=(2, 1, 1), image_token_id=60,
    vision_json='{"depth": 2}',
  )  # fmt: skip
  assert ModelConfig.from_dict(flat) == ModelConfig.from_dict(nested) == ModelConfig.from_dict(new) == want
  assert want.vision == {"depth": 2} and hash(want) == hash(ModelConfig.from_dict(new))


@pytest.mark.parametrize("where", ["root", "text"])
def test_tied_embeddings_are_found_at_either_place(where):
  text = TEXT | {"rope_theta": 5e6, "rope_scaling": SECTION, "head_dim": 8, "model_type": "qwen3_vl_text"}
  raw = {"model_type": "qwen3_vl", "text_config": text, **ROOT}
  (raw if where == "root" else text)["tie_word_embeddings"] = True
  cfg = ModelConfig.from_dict(raw)
  assert cfg.tied and cfg.mrope_interleaved and cfg.qk_norm and not cfg.qkv_bias


@pytest.mark.parametrize(
  ("family", "attention_bias", "want"),
  [("llama", None, (False, False)), ("llama", True, (True, True)), ("qwen2", None, (True, False)), ("qwen3", False, (False, False))],
)
def test_which_projections_have_a_bias(family, attention_bias, want):
  raw = TEXT | {"model_type": family, "rope_theta": 1e6, "head_dim": None}
  cfg = ModelConfig.from_dict(raw if attention_bias is None else raw | {"attention_bias": attention_bias})
  assert (cfg.qkv_bias, cfg.o_bias) == want and cfg.head_dim == 8


def test_axes_of_m_rope():
  """Sections [2, 1, 1] in runs are T T H W. Interleaved [24, 20, 20]: T H W in turn to frequency 59, then T (models.md 1b)."""
  base = ModelConfig("qwen2_5_vl", 64, 32, 2, 4, 2, 8, 48, 1e-6, 1e6, 128, False, mrope_section=(2, 1, 1))
  np.testing.assert_array_equal(rope_axis(base), [0, 0, 1, 2])
  wide = ModelConfig("qwen3_vl", 64, 32, 2, 4, 2, 128, 48, 1e-6, 5e6, 128, False, mrope_section=(24, 20, 20), mrope_interleaved=True)
  np.testing.assert_array_equal(rope_axis(wide), [0, 1, 2] * 20 + [0, 0, 0, 0])


def test_llama3_scaling_by_hand():
  """theta 1e4, head_dim 8: frequencies 1, 0.1, 0.01, 0.001. Over the original 1000 tokens they turn 159, 15.9, 1.59 and 0.159 times:
  above 4 as they are, below 1 divided by 8, between blended by s = (1.5915 - 1) / 3 = 0.19718: 0.01 (s + (1 - s) / 8) = 0.00297533."""
  cfg = ModelConfig("llama", 64, 32, 2, 4, 2, 8, 48, 1e-6, 1e4, 128, False, llama3_rope=(8.0, 1.0, 4.0, 1000.0))
  np.testing.assert_allclose(rope_frequencies(cfg), [1, 0.1, 0.00297533, 0.000125], rtol=1e-5)


GOOD = TEXT | {"model_type": "qwen2", "rope_theta": 1e6}
BAD = {
  "model_type is 'gpt2'; the architectures known are llama, qwen2, qwen3, qwen2_5_vl, qwen3_vl": {"model_type": "gpt2"},
  "lacks rope_theta, and no default is assumed": {"rope_theta": None},
  "lacks rms_norm_eps": {"rms_norm_eps": None},
  "rope_type is 'yarn'; built are default, mrope, llama3": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
  "lacks low_freq_factor": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
  "use_sliding_window is True; only False is built": {"use_sliding_window": True},
  "hidden_act is 'gelu'; only 'silu' is built": {"hidden_act": "gelu"},
  "partial_rotary_factor is 0.5; only 1.0 is built": {"rope_scaling": {"partial_rotary_factor": 0.5}},
  "hidden_size is 0, wanted a whole number of 1 or more": {"hidden_size": 0},
  "vocab_size is True, wanted a whole number": {"vocab_size": True},
  "text_config is None, wanted an object of fields": {"text_config": None},
  "rope_parameters is [1], wanted an object of fields": {"rope_parameters": [1]},
  "rms_norm_eps is 'x', wanted a number above 0": {"rms_norm_eps": "x"},
  "rms_norm_eps is nan, wanted a number above 0": {"rms_norm_eps": float("nan")},  # Python's JSON has one
  "rope_theta is 0, wanted a number above 0": {"rope_theta": 0},
  "model_type is ['llama']; the architectures known are": {"model_type": ["llama"]},
  "tie_word_embeddings is 'false', wanted true or false": {"tie_word_embeddings": "false"},
  "attention_bias is 0, wanted true or false": {"attention_bias": 0},
  "rms_norm_eps is 10000000000000000000000000000000000000000000000000, wanted a number above 0 and below 1e30": {"rms_norm_eps": 10**400},
  "4 heads, 3 key-value heads, head_dim 8 of hidden_size 32 do not fit together": {"num_key_value_heads": 3},
}


@pytest.mark.parametrize("line", BAD)
def test_a_config_that_cannot_be_used_is_one_line(tmp_path, line):
  (tmp_path / "config.json").write_text(json.dumps(GOOD | BAD[line]))
  with pytest.raises(ValueError) as e:
    ModelConfig.from_hf(tmp_path)
  assert line in str(e.value) and str(tmp_path / "config.json") in str(e.value) and "\n" not in str(e.value)


def test_a_vision_config_that_cannot_be_used_is_one_line():
  raw = GOOD | ROOT | {"model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}
  with pytest.raises(ValueError, match=r"mrope_section is \[2, 2, 2\], wanted three numbers that add up to head_dim / 2 = 4"):
    ModelConfig.from_dict(raw)
  for section in (5, ["a", "b", "c"]):
    with pytest.raises(ValueError, match=r"mrope_section is .*, wanted three numbers that add up to head_dim / 2 = 4"):
      ModelConfig.from_dict(raw | {"rope_scaling": {"type": "mrope", "mrope_section": section}})
  with pytest.raises(ValueError, match=r"vision_config is \[1\], wanted an object of fields"):
    ModelConfig.from_dict(raw | {"rope_scaling": SECTION, "vision_config": [1]})
  with pytest.raises(ValueError, match="lacks vision_config"):
    ModelConfig.from_dict({k: v for k, v in raw.items() if k != "vision_config"} | {"rope_scaling": SECTION})


@pytest.mark.parametrize(
  ("text", "line"),
  [
    ("{", "is not JSON"), ("[" * 200_000, "is not JSON"), ('{"a": ' + "9" * 5000 + "}", "is not JSON"), ("[1]", "model_type is"),
    (None, "does not exist: wanted a checkpoint folder"),
  ],
  ids=["cut", "deep", "long", "list", "none"],
)  # fmt: skip
def test_a_file_that_is_none(tmp_path, text, line):
  if text is not None:
    (tmp_path / "config.json").write_text(text)
  with pytest.raises(ValueError, match=line):
    ModelConfig.from_hf(tmp_path)


def test_every_family_has_a_file_for_its_policy():
  from core.find import find

  for family in FAMILIES:
    assert callable(find("models", family if family.endswith("_vl") else "llama", having="make").make)
