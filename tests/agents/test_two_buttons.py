"""Every algorithm, in the real loop of train.py, learns which of two buttons to press; with shuffled rewards it does not.

The world: three steps on a screen of two patches. A goal says which button is right, and only the middle press counts. The
policy sees a bag of words and pixels, four small tables, behind the interface of models/base.py. It first copies presses made at
random, so it starts at one pass in two.
"""

import functools
import types

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

import train
from agents.base import follow
from core import learner as learner_lib
from core import mesh as mesh_lib
from core.find import available, find
from core.pack import shape_for
from core.schema import SUCCESS, Action, End, Episode, Limits, Screen, Step, Task, Unreadable
from core.session import Session
from core.state import Weights
from envs.inside import Inside
from models import critic
from models.base import Policy, Prompt
from rollout import demos, instruments
from rollout.buffer import Buffer
from rollout.curriculum import Curriculum
from rollout.feed import Feed
from rollout.gather import Gathered, gather
from rollout.queue import GroupQueue, Ledger
from rollout.replay import Replay
from rollout.sampler import Sampler
from rollout.scheduler import collect
from rollout.turn import Try

NAMES = available("agents", having="make")
BUTTONS, GOALS = ("left", "right"), ("sun", "moon")
STEPS, DECIDES = 3, 1
RECORDS = 192  # 8 groups x 8 tries x 3 steps
SHADES = 3
TASKS = [Task(f"{goal}/{shade}", goal, "buttons", "buttons", shade, {}, Limits(STEPS)) for goal in GOALS for shade in range(SHADES)]


def right_button(goal: str) -> str:
  return BUTTONS[GOALS.index(goal)]


def draw(step: int, shade: int, pressed: str) -> np.ndarray:
  """Left half: which step it is. Right half: what was pressed when it counted; its shade differs from task to task."""
  pixels = np.full((8, 16, 3), 20 * shade, np.uint8)
  pixels[:, :8, step % 3] = 255
  if pressed:
    pixels[:, 8:, BUTTONS.index(pressed)] = 255
  return pixels


class Buttons:
  """The world as an environment. Anything but a button's name is unreadable and ends the try."""

  unwrapped = property(lambda self: self)

  def reset(self, *, options):
    self.task, self.h, self.pressed = options["task"], 0, ""
    return self.look(), {"notes": {}}

  def look(self):
    return {"screenshot": draw(self.h, self.task.seed, self.pressed), "goal": self.task.goal, "text": ""}

  def step(self, text):
    read = text in BUTTONS
    action = Action("press", {}, {}, "phone") if read else Unreadable("not a button")
    if self.h == DECIDES and read:
      self.pressed = text
    self.h += 1
    info = {"action": action, "notes": {}, "cause": "", "partial": None}
    if read and self.h < STEPS:
      return self.look(), 0.0, False, False, info
    passed = read and self.pressed == right_button(self.task.goal)
    rewards = {SUCCESS: float(passed)} | ({} if read else {"unreadable": -1.0})
    info |= {"cause": "unreadable" if not read else "checker" if passed else "agent", "rewards": rewards}
    return self.look(), float(passed), True, False, info


def demonstrations(rng) -> list[Episode]:
  out = []
  for i in range(120):
    task, env = TASKS[i % len(TASKS)], Buttons()
    obs, _ = env.reset(options={"task": task})
    steps = []
    for _ in range(STEPS):
      text = BUTTONS[rng.integers(2)]
      steps.append(Step(Screen.of(obs["screenshot"]), text, Action("press", {}, {}, "phone"), 2))
      obs, *_ = env.step(text)
    out.append(Episode(task.id, f"demo{i}", 0, 0, steps, End.TERMINATED, "checker", {SUCCESS: 1.0}, [], goal=task.goal))
  return out


WORDS = ("<pad>", "<eos>", "<image>", *BUTTONS, *GOALS)
WIDTH = 24


def encode_images(params, images):
  """Two pixels of every screen, one from each half."""
  return (images[:, 0, ::8].reshape(-1, 6) / 255.0) @ params["see"]


def place(params, tokens, features, image_slot):
  return jnp.where((image_slot >= 0)[..., None], features[jnp.maximum(image_slot, 0)], params["words"][tokens])


def hidden(params, bag):
  return jnp.tanh(bag @ params["mix"])


def forward(params, tokens, positions, segment_ids, features, image_slot):
  same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
  return hidden(params, same.astype(jnp.float32) @ place(params, tokens, features, image_slot))


def token_logprobs(params, hidden, tokens, mask, most):
  all_logp = jax.nn.log_softmax(jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0))) @ params["out"])
  logp = jnp.take_along_axis(all_logp, tokens[..., None], axis=-1)[..., 0]
  return jnp.where(mask, logp, 0.0), jnp.where(mask, -jnp.sum(jnp.exp(all_logp) * all_logp, axis=-1), 0.0)


def prefill(params, tokens, positions, valid, features, image_slot, bag):
  bags = bag[:, None] + jnp.cumsum(jnp.where(valid[..., None], place(params, tokens, features, image_slot), 0.0), axis=1)
  return hidden(params, bags), bags[:, -1]


