"""The time of a step over a link: what is sent, what the backward pass hides, what remains."""

from __future__ import annotations

import pytest

from launcher.distributed.links import ring_bytes
from scripts.bench.step_model import PAYLOAD, StepSeconds, wire_seconds


def test_each_rank_of_a_ring_sends_twice_the_message_less_its_own_share() -> None:
    assert [ring_bytes(100, ranks) for ranks in (1, 2, 4)] == [0, 100, 150]


def test_a_link_carries_its_rate_less_the_headers() -> None:
    assert wire_seconds(PAYLOAD * 125e6, 1000) == pytest.approx(1.0)  # 1 Gbit/s is 125 MB/s


def test_a_step_waits_for_what_the_backward_pass_does_not_hide() -> None:
    step = StepSeconds(forward=1.0, backward=2.0, update=0.5)
    assert (step.with_communication(1.9), step.with_communication(4.0)) == (3.5, 5.5)
    assert (step.efficiency(2.0), step.efficiency(5.5)) == (1.0, 0.5)


def test_the_first_bucket_waits_for_its_gradients_and_the_last_is_sent_after_the_backward_pass() -> None:
    step = StepSeconds(forward=1.0, backward=2.0, update=0.5)
    assert step.with_communication(1.0, buckets=1) == step.total + 1.0  # nothing is hidden
    assert step.with_communication(1.0, buckets=4) == step.total + 0.25
    assert step.with_communication(8.0, buckets=4) == 1.0 + (0.5 + 8.0) + 0.5


def test_sending_takes_the_cores_from_a_backward_pass_that_is_longer_than_the_wire() -> None:
    step = StepSeconds(forward=1.0, backward=2.0, update=0.5)
    assert step.with_communication(1.0, wire_cpu_s=0.3) == pytest.approx(step.total + 0.3)
    # Done while the wire is waited for.
    assert step.with_communication(4.0, wire_cpu_s=0.3) == step.with_communication(4.0)
