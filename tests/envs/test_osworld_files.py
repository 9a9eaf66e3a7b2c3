"""OSWorld task files: every field, setup type and placeholder, what is refused and in which words, and what `--list` says of it."""

import contextlib
import copy
import http.server
import json
import os
import threading
import time

import pytest

from envs.osworld import __main__ as command
from envs.osworld import hand as at_hand
from envs.osworld import taskfile
from envs.osworld.files import Files, stored_name

RULE = {"type": "rule", "rules": {"expected": "x"}}
TASK = {
  "id": "t-1", "snapshot": "os", "instruction": " Do it. ", "source": "ours", "trajectory": "trajectories/", "related_apps": ["os"],
  "proxy": False, "fixed_ip": False, "possibility_of_env_change": "low", "hint": "none", "env_may_change": True, "config": [],
  "evaluator": {"func": "exact_match", "result": {"type": "vm_command_line", "command": "echo x", "shell": True}, "expected": RULE},
}  # fmt: skip
STEPS = [
  ("download", {"files": [{"url": "https://files.test/a.txt", "path": "/home/user/a.txt"}]}),
  ("upload_file", {"files": [{"local_path": "a.txt", "path": "/home/user/a.txt"}]}),
  ("launch", {"command": ["mousepad"]}),
  ("launch", {"command": "socat tcp:1 tcp:2", "shell": True}),
  ("open", {"path": "/home/user/a.txt"}),
  ("execute", {"command": ["python", "-c", "click({SCREEN_WIDTH_HALF}, {SCREEN_HEIGHT_HALF})"], "stdout": "a.out", "stderr": "a.err"}),
  ("execute", {"command": "true", "shell": True, "until": {"returncode": 0}}),
  ("command", {"command": "echo ${HOME_DIR} {CLIENT_PASSWORD}", "shell": True}),
  ("execute_with_verification", {"command": "x", "verification": {"command_success": "true"}, "max_wait_time": 3, "check_interval": 1}),
  ("sleep", {"seconds": 0.5}),
  ("activate_window", {"window_name": "a", "strict": True, "by_class": False}),
  ("close_window", {"window_name": "a"}),
  ("change_wallpaper", {"path": "/home/user/a.png"}),
]
UNRUN = {
  "chrome_open_tabs": {"urls_to_open": ["https://a.test"]},
  "chrome_close_tabs": {"urls_to_close": ["https://a.test"]},
  "update_browse_history": {"history": []},
  "googledrive": {"settings_file": "s", "operation": ["delete"], "args": [{}]},
  "login": {"settings_file": "s", "platform": "googledrive"},
  "proxy": {},
  "replay": {"trajectory": "t"},
  "act": {"action_seq": []},
}


def task(**changed) -> dict:
  return copy.deepcopy(TASK) | changed


def evaluator(**changed) -> dict:
  return task(evaluator=TASK["evaluator"] | changed)


def step(kind, parameters) -> dict:
  return {"type": kind, "parameters": parameters}


def refused(said, *words) -> str:
  with pytest.raises(ValueError) as caught:
    taskfile.parse(said, "t.json")
  told = str(caught.value)
  assert "\n" not in told and told.startswith("t.json") and all(word in told for word in words), told
  return told


@pytest.fixture
def hand(tmp_path):
  (tmp_path / "mirror").mkdir()
  (tmp_path / "mirror" / "a.txt").write_text("a\n")
  return at_hand.Hand(Files([f"https://files.test/={tmp_path / 'mirror'}"]), password="password", uploads=str(tmp_path))


def test_a_whole_task():
  read = taskfile.parse(TASK, "t.json", "os")
  assert (read.id, read.instruction, read.domain, read.conj, read.infeasible) == ("t-1", "Do it.", "os", "and", False)
  assert read.checks == (taskfile.Check("exact_match", TASK["evaluator"]["result"], RULE, {}),)
  assert read.said is TASK  # rare fields (hint, env_may_change) stay where they were
  bare = {"id": "t", "instruction": "x", "evaluator": {"func": "infeasible"}}  # one task of the benchmark has no config
  assert taskfile.parse(bare, "t.json").infeasible and taskfile.parse(bare, "t.json").config == ()


