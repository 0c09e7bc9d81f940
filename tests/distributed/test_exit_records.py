"""What a rank records as it ends, and what is said of it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from launcher.distributed.collectives import pack_result, unpack_result
from launcher.distributed.exit_records import (
    StoreExitRecords,
    exit_record,
    with_rank,
)
from launcher.errors import ConfigError, DataError, LauncherError, StalledError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DataError("there is no such file."), "rank 1 failed: there is no such file."),
        (DataError("rank 1 found no file."), "rank 1 found no file."),
        (StalledError("rank 0, 2 did not come."), "rank 0, 2 did not come."),
    ],
)
def test_a_record_in_the_store_names_the_rank_at_fault_alone(error: LauncherError, said: str) -> None:
    records = StoreExitRecords(dist.HashStore(), "0")
    assert records.missing([1], 0) == [1]
    records.write(exit_record(1, error))
    assert records.missing([1], 0) == []
    (found,) = records.read([0, 1])
    assert (with_rank(found, [found]), found.exit_code) == (said, error.exit_code)


def test_an_error_that_rank_0_has_sent_is_not_blamed_on_the_rank_that_reports_it() -> None:
    """Rank 0 calls a recipe's hook, say; whichever rank is first to leave has the same error."""
    message = pack_result(lambda: fail(ConfigError("the recipe's on_eval_end failed")))
    with pytest.raises(ConfigError) as caught:
        unpack_result(message)
    record = exit_record(1, caught.value)
    assert (with_rank(record, [record]), record.exit_code) == ("the recipe's on_eval_end failed", 2)


def fail(error: LauncherError) -> bytes:
    raise error
