"""The sampler on other machines: the same tokens and numbers as in this process, tags that are true, faults that are no scores.
Expected tokens and log-probabilities are those of rollout.sampler.Sampler for the same weights and keys; it has tests of its own."""

import json
import socket
import threading
import time

import jax
import numpy as np
import pytest
import serving

from core.state import Weights
from rollout import remote
from rollout.remote import BadSample, RemoteSampler, SamplerDown
from rollout.sampler import Sampler
from tools import serve

pytestmark = pytest.mark.usefixtures("compile_quickly")
GOALS = ["red mug", "open the red mug", "mug", "the mug", "red", "open mug"]


def keys(n, seed=0):
  return np.random.default_rng(seed).integers(0, 2**32, (n, 2), np.uint32)


@pytest.fixture(scope="module")
def prompts(tiny_policy, tiny_screen):
  return [tiny_policy.prompt(GOALS[i % 6], [tiny_screen(i)], "") for i in range(64)]


@pytest.fixture(scope="module")
def other_params(tiny_policy):
  return jax.jit(tiny_policy.init)(jax.random.key(1))


@pytest.fixture(scope="module")
def engine(tiny_policy):
  engine = serve.Engine(tiny_policy, (8,))
  yield engine
  engine.close()


@pytest.fixture
def server(engine):
  with serving.Server(engine) as server:
    yield server


@pytest.fixture
def connect(tiny_policy, tmp_path):
  """connect(servers, **knobs) -> a RemoteSampler on them."""
  made = []

  def make(*servers, temperature=1.0, export=serve.export_params, tick=lambda: None, **knobs):
    cfg = remote.defaults()
    cfg.update({"endpoints": tuple(s if isinstance(s, str) else s.url for s in servers), "timeout": 20.0, "patience": 5.0,
                "reload_timeout": 20.0, "backoff": 0.05} | knobs)  # fmt: skip
    made.append(RemoteSampler(tiny_policy, cfg, export, tmp_path / "published", temperature, tick))
    return made[-1]

  yield make
  for sampler in made:
    sampler.close()


@pytest.fixture(scope="module")
def here(tiny_policy, engine):
  """here(params, version, temperature) -> a sampler in this process. It shares the server's compiled program: to save a compile."""
  s = Sampler(tiny_policy, (8,))
  s._sample = engine._sampler._sample

  def make(params, version=0, temperature=1.0):
    s.temperature = temperature
    s.load(Weights(params, version))
    return s

  return make


def same(got, want, atol=0.0):
  for g, w in zip(got, want, strict=True):
    assert g.tokens.tolist() == w.tokens.tolist() and g.tokens.dtype == np.int32
    np.testing.assert_allclose(g.logp, w.logp, rtol=0, atol=atol)
    assert g.logp.dtype == np.float32 and np.array_equal(g.version, w.version)


# -- the same as in this process


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_ids_and_log_probabilities_are_those_of_the_sampler_in_this_process_bit_for_bit(
  server, connect, here, tiny_params, prompts, temperature
):
  s = connect(server, temperature=temperature)
  s.load(Weights(tiny_params, 3))
  got, want = s.act(prompts[:8], keys(8)), here(tiny_params, 3, temperature).act(prompts[:8], keys(8))
  same(got, want)
  assert len({tuple(g.tokens.tolist()) for g in got}) > 4 or temperature == 0
  assert s.tokens == sum(len(g.tokens) for g in got)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_other_servers_forms_carry_the_same(server, connect, here, tiny_params, other_params, prompts, dialect):
  """Keys below 2^31 in their first half: SGLang's seeds have 63 bits."""
  s, k = connect(server, dialect=dialect), keys(8) >> np.array([1, 0], np.uint32)
  for version, params in ((0, tiny_params), (1, other_params)):
    s.load(Weights(params, version))
    same(s.act(prompts[:8], k), here(params, version).act(prompts[:8], k))
  ids = next(b for path, b in server.seen if path in serving.SAMPLING)["token_ids" if dialect == "vllm" else "input_ids"]
  assert ids.count(s.policy.tokenizer.image_id) == 1  # the server puts the other placeholders there


