"""DigiRL's and AndroidWorld's action texts. Pixels are worked out by hand; strings are those of their published code and prompts."""

import json
import random

import pytest

from core.schema import Action, Unreadable
from envs import actions
from envs.actions import format, parse
from envs.grammars.flat_json import read_object, write_object
from envs.grammars.lex import Bad

PIXEL = (1080, 2400)


def dual(touch, lift):
  return f'"action_type": "DUAL_POINT", "touch_point": "{touch}", "lift_point": "{lift}", "typed_text": ""'


def test_digirl_points_are_y_then_x():
  # x 0.5 * 1079 = 539.5, a tie, to the even 540; y 0.22 * 2399 = 527.78
  got = parse(dual("[0.2200, 0.5000]", "[0.2200, 0.5000]"), "digirl", PIXEL)
  assert (got.kind, got.args) == ("tap", {"point": (540, 528)})
  assert actions.aim(got) == ((0.5, 0.22), (540, 528))
  # Auto-UI's whole reply; x 0.7089 * 1079 = 764.9, y 0.7761 * 2399 = 1861.9
  whole = "Action Plan: [DUAL_POINT,DUAL_POINT]; Action Decision: " + dual("[0.7761, 0.7089]", "[0.7761, 0.7089]")
  got = parse(whole, "digirl", PIXEL)
  assert (got.args, got.thought) == ({"point": (765, 1862)}, "Action Plan: [DUAL_POINT,DUAL_POINT];")
  assert format(got, "digirl", PIXEL) == whole


def test_digirl_a_stroke_under_the_root_of_ten_pixels_is_a_tap():
  # on a screen 1001 x 1001 a thousandth is one pixel: 3 pixels down are 9 < 10, 3 down and 1 across are 10
  size = (1001, 1001)
  assert parse(dual("[0.500, 0.500]", "[0.503, 0.500]"), "digirl", size).args == {"point": (500, 500)}
  assert parse(dual("[0.500, 0.500]", "[0.503, 0.501]"), "digirl", size).args == {"start": (500, 500), "end": (501, 503)}
  # DigiRL's "swipe up": from 0.5 to 0.2 of the height; 0.2 * 1000 = 200
  assert parse(dual("[0.5, 0.5]", "[0.2, 0.5]"), "digirl", size).args == {"start": (500, 500), "end": (500, 200)}


def test_digirl_demonstrations_have_four_decimals():
  # 540 of 0..1079 is 0.50046: two decimals say it; 528 of 0..2399 is 0.22009
  text = format(Action("tap", {"point": (540, 528)}, {}, "digirl"), "digirl", PIXEL)
  assert text == dual("[0.2200, 0.5000]", "[0.2200, 0.5000]")
  assert format(parse("press(BACK)", "phone", PIXEL), "digirl", PIXEL).startswith(
    '"action_type": "PRESS_BACK", "touch_point": "[-1.0, -1.0]"'
  )


def test_digirl_says_what_the_phone_grammar_says():
  """One action, two texts: the same pixels and keys."""
  for text in ("tap(0.50, 0.22)", "swipe(0.5, 0.8, 0.5, 0.2)", 'type("a \\"b\\" é\\n")', "press(ENTER)", "wait()", "finish()", "fail()"):
    action = parse(text, "phone", PIXEL)
    there = parse(format(action, "digirl", PIXEL), "digirl", PIXEL)
    assert (there.kind, there.args) == (action.kind, action.args), text
    back = format(there, "phone", PIXEL)
    assert parse(back, "phone", PIXEL).args == action.args


