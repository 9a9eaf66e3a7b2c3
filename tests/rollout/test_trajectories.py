import json

import numpy as np
import pytest
from PIL import Image

from core.schema import Action, End, Screen, Unreadable
from rollout.trajectories import iter_trajectories, read_trajectories

# The record of the lesson's chapter 1, word for word.
LESSON = """{
  "task_id": "subscript-h2o", "group": 17, "episode": 3, "policy_version": 41,
  "steps": [
    { "screen": "ep3/step01.png",
      "text": "Thought: H2O is selected ... Action: click(start_box='(863,149)')",
      "agent_tokens": 38 },
    { "screen": "ep3/step02.png",
      "text": "Thought: The Format menu is open. Action: click(start_box='(902,311)')",
      "agent_tokens": 29 }
  ],
  "reward": 1, "advantage": 1.73
}"""


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "ep3").mkdir()
  for i in (1, 2):
    Image.new("RGB", (8, 5), (i, 20, 30)).save(tmp_path / "ep3" / f"step0{i}.png")
  return tmp_path


def write(folder, *records):
  path = folder / "demos.jsonl"
  path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
  return path


def lesson(**changes):
  return {k: v for k, v in (json.loads(LESSON) | changes).items() if v != "gone"}


def step(**changes):
  return {k: v for k, v in (json.loads(LESSON)["steps"][0] | changes).items() if v != "gone"}


def test_the_lessons_record_is_read(folder):
  (e,) = read_trajectories(write(folder, lesson()))
  assert (e.task_id, e.group, e.try_index, e.advantage) == ("subscript-h2o", "17", 3, 1.73)
  assert e.rewards == {"success": 1.0} and e.success and e.end is End.TERMINATED and e.end_cause == "agent"
  assert e.notes == {"policy_version": 41} and e.records == [] and e.goal == ""
  assert [s.agent_tokens for s in e.steps] == [38, 29]
  assert e.steps[0].text == "Thought: H2O is selected ... Action: click(start_box='(863,149)')"
  assert e.steps[0].screen.ref == Screen.of(np.broadcast_to(np.array([1, 20, 30], np.uint8), (5, 8, 3)).copy()).ref
  assert e.steps[0].action == Unreadable("not parsed")


def test_text_is_parsed_when_a_parser_is_given(folder):
  seen = []

  def parse(text, size):
    seen.append((text[:8], size))
    return Action("click", {}, {}, "desktop")

  (e,) = read_trajectories(write(folder, lesson()), parse)
  assert e.steps[1].action.kind == "click" and seen == [("Thought:", (8, 5))] * 2


@pytest.mark.parametrize(
  "reward, rewards, cause",
  [
    (0, {"success": 0.0}, "agent"),
    (-1, {"success": 0.0, "unreadable": -1.0}, "unreadable"),
    (0.5, {"success": 0.5}, "agent"),
  ],
)
def test_plain_rewards(folder, reward, rewards, cause):
  (e,) = read_trajectories(write(folder, lesson(reward=reward)))
  assert (e.rewards, e.end_cause, e.reward) == (rewards, cause, float(reward))
  assert e.raw_reward == (reward if reward == -1 else 0)


def test_an_infra_error_has_no_reward(folder):
  for record in (lesson(reward=None), lesson(reward=None, end="infra_error", end_cause="BootTimeout", steps=[])):
    (e,) = read_trajectories(write(folder, record))
    assert not e.scored and e.rewards == {}


def test_a_demonstration_needs_only_task_reward_and_steps(folder):
  (e,) = read_trajectories(write(folder, "", {"task_id": 5, "reward": 1, "steps": [step(agent_tokens="gone")]}))
  assert (e.task_id, e.group, e.try_index, e.seed) == ("5", "line2", 0, 0) and e.steps[0].agent_tokens == 0


@pytest.mark.parametrize("mode, save", [("P", {}), ("L", {}), ("RGBA", {}), ("RGB", {"compress_level": 0})])
def test_pictures_from_other_writers(folder, mode, save):
  picture = Image.new("RGB", (8, 5), (7, 7, 7))
  (picture.quantize(4) if mode == "P" else picture.convert(mode)).save(folder / "ep3" / "step01.png", **save)
  (e,) = read_trajectories(write(folder, lesson()))
  np.testing.assert_array_equal(e.steps[0].screen.pixels, np.full((5, 8, 3), 7))


