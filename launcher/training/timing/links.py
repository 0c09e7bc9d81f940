"""How often bytes wait in this rank's connections to other hosts, sampled by a thread.

Owns the thread, which exists only where ranks run on several hosts. In an exchange of gradients all ranks
wait for the slowest link, but only at its sender do bytes wait that the kernel cannot send yet.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from launcher.distributed.connections import Connection, connections, has_unsent
from launcher.distributed.preflight import Peer

EVERY_S = 0.2  # on average; a sample takes less than 0.1 % of a core
SAMPLES = 40  # of a period
BUSIEST = 4  # connections that are sampled: those that sent most. A ring has one, and a mesh many alike
PATIENCE_S = 5.0


@dataclass(frozen=True)
class LinkUse:
    """Of a period, at one rank."""

    share: float  # of the samples in which bytes waited
    mbit_per_s: float  # of the connection that sent most, while it had bytes to send
    receiver: int  # rank at its other end, the first one of its host


class Links:
    """Samples within the context. `receivers` are ranks by the addresses of other hosts; none: no thread."""

    def __init__(self, receivers: Mapping[str, int], every_s: float = EVERY_S) -> None:
        self.receivers = receivers
        self._every_s = every_s
        self._latest: LinkUse | None = None
        self._end = threading.Event()
        self._draw = random.Random()  # not the generator that the training draws from
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, peers: Sequence[Peer], rank: int) -> Links:
        """Those of a rank to the other hosts."""
        own = set(peers[rank].addresses)
        receivers: dict[str, int] = {}
        for other, peer in enumerate(peers):
            for address in peer.addresses:  # some are the same on all hosts, as that of a bridge
                if address not in own:
                    receivers.setdefault(address, other)
        return cls(receivers)

    def __enter__(self) -> Links:
        if self.receivers:
            self._thread = threading.Thread(target=self._work, name="link-sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(PATIENCE_S)

    def take(self) -> LinkUse | None:
        """The latest period that has ended since the last call."""
        latest, self._latest = self._latest, None
        return latest

    def _work(self) -> None:
        before: dict[int, Connection] = {}
        sampled: list[int] = []
        while True:
            began_s = time.monotonic()
            waiting = self._sample(sampled)
            if waiting is None:
                return
            found = connections(self.receivers)
            added = [each.since(before.get(each.descriptor)) for each in found]
            added = sorted(added, key=lambda each: each.acked_bytes, reverse=True)[:BUSIEST]
            if sampled and added and added[0].acked_bytes:
                self._latest = self._use(added, waiting, time.monotonic() - began_s)
            before, sampled = {each.descriptor: each for each in found}, [each.descriptor for each in added]

    def _sample(self, descriptors: Sequence[int]) -> float | None:
        """The share of the samples in which bytes waited in one of these; None at the end."""
        waiting = 0
        for _ in range(SAMPLES if descriptors else 1):
            # A constant pause could keep time with the steps.
            if self._end.wait(self._every_s * self._draw.uniform(0.5, 1.5)):
                return None
            waiting += any(map(has_unsent, descriptors))
        return waiting / SAMPLES

    def _use(self, added: Sequence[Connection], waiting: float, seconds: float) -> LinkUse:
        """Of what was added in these seconds, by connection. A reader that is late is no slow link."""
        full = max(each.full_s for each in added) / seconds
        busiest = added[0]
        mbit = 8e-6 * busiest.acked_bytes / max(busiest.busy_s, 1e-6)
        return LinkUse(max(0.0, waiting - full), mbit, self.receivers[busiest.address])
