"""pyautogui's functions on XTEST, for this guest: Debian has no package of pyautogui, and OSWorld's setup steps and actions call it.

Same names and arguments (pyautogui 0.9.54); two differences: '<' types '<', and characters that the keyboard lacks are typed too.
Movements are instant and straight unless a duration is given; nothing is random.
"""

import contextlib
import time

from Xlib import XK, X, display
from Xlib.ext import xtest

PAUSE, FAILSAFE, MINIMUM_DURATION = 0.1, True, 0.1
LEFT, MIDDLE, RIGHT, PRIMARY, SECONDARY = "left", "middle", "right", "left", "right"
BUTTONS = {"left": 1, "middle": 2, "right": 3, "primary": 1, "secondary": 3, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7}
SCROLL_UP, SCROLL_DOWN, SCROLL_LEFT, SCROLL_RIGHT = 4, 5, 6, 7

_NAMED = {
  "enter": "Return", "return": "Return", "\n": "Return", "\r": "Return", "tab": "Tab", "\t": "Tab", "space": "space", " ": "space",
  "backspace": "BackSpace", "\b": "BackSpace", "delete": "Delete", "del": "Delete", "insert": "Insert", "esc": "Escape",
  "escape": "Escape", "home": "Home", "end": "End", "pageup": "Prior", "pgup": "Prior", "pagedown": "Next", "pgdn": "Next",
  "up": "Up", "down": "Down", "left": "Left", "right": "Right", "ctrl": "Control_L", "ctrlleft": "Control_L", "ctrlright": "Control_R",
  "alt": "Alt_L", "altleft": "Alt_L", "altright": "Alt_R", "option": "Alt_L", "shift": "Shift_L", "shiftleft": "Shift_L",
  "shiftright": "Shift_R", "win": "Super_L", "winleft": "Super_L", "winright": "Super_R", "super": "Super_L", "command": "Super_L",
  "capslock": "Caps_Lock", "numlock": "Num_Lock", "scrolllock": "Scroll_Lock", "printscreen": "Print", "prtsc": "Print",
  "prtscr": "Print", "prntscrn": "Print", "print": "Print", "pause": "Pause", "apps": "Menu", "menu": "Menu", "help": "Help",
  "add": "KP_Add", "subtract": "KP_Subtract", "multiply": "KP_Multiply", "divide": "KP_Divide", "decimal": "KP_Decimal",
  "separator": "KP_Separator", "clear": "Clear", "select": "Select", "execute": "Execute",
  **{f"f{i}": f"F{i}" for i in range(1, 25)}, **{f"num{i}": f"KP_{i}" for i in range(10)},
}  # fmt: skip
KEYBOARD_KEYS = [*(chr(c) for c in range(32, 127)), *_NAMED]
KEY_NAMES = KEYBOARD_KEYS

_display = display.Display()
_root = _display.screen().root


class PyAutoGUIException(Exception):
  """What pyautogui raises."""


class FailSafeException(PyAutoGUIException):
  """The pointer is in a corner and FAILSAFE is on."""


def _after(pause):
  """What follows every call: the X server has it, and a while passes."""
  _display.sync()
  time.sleep(PAUSE if pause is None else pause)


def size():
  """(width, height) in pixels."""
  at = _root.get_geometry()
  return at.width, at.height


def position(x=None, y=None):
  at = _root.query_pointer()
  return at.root_x if x is None else int(x), at.root_y if y is None else int(y)


def onScreen(x, y=None):
  x, y = (x, y) if y is not None else x
  width, height = size()
  return 0 <= x < width and 0 <= y < height


def failSafeCheck():
  width, height = size()
  if FAILSAFE and position() in ((0, 0), (0, height - 1), (width - 1, 0), (width - 1, height - 1)):
    raise FailSafeException("the pointer is in a corner of the screen; pyautogui.FAILSAFE = False turns this off")


def linear(n):
  return n


def easeInQuad(n):
  return n * n


def easeOutQuad(n):
  return n * (2 - n)


def easeInOutQuad(n):
  return 2 * n * n if n < 0.5 else 1 - 2 * (1 - n) ** 2


easeInCubic = easeInQuart = easeInQuint = easeInSine = easeInExpo = easeInCirc = easeInQuad
easeOutCubic = easeOutQuart = easeOutQuint = easeOutSine = easeOutExpo = easeOutCirc = easeOutQuad
easeInOutCubic = easeInOutQuart = easeInOutQuint = easeInOutSine = easeInOutExpo = easeInOutCirc = easeInOutQuad
easeInElastic = easeOutElastic = easeInOutElastic = easeInBounce = easeOutBounce = easeInOutBounce = easeInOutQuad


