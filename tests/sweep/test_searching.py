"""Searches as real processes: pruned, killed at any moment, continued, refused."""

from __future__ import annotations

import importlib.util
import json
import random
import time
from functools import partial
from pathlib import Path

import pytest

from tests.faults.parent import Parent, write_recipe
from tests.sweep.test_sweep import HERE, jobs, states

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]
SPACE = ("optim.lr=tag(log,interval(1e-3,1))", "optim.momentum=0.5,0.9")
SHORT = ("train.epochs=2", "sweep.stop.max_trials=5", *SPACE)
KINDS = [
    "random",
    pytest.param(
        "tpe",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("optuna") is None, reason="needs Optuna: pip install optuna"
        ),
    ),
]


def has_started(directory: Path, number: int) -> bool:
    return len(list((directory / "sweep").glob("[0-9]*_*/status.json"))) >= number


def trials(directory: Path) -> list[tuple[list[str], str, float | None]]:
    return [(job["overrides"], job["state"], job["metric"]) for job in jobs(directory)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_that_is_killed_again_and_again_has_the_trials_of_one_that_is_not(
    tmp_path: Path, kind: str
) -> None:
    found = []
    moments = random.Random(kind)
    for name, kills in (("whole", 0), ("killed", 3)):
        place = tmp_path / name
        place.mkdir()
        write_recipe(place, "time.sleep(0.01)")
        words = (*HERE, f"sweep={kind}", *SHORT)
        for kill in range(kills):
            with Parent(place, *words, nproc=1, name=f"{kill}") as parent:
                parent.wait_until(partial(has_started, place, kill + 1), 40, "a further job")
                time.sleep(moments.uniform(0, 2))  # leaving the context kills it
        with Parent(place, *words, nproc=1) as parent:
            assert parent.end(90) == 0, parent.stderr
        assert states(place) == ["done"] * 5
        folders = list((place / "sweep").glob("[0-9]*_*"))
        assert len(folders) == 5, "no folder of a job that was never recorded"
        found.append(trials(place))
    assert found[0] == found[1]


def test_jobs_that_fall_behind_are_pruned_and_not_run_again(tmp_path: Path) -> None:
    write_recipe(tmp_path, "time.sleep(0.02)")
    long = ("train.epochs=40", "train.eval_every_epochs=1", "sweep.prune=asha", "sweep.keep_pruned=false")
    words = (*HERE, "optim.lr=1,0.5,1e-9,2e-9,3e-9", *long)
    with Parent(tmp_path, *words, nproc=1) as parent:
        assert parent.end(90) == 0, parent.stderr + parent.stdout
    found = jobs(tmp_path)
    pruned = [job for job in found if job["state"] == "pruned"]
    assert {job["state"] for job in found} == {"done", "pruned"}
    assert pruned
    assert "among the best third" in pruned[0]["error"]
    for job in pruned:
        place = tmp_path / "sweep" / job["name"]
        assert json.loads((place / "status.json").read_text())["state"] == "pruned"
        assert job["exit"] == 11
        assert job["metric"] is not None
        assert not (place / "checkpoints").exists()
    with Parent(tmp_path, *words, nproc=1, name="again") as parent:
        assert parent.end(60) == 0
    assert jobs(tmp_path) == found


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("sweep=random", "seed=1,2", "optim.lr=interval(0.2,0.3)"), 2, "holds another sweep"),
        (
            ("sweep=random", "optim.lr=interval(0.1,0.3)", "data.batch_size=16"),
            2,
            "data.batch_size=16 is here",
        ),
    ],
)
def test_another_search_in_the_same_directory_is_refused(
    tmp_path: Path, words: tuple[str, ...], code: int, text: str
) -> None:
    write_recipe(tmp_path)
    first = ("sweep=random", "optim.lr=interval(0.1,0.3)", "sweep.stop.max_trials=1", "train.max_steps=2")
    with Parent(tmp_path, *HERE, *first, nproc=1) as parent:
        assert parent.end(60) == 0, parent.stderr
    with Parent(tmp_path, *HERE, *words, "train.max_steps=2", nproc=1, name="again") as parent:
        assert parent.end(60) == code
        assert text in " ".join(parent.stderr.split())
