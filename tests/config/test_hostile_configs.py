"""Config files and overrides that no run can be made of: exit 2 and one error at once, at the front door."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.config.groups import conf_dir, group_choices
from launcher.config.rules import value_problem
from launcher.config.schema import rules

BASE = b"# @package _global_\nrecipe: {name: mine, uses: mine}\n"
DIGITS = b"9" * 5000
LONG = b"x" * 10_000_000


def tree_with(directory: Path, text: bytes | None) -> Path:
    (directory / "recipe").mkdir(parents=True)
    if text is not None:
        (directory / "recipe" / "mine.yaml").write_bytes(text)
    return directory


def refused(capfd, *argv: str) -> str:
    """The only thing that is printed for a command line that is a mistake, within a moment."""
    began = time.process_time()
    code = main(["--cfg", "job", *argv])
    seconds = time.process_time() - began
    out, err = capfd.readouterr()
    assert (code, out) == (2, ""), err[:2000]
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert len(err) < 1500
    assert seconds < 3, "a second, on an idle machine"
    return err.removeprefix("error: ").rstrip()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BASE + b"seed: 1 # \xff\xfe\n", "is not UTF-8 (byte 63)"),
        (b"# @package _global_\ndefaults: [/recipe: mine]\n", "a `defaults:` list includes its"),
        (BASE + b"seed: " + DIGITS, "has a whole number of"),
        (BASE + b"# " + LONG, "has 10,000,055 bytes. A config"),
        (BASE + b"model: &a {name: x, y: *a}\n", "a value is nested too deeply"),
        (BASE + b"tracker: {tags: " + b"[" * 5000 + b"]" * 5000 + b"}", "a value is nested too deeply"),
        (BASE + b'run: {dir: "a\\0b"}', "run.dir=a\\x00b: must be null or"),
        (BASE + b"train: null\n", "train=null: must be a section"),
        (b"# @package _global_\nrecipe: null\n", "recipe=null: must be a section"),
        (b"a text", "recipe: none is chosen"),
        (b"", "recipe: none is chosen"),
        (BASE + b"defaults: 5\n", "the config files cannot be"),
        (BASE + b"seed: ${seed}\n", "seed=${seed}: refers to itself"),
        (BASE + b"seed: 1\nseed: 2\n", "duplicate key seed"),
    ],
)
def test_a_file_that_no_run_can_be_made_of(tmp_path, capfd, text, reason) -> None:
    error = refused(capfd, "recipe=mine", "--config-dir", str(tree_with(tmp_path / "own", text)))
    assert reason in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("value", [10**400, -(10**400), 16**5000], ids=["above", "below", "unprintable"])
def test_a_whole_number_beyond_every_float_is_no_value_of_any_key(value) -> None:
    assert not rules()["model.options"].holds({"widths": [{"last": value}]})
    for key in rules():
        assert not rules()[key].holds(value), key
        assert len(value_problem(key, value, rules()[key])) < 400


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", ["pipe", "directory", "dangling link"])
def test_what_is_no_file_is_no_choice(tmp_path, capfd, kind) -> None:
    tree = tree_with(tmp_path / "own", None)
    place = tree / "recipe" / "mine.yaml"
    {"pipe": os.mkfifo, "directory": os.mkdir, "dangling link": lambda path: path.symlink_to("nowhere")}[
        kind
    ](place)
    assert "recipe=mine: there is no such recipe." in refused(capfd, "recipe=mine", "--config-dir", str(tree))
    assert main(["recipes", "--config-dir", str(tree)]) == 0
    assert "mine" not in capfd.readouterr().out


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("group", sorted(group_choices(conf_dir()).keys() - {"sweep"}))
def test_a_group_cannot_be_left_empty(capfd, group) -> None:
    recipe = () if group == "recipe" else ("recipe=resnet18",)
    error = refused(capfd, *recipe, f"{group}=null")
    assert error.startswith(f"{group}=null: a group cannot be left empty. Choose from ")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("seed=" + DIGITS.decode(), "(5,005 characters): an override has"),
        ("tracker.tags=" + "[" * 2000 + "]" * 2000, "is nested too deeply"),
        ("run.dir=a\x00b", "'run.dir=a\\x00b': holds a NUL character"),
    ],
)
def test_an_override_that_is_too_much(capfd, override, reason) -> None:
    assert reason in refused(capfd, "recipe=resnet18", override)
