"""Config files and overrides that no run can be made of: exit 2 and one error, at the front door."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli import main
from launcher.config.constraints import value_problem
from launcher.config.groups import conf_dir, group_choices
from launcher.config.schema import constraints

BASE = b"# @package _global_\nrecipe: {name: mine, uses: cnn}\n"


def tree_with(directory: Path, text: bytes) -> Path:
    (directory / "recipe").mkdir(parents=True)
    (directory / "recipe" / "mine.yaml").write_bytes(text)
    return directory


def refused(capfd, *argv: str) -> str:
    """The only thing that is printed for a command line that is a mistake."""
    code = main(["--cfg", "job", *argv])
    out, err = capfd.readouterr()
    assert (code, out) == (2, ""), err[:2000]
    assert err.startswith("error: ")
    assert "Traceback" not in err
    return err.removeprefix("error: ").rstrip()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BASE + b"seed: 1 # \xff\xfe\n", "cannot be composed: 'utf-8' codec can't decode"),
        (b"# @package _global_\ndefaults: [/recipe: mine]\n", "cannot be composed: maximum recursion depth"),
        (BASE + b"train: null\n", "train=null: must be a section"),
        (b"# @package _global_\nrecipe: null\n", "recipe=null: must be a section"),
        (b"a text", "recipe: none is chosen"),
        (b"", "recipe: none is chosen"),
        (BASE + b"defaults: 5\n", "the config files cannot be"),
        (BASE + b"seed: ${seed}\n", "seed: Recursive interpolation"),
        (BASE + b"seed: 1\nseed: 2\n", "duplicate key seed"),
    ],
)
def test_a_file_that_no_run_can_be_made_of(tmp_path, capfd, text, reason) -> None:
    error = refused(capfd, "recipe=mine", "--config-dir", str(tree_with(tmp_path / "own", text)))
    assert reason in error
    assert len(error.splitlines()) == 1


def test_a_whole_number_beyond_every_float_is_no_value_of_any_key() -> None:
    for key, constraint in constraints().items():
        assert not constraint.is_valid(10**400), key
        assert len(value_problem(key, 10**400, constraint)) < 800


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("group", sorted(group_choices(conf_dir()).keys() - {"sweep"}))
def test_a_group_cannot_be_left_empty(capfd, group) -> None:
    recipe = () if group == "recipe" else ("recipe=resnet18",)
    error = refused(capfd, *recipe, f"{group}=null")
    assert error.startswith(f"{group}=null: there is no such {group}.")
