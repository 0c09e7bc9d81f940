"""An experiment is a set of overrides with a name, composed last; the command line has the last word."""

from __future__ import annotations

import pytest

from launcher.config.composition import Request
from launcher.config.groups import conf_dir, group_choices
from launcher.config.resolve import compose_jobs
from tests.test_end_to_end import launch
from tests.trainer.test_sync_bn_option import RECIPE, SMALL

EXPERIMENTS = group_choices(conf_dir())["experiment"]


def test_the_precision_ablation_compares_precisions_with_one_rate() -> None:
    words = ("experiment=precision_ablation", "recipe=resnet18", "precision=fp32,fp16,pure_fp16", "seed=0,1")
    configs = compose_jobs(Request(words, multirun=True))
    assert [(config.precision.name, config.seed) for config in configs] == [
        (precision, seed) for precision in ("fp32", "fp16", "pure_fp16") for seed in (0, 1)
    ]
    assert {(config.optim.name, config.schedule.name) for config in configs} == {("adamw", "constant")}
    assert len({config.optim.lr for config in configs}) == 1
    assert [config.precision.loss_scale.mode for config in configs[::2]] == ["none", "dynamic", "static"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes(name: str) -> None:
    assert compose_jobs(Request((f"experiment={name}", "recipe=resnet18")))


def test_the_command_line_has_the_last_word(tmp_path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /optim: adamw\nseed: 7\noptim:\n  lr: 0.5\n"
    )
    request = Request(("recipe=resnet18", "experiment=mine", "optim.lr=0.25"), config_dir=tmp_path)
    (config,) = compose_jobs(request)
    assert (config.optim.name, config.optim.lr, config.seed) == ("adamw", 0.25, 7)


@pytest.mark.slow
def test_an_experiment_runs_in_several_precisions_and_is_compared(tmp_path) -> None:
    """On a small model; that the masters matter at all shows in the engine's tests."""
    (tmp_path / "small.py").write_text(RECIPE)
    words = [
        "-m",
        *SMALL,
        "experiment=precision_ablation",
        "precision=fp32,fp16,pure_fp16",
        "seed=0,1",
        "train.max_steps=12",
        "train.log_every_steps=4",
    ]
    done = launch(tmp_path, words)
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "multirun" / "resnet18").iterdir()
    assert {path.name for path in sweep.iterdir() if path.is_file()} == {
        ".lock",
        "report.html",
        "side_by_side.md",
        "summary.csv",
        "summary.md",
        "sweep.json",
    }
    assert {path.name.partition("_")[2] for path in sweep.iterdir() if path.is_dir()} == {
        f"precision={precision},seed={seed}" for precision in ("fp32", "fp16", "pure_fp16") for seed in (0, 1)
    }
    text = (sweep / "summary.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| fp32", "| fp16", "| pure_fp16"]
    (sweep / "summary.md").unlink()
    again = launch(tmp_path, ["report", str(sweep)], ranks=0)
    assert again.returncode == 0, again.stderr
    assert (sweep / "summary.md").read_text() == text
