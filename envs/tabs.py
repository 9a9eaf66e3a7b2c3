"""A browser's tabs as one person has them: one in front, its picture and outline, a mouse and a keyboard.

Points are pixels of the picture, (0, 0) at the top left; CSS pixels are those divided by the scale. What the page does (a dialog, a new
tab, a closed one) is no error; what breaks under it is an InfraError.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from functools import partial
from typing import Any

import numpy as np

from envs import keyboard
from envs.chromium import Browser, BrowserHung, PageClosed, PageCrashed, Refused
from envs.errors import BadFrame
from envs.handset import decode_png
from envs.outline import outline, printable

SELECT = """function(option) {
  const select = this.tagName === 'OPTION' ? this.closest('select') : this;
  if (!select || select.tagName !== 'SELECT' || select.disabled) return 'not a list of options';
  const label = o => o.label.replace(/\\s+/g, ' ').trim();
  const found = this.tagName === 'OPTION' ? this : [...select.options].find(o => label(o) === option.replace(/\\s+/g, ' ').trim());
  if (!found) return 'no such option: there is ' + [...select.options].map(label).join(', ').slice(0, 300);
  if (select.multiple) found.selected = !found.selected; else select.value = found.value, found.selected = true;
  select.focus();
  select.dispatchEvent(new Event('input', {bubbles: true}));
  select.dispatchEvent(new Event('change', {bubbles: true}));
  return '';
}"""
LEAVING = 1.0  # seconds
GLANCE = 2.0  # seconds after which a screenshot is asked for again
IS_OPTION = "function() { return this.nodeType === 1 && this.tagName === 'OPTION'; }"
EMPTY = "function() { if (this.select) this.select(); else getSelection().selectAllChildren(this); }"
DRAWN = """new Promise(done => {
  requestAnimationFrame(() => setTimeout(() => setTimeout(() => done(document.readyState))));
  setTimeout(() => done(document.readyState), 200);
})"""


class CannotDo(ValueError):
  """What was said cannot be done on this page: no such element, nothing to see of it. The policy's doing, not a fault."""


@dataclasses.dataclass
class Tab:
  """target: its id, and its main frame's; opener: the target that opened it; loading: whether its main frame is."""

  target: str
  opener: str = ""
  loading: bool = False
  leaving: float = 0.0  # until when (time.monotonic) a navigation that was asked for may still begin
  crashed: bool = False
  numbers: dict[int, int] = dataclasses.field(default_factory=dict)  # backend node id -> the number it is called by


