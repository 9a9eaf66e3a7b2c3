"""A simulated desktop: icons, windows, menus and dialogs, with a writer, a file manager, settings and a form."""

from __future__ import annotations

import itertools

import numpy as np

from core.schema import Action, Task
from envs.sim.phone import DISMISS
from envs.sim.widgets import Canvas, Rect, Widget, aim, draw, hit

WIDTH, HEIGHT = 160, 112
GRAMMAR = "desktop"
GRID_X, GRID_Y = list(range(0, WIDTH, 8)), list(range(0, HEIGHT, 8))  # demonstrations aim at multiples of 8 pixels

FORMULAS = ("H2O", "C2H", "N2O", "O2F", "S2N", "K2S")
FILES = ("notes", "photo", "music", "taxes", "todo")
NAMES = ("report", "letter", "budget", "plan", "draft", "album", "recipe", "diary", "poem", "essay", "score", "guide")
NAMES += ("index", "survey", "novel", "table", "chart", "scan", "memo", "quote", "order", "claim", "bill", "offer")
CITIES = ("Oslo", "Lima", "Kyoto", "Paris", "Cairo", "Quito", "Delhi", "Rome", "Perth", "Turin", "Malmo", "Osaka")
PEOPLE = ("Ada", "Bo", "Carl", "Dina", "Eva", "Finn", "Gia", "Hugo", "Ida", "Jon", "Kim", "Leo")
TABS = ("Display", "Sound", "Power", "Network")
RANKS = ("first", "second", "third", "fourth")
APPS = ("Writer", "Files", "Settings", "Form")
APP_OF = {"subscript": "Writer", "rename": "Files", "setting": "Settings", "form": "Form"}
GOALS = {
  "subscript": ("Make the 2 in the ", "{rank}", " formula", " a subscript"),
  "rename": ("Rename the ", "{rank}", " file", " to ", "{name}"),
  "setting": ("Turn ", "{state}", " the ", "{rank}", " switch", " under ", "{tab}"),
  "form": ("Fill in the form", " with name ", "{person}", " and city ", "{city}"),
}
THOUGHTS = {
  "menu": "A menu is open, so I press Esc.",
  "open": "I open the application.",
  "load": "It is still loading.",
  "tips": "I leave this page.",
  "digit": "I select the digit.",
  "format": "I open the Format menu.",
  "sub": "I choose Subscript.",
  "file": "I right-click the file.",
  "rename": "I choose Rename.",
  "text": "I type the text.",
  "ok": "I confirm.",
  "tab": "I open the tab.",
  "switch": "I flip the switch.",
  "field": "I click the field.",
  "done": "The task is done.",
}
CLOSE_POPUP = ("I leave this page.", "click", {"at": "dismiss"})


def families() -> dict[str, list[dict]]:
  """Every combination of parameters of each task family."""
  subscript = [{"rank": r, "formulas": list(f)} for r in range(3) for f in itertools.permutations(range(len(FORMULAS)), 3)]
  rename = [{"rank": r, "name": n, "shift": s} for r in range(4) for n in NAMES for s in range(3)]
  setting = [{"tab": t, "rank": r, "on": p} for t in range(len(TABS)) for r in range(3) for p in range(8)]
  form = [{"person": p, "city": c} for p in PEOPLE for c in CITIES]
  return {"subscript": subscript, "rename": rename, "setting": setting, "form": form}


def goal(family: str, params: dict, template: int) -> str:
  del template  # one sentence a family
  words = dict(params)
  if "rank" in params:
    words["rank"] = RANKS[params["rank"]]
  if family == "setting":
    words |= {"tab": TABS[params["tab"]], "state": "off" if params["on"] >> params["rank"] & 1 else "on"}
  return "".join(GOALS[family]).format(**words)


def pieces() -> list[str]:
  """The pieces of text a small tokenizer needs for this desktop's goals and actions."""
  words = [p for parts in GOALS.values() for p in parts if "{" not in p]
  words += [*RANKS, *NAMES, *PEOPLE, *CITIES, *TABS, "on", "off", "Thought: ", *THOUGHTS.values()]
  words += [f"\nAction: {k}(start_box='(" for k in ("click", "left_double", "right_single")]
  words += [",", ")')", "\nAction: type(content='", "')", "\nAction: hotkey(key='esc')", "\nAction: wait()"]
  words += ["\nAction: finished()", "\nAction: hotkey(key='enter')"]
  return words + [str(v) for v in GRID_X]


