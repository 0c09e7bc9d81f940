"""An experiment is a sweep with a name: checked like a typed one, and the command line has the last word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.config.composition import Request
from launcher.config.groups import conf_dir, group_choices
from launcher.config.resolve import compose_jobs, space_of, with_experiment
from launcher.errors import ConfigError
from tests.test_end_to_end import launch
from tests.trainer.test_sync_bn_option import RECIPE, SMALL

EXPERIMENTS = group_choices(conf_dir())["experiment"]


def own_tree(directory: Path, text: str) -> Path:
    (directory / "experiment").mkdir()
    (directory / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
    return directory


def test_the_precision_ablation_runs_three_precisions_on_the_same_seeds() -> None:
    request = with_experiment(Request(("experiment=precision_ablation", "recipe=resnet18")))
    assert request.multirun
    assert {each.key for each in space_of(request.overrides).dimensions} == {"precision", "seed"}
    configs = compose_jobs(request)
    assert [(config.precision.name, config.seed) for config in configs] == [
        (precision, seed) for precision in ("fp32", "fp16", "pure_fp16") for seed in (0, 1, 2)
    ]
    assert {(config.optim.name, config.schedule.name) for config in configs} == {("adamw", "constant")}
    assert len({config.optim.lr for config in configs}) == 1
    assert [config.precision.loss_scale.mode for config in configs[::3]] == ["none", "dynamic", "static"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes(name: str) -> None:
    assert len(compose_jobs(with_experiment(Request((f"experiment={name}", "recipe=resnet18"))))) > 1


def test_the_command_line_has_the_last_word() -> None:
    overrides = (
        "recipe=resnet18",
        "experiment=precision_ablation",
        "seed=7",
        "precision=fp32,bf16",
        "optim.lr=1",
    )
    configs = compose_jobs(with_experiment(Request(overrides)))
    assert [(config.precision.name, config.seed, config.optim.lr) for config in configs] == [
        ("fp32", 7, 1.0),
        ("bf16", 7, 1.0),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sweep: {seed: 1}\n", "`sweep.seed` is 1; it must"),
        ("sweep: {sede: [1, 2]}\n", "sede=.*there is no such key"),
        ("sweep: {precision: [fp8, fp16]}\n", "precision=fp8: there is no such"),
        ("sweep: {recipes.path: ['${oc.env:HOME}', b]}\n", "a swept value cannot be"),
    ],
)
def test_a_wrong_experiment_is_told_with_the_reason(tmp_path, text, words) -> None:
    request = Request(("recipe=resnet18", "experiment=mine"), config_dir=own_tree(tmp_path, text))
    with pytest.raises(ConfigError) as caught:
        compose_jobs(with_experiment(request))
    assert re.search(words, str(caught.value))


def test_texts_of_any_kind_survive_the_way_through_hydra(tmp_path) -> None:
    text = "sweep:\n  tracker.group: ['a b', 'it''s, = {x}', plain]\n  optim.clip_norm: [null, 0.5]\n"
    request = Request(("recipe=resnet18", "experiment=mine"), config_dir=own_tree(tmp_path, text))
    configs = compose_jobs(with_experiment(request))
    assert [(config.tracker.group, config.optim.clip_norm) for config in configs] == [
        (group, clip) for group in ("a b", "it's, = {x}", "plain") for clip in (None, 0.5)
    ]


@pytest.mark.slow
def test_an_experiment_runs_and_is_compared_without_a_further_flag(tmp_path) -> None:
    """On a small model; that the masters matter at all shows in the engine's tests."""
    (tmp_path / "small.py").write_text(RECIPE)
    words = [
        *SMALL,
        "experiment=precision_ablation",
        "seed=0,1",
        "train.max_steps=12",
        "train.log_every_steps=4",
    ]
    done = launch(tmp_path, words)
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "multirun" / "resnet18").iterdir()
    assert {path.name for path in sweep.iterdir() if path.is_file()} == {
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
    assert "The effect of fp32 masters" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| fp32", "| fp16", "| pure_fp16"]
    (sweep / "summary.md").unlink()
    again = launch(tmp_path, ["report", str(sweep)], ranks=0)
    assert again.returncode == 0, again.stderr
    assert (sweep / "summary.md").read_text() == text


def test_an_experiment_may_be_a_file_of_overrides(tmp_path) -> None:
    """As Hydra's users know it: one run, with these values, over which the command line wins."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /optim: adamw\nseed: 7\noptim:\n  lr: 0.5\n"
    )
    request = Request(("recipe=resnet18", "experiment=mine", "optim.lr=0.25"), config_dir=tmp_path)
    assert not with_experiment(request).multirun
    (config,) = compose_jobs(with_experiment(request))
    assert (config.optim.name, config.optim.lr, config.seed) == ("adamw", 0.25, 7)


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("optim=glob(ada*)", ["adagrad", "adam", "adamw"]),
        ("optim=glob([a*,n*],exclude=adam*)", ["adagrad", "nadam"]),
    ],
)
def test_a_glob_stands_for_the_names_that_match(word: str, names: list[str]) -> None:
    jobs = compose_jobs(with_experiment(Request(("recipe=resnet18", word), multirun=True)))
    assert [job.optim.name for job in jobs] == names