class Window:
  """browser: a running one; it is this window's alone. viewport: (width, height) in CSS pixels; size: of its top left part that is
  shown; accept: what dialogs are answered."""

  def __init__(self, browser: Browser, viewport: tuple[int, int], size: tuple[int, int], scale: float, accept: bool, seconds: float):
    self.browser, self.viewport, self.size, self.scale, self.accept, self.seconds = browser, viewport, size, scale, accept, seconds
    self.picture_size = (round(size[0] * scale), round(size[1] * scale))
    self.tabs: dict[str, Tab] = {}  # by session, in the order they came
    self.front: str | None = None
    self.context: str | None = None
    self.dialogs: list[str] = []  # since they were last taken
    self.pointer = (0.0, 0.0)
    browser.on_event = self._on_event
    watch = {"autoAttach": True, "waitForDebuggerOnStart": True, "flatten": True}
    browser.call("Target.setAutoAttach", watch, seconds=seconds)

  # --- what the browser tells

  def _on_event(self, message: dict) -> None:
    handler = getattr(self, "_" + message["method"].replace(".", "_"), None)
    if handler is not None:
      handler(message.get("sessionId"), message["params"])

  def _tell(self, method: str, params: dict, session: str | None) -> None:
    self.browser.forget(self.browser.post(method, params, session))

  def _Target_attachedToTarget(self, session, said: dict) -> None:
    info, new = said["targetInfo"], said["sessionId"]
    if info["type"] == "page" and info.get("browserContextId") == self.context:
      self.tabs[new] = Tab(info["targetId"], info.get("openerId", ""), loading=info["url"] not in ("", "about:blank"))
      self.front = new
      width, height = self.viewport
      metrics = {"width": width, "height": height, "deviceScaleFactor": self.scale, "mobile": False}
      for method, params in [
        ("Page.enable", {}), ("Inspector.enable", {}), ("DOM.enable", {}), ("Emulation.setDeviceMetricsOverride", metrics),
        ("Emulation.setFocusEmulationEnabled", {"enabled": True}), ("Page.setInterceptFileChooserDialog", {"enabled": True}),
      ]:  # fmt: skip
        self._tell(method, params, new)
    self._tell("Runtime.runIfWaitingForDebugger", {}, new)

  def _Target_detachedFromTarget(self, session, said: dict) -> None:
    gone = self.tabs.pop(said["sessionId"], None)
    if gone is not None and self.front == said["sessionId"]:
      openers = [s for s, tab in self.tabs.items() if tab.target == gone.opener]
      self.front = (openers or list(self.tabs) or [None])[-1]
      if self.front is not None:
        self._tell("Page.bringToFront", {}, self.front)

  def _Page_javascriptDialogOpening(self, session, said: dict) -> None:
    accept = self.accept or said["type"] in ("alert", "beforeunload")
    self.dialogs.append(f"{said['type']}, {'accepted' if accept else 'dismissed'}: {printable(said['message'])[:500]!r}")
    self._tell("Page.handleJavaScriptDialog", {"accept": accept}, session)

  def _Inspector_targetCrashed(self, session, said: dict) -> None:
    if session in self.tabs:
      self.tabs[session].crashed = True

  def _Page_frameStartedLoading(self, session, said: dict) -> None:
    if session in self.tabs and said["frameId"] == self.tabs[session].target:
      self.tabs[session].loading, self.tabs[session].leaving = True, 0.0

  def _Page_frameScheduledNavigation(self, session, said: dict) -> None:
    if session in self.tabs and said["frameId"] == self.tabs[session].target and said.get("delay", 0) <= LEAVING:
      self.tabs[session].leaving = time.monotonic() + LEAVING

  def _Page_frameRequestedNavigation(self, session, said: dict) -> None:
    if said.get("disposition") == "currentTab":
      self._Page_frameScheduledNavigation(session, said)

  def _Page_frameStoppedLoading(self, session, said: dict) -> None:
    if session in self.tabs and said["frameId"] == self.tabs[session].target:
      self.tabs[session].loading = False

  def _Page_frameNavigated(self, session, said: dict) -> None:
    if session in self.tabs and "parentId" not in said["frame"]:
      self.tabs[session].numbers = {}

  # --- calls to the page in front

  def fresh(self) -> None:
    """One empty tab in a browser context of its own: no cookie, no storage, nothing of what was before."""
    old, context = self.context, self.browser.call("Target.createBrowserContext", seconds=self.seconds)["browserContextId"]
    self.tabs, self.front, self.context, self.dialogs, self.pointer = {}, None, context, [], (0.0, 0.0)
    deny = {"behavior": "deny", "browserContextId": context}
    self.browser.call("Browser.setDownloadBehavior", deny, seconds=self.seconds)
    self._open()
    if old is not None:
      self.browser.call("Target.disposeBrowserContext", {"browserContextId": old}, seconds=self.seconds)

  def _open(self) -> None:
    made = {"url": "about:blank", "browserContextId": self.context}
    self.browser.call("Target.createTarget", made, seconds=self.seconds)
    self.post([])

  def call(self, method: str, params: dict | None = None, seconds: float | None = None) -> dict:
    return self.post([(method, params or {})], seconds)[0]

  def post(self, calls: list[tuple[str, dict]], seconds: float | None = None) -> list[dict]:
    """Calls to the page in front, sent all at once. PageClosed if it goes meanwhile, PageCrashed if its renderer does."""
    if self.front is None:  # the agent closed its last tab: it looks at an empty one
      self._open()
    session = self.front
    numbers = [self.browser.post(method, params, session) for method, params in calls]

    try:
      self._gone(session)
      return self.browser.answers(numbers, seconds or self.seconds, calls[0][0] if calls else "", lambda: self._gone(session))
    except PageCrashed:
      self.browser.forget(*numbers)
      raise

  def _gone(self, session: str) -> bool:
    """Whether a tab is not there any more; PageCrashed if its renderer is not."""
    if session in self.tabs and self.tabs[session].crashed:
      raise PageCrashed("the page's renderer is gone")
    return session not in self.tabs

  def evaluate(self, source: str, seconds: float | None = None, wait: bool = False) -> Any:
    """The value of our own JavaScript in the page in front (never the agent's); wait: of the promise that it is."""
    said = self.call("Runtime.evaluate", {"expression": source, "returnByValue": True, "awaitPromise": wait}, seconds)
    if "exceptionDetails" in said:
      details = said["exceptionDetails"]
      raise Refused(f"the page said {details.get('exception', {}).get('description', details.get('text'))}"[:500])
    return said["result"].get("value")

  def goto(self, url: str) -> str:
    """Goes there; the browser's name of what went wrong, or "". Waits for the answer, not for the page to load."""
    return self.call("Page.navigate", {"url": url}).get("errorText", "")

  def loaded(self, until: float) -> bool:
    """Waits until the page in front has loaded and drawn itself; False if it is past `until` (of time.monotonic) before."""
    while (left := until - time.monotonic()) > 0:
      if self.loading():
        self.browser.pump(min(left, 0.05))
        continue
      try:
        if self.evaluate(DRAWN, seconds=max(self.seconds, left), wait=True) == "complete" and not self.loading():
          return True
        self.browser.pump(min(left, 0.02))
      except PageClosed:
        continue
      except Refused:  # it went elsewhere meanwhile
        self.browser.pump(0.01)
    return False

  def loading(self) -> bool:
    tab = self.tabs.get(self.front)
    return tab is not None and not tab.crashed and (tab.loading or time.monotonic() < tab.leaving)

  def url(self) -> str:
    if self.front is None:
      return "about:blank"
    until = time.monotonic() + self.seconds
    while True:
      try:
        history = self.call("Page.getNavigationHistory")
        return history["entries"][history["currentIndex"]]["url"]
      except PageClosed:
        raise
      except Refused:  # one page is just giving way to another
        if time.monotonic() > until:
          raise
        self.browser.pump(0.02)

  # --- what is seen

  def screenshot(self, seconds: float | None = None) -> np.ndarray:
    """uint8 [H, W, 3] of the page in front."""
    # The whole window, cut here: a screenshot with a clip lays the page out anew and draws it twice.
    said = self._captured({"format": "png", "optimizeForSpeed": True}, seconds or self.seconds)
    frame, wanted = decode_png(base64.b64decode(said["data"])), tuple(round(n * self.scale) for n in self.viewport)
    if (frame.shape[1], frame.shape[0]) != wanted:
      raise BadFrame(f"a screenshot of {frame.shape[1]} x {frame.shape[0]}, wanted {wanted[0]} x {wanted[1]}")
    return np.ascontiguousarray(frame[: self.picture_size[1], : self.picture_size[0]])

  def _captured(self, asked: dict, seconds: float) -> dict:
    """The answer to a screenshot's request. It is asked for again where none has come for a while, since one that a navigation overtakes
    is never answered; but one that is only slow still counts, so that a busy machine gets its picture late and not never."""
    until = time.monotonic() + seconds
    while True:
      if self.front is None:
        self._open()
      session, posted = self.front, []
      try:
        while True:
          posted.append(self.browser.post("Page.captureScreenshot", asked, session))
          left = until - time.monotonic()
          found = self.browser.first(posted, min(left, GLANCE), "Page.captureScreenshot", partial(self._gone, session))
          if found is not None:
            return found
          if left <= GLANCE:
            raise BrowserHung(f"no answer to Page.captureScreenshot within {seconds:g} s")
      except PageClosed:
        if time.monotonic() > until:
          raise BadFrame("every tab closed before it could be looked at") from None
      finally:
        self.browser.forget(*posted)

  def text(self, most: int) -> str:
    """Dialogs since the last look, the tabs if there are several, and the outline of the page in front."""
    self.post([])
    head = [f"Dialog ({said})" for said in self.dialogs]
    if len(self.tabs) > 1:
      titles = self.browser.call("Target.getTargets", seconds=self.seconds)["targetInfos"]
      titles = {info["targetId"]: info["title"] for info in titles}
      names = [(tab, " (current)" if s == self.front else "") for s, tab in self.tabs.items()]
      head.append(" | ".join(f"Tab {i}{now}: {printable(titles.get(tab.target, ''))[:80]}" for i, (tab, now) in enumerate(names)))
    numbers = self.tabs[self.front].numbers
    nodes, frames = self._trees()
    body = outline(nodes, lambda place: numbers.setdefault(place, len(numbers) + 1), frames, max(0, most - sum(map(len, head)) - 100))
    self.dialogs = []
    return "\n".join([*head, body])

  def _trees(self) -> tuple[list[dict], dict[int, list[dict]]]:
    """The accessibility trees of the main frame and of the frames directly in it."""
    tree = self.call("Page.getFrameTree")["frameTree"]
    nodes, frames = self.call("Accessibility.getFullAXTree")["nodes"], {}
    for child in tree.get("childFrames", []):
      name = {"frameId": child["frame"]["id"]}
      try:
        owner = self.call("DOM.getFrameOwner", name)["backendNodeId"]
        frames[owner] = self.call("Accessibility.getFullAXTree", name)["nodes"]
      except PageClosed:
        raise
      except Refused:  # the frame has just gone
        continue
    return nodes, frames

  # --- what is done

  def _act(self, calls: list[tuple[str, dict]]) -> None:
    try:
      self.post(calls)
    except PageClosed:
      pass  # its own doing, such as a button that closes the tab

  def css(self, point: tuple[int, int]) -> tuple[float, float]:
    """The middle of a picture's pixel, in CSS pixels."""
    return (point[0] + 0.5) / self.scale, (point[1] + 0.5) / self.scale

  def _mouse(self, kind: str, at: tuple[float, float], **more) -> tuple[str, dict]:
    self.pointer = at
    return "Input.dispatchMouseEvent", {"type": kind, "x": at[0], "y": at[1]} | more

  def hover(self, at: tuple[float, float]) -> None:
    self._act([self._mouse("mouseMoved", at)])

  def click(self, at: tuple[float, float], button: str = "left", count: int = 1) -> None:
    calls = [self._mouse("mouseMoved", at)]
    bit = {"left": 1, "right": 2}[button]
    for n in range(1, count + 1):
      calls.append(self._mouse("mousePressed", at, button=button, clickCount=n, buttons=bit))
      calls.append(self._mouse("mouseReleased", at, button=button, clickCount=n, buttons=0))
    self._act(calls)

  def drag(self, start: tuple[float, float], end: tuple[float, float], moves: int = 8) -> None:
    calls = [self._mouse("mouseMoved", start), self._mouse("mousePressed", start, button="left", clickCount=1, buttons=1)]
    for i in range(1, moves + 1):
      at = tuple(a + (b - a) * i / moves for a, b in zip(start, end))
      calls.append(self._mouse("mouseMoved", at, button="left", buttons=1))
    self._act([*calls, self._mouse("mouseReleased", end, button="left", clickCount=1, buttons=0)])

  def scroll(self, at: tuple[float, float], direction: str, share: float = 0.8) -> None:
    """By a share of the window."""
    x, y = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}[direction]
    self._act([self._mouse("mouseWheel", at, deltaX=x * share * self.size[0], deltaY=y * share * self.size[1])])

  def press(self, keys: list[str]) -> None:
    self._act(keyboard.chord(keys))

  def type(self, text: str) -> None:
    if text:
      self._act(keyboard.typing(text))

  # --- elements, by the numbers of the last outline

  def element(self, number: str) -> int:
    """Its backend node id. CannotDo if no element is called so."""
    tab = self.tabs.get(self.front)
    for place, called in tab.numbers.items() if tab else ():
      if called == int(number):
        return place
    raise CannotDo(f"there is no element [{number}]")

  def middle(self, place: int) -> tuple[float, float]:
    """The middle of an element, brought into view, in CSS pixels."""
    try:
      self.call("DOM.scrollIntoViewIfNeeded", {"backendNodeId": place})
      quads = self.call("DOM.getContentQuads", {"backendNodeId": place})["quads"]
    except Refused as refused:
      raise CannotDo(f"nothing is to be seen of that element: {refused}") from None
    if not quads:
      raise CannotDo("nothing is to be seen of that element")
    quad = quads[0]
    return sum(quad[0::2]) / 4, sum(quad[1::2]) / 4

  def on_element(self, place: int, source: str, *values: Any) -> Any:
    """The value of our function, called on an element with plain values."""
    try:
      node = self.call("DOM.resolveNode", {"backendNodeId": place})["object"]["objectId"]
      arguments = [{"value": value} for value in values]
      asked = {"objectId": node, "functionDeclaration": source, "arguments": arguments, "returnByValue": True}
      return self.call("Runtime.callFunctionOn", asked)["result"].get("value")
    except Refused as refused:
      raise CannotDo(f"that element cannot be used: {refused}") from None

  def click_element(self, place: int, button: str = "left") -> None:
    if self.on_element(place, IS_OPTION):
      self.select(place, "")
    else:
      self.click(self.middle(place), button)

  def select(self, place: int, option: str) -> None:
    """Chooses an option of a native list by its label, or the option that the element itself is."""
    if refused := self.on_element(place, SELECT, option):
      raise CannotDo(refused)

  def fill(self, place: int, text: str) -> None:
    """Clicks an element and types over what is in it."""
    self.click(self.middle(place))
    self.on_element(place, EMPTY)
    if not text:
      self.press(["delete"])
    self.type(text)

  # --- tabs

  def new_tab(self) -> None:
    self._open()

  def show(self, index: int) -> None:
    if index >= len(self.tabs):
      raise CannotDo(f"there is no tab {index}")
    self.front = list(self.tabs)[index]
    self.call("Page.bringToFront")

  def close_tab(self) -> None:
    if self.front is not None:
      session = self.front
      self._act([("Page.close", {})])
      until = time.monotonic() + self.seconds
      while session in self.tabs and time.monotonic() < until:
        self.browser.pump(0.05)

  def travel(self, steps: int) -> None:
    """Back (-1) or forward (1) in the tab's history; nothing where it ends."""
    history = self.call("Page.getNavigationHistory")
    index = history["currentIndex"] + steps
    if 0 <= index < len(history["entries"]):
      self.call("Page.navigateToHistoryEntry", {"entryId": history["entries"][index]["id"]})


def literal(value: Any) -> str:
  """A plain value as JavaScript source."""
  return json.dumps(value)
