"""The check of labels against the classes that the recipe names, and what to do about those that are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.data.reader import FetchedBatch
from launcher.errors import DataError, counted

IGNORED = -100  # the label that torch's cross-entropy leaves out
OF_IGNORED = (
    f"To leave out samples labelled {IGNORED}, as cross-entropy does, give the recipe "
    f"metrics=[Classification(classes, ignore_index={IGNORED})]."
)
UNLABELLED = -1
OF_UNLABELLED = (
    "-1 marks samples without a label, as in the test splits of many sets of the Hugging Face hub. Leave "
    'them out, as with data.filter(lambda row: row["label"] != -1), or choose a split that has labels, such '
    "as validation."
)

VOID = 255  # marks what is to be left out in many sets for segmentation


@dataclass(frozen=True)
class Labels:
    """The column with a class per sample."""

    column: str
    num_classes: int

    def refuse_others(self, fetched: FetchedBatch, name: str, indices: Sequence[int] = ()) -> None:
        """Raise DataError for a label of a class that is not there.

        On a GPU such a class would end the process with an assertion of the device. `indices` of the request
        name the sample.
        """
        labels = (fetched.batch or {}).get(self.column)
        if labels is None or labels.shape != (len(fetched.kept),):
            return
        if labels.is_floating_point() or labels.is_complex():
            return
        values = labels.tolist()  # of some hundred labels in half the time of torch's aminmax
        if min(values) >= 0 and max(values) < self.num_classes:
            return
        for offset, label in zip(fetched.kept, values, strict=True):
            if not (0 <= label < self.num_classes or label == IGNORED):
                sample = f" of sample {indices[offset]}" if indices else ""
                raise no_class(f"the {name}: the {self.column}{sample} is {label}", label, self.num_classes)


def no_class(found: str, label: int, num_classes: int) -> DataError:
    """The error for a label that is no class; `found` begins its text."""
    advice = {IGNORED: OF_IGNORED, UNLABELLED: OF_UNLABELLED}
    other = "Correct the labels, or name all classes in Recipe.classes."
    return DataError(
        f"{found}, but the recipe names {counted(num_classes, 'class', 'es')}: a label must lie between 0 "
        f"and {num_classes - 1}. {advice.get(label, other)}"
    )
