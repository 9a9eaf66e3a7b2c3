"""Plans by arithmetic against figures worked out elsewhere, the reader of compiled programs on programs by hand, and what is refused."""

import dataclasses
import math
import pathlib
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from core.config import ConfigError
from core.optimiser import make_optimiser
from core.state import TrainState
from models import decoder
from tools import plan as plan_tool
from tools.planning import analytic, chips, compiled, decoding, hlo, shapes, show
from tools.planning.analytic import How, Work

ROOT = pathlib.Path(__file__).resolve().parents[2]
EPISODE = Work(65536, 15, (1920, 1080), 8192)
ONE = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1}


@pytest.fixture(scope="module")
def qwen():
  return shapes.load("qwen2.5-vl-7b")


def state_of(shape, dtype, master=False):
  optimiser = make_optimiser(SimpleNamespace(lr=1e-6, warmup=5, weight_decay=0.0), 1.0, None, master=master)[0]
  params = decoder.abstract(shape.leaves, jnp.dtype(dtype))
  return How(dtype, "full", False, optimiser), jax.eval_shape(lambda p: TrainState.create(p, optimiser), params)


@pytest.mark.parametrize(
  "name, billions",  # counted from the published checkpoints' tensors (transformers, meta device); Llama's and SmolLM2's model cards
  [("qwen2.5-vl-3b", 3.755), ("qwen2.5-vl-7b", 8.292), ("qwen3-vl-8b", 8.767), ("llama-3.1-8b", 8.030), ("smollm2-135m", 0.1345)],
)
def test_a_known_model_has_its_published_number_of_parameters(name, billions):
  leaves = jax.tree.leaves(shapes.load(name).leaves, is_leaf=decoder.is_leaf)
  assert sum(math.prod(x.shape) for x in leaves) / 1e9 == pytest.approx(billions, abs=6e-4 * billions)


def test_the_work_of_a_long_episode_by_hand(qwen):
  """A 1080p screenshot has 78 x 138 = 10,764 patches. A layer has 2 x 3584^2 + 2 x 512 x 3584 + 3 x 3584 x 18944 = 233.05 M: 28 layers,
  two FLOPs each, 65,536 tokens are 0.855 PF. Causal attention at half is 2 x 3584 x 65,536^2 x 28 = 0.862 PF. The head at 8,192 places
  is 2 x 152,064 x 3584 x 8,192 = 8.9 TF. The tower: 32 x 19.68 M weights x 161,460 patches x 2 = 203 TF, four whole layers of attention
  4 x 4 x 1280 x 10,764 x 161,460 = 35.6 TF, windows 28 x 4 x 1280 x 64 x 161,460 = 1.5 TF, merger 40,365 x 2 x 44.6 M = 3.6 TF."""
  assert analytic.patches(qwen, EPISODE) == 10764
  f = analytic.forward_flops(qwen, EPISODE)
  assert f["linear"] == pytest.approx(0.8553e15, rel=1e-3) and f["attention"] == pytest.approx(0.8620e15, rel=1e-3)
  assert f["head"] == pytest.approx(8.93e12, rel=1e-3) and f["tower"] == pytest.approx(244e12, rel=5e-3)
  model, computed = analytic.step_flops(qwen, EPISODE, How("bfloat16", "full", False, None), ONE)
  assert model == pytest.approx(3 * (0.8553 + 0.8620 + 0.0089 + 0.244) * 1e15, rel=2e-3)
  # with recomputation 4 x products, and the kernel's 1 + 1 + 7 / 2 of attention
  assert computed == pytest.approx((4 * (0.8553 + 0.0089 + 0.244) + 5.5 * 0.8620) * 1e15, rel=2e-3)
  more = lambda c: analytic.step_flops(qwen, EPISODE, How("bfloat16", "full", False, None), ONE | {"context": c})[1] - computed
  assert more(4) == pytest.approx(4 * 0.244e15 / 15, rel=1e-2)  # 16 images for 15; queries are dealt evenly
  assert more(3) == pytest.approx(2 / 3 * 5.5 * 0.8620e15, rel=1e-2)  # three cannot deal: the last sees 5 / 3 of a share


