"""Action text, continued: typed text, keys, the web grammar, and `format`, the parser's inverse. See test_actions.py."""

import json
import pickle
import random

import gymnasium as gym
import pytest

from core.schema import Action, Unreadable
from envs import actions
from envs.actions import format, parse
from envs.grammars import keys

HD = (1920, 1080)


def desktop(text, screen=HD, model=None, **kw) -> Action:
  action = parse(text, "desktop", screen, model, **kw)
  assert isinstance(action, Action), action
  return action


def phone(text, screen=HD) -> Action:
  action = parse(text, "phone", screen)
  assert isinstance(action, Action), action
  return action


def web(text) -> Action:
  action = parse(text, "web", HD)
  assert isinstance(action, Action), action
  return action


def refused(text, grammar="desktop", *sizes, **kw) -> str:
  got = parse(text, grammar, *(sizes or (HD,)), **kw)
  assert isinstance(got, Unreadable), got
  assert got.reason and "\n" not in got.reason and len(got.reason) < 200
  return got.reason


# -- P8, P9: typed text


@pytest.mark.parametrize(
  "content, text, enter",
  [
    ("python main\\n", "python main", True),  # the newline goes, and no other letter of "main\n"
    ("python main\n", "python main", True),  # raw
    ("a\\n\\n", "a\n", True),  # exactly one
    ("a\\nb", "a\nb", False),
    ("\\n", "", True),
    ("", "", False),
    ("a\\\\n", "a\\n", False),  # a backslash and an n
    ("a\\n ", "a\n ", False),
    ("n", "n", False),
  ],
)
def test_p8_a_last_newline_is_one_enter(content, text, enter):
  assert desktop(f"type(content='{content}')").args == {"text": text, "enter": enter}
  assert phone(f'type("{content}")').args == {"text": text, "enter": enter}
  assert web(f'do(action="Type", argument="{content}", element="5")').args == {"element": "5", "text": text, "enter": enter}


def test_p9_escapes():
  assert desktop(r"""type(content='it\'s "x"')""").args["text"] == """it's "x\""""
  assert desktop(r"type(content='a\tb')").args["text"] == "a\tb"
  assert desktop(r"type(content='C:\dir\\new \d+ \u0041')").args["text"] == r"C:\dir\new \d+ \u0041"  # unknown escapes stay
  assert desktop("type(content='a\\\nb')").args["text"] == "a\\\nb"  # a backslash before a raw newline is itself, too
  assert phone('type("naïve 你好 🙂 e\u0301 \u00a0")').args["text"] == "naïve 你好 🙂 e\u0301 \u00a0"
  for text in ("a\x00b", "a\rb", "a\x1bb", "\ud800", "a\x85b"):
    assert "control" in refused(f"type(content='{text}')")


def some_text(rng: random.Random) -> str:
  pieces = [
    "'", '"', "\\", "\n", "\t", " ", "\\n", "\\'", "a", "Z", "0", "é", "你", "🙂", "\u00a0", "\u2028", "Action: ", "Thought: "
  ]  # fmt: skip
  pieces += [
    "')", '")', ")\n\n", "] [1]", "]", "[", "```", "<point>1 2</point>", "point=", "# ", "{0}", "%s", "$(x)", "&;|<>",
    "click [1]"
  ]  # fmt: skip
  return "".join(rng.choice(pieces + [chr(rng.randrange(32, 127))]) for _ in range(rng.randrange(12)))


@pytest.mark.parametrize("grammar", actions.GRAMMARS)
def test_p9_any_text_survives_format_and_parse(grammar):
  rng = random.Random(3)
  for _ in range(1500):
    text = some_text(rng)
    args = {"text": text.removesuffix("\n"), "enter": text.endswith("\n")} | ({"element": "7"} if grammar == "web" else {})
    if grammar == "androidworld":  # its input_text taps first, and always presses ENTER
      args = {"text": text or "a", "enter": True, "point": (5, 7)}
    end = {"desktop": "finished", "web": "stop", "digirl": None, "computer_13": None, "pyautogui": None}.get(grammar, "answer")
    for action in (Action("type", args, {}, grammar), *([Action(end, {"text": text}, {}, grammar)] if end else [])):
      written = format(action, grammar, HD)
      got = parse(written, grammar, HD)
      assert (got.kind, got.args) == (action.kind, action.args), written
      assert format(got, grammar, HD) == written


