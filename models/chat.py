"""Text and screenshots into token ids: the checkpoint's tokenizer, two chat templates, and a context that grows turn by turn.

What the policy wrote goes back into the context as the ids it sampled; only text of ours and of the task is ever tokenised,
each piece once. A goal that spells a control token stays plain text: control tokens come from the templates alone.

Layout: system · the instruction with the goal · then for every step its observation (screenshot, text) and what was written.
"append" keeps every observation, so a step's prompt extends the last one and an episode is one record. "window" keeps the
last `screens` observations and the text written before them; once one is dropped the prompt is a new record (`extends`).

What goes when a prompt is over its budget, in either mode: the oldest observation, then the next, until only the newest is
left; then the oldest written text, and so on; then the end of the newest observation's text. System, instruction and the newest
screenshot never go: ValueError instead.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import ml_collections
import numpy as np
import tokenizers

from models.config import ModelConfig


class Template(NamedTuple):
  """How a chat is spelled. Every field but strip and system is a text in which control tokens are spelled out; open takes {role}.

  end: the token that ends a turn, which the policy writes; after: what follows it; strip: texts lose outer whitespace; system:
  what an unasked model was trained to see first, "" = nothing.
  """

  begin: str
  open: str
  end: str
  after: str
  pad: tuple[str, ...]
  image: tuple[str, str, str] | None
  strip: bool
  system: str


CHATML = Template(
  begin="", open="<|im_start|>{role}\n", end="<|im_end|>", after="\n", pad=("<|endoftext|>", "<|im_end|>"),
  image=("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"), strip=False, system="",
)  # fmt: skip
LLAMA3 = Template(
  begin="<|begin_of_text|>", open="<|start_header_id|>{role}<|end_header_id|>\n\n", end="<|eot_id|>", after="",
  pad=("<|finetune_right_pad_id|>", "<|eot_id|>"), image=None, strip=True, system="",
)  # fmt: skip
TEMPLATES = {
  "chatml": CHATML,  # Qwen2.5, Qwen3, Qwen3-VL
  "qwen2_5_vl": CHATML._replace(system="You are a helpful assistant."),  # and UI-TARS-1.5
  "smollm2": CHATML._replace(system="You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
  "llama3": LLAMA3,
}

# What a policy may write, as envs/grammars reads it. POINT has the control tokens UI-TARS was trained with, where the tokenizer has them.
POINT = "<|box_start|>({x},{y})<|box_end|>"
DESKTOP = """\
click(start_box='{p1}')
left_double(start_box='{p1}')
right_single(start_box='{p1}')
drag(start_box='{p1}', end_box='{p2}')
hotkey(key='ctrl c')
type(content='') # a newline at the end, written \\n, presses ENTER
scroll(start_box='{p1}', direction='down or up or right or left')
wait()
finished(content='') # the task is done
fail() # the task cannot be done
call_user() # the user has to step in"""
PHONE = """\
tap({x1}, {y1})
swipe({x1}, {y1}, {x2}, {y2})
type("") # a newline at the end, written \\n, presses ENTER
press(BACK) # or HOME or ENTER
wait()
answer("") # what the task asks for
finish() # the task is done
fail() # the task cannot be done"""
WEB = """\
click [id]
hover [id]
type [id] [text] [1] # 0 instead of 1: ENTER is not pressed
press [key]
scroll [down] # or up
goto [address]
go_back
go_forward
new_tab
tab_focus [number]
close_tab
stop [answer] # the task is done"""
FORMATS = {"desktop": "Thought: ...\nAction: ...", "phone": "the action alone, on one line", "web": "the action alone, on one line"}
ACTIONS = {"desktop": DESKTOP, "phone": PHONE, "web": WEB}
SPACES = {
  "resized": "Points are pixels of the screenshot, which is {width} wide and {height} high.",
  "pixels": "Points are pixels of the screenshot, which is {width} wide and {height} high.",
  "thousand": "Points count from 0 to 1000 across the screenshot and down.",
  "fraction": "Points are fractions of the screenshot's width and height, from 0 to 1.",
  "": "",
}
SPACE_OF = {"phone": "fraction", "web": ""}  # of grammars that fix it; elsewhere it is the family's
# What policy.instruction names. "uitars" has the sections that UI-TARS was trained with, in words of ours.
TEXTS = {
  "plain": """\
You operate a computer for its user. Look at what the screen shows now and at what you did so far, and write the one action that \
comes next.

## Output Format
{form}

## Action Space
{actions}
{note}

## User Instruction
{goal}""",
  "uitars": """\
You are an agent that works on a screen. A task is given, with what you did so far and screenshots. Write the next action of the task.

## Output Format
```
{form}
```

## Action Space
{actions}

## Note
{note}
`Thought` holds a short plan, then in one sentence what the next action is and what it aims at.

## User Instruction
{goal}""",
}
USUAL = {"qwen2_5_vl": "uitars"}  # of families, where the grammar is the desktop's: UI-TARS-1.5 is one of them. Elsewhere it is "plain"
GOAL = "{goal}"
PLACE = re.compile(r"\{[A-Za-z_]\w*\}")
SAMPLE = "Open 7 mugs, then stop.\n"
MODES = ("append", "window")


