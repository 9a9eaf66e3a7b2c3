"""What trains a critic, and what says whether it is any good."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from core.segments import Total, as_mask, is_concrete, same_length, segment_total
from losses.arrays import f32, guard


def critic_cross_entropy(logit_N, label_N) -> Array:
  """Yes-or-no cross-entropy of every screen, [N] float32, from logits: softplus(logit) - label * logit.

  = -(label ln V + (1 - label) ln (1 - V)) with V = sigmoid(logit) (lesson chapter 2; DigiRL, arXiv 2406.11896). label_N: [N]
  in [0, 1], how the screen's episode ended. Never feed it sigmoids or softmaxed heads. Gradient: V - label, into the logit
  only.
  """
  same_length(logit_N=logit_N, label_N=label_N)
  label = jax.lax.stop_gradient(f32(label_N))
  logit = guard(f32(logit_N), label)
  return jnp.logaddexp(logit, 0.0) - logit * label


def clipped_value_loss(value_N, old_value_N, return_N, *, clip: float = 0.5) -> Array:
  """PPO's value loss, [N] float32: 0.5 max((v - R)^2, (clip(v, old +- clip) - R)^2).

  Once v has moved more than `clip` from the value at the start of the update, and that move brought it nearer to the return,
  its gradient is 0. An infinite clip is plain squared error. Gradients flow into value_N only.
  """
  same_length(value_N=value_N, old_value_N=old_value_N, return_N=return_N)
  if is_concrete(clip) and not clip > 0:
    raise ValueError(f"clip is {clip}, wanted a number above 0 (infinity for none)")
  old, target = jax.lax.stop_gradient((f32(old_value_N), f32(return_N)))
  value = guard(f32(value_N), old, target)
  held = jax.lax.stop_gradient(jnp.clip(value, old - clip, old + clip))
  plain, capped = jnp.square(value - target), jnp.square(held - target)
  return 0.5 * jnp.where(capped > plain, capped, plain)


class ReturnMoments(NamedTuple):
  """What explained variance needs of a set of (value, return) pairs; `+` joins two sets as if they were one.

  count, means and centred second moments (not sums of squares, which cancel in float32) of the returns and of the errors,
  and the smallest and largest return, all float32 scalars.
  """

  size: Array
  return_mean: Array
  return_m2: Array
  error_mean: Array
  error_m2: Array
  return_min: Array
  return_max: Array

  def __add__(self, other):
    if not isinstance(other, ReturnMoments):
      raise TypeError(f"ReturnMoments add to ReturnMoments only, got {type(other).__name__}")
    size = self.size + other.size
    share = other.size / jnp.maximum(size, 1.0)
    joined = []
    for mean_a, m2_a, mean_b, m2_b in (
      (self.return_mean, self.return_m2, other.return_mean, other.return_m2),
      (self.error_mean, self.error_m2, other.error_mean, other.error_m2),
    ):
      gap = mean_b - mean_a
      joined += [mean_a + gap * share, m2_a + m2_b + gap * gap * self.size * share]
    low, high = jnp.minimum(self.return_min, other.return_min), jnp.maximum(self.return_max, other.return_max)
    return ReturnMoments(size, *joined, low, high)

  def explained_variance(self) -> tuple[Array, Array]:
    """(1 - var(return - value) / var(return), defined); (0, False) where returns are all equal, absent or not finite."""
    defined = (self.return_max > self.return_min) & (self.return_m2 > 0) & jnp.isfinite(self.error_m2)
    return jnp.where(defined, 1.0 - self.error_m2 / jnp.where(defined, self.return_m2, 1.0), 0.0), defined


def return_moments(value_N, return_N, mask_N) -> ReturnMoments:
  """Moments of the unmasked entries, to be added over micro-batches before `explained_variance()`. Gradients stop."""
  mask = as_mask(mask_N, same_length(value_N=value_N, return_N=return_N, mask_N=mask_N))
  value, target = jax.lax.stop_gradient((f32(value_N), f32(return_N)))
  size = jnp.sum(mask.astype(jnp.float32))
  numbers = [size]
  for x in (target, target - value):
    mean = jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(size, 1.0)
    numbers += [mean, jnp.sum(jnp.square(jnp.where(mask, x - mean, 0.0)))]
  low = jnp.min(jnp.where(mask, target, jnp.inf), initial=jnp.inf)
  high = jnp.max(jnp.where(mask, target, -jnp.inf), initial=-jnp.inf)
  return ReturnMoments(*numbers, low, high)


def explained_variance(value_N, return_N, mask_N) -> tuple[Array, Array]:
  """Share of the spread in returns that the critic accounts for: (1 - var(R - V) / var(R), defined), float32 and bool.

  1 is perfect, 0 no better than the average return, below 0 worse (lesson chapter 2). Over the unmasked entries of the whole
  set at once: a mean of the per-part numbers is a different and wrong one; to work in parts, add `return_moments`. Value 0
  and defined False where the returns are all equal, or something that counts is not finite: never NaN. Gradients stop.
  """
  return return_moments(value_N, return_N, mask_N).explained_variance()


def bounded_value(logit_N, low=0.0, high=1.0) -> Array:
  """A critic's guess held inside the range of the rewards, float32: low + (high - low) sigmoid(logit).

  DigiRL and WebRL (0 to 1); BPCO, arXiv 2608.23566. Train it with `critic_cross_entropy` on (R - low) / (high - low), whose
  gradient does not vanish where the sigmoid is flat.
  """
  if is_concrete(low, high) and not low < high:
    raise ValueError(f"the range is {low} .. {high}, wanted low < high")
  return f32(low) + (f32(high) - f32(low)) * jax.nn.sigmoid(guard(f32(logit_N)))


def brier_score(value_N, label_N, mask_N) -> Total:
  """Squared distance of guesses from outcomes: Total(sum of (v - y)^2 where mask, number of mask). Gradients stop.

  0 is perfect, 0.25 what "always one half" gets, and base rate * (1 - base rate) what knowing only the base rate gets.
  """
  mask = as_mask(mask_N, same_length(value_N=value_N, label_N=label_N, mask_N=mask_N))
  value, label = (jnp.where(mask, jax.lax.stop_gradient(f32(x)), 0.0) for x in (value_N, label_N))
  return Total(jnp.sum(jnp.square(value - label)), jnp.sum(mask.astype(jnp.float32)))


class Calibration(NamedTuple):
  """Guesses against outcomes by the size of the guess: sums per bin, so `+` joins micro-batches. All [B] float32."""

  value_sum: Array
  label_sum: Array
  size: Array

  def __add__(self, other):
    if not isinstance(other, Calibration):
      raise TypeError(f"a Calibration adds to a Calibration only, got {type(other).__name__}")
    return Calibration(*(a + b for a, b in zip(self, other)))

  def curve(self) -> tuple[Array, Array]:
    """(mean guess, mean outcome) of each bin, [B]; 0 in empty bins."""
    return Total(self.value_sum, self.size).mean(), Total(self.label_sum, self.size).mean()

  def error(self) -> Array:
    """Expected calibration error: distance of mean guess and mean outcome, averaged over the entries; 0 without any."""
    return Total(jnp.sum(jnp.abs(self.value_sum - self.label_sum)), jnp.sum(self.size)).mean()


def calibration(value_N, label_N, mask_N, num_bins: int = 10) -> Calibration:
  """Sort the unmasked guesses in [0, 1] into bins of equal width; a guess of 1 falls into the last. Gradients stop.

  Expected calibration error: Guo et al., arXiv 1706.04599, eq 3 (there of a classifier's confidence).
  """
  mask = as_mask(mask_N, same_length(value_N=value_N, label_N=label_N, mask_N=mask_N))
  if num_bins < 1:
    raise ValueError(f"num_bins is {num_bins}, wanted at least 1")
  value, label = (jnp.where(mask, jax.lax.stop_gradient(f32(x)), 0.0) for x in (value_N, label_N))
  bins = jnp.clip(jnp.floor(value * num_bins), 0, num_bins - 1).astype(jnp.int32)
  values = segment_total(value, bins, num_bins, mask)
  return Calibration(values.sum, segment_total(label, bins, num_bins, mask).sum, values.count)
