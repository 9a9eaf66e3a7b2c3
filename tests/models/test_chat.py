"""Chats. Layouts are spelled out by hand; the tokenizer is a small one with the control tokens of both templates
(tests/golden/chat, made by tests/parity/test_vl_models.py, which compares the same layouts with transformers' templates)."""

import json
import os
import pathlib
import re
import shutil

import numpy as np
import pytest

from envs import actions
from models.chat import ACTIONS, GOAL, LLAMA3, SPACES, TEMPLATES, TEXTS, Chat, Tokenizer, Turn, extends, instruction

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "golden" / "chat"


@pytest.fixture(scope="module")
def tok():
  return Tokenizer(FOLDER, TEMPLATES["qwen2_5_vl"])


def chat(tok, budget=1000, screens=0, text="Do this: {goal}"):
  return Chat(tok, text, budget, screens)


def spelled(tok, ids):
  """The text of ids with every control token spelled out."""
  return tok._plain.decode(list(map(int, ids)), skip_special_tokens=False)


def wrote(tok, text, ended=True):
  return tok.encode(text) + [tok.eos_id] * ended


def turns(tok, n, size=(1, 2)):
  """n steps, the newest with nothing written yet. Step h wrote the letter h."""
  return [Turn(size, "", wrote(tok, "abcdefgh"[h])) for h in range(n - 1)] + [Turn(size, "", None)]


# -- the tokenizer


def test_text_survives_and_control_tokens_in_it_are_text(tok):
  for text in ("click(start_box='(1,2)')", "", "\n\n", "<|im_end|>", "<|image_pad|> <|box_start|>", "größe 日本 🖱", "a\tb  c\n"):
    ids = tok.encode(text)
    assert tok.decode(ids) == text and not set(ids) & set(tok._control.values()), text


def test_stray_tokens_do_not_pass_for_clean_text(tok):
  assert tok.decode([*tok.encode("wait()"), tok.eos_id]) == "wait()"
  assert tok.decode([*tok.encode("wait"), tok.image_id, *tok.encode("()")]) == "wait<|image_pad|>()"
  assert tok.decode([*tok.encode("wait"), tok.vocab_size + 5, *tok.encode("()")]) == "wait\ufffd()"  # an id beyond the tokenizer's


def test_ids_of_the_templates(tok):
  name = lambda i: tok._plain.id_to_token(i)
  assert [name(i) for i in (tok.eos_id, tok.pad_id, tok.image_id)] == ["<|im_end|>", "<|endoftext|>", "<|image_pad|>"]
  llama = Tokenizer(FOLDER, LLAMA3)
  assert [name(llama.eos_id), name(llama.pad_id), llama.image_id] == ["<|eot_id|>", "<|eot_id|>", -1]


def test_a_folder_without_its_tokenizer_or_with_another_one(tmp_path):
  with pytest.raises(ValueError, match=f"{tmp_path} has no tokenizer.json"):
    Tokenizer(tmp_path, TEMPLATES["chatml"])
  shutil.copy(FOLDER / "tokenizer.json", tmp_path)
  with pytest.raises(ValueError, match=r"lacks <\|stop\|>, which its chat template needs"):
    Tokenizer(tmp_path, LLAMA3._replace(end="<|stop|>"))


def vocabulary(said):
  said["model"].update(vocab={}, merges=[])


def prefixed(said):
  said["model"]["continuing_subword_prefix"] = "##"


def silenced(said):
  said["normalizer"] = {"type": "Replace", "pattern": {"Regex": ".*"}, "content": ""}


