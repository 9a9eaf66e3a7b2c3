"""A real Chromium (make system): what is typed arrives, what is aimed at is hit, and no fault of page or browser is a score."""

import math
import os
import pathlib
import re
import signal
import string
import time

import numpy as np
import pytest

from core.schema import SUCCESS, Limits, Task
from envs import errors, processes, web
from envs.chromium import BrowserDied, BrowserHung, PageCrashed
from tests.real.pages import Pages, knobs

pytestmark = pytest.mark.real
PRINTABLE = string.ascii_letters + string.digits + string.punctuation + " "
UNICODE = "Größe ñandú λόγος Привет 你好 한국어 عربى € 😀"
GRID = "<body style='margin:0'>" + "".join(
  f"<button style='position:absolute;left:{x}px;top:{y}px;width:7px;height:7px;padding:0' onclick='hits.push(\"{x},{y}\")'></button>"
  for x in range(3, 470, 58)
  for y in range(5, 310, 43)
) + "<script>hits = []</script>"  # fmt: skip


@pytest.fixture
def shown():
  made = []

  def make(body, grammar="web", pages=None, steps=30, **given):
    site = Pages({"start": f"<!doctype html><meta charset=utf-8><title>start</title>{body}"} | (pages or {}))
    made.append(web.WebEnv("web/test", site, knobs(grammar=grammar, **given)))
    env = made[-1]
    env.task_given = Task("t", "do it", "web/test", "test", 0, {"page": "start"}, Limits(steps))
    env.first = env.reset(options={"task": env.task_given})
    return env

  yield make
  for env in made:
    env.close()


def number(obs, what):
  """The number of the first line of the outline that has these words."""
  return re.search(rf"\[(\d+)\] {what}", obs["text"])[1]


def browser_family(env):
  child = env.window.browser.child
  return [(child.pid, child.started), *processes.family(child.pid)]


def test_all_printable_characters_and_a_unicode_sample_arrive(shown):
  env = shown("<textarea></textarea><input value='old'>")
  obs = env.first[0]
  text = PRINTABLE + UNICODE
  obs = env.step(f'do(action="Type", argument="{text.replace(chr(92), chr(92) * 2).replace(chr(34), chr(92) + chr(34))}", element="1")')[0]
  assert env.window.evaluate("document.querySelector('textarea').value") == text
  env.step(f'do(action="Type", argument="new", element="{number(obs, "textbox .*old")}")')
  assert env.window.evaluate("document.querySelector('input').value") == "new"


def test_typing_by_keys_where_the_focus_is(shown):
  env = shown("<textarea autofocus></textarea>", grammar="desktop")
  env.step("Action: click(start_box='(20,20)')")
  env.step("Action: type(content='a (B)\\n<c>&%s')")
  env.step("Action: hotkey(key='shift home')")
  env.step("Action: type(content='D')")
  env.step("Action: type(content='e')")  # no modifier is left down
  assert env.window.evaluate("document.querySelector('textarea').value") == "a (B)\nDe"


@pytest.mark.parametrize("scale", [1.0, 1.25, 2.0])
def test_points_of_the_picture_hit_their_element_at_every_scale(shown, scale):
  env = shown(GRID, grammar="desktop", scale=scale, steps=100)
  assert env.first[0]["screenshot"].shape == (round(320 * scale), round(480 * scale), 3)
  aimed = [(x, y) for x in range(3, 470, 116) for y in range(5, 310, 86)]
  for x, y in aimed:  # its first and its last pixel in each direction: those whose middle lies in the button's 7 CSS pixels
    for shift, back in ((0, 0), (7, 1)):
      point = [math.ceil((start + shift) * scale - 0.5) - back for start in (x, y)]
      env.step(f"Action: click(start_box='({point[0]},{point[1]})')")
  assert env.window.evaluate("hits") == [f"{x},{y}" for x, y in aimed for _ in range(2)]


def test_a_mark_is_drawn_where_the_scale_says(shown):
  env = shown(
    "<body style='margin:0;background:#fff'><div style='position:absolute;left:40px;top:20px;width:8px;height:8px;background:#f00'>",
    scale=1.25,
  )
  red = np.argwhere((env.first[0]["screenshot"] == [255, 0, 0]).all(-1))
  assert red.min(0).tolist() == [25, 50] and red.max(0).tolist() == [34, 59]  # 20 and 40 CSS pixels, 1.25 times; 10 pixels wide