def write(thought: str, kind: str, args: dict) -> str:
  """One step in the desktop grammar. args: "at" (a Rect to hit), "text" or "key"."""
  head = f"Thought: {thought}\nAction: "
  if "at" in args:
    i, j = aim(args["at"], GRID_X, GRID_Y)
    return f"{head}{kind}(start_box='({GRID_X[i]},{GRID_Y[j]})')"
  if kind == "type":
    return f"{head}type(content='{args['text']}')"
  return f"{head}hotkey(key='{args['key']}')" if kind == "hotkey" else f"{head}{kind}()"


class Desktop:
  """The applications of one desktop. The seed fixes layout, slow starts and the start page; actions do the rest."""

  size = (WIDTH, HEIGHT)
  background = (70, 110, 140)

  def __init__(self, task: Task):
    rng = np.random.default_rng([task.seed, 1])
    self.family, self.params = task.family, task.params
    self.page = "menu" if rng.random() < 0.4 else "desktop"
    self.app, self.focus, self.menu = "", "", ""
    self.icons = rng.permutation(4).tolist()
    self.icon_y = int(rng.integers(6, 14))
    self.loading = 0
    self._slow = int(rng.choice([0, 0, 1, 2]))
    self.tips, self.tips_place = rng.random() < 0.6, int(rng.integers(3))
    self.tips_label = int(rng.integers(3))
    self.dx, self.dy = int(rng.integers(0, 9)), int(rng.integers(0, 7))
    # what the applications hold
    self.picked, self.subscripts = -1, set()
    self.files = [FILES[(i + self.params.get("shift", 0)) % len(FILES)] for i in range(4)]
    self.tab, self.switches = 0, [self.params.get("on", 0)] * len(TABS)
    self.fields, self.saved, self.draft = {"name": "", "city": ""}, None, ""

  # -- what is on the screen

  def widgets(self) -> list[Widget]:
    if self.page in ("desktop", "menu"):
      out = [Widget("", Rect(0, HEIGHT - 12, WIDTH, HEIGHT), "Start", "bar")]
      for slot, app in enumerate(self.icons):
        x, y = (8 + self.dx, 84 + self.dx)[slot % 2], self.icon_y + 40 * (slot // 2)
        out.append(Widget(f"icon{app}", Rect(x, y, x + 60, y + 26), APPS[app], f"app{app}"))
      if self.page == "menu":
        out += [Widget("", Rect(0, 22, 74, HEIGHT - 12), "", "menu")]
        out += [Widget("", Rect(4, 26 + 18 * i, 70, 42 + 18 * i), t, "row") for i, t in enumerate(("Search", "Log out", "Help"))]
      return out
    out = [Widget("", Rect(0, 0, WIDTH, HEIGHT), "", "panel"), Widget("", Rect(0, 0, WIDTH, 14), self.app, "title")]
    if self.page == "loading":
      return [*out, Widget("", Rect(50, 50, 120, 64), "Loading", "text")]
    if self.page == "tips":
      x, y = (14 + self.dx, 34 + self.dx, 54 + self.dx)[self.tips_place], (40, 58, 82)[self.tips_place]
      return [
        *out,
        Widget("", Rect(20, 20, 140, 34), "Tip of the day", "text"),
        Widget("dismiss", Rect(x, y, x + 68, y + 20), DISMISS[self.tips_label], "button"),
      ]
    return out + getattr(self, "_" + self.app.lower())()

  def _writer(self) -> list[Widget]:
    out = [Widget("", Rect(0, 14, WIDTH, 30), "", "bar")]
    out += [Widget(f"menu{n}", Rect(4 + 50 * i, 15, 50 + 50 * i, 29), n, "menu") for i, n in enumerate(("File", "Edit", "Format"))]
    for i, f in enumerate(self.params.get("formulas", [0, 1, 2])):
      y, text = 36 + self.dy + 23 * i, FORMULAS[f]
      for j, letter in enumerate(text):
        x = 20 + self.dx + 18 * j
        kind = "picked" if j == 1 and i == self.picked else "row"
        drop = 6 if j == 1 and i in self.subscripts else 0
        out.append(Widget(f"digit{i}" if j == 1 else "", Rect(x, y + drop, x + 17, y + 16 + drop), letter, kind))
    if self.menu == "Format":
      out += [Widget(f"item{n}", Rect(92, 30 + 17 * i, 158, 46 + 17 * i), n, "menu")
              for i, n in enumerate(("Bold", "Italic", "Subscript", "Colour"))]  # fmt: skip
    elif self.menu:
      x = 4 if self.menu == "File" else 54
      out += [Widget("", Rect(x, 30 + 17 * i, x + 60, 46 + 17 * i), n, "menu") for i, n in enumerate(("Copy", "Print"))]
    return out

  def _files(self) -> list[Widget]:
    out = []
    for i, name in enumerate(self.files):
      y = 18 + self.dy // 2 + 22 * i
      out.append(Widget(f"file{i}", Rect(8 + self.dx, y, 76 + self.dx, y + 18), name, "picked" if i == self.picked else "row"))
    if self.menu == "file":
      out += [Widget(f"item{n}", Rect(92, 24 + 19 * i, 152, 42 + 19 * i), n, "menu") for i, n in enumerate(("Open", "Rename", "Delete"))]
    elif self.menu == "rename":
      out += [
        Widget("", Rect(20, 28, 148, 98), "", "panel"),
        Widget("", Rect(26, 30, 140, 42), "New name", "text"),
        Widget("field", Rect(28, 46, 140, 62), self.draft[-16:], "focus"),
        Widget("ok", Rect(90, 72, 136, 90), "OK", "on"),
        Widget("cancel", Rect(30, 72, 80, 90), "Cancel", "off"),
      ]
    return out

  def _settings(self) -> list[Widget]:
    out = []
    for i, name in enumerate(TABS):
      out.append(Widget(f"tab{i}", Rect(2, 20 + 22 * i, 60, 40 + 22 * i), name, "picked" if i == self.tab else "row"))
    for i in range(3):
      y, on = 20 + self.dy + 22 * i, self.switches[self.tab] >> i & 1
      out.append(Widget("", Rect(66, y, 104, y + 16), f"no. {i + 1}", "text"))
      out.append(Widget(f"switch{i}", Rect(108, y, 150, y + 16), "on" if on else "off", "on" if on else "off"))
    # grey while there is nothing to apply, blue once a switch was flipped, green when it is applied: as real settings do
    changed = self.switches != [self.params.get("on", 0)] * len(TABS)
    label, style = ("Applied", "on") if self.saved is not None else ("Apply", "button" if changed else "off")
    return [*out, Widget("apply", Rect(100, 90, 152, 109), label, style)]

  def _form(self) -> list[Widget]:
    out = []
    for i, name in enumerate(("name", "city")):
      y = 20 + self.dy + 30 * i
      out.append(Widget("", Rect(8, y, 50, y + 16), name.title(), "text"))
      style = "focus" if self.focus == name else "field"
      out.append(Widget(name, Rect(50 + self.dx, y, 140 + self.dx, y + 17), self.fields[name][-14:], style))
    label, style = ("Submit", "button") if self.saved is None else ("Sent", "on")
    return [*out, Widget("submit", Rect(60, 86, 124, 104), label, style)]

  def key(self) -> tuple:
    """What the picture depends on: equal keys, equal pixels."""
    return (self.page, self.app, self.focus, self.menu, self.picked, tuple(self.subscripts), tuple(self.files), self.tab,
            tuple(self.switches), tuple(self.fields.values()), self.saved is None, self.draft)  # fmt: skip

  def draw(self, canvas: Canvas) -> None:
    draw(canvas, self.widgets())

  # -- what happens

  def tick(self) -> None:
    """Time passes once a step; applications that start slowly appear."""
    if self.page == "loading":
      self.loading -= 1
      if self.loading < 0:
        self.page = "tips" if self.tips else "app"

  def act(self, action: Action) -> None:
    if self.page == "loading":
      return
    if action.kind in ("click", "left_double", "right_single"):
      widget = hit(self.widgets(), *action.args["point"])
      self._pointer(action.kind, widget.name if widget else "")
    elif action.kind == "type":
      self._type(action.args["text"])
      if action.args.get("enter"):
        self._hotkey(["enter"])
    elif action.kind == "hotkey":
      self._hotkey(action.args["keys"])

  def _pointer(self, kind: str, name: str) -> None:
    if self.page == "desktop":
      if kind == "left_double" and name.startswith("icon"):
        self.app, self.loading, self.page = APPS[int(name[4:])], self._slow, "loading"
    elif self.page == "tips" and kind == "click" and name == "dismiss":
      self.page = "app"
    elif self.page == "app":
      getattr(self, "_on_" + self.app.lower())(kind, name)

  def _on_writer(self, kind: str, name: str) -> None:
    if kind == "left_double" and name.startswith("digit"):
      self.picked, self.menu = int(name[5:]), ""
    elif kind == "click" and name.startswith("menu"):
      self.menu = name[4:]
    elif kind == "click":
      if name == "itemSubscript" and self.picked >= 0:
        self.subscripts ^= {self.picked}
      self.menu = ""

  def _on_files(self, kind: str, name: str) -> None:
    if self.menu == "rename":
      if kind == "click" and name in ("ok", "cancel"):
        self._rename(name == "ok")
    elif kind == "right_single" and name.startswith("file"):
      self.picked, self.menu = int(name[4:]), "file"
    elif kind == "click":
      self.menu = "rename" if name == "itemRename" else ""

  def _rename(self, confirmed: bool) -> None:
    if confirmed and self.draft:
      self.files[self.picked] = self.draft  # the renamed file stays picked, as in most file managers
    self.menu, self.draft = "", ""

  def _on_settings(self, kind: str, name: str) -> None:
    if kind != "click":
      return
    if name.startswith("tab"):
      self.tab = int(name[3:])
    elif name.startswith("switch"):
      self.switches[self.tab] ^= 1 << int(name[6:])
      self.saved = None
    elif name == "apply":
      self.saved = tuple(self.switches)

  def _on_form(self, kind: str, name: str) -> None:
    if kind == "click" and name in self.fields:
      self.focus = name
    elif kind == "click" and name == "submit":
      self.saved, self.focus = tuple(self.fields.values()), ""

  def _type(self, text: str) -> None:
    if self.page == "app" and self.app == "Files" and self.menu == "rename":
      self.draft = text
    elif self.page == "app" and self.app == "Form" and self.focus:
      self.fields[self.focus], self.saved = text, None

  def _hotkey(self, keys: list[str]) -> None:
    if keys == ["escape"]:
      self.page = "desktop" if self.page == "menu" else self.page
      self.menu, self.draft = "", ""
    elif keys == ["enter"] and self.menu == "rename":
      self._rename(True)

  # -- the checker and the expert

  def passed(self) -> bool:
    """The checker: the wanted change, and nothing else, is in the applications' final state."""
    p = self.params
    if self.family == "subscript":
      return self.subscripts == {p["rank"]}
    if self.family == "rename":
      names = [FILES[(i + p["shift"]) % len(FILES)] for i in range(4)]
      names[p["rank"]] = p["name"]
      return self.files == names
    if self.family == "setting":
      want = [p["on"]] * len(TABS)
      want[p["tab"]] ^= 1 << p["rank"]
      return self.saved == tuple(want) and self.switches == want
    return self.saved == (p["person"], p["city"])

  def expert(self) -> tuple[str, str, dict]:
    """The demonstrated next action from here: (thought, kind, arguments); a point is given as a widget's name."""
    if self.page == "menu":
      return THOUGHTS["menu"], "hotkey", {"key": "esc"}
    if self.page == "desktop":
      return THOUGHTS["open"], "left_double", {"at": f"icon{APPS.index(APP_OF[self.family])}"}
    if self.page == "loading":
      return THOUGHTS["load"], "wait", {}
    if self.page == "tips":
      return THOUGHTS["tips"], "click", {"at": "dismiss"}
    if self.passed():
      return THOUGHTS["done"], "finished", {}
    return getattr(self, "_expert_" + self.family)()

  def _expert_subscript(self) -> tuple[str, str, dict]:
    if self.picked != self.params["rank"]:
      return THOUGHTS["digit"], "left_double", {"at": f"digit{self.params['rank']}"}
    if self.menu != "Format":
      return THOUGHTS["format"], "click", {"at": "menuFormat"}
    return THOUGHTS["sub"], "click", {"at": "itemSubscript"}

  def _expert_rename(self) -> tuple[str, str, dict]:
    if self.menu == "rename":
      if self.draft != self.params["name"]:
        return THOUGHTS["text"], "type", {"text": self.params["name"]}
      return THOUGHTS["ok"], "click", {"at": "ok"}
    if self.menu == "file" and self.picked == self.params["rank"]:
      return THOUGHTS["rename"], "click", {"at": "itemRename"}
    return THOUGHTS["file"], "right_single", {"at": f"file{self.params['rank']}"}

  def _expert_setting(self) -> tuple[str, str, dict]:
    p = self.params
    if self.tab != p["tab"]:
      return THOUGHTS["tab"], "click", {"at": f"tab{p['tab']}"}
    if self.switches[p["tab"]] == p["on"]:
      return THOUGHTS["switch"], "click", {"at": f"switch{p['rank']}"}
    return THOUGHTS["ok"], "click", {"at": "apply"}

  def _expert_form(self) -> tuple[str, str, dict]:
    for name, value in (("name", self.params["person"]), ("city", self.params["city"])):
      if self.fields[name] != value:
        if self.focus != name:
          return THOUGHTS["field"], "click", {"at": name}
        return THOUGHTS["text"], "type", {"text": value}
    return THOUGHTS["ok"], "click", {"at": "submit"}
