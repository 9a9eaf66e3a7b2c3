"""Metrics of texts, lists, JSON and settings files. Semantics: desktop-env's desktop_env/evaluators/metrics (general, vscode, gimp,
thunderbird, table), Apache 2.0; where they differ from it, docs/osworld.md says so."""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
from typing import Any

from envs.osworld.metrics import guard
from envs.osworld.metrics.rules import matches

PREFERENCE = re.compile(r'user_pref\("((?:[^"\\]|\\.)+)", (.+)\);')
EVALUATION_FAILED = "__EVALUATION_FAILED__"


def check_include_exclude(result: str | None, rules: dict) -> float:
  """All of include are in the text and none of exclude is."""
  if result is None:
    return 0.0
  return float(all(r in result for r in rules.get("include", [])) and all(r not in result for r in rules.get("exclude", [])))


def exact_match(result: Any, rules: dict) -> float:
  return float(result == rules["expected"])


def match_in_list(result: Any, rules: dict) -> float:
  """The result is one of expected."""
  return float(result in rules["expected"])


def is_in_list(result: Any, rules: dict) -> float:
  """expected is one of the result, or a part of it."""
  return float(result is not None and rules["expected"] in result)


def is_extension_installed(result: str | None, rules: dict, **options) -> float:
  """type contain or not_contain: whether expected is in the text."""
  if rules["type"] not in ("contain", "not_contain"):
    raise guard.BadExpected(f"is_extension_installed has type {rules['type']!r}, wanted contain or not_contain")
  if result is None:
    return 0.0
  return float((rules["expected"] in result) == (rules["type"] == "contain"))


def check_list(result: str | None, rules: dict) -> float:
  """Every pattern of expect is found in some line of the file, none of unexpect in any."""
  if result is None:
    return 0.0
  lines = guard.text(result, "result").splitlines()
  found = lambda pattern: any(re.search(pattern, line) for line in lines)
  return float(all(found(p) for p in rules.get("expect", [])) and not any(found(p) for p in rules.get("unexpect", [])))


def check_json_settings(result: str | None, rules: dict, **options) -> float:
  """Every key of expected is in the JSON file with that value."""
  if not result:
    return 0.0
  data = guard.read(lambda path: json.loads(guard.text(path, "result")), result, "result")
  return float(isinstance(data, dict) and all(key in data and data[key] == value for key, value in rules["expected"].items()))


def check_json(result: str | None, rules: dict) -> float:
  """expect, unexpect: rules for the values under a list of keys."""
  if result is None:
    return 0.0
  data = guard.read(lambda path: json.loads(guard.text(path, "result")), result, "result")

  def under(keys: list) -> tuple[bool, Any]:
    value = data
    for key in keys:
      try:
        value = value[key]
      except (KeyError, TypeError, IndexError):
        return False, None
    return True, value

  for rule in rules.get("expect", []):
    there, value = under(rule["key"])
    if not there or not matches(value, rule):
      return 0.0
  return float(not any(matches(under(rule["key"])[1], rule) for rule in rules.get("unexpect", [])))


def check_direct_json_object(result: Any, rules: dict) -> float:
  """Every key of expected has that value in the object, or with expect_in_result contains it. A text is read as JSON, single
  quotation marks as double ones."""
  if isinstance(result, str):
    try:
      result = json.loads(result.strip().replace("'", '"'))
    except ValueError:
      return 0.0
  expected = rules.get("expected", {})
  if not isinstance(result, dict) or EVALUATION_FAILED in [value for value in expected.values() if isinstance(value, str)]:
    return 0.0
  contains = rules.get("expect_in_result", False)
  for key, value in expected.items():
    got = result.get(key)
    if not contains and expected.get("ignore_list_order", False):
      order = sorted(value)
      try:
        good = order == sorted(got or [])
      except TypeError:  # no list, or one of texts and numbers
        good = False
    elif not contains:
      good = value == got
    elif isinstance(value, list):
      good = any(one in got if isinstance(got, list) else one == got for one in value)
    else:
      good = isinstance(value, str) and isinstance(got, (str, list)) and value in got
    if not good:
      return 0.0
  return 1.0


