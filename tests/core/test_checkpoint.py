"""Rows K1 to K14 of the fault list that belong to the checkpoint itself."""

import json
import os
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import logging

from core import checkpoint
from core.checkpoint import Checkpointer
from core.schema import End, Episode, Screen, Step, TokenRecord, Unreadable
from core.state import TrainState

optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 20), weight_decay=0.01))


def fresh(seed=0, dtype=jnp.float32):
  a, b = jax.random.split(jax.random.key(seed))
  params = {
    "model.embed": {"w": jax.random.normal(a, (5, 3), dtype)},
    "head": {"w": jax.random.normal(b, (3, 2)), "b": jnp.zeros(2)},
  }
  return TrainState.create(params, optimiser)


@jax.jit
def gradient(params, x):
  return jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["model.embed"]["w"] @ p["head"]["w"] + p["head"]["b"]) ** 2))(params)


def update(state, i):
  grads = gradient(state.params, jnp.sin(jnp.arange(20.0).reshape(4, 5) + i))
  updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
  return TrainState(optax.apply_updates(state.params, updates), opt_state, state.updates + 1, state.skipped)


step_on = jax.jit(update)
donated = jax.jit(update, donate_argnums=0)


def same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    assert x.dtype == y.dtype and x.shape == y.shape and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def warnings(monkeypatch):
  """What the checkpointer warned about."""
  seen = []
  monkeypatch.setattr(logging, "warning", lambda text, *args: seen.append(text % args))
  return seen


def save_some(path, steps, **kwargs):
  c = Checkpointer(path, **({"keep": 9} | kwargs))
  for step in steps:
    c.save(step, {"x": jnp.full(3, step, jnp.float32)}, {"cursor": step})
  return c


def restored(c, step=None):
  tree, host, step = c.restore({"x": jnp.zeros(3)}, step)
  assert host == {"cursor": step}
  np.testing.assert_array_equal(tree["x"], np.full(3, step))
  return step


def test_straight_run_and_resumed_run_agree_bit_for_bit(tmp_path):
  rng, state = np.random.default_rng(5), fresh()
  with Checkpointer(tmp_path) as c:
    for i in range(8):
      if i == 4:
        c.save(i, {"train": state, "key": jax.random.key(3)}, {"updates": i, "rng": rng.bit_generator.state})
      state, last = step_on(state, i), rng.normal()
  tree, host, step = Checkpointer(tmp_path).restore({"train": jax.eval_shape(fresh), "key": jax.random.key(0)})
  again, rng2 = tree["train"], np.random.default_rng(0)
  rng2.bit_generator.state = host["rng"]
  assert step == host["updates"] == 4 and int(again.updates) == 4
  for i in range(4, 8):
    again, last2 = step_on(again, i), rng2.normal()
  same(again, state)
  assert last2 == last
  np.testing.assert_array_equal(jax.random.normal(tree["key"], (4,)), jax.random.normal(jax.random.key(3), (4,)))


def test_optimiser_state_keeps_its_types(tmp_path):
  state = step_on(fresh(), 0)
  c = Checkpointer(tmp_path)
  c.save(1, state)
  for target in (jax.eval_shape(fresh), fresh(1), jax.tree.map(np.asarray, fresh(1))):
    back, _, _ = c.restore(target)
    same(back, state)
  assert isinstance(back.opt_state[1][0].mu["head"]["w"], np.ndarray)  # a numpy target stays on the host


def test_empty_scalar_bfloat16_and_odd_values_come_back(tmp_path):
  odd = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001], np.uint32).view(np.float32)
  tree = {
    "empty": jnp.zeros((0, 3)),
    "one": jnp.float32(2),
    "half": jnp.array([1.5, -0.0], jnp.bfloat16),
    "odd": odd,
    "flags": jnp.array([True, False]),
    "long": np.arange(3),
    "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
  }
  c = Checkpointer(tmp_path)
  c.save(0, tree)
  back, host, _ = c.restore(tree)
  same({k: v for k, v in back.items() if k != "keys"}, {k: v for k, v in tree.items() if k != "keys"})
  assert host is None and back["keys"].dtype == tree["keys"].dtype and back["keys"].shape == (2,)
  assert jax.random.bits(back["keys"][1]) == jax.random.bits(tree["keys"][1])


