"""One environment in a process of its own: python -m envs.worker SOCKET SCREEN PARENT, started by envs.local and by nothing else.

SOCKET, SCREEN: inherited descriptors of the connection and of the shared screen; PARENT: pid of the trainer. Requests are answered
one at a time, in the order they come, each with its own id:

  boot      builds the environment -> shape of its screen      reset     task -> first screen      step   text -> what came of it
  expire    ends the episode from outside, checked             ping      is anybody there? (and `health`, if the environment has it)
  close     closes the environment, then the process ends

Fencing: `reset` carries its lease's token, and a token older than the newest seen is refused; `step` and `expire` must carry the
token of the last reset, and a step the number that follows the last one's, so that no action is ever carried out twice.
No jax is imported here: a worker must never claim the accelerator. An environment's processes stay in the worker's session, where
the trainer finds and ends them.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import pathlib
import select
import signal
import socket
import sys
import threading
import traceback
from typing import Any

import ml_collections
import numpy as np

from envs import phases
from envs.errors import BadFrame, BlackFrame, InfraError, StaleToken
from envs.shared_screens import SharedScreen
from envs.wire import Reader, pack

FOLDER = pathlib.Path(__file__).resolve().parent
ACCELERATED = ("jax", "jaxlib", "torch", "tensorflow")
PR_SET_PDEATHSIG = 1


def find_suite(name: str) -> Any:
  """The module that makes environments: a name in envs/, or the path of a Python file. Nothing else is imported to find it."""
  if name.endswith(".py"):
    spec = importlib.util.spec_from_file_location(pathlib.Path(name).stem, name)
    if spec is None or not os.path.isfile(name):
      raise ValueError(f"environment suite {name}: there is no such Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
  found = sorted({p.stem for p in FOLDER.glob("*.py")} | {p.parent.name for p in FOLDER.glob("*/__init__.py")})
  if name not in found or not name.isidentifier():
    raise ValueError(f"no environment suite {name!r} in envs/; there is: {', '.join(found)}")
  return importlib.import_module(f"envs.{name}")


class Server:
  """Answers requests about one environment. screen: where pictures go; tell(message): sends a word before the answer."""

  def __init__(self, screen: SharedScreen, tell=lambda message: None):
    self.screen, self.tell = screen, tell
    self.env: Any = None
    self.shape: tuple[int, ...] = ()
    self.black_frames = True  # an all-black screen is a fault
    self.token, self.live, self.acts, self.id = 0, 0, 0, 0
    phases.listen(lambda name: self.tell({"id": self.id, "token": self.live, "phase": name}))

  def answer(self, request: dict) -> dict:
    """What is said to one request: a result, or the fault's class name and message."""
    self.id = request["id"]
    head = {"id": self.id, "token": request.get("token", 0)}
    try:
      return head | {"result": getattr(self, "do_" + request["op"])(request)}
    except InfraError as fault:
      return head | {"error": type(fault).__name__, "message": str(fault), "infra": True}
    except Exception as error:  # noqa: BLE001 - whatever an environment raises must reach the trainer with its name
      failed = error
    traceback.print_exception(failed)
    sys.stderr.flush()
    return head | {"error": type(failed).__name__, "message": f"{type(failed).__name__}: {failed}"[:2000], "infra": False}

  def do_boot(self, request: dict) -> dict:
    spec = request["spec"]
    self.black_frames = request["black_frames"]
    suite = find_suite(spec["suite"])
    self.env = suite.make(spec["computer"], ml_collections.ConfigDict(spec["config"]), spec["clean"])
    self.shape = tuple(int(n) for n in self.env.observation_space["screenshot"].shape)
    return {"shape": list(self.shape)}

  def do_reset(self, request: dict) -> dict:
    if request["token"] < self.token:
      raise StaleToken(f"reset under token {request['token']}, the newest is {self.token}")
    self.token, self.live, self.acts = request["token"], 0, 0
    obs, info = self.env.reset(seed=request["seed"], options={"task": request["task"]})
    told = self._look(obs) | {"info": info}
    self.live = self.token  # only a reset that went well opens the way for actions
    return told

  def do_step(self, request: dict) -> dict:
    self._fence(request)
    if request["act"] != self.acts + 1:
      raise StaleToken(f"action {request['act']} is out of turn: {self.acts} were carried out")
    self.acts += 1  # before the action: one that raises was begun, and is not begun again
    obs, reward, terminated, truncated, info = self.env.step(request["text"])
    return self._look(obs) | {"reward": reward, "terminated": terminated, "truncated": truncated, "info": info}

  def do_expire(self, request: dict) -> dict:
    self._fence(request)
    self.live = 0
    return {"info": self.env.unwrapped.expire()}

  def do_ping(self, request: dict) -> dict:
    health = getattr(getattr(self.env, "unwrapped", None), "health", None)
    if health is not None:
      health()
    return {"pid": os.getpid(), "accelerated": [name for name in ACCELERATED if name in sys.modules]}

  def do_close(self, request: dict) -> dict:
    env, self.env = self.env, None
    if env is not None and hasattr(env, "close"):
      env.close()
    return {}

  def _fence(self, request: dict) -> None:
    if self.live == 0 or request["token"] != self.live:
      raise StaleToken(f"{request['op']} under token {request['token']}, the episode here is {self.live or 'over'}")

  def _look(self, obs: dict) -> dict:
    """Puts the picture where the trainer sees it; the rest of the observation goes with the answer."""
    rest = dict(obs)
    pixels = rest.pop("screenshot")
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape != self.shape:
      got = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
      raise BadFrame(f"screenshot is {got}, wanted uint8 {self.shape}")
    if self.black_frames and not pixels.any() and not getattr(self.env.unwrapped, "black_screens", False):
      raise BlackFrame("every pixel of the screenshot is black")
    return {"screen": self.screen.write(pixels, self.token), "obs": rest}


def die_with(parent: int) -> None:
  """Linux ends this process when the trainer's thread that started it ends, whatever the environment is busy with."""
  if sys.platform == "linux":
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
      raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
  if os.getppid() != parent:  # it died before we asked
    sys.exit(1)


def leave_with(connection: socket.socket) -> None:
  """Ends the whole process group once the trainer's end of the connection is gone: what Linux does not do, and others nowhere."""
  watched = select.poll()
  watched.register(connection.fileno(), 0)  # hang-ups only
  while not any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in watched.poll()):
    pass
  if os.getpgrp() == os.getpid():
    os.killpg(0, signal.SIGKILL)
  os.kill(os.getpid(), signal.SIGKILL)


def main(argv: list[str]) -> None:
  fd, screen_fd, parent = (int(a) for a in argv)
  die_with(parent)
  for stop in (signal.SIGINT, signal.SIGTERM):  # the trainer decides when a worker ends; a signal to all must not
    signal.signal(stop, signal.SIG_IGN)
  for inherited in (fd, screen_fd):
    os.set_inheritable(inherited, False)
  connection = socket.socket(fileno=fd)
  threading.Thread(target=leave_with, args=(connection,), daemon=True).start()
  server, reader = Server(SharedScreen(screen_fd), lambda message: connection.sendall(pack(message))), Reader()
  while data := connection.recv(1 << 16):
    for request in reader.feed(data):
      said = server.answer(request)
      try:
        data = pack(said)
      except (TypeError, ValueError) as error:
        data = pack({"id": said["id"], "token": said["token"], "error": type(error).__name__, "message": str(error)[:2000], "infra": False})
      connection.sendall(data)
      if request["op"] == "close":
        return


if __name__ == "__main__":
  main(sys.argv[1:])
