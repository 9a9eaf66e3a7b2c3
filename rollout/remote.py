"""A sampler on other machines: prompts go out as token ids, tokens come back with their log-probabilities, over HTTP.

RemoteSampler has the interface of rollout.sampler.Sampler; rollout/dialects.py holds what servers want to hear. Text is never
sent nor read. The rules, in docs/rollouts.md too:

- Every token carries the version of the weights that wrote it, as the server says; an answer whose weights were not published
  here is refused, and its server gets no requests until it has loaded ours.
- A request that brought no answer (refused connection, broken or slow answer, status 408, 429, 5xx) is sent again, to whichever
  server is up, with its own seed. An answer that is none (lengths, NaN, ids) is an error at once.
- No server for `patience` seconds: SamplerDown. Nothing here ever becomes an episode or a score.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import dataclasses
import io
import json
import math
import os
import pathlib
import re
import secrets
import shutil
import threading
import urllib.parse
from collections.abc import Callable, Coroutine
from typing import Any

import httpx2
import ml_collections
import numpy as np
from PIL import Image

from core.knobs import require
from core.state import Weights
from models.base import Policy, Prompt
from rollout.dialects import DIALECTS, Answer, Ask, Request
from rollout.sampler import Sampled

AGAIN = (408, 425, 429, 500, 502, 503, 504)  # statuses after which a request may go well elsewhere, or later
MOST_BYTES = 2**24  # of an answer
LONGEST_REST = 60.0
TICK = 0.2  # seconds between ticks


class SamplerDown(RuntimeError):
  """No server could sample for as long as `patience` allows, or none took the weights. The message has each one's last fault."""


class BadSample(RuntimeError):
  """A server answered with what is no sample: missing or foreign ids, wrong lengths, numbers that are no log-probabilities."""


class _NoAnswer(Exception):
  """A request brought no answer; nothing of it was seen, so that it may be sent again."""


class _WrongWeights(_NoAnswer):
  """The answer was written by weights that were not published here."""


def defaults() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "endpoints": (),  # addresses of sampling servers, e.g. ("http://127.0.0.1:8000",); empty = sample in this process
      "dialect": "openai",  # openai (tools/serve.py), vllm or sglang
      "model": "",  # the model's name there, where the server wants one
      "key_env": "",  # the environment variable that holds the key; empty = no key is sent
      "folder": "",  # where weights are published, the same path on every server; one run's own. Empty = inside the workdir
      "timeout": 120.0,  # seconds for one whole request; a server that pauses while it loads weights uses them up too
      "patience": 300.0,  # seconds without any server before the run ends
      "reload_timeout": 600.0,  # seconds for a server to load published weights
      "concurrency": 64,  # requests at once, a server
      "backoff": 1.0,  # seconds that a server is left out after a fault, doubled with each further one, up to a minute
    }
  )


def check(cfg: ml_collections.ConfigDict) -> None:
  """Domains of the knobs; each failure one line."""
  require("sampler", cfg, {
    "dialect": (cfg.dialect in DIALECTS, f"one of {', '.join(DIALECTS)}"),
    "endpoints": (len(set(cfg.endpoints)) == len(cfg.endpoints), "each address once"),
    "timeout": (0 < cfg.timeout <= 3600, "seconds, above 0, up to 3600"),
    "patience": (0 <= cfg.patience <= 86400, "0 to 86400 seconds"),
    "reload_timeout": (0 < cfg.reload_timeout <= 7200, "seconds, above 0, up to 7200"),
    "concurrency": (1 <= cfg.concurrency <= 4096, "1 to 4096 requests at once"),
    "backoff": (0 < cfg.backoff <= LONGEST_REST, f"seconds, above 0, up to {LONGEST_REST:.0f}"),
  })  # fmt: skip
  for url in cfg.endpoints:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
      raise ValueError("sampler.endpoints holds what is no address of the form http(s)://host[:port], without user, query or fragment")
    if parts.path.rstrip("/").endswith("/v1"):
      raise ValueError(f"sampler.endpoints has {url}, wanted the server's root, without /v1: weights are loaded there too")