def _jump(x, y):
  width, height = size()
  xtest.fake_input(_display, X.MotionNotify, x=min(max(int(x), 0), width - 1), y=min(max(int(y), 0), height - 1))
  _display.sync()


def _point(x, y):
  if isinstance(x, (tuple, list)):
    x, y = x
  return position(x, y)


def moveTo(x=None, y=None, duration=0.0, tween=linear, logScreenshot=False, _pause=True):
  failSafeCheck()
  (x0, y0), (x1, y1) = position(), _point(x, y)
  steps = int(duration / 0.05) if duration > MINIMUM_DURATION else 0
  for i in range(1, steps):
    part = tween(i / steps)
    _jump(x0 + (x1 - x0) * part, y0 + (y1 - y0) * part)
    time.sleep(duration / steps)
  _jump(x1, y1)
  _after(None if _pause else 0)


def moveRel(xOffset=0, yOffset=0, duration=0.0, tween=linear, logScreenshot=False, _pause=True):
  x, y = position()
  moveTo(x + (xOffset or 0), y + (yOffset or 0), duration, tween, _pause=_pause)


move = moveRel


def mouseDown(x=None, y=None, button=PRIMARY, duration=0.0, tween=linear, logScreenshot=None, _pause=True):
  if x is not None or y is not None:
    moveTo(x, y, duration, tween, _pause=False)
  xtest.fake_input(_display, X.ButtonPress, BUTTONS[button])
  _after(None if _pause else 0)


def mouseUp(x=None, y=None, button=PRIMARY, duration=0.0, tween=linear, logScreenshot=None, _pause=True):
  if x is not None or y is not None:
    moveTo(x, y, duration, tween, _pause=False)
  xtest.fake_input(_display, X.ButtonRelease, BUTTONS[button])
  _after(None if _pause else 0)


def click(x=None, y=None, clicks=1, interval=0.0, button=PRIMARY, duration=0.0, tween=linear, logScreenshot=None, _pause=True):
  failSafeCheck()
  if x is not None or y is not None:
    moveTo(x, y, duration, tween, _pause=False)
  for i in range(clicks):
    if i:
      time.sleep(interval)
    mouseDown(button=button, _pause=False)
    mouseUp(button=button, _pause=False)
  _after(None if _pause else 0)


def leftClick(x=None, y=None, interval=0.0, duration=0.0, tween=linear, logScreenshot=None, _pause=True):
  click(x, y, 1, interval, LEFT, duration, tween, _pause=_pause)


def rightClick(x=None, y=None, interval=0.0, duration=0.0, tween=linear, logScreenshot=None, _pause=True):
  click(x, y, 1, interval, RIGHT, duration, tween, _pause=_pause)


def middleClick(x=None, y=None, interval=0.0, duration=0.0, tween=linear, logScreenshot=None, _pause=True):
  click(x, y, 1, interval, MIDDLE, duration, tween, _pause=_pause)


def doubleClick(x=None, y=None, interval=0.0, button=LEFT, duration=0.0, tween=linear, logScreenshot=None, _pause=True):
  click(x, y, 2, interval, button, duration, tween, _pause=_pause)


def tripleClick(x=None, y=None, interval=0.0, button=LEFT, duration=0.0, tween=linear, logScreenshot=None, _pause=True):
  click(x, y, 3, interval, button, duration, tween, _pause=_pause)


def _wheel(clicks, x, y, more, less, _pause):
  if x is not None or y is not None:
    moveTo(x, y, _pause=False)
  for _ in range(abs(int(clicks))):
    for kind in (X.ButtonPress, X.ButtonRelease):
      xtest.fake_input(_display, kind, more if clicks > 0 else less)
  _after(None if _pause else 0)


def scroll(clicks, x=None, y=None, logScreenshot=None, _pause=True):
  _wheel(clicks, x, y, SCROLL_UP, SCROLL_DOWN, _pause)


vscroll = scroll


def hscroll(clicks, x=None, y=None, logScreenshot=None, _pause=True):
  _wheel(clicks, x, y, SCROLL_RIGHT, SCROLL_LEFT, _pause)


def dragTo(x=None, y=None, duration=0.0, tween=linear, button=PRIMARY, logScreenshot=None, _pause=True, mouseDownUp=True):
  if mouseDownUp:
    mouseDown(button=button, _pause=False)
  moveTo(x, y, max(duration, 0.2), tween, _pause=False)
  if mouseDownUp:
    mouseUp(button=button, _pause=False)
  _after(None if _pause else 0)


