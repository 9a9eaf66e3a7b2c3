"""A local page to read a run's episodes, compare the tries of a group, and label episodes blind to the grader's verdict.

  python -m tools.episodes --workdir=runs/android [--port=0] [--by=NAME]        prints the address to open; Ctrl-C ends it
  python -m tools.episodes --workdir=runs/android --export=out.jsonl --where="update=5..10&verdict=fail"

It listens on 127.0.0.1 only. The address holds a token that opens the page once; a cookie goes on from there. Requests without it, from
another site or to another host name are refused. Nothing comes from elsewhere, and whatever an agent or a task wrote is shown as text.
The run may go on writing. The one thing that is written here is a label (rollout/labels.py), and exports (workdir/exports/). See
docs/episodes.md. Exit code 0; 2 for what cannot be read.
"""

from __future__ import annotations

import hmac
import json
import os
import pathlib
import secrets
import signal
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode

import jinja2
import werkzeug
from absl import flags
from werkzeug import exceptions
from werkzeug.routing import Map, Rule
from werkzeug.serving import WSGIRequestHandler, make_server

if __package__ in (None, ""):  # python tools/episodes.py
  sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from core.config import one_line, run_command
from rollout import labels as store_labels
from rollout.store import FILTERS, EpisodeStore
from tools import labels
from tools.episode_rows import BLIND, LABELS, VERDICTS, Filters, Rows, final, parse_filters, shown, value_line

FOLDER = pathlib.Path(__file__).resolve().parent / "episode_page"
ASSETS = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
HOSTS = ("127.0.0.1", "localhost")
MOST_EXPORTED = 1000  # episodes written while a browser waits
CSP = "default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
HEADERS = {
  "Content-Security-Policy": CSP,
  "X-Content-Type-Options": "nosniff",
  "Referrer-Policy": "same-origin",
  "Cross-Origin-Resource-Policy": "same-origin",
  "Cross-Origin-Opener-Policy": "same-origin",
}
ROUTES = Map([
  Rule("/", endpoint="list"),
  Rule("/episode/<int:key>", endpoint="episode"),
  Rule("/group", endpoint="group"),
  Rule("/label", endpoint="next_label"),
  Rule("/label/<int:key>", endpoint="label", methods=["GET"]),
  Rule("/label/<int:key>", endpoint="give", methods=["POST"]),
  Rule("/grader", endpoint="grader"),
  Rule("/labels.jsonl", endpoint="labels_file"),
  Rule("/export", endpoint="export", methods=["POST"]),
  Rule("/screen/<ref>.png", endpoint="screen"),
  Rule("/static/<name>", endpoint="asset"),
])  # fmt: skip


class Request(werkzeug.Request):
  max_content_length = 2**16
  trusted_hosts = HOSTS  # another name that leads here (DNS rebinding) is refused


class Response(werkzeug.Response):
  default_mimetype = "text/html"


