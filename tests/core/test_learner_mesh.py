"""One optimiser step over a mesh is the step on one device: gradients of a small vision-language policy by GRPO's and GSPO's losses and of
a critic on GAE's returns, under every kind of split, with the same records packed for each.

Forced CPU devices need a fresh process: this file is also the script that it runs.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np
import pytest

MESHES = {
  "fsdp 8": {"fsdp": 8},
  "fsdp 4, tensor 2": {"fsdp": 4, "tensor": 2},
  "fsdp 2, context 2, tensor 2": {"fsdp": 2, "context": 2, "tensor": 2},
}
RECORDS, SCREEN = 8, (120, 90)
TOGETHER = {  # several processes: the mesh, the episodes of each, and whose rows each of the micro-batches holds
  "2 x 4, tensor 2": ({"tensor": 2}, ((0, 2), (1, 3)), ((0, 1),)),
  "2 x 4, context 8": ({"context": 8}, ((0, 1, 3), (2,)), ((0,), (1,))),
  "4 x 2, fsdp 2, context 4": ({"context": 4}, ((2,), (0,), (3,), (1,)), ((0, 2), (1, 3))),  # of two neighbours, one after the other
}


def tiny_policy(folder):
  """The embedded policy with sizes that the meshes divide, and what makes its parameters."""
  import jax
  from conftest import make_tiny

  policy = make_tiny(layers=1, max_action=8)
  return policy, lambda: jax.jit(policy.init)(jax.random.key(0))


def vision_language_policy(folder):
  """A Qwen2.5-VL of two layers (4 heads over 2 key-value heads) with a tower of three blocks, and what reads its parameters."""
  import tiny_checkpoints

  from models import checkpoint, hf, vision_language

  tiny_checkpoints.with_weights(folder, "qwen2_5_vl")
  cfg = checkpoint.defaults()
  cfg.update({**vision_language.defaults(), "max_prompt": 120, "max_action": 8, "dtype": "float32", "remat": "full"})
  cfg.update({"instruction": str(folder / "instruction.txt")})
  read = checkpoint.read(cfg, str(folder), "desktop", SCREEN)
  return read.policy, lambda: hf.load(folder, checkpoint.leaves(str(folder)), dtype="float32")


def records(policy):
  """Four episodes of two records: ragged actions, one or two screenshots, pushes of both signs, sampled near the policy's chances."""
  from core.pack import PackItem
  from models.base import Seen
  from rollout.sampler import Sampled
  from rollout.turn import make_record

  rng, episodes = np.random.default_rng(5), []
  size = SCREEN if policy.screens == 0 else (40, 24)
  screen = lambda: rng.integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
  for e in range(RECORDS // 2):
    items, push = [], rng.standard_normal()
    for h in range(2):
      n, seen = int(rng.integers(2, 8)), screen()
      history = [Seen(policy.image(screen()), "", [5, policy.tokenizer.eos_id])] if (e + h) % 2 and policy.screens == 0 else []
      sampled = Sampled(rng.integers(3, 100, n).astype(np.int32), np.log(1 / 300) + 0.1 * rng.standard_normal(n), np.zeros(n), 0)
      prompt = policy.prompt(("red", "open red")[e % 2], [seen], "", history)
      record = dataclasses.replace(make_record(prompt, sampled, h), step=np.full(len(prompt.tokens) + n, h, np.int32))
      at = lambda x: np.where(record.is_action, x, 0).astype(np.float32)  # noqa: B023
      extra = {"return_": at(rng.standard_normal()), "old_value_logit": at(0.1 * rng.standard_normal())}
      items.append(PackItem(record, list(prompt.images), policy.positions(record), at(push), np.ones(len(record), bool), 0, extra=extra))
    episodes.append(items)
  return episodes


def batch_of(policy, episodes, mesh, rows=1, empty=0):
  """The episodes packed for a mesh. rows: records a row at least; empty: further records' room that stays padding."""
  from core import mesh as mesh_lib
  from core.pack import arrange, number, shape_for, to_batch

  longest = policy.max_prompt + policy.max_action
  sizes = (RECORDS + empty, longest, 2 * policy.max_action, rows * longest, 2, policy.tokens_per_image, 2)
  shape = shape_for(*sizes, **mesh_lib.multiples(mesh))
  items = number(episodes)
  return widened(to_batch(items, arrange(items, shape), shape, np.full_like(items[0].images[0], 255)))


def poisoned(batch):
  """The batch with what must not count where there is padding."""
  pad = batch.segment_ids == 0
  assert pad.any() and not pad.all()
  put = lambda x, bad: np.where(pad, np.array(bad, x.dtype), x)
  changed = {"behaviour_logp": np.nan, "advantage": 1e30, "tokens": 7, "version": 3, "old_value_logit": np.nan, "return_": np.nan}
  return dataclasses.replace(batch, now=np.int32(5), **{name: put(getattr(batch, name), bad) for name, bad in changed.items()})


def misplaced(batch, parts, mesh):
  """The fields of a batch of which `core.rows.put` lays anything elsewhere than written here, whose rows `mine` does not give back, or that
  are split otherwise than a step wants. batch(index): of each process; parts: whose rows each of put's batches holds."""
  import jax

  from core import mesh as mesh_lib
  from core import rows

  mine, wrong = batch(jax.process_index()), []
  found = rows.put(mine, mesh)
  assert len(found) == len(parts) and all(x.num_episodes == len(parts[0]) * mine.num_episodes for x in found)
  for part, owners in zip(found, parts, strict=True):
    shares = [batch(i) for i in owners]
    for at, share in enumerate(shares):
      ids = {"episode_id": share.episode_id + at * mine.num_episodes, "step_id": share.step_id + at * mine.num_steps}
      shares[at] = dataclasses.replace(share, **ids)
    for (name, x), sharding in zip(mesh_lib.names(part), jax.tree.leaves(mesh_lib.batch_shardings(part, mesh)), strict=True):
      join = lambda xs: xs[0] if not np.ndim(xs[0]) else np.concatenate(xs, 1 if name == "positions" else 0)  # noqa: B023
      want = join([np.asarray(dict(mesh_lib.names(share))[name]) for share in shares])
      same = [np.array_equal(shard.data, want[shard.index], equal_nan=want.dtype.kind == "f") for shard in x.addressable_shards]
      wrong += [name] * (not all(same) or x.sharding != sharding or x.dtype != want.dtype)
  everywhere = jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
  back = rows.mine([everywhere(part.tokens) for part in found], mesh)
  return wrong + ["mine"] * (not np.array_equal(back, mine.tokens))


def gradients(update, state, batches, mesh):
  """What the optimiser was given; its "step" is nothing and its state the gradient."""
  import jax

  from core import mesh as mesh_lib

  kinds = [x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state)]
  state, out = update(state, None, batches, None)
  assert [x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state)] == kinds
  assert int(out["skipped"]) == 0 and int(jax.device_get(state.updates)) == 1
  near = lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")) if x.sharding.memory_kind == "pinned_host" else x
  grads = mesh_lib.local(jax.tree.map(near, state.opt_state), mesh)
  return jax.tree.map(np.asarray, grads), {k: float(out[k]) for k in ("loss", "grad_norm")}