def test_dialogs_are_answered_and_told(shown):
  env = shown("<body onload=\"alert('hello'); kept = confirm('sure?'); said = prompt('name')\"><p>page</p>")
  obs = env.first[0]
  assert "alert, accepted: 'hello'" in obs["text"] and "confirm, dismissed: 'sure?'" in obs["text"]
  assert env.window.evaluate("[kept, said]") == [False, None]
  assert "Dialog" not in env.step('do(action="Wait")')[0]["text"]  # told once


def test_the_newest_tab_is_followed_and_its_closing_leads_back(shown):
  env = shown("<a href=other target=_blank>go</a>", pages={"other": "<title>other</title><button onclick='window.close()'>leave</button>"})
  obs, *_, info = env.step(f"click [{number(env.first[0], 'link')}]")
  assert info["notes"]["page"] == "other" and "Tab 0: start | Tab 1 (current): other" in obs["text"]
  obs, *_, info = env.step(f"click [{number(obs, 'button')}]")
  assert info["notes"]["page"] == "start" and "Tab" not in obs["text"]
  obs, *_, info = env.step("close_tab")  # the last one: an empty one, and the try goes on
  assert (info["cause"], info["notes"]["page"]) == ("", "about:blank")
  assert env.step("stop [42]")[1] == 1.0


def test_tabs_are_chosen_by_number_and_pages_gone_back_to(shown):
  env = shown("<a href=other>go</a>", pages={"other": "<title>other</title>x"})
  env.step(f"click [{number(env.first[0], 'link')}]")
  assert env.step("go_back")[4]["notes"]["page"] == "start"
  assert env.step("go_forward")[4]["notes"]["page"] == "other"
  assert env.step("new_tab")[4]["notes"]["page"] == "about:blank"
  assert env.step("tab_focus [0]")[4]["notes"]["page"] == "other"
  assert "no tab 7" in env.step("tab_focus [7]")[4]["notes"]["refused"]


def test_native_lists_by_number_and_by_keys(shown):
  body = "<body style='margin:0'><select style='position:absolute;left:0;top:0;width:90px;height:20px' onchange='seen = this.value'>"
  body += "<option>one<option>two<option>three and more</select>"
  env = shown(body)
  place = number(env.first[0], "combobox")
  env.step(f'do(action="Select Dropdown Option", argument="three and more", element="{place}")')
  assert env.window.evaluate("seen") == "three and more"
  refused = env.step(f'do(action="Select Dropdown Option", argument="four", element="{place}")')[4]["notes"]["refused"]
  assert "one, two, three and more" in refused and env.window.evaluate("seen") == "three and more"
  env = shown(body, grammar="desktop")
  env.step("Action: click(start_box='(40,10)')")  # opens it, which no screenshot shows
  env.step("Action: hotkey(key='down')")
  env.step("Action: hotkey(key='enter')")
  assert env.window.evaluate("seen") == "two"


def test_what_cannot_be_done_counts_and_does_nothing(shown):
  env = shown("<p>text</p>", steps=2)
  assert "no element [99]" in env.step("click [99]")[4]["notes"]["refused"]
  _, reward, terminated, truncated, info = env.step("goto [http://example.com/]")
  assert "ERR_PROXY" in info["notes"]["refused"] and (reward, terminated, truncated, info["cause"]) == (0.0, False, True, "steps")


def test_only_the_site_can_be_reached_and_nothing_is_downloaded(shown):
  outside, body = (
    Pages({"x": "secret"}),
    "<img src={0}><a href={1} download>get</a><script>fetch('{0}', {{mode: 'no-cors'}}).then(() => got = 1, () => got = 0)</script>",
  )
  try:
    env = shown(body.format(outside.url("x"), "file.bin"), pages={"file.bin": "data"})
    env.step(f"click [{number(env.first[0], 'link')}]")
    env.step('do(action="Wait")')
    assert env.window.evaluate("got") == 0 and outside.asked == []
    assert not [p for p in env.window.browser.folder.rglob("*file.bin*")]
    env = shown(body.format(outside.url("x"), "file.bin"), allowed=(outside.served.place,))
    assert env.window.evaluate("new Promise(d => setInterval(() => window.got === 1 && d(1), 10))", wait=True) == 1
  finally:
    outside.close()


def test_every_try_starts_without_the_last_ones_cookies(shown):
  env = shown("x")
  env.window.evaluate("localStorage.setItem('a', 'b')")
  assert env.window.evaluate("document.cookie") == "seen=start"
  env.site.pages["start"] = "<script>before = document.cookie.replace('seen=start', '') + localStorage.length</script>"
  env.reset(options={"task": env.task_given})
  assert env.window.evaluate("before") == "0"


