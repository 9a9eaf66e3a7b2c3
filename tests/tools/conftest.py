"""tools/smollm2.py needs requirements-smollm2.txt: without it its tests are not collected."""

from importlib.util import find_spec

import pytest

collect_ignore = [] if find_spec("gguf") else ["test_smollm2.py"]


@pytest.fixture(scope="session")
def copied_run(tmp_path_factory):
  """A workdir as train.py leaves it after copying, in which nothing was learnt. Small in every size."""
  import jax
  import numpy as np

  import evaluate
  from configs import android
  from core import config as config_lib
  from core.checkpoint import Checkpointer

  cfg = android.get_config()
  with cfg.unlocked():
    cfg.env.update({"held_out_tasks": 4, "practice_tasks": 4, "in_domain_tasks": 2})
    cfg.practice.slots = 4
    cfg.policy.tiny.update({"width": 16, "layers": 1, "heads": 2})
    cfg.compile_cache = ""
  workdir = tmp_path_factory.mktemp("copied") / "run"
  config_lib.write_config(workdir, cfg)
  rng, shapes = np.random.default_rng(0), jax.eval_shape(evaluate.build(cfg).policy.init, jax.random.key(0))
  params = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(x.dtype), shapes)  # compiling init takes longer than the tests
  for folder in ("copied", "checkpoints"):
    with Checkpointer(workdir / folder) as checkpoints:
      checkpoints.save(7, {"states": {"policy": {"params": params}}}, {"facts": {"phase": "practice", "version": 0}})
  return workdir
