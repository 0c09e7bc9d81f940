"""What a rank records as it fails, and what the others say of it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from launcher.distributed.failures import ROW_BYTES, Departure, LastWords, StoredWords, give_reason, reason_of
from launcher.errors import DataError, LauncherError, StalledError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DataError("there is no such file."), "rank 1 failed: there is no such file."),
        (DataError("rank 1 found no file."), "rank 1 found no file."),
        (StalledError("rank 0 did not join a collective."), "rank 0 did not join a collective."),
        (StalledError("rank 0, 2 did not join a collective."), "rank 0, 2 did not join a collective."),
    ],
)
def test_a_reason_names_the_rank_at_fault_alone(error: LauncherError, said: str) -> None:
    words = StoredWords(dist.HashStore(), "0")
    give_reason(words, 1, error)
    assert reason_of(words, 1) == (said, error.exit_code)


def test_a_departure_without_room_for_its_text_leaves_those_of_other_ranks_alone() -> None:
    words = LastWords(2)
    other = Departure(1, 2.0, "its own error", 1)
    words.leave(other)
    words.leave(Departure(0, 1.0, "an error " * ROW_BYTES + "and its cause", 4, traceback="a line"))
    words.leave(other)
    assert words.of(1) == other
    own = words.of(0)
    assert own is not None
    assert own.error.startswith("an error an error")
    assert own.error.endswith("an error and its cause")
    assert own.exit_code == 4
