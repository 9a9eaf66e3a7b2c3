"""Key names of envs.grammars.keys and characters as DevTools key events, on a US keyboard."""

from __future__ import annotations

import string

# canonical name -> (DOM key, DOM code, Windows key code, text that the key types)
NAMED = {
  "ctrl": ("Control", "ControlLeft", 17, ""), "alt": ("Alt", "AltLeft", 18, ""), "shift": ("Shift", "ShiftLeft", 16, ""),
  "super": ("Meta", "MetaLeft", 91, ""), "enter": ("Enter", "Enter", 13, "\r"), "escape": ("Escape", "Escape", 27, ""),
  "tab": ("Tab", "Tab", 9, ""), "space": (" ", "Space", 32, " "), "backspace": ("Backspace", "Backspace", 8, ""),
  "delete": ("Delete", "Delete", 46, ""), "insert": ("Insert", "Insert", 45, ""), "home": ("Home", "Home", 36, ""),
  "end": ("End", "End", 35, ""), "pageup": ("PageUp", "PageUp", 33, ""), "pagedown": ("PageDown", "PageDown", 34, ""),
  "left": ("ArrowLeft", "ArrowLeft", 37, ""), "up": ("ArrowUp", "ArrowUp", 38, ""), "right": ("ArrowRight", "ArrowRight", 39, ""),
  "down": ("ArrowDown", "ArrowDown", 40, ""), "capslock": ("CapsLock", "CapsLock", 20, ""), "numlock": ("NumLock", "NumLock", 144, ""),
  "scrolllock": ("ScrollLock", "ScrollLock", 145, ""), "printscreen": ("PrintScreen", "PrintScreen", 44, ""),
  "pause": ("Pause", "Pause", 19, ""), "menu": ("ContextMenu", "ContextMenu", 93, ""), "+": ("+", "Equal", 187, "+"),
  **{f"f{i}": (f"F{i}", f"F{i}", 111 + i, "") for i in range(1, 13)},
}  # fmt: skip
MODIFIERS = {"alt": 1, "ctrl": 2, "super": 4, "shift": 8}
SHIFTED = dict(zip('~!@#$%^&*()_+{}|:"<>?', "`1234567890-=[]\\;',./"))
SIGNS = {
  "`": ("Backquote", 192), "-": ("Minus", 189), "=": ("Equal", 187), "[": ("BracketLeft", 219), "]": ("BracketRight", 221),
  "\\": ("Backslash", 220), ";": ("Semicolon", 186), "'": ("Quote", 222), ",": ("Comma", 188), ".": ("Period", 190), "/": ("Slash", 191),
}  # fmt: skip


def key_of(name: str) -> tuple[str, str, int, str, int]:
  """(DOM key, DOM code, Windows key code, text, modifiers needed) of a key's name or of one character. KeyError: no such key."""
  if name in NAMED:
    return (*NAMED[name], MODIFIERS["shift"] if name == "+" else 0)
  base = SHIFTED.get(name, name.lower())
  shift = MODIFIERS["shift"] if base != name else 0
  if base in string.ascii_lowercase:
    return name, f"Key{base.upper()}", ord(base.upper()), name, shift
  if base in string.digits:
    return name, f"Digit{base}", ord(base), name, shift
  code, number = SIGNS[base]
  return name, code, number, name, shift


def press(name: str, held: int = 0) -> list[tuple[str, dict]]:
  """The calls that put one key down and up again. held: the modifiers that are down; with any but shift nothing is typed."""
  key, code, number, text, needed = key_of(name)
  modifiers = held | needed
  common = {"key": key, "code": code, "windowsVirtualKeyCode": number, "nativeVirtualKeyCode": number, "modifiers": modifiers}
  typed = {"text": text, "unmodifiedText": text} if text and not modifiers & ~MODIFIERS["shift"] else {}
  down = {"type": "keyDown" if typed else "rawKeyDown"} | common | typed
  return [("Input.dispatchKeyEvent", down), ("Input.dispatchKeyEvent", {"type": "keyUp"} | common)]


def chord(names: list[str]) -> list[tuple[str, dict]]:
  """Keys pressed together: modifiers and keys down in order, up in reverse."""
  held, before, after = 0, [], []
  for name in names[:-1] if len(names) > 1 else []:
    held |= MODIFIERS.get(name, 0)
    down, up = press(name, held)
    before.append(down)
    after.append((up[0], up[1] | {"modifiers": up[1]["modifiers"] & ~MODIFIERS.get(name, 0)}))
  return [*before, *press(names[-1], held), *reversed(after)]


def typing(text: str) -> list[tuple[str, dict]]:
  """The calls that type text: key by key what a US keyboard has, the rest as an input method would put it."""
  out: list[tuple[str, dict]] = []
  for char in text:
    if char in "\n\t ":
      out += press({"\n": "enter", "\t": "tab", " ": "space"}[char])
    elif char.isascii():
      out += press(char)
    else:
      out.append(("Input.insertText", {"text": char}))
  return out