def test_memory_by_hand(qwen):
  how, state = state_of(qwen, "bfloat16")
  mesh = ONE | {"fsdp": 4, "context": 4}
  m = analytic.memory(qwen, EPISODE, how, mesh, state)
  assert m["parameters"] == pytest.approx(2 * 8.292e9 / 16, rel=2e-3)  # all but norms and biases over every chip
  assert m["optimiser"] == pytest.approx(4 * m["parameters"], rel=1e-3) and m["gradients"] == pytest.approx(2 * m["parameters"], rel=1e-3)
  assert m["layers' inputs"] == 28 * 16384 * 3584 * 2
  assert m["tower's inputs"] == 32 * 4 * 10764 * 1280 * 2  # 16 screenshots on 4 chips
  _, with_master = state_of(qwen, "bfloat16", master=True)
  held = analytic.memory(qwen, EPISODE, how, mesh, with_master)["optimiser"]
  assert held == pytest.approx(6 * m["parameters"], rel=1e-3)  # a float32 copy and two float32 moments of two bytes
  frozen = analytic.memory(qwen, EPISODE, how._replace(frozen=True), mesh, state)
  assert frozen["tower's inputs"] == 0
  d = analytic.decode(qwen, how, chips.parse("v5p:2x2x1"), 1, 1)
  assert d["cache"] == 57344  # bytes a token of Qwen2.5-VL-7B: 28 layers x 4 heads x 128 x 2 x 2
  assert d["seconds"] == pytest.approx(2 * (8.292e9 - 0.677e9 - 0.545e9) / 2765e9, rel=1e-3)  # without tower and word vectors


def test_time_is_the_largest_of_three_and_what_nothing_hides(qwen):
  how, state = state_of(qwen, "bfloat16")
  p = analytic.estimate(qwen, EPISODE, how, ONE | {"fsdp": 16}, chips.parse("v5p:2x2x4"), state)
  assert p.bound == "compute" and p.step == p.seconds["compute"] + p.seconds["exposed"]
  assert p.seconds["compute"] == pytest.approx(9.174e15 / 459e12, rel=3e-3)  # a row a chip
  assert p.mfu == pytest.approx(16 * 5.911e15 / (16 * 459e12 * p.step), rel=3e-3) and p.spare > 0.05
  assert p.episodes_per_hour == pytest.approx(16 * 3600 / p.step)
  # weights gathered by 16 chips three times, in bfloat16: 3 x 16.58 GB x 15 / 16
  assert p.collectives["all-gather (weights)"][1] == pytest.approx(46.6e9, rel=2e-3)
  tight = analytic.estimate(qwen, EPISODE, how, ONE | {"fsdp": 64}, chips.parse("v5e:8x8"), state)
  assert tight.spare < 0 and "--config.mesh.context=2" in " ".join(tight.notes) and "freeze_tower" in " ".join(tight.notes)


def test_sessions_fill_what_the_learner_leaves_or_a_device_of_their_own(qwen):
  """A session of 65,536 places takes 57,344 bytes each: 3.5 GiB; weights take 15.44 GiB, 7.72 in int8. Of v5p's 95.74 GiB 5% stay free:
  beside a learner of 10 GiB (90.95 - 10 - 15.44) / 3.5 = 18 sessions; of 74 GiB none, two in int8; alone 21."""
  how, state = state_of(qwen, "bfloat16")
  plan = analytic.estimate(qwen, EPISODE, how, ONE | {"fsdp": 16}, chips.parse("v5p:2x2x4"), state)
  of = lambda gib, light=False: decoding.estimate(qwen, how, dataclasses.replace(plan, memory={"all": gib * 2**30}), 65536, light)
  found = [(d.room, d.beside) for d in (of(10), of(74), of(74, True))]
  assert found == [(18, True), (21, False), (2, True)]
  said = decoding.text(of(74), plan)
  assert "not beside the learner" in said and "int8=True halves the weights" in said
  small = dataclasses.replace(plan, topology=chips.parse("v5e:2x2"))
  none = decoding.estimate(qwen, how, small, 65536, False)  # 15.44 GiB of weights do not leave 5% of 15.75
  assert none.room == 0 and "it does not fit" in decoding.text(none, small)


