import json
import shutil
import sqlite3
import threading
import tracemalloc

import numpy as np
import pytest

from core.schema import Action, End, Episode, Screen, Step, TokenRecord, Unreadable
from core.screens import decode_png
from rollout.store import EpisodeStore, read_trajectories


def screen(i):
  return Screen.of(np.full((4, 6, 3), i, np.uint8))


def episode(task="buy/cable", group="u3.g1", try_index=0, screens=(0, 1), success=1.0, **changes):
  tap = Action("tap", {"x": 3, "y": 1}, {"x": 0.5, "y": 0.25}, "phone", thought="hm")
  steps = [Step(screen(i), f"tap {i}", tap, 2, (0.5, 0.25), (3, 1), 0.5, 0.25, {"popup": "corner"}) for i in screens[:-1]]
  steps.append(Step(screen(screens[-1]), "häß?", Unreadable("no action"), 1))
  n = 2 + 3 * len(steps)  # a prompt of two, then for each step one token of the screen and two of the agent
  step = np.array([0, 0] + [h for h in range(len(steps)) for _ in range(3)], np.int32)
  is_action = np.array([False, False] + [False, True, True] * len(steps))
  logp = np.where(is_action, -np.arange(n) / 3, 0).astype(np.float32)
  record = TokenRecord(
    np.arange(10, 10 + n, dtype=np.int32),
    is_action,
    logp,
    np.where(is_action, 40 + step, -1).astype(np.int32),
    step,
    np.zeros(0, np.int32),
    np.zeros(0, np.int32),
  )
  e = Episode(
    task,
    group,
    try_index,
    11,
    steps,
    End.TERMINATED,
    "agent",
    {"success": success, "length": -0.25},
    [record],
    goal="buy a cable",
    family="shop",
    checker="shop/1",
    partial=0.5,
    final_screen=screen(9),
    notes={"host": "h1"},
  )
  for name, value in changes.items():
    setattr(e, name, value)
  return e


def lost():
  return episode(group="u3.g2", end=End.INFRA_ERROR, end_cause="BootTimeout", rewards={})


@pytest.fixture
def store(tmp_path):
  with EpisodeStore(tmp_path / "episodes") as s:
    yield s


def test_an_episode_comes_back_with_its_pictures(store):
  e = episode(advantage=1.5, step_limit=14)
  back = store.load(store.add(e, 3))
  for name in (
    "task_id",
    "group",
    "try_index",
    "seed",
    "end",
    "end_cause",
    "rewards",
    "goal",
    "family",
    "checker",
    "partial",
    "advantage",
    "replayed",
    "notes",
    "step_limit",
  ):
    assert getattr(back, name) == getattr(e, name), name
  assert back.end is End.TERMINATED and back.final_screen.ref == screen(9).ref and back.records == []
  for got, put in zip(back.steps, e.steps, strict=True):
    np.testing.assert_array_equal(got.screen.pixels, put.screen.pixels)
    assert (got.text, got.action, got.agent_tokens, got.raw_point, got.point) == (
      put.text,
      put.action,
      put.agent_tokens,
      put.raw_point,
      put.point,
    )
    assert (got.think_seconds, got.env_seconds) == (put.think_seconds, put.env_seconds)
  assert back.steps[0].notes["popup"] == "corner"
  assert back.steps[1].notes["tokens"] == [16, 17] and back.steps[1].notes["version"] == [41, 41]
  assert back.steps[1].notes["logp"] == [float(np.float32(-6 / 3)), float(np.float32(-7 / 3))]


def test_the_row_says_what_people_look_for(store):
  store.add(episode(), 3)
  (row,) = store.query()
  expected = {
    "group_id": "u3.g1",
    "at_update": 3,
    "success": True,
    "reward": 0.75,
    "policy_version": 40,
    "steps": 2,
    "agent_tokens": 3,
    "seconds": 0.75,
    "rewards": {"success": 1.0, "length": -0.25},
    "replayed": False,
  }
  assert {k: row[k] for k in expected} == expected


