"""Pop-ups: the surprise that demonstrations never show. Three looks, three places, and one that is out of reach."""

from __future__ import annotations

import dataclasses

import numpy as np

from envs.sim.widgets import Canvas, Rect, Widget, draw, hit

LOOKS = ("sign_in", "rate_us", "notify")
PLACES = ("top", "middle", "bottom")
# What each look says and the words on its way out; the decoy is the button that a hurried user hits, and does nothing.
TEXTS = {
  "sign_in": ("Sign in", "for deals", "Not now", "Sign in"),
  "rate_us": ("Like it?", "Rate us", "Close", "5 stars"),
  "notify": ("Allow", "messages?", "No thanks", "Allow"),
  "corner": ("Win!", "Spin now", "x", "Spin"),
}


@dataclasses.dataclass(frozen=True)
class Popups:
  """When and which. chance: per step, drawn from the task's own seed so that a group's tries share their luck;
  most: how many an episode may have; kinds: names of LOOKS, or "corner", whose small x neither BACK nor Esc replaces.
  """

  chance: float = 0.0
  most: int = 1
  kinds: tuple[str, ...] = LOOKS

  def __post_init__(self):
    if not 0.0 <= self.chance <= 1.0:
      raise ValueError(f"popup chance is {self.chance}, wanted a number from 0 to 1")
    if self.most < 0:
      raise ValueError(f"popup most is {self.most}, wanted 0 or more pop-ups an episode")
    unknown = sorted(set(self.kinds) - set(TEXTS))
    if unknown or not self.kinds:
      raise ValueError(f"popup kinds are {list(self.kinds)}, wanted one or more of {sorted(TEXTS)}")


class Popup:
  """One pop-up on a screen of a given size: a box, a decoy and a way out."""

  def __init__(self, kind: str, place: int, jitter: tuple[int, int], size: tuple[int, int]):
    self.kind, self.place = kind, PLACES[place]
    width, height = size
    w, h = 80, 64
    x = (width - w) // 2 + jitter[0]
    y = (4, (height - h) // 2, height - h - 4)[place] + jitter[1]
    self.box = Rect(x, y, x + w, y + h)
    first, second, out, decoy = TEXTS[kind]
    self.widgets = [Widget("", self.box, "", "panel"), Widget("", Rect(x + 6, y + 2, x + w - 6, y + 14), first, "text")]
    if kind == "corner":
      self.widgets += [
        Widget("", Rect(x + 6, y + 16, x + w - 6, y + 28), second, "text"),
        Widget("decoy", Rect(x + 6, y + 36, x + w - 6, y + 56), decoy, "decoy"),
        Widget("dismiss", Rect(x + w - 11, y + 2, x + w - 1, y + 12), out, "text"),
      ]
    else:
      self.widgets += [
        Widget("decoy", Rect(x + 6, y + 15, x + w - 6, y + 34), decoy, "decoy"),
        Widget("dismiss", Rect(x + 6, y + 39, x + w - 6, y + 59), out, "button"),
      ]

  @property
  def escapable(self) -> bool:
    return self.kind != "corner"

  def draw(self, canvas: Canvas) -> None:
    canvas.dim()
    draw(canvas, self.widgets)

  def dismissed_at(self, x: int, y: int) -> bool:
    widget = hit(self.widgets, x, y)
    return widget is not None and widget.name == "dismiss"


class Luck:
  """The pop-ups of one start state: which steps would bring one and which look it would have."""

  def __init__(self, popups: Popups, seed: int, size: tuple[int, int]):
    self._rng = np.random.default_rng([seed, 2])
    self._popups, self._size = popups, size
    self.shown = 0

  def draw(self, eligible: bool) -> Popup | None:
    """Call once a step. The stream advances every step, so two tries that differ meet the same luck at the same step."""
    roll = float(self._rng.random())
    kind, place = int(self._rng.integers(1 << 30)), int(self._rng.integers(len(PLACES)))
    jitter = int(self._rng.integers(-3, 4)), int(self._rng.integers(-3, 4))
    if not eligible or self.shown >= self._popups.most or roll >= self._popups.chance:
      return None
    self.shown += 1
    return Popup(self._popups.kinds[kind % len(self._popups.kinds)], place, jitter, self._size)