def decode_step(params, token, position, bag):
  bag = bag + params["words"][token]
  return hidden(params, bag), bag


def prompt(goal, screens, text, history=()):
  return Prompt(np.array([WORDS.index(goal), 2], np.int32), np.array([[0, 1]], np.int32), np.array([1], np.int32), screens[-1][None], 2)


def init(seed):
  rng = np.random.default_rng(seed)
  leaf = lambda scale, *shape: jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)
  n = len(WORDS)
  return {"words": leaf(1, n, WIDTH), "see": leaf(1, 6, WIDTH), "mix": leaf(WIDTH**-0.5, WIDTH, WIDTH), "out": leaf(0.1, WIDTH, n)}


POLICY = Policy(
  name="bag", tokenizer=types.SimpleNamespace(
    vocab_size=len(WORDS), pad_id=0, eos_id=1, image_id=2, encode=lambda text: [WORDS.index(text)],
    decode=lambda ids: "".join(WORDS[i] for i in ids if i != 1)),
  tokens_per_image=1, width=WIDTH, max_goal=1, max_prompt=2, max_action=2, init=init, prompt=prompt,
  positions=lambda record: np.arange(len(record), dtype=np.int32)[None], image=lambda screen: screen, encode_images=encode_images,
  forward=forward, token_logprobs=token_logprobs, init_cache=lambda batch, size: jnp.zeros((batch, WIDTH)), prefill=prefill,
  decode_step=decode_step, logits=lambda params, hidden: hidden @ params["out"], embed=lambda params, tokens: params["words"][tokens],
)  # fmt: skip


# Sizes and budgets: where a recipe's own would only take longer here. updates: 14 where nothing is said.
KNOBS = {
  "dapo": {"group_size": 8},
  "digirl": {"epochs": 4, "critic_epochs": 4, "store": 2 * RECORDS, "updates": 6},
  "webrl": {"critic_epochs": 4, "store": 2 * RECORDS, "updates": 18},
  "filtered_imitation": {"epochs": 4, "updates": 8},
  "ppo": {"pretrain_updates": 2, "lam_policy": 0.95, "updates": 20},  # by length lambda would be 0: 6 tokens
  "dpo": {"beta": 0.5, "offline": 8, "updates": 13, "lr": 1e-2},  # faster, and both of a pair grow unlikely together
  "kto": {"beta": 0.5, "offline": 8, "updates": 13},
}


def config(name: str):
  cfg = ml_collections.ConfigDict({"seed": 0, "policy": {"checkpoint": ""}})
  cfg.update(train.base.loop_defaults())
  cfg.mesh = mesh_lib.defaults()
  cfg.copy.update({"updates": 150, "batch": RECORDS, "lr": 3e-2, "warmup": 10})
  cfg.practice.update({"groups": 8, "slots": 64, "leash": 0.0, "warmup": 2})
  cfg.critic = critic.defaults()
  cfg.critic.update({"width": 16, "lr": 1e-2})
  cfg.agent = find("agents", name, having="make").defaults()
  knobs = {"minibatch": RECORDS, "critic_minibatch": RECORDS} | KNOBS.get(name, {})
  cfg.agent.update({k: v for k, v in knobs.items() if k in cfg.agent})
  cfg.practice.update({"updates": knobs.get("updates", 14), "lr": knobs.get("lr", 2e-2)})
  return cfg


@functools.cache
def part(kind: str):
  """(critic or None, what a model says of a batch, the same compiled): one of each for all runs. kind: "policy" or a critic's."""
  made = None if kind == "policy" else critic.build(kind, config("grpo").critic, POLICY)
  score = made.score if made else learner_lib.make_score(POLICY)
  return made, score, jax.jit(score)


@functools.cache
def recipe(name: str):
  """(agent, one compiled update a phase)."""
  run = Run.__new__(Run)
  run.cfg = config(name)
  agent = find("agents", name, having="make").make(run.cfg.agent)
  kinds = {"policy": "policy"} | dict(agent.critics)
  return agent, [learner_lib.make_update(part(kinds[p.params_key])[1], p.loss, run.optimiser(p.params_key)[0]) for p in agent.phases]


@functools.cache
def sampler():
  return Sampler(POLICY, (64,))


