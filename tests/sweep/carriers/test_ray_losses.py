"""Which failures start a job of Ray again: with a stand-in for Ray, which fails as a test lists."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.sweep.carriers import Change
from launcher.sweep.carriers.ray import LOSSES, RayCarrier
from launcher.sweep.record import SweepJob
from tests.configs import composed


class RayError(Exception): ...


class RayActorError(RayError): ...


class RayTaskError(RayError): ...


LOST, FAILED = RayActorError("its node died"), RayTaskError("no space left on device")
STARTED = ["10.0.0.1:0"]


class Ray:
    """As much of the module as the carrier uses. Each wait for a job ends with the next of `answers`."""

    exceptions = SimpleNamespace(RayError=RayError, RayActorError=RayActorError)

    def __init__(self, *answers: object) -> None:
        self._answers, self.placed = iter(answers), 0
        self.remote = lambda kind: SimpleNamespace(
            options=lambda **share: SimpleNamespace(remote=self._place)
        )

    def _place(self) -> object:
        self.placed += 1
        method = SimpleNamespace(remote=lambda *given: object())
        return SimpleNamespace(start=method, wait=method, send=method)

    def get(self, reference: object) -> object:
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get_runtime_context(self) -> object:
        return SimpleNamespace(gcs_address="127.0.0.1:1")

    def nodes(self) -> list[Any]:
        return [{"Alive": True, "Resources": {"GPU": 1}}]

    def wait(
        self, references: list[object], num_returns: int, timeout: float
    ) -> tuple[list[object], list[object]]:
        return references, []

    def kill(self, actor: object) -> None: ...

    def shutdown(self) -> None: ...


def changes(carrier: RayCarrier) -> Iterator[Change]:
    for _ in range(2 * LOSSES):
        yield from carrier.poll(0.0)


@pytest.mark.parametrize(
    ("answers", "placed", "code"),
    [
        ([LOST, STARTED, 0], 2, 0),
        ([STARTED, LOST, STARTED, 0], 2, 0),
        ([LOST] * (LOSSES + 1), LOSSES + 1, 1),
        ([FAILED], 1, 1),
        ([LOST, FAILED, FAILED, FAILED, FAILED, FAILED], 2, 1),
    ],
)
def test_only_a_lost_actor_is_replaced(tmp_path: Path, monkeypatch, answers, placed, code) -> None:
    ray = Ray(*answers)
    monkeypatch.setattr("launcher.sweep.carriers.ray.connected", lambda: ray)
    with RayCarrier(composed().sweep) as carrier:
        carrier.submit(SweepJob(0, "0", ()), tmp_path)
        exits = [each.exit for each in changes(carrier) if each.exit is not None]
    assert (exits, ray.placed) == ([code], placed)


def test_a_job_that_was_asked_to_stop_is_not_started_again(tmp_path: Path, monkeypatch) -> None:
    ray = Ray(STARTED, LOST, STARTED, 0)
    monkeypatch.setattr("launcher.sweep.carriers.ray.connected", lambda: ray)
    with RayCarrier(composed().sweep) as carrier:
        job = SweepJob(0, "0", ())
        carrier.submit(job, tmp_path)
        assert [each.exit for each in carrier.poll(0.0)] == [None]
        carrier.stop(job)
        assert [each.exit for each in changes(carrier)] == [128 + signal.SIGKILL]
    assert ray.placed == 1