def dragRel(xOffset=0, yOffset=0, duration=0.0, tween=linear, button=PRIMARY, logScreenshot=None, _pause=True, mouseDownUp=True):
  x, y = position()
  dragTo(x + (xOffset or 0), y + (yOffset or 0), duration, tween, button, _pause=_pause, mouseDownUp=mouseDownUp)


drag = dragRel


def _keysym(key):
  if len(key) > 1 or key in _NAMED:
    return XK.string_to_keysym(_NAMED.get(key.lower(), key))
  code = ord(key)
  return code if code < 0x100 else 0x01000000 | code


def _keycode(key):
  """(keycode, whether Shift goes with it); a key that the keyboard lacks is put on a code that is free."""
  keysym = _keysym(key)
  if keysym == 0:
    return 0, False
  places = sorted(_display.keysym_to_keycodes(keysym), key=lambda place: place[1])
  for code, index in places:
    if index in (0, 1):
      return code, index == 1
  first, last = _display.display.info.min_keycode, _display.display.info.max_keycode
  keyboard = _display.get_keyboard_mapping(first, last - first + 1)
  spare = first + max(i for i, codes in enumerate(keyboard) if not any(codes))
  _display.change_keyboard_mapping(spare, [[keysym] * len(keyboard[0])])
  _display.sync()
  time.sleep(0.2)  # applications are told of the new key before it is pressed
  return spare, False


def isValidKey(key):
  return len(key) == 1 or key.lower() in _NAMED


isShiftCharacter = lambda character: character.isupper() or character in '~!@#$%^&*()_+{}|:"<>?'


def _stroke(key, kinds):
  code, shifted = _keycode(key if len(key) == 1 else key.lower())
  if not code:
    return
  shift = _display.keysym_to_keycode(XK.XK_Shift_L)
  if shifted and X.KeyPress in kinds:
    xtest.fake_input(_display, X.KeyPress, shift)
  for kind in kinds:
    xtest.fake_input(_display, kind, code)
  if shifted and X.KeyRelease in kinds:
    xtest.fake_input(_display, X.KeyRelease, shift)
  _display.sync()


def keyDown(key, logScreenshot=None, _pause=True):
  _stroke(key, [X.KeyPress])
  _after(None if _pause else 0)


def keyUp(key, logScreenshot=None, _pause=True):
  _stroke(key, [X.KeyRelease])
  _after(None if _pause else 0)


def press(keys, presses=1, interval=0.0, logScreenshot=None, _pause=True):
  for _ in range(int(presses)):
    for key in [keys] if isinstance(keys, str) else keys:
      _stroke(key, [X.KeyPress, X.KeyRelease])
    time.sleep(interval)
  _after(None if _pause else 0)


@contextlib.contextmanager
def hold(keys, logScreenshot=None, _pause=True):
  keys = [keys] if isinstance(keys, str) else list(keys)
  for key in keys:
    _stroke(key, [X.KeyPress])
  try:
    yield
  finally:
    for key in reversed(keys):
      _stroke(key, [X.KeyRelease])
    _after(None if _pause else 0)


def typewrite(message, interval=0.0, logScreenshot=None, _pause=True):
  for key in message:
    _stroke(key, [X.KeyPress, X.KeyRelease])
    time.sleep(interval)
  _after(None if _pause else 0)


write = typewrite


def hotkey(*args, logScreenshot=None, interval=0.0, _pause=True):
  keys = [key.lower() if len(key) > 1 else key for key in (args[0] if len(args) == 1 and not isinstance(args[0], str) else args)]
  for key in keys:
    _stroke(key, [X.KeyPress])
    time.sleep(interval)
  for key in reversed(keys):
    _stroke(key, [X.KeyRelease])
    time.sleep(interval)
  _after(None if _pause else 0)


def screenshot(imageFilename=None, region=None):
  """The screen as a Pillow image, without the pointer."""
  from PIL import Image

  x, y, width, height = region or (0, 0, *size())
  raw = _root.get_image(x, y, width, height, X.ZPixmap, 0xFFFFFFFF)
  shown = Image.frombytes("RGB", (width, height), raw.data, "raw", "BGRX")
  if imageFilename:
    shown.save(imageFilename)
  return shown


def pixel(x, y):
  return screenshot(region=(x, y, 1, 1)).getpixel((0, 0))


sleep = time.sleep
