"""Machines that differ in launcher or NCCL are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launcher.distributed import preflight
from launcher.distributed.env import WorkerEnv
from launcher.errors import PreflightError
from tests.configs import composed

FIRST = preflight.RankInfo("CPU", None, 1, "first")


def same() -> None: ...


def meet_as_rank_1(differ: Callable[[], None] = same) -> list[preflight.RankInfo]:
    """What rank 1 gets, whose machine is made to differ from that of rank 0 once rank 0 has spoken."""
    config, store = composed(), dist.HashStore()
    words = {"peer": asdict(FIRST), "facts": preflight.environment_facts(config)}
    store.set("job/meeting/0", json.dumps(words))
    differ()
    return preflight.exchange_rank_info(
        config, WorkerEnv(1, 2, 0, 1, torch.device("cpu"), None), store, "job"
    )


@pytest.fixture
def other_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Callable[[], None]]:
    """By what differs, what makes this machine another one."""

    def launcher() -> None:
        (tmp_path / "distributed").mkdir()
        (tmp_path / "worker.py").write_text("# edited on this machine only")
        monkeypatch.setattr(preflight, "__file__", str(tmp_path / "distributed" / "preflight.py"))

    def nccl() -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 99, 1))

    return {"launcher": launcher, "NCCL": nccl}


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "launcher",
            "rank 1: the digest of the launcher's files is [0-9a-f]{12}, and [0-9a-f]{12} on rank 0",
        ),
        ("NCCL", r"rank 1: NCCL is \(2, 99, 1\), and .* on rank 0"),
    ],
)
def test_machines_that_differ_are_refused(other_machine, what: str, told: str) -> None:
    with pytest.raises(PreflightError, match=rf"alike: {told}\. Start all of them from the same"):
        meet_as_rank_1(other_machine[what])


def test_machines_that_are_alike_meet() -> None:
    assert meet_as_rank_1()[0] == FIRST
