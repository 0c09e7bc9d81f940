"""Values as bytes and back: every bit, and no object but of a class that the receiver's metric had."""

from __future__ import annotations

import copy
import enum
import functools
import math
import pickle
import re
import struct
import threading
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field
from datetime import date
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from launcher.evaluation.transport import PLAIN, CannotSendError, Known, known_of, packed, unpacked

HOST = torch.device("cpu")


def arrived(value: Any, known: Known | None = None) -> Any:
    return unpacked(packed(value, known or PLAIN), known or PLAIN, HOST)


def raw(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


def assert_same(found: Any, value: Any) -> None:
    """Types, bits and order; of sets without order."""
    assert type(found) is type(value)
    if isinstance(value, Tensor):
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert raw(found).equal(raw(value))
    elif isinstance(value, np.ndarray | np.generic):
        assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes())
    elif isinstance(value, float):
        assert struct.pack("d", found) == struct.pack("d", value)
    elif isinstance(value, dict):
        for one, other in ((list(found), list(value)), (list(found.values()), list(value.values()))):
            assert_same(one, other)
        assert getattr(found, "default_factory", 0) is getattr(value, "default_factory", 0)
    elif isinstance(value, list | tuple | deque):
        assert len(found) == len(value)
        assert getattr(found, "maxlen", 0) == getattr(value, "maxlen", 0)
        for one, other in zip(found, value, strict=True):
            assert_same(one, other)
    else:
        assert found == value


FLOATS = [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308]
BASE = torch.arange(24, dtype=torch.float32).view(4, 6)
VALUES: list[Any] = [
    *FLOATS,
    FLOATS,
    *[None, True, 0, -1, 2**63 - 1, 2**63, -(2**63) - 1, 10**5000, "", "é\ud800\0", b"", b"\0\xff"],
    *[[1, 2**70], [True, 1], [1, 1.0], [], [[]], (), (1,), ((), [()]), {1, "a"}, frozenset({(1, 2)}), set()],
    *[
        1 + 2j,
        complex(math.inf, -0.0),
        bytearray(b"ab"),
        torch.Size([2, 3]),
        torch.float16,
        HOST,
        int,
        Counter,
    ],
    {"a": 1, 2: None, (1, "b"): [0.5], None: {}, True: 1.5, frozenset({1}): 0, 0.5: "tensor", b"k": ()},
    {"tensor": [1]},  # looks like a tag
    Counter("banana"),
    OrderedDict([("b", 1), ("a", 2)]),
    defaultdict(int, a=1),
    defaultdict(None, {1: {2: defaultdict(list, x=[1])}}),
    deque([1, 2.5], maxlen=2),
    deque("ab"),
    *[BASE, BASE.t(), BASE[1:3, ::2], BASE[0, 0], BASE[:0], torch.empty(0, 3, 0), torch.tensor(7)],
    *[BASE.to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64)],
    torch.tensor([1.0, math.nan, -math.inf]).to(torch.bfloat16),
    BASE.to(torch.float8_e4m3fn),
    torch.tensor([1 + 2j]).conj(),
    *[np.arange(6).reshape(2, 3).T, np.zeros((0, 2)), np.array(3.5, dtype=np.float16), np.arange(3)[::-1]],
    *[np.array([True]), np.array([1], dtype=">i4"), np.array(["é", "b"]), np.array(["2026-01-01"], "M8[D]")],
    *[np.float32(0.1), np.int64(-1), np.bool_(True), np.float64(math.nan), np.complex64(1j), np.str_("a")],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_values_arrive_bit_for_bit(value: Any) -> None:
    assert_same(arrived(value), value)
    assert_same(arrived([{"deep": (value,)}]), [{"deep": (value,)}])


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = SCALARS | st.tuples(SCALARS, SCALARS)


@settings(max_examples=150, deadline=None, database=None)
@given(
    st.recursive(
        SCALARS,
        lambda inner: (
            st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.frozensets(KEYS)
        ),
    )
)
def test_any_nesting_arrives(value: Any) -> None:
    assert_same(arrived(value), value)


