"""Sampling servers for tests: tools.serve's own, taught vLLM's and SGLang's forms as their documentation has them, and to fail.

Servers really sample, on loopback. `Server.faults` is a queue: each sampling request that comes takes one and answers as it says.
"""

import collections
import contextlib
import json
import socket
import threading
import time

from tools import serve

SAMPLING = ("/v1/completions", "/inference/v1/generate", "/generate")
VLLM_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
                 "max_tokens", "stop_token_ids", "ignore_eos", "logprobs", "detokenize"}  # fmt: skip


class Server(serve.Server):
  """`with Server(engine) as server:` is up. seen: (path, body) of every request, as it came; control: paths of the others."""

  def __init__(self, engine, port=0, key=""):
    super().__init__(engine, port, key, Handler)
    self.faults, self.seen, self.control, self.stopping = collections.deque(), [], [], threading.Event()
    self.running, self.pending, self.ready = threading.Event(), None, False
    self.running.set()
    self.connections = []
    self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    self.thread.start()

  def process_request(self, request, client_address):
    self.connections.append(request)
    super().process_request(request, client_address)

  def __exit__(self, *exc):
    self.stopping.set()
    self.running.set()
    self.shutdown()
    self.thread.join(10)
    for connection in self.connections:  # as when the process ends
      with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    super().__exit__(*exc)


