"""The episode page by a real HTTP client. tests/real/test_episode_page.py has it in a real browser."""

import contextlib
import html
import html.parser
import http.client
import json
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from urllib.parse import urlencode

import httpx2
import numpy as np
import pytest
from werkzeug.serving import make_server

from core.find import ROOT
from core.schema import Action, Screen
from rollout import labels as store_labels
from rollout.store import EpisodeStore, read_trajectories
from tests.conftest import make_episode
from tools import labels
from tools.episode_rows import parse_filters, value_line
from tools.episodes import EpisodePage, Handler

HOSTILE = """</pre><script>alert(1)</script><img src=x onerror="alert(2)"> {{ 7*7 }} ' onclick='alert(3)"""


PLAIN = {
  "html", "head", "meta", "title", "link", "script", "body", "header", "nav", "main", "a", "b", "kbd", "span", "small", "h1", "h2",
  "h3", "p", "pre", "form", "input", "label", "select", "option", "datalist", "button", "table", "thead", "tbody", "tr", "th", "td",
  "div", "section", "svg", "image", "rect", "path", "circle", "line", "dl", "dt", "dd", "details", "summary", "br",
}  # fmt: skip


class Site:
  """A running page. get and post go with its cookie, bare without."""

  def __init__(self, workdir):
    self.app = EpisodePage(workdir, "right", by="ann")
    self.server = make_server("127.0.0.1", 0, self.app, threaded=True, request_handler=Handler)
    self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
    self.thread.start()
    self.origin = f"http://127.0.0.1:{self.server.port}"
    self.bare = httpx2.Client(base_url=self.origin, timeout=30)
    self.client = httpx2.Client(base_url=self.origin, timeout=30)
    self.client.get("/?token=right")

  def get(self, path, **params):
    return self.client.get(path + (f"?{urlencode(params)}" if params else ""))

  def post(self, path, **form):
    return self.client.post(path, data=form, headers={"Origin": self.origin})

  def close(self):
    self.bare.close()
    self.client.close()
    self.server.shutdown()
    self.thread.join(10)
    self.server.server_close()
    self.app.store.close()


@pytest.fixture
def site(workdir):
  made = Site(workdir)
  yield made
  made.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """12 groups of 10 tries (ids 1 to 120): the first try of each passes, the last is unreadable, of group 11 all are infra errors."""
  folder = tmp_path_factory.mktemp("made")
  with EpisodeStore(folder / "episodes") as store:
    for g in range(12):
      for i in range(10):
        raw = None if g == 11 else 1 if i == 0 else -1 if i == 9 else 0
        one = make_episode(raw, group=f"u{g}-g0", index=i, task=f"shop/{g % 3}", version=2 * g)
        one.family, one.advantage = ("shopping", "general")[g % 2], {1: 2.0, 0: -0.25, -1: -1.5}.get(raw)
        store.add(one, g)
  return folder


@pytest.fixture
def workdir(made, tmp_path):
  return shutil.copytree(made, tmp_path / "run")


def writing(workdir):
  return contextlib.closing(sqlite3.connect(labels.index_of(workdir)))


class Tags(html.parser.HTMLParser):
  """Every tag of a page with its attributes, and the text between."""

  def __init__(self, page):
    super().__init__()
    self.tags, self.text = [], ""
    self.feed(page)

  def handle_starttag(self, tag, attributes):
    self.tags.append((tag, dict(attributes)))

  def handle_data(self, data):
    self.text += data


def ids(response):
  assert response.status_code == 200, response.text
  return [int(x) for x in re.findall(r'<td><a href="/episode/(\d+)', response.text)]


# -- who may look


