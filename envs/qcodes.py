"""Keys and text as QEMU's key codes (qcodes), on a US keyboard: each character with the Shift it wants, each key let go of."""

from __future__ import annotations

import string
from collections.abc import Sequence

from envs.keyboard import SHIFTED

SIGNS = {
  "`": "grave_accent", "-": "minus", "=": "equal", "[": "bracket_left", "]": "bracket_right", "\\": "backslash", ";": "semicolon",
  "'": "apostrophe", ",": "comma", ".": "dot", "/": "slash", " ": "spc", "\n": "ret", "\t": "tab",
}  # fmt: skip
NAMED = {
  "ctrl": "ctrl", "alt": "alt", "shift": "shift", "super": "meta_l", "enter": "ret", "escape": "esc", "tab": "tab", "space": "spc",
  "backspace": "backspace", "delete": "delete", "insert": "insert", "home": "home", "end": "end", "pageup": "pgup", "pagedown": "pgdn",
  "left": "left", "right": "right", "up": "up", "down": "down", "capslock": "caps_lock", "numlock": "num_lock",
  "scrolllock": "scroll_lock", "printscreen": "print", "pause": "pause", "menu": "compose",
  **{f"f{i}": f"f{i}" for i in range(1, 13)},
}  # fmt: skip
BUTTONS = ("left", "middle", "right")

Event = dict  # one of QMP's input-send-event


def qcode_of(name: str) -> tuple[str, bool]:
  """(qcode, whether Shift goes with it) of a key's canonical name (envs.grammars.keys) or of one character. KeyError: no such key."""
  if name in NAMED:
    return NAMED[name], False
  base = SHIFTED.get(name, name.lower() if name in string.ascii_letters else name)
  if base in SIGNS:
    return SIGNS[base], base != name
  if len(base) == 1 and base in string.ascii_lowercase + string.digits:
    return base, base != name
  raise KeyError(name)


def typable(text: str) -> bool:
  """Whether the keyboard has a key for every character."""
  return all(c in "\n\t" or " " <= c <= "~" for c in text)


def key(qcode: str, down: bool) -> Event:
  return {"type": "key", "data": {"down": down, "key": {"type": "qcode", "data": qcode}}}


def button(name: str, down: bool) -> Event:
  return {"type": "btn", "data": {"down": down, "button": name}}


def move(point: Sequence[int], size: tuple[int, int]) -> list[Event]:
  """The pointer to the middle of a pixel; QEMU's axes go from 0 to 32767 over the whole screen."""
  place = [int((2 * at + 1) * 32768 / (2 * length)) for at, length in zip(point, size)]
  return [{"type": "abs", "data": {"axis": axis, "value": value}} for axis, value in zip("xy", place)]


def stroke(name: str) -> list[Event]:
  """One key down and up, with its Shift."""
  qcode, shifted = qcode_of(name)
  pressed = [key(qcode, True), key(qcode, False)]
  return [key("shift", True), *pressed, key("shift", False)] if shifted else pressed


def chord(names: Sequence[str]) -> list[Event]:
  """Keys pressed together: down in order, up in reverse."""
  qcodes = [code for name in names for qcode, shifted in [qcode_of(name)] for code in (["shift", qcode] if shifted else [qcode])]
  qcodes = list(dict.fromkeys(qcodes))
  return [key(q, True) for q in qcodes] + [key(q, False) for q in reversed(qcodes)]


def release_all() -> list[Event]:
  """Every modifier and button up, whatever was down."""
  held = ("shift", "shift_r", "ctrl", "ctrl_r", "alt", "alt_r", "meta_l", "meta_r")
  return [key(q, False) for q in held] + [button(name, False) for name in BUTTONS]
