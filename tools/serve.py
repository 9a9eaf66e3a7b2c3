"""A sampling server for our own policies, as rollout/remote.py asks for one: token ids in, token ids and log-probabilities out.

  python -m tools.serve --workdir=runs/android --port=8000        the policy that the run's config names
  python train.py --config=configs/android.py --config.sampler.endpoints="('http://127.0.0.1:8000',)"

It listens on 127.0.0.1 only; from another machine through a tunnel (ssh -L 8000:127.0.0.1:8000 HOST), with the folder of
weights (sampler.folder) on a shared file system. With --key_env=NAME every request must bring the key in that variable.

  POST /v1/completions   token ids as `prompt`, images as `content_parts` with PNG data URLs, `seed` (64 bits: the sampling key)
  POST /update_weights   {"update_info": {"path": folder}, "weight_version": label}: read, checked, then swapped between batches
  GET  /weight_info      {"weight_version": label}          GET /health
"""

from __future__ import annotations

import base64
import binascii
import concurrent.futures
import hmac
import http.server
import io
import json
import os
import pathlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags
from PIL import Image
from safetensors import SafetensorError
from safetensors.flax import load_file, save_file

import evaluate
from configs import base
from core import config as config_lib
from core.host import keep_freed_memory
from core.schema import TokenRecord
from core.state import Weights
from models.base import Policy, Prompt
from rollout.sampler import Sampled, Sampler

FILE = "model.safetensors"
MOST_BODY = 2**26  # bytes of a request
PREFIX = "data:image/png;base64,"


def export_params(params: Any, folder: pathlib.Path) -> None:
  """Makes a folder with a policy's parameters in model.safetensors, under names such as "layers.0.qkv_proj"."""
  folder.mkdir()
  named = jax.tree_util.tree_flatten_with_path(params)[0]
  save_file({jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in named}, folder / FILE)


def read_params(folder: pathlib.Path, like: Any) -> Any:
  """What `export_params` wrote. like: the parameters wanted, arrays or shapes. Raises ValueError where names, shapes or dtypes differ."""
  found = load_file(folder / FILE)
  named, tree = jax.tree_util.tree_flatten_with_path(like)
  wanted = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in named}
  if strange := sorted(found.keys() ^ wanted.keys()):
    raise ValueError(f"{folder} and this policy differ in {len(strange)} parameters, {strange[0]} first")
  for name, x in wanted.items():
    if (found[name].shape, found[name].dtype) != (x.shape, x.dtype):
      raise ValueError(f"{folder} has {name} {found[name].dtype} {found[name].shape}, this policy {x.dtype} {x.shape}")
  return jax.tree.unflatten(tree, [found[name] for name in wanted])


class Refused(ValueError):
  """A request that this server does not serve: status 400."""


class NotReady(RuntimeError):
  """It may go well later: status 503."""


class Engine:
  """A policy, its weights under a label, and the thread that samples whatever asks, in batches."""

  def __init__(self, policy: Policy, buckets: tuple[int, ...] = evaluate.BUCKETS, patience: float = 0.005):
    self.policy, self.patience = policy, patience
    self.shapes = jax.eval_shape(policy.init, jax.random.key(0))
    self._most, self._sampler, self._labels = max(buckets), Sampler(policy, buckets), {}
    self._asked: queue.SimpleQueue = queue.SimpleQueue()
    self._loading = threading.Lock()
    self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
    self._thread.start()

  def close(self) -> None:
    self._asked.put(None)
    self._thread.join(10)

  @property
  def label(self) -> str:
    """Of the weights that write the next batch; "" while there are none."""
    weights = self._sampler.weights
    return self._labels[weights.version] if weights else ""

  def load(self, params: Any, label: str) -> None:
    """Swaps the weights: the next batch is written by them, under this label."""
    with self._loading:
      self._labels[version := len(self._labels)] = label
      self._sampler.load(Weights(params, version))

  def sample(self, prompt: Prompt, key: np.ndarray, temperature: float, seconds: float = 600.0) -> tuple[Sampled, str]:
    """One action, and the label of the weights that wrote it. Raises NotReady before the first load."""
    if not self.label:
      raise NotReady("this server has no weights yet: POST /update_weights")
    done: concurrent.futures.Future = concurrent.futures.Future()
    self._asked.put((temperature, prompt, key, done))
    sampled = done.result(seconds)
    return sampled, self._labels[sampled.version]

  def _run(self) -> None:
    while (first := self._asked.get()) is not None:
      batch = [first]
      while batch[-1] is not None and len(batch) < self._most:
        try:
          batch.append(self._asked.get(timeout=self.patience))
        except queue.Empty:
          break
      asked = [b for b in batch if b is not None]
      for temperature in sorted({b[0] for b in asked}):
        self._sample_at(temperature, [b for b in asked if b[0] == temperature])
      if batch[-1] is None:
        return

  def _sample_at(self, temperature: float, asked: list) -> None:
    self._sampler.temperature = temperature
    failed = None
    try:
      out = self._sampler.act([b[1] for b in asked], np.stack([b[2] for b in asked]))
    except Exception as error:  # noqa: BLE001 - raised again in the threads that asked
      failed = error
    for i, (*_, done) in enumerate(asked):
      if failed is None:
        done.set_result(out[i])
      else:
        done.set_exception(failed)


