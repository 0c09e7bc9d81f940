"""Why samples cannot be stacked to a batch: their shapes or their columns differ.

Owns the comparison of samples that torch's default_collate has refused; it names neither column nor sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import DataError

SHOWN = 4  # shapes


def refuse_unlike(samples: Sequence[object], names: Sequence[str] = ()) -> None:
    """Raise DataError where samples have other columns or shapes than the first.

    `names` are those of a tuple's parts.
    """
    rows = [_columns(sample, names) for sample in samples]
    first = rows[0]
    for offset, row in enumerate(rows):
        if odd := sorted(first.keys() ^ row.keys()):
            raise DataError(
                f"the samples have different columns: {', '.join(odd)} is not in all of them; the first has "
                f"{', '.join(first)}, the one at {offset} of the batch has {', '.join(row)}. Every sample "
                "of a data set must have the same columns."
            )
    for name in first:
        shapes = list(dict.fromkeys(_shape(row[name]) for row in rows))
        if len(shapes) > 1:
            more = f" and {len(shapes) - SHOWN} more" if len(shapes) > SHOWN else ""
            raise DataError(
                f"the column {name} has samples of different shapes in one batch: "
                f"{', '.join(str(list(shape)) for shape in shapes[:SHOWN])}{more}. A batch stacks its "
                "samples, so all must have one shape. Pad them in Recipe.collate, for instance with "
                "torch.nn.utils.rnn.pad_sequence(values, batch_first=True), and give Recipe.lengths, so that "
                "samples of similar length share a batch; or cut or resize them in the data set."
            )


def _columns(sample: Any, names: Sequence[str]) -> Mapping[str, Any]:
    if isinstance(sample, Mapping):
        return {str(name): value for name, value in sample.items()}
    parts = sample if isinstance(sample, tuple | list) else [sample]
    return {names[n] if n < len(names) else f"part {n}": value for n, value in enumerate(parts)}


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of a tensor or an array; for a list its length, and the shape of its first element."""
    if hasattr(value, "shape"):
        return tuple(value.shape)
    if isinstance(value, list | tuple):
        return (len(value), *(_shape(value[0]) if value else ()))
    return ()
