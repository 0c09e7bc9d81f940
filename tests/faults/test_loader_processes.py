"""Runs whose samples are read by loader processes: whatever ends one, it resumes to the same bits."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.launching import EPOCH, run
from tests.faults.parent import Parent, write_recipe
from tests.faults.usercode import is_here, kill, own_rank, stop_after

pytestmark = pytest.mark.timeout(120)
WORDS = ("data.num_workers=2", f"train.max_steps={2 * EPOCH}", "train.eval_every_steps=9")
STREAM = ("recipe.uses=noisy_streamed", *WORDS)
INDEXED = ("recipe.uses=noisy_indexed", *WORDS)


def stop_all_processes(network: Any, batch: Any) -> None:
    """What a scheduler does: SIGTERM to the worker and to its loader processes."""
    if own_rank() == 0 and is_here(network, EPOCH + 5):
        children = multiprocessing.active_children()
        assert len(children) in (2, 4)  # those of the evaluation too
        for child in children:
            child.terminate()
        os.kill(os.getpid(), signal.SIGTERM)


def kill_a_loader_process(network: Any, batch: Any) -> None:
    if own_rank() == 1 and is_here(network, 8):
        multiprocessing.active_children()[0].kill()


DISTURBANCES = {
    "indexed": (INDEXED, [(kill_a_loader_process, None), (stop_all_processes, [75, 75])]),
    # 200 samples, in 13 steps: it starts again after the second
    "stream": (STREAM, [(kill(8, 1), None), (stop_after(EPOCH, rank=1), [75, 75])]),
}


@pytest.mark.parametrize("name", ["indexed", pytest.param("stream", marks=pytest.mark.slow)])
def test_whatever_ends_it_it_resumes_to_the_same_bits(tmp_path: Path, undisturbed, name) -> None:
    words, disturbances = DISTURBANCES[name]
    whole = undisturbed(*words, ranks=2)
    for user_code, codes in disturbances:
        ended = run(tmp_path / "run", *words, ranks=2, user_code=user_code)
        assert 0 not in ended.codes, ended
        assert codes in (None, ended.codes), ended
    last = run(tmp_path / "run", *words, ranks=2)
    assert last.digest == whole.digest
    assert [event["step"] for event in last.events("step")] == list(range(1, 2 * EPOCH + 1))


def test_a_killed_loader_process_is_named(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", *INDEXED, ranks=2, user_code=kill_a_loader_process)
    assert 7 in ended.codes, ended
    assert "a loader process of the training set ended" in ended.log(1)


KILL = """
if step == 5 and RANK == 1 and GENERATION == 0:
    import multiprocessing
    multiprocessing.active_children()[0].kill()
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["killed", "bad sample"])
def test_the_run_is_restarted_after_the_kill_of_a_loader_process_and_not_for_a_bad_sample(
    tmp_path: Path, what
) -> None:
    write_recipe(tmp_path, KILL if what == "killed" else "pass")
    recipe = tmp_path / "tiny.py"
    samples = "[{'image': image, 'label': int(image[0] > 0)} for image in x]"
    if what == "bad sample":
        samples = f"[*{samples}[:20], None, *{samples}[21:]]"
    text = recipe.read_text().replace("Recipe(build, data, data,", f"Recipe(build, {samples}, data,")
    recipe.write_text(text)
    with Parent(tmp_path, "train.epochs=4", "data.num_workers=1", "launch.max_restarts=1") as parent:
        assert parent.end(40) == (0 if what == "killed" else 7)
        assert parent.stderr.count("restart 1 of 1: rank 1") == (what == "killed")
