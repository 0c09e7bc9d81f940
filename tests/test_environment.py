"""Reading what started this process: torchrun's variables, a scheduler's, or nothing."""

import subprocess
import sys

import pytest

from launcher.environment import LaunchEnv
from launcher.errors import PreflightError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "job-7",
}


def test_without_rank_the_process_is_alone() -> None:
    assert LaunchEnv.from_environ({"WORLD_SIZE": "4"}) == LaunchEnv()
    assert LaunchEnv() == LaunchEnv(0, 1, 0, 1, 0, "none")


def test_torchruns_variables() -> None:
    assert LaunchEnv.from_environ(TORCHRUN) == LaunchEnv(3, 8, 1, 2, 2, "job-7", True)


def test_a_plain_scheduler_sets_less() -> None:
    assert LaunchEnv.from_environ({"RANK": "1", "WORLD_SIZE": "2"}) == LaunchEnv(1, 2, 0, 1, 0, "none", True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "x"}, "RANK='x'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE=''"),
        ({"RANK": "8"}, "RANK=8 with WORLD_SIZE=8"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
    ],
)
def test_variables_that_make_no_sense_are_refused(change, message) -> None:
    with pytest.raises(PreflightError, match=message):
        LaunchEnv.from_environ(TORCHRUN | change)


def test_missing_world_size_is_refused() -> None:
    with pytest.raises(PreflightError, match="WORLD_SIZE=None"):
        LaunchEnv.from_environ({"RANK": "0"})


def test_importing_it_imports_no_torch() -> None:
    code = (
        "import launcher.environment, launcher.errors, launcher.schedule, sys; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
