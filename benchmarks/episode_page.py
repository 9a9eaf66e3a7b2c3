"""How long the episode page takes to open in a real headless Chromium, with many stored episodes and with few.

  python -m benchmarks.episode_page [--episodes=100000]

Seconds until a page and its pictures are there, server, browser and all; the ratio is to the same page of a store of eight. The goal is
under 2 s each. Needs Chromium (make system).
"""

from __future__ import annotations

import contextlib
import pathlib
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from absl import app, flags

from envs import sim
from rollout.store import EpisodeStore
from tests.real.browser import Reader

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ("", "?before={middle}", "?task={task}&verdict=pass", "?family=none", "label", "episode/5")
TIMES = 3  # each page is opened so often; the median is printed


def multiply(workdir: pathlib.Path, count: int) -> None:
  """Adds `count` rows to the index, made of the first eight episodes that it holds, under 977 tasks, 512 an update."""
  with contextlib.closing(sqlite3.connect(workdir / "episodes" / "index.sqlite")) as db, db:
    own = ("id", "group_id", "at_update", "task_id")
    rest = ", ".join(row[1] for row in db.execute("PRAGMA table_info(episodes)") if row[1] not in own)
    db.execute(f"""WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {int(count)})
                   INSERT INTO episodes (group_id, at_update, task_id, {rest})
                   SELECT 'many' || n, n / 512, 'task-' || (n % 977), {rest} FROM c JOIN episodes e ON e.id = 1 + n % 8""")


@contextlib.contextmanager
def served(workdir: pathlib.Path) -> Iterator[str]:
  """The address that tools/episodes prints, while it runs."""
  page = subprocess.Popen([sys.executable, "-m", "tools.episodes", f"--workdir={workdir}"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
  try:
    yield page.stdout.readline().strip()
  finally:
    page.terminate()
    page.wait(20)


def measure(workdir: pathlib.Path, count: int) -> dict[str, float]:
  """Median seconds by page. The first opening of the browser, which starts its processes, is not counted."""
  with served(workdir) as address, Reader(address) as reader:
    reader.open(address)
    site = address.partition("?")[0]
    pages = {page: site + page.format(middle=count // 2, task="task-5") for page in PAGES}
    return {page: statistics.median(reader.open(where) for _ in range(TIMES)) for page, where in pages.items()}


def main(argv: list[str]) -> None:
  del argv
  with tempfile.TemporaryDirectory() as folder:
    found = {}
    for count in (8, FLAGS.episodes):
      workdir = pathlib.Path(folder) / str(count)
      with EpisodeStore(workdir / "episodes") as store:
        for i, episode in enumerate(sim.demonstrations("sim/phone", 8, 0)):
          episode.try_index = i
          store.add(episode, 0)
      if count > 8:
        multiply(workdir, count - 8)
      found[count] = measure(workdir, count)
    few, many = found.values()
  print(f"| page | seconds with 8 | seconds with {FLAGS.episodes:,} | ratio |\n|---|---|---|---|")
  for page in PAGES:
    print(f"| /{page} | {few[page]:.2f} | {many[page]:.2f} | {many[page] / few[page]:.1f} |")
  print(f"goal, under 2 s each: {'met' if max(many.values()) < 2 else 'NOT met'}")


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_integer("episodes", 100_000, "Stored episodes.", lower_bound=9)
  app.run(main)
