"""The mesh: sizes that fit or are one line, a rule for every parameter of every family, and an equal share of a real model everywhere."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
import tiny_checkpoints
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from core import mesh as mesh_lib
from core import rows
from core.optimiser import make_optimiser
from core.state import TrainState
from models import checkpoint, critic, decoder, lora

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llama", "smollm2", "qwen2", "qwen3")


def knobs(**changed):
  cfg = mesh_lib.defaults()
  cfg.update(changed)
  return cfg


def over(data=1, fsdp=1, context=1, tensor=1):
  return AbstractMesh((data, fsdp, context, tensor), mesh_lib.AXES)


@pytest.mark.parametrize(
  "given, devices, want",
  [
    ({}, 1, (1, 1, 1, 1)),
    ({}, 8, (1, 8, 1, 1)),  # nothing said: parameters are shared by all
    ({"context": 4}, 16, (1, 4, 4, 1)),
    ({"data": 2, "fsdp": 2, "context": 2, "tensor": 2}, 16, (2, 2, 2, 2)),
  ],
)
def test_what_is_left_is_fsdp(given, devices, want):
  assert mesh_lib.sizes(knobs(**given), devices) == want


@pytest.mark.parametrize(
  "given, devices, words",
  [
    ({"tensor": 3}, 8, "mesh is data 1 x fsdp 2 x context 1 x tensor 3 = 6, but there are 8 devices"),
    ({"fsdp": 4}, 8, r"= 4, but there are 8 devices: .*\(mesh.fsdp=0 takes what the others leave\)"),
    ({"context": 2}, 1, "= 2, but there are 1 devices"),
    ({"tensor": 0}, 8, "mesh.tensor is 0, wanted 1 or more"),
    ({"fsdp": -1}, 8, r"mesh.fsdp is -1, wanted 1 or more \(0 = what the others leave\)"),
  ],
)
def test_sizes_that_do_not_fit_are_one_line(given, devices, words):
  with pytest.raises(ValueError, match=words) as error:
    mesh_lib.sizes(knobs(**given), devices)
  assert "\n" not in str(error.value)


def test_tensor_holds_whole_key_value_heads():
  mesh_lib.check_heads(over(tensor=4), 28, 4)
  with pytest.raises(ValueError, match="mesh.tensor is 8, the policy has 28 heads and 4 key-value heads: wanted one of 1, 2, 4 "):
    mesh_lib.check_heads(over(tensor=8), 28, 4)
  with pytest.raises(ValueError, match="wanted one of 1, 3 "):
    mesh_lib.check_heads(over(tensor=2), 9, 3)


def test_names_decide_in_any_depth():
  mesh = over(fsdp=2, context=2, tensor=2)
  of = lambda name, *shape: mesh_lib.spec(name, shape, mesh)
  both = ("fsdp", "context")
  assert of("states/policy/params/model/layers/self_attn/q_proj/weight", 3, 8, 16) == P(None, "tensor", both)
  assert of("states/policy/opt_state/1/0/mu/model/layers/mlp/down_proj/weight", 3, 16, 8) == P(None, both, "tensor")
  assert of("model/layers/self_attn/k_proj/bias", 3, 8) == P(None, "tensor")
  assert of("lm_head/weight", 64, 16) == P("tensor", both) == of("model/embed_tokens/weight", 64, 16)
  assert of("visual/blocks/attn/qkv/weight", 2, 24, 8) == P(None, None, (*both, "tensor"))
  assert of("visual/patch_embed/proj/weight", 8, 3, 2, 4, 4) == P((*both, "tensor"), None, None, None, None)
  assert of("model/norm/weight", 16) == P(None) and of("states/policy/opt_state/1/0/count") == P()
  assert of("layers/0/up_proj", 32, 16) == P("tensor", both) and of("embed_tokens", 64, 16) == P("tensor", both)


def test_a_small_leaf_that_does_not_divide_is_split_less_and_a_big_one_refused():
  mesh = over(fsdp=4, context=2, tensor=2)
  assert mesh_lib.spec("embed_tokens", (109, 16), mesh) == P(None, ("fsdp", "context"))
  assert mesh_lib.spec("embed_tokens", (109, 12), mesh) == P(None, "fsdp")
  with pytest.raises(ValueError, match=r"lm_head/weight of shape \[151937, 1023\] cannot be split"):
    mesh_lib.spec("lm_head/weight", (151937, 1023), mesh)
  with pytest.raises(ValueError, match=r"model/new_part/weight of shape \[4, 4\] fits no sharding rule: add one to core/mesh.py"):
    mesh_lib.spec("model/new_part/weight", (4, 4), mesh)


def specs_of(tree, mesh):
  """PartitionSpec of every leaf by name."""
  found = jax.tree.leaves(mesh_lib.shardings(tree, mesh))
  return {name: s.spec for (name, _), s in zip(mesh_lib.names(tree), found, strict=True)}


def everything(params):
  """What a run learns, from a policy's parameters."""
  optimiser, _ = make_optimiser(Knobs, 1.0, None)
  state = jax.eval_shape(lambda p: TrainState.create(p, optimiser), params)
  return {"states": {"policy": state}, "frozen": {"reference": params}}