@pytest.mark.parametrize("kind, parameters", STEPS, ids=[f"{i}-{kind}" for i, (kind, _) in enumerate(STEPS)])
def test_every_setup_type_is_read_in_config_and_postconfig(hand, kind, parameters):
  for said in (task(config=[step(kind, parameters)]), evaluator(postconfig=[step(kind, parameters)])):
    read = taskfile.parse(said, "t.json")
    assert (*read.config, *read.postconfig) == (step(kind, parameters),)
    assert at_hand.why_not(read, hand) == ""


@pytest.mark.parametrize("kind", UNRUN)
def test_steps_that_cannot_be_done_here_are_known_and_named(hand, kind):
  read = taskfile.parse(task(config=[step(kind, UNRUN[kind])]), "t.json")
  assert kind in at_hand.why_not(read, hand)


def test_every_step_type_has_a_test():
  assert {kind for kind, _ in STEPS} | UNRUN.keys() == taskfile.STEPS.keys()


def test_lists_of_metrics():
  results, rules = [TASK["evaluator"]["result"], None], [None, RULE]
  refused(evaluator(func=["exact_match", "exact_match"], result=results, expected=rules), "exact_match", "no result")
  results[1] = {"type": "cache_file", "path": "a.out"}
  said = evaluator(func=["exact_match", "check_list"], result=results, expected=rules, conj="or", options=[{"a": 1}, None])
  first, second = taskfile.parse(said, "t.json").checks
  assert (first.expected, first.options, second.expected, second.options) == (None, {"a": 1}, RULE, {})
  for name in ("result", "expected", "options"):
    refused(task(evaluator=said["evaluator"] | {name: [{"type": "rule"}]}), f"evaluator.{name}", "a list of 2")


@pytest.mark.parametrize(
  "said, words",
  [
    ([], ["object"]),
    (task(id=""), ["id"]),
    (task(instruction=None), ["instruction"]),
    ({k: v for k, v in TASK.items() if k != "evaluator"}, ["no evaluator"]),
    (task(evaluator={}), ["no evaluator"]),
    (task(evaluator={"func": []}), ["no evaluator"]),
    (evaluator(func=3), ["evaluator.func"]),
    (evaluator(conj="xor"), ["conj", "'xor'"]),
    (evaluator(result=[]), ["no result"]),
    (evaluator(result="a"), ["evaluator.result"]),
    (evaluator(result={"path": "a"}), ["no type of getter"]),
    (evaluator(func=["infeasible", "exact_match"], result=[None, RULE], expected=None), ["infeasible stands alone"]),
    (task(config={"type": "sleep"}), ["config", "list"]),
    (task(config=[step("downlod", {})]), ["config[0]", "unknown setup type 'downlod'", "download"]),
    (task(config=[step("sleep", {"seconds": "2"})]), ["seconds"]),
    (task(config=[step("sleep", {"seconds": 2, "minutes": 1})]), ["sleep has no parameter minutes"]),
    (task(config=[step("launch", {})]), ["launch lacks command"]),
    (task(config=[step("launch", {"command": [1]})]), ["command"]),
    (task(config=[step("open", {"path": ""})]), ["path"]),
    (task(config=[step("download", {"files": [{"url": "https://a"}]})]), ["files", "url and path"]),
    (task(config=[step("execute", {"command": "x", "until": {"code": 0}})]), ["until"]),
    (task(config=[step("execute", {"command": "echo {SCREEN_DEPTH}"})]), ["unknown placeholder {SCREEN_DEPTH}"]),
    (task(config=[step("sleep", {"seconds": float("nan")})]), ["seconds is nan"]),
    (task(config=[step("execute", {"command": "x", "stdout": 5})]), ["stdout is 5"]),
    (task(config=[step("execute", {"command": "x", "until": {"stdout": 5}})]), ["until"]),
    (task(config=[step("execute_with_verification", {"command": "x", "max_wait_time": "long"})]), ["max_wait_time"]),
    (evaluator(expected={"type": "cloud_file", "path": [5], "dest": "a"}), ["path of cloud_file is [5]"]),
    (evaluator(postconfig=[step("sleep", {})]), ["evaluator.postconfig[0]", "sleep lacks seconds"]),
    (task(id="a\nb"), ["id is 'a\\nb'", "one line"]),
    (task(config=["a\nb"]), ["config[0]", "'a\\nb'"]),
    (task(config=[step("execute_with_verification", {"command": "x", "verification": {"window_exists": 5}})]), ["verification"]),
    (task(config=[step("execute", {"command": ["echo", "a\0b"]})]), ["'a\\x00b'", "NUL"]),
    (task(hint={"a": ["\ud800"]}), ["'\\ud800'", "surrogate"]),
    (task(hint={"\ud800": 1}), ["surrogate"]),
    (task(hint=json.loads("[" * 51 + "]" * 51)), ["nested more than 50 deep"]),
  ],
)
def test_what_is_refused_in_one_line(said, words):
  refused(said, *words)


