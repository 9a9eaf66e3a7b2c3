"""WebArena's checkers without a browser: what passes and what only looks like it, and whole task files."""

import json

import pytest

from core.schema import Limits, Task
from envs import answers, webarena
from envs.chromium import fence
from envs.errors import CheckerFailed


@pytest.mark.parametrize(
  "wanted, said, good",
  [("0", "$0.00", True), ("0", "10", False), ("1,234.50", "$1234.5", True), ("Quest Lumaflex", "  'quest lumaflex' ", True),
   ("Oct 5, 2022", "October 5th 2022", True), ("2022-10-05", "10/05/2022", True), ("10/05/2022", "10/06/2022", False),
   ("N/A", "n/a", True), ("yes", "yes, it is", False)],
)  # fmt: skip
def test_same(wanted, said, good):  # webarena issues 104, 134, 139, 211: too strict or too loose as text
  assert answers.same(wanted, said) is good


@pytest.mark.parametrize(
  "wanted, said, good",
  [("4", "14", False), ("4", "there are 4.", True), ("4", "4.0 stars", True), ("4", "4.5", False),
   ("cancelled", "Order 170: Canceled", True),
   ("art", "cart", False), ("557m", "It is 557m away", True), ("$7.50", "cost 7.5 in all", True),
   ("5", "2022-05-01", False), ("c++", "i like c++", True)],
)  # fmt: skip
def test_includes(wanted, said, good):
  assert answers.includes(wanted, said) is good


@pytest.mark.parametrize(
  "wanted, said, good",
  [("http://a:1/x", "http://a:1/x/", True), ("http://a:1/x", "http://a:1/x/y", False), ("http://a:1/x", "http://b:1/x", False),
   ("http://a/s?q=1", "http://a/s?z=3&q=1", True), ("http://a/s?q=1", "http://a/s?q=11", False), ("http://a/s?q=1", "http://a/s", False),
   ("http://a/x |OR| http://a/y", "http://a/y#top", True), ("http://a/a%20b", "http://a/a b", True)],
)  # fmt: skip
def test_urls_are_compared_in_parts(wanted, said, good):  # webarena issue 77: a longer path passed
  assert answers.same_url(wanted, said) is good


class Browser:
  """What a checker sees of a window. shown: locator -> value."""

  def __init__(self, url="http://s/last", shown=None):
    self.at, self.shown, self.tabs, self.front = url, shown or {}, {"a": 0}, "a"

  def url(self):
    return self.at

  def evaluate(self, source):
    return self.shown[source]


def verdict(how, answer="", window=None, judge=None, **more):
  given = {"reference_answers": None, "reference_url": "", "program_html": []} | how
  site = webarena.Site(webarena.defaults(), judge)
  return site.verdict(window or Browser(), Task("t", "g", "webarena/x", "f", 0, {"eval": given}, Limits(3)), [], [], answer)


def test_all_checkers_of_a_task_must_pass():
  how = {"eval_types": ["string_match", "url_match"], "reference_answers": {"must_include": ["red", "2"]}, "reference_url": "http://s/last"}
  assert verdict(how, "2 red ones") == 1.0
  assert verdict(how, "22 red ones") == 0.0
  assert verdict(how, "2 red ones", Browser("http://s/other")) == 0.0
  assert verdict(how, None) == 0.0  # it never answered


def test_pages_are_asked_by_their_locators():
  target = {"url": "last", "locator": "document.title", "required_contents": {"must_include": ["mug |OR| cup", "&"]}}
  how = {"eval_types": ["program_html"], "program_html": [target]}
  assert verdict(how, window=Browser(shown={"document.title": "A cup &amp; a plate"})) == 1.0
  assert verdict(how, window=Browser(shown={"document.title": "A cupboard & a plate"})) == 0.0
  assert verdict(how, window=Browser(shown={"document.title": None})) == 0.0


def test_what_only_a_judge_can_tell_is_never_a_fail():
  how = {"eval_types": ["string_match"], "reference_answers": {"fuzzy_match": ["a nice day"]}}
  with pytest.raises(CheckerFailed):
    verdict(how, "lovely weather")
  with pytest.raises(CheckerFailed):
    verdict(how, "lovely weather", judge=lambda *given: None)
  assert verdict(how, "lovely weather", judge=lambda *given: True) == 1.0
  assert verdict(how, "lovely weather", judge=lambda *given: 0.5) == 0.0


def files(tmp_path):
  base = {"sites": ["shopping"], "start_url": "__SHOPPING__/a", "require_login": True, "storage_state": "./.auth/s.json"}
  string = {"eval_types": ["string_match"], "reference_answers": {"exact_match": "x"}, "reference_url": "", "program_html": []}
  fuzzy = string | {"reference_answers": {"fuzzy_match": ["x"]}}
  func = string | {"eval_types": ["program_html"], "program_html": [{"url": "last", "locator": "func:f()", "required_contents": {}}]}
  url = string | {"eval_types": ["url_match"], "reference_url": "__SHOPPING__/b |OR| __SHOPPING_ADMIN__/c"}
  tasks = [base | {"task_id": i, "intent": f"goal {i}", "eval": how} for i, how in enumerate([string, fuzzy, func, url, string])]
  tasks.append(tasks[0] | {"task_id": 9, "sites": ["gitlab"]})
  (tmp_path / "all.json").write_text(json.dumps(tasks))
  (tmp_path / "held.json").write_text(json.dumps(tasks[4:5]))
  cfg = webarena.defaults()
  cfg.update({"tasks": str(tmp_path / "all.json"), "held_out": str(tmp_path / "held.json"), "in_domain_tasks": 1})
  cfg.sites.shopping, cfg.sites.shopping_admin = "http://127.0.0.1:7770/", "http://127.0.0.1:7780/admin"
  return cfg


def test_task_files_become_lists_and_what_cannot_be_run_is_named(tmp_path):
  cfg = files(tmp_path)
  lists = webarena.task_lists("webarena/browser", cfg)
  assert [t.id for t in lists["practice"]] == ["webarena-0", "webarena-3"] and [t.id for t in lists["held_out"]] == ["webarena-4"]
  assert lists["practice"][0].params["start"] == "http://127.0.0.1:7770/a" and lists["practice"][0].params["state"] == "s.json"
  assert lists["practice"][1].params["eval"]["reference_url"] == "http://127.0.0.1:7770/b |OR| http://127.0.0.1:7780/admin/c"
  why = webarena.left_out(cfg.tasks, cfg)
  assert {k: v.split()[-1] for k, v in why.items()} == {1: "it", 2: "interface", 9: "gitlab"}
  cfg.judge.kind = "words"
  assert 1 not in webarena.left_out(cfg.tasks, cfg)
  cfg.exclude = (3,)
  assert webarena.left_out(cfg.tasks, cfg)[3] == "excluded"


def test_posts_of_the_forum():
  assert webarena.post_url("http://r:9/f/books/123/a-title/-/comment/7") == "http://r:9/f/books/123/"
  assert webarena.post_url("http://r:9/about") == "http://r:9/about"


def test_the_fence_lets_only_these_through():
  assert fence(["127.0.0.1:80", "shop:8"]) == ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE shop",
    "--proxy-server=http://blocked.invalid:9", "--proxy-bypass-list=<-loopback>;127.0.0.1:80;shop:8"]  # fmt: skip
