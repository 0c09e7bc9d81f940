"""A run that starts from another run's checkpoint in another precision or scale mode: its scale, its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.launching import Ended, run

pytestmark = pytest.mark.timeout(90)

STEPS = 10


def continued(tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...]) -> tuple[Ended, list[str]]:
    """The second run's end and what it has logged of precision and scale."""
    first = run(tmp_path / "first", *before, f"train.max_steps={STEPS}", "schedule=constant")
    path = first.checkpoints[STEPS]
    words = f"train.max_steps={STEPS + 4}", "schedule=constant", f"checkpoint.resume={path}"
    second = run(tmp_path / "second", *after, *words)
    assert second.codes == [0], second
    decisions = [event for event in second.events("decision") if event["topic"] == "loss scale"]
    return second, [f"{event['topic']}: {event['text']}" for event in decisions]


def scales(ended: Ended) -> list[float]:
    return [event["scale"] for event in ended.events("step")]


def changed(ended: Ended) -> list[str]:
    return [text for event in ended.events("warning") if "other settings" in (text := event["text"])]


@pytest.mark.slow
def test_from_fp32_into_fp16_the_scale_starts_as_in_a_new_run(tmp_path: Path) -> None:
    second, logged = continued(tmp_path, ("precision=fp32",), ("precision=fp16",))
    assert scales(second) == [1024] * 4
    assert "precision.name is fp32 there and fp16 here" in "".join(changed(second))
    assert logged[0].startswith("loss scale: dynamic, starts at 2^10 within")
    assert second.result["applied_steps"] == STEPS + 4


@pytest.mark.slow
def test_from_dynamic_into_static_it_is_the_static_one(tmp_path: Path) -> None:
    static = ("precision.loss_scale.mode=static", "precision.loss_scale.init_scale=128")
    second, logged = continued(tmp_path, (), static)
    assert scales(second) == [128] * 4
    assert logged[0].startswith("loss scale: static, starts at 2^7 within 2^7 to 2^7, not from the state's")
    assert changed(second) == [
        "resumed with other settings than the checkpoint's: precision.loss_scale.mode is dynamic there and "
        "static here; precision.loss_scale.init_scale is 1024 there and 128 here"
    ]


@pytest.mark.slow
def test_what_moves_alike_is_taken_and_nothing_is_said(tmp_path: Path) -> None:
    second, logged = continued(tmp_path, (), ())
    assert scales(second) == [2048] * 4  # it has grown once, after 7 clean steps
    assert not any(line.startswith("loss scale") for line in logged)
    assert changed(second) == []