def test_p9_python_writes_the_same_literals():
  rng = random.Random(4)
  for _ in range(1500):
    text = "".join(c for c in some_text(rng) if c.isprintable() or c in "\n\t")
    assert desktop(f"finished(content={text!r})").args["text"] == text  # repr is an independent writer of quotes and escapes


def test_p9_thoughts_survive_or_are_refused_by_name():
  rng = random.Random(5)
  for grammar, call in (("desktop", "click(start_box='(1,1)')"), ("web", 'do(action="Wait")'), ("web", "click [7]")):
    kept = 0
    for _ in range(500):
      thought = some_text(rng).strip(" \t\n")
      action = parse(call, grammar, HD)
      action = Action(action.kind, action.args, {k: v for k, v in action.model_args.items() if k != "bare"}, grammar, thought)
      try:
        written = format(action, grammar, HD)
      except ValueError:
        assert grammar == "desktop" and ("Action:" in thought or thought.startswith("Thought:"))
        continue
      got = parse(written, grammar, HD)
      assert (got.args, got.thought, format(got, grammar, HD)) == (action.args, thought, written)
      kept += 1
    assert kept > 250


# -- P11, P13: keys and scrolling


@pytest.mark.parametrize(
  "written, wanted",
  [
    ("ctrl z", "ctrl z"),
    ("ctrl+z", "ctrl z"),
    ("Ctrl Z", "ctrl z"),
    ("CTRL + Z", "ctrl z"),
    ("  ctrl   z ", "ctrl z"),
    ("control-z", None),
    ("ctrl arrowleft", "ctrl left"),
    ("ArrowDown", "down"),
    ("ctrl shift t", "ctrl shift t"),
    ("cmd space", "super space"),
    ("win", "super"),
    ("Meta+A", "super a"),
    ("esc", "escape"),
    ("del", "delete"),
    ("pgdn", "pagedown"),
    ("PageUp", "pageup"),
    ("Return", "enter"),
    ("alt f4", "alt f4"),
    ("f13", None),
    ("ctrl +", "ctrl +"),
    ("ctrl++", "ctrl +"),
    ("ctrl + +", "ctrl +"),
    ("+", "+"),
    ("ctrl -", "ctrl -"),
    ("ctrl+", None),
    ("+ctrl", None),
    ("ctrl++z", None),
    ("", None),
    ("  ", None),
    ("ctrl ctrl", None),
    ("cmd win", None),
    ("a b c d e f", None),
    ("ctrl hyper", None),
    ("ctrlz", None),
  ],
)
def test_p11_keys(written, wanted):
  got = parse(f"hotkey(key='{written}')", "desktop", HD)
  if wanted is None:
    assert isinstance(got, Unreadable)
  else:
    assert got.args == {"keys": wanted.split()}
    assert format(got, "desktop", HD) == f"hotkey(key='{written}')"  # as written


def test_p11_every_key_has_one_canonical_name():
  others = [name for names in keys.ALIASES.values() for name in names]
  assert len(set(others)) == len(others) and not set(others) & set(keys.KEYS) and len(set(keys.KEYS)) == len(keys.KEYS)
  for key in keys.KEYS:
    text = format(Action("hotkey", {"keys": ["ctrl", key] if key != "ctrl" else [key]}, {}, "desktop"), "desktop", HD)
    assert desktop(text).args["keys"][-1] == key


def test_p13_scrolling():
  assert desktop("scroll(direction='right', start_box='(500,500)')").args == {"point": (500, 500), "direction": "right"}
  for direction in ("up", "down", "left", "right"):
    got = desktop(f"scroll(start_box='(500,500)', direction='{direction}')", model=(1932, 1092))
    # 500 * 1920 / 1932 = 496.9; 500 * 1080 / 1092 = 494.505
    assert got.args == {"point": (497, 495), "direction": direction}
    assert desktop(f"scroll(direction='{direction}')", (1366, 768)).args == {"point": (683, 384), "direction": direction}
    assert web(f"scroll [{direction}]").args == web(f'do(action="Scroll {direction.title()}")').args == {"direction": direction}
  for direction in ("", "sideways", "Down", "down ", "down or up or right or left"):
    refused(f"scroll(start_box='(500,500)', direction='{direction}')")
  refused("scroll(start_box='', direction='up')")  # an empty point is not a missing one


