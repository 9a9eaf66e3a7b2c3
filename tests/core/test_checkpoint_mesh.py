"""Checkpoints across meshes and processes: fault rows K10 and K1 on a pod, played with forced CPU devices and gloo."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ports import free_address

from core.checkpoint import Checkpointer, Damaged, read_numpy
from core.find import ROOT
from tests.core.test_checkpoint import damage, save_some

SAVE = """
import sys, jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from core.checkpoint import Checkpointer
mesh = jax.make_mesh((jax.device_count(),), ("x",))
put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
tree = {"w": put(jnp.arange(32.0).reshape(8, 4), "x"), "b": put(jnp.ones(3))}
"""


def python(code, devices, *args):
  env = os.environ | {
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
  }
  return subprocess.Popen(
    [sys.executable, "-c", code, *map(str, args)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  )


def finish(*processes):
  try:
    said = [p.communicate(timeout=240)[0] for p in processes]
  finally:
    for p in processes:
      p.kill()
  assert all(p.returncode == 0 for p in processes), "\n".join(said)


def test_saved_on_four_devices_read_on_one_and_on_two(tmp_path):
  code = (
    SAVE
    + """
Checkpointer(sys.argv[1]).save(1, tree)
mesh = jax.sharding.Mesh(np.array(jax.devices()[2:]), ("x",))
target = {"w": put(jnp.zeros((8, 4)), "x"), "b": put(jnp.zeros(3))}
back, _, _ = Checkpointer(sys.argv[1]).restore(target)
assert back["w"].sharding == target["w"].sharding and len(back["w"].addressable_shards) == 2
assert (np.asarray(back["w"]) == np.arange(32).reshape(8, 4)).all() and (np.asarray(back["b"]) == 1).all()
"""
  )
  finish(python(code, 4, tmp_path))
  back, _, _ = Checkpointer(tmp_path).restore({"w": jnp.zeros((8, 4)), "b": jnp.zeros(3)})
  np.testing.assert_array_equal(back["w"], np.arange(32.0).reshape(8, 4))


def test_two_processes_save_one_step_and_each_gets_its_own_host_state_back(tmp_path):
  code = (
    f"import sys, jax; jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))\n{SAVE}\n"
    + """
me = jax.process_index()
c = Checkpointer(sys.argv[1], keep=1)
for step in (1, 2):
  c.save(step, tree, {"me": me, "step": step, "x": np.full(2, me)}, block=False)
back, host, step = c.restore(tree)
assert step == 2 and host["me"] == me and host["x"].tolist() == [me, me], host
for shard in back["w"].addressable_shards:
  assert (np.asarray(shard.data) == np.arange(32).reshape(8, 4)[shard.index]).all()
assert c.steps() == [2]
"""
  )
  address = free_address()
  finish(*[python(code, 2, tmp_path, address, i) for i in range(2)])
  back, host, step = Checkpointer(tmp_path).restore({"w": jnp.zeros((8, 4)), "b": np.zeros(3, np.float32)})
  assert step == 2 and host["me"] == 0
  np.testing.assert_array_equal(back["w"], np.arange(32.0).reshape(8, 4))


SEVERAL = """
import sys, threading, time, jax
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from functools import partial
from core import hosts
SAVED
import asyncio
from orbax.checkpoint._src.serialization import jax_array_handlers as handlers
write = handlers._async_serialize_replica_slices
me, checkpoints = jax.process_index(), Checkpointer(sys.argv[1], keep=3)
write_host = Checkpointer._write_host
def refused(what):
  try: what()
  except OSError as error: return str(error)
"""
BESIDE = """
go = threading.Event()
async def held(*args, **how):  # what orbax writes from the host's memory
  await asyncio.to_thread(go.wait, 60)
  return await write(*args, **how)