@pytest.mark.parametrize(
  "said, kind, args",
  [
    ({"action_type": "click", "x": 540, "y": 300}, "tap", {"point": (540, 300)}),
    ({"action_type": "long_press", "x": 0, "y": 2399}, "long_press", {"point": (0, 2399)}),
    ({"action_type": "input_text", "text": "a\n", "x": 5, "y": 6}, "type", {"point": (5, 6), "text": "a\n", "enter": True}),
    ({"action_type": "keyboard_enter"}, "press", {"key": "ENTER"}),
    ({"action_type": "status", "goal_status": "complete"}, "finish", {}),
    ({"action_type": "status", "goal_status": "infeasible"}, "fail", {}),
    ({"action_type": "open_app", "app_name": "Files"}, "open_app", {"app": "Files"}),
    # actuation.py: scroll goes from the middle to an edge, swipe from edge to edge; the last pixels are 1079 and 2399
    ({"action_type": "scroll", "direction": "down"}, "swipe", {"start": (540, 1200), "end": (540, 0)}),
    ({"action_type": "scroll", "direction": "up"}, "swipe", {"start": (540, 1200), "end": (540, 2399)}),
    ({"action_type": "scroll", "direction": "right"}, "swipe", {"start": (540, 1200), "end": (0, 1200)}),
    ({"action_type": "scroll", "direction": "left"}, "swipe", {"start": (540, 1200), "end": (1079, 1200)}),
    ({"action_type": "swipe", "direction": "down"}, "swipe", {"start": (540, 0), "end": (540, 2399)}),
    ({"action_type": "swipe", "direction": "up"}, "swipe", {"start": (540, 2399), "end": (540, 0)}),
    ({"action_type": "swipe", "direction": "left"}, "swipe", {"start": (0, 1200), "end": (1079, 1200)}),
    ({"action_type": "swipe", "direction": "right"}, "swipe", {"start": (1079, 1200), "end": (0, 1200)}),
  ],
)
def test_androidworld_actions(said, kind, args):
  got = parse(json.dumps(said), "androidworld", PIXEL)
  assert (got.kind, got.args) == (kind, args)
  bare = Action(got.kind, got.args, {}, "phone")  # nothing of the text is left
  assert json.loads(format(bare, "androidworld", PIXEL)) == said  # another reader of JSON


def test_androidworld_pixels_are_those_of_the_image_the_agent_saw():
  # shown at half size: 270 * 1080 / 540 = 540
  got = parse('{"action_type": "click", "x": 270, "y": 150}', "androidworld", PIXEL, (540, 1200))
  assert got.args == {"point": (540, 300)}
  assert isinstance(parse('{"action_type": "click", "x": 540, "y": 150}', "androidworld", PIXEL, (540, 1200)), Unreadable)


def test_no_escape_brings_a_control_character_in():
  for escape in ("\\u0000", "\\u001b", "\\ud800", "\\u0085", "\\b"):
    for text, grammar in (
      (f'{{"action_type": "answer", "text": "{escape}"}}', "androidworld"),
      (dual("[0.5, 0.5]", "[0.5, 0.5]").replace("DUAL_POINT", "TYPE").replace("0.5", "-1").replace('""', f'"{escape}"'), "digirl"),
    ):
      assert "control" in parse(text, grammar, PIXEL).reason
  assert parse('{"action_type": "answer", "text": "\\ud83d\\ude42"}', "androidworld", PIXEL).args == {"text": "🙂"}  # a whole pair


def test_flat_json_reads_what_python_writes_and_nothing_python_refuses():
  rng = random.Random(6)
  for _ in range(500):
    text = "".join(rng.choice(['"', "\\", "é", "🙂", " ", "{", "}", ":", ",", "a", "\n", "\t", "\u2028"]) for _ in range(rng.randrange(9)))
    values = {text: rng.choice([text, 7, -1.5, True, False]), "b": text}
    read = read_object(json.dumps(values, ensure_ascii=rng.random() < 0.5))
    assert read == values and json.loads(write_object(read)) == values
  for text in (
    '{"a": 1}}',
    '{"a": {"b": 1}}',
    '{"a": [1]}',
    '{"a": null}',
    '{"a": 01x}',
    "{a: 1}",
    "{'a': 1}",
    '{"a": 1,}',
    "{}",
    '{"a": "\t"}',
  ):
    with pytest.raises(Bad):
      read_object(text)
  with pytest.raises(Bad, match="given twice"):
    read_object('{"a": 1, "a": 2}')