def test_entropy_is_one_drawn_value_whose_mean_is_the_entropy(server, connect, here, tiny_params, prompts):
  """The exact entropy of the first token, by the sampler in this process, against the mean of 256 draws: within 4 standard errors."""
  s = connect(server)
  s.load(Weights(tiny_params, 0))
  got = s.act([prompts[0]] * 256, keys(256, seed=5))
  first = np.array([g.entropy[0] for g in got])
  exact = here(tiny_params).act(prompts[:1], keys(1))[0].entropy[0]
  assert abs(first.mean() - exact) < 4 * first.std() / 16 and (first >= 0).all()


def test_a_whole_rollout_on_the_simulated_phone(tmp_path):
  """The same episodes as in this process: tokens, log-probabilities to 1e-5, versions, texts, ends, rewards."""
  import evaluate
  from configs import android
  from envs.inside import Inside
  from rollout.scheduler import collect
  from rollout.turn import Try

  cfg = android.get_config("smoke")
  with cfg.unlocked():
    cfg.policy.tiny.update({"width": 16, "layers": 1, "heads": 2, "patch_width": 8})  # it need not be good
  world = evaluate.build(cfg)
  params = jax.jit(world.policy.init)(jax.random.key(0))
  plan = [Try(t, f"g{i}", k, np.array([i, k], np.uint32)) for i, t in enumerate(world.tasks["practice"][:3]) for k in range(2)]
  engine, cfg, local = serve.Engine(world.policy, (4,)), remote.defaults(), Sampler(world.policy, (4,))
  local._sample = engine._sampler._sample
  local.load(Weights(params, 7))
  with serving.Server(engine) as server:
    cfg.endpoints = (server.url,)
    with RemoteSampler(world.policy, cfg, serve.export_params, tmp_path / "published") as s:
      s.load(Weights(params, 7))
      runs = [list(collect(x, Inside([world.make_env() for _ in range(4)]), plan)) for x in (s, local)]
  engine.close()
  got, want = ({(e.group, e.try_index): e for e in run} for run in runs)
  assert got.keys() == want.keys() and len(got) == 6
  for name, e in got.items():
    assert (e.end, e.end_cause, e.rewards) == (want[name].end, want[name].end_cause, want[name].rewards)
    assert [s.text for s in e.steps] == [s.text for s in want[name].steps] and e.scored
    for a, b in zip(e.records, want[name].records, strict=True):
      assert a.tokens.tolist() == b.tokens.tolist() and (a.version == b.version).all() and a.version.max() == 7
      np.testing.assert_allclose(a.logp, b.logp, rtol=0, atol=1e-5)


# -- versions


@pytest.mark.parametrize("dialect", ["openai", "vllm", "sglang"])
def test_tags_are_true_across_a_reload_in_the_middle_of_64_requests(
  engine, server, connect, here, tiny_params, other_params, prompts, monkeypatch, dialect
):
  s, k, third, plain = connect(server, dialect=dialect), keys(64, 9) >> np.array([1, 0], np.uint32), threading.Event(), engine._sampler.act
  s.load(Weights(tiny_params, 1))
  batches, first, deadline = [], engine.label, time.monotonic() + 20

  def held(*asked):
    batches.append(len(asked[0]))
    if len(batches) == 3:
      third.set()
    while len(batches) > 3 and engine.label == first and time.monotonic() < deadline:
      time.sleep(0.01)  # however slow this machine is: some before the swap, some after it
    return plain(*asked)

  monkeypatch.setattr(engine._sampler, "act", held)
  got = []
  thread = threading.Thread(target=lambda: got.extend(s.act(prompts, k)))
  thread.start()
  assert third.wait(20)
  s.load(Weights(other_params, 2))
  thread.join(30)
  monkeypatch.undo()
  wrote = {1: here(tiny_params, 1).act(prompts, k), 2: here(other_params, 2).act(prompts, k)}
  assert {g.version for g in got} == {1, 2}
  same(got, [wrote[g.version][i] for i, g in enumerate(got)], atol=1e-5)
  assert {g.version for g in s.act(prompts[:8], k[:8])} == {2}


