"""WANDB_ variables: before the YAML, behind the command line. With wandb's own client and offline file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.errors import ConfigError
from launcher.telemetry.tracker.wandb_environment import with_environment
from tests.configs import composed
from tests.forked import launch_forked
from tests.telemetry.tracker.test_wandb_session import offline_records
from tests.telemetry.tracker.tiny import RECIPE, YAML

CANARY = "canary-0123456789abcdef0123456789abcdef01"
ALL = {
    "WANDB_PROJECT": "my project",
    "WANDB_ENTITY": "my-team",
    "WANDB_NAME": "a name",
    "WANDB_RUN_ID": "an-id",
    "WANDB_RUN_GROUP": "a-group",
    "WANDB_TAGS": "one, two",
    "WANDB_NOTES": "some notes",
    "WANDB_JOB_TYPE": "a-job-type",
    "WANDB_MODE": "offline",
    "WANDB_API_KEY": CANARY,
}


def train(directory: Path, *words: str, **environ: str) -> str:
    (directory / "own" / "recipe").mkdir(parents=True)
    (directory / "own" / "recipe" / "tiny.yaml").write_text(YAML + "tracker: {project: yaml, tags: [yaml]}\n")
    (directory / "mine.py").write_text(RECIPE)
    fixed = ["recipe=tiny", "recipes.path=mine.py", "--config-dir", "own", "train.max_steps=2"]
    done = launch_forked(directory, [*fixed, *words], HOME=str(directory), **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked(directory: Path):
    """The run record of wandb's offline file, and the environment that it has recorded as text."""
    records = list(offline_records(directory))
    return next(record.run for record in records if record.WhichOneof("record_type") == "run")


@pytest.mark.slow
def test_all_variables_reach_the_run(tmp_path: Path) -> None:
    out = train(tmp_path, "run.dir=run", **ALL, WANDB_DIR=str(tmp_path / "elsewhere"))
    run = tracked(tmp_path / "elsewhere")
    assert (run.project, run.entity, run.display_name) == ("my project", "my-team", "a name")
    assert (run.run_id, run.run_group, list(run.tags)) == ("an-id", "a-group", ["one", "two"])
    assert (run.notes, run.job_type) == ("some notes", "a-job-type")
    assert not (tmp_path / "run" / "wandb").exists()
    assert f"wandb sync {tmp_path}/elsewhere/wandb/offline-run-*" in out
    config = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert config["tracker"]["project"] == "my project"
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or CANARY.encode() not in file.read_bytes()


@pytest.mark.slow
def test_each_job_of_a_sweep_is_a_run_of_its_own(tmp_path: Path) -> None:
    train(tmp_path, "-m", "seed=0,1", "hydra.sweep.dir=sweep", **ALL)
    runs = [tracked(tmp_path / "sweep" / job) for job in ("0_seed=0", "1_seed=1")]
    assert [run.run_id for run in runs] == ["an-id-0", "an-id-1"]
    assert [run.display_name for run in runs] == ["a name-0_seed=0", "a name-1_seed=1"]
    assert {run.run_group for run in runs} == {"a-group"}


@pytest.mark.slow
def test_a_run_of_wandbs_agent_is_the_one_that_it_has_named(tmp_path: Path) -> None:
    """wandb takes project, entity and id from the variables alone there, whatever it is called with."""
    file = tmp_path / "values.yaml"
    file.write_text("wandb_version: 1\n\noptim.clip_norm:\n  value: null\n")
    environ = {**ALL, "WANDB_SWEEP_ID": "the-sweep", "WANDB_SWEEP_PARAM_PATH": str(file)}
    train(tmp_path, "optim.clip_norm=None", "tracker.run_id=typed", **environ)
    (directory,) = (tmp_path / "outputs" / "tiny").iterdir()
    assert directory.name == "the-sweep-an-id"
    run = tracked(directory)
    assert (run.run_id, run.project, run.entity) == ("an-id", "my project", "my-team")
    assert run.sweep_id == "the-sweep"
    events = (directory / "metrics.jsonl").read_text().splitlines()
    assert any('"an-id"' in event for event in events)


def environment_of(*overrides: str, **environ: str):
    return with_environment(composed("tracker.project=x"), overrides, environ).tracker


@pytest.mark.parametrize(
    ("overrides", "environ", "key", "value"),
    [
        ((), {"WANDB_PROJECT": "p"}, "project", "p"),
        (("tracker.project=x",), {"WANDB_PROJECT": "p"}, "project", "x"),
        (("tracker=wandb",), {"WANDB_PROJECT": "p"}, "project", "p"),
        ((), {"WANDB_PROJECT": ""}, "project", "x"),
        ((), {"WANDB_TAGS": "a,,b ,"}, "tags", ("a", "b")),
        ((), {"WANDB_MODE": "offline"}, "mode", "auto"),
        ((), {}, "run_id", None),
    ],
)
def test_who_wins(overrides, environ, key, value) -> None:
    assert getattr(environment_of(*overrides, **environ), key) == value


@pytest.mark.parametrize(
    "environ", [{"WANDB_PROJECT": "a/b"}, {"WANDB_RUN_ID": "a:b"}, {"WANDB_ENTITY": "x" * 129}]
)
def test_what_wandb_would_refuse_is_refused_by_the_name_of_its_variable(environ) -> None:
    ((name, value),) = environ.items()
    with pytest.raises(ConfigError, match=f"{name}={value} in the environment: must be "):
        environment_of(**environ)
