"""Each check of a machine, with a stand-in by which it fails."""

from __future__ import annotations

import dataclasses
import os
import resource
import socket
import warnings

import pytest
import torch

from launcher.distributed.env import WorkerEnv
from launcher.doctor import machine
from launcher.doctor.findings import FAILURE, OK, WARNING
from launcher.doctor.machine import Subject
from tests.configs import composed


@pytest.fixture(scope="module")
def subject(tmp_path_factory) -> Subject:
    config = composed("recipe=cnn", f"run.dir={tmp_path_factory.getbasetemp()}/a/b", "tracker=none")
    return Subject(config, ranks=2, gpus=0)


def only(found):
    (finding,) = found
    return finding


def test_a_machine_without_faults_is_ok(subject, monkeypatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 64 << 30)
    monkeypatch.setattr(machine, "quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for look in (machine.cores, machine.memory):
        assert only(look(subject)).verdict == OK


def test_fewer_cores_than_ranks_and_a_quota_of_the_container(subject, monkeypatch, tmp_path) -> None:
    limit = tmp_path / "cpu.max"
    limit.write_text("150000 100000\n")
    assert machine.quota(str(limit)) == 1.5
    limit.write_text("max 100000\n")
    assert machine.quota(str(limit)) is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(machine, "quota", lambda: None)
    assert "start fewer" in only(machine.cores(subject)).sentence
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine, "quota", lambda: 4.0)
    assert "OMP_NUM_THREADS=2" in only(machine.cores(subject)).advice


def test_little_memory(subject, monkeypatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 1 << 30)
    assert only(machine.memory(subject)).verdict == WARNING


@pytest.mark.parametrize(("gpus", "verdict"), [(0, WARNING), (8, FAILURE)])
def test_small_shared_memory_fails_several_gpus(subject, monkeypatch, gpus, verdict) -> None:
    monkeypatch.setattr(machine, "shm_hint", lambda: "/dev/shm has 64 of 64 MB free.")
    assert only(machine.shared_memory(dataclasses.replace(subject, gpus=gpus))).verdict == verdict


def test_few_open_files_are_a_warning(monkeypatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert "ulimit -n 4096" in next(machine.limits()).advice
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert "limits.conf" in next(machine.limits()).advice


def test_locked_memory_counts_where_infiniband_is(monkeypatch, tmp_path) -> None:
    (tmp_path / "mlx5_0").touch()
    monkeypatch.setattr(machine, "INFINIBAND", str(tmp_path))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    assert [found.verdict for found in machine.limits()] == [OK, FAILURE]


def test_a_disk_that_is_full_is_a_failure_and_keeps_nothing(tmp_path, monkeypatch) -> None:
    assert only(machine.disk(tmp_path)).value.endswith(f"MB/s written at {tmp_path}")
    assert not os.listdir(tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    found = only(machine.disk(tmp_path))
    assert (found.verdict, "No space left" in found.value) == (FAILURE, True)
    assert not os.listdir(tmp_path)


def test_little_room_and_a_slow_disk(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(machine, "SLOW_DISK", 1e15)
    assert "faster disk" in only(machine.disk(tmp_path)).advice
    monkeypatch.setattr(machine, "MIN_FREE_BYTES", 1 << 60)
    assert "Make room" in only(machine.disk(tmp_path)).advice


def test_a_run_dir_that_is_a_file_or_cannot_be_reached_is_a_failure(subject, tmp_path, monkeypatch) -> None:
    def of(path) -> Subject:
        run = dataclasses.replace(subject.config.run, dir=str(path))
        return dataclasses.replace(subject, config=dataclasses.replace(subject.config, run=run))

    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        found = only(machine.disk(of(path).place))
        assert (found.verdict, found.value) == (FAILURE, f"{tmp_path}/file: Not a directory")
    assert only(machine.disk(of(tmp_path / "new" / "run").place)).verdict == OK

    def forbidden(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", forbidden)  # as below a folder of another user
    assert of("/root/run").place


def test_interfaces(monkeypatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert "eth0" in only(machine.interface({})).advice
    assert only(machine.interface({"GLOO_SOCKET_IFNAME": "eth0"})).verdict == OK
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.0.0.1")
    assert only(machine.interface({})).verdict == OK


def test_a_tracker_without_a_key_is_a_warning(tmp_path) -> None:
    environ = {"HOME": str(tmp_path)}
    config = composed("recipe=cnn")
    assert only(machine.tracker(config, environ)).verdict == WARNING
    assert only(machine.tracker(config, environ | {"WANDB_MODE": "offline"})).verdict == OK
    assert only(machine.tracker(composed("recipe=cnn", "tracker=none"), environ)).verdict == OK


def test_a_run_warns_of_what_is_wrong_on_one_rank_of_a_host_and_of_nothing_else(subject, monkeypatch) -> None:
    for name, value in {"cores": [], "memory": [], "free_space": []}.items():
        monkeypatch.setattr(machine, name, lambda _, found=value: found)
    monkeypatch.setattr(machine, "limits", lambda: [machine.judged("open files", "at most 256", "Raise it.")])
    monkeypatch.setattr(machine, "shared_memory", lambda _: [machine.judged("shared memory", "1 GB")])
    with pytest.warns(UserWarning, match="open files: at most 256. Raise it.") as said:
        machine.warn_of_machine(subject.config, WorkerEnv(2, 4, 0, 2, torch.device("cpu"), None))
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        machine.warn_of_machine(subject.config, WorkerEnv(3, 4, 1, 2, torch.device("cpu"), None))
