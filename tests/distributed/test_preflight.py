"""Machines that differ are refused unless launch.hosts=mixed: in launcher, NCCL, GPUs, clock or disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launcher.distributed import preflight
from launcher.distributed.env import LaunchEnv, WorkerEnv
from launcher.errors import PreflightError, StorageError
from tests.configs import composed

FIRST = preflight.Peer("CPU", None, 1, "first")


def same() -> None: ...


def meet_as_rank_1(
    hosts: str, differ: Callable[[], None] = same, ahead_s: float = 0.0, mark: str = ""
) -> list[preflight.Peer]:
    """What rank 1 gets, whose machine is made to differ from that of rank 0 once rank 0 has spoken."""
    config = composed()
    config = replace(config, launch=replace(config.launch, hosts=hosts))
    store = dist.HashStore()
    words = {"peer": asdict(FIRST), "facts": preflight.facts(config), "mark": mark}
    store.set("job/meeting/0", json.dumps(words))
    store.set("job/clock", str(time.time() - ahead_s))
    differ()
    return preflight.meet(config, WorkerEnv(1, 2, 0, 1, torch.device("cpu"), None), store, "job")


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

    def gpus() -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 99)

    return {"launcher": launcher, "NCCL": nccl, "GPUs": gpus}


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "launcher",
            "rank 1: the digest of the launcher's files is [0-9a-f]{12}, and [0-9a-f]{12} on rank 0",
        ),
        ("NCCL", r"rank 1: NCCL is \(2, 99, 1\), and .* on rank 0"),
        ("GPUs", r"rank 1: the number of GPUs is 99, and \d+ on rank 0"),
    ],
)
def test_machines_that_differ_are_refused_unless_they_may(other_machine, what: str, told: str) -> None:
    with pytest.raises(PreflightError, match=rf"alike: {told}\. .*; launch\.hosts=mixed allows"):
        meet_as_rank_1("alike", other_machine[what])


@pytest.mark.parametrize("what", ["launcher", "NCCL", "GPUs"])
def test_mixed_machines_may_differ(other_machine, what: str) -> None:
    assert meet_as_rank_1("mixed", other_machine[what])[0] == FIRST


@pytest.mark.parametrize(("ahead_s", "told"), [(90, r"9\d s ahead of"), (-90, r"\d\d s behind")])
def test_a_clock_more_than_a_minute_off_is_refused_unless_it_may_be(ahead_s: int, told: str) -> None:
    with pytest.raises(PreflightError, match=rf"rank 1: the clock of this machine \(\S+\) is {told} that"):
        meet_as_rank_1("alike", ahead_s=ahead_s)
    assert meet_as_rank_1("mixed", ahead_s=ahead_s)[0] == FIRST


def test_clocks_within_a_minute_are_alike() -> None:
    assert meet_as_rank_1("alike", ahead_s=-40)[0] == FIRST


def test_a_disk_that_is_not_that_of_rank_0_is_refused_unless_it_may_be(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(preflight, "SEEN_S", 0.1)
    elsewhere = str(tmp_path / ".meeting-1")
    with pytest.raises(PreflightError, match=r"rank 1 \(on \S+\) does not see rank 0's run\.dir="):
        meet_as_rank_1("alike", mark=elsewhere)
    assert meet_as_rank_1("mixed", mark=elsewhere)[0] == FIRST
    Path(elsewhere).touch()
    assert meet_as_rank_1("alike", mark=elsewhere)[0] == FIRST


def test_rank_0_marks_the_run_directory_while_the_others_look(tmp_path: Path) -> None:
    config = composed()
    config = replace(config, run=replace(config.run, dir=str(tmp_path)))
    words = {"peer": asdict(FIRST), "facts": preflight.facts(config), "sees": True}
    seen = []

    class Store(dist.HashStore):
        """Answers for rank 1 when it is asked."""

        def get(self, key: str) -> bytes:
            if key == "job/meeting/1":
                mark = json.loads(super().get("job/meeting/0"))["mark"]
                seen.append((mark, Path(mark).exists()))
                return json.dumps(words).encode()
            return super().get(key)

    preflight.meet(config, WorkerEnv(0, 2, 0, 1, torch.device("cpu"), None), Store(), "job")
    ((mark, was_there),) = seen
    assert was_there
    assert Path(mark).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", [True, False])
def test_a_run_directory_is_made_only_where_machines_may_have_disks_of_their_own(
    monkeypatch, tmp_path: Path, there: bool
) -> None:
    monkeypatch.setattr(preflight, "SEEN_S", 0.1)
    directory, config = tmp_path / "outputs" / "run", composed()
    config = replace(config, run=replace(config.run, dir=str(directory)))
    if there:
        directory.mkdir(parents=True)
        assert preflight.prepare_directory(config, LaunchEnv(1, 2)) == directory
        return
    with pytest.raises(PreflightError, match=r"rank 1 .* does not see"):
        preflight.prepare_directory(config, LaunchEnv(1, 2))
    assert not directory.exists()
    mixed = replace(config, launch=replace(config.launch, hosts="mixed"))
    assert preflight.prepare_directory(mixed, LaunchEnv(1, 2)).is_dir()
    directory.rmdir()
    directory.touch()
    with pytest.raises(StorageError, match=r"rank 1: run\.dir=.* cannot be made on "):
        preflight.prepare_directory(mixed, LaunchEnv(1, 2))
