"""Arrays here hold a handful of numbers: the time goes into compiling, so XLA's optimiser is off in this folder."""

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def compile_quickly():
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", before)