# -- the web grammar


def test_web_actions_in_both_spellings():
  pairs = [
    ("click [7]", 'do(action="Click", element="7")', "click", {"element": "7"}),
    ("hover [7]", 'do(action="Hover", element="7")', "hover", {"element": "7"}),
    (
      "type [7] [red mug] [0]",
      'do(action="Type", argument="red mug", element="7")',
      "type",
      {"element": "7", "text": "red mug", "enter": False},
    ),
    (
      "type [7] [red mug] [1]",
      'do(action="Search", argument="red mug", element="7")',
      "type",
      {"element": "7", "text": "red mug", "enter": True},
    ),
    (
      "type [7] [red mug]",
      'do(action="Type", argument="red mug\\n", element="7")',
      "type",
      {"element": "7", "text": "red mug", "enter": True},
    ),
    ("press [Enter]", 'do(action="Press Enter")', "press", {"keys": ["enter"]}),
    ("tab_focus [1]", 'do(action="Switch Tab", argument="1")', "tab_focus", {"tab": 1}),
    ("go_back", "go_backward()", "go_back", {}),
    ("go_forward", 'do(action="Go Forward")', "go_forward", {}),
    ("stop [N/A]", 'exit(message="N/A")', "stop", {"text": "N/A"}),
    ("stop []", "exit()", "stop", {"text": ""}),
  ]
  for brackets, call, kind, args in pairs:
    for text in (brackets, call):
      got = web(text)
      assert (got.kind, got.args) == (kind, args), text
      assert format(got, "web", HD) == text
  assert web('do(action="Select Dropdown Option", argument="Month", element="20")').args == {"element": "20", "option": "Month"}
  assert web("goto [https://a.test/b?c=d#e]").args == {"url": "https://a.test/b?c=d#e"}
  assert web("type [7] [a [b] c] [1]").args["text"] == "a [b] c"
  assert web("stop [4 [of 5]]").args["text"] == "4 [of 5]"


def test_web_thoughts():
  comment = '# Element: the search bar\n# Note: 2 left\ndo(action="Search", argument="x # y", element="13")'
  assert web(comment).thought == "Element: the search bar\nNote: 2 left"
  assert format(web(comment), "web", HD) == comment
  fenced = "Let's think. In summary, the next action I will perform is ```type [5] [```] [1]```"
  assert web(fenced).thought == "Let's think. In summary, the next action I will perform is"
  assert web(fenced).args == {"element": "5", "text": "```", "enter": True}
  assert format(web(fenced), "web", HD) == fenced
  assert web("type the query ```click [1]```").args == {"element": "1"}  # a thought that begins like an action


# -- format, records, constants


def test_canonical_text_comes_back():
  texts = {
    "phone": [
      "tap(0.50, 0.22)",
      "tap(0.5, 1)",
      "tap(0.1234, 0.500)",
      'type("say \\"hi\\" \\\\ \\n")',
      "swipe(0.1, 0.2, 0.3, 0.40)",
      "press(BACK)",
    ],
    "desktop": [
      "Thought: a\nb\nAction: click(start_box='(10,20.50)')",
      "Action: wait()",
      "scroll(start_box='(1,2)', direction='up')",
      "fail()",
    ],
    "web": ["hover [3]", 'do(element="3", action="Hover")', "new_tab", "close_tab", 'do(action="Wait")', "press [Meta+a]"],
  }
  for grammar, rows in texts.items():
    for text in rows:
      assert format(parse(text, grammar, (1080, 2400)), grammar, (1080, 2400)) == text


