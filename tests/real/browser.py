"""Headless Chromium as a person uses it: open an address, press keys, read, look. It reaches the one address it is given and no other."""

import base64
import json
import pathlib
import time
from urllib.parse import urlsplit

from envs.chromium import Browser, find_binary

SECONDS = 120  # the longest wait for anything, on a machine with other work too
KEYS = {"Enter": (13, "\r"), "ArrowRight": (39, ""), "ArrowLeft": (37, ""), "End": (35, ""), "Home": (36, ""), "Escape": (27, "")}


class Reader:
  """One tab. problems: what the console and the page's security policy complained about; dialogs: texts of alert boxes."""

  def __init__(self, address: str, dark: bool = False, size: tuple[int, int] = (1280, 860)):
    self.problems, self.dialogs, self.loaded, self.session = [], [], 0, None
    self.browser = Browser(
      find_binary(""), [urlsplit(address).netloc], sandbox=False, capped=True, boot_seconds=SECONDS, on_event=self._event
    )
    try:
      page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
      self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
      for domain in ("Page", "Runtime", "Log"):
        self.call(f"{domain}.enable")
      self.call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False)
      self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
    except BaseException:
      self.browser.close()
      raise

  def __enter__(self):
    return self

  def __exit__(self, *exc):
    self.browser.close()

  def call(self, method: str, **params) -> dict:
    return self.browser.call(method, params, self.session, seconds=SECONDS)

  def _event(self, message: dict) -> None:
    name, said = message["method"], message.get("params", {})
    if name == "Page.loadEventFired":
      self.loaded += 1
    elif name == "Page.javascriptDialogOpening":
      self.dialogs.append(said["message"])
    elif name == "Runtime.exceptionThrown":
      self.problems.append(said["exceptionDetails"]["text"])
    elif name == "Log.entryAdded" and said["entry"]["level"] == "error":
      self.problems.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")

  def _wait_for_load(self, before: int) -> None:
    until = time.monotonic() + SECONDS
    while self.loaded == before:
      assert time.monotonic() < until, "the page does not load"
      self.browser.pump(0.1)

  def open(self, address: str) -> float:
    """Goes there; -> seconds until the page and its pictures were loaded."""
    before, began = self.loaded, time.monotonic()
    self.call("Page.navigate", url=address)
    self._wait_for_load(before)
    return time.monotonic() - began

  def key(self, key: str, leaves: bool = False) -> None:
    """Presses a key. leaves: the key leads to another page; returns when it is there."""
    before = self.loaded
    code, text = KEYS[key] if key in KEYS else (ord(key.upper()), key)
    down = {"key": key, "windowsVirtualKeyCode": code} | ({"text": text} if text else {})
    self.call("Input.dispatchKeyEvent", type="keyDown", **down)
    self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
    if leaves:
      self._wait_for_load(before)

  def js(self, expression: str):
    """The value of an expression in the page."""
    answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
    assert "exceptionDetails" not in answer, answer
    return answer["result"].get("value")

  def text(self, selector: str = "body") -> str:
    """What a person reads there."""
    return self.js(f"document.querySelector({json.dumps(selector)}).innerText")

  def screenshot(self, path: pathlib.Path) -> None:
    path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
