"""A site of single pages for the browser's tests: what is there is what a test puts there."""

import http.server

from envs import web
from envs.loopback import Served


class Pages:
  """A site (see envs.web): /NAME shows pages[NAME]; the page passes by window.passed, and ends a try by window.over."""

  private, graded, keeps = True, False, 1

  def __init__(self, pages):
    site = self

    class Handler(http.server.BaseHTTPRequestHandler):
      def do_GET(self):
        name = self.path[1:].split("?")[0]
        site.asked.append(self.path)
        body = site.pages.get(name, "gone").encode()
        self.send_response(200 if name in site.pages else 404)
        self.send_header("Content-Type", "application/octet-stream" if name.endswith(".bin") else "text/html; charset=utf-8")
        self.send_header("Set-Cookie", f"seen={name}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

      def log_message(self, *args):
        pass

    self.pages, self.asked, self.served = pages, [], Served(Handler)

  def url(self, name):
    return f"http://{self.served.place}/{name}"

  def places(self):
    return [self.served.place]

  def begin(self, window, task):
    window.goto(self.url(task.params["page"]))

  def look(self, window):
    return {"popup": "", "page": window.url().rpartition("/")[2]}

  def over(self, window):
    return bool(window.evaluate("window.over"))

  def verdict(self, window, task, frames, texts, answer):
    return float(bool(window.evaluate("window.passed")) or answer == "42")

  def close(self):
    self.served.close()


def knobs(**given):
  cfg = web.defaults()
  cfg.update({"viewport": (480, 320), "call_seconds": 60.0, "boot_seconds": 120.0, "wait_seconds": 0.01, "settle_frames": 1} | given)
  return cfg
