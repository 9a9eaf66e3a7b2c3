"""The dashboard's layout: the checklist's order, every curve somewhere, and readable by TensorBoard's own plugin."""

import pathlib
import re
import time

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto import event_pb2
from tensorboard.plugins.custom_scalar import layout_pb2, metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from core import layout

ROOT = pathlib.Path(__file__).resolve().parents[2]


def documented() -> set[str]:
  """Tags of the table of curves in docs/algorithms.md; `a/b`, `c` there means a/b and a/c."""
  table = (ROOT / "docs" / "algorithms.md").read_text().partition("\n# Curves")[2]
  tags = set()
  for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
    named = [n.replace("CAUSE", "all_fail") for n in re.findall(r"`([^`]+)`", row)]
    tags |= {n if "/" in n else f"{named[0].partition('/')[0]}/{n}" for n in named}
  return tags


def test_every_documented_curve_is_in_a_chart():
  tags = documented()
  assert len(tags) > 45  # the table was found and read
  charts = [c for _, section in layout.SECTIONS for c in section]
  assert [t for t in sorted(tags) if not any(c.shows(t) for c in charts)] == []
  assert not any(c.shows("reward/unheard_of") for c in charts)  # no pattern takes everything


def test_the_checklist_s_ten_items_come_first_and_in_order():
  numbers = [title.split()[0] for title, _ in layout.SECTIONS]
  assert numbers[:10] == [str(i) for i in range(1, 11)]


def test_tensorboard_reads_it_back(tmp_path):
  writer = EventFileWriter(str(tmp_path))
  writer.add_event(event_pb2.Event(wall_time=time.time(), step=0, summary=layout.summary()))
  writer.close()
  events = EventAccumulator(str(tmp_path))
  events.Reload()
  assert events.PluginTagToContent(metadata.PLUGIN_NAME).keys() == {metadata.CONFIG_SUMMARY_TAG}
  (event,) = events.Tensors(metadata.CONFIG_SUMMARY_TAG)
  read = layout_pb2.Layout()
  read.ParseFromString(event.tensor_proto.string_val[0])
  assert [c.title for c in read.category] == [title for title, _ in layout.SECTIONS]
  groups = next(c for c in read.category if c.title.startswith("4 "))
  assert list(groups.chart[0].multiline.tag) == ["^groups/all_pass$", "^groups/all_fail$", "^groups/mixed$"]