def test_placeholders():
  values = {"CLIENT_PASSWORD": "p w", "SCREEN_WIDTH": "1920", "SCREEN_WIDTH_HALF": "960", "SCREEN_HEIGHT": "", "SCREEN_HEIGHT_HALF": ""}
  assert taskfile.fill("echo {CLIENT_PASSWORD}|{SCREEN_WIDTH_HALF}{x}${SCREEN_WIDTH}", values, "t") == "echo p w|960{x}${SCREEN_WIDTH}"
  assert taskfile.fill(["{SCREEN_WIDTH}", "b"], values, "t") == ["1920", "b"]
  with pytest.raises(ValueError, match="SCREEN_HEIGHT} has no value"):
    taskfile.fill("{SCREEN_HEIGHT}", values, "t")


@pytest.mark.parametrize(
  "said, why",
  [
    (evaluator(func="compare_vibes"), "unknown metric compare_vibes"),
    (evaluator(result={"type": "crystal_ball"}), "unknown getter crystal_ball"),
    (evaluator(result={"type": "open_tabs_info"}), "getter open_tabs_info needs Chrome"),
    (evaluator(result={"type": "googledrive_file"}), "Google account"),
    (evaluator(result={"type": "vm_file", "path": "/a"}), "vm_file lacks dest"),
    (evaluator(expected={"type": "cloud_file", "dest": "a"}), "cloud_file lacks path"),
    (evaluator(result={"type": "vm_command_line", "command": 5}), "command is 5"),
    (evaluator(result={"type": "vm_file", "path": "/a", "dest": "../../a"}), "'../../a' is no name"),
    (evaluator(result={"type": "vm_file", "path": ["/a", "/b"], "dest": ["a"], "multi": True}), "lists of one length"),
    (evaluator(result={"type": "cache_file", "path": "/etc/passwd"}), "'/etc/passwd' is no name"),
    (evaluator(result={"type": "cache_file", "path": ["a"]}), "['a'] is no name"),
    (evaluator(result={"type": "cache_file", "path": None}), "None is no name"),
    (evaluator(result={"type": "vm_file", "path": "/a", "dest": "\u00e9" * 101}), "is no name"),  # 202 bytes of UTF-8
    (evaluator(result={"type": "vm_file", "path": ["/a"], "dest": ["a"], "multi": True, "gives": None}), "gives is None"),
    (evaluator(result={"type": "vm_file", "path": "/a", "dest": "a", "time_format": "/%Y"}), "time_format is '/%Y'"),
    (evaluator(options={"strictly": True}), "metric exact_match does not take what it is given: got an unexpected"),
    (evaluator(expected=None), "metric exact_match does not take what it is given: missing a required argument: 'rules'"),
    (evaluator(expected={"type": "cloud_file", "path": "https://files.test/http://[", "dest": "b"}), "Invalid IPv6"),
    (evaluator(expected={"type": "cloud_file", "path": f"https://files.test/{'a' * 300}", "dest": "b"}), "File name too long"),
    (evaluator(expected={"type": "cloud_file", "path": "https://files.test/circle", "dest": "b"}), "cannot be looked for: 'https://files.test/circle'"),
    (evaluator(expected={"type": "cloud_file", "path": "https://files.test/b.txt", "dest": "b"}), "not on this machine: https://files.test/b.txt"),
    (task(config=[step("download", {"files": [{"url": "https://files.test/../secret", "path": "/a"}]})]), "not on this machine"),
    (task(config=[step("execute", {"command": "x", "stdout": "/tmp/a"})]), "stdout '/tmp/a' is no name"),
    (task(proxy=True), "proxy: true"),
  ],
)  # fmt: skip
def test_why_a_task_cannot_be_run(hand, tmp_path, said, why):
  (tmp_path / "secret").write_text("beside the mirror")
  (tmp_path / "mirror" / "circle").symlink_to("circle")
  try:
    told = at_hand.why_not(taskfile.parse(said, "t.json"), hand)
  except ValueError as error:
    told = str(error)
  assert why in told and "\n" not in told


