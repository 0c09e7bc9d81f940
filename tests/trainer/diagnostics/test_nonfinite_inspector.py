"""The error of a diverged run: its texts. Pure functions.

Whole runs are in ../test_diverged_runs.py, the search by real ranks in tests/ranks/test_divergence.py.
"""

from __future__ import annotations

import pytest
import torch

from launcher.trainer.diagnostics.nonfinite import ModuleFinding
from launcher.trainer.diagnostics.nonfinite_inspector import (
    NOT_FOUND,
    Finding,
    evidence_of,
    format_by_rank,
    nonfinite_rows,
    samples_text,
)

MODULE = ModuleFinding("fc", "Linear", "inf", 7, True, 3.0)
BATCH = {"image": torch.zeros(3, 2), "label": torch.zeros(3, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("suspects", "indices", "text"),
    [
        ([], [5, 9], "micro-batch of 2 training samples 5, 9"),
        ([9], [5, 9], "training sample 9 (of 2 in the micro-batch)"),
        ([], list(range(10)), "micro-batch of 10 training samples 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"),
    ],
)
def test_samples_are_listed_as_far_as_it_helps(suspects, indices, text) -> None:
    assert samples_text(suspects, indices) == text


def test_a_nan_in_the_batch_names_its_sample_and_column() -> None:
    batch = {**BATCH, "image": torch.tensor([[0.0, 1.0], [0.0, 0.0], [float("nan"), 0.0]])}
    found = ModuleFinding("conv", "Conv2d", "nan", 0)
    evidence = evidence_of(found, False, 1, batch, [40, 41, 42])
    assert evidence.order == 1 << 32
    assert evidence.samples == "training sample 42 (of 3 in the micro-batch)"
    assert evidence.module == ""
    assert "not finite in the batch itself: image" in evidence.text
    assert "conv (Conv2d), nan, which was given values that are not finite" in evidence.text


@pytest.mark.parametrize("arithmetic", [torch.float16, torch.float32])
def test_values_of_the_batch_beyond_fp16_are_to_be_normalised(arithmetic: torch.dtype) -> None:
    batch = {**BATCH, "image": torch.tensor([[0.0, 1.0], [0.0, -8e6], [0.0, 0.0]])}
    text = evidence_of(None, False, 0, batch, [1, 2, 3], arithmetic).text
    said = "the column image has values up to 8e+06, and float16 ends at 65504: normalise it first" in text
    assert said == (arithmetic == torch.float16)


def test_a_module_is_told_with_its_inputs_and_may_compute_in_fp32() -> None:
    evidence = evidence_of(MODULE, False, 0, BATCH, [40, 41, 42])
    assert evidence.samples == "micro-batch of 3 training samples 40, 41, 42"
    assert evidence.text.endswith("fc (Linear), inf, from inputs of at most 3")
    assert (evidence.order, evidence.module) == (7, "fc")


def test_a_module_that_was_given_what_is_not_finite_is_not_to_compute_in_fp32() -> None:
    given = ModuleFinding("fc", "Linear", "inf", 7)
    assert evidence_of(given, False, 0, BATCH, [40, 41, 42]).module == ""


def test_only_the_loss_may_be_at_fault() -> None:
    evidence = evidence_of(None, False, 0, BATCH, [1, 2, 3])
    assert evidence.order < NOT_FOUND
    assert "every module's output was finite, the loss was not" in evidence.text


def test_a_finite_forward_pass_leaves_the_backward_pass() -> None:
    evidence = evidence_of(None, True, 2, BATCH, [1, 2, 3])
    assert evidence.order == NOT_FOUND
    assert evidence.text.endswith(
        "the forward pass is finite; what is not finite arises in the backward pass"
    )
    back = Finding(7, "first gradient that was not finite: at the output of fc (Linear), inf", module="fc")
    # A module whose -inf, such as that of a mask, leaves the loss finite, is not at fault.
    evidence = evidence_of(MODULE, True, 2, BATCH, [1, 2, 3], back=back)
    assert (evidence.order, evidence.module) == (7, "fc")
    assert evidence.text == f"the forward pass is finite; {back.text}"


def test_a_nan_that_the_loss_masks_does_not_hide_the_module_of_the_backward_pass() -> None:
    batch = {**BATCH, "target": torch.tensor([0.0, float("nan"), 0.0])}
    back = Finding(7, "first gradient that was not finite: at the output of fc (Linear), inf", module="fc")
    evidence = evidence_of(None, True, 0, batch, [1, 2, 3], back=back)
    assert (evidence.order, evidence.module) == (7, "fc")
    assert evidence.text.startswith("not finite in the batch itself: target; the forward pass is finite; ")
    assert evidence_of(MODULE, True, 0, batch, [1, 2, 3]).order == NOT_FOUND


def test_the_earliest_finding_is_told_first_and_the_innocent_not_at_all() -> None:
    found = [Finding(5, "late"), Finding(NOT_FOUND, "fine"), Finding(2, "early")]
    lines = format_by_rank(found, [0]).splitlines()
    assert lines[1:] == ["  rank 2: early", "  rank 0: late"]


def test_where_nobody_saw_anything_the_suspected_ranks_are_told() -> None:
    found = [Finding(NOT_FOUND, f"fine {rank}") for rank in range(9)]
    assert format_by_rank(found, [1]).splitlines()[1:] == ["  rank 1: fine 1"]
    assert format_by_rank(found, []).splitlines()[1:] == ["  rank 0: fine 0"]
    assert format_by_rank(found, range(9)).splitlines()[-1] == "  and 5 more ranks"


def test_rows_that_are_not_finite() -> None:
    assert nonfinite_rows(torch.tensor([[1.0], [float("inf")], [float("nan")]])) == [1, 2]
    assert nonfinite_rows(torch.tensor([1, 2])) == []
    assert nonfinite_rows(torch.zeros(0, 3)) == []
    assert nonfinite_rows(torch.tensor([float("nan"), 0.0])) == [0]
