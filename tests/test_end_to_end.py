"""The main road, driven as a user drives it: torchrun, real processes, real files, real tracker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.telemetry.event_log import read_events
from tests.forked import launch_forked

SHORT = ["recipe=resnet18", "train.max_steps=6", "train.log_every_steps=2", "data.batch_size=32"]


def launch(
    directory: Path, words: Sequence[str], ranks: int = 2, timeout_s: float = 100
) -> subprocess.CompletedProcess[str]:
    """Run the launcher in `directory` on this many ranks (0: without torchrun)."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    return subprocess.run(
        [sys.executable, *torchrun, "-m", "launcher", *words],
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def only_run(directory: Path, recipe: str = "resnet18") -> Path:
    (run_dir,) = (directory / "outputs" / recipe).iterdir()
    return run_dir


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One short run on two ranks, looked at by several tests."""
    directory = tmp_path_factory.mktemp("run")
    done = launch(directory, SHORT)
    assert done.returncode == 0, done.stderr
    return done, only_run(directory)


@pytest.mark.slow
def test_it_prints_decisions_evaluation_report_and_files_once(finished) -> None:
    done, run_dir = finished
    for line in (
        "workers 2 (2 x CPU",
        "precision fp16, ",
        "tracker offline: no API key",
        "weighted avg",
        f"directory {run_dir}",
        f"files: {run_dir}",
    ):
        assert done.stdout.count(line) == 1, (line, done.stdout)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_run_directory_holds_what_the_readme_lists(finished) -> None:
    _, run_dir = finished
    expected = {
        ".lock",
        "checkpoints",
        "classification_report.txt",
        "config.yaml",
        "env.json",
        "model",
        "logs",
        "metrics.jsonl",
        "overrides.txt",
        "report.html",
        "result.json",
        "status.json",
        "trackers",  # how far each one has written
        "wandb",
    }
    assert {path.name for path in run_dir.iterdir()} == expected
    assert {path.name for path in (run_dir / "logs").iterdir()} == {"rank0.log", "rank1.log"}


def test_the_result_says_what_happened(finished) -> None:
    _, run_dir = finished
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["state"], result["exit"], result["steps"]) == ("done", 0, 6)
    assert result["applied_steps"] + result["skipped_steps"] == 6
    assert sum(map(sum, result["confusion_matrix"])) == 359  # a fifth of 1797, stratified
    assert result["metric"] == result["metrics"]["accuracy"]
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["state"], status["exit"], status["step"]) == ("done", 0, 6)


def test_events_carry_the_documented_fields(finished) -> None:
    _, run_dir = finished
    events = read_events(run_dir / "metrics.jsonl")
    kinds = [event["event"] for event in events]
    assert kinds.index("start") < kinds.index("step") < kinds.index("eval") < kinds.index("end")
    step = next(event for event in reversed(events) if event["event"] == "step")
    for field in ("loss", "lr", "grad_norm", "scale", "skipped", "samples_per_s", "step_ms", "memory_bytes"):
        assert isinstance(step[field], int | float), field
    parts = sum(step[f"{part}_ms"] for part in ("data", "compute", "communication", "update"))
    assert 0.8 * step["step_ms"] < parts < 1.05 * step["step_ms"]


def test_half_of_the_bytes_of_fp32_travel(finished, tmp_path) -> None:
    _, run_dir = finished
    half = json.loads((run_dir / "result.json").read_text())
    done = launch(tmp_path, [*SHORT, "train.max_steps=2", "precision=fp32", "tracker=none"])
    assert done.returncode == 0, done.stderr
    full = json.loads((only_run(tmp_path) / "result.json").read_text())
    vectors = 4 * 9_610 + 64  # norms and biases stay fp32; the rest is padding and the slots of the ranks
    assert half["wire_bytes_per_step"] == pytest.approx(full["wire_bytes_per_step"] / 2, abs=vectors)
    assert half["wire_bytes_per_step"] <= 2 * half["parameters"] + vectors


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        pytest.param(
            0,
            ["precision=amp_fp16", "optim=adamw", "precision.loss_scale.init_scale=1024"],
            marks=pytest.mark.slow,
        ),
        pytest.param(1, ["precision=bf16"], marks=pytest.mark.slow),
        pytest.param(
            3,
            ["precision=amp_bf16", "data.batch_size=48", "data.micro_batch_size=10"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            ["data=synthetic", "precision=pure_fp16", "precision.loss_scale.mode=static"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_policies_optimizers_and_worlds_train(ranks, words, tmp_path) -> None:
    workers = [f"launch.nproc={ranks}"] if ranks else []
    done = launch_forked(tmp_path, [*SHORT, "train.max_steps=2", "tracker=none", *words, *workers])
    assert done.returncode == 0, done.stderr
    result = json.loads((only_run(tmp_path) / "result.json").read_text())
    assert result["world_size"] == max(ranks, 1)
    assert result["applied_steps"] == 2


def test_equal_runs_end_with_equal_bits(finished, tmp_path) -> None:
    """Whoever starts them: torchrun or a parent of their own."""
    _, run_dir = finished
    done = launch_forked(tmp_path, [*SHORT, "tracker=none", "launch.nproc=2"])
    assert done.returncode == 0, done.stderr
    digests = [
        json.loads((directory / "result.json").read_text())["weights_sha256"]
        for directory in (run_dir, only_run(tmp_path))
    ]
    assert digests[0] == digests[1]


def test_a_run_that_diverges_says_so_and_ends_with_code_5(tmp_path) -> None:
    words = [
        *SHORT,
        "optim.lr=1e30",
        "precision=fp32",
        "tracker=none",
        "schedule=constant",
        "data.batch_size=8",
    ]
    done = launch_forked(tmp_path, words)
    assert done.returncode == 5
    assert "the loss was not finite" in done.stderr
    assert "Traceback" not in done.stderr
    status = json.loads((only_run(tmp_path) / "status.json").read_text())
    assert (status["state"], status["exit"]) == ("failed", 5)


MOONS = """
import torch
from torch import nn
from launcher.recipe import Recipe, TensorData, cross_entropy, recipe

