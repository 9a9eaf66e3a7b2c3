"""Critics: what they read, what they leave alone, and where their numbers stand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.state import Batch, StepBatch
from models import critic
from models.base import Critic

pytestmark = pytest.mark.usefixtures("compile_quickly")


@pytest.fixture(scope="module")
def policy(tiny_with):
  return tiny_with(width=8, layers=1, heads=1, mlp=1, patch_width=4)


@pytest.fixture(scope="module")
def params(policy):
  return jax.jit(policy.init)(jax.random.key(0))


def build(kind, policy, **knobs):
  cfg = critic.defaults()
  cfg.width = 6
  cfg.update(knobs)
  return critic.build(kind, cfg, policy)


def steps(policy, screen, n=3):
  look = lambda i: policy.image(screen(i))
  text = np.array([[40, 41, 0, 0, 0, 0], [42, 0, 0, 0, 0, 0], [40, 41, 0, 0, 0, 0]], np.int32)[:n]
  return StepBatch(np.stack([np.stack([look(i), look(i + 10)]) for i in range(n)]), text, np.zeros(n, np.float32), np.ones(n, bool))


def tokens(policy, screen, mask=(0,) * 8 + (1, 1, 0)):
  """One row: a goal of 2 tokens, an image of 6, 3 tokens after it of which `mask` says which were written."""
  n = len(mask)
  row = lambda x, kind=np.int32: np.array([x], kind)
  slot = [-1, -1, *range(6), *[-1] * (n - 8)]
  return Batch(
    tokens=row([40, 41, *[2] * 6, *[50] * (n - 8)]), segment_ids=row([1] * n), positions=row([[0, 1, *[6] * 6, *range(7, n - 1)]]),
    episode_id=row([0] * n), step_id=row([0] * n), is_action=row(mask, bool), behaviour_logp=None, version=None, advantage=None,
    image_slot=row(slot), images=policy.image(screen(0))[None], episode_valid=None, row_actions=3,
  )  # fmt: skip


def flat(tree):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize("kind", critic.KINDS)
def test_the_frozen_policy_gets_no_gradient_and_the_head_does(kind, policy, params, tiny_screen):
  """For the trunk critic on the policy's own trunk too: a head that reads the policy must not move it."""
  made = build(kind, policy, trunk="policy")
  batch = tokens(policy, tiny_screen) if kind == "trunk" else steps(policy, tiny_screen)
  own = made.init(jax.random.key(1), params)
  total = lambda own, frozen: jnp.sum(made.score(own, frozen, batch).value_logit)
  of_own, of_frozen = jax.jit(jax.grad(total, argnums=(0, 1)))(own, params)
  assert flat(of_own).any() and not flat(of_frozen).any()
  assert isinstance(made, Critic) and made.reads == ("tokens" if kind == "trunk" else "steps") and made.kind == kind
  for head in of_own.values():  # every head learns
    assert flat(head).any()


def test_a_copied_trunk_learns_and_begins_as_the_policy(policy, params, tiny_screen):
  made, batch = build("trunk", policy, trunk="copy"), tokens(policy, tiny_screen)
  own = made.init(jax.random.key(1), params)
  assert jax.tree.all(jax.tree.map(np.array_equal, own["trunk"], params))
  places = lambda tree: {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)}
  assert not places(own["trunk"]) & places(params)
  grads = jax.jit(jax.grad(lambda own: jnp.sum(made.score(own, None, batch).value_logit)))(own)  # it needs no policy beside it
  assert flat(grads["trunk"]).any() and flat(grads["head"]).any()
  on_policy = build("trunk", policy, trunk="policy")
  same_head = on_policy.init(jax.random.key(1), params)
  assert set(same_head) == {"head"}
  a, b = made.score(own, None, batch).value_logit, on_policy.score(same_head, params, batch).value_logit
  np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_value_stands_before_its_token_and_nowhere_else(policy, params, tiny_screen):
  """The value at token t is read before t is known: it may change with earlier tokens, never with t itself or later ones."""
  made = build("trunk", policy)
  own = made.init(jax.random.key(1), params)
  score = jax.jit(lambda batch: made.score(own, None, batch).value_logit)
  batch = tokens(policy, tiny_screen, (0,) * 8 + (1, 1, 0))
  value = np.asarray(score(batch))[0]
  assert value[8] != 0 and value[9] != 0 and not value[[*range(8), 10]].any()
  changed = lambda place: np.asarray(score(batch.replace(tokens=np.where(np.arange(11) == place, 60, batch.tokens))))[0] != value
  assert changed(9).tolist() == [False] * 11  # neither at 9 itself nor before it
  assert changed(8).tolist() == [False] * 9 + [True, False]
  assert changed(0)[[8, 9]].all()


