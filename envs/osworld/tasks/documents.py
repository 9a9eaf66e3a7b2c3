"""Families for LibreOffice: Writer, the subscript of the lesson first among them, and Calc."""

from __future__ import annotations

import random

from envs.osworld.tasks import office
from envs.osworld.tasks.spec import DOCUMENTS, Spec, fetched, keys, launch, window, write

FORMULAS = (
  "H2O", "CO2", "CH4", "NH3", "SO2", "N2O", "NO2", "O3", "O2", "H2S", "SO3", "PH3", "CS2", "BF3", "HNO3", "TiO2", "SiO2", "Cl2O", "H2CO",
  "FeS2", "ZnI2", "MgF2", "CaC2", "NaN3", "PbO2", "MnO2",
)  # fmt: skip
PAIRS = (
  "H2O2", "N2O4", "C2H6", "C2H4", "P4S3", "B2H6", "N2H4", "S2F2", "N2O5", "P2O5", "C6H6", "C4H8", "C3H8", "C3H6", "C5H8", "C2N2", "P2H4",
  "C2F4", "N2F4", "N2F2", "O2F2", "S4N4", "C6H8", "B4H8",
)  # fmt: skip
POWERS = ("x2", "y3", "a4", "b5", "z2", "n3", "m2", "r3", "t4", "k5", "c2", "s3", "v6", "p7", "q8", "w9")
WORDS = ("river", "garden", "winter", "market", "island", "bridge", "candle", "forest", "harbour", "mountain", "village", "window")
ADDED = ("The rest follows tomorrow.", "Please answer soon.", "All of it was checked.", "Nobody has objected.", "More is to come.")
WAIT = ("Action: wait()",)
SAVED = (*keys("ctrl s"), *WAIT)
KEPT = (*SAVED, *keys("enter"), *WAIT)  # ENTER: keep the format, which the office program asks about


def _open(name: str) -> tuple[dict, ...]:
  return (launch("libreoffice", "--norestore", "--nologo", f"{DOCUMENTS}/{name}"), window(name))


def _writer(name: str, paragraphs: list[str], instruction: str, runs: list[list], script: tuple[str, ...], saved=SAVED) -> Spec:
  """A document that is open in Writer. runs: what each paragraph must be, as [text, [styles]]."""
  data = office.docx(paragraphs) if name.endswith(".docx") else office.odt(paragraphs)
  return Spec(
    f"{instruction} The document {name} is open in Writer; save it when you are done.",
    _open(name),
    fetched(f"{DOCUMENTS}/{name}", "practice_document_runs", {"expected": runs}),
    script + saved,
    {name: (f"{DOCUMENTS}/{name}", data)},
    keys("ctrl home", "space", "backspace", "ctrl s") if saved == SAVED else (),
  )


def _digit(formula: str) -> int:
  return next(i for i, c in enumerate(formula) if c.isdigit())


def _select(text: str, first: int, last: int) -> tuple[str, ...]:
  """Keys that select text[first:last] of a paragraph which is all there is, from the nearer end."""
  if first <= len(text) - last:
    return keys("ctrl home", *["right"] * first, *["shift right"] * (last - first))
  return keys("ctrl end", *["left"] * (len(text) - last), *["shift left"] * (last - first))


def _raised(text: str, style: str, key: str, ending: str, rng: random.Random) -> Spec:
  at = _digit(text)
  runs = [[[part, styles] for part, styles in ((text[:at], []), (text[at], [style]), (text[at + 1 :], [])) if part]]
  told = f"Turn the {text[at]} in {text} into a {style}."
  script = (*_select(text, at, at + 1), *keys(key))
  return _writer(f"{text}{ending}", [text], told, runs, script, KEPT if ending == ".docx" else SAVED)


def writer_subscript(rng: random.Random) -> Spec:
  return _raised(rng.choice(FORMULAS), "subscript", "ctrl shift b", ".odt", rng)


def writer_subscript_docx(rng: random.Random) -> Spec:
  return _raised(rng.choice(FORMULAS), "subscript", "ctrl shift b", ".docx", rng)


def writer_superscript(rng: random.Random) -> Spec:
  return _raised(rng.choice(POWERS), "superscript", "ctrl shift p", ".odt", rng)


def writer_two_subscripts(rng: random.Random) -> Spec:
  """Both digits of a formula whose last letter is followed by the second one."""
  text = rng.choice(PAIRS)
  first, second = text[:2], text[2:]
  runs = [[[first[0], []], [first[1], ["subscript"]], [second[0], []], [second[1], ["subscript"]]]]
  script = keys("ctrl home", "right", "shift right", "ctrl shift b", "end", "shift left", "ctrl shift b")
  return _writer(f"{text}.odt", [text], f"Turn both numbers in {text} into subscripts.", runs, script)


def _styled(rng: random.Random, style: str, key: str, verb: str) -> Spec:
  """The first word, the last word or all of a line."""
  words = rng.sample(WORDS, 3)
  text, which = " ".join(words), rng.choice(("first", "last", "all"))
  if which == "all":
    script, runs, what = keys("ctrl a", key), [[[text, [style]]]], "all of the text"
  elif which == "first":
    script = keys("ctrl home", "ctrl shift right", "shift left", key)
    runs, what = [[[words[0], [style]], [text[len(words[0]) :], []]]], f"the word {words[0]}, and only that,"
  else:
    script = keys("ctrl end", "ctrl shift left", key)
    runs, what = [[[text[: -len(words[2])], []], [words[2], [style]]]], f"the word {words[2]}, and only that,"
  return _writer(f"{words[1]}.odt", [text], f"Make {what} {verb}.", runs, script)