def test_what_the_compiler_refuses_does_not_fit_however_much_arithmetic_leaves(qwen):
  how, state = state_of(qwen, "bfloat16")
  p = analytic.estimate(qwen, EPISODE, how, ONE | {"fsdp": 16}, chips.parse("v5p:2x2x4"), state)
  refused = dataclasses.replace(p, source="refused")
  assert p.fits and not refused.fits and "refused by the compiler, by arithmetic" in show.text(refused, "x")
  assert "time by arithmetic" in show.text(dataclasses.replace(p, source="compiled"), "x") and "by arithmetic" not in show.text(p, "x")


def test_a_row_on_more_chips_than_a_host_has_says_what_train_makes_of_it(capsys):
  """v6e 4x4 has 4 hosts of 4 chips, v5e 2x4 one host of 8. Two rows of 8 chips are fewer than the 4 hosts' own: two micro-batches."""
  said = "8 devices share a row, hosts have 4 and a row each: train.py takes 2 micro-batches a step, this is one"
  plan_tool.main(argv("--topology=v6e:4x4", "--config.mesh.context=8"))
  assert said in capsys.readouterr().out
  plan_tool.main(argv("--topology=v6e:4x4", "--config.mesh.context=4"))
  plan_tool.main(argv("--topology=v5e:2x4", "--config.mesh.context=8"))
  assert "share a row" not in capsys.readouterr().out


def argv(*flags):
  return ["plan.py", "--config=configs/osworld.py", "--analytic", "--config.policy.dtype=bfloat16", *flags]


def test_the_command_takes_the_smallest_context_that_fits(capsys):
  assert plan_tool.main(argv("--topology=v5p:2x2x4", "--topology=v6e:4x4", "--topology=v5e:8x8", "--topology=h100:8", "--table")) == 0
  rows = [r.split(" | ") for r in capsys.readouterr().out.splitlines() if r.startswith("| v") or r.startswith("| h")]
  contexts = [int((re.search(r"context (\d+)", r[1]) or [0, 1])[1]) for r in rows]
  assert contexts[0] == 1 and contexts[1] in (2, 4) and contexts[2] >= 4 and contexts[3] == 1
  assert all(int(r[6].rstrip("%")) >= 5 for r in rows) and {r[-1] for r in rows} == {"analytic |"}


def test_the_command_says_with_its_exit_code_that_it_does_not_fit(capsys):
  assert plan_tool.main(argv("--topology=v5e:2x2")) == 1
  assert "too much" in capsys.readouterr().out


