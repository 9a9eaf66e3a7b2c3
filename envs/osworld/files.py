"""The files that tasks name by URL, on this machine: nothing is downloaded while an episode runs.

Mirrors come first ("PREFIX=FOLDER": a URL that starts with PREFIX is FOLDER/rest), then the store, a folder that `prefetch` fills under
the names of the benchmark's own cache, uuid5(url)_basename. Files are shared by all computers and never written again.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import pathlib
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterable

CHUNK = 1 << 20
MAX_BYTES = 2 << 30  # of one file
SECONDS = 60.0  # that a server may say nothing
MOST_SECONDS = 3600.0  # of one file


class Files:
  """mirrors: "PREFIX=FOLDER" each; store: a folder, "" for none."""

  def __init__(self, mirrors: Iterable[str] = (), store: str = ""):
    self.mirrors = []
    for mirror in mirrors:
      prefix, equals, folder = mirror.rpartition("=")
      if not equals or not prefix or not folder:
        raise ValueError(f"env.mirrors (--mirror) has {mirror!r}, wanted PREFIX=FOLDER, e.g. https://huggingface.co/=/data/mirror")
      self.mirrors.append((prefix, pathlib.Path(folder).expanduser()))
    self.store = pathlib.Path(store).expanduser() if store else None

  def find(self, url: str) -> pathlib.Path | None:
    """Where the file of a URL is, or None. ValueError where that cannot be looked for: no URL, a name too long, links in a circle."""
    try:
      return self._find(url)
    except OSError as error:
      raise ValueError(f"a URL that cannot be looked for: {url!r:.100}: {error.strerror}") from None
    except (ValueError, RuntimeError) as error:
      raise ValueError(f"a URL that cannot be looked for: {url!r:.100}: {str(error)[:100]}") from None

  def _find(self, url: str) -> pathlib.Path | None:
    for prefix, folder in self.mirrors:
      if url.startswith(prefix):
        rest = urllib.parse.unquote(urllib.parse.urlsplit(url[len(prefix) :]).path).lstrip("/")
        path = folder / rest
        if path.resolve().is_relative_to(folder.resolve()) and path.is_file():  # a URL never leads out of its mirror
          return path
    if self.store is not None and self.store.is_dir():
      mark = stored_name(url).partition("_")[0]  # what follows is the URL's tail, or the guest's name of the file: the benchmark's caches
      return next((path for path in sorted(self.store.glob(f"{mark}_*")) if path.is_file()), None)
    return None

  def prefetch(self, urls: Iterable[str], say: Callable[[str], None] = print) -> dict[str, str]:
    """Downloads what is missing into the store. Returns url -> why it could not be had."""
    if self.store is None:
      raise ValueError("prefetch wants a store to download into: --store=FOLDER")
    self.store.mkdir(parents=True, exist_ok=True)
    failed = {}
    for url in dict.fromkeys(urls):
      try:
        if self.find(url) is None:
          size, digest = download(url, self.store / stored_name(url))
          say(f"{url}: {size} bytes, sha256 {digest[:12]}")
      except (OSError, ValueError, http.client.HTTPException) as error:
        failed[url] = f"{type(error).__name__}: {error}"[:200]
        say(f"{url}: {failed[url]}")
    return failed


def stored_name(url: str) -> str:
  """As the benchmark's cache calls it; the tail of the URL is there for people."""
  tail = pathlib.PurePosixPath(urllib.parse.unquote(urllib.parse.urlsplit(url).path)).name or "file"
  tail = tail.encode()[-100:].decode(errors="ignore")  # a file's name has 255 bytes, and a letter up to four
  return f"{uuid.uuid5(uuid.NAMESPACE_URL, url)}_{tail}"


def download(url: str, path: pathlib.Path) -> tuple[int, str]:
  """Writes the file whole or not at all. Returns (bytes, sha256). OSError or ValueError where it cannot be had."""
  if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
    raise ValueError("only http and https are downloaded")
  digest, size, until = hashlib.sha256(), 0, time.monotonic() + MOST_SECONDS
  handle, fresh = tempfile.mkstemp(dir=path.parent, prefix=".new-")
  try:
    with os.fdopen(handle, "wb") as out, urllib.request.urlopen(url, timeout=SECONDS) as answer:
      while chunk := answer.read1(CHUNK):  # as it comes: a server that trickles is given up too
        size += len(chunk)
        if time.monotonic() > until:
          raise ValueError(f"{size} bytes after {MOST_SECONDS:g} s, and not all of it")
        if size > MAX_BYTES:
          raise ValueError(f"more than {MAX_BYTES} bytes")
        digest.update(chunk)
        out.write(chunk)
      wanted = answer.headers.get("Content-Length")
      if wanted is not None and int(wanted) != size:
        raise ValueError(f"broke off after {size} of {wanted} bytes")
    os.replace(fresh, path)
  finally:
    if os.path.exists(fresh):
      os.unlink(fresh)
  return size, digest.hexdigest()