def spans(*parts):
  """The answer's tokens as if written by `parts`: (label, from, to), -1 = the end."""

  def change(choice):
    n = len(choice["token_ids"])
    choice["weight_versions"] = [{"version": v, "start": a % (n + 1), "end": b % (n + 1)} for v, a, b in parts]

  return serving.changed(change)


def test_an_action_that_two_versions_wrote_says_so_for_every_token(server, connect, tiny_params, other_params, prompts):
  s = connect(server)
  s.load(Weights(tiny_params, 4))
  old = server.engine.label
  s.load(Weights(other_params, 6))
  k = next(key for key in keys(64) if len(s.act(prompts[:1], key[None])[0].tokens) > 2)
  server.faults.append(spans((old, 0, 1), (server.engine.label, 1, -1)))
  (got,) = s.act(prompts[:1], k[None])
  assert got.version.tolist() == [4] + [6] * (len(got.tokens) - 1)


def test_where_only_the_last_version_is_named_the_oldest_possible_is_taken(server, connect, tiny_params, other_params, prompts):
  """SGLang before it had spans. The answer says version 6; the request was sent while 4 was there."""
  s = connect(server, dialect="sglang")
  s.load(Weights(tiny_params, 4))
  held = threading.Event()

  def old_form(handler, said):
    held.set()
    time.sleep(0.5)
    del said["meta_info"]["weight_versions"]
    said["meta_info"]["weight_version"] = server.engine.label
    handler.raw(200, json.dumps(said).encode())

  server.faults.append(old_form)
  got = []
  thread = threading.Thread(target=lambda: got.extend(s.act(prompts[:1], keys(1))))
  thread.start()
  assert held.wait(10)
  s.load(Weights(other_params, 6))
  thread.join(20)
  assert got[0].version == 4
  server.faults.append(old_form)
  assert s.act(prompts[:1], keys(1))[0].version == 6


def test_a_server_that_lost_its_weights_gets_them_again(engine, server, connect, here, tiny_params, other_params, prompts):
  """As after a restart: it answers with weights of its own. Nothing of that is used."""
  s = connect(server)
  s.load(Weights(tiny_params, 1))
  engine.load(other_params, "default")
  same(s.act(prompts[:8], keys(8)), here(tiny_params, 1).act(prompts[:8], keys(8)))
  assert server.control.count("/update_weights") == 2


def test_another_run_with_the_same_version_number_is_not_ours(server, connect, tiny_params, other_params, prompts):
  ours, theirs = connect(server, patience=0.3, backoff=30.0), connect(server)
  ours.load(Weights(tiny_params, 1))
  theirs.load(Weights(other_params, 1))
  with pytest.raises(SamplerDown, match="were not published here"):
    ours.act(prompts[:2], keys(2))


def test_weights_are_published_once_a_version_and_whole(server, connect, tiny_params, other_params, tmp_path):
  s = connect(server)
  for version, params in ((0, tiny_params), (0, tiny_params), (1, other_params)):
    s.load(Weights(params, version))
  assert server.control.count("/update_weights") == 2
  (folder,) = (tmp_path / "published").iterdir()
  back = serve.read_params(folder, other_params)
  assert all(jax.tree.leaves(jax.tree.map(np.array_equal, back, other_params)))


def test_an_export_that_breaks_publishes_nothing_and_sampling_goes_on(server, connect, tiny_params, prompts, tmp_path):
  broken = []

  def export(params, folder):
    serve.export_params(params, folder)
    if broken:
      raise OSError("disk full")

  s = connect(server, export=export)
  s.load(Weights(tiny_params, 1))
  broken.append(True)
  with pytest.raises(OSError, match="disk full"):
    s.load(Weights(tiny_params, 2))
  assert s.act(prompts[:1], keys(1))[0].version == 1
  assert len(list((tmp_path / "published").iterdir())) == 1