def test_numbers_are_derived_only_where_the_written_ones_no_longer_fit():
  got = desktop("click(start_box='(966,546)')", model=(1932, 1092))  # pixel (960, 540)
  assert format(got, "desktop", HD, (1932, 1092)) == "click(start_box='(966,546)')"
  assert format(got, "desktop", HD) == "Action: click(start_box='(960,540)')"  # shown unresized
  assert format(Action("tap", {"point": (960, 237)}, {}, "phone"), "phone", HD) == "tap(0.50, 0.22)"
  assert format(Action("click", {"point": [863, 149]}, {}, "desktop"), "desktop", HD) == "Action: click(start_box='(863,149)')"
  assert (
    format(Action("type", {"element": "3", "text": "a] [1]"}, {}, "web"), "web", HD)
    == 'do(action="Type", argument="a] [1]", element="3")'
  )
  # written words that contradict the kind lose
  assert format(Action("go_back", {}, {"call": "go_forward"}, "web"), "web", HD) == 'do(action="Go Backward")'
  typing = Action("type", {"text": 'it\'s\t"1"\\', "enter": True}, {}, "desktop")
  assert format(typing, "desktop", HD) == "Action: type(content='it\\'s\\t\"1\"\\\\\\n')"
  assert format(Action("press", {"keys": ["ctrl", "v"]}, {}, "web"), "web", HD) == "press [ctrl+v]"


def test_format_refuses_what_the_grammar_cannot_say():
  for action, grammar, told in (
    (Action("tap", {"point": (1, 1)}, {}, "phone"), "desktop", "no action 'tap'"),
    (Action("click", {"point": (1920, 1)}, {}, "desktop"), "desktop", "not a pixel"),
    (Action("click", {}, {}, "desktop"), "desktop", "missing"),
    (Action("type", {"text": "a\n", "enter": False}, {}, "desktop"), "desktop", "another action"),
    (Action("type", {"text": "a\x00", "enter": False}, {}, "desktop"), "desktop", "control"),
    (Action("hotkey", {"keys": ["ctrl", "reboot"]}, {}, "desktop"), "desktop", "unknown key"),
    (Action("wait", {}, {}, "desktop", "a\nAction: fail()"), "desktop", "more than one action|text after"),
    (Action("wait", {}, {}, "phone", "hm"), "phone", "thought"),
    (Action("goto", {"url": "javascript:x"}, {}, "web"), "web", "goto")
  ):  # fmt: skip
    with pytest.raises(ValueError, match=told):
      format(action, grammar, HD)
  with pytest.raises(ValueError, match="did you mean 'desktop'"):
    parse("wait()", "desktp", HD)


def test_actions_travel():
  got = desktop("Thought: x\nAction: click(start_box='(863.50,149)')")
  there = pickle.loads(pickle.dumps(got))
  assert there == got and format(there, "desktop", HD) == "Thought: x\nAction: click(start_box='(863.50,149)')"
  record = json.loads(json.dumps({"args": got.args, "model_args": got.model_args}))
  assert record == {"args": {"point": [864, 149]}, "model_args": {"start_box": [863.5, 149.0]}}  # 863.5: a tie, to the even 864


def test_kinds_and_ends():
  assert actions.KINDS["phone"] == ("tap", "swipe", "type", "press", "wait", "finish", "fail", "answer")
  wanted = {"click", "left_double", "right_single", "drag", "hotkey", "type", "scroll", "wait", "finished", "fail", "call_user"}
  assert set(actions.KINDS["desktop"]) == wanted
  assert actions.ENDS == {"finish", "finished", "fail", "answer", "call_user", "stop"}
  for grammar, rows in actions.SPELLINGS.items():
    seen = {parse(text, grammar, HD).kind for text, _ in rows}
    assert seen <= set(actions.KINDS[grammar])


def test_e23_charset():
  space = gym.spaces.Text(min_length=0, max_length=actions.MAX_CHARS, charset=actions.CHARSET)
  for text in (
    "click(start_box='(863,149)')", "a b", "a(1)", "", 'Thought: é\nAction: type(content="\\t")', "x" * actions.MAX_CHARS
  ):  # fmt: skip
    assert space.contains(text) and actions.readable(text)
  for text in ("x" * (actions.MAX_CHARS + 1), "\x00", "\r"):
    assert not space.contains(text) and not actions.readable(text)
  assert all(actions.readable(c) for c in actions.CHARSET)
  assert actions.readable("你好 🙂")  # more than the charset lists
