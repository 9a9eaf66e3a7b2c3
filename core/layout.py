"""The order in which a run is read: the checklist of the lesson's field guide, as sections of charts, each a title and patterns of tags.

TensorBoard's custom-scalars page, tools/report.py and docs/reading_a_run.md follow it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as plugin
from tensorboard.util import tensor_util


class Chart(NamedTuple):
  """Curves that belong in one picture. tags: regular expressions, matched whole."""

  title: str
  tags: tuple[str, ...]

  def shows(self, tag: str) -> bool:
    return any(re.fullmatch(pattern, tag) for pattern in self.tags)


SECTIONS: tuple[tuple[str, tuple[Chart, ...]], ...] = (
  ("1 Can the computers be won?", (Chart("tries lost to the computers", ("episodes/infra_error",)),)),
  (
    "2 Is the grader right?",
    (
      Chart("practice beside held-out tasks", ("reward/success", "reward/mean", "eval/.*")),
      Chart("ended by", ("episodes/truncated", "episodes/unreadable")),
    ),
  ),
  ("3 Which tasks?", (Chart("stored successes swapped in", ("replay/.*",)), Chart("dropped, by cause", ("episodes/dropped_.*",)))),
  ("4 Which groups teach?", (Chart("groups", ("groups/all_pass", "groups/all_fail", "groups/mixed")),)),
  ("5 Is there a spread?", (Chart("spread of rewards in a group", ("groups/spread",)),)),
  (
    "6 Does the push arrive?",
    (
      Chart("loss", ("[a-z]+/loss",)),
      Chart("gradient", ("[a-z]+/grad_norm",)),
      Chart("learning rate", (".*/lr",)),
      Chart("steps refused for want of a token", ("[a-z]+/empty_steps",)),
    ),
  ),
  (
    "7 Do sampler and trainer agree?",
    (Chart("mismatch on the same weights", ("policy/mismatch_kl",)), Chart("drift over an update", ("policy/drift_kl", "policy/kl_ref"))),
  ),
  (
    "8 Band and age",
    (
      Chart("held by the band", ("policy/clipped_share",)),
      Chart("ratio", ("policy/ratio_mean",)),
      Chart("age", ("episodes/age_mean", "episodes/age_max")),
    ),
  ),
  (
    "9 Are the tries different?",
    (
      Chart("entropy, nats a token", ("policy/entropy.*", "copy/entropy")),
      Chart("different first actions", ("groups/distinct_first_actions",)),
      Chart("steps an episode", ("episodes/steps",)),
    ),
  ),
  ("10 What is it worth?", (Chart("passed", ("eval/held_out", "eval/in_domain")),)),
  ("Critics", (Chart("explained variance", (".*/explained_variance",)), Chart("pairs won", ("policy/pairs_won",)))),
  ("Alarms", (Chart("ringing", ("diagnosis/.*",)),)),
  (
    "Speed",
    (
      Chart("shares of wall time", ("time/.*",)),
      Chart("rates", ("rate/episodes_per_minute", "rate/action_tokens_per_second")),
      Chart("useful tokens", ("rate/useful_tokens",)),
      Chart("seconds, compilations", ("rate/update_seconds", "rate/compiles")),
      Chart("other rates", (r"rate/(?!episodes_per_minute|action_tokens|useful|update_s|compiles).*",)),
    ),
  ),
)


def summary() -> summary_pb2.Summary:
  """The layout as the event that TensorBoard's custom-scalars plugin reads; one a run is enough."""
  layout = layout_pb2.Layout(
    category=[
      layout_pb2.Category(
        title=title,
        chart=[layout_pb2.Chart(title=c.title, multiline=layout_pb2.MultilineChartContent(tag=[f"^{t}$" for t in c.tags])) for c in charts],
      )
      for title, charts in SECTIONS
    ]
  )
  tensor = tensor_util.make_tensor_proto(np.array(layout.SerializeToString(), dtype=object))
  value = summary_pb2.Summary.Value(tag=plugin.CONFIG_SUMMARY_TAG, tensor=tensor, metadata=plugin.create_summary_metadata())
  return summary_pb2.Summary(value=[value])