def keeper():
  import jax
  import optax

  zeros = lambda tree: jax.tree.map(jax.numpy.zeros_like, tree)
  return optax.GradientTransformation(zeros, lambda g, state, params=None: (zeros(g), g))


def learnt(params, mesh, offload=False):
  """A train state laid out over the mesh."""
  import jax

  from core import mesh as mesh_lib
  from core.state import TrainState

  state = TrainState.create(jax.tree.map(jax.numpy.array, params), keeper())
  return jax.device_put(state, mesh_lib.shardings(state, mesh, offload)) if mesh.size > 1 else state


def both_losses():
  """GRPO's and GSPO's losses as one, so that they compile together: of sums and counts that micro-batches add up."""
  from agents import grpo, gspo
  from core.segments import Total

  one, other = (module.make(module.defaults()).phases[0].loss for module in (grpo, gspo))

  def loss(scores, batch):
    a, b = one(scores, batch)[0], other(scores, batch)[0]
    return Total(a.sum + 100 * b.sum, a.count + b.count), {}

  return loss


def with_returns(episodes, values):
  """The episodes with GAE's pushes and returns of a critic's values by record, over each episode's action tokens in turn."""
  import types

  from agents.values import gae_credit

  one = lambda items: {"records": [i.record for i in items], "reward": float(items[0].advantage.sum() > 0), "steps": [0, 1]}
  tries = [types.SimpleNamespace(**one(items)) for items in episodes]
  scores = [types.SimpleNamespace(records=[{"value_logit": v} for v in pair]) for pair in values]
  credits = gae_credit(tries, scores, np.full(len(tries), 0.9, np.float32), 0.95, 0.0, 1.0)
  out = []
  for items, pair, credit in zip(episodes, values, credits, strict=True):
    extras = [{"return_": credit.token_return[i], "old_value_logit": pair[i] + 0.05} for i in range(2)]
    out.append([dataclasses.replace(i, advantage=a, extra=x) for i, a, x in zip(items, credit.token_advantage, extras, strict=True)])
  return out