class Knobs:
  lr, warmup, weight_decay = 1e-3, 0, 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_every_family_has_a_rule(family, tmp_path):
  """With adapters on all linear maps too, and the optimiser's state of both."""
  tree = checkpoint.leaves(tiny_checkpoints.folder(tmp_path, family))
  cfg = lora.defaults()
  cfg.update({"rank": 4, "targets": "."})
  mesh = over(fsdp=2, context=2, tensor=2)
  for leaves in (tree, lora.leaves(tree, cfg)):
    specs = specs_of(everything(decoder.abstract(leaves)), mesh)
    front, states = "states/policy/params/", ("states/policy/opt_state/1/0/mu/", "states/policy/opt_state/1/0/nu/", "frozen/reference/")
    named = {name.removeprefix(front): spec for name, spec in specs.items() if name.startswith(front)}
    assert len(named) == len(jax.tree.leaves(decoder.abstract(leaves)))
    for name, spec in named.items():
      assert [specs[state + name] for state in states] == [spec] * 3  # an optimiser's numbers lie where the parameter's do


def test_the_tiny_policy_and_its_critics_have_rules(tiny_policy):
  params = jax.eval_shape(tiny_policy.init, jax.random.key(0))
  mesh, shapes = over(fsdp=2, tensor=2), {"states/policy/params": params}
  for kind in critic.KINDS:
    made = critic.build(kind, critic.defaults(), tiny_policy)
    shapes[f"states/{kind}/params"] = jax.eval_shape(made.init, jax.random.key(0), params)
  specs = specs_of(shapes, mesh)
  assert specs["states/policy/params/layers/1/down_proj"] == P("fsdp", "tensor")
  assert specs["states/trunk/params/trunk/layers/1/down_proj"] == P("fsdp", "tensor")
  assert specs["states/text/params/0/weight/0"] == P(None, "fsdp") and specs["states/trunk/params/head/bias/0"] == P(None)


SEVEN_B = {  # config.json of Qwen2.5-VL-7B
  "vocab_size": 152064, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
  "intermediate_size": 18944, "tie_word_embeddings": False,
}  # fmt: skip
TOWER = {
  "depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": 3584, "patch_size": 14,
  "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip


@pytest.fixture(scope="module")
def seven_b(tmp_path_factory):
  """Every parameter of Qwen2.5-VL-7B as a shape."""
  folder = pathlib.Path(tiny_checkpoints.folder(tmp_path_factory.mktemp("7b"), "qwen2_5_vl"))
  config = json.loads((folder / "config.json").read_text())
  text = config.get("text_config", config)
  text.update(SEVEN_B)
  text.get("rope_parameters", text.get("rope_scaling"))["mrope_section"] = [16, 24, 24]
  text.pop("layer_types", None)
  config["tie_word_embeddings"] = False
  config["vision_config"].update(TOWER)
  (folder / "config.json").write_text(json.dumps(config))
  preprocessor = json.loads((folder / "preprocessor_config.json").read_text())
  (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor | {"patch_size": 14, "merge_size": 2}))
  return decoder.abstract(checkpoint.leaves(str(folder)))


