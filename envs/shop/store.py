"""A small shop: its SQLite database, its pages over HTTP on 127.0.0.1, and its pop-ups. One customer, no password, no script needed."""

from __future__ import annotations

import html
import http.server
import random
import sqlite3
import threading
import urllib.parse

from envs.loopback import Served

COLORS, NOUNS = ("red", "blue", "green", "black", "white", "yellow"), ("mug", "lamp", "chair", "shirt", "bag", "clock", "plate", "pen")
MAKES = ("Plain", "Tall", "Small", "Old")
SHOWN = 6  # results of a search
KINDS = ("letter", "rate", "cookies")
POPUPS = {  # title, the button that only closes it, the other one, which leads away to the first page
  "letter": ("Get our newsletter!", "No thanks", "Subscribe"),
  "rate": ("Do you like this shop?", "Later", "Rate us"),
  "cookies": ("This shop uses cookies.", "Only needed", "Accept all"),
}
SCHEMA = """
  CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, make TEXT, color TEXT, noun TEXT, cents INTEGER);
  CREATE TABLE views (at INTEGER PRIMARY KEY AUTOINCREMENT, product INTEGER);
  CREATE TABLE cart (product INTEGER PRIMARY KEY, count INTEGER);
  CREATE TABLE orders (id INTEGER PRIMARY KEY AUTOINCREMENT);
  CREATE TABLE lines (order_id INTEGER, product INTEGER, count INTEGER, cents INTEGER);
"""
STYLE = """* { box-sizing: border-box } body { margin: 0; font: 12px sans-serif; width: 320px }
header { background: #234; padding: 5px; height: 32px } a { color: #026 } header a { color: #fff; margin-left: 8px }
form { display: inline } input { width: 120px; height: 20px } button { height: 22px } main { padding: 5px }
li { height: 24px; list-style: none } ul { margin: 4px 0; padding: 0 } h1 { font-size: 14px; margin: 4px 0 }
.popup { position: fixed; left: 12px; top: 60px; width: 220px; height: 110px; background: #fff; border: 3px solid #c30; padding: 12px }
.shade { position: fixed; inset: 0; background: #0008 }"""


class Store:
  """One shop at one time. seed: of its products' order and prices and of its pop-ups; every `begin` starts a new one."""

  def __init__(self):
    self.lock = threading.Lock()
    self.base: sqlite3.Connection | None = None
    self.begin(0, 0.0, 0, ())
    store = self

    class Handler(_Handler):
      def __init__(self, *args):
        self.store = store
        super().__init__(*args)

    self.served = Served(Handler)

  def begin(self, seed: int, chance: float, most: int, kinds: tuple[str, ...]) -> None:
    """A new database, and the pop-ups that will come: with this chance a page, at most so many, of these kinds."""
    rng = random.Random(seed)
    names = [(make, color, noun) for make in MAKES for color in COLORS for noun in NOUNS]
    rng.shuffle(names)
    with self.lock:
      if self.base is not None:
        self.base.close()
      self.base = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
      self.base.executescript(SCHEMA)
      prices = rng.sample(range(199, 9999, 10), len(names))
      rows = [(f"{m} {c} {n}", m, c, n, cents) for (m, c, n), cents in zip(names, prices)]
      self.base.executemany("INSERT INTO products (name, make, color, noun, cents) VALUES (?, ?, ?, ?, ?)", rows)
    self.luck, self.chance, self.most, self.kinds, self.popup = rng, chance, most, kinds, ""

  def ask(self, sql: str, *values) -> list[tuple]:
    with self.lock:
      return self.base.execute(sql, values).fetchall()

  def results(self, words: str) -> list[tuple]:
    """(id, name, cents) of the products that have all these words, in the shop's order."""
    wanted = words.casefold().split()
    rows = self.ask("SELECT id, name, cents FROM products ORDER BY id")
    return [row for row in rows if wanted and all(word in row[1].casefold().split() for word in wanted)]

  def turn_page(self) -> None:
    """A page is about to be shown: perhaps with a pop-up on it, which stays until one of its buttons is clicked."""
    if not self.popup and self.most > 0 and self.luck.random() < self.chance:
      self.popup, self.most = self.luck.choice(self.kinds), self.most - 1


