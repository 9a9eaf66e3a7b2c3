"""A page as text: the accessibility tree, one element a line, numbered as the web grammar names elements.

  [3] link 'My account'
    [4] textbox 'Search' focused value: 'red mug'

The layout is WebArena's; which lines are left out differs (docs/web.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

SKIPPED = {"none", "generic", "InlineTextBox", "LineBreak", "ListMarker", "RootWebArea", "presentation", "Iframe"}
STATES = ("focused", "checked", "selected", "expanded", "disabled", "required", "pressed", "invalid")
MOST_NAME = 300


def value_of(node: dict, key: str) -> str:
  return str(node.get(key, {}).get("value", ""))


def printable(text: str) -> str:
  """One line, without characters that cannot be seen."""
  return "".join(c for c in " ".join(text.split()) if c.isprintable())


def shorten(text: str) -> str:
  text = printable(text)
  return text if len(text) <= MOST_NAME else f"{text[:MOST_NAME]}... ({len(text)} characters)"


def describe(node: dict) -> str:
  """What follows the number: role, name, states and value."""
  said = [value_of(node, "role"), repr(shorten(value_of(node, "name")))]
  states = {p["name"]: p["value"].get("value") for p in node.get("properties", [])}
  said += [f"{name}: {states[name]}" if name == "checked" else name for name in STATES if states.get(name) not in (None, False, "false")]
  if states.get("checked") == "false":
    said.append("checked: false")
  if value := value_of(node, "value"):
    said.append(f"value: {shorten(value)!r}")
  return " ".join(said)


def outline(nodes: Sequence[dict], number: Callable[[int], int], frames: dict[int, Sequence[dict]], most: int) -> str:
  """nodes: Accessibility.getFullAXTree's; number: the number of a backend node id; frames: the trees of inner frames by the backend
  node id of their frame element; most: characters. What is left out at the end is counted in a last line."""
  lines: list[str] = []
  _walk(nodes, number, frames, lines, 0)
  kept, room = [], most
  for line in lines:
    room -= len(line) + 1
    if room < 0:
      kept.append(f"({len(lines) - len(kept)} more lines are not shown)")
      break
    kept.append(line)
  return "\n".join(kept)


def _walk(nodes: Sequence[dict], number: Callable[[int], int], frames: dict, lines: list[str], depth: int) -> None:
  by_id = {node["nodeId"]: node for node in nodes}
  stack = [(node, depth, "") for node in nodes if "parentId" not in node or node["parentId"] not in by_id][::-1]
  while stack:
    node, level, above = stack.pop()
    name, role, place = value_of(node, "name"), value_of(node, "role"), node.get("backendDOMNodeId")
    focusable = any(p["name"] == "focusable" and p["value"].get("value") for p in node.get("properties", []))
    said = role == "StaticText" and printable(name) in printable(above)
    shown = not node.get("ignored") and place is not None and not said and (role not in SKIPPED or (focusable and role == "generic"))
    if role == "StaticText" and not printable(name):
      shown = False
    if shown:
      lines.append(f"{'  ' * level}[{number(place)}] {describe(node)}")
    inner = level + 1 if shown else level
    if place in frames:
      _walk(frames[place], number, {}, lines, inner)
    children = [by_id[c] for c in node.get("childIds", []) if c in by_id]
    stack += [(child, inner, f"{name} {value_of(node, 'value')}" if shown else above) for child in reversed(children)]
