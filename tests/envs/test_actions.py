"""Action text: every row P1-P14 of the faults users report, with others of its kind, and the lesson's own strings.

Expected values are worked out by hand beside them. (P14, the image processor's resize, belongs to the models.)
"""

import random
import time

import pytest

from core.schema import Action, Unreadable
from envs import actions
from envs.actions import format, parse, to_model_point, to_screen_point

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


# -- the lesson's strings


def test_lesson_phone_actions():
  # 0.50 * 1919 = 959.5, a tie, to the even 960; 0.22 * 1079 = 237.38
  assert phone("tap(0.50, 0.22)").args == {"point": (960, 237)}
  assert phone('type("usb c cable")').args == {"text": "usb c cable", "enter": False}
  assert phone("press(ENTER)").args == {"key": "ENTER"}
  # 0.25 * 1919 = 479.75; 0.75 * 1079 = 809.25; 0.25 * 1079 = 269.75
  assert phone("swipe(0.25, 0.75, 0.25, 0.25)").args == {"start": (480, 809), "end": (480, 270)}
  assert [phone(t).kind for t in ("wait()", "finish()", "fail()", 'answer("4")')] == ["wait", "finish", "fail", "answer"]
  assert phone('answer("4")').args == {"text": "4"}


def test_lesson_desktop_actions():
  step = (
    "Thought: H2O is selected. The 2 must become a subscript, so I open the Format menu.\nAction: click(start_box='(863,149)')"
  )
  got = desktop(step)
  assert (got.kind, got.args) == ("click", {"point": (863, 149)})
  assert got.thought == "H2O is selected. The 2 must become a subscript, so I open the Format menu."
  record = desktop("Thought: H2O is selected ... Action: click(start_box='(863,149)')")
  assert (record.args, record.thought) == ({"point": (863, 149)}, "H2O is selected ...")
  assert desktop("hotkey(key='ctrl z')").args == {"keys": ["ctrl", "z"]}
  assert desktop("drag(start_box='(689,493)', end_box='(710,495)')").args == {"start": (689, 493), "end": (710, 495)}
  for text in (step, "hotkey(key='ctrl z')", "drag(start_box='(689,493)', end_box='(710,495)')"):
    assert format(desktop(text), "desktop", HD) == text


# -- P1, P3, P6, P10: coordinates


def test_p1_resized_numbers_live_in_the_image_the_model_saw():
  # 960 * 1920 / 1932 = 954.04; 540 * 1080 / 1092 = 534.07
  assert desktop("click(start_box='(960,540)')", model=(1932, 1092)).args == {"point": (954, 534)}
  # the last pixel of the image is 1931: 1931 * 1920 / 1932 = 1919.006; 1091 * 1080 / 1092 = 1079.01
  assert desktop("click(start_box='(1931,1091)')", model=(1932, 1092)).args == {"point": (1919, 1079)}
  refused("click(start_box='(1932,5)')", "desktop", HD, (1932, 1092))
  refused("click(start_box='(5,1092)')", "desktop", HD, (1932, 1092))
  # a small screen shown enlarged: 279 * 100 / 280 = 99.64, inside pixel 99 of 0..99; rounding alone would leave the screen
  assert desktop("click(start_box='(279,0)')", (100, 100), (280, 280)).args == {"point": (99, 0)}


def test_p1_each_mode_is_explicit_and_changes_the_click():
  text = "click(start_box='(1,1)')"
  got = {m: desktop(text, model=(1932, 1092) if m == "resized" else None, mode=m).args["point"] for m in actions.MODES}
  # resized 1 * 1920 / 1932 = 0.99; thousand 0.001 * 1919 = 1.919 and 0.001 * 1079 = 1.079
  assert got == {"pixels": (1, 1), "resized": (1, 1), "fraction": (1919, 1079), "thousand": (2, 1)}
  assert to_screen_point((500, 220), HD, mode="thousand") == (960, 237)  # as the fractions 0.50, 0.22
  assert to_screen_point((1000, 1000), HD, mode="thousand") == (1919, 1079)
  for kwargs in ({"mode": "resized"}, {"mode": "percent"}, {"mode": "pixels", "model_size": (1932, 1092)}):
    with pytest.raises(ValueError, match="mode"):
      parse(text, "desktop", HD, **kwargs)
  for size in ((0, 5), (1920.5, 1080), "big", (5,), None):
    with pytest.raises(ValueError, match="screen_size"):
      parse(text, "desktop", size)


