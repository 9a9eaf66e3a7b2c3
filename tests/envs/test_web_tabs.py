"""Screenshots of a browser that answers late or not at all, without one: what is asked again, and what still counts."""

import base64
import io
import time

import numpy as np
import pytest
from PIL import Image

from envs import tabs
from envs.chromium import Browser, BrowserHung, PageCrashed, Refused
from envs.errors import BadFrame
from envs.tabs import Tab, Window


def png(value):
  out = io.BytesIO()
  Image.fromarray(np.full((4, 6, 3), value, np.uint8)).save(out, "PNG")
  return base64.b64encode(out.getvalue()).decode()


class Slow(Browser):
  """Answers the n-th request so many seconds after it came, with the n-th value; None: never."""

  def __init__(self, *delays):
    self.delays, self.asked, self.due, self._answers, self._lost, self._id = list(delays), 0, [], {}, set(), 0

  def post(self, method, params=None, session=None):
    self._id += 1
    if method == "Page.captureScreenshot":
      delay = self.delays[min(self.asked, len(self.delays) - 1)]
      self.asked += 1
      if delay is not None:
        self.due.append((time.monotonic() + delay, {"id": self._id, "result": {"data": png(self.asked)}}))
    return self._id

  def _receive(self, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
      if ready := [one for one in self.due if one[0] <= time.monotonic()]:
        self.due.remove(ready[0])
        self._take(ready[0][1])
        return True
      time.sleep(0.002)
    return False


@pytest.fixture
def window(monkeypatch):
  monkeypatch.setattr(tabs, "GLANCE", 0.05)

  def make(*delays, seconds=2.0):
    made = object.__new__(Window)
    made.browser, made.viewport, made.size, made.picture_size, made.seconds = Slow(*delays), (6, 4), (6, 4), (6, 4), seconds
    made.tabs, made.front, made.scale = {"s": Tab("t")}, "s", 1.0
    return made

  return make


def test_a_picture_that_is_slow_every_time_comes_late_and_not_never(window):
  seen = window(0.3)  # six times as long as until it is asked for again: no request alone would ever be waited for
  assert seen.screenshot()[0, 0, 0] >= 1 and seen.browser.asked > 3
  seen.browser._receive(1.0)
  assert not seen.browser._answers  # what came later was of no interest


def test_one_that_is_never_answered_is_asked_for_again(window):
  assert window(None, 0.0).screenshot()[0, 0, 0] == 2


def test_none_at_all_is_a_hung_browser_after_the_whole_time(window):
  began = time.monotonic()
  with pytest.raises(BrowserHung, match="no answer to Page.captureScreenshot within 0.4 s"):
    window(None, seconds=0.4).screenshot()
  assert time.monotonic() - began >= 0.4


def test_a_crashed_page_is_not_waited_for(window):
  seen = window(None)
  seen.tabs["s"].crashed = True
  with pytest.raises(PageCrashed):
    seen.screenshot()


def test_only_the_top_left_part_is_shown_and_another_size_is_a_bad_frame(window):
  shown = window(0.0)
  pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
  out = io.BytesIO()
  Image.fromarray(pixels).save(out, "PNG")
  shown._captured = lambda asked, seconds: {"data": base64.b64encode(out.getvalue()).decode()}
  shown.size = shown.picture_size = (5, 2)
  assert (shown.screenshot() == pixels[:2, :5]).all()
  shown.viewport = (6, 5)
  with pytest.raises(BadFrame, match="a screenshot of 6 x 4, wanted 6 x 5"):
    shown.screenshot()


def test_an_address_is_asked_again_while_one_page_gives_way_to_another(window):
  shown, answers = window(None, seconds=0.2), [Refused("Not attached to an active page")] * 2
  history = {"currentIndex": 1, "entries": [{"url": "about:blank"}, {"url": "http://a/b"}]}

  def call(method, params=None, seconds=None):
    if answers:
      raise answers.pop()
    return history

  shown.call = call
  assert shown.url() == "http://a/b"
  answers += [Refused("Not attached to an active page")] * 100
  with pytest.raises(Refused):
    shown.url()
