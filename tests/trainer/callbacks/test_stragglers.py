"""The rank that the others wait for is named, from the ranks' own waiting times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.distributed.env import WorkerEnv
from launcher.report.event_history import EventHistory
from launcher.telemetry import Telemetry
from launcher.telemetry.events import StragglerEvent
from launcher.trainer.callbacks.stragglers import WINDOW, Stragglers, latest_rank
from launcher.trainer.progress import StepIndex
from tests.ranks.harness import run_ranks
from tests.trainer.callbacks.test_step_logger import Recorder
from tests.trainer.reports import CLEAN, LIMITS, metrics_of
from tests.trainer.runs import context_alone


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([(9.0, 1.0), (8.0, 1.0), (1.0, 1.0), (8.5, 1.0)], (2, 7.5, "compute")),
        ([(9.0, 1.0), (1.0, 9.0)], (1, 8.0, "data")),
        ([(5.0, 1.0), (4.0, 1.0)], (1, 1.0, "compute")),
    ],
)
def test_the_rank_that_waits_least_is_the_latest_and_its_data_may_be_the_cause(times, expected) -> None:
    assert latest_rank(times) == expected


def train(
    env: WorkerEnv, communication_ms: list[float], steps: int, first: int, shares: tuple[int, ...] = ()
) -> list[dict[str, Any]]:
    """The events of a rank whose steps have this time of waiting, 10 ms of compute and 2 of others."""
    recorder = Recorder()
    context = replace(context_alone(Telemetry([recorder]), LIMITS, 1), env=env)
    context.plan = replace(context.plan, shares=shares)
    part = Stragglers(context, [f"node{rank}" for rank in range(env.world_size)])
    spans = {"data": 1.0, "compute": 10.0, "communication": communication_ms[env.rank], "update": 1.0}
    for step in range(first, first + steps):
        part.on_step_metrics(StepIndex(0, step - 1, step), metrics_of(replace(CLEAN, spans_ms=spans)))
    return recorder.events


def stragglers(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "straggler"]


def test_each_whole_window_is_an_event_and_the_first_one_a_warning() -> None:
    for events in run_ranks(2, train, [9.0, 1.0], 11 * WINDOW, 1):
        found = stragglers(events)
        assert len(found) == 10, "the first window is not counted"
        assert (found[0]["rank"], found[0]["host"], found[0]["cause"]) == (1, "node1", "compute")
        assert (found[0]["first_step"], found[0]["last_step"]) == (WINDOW + 1, 2 * WINDOW)
        assert found[0]["late_ms"] == pytest.approx(8.0)
        (warning,) = [event["text"] for event in events if event["event"] == "warning"]
        assert warning.startswith("rank 1 on node1 arrives last: the other ranks waited 8.0 of the ")
        history = EventHistory()
        history.add(found)
        assert history.all(StragglerEvent), "reports know the event"


def test_a_warning_names_the_share_of_a_batch_that_is_divided_by_speed() -> None:
    for events in run_ranks(2, train, [9.0, 1.0], 2 * WINDOW, 1, (5, 3)):
        (warning,) = [event["text"] for event in events if event["event"] == "warning"]
        assert warning.startswith("rank 1 on node1, with 3 of 8 samples, arrives last: ")


@pytest.mark.parametrize(
    ("communication_ms", "steps", "first"),
    [([5.0, 4.0], 3 * WINDOW, 1), ([9.0, 1.0], WINDOW + 20, WINDOW + 7)],
)
def test_nearly_even_or_in_no_whole_window_nobody_is_named(communication_ms, steps, first) -> None:
    assert run_ranks(2, train, communication_ms, steps, first) == [[], []]
