"""The front door as a user meets it: arguments, texts, exit codes, and how long an answer takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from launcher.cli import main
from launcher.commands.arguments import COMMANDS, OWNERS, Arguments, parse
from launcher.commands.help import help_text, recipes_text
from launcher.config.groups import conf_dir
from launcher.errors import ConfigError

ROOT = Path(__file__).parents[1]
WATCHED = """
import sys
from launcher.cli import main
code = main()
print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""


def ask(words: Sequence[str], directory: Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m launcher` with these words, or this code in its place."""
    start = ["-m", "launcher"] if code is None else ["-c", code]
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *start, *words],
        cwd=directory,
        env=environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("-m recipe=a", Arguments("train", ("recipe=a",), {"--multirun": None})),
        ("recipe=a -m seed=1,2", Arguments("train", ("recipe=a", "seed=1,2"), {"--multirun": None})),
        ("a=1 --cfg job b=2", Arguments("train", ("a=1", "b=2"), {"--cfg": "job"})),
        ("-cd x recipes", Arguments("recipes", (), {"--config-dir": "x"})),
        ("report a b", Arguments("report", ("a", "b"), {})),
        ("+recipe=a ++seed=1", Arguments("train", ("recipe=a", "seed=1"), {})),
        ("", Arguments("train", (), {})),
        ("export --best RUN FILE", Arguments("export", ("RUN", "FILE"), {"--best": None})),
    ],
)
def test_flags_may_stand_anywhere(argv: str, expected: Arguments) -> None:
    assert parse(argv.split()) == expected


def test_a_file_that_a_command_cannot_write_is_named(tmp_path: Path, capsys) -> None:
    (tmp_path / "status.json").write_text('{"state": "done"}')
    page = tmp_path / "missing" / "page.html"
    assert main(["report", str(tmp_path), "--out", str(page)]) == 8
    told = capsys.readouterr().err
    assert told.startswith("error: report: [Errno 2] No such file or directory: ")
    assert str(page.parent) in told


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--mutlirun a=1", "--mutlirun: there is no such flag. Nearest: --multirun."),
        ("--cfg", "argument -c/--cfg: expected one argument. See --help."),
        ("--experimental-rerun x.pickle", "--experimental-rerun: there is no such flag."),
        ("--best recipe=resnet18", "--best: belongs to the command export and predict only."),
        ("export RUN FILE --dtype fp8", "argument --dtype: invalid choice: 'fp8'"),
        ("recipies", "recipies: there is no such command. Nearest: recipes."),
        (
            "resnet18",
            "resnet18: there is no such command. "
            f"Commands: {', '.join(COMMANDS)}. To train: recipe=resnet18.",
        ),
    ],
)
def test_what_does_not_exist_is_named_with_what_does(argv: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argv.split())
    assert str(caught.value).startswith(line)


def test_help_names_every_group_and_every_choice() -> None:
    text = help_text([conf_dir()])
    for file in conf_dir().glob("*/*.yaml"):
        (line,) = [line for line in text.splitlines() if line.startswith(f"  {file.parent.name} ")]
        assert file.stem in line


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_page(command: str) -> None:
    """With its flags, and an example that is accepted."""
    page = help_text([conf_dir()], command)
    assert page.startswith(f"python -m launcher {command}")
    assert all(name in page for name, owners in OWNERS.items() if command in owners)
    (example,) = re.findall("Example: python -m launcher (.*)", page)
    assert parse(example.split()).command == command
    assert help_text([conf_dir()], command) != help_text([conf_dir()])


def test_recipes_are_told_with_what_they_are_and_their_options(tmp_path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\n# Of my own.\nseed: 1\n")
    text = recipes_text([conf_dir(), tmp_path])
    lines = [line.split(maxsplit=1) for line in text.splitlines()]
    assert ["mine", "Of my own."] in lines
    assert ["resnet18", "ResNet-18 on 8 x 8 handwritten digits: recipe=resnet model=resnet18."] in lines
    assert "model.zero_init_residual=true" in text
    assert "data.num_samples=" in text


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--help"], 0, "recipe "),
        (["recipes"], 0, "resnet152"),
        (["--version"], 0, "fp16-launcher"),
        (["recipe=resnet81", "train.epochs=0"], 2, "2 problems:"),
        ([], 2, "error: recipe: none is chosen."),
        (["plna"], 2, "error: plna: there is no such command."),
        (["report", "nowhere"], 2, "error: report nowhere: there is no such directory."),
    ],
)
def test_an_answer_needs_no_torch_and_leaves_no_file(tmp_path, words, code, text) -> None:
    done = ask(words, tmp_path, WATCHED)
    assert done.returncode == code
    assert text in (done.stdout if code == 0 else done.stderr)
    assert "Traceback" not in done.stderr
    loaded = done.stderr.splitlines()[-1].split()
    assert "launcher.cli" in loaded
    assert "torch" not in loaded
    assert "hydra" not in loaded or words not in (["--help"], ["recipes"], ["--version"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "words",
    [
        ["--cfg", "job", "recipe=resnet18", "optim.lr=3"],
        ["recipe=resnet18", "--cfg", "job", "optim.lr=3"],
        ["recipe=resnet18", "optim.lr=3", "-c", "job"],
    ],
)
def test_the_config_is_printed_and_nothing_runs(tmp_path, words: list[str]) -> None:
    done = ask(words, tmp_path)
    assert done.returncode == 0, done.stderr
    tree = yaml.safe_load(done.stdout)
    assert tree["optim"]["lr"] == 3
    assert tree["model"]["name"] == "resnet18"
    assert "hydra" not in tree
    assert list(tmp_path.iterdir()) == []


def test_the_printed_config_is_that_of_the_run(tmp_path) -> None:
    done = ask(["recipe=resnet18", "--cfg", "job", "schedule=constant"], tmp_path)
    assert yaml.safe_load(done.stdout)["schedule"] == {
        "name": "constant",
        "warmup_fraction": 0,
        "lr_base_batch_size": None,
    }
