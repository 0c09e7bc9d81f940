"""Values of any type are read as they stand."""

from __future__ import annotations

from launcher.run_dir.codec import decoded
from launcher.run_dir.status import Status


def test_a_field_of_any_values_is_read() -> None:
    last = {"step": {"loss": 1.0}}
    assert decoded(Status, {"last": last}).last == last