@pytest.mark.parametrize("shape", [{"fsdp": 16}, {"fsdp": 4, "context": 4}, {"fsdp": 2, "context": 2, "tensor": 4}, {"fsdp": 64}])
def test_a_device_holds_its_share_of_qwen_7b(seven_b, shape):
  """8.292 billion numbers (counted on transformers' model), an equal part of them on every device but for norms and biases."""
  count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(seven_b))
  assert count == pytest.approx(8.292e9, rel=1e-4)
  mesh = over(**shape)
  held = sum(
    int(np.prod(s.shard_shape(leaf.shape)))
    for leaf, s in zip(jax.tree.leaves(seven_b), jax.tree.leaves(mesh_lib.shardings(seven_b, mesh)), strict=True)
  )
  assert count / mesh.size <= held < 1.02 * count / mesh.size


@dataclasses.dataclass(frozen=True)
class Chip:
  id: int
  coords: tuple[int, int, int]
  process_index: int
  slice_index: int = 0
  device_kind: str = "TPU v6 lite"
  platform: str = "tpu"
  core_on_chip: int = 0


def pod(side=4, slices=1, kind="TPU v6 lite"):
  """Chips of a slice, 16 of a v6e 4x4 unless more is asked: hosts of 2x2."""
  half, each = side // 2, side * side
  host = lambda x, y, i: x // 2 + half * (y // 2) + i * half * half
  return [Chip(side * y + x + i * each, (x, y, 0), host(x, y, i), i, kind) for i in range(slices) for y in range(side) for x in range(side)]


@pytest.mark.parametrize("shape", [(1, 4, 4, 1), (2, 2, 2, 2), (1, 8, 2, 1), (4, 2, 1, 2), (16, 1, 1, 1)])
def test_every_process_has_whole_rows_whatever_the_slice_looks_like(shape):
  """Along an axis of the slice four chips in a line belong to two hosts."""
  out = mesh_lib.arranged(shape, pod(), 4)
  assert out.shape == shape and len({device.id for device in out.flat}) == 16
  assert all(len({device.process_index for device in row}) == 1 for row in out.reshape(shape[0] * shape[1], -1))


def test_rows_on_several_hosts_lie_along_the_slice():
  """A v5e 8x8 as fsdp 8 x context 8: a row is a line over four hosts of 2x2, which the next row shares: 16 hosts have 8 blocks of rows."""
  mesh = mesh_lib.Mesh(mesh_lib.arranged((1, 8, 8, 1), pod(8, kind="TPU v5 lite"), 16), mesh_lib.AXES)
  lines = mesh.devices.reshape(8, 8)
  assert all(len({d.coords[1] for d in row}) == 1 for row in lines) or all(len({d.coords[0] for d in row}) == 1 for row in lines)
  assert [[len({d.process_index for d in row}), len({d.process_index for d in pair.flat})] for row, pair in zip(
    lines, lines.reshape(4, 16).repeat(2, 0))] == [[4, 4]] * 8  # fmt: skip
  lie = mesh_lib.shared(mesh)
  assert lie.apart == ("fsdp0", "fsdp1", "context0", "context1") and lie.within == ("fsdp2", "context2") and lie.parts == 2
  assert list(lie.mesh.devices.flat) == list(mesh.devices.flat)  # what jit wants of shardings that meet in a program
  assert mesh_lib.multiples(mesh) == {"blocks": 1, "tokens_multiple": 8 * 128, "images_multiple": 8}
  # hosts 0 to 3 share rows 0 and 1: first the rows of 0 and 1 lie there, then those of 2 and 3
  assert rows.deal(lie.owners, lie).reshape(2, 8).tolist() == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
  whole = mesh_lib.Mesh(mesh_lib.arranged((1, 4, 4, 1), pod(), 4), mesh_lib.AXES)
  assert mesh_lib.shared(whole) is None and mesh_lib.multiples(whole)["blocks"] == 1