handlers._async_serialize_replica_slices = held
tree = {"w": put(jnp.linspace(-1.0, 1.0, 1 << 20).reshape(1 << 10, 1 << 10), "x"), "b": put(jnp.ones(3))}
@partial(jax.jit, donate_argnums=0)
def update(tree):
  return {"w": tree["w"] * 0.99 + jnp.sum(tree["w"] ** 2) * 1e-9, "b": tree["b"] + jnp.mean(tree["w"])}
whole = jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=NamedSharding(mesh, P()))
def run(tree, updates):
  for _ in range(updates): tree = jax.block_until_ready(update(tree))
  return tree
def note(tree, step):
  if me == 0: np.savez(f"{sys.argv[1]}-{step}.npz", **{k: np.array(v.addressable_data(0)) for k, v in whole(tree).items()})
  else: jax.block_until_ready(whole(tree))
tree = run(tree, 3)
note(tree, 1)
checkpoints.save(1, tree, {"me": me}, block=False)
tree = run(tree, 20)  # all-reduces of the whole mesh, beside the writer
assert checkpoints._thread.is_alive() and checkpoints.steps() == []
note(tree, 2)
threading.Timer(0.5, go.set).start()
checkpoints.save(2, tree, {"me": me}, block=False)  # waits for the first
assert go.is_set() and checkpoints.steps()[0] == 1
tree = run(tree, 20)
checkpoints.written()
assert checkpoints.steps() == [1, 2]
checkpoints.close()
want = np.load(f"{sys.argv[1]}-1.npz")
back, host, step = checkpoints.restore(tree, 1)
assert host == {"me": me}
for name, x in back.items():
  for shard in x.addressable_shards: assert np.asarray(shard.data).tobytes() == want[name][shard.index].tobytes(), name
"""


def two_processes(code, folder):
  address = free_address()
  finish(*[python(SEVERAL.replace("SAVED", SAVE) + code, 2, folder, address, i) for i in range(2)])


def test_two_processes_save_while_their_updates_go_on(tmp_path):
  """The writer is held up: save has returned, both go on reducing over the mesh in donated buffers, and what is restored is what was there
  when save was called. The second save waits for the first."""
  two_processes(BESIDE, tmp_path / "steps")
  for step in (1, 2):
    got, want = read_numpy(tmp_path / "steps" / str(step)), np.load(tmp_path / f"steps-{step}.npz")
    assert {name: x.tobytes() for name, x in got.items()} == {name: want[name].tobytes() for name in want}


def test_what_fails_in_one_process_is_an_error_in_both_and_who_does_not_come_is_not_waited_for_for_ever(tmp_path):
  code = """
def full(self, *args): raise OSError("No space left on device")
checkpoints.save(1, tree, {"me": me})
if me == 1: Checkpointer._write_host = full
checkpoints.save(2, tree, {"me": me}, block=False)
said = refused(checkpoints.wait)
assert "No space left on device" in said and ("process 1" in said) == (me == 0), said
said = refused(lambda: checkpoints.save(2, tree, {"me": me}))
assert "No space left on device" in said, said
Checkpointer._write_host = write_host
async def broken(*args, **how): raise OSError("orbax cannot write")
if me == 0: handlers._async_serialize_replica_slices = broken
checkpoints.save(2, tree, {"me": me}, block=False)
said = refused(checkpoints.wait)
assert "orbax cannot write" in said and ("process 0" in said) == (me == 1), said
handlers._async_serialize_replica_slices = write
try: said = refused(lambda: checkpoints.save(2, tree, {"me": object() if me == 1 else me}, block=False))
except (TypeError, ValueError): said = ""  # its own host state, as in a run of one process
assert ("process 1" in said) == (me == 0), said
assert checkpoints.steps() == [1]
checkpoints.save(3, tree, {"me": me}, block=False)
checkpoints.close()
assert checkpoints.steps() == [1, 3] and not list(checkpoints.directory.glob("tmp-*"))
hosts.everyone(me)  # the other one has looked, too: the next save begins with a folder
if me == 0:
  hosts._patience = 1.0
  try: checkpoints.save(4, tree, {"me": me}, block=False)
  except hosts.Parted as error: assert "did not answer" in str(error)
  else: raise AssertionError("nobody else was there")
  hosts._patience = 100.0
