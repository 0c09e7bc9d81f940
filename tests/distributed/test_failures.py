"""What a rank records as it fails, and what the others say of it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from launcher.distributed.collectives import content_of, message_of
from launcher.distributed.failures import (
    ROW_BYTES,
    Departure,
    LastWords,
    StoredWords,
    attributed,
    departure_of,
    give_reason,
    reason_of,
)
from launcher.errors import ConfigError, DataError, LauncherError, StalledError


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


def test_an_error_that_rank_0_has_sent_is_not_blamed_on_the_rank_that_reports_it() -> None:
    """Rank 0 calls a recipe's hook, say; whichever rank is first to leave has the same error."""
    message = message_of(lambda: fail(ConfigError("the recipe's after_evaluation failed")))
    with pytest.raises(ConfigError) as caught:
        content_of(message)
    left = departure_of(1, caught.value)
    assert (attributed(left, [left]), left.exit_code) == ("the recipe's after_evaluation failed", 2)


def fail(error: LauncherError) -> bytes:
    raise error