def test_only_the_token_opens_the_page(site):
  for path in (
    "/",
    "/episode/1",
    "/label",
    "/grader",
    "/labels.jsonl",
    "/static/page.js",
    "/group?id=u0-g0&update=0",
    "/?token=",
    "/?token=wrong",
  ):
    answer = site.bare.get(path)
    assert answer.status_code == 403 and "u0-g0" not in answer.text and "set-cookie" not in answer.headers, path
  assert site.bare.post("/label/1", data={"verdict": "pass"}, headers={"Origin": site.origin}).status_code == 403
  opened = site.bare.get("/?token=right")
  cookie = opened.headers["set-cookie"]
  assert opened.status_code == 303 and opened.headers["location"] == "/" and "right" not in cookie
  assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
  assert site.bare.get("/").status_code == 200  # the cookie goes on


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "0.0.0.0", "[::1]", ""])
def test_another_name_that_leads_here_is_refused(site, host):
  connection = http.client.HTTPConnection("127.0.0.1", site.server.port, timeout=10)
  connection.putrequest("GET", "/?token=right", skip_host=True)
  connection.putheader("Host", host)
  connection.endheaders()
  answer = connection.getresponse()
  assert answer.status == 400 and answer.getheader("Set-Cookie") is None
  connection.close()


def test_a_form_of_another_site_is_refused(site):
  for headers in ({}, {"Origin": "null"}, {"Origin": "http://evil.example"}, {"Origin": "http://127.0.0.1:1"}):
    assert site.client.post("/label/2", data={"verdict": "pass"}, headers=headers).status_code == 403
  assert labels.records(site.app.workdir) == [] and site.get("/export").status_code == 405  # nothing is written by a link


def test_it_listens_on_loopback_and_everything_carries_the_policy(site):
  assert site.server.server_address[0] == "127.0.0.1"
  for path in ("/", "/episode/1", "/nothing", "/episode/999", "/static/page.css", "/labels.jsonl"):
    headers = site.get(path).headers
    assert "default-src 'none'" in headers["content-security-policy"] and "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "same-origin"


# -- the list


def test_every_episode_is_on_one_page_of_the_list_and_in_order(site):
  pages, address = [], "/"
  while address:
    answer = site.get(address)
    pages.append(ids(answer))
    older = re.search(r'data-key="n" href="([^"]+)"', answer.text)
    address = html.unescape(older[1]) if older else None
  assert [len(p) for p in pages] == [50, 50, 20] and [i for p in pages for i in p] == list(range(120, 0, -1))
  back = re.search(r'data-key="p" href="([^"]+)"', answer.text)[1]
  assert ids(site.get(html.unescape(back))) == pages[1]


def test_pages_do_not_shift_while_the_run_writes(site, episode):
  first = ids(site.get("/"))
  site.app.store.add(episode(1, group="new"), 12)
  assert ids(site.get("/", before=first[-1])) == list(range(70, 20, -1))  # an offset would repeat 71
  assert ids(site.get("/"))[0] == 121