def test_what_arrives_is_independent_and_a_view_is_sent_without_its_storage() -> None:
    large = torch.zeros(100_000)
    assert len(packed(large[7:9], PLAIN)) < 250
    found, array = arrived(large[7:9]), arrived(np.zeros(2))
    found += 1
    array += 1
    assert large[7] == 0
    learned = nn.Parameter(torch.ones(2))
    assert_same(arrived(learned), torch.ones(2))


@pytest.mark.parametrize("value", [torch.ones(2), HOST])
def test_what_was_on_a_device_arrives_on_the_device_and_the_rest_on_the_host(value: Any) -> None:
    known, meta = PLAIN, torch.device("meta")
    sent = packed(value, known)
    # As if the sender had had it on a device, which a test machine has not: True becomes False.
    on_device = sent.replace(b"device\x94\x88", b"device\x94\x89")
    assert on_device != sent
    found = [unpacked(each, known, meta) for each in (sent, on_device)]
    devices = [each.device if isinstance(each, Tensor) else each for each in found]
    assert [each.type for each in devices] == ["cpu", "meta"]


class Mode(enum.Enum):
    MACRO = enum.auto()


@dataclass(frozen=True)
class Sums:
    count: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros(()))


@dataclass(frozen=True, slots=True)
class Slots:
    count: int = 0


class Pair(NamedTuple):
    right: int
    all: int


class Rows(list[float]):
    title = ""


class Stated:
    """Leaves out what does not change."""

    def __init__(self) -> None:
        self.lock, self.count = threading.Lock(), 0

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def difference(a: float, b: float) -> float:
    return a - b


def counting() -> dict[str, int]:
    return defaultdict(int)


class Metric:
    """With objects in its attributes, in containers, and of its own class."""

    def __init__(self, inner: Metric | None = None) -> None:
        self.sums, self.slots, self.pair, self.rows = Sums(), Slots(), Pair(0, 0), Rows()
        self.parts = [Sums(), {"a": Sums()}]
        self.inner, self.mode, self.pattern = inner, Mode.MACRO, re.compile("a+")
        self.distance = difference
        self.counts: Any = defaultdict(counting)
        self.stated, self.network, self.words = Stated(), nn.Linear(2, 1), UserDict({"a": 1})
        self.kind = Metric

    def update(self) -> None:
        self.sums, self.slots, self.pair = Sums(3, torch.tensor(0.5)), Slots(4), Pair(1, 2)
        self.rows.append(0.5)
        self.rows.title = "rows"
        self.parts = [Sums(5), {"a": Sums(6)}]
        self.counts["a"]["b"] += 1
        self.stated.count = 7
        self.words["b"] = 2
        self.added = (1, 2)
        if self.inner:
            self.inner.update()


def test_objects_arrive_as_their_state_in_objects_of_the_receivers_classes() -> None:
    metric, receiver = Metric(Metric()), Metric(Metric())
    known, at_receiver = known_of(metric), known_of(receiver)
    assert at_receiver == known
    metric.update()
    sent = packed(metric, known)
    found = unpacked(sent, at_receiver, HOST)
    for each, own in ((found, receiver), (found.inner, receiver.inner)):
        assert type(each) is Metric
        assert (each.sums, each.slots, each.pair) == (Sums(3, torch.tensor(0.5)), Slots(4), Pair(1, 2))
        assert type(each.pair) is Pair
        assert (type(each.rows), each.rows, each.rows.title) == (Rows, [0.5], "rows")
        assert [each.parts[0].count, each.parts[1]["a"].count] == [5, 6]
        assert (each.mode, each.pattern, each.kind) == (Mode.MACRO, re.compile("a+"), Metric)
        assert (each.counts, each.stated.count, each.added) == ({"a": {"b": 1}}, 7, (1, 2))
        assert each.counts["new"]["one"] == 0
        assert each.words == {"a": 1, "b": 2}
        assert isinstance(own, Metric)
        assert each.network.weight.shape == (1, 2)
    assert found.distance is receiver.distance
    with pytest.raises(CannotSendError, match="which it had not before the first batch"):
        unpacked(sent, PLAIN, HOST)


