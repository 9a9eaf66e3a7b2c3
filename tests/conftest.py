"""What tests of several folders share: a tiny policy small enough to compile in a moment, and episodes made by hand."""

import os
import shutil
import tempfile

import numpy as np
import pytest

from core.schema import SUCCESS, UNREADABLE_REWARD, Action, End, Episode, Screen, Step, TokenRecord, Unreadable

COMPILED = "JAX_COMPILATION_CACHE_DIR"


def pytest_configure(config):
  """One folder of compiled programs for all processes of this run of the tests: most of its time would go into compiling the same ones."""
  if COMPILED not in os.environ:  # the workers of xdist and train.py as a child inherit it
    folder = os.environ[COMPILED] = tempfile.mkdtemp(prefix="practice-tests-")
    # Small ones too: modules that compile quickly hand none on, and every one has the same few hundred of single operations.
    os.environ.update(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.01", JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="0")
    config.add_cleanup(lambda: (os.environ.pop(COMPILED), shutil.rmtree(folder, ignore_errors=True)))


# The files that take longest begin first, or one worker of xdist is left alone with them in the end.
LONGEST = ["test_train_faults", "test_train", "test_sessions", "test_policies", "test_learner_mesh", "test_two_buttons", "test_qemu",
           "test_pool_chaos", "test_qwen_vl", "test_llama", "test_remote", "test_objective", "test_attention", "test_tiny",
           "test_vl_policy", "test_vl_models", "test_text_models", "test_trained_export"]  # fmt: skip


def pytest_collection_modifyitems(items):
  rank = {name: i for i, name in enumerate(LONGEST)}
  items.sort(key=lambda item: rank.get(item.path.stem, len(LONGEST)))  # stable: the order within a file stays


@pytest.fixture(scope="module")
def compile_quickly():
  """Where arrays hold a handful of numbers the time goes into compiling: XLA's optimiser is off in a module that asks, and in the
  processes that it starts. What is compiled so rounds differently in the last bit: nothing of it is shared with other modules."""
  import jax

  before = jax.config.read("jax_disable_most_optimizations")
  jax.clear_caches()
  jax.config.update("jax_disable_most_optimizations", True)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    yield
  jax.config.update("jax_disable_most_optimizations", before)
  jax.clear_caches()


PIECES = ["tap(", ", ", ")", "wait()", "press(BACK)", "0.25", "0.50", "open ", "red", " mug", "the "]
SCREEN = (40, 24)  # 5 x 3 patches of 8: windows of 2 stand 3 across and 2 down, the last ones over the edge


def make_tiny(**knobs):
  from models import tiny

  cfg = tiny.defaults()
  cfg.update({"width": 16, "layers": 2, "heads": 2, "mlp": 2, "patch_width": 8, "window": 2, "stride": 2, "max_goal": 6, "max_action": 5})
  cfg.update(knobs)
  return tiny.make(cfg, PIECES, SCREEN)


@pytest.fixture(scope="session")
def tiny_policy():
  """A tiny policy of 6 image tokens and some 110 tokens of text; tiny_policy.init(key) makes its parameters."""
  return make_tiny()


@pytest.fixture(scope="session")
def tiny_params(tiny_policy):
  import jax

  return jax.jit(tiny_policy.init)(jax.random.key(0))


def screen(seed=0):
  return np.random.default_rng(seed).integers(0, 256, (SCREEN[1], SCREEN[0], 3)).astype(np.uint8)


def make_episode(
  raw, *, task="task", group="group", index=0, steps=2, version=0, end=None, written=2, prompt=3, first="wait()", popup="", replayed=False
):  # fmt: skip
  """An episode by hand. raw: 1 pass, 0 fail, -1 unreadable, None an infra error; a fail hits the step limit unless `end`
  says otherwise. Each step is a record of `prompt` prompt tokens and `written` action tokens, all of one version."""
  if raw is None:
    end, cause, rewards = End.INFRA_ERROR, "ResetFailed", {}
  elif raw == -1:
    end, cause, rewards = End.TERMINATED, "unreadable", {SUCCESS: 0.0, "unreadable": UNREADABLE_REWARD}
  else:
    end = end or (End.TERMINATED if raw else End.TRUNCATED)
    cause, rewards = "checker" if raw else "steps", {SUCCESS: float(raw)}
  shown, records = [], []
  for h in range(steps):
    text = first if h == 0 else "wait()"
    action = Unreadable("by hand") if raw == -1 and h == steps - 1 else Action("wait", {}, {}, "phone")
    notes = {"popup": popup, "entropy": 0.5}
    shown.append(Step(Screen.of(screen(h)), text, action, written, notes=notes))
    n, mask = prompt + written, np.arange(prompt + written) >= prompt
    records.append(
      TokenRecord(
        tokens=np.arange(10 * h, 10 * h + n, dtype=np.int32), is_action=mask, logp=np.where(mask, -0.25, 0).astype(np.float32),
        version=np.where(mask, version, -1).astype(np.int32), step=np.full(n, h, np.int32),
        image_place=np.array([1], np.int32), image_step=np.array([h], np.int32),
      )
    )  # fmt: skip
  return Episode(
    task_id=task, group=group, try_index=index, seed=0, steps=shown, end=end, end_cause=cause, rewards=rewards, records=records,
    goal="open the red mug", family="shopping", replayed=replayed,
  )  # fmt: skip


@pytest.fixture
def episode():
  """make_episode, see there."""
  return make_episode


@pytest.fixture
def group_of():
  """group_of([1, 0, -1, None], task=...) -> a Group of hand-made tries."""
  from core.schema import Group

  def make(raws, task="task", name="group", **kw):
    return Group(name, task, [make_episode(r, task=task, group=name, index=i, **kw) for i, r in enumerate(raws)])

  return make


@pytest.fixture(scope="session")
def tiny_screen():
  """tiny_screen(seed) -> a screenshot that fits tiny_policy."""
  return screen


@pytest.fixture(scope="session")
def tiny_with():
  """tiny_with(window=4, ...) -> tiny_policy with other knobs."""
  return make_tiny
