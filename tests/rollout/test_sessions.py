"""The session sampler, with a text model and a vision-language model in miniature: whatever is kept, shared, evicted, chunked or
batched, an episode gets the tokens and numbers that a full forward pass gives it."""

import gc
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import served
from served import Game, key, play, same, trained

from core.state import Weights
from rollout.sampler import Sampler
from rollout.sessions import SessionSampler
from rollout.turn import make_record

pytestmark = pytest.mark.usefixtures("compile_quickly")
NUMBERS, STEPS = (1, 2, 3), 3
OTHER = {"spans": (96, 256), "chunks": (8, 64)}


@pytest.fixture(scope="module", params=("llama", "qwen2_5_vl"))
def policy(request, tmp_path_factory):
  return served.make(tmp_path_factory.getbasetemp(), request.param)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  return served.make(tmp_path_factory.getbasetemp(), "llama")


@pytest.fixture(scope="module")
def params(policy):
  return served.weights(policy)


def sampler(policy, params, slots=3, version=1, **knobs):
  s = SessionSampler(policy, slots, **{"spans": (256,), "chunks": (8, 32), "steps": 4} | knobs)
  s.load(Weights(params, version))
  return s


@pytest.fixture(scope="module")
def plain(policy, params):
  """What three games get with a slot each."""
  s = sampler(policy, params)
  return play(s, NUMBERS, STEPS), s


def check(policy, params, seen, temperature=1.0):
  for prompt, out in itertools.chain(*seen.values()):
    logp, entropy, _ = trained(policy, params, prompt, out, temperature)
    np.testing.assert_allclose(out.logp, logp, atol=1e-5)
    np.testing.assert_allclose(out.entropy, entropy, atol=1e-5)


def test_numbers_are_those_of_the_training_path(policy, params, plain):
  """Many turns through the cache against one forward pass of all ids; under other weights the numbers are far off."""
  seen, s = plain
  check(policy, params, seen)
  assert len({tuple(out.tokens) for n in seen for _, out in seen[n]}) == len(NUMBERS) * STEPS
  prompt, out = seen[1][-1]
  assert np.abs(trained(policy, served.weights(policy, 1), prompt, out)[0] - out.logp).max() > 0.1


def test_only_what_is_new_is_prefilled(policy, plain):
  """By hand from the prompts: each session's prompt minus what it had in the cache (all but the last token it wrote); the first
  prompts share system, instruction and, with the same text, the screenshot."""
  seen, s = plain
  new = [len(seen[n][0][0].tokens) for n in NUMBERS]
  for n in NUMBERS:
    new += [len(b.tokens) - (len(a.tokens) + len(out.tokens) - 1) for (a, out), (b, _) in itertools.pairwise(seen[n])]
  assert s.counts.new == sum(new) and s.counts.prefilled + s.counts.copied == sum(new) and s.counts.copied > 0
  assert (s.counts.restarted, s.counts.evicted, s.counts.stale) == (0, 0, 0)
  assert s.counts.decoded == sum(len(out.tokens) for n in seen for _, out in seen[n]) == s.tokens
  if policy.tokens_per_image:  # one screenshot that all begin with, then one each
    assert s.counts.images == 1 + len(NUMBERS) * (STEPS - 1)


@pytest.mark.parametrize("slots, order", [(1, (1, 2, 3)), (8, (2, 3, 1)), (3, (3, 1, 2))])
def test_neither_slots_nor_neighbours_nor_arrivals_matter(policy, params, plain, slots, order):
  """One slot makes every step evict another session: what is filled anew from the kept ids says the same."""
  s = sampler(policy, params, slots)
  same(play(s, order, STEPS), plain[0])
  assert (s.counts.evicted > 0) == (slots == 1)


