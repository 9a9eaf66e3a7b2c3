"""The shop without a browser: what its database says after requests, what a task wants of it, and lists that hold out what they say."""

import http.client
import urllib.parse

import pytest

from core.schema import SUCCESS, Limits, Task
from envs import scripted, shop
from envs.chromium import Refused
from envs.errors import InfraError
from envs.shop.store import Store


@pytest.fixture
def store():
  made = Store()
  yield made
  made.served.close()


def send(store, path, **form):
  """(status, where it leads, body) of a GET, or of a POST with a form."""
  talk = http.client.HTTPConnection(store.served.place, timeout=5)
  if form:
    talk.request("POST", path, urllib.parse.urlencode(form), {"Content-Type": "application/x-www-form-urlencoded"})
  else:
    talk.request("GET", path)
  reply = talk.getresponse()
  out = reply.status, reply.getheader("Location"), reply.read().decode()
  talk.close()
  return out


def begin(store, seed=5, chance=0.0, most=0, kinds=("letter",)):
  store.begin(seed, chance, most, kinds)


def test_searching_finds_every_word_and_nothing_else(store):
  begin(store)
  assert len(store.results("red mug")) == 4 and {name.split(maxsplit=1)[1] for _, name, _ in store.results("Mug RED")} == {"red mug"}
  assert len(store.results("mug")) == 24 and store.results("redmug") == [] and store.results(" ") == []
  assert "4 results for red mug" in send(store, "/search?q=red+mug")[2]
  assert "&lt;b&gt;" in send(store, "/search?q=%3Cb%3E")[2]


def test_one_seed_is_one_shop(store):
  begin(store, 1)
  first = store.ask("SELECT * FROM products")
  send(store, "/add", product=first[0][0])
  begin(store, 1)
  assert store.ask("SELECT * FROM products") == first and store.ask("SELECT * FROM cart") == []
  begin(store, 2)
  assert store.ask("SELECT * FROM products") != first
  cents = [row[5] for row in first]
  assert len(first) == len(set(cents)) == 192  # 4 makes, 6 colours, 8 nouns; no two prices alike, so the cheapest is one


def test_the_last_page_looked_at_counts_and_a_cart_spoils_it(store):
  params = {"family": "open", "color": "red", "noun": "mug", "place": 1}
  begin(store)
  assert not shop.done(store, params)
  first, second = (row[0] for row in store.results("red mug")[:2])
  send(store, f"/product/{second}")
  assert shop.done(store, params)
  send(store, f"/product/{first}")
  assert not shop.done(store, params)
  send(store, f"/product/{second}")
  send(store, "/add", product=second)
  assert not shop.done(store, params)


def test_a_cart_must_hold_exactly_this(store):
  params = {"family": "cart", "make": "Tall", "color": "blue", "noun": "pen", "count": 2}
  begin(store)
  wanted, other = store.results("tall blue pen")[0][0], store.results("old red mug")[0][0]
  send(store, "/add", product=wanted)
  assert not shop.done(store, params)
  send(store, "/add", product=wanted)
  assert shop.done(store, params)
  send(store, "/add", product=other)
  assert not shop.done(store, params)
  send(store, "/remove", product=other)
  assert shop.done(store, params)
  send(store, "/order", product="")
  assert not shop.done(store, params)


def test_buying_is_one_order_of_the_cheapest(store):
  params = {"family": "buy", "color": "green", "noun": "bag"}
  begin(store)
  rows = sorted(store.results("green bag"), key=lambda row: row[2])
  send(store, "/order", product="")  # an empty cart is no order
  assert store.ask("SELECT * FROM orders") == []
  send(store, "/add", product=rows[1][0])
  send(store, "/order", product="")
  assert not shop.done(store, params)
  begin(store)
  send(store, "/add", product=rows[0][0])
  assert not shop.done(store, params)
  assert send(store, "/order", product="")[:2] == (303, "/orders") and shop.done(store, params)


