"""Warnings of a run are shown once, by one rank, and are in the log of each."""

from __future__ import annotations

import logging
import sys
import warnings

import pytest

from launcher.engine import EngineWarning
from launcher.run_dir.records import rank_log
from launcher.telemetry import Telemetry
from launcher.telemetry.stream import Sink
from launcher.trainer.step_reader import log
from launcher.trainer.warning_log import warnings_logged


class Events(Sink):
    name = "events"

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, event) -> None:
        self.texts.append(event.text)

    def close(self) -> None:
        pass


def warn_often(category: type[Warning] = UserWarning) -> None:
    for number in range(5):
        warnings.warn("again and again", category, stacklevel=1)
        warnings.warn(f"number {number}", category, stacklevel=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_library_warns_once_on_the_console_of_rank_0_and_in_each_log(tmp_path, monkeypatch, rank):
    events, printed = Events(), []
    with warnings.catch_warnings():
        warnings.resetwarnings()  # of pytest
        monkeypatch.setattr(warnings, "showwarning", lambda message, *place: printed.append(str(message)))
        with rank_log(tmp_path, rank), warnings_logged(Telemetry([events]), rank):
            warn_often()
    once = ["again and again", *(f"number {number}" for number in range(5))]
    assert sorted(printed) == (once if rank == 0 else [])
    lines = (tmp_path / "logs" / f"rank{rank}.log").read_text().splitlines()
    assert len(lines) == 1 + 5
    assert "test_warning_log.py" in lines[0]
    assert events.texts == []


def test_the_filters_of_the_user_come_first(tmp_path, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("error", FutureWarning)
        with rank_log(tmp_path, 0), warnings_logged(Telemetry(), 0):
            warn_often(UserWarning)
            with pytest.raises(FutureWarning):
                warn_often(FutureWarning)
    assert capsys.readouterr().err == ""
    assert (tmp_path / "logs" / "rank0.log").read_text() == ""


def test_the_text_of_a_warning_cannot_control_the_terminal(tmp_path, monkeypatch, capsys):
    with warnings.catch_warnings():
        warnings.resetwarnings()  # of pytest
        monkeypatch.setattr(
            warnings,
            "showwarning",
            lambda message, category, *place: print(f"{category.__name__}: {message}", file=sys.stderr),
        )
        with rank_log(tmp_path, 0), warnings_logged(Telemetry(), 0):
            warnings.warn("the file \x1b[2Jgone", UserWarning, stacklevel=1)
            warnings.warn("the file caf\xe9", UserWarning, stacklevel=1)
    for text in (capsys.readouterr().err, (tmp_path / "logs" / "rank0.log").read_text()):
        assert "UserWarning: the file \\x1b[2Jgone\n" in text
        assert "UserWarning: the file caf\xe9\n" in text
        assert "\x1b" not in text


def test_a_warning_of_the_engine_is_an_event(tmp_path, capsys):
    events = Events()
    with rank_log(tmp_path, 0), warnings_logged(Telemetry([events]), 0):
        warnings.warn("of the engine", EngineWarning, stacklevel=1)
    assert events.texts == ["of the engine"]
    assert capsys.readouterr().err == ""
    assert "WARNING launcher: rank 0: of the engine" in (tmp_path / "logs" / "rank0.log").read_text()


@pytest.mark.parametrize(("level", "lines"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_the_level_of_a_log(tmp_path, level, lines):
    with rank_log(tmp_path, 0, level):
        assert log.isEnabledFor(logging.DEBUG) is (level == "debug"), "which the line of each step asks"
        log.debug("one")
        log.info("two")
        log.warning("three")
        log.error("four")
    assert len((tmp_path / "logs" / "rank0.log").read_text().splitlines()) == lines
