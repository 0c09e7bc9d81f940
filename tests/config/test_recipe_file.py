"""A recipe that is one file: recipe=mine.py, with the arguments of its function as keys of the config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.config.composition import Request
from launcher.config.resolve import compose_jobs
from launcher.config.schema import Config, to_dict
from launcher.errors import ConfigError
from launcher.telemetry.event_log import read_events
from tests.forked import launch_forked

FILE = """\
import torch
from torch import nn
from launcher.recipe import Config, Recipe, TensorData, cross_entropy, recipe

@recipe
def rings(config: Config, width: int = 8, rate: float | None = None, kind: str = "relu", sizes=(1, 2)):
    assert kind in ("relu", "gelu")
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    label = (x.norm(dim=1) > 1.2).long()
    return Recipe(
        build_model=lambda: nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2)),
        train=TensorData({"image": x[:48], "label": label[:48]}),
        validation=TensorData({"image": x[48:], "label": label[48:]}),
        loss=cross_entropy,
        classes=("inner", "outer"),
    )
"""
TWO = """\
from launcher import recipe
@recipe.recipe("a")
def f(config): ...
@recipe.recipe
def b(config): ...
@recipe.recipe(name="c")
def g(config): ...
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path


def composed(*overrides: str, multirun: bool = False) -> list[Config]:
    return compose_jobs(Request(overrides, multirun=multirun))


def test_the_options_of_the_function_are_keys_with_its_defaults(here: Path) -> None:
    (config,) = composed("recipe=mine.py", "recipe.width=32")
    assert to_dict(config)["recipe"] == {
        "name": "rings",
        "uses": "rings",
        "width": 32,
        "rate": None,
        "kind": "relu",
        "sizes": [1, 2],
    }
    assert config.recipes.path == str(here / "mine.py")
    assert (config.model.name, config.data.name) == (None, None)


def test_model_and_data_of_the_launcher_can_be_chosen(here: Path) -> None:
    (config,) = composed("recipe=mine.py", "data=digits", "model=resnet18")
    assert (config.model.name, config.data.name) == ("resnet18", "digits")


@pytest.mark.parametrize("choice", ["mine.py:rings", "./mine.py", "{here}/mine.py"])
def test_a_file_is_given_by_any_path_and_name(choice: str, here: Path) -> None:
    (config,) = composed(f"recipe={choice.format(here=here)}")
    assert config.recipe.uses == "rings"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("recipe.wdith=3", "recipe.wdith=3: there is no such key. Nearest: recipe.width"),
        ("recipe.width=2.5", "recipe.width=2.5: must be a whole number"),
        ("recipe.rate=fast", "recipe.rate=fast: must be a number or null"),
        ("recipe.kind=3", "recipe.kind=3: must be a string"),
    ],
)
def test_an_option_is_checked_like_any_key(override: str, problem: str, here: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        composed("recipe=mine.py", override)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("text", "choice", "problem"),
    [
        (None, "none.py", "none.py: none.py: FileNotFoundError"),
        ("def broken(:\n", "mine.py", "mine.py, line 1: SyntaxError"),
        ("import x\n\ndef f(config): ...\n", "mine.py", "Write @recipe above line 3, def f(...)"),
        ("x = 1\n", "mine.py", "Write @recipe above a function of (config: Config)"),
        (TWO, "mine.py", "the file has the recipes a, b, c. Choose one: recipe=mine.py:a"),
        (TWO, "mine.py:d", "the file has no @recipe of this name"),
        ("@recipe\ndef f(config, name='x'): ...\n", "mine.py", "an option cannot be called name"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_clear_error(text, choice, problem, here: Path) -> None:
    if text:
        (here / "mine.py").write_text(text)
    with pytest.raises(ConfigError) as refused:
        composed(f"recipe={choice}")
    assert problem in str(refused.value)


def test_the_name_of_a_function_or_of_the_decorator_chooses_one_of_several(here: Path) -> None:
    (here / "mine.py").write_text(TWO)
    assert [composed(f"recipe=mine.py:{name}")[0].recipe.uses for name in "abc"] == ["a", "b", "c"]


def test_what_is_marked_by_a_call_is_not_offered_by_the_file(here: Path) -> None:
    """Its options could not be known without running the file."""
    with open("mine.py", "a") as file:
        file.write('\nrecipe("another")(Recipe)\n')
    assert [config.recipe.name for config in composed("recipe=mine.py")] == ["rings"]


def test_a_sweep_varies_its_options_and_files(here: Path) -> None:
    (here / "other.py").write_text(FILE)
    configs = composed("recipe=mine.py,other.py", "recipe.width=4,8", multirun=True)
    assert [(Path(c.recipes.path or "").name, c.recipe.options["width"]) for c in configs] == [
        ("mine.py", 4),
        ("mine.py", 8),
        ("other.py", 4),
        ("other.py", 8),
    ]


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        (
            "{name: own, uses: rings, wdith: 3}",
            "(an option of rings) is not known. Nearest: width",
        ),
        ("{name: own, uses: rings, width: wide}", "recipe.width=wide: must be a whole number"),
        ("{name: own, uses: ringz}", "recipe.uses=ringz is not known. Nearest: rings"),
    ],
)
def test_a_yaml_with_options_is_checked_against_the_function_before_a_sweep(recipe, problem, here) -> None:
    (here / "recipe").mkdir()
    (here / "recipe" / "own.yaml").write_text(
        f"# @package _global_\nrecipe: {recipe}\nrecipes: {{path: mine.py}}\n"
    )
    with pytest.raises(ConfigError) as refused:
        compose_jobs(Request(("recipe=own", "seed=0,1"), config_dir=here, multirun=True))
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "@recipe('own')\ndef f(config, **options): ...\n",
        "def f(config): ...\nrecipe('o' + 'wn')(f)\n",
        "def f(config): ...\ng = recipe('own')(f)\n",
    ],
)
def test_what_only_a_run_of_the_file_tells_is_left_to_the_job(text, here) -> None:
    (here / "mine.py").write_text(text)
    (here / "recipe").mkdir()
    (here / "recipe" / "own.yaml").write_text(
        "# @package _global_\nrecipe: {name: own, uses: own, any: 3}\nrecipes: {path: mine.py}\n"
    )
    (config,) = compose_jobs(Request(("recipe=own",), config_dir=here))
    assert config.recipe.options == {"any": 3}


def test_the_file_is_not_executed_to_compose(here: Path) -> None:
    (here / "mine.py").write_text(f"{FILE}\nraise AssertionError\n")
    composed("recipe=mine.py")


def test_a_run_of_one_file_trains_and_resumes(here: Path) -> None:
    command = ["recipe=mine.py", "recipe.width=16", "tracker=none", "launch.nproc=2", "run.dir=run"]
    done = launch_forked(here, [*command, "train.epochs=1"])
    assert done.returncode == 0, done.stderr
    done = launch_forked(here, [*command, "train.epochs=2"])
    assert done.returncode == 0, done.stderr
    starts = [event for event in read_events(here / "run" / "metrics.jsonl") if event["event"] == "start"]
    assert len(starts) == 2
    assert json.loads((here / "run" / "result.json").read_text())["steps"] == 2
    assert "recipe=mine.py" in (here / "run" / "overrides.txt").read_text()