def test_p1_rounding_is_to_nearest_and_ties_to_even():
  # 0.5 * 1365 = 682.5 -> 682; 0.5 * 1079 = 539.5 -> 540; 0.25 * 10 = 2.5 -> 2; 0.75 * 10 = 7.5 -> 8
  assert phone("tap(0.5, 0.5)", (1366, 1080)).args["point"] == (682, 540)
  assert phone("tap(0.25, 0.75)", (11, 11)).args["point"] == (2, 8)
  assert desktop("click(start_box='(10.5,11.5)')").args["point"] == (10, 12)


def test_p1_both_points_are_kept():
  got = desktop("click(start_box='(960,540)')", model=(1932, 1092))
  assert actions.aim(got) == ((960.0, 540.0), (954, 534))
  assert actions.aim(phone("swipe(0.25, 0.75, 0.25, 0.25)")) == ((0.25, 0.75), (480, 809))
  assert actions.aim(desktop("click(start_box='[100,200,300,240]')")) == ((200.0, 220.0), (200, 220))
  assert actions.aim(desktop("scroll(direction='up')")) == (None, (960, 540))
  assert actions.aim(phone("wait()")) == actions.aim(web("click [7]")) == (None, None)


def test_p3_screenshot_in_device_pixels_input_in_points():
  # scale 1.25: a 1920 x 1200 input space is screenshot as 2400 x 1500; 1200 / 1.25 = 960, 750 / 1.25 = 600
  assert actions.input_scale((2400, 1500), (1920, 1200)) == 1.25
  assert desktop("click(start_box='(1200,750)')", (1920, 1200), (2400, 1500)).args["point"] == (960, 600)
  assert actions.input_scale((2049, 1152), (1366, 768)) == 1.5
  with pytest.raises(ValueError, match="not a multiple"):
    actions.input_scale((2400, 1500), (1920, 1080))


def test_p6_fractions_end_on_the_last_pixel_and_never_clamp():
  assert phone("tap(1.0, 1)").args["point"] == (1919, 1079)
  assert phone("tap(0, 0.0)").args["point"] == (0, 0)
  for x in (
    "1.0001",
    "-0.01",
    "960",
    "nan",
    "inf",
    "-inf",
    "1e-1",
    "NaN",
    "Infinity",
    "0x1",
    "--1",
    "٠.٥",
    "١",
  ):  # Arabic digits too
    refused(f"tap({x}, 0.5)", "phone")
    refused(f"tap(0.5, {x})", "phone")
    refused(f"swipe(0.5, 0.5, {x}, 0.5)", "phone")
  for x in ("1920", "-1", "nan", "inf", "1e2", "99999999999999999999"):
    refused(f"click(start_box='({x},5)')")
    refused(f"drag(start_box='(1,1)', end_box='({x},5)')")
  refused("click(start_box='(5,1080)')")  # y has its own limit
  with pytest.raises(ValueError):
    to_screen_point((float("nan"), 0.5), HD, mode="fraction")


def test_p10_a_box_is_its_centre_x_by_width_y_by_height():
  # x (100 + 300) / 2 = 200, y (200 + 240) / 2 = 220
  assert desktop("click(start_box='[100,200,300,240]')", (1366, 768)).args["point"] == (200, 220)
  # as fractions of 1366 x 768: 0.1464 * 1365 = 199.8, 0.2865 * 767 = 219.7
  assert to_screen_point((0.1464, 0.2865), (1366, 768), mode="fraction") == (200, 220)
  # the centre is rounded once, at the end: (1 + 2) / 2 = 1.5 -> 2
  assert desktop("click(start_box='(1,1,2,2)')").args["point"] == (2, 2)
  refused("click(start_box='(300,200,100,240)')")
  refused("click(start_box='(100,200,1921,240)')")


def test_model_points_and_back():
  # 960 * 1932 / 1920 = 966 and 540 * 1092 / 1080 = 546
  assert to_model_point((960, 540), HD, (1932, 1092), mode="resized") == (966, 546)
  assert to_model_point((863, 149), HD, mode="pixels") == (863, 149)
  assert str(to_model_point((960, 237), HD, mode="fraction")[1]) == "0.22"
  rng = random.Random(0)
  for _ in range(300):
    screen = rng.randrange(1, 3000), rng.randrange(1, 3000)
    model = rng.randrange(1, 3000), rng.randrange(1, 3000)
    point = rng.randrange(screen[0]), rng.randrange(screen[1])
    for mode in actions.MODES:
      sizes = (screen, model) if mode == "resized" else (screen,)
      assert to_screen_point(to_model_point(point, *sizes, mode=mode), *sizes, mode=mode) == point
  with pytest.raises(ValueError, match="not a pixel"):
    to_model_point((1920, 5), HD, mode="pixels")


# -- P2, P4, P5, P12: what is an action, and what is not