@pytest.mark.parametrize(
  "bad, line",
  [
    ('{"task_id": ', r"not JSON: Expecting value"),
    ("[1]", r"holds list, wanted one JSON object a line"),
    (lesson(task_id="gone"), r"the record has no field 'task_id'; it has: group, episode"),
    (lesson(task_id=None), r"field 'task_id' of the record is null, wanted str or int"),
    (lesson(steps="gone"), r"the record has no field 'steps'"),
    (lesson(steps={}), r"field 'steps' of the record is \{\}, wanted list"),
    (lesson(steps=[]), r"field 'steps' is empty"),
    (lesson(steps=[3]), r"step 1 is 3, wanted an object"),
    (lesson(steps=[step(), step(text="gone")]), r"step 2 has no field 'text'; it has: screen, agent_tokens"),
    (lesson(steps=[step(screen="gone")]), r"step 1 has no field 'screen'"),
    (lesson(steps=[step(text=3)]), r"field 'text' of step 1 is 3, wanted str"),
    (lesson(steps=[step(agent_tokens=True)]), r"field 'agent_tokens' of step 1 is true, wanted int"),
    (lesson(steps=[step(action={"kind": "tap"})]), r"field 'action' of step 1: .*missing"),
    (lesson(steps=[step(screen="ep3/none.png")]), r"picture ep3/none.png of step 1 is missing"),
    (lesson(steps=[step(), step(screen="ep3")]), r"picture ep3 of step 2 cannot be read"),
    (lesson(steps=[step(screen="demos.jsonl")]), r"picture demos.jsonl of step 1 cannot be read"),
    (lesson(steps=[step(screen="")]), r"picture '' of step 1 is not a path inside"),
    (lesson(steps=[step(screen="/etc/x.png")]), r"picture '/etc/x.png' of step 1 is not a path inside"),
    (lesson(steps=[step(screen="ep3/../../x.png")]), r".*is not a path inside"),
    (lesson(steps=[step(screen="a\0b")]), r".*is not a path inside"),
    (lesson(reward="gone"), r"the record has no field 'reward'"),
    (lesson(reward="1"), r"field 'reward' of the record is \"1\", wanted int or float or NoneType"),
    (lesson(reward=None, end="terminated"), r"an episode that ended as terminated has no reward"),
    (lesson(end="infra_error"), r"an infra_error has a reward"),
    (lesson(end="finished"), r"field 'end' is 'finished', wanted one of terminated, truncated, infra_error"),
    (lesson(rewards={"length": 1.0}), r"an episode that ended as terminated has no reward"),
    (lesson(rewards={"success": "1"}), r"field 'success' of 'rewards' is \"1\", wanted int or float"),
    (lesson(advantage=float("nan")), r"not JSON: NaN is no JSON number"),
  ],
)
def test_a_fault_names_file_line_and_step(folder, bad, line):
  path = write(folder, lesson(), "", bad)
  with pytest.raises(ValueError, match=rf"^{path} line 3: {line}") as e:
    read_trajectories(path)
  assert "\n" not in str(e.value)


def test_bytes_that_are_no_text_name_their_line(folder):
  path = write(folder, lesson())
  path.write_bytes(path.read_bytes() + b'{"task_id": "\xff"}\n')
  with pytest.raises(ValueError, match="line 2: not JSON"):
    read_trajectories(path)


def test_a_broken_or_transparent_picture_is_named(folder):
  path = write(folder, lesson())
  picture = folder / "ep3" / "step02.png"
  Image.new("RGBA", (8, 5), (1, 2, 3, 0)).save(picture)
  with pytest.raises(ValueError, match="line 1: picture ep3/step02.png of step 2 is transparent"):
    read_trajectories(path)
  Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 80, 3), dtype=np.uint8)).save(picture)
  picture.write_bytes(picture.read_bytes()[:-3000])
  with pytest.raises(ValueError, match="line 1: picture ep3/step02.png of step 2 cannot be read"):
    read_trajectories(path)


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(ValueError, match="trajectory file .*none.jsonl does not exist"):
    read_trajectories(tmp_path / "none.jsonl")


def test_a_file_can_be_read_one_episode_at_a_time(folder):
  path = write(folder, lesson(), "not JSON")
  reader = iter_trajectories(path)
  assert next(reader).task_id == "subscript-h2o"  # the fault in line 2 has not been reached
  with pytest.raises(ValueError, match="line 2"):
    next(reader)
