"""Real policies in miniature for tests of the session sampler: a text model and a vision-language model with the golden checkpoints' sizes
and sharp random weights, and the training path's numbers of what they wrote."""

import functools

import jax
import numpy as np
import tiny_checkpoints

from models import llama, qwen2_5_vl, vision_language
from models.base import Seen

SCREEN = (120, 90)  # 4 x 3 tokens at a factor of 28


@functools.cache
def make(path, family):
  """The policy "llama" or "qwen2_5_vl", one for all tests of a run: its programs are compiled once."""
  where = tiny_checkpoints.folder(path / family, family)
  cfg = (llama if family == "llama" else vision_language).defaults()
  cfg.update(dict(max_prompt=240, max_action=8, dtype="float32", remat="none", instruction=f"{where}/instruction.txt"))
  module = llama if family == "llama" else qwen2_5_vl
  return module.make(cfg, where, "desktop", SCREEN)


def weights(policy, seed=0):
  """Random parameters under which the next token depends on what was seen: sharp, and no bias is 0."""
  rng = np.random.default_rng(seed)
  return jax.tree_util.tree_map_with_path(
    lambda path, a: rng.normal(float("norm" in str(path[-2])), 0.2, a.shape).astype(np.float32),
    jax.eval_shape(policy.init, jax.random.key(0)),
  )


def screen(seed):
  return np.random.default_rng(seed).integers(0, 256, (SCREEN[1], SCREEN[0], 3)).astype(np.uint8)


class Game:
  """An episode as the tests play it: what is seen depends on its number and the step alone, what was written goes back as ids."""

  def __init__(self, policy, number, goal="open the mug"):
    self.policy, self.number, self.goal, self.turns = policy, number, goal, []

  def prompt(self):
    seed, text = 100 * self.number * bool(self.turns) + len(self.turns), "step " + "abcdefgh"[len(self.turns)] * (self.number % 3)
    self.now = (seed, text)
    return self.policy.prompt(self.goal, [screen(seed)], text, self.turns)

  def act(self, tokens):
    seed, text = self.now
    self.turns.append(Seen(self.policy.image(screen(seed)), text, tokens))


def key(number, step):
  return np.random.default_rng([7, number, step]).integers(0, 2**32, 2, np.uint32)


def play(sampler, numbers, steps, named=True, between=lambda step: None):
  """Plays games to their end side by side: [(prompt, Sampled) of every step] by number, in `numbers`' order."""
  games, seen = {n: Game(sampler.policy, n) for n in numbers}, {n: [] for n in numbers}
  for h in range(steps):
    prompts = [games[n].prompt() for n in numbers]
    outs = sampler.act(prompts, np.stack([key(n, h) for n in numbers]), list(numbers) if named else None)
    for n, prompt, out in zip(numbers, prompts, outs):
      games[n].act(out.tokens)
      seen[n].append((prompt, out))
    between(h)
  return seen


def same(got, want, atol=1e-5):
  """The same tokens, numbers to 1e-5, in every step of every game."""
  for n in got:
    for (_, a), (_, b) in zip(got[n], want[n], strict=True):
      assert a.tokens.tolist() == b.tokens.tolist(), n
      np.testing.assert_allclose(a.logp, b.logp, atol=atol)
      np.testing.assert_allclose(a.entropy, b.entropy, atol=atol)


@functools.cache
def _scorer(policy, temperature):
  def score(params, tokens, positions, segments, mask, images, slot):
    hidden = policy.forward(params, tokens, positions, segments, policy.encode_images(params, images), slot)
    logits = policy.logits(params, hidden)
    return policy.token_logprobs(params, hidden, tokens, mask, policy.max_action, temperature=temperature), logits

  return jax.jit(score)


def trained(policy, params, prompt, out, temperature=1.0):
  """(logp, entropy, likeliest token) of what was written, by the training path: one forward pass over all ids, in a row of 256."""
  n, m, length = len(prompt.tokens), len(prompt.tokens) + len(out.tokens), 256
  tokens, segments, slot, mask = (np.full((1, length), fill, np.int32) for fill in (0, 0, -1, 0))
  tokens[0, :m], segments[0, :m], mask[0, n:m] = np.concatenate([prompt.tokens, out.tokens]), 1, 1
  positions = np.zeros((len(prompt.positions), 1, length), np.int32)
  positions[:, 0, :n], positions[:, 0, n:m] = prompt.positions, prompt.next_position + np.arange(m - n)
  images = np.zeros((4, *prompt.images.shape[1:]), np.uint8)[: 4 * bool(len(prompt.images))]
  images[: len(prompt.images)] = prompt.images
  for i, place in enumerate(prompt.image_place):
    slot[0, place : place + policy.tokens_per_image] = i * policy.tokens_per_image + np.arange(policy.tokens_per_image)
  (logp, entropy), logits = _scorer(policy, temperature)(params, tokens, positions, segments, mask.astype(bool), images, slot)
  return np.asarray(logp)[0, n:m], np.asarray(entropy)[0, n:m], np.asarray(logits)[0, n - 1 : m - 1].argmax(-1)
