"""Whole runs under train.cuda_graph, on a CPU that records with the stand-in: the same digest as without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.forked import Forked, launch_forked
from tests.ranks.harness import leave_out_pictures

DIGITS = ["recipe=cnn", "data=digits", "data.augment.crop_padding=1", "data.batch_size=100", "tracker=none"]


def recording(words: Sequence[str]) -> None:
    """`python -m launcher words...` where a CPU has a recorder."""
    import launcher.engine.recorder as recorder
    from launcher.__main__ import main
    from tests.recording import Tape

    leave_out_pictures()
    recorder.RECORDERS["cpu"] = lambda device: Tape()
    sys.exit(main(list(words)))


def launch_recording(directory: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    with Forked(recording, words, directory=directory, environ=environ) as forked:
        code = forked.wait(100)
        return subprocess.CompletedProcess(words, code, forked.stdout, forked.stderr)


def digest(run_dir: Path) -> str:
    return str(json.loads((run_dir / "result.json").read_text())["weights_sha256"])


@pytest.mark.slow
def test_a_stopped_and_resumed_run_ends_with_the_digest_of_one_that_never_recorded(tmp_path) -> None:
    """14 full batches and one of 38 an epoch, on two ranks; the first run ends within the second epoch."""
    words = [*DIGITS, "launch.nproc=2", "train.max_steps=18"]
    plain = launch_forked(tmp_path, [*words, "run.dir=plain"])
    assert plain.returncode == 0, plain.stderr
    first = launch_recording(
        tmp_path,
        [*DIGITS, "launch.nproc=2", "train.max_steps=16", "train.cuda_graph=true", "run.dir=recorded"],
    )
    assert first.returncode == 0, first.stderr
    assert "cuda graph each step of 100 samples, and the last of an epoch, of 38" in first.stdout
    second = launch_recording(tmp_path, [*words, "train.cuda_graph=auto", "run.dir=recorded"])
    assert second.returncode == 0, second.stderr
    assert "resume after step 16" in second.stdout
    assert digest(tmp_path / "recorded") == digest(tmp_path / "plain")


def test_a_cpu_refuses_it_with_exit_code_2(tmp_path) -> None:
    done = launch_forked(tmp_path, [*DIGITS, "train.cuda_graph=true", "run.dir=run"])
    assert done.returncode == 2, done.stderr
    assert "train.cuda_graph=true: this run cannot be recorded: it runs on the device cpu" in done.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["step"] == 0
