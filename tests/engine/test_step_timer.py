"""The clock of a step: each part has its time, and a new step begins where the last one was taken."""

from __future__ import annotations

import pytest
import torch

from launcher.engine.step_timer import StepClock, spans_ms


@pytest.fixture
def elapse(monkeypatch):
    """Moves the host's clock by so many seconds."""
    now = [100.0]
    monkeypatch.setattr("launcher.engine.step_timer.time.perf_counter", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


def test_each_part_lasts_from_the_mark_before_and_parts_of_one_name_add_up(elapse) -> None:
    clock = StepClock(torch.device("cpu"))
    for part, seconds in (("data", 0.5), ("compute", 2.0), ("data", 0.25), ("update", 0.0)):
        elapse(seconds)
        clock.mark(part)
    marks = clock.take()
    elapse(4.0)
    clock.mark("data")
    assert spans_ms(marks) == {"data": 750.0, "compute": 2000.0, "update": 0.0}
    assert spans_ms(clock.take()) == {"data": 4000.0}, "the next step begins where this one was taken"
    assert spans_ms(clock.take()) == {}


def test_time_before_a_restart_is_in_no_part(elapse) -> None:
    clock = StepClock(torch.device("cpu"))
    clock.mark("compute")
    elapse(9.0)
    clock.restart()
    elapse(1.0)
    clock.mark("data")
    assert spans_ms(clock.take()) == {"data": 1000.0}


def test_who_listens_learns_of_each_mark_and_of_each_new_step() -> None:
    clock, names = StepClock(torch.device("cpu")), []
    clock.on_mark = names.append
    clock.mark("data")
    clock.take()
    clock.mark("compute")
    assert names == ["data", "", "compute"]