@pytest.mark.parametrize(
  "given, wanted",
  [
    ({"task": "shop/1"}, [i for i in range(1, 121) if (i - 1) // 10 % 3 == 1]),
    ({"task": "shop*"}, range(1, 121)),
    ({"task": "shop"}, []),
    ({"family": "general", "update": "..3"}, [*range(11, 21), *range(31, 41)]),
    ({"verdict": "pass"}, range(1, 111, 10)),
    ({"verdict": "none"}, range(111, 121)),
    ({"end": "infra_error", "update": "11"}, range(111, 121)),
    ({"reward": "-1"}, range(10, 111, 10)),
    ({"reward": "0.5..", "version": "4..8"}, [21, 31, 41]),
    ({"version": "4..8"}, range(21, 51)),
    ({"label": "yes"}, [1, 2, 10]),
    ({"label": "disagree"}, [2]),
    ({"label": "no", "update": "0"}, range(3, 10)),
  ],
)
def test_filters(site, given, wanted):
  store_labels.put(site.app.workdir, {1: True, 2: True, 10: True})  # 10 never reached the grader: no disagreement
  answer = site.get("/", **given)
  assert ids(answer) == sorted(wanted, reverse=True)[:50]
  assert f"{len(list(wanted))} episode" in answer.text


@pytest.mark.parametrize("given", ["update=x", "update=1e9", "reward=nan", "version=99999999999999999999", "verdict=maybe", "end=x",
                                   "label=x", "before=-1", "after=x", f"before={'9' * 40}", "reward=..x"])  # fmt: skip
def test_what_is_no_filter_is_named(site, given):
  answer = site.get(f"/?{given}")
  assert answer.status_code == 400 and given.split("=")[0] in answer.text


# -- reading


def test_an_episode_shows_what_was_done_and_where_it_landed(site):
  rng = np.random.default_rng(0)
  made = site.app.store.load(1)
  made.group, made.advantage, made.notes = "shown", 1.25, {"final_value": 0.875}
  made.steps[0].screen = Screen.of(rng.integers(0, 256, (30, 50, 3)).astype(np.uint8))
  made.steps[0].action, made.steps[0].point = Action("tap", {"point": [12, 7]}, {}, "phone", "it is red"), (12, 7)
  made.steps[1].action = Action("swipe", {"start": [3, 4], "end": [45, 28]}, {}, "phone")
  made.steps[1].point, made.steps[1].notes = (3, 4), {"value": 0.5, "advantage": -0.125}
  key = site.app.store.add(made, 12)
  text = site.get(f"/episode/{key}").text
  assert 'viewBox="0 0 50 30"' in text and f'href="/screen/{made.steps[0].screen.ref}.png"' in text
  assert '<circle class="mark" cx="12.5" cy="7.5"' in text  # the middle of the pixel
  assert '<line class="mark" x1="3.5" y1="4.5" x2="45.5" y2="28.5"' in text and "it landed outside the picture" in text  # 40 x 24
  for said in ("it is red", "+1.25", "-0.125", "0.5", "0.875", "step 2: 0.5"):
    assert said in text
  picture = site.get(f"/screen/{made.steps[0].screen.ref}.png")
  assert (
    picture.headers["content-type"] == "image/png" and picture.content == site.app.store.screens.path(made.steps[0].screen.ref).read_bytes()
  )


def test_log_probabilities_are_the_steps_own(site, workdir):
  sampled = json.dumps({"tokens": [5, 6, 7], "logp": [-0.5, -1.0, -3.0], "version": [4, 4, 5]})
  with writing(workdir) as db, db:
    db.execute("UPDATE steps SET sampled = ? WHERE episode_id = 1 AND step = 0", [sampled])
  text = site.get("/episode/1").text
  assert "-4.5 <small>-1.5 a token, lowest -3</small>" in text and "version 4, 5" in text


def test_the_value_line_by_hand():
  steps = [{"value": 0.0}, {"value": None}, {"value": 1.0}]
  line = value_line(steps, 0.5, width=320, height=120)  # 10 at each edge: 300 across three steps, 100 up
  assert [(d["n"], d["x"], d["y"]) for d in line["dots"]] == [(1, 10, 110), (3, 210, 10), (4, 310, 60)]
  assert value_line([{"value": None}], 0.5) is None


def test_a_group_is_the_lessons_instrument(site):
  answer = site.get("/group", id="u1-g0", update=1)
  tries = re.findall(r'<div class="try".*?</div>\n<div class="strip">', answer.text, re.S)
  assert len(tries) == 10 and "10 tries, 1 passed" in answer.text and "Mean reward 0:" in answer.text  # (1 - 1 + 8 x 0) / 10
  bars = [re.search(r'<rect class="(\w+)" x="([-\d.]+)" y="2" width="([\d.]+)"', t) for t in tries]
  assert [b[1] for b in bars] == ["up"] + ["down"] * 9
  widths = [float(b[3]) for b in bars]
  assert widths == [48, *[6] * 8, 36] and float(bars[1][2]) == -6  # as long as the pushes 2, 0.25 and 1.5, the largest being 48
  assert site.get("/group", id="u1-g0", update=2).status_code == 404
  assert "No try has a score" in site.get("/group", id="u11-g0", update=11).text


# -- hostile content


def test_a_hostile_episode_harms_nothing(site, episode):
  made = episode(0, task="../../etc/passwd", group="../" + HOSTILE, first=HOSTILE)
  made.goal = made.family = made.checker = HOSTILE
  made.steps[0].action = Action(HOSTILE, {HOSTILE: HOSTILE, "point": "nowhere", "end": [1, "x"]}, {}, HOSTILE, HOSTILE)
  made.steps[0].notes = {HOSTILE: [HOSTILE], "value": "1", "advantage": 10**400, "half": "\ud800"}
  made.notes = {HOSTILE: 1, "final_value": "x"}
  key = site.app.store.add(made, 12)
  group = site.get("/group", id=made.group, update=12)
  pages = [site.get("/"), site.get(f"/episode/{key}"), group, site.get("/", task=HOSTILE), site.get("/label", family="\x00" + HOSTILE)]
  for page in pages:
    found = Tags(page.text)
    assert {t for t, _ in found.tags} <= PLAIN, page.url
    assert [a for t, a in found.tags if t == "script"] in ([], [{"src": "/static/page.js", "defer": None}])
    assert not [name for _, a in found.tags for name in a if name.startswith("on") or name == "style"]
    links = [a[k] for _, a in found.tags for k in ("href", "src", "action") if k in a]
    assert all(link.startswith(("/", "#")) and not link.startswith("//") for link in links)
  assert group.status_code == 200 and HOSTILE in Tags(group.text).text and HOSTILE in Tags(pages[1].text).text
  assert ids(site.get("/", task="../../etc/passwd")) == [key]


BAD = ["/screen/..%2f..%2findex.sqlite.png", "/screen/%2e%2e/x.png", f"/screen/{'a' * 40}.png", f"/screen/{'A' * 40}.png"]
BAD += ["/static/base.html", "/static/..%2fepisodes.py", "/episode/..%2f1", "/episode/-1", f"/episode/{'9' * 30}"]


@pytest.mark.parametrize("path", BAD)
def test_ids_from_outside_never_become_paths(site, path):
  answer = site.client.get(path)
  assert answer.status_code == 404 and "SQLite" not in answer.text and "import" not in answer.text


def test_a_lost_picture_and_a_broken_index_are_said(site, workdir):
  ref = site.app.store.steps(1)[0]["screen"]
  site.app.store.screens.path(ref).unlink()
  assert "picture missing" in site.get("/episode/1").text and site.get(f"/screen/{ref}.png").status_code == 404
  with writing(workdir) as db, db:
    db.execute("DROP TABLE labels")
  answer = site.get("/")
  assert answer.status_code == 503 and "the store cannot be read: no such table: labels" in answer.text
  assert site.client.post("/label/1", content=b"x" * 2**17, headers={"Origin": site.origin}).status_code in (413, 503)


# -- labels


def test_before_the_label_nothing_tells_the_verdict(site, workdir):
  """The page of a pass and of a fail, blind, are the same text once the pictures' and the episode's own words are taken out."""
  with writing(workdir) as db, db:
    db.execute('UPDATE steps SET notes = \'{"value": 0.987, "popup": "leak"}\' WHERE episode_id = 1')
  texts = [
    site.get(f"/label/{key}").text.replace(f"/{key}", "").replace(f"episode {key} ", "").replace(f"Label {key}", "") for key in (1, 2)
  ]
  assert texts[0] == texts[1] and "Did it reach the goal?" in texts[0]
  for told in ("reward", "push", "checker", "leak", "0.987", "u0-g0", "terminated", "truncated", 'class="line"'):
    assert told not in texts[0], told
  shown = site.client.post("/label/1", data={"verdict": "fail"}, headers={"Origin": site.origin}, follow_redirects=True).text
  assert "they differ" in shown and "u0-g0" in shown and "reward" in shown and "0.987" in shown


def test_an_episode_whose_verdict_was_shown_is_not_labelled(site):
  site.get("/episode/2")
  site.get("/group", id="u1-g0", update=1)
  for key in (2, 11, 12):
    assert site.get(f"/label/{key}").status_code == 409 and site.post(f"/label/{key}", verdict="pass").status_code == 409
  for key in (10, 111):  # unreadable, infra error
    assert site.post(f"/label/{key}", verdict="fail").status_code == 409
  assert site.post("/label/999", verdict="fail").status_code == 404 and site.post("/label/3", verdict="x").status_code == 400
  assert labels.records(site.app.workdir) == []
  drawn = {int(site.get("/label", update=u).headers["location"].split("/")[2].split("?")[0]) for u in (0, 0, 0, 0, 2)}
  assert not drawn & {2, 10} and all(site.get("/label", update=u).status_code == 200 for u in (1, 11))  # nothing left there


@pytest.mark.parametrize("given", [{"verdict": "pass"}, {"reward": "1"}, {"end": "truncated"}, {"label": "no"}])
def test_a_filter_that_tells_the_verdict_is_refused_while_labelling(site, given):
  assert site.get("/label", **given).status_code == 400 and site.get("/label/1", **given).status_code == 400


def test_a_label_is_not_turned_round_but_taken_back(site):
  assert site.post("/label/1", verdict="fail").status_code == 303
  assert site.post("/label/1", verdict="fail").status_code == 303  # a key pressed twice
  assert site.post("/label/1", verdict="pass").status_code == 409
  assert [(r["label"], r["by"]) for r in labels.records(site.app.workdir)] == [(False, "ann")]
  assert site.post("/label/1", verdict="undo").status_code == 303 and labels.records(site.app.workdir) == []
  assert site.post("/label/1", verdict="pass").status_code == 409  # its verdict was shown


def test_labels_go_round_by_chance_until_all_are_given_and_survive_a_restart(workdir):
  site, given = Site(workdir), []
  try:
    while (answer := site.get("/label", update="0..1")).status_code == 303:
      key = int(re.match(r"/label/(\d+)\?update=0\.\.1$", answer.headers["location"])[1])
      given.append(key)
      site.post(f"/label/{key}", verdict="pass" if key in (1, 2, 11) else "fail")
      assert len(given) < 50
    assert sorted(given) == [*range(1, 10), *range(11, 20)] and given != sorted(given)
  finally:
    site.close()
  site = Site(workdir)
  try:
    # the grader passed 1 and 11; labels say 1, 2, 11: 17 of 18 agree, 2 of 3 passes seen, none of 15 fails passed
    text = site.get("/grader").text
    figure = lambda name: re.search(f'<b id="{name}">([^<]*)', text)[1]
    assert [figure(n) for n in ("agreement", "true-pass", "false-pass", "factor")] == ["94.4%", "66.7%", "0.0%", "0.667"]
    assert re.findall(r'<td class="(?:good|bad)">(\d+)', text) == ["2", "1", "0", "15"] and ids(site.get("/grader")) == [2]
    assert len(site.get("/labels.jsonl").text.splitlines()) == 18
  finally:
    site.close()


# -- exports and the command


def test_exports_hold_what_the_filters_find(site, workdir):
  answer = site.post("/export?verdict=pass&update=2..4")
  path = html.unescape(re.search(r"<pre>([^<]+\.jsonl)</pre>", answer.text)[1])
  assert path.startswith(str(workdir / "exports")) and [e.group for e in read_trajectories(path)] == ["u2-g0", "u3-g0", "u4-g0"]
  one = site.post("/export", group="u2-g0", episode="3", update="2")
  (made,) = read_trajectories(html.unescape(re.search(r"<pre>([^<]+)</pre>", one.text)[1]))
  assert (made.group, made.try_index, made.notes["update"]) == ("u2-g0", 3, 2)
  assert site.post("/export?label=no").status_code == 400 and site.post("/export", group="x", episode="../x", update="0").status_code == 400


def test_filters_become_the_stores_own():
  assert parse_filters({"update": "5..", "verdict": "none", "x": "1"}).store == {"update": (5, float("inf")), "success": None}


def test_the_command_serves_and_ends_and_exports(workdir, tmp_path):
  """Ended as a background job of a shell would be: SIGINT is ignored there."""
  command = [sys.executable, "-m", "tools.episodes", f"--workdir={workdir}"]
  background = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
  page = subprocess.Popen(background, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  try:
    address = page.stdout.readline().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", address)
    with httpx2.Client(follow_redirects=True) as client:
      assert len(ids(client.get(address))) == 50
    page.send_signal(signal.SIGTERM)
    out, err = page.communicate(timeout=60)
  finally:
    page.kill()
    page.wait(10)
  assert page.returncode == 0 and address.partition("token=")[2] not in out + err
  run = lambda *more: subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=120)
  done = run(f"--export={tmp_path / 'x.jsonl'}", "--where=family=general&verdict=pass")
  assert json.loads(done.stdout)["episodes"] == 5 and len(read_trajectories(tmp_path / "x.jsonl")) == 5
  lost = run(f"--export={tmp_path / 'y.jsonl'}", "--where=famly=general")
  assert lost.returncode == 2 and "--where names famly" in lost.stderr and not (tmp_path / "y.jsonl").exists()
