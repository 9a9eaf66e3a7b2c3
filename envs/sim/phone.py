"""A simulated phone: a browser, slow pages and shops. The lesson's task: search a shop and open the n-th result."""

from __future__ import annotations

import numpy as np

from core.schema import Action, Task
from envs.sim.widgets import Canvas, Rect, Widget, aim, draw, hit

WIDTH, HEIGHT = 96, 160
GRAMMAR = "phone"
GRID = 20  # demonstrations aim at multiples of 1/20 of the screen: scattered aim would only add noise to every token

SHOPS = ("shopmart", "buybox", "dealhub", "onecart", "gearbay", "homely")
ADJECTIVES = ("red", "blue", "green", "small", "large", "cheap", "new", "steel", "wooden", "soft")
NOUNS = ("mug", "lamp", "cable", "chair", "shirt", "phone", "clock", "bag", "knife", "pillow")
RANKS = ("first", "second", "third", "fourth")
TEMPLATES = (
  ("Search ", "{shop}", ".com", " for ", "{adj}", " {noun}", " and open the ", "{rank}", " result"),
  ("On ", "{shop}", ".com", " find ", "{adj}", " {noun}", " and open the ", "{rank}", " result"),
  ("Open the ", "{rank}", " result", " for ", "{adj}", " {noun}", " on ", "{shop}", ".com"),
)
# Words a dismissing button can carry: on the shops' welcome pages (demonstrated) and on pop-ups (never demonstrated).
DISMISS = ("Not now", "Close", "No thanks")
BACKGROUND = (225, 232, 240)
CLOSE_POPUP = ("", "tap", {"at": "dismiss"})
GRID_X = [round(i / GRID * (WIDTH - 1)) for i in range(GRID + 1)]
GRID_Y = [round(i / GRID * (HEIGHT - 1)) for i in range(GRID + 1)]


def write(thought: str, kind: str, args: dict) -> str:
  """One line of the phone grammar. args: "at" (a Rect to hit), "text" or "key"."""
  if kind == "tap":
    i, j = aim(args["at"], GRID_X, GRID_Y)
    return f"tap({i / GRID:.2f}, {j / GRID:.2f})"
  if kind == "type":
    return f'type("{args["text"]}")'
  return f"press({args['key']})" if kind == "press" else f"{kind}()"


def families() -> dict[str, list[dict]]:
  """Every combination of parameters of each task family."""
  return {
    "shopping": [{"shop": s, "adj": a, "noun": n, "rank": r} for s in SHOPS for a in ADJECTIVES for n in NOUNS for r in range(len(RANKS))]
  }


def goal(family: str, params: dict, template: int) -> str:
  words = {"shop": params["shop"], "adj": params["adj"], "noun": params["noun"], "rank": RANKS[params["rank"]]}
  return "".join(TEMPLATES[template % len(TEMPLATES)]).format(**words)


def pieces() -> list[str]:
  """The pieces of text a small tokenizer needs for this phone's goals and actions."""
  words = [p for t in TEMPLATES for p in t if "{" not in p]
  words += [*SHOPS, *ADJECTIVES, *(" " + n for n in NOUNS), *RANKS]
  words += ["tap(", ", ", ")", 'type("', '")', "press(ENTER)", "press(BACK)", "press(HOME)", "wait()", "finish()"]
  return words + [f"{i / GRID:.2f}" for i in range(GRID + 1)]