@dataclasses.dataclass
class _Endpoint:
  """A server. version: of the weights it has confirmed, None = not ours, no request goes there; busy: requests under way; rest:
  when it may be asked again, on the loop's clock."""

  url: str
  version: int | None = None
  busy: int = 0
  rest: float = 0.0
  faults: int = 0  # since the last answer
  fault: str = "its weights were not loaded yet"
  set_up: bool = False
  lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)  # one reload at a time
  healing: asyncio.Task | None = None


class RemoteSampler:
  """Samples on the servers of `cfg` (see defaults). Close it, or use it in a `with`.

  export(params, folder): makes that folder, with the parameters as files that the servers load (tools.serve.export_params;
  models.hf.export with a source bound). folder: where they are published, this run's own, the same path on every server.
  tick: called several times a second in every wait; what it raises ends the wait. `act` and `load` may run at once, from two threads.
  """

  def __init__(self, policy: Policy, cfg: ml_collections.ConfigDict, export: Callable[[Any, pathlib.Path], None],
               folder: str | os.PathLike, temperature: float = 1.0, tick: Callable[[], None] = lambda: None):  # fmt: skip
    check(cfg)
    if not cfg.endpoints:
      raise ValueError("sampler.endpoints is empty, wanted the addresses of sampling servers")
    if temperature < 0 or not math.isfinite(temperature):
      raise ValueError(f"temperature is {temperature}, wanted 0 (greedy, evaluation only) or more")
    self.policy, self.cfg, self.temperature, self._tick = policy, cfg, temperature, tick
    self.tokens = 0  # action tokens written so far
    self._export, self._folder = export, pathlib.Path(os.path.abspath(folder))
    self._dialect, self._name = DIALECTS[cfg.dialect], secrets.token_hex(4)
    self._versions: dict[str, int] = {}  # by label, of all weights published here
    self._published: tuple[str, pathlib.Path] | None = None  # label and folder of the newest
    self._publishing = threading.Lock()
    self._key = _key(cfg.key_env)
    self._endpoints = [_Endpoint(url.rstrip("/")) for url in cfg.endpoints]
    self._freed = asyncio.Condition()
    self._client = httpx2.AsyncClient(
      headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
      timeout=httpx2.Timeout(None, connect=min(10.0, cfg.timeout)), trust_env=False, follow_redirects=False,
      limits=httpx2.Limits(max_connections=None, max_keepalive_connections=cfg.concurrency * len(cfg.endpoints)),
    )  # fmt: skip
    self._closed = False
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, name="remote-sampler", daemon=True)
    self._thread.start()

  def __enter__(self) -> RemoteSampler:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def close(self, seconds: float = 2.0) -> None:
    """Ends what is under way and the connections. The published weights stay: the servers may still be reading them."""
    if self._closed:
      return
    self._closed = True
    shut = asyncio.run_coroutine_threadsafe(self._shut(), self._loop)
    if concurrent.futures.wait([shut], seconds).done:
      shut.result()
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(seconds)
    if not self._thread.is_alive():
      self._loop.close()

  def load(self, weights: Weights) -> None:
    """Publishes: writes the weights, asks every server to load them, and waits until all that are up have confirmed. Servers
    that fail are left out and asked again later. Raises SamplerDown where none took them. `act` goes on meanwhile."""
    with self._publishing:
      label = f"weights-{self._name}-{weights.version}"
      if label not in self._versions:
        folder = self._write(weights.params, label)
        self._versions[label] = weights.version
        self._published = label, folder
      if not self._run(self._load_everywhere()):
        raise SamplerDown(f"no server loaded version {weights.version}: {self._faults()}")
      for old in self._published_here(but=label):
        shutil.rmtree(old)

  def act(self, prompts: list[Prompt], keys: np.ndarray) -> list[Sampled]:
    """One action for each prompt, all or an error. keys uint32 [n, 2]: each prompt's own, sent as its seed.

    Sampled.version is an i32 [A] array where a reload fell inside an action. Servers give no entropy: Sampled.entropy is
    -logp of the token that was drawn, whose expectation at the sampling temperature is the entropy.
    """
    if self._published is None:
      raise RuntimeError("the sampler has no weights: call load before act")
    asks = [self._ask(prompt, key) for prompt, key in zip(prompts, keys, strict=True)]
    out = self._run(self._sample_all(asks))
    self.tokens += sum(len(s.tokens) for s in out)
    return out

  def _run(self, work: Coroutine) -> Any:
    if self._closed:
      work.close()
      raise RuntimeError("the sampler is closed")
    future = asyncio.run_coroutine_threadsafe(work, self._loop)
    try:
      while not concurrent.futures.wait([future], TICK).done:
        self._tick()
      return future.result()
    except BaseException:
      future.cancel()
      raise

  def _published_here(self, but: str = "", half: bool = False) -> list[pathlib.Path]:
    """Folders of weights that samplers like this one made, whole or half written; a user's own are none of these."""
    made = re.compile(r"tmp-weights-[0-9a-f]{8}-\d+" if half else r"weights-[0-9a-f]{8}-\d+")
    return [folder for folder in self._folder.glob("*weights-*") if made.fullmatch(folder.name) and folder.name != but]

  def _write(self, params: Any, label: str) -> pathlib.Path:
    """The folder of weights, there only when it is whole. What a killed session left behind goes first."""
    final, temp = self._folder / label, self._folder / f"tmp-{label}"
    for old in self._published_here(half=True):
      shutil.rmtree(old)
    self._folder.mkdir(parents=True, exist_ok=True)
    try:
      self._export(params, temp)
      os.rename(temp, final)
    finally:
      shutil.rmtree(temp, ignore_errors=True)
    return final

  def _ask(self, prompt: Prompt, key: np.ndarray) -> Ask:
    images, kept = prompt.images, np.ones(len(prompt.tokens), bool)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
      raise ValueError(f"prompt images are {images.dtype} {images.shape}, wanted uint8 [M, H, W, 3]: servers take pictures only")
    for place in prompt.image_place:
      kept[place + 1 : place + self.policy.tokens_per_image] = False
    return Ask(
      model=self.cfg.model, tokens=prompt.tokens.tolist(), short=prompt.tokens[kept].tolist(), images=[_png(i) for i in images],
      seed=int(key[0]) << 32 | int(key[1]), temperature=float(self.temperature), most=self.policy.max_action,
      eos=int(self.policy.tokenizer.eos_id),
    )  # fmt: skip

  # -- in the loop's thread from here on

  async def _shut(self) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
      task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await self._client.aclose()

  async def _sample_all(self, asks: list[Ask]) -> list[Sampled]:
    tasks = [asyncio.create_task(self._sample(ask)) for ask in asks]
    try:
      return list(await asyncio.gather(*tasks))
    finally:
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)

  async def _sample(self, ask: Ask) -> Sampled:
    body, since = self._dialect.body(ask), None
    while True:
      endpoint = await self._take(since)
      sent = endpoint.version
      try:
        said = await self._call(endpoint, (self._dialect.path, body), self.cfg.timeout)
        out = self._read(endpoint, said, ask, sent)
        endpoint.faults = 0
        return out
      except _NoAnswer as fault:
        since = since or self._loop.time()
        self._left_out(endpoint, fault)
      finally:
        endpoint.busy -= 1
        async with self._freed:
          self._freed.notify()

  async def _take(self, since: float | None) -> _Endpoint:
    """The least busy server that is up, as soon as there is one. since: when this request first failed."""
    while True:
      now = self._loop.time()
      for e in self._endpoints:
        if e.version is None and e.rest <= now and e.healing is None:
          e.healing = asyncio.create_task(self._heal(e))
      up = [e for e in self._endpoints if e.version is not None and e.rest <= now]
      free = [e for e in up if e.busy < self.cfg.concurrency]
      if free:
        endpoint = min(free, key=lambda e: e.busy)
        endpoint.busy += 1
        return endpoint
      if not up:
        since = since or now
        if now - since > self.cfg.patience:
          raise SamplerDown(f"no server could sample for {now - since:.0f} seconds: {self._faults()}")
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1), self._freed:
          await self._freed.wait()

  def _left_out(self, endpoint: _Endpoint, fault: Exception) -> None:
    """No request goes there for a while. Requests that fail together are one fault."""
    endpoint.fault, now = str(fault), self._loop.time()
    if isinstance(fault, _WrongWeights):
      endpoint.version = None
    if endpoint.rest <= now:
      endpoint.rest = now + min(self.cfg.backoff * 2**endpoint.faults, LONGEST_REST)
      endpoint.faults += 1

  def _faults(self) -> str:
    return "; ".join(f"{e.url}: {e.fault}" for e in self._endpoints if e.faults or e.version is None)

  async def _load_everywhere(self) -> int:
    """-> how many servers hold the newest weights. Those left out already are not waited for: they are healed meanwhile."""
    since = self._loop.time()
    while True:
      asked = [e for e in self._endpoints if e.version is not None or not e.faults] or self._endpoints
      good, now = sum(await asyncio.gather(*(self._reload(e) for e in asked))), self._loop.time()
      if good or now - since > self.cfg.patience:
        return good
      await asyncio.sleep(max(min(e.rest for e in self._endpoints) - now, 0.05))

  async def _heal(self, endpoint: _Endpoint) -> None:
    """A server that came back, or lost its weights, gets the newest ones."""
    try:
      await self._reload(endpoint)
    finally:
      endpoint.healing = None

  async def _reload(self, endpoint: _Endpoint) -> bool:
    """Makes a server load the newest weights. Where that fails it holds nobody knows what, and is left out, paused if it can be."""
    dialect = self._dialect
    async with endpoint.lock:
      label, folder = self._published
      if endpoint.version == self._versions[label]:
        return True
      try:
        async with asyncio.timeout(self.cfg.reload_timeout):
          steps = [*(() if endpoint.set_up else dialect.setup), *dialect.reload(str(folder), label), *dialect.resume]
          for step in steps:
            said = await self._call(endpoint, step, self.cfg.reload_timeout)
            if said.get("success", True) is not True:
              raise BadSample(f"{step[0]} failed: {str(said.get('message'))[:200]}")
          endpoint.fault = "it took them but never said so"
          while (got := dialect.label(await self._call(endpoint, (dialect.label_at, None), self.cfg.timeout))) != label:
            endpoint.fault = f"it holds weights {got!r}, wanted {label!r}"
            await asyncio.sleep(0.2)
      except (_NoAnswer, BadSample, TimeoutError, LookupError, TypeError) as fault:
        endpoint.version, endpoint.set_up = None, False
        words = f"not within {self.cfg.reload_timeout:g} seconds; {endpoint.fault}" if isinstance(fault, TimeoutError) else fault
        self._left_out(endpoint, _NoAnswer(f"loading {label} failed: {words}"))
        print(f"  sampling server {endpoint.url} is left out: {endpoint.fault}", flush=True)
        return False
      endpoint.version, endpoint.set_up, endpoint.faults, endpoint.rest = self._versions[label], True, 0, 0.0
    async with self._freed:
      self._freed.notify_all()
    return True

  async def _call(self, endpoint: _Endpoint, request: Request, seconds: float) -> dict:
    """The JSON object that a server answers with. The deadline is for all of it, however slowly it trickles in."""
    path, body = request
    method, got = "GET" if body is None else "POST", bytearray()
    try:
      async with asyncio.timeout(seconds), self._client.stream(method, endpoint.url + path, json=body) as response:
        async for chunk in response.aiter_raw():
          got += chunk
          if len(got) > MOST_BYTES:
            raise BadSample(f"{endpoint.url}{path} answered with more than {MOST_BYTES} bytes")
    except TimeoutError as e:
      raise _NoAnswer(f"{path} had no whole answer within {seconds:g} seconds") from e
    except httpx2.TransportError as e:
      raise _NoAnswer(f"{path}: {type(e).__name__} {e}") from e
    if response.status_code != 200:
      words = " ".join(got[:1000].decode(errors="replace").split())[:200]
      words = words.replace(self._key, "***") if self._key else words
      kind = _NoAnswer if response.status_code in AGAIN else BadSample
      raise kind(f"{endpoint.url}{path}: status {response.status_code}: {words}")
    try:
      said = json.loads(got)
    except (ValueError, RecursionError) as e:
      raise BadSample(f"{endpoint.url}{path} answered with what is no JSON") from e
    if not isinstance(said, dict):
      raise BadSample(f"{endpoint.url}{path} answered with a {type(said).__name__}, wanted a JSON object")
    return said

  def _read(self, endpoint: _Endpoint, said: dict, ask: Ask, sent: int) -> Sampled:
    """The answer, checked. Raises BadSample where it is none, _NoAnswer where the server cut it short or lost its weights."""
    try:
      answer = self._dialect.answer(said)
      cut = answer.finish not in ("stop", "length")
      fault = "" if cut else why_not(answer, ask, self.policy.tokenizer.vocab_size)
      strange = [label for label, _, _ in answer.spans if label not in self._versions]
    except (LookupError, TypeError, ValueError, AttributeError) as e:
      fault = f"the answer is not what dialect {self.cfg.dialect} has ({type(e).__name__}: {e})"
    if fault:
      raise BadSample(f"{endpoint.url}: {fault}")
    if cut:
      raise _NoAnswer(f"it ended a request with {answer.finish!r}")
    if strange:
      raise _WrongWeights(f"its answer was written by weights {strange[0]!r}, which were not published here")
    if endpoint.version is None:
      raise _NoAnswer("its weights were lost while it answered")
    versions = np.concatenate([np.full(end - start, self._versions[label], np.int32) for label, start, end in answer.spans])
    if not answer.by_token:  # the label of the end only: the oldest that can have written a token says how old the action is
      versions = np.minimum(versions, sent)
    logp = np.minimum(np.asarray(answer.logp, np.float32), 0.0)
    version = int(versions[0]) if (versions == versions[0]).all() else versions
    return Sampled(np.asarray(answer.tokens, np.int32), logp, -logp, version)


