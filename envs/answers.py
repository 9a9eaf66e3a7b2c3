"""Comparing what an agent answered, or a page shows, with what a task's author wrote: numbers as numbers, dates as dates, URLs in parts."""

from __future__ import annotations

import datetime
import decimal
import re
import unicodedata
import urllib.parse

NUMBER = re.compile(r"(?<![\w./:-])[-+]?[$€£]?\d[\d,]*(?:\.\d+)?(?!\w|[./:-]\d)")
SPELLINGS = {"cancelled": "canceled", "cancelling": "canceling", "colour": "color", "grey": "gray", "catalogue": "catalog"}
DATES = ("%Y-%m-%d", "%m/%d/%Y", "%m/%d/%y", "%B %d %Y", "%b %d %Y", "%d %B %Y", "%d %b %Y")


def clean(text: str) -> str:
  """Lower case, single spaces, no quotation marks around it, American spelling of a few words."""
  text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
  if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
    text = text[1:-1].strip()
  return re.sub(r"[a-z]+", lambda word: SPELLINGS.get(word[0], word[0]), text)


def number(text: str) -> decimal.Decimal | None:
  """The number that the whole text is, currency and thousands separators aside."""
  if not NUMBER.fullmatch(text.strip()):
    return None
  return decimal.Decimal(re.sub(r"[$€£,]", "", text.strip()))


def date(text: str) -> datetime.date | None:
  """The day that the whole text is, month first where it is all numbers."""
  plain = re.sub(r"(?<=\d)(st|nd|rd|th)\b", "", " ".join(text.replace(",", " ").split()))
  for form in DATES:
    try:
      return datetime.datetime.strptime(plain, form).date()
    except ValueError:
      continue
  return None


def same(wanted: str, said: str) -> bool:
  """Whether both texts say the same: as text, as a number or as a date."""
  if clean(wanted) == clean(said):
    return True
  for kind in (number, date):
    if (value := kind(wanted)) is not None:
      return value == kind(said)
  return False


def includes(wanted: str, said: str) -> bool:
  """Whether the text is in there as whole words; a number as a number, so that 4 is not in 14."""
  value = number(wanted)
  if value is not None:
    return any(number(found[0]) == value for found in NUMBER.finditer(clean(said)))
  words = clean(wanted)
  before, after = (r"(?<!\w)" if words[:1].isalnum() else "", r"(?!\w)" if words[-1:].isalnum() else "")
  return re.search(before + re.escape(words) + after, clean(said)) is not None


def parts(url: str) -> tuple[str, str, dict[str, set[str]]]:
  split = urllib.parse.urlsplit(url.strip())
  query = urllib.parse.parse_qs(split.query, keep_blank_values=True)
  return split.netloc.casefold(), urllib.parse.unquote(split.path).rstrip("/"), {k: set(v) for k, v in query.items()}


def same_url(wanted: str, said: str) -> bool:
  """Same host, same path, and every value of the wanted query; " |OR| " stands between alternatives."""
  host, path, query = parts(said)
  for one in wanted.split(" |OR| "):
    want_host, want_path, want_query = parts(one)
    if (want_host, want_path) == (host, path) and all(v <= query.get(k, set()) for k, v in want_query.items()):
      return True
  return False