class Phone:
  """The applications of one phone. The seed fixes layout, slow pages and start page; actions do the rest. drift: pixels by which a
  redesign has moved everything in the browser down since the demonstrations."""

  size = (WIDTH, HEIGHT)

  def __init__(self, task: Task, drift: int = 0):
    rng = np.random.default_rng([task.seed, 1])
    self.want = (task.params["shop"], task.params["adj"] + " " + task.params["noun"], task.params["rank"])
    self.page = "other" if rng.random() < 0.25 else "home"
    self.focus = ""
    self.bar_text, self.box_text = "", ""
    self.shop, self.query, self.opened = "", "", -1
    self.loading, self.after = 0, ""
    self._loads = rng.choice([0, 0, 0, 1, 2], size=8).tolist()  # steps until each page load is there: 0 and 1 show no loading page
    self.splash_label = int(rng.integers(3))
    self.splash_dx, self.splash_y = int(rng.integers(-3, 4)), int(rng.integers(4, 94))
    self.splash = rng.random() < 0.6
    self.bar_y, self.box_y = int(rng.integers(4, 12)), int(rng.integers(34, 50))
    self.bar_y, self.box_y, self.splash_y = self.bar_y + drift, self.box_y + drift, min(self.splash_y + drift, 94)
    self.left, self.right = int(rng.integers(2, 8)), int(rng.integers(88, 95))
    # another application: what it shows differs from phone to phone, light or dark
    self.background = (int(rng.integers(90, 236)),) * 3 if self.page == "other" else BACKGROUND
    self.other = []
    for _ in range(int(rng.integers(2, 5))):
      x, y, style = int(rng.integers(0, 30)), int(rng.integers(22, 130)), ("row", "decoy")[rng.integers(2)]
      rect = Rect(x, y, min(x + int(rng.integers(40, 91)), WIDTH), y + int(rng.integers(14, 41)))
      self.other.append(Widget("", rect, "", style))
    self.row_h, self.title = int(rng.integers(18, 22)), ("Mail", "Photos", "Maps")[rng.integers(3)]

  def widgets(self) -> list[Widget]:
    if self.page == "other":
      return [Widget("", Rect(0, 0, WIDTH, 18), self.title, "title"), *self.other]
    y = self.bar_y
    bar = Widget("bar", Rect(self.left, y, self.right, y + 17), (self.bar_text or "address")[-14:],
                 "focus" if self.focus == "bar" else "field")  # fmt: skip
    out = [Widget("", Rect(0, 0, WIDTH, y + 21), "", "bar"), bar]
    if self.page == "loading":
      out.append(Widget("", Rect(14, 84, 82, 100), "Loading", "text"))
    elif self.page == "error":
      out.append(Widget("", Rect(10, 60, 90, 76), "No such page", "text"))
    elif self.page == "splash":
      x, top = 8 + self.splash_dx, self.splash_y
      out.append(Widget("", Rect(x, top, x + 80, top + 64), "", "panel"))
      out.append(Widget("", Rect(x + 6, top + 2, x + 74, top + 14), "Welcome", "text"))
      out.append(Widget("dismiss", Rect(x + 6, top + 39, x + 74, top + 59), DISMISS[self.splash_label], "button"))
    elif self.page in ("shop", "results"):
      box = Widget("box", Rect(self.left, self.box_y, self.right, self.box_y + 18), (self.box_text or "Search")[:14],
                   "focus" if self.focus == "box" else "field")  # fmt: skip
      out += [Widget("", Rect(0, y + 21, WIDTH, y + 34), self.shop, "text")] if self.box_y > y + 36 else []
      out.append(box)
      top = self.box_y + 24
      for i in range(4 if self.page == "results" else 0):
        rect = Rect(self.left, top + i * self.row_h, self.right, top + (i + 1) * self.row_h - 2)
        out.append(Widget(f"row{i}", rect, self.query[:14], "row"))
    elif self.page == "item":
      out.append(Widget("", Rect(10, 50, 86, 100), self.query[:12], "panel"))
      out.append(Widget("buy", Rect(14, 120, 82, 140), "Add to cart", "decoy"))
    return out

  def key(self) -> tuple:
    """What the picture depends on: equal keys, equal pixels."""
    return self.page, self.focus, self.bar_text, self.box_text, self.shop, self.query

  def draw(self, canvas: Canvas) -> None:
    draw(canvas, self.widgets())

  def _load(self, after: str) -> None:
    self.loading, self.after = (self._loads.pop() if self._loads else 0), after
    self.page = "loading" if self.loading else after
    self.focus = ""

  def tick(self) -> None:
    """Time passes once a step; slow pages arrive."""
    if self.page == "loading":
      self.loading -= 1
      if self.loading <= 0:
        self.page = self.after

  def act(self, action: Action) -> None:
    if self.page == "loading":
      return
    if action.kind == "tap":
      self._tap(*action.args["point"])
    elif action.kind == "type":
      self._type(action.args["text"])
      if action.args.get("enter"):
        self._press("ENTER")
    elif action.kind == "press":
      self._press(action.args["key"])

  def _tap(self, x: int, y: int) -> None:
    widget = hit(self.widgets(), x, y)
    name = widget.name if widget else ""
    if name in ("bar", "box"):
      self.focus = name
    elif name == "dismiss":
      self.page = "shop"
    elif name.startswith("row"):
      self.opened = int(name[3:])
      self._load("item")

  def _type(self, text: str) -> None:
    if self.focus == "bar":
      self.bar_text = text
    elif self.focus == "box":
      self.box_text = text

  def _press(self, key: str) -> None:
    if key == "HOME" or (key == "BACK" and self.page in ("other", "error", "shop", "splash")):
      self.page, self.focus, self.bar_text, self.box_text = "home", "", "", ""
      self.background = BACKGROUND
    elif key == "BACK":
      self.page = {"results": "shop", "item": "results"}.get(self.page, self.page)
      self.opened = -1
    elif key == "ENTER" and self.focus == "bar":
      name = self.bar_text.removesuffix(".com")
      if name in SHOPS and self.bar_text.endswith(".com"):
        self.shop, self.box_text = name, ""
        self._load("splash" if self.splash else "shop")
      else:
        self._load("error")
    elif key == "ENTER" and self.focus == "box" and self.box_text:
      self.query = self.box_text
      self._load("results")

  def passed(self) -> bool:
    """The checker: the item page of the wanted shop, query and rank is open."""
    return self.page == "item" and (self.shop, self.query, self.opened) == self.want

  def expert(self) -> tuple[str, str, dict]:
    """The demonstrated next action from here: (thought, kind, arguments); a point is given as a widget's name."""
    shop, query, rank = self.want
    if self.page == "other":
      return "", "press", {"key": "BACK"}
    if self.page == "loading":
      return "", "wait", {}
    if self.page == "splash":
      return "", "tap", {"at": "dismiss"}
    if self.page == "home":
      if self.focus != "bar":
        return "", "tap", {"at": "bar"}
      url = shop + ".com"
      return ("", "press", {"key": "ENTER"}) if self.bar_text == url else ("", "type", {"text": url})
    if self.page == "shop":
      if self.focus != "box":
        return "", "tap", {"at": "box"}
      return ("", "press", {"key": "ENTER"}) if self.box_text == query else ("", "type", {"text": query})
    if self.page == "results":
      return "", "tap", {"at": f"row{rank}"}
    return "", "press", {"key": "BACK"}