class EpisodePage:
  """The page of one workdir as a WSGI application. token: what its address must hold; by: whose labels are given here."""

  def __init__(self, workdir: str | os.PathLike, token: str, by: str = ""):
    self.workdir, self.token, self.by = pathlib.Path(os.path.abspath(workdir)), token, by
    self.cookie = secrets.token_urlsafe(32)
    self.rows = Rows(self.workdir)
    self.store = EpisodeStore(self.workdir / "episodes")
    self.seen: set[int] = set()  # episodes whose verdict was shown here before they were labelled
    self.assets = {name: (FOLDER / name).read_bytes() for name in ASSETS}
    loader = jinja2.FileSystemLoader(FOLDER)
    self.jinja = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    self.jinja.filters |= {"num": number, "signed": lambda x: number(x, "+"), "pct": percent}
    self.jinja.globals |= {"query": query, "run": self.workdir.name, "verdicts": VERDICTS, "label_kinds": LABELS}

  def __call__(self, environ: dict, start_response: Any) -> Any:
    request = Request(environ)
    try:
      response = self.guard(request) or self.answer(request)
    except exceptions.HTTPException as error:
      response = self.problem(error.code or 500, error.description or error.name)
    except ValueError as error:
      response = self.problem(400, one_line(error))
    except (sqlite3.Error, OSError) as error:
      response = self.problem(503, f"the store cannot be read: {one_line(error)}")
    response.headers.update(HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")
    return response(environ, start_response)

  def guard(self, request: Request) -> werkzeug.Response | None:
    """Lets a request pass, answers the one that brings the token, refuses the rest."""
    host = request.host  # SecurityError (400) unless one of HOSTS
    name = f"practice_{host.rpartition(':')[2]}"
    if request.path == "/" and "token" in request.args:
      if not same(request.args["token"], self.token):
        raise exceptions.Forbidden("this token is not the one of this page: open the address that the program printed")
      response = werkzeug.utils.redirect("/", 303)
      response.set_cookie(name, self.cookie, httponly=True, samesite="Strict", path="/")
      return response
    if not same(request.cookies.get(name, ""), self.cookie):
      raise exceptions.Forbidden("no token: open the address that the program printed, with ?token=")
    if request.method == "POST" and request.headers.get("Origin") != f"http://{host}":
      raise exceptions.Forbidden("a form of another site: only this page may send one")
    return None

  def answer(self, request: Request) -> werkzeug.Response:
    endpoint, values = ROUTES.bind_to_environ(request.environ).match()
    return getattr(self, f"on_{endpoint}")(request, **values)

  def html(self, template: str, code: int = 200, **values: Any) -> Response:
    text = self.jinja.get_template(template).render(**values)
    return Response(text.encode("utf-8", "backslashreplace"), code)  # half a surrogate pair from an agent is no reason to fail

  def problem(self, status: int, text: str) -> Response:
    return self.html("problem.html", status, status=status, text=text)

  def on_list(self, request: Request) -> Response:
    filters = parse_filters(request.args)
    rows, older, newer = self.rows.page(filters, key_of(request, "before"), key_of(request, "after"))
    return self.html("list.html", filters=filters, rows=rows, older=older, newer=newer, count=self.rows.count(filters),
                     choices=self.rows.choices())  # fmt: skip

  def on_episode(self, request: Request, key: int) -> Response:
    return self.show(self.found(key), parse_filters(request.args), blind=False)

  def found(self, key: int) -> dict[str, Any]:
    row = self.rows.one(key) if key < 2**63 else None
    if row is None:
      raise exceptions.NotFound(f"there is no episode {key}: a resumed run may have taken it back")
    return row

  def show(self, row: dict[str, Any], filters: Filters, blind: bool, labelling: bool = False) -> Response:
    """One episode. blind: nothing that tells the verdict reaches the template."""
    if not blind and row["label"] is None:
      self.seen.add(row["id"])
    steps = shown(self.store.steps(row["id"]), self.store.screens, blind)
    known = {k: row[k] for k in ("id", "task_id", "goal", "family", "seed", "policy_version", "at_update")} if blind else row
    line = None if blind else value_line(steps, row["notes"].get("final_value"))
    newer, older = (None, None) if labelling else self.rows.neighbours(row["id"], filters)
    return self.html("episode.html", row=known, steps=steps, final=final(row, self.store.screens), blind=blind, labelling=labelling,
                     filters=filters, line=line, newer=newer, older=older)  # fmt: skip

  def on_group(self, request: Request) -> Response:
    rows = self.rows.group(request.args.get("id", ""), key_of(request, "update") or 0)
    if not rows:
      raise exceptions.NotFound("there is no such group in this update")
    self.seen |= {row["id"] for row in rows if row["label"] is None}
    tries = [(row, shown(self.store.steps(row["id"]), self.store.screens, False)) for row in rows]
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    most = max((abs(row["advantage"]) for row in rows if row["advantage"] is not None), default=0.0) or 1.0
    first = len({steps[0]["text"] for _, steps in tries if steps})
    return self.html("group.html", tries=tries, rewards=rewards, most=most, first=first, filters=parse_filters({}))

  def on_next_label(self, request: Request) -> werkzeug.Response:
    filters = blind_filters(request)
    key = self.rows.draw(filters, self.seen)
    if key is None:
      return self.html("done.html", filters=filters)
    return werkzeug.utils.redirect(f"/label/{key}{query(filters.blind)}", 303)

  def on_label(self, request: Request, key: int) -> Response:
    row, filters = self.found(key), blind_filters(request)
    if row["label"] is None:
      self.may_label(row)
    return self.show(row, filters, blind=row["label"] is None, labelling=True)

  def may_label(self, row: Mapping[str, Any]) -> None:
    if row["success"] is None or row["end_cause"] == "unreadable":
      raise exceptions.Conflict(f"episode {row['id']} never reached the grader: a label says nothing of it")
    if row["id"] in self.seen:
      raise exceptions.Conflict(f"the verdict on episode {row['id']} has been shown: a label would not be blind; label another")

  def on_give(self, request: Request, key: int) -> werkzeug.Response:
    """A label, or one taken back. It is never turned round: after the verdict a second answer is not blind."""
    row, filters, said = self.found(key), blind_filters(request), request.form.get("verdict", "")
    here = werkzeug.utils.redirect(f"/label/{key}{query(filters.blind)}", 303)
    if said == "undo":
      labels.withdraw(self.workdir, key)
      self.seen.add(key)
      return werkzeug.utils.redirect(f"/label{query(filters.blind)}", 303)
    if said not in ("pass", "fail"):
      raise ValueError(f"verdict is {said[:20]!r}, wanted pass, fail or undo")
    if row["label"] is None:
      self.may_label(row)
      store_labels.put(self.workdir, {key: said == "pass"}, self.by)
    elif bool(row["label"]) != (said == "pass"):
      raise exceptions.Conflict(f"episode {key} has a label, and its verdict was shown: take it back (u) and label another")
    return here

  def on_grader(self, request: Request) -> Response:
    found = store_labels.measured(self.workdir)
    every = self.rows.count(parse_filters({"label": "yes"}))
    differ, more, _ = self.rows.page(parse_filters({"label": "disagree"}))
    return self.html("grader.html", found=found, every=every, differ=differ, more=more, filters=parse_filters({}))

  def on_labels_file(self, request: Request) -> Response:
    name = {"Content-Disposition": 'attachment; filename="labels.jsonl"'}
    return Response(labels.jsonl(self.workdir), mimetype="application/jsonl", headers=name)

  def on_export(self, request: Request) -> Response:
    if request.form.get("group"):  # one episode
      names = ("group", "episode", "update")
      wanted = {k: request.form.get(k, "") for k in names} | {k: int(request.form.get(k, "")) for k in names[1:]}
      count = 1
    else:
      filters = parse_filters(request.args)
      wanted, count = exportable(filters), self.rows.count(filters)
    if count > MOST_EXPORTED:
      raise ValueError(f"{count} episodes are more than {MOST_EXPORTED}: narrow the filters, or python -m tools.episodes --export=FILE")
    path = self.workdir / "exports" / f"episodes-{secrets.token_hex(4)}.jsonl"
    return self.html("exported.html", path=path, count=self.store.export_jsonl(path, **wanted), filters=parse_filters(request.args))

  def on_screen(self, request: Request, ref: str) -> Response:
    try:
      data = self.store.screens.path(ref).read_bytes()
    except (ValueError, FileNotFoundError) as error:
      raise exceptions.NotFound("there is no such picture") from error
    return Response(data, mimetype="image/png", headers={"Cache-Control": "private, max-age=31536000, immutable"})

  def on_asset(self, request: Request, name: str) -> Response:
    if name not in ASSETS:
      raise exceptions.NotFound("there is no such file")
    return Response(self.assets[name], mimetype=ASSETS[name])


def same(given: str, wanted: str) -> bool:
  return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def query(*parts: Mapping[str, Any], **more: Any) -> str:
  """Parts of an address after its path, with the question mark; nothing where there are none."""
  joined = {k: v for part in (*parts, more) for k, v in part.items()}
  return f"?{urlencode(joined)}" if joined else ""


def number(x: float | None, sign: str = "") -> str:
  return "" if x is None else f"{x:{sign}.3g}"


def percent(x: float | None) -> str:
  return "none" if x is None else f"{100 * x:.1f}%"


def key_of(request: Request, name: str) -> int | None:
  value = request.args.get(name)
  if value is None:
    return None
  if not value.isascii() or not value.isdigit() or len(value) > 18:
    raise ValueError(f"{name} is {value[:60]!r}, wanted a whole number")
  return int(value)


def blind_filters(request: Request) -> Filters:
  filters = parse_filters(request.args)
  if told := set(filters.given) - set(BLIND):
    raise ValueError(f"a label must be blind: {', '.join(sorted(told))} would give the verdict away; filter by {', '.join(BLIND)}")
  return filters


def exportable(filters: Filters) -> dict[str, Any]:
  """The filters as EpisodeStore takes them. ValueError for those it does not know: an export never holds more than was asked for."""
  unknown = set(filters.store) - set(FILTERS) | ({"label"} if filters.label else set())
  if unknown:
    raise ValueError(f"trajectories cannot be exported by {', '.join(sorted(unknown))}; there are: {', '.join(FILTERS)}")
  return filters.store


class Handler(WSGIRequestHandler):
  timeout = 60  # seconds a browser may take to say what it wants

  def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
    """Nothing: the first address holds the token."""


def serve(workdir: pathlib.Path, port: int, by: str) -> None:
  """Serves until interrupted; SIGTERM counts as that."""
  token = secrets.token_urlsafe(32)
  server = make_server("127.0.0.1", port, EpisodePage(workdir, token, by), threaded=True, request_handler=Handler)
  signal.signal(signal.SIGTERM, signal.default_int_handler)  # not by way of SIGINT, which a shell's background jobs ignore
  print(f"http://127.0.0.1:{server.port}/?token={token}", flush=True)
  server.serve_forever()


def main(argv: Sequence[str]) -> int:
  if argv[1:]:
    raise ValueError(f"{argv[1]} is no flag: write --workdir={argv[1]}")
  workdir = pathlib.Path(os.path.abspath(FLAGS.workdir))
  labels.index_of(workdir)
  if not FLAGS.export:
    serve(workdir, FLAGS.port, FLAGS.by)
    return 0
  given = dict(parse_qsl(FLAGS.where, strict_parsing=bool(FLAGS.where)))
  wanted = exportable(parse_filters(given))
  if strange := set(given) - set(parse_filters(given).given):
    raise ValueError(f"--where names {', '.join(sorted(strange))}, wanted filters of the page, as in update=5..10&verdict=fail")
  with EpisodeStore(workdir / "episodes") as store:
    print(json.dumps({"file": FLAGS.export, "episodes": store.export_jsonl(FLAGS.export, **wanted)}), flush=True)
  return 0


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder of a run that train.py made, or is making.", required=True)
  flags.DEFINE_integer("port", 0, "Port on 127.0.0.1; 0 = any free one.", lower_bound=0, upper_bound=65535)
  flags.DEFINE_string("by", "", "Kept with each label: who gave it.")
  flags.DEFINE_string("export", "", "Write trajectories to this file and end.")
  flags.DEFINE_string("where", "", "With --export: filters as in the page's address.")
  run_command(main, sqlite3.DatabaseError)
