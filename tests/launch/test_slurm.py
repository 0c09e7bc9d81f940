"""The variables of Slurm 22.05 in a step of two nodes with two tasks each."""

from __future__ import annotations

import os

import pytest

from launcher import cli
from launcher.distributed.env import LaunchEnv
from launcher.launch.slurm import first_node, torchrun_env_from_slurm

TASK = {
    "SLURM_GTIDS": "2,3",
    "SLURM_JOB_ID": "4071",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[007,012]",
    "SLURM_STEP_NUM_TASKS": "4",
}
# srun of one task, and the batch script, which is one process
ALONE = TASK | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
BATCH = {key: value for key, value in ALONE.items() if "STEP" not in key}


def test_each_task_of_srun_is_a_rank() -> None:
    variables = torchrun_env_from_slurm(TASK)
    launch = LaunchEnv.from_environ(TASK | variables)
    assert launch == LaunchEnv(
        rank=3, world_size=4, local_rank=1, local_world_size=2, has_external_launcher=True
    )
    assert variables["MASTER_ADDR"] == "gpu007"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        ALONE,
        BATCH,
        TASK | {"RANK": "0"},
        TASK | {"OMPI_COMM_WORLD_SIZE": "8"},
        TASK | {"WANDB_SWEEP_PARAM_PATH": "values.yaml"},
    ],
)
def test_no_other_process_in_a_job_is_one(environ) -> None:
    assert torchrun_env_from_slurm(environ) == {}


def test_one_machine_by_the_command_makes_each_task_a_run_of_its_own(monkeypatch) -> None:
    led: list[LaunchEnv] = []
    monkeypatch.setattr(cli, "run_rank0", lambda launch, argv: led.append(launch) or 0)
    monkeypatch.setattr(os, "environ", dict(TASK))
    assert cli.main(["recipe=cnn", "launch.nnodes=1"]) == 0
    assert led == [LaunchEnv()]


def test_the_place_to_meet_is_that_of_the_step_or_the_one_that_is_set() -> None:
    ports = {
        torchrun_env_from_slurm(TASK | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step})["MASTER_PORT"]
        for job in ("4071", "4072", "99999999")
        for step in ("0", "1")
    }
    assert len(ports) == 6
    assert all(15000 <= int(port) < 30000 for port in ports)
    own = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert own.items() <= torchrun_env_from_slurm(TASK | own).items()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2]", "n1"),
        ("gpu[001-004,007],login", "gpu001"),
        ("rack[2-3]n[00,08-15].x,a", "rack2n00.x"),
        ("a-b,c[1-2]", "a-b"),
    ],
)
def test_the_first_of_a_list_of_nodes(nodes, first) -> None:
    assert first_node(nodes) == first
