"""Scripted solutions of MiniWoB++ pages: demonstrations, known-good episodes, and the tests of the browser under them.

A script is a generator of moves: ("click", element), ("type", field, text) or ("choose", list, option), where an element is JavaScript of
ours that finds it. It may look into the page; what `write` makes of a move is text of an agent that may not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from core.schema import Action
from envs import actions
from envs.chromium import Refused
from envs.tabs import Window, literal

Move = tuple[str, ...]


def find(css: str, text: str | None = None) -> str:
  """The first visible element of a selector, with exactly this text where one is given."""
  seen = "e.getClientRects().length > 0"
  said = f"(e.textContent.trim() === {literal(text)} || e.value === {literal(text)})" if text is not None else "true"
  return f"[...document.querySelectorAll({literal(css)})].find(e => {seen} && {said})"


class Page:
  """The page as a script sees it. goal: what it asks for."""

  def __init__(self, window: Window, goal: str):
    self.window, self.goal = window, goal

  def ask(self, source: str) -> Any:
    return self.window.evaluate(source)

  def said(self, pattern: str) -> list[str]:
    """The groups of a pattern in the goal."""
    return list(re.search(pattern, self.goal, re.DOTALL).groups())


def quoted(css: str) -> Callable[[Page], Iterator[Move]]:
  """Clicks the element whose text the goal has in quotation marks."""

  def script(page: Page) -> Iterator[Move]:
    yield "click", find(css, page.said('"(.*)"')[0])

  return script


def clicks(*elements: str) -> Callable[[Page], Iterator[Move]]:
  """Clicks these, one after the other."""

  def script(page: Page) -> Iterator[Move]:
    for element in elements:
      yield "click", element

  return script


def enters(*fields: str, pattern: str = '"(.*)"', button: str = "#subbtn") -> Callable[[Page], Iterator[Move]]:
  """Types what the goal's pattern has into these fields, the last of it into those left over, and clicks the button."""

  def script(page: Page) -> Iterator[Move]:
    said = page.said(pattern)
    for i, field in enumerate(fields):
      yield "type", find(field), said[min(i, len(said) - 1)]
    yield "click", find(button)

  return script


def reads(field: str, source: str) -> Callable[[Page], Iterator[Move]]:
  """Types what stands somewhere on the page into a field and clicks the button. GOAL in source: the goal."""

  def script(page: Page) -> Iterator[Move]:
    yield "type", find(field), str(page.ask(source.replace("GOAL", literal(page.goal))))
    yield "click", find("#subbtn")

  return script


def boxes(page: Page) -> Iterator[Move]:
  """Select A, B and click Submit."""
  wanted = page.said("Select (.*) and click Submit")[0]
  for label in [] if wanted == "nothing" else wanted.split(", "):
    label = f"[...document.querySelectorAll('#area label')].find(e => e.textContent.trim() === {literal(label)})"
    yield "click", f"{label}.querySelector('input')"
  yield "click", find("#subbtn")


def behind_tabs(page: Page) -> Iterator[Move]:
  link = page.said('"(.*)"')[0]
  holds = f"p => [...p.querySelectorAll('.alink')].some(e => e.textContent === {literal(link)})"
  index = page.ask(f"[...document.querySelectorAll('.ui-tabs-panel')].findIndex({holds})")
  if index:
    yield "click", f"document.querySelectorAll('.ui-tabs-anchor')[{index}]"
  yield "click", find(".ui-tabs-panel .alink", link)


def dialog(page: Page) -> Iterator[Move]:
  label = page.said('"(.*)"')[0]
  yield "click", find(".ui-dialog-titlebar-close") if label == "x" else find(".ui-dialog-buttonset button", label)


def chooses(page: Page) -> Iterator[Move]:
  yield "choose", find("#area select"), page.said("Select (.*) from the list")[0]
  yield "click", find("#area button")


def table(page: Page) -> Iterator[Move]:
  for n in (1, 2):
    name = page.ask(f"document.querySelector('#ll{n}').textContent.replace(':', '').trim()")
    yield "type", find(f"#tt{n}"), page.ask(ROW.replace("NAME", literal(name)))
  yield "click", find("#subbtn")


def parity(page: Page) -> Iterator[Move]:
  for i, number in enumerate(page.ask("[...document.querySelectorAll('.row .display-number')].map(e => parseInt(e.textContent))")):
    yield "click", f"document.querySelectorAll('.row')[{i}].querySelector('.{'odd' if number % 2 else 'even'}')"
  yield "click", find("#submit")


def sums(page: Page) -> Iterator[Move]:
  a, sign, b = re.match(r"\s*(-?\d+)\s*([-+x*×])\s*(-?\d+)", page.ask("document.querySelector('#math-problem').textContent")).groups()
  a, b = int(a), int(b)
  yield "type", find("#math-answer"), str(a + b if sign == "+" else a - b if sign == "-" else a * b)
  yield "click", find("#subbtn")


