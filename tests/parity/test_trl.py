"""Our objectives against TRL's own loss code (trl 1.16), values and gradients, on random numbers.

TRL's losses are methods of its trainers. They are called here without a trainer: `Stub` holds the few fields they read, and the
log-probabilities that a model would have given.
"""

import collections
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.utils import nanstd

from core.segments import segment_gather
from losses.advantages import group_advantages, leave_one_out
from losses.correction import off_policy_mask
from losses.kl import kl_loss
from losses.policy import cispo_loss, clipped_loss, gmpo_loss, sapo_loss
from losses.preference import dpo_loss, kto_loss, kto_reference_point
from losses.ratios import sequence_ratio, sequence_token_ratio, token_ratio
from losses.reduce import constant_norm, episode_mean, episode_sum_mean, micro_batch_mean, token_mean
from losses.rewards import gdpo_advantages

pytestmark = pytest.mark.parity

B, T = 12, 9
EPISODE = np.repeat(np.arange(B), T)


class Stub(types.SimpleNamespace):
  """What a TRL loss reads of its trainer, for one process, one micro-batch, in training mode."""

  def __init__(self, **kw):
    same = lambda x, *_, **__: x
    super().__init__(
      accelerator=types.SimpleNamespace(num_processes=1, gather=same, gather_for_metrics=same, reduce=same, device="cpu"),
      model=types.SimpleNamespace(training=True), _metrics={"train": collections.defaultdict(list)}, aux_loss_enabled=False,
      top_entropy_quantile=1.0, use_vllm=False, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
      get_off_policy_mask=GRPOTrainer.get_off_policy_mask, max_completion_length=T, precompute_ref_logps=True, ld_alpha=None,
      f_divergence_type="reverse_kl", use_weighting=False, _total_train_tokens=0, _tp_size=1, calculate_KL=True,
    )  # fmt: skip
    self.__dict__.update(kw)


def numbers(drift=0.4, seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda size: (size * rng.normal(size=(B, T))).astype(np.float32)
  old = -rng.exponential(size=(B, T)).astype(np.float32)
  mask = np.arange(T) < rng.integers(2, T + 1, B)[:, None]
  return {"new": old + draw(drift), "old": old, "ref": old + draw(0.3), "mask": mask, "push": rng.normal(size=B).astype(np.float32)}


def trl_loss(d, cls=GRPOTrainer, *, loss_type="dapo", level="token", low=0.2, high=0.28, beta=0.0, opsm=None, **args):
  """(loss, gradient [B, T], metrics) of TRL's policy loss."""
  new = torch.tensor(d["new"], requires_grad=True)
  args = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1} | args
  stub = Stub(
    loss_type=loss_type, importance_sampling_level=level, epsilon_low=low, epsilon_high=high, beta=beta, off_policy_mask_threshold=opsm,
    args=types.SimpleNamespace(sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, **args),
    _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros(B, T), None),
  )  # fmt: skip
  mask = torch.tensor(d["mask"]).float()
  ids = torch.zeros(B, T, dtype=torch.long)
  loss = cls._compute_loss(stub, None, {
    "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask,
    "advantages": torch.tensor(d["push"]), "old_per_token_logps": torch.tensor(d["old"]),
    "ref_per_token_logps": torch.tensor(d["ref"]), "num_items_in_batch": mask.sum(),
  })  # fmt: skip
  loss.backward()
  return loss.item(), new.grad.numpy(), stub._metrics["train"]


def agree(d, theirs, ours, rtol=2e-5):
  """ours(new_N, old_N, ref_N, mask_N, push_N, push_E) -> a loss."""
  flat = [d[k].reshape(-1) for k in ("old", "ref", "mask")]
  value, grad = jax.value_and_grad(lambda n: ours(n, *flat, d["push"][EPISODE], d["push"]))(jnp.array(d["new"].reshape(-1)))
  np.testing.assert_allclose(value, theirs[0], rtol=rtol)
  np.testing.assert_allclose(grad, theirs[1].reshape(-1), rtol=1e-4, atol=1e-6)
  assert np.abs(grad).max() > 1e-3


def test_clipped_loss_and_its_share_token_mean():
  d = numbers()
  theirs = trl_loss(d)
  agree(d, theirs, lambda n, o, r, m, a, _: token_mean(clipped_loss(token_ratio(n, o, m), a)[0], m).mean())
  d = {k: d[k].reshape(-1) if k != "push" else d[k][EPISODE] for k in d}
  share = token_mean(clipped_loss(token_ratio(d["new"], d["old"], d["mask"]), d["push"])[1], d["mask"]).mean()
  np.testing.assert_allclose(share, theirs[2]["clip_ratio/region_mean"], rtol=1e-5)
  assert 0.1 < share < 0.9


