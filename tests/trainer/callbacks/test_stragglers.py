"""The rank that the others wait for is named, from the ranks' own waiting times, which travel as votes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from launcher.engine import StepReport
from launcher.engine.limits import VOTES
from launcher.report.event_history import EventHistory
from launcher.telemetry import Telemetry
from launcher.telemetry.events import StragglerEvent
from launcher.trainer.callbacks.stragglers import WINDOW, Stragglers
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import Position
from launcher.trainer.step_flags import DATA_SLOT, WAIT_SLOT, StepFlag
from tests.trainer.callbacks.test_step_logger import Recorder
from tests.trainer.reports import CLEAN, LIMITS, metrics_of
from tests.trainer.runs import context_alone

Spans = dict[str, float]


class Ballot:
    """What one rank votes in a step; the sum over the ranks is what each step's report has."""

    def __init__(self) -> None:
        self.votes = [0] * VOTES

    def vote(self, question: int, votes: int = 1) -> None:
        self.votes[question] = votes

    def take(self) -> list[int]:
        taken, self.votes = self.votes, [0] * VOTES
        return taken


def train(
    spans: list[Spans],
    steps: int,
    first: int = 1,
    dropped: tuple[int, ...] = (),
) -> Recorder:
    """The events of rank 0 where each rank's steps have these times. A step is read one step late."""
    recorder = Recorder()
    ballots = [Ballot() for _ in spans]
    ranks = [
        Stragglers(run_of(rank, ballot, recorder), hosts(len(spans))) for rank, ballot in enumerate(ballots)
    ]
    waiting: tuple[Position, list[StepReport]] | None = None
    for step in range(first, first + steps):
        position = Position(0, step - 1, step)
        for rank in ranks:
            rank.on_step_start(position)
        votes = tuple(map(sum, zip(*(ballot.take() for ballot in ballots), strict=True)))
        reports = [
            replace(CLEAN, votes=(0,) * VOTES if step in dropped else votes, spans_ms=own) for own in spans
        ]
        if waiting is not None:
            for rank, report in zip(ranks, waiting[1], strict=True):
                rank.on_step_metrics(waiting[0], metrics_of(report))
        waiting = (position, reports)
    return recorder


def run_of(rank: int, ballot: Ballot, recorder: Recorder) -> TrainContext:
    run = context_alone(Telemetry([recorder] if rank == 0 else []), LIMITS, 1)
    return replace(run, env=replace(run.env, rank=rank), stepper=cast(Any, ballot))


def hosts(ranks: int) -> list[str]:
    return [f"node{rank}" for rank in range(ranks)]


def times(wire: float, data: float = 1.0, compute: float = 10.0) -> Spans:
    return {"data": data, "compute": compute, "wire": wire, "update": 1.0}


def test_the_rank_that_waits_least_is_named_with_host_time_and_cause():
    ranks = [times(9.0), times(8.0), times(1.0, compute=18.0), times(8.5)]
    recorder = train(ranks, 3 * WINDOW)
    first = recorder.of("straggler")[0]
    assert (first["rank"], first["host"], first["cause"]) == (2, "node2", "compute")
    assert (first["first_step"], first["last_step"]) == (WINDOW, 2 * WINDOW - 1), (
        "the first window is not whole"
    )
    assert first["late_ms"] == pytest.approx(7.5)
    assert first["step_ms"] == pytest.approx(21.0)
    (warning,) = recorder.of("warning")
    assert (
        "rank 2 on node2 arrives last: the other ranks waited 7.5 of the 21.0 ms of a step" in warning["text"]
    )
    assert "look for other processes" in warning["text"]
    found = EventHistory()
    found.add(recorder.of("straggler"))
    assert found.all(StragglerEvent), "reports know the event"


def test_a_slow_loader_is_the_cause_where_its_wait_for_data_explains_it():
    recorder = train([times(9.0), times(1.0, data=9.0)], 3 * WINDOW)
    assert {(event["rank"], event["cause"]) for event in recorder.of("straggler")} == {(1, "data")}
    assert "raise data.num_workers" in recorder.of("warning")[0]["text"]


@pytest.mark.parametrize("ranks", [[times(5.0), times(4.0)], [times(0.8), times(0.0)]])
def test_nearly_even_nobody_is_named(ranks):
    recorder = train(ranks, 4 * WINDOW)
    assert recorder.events == []


def test_the_warning_is_repeated_with_a_count_and_each_window_is_an_event():
    recorder = train([times(9.0), times(1.0)], 13 * WINDOW)
    assert len(recorder.of("straggler")) == 11
    assert [("10 times so far" in event["text"]) for event in recorder.of("warning")] == [False, True]


def test_more_ranks_than_steps_in_a_window_take_their_turns():
    ranks = [times(9.0) for _ in range(70)]
    ranks[66] = times(0.5)
    recorder = train(ranks, 3 * 72 + 5)
    assert {event["rank"] for event in recorder.of("straggler")} == {66}


def test_a_window_that_was_not_whole_or_not_heard_of_names_nobody():
    assert train([times(9.0), times(1.0)], WINDOW + 20, first=WINDOW + 7).events == []
    turn_of_rank_1 = 2 * WINDOW + 3
    events = train([times(9.0), times(1.0)], 3 * WINDOW + 10, dropped=(turn_of_rank_1,)).of("straggler")
    assert [event["first_step"] for event in events] == [2 * WINDOW]


def test_the_times_use_no_question_of_the_votes():
    slots = {WAIT_SLOT, DATA_SLOT}
    assert len(slots) == 2
    assert not slots & set(StepFlag)
    assert max(*slots, *StepFlag) < VOTES