@pytest.mark.parametrize("grammar", actions.GRAMMARS)
def test_p2_anything_else_is_unreadable_and_fast(grammar):
  texts = ["", " ", "\n", "Thought: hmm", "Action:", "Action: ", "click(start_box='=')", "click(start_box='(a,b)')", "click()"]
  texts += [
    "click", "click(", "click(,)", "(", ")", "()", "tap()", "tap(,)", "type()", "type(content=)", "do()", "[]", "click []"
  ]  # fmt: skip
  texts += [
    "Thought: x\nAction:",
    "Thought: x\nAction: none",
    "x" * 200_000,
    "click(start_box='(1,1)')" * 10_000,
    "tap(" * 50_000,
  ]
  start = time.monotonic()
  for text in texts:
    refused(text, grammar)
  for other in (None, 5, b"wait()"):
    assert isinstance(parse(other, grammar, HD), Unreadable)
  nowhere = '"[-1.0, -1.0]"'
  words = {
    "phone": 'type("")', "desktop": "type(content='')", "web": "type [1] [] [1]",
    "digirl": f'"action_type": "TYPE", "touch_point": {nowhere}, "lift_point": {nowhere}, "typed_text": ""',
    "androidworld": '{"action_type": "input_text", "x": 1, "y": 1, "text": ""}',
    "computer_13": '{"action_type": "TYPING", "text": ""}', "pyautogui": "pyautogui.write('')",
  }[grammar]  # fmt: skip
  at = len(words.split("''")[0].split('""')[0].split("[]")[0]) + 1
  longest = words[:at] + "a" * (actions.MAX_CHARS - len(words)) + words[at:]
  assert parse(longest, grammar, HD).args["text"] == "a" * (actions.MAX_CHARS - len(words))
  assert "characters" in refused(longest + " ", grammar)
  assert time.monotonic() - start < 1.0  # a generous deadline: each takes microseconds


