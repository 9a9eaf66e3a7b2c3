"""Arrays here hold a handful of numbers: the time goes into compiling, so XLA's optimiser is off in this folder."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", before)
  jax.clear_caches()  # programs compiled so round differently in the last bit, and later modules would be handed them
