"""A simulated screen as text: one element a line, with its role, its label and the point to aim at, as an accessibility tree has them.

  textbox 'address' focused (0.5,0.06)
  button 'Not now' (0.5,0.4)

Nothing is said that the picture does not show: roles follow from how things are drawn, and of what lies under a pop-up nothing is listed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from envs.sim.widgets import Widget

ROLES = {
  "button": "button", "decoy": "button", "field": "textbox", "focus": "textbox", "row": "item", "picked": "item", "menu": "menuitem",
  "text": "text", "title": "heading", "on": "button", "off": "button", "bar": "bar", "panel": "panel",
}  # fmt: skip
STATES = {"focus": " focused", "picked": " selected", "on": " on", "off": " off"}


def outline(widgets: Sequence[Widget], spell: Callable[[tuple[int, int]], str], dialog: bool) -> str:
  """spell: a point in pixels as the agent writes it; dialog: the widgets are a pop-up's. Areas without a label are left out."""
  lines = ["dialog"] if dialog else []
  for w in widgets:
    if w.label or w.style in ("field", "focus"):
      lines.append(f"{ROLES.get(w.style, 'icon')} {w.label!r}{STATES.get(w.style, '')} {spell(w.rect.center)}")
  return "\n".join(lines)
