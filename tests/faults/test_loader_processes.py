"""Runs whose samples are read by loader processes: whatever ends one, the same command ends with the same bits."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.launching import EPOCH, run
from tests.faults.usercode import is_here, kill, own_rank, stop_after

pytestmark = pytest.mark.timeout(120)
WORDS = ("data.workers=2", f"train.max_steps={2 * EPOCH}", "train.eval_every_steps=9")
STREAM = ("recipe.uses=noisy_streamed", *WORDS)
INDEXED = ("recipe.uses=noisy_indexed", *WORDS)


def stop_all_processes(network: Any, batch: Any) -> None:
    """What a scheduler does: SIGTERM to the worker and to its loader processes."""
    if own_rank() == 0 and is_here(network, 5):
        children = multiprocessing.active_children()
        assert len(children) == 2
        for child in children:
            child.terminate()
        os.kill(os.getpid(), signal.SIGTERM)


def kill_a_loader_process(network: Any, batch: Any) -> None:
    if own_rank() == 1 and is_here(network, 8):
        multiprocessing.active_children()[0].kill()


@pytest.mark.parametrize("words", [INDEXED, STREAM], ids=["indexed", "stream"])
def test_killed_and_stopped_it_ends_as_if_nothing_had_happened(tmp_path: Path, undisturbed, words) -> None:
    whole = undisturbed(*words, ranks=2)
    for user_code, codes in (
        (kill(8, 1), None),
        (kill_a_loader_process, None),
        (stop_after(EPOCH, rank=1), [75, 75]),  # a stream of 200 samples starts again there
        (stop_all_processes, [75, 75]),
    ):
        ended = run(tmp_path / "run", *words, ranks=2, user_code=user_code)
        assert 0 not in ended.codes, ended
        assert codes in (None, ended.codes), ended
    last = run(tmp_path / "run", *words, ranks=2)
    assert last.digest == whole.digest
    assert [event["step"] for event in last.events("step")] == list(range(1, 2 * EPOCH + 1))


def test_a_killed_loader_process_is_named(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", *INDEXED, ranks=2, user_code=kill_a_loader_process)
    assert ended.codes[1] == 7, ended
    assert "a loader process ended while it read" in ended.log(1)
    assert "is killed by signal: Killed" in ended.log(1)


@pytest.mark.parametrize("words", [INDEXED, STREAM], ids=["indexed", "stream"])
def test_any_number_of_ranks_and_loader_processes_trains_on_the_same_samples(tmp_path: Path, words) -> None:
    """Of the first step: later ones depend on the statistics of the batch norms, which ranks have of their own."""
    losses = [
        run(
            tmp_path / f"{ranks}-{workers}",
            *words,
            f"data.workers={workers}",
            "train.max_steps=1",
            ranks=ranks,
        ).events("step")[0]["loss"]
        for ranks, workers in ((1, 0), (1, 2))
    ]
    assert losses[0] == losses[1]