@pytest.mark.parametrize(
  "loss_type, reduce",
  [
    ("grpo", lambda x, m: episode_mean(x, m, EPISODE, B)),
    ("dr_grpo", lambda x, m: constant_norm(x, m, B * T)),
    ("luspo", lambda x, m: episode_sum_mean(x, m, EPISODE, B)),
    ("bnpo", micro_batch_mean),
  ],
)
def test_reductions(loss_type, reduce):
  d = numbers()
  agree(d, trl_loss(d, loss_type=loss_type), lambda n, o, r, m, a, _: reduce(clipped_loss(token_ratio(n, o, m), a)[0], m).mean())


def test_dual_clip_is_the_two_sided_delta():
  d = numbers(drift=1.5)
  theirs = trl_loss(d, delta=3.0)
  agree(d, theirs, lambda n, o, r, m, a, _: token_mean(clipped_loss(token_ratio(n, o, m), a, dual_clip=3.0)[0], m).mean())
  assert theirs[0] != pytest.approx(trl_loss(d)[0], rel=1e-3)


def test_kl_in_the_loss():
  d = numbers()

  def ours(n, o, r, m, a, _):
    return token_mean(clipped_loss(token_ratio(n, o, m), a)[0] + kl_loss(n, r, beta=0.04), m).mean()

  agree(d, trl_loss(d, beta=0.04), ours)


def test_gspo_and_gspo_token():
  d = numbers(drift=2e-3)
  theirs = trl_loss(d, loss_type="grpo", level="sequence", low=3e-4, high=4e-4)
  band = {"clip_low": 3e-4, "clip_high": 4e-4}

  def gspo(n, o, r, m, _, a):
    return token_mean(clipped_loss(sequence_ratio(n, o, m, EPISODE, B), a, **band)[0], np.ones(B)).mean()

  def gspo_token(n, o, r, m, a, _):
    return episode_mean(clipped_loss(sequence_token_ratio(n, o, m, EPISODE, B), a, **band)[0], m, EPISODE, B).mean()

  agree(d, theirs, gspo, rtol=1e-4)
  agree(d, theirs, gspo_token, rtol=1e-4)
  assert 0 < theirs[2]["clip_ratio/region_mean"][0] < 1


def test_cispo():
  d = numbers(drift=1.5)
  theirs = trl_loss(d, loss_type="cispo", high=5.0)
  agree(d, theirs, lambda n, o, r, m, a, _: token_mean(cispo_loss(n, token_ratio(n, o, m), a, m, cap=5.0)[0], m).mean())
  assert theirs[2]["cispo_clip_ratio"][0] > 0


def test_sapo():
  d = numbers()
  theirs = trl_loss(d, loss_type="sapo")
  agree(d, theirs, lambda n, o, r, m, a, _: episode_mean(sapo_loss(token_ratio(n, o, m), a), m, EPISODE, B).mean())


def test_gmpo():
  d = numbers()
  theirs = trl_loss(d, GMPOTrainer, low=0.4, high=0.4)
  agree(d, theirs, lambda n, o, r, m, _, a: token_mean(gmpo_loss(n, o, a, m, EPISODE, B)[0], np.ones(B)).mean())
  assert theirs[2]["clip_ratio/region_mean"][0] > 0


def test_off_policy_mask():
  d = numbers()
  plain, theirs = trl_loss(d), trl_loss(d, opsm=0.05)

  def ours(n, o, r, m, a, a_E):
    keep = segment_gather(off_policy_mask(n, o, a_E, m, EPISODE, B, delta=0.05), EPISODE)
    return token_mean(keep * clipped_loss(token_ratio(n, o, m), a)[0], m).mean()

  agree(d, theirs, ours)
  assert theirs[0] != pytest.approx(plain[0], rel=1e-3)


# --- advantages: computed inside a long method there, so these are its formulas around its own nanstd ---------------------


def rewards():
  """Three groups of four; one try of the second group has no score."""
  r = np.array([1, 0, 0, 0, 0.5, 1, np.nan, 0, 1, 0, -1, 1], np.float32)
  return r, np.repeat(np.arange(3), 4), ~np.isnan(r)