class Tokenizer:
  """The tokenizer.json of a checkpoint. `encode` reads no control tokens out of text; `encode_trusted` does.

  decode(encode(t)) == t up to the tokenizer's own normalisation (Qwen's is NFC)."""

  def __init__(self, folder: str | pathlib.Path, template: Template):
    path = pathlib.Path(folder) / "tokenizer.json"
    if not path.is_file():
      raise ValueError(f"{folder} has no tokenizer.json: copy it from where the checkpoint came from (other tokenizer files are not read)")
    try:
      told = path.read_text(encoding="utf-8")
      self._plain = tokenizers.Tokenizer.from_str(told)
      self._plain.encode_special_tokens = True
      self._plain.no_truncation()
      self._plain.no_padding()
      read = self._text(self.encode(SAMPLE))
      moved = [t["content"] for t in json.loads(told).get("added_tokens") or [] if self._plain.token_to_id(t["content"]) != t["id"]]
    except (KeyboardInterrupt, SystemExit):
      raise
    except BaseException as e:  # noqa: BLE001 - the library raises nothing narrower, and panics that are no Exception
      raise ValueError(f"{path} is no tokenizer that can be read ({' '.join(str(e).split())[:200]}); download it again") from e
    if read != SAMPLE:
      raise ValueError(f"{path} makes {read!r} of {SAMPLE!r}: wanted a tokenizer that keeps its text; download it again")
    if moved:
      raise ValueError(f"{path}: {moved[0]!r} has another id than added_tokens gives it, an entry is missing: download it again")
    ids = self._plain.get_vocab().values()
    if len(set(ids)) < len(ids):
      raise ValueError(f"{path} gives one id to two tokens: download it again")
    self.template, self.vocab_size = template, max(ids) + 1
    control = {t.content: i for i, t in self._plain.get_added_tokens_decoder().items()}
    needed = {template.end, *re.findall(r"<\|\w+\|>", template.begin + template.open), *(template.image or ())}
    if needed - control.keys():
      raise ValueError(f"{path} lacks {', '.join(sorted(needed - control.keys()))}, which its chat template needs: policy.template?")
    if loose := sorted(t for t in needed if control[t] in self.encode(t)):
      raise ValueError(f"{path}: {loose[0]} is read out of plain text, which a task may write: wanted special=true in added_tokens")
    self._control = control
    self._split = re.compile("|".join(re.escape(t) for t in sorted(control, key=len, reverse=True)))
    self.eos_id = control[template.end]
    self.pad_id = next(control[t] for t in template.pad if t in control)
    self.image_id = control[template.image[1]] if template.image else -1

  def has(self, control: str) -> bool:
    return control in self._control

  def encode(self, text: str) -> list[int]:
    return self._plain.encode(text, add_special_tokens=False).ids

  def _text(self, ids: list[int]) -> str:
    return self._plain.decode(ids, skip_special_tokens=False)

  def encode_trusted(self, text: str, goal: str = "") -> list[int]:
    """Text of ours: control tokens in it count; "{goal}" stands for a text in which they do not."""
    ids, at = [], 0
    for found in [*self._split.finditer(text), None]:
      words = text[at : found.start() if found else len(text)].replace(GOAL, goal)
      ids += self.encode(words) if words else []
      if found:
        ids.append(self._control[found[0]])
        at = found.end()
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    """The text of ids, the end of turn left out. Other control tokens show, and an id that is no token shows as U+FFFD."""
    out, run = [], []
    for i in map(int, ids):
      if i == self.eos_id:
        continue
      if self._plain.id_to_token(i) is None:
        out += [self._text(run), "\ufffd"]
        run = []
      else:
        run.append(i)
    return "".join([*out, self._text(run)])


class Turn(NamedTuple):
  """One step as the context sees it. size: (rows, columns) of the screenshot in tokens, (0, 0) = none; text: what was to be
  read; written: the ids that were sampled, None while they are to come."""

  size: tuple[int, int]
  text: str
  written: Sequence[int] | None


class Context(NamedTuple):
  """A prompt. tokens i32 [T]; image_place i32 [M], index of each screenshot's first placeholder; image_turn i32 [M], whose
  turn's it is; sizes [M]: (rows, columns) in tokens; forgotten: turns of which even the written text is gone."""

  tokens: np.ndarray
  image_place: np.ndarray
  image_turn: np.ndarray
  sizes: list[tuple[int, int]]
  forgotten: int