def test_an_infra_error_has_no_score(store):
  store.add(lost(), 3)
  (row,) = store.query()
  assert (row["success"], row["reward"], row["end"], row["end_cause"]) == (None, None, "infra_error", "BootTimeout")
  assert list(store.query(success=False)) == [] and len(list(store.query(success=None))) == 1


@pytest.mark.parametrize("changes", [{"rewards": {}}, {"rewards": {"length": 1.0}}, {"end": End.INFRA_ERROR}])
def test_a_score_and_an_infra_error_exclude_each_other(store, changes):
  with pytest.raises(ValueError, match="an infra error has none, every other end has 'success'"):
    store.add(episode(**changes), 3)
  assert len(store) == 0


def test_pictures_are_written_once_and_ids_are_never_paths(store, tmp_path):
  for i in range(3):
    store.add(episode(task="../../etc/x; DROP TABLE episodes", group="/tmp/../g", try_index=i, screens=(0, 0, 1)), 3)
  pictures = sorted(p.relative_to(store.directory).as_posix() for p in store.directory.rglob("*.png"))
  assert pictures == sorted(f"screens/{screen(i).ref[:2]}/{screen(i).ref}.png" for i in (0, 1, 9))
  assert sorted(p.name for p in tmp_path.iterdir()) == ["episodes"] and len(store) == 3


def test_the_same_try_of_an_update_is_one_row(store):
  first = store.add(episode(screens=(0, 1, 2)), 3)
  assert store.add(episode(screens=(5, 6), advantage=-0.5), 3) == first
  (row,) = store.query()
  assert (row["advantage"], row["steps"], len(store.steps(first))) == (-0.5, 2, 2)
  store.add(episode(), 4)
  store.add(episode(try_index=1), 3)
  store.add(episode(group="other"), 3)
  assert len(store) == 4


def test_rewind_forgets_what_a_resumed_run_will_write_again(tmp_path):
  def run(store, updates):
    for u in updates:
      store.add(episode(group=f"u{u}", advantage=float(u)), u)

  with EpisodeStore(tmp_path / "a") as straight:
    run(straight, range(8))
    expected = list(straight.query())
  with EpisodeStore(tmp_path / "b") as store:
    run(store, range(6))
  with EpisodeStore(tmp_path / "b") as store:
    assert store.rewind(4) == 2 and len(store) == 4
    assert store._db.execute("SELECT count(*) FROM steps").fetchone()[0] == 8  # steps went with their episodes
    run(store, range(4, 8))
    assert list(store.query()) == expected
    assert store.rewind(99) == 0


@pytest.mark.parametrize("update", [-1, 2.5])
def test_an_update_is_a_whole_number(store, update):
  with pytest.raises(ValueError, match="wanted a whole number"):
    store.add(episode(), update)


def test_queries(store):
  for u in range(6):
    store.add(episode(task=f"t{u % 2}", group=f"g{u}", success=float(u > 3)), u)
  store.add(lost(), 6)
  found = lambda **filters: [r["at_update"] for r in store.query(**filters)]
  assert found() == [0, 1, 2, 3, 4, 5, 6] and found(newest_first=True) == [6, 5, 4, 3, 2, 1, 0]
  assert found(task_id="t1") == [1, 3, 5] and found(success=True) == [4, 5] and found(success=True, task_id="t1") == [5]
  assert found(update=3) == [3] and found(update=(2, 4)) == [2, 3, 4] and found(group="g2") == [2]
  assert found(end=End.INFRA_ERROR) == found(end="infra_error") == found(end_cause="BootTimeout") == [6]
  assert found(limit=2) == [0, 1] and found(limit=2, newest_first=True) == [6, 5] and found(limit=0) == []
  assert found(task_id="t1' OR 1=1 --") == []
  with pytest.raises(
    ValueError, match=r"episodes cannot be found by 'tsk_id' \(did you mean task_id\?\); there are: task_id, group"
  ):
    store.query(tsk_id=3)
  with pytest.raises(ValueError, match=r"update=\(1, 2, 3\): wanted one value or a pair"):
    store.query(update=(1, 2, 3))


