"""Which steps end a run, and what the error says of the last one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.config.schema import LossScaleConfig
from launcher.engine import StepReport
from launcher.errors import DataError, DivergedError
from launcher.trainer.callbacks.terminate_on_nonfinite import TerminateOnNonFinite
from launcher.trainer.progress import EvalOutcome, StepIndex
from tests.trainer.reports import CLEAN, LIMITS, OVERFLOW, metrics_of


class Inspector:
    """Answers as given, and keeps what it was asked."""

    def __init__(self, broken: str = "", seen: str = "seen again") -> None:
        self.broken, self.seen = broken, seen
        self.asked: list[tuple] = []

    def broken_weights(self) -> str:
        return self.broken

    def explain(self, *question) -> str:
        self.asked.append(question)
        return self.seen


def checked(
    reports: list[StepReport],
    inspector: Inspector | None = None,
    limits: LossScaleConfig = LIMITS,
    counters: dict[str, int] | None = None,
) -> TerminateOnNonFinite:
    """The check after these steps of a run."""
    check = TerminateOnNonFinite(limits, inspector or Inspector(), lambda: counters or {})
    for step, report in enumerate(reports, 1):
        check.on_step_metrics(StepIndex(0, step - 1, step), metrics_of(report))
    return check


@pytest.mark.parametrize(
    ("report", "error", "words"),
    [
        (replace(OVERFLOW, bad_loss_steps=3), DivergedError, "the loss was not finite in 3 steps"),
        (
            replace(OVERFLOW, skips_at_min_scale=4),
            DivergedError,
            "(?s)overflowed in 4 steps with none applied.*fc.weight",
        ),
        (replace(OVERFLOW, count=0), DataError, "no sample that carries loss on any rank"),
    ],
)
def test_a_run_that_cannot_recover_is_ended(report, error, words) -> None:
    with pytest.raises(error, match=words):
        checked([report])


@pytest.mark.parametrize(
    "report", [replace(OVERFLOW, bad_loss_steps=2), replace(OVERFLOW, skips_at_min_scale=3)]
)
def test_a_run_below_the_limits_continues(report) -> None:
    checked([report, CLEAN])


def test_the_error_names_ranks_parameters_scales_and_what_was_seen_again() -> None:
    names = tuple(f"layer{number}.weight" for number in range(7))
    last = replace(OVERFLOW, scale=1.0, skips_at_min_scale=4, culprit_parameters=names)
    inspector = Inspector()
    with pytest.raises(DivergedError) as caught:
        checked([CLEAN, CLEAN, last], inspector)
    lines = str(caught.value).splitlines()
    assert lines[1].startswith("Gradient not finite on ranks [1], in parameters: layer0.weight")
    assert lines[1].endswith("and 2 more")
    assert lines[2:] == ["Loss scale: 1", "seen again"]
    assert inspector.asked == [(StepIndex(0, 2, 3), (1,), True)]


def test_a_bad_loss_over_broken_weights_ends_the_run_at_once() -> None:
    bad = replace(OVERFLOW, bad_losses=1, bad_loss_steps=1)
    with pytest.raises(DivergedError, match=r"step 1, because weights are not: conv1\.weight\."):
        checked([bad], Inspector("conv1.weight"))


def test_an_overflow_is_no_reason_to_look_at_the_weights() -> None:
    checked([OVERFLOW, CLEAN], Inspector("never asked"))


@pytest.mark.parametrize(
    ("mode", "least", "words"),
    [
        ("dynamic", 1, r"at loss scale 1024, the smallest allowed, .*Lower optim.lr or the loss"),
        ("dynamic", 64, r"the smallest allowed, .*Lower precision.loss_scale.min_scale, too"),
        (
            "static",
            1,
            r"at the constant loss scale 1024, .*precision.loss_scale.init_scale.*its mode=dynamic",
        ),
        ("none", 1, r"between them without a loss scale, .*ddp.gradient_dtype=fp32"),
    ],
)
def test_the_advice_at_the_floor_is_about_the_scale_that_there_is(mode, least, words) -> None:
    limits = replace(LIMITS, mode=mode, min_scale=least)
    with pytest.raises(DivergedError, match=words):
        checked([replace(OVERFLOW, skips_at_min_scale=4)], limits=limits)


@pytest.mark.parametrize(
    ("counters", "held_out_loss", "words"),
    [
        (
            {"bad_loss_steps": 2, "applied_steps": 1},
            1.0,
            "(?s)not finite in 2 of the last steps, none of which was applied.*Loss scale: 512",
        ),
        ({"bad_loss_steps": 0, "applied_steps": 0}, 1.0, "(?s)none of 3 steps was applied.*seen again"),
        (
            {"bad_loss_steps": 0, "applied_steps": 1},
            float("nan"),
            "held-out set is nan after the last of 3 steps",
        ),
    ],
)
def test_a_run_that_ends_with_nothing_to_show_for_it_is_refused(counters, held_out_loss, words) -> None:
    check = checked([replace(CLEAN, scale=512.0)], counters=counters)
    with pytest.raises(DivergedError, match=words):
        check.on_train_end(StepIndex(0, 2, 3), EvalOutcome(loss=held_out_loss))


def test_the_end_of_a_run_resumed_after_its_last_step_has_no_step_to_name() -> None:
    with pytest.raises(DivergedError, match=r"none of 3 steps was applied.*more steps\.$"):
        checked([], counters={"bad_loss_steps": 0, "applied_steps": 0}).on_train_end(
            StepIndex(0, 2, 3), EvalOutcome(loss=1.0)
        )


def test_a_run_that_has_trained_may_end() -> None:
    checked([CLEAN], counters={"bad_loss_steps": 0, "applied_steps": 1}).on_train_end(
        StepIndex(0, 0, 1), EvalOutcome(loss=1.0)
    )