def test_a_popup_stays_until_it_is_answered_and_no_more_come_than_said(store):
  begin(store, chance=1.0, most=1)
  assert "newsletter" in send(store, "/cart")[2] and "newsletter" in send(store, "/cart")[2]
  assert send(store, "/popup", button="No thanks", back="/cart")[1] == "/cart"
  assert "newsletter" not in send(store, "/cart")[2]
  begin(store, chance=1.0, most=1)
  send(store, "/")
  assert send(store, "/popup", button="Subscribe", back="/cart")[1] == "/"  # the other button leads away
  begin(store, chance=1.0, most=1)
  send(store, "/")
  assert send(store, "/popup", button="No thanks", back="//elsewhere/")[1] == "/"


def test_nonsense_changes_nothing(store):
  begin(store)
  for path, form in [("/add", {"product": "9999"}), ("/add", {"product": "1; DROP TABLE cart"}), ("/nothing", {"a": "b"})]:
    assert send(store, path, **form)[0] == 303
  assert store.ask("SELECT * FROM cart") == [] and send(store, "/nothing")[0] == 404 and "no such" in send(store, "/product/777")[2]


def test_what_is_held_out_is_never_practised():
  cfg = shop.defaults()
  lists = shop.task_lists("shop/browser", cfg)
  what = {name: {task.goal for task in tasks} for name, tasks in lists.items()}
  assert [len(lists[n]) for n in ("practice", "in_domain", "held_out")] == [256, 32, 96]
  assert not what["practice"] & what["held_out"] and what["in_domain"] <= what["practice"]
  assert len({t.id for tasks in (lists["practice"], lists["held_out"]) for t in tasks}) == 352
  assert {t.family for t in lists["held_out"]} == set(shop.FAMILIES)


@pytest.mark.parametrize("name, value", [("popup_kinds", ("corner",)), ("families", ()), ("popup_chance", 2.0), ("held_out_tasks", 97),
  ("text_chars", 5), ("network", "closed"), ("settle_least", 9.0), ("allowed", ("host",))])  # fmt: skip
def test_knobs_are_checked(name, value):
  cfg = shop.defaults()
  cfg.browser = "/bin/true"
  shop.check(cfg)
  cfg[name] = value
  with pytest.raises(ValueError, match=f"env.{name} is "):
    shop.check(cfg)


def test_demonstrations_that_do_not_pass_or_break_off_are_played_once_more_and_left_out(capsys):
  """What each task's plays come to, in turn: an error that is raised, or a score."""
  fates = {"a": [1.0], "b": [Refused("no such link"), 1.0], "c": [0.0, 0.0, 1.0], "d": [InfraError("died"), 0.0], "e": [0.0, 1.0]}
  played = []

  class Played:
    end_cause = "agent"

    def __init__(self, score):
      self.rewards = {SUCCESS: score}

  def solve(env, task):
    played.append(task.id)
    fate = fates[task.id].pop(0)
    if isinstance(fate, Exception):
      raise fate
    return Played(fate)

  tasks = [Task(name, "", "shop/browser", "open", 0, {}, Limits(5)) for name in fates]
  assert [e.rewards for e in scripted.passing(solve, None, tasks, "shop/browser")] == [{SUCCESS: 1.0}] * 3
  assert "".join(played) == "abbccddee"
  assert capsys.readouterr().out.endswith("2 of 5 scripted solutions did not pass and are left out\n")


def test_where_no_scripted_solution_passes_the_environment_is_named_before_the_rest_is_played():
  """Three tasks, twice each, then an end; five would have been played."""
  played = []

  def solve(env, task):
    played.append(task.id)
    raise InfraError("the browser died")

  tasks = [Task(name, "", "shop/browser", "open", 0, {}, Limits(5)) for name in "abcde"]
  with pytest.raises(ValueError, match="environment shop/browser: no scripted solution of a, b, c passes .*the browser died"):
    scripted.passing(solve, None, tasks, "shop/browser")
  assert "".join(played) == "aabbcc"


def test_a_step_limit_that_no_scripted_solution_fits_into_is_named_as_such():
  class Cut:
    rewards, end_cause, step_limit = {SUCCESS: 0.0}, "steps", 2

  tasks = [Task("a", "", "shop/browser", "open", 0, {}, Limits(2))]
  with pytest.raises(ValueError, match=r"no scripted solution of a passes \(the last: its step limit of 2 ended it, env.steps\)"):
    scripted.passing(lambda env, task: Cut(), None, tasks, "shop/browser")
