"""Sweeps as real processes: side by side, killed, continued, and refused."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main
from launcher.commands.sweep import FOR_JOBS
from launcher.config.composition import Request
from launcher.config.resolve import compose_jobs
from launcher.launch.worker_count import CPU_WORKERS
from launcher.sweep.prepare import directory_of
from tests.faults.parent import ENDLESS, WORDS, Parent, write_recipe
from tests.test_cli import WATCHED, ask

HERE = ("-m", "hydra.sweep.dir=sweep")
DIES = """
if step == 5 and not os.path.exists('died'):
    open('died', 'w').close(); os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)
"""


def jobs(directory: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((directory / "sweep" / "sweep.json").read_text())["jobs"]
    return found


def states(directory: Path) -> list[str]:
    return [job["state"] for job in jobs(directory)]


def digests(directory: Path) -> list[str]:
    results = sorted((directory / "sweep").glob("*/result.json"))
    return [json.loads(path.read_text())["weights_sha256"] for path in results]


@pytest.mark.slow
def test_jobs_side_by_side_have_the_results_of_jobs_one_by_one(tmp_path: Path) -> None:
    found = {}
    for parallel in (1, 2):
        place = tmp_path / str(parallel)
        place.mkdir()
        write_recipe(place)
        words = (*HERE, f"sweep.parallel={parallel}", "train.epochs=2", "seed=0,1", "optim.lr=0.1,0.2")
        with Parent(place, *words, nproc=1) as parent:
            assert parent.end(60) == 0
            assert "sweep: 4 of 4 jobs done" in parent.stdout
            assert ("sweep: job 1 of 4 done after" in parent.stdout) == (parallel == 2)
        found[parallel] = digests(place)
        logs = sorted((place / "sweep").glob("*/output.log"))
        assert len(logs) == (4 if parallel == 2 else 0)
        assert all("done after" in log.read_text() for log in logs)
        rows = list(csv.DictReader((place / "sweep" / "summary.csv").read_text().splitlines()))
        assert [(row["exit"], row["attempts"]) for row in rows] == [("0", "1")] * 4
        assert all(float(row["device_seconds"]) > 0 for row in rows)
    assert found[1] == found[2]
    assert len({*found[1]}) == 4


@pytest.mark.slow
def test_what_a_sweep_imports_before_its_jobs_is_imported_by_each_job(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv(CPU_WORKERS, raising=False)  # the job runs in the process that is watched
    write_recipe(tmp_path)
    done = ask([*WORDS, "train.epochs=1"], tmp_path, WATCHED)
    assert done.returncode == 0, done.stderr
    assert {*FOR_JOBS} - {*done.stderr.splitlines()[-1].split()} == set()


@pytest.mark.slow
def test_a_job_whose_process_is_killed_is_told_at_once_and_tried_again(tmp_path: Path) -> None:
    write_recipe(tmp_path, DIES)
    words = (*HERE, "sweep.parallel=2", "sweep.retries=1", "train.epochs=2", "seed=0,1")
    with Parent(tmp_path, *words) as parent:
        assert parent.end(60) == 0
        told = " ".join(parent.stderr.split())
        assert re.search(
            r"job \d of 2 failed after \S+ and runs again, exit 137: was killed by SIGKILL; output: ", told
        )
    assert states(tmp_path) == ["done", "done"]
    assert sorted(job["attempts"] for job in jobs(tmp_path)) == [1, 2]


@pytest.mark.slow
def test_sigterm_saves_all_jobs_and_says_how_to_continue(tmp_path: Path) -> None:
    write_recipe(tmp_path, "if os.path.exists('slow'): " + ENDLESS)
    (tmp_path / "slow").touch()
    with Parent(tmp_path, *HERE, "sweep.parallel=2", "train.epochs=60", "seed=0,1,2", nproc=1) as parent:
        parent.rank(0)
        parent.wait_until(lambda: parent.stdout.count("sweep: job") == 2, 40, "two jobs run")
        parent.signal(signal.SIGTERM)
        assert parent.end(40) in (75, 143)  # one of them may not have begun to train
        assert "to save and stop" in parent.stdout
        advice = " ".join(parent.stderr.split()).partition("the same command with ")[2].partition(": it")[0]
    assert states(tmp_path)[2] == "waiting"
    (tmp_path / "slow").unlink()
    words = ("-m", *shlex.split(advice), "sweep.parallel=2", "train.epochs=60", "seed=0,1,2")
    with Parent(tmp_path, *words, nproc=1, name="again") as parent:
        assert parent.end(60) == 0
        assert "sweep: 3 of 3 jobs done" in parent.stdout


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, 2])
def test_a_request_to_save_is_passed_on_to_the_jobs(tmp_path: Path, parallel: int) -> None:
    write_recipe(tmp_path, "if os.path.exists('slow'): " + ENDLESS)
    (tmp_path / "slow").touch()
    words = (*HERE, f"sweep.parallel={parallel}", "train.epochs=60", "seed=0,1")
    with Parent(tmp_path, *words, nproc=1) as parent:
        parent.rank(0)
        parent.wait_until(lambda: parent.stdout.count("sweep: job") == parallel, 40, "jobs run")

        def saved() -> int:
            parent.signal(signal.SIGUSR1)  # a job that does not train yet saves nothing
            return len(list((tmp_path / "sweep").glob("*/checkpoints/step-*/manifest.json")))

        parent.wait_until(lambda: saved() >= parallel, 40, "each of them has saved")
        (tmp_path / "slow").unlink()
        assert parent.end(60) == 0
    assert states(tmp_path) == ["done"] * 2


def test_a_sweep_that_is_killed_again_and_again_ends_as_one_that_is_not(tmp_path: Path) -> None:
    """The same command each time. Which moments are hit depends on the machine; the results must not.

    A process is killed after a share of the time that the undisturbed sweep took: mostly twice or more, and
    at least once if that sweep was slowed down by others.
    """
    words = (*HERE, "sweep.parallel=2", "train.epochs=30", "checkpoint.every_steps=7", "seed=0,1,2,3")
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    for place in (undisturbed, killed):
        place.mkdir()
        write_recipe(place, ENDLESS)
    began = time.monotonic()
    with Parent(undisturbed, *words, nproc=1) as parent:
        assert parent.end(120) == 0
    took_s = time.monotonic() - began
    chance, kills = random.Random(0), 0
    while True:
        with Parent(killed, *words, nproc=1, name=f"parent{kills}") as parent:
            deadline = time.monotonic() + took_s * chance.uniform(0.1, 0.3) * (1 + kills / 4)
            while parent._process.exitcode is None and time.monotonic() < deadline:
                time.sleep(0.01)
            if parent._process.exitcode is not None:
                assert parent._process.exitcode == 0, parent.stderr
                break
        kills += 1
        assert kills < 60
    assert kills
    assert states(killed) == ["done"] * 4
    assert digests(killed) == digests(undisturbed)
    assert [job["name"] for job in jobs(killed)] == [job["name"] for job in jobs(undisturbed)]


@pytest.mark.slow
def test_a_finished_sweep_is_left_and_another_is_refused(tmp_path: Path, capsys, monkeypatch) -> None:
    write_recipe(tmp_path)
    words = (*HERE, "train.epochs=1", "seed=0,1", "sweep.parallel=2")
    with Parent(tmp_path, *words, nproc=1) as parent:
        assert parent.end(60) == 0
    before = digests(tmp_path)
    with Parent(tmp_path, *words, nproc=1, name="again") as parent:
        assert parent.end(60) == 0
        assert "sweep: 2 of 2 jobs done" in parent.stdout
        assert "sweep: job" not in parent.stdout
    monkeypatch.chdir(tmp_path)
    assert main(["-m", f"sweep.resume={tmp_path / 'sweep'}"]) == 0  # has recorded all other words
    assert "sweep: 2 of 2 jobs done" in capsys.readouterr().out
    assert digests(tmp_path) == before
    for other, difference in (
        ("optim.lr=0.3", "optim.lr=0.3 is here and not there"),
        ("seed=0,1,2", "seed=0,1,2 is here and not there"),
    ):
        with Parent(tmp_path, *words, other, nproc=1, name="other") as parent:
            assert parent.end(60) == 2
            assert difference in " ".join(parent.stderr.split())


@pytest.mark.slow
def test_two_processes_cannot_run_one_sweep(tmp_path: Path) -> None:
    write_recipe(tmp_path, ENDLESS)
    words = (*HERE, "train.epochs=1000", "seed=0,1")
    with Parent(tmp_path, *words, nproc=1) as parent:
        parent.rank(0)
        with Parent(tmp_path, *words, nproc=1, name="second") as second:
            assert second.end(60) == 2
            assert re.search(
                r"hydra.sweep.dir=\S+ is in use by another process", " ".join(second.stderr.split())
            )
        with Parent(tmp_path, "-m", "sweep.resume=sweep", nproc=1, name="third") as third:
            assert third.end(60) == 2
            assert "is in use by another process" in " ".join(third.stderr.split())


REFUSED = [
    (["seed=0,1", "sweep.parallel=0"], "sweep.parallel=0: must be auto or a whole number of at least 1"),
    (["seed=0,1", "sweep.stop.max_trials=1"], "a grid runs all of its jobs"),
    (["seed=0,1", "sweep.paralel=2"], "sweep.paralel=2: there is no such key. Nearest: sweep.parallel"),
    (["seed=0,1", "sweep.parallel=1,2"], "a setting of the whole sweep takes one value"),
    (["seed=range(100000)"], "100,000 jobs: a sweep has at most 2,000"),
    (["seed=range(100)", "optim.lr=range(1,100)"], "9,900 jobs: a sweep has at most 2,000"),
    (["seed=0,1", "hydra.sweep.subdir=same"], "hydra.sweep.subdir=same: Hydra's own settings are not used"),
    (["seed=0,1", "hydra.sweep.dir=/d/${oc.env:NOT_SET}"], "variable 'NOT_SET' not found"),
    (["seed=0,1", "hydra.sweep.dir=foreign"], "files that do not belong to one: config.yaml"),
    (["seed=0,1", "sweep.resume=nothing"], "sweep.resume=.*nothing: holds no sweep"),
    (["sweep.resume=foreign"], "foreign: holds no sweep"),
    (["seed=0,1", "hydra/launcher=submitit_slurm"], "sweep.launcher=slurm runs jobs on Slurm"),
    (["seed=0,1", "hydra/sweeper=optuna"], "sweep=random and sweep=tpe"),
    (["seed=0,1,2,3,x"], "seed=x: must be a whole number"),
]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(("words", "text"), REFUSED)
def test_what_cannot_run_is_refused_before_the_first_job(tmp_path, monkeypatch, capsys, words, text) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.yaml").touch()
    recipe = [] if words == ["sweep.resume=foreign"] else ["recipe=resnet18", "tracker=none"]
    assert main(["-m", *recipe, *words]) == 2
    assert re.search(text, " ".join(capsys.readouterr().err.split()))
    assert not [*tmp_path.glob("**/status.json")]
    assert os.listdir(tmp_path / "foreign") == ["config.yaml"]


@pytest.mark.parametrize("key", ["hydra.sweep.dir", "sweep.resume"])
def test_the_directory_of_a_sweep_may_be_given_by_that_of_the_user(tmp_path: Path, monkeypatch, key) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "mine").mkdir(parents=True)
    (tmp_path / "home" / "mine" / "sweep.json").touch()
    request = Request(("recipe=cnn", "seed=0,1", f"{key}='~/mine'"), None, multirun=True)
    assert directory_of(request, compose_jobs(request)) == tmp_path / "home" / "mine"
    assert os.listdir(tmp_path) == ["home"]


def test_a_typo_in_an_option_of_an_own_recipe_ends_the_sweep_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from launcher.recipe import Config, Recipe, recipe\n\n"
        '@recipe("mine")\ndef mine(config: Config, width: int = 8) -> Recipe: ...\n'
    )
    assert main(["-m", "recipe=mine.py", "recipe.widht=4,8", "hydra.sweep.dir=sweep"]) == 2
    assert "recipe.widht=4: there is no such key. Nearest: recipe.width." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py"] in ([], ["__pycache__"])
