"""Config files and overrides that no run can be made of: exit 2 and one error at once, at the front door."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.config.composition import Request
from launcher.config.files import MAX_BYTES
from launcher.config.groups import conf_dir, group_choices
from launcher.config.resolve import compose_jobs
from launcher.config.rules import value_problem
from launcher.config.schema import rules
from tests.golden import Message

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


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BASE + b"seed: 1 # \xff\xfe\n", "is not UTF-8 (byte 63)"),
        (BASE.decode().encode("utf-16"), "is not UTF-8 (byte 0)"),
        (b"defaults: [mine, _self_]\n" + BASE, "a `defaults:` list includes its"),
        (b"# @package _global_\ndefaults: [/recipe: mine]\n", "a `defaults:` list includes its"),
        (BASE + b"seed: " + DIGITS, "has a whole number of"),
        (BASE + b"data: {num_samples: " + DIGITS + b"}\n", "a whole number of more"),
        (BASE + b"data: {num_samples: 0x" + b"f" * 5000 + b"}\n", "whole numbers below 2**1024"),
        (BASE + b"data: {batch_size: " + b"9" * 3001 + b"}\n", "Nearest: 9007199254740992"),
        (BASE + b"# " + LONG, "has 10,000,055 bytes. A config"),
        (BASE + b"tracker: {tags: [" + b"abcdefg, " * 1_300_000 + b"]}", "bytes. A config file is"),
        (BASE + b"model: &a {name: x, y: *a}\n", "a value is nested too deeply"),
        (BASE + b"tracker: {tags: " + b"[" * 5000 + b"]" * 5000 + b"}", "a value is nested too deeply"),
        (BASE + b'data: {path: "a\\0b"}', "data.path=a\\x00b: must be null or"),
        (BASE + b'run: {dir: "a\\0b"}', "run.dir=a\\x00b: must be null or"),
        (BASE + b"optim: null\n", "optim"),
        (BASE + b"optim: 3\n", "optim"),
        (BASE + b"train: null\n", "train=null: must be a section"),
        (BASE + b"data: null\n", "data=null: must be a section"),
        (BASE + b"tracker: []\n", "Cannot merge DictConfig with ListConfig"),
        (b"# @package _global_\nrecipe: null\n", "recipe=null: must be a section"),
        (b"- a\n- list\n", "recipe"),
        (b"a text", "recipe.a text: there is no"),
        (b"", "recipe: none is chosen"),
        (BASE + b"defaults: 5\n", "the config files cannot be"),
        (BASE + b"defaults: [5]\n", "the config files cannot be"),
        (BASE + b"5: 6\n", "5"),
        (BASE + b"seed: .nan\n", "seed=nan: must be a whole"),
        (BASE + b"seed: ${seed}\n", "seed=${seed}: refers to itself"),
        (BASE + b"? [a, b]\n: 1\n", "mine.yaml"),
        (BASE + b"seed: 1\nseed: 2\n", "duplicate key seed"),
        (BASE + b"seed: \t1\n\tx: 2", "mine.yaml"),
    ],
)
def test_a_file_that_no_run_can_be_made_of(tmp_path, capfd, text, reason, message: Message) -> None:
    error = message(refused(capfd, "recipe=mine", "--config-dir", str(tree_with(tmp_path / "own", text))))
    assert reason in error
    assert len(error.splitlines()) == 1


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("key", sorted(rules()))
@pytest.mark.parametrize("value", [10**400, -(10**400), 16**5000], ids=["above", "below", "unprintable"])
def test_a_whole_number_beyond_every_float_is_no_value_of_any_key(key, value) -> None:
    assert not rules()[key].holds(value)
    assert not rules()["model.options"].holds({"widths": [{"last": value}]})
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


@pytest.mark.parametrize("command", ["recipes", "--help"])
def test_a_foreign_tree_cannot_control_the_terminal(tmp_path, capfd, command) -> None:
    tree = tree_with(tmp_path / "own", b"# evil \x1b[2Jgone\n" + BASE)
    shutil.copy(tree / "recipe" / "mine.yaml", tree / "recipe" / "odd\x1b[2J.yaml")
    assert main([command, "--config-dir", str(tree)]) == 0
    shown = capfd.readouterr().out
    assert "\x1b" not in shown
    assert ("evil \\x1b[2Jgone" in shown) is (command == "recipes")


@pytest.mark.parametrize("text", [BASE + b"\xff", BASE + LONG])
def test_the_list_of_recipes_has_the_same_limits(tmp_path, capfd, text) -> None:
    tree = tree_with(tmp_path / "own", text)
    assert main(["recipes", "--config-dir", str(tree)]) == 2
    assert str(tree / "recipe" / "mine.yaml") in capfd.readouterr().err


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("group", sorted(group_choices(conf_dir()).keys() - {"sweep"}))
def test_a_group_cannot_be_left_empty(capfd, group) -> None:
    recipe = () if group == "recipe" else ("recipe=resnet18",)
    error = refused(capfd, *recipe, f"{group}=null")
    assert error.startswith(f"{group}=null: a group cannot be left empty. Choose from ")


def test_all_empty_groups_are_named_at_once(capfd) -> None:
    lines = refused(capfd, "optim=null", "recipe=null", "model=null").splitlines()
    assert lines[0] == "3 problems:"
    assert [line.split("=")[0].strip() for line in lines[1:]] == ["optim", "recipe", "model"]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("seed=" + DIGITS.decode(), "(5,005 characters): an override has"),
        ("seed=" + "9" * 4000, "seed=a number of about 4,000"),
        ("tracker.project=" + LONG.decode(), "an override has at most"),
        ("tracker.tags=[" + "a," * 500_000 + "a]", "an override has at most"),
        ("tracker.tags=" + "[" * 2000 + "]" * 2000, "is nested too deeply"),
        ("x" * 4000 + "=1", "there is no such key"),
        ("run.dir=a\x00b", "'run.dir=a\\x00b': holds a NUL character"),
    ],
)
def test_an_override_that_is_too_much(capfd, override, reason, message: Message) -> None:
    assert reason in message(refused(capfd, "recipe=resnet18", override))


def test_many_overrides_together_are_too_much(capfd) -> None:
    error = refused(capfd, "recipe=resnet18", *(["tracker.group=" + "x" * 4000] * 500))
    assert error.startswith("501 overrides of 2,007,015 characters: ")
    assert "all together 32,768." in error


@pytest.mark.parametrize(
    "argv",
    [
        ["--config-dir", "a\0b"],
        ["-cn", "a\0b"],
        ["-cn", "../config"],
        ["-cn", "x" * 300],
        ["--config-dir", "x" * 300],
    ],
)
def test_a_name_that_is_no_name(capfd, argv) -> None:
    refused(capfd, "recipe=resnet18", *argv)


@pytest.mark.parametrize("key", ["data.path", "recipes.path", "checkpoint.resume"])
def test_a_path_that_no_file_system_takes(capfd, key) -> None:
    assert "there is no such file or directory" in refused(capfd, "recipe=resnet18", f"{key}=" + "x" * 300)


def test_the_limits_leave_room_for_real_configs(tmp_path) -> None:
    lines = BASE + b"data: {weights: [" + b"0.125, " * 1000 + b"1]}\n"
    assert len(lines) < MAX_BYTES
    tree = tree_with(tmp_path / "own", lines)
    (config,) = compose_jobs(Request(("recipe=mine",), tree))
    assert len(config.data.options["weights"]) == 1001
