"""The simulated screens as text, and points in the image that a policy was shown: what a text policy and a UI-TARS need of them."""

import dataclasses

import pytest

import envs.sim as sim
from core.schema import Limits
from envs import actions
from envs.sim.base import SimEnv, expert_text, play
from envs.sim.popups import Popup, Popups
from envs.sim.tasks import practice_tasks
from envs.sim.widgets import Rect, Widget

NAMES = ["sim/phone", "sim/desktop"]
both = pytest.mark.parametrize("computer", NAMES)


class Page:
  """An application that shows what it is given."""

  page, background = "page", (0, 0, 0)

  def __init__(self, widgets):
    self.shown = widgets

  def widgets(self):
    return self.shown

  def key(self):
    return ()

  def draw(self, canvas):
    pass


WIDGETS = [
  Widget("", Rect(0, 0, 96, 20), "", "bar"),
  Widget("bar", Rect(0, 0, 96, 33), "red mug", "focus"),
  Widget("row0", Rect(0, 60, 39, 101), "it's", "row"),
  Widget("box", Rect(0, 120, 96, 160), "", "field"),
]


def test_lines_by_hand():
  """Centres: (47, 16), (19, 80), (47, 139) of 96 x 160, as fractions of 95 and 159, as short as still hit the pixel: 0.49 x 95 = 46.6,
  0.1 x 159 = 15.9, 0.2 x 95 = 19, 0.5 x 159 = 79.5 (to the even 80); 0.87 x 159 = 138.3 misses, 0.874 x 159 = 138.97."""
  env = SimEnv("sim/phone", text=True)
  env.reset(options={"task": practice_tasks("sim/phone", 1)[0]})
  env.app = Page(WIDGETS)
  assert env._observe()["text"].splitlines() == [
    "textbox 'red mug' focused (0.49,0.10)",
    'item "it\'s" (0.20,0.50)',
    "textbox '' (0.49,0.874)",
  ]
  env.popup = Popup("rate_us", 1, (0, 0), env.screen_size)
  said = env._observe()["text"].splitlines()
  labels = [w.label for w in env.popup.widgets if w.label]
  assert said[0] == "dialog" and len(said) == 1 + len(labels) and all(repr(label) in line for label, line in zip(labels, said[1:]))
  assert not any("mug" in line for line in said) and not any("decoy" in line or "dismiss" in line for line in said)


@both
def test_what_is_said_can_be_aimed_at(computer):
  """Every point that stands in the text is read back as the pixel it was said of."""
  module = SimEnv(computer).module
  for task in practice_tasks(computer, 6):
    env = SimEnv(computer, text=True)
    obs, _ = env.reset(options={"task": task})
    for widget, line in zip(
      [w for w in env.app.widgets() if w.label or w.style in ("field", "focus")], obs["text"].splitlines(), strict=True
    ):
      x, y = line.rpartition(" ")[2].strip("()").split(",")
      text = f"tap({x}, {y})" if computer == "sim/phone" else f"Action: click(start_box='({x},{y})')"
      assert actions.parse(text, module.GRAMMAR, env.screen_size).args["point"] == widget.rect.center


@both
def test_no_text_unless_it_is_asked_for(computer):
  cfg = sim.defaults()
  cfg.computer = computer
  task = practice_tasks(computer, 1)[0]
  for text in (False, True):
    cfg.text = text
    obs, _ = sim.make(computer, cfg).reset(options={"task": task})
    assert bool(obs["text"]) == text
    seen = [s.seen for s in sim.demonstrations(computer, 1, 0, cfg)[0].steps]
    assert all(map(bool, seen)) if text else not any(seen)


def test_points_in_a_resized_image_land_on_the_pixel():
  """A 160 x 112 desktop shown as 336 x 224: (84, 56) is pixel (84 * 160 / 336, 56 * 112 / 224) = (40, 28)."""
  env = SimEnv("sim/desktop", points="resized", shown=(336, 224))
  env.reset(options={"task": practice_tasks("sim/desktop", 1)[0]})
  action = env.step("Action: click(start_box='(84,56)')")[-1]["action"]
  assert action.args["point"] == (40, 28) and env.spell("Action: click(start_box='(40,28)')") == "Action: click(start_box='(84,56)')"
  env = SimEnv("sim/desktop", points="resized", shown=(336, 224))
  env.reset(options={"task": practice_tasks("sim/desktop", 1)[0]})
  assert env.step("Action: click(start_box='(336,0)')")[-1]["cause"] == "unreadable"  # beyond the image


@pytest.mark.parametrize("points,shown", [("resized", (168, 112)), ("thousand", None), ("fraction", None)])
def test_scripts_and_canaries_speak_the_same_points(points, shown):
  cfg = sim.defaults()
  cfg.update({"points": points, "shown": shown or (0, 0), "practice_tasks": 8, "in_domain_tasks": 2})
  cfg.computer = "sim/desktop"
  sim.check(cfg)
  for episode in sim.demonstrations("sim/desktop", 8, 0, cfg):
    assert episode.success
    for step in episode.steps:
      assert actions.parse(step.text, "desktop", (160, 112), shown, mode=points).args == step.action.args
  plain = sim.demonstrations("sim/desktop", 8, 0)
  assert [[s.action.args for s in e.steps] for e in plain] == [
    [s.action.args for s in e.steps] for e in sim.demonstrations("sim/desktop", 8, 0, cfg)
  ]
  good = sim.canaries("sim/desktop", cfg)[0]
  env = sim.make("sim/desktop", cfg, quick=True)
  env.reset(options={"task": good.task})
  for text in good.texts:
    *_, info = env.step(text)
  assert info["rewards"]["success"] == 1.0


def test_popups_are_closed_in_the_same_points():
  env = SimEnv("sim/desktop", Popups(1.0, 1), points="thousand")
  task = dataclasses.replace(practice_tasks("sim/desktop", 1)[0], limits=Limits(30))
  env.reset(options={"task": task})
  met = 0
  while not env.done:
    met += env.popup is not None
    env.step(expert_text(env))
  assert met and env._check()
  assert play("sim/desktop", task, Popups(), points="thousand").success


@pytest.mark.parametrize("points,shown", [("inches", (0, 0)), ("resized", (0, 0)), ("pixels", (10, 10))])
def test_points_that_cannot_be_are_one_line(points, shown):
  cfg = sim.defaults()
  cfg.update({"points": points, "shown": shown})
  with pytest.raises(ValueError, match="env.points, shown are"):
    sim.check(cfg)
