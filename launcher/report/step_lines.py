"""Reads `step` events as columns of numbers, many lines at a time.

Owns the fast path for lines of one shape, as a run writes them, which a JSON parser would read in twice the
time. That parser reads all other lines. Both give the same numbers.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.report.curve import FloatArray
from launcher.report.reading import MAX_TEXT, bounded
from launcher.telemetry.event_log import MAX_STEP, parsed

PREFIX = b'{"event": "step", '  # of the lines that a run writes
NUMERALS = b"0123456789.+-eE"  # what a number of JSON is written with
SPELLED_NUMERALS = NUMERALS + b"NAIF"  # with NAN and INF
SPELLED = ((b"null", b"NAN"), (b'"nan"', b"NAN"), (b'"inf"', b"INF"), (b'"-inf"', b"-INF"))
KEY = re.compile(rb'"([^"\\]*)": ')
PLAIN_KEY = re.compile(rb"[a-z_]+")  # what `MARKUP` removes
MARKUP = b'abcdefghijklmnopqrstuvwxyz_"{}: '


@dataclass(frozen=True)
class StepColumns:
    """`step` events in order. A value that is no number is nan; `missing` counts those by column."""

    columns: dict[str, FloatArray]  # with "step"
    missing: dict[str, int]

    def __len__(self) -> int:
        return int(self.columns["step"].size)


def bounded_event(line: bytes) -> dict[str, Any] | None:
    """The event of a line, with long texts cut; None if it holds none."""
    event = parsed(line)
    cut: dict[str, Any] | None = event if len(line) <= MAX_TEXT else bounded(event)
    return cut


def columns_of_lines(lines: Sequence[bytes]) -> StepColumns | None:
    """The columns of lines that begin with `PREFIX`; None where they are not all of one shape."""
    _, *names = KEY.findall(lines[0])
    if len(set(names)) < len(names) or not all(map(PLAIN_KEY.fullmatch, names)):
        return None
    text = b"".join(lines)
    keys = [name.decode("ascii") for name in names]
    missing = dict.fromkeys(keys, 0)
    if text.translate(None, NUMERALS) != lines[0].translate(None, NUMERALS) * len(lines):
        missing = {key: text.count(b'"%s": null' % key.encode()) for key in keys}
        first, text = _spelled_as_numbers(lines[0]), _spelled_as_numbers(text)
        if text.translate(None, SPELLED_NUMERALS) != first.translate(None, SPELLED_NUMERALS) * len(lines):
            return None
    table = _numbers(text, len(lines), len(keys))
    if table is None or "step" not in keys:
        return None
    step = table[:, keys.index("step")]
    if not np.all((step >= 0) & (step < MAX_STEP) & (step == np.floor(step))):
        return None
    return StepColumns(dict(zip(keys, table.T, strict=True)), missing)


def columns_of_events(events: Sequence[Mapping[str, object]]) -> StepColumns:
    """The columns of events of any shape; values that are no numbers are missing."""
    keys = list(dict.fromkeys(key for event in events for key in event if key != "event"))
    rows = {key: [_number(event.get(key)) for event in events] for key in keys}
    missing = {key: row.count(None) for key, row in rows.items()}
    return StepColumns(
        {key: np.array([math.nan if v is None else v for v in row]) for key, row in rows.items()}, missing
    )


def _spelled_as_numbers(text: bytes) -> bytes:
    """Null and non-finite values in capitals, which are not markup."""
    for spelled, number in SPELLED:
        text = text.replace(spelled, number)
    return text


def _numbers(text: bytes, num_rows: int, num_columns: int) -> FloatArray | None:
    """The numbers of lines of one shape, [rows, columns]; None where one of them is none."""
    # MARKUP, which is removed next, has the small e of an exponent.
    text = text.replace(b"e-", b"E-").replace(b"e+", b"E+")
    row = text.translate(None, MARKUP)[1:].decode("ascii")  # without the comma after the event's name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            numbers = np.fromstring(row, dtype=np.float64, sep=",")
        except (DeprecationWarning, ValueError):
            return None
    return numbers.reshape(num_rows, num_columns) if numbers.size == num_rows * num_columns else None


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