def test_sizes_do_not_matter(policy, params, plain):
  """Other chunks and spans; a little prefill between the others' tokens; no names."""
  s = sampler(policy, params, **OTHER, burst=1)
  same(play(s, NUMBERS, STEPS), plain[0])
  s = sampler(policy, params)
  same(play(s, NUMBERS, STEPS, named=False), plain[0])
  assert s.counts.prefilled == plain[1].counts.prefilled and not s.sessions


def test_sessions_that_come_and_go_alone(policy, params, plain):
  """Asked one by one, each at its own pace, polled in between."""
  s, games, seen = sampler(policy, params, 1), {n: Game(policy, n) for n in NUMBERS}, {n: [] for n in NUMBERS}
  want = plain[0]

  def ask(n):
    games[n].asked = games[n].prompt()
    s.ask(n, games[n].asked, key(n, len(games[n].turns)))

  for n in NUMBERS:
    ask(n)
    for m, out in s.poll():
      seen[m].append((games[m].asked, out))
  while s.busy:
    for m, out in s.poll():
      seen[m].append((games[m].asked, out))
    for m, game in games.items():
      if len(seen[m]) > len(game.turns):
        game.act(seen[m][-1][1].tokens)
        if len(seen[m]) < STEPS:
          ask(m)
        else:
          s.end(m)
  same(seen, want)
  assert not s.sessions and all(slot.owner is None for slot in s.slots)


def test_who_loses_its_slot(text):
  """Nobody who writes; else a free slot, then of two idle sessions the one that was there last, then of those that wait the last in line,
  and the slot that is to be copied from only where there is no other of its kind."""
  s = SessionSampler(text, 6, (64,), chunks=(32,))
  for name in "abcdef":
    s.ask(name, Game(text, 1).prompt(), key(1, 0))
  for slot, (name, used) in zip(s.slots, {"a": 3, "b": 1, "c": 9, "d": 8, "e": 7, "f": 0}.items()):
    slot.owner, slot.used = s.sessions[name], used
    s.sessions[name].slot = slot
  a, b, c, d, e, f = s.slots
  asks = {ask.session.name: ask for ask in s._waiting}
  s._waiting, s._writing, f.owner = type(s._waiting)([asks["a"], asks["b"]]), [asks["e"]], None
  order = []
  for _ in range(5):
    taken = s._victim(c)
    order.append(taken)
    s._writing.append(types.SimpleNamespace(session=taken.owner)) if taken.owner else setattr(f, "owner", s.sessions["e"])
  assert [x.index for x in order] == [x.index for x in (f, d, c, b, a)] and s._victim(c) is None


def test_a_group_shares_its_prompt(policy, params):
  """Eight tries at one task: the prompt with its screenshot goes through the model once, each sibling prefills one token of it."""
  prompt = Game(policy, 1).prompt()
  keys = np.stack([key(n, 0) for n in range(8)])
  s = sampler(policy, params, 8)
  outs = s.act([prompt] * 8, keys, [("group", n) for n in range(8)])
  n = len(prompt.tokens)
  assert (s.counts.prefilled, s.counts.copied) == (n + 7, 7 * (n - 1)) and s.counts.images <= 1
  assert len({tuple(out.tokens) for out in outs}) == 8
  for k, out in zip(keys, outs):
    alone = sampler(policy, params, 8).act([prompt], k[None])[0]
    assert alone.tokens.tolist() == out.tokens.tolist()
    np.testing.assert_allclose(alone.logp, out.logp, atol=1e-5)


@pytest.mark.parametrize("policy", ["qwen2_5_vl"], indirect=True)  # one that sees screenshots
def test_another_screenshot_under_the_same_ids(policy, params):
  """Two prompts whose ids are equal and whose images differ share nothing from the image on."""
  first, second = (policy.prompt("go", [served.screen(seed)], "x", []) for seed in (1, 2))
  assert np.array_equal(first.tokens, second.tokens)
  s = sampler(policy, params)
  for prompt in (first, second):
    check(policy, params, {0: [(prompt, s.act([prompt], key(0, 0)[None], ["a"])[0])]})
  assert s.counts.prefilled == 2 * len(first.tokens) - first.image_place[0] and s.counts.images == 2