hosts.everyone(me)
"""
  two_processes(code, tmp_path)


LEARNER = """
import sys, jax, jax.numpy as jnp, numpy as np
from conftest import make_tiny
from core import mesh as mesh_lib
from core.checkpoint import Checkpointer, read_numpy
from core.optimiser import make_optimiser
from core.state import TrainState
class knobs: lr, warmup, weight_decay = 1e-3, 0, 0.0
optimiser, _ = make_optimiser(knobs, 1.0, None, master=True, frozen="visual/")
policy = make_tiny(layers=1)
half = lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), policy.init(key))
shapes = jax.eval_shape(lambda key: {"states": {"policy": TrainState.create(half(key), optimiser)}}, jax.random.key(0))
rng = np.random.default_rng(0)
tree = jax.tree.map(lambda x: np.asarray(100 * rng.standard_normal(x.shape), x.dtype), shapes)
mesh = lambda **sizes: mesh_lib.make({**mesh_lib.defaults(), **sizes})
meshes = [mesh(), mesh(tensor=2, fsdp=4), mesh(context=2, tensor=2), mesh(data=8, fsdp=1)]
wide = lambda tree: [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]
same = lambda a, b: all(np.array_equal(x, y) for x, y in zip(wide(a), wide(b), strict=True))
before = tree
for step, m in enumerate(meshes):  # every mesh reads what the one before wrote, the first what one device wrote
  Checkpointer(sys.argv[1]).save(step, before)
  after, _, _ = Checkpointer(sys.argv[1]).restore(mesh_lib.placed(shapes, m, offload=step == 2))
  wanted = jax.tree.leaves(mesh_lib.shardings(tree, m, offload=step == 2))
  assert [x.sharding for x in jax.tree.leaves(after)] == wanted and same(after, tree), m
  before = after
Checkpointer(sys.argv[1]).save(9, before)
named = read_numpy(sys.argv[1])
assert same([named[n] for n, x in mesh_lib.names(tree) if x.size], [x for _, x in mesh_lib.names(tree) if x.size])
assert named["states/policy/params/embed_tokens"].dtype == jnp.bfloat16
"""


def test_a_learner_goes_from_any_mesh_to_any_other_and_to_numpy(tmp_path):
  """bfloat16 parameters, their float32 master and Adam's moments: one device, fsdp 8, fsdp 4 x tensor 2, fsdp 2 x context 2 x tensor 2
  with the optimiser's part in the host's memory, data 8, and back without any."""
  finish(python(LEARNER, 8, tmp_path))
  back, _, step = Checkpointer(tmp_path).restore({"states": {"policy": {"params": {"norm": jnp.zeros(16, jnp.bfloat16)}}}}, partial=True)
  assert step == 9 and back["states"]["policy"]["params"]["norm"].any()


def test_arrays_can_be_read_as_plain_numpy(tmp_path):
  c = Checkpointer(tmp_path)
  for step in (1, 2):
    c.save(step, {"p": {"w": jnp.full((2, 2), step, jnp.bfloat16), "none": jnp.zeros((0, 2))}, "key": jax.random.key(step)})
  for path, step in ((tmp_path, 2), (tmp_path / "1", 1)):
    found = read_numpy(path)
    assert sorted(found) == ["key", "p/none", "p/w"] and all(type(x) is np.ndarray for x in found.values())
    assert found["p/w"].tolist() == [[step, step]] * 2 and found["p/none"].shape == (0, 2)
    np.testing.assert_array_equal(found["key"], jax.random.key_data(jax.random.key(step)))


def test_arrays_that_were_changed_on_disk_are_not_read_as_numbers(tmp_path):
  save_some(tmp_path, [3])
  damage(tmp_path / "3", "array file changed")
  with pytest.raises(Damaged, match="has not the content it was written with"):
    read_numpy(tmp_path)
