"""The manifests for Kubeflow Trainer and SkyPilot start runs that find their place among several machines."""

import re
import subprocess
from pathlib import Path

import yaml

from launcher.commands.arguments import parse
from launcher.config.composition import Request
from launcher.config.resolve import compose_jobs
from launcher.distributed.env import NODE, LaunchEnv
from launcher.launch.node_env import node_env

SCRIPTS = Path(__file__).parents[2] / "scripts"


def accepted(words):
    """The config of the command, once our command line has read it."""
    (config,) = compose_jobs(Request(parse(words).positionals))
    return config


def test_each_pod_of_the_train_job_finds_its_place():
    job = yaml.safe_load((SCRIPTS / "k8s/trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["python", "-m", "launcher"]
    environ = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "resnet50-node-0-0.resnet50",
        "PET_MASTER_PORT": "29400",
    }
    # As Kubernetes does.
    words = [re.sub(r"\$\((\w+)\)", lambda name: environ[name[1]], word) for word in trainer["args"]]
    config = accepted(words)
    (patched,) = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = patched["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    # The names of the runtime torch-distributed: a patch of other names changes nothing.
    assert patched["name"] == container["name"] == "node"
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    assert config.run.dir.startswith(f"{mounted['runs']}/")
    assert pod["terminationGracePeriodSeconds"] > config.launch.grace_s
    assert node_env(words, environ) == LaunchEnv(rank=1, world_size=2, role=NODE)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("resnet50-node-0-0.resnet50", "29400")


def test_the_task_for_skypilot_finds_its_place_and_comes_back_after_75(tmp_path):
    task = yaml.safe_load((SCRIPTS / "sky.yaml").read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    run = tmp_path / "scripts/run"
    run.parent.mkdir()
    run.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\nexit 75\n")
    run.chmod(0o755)
    environ = {
        "PATH": "/usr/bin:/bin",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.7",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_TASK_ID": "sky-managed-2026-11-23-20-00-00-123456_resnet50_1-0",
    }
    done = subprocess.run(
        ["bash", "-c", task["run"]], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 75, done.stderr
    words = done.stdout.splitlines()
    config = accepted(words)
    assert config.run.dir == f"/runs/{environ['SKYPILOT_TASK_ID']}"
    assert (config.launch.nproc, config.launch.nnodes, config.launch.node_rank) == (8, 2, 1)
    assert node_env(words, environ) == LaunchEnv(rank=1, world_size=2, role=NODE)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("10.0.0.4", "29500")