def test_weights_of_another_model_are_refused_and_the_server_keeps_its_own(engine, server, connect, tiny_params, prompts):
  s = connect(server, patience=0.0)
  s.load(Weights(tiny_params, 1))
  wider = jax.tree.map(lambda x: np.concatenate([x, x]), tiny_params)
  before = engine.label
  with pytest.raises(SamplerDown, match=r"no server loaded version 2: .*update_weights: status 400: .*ValueError"):
    s.load(Weights(wider, 2))
  assert engine.label == before


# -- faults


@pytest.mark.parametrize(
  "fault", [serving.status(500), serving.status(503), serving.status(429), serving.drop, serving.hang, serving.trickle,
            serving.changed(lambda c: c.update(finish_reason="abort"))],
  ids=["500", "503", "429", "drop", "hang", "trickle", "abort"],
)  # fmt: skip
def test_a_request_without_an_answer_is_sent_again_with_its_seed(server, connect, here, tiny_params, prompts, fault):
  s = connect(server, timeout=1.0)
  s.load(Weights(tiny_params, 1))
  server.faults.extend([fault] * 2)
  began = time.monotonic()
  same(s.act(prompts[:8], keys(8)), here(tiny_params, 1).act(prompts[:8], keys(8)))
  bodies = [json.dumps(b, sort_keys=True) for path, b in server.seen if path in serving.SAMPLING]
  assert len(bodies) == 10 and len(set(bodies)) == 8 and time.monotonic() - began < 5