def test_a_gpu_takes_rows_of_any_length(capsys):
  """Tokens come in 128s for the TPU's attention kernel alone."""
  assert plan_tool.main(argv("--topology=h100:8", "--tokens=50001")) == 0
  assert "8 rows of 50,001 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
  "flags, said",
  [
    ((), "--topology is missing"),
    (("--topology=v5p:3x3x3",), "there is no such slice; v5p has 2x2x1, 2x2x2, 2x2x4, 2x4x4 and AxBxC of multiples of 4"),
    (("--topology=v7p:2x2x4",), "there is no chip 'v7p' (did you mean v5p?)"),
    (("--topology=v6e:fourxfour",), "wanted v6e:4x4, sizes joined by x"),
    (("--topology=h100:16",), "at most 8"),
    (("--topology=v6e:4x4", "--config.mesh.context=3"), "but there are 16 devices"),
    (("--topology=v6e:4x4", "--config.mesh.tensor=8"), "28 heads and 4 key-value heads: wanted one of 1, 2, 4"),
    (("--topology=v6e:4x4", "--config.mesh.context=4", "--tokens=1000"), "do not fit into --tokens=1000"),
    (("--topology=v6e:4x4", "--config.mesh.context=4", "--tokens=1000", "--images=0"), "wanted a multiple of 512"),
    (("--topology=v6e:4x4", "--tokens=65537"), "--tokens=65537 on v6e:4x4: wanted a multiple of 128"),
    (("--topology=v6e:4x4", "--config.policy.remat=ful"), "policy.remat is 'ful', wanted one of none, dots, attention, full, offload"),
    (("--topology=v6e:4x4", "--config.policy.remat_tower=ful"), "policy.remat_tower is 'ful', wanted one of none"),
    (("--topology=v6e:4x4", "--config.policy.dtype=float16"), "policy.dtype is 'float16', wanted one of float32, bfloat16"),
    (("--topology=v6e:4x4", "--config.policy.moment=int8"), "policy.moment is 'int8', wanted one of float32, bfloat16"),
    (("--topology=v6e:4x4", "--screen=big"), "wanted WIDTHxHEIGHT"),
    (("--topology=v6e:4x4", "--model=qwen2.5-vl-9b"), "did you mean qwen2.5-vl-7b?"),
    (("--topology=h100:8", "--noanalytic"), "give --analytic"),
    (("--topology=v6e:4x4", "--config.policy.lora.rank=8"), "only steps in which all parameters learn"),
  ],
)
def test_what_cannot_be_planned_is_refused_in_a_line(flags, said):
  with pytest.raises(ConfigError) as refused:
    plan_tool.main(argv(*flags))
  assert said in str(refused.value) and "\n" not in str(refused.value)


PROGRAM = """
HloModule jit_step, is_scheduled=true

%async_body (p: bf16[64,8]) -> bf16[64,128] {
  %p = bf16[64,8]{1,0} parameter(0)
  ROOT %ag.9 = bf16[64,128]{1,0:T(8,128)} all-gather(%p), replica_groups=[1,16]<=[16], dimensions={1}
}

%body.1 (arg: (s32[], bf16[64,8])) -> (s32[], bf16[64,8]) {
  %arg = (s32[], bf16[64,8]{1,0}) parameter(0)
  %kernel = f32[8]{0} custom-call(%arg), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="kernel"}
  %ag = (bf16[64,8]{1,0}, bf16[64,128]{1,0:T(8,128)}) all-gather-start(%x), replica_groups=[1,16]<=[16], dimensions={1}
  %done = bf16[64,128]{1,0} all-gather-done(%ag)
  %async = ((bf16[64,8]), bf16[64,128]) async-start(%x), calls=%async_body
  %ar = f32[1024]{0} all-reduce(%y), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %t = (s32[], bf16[64,8]{1,0}) tuple(%i, %x)
}

%cond.1 (arg: (s32[], bf16[64,8])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%cond.2 (arg.2: (u32[], f32[8])) -> pred[] {
  %nine = u32[]{:T(128)} constant(9)
  %arg.2 = (u32[]{:T(128)}, f32[8]{0}) parameter(0)
  %at = u32[]{:T(128)} get-tuple-element(%arg.2), index=0
  ROOT %lt.2 = pred[]{:T(512)} compare(%at, %nine), direction=LT
}

%body.2 (arg.3: (u32[], f32[8])) -> (u32[], f32[8]) {
  %two = u32[]{:T(128)} constant(2)
  %arg.3 = (u32[]{:T(128)}, f32[8]{0}) parameter(0)
  %now = u32[]{:T(128)} get-tuple-element(%arg.3), index=0
  %one = u32[]{:T(128)} constant(1)
  %beside = u32[]{:T(128)} add(%now, %one)
  %next = u32[]{:T(128)} add(%now, %two)
  ROOT %out = (u32[]{:T(128)}, /*index=1*/f32[8]{0}) tuple(%next, /*index=1*/%q)
  %send = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%q), source_target_pairs={{0,1},{1,0}}
}

ENTRY %main (a: bf16[64,8]) -> bf16[64,8] {
  %unsaid = (u32[]{:T(128)}, f32[8]{0}) while(%init.2), condition=%cond.2, body=%body.2, metadata={op_name="while"}
  %w = (s32[], bf16[64,8]{1,0}) while(%init), condition=%cond.1, body=%body.1, backend_config={"known_trip_count":{"n":"28"}}
  %rs = f32[10,4]{1,0} reduce-scatter(%g), replica_groups=[1,16]<=[16], dimensions={0}, to_apply=%add
  %lg = f32[512,152064]{1,0} all-gather(%l), replica_groups=mesh['axis_0'=4,'axis_1'=4] {'axis_1'}, dimensions={1}
  ROOT %table = bf16[152064,3584]{1,0} all-gather(%e), replica_groups=[1,16]<=[16], dimensions={0}
}
"""