def test_a_long_query_is_read_in_pages_while_the_run_goes_on(store, monkeypatch):
  monkeypatch.setattr("rollout.store._PAGE", 3)
  for u in range(7):
    store.add(episode(group=f"g{u}"), u)
  rows = store.query()
  seen = [next(rows)["at_update"]]
  store.add(episode(group="new"), 7)
  assert seen + [r["at_update"] for r in rows] == list(range(8))
  for limit in range(9):
    assert [r["at_update"] for r in store.query(limit=limit, newest_first=True)] == list(range(7, 7 - limit, -1))


def test_an_unknown_id_is_an_error(store):
  with pytest.raises(ValueError, match="no episode with id 7"):
    store.load(7)


def test_notes_may_hold_numpy_but_nothing_stranger(store):
  key = store.add(episode(notes={"a": np.float32(0.5), "b": np.arange(2)}), 1)
  assert store.load(key).notes == {"a": 0.5, "b": [0, 1]}
  for bad in ({"x": object()}, {"x": float("nan")}):
    with pytest.raises(ValueError, match="episode u3.g1/0 of buy/cable holds what JSON cannot"):
      store.add(episode(notes=bad), 2)
  assert len(store) == 1


def test_threads_may_add_at_the_same_time(store):
  def work(t):
    for i in range(10):
      store.add(episode(group=f"g{t}", try_index=i, screens=(i, i + 1)), 0)

  threads = [threading.Thread(target=work, args=(t,)) for t in range(6)]
  for t in threads:
    t.start()
  for t in threads:
    t.join()
  assert len(store) == 60 and all(len(store.steps(r["id"])) == r["steps"] for r in store.query())


def test_a_reader_beside_the_run_sees_whole_episodes(store):
  store.add(episode(), 1)
  other = sqlite3.connect(f"file:{store.directory / 'index.sqlite'}?mode=ro", uri=True)
  assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
  store.add(episode(try_index=1), 1)
  assert other.execute("SELECT count(*) FROM episodes").fetchone() == (2,)
  assert other.execute("SELECT count(*) FROM steps").fetchone() == (4,)
  other.close()


def test_what_was_added_is_there_after_a_kill(tmp_path):
  store = EpisodeStore(tmp_path / "episodes")
  store.add(episode(), 1)
  shutil.copytree(tmp_path / "episodes", tmp_path / "killed")  # what another process would find now
  with EpisodeStore(tmp_path / "killed") as again:
    assert len(again) == 1 and again.load(1).goal == "buy a cable"
  store.close()


def test_an_add_that_fails_half_way_leaves_nothing(store, monkeypatch):
  monkeypatch.setattr("rollout.store._step_row", lambda e, h: ("x",) * 10 if h == 0 else ("x", None) + ("x",) * 8)
  with pytest.raises(sqlite3.IntegrityError):
    store.add(episode(), 1)
  assert len(store) == 0


# ---- trajectory records


def test_a_record_has_the_lessons_fields_first(store, tmp_path):
  store.add(episode(advantage=1.73), 3)
  assert store.export_jsonl(tmp_path / "out" / "run.jsonl") == 1
  (record,) = [json.loads(line) for line in (tmp_path / "out" / "run.jsonl").read_text().splitlines()]
  assert list(record)[:7] == ["task_id", "group", "episode", "policy_version", "steps", "reward", "advantage"]
  assert (record["task_id"], record["group"], record["episode"], record["policy_version"]) == ("buy/cable", "u3.g1", 0, 40)
  assert (record["reward"], record["advantage"], record["update"], record["end"], record["end_cause"]) == (
    0.75,
    1.73,
    3,
    "terminated",
    "agent",
  )
  assert record["rewards"] == {"success": 1.0, "length": -0.25} and record["goal"] == "buy a cable" and record["seed"] == 11
  step = record["steps"][0]
  assert list(step)[:3] == ["screen", "text", "agent_tokens"]
  assert (step["text"], step["agent_tokens"], step["tokens"], step["version"]) == ("tap 0", 2, [13, 14], [40, 40])
  assert np.array(step["logp"], np.float32).tobytes() == np.array([-3 / 3, -4 / 3], np.float32).tobytes()
  assert step["action"] == {
    "kind": "tap",
    "args": {"x": 3, "y": 1},
    "model_args": {"x": 0.5, "y": 0.25},
    "grammar": "phone",
    "thought": "hm",
  }
  assert record["steps"][1]["action"] == {"unreadable": "no action"}
  np.testing.assert_array_equal(decode_png((tmp_path / "out" / step["screen"]).read_bytes()), screen(0).pixels)