def test_a_context_that_does_not_go_on_starts_anew(policy, params):
  """Window mode and a cut history: the oldest turn is gone from the prompt. What still begins the same is kept."""
  game, s = Game(policy, 1), sampler(policy, params)
  for h in range(3):
    if h == 2:
      game.turns.pop(0)
    prompt = game.prompt()
    out = s.act([prompt], key(1, h)[None], ["a"])[0]
    check(policy, params, {1: [(prompt, out)]})
    game.act(out.tokens)
  assert s.counts.restarted == 1


@pytest.mark.parametrize("temperature", [0, 0.5])
def test_temperature(text, temperature):
  params = served.weights(text)
  s = sampler(text, params, temperature=temperature, chunks=(32,))
  seen = play(s, (1, 2), 2)
  check(text, params, seen, temperature or 1.0)
  if not temperature:
    for prompt, out in itertools.chain(*seen.values()):
      assert out.tokens.tolist() == trained(text, params, prompt, out)[2].tolist()


@pytest.mark.parametrize("policy", ["qwen2_5_vl"], indirect=True)  # one that sees screenshots
def test_the_one_shot_sampler_writes_the_same(policy, params, plain):
  """Same keys, no cache kept between steps: another program, the same tokens and numbers."""
  other = Sampler(policy, (1,))
  other.load(Weights(policy.unstack(params), 1))
  steps = plain[0][1][:1]
  same({1: [(p, other.act([p], key(1, h)[None])[0]) for h, (p, _) in enumerate(steps)]}, {1: steps})


# -- weights


def swap(policy, on_load):
  """One session; new weights come after the first call of the second step. (sampler, its steps, old and new parameters)."""
  old, new = served.weights(policy), served.weights(policy, 1)
  s, game, seen = sampler(policy, old, on_load=on_load), Game(policy, 1), []
  for h in range(2):
    prompt = game.prompt()
    s.ask("a", prompt, key(1, h))
    ready = s.poll()
    if h:
      s.load(Weights(new, 2))
    while not ready:
      ready = s.poll()
    seen.append((prompt, ready[0][1]))
    game.act(seen[-1][1].tokens)
  return s, seen, old, new


def test_every_token_says_which_weights_wrote_it(text):
  """Prefill writes 1 token and a call 4 more, then the weights change: 5 tokens of version 1, then version 2. The first are those of the
  old weights; the record of the try has both versions."""
  for on_load in ("keep", "rebuild"):
    s, seen, old, new = swap(text, on_load)
    (_, first), (prompt, out) = seen
    assert first.version == 1 and out.version.tolist() == [1] * 5 + [2] * (len(out.tokens) - 5) and len(out.tokens) > 5
    np.testing.assert_allclose(out.logp[:5], trained(text, old, prompt, out)[0][:5], atol=1e-5)
    record = make_record(prompt, out, 1)
    assert record.version[record.is_action].tolist() == out.version.tolist() and (record.version[~record.is_action] == -1).all()


def test_a_rebuilt_cache_is_that_of_the_new_weights(policy):
  s, seen, old, new = swap(policy, "rebuild")
  prompt, out = seen[1]
  np.testing.assert_allclose(out.logp[5:], trained(policy, new, prompt, out)[0][5:], atol=1e-5)
  assert s.counts.stale == 0


def test_a_kept_cache_is_told_from_a_fresh_one(policy):
  """Kept keys and values are the old weights': the numbers are not the new weights' own, and the tokens are counted as stale. Another
  session never starts on them."""
  s, seen, old, new = swap(policy, "keep")
  prompt, out = seen[1]
  assert np.abs(out.logp[5:] - trained(policy, new, prompt, out)[0][5:]).max() > 1e-2
  assert s.counts.stale == len(out.tokens) - 5
  again = s.act([prompt], key(5, 0)[None], ["b"])[0]
  check(policy, new, {0: [(prompt, again)]})