def test_collectives_are_counted_as_often_as_loops_run_them():
  found = {(c.kind, c.group, c.times, c.alone): c for c in hlo.collectives(PROGRAM, 16)}
  assert len(hlo.collectives(PROGRAM, 16)) == 7
  assert found[("collective-permute", 2, 5, False)].sent == 5 * 8 * 4  # 0, 2, 4, 6, 8 are below 9
  assert found[("all-gather", 16, 28, False)].sent == 28 * 64 * 128 * 2 * 15 / 16  # started and awaited: the async body's is alike
  assert found[("all-reduce", 4, 28, True)].sent == 28 * 2 * 1024 * 4 * 3 / 4
  assert found[("reduce-scatter", 16, 1, True)].sent == 160 * 15  # 40 numbers of 4 bytes are left of 16 times as many
  assert sum(c.kind == "all-gather" and not c.alone for c in hlo.collectives(PROGRAM, 16)) == 2


def test_gathered_logits_are_told_from_a_gathered_table():
  bad = hlo.gathered_logits(hlo.collectives(PROGRAM, 16), 152064, 3584)
  assert [c.shapes for c in bad] == ["f32[512,152064]{1,0}"]


def test_a_compiled_step_is_read_by_its_own_numbers(qwen):
  """v5p 2x2x4: a link of 90 GB/s, three of them where all 16 take part. Alone run the all-reduce over 4, the reduce-scatter and the two
  gathers of the entry."""
  how, state = state_of(qwen, "bfloat16")
  before = analytic.estimate(qwen, EPISODE, how, ONE | {"fsdp": 16}, chips.parse("v5p:2x2x4"), state)
  sizes = {"argument": 4e9, "temp": 50e9, "output": 3.5e9, "alias": 3e9, "generated_code": 1e8}
  stats = SimpleNamespace(**{f"{k}_size_in_bytes": v for k, v in sizes.items()})
  program = SimpleNamespace(memory_analysis=lambda: stats, as_text=lambda: PROGRAM, cost_analysis=lambda: {"flops": 5e12})
  after = compiled.read(before, program, qwen, how, EPISODE, state, 100.0)
  assert after.total == pytest.approx(4e9 + 50e9 + 0.5e9 + 1e8) and after.source == "compiled" and after.flops == before.flops
  assert after.memory["parameters"] == before.memory["parameters"]
  few, all_of_them = 28 * 2 * 4096 * 3 / 4 + 512 * 152064 * 4 * 3 / 4, 160 * 15 + 152064 * 3584 * 2 * 15 / 16
  assert after.seconds["exposed"] == pytest.approx(few / 90e9 + all_of_them / 270e9)
  assert after.seconds["interconnect"] > after.seconds["exposed"] and after.step == after.seconds["compute"] + after.seconds["exposed"]
  assert "all-gathers of logits: 1" in after.notes[0] and "5.0 TFLOP" in after.notes[0]
