"""The client of a guest's HTTP API against a server of the test, which keeps what it was sent and answers as it is told."""

import email
import http.server
import io
import json
import socket
import threading

import numpy as np
import pytest
from PIL import Image

from envs.errors import BadFrame, Deadline, InfraError
from envs.guest import CommandTimeout, Guest, GuestFault, GuestHung, GuestLost, Ran
from envs.loopback import Served


class Scripted:
  """answers: route -> (status, body) or a function of the handler. asked: (method, route, headers, body) as they came."""

  def __init__(self):
    self.answers, self.asked = {}, []
    outer = self

    class Handler(http.server.BaseHTTPRequestHandler):
      def log_message(self, *args):
        pass

      def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        outer.asked.append((self.command, self.path, dict(self.headers), body))
        answer = outer.answers.get(self.path, (404, b"{}"))
        if callable(answer):
          return answer(self)
        status, said = answer
        said = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

      do_POST = do_GET

    self.served = Served(Handler)
    self.guest = Guest(int(self.served.place.split(":")[1]), seconds=5.0)


@pytest.fixture
def scripted():
  made = Scripted()
  yield made
  made.served.close()


def test_what_is_seen(scripted):
  pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3)).astype(np.uint8)
  png = io.BytesIO()
  Image.fromarray(pixels).save(png, "PNG")
  scripted.answers = {
    "/screenshot": (200, png.getvalue()),
    "/accessibility": (200, {"AT": "<desktop/>"}),
    "/terminal": (200, {"output": "user@desktop:~$ ls", "status": "success"}),
    "/platform": (200, b"Linux"),
    "/cursor_position": (200, [3, 4]),
    "/screen_size": (200, {"width": 1024, "height": 768}),
    "/window_size": (200, {"width": 300, "height": 200}),
    "/desktop_path": (200, {"desktop_path": "/home/user/Desktop"}),
    "/wallpaper": (200, b"\x89PNG"),
    "/list_directory": (200, {"directory_tree": {"type": "directory", "name": "Desktop", "children": []}}),
  }
  guest = scripted.guest
  assert np.array_equal(guest.screenshot(), pixels)
  assert guest.accessibility() == "<desktop/>" and guest.terminal() == "user@desktop:~$ ls" and guest.platform() == "Linux"
  assert guest.cursor_position() == (3, 4) and guest.screen_size() == (1024, 768) and guest.window_size("mousepad") == (300, 200)
  assert guest.desktop_path() == "/home/user/Desktop" and guest.wallpaper() == b"\x89PNG"
  assert guest.list_directory("/home/user/Desktop")["name"] == "Desktop"
  asked = {route: (method, headers.get("Content-Type"), body) for method, route, headers, body in scripted.asked}
  assert asked["/window_size"] == ("POST", "application/x-www-form-urlencoded", b"app_class_name=mousepad")
  assert asked["/screen_size"] == ("POST", None, b"") and asked["/screenshot"][0] == "GET"
  assert asked["/list_directory"] == ("POST", "application/json", b'{"path": "/home/user/Desktop"}')


def test_what_is_not_there_is_an_answer_and_no_fault(scripted):
  guest = scripted.guest
  scripted.answers = {"/terminal": (500, {"status": "error"}), "/window_size": (500, b"None")}
  assert guest.file("/tmp/none") is None and guest.wallpaper() is None and guest.list_directory("/none") is None
  assert guest.terminal() is None and guest.window_size("none") is None
  assert not guest.activate_window("none") and not guest.close_window("none") and not guest.open_file("/none")
  assert not guest.change_wallpaper("/none")


def test_a_file_goes_in_and_comes_out_as_it_is(scripted):
  data = bytes(range(256)) * 3 + b"\r\n--x\r\n"
  scripted.answers = {"/setup/upload": (200, b"File Uploaded"), "/file": (200, data)}
  scripted.guest.upload("~/Desktop/a b\u00e9.bin", data)
  assert scripted.guest.file("$HOME/a&b.bin") == data
  (_, _, headers, sent), (_, _, _, form) = scripted.asked
  parts = email.message_from_bytes(f"Content-Type: {headers['Content-Type']}\r\n\r\n".encode() + sent).get_payload()
  named = {part.get_param("name", header="content-disposition"): part.get_payload(decode=True) for part in parts}
  assert named == {"file_path": "~/Desktop/a b\u00e9.bin".encode(), "file_data": data}
  assert form == b"file_path=%24HOME%2Fa%26b.bin"


