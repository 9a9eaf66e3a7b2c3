import io
import json
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from core import metrics as metrics_module
from core.find import ROOT
from core.metrics import SHARES, Alarms, CompileCounter, Metrics, Progress, Timers, read_jsonl


def curves(path):
  events = EventAccumulator(str(path), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
  events.Reload()
  return {t: [(e.step, round(e.value, 5)) for e in events.Scalars(t)] for t in events.Tags()["scalars"]}


def test_each_update_is_one_point_and_one_line(tmp_path):
  with Metrics(tmp_path) as m:
    for i in range(3):
      row = m.write(i, {"reward/success": i / 4, "policy/lr": np.float32(0.5), "episodes/steps": jnp.int32(7), "a": True})
  assert row == {"reward/success": 0.5, "policy/lr": 0.5, "episodes/steps": 7, "a": 1, "diagnosis/nonfinite": 0}
  assert [type(row[k]) for k in ("reward/success", "episodes/steps", "a")] == [float, int, int]
  rows = read_jsonl(tmp_path / "metrics.jsonl")
  assert [r["update"] for r in rows] == [0, 1, 2] and rows[2] == {"update": 2} | row
  assert curves(tmp_path)["reward/success"] == [(0, 0.0), (1, 0.25), (2, 0.5)]
  assert set(curves(tmp_path)) == set(row)


def test_resumed_run_shows_every_update_once_with_the_new_value(tmp_path):
  with Metrics(tmp_path) as m:
    for i in range(6):
      m.write(i, {"x": i})
      m.image("screen", np.full((2, 2, 3), i, np.uint8), i)
  with Metrics(tmp_path, start_update=4) as m:
    for i in range(4, 8):
      m.write(i, {"x": 10 * i})
  expected = [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60), (7, 70)]
  assert curves(tmp_path)["x"] == expected
  assert [(r["update"], r["x"]) for r in read_jsonl(tmp_path / "metrics.jsonl")] == expected
  events = EventAccumulator(str(tmp_path), size_guidance={"images": 0})
  events.Reload()
  assert [e.step for e in events.Images("screen")] == [0, 1, 2, 3]


