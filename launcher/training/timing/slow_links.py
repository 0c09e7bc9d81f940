"""Which rank's link to another host is slower than those of the other ranks.

Owns the form in which a rank's sampled link travels as votes, and the decision. A rank with a slow way out
has bytes waiting most of the time while the others' are soon gone; where all links are equally slow or fast,
no rank stands out. A slow way into a host shows at the rank that sends to it, so both ends are named.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from launcher.telemetry.events import StragglerEvent
from launcher.training.occurrences import Occurrences
from launcher.training.run import Run
from launcher.training.timing.links import LinkUse

LATE_SHARE, LATE_MS = 0.25, 1.0  # of a step, that bytes wait longer at one rank than at the others
TIMES_OTHERS = 2.0
# Of the others' rate. Shares alone differ between equal links, by what fits into the buffers on the way; the
# rates of the others are too low, because what acknowledges their bytes comes back over the slow link.
RATE_OF_OTHERS = 0.75
CAUSE = "link"
PERCENTS, TENTHS = 101, 1 << 20  # of what travels: the share in %, and tenths of Mbit/s


class SlowLinks:
    """Compares the ranks' links. All ranks call the same methods at the same steps."""

    def __init__(self, run: Run, hosts: Sequence[str]) -> None:
        self._run = run
        self._hosts = hosts  # by rank
        self._fresh: dict[int, LinkUse] = {}  # by rank: not yet compared
        self._known: set[int] = set()  # ranks that have sent one
        self._since: int | None = None  # the first step of what is compared next
        self._slow = Occurrences()  # by rank: comparisons in which its link was slow

    def receive(self, rank: int, votes: int) -> None:
        """What `rank` has sent; 0 if it had no new samples."""
        if votes:
            self._fresh[rank] = use_of(votes)
            self._known.add(rank)

    def compare(self, first_step: int, step: int, step_ms: float) -> None:
        """At the end of a window from `first_step` on: record the slow one, once all have new samples."""
        self._since = self._since or first_step
        if len(self._fresh) < max(2, len(self._known)):
            return
        fresh, self._fresh = self._fresh, {}
        first_step, self._since = self._since, step + 1
        slowest = max(fresh, key=lambda rank: fresh[rank].share)
        use = fresh.pop(slowest)
        share, mbit = (
            statistics.median(values)
            for values in zip(*((other.share, other.mbit_per_s) for other in fresh.values()), strict=True)
        )
        beyond = use.share - share
        if beyond < LATE_SHARE or use.share < TIMES_OTHERS * share or use.mbit_per_s > RATE_OF_OTHERS * mbit:
            return
        if beyond * step_ms < LATE_MS:
            return
        self._run.telemetry.emit(
            StragglerEvent(
                step,
                rank=slowest,
                host=self._hosts[slowest],
                receiver=use.receiver,
                receiver_host=self._hosts[use.receiver],
                late_ms=beyond * step_ms,
                step_ms=step_ms,
                waiting_share=use.share,
                mbit_per_s=use.mbit_per_s,
                first_step=first_step,
                last_step=step,
                cause=CAUSE,
            )
        )
        if times := self._slow.add(slowest):
            self._warn(slowest, times, use, share)

    def _warn(self, rank: int, times: int, use: LinkUse, others_share: float) -> None:
        often = "" if times == 1 else f", {times} times so far"
        self._run.telemetry.warn(
            f"the link of rank {rank} on {self._hosts[rank]}, which sends to rank {use.receiver} on "
            f"{self._hosts[use.receiver]}, is slower than those of the other ranks{often}: bytes were "
            f"waiting to be sent in {use.share:.0%} of the samples (other ranks: {others_share:.0%}), at "
            f"{use.mbit_per_s:.3g} Mbit/s. Check interface, cable and switch port of both hosts "
            "(ethtool, iperf3)."
        )


def votes_of(use: LinkUse | None) -> int:
    """As votes: one whole number below 2**53, and above 0 unless there is nothing to send."""
    if use is None:
        return 0
    tenths = min(round(10 * use.mbit_per_s), TENTHS - 1)
    return 1 + round(100 * use.share) + PERCENTS * (tenths + TENTHS * use.receiver)


def use_of(votes: int) -> LinkUse:
    """The reverse."""
    rest, percent = divmod(votes - 1, PERCENTS)
    receiver, tenths = divmod(rest, TENTHS)
    return LinkUse(percent / 100, tenths / 10, receiver)
