"""Ports for tests of several processes."""

import contextlib
import socket

import numpy as np


def free_address():
  """address:port for the first of several processes. Below the ports that the kernel hands out: one of those may be somebody's before it
  is listened on, or a companion that is early connects to itself."""
  for port in np.random.default_rng().permutation(np.arange(20000, 30000)).tolist():
    with socket.socket() as s, contextlib.suppress(OSError):
      s.bind(("127.0.0.1", port))
      return f"127.0.0.1:{port}"
