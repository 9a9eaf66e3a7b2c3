"""Key names: the allow-list, and the other names that mean the same key. Anything else is unreadable.

An environment receives canonical names only and maps them to its own (QEMU qcodes, X keysyms, browser key names), so a
name a model invents never reaches a keyboard, let alone a shell.
"""

from __future__ import annotations

import re
import string

from envs.grammars.lex import Bad

MAX_KEYS = 5

# canonical name -> other accepted names, all in lower case; upper case is accepted and lowered
ALIASES = {
  "ctrl": ("control",),
  "alt": ("option", "opt"),
  "shift": (),
  "super": ("cmd", "command", "win", "windows", "meta"),
  "enter": ("return",),
  "escape": ("esc",),
  "tab": (),
  "space": ("spacebar",),
  "backspace": (),
  "delete": ("del",),
  "insert": ("ins",),
  "home": (),
  "end": (),
  "pageup": ("pgup", "page_up"),
  "pagedown": ("pgdn", "pgdown", "page_down"),
  "left": ("arrowleft", "leftarrow", "arrow_left", "left_arrow"),
  "right": ("arrowright", "rightarrow", "arrow_right", "right_arrow"),
  "up": ("arrowup", "uparrow", "arrow_up", "up_arrow"),
  "down": ("arrowdown", "downarrow", "arrow_down", "down_arrow"),
  "capslock": ("caps_lock",),
  "numlock": ("num_lock",),
  "scrolllock": ("scroll_lock",),
  "printscreen": ("prtsc", "prtscr", "print_screen"),
  "pause": (),
  "menu": ("apps", "contextmenu"),
  "+": ("plus",),
  "-": ("minus",),
  "=": ("equal", "equals"),
  ",": ("comma",),
  ".": ("period",),
  "/": ("slash",),
  "\\": ("backslash",),
  ";": ("semicolon",),
  "'": ("apostrophe",),
  "`": ("backtick", "grave"),
  "[": ("bracketleft",),
  "]": ("bracketright",),
}
MODIFIERS = ("ctrl", "alt", "shift", "super")
KEYS = (*ALIASES, *string.ascii_lowercase, *string.digits, *(f"f{i}" for i in range(1, 13)))
_CANONICAL = {key: key for key in KEYS} | {other: key for key, others in ALIASES.items() for other in others}


def read_keys(text: str) -> list[str]:
  """Canonical names of the keys pressed together, as written: first down, last up. "ctrl z", "Ctrl+Z", "ctrl + z"."""
  words = text.strip(" \t")
  if len(words) > 80:
    raise Bad(f"too long for a key combination: {words[:40]!r}...")
  plus = words == "+" or words.endswith(("++", " +"))  # the plus key itself can only stand last
  if plus:
    words = words[:-1].rstrip(" \t").removesuffix("+").rstrip(" \t")
  names = re.split(r"[ \t]*\+[ \t]*|[ \t]+", words) if words else []
  names += ["+"] if plus else []
  keys = [_CANONICAL.get(name.lower() if name.isascii() else "") for name in names]
  if not keys or None in keys:
    raise Bad(f"unknown key: {text[:40]!r}")
  if len(keys) > MAX_KEYS or len(set(keys)) < len(keys):
    raise Bad(f"a key twice or more than {MAX_KEYS} keys: {text[:40]!r}")
  return keys