def case(policy, params, head, episodes, mesh, offload=False, pad=lambda batch: batch, **packing):
  """{name: gradient} of the policy and of a critic of tokens on one mesh, what the updates said, the share of the parameters that a device
  holds, and the policy's compiled step. offload: the policy's optimiser state lies with the host."""
  import jax

  from agents import ppo
  from core import learner as learner_lib
  from core import mesh as mesh_lib
  from core import rows
  from core.pack import unpack
  from models import critic

  batch, state = pad(batch_of(policy, episodes, mesh, **packing)), learnt(params, mesh, offload)
  held = sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(state.params)) / sum(x.size for x in jax.tree.leaves(params))
  update = learner_lib.make_update(learner_lib.make_score(policy), both_losses(), keeper(), mesh=mesh, like=state, offload=offload)
  program = update.lower(state, None, rows.put(batch, mesh), None).compile()
  grads, said = gradients(program, state, rows.put(batch, mesh), mesh)
  named = {f"policy/{n}": g for n, g in mesh_lib.names(grads)}
  if head is None:
    return named, said, held, program.as_text()

  cfg = critic.defaults()
  cfg.width = 8
  made, weights = critic.build("trunk", cfg, policy), {"trunk": params, "head": head}
  score, held_there = learner_lib.jitted(made.score, mesh), learnt(weights, mesh).params
  value = rows.mine([score(held_there, None, part).value_logit for part in rows.put(batch, mesh)], mesh)
  known = dict(zip((t.tobytes() for t in unpack(batch.tokens, batch)), unpack(np.asarray(value), batch), strict=True))  # by its tokens
  values = [[known[np.asarray(i.record.tokens, np.int32).tobytes()] for i in items] for items in episodes]
  batch, state = pad(batch_of(policy, with_returns(episodes, values), mesh, **packing)), learnt(weights, mesh)
  update = learner_lib.make_update(made.score, ppo.make(ppo.defaults()).phases[1].loss, keeper(), mesh=mesh, like=state)
  more, told = gradients(update, state, rows.put(batch, mesh), mesh)
  named |= {f"critic/{n}": g for n, g in mesh_lib.names(more)}
  return named, said | {f"critic/{k}": v for k, v in told.items()}, held, program.as_text()