def why_not(answer: Answer, ask: Ask, vocab_size: int) -> str:
  """Why an answer is no sample for what was asked, in words; "" if it is one."""
  tokens, logp, spans = answer.tokens, answer.logp, answer.spans
  whole = lambda x: isinstance(x, int) and not isinstance(x, bool)
  read = len(ask.tokens) if whole(answer.prompt) else ask.tokens
  if answer.prompt != read:
    got = answer.prompt if whole(answer.prompt) else len(answer.prompt)
    return f"it read another prompt ({got} tokens, {len(ask.tokens)} are trained on): its tokenizer or image processor differs"
  if not 1 <= len(tokens) <= ask.most:
    return f"it wrote {len(tokens)} tokens, wanted 1 to {ask.most}"
  if bad := [t for t in tokens if not whole(t) or not 0 <= t < vocab_size]:
    return f"it wrote token id {bad[0]!r}, wanted 0 to {vocab_size - 1}"
  if ask.eos in tokens[:-1]:
    return f"it wrote on after the end token {ask.eos}"
  if len(logp) != len(tokens):
    return f"it gave {len(logp)} log-probabilities for {len(tokens)} tokens"
  if bad := [x for x in logp if not (whole(x) or isinstance(x, float)) or not math.isfinite(x) or x > 1e-3]:
    return f"it gave log-probability {bad[0]!r}, wanted a finite number up to 0"
  ends = [0, *(end for _, _, end in spans)]
  if [start for _, start, _ in spans] != ends[:-1] or ends[-1] != len(tokens) or ends != sorted(set(ends)):
    return f"its weight versions {spans} do not cover {len(tokens)} tokens once each"
  return ""


def _png(pixels: np.ndarray) -> str:
  out = io.BytesIO()
  Image.fromarray(pixels).save(out, "PNG", compress_level=1)
  return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _key(key_env: str) -> str:
  """The key never stands in a message of ours."""
  key = os.environ.get(key_env, "").strip() if key_env else ""
  if key_env and not key:
    raise ValueError(f"sampler.key_env is {key_env}, but that environment variable is not set: set it, or leave key_env empty")
  if not (key.isascii() and key.isprintable()):
    raise ValueError(f"the key in the environment variable {key_env} has characters that no header can carry")
  return key
