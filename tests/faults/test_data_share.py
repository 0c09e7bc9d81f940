"""data.share: ranks of unlike speed take unlike parts of each batch, and train the same model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from launcher.engine.grads.reducer import Reducer
from tests.faults.launching import Ended, nothing, run
from tests.faults.usercode import as_fast_as, both, change_speed, own_rank, record, stop_after

pytestmark = pytest.mark.timeout(90)
SHORT = ("train.max_steps=24", "train.eval_every_steps=12", "precision=fp32")
AUTO = "data.share=auto"


def shares(ended: Ended) -> list[tuple[int, list[int]]]:
    """The steps after which the shares were changed, and what they were then."""
    changes = [event for event in ended.events("decision") if "from_step" in event]
    return [(event["from_step"] - 1, event["shares"]) for event in changes]


def losses(ended: Ended) -> list[float]:
    return [event["loss"] for event in ended.events("step")]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_find_shares_in_proportion_to_their_speeds_within_twenty_steps(tmp_path: Path, ranks) -> None:
    speeds = (0.008, 0.024, 0.008)[:ranks]
    expected = {2: (12, 4), 3: (7, 2, 7)}[ranks]
    words = (*SHORT, AUTO, "ddp.check_replicas_every_steps=8")
    ended = run(tmp_path / "run", *words, ranks=ranks, user_code=as_fast_as(*speeds))
    assert ended.codes == [0] * ranks, ended
    found = shares(ended)
    assert found, "no change"
    step, last = found[-1]
    assert step < 20
    assert sum(last) == 16
    assert all(abs(own - goal) <= 1 for own, goal in zip(last, expected, strict=True)), found


@pytest.mark.slow
def test_a_rank_that_becomes_slow_in_mid_run_is_followed_within_600_steps(tmp_path: Path) -> None:
    """The load moves from rank 1 to rank 0, in the middle of a window of measurement."""
    before, after = as_fast_as(0.0005, 0.0015), as_fast_as(0.0015, 0.0005)
    moves = partial(change_speed, before=before, after=after, passes=700)
    words = (
        "train.max_steps=1300",
        "train.epochs=200",
        "train.eval_every_steps=2000",
        "checkpoint.every_steps=null",
    )
    ended = run(tmp_path / "run", *words, AUTO, ranks=2, user_code=moves)
    assert ended.codes == [0, 0], ended
    by_step = dict(shares(ended))
    # Rank 0 makes two passes a step with its larger share, so its 700th pass is near step 350.
    first = [found for step, found in by_step.items() if step < 300][-1]
    step, last = max(by_step.items())
    assert first[0] > first[1]
    assert last[0] < last[1]
    assert step < 700 + 600


def test_whatever_the_shares_the_step_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """In fp32 the losses of two ranks with shares of 13 and 3 are those of one, without what a rank draws."""
    words = (*SHORT, "recipe.uses=plain")
    alone = run(tmp_path / "alone", *words)
    uneven = run(tmp_path / "uneven", *words, "data.share=[13,3]", ranks=2)
    assert losses(uneven) == pytest.approx(losses(alone), rel=1e-5)
    assert [event["val_loss"] for event in uneven.events("eval")] == pytest.approx(
        [event["val_loss"] for event in alone.events("eval")], rel=1e-5
    )


def test_a_resume_begins_with_the_shares_of_its_checkpoint(tmp_path: Path) -> None:
    slow, words = as_fast_as(0.008, 0.024), (*SHORT, AUTO)
    before = run(tmp_path / "run", *words, ranks=2, user_code=both(slow, stop_after(15, rank=1)))
    assert before.codes == [75, 75], before
    (tmp_path / "seen").mkdir()
    recorded = partial(record, directory=tmp_path / "seen", then=nothing)
    ended = run(tmp_path / "run", *words, ranks=2, user_code=both(slow, recorded))
    assert ended.codes == [0, 0], ended
    (resumed,) = [e for e in ended.events("decision") if "as in the run so far" in e["text"]]
    assert resumed["shares"][0] > resumed["shares"][1]
    _, *samples = (tmp_path / "seen" / "rank1").read_text().splitlines()[0].split()
    assert len(samples) == resumed["shares"][1]


def without_room_for_sums(rank: int) -> None:
    """Rank `rank` has no memory for the fp32 sums of several passes."""
    accumulate = Reducer.accumulate

    def lacking(reducer: Reducer, accumulates: bool) -> None:
        if accumulates and own_rank() == rank:
            raise torch.OutOfMemoryError("no room for sums")
        accumulate(reducer, accumulates)

    Reducer.accumulate = lacking  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_rank_without_room_for_a_larger_share_keeps_what_fits(tmp_path: Path) -> None:
    """Two of three ranks are fast; the one that lacks memory keeps its part of an equal division, 6 of 16."""
    ended = run(
        tmp_path / "run",
        *SHORT,
        AUTO,
        ranks=3,
        user_code=as_fast_as(0.008, 0.024, 0.008),
        prepare=partial(without_room_for_sums, 0),
    )
    assert ended.codes == [0, 0, 0], ended
    (capped,) = [event for event in ended.events("decision") if "most" in event]
    assert capped["most"] == [6, 16, 16]
    assert "rank 0 ran out of" in capped["text"]
    _, last = shares(ended)[-1]
    assert last[0] <= 6 < last[2]
