"""Events under the names that all trackers share: train/loss, scale/value, eval/accuracy, time/step_ms, ...

Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from launcher.telemetry.stream import Record
from launcher.telemetry.tracker.protocol import ConfusionMatrix, Histogram, Media, Picture, Table, Text

GROUPS = ("train", "scale", "time", "eval", "after_evaluation", "gradients", "gpu")
SCALE_NAMES = {"scale": "scale/value", "skipped": "scale/skipped"}
MEDIA = (Text, Picture, Histogram, Table, ConfusionMatrix)
UNNAMED = ("event", "time", "step", "set", "higher_is_better")


def scalars_of(record: Record) -> dict[str, object]:
    """Numbers and strings of the event; {} if it has none for a tracker."""
    return {name: value for name, value in _named(record) if not isinstance(value, MEDIA)}


def media_of(record: Record) -> dict[str, Media]:
    """Texts, pictures, histograms and tables of the event."""
    return {name: value for name, value in _named(record) if isinstance(value, MEDIA)}


def _named(record: Record) -> Iterator[tuple[str, object]]:
    event = record["event"]
    if event == "report":
        yield from _report(record)
        return
    if event == "gradients":
        yield from _gradients(record)
        return
    for key, value in record.items():
        if key in UNNAMED or value is None:
            continue
        if event == "step":
            yield SCALE_NAMES.get(key) or f"{'time' if key.endswith('_ms') else 'train'}/{key}", value
        elif event == "overflow":
            yield SCALE_NAMES.get(key, f"scale/overflow_{key}"), _readable(value)
        elif event == "after_evaluation" and isinstance(value, dict):
            as_media = {"texts": Text, "pictures": Picture}.get(key, lambda plain: plain)
            yield from ((f"{event}/{name}", as_media(item)) for name, item in value.items())
        elif event == "eval":
            yield _in_evaluation(record, key), value
        elif event == "gpu":
            yield from _gpus(value) if key == "gpus" else ((f"gpu/{key}", value),)


def _in_evaluation(record: Record, name: str) -> str:
    return f"eval/{record['set']}/{name}" if "set" in record else f"eval/{name}"


def _report(record: Record) -> Iterator[tuple[str, object]]:
    yield "eval/classification_report", Text(record["text"])
    if rows := record.get("table"):
        yield "eval/classes", Table(tuple(rows[0]), [tuple(row.values()) for row in rows])
    if record.get("confusion_matrix"):
        yield "eval/confusion_matrix", ConfusionMatrix(record["classes"], record["confusion_matrix"])


def _gradients(record: Record) -> Iterator[tuple[str, object]]:
    """Shares of all gradients, and how many elements have each exponent."""
    yield from (
        (f"gradients/{key}", value)
        for key, value in record.items()
        if isinstance(value, float) and key not in UNNAMED
    )
    if counts := record.get("histogram"):
        first = record.get("first_exponent", 0)
        yield "gradients/exponents", Histogram(counts, list(range(first, first + len(counts) + 1)))


def _gpus(gpus: Iterable[Mapping[str, object]]) -> Iterator[tuple[str, object]]:
    for gpu in gpus:
        for key, value in gpu.items():
            name = f"gpu/{gpu['index']}/{key}"
            if isinstance(value, Mapping):
                yield from ((f"{name}/{part}", number) for part, number in value.items())
            elif key not in ("index", "uuid"):
                yield name, value


def _readable(value: object) -> object:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