def writer_bold(rng: random.Random) -> Spec:
  return _styled(rng, "bold", "ctrl b", "bold")


def writer_italic(rng: random.Random) -> Spec:
  return _styled(rng, "italic", "ctrl i", "italic")


def writer_underline(rng: random.Random) -> Spec:
  return _styled(rng, "underline", "ctrl u", "underlined")


def writer_append(rng: random.Random) -> Spec:
  words, more = rng.sample(WORDS, 3), rng.choice(ADDED)
  text = " ".join(words).capitalize() + "."
  script = (*keys("ctrl end"), write("\n"), write(more))
  return _writer(f"{words[1]}.odt", [text], f"Add a paragraph at the end: {more}", [[[text, []]], [[more, []]]], script)


def writer_delete_paragraph(rng: random.Random) -> Spec:
  lines = [" ".join(pair).capitalize() + "." for pair in zip(*[iter(rng.sample(WORDS, 6))] * 2)]
  script = keys("ctrl home", "shift down", "delete")
  told = f"Delete the first paragraph, which says: {lines[0]}"
  return _writer("letter.odt", lines, told, [[[line, []]] for line in lines[1:]], script)


def _sheet(rng: random.Random) -> tuple[str, list[list]]:
  name = f"{rng.choice(WORDS)}.xlsx"
  items = rng.sample(WORDS, 4)
  return name, [["item", "price"], *([item, rng.randrange(2, 99)] for item in items)]


def _calc(name: str, rows: list[list], instruction: str, rules: list[dict], script: tuple[str, ...]) -> Spec:
  path = f"{DOCUMENTS}/{name}"
  evaluator = {"func": "compare_table", "result": {"type": "vm_file", "path": path, "dest": name}, "options": {"rules": rules}}
  told = f"{instruction} The table {name} is open in Calc; save it, in the format that it has, when you are done."
  return Spec(told, _open(name), evaluator, script + KEPT, {name: (path, office.xlsx(rows))})


def _cell(place: str, **props: dict) -> dict:
  return {"type": "check_cell", "sheet_idx": 0, "coordinate": place, "props": props}


def _value(place: str, value: float | str) -> dict:
  return _cell(place, value={"method": "eq", "ref": value})


def _kept(rows: list[list], *changed: str) -> list[dict]:
  """The other numbers are as they were."""
  return [_value(f"B{i}", row[1]) for i, row in enumerate(rows[1:], 2) if f"B{i}" not in changed]


def calc_enter(rng: random.Random) -> Spec:
  name, rows = _sheet(rng)
  at, value = rng.randrange(1, 5), rng.randrange(100, 999)
  script = (*keys("ctrl home", "right", *["down"] * at), write(f"{value}\n"))
  rules = [_value(f"B{at + 1}", value), *_kept(rows, f"B{at + 1}")]
  return _calc(name, rows, f"Change the price of {rows[at][0]} to {value}.", rules, script)


def _formula(rng: random.Random, function: str, told: str, value) -> Spec:
  name, rows = _sheet(rng)
  numbers = [row[1] for row in rows[1:]]
  script = (*keys("ctrl home", "right", *["down"] * 5), write(f"={function}(B2:B5)\n"))
  rules = [_cell("B6", value={"method": "approx:0.001", "ref": value(numbers)}), *_kept(rows)]
  return _calc(name, rows, f"Put {told} of the prices B2 to B5 into B6.", rules, script)


def calc_sum(rng: random.Random) -> Spec:
  return _formula(rng, "SUM", "the sum", sum)


def calc_average(rng: random.Random) -> Spec:
  return _formula(rng, "AVERAGE", "the average", lambda numbers: sum(numbers) / len(numbers))


def calc_largest(rng: random.Random) -> Spec:
  return _formula(rng, "MAX", "the largest", max)


def calc_bold(rng: random.Random) -> Spec:
  name, rows = _sheet(rng)
  rules = [_cell(place, font_bold={"method": "eq", "ref": True}) for place in ("A1", "B1")]
  rules += [_cell("A2", font_bold={"method": "ne", "ref": True}), *_kept(rows)]
  script = keys("ctrl home", "shift right", "ctrl b")
  return _calc(name, rows, "Make the two headings in the first row bold, and nothing else.", rules, script)


def calc_clear(rng: random.Random) -> Spec:
  name, rows = _sheet(rng)
  at = rng.randrange(1, 5)
  rules = [_cell(f"B{at + 1}", value={"method": "eq", "ref": None}), *_kept(rows, f"B{at + 1}")]
  script = keys("ctrl home", "right", *["down"] * at, "delete")
  return _calc(name, rows, f"Empty the cell with the price of {rows[at][0]}.", rules, script)


FAMILIES = (
  writer_subscript, writer_subscript_docx, writer_superscript, writer_two_subscripts, writer_bold, writer_italic, writer_underline,
  writer_append, writer_delete_paragraph, calc_enter, calc_sum, calc_average, calc_largest, calc_bold, calc_clear,
)  # fmt: skip