def published(policy, params):
  """A learner over 2 x 2 x 2 devices publishes while its sampler, on one of them, is within an action: the versions that its tokens carry,
  and the worst gap between what each was drawn with and what its own version gives it in the training path, on one device."""
  import threading

  import jax

  from core import learner as learner_lib
  from core import mesh as mesh_lib
  from core.state import Weights
  from rollout.sessions import SessionSampler
  from rollout.turn import make_record

  mesh = mesh_lib.make({**mesh_lib.defaults(), **MESHES["fsdp 2, context 2, tensor 2"]})
  versions = {1: params, 2: jax.tree.map(lambda x: x * 1.3, params)}
  learnt = {v: jax.device_put(p, mesh_lib.shardings(p, mesh)) for v, p in versions.items()}
  sampler = SessionSampler(policy, 1, (256,), chunks=(128,), steps=1, on_load="rebuild")
  publish = lambda v: sampler.load(Weights(mesh_lib.local(learnt[v], mesh), v))
  rng = np.random.default_rng(7)
  prompt = policy.prompt("red", [rng.integers(0, 256, (SCREEN[1], SCREEN[0], 3)).astype(np.uint8)], "")
  publish(1)
  sampler.ask("one", prompt, np.array([0, 3], np.uint32))
  done = sampler.poll() + sampler.poll()
  thread = threading.Thread(target=publish, args=(2,))
  thread.start()
  done += sampler.poll()  # beside the resharding
  thread.join(120)
  while not done:
    done += sampler.poll()
  record = make_record(prompt, done[0][1], 0)
  one = mesh_lib.make(mesh_lib.defaults(), jax.devices()[:1])
  from core.pack import PackItem

  item = PackItem(record, list(prompt.images), policy.positions(record), np.zeros(len(record), np.float32), np.ones(len(record), bool), 0,
                  extra={"return_": np.zeros(len(record)), "old_value_logit": np.zeros(len(record))})  # fmt: skip
  batch = batch_of(policy, [[item]], one)
  score, wrote, gap = learner_lib.jitted(learner_lib.make_score(policy), one), record.is_action, 0.0
  (row, first), = np.argwhere(batch.is_action)[:1]
  for v, p in versions.items():
    logp = np.asarray(score(p, None, batch).logp)[row, first : first + wrote.sum()]
    mine = record.version[wrote] == v
    gap = max(gap, float(np.abs(logp - record.logp[wrote])[mine].max(initial=0.0)))
  return {"versions": record.version[wrote].tolist(), "gap": gap}


def collectives(text):
  """{kind: shapes} of what a compiled program moves between devices."""
  found = re.findall(r"= \w+\[([\d,]*)\]\S* (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)\(", text)
  return {kind: sorted({shape for shape, k in found if k == kind}) for _, kind in found}


def in_processes(address, index, *names):
  """Some of eight devices and of the episodes in each of several processes, against all of it on one device. names: of TOGETHER."""
  import jax

  from core import hosts
  from core import mesh as mesh_lib

  knobs, out = hosts.defaults(), {"vocab": 0}
  knobs.update({"coordinator": address, "count": len(TOGETHER[names[0]][1]), "index": int(index), "join": 120.0})
  hosts.join(knobs)
  jax.config.update("jax_disable_most_optimizations", True)
  policy, load = tiny_policy(None)
  params, episodes = jax.tree.map(np.asarray, load()), records(policy)
  assert len(jax.devices()) == 8 and len(jax.local_devices()) * jax.process_count() == 8
  head, whole, said = tiny_head(policy, params), {}, {}
  if not jax.process_index():  # the others need not compile it too
    whole, said, _, _ = case(policy, params, head, episodes, mesh_lib.make(mesh_lib.defaults(), jax.local_devices()[:1]))
  hosts.everyone(True)
  for name in names:
    shape, owned, parts = TOGETHER[name]
    mesh, of = mesh_lib.make({**mesh_lib.defaults(), **shape}), lambda i: [episodes[e] for e in owned[i]]  # noqa: B023
    wrong = misplaced(lambda i: poisoned(batch_of(policy, of(i), mesh, rows=2)), parts, mesh)  # noqa: B023
    critic = head if len(parts) > 1 else None  # its path differs where there are scores to bring home
    grads, told, held, _ = case(policy, params, critic, of(jax.process_index()), mesh, pad=poisoned, rows=2)
    gaps = {n: float(np.abs(grads[n] - g).max() / np.abs(g).max()) for n, g in whole.items() if n in grads}
    differ = {k: abs(told[k] - v) / abs(v) for k, v in said.items() if k in told}
    out[name] = {"gaps": gaps, "said": differ, "held": held, "moved": {}, "wrong": wrong}
    out[name]["same"] = {n: float(np.abs(g).sum()) for n, g in grads.items()} | told
  print(json.dumps(out | {"largest": {n: float(np.abs(g).max()) for n, g in whole.items()}}))


