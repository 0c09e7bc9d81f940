"""Signs of life through shared memory: written by forked processes, read by the one that forked them."""

from __future__ import annotations

import os
import time

import pytest

from launcher.distributed.heartbeat import PHASES, STEP_PARTS, Heartbeat, Heartbeats
from launcher.engine.step_timer import PARTS


def test_the_parent_reads_what_each_forked_rank_wrote_last() -> None:
    table = Heartbeats(2)
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            heartbeat = table.of(rank)
            heartbeat.beat("data", 7)
            heartbeat.beat("compute" if rank == 0 else "communication")
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    assert [(beat.phase, beat.step) for beat in table.read()] == [("compute", 7), ("communication", 7)]
    assert all(0 <= beat.age_s < 5 for beat in table.read())
    behind = min(range(2), key=lambda rank: table.read()[rank].order)
    assert behind == 0


def test_a_new_table_and_a_restarted_one_say_starting() -> None:
    table = Heartbeats(1)
    table.of(0).beat("communication", 3)
    table.restart()
    assert [(beat.phase, beat.step) for beat in table.read()] == [("starting", 0)]


@pytest.mark.parametrize(
    ("phase", "done"),
    [("data", 6), ("compute", 6), ("update", 6), ("report", 7), ("evaluation", 7), ("done", 7)],
)
def test_a_step_counts_once_it_is_done(phase, done) -> None:
    table = Heartbeats(2)
    heartbeat = table.of(1)
    assert (heartbeat.latest.steps_done, table.steps_done()) == (0, 0)
    heartbeat.beat(phase, 7)
    assert (heartbeat.latest.steps_done, table.steps_done()) == (done, done)


def test_the_parts_of_a_step_enter_the_phases_that_follow_them() -> None:
    table = Heartbeats(2)
    heartbeat = table.of(1)
    enter = heartbeat.phase_setter({"data": "compute", "compute": "communication"})
    heartbeat.beat("data", 7)
    found = []
    for part in ("", "data", "compute", "update"):
        enter(part)
        found.append((table.read()[1].phase, heartbeat.latest.phase, table.read()[1].step))
    assert found == [(phase, phase, 7) for phase in ("data", "compute", "communication", "communication")]
    with pytest.raises(KeyError, match="no phase"):
        heartbeat.phase_setter({"data": "no phase"})("data")


def test_without_a_table_beating_is_allowed() -> None:
    for phase in PHASES:
        Heartbeat().beat(phase, 1)


def test_a_row_is_never_seen_half_written() -> None:
    table = Heartbeats(1)
    child = os.fork()
    if child == 0:
        heartbeat = table.of(0)
        for step in range(1, 400_000):
            heartbeat.beat("communication", step)
        os._exit(0)
    while table.read()[0].step == 0:
        time.sleep(0.001)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        for _ in range(1000):
            (beat,) = table.read()
            assert (beat.phase, beat.step > 0) == ("communication", True)
            assert beat.age_s < 60


def test_the_parts_of_a_step_have_the_names_that_the_engine_gives_them() -> None:
    assert STEP_PARTS == PARTS


@pytest.mark.parametrize("table", [True, False])
def test_a_phase_without_a_number_is_refused_with_and_without_a_reader(table) -> None:
    heartbeat = Heartbeats(1).of(0) if table else Heartbeat()
    with pytest.raises(KeyError):
        heartbeat.beat("dancing")
    assert heartbeat.latest.phase == "starting"


def test_user_code_that_waits_for_another_rank_is_timed_like_any_other_wait() -> None:
    """By the parent, which reads the same row as the rank's own timer."""
    heartbeats = Heartbeats(1)
    heartbeat = heartbeats.of(0)
    heartbeat.beat("loading data")
    with heartbeat.in_user_code():
        assert heartbeats.read()[0].user_code
        heartbeat.set_waits(True)
        assert not heartbeats.read()[0].user_code
        heartbeat.set_waits(False)
        assert heartbeats.read()[0].user_code