@pytest.mark.parametrize("shape, parts", [((1, 2, 8, 1), 2), ((2, 1, 4, 2), 2), ((1, 1, 8, 2), 4)])
def test_processes_that_lie_in_every_axis_own_what_the_finer_mesh_says(shape, parts):
  mesh = mesh_lib.Mesh(mesh_lib.arranged(shape, pod(), 4), mesh_lib.AXES)
  lie = mesh_lib.shared(mesh)
  assert lie.parts == parts and sorted(lie.owners.flat) == [0, 1, 2, 3]
  names = lie.mesh.axis_names
  for at in np.ndindex(lie.mesh.devices.shape):
    assert lie.mesh.devices[at].process_index == lie.owners[tuple(at[names.index(name)] for name in lie.apart)]


def test_rows_on_several_hosts_stay_within_a_slice():
  out = mesh_lib.arranged((2, 2, 8, 1), pod(slices=2), 8)
  assert [{d.slice_index for d in half.flat} for half in out] == [{0}, {1}]
  with pytest.raises(ValueError, match="mesh.data is 1, wanted a multiple of the 2 slices"):
    mesh_lib.arranged((1, 4, 8, 1), pod(slices=2), 8)


line = lambda count, each: [Chip(i, (i, 0, 0), i // each, platform="cpu", device_kind="cpu") for i in range(count)]


@pytest.mark.parametrize("shape, devices, words", [
  ((1, 1, 16, 1), pod(), "= 16 devices share a row, of several .* with 4 devices each, which are no regular part of the mesh 1 x 1"),
  ((1, 2, 6, 1), line(12, 4), "= 6 devices share a row, of several processes with 4 devices each, which are no regular"),
])  # fmt: skip
def test_processes_that_are_no_regular_part_are_one_line(shape, devices, words):
  """A row of all chips of a square slice is a ring, which leaves a host and comes back to it."""
  mesh = mesh_lib.Mesh(mesh_lib.arranged(shape, devices, len({d.process_index for d in devices})), mesh_lib.AXES)
  with pytest.raises(ValueError, match=words) as error:
    mesh_lib.shared(mesh)
  assert "\n" not in str(error.value)


def test_a_process_with_a_row_and_a_half_is_one_line():
  with pytest.raises(ValueError, match="= 6 devices share a row, but .* have 8 devices each: wanted a divisor or a multiple of 8"):
    mesh_lib.arranged((1, 1, 6, 1), line(16, 8), 2)
  two_rows_on_three = np.empty((1, 2, 9, 1), object)
  for at in np.ndindex(two_rows_on_three.shape):
    two_rows_on_three[at] = Chip(at[1] * 9 + at[2], at[1:], at[2] // 3)
  with pytest.raises(ValueError, match="= 9 devices share a row, of several processes with 6 devices each: wanted 6 or a multiple of it"):
    mesh_lib.shared(mesh_lib.Mesh(two_rows_on_three, mesh_lib.AXES))


def test_processes_with_unlike_numbers_of_devices_are_one_line():
  """4 + 4 + 2: the third has lost two."""
  cfg = mesh_lib.defaults()
  with pytest.raises(ValueError, match="^process 2 has 2 devices and process 0 has 4: wanted as many in every process$"):
    mesh_lib.make(cfg, line(10, 4))
