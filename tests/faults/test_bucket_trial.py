"""Runs that measure the size of their buckets have the bits of a run that was given one, resumed or not."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.faults.launching import Ended, Started, run

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]
WORDS = (
    *("recipe=cnn", "recipe.uses=cnn", "recipes.path=null", "data=digits", "data.batch_size=8"),
    *("model=cnn", "train.epochs=100", "train.max_steps=260"),
)


def decisions(ended: Ended) -> list[dict[str, Any]]:
    return [event for event in ended.events("decision") if event["topic"] == "buckets"]


def test_a_run_that_resumes_while_it_measures_its_buckets_has_the_bits_of_one_that_was_given_a_size(tmp_path):
    given = run(tmp_path / "given", *WORDS, "wire.bucket_mb=0.5", "checkpoint.every_steps=null", ranks=2)
    assert not decisions(given)
    with Started(tmp_path / "measured", WORDS, ranks=2) as started:
        started.until(lambda: started.ended().checkpoints)  # of step 5, where the trial has begun
        started.signal(signal.SIGTERM)
        stopped = started.end()
    assert set(stopped.codes) == {75}, stopped
    assert not decisions(stopped)
    resumed = run(tmp_path / "measured", *WORDS, "checkpoint.every_steps=null", ranks=2)
    assert resumed.digest == given.digest
    (decision,) = decisions(resumed)
    assert "measured: a step takes" in decision["text"]