class Run(train.Run):
  """train.Run with small parts in place of those that a config names: its own methods begin the learner and its optimisers."""

  def __init__(self, name: str, workdir):
    self.cfg, self.workdir, self.policy = config(name), workdir, POLICY
    self.agent, self.updates = recipe(name)
    self.critics = {key: part(kind)[0] for key, kind in self.agent.critics.items()}
    kinds = {"policy": "policy"} | dict(self.agent.critics)
    self.scores, self.jitted = ({key: part(kind)[i] for key, kind in kinds.items()} for i in (1, 2))
    self.stop, self.timers = train.StopSignals(), train.Timers()
    self.dog = types.SimpleNamespace(beat=lambda what: None)
    self.mesh, self.put, self.base = mesh_lib.make(self.cfg.mesh, jax.devices()[:1]), lambda batch: (batch,), lambda: None
    self.leash, self.batch, self.leash_batch = self.cfg.practice.leash, self.cfg.copy.batch, self.cfg.practice.leash_batch
    self.replay, self.ledger, self.buffer = Replay(self.agent.remember), Ledger(), Buffer(max(self.agent.store, 1), 0.0)
    ready = not any(p.until for p in self.agent.phases)
    self.session = Session(workdir, self.cfg.seed, 1, {"phase": "practice", "done": 0, "version": 0, "ready": ready, "evals": {}})
    self.rng = self.session.rng
    self.curriculum = Curriculum(TASKS, self.rng)
    shape = shape_for(RECORDS, 5, 2, 5, 1, 1)
    self.feed = Feed(self.agent, POLICY, {RECORDS: shape}, lambda: draw(0, 0, ""), self.buffer, self.rng, self.curriculum.rate)

  def save(self, learner, snapshot=None):
    """Nothing is kept on disk."""


@pytest.fixture(scope="module")
def copied(tmp_path_factory, compile_quickly):
  """Parameters of the policy that copied presses made at random."""
  run = Run("grpo", tmp_path_factory.mktemp("copied"))
  run.facts["phase"] = "copying"
  items = demos.items(demonstrations(run.rng), POLICY)
  return jax.device_get(train.copying(run, items, run.learner(init(0), copying=True))["states"]["policy"].params)


def practise(name: str, params, workdir, spoil=None):
  """The policy's parameters after the updates of a recipe. spoil: what is done to the gathered groups before selection."""
  run = Run(name, workdir)
  learner = run.learner(jax.tree.map(jnp.array, params), copying=False)
  computers, facts = Inside([Buttons() for _ in range(64)]), run.facts
  select = (lambda groups, *rest: run.agent.select(spoil(groups), *rest)) if spoil else run.agent.select
  for done in range(run.cfg.practice.updates):
    sampler().load(Weights(learner["states"]["policy"].params, facts["version"]))
    sampling = not 0 < run.agent.offline <= done
    got = gather(
      sampler(), computers, GroupQueue(run.ledger), run.replay, select, run.curriculum.next, run.session.key, run.rng, update=done,
      version=facts["version"], groups=8, rounds=1, group_size=run.cfg.agent.group_size, max_age=2, clock=run.clock,
    ) if sampling else Gathered()  # fmt: skip
    outs = [] if sampling and run.agent.offline else train.learn(run, learner, run.updates, got, [])[0]
    for episode in (e for g in got.kept for e in g.episodes if run.agent.store):
      run.buffer.add(episode)
    facts["version"] += any(said for key, said in outs if key == "policy")
    follow(learner, done + 1, run.agent.reference)
    if not facts["ready"]:
      curves = instruments.learned(outs)
      told = curves | {"critic/updates": done + 1.0, "critic/loss_before": facts.get("critic_loss")}
      facts["ready"], facts["critic_loss"] = all(p.until(told) for p in run.agent.phases if p.until), curves.get("critic/loss")
  return jax.device_get(learner["states"]["policy"].params)


def success(params, tries=192) -> float:
  sampler().load(Weights(params, 0))
  planned = [Try(TASKS[i % len(TASKS)], f"eval{i}", 0, np.array([7, i], np.uint32)) for i in range(tries)]
  return float(np.mean([e.success for e in collect(sampler(), Inside([Buttons() for _ in range(64)]), planned)]))


def test_the_copied_policy_passes_one_try_in_two(copied):
  assert 0.4 < success(copied) < 0.6


@pytest.fixture(scope="module")
def learnt(copied, tmp_path_factory):
  """learnt(name) -> parameters after a recipe's updates, run once."""
  return functools.cache(lambda name: practise(name, copied, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_learns_which_button_to_press(name, learnt):
  assert success(learnt(name)) >= 0.9


@pytest.mark.parametrize("name", ["grpo", *(pytest.param(name, marks=pytest.mark.long) for name in ("ppo", "digirl"))])
def test_nothing_is_learnt_from_shuffled_rewards(name, copied, tmp_path):
  """The same run, but what an episode earned is handed to another episode of its update."""
  rng = np.random.default_rng(1)

  def shuffled(groups):
    episodes = [e for g in groups for e in g.episodes]
    earned = [(e.rewards, e.end, e.end_cause) for e in episodes]
    for e, i in zip(episodes, rng.permutation(len(episodes)), strict=True):
      e.rewards, e.end, e.end_cause = earned[i]
    return groups

  assert success(practise(name, copied, tmp_path, shuffled)) < 0.75


@pytest.mark.parametrize("name", ["grpo", pytest.param("digirl", marks=pytest.mark.long)])
def test_a_seed_decides_everything(name, learnt, copied, tmp_path):
  assert jax.tree.all(jax.tree.map(np.array_equal, learnt(name), practise(name, copied, tmp_path)))