def test_a_cache_of_other_weights_is_noticed(text):
  s = sampler(text, served.weights(text), on_load="rebuild")
  s.ask("a", Game(text, 1).prompt(), key(1, 0))
  assert s.poll() == []
  s.sessions["a"].slot.stamp[3] = 7  # what a fault of the book-keeping would look like
  with pytest.raises(RuntimeError, match=r"slot \d holds keys and values of other weights than version 1"):
    s.poll()


@pytest.mark.parametrize("policy", ["qwen2_5_vl"], indirect=True)  # one that sees screenshots
def test_features_outlive_a_load_only_where_the_tower_is_frozen(policy):
  prompt, params = Game(policy, 1).prompt(), served.weights(policy)
  for frozen, images in ((True, 1), (False, 2)):
    s = sampler(policy, params, frozen_tower=frozen)
    for version in (1, 2):
      s.load(Weights(params, version))
      s.act([prompt], key(1, 0)[None], [version])
    assert s.counts.images == images


def test_weights_outlive_the_learners_buffers(text):
  """K8: the learner donates the arrays it published."""
  params = jax.tree.map(jnp.asarray, served.weights(text))
  s = sampler(text, params)
  jax.tree.map(lambda a: a.delete(), params)
  gc.collect()
  check(text, served.weights(text), play(s, (1,), 1))


# -- ends


def spelled(text, pieces):
  """The policy with a tokenizer that writes pieces[id] for an id, "." for others."""
  decode = lambda ids: "".join(pieces.get(int(i), ".") for i in ids)
  return text._replace(tokenizer=types.SimpleNamespace(decode=decode, eos_id=text.tokenizer.eos_id, encode=text.tokenizer.encode))


def test_a_stop_text_may_lie_across_tokens(text):
  """The third and fourth token spell "STOP" together: the action ends with the fourth, whatever a call wrote beyond it, and the next step
  goes on from there."""
  params = served.weights(text)
  free = play(sampler(text, params), (1,), 1)[1][0][1]
  assert len(free.tokens) > 5 and len(set(free.tokens.tolist())) == len(free.tokens)
  spelling = {int(free.tokens[2]): "xST", int(free.tokens[3]): "OP!"}
  for steps in (1, 4):
    s = sampler(text, params, stop=("nothing", "STOP"), steps=steps)
    s.policy = spelled(text, spelling)
    game = Game(text, 1)
    for h in range(2):
      prompt = game.prompt()
      out = s.act([prompt], key(1, h)[None], ["a"])[0]
      if h == 0:
        assert out.tokens.tolist() == free.tokens[:4].tolist() and len(out.logp) == len(out.entropy) == 4
      check(text, params, {1: [(prompt, out)]})
      game.act(out.tokens)


def test_an_action_ends_with_a_stop_id_or_at_the_limit(text):
  params = served.weights(text)
  free = play(sampler(text, params), (1,), 1)[1][0][1].tokens.tolist()
  assert play(sampler(text, params, stop_ids=(free[0],)), (1,), 1)[1][0][1].tokens.tolist() == free[:1]
  assert play(sampler(text, params, stop_ids=(free[4],)), (1,), 1)[1][0][1].tokens.tolist() == free[:5]
  for most in (1, 3):
    assert play(sampler(text, params, most=most), (1,), 1)[1][0][1].tokens.tolist() == free[:most]


