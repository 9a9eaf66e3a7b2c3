"""Our losses against transformers' causal-LM loss, torch's own losses, and torch transcriptions of formulas that other
projects' papers and documentation state (each test names its source). Nothing is copied: the formulas are written anew."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from losses.advantages import gae
from losses.correction import approximate_old_logp, geometric_reject, k3_reject, sequence_weight
from losses.kl import adaptive_beta, kl_estimate
from losses.policy import (
  advantage_weighted_loss,
  clipped_loss,
  dppo_loss,
  dro_loss,
  imitation_loss,
  reference_match_code_loss,
)
from losses.ratios import token_ratio, truncated_weight
from losses.reduce import token_mean
from losses.step_advantages import whiten
from losses.value import clipped_value_loss, critic_cross_entropy

pytestmark = pytest.mark.parity

N = 64


def draw(seed, size=1.0):
  return (size * np.random.default_rng(seed).normal(size=N)).astype(np.float32)


OLD = -np.random.default_rng(9).exponential(size=N).astype(np.float32)
NEW, REF, PUSH = np.minimum(OLD + draw(1, 0.5), -1e-3), OLD + draw(2, 0.3), draw(3)


def agree(ours, theirs, x, rtol=1e-5):
  """Sums and gradients of two per-token losses of the same numbers."""
  t = torch.tensor(x, requires_grad=True)
  out = theirs(t)
  out.sum().backward()
  np.testing.assert_allclose(ours(jnp.array(x)), out.detach().numpy(), rtol=rtol, atol=1e-6)
  np.testing.assert_allclose(jax.grad(lambda x: ours(x).sum())(jnp.array(x)), t.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_imitation_is_transformers_causal_lm_loss():
  # labels -100 are masked, logits at i score token i + 1, one global token count: transformers.loss.loss_utils
  rng = np.random.default_rng(0)
  logits, labels = rng.normal(size=(2, 7, 11)).astype(np.float32), rng.integers(0, 11, (2, 7))
  labels[0, :3] = labels[1, 5:] = -100
  t = torch.tensor(logits, requires_grad=True)
  count = torch.tensor(int((labels[:, 1:] != -100).sum()))
  theirs = ForCausalLMLoss(t, torch.tensor(labels), 11, num_items_in_batch=count)
  theirs.backward()

  def ours(x):
    target, mask = np.maximum(labels[:, 1:], 0), labels[:, 1:] != -100
    logp = jnp.take_along_axis(jax.nn.log_softmax(x[:, :-1]), target[..., None], 2)[..., 0]
    return token_mean(imitation_loss(logp.reshape(-1), mask.reshape(-1)), mask.reshape(-1)).mean()

  value, grad = jax.value_and_grad(ours)(jnp.array(logits))
  np.testing.assert_allclose(value, theirs.item(), rtol=1e-5)
  np.testing.assert_allclose(grad, t.grad.numpy(), rtol=1e-4, atol=1e-7)


def test_critic_cross_entropy_is_torchs():
  label = np.random.default_rng(4).random(N).astype(np.float32)
  theirs = lambda x: F.binary_cross_entropy_with_logits(x, torch.tensor(label), reduction="none")
  agree(lambda x: critic_cross_entropy(x, label), theirs, draw(5, 8.0))


def test_dual_clip():
  # verl's stated form: max of plain and clipped; where A < 0 at most -A c
  ratio, push = np.exp(draw(6, 1.2)), torch.tensor(PUSH)

  def theirs(r):
    worse = torch.maximum(-r * push, -r.clamp(0.8, 1.28) * push)
    return torch.where(push < 0, torch.minimum(worse, -3.0 * push), worse)

  agree(lambda r: clipped_loss(r, PUSH, dual_clip=3.0)[0], theirs, ratio)


def test_clipped_value_loss():
  # verl's stated form, clip 0.5
  old, target = draw(7), draw(8)

  def theirs(v):
    held = torch.clamp(v, torch.tensor(old - 0.5), torch.tensor(old + 0.5))
    return 0.5 * torch.maximum((v - torch.tensor(target)) ** 2, (held - torch.tensor(target)) ** 2)

  agree(lambda v: clipped_value_loss(v, old, target), theirs, draw(10))


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_kl_estimates(kind):
  # Schulman 2020, as in verl's kl_penalty
  ref = torch.tensor(REF)
  theirs = {
    "k1": lambda n: n - ref,
    "abs": lambda n: (n - ref).abs(),
    "k2": lambda n: 0.5 * (n - ref) ** 2,
    "k3": lambda n: torch.exp(ref - n) - (ref - n) - 1,
  }[kind]
  agree(lambda n: kl_estimate(n, REF, kind), theirs, NEW)


def test_k3_with_k2s_gradient():
  # verl's "k3+": forward k3, backward k2, by straight-through
  ref = torch.tensor(REF)

  def theirs(n):
    k2 = 0.5 * (n - ref) ** 2
    return k2 - k2.detach() + (torch.exp(ref - n) - (ref - n) - 1).detach()

  agree(lambda n: kl_estimate(n, REF, "k3+"), theirs, NEW)


def test_adaptive_beta_over_a_run():
  beta, theirs = 0.2, 0.2
  for kl in np.abs(draw(11, 0.02))[:20]:
    beta = float(adaptive_beta(beta, kl, 0.01, 1000, 64))
    theirs *= 1 + torch.clamp(torch.tensor(kl) / 0.01 - 1, -0.2, 0.2).item() * 64 / 1000
  assert beta == pytest.approx(theirs, rel=1e-5)


def test_dppo_total_variation():
  # arXiv 2602.04879: drop by probability shift in the direction of the push, threshold 0.2, ratio capped at 20
  old, push = torch.tensor(OLD), torch.tensor(PUSH)

  def theirs(n):
    moved = n.detach().exp() - old.exp()
    keep = ~(((push > 0) & (moved > 0.2)) | ((push < 0) & (moved < -0.2)))
    return -push * torch.exp(n.detach() - old).clamp(max=20) * n * keep

  agree(lambda n: dppo_loss(n, OLD, PUSH, np.ones(N))[0], theirs, NEW)


def test_dro_and_advantage_weighted():
  # verl's DRO and AWR, arXiv 1910.00177
  old, push = torch.tensor(OLD), torch.tensor(PUSH)
  agree(lambda n: dro_loss(n, OLD, PUSH, np.ones(N), beta=0.3), lambda n: -(n * push - 0.15 * (n - old) ** 2), NEW)
  agree(lambda n: advantage_weighted_loss(n, PUSH, np.ones(N), beta=0.5), lambda n: -torch.exp(push / 0.5).clamp(max=20) * n, NEW)


def test_webrl_code_is_a_smooth_l1():
  # units of one token: beta 5 where the reference is sure, held to |A / x|, SmoothL1(beta x, A) / beta at positive units
  ref, push = torch.tensor(REF), torch.sign(torch.tensor(PUSH))

  def theirs(n):
    x = n - ref
    beta = torch.minimum(torch.where(ref.exp() >= 0.8, 5.0, 1.0), (push / x).abs()).detach()
    return torch.where(push > 0, F.smooth_l1_loss(beta * x, push, reduction="none") / beta, 0.0)

  agree(lambda n: reference_match_code_loss(n, REF, np.sign(PUSH), np.ones(N), np.arange(N), N), theirs, NEW, rtol=1e-4)


def test_sequence_weights_and_rejections():
  # 8 units of 8 tokens; verl's rollout correction as documented
  unit, one = np.repeat(np.arange(8), 8), np.ones(N)
  mu = OLD + draw(12, 0.05)
  d = torch.tensor(OLD - mu).view(8, 8)
  geo = d.mean(1).exp()
  np.testing.assert_allclose(truncated_weight(OLD, mu, one, cap=1.05), d.exp().clamp(max=1.05).view(-1), rtol=1e-5)
  product = sequence_weight(OLD, mu, one, unit, 8, kind="product", outside="cap", high=1.1)
  np.testing.assert_allclose(product, d.sum(1).exp().clamp(max=1.1), rtol=1e-5)
  want = ((geo > 0.99) & (geo < 1.01)).float()
  np.testing.assert_array_equal(geometric_reject(OLD, mu, one, unit, 8, low=0.99, high=1.01), want)
  assert 0 < want.sum() < 8
  k3 = (d.exp() - 1 - d).mean(1)
  middle = float(k3.median()) + 1e-5
  np.testing.assert_array_equal(k3_reject(OLD, mu, one, unit, 8, threshold=middle), (k3 <= middle).float())


def test_approximate_old_logp():
  # AReaL's documentation of prox_approx: interpolation in log space by version, the old policy one version back
  version = np.random.default_rng(13).integers(0, 6, N)
  share = ((4 - torch.tensor(version)) / (5 - torch.tensor(version)).clamp(min=1)).clamp(0, 1)
  theirs = torch.tensor(OLD) + share * torch.tensor(NEW - OLD)
  np.testing.assert_allclose(approximate_old_logp(NEW, OLD, np.ones(N), version, 4, 5), theirs, rtol=1e-5, atol=1e-6)


def test_multi_turn_gae_and_whitening():
  # verl's rule for observation tokens: next value and running advantage are carried over them unchanged
  rng = np.random.default_rng(14)
  mask = rng.random(N) < 0.6
  mask[-1] = True
  reward, value = draw(15) * mask, draw(16)
  last, after, out = 0.0, 0.0, np.zeros(N, np.float32)
  for t in reversed(range(N)):
    if mask[t]:
      last = reward[t] + 0.99 * after - value[t] + 0.99 * 0.9 * last
      after, out[t] = value[t], last
  discount = np.full(N, 0.99, np.float32)
  discount[-1] = 0
  ours, _ = gae(reward, value, discount, 0.9, mask_N=mask)
  np.testing.assert_allclose(ours, out, rtol=1e-4, atol=1e-5)
  picked = torch.tensor(out[mask])
  theirs = (picked - picked.mean()) / (picked.var() + 1e-8).sqrt()  # masked whitening with the sample variance
  np.testing.assert_allclose(np.asarray(whiten(ours, mask, spread="sample", eps=0.0))[mask], theirs, rtol=1e-4, atol=1e-5)


def test_token_ratio_is_exp_of_the_clamped_difference():
  far = draw(17, 15.0)
  agree(lambda n: token_ratio(n, OLD, np.ones(N)), lambda n: torch.exp((n - torch.tensor(OLD)).clamp(-20, 20)), far)