@recipe("tiny")
def tiny(config):
    if config.optim.lr == 0.3:
        raise RuntimeError("a fault on purpose")
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = TensorData({"image": x, "label": (x[:, 0] > 0).long()})
    return Recipe(lambda: nn.Linear(4, 2), data, data, cross_entropy, classes=("a", "b"))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ten_sweeps_in_a_row_run_all_their_jobs(tmp_path) -> None:
    """One directory and one wandb run per job; a failing job is reported at once and ends nothing."""
    (tmp_path / "tiny.py").write_text(MOONS)
    words = [
        "-m",
        "recipe=resnet18",
        "recipe.uses=tiny",
        "recipes.path=tiny.py",
        "train.epochs=1",
        "seed=0,1",
    ]
    for number in range(10):
        rates = "optim.lr=0.05,0.3" if number == 9 else "optim.lr=0.05,0.1"
        done = launch(tmp_path, [*words, rates, f"hydra.sweep.dir=sweep{number}"])
        jobs = sorted(path for path in (tmp_path / f"sweep{number}").iterdir() if path.is_dir())
        assert len(jobs) == 4
        for job in jobs:
            failed = "lr=0.3" in job.name
            assert json.loads((job / "result.json").read_text())["state"] == ("failed" if failed else "done")
            runs = len(list((job / "wandb").glob("offline-run-*")))
            assert runs == 1 or (failed and not runs), "one that fails at once may end before wandb starts"
        assert done.returncode == (1 if number == 9 else 0), done.stderr
        assert done.stderr.count("sweep: job") == (2 if number == 9 else 0)


def test_an_error_before_training_is_said_alone(tmp_path: Path) -> None:
    """Without advice on what to do with a run in which nothing was trained."""
    (tmp_path / "empty").mkdir()
    done = launch_forked(tmp_path, ["recipe=cnn", "data.path=empty", "launch.nproc=2", "tracker=wandb"])
    assert done.returncode == 2
    assert "is not a folder with data_batch_1 to 5" in done.stderr
    assert "files:" not in done.stdout
    assert "wandb sync" not in done.stdout