@dataclasses.dataclass(frozen=True)
class Chat:
  """Builds prompts. instruction: text of ours with {goal} in it; system: "" takes the template's own; screens: observations
  that stay, 0 = all ("append"); budget: tokens a prompt may have."""

  tokenizer: Tokenizer
  instruction: str
  budget: int
  screens: int = 0
  system: str = ""
  space: str = ""  # how points are meant: one of SPACES

  def head(self, goal: str) -> list[int]:
    """Ids of the system message and the instruction."""
    t = self.tokenizer.template
    system = self.system or t.system
    ids = self.tokenizer.encode_trusted(t.begin)
    return ids + (self._message("system", system) if system else []) + self._message("user", self.instruction, goal)

  def prompt(self, goal: str, turns: Sequence[Turn]) -> Context:
    """The context of the newest turn, which has nothing written yet. See above for what stays."""
    if not turns or turns[-1].written is not None or any(t.written is None for t in turns[:-1]):
      raise ValueError("wanted turns with what was written in each, and None in the newest only")
    head, opening = self.head(goal), self.tokenizer.encode_trusted(self.tokenizer.template.open.format(role="assistant"))
    observed = [self._observation(t) for t in turns]
    written = [opening + self._closed(t.written) for t in turns[:-1]] + [opening]
    newest = len(turns) - 1
    seen = max(0, len(turns) - self.screens) if self.screens else 0  # first turn whose observation stays
    kept = 0  # first turn of which anything stays
    length = len(head) + sum(map(len, observed[seen:])) + sum(map(len, written))
    while length > self.budget and kept < newest:
      if seen < newest:
        length -= len(observed[seen])
        seen += 1
      else:
        length -= len(written[kept])
        kept += 1
    if length > self.budget:
      observed[-1] = self._shortened(observed[-1], turns[-1], length - self.budget)
      length = len(head) + len(observed[-1]) + len(written[-1])
    if length > self.budget:
      raise ValueError(
        f"a prompt of {len(head)} tokens of instruction and {len(observed[-1])} of one observation does not fit into {self.budget}: "
        f"raise policy.max_prompt{' or lower policy.max_pixels' if turns[-1].size[0] else ''}"
      )
    return self._join(head, observed, written, turns, seen, kept)

  def _join(self, head, observed, written, turns: Sequence[Turn], seen: int, kept: int) -> Context:
    ids, place, whose = list(head), [], []
    for h in range(kept, len(turns)):
      if h >= seen:
        if turns[h].size != (0, 0):
          place.append(len(ids) + observed[h].index(self.tokenizer.image_id))
          whose.append(h)
        ids += observed[h]
      ids += written[h]
    as_i32 = lambda a: np.array(a, np.int32)
    return Context(as_i32(ids), as_i32(place), as_i32(whose), [turns[h].size for h in whose], kept)

  def _message(self, role: str, text: str, goal: str = "") -> list[int]:
    t = self.tokenizer.template
    strip = str.strip if t.strip else str
    return self.tokenizer.encode_trusted(t.open.format(role=role) + strip(text) + t.end + t.after, strip(goal))

  def _observation(self, turn: Turn) -> list[int]:
    t, (rows, columns) = self.tokenizer.template, turn.size
    image = "".join((t.image[0], t.image[1] * (rows * columns), t.image[2])) if rows else ""
    text = turn.text.strip() if t.strip else turn.text
    return self.tokenizer.encode_trusted(t.open.format(role="user") + image + GOAL + t.end + t.after, text)

  def _shortened(self, ids: list[int], turn: Turn, tokens: int) -> list[int]:
    """An observation without so many ids at the end of its text, or without its text where that is not enough."""
    end = len(self.tokenizer.encode_trusted(self.tokenizer.template.end + self.tokenizer.template.after))
    least = len(self._observation(turn._replace(text="")))
    return ids[: max(len(ids) - tokens, least) - end] + ids[-end:]

  def _closed(self, written: Sequence[int]) -> list[int]:
    """What was sampled, then the end of the turn if it was cut off before it."""
    ids = [int(i) for i in written]
    if not ids or ids[-1] != self.tokenizer.eos_id:
      ids.append(self.tokenizer.eos_id)
    return ids + self.tokenizer.encode_trusted(self.tokenizer.template.after)


def extends(tokens: np.ndarray, before: np.ndarray) -> bool:
  """Whether a prompt goes on where `before` (a prompt and what was sampled after it) ended: else it starts a new record."""
  return len(tokens) >= len(before) and np.array_equal(tokens[: len(before)], before)