@pytest.mark.parametrize("spread", ["sample", "none", "batch"])
def test_group_advantages(spread):
  r, group, valid = rewards()
  grouped = torch.tensor(r).view(3, 4)
  centred = (grouped - grouped.nanmean(1, keepdim=True)).view(-1)
  std = {"sample": nanstd(grouped, dim=1).repeat_interleave(4) + 1e-4, "none": 1.0, "batch": nanstd(torch.tensor(r)) + 1e-4}[spread]
  theirs = torch.nan_to_num(centred / std, nan=0.0).numpy()
  scale = np.sqrt(10 / 11) if spread == "batch" else 1.0  # ours is the population spread of the 11 scored tries
  np.testing.assert_allclose(group_advantages(r, group, 3, valid_E=valid, spread=spread, eps=1e-4) * scale, theirs, rtol=2e-4, atol=1e-6)


def test_leave_one_out():
  r, group, valid = rewards()
  grouped = torch.tensor(r).view(3, 4)
  others = (grouped.nansum(1, keepdim=True) - grouped) / ((~grouped.isnan()).sum(1, keepdim=True) - 1)
  theirs = torch.nan_to_num(grouped - others, nan=0.0).view(-1).numpy()
  np.testing.assert_allclose(leave_one_out(r, group, 3, valid_E=valid), theirs, rtol=1e-5, atol=1e-6)


def test_gdpo():
  r = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
  grouped = torch.tensor(r).view(3, 4, 2)
  each = ((grouped - grouped.mean(1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)).view(12, 2)
  total = (each * torch.tensor([1.0, 0.5])).sum(1)
  theirs = ((total - total.mean()) / (nanstd(total) + 1e-4)).numpy()
  names = {"a": r[:, 0], "b": r[:, 1]}
  ours = gdpo_advantages(names, {"a": 1.0, "b": 0.5}, np.repeat(np.arange(3), 4), 3, spread="sample", eps=1e-4)
  np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


# --- preferences ------------------------------------------------------------------------------------------------------


def outputs(log_probs):
  zeros = torch.zeros_like(log_probs)
  return types.SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def sequences(n):
  """The inputs of a model that is not there."""
  ones = torch.ones(n, T + 1, dtype=torch.long)
  return {"input_ids": ones, "attention_mask": ones, "completion_mask": ones}


def test_dpo():
  rng = np.random.default_rng(0)
  logp = torch.tensor(-rng.exponential(size=(B, T)), dtype=torch.float32, requires_grad=True)
  ref = (logp.detach().sum(1) + torch.tensor(rng.normal(size=B) * 3, dtype=torch.float32)).chunk(2)
  stub = Stub(loss_types=["sigmoid"], loss_weights=[1.0], beta=0.3)
  inputs = sequences(B) | {"ref_chosen_logps": ref[0], "ref_rejected_logps": ref[1]}
  loss = DPOTrainer._compute_loss(stub, lambda **_: outputs(logp), inputs, False)
  loss.backward()
  flat = jnp.array(logp.detach().numpy()), np.concatenate([x.numpy() for x in ref])

  def ours(x):
    ratio = x.sum(1) - flat[1]
    return token_mean(dpo_loss(ratio[: B // 2], ratio[B // 2 :], beta=0.3), np.ones(B // 2)).mean()

  value, grad = jax.value_and_grad(ours)(flat[0])
  np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
  np.testing.assert_allclose(grad, logp.grad.numpy(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kl_shift", [2.0, -2.0])  # a reference point above 0, and one held at 0
def test_kto(kl_shift):
  rng = np.random.default_rng(1)
  draw = lambda *size: torch.tensor(rng.normal(size=size), dtype=torch.float32)
  logp = draw(B, T).requires_grad_()
  other, label = draw(B, T), torch.tensor([1, 0, 0, 1, 0, 1] * 2)
  ref, ref_other = logp.detach().sum(1) + 3 * draw(B), other.sum(1) - kl_shift + 0.1 * draw(B)
  stub = Stub(loss_type="kto", beta=0.3, desirable_weight=1.0, undesirable_weight=1.3)
  stub._compute_kl_logps = lambda *_: other.sum(1)
  inputs = sequences(B) | {"label": label, "ref_logps": ref, "ref_KL_logps": ref_other}
  loss = KTOTrainer._compute_loss(stub, lambda **_: outputs(logp), inputs, False)
  loss.backward()
  point = kto_reference_point((other.sum(1) - ref_other).numpy(), np.ones(B))
  assert (float(point) > 0) == (kl_shift > 0)

  def ours(x):
    return token_mean(kto_loss(x.sum(1) - ref.numpy(), label.numpy(), point, beta=0.3, weight_neg=1.3), np.ones(B)).mean()

  value, grad = jax.value_and_grad(ours)(jnp.array(logp.detach().numpy()))
  np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
  np.testing.assert_allclose(grad, logp.grad.numpy(), rtol=1e-4, atol=1e-7)
