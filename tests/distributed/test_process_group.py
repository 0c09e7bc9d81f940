"""Reading what started this process: torchrun's variables, a scheduler's, or nothing."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from launcher.distributed.env import LaunchEnv
from launcher.distributed.process_group import _device
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


ASK = "from launcher.distributed.process_group import user_omp_threads; print(user_omp_threads())"
AS_TORCHRUN = f"""
import os, subprocess, sys
environ = {{"OMP_NUM_THREADS": "1"}} | dict(os.environ) | {{"TORCHELASTIC_RUN_ID": "none"}}
subprocess.run([sys.executable, "-c", {ASK!r}], env=environ)
"""


@pytest.mark.parametrize("code", [ASK, AS_TORCHRUN], ids=["alone", "torchrun"])
@pytest.mark.parametrize("given", [None, "1", "2"])
def test_the_users_number_of_threads_is_respected_and_torchruns_is_not_taken_for_it(code, given) -> None:
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environ |= {} if given is None else {"OMP_NUM_THREADS": given}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.stdout.strip() == (given or ""), done.stderr


def test_torchruns_variables() -> None:
    assert LaunchEnv.from_environ(TORCHRUN) == LaunchEnv(3, 8, 1, 2, 2, "job-7", True)


def test_a_plain_scheduler_sets_less() -> None:
    assert LaunchEnv.from_environ({"RANK": "1", "WORLD_SIZE": "2"}) == LaunchEnv(1, 2, 0, 1, 0, "none", True)


def test_importing_it_imports_no_torch() -> None:
    code = "import launcher.distributed.process_group, launcher.errors, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def see_gpus(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    """As torch answers on a machine where this process sees these GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(uuids))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index])
    )


@pytest.mark.parametrize(
    ("uuids", "local_rank", "device"),
    [
        ((), 3, torch.device("cpu")),
        (("a",), 0, torch.device("cuda", 0)),
        (("a",), 3, torch.device("cuda", 0)),  # Slurm shows each task its own GPU, as number 0
        (("a", "b"), 1, torch.device("cuda", 1)),
    ],
)
def test_a_rank_takes_its_gpu_or_the_only_one_it_sees(monkeypatch, uuids, local_rank, device) -> None:
    see_gpus(monkeypatch, *uuids)
    assert _device(LaunchEnv(local_rank, 4, local_rank, 4, has_external_launcher=True)) == device


def test_more_ranks_than_gpus_are_refused(monkeypatch) -> None:
    see_gpus(monkeypatch, "a", "b")
    with pytest.raises(PreflightError, match=r"number 2 on this machine, which has 2 GPU"):
        _device(LaunchEnv(2, 3, 2, 3, has_external_launcher=True))
