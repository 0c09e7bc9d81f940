"""The manifests for Kubeflow Trainer and SkyPilot: keys by the published schemas, commands by ours."""

import subprocess
from pathlib import Path

import pytest
import yaml

from launcher.commands.arguments import parse
from launcher.commands.train import request_of
from launcher.config.resolve import compose_jobs
from launcher.distributed.env import NODE, LaunchEnv
from launcher.launch.node_env import node_env

SCRIPTS = Path(__file__).parents[2] / "scripts"

# By key what its value is: a type, fields, [items]; `*` ends a key that must be there. Of these schemas:
# github.com/kubeflow/trainer, manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml, August 2026
ENV = [{"name*": str, "value": str, "valueFrom": dict}]
RESOURCES = {"limits": dict, "requests": dict, "claims": [{"name*": str, "request": str}]}
CONTAINER = {
    "name*": str,
    "env": ENV,
    "securityContext": dict,
    "volumeMounts": [{"name*": str, "mountPath*": str, "subPath": str, "readOnly": bool}],
}
POD = {
    "affinity": dict,
    "containers": [CONTAINER],
    "imagePullSecrets": list,
    "initContainers": [CONTAINER],
    "nodeSelector": dict,
    "schedulingGates": list,
    "securityContext": dict,
    "serviceAccountName": str,
    "terminationGracePeriodSeconds": int,
    "tolerations": list,
    "volumes": [
        {
            "name*": str,
            "persistentVolumeClaim": {"claimName*": str, "readOnly": bool},
            "emptyDir": {"medium": str, "sizeLimit": str},
        }
    ],
}
JOB = {"metadata": dict, "spec": {"template": {"metadata": dict, "spec": POD}}}
TRAIN_JOB = {
    "apiVersion*": str,
    "kind*": str,
    "metadata*": {"name*": str, "namespace": str, "labels": dict, "annotations": dict},
    "spec*": {
        "activeDeadlineSeconds": int,
        "initializer": dict,
        "managedBy": str,
        "runtimePatches": [
            {
                "manager*": str,
                "trainingRuntimeSpec": {
                    "template": {
                        "metadata": dict,
                        "spec": {"replicatedJobs": [{"name*": str, "template": JOB}]},
                    }
                },
            }
        ],
        "runtimeRef*": {"name*": str, "apiGroup": str, "kind": str},
        "suspend": bool,
        "trainer": {
            "image": str,
            "command": [str],
            "args": [str],
            "env": ENV,
            "numNodes": int,
            "numProcPerNode": int,
            "resourcesPerNode": RESOURCES,
        },
    },
}
# github.com/skypilot-org/skypilot, sky/utils/schemas.py of 2026; a part of its resources
TASK = {
    "name": str,
    "workdir": str,
    "num_nodes": int,
    "resources": {
        "infra": str,
        "accelerators": str,
        "cpus": str,
        "memory": str,
        "use_spot": bool,
        "job_recovery": {"strategy": str, "max_restarts_on_errors": int, "recover_on_exit_codes": [int]},
    },
    "file_mounts": dict,
    "volumes": dict,
    "envs": dict,
    "secrets": dict,
    "setup": str,
    "run": str,
}


def problems(value, shape, path=""):
    if isinstance(shape, type):
        return [] if type(value) is shape else [f"{path} is no {shape.__name__}"]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{path} is no list"]
        return [text for n, item in enumerate(value) for text in problems(item, shape[0], f"{path}[{n}]")]
    if not isinstance(value, dict):
        return [f"{path} has no fields"]
    fields = {key.rstrip("*"): inner for key, inner in shape.items()}
    lacks = [key[:-1] for key in shape if key.endswith("*") and key[:-1] not in value]
    found = [f"{path}.{key} is missing" for key in lacks]
    for key, item in value.items():
        known = key in fields
        found += problems(item, fields[key], f"{path}.{key}") if known else [f"{path}.{key} is unknown"]
    return found


def accepted(words):
    """The config of the command, once our command line has read it."""
    (config,) = compose_jobs(request_of(parse(words)))
    return config


def test_the_train_job_follows_the_schema_and_each_pod_finds_its_place():
    job = yaml.safe_load((SCRIPTS / "k8s/trainjob.yaml").read_text())
    assert problems(job, TRAIN_JOB) == []
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["python", "-m", "launcher"]
    config = accepted(trainer["args"])
    (patched,) = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = patched["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    # The names of the runtime torch-distributed: a patch of other names changes nothing.
    assert patched["name"] == container["name"] == "node"
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    assert config.run.dir.startswith(f"{mounted['runs']}/")
    assert pod["terminationGracePeriodSeconds"] > config.launch.grace_s
    environ = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "resnet50-node-0-0.resnet50",
        "PET_MASTER_PORT": "29400",
    }
    assert node_env(trainer["args"], environ) == LaunchEnv(rank=1, world_size=2, role=NODE)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("resnet50-node-0-0.resnet50", "29400")


def test_the_task_for_skypilot_follows_the_schema_and_comes_back_after_75(tmp_path):
    task = yaml.safe_load((SCRIPTS / "sky.yaml").read_text())
    assert problems(task, TASK) == []
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


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{num_node: 2}", ".num_node is unknown"),
        ("{num_nodes: two}", ".num_nodes is no int"),
        ("{resources: {job_recovery: {recover_on_exit_codes: 75}}}", "recover_on_exit_codes is no list"),
    ],
)
def test_a_manifest_that_breaks_the_schema_is_noticed(text, problem):
    assert [found for found in problems(yaml.safe_load(text), TASK) if found.endswith(problem)]
