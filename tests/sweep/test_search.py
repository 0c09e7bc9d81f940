"""Which jobs a search asks for: the same after any interruption, and what its study says of them."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from launcher.cli import main
from launcher.config.search_space import Space
from launcher.errors import ConfigError
from launcher.sweep.job import DONE, FAILED, PRUNED, RUNNING, Job
from launcher.sweep.search import STUDY, OptunaSearch, RandomSearch

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


def space(*lines: str) -> Space:
    return Space.of(OverridesParser.create().parse_overrides(list(lines)))


def values(job: Job) -> dict[str, str]:
    return dict(line.split("=", 1) for line in job.overrides)


def result_of(job: Job) -> tuple[str, float | None]:
    """Best at lr=0.01, n=4, w=0.5 with adamw."""
    at = values(job)
    metric = -((math.log10(float(at["lr"])) + 2) ** 2) - abs(int(at["n"]) - 4) - abs(float(at["w"]) - 0.5)
    metric -= at["optim"] == "sgd"
    if job.number % 7 == 3:
        return FAILED, None
    return (PRUNED if job.number % 5 == 4 else DONE), metric


def searched(
    make: Callable[[list[Job]], OptunaSearch | RandomSearch], killed_before: Collection[float] = ()
) -> list[Job]:
    """All jobs, one at a time; the parent is killed before these numbers, at .5 while the job runs."""
    jobs: list[Job] = []
    search = make(jobs)
    for number in range(JOBS):
        if number in killed_before:
            search = make(jobs)
        lines = search.ask()
        assert lines is not None
        job = Job(number, f"{number}", lines, state=RUNNING)
        jobs.append(job)
        if number + 0.5 in killed_before:
            search = make(jobs)
        job.state, job.metric = result_of(job)
        job.higher_is_better = None if job.metric is None else True
        search.tell(job)
    return jobs


def test_random_draws_depend_on_the_seed_and_the_number_alone() -> None:
    def make(seed: int) -> Callable[[list[Job]], OptunaSearch | RandomSearch]:
        return lambda jobs: RandomSearch(space(*WIDE), seed, jobs)

    whole = searched(make(0))
    assert whole == searched(make(0), {1, 4.5, 17})
    assert whole != searched(make(1))
    assert len({tuple(job.overrides) for job in whole}) == JOBS


def test_a_finite_space_is_drawn_without_repetition_and_then_exhausted() -> None:
    search = RandomSearch(space("a=1,2,3", "b=x,y"), 0, [])
    assert len({search.ask() for _ in range(6)} - {None}) == 6
    assert search.ask() is None


def test_a_search_without_optuna_says_how_to_install_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install .*optuna>=4\.9,<6"):
        OptunaSearch(space("a=1,2"), 0, tmp_path, [])


def test_a_search_without_optuna_leaves_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    place = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    assert main(["-m", "recipe=resnet18", "sweep=tpe", "optim.lr=0.05,0.1", place]) == 2
    assert "sweep=tpe needs Optuna" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_optuna_is_imported_for_its_own_search_alone() -> None:
    code = (
        "import sys, launcher.commands.train, launcher.sweep.search as search\n"
        "from launcher.config.search_space import Space\n"
        "search.RandomSearch(Space(()), 0, []).ask()\n"
        "assert 'optuna' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@needs_optuna
class TestOptuna:
    def make(self, directory: Path) -> Callable[[list[Job]], OptunaSearch | RandomSearch]:
        return lambda jobs: OptunaSearch(space(*WIDE), 0, directory, jobs)

    def test_a_search_that_was_killed_asks_for_the_same_jobs(self, tmp_path: Path) -> None:
        whole = searched(self.make(tmp_path))
        assert whole == searched(self.make(tmp_path), {0.5, 2, 6.5, 12, 12.5, 20, 23.5})

    def test_it_learns_and_its_study_says_what_became_of_each_job(self, tmp_path: Path) -> None:
        import optuna

        jobs = searched(self.make(tmp_path))
        backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / STUDY))
        study = optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(backend))
        assert [trial.state.name for trial in study.trials] == [
            {DONE: "COMPLETE", PRUNED: "PRUNED", FAILED: "FAIL"}[job.state] for job in jobs
        ]
        assert study.direction.name == "MAXIMIZE"
        assert study.best_value == max(
            job.metric for job in jobs if job.state == DONE and job.metric is not None
        )
        drawn, learnt = (
            [job.metric for job in part if job.metric is not None] for part in (jobs[:10], jobs[10:])
        )
        assert sum(learnt) / len(learnt) > sum(drawn) / len(drawn)

    def test_a_lock_and_a_torn_line_of_a_killed_parent_cost_nothing(self, tmp_path: Path) -> None:
        search = OptunaSearch(space(*WIDE), 0, tmp_path, [])
        lines = search.ask()
        assert lines is not None
        (tmp_path / f"{STUDY}.lock").symlink_to(tmp_path / STUDY)
        with open(tmp_path / STUDY, "ab") as study:
            study.write(b'{"op_code": 4, "worker')
        again = OptunaSearch(space(*WIDE), 0, tmp_path, [Job(0, "0", lines, state=RUNNING)])
        job = Job(0, "0", lines, state=DONE, metric=1.0)
        again.tell(job)
        assert again.ask() is not None

    def test_a_finite_space_is_asked_for_without_repetition(self, tmp_path: Path) -> None:
        search = OptunaSearch(space("a=1,2,3", "b=x,y"), 0, tmp_path, [])
        assert len({search.ask() for _ in range(6)} - {None}) == 6
        assert search.ask() is None

    def test_a_range_of_one_value_is_one_job(self, tmp_path: Path) -> None:
        search = OptunaSearch(space("a=range(3,4)"), 0, tmp_path, [])
        assert (search.ask(), search.ask()) == (("a=3",), None)

    def test_a_metric_that_is_no_number_is_a_failure_to_the_study(self, tmp_path: Path) -> None:
        search = OptunaSearch(space("a=1,2,3"), 0, tmp_path, [])
        for number, metric in enumerate((math.nan, None, 0.5)):
            lines = search.ask()
            assert lines is not None
            search.tell(Job(number, "", lines, state=DONE, metric=metric, higher_is_better=False))
