"""Each kind of event is one class: written and read back the same, and in the table of the README."""

import ast
import dataclasses
import json
import math
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.run_dir.atomic import json_line, restored
from launcher.telemetry import events
from launcher.telemetry.events import KINDS, Event, event_of, record_of

ROOT = Path(__file__).parents[2]


@st.composite
def made(draw, kind):
    """An event with any values of the types that its fields have."""
    hints = typing.get_type_hints(kind)
    keys = {field.name: field for field in dataclasses.fields(kind)}
    names = st.text(max_size=5).filter(lambda name: name not in {*keys, "event"})
    return kind(
        **{
            name: draw(st.dictionaries(names, of(typing.get_args(hints[name])[1]), max_size=3))
            if key.metadata
            else draw(of(hints[name]))
            for name, key in keys.items()
        }
    )


def of(hint):
    """Values of a type, as a JSON file keeps them: `nan` and `inf` in a text would become numbers."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is typing.get_origin(typing.Sequence[int]):
        return st.lists(of(args[0]), max_size=3)
    if typing.get_origin(hint) is typing.get_origin(typing.Mapping[str, int]):
        return st.dictionaries(st.text(max_size=5), of(args[1]), max_size=3)
    if args:
        return st.one_of(*map(of, args))
    plain = {
        float: st.floats(allow_nan=False),
        int: st.integers(-(2**62), 2**62),
        str: st.text(max_size=5).filter(lambda text: text not in ("nan", "inf", "-inf")),
        bool: st.booleans(),
        type(None): st.none(),
        object: st.integers(0, 9) | st.text("abc"),
    }
    return plain[hint] if hint in plain else made(hint)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@given(data=st.data())
def test_an_event_is_read_back_as_it_was_written(kind, data):
    event = data.draw(made(kind))
    assert event_of(read(event)) == event


def read(event):
    return restored(json.loads(json_line(record_of(event))))


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_a_field_that_a_file_lacks_is_blank(kind):
    found = event_of({"event": kind.kind, "step": 3})
    assert type(found) is kind
    assert found.step == 3
    record_of(found)


def test_a_newer_field_is_left_out_and_a_newer_kind_is_none():
    event = event_of({"event": "warning", "time": 1.0, "step": 1, "text": "odd", "colour": "red"})
    assert record_of(event) == {"event": "warning", "time": 1.0, "step": 1, "text": "odd"}
    assert event_of({"event": "quantum", "step": 1}) is None


def test_the_blank_of_a_field_is_of_its_type():
    event = event_of({"event": "overflow", "step": 1})
    assert math.isnan(event.scale)
    assert not event.parameters


def test_each_kind_of_event_is_made_and_has_a_line_in_the_table():
    table = (ROOT / "launcher" / "telemetry" / "README.md").read_text(encoding="utf-8")
    called = set()
    for file in (ROOT / "launcher").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.add(node.func.id)
    classes = {name: kind for name, kind in vars(events).items() if kind in KINDS.values()}
    assert called >= classes.keys()
    assert all(issubclass(kind, Event) for kind in classes.values())
    assert [kind for kind in KINDS if f"\n| `{kind}` |" not in table] == []