def test_commands(scripted):
  done = {"status": "success", "output": "out", "error": "err", "returncode": 3}
  scripted.answers = {"/execute": (200, done), "/run_python": (200, done | {"return_code": 4}), "/run_bash_script": (200, done)}
  scripted.answers |= {"/setup/launch": (200, b"ok"), "/execute_with_verification": (200, done | {"wait_time": 1.0})}
  guest = scripted.guest
  assert guest.execute(["ls", "-l"]) == Ran("out", "err", 3) == guest.run_bash("ls") == guest.execute_with_verification("ls", {})
  assert guest.run_python("1") == Ran("out", "err", 4)
  guest.launch("mousepad", shell=True)
  bodies = [json.loads(body) for *_, body in scripted.asked]
  assert (bodies[0]["command"], bodies[0]["shell"]) == (["ls", "-l"], False) and 0 < bodies[0]["timeout"] < 5.0
  assert bodies[4] == {"command": "mousepad", "shell": True} and bodies[3]["code"] == "1" and 0 < bodies[3]["timeout"] < 5.0
  scripted.answers["/execute"] = (500, {"status": "error", "message": "Command 'sleep' timed out after 3 seconds"})
  with pytest.raises(CommandTimeout, match="timed out after 3"):
    guest.execute("sleep 9", shell=True)
  scripted.answers["/execute"] = (500, {"status": "error", "message": "no such file: 'nothing'"})
  with pytest.raises(GuestFault, match="no such file") as raised:
    guest.execute(["nothing"])
  assert not isinstance(raised.value, CommandTimeout)
  scripted.answers["/run_python"] = (500, {"status": "error", "message": "Execution timeout: Code took too long", "output": None})
  with pytest.raises(CommandTimeout, match="too long"):
    guest.run_python("while True: pass")
  scripted.answers["/run_bash_script"] = (500, {"status": "error", "output": "Script timed out", "error": "", "returncode": -1})
  with pytest.raises(CommandTimeout, match="timed out"):
    guest.run_bash("sleep 9")
  scripted.answers["/execute_with_verification"] = (500, {"status": "verification_failed"})
  assert guest.execute_with_verification("ls", {"window_exists": "x"}) is None


def test_the_clock_is_what_the_head_of_an_answer_says(scripted):
  def dated(date):
    def answer(handler):
      handler.send_response_only(200)
      handler.send_header("Date", date)
      handler.send_header("Content-Length", "5")
      handler.end_headers()
      handler.wfile.write(b"Linux")

    return answer

  scripted.answers = {"/platform": dated("Mon, 05 Jan 2026 10:00:07 GMT")}
  assert scripted.guest.clock() == 1767607200 + 7  # date -u -d '2026-01-05 10:00' +%s
  scripted.answers = {"/platform": dated("yesterday")}
  with pytest.raises(GuestFault, match="dated 'yesterday'"):
    scripted.guest.clock()


@pytest.mark.parametrize("said", [b"<html>", b"[1]", b'{"AT": 5}', b"{}", b"[" * 200_000])
def test_what_the_api_does_not_say_is_a_fault(scripted, said):
  scripted.answers = {"/accessibility": (200, said), "/screen_size": (200, {"width": "1024", "height": 768})}
  with pytest.raises(GuestFault):
    scripted.guest.accessibility()
  with pytest.raises(GuestFault):
    scripted.guest.screen_size()
  scripted.answers["/screenshot"] = (200, b"\x89PNG torn")
  with pytest.raises(BadFrame):
    scripted.guest.screenshot()
  scripted.answers["/setup/launch"] = (500, b"no such program")
  with pytest.raises(GuestFault, match="no such program"):
    scripted.guest.launch(["nothing"])


def test_nobody_there_and_a_broken_connection_are_told_apart_from_slowness(scripted):
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))  # bound, not listening
    with pytest.raises(GuestLost):
      Guest(taken.getsockname()[1]).platform(5.0)

  def half(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b"Lin")

  scripted.answers["/platform"] = half
  with pytest.raises(GuestLost, match="IncompleteRead"):
    scripted.guest.platform()
  assert len(scripted.asked) == 1  # never asked twice


def test_a_deadline_holds_over_the_whole_answer(scripted):
  over = threading.Event()

  def trickle(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    while not over.wait(0.02):
      handler.wfile.write(b"x")
      handler.wfile.flush()

  scripted.answers = {"/platform": lambda handler: over.wait(20.0), "/file": trickle}
  try:
    for call in (scripted.guest.platform, lambda seconds: scripted.guest.file("/x", seconds)):
      with pytest.raises(GuestHung, match="within 0.3 s") as raised:
        call(0.3)
      assert isinstance(raised.value, Deadline) and isinstance(raised.value, InfraError)
  finally:
    over.set()


def test_waiting_ends_when_the_server_answers_and_with_the_last_fault_when_it_does_not(scripted):
  def later(handler):
    scripted.answers["/platform"] = (200, b"Linux")
    handler.send_error(500)

  scripted.answers["/platform"] = later
  scripted.guest.wait(5.0, every=0.01)
  assert len(scripted.asked) == 2
  scripted.answers["/platform"] = (503, b"not yet")
  with pytest.raises(GuestFault, match="not yet"):
    scripted.guest.wait(0.5, every=0.1)