def test_what_is_exported_can_be_read_back_elsewhere(store, tmp_path):
  put = [episode(advantage=-0.5), episode(try_index=1, success=0.0, end=End.TRUNCATED, end_cause="steps", replayed=True), lost()]
  for e in put:
    store.add(e, 3)
  store.export_jsonl(tmp_path / "out" / "run.jsonl")
  shutil.rmtree(store.directory)
  shutil.move(tmp_path / "out", tmp_path / "moved")
  back = read_trajectories(tmp_path / "moved" / "run.jsonl")
  for got, e in zip(back, put, strict=True):
    for name in (
      "task_id",
      "group",
      "try_index",
      "seed",
      "end",
      "end_cause",
      "rewards",
      "goal",
      "family",
      "checker",
      "partial",
      "advantage",
      "replayed",
    ):
      assert getattr(got, name) == getattr(e, name), name
    assert got.notes == {"host": "h1", "policy_version": 40, "update": 3}
    assert [(s.screen.ref, s.text, s.action, s.raw_point, s.point) for s in got.steps] == [
      (s.screen.ref, s.text, s.action, s.raw_point, s.point) for s in e.steps
    ]
  assert back[0].steps[0].notes["tokens"] == [13, 14]


def test_an_export_takes_the_filters_of_a_query_and_only_their_pictures(store, tmp_path):
  store.add(episode(screens=(0, 1)), 1)
  store.add(episode(screens=(2, 3), success=0.0), 2)
  assert store.export_jsonl(tmp_path / "run.jsonl", success=True) == 1
  assert sorted(p.stem for p in tmp_path.glob("run_screens/*/*.png")) == sorted(screen(i).ref for i in (0, 1))
  with pytest.raises(ValueError, match="cannot be found by 'sucess'"):
    store.export_jsonl(tmp_path / "run.jsonl", sucess=True)


def test_an_export_that_fails_leaves_the_old_file(store, tmp_path):
  store.add(episode(), 1)
  store.export_jsonl(tmp_path / "run.jsonl")
  before = (tmp_path / "run.jsonl").read_text()
  store.add(episode(try_index=1, screens=(7, 8)), 1)
  store.screens.path(screen(7).ref).unlink()
  with pytest.raises(FileNotFoundError):
    store.export_jsonl(tmp_path / "run.jsonl")
  assert (tmp_path / "run.jsonl").read_text() == before


def test_a_large_store_takes_little_memory(store, tmp_path):
  picture = Screen.of(np.zeros((256, 256, 3), np.uint8))
  for i in range(300):
    e = episode(try_index=i)
    e.steps[0].text = "x" * 20000
    e.steps[0].screen = picture
    store.add(e, 0)
  tracemalloc.start()
  assert store.export_jsonl(tmp_path / "run.jsonl") == 300
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert (tmp_path / "run.jsonl").stat().st_size > 6e6 and peak < 2e6


def test_a_store_from_before_step_limits_is_read_and_written_on(tmp_path):
  """An index without the column: its episodes have no known limit, new ones keep theirs."""
  with EpisodeStore(tmp_path / "episodes") as s:
    old = s.add(episode(step_limit=14), 0)
  db = sqlite3.connect(tmp_path / "episodes" / "index.sqlite")
  db.execute("ALTER TABLE episodes DROP COLUMN step_limit")
  db.commit()
  db.close()
  with EpisodeStore(tmp_path / "episodes") as s:
    assert s.load(old).step_limit == 0 and s.load(s.add(episode(step_limit=9), 1)).step_limit == 9
    s.export_jsonl(tmp_path / "all.jsonl")
  assert [e.step_limit for e in read_trajectories(tmp_path / "all.jsonl")] == [0, 9]
