"""Which samples of a set without a split of its own are held out, and the numbers of the classes.

The split depends on the labels, their order and the fraction alone, so that runs with different seeds are
evaluated on the same samples, and all ranks on the same. The classes are those of the training samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from launcher.data.batch_plan import generator_for
from launcher.errors import ConfigError, DataError, LauncherError, listed

SHOWN = 10  # labels in a message


def stratified(labels: Tensor, val_fraction: float) -> Tensor:
    """Which samples are held out: bool [n], the share `val_fraction` of each class (labels int64 [n])."""
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in torch.unique(labels).tolist():
        members = (labels == label).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=generator_for("split", label))]
        held_out[shuffled[: round(len(members) * val_fraction)]] = True
    return held_out


def stratified_split(
    labels: Tensor, val_fraction: float, where: str, kind: type[LauncherError] = ConfigError
) -> tuple[list[int], list[int]]:
    """The indices to train on and those held out: none of a fraction of 0.

    Raises `kind` where a part would be empty. `where` ends "of the 9 rows of ...".
    """
    held_out = stratified(labels, val_fraction)
    train, validation = ((held_out == out).nonzero().flatten().tolist() for out in (False, True))
    if not train or (val_fraction and not validation):
        raise kind(
            f"data.val_fraction={val_fraction} of the {len(labels)} {where} leaves {len(train)} for training "
            f"and {len(validation)} for validation. Both need at least one."
        )
    return train, validation


def label_to_index(
    labels: Sequence[object], classes: Sequence[object], place: Callable[[int], str], advice: str = ""
) -> list[int]:
    """The index of each label's class.

    Raises DataError, which begins with the `place` of the first such row, for labels of no class.
    """
    numbers = {label: number for number, label in enumerate(classes)}
    if unknown := list(dict.fromkeys(label for label in labels if label not in numbers)):
        raise DataError(
            f"{place(labels.index(unknown[0]))}: {len(unknown)} label(s) are not in the training set: "
            f"{listed(unknown, SHOWN)}. It knows {listed(classes, SHOWN)}.{advice}"
        )
    return [numbers[label] for label in labels]


def refuse_one_class(classes: Sequence[object], where: str) -> None:
    """Raise DataError for fewer than two classes."""
    if len(classes) < 2:
        raise DataError(f"{where} has one class, {listed(classes, 1)}. At least two are needed.")


def natural(label: str) -> tuple[int, str]:
    """Sort key that puts the label 2 before 10, and numbers before words."""
    return (int(label), "") if label.removeprefix("-").isdecimal() else (2**62, label)


def numbered(values: Sequence[str]) -> Tensor:
    """Each value as its number among the different ones, sorted: int64 [n]."""
    numbers = {value: number for number, value in enumerate(sorted(set(values)))}
    return torch.tensor([numbers[value] for value in values])
