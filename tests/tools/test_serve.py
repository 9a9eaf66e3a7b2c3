"""The sampling server: what it refuses, whom it serves, which weights it takes. What it samples: tests/rollout/test_remote.py."""

import threading

import httpx2
import jax
import numpy as np
import pytest

from rollout.dialects import DIALECTS, Ask
from rollout.remote import _png
from tools import serve


@pytest.fixture(scope="module")
def zeros(tiny_policy):
  return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(tiny_policy.init, jax.random.key(0)))


@pytest.fixture(scope="module")
def url(tiny_policy, zeros):
  engine = serve.Engine(tiny_policy, (1,))
  with serve.Server(engine) as server:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    assert server.server_address[0] == "127.0.0.1"
    yield server.url
    server.shutdown()
  engine.close()
  assert not engine._thread.is_alive()


def post(url, path, body):
  answer = httpx2.post(url + path, json=body, timeout=30, trust_env=False)
  return answer.status_code, answer.json()


@pytest.fixture(scope="module")
def body(tiny_policy, tiny_screen):
  prompt = tiny_policy.prompt("red mug", [tiny_screen(0)], "")
  tokens = prompt.tokens.tolist()
  return DIALECTS["openai"].body(Ask("", tokens, tokens, [_png(prompt.images[0])], 2**64 - 1, 1.0, tiny_policy.max_action, 1))


def test_before_it_has_weights_it_asks_to_come_again(url, body):
  assert httpx2.get(url + "/weight_info", trust_env=False).json() == {"weight_version": ""}
  assert post(url, "/v1/completions", body) == (503, {"error": "this server has no weights yet: POST /update_weights"})


@pytest.mark.parametrize("change, words", [
  ({"prompt": "red mug"}, "no list of token ids"), ({"prompt": [5, 5]}, "0 image tokens, wanted 6 for each of its 1"),
  ({"prompt": [10**6]}, "no list of token ids"), ({"prompt": [5] * 100}, "100 tokens, wanted 1 to 12"),
  ({"max_tokens": 4}, "max_tokens is 4, this policy samples with 5"), ({"top_p": 0.9}, "top_p is 0.9"),
  ({"temperature": -1}, "temperature is -1"), ({"temperature": "hot"}, "temperature is 'hot'"), ({"seed": None}, "seed is None"),
  ({"seed": 2**64}, "wanted a whole number of 64 bits"), ({"content_parts": [{"image_url": {"url": "http://h/a.png"}}]}, "no data URL"),
  ({"content_parts": [{"image_url": {"url": serve.PREFIX + "aGk="}}]}, "no PNG"), ({"content_parts": [1]}, "TypeError"),
])  # fmt: skip
def test_it_refuses_what_it_would_not_sample_as_asked(url, body, change, words):
  status, said = post(url, "/v1/completions", body | change)
  assert status == 400 and words in said["error"]


def test_a_prompt_is_the_one_that_the_policy_made(tiny_policy, tiny_screen):
  """Positions, place of the image and of the first action, and pixels, from the ids and the PNG alone."""
  want = tiny_policy.prompt("open the red mug", [tiny_screen(3)], "")
  got = serve.prompt_of(tiny_policy, want.tokens.tolist(), [_png(want.images[0])])
  for name, x in want._asdict().items():
    assert np.array_equal(getattr(got, name), x), name


def test_weights_come_back_as_they_were_written_and_others_are_refused(url, zeros, tmp_path):
  params = jax.tree.map(lambda x: x + np.random.default_rng(x.size).normal(size=x.shape).astype(x.dtype), zeros)
  serve.export_params(params, tmp_path / "good")
  back = serve.read_params(tmp_path / "good", zeros)
  assert all(jax.tree.leaves(jax.tree.map(np.array_equal, back, params)))
  serve.export_params({**zeros, "norm": zeros["norm"][:-1]}, tmp_path / "short")
  serve.export_params({k: v for k, v in zeros.items() if k != "norm"}, tmp_path / "less")
  (tmp_path / "torn").mkdir()
  (tmp_path / "torn" / serve.FILE).write_bytes((tmp_path / "good" / serve.FILE).read_bytes()[:-9])
  ask = lambda name: post(url, "/update_weights", {"update_info": {"path": str(tmp_path / name)}, "weight_version": name})
  assert ask("good") == (200, {"weight_version": "good"})
  for name, words in (("short", "norm float32 (15,), this policy float32 (16,)"), ("less", "1 parameters, norm first"),
                      ("torn", "SafetensorError"), ("none", "No such file")):  # fmt: skip
    status, said = ask(name)
    assert status == 400 and words in said["error"], name
  assert httpx2.get(url + "/weight_info", trust_env=False).json() == {"weight_version": "good"}


def test_a_connection_survives_a_refusal(url):
  """What a refused request carried is not taken for the next one."""
  with httpx2.Client(trust_env=False) as client:
    for _ in range(2):
      assert client.post(url + "/nothing", content=b"x" * 5000).status_code == 404
      assert client.post(url + "/update_weights", content=b"[1]").status_code == 400