def euro(cents: int) -> str:
  return f"{cents // 100}.{cents % 100:02d}"


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  store: Store

  def log_message(self, format: str, *args) -> None:
    """Requests are not logged."""

  def do_GET(self) -> None:
    split = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(split.query))
    words = split.path.strip("/").split("/")
    if words == ["search"]:
      self._page("Search", results_page(self.store, query.get("q", "")))
    elif words[0] == "product" and len(words) == 2 and words[1].isdecimal():
      self._page("Product", product_page(self.store, int(words[1])))
    elif words == ["cart"]:
      self._page("Cart", cart_page(self.store))
    elif words == ["orders"]:
      orders = self.store.ask("SELECT order_id, name, count FROM lines JOIN products ON product = id ORDER BY order_id")
      self._page("Orders", "<ul>" + "".join(f"<li>Order {n}: {count} x {name}</li>" for n, name, count in orders) + "</ul>")
    elif words == [""]:
      self._page("Shop", "<p>What are you looking for?</p>")
    else:
      self.send_error(404)

  def do_POST(self) -> None:
    size = int(self.headers.get("Content-Length", 0))
    form = dict(urllib.parse.parse_qsl(self.rfile.read(min(size, 1 << 16)).decode(errors="replace")))
    product, store = int(form.get("product", "0")) if form.get("product", "0").isdecimal() else 0, self.store
    if self.path == "/add" and store.ask("SELECT id FROM products WHERE id = ?", product):
      store.ask("INSERT INTO cart VALUES (?, 1) ON CONFLICT (product) DO UPDATE SET count = count + 1", product)
      self._go("/cart")
    elif self.path == "/remove":
      store.ask("DELETE FROM cart WHERE product = ?", product)
      self._go("/cart")
    elif self.path == "/order" and store.ask("SELECT product FROM cart"):
      store.ask("INSERT INTO orders DEFAULT VALUES")
      lines = "INSERT INTO lines SELECT (SELECT max(id) FROM orders), product, count, cents FROM cart JOIN products ON product = id"
      store.ask(lines)
      store.ask("DELETE FROM cart")
      self._go("/orders")
    elif self.path == "/popup":
      closes, back = POPUPS[store.popup][1] if store.popup else "", form.get("back", "/")
      store.popup = ""
      self._go(back if form.get("button") == closes and back.startswith("/") and not back.startswith("//") else "/")
    else:
      self._go("/")

  def _go(self, path: str) -> None:
    self.send_response(303)
    self.send_header("Location", path)
    self.send_header("Content-Length", "0")
    self.end_headers()

  def _page(self, title: str, body: str) -> None:
    self.store.turn_page()
    top = "<header><form action=/search><input name=q aria-label=Search><button>Search</button></form><a href=/cart>Cart</a></header>"
    over = popup_box(self.store.popup, self.path) if self.store.popup else ""
    page = f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>{top}<main>{body}</main>{over}"
    data = page.encode()
    self.send_response(200)
    self.send_header("Content-Type", "text/html; charset=utf-8")
    self.send_header("Cache-Control", "no-store")
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)


def popup_box(kind: str, path: str) -> str:
  title, closes, other = POPUPS[kind]
  back = f"<input type=hidden name=back value='{html.escape(path, quote=True)}'>"
  buttons = "".join(f"<button name=button value='{name}'>{name}</button> " for name in (closes, other))
  return f"<div class=shade></div><div class=popup role=dialog><h1>{title}</h1><form action=/popup method=post>{back}{buttons}</form></div>"


def results_page(store: Store, words: str) -> str:
  rows = store.results(words)
  items = "".join(f"<li><a href=/product/{n}>{html.escape(name)}</a> {euro(cents)}</li>" for n, name, cents in rows[:SHOWN])
  return f"<h1>{len(rows)} results for {html.escape(words[:80])}</h1><ul>{items}</ul>"


def product_page(store: Store, product: int) -> str:
  found = store.ask("SELECT name, cents FROM products WHERE id = ?", product)
  if not found:
    return "<p>There is no such product.</p>"
  store.ask("INSERT INTO views (product) VALUES (?)", product)
  button = f"<form action=/add method=post><button name=product value={product}>Add to cart</button></form>"
  return f"<h1>{html.escape(found[0][0])}</h1><p>Price: {euro(found[0][1])}</p>{button}"


def cart_page(store: Store) -> str:
  rows = store.ask("SELECT id, name, count, cents FROM cart JOIN products ON product = id ORDER BY id")
  if not rows:
    return "<p>Your cart is empty.</p>"
  remove = "<form action=/remove method=post><button name=product value={}>Remove</button></form>"
  items = "".join(f"<li>{count} x {html.escape(name)} {remove.format(n)}</li>" for n, name, count, _ in rows)
  total = sum(count * cents for _, _, count, cents in rows)
  return f"<ul>{items}</ul><p>Total: {euro(total)}</p><form action=/order method=post><button>Place order</button></form>"
