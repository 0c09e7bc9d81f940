"""Values as bytes and back: every bit, and no object but of a class that the receiver's metric had."""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from launcher.errors import ConfigError
from launcher.evaluation.transport import _placed, deserialize, serialize

HOST = torch.device("cpu")


def arrived(value: Any) -> Any:
    return deserialize("a state", serialize("a state", value), HOST)


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
    elif isinstance(value, list | tuple):
        assert len(found) == len(value)
        for one, other in zip(found, value, strict=True):
            assert_same(one, other)
    else:
        assert found == value


FLOATS = [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308]
BASE = torch.arange(24, dtype=torch.float32).view(4, 6)
VALUES: list[Any] = [
    *FLOATS,
    FLOATS,
    *[None, True, 0, -1, 2**63 - 1, 2**63, -(2**63) - 1, 10**80, "", "é\ud800\0", b"", b"\0\xff"],
    *[[1, 2**70], [True, 1], [1, 1.0], [], [[]], (), (1,), ((), [()]), {1, "a"}, frozenset({(1, 2)}), set()],
    *[
        1 + 2j,
        complex(math.inf, -0.0),
        bytearray(b"ab"),
        torch.Size([2, 3]),
        torch.float16,
        HOST,
    ],
    {"a": 1, 2: None, (1, "b"): [0.5], None: {}, True: 1.5, frozenset({1}): 0, 0.5: "tensor", b"k": ()},
    {"tensor": [1]},  # looks like a tag
    Counter("banana"),
    OrderedDict([("b", 1), ("a", 2)]),
    *[BASE, BASE.t(), BASE[1:3, ::2], BASE[0, 0], BASE[:0], torch.empty(0, 3, 0), torch.tensor(7)],
    *[BASE.to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64)],
    torch.tensor([1.0, math.nan, -math.inf]).to(torch.bfloat16),
    BASE.to(torch.float8_e4m3fn),
    torch.tensor([1 + 2j]).conj(),
    *[np.arange(6).reshape(2, 3).T, np.zeros((0, 2)), np.array(3.5, dtype=np.float16), np.arange(3)[::-1]],
    *[np.array([True]), np.array(["é", "b"]), np.array(["2026-01-01"], "M8[D]")],
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
    assert len(serialize("a state", {"a": [large[7:9]]})) < 2000
    found, array = arrived(large[7:9]), arrived(np.zeros(2))
    found += 1
    array += 1
    assert large[7] == 0
    learned = nn.Parameter(torch.ones(2))
    assert_same(arrived(learned), torch.ones(2))


def test_what_was_on_a_device_arrives_on_the_device_and_the_rest_on_the_host() -> None:
    storage, meta = torch.ones(2).untyped_storage(), torch.device("meta")
    assert [_placed(meta, storage, sender).device.type for sender in ("cpu", "cuda:1")] == ["cpu", "meta"]
    assert [each.device.type for each in deserialize("", serialize("", [torch.ones(2)]), meta)] == ["cpu"]


class Sums:
    """A metric with what metrics keep."""

    def __init__(self) -> None:
        self.total, self.seen = torch.zeros(()), np.zeros(3)
        self.counts: dict[str, int] = defaultdict(int)
        self.last: Any = deque(maxlen=2)


def test_what_a_metric_keeps_arrives_in_plain_containers() -> None:
    metric = Sums()
    metric.total += 0.5
    metric.counts["a"] += 1
    metric.last.append(3)
    found = arrived(vars(metric))
    assert (found["total"], found["seen"].tolist()) == (0.5, [0, 0, 0])
    assert (found["counts"], found["last"]) == ({"a": 1}, [3])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Sums(), "it has a tests.evaluation.test_transport.Sums"),
        ([0, {"a": Sums()}], "it has a tests.evaluation.test_transport.Sums"),
        (np.array([Sums()]), "it has a tests.evaluation.test_transport.Sums"),
        (max, "it has a max"),
        (date(2026, 1, 1), "it has a datetime.date"),
        (lambda: None, "<lambda>"),
        (threading.Lock(), "_thread.lock"),
    ],
)
def test_what_cannot_arrive_is_refused_by_its_type(value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^a state cannot be sent to rank 0: .*{re.escape(text)}.*\. Num"):
        arrived(value)


class Calls:
    """What a hostile pickle consists of: a function to call at reading."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts[0], self.parts[1:]


@pytest.mark.parametrize(
    "value", [Calls(print, "executed"), Calls(eval, "print(1)"), Calls(torch.load, "file")]
)
def test_bytes_that_name_code_create_nothing(value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = io.BytesIO()
    torch.save(value, file)
    for sent in (file.getvalue(), pickle.dumps(value, protocol=2)):
        with pytest.raises(ConfigError, match="cannot be sent"):
            deserialize("a state", sent, HOST)
    assert not capsys.readouterr().out


def test_a_message_that_was_cut_is_refused() -> None:
    sent = serialize("a state", [1.5, "text", torch.ones(9)])
    for length in (0, 1, len(sent) // 2, len(sent) - 1):
        with pytest.raises(ConfigError, match="cannot be sent"):
            deserialize("a state", sent[:length], HOST)
