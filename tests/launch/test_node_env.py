"""Which machine of a run this process is, and the refusal to train alone where a scheduler says otherwise."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cli import run_overrides, without_node_rank
from launcher.config.schema import LaunchConfig
from launcher.distributed.env import LaunchEnv
from launcher.errors import LauncherError
from launcher.launch.node_env import check_all_nodes_started, node_env
from tests.configs import composed
from tests.limits import at_most

TWO = ("launch.nnodes=2", "launch.rdzv_endpoint=10.0.0.1:29500")
STEP = {
    "SLURM_JOB_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "gpu[001-002]",
    "SLURM_STEP_NUM_TASKS": "2",
}


@pytest.mark.parametrize(
    ("words", "environ", "rank", "place"),
    [
        ((*TWO, "launch.node_rank=1"), {}, 1, "10.0.0.1:29500"),
        (TWO, {"SLURM_NODEID": "1"}, 1, "10.0.0.1:29500"),
        (("launch.nnodes=2",), STEP, 1, "gpu001:15001"),
        (("launch.nnodes=2",), STEP | {"MASTER_ADDR": "10.0.0.1"}, 1, "10.0.0.1:15001"),
        (
            ("launch.nnodes=2",),
            {
                "SLURM_NODEID": "1",
                "SLURM_STEP_NODELIST": "gpu[3,7]",
                "SLURM_JOB_ID": "2",
                "SLURM_STEP_ID": "0",
            },
            1,
            "gpu3:15062",
        ),
        ((*TWO, "launch.nnodes=3", "++launch.node_rank=2"), {}, 2, "10.0.0.1:29500"),
        (
            ("launch.nnodes=2", "launch.rdzv_endpoint='[fd00::1]:29500'", "launch.node_rank=0"),
            {},
            0,
            "fd00::1:29500",
        ),
    ],
)
def test_a_node_is_what_its_command_line_says_and_else_its_environment(words, environ, rank, place) -> None:
    environ = dict(environ)
    launch = node_env(words, environ)
    assert (launch.rank, launch.is_node, launch.has_external_launcher) == (rank, True, False)
    assert launch.name == f"node {rank}"
    assert f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}" == place


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        ((), {}),
        (("launch.nnodes=1",), {"SLURM_NODEID": "1"}),
        (("launch.nnodes=two",), {}),
        (("launch.nnodes=1:2",), {"SLURM_NODEID": "1"}),
    ],
)
def test_one_machine_has_no_place_among_several(words, environ) -> None:
    assert node_env(words, dict(environ)) == LaunchEnv()


@pytest.mark.parametrize(
    ("words", "environ", "rule"),
    [
        (("launch.nnodes=2", "launch.node_rank=0"), {}, "launch.rdzv_endpoint=null with launch.nnodes: "),
        (
            ("launch.nnodes=2", "launch.node_rank=0", "launch.rdzv_endpoint=10.0.0.1"),
            {},
            "launch.rdzv_endpoint=10.0.0.1 with launch.nnodes: it must be HOST:PORT",
        ),
        (TWO, {}, "launch.nnodes=2 with launch.node_rank=auto: "),
        ((*TWO, "launch.node_rank=2"), {}, "launch.nnodes=2 with launch.node_rank=2: "),
        (("launch.node_rank=1",), {}, "launch.node_rank=1 without launch.nnodes: "),
    ],
)
def test_a_place_that_is_none_is_refused(words, environ, rule) -> None:
    with pytest.raises(LauncherError, match=f"^{rule}") as raised:
        node_env(words, dict(environ))
    assert raised.value.exit_code == 2


def test_only_a_command_that_runs_one_job_has_machines(monkeypatch) -> None:
    monkeypatch.delenv("WANDB_SWEEP_PARAM_PATH", raising=False)
    assert run_overrides(["recipe=resnet18", "launch.nnodes=2"]) == ("recipe=resnet18", "launch.nnodes=2")
    for argv in (
        ["report", "runs"],
        ["-m", "recipe=resnet18"],
        ["recipe=resnet18", "--cfg", "job"],
        ["--no"],
    ):
        assert run_overrides(argv) is None
    assert without_node_rank(["seed=1", "+launch.node_rank=1"]) == ["seed=1"]


def limits(**changes) -> LaunchConfig:
    return replace(composed().launch, **changes)


ALONE, TORCHRUN = LaunchEnv(), LaunchEnv(0, 2, 0, 2, has_external_launcher=True)


@pytest.mark.parametrize(
    ("wish", "launch", "environ"),
    [
        *(
            ("auto", launch, {key: "2"})
            for launch in (ALONE, TORCHRUN)
            for key in ("SLURM_NNODES", "PET_NNODES", "SKYPILOT_NUM_NODES")
        ),
        ("auto", ALONE, {"OMPI_COMM_WORLD_SIZE": "2"}),
        ("auto", ALONE, {"PET_NNODES": "1:4"}),
        (2, ALONE, {}),
        (2, TORCHRUN, {}),
    ],
)
def test_a_host_that_would_train_alone_by_mistake_is_refused(wish, launch, environ) -> None:
    with pytest.raises(LauncherError, match=r"launch\.nnodes=") as raised:
        check_all_nodes_started(limits(nnodes=wish), launch, environ)
    named = next(iter(environ), "launch.nnodes") if launch is ALONE else ""
    assert str(raised.value).startswith(named)


@pytest.mark.parametrize(
    ("wish", "launch", "environ"),
    [
        ("auto", ALONE, {}),
        (1, ALONE, {"SLURM_NNODES": "2"}),
        ("auto", LaunchEnv(0, 4, 0, 2, has_external_launcher=True), {"SLURM_NNODES": "2"}),
        (2, LaunchEnv(0, 2, role="node"), {"SLURM_NNODES": "2"}),
    ],
)
def test_a_host_that_is_alone_on_purpose_trains(wish, launch, environ) -> None:
    check_all_nodes_started(limits(nnodes=wish), launch, environ)


@pytest.mark.slow
def test_node_0_waits_for_a_name_that_nobody_knows_no_longer_than_for_the_others(tmp_path) -> None:
    """It waited for five minutes and more, whatever launch.init_timeout_s said."""
    nodes = ("launch.nnodes=2", "launch.node_rank=0", "launch.rdzv_endpoint=nohost.invalid:29521")
    words = ("recipe=cnn", "data=digits", f"run.dir={tmp_path / 'run'}", "launch.init_timeout_s=1", *nodes)
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *words],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=at_most(60),
    )
    assert done.returncode == 6, done.stderr
    assert "within 1 s" in done.stderr
    assert "launch.rdzv_endpoint=nohost.invalid:29521" in done.stderr