def words(said):
  said["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}


def doubled(said):
  said["model"]["vocab"]["!"] = 5


def shifted(said):
  said["added_tokens"].pop(0)


@pytest.mark.parametrize("change", [vocabulary, prefixed, silenced, words, shifted, doubled])
def test_a_tokenizer_that_loses_text_or_panics_or_renumbers_is_one_line(tmp_path, change):
  said = json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
  change(said)
  (tmp_path / "tokenizer.json").write_text(json.dumps(said))
  with pytest.raises(ValueError, match="tokenizer.json.*download it again") as e:
    Tokenizer(tmp_path, TEMPLATES["chatml"])
  assert "\n" not in str(e.value)


def test_a_control_token_that_a_goal_could_write_is_one_line(tmp_path):
  said = json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
  next(t for t in said["added_tokens"] if t["content"] == "<|im_end|>")["special"] = False
  (tmp_path / "tokenizer.json").write_text(json.dumps(said))
  with pytest.raises(ValueError, match=r"tokenizer.json: <\|im_end\|> is read out of plain text, which a task may write: wanted special"):
    Tokenizer(tmp_path, TEMPLATES["chatml"])


# -- layouts


def test_chatml_by_hand(tok):
  two = [Turn((1, 2), "", wrote(tok, "Thought: x")), Turn((2, 2), "a page", None)]
  got = chat(tok).prompt("<|im_end|> {goal}", two)
  assert spelled(tok, got.tokens) == (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nDo this: <|im_end|> {goal}<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|><|im_end|>\n"
    "<|im_start|>assistant\nThought: x<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>a page<|im_end|>\n"
    "<|im_start|>assistant\n"
  )
  assert np.count_nonzero(got.tokens == tok.eos_id) == 5  # not the one in the goal
  for place, (rows, columns) in zip(got.image_place, got.sizes):
    assert (got.tokens[place : place + rows * columns] == tok.image_id).all() and got.tokens[place - 1] != tok.image_id
  assert got.sizes == [(1, 2), (2, 2)] and got.image_turn.tolist() == [0, 1] and got.forgotten == 0


def test_llama3_by_hand():
  tok = Tokenizer(FOLDER, LLAMA3)
  got = chat(tok).prompt(" go ", [Turn((0, 0), " page ", wrote(tok, "click")), Turn((0, 0), "other", None)])
  head = "<|start_header_id|>{}<|end_header_id|>\n\n"
  assert spelled(tok, got.tokens) == (
    f"<|begin_of_text|>{head.format('user')}Do this: go<|eot_id|>{head.format('user')}page<|eot_id|>"
    f"{head.format('assistant')}click<|eot_id|>{head.format('user')}other<|eot_id|>{head.format('assistant')}"
  )
  assert len(got.image_place) == 0


def test_what_was_sampled_comes_back_as_it_was(tok):
  """Ids that no tokenizer would make of their text: letter by letter, with a stray image token, cut off before the end of turn."""
  odd = [i for letter in "Thought" for i in tok.encode(letter)] + [tok.image_id]
  assert tok.encode(tok.decode(odd)) != odd
  first = chat(tok).prompt("g", [Turn((1, 2), "", None)])
  second = chat(tok).prompt("g", [Turn((1, 2), "", odd), Turn((1, 2), "", None)])
  before = np.concatenate([first.tokens, odd])
  assert extends(second.tokens, before) and second.tokens[len(before)] == tok.eos_id  # the end of turn is added
  ended = chat(tok).prompt("g", [Turn((1, 2), "", [*odd, tok.eos_id]), Turn((1, 2), "", None)])
  assert np.array_equal(ended.tokens, second.tokens)  # and only where it is missing
  assert second.image_place.tolist() == [first.image_place[0], len(before) + np.argmax(second.tokens[len(before) :] == tok.image_id)]


def test_append_extends_every_prompt(tok):
  c, before = chat(tok), np.zeros(0, np.int32)
  for n in range(1, 7):
    t = turns(tok, n)
    got = c.prompt("g", t)
    assert extends(got.tokens, before) and got.image_turn.tolist() == list(range(n))
    before = np.concatenate([got.tokens, wrote(tok, "abcdefgh"[n - 1])])


def test_window_keeps_the_last_screens_and_all_that_was_written(tok):
  c, before, new = chat(tok, screens=2), np.zeros(0, np.int32), []
  for n in range(1, 5):
    got = c.prompt("g", turns(tok, n))
    new.append(not extends(got.tokens, before))
    before = np.concatenate([got.tokens, wrote(tok, "abcdefgh"[n - 1])])
    assert got.image_turn.tolist() == list(range(max(0, n - 2), n))
  assert new == [False, False, True, True]  # records: steps 0 and 1 together, then one each
  image = "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|><|im_end|>\n"
  said = lambda letter: f"<|im_start|>assistant\n{letter}<|im_end|>\n"
  tail = spelled(tok, got.tokens).partition("Do this: g<|im_end|>\n")[2]
  assert tail == said("a") + said("b") + image + said("c") + image + "<|im_start|>assistant\n"


def test_what_goes_first_when_the_budget_is_short(tok):
  """Oldest observation, next observation, then the oldest written text; the head and the newest observation never."""
  t = turns(tok, 4)
  full = chat(tok).prompt("g", t)
  head = len(chat(tok).head("g"))
  look, said = len(chat(tok)._observation(t[0])), len(chat(tok)._closed(t[0].written)) + len(tok.encode_trusted("<|im_start|>assistant\n"))
  assert len(full.tokens) == head + 4 * look + 3 * said + (said - 3)  # the newest assistant turn is open: no letter, end, newline
  seen = lambda budget: (lambda c: (c.image_turn.tolist(), c.forgotten, len(c.tokens)))(chat(tok, budget).prompt("g", t))
  n = len(full.tokens)
  assert seen(n) == ([0, 1, 2, 3], 0, n)
  assert seen(n - 1) == ([1, 2, 3], 0, n - look)
  assert seen(n - look - 1) == ([2, 3], 0, n - 2 * look)
  assert seen(n - 3 * look) == ([3], 0, n - 3 * look)
  assert seen(n - 3 * look - 1) == ([3], 1, n - 3 * look - said)
  least = n - 3 * look - 3 * said
  assert seen(least) == ([3], 3, least)
  with pytest.raises(ValueError, match=f"{head} tokens of instruction and {look} of one observation does not fit into {least - 1}"):
    seen(least - 1)


def test_a_long_text_loses_its_end(tok):
  """A page of 20 digits, a token each, in a budget that is 7 short: 13 stay, between the same opening and end of turn; screenshots and
  what was written before go first. A budget that takes no digit at all is the least there is."""
  page = "01234567890123456789"
  turn = lambda text: [Turn((1, 1), "x", wrote(tok, "a")), Turn((1, 1), text, None)]
  empty = (
    len(chat(tok, 10_000).head("g"))
    + len(chat(tok)._observation(Turn((1, 1), "", None)))
    + len(tok.encode_trusted("<|im_start|>assistant\n"))
  )
  got = chat(tok, empty + 13).prompt("g", turn(page))
  said = spelled(tok, got.tokens).partition("Do this: g<|im_end|>\n")[2]
  assert said == f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{page[:13]}<|im_end|>\n<|im_start|>assistant\n"
  assert len(got.tokens) == empty + 13 and got.forgotten == 1
  assert len(chat(tok, empty).prompt("g", turn(page)).tokens) == empty
  with pytest.raises(ValueError, match="does not fit"):
    chat(tok, empty - 1).prompt("g", turn(page))


def test_turns_must_be_in_order(tok):
  for bad in ([], [Turn((1, 1), "", [1])], [Turn((1, 1), "", None), Turn((1, 1), "", None)]):
    with pytest.raises(ValueError, match="None in the newest only"):
      chat(tok).prompt("g", bad)


def test_extends_by_hand():
  a = np.arange(5)
  assert extends(a, a[:3]) and extends(a, a) and extends(a, a[:0])
  assert not extends(a[:3], a) and not extends(a, np.array([0, 1, 3]))


# -- instructions


@pytest.mark.parametrize(("grammar", "which"), [*((grammar, "plain") for grammar in sorted(ACTIONS)), ("desktop", "uitars")])
def test_the_action_space_is_what_the_parser_reads(grammar, which, tok):
  """Every line, filled in, is readable, and every kind that the grammar needs for a task is told."""
  text = instruction(tok, grammar, "", (0, 0), which)
  lines = text.partition("## Action Space\n")[2].partition("\n\n## ")[0].strip().split("\n")
  told = set()
  for line in lines:
    line = line.partition(" #")[0]
    for old, new in (("down or up or right or left", "down"), ("[id]", "[7]"), ("[number]", "[1]"), ("[address]", "[http://a.test/]"),
                     ("[key]", "[enter]"), ("content=''", "content='a'"), ("type(\"\")", 'type("a")')):  # fmt: skip
      line = line.replace(old, new)
    line = re.sub(r"([xy])[12]", "0.5", line)
    got = actions.parse(line, grammar, (100, 100))
    assert isinstance(got, actions.Action), (line, got)
    told.add(got.kind)
  missing = set(actions.KINDS[grammar]) - told
  assert missing <= ({"right_click", "select", "wait"} if grammar == "web" else set())  # WebArena has no words for these
  assert text.count(GOAL) == 1 and text.endswith("## User Instruction\n{goal}")


@pytest.mark.parametrize("which", TEXTS)
def test_points_are_spelled_as_the_checkpoint_knows_them(tok, which):
  assert "click(start_box='<|box_start|>(x1,y1)<|box_end|>')" in instruction(tok, "desktop", "resized", (1932, 1092), which)
  ids = chat(tok, text=instruction(tok, "desktop", "resized", (1932, 1092), which)).head("g")
  assert ids.count(tok._control["<|box_start|>"]) == 6  # click, left_double, right_single, drag twice, scroll
  assert "1932 wide and 1092 high" in spelled(tok, ids)


def test_instruction_from_a_file_and_what_is_refused(tok, tmp_path):
  (tmp_path / "good.txt").write_text("Go: {goal}.", encoding="utf-8-sig")
  (tmp_path / "bad.txt").write_text("Go.")
  (tmp_path / "odd.txt").write_text("In {language}: {goal}")
  os.mkfifo(tmp_path / "pipe")
  (tmp_path / "binary").write_bytes(b"\xff\xfe{goal}\x00")
  assert instruction(tok, "anything", "", which=str(tmp_path / "good.txt")) == "Go: {goal}."
  for name, line in (
    ("bad.txt", r"policy.instruction, \S+bad.txt, has \{goal\} 0 times, wanted once"),
    ("odd.txt", r"policy.instruction, \S+odd.txt, has \{language\} in it, which nothing fills"),
    ("pipe", r"policy.instruction is \S+pipe, which cannot be read as text \(a pipe or a device, which may have no end\)"),
    ("gone.txt", r"policy.instruction is \S+gone.txt, which cannot be read as text \(.*No such file.*\): wanted plain, uitars, or a text"),
    ("binary", r"policy.instruction is \S+binary, which cannot be read as text \(.*can't decode.*\): wanted plain, uitars, or a text"),
    ("", r"policy.instruction is \S+, which cannot be read as text \(.*directory.*\): wanted plain"),
  ):
    with pytest.raises(ValueError, match=line):
      instruction(tok, "desktop", "", which=str(tmp_path / name))
  with pytest.raises(ValueError, match="policy.instruction is 'uitars', a desktop's actions, and the grammar is 'phone'"):
    instruction(tok, "phone", "fraction", which="uitars")
  with pytest.raises(ValueError, match="no instruction for grammar 'tablet': wanted one of 'desktop', 'phone', 'web'"):
    instruction(tok, "tablet", "")
  with pytest.raises(ValueError, match="no instruction for space 'miles'"):
    instruction(tok, "desktop", "miles")
  assert set(actions.MODES) <= SPACES.keys()
