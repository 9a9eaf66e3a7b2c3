"""From gathered groups and stored episodes to the minibatches of a phase: scored, credited, drawn or dealt, and packed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing

import numpy as np

from core import hosts
from core.pack import PackItem, PackShape, arrange, bins, episode_items, number, shape_for, step_batch, to_batch
from core.schema import Credit, Episode, EpisodeScores, Group, Task
from core.state import Batch, StepBatch
from models.base import Policy
from rollout import scoring
from rollout.buffer import Buffer, draw_steps
from rollout.gather import Gathered

EXTRAS = ("ref_logp", "old_logp", "old_value_logit", "return_")  # fields of a batch that some losses read


def sizes(agent, micro: int, others: Iterable[int] = ()) -> set[int]:
  """Records in this process's share of a micro-batch of every phase that packs the policy's records, and `others`: copying's."""
  minibatches = {p.minibatch for p in agent.phases if p.data == "batch" or p.params_key == "policy"}
  return {hosts.share(n // micro, "agent.minibatch / practice.micro_batches") for n in minibatches} | set(others)


def shapes(
  policy: Policy, sizes: Iterable[int], tasks: Iterable[Task], row_tokens: int, blocks: int = 1, tokens_multiple: int = 1,
  images_multiple: int = 1,
) -> dict[int, PackShape]:  # fmt: skip
  """The packed shape of each minibatch size. tasks: all there are, whose limits say how many steps an episode may have. A record of a
  policy with several screens holds as many steps, one with all screens the whole episode. blocks and multiples: see core.pack.shape_for."""
  limit = max(task.limits.steps for task in tasks)
  longest, steps = policy.max_prompt + policy.max_action, min(policy.screens or limit, limit)
  images = min(steps, policy.max_prompt // policy.tokens_per_image) if policy.tokens_per_image else 0
  return {
    n: shape_for(
      n, longest=longest, most_actions=min(longest, steps * policy.max_action), row_tokens=row_tokens, images_per_record=images,
      tokens_per_image=policy.tokens_per_image, steps_per_record=steps, blocks=blocks, tokens_multiple=tokens_multiple,
      images_multiple=images_multiple, axes=policy.axes,
    ) for n in sizes
  }  # fmt: skip


class Feed:
  """What a phase of `agent` is fed with. shapes: the one packed shape of each minibatch size; blank: makes an image for
  places that have none, when first wanted, as a learner's features take parameters; ask: name of a need -> fn(batch)
  under today's parameters, given anew at every call of `steps`; rate({task: value}) hears the step critic's first guesses of
  fresh tries; micro: micro-batches an optimiser step."""

  def __init__(
    self, agent, policy: Policy, shapes: Mapping[int, PackShape], blank: Callable[[], np.ndarray], buffer: Buffer, rng: np.random.Generator,
    rate: Callable, micro: int = 1,
  ):  # fmt: skip
    self.agent, self.policy, self.shapes, self._blank = agent, policy, shapes, blank
    self.buffer, self.rng, self.rate, self.micro = buffer, rng, rate, micro
    self.now = 0  # the trainer's version

  @functools.cached_property
  def blank(self) -> np.ndarray:
    return self._blank()

  def batch(self, items: list[PackItem], size: int) -> Batch:
    shape = self.shapes[size]
    return dataclasses.replace(to_batch(items, arrange(items, shape), shape, self.blank), now=np.int32(self.now))

  def draw(self, items: list[PackItem], size: int) -> Batch:
    """`size` records drawn with replacement, as a batch."""
    return self.batch(number([[items[i]] for i in self.rng.integers(len(items), size=size)]), size)

  def steps(self, phase, got: Gathered, ask: Mapping[str, Callable]) -> Iterable[tuple[Batch | StepBatch, ...]]:
    """The optimiser steps of a phase, each as its micro-batches. Every process makes as many: who has fewer gives padding."""
    size, self.now = hosts.share(phase.minibatch // self.micro, "agent.minibatch / practice.micro_batches"), got.version
    steps = self._steps(phase, got, ask, size)
    return steps if hosts.alone() else self._level(list(steps), size)

  def _level(self, steps: list[tuple[Batch, ...]], size: int) -> list[tuple[Batch, ...]]:
    """The steps with as many of padding after them as the process with most has more."""
    extras = [name for name in EXTRAS if steps and getattr(steps[0][0], name) is not None]
    said = hosts.everyone([len(steps), extras])
    blank, most = self.batch([], size), max(count for count, _ in said)
    filled = next((names for count, names in said if count), [])
    blank = dataclasses.replace(blank, **{name: np.zeros(blank.tokens.shape, np.float32) for name in filled})
    return steps + [(blank,) * self.micro] * (most - len(steps))

  def _steps(self, phase, got: Gathered, ask: Mapping[str, Callable], size: int) -> Iterator[tuple[Batch | StepBatch, ...]]:
    stored = [dataclasses.replace(e, replayed=True) for e in self.buffer.episodes()]
    fresh = [e for g in got.kept for e in g.episodes]
    if not fresh + stored and hosts.alone():  # other processes may have some, and all score together
      return
    if phase.data == "store" and phase.params_key != "policy":
      for _ in range(phase.epochs):
        yield tuple(self.draw_steps(fresh + stored, size) for _ in range(self.micro))
      return
    together = [Group("store", "", fresh + stored)] if fresh + stored else []
    parts = self.credited(together if phase.data == "store" else got.kept, ask)
    if phase.drawn:
      items = [item for _, items in parts for item in items if (item.record.is_action & item.learn).any()]
      for _ in range(phase.epochs if items else 0):
        yield tuple(self.draw(items, size) for _ in range(self.micro))
      return
    bundles = self.pairs(parts) if phase.pairs else [[items] for _, items in parts if items]
    for _ in range(phase.epochs if bundles else 0):
      yield from self.deal(bundles, size)

  def deal(self, bundles: list[list[list[PackItem]]], size: int) -> Iterator[tuple[Batch, ...]]:
    """One pass over bundles of episodes in random order; an episode never straddles two micro-batches."""
    dealt = [self.batch(items, size) for items in bins(bundles, size, self.rng)]
    empty = lambda b: dataclasses.replace(b, is_action=np.zeros_like(b.is_action), episode_valid=np.zeros_like(b.episode_valid))
    dealt += [empty(dealt[-1])] * (-len(dealt) % self.micro)
    yield from zip(*[iter(dealt)] * self.micro, strict=True)

  def credited(self, groups: list[Group], ask: Mapping[str, Callable]) -> list[tuple[Episode, list[PackItem]]]:
    """Every episode of the groups with its token records, their push on them and what the loss reads beside it."""
    size = min(self.shapes)
    needs, judged, credits = bool(self.agent.needs), [], []
    for _ in range(hosts.most(len(groups)) - len(groups) if needs else 0):
      scoring.judge([], self.policy, self.shapes[size], self.blank, ask, size)
    for group in groups:
      mine = scoring.judge(group.episodes, self.policy, self.shapes[size], self.blank, ask, size) if needs else None
      if "step_value" in ask:
        self.rate({e.task_id: float(s.step_value[0]) for e, s in zip(group.episodes, mine, strict=True) if not e.replayed})
      judged += mine or [None] * len(group.episodes)
      credits += self.agent.credit(group, mine)
    episodes, out = [e for group in groups for e in group.episodes], []
    if self.agent.rescale is not None:
      credits = self.agent.rescale(episodes, credits)
    for episode, credit, score in zip(episodes, credits, judged, strict=True):
      episode.advantage = float(np.mean(credit.advantage))
      told = [{"advantage": float(a)} for a in credit.advantage]  # for the page that shows a step
      if score is not None and score.step_value is not None:
        told = [t | {"value": float(np.ravel(v)[0])} for t, v in zip(told, score.step_value)]
        episode.notes = episode.notes | {"final_value": float(np.ravel(score.step_value[len(episode.steps)])[0])}
      episode.steps = [dataclasses.replace(s, notes=s.notes | t) for s, t in zip(episode.steps, told)]  # a stored try shares its steps
      out.append((episode, self.items(episode, credit, score)))
    return out

  def items(self, episode: Episode, credit: Credit, score: EpisodeScores | None) -> list[PackItem]:
    rename = {"value_logit": "old_value_logit"}
    extras = [{rename.get(k, k): v for k, v in r.items()} for r in score.records] if score and score.records else None
    return episode_items(episode, credit, self.agent.keep(credit), self.policy.positions, self.policy.image, extras)

  def draw_steps(self, episodes: list[Episode], size: int) -> StepBatch:
    """Steps of the episodes with how they ended, every step as likely as any other: what a critic of steps learns from."""
    pairs, words, labels = [], [], []
    for episode, h in draw_steps(episodes, self.rng, size):
      pairs.append(tuple(self.policy.image(episode.steps[k].screen.pixels) for k in (max(h - 1, 0), h)))
      words.append(scoring.goal_tokens(episode))
      labels.append(float(episode.success))
    return step_batch(pairs, words, labels, size, self.policy.max_goal)

  def start_values(self, tasks: list[Task], make_env: Callable, ask: Mapping[str, Callable]) -> dict[str, float]:
    """The step critic's value of each task's first screen: what decides whether a new task is worth practising.
    make_env(clean) -> an environment, which is closed again."""
    pairs, words = [], []
    with closing(make_env(True)) as env:
      for task in tasks:
        obs, _ = env.reset(options={"task": task})
        prompt = self.policy.prompt(obs["goal"], [obs["screenshot"]], obs["text"])
        pairs.append((prompt.images[-1], prompt.images[-1]))
        words.append(prompt.tokens[: prompt.image_place[0]])
    values = scoring.values_of(pairs, words, ask["step_value"], min(self.shapes), self.policy.max_goal)
    return {task.id: float(v) for task, v in zip(tasks, values, strict=True)}

  def pairs(self, parts: list[tuple[Episode, list[PackItem]]]) -> list[list[list[PackItem]]]:
    """Bundles (a pass, a fail) of one group, every pass and every fail at most once, in random company."""
    by_group: dict[str, tuple[list, list]] = {}
    for episode, items in parts:
      by_group.setdefault(episode.group, ([], []))[0 if episode.success else 1].append(items)
    out = []
    for passed, failed in by_group.values():
      n = min(len(passed), len(failed))
      chosen = [[side[i] for i in self.rng.permutation(len(side))[:n]] for side in (passed, failed)]
      out += [[good, bad] for good, bad in zip(*chosen, strict=True)]
    return out