def prompt_of(policy: Policy, tokens: list[int], images: list[str]) -> Prompt:
  """The prompt that these ids are. images: PNG data URLs, one for every run of placeholders; anything else is refused."""
  if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < policy.tokenizer.vocab_size for t in tokens):
    raise Refused(f"prompt is no list of token ids from 0 to {policy.tokenizer.vocab_size - 1}")
  if not 1 <= len(tokens) <= policy.max_prompt:
    raise Refused(f"prompt has {len(tokens)} tokens, wanted 1 to {policy.max_prompt}")
  ids, per_image = np.asarray(tokens, np.int32), policy.tokens_per_image
  at = np.flatnonzero(ids == policy.tokenizer.image_id)
  if len(at) != per_image * len(images):
    raise Refused(f"prompt has {len(at)} image tokens, wanted {per_image} for each of its {len(images)} images")
  n, place = len(ids), at[::per_image].astype(np.int32)
  padded = np.append(ids, 0)  # one place more: where the first action token will stand
  none = np.zeros(n + 1)
  record = TokenRecord(padded, none.astype(bool), none.astype(np.float32), none.astype(np.int32), none.astype(np.int32), place, place * 0)
  positions = policy.positions(record)
  return Prompt(ids, positions[:, :n], place, np.stack([policy.image(pixels(url)) for url in images]), int(positions[0, n]))


def pixels(url: Any) -> np.ndarray:
  """uint8 [H, W, 3] of a PNG data URL. Nothing is ever fetched."""
  if not isinstance(url, str) or not url.startswith(PREFIX):
    raise Refused(f"an image is no data URL that begins with {PREFIX}")
  try:
    with Image.open(io.BytesIO(base64.b64decode(url[len(PREFIX) :], validate=True)), formats=["PNG"]) as image:
      return np.asarray(image.convert("RGB"))
  except (binascii.Error, OSError, Image.DecompressionBombError) as e:
    raise Refused(f"an image is no PNG ({type(e).__name__})") from e


