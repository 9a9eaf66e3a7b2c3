"""config.json of all three layouts, and one line for each that cannot be used."""

import json
import pathlib

import numpy as np
import pytest

from models import qwen2_5_vl, qwen3_vl
from models.config import FAMILIES, ModelConfig
from models.layers import rope_axis, rope_frequencies

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
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
  "rms_norm_eps is 1000000000000000000000000000000000": {"rms_norm_eps": 10**400},
  "num_hidden_layers is 2000000000, wanted a whole number of 1 or more, at most 1024": {"num_hidden_layers": 2 * 10**9},
  "vocab_size is 100000000, wanted a whole number of 1 or more, at most 16777216": {"vocab_size": 10**8},
  "layer_types is ['sliding_attention', 'full_attention']; only 'full_attention' is built": {
    "layer_types": ["sliding_attention", "full_attention"]
  },
  "has a quantization_config, and quantised weights are not read": {"quantization_config": {"bits": 4}},
  "rms_norm_eps is 5, wanted a number above 0 and below 1": {"rms_norm_eps": 5},
  "layer_types is 5; only 'full_attention' is built": {"layer_types": 5},
  "rope_scaling is [], wanted an object of fields": {"rope_scaling": []},
  "use_sliding_window is 0; only False is built": {"use_sliding_window": 0},
  "low_freq_factor is 4, wanted less than high_freq_factor (4)": {
    "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4, "original_max_position_embeddings": 9}
  },
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


TOWER = {
  "hidden_act is 'gelu'; only {act!r} is built": {"hidden_act": "gelu"},
  "hidden_act is ['silu']; only {act!r} is built": {"hidden_act": ["silu"]},
  "in_channels is 4; only 3 is built": {"in_channels": 4},
  "in_chans is '3'; only 3 is built": {"in_chans": "3"},
  "rope_theta is 5000.0; only 10000.0 is built": {"rope_theta": 5000.0},
  "rope_parameters is 'x', wanted an object of fields": {"rope_parameters": "x"},
  "rope_parameters.rope_theta is 1; only 10000.0 is built": {"rope_parameters": {"rope_theta": 1}},
  "depth is 2000, wanted a whole number of 1 or more, at most 1024": {"depth": 2000},
  "depth is [3], wanted a whole number": {"depth": [3]},
  "num_heads is 0, wanted a whole number": {"num_heads": 0},
  "num_heads is 5 of hidden_size 24, wanted as many as": {"num_heads": 5},
  "patch_size is 257, wanted a whole number of 1 or more, at most 256": {"patch_size": 257},
  "spatial_merge_size is 65, wanted a whole number of 1 or more, at most 64": {"spatial_merge_size": 65},
  "temporal_patch_size is -2, wanted a whole number": {"temporal_patch_size": -2},
  "intermediate_size is 1.5, wanted a whole number": {"intermediate_size": 1.5},
  "out_hidden_size is None": {"out_hidden_size": None},
}
OF_ONE = {
  "qwen2_5_vl": {
    "window_size is 1025, wanted a whole number of 1 or more, at most 1024": {"window_size": 1025},
    "window_size is 27, wanted 28 pixels or more": {"window_size": 27},
    "fullatt_block_indexes is 1, wanted a list of block numbers": {"fullatt_block_indexes": 1},
    "fullatt_block_indexes is [3], wanted a list of block numbers, each from 0 to 2": {"fullatt_block_indexes": [3]},
  },
  "qwen3_vl": {
    "num_position_embeddings is 37, wanted a square": {"num_position_embeddings": 37},
    "num_position_embeddings is '36', wanted a whole number": {"num_position_embeddings": "36"},
    "deepstack_visual_indexes is [2, 0], wanted one block or more, each after the last": {"deepstack_visual_indexes": [2, 0]},
    "deepstack_visual_indexes is {{}}, wanted a list": {"deepstack_visual_indexes": {}},
  },
}


@pytest.mark.parametrize("tower", [qwen2_5_vl, qwen3_vl], ids=["qwen2_5_vl", "qwen3_vl"])
def test_a_tower_that_cannot_be_built_is_one_line(tower):
  name, act = tower.__name__.rpartition(".")[2], "silu" if tower is qwen2_5_vl else "gelu_pytorch_tanh"
  good = json.loads((GOLDEN / name / "config.json").read_text())["vision_config"]
  tower.vision_config(good | {"in_chans": 3, "rope_theta": 10000})
  for line, change in (TOWER | OF_ONE[name]).items():
    with pytest.raises(ValueError) as e:
      tower.vision_config(good | change, "F")
    line = line.format(act=act) if "is None" not in line else "out_hidden_size, and no default is assumed"
    assert f"vision_config.{line}" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
  ("text", "line"),
  [
    ("{", "is not JSON"), ("[" * 200_000, "is not JSON"), ('{"a": ' + "9" * 5000 + "}", "is not JSON"), ("[1]", "model_type is"),
    ('{"a": {"b": 1, "b": 2}}', "is not JSON that can be read: 'b' stands twice in one object"),
    (None, "does not exist: wanted a checkpoint folder"),
  ],
  ids=["cut", "deep", "long", "list", "twice", "none"],
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
