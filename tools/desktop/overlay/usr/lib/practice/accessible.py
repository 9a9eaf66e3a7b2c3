"""What assistive technology sees of the guest's applications (AT-SPI), written as OSWorld's server writes it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

MOST_DEPTH, MOST_NODES = 50, 10_000
SPACES = {
  "st": "https://accessibility.ubuntu.example.org/ns/state", "attr": "https://accessibility.ubuntu.example.org/ns/attributes",
  "cp": "https://accessibility.ubuntu.example.org/ns/component", "txt": "https://accessibility.ubuntu.example.org/ns/text",
  "val": "https://accessibility.ubuntu.example.org/ns/value", "act": "https://accessibility.ubuntu.example.org/ns/action",
}  # fmt: skip
for prefix, name in SPACES.items():
  ET.register_namespace(prefix, name)


def atspi():
  import gi

  gi.require_version("Atspi", "2.0")
  from gi.repository import Atspi, GLib

  return Atspi, GLib.Error


def node_of(found, budget: list[int], depth: int = 0) -> ET.Element | None:
  """One accessible and all below it, as OSWorld writes it: the role is the tag."""
  Atspi, Gone = atspi()
  budget[0] -= 1
  if budget[0] < 0 or depth > MOST_DEPTH:
    return None
  try:
    role = re.sub(r"[^A-Za-z0-9-]+", "-", found.get_role_name() or "unknown").strip("-") or "unknown"
    node = ET.Element(role, {"name": clean(found.get_name())})
    states = found.get_state_set()
    for state in states.get_states():
      node.set(f"{{{SPACES['st']}}}{state.value_nick}", "true")
    if found.get_component_iface() is not None and states.contains(Atspi.StateType.SHOWING):
      box = found.get_component_iface().get_extents(Atspi.CoordType.SCREEN)
      node.set(f"{{{SPACES['cp']}}}screencoord", str((box.x, box.y)))
      node.set(f"{{{SPACES['cp']}}}size", str((box.width, box.height)))
    if (text := found.get_text_iface()) is not None:
      node.text = clean(text.get_text(0, text.get_character_count()))
    if (value := found.get_value_iface()) is not None:
      node.set(f"{{{SPACES['val']}}}value", str(value.get_current_value()))
    for index in range(min(found.get_child_count(), 1024)):
      child = found.get_child_at_index(index)
      below = None if child is None else node_of(child, budget, depth + 1)
      if below is not None:
        node.append(below)
    return node
  except Gone:  # the application ended, or does not answer
    return None


def clean(text: str | None) -> str:
  """Without what XML has no way to say: a window's title can be anything that an agent made of it."""
  return "".join(c for c in text or "" if c in "\n\t" or " " <= c < "\ufffc" or c == "\ufffd" or c > "\uffff")


def tree() -> str:
  """All applications as XML."""
  Atspi, _ = atspi()
  top, budget = ET.Element("desktop-frame", {"name": "main"}), [MOST_NODES]
  desktop = Atspi.get_desktop(0)
  for index in range(desktop.get_child_count()):
    application = desktop.get_child_at_index(index)
    below = None if application is None else node_of(application, budget)
    if below is not None:
      top.append(below)
  return ET.tostring(top, encoding="unicode")


def terminal_text() -> str | None:
  """What the terminal shows, None if none is open."""
  Atspi, Gone = atspi()
  desktop, left = Atspi.get_desktop(0), [MOST_NODES]

  def look(found):
    left[0] -= 1
    try:
      if found is None or left[0] < 0:
        return None
      if found.get_role() == Atspi.Role.TERMINAL and found.get_state_set().contains(Atspi.StateType.SHOWING):
        text = found.get_text_iface()
        return clean(text.get_text(0, text.get_character_count())).rstrip()
      told = (look(found.get_child_at_index(i)) for i in range(found.get_child_count()))
      return next((text for text in told if text is not None), None)
    except Gone:
      return None

  return look(desktop)