class Handler(serve.Handler):
  def do_GET(self):
    self._serve({"/weight_info": self.weight_info, "/model_info": self.weight_info})

  def do_POST(self):
    own = {"/v1/completions": self.completions, "/update_weights": self.update_weights}
    vllm = {"/inference/v1/generate": self.vllm, "/init_weight_transfer_engine": self.vllm_init, "/pause?mode=wait": self.pause,
            "/start_weight_update": self.vllm_start, "/finish_weight_update": self.vllm_finish, "/resume": self.resume}  # fmt: skip
    sglang = {"/generate": self.sglang, "/pause_generation": self.pause, "/continue_generation": self.resume,
              "/update_weights_from_disk": self.sglang_update}  # fmt: skip
    self._serve(own | vllm | sglang)

  def _serve(self, routes):
    heard = lambda path, route: lambda body: (self.server.seen.append((path, body)), route(body))[1]
    if self.path not in SAMPLING:
      self.server.control.append(self.path)
    super()._serve({path: heard(path, route) for path, route in routes.items()})

  def _send(self, status, said):
    fault = self.server.faults.popleft() if self.path in SAMPLING and self.server.faults else None
    if fault is None:
      return super()._send(status, said)
    fault(self, said)

  def raw(self, status, body, length=None):
    self.send_response(status)
    self.send_header("Content-Length", str(len(body) if length is None else length))
    self.end_headers()
    self.wfile.write(body)

  # -- vLLM: docs/serving/online_serving/token_in_token_out.md, docs/training/async_rl.md and weight_transfer/disk.md

  def expanded(self, ids):
    policy = self.server.engine.policy
    return [t for i in ids for t in [i] * (policy.tokens_per_image if i == policy.tokenizer.image_id else 1)]

  def sampled(self, ids, images, temperature, seed, most, stop):
    if not self.server.running.wait(10):
      raise serve.NotReady("paused")
    body = {"prompt": self.expanded(ids), "content_parts": [{"image_url": {"url": url}} for url in images], "max_tokens": most,
            "seed": seed, "temperature": temperature, "top_p": 1.0, "n": 1, "stop_token_ids": stop, "return_token_ids": True}  # fmt: skip
    return self.completions(body)["choices"][0]

  def vllm(self, body):
    asked = body["sampling_params"]
    assert set(asked) == VLLM_SAMPLING and asked["ignore_eos"] and asked["top_p"] == 1 and asked["top_k"] == 0, asked
    images = [p["image_url"]["url"] for p in body["content_parts"]]
    c = self.sampled(body["token_ids"], images, asked["temperature"], asked["seed"], asked["max_tokens"], asked["stop_token_ids"])
    content = [
      {"token_id": t, "logprob": x, "rank": 1, "top_logprobs": []} for t, x in zip(c["token_ids"], c["logprobs"]["token_logprobs"])
    ]
    choice = {k: c[k] for k in ("index", "token_ids", "finish_reason", "weight_versions")} | {"logprobs": {"content": content}}
    return {"request_id": "r", "output_mode": "tokens", "choices": [choice], "prompt_token_ids": c["prompt_token_ids"]}

  def vllm_init(self, body):
    self.server.ready = body == {"init_info": {}}
    return {"message": "Weight transfer initialized"}

  def vllm_start(self, body):
    assert self.server.ready and not self.server.running.is_set(), "not initialised, or not paused"
    self.server.pending = "started"
    return {"message": "Weight update started"}

  def update_weights(self, body):
    if self.server.pending is None:
      return super().update_weights(body)
    self.server.pending = serve.read_params(serve.pathlib.Path(body["update_info"]["path"]), self.server.engine.shapes)
    return {"message": "Weights updated"}

  def vllm_finish(self, body):
    self.server.engine.load(self.server.pending, body["weight_version"])
    self.server.pending = None
    return {"message": "Weight update finished"}

  def pause(self, body):
    self.server.running.clear()
    return {"status": "paused"}

  def resume(self, body):
    self.server.running.set()
    return {"status": "ok"}

  # -- SGLang: docs/basic_usage/sampling_params.md, docs/advanced_features/sglang_for_rl.md

  def sglang(self, body):
    asked = body["sampling_params"]
    assert asked["top_k"] == -1 and asked["top_p"] == 1 and body["return_logprob"] and body["logprob_start_len"] == -1, body
    c = self.sampled(
      body["input_ids"], body["image_data"], asked["temperature"], asked["sampling_seed"], asked["max_new_tokens"], asked["stop_token_ids"]
    )
    pairs = [[x, t, None] for t, x in zip(c["token_ids"], c["logprobs"]["token_logprobs"])]
    meta = {"output_token_logprobs": pairs, "prompt_tokens": len(c["prompt_token_ids"]), "finish_reason": {"type": c["finish_reason"]},
            "weight_version": c["weight_versions"][-1]["version"], "weight_versions": c["weight_versions"]}  # fmt: skip
    return {"text": "", "output_ids": c["token_ids"], "meta_info": meta}

  def sglang_update(self, body):
    assert not self.server.running.is_set(), "an update needs a pause"
    path, label = body["model_path"], body["weight_version"]
    self.server.engine.load(serve.read_params(serve.pathlib.Path(path), self.server.engine.shapes), label)
    return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


# ---------------------------------------------------------------- faults


def status(code):
  return lambda handler, said: handler.raw(code, b'{"error": "by hand"}')


def hang(handler, said):
  handler.server.stopping.wait(20)
  handler.close_connection = True


def trickle(handler, said):
  """A byte now and then: every single read is in time, the whole never is."""
  handler.send_response(200)
  handler.send_header("Content-Length", "1000")
  handler.end_headers()
  while not handler.server.stopping.wait(0.1):
    try:
      handler.wfile.write(b" ")
      handler.wfile.flush()
    except OSError:
      return


def drop(handler, said):
  """Half an answer, then the connection is gone."""
  raw = json.dumps(said).encode()
  handler.raw(200, raw[: len(raw) // 2], len(raw))
  handler.close_connection = True


def text(words):
  return lambda handler, said: handler.raw(200, words)


def changed(change):
  """The answer with `change(choice)` made to its only choice."""

  def fault(handler, said):
    change(said["choices"][0])
    handler.raw(200, json.dumps(said).encode())

  return fault


def late(seconds):
  def fault(handler, said):
    time.sleep(seconds)
    serve.Handler._send(handler, 200, said)

  return fault
