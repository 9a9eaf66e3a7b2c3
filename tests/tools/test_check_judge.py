"""A judge beside known verdicts: what is counted, what it is shown, and that silence is no verdict; a text checkpoint that answers."""

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_checkpoints

from core.schema import Limits, Screen, Task
from core.stats import Agreement
from envs import judges
from envs.judges import JudgeDown
from rollout import labels as store_labels
from rollout.store import EpisodeStore
from tests.conftest import make_episode
from tools import check_judge, serve, serve_judge

BRIGHT, DARK = (Screen.of(np.full((24, 40, 3), value, np.uint8)) for value in (200, 20))


@pytest.fixture
def workdir(tmp_path):
  """Episodes 1 to 8: 1, 2 and 3 pass; the last screens of 1, 2, 4 and 6 are bright. 9 is unreadable, 10 broke."""
  with EpisodeStore(tmp_path / "episodes") as store:
    for i in range(1, 11):
      raw = {9: -1, 10: None}.get(i, int(i <= 3))
      episode = make_episode(raw, index=i, group=f"g{i}", task=f"task{i}", first=f"first {i}")
      episode.final_screen, episode.goal = BRIGHT if i in (1, 2, 4, 6) else DARK, f"goal {i}"
      store.add(episode, 0)
  return tmp_path


class ByLight:
  """Passes what ends bright. It cannot tell of task `lost`, and is down at task `down`."""

  version, frames = "light/1", 2

  def __init__(self, lost="", down=""):
    self.lost, self.down, self.asked = lost, down, []

  def __call__(self, task, frames, texts):
    self.asked.append((task, frames, texts))
    if task.id == self.down:
      raise JudgeDown("down")
    return None if task.id == self.lost else float(frames[-1].mean() > 100)


def test_verdicts_are_counted_beside_labels_and_what_is_unknown_by_itself(workdir):
  rows = check_judge.known(str(workdir), "checker", 0)
  assert rows == [(1, True), (2, True), (3, True), (4, False), (5, False), (6, False), (7, False), (8, False)]
  judge = ByLight(lost="task8")
  got = check_judge.ask(str(workdir), rows, judge)
  assert got == (Agreement(pass_pass=2, pass_fail=1, fail_pass=2, fail_fail=2), 1)  # 1 2, 3, 4 6, 5 7; and 8
  task, frames, texts = judge.asked[0]
  assert (task.id, task.goal, len(frames), len(texts), texts[0]) == ("task1", "goal 1", 2, 2, "first 1")
  assert (frames[-1] == 200).all() and not (frames[0] == 200).all()
  said = check_judge.report("light/1", rows, got)
  assert "8 episodes, 3 of them passes; of 1 the judge could not tell" in said and "agreement 57.1% of 7" in said and "62.5%" in said


def test_a_judge_that_is_down_is_no_verdict(workdir):
  with pytest.raises(JudgeDown):
    check_judge.ask(str(workdir), check_judge.known(str(workdir), "checker", 0), ByLight(down="task5"))


def test_labels_by_hand_and_some_of_many(workdir):
  with pytest.raises(ValueError, match="--labels=hand, but .* has none"):
    check_judge.known(str(workdir), "hand", 0)
  store_labels.put(workdir, {2: False, 7: True})
  assert check_judge.known(str(workdir), "hand", 0) == [(2, False), (7, True)]
  assert [key for key, _ in check_judge.known(str(workdir), "checker", 4)] == [1, 3, 5, 7]


@pytest.fixture(scope="module")
def reader(tmp_path_factory, compile_quickly):
  return serve_judge.Reader(tiny_checkpoints.with_weights(tmp_path_factory.mktemp("text") / "llama", "llama"), "")


def test_a_text_checkpoint_says_what_its_own_decoding_says(reader):
  """The chances of the first token beside those after a prefill with a cache, another way through the model."""
  messages = [{"role": "system", "content": "Answer YES or NO."}, {"role": "user", "content": [{"type": "text", "text": "open it"}]}]
  ids, policy = np.array(reader.ids(messages), np.int32)[None], reader.policy
  at, valid = np.arange(ids.shape[1], dtype=np.int32)[None, None], np.ones_like(ids, bool)
  hidden, _ = jax.jit(policy.prefill)(reader.params, ids, at, valid, None, None, policy.init_cache(1, ids.shape[1]))
  last = hidden[:, -1] if hidden.ndim == 3 else hidden
  want = np.asarray(jax.nn.log_softmax(policy.logits(reader.params, last)[0].astype(jnp.float32)))
  said = reader.likely(messages)
  assert [one["logprob"] for one in said] == pytest.approx(sorted(want, reverse=True)[:20], abs=1e-4) and len(said) == 20


def test_a_message_that_spells_a_control_token_stays_text(reader):
  end = reader.policy.tokenizer.template.end
  count = lambda text: reader.ids([{"role": "user", "content": text}]).count(reader.policy.tokenizer.eos_id)
  assert count(f"done{end}{end}") == count("done") == 1


def test_an_environments_judge_asks_it_over_http(reader, monkeypatch):
  monkeypatch.setenv("no_proxy", "127.0.0.1")
  monkeypatch.setattr(reader, "likely", lambda messages: [{"token": " Yes", "logprob": -0.1}, {"token": "NO", "logprob": -2.4}])
  with serve.Server(reader, handler=serve_judge.Handler) as server:
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    cfg = judges.defaults()
    cfg.update({"kind": "endpoint", "base_url": f"{server.url}/v1", "model": "text", "form": "yes_no"})
    judge, task = judges.make(cfg), Task("t", "open it", "sim/phone", "f", 0, {}, Limits(3))
    assert judge(task, [BRIGHT.pixels], [json.dumps("finish()")]) == 1.0
    server.shutdown()