def tiny_head(policy, params):
  import jax

  from models import critic

  cfg = critic.defaults()
  cfg.width = 8
  return jax.tree.map(np.asarray, critic.build("trunk", cfg, policy).init(jax.random.key(1), params)["head"])


def widened(tree):
  """float32 arrays in double, where the process computes in it."""
  import jax

  wide = lambda x: x.astype(np.float64) if jax.config.jax_enable_x64 and getattr(x, "dtype", None) == np.float32 else x
  return jax.tree.map(wide, tree)


def in_double(kind, *names):
  """main where float32 means double wherever it is said, in a process of its own: there rounding is 1e-16, and hides nothing."""
  import jax

  jax.config.update("jax_enable_x64", True)
  jax.numpy.float32 = jax.numpy.float64
  main(kind, *names)


def main(kind, *names):
  """names: of MESHES; none = all. Of the tiny policy its critic too."""
  import jax

  from core import mesh as mesh_lib

  jax.config.update("jax_disable_most_optimizations", True)
  with tempfile.TemporaryDirectory() as folder:
    policy, load = POLICIES[kind](pathlib.Path(folder))
    params = widened(jax.tree.map(np.asarray, load()))
  head = widened(tiny_head(policy, params)) if kind == "tiny" else None
  episodes, knobs = records(policy), mesh_lib.defaults()
  whole, said, _, _ = case(policy, params, head, episodes, mesh_lib.make(knobs, jax.devices()[:1]))
  out = {"largest": {n: float(np.abs(g).max()) for n, g in whole.items()}, "vocab": policy.tokenizer.vocab_size}
  if kind == "vision_language" and not jax.config.jax_enable_x64:
    out["published"] = published(policy, params)
  packings = [({"empty": 8}, (2, 0, 3, 1)), ({"rows": 2}, (0, 1, 2, 3)), ({"rows": 2, "empty": 8}, (3, 1, 0, 2))]
  for (name, shape), (packing, order) in zip(MESHES.items(), packings, strict=True):
    if names and name not in names:
      continue
    mesh = mesh_lib.make({**knobs, **shape})
    grads, numbers, held, text = case(policy, params, head, [episodes[i] for i in order], mesh, name == "fsdp 4, tensor 2", **packing)
    gaps = {n: float(np.abs(g - whole[n]).max() / max(np.abs(whole[n]).max(), 1e-30)) for n, g in grads.items()}
    told = {k: abs(v - said[k]) / abs(said[k]) for k, v in numbers.items()}
    out[name] = {"gaps": gaps, "said": told, "held": held, "moved": collectives(text)}
  print(json.dumps(out))


POLICIES = {"tiny": tiny_policy, "vision_language": vision_language_policy}