def instruction(tokenizer: Tokenizer, grammar: str, space: str, size: tuple[int, int] = (0, 0), which: str = "plain") -> str:
  """The text that tells a policy how to act, with {goal} in it. grammar: one of envs.actions.GRAMMARS that is written here; space: how
  points are meant ("resized", "pixels", "thousand", "fraction"; "" where there are none); size: (W, H) of the screenshot as it is
  shown. which: one of TEXTS, or a text file with {goal} in it, such as the prompt that a published checkpoint was trained with."""
  if which not in TEXTS:
    return _from_file(which)
  for name, value, known in (("grammar", grammar, ACTIONS), ("space", space, SPACES)):
    if value not in known:
      raise ValueError(
        f"no instruction for {name} {value!r}: wanted one of {', '.join(map(repr, known))}; or give one in a file, policy.instruction"
      )
  if which == "uitars" and grammar != "desktop":
    raise ValueError(f"policy.instruction is 'uitars', a desktop's actions, and the grammar is {grammar!r}: wanted plain, or a file")
  point = POINT if tokenizer.has("<|box_start|>") else "({x},{y})"
  actions = ACTIONS[grammar]
  for i in "12":
    actions = actions.replace(f"{{p{i}}}", point.format(x=f"x{i}", y=f"y{i}")).replace(f"{{x{i}}}", f"x{i}").replace(f"{{y{i}}}", f"y{i}")
  note = SPACES[space].format(width=size[0], height=size[1])
  return TEXTS[which].format(form=FORMATS[grammar], actions=actions, note=note, goal=GOAL)


def _from_file(path: str) -> str:
  try:
    if pathlib.Path(path).is_fifo() or pathlib.Path(path).is_char_device():
      raise OSError("a pipe or a device, which may have no end")
    text = pathlib.Path(path).read_text(encoding="utf-8-sig")  # the mark at the beginning that some editors write is no text
  except (OSError, UnicodeDecodeError) as e:
    raise ValueError(
      f"policy.instruction is {path}, which cannot be read as text ({e}): wanted {', '.join(TEXTS)}, or a text file with {GOAL} in it"
    ) from e
  if text.count(GOAL) != 1:
    raise ValueError(f"policy.instruction, {path}, has {GOAL} {text.count(GOAL)} times, wanted once: the place of the task's goal")
  _filled(f"policy.instruction, {path},", text.replace(GOAL, ""))
  return text


def _filled(what: str, text: str) -> None:
  """ValueError where a text has places in it, such as {language}, that nothing fills."""
  if found := PLACE.search(text):
    raise ValueError(f"{what} has {found[0]} in it, which nothing fills: write what is meant, or another kind of bracket")


def make_chat(
  cfg: ml_collections.ConfigDict, folder: str | pathlib.Path, template: Template, model: ModelConfig, grammar: str, space: str,
  size: tuple[int, int] = (0, 0), shown: tuple[int, int] = (0, 0),
) -> Chat:  # fmt: skip
  """The chat that a policy's knobs (mode, screens, max_prompt, max_action, max_goal, space, instruction, system) describe. ValueError of
  one line where they do not fit each other or the checkpoint. space: the family's own; size, shown: (W, H) of the screen, and as the
  model is shown it."""
  if cfg.mode not in MODES:
    raise ValueError(f"policy.mode is {cfg.mode!r}, wanted one of {', '.join(MODES)}")
  for name in ("screens", "max_prompt", "max_action", "max_goal"):
    if cfg[name] < 1:
      raise ValueError(f"policy.{name} is {cfg[name]}, wanted 1 or more")
  if cfg.space not in SPACES:
    raise ValueError(f"policy.space is {cfg.space!r}, wanted one of {', '.join(map(repr, SPACES))} ('': the family's own)")
  _filled("policy.system", cfg.system)
  longest = cfg.max_prompt + cfg.max_action
  if longest > model.max_position:
    raise ValueError(
      f"policy.max_prompt + max_action is {longest}; {folder} was trained for {model.max_position} positions: lower policy.max_prompt"
    )
  tokenizer = Tokenizer(folder, template)
  space = cfg.space or SPACE_OF.get(grammar, space)
  if tokenizer.vocab_size > model.vocab:
    raise ValueError(
      f"{folder}: tokenizer.json has ids up to {tokenizer.vocab_size - 1}, the model of config.json {model.vocab} tokens: "
      "take both from one checkpoint"
    )
  which = cfg.instruction or (USUAL.get(model.family, "plain") if grammar == "desktop" else "plain")
  text = instruction(tokenizer, grammar, space, shown if space == "resized" else size, which)
  for name, said in (("instruction", text), ("system", cfg.system)):
    if spelled := next((t for t in template.image or () if t in said), ""):
      raise ValueError(f"policy.{name} has {spelled} in it, which stands for a screenshot: those come with the observations, leave it out")
  return Chat(tokenizer, text, cfg.max_prompt, cfg.screens if cfg.mode == "window" else 0, cfg.system, space)