def test_the_page_can_end_the_try_and_a_claim_is_checked(shown):
  env = shown("<button onclick='over = true; passed = false'>fail</button><button onclick='over = passed = true'>pass</button>")
  _, reward, terminated, _, info = env.step(f"click [{number(env.first[0], 'button .fail')}]")
  assert (reward, terminated, info["cause"]) == (0.0, True, "checker")
  obs, _ = env.reset(options={"task": env.task_given})
  assert env.step(f"click [{number(obs, 'button .pass')}]")[1] == 1.0
  env.reset(options={"task": env.task_given})
  assert env.step("stop [41]")[1] == 0.0
  env.reset(options={"task": env.task_given})
  _, reward, terminated, _, info = env.step("click the button")
  assert (reward, terminated, info["cause"]) == (-1.0, True, "unreadable")


def broken(env, how):
  browser = env.window.browser
  if how == "killed":
    os.kill(browser.child.pid, signal.SIGKILL)
  elif how == "stopped":
    os.kill(browser.child.pid, signal.SIGSTOP)
  elif how == "crashed":
    env.window._tell("Page.crash", {}, env.window.front)
  else:
    env.window._tell("Runtime.evaluate", {"expression": "setTimeout(() => { for (;;); }, 0)"}, env.window.front)
  time.sleep(0.3)


@pytest.mark.parametrize("how, error", [("killed", BrowserDied), ("stopped", BrowserHung), ("crashed", PageCrashed), ("hung", BrowserHung)])
def test_a_browser_that_breaks_is_an_infra_error_and_the_next_try_has_another(shown, how, error):
  env = shown("<button onclick='passed = true'>b</button>", settle_most=2.0)
  before = browser_family(env)
  assert len(before) > 3
  broken(env, how)
  env.window.seconds = 2.0 if how in ("stopped", "hung") else 60.0  # what is gone is noticed at once, what hangs by its deadline
  with pytest.raises(error) as raised:
    env.step("click [1]")
  assert isinstance(raised.value, errors.InfraError)
  obs, _ = env.reset(options={"task": env.task_given})
  assert not [p for p, s in before if processes.alive(p, s)]
  env.step(f"click [{number(obs, 'button')}]")
  assert env.step("stop [done]")[4]["rewards"] == {SUCCESS: 1.0}


def test_a_page_that_never_loads_is_a_failed_reset_and_one_that_never_rests_says_so(shown):
  moving = "<body style='margin:0'><div id=d style='width:480px;height:320px'></div><script>n = 0; "
  moving += "setInterval(() => d.style.background = `hsl(${++n * 37} 100% 50%)`, 5)</script>"
  env = shown(moving, settle_frames=3, settle_most=1.0)
  assert env.first[1]["notes"]["unsettled"] is True
  env = shown("x")
  env.site.pages["start"] = f"<img src='http://{env.site.served.place}/slow'>"
  env.site.served.server.RequestHandlerClass.do_GET = slowly(env.site.served.server.RequestHandlerClass.do_GET)
  env.cfg.load_seconds = 1.0
  with pytest.raises(errors.ResetFailed, match="did not load within 1 s"):
    env.reset(options={"task": env.task_given})


def slowly(answer):
  def do_GET(self):
    if self.path == "/slow":
      time.sleep(6)
    answer(self)

  return do_GET


def test_starting_and_stopping_leaves_no_process_and_no_folder():
  folders, seen = [], []
  for _ in range(50):
    env = web.WebEnv("web/test", Pages({"start": "x"}), knobs())
    seen += browser_family(env)
    folders.append(env.window.browser.folder)
    env.close()
  assert len(folders) == 50 and not [f for f in folders if pathlib.Path(f).exists()]
  until = time.monotonic() + 60
  while (left := [p for p, s in seen if processes.alive(p, s)]) and time.monotonic() < until:
    time.sleep(0.1)
  assert not left


def test_nothing_listens(shown):
  env = shown("x")
  pids = {p for p, _ in browser_family(env)}
  sockets = {os.readlink(f) for p in pids for f in pathlib.Path(f"/proc/{p}/fd").glob("*") if f.is_symlink()}
  listening = {f"socket:[{line.split()[9]}]" for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}") if line.split()[3] == "0A"}
  assert listening and not sockets & listening  # the site of the test does
