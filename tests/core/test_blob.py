import dataclasses
import enum
import json
import math

import ml_dtypes
import numpy as np
import pytest

from core import blob, schema
from core.schema import Action, End, Episode, Group, Limits, Screen, Step, Task, TokenRecord, Unreadable


def there_and_back(value):
  text, arrays, screens = blob.encode(value)
  return blob.decode(text, arrays, screens.__getitem__)


def same(a, b):
  """Equal in type and in every bit."""
  assert type(a) is type(b), (a, b)
  if isinstance(a, np.ndarray | np.generic):
    assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
  elif isinstance(a, list | tuple):
    assert len(a) == len(b)
    for x, y in zip(a, b):
      same(x, y)
  elif isinstance(a, dict):
    assert list(a) == list(b)
    for x, y in zip(a.items(), b.items()):
      same(x, y)
  elif dataclasses.is_dataclass(a):
    for f in dataclasses.fields(a):
      same(getattr(a, f.name), getattr(b, f.name))
  else:
    assert a == b or (a != a and b != b)


@pytest.mark.parametrize(
  "value",
  [
    None,
    True,
    0,
    -1,
    2**127 + 1,
    0.1,
    -0.0,
    1e-320,
    math.inf,
    math.nan,
    "",
    "häß \U0001f600 \ud83d \x00",
    b"",
    b"\x00\xff",
    [],
    (),
    {},
    [1, [2.5, (3, "x", (None,))]],
    {"a": {"b": [1]}},
    {1: "int key", (2, "x"): True, None: 0.5},
    {"~": "not a tag", "v": 1},
    np.float32(0.1),
    np.float64(0.1),
    np.int64(7),
    np.bool_(True),
    End.TRUNCATED,
  ],
)
def test_plain_values_come_back_as_they_were(value):
  same(there_and_back(value), value)


@pytest.mark.parametrize(
  "dtype", ["float32", "float64", "float16", "int8", "int64", "uint32", "bool", "complex64", ">i4", "<U5", "S3"]
)
def test_arrays_come_back_bit_for_bit(dtype):
  values = np.array([0, 1, 0, 3]).astype(dtype)
  for shape in [(4,), (2, 2), (4, 1, 1)]:
    same(there_and_back({"x": values.reshape(shape), "y": values[:1], "scalar": np.array(values[3])})["x"], values.reshape(shape))
  same(there_and_back(values[:0].reshape(0, 3)), values[:0].reshape(0, 3))
  same(there_and_back([values.reshape(2, 2).T, values[1:]]), [np.ascontiguousarray(values.reshape(2, 2).T), values[1:]])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_types_numpy_does_not_know_come_back_too(dtype):
  values = np.array([0.5, -2, 448], dtype)
  same(there_and_back([values, np.float32(1), values[:1]]), [values, np.float32(1), values[:1]])


def test_nan_payloads_survive():
  values = np.array([0x7FC00001, 0xFFC12345, 0x80000000], np.uint32).view(np.float32)
  same(there_and_back(values), values)


@pytest.mark.parametrize("name", ["PCG64", "MT19937", "Philox"])
def test_a_random_state_draws_on_where_it_stopped(name):
  rng = np.random.Generator(getattr(np.random, name)(3))
  rng.normal(size=5)
  state = there_and_back(rng.bit_generator.state)
  other = np.random.Generator(getattr(np.random, name)(0))
  other.bit_generator.state = state
  np.testing.assert_array_equal(other.normal(size=5), rng.normal(size=5))


def screen(seed):
  return Screen.of(np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8))


def episode(task="t", try_index=0, screens=None):
  screens = screens or [screen(0), screen(1), screen(0)]
  action = Action("tap", {"x": 3, "y": 1}, {"x": 0.5, "y": 0.25}, "phone", thought="hm")
  steps = [Step(s, "tap(0.50, 0.25)", action, 3, raw_point=(0.5, 0.25), point=(3, 1), think_seconds=0.25) for s in screens[:-1]]
  steps.append(Step(screens[-1], "hm?", Unreadable("no action"), 2, notes={"popup": "corner", "box": [1, 2]}))
  n = 7
  record = TokenRecord(
    np.arange(n, dtype=np.int32),
    np.arange(n) > 3,
    np.linspace(-1, 0, n, dtype=np.float32),
    np.full(n, 4, np.int32),
    np.zeros(n, np.int32),
    np.array([1], np.int32),
    np.array([0], np.int32),
  )
  return Episode(
    task,
    "u3.g1",
    try_index,
    11,
    steps,
    End.TERMINATED,
    "unreadable",
    {"success": 0.0, "format": -1.0},
    [record],
    goal="buy a cable",
    advantage=-0.5,
    final_screen=screens[0],
  )


