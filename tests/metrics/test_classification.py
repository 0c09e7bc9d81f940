"""The built-in metrics of a classifier against scikit-learn's, and the outputs that it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from launcher.errors import ConfigError, DataError
from launcher.metrics import Classification
from launcher.metrics.confusion import Confusion
from tests.metrics.figures import FIGURES

CLASSES = ("red", "green", "blue")


def measured(labels, *outputs, classes=CLASSES, **options) -> Classification:
    """One metric per output, merged."""
    whole = Classification(classes, **options)
    for each, part in zip(outputs, torch.as_tensor(labels).tensor_split(len(outputs)), strict=True):
        other = Classification(classes, **options)
        other.update(torch.as_tensor(each), {"label": part})
        whole.merge(other)
    return whole


@pytest.mark.parametrize("case", FIGURES["pairs"], ids=lambda case: f"{len(case['labels'])} samples")
def test_metrics_of_predicted_classes_equal_those_of_scikit_learn(case):
    found = measured(case["labels"], case["predictions"])
    assert found.compute() == pytest.approx(case["metrics"])
    assert Confusion(CLASSES, found.confusion_matrix()).report().split("\n") == case["report"]


def test_metrics_of_logits_equal_those_of_scikit_learn():
    case = FIGURES["logits"]
    found = measured(case["labels"], case["logits"], classes=tuple(map(str, range(9)))).compute()
    assert {name: found[name] for name in case["metrics"]} == case["metrics"]


def logits_of(num_samples: int, num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, num_classes, (num_samples,), generator=generator)
    return labels, torch.randn(num_samples, num_classes, generator=generator) * 2


def test_metrics_of_logits_are_the_same_in_any_number_of_parts():
    labels, logits = logits_of(101, 9)
    classes = tuple(map(str, range(9)))
    found = [
        measured(labels, *logits.tensor_split(parts), classes=classes).compute() for parts in (1, 2, 3, 200)
    ]
    assert found[1:] == found[:1] * 3
    assert set(found[0]) == set(Classification(classes).names)


def test_of_equal_logits_the_lower_class_is_ahead_as_for_argmax():
    found = measured([4, 5], torch.zeros(2, 6), classes=tuple("abcdef")).compute()
    assert found["top5_accuracy"] == 0.5


def test_labels_and_logits_may_have_more_dimensions_and_places_that_do_not_count():
    labels = torch.tensor([[[0, 1], [2, 255]], [[1, 1], [0, 255]]])
    logits = torch.nn.functional.one_hot(labels.clamp(max=2), 3).movedim(-1, 1).float()
    logits[0, :, 0, 0] = torch.tensor([0.0, 1.0, 0.0])
    found = measured(labels, logits, ignore_index=255)
    assert found.compute()["accuracy"] == pytest.approx(5 / 6)
    assert found.confusion_matrix().sum() == 6


def test_confusion_matrix_and_report_by_hand():
    found = measured([0, 0, 1, 1, 1], torch.tensor([0, 1, 1, 1, 0]))
    matrix = found.confusion_matrix()
    assert matrix.dtype == np.int64
    assert matrix.tolist() == [[1, 1, 0], [1, 2, 0], [0, 0, 0]]
    report = Confusion(CLASSES, matrix).report()
    assert " ".join(report.splitlines()[2].split()) == "red 0.5000 0.5000 0.5000 2"
    assert "blue" not in report


def test_without_samples_all_is_unknown():
    assert all(math.isnan(value) for value in Classification(CLASSES).compute().values())
    of_ignored = measured([7, 7], torch.zeros(2, 3), ignore_index=7).compute()
    assert all(math.isnan(value) for value in of_ignored.values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_make_no_good_metric(value):
    logits = torch.zeros(4, 3)
    logits[1] = value
    found = measured([0, 1, 2, 0], logits).compute()
    assert all(math.isnan(each) for each in found.values())


def test_a_merge_copies_what_it_takes():
    whole, part = Classification(CLASSES), Classification(CLASSES)
    part.update(torch.tensor([0, 1]), {"label": torch.tensor([0, 1])})
    whole.merge(part)
    whole.update(torch.tensor([2]), {"label": torch.tensor([2])})
    assert (part.confusion_matrix().sum(), whole.confusion_matrix().sum()) == (2, 3)


def test_a_prefix_and_an_output_tell_two_of_them_apart():
    labels, logits = logits_of(10, 3)
    one = Classification(CLASSES, output="a", prefix="first_")
    one.update({"a": logits, "b": logits[:3]}, {"label": labels})
    assert set(one.compute()) == set(one.names)
    with pytest.raises(ConfigError, match="reads the output a, but the recipe's loss gives b, c"):
        one.update({"b": logits, "c": logits}, {"label": labels})


@pytest.mark.parametrize(
    ("outputs", "labels", "message"),
    [
        (torch.zeros(4), [0, 1, 2, 0], r"float32 \[4\], the labels int64 \[4\]. .* logits \[4, 3\]"),
        (torch.zeros(4, 2), [0, 1, 2, 0], r"float32 \[4, 2\]"),
        (torch.zeros(3, 3), [0, 1, 2, 0], r"float32 \[3, 3\]"),
        (torch.zeros(4, 3, dtype=torch.int64), [0, 1, 2, 0], r"int64 \[4, 3\]"),
        (torch.zeros(4, 3), [0.0, 1.0, 2.0, 0.0], "whole numbers as labels"),
        (torch.full((4,), 3), [0, 1, 2, 0], r"4 predictions outside 0\.\.2, which the 3"),
        (torch.full((4,), -1), [0, 1, 2, 0], "4 predictions outside"),
        (torch.zeros(4, 3), [0, 1, 3, 0], "1 label outside"),
        (
            torch.zeros(4, 3),
            [0, -100, 2, 0],
            r"1 label .*\(classes, ignore_index=-100\)",
        ),
    ],
)
def test_what_names_no_class_is_refused(outputs, labels, message):
    kind = DataError if "1 label" in message else ConfigError
    with pytest.raises(kind, match=message):
        measured(labels, outputs).compute()
