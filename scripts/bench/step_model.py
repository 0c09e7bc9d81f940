"""The time of a training step on many ranks, computed from that of one.

The messages of a ring are sent while the backward pass runs, so that a step takes at least
forward + max(backward, communication) + update.
"""

from __future__ import annotations

from dataclasses import dataclass

# Of a full Ethernet frame of TCP over IPv4: headers and acknowledgements are the rest.
PAYLOAD = 0.956


@dataclass(frozen=True)
class StepSeconds:
    """What one rank computes in a step, without any communication."""

    forward: float
    backward: float
    update: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.update

    def with_communication(self, wire_s: float, buckets: int | None = None, wire_cpu_s: float = 0.0) -> float:
        """The same step where gradients travel for `wire_s` seconds beside the backward pass.

        In `buckets` messages of one size, the first waits for its share of the backward pass, and the last is
        sent after it. None: the least that a step can take. `wire_cpu_s`: seconds for which sending and
        summing keep the cores from the backward pass.
        """
        share = 1 / buckets if buckets else 0.0
        computing_last = self.backward + wire_cpu_s + share * wire_s
        sending_last = share * self.backward + wire_s
        return self.forward + max(computing_last, sending_last) + self.update

    def efficiency(self, wire_s: float, buckets: int | None = None, wire_cpu_s: float = 0.0) -> float:
        """The share of a step that is spent on computing: 1 where the wire is hidden."""
        return self.total / self.with_communication(wire_s, buckets, wire_cpu_s)


def wire_seconds(num_bytes: float, mbit: float) -> float:
    """How long a rank sends so many bytes over a link of `mbit` megabits per second."""
    return num_bytes * 8 / (PAYLOAD * mbit * 1e6)
