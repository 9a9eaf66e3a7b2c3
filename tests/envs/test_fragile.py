"""A simulated computer that breaks on purpose, through a real worker: every kind is its own infra error, and none is a score."""

import numpy as np
import pytest

from envs import errors, sim
from envs.pool import Pool, defaults, spec_of
from envs.sim.fragile import Fragile

KINDS = {"die": "ActionAmbiguous", "hang": "ActDeadline", "throw": "WorkerFault", "black": "BlackFrame", "cut": "BadFrame"}


def phone(**chances):
  cfg = sim.defaults()
  cfg.update({"computer": "sim/phone"})
  cfg.faults.update(chances)
  return cfg


def test_every_kind_of_break_is_its_own_infra_error():
  knobs = defaults()
  knobs.update({"slots": 1, "recycle": 0, "backoff": 0.0, "quarantine_faults": 100})
  knobs.deadlines.update({"act": 1.0, "settle": 0.1, "observe": 5.0, "evaluate": 0.1})
  for kind, cause in KINDS.items():
    cfg = phone(**{kind: 1.0})
    task = sim.task_lists("sim/phone", cfg)["practice"][0]
    with Pool(spec_of(cfg), knobs) as pool, pytest.raises(errors.InfraError) as caught:
      env = pool.env()
      for _ in range(3):  # the first two go well
        env.reset(options={"task": task})
      for _ in range(8):  # it breaks in one of the first eight
        assert not env.step("wait()")[2]
    assert type(caught.value).__name__ == cause and pool.ledger()["finished"] == 0


def test_so_many_episodes_break_as_the_chances_say():
  """1,000 episodes, die 0.1 and hang 0.05: 100 +- 28 and 50 +- 21 (three standard errors)."""
  env, kinds = Fragile(sim.make("sim/phone", phone(), clean=True), {"die": 0.1, "hang": 0.05}, well=0), []
  env.rng = np.random.default_rng(1)
  task = sim.task_lists("sim/phone", phone())["practice"][0]
  for _ in range(1000):
    env.reset(options={"task": task})
    kinds.append(env.kind)
  assert 72 <= kinds.count("die") <= 128 and 29 <= kinds.count("hang") <= 71 and set(kinds) == {"die", "hang", ""}


@pytest.mark.parametrize(
  "chances, says", [({"die": -0.1}, "env.faults.die is -0.1"), ({"die": 0.6, "cut": 0.6}, "add up to 1.2, wanted 1 at most")]
)
def test_chances_that_are_none(chances, says):
  with pytest.raises(ValueError, match=says):
    sim.check(phone(**chances))