def test_the_text_critic_reads_the_words_and_ignores_the_screens(policy, params, tiny_screen):
  made, batch = build("text", policy), steps(policy, tiny_screen)
  own = made.init(jax.random.key(1), params)
  value = made.score(own, params, batch).value_logit
  assert value.shape == (3, 1) and value[0] == value[2] and value[0] != value[1]
  assert np.array_equal(made.score(own, params, batch.replace(frames=255 - batch.frames)).value_logit, value)


def test_the_frames_critic_reads_both_screens_and_the_words(policy, params, tiny_screen):
  made, batch = build("frames", policy, heads=2), steps(policy, tiny_screen)
  own = made.init(jax.random.key(1), params)
  score = jax.jit(lambda batch: made.score(own, params, batch).value_logit)
  value = np.asarray(score(batch))
  for k in range(2):
    frames = batch.frames.copy()
    frames[:, k] = 255 - frames[:, k]
    assert (np.asarray(score(batch.replace(frames=frames))) != value).all()
  assert (np.asarray(score(batch.replace(text=batch.text + (batch.text > 0)))) != value).all()
  assert (np.asarray(score(batch.replace(frames=batch.frames[:, ::-1]))) != value).all()  # and knows which came first


def test_heads_start_different_and_small(policy, params, tiny_screen):
  """Two heads of one seed would agree for ever. The last layer starts small: first guesses near one half."""
  made = build("frames", policy, heads=2)
  own = made.init(jax.random.key(1), params)
  assert set(own) == {"0", "1"} and not np.array_equal(own["0"]["weight"]["0"], own["1"]["weight"]["0"])
  value = np.asarray(made.score(own, params, steps(policy, tiny_screen)).value_logit)
  assert value.shape == (3, 2) and (value[:, 0] != value[:, 1]).all()
  assert np.abs(1 / (1 + np.exp(-value)) - 0.5).max() < 0.15
  assert not np.array_equal(flat(own), flat(made.init(jax.random.key(2), params)))


def test_padding_of_the_goal_is_no_word(policy, params, tiny_screen):
  """What stands in the embedding of token 0 does not reach the value of a short goal."""
  made, batch = build("text", policy), steps(policy, tiny_screen)
  own = made.init(jax.random.key(1), params)
  other = params | {"embed_tokens": params["embed_tokens"].at[0].set(99.0)}
  assert np.array_equal(made.score(own, params, batch).value_logit, made.score(own, other, batch).value_logit)


@pytest.mark.parametrize("kind, knobs, words", [
  ("frame", {}, "critic kind is 'frame', wanted one of trunk, frames, text"), ("frames", {"heads": 0}, "heads 0: wanted 1 or more"),
  ("text", {"width": 0}, "critic width is 0"), ("trunk", {"trunk": "shared"}, "critic trunk is 'shared', wanted 'policy' or 'copy'"),
])  # fmt: skip
def test_what_cannot_be_built_is_one_line(kind, knobs, words, policy):
  with pytest.raises(ValueError) as error:
    build(kind, policy, **knobs)
  assert words in str(error.value) and "\n" not in str(error.value)