def test_what_is_at_hand_decides(hand):
  for said, less in (
    (task(config=[step("execute", {"command": "echo {CLIENT_PASSWORD}"})]), "CLIENT_PASSWORD} has no value: set env.password"),
    (task(config=[step(*STEPS[1])]), "env.uploads"),
  ):
    read = taskfile.parse(said, "t.json")
    assert at_hand.why_not(read, hand) == "" and less in at_hand.why_not(read, at_hand.Hand(hand.files))
  foreign = at_hand.Hand(hand.files, frozenset({"compare_vibes"}), frozenset({"vlc_config", "list_directory"}))
  said = evaluator(func="compare_vibes", result={"type": "vlc_config", "dest": "vlcrc"})
  assert at_hand.why_not(taskfile.parse(said, "t.json"), foreign) == "" and foreign.theirs("compare_vibes")
  assert not foreign.theirs("exact_match")  # what is built in is never theirs
  said = evaluator(func="compare_tea", result={"type": "list_directory", "path": "/"})
  assert "nor in this desktop-env" in at_hand.why_not(taskfile.parse(said, "t.json"), foreign)
  said = evaluator(result={"type": "list_directory", "path": "/"})
  assert "connections of its own" in at_hand.why_not(taskfile.parse(said, "t.json"), foreign)


def laid_out(tmp_path, **tasks) -> str:
  folder = tmp_path / "examples" / "os"
  folder.mkdir(parents=True)
  for name, said in tasks.items():
    (folder / f"{name}.json").write_text(said if isinstance(said, str) else json.dumps(said))
  return str(tmp_path)


def test_the_list_has_a_row_for_every_file_whatever_is_in_it(tmp_path, capsys):
  folder = laid_out(tmp_path, a=task(id="a"), b="{not json", c=evaluator(func="compare_vibes") | {"id": "c"}, d="[" * 100_000)
  (tmp_path / "examples" / "os" / "e.json").write_bytes(b"\xff\xfe\x00")
  assert command.main(["--list", "--json", f"--tasks={folder}"]) == 0
  rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert [(row["id"], row["domain"], row["runs"]) for row in rows] == [
    ("a", "os", True), ("b", "os", False), ("c", "os", False), ("d", "os", False), ("e", "os", False),
  ]  # fmt: skip
  assert ["" if not row["why"] else row["why"].split(":")[0] for row in rows] == [
    "", "b.json", "unknown metric compare_vibes", "d.json", "e.json",
  ]  # fmt: skip
  assert command.main(["--list", f"--tasks={folder}"]) == 0
  assert "1 of 5 can be run" in capsys.readouterr().out


def test_files_that_are_none_and_ids_that_are_taken_are_rows_too(tmp_path, capsys):
  """A pipe was waited for without end, and one URL too long for a file's name ended the list of all the others."""
  far = {"type": "cloud_file", "path": f"https://files.test/{'a' * 300}", "dest": "b"}
  folder = laid_out(tmp_path, a=task(id="a"), b=task(id="a"), c=f'{{"id": {"1" * 5000}}}', d=evaluator(expected=far) | {"id": "d"})
  os.mkfifo(tmp_path / "examples" / "os" / "e.json")
  (tmp_path / "mirror").mkdir()
  assert command.main(["--list", "--json", f"--tasks={folder}", f"--mirror=https://files.test/={tmp_path / 'mirror'}"]) == 0
  rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert [row["why"].split(":")[0] for row in rows] == [
    "", "its id is that of os/a.json too", "c.json", "a URL that cannot be looked for", "e.json",
  ]  # fmt: skip


def test_reasons_are_counted_without_their_particulars_and_not_cut_in_a_word():
  for why, kind in {
    "getter url_dashPart needs Chrome's debugging port or the live web, which is not spoken": (
      "getter url_dashPart needs Chrome's debugging port or the live web"
    ),
    "not on this machine: https://a/b (env.mirrors or --mirror, or --prefetch)": "not on this machine",
    "unknown metric compare_vibes: not built in": "unknown metric",
  }.items():
    assert command.kind_of(why) == kind