NONSENSE = {
  "a token fewer": (serving.changed(lambda c: c["token_ids"].pop()), "log-probabilities for|do not cover|wrote 0 tokens"),
  "a logp fewer": (serving.changed(lambda c: c["logprobs"]["token_logprobs"].pop()), "log-probabilities for"),
  "NaN": (serving.changed(lambda c: c["logprobs"]["token_logprobs"].__setitem__(0, float("nan"))), "log-probability nan"),
  "minus infinity": (serving.changed(lambda c: c["logprobs"]["token_logprobs"].__setitem__(0, -float("inf"))), "log-probability -inf"),
  "above 0": (serving.changed(lambda c: c["logprobs"]["token_logprobs"].__setitem__(0, 0.5)), "log-probability 0.5"),
  "no logp": (serving.changed(lambda c: c["logprobs"]["token_logprobs"].__setitem__(0, None)), "log-probability None"),
  "no logprobs": (serving.changed(lambda c: c.update(logprobs=None)), "not what dialect openai has"),
  "no ids": (serving.changed(lambda c: c.pop("token_ids")), "not what dialect openai has .*token_ids"),
  "ids null": (serving.changed(lambda c: c.update(token_ids=None)), "not what dialect openai has"),
  "no version": (serving.changed(lambda c: c.pop("weight_versions")), "not what dialect openai has .*weight_versions"),
  "id out of range": (serving.changed(lambda c: c["token_ids"].__setitem__(0, 10**6)), "token id 1000000"),
  "id as text": (serving.changed(lambda c: c["token_ids"].__setitem__(0, "5")), "token id '5'"),
  "id true": (serving.changed(lambda c: c["token_ids"].__setitem__(0, True)), "token id True"),
  "too long": (serving.changed(lambda c: c.update(token_ids=[5] * 6)), "wrote 6 tokens, wanted 1 to 5"),
  "on after the end": (serving.changed(lambda c: c.update(token_ids=[1, 5])), "wrote on after the end token 1"),
  "another prompt": (serving.changed(lambda c: c["prompt_token_ids"].append(5)), "read another prompt"),
  "gap in versions": (spans(("default", 1, -1)), "do not cover"),
  "label as a list": (serving.changed(lambda c: c["weight_versions"][0].update(version=["x"])), "not what dialect openai has"),
  "empty": (serving.text(b""), "no JSON"),
  "a page": (serving.text(b"<html>busy</html>"), "no JSON"),
  "deep": (serving.text(b"[" * 100000), "no JSON"),
  "a list": (serving.text(b"[1]"), "answered with a list"),
  "no choice": (serving.text(b'{"choices": []}'), "not what dialect openai has"),
  "status 404": (serving.status(404), "status 404"),
  "a redirect": (serving.status(307), "status 307"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_an_error_at_once_and_never_a_sample(server, connect, tiny_params, prompts, name):
  fault, words = NONSENSE[name]
  s = connect(server)
  s.load(Weights(tiny_params, 1))
  server.faults.append(fault)
  with pytest.raises(BadSample, match=words):
    s.act(prompts[:1], keys(1))
  assert s.tokens == 0 and len(server.seen) - len(server.control) == 1
  assert len(s.act(prompts[:2], keys(2))) == 2  # and the sampler is none the worse


def test_one_bad_answer_among_many_leaves_nothing_under_way(server, connect, tiny_params, prompts):
  s = connect(server)
  s.load(Weights(tiny_params, 1))
  server.faults.extend([serving.late(0.5)] * 3 + [serving.text(b"?")])
  with pytest.raises(BadSample):
    s.act(prompts[:8], keys(8))
  assert [e.busy for e in s._endpoints] == [0]


def test_requests_spread_by_load_and_a_server_that_is_down_is_left_out_and_tried_again(engine, connect, tiny_params, prompts):
  with serving.Server(engine) as first:
    with serving.Server(engine) as second:
      s, port = connect(first, second, backoff=0.3), second.server_port
      s.load(Weights(tiny_params, 1))
      s.act(prompts, keys(64))
      assert [sum(p in serving.SAMPLING for p, _ in x.seen) for x in (first, second)] == [32, 32]
    s.act(prompts[:16], keys(16))
    assert sum(p in serving.SAMPLING for p, _ in first.seen) == 48
    time.sleep(0.5)
    with serving.Server(engine, port) as second:
      deadline = time.monotonic() + 10
      while not any(p in serving.SAMPLING for p, _ in second.seen):
        assert time.monotonic() < deadline, "the server that came back is never asked"
        s.act(prompts[:8], keys(8))


def test_all_down_past_the_deadline_is_one_clear_error(engine, connect, tiny_params, prompts):
  with serving.Server(engine) as first, serving.Server(engine) as second:
    s = connect(first, second, patience=1.0)
    s.load(Weights(tiny_params, 1))
  began = time.monotonic()
  with pytest.raises(SamplerDown, match=rf"no server could sample for [12] seconds: {first.url}: .*; {second.url}: "):
    s.act(prompts[:8], keys(8))
  assert 1 <= time.monotonic() - began < 4 and s.tokens == 0


def test_a_load_waits_for_a_server_that_is_still_starting_and_not_for_ever(engine, connect, tiny_params, prompts):
  with serving.Server(engine) as server:
    port = server.server_port
  s = connect(server.url, patience=0.3)
  with pytest.raises(SamplerDown, match="no server loaded version 0"):
    s.load(Weights(tiny_params, 0))
  s, up = connect(server.url, patience=20.0), []
  timer = threading.Timer(0.5, lambda: up.append(serving.Server(engine, port)))
  timer.start()
  s.load(Weights(tiny_params, 0))
  assert s.act(prompts[:1], keys(1))[0].version == 0
  with up[0]:
    timer.join()


def test_requests_at_once_are_bounded(engine, server, connect, tiny_params, prompts, monkeypatch):
  batches, plain = [], engine._sampler.act
  monkeypatch.setattr(engine._sampler, "act", lambda p, k: (batches.append(len(p)), time.sleep(0.05), plain(p, k))[2])
  s = connect(server, concurrency=3)
  s.load(Weights(tiny_params, 1))
  s.act(prompts[:12], keys(12))
  assert max(batches) <= 3 and sum(batches) == 12


def test_connections_are_kept(server, connect, tiny_params, prompts, monkeypatch):
  opened, plain = [], server.process_request
  monkeypatch.setattr(server, "process_request", lambda *a: (opened.append(a), plain(*a)))
  s = connect(server, concurrency=4)
  s.load(Weights(tiny_params, 1))
  for _ in range(3):
    s.act(prompts[:16], keys(16))
  assert 1 <= len(opened) <= 4


def test_closing_ends_what_is_under_way(server, connect, tiny_params, prompts):
  s = connect(server)
  s.load(Weights(tiny_params, 1))
  server.faults.extend([serving.hang] * 8)
  ended = []

  def ask():
    try:
      s.act(prompts[:8], keys(8))
    except BaseException as e:  # noqa: BLE001 - looked at below
      ended.append(e)

  thread = threading.Thread(target=ask)
  thread.start()
  time.sleep(0.3)
  s.close()
  thread.join(5)
  assert not thread.is_alive() and len(ended) == 1 and not s._thread.is_alive()
  with pytest.raises(RuntimeError, match="closed"):
    s.act(prompts[:1], keys(1))


@pytest.mark.parametrize("state", ["down", "deaf", "answering"])
def test_a_tick_ends_every_wait(server, connect, tiny_params, prompts, state):
  """Nobody listens; somebody listens and never says a word; a server hangs over an answer. Every deadline is far away."""
  ticks, far = [], {"timeout": 300.0, "patience": 300.0, "reload_timeout": 300.0}
  with socket.create_server(("127.0.0.1", 0)) as deaf:
    url = {"down": "http://127.0.0.1:9", "deaf": f"http://127.0.0.1:{deaf.getsockname()[1]}", "answering": server}[state]
    s = connect(url, tick=ticks.pop, **far)  # IndexError at the third
    ticks[:] = [0] * 1000
    if state == "answering":
      s.load(Weights(tiny_params, 1))
      server.faults.extend([serving.hang] * 2)
    ticks[:] = [0, 0]
    with pytest.raises(IndexError):
      s.act(prompts[:2], keys(2)) if state == "answering" else s.load(Weights(tiny_params, 1))
    s.close()
    assert not s._thread.is_alive()


# -- the key, and what is refused before anything is sent


def test_the_key_goes_with_every_request_and_stands_nowhere_else(engine, connect, tiny_params, prompts, monkeypatch):
  monkeypatch.setenv("SAMPLER_KEY", "sesame-123")
  with serving.Server(engine, key="sesame-123") as server:
    s = connect(server, key_env="SAMPLER_KEY", patience=0.0)
    s.load(Weights(tiny_params, 1))
    assert len(s.act(prompts[:2], keys(2))) == 2 and "sesame" not in s.cfg.to_json()
    server.faults.append(lambda handler, said: handler.raw(403, handler.headers["Authorization"].encode()))
    with pytest.raises(BadSample, match=r"status 403: Bearer \*\*\*$"):
      s.act(prompts[:1], keys(1))
    stranger = connect(server, patience=0.0)
    with pytest.raises(SamplerDown, match="status 401"):
      stranger.load(Weights(tiny_params, 1))


@pytest.mark.parametrize("knobs, words", [
  ({"endpoints": ()}, "endpoints is empty"), ({"endpoints": ("127.0.0.1:8000",)}, "no address"),
  ({"endpoints": ("ftp://h",)}, "no address"),
  ({"endpoints": ("http://u:p@h",)}, "no address"), ({"endpoints": ("http://h/v1",)}, "without /v1"),
  ({"endpoints": ("http://h", "http://h")}, "each address once"),
  ({"dialect": "tgi"}, "sampler.dialect is tgi, wanted one of openai, vllm, sglang"),
  ({"timeout": 0.0}, "sampler.timeout is 0.0"),
  ({"concurrency": 0}, "sampler.concurrency is 0"), ({"backoff": 0.0}, "sampler.backoff is 0.0"),
  ({"key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY, but that environment variable is not set"),
])  # fmt: skip
def test_knobs_are_checked_first(connect, knobs, words):
  with pytest.raises(ValueError, match=words):
    connect("http://127.0.0.1:1", **knobs)


def test_misuse_is_told(server, connect, tiny_params, prompts):
  with pytest.raises(ValueError, match="temperature is -1"):
    connect(server, temperature=-1)
  s = connect(server)
  with pytest.raises(RuntimeError, match="call load before act"):
    s.act(prompts[:1], keys(1))
  s.load(Weights(tiny_params, 1))
  with pytest.raises(ValueError, match=r"float32 \(1, 3\), wanted uint8"):
    s.act([prompts[0]._replace(images=np.zeros((1, 3), np.float32))], keys(1))