class Handler(http.server.BaseHTTPRequestHandler):
  """One connection. Routes answer a JSON object to a JSON object."""

  protocol_version = "HTTP/1.1"  # keeps connections
  timeout, wbufsize, disable_nagle_algorithm = 120, 2**16, True

  def do_GET(self) -> None:
    self._serve({"/weight_info": self.weight_info, "/health": lambda body: {}})

  def do_POST(self) -> None:
    self._serve({"/v1/completions": self.completions, "/update_weights": self.update_weights})

  def _serve(self, routes: dict[str, Callable[[dict], dict]]) -> None:
    length = self.headers.get("Content-Length", "0")
    if not length.isdecimal() or int(length) > MOST_BODY:
      self.close_connection = True
      return self._send(413, {"error": f"Content-Length is {length!r}, wanted a number up to {MOST_BODY}"})
    raw = self.rfile.read(int(length))  # before any refusal: what is left unread would be taken for the next request
    given = self.headers.get("Authorization", "")
    if self.server.key and not hmac.compare_digest(given.encode(), f"Bearer {self.server.key}".encode()):
      return self._send(401, {"error": "no key, or a wrong one"})
    if (route := routes.get(self.path)) is None:
      return self._send(404, {"error": f"there is no {self.command} {self.path}"})
    try:
      body = json.loads(raw or b"{}")
      if not isinstance(body, dict):
        raise Refused(f"the body is a {type(body).__name__}, wanted a JSON object")
      status, said = 200, route(body)
    except (NotReady, TimeoutError) as e:
      status, said = 503, {"error": str(e)}
    except (ValueError, LookupError, TypeError, RecursionError, OSError, SafetensorError) as e:
      status, said = 400, {"error": f"{type(e).__name__}: {e}"}
    except RuntimeError as e:
      status, said = 500, {"error": f"{type(e).__name__}: {e}"}
    self._send(status, said)

  def _send(self, status: int, said: dict) -> None:
    raw = json.dumps(said, allow_nan=False).encode()
    self.send_response(status)
    self.send_header("Content-Type", "application/json")
    self.send_header("Content-Length", str(len(raw)))
    self.end_headers()
    self.wfile.write(raw)

  def log_message(self, *args) -> None:
    """One line a request would be thousands."""

  def weight_info(self, body: dict) -> dict:
    del body
    return {"weight_version": self.server.engine.label}

  def update_weights(self, body: dict) -> dict:
    folder, label = body["update_info"]["path"], body["weight_version"]
    if not isinstance(label, str) or not label:
      raise Refused("weight_version is no name")
    self.server.engine.load(read_params(pathlib.Path(folder), self.server.engine.shapes), label)
    return {"weight_version": label}

  def completions(self, body: dict) -> dict:
    policy = self.server.engine.policy
    fixed = {"max_tokens": policy.max_action, "stop_token_ids": [policy.tokenizer.eos_id], "top_p": 1.0, "n": 1, "return_token_ids": True}
    if wrong := [name for name, value in fixed.items() if body.get(name) != value]:
      raise Refused(f"{wrong[0]} is {body.get(wrong[0])!r}, this policy samples with {fixed[wrong[0]]!r}")
    temperature, seed = body["temperature"], body["seed"]
    if type(temperature) not in (int, float) or not 0 <= temperature <= 100:
      raise Refused(f"temperature is {temperature!r}, wanted 0 (greedy) to 100")
    if type(seed) is not int or not -(2**63) <= seed < 2**63:
      raise Refused(f"seed is {seed!r}, wanted a whole number of 64 bits")
    prompt = prompt_of(policy, body["prompt"], [part["image_url"]["url"] for part in body["content_parts"]])
    key = np.array([seed >> 32 & 2**32 - 1, seed & 2**32 - 1], np.uint32)
    sampled, label = self.server.engine.sample(prompt, key, float(temperature))
    tokens, n = sampled.tokens.tolist(), len(sampled.tokens)
    choice = {
      "index": 0, "text": policy.tokenizer.decode(tokens), "token_ids": tokens, "prompt_token_ids": body["prompt"],
      "finish_reason": "stop" if tokens[-1] == policy.tokenizer.eos_id else "length",
      "logprobs": {"token_logprobs": sampled.logp.tolist()}, "weight_versions": [{"version": label, "start": 0, "end": n}],
    }  # fmt: skip
    usage = {"prompt_tokens": len(prompt.tokens), "completion_tokens": n, "total_tokens": len(prompt.tokens) + n}
    return {"object": "text_completion", "model": policy.name, "choices": [choice], "usage": usage}


class Server(http.server.ThreadingHTTPServer):
  """Serves an engine on 127.0.0.1. key: what requests must bring, "" = nothing. `url` says where; a thread runs serve_forever."""

  daemon_threads, request_queue_size = True, 1024

  def __init__(self, engine: Engine, port: int = 0, key: str = "", handler: type[Handler] = Handler):
    super().__init__(("127.0.0.1", port), handler)
    self.engine, self.key = engine, key
    self.url = f"http://127.0.0.1:{self.server_port}"


FLAGS = flags.FLAGS


def key_in(name: str) -> str:
  """The key that an environment variable holds; "" for no variable. ValueError where it is not set."""
  key = os.environ.get(name, "").strip() if name else ""
  if name and not key:
    raise ValueError(f"--key_env is {name}, but that environment variable is not set")
  return key


def until_interrupted(server: Server, says: str) -> None:
  """Serves, and says so, until Ctrl-C."""
  print(says, flush=True)
  try:
    server.serve_forever()
  except KeyboardInterrupt:
    return


def define_flags(workdir: str, port: int, required: bool = True) -> None:
  """--workdir (with this help), --port and --key_env."""
  flags.DEFINE_string("workdir", None, workdir, required=required)
  flags.DEFINE_integer("port", port, "Port on 127.0.0.1; 0 = a free one.", lower_bound=0, upper_bound=65535)
  flags.DEFINE_string("key_env", "", "Environment variable with the key that requests must bring.")


def main(argv: list[str]) -> int:
  del argv
  keep_freed_memory()
  cfg, key = base.saved(pathlib.Path(os.path.abspath(FLAGS.workdir))), key_in(FLAGS.key_env)
  engine = Engine(evaluate.build(cfg).policy)
  with Server(engine, FLAGS.port, key) as server:
    until_interrupted(server, f"sampling server on {server.url}, policy {engine.policy.name}; it waits for weights")
  engine.close()
  return 0


if __name__ == "__main__":
  define_flags("Folder of a run: its config names the policy.", 8000)
  config_lib.run_command(main)