def test_episodes_and_groups_come_back_whole():
  group = Group("u3.g1", "t", [episode(), episode(try_index=1)])
  task = Task("t", "buy", "sim", "shop", 3, {"start": [1, {"a": None}]}, Limits(20, 60.0), check="every_step")
  same(there_and_back([group, task]), [group, task])


def test_a_screen_is_kept_once_and_shared_again():
  one = screen(0)
  twin = Screen(one.ref, one.pixels.copy())
  _, _, screens = blob.encode([episode(screens=[one, screen(1), twin]), episode(screens=[twin, one, screen(2)])])
  assert sorted(screens) == sorted({one.ref, screen(1).ref, screen(2).ref})
  text, arrays, screens = blob.encode([episode(screens=[one, screen(1), twin])])
  (back,) = blob.decode(text, arrays, lambda ref: Screen(ref, screens[ref].pixels.copy()))
  assert back.steps[0].screen is back.steps[2].screen is back.final_screen


def test_a_snapshot_does_not_follow_later_changes():
  x = np.zeros(3, np.float32)
  text, arrays, _ = blob.encode({"x": x})
  x[:] = 7
  np.testing.assert_array_equal(blob.decode(text, arrays, None)["x"], np.zeros(3))


class Stranger:
  pass


@pytest.mark.parametrize("value", [Stranger(), {1, 2}, lambda: 0, np.array([{}]), np.zeros(2, [("a", "i4")]), type, 1j])
def test_what_cannot_be_held_is_named_with_its_place(value):
  with pytest.raises(ValueError, match=r"host\.buffer\[1\]\.x is a"):
    blob.encode({"buffer": [0, {"x": value}]})


def test_a_jax_array_belongs_in_the_device_tree():
  import jax.numpy as jnp

  with pytest.raises(ValueError, match="host.x is a jax"):
    blob.encode({"x": jnp.zeros(3)})


@blob.register
@dataclasses.dataclass
class Cursor:
  epoch: int
  order: np.ndarray
  new: float = 0.5


@blob.register
class Colour(enum.Enum):
  RED = "red"


def test_registered_dataclasses_come_back():
  same(there_and_back([Cursor(3, np.arange(4)), Colour.RED]), [Cursor(3, np.arange(4)), Colour.RED])


def test_a_field_added_since_takes_its_default_and_one_removed_is_an_error():
  text, arrays, _ = blob.encode(Cursor(3, np.arange(4)))
  tree = json.loads(text)
  del tree["v"]["new"]
  assert blob.decode(json.dumps(tree), arrays, None).new == 0.5
  tree["v"]["gone"] = 1
  with pytest.raises(ValueError, match="Cursor has field 'gone'"):
    blob.decode(json.dumps(tree), arrays, None)


def test_a_class_that_no_module_registered_is_an_error():
  text, arrays, _ = blob.encode(Cursor(3, np.arange(4)))
  with pytest.raises(ValueError, match="holds a Cursors, which no module has registered"):
    blob.decode(text.replace(b'"Cursor"', b'"Cursors"'), arrays, None)


def test_two_classes_of_one_name_are_refused():
  with pytest.raises(ValueError, match="another class named Episode"):
    blob.register(dataclasses.make_dataclass("Episode", ["x"]))


def test_every_record_of_the_schema_is_known():
  names = [n for n, c in vars(schema).items() if isinstance(c, type) and c.__module__ == "core.schema"]
  assert {"Episode", "Group", "Step", "Screen", "Task", "TokenRecord", "Credit", "End"} <= set(names) <= set(blob._CLASSES)


def test_a_large_buffer_is_quick():
  import time

  buffer = [episode(try_index=i) for i in range(2000)]
  start = time.perf_counter()
  text, arrays, screens = blob.encode(buffer)
  blob.decode(text, arrays, screens.__getitem__)
  assert time.perf_counter() - start < 10 and len(screens) == 2  # one npz member an array takes minutes