def compare_text_file(result: str | None, expected: str, ignore_blanks: bool = False, ignore_case: bool = False, **options) -> float:
  """The same text; ignore_blanks: white space between words counts as one space."""
  if not result:
    return 0.0
  texts = [guard.text(result, "result"), guard.text(expected, "expected")]
  if ignore_blanks:
    texts = [re.sub(r"\s+", " ", re.sub(r"[\t\n]", " ", text).strip()) for text in texts]
  if ignore_case:
    texts = [text.lower() for text in texts]
  return float(texts[0] == texts[1])


def diff_text_file(result: str | None, expected: str) -> float:
  """How alike the lines are, 0 to 1 (difflib's ratio)."""
  if result is None:
    return 0.0
  lines = [guard.text(path, side).splitlines() for path, side in zip((result, expected), guard.SIDES)]
  return difflib.SequenceMatcher(a=lines[0], b=lines[1]).ratio()


def file_contains(result: str | None, rules: dict) -> float:
  """Every text of expected is in the file."""
  if not result:
    return 0.0
  text = guard.text(result, "result")
  return float(all(one in text for one in rules["expected"]))


def check_csv(result: str | None, rules: dict) -> float:
  """Every record of expect agrees with some row in the columns it names, none of unexpect with any."""
  if result is None:
    return 0.0
  rows = guard.read(lambda path: list(csv.DictReader(io.StringIO(guard.text(path, "result")))), result, "result")
  found = lambda record: any(all(key in row and row[key] == value for key, value in record.items()) for row in rows)
  return float(all(found(r) for r in rules.get("expect", [])) and not any(found(r) for r in rules.get("unexpect", [])))


def compare_csv(result: str | None, expected: str | list[str], strict: bool = True, ignore_case: bool = False, **options) -> float:
  """The same lines as the expected file, or as one of several; not strict: spaces around a line do not count."""
  if result is None:
    return 0.0

  def lines(path: str, side: str) -> list[str]:
    out = guard.read(_decoded, path, side).splitlines()
    out = out if strict else [line.strip() for line in out]
    return [line.lower() for line in out] if ignore_case else out

  got = lines(result, "result")
  return float(any(lines(one, "expected") == got for one in ([expected] if isinstance(expected, str) else expected)))


def _decoded(path: str) -> str:
  """UTF-8, else Latin-1, which every file is."""
  with open(path, "rb") as file:
    raw = file.read(guard.MAX_TEXT + 1)
  if len(raw) > guard.MAX_TEXT:
    raise ValueError(f"more than {guard.MAX_TEXT} bytes of text")
  try:
    return raw.decode("utf-8")
  except UnicodeDecodeError:
    return raw.decode("latin-1")


def check_config_status(result: str | None, rules: dict) -> float:
  """A line "(key ... value)" of a GIMP settings file; key may be the first two words."""
  if result is None:
    return 0.0
  key = [rules["key"]] if isinstance(rules["key"], str) else rules["key"]
  for line in guard.text(result, "result").splitlines():
    words = line.strip().lstrip("(").rstrip(")").split()
    if words and not line.startswith("#") and words[: len(key)] == key and words[-1] == rules["value"]:
      return 1.0
  return 0.0


def check_thunderbird_prefs(result: str | None, rules: dict) -> float:
  """Every preference of expect is set and follows its rule; none of unexpect does."""
  if result is None:
    return 0.0
  values = {}
  for line in guard.text(result, "result").splitlines():
    if found := PREFERENCE.fullmatch(line.strip()):
      try:
        values[found[1]] = json.loads(found[2])
      except ValueError as error:
        raise guard.BadResult(f"preference {found[1]}: {error}"[:200]) from error
  expect, unexpect = rules.get("expect", {}), rules.get("unexpect", {})
  good = all(name in values and matches(values[name], rule) for name, rule in expect.items())
  return float(good and not any(name in values and matches(values[name], rule) for name, rule in unexpect.items()))


def practice_lines(result: str | None, rules: dict) -> float:
  """The file's lines are those of expected; empty ones at its end do not count. This project's own."""
  if result is None:
    return 0.0
  lines = guard.text(result, "result").splitlines()
  while lines and not lines[-1]:
    lines.pop()
  return float(lines == rules["expected"])