ROW = "[...document.querySelectorAll('#tab tr')].find(r => r.children[0].textContent.trim() === NAME).children[1].textContent.trim()"
WORD = (
  """document.querySelector('#area p').textContent.trim().split(/\\s+/)[parseInt(GOAL.match(/the (\\d+)/)[1]) - 1].replace(/[.,]/g, '')"""
)
SCRIPTS: dict[str, Callable[[Page], Iterator[Move]]] = {
  "click-test": clicks(find("#area button")),
  "click-test-2": clicks(find("button", "ONE")),
  "click-test-transfer": clicks(find("button", "ONE")),
  "click-button": quoted("#area button"),
  "click-button-sequence": clicks(find("button", "ONE"), find("button", "TWO")),
  "click-link": quoted("#area .alink"),
  "click-dialog": clicks(find(".ui-dialog-titlebar-close")),
  "click-dialog-2": dialog,
  "click-tab": lambda page: iter([("click", find(".ui-tabs-anchor", page.said(r"on (Tab #\d+)")[0]))]),
  "click-tab-2": behind_tabs,
  "click-tab-2-easy": behind_tabs,
  "click-checkboxes": boxes,
  "click-checkboxes-transfer": boxes,
  "click-option": boxes,
  "click-widget": lambda page: iter([("click", find(f"[data-type={page.said(chr(34) + '(.*)' + chr(34))[0]}]"))]),
  "click-collapsible": clicks(find(".ui-accordion-header"), find("#subbtn")),
  "click-collapsible-nodelay": clicks(find(".ui-accordion-header"), find("#subbtn")),
  "click-color": lambda page: iter([("click", find(f".color[data-color*={page.said('on the (.*) colored')[0]}]"))]),
  "focus-text": clicks(find("#tt")),
  "focus-text-2": lambda page: iter([("click", find(f"#tt{page.said(r'the (.).. ')[0]}"))]),
  "enter-text": enters("#tt"),
  "enter-text-dynamic": enters("#tt"),
  "enter-password": enters("#password", "#verify"),
  "login-user": enters("#username", "#password", pattern='"(.*)".*"(.*)"'),
  "choose-list": chooses,
  "simple-arithmetic": sums,
  "find-word": reads("#answer-input", WORD),
  "read-table": reads("#tt", ROW.replace("NAME", "GOAL.match(/value of (.*) into/)[1]")),
  "read-table-2": table,
  "grid-coordinate": lambda page: iter([("click", f"document.getElementById({literal(page.said(r'coordinate (.*)[.]')[0])})")]),
  "odd-or-even": parity,
  "text-transform": reads("#tt", "document.querySelector('#captcha').textContent.trim()"),
  "copy-paste": reads("#container input", "document.querySelector('#container textarea').value"),
}


def texts(env: Any, goal: str, page: str, grammar: str) -> Iterator[str]:
  """What an agent writes to solve the page in front of a WebEnv, one action at a time."""
  for move in SCRIPTS[page](Page(env.window, goal)):
    yield from write(env.window, move, grammar)


def write(window: Window, move: Move, grammar: str) -> list[str]:
  kind, element, *rest = move
  if grammar == "web":
    args = {"element": str(_number(window, element))}
    args |= {"type": {"text": rest[0], "enter": False}, "choose": {"option": rest[0]}}[kind] if rest else {}
    said = [Action({"choose": "select"}.get(kind, kind), args, {}, "")]
  else:
    said = [Action("click", {"point": _middle(window, element)}, {}, "")]
    if kind == "type":
      said.append(Action("type", {"text": rest[0], "enter": False}, {}, ""))
    elif kind == "choose":  # an open list takes the first letters, but is not in the picture
      said += [Action("type", {"text": rest[0], "enter": True}, {}, "")]
  return [actions.format(action, grammar, window.picture_size) for action in said]


def _middle(window: Window, element: str) -> tuple[int, int]:
  """Picture pixel in the middle of an element."""
  box = window.evaluate(f"(() => {{ const r = ({element}).getClientRects()[0]; return [r.x, r.y, r.width, r.height]; }})()")
  return tuple(int((start + size / 2) * window.scale) for start, size in zip(box[:2], box[2:]))


def _number(window: Window, element: str) -> int:
  """The number of an element in the outline, or of what is in it."""
  node = window.call("Runtime.evaluate", {"expression": element})["result"].get("objectId")
  if node is None:
    raise Refused(f"a script found nothing: {element}"[:300])
  stack, numbers = [window.call("DOM.describeNode", {"objectId": node, "depth": -1})["node"]], window.tabs[window.front].numbers
  while stack:
    node = stack.pop(0)
    if node["backendNodeId"] in numbers:
      return numbers[node["backendNodeId"]]
    stack += node.get("children", [])
  raise Refused(f"nothing of this element is in the outline: {element}"[:300])