def test_a_tree_without_arrays_can_be_saved(tmp_path):
  c = Checkpointer(tmp_path)
  c.save(0, {}, [1, 2])
  assert c.restore({}) == ({}, [1, 2], 0)


def test_saving_is_safe_while_the_buffers_are_donated(tmp_path):
  state, truth = fresh(), []
  with Checkpointer(tmp_path, keep=30) as c:
    for i in range(20):
      truth.append(jax.tree.map(lambda x: np.array(x, copy=True), state))
      before = state
      c.save(i, state, block=False)
      state = donated(state, i)
      assert before.params["head"]["w"].is_deleted()
  for i in range(20):
    same(c.restore(jax.eval_shape(fresh), i)[0], truth[i])


def test_restored_arrays_can_be_donated_and_need_no_new_compilation(tmp_path):
  c = Checkpointer(tmp_path)
  step = jax.jit(lambda s: update(s, 0), donate_argnums=0)
  state = step(step(fresh()))
  c.save(2, state)
  before = step._cache_size()
  back, _, _ = c.restore(state)
  step(back)
  assert all(x.is_deleted() for x in jax.tree.leaves(back)) and step._cache_size() == before


def test_a_replay_buffer_is_part_of_the_step_and_its_screens_are_written_once(tmp_path):
  screens = [Screen.of(np.full((4, 6, 3), i, np.uint8)) for i in range(3)]

  def episode(*which):
    ones = np.ones(3, np.int32)
    record = TokenRecord(ones, ones > 0, -ones.astype(np.float32) / 3, ones, 0 * ones, ones[:1], ones[:1])
    return Episode(
      "t",
      "g",
      0,
      1,
      [Step(screens[i], "?", Unreadable("no"), 3) for i in which],
      End.TRUNCATED,
      "steps",
      {"success": 0.0},
      [record],
    )

  files = lambda: {p.stem: p.stat().st_mtime_ns for p in (tmp_path / "screens").rglob("*.png")}  # noqa: E731
  with Checkpointer(tmp_path, keep=1) as c:
    c.save(1, {}, {"replay": [episode(0, 1)]})
    first = files()
    c.save(2, {}, {"replay": [episode(0, 2)]})
  second = files()
  assert set(first) == {screens[0].ref, screens[1].ref} and set(second) == {screens[0].ref, screens[2].ref}
  assert first[screens[0].ref] == second[screens[0].ref]
  back = c.restore({})[1]["replay"][0]
  assert back.end is End.TRUNCATED and [s.screen.ref for s in back.steps] == [screens[0].ref, screens[2].ref]
  np.testing.assert_array_equal(back.steps[1].screen.pixels, screens[2].pixels)
  np.testing.assert_array_equal(back.records[0].logp, np.full(3, -1 / 3, np.float32))


def test_a_policy_of_250k_parameters_is_saved_in_half_a_second(tmp_path):
  params = {f"layer{i}": {"w": jnp.ones((144, 144)), "b": jnp.ones(144)} for i in range(12)}  # 250k, with Adam 750k
  state = TrainState.create(params, optimiser)
  c = Checkpointer(tmp_path)
  seconds = []
  for i in range(4):  # the first includes imports; the best of them, because the machine has other work to do
    start = time.perf_counter()
    c.save(i, state)
    seconds.append(time.perf_counter() - start)
  assert min(seconds) < 0.5


# ---- what counts as complete