def test_the_class_of_a_metric_need_not_be_found_by_its_name() -> None:
    class Local:
        inner: Any = None

    metric = Local()
    metric.inner = Local()
    found = unpacked(packed(metric, known_of(Local())), known_of(Local()), HOST)
    assert type(found) is type(found.inner) is Local


class Holder:
    def __init__(self, value: Any = None) -> None:
        self.value = value


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


UNSENDABLE: list[tuple[Any, Any, str]] = [
    (None, Sums(), "it has a tests.evaluation.test_transport.Sums"),
    (Slots(), Sums(), "it has a tests.evaluation.test_transport.Sums"),
    (None, [0, {"a": Sums()}], "it has a tests.evaluation.test_transport.Sums"),
    (None, lambda: None, "<lambda>"),
    (len, max, "it has a builtins.max"),
    (None, date(2026, 1, 1), "it has a datetime.date"),
    (None, Mode.MACRO, "it has a tests.evaluation.test_transport.Mode"),
    (None, Metric, "it has a tests.evaluation.test_transport.Metric"),
    (None, object(), "it has a builtins.object"),
    (None, torch.eye(2).to_sparse(), "a tensor is torch.sparse_coo, torch.float32, which is not dense"),
    (None, np.array([Sums()]), "it has a tests.evaluation.test_transport.Sums"),
    (None, defaultdict(lambda: 0), "<lambda>"),
    (None, deep(), "maximum recursion depth exceeded"),
]


def test_what_contains_itself_arrives_so() -> None:
    cyclic: list[Any] = [1]
    cyclic.append({"again": cyclic})
    found = arrived(cyclic)
    assert found[0] == 1
    assert found[1]["again"] is found


@pytest.mark.parametrize(("before", "after", "text"), UNSENDABLE, ids=[text for *_, text in UNSENDABLE])
def test_what_cannot_arrive_is_refused_by_its_type(before, after, text) -> None:
    holder = Holder(before)
    known = known_of(holder)
    holder.value = after
    with pytest.raises(CannotSendError, match=re.escape(text)):
        unpacked(packed(holder, known), known, HOST)


@pytest.mark.parametrize(
    ("value", "text"),
    [(threading.Lock(), "_thread.lock"), (torch.ops.aten.add.op, "pickle")],
    ids=["of C", "of pybind11"],
)
def test_an_object_without_a_state_is_refused_before_the_first_batch(value, text) -> None:
    for holder in (value, Holder({"a": value})):
        with pytest.raises(CannotSendError, match=text):
            known_of(holder)


class Failing(Holder):
    def __getstate__(self) -> Any:
        raise TypeError("no state today")


def test_an_error_of_getstate_is_not_hidden() -> None:
    holder = Holder(copy.copy(Holder()))
    holder.value = Failing()
    with pytest.raises(TypeError, match=r"^no state today"):
        packed(holder, known_of(Holder()))


class Calls:
    """What a hostile pickle consists of: a function to call at reading."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts[0], self.parts[1:]


@pytest.mark.parametrize(
    "value",
    [
        Calls(print, "executed"),
        Calls(eval, "1"),
        date(2026, 1, 1),
        Holder(),
        max,
        Calls(torch.load, "file"),
    ],
)
def test_bytes_that_name_code_create_nothing(value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CannotSendError):
        unpacked(pickle.dumps(value), PLAIN, HOST)
    assert not capsys.readouterr().out


@functools.cache
def remembered(value: float) -> float:
    return value


@pytest.mark.parametrize(
    "value", [np.mean, np.linalg.norm, remembered, ..., NotImplemented, torch.channels_last]
)
def test_what_pickle_would_send_by_name_is_known_to_the_receiver(value: Any) -> None:
    held = {"reduce": value, "index": (value, 0)}
    known = known_of(held)
    found = unpacked(packed(held, known), known, HOST)
    assert found["reduce"] is value
    assert found["index"] == (value, 0)


def test_a_message_that_was_cut_is_refused() -> None:
    known = PLAIN
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        unpacked(packed([1], known)[:-1], known, HOST)
