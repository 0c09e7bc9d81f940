"""`new`: the skeleton of a recipe, which runs as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.commands.arguments import Arguments
from launcher.commands.new import write_recipe
from launcher.errors import ConfigError
from launcher.telemetry.event_log import read_events
from tests.forked import launch_forked


def write(*words: str) -> None:
    write_recipe(Arguments("new", words, {}), None)  # type: ignore[arg-type]  # no ranks have part in it


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_skeleton_runs_as_it_is_with_the_command_that_is_printed(here, capsys) -> None:
    write("mine")
    python, command = capsys.readouterr().out.splitlines()
    assert python == "mine.py"
    assert len((here / python).read_text().splitlines()) <= 25
    words = command.partition("-m launcher ")[2].split()
    done = launch_forked(here, [*words, "launch.nproc=2", "tracker=none", "run.dir=run"])
    assert done.returncode == 0, done.stderr
    (*_, last) = (e for e in read_events(here / "run" / "metrics.jsonl") if e["event"] == "eval")
    assert last["accuracy"] > 0.9


@pytest.mark.parametrize("name", ["a-b", "1st", "class", "../up", "a b", "", "mine.py"])
def test_a_name_must_be_one_of_a_function_and_a_file(name, here) -> None:
    with pytest.raises(ConfigError) as refused:
        write(name)
    assert "the name of a function: letters, digits" in str(refused.value)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["one", "two"]])
def test_one_new_name_is_needed(words, here) -> None:
    with pytest.raises(ConfigError, match=r"^new"):
        write(*words)
    assert list(here.iterdir()) == []


def test_nothing_is_overwritten(here) -> None:
    Path("mine.py").write_text("mine own")
    with pytest.raises(ConfigError, match=r"mine\.py exists"):
        write("mine")
    assert os.listdir(here) == ["mine.py"]
    assert Path("mine.py").read_text() == "mine own"


def test_a_link_that_leads_nowhere_is_not_written_through(here) -> None:
    Path("mine.py").symlink_to("missing/mine.py")
    with pytest.raises(ConfigError, match=r"new mine: mine\.py"):
        write("mine")


@pytest.mark.parametrize("name", ["torch", "random", "launcher", "site", "sys"])
def test_a_name_of_a_module_would_hide_that_module(name, here) -> None:
    with pytest.raises(ConfigError, match=f"new {name}: a module"):
        write(name)
    assert list(here.iterdir()) == []


def test_a_name_of_a_folder_here_hides_no_module(here, monkeypatch) -> None:
    Path("rings").mkdir()
    monkeypatch.syspath_prepend(str(here))
    write("rings")
    assert Path("rings.py").is_file()
