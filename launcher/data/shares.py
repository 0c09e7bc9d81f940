"""The shares of a batch: how many samples each rank takes, equally many, as given, or in proportion to speed.

Owns the arithmetic only: every rank computes the same shares from the same numbers. What ranks measure is in
`trainer/callbacks/data_share`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher.errors import ConfigError, counted

SUM_TOLERANCE = 1e-6  # of fractions such as [0.333333, 0.666667]


def proportional_shares(speeds: Sequence[float], batch_size: int, least: int = 1) -> tuple[int, ...]:
    """Samples of each rank, in proportion to its speed, but at least `least`; they sum to `batch_size`.

    The largest remainders are rounded up. `batch_size` is at least `least` times the number of ranks.
    """
    spare = batch_size - least * len(speeds)  # beyond what each rank has in any case
    above = [max(0.0, batch_size * speed / sum(speeds) - least) for speed in speeds]
    exact = [spare * each / (sum(above) or 1.0) for each in above]
    shares = [math.floor(each) for each in exact]
    by_remainder = sorted(range(len(speeds)), key=lambda rank: (shares[rank] - exact[rank], rank))
    for rank in by_remainder[: spare - sum(shares)]:
        shares[rank] += 1
    return tuple(share + least for share in shares)


def step_time(shares: Sequence[int], times_per_sample: Sequence[float]) -> float:
    """The time in which the last rank has computed its share, in the unit of `times_per_sample`."""
    return max(share * time for share, time in zip(shares, times_per_sample, strict=True))


def configured_shares(share: object, batch_size: int, world_size: int) -> tuple[int, ...]:
    """The shares that `data.share` gives; () for equal ones, and for those that are to be measured.

    Raises ConfigError for a list that does not fit the ranks or the batch.
    """
    if share in ("equal", "auto"):
        return ()
    assert isinstance(share, list | tuple), "as the rule of the key says"
    if len(share) != world_size:
        raise ConfigError(
            f"data.share has {counted(len(share), 'share')} and the run {counted(world_size, 'rank')}: give "
            "one for each rank, in their order, or data.share=auto."
        )
    total = math.fsum(share)
    if total == batch_size and all(each == int(each) for each in share):
        return tuple(int(each) for each in share)
    if abs(total - 1) > SUM_TOLERANCE:
        raise ConfigError(
            f"data.share sums to {total:g}: give the samples of each rank, whole numbers which sum to "
            f"data.batch_size={batch_size}, or fractions, which sum to 1."
        )
    return proportional_shares(share, batch_size)
