"""Which jobs a search asks for: the same after any interruption, and what its study says of them."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from launcher.cli import main
from launcher.config.search_space import Space
from launcher.errors import ConfigError
from launcher.sweep.search import drawn_at_random, drawn_by_tpe
from launcher.sweep.state import JobState, SweepJob

needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="needs Optuna: pip install optuna"
)
WIDE = (
    "recipe=resnet18",
    "lr=tag(log,interval(1e-4,1))",
    "optim=sgd,adamw",
    "n=int(interval(1,9))",
    "w=range(0,1,0.25)",
)
JOBS = 25
Draw = Callable[[Space, int, Sequence[SweepJob]], tuple[str, ...] | None]


def space(*lines: str) -> Space:
    return Space.of(OverridesParser.create().parse_overrides(list(lines)))


def values(job: SweepJob) -> dict[str, str]:
    return dict(line.split("=", 1) for line in job.overrides)


def result_of(job: SweepJob) -> tuple[str, float | None]:
    """Best at lr=0.01, n=4, w=0.5 with adamw."""
    at = values(job)
    metric = -((math.log10(float(at["lr"])) + 2) ** 2) - abs(int(at["n"]) - 4) - abs(float(at["w"]) - 0.5)
    metric -= at["optim"] == "sgd"
    if job.number % 7 == 3:
        return JobState.FAILED, None
    return (JobState.PRUNED if job.number % 5 == 4 else JobState.DONE), metric


def searched(draw: Draw, seed: int = 0) -> list[SweepJob]:
    """All jobs, one at a time."""
    jobs: list[SweepJob] = []
    for number in range(JOBS):
        lines = draw(space(*WIDE), seed, jobs)
        assert lines is not None
        job = SweepJob(number, f"{number}", lines, state=JobState.RUNNING)
        jobs.append(job)
        job.state, job.metric = result_of(job)
        job.higher_is_better = None if job.metric is None else True
    return jobs


def all_of(draw: Draw, *lines: str, most: int = 10) -> list[tuple[str, ...]]:
    """The draws from a finite space until there is none."""
    jobs: list[SweepJob] = []
    while len(jobs) < most and (drawn := draw(space(*lines), 0, jobs)) is not None:
        jobs.append(SweepJob(len(jobs), "", [*drawn], state=JobState.RUNNING))
    return [tuple(job.overrides) for job in jobs]


def test_random_draws_depend_on_the_seed_and_the_number_alone() -> None:
    whole = searched(drawn_at_random)
    assert whole == searched(drawn_at_random)
    assert whole != searched(drawn_at_random, 1)
    assert len({tuple(job.overrides) for job in whole}) == JOBS


def test_a_finite_space_is_drawn_without_repetition_and_then_exhausted() -> None:
    found = all_of(drawn_at_random, "a=1,2,3", "b=x,y")
    assert len({*found}) == len(found) == 6


def test_a_search_without_optuna_says_how_to_install_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install .*optuna>=4\.9,<6"):
        drawn_by_tpe(space("a=1,2"), 0, [])


def test_a_search_without_optuna_leaves_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    place = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    assert main(["-m", "recipe=resnet18", "sweep=tpe", "optim.lr=0.05,0.1", place]) == 2
    assert "sweep=tpe and sweep.prune=asha need Optuna" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_optuna_is_imported_for_its_own_search_alone() -> None:
    code = (
        "import sys, launcher.commands.train, launcher.sweep.search as search\n"
        "from launcher.config.search_space import Space\n"
        "search.drawn_at_random(Space(()), 0, [])\n"
        "assert 'optuna' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@needs_optuna
class TestOptuna:
    def test_a_draw_depends_on_the_seed_and_the_jobs_before_it_alone(self) -> None:
        whole = searched(drawn_by_tpe)
        for number in (0, 1, 6, 12, 20):
            before = [
                replace(job, overrides=[*job.overrides]) for job in whole[:number]
            ]  # as read from a file
            assert drawn_by_tpe(space(*WIDE), 0, before) == tuple(whole[number].overrides)

    def test_it_learns(self) -> None:
        jobs = searched(drawn_by_tpe)
        drawn, learnt = (
            [job.metric for job in part if job.metric is not None] for part in (jobs[:10], jobs[10:])
        )
        assert sum(learnt) / len(learnt) > sum(drawn) / len(drawn)

    def test_a_finite_space_is_asked_for_without_repetition(self) -> None:
        found = all_of(drawn_by_tpe, "a=1,2,3", "b=x,y")
        assert len({*found}) == len(found) == 6

    def test_a_range_of_one_value_is_one_job(self) -> None:
        assert all_of(drawn_by_tpe, "a=range(3,4)") == [("a=3",)]

    def test_a_metric_that_is_no_number_is_a_failure_to_the_study(self) -> None:
        jobs: list[SweepJob] = []
        for number, metric in enumerate((math.nan, None, 0.5)):
            lines = drawn_by_tpe(space("a=1,2,3"), 0, jobs)
            assert lines is not None
            jobs.append(
                SweepJob(number, "", lines, state=JobState.DONE, metric=metric, higher_is_better=False)
            )
        assert drawn_by_tpe(space("a=1,2,3"), 0, jobs) is None