def test_what_was_written_is_on_disk_before_the_next_update(tmp_path):
  code = """
import os, sys
from core.metrics import Metrics
m = Metrics(sys.argv[1])
for i in range(5):
  m.write(i, {"x": i})
os.kill(os.getpid(), 9)
"""
  env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, timeout=60).returncode == -9
  assert [s for s, _ in curves(tmp_path)["x"]] == [r["update"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_a_line_cut_by_a_kill_is_dropped_on_resume(tmp_path):
  with Metrics(tmp_path) as m:
    for i in range(3):
      m.write(i, {"x": i})
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(path.read_bytes() + b'{"update": 3, "x"')
  assert [r["update"] for r in read_jsonl(path)] == [0, 1, 2]
  Metrics(tmp_path, 9).close()
  assert [json.loads(s)["update"] for s in path.read_text().splitlines()] == [0, 1, 2]
  path.write_bytes(path.read_bytes() + b'{"update": 3, "x": 3}')  # whole, but without its end: nobody saw it
  Metrics(tmp_path, 9).close()
  assert [r["update"] for r in read_jsonl(path)] == [0, 1, 2] and path.read_bytes().endswith(b"\n")
  assert not list(tmp_path.glob(".*"))


def test_nan_is_null_and_counted_and_never_in_a_curve(tmp_path):
  with Metrics(tmp_path) as m:
    m.write(0, {"x": float("nan"), "y": 1.0})
    m.write(1, {"x": jnp.array(-jnp.inf), "y": np.float32("inf")})
    assert m.write(2, {"x": 1.0}) == {"x": 1.0, "diagnosis/nonfinite": 3}
  rows = read_jsonl(tmp_path / "metrics.jsonl")
  assert [(r["x"], r.get("y"), r["diagnosis/nonfinite"]) for r in rows] == [(None, 1.0, 1), (None, None, 3), (1.0, None, 3)]
  assert curves(tmp_path) == {"x": [(2, 1.0)], "y": [(0, 1.0)], "diagnosis/nonfinite": [(0, 1), (1, 3), (2, 3)]}
  with Metrics(tmp_path, 1) as m:  # the count goes on from the row before the resume point
    assert m.write(1, {"x": np.nan})["diagnosis/nonfinite"] == 2


def test_sixty_tags_and_no_more(tmp_path):
  with Metrics(tmp_path) as m:
    m.write(0, {f"t{i}": i for i in range(59)})  # and diagnosis/nonfinite
    m.write(1, {"t0": 1})
    with pytest.raises(ValueError, match=r"61 scalar tags with one/more, at most 60"):
      m.write(2, {"one/more": 1})
    m.write(2, {"t0": 2})  # the refused row left nothing behind
  assert [r["update"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize("update", [3, 2, -1, 4.5])
def test_updates_are_written_once_and_in_order(tmp_path, update):
  with Metrics(tmp_path, 3) as m:
    m.write(3, {"x": 1})
    with pytest.raises(ValueError, match="each update once, in order"):
      m.write(update, {"x": 1})
  with Metrics(tmp_path, 3) as m, pytest.raises(ValueError, match="update 2 after update 2"):
    m.write(2, {"x": 1})


@pytest.mark.parametrize("value", ["1.0", None, [1, 2], np.zeros(2), np.zeros(0), 1j, {}])
def test_a_metric_is_one_number(tmp_path, value):
  with Metrics(tmp_path) as m, pytest.raises(ValueError, match="metric reward/mean is .* wanted one number"):
    m.write(0, {"reward/mean": value})


def test_a_bfloat16_metric_is_a_number(tmp_path):
  with Metrics(tmp_path) as m:
    assert m.write(0, {"x": jnp.ones((1,), jnp.bfloat16)})["x"] == 1.0


@pytest.mark.parametrize("tag", ["", "a b", "/a", "a/", "a//b", "update", "a\n", 3])
def test_odd_tags_are_refused(tmp_path, tag):
  with Metrics(tmp_path) as m:
    for write in (lambda: m.write(0, {tag: 1}), lambda: m.text(tag, "x"), lambda: m.image(tag, np.zeros((2, 2, 3), np.uint8), 0)):
      with pytest.raises(ValueError, match="metric tag"):
        write()


def test_pictures_and_texts_can_be_read_back(tmp_path):
  pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
  with Metrics(tmp_path) as m:
    m.image("screens/first", pixels, 7)
    m.text("config", "    lr: 0.1  # häß", 3)
  events = EventAccumulator(str(tmp_path))
  events.Reload()
  (shown,) = events.Images("screens/first")
  assert (shown.step, shown.width, shown.height) == (7, 6, 4)
  np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(shown.encoded_image_string))), pixels)
  (text,) = events.Tensors("config")
  assert text.step == 3 and text.tensor_proto.string_val[0].decode() == "    lr: 0.1  # häß"
  assert events.SummaryMetadata("config").plugin_data.plugin_name == "text"


def test_other_hosts_write_nothing_but_check_the_same(tmp_path):
  with Metrics(tmp_path / "x", active=False) as m:
    m.write(0, {"x": 1})
    m.image("i", np.zeros((2, 2, 3), np.uint8), 0)
    m.text("t", "x")
    with pytest.raises(ValueError):
      m.write(0, {"x": 1})
  assert list(tmp_path.iterdir()) == []


def test_closing_twice_is_fine(tmp_path):
  m = Metrics(tmp_path)
  m.close()
  m.close()
  m.flush()


def test_three_thousand_updates_are_three_thousand_lines(tmp_path, monkeypatch):
  with Metrics(tmp_path) as m:
    for i in range(3000):
      m.write(i, {"x": i})
  assert [r["x"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(3000))
  assert len(curves(tmp_path)["x"]) == 3000


def test_no_tensorflow_or_torch_is_loaded():
  code = "import sys, core.metrics; assert not {'tensorflow', 'torch'} & set(sys.modules)"
  subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=60)


# ---- timers


class Clock:
  now = 100.0

  def __call__(self):
    return self.now


def test_shares_of_wall_time():
  clock = Clock()
  t = Timers(clock)
  with t("sampling"):
    clock.now += 3
    with t("environments"):  # inside sampling: not counted there
      clock.now += 2
    clock.now += 1
  with t("training"):
    clock.now += 2
  clock.now += 2
  shares = t.shares()
  assert list(shares) == [f"time/{n}" for n in SHARES]
  assert shares == {
    "time/environments": 0.2,
    "time/sampling": 0.4,
    "time/training": 0.2,
    "time/publish": 0.0,
    "time/waiting": 0.0,
  }
  clock.now += 1
  assert set(t.shares().values()) == {0.0}  # begins anew


def test_a_timer_within_itself_is_not_counted_twice():
  clock = Clock()
  t = Timers(clock)
  with t("waiting"), t("waiting"):
    clock.now += 4
  assert t.shares()["time/waiting"] == 1.0


def test_an_open_section_counts_up_to_the_reading():
  clock = Clock()
  t = Timers(clock)
  with t("waiting"):
    clock.now += 4
    assert t.shares()["time/waiting"] == 1.0
    clock.now += 1
  clock.now += 1
  assert t.shares()["time/waiting"] == 0.5


def test_seconds_measured_elsewhere_are_taken_out_of_the_open_section():
  clock = Clock()
  t = Timers(clock)
  with t("sampling"):
    clock.now += 4
    t.add("environments", 3)
  t.add("publish", 1)
  clock.now += 4
  shares = t.shares()
  assert (shares["time/sampling"], shares["time/environments"], shares["time/publish"]) == (0.125, 0.375, 0.125)


def test_threads_are_added_and_do_not_stop_each_other():
  clock = Clock()
  t = Timers(clock)
  inside, leave = threading.Event(), threading.Event()

  def sample():
    with t("sampling"):
      inside.set()
      leave.wait(20)

  thread = threading.Thread(target=sample)
  thread.start()
  inside.wait(20)
  with t("training"):
    clock.now += 4
  leave.set()
  thread.join()
  assert (t.shares()["time/sampling"], t._open) == (1.0, {})


def test_a_section_left_by_an_error_is_closed():
  clock = Clock()
  t = Timers(clock)
  with pytest.raises(KeyError), t("training"):
    clock.now += 1
    raise KeyError
  clock.now += 1
  assert t.shares()["time/training"] == 0.5


def test_an_unknown_timer_says_which_there_are():
  t = Timers()
  for use in (lambda: t("trainning").__enter__(), lambda: t.add("trainning", 1)):
    with pytest.raises(ValueError, match=r"no timer 'trainning' \(did you mean training\?\); there are: environments, sampling"):
      use()


def test_compilations_are_counted():
  with CompileCounter() as counter:
    f = jax.jit(lambda x: x * 3 + 1)
    x, y = np.ones(3, np.float32), np.ones(5, np.float32)
    f(x)
    first = counter.take()
    f(x)
    assert first == 1 and counter.take() == 0 and counter.seconds > 0
    f(y)
    assert counter.take() == 1 and counter.total == 2
  jax.jit(lambda x: x * 5)(x)
  assert counter.total == 2  # closed: counts no more


# ---- the printed line


def test_progress_line():
  clock, lines = Clock(), []
  p = Progress("update", 40, done=10, out=lines.append, clock=clock)
  clock.now += 26.0
  p.line(11, success=0.314, all_equal=0.45, entropy=1.316, episodes_a_minute=84.4, loss=0.00123456)
  assert lines == ["update 11/40  success 31%  all-equal 45%  entropy 1.32  84 episodes/min  loss 0.00123  0:12:34 left"]


def test_progress_leaves_out_what_is_not_known_and_forgets_the_slow_first_update():
  clock = Clock()
  p = Progress("copying", 100, out=lambda text: None, clock=clock)
  assert p.line(0, success=None, entropy=float("nan"), note="") == "copying 0/100"
  assert p.line(0, note="enough groups", loss=1) == "copying 0/100  enough groups  loss 1"
  clock.now += 600  # compiles
  p.line(1)
  for i in range(2, 5):
    clock.now += 2
    text = p.line(i)
  assert text == "copying 4/100  0:03:12 left"
  clock.now += 7200
  assert p.line(104).endswith("0:00:00 left")


def test_time_left_follows_the_last_ten_updates():
  clock = Clock()
  p = Progress("update", 100, out=lambda text: None, clock=clock)
  for i in range(1, 41):
    clock.now += 60 if i <= 30 else 1
    text = p.line(i)
  assert text == "update 40/100  0:01:00 left"


def test_time_left_counts_updates_when_lines_are_rare():
  clock = Clock()
  p = Progress("copying", 100, out=lambda text: None, clock=clock)
  clock.now += 50
  assert p.line(50) == "copying 50/100  0:00:50 left"


def test_slow_work_says_how_far_it_is_between_its_lines():
  clock, lines = Clock(), []
  p = Progress("copying", 100, out=lines.append, clock=clock)
  for done in range(1, 8):  # at 12, 24, 36 ... seconds: 30 have passed at 36, and since then at 72
    clock.now += 12
    p.seldom(done)
  assert lines == ["copying 3/100  0:19:24 left", "copying 6/100  0:18:48 left"]  # (100 - 3) x 12 s, (100 - 6) x 12 s


# ---- alarms


def rung(rows, **cfg):
  lines = []
  alarms = Alarms(cfg, out=lines.append)
  tags = [alarms.check(i, row) for i, row in enumerate(rows)]
  return tags, lines


@pytest.mark.parametrize("now, name", [(2.2, "entropy_high"), (0.2, "entropy_low")])
def test_entropy_alarms_both_ways(now, name):
  tags, lines = rung([{"policy/entropy": e} for e in [1.1] * 6 + [now] * 3])
  assert [t[f"diagnosis/{name}"] for t in tags] == [0] * 6 + [1] * 3
  assert sum(sum(t.values()) for t in tags) == 3
  assert len(lines) == 1 and lines[0].startswith(f"ALARM {name} at update 6: entropy {now}")


def test_entropy_is_heard_in_the_first_updates_too():
  tags, _ = rung([{"policy/entropy": e} for e in [1.1, 0.15]])  # under a fifth of the first, not of the median of both
  assert tags[1]["diagnosis/entropy_low"] == 1


def test_what_was_sampled_is_heard_before_what_was_trained_on():
  """A policy that falls within its first update: its many steps' mean is low from the start, what it sampled is not; later all groups
  are equal and nothing is trained on, so that one of the curves ends."""
  tags, lines = rung([{"policy/entropy_sampled": 1.0, "policy/entropy": 0.1}, {"policy/entropy_sampled": 0.15}])
  assert [t["diagnosis/entropy_low"] for t in tags] == [0, 1] and "entropy 0.15 is under 0.2 of its start 1" in lines[0]


def test_a_fall_in_the_first_updates_does_not_become_the_start():
  tags, _ = rung([{"policy/entropy": e} for e in [1.0] + [0.1] * 9])
  assert [t["diagnosis/entropy_low"] for t in tags] == [0] + [1] * 9


def test_a_halved_entropy_is_no_collapse():
  tags, lines = rung([{"policy/entropy": e} for e in [1.1] * 6 + [0.5] * 3])
  assert not lines and not any(sum(t.values()) for t in tags)


def test_a_slow_collapse_is_measured_from_the_start():
  tags, _ = rung([{"policy/entropy": e} for e in [1.1] * 5 + [0.5] * 20 + [0.3] * 20 + [0.2]])
  assert [t["diagnosis/entropy_low"] for t in tags] == [0] * 45 + [1]


def test_one_odd_first_update_does_not_set_the_start():
  tags, _ = rung([{"policy/entropy": e} for e in [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
  assert tags[-1]["diagnosis/entropy_high"] == 0


def test_a_sure_policy_may_double_a_tiny_entropy():
  tags, lines = rung([{"policy/entropy": e} for e in [0.05] * 5 + [0.15, 0.34]])
  assert not lines and not any(t["diagnosis/entropy_high"] for t in tags)


@pytest.mark.parametrize(
  "name, quiet, loud",
  [
    ("all_equal", {"groups/all_pass": 0.4, "groups/all_fail": 0.4}, {"groups/all_pass": 0.5, "groups/all_fail": 0.4}),
    ("infra_error", {"episodes/infra_error": 0.1}, {"episodes/infra_error": 0.2}),
  ],
)
def test_shares_alarm_on_their_mean_over_the_window(name, quiet, loud):
  tags, lines = rung([loud] * 4 + [quiet] * 5 + [loud] * 5)
  heard = [t[f"diagnosis/{name}"] for t in tags]
  assert heard[:4] == [0] * 4 and heard[8] == 0 and heard[-1] == 1
  assert heard[4] == 1  # the first five: four loud ones
  assert all(line.startswith(f"ALARM {name} at update") for line in lines) and len(lines) == 2


@pytest.mark.parametrize("name, tag, quiet, loud", [("mismatch", "policy/mismatch_kl", 0.01, 0.011), ("age", "episodes/age_max", 4, 5)])
def test_mismatch_and_age_alarm_at_once(name, tag, quiet, loud):
  tags, lines = rung([{tag: quiet}, {tag: loud}, {tag: loud}, {tag: quiet}, {tag: loud}])
  assert [t[f"diagnosis/{name}"] for t in tags] == [0, 1, 1, 0, 1]
  assert [line.split(":")[0] for line in lines] == [f"ALARM {name} at update 1", f"ALARM {name} at update 4"]


def test_all_tags_are_there_from_the_first_update_even_without_data():
  tags, lines = rung([{}, {"policy/entropy": None, "policy/mismatch_kl": float("nan")}])
  assert tags[0] == tags[1] == {f"diagnosis/{n}": 0 for n in Alarms.NAMES} and not lines


@pytest.mark.parametrize("name", Alarms.NAMES)
def test_every_alarm_can_be_switched_off(name):
  row = {
    "groups/all_pass": 1.0,
    "groups/all_fail": 0.0,
    "episodes/infra_error": 1.0,
    "policy/mismatch_kl": 1.0,
    "episodes/age_max": 99,
  }
  entropy = 1e-6 if name == "entropy_low" else 50.0
  rows = [row | {"policy/entropy": 1.0}] * 6 + [row | {"policy/entropy": entropy}]
  assert rung(rows)[0][-1][f"diagnosis/{name}"] == 1
  assert rung(rows, **{name: 0})[0][-1][f"diagnosis/{name}"] == 0


def test_an_unknown_knob_is_an_error():
  with pytest.raises(ValueError, match=r"no alarm knob 'entropy_lo' \(did you mean entropy_low\?\)"):
    Alarms({"entropy_lo": 0})


def test_alarms_go_on_after_a_resume():
  rows = [{"policy/entropy": e, "episodes/infra_error": 0.2} for e in [1.1, 1.2, 1.0, 1.1, 1.1, 0.1, 0.1]]
  straight, _ = rung(rows)
  first, lines = Alarms(out=lambda text: None), []
  for i, row in enumerate(rows[:6]):
    first.check(i, row)
  second = Alarms(out=lines.append)
  second.restore(json.loads(json.dumps(first.state())))
  assert second.check(6, rows[6]) == straight[6] and straight[6]["diagnosis/entropy_low"] == 1
  assert lines == []  # it was ringing before


def test_defaults_are_plain_values():
  assert set(metrics_module.defaults()) == {*Alarms.NAMES, "window", "learnt"}
  assert all(type(v) in (int, float) for v in metrics_module.defaults().values())


def test_tries_that_nearly_all_pass_ring_no_alarm_for_agreeing():
  """The same rows ring where the tries fail (success 0.2) and stay silent where they pass (0.95): nothing left to learn."""
  for success, rings in ((0.2, 1), (0.95, 0)):
    said = []
    alarms = Alarms(out=said.append)
    for update in range(12):
      entropy = 1.0 if update < 6 else 0.1  # a tenth of its start, under the limit of a fifth
      row = {"policy/entropy": entropy, "groups/all_pass": 0.9, "groups/all_fail": 0.05, "reward/success": success}
      last = alarms.check(update, row)
    assert (last["diagnosis/entropy_low"], last["diagnosis/all_equal"], bool(said)) == (rings, rings, bool(rings))