def damage(path, how):
  tree_file = max((path / "tree").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
  if how == "no manifest":
    (path / "manifest.json").unlink()
  elif how == "half a manifest":
    (path / "manifest.json").write_text((path / "manifest.json").read_text()[:40])
  elif how == "manifest of another kind":
    (path / "manifest.json").write_text((path / "manifest.json").read_text().replace('"leaves": [', '"leaves": ["x", '))
  elif how == "empty folder":
    shutil.rmtree(path)
    path.mkdir()
  elif how == "array file missing":
    tree_file.unlink()
  elif how == "array file short":
    tree_file.write_bytes(tree_file.read_bytes()[:-1])
  elif how == "array file changed":
    data = bytearray(tree_file.read_bytes())
    data[len(data) // 2] ^= 1
    tree_file.write_bytes(data)
  elif how == "host file changed":
    (path / "host_00000.json").write_text((path / "host_00000.json").read_text().replace("7", "8"))
  elif how == "host file missing":
    (path / "host_00000.npz").unlink()


@pytest.mark.parametrize(
  "how",
  [
    "no manifest",
    "half a manifest",
    "manifest of another kind",
    "empty folder",
    "array file missing",
    "array file short",
    "array file changed",
    "host file changed",
    "host file missing",
  ],
)
def test_a_broken_step_is_skipped_loudly_and_the_next_older_used(tmp_path, warnings, how):
  save_some(tmp_path, [3, 5, 7])
  damage(tmp_path / "7", how)
  c = Checkpointer(tmp_path)
  assert restored(c) == 5
  assert len(warnings) == 1 and str(tmp_path / "7") in warnings[0] and "SKIPPED" in warnings[0]
  assert c.latest() == 5
  c.save(6, {"x": jnp.full(3, 6.0)}, {"cursor": 6})  # goes on from there, also past the broken one
  c.save(7, {"x": jnp.full(3, 7.0)}, {"cursor": 7})
  assert restored(c) == restored(Checkpointer(tmp_path)) == 7


def test_unfinished_folders_beside_a_good_step_do_not_count(tmp_path, warnings):
  save_some(tmp_path, [5])
  for name in ("9", "tmp-8", "12abc", "7.orbax-checkpoint-tmp-1"):
    (tmp_path / name).mkdir()
  (tmp_path / "11").write_text("a file")
  c = Checkpointer(tmp_path)
  assert c.steps() == [5] and restored(c) == 5
  assert len(warnings) == 1 and f"{tmp_path / '9'} IS INCOMPLETE" in warnings[0]


def test_a_missing_screen_makes_a_step_broken(tmp_path, warnings):
  c = Checkpointer(tmp_path)
  c.save(1, {}, [Screen.of(np.zeros((2, 2, 3), np.uint8))])
  c.save(2, {}, [Screen.of(np.ones((2, 2, 3), np.uint8))])
  c.screens.path(Screen.of(np.ones((2, 2, 3), np.uint8)).ref).unlink()
  assert Checkpointer(tmp_path).restore({})[2] == 1 and "screen" in warnings[0]


def test_a_broken_step_that_was_asked_for_is_an_error(tmp_path, warnings):
  save_some(tmp_path, [3, 5])
  damage(tmp_path / "5", "array file changed")
  with pytest.raises(FileNotFoundError, match=r"no complete checkpoint of step 5 in .*1 damaged.*steps there: 3"):
    Checkpointer(tmp_path).restore({"x": jnp.zeros(3)}, 5)


def test_nothing_there_is_an_error_that_says_so(tmp_path):
  c = Checkpointer(tmp_path / "none")
  assert c.latest() is None and c.best() is None and not (tmp_path / "none").exists()
  with pytest.raises(FileNotFoundError, match="steps there: none"):
    c.restore({})


def test_a_killed_save_leaves_the_old_step_and_the_next_one_sweeps_up(tmp_path, monkeypatch):
  c = save_some(tmp_path, [1, 2], keep=1)
  with monkeypatch.context() as m:
    rename = os.rename

    def killed(a, b):
      if os.path.basename(b) == "3":  # the last moment before the commit
        raise KeyboardInterrupt
      rename(a, b)

    m.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
      c.save(3, {"x": jnp.zeros(3)})
  assert (tmp_path / "tmp-3" / "manifest.json").exists()
  c = Checkpointer(tmp_path, keep=1)
  assert restored(c) == 2
  c.save(4, {"x": jnp.zeros(3)})
  assert sorted(p.name for p in tmp_path.iterdir()) == ["4"]


def test_older_steps_go_only_after_the_new_one_is_committed(tmp_path, monkeypatch):
  c = save_some(tmp_path, [1], keep=1)
  seen = []
  rename = os.rename

  def watch(a, b):
    names = lambda: sorted(p.name for p in tmp_path.iterdir())  # noqa: E731
    before = names()
    rename(a, b)
    if os.path.basename(b) == "2":  # orbax renames too, inside tmp-2
      seen.extend([before, names()])

  monkeypatch.setattr(os, "rename", watch)
  c.save(2, {"x": jnp.zeros(3)})
  assert seen == [["1", "tmp-2"], ["1", "2"]] and c.steps() == [2]


# ---- order, keeping, rollback


def test_keeps_the_newest_and_the_best(tmp_path):
  c = Checkpointer(tmp_path, keep=2, keep_best=1)
  for step, score in enumerate([0.1, 0.7, None, 0.7, 0.2, 0.3, 0.4]):
    c.save(step, {}, score=score)
  assert c.steps() == [3, 5, 6] and c.best() == 3 and c.latest() == 6
  assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "5", "6"]


@pytest.mark.parametrize("step", [5, 4, 0])
def test_a_step_that_is_not_newer_is_refused(tmp_path, step):
  c = save_some(tmp_path, [3, 5])
  with pytest.raises(ValueError, match=rf"checkpoint {step} not saved.*already holds step 5.*force=True"):
    c.save(step, {"x": jnp.zeros(3)})
  assert c.steps() == [3, 5] and restored(c) == 5


@pytest.mark.parametrize("step", [-1, 2.5])
def test_a_step_is_a_whole_number(tmp_path, step):
  with pytest.raises(ValueError, match="wanted a whole number"):
    Checkpointer(tmp_path).save(step, {})


def test_force_rolls_back_and_later_saves_go_on(tmp_path):
  c = save_some(tmp_path, [3, 5, 7])
  c.save(5, {"x": jnp.full(3, 55.0)}, "second five", force=True)
  assert c.steps() == [3, 5] and c.restore({"x": jnp.zeros(3)})[1] == "second five"
  c.save(6, {"x": jnp.full(3, 6.0)}, {"cursor": 6})
  assert Checkpointer(tmp_path).steps() == [3, 5, 6] and restored(c) == 6


def test_a_rollback_killed_before_the_old_steps_are_gone_still_holds(tmp_path, monkeypatch):
  c = save_some(tmp_path, [3, 5, 7])
  monkeypatch.setattr(Checkpointer, "_prune", lambda self: None)
  c.save(5, {"x": jnp.full(3, 55.0)}, "second five", force=True)
  assert {"5", "5.1", "7"} <= {p.name for p in tmp_path.iterdir()}
  c = Checkpointer(tmp_path)
  assert c.steps() == [3, 5] and c.restore({"x": jnp.zeros(3)})[1] == "second five"


@pytest.mark.parametrize("kwargs", [{"keep": 0}, {"keep_best": -1}])
def test_bounds_of_what_is_kept(tmp_path, kwargs):
  with pytest.raises(ValueError, match="wanted keep >= 1"):
    Checkpointer(tmp_path, **kwargs)


def test_score_must_be_a_number(tmp_path):
  with pytest.raises(ValueError, match="score is nan"):
    Checkpointer(tmp_path).save(1, {}, score=float("nan"))


def test_a_relative_path_means_the_same_folder_after_chdir(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  c = Checkpointer("runs/checkpoints")
  monkeypatch.chdir("/")
  c.save(1, {"x": jnp.zeros(3)})
  assert (tmp_path / "runs" / "checkpoints" / "1" / "manifest.json").exists() and c.latest() == 1


def test_a_url_is_refused():
  with pytest.raises(ValueError, match="local or mounted"):
    Checkpointer("gs://bucket/run")


# ---- errors in the background


def test_a_save_that_fails_in_the_background_is_raised_and_costs_no_older_step(tmp_path, monkeypatch):
  c = save_some(tmp_path, [1], keep=1)

  def full(self, temp, encoded):
    raise OSError("No space left on device")

  with monkeypatch.context() as m:
    m.setattr(Checkpointer, "_write_host", full)
    c.save(2, {"x": jnp.zeros(3)}, block=False)
    with pytest.raises(OSError, match="failed: No space left"):
      c.close()
    c.save(2, {"x": jnp.zeros(3)}, block=False)
    with pytest.raises(OSError, match="failed: No space left"):
      c.save(3, {"x": jnp.zeros(3)})
  assert c.steps() == [1]
  c.save(3, {"x": jnp.full(3, 3.0)}, {"cursor": 3})  # raised once; the next save works
  assert restored(c) == 3


def test_a_background_save_returns_before_it_is_written_and_wait_commits_it(tmp_path, monkeypatch):
  go, write_host = threading.Event(), Checkpointer._write_host
  monkeypatch.setattr(Checkpointer, "_write_host", lambda self, *a: (go.wait(20), write_host(self, *a)))
  c = Checkpointer(tmp_path)
  host = {"cursor": 1}
  c.save(1, {"x": jnp.full(3, 1.0)}, host, block=False)
  assert c.steps() == []
  host["cursor"] = 99  # the caller goes on changing its own state
  go.set()
  c.wait()
  assert restored(c) == 1


# ---- the target decides


BASE = {"a": {"w": jnp.zeros((2, 3))}, "b": jnp.zeros(4, jnp.int32)}


@pytest.mark.parametrize(
  "target, line",
  [
    (
      {"a": {"w": jnp.zeros((2, 3), jnp.bfloat16)}, "b": BASE["b"]},
      r"leaf a/w is float32 \[2, 3\], wanted bfloat16 \[2, 3\]; cast=True",
    ),
    ({"a": {"w": jnp.zeros((3, 2))}, "b": BASE["b"]}, r"leaf a/w is float32 \[2, 3\], wanted float32 \[3, 2\]$"),
    ({"a": {"w": BASE["a"]["w"]}, "c": BASE["b"]}, r"has no leaf c, which the target wants; it has b instead"),
    (BASE | {"c": jnp.zeros(1), "d": jnp.zeros(1)}, r"has no leaf c \(and 1 more\), which the target wants$"),
    ({"a": {"w": BASE["a"]["w"]}}, r"has leaf b, which the target does not have; partial=True"),
    ({"a": [BASE["a"]["w"]], "b": BASE["b"]}, r"has no leaf a/0.* it has a/w instead"),
    (
      {"a": {"w": jax.random.split(jax.random.key(0), (2, 3))}, "b": BASE["b"]},
      r"leaf a/w is float32 \[2, 3\], wanted key<fry> \[2, 3\]$",
    ),
  ],
)
def test_what_does_not_fit_is_one_line_and_never_a_fallback(tmp_path, warnings, target, line):
  c = Checkpointer(tmp_path)
  c.save(1, BASE)
  with pytest.raises(ValueError, match=line) as e:
    c.restore(target)
  assert "\n" not in str(e.value) and str(tmp_path / "1") in str(e.value) and not warnings


def test_a_dtype_is_converted_when_asked(tmp_path):
  c = Checkpointer(tmp_path)
  c.save(1, {"w": jnp.array([1.0, 2.0 + 2**-20])})
  assert c.restore({"w": jnp.zeros(2, jnp.bfloat16)}, cast=True)[0]["w"].tolist() == [1.0, 2.0]
  assert c.restore({"w": np.zeros(2)}, cast=True)[0]["w"].dtype == np.float64


def test_an_evaluation_reads_parameters_only(tmp_path):
  state = step_on(fresh(), 0)
  c = Checkpointer(tmp_path)
  c.save(1, state)
  back, _, _ = c.restore({"params": jax.eval_shape(fresh).params}, partial=True)
  same(back["params"], state.params)


@pytest.mark.parametrize(
  "tree, line",
  [
    ({"a": 3}, "leaf a is a int, wanted an array; plain values belong in the host state"),
    ({"a": "x"}, "leaf a is a str"),
    ({"a": {"b": np.zeros(1)}, "a/b": np.zeros(1)}, "two checkpoint leaves are called a/b"),
    ({"a": np.array([{}])}, "leaf a is an array of Python objects"),
  ],
)
def test_what_cannot_be_a_leaf_is_refused_before_anything_is_written(tmp_path, tree, line):
  with pytest.raises(ValueError, match=line):
    Checkpointer(tmp_path).save(1, tree)
  assert list(tmp_path.iterdir()) == []


def test_a_newer_format_stops_the_run_and_is_not_deleted(tmp_path):
  c = save_some(tmp_path, [1])
  path = tmp_path / "1" / "manifest.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | {"format": checkpoint.FORMAT + 1}))
  with pytest.raises(ValueError, match="has format 2, this version reads format 1"):
    c.save(2, {})
  assert path.exists()
