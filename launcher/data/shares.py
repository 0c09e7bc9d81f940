"""The shares of a batch: how many samples each rank takes, equally many, as given, or in proportion to speed.

Owns the arithmetic only: every rank computes the same shares from the same numbers. What ranks measure is in
`trainer/callbacks/data_share`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher.errors import ConfigError, counted


def proportional_shares(
    speeds: Sequence[float], batch_size: int, least: int = 1, most: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Samples of each rank, which sum to `batch_size`, in proportion to its speed.

    No rank has less than `least`, or more than its limit in `most`; the others then divide what is left.
    """
    shares = _at_least(speeds, batch_size, least)
    over = [] if most is None else [rank for rank, share in enumerate(shares) if share > most[rank]]
    if not over:
        return tuple(shares)
    assert most is not None
    others = [rank for rank in range(len(speeds)) if rank not in over]
    left = batch_size - sum(most[rank] for rank in over)
    rest = proportional_shares(
        [speeds[rank] for rank in others], left, least, [most[rank] for rank in others]
    )
    limited = {rank: most[rank] for rank in over} | dict(zip(others, rest, strict=True))
    return tuple(limited[rank] for rank in range(len(speeds)))


def _at_least(speeds: Sequence[float], batch_size: int, least: int) -> list[int]:
    """Shares in proportion to speeds, beyond `least` for each rank. The largest remainders are rounded up."""
    spare = batch_size - least * len(speeds)
    above = [max(0.0, batch_size * speed / sum(speeds) - least) for speed in speeds]
    exact = [spare * each / (sum(above) or 1.0) for each in above]
    shares = [math.floor(each) for each in exact]
    by_remainder = sorted(range(len(speeds)), key=lambda rank: (shares[rank] - exact[rank], rank))
    for rank in by_remainder[: spare - sum(shares)]:
        shares[rank] += 1
    return [share + least for share in shares]


def compute_time(shares: Sequence[int], times_per_sample: Sequence[float]) -> float:
    """The time after which the last rank has computed its share, in the unit of `times_per_sample`."""
    return max(share * time for share, time in zip(shares, times_per_sample, strict=True))


def fixed_shares(share: object, batch_size: int, world_size: int) -> tuple[int, ...]:
    """The shares of a list in `data.share`; () for `equal` and `auto`.

    The list has samples that sum to the batch, or fractions that sum to 1, as `config.validation` says.
    Raises ConfigError for another number of ranks.
    """
    if not isinstance(share, list | tuple):
        return ()
    if len(share) != world_size:
        raise ConfigError(
            f"data.share has {counted(len(share), 'share')} and the run {counted(world_size, 'rank')}: give "
            "one for each rank, in their order, or data.share=auto."
        )
    return proportional_shares(share, batch_size)
