"""A client of OpenAI-compatible chat endpoints, for whatever asks a model one question at a time: deadlines, retries, no surprises.

What a model answers is data. Nothing here evaluates it, and the key never stands in a message of ours.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any


class Unreachable(RuntimeError):
  """The endpoint gave no answer: it refused the request, or every try of it failed on the way."""


class BadAnswer(RuntimeError):
  """An answer came that is not one. cause: "oversized_answer" or "malformed_answer"."""

  def __init__(self, cause: str, message: str):
    super().__init__(message)
    self.cause = cause


class _NoRedirect(urllib.request.HTTPRedirectHandler):
  """A redirect would send goals and the key somewhere else: it is an error like any other 3xx."""

  def redirect_request(self, *args, **kw):
    return None


class Chat:
  """A client of an OpenAI-compatible chat endpoint: one question, one answer, nothing kept between them.

  base_url: http or https, up to the part before /chat/completions. key_env: name of the environment variable with the key, ""
  for none. knobs: what the config calls them, for messages. timeout: seconds for one whole request, however slowly it trickles
  in. A request that times out, breaks on the way or meets status 408, 429 or 5xx is sent again up to `retries` times, after
  backoff, 2 backoff, 4 backoff ... seconds.
  """

  RETRIED = (408, 429, 500, 502, 503, 504)

  def __init__(
    self, base_url: str, model: str, *, key_env: str = "", timeout: float = 60.0, retries: int = 3, backoff: float = 1.0,
    temperature: float = 1.0, most_bytes: int = 2**20, knobs: str = "taskgen",
  ):  # fmt: skip
    parts = urllib.parse.urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
      raise ValueError(f"{knobs}.base_url is not an address of the form http(s)://host[:port]/path, without user, query or fragment")
    if not model:
      raise ValueError(f"{knobs}.model is empty, wanted the model's name at the endpoint")
    if not 0 < timeout < float("inf") or retries < 0 or backoff < 0 or most_bytes < 1:
      raise ValueError(f"chat got timeout={timeout}, retries={retries}, backoff={backoff}, most_bytes={most_bytes}: out of range")
    self.url, self.model, self.name = base_url.rstrip("/") + "/chat/completions", model, f"{model} at {parts.hostname}"
    self.timeout, self.retries, self.backoff = timeout, retries, backoff
    self.temperature, self.most_bytes = temperature, most_bytes
    self._headers = {"Content-Type": "application/json"} | _authorization(key_env, knobs)

  def ask(self, system: str, user: str) -> str:
    """The model's answer. Raises BadAnswer where one came that cannot be read, Unreachable where none came."""
    return content(self.complete([{"role": "system", "content": system}, {"role": "user", "content": user}]))

  def complete(self, messages: list[dict], seconds: float | None = None, **more: Any) -> bytes:
    """The body of the answer to a conversation. more: further entries of the request. seconds: of all tries together, for a caller with
    a deadline of its own. Raises BadAnswer or Unreachable, as `ask`."""
    until = time.monotonic() + (float("inf") if seconds is None else seconds)
    body = json.dumps({"model": self.model, "messages": messages, "temperature": self.temperature} | more).encode()
    tried, fault = 0, "no time was left"
    for again in range(self.retries + 1):
      if again:
        time.sleep(min(self.backoff * 2 ** (again - 1), max(until - time.monotonic(), 0.0)))
      if (left := min(self.timeout, until - time.monotonic())) <= 0:
        break
      tried += 1
      try:
        return self._send(body, left)
      except urllib.error.HTTPError as e:
        e.close()
        fault = f"status {e.code}"
        if e.code not in self.RETRIED:
          break
      except (OSError, http.client.HTTPException) as e:  # URLError and TimeoutError are OSErrors
        fault = f"{type(e).__name__}: {e}"
    raise Unreachable(f"{self.name} gave no answer after {tried} of {self.retries + 1} tries: {' '.join(fault.split())[:200]}")

  def _send(self, body: bytes, seconds: float) -> bytes:
    with _Deadline(seconds) as deadline:
      request = urllib.request.Request(self.url, body, self._headers, method="POST")
      with deadline.opener().open(request, timeout=seconds) as response:
        got, length = bytearray(), response.length  # None where the server does not say: the end of the connection is the end
        while len(got) != length and (chunk := response.read1(65536)):
          got += chunk
          if len(got) > self.most_bytes:
            raise BadAnswer("oversized_answer", f"{self.name} answered with more than {self.most_bytes} bytes")
        if length is not None and len(got) < length:  # read1 does not say so itself
          raise http.client.IncompleteRead(bytes(got), length - len(got))
      return bytes(got)


class _Deadline:
  """Shuts the connections of a request down when its time is up. A socket's own timeout starts anew with every byte, so a
  server that trickles would hold a caller for ever. Looking the host up and a TLS greeting come before it can act."""

  def __init__(self, seconds: float):
    self.seconds, self.over, self._sockets = seconds, False, []
    self._timer = threading.Timer(seconds, self._end)
    self._timer.daemon = True

  def opener(self) -> urllib.request.OpenerDirector:
    keep = self._keep

    class Plain(http.client.HTTPConnection):
      def connect(self):
        super().connect()
        keep(self.sock)

    class Secure(http.client.HTTPSConnection):
      def connect(self):
        super().connect()
        keep(self.sock)

    class ByPlain(urllib.request.HTTPHandler):
      def http_open(self, request):
        return self.do_open(Plain, request)

    class BySecure(urllib.request.HTTPSHandler):
      def https_open(self, request):
        return self.do_open(Secure, request)

    return urllib.request.build_opener(ByPlain, BySecure, _NoRedirect)

  def _keep(self, sock) -> None:
    self._sockets.append(sock)
    if self.over:
      self._end()

  def _end(self) -> None:
    self.over = True
    for sock in self._sockets:
      try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
      except OSError:  # closed already: what was wanted
        continue

  def __enter__(self) -> _Deadline:
    self._timer.start()
    return self

  def __exit__(self, kind, error, trace) -> None:
    self._timer.cancel()
    if self.over and (error is None or isinstance(error, OSError | http.client.HTTPException)):
      raise TimeoutError(f"no whole answer within {self.seconds:g} seconds") from error


def _authorization(key_env: str, knobs: str) -> dict[str, str]:
  """The key never stands in a message of ours."""
  if not key_env:
    return {}
  key = os.environ.get(key_env, "").strip()
  if not key:
    raise ValueError(f"{knobs}.key_env is {key_env}, but that environment variable is not set: set it, or leave key_env empty")
  if not (key.isascii() and key.isprintable()):
    raise ValueError(f"the key in the environment variable {key_env} has characters that no header can carry")
  return {"Authorization": f"Bearer {key}"}


def choice(raw: bytes) -> dict:
  """The first choice of a chat completion."""
  try:
    found = json.loads(raw)["choices"][0]
    found["message"]["content"]  # noqa: B018 - whether it is one
  except (ValueError, RecursionError, LookupError, TypeError) as e:
    raise BadAnswer("malformed_answer", f"the answer is no chat completion ({type(e).__name__})") from e
  return found


def content(raw: bytes) -> str:
  """The text of the first choice of a chat completion."""
  text = choice(raw)["message"]["content"]
  if not isinstance(text, str):
    raise BadAnswer("malformed_answer", f"the answer's content is a {type(text).__name__}, wanted text")
  return text
