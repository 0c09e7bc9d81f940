"""data.micro_batch=auto: found before the first step, on all ranks alike, without a trace in the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.faults.launching import Ended, run
from tests.faults.usercode import both, lacking_memory, stop_after

pytestmark = pytest.mark.timeout(90)
AUTO = "data.micro_batch=auto"
SHORT = ("train.max_steps=4", "train.eval_every_steps=3")


def decisions(ended: Ended, topic: str) -> list[dict[str, Any]]:
    return [event for event in ended.events("decision") if event["topic"] == topic]


def written(ended: Ended) -> Any:
    """data.micro_batch of config.yaml."""
    return yaml.safe_load((ended.directory / "config.yaml").read_text())["data"]["micro_batch"]


RUNS = {
    "on two ranks, one of which has less": (2, (), (1,), [[8, False], [2, True], [3, True], [4, False]]),
    "in loader processes": (1, ("recipe.uses=noisy_indexed", "data.workers=1"), (0,), None),
    "from a stream": (1, ("recipe.uses=noisy_streamed", "data.workers=0"), (0,), None),
    "sharded, its scale found too": (2, ("wire.shard=true", "precision.scale.mode=auto"), (0, 1), None),
}
SLOW = ("from a stream", "sharded, its scale found too")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in RUNS]
)
def test_the_run_ends_with_the_bits_of_one_with_the_number_given_by_hand(tmp_path: Path, name) -> None:
    ranks, words, small, tried = RUNS[name]
    found = run(tmp_path / "auto", *SHORT, *words, AUTO, ranks=ranks, user_code=lacking_memory(3, *small))
    size = found.result["micro_batch"]
    assert size == 3
    assert (
        found.digest == run(tmp_path / "hand", *SHORT, *words, f"data.micro_batch={size}", ranks=ranks).digest
    )
    (decision,) = decisions(found, "micro-batch")
    assert decision["micro_batch"] == written(found) == size
    assert decision["tried"] == tried if tried else len(decision["tried"]) <= 8
    assert "data.micro_batch=auto: 3 per rank" in found.outputs[0]


def test_a_resume_takes_the_number_of_the_run_and_tries_nothing(tmp_path: Path) -> None:
    """It differs from what would be found now: everything fits in the second process."""
    words = ("train.max_steps=10", AUTO)
    whole = run(tmp_path / "whole", *words, user_code=lacking_memory(7, 0))
    small = both(lacking_memory(7, 0), stop_after(8, passes_per_step=3))
    assert run(tmp_path / "run", *words, user_code=small).codes == [75]
    resumed = run(tmp_path / "run", *words)
    assert resumed.digest == whole.digest
    assert resumed.result["micro_batch"] == whole.result["micro_batch"] == written(resumed) == 6
    assert decisions(resumed, "micro-batch")[-1]["text"] == "6 per rank, as in the run so far"
    by_hand = run(tmp_path / "run", "train.max_steps=11", "data.micro_batch=5")
    assert by_hand.result["micro_batch"] == 4, "16 in fewest pieces of at most 5"


def test_where_not_even_one_sample_fits_all_ranks_leave_with_exit_4(tmp_path: Path) -> None:
    """Rank 0 has room for one, from which its batch norm cannot compute a variance."""
    ended = run(tmp_path / "run", AUTO, ranks=2, user_code=lacking_memory(0, 1))
    assert ended.codes == [4, 4], ended
    assert (
        "not even one sample per rank and forward pass fits in memory: rank 0: the recipe" in ended.outputs[0]
    )
    assert "rank 1: GPU memory: no room for 1 samples. Choose a smaller model" in ended.outputs[0]
    assert ended.result["exit"] == 4
