"""A small HTTP server of one's own process on 127.0.0.1, on a port that the system picks."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable


class _Server(http.server.ThreadingHTTPServer):
  daemon_threads = True
  block_on_close = False

  def handle_error(self, request, client_address) -> None:
    """A browser that breaks off is nothing to report."""


class Served:
  """handler: makes a BaseHTTPRequestHandler for each connection. place: its host:port."""

  def __init__(self, handler: Callable):
    self.server = _Server(("127.0.0.1", 0), handler)
    self.place = f"127.0.0.1:{self.server.server_address[1]}"
    self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    self.thread.start()

  def close(self) -> None:
    self.server.shutdown()
    self.server.server_close()
    self.thread.join(5)


class Files(http.server.SimpleHTTPRequestHandler):
  """The files of one folder, given as `directory`."""

  protocol_version = "HTTP/1.1"

  def log_message(self, format: str, *args) -> None:
    """Requests are not logged."""

  def list_directory(self, path):
    self.send_error(404)