def test_an_index_chooses_and_wrong_folders_are_one_line(tmp_path, capsys):
  folder = laid_out(tmp_path, a=task(id="a"), b=task(id="b"))
  (tmp_path / "test_small.json").write_text(json.dumps({"os": ["b", "z"]}))
  assert command.main(["--list", "--json", f"--tasks={folder}", "--index=test_small.json"]) == 0
  rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert [(row["id"], row["runs"]) for row in rows] == [("b", True), ("z", False)] and "No such file" in rows[1]["why"]
  (tmp_path / "climbs.json").write_text(json.dumps({"../..": ["secret"]}))
  (tmp_path / "letters.json").write_text(json.dumps({"os": "ab"}))
  (tmp_path / "deep.json").write_text("[" * 100_000)
  wrong = ("--index=none.json", "--index=climbs.json", "--index=letters.json", "--index=deep.json", "--mirror=x")
  for given in ([f"--tasks={tmp_path}/none"], *([f"--tasks={folder}", one] for one in wrong)):
    assert command.main(["--list", *given]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "wanted" in told or "no such folder" in told


class Archive(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    if self.path == "/short.txt":
      self.send_response(200)
      self.send_header("Content-Length", "100")
      self.end_headers()
      self.wfile.write(b"not all")
      return
    found = self.path.endswith("/a%20b.txt")
    self.send_response(200 if found else 404)
    self.end_headers()
    self.wfile.write(b"the file" if found else b"")

  def log_message(self, *args):
    pass


def test_prefetch_fills_the_store_and_says_what_it_could_not_have(tmp_path, capsys):
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Archive)
  threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
  try:
    base = f"http://127.0.0.1:{server.server_address[1]}"
    good, gone, short, local = f"{base}/x/a%20b.txt", f"{base}/gone.txt", f"{base}/short.txt", "file:///etc/passwd"
    odd = f"{base}/a b.txt"  # which http.client refuses with an error of its own
    files = [{"url": url, "path": "/home/user/a"} for url in (good, gone, short, local, odd)]
    folder = laid_out(tmp_path / "tasks", a=task(config=[step("download", {"files": files})]), b="{}")
    store = tmp_path / "store"
    assert command.main(["--prefetch", f"--tasks={folder}", f"--store={store}"]) == 1
    assert "4 files could not be had" in capsys.readouterr().err
  finally:
    server.shutdown()
    server.server_close()
  found = Files(store=str(store))
  assert found.find(good).read_text() == "the file" and [found.find(u) for u in (gone, short, local)] == [None] * 3
  assert [p.name for p in store.iterdir()] == [stored_name(good)]  # nothing half written
  # uuid5 of the URL, as the benchmark's own cache has it: worked out with Python's uuid in another process
  assert stored_name("https://a.test/b/c.xlsx") == "173721f5-14a8-5f8f-b596-87ae2d547d39_c.xlsx"
  (store / "173721f5-14a8-5f8f-b596-87ae2d547d39_guest.xlsx").write_text("y")  # the benchmark's cache: named as in the guest
  assert found.find("https://a.test/b/c.xlsx").read_text() == "y"
  assert len(stored_name("https://a.test/" + "%E4%BD%A0" * 100).encode()) < 255  # a hundred letters of three bytes
  assert found.prefetch([good], print) == {}  # what is there is not fetched again: the server is gone


def test_a_server_that_trickles_is_given_up(tmp_path, monkeypatch):
  """Every byte comes within the time that a server may say nothing; all of them would take two minutes."""

  class Trickle(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      self.send_response(200)
      self.send_header("Content-Length", "1200")
      self.end_headers()
      with contextlib.suppress(OSError):
        for _ in range(1200):
          self.wfile.write(b"x")
          time.sleep(0.1)

    def log_message(self, *args):
      pass

  monkeypatch.setattr("envs.osworld.files.MOST_SECONDS", 0.5)
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trickle)
  server.daemon_threads = True
  threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
  try:
    began, url = time.monotonic(), f"http://127.0.0.1:{server.server_address[1]}/slow.txt"
    failed = Files(store=str(tmp_path)).prefetch([url], print)
  finally:
    server.shutdown()
    server.server_close()
  assert "after 0.5 s" in failed[url] and time.monotonic() - began < 60 and not list(tmp_path.iterdir())


def test_a_mirror_of_a_longer_prefix_and_of_names_with_spaces(tmp_path):
  (tmp_path / "a b.txt").write_text("x")
  files = Files([f"https://files.test/main/={tmp_path}"])
  assert files.find("https://files.test/main/a%20b.txt?download=true") == tmp_path / "a b.txt"
  assert files.find("https://files.test/other/a%20b.txt") is None
  assert files.find("https://files.test/main/%2e%2e/a") is None
