"""How sampling servers speak: request bodies, answers and the steps of a reload, as a table of pure functions. No network here.

  openai   POST /v1/completions with token ids, as OpenAI's API has it, and three fields that it has not: `content_parts` (images),
           `prompt_token_ids` and `weight_versions`. tools/serve.py speaks it
  vllm     POST /inference/v1/generate, vLLM's tokens in, tokens out (vllm serve --enable-scale-out)
  sglang   POST /generate, SGLang's own

Every dialect asks for the whole vocabulary at one temperature: a server's own defaults (top-k, penalties) would change the
distribution that the log-probabilities are of. The forms of vLLM and SGLang are those of their documentation and source;
docs/rollouts.md says what was checked and what was not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Json = dict[str, Any]
Request = tuple[str, Json | None]  # path, and what is posted there; None = GET


class Ask(NamedTuple):
  """One action asked for. tokens: the prompt as it is trained on; short: with one placeholder an image, for servers that put
  the others there themselves; images: PNG data URLs; seed: 64 bits, unsigned; most: tokens to write; eos: the id that ends it."""

  model: str
  tokens: list[int]
  short: list[int]
  images: list[str]
  seed: int
  temperature: float
  most: int
  eos: int


class Answer(NamedTuple):
  """What a server says it wrote, as it says so: nothing here has been checked. logp: of each token; spans: (label, first, after
  the last) of the weights that wrote them; by_token: False where there is but the label of the end; prompt: the ids it read, or
  how many; finish: "stop", "length" or why else it ended."""

  tokens: list
  logp: list
  spans: list[tuple[str, int, int]]
  by_token: bool
  prompt: list | int
  finish: str


class Dialect(NamedTuple):
  """path: where `body(ask)` is posted; answer(said) -> Answer, any LookupError or TypeError meaning that it is none. setup: once
  a server, before its first reload; reload(folder, label): weights from a folder, under a label; resume: after a reload that
  went well; label_at: where label(said) finds the label of the weights there now."""

  path: str
  body: Callable[[Ask], Json]
  answer: Callable[[Json], Answer]
  setup: tuple[Request, ...]
  reload: Callable[[str, str], list[Request]]
  resume: tuple[Request, ...]
  label_at: str
  label: Callable[[Json], str]


def _parts(images: list[str]) -> list[Json]:
  return [{"type": "image_url", "image_url": {"url": url}} for url in images]


def _signed(seed: int) -> int:
  return seed - 2**64 if seed >= 2**63 else seed


def _spans(said: list[Json]) -> list[tuple[str, int, int]]:
  return [(s["version"], s["start"], s["end"]) for s in said]


# ---------------------------------------------------------------- openai


def _openai_body(ask: Ask) -> Json:
  return {
    "model": ask.model, "prompt": ask.tokens, "content_parts": _parts(ask.images), "max_tokens": ask.most, "seed": _signed(ask.seed),
    "temperature": ask.temperature, "top_p": 1.0, "n": 1, "stop_token_ids": [ask.eos], "logprobs": 1, "return_token_ids": True,
  }  # fmt: skip


def _openai_answer(said: Json) -> Answer:
  c = said["choices"][0]
  spans = _spans(c["weight_versions"])
  return Answer(c["token_ids"], c["logprobs"]["token_logprobs"], spans, True, c["prompt_token_ids"], c["finish_reason"])


# ---------------------------------------------------------------- vllm


def _vllm_body(ask: Ask) -> Json:
  # ignore_eos: what ends an action is eos alone, and not whatever else the model's generation_config.json names
  sampling = {
    "temperature": ask.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "seed": _signed(ask.seed), "max_tokens": ask.most, "stop_token_ids": [ask.eos], "ignore_eos": True,
    "logprobs": 1, "detokenize": False,
  }  # fmt: skip
  images = {"content_parts": _parts(ask.images)} if ask.images else {}
  model = {"model": ask.model} if ask.model else {}
  return {"token_ids": ask.short, "sampling_params": sampling, "return_token_ids": True, "stream": False} | images | model


def _vllm_answer(said: Json) -> Answer:
  c = said["choices"][0]
  logp = [x["logprob"] if x["token_id"] == t else None for x, t in zip(c["logprobs"]["content"], c["token_ids"], strict=False)]
  logp += [None] * (len(c["logprobs"]["content"]) - len(logp))  # a length that is wrong stays wrong
  return Answer(c["token_ids"], logp, _spans(c["weight_versions"]), True, said["prompt_token_ids"], c["finish_reason"])


def _vllm_reload(folder: str, label: str) -> list[Request]:
  # wait: actions under way are written to their end by the weights they began with; "keep" would go on over the old ones' cache
  load = {"update_info": {"path": folder}}
  return [
    ("/pause?mode=wait", {}),
    ("/start_weight_update", {}),
    ("/update_weights", load),
    ("/finish_weight_update", {"weight_version": label}),
  ]


# ---------------------------------------------------------------- sglang


def _sglang_body(ask: Ask) -> Json:
  sampling = {
    "temperature": ask.temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "sampling_seed": ask.seed % 2**63, "max_new_tokens": ask.most, "stop_token_ids": [ask.eos],
  }  # fmt: skip
  images = {"image_data": ask.images} if ask.images else {}
  return {"input_ids": ask.short, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": -1, "stream": False} | images


def _sglang_answer(said: Json) -> Answer:
  meta = said["meta_info"]
  pairs, by_token = meta["output_token_logprobs"], "weight_versions" in meta
  spans = _spans(meta["weight_versions"]) if by_token else [(meta["weight_version"], 0, len(pairs))]
  return Answer([p[1] for p in pairs], [p[0] for p in pairs], spans, by_token, meta["prompt_tokens"], meta["finish_reason"]["type"])


def _sglang_reload(folder: str, label: str) -> list[Request]:
  # retract: actions under way go on under the new weights, their cache computed anew
  load = {"model_path": folder, "weight_version": label, "flush_cache": True}
  return [("/pause_generation", {"mode": "retract"}), ("/update_weights_from_disk", load)]


DIALECTS = {
  "openai": Dialect(
    "/v1/completions", _openai_body, _openai_answer, (),
    lambda folder, label: [("/update_weights", {"update_info": {"path": folder}, "weight_version": label})], (),
    "/weight_info", lambda said: said["weight_version"],
  ),
  "vllm": Dialect(
    "/inference/v1/generate", _vllm_body, _vllm_answer, (("/init_weight_transfer_engine", {"init_info": {}}),),
    _vllm_reload, (("/resume", {}),), "/weight_info", lambda said: said["weight_version"],
  ),
  "sglang": Dialect(
    "/generate", _sglang_body, _sglang_answer, (), _sglang_reload, (("/continue_generation", {}),),
    "/model_info", lambda said: said["weight_version"],
  ),
}  # fmt: skip