def start(*args, devices=8):
  """The script in a process of so many devices."""
  tests = pathlib.Path(__file__).resolve().parents[1]
  env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"}
  env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
  return subprocess.Popen([sys.executable, __file__, *map(str, args)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(*processes):
  """What they print, once they have ended well."""
  out = []
  try:
    for process in processes:
      text, errors = process.communicate(timeout=900)
      assert process.returncode == 0, errors[-3000:]
      out.append(json.loads(text.splitlines()[-1]))
  finally:
    for process in processes:
      process.kill()
  return out


def check(out, names, near=1e-6, tower=1e-6, told=1e-6):
  """Every gradient is there and the same, to `near` of a leaf's largest (`tower` in the vision tower), and what the updates said to `told`;
  every device holds an eighth, but for what is too small or does not divide."""
  assert set(out) - {"largest", "vocab", "published"} == set(names)
  assert all(size > 0 for size in out["largest"].values())
  for name in names:
    bad = {leaf: gap for leaf, gap in out[name]["gaps"].items() if not gap <= (tower if "visual/" in leaf else near)}
    asked = [leaf for leaf in out["largest"] if leaf.startswith("policy/") or any(gap.startswith("critic/") for gap in out[name]["gaps"])]
    assert not bad and list(out[name]["gaps"]) == asked, (name, bad)
    assert all(gap < told for gap in out[name]["said"].values()), out[name]["said"]
    assert 1 / 8 <= out[name]["held"] < 0.16, out[name]["held"]


@pytest.mark.slow
def test_every_mesh_gives_one_gradient():
  """GRPO, GSPO's episode ratio and, through the values of a critic on the same mesh, GAE across packed rows: two records a row, rows of
  padding, episodes in another order."""
  check(*said(start("tiny")), MESHES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tiny", "vision_language"])
def test_in_double_every_mesh_gives_one_gradient_to_a_trillionth(kind):
  """Whatever float32's rounding could hide: of the small Qwen2.5-VL it is 1.7e-6 on one device already, beside the gradient in double."""
  check(*said(start("double", kind)), MESHES, near=1e-12, tower=1e-12, told=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
  "names", [list(TOGETHER)[:2], pytest.param(list(TOGETHER)[2:], marks=pytest.mark.long)], ids=["two processes", "four"]
)
def test_several_processes_give_it_too(names):
  """Each with whole rows, and with rows on devices of two: whoever's episodes they are, and whatever stands in the padding."""
  from ports import free_address

  address, count = free_address(), len(TOGETHER[names[0]][1])
  first, *others = said(*(start("processes", address, i, *names, devices=8 // count) for i in range(count)))
  assert [out[name].pop("wrong") for out in (first, *others) for name in names] == [[]] * len(names) * count
  check(first, names)
  assert all(out[name]["same"] == first[name]["same"] for out in others for name in names)  # one gradient in all of them


@pytest.mark.slow
@pytest.mark.parametrize(
  "names", [["fsdp 2, context 2, tensor 2"], pytest.param(list(MESHES)[:2], marks=pytest.mark.long)], ids=["in the gate", "others"]
)
def test_a_vision_language_step_gathers_no_logits_and_publishes_while_its_sampler_writes(names):
  """The same with images, remat and a vocabulary over tensor, of which no device ever gathers more than its part."""
  (out,) = said(start("vision_language", *names))
  # one device's float32 is up to 1.1e-6 (decoder) and 1.7e-6 (tower) away from the gradient in double; in double the meshes agree (above)
  check(out, names, near=2e-6, tower=4e-6)
  for name in (n for n in names if "tensor" in n):
    wide = [shape for shapes in out[name]["moved"].values() for shape in shapes if shape.endswith(f",{out['vocab']}")]
    assert not wide, (name, wide)
  wrote = out["published"]["versions"]  # the weights changed within the action, once, and every token is its own version's
  assert wrote == sorted(wrote) and set(wrote) == {1, 2} and len(wrote) > 3 and out["published"]["gap"] < 1e-4


if __name__ == "__main__":
  first, *rest = sys.argv[1:]
  {"processes": in_processes, "double": in_double}[first](*rest) if first not in POLICIES else main(first, *rest)
