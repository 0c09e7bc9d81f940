"""The id under which trackers have a run outlives the process."""

from __future__ import annotations

from pathlib import Path

from launcher.telemetry.tracker.run_id import save_run_id, saved_run_id


def test_a_resumed_run_has_the_id_of_its_first_attempt(tmp_path: Path) -> None:
    assert saved_run_id(tmp_path) == ""
    save_run_id(tmp_path, "ab12cd34")
    assert saved_run_id(tmp_path) == "ab12cd34"


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "trackers").write_text("a file")
    save_run_id(tmp_path, "ab12cd34")
    assert saved_run_id(tmp_path) == ""