def test_a_session_that_outgrows_the_cache_is_told_before_anything_is_lost(text):
  """40 places: the first prompt and 8 tokens fit, the second do not. Its neighbour's step goes on, and so does its own shorter one."""
  params, games = served.weights(text), [Game(text, 1), Game(text, 3)]
  s = sampler(text, params, spans=(40,), chunks=(32,))
  prompts = [g.prompt() for g in games]
  outs = s.act(prompts, np.stack([key(1, 0), key(3, 0)]), ["a", "b"])
  for game, out in zip(games, outs):
    game.act(out.tokens)
  before = s.counts.prefilled
  with pytest.raises(ValueError, match=r"session 'a': a prompt of \d+ tokens and up to 8 to write do not fit into the 40 places"):
    s.act([prompts[1], games[0].prompt()], np.stack([key(1, 0), key(3, 0)]), ["b", "a"])
  assert s.counts.prefilled == before and s.poll() == [] and s.sessions["a"].ask is s.sessions["b"].ask is None
  again = s.act(prompts, np.stack([key(1, 0), key(3, 0)]), ["a", "b"])
  assert [o.tokens.tolist() for o in again] == [o.tokens.tolist() for o in outs]


@pytest.mark.parametrize("policy, by", [("llama", "hand"), ("qwen2_5_vl", "knob")], indirect=["policy"])
def test_nothing_compiles_after_the_warm_up(policy, params, by):
  s = sampler(policy, params, warm=by == "knob", temperature=0.9 if by == "knob" else 0.8, **OTHER)  # programs of its own
  bound = lambda params: jax.device_put(params, jax.devices()[0])  # as a checkpoint's weights are
  s.load(Weights(bound(params), 0))
  if by == "hand":
    s.warm_up(Game(policy, 1).prompt())
  else:
    s.act([Game(policy, 1).prompt()], key(1, 0)[None])
  before = s.engine.compiled
  play(s, range(1, 8), STEPS)
  s.load(Weights(bound(served.weights(policy, 1)), 2))
  play(s, range(10, 14), 2, named=False)
  assert s.engine.compiled == before and s.counts.copied > 0 and s.counts.evicted > 0


# -- what it refuses


def test_what_it_refuses(text):
  params, prompt = served.weights(text), Game(text, 1).prompt()
  with pytest.raises(RuntimeError, match="call load before"):
    SessionSampler(text, 1, (256,), chunks=(8, 32)).act([prompt], key(1, 0)[None])
  s = sampler(text, params)
  s.ask("a", prompt, key(1, 0))
  with pytest.raises(ValueError, match="session 'a' asks while its last step is under way"):
    s.ask("a", prompt, key(1, 0))
  with pytest.raises(RuntimeError, match="1 sessions are asking; warm up before"):
    s.warm_up(prompt)
  with pytest.raises(ValueError, match="2 prompts came with 1 session names and 2 keys"):
    s.act([prompt] * 2, np.stack([key(1, 0)] * 2), ["b", "b"])
  with pytest.raises(ValueError, match="a prompt of 0 tokens"):
    s.ask("c", prompt._replace(tokens=prompt.tokens[:0], positions=prompt.positions[:, :0]), key(1, 0))
  assert s.busy == 1
  s.end("a")
  assert s.busy == 0 and s.poll() == [] and s.act([], np.zeros((0, 2), np.uint32)) == []


@pytest.mark.parametrize(
  "knob, value", [("slots", 0), ("spans", ()), ("spans", ("a",)), ("chunks", (8, 512)), ("chunks", (8.5,)), ("steps", 0),
                  ("temperature", -1.0), ("temperature", float("nan")), ("stop", "STOP"), ("stop", ("",)), ("stop", (5,)), ("most", 9),
                  ("on_load", "drop"), ("burst", 0), ("images_kept", 0)],
)  # fmt: skip
def test_knobs_outside_their_domain(text, knob, value):
  knobs = {"slots": 1, "spans": (256,), "chunks": (8,)} | {knob: value}
  where = "sampler " if knob in ("temperature", "most") else "sampler.sessions."  # those are no knobs of a run's config
  with pytest.raises(ValueError, match=f"{where}{knob} is"):
    SessionSampler(text, **knobs)
