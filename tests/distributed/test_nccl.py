"""What NCCL reads from the environment, and whose fault its errors are, without NCCL."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from launcher.distributed import nccl
from launcher.distributed.env import LaunchEnv
from launcher.distributed.exit_records import exit_record, is_secondary
from launcher.errors import UnexpectedError
from launcher.trainer.errors.rank_failure import to_launcher_error

ALL_HERE, ONE_OF_TWO_HOSTS = (
    LaunchEnv(1, 2, 1, 2, has_external_launcher=True),
    LaunchEnv(1, 2, 0, 1, has_external_launcher=True),
)


def said(kind: str, name: str, last: str = "") -> RuntimeError:
    """As ProcessGroupNCCL words what NCCL reports."""
    return dist.DistBackendError(
        f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:94, {kind} (run with "
        f"NCCL_DEBUG=INFO for details), NCCL version 2.28.9\n{name}\nLast error:\n{last}"
    )


SYSTEM, CUDA = "unhandled system error", "unhandled cuda error"
FAILED = "ncclUnhandledCudaError: Call to CUDA function failed."
NO_SHM = "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888), error: No space left"
OWN = [
    said(SYSTEM, "ncclSystemError: System call failed.", NO_SHM),
    said(CUDA, FAILED),
    said(CUDA, FAILED, "Cuda failure 700 'an illegal memory access'"),
    said("invalid usage", "ncclInvalidUsage: ...", "Duplicate GPU"),
    said(SYSTEM, "ncclSystemError: ...", "Bootstrap : no socket"),
]
OF_ANOTHER = [
    said("remote process exited or there was a network error", "ncclRemoteError: A call failed"),
    said(
        "unhandled system error", "ncclSystemError: ...", "socketProgress: Connection closed by remote peer"
    ),
    said("internal error", "ncclInternalError: ...", "Proxy Call to rank 1 failed (Connect)"),
    said(SYSTEM, "ncclSystemError: System call failed."),
    RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer."),
]


def explained(error: Exception) -> Exception | None:
    return to_launcher_error(error, ALL_HERE, "logs/rank1.log", ("", ""))


@pytest.mark.parametrize("error", OWN)
def test_an_error_of_nccl_on_this_rank_is_the_origin_and_keeps_what_nccl_says(error) -> None:
    assert not is_secondary(error)
    assert not exit_record(1, error).is_secondary
    failure = explained(error)
    assert type(failure) is UnexpectedError
    assert str(error).splitlines()[-1] in str(failure)


@pytest.mark.parametrize("error", OF_ANOTHER)
def test_an_error_that_a_lost_rank_explains_is_not_the_origin(error) -> None:
    assert is_secondary(error)
    assert exit_record(1, error).is_secondary
    assert explained(error) is None


def test_docker_s_shared_memory_is_found_too_small(monkeypatch) -> None:
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_frsize=4096, f_bavail=250, f_blocks=16384)
    )
    assert "/dev/shm has 0 of 64 MB free" in nccl.shm_hint()
    assert "--shm-size=1g" in nccl.shm_hint()


@pytest.mark.parametrize(
    ("launch", "own", "interfaces"),
    [
        (ALL_HERE, {}, ["lo", "lo"]),
        (ALL_HERE, {"NCCL_SOCKET_IFNAME": "eth0"}, ["lo", "eth0"]),
        (ONE_OF_TWO_HOSTS, {}, [None, None]),
    ],
)
def test_ranks_of_one_machine_meet_on_the_loopback_device(launch, own, interfaces) -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **own}
    nccl.prepare(environ, one_machine=launch.local_world_size == launch.world_size)
    assert [environ.get(key) for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")] == interfaces
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert environ["RDMAV_FORK_SAFE"] == "1", "loader processes are forked beside a card's memory"