@pytest.mark.parametrize("grammar", actions.GRAMMARS)
def test_p2_reading_is_linear_without_the_length_limit(grammar, monkeypatch):
  monkeypatch.setattr(actions, "MAX_CHARS", 10**7)
  n = 200_000
  pieces = [
    " ", "\n", "a", "(", "'", '"', "\\", "Action: ", "\nAction: ", "Action:", "] ", "] [1", "[", "#\n", "`", "+ ", ", ", "1,",
    "=", "<"
  ]  # fmt: skip
  heads = [
    "", "click(", "click(a=", "type(content='", 'type("', "tap(0.", "tap(", "Action: click(start_box='(", "hotkey(key='",
    "click(point='["
  ]  # fmt: skip
  heads += ["type [1] [", "stop [", "press [", "goto [http://", "# ", "do(action='Type', argument=\"", "Thought: "]
  heads += ['{"action_type": "', '{"', "{", '"action_type": "DUAL_POINT", "touch_point": "[', "Action Decision: "]
  heads += ["pyautogui.write('", "pyautogui.press(['a', ", "pyautogui.click(1, ", "pyautogui.click(1, 2)", "```python\n", "import time"]
  start = time.monotonic()
  for head in heads:
    for piece in pieces:
      parse(head + piece * (n // len(piece)), grammar, HD)
  assert time.monotonic() - start < 20  # 340 texts of 200k characters; one quadratic pattern alone would take minutes


@pytest.mark.parametrize("grammar", actions.GRAMMARS)
def test_p4_published_spellings_are_what_the_parser_does(grammar):
  assert len(actions.SPELLINGS[grammar]) >= 10 and len(actions.REFUSED[grammar]) >= 10
  for accepted, canonical in actions.SPELLINGS[grammar]:
    first, second = parse(accepted, grammar, HD), parse(canonical, grammar, HD)
    assert isinstance(first, Action), (accepted, first)
    assert (first.kind, first.args) == (second.kind, second.args), accepted
    assert format(first, grammar, HD) == format(second, grammar, HD) == canonical
  for text in actions.REFUSED[grammar]:
    refused(text, grammar)


def test_p4_one_click_many_spellings():
  spellings = [
    "(863,149)", "( 863 , 149 )", " (863,149) ", "[863, 149]", "<|box_start|>(863,149)<|box_end|>", "<point>863 149</point>"
  ]  # fmt: skip
  spellings += ["[862,148,864,150]", "<bbox>862 148 864 150</bbox>", "<|box_start|>(862,148,864,150)<|box_end|>"]
  for point in spellings:
    for mark in "'\"":
      assert desktop(f"Action: click(start_box={mark}{point}{mark})").args == {"point": (863, 149)}, point
      assert desktop(f"click(point={mark}{point}{mark})").args == {"point": (863, 149)}, point
  for point in (
    "", "863", "863,149", "(863;149)", "(863,149", "863,149)", "(863,149]", "(,149)", "(863,,149)", "(863,149),",
    "((863,149))"
  ):  # fmt: skip
    refused(f"click(start_box='{point}')")


def test_p5_model_text_is_data(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  evil = "'); __import__('os').system('touch pwned') #"
  for text in (f'type(content="{evil}")', f'Action: type(content="{evil}")'):
    assert desktop(text).args == {"text": evil, "enter": False}
  assert phone(f'type("{evil}")').args["text"] == evil
  assert web(f'do(action="Type", argument="{evil}", element="3")').args["text"] == evil
  for key in (
    "Return; reboot", "$(reboot)", "`reboot`", "ctrl && reboot", "enter\nreboot", "ctrl c;reboot", "a" * 500, "\u212a"
  ):  # the Kelvin sign lowers to k  # fmt: skip
    refused(f"hotkey(key='{key}')")
    refused(f"press [{key}]", "web")
  for text in (
    "click(start_box=str(open('x').read()))",
    "click(start_box='(1,1)'.upper())",
    "click(start_box='(1+1,1)')",
    "click(**{})",
  ):
    refused(text)
  for text in (
    "tap(1/2, 0.5)", "tap(__import__('os'), 0.5)", 'type("a" "b")', 'type("a" + "b")', 'type(f"a")', 'type(b"a")',
    'type("""a""")'
  ):  # fmt: skip
    refused(text, "phone")
  for url in ("javascript:alert(1)", "file:///etc/passwd", "data:text/html,x", "//host", "http://a b", "chrome://crash"):
    refused(f"goto [{url}]", "web")
  assert list(tmp_path.iterdir()) == []


def test_p7_text_inside_quotes_is_never_cut_or_rewritten():
  tricky = [
    "The Action: go", "a\nAction: wait()", "f(x)\n\ny", "point=5", "<point>1 2</point>", "start_box='(1,1)'", "<|box_start|>"
  ]  # fmt: skip
  tricky += ["Thought: x\nAction: click(start_box='(1,1)')", "')", "wait()", "\\n", "Action：", "]", "] [1]", "```"]
  for text in tricky:
    for head in ("", "Action: ", "Thought: typing Action\nAction: ", "Thought: typing. Action: "):
      raw = text.replace("\\", "\\\\").replace("'", "\\'")  # newlines stay raw
      assert desktop(f"{head}type(content='{raw}')").args == {"text": text, "enter": False}, (head, text)
    assert desktop(f'finished(content="{text}")').args == {"text": text if text != "\\n" else "\n"}


def test_p12_exactly_one_action():
  one, two = "click(start_box='(1,1)')", "click(start_box='(2,2)')"
  for text in (
    f"Action: {one}\n\n{two}", f"Action: {one}\nAction: {two}", f"{one}\n{two}", f"{one} {two}", f"{one};{two}",
    f"{one}, {two}"
  ):  # fmt: skip
    refused(text)
  for text in (
    f"Action: {one} done",
    f"{one} # first",
    f"Action: {one}\nThought: next",
    f"Action: {one}Action: {two}",
    f"Action: x\nAction: {one}",
  ):
    refused(text)
  for text in (
    f"Thought: {one}",
    f"Thought: press it\n{one}",
    f"{one}\nThought: I clicked",
    "Action_Summary: wait()",
    "action: wait()",
  ):
    refused(text)
  # what stands before the marker is a thought, whatever it looks like
  for thought in (
    f"I could {one} or wait().",
    "the ReAction: what now",
    f"{two}",
    "my next Action: is to click",
    "Action_Summary: done",
    "Thought: Thought:",
  ):
    got = desktop(f"Thought: {thought}\nAction: {one}")
    assert (got.args, got.thought) == ({"point": (1, 1)}, thought)
  for text in ("Thought: the ReAction: now Action: wait()", "Thought：the ReAction: now Action：wait()"):
    assert (desktop(text).kind, desktop(text).thought) == ("wait", "the ReAction: now")
  for text in (
    "tap(0.1, 0.1)\ntap(0.2, 0.2)",
    "tap(0.1, 0.1) tap(0.2, 0.2)",
    "Action: wait()",
    "I tap. tap(0.1, 0.1)",
    "wait();",
  ):
    refused(text, "phone")
  for text in (
    'do(action="Wait")\ndo(action="Wait")',
    '# a\ndo(action="Wait")\n# b',
    "click [1] click [2]",
    "type [1] [two\nlines] [1]",
    "stop [two\nlines]",
    "type [1] [a] [1] click [2] [1]",
  ):
    refused(text, "web")
