"""DigiRL: two critics find the steps that helped, and the policy copies those and no others.

Paper: DigiRL (arXiv 2406.11896), eqs 4.1 to 4.5 and its released code; lesson chapter 2.
An instruction critic guesses a task's outcome from its words: the tries that beat it most are kept (agent.top). A step critic
guesses it from two screens and the task: of those tries the steps with a push above 1 / H are copied, with equal weight.
Differs from the paper in: H is the step limit (agent.filter_h); the policy's minibatches are drawn from kept steps alone and
averaged by token; critics are small heads over the copied policy's frozen features. agent.variant="code" takes the released
code's push: the smaller of two critics' jump, minus 0.05, plus the outcome without the factor (1 - w r), kept above 0.
"""

from __future__ import annotations

import jax.numpy as jnp
import ml_collections
import numpy as np

from agents.base import Agent, Phase, keep_all, select_scored
from core.knobs import require
from core.schema import Credit
from losses.advantages import digirl_code_credit, simplified_gae
from losses.policy import imitation_loss
from losses.reduce import token_mean
from losses.value import critic_cross_entropy, return_moments


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "name": "digirl",
      "group_size": 8,  # tries a task; nothing is compared inside, it is only what is sampled together
      "variant": "paper",  # paper (eq 4.3, threshold 1 / H) or code
      "lam": 0.5,  # how fast the outcome fades toward the first step
      "top": 0.5,  # share of the tries that the instruction filter keeps (0.1 in the paper, from a larger store)
      "filter_h": "limit",  # H of the threshold: "limit" (step limit) or "length" (the try's own length)
      "step_cost": 0.05,  # variant code only
      "store": 4000,  # steps of past tries (2000 in the paper)
      "probability": (0.001, 0.99),  # outside, a token has no gradient (released code)
      "critic_epochs": 10,  # minibatches an update, each critic (5 in the paper)
      "critic_minibatch": 128,
      "epochs": 10,  # minibatches an update, the policy (20 in the paper)
      "minibatch": 256,  # token records per optimiser step
    }
  )


def check(cfg: ml_collections.ConfigDict) -> None:
  wanted = {
    "variant": (cfg.variant in ("paper", "code"), "paper or code"),
    "lam": (0 <= cfg.lam <= 1, "a number from 0 to 1"),
    "top": (0 < cfg.top <= 1, "a share above 0, at most 1"),
    "filter_h": (cfg.filter_h in ("limit", "length"), "limit or length"),
    "step_cost": (0 <= cfg.step_cost < 1, "a chance from 0, below 1"),
    "probability": (len(cfg.probability) == 2 and 0 < cfg.probability[0] < cfg.probability[1] <= 1, "two probabilities, rising"),
  } | {k: (cfg[k] >= 1, "1 or more") for k in ("group_size", "store", "critic_epochs", "critic_minibatch", "epochs", "minibatch")}
  require("agent", cfg, wanted)


def step_push(cfg, value_H1: np.ndarray, reward: float) -> np.ndarray:
  """f32 [H] from the step critic's values before each step and on the final screen [H + 1]."""
  H = len(value_H1) - 1
  if cfg.variant == "paper":
    return np.asarray(simplified_gae(value_H1[:H], reward, cfg.lam))
  push = digirl_code_credit(value_H1[:H], reward, cfg.lam, step_cost=cfg.step_cost, final_value=value_H1[H])
  return np.clip(np.asarray(push), 0.0, 1.0)


def make(cfg: ml_collections.ConfigDict) -> Agent:
  check(cfg)

  def credit(group, scores=None):
    """group: everything stored, as one. A kept step has push 1, since kept steps are copied with equal weight."""
    if scores is None:
      raise ValueError("digirl needs step_value and task_value of every episode before credit")
    beat_E = np.array([e.success - np.clip(s.task_value, 1e-4, 1 - 1e-4) for e, s in zip(group.episodes, scores, strict=True)])
    lowest = np.quantile(beat_E, 1 - cfg.top) if len(beat_E) else 0.0
    credits = []
    for episode, s, beat in zip(group.episodes, scores, beat_E, strict=True):
      push_H = step_push(cfg, s.step_value, float(episode.success))
      horizon = (episode.step_limit or len(push_H)) if cfg.filter_h == "limit" else len(push_H)
      keep_H = (push_H > (1.0 / horizon if cfg.variant == "paper" else 0.0)) & (beat >= lowest)
      credits.append(Credit(keep_H.astype(np.float32), keep_H))
    return credits

  def policy_loss(scores, batch):
    mask = batch.is_action.reshape(-1)
    total = token_mean(imitation_loss(scores.logp.reshape(-1), mask, batch.advantage.reshape(-1), clip=tuple(cfg.probability)), mask)
    return total, {"policy/entropy": token_mean(scores.entropy.reshape(-1), mask)}

  critic_phase = lambda key: Phase(key, critic_loss(key), cfg.critic_epochs, cfg.critic_minibatch, data="store", drawn=True)
  policy = Phase("policy", policy_loss, cfg.epochs, cfg.minibatch, data="store", drawn=True)
  critics = {"instruction": "text", "critic": "frames"}
  return Agent(frozenset({"step_value", "task_value"}), select_scored, credit, keep_all,
               (critic_phase("instruction"), critic_phase("critic"), policy), critics=critics, store=cfg.store)  # fmt: skip


def critic_loss(key: str):
  """Binary cross-entropy of every head on how the step's episode ended; curves under the critic's own name."""

  def loss(scores, batch):
    logit = scores.value_logit
    entropy = sum(critic_cross_entropy(logit[:, k], batch.label) for k in range(logit.shape[1]))
    total = token_mean(entropy, batch.valid)
    guess = 1.0 / (1.0 + jnp.exp(-logit.min(axis=-1)))
    return total, {f"{key}/loss": total, f"{key}/explained_variance": return_moments(guess, batch.label, batch.valid)}

  return loss
